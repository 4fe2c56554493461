"""What happens to a batch of pixels on the device: mirror, normalise.

Shapes: b = images, H = W = 112.
"""

import torch
from torch import Tensor

from utils.image import normalise


def prepare(images: Tensor, mirrored: Tensor) -> Tensor:
    """Return the network's input (b, 3, H, W) float32 from (b, H, W, 3) uint8, mirrored where (b,) bool says so."""
    return normalise(torch.where(mirrored[:, None, None, None], images.flip(2), images))
