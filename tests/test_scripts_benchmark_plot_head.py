"""The bytes that the benchmark says a step moves, against the tensors that the operations of a step are given."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.centres.store import FORMATS
from partial_fc.kernels import choose_kernels
from partial_fc.kernels.plain import CentreGradient, Tile
from partial_fc.softmax import passes as softmax
from partial_fc.workspace import Workspace
from scripts.benchmark.plot_head import floor_per_class, moved, parts_per_class

D, BATCH = 32, 8
FEW, MANY = 512, 1280  # classes; what does not grow with them is not in the difference


def _bytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class _Counter(TorchDispatchMode):
    """Counts what torch's operations read and write, and what the kernels are given."""

    def __init__(self, head: PartialFC) -> None:
        super().__init__()
        self.bytes, self.head = 0, head
        self.exponentials, self.update_rows = head.kernels.exponentials, head.kernels.update_rows
        head.kernels.exponentials = self._exponentials  # type: ignore[method-assign]
        self.weights, self.maxima = head.kernels.weights, head.kernels.maxima
        head.kernels.weights = self._weights  # type: ignore[method-assign]
        head.kernels.maxima = self._maxima  # type: ignore[method-assign]
        head.kernels.update_rows = self._update_rows  # type: ignore[method-assign]

    def __enter__(self) -> "_Counter":
        self.multiply, self.add_product = softmax.multiply, softmax.add_product
        softmax.multiply, softmax.add_product = self._multiply, self._add_product
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        softmax.multiply, softmax.add_product = self.multiply, self.add_product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if name in ("aten::mm", "aten::copy_", "aten::index_select"):
            read = args[1:] if name == "aten::copy_" else args
            self.bytes += _bytes(read) + _bytes(result)
        return result

    def _multiply(self, left: Tensor, right: Tensor, out: Tensor, workspace: Workspace) -> Tensor:
        self.bytes += _bytes((left, right, out))
        with _disable_current_modes():  # blocks that a CPU without units for bf16 converts are not counted
            return self.multiply(left, right, out, workspace)

    def _add_product(self, total: Tensor, weights: Tensor, centres: Tensor, workspace: Workspace) -> None:
        self.bytes += _bytes((weights, centres))
        with _disable_current_modes():
            self.add_product(total, weights, centres, workspace)

    def _exponentials(self, tile: Tile, *others: Any) -> None:
        self.bytes += 2 * tile.products.nbytes + tile.inverse_norms.nbytes
        with _disable_current_modes():
            self.exponentials(tile, *others)

    def _weights(self, tile: Tile, *others: Any) -> None:
        self.bytes += 2 * tile.products.nbytes + tile.inverse_norms.nbytes
        with _disable_current_modes():
            self.weights(tile, *others)

    def _maxima(self, tile: Tile, *others: Any) -> None:
        self.bytes += tile.products.nbytes + tile.inverse_norms.nbytes
        with _disable_current_modes():
            self.maxima(tile, *others)

    def _update_rows(self, optimizer: Any, store: Any, gradient: CentreGradient, *others: Any) -> None:
        state = sum(tensor[gradient.select].nbytes for tensor in (*store.tensors.values(), store.inverse_norms))
        self.bytes += gradient.negatives.nbytes + 2 * state
        with _disable_current_modes():
            self.update_rows(optimizer, store, gradient, *others)


def _count(num_classes: int, config: HeadConfig, loss: str = "cosface") -> tuple[int, dict[str, Any]]:
    """Return the bytes of the second step, and what the benchmark says about it."""
    head = PartialFC(build_margin(loss), num_classes, D, config=config)
    for step in range(2):
        head.begin_step(torch.arange(BATCH)[None], step)
        counter = _Counter(head) if step else None
        embeddings = torch.randn(BATCH, D)
        if counter is None:
            head(embeddings)
            head.step(0.1)
        else:
            with counter:
                head(embeddings)
                head.step(0.1)
    assert counter is not None
    return counter.bytes, moved(head, BATCH)


@pytest.mark.skipif(choose_kernels("auto", torch.device("cpu"), D) == "plain", reason="no C compiler, so no C kernels")
@pytest.mark.parametrize("optimizer", [RowSGD(), RowAdamW()])
@pytest.mark.parametrize("cache_mb", [-1, 0])
@pytest.mark.parametrize(("storage", "dtype"), [*((form, torch.bfloat16) for form in FORMATS), ("exact", torch.float32)])
def test_what_the_benchmark_says_is_moved_is_what_the_operations_of_a_step_are_given(
    storage: str, dtype: torch.dtype, cache_mb: int, optimizer: RowSGD | RowAdamW
):
    config = HeadConfig(storage=storage, matmul_dtype=dtype, cache_mb=cache_mb, optimizer=optimizer, chunk=MANY)
    (few, _), (many, said) = (_count(num_classes, config) for num_classes in (FEW, MANY))
    assert (many - few) / (MANY - FEW) == said["total"]
    assert said["total"] == sum(read + written for read, written in said["parts"].values())
    assert ("exponentials again" in said["parts"]) == (cache_mb == 0)
    assert said["floor"] == floor_per_class(config, BATCH, D) < said["total"]


@pytest.mark.skipif(choose_kernels("auto", torch.device("cpu"), D) == "plain", reason="no C compiler, so no C kernels")
@pytest.mark.parametrize(("loss", "maxima"), [("circle", True), ("curricularface", True), ("sphereface2", False)])
@pytest.mark.parametrize("cache_mb", [-1, 0])
def test_other_losses_move_weights_and_where_they_must_maxima(loss: str, maxima: bool, cache_mb: int):
    config = HeadConfig(cache_mb=cache_mb, chunk=MANY)
    (few, _), (many, said) = (_count(num_classes, config, loss) for num_classes in (FEW, MANY))
    assert (many - few) / (MANY - FEW) == said["total"]
    assert ("maxima" in said["parts"]) == maxima


def test_the_floor_is_that_of_the_formats():
    bytes_of_lean = 512 * 2 + 4 + 2 * (512 * 4 + 4) + 2 * 512 * 2  # centres; centres, momentum and norm twice; exponentials
    assert floor_per_class(HeadConfig(storage="lean", matmul_dtype=torch.bfloat16), 512, 512) == bytes_of_lean


def test_the_page_has_the_bytes_that_the_program_prints():
    text = (Path(__file__).parents[1] / "docs" / "head.md").read_text()
    for storage, matmul in [("exact", "fp32"), ("exact", "bf16"), ("lean", "bf16"), ("tiny", "bf16")]:
        dtype = torch.float32 if matmul == "fp32" else torch.bfloat16
        config = HeadConfig(storage=storage, matmul_dtype=dtype)
        total = sum(read + written for read, written in parts_per_class(config, 512, 512, 1.0).values())
        assert f"| `{storage}`, {matmul} products | {total:,.0f} | {floor_per_class(config, 512, 512):,.0f} |" in text


def test_plain_torch_is_not_counted():
    assert _count(FEW, HeadConfig(kernels="plain"))[1] == {}
