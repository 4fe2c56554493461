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
from data.recordio import RecordWriter, pack
from eval.pairs import write_bin
from utils.checkpoint import list_checkpoints, read_backbone, softmax_reader

ROOT = Path(__file__).parent.parent
NUM_CLASSES, NUM_IMAGES = 12, 60
IRESNET = "backbone.name=r18"  # for what concerns its layers; the network of the other runs is faster


def face(label: int, number: int) -> bytes:
    """Return a JPEG of coarse coloured tiles, the class's, under noise."""
    tiles = np.random.default_rng(label).integers(40, 215, (7, 7, 3)).astype(np.uint8)
    noise = np.random.default_rng(1000 + number).normal(0, 12, (112, 112, 3))
    pixels = cv2.resize(tiles, (112, 112), interpolation=cv2.INTER_NEAREST) + noise
    return cv2.imencode(".jpg", pixels.clip(0, 255).astype(np.uint8))[1].tobytes()


def write_dataset(folder: Path) -> None:
    """Write a RecordIO set and a verification set of other classes, `tiny`."""
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key in range(NUM_IMAGES):
            writer.write(key, pack(float(key % NUM_CLASSES), key, 0, face(key % NUM_CLASSES, key)))
    (folder / "property").write_text(f"{NUM_CLASSES},112,112")
    same = [bool(pair % 2) for pair in range(20)]
    images = [face(50 + pair + (side and not same[pair]), 2 * pair + side) for pair in range(20) for side in (0, 1)]
    write_bin(folder / "tiny.bin", images, same)


def tiny_run(dataset: Path, output: Path, *overrides: str) -> list[str]:
    config = output / "tiny.yaml"
    config.write_text(
        f"run: {{output: {output}, threads: 1}}\n"
        f"data: {{path: {dataset}}}\n"
        "backbone: {name: mbf, width: 0.125, embedding_size: 16}\n"
        "loss: {name: cosface, margin: 0.2, scale: 16}\n"
        "head: {chunk: 5}\n"
        "train: {batch_size: 8, epochs: 2}\n"
        "optimizer: {lr: 0.05}\n"
        "checkpoint: {every: 4}\n"
        "log: {every: 1}\n"
        "eval: {targets: [tiny], every: 8, batch_size: 16}\n"
    )
    return [str(config), *overrides]


def read_metrics(run: Path, kind: str = "train") -> dict[int, dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records if record["kind"] == kind}


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = list_checkpoints(run)[-1]
    return {**read_backbone(newest), **softmax_reader(newest)(0, NUM_CLASSES)}


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
    """Run a program in a process for each of these command lines, which are the ranks of one group, and wait for their end.

    They are forks of a process that has imported torch, which saves its import, 4 s of a processor for each of them.
    """
    num_processes = len(arguments)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        several = {"WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes, "MASTER_ADDR": "127.0.0.1"}
        several |= {"MASTER_PORT": free.getsockname()[1]}
        free.close()
        processes = []
        for rank in range(num_processes):
            own = {**several, "RANK": rank, "LOCAL_RANK": rank} if num_processes > 1 else {}
            environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
            start = mp.get_context("forkserver").Process(target=_run, args=(main, arguments[rank], environment, folder))
            start.start()
            processes.append(start)
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [process for process in processes if process.exitcode is None]
        for process in late:
            process.kill()
            process.join()
        out, err = ((Path(folder) / name).read_text(errors="replace") for name in ("out", "err"))
        words = [main.__module__, *arguments[0]]
        if late:
            raise subprocess.TimeoutExpired(words, timeout, out, err)
        statuses = [process.exitcode or 0 for process in processes]
        return subprocess.CompletedProcess(words, next((s for s in statuses if s), 0), out, err)


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
