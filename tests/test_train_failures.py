"""Failures that must not hang, nor cost more than what was trained since the last checkpoint."""

import contextlib
import functools
import io
import json
import math
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from saving import no_space, save_now
from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem
from tiny_runs import error_of, read_metrics, run_program, run_train, small_run

import train
from data.record_dataset import RecordDataset
from eval import monitor
from training import model, step
from utils.checkpoint.format import list_checkpoints, step_of
from utils.checkpoint.tensor_file import read_tensors
from utils.checkpoint.writer import CheckpointWriter, RetentionPolicy, Shard
from utils.distributed import SharedError, World
from utils.optim import unscale_and_clip_grad_norm_
from utils.precision import LossScaler


def test_a_loss_that_is_not_finite_stops_and_names_the_step(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The weights are finite after step 0, though far too large: what they give in step 1 is not."""
    overrides = ["optimizer.lr=1e30", "optimizer.clip_norm=0", "checkpoint.every=1", "eval.targets=[]"]
    error = error_of(train.main(small_run(dataset, tmp_path, *overrides)), capsys)
    assert re.match(r"error: the loss is (nan|inf) in step 1; stopped before it reached the weights\.", error), error
    (saved,) = list_checkpoints(tmp_path / "tiny")
    assert step_of(saved) == 1
    assert all(tensor.isfinite().all() for tensor in read_tensors(saved / "backbone.safetensors").values())


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ("optimizer.clip_norm=0 optimizer.lr=1e30 optimizer.weight_decay=1e10 head.lr_factor=0", "backbone.safetensors: "),
        ("optimizer.lr=1e20 head.lr_factor=1e25", "softmax_00000_of_00001.safetensors: centres"),
        ("optimizer.lr=1e20 head.lr_factor=1e25 head.storage=tiny", "softmax_00000_of_00001.safetensors: "),
    ],
)
def test_numbers_that_are_not_finite_are_never_saved_and_stop_the_run(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: str, where: str
):
    arguments = small_run(dataset, tmp_path, "eval.targets=[]", "checkpoint.every=1", "checkpoint.max_failed_saves=9")
    arguments.append("checkpoint.background=false")  # or the loss of the next step may be the first to tell
    assert train.main([*arguments, "train.max_steps=1"]) == 0
    said = error_of(train.main([*arguments, *overrides.split(), "train.max_steps=8"]), capsys)
    assert "step_00000002 could not be saved" in said and "max_failed" not in said, said
    assert where in said and "not finite" in said and "the ones before are untouched" in said and "optimizer.lr" in said
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")] == [1]
    assert train.main([*arguments, "train.max_steps=3"]) == 0  # and that one can be resumed


def test_one_rank_whose_centres_are_not_finite_stops_all_ranks_with_its_name(tmp_path: Path, run_ranks: Callable[..., None]):
    run_ranks(_save_centres_of_rank_1, 2, tmp_path)


def _save_centres_of_rank_1(rank: int, world_size: int, folder: Path) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        centres = torch.full((5, 4), 3e38, dtype=dtype)  # their sum overflows, but each is finite
        files = {"softmax": Shard({"centres": centres}, (5 * rank, 5 * rank + 5))}
        with CheckpointWriter(folder, world, RetentionPolicy(), max_failed=9) as writer:
            writer.save(3, files, {}, last=True)
            if rank == 1:
                centres[4, 3] = -torch.inf
            with pytest.raises(SharedError, match=r"rank 1: softmax_00001_of_00002\.safetensors: centres holds numbers"):
                writer.save(4, files, {}, last=True)
        assert [step_of(path) for path in list_checkpoints(folder)] == [3]
        folder = folder / "bf16"


@pytest.mark.parametrize(
    "trainer", [{"state": {3: {"exp_avg": torch.tensor([1.0, torch.nan])}}}, {"groups": [{"lr": math.inf}]}]
)
def test_moments_and_rates_that_are_not_finite_are_never_saved(tmp_path: Path, trainer: dict[str, Any]):
    with pytest.raises(SharedError, match=r"trainer\.pt: (state\.3\.exp_avg|groups\.0\.lr) holds numbers that are not finite"):
        save_now(tmp_path, 1, {}, {"centres": torch.ones(2, 4)}, (0, 2), trainer, {})
    assert list_checkpoints(tmp_path) == []


def test_a_bad_batch_is_written_down_with_the_record_that_spoilt_it(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    whole, calls = step.prepare, 0

    def spoil(images: torch.Tensor, mirrored: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        pixels = whole(images, mirrored)
        if calls == 6:
            pixels[2] = float("nan")
        return pixels

    monkeypatch.setattr(step, "prepare", spoil)
    overrides = ["backbone.freeze_norm=true", "eval.targets=[]", "optimizer.lr=1e-3"]  # so that no row sees another
    said = error_of(train.main(small_run(dataset, tmp_path, *overrides)), capsys)
    assert "the loss is nan in step 5" in said and "1 of its 4 embeddings are not finite" in said
    noted = json.loads((tmp_path / "tiny" / "bad_batch_step_00000005.json").read_text())
    assert noted["step"] == 5 and [entry["embedding_finite"] for entry in noted["samples"]] == [True] * 2 + [False, True]
    record = noted["samples"][2]["record"]
    assert record in said and int(re.search(r"record (\d+)", record).group(1)) % 12 == noted["samples"][2]["label"]
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")] == [4]


def test_a_log_on_a_full_disk_does_not_end_the_run(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", no_space)
    monkeypatch.setattr(monitor, "write_summary", no_space)
    monkeypatch.setattr("utils.log.open_own", lambda path, flags: os.open("/dev/full", flags))
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=5")) == 0
    said = capsys.readouterr()
    for what in ("train.log", "metrics.jsonl", "TensorBoard", "the figures"):
        assert len([line for line in said.err.splitlines() if what in line and "cannot be written" in line]) == 1, said.err
    assert "step 5/5" in said.out
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")] == [4, 5]


def _train_on_a_full_board(arguments: list[str]) -> int:
    LocalFileSystem.append = no_space
    return train.main(arguments)


def test_a_full_disk_under_tensorboard_is_one_warning_and_no_traceback_of_its_thread(dataset: Path, tmp_path: Path):
    done = run_program(_train_on_a_full_board, [small_run(dataset, tmp_path, "train.max_steps=5", "log.every=1")])
    assert done.returncode == 0
    assert "Traceback" not in done.stderr and "Exception in thread" not in done.stderr, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("WARNING: TensorBoard, until the next start, cannot be written ("), line


def _train_on_a_full_disk(arguments: list[str]) -> int:
    """Train where no byte can be written to any file, and say afterwards what it said."""
    most, out, err = resource.getrlimit(resource.RLIMIT_FSIZE)[1], io.StringIO(), io.StringIO()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = train.main(arguments)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    sys.stdout.write(out.getvalue())
    sys.stderr.write(err.getvalue())
    return status


def test_a_start_and_a_resume_on_a_full_disk_are_one_line_and_leave_all_files_as_they_are(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "train.max_steps=2", "eval.targets=[]")
    assert run_train(1, arguments).returncode == 0
    run = tmp_path / "tiny"

    def files() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name[0] != "."}

    before = files()
    for more in (["train.max_steps=4"], ["train.max_steps=4", "run.name=new"]):
        done = run_program(_train_on_a_full_disk, [[*arguments, *more]])
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("error: run.output: the run folder") and "cannot be written" in done.stderr
        assert " step " not in done.stdout
    assert files() == before
    assert run_train(1, [*arguments, "train.max_steps=4"]).returncode == 0 and step_of(list_checkpoints(run)[-1]) == 4


_ACTS = {
    "hangs": lambda: time.sleep(100),
    "fails": mock.Mock(side_effect=ValueError("a bad day")),
    "no memory": mock.Mock(side_effect=MemoryError("no memory")),
    "no threads": mock.Mock(side_effect=RuntimeError("can't start new thread")),
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def _train_with_a_bad_rank(arguments: list[str]) -> int:
    """Train; rank 1 does the first argument in the decoder when it has seen 20 images (its step 10)."""
    act, *rest = arguments
    whole, images = RecordDataset.decode_into, 0

    def decode(self: RecordDataset, index: int, out: Any) -> Any:
        nonlocal images
        images += 1
        if os.environ["RANK"] == "1" and images > 20:
            _ACTS[act]()
        return whole(self, index, out)

    RecordDataset.decode_into = decode  # type: ignore[method-assign]
    return train.main(rest)


def test_a_rank_that_hangs_ends_the_run_in_time_and_by_name(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "run.timeout_minutes=0.1", "eval.targets=[]", "data.threads=1", "data.prefetch=1")
    done = run_program(_train_with_a_bad_rank, [["hangs", *arguments]] * 2)
    assert done.returncode != 0
    (late,) = {int(step) for step in re.findall(r"error: rank 1 in step (\d+), waiting for data, for 0.1 minutes", done.stderr)}
    assert f"error: rank 0 in step {late}, waiting for the labels of the other processes, for 0.1 minutes" in done.stderr
    assert f"rank 1 was in step {late}, waiting for data" in done.stderr
    assert late >= 8


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("fails", "error: rank 1: a bad day"),
        ("no memory", "error: rank 1: the memory is full;"),
        ("no threads", "error: rank 1: the system starts no further thread: raise the limit"),
        ("dies", "rank 1 was in step"),
    ],
)
def test_a_rank_that_fails_or_dies_ends_others_long_before_a_collective(dataset: Path, tmp_path: Path, act: str, said: str):
    arguments = small_run(dataset, tmp_path, "eval.targets=[]", "data.threads=1", "data.prefetch=1")
    done = run_program(_train_with_a_bad_rank, [[act, *arguments]] * 2)  # within two minutes; a collective would wait for 30
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
    assert re.search(r"error: rank 0 in step \d+, \w+.*: another process ended", done.stderr), done.stderr
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")][-1] in (4, 8)


def _overflow_on_rank_1(rank: int, world_size: int, dataset: str, output: str) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", rank)):
        os.environ[name] = str(value)
    trained, heads, weights, centres = [], [], [], []

    def overflowing(terms: Any, world_size: int, loss_scale: Any, accumulation: int) -> Any:
        factor = float("inf") if rank == 1 and len(weights) == 2 else 1.0  # of its own gradients, in the third step
        return backward(terms, world_size, loss_scale * factor, accumulation)

    def noted(given: Iterable[torch.nn.Parameter], scale: float, *limits: float) -> torch.Tensor:
        trained[:] = given
        weights.append(torch.cat([parameter.detach().reshape(-1) for parameter in trained]))
        centres.append(torch.cat([rows.reshape(-1).clone() for rows in heads[0].shard_state().values()]))  # momentum too
        return unscale_and_clip_grad_norm_(trained, scale, *limits)

    whole, backward = model.PartialFC, step.backward

    def built(*arguments: object) -> torch.nn.Module:
        heads.append(whole(*arguments))
        return heads[0]

    model.PartialFC, step.unscale_and_clip_grad_norm_, step.backward = built, noted, overflowing
    model.LossScaler = functools.partial(LossScaler, initial=4.0)  # far too small to overflow by itself
    overrides = ["train.precision=fp16", "train.max_steps=5", "train.batch_size=6", "eval.targets=[]"]
    (Path(output) / str(rank)).mkdir()
    config, *rest = small_run(Path(dataset), Path(output) / str(rank), *overrides, f"run.output={output}")
    train.train(train.load_config(config, rest, train.NAMED), train.StopSignal())
    for states in (weights, centres):  # before the update of each step: that of the third did not take place, on any rank
        assert [torch.equal(states[step], states[step + 1]) for step in range(4)] == [False, False, True, False]
    ends = torch.cat([parameter.detach().reshape(-1) for parameter in trained])
    both = [torch.empty_like(ends) for _ in range(world_size)]
    torch.distributed.all_gather(both, ends)
    assert torch.equal(both[0], both[-1])
    if rank == 0:
        seen = read_metrics(Path(output) / "tiny").values()
        assert [record["loss_scale"] for record in seen] == [4.0, 4.0, 2.0, 2.0, 2.0]
        assert [record["grad_norm"] is None for record in seen] == [False, False, True, False, False]  # not finite here either


@pytest.mark.parametrize("world_size", [2, 3])  # of three the averages are our own
def test_an_overflow_on_one_rank_moves_no_weight_and_no_centre(
    run_ranks: Callable[..., None], dataset: Path, tmp_path: Path, world_size: int
):
    run_ranks(_overflow_on_rank_1, world_size, str(dataset), str(tmp_path))
