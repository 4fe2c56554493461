"""Saves and loads trainer.pt of a checkpoint: the state of the optimizer, the loss scaler and the margins.

The fused optimizer step checks nothing, so every tensor is checked before it is loaded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from utils.optim import Lamb, optimizer_names, weights_of
from utils.precision import LossScaler

from .format import SOFTMAX
from .tensor_file import overlaps

_LAST_STEP = 99_999_999  # the name of a checkpoint's folder has eight digits
_OF_RULES = {"lr_factor", "match"}  # keys that our parameter groups have besides torch's


class TrainerState(NamedTuple):
    """What a run needs to resume, besides its backbone and class centres."""

    backbone: nn.Module
    margins: Mapping[str, nn.Module]  # by the name of their head
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    ema_updates: Tensor | None = None  # () int64, steps in the moving average of the backbone; None = there is no average

    def state(self) -> dict[str, Any]:
        """Return what `load` takes."""
        counted = {} if self.ema_updates is None else {"ema_updates": self.ema_updates}
        return {
            **counted,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "margins": {name: margin.state_dict() for name, margin in self.margins.items()},
            "trained": optimizer_names(self.backbone, self.optimizer),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load a saved state.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, RuntimeError: it does not fit this run.
        """
        margins = saved["margins"] if "margins" in saved else {SOFTMAX: saved.get("margin", {})}  # an older checkpoint has one
        if not isinstance(margins, dict) or set(margins) != set(self.margins):
            found = ", ".join(sorted(map(str, margins))) if isinstance(margins, dict) else type(margins).__name__
            raise ValueError(
                f"it has the margins of the heads {found or 'none'}, this run has {', '.join(self.margins)}; set tasks and "
                "compatible.path to what they were"
            )
        for name, margin in self.margins.items():
            _load_margin(margin, margins[name])
        trained = saved.get("trained")  # missing in an imported checkpoint
        if trained is not None:
            _check_trained(self.backbone, trained)
        load_optimizer(self.optimizer, saved["optimizer"], self.backbone, trained)
        self.scaler.load_state_dict(saved["scaler"])
        if self.ema_updates is not None:  # an average that the checkpoint does not have begins with none
            updates = saved.get("ema_updates", torch.zeros((), dtype=torch.int64))
            if fault := tensor_fault(updates, (), torch.int64):
                raise ValueError(f"ema_updates {fault}")
            if not 0 <= int(updates) <= _LAST_STEP:
                raise ValueError(f"ema_updates is out of range: {int(updates)}")
            self.ema_updates.copy_(updates)


def _load_margin(margin: nn.Module, saved: Any) -> None:
    """Load the statistics of a margin; ValueError names a statistic that does not match this margin's."""
    own = margin.state_dict()
    if not isinstance(saved, dict) or set(saved) != set(own):
        found = ", ".join(sorted(map(str, saved))) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(
            f"the saved margin has {found or 'nothing'}, that of this run's loss has {', '.join(own) or 'nothing'}; set "
            "the section loss and the optimizer of the class centres to what they were, or start a new run with another "
            "run.name, with the checkpoint's weights in init.backbone and init.head"
        )
    for name, value in saved.items():
        if fault := tensor_fault(value, tuple(own[name].shape), own[name].dtype):
            raise ValueError(f"margin: {name} {fault}")
    margin.load_state_dict(saved)


def _check_trained(backbone: nn.Module, saved: Sequence[str]) -> None:
    """Raise ValueError if the trained parameters have changed, since equal blocks could get each other's moments."""
    here = trained_names(backbone)
    changed = sorted(set(saved) ^ set(here))
    if changed:
        was, now = ("trained", "does not") if changed[0] in saved else ("did not train", "does")
        keys = "backbone.freeze to what it was, and backbone.train_last and trained_scale"
        raise ValueError(f"{changed[0]} {was} then and {now} here; set {keys}")
    if len(saved) != len(here):
        raise ValueError("it names a trained parameter twice")


def trained_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that train, in the order of the module."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], module: nn.Module, saved_names: Sequence[str] | None = None
) -> None:
    """Load a saved state, but keep this optimizer's settings, which come from the configuration.

    Args:
        saved_names: the names of the parameters in the state, in its order; None = the trainable ones in module order.

    Raises:
        ValueError: the state is of another kind of optimizer, or its moments do not belong to these parameters.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    kind = set(settings[0]) - _OF_RULES
    if any(set(saved) - {"params", *_OF_RULES} != kind for saved in state["param_groups"]):
        raise ValueError("it is of another optimizer; set optimizer.name to what it was, or start a new run")
    saved_order = [number for group in state["param_groups"] for number in group["params"]]
    here = optimizer.state_dict()["param_groups"]
    names, weights = optimizer_names(module, optimizer), [*weights_of(optimizer)]
    saved_names = trained_names(module) if saved_names is None else saved_names
    if len(saved_order) != len(saved_names) or len(saved_names) != len(names):
        raise ValueError(
            f"the saved optimizer has {len(saved_order)} parameters, {len(weights)} train here; set backbone.freeze to what "
            "it was"
        )
    if not all(type(number) is int for number in saved_order) or len(set(saved_order)) < len(saved_order):
        raise ValueError("its param_groups must list each parameter once, as a whole number")
    # the rules may have changed, and with them the order of the parameters
    saved_order = [dict(zip(saved_names, saved_order, strict=True))[name] for name in names]
    _check_moments(isinstance(optimizer, (torch.optim.AdamW, Lamb)), weights, saved_order, state["state"], names)
    moments = {place: state["state"][number] for place, number in enumerate(saved_order) if number in state["state"]}
    optimizer.load_state_dict({"state": moments, "param_groups": here})
    # the fused step ignores strides, so a moment must have the memory layout of its weight (channels last)
    for weight, kept in optimizer.state.items():
        for name, moment in kept.items():
            if moment.ndim:  # always a copy: in a file two moments may share their memory
                kept[name] = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)
            else:  # a number of steps, which torch leaves on the CPU
                kept[name] = moment.to(weight.device)
    for group, mine in zip(optimizer.param_groups, settings, strict=True):
        group.update(mine)


def _check_moments(
    has_two: bool, weights: Sequence[Tensor], order: Sequence[int], state: dict[int, Any], names: Sequence[str]
) -> None:
    """Raise ValueError unless a saved state holds exactly the moments that the fused step reads, for all weights or for none.

    The step does not check: with a moment of another size it would write beyond the end of the memory.
    """
    keys = {"exp_avg", "exp_avg_sq", "step"} if has_two else {"momentum_buffer"}
    if not isinstance(state, dict) or (state and set(state) != set(order)):
        raise ValueError("its moments do not belong to the parameters that its param_groups list")
    if not state:
        return
    for place, (number, weight) in enumerate(zip(order, weights, strict=True)):
        who, kept = names[place], state[number]
        if not isinstance(kept, dict) or set(kept) != keys:
            found = ", ".join(sorted(map(str, kept))) if isinstance(kept, dict) else type(kept).__name__
            raise ValueError(f"{who} has the moments {found or 'none'}, must have {', '.join(sorted(keys))}")
        for name in sorted(keys):
            shape, dtype = ((), torch.float32) if name == "step" else (tuple(weight.shape), weight.dtype)
            if fault := tensor_fault(kept[name], shape, dtype):
                raise ValueError(f"{name} of {who} {fault}")
            smallest = float(kept[name].min()) if name in ("step", "exp_avg_sq") and kept[name].numel() else 0.0
            if smallest < 0 or (name == "step" and not smallest <= _LAST_STEP):
                raise ValueError(f"{name} of {who} is out of range: {smallest:g}")


def tensor_fault(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return why a value from a file is not a valid tensor of this shape and dtype, "" if it is.

    A valid tensor is dense, on the CPU, finite, and has separate memory for each of its numbers.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return f"must be a dense tensor, got {getattr(value, 'layout', type(value).__name__)}"
    if tuple(value.shape) != shape:
        return f"is {tuple(value.shape)}, must be {shape}"
    if value.dtype != dtype:
        return f"holds {value.dtype}, must be {dtype}"
    if value.device.type != "cpu":
        return f"has no numbers, because it is on the device {value.device.type}"
    if overlaps(value):
        return f"has memory for {value.untyped_storage().nbytes() // value.element_size()} numbers, must be {value.numel()}"
    if value.is_floating_point() and not bool(value.isfinite().all()):
        return "holds numbers that are not finite"
    return ""
