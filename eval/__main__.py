"""Score a trained network on verification sets: python -m eval RUN --targets lfw cfp_fp agedb_30.

RUN is a run folder (its newest checkpoint, or the best), one checkpoint folder, or a weights file together with --backbone,
such as arcface_torch's backbone.pth. Works under torchrun too; all processes share the images.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backbones import build_backbone
from utils import distributed
from utils.checkpoint import best_checkpoint, find_checkpoint, list_checkpoints, read_backbone, read_manifest, read_tensors
from utils.distributed import together
from utils.optim import AUTOCAST
from utils.program import guarded
from utils.randomness import derive

from .evaluate import evaluate, load_pair_sets
from .html_report import write_report
from .report import format_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and evaluate; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m eval", description="Verification accuracy, TAR at FAR, EER and AUC of a network."
    )
    parser.add_argument("run", type=Path, help="run folder, checkpoint folder, or weights file (.safetensors, .pt, .pth)")
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="sets to score; default: those of the run's config")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with NAME.bin; default: that of the run's config")
    parser.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    parser.add_argument("--backbone", metavar="NAME", help="for a weights file: r18, r34, r50, r100, r200 or mbf")
    parser.add_argument("--embedding-size", type=int, default=512, metavar="D", help="for a weights file (default 512)")
    parser.add_argument("--width", type=float, default=1.0, help="for a weights file: factor on the channels (default 1)")
    parser.add_argument("--untrained", action="store_true", help="the run's network before any training, for comparison")
    parser.add_argument("--precision", choices=AUTOCAST, default="fp32", help="of the forward pass (default fp32)")
    parser.add_argument("--batch-size", type=int, default=256, help="images per forward pass and process (default 256)")
    parser.add_argument("--threads", type=int, default=2, help="decoder threads per process (default 2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="also write report.html there, its pictures, results.json and results.md"
    )
    options = parser.parse_args(arguments)
    return guarded(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Evaluate as the command line says and print the table on rank 0."""
    world = distributed.start(options.device)
    with together(world):
        model, name, config = load_model(options)
        targets = options.targets or config.get("eval", {}).get("targets")
        folder = options.data or config.get("eval", {}).get("path") or config.get("data", {}).get("path")
        if not targets or not folder:
            raise ValueError("say which sets to score: --targets NAME ... --data FOLDER")
        pair_sets = load_pair_sets(folder, targets)
    model = model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    results = {}
    for target, result in evaluate(model, pair_sets, world, options.batch_size, AUTOCAST[options.precision], options.threads):
        results[target] = result
        if world.rank == 0 and len(pair_sets) > 1:
            print(f"{target}: {100 * result.accuracy:.2f} %", flush=True)
    if world.rank != 0:
        return
    print(f"\n{name}\n{format_table(results)}")
    if options.report:
        write_report(options.report, name, results, pair_sets)
        print(f"\nreport: {options.report / 'report.html'}")


def load_model(options: argparse.Namespace) -> tuple[nn.Module, str, dict[str, Any]]:
    """Return (network with its weights, what to call it, the run's configuration or {})."""
    if options.run.is_file():
        if not options.backbone:
            raise ValueError(f"{options.run} is a weights file; say what it holds with --backbone NAME")
        model = build_backbone(options.backbone, options.embedding_size, options.width)
        return fill(model, read_tensors(options.run), str(options.run)), str(options.run), {}
    if not options.run.exists():
        raise ValueError(f"no run folder, checkpoint or weights file at {options.run}")
    checkpoint = find_checkpoint(options.run)
    if options.best:
        checkpoint = best_checkpoint(list_checkpoints(options.run)) or checkpoint
    config: dict[str, Any] = read_manifest(checkpoint)["config"]
    section = config["backbone"]
    torch.manual_seed(derive(config.get("run", {}).get("seed", 0), "backbone"))  # as train.py does before it builds
    model = build_backbone(section["name"], section["embedding_size"], section["width"])
    if options.untrained:
        return model, f"{section['name']} before training", config
    return fill(model, read_backbone(checkpoint), str(checkpoint)), str(checkpoint), config


def fill(model: nn.Module, weights: dict[str, torch.Tensor], source: str) -> nn.Module:
    """Load the weights into the model; a wrong architecture is one line that names the first difference."""
    expected = model.state_dict()
    for name in [*expected, *weights]:
        if name not in weights or name not in expected or weights[name].shape != expected[name].shape:
            here = tuple(weights[name].shape) if name in weights else "missing"
            wanted = tuple(expected[name].shape) if name in expected else "absent"
            raise ValueError(
                f"{source}: {name} is {here}, this backbone has it {wanted}; check --backbone, --embedding-size, --width"
            )
    model.load_state_dict(weights)
    return model


if __name__ == "__main__":
    raise SystemExit(main())
