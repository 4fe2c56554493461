"""One face against another, and the exit status."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from gallery_runs import png, write_network
from test_scripts_deploy_card import _save
from tiny_runs import error_of

from deploy.embed.embedder import open_embedder
from scripts.deploy import verify
from utils.image import decode_rgb


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("place")
    for name, seed, size in (("a", 1, 48), ("b", 2, 48), ("large", 3, 60)):
        (folder / f"{name}.png").write_bytes(png(seed, size))
    return write_network(folder / "weights.pt"), folder


def _verify(place: tuple[list[str], Path], a: str, b: str, *more: str) -> int:
    network, folder = place
    return verify.main([network[0], str(folder / a), str(folder / b), *network[1:], *more])


@pytest.mark.numeric
def test_cosine_answer_and_exit_status(
    place: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    kept = []
    monkeypatch.setattr(verify, "open_embedder", lambda options: kept.append(open_embedder(options)) or kept[-1])
    assert _verify(place, "a.png", "b.png") == 0
    said = capsys.readouterr().out
    assert "no threshold, so no answer" in said
    pixels = np.stack([decode_rgb((place[1] / name).read_bytes()) for name in ("a.png", "b.png")])
    first, second = kept[0].embed(pixels).astype(np.float64)
    cosine = float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))
    assert abs(float(said.split()[1]) - cosine) < 1e-4
    assert _verify(place, "a.png", "b.png", "--threshold", str(cosine - 0.01)) == 0
    assert "the same person: above the cosine" in capsys.readouterr().out
    assert _verify(place, "a.png", "b.png", "--threshold", str(cosine + 0.01)) == 3
    assert "different people: not above the cosine" in capsys.readouterr().out
    assert _verify(place, "a.png", "a.png", "--threshold", "0.9999") == 0
    point = {"target": "1e-2", "cosine_threshold": cosine - 0.01, "tar": 0.5}
    results = place[1] / "results.json"
    results.write_text(json.dumps({"lfw": {"operating_points": [point], "num_impostor": 300}}))
    assert _verify(place, "a.png", "b.png", "--far", "1e-2", "--results", str(results)) == 0
    assert "FAR 1e-2 on the set lfw, where 50.00 % of the genuine pairs are accepted" in capsys.readouterr().out


def test_errors_are_one_line_and_status_1(place: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]):
    for b, says in (("large.png", "is 60 x 60 pixels, no aligned crop"), ("none.png", "cannot be read: No such file")):
        assert f"{b}: {says}" in error_of(_verify(place, "a.png", b), capsys)


@pytest.mark.numeric
def test_a_crop_of_112_pixels_is_resized_as_training_resizes_it(place: tuple[list[str], Path]):
    (place[1] / "standard.png").write_bytes(png(1, 112))
    smaller = cv2.resize(decode_rgb(png(1, 112)), (48, 48), interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(place[1] / "smaller.png"), cv2.cvtColor(smaller, cv2.COLOR_RGB2BGR))
    assert _verify(place, "standard.png", "smaller.png", "--threshold", "0.9999") == 0
    assert _verify(place, "standard.png", "a.png", "--threshold", "0.9999") == 3


def test_without_a_network_the_newest_run_answers_wherever_its_options_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    far, a, b = ["--far", "1e-2"], "a.png", "b.png"
    assert verify.main([a, b, *far]) == 1
    assert capsys.readouterr().err == "error: no run with a checkpoint in work_dirs; name a run folder\n"
    for name in (a, b):
        Path(name).write_bytes(png(ord(name[0]), 112))
    run = _save(Path("work_dirs/mine"))
    point = {"target": "1e-2", "cosine_threshold": 1.0, "tar": 0.5}
    (run / "results.json").write_text(json.dumps({"lfw": {"operating_points": [point], "num_impostor": 300}}))
    for words in ([a, b, *far], [a, *far, b], [*far, a, b], [str(run), a, *far, b], [str(run), *far, a, b]):
        assert verify.main(words) == verify.DIFFERENT, words
        said = capsys.readouterr().out
        assert "network work_dirs/mine/checkpoints/step_00000005" in said and "FAR 1e-2 on the set lfw, where 50.00 %" in said
    for flag, says in (("--best", "is of the run's end, not of --best"), ("--ema", "has no moving average")):
        assert verify.main([a, b, *far, flag]) == 1 and says in capsys.readouterr().err
