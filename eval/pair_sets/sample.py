"""Draws verification pairs from labelled images: balanced, in folds without a common identity, no pair twice.

Shapes: n = images, P = pairs.
"""

import itertools

import numpy as np

USUAL = 6000  # pairs of a set, as LFW has


def most_pairs(labels: np.ndarray, folds: int, seed: int) -> int:
    """Return the largest number of pairs that `sample_pairs` can draw from these labels (n,)."""
    return 2 * folds * min(map(_most_pairs, _deal(labels, folds, np.random.default_rng(seed))))


def _deal(labels: np.ndarray, folds: int, rng: np.random.Generator) -> list[list[np.ndarray]]:
    """Return for each fold the images of each of its identities."""
    order = np.argsort(labels, kind="stable")
    _, begins = np.unique(labels[order], return_index=True)
    members = np.split(order, begins[1:])
    several = np.array([len(images) > 1 for images in members])
    # identities with several images and those with one are dealt separately, so that every fold gets its share of both
    dealt = [rng.permutation(np.flatnonzero(several == kind)) for kind in (True, False)]
    return [[members[k] for kind in dealt for k in kind[fold::folds].tolist()] for fold in range(folds)]


def sample_pairs(labels: np.ndarray, num_pairs: int, folds: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (first (P,) int64, second (P,) int64, same (P,) bool): fold after fold, genuine and impostor in turn.

    Identities are dealt to the folds at random. Genuine pairs cycle through the identities of the fold, so that one with many
    images does not dominate. Impostor pairs take two random identities, and a random image of each. Labels (n,) are the
    identities of the images; num_pairs, of all folds together, is a multiple of 2 * folds.

    Raises:
        ValueError: the images do not give that many different pairs.
    """
    if num_pairs < 1 or folds < 1 or num_pairs % (2 * folds):
        raise ValueError(f"the number of pairs must be a multiple of 2 x {folds} folds (half of each genuine), got {num_pairs}")
    rng = np.random.default_rng(seed)
    pairs: list[tuple[int, int]] = []
    half = num_pairs // (2 * folds)
    groups = _deal(labels, folds, rng)
    most = 2 * folds * min(map(_most_pairs, groups))
    for fold, people in enumerate(groups):
        genuine, impostor = _genuine(people, half, rng), _impostor(people, half, rng)
        pairs += itertools.chain(*zip(genuine, impostor, strict=False))
        if len(pairs) < (fold + 1) * 2 * half:
            several = sum(len(images) > 1 for group in groups for images in group)
            raise ValueError(
                f"{sum(map(len, groups))} identities ({several} of them with several images) in {folds} folds do not give "
                f"{half} genuine and {half} impostor pairs in each; ask for at most {most} pairs, or add identities"
            )
    first, second = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
    return first, second, np.tile([True, False], half * folds)


def _most_pairs(people: list[np.ndarray]) -> int:
    """Return the largest n for which the images of a fold give n genuine and n impostor pairs."""
    counts = np.array([len(images) for images in people], dtype=np.int64)
    genuine = int((counts * (counts - 1) // 2).sum())
    return min(genuine, int(counts.sum() * (counts.sum() - 1) // 2) - genuine)


def _genuine(people: list[np.ndarray], wanted: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return up to `wanted` genuine pairs, one per person in turn, until no person has another pair."""
    pairs: list[tuple[int, int]] = []
    turns = [(images, _pair_numbers(len(images), wanted, rng)) for images in people if len(images) > 1]
    for turn in range(wanted):
        before = len(pairs)
        for images, numbers in turns:
            if turn < len(numbers) and len(pairs) < wanted:
                pairs.append(_pair(images, int(numbers[turn])))
        if len(pairs) == before:
            break
    return pairs


def _pair_numbers(count: int, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """Return up to `wanted` distinct random numbers of the count * (count - 1) / 2 pairs."""
    total = count * (count - 1) // 2
    if total <= 4 * wanted:
        return rng.permutation(total)[:wanted]
    return rng.permutation(np.unique(rng.integers(0, total, 2 * wanted)))[:wanted]


def _pair(images: np.ndarray, number: int) -> tuple[int, int]:
    """Return the pair of this number: pairs (i, j), i < j, counted by j, then by i."""
    j = int((1 + np.sqrt(1 + 8 * number)) // 2)
    j -= j * (j - 1) // 2 > number  # the root of a large number is rounded
    return int(images[number - j * (j - 1) // 2]), int(images[j])


def _impostor(people: list[np.ndarray], wanted: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return up to `wanted` pairs of images of two people, none twice."""
    pairs: dict[tuple[int, int], None] = {}
    if len(people) < 2:
        return []
    for _ in range(50 * wanted):
        if len(pairs) == wanted:
            break
        one, other = rng.choice(len(people), 2, replace=False).tolist()
        a, b = (int(rng.choice(people[person])) for person in (one, other))
        if (b, a) not in pairs:
            pairs[a, b] = None
    return list(pairs)
