"""What the tools of sets share: opening one with its warnings, the names of its pictures and people, copying a part of it."""

import csv
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from utils.cli import progress
from utils.files import read_text
from utils.text import one_line

from .base import FaceDataset
from .datasets import FolderDataset, open_set
from .list_dataset import ListDataset
from .record_dataset import RecordDataset
from .recordio.writer import RecordSetWriter

_AHEAD = 4096  # images that are prefetched at once


def open_set_of(path: str | os.PathLike[str]) -> FaceDataset:
    """Return the set at a path, like data.datasets.open_set; print its warnings to stderr."""
    dataset = open_set(path)
    for line in dataset.warnings:
        print(f"warning: {one_line(line)}", file=sys.stderr)
    return dataset


class SetNames:
    """Names of pictures and identities. For a record set they come from train.lst, which scripts.data.folder_to_rec writes."""

    def __init__(self, dataset: FaceDataset) -> None:
        self.dataset = dataset
        self._listed = _read_list(dataset) if isinstance(dataset, RecordDataset) else []
        self._folders = dataset.classes if isinstance(dataset, FolderDataset) else _folders(self._listed, dataset)

    def file(self, index: int) -> str:
        """Return the path of a picture, relative if the set is a folder or a list; or the key of its record."""
        if self._listed:
            return self._listed[index]
        key = self.dataset.key(index)
        if isinstance(self.dataset, FolderDataset):
            return os.path.relpath(key, self.dataset.root)
        if isinstance(self.dataset, ListDataset):
            return os.path.relpath(key, self.dataset.path.parent)
        return key.partition(" of ")[0] if isinstance(self.dataset, RecordDataset) else key

    def person(self, label: int) -> str:
        """Return the folder of an identity, or "identity" and its number."""
        return self._folders[label] if self._folders else f"identity {label}"

    def has_people(self) -> bool:
        """Return whether identities have names."""
        return bool(self._folders)


def _read_list(dataset: RecordDataset) -> list[str]:
    """Return the paths in train.lst if its lines and labels fit the set, otherwise nothing."""
    path = Path(dataset.folder) / "train.lst"
    try:
        rows = [line.split("\t") for line in read_text(path, encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return []
    labels = [row[2] for row in rows if len(row) >= 3]
    fits = len(labels) == len(rows) == dataset.num_images and labels == list(map(str, dataset.labels().tolist()))
    return [row[1] for row in rows] if fits else []


def _folders(files: list[str], dataset: FaceDataset) -> list[str]:
    """Return the folder of each class if every class has exactly one folder, otherwise nothing."""
    found: dict[int, str] = {}
    for file, label in zip(files, np.asarray(dataset.labels()).tolist() if files else [], strict=True):
        if found.setdefault(label, file.split("/")[0]) != file.split("/")[0] or "/" not in file:
            return []
    named = len(found) == dataset.num_classes == len(set(found.values()))
    return [found[label] for label in range(dataset.num_classes)] if named else []


def copy_set(dataset: FaceDataset, indices: np.ndarray, out: Path, overwrite: bool, source: Path | None = None) -> np.ndarray:
    """Write the images `indices` (n,) as a RecordIO set in header form; return the old number of each new identity."""
    if source is not None and out.resolve() == source.resolve():
        raise ValueError(f"{out}: the new set must not be written over the old one; choose another folder")
    labels = np.asarray(dataset.labels())[indices]
    order = indices[np.argsort(labels, kind="stable")]
    old = np.unique(labels)
    new = np.full(dataset.num_classes, -1, dtype=np.int64)
    new[old] = np.arange(len(old))
    with RecordSetWriter(out, overwrite=overwrite) as writer, progress([], len(order), f"writing {out.name}", "image") as bar:
        for begin in range(0, len(order), _AHEAD):
            some = order[begin : begin + _AHEAD]
            dataset.read_ahead(np.sort(some))
            for index in some.tolist():
                image, label = dataset.sample(index)
                writer.add(int(new[label]), bytes(image))
            bar.update(len(some))
    write_csv(out / "classes.csv", ("identity", "old_identity"), enumerate(old.tolist()))
    print(f"{out}: {len(order)} images of {len(old)} identities")
    return old


def parse_classes(text: str, num_classes: int) -> np.ndarray:
    """Return the labels that A:B or A,B,C selects; all labels for ""."""
    try:
        if ":" in text:
            begin, end = (int(part) if part else None for part in text.split(":"))
            chosen = np.arange(num_classes)[begin:end]
        else:
            chosen = np.array([int(part) for part in text.split(",")]) if text else np.arange(num_classes)
    except ValueError:
        raise ValueError(f"--classes must be A:B or A,B,C, got {text!r}") from None
    if not len(chosen) or chosen.min() < 0 or chosen.max() >= num_classes:
        raise ValueError(f"--classes must name labels from 0 to {num_classes - 1}, got {text!r}")
    return chosen


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table with a line of column names."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)
