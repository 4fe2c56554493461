"""Clusters of faces: against average linkage over all pairs, slow counts, planted chains, and through the program."""

import csv
import heapq
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from faulty_disk import interrupted
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform

import analysis.clustering
from analysis.clustering import NEIGHBOURS, POWER, SIZES, Clusters, agreement, calibrate, cluster, expand, thresholds_at
from data.datasets import open_set
from data.recordio.image_record import RecordSetWriter
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


@pytest.fixture(params=["fp32", "bf16"])
def rough(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Rows are left out by products in fp32, and as in a large table on a processor that is fast in bf16."""
    monkeypatch.setattr(analysis.clustering, "_MANY", 0)
    monkeypatch.setattr(analysis.clustering, "is_fast_in_bf16", lambda device: request.param == "bf16")


def test_few_pairs_wait_or_are_put_into_order_at_once(monkeypatch: pytest.MonkeyPatch):
    lengths, push = [], heapq.heappush
    monkeypatch.setattr(heapq, "heappush", lambda heap, entry: lengths.append(push(heap, entry) or len(heap)))
    ordered, sort = [], np.lexsort
    monkeypatch.setattr(np, "lexsort", lambda keys: ordered.append(len(keys[0])) or sort(keys))
    cluster(_faces(2, 40, 0.2)[0], np.array([[0.5]]))
    assert 0 < max(lengths) <= 80 and max(ordered) < 400  # 80 faces have 1,560 pairs


@pytest.mark.usefixtures("rough")
def test_too_many_pairs_are_foreseen(monkeypatch: pytest.MonkeyPatch):
    vectors = np.concatenate([_faces(20, 60, 0.2)[0], _faces(1200, 1, 0.2)[0]])  # the first have nearly all of 35,400 pairs
    for name, value in {"_ROWS": 128, "_MOST_PAIRS": 40_000}.items():
        monkeypatch.setattr(analysis.clustering, name, value)
    rows: list[int] = []
    assert len(np.unique(cluster(vectors, np.array([[0.7]]), advance=rows.append).labels)) > 20 and sum(rows) == len(vectors)
    monkeypatch.setattr(analysis.clustering, "_MOST_PAIRS", 9_000)
    rows.clear()
    with pytest.raises(ValueError, match=r"more than 9,000 pairs of faces are above the cosine 0\.7000; give"):
        cluster(vectors, np.array([[0.7]]), advance=rows.append)
    assert sum(rows) == 0
    alone = _faces(3000, 1, 0.2)[0]
    alone[np.random.default_rng(0).permutation(3000)[120:196]] = alone[0]  # 8 of 128 faces have 76 others, by chance
    monkeypatch.setattr(analysis.clustering, "_MOST_PAIRS", 3_000)
    assert len(analysis.clustering._similar(alone, 0.99, None, int)[0]) == 77 * 76 // 2


def test_no_rounding_to_bf16_leaves_out_a_row():
    """Where the numbers' products are positive all are rounded down, where they are negative in magnitude up, by 2^-8 each."""
    low, high = ((1 + 2**-8 + side * 2**-20) / 8 for side in (-1, 1))
    ends = (1 - 47 * low**2 - 16 * high**2) ** 0.5
    one = torch.tensor([low] * 47 + [high] * 16 + [ends])
    table = torch.stack([one, one * torch.tensor([1.0] * 47 + [-1.0] * 16 + [1.0])])
    cosine = float(table[0].double() @ table[1].double())
    assert cosine - float((table.bfloat16() @ table.bfloat16().T)[0, 1]) > 1.9 * 2**-8
    rows, cosines = analysis.clustering._reaching(table, table.bfloat16(), 0, 1, torch.full((1,), cosine - 1e-6))
    assert rows.tolist() == [0] and cosines.tolist() == [[pytest.approx(cosine, abs=1e-6)]]


@pytest.mark.usefixtures("rough")
@pytest.mark.parametrize("spread", [0.4, 0.8, 1.2])
@pytest.mark.parametrize("threshold", [0.35, 0.6])
def test_the_partition_is_that_of_average_linkage_over_all_pairs(spread: float, threshold: float):
    vectors, _ = _faces(20, 9, spread)
    found = cluster(vectors, np.array([[threshold]]))
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
    thresholds = np.array([[0.45, 0.4], [0.4, 0.35]])
    whole = cluster(vectors, thresholds)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(vectors))
        for one, shuffled in zip(whole, cluster(vectors[order], thresholds), strict=True):
            assert np.array_equal(one[order], shuffled)
        assert np.array_equal(expand(vectors, 5)[order], expand(vectors[order], 5))
    known, people = _faces(40, 9, 1.0, seed=3)
    order = np.random.default_rng(0).permutation(len(known))
    assert np.array_equal(thresholds_at(known, people, "1e-2"), thresholds_at(known[order], people[order], "1e-2"))


def _expanded(vectors: np.ndarray, count: int) -> np.ndarray:
    """Return what `expand` does by all cosines in float64."""
    wide = vectors.astype(np.float64)
    cosines = wide @ wide.T
    np.fill_diagonal(cosines, -np.inf)  # no face is its own neighbour
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :count]
    weights = np.take_along_axis(cosines, nearest, 1).clip(min=0) ** POWER
    rows = wide + (weights[:, :, None] * wide[nearest]).sum(1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.usefixtures("rough")
@pytest.mark.parametrize(("people", "each", "count"), [(20, 9, 5), (20, 9, 1), (1, 4, 5), (3, 1, 5)])
def test_faces_are_averaged_with_their_nearest_others(people: int, each: int, count: int):
    vectors, _ = _faces(people, each, 0.9)
    # float32 rounds cosines of 24 terms and their powers, and sums of six vectors, by less than 64 units
    assert np.abs(expand(vectors, count) - _expanded(vectors, count)).max() < 64 * np.finfo(np.float32).eps


@pytest.mark.parametrize(("each", "chosen"), [(2, (0, 1)), (12, (2, 5, 10))])
def test_as_many_neighbours_are_averaged_as_serve_known_people_best(each: int, chosen: tuple[int, ...]):
    generator = np.random.default_rng(4)
    # half of what differs between pictures of a person is a path along which neighbours lie, as pose or age
    middles, paths = generator.normal(size=(2, 24, 1, 32)) / np.sqrt(32)
    noise = generator.normal(size=(24, each, 32)) / np.sqrt(32)
    faces = (middles + np.linspace(-1.2, 1.2, each)[:, None] * paths + 0.5 * noise).reshape(-1, 32)
    vectors = (faces / np.linalg.norm(faces, axis=1, keepdims=True)).astype(np.float32)
    people = np.repeat(np.arange(24), each)
    quality = {}
    for count in NEIGHBOURS:
        averaged = _expanded(vectors, count).astype(np.float32)
        quality[count] = agreement(cluster(averaged, thresholds_at(averaged, people, "1e-3")).labels, people).bcubed_f
    count, thresholds = calibrate(vectors, people, "1e-3")
    assert count in chosen and quality[count] > max(quality.values()) - 0.01
    averaged = expand(vectors, count) if count else vectors
    assert np.array_equal(thresholds, thresholds_at(averaged, people, "1e-3"))


def _class(size: int) -> int:
    return 0 if size == 1 else 1 if size < 4 else 2


@pytest.mark.parametrize("spread", [0.6, 0.9, 1.2])
def test_the_partition_is_that_of_a_slow_merge_with_a_threshold_for_each_size(spread: float):
    vectors, _ = _faces(12, 7, spread)
    thresholds = np.array([[0.6, 0.55, 0.36], [0.55, 0.45, 0.42], [0.36, 0.42, 0.36]])
    cosines = vectors.astype(np.float64) @ vectors.T
    clusters = {row: [row] for row in range(len(vectors))}

    def excess(a: int, b: int) -> float:
        return cosines[np.ix_(clusters[a], clusters[b])].mean() - thresholds[_class(len(clusters[a])), _class(len(clusters[b]))]

    excesses = {pair: excess(*pair) for pair in combinations(clusters, 2)}
    nearest = []  # to see that rounding decides nothing
    while True:
        a, b = max(excesses, key=excesses.__getitem__)
        nearest.append(abs(excesses[a, b]))
        if excesses[a, b] < 0:
            break
        clusters[a] += clusters.pop(b)
        excesses = {pair: value for pair, value in excesses.items() if not {a, b} & {*pair}}
        excesses |= {(a, other): excess(a, other) for other in clusters if other != a}
    assert min(nearest) > 1e-5 and max(map(len, clusters.values())) >= 4
    labels = np.empty(len(vectors), dtype=np.int64)
    for number, rows in clusters.items():
        labels[rows] = number
    found = cluster(vectors, thresholds)
    assert _same(found.labels, labels)
    assert not _same(cluster(vectors, thresholds[:1, :1]).labels, labels)
    for row, mine in enumerate(labels):
        rest = np.flatnonzero((labels == mine) & (np.arange(len(labels)) != row))
        sure = len(rest) > 0 and cosines[row, rest].mean() >= thresholds[0, _class(len(rest))]
        others = [rows for number, rows in clusters.items() if number != mine]
        sure &= all(cosines[row, rows].mean() < thresholds[0, _class(len(rows))] for rows in others)
        assert found.sure[row] == sure
    assert 0 < found.sure.sum() < len(labels)


def test_a_face_is_compared_with_the_others_of_its_cluster_at_their_size():
    vectors = np.array([[1, 0]] * 3 + [[0.5, 0.75**0.5]], dtype=np.float32)
    thresholds = np.array([[0.45, 0.4, 0.6], [0.4, 0.4, 0.6], [0.6, 0.6, 0.6]])
    found = cluster(vectors, thresholds)
    assert found.labels.tolist() == [0] * 4 and found.sure.all()  # three others are of the second class, four of the third


def test_thresholds_accept_the_share_of_pairs_of_groups_of_two_people():
    vectors, people = _faces(30, 9, 0.9)
    found = thresholds_at(vectors, people, "1e-2")
    assert found.shape == (3, 3) and (np.diff(np.diag(found)) < 0).all() and np.array_equal(found, found.T)
    order = np.argsort([analysis.clustering.row_keys(row[None])[0] for row in vectors], kind="stable")
    of_people = [[k for k in order if people[k] == person] for person in range(30)]
    groups = [
        (np.repeat(np.arange(30), 9 // size), np.array(of_people)[:, : 9 // size * size].reshape(-1, size)) for size in SIZES
    ]
    wide = vectors.astype(np.float64) @ vectors.T
    for low in range(3):
        for high in range(low, 3):
            (one, of_one), (other, of_other) = groups[low], groups[high]
            means = wide[of_one].mean(1)[:, of_other].mean(2)[one[:, None] < other if low == high else one[:, None] != other]
            allowed = int(1e-2 * len(means))
            accepted = (means[:, None] >= found[low, high] + np.array([1e-6, -4e-5])).sum(axis=0)
            assert accepted[0] <= allowed < accepted[1], (low, high)  # a bin is 3e-5 wide


def test_the_comparison_of_groups_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch):
    bar = mock.MagicMock()
    monkeypatch.setattr(analysis.clustering, "progress", bar)
    thresholds_at(*_faces(30, 2, 0.9), "1e-2")  # 60 faces, 30 groups of two
    assert bar.call_args.args[1] == 90 * 89 // 2 and bar().__enter__().update.called


def test_sizes_whose_rate_cannot_be_measured_have_the_threshold_of_smaller_ones():
    vectors, people = _faces(30, 3, 0.9)
    whole = thresholds_at(vectors, people, "1e-2")
    assert whole.shape == (2, 2)  # nobody has four faces
    single = thresholds_at(vectors, people, "1e-3")
    assert single.shape == (1, 1)  # 435 pairs of groups of two


def test_a_chain_between_two_people_does_not_merge_them():
    rng = np.random.default_rng(0)
    ends = np.eye(32)[:2]
    chain = [np.cos(turn) * ends[0] + np.sin(turn) * ends[1] for turn in np.linspace(0, np.pi / 2, 9)[1:-1]]
    vectors = np.concatenate([np.repeat(ends, 12, axis=0) + 0.05 * rng.normal(size=(24, 32)), chain])
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    near = vectors @ vectors.T >= 0.7
    assert connected_components(csr_matrix(near))[0] == 1
    found = cluster(vectors, np.array([[0.7]]))
    people = found.labels[:24].reshape(2, 12)
    assert (people == people[:, :1]).all() and people[0, 0] != people[1, 0]
    assert found.sure[:24].all() and not found.sure[24:].all()  # the middle of the chain is near to both


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


def _write(path: Path, vectors: np.ndarray, people: list[str], names: Sequence[object] | None = None) -> None:
    np.save(path, vectors)
    rows = "".join(f"{name},{person}\n" for name, person in zip(names or range(len(people)), people, strict=True))
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
    said, shown = capsys.readouterr()
    assert "joining: " in shown and "\x1b" not in shown
    others, labels = _faces(30, 6, 0.5, seed=1, dim=128)
    others = _expanded(others, int(said.partition("averaged with ")[2].partition(" ")[0]))
    cosines = np.sort((others @ others.T)[labels[:, None] < labels])
    threshold = float(said.partition("two clusters ")[2].partition(" ")[0])
    allowed = int(1e-3 * len(cosines))
    assert cosines[-allowed - 1] - 1e-4 <= threshold <= cosines[-allowed] + 1e-4
    with open(folder / "p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = np.array([int(row["cluster"]) for row in rows])
    assert [row["name"] for row in rows] == [str(row) for row in range(len(people))]
    assert _same(found, people)
    sure = np.array([row["sure"] == "1" for row in rows])
    page = (folder / "p.csv.html").read_text()
    assert page.count("data:image/png") == 1 and "12 with several faces, the largest 8" in page
    made = open_set(folder / "labelled")
    assert made.num_classes == 12 and made.num_images == sure.sum()
    pixels = [int(made.pixels_and_label(index)[0][0, 0, 0]) // 2 for index in range(made.num_images)]
    assert sorted(pixels) == np.flatnonzero(sure).tolist()
    assert _same(np.asarray(made.labels()), people[pixels])
    assert not (folder / "p.csv.unfinished").exists()
    assert program.main(words) == 1 and "exists already" in capsys.readouterr().err
    before = (folder / "p.csv").read_bytes()
    _write(folder / "new.npy", np.load(folder / "new.npy"), [f"p{label}" for label in people])
    assert program.main([*words, "--again"]) == 0 and (folder / "p.csv").read_bytes() == before
    said = capsys.readouterr()
    assert "bcubed f          100.00 %" in said.out and "warning" not in said.err
    # faces that are all alike, of which the other table says nothing
    _write(folder / "new.npy", _faces(1, 96, 0.1, dim=128)[0], [""] * 96)
    assert program.main([*words, "--again"]) == 0
    assert "warning: the largest cluster has 96 faces, the person of most faces in " in capsys.readouterr().err


def test_a_folder_of_loose_pictures_becomes_a_set(place: tuple[Path, np.ndarray]):
    folder, people = place
    (folder / "loose" / "below").mkdir(parents=True)
    names = [f"{'below/' * (row % 2)}{row}.png" for row in range(len(people))]
    for row, name in enumerate(names):
        (folder / "loose" / name).write_bytes(to_png(np.full((112, 112, 3), 2 * row, np.uint8)))
    _write(folder / "new.npy", np.load(folder / "new.npy"), [""] * len(people), names)
    words = [str(folder / "new.npy"), "--threshold", "0.3", "--out", str(folder / "p.csv"), "--set", str(folder / "loose")]
    assert program.main([*words, "--to-rec", str(folder / "labelled")]) == 0
    made = open_set(folder / "labelled")
    rows = [int(made.pixels_and_label(index)[0][0, 0, 0]) // 2 for index in range(made.num_images)]
    assert len(rows) > 90 and _same(np.asarray(made.labels()), people[rows])


def test_the_page_shows_the_least_alike_of_a_cluster_and_the_least_sure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with RecordSetWriter(tmp_path / "set") as writer:
        for index in range(7):
            writer.add(0, to_png(np.full((96, 96, 3), index, np.uint8)) if index != 6 else b"damaged")
    labels, own = np.array([1, 0, 0, 0, 1, 2, 0]), np.array([0.5, 0.8, 0.9, 0.6, 0.5, -1, 0.7])
    other = np.array([-1, 0.1, -1, 0.5, 0.49, 0.9, -1])
    found = Clusters(labels, own, other, np.array([True, True, True, False, False, False, True]))
    sheets: list = []
    monkeypatch.setattr(analysis.clustering, "captioned_sheet", lambda rows: sheets.append(rows) or b"")
    analysis.clustering.write_page(tmp_path / "p.html", "t", found, open_set(tmp_path / "set"), np.arange(7), [])
    indices = [[[int(texts[0]) for _, texts in row] for row in rows] for rows in sheets]
    assert indices == [[[2, 3, 6, 1], [0, 4], [5]], [[4, 0], [3, 2, 1, 6]]]
    for picture, texts in (cell for rows in sheets for row in rows for cell in row):
        assert (picture is None) == (texts[0] == "6") and (picture is None or picture[0, 0, 0] == int(texts[0]))


def test_a_run_that_was_killed_goes_on(place: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch):
    folder, people = place
    monkeypatch.setattr(analysis.clustering, "NEIGHBOURS", (5,))
    words = [str(folder / "new.npy"), "--calibrate", str(folder / "known.npy"), "--far", "1e-2", "--out"]
    assert program.main([*words, str(folder / "whole.csv")]) == 0
    with open(folder / "whole.csv", newline="") as file:
        kept = np.array([float(row["cosine"]) for row in csv.DictReader(file)])
    averaged = _expanded(np.load(folder / "new.npy"), 5)
    others = (people == people[:, None]) & ~np.eye(len(people), dtype=bool)  # the planted people are the clusters
    assert kept == pytest.approx((averaged @ averaged.T * others).sum(axis=1) / 7, abs=1e-4)
    records = interrupted(monkeypatch, (2, 7, 9, 11))
    assert [program.main([*words, str(folder / "p.csv")]) for _ in range(4)] == [130, 130, 130, 130]
    with open(folder / "p.csv.unfinished", "ab") as file:
        file.write(b"a line of a damaged disk\n")
    assert program.main([*words, str(folder / "p.csv")]) == 0
    known = [("neighbours of known people", begin) for begin in range(0, 180, 32)]
    added = [(record["stage"], record["begin"]) for record in records]
    assert added == [*known, ("calibration", 0), *((name, row) for name in ("neighbours", "pairs") for row in (0, 32, 64))]
    assert (folder / "p.csv").read_bytes() == (folder / "whole.csv").read_bytes()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--far 1e-3", "comes from --calibrate TABLE with --far FAR"),
        ("--threshold 0.5 --calibrate known.npy --far 1e-3", "give one of the two"),
        ("--calibrate known.npy --far 1e-9", "needs 1,000,000,000 pairs of two people, and pairs of one; there are 15,660"),
        ("--threshold 0.1", "pairs of faces are above the cosine"),
        ("--threshold 0.5 --to-rec x", "--to-rec needs --set"),
        ("--threshold 0.99999 --set new --to-rec x", "no cluster has 2 sure faces"),
        ("--threshold 0.5 --min-images 3", "--min-images is of the clusters that --to-rec writes"),
        ("--threshold 0.5 --set new --to-rec new", "--to-rec: new holds a train.rec"),
        ("--threshold 0.5 --set new --out q.csv", "q.csv.html exists already"),
        ("--calibrate narrow.npy --far 1e-2", "--calibrate: must come from the network of TABLE"),
        ("--threshold 0.5 --set new --to-rec x --again", "a picture of new.npy has several faces"),
    ],
)
def test_wrong_words_are_one_line(
    place: tuple[Path, np.ndarray], words: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(place[0])
    monkeypatch.setattr(analysis.clustering, "_MOST_PAIRS", 500)
    Path("q.csv.html").touch()
    _write(Path("narrow.npy"), np.eye(4, dtype=np.float32), ["a", "a", "b", "b"])
    if "several" in reason:
        Path("new.csv").write_text(Path("new.csv").read_text().replace("\n7,", "\n6,"))
    assert program.main(["new.npy", "--out", "p.csv", *words.split()]) == 1
    assert reason in capsys.readouterr().err
    assert not Path("x").exists() and Path("p.csv").exists() == Path("p.csv.unfinished").exists() == ("sure faces" in reason)
    if "sure faces" in reason:  # what is done is kept, so that other words of the new set need no --again
        assert program.main(["new.npy", "--out", "p.csv", *words.split()[:4]]) == 0
        assert not Path("p.csv.unfinished").exists()


@pytest.mark.parametrize(("word", "rule"), [("--far=2", "rate"), ("--threshold=7", "cosine"), ("--threshold=-1", "cosine")])
def test_a_far_and_a_threshold_have_bounds(word: str, rule: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        program.main(["new.npy", "--out", "p.csv", word])
    assert f"{word.partition('=')[0]}: must be a {rule}" in capsys.readouterr().err
