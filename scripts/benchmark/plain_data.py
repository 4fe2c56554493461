"""Baselines of data and verification: the usual ways to read and to verify, simple on purpose.

data          written from descriptions of arcface_torch and mxnet: the index as a dict of parsed lines; worker processes that
              decode one image at a time to a float tensor, stack the images and send them; other decoders
verification  rank 0 alone decodes every image of the pairs, also those that come twice, into one float tensor for the pictures
              and one for their mirror images; the network sees ten at a time; loops over folds and thresholds
"""

import io
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from data.recordio.image_record import IndexedRecordFile, unpack
from eval.pair_sets.bin_file import PairSet
from utils.image import decode_rgb


def index_as_dict(path: Path) -> tuple[dict[int, int], list[int]]:
    """Return {key: offset} and the keys of an index file, line by line, as mxnet's MXIndexedRecordIO has them."""
    offsets: dict[int, int] = {}
    keys: list[int] = []
    with open(path) as file:
        for line in file:
            columns = line.strip().split("\t")
            key = int(columns[0])
            offsets[key] = int(columns[1])
            keys.append(key)
    return offsets, keys


class FloatPerItem(Dataset):
    """One image per item: decode, swap the channels, mirror half of the images, float32 in [-1, 1], channels first."""

    def __init__(self, rec_path: Path) -> None:
        self.records = IndexedRecordFile(rec_path, rec_path.with_suffix(".idx"))

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        label, _, _, payload = unpack(self.records.read_position(index))
        bgr = cv2.imdecode(np.frombuffer(payload, np.uint8), cv2.IMREAD_COLOR)
        assert bgr is not None
        image = cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)
        if torch.rand(()) < 0.5:
            image = image[:, ::-1].copy()
        tensor = torch.from_numpy(image).permute(2, 0, 1).float().div(255)
        return tensor.sub_(0.5).div_(0.5), torch.tensor(int(np.ravel(label)[0]))


def plain_loader(rec_path: Path, batch_size: int, workers: int) -> DataLoader:
    """Return the usual loader of tutorials."""
    return DataLoader(FloatPerItem(rec_path), batch_size, shuffle=True, num_workers=workers, drop_last=True)


def decoders() -> dict[str, Callable[[bytes], np.ndarray]]:
    """Return JPEG decoders by name; the loader uses simplejpeg, and opencv for images that it rejects."""
    return {
        "opencv": decode_rgb,
        "pillow": lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")),
        "simplejpeg": lambda data: simplejpeg.decode_jpeg(data, "RGB"),
    }


def plain_embed(model: nn.Module, pair_set: PairSet) -> np.ndarray:
    """Return (2 P, D) float64 unit embeddings of the images of all pairs, one after another."""
    count = 2 * len(pair_set.same)
    views = [torch.empty(count, 3, 112, 112) for _ in range(2)]
    for pair in range(len(pair_set.same)):
        for side, index in enumerate((pair_set.first[pair], pair_set.second[pair])):
            image = torch.from_numpy(pair_set.decode(int(index)).transpose(2, 0, 1).astype(np.float32))
            views[0][2 * pair + side] = image
            views[1][2 * pair + side] = image.flip(2)
    found = []
    for view in views:
        rows = []
        for begin in range(0, count, 10):
            batch = ((view[begin : begin + 10] / 255) - 0.5) / 0.5
            with torch.no_grad():
                rows.append(model(batch).numpy().astype(np.float64))
        found.append(np.concatenate(rows))
    fused = found[0] + found[1]
    return fused / np.linalg.norm(fused, axis=1, keepdims=True)


def plain_numbers(embeddings: np.ndarray, same: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the accuracy of each fold (10,) and TAR at FAR 1e-3 from (2 P, D) rows, by loops over folds and thresholds."""
    distances = np.square(embeddings[0::2] - embeddings[1::2]).sum(1)
    pairs = np.arange(len(same))
    accuracies, rates = [], []
    for test in np.array_split(pairs, 10):
        train = np.setdiff1d(pairs, test)
        scores = [np.mean((distances[train] < threshold) == same[train]) for threshold in np.arange(0, 4, 0.01)]
        best = np.arange(0, 4, 0.01)[int(np.argmax(scores))]
        accuracies.append(np.mean((distances[test] < best) == same[test]))
        chosen = 0.0
        for threshold in np.arange(0, 4, 0.001):
            accepted = distances[train] < threshold
            if np.mean(accepted[~same[train]]) <= 1e-3:
                chosen = threshold
        rates.append(np.mean((distances[test] < chosen)[same[test]]))
    return np.array(accuracies), float(np.mean(rates))
