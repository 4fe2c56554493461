"""Trainings that take a second or two: their data, their command line, and what they leave behind."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.multiprocessing as mp

import train
from data.recordio.image_record import RecordWriter, pack
from eval.pair_sets.bin_file import write_bin
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import read_backbone, shard_reader

ROOT = Path(__file__).parent.parent
NUM_CLASSES, NUM_IMAGES = 12, 60
FEW_IMAGES = 30  # of small runs, which have as many steps in an epoch
IRESNET = "backbone.name=r18"  # for what concerns its layers; the network of the other runs is faster


def face(label: int, number: int) -> bytes:
    """Return a JPEG of coarse coloured tiles, the class's, under noise."""
    tiles = np.random.default_rng(label).integers(40, 215, (7, 7, 3)).astype(np.uint8)
    noise = np.random.default_rng(1000 + number).normal(0, 12, (112, 112, 3))
    pixels = cv2.resize(tiles, (112, 112), interpolation=cv2.INTER_NEAREST) + noise
    return cv2.imencode(".jpg", pixels.clip(0, 255).astype(np.uint8))[1].tobytes()


def write_dataset(folder: Path, num_images: int = NUM_IMAGES) -> None:
    """Write a RecordIO set of so many images and a verification set of other classes, `tiny`."""
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key in range(num_images):
            writer.write(key, pack(float(key % NUM_CLASSES), key, 0, face(key % NUM_CLASSES, key)))
    (folder / "property").write_text(f"{NUM_CLASSES},112,112")
    same = [bool(pair % 2) for pair in range(20)]
    images = [face(50 + pair + (side and not same[pair]), 2 * pair + side) for pair in range(20) for side in (0, 1)]
    write_bin(folder / "tiny.bin", images, same)


def tiny_run(dataset: Path, output: Path, *overrides: str, image_size: int = 112, batch_size: int = 8) -> list[str]:
    """Write the configuration of a run; return the command line of train.py."""
    config = output / "tiny.yaml"
    config.write_text(
        f"run: {{output: {output}, threads: 1}}\n"
        f"data: {{path: {dataset}, image_size: {image_size}}}\n"
        "backbone: {name: mbf, width: 0.125, embedding_size: 16}\n"
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


class Started:
    """A program in a process for each of these command lines, which are the ranks of one group.

    They are forks of a process that has imported torch, which saves its import, 4 s of a processor for each of them.

    Args:
        folder: for their output.
    """

    def __init__(self, main: Callable[[list[str]], int], arguments: Sequence[list[str]], folder: Path) -> None:
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
            environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
            self.processes.append(context.Process(target=_run, args=(main, arguments[rank], environment, str(folder))))
            self.processes[-1].start()

    def send(self, number: int, rank: int) -> None:
        """Send a signal to one of them."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def is_alive(self) -> bool:
        """Return whether all of them run."""
        return all(process.is_alive() for process in self.processes)

    def wait(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Wait for their end; return what they said, and the first status that is not 0."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [process for process in self.processes if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        out, err = ((self.folder / name).read_text(errors="replace") for name in ("out", "err"))
        if late:
            raise subprocess.TimeoutExpired(self.words, timeout, out, err)
        statuses = [process.exitcode or 0 for process in self.processes]
        return subprocess.CompletedProcess(self.words, next((s for s in statuses if s), 0), out, err)


def _run(main: Callable[[list[str]], int], arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.chdir("/")
    os.environ.clear()
    os.environ.update(environment)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    raise SystemExit(main(arguments))


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(grandchild for child in children for grandchild in descendants(child))]
