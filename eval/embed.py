"""Embeds a set's images on all ranks. Each rank processes its share in large batches and decodes while it computes.

Shapes: N = images of the set, n = images of one rank, D = embedding size, H = W = settings.image_size.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from utils.cli import Advance
from utils.distributed import World, all_gather_rows, raise_on_all_ranks
from utils.image import IMAGE_SIZE, normalise
from utils.parallel import map_in_order

_CPU_VIEWS = 16  # views per forward pass on a CPU: their activations stay in the cache, twice as fast as 512


@dataclass(frozen=True)
class EmbedSettings:
    """How images go through a network."""

    batch_size: int = 256  # images per forward pass and process
    autocast: torch.dtype | None = None  # of the forward pass, None = float32
    threads: int = 2  # that decode, per process
    image_size: int = IMAGE_SIZE  # height and width of the images, in pixels


def embed_images(
    model: nn.Module,
    decode: Callable[[int], np.ndarray],
    num_images: int,
    world: World,
    settings: EmbedSettings = EmbedSettings(),
    progress: Advance = int,
    summed: bool = False,
) -> np.ndarray:
    """Return the raw embeddings of all images and of their mirror images, (2, N, D) float32, on every rank.

    Args:
        model: (b, 3, H, W) -> (b, D); its train or eval modes are restored afterwards.
        decode: image number -> (H, W, 3) uint8 RGB; ValueError if it cannot be decoded.
        progress: called with the number of images that this rank has embedded since the last call.
        summed: return the sums of both, (1, N, D), in half the memory.

    Raises:
        ValueError: on every rank, if an image cannot be decoded on any.
    """
    counts = [num_images // world.world_size + (rank < num_images % world.world_size) for rank in range(world.world_size)]
    first = sum(counts[: world.rank])
    if world.device.type == "cpu":  # whose speed is that of _CPU_VIEWS, and progress is seen more often
        settings = replace(settings, batch_size=min(settings.batch_size, 2 * _CPU_VIEWS))
    found, done = None, 0  # one tensor: a list of its parts, joined at the end, takes twice the memory
    with raise_on_all_ranks(world), inference_mode(model):
        for images in _batches(decode, range(first, first + counts[world.rank]), settings):
            pixels = _on_device(images, min(settings.batch_size, counts[world.rank]), world.device)
            embeddings = _forward(model, normalise(torch.cat([pixels, pixels.flip(2)])), settings.autocast)
            views = torch.stack(embeddings.chunk(2), dim=1)[: len(images)]
            views = views.sum(1, keepdim=True) if summed else views
            found = views.new_empty(counts[world.rank], *views.shape[1:]) if found is None else found
            found[done : done + len(images)] = views
            done += len(images)
            progress(len(images))
    if found is None:  # more ranks than images
        size = _embedding_size(model, settings.image_size, world.device)
        found = torch.zeros(0, 1 if summed else 2, size, device=world.device)
    return all_gather_rows(found, counts, world).cpu().numpy().swapaxes(0, 1)


def class_means(
    model: nn.Module,
    read: Callable[[int], tuple[np.ndarray, int]],
    labels: np.ndarray,
    classes: np.ndarray,
    per_class: int,
    device: torch.device,
    settings: EmbedSettings = EmbedSettings(),
) -> tuple[Tensor, np.ndarray]:
    """Return the mean direction of the images of some classes, (n, D) unit rows, and which classes have an image, (n,) bool.

    Not collective: this process embeds the images alone.

    Args:
        read: sample number -> (H, W, 3) uint8 RGB and its class; ValueError if it cannot be decoded. An image of another class
            than the sample's has taken its place (data.on_bad_record=skip) and is not counted.
        labels: (N,) the class of each sample.
        classes: (n,) distinct.
        per_class: the largest number of images per class; the first ones are used.
    """
    sums = torch.zeros(len(classes), _embedding_size(model, settings.image_size, device))
    order = np.argsort(classes)
    samples = np.flatnonzero(np.isin(labels, classes))
    samples = samples[np.argsort(labels[samples], kind="stable")]
    place = np.arange(len(samples)) - np.searchsorted(labels[samples], labels[samples])  # within its class
    samples = samples[place < per_class]
    rows = torch.from_numpy(order[np.searchsorted(classes[order], labels[samples])])
    own = np.ones(len(samples), dtype=bool)

    def decode(number: int) -> np.ndarray:
        pixels, label = read(int(samples[number]))
        own[number] = label == labels[samples[number]]
        return pixels

    done = 0
    with inference_mode(model):
        for images in _batches(decode, range(len(samples)), settings):
            pixels = _on_device(images, min(settings.batch_size, len(samples)), device)
            embeddings = _forward(model, normalise(pixels), settings.autocast)[: len(images)]
            part = slice(done, done + len(images))
            counted = torch.from_numpy(own[part])
            sums.index_add_(0, rows[part][counted], nn.functional.normalize(embeddings).cpu()[counted])
            done += len(images)
    found = np.zeros(len(classes), dtype=bool)
    found[rows.numpy()[own]] = True
    return nn.functional.normalize(sums), found


def _on_device(images: np.ndarray, size: int, device: torch.device) -> Tensor:
    """Return images (b, H, W, 3) on the device; where shapes must be constant, with black ones added up to `size` images."""
    pixels = torch.from_numpy(images)
    if _wants_constant_shapes(device) and len(pixels) < size:
        pixels = torch.cat([pixels, pixels.new_zeros(size - len(pixels), *pixels.shape[1:])])
    return (pixels.pin_memory() if device.type == "cuda" else pixels).to(device, non_blocking=True)


def _wants_constant_shapes(device: torch.device) -> bool:
    """Return whether a batch of another shape costs more than its own time: cuDNN tries its algorithms for each new shape."""
    return device.type == "cuda"


def _forward(model: nn.Module, views: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return the raw embeddings (b, D) float32 of normalised views (b, 3, H, W), split to suit the device."""
    with torch.autocast(views.device.type, dtype=autocast, enabled=autocast is not None):
        parts = views.split(len(views) if views.device.type == "cuda" else _CPU_VIEWS)
        return torch.cat([model(part).float() for part in parts])


@contextlib.contextmanager
def inference_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode without gradients; restore the mode of each module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _batches(decode: Callable[[int], np.ndarray], numbers: range, settings: EmbedSettings) -> Iterator[np.ndarray]:
    """Yield (b, H, W, 3) uint8 arrays; the next batch is decoded while the caller processes this one."""
    ahead = -(-settings.batch_size // settings.threads)
    images = map_in_order(decode, numbers, settings.threads, ahead)
    while batch := list(islice(images, settings.batch_size)):
        yield np.stack(batch)


def _embedding_size(model: nn.Module, image_size: int, device: torch.device) -> int:
    with inference_mode(model):
        return int(model(torch.zeros(1, 3, image_size, image_size, device=device)).shape[1])
