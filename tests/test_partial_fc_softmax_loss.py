"""Every loss through the real head against the slow references in float64: values, gradients, updates and states."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from head_losses import CASES, Setting, compare_steps
from loss_cases import ONE_REDUCTION, SUMS
from loss_references import entropy_weights as reference_weights
from rounding import rounding_bound
from waiting import Syncs

from losses import MARGINS, build_margin
from partial_fc import HeadConfig, PartialFC
from partial_fc.centres.shard import slots_of_classes
from partial_fc.kernels import KERNELS
from partial_fc.kernels.plain import PlainKernels
from partial_fc.softmax.loss import entropy_weights

pytestmark = pytest.mark.numeric

# one of each way through the head: fast, running maxima, a scale of each sample or of the batch, hard negatives, each other
# function, norms, numbers of classes, sums
WAYS = (
    "cosface", "cosface, wide", "sphereface", "adacos", "npcface", "circle", "li_arcface", "magface", "adaptiveface", "uniface",
)  # fmt: skip
SETTINGS = {
    "filter": Setting(limit=0.3),
    "weights": Setting(rate=0.5, correction="log_r"),
    "focal": Setting(rate=0.7, focal=2.0),
    "gentle focal": Setting(focal=0.5, kernels="plain"),
    "smoothing": Setting(smoothing=0.1),
    "smoothing of sampled and weighted classes": Setting(smoothing=0.1, rate=0.6, correction="log_r"),
    "all at once": Setting(rate=0.7, limit=0.3, correction="log_r", focal=1.5, smoothing=0.1, cache_mb=0),
    "two micro-batches": Setting(rate=0.8, accumulation=2),
    "two micro-batches, smoothing": Setting(accumulation=2, smoothing=0.2, limit=0.4),
    "lean": Setting(storage="lean", rate=0.6),
    "tiny": Setting(storage="tiny"),
    "bf16": Setting(dtype=torch.bfloat16, limit=0.3),
    "bf16, smoothing": Setting(dtype=torch.bfloat16, smoothing=0.1, kernels="plain"),
}


def test_every_loss_has_a_case():
    assert {case.partition(",")[0] for case in CASES} == set(list(MARGINS))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_the_reference(case: str, kernels: str):
    compare_steps(0, 1, case, Setting(rate=1.0 if kernels == "auto" else 0.6, kernels=kernels, cache_mb=int(kernels == "auto")))


# every setting with every third loss: all pairs would take minutes
PAIRS = [(case, setting) for i, case in enumerate(WAYS) for j, setting in enumerate(SETTINGS) if (i + j) % 3 == 0]


@pytest.mark.parametrize(("case", "setting"), PAIRS)
def test_what_a_head_does_besides_equals_the_reference(case: str, setting: str):
    chosen = SETTINGS[setting]
    if case in SUMS:  # no probabilities to bend
        chosen = chosen._replace(focal=0.0, smoothing=0.0)
    compare_steps(0, 1, case, chosen)


@pytest.mark.parametrize("focal", [0.5, 1.0, 2.0])
def test_samples_that_are_nearly_certain_have_the_gradient_of_the_focal_loss(focal: float):
    dim, scale = 64, 40.0
    head = PartialFC(build_margin("cosface", scale=scale, margin=0.2), 50, dim, config=HeadConfig(focal=focal))
    labels = torch.arange(12)
    centres = F.normalize(head.centres[slots_of_classes(np.arange(50), 50, 0)].double())
    noise = 0.3 * F.normalize(torch.randn(12, dim, generator=torch.Generator().manual_seed(1)))
    x = (centres[labels] + noise).float().requires_grad_()
    head.begin_step(labels[None], 0)
    head(x).backward()
    exact = x.detach().double().requires_grad_()
    logits = scale * (F.normalize(exact) @ centres.t() - 0.2 * F.one_hot(labels, 50))
    target = logits.gather(1, labels[:, None])[:, 0]
    apart = logits.masked_fill(F.one_hot(labels, 50).bool(), -torch.inf).logsumexp(1) - target
    assert apart.min().item() > -28 and apart.max().item() < -14  # exp(apart) is lost beside t; its cube is a number of fp32
    (F.softplus(apart) * torch.sigmoid(apart) ** focal).mean().backward()
    errors = (x.grad.double() - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    assert float(errors.max()) < (1 + focal) * scale * rounding_bound(torch.float32, dim)


@pytest.mark.parametrize("case", ["cosface", "arcface", "magface", "adaptiveface"])
@pytest.mark.parametrize(
    "setting",
    [
        Setting(entropy=True),
        Setting(entropy=True, rate=0.7, cache_mb=0, accumulation=2, kernels="plain"),
        Setting(entropy=True, focal=1.5, smoothing=0.1, sub_centers=3),
    ],
)
def test_weights_by_entropy_equal_the_reference(case: str, setting: Setting):
    compare_steps(0, 1, case, setting)


@pytest.mark.parametrize("count", [1, 2, 128])
def test_the_weights_are_those_at_the_end_of_the_rounds_and_of_equal_entropies_one_number(count: int):
    rng = np.random.default_rng(count)
    for entropy in (rng.uniform(0, 8, count), rng.gamma(0.5, size=count), np.exp(rng.normal(-4, 2, count))):
        found = entropy_weights(torch.from_numpy(entropy).float()).double().numpy()
        np.testing.assert_allclose(found, reference_weights(entropy), rtol=0, atol=1e-4)
    for value, weight in ((3.0, 1.4717), (0.0, 1.0158)):
        found = entropy_weights(torch.full((count,), value))
        torch.testing.assert_close(found, torch.full((count,), weight), rtol=0, atol=1e-4)


def test_the_weights_are_those_of_the_authors():
    """What gauss_unif of facechain (face_module/TopoFR/GUM.py) returned for these entropies, each with both signs."""
    entropy = torch.tensor([0.0, 0.01, 0.02, 0.05, 0.1, 0.4, 1.5, 3.0])
    found = 2.0 - entropy_weights(entropy)
    torch.testing.assert_close(
        found, torch.tensor([0.979475, 0.979219, 0.978433, 0.972057, 0.930923, 7.81e-8, 0.0, 0.0]), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(("key", "value"), [("focal", 2.0), ("label_smoothing", 0.1)])
def test_a_sum_over_classes_takes_neither_focal_weights_nor_label_smoothing(name: str, key: str, value: float):
    with pytest.raises(ValueError, match=rf"loss\.{key} must be 0 for .*, got {value}: .* Set loss\.{key}=0"):
        PartialFC(build_margin(name), 20, 8, config=HeadConfig(**{key: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_is_not_good_changes_nothing(case: str, kernels: str):
    margin = build_margin(case.partition(",")[0], **CASES[case].arguments)
    head = PartialFC(margin, 20, 8, config=HeadConfig(kernels=kernels))
    of_margin = list(margin.state_dict().values())
    everything = [*of_margin, *head.shard_state().values()]
    before = [tensor.clone() for tensor in everything]
    for step, infinite in enumerate((True, False, False)):
        x = 20.0 * torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        x[2, 3] = torch.inf if infinite else x[2, 3]
        head.begin_step(torch.tensor([[3, 4, 3, 9]]), step)
        head(x)
        head.step(0.1, None if infinite else torch.tensor(step == 2))
        changed = [not torch.equal(now, was) for now, was in zip(everything, before, strict=True)]
        assert any(changed) == (step == 2)
        if step == 2:
            assert all(changed[: len(of_margin)])


@pytest.mark.parametrize("case", WAYS)
def test_only_the_negatives_of_one_reduction_are_weighed_by_entropy(case: str):
    margin = build_margin(case.partition(",")[0], **CASES[case].arguments)
    of_margin = "so large" if case == "cosface, wide" else type(margin).__name__
    wrong = {of_margin: {}} if case not in ONE_REDUCTION else {}
    wrong |= {"head.logit_correction": {"logit_correction": "log_r"}, "head.inter": {"interclass_filtering_threshold": 0.4}}
    wrong |= {"head.matmul_dtype=bf16": {"matmul_dtype": torch.bfloat16}}
    for words, own in wrong.items():
        with pytest.raises(ValueError, match=rf"loss\.entropy_weights must be false with .*{words}.*: it needs"):
            PartialFC(margin, 40, 8, config=HeadConfig(0.5, entropy_weights=True, **own))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_nothing_where_the_kernels_read_the_flag(case: str, monkeypatch: pytest.MonkeyPatch):
    """As on CUDA with Triton. Only the update of the centres is left out: in plain torch it asks whether the step is good."""
    monkeypatch.setattr(PlainKernels, "reads_flag", True)
    monkeypatch.setattr(PlainKernels, "update_rows", lambda *given: None)
    bent = {} if case in SUMS else {"focal": 2.0, "label_smoothing": 0.1}
    arguments = CASES[case].arguments | ({"every": 2} if case == "kappaface" else {})
    every = {"interclass_filtering_threshold": 0.4, "logit_correction": "log_r"}
    for own in (every, {"entropy_weights": True}) if case in ONE_REDUCTION else (every,):
        margin = build_margin(case.partition(",")[0], **arguments)
        head = PartialFC(margin, 40, 8, config=HeadConfig(0.5, kernels="plain", cache_mb=1, **bent, **own))  # type: ignore[arg-type]
        for step in range(2):
            head.begin_step(torch.tensor([[3, 4, 3, 9]]), step)
            with Syncs() as syncs:
                head(torch.randn(4, 8).requires_grad_()).backward()
                head.step(0.1)
            assert not syncs.found
