"""The learning rate as a pure function of the optimizer step: nothing to save, nothing to restore."""

import math
from typing import NamedTuple

SCHEDULES = ("poly", "cosine", "step", "constant")


def steps_of(epochs: float, num_images: int, batch_size: int) -> int:
    """Return the optimizer steps, 1 at least, of so many epochs: whole batches, where 0.29 epochs of 100 batches are 29."""
    return max(1, int(epochs * num_images / batch_size + 1e-6))


class Schedule(NamedTuple):
    """A linear warm-up, then one of four curves. With t from 0 after the warm-up to 1 at total_steps, the rate is

        poly      min_lr + (peak - min_lr) (1 - t)^power                    the published ArcFace recipes have power 2
        cosine    min_lr + (peak - min_lr) (1 + cos(pi t)) / 2              Loshchilov and Hutter, arXiv 1608.03983, Eq. 5
        step      peak * factor^(number of milestones up to this step)      He et al., arXiv 1512.03385, Section 3.4
        constant  peak

    Step 0 of a warm-up of n steps runs at peak / n and step n - 1 at peak.
    """

    kind: str  # of SCHEDULES
    peak: float  # the largest rate
    total_steps: int
    warmup_steps: int = 0  # n, optimizer steps
    power: float = 2.0  # of poly
    min_lr: float = 0.0  # of poly and cosine, the rate at total_steps
    milestones: tuple[int, ...] = ()  # of step, ascending: milestone m counts from the optimizer step with the index m on
    factor: float = 0.1  # of step

    def rate(self, step: int) -> float:
        """Return the rate of the optimizer step with this index, from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        if self.kind == "step":
            return self.peak * self.factor ** sum(milestone <= step for milestone in self.milestones)
        left = max(0.0, 1.0 - (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        share = left**self.power if self.kind == "poly" else (1.0 - math.cos(math.pi * left)) / 2.0
        return self.min_lr + (self.peak - self.min_lr) * share

    def describe(self) -> str:
        """Return the schedule in words, for the log."""
        words = f"poly with power {self.power:g}" if self.kind == "poly" else self.kind
        if self.warmup_steps >= self.total_steps:
            words += f", rises to {self.rate(self.total_steps - 1):g} of {self.peak:g}"
            return f"{words}: the warm-up has {self.warmup_steps} steps, the run {self.total_steps}"
        words += f", {self.peak:g}" if self.kind in ("step", "constant") else f", from {self.peak:g} to {self.min_lr:g}"
        if self.kind == "step":
            reached = [f"{milestone}" for milestone in self.milestones if milestone < self.total_steps]
            beyond = len(self.milestones) - len(reached)
            words += f", x {self.factor:g} after the steps {', '.join(reached)}" if reached else ""
            words += f"; {beyond} milestone(s) are beyond the last step, {self.total_steps}" if beyond else ""
        return words + (f", warm-up in {self.warmup_steps} steps" if self.warmup_steps else "")
