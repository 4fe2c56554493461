"""Checkpoints in the layouts of arcface_torch, made here of plain tensors, become checkpoints of this project and back."""

import json
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from test_eval_networks import Marking
from torch import Tensor

import train
from backbones import BACKBONES, build_backbone
from backbones.iresnet import IResNet
from migration import network
from migration.checkpoint_files import load
from partial_fc.centres.shard import initial_centres, slots_of_classes
from scripts import checkpoint
from scripts.arcface_torch import export_checkpoint as export_arcface_torch
from scripts.arcface_torch import import_checkpoint as import_arcface_torch
from utils.checkpoint.format import list_checkpoints, read_manifest
from utils.checkpoint.reading import read_backbone, read_trainer, shard_reader
from utils.checkpoint.tensor_file import write_tensors
from utils.memory import Undrawn

CLASSES, DIM, SEED = 11, 16, 2048
ERAS = ("backbone.pth", "softmax_fc_gpu", "checkpoint_gpu")


@pytest.fixture(autouse=True, scope="module")
def small_r18() -> Iterator[None]:
    """Call an IResNet of half as many layers r18, and leave out r2060, which takes as long to recognise as all others."""
    with mock.patch.dict(BACKBONES):
        BACKBONES["r18"] = partial(IResNet, (1, 1, 1, 1))
        del BACKBONES["r2060"]
        network._entries.cache_clear()
        yield
    network._entries.cache_clear()


def _network() -> torch.nn.Module:
    torch.manual_seed(3)
    model = build_backbone("r18", DIM, 0.125)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.add_(torch.randn_like(value) * 0.01)
    return model


def _rows(seed: int, count: int = CLASSES) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def _lengths(count: int, ranks: int) -> list[int]:
    """Return how many classes each rank has: deal them out one by one."""
    lengths = [0] * ranks
    for number in range(count):
        lengths[number % ranks] += 1
    return lengths


def _optimizer(model: torch.nn.Module, head: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the state dict of an optimizer over all parameters, the frozen one too, and the class centres."""
    state: dict[int, dict[str, Any]] = {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if name != "features.weight":
            value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + index))
            state[index] = {"momentum_buffer": value}
            if kind == "adamw":
                state[index] = {"step": torch.tensor(40.0), "exp_avg": value, "exp_avg_sq": value.square()}
    last = len(list(model.parameters()))
    state[last] = head
    group = {"lr": 0.05, "weight_decay": 5e-4}
    group |= {"betas": (0.9, 0.999), "eps": 1e-8} if kind == "adamw" else {"momentum": 0.9}
    return {"state": state, "param_groups": [{**group, "params": list(range(last))}, {**group, "params": [last]}]}


def _write(folder: Path, era: str, ranks: int, count: int = CLASSES, kind: str = "sgd", sampled: int | None = None) -> Path:
    """Make the files of an era; class k has the row k of _rows(0) and the momentum row k of _rows(1)."""
    folder.mkdir(exist_ok=True)
    model, start = _network(), 0
    state = model.state_dict()
    if era == "backbone.pth":
        torch.save({f"module.{name}": value for name, value in state.items()}, folder / "backbone.pth")
    else:
        torch.save(state, folder / "model.pt")
    for rank, length in enumerate(_lengths(count, ranks)):
        part = slice(start, start + length)
        weight, momentum = _rows(0, count)[part].clone(), _rows(1, count)[part].clone()
        start += length
        if era == "backbone.pth":
            torch.save(weight, folder / f"rank_{rank}_softmax_weight.pt")
            torch.save(momentum, folder / f"rank_{rank}_softmax_weight_mom.pt")
        elif era == "softmax_fc_gpu":
            torch.save({"weight": weight}, folder / f"softmax_fc_gpu_{rank}.pt")
        else:
            head: dict[str, Any] = {"momentum_buffer": momentum[:sampled]}
            if kind == "adamw":
                head = {"step": torch.tensor(40.0), "exp_avg": momentum[:sampled], "exp_avg_sq": momentum[:sampled].square()}
            full = {
                "epoch": 2, "global_step": 40, "state_dict_backbone": state, "state_dict_softmax_fc": {"weight": weight},
                "state_optimizer": _optimizer(model, head, kind), "state_lr_scheduler": {"last_epoch": 40},
            }  # fmt: skip
            torch.save(full, folder / f"checkpoint_gpu_{rank}.pt")
    return folder


def _imported(source: Path, run: Path, *more: str) -> Path:
    assert import_arcface_torch.main([str(source), str(run), *more]) == 0
    (found,) = list_checkpoints(run)
    return found


def _train(folder: Path, name: str, overrides: str) -> None:
    """Train an r18 on images made on the spot, or what the overrides say."""
    (folder / "tiny.yaml").write_text("backbone: {name: r18, width: 0.125, embedding_size: 16}\neval: {at_end: false}\n")
    data = f"data.source=synthetic data.num_classes={CLASSES} data.num_images=33 train.batch_size=8"
    words = f"run.output={folder} run.name={name} run.threads=1 {data} {overrides}".split()
    assert train.main([str(folder / "tiny.yaml"), *words]) == 0


def _of_class(found: Path, label: int, name: str, num_classes: int = CLASSES) -> Tensor:
    """Return the row of one class, found by its slot alone."""
    slot = int(slots_of_classes(np.array([label]), num_classes, SEED)[0])
    return shard_reader(found)(slot, slot + 1)[name][0]


@pytest.mark.parametrize(("era", "ranks"), [(ERAS[0], 1), *((era, 3) for era in ERAS)])
def test_every_class_keeps_its_centre_and_momentum(tmp_path: Path, era: str, ranks: int, capsys: pytest.CaptureFixture[str]):
    source = _write(tmp_path / "theirs", era, ranks)
    found = _imported(source, tmp_path / "run", "--ranks", "2", "--num-classes", str(CLASSES))
    for label in range(CLASSES):
        assert torch.equal(_of_class(found, label, "centres"), _rows(0)[label])
        momentum = _rows(1)[label] if era != "softmax_fc_gpu" else torch.zeros(DIM)
        assert torch.equal(_of_class(found, label, "momentum"), momentum)
    weights = _network().state_dict()
    assert {name: value.shape for name, value in read_backbone(found).items()} == {n: v.shape for n, v in weights.items()}
    assert all(torch.equal(value, weights[name]) for name, value in read_backbone(found).items())
    manifest = read_manifest(found)
    assert manifest["run_signature"] == {"backbone": ["r18", DIM, 0.125], "num_classes": CLASSES, "seed": SEED}
    assert manifest["step"] == (40 if era == "checkpoint_gpu" else 0) and manifest["world_size"] == 2
    assert checkpoint.check(found) == []
    said = capsys.readouterr().out
    assert "r18, 16 numbers per face, width 0.125" in said and "next: ./face train CONFIG" in said
    assert "run.name=run" in said and "backbone.embedding_size=16" in said


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_moments_find_their_parameters_around_the_frozen_one(tmp_path: Path, kind: str):
    found = _imported(_write(tmp_path / "theirs", "checkpoint_gpu", 2, kind=kind), tmp_path / "run")
    saved = read_trainer(found)["optimizer"]["state"]
    trained = [(index, name) for index, (name, _) in enumerate(_network().named_parameters()) if name != "features.weight"]
    assert len(saved) == len(trained)
    assert read_trainer(found)["scaler"]["scale"] == 65536
    for ours, (theirs, _) in enumerate(trained):
        shape = saved[ours]["exp_avg" if kind == "adamw" else "momentum_buffer"].shape
        expected = torch.randn(shape, generator=torch.Generator().manual_seed(100 + theirs))
        assert torch.equal(saved[ours]["exp_avg" if kind == "adamw" else "momentum_buffer"], expected)
        if kind == "adamw":
            assert torch.equal(saved[ours]["exp_avg_sq"], expected.square()) and float(saved[ours]["step"]) == 40
    if kind == "adamw":
        assert torch.equal(_of_class(found, 7, "variance"), _rows(1)[7].square())
        assert int(_of_class(found, 7, "updates")) == 40


def test_odd_optimizers_and_steps_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, run = _write(tmp_path / "theirs", "checkpoint_gpu", 1), tmp_path / "run"
    full = torch.load(source / "checkpoint_gpu_0.pt", weights_only=True)
    names = [name for name, _ in _network().named_parameters()]

    def error(**changed: Any) -> str:
        torch.save({**full, **changed}, source / "checkpoint_gpu_0.pt")
        return _error(capsys, source, run)

    groups, state = full["state_optimizer"]["param_groups"], full["state_optimizer"]["state"]
    assert "global_step must be a whole number" in error(global_step=10**8)
    assert "is not one of SGD or AdamW" in error(state_optimizer={"state": state, "param_groups": [{"lr": 1}]})
    assert f"has 3 parameters, the backbone {len(names)}" in error(
        state_optimizer={"state": state, "param_groups": [{**groups[0], "params": [0, 1, 2]}, groups[1]]}
    )
    for index, wrong in ((0, "have another shape"), (1, "are not finite")):
        buffer = torch.zeros(3) if index == 0 else torch.full_like(state[1]["momentum_buffer"], float("nan"))
        odd = {"state": {**state, index: {"momentum_buffer": buffer}}, "param_groups": groups}
        assert f"moments of parameter {index} {wrong}" in error(state_optimizer=odd)
    bad = {**state, len(names): {"momentum_buffer": torch.full((CLASSES, DIM), float("inf"))}}
    assert "the momentum of class" in error(state_optimizer={"state": bad, "param_groups": groups})
    # a fork may have trained the scale that is fixed here: its moment is of no use, and no harm
    frozen = names.index("features.weight")
    more = {"state": {**state, frozen: {"momentum_buffer": torch.ones(DIM)}}, "param_groups": groups}
    torch.save({**full, "state_optimizer": more}, source / "checkpoint_gpu_0.pt")
    assert len(read_trainer(_imported(source, run))["optimizer"]["state"]) == len(names) - 1


def test_moments_of_sampled_centres_alone_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = _imported(_write(tmp_path / "theirs", "checkpoint_gpu", 2, sampled=3), tmp_path / "run")
    assert "moments (3, 16) are those of the sampled class centres only" in capsys.readouterr().out
    assert not any(bool(_of_class(found, label, "momentum").any()) for label in range(CLASSES))


def _error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert import_arcface_torch.main([str(argument) for argument in arguments]) == 1
    said = capsys.readouterr().err
    said = said[said.find("error: ") :]  # a progress bar may come before
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_missing_and_foreign_shards_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, run = _write(tmp_path / "theirs", "softmax_fc_gpu", 3), tmp_path / "run"
    assert "holds 11 class centres, more than --num-classes 10" in _error(capsys, source, run, "--num-classes", 10)
    assert "--num-classes is 12: the files are of another" in _error(capsys, source, run, "--num-classes", 12)
    (source / "softmax_fc_gpu_1.pt").rename(tmp_path / "aside")
    assert re.search(r"softmax_fc_gpu_1\.pt: is missing", _error(capsys, source, run))
    torch.save({"weight": _rows(0, 6)}, source / "softmax_fc_gpu_1.pt")
    assert "softmax_fc_gpu_1.pt: has 6 class centres" in _error(capsys, source, run)
    torch.save({"weight": torch.zeros(4, 8)}, source / "softmax_fc_gpu_1.pt")
    assert "softmax_fc_gpu_1.pt: its class centres have 8 numbers" in _error(capsys, source, run)
    (tmp_path / "aside").rename(source / "softmax_fc_gpu_1.pt")
    (source / "softmax_fc_gpu_2.pt").unlink()
    assert "softmax_fc_gpu_2.pt is missing" in _error(capsys, source, run, "--num-classes", CLASSES)
    assert not run.exists()


@pytest.mark.numeric
def test_classes_without_a_centre_start_as_in_a_new_run_at_the_length_of_the_others(tmp_path: Path):
    found = _imported(
        _write(tmp_path / "theirs", "backbone.pth", 2), tmp_path / "run", "--num-classes", "14", "--fill", "random"
    )
    for label in range(CLASSES):
        assert torch.equal(_of_class(found, label, "centres", 14), _rows(0)[label])
    length = float(np.mean([float(row.norm()) for row in _rows(0)]))
    for label in range(CLASSES, 14):
        slot = int(slots_of_classes(np.array([label]), 14, SEED)[0])
        expected = initial_centres(slot, slot + 1, DIM, SEED)[0]
        torch.testing.assert_close(_of_class(found, label, "centres", 14), expected / expected.norm() * length)
        assert not bool(_of_class(found, label, "momentum", 14).any())


def test_a_backbone_alone_needs_and_takes_new_centres(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "theirs").mkdir()
    for epoch in (2, 10, 9):
        torch.save(_network().state_dict() if epoch == 10 else {"a": torch.zeros(1)}, tmp_path / f"theirs/{epoch}backbone.pth")
    assert "rank_0_softmax_weight.pt: is missing" in _error(capsys, tmp_path / "theirs", tmp_path / "run")
    found = _imported(tmp_path / "theirs", tmp_path / "run", "--num-classes", "5", "--fill", "random")
    assert "3 files have a backbone; the last is taken, 10backbone.pth" in capsys.readouterr().out
    assert torch.equal(shard_reader(found)(0, 5)["centres"], initial_centres(0, 5, DIM, SEED))


def test_several_kinds_in_one_folder_need_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = _write(tmp_path / "theirs", "backbone.pth", 1)
    _write(source, "checkpoint_gpu", 2)
    assert "--era backbone.pth|checkpoint_gpu" in _error(capsys, source, tmp_path / "run")
    assert "no arcface_torch checkpoint of the kind softmax" in _error(capsys, source, tmp_path, "--era", "softmax_fc_gpu")
    assert read_manifest(_imported(source, tmp_path / "run", "--era", "checkpoint_gpu"))["step"] == 40
    assert "no arcface_torch checkpoint" in _error(capsys, tmp_path / "nothing", tmp_path / "run")


def test_files_of_several_runs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, run = _write(tmp_path / "theirs", "checkpoint_gpu", 2), tmp_path / "run"
    state = torch.load(source / "checkpoint_gpu_1.pt", weights_only=True)
    torch.save({**state, "global_step": 39}, source / "checkpoint_gpu_1.pt")
    assert "checkpoint_gpu_1.pt: its global_step is 39, that of checkpoint_gpu_0.pt is 40" in _error(capsys, source, run)
    torch.save({"state_dict_backbone": {}}, source / "checkpoint_gpu_1.pt")
    assert "checkpoint_gpu_1.pt: must hold state_dict_backbone and state_dict_softmax_fc" in _error(capsys, source, run)
    old = _write(tmp_path / "old", "backbone.pth", 2)
    torch.save(_rows(1, 4), old / "rank_1_softmax_weight_mom.pt")
    assert "rank_1_softmax_weight_mom.pt: is (4, 16), rank_1_softmax_weight.pt is (5, 16)" in _error(capsys, old, run)
    torch.save(_rows(1, 5), old / "rank:1_softmax_weight.pt")
    assert "rank 1 is there twice" in _error(capsys, old, run)


def test_files_named_with_a_colon_are_read(tmp_path: Path):
    source = _write(tmp_path / "theirs", "backbone.pth", 2)
    for path in source.glob("rank_*"):
        path.rename(path.with_name(path.name.replace("rank_", "rank:")))
    found = _imported(source, tmp_path / "run")
    assert torch.equal(_of_class(found, 9, "centres"), _rows(0)[9])
    assert torch.equal(_of_class(found, 9, "momentum"), _rows(1)[9])


def test_files_that_are_no_tensors_are_refused_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, run, trap = _write(tmp_path / "theirs", "softmax_fc_gpu", 2), tmp_path / "run", tmp_path / "executed"
    path = source / "softmax_fc_gpu_1.pt"
    whole = path.read_bytes()
    for value in (Marking(trap), {"weight": _rows(0, 5), "more": Marking(trap)}):
        torch.save(value, path)
        assert "could run code; refused" in _error(capsys, source, run)
        torch.save(value, path, _use_new_zipfile_serialization=False)
        assert "softmax_fc_gpu_1.pt: " in _error(capsys, source, run)
        path.write_bytes(pickle.dumps(value))
        assert "softmax_fc_gpu_1.pt: " in _error(capsys, source, run)
    assert not trap.exists()
    pickle.loads(path.read_bytes())  # the trap does work where it is run
    assert trap.exists()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "softmax_fc_gpu_1.pt: is " in _error(capsys, source, run)
    place = whole.index(_rows(0)[7].numpy().tobytes())
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert "softmax_fc_gpu_1.pt: is damaged" in _error(capsys, source, run)
    for text in ("a text\n", "<html>Not Found</html>"):
        path.write_text(text)
        assert "was not written by torch.save" in _error(capsys, source, run)
    torch.save({"weight": torch.zeros(1, DIM).expand(10**9, DIM)}, path)  # a file of 1 kB for 64 GB of class centres
    assert "must hold a matrix of class centres" in _error(capsys, source, run)
    torch.save([1, 2], path)
    assert "must hold a matrix of class centres" in _error(capsys, source, run)
    torch.save(torch.full((5, DIM), float("nan")), path)
    assert "is not finite" in _error(capsys, source, run)
    assert not list(run.glob("checkpoints/*"))


def test_files_from_before_the_zip_format_are_read(tmp_path: Path):
    torch.save({"weight": _rows(0)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(load(tmp_path / "old.pt")["weight"], _rows(0))


def test_other_networks_and_diverged_ones_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = _write(tmp_path / "theirs", "softmax_fc_gpu", 1)
    state = _network().state_dict()
    state["fc.bias"][0] = float("inf")
    torch.save(state, source / "model.pt")
    assert "fc.bias is not finite" in _error(capsys, source, tmp_path / "run")
    state = _network().state_dict()
    torch.save({**state, "fc.bias": state["fc.bias"].to(torch.complex64)}, source / "model.pt")
    assert "fc.bias has numbers of torch.complex64" in _error(capsys, source, tmp_path / "run")
    counts = {name: value.bool() for name, value in state.items() if name.endswith("num_batches_tracked")}
    torch.save({**state, **counts, "fc.bias": torch.nn.Parameter(state["fc.bias"])}, source / "model.pt")
    assert read_backbone(_imported(source, tmp_path / "odd"))["bn1.num_batches_tracked"].dtype == torch.int64
    with (
        zipfile.ZipFile(tmp_path / "plain.pt", "w", zipfile.ZIP_DEFLATED) as packed,
        zipfile.ZipFile(source / "model.pt") as plain,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    (tmp_path / "plain.pt").replace(source / "model.pt")
    assert "it is compressed, or TorchScript" in _error(capsys, source, tmp_path / "run")
    torch.save({"pos_embed": torch.zeros(2)}, source / "model.pt")
    assert "none of r18, r34" in _error(capsys, source, tmp_path / "run")
    state["fc.weight"] = torch.zeros(DIM, 7)
    torch.save(state, source / "model.pt")
    assert "size mismatch for fc.weight" in _error(capsys, source, tmp_path / "run")


@pytest.mark.parametrize("name", ["r50", "mbf"])
def test_the_published_networks_are_recognised(tmp_path: Path, name: str):
    (tmp_path / "theirs").mkdir()
    torch.save(build_backbone(name, 32, 0.25).state_dict(), tmp_path / "theirs" / "backbone.pth")
    found = _imported(tmp_path / "theirs", tmp_path / "run", "--num-classes", "3", "--fill", "random", "--step", "9")
    assert read_manifest(found)["run_signature"]["backbone"] == [name, 32, 0.25] and found.name == "step_00000009"


@pytest.mark.parametrize("name", ["vit_s", "vit_b"])
def test_transformers_of_one_depth_are_told_apart_by_their_full_width(name: str):
    with torch.device("meta"), Undrawn():
        state = build_backbone(name, 32).state_dict()
    state = {key: torch.ones((), dtype=value.dtype).expand(value.shape) for key, value in state.items()}  # takes no memory
    found = network.recognise(state, Path("backbone.pth"))
    assert (found.name, found.embedding_size, found.width) == (name, 32, 1.0)


def test_a_transformer_without_masks_is_imported_trains_on_and_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its token for masks never had a gradient there, so the optimizer has no moments of it."""
    torch.manual_seed(3)
    model = build_backbone("vit_t", DIM, 1 / 16)
    monkeypatch.setattr(sys.modules[__name__], "_network", lambda: model)
    source = _write(tmp_path / "theirs", "checkpoint_gpu", 2, kind="adamw")
    token = [name for name, _ in model.named_parameters()].index("mask_token")
    for path in source.glob("checkpoint_gpu_*"):
        full = torch.load(path, weights_only=True)
        del full["state_optimizer"]["state"][token]
        torch.save(full, path)
    imported = _imported(source, tmp_path / "work_dirs" / "goes_on")
    assert read_manifest(imported)["run_signature"]["backbone"] == ["vit_t", DIM, 1 / 16]
    moments = read_trainer(imported)["optimizer"]["state"][token]
    assert not bool(moments["exp_avg"].any()) and not bool(moments["exp_avg_sq"].any()) and float(moments["step"]) == 40
    assert export_arcface_torch.main([str(imported), str(tmp_path / "back"), "--ranks", "2"]) == 0
    was, now = (torch.load(folder / "model.pt", weights_only=True) for folder in (source, tmp_path / "back"))
    assert list(was) == list(now) and _equal(was, now)
    vit = "backbone.name=vit_t backbone.width=0.0625 backbone.mask_ratio=0 optimizer.name=adamw optimizer.lr=0.001"
    _train(tmp_path / "work_dirs", "goes_on", f"{vit} train.max_steps=41")
    assert f"resumed from {imported} after step 40" in (tmp_path / "work_dirs" / "goes_on" / "train.log").read_text()


def test_a_checkpoint_of_that_step_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = _write(tmp_path / "theirs", "softmax_fc_gpu", 1)
    before = (_imported(source, tmp_path / "run") / "manifest.json").read_bytes()
    assert "never overwritten" in _error(capsys, source, tmp_path / "run")
    assert (list_checkpoints(tmp_path / "run")[0] / "manifest.json").read_bytes() == before


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_training_goes_on_from_an_imported_checkpoint(tmp_path: Path, kind: str):
    source = _write(tmp_path / "theirs", "checkpoint_gpu", 2, kind=kind)
    imported = _imported(source, tmp_path / "work_dirs" / "goes_on")
    _train(tmp_path / "work_dirs", "goes_on", f"optimizer.name={kind} optimizer.lr=0.001 train.max_steps=42 log.every=1")
    log = (tmp_path / "work_dirs" / "goes_on" / "train.log").read_text()
    assert f"resumed from {imported} after step 40" in log
    newest = list_checkpoints(imported.parent.parent)[-1]
    assert newest.name == "step_00000042"
    before, after = (shard_reader(path)(0, CLASSES)["centres"] for path in (imported, newest))
    assert not torch.equal(before, after)
    torch.testing.assert_close(before, after, rtol=0, atol=0.2)


def _equal(first: Any, second: Any) -> bool:
    """Return whether two trees of dicts and lists hold equal tensors and values; settings that only one has do not count."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(_equal(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


@pytest.mark.parametrize(
    ("era", "kind"),
    [("backbone.pth", "sgd"), ("softmax_fc_gpu", "sgd"), ("checkpoint_gpu", "sgd"), ("checkpoint_gpu", "adamw")],
)
def test_what_was_imported_is_exported_as_it_was(tmp_path: Path, era: str, kind: str):
    source = _write(tmp_path / "theirs", era, 3, kind=kind)
    _imported(source, tmp_path / "run", "--ranks", "2")
    assert export_arcface_torch.main([str(tmp_path / "run"), str(tmp_path / "back"), "--ranks", "3", "--era", era]) == 0
    assert sorted(path.name for path in source.iterdir()) == sorted(path.name for path in (tmp_path / "back").iterdir())
    for path in source.iterdir():
        was, now = (torch.load(folder / path.name, weights_only=True) for folder in (source, tmp_path / "back"))
        if path.name == "backbone.pth":
            was = {name.removeprefix("module."): value for name, value in was.items()}
        if era == "checkpoint_gpu" and path.name != "model.pt":
            assert set(was) == set(now)
            was.pop("epoch")  # it is not known here how long one is
            assert set(was["state_optimizer"]["state"]) == set(now["state_optimizer"]["state"])
        assert _equal(was, now), path.name
    assert export_arcface_torch.main([str(tmp_path / "run"), str(tmp_path / "back")]) == 1  # never over what is there


def test_what_was_exported_is_imported_to_the_same_bytes(tmp_path: Path):
    first = _imported(_write(tmp_path / "theirs", "checkpoint_gpu", 2), tmp_path / "run", "--ranks", "3")
    assert export_arcface_torch.main([str(first), str(tmp_path / "out"), "--ranks", "5"]) == 0
    again = _imported(tmp_path / "out", tmp_path / "again", "--ranks", "3")
    assert read_manifest(first)["files"].keys() == read_manifest(again)["files"].keys()
    for name in read_manifest(first)["files"]:
        if name.endswith(".safetensors"):
            assert (first / name).read_bytes() == (again / name).read_bytes()
    assert _equal(read_trainer(first)["optimizer"]["state"], read_trainer(again)["optimizer"]["state"])


@pytest.mark.numeric
@pytest.mark.parametrize("form", ["exact", "mini"])
def test_a_run_of_ours_is_exported_for_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str):
    _train(tmp_path, "ours", f"data.num_images=32 head.storage={form} train.epochs=2 train.max_steps=4")
    assert export_arcface_torch.main([str(tmp_path / "ours"), str(tmp_path / "out"), "--ranks", "2"]) == 0
    (ours,) = list_checkpoints(tmp_path / "ours")
    files = [torch.load(tmp_path / "out" / f"checkpoint_gpu_{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [(f["epoch"], f["global_step"], f["state_lr_scheduler"]["last_epoch"]) for f in files] == [(1, 4, 4)] * 2
    weight = torch.cat([f["state_dict_softmax_fc"]["weight"] for f in files])
    last = len(list(_network().parameters()))
    momentum = torch.cat([f["state_optimizer"]["state"][last]["momentum_buffer"] for f in files])
    for label in range(CLASSES):
        for name, found in (("centres", weight), ("momentum", momentum)):
            scale = _of_class(ours, label, f"{name}_scale") if form == "mini" else 1.0
            torch.testing.assert_close(found[label], _of_class(ours, label, name).float() * scale)
    # a plain torch optimizer over their list of parameters takes it, and moves on
    model = build_backbone("r18", DIM, 0.125)
    model.load_state_dict(files[0]["state_dict_backbone"])
    centres = torch.nn.Parameter(files[0]["state_dict_softmax_fc"]["weight"])
    plain = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [centres]}], lr=0.1, momentum=0.9)
    plain.load_state_dict(files[0]["state_optimizer"])
    index = [name for name, _ in model.named_parameters()].index("features.bias")
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    expected = read_trainer(ours)["optimizer"]["state"][trained.index("features.bias")]["momentum_buffer"]
    assert torch.equal(plain.state_dict()["state"][index]["momentum_buffer"], expected)
    centres.grad = torch.zeros_like(centres)
    plain.step()
    torch.save({"optimizer": torch.zeros(3)}, ours / "trainer.pt")
    manifest = json.loads((ours / "manifest.json").read_text())
    manifest["files"]["trainer.pt"]["size"] = (ours / "trainer.pt").stat().st_size
    (ours / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert export_arcface_torch.main([str(tmp_path / "ours"), str(tmp_path / "again")]) == 1
    assert "trainer.pt cannot be read: ValueError: it has no state of an optimizer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ghostfacenet_v1_2", "edgeface_xs"])
def test_networks_that_arcface_torch_does_not_have_are_not_exported_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    checkpoint = _imported(_write(tmp_path / "theirs", "checkpoint_gpu", 1), tmp_path / "run", "--ranks", "1")
    weights, manifest = checkpoint / "backbone.safetensors", checkpoint / "manifest.json"
    before = f'"size": {weights.stat().st_size}'
    weights.unlink()
    size = write_tensors(weights, build_backbone(name, DIM, 0.25).state_dict())["size"]
    assert before in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(before, f'"size": {size}'))
    capsys.readouterr()
    assert export_arcface_torch.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "entries match none of r18, " in said and "others have no counterpart" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs"]
