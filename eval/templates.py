"""Template-based 1:1 verification, IJB-B and IJB-C: a template is a set of images of one person, pooled into one vector.

Source: the protocol of insightface's eval_ijbc.py. An image's feature is its plain + mirrored embedding, not normalised, times
the detector's score. The features of one medium (a video, a still) are averaged, the media of a template are summed, and the
sum is normalised. The score of a pair is the dot product.
Shapes: N = images, T = templates, P = pairs, D = embedding size.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.distributed.agreement import digest
from utils.files import MAX_TEXT, check_file, read_bytes

_BLOCK = 1 << 24  # bytes of a text file parsed at once
_TEMPLATES_AT_ONCE = 1024
_PAIRS_AT_ONCE = 1 << 14  # at 512 float64 numbers per template these take 128 MiB


class TemplateSet(NamedTuple):
    """The lists of IJB-B or IJB-C."""

    images: list[str]  # N file names, relative to loose_crop
    points: np.ndarray  # (N, 5, 2) float64, pixels: eyes, nose, corners of the mouth
    scores: np.ndarray  # (N,) float64, the detector's confidence
    templates: np.ndarray  # (N,) int32
    media: np.ndarray  # (N,) int32
    pairs: np.ndarray  # (P, 2) int32, template numbers
    same: np.ndarray  # (P,) bool

    def digest(self) -> str:
        """Return a hash of the lists."""
        names = "\0".join(self.images).encode("utf-8", "surrogateescape")
        numbers = [self.points, self.scores, self.templates, self.media, self.pairs, self.same]
        return digest([names, *(np.ascontiguousarray(part).tobytes() for part in numbers)])


def read_template_set(folder: str | os.PathLike[str], name: str) -> TemplateSet:
    """Return the lists of folder/meta/NAME_*.txt; `name` is ijbb or ijbc.

    Raises:
        ValueError: a missing or damaged file, lists that name different images, or a pair of an unknown template.
    """
    meta = Path(folder) / "meta"
    images, table = _names_and_numbers(meta / f"{name}_face_tid_mid.txt", 2)
    named, landmarks = _names_and_numbers(meta / f"{name}_name_5pts_score.txt", 11)
    if images != named:
        line = next((i for i, (a, b) in enumerate(zip(images, named, strict=False)) if a != b), min(len(images), len(named)))
        raise ValueError(
            f"{meta}: {name}_face_tid_mid.txt and {name}_name_5pts_score.txt must name the same images in the same order; "
            f"they differ at line {line + 1} ({len(images)} and {len(named)} lines)"
        )
    templates, media = (table[:, column].astype(np.int32) for column in (0, 1))
    triples = _integers(meta / f"{name}_template_pair_label.txt")
    pairs, labels = triples[:, :2], triples[:, 2]
    if not np.isin(labels, (0, 1)).all():
        raise ValueError(f"{meta}/{name}_template_pair_label.txt: labels must be 0 or 1, one is {labels.max()}")
    unknown = np.setdiff1d(pairs, templates)
    if len(unknown):
        raise ValueError(
            f"{meta}/{name}_template_pair_label.txt: template {unknown[0]} has no image in {name}_face_tid_mid.txt"
        )
    return TemplateSet(images, landmarks[:, :10].reshape(-1, 5, 2), landmarks[:, 10], templates, media, pairs, labels == 1)


def _names_and_numbers(path: Path, count: int) -> tuple[list[str], np.ndarray]:
    """Return the first words (N) and the `count` numbers (N, count) after them of a file's lines."""
    names, numbers = [], []
    for number, line in enumerate(_read(path).splitlines(), 1):
        words = line.split()
        try:
            values = [float(word) for word in words[1:]]
        except ValueError:
            values = []
        if len(values) != count:
            raise ValueError(f"{path}: line {number} must be a name and {count} numbers, it has {len(words)} words")
        names.append(words[0].decode("utf-8", "replace"))
        numbers.append(values)
    if not names:
        raise ValueError(f"{path}: is empty")
    return names, np.array(numbers)


def _integers(path: Path) -> np.ndarray:
    """Return the (P, 3) int32 numbers of a file with three per line; its 200 MB are parsed in blocks."""
    blocks = []
    lines = 0
    try:
        check_file(path, MAX_TEXT)
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                block += file.readline()
                if block.translate(None, b"0123456789 \t\r\n"):
                    raise ValueError(f"{path}: after line {lines}: each line must have three whole numbers and nothing else")
                numbers = np.fromstring(block, dtype=np.int64, sep=" ")
                count = block.count(b"\n") + (not block.endswith(b"\n"))
                if len(numbers) != 3 * count or numbers.max(initial=0) >= 2**31:
                    raise ValueError(
                        f"{path}: after line {lines}: each line must have three numbers below 2^31; none may be empty"
                    )
                blocks.append(numbers.astype(np.int32).reshape(-1, 3))
                lines += count
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if not blocks:
        raise ValueError(f"{path}: is empty")
    return np.concatenate(blocks)


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, MAX_TEXT)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def pool_templates(
    features: np.ndarray, scores: np.ndarray, templates: np.ndarray, media: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the template numbers (T,), ascending, and their unit vectors (T, D) float64.

    Sums and means are computed in the dtype of the features and in the order of the lists, as in the published script, which
    uses float32. Only the normalisation is in float64. So the scores agree with the script's to the last digits.

    Args:
        features: (N, D), plain + mirrored embeddings, not normalised.
        scores: (N,), the detector's scores, used as weights.
    """
    order = np.lexsort((media, templates))
    tids, mids = templates[order], media[order]
    begins = np.flatnonzero(np.concatenate([[True], (tids[1:] != tids[:-1]) | (mids[1:] != mids[:-1])]))  # of each medium
    first = np.flatnonzero(np.concatenate([[True], np.diff(tids[begins]) != 0]))  # medium of each template
    ends = np.append(begins, len(order))
    vectors = np.empty((len(first), features.shape[1]))
    for start in range(0, len(first), _TEMPLATES_AT_ONCE):
        stop = min(start + _TEMPLATES_AT_ONCE, len(first))
        media_here = slice(first[start], first[stop] if stop < len(first) else len(begins))
        here = ends[media_here.start : media_here.stop + 1]
        images = order[here[0] : here[-1]]
        weighted = features[images]
        weighted *= scores[images].astype(features.dtype)[:, None]
        means = _sum_groups(weighted, here[:-1] - here[0]) / np.diff(here)[:, None].astype(features.dtype)
        vectors[start:stop] = _sum_groups(means, first[start:stop] - first[start])
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors /= np.where(norms == 0, 1, norms)
    return tids[begins[first]], vectors


def _sum_groups(rows: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the sums of groups of consecutive rows (n, D) that begin at `begins`, each summed from first to last."""
    counts = np.diff(np.append(begins, len(rows)))
    sums = rows[begins]
    for place in range(1, int(counts.max())):
        longer = np.flatnonzero(counts > place)
        sums[longer] += rows[begins[longer] + place]
    return sums


def score_pairs(
    vectors: np.ndarray, numbers: np.ndarray, pairs: np.ndarray, progress: Callable[[Sequence[int]], Iterable[int]] = iter
) -> np.ndarray:
    """Return the (P,) float64 dot products of template pairs, in chunks.

    Args:
        vectors: (T, D), rows of `pool_templates`.
        numbers: (T,) ascending, their template numbers.
        pairs: (P, 2) template numbers.
        progress: wraps the chunks, for example in a progress bar.
    """
    scores = np.empty(len(pairs))
    for begin in progress(range(0, len(pairs), _PAIRS_AT_ONCE)):
        rows = np.searchsorted(numbers, pairs[begin : begin + _PAIRS_AT_ONCE])
        scores[begin : begin + len(rows)] = np.einsum("pd,pd->p", vectors[rows[:, 0]], vectors[rows[:, 1]])
    return scores


def published_tar(scores: np.ndarray, same: np.ndarray, far_targets: Sequence[str]) -> dict[str, float]:
    """Return FAR -> TAR as the papers' scripts compute it: at the point of the ROC curve whose FAR is nearest to the target.

    That FAR may be above the target, unlike in `operating_points`. The curve is scikit-learn's, without collinear points. Of
    equally near points, the one with the largest TAR is taken.
    """
    order = np.argsort(-scores, kind="stable")
    ranked = same[order]
    last = np.append(np.diff(scores[order]) != 0, True)
    accepted = np.cumsum(ranked)[last]
    refused = np.flatnonzero(last) + 1 - accepted
    kept = np.ones(len(accepted), dtype=bool)
    kept[1:-1] = (np.diff(refused, 2) != 0) | (np.diff(accepted, 2) != 0)
    far = np.append(0, refused[kept])[::-1] / max(1, np.count_nonzero(~same))
    tar = np.append(0, accepted[kept])[::-1] / max(1, np.count_nonzero(same))
    return {target: float(tar[np.argmin(np.abs(far - float(target)))]) for target in far_targets}
