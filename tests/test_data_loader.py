import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from tiny_runs import ROOT, Started, ended_well, equal_weights, run_train, small_run, wait_for

import train
from configs import load_config
from data.augment import prepare
from data.loader import Loader
from data.sampler import SampleOrder
from training.sections import NAMED
from training.setup import open_loaders, set_up
from utils.checkpoint.format import list_checkpoints
from utils.program import REQUEUE

CPU = torch.device("cpu")


class Numbered:
    """Image i is all i % 256, its label i; `broken` images raise."""

    landmarks = None

    def __init__(self, broken: int = -1, slow: float = 0.0) -> None:
        self.broken, self.slow = broken, slow
        self.prefetched: list[int] = []  # announced, when their batch is begun
        self.decoded = 0

    def prefetch(self, index: int) -> None:
        self.prefetched.append(index)

    def read_ahead(self, indices: np.ndarray) -> None:
        self.prefetched += indices.tolist()

    def decode_into(self, index: int, out: np.ndarray) -> int:
        if index == self.broken:
            raise ValueError(f"record {index} of numbered.rec: cannot be decoded")
        time.sleep(self.slow)
        out[...] = index % 256
        self.decoded += 1
        return index

    def take_warnings(self) -> list[str]:
        return []

    def hear(self, warnings: object) -> None:
        assert warnings == []

    def settle(self) -> None:
        """Wait until every image that was begun is decoded; for one decoder thread."""
        wait_for(lambda: self.decoded >= len(self.prefetched), 30)


def _children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def _loader(
    dataset: Numbered, threads: int, first: int = 0, last: int = 6, prefetch: int = 3, apart: bool = False, held: int = 1
) -> Loader:
    order = SampleOrder(100, batch_size=7, seed=4, flip=True)
    return Loader(dataset, order.samples, first, last, threads, prefetch, CPU, apart=apart, held=held)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("held", "prefetch"), [(1, 1), (1, 3), (2, 1), (2, 3), (3, 2)])
def test_a_batch_stays_as_it_is_while_so_many_are_held(held: int, prefetch: int, apart: bool):
    dataset, order = Numbered(), SampleOrder(100, batch_size=7, seed=4, flip=True)
    in_use = []
    for step, batch in enumerate(_loader(dataset, 1, 0, 9, prefetch, apart, held)):
        time.sleep(0.05) if apart else dataset.settle()  # everything that was begun is written
        assert apart or held > 1 or dataset.decoded == 7 * min(step + prefetch, 9)  # so many batches ahead
        in_use = [*in_use[-(held - 1) :], (step, batch)] if held > 1 else [(step, batch)]
        for number, kept in in_use:
            expected = torch.from_numpy(order.samples(number).indices % 256)
            assert (kept.images == expected[:, None, None, None]).all(), (step, number)
    assert len(in_use) == held


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5, 9])
def test_batches_are_those_of_the_order_for_any_number_of_threads(threads: int, apart: bool):
    order, steps = SampleOrder(100, batch_size=7, seed=4, flip=True), 0
    for step, batch in enumerate(_loader(Numbered(slow=0.0005), threads, first=2, last=8, apart=apart), 2):
        expected = order.samples(step)
        assert batch.labels.tolist() == expected.indices.tolist()
        assert batch.mirrored.tolist() == expected.mirrored.tolist()
        assert (batch.images == torch.from_numpy(expected.indices % 256)[:, None, None, None]).all()
        steps += 1
    assert steps == 6


def test_every_record_is_announced_to_the_storage_before_it_is_decoded():
    dataset = Numbered()
    announced = [set(batch.labels.tolist()) <= set(dataset.prefetched) for batch in _loader(dataset, 2)]
    assert announced == [True] * 6
    assert len(dataset.prefetched) == 6 * 7


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_broken_record_ends_the_loop_with_its_key_and_leaves_no_thread(threads: int, apart: bool):
    broken = int(SampleOrder(100, 7, seed=4, flip=True).samples(3).indices[5])
    seen, before = 0, _children(os.getpid())
    with pytest.raises(ValueError, match=f"record {broken} of numbered.rec"):
        for _ in _loader(Numbered(broken), threads, apart=apart):
            seen += 1
    assert seen == 3 and _children(os.getpid()) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("decoder", "reader"))]


def test_a_broken_read_ahead_ends_the_loop():
    numbered, order = Numbered(slow=0.001), SampleOrder(100, batch_size=7, seed=4, flip=True)
    numbered.read_ahead = mock.Mock(side_effect=ValueError("the disk is gone"))  # type: ignore[method-assign]
    loader = Loader(numbered, order.samples, 0, 50, 2, 2, CPU, lambda step: np.arange(3))
    with pytest.raises(ValueError, match="the disk is gone"):
        list(loader)


@pytest.mark.numeric
def test_prepare_mirrors_and_normalises_to_the_published_contract():
    images = torch.randint(0, 256, (3, 112, 112, 3), dtype=torch.uint8)
    prepared = prepare(images, torch.tensor([False, True, False]))
    assert prepared.shape == (3, 3, 112, 112)
    assert prepared.is_contiguous(memory_format=torch.channels_last)
    for row, column, channel in [(0, 0, 0), (5, 100, 2), (111, 111, 1)]:
        for image, source_column in [(0, column), (1, 111 - column)]:
            expected = (int(images[image, row, source_column, channel]) - 127.5) / 127.5
            # two roundings of up to 1
            assert prepared[image, channel, row, column].item() == pytest.approx(expected, abs=2**-23)


_LONG = ["train.epochs=400", "data.prefetch=1", "eval.targets=[]", "checkpoint.every=0", "data.decoders=process"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_training_whose_fork_decodes_has_the_bits_of_one_whose_threads_do(dataset: Path, tmp_path: Path, num_processes: int):
    for decoders in ("threads", "process"):
        overrides = ["train.max_steps=9", f"data.decoders={decoders}", "augment.crop=0.5", "eval.targets=[]"]
        ended_well(run_train(num_processes, small_run(dataset, tmp_path, *overrides, f"run.name={decoders}")))
    equal_weights(tmp_path / "threads", tmp_path / "process")


def _started(dataset: Path, tmp_path: Path, name: str) -> tuple[Started, int]:
    """Start a run as torchrun does; return it, and the process that decodes, after the third step."""
    metrics, said = tmp_path / name / "metrics.jsonl", tmp_path / f"said_{name}"
    said.mkdir()
    words = small_run(dataset, tmp_path, *_LONG, f"run.name={name}")
    run = Started(train.main, [words], said, {**os.environ, "TORCHELASTIC_RUN_ID": "1"})
    run.wait_until(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) >= 3, 60)
    (decoder,) = _children(run.processes[0].pid)
    return run, decoder


def test_a_killed_decoder_is_an_error_in_seconds(dataset: Path, tmp_path: Path):
    run, decoder = _started(dataset, tmp_path, "tiny")
    os.kill(decoder, signal.SIGKILL)
    begun = time.monotonic()
    done = run.wait(30)
    assert done.returncode == 1 and time.monotonic() - begun < 15  # not 78, after which nothing is started again
    assert "error: data.decoders=process: the process that decodes images is gone, perhaps killed" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_fork_ends_with_its_training_and_not_by_a_signal_to_all_processes(dataset: Path, tmp_path: Path):
    run, decoder = _started(dataset, tmp_path, "tiny")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # a save may need further batches
        os.kill(decoder, number)
    before = len((tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines())
    run.wait_until(lambda: len((tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()) > before + 9)
    for pid in (decoder, run.processes[0].pid):  # as the signal of a shell to all of them
        os.kill(pid, signal.SIGTERM)
    done = run.wait(60)
    assert done.returncode == REQUEUE, done.stderr
    assert len(list_checkpoints(tmp_path / "tiny")) == 1
    run, other = _started(dataset, tmp_path, "killed")
    run.send(signal.SIGKILL, 0)
    run.wait(30)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (decoder, other)), 10)


_ENDS = """
import os, signal, sys, torch
from data.datasets import SyntheticDataset
from data.loader import Loader
from data.sampler import SampleOrder
from utils.program import StopSignal
order = SampleOrder(100, batch_size=7, seed=4, flip=True)
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # as asyncio does, from Python 3.12 on
with StopSignal():
    batches = iter(Loader(SyntheticDataset(5, 100, 0), order.samples, 0, 9, 1, 3, torch.device("cpu"), apart=True))
    next(batches)
    sys.exit(5)
"""


def test_no_program_waits_at_its_end_for_the_fork():
    assert subprocess.run([sys.executable, "-c", _ENDS], cwd=ROOT, timeout=60).returncode == 5


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError(threading.Lock()), MemoryError()])
def test_any_error_of_the_fork_is_one_here(error: BaseException, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Numbered, "decode_into", mock.Mock(side_effect=error))
    with pytest.raises(type(error)):
        next(iter(_loader(Numbered(), 2, apart=True)))


def test_other_systems_are_told_to_let_threads_decode(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = small_run(dataset, tmp_path, "data.decoders=process")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"data.decoders=process needs Linux.*; set data.decoders=threads"):
        load_config(arguments[0], arguments[1:])


def test_a_fork_decodes_where_a_gpu_trains(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "run.device=cpu")
    config = load_config(arguments[0], arguments[1:], NAMED)
    setup = set_up(config)
    found = []
    for place in ("cpu", "cuda"):
        there = setup._replace(world=setup.world._replace(device=torch.device(place)))
        found.append([loader.apart for loader in open_loaders(config, there, 0)])
    assert found == [[False], [sys.platform.startswith("linux")]]
