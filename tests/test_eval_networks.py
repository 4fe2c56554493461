"""Files of networks that attack: what is not trusted never runs, whatever its name and whoever reads it.

Each file leaves a marker when it runs; that it would is shown with --trust-code, in a process of its own.
"""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from pictures import jpeg, picture
from tiny_networks import MEAN_COLOUR, TIMES_MATRIX, write_onnx
from tiny_runs import error_of, one_line, run_program, small_run
from torch import nn

import train
from eval.__main__ import main as evaluate
from eval.pair_sets.bin_file import write_bin
from scripts.arcface_torch.import_checkpoint import main as import_arcface
from scripts.checkpoint import main as checkpoint
from scripts.deploy.enrol import main as enrol

SMALL = ["--backbone", "r18", "--embedding-size", "16", "--width", "0.125"]


class Marking:
    """Unpickled, it makes the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.marker),)


class Program(nn.Module):
    """A network whose forward pass makes the marker, or overwrites what lies there: TorchScript may do that."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = str(marker)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3)) + torch.from_file(self.marker, shared=True, size=3)


def _torchscript(path: Path, marker: Path) -> Path:
    torch.jit.script(Program(marker)).save(str(path))
    return path


def _exported(path: Path, marker: Path) -> Path:
    """Write a sound .pt2 file, but for its sample inputs, which are a pickle that runs a command."""
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    sound, bad = path.with_name("sound.pt2"), io.BytesIO()
    torch.export.save(torch.export.export(model, (torch.zeros(2, 3, 112, 112),)), sound)
    torch.save(Marking(marker), bad)
    with zipfile.ZipFile(sound) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, bad.getvalue() if "sample_inputs" in name else source.read(name))
    return path


def _pickle(path: Path, marker: Path) -> Path:
    torch.save({"weight": Marking(marker)}, path)
    return path


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("faces") / "faces.bin"
    write_bin(path, [jpeg(picture(number)) for number in range(40)], [bool(pair % 2) for pair in range(20)])
    return ["--targets", str(path), "--device", "cpu", "--threads", "1"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, "TorchScript") for name in ("net.pt", "backbone.pth", "net.safetensors", "net.onnx", "net")),
        ("net.pt2", "torch.export"),
    ],
)
def test_a_program_runs_only_with_trust_code_whatever_its_name(
    tmp_path: Path, faces: list[str], capsys: pytest.CaptureFixture[str], name: str, what: str
):
    marker = tmp_path / "marker"
    path = (_torchscript if what == "TorchScript" else _exported)(tmp_path / name, marker)
    assert evaluate([str(path), *faces]) == 1 and not marker.exists()
    said = one_line(capsys, "embedding: ")
    assert str(path) in said and what in said and "--trust-code" in said and "your rights" in said
    assert evaluate([str(path), *faces, *SMALL]) == 1 and not marker.exists()  # --backbone: weights, never a program
    assert str(path) in one_line(capsys, "embedding: ")
    assert evaluate([str(path), *faces, *SMALL, "--trust-code"]) == 1 and not marker.exists()
    assert "--trust-code" in one_line(capsys, "embedding: ")
    if name in ("net.pt", "net.onnx", "net.pt2"):
        run_program(evaluate, [[str(path), *faces, "--trust-code"]])
        assert marker.exists()  # it is a real one


@pytest.mark.parametrize("make", [_torchscript, _exported, _pickle])
def test_no_program_runs_what_a_file_of_weights_holds(
    dataset: Path, tmp_path: Path, faces: list[str], capsys: pytest.CaptureFixture[str], make: object
):
    """Every program that takes networks, weights or class centres, under every name that such a file may have."""
    marker = tmp_path / "marker"
    (tmp_path / "theirs").mkdir()
    sound = tmp_path / "run"
    run = small_run(dataset, tmp_path, "train.max_steps=1", "eval.targets=[]", "run.name=run")
    assert train.main(run) == 0
    capsys.readouterr()
    ours = [*small_run(dataset, tmp_path, "train.max_steps=1", "eval.targets=[]"), "run.name=tuned"]
    for name in ("w.pth", "w.pt", "w.safetensors", "w.pt2", "w.onnx"):
        bad = str(make(tmp_path / name, marker))  # type: ignore[operator]
        for file in ("backbone.pth", "rank_0_softmax_weight.pt"):
            (tmp_path / "theirs" / file).write_bytes(Path(bad).read_bytes())
        for backbone in ([], SMALL):
            assert evaluate([bad, *faces, *backbone]) == 1
        assert train.main([*ours, f"init.backbone={bad}"]) == 1
        assert train.main([*ours, f"init.backbone={sound}", f"init.head={bad}"]) == 1
        assert import_arcface([str(tmp_path / "theirs"), str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 5 and all(line.startswith("error: ") for line in said), said
        assert not marker.exists(), name
    newest = sound / "checkpoints" / "step_00000001"
    for name in ("trainer.pt", "backbone.safetensors"):
        content = make(tmp_path / "w.pth", marker).read_bytes()  # type: ignore[operator]
        _replace(newest, name, content)
        assert train.main([*run, "train.max_steps=2"]) == 1
        assert checkpoint(["average", str(newest), str(newest), "--out", str(tmp_path / "mean.pt")]) == 1
        assert not marker.exists()


@pytest.mark.parametrize("place", ["branch", "function", "sparse", "training", "second graph", "list"])
@pytest.mark.parametrize("location", ["../secret.bin", "*/_ORT_MEM_ADDR_/*", "missing.bin", "a\0b", "/dev/zero", "pipe"])
def test_an_onnx_file_may_hide_its_tensors_anywhere(
    tmp_path: Path, faces: list[str], capsys: pytest.CaptureFixture[str], place: str, location: str
):
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    (tmp_path / "net").mkdir()
    os.mkfifo(tmp_path / "net" / "pipe")
    outside = TensorProto(name="matrix", data_type=TensorProto.FLOAT, dims=[4, 3], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value=location)
    graph = helper.make_graph([], "hidden", [], [], [outside])
    model = helper.make_model(helper.make_graph([], "net", [], []), ir_version=9)
    if place == "branch":
        model.graph.node.append(helper.make_node("If", ["c"], ["y"], then_branch=graph, else_branch=graph))
    elif place == "function":
        node = helper.make_node("Constant", [], ["y"], value=outside)
        model.functions.append(helper.make_function("own", "f", [], ["y"], [node], []))
    elif place == "sparse":
        indices = helper.make_tensor("i", TensorProto.INT64, [0], [])
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(outside, indices, [4, 3]))
    elif place == "training":
        model.training_info.add().algorithm.CopyFrom(graph)
    elif place == "list":
        model.graph.node.append(helper.make_node("Many", [], ["y"], values=[outside]))
    data = model.SerializeToString()
    if place == "second graph":  # readers of protobuf merge the two
        data += onnx.ModelProto(graph=graph).SerializeToString()
    (tmp_path / "net" / "net.onnx").write_bytes(data)
    assert "its tensors are in '" in error_of(evaluate([str(tmp_path / "net" / "net.onnx"), *faces]), capsys, "embedding: ")


@pytest.mark.parametrize("fault", ["compressed", "one part many times", "tuples in tuples", "common memory"])
def test_a_small_file_of_weights_takes_no_more_than_its_size(
    tmp_path: Path, faces: list[str], capsys: pytest.CaptureFixture[str], fault: str
):
    ones = torch.ones(10_000)
    torch.save({f"w{n}": ones for n in range(9 if fault == "common memory" else 1)}, tmp_path / "sound.pt")
    pairs = b"".join(b"h" + bytes([number]) + b"\x86q" + bytes([number + 1]) for number in range(16))  # each of the one before
    how = zipfile.ZIP_DEFLATED if fault == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "sound.pt") as source, zipfile.ZipFile(tmp_path / "w.pt", "w", how) as target:
        for name in source.namelist():
            is_key = fault == "tuples in tuples" and name.endswith("data.pkl")
            target.writestr(name, b"\x80\x02})q\0" + pairs + b"K\1s." if is_key else source.read(name))
        if fault == "one part many times":
            target.filelist += [target.getinfo("sound/data/0")] * 100
    assert evaluate([str(tmp_path / "w.pt"), *faces, *SMALL]) == 1
    says = {"tuples in tuples": "it holds a tuple of more", "common memory": "its tensors have their memory in common"}
    assert says.get(fault, "it is compressed, or") in one_line(capsys, "embedding: ")


class Wrong(nn.Module):
    """A network with one fault, chosen by `fault`."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        means = images.mean((2, 3))  # (b, 3)
        if self.fault == "fails":
            return means.view(-1, 7, 11)
        if self.fault == "one number":
            return means.sum(1)
        if self.fault == "one row":
            return means[:1]
        if self.fault == "whole numbers":
            return means.int()
        return means[:, :0]


class Several(nn.Module):
    """A network with two outputs, which TorchScript could not compile beside those of one."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images.mean((2, 3)), images.mean((2, 3))


def _foreign(folder: Path, kind: str, fault: str) -> Path:
    path = folder / f"net.{kind}"
    model: nn.Module = Several() if fault == "several" else Wrong(fault)
    if kind == "pt":
        torch.jit.script(model).save(str(path))
    elif kind == "pt2":
        shapes = ({0: torch.export.Dim("batch")},) if fault == "several" else None  # else for two images only
        torch.export.save(torch.export.export(model, (torch.zeros(2, 3, 112, 112),), dynamic_shapes=shapes), path)
    else:
        write_onnx(path, [*MEAN_COLOUR, ("Reshape", {})], 7, shape=np.array([-1, 7]))  # 48 numbers are no rows of 7
    return path


@pytest.mark.parametrize(
    ("kind", "fault", "what"),
    [
        ("onnx", "fails", "it cannot run on images (16, 3, 112, 112): [ONNXRuntimeError]"),
        ("pt2", "one row", "it cannot run on images (16, 3, 112, 112): "),
        ("pt2", "several", "it must return a tensor of embeddings, it returns "),
        ("pt", "fails", "it cannot run on images (16, 3, 112, 112): RuntimeError: shape '[-1, 7, 11]' is invalid"),
        ("pt", "one number", "it returns (16,) of float32 for 16 images"),
        ("pt", "one row", "it returns (1, 3) of float32 for 16 images"),
        ("pt", "whole numbers", "it returns (16, 3) of int32 for 16 images"),
        ("pt", "none", "it returns (16, 0) of float32 for 16 images"),
    ],
)
def test_a_program_that_fails_or_gives_no_embeddings_is_one_line(
    tmp_path: Path, faces: list[str], capsys: pytest.CaptureFixture[str], kind: str, fault: str, what: str
):
    trust = [] if kind == "onnx" else ["--trust-code"]
    path = _foreign(tmp_path, kind, fault)
    said = error_of(evaluate([str(path), *trust, *faces]), capsys, "embedding: ")
    assert f"net.{kind}: " in said and what in said, said


def test_of_several_outputs_the_first_is_read_whatever_the_others_are(tmp_path: Path, faces: list[str]):
    """Torch has no type for lists of tensors."""
    model = onnx.load(write_onnx(tmp_path / "net.onnx", MEAN_COLOUR, 3))
    model.graph.node.append(helper.make_node("SequenceConstruct", [model.graph.node[0].output[0]], ["stages"]))
    model.graph.output.append(helper.make_tensor_sequence_value_info("stages", TensorProto.FLOAT, None))
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    assert evaluate([str(tmp_path / "net.onnx"), *faces]) == 0


def _replace(folder: Path, name: str, content: bytes) -> None:
    """Put another file in the place of one of a checkpoint, with the size that its manifest tells."""
    size = (folder / name).stat().st_size
    text = (folder / "manifest.json").read_text()
    assert f'"size": {size}' in text
    (folder / "manifest.json").write_text(text.replace(f'"size": {size}', f'"size": {len(content)}'))
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("where", ["../secret.bin", "{}/secret.bin", "link.bin"])
@pytest.mark.parametrize("constant", [False, True])
def test_an_onnx_file_reads_no_file_outside_its_folder(
    tmp_path: Path, faces: list[str], capsys: pytest.CaptureFixture[str], where: str, constant: bool
):
    np.arange(12, dtype=np.float32).tofile(tmp_path / "secret.bin")
    folder = tmp_path / "net"
    folder.mkdir()
    (folder / "link.bin").symlink_to("../secret.bin")
    outside = TensorProto(name="matrix", data_type=TensorProto.FLOAT, dims=[4, 3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", where.format(tmp_path)), ("offset", "0"), ("length", "48")):
        outside.external_data.add(key=key, value=value)
    matrix = np.zeros((4, 3), np.float32)
    model = onnx.load(write_onnx(folder / "net.onnx", [*MEAN_COLOUR, TIMES_MATRIX], 4, matrix=matrix))
    if constant:
        del model.graph.initializer[0]
        model.graph.node.insert(0, helper.make_node("Constant", [], ["matrix"], value=outside))
    else:
        model.graph.initializer[0].CopyFrom(outside)
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    assert onnx.load(str(folder / "net.onnx"), load_external_data=False).graph.name == "tiny"
    assert evaluate([str(folder / "net.onnx"), *faces]) == 1
    assert f"net.onnx: its tensors are in {where.format(tmp_path)!r}, not a file in its own folder" in one_line(
        capsys, "embedding: "
    )
    # the same network with the same numbers in its own folder is read
    (folder / "link.bin").unlink()
    (tmp_path / "secret.bin").rename(folder / "link.bin")
    entry = (model.graph.node[0].attribute[0].t if constant else model.graph.initializer[0]).external_data[0]
    entry.value = "link.bin"
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    assert evaluate([str(folder / "net.onnx"), *faces]) == 0
    # what a network does not use of that file is not read to tell it from others
    (tmp_path / "people" / "a").mkdir(parents=True)
    (tmp_path / "people" / "a" / "1.jpg").write_bytes(jpeg(picture(1, 112)))
    words = [str(folder / "net.onnx"), str(tmp_path / "g"), str(tmp_path / "people"), "--device", "cpu"]
    assert enrol(words) == 0
    os.truncate(folder / "link.bin", 1 << 40)
    assert enrol(words) == 0 and "0 pictures enrolled, 1 were there already" in capsys.readouterr().out  # the same network
    entry.MergeFromString(b"\x82\x7d\0")  # the field 2000, which no version of the format has
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    assert evaluate([str(folder / "net.onnx"), *faces]) == 1
    assert "net.onnx: has fields that the package onnx does not know" in capsys.readouterr().err
    os.truncate(folder / "net.onnx", 1 << 40)
    assert evaluate([str(folder / "net.onnx"), *faces]) == 1 and "may have 2,147,483,648 at most" in capsys.readouterr().err
