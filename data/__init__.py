"""Training data: RecordIO sets, image folders and synthetic images, their order, and the loader."""

from .datasets import FaceDataset, build_dataset

__all__ = ["FaceDataset", "build_dataset"]
