"""Fixtures shared by all tests: several gloo processes, and the optional folder of oracle files."""

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# test processes are forked from a server that has imported what a training needs, also what we import late: 5 s of a processor
# for each of them otherwise
_IMPORTED = (
    "train",
    "pytest",  # which the files of tests import
    "torch.utils.tensorboard",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tests.frozen",  # after all others
)
mp.get_context("forkserver").set_forkserver_preload(list(_IMPORTED))
_THREADS = torch.get_num_threads()
_LONG = ("test_training_compiled", "test_partial_fc_kernels_cuda", "test_docs_data", "test_utils_allocator")  # a minute each
# of pictures: matplotlib would draw 700 of them in the others, most of an evaluation
_DRAWN = (
    "analysis_all_pairs analysis_groups analysis_robustness eval_evaluate scripts_analysis_clean scripts_analysis_quality "
    "scripts_benchmark_backbones scripts_benchmark_head scripts_benchmark_losses_curves scripts_data_inspect "
    "scripts_eval_compare_runs utils_report_contact_sheet utils_text"
)
# a shell that runs the tests in the background has SIGINT ignored, and so would all programs that the tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)


def sees_gpu(marks: str) -> bool:
    """Return whether tests chosen by `-m marks` may use a GPU: those marked gpu. All others mean the CPU."""
    return "gpu" in marks.split() and "not gpu" not in marks


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs of this machine from tests that mean the CPU, before anything looks for them."""
    if not sees_gpu(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before any file of tests imports Triton, whose own library is decorated then


def pytest_collection(session: pytest.Session) -> None:
    """Let each process of xdist import a part of the tests first: it finds the other parts rewritten by the others."""
    worker, count = (os.environ.get(f"PYTEST_XDIST_WORKER{name}", "") for name in ("", "_COUNT"))
    if worker:
        gc.disable()  # until all are collected
    if worker and session.config.args == session.config.getini("testpaths"):
        for path in sorted(Path(__file__).parent.glob("test_*.py"))[int(worker[2:]) :: int(count)]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # the collection itself says so
                importlib.import_module(path.stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in _LONG)  # the last would have all cores to itself
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and pytest -m gpu"))


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection walks through all modules and tests again
    gc.set_threshold(10_000)
    gc.enable()


def pytest_runtest_teardown() -> None:
    torch.set_num_threads(_THREADS)  # a program that ran in this process may have taken all cores, which others use


@pytest.fixture(scope="session", autouse=True)
def _forkserver() -> None:
    """Start the server before any test changes the environment, which its forks inherit, in the folder that it imports from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent.parent)
        forkserver.ensure_running()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of a test whose body is the same on both: CI runs it on the CPU, `pytest -m gpu` on a GPU."""
    return torch.device(request.param)


@pytest.fixture(scope="module", autouse=True)
def _substitutes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give each file what it does not test: tiny networks where it trains or embeds, blank pictures if it is not in _DRAWN."""
    names = {getattr(value, "__module__", "") for value in vars(request.module).values()}
    used = names & {"tiny_runs", "gallery_runs"} or "SHALLOW" in vars(request.module)
    tiny_runs, drawn = importlib.import_module("tiny_runs"), request.path.stem.removeprefix("test_") in _DRAWN.split()
    with (
        mock.patch.dict("backbones.BACKBONES", tiny_runs.SHALLOW if used else {}),
        mock.patch.object(tiny_runs, "DRAWN", drawn),
        contextlib.nullcontext() if drawn else tiny_runs.blank_pictures(),
    ):
        yield


@pytest.fixture(scope="session")
def onnx_operators() -> Iterator[None]:
    """Let the exporter of torch list the operators of ONNX once: half a second for every file otherwise."""
    registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    with mock.patch.object(registry, "from_torchlib", staticmethod(functools.cache(registry.from_torchlib))):
        yield


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    """Let Triton's interpreter prepare its language once for a kernel, not again for each function that the kernel calls."""
    with contextlib.suppress(ImportError):
        interpreter = importlib.import_module("triton.runtime.interpreter")
        language, prepare = interpreter.tl, interpreter._patch_lang

        def prepare_once(function: Callable[..., Any]) -> Any:
            used = [value for value in function.__globals__.values() if value is language or value is language.core]
            is_ready = not any(language.core.is_builtin(module.load) for module in used)
            return interpreter._LangPatchScope() if is_ready else prepare(function)

        interpreter._patch_lang = prepare_once


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a RecordIO set of few images and a verification set of other classes, `tiny`."""
    tiny_runs = importlib.import_module("tiny_runs")  # imports torch and Triton, which must see the environment of above
    folder = tmp_path_factory.mktemp("data")
    tiny_runs.write_dataset(folder, tiny_runs.FEW_IMAGES)
    return folder


@pytest.fixture
def names_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for timm where a recipe is read and no network is built."""
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(list_models=lambda: ["vit_small_patch14_dinov2"]))


@pytest.fixture
def blank() -> Iterator[None]:
    """Leave the pictures of a test blank where others of its file look at theirs."""
    with importlib.import_module("tiny_runs").blank_pictures():
        yield


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures of matplotlib that are saved; they are still written."""
    found: list[Any] = []
    kind = importlib.import_module("matplotlib.figure").Figure
    save = kind.savefig
    monkeypatch.setattr(kind, "savefig", lambda figure, *given, **named: found.append(figure) or save(figure, *given, **named))
    return found


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """Return one case of so many, from the first on; all with FACE_THOROUGH=1. CI has twenty minutes for everything."""
    return list(cases)[:: 1 if os.environ.get("FACE_THOROUGH") else every]


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., None]:
    """Return run(fn, world_size, *args): call fn(rank, world_size, *args) in gloo processes; one rank runs in process."""

    def run(fn: Callable[..., None], world_size: int, *args: Any) -> None:
        if world_size == 1:
            fn(0, 1, *args)
            return
        if os.environ.get("FACE_ONE_PROCESS"):
            pytest.skip("FACE_ONE_PROCESS: several processes run the same arithmetic, and ran in the suite itself")
        rendezvous = tmp_path / "rendezvous"
        for last in (False, True):
            rendezvous.unlink(missing_ok=True)
            try:
                mp.start_processes(
                    _rank_main, (world_size, str(rendezvous), fn, args), nprocs=world_size, start_method="forkserver"
                )
                return
            except mp.ProcessExitedException as error:
                # killed from outside, by a machine short of memory for example: no rank kills another. A crash of our own fails
                if last or error.signal_name not in ("SIGKILL", "SIGTERM"):
                    raise
                warnings.warn(f"a rank was killed from outside ({error.signal_name}); once more", stacklevel=2)

    return run


def _rank_main(rank: int, world_size: int, rendezvous: str, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    faulthandler.enable()  # a process that dies of a signal says where it was
    torch.set_num_threads(1)
    importlib.import_module("utils.optim").leave_compiler_out()  # a second of a processor, in each process
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    try:
        fn(rank, world_size, *args)
    finally:  # a rank that failed must leave the group, or the others would wait for it
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def face_oracle() -> Path:
    """Return the folder named by FACE_ORACLE, which holds `oracle` (files made by real mxnet) and `london` (photographs)."""
    folder = os.environ.get("FACE_ORACLE", "")
    if not folder:
        pytest.skip("set FACE_ORACLE to the folder with oracle/ and london/ for this additional check")
    return Path(folder)
