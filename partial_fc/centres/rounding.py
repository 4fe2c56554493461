"""Stochastic rounding of fp32 rows to bf16 and int8: up or down at random, so that the mean is the number itself.

Round-to-nearest would lose every update smaller than half a step of the format. With bf16 centres those are most updates.
Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, https://arxiv.org/abs/1502.02551.

Generating random bits costs more than a matrix product of the same size. The noise is therefore one small table, read at an
offset that changes with every use. The table repeats a permutation of all 65536 values of 16 bits. Over all offsets each
element gets each value exactly once, so the mean over them is exact.
"""

import torch
from torch import Tensor

_VALUES = 1 << 16
_STRIDE = 40503  # odd, so its multiples reach all offsets; near the golden ratio, so successive offsets are far apart


class Noise:
    """Random numbers for blocks of at most `size` elements, on one device; a function of the seeds given to `begin`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._tables: dict[str, Tensor] = {}  # created at first use
        self._offset = 0

    def begin(self, seed: int) -> None:
        """Set the seed of the numbers that follow, for example once per optimizer step."""
        self._offset = seed % _VALUES

    def bits(self, shape: torch.Size) -> Tensor:
        """Return int32 numbers in [0, 65536); read-only."""
        return self._next("bits", shape)

    def uniform(self, shape: torch.Size) -> Tensor:
        """Return fp32 numbers in (0, 1); read-only."""
        return self._next("uniform", shape)

    def _next(self, name: str, shape: torch.Size) -> Tensor:
        if name not in self._tables:
            order = torch.randperm(_VALUES, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
            values = order if name == "bits" else (order + 0.5) / _VALUES
            # one period more than needed, so that any offset fits
            self._tables[name] = values.repeat(-(-self.size // _VALUES) + 1).to(self.device)
        self._offset = (self._offset + _STRIDE) % _VALUES
        return self._tables[name][self._offset : self._offset + shape.numel()].view(shape)


def round_to_bfloat16_(values: Tensor, noise: Noise) -> Tensor:
    """Round contiguous fp32 values in place to numbers that bf16 holds, stochastically; return them (still fp32).

    bf16 is the upper half of fp32's bits; 16 random bits added below carry into it with exactly the right probability.
    """
    values.view(torch.int32).add_(noise.bits(values.shape)).bitwise_and_(-_VALUES)
    return values


def quantise_rows(values: Tensor, noise: Noise, out: Tensor, scale: Tensor, scratch: Tensor) -> None:
    """Write (c, D) fp32 values as int8 `out` (c, D) and `scale` (c,): value ~ out * scale; the largest of a row is +-127.

    Args:
        scratch: (c, D) fp32, overwritten.
    """
    largest = torch.abs(values, out=scratch).amax(dim=1)
    torch.div(largest, 127.0, out=scale)
    factor = torch.where(largest > 0, 127.0 / largest, 0.0)
    torch.mul(values, factor[:, None], out=scratch)
    out.copy_(scratch.add_(noise.uniform(values.shape)).floor_().clamp_(-127, 127))
