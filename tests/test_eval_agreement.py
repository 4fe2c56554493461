"""Processes of one evaluation that disagree stop at the start, by name."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import ROOT, command_of, write_dataset

from backbones import build_backbone

_START = """
import os, sys
sys.path.insert(0, {root!r})
from eval.__main__ import main
own = {own!r} if os.environ["RANK"] == "1" else []
sys.exit(main([*sys.argv[1:], *own]))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the set `tiny` and weights.safetensors, and other weights of the same shapes in `other`."""
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder)
    (folder / "other").mkdir()
    weights = build_backbone("r18", 16, 0.125).state_dict()
    save_file(weights, folder / "weights.safetensors")
    save_file({name: torch.zeros_like(value) for name, value in weights.items()}, folder / "other" / "weights.safetensors")
    return folder


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (
            ["--batch-size", "8", "--precision", "bf16"],
            r"--batch-size is 256 on rank 0, 8 on rank 1; --precision is fp32 on rank 0, bf16 on rank 1. Fix",
        ),
        ("other", r"hash of the network is \w+ on rank 0, \w+ on rank 1"),
    ],
)
def test_a_rank_with_other_options_or_weights_is_named(files: Path, tmp_path: Path, own: list[str] | str, said: str):
    program = tmp_path / "start.py"
    text = _START.format(root=str(ROOT), own=own if isinstance(own, list) else [])
    if own == "other":
        text = text.replace("*sys.argv[1:], *own", 'sys.argv[1].replace("@", os.environ["RANK"]), *sys.argv[2:]')
    program.write_text(text)
    for rank, source in enumerate((files, files / "other")):
        (tmp_path / f"{rank}.safetensors").symlink_to(source / "weights.safetensors")
    network = str(tmp_path / "@.safetensors") if own == "other" else str(files / "weights.safetensors")
    options = ["--backbone", "r18", "--width", "0.125", "--embedding-size", "16", "--device", "cpu"]
    command = command_of(2, [network, *options, "--data", str(files), "--targets", "tiny"])
    command[command.index(str(ROOT / "train.py"))] = str(program)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode != 0
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert re.match(f"error: the processes disagree: {said}", error), error
