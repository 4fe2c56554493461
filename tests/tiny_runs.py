"""Trainings that take a second or two: their data, their command line, and what they leave behind."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import torch

from data.recordio import RecordWriter, pack
from eval.pairs import write_bin
from utils.checkpoint import list_checkpoints, read_backbone, softmax_reader

ROOT = Path(__file__).parent.parent
NUM_CLASSES, NUM_IMAGES = 12, 60


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
        "backbone: {name: r18, width: 0.125, embedding_size: 16}\n"
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
    return subprocess.run(command_of(num_processes, arguments), capture_output=True, text=True, timeout=timeout, cwd="/")


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(grandchild for child in children for grandchild in descendants(child))]
