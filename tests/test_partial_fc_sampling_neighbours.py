"""The graph of nearest classes: exact search against numpy, inverted lists against exact search, at any number of ranks."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rounding import rounding_bound
from tiny_runs import final_weights, run_train, small_run
from torch import Tensor
from torch.overrides import TorchFunctionMode
from waiting import Syncs

from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.memory import HeadMemory
from partial_fc.sampling import neighbour_search
from partial_fc.sampling import neighbour_search as inverted_lists
from partial_fc.sampling import planning as neighbours
from partial_fc.sampling.planning import NeighbourGraph, search_bytes
from utils.randomness import permute

NUM_CLASSES, D, K = 301, 24, 5


@contextmanager
def _small_blocks(columns: int = 64, rows: int = 48, queries: int = 110) -> Iterator[None]:
    """Have several blocks, groups of lists, parts of lists and passes with few classes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (neighbour_search, inverted_lists):
            patch.setattr(module, "COLUMNS", columns)
        for module in (neighbours, inverted_lists):
            patch.setattr(module, "QUERIES", queries)
        patch.setattr(neighbour_search, "_COSINE_BYTES", {"cpu": 4 * columns * rows})
        yield


def _families(num_classes: int = NUM_CLASSES, cosine: float = 0.6) -> Tensor:
    """Return (C, D) centres of any length, in families of four."""
    generator = torch.Generator().manual_seed(5)
    directions = F.normalize(torch.randn(num_classes, D, generator=generator))
    family = torch.randperm(num_classes, generator=generator) // 4
    lengths = torch.rand(num_classes, 1, generator=generator) + 0.5
    return lengths * (cosine**0.5 * directions[family] + (1 - cosine) ** 0.5 * directions)


def _head(centres: Tensor, search: str, rank: int = 0, world_size: int = 1, **more: Any) -> PartialFC:
    """Return a head with these centres by slot, whose graph is rebuilt before step 2."""
    config = HeadConfig(0.5, sampling="neighbours", neighbours=K, neighbours_every=2, neighbours_search=search, **more)
    margin = build_margin("cosface", scale=64.0, margin=0.4)
    head = PartialFC(margin, len(centres), centres.shape[1], rank, world_size, 3, config)
    head.centres.copy_(centres[head.first_slot : head.end_slot])
    head.centre_store.refresh_norms()
    return head


def _graph(head: PartialFC) -> NeighbourGraph:
    assert head._graph is not None
    return head._graph


def _rebuild(head: PartialFC) -> Tensor:
    """Begin the step that rebuilds the graph; return this rank's part of it."""
    labels = torch.arange(head.rank, head.rank + 4)[None]
    head.begin_step(labels, 0)
    assert bool((_graph(head).slots == -1).all())  # no rebuild from random centres
    head.begin_step(labels, 2)
    return _graph(head).slots


def _check_exact(head: PartialFC, graph: Tensor, centres: Tensor) -> None:
    unit = F.normalize(centres.double()).numpy()
    bound = rounding_bound(torch.float32, D)
    for row, slots in enumerate(graph.tolist()):
        own = head.first_slot + row
        cosine = unit @ unit[own]
        cosine[own] = -2
        assert len(set(slots)) == K and own not in slots and min(slots) >= 0
        np.testing.assert_allclose(cosine[slots], np.sort(cosine)[::-1][:K], rtol=0, atol=2 * bound)


def _check_near(head: PartialFC, graph: Tensor, everyone: Tensor) -> None:
    """`near` gives this rank's rows among the neighbours of any slots, nearest first."""
    asked = np.array([3, 77, 200, 300])
    expected = everyone[asked].T.reshape(-1)
    expected = expected[(expected >= head.first_slot) & (expected < head.end_slot)]
    assert (_graph(head).near(asked) + head.first_slot).tolist() == expected.tolist()


def _compare_ranks(rank: int, world_size: int) -> None:
    """Compare both kinds of search, each in another dtype on two ranks than on one and three."""
    centres = _families()
    dtypes = (torch.float32, torch.bfloat16) if world_size != 2 else (torch.bfloat16, torch.float32)
    for search, dtype in zip(("exact", "inverted_lists"), dtypes, strict=True):
        with _small_blocks():
            more = {"matmul_dtype": dtype, "neighbours_probes": 6}
            head, alone = _head(centres, search, rank, world_size, **more), _head(centres, search, **more)
            mine, everyone = _rebuild(head), _rebuild(alone)
            assert torch.equal(mine, everyone[head.first_slot : head.end_slot])
            _check_near(head, mine, everyone)
            assert re.sub(r"in \S+ s", "", head.news) == re.sub(r"in \S+ s", "", alone.news)
        if search == "exact" and dtype == torch.float32:
            _check_exact(head, mine, centres)


@pytest.mark.numeric
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_graph_is_the_same_on_any_ranks_and_the_exact_one_that_of_numpy(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_compare_ranks, world_size)


@pytest.mark.numeric
def test_centres_that_lag_are_brought_up_to_date_before_a_search():
    def after_steps(saves: bool) -> PartialFC:
        more = {"inactive_rows": "decay", "optimizer": RowSGD(0.9, 0.0), "chunk": 200}
        head = _head(_families(), "exact", **more)
        for step in range(1, 11, 2):  # of which none rebuilds the graph
            generator = torch.Generator().manual_seed(step)
            head.begin_step(torch.randint(NUM_CLASSES, (1, 64), generator=generator), step)
            head(torch.randn(64, D, generator=generator))
            head.step(3.0)
            if saves:
                head.shard_state()
        return head

    head, up_to_date = after_steps(saves=False), after_steps(saves=True)
    head.begin_step(torch.arange(4)[None], 12)
    _check_exact(head, _graph(head).slots, up_to_date.centres)


def test_a_stage_that_samples_begins_with_a_graph():
    head = _head(_families(), "exact")
    head.config = _graph(head).config = replace(head.config, neighbours_every=1000, rates=((0, 1.0), (3, 0.5)))
    for step in range(4):
        head.begin_step(torch.arange(4)[None], step)
        assert bool((_graph(head).slots >= 0).all()) == (step == 3)


def test_all_lists_searched_give_the_exact_graph():
    centres = _families()
    for sizes in ((64,), (16384, 48, 2000)):  # the second: all in one group and one pass
        with _small_blocks(*sizes):
            exact = _rebuild(_head(centres, "exact"))
            head = _head(centres, "inverted_lists", neighbours_probes=10_000)
            assert torch.equal(_rebuild(head), exact)
            assert "69 lists, 69 searched for each, 1e+02 % of all pairs; recall 1.000, by 256 classes" in head.news


def test_lists_find_every_neighbour_that_lies_in_a_list_which_is_searched_and_the_recall_says_so():
    """Against a search in numpy, from nothing but the directions of the lists."""
    centres, probes = _families(), 3
    unit, made = F.normalize(centres.double()).numpy(), []
    with pytest.MonkeyPatch.context() as patch, _small_blocks():
        patch.setattr(neighbours, "InvertedLists", lambda *given: made.append(inverted_lists.InvertedLists(*given)) or made[0])
        patch.setattr(neighbours, "_CHECKED", NUM_CLASSES)
        head = _head(centres, "inverted_lists", neighbours_probes=probes)
        graph = _rebuild(head).numpy()
    near = np.argsort(-(unit @ made[0]._directions.double().numpy().T), axis=1)[:, :probes]
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -2)
    exact = np.argsort(-cosine, axis=1)[:, :K]
    searched = (near[:, :1].T[:, None] == near[:, :, None]).any(axis=1)  # [query, class]: is the class's list searched
    found = np.argsort(-np.where(searched, cosine, -2), axis=1)[:, :K]
    enough = searched.sum(axis=1) > K
    assert np.array_equal(graph[enough], found[enough]) and enough.mean() > 0.5
    assert ((graph == -1).sum(axis=1) == np.maximum(0, K - searched.sum(axis=1) + 1)).all()
    recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(graph.tolist(), exact.tolist(), strict=True)])
    assert 0.3 < recall < 0.95 and f"recall {recall:.3f}, by {NUM_CLASSES} classes" in head.news
    pairs = 2 * searched.sum() / NUM_CLASSES**2  # the check of all classes searches them once more
    assert f"{100 * pairs / 2:.2g} % of all pairs" in head.news


@pytest.mark.numeric
def test_the_directions_of_the_lists_are_those_of_spherical_k_means():
    centres = _families()
    head = _head(centres, "exact")
    unit = neighbour_search.UnitCentres(head.centre_store, NUM_CLASSES, 0, torch.float32, head.collectives)
    found = inverted_lists.InvertedLists(unit, seed=7)._directions.double().numpy()
    sample = F.normalize(centres.double()).numpy()[permute(np.arange(NUM_CLASSES), NUM_CLASSES, 7)]  # 8 per list would be more
    directions = sample[:69]
    for _ in range(5):
        nearest = (sample @ directions.T).argmax(axis=1)
        sums = np.stack([sample[nearest == number].sum(axis=0) for number in range(69)])
        norms = np.linalg.norm(sums, axis=1, keepdims=True)
        directions = np.where(norms > 0, sums / norms.clip(1e-9), directions)
    assert not np.allclose(directions, sample[:69], atol=0.01)
    np.testing.assert_allclose(found, directions, rtol=0, atol=rounding_bound(torch.float32, D))


def test_tight_groups_have_their_neighbours_in_few_lists():
    """Ten groups at right angles, far more lists than groups: the lists of a group are those nearest to all its members."""
    groups, size = 10, 60
    noise = torch.randn(groups * size, D, generator=torch.Generator().manual_seed(2))
    centres = torch.eye(D)[torch.arange(groups * size) % groups] + 0.01 * noise
    head = _head(centres, "inverted_lists", neighbours_probes=32)  # of 98 lists, which begin with about ten of each group
    graph = _rebuild(head)
    assert bool((graph % groups == (torch.arange(groups * size) % groups)[:, None]).all())
    assert "recall 1.000" in head.news
    few = _head(centres, "inverted_lists", neighbours_probes=1)
    _rebuild(few)
    assert "recall 1.000" not in few.news


class _HostReads(TorchFunctionMode):
    """Counts what hands numbers of a device to the host."""

    names = ("cpu", "numpy", "tolist", "item", "__bool__", "__float__", "__int__")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(function, "__name__", "")) in self.names:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def _reads(search: str, columns: int, queries: int) -> dict[str, int]:
    head = _head(_families(101), search)
    with _small_blocks(columns, queries=queries), _HostReads() as reads, Syncs() as syncs:
        _graph(head).rebuild(head.centre_store, torch.float32, 2)
    assert syncs.found == []
    return dict(reads.found)


def test_a_rebuild_waits_for_the_device_in_no_block():
    assert _reads("exact", 32, 100) == {}
    for columns, queries, passes in ((32, 51, 2), (1024, 2000, 1)):
        # the lengths of the lists; how many queries each has, in each pass and in the check; and the recall
        assert _reads("inverted_lists", columns, queries) == {"cpu": 1, "numpy": 1, "tolist": passes + 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("search", ["exact", "inverted_lists"])
def test_a_rebuild_takes_the_memory_that_is_counted(search: str, dtype: torch.dtype):
    num_classes = 1200
    centres = torch.randn(num_classes, 64, generator=torch.Generator().manual_seed(0))
    head = _head(centres, search, matmul_dtype=dtype)
    with _small_blocks(1024, 128, 768):
        with torch.profiler.profile(profile_memory=True) as profile:
            _graph(head).rebuild(head.centre_store, dtype, 2)
        counted = search_bytes(head.config, num_classes, num_classes, 64, "cpu")
        memory = HeadMemory(64, 8, head.config)
        uniform = memory._replace(config=replace(head.config, sampling="uniform"))
        copied = memory._copied_rows(num_classes) - uniform._copied_rows(num_classes)  # single rows in a step's chunks
        more = memory.shared_bytes(num_classes) - uniform.shared_bytes(num_classes)
        assert more == counted + copied * 64 * dtype.itemsize
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = int(np.cumsum(changes).max())
    assert 0.25 * counted < peak <= counted


def test_lists_are_searched_for_many_classes_or_where_they_are_asked_for():
    auto, exact, lists = (HeadConfig(neighbours_search=name) for name in ("auto", "exact", "inverted_lists"))
    assert [auto.searches_lists(count) for count in (1000, 1_048_576, 1_048_577)] == [False, False, True]
    assert not exact.searches_lists(10**8) and lists.searches_lists(2)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_with_lists_logs_their_recall_and_goes_on_after_a_stop_as_if_it_had_not_stopped(
    dataset: Path, tmp_path: Path, num_processes: int
):
    more = ["eval.targets=[]", "checkpoint.every=2", "train.max_steps=8", "head.sample_rate=0.7", "head.sampling=neighbours"]
    more += ["head.neighbours=3", "head.neighbours_every=3"]
    more += ["head.neighbours_search=inverted_lists", "head.neighbours_probes=2"]
    whole = run_train(num_processes, small_run(dataset, tmp_path, "run.name=whole", "checkpoint.keep_last=9", *more))
    assert whole.returncode == 0, whole.stderr
    said = re.findall(r"neighbours of 12 classes in (.*)", (tmp_path / "whole" / "train.log").read_text())
    pattern = r"\d+\.\d s: 12 lists, 2 searched for each, \S+ % of all pairs; recall [01]\.\d+, by 12"
    assert len(said) == 2 and all(re.match(pattern, line) for line in said)  # before steps 3 and 6
    for step in (6, 8):  # the graph of step 3 is needed in step 4, from the checkpoint
        (tmp_path / "whole" / "checkpoints" / f"step_{step:08d}").rename(tmp_path / f"gone_{step}")
    expected = tmp_path / "gone_8"
    again = run_train(num_processes, small_run(dataset, tmp_path, "run.name=whole", "checkpoint.keep_last=9", *more))
    assert again.returncode == 0 and "after step 4" in again.stderr + again.stdout
    got = final_weights(tmp_path / "whole")
    expected.rename(tmp_path / "whole" / "checkpoints" / "step_00000099")
    for name, tensor in final_weights(tmp_path / "whole").items():
        assert torch.equal(got[name], tensor), name
    assert int((got["neighbours"] >= 0).sum()) > 0
