"""python -m eval as a user meets it: what it says, what it refuses, its page and its pictures."""

import html
import json
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from pictures import jpeg, picture
from saving import save_now
from tiny_networks import MEAN_COLOUR, TIMES_MATRIX, write_onnx
from tiny_runs import error_of, one_line, read_metrics, small_run, write_dataset

import train
from backbones import build_backbone
from eval.__main__ import main
from eval.pair_sets.bin_file import read_bin, write_bin
from scripts.eval import compare_runs

CPU = ["--device", "cpu", "--threads", "1"]


def _write_set(path: Path, num_pairs: int = 40, right: bool = True, seed: int = 0) -> Path:
    """Write pairs of the same picture (genuine) or of two; with right=False the labels have nothing to do with them."""
    twins = [bool(pair % 2) for pair in range(num_pairs)]
    rng = np.random.default_rng(seed)
    images = [jpeg(picture(seed + 2 * pair + (side and not twins[pair]))) for pair in range(num_pairs) for side in (0, 1)]
    path.parent.mkdir(exist_ok=True)
    write_bin(path, images, twins if right else rng.permutation(twins).tolist())
    return path


def _network(path: Path, bias: float = 0.0) -> tuple[str, np.ndarray]:
    """Write an ONNX network, matrix (4, 3) x mean colour + bias; return its path and the matrix. A large bias is a collapse."""
    matrix = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    return write_onnx(path, [*MEAN_COLOUR, TIMES_MATRIX], 4, matrix=matrix, bias=np.full(4, bias, np.float32)), matrix


def _run_folder(folder: Path, scores: dict[int, float | None], targets: list[str], metric: str = "accuracy") -> Path:
    torch.manual_seed(0)
    weights = build_backbone("shallow", 16, 0.125).state_dict()
    config = {
        "backbone": {"name": "shallow", "embedding_size": 16, "width": 0.125},
        "eval": {"targets": targets, "path": "", "metric": metric},
        "data": {"path": str(folder)},
    }
    for step, score in scores.items():
        known = {"config": config, "score": score}
        save_now(folder, step, weights, {"centres": torch.ones(2, 16)}, (0, 2), {}, known)
    return folder


# ---- what it says


def test_an_accuracy_at_chance_beside_a_good_auc_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = _write_set(tmp_path / "twins.bin")
    network, matrix = _network(tmp_path / "collapsed.onnx", bias=30.0)
    arguments = ["--targets", str(path), *CPU, "--report", str(tmp_path / "out")]
    assert main([network, *arguments]) == 0
    pairs = read_bin(path)
    colours = np.array([pairs.decode(index).mean((0, 1)) for index in range(len(pairs.images))])
    rows = ((colours - 127.5) / 127.5) @ matrix.T.astype(float) + 30.0
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    distances = np.square(rows[pairs.first] - rows[pairs.second]).sum(1)
    assert distances.max() < 0.01  # the premise: under the first threshold that accepts anything
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("twins: accuracy")]
    assert len(lines) == 1 and lines[0].startswith("twins: accuracy is 50.00 % although AUC is 1.0000: all squared distances")
    low, high = map(float, re.search(r"between ([\d.e-]+) and ([\d.e-]+) ", lines[0]).groups())
    assert high == pytest.approx(distances.max(), rel=0.1) and low < 1e-6
    assert "collapsed" in lines[0] and "train longer" in lines[0] and lines[0].endswith("accuracy is 100.00 %")
    assert lines[0] in (tmp_path / "out" / "results.md").read_text()
    assert lines[0] in html.unescape((tmp_path / "out" / "report.html").read_text())
    # the same network without the collapse has nothing to explain
    assert main([_network(tmp_path / "sound.onnx")[0], *arguments]) == 0
    assert "although" not in capsys.readouterr().out + (tmp_path / "out" / "results.md").read_text()


def test_labels_the_wrong_way_round_are_suspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pairs = read_bin(_write_set(tmp_path / "twins.bin"))
    images = [pairs.images[index] for pair in zip(pairs.first, pairs.second, strict=True) for index in pair]
    write_bin(tmp_path / "turned.bin", images, (~pairs.same).tolist())
    assert main([_network(tmp_path / "net.onnx")[0], "--targets", "turned", "--data", str(tmp_path), *CPU]) == 0
    assert "impostor pairs are more alike than genuine ones" in capsys.readouterr().out


def test_thresholds_have_one_name_for_people_and_say_their_unit_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_set(tmp_path / "twins.bin")
    arguments = ["--targets", "twins", "--data", str(tmp_path), *CPU, "--report", str(tmp_path / "out")]
    assert main([_network(tmp_path / "net.onnx")[0], *arguments]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())["twins"]
    assert found["cosine_threshold"] == pytest.approx(1 - np.mean(found["squared_distance_threshold_per_fold"]) / 2)
    for point in found["operating_points"]:
        assert {"cosine_threshold", "squared_distance_threshold"} < set(point) and not {"threshold", "cosine"} & set(point)
        if point["tar"] is not None:
            assert point["cosine_threshold"] == pytest.approx(1 - point["squared_distance_threshold"] / 2)
    shown = capsys.readouterr().out
    assert "cosine threshold" in shown and f"{found['cosine_threshold']:.4f}" in shown
    assert re.findall(r"(?<!cosine )threshold(?= \||</th>)", (tmp_path / "out" / "report.html").read_text()) == []


# ---- which checkpoint


def test_the_best_is_the_one_with_the_best_score_and_its_step_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_set(tmp_path / "twins.bin", 10)
    run = str(_run_folder(tmp_path, {1: 0.9, 2: 0.7, 3: None}, ["twins"]))
    assert main([run, "--best", *CPU]) == 0
    assert "step_00000001 (step 1, saved with a mean accuracy of 0.9000)" in capsys.readouterr().out
    assert main([run, *CPU]) == 0
    assert "step_00000003 (step 3, saved without a score)" in capsys.readouterr().out


def test_the_best_of_a_run_without_scores_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_set(tmp_path / "twins.bin", 10)
    run = _run_folder(tmp_path, {1: None, 2: None}, ["twins"])
    weights = tmp_path / "backbone.pth"
    torch.save(build_backbone("shallow", 16, 0.125).state_dict(), weights)
    for path, message in [
        (run, "none of the 2 checkpoint(s)"),
        (run / "checkpoints" / "step_00000001", "is one checkpoint"),
        (weights, "holds one network"),
    ]:
        assert message in error_of(main([str(path), "--best", *CPU]), capsys)


def test_the_best_of_a_run_that_changed_its_metric_is_best_in_the_last_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_set(tmp_path / "twins.bin", 10)
    run = _run_folder(tmp_path, {3: 0.9}, ["twins"])
    _run_folder(tmp_path, {4: -0.1, 5: -0.2}, ["twins"], metric="eer")
    assert main([str(run), "--best", *CPU]) == 0
    assert "step_00000004 (step 4, saved with a mean eer of 0.1000)" in capsys.readouterr().out


# ---- no key that was not typed


def test_errors_name_the_flags_of_the_program_and_no_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_set(tmp_path / "twins.bin", 10)
    _write_set(tmp_path / "small.bin", 4)
    network = _network(tmp_path / "net.onnx")[0]
    run = _run_folder(tmp_path / "run", {1: None, 2: None}, ["twins"])
    (run / "checkpoints" / "step_00000002" / "trainer.pt").unlink()
    data = ["--data", str(tmp_path)]
    cases = [
        ([network, "--targets", "twinz", *data], "--targets: no file", "Did you mean 'twins'?"),
        ([network, "--targets", "small", *data], "--targets: ", "small.bin has 4 pairs; 10-fold accuracy needs 10"),
        ([network, "--targets", "twins"], "--targets: 'twins' is the name of a set", "--data"),
        ([network, "--targets", "twins", "twins.bin", *data], "--targets names a set twice", "twins.bin"),
        ([network, *data], "no sets to score", "--targets"),
        ([str(run / "checkpoints" / "step_00000001")], "no file", "--data"),
        ([str(run)], "trainer.pt is missing", "name another checkpoint"),
        ([str(run), "--backbone", "shallow"], "--backbone", "is a folder"),
    ]
    if not torch.cuda.is_available():
        cases.append(([network, "--targets", "twins", *data, "--device", "cuda"], "--device cuda", "--device cpu"))
    for arguments, *messages in cases:
        assert main([*CPU, *arguments]) == 1, arguments
        error = one_line(capsys)
        assert all(message in error for message in messages)
        assert not re.search(r"\b(eval|checkpoint|data|run|optimizer)\.\w+", error.replace(str(tmp_path), "")), error


def test_a_network_that_is_larger_than_its_weights_takes_no_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write_set(tmp_path / "twins.bin", 10)
    checkpoint = _run_folder(tmp_path / "run", {1: None}, ["twins"]) / "checkpoints" / "step_00000001"
    manifest = (checkpoint / "manifest.json").read_text()
    assert '"width": 0.125' in manifest
    (checkpoint / "manifest.json").write_text(manifest.replace('"width": 0.125', '"width": 60'))
    weights = [str(checkpoint / "backbone.safetensors"), "--backbone", "shallow", "--embedding-size", "16", "--width", "60"]
    for network in ([str(checkpoint)], [str(checkpoint), "--untrained"], weights):
        assert main([*CPU, *network, "--targets", "twins", "--data", str(tmp_path)]) == 1
        assert "layers.0.layers.0.weight is (32, 3, 3, 3), in this backbone it is (7680, 3, 3, 3)" in capsys.readouterr().err


# ---- sets by their paths


def test_targets_lie_in_several_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for number, path in enumerate(("a/lfw.bin", "b/lfw.bin", "data/own.bin", "data/b/c.bin")):
        _write_set(tmp_path / path, 10 + 10 * number)
    monkeypatch.chdir(tmp_path)
    targets = [str(tmp_path / "a" / "lfw.bin"), "b/lfw", "own", "b/c.bin"]
    arguments = [_network(tmp_path / "net.onnx")[0], "--data", str(tmp_path / "data"), *CPU, "--report", "out", "--targets"]
    assert main([*arguments, *targets]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    counts = {name: numbers["num_genuine"] + numbers["num_impostor"] for name, numbers in found.items()}
    assert counts == {"a_lfw": 10, "b_lfw": 20, "own": 30, "c": 40}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "b/lfw.bin: 20 pairs, 10 genuine" in page and str(tmp_path / "data" / "own.bin") in page
    for wrong, message in ((["b/lfv"], "no file b/lfv.bin or "), (["a/lfw", targets[0]], "names a set twice")):
        capsys.readouterr()
        assert message in error_of(main([*arguments, *wrong]), capsys)


def test_a_training_scores_sets_by_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_dataset(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "tiny.bin").rename(tmp_path / "other" / "mine.bin")
    path = tmp_path / "other" / "mine"
    assert train.main(small_run(tmp_path, tmp_path, f"eval.targets=[{path}]", "train.max_steps=1")) == 0
    seen = read_metrics(tmp_path / "tiny", "mine")[1]
    capsys.readouterr()
    assert main([str(tmp_path / "tiny"), *CPU, "--report", str(tmp_path / "out")]) == 0  # the run's configuration has the path
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(found) == ["mine"] and found["mine"]["num_genuine"] == found["mine"]["num_impostor"] == 10
    assert found["mine"]["xnorm"] == pytest.approx(seen["xnorm"], rel=1e-3)  # the same weights on the same pictures
    capsys.readouterr()
    assert train.main(small_run(tmp_path, tmp_path, f"eval.targets=[{path}, {path}.bin]", "run.name=two")) == 1
    assert "eval.targets names a set twice" in capsys.readouterr().err


# ---- the page and its pictures


def test_the_page_says_what_was_evaluated_and_its_links_lead_somewhere(tmp_path: Path):
    _write_set(tmp_path / "twins.bin", 20)
    run = _run_folder(tmp_path, {7: 0.9}, ["twins"])
    assert main([str(run), *CPU, "--precision", "bf16", "--report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert facts["network"].endswith("step_00000007: shallow, width 0.125, 16 numbers per face")
    assert facts["checkpoint"] == "step 7, saved with a mean accuracy of 0.9000"
    assert facts["set twins"] == f"{tmp_path / 'twins.bin'}: 20 pairs, 10 genuine, of 30 images" and facts["pairs"] == "20"
    assert facts["precision"].startswith("bf16 on cpu") and re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", facts["date"])
    links, anchors = re.findall(r'href="#([\w-]+)"', page), re.findall(r'<h2 id="([\w-]+)"', page)
    assert links == anchors and len(links) > 4
    for table in re.findall(r"<table>(.*?)</table>", page):
        rows = [re.findall(r"<t[hd]( class=\"number\")?>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]
        assert len({tuple(kind for kind, _ in row) for row in rows}) == 1  # a column has one alignment, its head's
        assert "not measurable" not in table
    assert "not measurable; twins has 10 impostor and 10 genuine pairs" in page


def test_each_pair_of_a_gallery_stands_under_its_caption_with_a_gap_to_the_next(tmp_path: Path):
    path = _write_set(tmp_path / "mixed.bin", right=False)
    arguments = ["--targets", str(path), *CPU, "--report", str(tmp_path / "out")]
    assert main([_network(tmp_path / "net.onnx")[0], *arguments]) == 0
    pairs = read_bin(path)
    for kind in ("false_matches", "false_non_matches"):
        sheet = cv2.imread(str(tmp_path / "out" / f"mixed_{kind}.png"), cv2.IMREAD_COLOR_RGB)
        assert sheet.shape[1] == 2 * (4 + 3 * (112 + 4))
        shown = 0
        for top in range(18, sheet.shape[0] - 4, 112 + 18 + 4):
            assert (sheet[top : top + 112, 232:356] == 255).all()  # the gap
            for left in (4, 356):
                faces = sheet[top : top + 112, left : left + 112], sheet[top : top + 112, left + 116 : left + 228]
                if (faces[0] == 255).all():
                    continue
                match = [
                    all(np.array_equal(face, pairs.decode(int(index))) for face, index in zip(faces, pair, strict=True))
                    for pair in zip(pairs.first, pairs.second, strict=True)
                ]
                assert any(match) and (sheet[top - 16 : top - 2, left : left + 100] < 128).any()  # a caption over it
                shown += 1
        assert shown >= 2


def test_a_set_has_one_colour_in_all_pictures(tmp_path: Path, figures: list[Any]):
    paths = [str(_write_set(tmp_path / f"{name}.bin", right=False, seed=seed)) for seed, name in enumerate(("zeta", "alpha"))]
    run = tmp_path / "run"
    assert main([_network(tmp_path / "net.onnx")[0], "--targets", *paths, *CPU, "--report", str(run)]) == 0
    lines = [{"step": 1, "kind": name, "accuracy": 0.9} for name in ("zeta", "alpha")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare_runs.main([str(run), "--out", str(tmp_path / "out")]) == 0
    colours: dict[str, set[str]] = {"zeta": set(), "alpha": set()}
    drawn = 0
    for axis in (axis for figure in figures for axis in figure.axes):
        handles, labels = axis.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            name = (
                label.split(":")[0] if label.split(":")[0] in colours else axis.get_title() if label == "genuine pairs" else ""
            )
            if name:
                if hasattr(handle, "get_color"):  # a line
                    colour = handle.get_color()
                else:  # filled bars of the similarities, outlines of the norms
                    colour = handle.get_facecolor() if axis.get_xlabel() == "cosine similarity" else handle.get_edgecolor()
                colours[name].add(to_hex(colour))
                drawn += 1
    assert drawn >= 10 and all(len(found) == 1 for found in colours.values()) and colours["zeta"] != colours["alpha"]


@pytest.mark.parametrize("right, lowest", [(True, 0.9), (False, 0.0)])
def test_the_roc_axis_suits_good_and_bad_networks(tmp_path: Path, figures: list[Any], right: bool, lowest: float):
    path = _write_set(tmp_path / "pairs.bin", right=right)
    arguments = ["--targets", str(path), *CPU, "--report", str(tmp_path / "out")]
    assert main([_network(tmp_path / "net.onnx")[0], *arguments]) == 0
    axes = [axis for figure in figures for axis in figure.axes]
    roc = next(axis for axis in axes if axis.get_title().startswith("ROC"))
    assert roc.get_ylim()[0] == pytest.approx(lowest) and roc.get_ylim()[1] > 1
    fold = next(axis for axis in axes if axis.get_xlabel() == "fold")
    values = next(line for line in fold.lines if line.get_marker() == "o").get_ydata()
    assert fold.get_ylim()[0] <= min(values) and max(values) <= fold.get_ylim()[1]
    assert (fold.get_ylim()[1] - fold.get_ylim()[0]) <= 2.0 + 1.5 * (max(values) - min(values))
