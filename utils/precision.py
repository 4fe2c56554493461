"""The precision of training: the autocast dtype of each train.precision, and the loss scaler of fp16."""

import torch
from torch import Tensor

from .distributed import World, any_ranks

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # train.precision -> dtype of the forward pass
PRECISIONS = ("auto", *AUTOCAST)


def is_fast_in_bf16(device: torch.device) -> bool:
    """Return whether a device has units for bf16 products. Others emulate them, on a CPU many times more slowly than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # ATEN_CPU_CAPABILITY makes torch compute as a lesser processor would
    uses_avx512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return uses_avx512 and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def choose_precision(name: str, fast_in_bf16: bool) -> str:
    """Return a key of AUTOCAST: the name itself; for auto bf16 where the devices are fast at it, else fp32."""
    if name != "auto":
        return name
    return "bf16" if fast_in_bf16 else "fp32"


def slow_precision(setting: str, name: str, device: torch.device) -> list[str]:
    """Return a warning if a CPU has no units for a precision of AUTOCAST, which this setting names ("--precision ")."""
    fast_in_bf16 = is_fast_in_bf16(device)
    # torch leaves fp16 to oneDNN where that has units for it (AVX512_FP16), and converts number by number elsewhere
    fast_in_fp16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    if device.type != "cpu" or {"bf16": fast_in_bf16, "fp16": fast_in_fp16}.get(name, True):
        return []
    best = choose_precision("auto", fast_in_bf16)
    return [f"{setting}{name}: this processor emulates it, many times slower than fp32; {setting}auto takes {best}"]


def all_are_fast_in_bf16(world: World) -> bool:
    """Return whether the devices of all processes have units for bf16 products. A collective call."""
    return not any_ranks([not is_fast_in_bf16(world.device)], world)[0]


def agreed_precision(name: str, world: World) -> str:
    """Return the precision that all processes compute in; for auto bf16 where all devices are fast at it, else fp32."""
    return choose_precision(name, all_are_fast_in_bf16(world))


def set_tf32(allowed: bool) -> None:
    """Say whether CUDA may round the inputs of fp32 convolutions and matrix products to TF32; torch's own default is mixed.

    Sums of a product of 16-bit matrices are fp32: by torch's default, parts of them are added in 16 bits.
    """
    torch.backends.cudnn.allow_tf32 = allowed
    products = torch.backends.cuda.matmul
    products.allow_tf32 = allowed
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = False


class LossScaler:
    """Dynamic loss scale for fp16: halved at an overflow, doubled after `interval` good steps.

    It lives on the device, so the host need not know whether a step overflowed. The caller says so, with the same answer on
    all ranks: the norm of the averaged gradients is not finite. So scale and skipped steps are equal everywhere, while torch's
    GradScaler keeps that flag to each process. Disabled (fp32, bf16), the scale is 1 for ever.
    """

    def __init__(
        self, enabled: bool, initial: float = 65536.0, interval: int = 2000, device: torch.device | str = "cpu"
    ) -> None:
        self.enabled = enabled
        self.interval = interval
        self.scale = torch.tensor(initial if enabled else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, good: Tensor) -> None:
        """Adapt the scale after one optimizer step; `good`, () bool, says whether nothing overflowed."""
        if not self.enabled:
            return
        steps = torch.where(good, self.good_steps + 1, 0)
        doubled = steps >= self.interval
        self.scale = torch.where(good, torch.where(doubled, self.scale * 2, self.scale), self.scale / 2)
        self.good_steps = torch.where(doubled, 0, steps)

    def state_dict(self) -> dict[str, float]:
        """Return what load_state_dict takes; nothing where the scaler is off."""
        return {"scale": float(self.scale), "good_steps": int(self.good_steps)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take up a saved state; that of a run without a scaler (fp32, bf16) says nothing, and the initial scale stays.

        Raises:
            ValueError: it is out of range, or no number.
        """
        if not isinstance(state, dict):
            raise ValueError(f"scaler must hold scale and good_steps, got {type(state).__name__}")
        if self.enabled and state:
            scale, good_steps = state["scale"], state["good_steps"]
            if type(scale) not in (int, float) or not 0 < scale < 1e38:
                raise ValueError(f"scaler: scale must be a number above 0 and below 1e38, got {scale!r:.80}")
            if type(good_steps) is not int or not 0 <= good_steps < self.interval:
                raise ValueError(f"scaler: good_steps must be a whole number below {self.interval}, got {good_steps!r:.80}")
            self.scale, self.good_steps = self.scale.new_tensor(scale), self.good_steps.new_tensor(good_steps)
