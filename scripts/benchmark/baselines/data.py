"""The usual way to read face data, as a baseline: written from descriptions of arcface_torch and mxnet, simple on purpose.

It has the index as a dict of parsed lines; worker processes that decode one image at a time to a float tensor, stack the
images and send them; Pillow; and other decoders if they are installed.
"""

import importlib
import io
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.recordio.image_record import IndexedRecordFile, unpack
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
    """Return the installed JPEG decoders by name; the loader uses simplejpeg, and opencv for images that it rejects."""
    found: dict[str, Callable[[bytes], np.ndarray]] = {}
    found["opencv"] = decode_rgb
    for name, make in (
        ("pillow", _pillow),
        ("simplejpeg", _simplejpeg),
        ("imagecodecs", _imagecodecs),
        ("torchvision", _torchvision),
    ):
        try:
            found[name] = make()
        except (ImportError, RuntimeError):  # RuntimeError: torchvision beside another build of torch
            continue
    return found


def _pillow() -> Callable[[bytes], np.ndarray]:
    image = importlib.import_module("PIL.Image")
    return lambda data: np.asarray(image.open(io.BytesIO(data)).convert("RGB"))


def _simplejpeg() -> Callable[[bytes], np.ndarray]:
    decode = importlib.import_module("simplejpeg").decode_jpeg
    return lambda data: decode(data, "RGB")


def _imagecodecs() -> Callable[[bytes], np.ndarray]:
    return importlib.import_module("imagecodecs").jpeg8_decode


def _torchvision() -> Callable[[bytes], np.ndarray]:
    io_module = importlib.import_module("torchvision.io")
    mode = io_module.ImageReadMode.RGB
    return lambda data: io_module.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode).numpy()
