"""Wrong labels are found in planted vectors, whose truth is known, and the parts agree with slow references."""

from typing import NamedTuple

import numpy as np
import pytest

from analysis import cleaning, mixture
from analysis.cleaning import clean, find_overlap, near_pairs
from analysis.mixture import BINS, find_border, histogram
from eval.embedding_table import Faces

PEOPLE, EACH, SIZE = 60, 16, 64
TWICE, TWO = 2, 2  # people with two labels, labels with two people


class Planted(NamedTuple):
    vectors: np.ndarray
    labels: np.ndarray
    people: np.ndarray  # (n,) the person on each image
    owner: np.ndarray  # (C,) the person of each label


def _unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def planted(share: float, seed: int = 0, twice: int = TWICE, two: int = TWO, noise: float = 0.9) -> Planted:
    """Return people around random directions; of `share` of the images the label, or the person, is another."""
    rng = np.random.default_rng(seed)
    people = np.repeat(np.arange(PEOPLE), EACH)
    owners = np.arange(PEOPLE + twice)
    labels = people.copy()
    for k in range(twice):  # every second image gets a label of its own
        labels[np.flatnonzero(people == k)[1::2]] = PEOPLE + k
        owners[PEOPLE + k] = k
    for k in range(two):  # half of one person's images lie under the label of another
        labels[np.flatnonzero(people == 10 + k)[1::2]] = 20 + k
    wrong = rng.permutation(len(people))[: round(share * len(people))]
    flips, outliers = wrong[: len(wrong) // 2], wrong[len(wrong) // 2 :]
    labels[flips] = (labels[flips] + rng.integers(1, PEOPLE, len(flips))) % PEOPLE
    people[outliers] = PEOPLE + np.arange(len(outliers))
    centres = _unit(rng.normal(size=(PEOPLE + len(outliers), SIZE)))
    noises = noise * rng.normal(size=(len(people), SIZE)) / np.sqrt(SIZE)
    return Planted(_unit(centres[people] + noises), labels, people, owners)


def _rates(made: Planted, found: cleaning.Found, wrong: np.ndarray) -> tuple[float, float]:
    flagged = np.zeros(len(made.labels), dtype=bool)
    flagged[found.wrong] = True
    right = np.count_nonzero(flagged & wrong)
    return right / np.count_nonzero(flagged), right / np.count_nonzero(wrong)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_wrong_labels_are_found_whatever_their_share(share: float):
    made = planted(share, twice=0, two=0)
    found = clean(made.vectors, made.labels)
    wrong = made.people != made.labels
    precision, recall = _rates(made, found, wrong)
    assert precision >= 0.97 and recall >= 0.97
    assert abs(found.border.share - share) < 0.05
    moved = found.other_sure > 0.5
    assert (found.other[moved] == made.people[found.wrong[moved]]).mean() > 0.97
    assert np.count_nonzero(moved) > 0.8 * np.count_nonzero(made.people[wrong] < PEOPLE)
    assert found.merges == [] and found.splits == []


def test_where_all_right_images_are_clear_an_image_is_wrong_if_another_centre_is_nearer():
    made = planted(0.1, seed=1, twice=0, two=0, noise=0.4)
    found = clean(made.vectors, made.labels)
    np.testing.assert_array_equal(found.lead < 1, made.people != made.labels)
    assert len(found.wrong) == np.count_nonzero(found.lead < 1)
    assert found.border.cosine == 0  # not in the middle of the gap up to the leads of clear images, above 0.5


def test_a_set_without_wrong_labels_is_left_alone():
    made = planted(0.0, twice=0, two=0)
    found = clean(made.vectors, made.labels)
    assert len(found.wrong) <= 0.005 * len(made.labels) and found.merges == [] and found.splits == []


def test_people_with_two_labels_and_labels_with_two_people_are_found(monkeypatch: pytest.MonkeyPatch):
    made, shown = planted(0.3), set()
    monkeypatch.setattr(cleaning, "progress", lambda items, _, what, *more, **how: shown.add(what) or items)
    found = clean(made.vectors, made.labels)
    # each part that reads all vectors of a table, which takes minutes for millions, shows how far it is
    assert {"ordering vectors", "comparing images", "averaging", "comparing centres", "searching centres", "parting"} <= shown
    assert {(a, b) for a, b, *_ in found.merges} == {(k, PEOPLE + k) for k in range(TWICE)}
    # the half of a person under another label: its other half has a label, where the images belong
    for k in range(TWO):
        inside = np.flatnonzero((made.labels == 20 + k) & (made.people == 10 + k))
        assert np.isin(inside, found.wrong).all()
        assert (found.other[np.searchsorted(found.wrong, inside)] == 10 + k).all()
    together = Planted(made.vectors, np.where(made.labels == 10, 20, made.labels), made.people, made.owner)
    splits = clean(together.vectors, np.unique(together.labels, return_inverse=True)[1]).splits
    assert len(splits) == 1  # person 10 has no label of its own now
    identity, rows, sure = splits[0]
    assert identity == 19 and sure > 0.95  # 20 without label 10
    minority = set(made.people[rows].tolist())
    assert minority in ({10}, {20})
    assert len(rows) >= 0.9 * np.count_nonzero((together.labels == 20) & np.isin(made.people, list(minority)))


@pytest.mark.parametrize("two", [1, 6])
def test_a_label_whose_centre_is_that_of_two_people_is_parted(two: int):
    """As a network that was trained with the label sees them: their images are alike."""
    rng = np.random.default_rng(two)
    centres = _unit(rng.normal(size=(PEOPLE, SIZE)))
    centres[:two] = _unit(0.5 * centres[two : 2 * two] + 0.87 * centres[:two])
    people = np.repeat(np.arange(PEOPLE), EACH)
    vectors = _unit(centres[people] + 0.7 * rng.normal(size=(len(people), SIZE)) / np.sqrt(SIZE))
    labels = np.where(people < two, people + two, people) - two
    found = clean(vectors, labels)
    assert sorted(identity for identity, *_ in found.splits) == list(range(two))
    for identity, rows, sure in found.splits:
        images = np.flatnonzero(labels == identity)
        parts = [set(images[people[images] == person].tolist()) for person in (identity, identity + two)]
        assert sure > 0.95 and max(len(part & set(rows.tolist())) for part in parts) == len(rows) >= EACH - 2


def test_a_person_whose_two_labels_differ_is_merged_and_not_parted_again():
    rng = np.random.default_rng(9)
    people = np.repeat(np.arange(PEOPLE), EACH)
    labels = np.where((people < 6) & (np.arange(len(people)) % 2 == 1), PEOPLE + people, people)
    centres, own = (_unit(rng.normal(size=(PEOPLE + 6, SIZE))) for _ in range(2))
    centres[PEOPLE:] = centres[:6]
    vectors = _unit(_unit(centres + 0.9 * own)[labels] + 0.5 * rng.normal(size=(len(people), SIZE)) / np.sqrt(SIZE))
    found = clean(vectors, labels)
    assert len(found.merges) > 2 and all(b == PEOPLE + a for a, b, *_ in found.merges) and found.splits == []


def test_the_ages_of_a_person_are_one_person_and_a_large_label_is_parted_whole(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(10)
    people = np.repeat(np.arange(PEOPLE + 1), EACH)
    old = np.arange(len(people)) % 2 == 1
    centres, ages = (_unit(rng.normal(size=(PEOPLE + 1, SIZE))) for _ in range(2))
    centres[PEOPLE] = _unit(0.6 * centres[3] + 0.8 * centres[PEOPLE])
    vectors = centres[people] + np.where((people < 3) & old, 0.5, 0)[:, None] * ages[people]  # a child and an adult
    vectors = _unit(vectors + 0.5 * rng.normal(size=vectors.shape) / np.sqrt(SIZE))
    monkeypatch.setattr(cleaning, "_MOST", EACH)
    ((identity, rows, _),) = clean(vectors, np.where(people == PEOPLE, 3, people)).splits
    assert identity == 3 and set(people[rows].tolist()) in ({3}, {PEOPLE}) and len(rows) >= EACH - 1


def test_a_second_person_among_thousands_of_images_of_one_label_is_found():
    made, rng = planted(0.0, twice=0, two=0), np.random.default_rng(6)
    centres = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0][:2]
    people = np.repeat([0, 1], [1500, 600])
    images = _unit(centres[people] + 0.9 * rng.normal(size=(2100, SIZE)) / np.sqrt(SIZE))
    vectors = np.concatenate([made.vectors, images, _unit(rng.normal(size=(600, SIZE)))])  # and 600 strangers
    splits = clean(vectors, np.concatenate([made.labels, np.full(2700, PEOPLE)])).splits
    assert [identity for identity, *_ in splits] == [PEOPLE]
    second = len(made.labels) + 1500 + np.arange(600)
    assert np.isin(splits[0][1], second).all() and len(splits[0][1]) >= 0.9 * 600


def test_the_order_of_images_and_the_numbers_of_identities_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    made = planted(0.3)
    monkeypatch.setattr(cleaning, "_MOST", 4)  # not all images of an identity are compared
    first = clean(made.vectors, made.labels)
    rng = np.random.default_rng(1)
    order, number = rng.permutation(len(made.labels)), rng.permutation(made.labels.max() + 1)
    monkeypatch.setattr(cleaning, "_CELLS", 997 * SIZE // 8)  # blocks that cut identities
    second = clean(made.vectors[order], number[made.labels[order]])
    assert set(order[second.wrong].tolist()) == set(first.wrong.tolist())
    pairs = {frozenset((number[a], number[b])) for a, b, *_ in first.merges}
    assert {frozenset((a, b)) for a, b, *_ in second.merges} == pairs
    assert first.border.cosine == pytest.approx(second.border.cosine, abs=4 / BINS)


def test_the_border_makes_the_fewest_errors_and_its_share_is_the_planted_one():
    rng = np.random.default_rng(2)
    impostors, genuine = rng.normal(0, 0.1, 30_000), rng.normal(0.5, 0.12, 70_000)
    border = find_border(histogram(np.concatenate([impostors, genuine])), histogram(rng.normal(0, 0.1, 100_000)))
    assert border.share == pytest.approx(0.3, abs=0.01)
    grid = np.linspace(-1, 1, 401)
    errors = [np.count_nonzero(impostors > t) + np.count_nonzero(genuine <= t) for t in grid]
    made = np.count_nonzero(impostors > border.cosine) + np.count_nonzero(genuine <= border.cosine)
    assert made <= 1.02 * min(errors)
    # the probability is that of Bayes' rule with the true densities, smoothed by 0.02
    at = np.array([0.1, 0.2, 0.25, 0.3, 0.4])
    densities = [w * np.exp(-(((at - m) / s) ** 2) / 2) / s for w, m, s in ((0.3, 0, 0.102), (0.7, 0.5, 0.1217))]
    np.testing.assert_allclose(border.sure(at), densities[0] / sum(densities), atol=0.05)
    assert (np.diff(border.impostor) <= 0).all()
    far = find_border(histogram(genuine), histogram(impostors), 0.01)
    assert np.mean(impostors > far.cosine) == pytest.approx(0.01, abs=0.002)


def test_leads_and_nearest_centres_agree_with_a_slow_loop():
    made = planted(0.3, twice=0, two=0)
    found = clean(made.vectors, made.labels)
    x, unit, size = made.vectors.astype(np.float64), found.centres.unit.astype(np.float64), found.centres.size
    there = [k for k in range(PEOPLE) if size[k]]
    for row in found.wrong[:50].tolist():
        others = {k: float(x[row] @ unit[k]) for k in there if k != made.labels[row]}
        place = np.searchsorted(found.wrong, row)
        assert found.other[place] == max(others, key=others.__getitem__)
        # a wrong image is no member of the cluster, so its own centre is that of all members
        own = float(x[row] @ unit[made.labels[row]])
        assert found.lead[row] == pytest.approx((own - max(others.values())) / 2, abs=1e-5)
    rows = np.arange(5)
    under, first = cleaning._impostor_leads(made.vectors, made.labels, rows, found.centres, clear=2.0)
    slow: list[float] = []
    nearest: list[float] = []
    for row in rows:
        cosines = {k: float(made.vectors[row] @ found.centres.unit[k]) for k in there if k != made.labels[row]}
        for k, cosine in cosines.items():
            slow.append((cosine - max(c for j, c in cosines.items() if j != k)) / 2)
        a, b = sorted(cosines.values())[:-3:-1]
        nearest.append((a - b) / 2)
    for counts, values in ((under, slow), (first, nearest)):
        assert counts.sum() == len(values)
        np.testing.assert_allclose(np.repeat(np.arange(BINS), counts), np.sort(mixture.bins(np.array(values))), atol=1)


def test_pairs_of_centres_are_those_that_chance_does_not_explain(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(4)
    centres = _unit(rng.normal(size=(400, SIZE)))
    centres[7], centres[9] = (_unit(centres[k] + 0.5 * _unit(rng.normal(size=SIZE))) for k in (300, 301))
    pairs = near_pairs(centres)
    assert {(a, b) for a, b, *_ in pairs} == {(7, 300), (9, 301)}
    assert all(sure > 0.95 for *_, sure in pairs)
    # sixty pairs of one cosine: the nearest alone would be chance, all of them are not
    many = _unit(rng.normal(size=(1500, SIZE)))
    turn = rng.normal(size=(60, SIZE))
    turn = _unit(turn - many[:60] * (turn * many[:60]).sum(axis=1, keepdims=True))
    many[-60:] = _unit(0.6 * many[:60] + 0.8 * turn)
    pairs = near_pairs(many)
    assert {(k, 1440 + k) for k in range(60)} <= {(a, b) for a, b, *_ in pairs}
    assert len(pairs) < 66 and all(0.95 <= sure <= 1 for *_, sure in pairs)
    # random directions alone: a twentieth of all sets may have a pair
    assert sum(bool(near_pairs(_unit(rng.normal(size=(200, SIZE))))) for _ in range(100)) <= 10
    few = _unit(rng.normal(size=(12, SIZE)))
    assert near_pairs(np.repeat(few[:1], 50, axis=0)) == []  # of a network that sees one person
    alone = _unit(few[3:4] + 0.2 * _unit(rng.normal(size=SIZE)))
    assert [(a, b) for a, b, *_ in near_pairs(alone, few)] == [(0, 3)]  # a test set of one person
    assert [(a, b) for a, b, *_ in near_pairs(np.concatenate([few, alone]))] == [(3, 12)]
    other = _unit(centres[[7, 8]] + 0.5 * _unit(rng.normal(size=(2, SIZE))))
    strangers = _unit(rng.normal(size=(50, SIZE)))
    monkeypatch.setattr(cleaning, "_CELLS", 1000)
    assert {(a, b) for a, b, *_ in near_pairs(np.concatenate([strangers, other]), centres)} >= {(50, 7), (51, 8)}
    assert {(a, b) for a, b, *_ in near_pairs(centres)} == {(7, 300), (9, 301)}


def test_a_product_with_millions_of_centres_is_of_several_rows():
    """With four rows, as many as 32 MB are, it took five times as long: each reads all of the centres."""
    assert [len(rows) for rows in cleaning._blocks(np.arange(70), 1 << 40)] == [32, 32, 6]


@pytest.mark.parametrize("twice", [1, 10, 60])
def test_pairs_are_found_where_people_are_alike(twice: int):
    """As in the embeddings of drawn faces: directions of few dimensions, so that cosines of two people reach 0.9 and more."""
    rng = np.random.default_rng(twice)
    everybody = rng.normal(size=(430, 12)) @ rng.normal(size=(12, SIZE)) / np.sqrt(12)
    people, strangers = everybody[:400], _unit(everybody[400:])
    seen = [_unit(people + 0.1 * rng.normal(size=people.shape)) for _ in range(2)]
    own = (seen[0] * seen[1]).sum(axis=1)
    others = seen[0] @ seen[1].T - 2 * np.eye(400)
    assert others.max() > 0.85 and own.min() > 0.9
    merged = {(a, b) for a, b, *_ in near_pairs(np.concatenate([seen[0], seen[1][:twice]]))}
    test = {(a, b) for a, b, *_ in near_pairs(np.concatenate([seen[1][:twice], strangers]), seen[0])}
    assert {(k, 400 + k) for k in range(twice)} <= merged and len(merged) <= 1.1 * twice + 1
    assert {(k, k) for k in range(twice)} <= test and len(test) <= 1.1 * twice + 1


def test_people_of_a_test_table_are_found_among_the_identities():
    made = planted(0.1, twice=0, two=0)
    found = clean(made.vectors, made.labels)
    rng = np.random.default_rng(5)
    known = made.people == 33
    vectors = np.concatenate([made.vectors[known], _unit(rng.normal(size=(200, SIZE)))])
    people = ["anna"] * int(known.sum()) + [f"stranger{k // 4}" for k in range(200)]
    table = Faces([str(k) for k in range(len(people))], np.zeros(len(people)), people, np.ones(len(people)), vectors, {}, {})
    assert [(one.identity, one.why.partition(",")[0]) for one in find_overlap(found, table, "t")] == [(33, "anna of t")]
    known = table._replace(facts={"digest": "a"})
    for mine, other in ((table, table), (known, table), (known, known)):
        mine.check_network(other)
    for other in (table._replace(vectors=vectors[:, 1:]), known._replace(facts={"digest": "b"})):
        with pytest.raises(ValueError, match="must come from the network of TABLE"):
            known.check_network(other)


def test_a_set_too_small_for_distributions_is_refused_and_the_smallest_is_judged():
    made = planted(0.1, twice=0, two=0)
    few = made.labels < 20
    clean(made.vectors[few], made.labels[few])
    few = made.labels < 19
    with pytest.raises(ValueError, match="at least 20 identities with several images, got 19"):
        clean(made.vectors[few], made.labels[few])
