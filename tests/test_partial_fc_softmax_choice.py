"""How a head chooses between exponentials in the product of the logits and after it; the times are given without a GPU."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_reference import DenseHead, near_their_centres, relative, take_step
from tiny_runs import equal_weights, small_run
from torch import Tensor

import train
from configs.rules import CHOICES
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.kernels import KERNELS, _why_no_triton
from partial_fc.kernels.plain import Tile
from partial_fc.softmax import choice
from utils.checkpoint.format import list_checkpoints

if _why_no_triton():
    pytest.skip(f"{_why_no_triton()}; the CUDA builds of torch bring it", allow_module_level=True)
kernels = importlib.import_module("partial_fc.kernels.cuda")

pytestmark = pytest.mark.numeric
SMALL = "fused_64x128"


def _head(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, wanted: str = "auto", loss: str = "arcface", **more: Any
) -> PartialFC:
    """Return a head on Triton."""
    monkeypatch.setattr("partial_fc.head.choose_kernels", lambda *given: "triton")
    given: dict[str, Any] = {"storage": "lean", "chunk": 50, "matmul_dtype": torch.bfloat16, "optimizer": RowSGD(0.9, 5e-4)}
    config = HeadConfig(kernels=wanted, **given | more)
    return PartialFC(build_margin(loss, scale=64.0), 70, 64, seed=3, config=config, device=device)


def _give_times(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    monkeypatch.setattr(choice._Trial, "milliseconds", lambda self, form: dict(zip(choice.FORMS, times, strict=True))[form])


@pytest.mark.parametrize(("storage", "cache_mb", "rate"), [("exact", -1, 1.0), ("tiny", 0, 0.3)])
def test_a_fused_head_takes_the_step_of_the_dense_head(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, storage: str, cache_mb: int, rate: float
):
    _give_times(monkeypatch, 1, 1, 1, 1)
    head = _head(monkeypatch, device, SMALL, storage=storage, cache_mb=cache_mb, sample_rate=rate)
    assert head.choose_form(16) == head.kernels.fused == SMALL
    by_class = torch.from_numpy(head.shard_classes()).argsort()
    centres = head.centres.cpu().double()[by_class]
    x, labels = near_their_centres(centres.float(), 32)
    loss, gradient, active = take_step(head, x, labels, 0.05, micro_batches=2)
    expected, by_x, by_w = DenseHead(head.margin.cpu(), centres, RowSGD()).step(x, labels, 0.05, active)
    bound = 2.0**-8 * 64.0 * 2**0.5 / 64**0.5  # of logits: both operands are rounded, the errors of D products have any sign
    assert loss == pytest.approx(expected, abs=bound)
    assert relative(gradient, by_x) < bound
    if storage == "exact":
        momentum = head.shard_state()["momentum"].cpu()[by_class].double() - 5e-4 * centres
        assert relative(momentum, by_w) < bound


def test_the_fastest_right_form_is_taken_on_all_ranks_and_times_logged(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    chosen = []
    for times in ((4.0, 3.0, 1.25, 2.0), (1.0, 3.0, 2.0, 2.0)):
        _give_times(monkeypatch, *times)
        head = _head(monkeypatch, device)
        chosen.append((head.choose_form(8), head.kernels.fused))
    assert chosen == [("fused_128x128", "fused_128x128"), ("separate", "")]
    assert head.describe().endswith(
        "s separate (first pass over a chunk: separate 1 ms, fused_64x128 3 ms, fused_128x128 2 ms, fused_128x256 2 ms)"
    )
    # another rank, on which the second form fails and the third is slow
    other = torch.tensor([5.0, torch.inf, 9.0, 1.0], device=device)
    monkeypatch.setattr("partial_fc.head.Collectives.sum", lambda self, tensor: tensor + other)
    head = _head(monkeypatch, device)
    assert head.choose_form(8) == "fused_128x256" and "fused_64x128 does not work here: on another process" in head.describe()


@pytest.mark.gpu
def test_a_gpu_measures_all_forms(monkeypatch: pytest.MonkeyPatch):
    head = _head(monkeypatch, torch.device("cuda"), cache_mb=0)
    assert head.choose_form(256) in choice.FORMS and head.describe().count(" ms") == 4


def test_a_form_that_fails_or_errs_is_not_taken_and_is_an_error_only_if_it_is_asked_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    _give_times(monkeypatch, 4, 1, 2, 3)
    whole = kernels.exponentials_of_product

    def broken(form: str, tile: Tile, shift: float, z_sum: Tensor) -> None:
        if form == "fused_128x128":
            raise RuntimeError("out of resource: shared memory\nmore")
        whole(form, tile, shift, z_sum)
        tile.products[17, 1] *= 1.02 if form == SMALL else 1

    monkeypatch.setattr(kernels, "exponentials_of_product", broken)
    head = _head(monkeypatch, device)
    assert head.choose_form(8) == "fused_128x256"
    for words in ("64x128 does not work here: its numbers are wrong, ", "128x128 does not work here: out of resource: shared"):
        assert f"fused_{words}" in head.describe()
    assert _head(monkeypatch, device).choose_form(8, "fused_128x128") == "fused_128x256"
    with pytest.raises(ValueError, match=r"^head.kernels=fused_128x128: .*: out of resource: shared memory ... more; set head"):
        _head(monkeypatch, device, "fused_128x128").choose_form(8)
    monkeypatch.setattr(choice._Trial, "__init__", lambda *given: torch.empty(1 << 60))
    met: list[Tensor] = []  # an error of one rank must not keep it from the others, who wait for its times
    monkeypatch.setattr("partial_fc.head.Collectives.sum", lambda self, tensor: met.append(tensor) or tensor)
    with pytest.raises(ValueError, match=r"^head.kernels=auto: separate does not work .* memory.*; set head.kernels=plain"):
        _head(monkeypatch, device).choose_form(8)
    assert met[0].isinf().all()


def test_only_a_head_without_its_conditions_stays_as_it_is(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    assert (*KERNELS, *choice.FORMS) == CHOICES["head.kernels"]
    for more in ({"loss": "circle"}, {"matmul_dtype": torch.float32}, {"sub_centers": 2}, {"logit_correction": "log_r"}):
        assert _head(monkeypatch, device, **more).choose_form(8) == ""
        with pytest.raises(ValueError, match=r"head.kernels=fused_64x128 needs CUDA, .*; set head.kernels=auto"):
            _head(monkeypatch, device, SMALL, **more).choose_form(8)


def test_a_resumed_run_takes_the_form_of_its_checkpoint_and_ends_in_the_same_bits(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    few = ["head.matmul_dtype=bf16", "eval.targets=[]", "checkpoint.every=2", "train.epochs=9", "schedule.power=0"]
    assert train.main(small_run(dataset, tmp_path, *few, "train.max_steps=2", f"head.kernels={SMALL}")) == 1
    assert capsys.readouterr().err.startswith(f"error: head.kernels={SMALL} needs CUDA, ")
    monkeypatch.setattr("partial_fc.head.choose_kernels", lambda *given: "triton")
    found = []
    for name, stops in (("whole", (4,)), ("part", (2, 4))):
        for number, stop in enumerate(stops):
            _give_times(monkeypatch, 4, 1 + 9 * number, 2, 3)  # another measurement would end otherwise
            assert train.main(small_run(dataset, tmp_path, *few, f"train.max_steps={stop}", f"run.name={name}")) == 0
        newest = list_checkpoints(tmp_path / name)[-1]
        found.append(json.loads((newest / "manifest.json").read_text())["config"]["head"]["kernels"])
    assert found == [SMALL, SMALL]
    equal_weights(tmp_path / "whole", tmp_path / "part")
    log = (tmp_path / "part" / "train.log").read_text()
    assert "separate 4 ms, fused_64x128 1 ms" in log and "changed since that checkpoint: head" not in log
