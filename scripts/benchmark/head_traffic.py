"""The bytes that a step of the head moves per active class, part by part, and the fewest that it could move.

Counted are the tensors that the products and the C or Triton kernels read and write, each once per use, as if no cache kept
anything from one use to the next. Not counted are what does not grow with the classes, partial sums, 8 B / 64 bytes, label
smoothing, and the blocks that a CPU without units for bf16 converts to fp32, which stay in its cache. If negatives are not one
number times the cosine, a weight of the same size takes the place of an exponential.
Shapes: B = samples of the global batch, D = embedding size.
"""

from dataclasses import replace
from typing import Any

from partial_fc import HeadConfig, PartialFC
from partial_fc.centres.store import FORMATS
from partial_fc.memory import HeadMemory
from partial_fc.softmax.passes import constant_shift

_NORM = 4  # bytes of 1 / norm


def parts_per_class(
    config: HeadConfig, batch: int, dim: int, cached: float, maxima: bool = False
) -> dict[str, tuple[float, float]]:
    """Return the bytes (read, written) of each part of a step with one micro-batch.

    Args:
        cached: share of the exponentials that are kept for the second pass, from 0 to 1.
        maxima: whether the samples' largest logits are found, because no constant keeps the exponentials in range.
    """
    size, centre = config.matmul_dtype.itemsize, FORMATS[config.storage][0].itemsize
    state = _state_bytes(config, batch, dim)
    parts: dict[str, tuple[float, float]] = {}
    if FORMATS[config.storage][0] != config.matmul_dtype:
        parts["centres for the products"] = (dim * centre, dim * size)
    parts["logits"] = (dim * size, batch * size)
    parts["exponentials"] = (batch * size + _NORM, batch * size)
    again = [(1 - cached) * sum(part[way] for part in parts.values()) for way in (0, 1)]
    if maxima:
        parts["maxima"] = (batch * size + _NORM, 0)
    parts["embedding gradient"] = ((batch + dim) * size, 0)
    if cached < 1:
        parts["exponentials again"] = (again[0], again[1])
    parts["centre gradient"] = (batch * size, dim * size)
    parts["update"] = (dim * size + state, state)
    return parts


def floor_per_class(config: HeadConfig, batch: int, dim: int) -> float:
    """Return the bytes if all else were fused: centres read by the first pass, exponentials kept, read by the second, which
    reads and writes each centre's state once."""
    kept = 2 * batch * config.matmul_dtype.itemsize
    return dim * FORMATS[config.storage][0].itemsize + _NORM + kept + 2 * _state_bytes(config, batch, dim)


def moved(head: PartialFC, batch: int) -> dict[str, Any]:
    """Return the bytes per active class of the step that the head took last: parts, total and floor; {} for plain torch."""
    if head.kernels.name == "plain":
        return {}
    config = head.config
    wanted = head.num_active() / head.world_size * batch * config.matmul_dtype.itemsize
    cached = min(1.0, head.workspace.cache_bytes / wanted)
    maxima = constant_shift(head.margin, head.num_classes) is None
    parts = parts_per_class(config, batch, head.embedding_size, cached, maxima)
    total = sum(read + written for read, written in parts.values())
    return {"parts": parts, "total": total, "floor": floor_per_class(config, batch, head.embedding_size)}


def describe(row: dict[str, Any]) -> str:
    """Return a line for a row of the benchmark that has `moved`."""
    parts = ", ".join(f"{name} {read:.0f} + {written:.0f}" for name, (read, written) in row["moved"]["parts"].items())
    total, floor = row["moved"]["total"], row["moved"]["floor"]
    loss = "" if row["loss"] == "arcface" else f"{row['loss']}, "
    where = f"{loss}{row['classes']} classes at rate {row['sample_rate']:g}, {row['storage']} {row['matmul']}"
    return f"bytes moved per active class, {where}: {total:.0f}, {total / floor:.2f} of the floor {floor:.0f} ({parts})"


def _state_bytes(config: HeadConfig, batch: int, dim: int) -> int:
    return HeadMemory(dim, batch, replace(config, sampling="uniform")).bytes_per_class
