"""Searches a gallery: the most similar people for each query, by each person's best image or by one template a person.

Memory holds a unit vector x of an image as 8-bit integers z: x = c + s z + r with the mean c of some images, a number s, and
the length e of the remainder r. A query q = t w + r' is rounded in the same way. As |s z + r| <= d, the cosine minus the
constant (c, q) differs from s t (z, w) by d e' + e + e e' at most, and a first pass over the integers leaves the images that
may be the best of one of the first k people. Their vectors are read from the gallery's file and their cosines are computed in
float64, one row at a time. So a result depends on the gallery and the query alone, and people with equal cosines are ordered
by the number of the image.

Shapes: N = images of the gallery, P = people, E = entries (images or templates), q = queries, D = embedding size.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eval.templates import pool_templates
from utils.cli import progress

_CELLS = 1 << 20  # products of some queries with some entries: 4 MiB
_ROWS = 1 << 16  # entries compared at once with few queries
_FIRST_ROWS = 64  # entries compared first; all of them are near, as there is no limit yet
_QUERIES = 256  # searched at once
_PAIRS = 1 << 21  # of a query and an entry near it: some 200 MB
_LONG = 1 << 18  # images that take some seconds to read
_EXACT_ROWS = 1 << 10  # vectors read at once: 2 MiB of 512 numbers each, 4 in float64


class Match(NamedTuple):
    """A person who may be shown by a query."""

    person: str
    cosine: float
    image: int  # number of the person's image that is most similar to the query


class Entries(NamedTuple):
    """The images of a gallery in the order of their numbers."""

    people: list[str]  # P
    owner: np.ndarray  # (N,) int32, which of them
    numbers: np.ndarray  # (N,) int64
    lengths: np.ndarray  # (N,) of the raw embeddings, times the quality of the faces
    size: int  # D


class _Pairs(NamedTuple):
    """Queries and entries that may be near each other, one a row."""

    query: np.ndarray
    place: np.ndarray  # of the entry
    low: np.ndarray  # the cosine, less a constant of the query, is at least this
    high: np.ndarray


class Searcher:
    """The rounded vectors of a gallery in memory, which finds those to read from its file.

    Args:
        read: returns the unit vectors (n, D) float32 of images by their numbers (n,), as long as the gallery is unchanged.
        by: "image" or "template".
        weights: of images in a template: "norm" = as eval/templates.py does, by length and quality; "equal".
    """

    def __init__(
        self, entries: Entries, read: Callable[[np.ndarray], np.ndarray], by: str = "image", weights: str = "norm"
    ) -> None:
        if by not in ("image", "template") or weights not in ("norm", "equal"):
            raise ValueError(f"by must be image or template, and weights norm or equal, got {by!r} and {weights!r}")
        self.people, self.owner, self.numbers, self.by = entries.people, entries.owner, entries.numbers, by
        self._read, steps = read, -(-len(self.numbers) // _EXACT_ROWS)
        if by == "template":
            order = np.argsort(entries.owner, kind="stable")  # of one person, the images stay in the order of their numbers
            self.begins = np.searchsorted(entries.owner[order], np.arange(len(self.people) + 1))
            self.owner, self.numbers = np.arange(len(self.people)), entries.numbers[order]
            steps = len(np.unique(self.begins[1:] // _EXACT_ROWS))  # as `_templates` splits them
            lengths = entries.lengths[order].astype(np.float32)
            self.factors = lengths if weights == "norm" else np.ones_like(lengths)
        count = len(self.owner)
        room = count + count // 16  # what nobody wrote into takes no memory
        self.codes = np.empty((room, entries.size), dtype=np.int8)[:count]
        self.scales, self.errors = (np.empty(room, dtype=np.float32)[:count] for _ in range(2))
        begin, self.spread, self._centre = 0, 0.0, np.zeros(entries.size, dtype=np.float32)
        blocks = self.vectors()
        for rows in blocks if len(self.numbers) < _LONG else progress(blocks, steps, "reading the gallery", "block"):
            if len(rows) and begin == 0:
                self._centre = rows.mean(0)
            part = slice(begin, begin := begin + len(rows))
            self.codes[part], self.scales[part], self.errors[part] = self._moved(rows)

    def _moved(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the codes, scales and errors of unit vectors (n, D)."""
        moved = rows - self._centre
        self.spread = float(np.linalg.norm(moved, axis=1).max(initial=self.spread))
        return _rounded(moved)

    def append(self, new: Entries, firsts: list[int]) -> None:
        """Take new images into a search by image; `firsts` are the numbers of the first images of their people."""
        places = np.searchsorted(self.numbers, firsts)
        known = places < len(self.numbers)
        owners = len(self.people) + np.cumsum(~known) - 1
        owners[known] = self.owner[places[known]]
        self.people += itertools.compress(new.people, ~known)
        self.owner, self.numbers = _behind(self.owner, owners[new.owner]), _behind(self.numbers, new.numbers)
        for part in _blocks(new.numbers):
            for name, rows in zip(("codes", "scales", "errors"), self._moved(self._read(part)), strict=True):
                setattr(self, name, _behind(getattr(self, name), rows))

    def remove(self, numbers: list[int] | np.ndarray) -> None:
        """Forget images of a search by image."""
        keep = ~np.isin(self.numbers, numbers)
        parts = (self.owner, self.numbers, self.codes, self.scales, self.errors)
        self.owner, self.numbers, self.codes, self.scales, self.errors = (_kept(part, keep) for part in parts)
        people, owner = np.unique(self.owner, return_inverse=True)
        self.people, self.owner = [self.people[person] for person in people], owner.astype(np.int32)

    def vectors(self) -> Iterator[np.ndarray]:
        """Yield the unit vectors (n, D) float32 of all entries, in blocks."""
        if self.by == "template":
            yield from (pooled for pooled, *_ in self._templates(self.owner))
        else:
            yield from (self._read(part) for part in _blocks(self.numbers))

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
            found += [self._ranked(query, near, k) for query, near in zip(part, self._near(part, k), strict=True)]
        return found

    def _near(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """Return for each query the places of the entries that may be the best of one of the first k people."""
        none, count = np.zeros(0, dtype=np.int64), len(queries)
        near, new, waiting = _Pairs(none, none, none, none), list[_Pairs](), 0
        rounded, limit = _rounded(queries), np.full(count, -np.inf)
        begin, rows = 0, _FIRST_ROWS
        while begin < len(self.codes):
            part = slice(begin, begin + rows)
            least = limit - _width(self.errors[part].max(), rounded[2], self.spread, queries.shape[1])
            query, place = _above(self.codes[part], self.scales[part], rounded, least)
            new.append(_reaching(limit, self._pairs(query, place + begin, queries)))
            waiting += len(new[-1].query)
            begin, rows = begin + rows, min(2 * rows, _ROWS, max(_CELLS // count, 1))
            if waiting >= len(near.query) or begin >= len(self.codes):
                near = _Pairs(*map(np.concatenate, zip(near, *new, strict=True)))
                limit = _limits(near, self.owner[near.place], count, k)
                near, new, waiting = _reaching(limit, near), [], 0
                if len(near.query) > _PAIRS and count > 1:  # nearly equal vectors
                    return self._near(queries[: count // 2], k) + self._near(queries[count // 2 :], k)
        places = near.place[np.argsort(near.query, kind="stable")]
        return np.split(places, np.cumsum(np.bincount(near.query, minlength=count))[:-1])

    def _pairs(self, query: np.ndarray, place: np.ndarray, queries: np.ndarray) -> _Pairs:
        """Return pairs with the cosines of the queries as they are and the rounded entries."""
        products = [
            np.einsum("nd,nd->n", self.codes[some].astype(np.float32), queries[theirs])
            for some, theirs in zip(_blocks(place), _blocks(query), strict=True)
        ]
        cosine = np.concatenate(products).astype(np.float64) * self.scales[place]
        width = _width(self.errors[place], np.zeros(1), self.spread, queries.shape[1])
        return _Pairs(query, place, cosine - width, cosine + width)

    def _ranked(self, query: np.ndarray, near: np.ndarray, k: int) -> list[Match]:
        """Return the first k people of some entries."""
        wide = query.astype(np.float64)
        if self.by == "template":
            parts = []
            for pooled, images, owner, numbers in self._templates(near):
                order = np.lexsort((numbers, -exact_products(images, wide), owner))
                best = order[np.unique(owner, return_index=True)[1]]  # of each owner; of equal images that of the lowest number
                parts.append((exact_products(pooled, wide), numbers[best]))
            scores, numbers = (np.concatenate(part) for part in zip(*parts, strict=True))
        else:
            numbers = self.numbers[near]
            scores = np.concatenate([exact_products(self._read(part), wide) for part in _blocks(numbers)])
        order = np.lexsort((numbers, -scores))  # of a person's equal images, the first has the lowest number
        _, first = np.unique(self.owner[near[order]], return_index=True)
        return [
            Match(self.people[self.owner[near[one]]], float(np.clip(scores[one], -1, 1)), int(numbers[one]))
            for one in order[np.sort(first)[:k]]
        ]

    def _templates(self, people: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield templates (p, D) float32 of some people, and of their images vectors (n, D), place in p and number."""
        counts = self.begins[people + 1] - self.begins[people]
        for some in np.split(people, np.flatnonzero(np.diff(np.cumsum(counts) // _EXACT_ROWS)) + 1):
            owner = np.repeat(np.arange(len(some)), self.begins[some + 1] - self.begins[some])
            rows = np.concatenate([np.zeros(0, dtype=np.int64), *map(np.arange, self.begins[some], self.begins[some + 1])])
            images = np.concatenate([self._read(part) for part in _blocks(self.numbers[rows])])
            if len(some):
                _, pooled = pool_templates(images, self.factors[rows], owner, np.arange(len(rows)))
                yield pooled.astype(np.float32), images, owner, self.numbers[rows]


def _behind(old: np.ndarray, new: Sequence | np.ndarray) -> np.ndarray:
    """Return an array with new rows behind the old ones, which move only if the memory they lie in has no room."""
    count, memory = len(old), old if old.base is None else old.base
    if len(memory) < count + len(new):
        memory = np.empty((count + len(new) + count // 16, *old.shape[1:]), dtype=old.dtype)
        memory[:count] = old
    memory[count : count + len(new)] = new
    return memory[: count + len(new)]


def _kept(array: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Return the rows of an array that are kept, in its own memory."""
    count = 0
    for begin in range(0, len(array), _ROWS):
        part = array[begin : begin + _ROWS][keep[begin : begin + _ROWS]]
        array[count : count + len(part)] = part
        count += len(part)
    array[count:] = 0  # nothing is left of a person who was removed
    return array[:count]


def exact_products(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the (n,) float64 products of rows (n, D) and a query (D,), each computed alike wherever its row lies."""
    return np.concatenate([np.einsum("nd,d->n", part.astype(np.float64), query) for part in _blocks(rows)])


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    """Return rows in parts that are read or computed at once, one part at least."""
    return np.split(rows, range(_EXACT_ROWS, len(rows), _EXACT_ROWS))


def _rounded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return int8 codes (n, D) of rows (n, D) float32, a scale for each row, and the length of what code times scale lacks."""
    values = torch.from_numpy(rows)
    scales = (values.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    codes = (values / scales).round()
    errors = torch.linalg.vector_norm(values - codes * scales, dim=1)
    return codes.to(torch.int8).numpy(), scales[:, 0].numpy(), errors.numpy()


def _width(errors: np.ndarray, lacking: np.ndarray, spread: float, size: int) -> np.ndarray:
    """Return how far the product of a row of `size` numbers and a unit query is at most from that of their rounded ones.

    Args:
        errors: lengths of the remainders of the rows, as float32 arithmetic finds them.
        lacking: of the queries.
        spread: of the longest row, at most 2.1.
    """
    # a float32 sum errs by 2^-24 for each of its terms, here in three lengths and a product
    return 1.001 * (errors + (spread + errors) * lacking) + (8 * size + 64) * 2.0**-24


def _above(
    codes: np.ndarray, scales: np.ndarray, queries: tuple[np.ndarray, np.ndarray, np.ndarray], limit: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (query, place) of all rounded entries whose cosine with a rounded query reaches its limit (q,), and of more."""
    least = limit / (np.where(limit > 0, scales.max(), scales.min()) * queries[1].astype(np.float64))
    least = np.clip(np.floor(least - 1e-6 * np.abs(least)), -(2.0**31), 2.0**31 - 1)
    products = _products(torch.from_numpy(queries[0]), torch.from_numpy(codes))
    query, place = (products >= torch.from_numpy(least).to(products.dtype)[:, None]).nonzero(as_tuple=True)
    return query.numpy(), place.numpy()


def _products(queries: Tensor, rows: Tensor) -> Tensor:
    """Return the products (q, n) of int8 rows, exact but for float32 sums above 2^24."""
    if queries.shape[1] > 1 and _has_exact_int8():  # torch 2.13 computes products of a single number wrongly
        return torch._int_mm(queries, rows.T)
    wide = queries.float()
    return torch.cat([wide @ part.float().T for part in rows.split(2048)], dim=1)  # 2,048 rows stay in the cache


@functools.cache
def _has_exact_int8() -> bool:
    """Return whether torch multiplies int8 fast and exactly: without VNNI, oneDNN adds pairs in 16 bits, which saturate."""
    if not torch.cpu._is_vnni_supported():
        return False
    rows = torch.full((64, 512), 127, dtype=torch.int8)  # the worst case
    return all(
        bool((torch._int_mm(sign * rows[:count], rows.T) == sign * 512 * 127**2).all()) for sign in (1, -1) for count in (1, 64)
    )


def _reaching(limit: np.ndarray, pairs: _Pairs) -> _Pairs:
    """Return the pairs whose cosine may reach their query's limit (q,)."""
    return _Pairs(*(column[pairs.high >= limit[pairs.query]] for column in pairs))


def _limits(pairs: _Pairs, person: np.ndarray, count: int, k: int) -> np.ndarray:
    """Return for each of `count` queries what the k best people's cosines are at least, -inf if it has fewer people."""
    order = np.lexsort((-pairs.low, person, pairs.query))
    query, who = pairs.query[order], person[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = (query[1:] != query[:-1]) | (who[1:] != who[:-1])  # the best image of each person
    best = order[first]
    best = best[np.lexsort((-pairs.low[best], pairs.query[best]))]
    begins = np.searchsorted(pairs.query[best], np.arange(count + 1))
    wanted = begins[:-1] + k - 1
    there = wanted < begins[1:]
    return np.where(there, pairs.low[best[np.where(there, wanted, 0)]], -np.inf)
