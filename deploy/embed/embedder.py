"""Embeds aligned crops with a network of this project or of another: the sum of the embeddings of a crop and its mirror image.

Every forward pass has the same shape, with black crops added to the last one: then a crop's embedding does not depend on what
else is embedded with it.
Shapes: n = crops, S = size of a crop, D = embedding size.
"""

import argparse
import functools
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from backbones import build_backbone
from eval.embed import EmbedSettings, embed_images
from eval.networks import Network, load_network
from utils.cli import warn
from utils.distributed import World, choose_device
from utils.precision import AUTOCAST, choose_precision, is_fast_in_bf16, slow_precision

_CPU_BATCH = 2  # crops; an r50 takes as long for each of 8 (0.34 s of a core), and a single crop costs two
_CPU_STEP = 16  # crops; 7 s of a core with an r50, and 2 s of it with an r18
_PASSES = 100  # of SER-FIQ


class Embedder:
    """A network on its device.

    Attributes:
        title: name and state of the network, in one line; `public_title` has no path, for those who ask from elsewhere.
        image_size: S of the crops that it takes.
        embedding_size: D.
        digest: of the weights or the file, and of the input: equal digests mean embeddings that can be compared.
        config: of the run, or {}.
        device: where it runs.
        step: crops to embed at once, so that a person sees a progress bar move.

    Args:
        rated: measure the SER-FIQ quality of each crop, too.
    """

    def __init__(
        self, network: Network, device: torch.device, batch_size: int, autocast: torch.dtype | None, rated: bool = False
    ) -> None:
        self.title, self.image_size, self.config = network.title, network.image_size, network.config
        self.public_title = network._replace(name=Path(network.run or network.name).absolute().name).title
        self.digest, self.device = network.identity, device
        model = RatedNetwork(network.model) if rated else network.model
        # in eval mode for good: of two threads that embed, one would put it back while the other computes
        self._model = model.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        self._rated = rated
        self._world, self._autocast = World(0, 1, 0, 1, device), autocast
        self._batch, self.step = _CPU_BATCH, min(batch_size, _CPU_STEP)
        if device.type == "cuda":
            self._batch = self.step = max(1, batch_size // 16) if rated else batch_size  # of 100 copies
        black = np.zeros((1, self.image_size, self.image_size, 3), dtype=np.uint8)
        self.embedding_size = self._run(black).shape[1] - rated

    def embed(self, crops: np.ndarray) -> np.ndarray:
        """Return the raw sums of plain and mirrored embeddings (n, D) float32 of crops (n, S, S, 3) uint8 RGB.

        Their norms are a measure of quality; divided by them they are compared by their products.

        Raises:
            ValueError: the network is a file that fails, or returns no embeddings.
        """
        return self.rate(crops)[0]

    def rate(self, crops: np.ndarray) -> tuple[np.ndarray, list[float | None]]:
        """Return `embed` of crops and the quality of each, the mean of it and its mirror image; None if not `rated`."""
        size = self.image_size
        if crops.shape[1:] != (size, size, 3) or crops.dtype != np.uint8:
            raise ValueError(f"crops must be (n, {size}, {size}, 3) uint8, got {crops.shape} {crops.dtype}")
        found = self._run(crops) if len(crops) else np.zeros((0, self.embedding_size + self._rated), dtype=np.float32)
        qualities = (found[:, -1] / 2).tolist() if self._rated else [None] * len(crops)
        return found[:, : self.embedding_size], qualities

    def _run(self, crops: np.ndarray) -> np.ndarray:
        black = np.zeros_like(crops[0])
        padded = -(-len(crops) // self._batch) * self._batch

        def decode(number: int) -> np.ndarray:
            return crops[number] if number < len(crops) else black

        settings = EmbedSettings(self._batch, self._autocast, threads=1, image_size=self.image_size)
        return embed_images(self._model, decode, padded, self._world, settings, summed=True)[0, : len(crops)]


@functools.cache
def _halves(shape: torch.Size) -> Tensor:
    return torch.rand(_PASSES, *shape, generator=torch.Generator().manual_seed(0)) < 0.5


class RatedNetwork(nn.Module):
    """A network whose embeddings have one more number, the SER-FIQ quality of their image.

    The layers from the network's dropout on see 100 copies of their input, each with another half of it set to 0. The less the
    unit embeddings of the copies differ, the better the image: the quality is 2 sigmoid(-d), d the mean of the Euclidean
    distances between all of them (Terhoerst et al., "SER-FIQ", CVPR 2020, https://arxiv.org/abs/2003.09373, equation 1).
    All images have the same halves.

    Raises:
        ValueError: the network has no dropout.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        if not layers:
            raise ValueError("--ser-fiq needs a network with a layer of dropout: a run or a file of weights, none of a program")
        layers[-1].register_forward_hook(
            lambda _, __, x: torch.cat([x, (x[:, None] * (2 * _halves(x.shape[1:])).to(x)).flatten(0, 1)])
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return (b, D + 1) float32."""
        found, count = self.model(images).float(), len(images)
        copies = nn.functional.normalize(found[count:]).unflatten(0, (count, _PASSES))
        distances = torch.cdist(copies, copies, compute_mode="donot_use_mm_for_euclid_dist").mean((1, 2))
        return torch.cat([found[:count], 2 * torch.sigmoid(-distances)[:, None]], dim=1)


def open_embedder(options: argparse.Namespace, local_rank: int = 0) -> Embedder:
    """Return the network that the options of `add_network_arguments` name, ready to embed, on this GPU if there is one.

    Raises:
        ValueError: the network cannot be read, or the device does not exist.
    """
    device = choose_device(options.device, local_rank)
    precision = choose_precision(options.precision, is_fast_in_bf16(device))
    if parent_process() is None:  # said once
        warn(*slow_precision("--precision ", precision, device))
    network, rated = load_network(options, build_backbone), getattr(options, "ser_fiq", False)
    return Embedder(network, device, options.batch_size, AUTOCAST[precision], rated)
