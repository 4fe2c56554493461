"""Makes the files of an export in one folder, compares each with the network, and says what they are in tables.

Shapes: n = images, S = image_size, D = embedding size.
"""

import argparse
import copy
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data.base import FaceDataset
from eval.embed import inference_mode
from eval.input_contract import InputContract
from eval.networks import Network
from eval.pair_sets.bin_file import PairSet
from utils.image import normalise

from .checks import BATCHES, PARITY, Timing, accuracies, compare, measure, open_file, opened_for_evaluation
from .graph import LARGEST_FILE, Traced, deployed, to_onnx, trace, write_onnx, write_pt2
from .input_contract import describe, write_metadata
from .precision import calibration_batches, to_fp16, to_int8

_ROUNDING = 1e-9  # percent points: a loss of 92.0 -> 91.5 % is computed as a little more than 0.5


class Source(NamedTuple):
    """What is exported, and what it is compared on."""

    network: Network
    sets: Sequence[PairSet]  # for the accuracy of fp16 and int8
    calibration: FaceDataset | None  # for int8
    pixels: np.ndarray  # (n, S, S, 3) uint8 RGB
    reference: np.ndarray  # (n, D), their raw embeddings by the network


class Made(NamedTuple):
    """An exported file of one precision."""

    files: Sequence[Path]  # the model, and perhaps its weights
    contract: InputContract
    difference: float  # the largest of an embedding, relative to its length
    cosine: float  # the smallest between embeddings of file and network

    @property
    def megabytes(self) -> float:
        """Size of the files."""
        return sum(path.stat().st_size for path in self.files) / 1e6


class Exporter:
    """The work of one export.

    Args:
        options: of scripts.deploy.export.
        folder: for the files, which have the name of --out there.
    """

    def __init__(self, options: argparse.Namespace, source: Source, folder: Path) -> None:
        self.options, self.source, self.folder = options, source, folder
        self.accuracies: dict[str, dict[str, float]] = {}

    def make(self) -> tuple[Sequence[Path], dict[str, Any]]:
        """Make and check the files; return those of --precision, and what is known of them as plain values.

        Raises:
            ValueError: a file is not like the network.
        """
        options, source = self.options, self.source
        module = deployed(source.network, options.with_preprocess, options.flip)
        print(f"tracing {source.network.title}", flush=True)
        traced = trace(module, source.network.image_size)
        made = {"fp32": self._make_fp32(traced)}
        wanted = [options.precision] if options.precision != "fp32" else []
        if options.measure and options.to == "onnx":
            wanted = ["fp16", *(["int8"] if source.calibration is not None else [])]
        for precision in wanted:
            made[precision] = self._make_smaller(precision, made["fp32"])
        if wanted:
            self._measure_accuracies(made)
        chosen = made[options.precision]
        facts = {
            "network": source.network.title,
            "contract": asdict(chosen.contract),
            "folded": traced.folded,
            "norms": traced.norms,
            "batches": list(BATCHES),
            "images": f"of {source.sets[0].name}" if source.sets else "drawn",
            "files": {
                precision: {"megabytes": found.megabytes, "difference": found.difference, "cosine": found.cosine}
                for precision, found in made.items()
            },
            "accuracies": self.accuracies,
            "times": self._times(made) if options.measure else {},
            "threads": options.threads,
        }
        return chosen.files, facts

    def _describe(self, precision: str) -> InputContract:
        options, source = self.options, self.source
        size = source.reference.shape[1]
        return describe(source.network, options.backbone or "", size, options.with_preprocess, options.flip, precision)

    def _path(self, precision: str) -> Path:
        """Return the path of a file, in a folder of its own, because it refers to its weights by their name."""
        folder = self.folder / precision
        folder.mkdir()
        return folder / self.options.out.name

    def _make_fp32(self, traced: Traced) -> Made:
        contract, path = self._describe("fp32"), self._path("fp32")
        files: Sequence[Path] = [path]
        print(f"writing {path.suffix[1:]}, and comparing it with torch", flush=True)
        if self.options.to == "onnx":
            files = write_onnx(to_onnx(traced.program, contract), path)
        else:
            write_pt2(traced.program, path, contract)
        made = self._compared(files, contract)
        if not made.difference <= PARITY:
            raise ValueError(
                f"--out: nothing is written: the exported network differs from torch by {made.difference:.2g} of the length of "
                f"an embedding in batches of {', '.join(map(str, BATCHES))}, and may differ by {PARITY:g}"
            )
        return made

    def _make_smaller(self, precision: str, full: Made) -> Made:
        """Return a file of 16 or 8 bits, made from the fp32 one."""
        options, source = self.options, self.source
        if len(full.files) > 1:
            raise ValueError(f"--precision {precision} and --measure are for networks of at most {LARGEST_FILE / 1e9:g} GB")
        contract, path = self._describe(precision), self._path(precision)
        model = importlib.import_module("onnx").load(full.files[0])
        if precision == "fp16":
            model = to_fp16(model)
        else:
            assert source.calibration is not None
            batches = calibration_batches(source.calibration, contract, options.calibration_images)
            model = to_int8(model, batches, path.parent)
        write_metadata(model, contract)
        made = self._compared(write_onnx(model, path), contract)
        if made.difference == np.inf:
            raise ValueError(f"--precision {precision}: its embeddings are not finite; take fp32")
        return made

    def _compared(self, files: Sequence[Path], contract: InputContract) -> Made:
        """Return a file with its distance from the network; ValueError if it cannot be run."""
        try:
            run = open_file(files[0], contract, self.options.threads)
            found = compare(run, self.source.pixels, self.source.reference, contract)
        except (OSError, ValueError):
            raise
        except Exception as error:  # of onnxruntime or torch, which have many kinds
            what = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"--out: nothing is written: the exported network does not run: {what:.300}") from None
        return Made(files, contract, *found)

    def _measure_accuracies(self, made: Mapping[str, Made]) -> None:
        """Score the network and its smaller files on the sets; raise ValueError if --precision loses too much."""
        options, source = self.options, self.source
        settings = (source.sets, source.network.image_size, options.batch_size, options.threads)
        models: dict[str, Callable[[], torch.nn.Module]] = {"fp32": lambda: source.network.model}
        for precision in [precision for precision in made if precision != "fp32"]:
            models[precision] = functools.partial(opened_for_evaluation, made[precision].files[0], options.threads)
        for precision, model in models.items() if source.sets else ():
            self.accuracies[precision] = {}
            for name, accuracy in accuracies(model(), *settings):
                print(f"{precision} {name}: {100 * accuracy:.2f} %", flush=True)
                self.accuracies[precision][name] = accuracy
        if options.max_loss is None:
            return
        before, after = self.accuracies["fp32"], self.accuracies[options.precision]
        lost, name = max((100 * (before[name] - after[name]), name) for name in after)
        if lost > options.max_loss + _ROUNDING:
            raise ValueError(
                f"--max-loss: nothing is written: {options.precision} loses {lost:.2f} percent points of accuracy on {name}, "
                f"{100 * before[name]:.2f} -> {100 * after[name]:.2f} %, and may lose {options.max_loss:g}"
            )

    def _times(self, made: Mapping[str, Made]) -> dict[str, dict[str, dict[str, float]]]:
        """Return the times of a forward pass, by network and batch."""
        options, source = self.options, self.source
        model = copy.copy(source.network.model)

        def by_torch(pixels: np.ndarray) -> None:
            images = normalise(torch.from_numpy(pixels))
            model(torch.cat([images, images.flip(3)]) if options.flip else images)  # as much work as that of the files

        runs: dict[str, Callable[[np.ndarray], object]] = {"torch fp32": by_torch}
        program = "onnxruntime" if options.to == "onnx" else "torch.export"
        for precision, found in made.items():
            runs[f"{program} {precision}"] = open_file(found.files[0], found.contract, options.threads)
        times: dict[str, dict[str, dict[str, float]]] = {name: {} for name in runs}
        with inference_mode(model):
            for batch in (1, options.measure_batch):
                pixels = np.resize(source.pixels, (batch, *source.pixels.shape[1:]))
                for name, timing in measure(runs, pixels, options.threads).items():
                    times[name][str(batch)] = timing._asdict()
        return times


def table(facts: Mapping[str, Any]) -> str:
    """Return the tables of an export in plain text."""
    sets = list(facts["accuracies"].get("fp32", {}))
    rows = [["precision", "MB", "difference", "cosine", *(f"{name} %" for name in sets)]]
    for precision, found in facts["files"].items():
        cells = [f"{found['megabytes']:.2f}", f"{found['difference']:.1e}", f"{found['cosine']:.5f}"]
        scores = facts["accuracies"].get(precision, {})
        cells += [
            f"{100 * scores[name]:.2f} ({100 * (scores[name] - facts['accuracies']['fp32'][name]):+.2f})" for name in sets
        ]
        rows.append([precision, *cells])
    batches = " and ".join([", ".join(map(str, facts["batches"][:-1])), str(facts["batches"][-1])])
    lines = _aligned(rows)
    lines.append(
        f"difference: the largest between an embedding and that of torch, relative to its length; cosine: the smallest. On "
        f"{sum(facts['batches'])} images, {facts['images']}, in batches of {batches}"
    )
    if facts["times"]:
        numbers = list(next(iter(facts["times"].values())))
        rows = [["forward pass, median (quartiles)", *(f"batch {number}: ms" for number in numbers)]]
        for name, found in facts["times"].items():
            rows.append([name, *(_timing(Timing(**found[number])) for number in numbers)])
        lines += ["", *_aligned(rows), f"{facts['threads']} thread(s), the networks in turn"]
    return "\n".join(lines)


def _timing(found: Timing) -> str:
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
