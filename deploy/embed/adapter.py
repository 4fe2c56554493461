"""Adapters: maps from the embeddings of an old network to those of a new one, fitted on embeddings of the same pictures.

For galleries without pictures, whose faces cannot be embedded anew. Kinds: `identity`, for a network that was trained to be
compatible; `linear`, ridge regression; `orthogonal`, the rotation of Procrustes (Schoenemann, Psychometrika 1966); `lowrank`,
the linear map cut to its largest directions (reduced-rank regression, Izenman, J. Multivariate Analysis 1975); `mlp`, the
linear map plus one hidden layer, which begins at zero.
Shapes: N = pictures, D = numbers of an old embedding, E = of a new one, k = rank, H = hidden units.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from eval.verification import FAR_TARGETS, OperatingPoint, bootstrap_intervals, operating_points, unit_rows
from utils.checkpoint.tensor_file import read_metadata, read_tensors, write_tensors
from utils.files import check_file, reading, shown

Tensors = dict[str, np.ndarray]
RIDGE = 1e-2  # added to the covariance of the embeddings, as a share of its mean eigenvalue
_EPOCHS, _BATCH, _RATE, _HIDDEN = 60, 256, 1e-3, 1024  # of the mlp
_PAIRS, _PICTURES = 50_000, 3_000  # of each kind, and their pictures, drawn for a measurement
_SAMPLES = 300  # of the bootstrap
_EVIDENCE = 10  # false matches at the FAR by which a kind is chosen
_KEY, _LARGEST = "face.adapter", 1 << 30  # of the metadata; bytes of a file
_SHAPES = {  # sizes by name; a file of any other tensors is refused
    "weight": "DE", "bias": "E", "down": "Dk", "up": "kE", "inner": "DH", "inner_bias": "H", "outer": "HE",
}  # fmt: skip


class Side(NamedTuple):
    """A network, as galleries record it."""

    title: str
    digest: str
    embedding_size: int
    image_size: int = 0  # of the new network
    network_path: str = ""  # likewise


class Pairs(NamedTuple):
    """Embeddings of the same pictures by both networks."""

    old: np.ndarray  # (N, D) unit rows
    new: np.ndarray  # (N, E) unit rows
    people: np.ndarray  # (N,) of names
    old_norms: np.ndarray  # (N,) of the raw embeddings
    new_norms: np.ndarray

    def of(self, chosen: np.ndarray) -> "Pairs":
        """Return the pictures with True in (N,)."""
        return Pairs(*(values[chosen] for values in self))


class Adapter(NamedTuple):
    """A fitted map, and what was measured of it on people whom it was not fitted on."""

    kind: str
    tensors: Tensors
    old: Side
    new: Side
    lengths: float  # the mean length of new raw embeddings over that of old ones
    # FAR, as in FAR_TARGETS, to (cosine, TAR): not above this FAR among adapted and new embeddings, nor among new ones, so that
    # it holds for a gallery with both
    thresholds: dict[str, tuple[float, float]]


def apply(tensors: Mapping[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Return the unit rows (n, E) float64 that a map makes of rows (n, D); a row without a direction is zero."""
    rows, t = unit_rows(rows), tensors
    found = rows @ t["down"] @ t["up"] if "down" in t else rows @ t["weight"] if "weight" in t else rows
    found = found + t["bias"] if "bias" in t else found
    if "inner" in t:
        found = found + np.maximum(rows @ t["inner"] + t["inner_bias"], 0) @ t["outer"]
    return unit_rows(found)


def fit_linear(old: np.ndarray, new: np.ndarray, ridge: float = RIDGE) -> Tensors:
    """Return weight (D, E) and bias (E,) with the least |old W + b - new|^2 + r |W|^2, r from `ridge`, in closed form."""
    low, high = old.mean(0), new.mean(0)
    x, y = old - low, new - high
    square = x.T @ x
    square += ridge * np.trace(square) / len(square) * np.eye(len(square))
    weight = np.linalg.lstsq(square, x.T @ y, rcond=None)[0]  # also where pictures are fewer than D
    return {"weight": weight, "bias": high - low @ weight}


def fit_orthogonal(old: np.ndarray, new: np.ndarray) -> Tensors:
    """Return the weight (D, E) with orthonormal rows or columns that is nearest to turning old into new rows."""
    left, _, right = np.linalg.svd(old.T @ new, full_matrices=False)
    return {"weight": left @ right}


def fit_low_rank(old: np.ndarray, new: np.ndarray, rank: int, ridge: float = RIDGE) -> Tensors:
    """Return the linear map of a rank, (D, k) and (k, E): the k directions in which the fitted rows vary most are kept."""
    linear = fit_linear(old, new, ridge)
    weight, centred = linear["weight"], (old - old.mean(0)) @ linear["weight"]
    kept = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :rank]
    down = weight @ kept
    return {"down": down, "up": kept.T.copy(), "bias": new.mean(0) - old.mean(0) @ down @ kept.T}


def fit_mlp(old: np.ndarray, new: np.ndarray) -> Tensors:
    """Return the linear map and a hidden layer beside it, trained together to raise the mean cosine."""
    generator = torch.Generator().manual_seed(0)
    start = fit_linear(old, new)
    size, hidden = old.shape[1], min(_HIDDEN, 2 * old.shape[1])
    layers = {name: torch.from_numpy(values).float() for name, values in start.items()}
    layers["inner"] = torch.randn(size, hidden, generator=generator) * (2 / size) ** 0.5
    layers["inner_bias"], layers["outer"] = torch.zeros(hidden), torch.zeros(hidden, new.shape[1])
    for value in layers.values():
        value.requires_grad_()
    optimizer = torch.optim.AdamW(layers.values(), _RATE, weight_decay=0.01)
    x, y = torch.from_numpy(old).float(), torch.from_numpy(new).float()
    for _ in range(_EPOCHS):
        for part in torch.randperm(len(x), generator=generator).split(_BATCH):
            rows = x[part]
            found = rows @ layers["weight"] + layers["bias"]
            found = found + F.relu(rows @ layers["inner"] + layers["inner_bias"]) @ layers["outer"]
            optimizer.zero_grad()
            (1 - F.cosine_similarity(found, y[part])).mean().backward()
            optimizer.step()
    return {name: value.detach().double().numpy() for name, value in layers.items()}


def _fit_identity(old: np.ndarray, new: np.ndarray) -> Tensors:
    if old.shape[1] != new.shape[1]:
        raise ValueError(f"--kinds identity: the embeddings have {old.shape[1]} and {new.shape[1]} numbers; leave it out")
    return {}


KINDS: dict[str, Callable[[np.ndarray, np.ndarray], Tensors]] = {
    "identity": _fit_identity,
    "orthogonal": fit_orthogonal,
    "linear": fit_linear,
    "lowrank": lambda old, new: fit_low_rank(old, new, max(1, min(old.shape[1], new.shape[1]) // 4)),
    "mlp": fit_mlp,
}


class Measured(NamedTuple):
    """TAR at FAR of some pairs."""

    name: str
    points: list[OperatingPoint]
    intervals: Mapping[str, tuple[float, float]]  # 95 %, of the TAR, by FAR
    genuine: np.ndarray  # sorted distances
    impostor: np.ndarray


def draw_pairs(people: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (n, 2) pictures of genuine and of impostor pairs, two different ones each; all of them, or a sample of _PAIRS."""
    rng, found = np.random.default_rng(0), []
    chosen = np.sort(rng.permutation(len(people))[:_PICTURES])
    same = people[chosen, None] == people[None, chosen]
    for wanted in (same & ~np.eye(len(chosen), dtype=bool), ~same):
        pairs = chosen[np.argwhere(wanted)]
        if not len(pairs):
            raise ValueError(
                f"{len(people)} pictures of {len(set(people))} people held out have no two of one and of two people"
            )
        found.append(pairs if len(pairs) <= _PAIRS else pairs[rng.choice(len(pairs), _PAIRS, replace=False)])
    return found[0], found[1]


def measure(name: str, gallery: np.ndarray, queries: np.ndarray, pairs: Sequence[np.ndarray], intervals: bool) -> Measured:
    """Return TAR at FAR for unit rows (N, E) of gallery and queries, over pairs of `draw_pairs`, the first of the gallery."""
    genuine, impostor = (np.sort(2 - 2 * np.einsum("ne,ne->n", gallery[i], queries[j])) for i, j in (kind.T for kind in pairs))
    points = [point for point in operating_points(genuine, impostor) if point.tar is not None]
    targets = [point.target for point in points]
    spread = bootstrap_intervals(genuine, impostor, 1.0, targets, _SAMPLES) if intervals else {}
    return Measured(name, points, spread, genuine, impostor)


def fit(pairs: Pairs, kinds: Sequence[str], old: Side, new: Side) -> tuple[Adapter, list[Measured], dict[str, float]]:
    """Fit the kinds, and return the best, what it measures on people of their own, and the TAR by which it was chosen.

    A fifth of the people, at least two, measure the table, another fifth chooses among several kinds.

    Raises:
        ValueError: there are too few people, or too few pictures of them.
    """
    names = np.random.default_rng(0).permutation(np.unique(pairs.people))
    share = max(2, len(names) // 5)
    if len(names) < 3 * share:
        raise ValueError(f"an adapter needs pictures of 6 people or more, got {len(names)}; name more")
    table = np.isin(pairs.people, names[:share])
    choice = np.isin(pairs.people, names[share : 2 * share]) & (len(kinds) > 1)
    base, chosen = pairs.of(~table & ~choice), pairs.of(choice)
    fitted = {kind: KINDS[kind](base.old, base.new) for kind in kinds}
    scores = dict.fromkeys(kinds, math.nan)
    if len(kinds) > 1:
        drawn = draw_pairs(chosen.people)
        far = next((far for far in reversed(FAR_TARGETS) if len(drawn[1]) * float(far) >= _EVIDENCE), FAR_TARGETS[0])
        for kind, tensors in fitted.items():
            found = measure(kind, apply(tensors, chosen.old), chosen.new, drawn, intervals=False)
            # equal ones, such as 1 on an easy set, are told apart by how near the genuine pairs are
            scores[kind] = next((point.tar or 0.0 for point in found.points if point.target == far), 0.0)
            scores[kind] -= 1e-6 * float(found.genuine.mean())
    best = max(kinds, key=lambda kind: scores[kind]) if len(kinds) > 1 else kinds[0]
    held, drawn = pairs.of(table), draw_pairs(pairs.people[table])
    tensors = {name: values.astype(np.float32) for name, values in fitted[best].items()}
    adapted = apply(tensors, held.old)
    sets = {"new and new": (held.new, held.new), "old and old": (held.old, held.old), "adapted and new": (adapted, held.new)}
    rows = [measure(name, *both, drawn, intervals=True) for name, both in sets.items()]
    lengths = float(base.new_norms.mean() / base.old_norms.mean())
    return Adapter(best, tensors, old, new, lengths, _thresholds(rows[0], rows[2])), rows, scores


def _thresholds(new: Measured, adapted: Measured) -> dict[str, tuple[float, float]]:
    """Return Adapter.thresholds: of both measurements the stricter one at each FAR."""
    found = {}
    for one, other in zip(new.points, adapted.points, strict=True):
        limit = min(one.threshold or 0.0, other.threshold or 0.0)
        found[one.target] = (1 - limit / 2, float(np.searchsorted(adapted.genuine, limit, side="left") / adapted.genuine.size))
    return found


def write_adapter(path: Path, adapter: Adapter) -> None:
    """Write an adapter to a new .safetensors file, float32."""
    facts = {
        **{"kind": adapter.kind, "old": adapter.old._asdict(), "new": adapter.new._asdict()},
        **{"lengths": adapter.lengths, "thresholds": adapter.thresholds},
    }
    tensors = {name: torch.from_numpy(values) for name, values in adapter.tensors.items()}
    write_tensors(path, tensors or {"none": torch.zeros(1)}, {_KEY: json.dumps(facts)})


def read_adapter(path: Path) -> Adapter:
    """Return the adapter of a file; ValueError if it is none, or damaged."""
    with reading(path):
        check_file(path, _LARGEST)
    text = read_metadata(path).get(_KEY, "")
    if not text:
        raise ValueError(f"{shown(path)}: is no adapter; `face adapt` makes one")
    tensors = {name: value.float().numpy() for name, value in read_tensors(path).items() if name != "none"}
    try:
        return _checked(json.loads(text), tensors)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{shown(path)}: a damaged adapter ({error!s:.200}); fit it again with `face adapt`") from None


def _checked(facts: dict[str, Any], tensors: Tensors) -> Adapter:
    old, new = (Side(**facts[side]) for side in ("old", "new"))
    for side in (old, new):
        if tuple(map(type, side)) != (str, str, int, int, str) or not 1 <= side.embedding_size <= 65536:
            raise ValueError("its networks are not described")
    if not 16 <= new.image_size <= 1024:  # as a gallery says it
        raise ValueError("its networks are not described")
    sizes = {"D": old.embedding_size, "E": new.embedding_size}
    for name, values in sorted(tensors.items()):
        if values.ndim != len(_SHAPES[name]) or not np.isfinite(values).all():
            raise ValueError(f"{name} has {values.ndim} dimensions, or numbers that are not finite")
        for letter, size in zip(_SHAPES[name], values.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f"{name} is {values.shape}")
    complete = [{"weight", "bias"}, {"weight"}, {"down", "up", "bias"}, {"weight", "bias", "inner", "inner_bias", "outer"}]
    if set(tensors) not in complete and (tensors or sizes["D"] != sizes["E"]):
        raise ValueError("it has no map from old to new embeddings")
    lengths, thresholds = facts["lengths"], check_thresholds(facts["thresholds"])
    if type(lengths) is not float or not 0 < lengths < 1e6:
        raise ValueError(f"lengths must be above 0, got {lengths!r:.80}")
    return Adapter(str(facts["kind"])[:40], tensors, old, new, lengths, thresholds)


def check_thresholds(found: Any) -> dict[str, tuple[float, float]]:
    """Return Adapter.thresholds from what a file has; ValueError if they are none."""
    if not isinstance(found, dict) or not set(found) <= set(FAR_TARGETS):
        raise ValueError("thresholds must have a cosine and a TAR by FAR")
    checked = {}
    for far, value in found.items():
        cosine, tar = value
        if type(cosine) is not float or type(tar) is not float or not -1.1 <= cosine <= 1.1 or not 0 <= tar <= 1:
            raise ValueError(f"the threshold at FAR {far} is {value!r:.80}")
        checked[far] = (cosine, tar)
    return checked
