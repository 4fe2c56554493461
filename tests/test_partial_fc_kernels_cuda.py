"""What a machine without a GPU can tell about the CUDA kernels: they compile, and their place is taken where they cannot run.

What they compute is tested in Triton's interpreter, in test_partial_fc_kernels_triton.py.
"""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Started, ended_well

from losses.negatives import KINDS, Negatives
from partial_fc import RowAdamW, RowSGD
from partial_fc.centres.store import CentreStore
from partial_fc.kernels import _why_no_triton, choose_kernels, why_plain
from partial_fc.kernels.plain import FUSED, CentreGradient, Tile
from partial_fc.workspace import Workspace

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed; the CUDA builds of torch bring it", allow_module_level=True)

CUDA = torch.device("cuda")

DONE: list[list[Any]] = []  # name, capability and number of the form of each kernel compiled
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}


class Compiled:
    """A kernel that is compiled for the types of the arguments that the head's calls give it, and does not run.

    The first form of a kernel is compiled for every capability, the others for one of them in turn.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.compile

    def compile(self, *arguments: Any, num_warps: int = 4, num_stages: int = 3) -> None:
        import triton  # here, without the variable that the tests of the interpreter set before Triton's first import
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants = {}, {}
        for parameter, value in zip(self.kernel.params, arguments, strict=True):
            value = value if parameter.name != "widen" else False  # as on CUDA
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
            elif isinstance(value, int):
                signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            else:
                signature[parameter.name] = "fp32"
        before = len({form for name, _, form in DONE if name == self.kernel.__name__})
        for capability in (80, 90, 100) if not before else ((100, 80, 90)[before % 3],):
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants)
            target = GPUTarget("cuda", capability, 32)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            code = triton.compile(source, target=target, options=options).asm["cubin"]
            assert code[:4] == b"\x7fELF"
            DONE.append([self.kernel.__name__, capability, before])


def _compile_all(arguments: list[str]) -> int:
    """Compile each kernel in all its forms; print DONE."""
    from partial_fc.kernels import cuda, fused

    for name in ("exp_mask_sum_kernel", "negatives_kernel", "update_kernel"):
        setattr(cuda, name, Compiled(getattr(cuda, name)))
    fused.product_exp_kernel = Compiled(fused.product_exp_kernel)
    workspace = Workspace(torch.device("cpu"), 0)
    kernels = cuda.TritonKernels(workspace)
    places = torch.tensor([0, -1])
    for dtype, inverse_norms in ((torch.float32, None), (torch.bfloat16, torch.ones(4))):
        kernels.exponentials(Tile(torch.zeros(4, 2, dtype=dtype), inverse_norms, places, 0), 0.0, torch.zeros(2))
    sums, ones = torch.zeros(3, 2), torch.ones(4)
    for kernels.fused in FUSED:
        factors = torch.zeros(256, 512).bfloat16(), torch.zeros(2, 512).bfloat16().t()
        kernels.exponentials(Tile(torch.zeros(4, 2).bfloat16(), ones, places, 0, factors=factors), 0.0, sums[0])
    for number, kind in enumerate(KINDS):  # every kind, but what does not depend on it only for the last
        function = Negatives(kind, torch.ones(6, 2), straight=number == 0)
        tile = Tile(torch.zeros(4, 2, dtype=torch.bfloat16), ones, places, 0, 0.5, function, ones)
        kernels.weights(tile, "softmax", sums[1], sums[2], sums)
    tile = Tile(torch.zeros(4, 2), None, places, 0, None, function)
    kernels.weights(tile, "sum", 0.0, None, sums)
    kernels.maxima(tile._replace(row_weights=ones), sums[0])
    target = (places[:1], places[:1], torch.zeros(2, 512))
    for optimizer in (RowSGD(), RowSGD(nesterov=True), RowAdamW()):
        for form, dtype, select in (
            ("exact", torch.float32, slice(0, 4)),
            ("lean", torch.bfloat16, torch.arange(4)),
            ("tiny", torch.bfloat16, slice(0, 4)),
            ("mini", torch.bfloat16, slice(0, 4)),
        ):
            if form != "exact" and optimizer == RowSGD(nesterov=True):
                continue
            store = CentreStore(8, 512, form, isinstance(optimizer, RowAdamW), isinstance(optimizer, RowAdamW), 4, workspace)
            gradient = CentreGradient(select, torch.zeros(4, 512, dtype=dtype), *target)
            kernels.update_rows(optimizer, store, gradient, 0.1, 2**62, None)
    print(json.dumps(DONE))
    return 0


def _run(program: Callable[[list[str]], int], folder: Path, timeout: float) -> str:
    """Run a program in a process that has not imported Triton and in which its interpreter is off; return what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    return ended_well(Started(program, [[]], folder, environment).wait(timeout)).stdout


def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(tmp_path: Path):
    place = importlib.util.find_spec("triton").submodule_search_locations[0]
    if not list(Path(place).glob("backends/nvidia/bin/ptxas*")):
        pytest.skip("this build of Triton has no ptxas, NVIDIA's assembler")
    compiled = json.loads(_run(_compile_all, tmp_path, timeout=300))
    forms = dict(exp_mask_sum_kernel=2, product_exp_kernel=3, negatives_kernel=len(KINDS) + 2, update_kernel=9)
    for name, count in forms.items():
        assert {capability for kernel, capability, _ in compiled if kernel == name} == {80, 90, 100}
        assert {form for kernel, _, form in compiled if kernel == name} == set(range(count))


@pytest.fixture
def forget_what_was_found():
    _why_no_triton.cache_clear()
    yield
    _why_no_triton.cache_clear()


def test_plain_torch_replaces_kernels_that_fail_when_one_is_tried(monkeypatch: pytest.MonkeyPatch, forget_what_was_found: None):
    def no_compiler(device: torch.device) -> None:
        raise RuntimeError("in the build of a launcher\nFailed to find C compiler. Please specify via CC\n")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("partial_fc.kernels.cuda.try_kernel", no_compiler)
    assert choose_kernels("auto", CUDA, 512) == "plain"
    reason = why_plain("auto", CUDA, 512)
    assert reason.startswith("Triton ") and reason.endswith(
        " cannot run a kernel here: Failed to find C compiler. Please specify via CC"
    )


def _say_why_plain(arguments: list[str]) -> int:
    torch.cuda.is_available = lambda: True
    print(why_plain("auto", CUDA, 512))
    return 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, on which the kernel runs")
def test_where_triton_has_no_device_the_reason_is_one_line(tmp_path: Path):
    (line,) = _run(_say_why_plain, tmp_path, timeout=120).splitlines()
    assert line.startswith("Triton ") and " cannot run a kernel here: " in line
