"""Exported files against the networks themselves: the same numbers at any batch, the same accuracy, or no file at all.

The networks of CI have the layers of the named ones, but few of them; FACE_ALL_BACKBONES=1 exports every named one.
"""

import errno
import json
import os
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import some
from faulty_disk import Disk, faulty
from pictures import jpeg, picture
from safetensors.torch import load_file
from test_scripts_deploy_embed import _rows
from tiny_runs import ROOT, error_of, one_line, small_run, write_dataset
from torch import Tensor, nn

import backbones
import train
from backbones import build_backbone, edgeface, ghostfacenet, list_backbones
from backbones.iresnet import IResNet
from backbones.kprpe import KeypointTransformer
from backbones.mobilefacenet import MobileFaceNet
from backbones.vit import Form, VisionTransformer
from deploy.export import checks as export_checks
from deploy.export import graph as export_graph
from eval.__main__ import main as evaluate
from eval.foreign_networks import CONTRACT_FILE, InputContract
from scripts.deploy.embed import main as embed
from scripts.deploy.export import main as export
from utils.alignment import TEMPLATE
from utils.checkpoint.tensor_file import write_tensors
from utils.distributed.agreement import digest_tensors
from utils.image import normalise

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("onnx_operators")]
SIZE, DIM = 48, 16
PROGRESS = ("warning: ", "embedding: ")
BATCHES = (1, 2, 7)
TINY: dict[str, tuple[Callable[..., nn.Module], float]] = {  # with its width
    "r18": (partial(IResNet, (1, 1, 1, 1), se=True), 0.125),
    "mbf": (partial(MobileFaceNet, (1, 1, 0, 0), 2), 0.125),
    "ghostfacenet_v2_2": (partial(ghostfacenet.GhostFaceNet, 2, 2), 0.25),
    "edgeface_xs": (partial(edgeface.EdgeFace, (16, 24, 32, 40), 4), 1.0),
    "vit_t": (partial(VisionTransformer, Form(16, 2)), 1.0),
    "vit_kprpe_s": (partial(KeypointTransformer, Form(16, 2, heads=4, patch=8)), 1.0),
}


class Toy(nn.Module):
    """The smallest network with what an export changes: a convolution and a linear layer with batch normalisations."""

    wrong = 0.0  # share by which what is exported differs

    def __init__(
        self, embedding_size: int = 512, width: float = 1.0, dropout: float = 0.0, se: bool = False, image_size: int = SIZE
    ) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 7, stride=4, bias=False), nn.BatchNorm2d(8)
        self.fc, self.features = nn.Linear(8 * 11 * 11, embedding_size), nn.BatchNorm1d(embedding_size)

    def forward(self, images: Tensor) -> Tensor:
        out = self.features(self.fc(torch.relu(self.norm(self.conv(images))).flatten(1)))
        return out * (1 + self.wrong) if torch.compiler.is_compiling() else out


def _drawn(model: nn.Module) -> nn.Module:
    """Move a fresh network away from its initial values, and its statistics to those of its activations, as a training does."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 1.0
            for value in (module.weight.data, module.bias.data):
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
    torch.manual_seed(0)
    with torch.no_grad():
        model.train()(normalise(torch.from_numpy(_pixels(4))))
    return model.eval()


def _weights(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, make: Callable[..., nn.Module], width: float = 1.0
) -> list[str]:
    """Register a network under a name and write its weights; return the words that name them."""
    monkeypatch.setitem(backbones.BACKBONES, name, make)
    model = _drawn(build_backbone(name, DIM, width, image_size=SIZE))
    path = folder / f"{name}.safetensors"
    path.unlink(missing_ok=True)
    write_tensors(path, model.state_dict())
    sizes = ["--embedding-size", str(DIM), "--image-size", str(SIZE), "--width", str(width)]
    return [str(path), "--backbone", name, *sizes]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return _weights(tmp_path, "r18", monkeypatch, Toy)


def _model(words: list[str]) -> nn.Module:
    """Return the network of these words."""
    model = build_backbone(words[2], DIM, float(words[-1]), image_size=SIZE)
    model.load_state_dict(load_file(words[0]))
    return model.eval()


def _pixels(count: int, size: int = SIZE) -> np.ndarray:
    return np.stack([picture(number, size) for number in range(count)])


def _by_torch(model: nn.Module, pixels: np.ndarray, flip: bool = False) -> np.ndarray:
    images = normalise(torch.from_numpy(pixels))
    with torch.no_grad():
        return (model(images) + model(images.flip(3)) if flip else model(images)).numpy()


def _by_onnx(path: Path, pixels: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    takes_bytes = session.get_inputs()[0].type == "tensor(uint8)"
    given = pixels if takes_bytes else normalise(torch.from_numpy(pixels)).contiguous().numpy()
    return session.run(None, {"images": given})


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of an embedding, relative to its length."""
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("name", "more"),
    some([("r18", []), ("ghostfacenet_v2_2", ["--with-preprocess"]), ("mbf", ["--with-preprocess", "--flip"]),
          ("edgeface_xs", ["--flip"]), ("vit_t", []),
          ("vit_kprpe_s", []), ("vit_kprpe_s", ["--flip"])], 2),
)  # fmt: skip
def test_every_kind_of_network_gives_the_numbers_of_torch_at_batch_1_2_and_7(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, more: list[str]
):
    monkeypatch.setattr(ghostfacenet, "_BLOCKS", [ghostfacenet._BLOCKS[k] for k in (0, 1, 3, 5, 11)])
    monkeypatch.setattr(ghostfacenet, "_PLAIN", 4)
    monkeypatch.setattr(edgeface, "_DEPTHS", (1, 1, 1, 1))
    words = _weights(tmp_path, name, monkeypatch, *TINY[name])
    assert export([*words, "--to", "onnx", "--out", str(tmp_path / "net.onnx"), *more]) == 0
    model = _model(words)
    for batch in BATCHES:
        pixels = _pixels(batch)
        expected, found = _by_torch(model, pixels, "--flip" in more), _by_onnx(tmp_path / "net.onnx", pixels)
        if "--with-preprocess" in more:
            lengths = np.linalg.norm(expected, axis=1)
            assert np.abs(np.linalg.norm(found[0], axis=1) - 1).max() < 1e-5
            assert (np.abs(found[1] - lengths) / lengths).max() < 1e-4
            expected = expected / lengths[:, None]
        assert found[0].dtype == np.float32 and found[0].shape == expected.shape
        assert _distance(found[0], expected) < 1e-4
    nodes = Counter(node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node)
    # an IResNet begins its blocks with one, whose shift the zeros of the padding must not get, and ends with one
    assert nodes["BatchNormalization"] == (5 if name == "r18" else 0)


@pytest.mark.skipif(
    "FACE_ALL_BACKBONES" not in os.environ, reason="FACE_ALL_BACKBONES=1: all, for an hour; =full: in full width"
)
@pytest.mark.parametrize("name", [*list_backbones(), "r18+se"])
def test_every_named_backbone_gives_the_numbers_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    plain = name.removesuffix("+se")
    made = partial(backbones.BACKBONES[plain], **({"se": True} if plain != name else {}))
    full = os.environ["FACE_ALL_BACKBONES"] == "full"
    scale = 1.0 if full else {"r2060": 0.125, "r200": 0.5, "vit_h": 0.25, "vit_l": 0.5, "vit_b": 0.5}.get(name, 1.0)
    words = _weights(tmp_path, plain, monkeypatch, made, scale)
    facts = tmp_path / "facts.json"
    assert export([*words, "--to", "onnx", "--out", str(tmp_path / "net.onnx"), "--json", str(facts)]) == 0
    found = json.loads(facts.read_text())
    print(f"\n{name} width {scale:g}: {found['files']['fp32']}, folded {found['folded']} of {found['norms']}")
    model = _model(words)
    for batch in BATCHES:
        pixels = _pixels(batch)
        assert _distance(_by_onnx(tmp_path / "net.onnx", pixels)[0], _by_torch(model, pixels)) < 1e-4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a trained run of the smallest network, its set, and files exported from it."""
    folder = tmp_path_factory.mktemp("export")
    write_dataset(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backbones.BACKBONES, "r18", Toy)
        patch.setattr(export_checks, "_ROUNDS", 5)
        overrides = "backbone.name=r18 backbone.width=1 train.epochs=1 run.name=run eval.every=0 train.ema=0.95"
        assert train.main(small_run(folder, folder, *overrides.split())) == 0
        more = ["--precision", "int8", "--measure", "--measure-batch", "2", "--threads", "1", "--json", str(folder / "f.json")]
        words = [str(folder / "run"), "--to", "onnx"]
        assert export([*words, "--out", str(folder / "int8.onnx"), *more, "--with-preprocess"]) == 0
        assert export([*words, "--out", str(folder / "fp16.onnx"), "--precision", "fp16", "--max-loss", "50"]) == 0
        assert export([*words, "--out", str(folder / "bytes.onnx"), "--with-preprocess"]) == 0
        assert export([str(folder / "run"), "--to", "pt2", "--out", str(folder / "bytes.pt2"), "--with-preprocess"]) == 0
        yield folder


def test_the_newest_run_and_the_form_of_the_name_are_taken(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "work_dirs").mkdir()
    (tmp_path / "work_dirs" / "run").symlink_to(source / "run")
    monkeypatch.chdir(tmp_path)
    for name in ("net.onnx", "net.pt2"):
        assert export(["--out", name]) == 0
        assert "work_dirs/run" in capsys.readouterr().out and (tmp_path / name).stat().st_size > 0
    assert "the name of the file must end in .onnx, .pt2 or .xml, got net.bin" in error_of(export(["--out", "net.bin"]), capsys)


def _scores(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return what python -m eval prints of the set."""
    capsys.readouterr()
    assert evaluate([*words, "--device", "cpu", "--threads", "1"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("tiny ")]
    return row


def test_fp16_and_int8_files_say_what_they_cost(source: Path, capsys: pytest.CaptureFixture[str]):
    facts = json.loads((source / "f.json").read_text())
    assert list(facts["files"]) == list(facts["accuracies"]) == ["fp32", "fp16", "int8"]
    assert facts["files"]["fp32"]["difference"] < 1e-4 < facts["files"]["int8"]["difference"]
    assert facts["files"]["fp16"]["megabytes"] < 0.7 * facts["files"]["fp32"]["megabytes"]
    assert set(facts["times"]) == {"torch fp32", "onnxruntime fp32", "onnxruntime fp16", "onnxruntime int8"}
    assert all(timing["2"]["low"] <= timing["2"]["median"] <= timing["2"]["high"] for timing in facts["times"].values())
    for name, found in (("int8.onnx", "int8"), ("run", "fp32")):
        accuracy = _scores(capsys, str(source / name), "--targets", str(source / "tiny.bin"))[2]
        assert float(accuracy) == pytest.approx(100 * facts["accuracies"][found]["tiny"], abs=0.01)
    nodes = Counter(node.op_type for node in onnx.load(source / "int8.onnx").graph.node)
    assert nodes["QuantizeLinear"] >= 2 and nodes["DequantizeLinear"] >= 2 + 2 * 2  # of both layers: input, weight, bias
    kinds = Counter(tensor.data_type for tensor in onnx.load(source / "fp16.onnx").graph.initializer)
    assert kinds[onnx.TensorProto.FLOAT16] == 4 and kinds[onnx.TensorProto.FLOAT] == 0


def test_a_file_that_takes_bytes_has_the_scores_of_its_run(source: Path, capsys: pytest.CaptureFixture[str]):
    sets = ["--targets", str(source / "tiny.bin")]
    expected = _scores(capsys, str(source / "run"), *sets)
    assert _scores(capsys, str(source / "bytes.onnx"), *sets) == expected
    assert _scores(capsys, str(source / "bytes.pt2"), *sets, "--trust-code") == expected
    ema = ["--ema", "--to", "pt2", "--out", str(source / "ema.pt2"), "--json", str(source / "ema.json")]
    assert export([str(source / "run"), *ema]) == 0
    averaged = _scores(capsys, str(source / "run"), "--ema", *sets)
    assert _scores(capsys, str(source / "ema.pt2"), "--trust-code", *sets) == averaged != expected
    assert json.loads((source / "ema.json").read_text())["contract"]["step"] == "15 (moving average)"
    for flag, value in (("--colour", "bgr"), ("--input-mean", "127.5"), ("--input-std", "128"), ("--image-size", "112")):
        assert f"{flag} must be " in error_of(evaluate([str(source / "bytes.onnx"), *sets, flag, value]), capsys, *PROGRESS)


def test_a_file_knows_its_colour_order_and_scale(toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other, sets = ["--colour", "bgr", "--input-mean", "100", "--input-std", "64"], ["--targets", str(tmp_path / "tiny.bin")]
    write_dataset(tmp_path)
    expected = _scores(capsys, *toy, *other, *sets)
    assert _scores(capsys, *toy, *sets) != expected
    for name, more in (("raw.onnx", []), ("bytes.pt2", ["--with-preprocess", "--flip"])):
        form = name.rpartition(".")[2]
        assert export([*toy, *other, "--to", form, "--out", str(tmp_path / name), *more]) == 0
    texts = {entry.key: entry.value for entry in onnx.load(tmp_path / "raw.onnx").metadata_props}
    assert [texts[f"face.{key}"] for key in ("colour", "mean", "std", "layout")] == ["bgr", "100.0", "64.0", "NCHW"]
    images = (_pixels(3)[..., ::-1].astype(np.float32) - 100) / 64
    session = onnxruntime.InferenceSession(str(tmp_path / "raw.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": np.ascontiguousarray(images.transpose(0, 3, 1, 2))})
    with torch.no_grad():
        assert _distance(found, _model(toy)(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()) < 1e-4
    assert _scores(capsys, str(tmp_path / "raw.onnx"), *sets) == expected
    assert _scores(capsys, str(tmp_path / "bytes.pt2"), *sets, "--trust-code")[2:8] == expected[2:8]


def test_a_scale_is_read_back_as_it_was_written_or_no_file_appears(
    toy: list[str], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "checkpoints").mkdir()
    weights = Path(toy[0]).rename(tmp_path / "checkpoints" / "net.safetensors")
    words, facts = [str(weights), *toy[1:], "--to", "pt2", "--out", str(tmp_path / "net.pt2")], tmp_path / "f.json"
    assert export([*words, "--input-mean", "1e7"]) == 1
    assert "face.mean of its metadata must be a number, got '10000000.0'" in one_line(capsys, *PROGRESS)
    assert _left(tmp_path) == ["checkpoints"]
    sets, mean = ["--targets", str(dataset / "tiny.bin")], "0.00012345678901234567"
    assert export([*words, "--input-mean", mean, "--input-std", "5e-05", "--json", str(facts)]) == 0
    expected = _scores(capsys, *words[:-4], *sets, "--input-mean", mean, "--input-std", "5e-05")
    assert _scores(capsys, str(tmp_path / "net.pt2"), "--trust-code", *sets)[:8] == expected[:8]
    assert json.loads(facts.read_text())["contract"]["run"] == "net.safetensors"  # not the folder above, as of a run


def test_the_metadata_says_what_the_network_takes_and_where_it_comes_from(source: Path):
    facts, model = json.loads((source / "f.json").read_text()), onnx.load(source / "int8.onnx")
    texts = {entry.key: entry.value for entry in model.metadata_props}
    points = np.array(json.loads(texts.pop("face.points")))
    assert np.abs(points - TEMPLATE * SIZE / 112).max() < 1e-4
    weights = source / "run" / "checkpoints" / "step_00000015" / "backbone.safetensors"
    trained = Toy(DIM)
    trained.load_state_dict(load_file(weights))
    assert {key: value for key, value in texts.items()} == {
        **{"face.contract": "1", "face.image_size": "48", "face.layout": "NHWC", "face.colour": "rgb", "face.mean": "0.0"},
        **{"face.std": "1.0", "face.dtype": "uint8", "face.embedding_size": "16", "face.normalised": "true"},
        **{"face.mirrored": "false", "face.precision": "int8", "face.run": "run", "face.step": "15", "face.backbone": "r18"},
        "face.weights": digest_tensors(trained.state_dict()),
    }
    assert facts["contract"]["weights"] == texts["face.weights"] and facts["contract"]["precision"] == "int8"
    for name in ("int8.onnx", "bytes.onnx", "bytes.pt2"):  # and nothing else of this machine
        content = (source / name).read_bytes()
        assert not [path for path in (str(ROOT), str(source), "site-packages") if path.encode() in content]


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_an_embedding_of_zeros_stays_one(toy: list[str], tmp_path: Path, form: str):
    model, path = _model(toy), tmp_path / f"net.{form}"
    nn.init.zeros_(model.features.weight)
    nn.init.zeros_(model.features.bias)
    Path(toy[0]).unlink()
    write_tensors(Path(toy[0]), model.state_dict())
    assert export([*toy, "--to", form, "--out", str(path), "--with-preprocess"]) == 0
    if form == "onnx":
        found = _by_onnx(path, _pixels(2))
    else:
        found = [value.numpy() for value in torch.export.load(str(path)).module()(torch.from_numpy(_pixels(2)))]
    assert np.array_equal(found[0], np.zeros((2, DIM))) and np.array_equal(found[1], np.zeros(2))


@pytest.mark.parametrize("form", ["onnx", "pt2"])
def test_a_file_that_differs_from_torch_does_not_appear(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
):
    for wrong, status in ((0.9e-4, 0), (1.2e-4, 1), (float("nan"), 1)) if form == "pt2" else ((1.2e-4, 1),):
        monkeypatch.setattr(Toy, "wrong", wrong)
        assert export([*toy, "--to", form, "--out", str(tmp_path / "out" / f"{status}.{form}")]) == status
        if status:
            by = "inf" if wrong != wrong else "0.00012"
            assert f"differs from torch by {by} of the length of an embedding in batches of 1, 2, 7" in one_line(
                capsys, *PROGRESS
            )
    assert _left(tmp_path / "out") == (["0.pt2"] if form == "pt2" else [])


def test_an_operation_that_onnx_lacks_is_named(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Toy, "forward", lambda self, images: torch.linalg.eigvalsh(images[:, 0, :DIM, :DIM]))
    assert export([*toy, "--out", str(tmp_path / "out.onnx")]) == 1
    said = one_line(capsys, *PROGRESS)
    assert "torch.onnx cannot translate this network: No ONNX function found for <OpOverload(op='aten._linalg_eigh'" in said


@pytest.mark.parametrize("place", [0, 1])
def test_a_number_that_is_none_is_never_near_the_network(place: int):
    """In the embeddings, and in their lengths."""
    contract = InputContract(
        SIZE, "NHWC", "rgb", 0.0, 1.0, "uint8", ((1.0, 2.0),) * 5, DIM, True, False, "fp32", "", "", "", ""
    )
    reference = np.random.default_rng(0).normal(size=(sum(BATCHES), DIM)).astype(np.float32)
    lengths = np.linalg.norm(reference, axis=1)
    parts = iter(np.split(np.arange(len(reference)), np.cumsum(BATCHES)[:-1]))

    def run(pixels: np.ndarray) -> list[np.ndarray]:
        part = next(parts)
        found = [reference[part] / lengths[part, None], lengths[part].copy()]
        if 9 in part:
            found[place][-1] = np.nan
        return found

    assert export_checks.compare(run, _pixels(sum(BATCHES)), reference, contract)[0] == np.inf


def test_a_file_that_does_not_run_does_not_appear(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    fails = mock.Mock(side_effect=RuntimeError("[ONNXRuntimeError] : no kernel\nat line 7"))
    monkeypatch.setattr(export_checks, "open_file", lambda *arguments: fails)
    assert export([*toy, "--to", "pt2", "--out", str(tmp_path / "out" / "net.pt2")]) == 1
    assert one_line(capsys, *PROGRESS).endswith("the exported network does not run: [ONNXRuntimeError] : no kernel")
    assert _left(tmp_path / "out") == []


def test_with_flip_the_table_of_times_is_of_the_same_work(toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Torch embeds the mirror images as well, as the file does."""
    seen: list[int] = []
    before = Toy.forward

    def note(self: Toy, images: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            seen.append(len(images))
        return before(self, images)

    monkeypatch.setattr(Toy, "forward", note)
    monkeypatch.setattr(export_checks, "_ROUNDS", 1)
    more = ["--flip", "--measure", "--measure-batch", "5"]
    assert export([*toy, "--to", "pt2", "--out", str(tmp_path / "net.pt2"), *more]) == 0
    assert seen[2 * len(BATCHES) :] == [2, 2, 10, 10]  # one image and five, each once before the clock starts


def test_the_images_of_the_calibration_set_the_ranges_of_int8(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "dark" / "a").mkdir(parents=True)
    (tmp_path / "dark" / "a" / "0.jpg").write_bytes(jpeg(np.zeros((SIZE, SIZE, 3), np.uint8)))
    words = [str(source / "run"), "--to", "onnx", "--out", str(tmp_path / "net.onnx"), "--json", str(tmp_path / "f.json")]
    assert export([*words, "--precision", "int8", "--calibrate", str(tmp_path / "dark")]) == 0  # no range but that of black
    assert re.findall(r"(embedding): 100%", capsys.readouterr().err) == ["embedding"] * 2  # the network, then the file
    dark, usual = (json.loads((folder / "f.json").read_text())["files"]["int8"] for folder in (tmp_path, source))
    assert dark["difference"] > 10 * usual["difference"]


def test_a_smaller_file_that_loses_too_much_accuracy_does_not_appear(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    scores = iter([0.9, 0.85])  # of the network, then of the file
    monkeypatch.setattr(export_checks, "accuracies", lambda *arguments: iter([("lfw", next(scores))]))
    words = [str(source / "run"), "--to", "onnx", "--out", str(tmp_path / "out" / "net.onnx")]
    assert export([*words, "--precision", "fp16", "--max-loss", "4.9"]) == 1
    assert "fp16 loses 5.00 percent points of accuracy on lfw, 90.00 -> 85.00 %" in one_line(capsys, *PROGRESS)
    assert _left(tmp_path / "out") == []
    scores = iter([0.92, 0.915])  # whose difference is computed as a little more than half a point
    assert export([*words, "--precision", "fp16", "--max-loss", "0.5"]) == 0
    scores = iter([0.92, 0.91998])
    assert export([*words, "--precision", "fp16", "--overwrite"]) == 0
    assert re.search(r"^fp16 .* 92\.00 \(\+0\.00\)$", capsys.readouterr().out, re.M)


def test_weights_of_more_than_a_file_may_have_lie_beside_it(
    toy: list[str], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(export_graph, "LARGEST_FILE", 10_000)
    words, data = [*toy, "--to", "onnx", "--out", str(tmp_path / "out" / "net.onnx")], tmp_path / "out" / "net.onnx.data"
    data.parent.mkdir()
    data.write_bytes(b"mine")
    assert f"{data} exists; add --overwrite" in error_of(export(words), capsys, *PROGRESS)
    assert _left(tmp_path / "out") == ["net.onnx.data"] and data.read_bytes() == b"mine"
    assert export([*words, "--overwrite"]) == 0
    assert _left(tmp_path / "out") == ["net.onnx", "net.onnx.data"]
    assert (tmp_path / "out" / "net.onnx").stat().st_size < 8_000
    assert _distance(_by_onnx(tmp_path / "out" / "net.onnx", _pixels(3))[0], _by_torch(_model(toy), _pixels(3))) < 1e-4
    assert _scores(capsys, str(tmp_path / "out" / "net.onnx"), "--targets", str(dataset / "tiny.bin"))
    monkeypatch.undo()  # from here on the weights are in the file
    monkeypatch.setitem(backbones.BACKBONES, "r18", Toy)
    assert export([*words, "--overwrite"]) == 0
    assert _left(tmp_path / "out") == ["net.onnx"]
    data.write_bytes(b"mine")
    for name in ("net.onnx", "net.json"):  # links are replaced, and not followed
        (tmp_path / "out" / name).unlink(missing_ok=True)
        (tmp_path / "out" / name).symlink_to(data)
    assert export([*words, "--overwrite", "--json", str(tmp_path / "out" / "net.json")]) == 0
    assert _left(tmp_path / "out") == ["net.json", "net.onnx", "net.onnx.data"] and data.read_bytes() == b"mine"


def test_the_programs_add_the_mirror_image_to_a_file_that_has_it_so_norms_double(toy: list[str], tmp_path: Path):
    (tmp_path / "crops").mkdir()
    for number, pixels in enumerate(_pixels(3)):
        (tmp_path / "crops" / f"{number}.jpg").write_bytes(jpeg(pixels))
    norms, vectors = [], []
    for name, more in (("plain.pt2", []), ("flip.onnx", ["--flip"]), ("bytes.pt2", ["--flip", "--with-preprocess"])):
        path = tmp_path / name
        assert export([*toy, "--out", str(path), *more]) == 0
        words = [str(tmp_path / "crops"), "--out", str(path.with_suffix(".npy")), "--processes", "1"]
        assert embed([str(path), *words, *(["--trust-code"] if path.suffix == ".pt2" else [])]) == 0
        norms.append([float(row["norm"]) for row in _rows(path.with_suffix(".csv"))])
        vectors.append(np.load(path.with_suffix(".npy")))
    for number in (1, 2):
        np.testing.assert_allclose(norms[number], 2 * np.array(norms[0]), rtol=1e-4)
        np.testing.assert_allclose(vectors[number], vectors[0], atol=1e-4)


HOSTILE = {
    "face.contract": ["2", "\x1b[2J", ""], "face.image_size": ["112", "48.0", "-48", "9" * 500_000, "48\n"],
    "face.layout": ["NCHW", "<b>NHWC</b>"], "face.colour": ["bgr", "red"], "face.mean": ["nan", "1e999", "0x10", "1"],
    "face.std": ["0", "-1", "inf"], "face.dtype": ["float32", "\x00"],
    "face.points": ["[[1, 2]]", "__import__('os')", "[" * 100_000], "face.embedding_size": ["0", "1e3", "17"],
    "face.normalised": ["True", "1"], "face.run": ["x" * 2000],
}  # fmt: skip


@pytest.mark.parametrize("key", HOSTILE)
def test_wrong_or_hostile_metadata_is_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str):
    model = onnx.load(source / "bytes.onnx")
    (entry,) = [entry for entry in model.metadata_props if entry.key == key]
    for number, value in enumerate(HOSTILE[key]):
        entry.value = value
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(model.SerializeToString())
        assert evaluate([str(path), "--targets", str(source / "tiny.bin")]) == 1, value[:80]
        line = one_line(capsys, *PROGRESS)
        assert str(path) in line and "metadata" in line and line.isprintable() and len(line) < 500
    model.metadata_props.remove(entry)
    (tmp_path / "none.onnx").write_bytes(model.SerializeToString())
    assert evaluate([str(tmp_path / "none.onnx"), "--targets", str(source / "tiny.bin")]) == 1
    # without the mark of a contract it is a file of others, whose input is no image of this project
    assert ("its input must be (batch, 3, S, S)" if key == "face.contract" else f"lacks {key}") in one_line(capsys, *PROGRESS)


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"face.contract": 1}', '{"face.contract": "1", "face.run": {}}', "x" * 70_000]
)
def test_a_programs_extra_file_may_hold_anything(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(source / "bytes.pt2") as sound, zipfile.ZipFile(path, "w") as target:
        for name in sound.namelist():
            target.writestr(name, text if name.endswith(CONTRACT_FILE) else sound.read(name))
    assert evaluate([str(path), "--trust-code", "--targets", str(source / "tiny.bin")]) == 1
    assert str(path) in one_line(capsys, *PROGRESS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--to onnx --out {}/net.pt2", "--out: the name of the file must end in .onnx"),
        ("--to pt2 --out {}/folder.pt2", "folder.pt2 is a folder"),
        ("--to pt2 --out {}/there.pt2", "there.pt2 exists; add --overwrite"),
        ("--to pt2 --out {}/r18.safetensors/net.pt2", "r18.safetensors is a file, and must be a folder"),
        ("--to pt2 --out {}/new.pt2 --json {}/new.pt2", "--json must be another file"),
        ("--to pt2 --out {}/new.pt2 --json {}/no/f.json", "--json: there is no folder {}/no"),
        ("--to pt2 --out {}/new.pt2 --measure --calibrate {}", "--calibrate is for --precision int8"),
        ("--to pt2 --out {}/new.pt2 --precision int8", "--precision int8 is for --to onnx"),
        ("--to onnx --out {}/new.onnx --precision int8", "Give one with --calibrate SET"),
        ("--to onnx --out {}/new.onnx --precision int8 --calibrate {}/no", "--calibrate: {}/no: no such set"),
        ("--to onnx --out {}/new.onnx --precision fp16 --max-loss 1", "--max-loss needs verification sets"),
        ("--to onnx --out {}/new.onnx --max-loss 1", "--max-loss is from 0 to 100, for --precision fp16"),
        ("--to pt2 --out {}/new.pt2 --targets {}/no.bin", "--targets: no file {}/no.bin"),
        ("--to pt2 --out {}/busy.pt2", ".busy.pt2.unfinished: another program is writing there"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_any_file_appears(
    toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
):
    for name in ("folder.pt2", ".busy.pt2.unfinished"):
        (tmp_path / name).mkdir()
    (tmp_path / "there.pt2").write_bytes(b"mine")
    before = _left(tmp_path)
    assert export([*toy, *(word.format(tmp_path) for word in words.split())]) == 1
    assert said.format(tmp_path) in one_line(capsys, *PROGRESS)
    assert _left(tmp_path) == before and (tmp_path / "there.pt2").read_bytes() == b"mine"


def test_what_is_no_network_of_this_project_is_one_line(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    out = ["--out", str(tmp_path / "net.onnx"), "--to", "onnx"]
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for words, said in (
        ([str(source / "bytes.onnx")], "is not exported again"),
        ([str(tmp_path / "run")], "no complete checkpoint"),
        ([str(tmp_path / "none")], "no run folder"),
        ([str(source / "tiny.bin"), "--backbone", "r18"], "tiny.bin"),
        ([str(source / "tiny.bin"), "--backbone", "r17"], "r17"),
    ):
        assert said in error_of(export([*words, *out]), capsys, *PROGRESS)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert export([str(source / "run"), *out]) == 1
    assert f"--to onnx needs onnxscript: {sys.executable} -m pip install" in one_line(capsys, *PROGRESS)
    monkeypatch.setitem(sys.modules, "timm", None)
    assert (
        export([str(source / "tiny.bin"), "--backbone", "timm:resnet18", *out[:1], str(tmp_path / "a.pt2"), "--to", "pt2"]) == 1
    )
    assert f"needs the package timm: {sys.executable} -m pip install timm" in one_line(capsys, *PROGRESS)
    assert _left(tmp_path) == ["run"]


def test_an_interrupted_export_leaves_nothing_and_an_old_file_as_it_was(toy: list[str], tmp_path: Path):
    out = tmp_path / "out" / "net.pt2"
    out.parent.mkdir()
    out.write_bytes(b"old")
    with mock.patch.object(export_checks, "compare", side_effect=KeyboardInterrupt):
        assert export([*toy, "--to", "pt2", "--out", str(out), "--overwrite"]) == 130
    assert _left(out.parent) == ["net.pt2"] and out.read_bytes() == b"old"
    assert export([*toy, "--to", "pt2", "--out", str(out), "--overwrite"]) == 0
    assert _left(out.parent) == ["net.pt2"] and zipfile.is_zipfile(out)


def test_a_full_disk_is_one_line_and_leaves_nothing(toy: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    words = [*toy, "--to", "pt2", "--out", str(tmp_path / "out" / "net.pt2")]
    for _ in range(2):  # in the first export of a process, torch makes folders of its own
        with faulty(Disk()) as disk:
            assert export(words) == 0
        (tmp_path / "out" / "net.pt2").unlink()
    places = {name: number for number, name in enumerate(disk.done) if name in ("write", "fsync", "mkdir")}
    assert set(places) == {"write", "fsync", "mkdir"}
    for place in (disk.done.index("write"), *places.values()):
        with faulty(Disk(place, errno.ENOSPC)):
            assert export(words) == 1, disk.done[place]
        assert "No space left on device" in one_line(capsys, *PROGRESS)
        assert _left(tmp_path / "out") in ([], ["net.pt2"])  # complete, if the folder alone could not be flushed
        (tmp_path / "out" / "net.pt2").unlink(missing_ok=True)
