"""Clusters of faces: against average linkage over all pairs, slow counts, planted chains, and through the program."""

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform

import analysis.clustering
from analysis.clustering import agreement, cluster
from data.datasets import open_set
from data.recordio.image_record import RecordSetWriter
from deploy.journal import Journal
from scripts.analysis import cluster as program
from utils.image import to_png


def _faces(people: int, each: int, spread: float, seed: int = 0, dim: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors (n, D) float32 of length 1 and their people, in no order."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(people), each))
    vectors = rng.normal(size=(people, dim))[labels] + spread * rng.normal(size=(len(labels), dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two partitions are the same but for the numbers."""
    return len({*zip(one.tolist(), other.tolist(), strict=True)}) == len({*one.tolist()}) == len({*other.tolist()})


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(analysis.clustering, "_ROWS", 32)
    monkeypatch.setattr(analysis.clustering, "_COLUMNS", 50)


@pytest.mark.parametrize("spread", [0.4, 0.8, 1.2])
@pytest.mark.parametrize("threshold", [0.35, 0.6])
def test_the_partition_is_that_of_average_linkage_over_all_pairs(spread: float, threshold: float):
    vectors, _ = _faces(20, 9, spread)
    found = cluster(vectors, threshold)
    distances = 1 - vectors.astype(np.float64) @ vectors.T
    np.fill_diagonal(distances, 0)
    tree = linkage(squareform(distances, checks=False), "average")
    assert np.abs(tree[:, 2] - (1 - threshold)).min() > 1e-5  # no merge that rounding could decide
    assert _same(found.labels, fcluster(tree, 1 - threshold, "distance"))
    sizes = np.bincount(found.labels)
    assert (np.diff(sizes) <= 0).all()
    for row in range(0, len(vectors), 7):
        mine = (found.labels == found.labels[row]) & (np.arange(len(vectors)) != row)
        cosines = vectors.astype(np.float64) @ vectors[row]
        assert found.own[row] == pytest.approx(cosines[mine].mean() if mine.any() else -1, abs=1e-6)
        near = {int(one) for one in found.labels[(cosines >= threshold) & (found.labels != found.labels[row])]}
        means = [cosines[found.labels == one].mean() for one in near]
        assert found.other[row] == pytest.approx(max(means, default=-1), abs=1e-6)


def test_the_order_of_the_faces_changes_nothing():
    vectors, _ = _faces(15, 8, 1.0)
    vectors[:6] = vectors[6]  # equal vectors are ties
    whole = cluster(vectors, 0.4)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(vectors))
        other = cluster(vectors[order], 0.4)
        for one, shuffled in zip(whole[:3], other[:3], strict=True):
            assert np.array_equal(one[order], shuffled)


def test_a_chain_between_two_people_does_not_merge_them():
    rng = np.random.default_rng(0)
    ends = np.eye(32)[:2]
    chain = [np.cos(turn) * ends[0] + np.sin(turn) * ends[1] for turn in np.linspace(0, np.pi / 2, 9)[1:-1]]
    vectors = np.concatenate([np.repeat(ends, 12, axis=0) + 0.05 * rng.normal(size=(24, 32)), chain])
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    near = vectors @ vectors.T >= 0.7
    assert connected_components(csr_matrix(near))[0] == 1
    found = cluster(vectors, 0.7)
    people = found.labels[:24].reshape(2, 12)
    assert (people == people[:, :1]).all() and people[0, 0] != people[1, 0]
    assert found.sure()[:24].all() and not found.sure()[24:].all()  # the middle of the chain is near to both


def test_agreement_is_that_of_slow_loops():
    rng = np.random.default_rng(0)
    labels, people = rng.integers(0, 9, 60), rng.integers(0, 7, 60)
    labels, people = (np.unique(one, return_inverse=True)[1] for one in (labels, people))
    precision, recall = [], []
    for face in range(60):
        mine, own = labels == labels[face], people == people[face]
        precision.append((mine & own).sum() / mine.sum())
        recall.append((mine & own).sum() / own.sum())
    pairs = [(a, b) for a in range(60) for b in range(a)]
    hits = [(labels[a] == labels[b], people[a] == people[b]) for a, b in pairs]
    both, clustered, same = (sum(f(*hit) for hit in hits) for f in (lambda c, p: c and p, lambda c, p: c, lambda c, p: p))
    found = agreement(labels, people)
    p, r = np.mean(precision), np.mean(recall)
    several = [one for one in set(labels.tolist()) if (labels == one).sum() > 1]
    merging = np.mean([len(set(people[labels == one].tolist())) > 1 for one in several])
    assert found == pytest.approx((p, r, 2 * p * r / (p + r), 2 * both / (clustered + same), merging), abs=1e-12)
    assert agreement(people, people)[:4] == (1, 1, 1, 1) and agreement(people, people).merging == 0


def _write(path: Path, vectors: np.ndarray, people: list[str]) -> None:
    np.save(path, vectors)
    rows = "".join(f"{row},{person}\n" for row, person in enumerate(people))
    path.with_suffix(".csv").write_text(f"name,person\n{rows}")


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Return a folder with the tables of unlabelled and of other people, and the set of the first; and its people."""
    vectors, people = _faces(12, 8, 0.5, dim=128)
    _write(tmp_path / "new.npy", vectors, [""] * len(people))
    others, labels = _faces(30, 6, 0.5, seed=1, dim=128)
    _write(tmp_path / "known.npy", others, [f"p{label}" for label in labels])
    with RecordSetWriter(tmp_path / "new") as writer:
        for row in range(len(people)):
            writer.add(0, to_png(np.full((112, 112, 3), 2 * row, np.uint8)))
    return tmp_path, people


def test_the_program_labels_a_set_at_a_measured_far(place: tuple[Path, np.ndarray], capsys: pytest.CaptureFixture[str]):
    folder, people = place
    words = [str(folder / "new.npy"), "--calibrate", str(folder / "known.npy"), "--far", "1e-3", "--out", str(folder / "p.csv")]
    more = ["--set", str(folder / "new"), "--to-rec", str(folder / "labelled")]
    assert program.main([*words, *more]) == 0
    said = capsys.readouterr().out
    others, labels = _faces(30, 6, 0.5, seed=1, dim=128)
    cosines = np.sort((others.astype(np.float64) @ others.T)[labels[:, None] < labels])
    threshold = float(said.partition("cosine ")[2].partition(",")[0])
    allowed = int(1e-3 * len(cosines))
    assert cosines[-allowed - 1] - 1e-4 <= threshold <= cosines[-allowed] + 1e-4
    with open(folder / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = np.array([int(row["cluster"]) for row in rows])
    assert [row["name"] for row in rows] == [str(row) for row in range(len(people))]
    assert _same(found, people)
    sure = np.array([row["sure"] == "1" for row in rows])
    made = open_set(folder / "labelled")
    assert made.num_classes == 12 and made.num_images == sure.sum()
    pixels = [int(made.pixels_and_label(index)[0][0, 0, 0]) // 2 for index in range(made.num_images)]
    assert sorted(pixels) == np.flatnonzero(sure).tolist()
    assert _same(np.asarray(made.labels()), people[pixels])
    assert not (folder / "p.csv.unfinished").exists()
    assert program.main(words) == 1 and "exists already" in capsys.readouterr().err
    before = (folder / "p.csv").read_bytes()
    assert program.main([*words, "--again"]) == 0 and (folder / "p.csv").read_bytes() == before
    _write(folder / "new.npy", np.load(folder / "new.npy"), [f"p{label}" for label in people])
    capsys.readouterr()
    assert program.main([*words, "--again"]) == 0 and "bcubed f          100.00 %" in capsys.readouterr().out


def test_a_run_that_was_killed_goes_on(place: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch):
    folder, _ = place
    words = [str(folder / "new.npy"), "--threshold", "0.5", "--out"]
    assert program.main([*words, str(folder / "whole.csv")]) == 0
    original, added = Journal.add, []

    def add(journal: Journal, record: dict, data: bytes) -> None:
        original(journal, record, data)
        added.append(record["begin"])
        if len(added) == 2:
            raise ValueError("stopped")

    monkeypatch.setattr(Journal, "add", add)
    assert program.main([*words, str(folder / "p.csv")]) == 1
    assert program.main([*words, str(folder / "p.csv")]) == 0 and added == [0, 32, 64]
    assert (folder / "p.csv").read_bytes() == (folder / "whole.csv").read_bytes()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--far", "1e-3"], "comes from --calibrate TABLE with --far FAR"),
        (["--threshold", "0.5", "--calibrate", "known.npy", "--far", "1e-3"], "give one of the two"),
        (["--calibrate", "known.npy", "--far", "2"], "--far must be a rate between 0 and 1"),
        (["--calibrate", "known.npy", "--far", "1e-9"], "needs 1,000,000,000 impostor pairs, --calibrate has"),
        (["--threshold", "7"], "--threshold must be a cosine"),
        (["--threshold", "0.5", "--set", "new"], "--set and --to-rec belong together"),
        (["--threshold", "0.99999", "--set", "new", "--to-rec", "x"], "no cluster has 2 sure faces"),
    ],
)
def test_wrong_words_are_one_line(
    place: tuple[Path, np.ndarray],
    words: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(place[0])
    assert program.main(["new.npy", "--out", "p.csv", *words]) == 1
    assert reason in capsys.readouterr().err
