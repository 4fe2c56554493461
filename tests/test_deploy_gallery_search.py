"""The search over rounded vectors: it finds what float64 finds, from few vectors of the file."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gallery_runs import DIM, FACTS, new_images

from deploy.gallery import search
from deploy.gallery.search import Entries, Searcher
from deploy.gallery.store import Gallery
from eval.templates import pool_templates
from scripts.benchmark import gallery as benchmark

_SIZE, _PEOPLE = 64, 700


def _unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def _rows(kind: str, rng: np.random.Generator, owner: np.ndarray) -> np.ndarray:
    noise = rng.normal(size=(len(owner), _SIZE))
    if kind == "people":
        return _unit(rng.normal(size=(_PEOPLE, _SIZE))[owner] + noise)
    if kind == "near ties":  # by less than the rounding of the codes, and some equal
        rows = _unit(rng.normal(size=(9, _SIZE))[owner % 9] + 10.0 ** rng.uniform(-7, -3, size=(len(owner), 1)) * noise)
        rows[100:110] = rows[50]
        return rows
    if kind == "nearly equal":  # as an untrained network has them
        return _unit(9 * rng.normal(size=_SIZE) + noise)
    return _unit(noise * np.exp(rng.normal(size=(len(owner), 1)) * rng.normal(size=_SIZE)))  # codes of very different scales


def _counted(blocks: Iterator[np.ndarray], total: int, *_: str) -> list[np.ndarray]:
    found = [*blocks]
    assert len(found) == total  # of the progress bar
    return found


@pytest.mark.numeric
@pytest.mark.parametrize("by", ["image", "template"])
@pytest.mark.parametrize("kind", ["people", "near ties", "nearly equal", "scales"])
@pytest.mark.parametrize("small", [False, True])  # blocks; with small ones queries are split, too
def test_a_search_finds_what_float64_finds_in_all_vectors(kind: str, by: str, small: bool, monkeypatch: pytest.MonkeyPatch):
    if small:
        sizes = {"_CELLS": 300, "_FIRST_ROWS": 3, "_PAIRS": 2000, "_EXACT_ROWS": 7, "_QUERIES": 5, "_LONG": 1}
        for name, value in {**sizes, "progress": _counted}.items():
            monkeypatch.setattr(search, name, value)
        monkeypatch.setattr(search, "_has_exact_int8", lambda: False)
    rng = np.random.default_rng(0)
    owner = rng.integers(0, _PEOPLE, 2100).astype(np.int32)
    owner[:_PEOPLE] = np.arange(_PEOPLE)
    rows, lengths = _rows(kind, rng, owner), rng.uniform(1, 20, len(owner))
    numbers = np.arange(len(owner)) * 3 + 1
    entries = Entries([f"p{one}" for one in range(_PEOPLE)], owner, numbers, lengths, _SIZE)
    searcher = Searcher(entries, lambda wanted: rows[(wanted - 1) // 3], by)
    queries = np.concatenate([rng.normal(size=(6, _SIZE)).astype(np.float32), rows[50:53], rows[1:4] + rows[5:8]])
    _, pooled = pool_templates(rows, lengths.astype(np.float32), owner, np.arange(len(owner)))
    for k in (1, 5, 40):
        for query, matches in zip(queries, searcher.search(queries, k), strict=True):
            asked = _unit(query[None].astype(np.float64))[0].astype(np.float64)
            cosines = np.einsum("nd,d->n", rows.astype(np.float64), asked)
            best = {int(owner[at]): at for at in np.lexsort((-numbers, cosines))}
            scores = np.einsum("nd,d->n", pooled.astype(np.float32).astype(np.float64), asked) if by == "template" else None
            ranked = sorted((-(cosines[at] if scores is None else scores[who]), at, who) for who, at in best.items())[:k]
            assert [(match.person, match.image) for match in matches] == [(f"p{who}", 3 * at + 1) for _, at, who in ranked]
            assert [match.cosine for match in matches] == [min(1.0, -score) for score, *_ in ranked]


@pytest.mark.numeric
@pytest.mark.parametrize("size", [3, 512, 4096])
def test_the_bound_is_just_above_the_difference_of_a_query_along_the_remainder(size: int):
    rows = _unit(np.random.default_rng(size).normal(size=(50, size)))
    codes, scales, errors = search._rounded(rows)
    rest = rows.astype(np.float64) - codes * scales[:, None].astype(np.float64)
    differences = np.einsum("nd,nd->n", rest, rest / np.linalg.norm(rest, axis=1, keepdims=True))
    assert (differences < search._width(errors, np.zeros(1), 1.0, size)).all()
    assert (differences > search._width(errors, np.zeros(1), 1.0, size) - 1.1e-3 * errors - 1e-5 - size / 2**20).all()


@pytest.mark.numeric
@pytest.mark.parametrize("size", [1, 3, 64, 512])
def test_products_of_the_largest_codes_are_exact(size: int):
    for queries in (1, 2, 17, 256):
        codes = np.random.default_rng(size).choice([-127, 126, 127], (queries + 100, size)).astype(np.int8)
        codes[0], codes[-9:] = 127, 127
        one, other = codes[:queries], codes[queries:]
        found = search._products(torch.from_numpy(one), torch.from_numpy(other))
        assert np.array_equal(found.numpy(), one.astype(np.int64) @ other.astype(np.int64).T)


def test_memory_holds_532_bytes_an_image_and_a_search_reads_few_vectors():
    rng, read = np.random.default_rng(1), []
    rows = _unit(rng.normal(size=(5000, 512)))

    def vectors(numbers: np.ndarray) -> np.ndarray:
        read.extend(numbers.tolist())
        return rows[numbers]

    numbers = np.arange(5000)
    searcher = Searcher(Entries([f"{n}" for n in numbers], numbers.astype(np.int32), numbers, np.ones(5000), 512), vectors)
    held = [value for value in vars(searcher).values() if isinstance(value, np.ndarray)]
    assert sum(value.nbytes for value in held) == 532 * 5000 + 4 * 512  # and the mean
    assert all(value.base is None or value.base.nbytes <= 17 / 16 * value.nbytes for value in held)
    assert sorted(read) == numbers.tolist()
    read.clear()
    searcher.search(rows[:10], 5)
    assert {*range(10)} <= {*read} and len(read) < 10 * 5000 / 20


def test_nobody_commits_between_the_comparison_and_the_vectors(tmp_path: Path):
    with Gallery.create(tmp_path / "a.gallery", FACTS) as gallery, Gallery(gallery.path, patience=0.1) as other:
        gallery.add(new_images(np.random.default_rng(0), ["a", "b"], pixels=False))
        read, refused = gallery._vectors, []

        def vectors(numbers: np.ndarray) -> np.ndarray:
            with pytest.raises(ValueError, match="another process uses it; try again later"):
                other.remove(["a"])
            refused.append(len(numbers))
            return read(numbers)

        gallery._vectors = vectors  # type: ignore[method-assign]
        assert len(gallery.search(np.ones((1, DIM), np.float32))[0]) == 2 and len(refused) == 2  # the load and the search
        with pytest.raises(ValueError, match="by must be image or template, and weights norm or equal, got 'face' and 'norm'"):
            gallery.search(np.ones((1, DIM), np.float32), by="face")
        gallery._vectors = read  # type: ignore[method-assign]
        gallery._searchers.clear()  # which read by the other function
        other.remove(["a"])
        assert [match.person for match in gallery.search(np.ones((1, DIM), np.float32))[0]] == ["b"]


def test_the_benchmark_finds_the_same_people_as_plain_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--people", "60", "--queries", "1", "7", "--rounds", "1", "--json", str(tmp_path / "found.json")]
    assert benchmark.main(words) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["images"] == 240 and [*found["queries"]] == ["1", "7"] and "7 queries" in capsys.readouterr().out
    assert all(one["ratio"] == one["plain_seconds"] / one["here_seconds"] for one in found["queries"].values())
