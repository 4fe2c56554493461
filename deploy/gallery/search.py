"""Searches a gallery: the most similar people for each query, by each person's best image or by one template a person.

The first pass is a float32 matrix product in blocks. It rounds differently for another block or batch, so it only selects the
people who may be among the first k; their cosines are then computed in float64, one row at a time. So a result depends on the
gallery and the query alone, and people with equal cosines are ordered by the number of the image.

Shapes: N = images of the gallery, P = people, E = entries (images or templates), q = queries, D = embedding size.
"""

from typing import NamedTuple

import numpy as np

from eval.templates import pool_templates

_CELLS = 1 << 22  # float32 products of some queries with some entries: 16 MiB
_QUERIES = 256  # searched at once
_EXACT_ROWS = 1 << 12  # computed at once in float64: 16 MiB of 512 numbers each
_PEOPLE = 1 << 12  # whose templates are pooled at once


class Match(NamedTuple):
    """A person who may be shown by a query."""

    person: str
    cosine: float
    image: int  # number of the person's image that is most similar to the query


class Entries(NamedTuple):
    """The images of a gallery in the order of their numbers."""

    people: list[str]  # N
    numbers: np.ndarray  # (N,) int64
    vectors: np.ndarray  # (N, D) float32, unit rows
    norms: np.ndarray  # (N,) of the raw embeddings
    qualities: np.ndarray  # (N,)


class Searcher:
    """The vectors of a gallery in memory, ordered by person.

    Args:
        by: "image" or "template".
        weights: of images in a template: "norm" = as eval/templates.py does, by length and quality; "equal".
    """

    def __init__(self, entries: Entries, by: str = "image", weights: str = "norm") -> None:
        people = np.array(entries.people, dtype=object)
        self.people, person = np.unique(people, return_inverse=True) if len(people) else (people, np.zeros(0, dtype=np.int64))
        order = np.argsort(person, kind="stable")  # of one person, the images stay in the order of their numbers
        self.person, self.numbers, self.images = person[order], entries.numbers[order], entries.vectors[order]
        self.begins = np.searchsorted(self.person, np.arange(len(self.people) + 1))
        self.by = by
        if by == "template":
            self.entries = _templates(self.images, self.begins, entries.norms[order] * entries.qualities[order], weights)
            self.owner = np.arange(len(self.people))
        else:
            self.entries, self.owner = self.images, self.person

    def search(self, embeddings: np.ndarray, k: int) -> list[list[Match]]:
        """Return the k most similar people for each embedding (q, D), best first."""
        wide = embeddings.astype(np.float64)
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        queries = np.where(np.isfinite(norms) & (norms > 0), wide / np.where(norms > 0, norms, 1), 0).astype(np.float32)
        k = min(k, len(self.people))
        if k < 1:
            return [[] for _ in queries]
        found = []
        for begin in range(0, len(queries), _QUERIES):
            part = queries[begin : begin + _QUERIES]
            found += [self._ranked(query, people, k) for query, people in zip(part, self._near(part, k), strict=True)]
        return found

    def _near(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """Return for each query the people who may be among the first k."""
        best = np.full((len(queries), len(self.people)), -np.inf, dtype=np.float32)
        step = max(1, _CELLS // len(queries))
        for begin in range(0, len(self.entries), step):
            owner = self.owner[begin : begin + step]
            first = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
            scores = np.maximum.reduceat(queries @ self.entries[begin : begin + step].T, first, axis=1)
            best[:, owner[first]] = np.maximum(best[:, owner[first]], scores)
        # of D products of unit vectors the rounding errors add up to D 2^-24 at most; two scores differ by twice that
        margin = 2.02 * (queries.shape[1] + 2) * 2.0**-24
        limit = np.partition(best, len(self.people) - k, axis=1)[:, len(self.people) - k]
        return [np.flatnonzero(row >= least - margin) for row, least in zip(best, limit, strict=True)]

    def _ranked(self, query: np.ndarray, people: np.ndarray, k: int) -> list[Match]:
        """Return the first k of some people."""
        wide = query.astype(np.float64)
        scores, places = np.empty(len(people)), np.empty(len(people), dtype=np.int64)
        lengths = self.begins[people + 1] - self.begins[people]
        ends = np.cumsum(lengths)
        begin = 0
        while begin < len(people):  # as many people as have _EXACT_ROWS images, one at least
            done = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, done + _EXACT_ROWS, side="right")))
            rows = np.concatenate([np.arange(self.begins[one], self.begins[one + 1]) for one in people[begin:end]])
            cosines = np.concatenate(
                [exact_products(self.images[rows[at : at + _EXACT_ROWS]], wide) for at in range(0, len(rows), _EXACT_ROWS)]
            )
            edges = np.append(0, ends[begin:end] - done)
            for place in range(begin, end):
                low, high = edges[place - begin], edges[place - begin + 1]
                at = low + int(np.argmax(cosines[low:high]))  # the first of equal ones has the lowest number
                scores[place], places[place] = cosines[at], rows[at]
            begin = end
        if self.by == "template":
            scores = exact_products(self.entries[people], wide)
        order = np.lexsort((self.numbers[places], -scores))[:k]
        return [
            Match(str(self.people[people[one]]), float(np.clip(scores[one], -1, 1)), int(self.numbers[places[one]]))
            for one in order
        ]


def exact_products(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the (n,) float64 products of rows (n, D) and a query (D,), each computed alike wherever its row lies."""
    return np.einsum("nd,d->n", rows.astype(np.float64), query)


def _templates(images: np.ndarray, begins: np.ndarray, lengths: np.ndarray, weights: str) -> np.ndarray:
    """Return a unit vector per person (P, D) float32 from the unit vectors of images (N, D), ordered by person.

    Args:
        begins: (P + 1,) the first image of each person, and N.
        lengths: (N,) norm times quality of each image.
    """
    found = np.empty((len(begins) - 1, images.shape[1]), dtype=np.float32)
    factors = lengths.astype(np.float32) if weights == "norm" else np.ones(len(images), dtype=np.float32)
    for first in range(0, len(found), _PEOPLE):
        last = min(first + _PEOPLE, len(found))
        rows = slice(int(begins[first]), int(begins[last]))
        owner = np.repeat(np.arange(first, last), np.diff(begins[first : last + 1]))
        _, vectors = pool_templates(images[rows], factors[rows], owner, np.arange(len(owner)))
        found[first:last] = vectors
    return found
