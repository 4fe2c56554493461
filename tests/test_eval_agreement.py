"""Processes of one evaluation that disagree stop at the start, by name."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_networks import MEAN_COLOUR, write_onnx
from tiny_runs import face, run_program, write_dataset

from backbones import build_backbone
from eval.__main__ import main as evaluate

OPTIONS = ["--backbone", "r18", "--width", "0.125", "--embedding-size", "16", "--device", "cpu"]


def _write_lists(folder: Path, rank: int) -> None:
    """Write lists of two pictures for a search and for IJB; those of rank 1 hold one other number each."""
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.jpg").write_bytes(face(number, number))
    (folder / "gallery.txt").write_text(f"0.jpg 0\n1.jpg {1 + rank}\n")
    (folder / "probes.txt").write_text("0.jpg 0\n1.jpg 1\n")
    meta = folder / "meta"
    meta.mkdir()
    (meta / "ijbc_face_tid_mid.txt").write_text("0.jpg 1 1\n1.jpg 2 2\n")
    (meta / "ijbc_template_pair_label.txt").write_text("1 2 0\n1 1 1\n")
    points = " ".join(["40 50"] * 5)
    (meta / "ijbc_name_5pts_score.txt").write_text(f"0.jpg {points} 0.9\n1.jpg {points} 0.{9 - rank}\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the set `tiny`, and a folder for each of two ranks: weights, an ONNX file and lists, all unlike."""
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder)
    weights = build_backbone("r18", 16, 0.125).state_dict()
    for rank in (0, 1):
        (folder / str(rank)).mkdir()
        save_file(weights, folder / str(rank) / "weights.safetensors")
        weights = {name: torch.zeros_like(value) for name, value in weights.items()}
        power = np.array([1.0 + rank], np.float32)
        write_onnx(folder / str(rank) / "net.onnx", [*MEAN_COLOUR, ("Pow", {})], 3, power=power)
        _write_lists(folder / str(rank) / "lists", rank)
    return folder


@pytest.mark.parametrize(
    ("words", "own", "said"),
    [
        (["{}/0/weights.safetensors", *OPTIONS, "--data", "{}", "--targets", "tiny"],
         ["--batch-size", "8", "--precision", "bf16"],
         r"--batch-size is 256 on rank 0, 8 on rank 1; --precision is fp32 on rank 0, bf16 on rank 1. Fix"),
        (["{}/@/weights.safetensors", *OPTIONS, "--data", "{}", "--targets", "tiny"], [],
         r"hash of the network is \w+ on rank 0, \w+ on rank 1"),
        (["{}/@/net.onnx", "--device", "cpu", "--data", "{}", "--targets", "tiny"], [],
         r"hash of the network is \w+ on rank 0, \w+ on rank 1"),
        (["{}/0/weights.safetensors", *OPTIONS, "--targets", "identify:{}/@/lists"], [],
         r"hash of the labels of gallery 1 is \w+ on rank 0, .*; number of classes of gallery 1 is 2 on rank 0, 3 on rank 1"),
        (["{}/0/weights.safetensors", *OPTIONS, "--targets", "ijbc:{}/@/lists"], [],
         r"hash of the lists of ijbc is \w+ on rank 0, \w+ on rank 1"),
    ],
    ids=["eval-options", "eval-weights", "eval-onnx", "identify-labels", "ijb-lists"],
)  # fmt: skip
def test_a_rank_with_other_options_or_files_is_named(files: Path, words: list[str], own: list[str], said: str):
    arguments = [[word.format(files).replace("@", str(rank)) for word in words] for rank in (0, 1)]
    done = run_program(evaluate, [arguments[0], arguments[1] + own])
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert re.match(f"error: the processes disagree: {said}", error), error
