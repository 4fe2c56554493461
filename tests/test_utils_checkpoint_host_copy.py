"""The copy of a state in host memory, and how it is pinned: with a CUDA runtime that notes what it is asked for."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import as_files

from utils import allocator
from utils.checkpoint import reading
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.writer import CheckpointWriter, HostCopy, RetentionPolicy, host_bytes
from utils.distributed import LostPeerError, World

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


class _Runtime:
    """What torch.cuda.cudart() returns."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.calls, self.cleared = error, [], 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802, CUDA's name
        self.calls.append(("register", address, size, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    fake = _Runtime()

    def clear(device: torch.device) -> None:
        fake.cleared += 1

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(allocator, "_clear_last_error", clear)
    return fake


def _state() -> dict[str, Any]:
    """Return a state of odd sizes, types and layouts, whose tensors are not in order of size."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 5, 3, 3, generator=generator).to(memory_format=torch.channels_last)
    return {
        "centres": torch.randn(1001, 33, generator=generator).to(torch.bfloat16),
        "momentum": torch.randint(-127, 128, (1001, 33), dtype=torch.int8, generator=generator),
        "empty": torch.zeros(0, 33),
        "scale": torch.tensor(2.5, dtype=torch.float64),
        "moments": [{"weight": weight, "step": 3}, (torch.tensor([True, False]), "text")],
    }


def _begin(state: dict[str, Any]) -> int:
    """Return the lowest address of a copy; an empty tensor has none."""
    return min(tensor.data_ptr() for tensor in _tensors(state) if tensor.numel())


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    (moments, (flags, _)) = state["moments"]
    return [*(state[name] for name in ("centres", "momentum", "empty", "scale")), moments["weight"], flags]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_copy_has_all_numbers_and_layouts_and_is_one_of_its_own(runtime: _Runtime, device: torch.device):
    state, memory = _state(), HostCopy(device, warn=pytest.fail)
    first = memory.take(state)
    assert first["moments"][0]["step"] == 3 and first["moments"][1][1] == "text"
    for copy, tensor in zip(_tensors(first), _tensors(state), strict=True):
        assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype and copy.stride() == tensor.stride()
        assert copy.untyped_storage().nbytes() <= max(tensor.nbytes, 8)  # torch.save writes whole storages
    for tensor in _tensors(state):
        tensor.fill_(1)
    assert not torch.equal(first["centres"], state["centres"])
    places = [copy.data_ptr() for copy in _tensors(first)]
    again = memory.take(state)  # into the same memory
    assert [copy.data_ptr() for copy in _tensors(again)] == places
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(_tensors(again), _tensors(state), strict=True))
    assert bool(runtime.calls) == (device == CUDA)


def test_exactly_the_bytes_are_pinned_and_given_back(runtime: _Runtime):
    state, memory = _state(), HostCopy(CUDA, warn=pytest.fail)
    copy = memory.take(state)
    begin = _begin(copy)
    assert runtime.calls == [("register", begin, host_bytes(state), 0)]
    assert begin % mmap.PAGESIZE == 0
    exact = sum(tensor.nbytes for tensor in _tensors(state))
    assert exact <= host_bytes(state) <= exact + 64 * len(_tensors(state))
    for tensor in filter(torch.numel, _tensors(copy)):
        assert begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= begin + host_bytes(state)
    memory.take(state)
    assert len(runtime.calls) == 1
    larger = {**state, "variance": torch.zeros(7)}  # an optimizer has its moments after the first step only
    moved = memory.take(larger)
    now = _begin(moved)
    assert runtime.calls[1:] == [("unregister", begin), ("register", now, host_bytes(larger), 0)]
    memory.release()
    memory.release()
    assert runtime.calls[3:] == [("unregister", now)]
    assert not memory.has_memory()


def _run_with_a_save(run: Path, warnings: list[str]) -> dict[str, torch.Tensor]:
    """Save as a run on CUDA does; return the centres that were read back."""
    rows = {"centres": torch.arange(6000.0).view(2, 3000), "momentum": torch.ones(2, 3000)}
    trainer = {"optimizer": {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": []}}
    with CheckpointWriter(run, World(0, 1, 0, 1, CUDA), RetentionPolicy(), warn=warnings.append) as writer:
        for step in (1, 2):
            writer.save(step, **as_files({"w": torch.ones(3)}, rows, (0, 2), trainer, {"score": None}))
    newest = list_checkpoints(run)[-1]
    assert reading.check_hashes(newest) == []
    found = reading.shard_reader(newest)(0, 2)
    assert all(torch.equal(found[name], rows[name]) for name in rows)
    return found


def test_a_writer_pins_once_and_unpins_at_its_end(runtime: _Runtime, tmp_path: Path):
    warnings: list[str] = []
    _run_with_a_save(tmp_path, warnings)
    assert [call[0] for call in runtime.calls] == ["register", "unregister"] and not warnings
    assert runtime.calls[0][2] >= 2 * 6000 * 4


def test_memory_stays_pinned_where_another_process_is_gone_for_which_a_kernel_may_wait(runtime: _Runtime, tmp_path: Path):
    world = World(0, 2, 0, 2, CUDA)
    with pytest.raises(LostPeerError), CheckpointWriter(tmp_path, world, RetentionPolicy(), warn=pytest.fail) as writer:
        writer._host_copy.take(_state())
        raise LostPeerError("rank 1 is gone")
    assert [call[0] for call in runtime.calls] == ["register"]


def test_memory_that_cannot_be_pinned_is_used_all_the_same_with_one_warning(runtime: _Runtime, tmp_path: Path):
    warnings: list[str] = []
    runtime.error = 2  # cudaErrorMemoryAllocation
    _run_with_a_save(tmp_path, warnings)
    assert [call[0] for call in runtime.calls] == ["register"] and runtime.cleared == 1
    (line,) = warnings
    assert "GiB of host memory cannot be pinned (error 2 of cudaHostRegister)" in line and "training waits longer" in line
