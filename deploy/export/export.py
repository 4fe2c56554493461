"""Exports a network: makes the files in one folder, compares each with the network, and says what they are in tables.

Shapes: n = images, S = image_size, D = embedding size.
"""

import argparse
import copy
import functools
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from backbones import build_backbone
from data.base import FaceDataset
from eval.embed import inference_mode
from eval.foreign_networks import InputContract, check_outside_data, open_foreign
from eval.monitor import load_pair_sets
from eval.networks import Network, load_network
from eval.pair_sets.bin_file import PairSet
from utils.checkpoint.format import newest_run
from utils.checkpoint.tensor_file import NETWORK, flush, read_metadata
from utils.cli import warn
from utils.files import check_folder_of, shown, unfinished_folder, write_file
from utils.image import normalise
from utils.text import first_line, plain_table

from . import checks, graph
from .hub import ONNX, check_hub, complete, read_known

SUFFIXES = {"onnx": ".onnx", "pt2": ".pt2", "openvino": ".xml"}
_ROUNDING = 1e-9  # percent points: a loss of 92.0 -> 91.5 % is computed as a little more than 0.5


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


class Exporter(NamedTuple):
    """The work of one export: what is exported, and what it is compared on."""

    options: argparse.Namespace  # of face export
    folder: Path  # for the files, which have the name of --out there
    network: Network
    sets: Sequence[PairSet]  # for the accuracy of fp16 and int8
    calibration: FaceDataset | None  # for int8
    pixels: np.ndarray  # (n, S, S, 3) uint8 RGB
    reference: np.ndarray  # (n, D), their raw embeddings by the network

    def make(self) -> tuple[Sequence[Path], dict[str, Any]]:
        """Make and check the files; return those of --precision, and what is known of them as plain values.

        Raises:
            ValueError: a file is not like the network.
        """
        options = self.options
        contract = self._describe("fp32")
        if options.pack:  # before minutes of work
            {"insightface": checks.check_insightface, "hub": check_hub}[options.pack](self._describe(options.precision))
        module = graph.Deployed(self.network, options.with_preprocess, options.flip)
        print(f"tracing {self.network.title}", flush=True)
        program, folded, norms = graph.trace(module, self.network.image_size)
        made = {"fp32": self._make_fp32(program, contract)}
        wanted = [options.precision] if options.precision != "fp32" else []
        if options.measure and options.to == "onnx":
            wanted = ["fp16", *(["int8"] if self.calibration is not None else [])]
        for precision in wanted:
            made[precision] = self._make_smaller(precision, made["fp32"])
        accuracies = self._measure_accuracies(made) if wanted else {}
        chosen = made[options.precision]
        if options.pack == "insightface":
            checks.check_insightface_nodes(chosen.files[0])
        facts = {
            "network": self.network.title,
            "contract": chosen.contract._asdict(),
            "folded": folded,
            "norms": norms,
            "batches": list(checks.BATCHES),
            "images": f"of {self.sets[0].name}" if self.sets else "drawn",
            "files": {
                precision: {"megabytes": found.megabytes, "difference": found.difference, "cosine": found.cosine}
                for precision, found in made.items()
            },
            "accuracies": accuracies,
            "times": self._times(made) if options.measure else {},
            "threads": options.threads,
        }
        return chosen.files, facts

    def _describe(self, precision: str) -> InputContract:
        options, size = self.options, self.reference.shape[1]
        return graph.describe(self.network, options.backbone or "", size, options.with_preprocess, options.flip, precision)

    def _path(self, precision: str) -> Path:
        """Return the path of a file, in a folder of its own, because it refers to its weights by their name."""
        folder = self.folder / precision
        folder.mkdir()
        return folder / self.options.out.name

    def _make_fp32(self, program: torch.export.ExportedProgram, contract: InputContract) -> Made:
        path = self._path("fp32")
        files: Sequence[Path] = [path]
        print(f"writing {path.suffix[1:]}, and comparing it with torch", flush=True)
        if self.options.to == "pt2":
            graph.write_pt2(program, path, contract)
        else:
            write = graph.write_openvino if self.options.to == "openvino" else graph.write_onnx
            entry = "data" if self.options.pack == "insightface" else "images"
            files = write(graph.to_onnx(program, contract, entry), path)
        made = self._compared(files, contract)
        if not made.difference <= checks.PARITY:
            raise ValueError(
                f"--out: nothing is written: the exported network differs from torch by {made.difference:.2g} of the length of "
                f"an embedding in batches of {', '.join(map(str, checks.BATCHES))}, and may differ by {checks.PARITY:g}"
            )
        return made

    def _make_smaller(self, precision: str, full: Made) -> Made:
        """Return a file of 16 or 8 bits, made from the fp32 one."""
        if len(full.files) > 1:
            largest = f"{graph.LARGEST_FILE / 1e9:g} GB"
            raise ValueError(f"--precision {precision} and --measure are for networks of at most {largest}")
        contract, path = self._describe(precision), self._path(precision)
        model = importlib.import_module("onnx").load(full.files[0])
        if precision == "fp16":
            model = checks.to_fp16(model)
        else:
            assert self.calibration is not None
            count, entry = self.options.calibration_images, model.graph.input[0].name
            batches = checks.calibration_batches(self.calibration, contract, count, entry)
            model = checks.to_int8(model, batches, path.parent)
        graph.write_metadata(model, contract)
        made = self._compared(graph.write_onnx(model, path), contract)
        if made.difference == np.inf:
            raise ValueError(f"--precision {precision}: its embeddings are not finite; take fp32")
        return made

    def _compared(self, files: Sequence[Path], contract: InputContract) -> Made:
        """Return a file with its distance from the network; ValueError if it cannot be run."""
        try:
            run = checks.open_file(files[0], contract, self.options.threads)
            found = checks.compare(run, self.pixels, self.reference, contract)
        except (OSError, ValueError):
            raise
        except Exception as error:  # of onnxruntime or torch, which have many kinds
            what = first_line(error)
            raise ValueError(f"--out: nothing is written: the exported network does not run: {what:.300}") from None
        return Made(files, contract, *found)

    def _measure_accuracies(self, made: Mapping[str, Made]) -> dict[str, dict[str, float]]:
        """Score the network and its smaller files on the sets; raise ValueError if --precision loses too much."""
        options, found = self.options, dict[str, dict[str, float]]()
        settings = (self.sets, self.network.image_size, options.batch_size, options.threads)
        models: dict[str, Callable[[], torch.nn.Module]] = {"fp32": lambda: self.network.model}
        for precision in [precision for precision in made if precision != "fp32"]:
            models[precision] = functools.partial(open_foreign, made[precision].files[0], options.threads, trust_code=False)
        for precision, model in models.items() if self.sets else ():
            found[precision] = {}
            for name, accuracy in checks.accuracies(model(), *settings):
                print(f"{precision} {name}: {100 * accuracy:.2f} %", flush=True)
                found[precision][name] = accuracy
        if options.max_loss is None:
            return found
        before, after = found["fp32"], found[options.precision]
        lost, name = max((100 * (before[name] - after[name]), name) for name in after)
        if lost > options.max_loss + _ROUNDING:
            raise ValueError(
                f"--max-loss: nothing is written: {options.precision} loses {lost:.2f} percent points of accuracy on {name}, "
                f"{100 * before[name]:.2f} -> {100 * after[name]:.2f} %, and may lose {options.max_loss:g}"
            )
        return found

    def _times(self, made: Mapping[str, Made]) -> dict[str, dict[str, dict[str, float]]]:
        """Return the times of a forward pass, by network and batch."""
        options, model = self.options, copy.copy(self.network.model)

        def by_torch(pixels: np.ndarray) -> None:
            images = normalise(torch.from_numpy(pixels))
            model(torch.cat([images, images.flip(3)]) if options.flip else images)  # as much work as that of the files

        runs: dict[str, Callable[[np.ndarray], object]] = {"torch fp32": by_torch}
        program = {"onnx": "onnxruntime", "pt2": "torch.export", "openvino": "openvino"}[options.to]
        for precision, found in made.items():
            runs[f"{program} {precision}"] = checks.open_file(found.files[0], found.contract, options.threads)
        times: dict[str, dict[str, dict[str, float]]] = {name: {} for name in runs}
        with inference_mode(model):
            for batch in (1, options.measure_batch):
                pixels = np.resize(self.pixels, (batch, *self.pixels.shape[1:]))
                for name, timing in checks.measure(runs, pixels, options.threads).items():
                    times[name][str(batch)] = timing
        return times


def table(facts: Mapping[str, Any]) -> str:
    """Return the tables of an export in plain text."""
    sets = list(facts["accuracies"].get("fp32", {}))
    rows = [["precision", "MB", "difference", "cosine", *(f"{name} %" for name in sets)]]
    for precision, found in facts["files"].items():
        cells = [f"{found['megabytes']:.2f}", f"{found['difference']:.1e}", f"{found['cosine']:.5f}"]
        scores = facts["accuracies"].get(precision, {})
        cells += [
            # plus 0.0, which makes a 0.0 of -0.0
            f"{100 * scores[name]:.2f} ({round(100 * (scores[name] - facts['accuracies']['fp32'][name]), 2) + 0.0:+.2f})"
            for name in sets
        ]
        rows.append([precision, *cells])
    batches = " and ".join([", ".join(map(str, facts["batches"][:-1])), str(facts["batches"][-1])])
    lines = [plain_table(rows)]
    lines.append(
        f"difference: the largest between an embedding and that of torch, relative to its length; cosine: the smallest. On "
        f"{sum(facts['batches'])} images, {facts['images']}, in batches of {batches}"
    )
    if facts["times"]:
        numbers = list(next(iter(facts["times"].values())))
        rows = [["forward pass, median (quartiles)", *(f"batch {number}: ms" for number in numbers)]]
        for name, found in facts["times"].items():
            times = [found[number] for number in numbers]
            rows.append([name, *(f"{time['median']:.2f} ({time['low']:.2f} to {time['high']:.2f})" for time in times)])
        lines += ["", plain_table(rows), f"{facts['threads']} thread(s), the networks in turn"]
    return "\n".join(lines)


def export(options: argparse.Namespace) -> None:
    """Export according to the command line: write aside, check, and rename."""
    hub = options.out if options.pack == "hub" else None
    options.out = options.out / ONNX if hub else options.out
    options.run = options.run or newest_run()
    options.to = options.to or next((form for form, suffix in SUFFIXES.items() if options.out.suffix == suffix), None)
    _check(options)
    known = read_known(options) if hub else None
    network = load_network(options, build_backbone)
    sets = _verification_sets(options, network)
    calibration = None
    if options.precision == "int8" or (options.measure and options.to == "onnx" and (options.calibrate or network.config)):
        try:
            calibration = checks.calibration_set(options.calibrate, network.config)
        except ValueError as error:
            if options.precision == "int8" or options.calibrate:
                raise
            warn(f"the table has no int8: {error}")
    pixels = checks.images_to_compare(sets, network.image_size)
    reference = checks.embeddings_of(network.model, pixels, options.flip)
    if not np.isfinite(reference).all():
        raise ValueError(f"{network.name}: its embeddings are not finite; take an earlier checkpoint")
    with unfinished_folder(hub or options.out) as folder:
        files, facts = Exporter(options, folder, network, sets, calibration, pixels, reference).make()
        # weights first: the file is never without them
        moves = {file: options.out.with_name(file.name) for file in files[::-1]}
        if hub and known:
            complete(files[0].parent, options, network, facts["contract"], known)
            moves = {files[0].parent: hub}
        if hub or not options.overwrite:
            # again: one may have appeared, and there may be weights beside the file
            _require_new([*moves.values()], is_folder=bool(hub))
        before = _weights_beside(options.out)
        for file, target in moves.items():
            os.replace(file, target)
        if before is not None and before not in moves.values():
            before.unlink(missing_ok=True)
        flush((hub or options.out).absolute().parent)
    if options.json:
        write_file(options.json, f"{json.dumps({'file': str(options.out), **facts}, indent=1)}\n")
    _report(options, facts)


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not fit together, or a target that cannot be written, before any work."""
    if options.pack and options.to != "onnx":
        raise ValueError(f"--pack {options.pack} is for --to onnx, got {options.to or options.out}")
    if not options.to:
        raise ValueError(f"--out: the name of the file must end in .onnx, .pt2 or .xml, got {options.out}")
    if options.out.suffix != (suffix := SUFFIXES[options.to]):
        raise ValueError(f"--out: the name of the file must end in {suffix}, as --to {options.to} says, got {options.out}")
    for flag, path in (("--out", options.out), ("--json", options.json)):
        if path is not None and path.is_dir():
            raise ValueError(f"{flag}: {path} is a folder; choose another name")
        above = next((folder for folder in path.absolute().parents if folder.exists()), None) if path is not None else None
        if above is not None and not above.is_dir():
            raise ValueError(f"{flag}: {above} is a file, and must be a folder")
    hub = options.pack == "hub"
    if hub or not options.overwrite:
        _require_new([options.out.parent if hub else options.out], is_folder=hub)
    if hub and options.untrained:
        raise ValueError("--untrained is a network without a training, which --pack hub does not publish; leave it out")
    if not hub and (options.results or options.fields):
        raise ValueError("--results and --fields are for --pack hub; leave them out")
    if options.json is not None and options.json.absolute() == options.out.absolute():
        raise ValueError(f"--json must be another file than --out, got {options.json}")
    check_folder_of(options.json, "--json")
    if options.to != "onnx" and options.precision != "fp32":
        raise ValueError(f"--precision {options.precision} is for --to onnx; a {suffix} file has fp32 weights")
    if options.max_loss is not None and (options.precision == "fp32" or not 0 <= options.max_loss <= 100):
        raise ValueError(f"--max-loss is from 0 to 100, for --precision fp16 or int8, got {options.max_loss}")
    if options.calibrate and options.precision != "int8" and not (options.measure and options.to == "onnx"):
        raise ValueError("--calibrate is for --precision int8, or for the table of --measure; leave it out")
    if options.run.is_file() and not options.backbone and NETWORK not in read_metadata(options.run):
        raise ValueError(
            f"{options.run}: is a file; name the network of its weights with --backbone NAME, or give the folder of a run. A "
            "network in a file of its own (.onnx, .pt2, TorchScript) is not exported again"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("an export is the work of one process; start it without torchrun")
    if options.to != "pt2":
        graph.require_onnx(options.to)


def _require_new(paths: Sequence[Path], is_folder: bool) -> None:
    """Raise ValueError if there is a file of one of these names."""
    fix = "choose another name" if is_folder else "add --overwrite to replace it, or choose another name"
    for path in paths:
        if os.path.lexists(path):
            raise ValueError(f"--out: {path} exists; {fix}")


def _weights_beside(path: Path) -> Path | None:
    """Return the file beside an earlier ONNX file of this program that has its weights, None if they are in the file itself."""
    beside = path.with_name(f"{path.name}.data")
    try:
        return beside if path.suffix == ".onnx" and beside.resolve() in check_outside_data(path) else None
    except (OSError, ValueError):  # there is no earlier file, or it is none of this program
        return None


def _verification_sets(options: argparse.Namespace, network: Network) -> list[PairSet]:
    """Return the sets of the command line, else those of the run as far as this machine has them, with a warning if not."""
    sections = [section if isinstance(section := network.config.get(key, {}), dict) else {} for key in ("eval", "data")]
    folder = options.data or sections[0].get("path") or sections[1].get("path") or ""
    if options.targets:
        return load_pair_sets(folder, options.targets, "--targets", "--data")
    targets = sections[0].get("targets")
    if targets:
        try:
            return load_pair_sets(folder, targets, "the run's configuration", "--data")
        except ValueError as error:
            if options.data or options.max_loss is not None:
                raise
            warn(f"drawn images are compared, without an accuracy: {error}")
    elif options.max_loss is not None:
        raise ValueError(f"--max-loss needs verification sets, and {network.name} names none; name them with --targets SET ...")
    return []


def _report(options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Print what was written, in words and tables."""
    contract = facts["contract"]
    size = contract["image_size"]
    shape = f"(batch, {size}, {size}, 3)" if contract["layout"] == "NHWC" else f"(batch, 3, {size}, {size})"
    scale = "" if contract["dtype"] == "uint8" else f", (x - {contract['mean']:g}) / {contract['std']:g}"
    unit = " of length 1, and their former lengths" if contract["normalised"] else ""
    print(f"{shown(options.out)}: {facts['network']}, {contract['precision']}")
    print(f"input   images {shape} {contract['dtype']} {contract['colour'].upper()}{scale}")
    print(f"output  embeddings (batch, {contract['embedding_size']}){unit}{', with the mirror image' if options.flip else ''}")
    print(f"folded  {facts['folded']} of {facts['norms']} batch normalisations into the layer before them")
    print(table(facts))
