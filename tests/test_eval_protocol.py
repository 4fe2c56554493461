"""Every protocol runs offline and in training, on one process and on several, and gives the same figures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import jpeg, picture
from tiny_runs import ended_well, error_of, face, read_metrics, run_program, run_train, small_run, write_dataset

import train
from backbones import build_backbone
from deploy.results import read_results
from eval.__main__ import main as evaluate
from scripts.eval.compare_runs import main as compare
from utils.alignment import TEMPLATE

SMALL = ["--backbone", "shallow", "--embedding-size", "16", "--width", "0.125", "--device", "cpu", "--threads", "1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with training data, the set `tiny`, IJBC/ with 1:N lists, faces/ to search, and weights."""
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder, 24)
    meta = folder / "IJBC" / "meta"
    meta.mkdir(parents=True)
    (folder / "IJBC" / "loose_crop").mkdir()
    lines, points = [], []
    for number in range(12):
        (folder / "IJBC" / "loose_crop" / f"{number}.jpg").write_bytes(jpeg(picture(number, 160)))
        lines.append(f"{number}.jpg {number % 6 + 1} {number // 5}\n")
        points.append(f"{number}.jpg {' '.join(map(str, (TEMPLATE + 20).round(3).ravel()))} 0.9\n")
    pairs = [(a, b, int((a + b) % 3 == 0)) for a in range(1, 7) for b in range(a, 7)]
    (meta / "ijbc_face_tid_mid.txt").write_text("".join(lines))
    (meta / "ijbc_name_5pts_score.txt").write_text("".join(points))
    (meta / "ijbc_template_pair_label.txt").write_text("".join(f"{a} {b} {c}\n" for a, b, c in pairs))
    for part, templates in (("gallery_G1", (1, 2)), ("gallery_G2", (3, 4)), ("probe_mixed", (1, 2, 3, 4, 5))):
        rows = "".join(f"{number},{100 + number}\n" for number in templates)
        (meta / f"ijbc_1N_{part}.csv").write_text(f"TEMPLATE_ID,SUBJECT_ID\n{rows}")
    for side, people in (("gallery", ("ann", "ben", "cy")), ("gallery_more", ("dan",)), ("probes", ("ben", "dan", "eve"))):
        for person in people:
            (folder / "faces" / side / person).mkdir(parents=True)
            (folder / "faces" / side / person / "1.jpg").write_bytes(face(ord(person[0]), len(side)))
    torch.manual_seed(0)
    torch.save(build_backbone("shallow", 16, 0.125).state_dict(), folder / "backbone.pth")
    return folder


def _targets(data: Path) -> list[str]:
    return ["tiny", f"ijbc:{data}/IJBC", f"identify:{data}/faces"]


@pytest.mark.parametrize("processes", [1, 2])
def test_offline_all_protocols_stand_in_one_report(data: Path, tmp_path: Path, processes: int):
    words = [str(data / "backbone.pth"), *SMALL, "--data", str(data), "--report", str(tmp_path / "report")]
    done = ended_well(run_program(evaluate, [[*words, "--targets", *_targets(data)]] * processes))
    assert "tiny: " in done.stdout
    assert {line.split()[0] for line in done.stdout.splitlines() if "tar@1e-1" in line} >= {"ijbc"}
    found = json.loads((tmp_path / "report" / "results.json").read_text())
    assert list(found) == ["tiny", "ijbc", "faces"]
    people = ("gallery_images", "gallery_people", "probes_with_mate", "probes_without")
    assert [found["faces"][key] for key in people] == [4, 4, 2, 1]  # people of folders are known by their names
    page = (tmp_path / "report" / "report.html").read_text()
    table = (tmp_path / "report" / "results.md").read_text()
    assert "Templates and searches" in page
    for figure in ("rank_1", "published_tar@1e-1", "tpir_at_fpir_0.1"):
        assert figure in page and figure in table.replace("\\", "")
    assert set(read_results(tmp_path / "report" / "results.json")) == set(found)  # what cards and pages read
    assert compare([str(tmp_path / "report"), "--out", str(tmp_path / "compared")]) == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_in_training_every_protocol_is_logged_and_one_ranks_the_checkpoints(data: Path, tmp_path: Path, processes: int):
    overrides = [f"eval.targets=[{', '.join(_targets(data))}]", "eval.metric=rank_1", "train.max_steps=3", "eval.every=2"]
    ended_well(run_train(processes, small_run(data, tmp_path, *overrides)))
    run = tmp_path / "tiny"
    found = json.loads((run / "results.json").read_text())
    assert list(found) == ["tiny", "ijbc", "faces"]
    rates = {name: read_metrics(run, name) for name in found}
    assert all(list(steps) == [2, 3] for steps in rates.values())
    assert rates["faces"][3]["rank_1"] == found["faces"]["rank_1"]
    assert rates["ijbc"][3]["tar@1e-1"] == found["ijbc"]["tar_at_far"]["1e-1"]
    score = np.mean([rates["ijbc"][3]["rank_1"], rates["faces"][3]["rank_1"]])
    manifest = json.loads((run / "checkpoints" / "step_00000003" / "manifest.json").read_text())
    assert manifest["score"] == pytest.approx(score)
    board = evaluate([str(run), "--device", "cpu", "--threads", "1"])  # the same targets, from the run's configuration
    again = json.loads((run / "evaluation" / "results.json").read_text())
    assert board == 0 and again["faces"] == found["faces"]


@pytest.mark.parametrize(
    ("targets", "more", "said"),
    [
        ("[ijbc:/nowhere]", [], "eval.targets: ijbc:/nowhere: no folder /nowhere"),
        ("[identify:{}]", [], "must hold gallery and probes"),
        ("[ijbb:{}/IJBC]", [], "ijbb_face_tid_mid.txt: cannot be read"),
        ("[ijbc:{}/IJBC, ijbc:{}/faces/../IJBC]", ["eval.metric=rank_1"], "two sets are called ijbc"),
        ("[ijbc:{}/IJBC]", [], "eval.metric=accuracy is a figure of none of eval.targets"),
        ("[ijbc:{}/IJBC]", ["eval.metric=tar@1e-4"], "needs 10000 impostor pairs and a genuine one in each set; ijbc has"),
    ],
)
def test_a_target_that_cannot_be_scored_is_named_before_training(
    data: Path, tmp_path: Path, targets: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    overrides = [f"eval.targets={targets.replace('{}', str(data))}", *more]
    assert said in error_of(train.main([*small_run(data, tmp_path, *overrides), "--check"]), capsys)


def test_without_a_run_the_newest_one_is_scored_and_its_report_goes_into_its_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert "no run with a checkpoint in work_dirs; name a run folder" in error_of(evaluate(["--device", "cpu"]), capsys)
    (tmp_path / "work_dirs").mkdir()
    for name in ("old", "new"):
        words = ["run.output=work_dirs", f"run.name={name}", "train.max_steps=1", "eval.at_end=false"]
        assert train.main(small_run(data, tmp_path, *words)) == 0
    assert evaluate(["--device", "cpu", "--threads", "1"]) == 0
    assert "work_dirs/new" in capsys.readouterr().out
    assert (tmp_path / "work_dirs/new/evaluation/report.html").is_file()
    assert not (tmp_path / "work_dirs/old/evaluation").exists()
    weights = [str(data / "backbone.pth"), *SMALL, "--data", str(data), "--targets", "tiny"]
    assert evaluate(weights) == 0  # no run, no folder for a report
    assert "report:" not in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_costs_the_report_alone(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train.main(small_run(data, tmp_path, "train.max_steps=1", "eval.at_end=false")) == 0
    run = tmp_path / "tiny"
    (run / "evaluation").write_text("in the way")
    assert evaluate([str(run), "--device", "cpu", "--threads", "1"]) == 0
    said = capsys.readouterr()
    assert "tiny " in said.out and "warning: " in said.err and "no report: " in said.err
    assert evaluate([str(run), "--device", "cpu", "--report", str(run / "evaluation")]) == 1
