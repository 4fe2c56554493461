"""The learning rate as a pure function of the optimizer step: nothing to save, nothing to restore."""


def learning_rate(step: int, peak: float, total_steps: int, warmup_steps: int, power: float) -> float:
    """Return the rate of the optimizer step `step` (from 0): linear warm-up, then polynomial decay to 0 at total_steps.

    Step 0 of a warm-up of n steps runs at peak / n and step n - 1 at peak. The published recipes use power 2.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * max(0.0, 1.0 - done) ** power
