"""TopoFR's topological loss: against Kruskal's algorithm in float64 over the whole batch, and runs that train with it."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rounding import rounding_bound
from tiny_runs import IRESNET, ended_well, equal_weights, error_of, read_metrics, reshard_and_back, run_program, tiny_run
from torch import Tensor, nn

import train
from data.augment import prepare
from partial_fc.collectives import Collectives
from training import step
from training.step import LossTerm, backward
from training.topology import topology_bytes, topology_loss
from utils import distributed
from utils.checkpoint.format import list_checkpoints
from utils.distributed import World
from utils.image import normalise

SAMPLES, SIDE, DIM = 12, 4, 5  # of the global batch


def _kruskal(distances: Tensor) -> list[Tensor]:
    """Return the lengths of the edges of a minimum spanning tree, shortest first."""
    count = len(distances)
    cluster, lengths = list(range(count)), []
    pairs = [(a, b) for a in range(count) for b in range(a)]
    for pair in sorted(pairs, key=lambda pair: float(distances[pair].detach())):
        old, new = cluster[pair[0]], cluster[pair[1]]
        if old != new:
            cluster = [new if one == old else one for one in cluster]
            lengths.append(distances[pair])
    return lengths


def _reference(images: Tensor, embeddings: Tensor) -> Tensor:
    """Return the loss of the authors' code for a batch: images in [-1, 1], whose largest distance is 2 sqrt(n)."""
    pixels = normalise(images).flatten(1).double()
    trees = []
    for rows, largest in ((pixels, 2 * pixels.shape[1] ** 0.5), (embeddings, 1.0)):
        pairs = [torch.stack([((one - two) ** 2).sum().clamp_min(1e-30).sqrt() / largest for two in rows]) for one in rows]
        trees.append(torch.stack(_kruskal(torch.stack(pairs))))
    return ((trees[0] - trees[1]) ** 2).sum() / len(images)


def _compare(rank: int, world_size: int, accumulation: int) -> None:
    world, share = World(rank, world_size, rank, world_size, torch.device("cpu")), SAMPLES // (world_size * accumulation)
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (SAMPLES, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
    images[3] = images[2]  # a distance of zero
    given = torch.randn(SAMPLES, DIM, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    layer = nn.Linear(DIM, DIM)
    dense = nn.Linear(DIM, DIM).double()
    dense.load_state_dict(layer.state_dict())
    parts = zip(images.chunk(accumulation), given.chunk(accumulation), strict=True)
    expected = torch.stack([_reference(pixels, dense(rows)) for pixels, rows in parts]).mean()
    expected.backward()
    model, found = distributed.as_data_parallel(layer, world), 0.0
    for micro_step in range(accumulation):
        rows = slice(begin := (micro_step * world_size + rank) * share, begin + share)
        with distributed.gradients_shared(model, now=micro_step == accumulation - 1):
            loss = topology_loss(images[rows], model(given[rows].float()), rank, Collectives(world_size))
            losses = backward([LossTerm("", loss)], world_size, 1.0, accumulation)
            found += float(losses[""]) / accumulation
    gradient, exact = layer.weight.grad, dense.weight.grad
    assert gradient is not None and exact is not None
    bound = rounding_bound(torch.float32, SAMPLES * SIDE**2 * 3)
    assert found == pytest.approx(float(expected.detach()), rel=bound) and found > 0.1
    assert float((gradient.double() - exact).norm()) < bound * float(exact.norm())


@pytest.mark.numeric
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_the_loss_has_the_gradient_of_the_whole_batch(run_ranks: Callable[..., None], world_size: int, accumulation: int):
    run_ranks(_compare, world_size, accumulation)


@pytest.mark.numeric
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_equal_distances_make_a_tree_too(count: int):
    points = torch.randint(0, 3, (count, 2), generator=torch.Generator().manual_seed(count))
    embeddings = points.float().requires_grad_()
    loss = topology_loss(torch.zeros(count, 1, 1, 3, dtype=torch.uint8), embeddings, 0, Collectives(1))
    loss.backward()
    distances = (points[:, None] - points).double().norm(dim=2)
    expected = sum(float(length) ** 2 for length in _kruskal(distances)) / count
    assert float(loss.detach()) == pytest.approx(expected, rel=rounding_bound(torch.float32, count))
    assert embeddings.grad is not None and embeddings.grad.isfinite().all()


SETTINGS = [
    IRESNET, "backbone.trained_scale=true", "loss.topology=0.3", "loss.entropy_weights=true", "optimizer.clip_norm=30",
    "schedule.kind=constant", "eval.targets=[]", "train.max_steps=6",
]  # fmt: skip


def test_a_run_learns_it_and_resumes_to_the_same_bits(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen: list[Tensor] = []
    monkeypatch.setattr(step, "prepare", lambda *part: seen.append(prepare(*part)) or seen[-1])
    monkeypatch.setattr(step, "topology_loss", lambda images, *rest: seen.append(images) or topology_loss(images, *rest))
    run = functools.partial(tiny_run, dataset, tmp_path, *SETTINGS)
    for name, last in (("whole", 6), ("parts", 3), ("parts", 6)):
        assert train.main(run(f"run.name={name}", f"train.max_steps={last}")) == 0
    capsys.readouterr()
    said = error_of(train.main(run("backbone.trained_scale=false", "run.name=other")), capsys)
    assert said.startswith("error: loss.topology needs backbone.trained_scale=true")
    said = error_of(train.main(run("loss.name=circle", "run.name=other")), capsys)
    assert said.startswith("error: loss.entropy_weights must be false with Circle: it needs")
    bf16 = run("train.precision=bf16", "train.max_steps=1", "run.name=bf16")
    assert train.main(bf16) == 0 and "float32 products" in capsys.readouterr().out
    for wrong in ("head.matmul_dtype=bf16", "train.tf32=true"):
        assert wrong in error_of(train.main([*bf16, wrong, "run.name=other"]), capsys)
    with pytest.raises(ValueError, match=r"all pairs of 100000 images need 37[0-9.]+ GiB, 1.00 are free; raise train.accum"):
        topology_bytes(nn.Linear(1, 1), 100_000, 1, 16, 2**30)
    weights = equal_weights(tmp_path / "whole", tmp_path / "parts")
    first, *_, last = [values["loss_topology_softmax"] for values in read_metrics(tmp_path / "whole").values()]
    assert all(torch.equal(normalise(pixels), given) for given, pixels in zip(seen[::2], seen[1::2], strict=True))
    assert last < 0.7 * first and weights["features.weight"].mean() < 0.9


TASK = "tasks=[{name: softmax, weight: 0.5, head: {sample_rate: 0.5}}]"


def test_micro_batches_of_two_ranks_resume_to_the_same_bits_after_a_reshard(dataset: Path, tmp_path: Path):
    run = functools.partial(tiny_run, dataset, tmp_path, *SETTINGS, "train.accumulation=2", TASK)
    ended_well(run_program(train.main, [run("run.name=of_2")] * 2))
    reshard_and_back(list_checkpoints(tmp_path / "of_2")[0], tmp_path / "broken")
    assert "step_00000004 after step 4" in ended_well(run_program(train.main, [run("run.name=broken")] * 2)).stdout
    equal_weights(tmp_path / "of_2", tmp_path / "broken")
    for values in read_metrics(tmp_path / "of_2").values():
        together = values["loss_softmax"] + 0.3 * values["loss_topology_softmax"]
        assert values["loss"] == pytest.approx(0.5 * together, rel=1e-6) and values["loss_topology_softmax"] > 0.01
