"""KP-RPE: against the equations of its source in float64, and runs that train with the landmarks of a set."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from dense_reference import relative
from rounding import network_bound, rounding_bound
from tiny_detectors import OFFSETS, picture, write_detector
from tiny_runs import equal_weights, one_line, read_metrics, reshard_and_back, run_train, tiny_run, write_dataset
from torch import Tensor, nn
from torch.nn import functional as F

import train
from backbones import build_backbone
from backbones.kprpe import KeypointTransformer, buckets
from backbones.vit import Form
from data.datasets import open_set
from data.drawn.faces import draw_face, landmarks
from data.drawn.identity import sample_identity, sample_shot
from data.landmarks import mirrored_landmarks
from data.sampler import SampleOrder
from eval.__main__ import main as evaluate
from scripts.data import landmarks as program
from scripts.demo import make_data
from utils.alignment import TEMPLATE
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import read_backbone

FORM, SIDE = Form(64, 3, heads=4, times=2, patch=8), 48  # 36 tokens


def _bucket(query: tuple[int, int], key: tuple[int, int]) -> int:
    """Return the bucket of iRPE's product method at the ratio 1.9, by its Equation 18."""
    found = []
    for one, other in zip(query, key, strict=True):
        offset = one - other
        if abs(offset) > 1.9:
            far = 1.9 + math.log(abs(offset) / 1.9) / math.log(15.2 / 1.9) * (3.8 - 1.9)
            offset = int(math.copysign(min(round(far), 3.8), offset))  # cut off to 3
        found.append(offset + 3)
    return 7 * found[0] + found[1]


@pytest.mark.parametrize("side", [3, 6, 14])
def test_pairs_of_tokens_share_the_buckets_of_the_source(side: int):
    places = [(row, column) for row in range(side) for column in range(side)]
    assert buckets(side).tolist() == [[_bucket(query, key) for key in places] for query in places]


def test_state_dict_has_the_published_names_and_shapes():
    with torch.device("meta"):
        for name, depth, heads, inside in (("vit_kprpe_s", 12, 8, 2560), ("vit_kprpe_b", 24, 16, 1536)):
            shapes = {key: list(value.shape) for key, value in build_backbone(name).state_dict().items()}
            own = {key: shape for key, shape in shapes.items() if key.startswith("landmarks.")}
            assert len(own) == 4 * 6 + 2 and len(shapes) - len(own) == 11 * depth + 3 + 2 + 12 + 2
            assert shapes["keypoint_linear.weight"] == [49 * heads * depth, 10] and "mask_token" not in shapes
            assert shapes["pos_embed"] == [1, 196, 512] and shapes["patch_embed.proj.weight"] == [512, 3, 8, 8]
            assert shapes[f"blocks.{depth - 1}.mlp.fc1.weight"] == [inside, 512]
            assert shapes["feature.0.weight"] == [512, 196 * 512]


def _network() -> KeypointTransformer:
    torch.manual_seed(0)
    model = KeypointTransformer(FORM, 16, image_size=SIDE)
    for weight in model.keypoint_linear.parameters():
        nn.init.normal_(weight)
    return model


def _reference(model: KeypointTransformer, images: Tensor, points: Tensor) -> Tensor:
    """Return the embeddings by the equations of the source, pair of tokens after pair of tokens."""
    w, side = dict(model.named_parameters()), SIDE // 8
    x = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], 8)
    x = x.flatten(2).transpose(1, 2) + w["pos_embed"]
    places = [(row, column) for row in range(side) for column in range(side)]
    middles = torch.tensor([[(column + 0.5) / side, (row + 0.5) / side] for row, column in places])
    away = (middles[:, None] - points[:, None]).flatten(2).to(images.dtype)  # (b, N, 10)
    found = (away @ w["keypoint_linear.weight"].t() + w["keypoint_linear.bias"]).unflatten(-1, (3, 4, 49))
    for block in range(3):
        name = f"blocks.{block}"
        y = F.layer_norm(x, (64,), w[f"{name}.norm1.weight"], w[f"{name}.norm1.bias"])
        q, k, v = (y @ w[f"{name}.attn.qkv.weight"].t()).split(64, dim=-1)
        heads = []
        for head in range(4):
            part = slice(16 * head, 16 * head + 16)
            logits = q[..., part] @ k[..., part].transpose(1, 2) / 4
            pairs = [[found[:, i, block, head, _bucket(query, key)] for key in places] for i, query in enumerate(places)]
            bias = torch.stack([torch.stack(row, dim=1) for row in pairs], dim=1)
            heads.append((logits + bias).softmax(-1) @ v[..., part])
        x = x + torch.cat(heads, -1) @ w[f"{name}.attn.proj.weight"].t() + w[f"{name}.attn.proj.bias"]
        y = F.layer_norm(x, (64,), w[f"{name}.norm2.weight"], w[f"{name}.norm2.bias"])
        x = x + model.blocks[block].mlp(y)
    return model.feature(F.layer_norm(x, (64,), w["norm.weight"], w["norm.bias"]).flatten(1))


@pytest.mark.numeric
@pytest.mark.parametrize("training", [False, True])
def test_forward_and_gradients_equal_the_equations_of_the_source(training: bool):
    model = _network().double().train(training)
    images, points = torch.randn(3, 3, SIDE, SIDE, dtype=torch.float64), torch.rand(3, 5, 2, dtype=torch.float64)
    results = []
    for compute in (lambda: model(images, points)[:, :16], lambda: _reference(model, images, points)):
        model.zero_grad()
        embeddings = compute()
        (embeddings * torch.linspace(-1, 1, 48).view(3, 16)).sum().backward()
        results.append((embeddings.detach(), {name: p.grad for name, p in model.named_parameters() if "landmarks" not in name}))
    (embeddings, gradients), (expected, others) = results
    assert float((embeddings - expected).norm()) < 1e-10 * float(expected.norm())
    for name, gradient in gradients.items():
        assert gradient is not None and others[name] is not None, name
        assert float((gradient - others[name]).norm()) < 1e-8 * max(1e-3, float(others[name].norm())), name


@pytest.mark.numeric
def test_landmarks_that_are_missing_are_those_that_the_network_finds():
    model = _network().eval()
    nn.init.normal_(model.landmarks.points.weight, std=0.1)
    images, points = torch.randn(4, 3, SIDE, SIDE), torch.rand(4, 5, 2)
    found = model.landmarks(images).detach()
    points[1], points[2, 3] = torch.nan, torch.nan
    output = model(images, points).detach()
    filled = torch.where(points.isnan(), found, points)
    assert torch.equal(output[:, 16:].unflatten(1, (5, 2)), found)
    assert torch.equal(output, model(images, filled)) and torch.equal(output[1, :16], model(images, found)[1, :16])
    assert torch.equal(model(images), model(images, found)[:, :16])
    assert (model(images).detach() - output[:, :16])[[0, 2, 3]].abs().amax(1).min() > 1e-3
    model.train()(images, points)[:, :16].sum().backward()
    assert not any(weight.grad.any() for weight in model.landmarks.parameters())  # only their own loss trains them
    fresh = KeypointTransformer(FORM, 16).landmarks(torch.randn(2, 3, 112, 112))
    assert torch.allclose(fresh, torch.tensor((TEMPLATE + 0.5) / 112, dtype=torch.float32).expand(2, 5, 2))


@pytest.mark.numeric
def test_places_are_not_rounded_to_16_bits():
    model = _network().eval()
    with torch.no_grad():
        model.keypoint_linear.weight *= 30  # so that a fifth of a pixel would count
        images, points = torch.randn(4, 3, SIDE, SIDE), torch.rand(4, 5, 2)
        seen, whole = [], model.blocks[0].attn.forward
        model.blocks[0].attn.forward = lambda x, bias: seen.append(bias) or whole(x, bias)  # type: ignore[method-assign]
        model(images, points)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(images, points)
    assert torch.equal(*seen) and seen[0].dtype == torch.float32


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the set `data` and landmarks of its images, of which two are missing."""
    folder = tmp_path_factory.mktemp("landmarks")
    write_dataset(folder / "data")
    points = np.random.default_rng(0).uniform(0.2, 0.8, (60, 5, 2)).astype(np.float16)
    points[[3, 7]] = np.nan
    np.save(folder / "points.npy", points)
    return folder


def _settings(place: Path, *more: str) -> list[str]:
    return [f"data.landmarks={place / 'points.npy'}", "backbone.name=vit_kprpe_shallow", "eval.targets=[]", *more]


@pytest.mark.numeric
def test_a_run_learns_the_landmarks_of_each_image_and_resumes_to_the_same_bits(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    settings = _settings(place, "optimizer.name=adamw", "optimizer.lr=1e-3", "schedule.kind=constant", "train.accumulation=2")
    for name, last in (("whole", 6), ("parts", 3), ("parts", 6)):
        arguments = [*settings, f"run.name={name}", f"train.max_steps={last}", "backbone.checkpointing=" + str(last == 3)]
        assert train.main(tiny_run(place / "data", tmp_path, *arguments)) == 0
    equal_weights(tmp_path / "whole", tmp_path / "parts")
    losses = read_metrics(tmp_path / "whole")
    samples = SampleOrder(60, 8, 2048, True, "full", 1024, 64).samples(0, rank=0, world_size=1, accumulation=2)
    assert samples.mirrored.any() and not samples.mirrored.all()
    points = np.load(place / "points.npy")[samples.indices].astype(np.float64)
    for number in np.flatnonzero(samples.mirrored):
        x, y = points[number].T.copy()
        points[number] = [[1 - x[k], y[k]] for k in (1, 0, 2, 4, 3)]
    expected = np.nan_to_num(np.abs(points - (TEMPLATE + 0.5) / 112)).mean()
    assert losses[1]["loss_landmarks"] == pytest.approx(expected, rel=rounding_bound(torch.float32, 80))
    assert losses[6]["loss_landmarks"] < losses[1]["loss_landmarks"]
    affine = [*settings, "run.name=moved", "train.max_steps=1", "augment.affine=1", "augment.affine_shift=1"]
    assert train.main(tiny_run(place / "data", tmp_path, *affine)) == 0
    # each point is off by half a side on average, with a deviation of 0.29 / 4 for eight images
    assert 1.5 * expected < read_metrics(tmp_path / "moved")[1]["loss_landmarks"] < 0.8
    capsys.readouterr()
    np.save(tmp_path / "other.npy", np.load(place / "points.npy")[::-1])
    settings[0] = f"data.landmarks={tmp_path / 'other.npy'}"
    assert train.main(tiny_run(place / "data", tmp_path, *settings, "run.name=parts", "train.max_steps=8")) == 1
    assert "landmarks" in one_line(capsys)


@pytest.mark.numeric
def test_any_number_of_processes_learns_the_landmarks_and_resumes_to_the_bit_after_a_reshard(place: Path, tmp_path: Path):
    shared = _settings(place, "backbone.freeze_norm=true", "train.batch_size=12", "checkpoint.every=1", "train.max_steps=2")
    found, moves = [], []
    for count in (1, 2, 3):
        run = tiny_run(place / "data", tmp_path, *shared, f"run.name=of_{count}", image_size=48)
        assert (ended := run_train(count, run)).returncode == 0, ended.stderr
        found.append([read_metrics(tmp_path / f"of_{count}")[2][name] for name in ("loss", "loss_landmarks", "grad_norm")])
        before, after = (read_backbone(path) for path in list_checkpoints(tmp_path / f"of_{count}"))
        moves.append(torch.cat([(after[name] - before[name]).flatten() for name in after if name.startswith("landmarks.")]))
    assert found[1:] == [pytest.approx(found[0], rel=network_bound())] * 2
    assert all(relative(move, moves[0]) < 16 * network_bound() for move in moves[1:])  # of gradients that are clipped
    reshard_and_back(list_checkpoints(tmp_path / "of_2")[0], tmp_path / "broken")
    run = tiny_run(place / "data", tmp_path, *shared, "run.name=broken", image_size=48)
    assert (ended := run_train(2, run)).returncode == 0, ended.stderr
    equal_weights(tmp_path / "of_2", tmp_path / "broken")


def test_a_network_of_a_run_needs_no_landmarks_afterwards(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train.main(tiny_run(place / "data", tmp_path, *_settings(place, "train.max_steps=2", "eval.targets=[tiny]"))) == 0
    assert evaluate([str(tmp_path / "tiny"), "--targets", str(place / "data" / "tiny.bin")]) == 0
    assert "tiny" in capsys.readouterr().out
    results = json.loads((tmp_path / "tiny" / "results.json").read_text())
    assert "landmarks" not in json.dumps(results)


WRONG = {
    "data.landmarks=": "data.landmarks is for backbone.name=vit_kprpe_..., which needs the file, got '' with vit_kprpe_shallow",
    "backbone.name=shallow": "data.landmarks is for backbone.name=vit_kprpe_...",
    "data.on_bad_record=skip": "data.landmarks goes without data.sources and data.on_bad_record=skip",
    "train.compile=max-autotune": "train.compile must be default or off with data.landmarks, .*, got max-autotune",
    "data.landmarks=none.npy": "data.landmarks: none.npy: cannot be read: No such file or directory",
    "data.landmarks={}/data/property": "data.landmarks: .*property: is no .npy file of numbers",
    "data.landmarks={}/short.npy": r"must have the shape \(60, 5, 2\), .*got \(59, 5, 2\) float16; write it with face data",
    "data.landmarks={}/zip.npy": "data.landmarks: .*zip.npy: is no .npy file of numbers",
    "data.landmarks={}/long.npy": "five points of each image of the set, as floats, got .* float128",
    "data.landmarks={}/none.npy": "has the landmarks of no image, got NaN for all",
    "data.landmarks={}/pixels.npy": r"must be shares of the image's side, from 0 to 1, got \[.*\] for image 0; divide pixels",
}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_landmarks_are_one_line(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str):
    points = np.load(place / "points.npy")
    np.save(place / "short.npy", points[1:])
    np.save(place / "pixels.npy", points * 112)
    np.save(place / "none.npy", points * np.nan)
    np.save(place / "long.npy", points.astype(np.longdouble))
    with open(place / "zip.npy", "wb") as file:
        np.savez(file, points)
    assert train.main(tiny_run(place / "data", tmp_path, *_settings(place, given.format(place)))) == 1
    assert re.search(WRONG[given], one_line(capsys))
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize("form", ["yunet", "scrfd"])
def test_a_detector_finds_the_landmarks_of_a_set(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str):
    for number, places in enumerate([[(40, 48)], [], [(48, 24), (96, 96)]]):
        (tmp_path / "set" / "one").mkdir(parents=True, exist_ok=True)
        pixels = cv2.cvtColor(picture(112, 112, *places), cv2.COLOR_RGB2BGR)
        cv2.imwrite(str(tmp_path / "set" / "one" / f"{number}.png"), pixels)
    detector, out = write_detector(tmp_path / "face.onnx", form), tmp_path / "points.npy"
    words = [str(tmp_path / "set"), str(out), "--detector", str(detector), "--min-size", "1"]
    assert program.main(words) == 0
    assert "landmarks of 2 of 3 images; in 1 the detector found no face" in capsys.readouterr().out
    found = np.load(out)
    assert found.shape == (3, 5, 2) and found.dtype == np.float16 and np.isnan(found[1]).all()
    for number, corner in ((0, (40, 48)), (2, (48, 24))):
        expected = (np.array(corner) + 3.5 + OFFSETS + 0.5) / 112
        assert np.abs(found[number] - expected).max() < 1 / 112, (found[number] * 112, expected * 112)
    assert program.main([*words[:1], str(tmp_path / "points.csv"), *words[2:]]) == 1
    assert "OUT must end in .npy" in one_line(capsys)
    assert program.main(words) == 1 and "exists already; choose another name" in one_line(capsys)


@pytest.mark.numeric
def test_drawn_faces_have_their_landmarks_where_eyes_and_mouth_are_drawn():
    """What changes with the colours of eyes and lips lies around them; and the mirror image of a point is its other one."""
    for seed in range(6):
        identity, rng = sample_identity(1, seed), np.random.default_rng(seed)
        shot = sample_shot(rng, 0.1 * (seed - 3), 0.3)
        shot = replace(shot, glasses="none", occluder=False, blur=0.0, noise=0.0, resolution=112)
        points = landmarks(identity, shot) * 112
        plain = draw_face(identity, shot, np.random.default_rng(0)).astype(int)
        found = {}
        for colour in ("iris", "lips"):
            other = draw_face(replace(identity, **{colour: 255 - getattr(identity, colour)}), shot, np.random.default_rng(0))
            found[colour] = np.argwhere(np.abs(other - plain).sum(2) > 20)[:, ::-1]  # x and y
        assert np.abs(points[:2].mean(0) - 0.5 - found["iris"].mean(0)).max() < 3, seed
        for corner, x in ((3, found["lips"][:, 0].min()), (4, found["lips"][:, 0].max())):
            y = found["lips"][found["lips"][:, 0] == x, 1].mean()
            assert np.abs(points[corner] - 0.5 - [x, y]).max() < 4, (seed, corner)
        assert points[0, 0] < points[2, 0] < points[1, 0] and points[3, 0] < points[4, 0]
    twice = mirrored_landmarks(mirrored_landmarks(points[None] / 112, np.array([True])), np.array([True]))
    assert np.allclose(twice, points / 112, atol=1e-6)


def test_the_demo_writes_landmarks_that_a_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(make_data, "write_verification_set", lambda *given: None)
    words = ["--out", str(tmp_path), "--identities", "3", "--images-per-identity", "2"]
    assert make_data.main(words) == 0 and not (tmp_path / "landmarks.npy").exists()
    assert make_data.main([*words, "--landmarks"]) == 0
    table, dataset = np.load(tmp_path / "landmarks.npy"), open_set(tmp_path)
    assert table.shape == (dataset.num_stored, 5, 2)
    for index in range(6):
        identity, shot, _ = make_data.subject(make_data.DrawnPicture(1, "train", index // 2, index % 2))
        assert np.abs(table[index] - landmarks(identity, shot)).max() < 1e-3
