"""Trainings that take a second or two: their data, their command line, and what they leave behind."""

import contextlib
import functools
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cv2
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import train
from backbones.iresnet import Block, autocast_off
from backbones.kprpe import KeypointTransformer
from backbones.mobilefacenet import MobileFaceNet
from backbones.vit import Form, VisionTransformer
from data.recordio.image_record import RecordWriter, pack
from eval.pair_sets.bin_file import write_bin
from scripts import checkpoint as checkpoint_program
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import read_backbone, shard_reader

ROOT = Path(__file__).parent.parent
NUM_CLASSES, NUM_IMAGES = 12, 60
FEW_IMAGES = 30  # of small runs, which have as many steps in an epoch
IRESNET = "backbone.name=r18"  # for what concerns its layers; the network of the other runs is faster
REAL = "backbone.name=mbf"  # for programs that are no forks: they do not know of `shallow`


class OneBlock(nn.Module):
    """A network that compiles in seconds."""

    def __init__(self, embedding_size: int = 512, width: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 16, 16, 16, bias=False), Block(16, 16, 1)
        self.dropout, self.fc = nn.Dropout(dropout), nn.Linear(16 * 7 * 7, embedding_size)

    def forward(self, images: Tensor) -> Tensor:
        x = self.dropout(self.block(self.stem(images)).flatten(1))
        with autocast_off(x.device.type):
            return self.fc(x.to(self.fc.weight.dtype))


SHALLOW = {  # a quarter of the layers of mbf, and half of the time; a third of those of vit_t
    "shallow": functools.partial(MobileFaceNet, (1, 0, 0, 0), 2),
    "one_block": OneBlock,
    "shallow_vit": functools.partial(VisionTransformer, Form(256, 4), drop_path=0.1, mask_ratio=0.1),
    "vit_kprpe_shallow": functools.partial(KeypointTransformer, Form(256, 2, heads=4, times=2, patch=8)),
}


@functools.cache  # many tests write the same set
def face(label: int, number: int) -> bytes:
    """Return a JPEG of coarse coloured tiles, the class's, under noise."""
    tiles = np.random.default_rng(label).integers(40, 215, (7, 7, 3)).astype(np.uint8)
    noise = np.random.default_rng(1000 + number).normal(0, 12, (112, 112, 3))
    pixels = cv2.resize(tiles, (112, 112), interpolation=cv2.INTER_NEAREST) + noise
    return cv2.imencode(".jpg", pixels.clip(0, 255).astype(np.uint8))[1].tobytes()


def write_dataset(folder: Path, num_images: int = NUM_IMAGES) -> None:
    """Write a RecordIO set of so many images and a verification set of other classes, `tiny`; make the folder if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key in range(num_images):
            writer.write(key, pack(float(key % NUM_CLASSES), key, 0, face(key % NUM_CLASSES, key)))
    (folder / "property").write_text(f"{NUM_CLASSES},112,112")
    same = [bool(pair % 2) for pair in range(20)]
    images = [face(50 + pair + (side and not same[pair]), 2 * pair + side) for pair in range(20) for side in (0, 1)]
    write_bin(folder / "tiny.bin", images, same)


def write_old_and_new(folder: Path) -> None:
    """Write the sets `data` and `more`, the same people in reverse order behind three new ones, and `map.txt`."""
    for name in ("data", "more"):
        (folder / name).mkdir()
    write_dataset(folder / "data")
    with RecordWriter(folder / "more" / "train.rec", folder / "more" / "train.idx") as writer:
        for key in range(NUM_IMAGES + 15):  # label 14 - k is the old label k, labels 0, 1, 2 are new people
            label = 14 - key % 15
            writer.write(key, pack(float(label), key, 0, face(14 - label if label > 2 else 100 + label, key)))
    (folder / "map.txt").write_text("# old new\n" + "".join(f"{old} {14 - old}\n" for old in range(NUM_CLASSES)))


def tiny_run(dataset: Path, output: Path, *overrides: str, image_size: int = 112, batch_size: int = 8) -> list[str]:
    """Write the configuration of a run; return the command line of train.py."""
    config = output / "tiny.yaml"
    config.write_text(
        f"run: {{output: {output}, threads: 1}}\n"
        f"data: {{path: {dataset}, image_size: {image_size}}}\n"
        f"backbone: {{name: {'mbf' if REAL in overrides else 'shallow'}, width: 0.125, embedding_size: 16}}\n"
        "loss: {name: cosface, margin: 0.2, scale: 16}\n"
        "head: {chunk: 5}\n"
        f"train: {{batch_size: {batch_size}, epochs: 2}}\n"
        "optimizer: {lr: 0.05}\n"
        "checkpoint: {every: 4}\n"
        "log: {every: 1}\n"
        "eval: {targets: [tiny], every: 8, batch_size: 16}\n"
    )
    return [str(config), *overrides]


def small_run(dataset: Path, output: Path, *overrides: str) -> list[str]:
    """Write the configuration of a run for which no test needs more: a step takes a third of the time of one of `tiny_run`."""
    return tiny_run(dataset, output, *overrides, image_size=48, batch_size=4)


def read_metrics(run: Path, kind: str = "train") -> dict[int, dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records if record["kind"] == kind}


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = list_checkpoints(run)[-1]
    return {**read_backbone(newest), **shard_reader(newest)(0, NUM_CLASSES)}


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], said: object = "") -> None:
    """Compare tensors by name; an error says `said` and what differs."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    different = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not different, f"{said}: {different}"


def equal_weights(one: Path, other: Path, said: str = "") -> dict[str, torch.Tensor]:
    """Return the weights at the end of two runs, which must be the same bits; an error says `said` and what differs."""
    first = final_weights(one)
    same_bits(first, final_weights(other), f"{said} {one}, {other}")
    return first


def reshard_and_back(checkpoint: Path, run: Path) -> None:
    """Make a run folder that holds a checkpoint of two processes, which was one of three processes in between."""
    for count, out in (("3", run.with_name(f"{run.name}_of_3")), ("2", run)):
        assert checkpoint_program.main(["reshard", str(checkpoint), count, str(out)]) == 0
        checkpoint = out


def command_of(num_processes: int, arguments: list[str]) -> list[str]:
    if num_processes == 1:
        return [sys.executable, str(ROOT / "train.py"), *arguments]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    return [*start, str(ROOT / "train.py"), *arguments]


def run_train(num_processes: int, arguments: list[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Train from the command line in processes with the environment that torchrun sets, and wait for their end.

    What concerns torchrun itself starts `command_of` instead.
    """
    return run_program(train.main, [arguments] * num_processes, timeout)


def run_program(
    main: Callable[[list[str]], int], arguments: Sequence[list[str]], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process for each of these command lines, which are the ranks of one group, and wait for their end."""
    with tempfile.TemporaryDirectory() as folder:
        return Started(main, arguments, Path(folder)).wait(timeout)


def ended_well(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return what a run said, which must have ended with status 0."""
    assert done.returncode == 0, done.stderr
    return done


def run_file(arguments: list[str]) -> int:
    """Run a file of Python, the first argument, as a program of its own: a `main` for `Started` and `run_program`."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def run_module(arguments: list[str]) -> int:
    """Run a module, the first argument, as `python -m` does: a `main` for `Started` and `run_program`."""
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    return 0


DRAWN = True  # whether matplotlib draws, see conftest.py


def blank_pictures() -> contextlib.AbstractContextManager[object]:
    """Return a context in which pictures of matplotlib, where it is installed, have no contents."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        return contextlib.nullcontext()
    return mock.patch("matplotlib.figure.Figure.draw", lambda *_: None)


class Started:
    """A program in a process for each of these command lines, which are the ranks of one group and run in `place`.

    They are forks of a process that has imported torch, which saves 4 s of a processor for each. `folder` gets their output.
    """

    def __init__(
        self,
        main: Callable[[list[str]], int],
        arguments: Sequence[list[str]],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        place: str = "/",
    ) -> None:
        self.words, self.folder = [main.__module__, *arguments[0]], folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        count = len(arguments)
        several = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        context = mp.get_context("forkserver")
        self.processes = []
        for rank in range(count):
            own = {**several, "RANK": rank, "LOCAL_RANK": rank} if count > 1 else {}
            variables = {**(os.environ if environment is None else environment), **{k: str(value) for k, value in own.items()}}
            given = (main, arguments[rank], variables, str(folder), place, DRAWN)
            self.processes.append(context.Process(target=_run, args=given))
            self.processes[-1].start()

    def send(self, number: int, rank: int) -> None:
        """Send a signal to one of them."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def is_alive(self) -> bool:
        """Return whether all of them run."""
        return all(process.is_alive() for process in self.processes)

    def said(self) -> tuple[str, str]:
        """Return what they have written to standard output and standard error so far."""
        files = [self.folder / name for name in ("out", "err")]
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        return out, err

    def wait_until(self, holds: Callable[[], bool], timeout: float = 120) -> None:
        """Wait for what they are to do while all of them run."""
        end = time.monotonic() + timeout
        while not holds():
            assert self.is_alive() and time.monotonic() < end, f"it ended, or did nothing: {self.said()[1]}"
            time.sleep(0.01)

    def wait(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for their end; return what they said, and the first status that is not 0."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [process for process in self.processes if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        out, err = self.said()
        if late:
            raise subprocess.TimeoutExpired(self.words, timeout, out, err)
        statuses = [process.exitcode or 0 for process in self.processes]
        return subprocess.CompletedProcess(self.words, next((s for s in statuses if s), 0), out, err)


class Forked:
    """Stands in for subprocess.Popen where one of our programs starts another: a fork, as those of `Started`."""

    def __init__(self, command: Sequence[str], **given: Any) -> None:
        self.args, self._folder = command, tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        if given.get("stdout") is not None:
            for name in ("out", "err"):
                (folder / name).symlink_to(os.readlink(f"/proc/self/fd/{given['stdout'].fileno()}"))
        assert command[0] == sys.executable
        main, words = (run_module, command[2:]) if command[1] == "-m" else (run_file, command[1:])
        self._started = Started(main, [list(words)], folder, given.get("env"), str(given.get("cwd") or Path.cwd()))
        self.pid = self._started.processes[0].pid

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._started.send(number, 0)

    def poll(self) -> int | None:
        return self._started.processes[0].exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._started.processes[0].join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status


def _run_forked(command: Sequence[str], **given: Any) -> subprocess.CompletedProcess[str]:
    """Stand in for subprocess.run as `Forked` does for Popen; the output is always captured."""
    process = Forked(command, **given)
    return subprocess.CompletedProcess(command, process.wait(), *process._started.said())


# the module subprocess for a program whose workers are forked
FORKS = SimpleNamespace(**{**vars(subprocess), "Popen": Forked, "run": _run_forked})


def _run(
    main: Callable[[list[str]], int], arguments: list[str], environment: dict[str, str], folder: str, place: str, drawn: bool
) -> None:
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    with contextlib.nullcontext() if drawn else blank_pictures():
        raise SystemExit(main(arguments))


def one_line(capsys: pytest.CaptureFixture[str], *passed: str) -> str:
    """Return the one line that a program said on stderr, an error; if words are given, also blank and those that begin so."""
    said = capsys.readouterr().err.splitlines()
    said = [line for line in said if not passed or (line and not line.startswith(passed))]
    assert len(said) == 1 and said[0].startswith("error: ") and len(said[0]) < 1000, said
    return said[0]


def error_of(status: int, capsys: pytest.CaptureFixture[str], *passed: str) -> str:
    """Return the `one_line` of a program that has ended with this status, which must be 1."""
    assert status == 1
    return one_line(capsys, *passed)


def wait_for(holds: Callable[[], object], timeout: float = 60, process: "subprocess.Popen | None" = None) -> None:
    """Wait for what a process is to do, if one is given, while it runs."""
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.01)


def descendants(pid: int) -> list[int]:
    """Return the processes that descend from one, but for those that are gone."""
    children: list[int] = []
    with contextlib.suppress(OSError):
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(grandchild for child in children for grandchild in descendants(child))]
