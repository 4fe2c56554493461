"""The plan of a step against slow loops over its labels: every sample's target class is found in its chunk, and there alone."""

import numpy as np
import pytest
import torch

from partial_fc.sampling.planning import SharedLabels, plan_step
from partial_fc.sampling.sampling import ActiveSet

SLOTS = range(10, 30)  # of this shard, of 40
LABELS = np.array([[12, 12, 35, 29, 12, 10], [29, 3, 12, 17, 18, 12]])  # two micro-batches; 35 and 3 lie in other shards


@pytest.mark.parametrize(
    "active",
    [
        ActiveSet([(0, 20)], np.empty(0, dtype=np.int64)),
        ActiveSet([(1, 4), (8, 13)], np.array([0, 7, 15, 19])),
        ActiveSet([], np.array([0, 2, 7, 8, 19])),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_places_and_targets_are_those_of_every_sample(active: ActiveSet, size: int):
    plan = plan_step(SharedLabels(0, LABELS, np.unique(LABELS)), active, SLOTS, size, torch.device("cpu"))
    order = [slot for start, stop in active.runs for slot in range(start, stop)] + active.extra.tolist()
    begin, found = 0, []
    for chunk in plan.chunks:
        slots = torch.arange(len(SLOTS))[chunk.select].tolist()
        assert chunk.begin == begin and slots == order[begin : begin + chunk.size] and 0 < chunk.size <= size
        class_index, sample_index = (tensor.tolist() for tensor in chunk.targets)
        pairs = list(zip(class_index, sample_index, strict=True))
        assert pairs == sorted(pairs)  # by class, then by sample: the order of their addition
        found += [(sample, SLOTS.start + slots[row]) for row, sample in pairs]
        begin += chunk.size
    assert begin == len(order)
    here = [(sample, slot) for sample, slot in enumerate(LABELS.reshape(-1).tolist()) if slot in SLOTS]
    assert sorted(found) == here
    for micro, slots in enumerate(LABELS.tolist()):
        assert plan.places[micro].tolist() == [order.index(s - SLOTS.start) if s in SLOTS else -1 for s in slots]
        assert plan.owners[micro].tolist() == [sample for sample, slot in enumerate(slots) if slot in SLOTS]
        assert plan.local[micro].tolist() == [slot - SLOTS.start for slot in slots if slot in SLOTS]


def test_a_shard_without_a_class_of_the_batch_has_no_target():
    active = ActiveSet([(0, 5)], np.empty(0, dtype=np.int64))
    plan = plan_step(SharedLabels(0, LABELS, np.unique(LABELS)), active, range(30, 35), 3, torch.device("cpu"))
    assert [len(chunk.targets[0]) for chunk in plan.chunks] == [0, 0]
    assert all(not (places >= 0).any() for places in plan.places)
