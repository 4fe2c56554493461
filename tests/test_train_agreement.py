"""Processes that disagree stop at the start, by name; a run does not go on with other labels."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import FEW_IMAGES, NUM_CLASSES, REAL, ROOT, command_of, error_of, face, run_train, small_run, write_dataset

import train
from data.recordio.image_record import RecordWriter, pack
from utils.checkpoint.format import list_checkpoints
from utils.distributed import SharedError

# as typed on rank 2 alone, and what the others have
_SETTINGS = {
    "optimizer.lr=0.1": "0.05", "run.seed=7": "2048", "optimizer.name=adamw": "sgd", "train.precision=bf16": "fp32",
    "head.sample_rate=0.5": "1.0", "head.storage=lean": "exact", "train.batch_size=24": "12", "train.accumulation=2": "1",
    "train.epochs=3.0": "2.0", "eval.every=3": "8", "log.every=2": "1", "data.flip=false": "true",
}  # fmt: skip


def _write_labels(folder: Path, shift: int, more: bytes = b"") -> None:
    """Write the set of `write_dataset` with each label moved on by `shift`, and with `more` behind each image."""
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key in range(FEW_IMAGES):
            label = (key + shift) % NUM_CLASSES
            writer.write(key, pack(float(label), key, 0, face(key % NUM_CLASSES, key) + more))


def _train_expecting(words: str, config: str, overrides: list[str], run: Path) -> None:
    """Train in this process; it must end with these words before the run has a folder."""
    started = time.monotonic()
    with pytest.raises(SharedError, match=words):
        train.train(train.load_config(config, overrides, train.NAMED), train.StopSignal())
    assert not run.exists()
    assert time.monotonic() - started < 120  # no rank waits for another until run.timeout_minutes are over


def _disagree(rank: int, world_size: int, dataset: str, output: str) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", rank)):
        os.environ[name] = str(value)
    (Path(output) / str(rank)).mkdir()
    config, *rest = small_run(Path(dataset), Path(output) / str(rank), f"run.output={output}", "train.batch_size=12")
    run = Path(output) / "tiny"
    for setting, other in _SETTINGS.items():
        key, _, value = setting.partition("=")
        words = f"^the processes disagree: {key} is {other} on rank 0-1, {re.escape(value)} on rank 2. Fix: "
        _train_expecting(words, config, [*rest, *([setting] if rank == 2 else [])], run)
    copy = Path(output) / "copy"
    if rank == 2:
        shutil.copytree(dataset, copy)
        _write_labels(copy, 5)
        rest.append(f"data.path={copy}")
    words = r"^the processes disagree: hash of the labels is \w+ on rank 0-1, \w+ on rank 2. Fix: data.path"
    _train_expecting(words, config, rest, run)
    if rank == 2:  # the labels as they were, but longer records
        _write_labels(copy, 0, b"more")
    words = r"^the processes disagree: hash of the places of the images is \w+ on rank 0-1, \w+ on rank 2. Fix: data.path"
    _train_expecting(words, config, rest, run)
    if rank == 2:  # the records as they were, but one pair of the verification set is another
        write_dataset(copy, FEW_IMAGES)
        with open(copy / "tiny.bin", "r+b") as file:
            whole = file.read()
            place = whole.index(b"\xff\xd8\xff") + 300
            file.seek(place)
            file.write(bytes([whole[place] ^ 1]))
    _train_expecting(r"^the processes disagree: hash of tiny is \w+ on rank 0-1, \w+ on rank 2. Fix", config, rest, run)
    if rank == 2:
        write_dataset(copy, FEW_IMAGES)
    own = [f"run.output={output}/{min(rank, 1)}"]
    _train_expecting(r"^rank [12].*: run.output: .*/1/tiny is not the same folder as on rank 0", config, [*rest, *own], run)
    # another place, other resources, and a path in place of a name: the same run
    own = ["data.threads=3", f"eval.targets=[{dataset}/tiny.bin]", f"data.index_cache={output}/{rank}"]
    shared = [f"run.output={output}", "train.max_steps=2"]
    train.train(train.load_config(config, [*rest, *shared, *(own if rank == 2 else [])], train.NAMED), train.StopSignal())
    if rank == 0:  # which looks, and all ranks refuse
        (run / "notes").symlink_to(dataset)
    with pytest.raises(SharedError, match=r"run.output: .* notes in it is a link out of the folder, to "):
        train.train(train.load_config(config, [*rest, *shared], train.NAMED), train.StopSignal())


def test_a_rank_with_other_settings_or_data_is_named_on_all(run_ranks: Callable[..., None], dataset: Path, tmp_path: Path):
    run_ranks(_disagree, 3, str(dataset), str(tmp_path))
    assert len(list_checkpoints(tmp_path / "tiny")) == 1


def _copy_program(folder: Path) -> Path:
    for package in ROOT.glob("*/__init__.py"):
        name = package.parent.name
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for program in ROOT.glob("*.py"):
        shutil.copy(program, folder)
    return folder / "train.py"


def test_another_version_of_the_program_on_one_machine_is_one_line(dataset: Path, tmp_path: Path):
    changed = _copy_program(tmp_path / "changed")
    with open(tmp_path / "changed" / "utils" / "schedule.py", "a") as file:
        file.write("# another version\n")
    start = tmp_path / "start.py"
    start.write_text(
        "import os, runpy, sys\n"
        f"place = {str(changed)!r} if os.environ['RANK'] == '1' else {str(ROOT / 'train.py')!r}\n"
        "sys.path[0] = os.path.dirname(place)\n"
        "runpy.run_path(place, run_name='__main__')\n"
    )
    command = command_of(2, small_run(dataset, tmp_path, REAL, "train.max_steps=4", "eval.targets=[]"))
    command[command.index(str(ROOT / "train.py"))] = str(start)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode != 0
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    words = r"error: the processes disagree: utils/schedule.py is \w{16} on rank 0, \w{16} on rank 1. Fix: .*same version"
    assert re.match(words, error), error
    assert not (tmp_path / "tiny").exists()


def test_a_run_goes_on_with_a_copy_but_not_with_other_labels(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    begin = small_run(dataset, tmp_path, "train.max_steps=4", "eval.targets=[]")
    assert train.main(begin) == 0
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    again = small_run(copy, tmp_path, "train.max_steps=6", "eval.targets=[]")
    assert train.main(again) == 0
    _write_labels(copy, 5)
    capsys.readouterr()
    error = error_of(train.main([*again, "train.max_steps=8"]), capsys)
    assert re.search(r"the labels of the data .* have changed since .*; train on the original data, or", error), error
    assert "init.backbone" in error


def test_other_labels_of_drawn_data_and_mixtures_are_seen(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    few = ["train.max_steps=4", "eval.targets=[]"]
    shutil.copytree(dataset, tmp_path / "copy")
    _write_labels(tmp_path / "copy", 5)
    synthetic = ["data.source=synthetic", f"data.num_classes={NUM_CLASSES}", f"data.num_images={FEW_IMAGES}"]
    assert train.main(small_run(dataset, tmp_path, *few, *synthetic)) == 0
    assert train.main(small_run(tmp_path / "copy", tmp_path, *few)) == 1  # as many images and classes
    assert "the labels of the data" in capsys.readouterr().err

    classes, names = tmp_path / "classes.txt", [(source, label) for source in (0, 1) for label in range(NUM_CLASSES)]
    sources = [f"data.sources=[{{path: {dataset}}}, {{path: {dataset}}}]", "data.path=''", "run.name=mixture"]
    for exchanged in (False, True):
        to = [f"{source} {label} {(source != exchanged) * NUM_CLASSES + label}" for source, label in names]
        classes.write_text("\n".join(to))
        assert train.main(small_run(dataset, tmp_path, *few, *sources, f"data.labels={classes}")) == int(exchanged)
    assert "the labels of the data" in capsys.readouterr().err


def test_a_checkpoint_of_a_version_that_kept_no_hash_of_labels_still_resumes(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "train.max_steps=4", "eval.targets=[]")
    assert run_train(1, arguments).returncode == 0
    (checkpoint,) = list_checkpoints(tmp_path / "tiny")
    manifest = checkpoint / "manifest.json"
    text = manifest.read_text()
    older = re.sub(r',\s*"labels": "\w{32}"', "", text)
    assert older != text
    manifest.write_text(older)
    done = run_train(1, [*arguments, "train.max_steps=6"])
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
