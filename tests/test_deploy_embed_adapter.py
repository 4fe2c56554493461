"""Adapters against numpy's least squares and singular values, planted maps, and what their files refuse."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import rounding_bound

from deploy.embed import adapter as module
from deploy.embed.adapter import Pairs, Side, apply, draw_pairs, fit, fit_linear, fit_low_rank, fit_orthogonal, measure
from eval.verification import unit_rows as unit
from utils.checkpoint.tensor_file import write_tensors

OLD, NEW = Side("old", "a", 12), Side("new", "b", 12, 112, "/somewhere")


def _rotation(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def _pairs(turn: np.ndarray, noise: float = 0.0, people: int = 20, each: int = 6) -> Pairs:
    """Return noisy pictures of people, whose new embeddings are the old ones times a matrix, and noise."""
    rng = np.random.default_rng(1)
    names = np.repeat([f"p{number}" for number in range(people)], each)
    old = unit(np.repeat(rng.normal(size=(people, len(turn))), each, axis=0) + 0.5 * rng.normal(size=(len(names), len(turn))))
    new = unit(old @ turn + noise * rng.normal(size=(len(old), turn.shape[1])))
    return Pairs(old, new, names, np.full(len(names), 2.0), np.full(len(names), 6.0))


@pytest.mark.numeric
def test_linear_maps_are_those_of_numpys_least_squares():
    rng = np.random.default_rng(0)
    old, new = unit(rng.normal(size=(50, 5))), unit(rng.normal(size=(50, 7)))
    design = np.column_stack([old, np.ones(50)])
    expected = np.linalg.lstsq(design, new, rcond=None)[0]
    found = fit_linear(old, new, ridge=0)
    np.testing.assert_allclose(np.vstack([found["weight"], found["bias"]]), expected, rtol=1e-7, atol=1e-10)
    # with ridge: rows that pull the weights, but not the bias, to zero
    centred = old - old.mean(0)
    pull = np.sqrt(0.3 * (centred**2).sum() / 5) * np.eye(5)
    longer = np.vstack([centred, pull]), np.vstack([new - new.mean(0), np.zeros((5, 7))])
    np.testing.assert_allclose(
        fit_linear(old, new, 0.3)["weight"], np.linalg.lstsq(*longer, rcond=None)[0], rtol=1e-7, atol=1e-10
    )
    # the best map of rank 2: the fitted rows cut to two singular values
    low = fit_low_rank(old, new, 2, ridge=0)
    left, values, right = np.linalg.svd(centred @ expected[:5], full_matrices=False)
    np.testing.assert_allclose(centred @ low["down"] @ low["up"], left[:, :2] * values[:2] @ right[:2], rtol=1e-7, atol=1e-10)
    whole = fit_low_rank(old, new, 5, ridge=0)
    np.testing.assert_allclose(apply(whole, old), apply(found, old), rtol=1e-7, atol=1e-10)


@pytest.mark.numeric
@pytest.mark.parametrize(("old_size", "new_size"), [(8, 8), (5, 8), (8, 5)])
def test_the_orthogonal_map_has_the_largest_sum_of_cosines_that_any_has(old_size: int, new_size: int):
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=(40, old_size)), rng.normal(size=(40, new_size))
    turn = fit_orthogonal(old, new)["weight"]
    small = turn @ turn.T if old_size <= new_size else turn.T @ turn
    np.testing.assert_allclose(small, np.eye(min(old_size, new_size)), atol=1e-12)
    # the trace of turn' old' new is at most the sum of the singular values of old' new
    assert np.sum(turn * (old.T @ new)) == pytest.approx(np.linalg.svd(old.T @ new, compute_uv=False).sum(), rel=1e-12)


@pytest.mark.numeric
def test_a_planted_rotation_is_recovered_and_people_are_told_apart_as_before():
    turn = _rotation(np.random.default_rng(3), 12)
    pairs = _pairs(turn)
    found, rows, _ = fit(pairs, ["orthogonal"], OLD, NEW)
    assert float(np.abs(found.tensors["weight"] - turn).max()) < rounding_bound(torch.float32, 12)
    assert found.lengths == pytest.approx(3.0)
    by_name = {row.name: row for row in rows}
    new, adapted = by_name["new and new"], by_name["adapted and new"]
    np.testing.assert_allclose(adapted.genuine, new.genuine, atol=1e-5)
    assert [point.target for point in new.points] == ["1e-1", "1e-2"]  # 4 people of 6 pictures: 432 impostor pairs


def test_a_threshold_holds_among_adapted_and_new_and_among_new_embeddings():
    strict = set()
    pairs = _pairs(_rotation(np.random.default_rng(3), 12), 0.3)
    for offset in (0.0, 1.0):  # which all new embeddings have in common, and adapted ones show without their noise
        moved = pairs._replace(new=unit(pairs.new + offset / 12**0.5))
        found, (new, _, adapted), _ = fit(moved, ["linear"], OLD, NEW)
        assert set(found.thresholds) == {"1e-1", "1e-2"}
        for far, (cosine, tar) in found.thresholds.items():
            shares = [float(np.mean(1 - one.impostor / 2 > cosine)) for one in (new, adapted)]
            assert max(shares) <= float(far)
            strict.add(shares[0] < shares[1])
            assert tar == pytest.approx(np.mean(1 - adapted.genuine / 2 > cosine))
    assert strict == {True, False}  # each of the two is the stricter one somewhere


def test_people_of_the_table_are_in_neither_the_fit_nor_the_choice(monkeypatch: pytest.MonkeyPatch):
    pairs = _pairs(np.eye(12), 0.2)
    seen: list[set] = []

    def spy(old: np.ndarray, new: np.ndarray) -> dict[str, np.ndarray]:
        seen.append({pairs.people[np.flatnonzero((pairs.old == row).all(axis=1))[0]] for row in old})
        return {}

    monkeypatch.setitem(module.KINDS, "identity", spy)
    drawn: list[set] = []
    monkeypatch.setattr(module, "draw_pairs", lambda people: drawn.append(set(people.tolist())) or draw_pairs(people))
    fit(pairs, ["identity", "linear"], OLD, NEW)
    assert len(seen[0]) == 12 and [len(people) for people in drawn] == [4, 4]
    assert not seen[0] & drawn[0] and not seen[0] & drawn[1] and not drawn[0] & drawn[1]


@pytest.mark.numeric
def test_the_best_kind_is_chosen_and_a_hidden_layer_bends_what_no_linear_map_can():
    turn = _rotation(np.random.default_rng(3), 12)
    assert fit(_pairs(turn), ["identity", "orthogonal"], OLD, NEW)[0].kind == "orthogonal"
    pairs = _pairs(np.eye(12), people=60)
    bent = pairs._replace(new=unit(np.abs(pairs.old @ turn) - 0.2))
    fitted = {kind: module.KINDS[kind](bent.old, bent.new) for kind in ("linear", "mlp")}
    mapped, t = {kind: apply(tensors, bent.old) for kind, tensors in fitted.items()}, fitted["mlp"]
    hidden = np.maximum(bent.old @ t["inner"] + t["inner_bias"], 0) @ t["outer"]
    np.testing.assert_allclose(mapped["mlp"], unit(bent.old @ t["weight"] + t["bias"] + hidden), rtol=1e-7, atol=1e-10)
    scores = {kind: float((rows * bent.new).sum(axis=1).mean()) for kind, rows in mapped.items()}
    assert scores["mlp"] > scores["linear"] + 0.02
    again = [module.fit_mlp(bent.old, bent.new)["outer"] for _ in range(2)]
    assert np.array_equal(*again)


def test_pairs_are_of_two_pictures_and_measured_as_a_slow_loop_does():
    people = np.array(["a", "a", "b", "b", "b", "c"])
    rows = unit(np.random.default_rng(0).normal(size=(6, 4)))
    genuine, impostor = draw_pairs(people)
    every = [(i, j) for i in range(6) for j in range(6) if i != j]
    assert sorted(map(tuple, genuine.tolist())) == [(i, j) for i, j in every if people[i] == people[j]]
    assert sorted(map(tuple, impostor.tolist())) == [(i, j) for i, j in every if people[i] != people[j]]
    found = measure("", rows, rows[::-1].copy(), (genuine, impostor), intervals=False)
    slow = sorted(float(((rows[i] - rows[5 - j]) ** 2).sum()) for i, j in genuine)
    assert found.genuine == pytest.approx(slow)


def test_files_are_read_back_and_damaged_ones_are_refused(tmp_path: Path):
    pairs = _pairs(_rotation(np.random.default_rng(3), 12), 0.1)
    for kind in module.KINDS:
        path = tmp_path / f"{kind}.safetensors"
        fitted = fit(pairs, [kind], OLD, NEW)[0]
        module.write_adapter(path, fitted)
        found = module.read_adapter(path)
        assert (found.kind, found.old, found.new, found.lengths, found.thresholds) == (kind, OLD, NEW, 3.0, fitted.thresholds)
        assert np.array_equal(apply(found.tensors, pairs.old), apply(fitted.tensors, pairs.old))
    facts = {"kind": "linear", "old": OLD._asdict(), "new": NEW._asdict(), "lengths": 1.0, "thresholds": {}}
    good = {"weight": torch.zeros(12, 12), "bias": torch.zeros(12)}
    for number, (changed, tensors, says) in enumerate(
        [
            ({"lengths": -1.0}, good, "lengths must be above 0"),
            ({"thresholds": {"1e-2": [7.0, 1.0]}}, good, "threshold at FAR 1e-2 is"),
            ({"thresholds": {"x": [0.0, 1.0]}}, good, "a cosine and a TAR by FAR"),
            ({"old": {"title": "a"}}, good, "damaged adapter"),
            ({"new": NEW._asdict() | {"image_size": 15}}, good, "its networks are not described"),
            ({}, {"weight": torch.zeros(12, 11), "bias": torch.zeros(12)}, "weight is (12, 11)"),
            ({}, {"weight": torch.zeros(12)}, "weight has 1 dimensions"),
            ({}, {"evil": torch.zeros(12)}, "'evil'"),
            ({}, {"bias": torch.zeros(12)}, "no map from old to new"),
        ]
    ):
        path = tmp_path / f"bad_{number}.safetensors"
        write_tensors(path, tensors, {"face.adapter": json.dumps(facts | changed)})
        with pytest.raises(ValueError, match=re.escape(says)):
            module.read_adapter(path)
    write_tensors(tmp_path / "other.safetensors", good)
    with pytest.raises(ValueError, match="is no adapter; `face adapt` makes one"):
        module.read_adapter(tmp_path / "other.safetensors")
