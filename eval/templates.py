"""IJB-B and IJB-C: a template is a set of images of one person, pooled into one vector.

Source: the protocol of insightface's eval_ijbc.py. An image's feature is its plain + mirrored embedding, not normalised, times
the detector's score. The features of one medium (a video, a still) are averaged, the media of a template are summed, and the
sum is normalised. The score of a pair is the dot product.
Shapes: N = images, T = templates, P = pairs, D = embedding size.
"""

import os
import warnings
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.alignment import align
from utils.cli import progress
from utils.distributed.agreement import digest
from utils.files import MAX_TEXT, check_file, read_bytes, read_lines, reading, shown
from utils.image import IMAGE_SIZE, MAX_PHOTO_PIXELS, decode_rgb
from utils.text import prefix_errors

from .identification import ShowChunks, identify
from .protocol import Embed, Protocol, Rates, check_pair_counts
from .verification import FAR_TARGETS, operating_points

_TEMPLATES_AT_ONCE = 1024
_GALLERIES = {"ijbb": ("S1", "S2"), "ijbc": ("G1", "G2")}
_RANKS = (1, 5, 10)
_FPIR = (0.01, 0.1)
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


class TemplateProtocol(Protocol[Rates]):
    """IJB-B or IJB-C: TAR at FAR over template pairs, and the search of its probes if the lists of 1:N are there.

    Args:
        root: has meta/ and loose_crop/, as in the archives that insightface links to.
        name: ijbb or ijbc.

    Raises:
        ValueError: a missing or damaged list.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.path, self.name = root, str(root), name
        self.lists = read_template_set(root, self.name)
        meta = root / "meta"
        self._galleries = [meta / f"{self.name}_1N_gallery_{part}.csv" for part in _GALLERIES[self.name]]
        self._probes = meta / f"{self.name}_1N_probe_mixed.csv"

    def fingerprint(self) -> dict[str, str]:
        return {f"hash of the lists of {self.name}": self.lists.digest()}

    def describe(self) -> str:
        templates = len(np.unique(self.lists.templates))
        return f"{len(self.lists.images):,} images, {templates:,} templates, {len(self.lists.same):,} pairs"

    def has_metric(self, metric: str) -> bool:
        if metric.startswith("tar@"):
            check_pair_counts(self.name, metric, self.lists.same)
            return True
        return metric == "rank_1" and self._has_searches()

    def score(self, embed: Embed) -> Rates:
        lists = self.lists
        features = embed.sums(self.decode, len(lists.images))
        numbers, vectors = pool_templates(features, lists.scores, lists.templates, lists.media)
        del features  # a gigabyte
        return embed.on_first_rank(lambda: self._rates(numbers, vectors, embed))

    def decode(self, index: int, size: int) -> np.ndarray:
        """Return the aligned face of an image, (size, size, 3) uint8 RGB."""
        return read_face(self.root / "loose_crop" / self.lists.images[index], self.lists.points[index], size)

    def _has_searches(self) -> bool:
        return all(path.is_file() for path in (self._probes, *self._galleries))

    def _rates(self, numbers: np.ndarray, vectors: np.ndarray, embed: Embed) -> Rates:
        """Return the result from template numbers (T,) and vectors (T, D)."""
        lists = self.lists
        scores = score_pairs(vectors, numbers, lists.pairs, embed.bar)
        published = published_tar(scores, lists.same, FAR_TARGETS)
        distances = 2.0 - 2.0 * scores
        points = operating_points(np.sort(distances[lists.same]), np.sort(distances[~lists.same]))
        tar_at_far = {point.target: point.tar for point in points}
        figures = {f"tar@{far}": tar for far, tar in tar_at_far.items()}
        figures |= {f"published_tar@{far}": tar for far, tar in published.items()}
        values: dict[str, Any] = {
            "pairs": len(scores),
            "genuine": int(lists.same.sum()),
            "tar_as_published": published,
            "operating_points": [point.as_json() for point in points],
            "tar_at_far": tar_at_far,
        }
        if self._has_searches():
            found = [search(vectors, numbers, path, self._probes) for path in self._galleries]
            means = {
                key: None if any(part[key] is None for part in found) else float(np.mean([part[key] for part in found]))
                for key in found[0]
            }
            values["identification"] = means
            figures |= means
        return Rates(figures, values)


def read_face(path: Path, points: np.ndarray, size: int = IMAGE_SIZE) -> np.ndarray:
    """Return the (size, size, 3) uint8 face of a photograph, aligned as the published scripts do, without smoothing."""
    with reading(path), prefix_errors(str(path)):
        return align(decode_rgb(read_bytes(path), MAX_PHOTO_PIXELS), points, size, smooth=False)


def read_template_set(folder: str | os.PathLike[str], name: str) -> TemplateSet:
    """Return the lists of folder/meta/NAME_*.txt; `name` is ijbb or ijbc.

    Raises:
        ValueError: a missing or damaged file, lists that name different images, or a pair of an unknown template.
    """
    meta = Path(folder) / "meta"
    with progress([], 3, f"reading {shown(meta)}", "list", 5, shown=os.environ.get("LOCAL_RANK", "0") == "0") as bar:
        images, table = _names_and_numbers(meta / f"{name}_face_tid_mid.txt", 2, whole=True)
        bar.update()
        named, landmarks = _names_and_numbers(meta / f"{name}_name_5pts_score.txt", 11)
        bar.update()
        triples = _integers(path := meta / f"{name}_template_pair_label.txt")
        bar.update()
    if images != named:
        line = next((i for i, (a, b) in enumerate(zip(images, named, strict=False)) if a != b), min(len(images), len(named)))
        raise ValueError(
            f"{meta}: {name}_face_tid_mid.txt and {name}_name_5pts_score.txt must name the same images in the same order; "
            f"they differ at line {line + 1} ({len(images)} and {len(named)} lines)"
        )
    templates, media = (table[:, column].astype(np.int32) for column in (0, 1))
    pairs, labels = triples[:, :2], triples[:, 2]
    if len(wrong := labels[(labels < 0) | (labels > 1)]):
        raise ValueError(f"{path}: labels must be 0 or 1, one is {wrong[0]}")
    unknown = np.setdiff1d(pairs, templates)
    if len(unknown):
        raise ValueError(f"{path}: template {unknown[0]} has no image in {name}_face_tid_mid.txt")
    return TemplateSet(images, landmarks[:, :10].reshape(-1, 5, 2), landmarks[:, 10], templates, media, pairs, labels == 1)


def _names_and_numbers(path: Path, count: int, whole: bool = False) -> tuple[list[str], np.ndarray]:
    """Return the first words (N) and the `count` numbers (N, count) after them of a file's lines; `whole` ones have 32 bits."""
    names, numbers = [], array("d")
    with reading(path):
        text = read_bytes(path, MAX_TEXT)
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        try:
            values = [float(word) for word in words[1:]]
        except ValueError:
            values = []
        if len(values) != count:
            raise ValueError(f"{path}: line {number} must be a name and {count} numbers, it has {len(words)} words")
        names.append(words[0].decode("utf-8", "replace"))
        numbers.extend(values)
    if not names:
        raise ValueError(f"{path}: is empty")
    table = np.array(numbers).reshape(len(names), count)
    wrong = ~np.isfinite(table) | (whole & ((np.floor(table) != table) | (np.abs(table) >= 2**31)))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(f"{path}: line {row + 1} must have {'whole ' * whole}numbers, got {table[row, column]}")
    return names, table


def _integers(path: Path) -> np.ndarray:
    """Return the (P, 3) int32 numbers of a file with three per line."""
    rule = f"{path}: each line must have three whole numbers and nothing else, all below 2^31"
    with reading(path):
        if not check_file(path, MAX_TEXT):
            raise ValueError(f"{path}: is empty")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # numpy 2.2 takes 1.7 for 1, and 3000000000 for -2147483648, and only warns
                numbers = np.loadtxt(path, dtype=np.int32, ndmin=2, comments=None)
        except (ValueError, Warning) as error:  # numpy counts the rows now from 0, now from 1
            raise ValueError(f"{rule}: {str(error).replace('at row', 'near line').partition(';')[0]:.200}") from None
    if numbers.shape[1] != 3:
        raise ValueError(f"{rule}; they have {numbers.shape[1]}")
    return numbers


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


def score_pairs(vectors: np.ndarray, numbers: np.ndarray, pairs: np.ndarray, progress: ShowChunks = iter) -> np.ndarray:
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


def published_tar(scores: np.ndarray, same: np.ndarray, far_targets: tuple[str, ...]) -> dict[str, float]:
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


def search(vectors: np.ndarray, numbers: np.ndarray, gallery: Path, probe: Path) -> dict[str, float | None]:
    """Return rank-k and TPIR at FPIR of one gallery, from lists of template_id,subject_id."""
    (entries, people), (probes, wanted) = (read_people(path, numbers) for path in (gallery, probe))
    found = identify(vectors[entries], people, vectors[probes], wanted)
    return found.rates(_RANKS, _FPIR)


def read_people(path: Path, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows of the templates, subjects) of a CSV file whose first columns are template_id and subject_id."""
    rows = []
    for number, line in enumerate(read_lines(path)[1:], 2):
        words = line.split(",")
        if len(words) < 2 or not words[0].strip().isdigit() or not words[1].strip().isdigit():
            raise ValueError(f"{path}: line {number} must begin with template_id,subject_id, two whole numbers")
        rows.append((int(words[0]), int(words[1])))
    table = np.unique(np.array(rows, dtype=np.int64).reshape(-1, 2), axis=0)  # the lists have a line per image of a template
    places = np.searchsorted(numbers, table[:, 0])
    known = numbers[np.minimum(places, len(numbers) - 1)] == table[:, 0]
    if not known.all() or not len(table):
        missing = table[~known][0, 0] if len(table) else "any"
        raise ValueError(f"{path}: template {missing} has no image in the 1:1 lists")
    return places, table[:, 1]
