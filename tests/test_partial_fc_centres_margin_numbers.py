"""What a loss keeps between steps: saved with the centres or with the trainer, and read back by any number of ranks."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from head_losses import CASES, B, C, D, load_saved, saved, train_steps, whole_rows
from loss_references_other import kappaface_psi
from rounding import rounding_bound

from losses import MARGINS, build_margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.memory import HeadMemory, loss_memory

pytestmark = pytest.mark.numeric

KEEPING = (
    "sphereface", "curricularface", "adacos", "adaface", "elasticface", "adaptiveface", "kappaface", "sphereface2", "uniface",
)  # fmt: skip
OPTIMIZERS = {"sgd": RowSGD(), "adamw": RowAdamW()}


def _build(case: str, rank: int, world_size: int, optimizer: str) -> PartialFC:
    arguments = CASES[case].arguments | ({"every": 3} if case == "kappaface" else {})
    config = HeadConfig(0.6, {**OPTIMIZERS, "nesterov": RowSGD(nesterov=True)}[optimizer], logit_correction="log_r", chunk=5)
    return PartialFC(build_margin(case, **arguments), C, D, rank, world_size, 3, config)


_train = functools.partial(train_steps, centres=torch.eye(C, D) + 0.1, lr=0.01)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", KEEPING)
def test_a_head_that_is_loaded_goes_on_to_the_same_bits(case: str, optimizer: str):
    whole, first = _build(case, 0, 1, optimizer), _build(case, 0, 1, optimizer)
    losses = _train(whole, range(8))
    _train(first, range(4))
    again = load_saved(_build(case, 0, 1, optimizer), saved(first))
    assert all(map(torch.equal, _train(again, range(4, 8)), losses[4:]))
    expected, found = saved(whole), saved(again)
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _reshard(rank: int, world_size: int) -> None:
    """Two ranks of three train, all three go on, then one alone; each reads what the others left."""
    for case in KEEPING:
        first = _build(case, 0, 1, "sgd")
        _train(first, range(3))
        given = [saved(first)]
        dist.broadcast_object_list(given, 0)
        three = load_saved(_build(case, rank, world_size, "sgd"), given[0])
        rows, state = saved(three)
        assert rows.keys() == given[0][0].keys() and state.keys() == given[0][1].keys()
        assert all(torch.equal(rows[name], value) for name, value in given[0][0].items()), case
        losses = _train(three, range(3, 5))
        later = saved(three)
        alone = load_saved(_build(case, 0, 1, "sgd"), later)
        rows, state = saved(alone)
        assert all(torch.equal(rows[name], value) for name, value in later[0].items()), case
        assert all(torch.equal(state[name], value) for name, value in later[1].items()), case
        assert all(bool(loss.isfinite()) for loss in losses)


def test_what_a_loss_keeps_is_read_by_another_number_of_ranks(run_ranks: Callable[..., None]):
    run_ranks(_reshard, 3)


def test_a_checkpoint_of_another_loss_leaves_the_first_numbers_of_the_classes():
    plain = PartialFC(build_margin("arcface"), C, D, seed=3)
    head = PartialFC(build_margin("adaptiveface", margin=0.25), C, D, seed=3)
    head.load_rows(lambda low, high: {name: tensor[low:high] for name, tensor in plain.shard_state().items()})
    assert torch.equal(head.shard_state()["margin_margin"], torch.full((C,), 0.25))


def _kappa(rank: int, world_size: int) -> None:
    """Classes of different sizes and spreads; class 5 has one image, classes from 8 on none."""
    head = PartialFC(build_margin("kappaface", every=4), 12, D, rank, world_size, 3, HeadConfig())
    generator = torch.Generator().manual_seed(1)
    labels = torch.tensor([0] * 12 + [1] * 3 + [2] * 5 + [3] * 8 + [4] * 9 + [5] + [6] * 6 + [7] * 4)
    directions = torch.randn(12, D, generator=generator)
    x = directions[labels] + torch.linspace(0.2, 1.5, 12)[labels][:, None] * torch.randn(48, D, generator=generator)
    order = torch.randperm(48, generator=generator)
    for step in range(4):
        rows = order[12 * step :][rank * 12 // world_size : (rank + 1) * 12 // world_size]
        assert torch.equal(head.shard_state()["margin_psi"], torch.full((head.num_slots,), 0.5))
        head.begin_step(labels[rows][None], step)
        head(x[rows])
        head.step(0.0)
    unit = (x / x.norm(dim=1, keepdim=True)).double()
    sizes = torch.tensor([int((labels == label).sum()) for label in range(8)])
    lengths = torch.stack([unit[labels == label].mean(dim=0).norm() for label in range(8)])
    several = torch.arange(8) != 5
    expected = torch.full((12,), 0.5, dtype=torch.float64)
    expected[torch.arange(8)[several]] = kappaface_psi(lengths[several], sizes[several], D)
    psi = whole_rows(head, head.shard_state()["margin_psi"].clone())
    # kappa magnifies the error of r by (D + 1) / (1 - r^2) at most, psi that of kappa by less than 1 over the deviation
    bound = rounding_bound(torch.float32, D) * (D + 1) / float(1 - lengths[several].max() ** 2)
    assert float((psi - expected).abs().max()) < bound
    assert float(head.shard_state()["margin_sums"].abs().max()) == float(head.shard_state()["margin_counts"].max()) == 0.0


@pytest.mark.parametrize("world_size", [1, 3])
def test_psi_is_that_of_the_reference_and_of_all_ranks(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_kappa, world_size)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["arcface", "adaptiveface", "kappaface"])
def test_the_memory_of_class_numbers_is_counted(name: str, optimizer: str):
    config = HeadConfig(optimizer=OPTIMIZERS[optimizer])
    head = PartialFC(build_margin(name), C, D, config=config)
    size, _ = loss_memory(build_margin(name), C, D, config)
    assert HeadMemory(D, B, config, class_bytes=size).bytes_per_class * C == sum(
        tensor.nbytes for tensor in head.shard_state().values()
    )


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "nesterov"])
def test_trained_numbers_follow_torch_without_weight_decay(optimizer: str):
    """The same gradients go through torch's optimizer, on a bias and on the margins of all classes."""
    for name, key in (("sphereface2", "bias"), ("adaptiveface", "margin")):
        head = _build(name, 0, 1, optimizer)
        numbers = head._numbers
        parameter = numbers.parameters[key] if name == "sphereface2" else numbers.tensors[key]
        copy = torch.nn.Parameter(parameter.detach().double().clone())
        nesterov = optimizer == "nesterov"
        kind: torch.optim.Optimizer = torch.optim.AdamW([copy], 0.01, weight_decay=0.0)
        if optimizer != "adamw":
            kind = torch.optim.SGD([copy], 0.01, 0.9, nesterov=nesterov)
        for step in range(5):
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            copy.grad = gradient.double()
            kind.step()
            numbers.update({key: gradient}, 0.01, torch.tensor(True))
            torch.testing.assert_close(
                parameter.detach().double(), copy.detach(), rtol=0, atol=rounding_bound(torch.float32, 25)
            )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("gradient", "expected"), [(-1e3, 1.0), (1e3, 0.0)])
def test_trained_numbers_of_classes_stay_in_their_range(optimizer: str, gradient: float, expected: float):
    numbers = _build("adaptiveface", 0, 1, optimizer)._numbers
    numbers.update({"margin": torch.full((C,), gradient)}, 2.0, torch.tensor(True))
    assert torch.equal(numbers.tensors["margin"], torch.full((C,), expected))


def test_no_two_losses_keep_numbers_of_the_same_name():
    """So a run that continues a checkpoint of another loss never takes its numbers for its own."""
    owner: dict[str, str] = {}
    for name in list(MARGINS):
        margin = build_margin(name)
        for key in (*margin.state_dict(), *margin.class_numbers(D)):
            assert owner.setdefault(key, name) == name
    assert {"t", "running_scale", "mean", "std", "bias", "margin", "psi"} <= owner.keys()


def _counted(rank: int, world_size: int) -> None:
    """12 classes of the batch: at rate 0.1 they fill the budget of every shard, at 0.6 that of none."""
    labels = torch.arange(12).view(world_size, 1, -1)[rank]
    for rate in (0.1, 0.6, 1.0):
        for correction in ("none", "log_r"):
            config = HeadConfig(rate, logit_correction=correction, chunk=5)
            head = PartialFC(build_margin("uniface"), C, D, rank, world_size, 3, config)
            first = torch.tensor(float(head.first_counted))
            assert head.margin.threshold.item() == pytest.approx(float(torch.log(10 * first)), rel=1e-6)
            head.begin_step(labels, 0)
            chunks = head._current.plan.chunks  # type: ignore[union-attr]
            weights = sum(chunk.size if chunk.weights is None else float(chunk.weights.sum()) for chunk in chunks)
            counted = torch.tensor([weights, float(sum(chunk.size for chunk in chunks))])
            head.collectives.sum(counted)
            assert counted.tolist() == pytest.approx([head.num_counted(), head.num_active()], rel=1e-6)
            fills = head.num_active() == 12
            assert fills == (rate == 0.1) and head.num_counted() == (C if correction == "log_r" and not fills else counted[1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_weighted_classes_count_as_often_as_they_stand_for_others(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_counted, world_size)
