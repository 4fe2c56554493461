"""All pairs: counts, extreme pairs and rates against every cosine in one table."""

import base64
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from faulty_disk import interrupted

import analysis.all_pairs
from analysis.all_pairs import accepted_at, count_pairs, points_at, rates_of
from data.recordio.image_record import RecordSetWriter
from deploy.journal import open_journal
from deploy.results import read_results
from eval.verification import area_under_roc, equal_error_rate, operating_points
from scripts.analysis import pairs
from utils.image import to_png

DIM = 64


def faces(count: int, people: int, num_groups: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return vectors whose products are exact in float32 in any order, labels, and groups, in no order."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(people, size=count)
    signs = np.where(rng.random((people, DIM)) < 0.5, 1, -1)[labels] * np.where(rng.random((count, DIM)) < 0.25, -1, 1)
    return (signs / DIM**0.5).astype(np.float32), labels, rng.integers(num_groups, size=people)[labels]


def every_pair(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows first < second of all pairs, and their cosines in float64."""
    first, second = np.triu_indices(len(vectors), 1)
    wide = vectors.astype(np.float64)
    return first, second, (wide @ wide.T)[first, second]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(analysis.all_pairs.ROWS, "cpu", 32)
    monkeypatch.setattr(analysis.all_pairs, "_STRIPE", 3)


@pytest.mark.parametrize(("people", "num_groups"), [(60, 1), (60, 4), (1, 1), (400, 2), (60, 25)])
def test_counts_and_extreme_pairs_are_those_of_every_pair(people: int, num_groups: int):
    vectors, labels, groups = faces(400, people, num_groups)
    if people == 60 and num_groups > 1:
        groups[:9], groups[9] = (groups[:9] + 1) % num_groups, num_groups - 1  # of people who are in two groups
    found = count_pairs(vectors, labels, groups, num_bins=256, worst=25)
    first, second, cosines = every_pair(vectors)
    same = labels[first] == labels[second]
    assert np.array_equal(found.edges, np.arange(-128, 129) / 128)
    for low in range(num_groups):
        for high in range(num_groups):
            here = (np.minimum(groups[first], groups[second]) == low) & (np.maximum(groups[first], groups[second]) == high)
            assert np.array_equal(found.impostor[low, high], np.histogram(cosines[here & ~same], found.edges)[0])
            if low == high:
                assert np.array_equal(found.genuine[low], np.histogram(cosines[here & same], found.edges)[0])
    for extremes, kind, sign in ((found.lookalikes, ~same, -1), (found.strangers, same & (groups[first] == groups[second]), 1)):
        order = np.lexsort((second[kind], first[kind], sign * cosines[kind]))[:25]
        assert np.array_equal(extremes.first, first[kind][order]) and np.array_equal(extremes.second, second[kind][order])
        assert np.array_equal(extremes.cosines, cosines[kind][order])


@pytest.mark.parametrize("targets", [("1e-1", "1e-2", "1e-3", "1e-4", "1e-9")])
def test_points_are_those_of_sorted_distances(targets: tuple[str, ...]):
    vectors, labels, _ = faces(300, 40)
    found = count_pairs(vectors, labels)
    first, second, cosines = every_pair(vectors)
    same = labels[first] == labels[second]
    kinds = [np.sort(2 - 2 * cosines[kind]) for kind in (same, ~same)]
    expected = operating_points(*kinds, targets)
    for point, other in zip(points_at(found.genuine[0], found.impostor[0, 0], found.edges, targets), expected, strict=True):
        assert (point.target, point.tar, point.far, point.num_accepted) == (
            other.target, other.tar, other.far, other.num_accepted,
        )  # fmt: skip
        if point.cosine is not None:
            assert np.count_nonzero(cosines[~same] > point.cosine) == other.num_accepted
    thresholds = np.array([-1.0, 0.123, 0.5, 1.0])
    assert accepted_at(found.impostor[0, 0], found.edges, thresholds)[[0, 2]].tolist() == [
        np.count_nonzero(~same), np.count_nonzero(cosines[~same] >= 0.5),
    ]  # fmt: skip


def test_a_count_that_was_stopped_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    vectors, labels, groups = faces(400, 50, 2)
    whole = count_pairs(vectors, labels, groups, num_bins=256, worst=9)
    added = interrupted(monkeypatch, [2])
    for _ in range(2):
        done: list[int] = []
        with open_journal(tmp_path / "unfinished", "it") as journal:
            journal.begin({"facts": 1}, False, "it", "was begun with")
            try:
                found = count_pairs(vectors, labels, groups, 256, 9, journal, done.append)
            except KeyboardInterrupt:
                continue
    assert [record["blocks"] for record in added[:3]] == [3, 6, 9]
    assert sum(done) == 400 * 399 // 2 - sum(labels[a] == labels[b] and groups[a] != groups[b]
        for a in range(400) for b in range(a))  # fmt: skip
    for one, other in zip(whole, found, strict=True):
        for array, expected in zip(
            one if isinstance(one, tuple) else [one], other if isinstance(other, tuple) else [other], strict=True
        ):
            assert np.array_equal(array, expected)


def test_intervals_of_tar_are_those_of_people_drawn_anew():
    rng = np.random.default_rng(4)
    sizes = np.append(rng.integers(2, 9, 150), np.ones(60, dtype=np.int64))  # the last have no pair
    labels = np.repeat(rng.permutation(len(sizes)), sizes)
    noise = np.repeat(rng.uniform(0.5, 2, len(sizes)), sizes)[:, None] * rng.standard_normal((len(labels), DIM))
    vectors = (rng.standard_normal((len(sizes), DIM))[labels] + noise).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    order = rng.permutation(len(labels))
    vectors, labels = vectors[order], labels[order]
    rates = rates_of(count_pairs(vectors, labels), vectors, labels)
    first, second, cosines = every_pair(vectors)
    same = labels[first] == labels[second]
    weights = rng.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), 2000)  # how often each person is drawn
    for point in rates.points[:3]:
        assert point.cosine is not None and point.tar is not None
        pairs = np.bincount(labels[first[same]], minlength=len(sizes))
        accepted = np.bincount(labels[first[same]], cosines[same] > point.cosine, len(sizes))
        low, high = rates.intervals[point.target] or (0.0, 0.0)
        spread = ((weights @ accepted) / (weights @ pairs)).std()
        # the spread of 2,000 draws has an error of 1.6 %, of 150 people one of some percent more
        assert low < point.tar < high and (high - low) / (2 * 1.96) == pytest.approx(spread, rel=0.1)
        assert high - low > 1.3 * 2 * 1.96 * (point.tar * (1 - point.tar) / same.sum()) ** 0.5  # as if no pair shared a person


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"num_bins": 100}, "a power of two"),
        ({"groups": np.arange(-1, 29)}, r"groups \(n,\) from 0"),
        ({"groups": np.arange(30) * 9}, "too many"),
    ],
)
def test_what_cannot_be_counted_is_refused(given: dict, reason: str):
    vectors, labels, _ = faces(30, 5)
    with pytest.raises(ValueError, match=reason):
        count_pairs(vectors, labels, **given)


@pytest.fixture
def table(tmp_path: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Return a table of 90 faces as of a training set, its vectors and labels, beside that set."""
    vectors, labels, _ = faces(90, 12)
    np.save(tmp_path / "t.npy", vectors)
    rows = "".join(f"{row},{label}\n" for row, label in enumerate(labels.tolist()))
    (tmp_path / "t.csv").write_text(f"name,person\n{rows}")
    with RecordSetWriter(tmp_path / "set") as writer:
        for row in range(90):
            writer.add(row, to_png(np.full((112, 112, 3), 2 * row, np.uint8)))
    return tmp_path / "t.npy", vectors, labels


def test_the_program_writes_the_rates_of_every_pair_and_galleries_read_its_thresholds(
    table: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, vectors, labels = table
    words = [str(path), "--out", str(tmp_path / "out"), "--pictures", str(tmp_path / "set"), "--worst", "5"]
    assert pairs.main(words) == 0
    first, second, cosines = every_pair(vectors)
    same = labels[first] == labels[second]
    genuine, impostor = np.sort(2 - 2 * cosines[same]), np.sort(2 - 2 * cosines[~same])
    said, shown = capsys.readouterr()
    assert f"| {len(genuine)}/{len(genuine)} " in shown  # a bar of pairs, since one person may have most of them
    assert f"90 faces of 12 people: {len(genuine):,} genuine and {len(impostor):,} impostor pairs" in said
    found = read_results(tmp_path / "out" / "results.json")["t"]
    for point, other in zip(found.points, operating_points(genuine, impostor, [f"1e-{n}" for n in range(1, 9)]), strict=True):
        assert (point.target, point.tar, point.far, point.num_accepted) == (
            other.target, other.tar, other.far, other.num_accepted,
        )  # fmt: skip
    assert found.auc == pytest.approx(area_under_roc(genuine, impostor), abs=1e-9)
    assert found.eer == pytest.approx(equal_error_rate(genuine, impostor), abs=1e-9)
    assert found.histogram is not None and sum(found.histogram["impostor"]) == len(impostor)
    page = (tmp_path / "out" / "report.html").read_text()
    nearest = np.lexsort((second[~same], first[~same], -cosines[~same]))[0]
    assert f"<td>{first[~same][nearest]}</td><td>{second[~same][nearest]}</td>" in page.replace(' class="number"', "")
    files = [np.frombuffer(base64.b64decode(text), np.uint8) for text in re.findall(r'base64,([^"]+)', page)]
    pictures = [cv2.imdecode(file, cv2.IMREAD_COLOR) for file in files]
    alike = pictures[1]  # after the curves: five pairs, four of them side by side
    assert alike.shape[1] > 4 * alike.shape[0] and alike.shape == pictures[2].shape
    assert (alike[60, [60, 176]] == 2 * np.array([[first[~same][nearest]], [second[~same][nearest]]])).all()
    assert {name.name for name in (tmp_path / "out").iterdir()} == {"report.html", "results.json", "pairs.png"}
    assert all(found.intervals[p.target][0] <= p.tar <= found.intervals[p.target][1] for p in found.measured())
    before = json.loads((tmp_path / "out" / "results.json").read_text())
    assert pairs.main(words) == 1 and "exists already" in capsys.readouterr().err
    assert pairs.main([*words, "--again"]) == 0 and json.loads((tmp_path / "out" / "results.json").read_text()) == before
    path.with_suffix(".csv").write_text(path.with_suffix(".csv").read_text().replace("\n3,", "\n3,,"))
    assert pairs.main([*words, "--again"]) == 1 and "3: has no person" in capsys.readouterr().err


def test_a_set_of_one_person_has_no_rates_and_a_page(tmp_path: Path, table: tuple[Path, np.ndarray, np.ndarray]):
    csv = table[0].with_suffix(".csv")
    csv.write_text("name,person\n" + "".join(f"{row},one\n" for row in range(90)))
    assert pairs.main([str(table[0]), "--out", str(tmp_path / "out")]) == 0
    found = read_results(tmp_path / "out" / "results.json")["t"]
    assert (found.eer, found.auc, found.num_impostor, found.num_genuine) == (None, None, 0, 90 * 89 // 2)
