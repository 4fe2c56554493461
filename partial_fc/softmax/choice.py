"""Chooses at the start of a run how a chunk's exponentials are computed on CUDA: after the product of its logits, or in it.

Only a measurement can tell which is faster on a card. So the first pass over one chunk of the head's own centres, with as many
samples as the run has, is computed and timed in each form: `separate`, and those of FUSED (kernels/fused.py), of which one is
taken only if its exponentials and their sums are those of fp32.

Forms round differently, so two runs are bit-identical only if they take the same one. The times are therefore added up over
the ranks, which then all take the same form. A checkpoint's configuration names it, and a run that resumes takes it without
comparing. Only if it does not run there, on another card for example, is there another measurement. head.kernels can name a
form, too.
Shapes: B = samples of the global micro-batch, D = embedding size, c = classes of one chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..collectives import Collectives
from ..config import HeadConfig
from ..kernels.plain import FUSED, PlainKernels, Tile, padded_rows
from ..sampling.planning import Chunk, num_active
from .passes import Batch, TwoPass

SEPARATE = "separate"
FORMS = (SEPARATE, *FUSED)
_ROUNDS, _PASSES = 5, 5  # the best of so many rounds counts
_BLOCK = 4096  # classes compared at once


def choose_form(passes: TwoPass, config: HeadConfig, chunk: int, samples: int, recorded: str, collectives: Collectives) -> str:
    """Let the kernels of the passes compute exponentials in the fastest form, and return its name; "" if there is no choice.

    A collective call on CUDA, before the first step.

    Args:
        chunk: c.
        samples: B.
        recorded: what this function returned for the run that is resumed; anything else = measure.

    Raises:
        ValueError: on all ranks, if head.kernels asks for a form that cannot be had.
    """
    kernels, margin, wanted = passes.kernels, passes.margin, config.kernels
    is_cuda = passes.workspace.device.type == "cuda" or kernels.name == "triton"
    linear = margin.linear_negatives and margin.constant_scale and passes.shift is not None
    bare = config.sub_centers == 1 and config.logit_correction == "none" and not (passes.smooths and passes.limit)
    if not (is_cuda and linear and bare and passes.dtype == torch.bfloat16):
        if wanted in FUSED:
            raise ValueError(
                f"head.kernels={wanted} needs CUDA, head.matmul_dtype=bf16, head.sub_centers=1, head.logit_correction=none, no "
                "filter with label smoothing, and a loss whose negatives are one scale times the cosine, like arcface; set "
                "head.kernels=auto"
            )
        return ""
    if wanted == "plain":
        return ""
    classes = min(chunk, num_active(passes.centre_store.num_rows, 1, max(config.all_rates)))
    for forms in ((wanted,),) if wanted != "auto" else ((recorded,), FORMS) if recorded in FORMS else (FORMS,):
        faults, times = _measured(passes, classes, samples, forms)
        best = torch.tensor(times, device=passes.workspace.device)
        means = [total / collectives.world_size for total in collectives.sum(best).tolist()]
        fastest = min(range(len(forms)), key=means.__getitem__)
        words = [f"{form} {_words(mean, faults[form])}" for form, mean in zip(forms, means, strict=True)]
        if means[fastest] < math.inf:
            break
    else:
        raise ValueError(
            f"head.kernels={wanted}: {', '.join(words)}; set head.kernels={'plain' if wanted == 'auto' else 'auto'}"
        )
    kernels.fused = "" if forms[fastest] == SEPARATE else forms[fastest]
    kernels.words = f"{kernels.words}, exponentials {forms[fastest]} (first pass over a chunk: {', '.join(words)})"
    return forms[fastest]


def _measured(passes: TwoPass, classes: int, samples: int, forms: tuple[str, ...]) -> tuple[dict[str, str], list[float]]:
    """Return why each form cannot be taken, and its time in ms. Never an error: the other ranks wait for these times."""
    try:
        trial = _Trial(passes, classes, samples)
        faults = {form: trial.fault(form) for form in forms}
        times = [[math.inf if faults[form] else trial.milliseconds(form) for form in forms] for _ in range(_ROUNDS)]
        return faults, [min(column) for column in zip(*times, strict=True)]
    except Exception as error:  # no memory, or a device that an earlier form broke
        return dict.fromkeys(forms, _reason(error)), [math.inf] * len(forms)


def _reason(error: Exception) -> str:
    """Return what a compiler or a driver says, in one line; some begin with the place and end with the reason."""
    lines = [line.strip()[:150] for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1])))


def _words(mean: float, fault: str) -> str:
    return f"{mean:.3g} ms" if mean < math.inf else f"does not work here: {fault or 'on another process'}"


class _Trial:
    """The first pass over the first chunk of a head's centres, with embeddings of classes of that chunk.

    The classes of half of the samples are taken to lie in another chunk, so that their exponentials are large.
    """

    def __init__(self, passes: TwoPass, classes: int, samples: int) -> None:
        self.passes, self.store, device = passes, passes.centre_store, passes.workspace.device
        generator, number = torch.Generator().manual_seed(0), torch.arange(samples, device=device)
        own = number * classes // samples
        centres = self.store.tensors["centres"][own].float() * self.store.inverse_norms[own, None]
        noise = torch.randn(samples, self.store.dim, generator=generator).to(device) / self.store.dim**0.5
        places = own.where(number % 2 == 0, -1)
        norms = torch.ones(samples, device=device)
        self.batch = Batch(F.normalize(centres + noise), norms, torch.zeros_like(norms), places, {})
        self.chunk = Chunk(slice(0, classes), classes, 0, (own[:0], own[:0]))
        self.size = (padded_rows(classes, passes.dtype), samples)

    def run(self, form: str) -> Tensor:
        """Return the sums (B,) of the exponentials, which then are in a buffer of the passes; without the interclass filter."""
        limit, self.passes.limit, self.passes.kernels.fused = self.passes.limit, None, "" if form == SEPARATE else form
        try:
            return self.passes.forward(self.batch, [self.chunk], 0).sums[0]
        finally:
            self.passes.limit = limit

    def fault(self, form: str) -> str:
        """Return in one line why a form cannot be taken, "" if it can."""
        if form == SEPARATE:
            return ""
        if self.passes.kernels.name != "triton":
            return "it needs Triton"
        try:
            return "" if self._is_right(self.run(form)) else "its numbers are wrong"
        except Exception as error:  # what a compiler and a driver raise has many kinds
            return _reason(error)

    def milliseconds(self, form: str) -> float:
        """Return the time of a pass."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_PASSES):
            self.run(form)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / _PASSES

    def _is_right(self, sums: Tensor) -> bool:
        """Return whether sums and exponentials are those of fp32 logits, but for rounding (see tests/rounding.py)."""
        passes, batch, shift = self.passes, self.batch, self.passes.shift
        assert shift is not None
        stored = passes.workspace.buffer("logits", self.size, passes.dtype)
        factor = (batch.unit * passes.gain(batch)).to(passes.dtype).float().t()
        centres = self.store.operand(self.chunk.select, passes.dtype, self.size[0])
        plain, expected = PlainKernels(passes.workspace), torch.zeros_like(sums)
        # of two sums of D products, whose terms tensor cores may cut off, and of exp
        of_logits = (8 * self.store.dim**0.5 + self.store.dim / 4 + 8) * 2.0**-24 * passes.gain(batch)
        right = torch.ones((), dtype=torch.bool, device=sums.device)
        for low in range(0, self.chunk.size, _BLOCK):
            rows = slice(low, min(low + _BLOCK, self.chunk.size))
            exact = centres[rows].float() @ factor
            plain.exponentials(Tile(exact, self.store.inverse_norms[rows], batch.places, low), shift, expected)
            right &= ((stored[rows].float() - exact).abs() <= (2.0**-7 + of_logits) * exact).all()
        return bool(right & ((sums - expected).abs() <= (2.0**-14 + of_logits) * expected).all())
