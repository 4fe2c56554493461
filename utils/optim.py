"""Optimizers, and the rate and weight decay of each parameter: ordered rules, presets of rules, and decay by layer."""

import fnmatch
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDING = (
    *("patch_embed", "pos_embed", "cls_token", "mask_token", "reg_token", "norm_pre", "conv_stem", "bn1"),  # or stem
    "keypoint_linear",
)
_STEM = ("conv1", "bn1", "prelu")  # of an IResNet


class ParameterRule(NamedTuple):
    """The learning rate and weight decay of the parameters that it matches.

    `match` is the name of a module or parameter, which includes everything inside it; or a pattern with *, ? or [] that must
    match the whole name of a parameter; or `norms` (all parameters of normalisation layers) or `biases` (all parameters called
    bias); or the name of one of PRESETS.
    """

    match: str
    lr_factor: float = 1.0  # factor on the learning rate, 0 or more
    weight_decay: float | None = None  # None = the optimizer's. Of the preset detectron, that of the norms; None = 0


_NO_DECAY = (ParameterRule("norms", weight_decay=0.0), ParameterRule("biases", weight_decay=0.0))
# no_decay_norm_bias: He et al., arXiv 1812.01187, Section 3.1. detectron: its defaults BIAS_DOUBLE_LR, BIAS_WEIGHT_DECAY and
# WEIGHT_DECAY_GN, https://github.com/facebookresearch/Detectron
PRESETS = {"no_decay_norm_bias": _NO_DECAY, "detectron": (_NO_DECAY[0], ParameterRule("biases", 2.0, 0.0))}


def build_groups(
    module: nn.Module, rules: Sequence[ParameterRule], weight_decay: float, layer_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer, with the keys params, match (in words), lr_factor and weight_decay.

    The first rule that matches a trainable parameter applies. Parameters without a rule have the given weight decay, as in the
    published recipes.

    Args:
        layer_decay: the learning rate of layer k of L is layer_decay^(L - k) times that of the rule; see `layer_numbers`.

    Raises:
        ValueError: no parameter is trainable, a rule applies to none, or the layers of this network are not known.
    """
    trainable = {path: parameter for path, parameter in module.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ValueError("no parameter is trainable")
    of_norms = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        if isinstance(part, _NORMS)
        for name, _ in part.named_parameters(recurse=False)
    }
    layers, last = layer_numbers(list(trainable)) if layer_decay != 1.0 else (dict.fromkeys(trainable, 0), 0)
    groups: list[dict[str, Any]] = []
    left = dict(trainable)
    for rule in (*rules, ParameterRule("")):
        before = len(left)
        for part in _expand(rule):
            matched = [path for path, _ in module.named_parameters() if _matches(part.match, path, of_norms) and path in left]
            decay = weight_decay if part.weight_decay is None else part.weight_decay
            for layer in sorted({layers[path] for path in matched}):
                params = [left.pop(path) for path in matched if layers[path] == layer]
                words = ", ".join(filter(None, [part.match, f"layer {layer} of {last}" if last else ""]))
                factor = part.lr_factor * layer_decay ** (last - layer)
                groups.append({"params": params, "match": words, "lr_factor": factor, "weight_decay": decay})
        if rule.match and len(left) == before:
            _refuse(module, rule, of_norms, trainable)
    return groups


def _refuse(module: nn.Module, rule: ParameterRule, of_norms: set[str], trainable: Sequence[str] | dict[str, Any]) -> None:
    """Raise ValueError for a rule that applies to no parameter, with the reason."""
    parts = _expand(rule)
    matched = [path for path, _ in module.named_parameters() if any(_matches(part.match, path, of_norms) for part in parts)]
    if not matched:
        check_part(module, rule.match)
    why = "are matched by an earlier rule" if any(path in trainable for path in matched) else "are frozen"
    raise ValueError(f"match {rule.match!r}: all parameters that it matches {why}; take the rule out")


def _expand(rule: ParameterRule) -> Sequence[ParameterRule]:
    """Return the rules of a preset, or the rule itself."""
    if rule.match not in PRESETS:
        return (rule,)
    if rule.match != "detectron" and rule.weight_decay is not None:
        raise ValueError(f"match {rule.match!r} sets the weight decay itself; take out weight_decay {rule.weight_decay:g}")
    norms, biases = (part._replace(lr_factor=part.lr_factor * rule.lr_factor) for part in PRESETS[rule.match])
    return (norms if rule.weight_decay is None else norms._replace(weight_decay=rule.weight_decay), biases)


def layer_numbers(names: Sequence[str]) -> tuple[dict[str, int], int]:
    """Return the layer of each parameter by its name, and the number L of the last layer.

    The embedding (of an IResNet: the stem) is layer 0, block i of a vision transformer is layer i + 1 (of an IResNet: stage i
    is layer i), and all that follows is layer L. Names of a package's network have network. in front. Bao et al., BEiT,
    https://arxiv.org/abs/2106.08254, Appendix; He et al., MAE, https://arxiv.org/abs/2111.06377, Appendix A.1.

    Raises:
        ValueError: the names are those of neither network.
    """
    for pattern, first, offset in ((r"blocks\.(\d+)\.", _EMBEDDING, 1), (r"layer(\d+)\.", _STEM, 0)):
        own = {name: name.removeprefix("network.") for name in names}
        inside = {name: int(found[1]) + offset for name in names if (found := re.match(pattern, own[name]))}
        if inside:
            last = max(inside.values()) + 1
            return {name: inside.get(name, 0 if own[name].split(".")[0] in first else last) for name in names}, last
    raise ValueError("this backbone has no layers called blocks.N (a vision transformer) or layerN (IResNet); take it out")


def _matches(match: str, path: str, of_norms: set[str]) -> bool:
    if match in ("", "norms"):
        return not match or path in of_norms
    if match == "biases":
        return path.rpartition(".")[2] == "bias"
    return fnmatch.fnmatchcase(path, match) if any(letter in match for letter in "*?[") else lies_in(path, match)


def lies_in(path: str, part: str) -> bool:
    """Return whether the name of a parameter or module is `part`, or lies inside it."""
    return path == part or path.startswith(f"{part}.")


def check_part(module: nn.Module, part: str) -> None:
    """Raise ValueError unless a parameter lies in the part of this name."""
    if not any(lies_in(path, part) for path, _ in module.named_parameters()):
        parts = ", ".join(name for name, _ in module.named_children())
        raise ValueError(f"this backbone has no trainable part {part!r}; its parts are {parts}")


def build_optimizer(
    module: nn.Module,
    name: str,
    lr: float,
    momentum: float,
    weight_decay: float,
    beta2: float = 0.999,
    eps: float = 1e-8,
    rules: Sequence[ParameterRule] = (),
    nesterov: bool = False,
    layer_decay: float = 1.0,
) -> torch.optim.Optimizer:
    """Return SGD, AdamW or LAMB over every trainable parameter of module.

    The name is sgd, adamw or lamb; momentum is beta1 of the latter, nesterov is of SGD. The groups are of `build_groups`;
    `set_learning_rate` multiplies the rate of each by its `lr_factor`. All optimizers read the flag of `step_if` on the device.

    Raises:
        ValueError: no parameter is trainable, a rule applies to none, or layer_decay does not know the network's layers.
    """
    groups = build_groups(module, rules, weight_decay, layer_decay)
    leave_compiler_out()
    if name == "lamb":
        return Lamb(groups, lr, (momentum, beta2), eps, weight_decay)
    # on the CPU, fused is 3 times as fast as the loop and 6 times as fast as foreach
    if name == "adamw":
        return _AdamW(groups, lr=lr, betas=(momentum, beta2), eps=eps, weight_decay=weight_decay, fused=True)
    return _SGD(groups, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, fused=True)


def describe_groups(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a log line for each group: what it matches, its size, its rate and its weight decay."""
    rows = []
    for group in optimizer.param_groups:
        name = group["match"] or ("all others" if len(optimizer.param_groups) > 1 else "all")
        numbers = sum(parameter.numel() for parameter in group["params"])
        rows.append((name, f"{len(group['params'])}", f"{numbers:,}", f"{group['lr_factor']:g}", f"{group['weight_decay']:g}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        f"optimizer, {name + ':':<{widths[0] + 1}} {count:>{widths[1]}} parameters, {numbers:>{widths[2]}} numbers, "
        f"lr x {factor:>{widths[3]}}, weight decay {decay:>{widths[4]}}"
        for name, count, numbers, factor, decay in rows
    ]


def optimizer_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in the optimizer's order."""
    names = {parameter: path for path, parameter in module.named_parameters()}
    return [names[weight] for weight in weights_of(optimizer)]


def leave_compiler_out() -> None:
    """Keep optimizers and DDP from importing torch's compiler, since nothing here is compiled.

    They import it only to exclude themselves from compilation, which costs 2.6 s and 150 MB in each process. torch marks each
    excluded function, so this sets the marks beforehand. If a version of torch uses another mark, the import still happens.
    """
    optimizer, ddp = torch.optim.Optimizer, nn.parallel.DistributedDataParallel
    methods = [optimizer.zero_grad, optimizer.state_dict, optimizer.load_state_dict, optimizer.add_param_group]
    for method in (*methods, getattr(ddp, "_inside_ddp_forward", None)):
        inner: Any = method
        while (inner := getattr(inner, "__wrapped__", None)) is not None:
            if not hasattr(inner, "__dynamo_disable"):
                setattr(inner, "__dynamo_disable", inner)


class _SGD(torch.optim.SGD):
    """torch's fused SGD, called without what torch looks for around it, which takes the host longer than the launch."""

    found_inf: Tensor | None = None  # of `step_if`

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            moments = []
            for weight in weights if group["momentum"] else ():
                state = self.state[weight]
                if "momentum_buffer" not in state:  # torch's would never be written if the first step is skipped
                    state["momentum_buffer"] = torch.zeros_like(weight)
                moments.append(state["momentum_buffer"])
            if weights:
                settings = {
                    name: group[name] for name in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
                }
                gradients = [weight.grad for weight in weights]
                torch._fused_sgd_(weights, gradients, moments, is_first_step=False, found_inf=self.found_inf, **settings)


class _AdamW(torch.optim.AdamW):
    """torch's AdamW, with a step that does not import the compiler, see `leave_compiler_out`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


def freeze(module: nn.Module, parts: Sequence[str]) -> None:
    """Freeze parameters, and modules with all inside, by name; ValueError if one does not exist, or none is left to train."""
    for part in parts:
        check_part(module, part)
    for path, parameter in module.named_parameters():
        if any(lies_in(path, part) for part in parts):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("no parameter is trainable; freeze fewer parts")


def frozen_parts(module: nn.Module, parts: Sequence[str], train_last: int) -> list[str]:
    """Return the parts of a network for `freeze`: those given, and if train_last > 0 all before its last blocks or stages.

    Raises:
        ValueError: it has no blocks, or not so many.
    """
    if not train_last:
        return [*parts]
    numbers, last = layer_numbers([path for path, _ in module.named_parameters()])
    if train_last >= last:
        raise ValueError(f"this backbone has {last - 1} blocks or stages, got {train_last}; take fewer, or 0 for the whole")
    names = [re.match(r"(network\.)?(blocks\.\d+|\w+)", path) for path, number in numbers.items() if number < last - train_last]
    return [*parts, *dict.fromkeys(found[0] for found in names if found)]


def weights_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield all weights of an optimizer: those of a network that train, found in a tenth of the time of `parameters()`."""
    return (weight for group in optimizer.param_groups for weight in group["params"])


def unscale_and_clip_grad_norm_(weights: Iterable[nn.Parameter], scale: Tensor, clip_norm: float, clip_value: float) -> Tensor:
    """Divide the weights' gradients by scale and clip them; return their L2 norm before they were clipped.

    First each number is clipped to [-clip_value, clip_value], then all together to the L2 norm clip_norm; 0 = not at all. One
    pass over the gradients divides and clips the norm. If any gradient is inf or nan, so is the norm, and the gradients are
    useless.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = _norm(gradients) / scale
    factor, left = 1.0 / scale, norm
    if clip_value > 0:
        torch._foreach_mul_(gradients, factor)
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)
        factor, left = torch.ones_like(norm), _norm(gradients)
    if clip_norm > 0:
        factor = factor * (clip_norm / (left + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)
    return norm


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm () of all of them together; torch's get_total_norm is the same, and asks each for its device."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def step_if(optimizer: torch.optim.Optimizer, good: Tensor) -> None:
    """Take a step of one of `build_optimizer`'s, or none: the device decides by the flag `good`, () bool, without the host."""
    fused: Any = optimizer
    fused.grad_scale, fused.found_inf = None, (~good).float()
    optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each parameter group to `lr` times its factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def set_training(module: nn.Module, freeze_norm: bool, frozen: Sequence[str] = ()) -> None:
    """Put a network into training mode, except for the frozen parts, and for BatchNorm if freeze_norm is set."""
    module.train()
    for path, part in module.named_modules():
        if (freeze_norm and isinstance(part, nn.modules.batchnorm._BatchNorm)) or any(lies_in(path, name) for name in frozen):
            part.eval()


def is_finite(module: nn.Module) -> bool:
    """Return whether all parameters and buffers of a module are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in module.state_dict().values() if tensor.is_floating_point())


class Lamb(torch.optim.Optimizer):
    """LAMB over parameter groups, on any device: Adam whose step has, in every layer, a length in proportion to its weights.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
    https://arxiv.org/abs/1904.00962, Algorithm 2. For the weights w of a layer, which is one parameter tensor here, with the
    gradient g, element by element,

        m <- beta1 m + (1 - beta1) g,  s <- beta2 s + (1 - beta2) g^2
        u = (m / (1 - beta1^k)) / (sqrt(s / (1 - beta2^k)) + eps) + weight_decay w
        w <- w - lr (|w| / |u|) u                                              in step number k, from 1

    The trust ratio |w| / |u| is 1 where one of the norms is 0, and for parameters without weight decay, so they move as Adam's:
    the authors' program leaves norms and biases out of both as well, since the length of a bias that began at 0 says nothing.
    The moments have the names of torch's AdamW.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        # () float on the device, set by `step_if`: the next step changes nothing if it is 1; None = every step counts
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; on CUDA the host waits for nothing."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._move(weights, group)

    def _move(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        good = torch.ones((), device=weights[0].device) if self.found_inf is None else 1.0 - self.found_inf
        # zeros in the place of a bad gradient: times 0 it would still be nan
        gradients = [torch.where(good > 0, weight.grad, 0.0) for weight in weights if weight.grad is not None]
        first, second, steps = (list(kept) for kept in zip(*(self._moments(weight) for weight in weights), strict=True))
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, [good] * len(steps))
        torch._foreach_mul_(first, 1.0 - (1.0 - beta1) * good)  # a skipped step multiplies by 1 and adds 0
        torch._foreach_add_(first, gradients, alpha=1.0 - beta1)
        torch._foreach_mul_(second, 1.0 - (1.0 - beta2) * good)
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
        # in float64, since 1 - 0.999^k would lose half of its digits; at least 1, so that a skipped first step divides by no 0
        count = torch.stack(steps).double().clamp_min(1.0)
        corrections = [(1.0 - beta**count).float().unbind() for beta in (beta1, beta2)]
        spread = torch._foreach_div(second, corrections[1])
        torch._foreach_sqrt_(spread)
        torch._foreach_add_(spread, group["eps"])
        update = torch._foreach_div(first, corrections[0])
        torch._foreach_div_(update, spread)
        rates = good * group["lr"]
        if group["weight_decay"] != 0:
            torch._foreach_add_(update, weights, alpha=group["weight_decay"])
            of_weights, of_update = torch.stack(torch._foreach_norm(weights)), torch.stack(torch._foreach_norm(update))
            trust = torch.where((of_weights > 0) & (of_update > 0), of_weights / of_update, 1.0)
            torch._foreach_mul_(update, (rates * trust).unbind())
        else:
            torch._foreach_mul_(update, rates)
        torch._foreach_sub_(weights, update)

    def _moments(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return both moments of a parameter and the number of its steps, which are zeros at first."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]
