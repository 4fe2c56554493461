"""Weights, sums and maxima of negatives of every kind, by plain torch and by C, against float64."""

import math

import pytest
import torch
from negatives_cases import Case, assert_right_maxima, assert_right_weights, cases, given
from torch import Tensor

from losses.negatives import KINDS
from partial_fc.kernels import build_kernels
from partial_fc.kernels import cpu as cpu_kernels
from partial_fc.kernels.plain import PlainKernels
from partial_fc.workspace import Workspace

pytestmark = pytest.mark.numeric
CPU = torch.device("cpu")
KERNELS = ["plain", pytest.param("c", marks=pytest.mark.skipif(cpu_kernels.load()[0] is None, reason="no C compiler here"))]


def _kernels(name: str) -> PlainKernels:
    return build_kernels(name, Workspace(CPU, 0))


def _weights(name: str, case: Case, products: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return W v and the sums, which start at zero."""
    made = given(case)
    weights, sums = (made.products if products is None else products).clone(), torch.zeros(3, case.shape[1])
    _kernels(name).weights(made.tile(weights), case.link, made.shift, made.less, sums)
    return weights, sums


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_weights_sums_and_maxima_are_those_of_float64(name: str, case: Case):
    made = given(case)
    assert_right_weights(made, *_weights(name, case))
    for start in (-math.inf, 0.5, 1e4):
        before = torch.full((case.shape[1],), start)
        maximum, products = before.clone(), made.products.clone()
        _kernels(name).maxima(made.tile(products), maximum)
        assert_right_maxima(made, before, maximum)
        assert torch.equal(products, made.products)


@pytest.mark.parametrize("name", KERNELS)
def test_sums_are_added_to_and_other_rows_stay(name: str):
    made = given(Case("circle", less=True))
    once = _weights(name, made.case)[1]
    twice = torch.stack([once[0], torch.full_like(once[0], 7.0), torch.full_like(once[0], 9.0)])
    _kernels(name).weights(made.tile(made.products), "softmax", made.shift, made.less, twice)
    # each thread adds its own part, rounded once: a sum that has begun is rounded elsewhere than one from zero
    torch.testing.assert_close(twice[0], 2 * once[0], rtol=torch.get_num_threads() * torch.finfo(torch.float32).eps, atol=0.0)
    assert (twice[1] == 7).all() and (twice[2] == 9).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("link", ["softmax", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cosine_that_is_not_a_number_reaches_its_samples_sum_and_no_other(name: str, kind: str, link: str):
    """So that the head sees it and skips the step."""
    case = Case(kind, link, shape=(6, 40))
    products = given(case).products
    products[3, 5] = math.nan  # sample 5 has its own class elsewhere
    weights, sums = _weights(name, case, products)
    assert weights[3, 5].isnan() and sums[0, 5].isnan()
    assert weights.isnan().sum() == 1 and sums[0].isnan().sum() == 1


@pytest.mark.skipif(cpu_kernels.load()[0] is None, reason="no C compiler here")
@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing_but_the_grouping_of_the_sums(kind: str):
    case, found = Case(kind, weighted=True, shape=(37, 300)), []
    for number in (1, 3):
        torch.set_num_threads(number)
        found.append(_weights("c", case))
        assert_right_weights(given(case), *found[-1])
    assert torch.equal(found[0][0], found[1][0])
