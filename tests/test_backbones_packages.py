"""Networks of timm and torchvision. Neither package is needed: stand-ins with their functions lie in a temporary folder."""

import importlib
import importlib.metadata
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounding import FP32_UNIT
from tiny_runs import equal_weights, error_of, read_metrics, tiny_run
from torch import nn

import train
from backbones import backbone_arguments, build_backbone
from configs import load_config
from configs.loader import SCHEMA
from eval.__main__ import main as evaluate
from utils import program
from utils.text import pip_install

_TIMM = """
from types import SimpleNamespace

import torch
from torch import nn


class Convolution(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        assert num_classes == 0
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x)).relu().mean((2, 3))


class Transformer(nn.Module):
    def __init__(self, num_classes=1000, img_size=224):
        super().__init__()
        assert num_classes == 0
        self.img_size, self.fc = img_size, nn.Linear(3 * (img_size // 16) ** 2, 12)

    def forward(self, x):
        assert x.shape[-1] == self.img_size, f"Input width {x.shape[-1]} does not match {self.img_size}"
        return self.fc(nn.functional.avg_pool2d(x, 16).flatten(1))


class Map(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return self.conv(x)


class Giant(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.fc = nn.Linear(3 * 112 * 112, 1 << 30)  # 147 TiB

    def forward(self, x):
        return self.fc(x.flatten(1))


NETWORKS = {"giant": Giant, "convolution": Convolution, "transformer": Transformer, "map": Map}


def list_models():
    return list(NETWORKS)


def get_pretrained_cfg(name):
    return None if name == "map" else SimpleNamespace(fixed_input_size=name == "transformer")


def create_model(name, pretrained=True, **arguments):
    assert not pretrained
    return NETWORKS[name](**arguments)
"""
_TORCHVISION = """
import sys

from torch import nn


class Residual(nn.Module):
    aux_logits = False

    def __init__(self):
        super().__init__()
        self.conv, self.inner = nn.Conv2d(3, 6, 3, stride=4), nn.Linear(6, 10)
        self.classifier = nn.Sequential(nn.Linear(10, 1000))

    def forward(self, x):
        return self.classifier(self.inner(self.conv(x).mean((2, 3))))


class Inception(Residual):
    aux_logits = True


NETWORKS = {"residual": Residual, "inception": Inception, "squeeze": lambda: nn.Conv2d(3, 8, 3)}


def list_models(module=None):
    assert module is sys.modules[__name__]
    return list(NETWORKS)


def get_model(name, weights="DEFAULT", **arguments):
    assert weights is None
    return NETWORKS[name](**arguments)
"""


def _imported() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-ins on the path; return their folder."""
    folder = tmp_path / "packages"
    for name, text in {"timm/__init__.py": _TIMM, "torchvision/__init__.py": "", "torchvision/models.py": _TORCHVISION}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    monkeypatch.setattr(program, "TESTED_TORCH", "1.2.3")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in _imported():  # not by monkeypatch, which would put them back
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["timm:convolution", "timm:transformer", "torchvision:residual"])
def test_features_of_the_package_go_through_the_embedding_layer_of_this_project(packages: Path, name: str):
    torch.manual_seed(0)
    model = build_backbone(name, embedding_size=5, image_size=64)
    images = torch.randn(4, 3, 64, 64)
    embeddings = model(images)
    w = model.state_dict()
    with torch.no_grad():
        rows = model.network(images).double() @ w["fc.weight"].double().t() + w["fc.bias"].double()
    expected = (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-5).sqrt()
    assert embeddings.dtype == torch.float32 and embeddings.shape == (4, 5)
    torch.testing.assert_close(embeddings.double(), expected, rtol=0, atol=1e4 * FP32_UNIT)  # the deviation may be small
    embeddings.square().sum().backward()
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(dict(model.named_parameters())) - {"features.weight"}
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    assert not any(value.numel() >= 1000 * 10 for value in w.values())  # no classifier of a thousand classes
    with pytest.raises(ValueError, match=r"\(b, 3, 64, 64\), got \(4, 3, 112, 112\)"):
        model(torch.randn(4, 3, 112, 112))


def test_building_counts_no_batch_and_dropout_stands_before_the_last_layer(packages: Path):
    model = build_backbone("timm:convolution", embedding_size=5, dropout=0.99)
    assert int(model.network.norm.num_batches_tracked) == 0 and all(module.training for module in model.modules())
    seen: list[torch.Tensor] = []
    model.fc.register_forward_hook(lambda _, given, __: seen.append(given[0]))
    model(torch.randn(2, 3, 112, 112))
    assert (seen[0] == 0).float().mean() > 0.5


def test_a_network_of_a_package_trains_resumes_and_is_evaluated(packages: Path, dataset: Path, tmp_path: Path):
    name = ["backbone.name=timm:convolution", "train.max_steps=4", "schedule.power=0"]
    assert train.main(tiny_run(dataset, tmp_path, *name, "run.name=whole", "eval.every=0")) == 0
    few = tiny_run(dataset, tmp_path, *name, "run.name=halves", "eval.every=0", "checkpoint.every=2")
    assert train.main([*few, "train.max_steps=2"]) == 0 and train.main(few) == 0
    assert "network.conv.weight" in equal_weights(tmp_path / "whole", tmp_path / "halves")
    log = (tmp_path / "whole" / "train.log").read_text()
    assert log.count(f"torch {torch.__version__} is installed, but the tests run with 1.2.3") == 1
    assert read_metrics(tmp_path / "whole", "tiny")[4]["accuracy"] > 0
    assert evaluate([str(tmp_path / "whole"), "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm:convolutoin", "name: timm has no network 'convolutoin'. Did you mean convolution?"),
        ("torchvision:vgg", "name: torchvision has no network 'vgg'."),
        ("timm:hf-hub:somebody/network", "name: timm has no network 'hf-hub:somebody/network'."),
        ("timm:map", "timm:map cannot be built for images of 112 x 112: it must return pooled features (b, F), it"),
        ("torchvision:squeeze", "torchvision:squeeze cannot be built for images of 112 x 112: it has no linear layer"),
        ("torchvision:inception", "it returns several outputs while it trains; take another network"),
        ("tim:convolution", "name must be one of r18"),
        *((name, f"got '{name}'. Did you mean r50?") for name in ("resnet50", "iResNet_50", "IR_SE50")),
        ("mobilefacenet", "got 'mobilefacenet'. Did you mean mbf?"),
    ],
)
def test_what_a_package_lacks_is_one_line(packages: Path, name: str, words: str):
    with pytest.raises(ValueError) as found:
        build_backbone(name)
    assert words in str(found.value) and "\n" not in str(found.value)


def test_the_name_of_a_network_beside_small_weights_takes_no_memory(
    packages: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tiny_run(dataset, tmp_path, "backbone.name=timm:convolution", "train.max_steps=1", "eval.targets=[]")
    assert train.main(run) == 0
    (manifest,) = (tmp_path / "tiny" / "checkpoints").glob("*/manifest.json")
    manifest.write_text(manifest.read_text().replace("timm:convolution", "timm:giant"))
    capsys.readouterr()
    said = error_of(evaluate([str(tmp_path / "tiny"), "--data", str(dataset), "--targets", "tiny", "--device", "cpu"]), capsys)
    assert "network.fc.weight is missing, in this backbone it is (1073741824, 37632)" in said
    said = error_of(train.main([*run, "backbone.name=timm:giant", "run.name=other"]), capsys)
    assert "error: backbone: its 40,4" in said and " M would fit: set a smaller" in said


@pytest.mark.parametrize("title", ["timm", "torchvision"])
def test_a_package_that_is_missing_or_broken_is_one_line_before_anything_starts(
    title: str, packages: Path, monkeypatch: pytest.MonkeyPatch
):
    for text, words in [
        ("import missing_part", f"{title}:convolution needs {title}, which needs missing_part: {pip_install('missing_part')}"),
        ("raise RuntimeError('no operator called nms\\nat all')", "cannot be imported here: no operator called nms. Ins"),
        (None, f"backbone.name: {title}:convolution needs the package {title}: {pip_install(title)}"),
    ]:
        if text is None:
            monkeypatch.setitem(sys.modules, title, None)
        else:
            (packages / title / "__init__.py").write_text(text)
            for name in _imported():
                monkeypatch.delitem(sys.modules, name)
            importlib.invalidate_caches()
        with pytest.raises(ValueError) as found:
            load_config(SCHEMA, [f"backbone.name={title}:convolution"], train.NAMED)
        assert words in str(found.value) and "\n" not in str(found.value)


def test_a_network_of_a_package_has_no_width(packages: Path):
    assert set(backbone_arguments("timm:convolution")) == {"embedding_size", "dropout"}
    with pytest.raises(ValueError, match=r"no key 'backbone\.width'\. .*timm:convolution takes embedding_size, dropout"):
        load_config(SCHEMA, ["backbone.name=timm:convolution", "backbone.width=0.5"], train.NAMED)
    with pytest.raises(ValueError, match=r"width must be 1 for timm:convolution"):
        build_backbone("timm:convolution", width=0.5)
    assert isinstance(build_backbone("timm:convolution", 5), nn.Module)


def test_the_advice_to_install_leaves_torch_and_is_right_in_any_folder(tmp_path: Path):
    """pip, without an index, takes what is there: the tested version of onnx, and this torch."""
    words = shlex.split(pip_install("onnx"))
    torch_there = f"torch=={importlib.metadata.version('torch')}"
    assert words[:6] == [sys.executable, "-m", "pip", "install", "onnx", torch_there]
    command = [*words, "--dry-run", "--no-index"]
    assert "Would install" not in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
