"""`face` starts every program, from any folder, by any path to it, and imports none to list them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

import face_training
from scripts import face

ROOT = Path(__file__).parent.parent
FACE = ROOT / "face"


def _start(*arguments: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "FACE_VENV": "/nonexistent", **variables}
    return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.parametrize("verb", face.all_verbs())
def test_a_verb_starts_its_program_which_calls_itself_by_the_verb(verb: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        face.main([*verb.split(), "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith(f"usage: face {verb} ")
    assert f"python -m {face.all_verbs()[verb].removesuffix('.__main__')} " not in said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with packages of a user that have the names of ours."""
    for name in ("utils", "data", "eval", "configs", "scripts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    return tmp_path


def test_a_link_to_it_starts_the_program_of_the_clone(folder: Path):
    (folder / "face").symlink_to(FACE)
    (folder / "again").symlink_to("face")
    for link in (folder / "face", "./again"):
        done = _start(link, "data", "verify", "a b", folder=folder, PYTHON="/bin/echo")
        assert (done.stdout, done.stderr) == (f"{ROOT}/face_training.py data verify a b\n", "")


@pytest.mark.parametrize("how", ["path", "console script", "module"])
def test_it_works_in_any_folder_even_one_with_packages_of_these_names(folder: Path, how: str):
    starts: dict[str, list[str | Path]] = {
        "path": [FACE],
        "console script": [sys.executable, "-c", "import sys, face_training; sys.exit(face_training.main())"],
        "module": [sys.executable, "-m", "face_training"],
    }
    (folder / "mine").mkdir()
    (folder / "mine" / "train.rec").write_bytes(bytes.fromhex("0a23d7ce") + bytes(96))
    (folder / "mine" / "train.idx").touch()
    done = _start(*starts[how], "data", "verify", "mine", folder=folder, PYTHONPATH=f"{folder}:{ROOT}")
    assert done.returncode == 1 and done.stderr.startswith("error: 1 of 1 set(s) have faults: mine"), done.stderr
    assert "the index is empty. face data repair rebuilds it" in done.stderr  # a program is called by its verb


def test_names_of_files_are_utf_8_in_any_locale(folder: Path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = _start(FACE, "data", "verify", "Jos\u00e9", folder=folder, **locale)
    assert "faults: Jos\u00e9: no such set" in done.stderr


def test_a_name_in_configs_is_found_from_any_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    done = _start(FACE, "train", "ms1mv3_r50", "--print-config", folder=folder)
    assert done.returncode == 0 and "num_classes: 93431" in done.stdout, done.stderr
    monkeypatch.chdir(folder)
    for name in ("ms1mv3_r50.yaml", str(ROOT / "configs" / "ms1mv3_r50")):
        assert face.main(["train", name, "--print-config"]) == 0 and capsys.readouterr().out == done.stdout
    assert face.main(["train", "ms1mv3_r5O"]) == 1
    assert capsys.readouterr().err.endswith(f"Did you mean {ROOT}/configs/ms1mv3_r50.yaml?\n")


def test_the_console_script_is_the_function_of_a_module_with_a_name_of_its_own():
    project = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\nface = "face_training:main"\n' in project and callable(face_training.main)
    assert 'py-modules = ["face_training", "train"]' in project


def test_the_list_has_every_verb_and_needs_no_package(folder: Path):
    program = (
        "import sys, face_training\ntry: face_training.main()\n"
        "finally: assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)"
    )
    for arguments in ([], ["--help"]):
        done = _start(sys.executable, "-c", program, *arguments, folder=folder, PYTHONPATH=str(ROOT))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("\nface ") == 4 and done.stdout.startswith("face train ms1mv3_r50")  # five examples
        for verb in face.all_verbs():
            assert f"  face {verb} " in done.stdout or verb.removeprefix("bench ") in done.stdout.split("face bench NAME")[1]
    done = subprocess.run([sys.executable, "-m", "scripts"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == _start(FACE, folder=folder).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "Did you mean train?"),
        (["data", "inspekt"], "Did you mean data inspect?"),
        (["enroll"], "Did you mean enrol?"),
        (["migrate", "nothing"], "There are config, checkpoint, export"),
        (["nothing"], "`face` alone lists them"),
    ],
)
def test_a_mistyped_verb_is_one_line_that_names_the_nearest(words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert face.main(words) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("error: face ") and said in error and error.count("\n") == 1


def test_a_group_alone_lists_its_programs(capsys: pytest.CaptureFixture[str]):
    for words in (["bench"], ["bench", "--help"]):
        assert face.main(words) == 0
        said = capsys.readouterr().out.splitlines()
        assert all(line.startswith("face bench ") and len(line.split()) > 4 for line in said) and len(said) > 3


def test_the_interpreter_is_that_of_the_environment_of_the_clone(tmp_path: Path):
    clone = tmp_path / "a clone"
    clone.mkdir()
    shutil.copy(FACE, clone)

    def add_environment(name: str) -> None:
        (clone / name / "bin").mkdir(parents=True)
        (clone / name / "bin" / "python").write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (clone / name / "bin" / "python").chmod(0o755)

    add_environment("other")
    python = clone / "other" / "bin" / "python"
    expected = f"{clone}/face_training.py eval --x\n"
    assert (
        _start(clone / "face", "eval", "--x", folder=tmp_path, FACE_VENV="", PYTHON=str(python)).stdout == f"other {expected}"
    )
    add_environment(".venv")
    assert _start(clone / "face", "eval", "--x", folder=tmp_path, FACE_VENV="").stdout == f".venv {expected}"
    assert _start(clone / "face", "eval", "--x", folder=tmp_path, FACE_VENV="other").stdout == f"other {expected}"
    absolute = _start(clone / "face", "eval", "--x", folder=tmp_path, FACE_VENV=str(clone / "other"))
    assert absolute.stdout == f"other {expected}"


def test_a_missing_package_is_a_line_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    missing = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    monkeypatch.setattr(face.importlib, "import_module", mock.Mock(side_effect=missing))
    assert face.main(["eval", "x"]) == 1
    said = capsys.readouterr().err
    assert "has no package torch." in said and "scripts/quickstart.sh" in said and said.count("\n") == 1
    missing.name = "utils.nothing"  # a mistake of ours is shown
    with pytest.raises(ModuleNotFoundError):
        face.main(["eval", "x"])


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1200
