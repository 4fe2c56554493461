"""Scores of networks on template sets and on galleries; and the kinds of networks that are taken."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import jpeg, picture
from rounding import FP32_UNIT, network_bound, rounding_bound
from saving import ALONE
from tiny_networks import MEAN_COLOUR, TIMES_MATRIX, write_onnx
from torch import nn

from backbones import build_backbone
from eval import templates
from eval.__main__ import main as evaluate
from eval.embed import EmbedSettings, embed_images
from eval.networks import OtherInput, load_network
from eval.pair_sets.bin_file import PairSet
from eval.templates import read_face
from eval.verification import fuse_views, verify
from scripts.benchmark import eval as benchmark_eval
from scripts.benchmark.plain_data import plain_embed, plain_numbers
from utils.alignment import TEMPLATE
from utils.image import normalise

SMALL = ["--backbone", "r18", "--embedding-size", "16", "--width", "0.125", "--device", "cpu"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "backbone.pth"
    torch.save(build_backbone("r18", 16, 0.125).state_dict(), path)
    return path


def _results(weights: Path, target: str, folder: Path) -> dict[str, Any]:
    """Return what results.json has of a set."""
    assert evaluate([str(weights), "--targets", target, "--report", str(folder), *SMALL]) == 0
    (found,) = json.loads((folder / "results.json").read_text()).values()
    return found


def _network(path: Path, **changes: object) -> nn.Module:
    options = {
        "run": path, "best": False, "backbone": None, "trust_code": False, "embedding_size": 16, "width": 0.125,
        "image_size": None, "untrained": False, "ema": False, "colour": "rgb", "input_mean": 127.5, "input_std": 127.5,
        "threads": 1,
    }  # fmt: skip
    return load_network(argparse.Namespace(**{**options, **changes}), build_backbone).model


# ---- networks


def _onnx_file(path: Path, batch: int | str) -> np.ndarray:
    """Write a network that projects the mean colour of an image to four numbers; return its matrix (4, 3)."""
    matrix = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    write_onnx(path, [*MEAN_COLOUR, TIMES_MATRIX], 4, batch=batch, matrix=matrix)
    return matrix


@pytest.mark.numeric
@pytest.mark.parametrize("batch", ["n", 1, 4])
def test_an_onnx_file_is_a_network_whatever_its_batch(tmp_path: Path, batch: int | str):
    matrix = _onnx_file(tmp_path / "net.onnx", batch)
    images = torch.randint(0, 256, (6, 3, 112, 112)).float()  # their sums stay below 2^24: exact in fp32, in any order
    found = _network(tmp_path / "net.onnx")(images)
    expected = images.double().mean((2, 3)) @ torch.from_numpy(matrix).double().T
    bound = rounding_bound(torch.float32, 5, 255 * np.abs(matrix).sum(axis=1).max())  # the quotient, three products, the sum
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "content", [b"", b"nothing of the kind", b"\x3a\x02\x0a\x00", b"\x3a\xff\xff\xff\x7f", b"\x3b", b"\xff" * 12]
)
def test_a_damaged_onnx_file_is_one_line(tmp_path: Path, content: bytes):
    (tmp_path / "net.onnx").write_bytes(content)
    # the words depend on whose parser stumbles first, that of onnx or that of onnxruntime, and so on their versions
    with pytest.raises(
        ValueError, match=r"net\.onnx: (not an ONNX file, or a damaged one|onnxruntime cannot read it)"
    ) as caught:
        _network(tmp_path / "net.onnx")
    assert "\n" not in str(caught.value)


@pytest.mark.numeric
def test_a_torchscript_program_gives_what_the_network_gives(tmp_path: Path, weights: Path):
    model = _network(weights, backbone="r18").eval()
    torch.jit.trace(model, torch.zeros(2, 3, 112, 112)).save(str(tmp_path / "net.pt"))
    images = torch.rand(3, 3, 112, 112) * 2 - 1
    expected = model(images)
    atol = network_bound() * expected.abs().max().item()
    torch.testing.assert_close(_network(tmp_path / "net.pt", trust_code=True)(images), expected, rtol=0, atol=atol)


@pytest.mark.numeric
def test_an_exported_program_gives_what_the_network_gives(tmp_path: Path):
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.export.save(
        torch.export.export(model, (torch.zeros(2, 3, 112, 112),), dynamic_shapes=({0: batch},)), tmp_path / "n.pt2"
    )
    found = _network(tmp_path / "n.pt2", trust_code=True)
    plain, mirrored = embed_images(found, lambda index: picture(index), 5, ALONE, EmbedSettings(3))
    expected, _ = embed_images(model, lambda index: picture(index), 5, ALONE)
    bound = rounding_bound(torch.float32, 112 * 112)  # of a mean of so many numbers up to 1; means do not see mirrors
    np.testing.assert_allclose(plain, expected, rtol=0, atol=bound)
    np.testing.assert_allclose(mirrored, expected, rtol=0, atol=bound)


@pytest.mark.numeric
def test_other_channels_and_scales_are_translated():
    pixels = torch.randint(0, 256, (2, 112, 112, 3), dtype=torch.uint8)
    seen: list[torch.Tensor] = []

    class Spy(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images)
            return images

    OtherInput(Spy(), bgr=True, mean=100.0, std=50.0)(normalise(pixels))
    expected = (pixels.flip(3).permute(0, 3, 1, 2).float() - 100) / 50
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1000 * FP32_UNIT / 50)  # four roundings of up to 255, over 50


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("w.pth", b"PK nothing", {"backbone": "r18"}, r"weights .*w\.pth: cannot be loaded: it is damaged or holds more than "),
        ("w.pt", b"x", {"backbone": "r18"}, r"weights .*w\.pt: cannot be loaded: it is damaged or holds more than tensors"),
        ("n.pt2", b"x", {"trust_code": True}, r"n\.pt2: not an exported program: it is not a zip archive"),
        ("missing", None, {"backbone": "r18"}, r"no run folder, checkpoint or weights file at .*missing"),
    ],
)
def test_files_that_are_no_network_are_refused_for_what_they_are(
    tmp_path: Path, name: str, content: bytes | None, options: dict[str, object], said: str
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        _network(tmp_path / name, **options)
    assert "\n" not in str(caught.value)


# ---- IJB


def _ijb(root: Path, images: int = 24, templates: int = 8) -> Path:
    rng = np.random.default_rng(0)
    (root / "meta").mkdir(parents=True)
    (root / "loose_crop").mkdir()
    lines, points = [], []
    for number in range(images):
        (root / "loose_crop" / f"{number}.jpg").write_bytes(jpeg(picture(number, 160)))
        lines.append(f"{number}.jpg {number % templates + 1} {number // 5}\n")
        values = (TEMPLATE + 20 + rng.normal(size=(5, 2))).round(3)
        points.append(f"{number}.jpg {' '.join(map(str, values.ravel()))} {rng.uniform(0.5, 1):.3f}\n")
    pairs = [(a, b, int((a + b) % 3 == 0)) for a in range(1, templates + 1) for b in range(a, templates + 1)]
    (root / "meta" / "ijbc_face_tid_mid.txt").write_text("".join(lines))
    (root / "meta" / "ijbc_name_5pts_score.txt").write_text("".join(points))
    (root / "meta" / "ijbc_template_pair_label.txt").write_text("".join(f"{a} {b} {c}\n" for a, b, c in pairs))
    return root


@pytest.mark.numeric
def test_ijb_from_pictures_to_scores_equals_a_slow_walk(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch):
    root = _ijb(tmp_path / "IJBC")
    scores: list[np.ndarray] = []
    score = templates.score_pairs
    monkeypatch.setattr(templates, "score_pairs", lambda *given: scores.append(score(*given)) or scores[0])
    report = _results(weights, f"ijbc:{root}", tmp_path)
    model = _network(weights, backbone="r18")
    rows = [line.split() for line in (root / "meta/ijbc_name_5pts_score.txt").read_text().splitlines()]
    where = [line.split() for line in (root / "meta/ijbc_face_tid_mid.txt").read_text().splitlines()]

    def face(index: int) -> np.ndarray:
        return read_face(root / "loose_crop" / rows[index][0], np.array(rows[index][1:11], float).reshape(5, 2))

    plain, mirrored = embed_images(model, face, 24, ALONE)
    vectors = {}
    for template in range(1, 9):
        media: dict[str, list[np.ndarray]] = {}
        for index, (_, tid, mid) in enumerate(where):
            if int(tid) == template:
                media.setdefault(mid, []).append((plain[index] + mirrored[index]) * float(rows[index][11]))
        total = sum(np.mean(features, axis=0) for features in media.values())
        vectors[template] = total / np.linalg.norm(total)
    triples = np.loadtxt(root / "meta/ijbc_template_pair_label.txt", dtype=int)
    expected = [vectors[a] @ vectors[b] for a, b, _ in triples.tolist()]
    # templates are unit vectors; other batches may sum in another order within the network
    np.testing.assert_allclose(scores[0], expected, rtol=0, atol=2 * network_bound())
    assert report["pairs"] == 36 and report["genuine"] == int(triples[:, 2].sum()) and "identification" not in report


def test_ijb_searches_its_galleries_where_they_are(tmp_path: Path, weights: Path):
    root = _ijb(tmp_path / "IJBC")
    for part, numbers in (("gallery_G1", (1, 2)), ("gallery_G2", (3, 4)), ("probe_mixed", (1, 2, 3, 4, 5, 6))):
        text = "TEMPLATE_ID,SUBJECT_ID,FILENAME\n" + "".join(f"{t},{100 + t},x.jpg\n{t},{100 + t},y.jpg\n" for t in numbers)
        (root / "meta" / f"ijbc_1N_{part}.csv").write_text(text)
    found = _results(weights, f"ijbc:{root}", tmp_path)["identification"]
    assert found["rank_1"] == 1.0 and found["tpir_at_fpir_0.01"] is None  # a template finds itself; four strangers tell little


def test_ijb_without_a_picture_is_one_line(tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]):
    root = _ijb(tmp_path / "IJBC")
    (root / "loose_crop" / "7.jpg").unlink()
    assert evaluate([str(weights), "--targets", f"ijbc:{root}", *SMALL]) == 1
    assert "7.jpg: cannot be read" in capsys.readouterr().err


# ---- galleries


def test_pictures_of_the_gallery_find_themselves_and_strangers_are_counted(tmp_path: Path, weights: Path):
    for number in range(6):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(picture(number)))
    (tmp_path / "gallery.txt").write_text("0.jpg 10\n1.jpg 11\n")
    (tmp_path / "gallery_more.txt").write_text("2.jpg 12\n3.jpg 10\n")
    (tmp_path / "probes.txt").write_text("1.jpg 11\n3.jpg 10\n4.jpg 77\n2.jpg 12\n")
    found = _results(weights, f"identify:{tmp_path}", tmp_path / "report")
    assert (found["gallery_images"], found["gallery_people"]) == (4, 3)
    assert (found["probes_with_mate"], found["probes_without"]) == (3, 1)
    assert found["rank_1"] == 1.0 and found["tpir_at_fpir_0.1"] is None


def test_the_folders_of_tinyface_are_searched_by_the_names_of_pictures(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
):
    """Ranks are those of a slow search, in which each distractor is somebody else."""
    pictures = {
        "Gallery_Match": ["7_1", "7_2", "12_1", "30_4"],
        "Gallery_Distractor": ["0_3_a", "0_3_b", "7_9_x", "plain", "12"],
        "Probe": ["7_3", "12_2", "30_1", "30_2"],
    }
    files = {f"Testing_Set/{side}/{name}.jpg": number for number, (side, name) in enumerate(
        (side, name) for side, names in pictures.items() for name in names)}  # fmt: skip
    for path, number in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(jpeg(picture(number)))
    found = _results(weights, f"identify:{tmp_path / 'Testing_Set'}", tmp_path / "report")
    assert (found["gallery_images"], found["gallery_people"]) == (9, 8)
    assert (found["probes_with_mate"], found["probes_without"]) == (4, 0)
    images = [jpeg(picture(number)) for number in range(len(files))]
    pairs = PairSet("all", images, np.arange(13), np.arange(13), np.ones(13, bool))
    vectors = fuse_views(*embed_images(_network(weights, backbone="r18").eval(), pairs.decode, 13, ALONE))
    ranks = []
    for probe, person in zip(range(9, 13), ("7", "12", "30", "30"), strict=True):
        own = [number for number, name in enumerate(pictures["Gallery_Match"]) if name.split("_")[0] == person]
        best = max(float(vectors[probe] @ vectors[number]) for number in own)
        others = {"7": [0, 1], "12": [2], "30": [3]}
        others |= {f"distractor {number}": [number] for number in range(4, 9)}
        del others[person]
        ranks.append(1 + sum(max(float(vectors[probe] @ vectors[n]) for n in own) > best for own in others.values()))
    assert [found[f"rank_{k}"] for k in (1, 5)] == [np.mean([rank <= k for rank in ranks]) for k in (1, 5)]
    (tmp_path / "Testing_Set" / "Probe" / "7.jpg").write_bytes(images[0])
    assert evaluate([str(weights), "--targets", f"identify:{tmp_path / 'Testing_Set'}", *SMALL]) == 1
    assert "Probe/7.jpg: a picture of TinyFace is called PERSON_NUMBER.jpg" in capsys.readouterr().err


# ---- the benchmark's rival


@pytest.mark.numeric
def test_the_plain_way_finds_the_same_accuracies_and_embeddings(weights: Path):
    rng = np.random.default_rng(0)
    images = [jpeg(picture(number)) for number in range(14)]
    pairs = PairSet("tiny", images, rng.integers(0, 14, 20), rng.integers(0, 14, 20), np.arange(20) % 2 == 0)
    model = _network(weights, backbone="r18").eval()
    rows = plain_embed(model, pairs)
    fused = fuse_views(*embed_images(model, pairs.decode, 14, ALONE))
    np.testing.assert_allclose(rows[0::2], fused[pairs.first], rtol=0, atol=network_bound())
    np.testing.assert_allclose(rows[1::2], fused[pairs.second], rtol=0, atol=network_bound())
    accuracies, _ = plain_numbers(rows, pairs.same)
    np.testing.assert_array_equal(accuracies, verify(rows[0::2], rows[1::2], pairs.same, xnorm=1.0).accuracy_per_fold)


def test_the_benchmark_of_evaluation_reports_its_figures(tmp_path: Path):
    arguments = [
        "--pairs", "10", "--rounds", "1", "--batch-size", "4", "--processes", "2", "--json", str(tmp_path / "new" / "out.json"),
    ]  # fmt: skip
    assert benchmark_eval.main(arguments) == 0
    found = json.loads((tmp_path / "new" / "out.json").read_text())
    numbers, embedding = found["numbers"], found["embedding"]
    assert numbers["ratio"] == pytest.approx(numbers["loops_milliseconds"] / numbers["milliseconds"])  # of one round
    assert embedding["ratio"] == pytest.approx(embedding["plain_seconds"] / embedding["ours_seconds"])
    for way in ("ours", "plain"):  # of the run, with an evaluation every 2000 steps
        seconds, training = embedding[f"{way}_seconds"], 2000 * embedding["step_seconds"]
        assert embedding[f"{way}_share"] == pytest.approx(seconds / (seconds + training))
