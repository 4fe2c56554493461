"""The backbone's optimizer: its parameters and their factors, what it saves and loads, and the gradient norm with clipping."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint.tensor_file import overlaps

_LAST_STEP = 99_999_999  # that the name of a checkpoint's folder can tell


def build_optimizer(
    module: nn.Module,
    name: str,
    lr: float,
    momentum: float,
    weight_decay: float,
    beta2: float = 0.999,
    eps: float = 1e-8,
    lr_factors: Sequence[str] = (),
) -> torch.optim.Optimizer:
    """Return SGD or AdamW over every trainable parameter of module, weight decay on all of them as in the published recipes.

    Each group has a key `lr_factor`, by which whoever sets the learning rate multiplies it. The parameters are in the order of
    the module, however many groups there are.

    Args:
        name: sgd or adamw.
        momentum: of SGD; beta1 of AdamW.
        lr_factors: `part=factor`; a parameter takes that of the longest name that it lies in, for example layer1.0=0.1.

    Raises:
        ValueError: no parameter trains, or there is no such part.
    """
    factors = _parse_factors(module, lr_factors)
    parameters: list[dict[str, Any]] = []
    for path, parameter in module.named_parameters():
        if parameter.requires_grad:
            factor = factors[max((part for part in factors if _lies_in(path, part)), key=len)]
            if not parameters or parameters[-1]["lr_factor"] != factor:
                parameters.append({"params": [], "lr_factor": factor})
            parameters[-1]["params"].append(parameter)
    if not parameters:
        raise ValueError("backbone.freeze: no parameter is trainable; name fewer parts")
    leave_compiler_out()
    # fused: on CPU 3 times as fast as the loop and 6 times as fast as foreach
    if name == "adamw":
        return _AdamW(parameters, lr=lr, betas=(momentum, beta2), eps=eps, weight_decay=weight_decay, fused=True)
    return _SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)


def leave_compiler_out() -> None:
    """Let optimizers and DDP not import torch's compiler; nothing here is compiled.

    They import it to tell it that it must not touch them: 2.6 s and 150 MB in each process. A function that it has been told
    of carries a mark, so these get theirs before. Where a version of torch does it in another way, the import stays.
    """
    optimizer, ddp = torch.optim.Optimizer, nn.parallel.DistributedDataParallel
    methods = [optimizer.zero_grad, optimizer.state_dict, optimizer.load_state_dict, optimizer.add_param_group]
    for method in (*methods, getattr(ddp, "_inside_ddp_forward", None)):
        inner: Any = method
        while (inner := getattr(inner, "__wrapped__", None)) is not None:
            if not hasattr(inner, "__dynamo_disable"):
                setattr(inner, "__dynamo_disable", inner)


class _SGD(torch.optim.SGD):
    """torch's SGD; its step without the call that imports the compiler, see `leave_compiler_out`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.SGD.step)(self, closure)


class _AdamW(torch.optim.AdamW):
    """torch's AdamW in the same way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Sequence[str] = ()) -> None:
    """Load a saved state, but keep this optimizer's own settings: the configuration decides, not the file.

    Args:
        names: of the parameters that train, in their order, for an error.

    Raises:
        ValueError: the state is of another kind of optimizer, or its moments are not those of these parameters.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    kind = set(settings[0]) - {"lr_factor"}
    if any(set(saved) - {"params", "lr_factor"} != kind for saved in state["param_groups"]):
        raise ValueError("the checkpoint is of another optimizer; set optimizer.name to what it was, or start anew")
    # the groups may have changed with optimizer.lr_factors; the parameters and their order have not
    saved_order = [number for group in state["param_groups"] for number in group["params"]]
    here = optimizer.state_dict()["param_groups"]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if len(saved_order) != len(weights):
        raise ValueError(
            f"the checkpoint's optimizer holds {len(saved_order)} parameters, {len(weights)} "
            "train here; set backbone.freeze to what it was"
        )
    if not all(type(number) is int for number in saved_order) or len(set(saved_order)) < len(saved_order):
        raise ValueError("its param_groups do not name each parameter once, by a whole number")
    _check_moments(isinstance(optimizer, torch.optim.AdamW), weights, saved_order, state["state"], names)
    moments = {place: state["state"][number] for place, number in enumerate(saved_order) if number in state["state"]}
    optimizer.load_state_dict({"state": moments, "param_groups": here})
    # the fused step goes through memory as it lies, so a moment must lie there as its weight does (channels last)
    for weight, kept in optimizer.state.items():
        for name, moment in kept.items():
            if moment.ndim and moment.stride() != weight.stride():
                kept[name] = torch.empty_like(weight, dtype=moment.dtype).copy_(moment)
    for group, mine in zip(optimizer.param_groups, settings, strict=True):
        group.update(mine)


def _check_moments(
    is_adamw: bool, weights: Sequence[Tensor], order: Sequence[int], state: dict[int, Any], names: Sequence[str]
) -> None:
    """Raise ValueError unless a saved state holds just the moments that the fused step reads, for all weights or for none.

    The step trusts what it is given: a moment of another size makes it write beyond the end of the memory.
    """
    keys = {"exp_avg", "exp_avg_sq", "step"} if is_adamw else {"momentum_buffer"}
    if not isinstance(state, dict) or (state and set(state) != set(order)):
        raise ValueError("its moments are not of the parameters that its param_groups name")
    if not state:
        return
    for place, (number, weight) in enumerate(zip(order, weights, strict=True)):
        who, kept = names[place] if place < len(names) else f"parameter {place}", state[number]
        if not isinstance(kept, dict) or set(kept) != keys:
            found = ", ".join(sorted(map(str, kept))) if isinstance(kept, dict) else type(kept).__name__
            raise ValueError(f"{who} has the moments {found or 'none'}, needed are {', '.join(sorted(keys))}")
        for name in sorted(keys):
            shape, dtype = ((), torch.float32) if name == "step" else (tuple(weight.shape), weight.dtype)
            if fault := tensor_fault(kept[name], shape, dtype):
                raise ValueError(f"{name} of {who} {fault}")
            smallest = float(kept[name].min()) if name in ("step", "exp_avg_sq") and kept[name].numel() else 0.0
            if smallest < 0 or (name == "step" and not smallest <= _LAST_STEP):
                raise ValueError(f"{name} of {who} is out of range: {smallest:g}")


def tensor_fault(value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return what keeps a value that was read from a file from being a tensor of this shape and dtype, "" if nothing does.

    A sound one is dense, on the CPU, finite, and has memory of its own for each of its numbers.
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        return f"is no plain tensor but {getattr(value, 'layout', type(value).__name__)}"
    if tuple(value.shape) != shape:
        return f"is {tuple(value.shape)}, must be {shape}"
    if value.dtype != dtype:
        return f"holds {value.dtype}, must be {dtype}"
    if value.device.type != "cpu":
        return f"has no numbers, it is on the device {value.device.type}"
    if overlaps(value):
        return f"has memory for {value.untyped_storage().nbytes() // value.element_size()} numbers, must be {value.numel()}"
    if value.is_floating_point() and not bool(value.isfinite().all()):
        return "holds numbers that are not finite"
    return ""


def freeze(module: nn.Module, parts: Sequence[str]) -> None:
    """Keep parts of a network as they are: their parameters no longer require a gradient.

    Args:
        parts: names of modules or parameters as in its state dict, each with all that lies in it.

    Raises:
        ValueError: there is no such part.
    """
    for part in parts:
        _check_part(module, part, "backbone.freeze")
    for path, parameter in module.named_parameters():
        if any(_lies_in(path, part) for part in parts):
            parameter.requires_grad_(False)


def _lies_in(path: str, part: str) -> bool:
    return not part or path == part or path.startswith(f"{part}.")


def _check_part(module: nn.Module, part: str, key: str) -> None:
    if not any(_lies_in(path, part) for path, _ in module.named_parameters()):
        parts = ", ".join(name for name, _ in module.named_children())
        raise ValueError(f"{key}: this backbone has no part {part!r} that could train; its parts are {parts}")


def _parse_factors(module: nn.Module, texts: Sequence[str]) -> dict[str, float]:
    factors = {"": 1.0}
    for text in texts:
        part, equals, number = text.partition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = -1.0
        if not (equals and part and 0 <= factor < float("inf")):
            raise ValueError(f"optimizer.lr_factors: must be 'part=factor' with a factor of 0 or more, got {text!r}")
        _check_part(module, part, "optimizer.lr_factors")
        if factors.get(part, factor) != factor:
            raise ValueError(f"optimizer.lr_factors: {part} has two factors, {factors[part]:g} and {factor:g}; keep one")
        if not any(parameter.requires_grad for path, parameter in module.named_parameters() if _lies_in(path, part)):
            raise ValueError(f"optimizer.lr_factors: {part} does not train; take it out, or out of backbone.freeze")
        factors[part] = factor
    return factors


def unscale_and_clip_grad_norm_(module: nn.Module, scale: float, clip_norm: float) -> Tensor:
    """Divide module's gradients by scale and clip them to the L2 norm clip_norm (0: no clipping); return the norm before.

    One pass over the gradients does both. The norm is inf or nan if any gradient is, and then the gradients are useless.
    """
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients) / scale
    factor = torch.full_like(norm, 1.0 / scale)
    if clip_norm > 0:
        factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group of parameters the rate `lr` times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def set_training(module: nn.Module, freeze_norm: bool, frozen: Sequence[str] = ()) -> None:
    """Put a network into training mode, but for BatchNorm statistics if asked for, and for the frozen parts."""
    module.train()
    for path, part in module.named_modules():
        if (freeze_norm and isinstance(part, nn.modules.batchnorm._BatchNorm)) or any(_lies_in(path, name) for name in frozen):
            part.eval()


def is_finite(module: nn.Module) -> bool:
    """Return whether all parameters and buffers of a module are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in module.state_dict().values() if tensor.is_floating_point())
