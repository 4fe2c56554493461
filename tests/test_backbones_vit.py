"""Vision transformers: names, outputs and initial values of arcface_torch, random parts, precision, export, resume.

fixtures/backbones/vit.json: what arcface_torch's transformer of 32 numbers per token and 24 blocks gives (float64, first 8 of
512 numbers, two images) for weights and images by the formulas of test_backbones.py, which has vit_t in its full width.
"""

import json
import os
import signal
from pathlib import Path

import onnxruntime
import pytest
import torch
from rounding import bf16_half_step
from test_backbones import BATCH_NORM, _on_meta, _shapes
from tiny_runs import Started, ended_well, equal_weights, final_weights, run_program, tiny_run, write_dataset
from torch import Tensor, nn

import train
from backbones import backbone_arguments, build_backbone, vit
from backbones.vit import DropPath, draw_kept
from eval.__main__ import main as evaluate
from utils.checkpoint.format import list_checkpoints

DEPTHS = {"vit_t": (256, 12), "vit_s": (512, 12), "vit_b": (512, 24), "vit_l": (768, 24), "vit_h": (1024, 48)}
TINY = {"embedding_size": 8, "width": 1 / 16}  # 16 numbers per token


def _vit_shapes(dim: int, depth: int) -> dict[str, list[int]]:
    """Return what the state dict of a transformer holds, from the rule of its names."""

    def linear(name: str, out: int, into: int, bias: bool = True) -> dict[str, list[int]]:
        return {f"{name}.weight": [out, into]} | ({f"{name}.bias": [out]} if bias else {})

    def norm(name: str) -> dict[str, list[int]]:
        return {f"{name}.weight": [dim], f"{name}.bias": [dim]}

    def batch_norm(name: str, size: int) -> dict[str, list[int]]:
        return {f"{name}.{part}": [size] if part != "num_batches_tracked" else [] for part in BATCH_NORM}

    shapes = {"pos_embed": [1, 144, dim], "mask_token": [1, 1, dim]}
    shapes |= {"patch_embed.proj.weight": [dim, 3, 9, 9], "patch_embed.proj.bias": [dim]}
    for number in range(depth):
        block = f"blocks.{number}"
        shapes |= norm(f"{block}.norm1") | norm(f"{block}.norm2")
        shapes |= linear(f"{block}.attn.qkv", 3 * dim, dim, bias=False) | linear(f"{block}.attn.proj", dim, dim)
        shapes |= linear(f"{block}.mlp.fc1", 4 * dim, dim) | linear(f"{block}.mlp.fc2", dim, 4 * dim)
    shapes |= norm("norm") | linear("feature.0", dim, 144 * dim, bias=False) | batch_norm("feature.1", dim)
    return shapes | linear("feature.2", 512, dim, bias=False) | batch_norm("feature.3", 512)


@pytest.mark.parametrize(
    ("name", "million_parameters"), [("vit_t", 19.1), ("vit_s", 76.0), ("vit_b", 113.8), ("vit_l", 255.7), ("vit_h", 756.4)]
)
def test_state_dict_follows_the_rule_of_its_depth_and_all_of_it_trains(name: str, million_parameters: float):
    model = _on_meta(name)
    assert list(_shapes(model).items()) == list(_vit_shapes(*DEPTHS[name]).items())
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == million_parameters
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_initial_values_are_those_of_arcface_torch():
    torch.manual_seed(0)
    model = build_backbone("vit_t", width=0.25)
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    for weight in (*weights, model.get_parameter("pos_embed"), model.get_parameter("mask_token")):
        assert abs(weight.std().item() - 0.02) < 5 * 0.02 / (2 * weight.numel()) ** 0.5  # five standard errors
    patches = model.get_parameter("patch_embed.proj.weight").detach()  # torch's own: uniform up to the root of 1 / fan in
    assert 0.95 / 243**0.5 < float(patches.abs().max()) <= 1 / 243**0.5
    for name, value in model.state_dict().items():
        if "norm" in name or name.startswith(("feature.1", "feature.3")):
            assert (value == float(name.endswith(("weight", "var")))).all(), name
        elif name.endswith("bias") and "proj" not in name.split(".")[1]:
            assert (value == 0).all(), name
    assert {module.eps for module in model.modules() if isinstance(module, nn.BatchNorm1d)} == {2e-5}
    assert {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)} == {1e-5}


def _reference(w: dict[str, Tensor], images: Tensor, depth: int, drop_path: float, num_kept: int | None) -> Tensor:
    """Return the embeddings by the equations, by heads and tokens (num_kept not masked); masks, paths as torch draws them."""
    b, dim = len(images), w["pos_embed"].shape[2]
    head = dim // 8

    def layer_norm(x: Tensor, name: str) -> Tensor:
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / (var + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def batch_norm(x: Tensor, name: str) -> Tensor:
        mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
        if num_kept is not None:
            mean, var = x.mean(0), x.var(0, unbiased=False)
        return (x - mean) / (var + 2e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (x @ w[f"{name}.qkv.weight"].t()).split(dim, dim=-1)
        parts = [slice(start, start + head) for start in range(0, dim, head)]
        scores = [torch.einsum("bic,bjc->bij", q[..., part], k[..., part]) / head**0.5 for part in parts]
        shares = [score.exp() / score.exp().sum(-1, keepdim=True) for score in scores]
        found = torch.cat([share @ v[..., part] for share, part in zip(shares, parts, strict=True)], dim=-1)
        return found @ w[f"{name}.proj.weight"].t() + w[f"{name}.proj.bias"]

    def mlp(x: Tensor, name: str) -> Tensor:
        inside = (x @ w[f"{name}.fc1.weight"].t() + w[f"{name}.fc1.bias"]).clamp(0, 6)
        return inside @ w[f"{name}.fc2.weight"].t() + w[f"{name}.fc2.bias"]

    def dropped(branch: Tensor, number: int) -> Tensor:
        kept = 1 - drop_path * number / (depth - 1)
        if num_kept is None or kept == 1:
            return branch
        stays = torch.empty(b, 1, 1, dtype=torch.float64).bernoulli_(kept).tolist()
        return torch.stack([image / kept if stay[0][0] else 0 * image for image, stay in zip(branch, stays, strict=True)])

    patches = [images[:, :, y : y + 9, x : x + 9].flatten(1) for y in range(0, 108, 9) for x in range(0, 108, 9)]
    x = torch.stack(patches, 1) @ w["patch_embed.proj.weight"].flatten(1).t() + w["patch_embed.proj.bias"] + w["pos_embed"]
    if num_kept is not None:
        places = torch.rand(b, 144).argsort(1)[:, :num_kept].tolist()
        x = torch.stack([torch.stack([image[place] for place in row]) for image, row in zip(x, places, strict=True)])
    for number in range(depth):
        block = f"blocks.{number}"
        x = x + dropped(attention(layer_norm(x, f"{block}.norm1"), f"{block}.attn"), number)
        x = x + dropped(mlp(layer_norm(x, f"{block}.norm2"), f"{block}.mlp"), number)
    x = layer_norm(x, "norm")
    if num_kept is not None:
        mask = w["mask_token"][0, 0]
        found = [dict(zip(row, image, strict=True)) for row, image in zip(places, x, strict=True)]
        x = torch.stack([torch.stack([image.get(place, mask) for place in range(144)]) for image in found])
    x = batch_norm(x.flatten(1) @ w["feature.0.weight"].t(), "feature.1")
    return batch_norm(x @ w["feature.2.weight"].t(), "feature.3")


@pytest.mark.numeric
@pytest.mark.parametrize("training", [False, True])
def test_forward_and_gradients_equal_the_equations_written_with_functions(training: bool):
    torch.manual_seed(0)
    model = build_backbone("vit_t", **TINY, drop_path=0.5, mask_ratio=0.3).double().train(training)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value.uniform_(0.5, 1.5) if name.endswith(("var", "norm1.weight", "norm2.weight")) else value.normal_(0, 0.2)
    images = torch.rand(3, 3, 112, 112, dtype=torch.float64) * 2 - 1
    leaves = {name: value.detach().clone() for name, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    for name in parameters:
        leaves[name].requires_grad_()
    torch.manual_seed(1)
    found = model(images)
    torch.manual_seed(1)
    expected = _reference(leaves, images, 12, 0.5, 100 if training else None)  # int(144 * 0.7)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in parameters.items():
        if training or name != "mask_token":
            torch.testing.assert_close(parameter.grad, leaves[name].grad, msg=name)


def test_masks_are_drawn_for_each_image_and_hide_the_same_number_of_tokens():
    torch.manual_seed(0)
    kept = draw_kept(500, 100, 144, torch.device("cpu"))
    assert all(len(set(row)) == 100 and set(row) <= set(range(144)) for row in kept.tolist())
    assert len({tuple(sorted(row)) for row in kept.tolist()}) == 500
    seen = torch.bincount(kept.flatten(), minlength=144) / 500
    assert float((seen - 100 / 144).abs().max()) < 5 * (100 / 144 * 44 / 144 / 500) ** 0.5  # five standard deviations


@pytest.mark.parametrize("probability", [0.1, 0.75])
def test_drop_path_leaves_out_whole_images_and_keeps_the_mean(probability: float):
    torch.manual_seed(0)
    branch = torch.full((4000, 3, 2), 2.0, dtype=torch.bfloat16)
    module = DropPath(probability)
    out = module(branch)
    factor = torch.tensor(1.0) / torch.tensor(1.0 - probability)
    assert out.dtype == torch.float32 and set(out.unique().tolist()) == {0.0, float(2 * factor)}
    assert bool((out == out[:, :1, :1]).all())
    dropped = float((out[:, 0, 0] == 0).float().mean())
    assert abs(dropped - probability) < 5 * (probability * (1 - probability) / 4000) ** 0.5
    assert module.eval()(branch) is branch


def test_drop_path_grows_linearly_to_the_last_block():
    model = build_backbone("vit_t", **TINY, drop_path=0.22)
    found = [part.probability for part in model.modules() if isinstance(part, DropPath)]
    assert found == pytest.approx([0.02 * number for number in range(12)])


def test_each_random_part_is_off_in_evaluation_and_alone_in_training():
    images = torch.rand(4, 3, 112, 112)
    for argument in ("drop_path", "mask_ratio", "dropout"):
        off = {"drop_path": 0.0, "mask_ratio": 0.0, "dropout": 0.0}
        model = build_backbone("vit_t", **TINY, **{**off, argument: 0.5})
        with torch.no_grad():
            assert not torch.equal(model.train()(images), model(images)), argument
            assert torch.equal(model.eval()(images), model(images)), argument
    with torch.no_grad():
        model = build_backbone("vit_t", **TINY, **off).train()
        assert torch.equal(model(images), model(images))


@pytest.mark.parametrize("masks", [0.0, 0.25])
def test_every_parameter_gets_a_gradient_as_ddp_needs(masks: float):
    model = build_backbone("vit_t", **TINY, mask_ratio=masks)
    model(torch.rand(2, 3, 112, 112)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    token = model.get_parameter("mask_token").grad
    assert token is not None and bool(token.any()) == (masks > 0)


@pytest.mark.numeric
def test_products_of_the_blocks_alone_are_in_16_bits_under_autocast():
    torch.manual_seed(0)
    model = build_backbone("vit_t", embedding_size=16, width=0.125).eval()
    half, seen = torch.bfloat16, {}
    for name, part in model.named_modules():
        if not list(part.children()):
            part.register_forward_hook(lambda _, given, out, name=name: seen.update({name: (given[0].dtype, out.dtype)}))
    images = torch.rand(3, 3, 112, 112) * 2 - 1
    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", half):
            found = model(images)
    products = {name for name, (_, out) in seen.items() if out == half and not name.endswith(("drop_path", "relu"))}
    assert products == {f"blocks.{n}.{part}" for n in range(12) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert all(seen[f"blocks.{n}.norm1"][0] == torch.float32 for n in range(12))  # what the skip connections carry
    assert {seen[name] for name in ("patch_embed.proj", "norm", "feature.0", "feature.3")} == {(torch.float32,) * 2}
    assert found.dtype == torch.float32
    # each of the 48 products rounds its inputs and its output, at random
    bound = 4 * (3 * 48) ** 0.5 * bf16_half_step(1.0) * float(expected.abs().max())
    assert 0 < float((found - expected).abs().max()) < bound


@pytest.mark.numeric
def test_an_image_has_the_same_embedding_in_a_batch_of_any_size():
    torch.manual_seed(0)
    model = build_backbone("vit_t", **TINY).double().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.rand(5, 3, 112, 112, dtype=torch.float64)
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), alone)


def test_images_of_another_size_have_other_tokens():
    model = build_backbone("vit_t", **TINY, mask_ratio=0.99, image_size=80)
    assert model.get_parameter("pos_embed").shape == (1, 64, 16)
    tokens: list[int] = []
    model.get_submodule("blocks.11").register_forward_hook(lambda _, given, out: tokens.append(out.shape[1]))
    for training in (True, False):
        assert model.train(training)(torch.rand(2, 3, 80, 80)).shape == (2, 8)
    assert tokens == [1, 64]  # one is left at least
    with pytest.raises(ValueError, match=r"shape \(b, 3, 80, 80\), got \(2, 3, 112, 112\)"):
        model(torch.rand(2, 3, 112, 112))


@pytest.mark.parametrize("key", ["drop_path", "mask_ratio"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_impossible_shares_are_refused(key: str, value: float):
    with pytest.raises(ValueError, match=rf"^{key} must be from 0 to 0.99, .* got {value}"):
        build_backbone("vit_t", **TINY, **{key: value})


def test_defaults_are_those_that_arcface_torch_trains_with():
    shares = {name: (backbone_arguments(name)["drop_path"], backbone_arguments(name)["mask_ratio"]) for name in DEPTHS}
    usual = (0.1, 0.1)
    assert shares == {"vit_t": usual, "vit_s": usual, "vit_b": usual, "vit_l": (0.05, 0.1), "vit_h": (0.1, 0.0)}


def _train_and_note_masks(arguments: list[str]) -> int:
    """Train, and write down the tokens that each forward pass keeps, a line for each."""
    name = next(word.partition("=")[2] for word in arguments if word.startswith("run.name="))
    notes = Path(arguments[0]).parent / f"masks_{name}_{os.environ['RANK']}"

    def noted(count: int, num_kept: int, num_tokens: int, device: torch.device) -> Tensor:
        kept = draw_kept(count, num_kept, num_tokens, device)
        with notes.open("a") as file:
            file.write(json.dumps(kept.tolist()) + "\n")
        return kept

    vit.draw_kept = noted
    return train.main(arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a set and runs of two ranks: `whole`, and `broken`, which was killed, and resumed checkpointed."""
    folder = tmp_path_factory.mktemp("runs")
    write_dataset(folder)
    shares = ["backbone.mask_ratio=0.25", "backbone.drop_path=0.3", "backbone.dropout=0.2"]
    length = ["train.max_steps=8", "train.accumulation=2", "checkpoint.every=3", "eval.targets=[]"]
    adamw = ["optimizer.name=adamw", "optimizer.lr=0.001"]
    common = ["backbone.name=shallow_vit", "backbone.width=0.0625", "backbone.embedding_size=16", *shares, *length, *adamw]
    whole = tiny_run(folder, folder, *common, "run.name=whole")
    ended_well(run_program(_train_and_note_masks, [whole] * 2))
    broken = tiny_run(folder, folder, *common, "run.name=broken")
    (folder / "output").mkdir()
    started, metrics = Started(_train_and_note_masks, [broken] * 2, folder / "output"), folder / "broken" / "metrics.jsonl"
    started.wait_until(lambda: list_checkpoints(folder / "broken") != [] and len(metrics.read_text().splitlines()) >= 4)
    for rank in range(2):
        started.send(signal.SIGKILL, rank)
    assert started.wait().returncode == -signal.SIGKILL
    done = run_program(_train_and_note_masks, [[*broken, "backbone.checkpointing=true"]] * 2)
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
    assert "backbone.checkpointing was False, is True" in done.stdout
    return folder


def test_a_killed_run_that_resumes_with_checkpointing_ends_with_the_bits_of_one_without(folder: Path):
    whole = equal_weights(folder / "whole", folder / "broken")
    assert int(whole["feature.1.num_batches_tracked"]) == 16  # two micro-batches in each step


def test_each_rank_and_micro_batch_has_masks_of_its_own_and_a_resumed_run_has_the_same(folder: Path):
    of_ranks = [(folder / f"masks_whole_{rank}").read_text().splitlines() for rank in range(2)]
    assert [len(lines) for lines in of_ranks] == [16, 16]
    assert len({json.dumps(row) for lines in of_ranks for line in lines for row in json.loads(line)}) == 2 * 16 * 2
    for rank, lines in enumerate(of_ranks):
        again = (folder / f"masks_broken_{rank}").read_text().splitlines()
        assert again[-4:] == lines[-4:] and set(again) == set(lines)


@pytest.mark.numeric
def test_eval_scores_the_network_of_a_run_and_its_onnx_export_alike(folder: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--targets", "tiny", "--data", str(folder), "--device", "cpu", "--batch-size", "7"]
    assert evaluate([str(folder / "broken"), *arguments]) == 0
    of_run = capsys.readouterr().out.splitlines()[-1]
    model = build_backbone("shallow_vit", 16, 1 / 16).eval()
    weights = {name: value for name, value in final_weights(folder / "broken").items() if name in model.state_dict()}
    model.load_state_dict(weights, strict=True)
    path, images = folder / "vit.onnx", torch.rand(5, 3, 112, 112) * 2 - 1
    axes = {"images": {0: "batch"}, "embeddings": {0: "batch"}}
    names = {"input_names": ["images"], "output_names": ["embeddings"]}
    torch.onnx.export(model, (images[:2],), str(path), **names, dynamic_axes=axes, dynamo=False)
    (found,) = onnxruntime.InferenceSession(str(path)).run(None, {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(images), rtol=1e-4, atol=1e-4)
    assert evaluate([str(path), *arguments]) == 0
    of_export = capsys.readouterr().out.splitlines()[-1]
    assert of_export.split("|")[2:] == of_run.split("|")[2:], (of_export, of_run)
