"""Which learning rate and weight decay each parameter has: ordered rules, presets of rules, and decay by layer."""

import fnmatch
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_EMBEDDING = ("patch_embed", "pos_embed", "cls_token", "mask_token")  # of a vision transformer
_STEM = ("conv1", "bn1", "prelu")  # of an IResNet


class ParameterRule(NamedTuple):
    """The learning rate and weight decay of the parameters that it matches.

    Args:
        match: the name of a module or parameter, which includes everything inside it; or a pattern with *, ? or [] that must
            match the whole name of a parameter; or `norms` (all parameters of normalisation layers) or `biases` (all parameters
            called bias); or the name of one of PRESETS.
        lr_factor: factor on the learning rate, 0 or more.
        weight_decay: None = the optimizer's. Of the preset detectron, that of the norms; None = 0.
    """

    match: str
    lr_factor: float = 1.0
    weight_decay: float | None = None


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
    is layer i), and all that follows is layer L. Bao et al., BEiT, https://arxiv.org/abs/2106.08254, Appendix; He et al., MAE,
    https://arxiv.org/abs/2111.06377, Appendix A.1.

    Raises:
        ValueError: the names are those of neither network.
    """
    for pattern, first, offset in ((r"blocks\.(\d+)\.", _EMBEDDING, 1), (r"layer(\d+)\.", _STEM, 0)):
        inside = {name: int(found[1]) + offset for name in names if (found := re.match(pattern, name))}
        if inside:
            last = max(inside.values()) + 1
            return {name: inside.get(name, 0 if name.split(".")[0] in first else last) for name in names}, last
    raise ValueError(
        "this backbone has no layers called blocks.N (a vision transformer) or layerN (IResNet), whose rates could differ; set "
        "it to 1"
    )


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
