"""Inject faults into real training runs: python -m tests.attack.torture --minutes 10

Starts tiny training runs of one, two and three CPU processes on generated data, through scripts/launch/torchrun.py like a user,
and strikes at random moments of the start, of steps, saves and evaluations: kills, stops, signals, full disks, ranks that
disagree. It restarts each run, on the same or another number of processes, until the run is finished. After every blow it
checks the run folder with its own code: no checkpoint is lost or damaged, no process or lock is left, and exit status and
messages are as documented. A run that kept its number of processes must end with the same bits as an undisturbed one. A full
disk is simulated by a limit on the size of files (RLIMIT_FSIZE), set on the running processes, which needs no privileges.

One of every --by-hand starts is made like a user's; the others are forked by a process that has imported torch
(tests/attack/torture_nest.py). A find is kept in --out with the log and the run folder. Each run is drawn from --seed and its
number: --run 17 repeats that run, except for timing. The exit status is 1 if there are finds. Linux only.

Example: python -m tests.attack.torture --minutes 10 --seed 1
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m tests.attack.torture")

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from utils.cli import int_in_range, make_parser, progress
from utils.program import run_main

from .torture_blows import GOES_ON, KINDS, PHASES, Blow, await_end, await_progress, draw, judge, odd_rank, strike, wait_for
from .torture_checks import History, check_best, check_resumed, check_said, wait_until, weights_of
from .torture_runs import CLASSES, LIMIT_MINUTES, SETTINGS, STEPS, Life, Nest, TorturePlace

_LONGEST = 180.0  # seconds that an undisturbed training run may take


class Dealt(NamedTuple):
    """A blow that was dealt."""

    run: int
    kind: str
    phase: str
    processes: int
    by_hand: bool
    seconds: float  # until all processes were gone


class Find(NamedTuple):
    """A fault after a blow."""

    run: int
    start: int  # number of the start within the run
    kind: str
    phase: str
    processes: int
    by_hand: bool
    what: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and torture; return the exit status."""
    parser = make_parser("python -m tests.attack.torture", __doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="duration; 0 = until --kills blows (default 0)")
    parser.add_argument("--kills", type=int_in_range(0), default=0, help="end after N blows; 0 = when the time is up")
    parser.add_argument("--seed", type=int_in_range(0), default=0, help="random seed of runs, blows and moments (default 0)")
    parser.add_argument("--run", type=int_in_range(0), help="only the run with this number")
    parser.add_argument("--processes", type=int_in_range(1, 3), nargs="+", default=[1, 2, 3], help="numbers of processes")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="kinds of blows")
    parser.add_argument("--setting", choices=list(SETTINGS), default="sampled", help="what is trained (default sampled)")
    parser.add_argument("--by-hand", type=int_in_range(0), default=5, help="one start in N is not forked; 0 = none")
    parser.add_argument("--out", type=Path, default=Path("torture_finds"), help="folder for finds")
    parser.add_argument("--json", type=Path, help="write counts and finds to this file")
    options = parser.parse_args(arguments)
    return run_main(lambda: torture(options))


def torture(options: argparse.Namespace) -> None:
    """Strike until the time is up; raise ValueError at the end if there were finds."""
    if not sys.platform.startswith("linux"):
        raise ValueError("tests.attack.torture reads /proc and sets limits of other processes: it needs Linux")
    if not (options.minutes or options.kills or options.run is not None):
        raise ValueError("one of --minutes, --kills or --run must be given; --minutes 10 is a good start")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no started process is left behind
    with tempfile.TemporaryDirectory(prefix="torture_") as folder:
        torturer = Torturer(options, TorturePlace(Path(folder), options.setting))
        try:
            torturer.torture()
        finally:
            torturer.close()
            signal.signal(signal.SIGTERM, before)
    print(torturer.table())
    if options.json:
        options.json.write_text(json.dumps(torturer.report(), indent=1) + "\n")
    for find in torturer.finds[:20]:
        print(f"run {find.run}, start {find.start} ({find.processes} process(es), {find.kind}, {find.phase}): {find.what}")
    if torturer.finds:
        raise ValueError(f"{len(torturer.finds)} finds in {len(torturer.dealt)} blows; logs and folders are in {options.out}")


class Torturer:
    """The runs, blows and finds of one call."""

    def __init__(self, options: argparse.Namespace, place: TorturePlace) -> None:
        self.options, self.place = options, place
        place.make()
        self.nest = Nest()
        self.lives: list[Life] = []
        self.dealt: list[Dealt] = []
        self.finds: list[Find] = []
        self.finished = {"same processes": 0, "other processes": 0}
        self.reference: dict[int, dict[str, bytes]] = {}  # files of an undisturbed run, by number of processes
        self._starts: dict[tuple[int, bool], list[float]] = {}  # seconds to the first step
        self._begun = time.monotonic()

    def torture(self) -> None:
        """Do run after run until the time is up."""
        with progress([], self.options.kills or None, "torturing", "blow") as bar:
            for processes in self.options.processes:
                self._make_reference(processes)
            self._begun, number = time.monotonic(), self.options.run or 0
            while not self._is_over():
                self._one_run(number, bar)
                if self.options.run is not None:
                    break
                number += 1

    def close(self) -> None:
        """End every process that was started."""
        for life in self.lives:
            life.end()
        self.nest.close()

    def _start(self, *arguments: Any) -> Life:
        life = Life(self.place, *arguments)
        self.lives = [*(life for life in self.lives if life.alive()), life]
        return life

    def _is_over(self) -> bool:
        minutes, kills = self.options.minutes, self.options.kills
        late = minutes and time.monotonic() - self._begun > 60 * minutes
        return bool(late or (kills and len(self.dealt) >= kills))

    def _make_reference(self, processes: int) -> None:
        run = f"unbroken_{processes}"
        life = self._start(run, processes, 0, self.nest, [])
        wait_until(lambda: life.last_step() > 0 or life.status_ended(), _LONGEST)
        self._starts.setdefault((processes, False), []).append(time.monotonic() - life.started)
        wait_until(lambda: not life.alive(), _LONGEST)
        life.end()
        if life.status() != 0:
            raise ValueError(f"an undisturbed training run ended with status {life.status()}: {life.said()}")
        self.reference[processes] = weights_of(life.folder, STEPS)

    def _one_run(self, number: int, bar: Any) -> None:
        """Start a training run again and again, with a blow each time, until it has reached its last step."""
        rng = random.Random(f"{self.options.seed} {number}")
        fixed, blows = rng.random() < 0.6, rng.randint(2, 6)
        chosen = rng.choice(self.options.processes)
        name, start = f"run_{number:04d}", 0
        history = History(self.place.work / "runs" / name, CLASSES)
        used: set[int] = set()
        found = len(self.finds)
        life: Life | None = None
        while len(self.finds) == found:  # faults after a find would mean little
            if life is None:
                chosen = chosen if fixed else rng.choice(self.options.processes)
                by_hand = bool(self.options.by_hand) and rng.randrange(self.options.by_hand) == 0
            blow = draw(rng, chosen, self.options.kinds)
            if blow.kind in ("disagree", "stop_rank") and life is not None:  # these need settings at the start
                blow = blow._replace(kind="kill_all")
            if blows == 0 or self._is_over():
                break
            if life is None:
                start += 1
                overrides = [f"run.timeout_minutes={LIMIT_MINUTES}"] if blow.kind == "stop_rank" else []
                odd = odd_rank(blow, self.place)
                life = self._start(name, chosen, start, None if by_hand else self.nest, overrides, odd)
                if blow.kind != "disagree":
                    used.add(chosen)
            newest, before = history.newest, self._shown(history.folder)
            if not wait_for(life, blow, self._start_seconds(chosen, by_hand)) and blow.kind != "disagree":
                break  # it ended before; _finish checks whether it ended well
            blows -= 1
            bar.update()
            if self._deal(life, blow, number, start, by_hand, history, newest, before):
                life = None
        if len(self.finds) == found:
            self._finish(life, number, start + 1, name, chosen, history, used)
        elif life is not None:
            life.end()
        shutil.rmtree(history.folder, ignore_errors=True)

    def _start_seconds(self, processes: int, by_hand: bool) -> float:
        seconds = self._starts.get((processes, by_hand)) or [8.0]
        return statistics.median(seconds[-9:])

    def _shown(self, folder: Path) -> dict[str, tuple[int, int]]:
        """Return size and time of all files of a run folder."""
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}

    def _deal(
        self,
        life: Life,
        blow: Blow,
        number: int,
        start: int,
        by_hand: bool,
        history: History,
        newest: int,
        before: dict[str, tuple[int, int]],
    ) -> bool:
        """Deal a blow and check its effects; return whether this start is over."""
        phase, step = life.phase(), life.last_step()
        if life.first_step:
            self._starts.setdefault((life.processes, by_hand), []).append(life.first_step)
            life.first_step = 0.0
        strike(life, blow)
        history.may_lack_steps |= blow.kind.startswith("disk")
        goes_on, seconds, faults = blow.kind in GOES_ON, 0.0, []
        if goes_on:
            faults = await_progress(life)
            goes_on = not life.status_ended() and not faults
            if not goes_on and not faults:
                wait_until(lambda: not life.alive(), 40.0)
                if not (life.status() == 0 or (blow.kind == "disk_short" and "error: " in life.said())):
                    faults.append(f"exit status {life.status()} after a pause: {life.said()[-400:]!r}")
        else:
            seconds, faults = await_end(life, blow)
        if not goes_on:
            life.end()
            faults += history.check() + check_resumed(life.log(), newest)
            if blow.kind not in GOES_ON:
                faults += judge(life, blow, phase, step, history.newest)
            if blow.kind == "disagree" and before != self._shown(history.folder):
                faults.append("ranks that disagree have written to the run folder")
        faults += check_said(life.said(), blow.kind.startswith("int") and phase == "start")
        self.dealt.append(Dealt(number, blow.kind, phase, life.processes, by_hand, round(seconds, 2)))
        self._note(life, number, start, blow.kind, phase, by_hand, faults, history)
        return not goes_on

    def _finish(
        self, life: Life | None, number: int, start: int, name: str, processes: int, history: History, used: set[int]
    ) -> None:
        """Let a run finish, and compare the result with an undisturbed run."""
        newest, old = history.newest, life
        faults: list[str] = []
        while True:  # a start that ended just before its blow may have been paused before
            current = life or self._start(name, processes, start, self.nest, [])
            used.add(processes)
            if wait_until(lambda current=current: not current.alive(), _LONGEST) is None:
                current.end()
                self._note(current, number, start, "none", "end", False, [f"not done within {_LONGEST:.0f} s"], history)
                return
            current.end()
            if current is old and current.status() != 0 and history.may_lack_steps:
                faults += history.check()  # it may have saved before
                life, newest = None, history.newest
                continue
            break
        faults += history.check() + check_said(current.said(), False)
        if life is None:
            faults += check_resumed(current.log(), newest)
        if current.status() != 0 or history.newest != STEPS:
            faults.append(f"exit status {current.status()} at step {history.newest} of {STEPS}: {current.said()[-400:]!r}")
        faults += check_best(history.folder) if not faults and not history.may_lack_steps else []
        leftovers = [path.name for path in (history.folder / "checkpoints").glob(".*")]
        if leftovers:
            faults.append(f"leftovers: {leftovers}")
        if len(used) == 1 and not faults:
            weights, expected = weights_of(history.folder, STEPS), self.reference[processes]
            changed = [file for file in expected if weights.get(file) != expected[file]]
            faults += [f"{file} differs from the file of an undisturbed run" for file in changed]
        self.finished["same processes" if len(used) == 1 else "other processes"] += 1
        self._note(current, number, start, "none", "end", False, faults, history)

    def _note(
        self, life: Life, number: int, start: int, kind: str, phase: str, by_hand: bool, faults: list[str], history: History
    ) -> None:
        """Record faults as finds, and keep the files that belong to them."""
        if not faults:
            return
        life.end()
        folder = self.options.out / f"seed_{self.options.seed}_run_{number:04d}_start_{start}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "find.txt").write_text("\n".join([f"{kind} in {phase}, {life.processes} process(es)", *faults]) + "\n")
        (folder / "stderr.txt").write_text(life.said())
        (folder / "statuses.txt").write_text(f"{life.status()}\nworkers: {life.statuses()}\n")
        if history.folder.is_dir():
            shutil.copytree(history.folder, folder / "run", dirs_exist_ok=True)
        print(f"\nrun {number}, start {start}: {kind} in {phase}: {'; '.join(faults)}", file=sys.stderr, flush=True)
        self.finds += [Find(number, start, kind, phase, life.processes, by_hand, what) for what in faults]

    def report(self) -> dict[str, Any]:
        """Return the contents of the JSON file."""
        return {
            "blows": len(self.dealt),
            "by_hand": sum(blow.by_hand for blow in self.dealt),
            "processes": {n: sum(blow.processes == n for blow in self.dealt) for n in self.options.processes},
            "finished_runs": self.finished,
            "minutes": round((time.monotonic() - self._begun) / 60, 1),
            "finds": [find._asdict() for find in self.finds],
            "dealt": [blow._asdict() for blow in self.dealt],
        }

    def table(self) -> str:
        """Return blows by kind and phase, with the seconds until all processes were gone."""
        phases = "".join(f"{phase:>11}" for phase in PHASES)
        lines = [f"{'blow':<14}{phases}{'gone after':>13}{'at most':>10}{'finds':>7}"]
        for kind in [name for name in KINDS if any(blow.kind == name for blow in self.dealt)]:
            mine = [blow for blow in self.dealt if blow.kind == kind]
            counts = "".join(f"{sum(blow.phase == phase for blow in mine):>11}" for phase in PHASES)
            seconds = [blow.seconds for blow in mine]
            times = f"{statistics.median(seconds):>11.1f} s{max(seconds):>8.1f} s" if kind not in GOES_ON else " " * 23
            lines.append(f"{kind:<14}{counts}{times}{sum(find.kind == kind for find in self.finds):>7}")
        report = self.report()
        done = ", ".join(f"{count} on {name}" for name, count in self.finished.items())
        head = f"{report['blows']} blows ({report['by_hand']} by hand) in {report['minutes']} minutes"
        return "\n".join([*lines, f"{head}; finished runs: {done}"])


if __name__ == "__main__":
    raise SystemExit(main())
