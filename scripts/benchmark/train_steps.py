"""What scripts.benchmark.train measures in a process of its own: steps of the real training code, and their parts."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from backbones import build_backbone
from configs import load_config
from training import step as training_step
from training.ahead import PreparedStep, StepsAhead
from training.compiled import compiled
from training.late import LateValues
from training.model import build_model
from training.sections import NAMED
from training.setup import open_loaders, set_up
from utils import distributed
from utils.distributed import init_local
from utils.optim import set_training

from .baselines.arcface_torch_loop import seconds_per_step, serving
from .baselines.train import PlainTraining
from .kit import peak_bytes

_BASE = Path(__file__).parents[2] / "configs" / "base.yaml"
PARTS = ("data", "forward", "backward", "head", "communication", "optimizer", "other")


def serve_case(case: dict[str, Any]) -> None:
    """Take the steps that the parent asks for."""
    with serving() as serve:
        training: Any = OurTraining(case) if case["way"] == "ours" else _plain(case)
        commands = {
            "time": lambda count: seconds_per_step(training.step, count, training.device),
            "peak": lambda _: peak_bytes(training.device),
        }
        if case["way"] == "ours":
            commands["parts"] = training.parts
        serve(commands)
    distributed.stop()


def _plain(case: dict[str, Any]) -> PlainTraining:
    world = init_local(case["rank"], case["ranks"], case["device"], case["rendezvous"])
    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    backbone = build_backbone(case["network"], case["dim"], case["width"], image_size=case["image_size"])
    return PlainTraining(backbone, case["classes"], case["dim"], case["rank_batch"], world, case["image_size"])


class OurTraining:
    """One rank of a run of train.py, without its log, evaluations and checkpoints."""

    def __init__(self, case: dict[str, Any]) -> None:
        config = load_config(_BASE, case["overrides"], NAMED)
        setup = set_up(config)
        self.config, self.setup, self.world, self.device = config, setup, setup.world, setup.world.device
        self.model = build_model(config, setup)
        torch.backends.cudnn.benchmark = True
        self.parallel = distributed.as_data_parallel(compiled(self.model.backbone, config.train.compile), self.world)
        set_training(self.model.backbone, config.backbone.freeze_norm, config.backbone.freeze)
        heads = [self.model.heads[task.name] for task in setup.tasks]
        self.ahead = iter(StepsAhead(open_loaders(config, setup, 0), heads, 0, config.train.accumulation))
        self.late = LateValues()

    def step(self) -> None:
        """Take one optimizer step, as train.py does."""
        self._take(next(self.ahead))

    def _take(self, prepared: PreparedStep) -> None:
        rates = (self.config.optimizer.lr, self.config.optimizer.lr)
        result = training_step.train_step(self.config, self.setup.tasks, self.model, self.parallel, prepared, rates, self.world)
        self.late.post(prepared.number, result)
        distributed.any_ranks([False, False, False], self.world)
        for values in self.late.take(prepared.number):
            if not values.good:
                raise ValueError(
                    f"step {values.step}: loss {values.loss}, gradient norm {values.grad_norm}: nothing to measure"
                )

    def parts(self, count: int) -> dict[str, float]:
        """Return the mean seconds of each of PARTS in a step, as rank 0 sees them; on CUDA it waits at the end of each part.

        What DDP's communication adds to the backward pass is the difference to steps that keep their gradients for themselves.
        """
        shared, kept = self._timed_parts(count, shared=True), self._timed_parts(count, shared=False)
        waits = max(0.0, shared["backward"] - kept["backward"]) if self.world.world_size > 1 else 0.0
        return {**shared, "backward": shared["backward"] - waits, "communication": shared["communication"] + waits}

    def _timed_parts(self, count: int, shared: bool) -> dict[str, float]:
        self.step()
        watch = _Stopwatch(self.device)
        with contextlib.ExitStack() as stack:
            for part, owner, name in self._calls():
                stack.enter_context(watch.timed(part, owner, name))
            for _ in range(count):
                with distributed.gradients_shared(self.parallel, now=shared), watch.part("other"):
                    with watch.part("data"):
                        prepared = next(self.ahead)
                    self._take(prepared)
        return {part: watch.seconds.get(part, 0.0) / count for part in PARTS}

    def _calls(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the parts of train_step: name of the part, and the object and attribute by which train_step calls it."""
        yield from (("data", training_step, "prepare"), ("forward", training_step, "_embed"))
        yield from (("backward", training_step, "backward"), ("communication", distributed, "all_ranks"))
        yield "communication", distributed, "any_ranks"
        for name in ("set_learning_rate", "unscale_and_clip_grad_norm_", "step_if"):
            yield "optimizer", training_step, name
        for head in self.model.heads.values():
            yield from (("head", head, name) for name in ("begin_step", "forward", "step"))
            yield from (("communication", head.collectives, name) for name in ("all_gather", "reduce_scatter", "sum"))


class _Stopwatch:
    """Sums the time spent in each part. A part within a part is not counted to the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        """Count the time since the last turn to the part that is open."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside to a part."""
        self._turn()
        self._open.append(name)
        yield
        self._turn()
        self._open.pop()

    @contextlib.contextmanager
    def timed(self, part: str, owner: Any, name: str) -> Iterator[None]:
        """Count the calls of owner.name to a part, until the context ends."""
        function, had_own = getattr(owner, name), name in vars(owner)

        def counted(*arguments: Any, **named: Any) -> Any:
            with self.part(part):
                return function(*arguments, **named)

        setattr(owner, name, counted)
        yield
        if had_own:
            setattr(owner, name, function)
        else:
            delattr(owner, name)
