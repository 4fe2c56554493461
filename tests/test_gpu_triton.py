"""A head on Triton beside one on plain torch, in the formats that are rounded; without a GPU Triton's interpreter runs it."""

import importlib

import pytest
import torch
from dense_reference import relative, stored_numbers, take_step
from rounding import head_bounds

from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.kernels import _why_no_triton

if _why_no_triton():
    pytest.skip(f"{_why_no_triton()}; the CUDA builds of torch bring it", allow_module_level=True)
importlib.import_module("partial_fc.kernels.triton")

pytestmark = pytest.mark.numeric

LR = 0.05
CLASSES, DIM, ROWS = 33, 40, 8  # DIM is no power of two


# in chunks of 16 they end with a chunk of one slot; half of them: a run with a remainder, and positives one by one
@pytest.mark.parametrize(("chunk", "sample_rate"), [(16, 1.0), (7, 0.5), (1, 0.2)])
@pytest.mark.parametrize("storage", ["lean", "tiny", "mini"])
def test_triton_and_plain_torch_take_the_same_step_but_for_the_rounding(
    device: torch.device, storage: str, chunk: int, sample_rate: float, monkeypatch: pytest.MonkeyPatch
):
    losses, gradients, rows = [], [], []
    for name in ("plain", "triton"):
        monkeypatch.setattr("partial_fc.head.choose_kernels", lambda *given, name=name: name)
        margin = build_margin("arcface", scale=64.0, margin=0.5)
        config = HeadConfig(sample_rate, RowSGD(0.9, 5e-4), storage, chunk=chunk, kernels="plain")
        head = PartialFC(margin, CLASSES, DIM, seed=2, config=config, device=device)
        before = {key: tensor.clone() for key, tensor in head.shard_state().items()}
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(CLASSES, (ROWS,), generator=generator)
        labels[1] = labels[0]
        loss, gradient, _ = take_step(head, torch.randn(ROWS, DIM, generator=generator), labels, LR)
        losses.append(loss)
        gradients.append(gradient)
        rows.append({key: tensor.clone() for key, tensor in head.shard_state().items()})
    loss_bound, bound = head_bounds(64.0, DIM, ROWS)
    assert losses[0] == pytest.approx(losses[1], abs=2 * loss_bound)
    assert relative(gradients[1], gradients[0]) < 2 * bound
    plain, triton = rows
    momentum, other_momentum = (stored_numbers(state, "momentum") for state in rows)
    # each rounds to one of the two neighbours of almost the same number; of bf16 they are 2^-7 of it apart at most
    numbers, other = stored_numbers(plain, "centres"), stored_numbers(triton, "centres")
    wide = numbers.abs().amax(dim=1, keepdim=True) / 1015 if storage == "mini" else 2.0**-7 * numbers.abs()
    wide = wide + 2 * bound * LR * momentum.abs().amax()
    if storage == "mini":  # the same noise, but numbers near a border
        assert (other == numbers).double().mean() > 0.99
        other = other - LR * 0.9 / (1 - 0.9) * (other_momentum - momentum)
    assert ((other - numbers).abs() <= wide).all()
    step = momentum.abs().amax(dim=1, keepdim=True) / (15 if storage == "mini" else 127)
    step = 2.0**-7 * momentum.abs() if storage == "lean" else step
    wide = 1.01 * step + 2 * bound * momentum.abs().amax()
    assert ((other_momentum - momentum).abs() <= wide).all()
    active = [(state["momentum"] != 0).any(dim=1) for state in rows]
    assert torch.equal(*active) and int(active[0].sum()) == head.num_active()
    for state in rows:
        assert torch.equal(state["centres"][~active[0]], before["centres"][~active[0]])
    norms = 1 / triton["centres"].float().norm(dim=1)
    torch.testing.assert_close(triton["inverse_norms"], norms, rtol=2.0**-20, atol=0)
