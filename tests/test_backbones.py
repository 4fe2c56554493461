"""Backbones: names, shapes and outputs of arcface_torch, initial values, precision, and the errors of a user.

fixtures/backbones: state_dict_shapes.json lists the entries of arcface_torch's r18, mbf and mbf_large, and of the published
edgeface_xs, in their order; embeddings.json is what those networks and edgeface_s give (float64, first 8 of 512 numbers, two
images) for the weights of `_set_by_formula` and images of `_noise`.
"""

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import some
from rounding import rounding_bound
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from backbones import build_backbone, iresnet, list_backbones
from backbones.ghostfacenet import GhostBottleneck
from backbones.iresnet import PReLU, scale_channels

FIXTURES = Path(__file__).parent / "fixtures" / "backbones"
SHAPES = json.loads((FIXTURES / "state_dict_shapes.json").read_text())
EMBEDDINGS = json.loads((FIXTURES / "embeddings.json").read_text())
EMBEDDINGS["vit_b"] = json.loads((FIXTURES / "vit.json").read_text())  # of 32 numbers per token; test_backbones_vit.py
NUM_BLOCKS = {"r18": (2, 2, 2, 2), "r34": (3, 4, 6, 3), "r50": (3, 4, 14, 3), "r100": (3, 13, 30, 3), "r200": (6, 26, 60, 6)}
NUM_BLOCKS["r2060"] = (3, 128, 896, 3)
COMPUTED = [name for name in list_backbones() if name != "r2060"]  # a thousand blocks: only its structure is tested
KINDS = ["r18", "mbf", "ghostfacenet_v2_2", "edgeface_xs"]  # one of each file
BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@functools.cache
def _on_meta(name: str, width: float = 1.0) -> nn.Module:
    with torch.device("meta"):
        return build_backbone(name, width=width)


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in model.state_dict().items()}


def _iresnet_shapes(num_blocks: tuple[int, ...]) -> dict[str, list[int]]:
    """Return what the state dict of an IResNet holds, from the rule of its names."""
    shapes: dict[str, list[int]] = {"conv1.weight": [64, 3, 3, 3], "prelu.weight": [64]}

    def add_batch_norm(name: str, channels: int) -> None:
        shapes.update({f"{name}.{part}": [channels] for part in BATCH_NORM[:4]})
        shapes[f"{name}.num_batches_tracked"] = []

    add_batch_norm("bn1", 64)
    before = 64
    for stage, (channels, depth) in enumerate(zip((64, 128, 256, 512), num_blocks, strict=True), start=1):
        for index in range(depth):
            block = f"layer{stage}.{index}"
            inside = before if index == 0 else channels
            add_batch_norm(f"{block}.bn1", inside)
            shapes[f"{block}.conv1.weight"] = [channels, inside, 3, 3]
            add_batch_norm(f"{block}.bn2", channels)
            shapes[f"{block}.prelu.weight"] = [channels]
            shapes[f"{block}.conv2.weight"] = [channels, channels, 3, 3]
            add_batch_norm(f"{block}.bn3", channels)
        shapes[f"layer{stage}.0.downsample.0.weight"] = [channels, before, 1, 1]
        add_batch_norm(f"layer{stage}.0.downsample.1", channels)
        before = channels
    add_batch_norm("bn2", 512)
    shapes.update({"fc.weight": [512, 25088], "fc.bias": [512]})
    add_batch_norm("features", 512)
    return shapes


@pytest.mark.parametrize("name", list(SHAPES))
def test_state_dict_has_the_published_names_and_shapes_in_their_order(name: str) -> None:
    assert list(_shapes(_on_meta(name)).items()) == list(SHAPES[name].items())  # the order numbers optimizer states


@pytest.mark.parametrize("name", list(NUM_BLOCKS))
def test_iresnet_state_dict_follows_the_rule_of_its_depth(name: str) -> None:
    assert _shapes(_on_meta(name)) == _iresnet_shapes(NUM_BLOCKS[name])


@pytest.mark.parametrize(
    ("name", "num_keys", "million_parameters"),
    [("r18", 187, 24.03), ("r34", 331, 34.14), ("r50", 475, 43.59), ("r100", 925, 65.16), ("r200", 1807, 118.83),
     ("r2060", 18583, 1122.3), ("mbf", 333, 2.06), ("mbf_large", 606, 6.31),
     ("edgeface_xs", 257, 1.77), ("edgeface_s", 257, 3.65)],  # Table II of EdgeFace
)  # fmt: skip
def test_number_of_keys_and_parameters_is_the_published_one(name: str, num_keys: int, million_parameters: float) -> None:
    model = _on_meta(name)
    assert len(model.state_dict()) == num_keys
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == million_parameters


def test_iresnet_starts_with_convolutions_of_deviation_a_tenth_and_neutral_normalisations() -> None:
    torch.manual_seed(0)
    model = build_backbone("r18", width=0.5)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            tolerance = 5 * 0.1 / (2 * module.weight.numel()) ** 0.5  # five standard errors
            assert abs(module.weight.std().item() - 0.1) < tolerance
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            assert module.eps == 1e-5
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
        if isinstance(module, nn.PReLU):
            assert (module.weight == 0.25).all()


def test_mobilefacenet_starts_with_deviations_of_the_fan_out() -> None:
    torch.manual_seed(0)
    for module in build_backbone("mbf").modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_out = module.weight.shape[0] * module.weight[0, 0].numel()
            expected = (2.0 / fan_out) ** 0.5
            assert abs(module.weight.std().item() / expected - 1) < 5 / (2 * module.weight.numel()) ** 0.5


def test_only_the_scale_of_the_output_normalisation_is_frozen() -> None:
    frozen = {name for name, parameter in _on_meta("r50").named_parameters() if not parameter.requires_grad}
    assert frozen == {"features.weight"}
    assert all(parameter.requires_grad for parameter in _on_meta("mbf").parameters())


@pytest.mark.parametrize("name", COMPUTED)
def test_every_backbone_gives_embeddings_and_finite_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = build_backbone(name, embedding_size=24, width=0.125)
    embeddings = model(torch.randn(2, 3, 112, 112))
    assert embeddings.shape == (2, 24)
    assert embeddings.dtype == torch.float32
    embeddings.square().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            assert torch.isfinite(parameter.grad).all(), parameter_name


def _noise(count: int, seed: int) -> Tensor:
    """Return numbers in [-1, 1] without pattern, the same with every version of torch."""
    wave = torch.sin(torch.arange(count, dtype=torch.float64) * 12.9898 + seed)
    return 2.0 * (wave * 43758.5453).frac().abs() - 1.0


def _set_by_formula(model: nn.Module) -> None:
    for index, (name, value) in enumerate(model.state_dict().items()):
        if not value.is_floating_point():
            continue
        wave = _noise(value.numel(), index).view(value.shape)
        if name.endswith("running_var"):
            wave = 1.0 + 0.5 * wave
        elif value.dim() > 1:
            wave = wave * (3.0 / value[0].numel()) ** 0.5
        elif name.endswith("weight"):
            wave = 0.6 + 0.3 * wave
        else:
            wave = 0.1 * wave
        value.copy_(wave)


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(EMBEDDINGS))
def test_embeddings_equal_those_of_the_published_network_for_the_same_weights(name: str) -> None:
    model = build_backbone(name, width=1 / 16 if name == "vit_b" else 1.0).eval()
    _set_by_formula(model)
    with torch.no_grad():  # the weights and images are fp32 numbers, the arithmetic float64: no processor's order of sums shows
        embeddings = model.double()(_noise(2 * 3 * 112 * 112, 0).view(2, 3, 112, 112).float().double())
    expected = torch.tensor(EMBEDDINGS[name], dtype=torch.float64)  # rounded to 6 digits
    torch.testing.assert_close(embeddings[:, :8], expected, rtol=0, atol=0.501e-6)


@pytest.mark.numeric
@pytest.mark.parametrize(("se", "size"), [(False, 112), (True, 64)])
def test_iresnet_forward_equals_its_equations_written_with_functions(se: bool, size: int) -> None:
    torch.manual_seed(0)
    model = build_backbone("r18", embedding_size=16, width=0.125, image_size=size, se=se).double().eval()
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.05, 0.35)
        if se and value.dim() > 1:  # features of the size of one, so that no gate is fully open or closed
            value.normal_(0.0, (2 / value[0].numel()) ** 0.5)
    w = model.state_dict()
    images = torch.randn(2, 3, size, size, dtype=torch.float64)

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var, scale, bias = (
            w[f"{name}.{part}"].view(1, -1, *[1] * (x.dim() - 2)) for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * scale + bias

    def prelu(x: Tensor, name: str) -> Tensor:
        return torch.where(x > 0, x, x * w[f"{name}.weight"].view(1, -1, 1, 1))

    conv = nn.functional.conv2d
    x = prelu(norm(conv(images, w["conv1.weight"], padding=1), "bn1"), "prelu")
    for block, stride in [(f"layer{s}.{i}", 2 - i) for s in (1, 2, 3, 4) for i in (0, 1)]:
        out = conv(norm(x, f"{block}.bn1"), w[f"{block}.conv1.weight"], padding=1)
        out = prelu(norm(out, f"{block}.bn2"), f"{block}.prelu")
        out = norm(conv(out, w[f"{block}.conv2.weight"], stride=stride, padding=1), f"{block}.bn3")
        if se:  # Equations 2 to 4 of Hu et al.
            z = out.flatten(2).sum(2) / (out.shape[2] * out.shape[3])
            z = (z @ w[f"{block}.se.squeeze.weight"].t()).clamp(min=0) @ w[f"{block}.se.excite.weight"].t()
            out = out / (1 + (-z).exp())[:, :, None, None]
        if stride == 2:
            x = norm(conv(x, w[f"{block}.downsample.0.weight"], stride=2), f"{block}.downsample.1")
        x = x + out
    expected = norm(norm(x, "bn2").flatten(1) @ w["fc.weight"].t() + w["fc.bias"], "features")
    torch.testing.assert_close(model(images), expected)


def test_squeeze_and_excitation_adds_its_two_matrices_to_each_block_and_nothing_else() -> None:
    with torch.device("meta"):
        plain, gated = (_shapes(build_backbone("r50", se=se)) for se in (False, True))
    added = {name: shape for name, shape in gated.items() if name not in plain}
    assert {name: gated[name] for name in plain} == plain
    stages = enumerate(zip((64, 128, 256, 512), (3, 4, 14, 3), strict=True), 1)
    expected = {}
    for stage, (channels, depth) in stages:
        for block in range(depth):
            expected[f"layer{stage}.{block}.se.squeeze.weight"] = [channels // 16, channels]
            expected[f"layer{stage}.{block}.se.excite.weight"] = [channels, channels // 16]
    assert added == expected


@pytest.mark.parametrize("name", KINDS)
def test_embedding_layer_stays_in_fp32_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    model = build_backbone(name, embedding_size=16, width=0.125)
    inputs: dict[str, torch.dtype] = {}
    first, last = next(m for m in model.modules() if isinstance(m, nn.Conv2d)), None
    for module in model.modules():
        if isinstance(module, nn.Linear):
            last = module
    assert last is not None
    first.register_forward_hook(lambda _, __, out: inputs.update(first=out.dtype))
    last.register_forward_hook(lambda _, given, out: inputs.update(last_in=given[0].dtype, last_out=out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = model(torch.randn(2, 3, 112, 112))
    assert inputs == {"first": torch.bfloat16, "last_in": torch.float32, "last_out": torch.float32}
    assert embeddings.dtype == torch.float32


@pytest.mark.numeric
@pytest.mark.parametrize("name", KINDS)
def test_memory_format_does_not_change_the_embeddings(name: str) -> None:
    torch.manual_seed(0)
    model = build_backbone(name, embedding_size=16, width=0.125).double().eval()
    images = torch.randn(2, 3, 112, 112, dtype=torch.float64)
    with torch.no_grad():
        expected = model(images)
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        actual = model(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", KINDS)
def test_dropout_acts_in_training_only(name: str) -> None:
    torch.manual_seed(0)
    model = build_backbone(name, embedding_size=16, width=0.125, dropout=0.5)
    images = torch.randn(4, 3, 112, 112)
    with torch.no_grad():
        assert not torch.equal(model.train()(images), model(images))
        assert torch.equal(model.eval()(images), model(images))


@pytest.mark.parametrize(("width", "expected"), [(1.0, 64), (0.5, 32), (0.3, 16), (0.01, 16), (1.3, 80), (2.0, 128)])
def test_width_rounds_channels_to_multiples_of_eight(width: float, expected: int) -> None:
    assert scale_channels(64, width) == expected


@pytest.mark.parametrize(
    ("name", "width"), some(itertools.product([*KINDS, "mbf_large", "ghostfacenet_v1_1"], [0.05, 0.3, 1.3]), 2)
)
def test_any_width_builds_and_keeps_the_names(name: str, width: float) -> None:
    assert list(_on_meta(name, width).state_dict()) == list(_on_meta(name).state_dict())


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf")])
def test_width_that_is_no_positive_number_is_refused(width: float) -> None:
    with pytest.raises(ValueError, match=r"width must be a number above 0"):
        build_backbone("mbf", width=width)


def test_unknown_name_is_refused_with_the_nearest_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"name must be one of r18, .*mbf, .* got 'r1000'. Did you mean r100\?"):
        build_backbone("r1000")
    with pytest.raises(ValueError, match=r"got 'edgenext'\.$"):  # nothing here is near: no suggestion
        build_backbone("edgenext")


@pytest.mark.parametrize(("key", "value"), [("embedding_size", 0), ("dropout", 1.0), ("dropout", -0.1)])
@pytest.mark.parametrize("name", ["r18", "mbf"])
def test_impossible_head_is_refused(name: str, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{key} must be .* got {value}"):
        build_backbone(name, **{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["r18", "mbf"])
@pytest.mark.parametrize("shape", [(2, 3, 224, 224), (2, 112, 112, 3), (3, 112, 112), (2, 1, 112, 112)])
def test_wrong_input_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape \(b, 3, 112, 112\), got \(" + ", ".join(map(str, shape)) + r"\)"):
        _on_meta(name)(torch.empty(shape, device="meta"))


@pytest.mark.parametrize(
    ("name", "million_parameters", "million_operations"),  # the table of GhostFaceNets
    [("ghostfacenet_v1_1", 4.09, 215.65), ("ghostfacenet_v1_2", 4.06, 60.29),
     ("ghostfacenet_v2_1", 6.88, 272.10), ("ghostfacenet_v2_2", 6.84, 76.51)],
)  # fmt: skip
def test_ghostfacenets_have_the_published_size(name: str, million_parameters: float, million_operations: float) -> None:
    model = _on_meta(name)
    statistics = sum(value.numel() for key, value in model.named_buffers() if ".running_" in f".{key}")  # Keras counts them
    assert (sum(p.numel() for p in model.parameters()) + statistics) / 1e6 == pytest.approx(million_parameters, abs=0.01)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(2, 3, 112, 112, device="meta"))
    # theirs counts normalisations and activations, too: less than two per cent
    assert 0.98 < counter.get_total_flops() / 4e6 / million_operations < 1


@pytest.mark.numeric
def test_a_ghost_bottleneck_equals_its_equations_written_with_functions() -> None:
    torch.manual_seed(0)
    block = GhostBottleneck(6, 16, 12, 5, 2, excitation=True, attention=True, reshaped=True).double().eval()
    for value in block.state_dict().values():
        if value.is_floating_point():
            value.uniform_(-0.5, 0.5).abs_()
    w = block.state_dict()
    x = torch.randn(2, 6, 9, 7, dtype=torch.float64)

    def conv(x: Tensor, name: str, activation: bool = False, stride: int = 1) -> Tensor:
        kernel = w[f"{name}.0.weight"]
        padding = (kernel.shape[2] // 2, kernel.shape[3] // 2)
        x = nn.functional.conv2d(x, kernel, None, stride, padding, groups=x.shape[1] // kernel.shape[1])
        scale, bias, mean, var = (w[f"{name}.1.{key}"].view(-1, 1, 1) for key in BATCH_NORM[:4])
        x = (x - mean) / (var + 1e-5).sqrt() * scale + bias
        return torch.where(x > 0, x, x * w[f"{name}.2.weight"].view(-1, 1, 1)) if activation else x

    def ghost(x: Tensor, name: str, activation: bool) -> Tensor:
        first = conv(x, f"{name}.primary", activation)
        return torch.cat([first, conv(first, f"{name}.cheap", activation)], 1)

    pooled = x[:, :, :8, :6].reshape(2, 6, 4, 2, 3, 2).mean((3, 5))
    gates = conv(conv(conv(pooled, "attention.layers.1"), "attention.layers.2"), "attention.layers.3")
    rows, columns = (_bilinear_weights(small, large) for small, large in ((4, 9), (3, 7)))
    gates = torch.einsum("yr,bcrs,xs->bcyx", rows, 1 / (1 + (-gates).exp()), columns)
    out = conv(ghost(x, "expand", True) * gates, "middle.0", stride=2)
    z = out.mean((2, 3)) @ w["middle.1.squeeze.weight"].t() + w["middle.1.squeeze.bias"]
    z = torch.where(z > 0, z, z * w["middle.1.prelu.weight"]) @ w["middle.1.excite.weight"].t() + w["middle.1.excite.bias"]
    out = ghost(out * ((z + 3) / 6).clamp(0, 1)[:, :, None, None], "project", False)
    expected = out + conv(conv(x, "shortcut.0", stride=2), "shortcut.1")
    torch.testing.assert_close(block(x), expected)


def _bilinear_weights(small: int, large: int) -> Tensor:
    """Return the (large, small) weights of a linear interpolation between the centres of pixels."""
    places = ((torch.arange(large, dtype=torch.float64) + 0.5) * small / large - 0.5).clamp(0, small - 1)
    return (1 - (places[:, None] - torch.arange(small)).abs()).clamp(min=0)


@pytest.mark.parametrize("gamma", [0.0, 1.5])
def test_a_rank_that_is_no_share_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match=rf"gamma must be above 0 and at most 1.* got {gamma}"):
        build_backbone("edgeface_xs", gamma=gamma)


@pytest.mark.parametrize(
    ("name", "size", "depends"),
    [
        ("r18", 48, ["fc.weight"]), ("r18", 448, ["fc.weight"]), ("mbf_large", 160, ["features.layers.0.layers.0.weight"]),
        ("ghostfacenet_v1_2", 48, ["pool.0.weight"]), ("ghostfacenet_v2_1", 80, ["pool.0.weight"]), ("edgeface_xs", 48, []),
    ],
)  # fmt: skip
def test_an_image_size_changes_only_what_depends_on_the_last_feature_map(name: str, size: int, depends: list[str]) -> None:
    with torch.device("meta"):
        model = build_backbone(name, embedding_size=24, image_size=size)
    assert model(torch.empty(2, 3, size, size, device="meta")).shape == (2, 24)
    with pytest.raises(ValueError, match=rf"\(b, 3, {size}, {size}\), got \(2, 3, 112, 112\): align or resize them to {size}"):
        model(torch.empty(2, 3, 112, 112, device="meta"))
    with torch.device("meta"):
        usual = _shapes(build_backbone(name, embedding_size=24))
    changed = {key for key, shape in _shapes(model).items() if shape != usual[key]}
    assert changed == set(depends)


@pytest.mark.parametrize("size", [0, 32, 100, 464])
def test_impossible_size_of_images_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"image_size must be a multiple of 16 from 48 to 448 .* got {size}$"):
        build_backbone("mbf", image_size=size)


@pytest.mark.numeric
@pytest.mark.parametrize("channels", [16, 128])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_prelu_equals_torch_in_values_and_gradients(
    memory_format: torch.memory_format, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iresnet, "_BLOCK", 7 * 5 * channels)  # several blocks, and a remainder
    torch.manual_seed(0)
    x = torch.randn(3, channels, 6, 5, dtype=torch.float64).to(memory_format=memory_format)
    x[0, :, 0] = 0.0
    ours, theirs = PReLU(channels).double(), nn.PReLU(channels).double()
    slopes = torch.rand(channels, dtype=torch.float64)
    results = []
    for module in (ours, theirs):
        module.weight.data.copy_(slopes)
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        assert out.is_contiguous(memory_format=memory_format)
        with torch.no_grad():
            assert torch.equal(module(x), out)
        results.append((out, leaf.grad, module.weight.grad))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.numeric
def test_prelu_in_bf16_sums_the_gradient_of_its_slopes_in_fp32() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8, 16, 16).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    grad = torch.rand(x.shape).bfloat16().to(memory_format=torch.channels_last)
    module = PReLU(8)
    module(x).backward(grad)
    assert x.grad is not None and module.weight.grad is not None
    assert torch.equal(x.grad, torch.where(x > 0, grad, 0.25 * grad))  # a quarter is exact
    products = (grad.double() * x.detach().double().clamp(max=0)).sum((0, 2, 3))
    sizes = (grad.double() * x.detach().double().clamp(max=0)).abs().sum((0, 2, 3))
    # each product of the 16 x 16 x 16 is rounded to bf16, up or down alike; their sum is not
    bound = rounding_bound(torch.bfloat16, 16**3) / 16**3 * sizes
    assert bool(((module.weight.grad.double() - products).abs() < bound).all())


@pytest.mark.parametrize("name", ["r18", "mbf"])
def test_batches_are_counted_in_the_state_dict_as_by_torch(name: str) -> None:
    torch.manual_seed(0)
    model, reference = (build_backbone(name, embedding_size=8, width=0.125) for _ in range(2))
    for part in list(reference.modules()):
        for path, child in part.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(part, path, nn.BatchNorm2d(child.num_features))
    reference.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 112, 112)

    def counts(network: nn.Module) -> dict[str, int]:
        return {key: int(value) for key, value in network.state_dict().items() if key.endswith("num_batches_tracked")}

    with torch.no_grad():
        for network in (model, reference):
            for _ in range(3):
                network(images)
            network.eval()(images)  # not counted
        assert counts(model) == counts(reference) and set(counts(model).values()) == {3}
        assert counts(model) == counts(reference)  # a second look changes nothing
        saved = model.state_dict()
        copied = {key: value.clone() for key, value in saved.items()}
        for network in (model, reference):
            network.train()(images)
            network.load_state_dict(copied)  # which forgets the fourth
            network(images)
        assert counts(model) == counts(reference) and set(counts(model).values()) == {4}
    for key, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
