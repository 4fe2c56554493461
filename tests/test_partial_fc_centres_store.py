"""Formats of the centres: rounding without bias, what is stored, conversion between formats, and bit-exact continuation."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from dense_reference import active_classes, all_centres, dense_loss, near_their_centres, relative, stored_numbers
from rounding import head_bounds, rounding_bound
from saving import save_now
from tiny_runs import same_bits
from torch import Tensor

from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.centres.row_optimizer import LazyDecay
from partial_fc.centres.store import FORMATS, CentreStore, Noise, quantise_rows, round_to_bfloat16_
from partial_fc.init import init_centres
from partial_fc.kernels import KERNELS
from partial_fc.workspace import Workspace
from utils.checkpoint import format as ckpt
from utils.checkpoint import reading
from utils.checkpoint.tensor_file import write_tensors

pytestmark = pytest.mark.numeric

NUM_CLASSES, D = 300, 32


def _neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 numbers next to fp32 values, towards zero and away from it, as fp32."""
    low = (values.view(torch.int32) & -65536).view(torch.float32)
    high = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    return low, torch.where(low == values, low, high)


def test_each_element_gets_every_number_of_the_noise_once():
    noise, draws = Noise(3, torch.device("cpu")), 65536
    seen = torch.stack([noise.next("bits", torch.Size([3])) for _ in range(draws)])
    assert torch.equal(seen.sort(dim=0)[0], torch.arange(draws, dtype=torch.int32)[:, None].expand(-1, 3))


def test_bf16_rounding_is_exact_on_average_with_the_variance_of_a_coin():
    values, draws = torch.cat([torch.randn(200), torch.tensor([0.0, 1.0, -1.0, 1e-30, 3e38, 1 + 2**-9, 1 / 3])]), 65536
    noise = Noise(draws, torch.device("cpu"))
    for value in values:  # as many elements as there are numbers of noise meet each of them once
        low, high = _neighbours(value)
        rounded = round_to_bfloat16_(value.repeat(draws), noise)
        assert bool(((rounded == low) | (rounded == high)).all())
        exact, step = value.double(), (high - low).double().abs()
        assert (rounded.double().mean() - exact).abs() <= 2e-5 * step + 1e-12 * exact.abs()
        share = (exact - low.double()).abs() / step if step > 0 else step
        squares = (rounded.double() - exact).square().mean()
        torch.testing.assert_close(squares, share * (1 - share) * step**2, rtol=1e-3, atol=1e-12)


def test_int8_rows_are_exact_on_average_and_keep_their_largest():
    rows, draws = torch.randn(5, 41) * torch.tensor([[1e-6], [1.0], [100.0], [0.0], [1e-20]]), 20_000
    many = rows.repeat(draws, 1)  # of 205 numbers: each meets other noise in each copy
    out, scales = torch.empty(many.shape, dtype=torch.int8), torch.empty(len(many))
    quantise_rows(many, Noise(many.numel(), torch.device("cpu")), out, scales, torch.empty(many.shape))
    found, scale = (out.float() * scales[:, None]).view(draws, 5, 41), rows.abs().amax(dim=1) / 127
    torch.testing.assert_close(scales.view(draws, 5), scale.expand(draws, 5))
    assert bool(((found - rows).abs() <= scale[:, None] * (1 + 2**-15)).all())  # 127 times 4 units
    mean = found.mean(dim=0, dtype=torch.float64)
    assert bool(((mean - rows.double()).abs() <= 0.02 * scale[:, None]).all())  # 4 standard errors of a coin are 0.014


def _head(
    state: str,
    kernels: str = "auto",
    optimizer: RowSGD | RowAdamW | None = None,
    rank: int = 0,
    world_size: int = 1,
    **more: object,
) -> PartialFC:
    margin = build_margin("cosface", scale=32.0, margin=0.3)
    config = HeadConfig(optimizer=optimizer or RowSGD(), storage=state, kernels=kernels, **more)  # type: ignore[arg-type]
    return PartialFC(margin, NUM_CLASSES, D, rank, world_size, 3, config)


def _train(head: PartialFC, steps: range, lr: float = 0.05) -> None:
    centres = all_centres(NUM_CLASSES, D, 3)
    for step in steps:
        x, labels = near_their_centres(centres, 24, step)
        head.begin_step(labels[None], step)
        head(x)
        head.step(lr)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("optimizer", [RowSGD(0.9, 5e-4), RowAdamW(0.9, 0.999, 1e-8, 0.05)])
@pytest.mark.parametrize("state", ["lean", "tiny", "mini"])
def test_an_update_lands_on_a_neighbour_and_on_average_on_the_exact_one(state: str, optimizer: RowSGD | RowAdamW, kernels: str):
    lr = 0.05 if isinstance(optimizer, RowSGD) else 1e-3
    exact = _head("exact", kernels, optimizer)
    # numbers that all formats hold, so that all start alike
    start = (exact.centres / exact.centres.abs().amax(dim=1, keepdim=True) * 127).round() / 512
    empty = {"variance": torch.zeros(NUM_CLASSES, D), "updates": torch.zeros(NUM_CLASSES, dtype=torch.int32)}
    rows = {"centres": start, "momentum": torch.zeros(NUM_CLASSES, D)} | (empty if isinstance(optimizer, RowAdamW) else {})

    def after_one_step(state: str, number: int) -> PartialFC:
        head = _head(state, kernels, optimizer)
        head.load_rows(lambda low, high: {name: tensor[low:high] for name, tensor in rows.items()})
        if state == "mini":  # its rounding follows the number of updates, in the lower half of these bits
            head.centre_store.tensors["centres_scale"].view(torch.int32).add_(number)
        x, labels = near_their_centres(all_centres(NUM_CLASSES, D, 3), 24)
        head.begin_step(labels[None], number)
        head(x)
        head.step(lr)
        return head

    exact = after_one_step("exact", 0)
    low, high = _neighbours(exact.centres)
    step = (high - low).abs().double().clamp_min(1e-30)
    draws, total = 12, torch.zeros(NUM_CLASSES, D, dtype=torch.float64)
    for number in range(draws):
        head = after_one_step(state, number)
        stored = stored_numbers(head.shard_state(), "centres")
        # the exact result itself differs in the last bits of fp32 from run to run of another rounding noise: none here
        is_neighbour = (stored == low) | (stored == high)
        if state == "mini":
            step = head.centre_store.tensors["centres_scale"][:, None].double() / 8
            added = stored_numbers(head.shard_state(), "momentum") - exact.shard_state()["momentum"]
            stored -= lr * 0.9 / (1 - 0.9) * added if isinstance(optimizer, RowSGD) else 0.0
            is_neighbour = (stored - exact.centres).abs() < 1.02 * step
        assert bool(is_neighbour.float().mean() > 0.999)
        total += stored
        norms = torch.linalg.vector_norm(head.centres.float(), dim=1)
        torch.testing.assert_close(head.centre_store.inverse_norms, 1 / norms, rtol=rounding_bound(torch.float32, D), atol=0)
    bias = ((total / draws - exact.centres.double()) / step).mean().abs()
    spread = ((total / draws - exact.centres.double()) / step).pow(2).mean().sqrt()
    assert bias < 4 * 0.5 / (draws * NUM_CLASSES * D) ** 0.5
    assert spread < 1.2 * 0.41 / draws**0.5  # a coin of random bias has the deviation sqrt(1/6) = 0.41 of a step


@pytest.mark.parametrize("nesterov", [False, True])
def test_all_kernels_round_mini_by_the_same_noise_which_each_update_changes(nesterov: bool):
    after = []
    for kernels in KERNELS:
        head = _head("mini", kernels, RowSGD(nesterov=nesterov))
        count = head.centre_store.tensors["centres_scale"].view(torch.int32)  # in the lower half of its bits
        first = count.clone()
        _train(head, range(4))
        assert ((count - first) & 0xFFFF == 4).all()
        after.append(head.shard_state())
    for name in ("centres", "momentum"):  # but for numbers near a border
        assert (after[0][name] != after[1][name]).float().mean() < 0.02


@pytest.mark.parametrize(("state", "bytes_per_class"), [("exact", 4100), ("lean", 2052), ("tiny", 1544), ("mini", 1036)])
def test_bytes_per_class_are_as_promised(state: str, bytes_per_class: int):
    head = PartialFC(build_margin("cosface", scale=32.0, margin=0.3), 100, 512, config=HeadConfig(storage=state))
    assert head.centre_store.bytes_per_row == bytes_per_class
    assert sum(tensor.nbytes for tensor in head.shard_state().values()) == 100 * bytes_per_class


def _save(head: PartialFC, folder: Path, step: int) -> Path:
    facts = {"run_signature": {"num_classes": NUM_CLASSES, "seed": 3}}
    slots = (head.first_slot, head.end_slot)
    return save_now(folder, step, {"w": torch.zeros(1)}, head.shard_state(), slots, {"a": 1}, facts)


# any three of these are together in some case
SAVED = [
    (state, inactive_rows, optimizer, KERNELS[(i + j + k) % 2])
    for i, state in enumerate(FORMATS)
    for j, inactive_rows in enumerate(("keep", "decay"))
    for k, optimizer in enumerate((RowSGD(), RowAdamW()))
]


@pytest.mark.parametrize(("state", "inactive_rows", "optimizer", "kernels"), SAVED)
def test_a_saved_and_loaded_head_goes_on_to_the_same_bits(
    tmp_path: Path, state: str, inactive_rows: str, optimizer: RowSGD | RowAdamW, kernels: str
):
    more = {"sample_rate": 0.3, "inactive_rows": inactive_rows, "chunk": 40, "sampling": "neighbours", "neighbours_every": 3}
    whole, again = _head(state, kernels, optimizer, **more), _head(state, kernels, optimizer, **more)
    _train(whole, range(4), lr=1e-2)
    path = _save(whole, tmp_path, 4)
    _train(whole, range(4, 7), lr=1e-2)  # the graph of step 3 is needed in step 4
    again.load_rows(reading.shard_reader(path))
    _train(again, range(4, 7), lr=1e-2)
    same_bits(again.shard_state(), whole.shard_state())


@pytest.mark.parametrize("optimizer", [RowSGD(), RowAdamW()])
@pytest.mark.parametrize("state", FORMATS)
def test_shards_of_any_number_of_ranks_hold_the_same_rows_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, optimizer: RowSGD | RowAdamW
):
    more = {"sample_rate": 0.3, "inactive_rows": "decay", "chunk": 40, "sampling": "neighbours", "neighbours_every": 3}
    trained = _head(state, optimizer=optimizer, **more)
    _train(trained, range(5), lr=1e-2)
    first = last = _save(trained, tmp_path, 1)
    monkeypatch.setattr("partial_fc.head.Collectives", lambda size: SimpleNamespace(world_size=size))  # no other rank is needed
    monkeypatch.setattr("partial_fc.centres.store._BLOCK", 64)  # several blocks, as of more than 2048 classes
    for step, world_size in enumerate((2, 3, 4, 1), start=2):
        final = ckpt.checkpoint_path(tmp_path, step)
        final.mkdir(parents=True)
        files = {}
        for rank in range(world_size):
            head = _head(state, optimizer=optimizer, rank=rank, world_size=world_size, **more)
            head.load_rows(reading.shard_reader(last))
            name = ckpt.shard_name(rank, world_size)
            files[name] = write_tensors(final / name, head.shard_state()) | {"slots": [head.first_slot, head.end_slot]}
        ckpt.commit(final, final.with_name(f"step_{10 + step:08d}"), {"step": 10 + step, "files": files})
        last = final.with_name(f"step_{10 + step:08d}")
    name = ckpt.shard_name(0, 1)
    assert (first / name).read_bytes() == (last / name).read_bytes()


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_format_continues_from_every_other(tmp_path: Path, source: str, target: str):
    before, after = _head(source), _head(target)
    _train(before, range(4))
    path = _save(before, tmp_path, 4)
    after.load_rows(reading.shard_reader(path))
    tolerance = 0.0 if source == target else 2**-7 if target == "mini" else 2**-8  # half a step of bf16 or int8, relative
    found, expected = (head.centre_store.load("centres", slice(0, NUM_CLASSES)).clone() for head in (after, before))
    assert relative(found, expected) <= tolerance
    saved, loaded = (head.centre_store.load("momentum", slice(0, NUM_CLASSES)).clone() for head in (before, after))
    step = saved.abs().amax(dim=1, keepdim=True) / (15 if target == "mini" else 127)
    limit = 0.5 * step if {"tiny", "mini"} & {source, target} and source != target else 2**-8 * saved.abs()
    assert bool(((saved - loaded).abs() <= limit * 1.01 + 1e-12).all())
    _train(after, range(4, 6))
    assert bool(after.centres.float().isfinite().all())


@pytest.mark.parametrize("target", FORMATS)
@mock.patch("partial_fc.centres.store._BLOCK", 64)  # several blocks, as of a real set
@mock.patch("partial_fc.init._BLOCK", 64)
def test_another_run_begins_with_the_centres_of_mini_and_their_norms(tmp_path: Path, target: str):
    before, after = _head("mini"), _head(target)
    _train(before, range(4))
    init_centres(after, str(_save(before, tmp_path, 4)), "", None)
    rows = before.shard_state()
    expected = rows["centres"].double() * rows["centres_scale"].double()[:, None]
    found = stored_numbers(after.shard_state(), "centres")
    assert relative(found, expected) <= 2**-7  # half a step of int8
    torch.testing.assert_close(found.norm(dim=1), expected.norm(dim=1), rtol=2**-6, atol=0)
    norms = torch.linalg.vector_norm(after.centres.float(), dim=1)
    torch.testing.assert_close(after.centre_store.inverse_norms, 1 / norms, rtol=rounding_bound(torch.float32, D), atol=0)
    _train(after, range(4, 6))


def test_a_checkpoint_of_the_other_optimizer_is_refused(tmp_path: Path):
    for made_by, asked, words in [(RowSGD(), RowAdamW(), "by sgd, not adamw"), (RowAdamW(), RowSGD(), "by adamw, not sgd")]:
        path = _save(_head("exact", optimizer=made_by), tmp_path / words, 1)
        with pytest.raises(ValueError, match=words):
            _head("exact", optimizer=asked).load_rows(reading.shard_reader(path))
    more = {"optimizer": RowAdamW(), "sample_rate": 0.3}
    _train(kept := _head("exact", **more), range(2))
    with pytest.raises(ValueError, match=r"its rows have seen different numbers of updates\. Set head.inactive_rows=keep"):
        _head("exact", inactive_rows="decay", **more).load_rows(reading.shard_reader(_save(kept, tmp_path, 1)))


def _dense_decay(optimizer: RowSGD | RowAdamW, rates: list[float]) -> tuple[Tensor, Tensor]:
    """Return centres and momentum after steps whose gradient is zero but in the first, by torch's own optimizers."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4))
    if isinstance(optimizer, RowSGD):
        dense: torch.optim.Optimizer = torch.optim.SGD(
            [weight], 0.0, optimizer.momentum, weight_decay=optimizer.weight_decay, nesterov=optimizer.nesterov
        )
    else:
        betas = (optimizer.beta1, optimizer.beta2)
        dense = torch.optim.AdamW([weight], 0.0, betas, optimizer.eps, optimizer.weight_decay)
    for number, lr in enumerate(rates):
        dense.param_groups[0]["lr"] = lr
        weight.grad = torch.full_like(weight, 0.3) if number == 0 else torch.zeros_like(weight)
        dense.step()
    name = "momentum_buffer" if isinstance(optimizer, RowSGD) else "exp_avg"
    return weight.detach(), dense.state[weight][name]


@pytest.mark.parametrize("optimizer", [RowSGD(0.9, 5e-2), RowSGD(0.9, 5e-2, True), RowAdamW(0.9, 0.95, 1e-3, 0.1)])
@pytest.mark.parametrize("missed", [1, 7, 300])
def test_lazy_decay_does_what_the_dense_optimizer_does_to_rows_without_a_gradient(optimizer: RowSGD | RowAdamW, missed: int):
    rates = [0.1 / (1 + 0.1 * number) for number in range(missed + 1)]
    workspace = Workspace(torch.device("cpu"), 0)
    state = CentreStore(3, 4, "exact", isinstance(optimizer, RowAdamW), True, 3, workspace)
    first_weight, first_momentum = _dense_decay(optimizer, rates[:1])
    state.save_centres(slice(0, 3), state.load("centres", slice(0, 3)).copy_(first_weight))
    state.tensors["momentum"].copy_(first_momentum)
    if isinstance(optimizer, RowAdamW):
        state.tensors["variance"].fill_((1 - optimizer.beta2) * 0.09)
    state.tensors["updates"].fill_(1)
    decay = LazyDecay(optimizer)
    for lr in rates:
        decay.record(lr)
    decay.catch_up(state, slice(0, 2))
    decay.catch_up(state, torch.tensor([2]))
    weight, momentum = _dense_decay(optimizer, rates)
    bound = rounding_bound(torch.float32, 10 * len(rates))  # ten operations a step
    for name, expected in (("centres", weight), ("momentum", momentum)):
        torch.testing.assert_close(state.tensors[name].double(), expected, rtol=0, atol=bound * expected.abs().max().item())
    assert state.tensors["updates"].tolist() == [missed + 1] * 3
    if isinstance(optimizer, RowSGD):  # the meta device, as CUDA, must not be read; it would raise
        decay.catch_up(CentreStore(3, 4, "tiny", False, True, 3, Workspace(torch.device("meta"), 0)), slice(0, 2))


def test_sampling_with_decay_equals_a_dense_optimizer_over_all_rows():
    optimizer, centres = RowSGD(0.9, 1e-2), all_centres(NUM_CLASSES, D, 3)
    head = _head("exact", optimizer=optimizer, sample_rate=0.1, inactive_rows="decay", chunk=16)
    order = torch.from_numpy(head.shard_classes())
    weight = torch.nn.Parameter(centres.double())
    dense = torch.optim.SGD([weight], 0.05, 0.9, weight_decay=1e-2)
    loss_bound, gradient_bound = head_bounds(32.0, D, 8)
    for step in range(30):
        x, labels = near_their_centres(centres, 8, step)
        head.begin_step(labels[None], step)
        active = active_classes(head)
        loss = head(x)
        head.step(0.05)
        dense.zero_grad()
        expected = dense_loss(head.margin, x.double(), weight, labels, active)
        expected.backward()
        dense.step()
        bound = (1 + step / (1 - 0.9)) * loss_bound  # errors go on in the momentum
        assert loss.item() == pytest.approx(expected.item(), abs=bound)
    rows = head.shard_state()
    assert relative(rows["centres"], weight.detach()[order]) < 30**0.5 * gradient_bound
    assert relative(rows["momentum"], dense.state[weight]["momentum_buffer"][order]) < 30**0.5 * gradient_bound
    assert np.unique(head.centre_store.tensors["updates"].numpy()).tolist() == [30]
