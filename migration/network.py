"""Recognises backbones of arcface_torch by their state dict, and maps the moments of its optimizers to this project's and back.

Its optimizer numbers all parameters of the backbone, including the frozen features.weight, and then the class centres. The
optimizer here has only the trainable parameters of the backbone, in the order of the network except for optimizer.rules.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backbones import build_backbone, list_backbones
from utils.checkpoint.trainer import trained_names
from utils.memory import Undrawn
from utils.optim import build_optimizer

from .checkpoint_files import MOMENTS

# names of the vision transformers there -> section backbone here. Wherever it masks, that code masks a tenth of the tokens,
# whatever the name says
VISION_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "vit_t": {"name": "vit_t", "drop_path": 0.1, "mask_ratio": 0.1},
    "vit_t_dp005_mask0": {"name": "vit_t", "drop_path": 0.05, "mask_ratio": 0.0},
    "vit_s": {"name": "vit_s", "drop_path": 0.1, "mask_ratio": 0.1},
    "vit_s_dp005_mask_0": {"name": "vit_s", "drop_path": 0.05, "mask_ratio": 0.0},
    "vit_b": {"name": "vit_b", "drop_path": 0.1, "mask_ratio": 0.1, "checkpointing": True},
    "vit_b_dp005_mask_005": {"name": "vit_b", "drop_path": 0.05, "mask_ratio": 0.1, "checkpointing": True},
    "vit_l_dp005_mask_005": {"name": "vit_l", "drop_path": 0.05, "mask_ratio": 0.1, "checkpointing": True},
    "vit_h": {"name": "vit_h", "drop_path": 0.1, "mask_ratio": 0.0, "checkpointing": True},
}


class RecognisedBackbone(NamedTuple):
    """A backbone and its arguments for build_backbone."""

    name: str
    embedding_size: int
    width: float
    model: nn.Module


@functools.cache
def _entries(name: str) -> tuple[tuple[str, ...], str, int]:
    """Return the entries of a network's state, the last of them with four dimensions, and how many rows that has at width 1."""
    with torch.device("meta"), Undrawn():
        full = build_backbone(name, 1).state_dict()
    last = [key for key in full if full[key].dim() == 4][-1]
    return tuple(full), last, len(full[last])


def recognise(state: dict[str, Tensor], path: Path) -> RecognisedBackbone:
    """Return the network with this state, loaded with strict=True; ValueError if it is none of this project's networks."""
    alike: list[tuple[str, float]] = []  # vision transformers of one depth have the same entries, and other widths
    names = [name for name in list_backbones() if not name.startswith(("ghostfacenet_", "edgeface_"))]  # not there
    for name in names:
        if alike and not (name.startswith("vit_") and alike[0][0].startswith("vit_")):
            continue
        entries, last, length = _entries(name)
        if set(entries) == set(state):
            alike.append((name, state[last].shape[:1].numel() / length))
    if not alike:
        raise ValueError(f"{path}: its {len(state)} entries match none of {', '.join(names)}; others have no counterpart")
    name, width = next((pair for pair in alike if pair[1] == 1), alike[0])
    embedding_size = [state[key].numel() for key in _entries(name)[0] if key.endswith(".running_mean")][-1]
    with torch.device("meta"), Undrawn():
        model = build_backbone(name, embedding_size, width)
    dtypes = {key: value.dtype for key, value in model.state_dict().items()}
    for key, value in state.items():
        if not torch.can_cast(value.dtype, dtypes[key]):
            raise ValueError(f"{path}: {key} has numbers of {value.dtype}, must have {dtypes[key]}")
    try:
        model.load_state_dict({key: value.detach().to(dtypes[key]) for key, value in state.items()}, assign=True)
    except RuntimeError as error:
        line = str(error).splitlines()[-1].strip()
        raise ValueError(f"{path}: is an {name}, but not of width {width:g}: {line}") from None
    for key, value in state.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise ValueError(f"{path}: {key} is not finite; that training had diverged. Take an earlier checkpoint")
    return RecognisedBackbone(name, embedding_size, width, model)


def kind_of(saved: Mapping[str, Any]) -> str:
    """Return sgd or adamw, the kind of a saved optimizer by its settings."""
    return "adamw" if "betas" in saved["param_groups"][0] else "sgd"


def our_optimizer(
    network: RecognisedBackbone, saved: dict[str, Any] | None, names: Iterable[str], path: Path
) -> tuple[torch.optim.Optimizer, str]:
    """Return the backbone's optimizer with the moments of arcface_torch's saved one, and a line about them.

    Args:
        names: of the saved network's state, in the order of its parameters.

    Raises:
        ValueError: the saved optimizer belongs to another network, or is not an optimizer.
    """
    if saved is None:
        optimizer = build_optimizer(network.model, "sgd", lr=0.1, momentum=0.9, weight_decay=5e-4)
        return optimizer, "no optimizer was saved; the backbone's momentum starts at zero"
    try:
        group, entries = saved["param_groups"][0], saved["state"]
        kind = kind_of(saved)
        momentum, *beta2 = group["betas"] if kind == "adamw" else (group["momentum"],)
        beta2, eps = (float(beta2[0]), float(group["eps"])) if beta2 else (0.999, 1e-8)
        indices = list(group["params"])
        optimizer = build_optimizer(
            network.model, kind, float(group["lr"]), float(momentum), float(group["weight_decay"]), beta2, eps
        )
        by_name = dict(network.model.named_parameters())
        parameters = [by_name[name] for name in names if name in by_name]
        if len(parameters) != len(indices):
            raise ValueError(f"{path}: its optimizer has {len(indices)} parameters, the backbone {len(parameters)}")
        count, step = 0, 0.0
        without = []  # a parameter that never had a gradient there, such as the token for masks of a network that has none
        for index, parameter in zip(indices, parameters, strict=True):
            entry = entries.get(index, {})
            moments = {name: entry[name] for name in MOMENTS[kind] if isinstance(entry.get(name), Tensor)}
            if not parameter.requires_grad:
                continue
            if not moments:
                without.append(parameter)
                continue
            if any(moment.shape != parameter.shape for moment in moments.values()):
                raise ValueError(f"{path}: moments of parameter {index} have another shape than the parameter")
            if not all(bool(moment.isfinite().all()) for moment in moments.values()):
                raise ValueError(f"{path}: moments of parameter {index} are not finite; take an earlier checkpoint")
            if kind == "adamw":
                step = float(entry["step"])
                moments["step"] = torch.tensor(step)
            optimizer.state[parameter].update({name: moment.float() for name, moment in moments.items()})
            count += 1
        for parameter in without if count else ():
            zeros = {name: torch.zeros_like(parameter) for name in MOMENTS[kind]}
            optimizer.state[parameter].update(zeros | ({"step": torch.tensor(step)} if kind == "adamw" else {}))
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{path}: its state_optimizer is not one of SGD or AdamW ({type(error).__name__})") from None
    return optimizer, f"{kind}, moments of {count} parameters of the backbone"


def their_optimizer(
    model: nn.Module, trainer: dict[str, Any], centres: dict[str, Tensor], updates: int, initial_lr: float | None
) -> dict[str, Any]:
    """Return the state dict of arcface_torch's optimizer.

    Args:
        model: what trained in it requires a gradient, as in the run that saved.
        trainer: what trainer.pt of ours holds.
        centres: moments of the class centres of one rank by our names, (n, D) each.
        updates: number of updates of the class centres, for AdamW.
    """
    saved = trainer["optimizer"]
    kind, order = kind_of(saved), [number for group in saved["param_groups"] for number in group["params"]]
    numbers = dict(zip(trainer.get("trained") or trained_names(model), order, strict=True))
    state: dict[int, dict[str, Any]] = {}
    parameters = list(model.named_parameters())
    for index, (name, parameter) in enumerate(parameters):
        if parameter.requires_grad:
            entry = saved["state"].get(numbers[name], {})
            if entry:
                state[index] = {key: own(value) if isinstance(value, Tensor) else value for key, value in entry.items()}
    last = len(parameters)
    if set(MOMENTS[kind].values()) == set(centres):
        state[last] = {theirs: centres[ours] for theirs, ours in MOMENTS[kind].items()}
        if kind == "adamw":
            state[last]["step"] = torch.tensor(float(updates))
    group = {**saved["param_groups"][-1], "lr": whole_lr(saved), "foreach": None, "fused": None}  # the last has no rule
    group = {key: value for key, value in group.items() if key not in ("lr_factor", "match")}
    group["initial_lr"] = group["lr"] if initial_lr is None else initial_lr
    return {"state": state, "param_groups": [{**group, "params": list(range(last))}, {**group, "params": [last]}]}


def whole_lr(saved: dict[str, Any]) -> float:
    """Return the learning rate of a saved optimizer of ours, without the factors of optimizer.rules."""
    pairs = [(float(group["lr"]), float(group.get("lr_factor", 1.0))) for group in saved["param_groups"]]
    lr, factor = min(pairs, key=lambda pair: abs(pair[1] - 1.0))  # a group without a factor, if there is one
    return lr / factor if factor else 0.0


def own(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, because torch.save would write the whole storage of a view."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)
