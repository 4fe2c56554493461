"""The blows of the torturer: how each is dealt, and the effect that docs/running.md promises."""

import contextlib
import random
import re
import resource
import signal
import time
from typing import NamedTuple

from .torture_checks import wait_until
from .torture_runs import LIMIT_MINUTES, STEPS, Life, TorturePlace

PHASES = ("start", "step", "save", "evaluation")
# relative frequencies
KINDS = {
    "kill_all": 10, "kill_worker": 10, "kill_workers": 6, "kill_torchrun": 12, "stop_rank": 2, "stop_short": 6, "term": 9,
    "term_worker": 6, "int": 7, "int_twice": 6, "disk_short": 7, "disk_full": 7, "disagree": 8,
}  # fmt: skip
ALONE = ("kill_all", "stop_short", "term", "int", "int_twice", "disk_short", "disk_full")
# seconds until all processes must be gone, on a busy machine. For a stopped rank: its limit, a minute more if another rank
# saves or evaluates, and the half minute after which torchrun kills it
LIMITS = {"stop_rank": 60 * LIMIT_MINUTES + 60.0 + 30.0 + 30.0, "kill_torchrun": 25.0, "disk_full": 120.0, "others": 40.0}
GOES_ON = ("stop_short", "disk_short")
# the setting of one rank -> what the error must name; the other ranks have another value
ODD_KEYS = {
    "optimizer.lr=0.1": "optimizer.lr", "run.seed=7": "run.seed", "optimizer.name=adamw": "optimizer.name",
    "train.precision=bf16": "train.precision", "head.sample_rate=0.75": "head.sample_rate", "head.storage=lean": "head.storage",
    "train.batch_size=24": "train.batch_size", "train.accumulation=2": "train.accumulation", "eval.every=3": "eval.every",
    "log.every=2": "log.every", "data.flip=false": "data.flip", "checkpoint.every=4": "checkpoint.every",
    "data.path": "hash of the labels",
}  # fmt: skip
_NO_LIMIT = resource.RLIM_INFINITY


class Blow(NamedTuple):
    """A blow to a start, drawn before the start."""

    kind: str
    phase: str  # in which to strike
    times: int  # number of new steps or saves to wait for
    part: float  # fraction of a start, or of a short pause, to wait for
    rank: int
    limit: int  # largest size of a file in bytes, to simulate a full disk
    odd: str  # one of ODD_KEYS


def draw(rng: random.Random, processes: int, kinds: list[str]) -> Blow:
    """Draw a blow for a number of processes; always consumes the same random numbers."""
    possible = [kind for kind in kinds if processes > 1 or kind in ALONE] or ["kill_all"]
    kind = rng.choices(possible, [KINDS[name] for name in possible])[0]
    phase = rng.choices(PHASES, [3, 4, 3, 2])[0]
    limits = (rng.randrange(4096), rng.randrange(400_000))
    times, part, rank, odd = rng.randint(1, 6), rng.random(), rng.randrange(processes), rng.choice(list(ODD_KEYS))
    return Blow(kind, "step" if kind == "stop_rank" else phase, times, part, rank, limits[part < 0.7], odd)


def odd_rank(blow: Blow, place: TorturePlace) -> tuple[int, str] | None:
    """Return the rank that gets another setting, and the setting, if the blow is `disagree`."""
    if blow.kind != "disagree":
        return None
    return blow.rank, f"data.path={place.work / 'other_labels'}" if blow.odd == "data.path" else blow.odd


def wait_for(life: Life, blow: Blow, start_seconds: float) -> bool:
    """Wait until the moment of the blow, of a run with so many seconds to its first step; False if it ended before."""
    first = life.last_step()
    seen: set[str] = set()
    end = time.monotonic() + (blow.part * start_seconds if blow.phase == "start" else 120)
    while time.monotonic() < end and not life.status_ended():
        phase = life.phase() if blow.phase != "start" else ""
        if phase == "save":
            seen |= set(life.saves())
        if (
            (blow.phase == "step" and life.last_step() - max(first, 0) >= blow.times and phase == "step")
            or (blow.phase == "save" and phase == "save" and len(seen) > blow.times // 4)
            or (blow.phase == "evaluation" and phase == "evaluation")
        ):
            time.sleep(0.03 * blow.part)
            break
        time.sleep(0.004)
    return not life.status_ended()


def strike(life: Life, blow: Blow) -> None:
    """Deal the blow."""
    workers = life.workers()
    one = workers[blow.rank : blow.rank + 1] or workers[:1]
    if blow.kind == "kill_all":
        everybody = sorted(life.alive(), key=lambda pid: pid != life.pid)  # torchrun first, so that it cannot report the deaths
        life.send(everybody, signal.SIGKILL)
    elif blow.kind == "kill_worker":
        life.send(one, signal.SIGKILL)
    elif blow.kind == "kill_workers":
        life.send(workers, signal.SIGKILL)
    elif blow.kind == "kill_torchrun":
        life.send([life.pid], signal.SIGKILL)
    elif blow.kind in ("stop_rank", "stop_short"):
        life.send(one, signal.SIGSTOP)
        if blow.kind == "stop_short":
            time.sleep(0.1 + 1.4 * blow.part)
            life.send(one, signal.SIGCONT)
    elif blow.kind in ("term", "term_worker"):
        life.send(one if blow.kind == "term_worker" else [life.pid], signal.SIGTERM)
    elif blow.kind in ("int", "int_twice"):
        life.send([life.pid], signal.SIGINT)
        if blow.kind == "int_twice":
            time.sleep(0.3 * blow.part)
            life.send([life.pid], signal.SIGINT)
    elif blow.kind in ("disk_short", "disk_full"):
        limit_files(workers, blow.limit)
        if blow.kind == "disk_short":
            time.sleep(0.2 + 1.5 * blow.part)
            limit_files(life.workers(), _NO_LIMIT)


def limit_files(workers: list[int], size: int) -> None:
    """Limit the size of files that processes may write. This simulates a full disk, and needs no privileges."""
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, _NO_LIMIT))


def await_progress(life: Life, seconds: float = 90.0) -> list[str]:
    """Wait until a paused training run does another step, or ends; return a line if it does neither."""
    first = life.last_step()
    if wait_until(lambda: life.last_step() > first or life.status_ended(), seconds) is None:
        return [f"did not go on within {seconds:.0f} s after step {first}"]
    return []


def await_end(life: Life, blow: Blow) -> tuple[float, list[str]]:
    """Wait until all processes are gone; return the seconds, and a line if some are still alive after the limit."""
    limit = LIMITS.get(blow.kind, LIMITS["others"])
    seconds = wait_until(lambda: not life.alive(), limit)
    if seconds is None:
        left = life.alive()
        return limit, [f"{len(left)} process(es) live {limit:.0f} s after the blow: {left}"] if left else []
    return seconds, []


def judge(life: Life, blow: Blow, phase: str, step_before: int, newest: int) -> list[str]:
    """Return the faults in exit status, messages and checkpoints of a start that got a blow in this phase, after this step."""
    wait_until(lambda: life.status() is not None, 10.0)
    said, status, alone = life.said(), life.status(), life.processes == 1
    over = newest == STEPS
    # if no step was left, it ends like an undisturbed run; torchrun has its own exit status
    finished = over and (status == 0 or f"finished {STEPS} steps" in life.log())
    faults = []
    expected: tuple[int | None, ...] = (1,)
    if blow.kind in ("kill_all", "kill_torchrun"):
        expected = (-9,)
    elif blow.kind == "term":
        expected = (75, 0) if alone else (1, 0)
    elif blow.kind in ("int", "int_twice"):
        expected = (130, 0) if alone else (1, 130, 0)
    elif blow.kind == "disk_full":
        expected = (1, 0)
    if phase == "start" and blow.kind in ("term", "int", "int_twice"):
        expected += (-15, -2)  # before Python has started
    elif blow.kind == "int_twice":
        expected += (-2,)  # it stops at once; torchrun also dies of a second Ctrl-C outside its own handler
    if status not in expected and not finished:
        faults.append(f"exit status {status}, expected {' or '.join(map(str, expected))}")
    if status == 0 and not over:
        faults.append(f"exit status 0, but its newest checkpoint is step {newest} of {STEPS}")
    documented = {0, 1, 75, 78, 130, -2, -9, -15}
    if odd := set(life.statuses()) - documented:
        faults.append(f"workers ended with {sorted(odd)}")
    promises_save = blow.kind in ("term", "term_worker", "int") or (blow.kind == "kill_torchrun" and phase != "start")
    if promises_save and phase != "start" and newest < step_before:
        faults.append(f"was told to stop after step {step_before}, and the newest checkpoint is step {newest}")
    words = {
        "kill_worker": r"error: ",
        "kill_workers": r"error: the process of rank \d was ended by SIGKILL",
        "term": r"stopped by SIGTERM: saved after step \d+",
        "int": r"stopped by SIGINT: saved after step \d+",
        "disk_full": r"error: .*(could not be saved|cannot be written|File too large)",
        "disagree": rf"error: the processes disagree: {re.escape(ODD_KEYS[blow.odd])} is .* on rank {blow.rank}\b",
        "stop_rank": rf"rank {blow.rank} (was in step|was not heard of)",
    }.get(blow.kind, "")
    early = phase == "start" and blow.kind != "disagree"
    if words and not early and not finished and not re.search(words, said):
        faults.append(f"its words do not hold {words!r}: {said[-400:]!r}")
    return faults
