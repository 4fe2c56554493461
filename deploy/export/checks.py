"""Compares an exported file with its network: the same numbers, the accuracy it costs, its time and size.

The network itself is run as the evaluation runs it, without anything that the export added.
Shapes: n = images, S = image_size, D = embedding size.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from data.datasets import SyntheticDataset
from eval.embed import EmbedSettings, inference_mode
from eval.evaluate import evaluate
from eval.foreign_networks import open_foreign
from eval.input_contract import InputContract
from eval.pair_sets.bin_file import PairSet
from utils.cli import progress
from utils.distributed import World
from utils.image import normalise

from .precision import network_input

PARITY = 1e-4  # largest difference of an fp32 embedding, relative to its length
BATCHES = (1, 2, 7)
_ROUNDS, _FEWEST, _SECONDS = 40, 5, 60.0  # of a measurement: runs of each network, at least, and where the others end

Embed = Callable[[np.ndarray], Sequence[np.ndarray]]  # images (n, S, S, 3) uint8 RGB -> what the network returns


def images_to_compare(sets: Sequence[PairSet], image_size: int) -> np.ndarray:
    """Return images for all batches, (n, S, S, 3) uint8 RGB: of the first set, or drawn ones where there is none."""
    total = sum(BATCHES)
    if not sets:
        drawn = SyntheticDataset(total, total, seed=0, image_size=image_size)
        return np.stack([drawn.pixels_and_label(number, image_size)[0] for number in range(total)])
    count = len(sets[0].images)
    return np.stack([sets[0].decode(number * count // total, image_size) for number in range(total)])


def embeddings_of(model: nn.Module, pixels: np.ndarray, mirrored: bool) -> np.ndarray:
    """Return the raw embeddings (n, D) of a network of this project, in batches of BATCHES.

    Args:
        model: takes the input of this project.
        mirrored: add the embeddings of the mirror images.
    """
    blocks = []
    with inference_mode(model):
        for part in _split(pixels):
            images = normalise(torch.from_numpy(part)).contiguous()
            found = model(images).float()
            blocks.append(found + model(images.flip(3)).float() if mirrored else found)
    return torch.cat(blocks).numpy()


def open_file(path: Path, contract: InputContract, threads: int) -> Embed:
    """Return an exported file as a function, run as any program of others would run it."""
    if path.suffix == ".pt2":
        program = torch.export.load(str(path)).module()

        def run_program(pixels: np.ndarray) -> Sequence[np.ndarray]:
            with torch.no_grad():
                found = program(torch.from_numpy(network_input(pixels, contract)))
            return [output.numpy() for output in (found if isinstance(found, tuple | list) else [found])]

        return run_program
    runtime = importlib.import_module("onnxruntime")
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 4
    session = runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"images": network_input(pixels, contract)})


class Comparison(NamedTuple):
    """How far an exported file is from its network."""

    difference: float  # the largest of an embedding, relative to its length; inf if a number is not finite
    cosine: float  # the smallest between an embedding and that of the network


def compare(run: Embed, pixels: np.ndarray, reference: np.ndarray, contract: InputContract) -> Comparison:
    """Return how far a file is from its network, over batches of BATCHES.

    Args:
        reference: raw embeddings (n, D) of the network.
    """
    outputs = [run(part) for part in _split(pixels)]
    shapes = [output[0].shape for output in outputs]
    expected = [(count, reference.shape[1]) for count in BATCHES]
    if shapes != expected:
        raise ValueError(f"the exported file returns {shapes} for batches of {BATCHES}, and must return {expected}")
    found = np.concatenate([output[0] for output in outputs]).astype(np.float64)
    exact = reference.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    safe = np.maximum(lengths, np.finfo(np.float32).tiny)
    if not contract.normalised:
        differences = [(found - exact) / safe]
    else:
        norms = np.concatenate([output[1] for output in outputs]).astype(np.float64)[:, None]
        differences = [found - exact / safe, (norms - lengths) / safe]
    # one array, because Python's max of several numbers loses one that is not a number
    largest = float(np.concatenate([np.linalg.norm(values, axis=1) for values in differences]).max())
    of_found = np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    cosines = (found / of_found * exact / safe).sum(1)
    return Comparison(largest if np.isfinite(largest) else np.inf, float(cosines.min()))


def _split(pixels: np.ndarray) -> Sequence[np.ndarray]:
    return np.split(pixels, np.cumsum(BATCHES)[:-1])


def accuracies(
    model: nn.Module, sets: Sequence[PairSet], image_size: int, batch_size: int, threads: int
) -> Iterator[tuple[str, float]]:
    """Yield (name of the set, accuracy) of a network that takes the input of this project."""
    alone = World(0, 1, 0, 1, torch.device("cpu"))
    for name, result in evaluate(model, sets, alone, EmbedSettings(batch_size, None, threads, image_size)):
        yield name, result.accuracy


def opened_for_evaluation(path: Path, threads: int) -> nn.Module:
    """Return an exported file of our own as python -m eval opens it."""
    return open_foreign(path, threads, trust_code=path.suffix == ".pt2")


class Timing(NamedTuple):
    """Milliseconds of a forward pass."""

    median: float
    low: float  # quartiles
    high: float
    runs: int


def measure(runs: Mapping[str, Callable[[np.ndarray], object]], pixels: np.ndarray, threads: int) -> dict[str, Timing]:
    """Return the time of a forward pass of each network, in turn, so that what else runs here slows all of them alike.

    Args:
        pixels: the batch (n, S, S, 3) uint8 RGB.
        threads: of torch; the others have theirs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with _torch_threads(threads):
        for run in runs.values():  # the first run allocates
            run(pixels)
        begin = time.perf_counter()
        for number in progress(range(_ROUNDS), _ROUNDS, f"measuring, batch {len(pixels)}", "round"):
            if number >= _FEWEST and time.perf_counter() - begin > _SECONDS:
                break
            for name, run in runs.items():
                start = time.perf_counter()
                run(pixels)
                seconds[name].append(time.perf_counter() - start)
    found = {}
    for name, values in seconds.items():
        low, median, high = 1000 * np.quantile(values, [0.25, 0.5, 0.75])
        found[name] = Timing(float(median), float(low), float(high), len(values))
    return found


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
