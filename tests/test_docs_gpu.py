"""The page on GPUs names the process groups that a training really has, and training/__init__.py its threads."""

import functools
import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tiny_runs import ROOT, ended_well, run_program, small_run

import train
import training

PAGE = (ROOT / "docs" / "gpu.md").read_text()
GATHER = ("all_gather_single", "all_gather_into_tensor")  # torch 2.13 renamed them
SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")
THREADING = threading.Thread.__module__


def _table(first_column: str) -> list[list[str]]:
    """Return the cells of the table whose first column is called this, row by row."""
    lines = PAGE[PAGE.index(f"| {first_column} |") :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _kind(thread: threading.Thread) -> str:
    """Return the name of a thread without its number; for a class of a library, the library."""
    module = type(thread).__module__
    return re.sub(r"_\d+$", "", thread.name) if module == THREADING else module.partition(".")[0]


def _caller() -> str:
    """Return the file of this project that asked for a process group."""
    frame: Any = sys._getframe(2)
    while True:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path != ROOT / "utils" / "distributed" / "__init__.py" and path != Path(__file__):
            return path.relative_to(ROOT).as_posix()
        frame = frame.f_back


def _train_and_note(arguments: list[str]) -> int:
    """Train as under torchrun, and write down which threads were started, who made process groups, and who communicated."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    threads: set[str] = set()
    groups: list[str] = []
    calls: list[dict[str, list[str]]] = [{}]  # of each step, by thread
    start, init, new, step = threading.Thread.start, dist.init_process_group, dist.new_group, train.train_step

    def noted_start(thread: threading.Thread) -> None:
        threads.add(_kind(thread))
        start(thread)

    def noted_init(*given: Any, **named: Any) -> None:
        groups.append(_caller())
        init(*given, **named)

    def noted_new(*given: Any, **named: Any) -> Any:
        groups.append(_caller())
        return new(*given, **named)

    def noted_call(name: str, whole: Any, *given: Any, **named: Any) -> Any:
        own = " of its own group" if named.get("group") is not None else ""
        calls[-1].setdefault(_kind(threading.current_thread()), []).append(name + own)
        return whole(*given, **named)

    def noted_step(*given: Any) -> Any:
        calls.append({})
        return step(*given)

    for name in ("all_reduce", "all_gather_object", "broadcast", *GATHER, *SCATTER):
        if (whole := getattr(dist, name, None)) is not None:
            setattr(dist, name, functools.partial(noted_call, name, whole))
    train.train_step = noted_step
    threading.Thread.start = noted_start  # type: ignore[method-assign]
    dist.init_process_group, dist.new_group = noted_init, noted_new
    status = train.main(arguments)
    found = {"threads": sorted(threads), "groups": groups, "calls": calls[1:]}
    (Path(arguments[0]).parent / f"found {os.environ['RANK']}.json").write_text(json.dumps(found))
    return status


def test_the_page_names_the_threads_and_process_groups_of_a_training(dataset: Path, tmp_path: Path):
    # block order, in which there is reading ahead
    overrides = ["data.shuffle=block", "data.block=2", "data.window=4", "head.sample_rate=0.5", "checkpoint.every=9"]
    arguments = small_run(dataset, tmp_path, *overrides)
    ended_well(run_program(_train_and_note, [arguments] * 2))
    found = [json.loads((tmp_path / f"found {rank}.json").read_text()) for rank in range(2)]
    groups = [row[1].strip("`") for row in _table("process group")]
    assert found[0]["groups"] == found[1]["groups"] and sorted(found[0]["groups"]) == sorted(groups)
    for done, calls in enumerate(found[0]["calls"], 1):
        gather, one_sum, scatter, *others = calls.pop("MainThread")
        assert gather in GATHER and one_sum == "all_reduce" and scatter in SCATTER  # of the head; DDP's are torch's own
        assert bool(others) == (done in (8, 9)) or done > 9  # evaluating and saving, which goes on
        assert {name for names in calls.values() for name in names} <= {f"{name} of its own group" for name in GATHER}
        assert calls.keys() <= {"planner"}
    named = dict(re.findall(r"^    (\S.*?)  +(.*)$", training.__doc__ or "", re.M))
    assert next(iter(named)) == "main thread" and len(named) > 10
    seen = set(found[0]["threads"]) | set(found[1]["threads"])
    assert seen <= named.keys(), f"training/__init__.py does not name {sorted(seen - named.keys())}"
    for name in named.keys() - seen - {"main thread"}:
        assert re.search(r"only (on CUDA|at an error)|progress bars", named[name]), f"a training has no thread {name!r}"
    paths = re.findall(r"([\w/]+\.py)\b", PAGE + (training.__doc__ or ""))
    assert paths and not [path for path in paths if not (ROOT / path).is_file()]
