"""The loss expected of the first step, against losses of random embeddings and centres."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from dense_margin import cosines_of, losses_of_cosines
from torch import Tensor

import train
from losses import MARGINS, build_margin, first_loss
from losses.adaptiveface import AdaptiveFace
from losses.first_loss import FirstStep, expected_first_loss, judge_first_loss
from losses.margin import Margin
from partial_fc import HeadConfig, PartialFC


def _arcface(scale: float = 64.0) -> Margin:
    return build_margin("arcface", scale=scale, margin=0.5)


def _random_step(num_classes: int, dim: int, batch: int, alike: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings of length sqrt(dim), centres and labels.

    `alike` = 1 gives all images the same embedding, as an untrained network nearly does.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(num_classes, dim, generator=generator))
    common, own = (torch.randn(rows, dim, generator=generator) for rows in (1, batch))
    embeddings = math.sqrt(alike) * common + math.sqrt(1 - alike) * own
    return embeddings, centres, torch.randperm(num_classes, generator=generator)[:batch]


def _first_loss(margin: Margin, num_classes: int, dim: int, batch: int, alike: float, seed: int, length: float = 1.0) -> float:
    """Return a dense first loss, of embeddings whose length is this multiple of sqrt(dim)."""
    embeddings, centres, labels = _random_step(num_classes, dim, batch, alike, seed)
    norm = length * embeddings.norm(dim=1)
    losses, _ = losses_of_cosines(margin, cosines_of(embeddings, centres), norm, labels, seed=seed)
    of_all = margin.weight * (1 - margin.margin) if isinstance(margin, AdaptiveFace) else 0.0
    return float(losses.detach().mean()) + of_all


@pytest.mark.parametrize("alike", [0.0, 1.0])
@pytest.mark.parametrize(
    ("num_classes", "dim", "batch", "scale"), [(3000, 512, 16, 64), (3000, 512, 256, 64), (100, 64, 64, 16), (2000, 512, 2, 64)]
)
def test_sound_labels_are_found_sound_at_any_batch(num_classes: int, dim: int, batch: int, scale: float, alike: float):
    margin = _arcface(scale)
    losses = [_first_loss(margin, num_classes, dim, batch, alike, seed) for seed in range(10)]
    expected, tolerance = expected_first_loss(margin, FirstStep(num_classes, dim, batch))
    verdicts = [abs(loss - expected) <= tolerance for loss in losses]
    assert sum(verdicts) >= 9  # three standard deviations: one in 370 is beyond them
    assert judge_first_loss(losses[0], margin, FirstStep(num_classes, dim, batch))[1] == verdicts[0]
    standard_error = tolerance / 3 / math.sqrt(len(losses))
    assert abs(sum(losses) / len(losses) - expected) < 4 * standard_error


def test_a_wrong_scale_margin_or_number_of_classes_is_found():
    margin = _arcface()
    for loss in (
        _first_loss(_arcface(32.0), 8000, 512, 256, 1.0, 0),
        _first_loss(build_margin("cosface", scale=64.0, margin=0.35), 8000, 512, 256, 1.0, 0),
        _first_loss(margin, 1000, 512, 256, 1.0, 0),
    ):
        text, sound = judge_first_loss(loss, margin, FirstStep(8000, 512, 256))
        assert not sound and text.endswith("check labels, number of classes and loss.scale")


@pytest.mark.parametrize(  # in 64 dimensions few negatives dominate the sum
    ("name", "several", "dim"),
    [("arcface", 1, 64), ("sphereface2", 1, 64), ("npcface", 1, 64), ("sphereface2", 3, 64), ("arcface", 1, 512)],
)
def test_many_classes_are_estimated_as_if_all_were_drawn(name: str, several: int, dim: int, monkeypatch: pytest.MonkeyPatch):
    margin, step = build_margin(name), FirstStep(30_000, dim, 1024, sub_centers=several)
    margin.prepare(30_000, 30_000)
    few = expected_first_loss(margin, step)
    monkeypatch.setattr(first_loss, "_NEAREST", 100_000)
    every = expected_first_loss(margin, step)
    assert abs(few.expected - every.expected) < 3 * math.sqrt(2 / 128) * every.tolerance / 3  # of two means of 128
    assert few.tolerance == pytest.approx(every.tolerance, rel=0.4)


def test_the_estimate_for_millions_of_classes_is_that_of_the_formula_and_is_sharp():
    for scale in (16.0, 32.0, 64.0):
        found = expected_first_loss(build_margin("normface", scale=scale), FirstStep(10_000_000, 512, 1024))
        assert found.expected == pytest.approx(math.log(1e7) + scale**2 / 1024, abs=0.02) and found.tolerance == 0.3


def test_no_global_random_number_is_drawn():
    states = torch.get_rng_state(), random.getstate()
    for name in list(MARGINS):
        expected_first_loss(build_margin(name), FirstStep(100_000 if name == "arcface" else 100, 64, 64))
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


@pytest.mark.parametrize("name", list(MARGINS))
def test_every_loss_is_found_sound_on_random_embeddings(name: str):
    margin = build_margin(name)
    margin.prepare(2000, 2000)
    expected, tolerance = expected_first_loss(margin, FirstStep(2000, 128, 32))
    for alike in (0.0, 1.0):
        losses = [_first_loss(margin, 2000, 128, 32, alike, seed) for seed in range(10)]
        assert sum(abs(loss - expected) <= tolerance for loss in losses) >= 9
        assert abs(sum(losses) / len(losses) - expected) < tolerance / 2


@pytest.mark.parametrize("name", ["sphereface", "magface"])
def test_losses_that_depend_on_the_length_of_embeddings_have_a_wider_tolerance(name: str):
    margin = build_margin(name)
    for length in (0.75, 1.0, 1.35):
        assert judge_first_loss(_first_loss(margin, 4000, 256, 64, 0.5, 1, length), margin, FirstStep(4000, 256, 64))[1]
    step = FirstStep(4000, 256, 64)
    assert expected_first_loss(margin, step).tolerance > 1.5 * expected_first_loss(build_margin("adacos"), step).tolerance
    assert not judge_first_loss(_first_loss(margin, 4000, 256, 64, 0.5, 1, 4.0), margin, FirstStep(4000, 256, 64))[1]


@pytest.mark.parametrize("name", ["sphereface2", "uniface", "curricularface", "qamface", "arcnegface"])
def test_a_wrong_number_of_classes_is_found_with_any_function_of_the_negatives(name: str):
    margin = build_margin(name)
    margin.prepare(8000, 8000)
    loss = _first_loss(margin, 500, 512, 256, 1.0, 0)
    assert not judge_first_loss(loss, margin, FirstStep(8000, 512, 256))[1]


@pytest.mark.parametrize("name", ["uniface", "adacos", "arcface"])
def test_what_the_first_step_trained_is_taken_back(name: str):
    changes = {"margin_start": 0.5, "margin_steps": 4} if name == "arcface" else {}
    margin = build_margin(name, **changes)
    margin.prepare(2000, 2000)
    loss = _first_loss(margin, 2000, 128, 32, 0.0, 1)
    margin.at_step(4)
    for value in (*margin.parameters(), *margin.buffers()):
        value.data.add_(30.0)
    assert not judge_first_loss(loss, margin, FirstStep(2000, 128, 32))[1]
    assert judge_first_loss(loss, margin, FirstStep(2000, 128, 32, prepared=(2000, 2000)))[1]


@pytest.mark.parametrize("name", ["cosface", "mv_softmax", "uniface"])
def test_weighted_classes_stand_for_all(name: str):
    margin = build_margin(name)
    embeddings, centres, labels = _random_step(4000, 256, 64, 0.0, 3)
    left_out = torch.ones(4000, dtype=torch.bool)
    left_out[labels], left_out[::8] = False, False
    weights = torch.where(left_out, 0.0, math.log(3936 / ((~left_out).sum().item() - 64)))
    weights[labels] = 0.0
    cosine, active = cosines_of(embeddings, centres), int((~left_out).sum())
    margin.prepare(4000, 4000)
    losses, _ = losses_of_cosines(margin, cosine, embeddings.norm(dim=1), labels, left_out, weights)
    assert judge_first_loss(float(losses.detach().mean()), margin, FirstStep(active, 256, 64, 4000))[1]
    difference = expected_first_loss(margin, FirstStep(active, 256, 64, 4000)).expected
    difference -= expected_first_loss(margin, FirstStep(active, 256, 64)).expected
    assert difference == pytest.approx(math.log(4000 / active), abs=0.1) or name == "uniface"
    assert difference > 1


def test_focal_factor_and_label_smoothing_are_known():
    for margin, num_classes, dim, batch in (
        (build_margin("cosface"), 2000, 256, 64),
        (build_margin("normface", scale=4.0), 10, 64, 10),
    ):
        cosine = cosines_of(*_random_step(num_classes, dim, batch, 0.0, 2)[:2])
        labels = _random_step(num_classes, dim, batch, 0.0, 2)[2]
        target = margin.target(cosine.gather(1, labels[:, None]).squeeze(1), torch.ones(batch))
        logits = (margin.scale * cosine).scatter(1, labels[:, None], target[:, None])
        loss = F.cross_entropy(logits, labels, label_smoothing=0.2)
        step = FirstStep(num_classes, dim, batch, label_smoothing=0.2)
        assert judge_first_loss(loss.item(), margin, FirstStep(num_classes, dim, batch, label_smoothing=0.2))[1]
        plain = F.cross_entropy(logits, labels, reduction="none")
        focal = (plain * (1 - torch.exp(-plain)) ** 4).mean()
        assert judge_first_loss(focal.item(), margin, FirstStep(num_classes, dim, batch, focal=4.0))[1]
        changed = expected_first_loss(margin, step).expected, expected_first_loss(margin, step._replace(focal=4.0)).expected
        usual = expected_first_loss(margin, FirstStep(num_classes, dim, batch)).expected
        assert (usual - changed[0] > 2.0) if num_classes == 2000 else (changed[0] - changed[1] > 0.3)


@pytest.mark.parametrize("name", ["arcface", "curricularface", "sphereface2"])
def test_the_nearest_of_several_sub_centers_is_expected(name: str):
    num_classes, dim, batch, several, losses = 2000, 256, 64, 3, []
    margin = build_margin(name)
    margin.prepare(num_classes, num_classes)
    for seed in range(10):
        embeddings, centres, labels = _random_step(num_classes * several, dim, batch, 0.5, seed)
        cosine = cosines_of(embeddings, centres).view(batch, num_classes, several).amax(dim=2)
        found, _ = losses_of_cosines(margin, cosine, embeddings.norm(dim=1), labels % num_classes, seed=seed)
        losses.append(float(found.detach().mean()))
    expected, tolerance = expected_first_loss(margin, FirstStep(num_classes, dim, batch, sub_centers=several))
    usual = expected_first_loss(margin, FirstStep(num_classes, dim, batch)).expected
    mean = sum(losses) / len(losses)
    assert abs(mean - expected) < min(4 * tolerance / 3 / len(losses) ** 0.5, abs(expected - usual) / 4)
    assert judge_first_loss(mean, margin, FirstStep(num_classes, dim, batch, sub_centers=several))[1]


def test_a_loss_that_cannot_be_foretold_is_called_sound_and_the_line_says_so():
    class Unknown(Margin):
        def target(self, cosine: Tensor, norm: Tensor, state: object = None) -> Tensor:
            return cosine * math.inf

    text, sound = judge_first_loss(3.0, Unknown(), FirstStep(100, 64, 64))
    assert sound and text == "first loss 3.000 for 100 active classes; what to expect of Unknown is not known"


@pytest.mark.parametrize("correction", ["none", "log_r"])
@pytest.mark.parametrize("name", ["cosface", "uniface", "sphereface2"])
def test_a_batch_that_fills_the_budget_of_the_sample_is_found_sound(name: str, correction: str):
    """As with 500 identities, 128 images and rate 0.1: no class is drawn, so none stands for others."""
    head = PartialFC(build_margin(name, scale=16.0), 500, 512, config=HeadConfig(0.1, logit_correction=correction))
    generator = torch.Generator().manual_seed(1)
    head.begin_step(torch.randperm(500, generator=generator)[:128][None], 0)
    loss = head(torch.randn(128, 512, generator=generator))
    head.step(0.1)
    log = SimpleNamespace(info=(lines := []).append, warn=pytest.fail)
    train.judge_losses({"softmax": float(loss)}, SimpleNamespace(heads={"softmax": head}), 512, log)
    assert len(lines) == 1 and lines[0].endswith("for 128 active classes")
