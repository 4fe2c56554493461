"""What a machine without a GPU can tell about the CUDA kernels: they compile, and their place is taken where they cannot run.

What they compute is tested in Triton's interpreter, in test_partial_fc_kernels_triton.py.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from losses.negatives import KINDS
from partial_fc.kernels import _why_no_triton, choose_kernels, why_plain

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed; the CUDA builds of torch bring it", allow_module_level=True)

ROOT = Path(__file__).parents[1]
CUDA = torch.device("cuda")

# Compiles each kernel with the types of the arguments that the head's calls give it: the first form of a kernel for every
# capability, the others for one of them in turn.
COMPILE = """
import json, sys
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from losses.negatives import KINDS, Negatives
from partial_fc import RowAdamW, RowSGD
from partial_fc.centres.store import CentreStore
from partial_fc.kernels import cuda, fused
from partial_fc.kernels.plain import FUSED, CentreGradient, Tile
from partial_fc.workspace import Workspace

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.int32: "*i32", torch.int64: "*i64"}
done = []

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *arguments, num_warps=4, num_stages=3):
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
        before = len({form for name, _, form in done if name == self.kernel.__name__})
        for capability in (80, 90, 100) if not before else ((80, 90, 100)[before % 3],):
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants)
            target = GPUTarget("cuda", capability, 32)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            code = triton.compile(source, target=target, options=options).asm["cubin"]
            assert code[:4] == b"\\x7fELF"
            done.append([self.kernel.__name__, capability, before])

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
print(json.dumps(done))
"""


def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(tmp_path: Path):
    import triton  # here, because the tests of the interpreter set its variable before Triton's first import

    if not list(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
        pytest.skip("this build of Triton has no ptxas, NVIDIA's assembler")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
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


TRIED = """
import torch
torch.cuda.is_available = lambda: True
from partial_fc.kernels import why_plain
print(why_plain("auto", torch.device("cuda"), 512))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, on which the kernel runs")
def test_where_triton_has_no_device_the_reason_is_one_line():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", TRIED], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("Triton ") and " cannot run a kernel here: " in line
