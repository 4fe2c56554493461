"""The products of a chunk: against float64, on processors with units for bf16 and without."""

import pytest
import torch

from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.kernels import plain as products
from partial_fc.kernels.plain import add_product, converted_bytes, multiply, product_dtype
from partial_fc.workspace import Workspace

pytestmark = pytest.mark.numeric
CPU = torch.device("cpu")
CLASSES, ROWS, D = 2500, 24, 40  # no multiple of a block


@pytest.fixture(params=[True, False], ids=["with units for bf16", "without"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "is_fast_in_bf16", lambda device: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_float64(fast: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    centres, unit = torch.randn(CLASSES, D).to(dtype), torch.randn(ROWS, D).to(dtype)
    workspace = Workspace(CPU, 0)
    made = multiply(centres, unit.t(), torch.empty(CLASSES, ROWS, dtype=dtype), workspace)
    weights = torch.rand(CLASSES, ROWS).to(dtype)
    gradient = multiply(weights, unit, torch.empty(CLASSES, D, dtype=dtype), workspace)
    for result, left, right in ((made, centres, unit.t()), (gradient, weights, unit)):
        left, right = left.double(), right.double()
        slack = left.shape[1] * torch.finfo(torch.float32).eps * (left.abs() @ right.abs())
        assert (result.double() - left @ right).abs().le(torch.finfo(dtype).eps * (left @ right).abs() + slack).all()
    start = torch.randn(ROWS, D)
    total = start.clone()
    add_product(total, weights, centres, workspace)
    exact, most = weights.double().t() @ centres.double(), weights.double().t() @ centres.double().abs()
    rounded = torch.finfo(dtype).eps * exact.abs() if fast else 0.0  # without units for bf16 the sum is not rounded
    slack = CLASSES * torch.finfo(torch.float32).eps * (most + start.abs())
    assert (total.double() - start - exact).abs().le(rounded + slack).all()


@pytest.mark.parametrize("storage", ["exact", "lean"])
def test_the_gradient_of_fp32_centres_is_not_rounded_where_bf16_matrices_have_a_product_in_fp32(storage: str):
    config = HeadConfig(optimizer=RowSGD(0.0, 0.0), storage=storage, matmul_dtype=torch.bfloat16, kernels="plain")
    head = PartialFC(build_margin("cosface", scale=8.0, margin=0.0), 300, D, config=config)
    with torch.library._scoped_library("aten", "IMPL") as library:  # so that a CPU has it, as CUDA
        library.impl("mm.dtype", lambda left, right, dtype: left.to(dtype) @ right.to(dtype), "CPU")
        library.impl("mm.dtype_out", lambda left, right, dtype, out: torch.mm(left.to(dtype), right.to(dtype), out=out), "CPU")
        products.has_fp32_output.cache_clear()
        head.begin_step(torch.arange(ROWS)[None], 0)
        head(torch.randn(ROWS, D, generator=torch.Generator().manual_seed(0)))
        (pull,), weights = head._step().pulls, head._passes._cached[0, 0]
        (gradient,) = head._passes.gradients([pull], head._step().plan.chunks)
    products.has_fp32_output.cache_clear()
    exact = weights.double() @ (pull.batch.unit * pull.negatives[:, None]).bfloat16().double()
    error = (gradient.negatives - exact[:300]).norm() / exact.norm()
    assert error < 1e-6 if storage == "exact" else 1e-4 < error < 2.0**-8


def test_only_a_cpu_without_units_multiplies_bf16_in_fp32_and_takes_the_bytes_that_are_counted(fast: bool):
    assert product_dtype(CPU, torch.float32) == product_dtype(torch.device("cuda"), torch.float32) == torch.float32
    assert product_dtype(torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert product_dtype(CPU, torch.bfloat16) == (torch.bfloat16 if fast else torch.float32)
    workspace, centres, unit = Workspace(CPU, 0), torch.zeros(CLASSES, D).bfloat16(), torch.zeros(ROWS, D).bfloat16()
    weights = multiply(centres, unit.t(), torch.empty(CLASSES, ROWS, dtype=torch.bfloat16), workspace)
    multiply(weights, unit, torch.empty_like(centres), workspace)
    held = sum(buffer.nbytes for buffer in workspace._buffers.values())
    assert held == (0 if fast else converted_bytes(CLASSES, D, ROWS) - 4 * (ROWS * D + 1024 * D))
    add_product(torch.zeros(ROWS, D), weights, centres, workspace)
    if not fast:  # but for the smaller factor, which is no buffer
        held = sum(buffer.nbytes for buffer in workspace._buffers.values())
        assert held == converted_bytes(CLASSES, D, ROWS) - 4 * ROWS * D
