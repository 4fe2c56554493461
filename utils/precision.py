"""The precision of training: the autocast dtype of each train.precision, and the loss scaler of fp16."""

import torch

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # train.precision -> dtype of the forward pass


class LossScaler:
    """Dynamic loss scale for fp16: halved at an overflow, doubled after `interval` good steps.

    The caller detects an overflow (a gradient norm that is not finite on any rank) and agrees on it over the ranks, so that
    the scale and the skipped steps are the same on all of them. torch's GradScaler decides in each process alone.
    If disabled (fp32, bf16), the scale is always 1.
    """

    def __init__(self, enabled: bool, initial: float = 65536.0, interval: int = 2000) -> None:
        self.enabled = enabled
        self.scale = initial if enabled else 1.0
        self.interval = interval
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """Adapt the scale after one optimizer step."""
        if not self.enabled:
            return
        if overflow:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps >= self.interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for load_state_dict; empty if the scaler is disabled."""
        return {"scale": self.scale, "good_steps": self.good_steps} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved state. The empty state of a run without a scaler (fp32, bf16) keeps the initial scale.

        Raises:
            ValueError: a value is out of range, or not a number.
        """
        if not isinstance(state, dict):
            raise ValueError(f"scaler must hold scale and good_steps, got {type(state).__name__}")
        if self.enabled and state:
            scale, good_steps = state["scale"], state["good_steps"]
            if type(scale) not in (int, float) or not 0 < scale < 1e38:
                raise ValueError(f"scaler: scale must be a number above 0 and below 1e38, got {scale!r:.80}")
            if type(good_steps) is not int or not 0 <= good_steps < self.interval:
                raise ValueError(f"scaler: good_steps must be a whole number below {self.interval}, got {good_steps!r:.80}")
            self.scale, self.good_steps = float(scale), good_steps
