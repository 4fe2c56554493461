"""Compare storage formats and sampling schemes of the head on a task of known difficulty.

face bench numerics [--json FILE]

Embeddings are noisy draws around fixed unit vectors, one per class, in families of four that are hard to tell apart. Only the
class centres train, with ArcFace and SGD. The results are the margin softmax loss over all classes on held-out embeddings,
and the mean cosine to the nearest wrong centre. There is no backbone: this ranks numerical formats and sampling schemes by how
well they optimise. It says nothing about the accuracy of face recognition.

Example: face bench numerics --quick
"""

import argparse
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from utils.cli import make_parser, progress
from utils.program import run_main

from .kit import add_common_arguments, write_json

_BATCH, _DIM, _LR = 512, 256, 0.02
_NEAREST = "bf16, round to nearest"

# name -> arguments of HeadConfig; the nearest-rounding variant is defined here, since the head has no such format
CASES: dict[str, dict[str, Any]] = {
    "exact": {},
    "lean": {"storage": "lean"},
    "tiny": {"storage": "tiny"},
    "mini": {"storage": "mini"},
    _NEAREST: {},
    "uniform, rate 0.2": {"sample_rate": 0.2},
    "neighbours, rate 0.2": {"sample_rate": 0.2, "sampling": "neighbours", "neighbours": 4, "neighbours_every": 30},
    "uniform, rate 0.2, decay": {"sample_rate": 0.2, "inactive_rows": "decay"},
}


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench numerics", __doc__)
    parser.add_argument("--classes", type=int, default=12288, help="identities")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each case; the table gives means")
    add_common_arguments(parser, "4096 classes, 40 steps, one seed: under a minute on two cores", device=False)
    options = parser.parse_args(arguments)
    if options.quick:
        options.classes, options.steps, options.seeds = 4096, 40, 1
    return run_main(compare, options)


def compare(options: argparse.Namespace) -> None:
    """Train every case and print the table."""
    means = class_means(options.classes)
    held_out = draw(means, torch.Generator().manual_seed(77), 2048)
    rows: list[dict[str, Any]] = []
    print(f"{options.classes} classes, {options.steps} steps of {_BATCH}, D = {_DIM}, mean of {options.seeds} seed(s)")
    print(f"{'case':<38} {'loss':>8} {'vs exact':>9} {'positive cos':>13} {'hardest negative':>17}")
    for name, arguments in CASES.items():
        runs = [train(means, arguments, name == _NEAREST, seed, options.steps, held_out) for seed in range(options.seeds)]
        row: dict[str, Any] = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        row["case"] = name
        row["relative_to_exact"] = row["loss"] / (rows[0]["loss"] if rows else row["loss"]) - 1.0
        rows.append(row)
        print(
            f"{name:<38} {row['loss']:>8.4f} {100 * row['relative_to_exact']:>8.2f}% {row['positive_cosine']:>13.4f} "
            f"{row['hardest_negative']:>17.4f}",
            flush=True,
        )
    write_json(options.json, {"classes": options.classes, "steps": options.steps, "rows": rows})


def class_means(num_classes: int) -> Tensor:
    """Return unit class means (C, D) in families of four whose members have a cosine of about 0.36."""
    generator = torch.Generator().manual_seed(1)
    directions = F.normalize(torch.randn(num_classes, _DIM, generator=generator))
    family = directions[torch.arange(num_classes) // 4 * 4]
    means = F.normalize(0.6 * family + 0.8 * directions)
    return means[torch.randperm(num_classes, generator=generator)]


def draw(means: Tensor, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Return (rows, D) unit embeddings around class means (C, D), and their classes."""
    labels = torch.randint(len(means), (rows,), generator=generator)
    noise = torch.randn(rows, _DIM, generator=generator)
    return F.normalize(means[labels] + 0.05 * noise), labels


def train(
    means: Tensor, arguments: dict[str, Any], nearest: bool, seed: int, steps: int, held_out: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Train the centres; return the figures on held-out embeddings."""
    margin = build_margin("arcface", scale=64.0, margin=0.5)
    head = PartialFC(margin, len(means), _DIM, seed=seed, config=HeadConfig(optimizer=RowSGD(0.9, 5e-4), **arguments))
    generator = torch.Generator().manual_seed(3 + seed)
    for step in progress(range(steps), steps, "training", "step", leave=False):
        embeddings, labels = draw(means, generator, _BATCH)
        head.begin_step(labels[None], step)
        head(embeddings)
        head.step(_LR * (1.0 - step / steps))
        if nearest:
            head.centres.copy_(head.centres.bfloat16())
            head.centre_store.refresh_norms()
    return score(head, *held_out)


def score(head: PartialFC, embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the margin softmax loss over all classes, the mean cosine to the target centre and to the nearest wrong one."""
    centres = F.normalize(head.shard_state()["centres"].float())[torch.from_numpy(head.shard_classes()).argsort()]
    cosine = embeddings @ centres.t()
    target_cosine = cosine.gather(1, labels[:, None])
    wrong = cosine.scatter(1, labels[:, None], -1.0).amax(dim=1)
    target = head.margin.target(target_cosine.squeeze(1), torch.ones(len(target_cosine)))
    logits = (head.margin.scale * cosine).scatter(1, labels[:, None], target[:, None])
    loss = F.cross_entropy(logits, labels)
    return {"loss": float(loss), "positive_cosine": float(target_cosine.mean()), "hardest_negative": float(wrong.mean())}


if __name__ == "__main__":
    raise SystemExit(main())
