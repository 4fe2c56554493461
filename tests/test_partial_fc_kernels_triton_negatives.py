"""The Triton kernel of the negatives against float64; without a GPU it runs in Triton's interpreter, which is slow.

test_partial_fc_kernels_cpu.py does the same with plain torch and C.
"""

import importlib
import math
from dataclasses import replace

import pytest
import torch
from conftest import some
from negatives_cases import Case, assert_right_maxima, assert_right_weights, cases, given
from torch import Tensor

from losses.negatives import KINDS
from partial_fc.kernels import _why_no_triton
from partial_fc.workspace import Workspace

if _why_no_triton():
    pytest.skip(f"{_why_no_triton()}; the CUDA builds of torch bring it", allow_module_level=True)
kernels = importlib.import_module("partial_fc.kernels.cuda").TritonKernels

pytestmark = pytest.mark.numeric


def _weights(case: Case, device: torch.device, products: Tensor | None = None) -> tuple[Tensor, Tensor]:
    made = given(case).to(device)
    wider = torch.zeros(case.shape[0], case.shape[1] + 3, dtype=case.dtype, device=device)  # rows lie further apart than B
    weights, sums = wider[:, :-3], torch.zeros(3, case.shape[1], device=device)
    weights.copy_(made.products if products is None else products)
    kernels(Workspace(device, 0)).weights(made.tile(weights), case.link, made.shift, made.less, sums)
    assert not wider[:, -3:].any()
    return weights, sums


# the interpreter takes half a second for each; what they add one by one, the others have together
IN_SHORT = [
    case
    for case in cases()
    if torch.cuda.is_available() or case.straight or case.weighted or case.scale > 100 or case.shape[0] > 100
]
IN_SHORT = IN_SHORT if torch.cuda.is_available() else some(IN_SHORT, 3)  # the C kernels run them all


@pytest.mark.parametrize("case", IN_SHORT, ids=str)
def test_weights_sums_and_maxima_are_those_of_float64(device: torch.device, case: Case) -> None:
    if device.type == "cpu" and case.shape[0] > 100:
        case = replace(case, shape=(67, case.shape[1]))  # one class group and a bit
    made = given(case)
    assert_right_weights(made, *_weights(case, device))
    moved = made.to(device)
    for start in (-math.inf, 1e4):
        maximum, products = torch.full((case.shape[1],), start, device=device), moved.products.clone()
        kernels(Workspace(device, 0)).maxima(moved.tile(products), maximum)
        assert_right_maxima(made, torch.full((case.shape[1],), start), maximum)
        assert torch.equal(products, moved.products)


@pytest.mark.parametrize("link", ["softmax", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cosine_that_is_not_a_number_reaches_its_samples_sum_and_no_other(device: torch.device, kind: str, link: str) -> None:
    case = Case(kind, link, shape=(6, 40))
    products = given(case).products
    products[3, 5] = math.nan  # sample 5 has its own class elsewhere
    weights, sums = _weights(case, device, products)
    assert weights[3, 5].isnan() and sums[0, 5].isnan()
    assert weights.isnan().sum() == 1 and sums[0].isnan().sum() == 1
