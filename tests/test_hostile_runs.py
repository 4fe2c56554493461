"""Folders of strangers: a run that is resumed, evaluated or described, and an output that goes on, write nothing outside."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from gallery_runs import write_network, write_people
from tiny_runs import error_of, run_program, run_train, small_run

import train
from eval.__main__ import main as evaluate
from scripts.data import folder_to_rec
from scripts.data import inspect as inspect_data
from scripts.deploy import card, embed, enrol, export, gallery
from scripts.launch import train as launch
from utils.checkpoint import resume
from utils.checkpoint.format import list_checkpoints, step_of

FILES = (".lock", ".holder", "config.yaml", "train.log", "metrics.jsonl", "results.json", "results.md", "verification.png")


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder of two steps."""
    folder = tmp_path_factory.mktemp("whole")
    assert train.main(small_run(dataset, folder, "train.max_steps=2")) == 0
    return folder / "tiny"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, beside a folder of the user."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary").write_text("mine")
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


def _plant(path: Path, target: Path | None) -> None:
    """Put a link, or a pipe for None, in the place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path) if target is None else path.symlink_to(target)


def _state(*folders: Path) -> dict[Path, object]:
    """Return what is below folders: the bytes of a file, the target of a link."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    return {path: os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes() for path in paths}


_CASES = [
    *((name, "mine/diary") for name in FILES),
    *((name, "mine/new") for name in (".lock", "train.log", "metrics.jsonl", "notes/deep/file")),
    *((name, "mine") for name in ("tensorboard", "checkpoints", "checkpoints/.step_00000004.partial")),
    *((name, None) for name in (*FILES, "tensorboard", "checkpoints/step_00000002/pipe")),
]


@pytest.mark.parametrize(("name", "target"), _CASES)
def test_a_run_folder_with_a_link_out_of_it_or_a_pipe_is_not_resumed_and_nothing_is_written(
    dataset: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, target: str | None
):
    _plant(run / name, target if target is None else tmp_path / target)
    arguments = small_run(dataset, tmp_path, "train.max_steps=4", "eval.targets=[]")
    before = _state(run, tmp_path / "mine")
    for more in ([], ["--check"]):
        said = error_of(train.main([*arguments, *more]), capsys)
        what = (
            f"link out of the folder, to {tmp_path / target}; move that here, or" if target else "pipe, a socket or a device;"
        )
        assert said.startswith(f"error: run.output: the run folder {run} cannot be written: {name} in it is a {what} remove ")
    assert _state(run, tmp_path / "mine") == before


def test_a_training_in_several_processes_refuses_a_link_out_of_the_run_folder(dataset: Path, run: Path, tmp_path: Path):
    for name, target, ranks in (("metrics.jsonl", "mine/diary", 2), ("tensorboard", "mine", 3), ("tensorboard", "mine", 0)):
        _plant(run / name, tmp_path / target)
        before = _state(run, tmp_path / "mine")
        words = small_run(dataset, tmp_path, "train.batch_size=6", "eval.targets=[]", "run.device=cpu")
        done = run_train(ranks, words) if ranks else run_program(launch.main, [["--processes=2", *words]])
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert done.stderr.count("error: ") == 1 and "run.output: the run folder" in done.stderr
        assert f"{name} in it is a link out of the folder, to {tmp_path / target}" in done.stderr
        assert _state(run, tmp_path / "mine") == before
        (run / name).unlink()


def test_links_within_a_run_folder_and_to_it_are_the_users_own(dataset: Path, run: Path, tmp_path: Path):
    (run / "best").symlink_to("checkpoints/step_00000002")
    (run / "notes").mkdir()
    (run / "notes" / "up").symlink_to(run)
    shutil.move(run, tmp_path / "disk")
    run.symlink_to("disk")
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=4", "eval.targets=[]")) == 0
    assert [step_of(path) for path in list_checkpoints(tmp_path / "disk")] == [2, 4] and (run / "best").is_symlink()


def test_a_link_that_appears_after_the_check_is_replaced_or_refused_and_never_followed(
    dataset: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resume, "check_own", lambda folder: None)
    arguments = small_run(dataset, tmp_path, "train.max_steps=3")
    for name, target in ((".lock", "diary"), (".lock", ""), ("train.log", "diary"), ("train.log", ""), ("metrics.jsonl", "")):
        (run / name).rename(tmp_path / "kept")
        _plant(run / name, tmp_path / "mine" / target if target else None)
        assert train.main(arguments) == 1
        assert "it is a link, a pipe or a device, and must be a regular file\n" in capsys.readouterr().err
        (tmp_path / "kept").replace(run / name)
    for name in (".holder", "config.yaml", "metrics.jsonl", "results.json", "results.md", "verification.png"):
        _plant(run / name, tmp_path / "mine" / "diary")
    assert train.main(arguments) == 0
    assert (tmp_path / "mine" / "diary").read_text() == "mine"
    assert json.loads((run / "results.json").read_text())["tiny"] and not (run / "results.json").is_symlink()


@pytest.mark.parametrize("pipe", [False, True])
def test_the_report_of_a_run_stays_in_its_folder(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pipe: bool):
    names = ("report.html", "results.json", "results.md", "verification.png", "curves.png")
    for name in names:
        _plant(run / "evaluation" / name, None if pipe else tmp_path / "mine" / "diary")
    assert evaluate([str(run), "--device", "cpu", "--threads", "1"]) == 0
    assert json.loads((run / "evaluation" / "results.json").read_text())["tiny"]
    assert all((run / "evaluation" / name).stat().st_size > 99 for name in names)
    _plant(run / "evaluation", tmp_path / "mine")
    capsys.readouterr()
    assert evaluate([str(run), "--device", "cpu", "--threads", "1"]) == 0
    said = capsys.readouterr()
    assert "accuracy" in said.out
    assert said.err.endswith(f"\nwarning: {run / 'evaluation'}: no report: it is a link; name another folder with --report\n")
    assert _state(tmp_path / "mine") == {tmp_path / "mine" / "diary": b"mine"}


_ENROL, _REGULAR = "NETWORK OUT/g PEOPLE SIZES", "must be a regular file"
_OUTPUTS: list[tuple[Any, str, str, str]] = [
    (enrol, _ENROL, "g", _REGULAR),
    (enrol, _ENROL, "g-journal", _REGULAR),
    (gallery, "show OUT/g", "g", _REGULAR),
    (card, "NETWORK SIZES --out OUT", "card.md", "is no card of this program"),
    (export, "NETWORK SIZES --out OUT/x.pt2", ".x.pt2.unfinished", "another program is writing there"),
    (embed, "NETWORK PEOPLE SIZES --out OUT/e.npy --again", "e.npy.unfinished", _REGULAR),
    *((embed, "NETWORK PEOPLE SIZES --out OUT/e.npy --again", name, "") for name in ("e.npy", "e.csv")),
    *((inspect_data, "PEOPLE --out OUT", name, "") for name in ("report.json", "report.html")),
    *((folder_to_rec, "PEOPLE OUT --overwrite --size 48", f"train.{end}", "") for end in ("rec.unfinished", "idx.unfinished")),
    *((folder_to_rec, "PEOPLE OUT --overwrite --size 48", name, "") for name in ("train.rec", "train.lst", "property")),
]


@pytest.mark.parametrize("pipe", [False, True])
@pytest.mark.parametrize(("program", "words", "name", "says"), _OUTPUTS)
def test_no_program_writes_through_a_link_or_waits_for_a_pipe_where_its_output_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: Any, words: str, name: str, says: str, pipe: bool
):
    out, mine, people = tmp_path / "out", tmp_path / "mine", write_people(tmp_path / "people", 2, 1)
    mine.write_text("mine")
    network = write_network(tmp_path / "w.pt")
    for key, value in {"NETWORK": network[0], "SIZES": " ".join(network[1:]), "PEOPLE": people, "OUT": out}.items():
        words = words.replace(key, str(value))
    _plant(out / name, None if pipe else mine)
    if name == "g-journal":  # that of a new gallery is removed, that of one with contents refused
        assert program.main(words.split()) == 0
        _plant(out / name, None if pipe else mine)
    assert program.main(words.split()) == bool(says)
    said = capsys.readouterr().err
    assert says in said and (not says or said.count("\nerror: ") + said.startswith("error: ") == 1)
    assert mine.read_text() == "mine" and (says or (out / name.removesuffix(".unfinished")).is_file())
