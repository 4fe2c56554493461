"""The usual way to run verification, as a baseline: written from descriptions of arcface_torch's evaluator, simple on purpose.

Rank 0 alone decodes every image of the pairs, also those that come twice, into one float tensor for the pictures and one for
their mirror images; the network sees ten at a time; and the numbers come from loops over folds and thresholds.
"""

import numpy as np
import torch
from torch import nn

from eval.pair_sets.bin_file import PairSet


def plain_embed(model: nn.Module, pair_set: PairSet) -> np.ndarray:
    """Return (2 P, D) float64 unit embeddings of the images of all pairs, one after another."""
    count = 2 * len(pair_set.same)
    views = [torch.empty(count, 3, 112, 112) for _ in range(2)]
    for pair in range(len(pair_set.same)):
        for side, index in enumerate((pair_set.first[pair], pair_set.second[pair])):
            image = torch.from_numpy(pair_set.decode(int(index)).transpose(2, 0, 1).astype(np.float32))
            views[0][2 * pair + side] = image
            views[1][2 * pair + side] = image.flip(2)
    found = []
    for view in views:
        rows = []
        for begin in range(0, count, 10):
            batch = ((view[begin : begin + 10] / 255) - 0.5) / 0.5
            with torch.no_grad():
                rows.append(model(batch).numpy().astype(np.float64))
        found.append(np.concatenate(rows))
    fused = found[0] + found[1]
    return fused / np.linalg.norm(fused, axis=1, keepdims=True)


def plain_numbers(embeddings: np.ndarray, same: np.ndarray, num_folds: int = 10) -> tuple[np.ndarray, float]:
    """Return the accuracy of each fold (F,) and TAR at FAR 1e-3 from (2 P, D) rows, by loops over folds and thresholds."""
    distances = np.square(embeddings[0::2] - embeddings[1::2]).sum(1)
    pairs = np.arange(len(same))
    accuracies, rates = [], []
    for test in np.array_split(pairs, num_folds):
        train = np.setdiff1d(pairs, test)
        scores = [np.mean((distances[train] < threshold) == same[train]) for threshold in np.arange(0, 4, 0.01)]
        best = np.arange(0, 4, 0.01)[int(np.argmax(scores))]
        accuracies.append(np.mean((distances[test] < best) == same[test]))
        chosen = 0.0
        for threshold in np.arange(0, 4, 0.001):
            accepted = distances[train] < threshold
            if np.mean(accepted[~same[train]]) <= 1e-3:
                chosen = threshold
        rates.append(np.mean((distances[test] < chosen)[same[test]]))
    return np.array(accuracies), float(np.mean(rates))
