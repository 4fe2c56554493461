"""Opens sets for the tools, prints their warnings, and names their pictures and people for the user."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/data/sets.py is no program; python -m scripts lists them")

import os
import sys
from pathlib import Path

import numpy as np

from data.base import FaceDataset
from data.datasets import FolderDataset, open_set
from data.list_dataset import ListDataset
from data.record_dataset import RecordDataset
from utils.files import read_text
from utils.text import one_line


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
