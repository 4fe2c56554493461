"""Files of pretrained weights for networks of timm. The files are written by timm and transformers, with random weights."""

import functools
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from real_timm import timm  # noqa: F401, a fixture
from rounding import FP32_UNIT, rounding_bound
from safetensors.torch import save_file
from tiny_runs import ended_well, equal_weights, read_metrics, run_train, small_run, write_dataset
from torch import Tensor, nn

import train
from backbones import build_backbone
from backbones.foundations import translate
from eval.__main__ import main as evaluate
from scripts.deploy import export
from utils.checkpoint.format import BACKBONE, list_checkpoints
from utils.checkpoint.reading import load_initial, load_weights, read_file

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3}
DINO, DINO_REGISTERS, SIGLIP = "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_224"
CLIP = "vit_base_patch16_clip_quickgelu_224.openai"
KINDS = {"dinov2": DINO, "dinov2 with registers": DINO_REGISTERS, "clip": CLIP}  # of transformers, by the names of timm
KINDS |= {"clip with text": CLIP, "siglip with text": SIGLIP}
KINDS |= {"dinov3": "vit_small_patch16_dinov3_qkvb", "dinov3 with gates": "vit_huge_plus_patch16_dinov3_qkvb"}


@pytest.fixture
def small(timm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: F811
    """Return timm with small networks: the real classes, fewer layers."""
    monkeypatch.setattr(timm, "create_model", functools.partial(timm.create_model, **SMALL))
    return timm


def _drawn(network: nn.Module) -> nn.Module:
    """Return a network with numbers in all its weights; initial values leave out whole branches."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.eval()


def _pixels(size: int) -> Tensor:
    return torch.randint(0, 256, (3, 3, size, size), generator=torch.Generator().manual_seed(9)).float()


def _begun(name: str, path: Path, size: int) -> Any:
    torch.manual_seed(1)
    ours = build_backbone(f"timm:{name}", 8, image_size=size).eval()
    load_initial(ours, path, size)
    return ours


def _assert_same(ours: Any, size: int, expected: Tensor) -> None:
    with torch.no_grad():
        found = ours.network((_pixels(size) - 127.5) / 127.5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def _normalised(pixels: Tensor, mean: Any, std: Any) -> Tensor:
    return (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


class _Toy(nn.Module):
    """The parts that `translate` looks at, for tests without timm."""

    pretrained_cfg: ClassVar = dict(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1), first_conv="patch_embed.proj", classifier="head")

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj, self.patch_embed.norm = nn.Conv2d(3, 6, 4, stride=4, bias=bias), nn.Identity()
        self.patch_embed.num_patches = 4
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 6))

    def forward(self, images: Tensor) -> Tensor:
        """Return the patches (b, 4, 6), with their positions."""
        return self.patch_embed.proj(images).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]


@pytest.mark.numeric
@pytest.mark.parametrize("bias", [True, False])
def test_the_normalisation_goes_into_the_first_layer_or_the_positions_and_names_are_strict(bias: bool):
    torch.manual_seed(2)
    theirs, ours = _Toy(bias), _Toy(bias)
    file = {**theirs.state_dict(), "head.weight": torch.ones(2, 6)}
    ours.load_state_dict(translate(ours, file, fold=True))
    pixels = _pixels(8)
    expected = theirs.double()(_normalised(pixels.double(), (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)))
    found = ours((pixels - 127.5) / 127.5).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))
    assert torch.equal(ours.pos_embed[:, :1].double(), theirs.pos_embed[:, :1])
    with pytest.raises(ValueError, match=r"1 names are missing: pos_embed; 1 names are left over: else; set"):
        translate(ours, {name.replace("pos_embed", "else"): value for name, value in file.items()}, fold=True)
    first = "patch_embed.proj.weight"
    for channels in (1, 4):  # left to load_weights, which names it
        others = translate(ours, {**file, first: torch.ones(6, channels, 4, 4)}, fold=True)
        with pytest.raises(ValueError, match=rf"{first} is \(6, {channels}, 4, 4\), in this backbone it is \(6, 3, 4, 4\)"):
            load_weights(ours, others, "file", "hint")


@pytest.mark.numeric
@pytest.mark.parametrize("name", [DINO, DINO_REGISTERS, CLIP, SIGLIP, "vit_small_patch16_dinov3", "test_vit"])
def test_a_file_of_timm_begins_a_network_that_computes_the_same_from_our_input(name: str, small: Any, tmp_path: Path):
    theirs = _drawn(small.create_model(name, num_classes=7, img_size=112))
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    ours = _begun(name, tmp_path / "weights.pth", 112)
    settings = theirs.pretrained_cfg
    theirs.reset_classifier(0)
    with torch.no_grad():
        expected = theirs(_normalised(_pixels(112), settings["mean"], settings["std"]))
    _assert_same(ours, 112, expected)
    state = {key: value.clone() for key, value in ours.state_dict().items()}
    fresh = build_backbone(f"timm:{name}", 8, image_size=112)
    save_file(state, tmp_path / "run.safetensors")  # weights of a run are not changed again
    load_initial(fresh, tmp_path / "run.safetensors", 112)
    assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())


CLIP_NAMES = {  # of model.py in openai/CLIP
    "patch_embed.proj": "visual.conv1", "cls_token": "visual.class_embedding", "pos_embed": "visual.positional_embedding",
    "norm_pre": "visual.ln_pre", "norm.": "visual.ln_post.", "blocks": "visual.transformer.resblocks", ".norm": ".ln_",
    "attn.qkv.": "attn.in_proj_", "attn.proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
}  # fmt: skip
DINOV3_NAMES = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}  # of facebookresearch/dinov3


@pytest.mark.numeric
@pytest.mark.parametrize("name", [DINO, CLIP, "vit_small_patch16_dinov3"])
def test_a_file_of_the_authors_begins_the_same_network(name: str, small: Any, tmp_path: Path):
    theirs, file, width = _drawn(small.create_model(name, num_classes=0, img_size=112)), {}, SMALL["embed_dim"]
    for key, value in theirs.state_dict().items():
        for ours, other in (CLIP_NAMES if name == CLIP else DINOV3_NAMES if "dinov3" in name else {}).items():
            key = re.sub(f"^{re.escape(ours)}" if ours == "norm." else re.escape(ours), other, key)
        file[key] = value.flatten() if "class_e" in key else value[0] if "positional" in key else value
    if name == CLIP:
        others = ("visual.proj", "text_projection", "logit_scale", "positional_embedding", "token_embedding.weight")
        file |= {key: torch.ones(7, 3) for key in (*others, "ln_final.weight", "transformer.resblocks.0.ln_1.weight")}
    else:
        file["mask_token"] = torch.ones(1, width)
    if "dinov3" in name:  # biases of q, k and v, which were trained to 0 and are masked, and the periods of the rotation
        file |= {f"blocks.{k}.attn.qkv.bias{mask}": torch.zeros(3 * width) for k in range(2) for mask in ("", "_mask")}
        file["rope_embed.periods"] = torch.ones(4)
    torch.save(file, tmp_path / "weights.pth")
    settings = theirs.pretrained_cfg
    with torch.no_grad():
        expected = theirs(_normalised(_pixels(112), settings["mean"], settings["std"]))
    _assert_same(_begun(name, tmp_path / "weights.pth", 112), 112, expected)


@pytest.mark.numeric
@pytest.mark.parametrize("name", [DINO, CLIP])
def test_positions_are_resized_to_the_size_of_the_images_as_timm_does(name: str, small: Any, tmp_path: Path):
    theirs = _drawn(small.create_model(name, num_classes=0, img_size=224))
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    overlay = {"file": str(tmp_path / "weights.safetensors"), "num_classes": 0}
    loaded = small.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=0, img_size=112).eval()
    side = 112 // theirs.patch_embed.patch_size[0]
    torch.testing.assert_close(loaded.pos_embed.detach()[0], _resized(theirs.pos_embed.detach()[0], side), rtol=0, atol=1e-6)
    with torch.no_grad():
        expected = loaded(_normalised(_pixels(112), theirs.pretrained_cfg["mean"], theirs.pretrained_cfg["std"]))
    _assert_same(_begun(name, tmp_path / "weights.safetensors", 112), 112, expected)


def _of_transformers(kind: str, size: int) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": size}
    inside = {"intermediate_size": 192}
    if kind == "dinov2":
        return transformers.Dinov2Model(transformers.Dinov2Config(**sizes, patch_size=14))
    if kind == "dinov2 with registers":
        return transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**sizes, patch_size=14))
    if "dinov3" in kind:
        gates = {"use_gated_mlp": "gates" in kind, "hidden_act": "silu" if "gates" in kind else "gelu"}
        return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes, **inside, **gates, num_register_tokens=4))
    if kind == "clip":
        return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes, **inside, patch_size=16))
    text = {key: value for key, value in {**sizes, **inside}.items() if key != "image_size"}
    vision = {**sizes, **inside, "patch_size": 16, "hidden_act": "quick_gelu" if "clip" in kind else "gelu"}  # as in timm
    if kind == "clip with text":
        return transformers.CLIPModel(transformers.CLIPConfig(vision_config=vision, text_config=text))
    return transformers.SiglipModel(transformers.SiglipConfig(vision_config=vision, text_config=text))


def _resized(positions: Tensor, side: int) -> Tensor:
    """Return the rows (n, D) of a square of patches, behind at most one more, for side * side patches."""
    old = int(len(positions) ** 0.5)
    grid = positions[len(positions) - old * old :].reshape(1, old, old, -1).permute(0, 3, 1, 2)
    grid = nn.functional.interpolate(grid, (side, side), mode="bicubic", antialias=True)
    return torch.cat([positions[: len(positions) - old * old], grid[0].flatten(1).t()])


@pytest.mark.numeric
@pytest.mark.parametrize("size", [112, 224])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_transformers_begins_the_same_network(kind: str, size: int, small: Any, tmp_path: Path):
    theirs, larger, name = _drawn(_of_transformers(kind, 112)), _drawn(_of_transformers(kind, size)), KINDS[kind]
    larger.save_pretrained(tmp_path)  # under the names of files, which differ from those in the memory
    torch.save(larger.state_dict(), tmp_path / "memory.pth")
    weights, side = larger.state_dict(), 112 // getattr(theirs.config, "vision_config", theirs.config).patch_size
    for key in [key for key in weights if "position_emb" in key and "text" not in key]:
        shape = weights[key].shape
        weights[key] = _resized(weights[key].flatten(0, -2), side).view(*shape[:-2], -1, shape[-1])
    theirs.load_state_dict(weights)
    settings = small.get_pretrained_cfg(name)
    images = _normalised(_pixels(112), settings.mean, settings.std)
    with torch.no_grad():
        found = (theirs.vision_model if "text" in kind else theirs)(pixel_values=images)
    # of DINOv3 timm takes the mean of the patches, behind one token of the class and four registers
    expected = found.last_hidden_state[:, 5:].mean(dim=1) if "dinov3" in kind else found.pooler_output
    for file in ("model.safetensors", "memory.pth"):
        _assert_same(_begun(name, tmp_path / file, 112), 112, expected)
    if "dinov3" in kind:
        with pytest.raises(ValueError, match=r"2 names are left over: blocks.0.attn.qkv.bias, blocks.1.attn.qkv.bias; set"):
            _begun(name.removesuffix("_qkvb"), tmp_path / file, 112)


def test_what_does_not_fit_is_named_in_one_line(small: Any, tmp_path: Path):
    theirs = small.create_model(DINO, num_classes=7, img_size=112).state_dict()
    file = tmp_path / "weights.safetensors"
    for change, words in (
        ({"norm.bias": None}, "1 names are missing: norm.bias; set backbone.name"),
        ({"extra": torch.ones(1), "norm.bias": None}, "missing: norm.bias; 1 names are left over: extra; set backbone.name"),
        ({"patch_embed.proj.weight": torch.ones(48, 3, 16, 16)}, "its patches are of 16 pixels, those of backbone.name of 14"),
        ({"norm.bias": torch.ones(7)}, r"norm.bias is (7,), in this backbone it is (48,)"),
        ({"pos_embed": torch.ones(48)}, "timm cannot read it as weights of this network: "),
        ({"norm.bias": torch.full((48,), torch.nan)}, "holds numbers that are not finite"),
    ):
        save_file({name: value for name, value in {**theirs, **change}.items() if value is not None}, file)
        with pytest.raises(ValueError, match=r"^init\.backbone") as found:
            _begun(DINO, file, 112)
        assert words in str(found.value) and "\n" not in str(found.value)
    torch.save(small.create_model("test_vit3", num_classes=0, img_size=112).state_dict(), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"3 names are missing: cls_token, .*; \d+ names are left over: .*, \.\.\.; set"):
        _begun(CLIP, tmp_path / "other.pt", 112)


def test_a_first_layer_that_pads_its_images_is_refused_unless_nothing_is_to_be_changed(timm: Any, tmp_path: Path):  # noqa: F811
    torch.save(timm.create_model("resnet10t", num_classes=0).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"cannot be put into its first layer, conv1\.0, which pads the images"):
        _begun("resnet10t", tmp_path / "weights.pt", 112)
    theirs = timm.create_model("test_convnext", num_classes=0)
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    ours = _begun("test_convnext", tmp_path / "weights.safetensors", 112).network
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_weights_of_which_nobody_knows_the_input_are_refused(timm: Any):  # noqa: F811
    with pytest.raises(ValueError, match=r"Invalid pretrained tag \(nobody\)"):
        build_backbone("timm:test_vit.nobody")


@pytest.mark.numeric
def test_a_network_of_timm_begins_with_a_file_and_is_tuned_by_lora_on_one_rank_or_more(
    timm: Any,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    write_dataset(tmp_path / "data", 24)
    torch.manual_seed(4)
    theirs = timm.create_model("test_vit", num_classes=10)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    given = [
        "backbone.name=timm:test_vit", f"init.backbone={tmp_path / 'vit.pth'}", "backbone.lora_rank=2",
        "optimizer.layer_decay=0.9", "train.max_steps=2", "schedule.power=0", "backbone.freeze_norm=true", "checkpoint.every=1",
        "train.batch_size=12",
    ]  # fmt: skip
    config = small_run(tmp_path / "data", tmp_path)[0]
    Path(config).write_text(Path(config).read_text().replace("width: 0.125, ", ""))  # which this network lacks
    assert train.main([config, *given, "run.name=one"]) == 0
    ended_well(run_train(2, [config, *given, "train.accumulation=2", "run.name=two"]))
    one, two = (read_file(list_checkpoints(tmp_path / name)[-1], BACKBONE) for name in ("one", "two"))
    norms = [read_metrics(tmp_path / name)[2]["grad_norm"] for name in ("one", "two")]
    assert norms[1] == pytest.approx(norms[0], rel=rounding_bound(torch.float32, 12 * 4 * 192))  # before it is clipped
    for name, value in one.items():  # two updates round a number below 1; the gradients' own errors are smaller
        assert not name.endswith("lora_b") or value.abs().max() > 1e-3
        torch.testing.assert_close(two[name], value, rtol=0, atol=8 * FP32_UNIT)
    broken = f"checkpoint.resume={list_checkpoints(tmp_path / 'one')[0]}"
    assert train.main([config, *given, broken, "run.name=broken"]) == 0 and list(read_metrics(tmp_path / "broken")) == [2]
    equal_weights(tmp_path / "one", tmp_path / "broken")
    assert torch.equal(one["network.blocks.3.mlp.fc1.weight"], theirs.state_dict()["blocks.3.mlp.fc1.weight"])
    assert evaluate([str(tmp_path / "two"), "--device", "cpu"]) == 0
    assert export.main([str(tmp_path / "two"), "--to", "onnx", "--out", str(tmp_path / "model.onnx")]) == 0
    assert train.main([config, *given, "run.name=not", "loss.topology=1"]) == 1
    assert "backbone.trained_scale" in capsys.readouterr().err
