"""FaceNetwork, by the lines of the README and against the programs."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from gallery_runs import SIZE, png, write_network, write_people
from test_scripts_deploy_card import _save, results  # noqa: F401
from tiny_detectors import picture, write_detector
from tiny_runs import ROOT, Started, run_file

from deploy import FaceNetwork, Gallery
from scripts.deploy import embed, enrol

WEIGHTS = {"backbone": "shallow", "width": 0.125, "embedding_size": 16, "image_size": SIZE, "threads": 1}


def test_the_lines_of_the_readme_run_from_any_folder(
    tmp_path: Path,
    results: dict[str, object],  # noqa: F811
):
    run = _save(tmp_path / "work_dirs" / "demo_cpu")
    (run / "results.json").write_text(json.dumps(results))
    (tmp_path / "people" / "ada").mkdir(parents=True)
    for path in ("one.png", "other.png", "visitor.png", "people/ada/0.png"):
        (tmp_path / path).write_bytes(png(0, 112))
    assert enrol.main([str(run), str(tmp_path / "people.gallery"), str(tmp_path / "people"), "--device", "cpu"]) == 0
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (tmp_path / "block.py").write_text(block)
    done = Started(run_file, [["block.py"]], tmp_path, place=str(tmp_path)).wait()  # which finds the project in any folder
    assert done.returncode == 0, done.stderr
    first, *found = done.stdout.splitlines()
    assert first == "True" and len(found) == 2
    assert all(re.fullmatch(r"\[\[Match\(person='ada', cosine=(1.0|0.99999\d+), image=1\)\]\]", line) for line in found)


def test_a_file_that_hides_a_package_is_named_where_that_is_needed(tmp_path: Path):
    places = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", "from deploy import Gallery"]
    for name, status in (("data.py", 0), ("utils.py", 1)):
        (tmp_path / name).write_text("")
        done = subprocess.run(words, cwd=tmp_path, env=places, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
    assert f"ImportError: {tmp_path / 'utils.py'} hides the package 'utils' that deploy needs; rename it" in done.stderr


@pytest.mark.numeric
def test_embeddings_are_those_of_face_embed_from_files_bytes_and_arrays(tmp_path: Path):
    words = write_network(tmp_path / "weights.pt")
    folder = write_people(tmp_path / "people", 2, 2)
    assert embed.main([words[0], str(folder), "--out", str(tmp_path / "e.npy"), *words[1:], "--device", "cpu"]) == 0
    expected = np.load(tmp_path / "e.npy")
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    network = FaceNetwork(words[0], device="cpu", **WEIGHTS)
    paths = sorted(folder.rglob("*.png"))
    pixels = np.stack([cv2.imread(str(path))[:, :, ::-1] for path in paths])
    for pictures in (paths, list(map(str, paths)), [path.read_bytes() for path in paths], pixels):
        found = network.embed(pictures)
        assert found.dtype == np.float32 and np.allclose(found, expected, atol=1e-6)
    other = FaceNetwork(words[0], device="cpu", best=False, input_mean=0, input_std=255, **WEIGHTS)
    assert np.abs(other.embed(pixels) - expected).max() > 1e-3  # a 0 is not left out
    assert network.verify(paths[0], pixels[1]) == pytest.approx(float(expected[0] @ expected[1]), abs=1e-6)
    assert network.embed([]).shape == (0, network.embedding_size)
    with ThreadPoolExecutor(4) as pool:
        several = np.concatenate(list(pool.map(lambda path: network.embed([path]), paths * 8)))
    assert np.allclose(several, np.tile(expected, (8, 1)), atol=1e-6) and not network._embedder._model.training
    with pytest.raises(ValueError, match=r"pictures must be a list, got one: \[\.\.\.\]"):
        network.embed(paths[0].read_bytes())  # type: ignore[arg-type]


def test_a_photograph_is_aligned_by_the_detector_and_the_gallery_of_another_network_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    results: dict[str, object],  # noqa: F811
):
    words = write_network(tmp_path / "weights.pt")
    folder, path = write_people(tmp_path / "people", 2, 1), tmp_path / "g"
    assert enrol.main([words[0], str(path), str(folder), *words[1:]]) == 0
    network = FaceNetwork(words[0], detector=write_detector(tmp_path / "d.onnx", "scrfd"), **WEIGHTS)
    photograph = cv2.imencode(".png", picture(112, 200, (48, 40))[:, :, ::-1])[1].tobytes()
    assert network.embed([photograph]).shape == (1, 16)
    capsys.readouterr()
    assert len(network.search(path, [photograph], k=1)[0]) == 1 and "cosines may be lower" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"^picture 1: no face found$"):
        network.embed([photograph, png(0)])
    with pytest.raises(ValueError, match=r"^picture 1: an aligned crop must be \(48, 48, 3\) uint8, got \(48, 48\) uint8$"):
        network.embed([photograph, np.zeros((48, 48), np.uint8)])
    with pytest.raises(ValueError, match="must be a list, got one"):
        network.search(path, "one.png")
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        network.threshold(0)
    with pytest.raises(ValueError, match=r"there is no results.json of the network"):
        network.threshold(1e-3)
    (tmp_path / "of_another.json").write_text(json.dumps(results))
    assert -1 < network.threshold(1e-2, results=tmp_path / "of_another.json") < 1
    other = FaceNetwork(write_network(tmp_path / "other.pt", seed=1)[0], **WEIGHTS)
    with Gallery(path) as opened, pytest.raises(ValueError, match="embedded by "):
        other.search(opened, [folder / "person_0" / "0.png"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dev": "cpu"}, "unrecognized arguments: --dev=cpu"),
        ({"bogus": 3}, "unrecognized arguments: --bogus=3"),
        ({**WEIGHTS, "device": "gpu"}, "--device: invalid choice: 'gpu'"),
    ],
)
def test_an_option_that_there_is_not_is_a_value_error(tmp_path: Path, options: dict[str, object], words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        FaceNetwork(write_network(tmp_path / "weights.pt")[0], **options)
