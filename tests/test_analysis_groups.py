"""Error rates of groups against loops over all pairs, numbers computed by hand, and a bootstrap over people; the program."""

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_disk import interrupted
from pictures import jpeg, picture
from tiny_runs import blank_pictures

import analysis.groups
from analysis.all_pairs import Extremes, PairCounts
from analysis.groups import Grouped, Outcome, draw_curves, genuine_cells, impostor_spreads, measure_table
from analysis.intervals import Rate, Spread, differences, make_rate, measures, wilson
from scripts.analysis.groups import main

NAMES = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def pictures_are_blank(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.function is test_every_rate_is_that_of_a_loop_over_all_pairs else blank_pictures():
        yield


def _faces(people: int = 40, each: int = 4, size: int = 24) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return vectors, labels and groups. The third group has noisy pictures; some people have one picture in another group."""
    rng = np.random.default_rng(5)
    labels = rng.permutation(np.repeat(np.arange(people), each))
    groups = labels % 3
    noise = np.where(groups == 2, 0.35, 0.15)[:, None] * rng.normal(size=(len(labels), size))
    vectors = rng.normal(size=(people, size))[labels] / size**0.5 + noise
    groups[rng.random(len(groups)) < 0.1] = 0
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), labels, groups


def _loop(vectors: np.ndarray, labels: np.ndarray, groups: np.ndarray, threshold: float, of: list | None = None) -> np.ndarray:
    """Return (4, 3, 3): false matches, impostor pairs, false non-matches, genuine pairs of groups g <= h, pair by pair."""
    found = np.zeros((4, 3, 3), dtype=int)
    pairs = np.array(of or list(combinations(range(len(labels)), 2)))
    cosines = vectors[pairs].astype(float).prod(1).sum(1)
    assert (abs(cosines - threshold) > 1e-6).all()  # more than float32 rounds by
    cells, same = np.sort(groups[pairs]).T, labels[pairs[:, 0]] == labels[pairs[:, 1]]
    np.add.at(found, (np.where(same, 3, 1), *cells), 1)
    np.add.at(found, (np.where(same, 2, 0), *cells), same != (cosines >= threshold))
    return found


def _write(folder: Path, faces: tuple[np.ndarray, ...], names: list[str] | None = None) -> list[str]:
    """Write a table, and files of groups by picture and by person; return the names of the pictures."""
    vectors, labels, groups = faces
    names = names or [f"p{label}/{row}.jpg" for row, label in enumerate(labels)]
    np.save(folder / "t.npy", vectors)
    rows = [f"{name},0,p{label},1" for name, label in zip(names, labels, strict=True)]
    (folder / "t.csv").write_text("\n".join(["name,face,person,norm", *rows, ""]))
    by_picture = [f"{name},{NAMES[group]},{10 + row % 70}" for row, (name, group) in enumerate(zip(names, groups, strict=True))]
    (folder / "pictures.csv").write_text("\n".join(["name,camera,age", *by_picture, ""]))
    by_person = [f"p{label},{NAMES[label % 3]}" for label in np.unique(labels)]
    (folder / "people.csv").write_text("\n".join(["person,kind", *by_person, ""]))
    return names


def _results(folder: Path, *arguments: str) -> dict:
    assert main([str(folder / "t.npy"), *arguments, "--out", str(folder / "out")]) == 0
    return json.loads((folder / "out" / "results.json").read_text())


def _rate(found: dict, kind: str, one: str, other: str | None = None) -> dict:
    """Return a rate of a group, or of two; {} if it has no pairs."""
    here = (one, other or one, kind)
    return next((row for row in found["rates"] if (row["group"], row["other_group"], row["kind"]) == here), {})


def _agree(found: dict, expected: np.ndarray) -> None:
    for first, second in zip(*np.triu_indices(3), strict=True):
        for kind, place in (("fmr", 0), ("fnmr", 2)):
            errors, pairs = expected[place : place + 2, first, second]
            row = _rate(found, kind, NAMES[first], NAMES[second])
            assert (row.get("errors", 0), row.get("pairs", 0)) == (errors, pairs)
            if row.get("rate") is not None:
                assert row["rate"] == errors / pairs and row["low"] <= row["rate"] <= row["high"]


def test_every_rate_is_that_of_a_loop_over_all_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    faces = _faces()
    _write(tmp_path, faces)
    found = _results(tmp_path, "--groups", str(tmp_path / "pictures.csv"), "--by", "camera", "--far", "1e-2")
    said = capsys.readouterr()
    assert "\x1b" not in said.err and "/ mean" in said.out  # no bar inside another, which moves the cursor in a log
    expected = _loop(*faces, found["threshold"])
    _agree(found, expected)
    assert expected[3, 0, 1] and expected[3, 0, 2]  # people in two groups, who count for neither
    assert found["pooled"]["fmr"] == expected[0].sum() / expected[1].sum() <= 1e-2
    below = _loop(*faces, found["threshold"] - 2**-15)  # a bin lower
    assert below[0].sum() / below[1].sum() > 1e-2
    own = expected.diagonal(axis1=1, axis2=2)
    assert found["pooled"]["fnmr"] == own[2].sum() / own[3].sum()
    assert _rate(found, "fnmr", "c")["low"] > own[2, 1] / own[3, 1]  # the group of noisy pictures was planted
    assert _rate(found, "fmr", "a", "b")["low"] is not None
    for name in _write(tmp_path, faces):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(jpeg(picture(ord(name[1]))))
    words = ("--groups", str(tmp_path / "pictures.csv"), "--by", "camera", "--far", "1e-2", "--again")
    with blank_pictures():
        assert _results(tmp_path, *words, "--pictures", str(tmp_path / "set")) == found
    assert (tmp_path / "out" / "report.html").read_text().count("<img") == 4  # and those who look alike
    np.save(tmp_path / "t.npy", np.eye(64, dtype=np.float32)[faces[1] % 64])  # no error at any threshold between 0 and 1
    _results(tmp_path, *words)
    np.save(tmp_path / "t.npy", faces[0])
    assert main([str(tmp_path / "t.npy"), *words, "--out", str(tmp_path / "out"), "--pictures", "/nowhere"]) == 1
    assert "error: --pictures: there is no /nowhere" in capsys.readouterr().err
    page = (tmp_path / "out" / "report.html").read_text()
    assert all((tmp_path / "out" / f"{name}.png").stat().st_size > 5000 for name in ("rates", "curves", "across"))
    assert "Lookalikes" in page and page.count("<img") == 3 and "too few" in page
    rows = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert rows[0] == "group,other_group,kind,people,pairs,errors,rate,low,high,over_geometric_mean"
    assert len(rows) == 1 + len(found["rates"])


def test_the_names_of_many_groups_stand_below_the_curves(monkeypatch: pytest.MonkeyPatch):
    names, half = [f"a camera of a long name {number}" for number in range(32)], np.full((32, 2), 9)
    nobody = Extremes(*np.zeros((3, 0)))
    counts = PairCounts(np.linspace(-1, 1, 3), half, np.eye(32, dtype=int)[:, :, None] * half, nobody, nobody)
    figures: list[Any] = []
    monkeypatch.setattr("analysis.groups.png_of", figures.append)
    draw_curves(Outcome(names, counts, 0.0, (0.5, 0.5), {}, {}))
    figures[0].get_layout_engine().execute(figures[0])
    (legend,), axes = figures[0].legends, figures[0].axes
    assert [text.get_text() for text in legend.get_texts()] == names and not any(axis.get_legend() for axis in axes)
    box = legend.get_window_extent()
    assert 0 <= box.y0 < box.y1 < min(axis.get_tightbbox().y0 for axis in axes) and 0 <= box.x0 < box.x1 <= figures[0].bbox.x1


def test_a_run_that_ended_early_goes_on_and_never_with_other_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    faces = _faces()
    _write(tmp_path, faces)
    arguments = [str(tmp_path / "t.npy"), "--groups", str(tmp_path / "pictures.csv"), "--out", str(tmp_path / "out"), "--by"]
    assert main([*arguments, "camera", "--far", "1e-9"]) == 1  # found after all pairs were counted
    assert (tmp_path / "out.unfinished").exists()
    assert main([*arguments, "age"]) == 1 and "was begun with another groups" in capsys.readouterr().err
    monkeypatch.setattr("analysis.all_pairs._Counter.count", lambda *_: pytest.fail("counted again"))
    monkeypatch.setattr("analysis.groups._ROWS", 50)
    added = interrupted(monkeypatch, [2])
    main([*arguments, "camera", "--far", "1e-2"])
    found = _results(tmp_path, *arguments[1:3], "--by", "camera", "--far", "1e-2")
    assert [record["matches"][1] for record in added] == [0, 50, 100, 150]  # of 160 pictures
    _agree(found, _loop(*faces, found["threshold"]))
    monkeypatch.undo()
    assert main([*arguments, "camera", "--far", "1e-2"]) == 1 and "results.json exists already" in capsys.readouterr().err
    assert found == _results(tmp_path, *arguments[1:3], "--by", "camera", "--far", "1e-2", "--again")
    assert not (tmp_path / "out.unfinished").exists()


def test_groups_of_people_at_a_given_threshold_and_pictures_without_a_group(tmp_path: Path):
    faces = _faces()
    names = _write(tmp_path, faces)
    vectors, labels, _ = faces
    text = (tmp_path / "people.csv").read_text().replace("p7,b", "p7,")
    (tmp_path / "people.csv").write_text(text)
    found = _results(tmp_path, "--groups", str(tmp_path / "people.csv"), "--by", "kind", "--threshold", "0.3")
    assert 0.3 <= found["threshold"] < 0.3 + 2**-14
    kept = labels != 7
    _agree(found, _loop(vectors[kept], labels[kept], labels[kept] % 3, found["threshold"]))
    page = (tmp_path / "out/report.html").read_text().partition("The most similar pictures")[2]
    line = re.search("<td[^>]*>(0[.][0-9]{4})</td><td[^>]*>([^<]+)</td><td[^>]*>([^<]+)", page)
    cosine, one, other = max(
        (float(vectors[i] @ vectors[j]), names[i], names[j])
        for i, j in combinations(np.flatnonzero(kept), 2)
        if labels[i] != labels[j]
    )
    assert line and (float(line[1]), line[2], line[3]) == (pytest.approx(cosine, abs=1e-4), one, other)


def test_a_report_of_a_list_is_not_replaced_because_a_count_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").touch()
    (tmp_path / "out.unfinished").touch()
    assert main([str(tmp_path / "t.npy"), "--pairs", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "results.json exists already" in capsys.readouterr().err


def test_ages_are_grouped_by_tens_and_unknown_ones_are_no_group(tmp_path: Path):
    _write(tmp_path, _faces())
    lines = (tmp_path / "pictures.csv").read_text().splitlines()
    lines[1], lines[2] = (line.rpartition(",")[0] + "," + age for line, age in zip(lines[1:3], ("NA", ""), strict=True))
    lines[3] += ".0"  # as pandas writes them
    (tmp_path / "pictures.csv").write_text("\n".join(lines))
    found = _results(tmp_path, "--groups", str(tmp_path / "pictures.csv"), "--by", "age", "--far", "1e-2")
    assert sorted({row["group"] for row in found["rates"]}) == [f"{age} to {age + 9}" for age in range(10, 80, 10)]


def test_what_each_person_contributes_is_that_of_a_loop(monkeypatch: pytest.MonkeyPatch):
    vectors, labels, groups = _faces()
    expected = np.zeros((2, 2, 40, 3, 3))  # FMR and FNMR; errors and pairs; person; two groups
    for one, other in combinations(range(len(labels)), 2):
        cell, same = tuple(sorted((groups[one], groups[other]))), labels[one] == labels[other]
        accepted = float(vectors[one].astype(float) @ vectors[other]) >= 0.3
        for person in {labels[one], labels[other]}:
            expected[(int(same), slice(None), person, *cell)] += accepted != same, 1
    for block in (1024, 7):
        monkeypatch.setattr(analysis.groups, "_ROWS", block)
        monkeypatch.setattr(analysis.groups, "_COLUMNS", block + 3)
        spread = impostor_spreads(Grouped(vectors, labels, groups, NAMES), 0.3)
        cells = genuine_cells(Grouped(vectors, labels, groups, NAMES), 0.3)
        for first, second in zip(*np.triu_indices(3), strict=True):
            found = spread(first, second)
            np.testing.assert_array_equal([found.errors, found.pairs], expected[0, :, :, first, second])
            assert np.all(found.weights == 1)
            assert found.people == min(len(np.unique(labels[groups == group])) for group in (first, second))
            here = cells[(cells[:, 0] == first) & (cells[:, 1] == second), 2:]  # by ascending person
            wanted = expected[1, :, :, first, second].T
            np.testing.assert_array_equal(here, wanted[wanted[:, 1] > 0])


def test_a_sample_of_people_gives_the_interval_of_all(monkeypatch: pytest.MonkeyPatch):
    vectors, labels, groups = _faces(900, 2, 16)
    groups[labels < 870] %= 2  # the last group is small, so that all of its people are in the sample
    faces = Grouped(vectors, labels, groups, NAMES)
    whole = impostor_spreads(faces, 0.5)
    monkeypatch.setattr(analysis.groups, "_SAMPLED", 600)
    sampled = impostor_spreads(faces, 0.5)
    for first, second in zip(*np.triu_indices(3), strict=True):
        one, other = whole(first, second), sampled(first, second)
        errors, pairs = (int(numbers.sum()) // 2 for numbers in one[:2])
        exact, found = (make_rate(errors, pairs, 0.1, spread, 1) for spread in (one, other))
        # half of the people or more; their squares vary by about twice their mean, so the width by some percent
        assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=0.2)
        assert (len(one.errors), exact.people) == (900, found.people) and 300 < len(other.errors) < 600


def test_the_interval_has_the_width_of_a_bootstrap_over_people():
    """Some people are mistaken often, so pairs are far from independent."""
    rng = np.random.default_rng(0)
    people, samples = 150, 3000
    weight = rng.gamma(1.0, size=people) * 0.15
    wrong = np.triu(rng.random((people, people)) < np.clip(weight[:, None] * weight * 8, 0, 1), 1)
    wrong = wrong | wrong.T
    total = people * (people - 1) // 2
    errors = int(wrong.sum()) // 2
    rate = make_rate(errors, total, 0.1, Spread(wrong.sum(axis=1), np.full(people, people - 1), people), people // 2)
    drawn = rng.multinomial(people, np.full(people, 1 / people), size=samples).astype(float)
    pairs = (drawn.sum(axis=1) ** 2 - (drawn**2).sum(axis=1)) / 2
    rates = np.einsum("sp,pq,sq->s", drawn, wrong, drawn, optimize=True) / 2 / pairs
    width = rate.high - rate.low
    # the bootstrap's error is 1 / sqrt(2 * samples), 1.3 %; terms of order 1 / people are left out of the derivative
    assert width == pytest.approx(2 * 1.96 * rates.std(), rel=0.1)
    naive = wilson(errors / total, total)
    assert width > 3 * (naive[1] - naive[0])


def test_wilsons_interval_and_a_rate_without_errors():
    assert wilson(0.1, 100) == pytest.approx((0.05523, 0.17437), abs=1e-5)  # Wilson 1927, computed by hand
    none = make_rate(0, 500_000, 1e-3, Spread(np.zeros(100), np.full(100, 10_000), 100), 50)
    assert none.low == 0 and none.high == pytest.approx(1.959964**2 / (50 + 1.959964**2))
    assert none.stated and none.value == 0


def _rates(*values: float) -> list[Rate]:
    return [Rate(round(value * 10_000), 10_000, 100, 100.0, 0, 1) for value in values]


def test_measures_are_those_computed_by_hand():
    one = measures(_rates(0.01, 0.02, 0.04))
    assert one == pytest.approx(
        {"max_over_min": 4, "max_over_geometric_mean": 2, "geometric_mean": 0.02, "max_minus_min": 0.03, "gini": 3 / 7}
    )
    assert measures(_rates(0.02, 0.02))["gini"] == 0
    zero = measures(_rates(0, 0, 0.3))
    assert zero["gini"] == pytest.approx(1) and zero["max_over_min"] is None and zero["max_minus_min"] == pytest.approx(0.3)
    few = Rate(5, 10, 100, 2.0, 0, 1)
    assert measures([few, *_rates(0.01)])["gini"] is None  # a rate that is not stated counts nowhere
    assert measures([few, *_rates(0.01, 0.03)]) == measures(_rates(0.01, 0.03))
    both = differences(_rates(0.01, 0.02, 0.04), _rates(0, 0, 0.3))[2]
    assert both == pytest.approx({"garbe": (3 / 7 + 1) / 2, "fdr": 1 - (0.03 + 0.3) / 2})
    assert differences(_rates(0.01, 0.02), [few, few])[2] == {"garbe": None, "fdr": None}


def test_a_group_that_is_too_small_gets_no_number():
    assert Rate(9, 1000, 50, 9.9, 0, 1).value is None
    assert Rate(10, 1000, 50, 9.9, 0, 1).value == 0.01 and Rate(9, 1000, 50, 10.0, 0, 1).value == 0.009
    assert Rate(100, 1000, 9, 100.0, 0, 1).value is None
    vectors, labels, groups = _faces()
    groups = np.where(np.isin(labels, [2, 5]), 1, 0)
    fmr, fnmr = measure_table(Grouped(vectors, labels, groups, NAMES[:2]), 1e-2, None, 0, None).within()
    assert fmr[1].value is fnmr[1].value is None and fmr[0].value is not None


def _listed(labels: np.ndarray) -> list[tuple[int, int]]:
    """Return all genuine pairs and as many others, in the order of the rows."""
    every = list(combinations(range(len(labels)), 2))
    return [pair for number, pair in enumerate(every) if number % 7 == 0 or labels[pair[0]] == labels[pair[1]]]


def test_a_list_with_columns_of_both_pictures_as_that_of_bfw(tmp_path: Path):
    faces = _faces()
    vectors, labels, groups = faces
    numbers = [int((labels[:row] == label).sum()) for row, label in enumerate(labels)]
    names = [f"p{label}/{n // 2}.{'png' if n % 2 else 'jpg'}" for label, n in zip(labels, numbers, strict=True)]
    # and a second face in each picture, less sure than the first
    _write(tmp_path, (np.concatenate([vectors, vectors[::-1]]), np.tile(labels, 2), np.tile(groups, 2)), names * 2)
    pairs = _listed(labels)
    kinds = [NAMES[group] for group in groups]
    lines = [
        f"1,{names[i]},{names[j]},{int(labels[i] == labels[j])},{labels[i]},{labels[j]},{kinds[i]},{kinds[j]},,,,AF,AM,F,M,A,A"
        for i, j in pairs
    ]
    lines.append(f"1,{names[0]},p99/absent.jpg,0,0,99,a,a,0.8,0.7,0.7,AF,AF,F,F,A,A")
    head = "fold,p1,p2,label,id1,id2,att1,att2,vgg16,resnet50,senet50,a1,a2,g1,g2,e1,e2"  # of version 0.1.5
    (tmp_path / "bfw.csv").write_text("\n".join([head, *lines, ""]))
    found = _results(tmp_path, "--pairs", str(tmp_path / "bfw.csv"), "--by", "att", "--far", "1e-2")
    _agree(found, _loop(*faces, found["threshold"], pairs))
    assert f"1 of {len(lines):,} pairs" in (tmp_path / "out" / "report.html").read_text()


def test_a_folder_of_lists_as_that_of_rfw(tmp_path: Path):
    vectors, labels, _ = faces = _faces()
    numbers = [int((labels[:row] == label).sum()) + 1 for row, label in enumerate(labels)]
    names = [f"{NAMES[label % 3]}/m.{label}/m.{label}_{number:04d}.png" for label, number in zip(labels, numbers, strict=True)]
    _write(tmp_path, faces, names)
    pairs = [(i, j) for i, j in _listed(labels) if labels[i] % 3 == labels[j] % 3]
    for place, name in enumerate(NAMES):
        lines = []
        for i, j in pairs:
            if labels[i] % 3 == place:
                other = [] if labels[i] == labels[j] else [f"m.{labels[j]}"]
                lines.append("\t".join(map(str, [f"m.{labels[i]}", numbers[i], *other, numbers[j]])))
        (tmp_path / "txts" / name).mkdir(parents=True)
        (tmp_path / "txts" / name / f"{name}_pairs.txt").write_text("\n".join(lines) + "\n")
    found = _results(tmp_path, "--pairs", str(tmp_path / "txts"), "--far", "2e-2")
    _agree(found, _loop(vectors, labels, labels % 3, found["threshold"], pairs))
    # a person takes part in many pairs, so the interval is wider than that of independent pairs
    worst = _rate(found, "fnmr", "c")
    naive = wilson(worst["rate"], worst["pairs"])
    assert worst["high"] - worst["low"] > 1.2 * (naive[1] - naive[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--groups pictures.csv", "--groups: add --by"),
        ("--groups pictures.csv --by camra", "has no column 'camra'; it has name, camera, age. Did you mean camera?"),
        ("--groups pictures.csv --by camera --far 1e-9", "--far 1e-09 needs 1,000,000,000 impostor pairs"),
        ("--groups twice.csv --by x", "person 'p1' is in two groups of x"),
        ("--groups many.csv --by x", "x has 65 groups, and may have 64"),
        ("--groups other.csv --by x", "has no x for any person of the table, such as 'p"),
        ("--groups nokey.csv --by x", "needs a column name (of a picture) or person"),
        ("--groups torn.csv --by x", "row 2 has 1 columns"),
        ("--pairs pictures.csv", "--by names the column"),
        ("--pairs pictures.csv --by camera", "has no column 'p1'"),
        ("--pairs label.csv --by x", "row 2 needs a label 0 or 1"),
        ("--pairs absent.csv --by x", "no pair has both pictures in the table"),
        ("--pairs empty", "has no files such as African/African_pairs.txt"),
        ("--pairs wrong", "line 1 must be 'ID N M' or 'ID N OTHER M'"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str):
    _write(tmp_path, _faces(70, 1) if "many.csv" in arguments else _faces(6))
    files = {
        "twice.csv": "person,x\np1,a\np1,b\n",
        "many.csv": "\n".join(["person,x", *(f"p{number},g{number}" for number in range(65))]),
        "other.csv": "person,x\nq,a\n",
        "nokey.csv": "who,x\np1,a\n",
        "torn.csv": "person,x\np1\n",
        "label.csv": "p1,p2,label,x\na,b,maybe,c\n",
        "absent.csv": "p1,p2,label,x\na,b,1,c\n",
        "wrong/x_pairs.txt": "a b c\n",
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = [str(tmp_path / word) if word.endswith((".csv", "empty", "wrong")) else word for word in arguments.split()]
    assert main([str(tmp_path / "t.npy"), *words, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error and not (tmp_path / "out").exists()
