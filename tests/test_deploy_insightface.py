"""Networks exported for insightface: its loader takes them for what they are, and its embeddings are ours.

insightface is not installed beside this project. FACE_INSIGHTFACE=/path/of/python names an environment that has it (2.1); then
its own get_model and FaceAnalysis load the files. Without it, their rules are followed here, as those of servers are.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from pictures import picture
from tiny_detectors import write_detector
from tiny_runs import SHALLOW

from backbones import build_backbone
from scripts.deploy.export import main as export
from utils.image import normalise

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("onnx_operators")]
NETWORKS = {"shallow": 0.125, "mbf": 0.125, "r18": 0.25, "r50": 0.25, "ghostfacenet_v2_2": 1, "edgeface_xs": 1, "vit_t": 1}
PYTHON = os.environ.get("FACE_INSIGHTFACE")
_THEIRS = """
import json, sys, cv2
from insightface.app import FaceAnalysis
from insightface.app.common import Face
from insightface.model_zoo import get_model
from insightface.utils import face_align
folder = sys.argv[1]
model = get_model(f"{folder}/models/mine/recognition.onnx", providers=["CPUExecutionProvider"])
image = cv2.imread(f"{folder}/face.png")
app = FaceAnalysis("mine", root=folder, providers=["CPUExecutionProvider"])
app.prepare(-1)
model.get(image, Face(kps=face_align.arcface_dst))  # which aligns for this size
print(json.dumps([type(model).__name__, model.get_feat([image]).tolist(), sorted(app.models)]))
"""


def _export(folder: Path, name: str, width: float, size: int, *more: str) -> tuple[torch.nn.Module, int]:
    torch.manual_seed(0)
    model = build_backbone(name, 64, width, image_size=size)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0  # the statistics of its activations, as a training leaves them
    model(normalise(torch.from_numpy(np.stack([picture(number, size) for number in range(4)]))))
    model.eval()
    torch.save(model.state_dict(), folder / "weights.pth")
    out = folder / "models" / "mine" / "recognition.onnx"
    out.parent.mkdir(parents=True, exist_ok=True)
    words = ["--backbone", name, "--embedding-size", "64", "--width", str(width), "--image-size", str(size)]
    return model, export([str(folder / "weights.pth"), *words, "--pack", "insightface", "--out", str(out), *more])


def _by_their_rules(path: Path, image: np.ndarray) -> tuple[str, np.ndarray]:
    """Return what insightface's ModelRouter takes a file for, and what ArcFaceONNX.get_feat computes of a BGR image."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (given,), (_,) = session.get_inputs(), session.get_outputs()
    height, width = given.shape[2:4]
    kind = {192: "Landmark", 96: "Attribute"}.get(height) or ("ArcFaceONNX" if height >= 112 and height % 16 == 0 else "")
    names = [node.name for node in onnx.load(path).graph.node[:8]]
    scales = all(any(name.startswith(one) for name in names) for one in ("Sub", "Mul"))
    mean, std = (0.0, 1.0) if scales else (127.5, 127.5)
    blob = cv2.dnn.blobFromImages([image], 1 / std, (width, height), (mean,) * 3, swapRB=True)
    return kind, session.run(None, {given.name: blob})[0]


def _by_servers(path: Path, image: np.ndarray) -> Iterator[np.ndarray]:
    """Yield what three servers compute of a BGR crop, by their code."""
    settings = onnxruntime.SessionOptions()
    scaled = image[:, :, ::-1].astype(np.float32).transpose(2, 0, 1) / 127.5 - 1
    # SthPhoenix/InsightFace-REST fb854d8, if_rest/core/model_zoo: getter.py, Arcface of exec_backends/onnxrt_backend.py
    session = onnxruntime.InferenceSession(onnx.load(path).SerializeToString(), settings, providers=["CPUExecutionProvider"])
    entry, outputs = session.get_inputs()[0].name, [output.name for output in session.get_outputs()]
    session.run(outputs, {entry: [np.zeros((3, 112, 112), np.float32)]})  # it warms up
    blob = cv2.dnn.blobFromImages(np.stack([image]), 1 / 127.5, (112, 112), (127.5,) * 3, swapRB=True)  # as arcface_torch says
    yield session.run(outputs, {entry: blob})[0]
    # blakeblackshear/frigate e3fa701, frigate/embeddings/onnx: ArcfaceEmbedding of face_embedding.py, base_embedding.py
    yield session.run(None, {entry.name: np.stack([{"data": scaled}[entry.name]]) for entry in session.get_inputs()})[0]
    # immich-app/immich 042e5d5, machine-learning/immich_ml: sessions/ort.py, models/facial_recognition/recognition.py
    settings.add_free_dimension_override_by_name("batch", 1)
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [1, 3, 112, 112] and session.get_inputs()[0].type != "tensor(uint8)"
    yield session.run(None, {entry: scaled[None]})[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_insightface_computes_the_embeddings_of_the_network(tmp_path: Path, name: str):
    if not PYTHON and name not in SHALLOW:
        pytest.skip("FACE_INSIGHTFACE names no environment with insightface; its rules are followed for one network")
    model, status = _export(tmp_path, name, NETWORKS[name], 112)
    assert status == 0
    pixels = picture(3, 112)
    with torch.no_grad():
        expected = model(normalise(torch.from_numpy(pixels[None]))).numpy()[0]
    cv2.imwrite(str(tmp_path / "face.png"), pixels[:, :, ::-1])
    kind, found = _by_their_rules(tmp_path / "models" / "mine" / "recognition.onnx", pixels[:, :, ::-1])
    if PYTHON:
        write_detector(tmp_path / "models" / "mine" / "detection.onnx", "scrfd")
        done = subprocess.run([PYTHON, "-c", _THEIRS, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        kind, feature, tasks = json.loads(done.stdout.splitlines()[-1])
        assert tasks == ["detection", "recognition"]
        found = np.array(feature)
    assert kind == "ArcFaceONNX" and found.shape == (1, 64)
    by_servers = _by_servers(tmp_path / "models" / "mine" / "recognition.onnx", pixels[:, :, ::-1])
    for embedding in (found[0], *(output[0] for output in by_servers)):
        assert float(embedding @ expected / np.linalg.norm(embedding) / np.linalg.norm(expected)) > 0.9999


@pytest.mark.parametrize(
    ("size", "more", "words"),
    [
        (64, [], "images must have 112, 224, 336, ... pixels, those of this network have 64"),
        (128, [], "those of this network have 128"),
        (112, ["--with-preprocess"], "this one takes RGB in uint8, (x - 0) / 1"),
        (112, ["--colour", "bgr"], "this one takes BGR in float32"),
        (112, ["--to", "pt2"], "--pack insightface is for --to onnx"),
    ],
)
def test_what_insightface_would_take_for_something_else_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int, more: list[str], words: str
):
    assert _export(tmp_path, "shallow", 0.125, size, *more)[1] == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and words in said[0]
    assert not (tmp_path / "models" / "mine" / "recognition.onnx").exists()
