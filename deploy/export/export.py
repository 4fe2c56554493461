"""Exports a network: chooses what to write from the command line, checks the file, and reports."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backbones import build_backbone
from eval.evaluate import load_pair_sets
from eval.foreign_networks import check_outside_data
from eval.networks import Network, load_network
from eval.pair_sets.bin_file import PairSet
from utils.checkpoint.tensor_file import flush
from utils.files import shown, unfinished_folder
from utils.text import one_line

from ..output import write_file
from .checks import embeddings_of, images_to_compare
from .files import Exporter, Source, table
from .graph import require_onnx
from .precision import calibration_set


def export(options: argparse.Namespace) -> None:
    """Export according to the command line: write aside, check, and rename."""
    _check(options)
    network = load_network(options, build_backbone)
    sets = _verification_sets(options, network)
    calibration = None
    if options.precision == "int8" or (options.measure and options.to == "onnx" and (options.calibrate or network.config)):
        try:
            calibration = calibration_set(options.calibrate, network.config)
        except ValueError as error:
            if options.precision == "int8" or options.calibrate:
                raise
            print(f"warning: the table has no int8: {one_line(error)}", file=sys.stderr)
    pixels = images_to_compare(sets, network.image_size)
    reference = embeddings_of(network.model, pixels, options.flip)
    if not np.isfinite(reference).all():
        raise ValueError(f"{network.name}: its embeddings are not finite; take an earlier checkpoint")
    with unfinished_folder(options.out) as folder:
        files, facts = Exporter(options, Source(network, sets, calibration, pixels, reference), folder).make()
        targets = [options.out.with_name(file.name) for file in files]
        if not options.overwrite:
            _require_new(targets)  # again: one may have appeared, and there may be weights beside the file
        before = _weights_beside(options.out)
        for file, target in zip(files[::-1], targets[::-1], strict=True):  # weights first: the file is never without them
            os.replace(file, target)
        if before is not None and before not in targets:
            before.unlink(missing_ok=True)
        flush(options.out.absolute().parent)
    if options.json:
        _write_json(options.json, {"file": str(options.out), **facts})
    _report(options, facts)


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not fit together, or a target that cannot be written, before any work."""
    suffix = f".{options.to}"
    if options.out.suffix != suffix:
        raise ValueError(f"--out: the name of the file must end in {suffix}, as --to {options.to} says, got {options.out}")
    for flag, path in (("--out", options.out), ("--json", options.json)):
        if path is not None and path.is_dir():
            raise ValueError(f"{flag}: {path} is a folder; choose another name")
        above = next((folder for folder in path.absolute().parents if folder.exists()), None) if path is not None else None
        if above is not None and not above.is_dir():
            raise ValueError(f"{flag}: {above} is a file, and must be a folder")
    if not options.overwrite:
        _require_new([options.out])
    if options.json is not None and options.json.absolute() == options.out.absolute():
        raise ValueError(f"--json must be another file than --out, got {options.json}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(f"--json: there is no folder {options.json.absolute().parent}; create it, or name another file")
    if options.to == "pt2" and options.precision != "fp32":
        raise ValueError(f"--precision {options.precision} is for --to onnx; a .pt2 file has fp32 weights")
    if options.max_loss is not None and (options.precision == "fp32" or not 0 <= options.max_loss <= 100):
        raise ValueError(f"--max-loss is from 0 to 100, for --precision fp16 or int8, got {options.max_loss}")
    if options.calibrate and options.precision != "int8" and not (options.measure and options.to == "onnx"):
        raise ValueError("--calibrate is for --precision int8, or for the table of --measure; leave it out")
    if options.run.is_file() and not options.backbone:
        raise ValueError(
            f"{options.run}: is a file; name the network of its weights with --backbone NAME, or give the folder of a run. A "
            "network in a file of its own (.onnx, .pt2, TorchScript) is not exported again"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError("an export is the work of one process; start it without torchrun")
    if options.to == "onnx":
        require_onnx()


def _require_new(paths: Sequence[Path]) -> None:
    """Raise ValueError if there is a file of one of these names."""
    for path in paths:
        if os.path.lexists(path):
            raise ValueError(f"--out: {path} exists; add --overwrite to replace it, or choose another name")


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
            print(f"warning: drawn images are compared, without an accuracy: {one_line(error)}", file=sys.stderr)
    elif options.max_loss is not None:
        raise ValueError(f"--max-loss needs verification sets, and {network.name} names none; name them with --targets SET ...")
    return []


def _write_json(path: Path, facts: dict[str, Any]) -> None:
    try:
        write_file(path, f"{json.dumps(facts, indent=1)}\n".encode())
    except OSError as error:
        raise ValueError(f"--json: {path}: cannot be written: {error.strerror}") from None


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
