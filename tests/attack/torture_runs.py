"""The training runs of tests.attack.torture: their generated data and configuration, their start, and their processes."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.recordio.image_record import RecordSetWriter
from eval.pair_sets.bin_file import write_bin

ROOT = Path(__file__).resolve().parents[2]
TRAIN, TORCHRUN = str(ROOT / "train.py"), str(ROOT / "scripts" / "launch" / "torchrun.py")
CLASSES, IMAGES, STEPS, EVALUATE_EVERY = 12, 72, 24, 12
LIMIT_MINUTES = 0.1  # run.timeout_minutes if a process is stopped for good
_MARK = "FACE_TORTURE"  # an environment variable that marks all processes of one start
_ODD = """import os, runpy, sys
if os.environ["RANK"] == os.environ["FACE_TORTURE_RANK"]:
    sys.argv.append(os.environ["FACE_TORTURE_KEY"])
sys.path[0] = os.path.dirname({train!r})
runpy.run_path({train!r}, run_name="__main__")
"""
_CONFIG = """run: {{output: {output}, threads: 1, timeout_minutes: 2.0}}
data: {{path: {data}, threads: 1, image_size: 48}}
augment: {{crop: 0.3, photometric: 0.5}}
backbone: {{name: r18, width: 0.0625, embedding_size: 16, dropout: 0.2}}
loss: {{name: cosface, margin: 0.2, scale: 16}}
head: {{chunk: 5, sample_rate: 0.5}}
train: {{batch_size: 6, max_steps: {steps}}}
optimizer: {{lr: 0.05}}
checkpoint: {{every: 3}}
log: {{every: 1}}
eval: {{targets: [tiny], every: {evaluate_every}, batch_size: 12}}
"""
# what differs in the training runs of each --setting; all have a state of their own that a resumed run must continue
SETTINGS = {
    "sampled": (),
    "adaface": ("loss.name=adaface",),
    "disk": ("head.placement=disk", "head.storage=mini", "checkpoint.background=false"),
    "curricularface": ("loss.name=curricularface", "train.ema=0.9"),
    "adamw": ("optimizer.name=adamw", "optimizer.lr=0.002", "train.ema=0.9", "head.storage=lean"),
    "lamb": ("optimizer.name=lamb", "optimizer.lr=0.002", "head.optimizer=sgd"),
    "sources": (
        "data.path=",
        "eval.path={data}",
        "data.sources=[{{path: {data}}}, {{path: {data}/../other_labels, repeat: 0.5}}]",
        "data.labels=same",
    ),
    "best": ("eval.every=2", "checkpoint.every=5"),  # saves between the others, whenever a score is the best so far
    "vit": ("backbone.name=vit_t", "backbone.width=0.25", "backbone.mask_ratio=0.2", "optimizer.name=adamw"),
}


def draw_face(label: int, number: int) -> bytes:
    """Return a JPEG of coarse tiles, which depend on the class, with noise."""
    tiles = np.random.default_rng([7, label]).integers(30, 225, (8, 8, 3)).astype(np.uint8)
    pixels = cv2.resize(tiles, (112, 112), interpolation=cv2.INTER_NEAREST)
    noise = np.random.default_rng([8, number]).normal(0, 10, pixels.shape)
    return cv2.imencode(".jpg", (pixels + noise).clip(0, 255).astype(np.uint8))[1].tobytes()


def draw_data(folder: Path, shift: int = 0) -> None:
    """Write a training set whose labels are shifted by `shift`, and the verification set `tiny` of other people."""
    with RecordSetWriter(folder, header=False, num_classes=CLASSES) as writer:
        for number in range(IMAGES):
            writer.add((number + shift) % CLASSES, draw_face(number % CLASSES, number))
    same = [pair % 2 == 0 for pair in range(12)]
    people = [100 + pair + 50 * (side and not same[pair]) for pair in range(12) for side in (0, 1)]
    write_bin(folder / "tiny.bin", [draw_face(who, 900 + place) for place, who in enumerate(people)], same)


class TorturePlace(NamedTuple):
    """The folder of a torturer's files."""

    work: Path
    setting: str = "sampled"

    @property
    def config(self) -> Path:
        """The configuration of all training runs."""
        return self.work / "torture.yaml"

    def make(self) -> None:
        """Generate the data, and a copy with other labels, and write the configuration."""
        for name, shift in (("data", 0), ("other_labels", 5)):
            draw_data(self.work / name, shift)
        (self.work / "runs").mkdir()
        (self.work / "odd_rank.py").write_text(_ODD.format(train=TRAIN))
        self.config.write_text(
            _CONFIG.format(output=self.work / "runs", data=self.work / "data", steps=STEPS, evaluate_every=EVALUATE_EVERY)
        )


class Nest:
    """A process that starts training runs without importing torch again, see tests/attack/torture_nest.py."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from tests.attack.torture_nest import serve; serve()"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=_environment(),
            start_new_session=True,  # only the torturer handles Ctrl-C
        )
        self._answer()

    def ask(self, **order: Any) -> Any:
        """Give an order; return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError("the process that starts the training runs ended; see its messages above")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Life:
    """One start of a training run, by `nest` or like a user's, until its processes are gone; odd: (rank, "key=value")."""

    def __init__(
        self,
        place: TorturePlace,
        run: str,
        processes: int,
        number: int,
        nest: Nest | None,
        overrides: list[str],
        odd: Any = None,
    ) -> None:
        self.processes, self.nest = processes, nest
        self.folder = place.work / "runs" / run
        self._log, self._before = self.folder / "train.log", _size(self.folder / "train.log")
        self._leftovers, self._seen = set(self.saves()), False
        self.mark = f"{os.getpid()} {run} {number}"
        self._statuses = place.work / f"{run}.{number}.statuses"
        script = str(place.work / "odd_rank.py") if odd else TRAIN
        own = [text.format(data=place.work / "data") for text in SETTINGS[place.setting]]
        arguments = [str(place.config), f"run.name={run}", *own, *overrides]
        program = script
        if processes > 1:
            program, arguments = TORCHRUN, ["--standalone", f"--nproc-per-node={processes}", script, *arguments]
        environment = {_MARK: self.mark, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "30"}
        if odd:
            environment |= {"FACE_TORTURE_RANK": str(odd[0]), "FACE_TORTURE_KEY": odd[1]}
        pipe = place.work / f"{run}.{number}.stderr"
        os.mkfifo(pipe)  # a limit on the size of files does not apply to it
        self._said: list[bytes] = []
        self._over = threading.Event()
        handle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._listener = threading.Thread(target=self._listen, args=(handle,), daemon=True)
        self._listener.start()
        self.started, self.first_step = time.monotonic(), 0.0  # seconds from the start to the first step that was seen
        self._process: subprocess.Popen[bytes] | None = None
        self._born: dict[int, str] = {}
        if nest is None:
            with pipe.open("wb") as said:
                self._process = subprocess.Popen(
                    [sys.executable, program, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    cwd="/",
                    env=_environment() | environment,
                )
            self.pid, self._workers = self._process.pid, []
        else:
            order = {"program": program, "arguments": arguments, "processes": processes, "script": script}
            pids = nest.ask(**order, environment=environment, stderr=str(pipe), statuses=str(self._statuses))["pids"]
            self.pid, self._workers = pids[0], pids[1:] or pids
            self._born = {pid: _born(pid) for pid in pids}
        self._born.setdefault(self.pid, _born(self.pid))
        pipe.unlink()

    def _listen(self, handle: int) -> None:
        while True:
            over = self._over.is_set()
            with contextlib.suppress(BlockingIOError):
                while data := os.read(handle, 1 << 16):
                    self._said.append(data)
            if over:
                os.close(handle)
                return
            self._over.wait(0.05)

    def workers(self) -> list[int]:
        """Return the started training processes, by rank."""
        if self._process is None:
            return [pid for pid in self._workers if self._lives(pid)]
        if self.processes == 1:
            return [self.pid]
        ranks = {rank: pid for pid in self.alive() if (rank := _rank_of(pid)) is not None}
        return [ranks[rank] for rank in sorted(ranks)]

    def alive(self) -> list[int]:
        """Return all living processes of this start, including orphans."""
        if self._process is None:
            return [pid for pid in self._born if self._lives(pid)]
        self._process.poll()
        # an ending process no longer shows its environment, but still has its files and locks
        self._born |= {pid: _born(pid) for pid in _marked(self.mark)}
        return [pid for pid in self._born if self._lives(pid)]

    def _lives(self, pid: int) -> bool:
        born = _born(pid)
        return bool(born) and born == self._born[pid]

    def status(self) -> int | None:
        """Return the exit status of the process that was started, None while it lives."""
        if self._process is not None:
            return self._process.poll()
        assert self.nest is not None
        status: int | None = self.nest.ask(wait=self.pid)["status"]
        return status

    def status_ended(self) -> bool:
        """Return whether the process that was started has ended; cheaper than `status`."""
        return not self._lives(self.pid) if self._process is None else self._process.poll() is not None

    def statuses(self) -> list[int]:
        """Return the exit statuses of the workers whose end torchrun has seen; none for a start by hand."""
        return [int(line) for line in self._statuses.read_text().split()] if self._statuses.is_file() else []

    def said(self) -> str:
        """Return what the processes have written to stderr so far."""
        return b"".join(self._said).decode(errors="replace")

    def log(self) -> str:
        """Return what this start has added to train.log."""
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as file:
            file.seek(self._before)
            return file.read().decode(errors="replace")
        return ""

    def last_step(self) -> int:
        """Return the last step that this start has logged, 0 = none."""
        steps = re.findall(r" step (\d+)/", self.log())
        return int(steps[-1]) if steps else 0

    def saves(self) -> list[str]:
        """Return the folders of saves in progress."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self.folder / "checkpoints") if name.endswith(".partial")]
        return []

    def phase(self) -> str:
        """Return the current phase: start, save, evaluation or step."""
        text = self.log()
        steps = re.findall(r" step (\d+)/", text)
        if not steps:
            return "start"
        if not self._seen:
            self._seen, self.first_step = True, time.monotonic() - self.started
        if set(self.saves()) - self._leftovers:
            return "save"
        last = int(steps[-1])
        due = last % EVALUATE_EVERY == 0 or last == STEPS
        return "evaluation" if due and "tiny" not in text[text.rindex(f" step {last}/") :] else "step"

    def send(self, pids: list[int], number: int) -> None:
        """Send a signal to processes, and ignore those that have ended."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Kill what is left, and stop listening."""
        for _ in range(50):
            if not (left := self.alive()):
                break
            self.send(left, signal.SIGKILL)
            time.sleep(0.05)
        if self.nest is None or not _born(self.pid):
            self.status()
        self._over.set()
        self._listener.join()


def _environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return own | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _born(pid: int) -> str:
    """Return the start time of a process, "" if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return ""
    # a process whose first thread has ended keeps its files and locks until its other threads end
    return "" if fields[0] in "ZX" and threads < 2 else fields[19]


def _marked(mark: str) -> list[int]:
    """Return the living processes with this mark in their environment."""
    wanted, found = f"{_MARK}={mark}\0".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes() and _born(int(name)):
                    found.append(int(name))
    return found


def _rank_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(rb"\0LOCAL_RANK=(\d+)\0", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
        return int(found[1]) if found else None
    return None
