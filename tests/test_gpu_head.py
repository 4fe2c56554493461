"""The head on a GPU against float64, beside other work, and beyond 2^31 elements; CI runs the same bodies on the CPU, small."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_reference import DenseHead, near_their_centres, relative, stored_numbers, take_step
from rounding import bf16_half_step, head_bounds
from torch import Tensor

from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.centres.shard import slots_of_classes
from partial_fc.centres.store import CentreStore
from partial_fc.kernels import KERNELS
from partial_fc.workspace import SideStream

pytestmark = pytest.mark.numeric

SCALE = 64.0
BF16_STEP = 2.0**-7  # of a number: how far its neighbours in bf16 lie apart at most
LR = 0.05


def _state(head: PartialFC) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in head.shard_state().items()}


@pytest.mark.parametrize("sample_rate", [1.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["exact", "lean", "tiny"])
def test_two_micro_batches_give_the_loss_and_the_step_of_the_dense_head(
    device: torch.device, storage: str, dtype: torch.dtype, sample_rate: float
):
    num_classes, dim, rows = 3000, 128, 64
    margin, optimizer = build_margin("arcface", scale=SCALE, margin=0.5), RowSGD(0.9, 5e-4)
    config = HeadConfig(sample_rate, optimizer, storage, matmul_dtype=dtype, chunk=700)  # the last chunk has fewer
    head = PartialFC(margin, num_classes, dim, seed=3, config=config, device=device)
    by_class = torch.from_numpy(head.shard_classes()).argsort()
    centres = stored_numbers(_state(head), "centres")[by_class]
    x, labels = near_their_centres(centres.float(), rows)
    loss, gradient, active = take_step(head, x, labels, LR, micro_batches=2)
    assert int(active.sum()) == head.num_active()
    after = _state(head)

    dense = DenseHead(margin.cpu(), centres.clone(), optimizer)
    expected, by_x, by_w = dense.step(x, labels, LR, active)
    if dtype == torch.float32:
        loss_bound, bound = head_bounds(SCALE, dim, rows)
    else:  # the logits of negatives are rounded by half a step of the largest, and so is what follows from them
        cosine = (F.normalize(x) @ F.normalize(centres.float()).t()).scatter(1, labels[:, None], -1.0)
        bound = bf16_half_step(SCALE * cosine.max().item())
        loss_bound = bound / rows**0.5  # a mean over rows
    assert loss == pytest.approx(expected, abs=loss_bound)
    assert relative(gradient, by_x) < bound
    momentum, moved = (stored_numbers(after, name)[by_class] for name in ("momentum", "centres"))
    rounding = BF16_STEP * dense.momentum.norm()
    if storage == "tiny":
        rounding = (dense.momentum.abs().amax(dim=1) / 127).norm() * dim**0.5  # a step of int8 each
    allowed = bound * by_w.norm() + (0 if storage == "exact" else rounding)
    assert allowed < dense.momentum.norm() / 2
    assert (momentum - dense.momentum).norm() < allowed
    allowed = LR * bound * by_w.norm() + (0 if storage == "exact" else BF16_STEP * dense.centres.norm())
    allowed += torch.finfo(torch.float32).eps * dense.centres.norm()
    assert allowed < (dense.centres - centres).norm() / 2
    assert (moved - dense.centres).norm() < allowed
    assert torch.equal(moved[~active], centres[~active])


def _sleep(device: torch.device, milliseconds: float) -> None:
    """Make the current CUDA stream wait, so that what other streams do too early or too late shows."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * 1.5e6))  # cycles of some 1.5 GHz


class _Late(SideStream):
    """On the CPU, a stream whose work is done as late as it may be: before, the centres are as they were."""

    def __init__(self, head: PartialFC) -> None:
        super().__init__(head.centre_store.inverse_norms.device)
        self.tensors = [*head.centre_store.tensors.values(), head.centre_store.inverse_norms]
        self.after: list[Tensor] = []

    @contextlib.contextmanager
    def run(self, keep: object) -> Iterator[None]:  # type: ignore[override]
        before = [tensor.clone() for tensor in self.tensors]
        yield
        self.after = [tensor.clone() for tensor in self.tensors]
        torch._foreach_copy_(self.tensors, before)

    def wait(self) -> None:
        if self.after:
            torch._foreach_copy_(self.tensors, self.after)
        self.after = []


def _train_with_noise(device: torch.device, beside: bool, steps: int, storage: str, **settings: Any) -> list[Tensor]:
    """Return losses, gradients and rows of a head, trained while the main stream sleeps, allocates and overwrites memory."""
    margin = build_margin("arcface", scale=SCALE, margin=0.5)
    config = HeadConfig(0.3, RowSGD(0.9, 5e-4), storage, matmul_dtype=torch.bfloat16, chunk=256, **settings)
    head = PartialFC(margin, 3000, 64, seed=3, config=config, device=device)
    if not beside:
        head._beside = SideStream(torch.device("cpu"))
    elif device.type == "cpu":
        head._beside = _Late(head)
    first = {name: rows.clone() for name, rows in head.shard_state().items()}
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        labels = torch.randperm(3000, generator=generator)[:32]  # distinct: CUDA adds repeats to a row in any order
        part = torch.randn(32, 64, generator=generator).to(device).requires_grad_()
        with ThreadPoolExecutor(1) as planner:
            planner.submit(_sleep, device, 0.5)  # so that the plan arrives late
            head.begin_step(planner.submit(head.prepare, labels[None], step).result(), step)
        loss = head(part)
        loss.backward()
        assert part.grad is not None
        if step % 2:
            _sleep(device, 0.5)
        update = head.settle(LR, part.grad.isfinite().all())
        _sleep(device, 0.5)  # the optimizer of the backbone
        if beside and head._beside._stream is not None:
            with torch.cuda.stream(head._beside._stream):
                _sleep(device, 1.0)  # the update begins late, when the main stream has long gone on
        update()
        found += [loss.detach(), part.grad]
        if step % 4 in (1, 2):  # the others are followed by a forward pass, and by a rebuild of the graph
            found += [head.centres.clone()] if step % 4 == 1 else [rows.clone() for rows in head.shard_state().values()]
        del part, loss, update
        # what the update still reads must not be handed out again
        rubbish = [torch.full((size,), float("nan"), device=device) for size in (32, 32 * 64, 256 * 64, 3000 * 32) * 4]
        del rubbish
    head.load_rows(lambda low, high: {name: rows[low:high] for name, rows in first.items()})
    return [tensor.cpu() for tensor in [*found, head.centres]]


# without a cache, the next forward pass and the update compute in the same buffers
@pytest.mark.parametrize("settings", [{"cache_mb": 0}, {"sampling": "neighbours", "neighbours": 4, "neighbours_every": 4}])
@pytest.mark.parametrize("storage", ["exact", "tiny"])
def test_the_update_on_a_stream_of_its_own_gives_the_same_bits(device: torch.device, storage: str, settings: dict[str, Any]):
    steps = 49 if device.type == "cuda" else 5
    alone, beside = (_train_with_noise(device, flag, steps, storage, **settings) for flag in (False, True))
    assert all(bool(tensor.isfinite().all()) for tensor in alone)
    assert [number for number, pair in enumerate(zip(alone, beside, strict=True)) if not torch.equal(*pair)] == []


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("storage", ["exact", "lean", "tiny", "mini"])
def test_a_loss_that_is_not_finite_changes_no_byte(device: torch.device, storage: str, kernels: str):
    margin = build_margin("arcface", scale=SCALE, margin=0.5)
    config = HeadConfig(0.5, RowSGD(0.9, 5e-4), storage, chunk=32, kernels=kernels)
    head = PartialFC(margin, 100, 32, config=config, device=device)
    changed = []
    for step, (bad, good) in enumerate([(0.0, True), (torch.nan, True), (torch.inf, True), (0.0, False), (0.0, True)]):
        before = {name: tensor.view(torch.uint8) for name, tensor in _state(head).items()}
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        x[3, 5] += bad
        head.begin_step(torch.arange(step, step + 8)[None], step)
        head(x.to(device))
        head.step(LR, torch.tensor(good, device=device))
        after = {name: tensor.view(torch.uint8) for name, tensor in _state(head).items()}
        changed.append([name for name in before if not torch.equal(before[name], after[name])])
    assert changed[1:4] == [[], [], []]
    assert all("centres" in names and "momentum" in names for names in (changed[0], changed[4]))


@pytest.mark.parametrize("sample_rate", [1.0, 0.3])
@pytest.mark.parametrize("storage", ["exact", "tiny", "mini"])
def test_centres_in_host_memory_move_by_the_bits_of_those_on_the_device(device: torch.device, storage: str, sample_rate: float):
    """Rows of one step are active in the next, and are fetched while the update may still write them."""
    ends = []
    for placement in ("device", "host"):
        config = HeadConfig(sample_rate, storage=storage, placement=placement, chunk=256, cache_mb=0)
        head = PartialFC(build_margin("arcface"), 2000, 128, seed=3, config=config, device=device)
        generator = torch.Generator().manual_seed(0)
        losses = []
        for step in range(6):
            head.begin_step(torch.randint(2000, (1, 64), generator=generator), step)
            losses.append(head(torch.randn(64, 128, generator=generator).to(device)))
            head.step(LR)
        ends.append({"losses": torch.stack(losses).cpu(), **_state(head)})
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@contextlib.contextmanager
def _centres_drawn_on_the_device() -> Iterator[None]:
    """The host would draw millions of centres for a minute."""

    def fill(self: CentreStore, start: int, seed: int) -> None:
        generator = torch.Generator(self.inverse_norms.device).manual_seed(seed)
        for low in range(0, self.num_rows, 1 << 18):
            self.tensors["centres"][low : low + (1 << 18)].normal_(std=0.01, generator=generator)
        self.refresh_norms()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CentreStore, "fill_initial", fill)
        yield


def _chunked_float64(x: Tensor, slots: Tensor, centres: Tensor, chosen: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return loss, its gradient for x (B, D), and for the unit centres of the chosen slots (n, D); cosface 0.4, in float64.

    The softmax over all classes is written down once more: z = 64 cos, and 64 (cos - 0.4) for the target class.
    """
    unit = F.normalize(x.double())
    rows = torch.arange(len(x), device=x.device)

    def logits_of(low: int) -> tuple[Tensor, Tensor]:
        w = F.normalize(centres[low : low + 65536].double())
        z = SCALE * unit @ w.t()
        here = (slots >= low) & (slots < low + len(w))
        z[rows[here], slots[here] - low] -= SCALE * 0.4
        return z, w

    blocks = range(0, len(centres), 65536)
    lse = torch.logsumexp(torch.stack([torch.logsumexp(logits_of(low)[0], dim=1) for low in blocks]), dim=0)
    target = SCALE * ((unit * F.normalize(centres[slots].double())).sum(dim=1) - 0.4)
    by_unit = torch.zeros_like(unit)
    for low in blocks:
        z, w = logits_of(low)
        by_unit += SCALE / len(x) * torch.exp(z - lse[:, None]) @ w
    by_unit -= SCALE / len(x) * F.normalize(centres[slots].double())
    by_x = (by_unit - unit * (by_unit * unit).sum(dim=1, keepdim=True)) / x.double().norm(dim=1, keepdim=True)
    of_chosen = F.normalize(centres[chosen].double())
    z = SCALE * unit @ of_chosen.t()
    own = slots[:, None] == chosen[None]
    weights = torch.exp(z - SCALE * 0.4 * own - lse[:, None]) - own.double()
    return (lse - target).mean().item(), by_x, SCALE / len(x) * weights.t() @ unit


def test_a_head_of_more_than_2_31_elements_gives_the_numbers_of_float64(device: torch.device):
    num_classes, dim, rows = (5_000_000, 512, 32) if device.type == "cuda" else (70_000, 32, 32)
    needed = 2 * 4 * num_classes * dim + (4 << 30)
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory, {torch.cuda.mem_get_info()[0] / 2**30:.0f} GiB are free")
    config = HeadConfig(optimizer=RowSGD(0.0, 0.0), cache_mb=256)
    with _centres_drawn_on_the_device():
        head = PartialFC(build_margin("cosface", scale=SCALE, margin=0.4), num_classes, dim, config=config, device=device)
    slots = torch.arange(num_classes - rows // 2, num_classes, device=device).repeat(2)  # each class twice, the last of all
    labels = torch.from_numpy(head.shard_classes()[-rows // 2 :]).repeat(2)
    assert slots_of_classes(labels.numpy(), num_classes, 0).tolist() == slots.tolist()
    generator = torch.Generator().manual_seed(0)
    x = F.normalize(head.centres[slots].cpu()) + torch.linspace(0, 2, rows)[:, None] * F.normalize(
        torch.randn(rows, dim, generator=generator)
    )
    x = (5 * x).to(device).requires_grad_()
    chosen = torch.cat([torch.arange(1000, device=device), slots[: rows // 2]])
    loss_should, by_x, by_unit = _chunked_float64(x.detach(), slots, head.centres, chosen)
    before = head.centres[chosen].double()
    head.begin_step(labels[None], 0)
    loss = head(x)
    loss.backward()
    head.step(1e-3)
    # as the norm of a centre: d(unit)/d(centre) is the part across it, over its norm
    unit, norm = F.normalize(before), before.norm(dim=1, keepdim=True)
    expected = 1e-3 * (by_unit - unit * (by_unit * unit).sum(dim=1, keepdim=True)) / norm
    moved = before - head.centres[chosen].double()
    loss_bound, bound = head_bounds(SCALE, dim, rows)
    assert loss.item() == pytest.approx(loss_should, abs=loss_bound)
    assert x.grad is not None and relative(x.grad, by_x) < bound
    # the difference of two fp32 numbers has the rounding of the centres themselves
    assert (moved - expected)[1000:].norm() < bound * expected[1000:].norm() + torch.finfo(torch.float32).eps * before.norm()
    assert bool(head.centres[:1000].isfinite().all()) and expected[1000:].norm() > 1e-3 * before[1000:].norm()
