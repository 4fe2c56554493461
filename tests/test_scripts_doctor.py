"""`face doctor` says what is there and what is missing, whatever is missing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import doctor
from utils.checkpoint.format import checkpoint_path
from utils.machine import num_cores
from utils.text import pip_install

ROOT = Path(__file__).parent.parent


def _run(*options: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, *options, ROOT / "face_training.py", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **variables})
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_without_any_package_it_names_each_with_its_pinned_version_and_fails():
    status, said = _run("-S", PATH="/nonexistent", PYTHONPATH="")
    assert status == 1 and "Traceback" not in said
    assert said.splitlines()[-1].startswith("training cannot run: torch is missing, ")
    required = [pin for pin in doctor.read_pins(ROOT / "requirements.txt")]
    optional = [pin for pin in doctor.read_pins(ROOT / "requirements-optional.txt")]
    assert len(required) >= 10 and len(optional) >= 5
    for start, pin in [*(("{} +missing; ", pin) for pin in required), *(("optional +no {}: .+ ", pin) for pin in optional)]:
        advice = rf"\S+ -m pip install {pin.package}=={re.escape(pin.version)} -c "
        assert re.search(f"^{start.format(pin.package)}{advice}", said, re.M)
    assert re.search("^GPU +none with a driver", said, re.M) and re.search("^C compiler +none: the head computes", said, re.M)


def test_a_package_that_cannot_be_imported_or_has_another_version_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "broken_package.py").write_text("raise OSError('libgomp.so.1: cannot open\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    fault, note = doctor.check_package(doctor.Pin("broken_package", "1.0", ""))
    assert (fault, note) == (f"cannot be imported (libgomp.so.1: cannot open); {pip_install('broken_package==1.0')}", "")
    fault, note = doctor.check_package(doctor.Pin("numpy", "0.1", ""))
    assert fault == "" and note.endswith("but the tests run with 0.1")


def test_it_reports_the_machine_and_the_newest_run_where_training_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    driver, run = tmp_path / "nvidia-smi", tmp_path / "runs" / "mine"
    driver.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 575.1'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "left_to_container", lambda: 3 << 28)
    monkeypatch.setenv("CC", r"printf '\374 15'")  # a translated name, in Latin-1
    checkpoint_path(run, 12).mkdir(parents=True)
    (checkpoint_path(run, 12) / "manifest.json").write_text("{}")
    (run / "config.yaml").write_text("")
    assert doctor.main(["--runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    for line in (
        "processor +.+: .+",
        rf"cores +{num_cores()} of \d+",
        r"memory +0\.8 GiB free of [\d.]+$",
        "GPU +NVIDIA H100, 81559 MiB, 575.1; torch sees",
        "torch +2",
        "C compiler +\ufffd 15$",
        f"newest run +{run}, step_00000012",
    ):
        assert re.search(f"^{line}", said, re.M), line
    assert said.endswith("\ntraining can run\n")
    monkeypatch.setattr(doctor, "_read", lambda path: "MemTotal:       16384000 kB\n")
    assert doctor.memory() == "unknown"  # what is free, which is not none
