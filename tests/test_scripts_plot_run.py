"""The curves of a run, by what is in the figure that the program saves."""

import json
from pathlib import Path
from typing import Any

import cv2
import pytest
from matplotlib.figure import Figure

from scripts import plot_run


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures that are saved; they are still written."""
    found, save = [], Figure.savefig

    def spy(figure: Figure, *arguments: Any, **options: Any) -> None:
        found.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", spy)
    return found


def _train(step: int, loss: float) -> dict[str, Any]:
    numbers = {
        "loss": loss,
        "lr": 0.1,
        "positive_cosine": step / 100,
        "grad_norm": 2.0 * step,
        "images_per_second": 10.0 + step,
    }
    return {"step": step, "kind": "train", **numbers}


def _scored(step: int, name: str, accuracy: float, auc: float) -> dict[str, Any]:
    return {"step": step, "kind": name, "accuracy": accuracy, "auc": auc, "tar@1e-6": None}


def _draw(run: Path, lines: list[dict[str, Any]]) -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot_run.main([str(run)]) == 0
    assert cv2.imread(str(run / "training.png")) is not None


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


def test_what_a_killed_run_wrote_after_its_checkpoint_does_not_count(tmp_path: Path, figures: list[Any]):
    """It resumed from step 20, with another interval of the log: steps 24 and 28 are of the part that was trained again."""
    before = [_train(step, 100.0) for step in (16, 20, 24, 28)] + [_scored(28, "lfw", 0.5, 0.5)]
    after = [_train(step, 1.0) for step in (21, 28, 35)]
    _draw(tmp_path / "run", [*before, *after])
    lines = _lines(figures[0])
    assert next(iter(lines["loss"].values()))[:2] == ([16, 20, 21, 28, 35], [100.0, 100.0, 1.0, 1.0, 1.0])
    assert lines["verification accuracy, %"]["lfw"][0] == []


def test_auc_is_drawn_where_accuracy_is_at_chance_and_nowhere_else(tmp_path: Path, figures: list[Any]):
    _draw(tmp_path / "run", [_scored(step, *row) for step in (1, 2) for row in (("flat", 0.5, 0.99), ("fine", 0.9, 0.97))])
    panel = _lines(figures[0])["verification accuracy, % (dashed: 100 AUC)"]
    assert set(panel) == {"flat", "flat: 100 AUC", "fine"}
    assert panel["flat: 100 AUC"] == ([1, 2], [99.0, 99.0], "--")
    _draw(tmp_path / "other", [_scored(1, "skilless", 0.5, 0.52)])
    assert set(_lines(figures[1])["verification accuracy, %"]) == {"skilless"}
