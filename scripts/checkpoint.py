"""Inspect and convert checkpoints: face checkpoint show|verify|reshard|merge|average PATH ...

show      print the contents of a checkpoint, or of every checkpoint of a run
verify    check sizes and hashes of all files, and that no class slot is missing; exit status 1 if anything is wrong
reshard   write the checkpoint with its class centres in another number of files; training itself does not need this
merge     write one matrix of class centres in the order of the labels, unit rows, for tools that do not read shards;
          (classes, K, D) of K sub-centers
average   write the mean of several backbones as one file of weights ("weight averaging"), for evaluation or fine-tuning

PATH: a checkpoint, work_dirs/NAME/checkpoints/step_00012000, or a run folder, work_dirs/NAME.

Examples:
  face checkpoint show work_dirs/demo_cpu
  face checkpoint merge work_dirs/demo_cpu centres.safetensors
  face checkpoint average work_dirs/a work_dirs/b --out mean.safetensors
"""

import argparse
import functools
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partial_fc.centres.shard import shard_range
from partial_fc.init import has_head, open_centres
from utils.checkpoint import format as ckpt
from utils.checkpoint import tensor_file
from utils.checkpoint.reading import check_hashes, read_backbone, shard_reader, slot_faults
from utils.checkpoint.tensor_file import DTYPES, NETWORK, Planned, flush, tensor_places, write_planned, write_tensors
from utils.cli import Advance, int_in_range, make_parser, progress, warn
from utils.image import IMAGE_SIZE
from utils.program import run_main

_ROWS_AT_ONCE = 1 << 13  # class centres


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face checkpoint", __doc__)
    kinds = parser.add_subparsers(dest="what", required=True, metavar="show|verify|reshard|merge|average")
    for name, text in (("show", "print the contents"), ("verify", "check that it is complete")):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument("paths", type=Path, nargs="+", help="checkpoint folders, or run folders for all of their checkpoints")
    resharding = kinds.add_parser("reshard", help="another number of files of class centres")
    resharding.add_argument("path", type=Path, help="checkpoint folder, or run folder for its newest")
    resharding.add_argument("ranks", type=int_in_range(1), help="files of class centres, one for each process that reads them")
    resharding.add_argument("out", type=Path, help="run folder to write to: OUT/checkpoints/step_...")
    merge = kinds.add_parser("merge", help="one matrix of class centres")
    merge.add_argument("path", type=Path, help="checkpoint folder, or run folder for its newest")
    merge.add_argument("out", type=Path, help="file .safetensors (key weight) or .pt (a tensor), (classes, D) float32")
    merge.add_argument("--head", default="", metavar="TASK", help="of a run with several tasks, the one whose head it is")
    average = kinds.add_parser("average", help="the mean of several backbones")
    average.add_argument("paths", type=Path, nargs="+", help="checkpoints of one architecture, or runs for the newest of each")
    average.add_argument("--out", type=Path, required=True, help="file .safetensors or .pt")
    for kind in (merge, average):
        kind.add_argument("--overwrite", action="store_true", help="replace the file")
    options = parser.parse_args(arguments)
    actions = {"show": show, "verify": verify, "reshard": reshard, "merge": merge_centres, "average": average_backbones}
    return run_main(actions[options.what], options)


def show(options: argparse.Namespace) -> None:
    """Print the contents of checkpoints."""
    for path in _all(options.paths):
        manifest = ckpt.read_manifest(path)
        files = manifest["files"]
        size = sum(int(entry["size"]) for entry in files.values())
        score = manifest.get("score")
        print(f"{path}")
        print(f"  step {manifest['step']}, score {'none' if score is None else f'{score:.4f}'}, {size / 2**20:.1f} MiB")
        for key, value in manifest.get("run_signature", {}).items():
            print(f"  {key:<14}{ckpt.in_words(key, value):.300}")
        for name, entry in sorted(files.items()):
            slots = f"slots {entry['slots'][0]} to {entry['slots'][1] - 1}" if "slots" in entry else ""
            print(f"  {name:<42}{int(entry['size']) / 2**20:10.1f} MiB  {slots}{_tensors(path / name) if slots else ''}")


def _tensors(path: Path) -> str:
    """Return the names, types and shapes of the rows in a file of class centres."""
    places = sorted(tensor_places(path).items())
    return "".join(f"; {name} {DTYPES[place.dtype]} {place.shape}" for name, place in places)


def verify(options: argparse.Namespace) -> None:
    """Check all files of checkpoints; raise ValueError at the end if any has a fault."""
    faults = []
    paths = _all(options.paths)
    for path in paths:
        found = check(path)
        print(f"{'BAD ' if found else 'ok  '} {path}{''.join(f'{chr(10)}     {line}' for line in found)}")
        faults += found
    if faults:
        raise ValueError(f"{len(faults)} fault(s) in {len(paths)} checkpoint(s)")


def check(checkpoint: Path) -> list[str]:
    """Return a line for each fault of a checkpoint."""
    try:
        manifest = ckpt.read_manifest(checkpoint)
    except ValueError as error:
        return [str(error)]
    total = sum(int(entry["size"]) for entry in manifest["files"].values())
    with progress([], total, checkpoint.name, "B") as bar:
        faults = check_hashes(checkpoint, progress=bar.update)
    signature = manifest.get("run_signature", {})
    tasks = signature.get("tasks", {ckpt.SOFTMAX: signature})
    for head, files in {**{name: {} for name in tasks}, **ckpt.slots_by_head(manifest)}.items():
        slots = max((stop for _, stop in files.values()), default=0)
        classes = tasks.get(head, {}).get("num_classes", slots)
        faults += [f"{head}: {line}" for line in slot_faults(files.values(), 0, classes)]
    return faults


def reshard(options: argparse.Namespace) -> None:
    """Write a checkpoint with its class centres in another number of files, some rows at a time."""
    source = ckpt.find_checkpoint(options.path)
    manifest = ckpt.read_manifest(source)
    heads = {head: max(stop for _, stop in files.values()) for head, files in ckpt.slots_by_head(manifest).items()}
    fewest = min(heads.values(), default=0)
    if ckpt.is_checkpoint(options.out):
        raise ValueError(f"{options.out} is a checkpoint itself; choose a run folder")
    if options.ranks > fewest:
        raise ValueError(f"{source}: {fewest} class centres cannot be shared by {options.ranks} files; each needs one")
    final = ckpt.checkpoint_path(options.out, int(manifest["step"]))
    partial = ckpt.partial_path(final)
    if final.exists():
        raise ValueError(f"{final} exists and is never overwritten; choose another run folder")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files: dict[str, Any] = {}
    for name, entry in manifest["files"].items():
        if "slots" not in entry:
            shutil.copyfile(source / name, partial / name)
            flush(partial / name)
            files[name] = entry
    with progress([], sum(heads.values()), "resharding", "class") as bar:
        readers = {head: shard_reader(source, head) for head in heads}  # each checks the sizes of all files
        for (head, read), rank in itertools.product(readers.items(), range(options.ranks)):
            start, stop = shard_range(heads[head], rank, options.ranks)
            name = ckpt.shard_name(rank, options.ranks, head)
            files[name] = write_planned(partial / name, _planned_rows(read, start, stop, bar.update)) | {"slots": [start, stop]}
    facts = {key: value for key, value in manifest.items() if key not in ("format", "files")}
    ckpt.commit(partial, final, {**facts, "world_size": options.ranks, "files": files})
    print(f"{final}: step {manifest['step']}, {sum(heads.values())} class centres in {len(heads) * options.ranks} file(s)")


def _planned_rows(read: Callable[..., dict[str, Tensor]], start: int, stop: int, progress: Advance) -> dict[str, Planned]:
    """Return the plan for write_planned to write the slots [start, stop), reading some rows at a time.

    Args:
        read: of shard_reader.
        progress: called with the number of slots that were read since the last call, once for all tensors of a row.
    """

    def rows(name: str, counted: bool) -> Iterator[Tensor]:
        for first in range(start, stop, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, stop)
            yield read(first, last, name)[name]
            progress((last - first) * counted)

    plans = {}
    for number, (name, row) in enumerate(read(start, start + 1).items()):
        shape = (stop - start, *row.shape[1:])
        plans[name] = Planned(row.dtype, shape, functools.partial(rows, name, number == 0))
    return plans


def merge_centres(options: argparse.Namespace) -> None:
    """Write the class centres of all shards as one matrix, row k for label k; for .safetensors some rows at a time."""
    _check_target(options.out, options.overwrite)
    checkpoint = ckpt.find_checkpoint(options.path)
    if options.head and not has_head(str(checkpoint), options.head):
        raise ValueError(f"--head must name a head of {checkpoint}, got {options.head}; face checkpoint show lists them")
    source = open_centres(checkpoint, options.head)
    starts = range(0, source.num_classes, _ROWS_AT_ONCE)

    def rows() -> Iterator[Tensor]:
        for start in progress(starts, len(starts), "merging", "block"):
            labels = np.arange(start, min(start + _ROWS_AT_ONCE, source.num_classes))
            yield torch.nn.functional.normalize(source.read(labels), dim=-1, eps=1e-12)

    several = (source.sub_centers,) if source.sub_centers > 1 else ()
    shape = (source.num_classes, *several, source.embedding_size)
    if options.out.suffix == ".safetensors":
        _save(options.out, lambda path: write_planned(path, {"weight": Planned(torch.float32, shape, rows)}))
    else:
        matrix = torch.empty(shape)
        for start, block in zip(starts, rows(), strict=True):
            matrix[start : start + len(block)] = block
        _save(options.out, lambda path: tensor_file.write_object(path, matrix))
    words = f"{shape[0]} class centres of {shape[-1]} numbers, unit rows, row k for label k"
    print(f"{options.out}: {words}{f'; {shape[1]} sub-centers in each' if several else ''}")


def average_backbones(options: argparse.Namespace) -> None:
    """Write the mean of the backbones, with what network they are; counters are taken from the last."""
    _check_target(options.out, options.overwrite)
    paths = [ckpt.find_checkpoint(path) for path in options.paths]
    if len(set(paths)) < 2:  # perhaps one run folder, given to average all of its checkpoints
        raise ValueError(f"{paths[0]} alone has no mean; name each checkpoint, as in RUN/checkpoints/step_*")
    sums: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}
    origins: dict[Path, Path] = {}  # where a training began -> one of its checkpoints
    for path in paths:
        last, config = read_backbone(path), ckpt.read_manifest(path).get("config", {})
        origins.setdefault(_origin(path, config), path)
        if sums and {name: value.shape for name, value in last.items()} != {name: value.shape for name, value in sums.items()}:
            raise ValueError(f"{path}: another architecture than {paths[0]}; only backbones of one architecture have a mean")
        for name, value in last.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
    means = {
        name: (sums[name] / len(paths)).to(value.dtype) if value.is_floating_point() else value for name, value in last.items()
    }
    said = {"backbone": config.get("backbone"), "image_size": config.get("data", {}).get("image_size", IMAGE_SIZE)}
    metadata = {NETWORK: json.dumps(said)} if said["backbone"] else {}
    safe = options.out.suffix == ".safetensors"
    _save(options.out, lambda path: write_tensors(path, means, metadata) if safe else tensor_file.write_object(path, means))
    if len(origins) > 1:
        words = "{} and {} are of unrelated trainings, so their mean may know less than each".format(*origins.values())
        warn(f"{words}; average checkpoints of one run, or of runs with one init.backbone")
    print(f"{options.out}: the mean of {len(paths)} backbones")


def _origin(checkpoint: Path, config: dict[str, Any]) -> Path:
    """Return the weights that a training began with, or its run folder if it drew them."""
    begun = str(config.get("init", {}).get("backbone") or config.get("checkpoint", {}).get("resume", "auto"))
    path = (checkpoint if begun in ("auto", "never") else Path(begun)).resolve()
    return path.parents[1] if path.parent.name == "checkpoints" else path


def _all(paths: Sequence[Path]) -> list[Path]:
    """Return the checkpoints that paths name; a run folder stands for all of its checkpoints."""
    found: list[Path] = []
    for path in paths:
        found += [path] if ckpt.is_checkpoint(path) else ckpt.list_checkpoints(path) or [ckpt.find_checkpoint(path)]
    return found


def _check_target(path: Path, overwrite: bool) -> None:
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"{path}: the name must end in .safetensors, .pt or .pth")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; choose another name")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists; add --overwrite to replace it, or choose another name")


def _save(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file, which appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        write(unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    raise SystemExit(main())
