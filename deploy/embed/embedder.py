"""Embeds aligned crops with a network of this project or of another: the sum of the embeddings of a crop and its mirror image.

Every forward pass has the same shape, with black crops added to the last one: then a crop's embedding does not depend on what
else is embedded with it.
Shapes: n = crops, S = size of a crop, D = embedding size.
"""

import argparse
import sys
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
import torch

from backbones import build_backbone
from eval.embed import EmbedSettings, embed_images
from eval.networks import Network, load_network
from utils.distributed import World, choose_device
from utils.precision import AUTOCAST, choose_precision, is_fast_in_bf16, slow_precision

_CPU_BATCH = 2  # crops; an r50 takes as long for each of 8 (0.34 s of a core), and a single crop costs two
_CPU_STEP = 16  # crops; 7 s of a core with an r50, and 2 s of it with an r18


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
    """

    def __init__(self, network: Network, device: torch.device, batch_size: int, autocast: torch.dtype | None) -> None:
        self.title, self.image_size, self.config = network.title, network.image_size, network.config
        self.public_title = network._replace(name=Path(network.run or network.name).absolute().name).title
        self.digest, self.device = network.identity, device
        self._model = network.model.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._world, self._autocast = World(0, 1, 0, 1, device), autocast
        self._batch, self.step = _CPU_BATCH, min(batch_size, _CPU_STEP)
        if device.type == "cuda":
            self._batch = self.step = batch_size
        self.embedding_size = self._run(np.zeros((1, self.image_size, self.image_size, 3), dtype=np.uint8)).shape[1]

    def embed(self, crops: np.ndarray) -> np.ndarray:
        """Return the raw sums of plain and mirrored embeddings (n, D) float32 of crops (n, S, S, 3) uint8 RGB.

        Their norms are a measure of quality; divided by them they are compared by their products.

        Raises:
            ValueError: the network is a file that fails, or returns no embeddings.
        """
        size = self.image_size
        if crops.shape[1:] != (size, size, 3) or crops.dtype != np.uint8:
            raise ValueError(f"crops must be (n, {size}, {size}, 3) uint8, got {crops.shape} {crops.dtype}")
        return self._run(crops) if len(crops) else np.zeros((0, self.embedding_size), dtype=np.float32)

    def _run(self, crops: np.ndarray) -> np.ndarray:
        black = np.zeros_like(crops[0])
        padded = -(-len(crops) // self._batch) * self._batch

        def decode(number: int) -> np.ndarray:
            return crops[number] if number < len(crops) else black

        settings = EmbedSettings(self._batch, self._autocast, threads=1, image_size=self.image_size)
        return embed_images(self._model, decode, padded, self._world, settings, summed=True)[0, : len(crops)]


def open_embedder(options: argparse.Namespace, local_rank: int = 0) -> Embedder:
    """Return the network of the command line, ready to embed.

    Args:
        options: with those of eval.networks.add_network_arguments.
        local_rank: number of the GPU, if there is one.

    Raises:
        ValueError: the network cannot be read, or the device does not exist.
    """
    device = choose_device(options.device, local_rank)
    precision = choose_precision(options.precision, is_fast_in_bf16(device))
    for line in slow_precision("--precision ", precision, device) if parent_process() is None else ():  # said once
        print(f"warning: {line}", file=sys.stderr)
    return Embedder(load_network(options, build_backbone), device, options.batch_size, AUTOCAST[precision])
