"""Training data: the kinds of sets, the order of the samples, augmentation, and the loader."""

from .datasets import FaceDataset, build_dataset

__all__ = ["FaceDataset", "build_dataset"]
