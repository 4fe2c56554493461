"""Data of strangers: what a picture, a link, a pipe or a name may not do to a training or a tool."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from tiny_runs import face, tiny_run, write_dataset

import train
from eval.pairs import write_bin
from utils.checkpoint import list_checkpoints


def _png(height: int, width: int) -> bytes:
    return cv2.imencode(".png", np.zeros((height, width), np.uint8))[1].tobytes()


def _bin_with(path: Path, image: bytes) -> None:
    """Write a verification set of 20 pairs, one image of which is this one."""
    same = [bool(pair % 2) for pair in range(20)]
    images = [face(50 + number, number) for number in range(40)]
    write_bin(path, [*images[:3], image, *images[4:]], same)


def test_a_flat_picture_in_a_verification_set_is_named_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_dataset(tmp_path)
    _bin_with(tmp_path / "tiny.bin", _png(1, 1_000_000))
    assert train.main(tiny_run(tmp_path, tmp_path)) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "tiny: image 3: cannot be decoded: an image of 1000000 x 1 pixels, more than 32000 a side" in said


def test_a_picture_in_a_verification_set_that_is_not_square_does_not_cost_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_dataset(tmp_path)
    _bin_with(tmp_path / "tiny.bin", _png(30, 3000))
    assert train.main(tiny_run(tmp_path, tmp_path, "train.max_steps=8")) == 1
    assert "tiny: image 3 must be square, it is 30 x 3000 pixels" in capsys.readouterr().err
    assert [path.name for path in list_checkpoints(tmp_path / "tiny")][-1] == "step_00000008"
