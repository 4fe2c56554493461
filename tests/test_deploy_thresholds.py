"""Thresholds from the results of a run."""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.results import Threshold, add_threshold_arguments, find_threshold, read_results_of, threshold_of
from eval.report import write_summary
from eval.verification import fuse_views, verify
from utils.checkpoint.format import FORMAT


def _result(pairs: int, shift: float) -> Any:
    """Return the result of a set of random pairs, half of them genuine, as evaluation computes it."""
    rng = np.random.default_rng(pairs)
    same = np.arange(pairs) % 2 == 0
    first = rng.normal(size=(pairs, 8)).astype(np.float32)
    second = np.where(same[:, None], first, 0) * shift + rng.normal(size=(pairs, 8)).astype(np.float32)
    nothing = np.zeros_like(first)
    return verify(fuse_views(first, nothing), fuse_views(second, nothing), same, xnorm=1.0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results.json that evaluation wrote, of a set of 400 and one of 4,000 pairs."""
    folder = tmp_path_factory.mktemp("run")
    write_summary(folder, b"", {"small": _result(400, 3.0), "large": _result(4000, 2.0)})
    return folder / "results.json"


def _options(*words: str, run: Path | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_threshold_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args(words)), run=run or Path("nothing"))


def read_threshold(results: Path, far: str, name: str | None = None) -> Threshold:
    return find_threshold(read_results_of(results, False, name), far, name, results)


def test_the_threshold_is_the_reports_own(results: Path):
    sets = json.loads(results.read_text()).items()
    points = {name: {point["target"]: point for point in one["operating_points"]} for name, one in sets}
    for name in ("small", "large"):
        found = read_threshold(results, "1e-2", name)
        point = points[name]["1e-2"]
        assert found == (point["cosine_threshold"], "1e-2", point["tar"], name)
        assert read_threshold(results, "0.01", name) == found  # another way to write the rate
    strictest = max((points[name]["1e-2"]["cosine_threshold"], name) for name in points)
    assert read_threshold(results, "1e-2")[::3] == strictest
    assert read_threshold(results, "1e-3").set == "large"  # the only one with a thousand impostor pairs


@pytest.mark.parametrize(
    ("far", "name", "says"),
    [
        ("1e-3", "small", r"needs 1,000 impostor pairs, small has 200 at most; thresholds are there for 1e-1, 1e-2$"),
        ("1e-5", None, r"needs 100,000 impostor pairs, small, large has 2,000 at most; .* 1e-1, 1e-2, 1e-3$"),
        ("0.05", None, r"small, large was not measured there; thresholds are there for 1e-1, 1e-2, 1e-3$"),
        ("1e-2", "lage", r"no set 'lage'; it has small, large. Did you mean large\?$"),
    ],
)
def test_a_rate_that_was_not_measured_is_named_with_those_that_were(results: Path, far: str, name: str | None, says: str):
    with pytest.raises(ValueError, match=says):
        read_threshold(results, far, name)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", "[" * 100_000, '{"a": 1}', '{"a": {"operating_points": [{}], "num_impostor": 3}}', "\udcff",
     '{"a": {"operating_points": [{"target": "1e-2", "cosine_threshold": NaN, "tar": 1}], "num_impostor": 3}}',
     '{"a": {"operating_points": [{"target": "1e-2", "cosine_threshold": "x", "tar": 1}], "num_impostor": 3}}',
     '{"a": {"operating_points": [{"target": "1e-2", "cosine_threshold": 1e999, "tar": 1}], "num_impostor": 3}}'],
)  # fmt: skip
def test_another_file_ends_in_one_line(text: str, tmp_path: Path):
    path = tmp_path / "results.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match="; write them anew with face eval RUN --report DIR") as caught:
        read_threshold(path, "1e-2")
    assert "\n" not in str(caught.value)


def test_the_command_line_names_one_source(results: Path, tmp_path: Path):
    assert threshold_of(_options()) is None
    assert threshold_of(_options("--threshold", "0.3")).cosine == 0.3
    assert threshold_of(_options("--far", "1e-2", run=results.parent)) == read_threshold(results, "1e-2")  # the network's run
    assert threshold_of(_options("--far", "1e-2", "--results", str(results), "--set", "small")).set == "small"
    for words, says in (
        (("--threshold", "0.3", "--far", "1e-2"), "--threshold and --far are both given"),
        (("--far", "1e-2"), "--results"),
        (("--set", "small"), "--set is where the threshold at a --far comes from"),
        (("--far", "1e-2", "--results", str(tmp_path / "nothing.json")), "nothing.json: cannot be read"),
    ):
        with pytest.raises(ValueError, match=says):
            threshold_of(_options(*words))
    for words in (("--threshold", "2"), ("--threshold", "nan"), ("--far", "0"), ("--far", "x"), ("--far", "-1")):
        with pytest.raises(SystemExit):
            _options(*words)
    for state in ("best", "untrained"):
        options = _options("--far", "1e-2", run=results.parent)
        setattr(options, state, True)
        with pytest.raises(ValueError, match=f"is of the run's end, not of --{state}"):
            threshold_of(options)


def test_a_run_that_went_on_after_its_results_has_no_threshold(results: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(results, run / "results.json")
    for step, ends in ((20, True), (25, False)):
        config = {"train": {"max_steps": 20 if ends else 40}}
        manifest = {"format": FORMAT, "step": step, "files": {}, "config": config, "run_signature": {}, "score": 0.9}
        checkpoint = run / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        if ends:
            assert threshold_of(_options("--far", "1e-2", run=run)) == read_threshold(results, "1e-2")
        else:
            with pytest.raises(ValueError, match=r"its newest checkpoint is of step 25 of 40; name others with --results"):
                threshold_of(_options("--far", "1e-2", run=run))
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "config": {"train": {"max_steps": 25}}, "score": None}))
    with pytest.raises(ValueError, match=r"is older than its newest checkpoint, which was saved without a score"):
        threshold_of(_options("--far", "1e-2", run=run))


def test_the_threshold_of_the_moving_average_is_its_own(results: Path, tmp_path: Path):
    found = json.loads(results.read_text())
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"lfw": found["small"], "ema/lfw": found["large"]}))
    cosine = {name: read_threshold(results, "1e-2", name).cosine for name in found}
    for average, words, name in ((False, (), "small"), (True, (), "large"), (True, ("--set", "lfw"), "large")):
        options = _options("--far", "1e-2", "--results", str(path), *words)
        options.ema = average
        assert threshold_of(options)[::3] == (cosine[name], "lfw")
    assert threshold_of(_options("--far", "1e-2", "--results", str(path), "--set", "ema/lfw")).cosine == cosine["large"]
    path.write_text(json.dumps({"ema/lfw": found["large"]}))
    with pytest.raises(ValueError, match="results of the moving average alone; add --ema"):
        read_threshold(path, "1e-2")


def test_words_name_set_and_rate(results: Path):
    found = read_threshold(results, "1e-2")
    assert math.isclose(float(found.words.split()[1].rstrip(":")), found.cosine, abs_tol=1e-4)
    assert "FAR 1e-2 on the set" in found.words
