"""Mend a RecordIO set: face data repair SET, or face data repair SET --out COPY

Without --out: rebuild the index if train.rec is sound, but train.idx is missing, cut, or belongs to another set. The old index
is kept as train.idx.old. With --out: write a copy without the damaged records and the images that do not decode, which
COPY/left_out.csv lists. Labels do not change. Neither way changes train.rec. Exit status 1: a fault was found and not mended.

SET: a folder with train.rec, and train.idx and property if the set has them.

Example: face data repair /data/ms1m-retinaface-t1 --out /data/mended
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.record_dataset import RecordDataset, classes_of_property
from data.recordio.image_record import RecordSetWriter, read_index, unpack
from data.recordio.index import distinct
from data.salvage import Sound, choose_keys, find_sound, read_headers, read_sound, unusable
from utils.cli import add_threads, make_parser, progress
from utils.files import new_file, write_csv
from utils.image import decode_rgb
from utils.parallel import map_in_order
from utils.program import run_main

_SHOWN = 10  # faults that are printed


class Fault(NamedTuple):
    """A part of train.rec that cannot be used."""

    byte: int
    record: str  # its key in the old index, "" if it has none
    reason: str


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data repair", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec")
    parser.add_argument("--out", type=Path, help="folder for a copy of the sound images; decodes every image")
    parser.add_argument("--overwrite", action="store_true", help="replace a set in OUT")
    add_threads(parser)
    return run_main(repair, parser.parse_args(arguments))


def repair(options: argparse.Namespace) -> None:
    """Scan the record file, report its faults, and mend them in the way that the options say."""
    rec_path = options.set / "train.rec"
    if not rec_path.is_file():
        raise ValueError(f"no file {rec_path}. Give the folder that holds train.rec")
    if options.out and options.out.resolve() == options.set.resolve():
        raise ValueError(f"--out {options.out}: the copy must not be written over the set; choose another folder")
    num_classes = classes_of_property(rec_path.with_name("property"))
    with progress([], rec_path.stat().st_size, "scanning train.rec", "B", 2) as bar:
        sound = find_sound(rec_path, bar.update)
    if not len(sound.offsets):
        raise ValueError(f"{rec_path}: no sound record in its {rec_path.stat().st_size} bytes: this is not a RecordIO file")
    headers = read_headers(rec_path, sound)
    old, index_fault = _old_index(rec_path, sound)
    bad, by_byte = unusable(headers, num_classes), np.argsort(old[1], kind="stable")

    def fault(byte: int, reason: str) -> Fault:
        first, stop = (np.searchsorted(old[1], byte, side, by_byte) for side in ("left", "right"))
        return Fault(byte, " ".join(map(str, old[0][by_byte[first:stop]].tolist())), reason)

    faults = [fault(begin, f"{end - begin} bytes hold no sound record") for begin, end in sound.damage]
    faults = sorted(faults + [fault(int(sound.offsets[i]), reason) for i, reason in bad.items()])
    print(f"{rec_path}: {len(sound.offsets)} sound records, {int(np.count_nonzero(headers.payload_sizes > 0))} of them images")
    _tell(faults)
    if index_fault:
        print(f"BAD  {index_fault}")
    if options.out:
        images = np.setdiff1d(np.flatnonzero(headers.payload_sizes > 0), list(bad), assume_unique=True)
        undecoded = _copy(options, sound, images, headers.labels[images, 0], num_classes or 0)
        left_out, path = sorted(faults + [fault(*item) for item in undecoded]), options.out / "left_out.csv"
        write_csv(path, ("byte", "record", "reason"), left_out)
        print(RecordDataset(options.out).describe())
        print(f"left out: {len(left_out)}, listed in {path}. The labels are those of the set")
    elif faults:
        raise ValueError(
            f"{rec_path}: {len(faults)} fault(s) that a new index cannot mend; --out COPY writes a copy without them "
            "and lists what it left out"
        )
    elif index_fault:
        _write_index(rec_path.with_suffix(".idx"), choose_keys(headers), sound.offsets)
        print(RecordDataset(options.set).describe())
    else:
        print(
            "ok   the index fits and all records are sound; nothing to mend. face data verify decodes every image, and "
            "--out COPY leaves out those that do not decode"
        )


def _old_index(rec_path: Path, sound: Sound) -> tuple[tuple[np.ndarray, np.ndarray], str]:
    """Return the keys and offsets of the existing index, and its fault, "" if there is none."""
    path = rec_path.with_suffix(".idx")
    none = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    if not path.exists():
        return none, f"{path}: no such file"
    try:
        old = read_index(path)
    except ValueError as error:
        return none, str(error)
    known, either = distinct(old[1]), distinct(np.concatenate([sound.offsets, old[1]]))
    missing, wrong = len(either) - len(known), len(either) - len(sound.offsets)
    if missing or wrong:
        beyond = int(np.count_nonzero(old[1] >= rec_path.stat().st_size))
        lost = f"; {beyond} are beyond the end of train.rec, which was cut: get it again if you can" if beyond else ""
        what = f"{missing} records of train.rec are not in it, and {wrong} of its offsets have no sound record{lost}"
        return old, f"{path}: {what}"
    try:
        RecordDataset(rec_path.parent)
    except ValueError as error:
        return old, "" if sound.damage else str(error)
    return old, ""


def _tell(faults: list[Fault]) -> None:
    for fault in faults[:_SHOWN]:
        name = f"record {fault.record}, " if fault.record else ""
        print(f"BAD  {name}byte {fault.byte}: {fault.reason}")
    if len(faults) > _SHOWN:
        print(f"... and {len(faults) - _SHOWN} more")


def _write_index(path: Path, keys: np.ndarray, offsets: np.ndarray) -> None:
    """Write the new index, which replaces the old one when it is complete; that one is kept under another name."""
    with new_file(path) as file:
        for begin in range(0, len(keys), 1 << 16):
            rows = zip(keys[begin : begin + (1 << 16)].tolist(), offsets[begin : begin + (1 << 16)].tolist(), strict=True)
            file.write(b"".join(b"%d\t%d\n" % row for row in rows))
        if path.exists():
            number = 0
            while os.path.lexists(kept := path.with_name(f"{path.name}.old{number or ''}")):
                number += 1
            try:
                os.link(path, kept)
            except OSError:  # a file system without hard links
                shutil.copy2(path, kept)
            print(f"the old index is kept as {kept}")
    print(f"{path}: written, {len(keys)} records")


def _copy(
    options: argparse.Namespace, sound: Sound, images: np.ndarray, labels: np.ndarray, num_classes: int
) -> list[tuple[int, str]]:
    """Write the records `images` (n,) with labels (n,) that decode; return (byte, reason) of the others."""
    data = np.memmap(options.set / "train.rec", dtype=np.uint8, mode="r")

    def read(record: int) -> tuple[bytes, str]:
        try:
            payload = bytes(unpack(read_sound(data, int(sound.offsets[record]))).payload)
            decode_rgb(payload)
        except ValueError as error:
            return b"", str(error)
        return payload, ""

    left_out = []
    # without header record: that form needs images of every class, and a class may have lost all of them
    with RecordSetWriter(options.out, False, overwrite=options.overwrite, num_classes=num_classes) as writer:
        found = map_in_order(read, map(int, images), options.threads)
        for place, (payload, reason) in enumerate(progress(found, len(images), "copying", "image")):
            if reason:
                left_out.append((int(sound.offsets[images[place]]), reason))
            else:
                writer.add(int(labels[place]), payload)
    return left_out


if __name__ == "__main__":
    raise SystemExit(main())
