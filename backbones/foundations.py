"""Files of pretrained weights for networks of timm: their names, their positions, and the input that they expect.

timm itself reads its own files and those of the authors of DINOv2, DINOv3 and CLIP, and resizes position embeddings
(bicubic). Added here are the names of transformers, strict names, and the normalisation of the input: the first layer
changes so that it takes (x - 127.5) / 127.5, as all networks of this project do.
Shapes: C = numbers per token, P = patches, p = pixels of a side of a patch.
"""

import importlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_TOWER = "embeddings.patch_embedding"  # in the names of transformers; before it stands the name of the image tower
_OTHER_PARTS = ("text_", "visual_projection.", "logit_scale", "logit_bias", "classifier.", "embeddings.position_ids")
_FROM_TRANSFORMERS = (  # to the names of DINOv2's and DINOv3's authors, which timm knows, and for CLIP and SigLIP to timm's
    (r"^embeddings\.patch_embeddings?\.(projection\.)?", "patch_embed.proj."),
    (r"^embeddings\.(cls_token|class_embedding)$", "cls_token"),
    (r"^embeddings\.position_embedding(s|\.weight)$", "pos_embed"),
    (r"^embeddings\.(mask_token|register_tokens)$", r"\1"),
    (r"^(encoder\.layers?|(model\.)?layer)\.", "blocks."),
    (r"\.mlp\.gate_proj\.", ".mlp.w1."),
    (r"\.mlp\.up_proj\.", ".mlp.w2."),
    (r"\.mlp\.down_proj\.", ".mlp.w3."),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^(post_)?layernorm\.", "norm."),
    (r"\.layer_norm([12])\.", r".norm\1."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.(attention\.output\.dense|attention\.o_proj|self_attn\.out_proj)\.", ".attn.proj."),
    (r"\.(attention\.attention|attention|self_attn)\.(q|k|v)(uery|ey|alue|_proj)\.", r".attn.\2."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.(in|out)_proj[._]", r"attn_pool.\1."),
    (r"^attn_pool\.out\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.mlp\.", "attn_pool.mlp."),
)


def translate(network: Any, weights: Mapping[str, Tensor], fold: bool) -> dict[str, Tensor]:
    """Return the weights of a file under the names of a network of timm, with positions for its number of patches.

    Args:
        network: without its classifier, whose weights may be in the file.
        fold: whether the weights take images normalised with the mean and deviation of the network's pretrained_cfg; the
            first layer is then changed to take (x - 127.5) / 127.5.

    Raises:
        ValueError: names are missing or left over, the patches have another size, or the normalisation cannot be folded.
    """
    weights, settings = dict(weights), getattr(network, "pretrained_cfg", {})
    expected = {name: value for name, value in network.state_dict().items() if ".lora_" not in name}
    if any(_TOWER in name for name in weights):
        weights = _from_transformers(weights)
    patch = expected.get("patch_embed.proj.weight")
    for value in weights.values():
        if patch is not None and value.dim() == 4 and value.shape[1] == 3 and value.shape[2:] != patch.shape[2:]:
            raise ValueError(f"its patches are of {value.shape[2]} pixels, those of backbone.name of {patch.shape[2]}")
    own = importlib.import_module(type(network).__module__)
    try:  # timm leaves out biases of DINOv3 that the network has not
        biases = {name: torch.cat(value.chunk(3)[::2]) for name, value in weights.items() if name.endswith(".attn.qkv.bias")}
        lost = {name for name, value in biases.items() if value.any() and name.replace("qkv.", "q_") not in expected}
        found = dict(getattr(own, "checkpoint_filter_fn", lambda given, _: given)(weights, network))
    except Exception as error:  # of any kind: it is not our code
        raise ValueError(f"timm cannot read it as weights of this network: {type(error).__name__}: {error!s:.200}") from None
    for part in ("weight", "bias"):
        found.pop(f"{settings.get('classifier')}.{part}", None)
    missing, left = sorted(set(expected) - set(found)), sorted(lost.union(found) - set(expected))
    if missing or left:
        lists = [
            f"{len(names)} names {what}: {', '.join(names[:4])}{', ...' if names[4:] else ''}"
            for names, what in ((missing, "are missing"), (left, "are left over"))
            if names
        ]
        raise ValueError(f"{'; '.join(lists)}; set backbone.name to its network")
    if fold and all(found[name].shape == value.shape for name, value in expected.items()):  # others are refused when loaded
        _fold_input(network, found, settings)
    return found


def _from_transformers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the image tower with query, key and value in one matrix, as timm has them."""
    tower = next(name for name in weights if _TOWER in name).partition(_TOWER)[0]
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        new = name.removeprefix(tower)
        if new.startswith(_OTHER_PARTS):
            continue
        for pattern, instead in _FROM_TRANSFORMERS:
            new = re.sub(pattern, instead, new)
        found[new] = value
    if any(".mlp.w2." in name for name in found):  # DINOv3: its keys have no bias, and its smaller networks no gate
        up = ".mlp.w2." if any(".mlp.w1." in name for name in found) else ".mlp.fc1."
        found = {name.replace(".mlp.w2.", up): value for name, value in found.items()}
        found["storage_tokens"] = found.pop("register_tokens", torch.empty(0))
        no_bias = {name.replace(".q.", ".k."): value * 0 for name, value in found.items() if name.endswith(".attn.q.bias")}
        found = no_bias | found
    for name in [name for name in found if ".attn.q." in name]:
        parts = [found.pop(name.replace(".q.", f".{part}."), None) for part in "qkv"]
        if present := [part for part in parts if part is not None]:
            found[name.replace(".q.", ".qkv.")] = torch.cat(present)
    for part in ("weight", "bias"):  # of SigLIP's attention over the tokens
        if (joined := found.pop(f"attn_pool.in.{part}", None)) is not None:
            found[f"attn_pool.q.{part}"], found[f"attn_pool.kv.{part}"] = joined.tensor_split([len(joined) // 3])
    for name in ("cls_token", "pos_embed"):
        if name in found:
            found[name] = found[name].reshape(1, -1, found[name].shape[-1])
    return found


def _fold_input(network: Any, weights: dict[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Change the first layer so that it takes (x - 127.5) / 127.5 for (x / 255 - mean) / std, in float64.

    With y = (x - 127.5) / 127.5, (x / 255 - mean) / std = y 0.5 / std + (0.5 - mean) / std. A layer without a bias, as CLIP's,
    leaves the constant to the positions (1, ..., C) of the P patches.
    """
    mean, std = (torch.tensor(settings[key], dtype=torch.float64).view(3, 1, 1) for key in ("mean", "std"))
    if (mean == 0.5).all() and (std == 0.5).all():
        return
    name = settings.get("first_conv")
    layer = network.get_submodule(name) if isinstance(name, str) else None
    patches = getattr(getattr(network, "patch_embed", None), "num_patches", 0)
    has_positions = getattr(network, "pos_embed", None) is not None and isinstance(network.patch_embed.norm, nn.Identity)
    if not isinstance(layer, nn.Conv2d) or layer.padding != (0, 0) or (layer.bias is None and not has_positions):
        raise ValueError(
            f"its normalisation, mean {settings['mean']} and deviation {settings['std']}, cannot be put into its first layer, "
            f"{name}, which pads the images or has no bias; take a vision transformer, or another network without padding there"
        )
    weight = weights[f"{name}.weight"].double()  # (C, 3, p, p)
    constant = (weight * ((0.5 - mean) / std)).sum((1, 2, 3))
    weights[f"{name}.weight"] = (weight * (0.5 / std)).float()
    if layer.bias is not None:
        weights[f"{name}.bias"] = (weights[f"{name}.bias"].double() + constant).float()
    else:
        positions = weights["pos_embed"].double()
        positions[:, -patches:] += constant
        weights["pos_embed"] = positions.float()
