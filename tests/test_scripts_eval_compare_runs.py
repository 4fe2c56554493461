import itertools
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from tiny_runs import error_of, one_line

from eval.verification import fuse_views, verify
from scripts.eval import compare_runs


def _run(folder: Path, noise: float, steps: int) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    same = np.arange(200) % 2 == 0
    first = fuse_views(rng.normal(size=(200, 8)), np.zeros((200, 8)))
    second = fuse_views(np.where(same[:, None], first, rng.normal(size=(200, 8))), noise * rng.normal(size=(200, 8)))
    result = verify(first, second, same, xnorm=7.0)
    results = {"lfw": result.as_json()}
    results["lfw"]["intervals_95"] = result.intervals()
    (folder / "results.json").write_text(json.dumps(results))
    tree = {"run": {"name": folder.name, "output": "o"}, "optimizer": {"lr": noise, "momentum": 0.9}}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    lines = [{"step": step, "kind": "train", "loss": 10.0 / step, "lr": 0.1} for step in range(1, steps + 1)]
    lines += [{"step": steps, "kind": "lfw", "accuracy": results["lfw"]["accuracy"]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_stand_beside_each_other_and_the_better_is_marked(tmp_path: Path):
    good, bad = _run(tmp_path / "good", 0.1, 8), _run(tmp_path / "bad", 0.6, 5)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "results.json").write_text((good / "results.json").read_text())
    out = tmp_path / "out"
    out.mkdir()
    for name in ("comparison.md", "comparison.png", "comparison.html"):
        (out / name).symlink_to(good / "config.yaml")
    assert compare_runs.main([str(good), str(bad), str(tmp_path / "report"), "--out", str(out)]) == 0
    lines = [line.split("|") for line in (out / "comparison.md").read_text().splitlines() if line.startswith("|")]
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in lines}
    values = [json.loads((folder / "results.json").read_text())["lfw"] for folder in (good, bad)]
    best, other = (f"{100 * value['accuracy']:.2f}" for value in values)
    assert rows["lfw: accuracy %"] == [f"{best} *", other, f"{best} *"]
    assert rows["optimizer.lr"] == ["0.1", "0.6", "-"] and not {"optimizer.momentum", "run.name"} & set(rows)
    assert rows["lfw: EER %"][0].endswith("*") and not rows["lfw: EER %"][1].endswith("*")
    assert rows["last loss"] == ["1.2500", "2.0000", ""] and rows["optimizer steps"] == ["8", "5", ""]
    assert cv2.imread(str(out / "comparison.png")) is not None and "data:image/png" in (out / "comparison.html").read_text()
    assert yaml.safe_load((good / "config.yaml").read_text())["run"]["name"] == "good"


@pytest.mark.usefixtures("blank")
def test_a_star_needs_intervals_that_part(tmp_path: Path):
    good, near = _run(tmp_path / "good", 0.30, 3), _run(tmp_path / "near", 0.4, 3)
    found = [json.loads((folder / "results.json").read_text())["lfw"] for folder in (good, near)]
    assert found[0]["accuracy"] > found[1]["accuracy"]  # better, but not by enough
    assert compare_runs.main([str(good), str(near), "--out", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "comparison.md").read_text()
    assert "* |" not in table and "A number with * is better than that of each run" in table
    # apart, one of three is marked where it parts from both others; results without intervals mark nothing
    values = [dict(numbers) for numbers in (found[0], found[0], found[0])]
    for value, accuracy, interval in zip(values, (0.9, 0.8, 0.81), ((0.85, 0.95), (0.75, 0.84), (0.76, 0.86)), strict=True):
        value.update(accuracy=accuracy, intervals_95={"accuracy": interval})
    for low, expected in ((0.87, ["90.00 *", "80.00", "81.00"]), (0.85, ["90.00", "80.00", "81.00"])):
        values[0]["intervals_95"] = {"accuracy": (low, 0.95)}
        assert _accuracies(tmp_path, values) == expected
    del values[1]["intervals_95"]
    assert _accuracies(tmp_path, values) == ["90.00", "80.00", "81.00"]


def _accuracies(folder: Path, values: list[dict]) -> list[str]:
    """Compare folders with these results of lfw; return the row of accuracies."""
    paths = [folder / f"r{number}" for number in range(len(values))]
    for path, value in zip(paths, values, strict=True):
        path.mkdir(exist_ok=True)
        (path / "results.json").write_text(json.dumps({"lfw": value}))
    assert compare_runs.main([*map(str, paths), "--out", str(folder / "out")]) == 0
    row = next(line for line in (folder / "out" / "comparison.md").read_text().splitlines() if "accuracy %" in line)
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_the_thinned_curve_lies_on_the_whole_one(tmp_path: Path):
    found = json.loads((_run(tmp_path / "run", 0.6, 2) / "results.json").read_text())["lfw"]
    far, tar = found["roc"]["far"], found["roc"]["tar"]
    assert far == sorted(far) and tar == sorted(tar) and far[-1] == tar[-1] == 1.0
    assert all(any(abs(f - k / 100) < 1e-12 for k in range(101)) for f in far)
    point = next(p for p in found["operating_points"] if p["target"] == "1e-1")
    assert max(t for f, t in zip(far, tar, strict=True) if f <= 0.1) == pytest.approx(point["tar"])


def test_a_folder_without_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "neither metrics.jsonl nor results.json" in error_of(compare_runs.main([str(tmp_path)]), capsys)


NO_RESULTS = (
    "[]", "1", '{"lfw": 3}', '{"lfw": {"accuracy": "high"}}',
    '{"lfw": {"accuracy": 0.9, "intervals_95": {"accuracy": [0.8]}}}', '{"lfw": {"accuracy": 0.9, "intervals_95": 3}}',
    '{"lfw": {"num_genuine": 3}}', '{"lfw": {"tar_at_far": [1]}}', '{"lfw": {"roc": {"far": [0, 1], "tar": [1]}}}',
    '{"lfw": {"eer": 1' + "0" * 400 + "}}", "[" * 100_000, "\xff",
)  # fmt: skip
HUGE = '{"step": 1, "kind": "train", "loss": 1' + "0" * 400 + "}"
NO_METRICS = ("[]", "1", '{"step": [1], "kind": "train"}', HUGE, "[" * 100_000, "\xff")
NONE = [("results.json: is not the results", text) for text in NO_RESULTS] + [("metrics.jsonl", text) for text in NO_METRICS]


@pytest.mark.parametrize(("says", "text"), NONE)
def test_results_or_metrics_that_are_none_are_named_in_one_line(
    tmp_path: Path, says: str, text: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / says.partition(":")[0]).write_bytes(text.encode("latin-1"))
    assert compare_runs.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert one_line(capsys).startswith(f"error: {tmp_path / says}")


@pytest.mark.usefixtures("blank")
def test_the_terminal_shows_a_plain_table_and_the_files_go_to_work_dirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert compare_runs.main([str(_run(tmp_path / "good", 0.1, 3)), str(_run(tmp_path / "bad", 0.6, 3))]) == 0
    said = capsys.readouterr().out
    assert "|" not in said and "lfw: accuracy %" in said and "written: work_dirs/comparison/comparison.html" in said
    assert "What differs" in (page := Path("work_dirs/comparison/comparison.html")).read_text()
    assert compare_runs.main(["good"]) == 0 and "What differs" not in page.read_text()


def _train(step: int, loss: float) -> dict[str, Any]:
    numbers = {"loss": loss, "lr": 0.1, "positive_cosine": step / 100, "grad_norm": 2.0 * step}
    return {"step": step, "kind": "train", **numbers, "images_per_second": 10.0 + step}


def _scored(step: int, name: str, accuracy: float, auc: float) -> dict[str, Any]:
    return {"step": step, "kind": name, "accuracy": accuracy, "auc": auc, "tar@1e-6": None}


def _draw(run: Path, lines: list[dict[str, Any]]) -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare_runs.main([str(run), "--out", str(run)]) == 0
    assert cv2.imread(str(run / "comparison.png")) is not None


def _lines(figure: Any) -> dict[str, dict[str, tuple[list[float], list[float], str]]]:
    """Return title of the panel -> label -> (x, y, line style)."""
    return {
        axis.get_title(): {
            line.get_label(): (list(line.get_xdata()), list(line.get_ydata()), line.get_linestyle()) for line in axis.lines
        }
        for axis in figure.axes
    }


def test_each_number_has_its_panel(tmp_path: Path, figures: list[Any]):
    _draw(tmp_path / "run", [_train(10, 5.0), _scored(10, "lfw", 0.9, 0.95), _train(20, 4.0), _scored(20, "lfw", 0.95, 0.98)])
    panels = {title: next(iter(lines.values()))[:2] for title, lines in _lines(figures[0]).items()}
    assert panels == {
        "loss": ([10, 20], [5.0, 4.0]),
        "learning rate": ([10, 20], [0.1, 0.1]),
        "cosine of an image to its class centre": ([10, 20], [0.1, 0.2]),
        "gradient norm, before clipping": ([10, 20], [20.0, 40.0]),
        "images/s": ([10, 20], [20.0, 30.0]),
        "verification accuracy, %": ([10, 20], [90.0, 95.0]),
    }


@pytest.mark.usefixtures("blank")
def test_what_a_killed_run_wrote_after_its_checkpoint_does_not_count(tmp_path: Path, figures: list[Any]):
    """It resumed from step 20, with another interval of the log: steps 24 and 28 are of the part that was trained again."""
    before = [_train(step, 100.0) for step in (16, 20, 24, 28)] + [_scored(28, "lfw", 0.5, 0.5)]
    after = [_train(step, 1.0) for step in (21, 28, 35)]
    _draw(tmp_path / "run", [*before, *after])
    lines = _lines(figures[0])
    assert next(iter(lines["loss"].values()))[:2] == ([16, 20, 21, 28, 35], [100.0, 100.0, 1.0, 1.0, 1.0])
    assert lines["verification accuracy, %"]["lfw"][0] == []


def test_a_long_log_is_read_into_few_bytes_for_each_number_and_drawn_without_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    path, names = tmp_path / "metrics.jsonl", [f"loss_{place}" for place in range(40)]
    lines = (json.dumps({"step": step, "kind": "train", **dict.fromkeys(names, step / 7)}) for step in range(1, 3001))
    path.write_text("\n".join(lines))
    tracemalloc.start()
    series = compare_runs.read_series(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - path.stat().st_size < 30 * 3000 * len(names)  # dicts, and the lines as a list, took 75
    assert [*series["train"]["loss_39"][0]] == [*range(1, 3001)] and series["train"]["loss_39"][1][-1] == 3000 / 7
    monkeypatch.setattr("matplotlib.legend.time", SimpleNamespace(perf_counter=itertools.count(0, 5).__next__))
    compare_runs.draw([compare_runs.Run("long", {"train": {"loss": series["train"]["loss_0"]}}, {}, {})])
    assert not [*recwarn]
