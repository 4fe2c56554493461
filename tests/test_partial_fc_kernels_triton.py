"""The Triton kernels against slow float64 formulas; without a GPU they run in Triton's interpreter, which is slow too.

The formulas are those of partial_fc/centres/row_optimizer.py, written down again.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import some
from dense_reference import stored_numbers
from negatives_cases import Case, assert_right_maxima, assert_right_weights, cases, given
from rounding import rounding_bound
from torch import Tensor

from losses import build_margin
from losses.negatives import KINDS
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.kernels import _why_no_triton
from partial_fc.kernels.plain import FUSED, CentreGradient, PlainKernels, Tile
from partial_fc.workspace import Workspace

if _why_no_triton():
    pytest.skip(f"{_why_no_triton()}; the CUDA builds of torch bring it", allow_module_level=True)
kernels = importlib.import_module("partial_fc.kernels.cuda")

pytestmark = pytest.mark.numeric
State = dict[str, Tensor]
Target = tuple[Tensor, Tensor, Tensor]
Update = Callable[..., None]
SEED = 2**62 + 987654321
FORMATS = {"lean": (torch.bfloat16, torch.bfloat16), "tiny": (torch.bfloat16, torch.int8), "mini": (torch.int8, torch.int8)}
BF16_STEPS = 2.0**-7  # bf16 numbers in [1, 2) lie this far apart


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _state(rows: int, dim: int, device: torch.device, form: str = "exact") -> State:
    """Return centres of norms near 1 to 3, and moments that are not zero."""
    centre_dtype, momentum_dtype = FORMATS.get(form, (torch.float32, torch.float32))
    centres = _normal(rows, dim) / dim**0.5 * torch.linspace(1, 3, rows)[:, None]
    state = {"centres": centres, "momentum": 0.1 * _normal(rows, dim, seed=1)}
    if centre_dtype == torch.int8:
        state["centres_scale"] = centres.abs().amax(dim=1) / 127
        centres = (centres / state["centres_scale"][:, None]).round()
    centres = state["centres"] = centres.to(centre_dtype)
    if momentum_dtype == torch.int8:
        state["momentum_scale"] = torch.rand(rows, generator=torch.Generator().manual_seed(2)) / 100
        state["momentum"] = (40 * _normal(rows, dim, seed=1)).clamp(-127, 127)
    state["momentum"] = state["momentum"].to(momentum_dtype)
    state["variance"] = 0.01 * _normal(rows, dim, seed=3).square().to(torch.float32 if form == "exact" else torch.bfloat16)
    state["updates"] = torch.arange(rows, dtype=torch.int32)
    state["inverse_norms"] = 1 / centres.float().norm(dim=1)
    return {name: tensor.to(device) for name, tensor in state.items()}


def _copy(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def _sgd(state: State, gradient: Tensor, select: int | Tensor, nesterov: bool = False, **more: Any) -> None:
    names = ("centres", "centres_scale", "momentum", "momentum_scale")
    _update(RowSGD(0.9, 0.02, nesterov), 0.3, names, state, gradient, select, **more)


def _adamw(state: State, gradient: Tensor, select: int | Tensor, **more: Any) -> None:
    names = ("centres", "centres_scale", "momentum", "momentum_scale", "variance", "updates")
    _update(RowAdamW(0.9, 0.999, 1e-8, 0.05), 0.01, names, state, gradient, select, **more)


def _update(
    optimizer: RowSGD | RowAdamW, lr: float, names: tuple[str, ...], state: State, gradient: Tensor, select: int | Tensor,
    seed: int = SEED, apply: Tensor | None = None, target: Target | None = None,
) -> None:  # fmt: skip
    """Update rows of the tensors with these names; select: the first of consecutive rows, or their numbers."""
    tensors = {name: state[name] for name in names if name in state}
    store: Any = SimpleNamespace(tensors=tensors, inverse_norms=state["inverse_norms"])
    where = select if isinstance(select, Tensor) else slice(select, select + len(gradient))
    given = CentreGradient(where, gradient, *(target or _no_target(gradient)))
    _on(gradient.device).update_rows(optimizer, store, given, lr, seed, apply)


def _on(device: torch.device) -> PlainKernels:
    """Return the Triton kernels."""
    made: PlainKernels = kernels.TritonKernels(Workspace(device, 0))
    return made


def _no_target(gradient: Tensor) -> Target:
    none = torch.empty(0, dtype=torch.int64, device=gradient.device)
    return none, none, torch.empty(0, gradient.shape[1], device=gradient.device)


def _gradient_of_centres(state: State, gradient: Tensor) -> Tensor:
    """Return the float64 gradient of w from that of w / |w| over |w|: its part across w."""
    scale = state.get("centres_scale", torch.ones_like(state["inverse_norms"])).double()[:, None]
    unit = stored_numbers(state, "centres") / scale * state["inverse_norms"].double()[:, None]
    gradient = gradient.double() / scale
    return gradient - unit * (unit * gradient).sum(dim=1, keepdim=True)


def _expected_sgd(state: State, gradient: Tensor, nesterov: bool = False) -> tuple[Tensor, Tensor]:
    """Return the float64 (centres, momentum) after a step with all rows."""
    w = stored_numbers(state, "centres")
    full = _gradient_of_centres(state, gradient) + 0.02 * w
    m = 0.9 * stored_numbers(state, "momentum") + full
    return w - 0.3 * (full + 0.9 * m if nesterov else m), m


def _expected_adamw(state: State, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float64 (centres, momentum, variance) after a step with all rows."""
    full = _gradient_of_centres(state, gradient)
    m = 0.9 * stored_numbers(state, "momentum") + 0.1 * full
    s = 0.999 * state["variance"].double() + 0.001 * full**2
    k = state["updates"].double()[:, None] + 1
    step = (m / (1 - 0.9**k)) / ((s / (1 - 0.999**k)).sqrt() + 1e-8)
    return stored_numbers(state, "centres") * (1 - 0.01 * 0.05) - 0.01 * step, m, s


def _assert_norms_are_those_of_the_stored_rows(state: State) -> None:
    rtol = rounding_bound(torch.float32, state["centres"].shape[1])
    torch.testing.assert_close(state["inverse_norms"].double(), 1 / state["centres"].double().norm(dim=1), rtol=rtol, atol=0)


@pytest.mark.parametrize(
    ("dtype", "form"), [(torch.float32, ""), (torch.bfloat16, ""), *((torch.bfloat16, form) for form in FUSED)]
)
@pytest.mark.parametrize(
    ("shape", "shift", "limit", "normalised"),
    [((70, 300), 7.5, None, False), ((131, 5), 3, 12.0, False), ((3, 1), 0.0, None, True), ((131, 5), 3, 12.0, True)],
)
def test_exponentials_and_their_sums_are_those_of_float64(
    device: torch.device,
    dtype: torch.dtype,
    form: str,
    shape: tuple[int, int],
    shift: float,
    limit: float | None,
    normalised: bool,
) -> None:
    num_rows, num_columns = shape
    on = _on(device)
    on.fused = form
    z_sum, expected_sum = torch.full((num_columns,), 0.5, device=device), torch.full((num_columns,), 0.5, dtype=torch.float64)
    for begin in (0, 1000):  # the second call adds to the first
        buffer = (10 * _normal(num_rows, num_columns + 3, seed=begin)).to(device, dtype)  # rows lie further apart than B
        before = buffer.cpu().clone()
        own = torch.randint(0, num_rows, (num_columns,), generator=torch.Generator().manual_seed(begin))
        own[1::4], own[2::4], own[3::4] = -1 - begin, num_rows, num_rows + 7  # not in this chunk
        inverse = None if normalised else torch.linspace(0.3, 1.5, num_rows + 1)[1:]  # not at a multiple of 16 bytes
        given = None if inverse is None else inverse.to(device)
        tile = Tile(buffer[:, :num_columns], given, (own + begin).to(device), begin, limit)
        if form:  # products with the unit matrix, in which other rows follow
            wider = torch.cat([before[:, :num_columns], _normal(256 - num_rows, num_columns).to(dtype)]).to(device)
            ones = torch.ones(num_rows, device=device) if given is None else given
            tile = tile._replace(inverse_norms=ones, factors=(wider, torch.eye(num_columns, device=device, dtype=dtype).t()))
            tile.products.fill_(torch.nan)
        on.exponentials(tile, shift, z_sum)
        v = torch.ones(num_rows, 1, dtype=torch.float64) if inverse is None else inverse.double()[:, None]
        logits = before.double()[:, :num_columns] * v
        expected = (logits - shift).exp()
        expected[logits > (np.inf if limit is None else limit)] = 0.0
        for column in range(0, num_columns, 4):
            expected[own[column], column] = 0.0
        stored = buffer.cpu().double()[:, :num_columns]
        # fp32: the hardware's exp is 2^x of a rounded product; bf16: CUDA rounds to nearest, the interpreter cuts off
        rtol = 1e-5 if dtype == torch.float32 else BF16_STEPS * (0.5 if device.type == "cuda" else 1.0)
        torch.testing.assert_close(stored, expected * v, rtol=rtol, atol=0)
        assert torch.equal(stored == 0, expected == 0)
        assert torch.equal(buffer[:, num_columns:].cpu(), before[:, num_columns:])
        expected_sum += expected.sum(dim=0)
    torch.testing.assert_close(z_sum.cpu().double(), expected_sum, rtol=1e-5, atol=0)  # the hardware's exp: 3e-6 near 64


def test_the_kernel_that_is_tried_before_the_first_step_runs_and_notices_a_wrong_sum(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.try_kernel(device)
    monkeypatch.setattr(kernels.TritonKernels, "exponentials", lambda *given: None)
    with pytest.raises(ArithmeticError, match=r"should be 1 and 2, they are \[0.0, 0.0\]"):
        kernels.try_kernel(device)


@pytest.mark.parametrize("update", [_sgd, _adamw])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_part_of_the_target_classes_is_added_once_for_each_sample_of_a_class(
    device: torch.device, update: Update, dtype: torch.dtype
) -> None:
    state, gradient = _state(9, 40, device), _normal(9, 40, seed=4).to(device, dtype)
    values = _normal(12, 40, seed=5).to(device)
    rows, samples = [0, 2, 2, 2, 5, 6, 6], [3, 0, 7, 11, 1, 2, 9]  # row 2 has three samples; samples 4, 5, ... are elsewhere
    whole = gradient.double()
    for row, sample in zip(rows, samples, strict=True):
        whole[row] += state["inverse_norms"][row].double() * values[sample].double()
    expected = _expected_sgd(state, whole) if update is _sgd else _expected_adamw(state, whole)
    before = _copy(state)
    padded = torch.tensor([rows[0], *rows], device=device)[1:]  # not at a multiple of 16 bytes
    update(state, gradient, 0, target=(padded, torch.tensor(samples, device=device), values))
    for name, wanted in zip(("centres", "momentum", "variance"), expected, strict=False):
        torch.testing.assert_close(
            state[name].double(), wanted, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    again = before
    update(again, gradient, 0, target=(padded, torch.tensor(samples, device=device), values))
    assert all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.parametrize("dim", [16, 48, 130])
@pytest.mark.parametrize(("dtype", "nesterov"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_sgd_in_fp32_equals_the_float64_formula(device: torch.device, dim: int, dtype: torch.dtype, nesterov: bool) -> None:
    state, gradient = _state(5, dim, device), _normal(5, dim, seed=4).to(device, dtype)
    centres, momentum = _expected_sgd(state, gradient, nesterov)
    _sgd(state, gradient, 0, nesterov=nesterov)
    torch.testing.assert_close(state["centres"].double(), centres, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["momentum"].double(), momentum, rtol=1e-5, atol=1e-6)
    _assert_norms_are_those_of_the_stored_rows(state)


@pytest.mark.parametrize("update", [_sgd, _adamw])
@pytest.mark.parametrize("form", ["exact", "lean", "tiny", "mini"])
def test_rows_chosen_by_number_or_by_run_equal_those_of_a_whole_update_and_no_other_changes(
    device: torch.device, update: Update, form: str
) -> None:
    before, gradient = _state(7, 20, device, form), _normal(7, 20, seed=4).to(device)
    whole = _copy(before)
    update(whole, gradient, 0)  # same seed: the noise may depend on the row, not on where it lies in the chunk
    for rows, select in [([2, 3, 4], 2), ([6, 0, 3], torch.tensor([6, 0, 3], device=device)), ([], 7)]:
        state = _copy(before)
        update(state, gradient[rows].contiguous(), select)
        others = [row for row in range(7) if row not in rows]
        for name, tensor in state.items():
            assert torch.equal(tensor[rows], whole[name][rows]), name
            assert torch.equal(tensor[others], before[name][others]), name


def test_adamw_in_fp32_equals_torchs_with_one_optimizer_per_row(device: torch.device) -> None:
    state = _state(4, 24, device)
    for name in ("momentum", "variance", "updates"):
        state[name].zero_()
    settings = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.05}
    rows = [row.clone().requires_grad_() for row in state["centres"].cpu().double()]
    optimizers = [torch.optim.AdamW([row], **settings) for row in rows]
    for step, touched in enumerate([[0, 1, 2, 3], [3, 1], [1, 2], [0, 1, 2, 3], [1]]):  # row 1 takes all five steps
        gradient = _normal(len(touched), 24, seed=10 + step)
        over_norm = gradient.to(device) * state["inverse_norms"][touched, None]
        for row, direction in zip(touched, gradient.double(), strict=True):
            optimizers[row].zero_grad()
            (F.normalize(rows[row], dim=0) * direction).sum().backward()
            optimizers[row].step()
        _adamw(state, over_norm, torch.tensor(touched, device=device))
    torch.testing.assert_close(state["centres"].cpu().double(), torch.stack(rows).detach(), rtol=1e-5, atol=1e-6)
    assert state["updates"].tolist() == [2, 5, 3, 3]
    _assert_norms_are_those_of_the_stored_rows(state)


def test_adamw_corrects_the_bias_at_any_number_of_updates(device: torch.device) -> None:
    state, gradient = _state(8, 16, device), _normal(8, 16, seed=4).to(device)
    state["updates"] = torch.tensor([0, 1, 3, 4, 400, 600, 20_000, 2_000_000_000], dtype=torch.int32, device=device)
    state["centres"] *= 1e-3  # short, so that the difference below has digits enough
    state["inverse_norms"] *= 1e3
    before = _copy(state)
    centres, momentum, variance = _expected_adamw(before, gradient)
    _adamw(state, gradient, 0)
    moved = state["centres"].double() - before["centres"].double()
    torch.testing.assert_close(moved, centres - before["centres"].double(), rtol=2e-6, atol=5e-9)
    torch.testing.assert_close(state["momentum"].double(), momentum, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["variance"].double(), variance, rtol=1e-5, atol=1e-9)
    assert torch.equal(state["updates"], before["updates"] + 1)


def _of_mini(state: State, centres: Tensor, momentum: Tensor, update: Update) -> Tensor:
    """Return the centres that mini should store, from those and the momentum of the exact update."""
    carry = 0.3 * 0.9 / (1 - 0.9) if update is _sgd and "centres_scale" in state else 0.0
    return centres + carry * (stored_numbers(state, "momentum") - momentum)


def _errors_of_many_seeds(
    update: Update, before: State, gradient: Tensor, expected: State, num_seeds: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by tensor (error in steps of the format (seeds, rows, D), probability of the upper neighbour (rows, D))."""
    steps = {name: 2.0 ** values.abs().log2().floor() * BF16_STEPS for name, values in expected.items()}
    mini = "centres_scale" in before
    for name in [name for name in expected if before[name].dtype == torch.int8]:
        largest = expected[name].abs().amax(dim=1, keepdim=True)
        steps[name] = largest.expand_as(expected[name]) / (15 if mini and name == "momentum" else 1016 if mini else 127)
    errors: dict[str, list[Tensor]] = {name: [] for name in expected}
    for number in range(num_seeds):
        state = _copy(before)
        if mini:  # its rounding follows the number of updates, in the lower half of these bits
            state["centres_scale"].view(torch.int32).add_(number)
        update(state, gradient, 0, seed=SEED + number)
        _assert_norms_are_those_of_the_stored_rows(state)
        for name, values in expected.items():
            if name == "centres" and mini:
                values = _of_mini(state, values, expected["momentum"], update)
                steps[name] = state["centres_scale"].double()[:, None].expand_as(values) / 8
            errors[name].append((stored_numbers(state, name) - values) / steps[name])
    return {name: (torch.stack(errors[name]), (expected[name] / steps[name]) % 1.0) for name in expected}


@pytest.mark.parametrize("form", ["lean", "tiny", "mini"])
@pytest.mark.parametrize("update", [_sgd, _adamw])
def test_stochastic_rounding_goes_to_a_neighbour_without_bias_and_independently(
    device: torch.device, update: Update, form: str
) -> None:
    before, gradient = _state(2, 48, device, form), _normal(2, 48, seed=4).to(device)
    values = _expected_sgd(before, gradient) if update is _sgd else _expected_adamw(before, gradient)
    expected = dict(zip(("centres", "momentum", "variance"), values, strict=False))
    scores = {}
    for name, (error, upper) in _errors_of_many_seeds(update, before, gradient, expected, num_seeds=24).items():
        assert error.abs().max() < 1.02, name  # one of the two neighbours; fp32 arithmetic may move the number a little
        assert (error.abs() > 0.501).any(), f"{name}: always the nearest"
        variance = (upper * (1 - upper)).clamp_min(1e-9)
        mean_error = error.mean() / (variance.sum() / error.shape[0]).sqrt() * variance.numel()
        assert mean_error.abs() < 4, f"{name}: mean off by {mean_error:.1f} standard errors"
        # bf16 is rounded away from zero or towards it, int8 up or down
        scores[name] = error / variance.sqrt() * (1 if before[name].dtype == torch.int8 else expected[name].sign())
        usual = variance > 0.05  # elsewhere almost every seed gives the same neighbour: not normal with so few seeds
        squares = (scores[name].mean(dim=0)[usual] ** 2 * error.shape[0]).mean()  # about 1 if each element is unbiased
        if form == "mini" and name != "variance":
            assert squares < (0.75 if name == "centres" else 0.25), (
                f"{name}: errors of successive steps do not cancel, {squares:.2f}"
            )
        else:
            assert (squares - 1).abs() < 4 * (2 / usual.sum()) ** 0.5, f"{name}: {squares:.2f}"
    if form == "mini":
        return
    score = scores["centres"]
    others = [score.roll(1, dims=0), score.flip(1), *(score.roll(shift, dims=2) for shift in (1, 2, 3, 4))]  # seed, row, column
    for other in others + [scores[name] for name in expected if name != "centres"]:
        assert (score * other).mean().abs() < 4 / score.numel() ** 0.5


@pytest.mark.parametrize("form", ["exact", "tiny"])
@pytest.mark.parametrize("update", [_sgd, _adamw])
def test_nothing_changes_where_apply_is_zero(device: torch.device, update: Update, form: str) -> None:
    before, gradient = _state(3, 20, device, form), torch.full((3, 20), float("nan"), device=device)
    for dtype in (torch.float32, torch.bool, torch.int64):
        state = _copy(before)
        update(state, gradient, 0, apply=torch.zeros(1, dtype=dtype, device=device))
        assert all(torch.equal(state[name], before[name]) for name in before)
        update(state, _normal(3, 20).to(device), 0, apply=torch.ones(1, dtype=dtype, device=device))
        assert not torch.equal(state["centres"], before["centres"])


@pytest.mark.parametrize("form", ["exact", "lean", "tiny", "mini"])
@pytest.mark.parametrize("update", [_sgd, _adamw])
def test_zero_centres_and_zero_momentum_stay_zero_without_a_gradient(device: torch.device, update: Update, form: str) -> None:
    state = _state(2, 20, device, form)
    state["centres"].zero_()
    state["momentum"].zero_()
    state["variance"].zero_()
    state["inverse_norms"].fill_(1e12)
    if form in ("tiny", "mini"):
        state["momentum_scale"].zero_()
    update(state, torch.zeros(2, 20, device=device), 0)
    assert all(not tensor.any() for name, tensor in state.items() if name not in ("inverse_norms", "updates", "centres_scale"))
    torch.testing.assert_close(state["inverse_norms"], torch.full((2,), 1e12, device=device))


@pytest.mark.parametrize("form", ["exact", "lean", "tiny", "mini"])
def test_a_zero_centre_moves_as_the_formula_says(device: torch.device, form: str) -> None:
    state, gradient = _state(2, 20, device, form), _normal(2, 20, seed=4).to(device)
    state["centres"][1], state["momentum"][1], state["inverse_norms"][1] = 0, 0, 1e12
    centres, momentum = _expected_sgd(state, gradient)
    _sgd(state, gradient, 0)
    rtol = 1e-5 if form == "exact" else BF16_STEPS
    centres = _of_mini(state, centres, momentum, _sgd)
    step = 1.02 * centres.abs().max().item() / 1016
    found = stored_numbers(state, "centres")
    torch.testing.assert_close(found, centres, rtol=rtol, atol=step if form == "mini" else 1e-6)
    step = 1.001 * momentum[1].abs().max().item() / (15 if form == "mini" else 127)
    found = stored_numbers(state, "momentum")[1]
    torch.testing.assert_close(found, momentum[1], rtol=rtol, atol=step if form in ("tiny", "mini") else 1e-6)
    _assert_norms_are_those_of_the_stored_rows(state)


@pytest.mark.parametrize("bad", [0x7F800000, 0x7FC00000, 0x7FFFFFFF])  # infinity, NaN, and the NaN that CUDA makes
@pytest.mark.parametrize("form", ["exact", "lean"])
def test_what_is_not_finite_does_not_become_finite_by_rounding(device: torch.device, form: str, bad: int) -> None:
    state, gradient = _state(2, 20, device, form), _normal(2, 20, seed=4).to(device)
    gradient[0] = torch.full((20,), bad, dtype=torch.int32, device=device).view(torch.float32)
    _sgd(state, gradient, 0)
    for name in ("centres", "momentum"):
        assert not state[name][0].isfinite().any() and state[name][1].isfinite().all()
    assert not torch.allclose(state["inverse_norms"][0], torch.tensor(1e12, device=device))  # NaN: not that of a zero row


def test_offsets_of_more_than_32_bits_reach_the_last_rows(device: torch.device) -> None:
    num_rows, dim = 2**31 // 4096 + 4, 4096
    state = _state(2, dim, device, "tiny")
    whole = {
        name: torch.from_numpy(np.zeros((num_rows, *tensor.shape[1:]), np.int8 if tensor.dtype == torch.int8 else np.int16))
        for name, tensor in state.items()
        if name in ("centres", "momentum")
    }  # numpy's zeros take no memory on the CPU until they are written to
    whole["centres"] = whole["centres"].view(torch.bfloat16)
    whole = {name: tensor.to(device) for name, tensor in whole.items()}
    for name in ("momentum_scale", "inverse_norms"):
        whole[name] = torch.zeros(num_rows, device=device)
    for name, tensor in whole.items():
        tensor[-2:] = state[name]
    gradient = _normal(2, dim, seed=4).to(device)
    centres, momentum = _expected_sgd({name: state[name] for name in whole}, gradient)
    _sgd(whole, gradient, num_rows - 2)
    torch.testing.assert_close(whole["centres"][-2:].double(), centres, rtol=BF16_STEPS, atol=1e-6)
    step = 1.001 * momentum.abs().max().item() / 127
    found = stored_numbers({name: tensor[-2:] for name, tensor in whole.items()}, "momentum")
    torch.testing.assert_close(found, momentum, rtol=0, atol=step)


@pytest.mark.parametrize("optimizer", [RowSGD(0.9, 5e-4), RowSGD(0.9, 5e-4, True), RowAdamW(0.9, 0.999, 1e-8, 0.05)])
def test_a_head_on_triton_trains_as_one_on_plain_torch(
    device: torch.device, optimizer: RowSGD | RowAdamW, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = []
    for name in ("plain", "triton"):
        monkeypatch.setattr("partial_fc.head.choose_kernels", lambda *given, name=name: name)
        margin = build_margin("arcface", scale=64.0, margin=0.5)
        head = PartialFC(
            margin, 66, 24, device=device, config=HeadConfig(sample_rate=0.5, optimizer=optimizer, chunk=32, kernels="plain")
        )
        for step in range(3):
            head.begin_step(torch.tensor([[7, 7, step, 40, 41, 7], [41, 50, 7, 60, 61, 62]])[: 1 + step], step)
            for micro in range(1 + min(step, 1)):
                embeddings = _normal(6, 24, seed=10 * step + micro)
                embeddings[0, 0] = torch.inf if step == 1 else 0.0  # this step must be skipped
                head(embeddings.to(device), micro)
            head.step(0.01)
        heads.append({name: tensor.clone() for name, tensor in head.shard_state().items()})
    for name, tensor in heads[0].items():
        # AdamW divides by the root of a moment near zero, which magnifies the last bit
        torch.testing.assert_close(heads[1][name], tensor, rtol=1e-3, atol=1e-6)


def _weights(case: Case, device: torch.device, products: Tensor | None = None) -> tuple[Tensor, Tensor]:
    made = given(case).to(device)
    wider = torch.zeros(case.shape[0], case.shape[1] + 3, dtype=case.dtype, device=device)  # rows lie further apart than B
    weights, sums = wider[:, :-3], torch.zeros(3, case.shape[1], device=device)
    weights.copy_(made.products if products is None else products)
    _on(device).weights(made.tile(weights), case.link, made.shift, made.less, sums)
    assert not wider[:, -3:].any()
    return weights, sums


# the interpreter takes half a second for each; what they add one by one, the others have together
IN_SHORT = cases()
if not torch.cuda.is_available():  # the C kernels run them all
    IN_SHORT = some([case for case in IN_SHORT if case.straight or case.weighted or case.scale > 100 or case.shape[0] > 100], 3)


@pytest.mark.parametrize("case", IN_SHORT, ids=str)
def test_weights_sums_and_maxima_of_negatives_are_those_of_float64(device: torch.device, case: Case) -> None:
    if device.type == "cpu":  # one class group and a bit; more than one group of samples only where nothing else is added
        samples = case.shape[1] if case.straight else min(case.shape[1], 257 if case.shape[0] < 37 else 60)
        case = replace(case, shape=(min(case.shape[0], 67), samples))
    made = given(case)
    assert_right_weights(made, *_weights(case, device))
    moved = made.to(device)
    start, products = torch.full((case.shape[1],), -math.inf), moved.products.clone()
    start[1::3] = 1e4
    maximum = start.to(device, copy=True)
    _on(device).maxima(moved.tile(products), maximum)
    assert_right_maxima(made, start, maximum)
    assert torch.equal(products, moved.products)


@pytest.mark.parametrize("link", ["softmax", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cosine_that_is_not_a_number_reaches_its_samples_sum_and_no_other(device: torch.device, kind: str, link: str) -> None:
    case = Case(kind, link, shape=(6, 40))
    products = given(case).products
    products[3, 5] = math.nan  # sample 5 has its own class elsewhere
    weights, sums = _weights(case, device, products)
    assert weights[3, 5].isnan() and sums[0, 5].isnan()
    assert weights.isnan().sum() == 1 and sums[0].isnan().sum() == 1
