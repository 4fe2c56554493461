"""Folders for a model hub: their programs print the network's embedding, their metadata are the hub's, nothing is personal."""

import ast
import errno
import getpass
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import test_scripts_deploy_card as cards
import test_scripts_deploy_export as exports
import torch
import yaml
from pictures import picture
from test_deploy_faces_crops import _jpeg as turned_jpeg
from tiny_runs import ROOT, Started, run_file

from backbones import build_backbone
from deploy.card.card import FIELDS
from deploy.export import hub as hub_files
from scripts.deploy.export import main as export
from utils.checkpoint.reading import read_backbone
from utils.checkpoint.tensor_file import NETWORK
from utils.image import decode_rgb, normalise

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("onnx_operators")]
run, results, toy = cards.run, cards.results, exports.toy
NAMES = "README.md card_verification.png config.json example.py example_onnx.py model.onnx model.safetensors"
FILES = set(NAMES.split())


@pytest.fixture(scope="module")
def hub(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose configuration names a folder of somebody."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "card.yaml").write_text("intended_use: tests alone\nweights_licence: cc-by-nc-4.0\n")
    assert export([str(run), "--pack", "hub", "--fields", str(folder / "card.yaml"), "--out", str(folder / "mine")]) == 0
    return folder / "mine"


def _printed(program: Path, image: Path) -> np.ndarray:
    """Return what a program prints, in a folder where nothing else is; example.py in a fork, which has the project."""
    if program.name == "example.py":
        done = Started(run_file, [[str(program), str(image)]], image.parent, place=str(image.parent)).wait()
    else:
        given = {**os.environ, "PYTHONPATH": ""}
        done = subprocess.run([sys.executable, program, image], cwd=image.parent, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.array(done.stdout.split(), dtype=np.float64)


def test_both_programs_print_the_embedding_of_the_network(hub: Path, run: Path, tmp_path: Path):
    assert {path.name for path in hub.iterdir()} == FILES
    (tmp_path / "face.jpg").write_bytes(stored := turned_jpeg(picture(3, 112), 6))  # EXIF turns photographs, not crops
    pixels = decode_rgb(stored)
    model = build_backbone("shallow", 16, 0.125).eval()
    model.load_state_dict(read_backbone(next((run / "checkpoints").iterdir())))
    images = normalise(torch.from_numpy(pixels[None])).contiguous()
    with torch.no_grad():
        expected = (model(images) + model(images.flip(3))).double().numpy()[0]
    for name in ("example.py", "example_onnx.py"):
        found = _printed(hub / name, tmp_path / "face.jpg")
        assert np.linalg.norm(found - expected / np.linalg.norm(expected)) < 1e-4, name  # what an exported file may differ by
    cv2.imwrite(str(tmp_path / "photograph.png"), picture(3, 256))
    for words in ([], [tmp_path / "photograph.png"]):
        done = subprocess.run([sys.executable, hub / "example_onnx.py", *words], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("Prints the embedding of an aligned face of 112 x 112 pixels")
    nodes = ast.parse((hub / "example_onnx.py").read_text()).body
    packages = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert packages == {"sys", "cv2", "numpy", "onnxruntime"}


def _metadata(folder: Path) -> tuple[dict[str, Any], str]:
    """Return the metadata on top of a card, and the card."""
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_weights_exported_again_from_their_own_file_are_the_same_network(toy: list[str], run: Path, tmp_path: Path):
    (tmp_path / "card.yaml").write_text("weights_licence: only for tests, ask us\n")
    more = ["--fields", str(tmp_path / "card.yaml"), "--results", str(run / "results.json")]
    first, again = tmp_path / "first", tmp_path / "again"
    assert export([*toy, "--pack", "hub", "--out", str(first)]) == 0
    assert export([str(first / "model.safetensors"), "--pack", "hub", "--out", str(again), *more]) == 0
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (first, again))
    assert before[NETWORK] == after[NETWORK] and before["weights"] == after["weights"] and before["image_size"] == exports.SIZE
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert "license" not in _metadata(first)[0] and "license" not in _metadata(again)[0]  # words of a person are no name of one
    assert "| lfw |" in _metadata(again)[1] and "only for tests, ask us" in _metadata(again)[1]


def test_the_metadata_are_those_of_the_hub_and_a_person_names_the_licence(hub: Path):
    expected = {"library_name": "face-training", "pipeline_tag": "image-feature-extraction", "license": "cc-by-nc-4.0"}
    expected |= {"tags": ["face-recognition", "face-verification", "onnx"]}
    found, text = _metadata(hub)
    assert found == expected and text.count("To be filled in") == len(FIELDS) - 2
    assert text.startswith("\n# Model card: small\n") and "(card_verification.png)" in text
    card = pytest.importorskip("huggingface_hub", reason="pip install huggingface_hub").ModelCard.load(hub / "README.md")
    assert card.data.to_dict() == expected and card.text.lstrip() == text.lstrip()


def test_nothing_personal_is_in_any_file(hub: Path, run: Path):
    words = ["somebody", str(run.parent), str(hub.parent), str(ROOT), str(Path.home())]
    words += [word for word in (socket.gethostname(), getpass.getuser()) if len(word) > 4]  # short ones are in other words
    for path in hub.iterdir():
        data = path.read_bytes()
        assert not [word for word in words if word.encode() in data], path


def test_a_folder_that_is_not_complete_does_not_appear(toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(folder: Path) -> None:  # what is last
        assert {path.name for path in folder.iterdir()} == FILES - {"card_verification.png"}
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(hub_files, "flush", full)
    assert export([*toy, "--pack", "hub", "--out", str(tmp_path / "out" / "mine")]) == 1
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(("more", "words"), [
    (["--flip"], "--pack hub: its ONNX file has the numbers of its weights"),
    (["--precision", "fp16"], "--pack hub: its ONNX file has the numbers of its weights"),
    (["--untrained"], "--pack hub does not publish"),
    (["--overwrite", "--out", "{}"], " exists; choose another name"),
    (["--fields", "{}/none.yaml"], "none.yaml"),
    (["--pack", "insightface", "--fields", "{}/none.yaml", "--out", "{}/a.onnx"], "--fields are for --pack hub"),
])  # fmt: skip
def test_what_is_no_pack_is_one_line(run: Path, tmp_path: Path, capsys: Any, more: list[str], words: str):
    more = [word.format(tmp_path) for word in more]
    assert export([str(run), "--pack", "hub", "--out", str(tmp_path / "hub"), *more]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and words in said[0] and not any(tmp_path.iterdir())
