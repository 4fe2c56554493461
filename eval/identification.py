"""1:N identification: which person of the gallery a probe shows, if any.

Closed set: rank-k (CMC) is the share of the mated probes, whose person is in the gallery, with that person among the first k.
Open set: probes without a mate must raise no alarm. At the threshold where a share FPIR of them does, TPIR is the share of the
mated probes that find the right person first, with a score above the threshold (Grother and Ngan, NIST FRVT 1:N).
Shapes: G = gallery entries, S = people in the gallery, Q = probes, D = embedding size.
"""

import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.distributed.agreement import digest

from .protocol import Embed, Protocol, Rates

_RANKS = (1, 5, 10, 20)
_FPIR = (0.001, 0.01, 0.1)
_CELLS_AT_ONCE = 1 << 23  # scores of some probes to all entries: 64 MiB
_LEAST_AT_ONCE = 32  # probes, since for each chunk the whole gallery is read: of a million faces, 8 take 2.3 times as long
_ROWS_AT_ONCE = 1 << 14
ShowChunks = Callable[[Sequence[int]], Iterable[int]]  # gives the numbers of chunks back, perhaps under a bar


class IdentificationResult(NamedTuple):
    """The result of `identify`."""

    rank: np.ndarray  # (Q,) int64, of the right person, from 1 on; 0 for probes whose person is not in the gallery
    own: np.ndarray  # (Q,) the score of the right person; -inf without one
    best: np.ndarray  # (Q,) the highest score of any person

    @property
    def num_mated(self) -> int:
        """Probes whose person is in the gallery."""
        return int(np.count_nonzero(self.rank))

    @property
    def num_unmated(self) -> int:
        """Probes whose person is not in the gallery."""
        return len(self.rank) - self.num_mated

    def rank_rate(self, k: int) -> float | None:
        """Return the share of mated probes whose person is among the first k; None without mated probes."""
        mated = self.rank[self.rank > 0]
        return float(np.mean(mated <= k)) if len(mated) else None

    def tpir_at_fpir(self, fpir: float) -> float | None:
        """Return TPIR at the lowest threshold at which at most a share `fpir` of the unmated probes raises an alarm.

        None if it cannot be measured: fewer than 1 / fpir probes without a mate, or none with one.
        """
        alarms = np.sort(self.best[self.rank == 0])[::-1]
        allowed = int(len(alarms) * fpir + 1e-9)
        if not allowed or not self.num_mated:
            return None
        limit = alarms[allowed] if allowed < len(alarms) else -np.inf  # this score and equal ones must raise no alarm
        found = (self.rank == 1) & (self.own > limit)
        return float(np.count_nonzero(found) / self.num_mated)

    def rates(self, ranks: Sequence[int], fpirs: Sequence[float]) -> dict[str, float | None]:
        """Return rank_k and tpir_at_fpir_FPIR by name."""
        found = {f"rank_{k}": self.rank_rate(k) for k in ranks}
        return found | {f"tpir_at_fpir_{fpir}": self.tpir_at_fpir(fpir) for fpir in fpirs}


def identify(
    gallery: np.ndarray, gallery_people: np.ndarray, probes: np.ndarray, probe_people: np.ndarray, progress: ShowChunks = iter
) -> IdentificationResult:
    """Search every probe in the gallery; a person's score is the best score of the person's entries.

    Among people with equal scores the right one is ranked last, so that a constant network gets no credit.

    Args:
        gallery: (G, D) unit rows.
        gallery_people: (G,) integers.
        probes: (Q, D) unit rows.
        probe_people: (Q,) integers; those that are not in gallery_people have no mate.
        progress: wraps the chunks, for example in a progress bar.
    """
    if not len(gallery) or not len(probes):
        raise ValueError(f"identification needs a gallery and probes, got {len(gallery)} and {len(probes)} images")
    order = np.argsort(gallery_people, kind="stable")
    people, begins = np.unique(gallery_people[order], return_index=True)
    entries = gallery if (np.diff(order) > 0).all() else gallery[order]
    column = np.searchsorted(people, probe_people)
    column[people[np.minimum(column, len(people) - 1)] != probe_people] = -1
    rank = np.zeros(len(probes), dtype=np.int64)
    own, best = np.full(len(probes), -np.inf), np.empty(len(probes))
    chunk = max(_LEAST_AT_ONCE, _CELLS_AT_ONCE // len(gallery))
    for begin in progress(range(0, len(probes), chunk)):
        rows = slice(begin, min(begin + chunk, len(probes)))
        scores = probes[rows] @ entries.T
        scores = scores if len(people) == len(entries) else np.maximum.reduceat(scores, begins, axis=1)  # (rows, S)
        best[rows] = scores.max(axis=1)
        mated = np.flatnonzero(column[rows] >= 0)
        right = scores[mated, column[rows][mated]]
        own[begin + mated] = right
        rank[begin + mated] = np.count_nonzero(scores[mated] >= right[:, None], axis=1)
    return IdentificationResult(rank, own, best)


class Faces(typing.Protocol):
    """Labelled images, such as a data.base.FaceDataset."""

    @property
    def num_stored(self) -> int:
        """The number n of images."""

    def pixels_and_label(self, index: int, size: int) -> tuple[np.ndarray, int]:
        """Return (size, size, 3) uint8 RGB and the label."""

    def key(self, index: int) -> str:
        """Return the name of an image, such as its path."""

    def people(self) -> np.ndarray:
        """Return the name of the person on each image, (n,) texts."""

    def fingerprint(self) -> dict[str, int | str]:
        """Return hashes and counts by name."""


OpenFaces = Callable[..., Faces]  # of a path; with loose=True pictures in the folder itself count, too
_TINYFACE = ("Gallery_Match", "Gallery_Distractor", "Probe")


class Identification(Protocol[Rates]):
    """The search of probes in a gallery; probes whose person is in no gallery are strangers.

    Args:
        folder: has the probes in what begins with `probes`, and the known people in all that begins with `gallery`: lists,
            sets, or folders of people. Or it is TinyFace's Testing_Set (Cheng et al., ACCV 2018) with aligned pictures
            PERSON_NUMBER.jpg, and each distractor is another person.
    """

    def __init__(self, folder: Path, open_faces: OpenFaces) -> None:
        self.name, self.path = folder.resolve().name, str(folder)
        if all((folder / name).is_dir() for name in _TINYFACE):
            self._sets = [open_faces(folder / name, loose=True) for name in _TINYFACE]
            keys = [[faces.key(index) for index in range(faces.num_stored)] for faces in self._sets]
            if odd := next((key for key in (*keys[0], *keys[2]) if "_" not in Path(key).name), ""):
                raise ValueError(f"{odd}: a picture of TinyFace is called PERSON_NUMBER.jpg; rename it, or remove it")
            persons = [[Path(key).name.partition("_")[0] for key in names] for names in keys]
            self._people = [np.array(names) for names in (persons[0], keys[1], persons[2])]
            return
        galleries = sorted(folder.glob("gallery*"))
        probes = sorted(folder.glob("probes*"))
        if not galleries or len(probes) != 1:
            raise ValueError(
                f"{folder} must hold gallery and probes, each a list 'path label' (gallery.txt), a set, or a folder of people, "
                f"or TinyFace's {', '.join(_TINYFACE)}; it has {len(galleries)} whose names begin with gallery and "
                f"{len(probes)} with probes (one is right)"
            )
        self._sets = [open_faces(path) for path in (*galleries, *probes)]
        self._people = [faces.people() for faces in self._sets]

    def fingerprint(self) -> dict[str, Any]:
        whose = [*(f"gallery {number}" for number in range(1, len(self._sets))), "the probes"]
        found: dict[str, Any] = {}
        for who, faces, names in zip(whose, self._sets, self._people, strict=True):
            found |= {f"{what} of {who}": value for what, value in faces.fingerprint().items()}
            people = "\0".join(names.tolist())
            found[f"hash of the people of {who}"] = digest([people.encode("utf-8", "surrogateescape")])
        return found

    def describe(self) -> str:
        counts = [faces.num_stored for faces in self._sets]
        return f"{counts[-1]:,} probes, {sum(counts[:-1]):,} images in the gallery"

    def has_metric(self, metric: str) -> bool:
        return metric == "rank_1"

    def score(self, embed: Embed) -> Rates:
        vectors = [self._unit_rows(faces, embed) for faces in self._sets]
        return embed.on_first_rank(lambda: self._rates(vectors, embed))

    def _unit_rows(self, faces: Faces, embed: Embed) -> np.ndarray:
        """Return the unit embeddings (n, D) float32, plain + mirrored, of all images of a set."""
        sums = embed.sums(lambda index, size: faces.pixels_and_label(index, size)[0], faces.num_stored)
        for begin in range(0, len(sums), _ROWS_AT_ONCE):  # of a million faces, whose copies take gigabytes
            rows = sums[begin : begin + _ROWS_AT_ONCE]
            norms = np.linalg.norm(rows, axis=1, keepdims=True)
            rows /= np.where(norms == 0, 1, norms)
        return sums

    def _rates(self, vectors: Sequence[np.ndarray], embed: Embed) -> Rates:
        names = np.concatenate(self._people).tolist()
        number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
        people = np.array([number_of[name] for name in names])
        known = sum(map(len, vectors[:-1]))
        gallery = vectors[0] if len(vectors) == 2 else np.concatenate(vectors[:-1])
        found = identify(gallery, people[:known], vectors[-1], people[known:], embed.bar)
        rates = found.rates(_RANKS, _FPIR)
        counts = {
            "gallery_images": known,
            "gallery_people": len(np.unique(people[:known])),
            "probes_with_mate": found.num_mated,
            "probes_without": found.num_unmated,
        }
        return Rates(rates, {**counts, **rates})
