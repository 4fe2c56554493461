"""Training as a user starts it, on synthetic images, and a closer look at its steps."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/trainings.py is no program; python -m scripts lists them")

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from configs import load_config
from training.ahead import StepsAhead
from training.late import LateValues
from training.model import build_model
from training.sections import NAMED
from training.setup import open_loaders, set_up
from training.step import train_step
from utils import distributed

from .measuring import Context, Row, attempt, device_figures, outermost, record, times_of

_ROOT = Path(__file__).parents[3]
_BACKWARD = "autograd::engine::evaluate_function: "  # before the names of what the backward pass evaluates
_LOOKED_AT = 3  # steps under the profiler


def _cases(quick: bool) -> list[Row]:
    if quick:
        return [{"backbone": "r18", "width": 0.125, "classes": 2000, "batch": 4, "precision": "fp32", "steps": 4}]
    common: Row = {"backbone": "r50", "width": 1.0, "classes": 1_000_000, "precision": "bf16", "steps": 80}
    return [{**common, "batch": batch} for batch in (128, 512)]


def measure(context: Context) -> Iterator[Row]:
    """Yield a row per training, and one per look at its steps, with the intervals of the last step in `timeline`."""
    for case in _cases(context.quick):
        yield attempt({"what": "train.py", **case}, lambda case=case: _train(case, context))  # type: ignore[misc]
        yield attempt({"what": "its steps", **case}, lambda case=case: _look(case, context))  # type: ignore[misc]


def _config(case: Row, context: Context, name: str) -> Path:
    """Write the configuration of a run of that name; return the file."""
    config = context.folder / f"{name}.yaml"
    config.write_text(
        f"run: {{output: {context.folder}, device: {context.device.type}}}\n"
        f"data: {{source: synthetic, num_classes: {case['classes']}, num_images: {max(case['classes'], 1000 * case['batch'])}, "
        f"threads: {2 if context.quick else 12}}}\n"
        f"backbone: {{name: {case['backbone']}, width: {case['width']}}}\n"
        "head: {storage: lean}\n"
        f"train: {{batch_size: {case['batch']}, max_steps: {case['steps']}, precision: {case['precision']}}}\n"
        "checkpoint: {every: 0}\n"
        f"log: {{every: {max(1, case['steps'] // 8)}}}\n"
    )
    return config


def _train(case: Row, context: Context) -> Row:
    """Run train.py; return what its log says of the second half of the steps."""
    name = f"train_{case['batch']}"
    command = [sys.executable, str(_ROOT / "train.py"), str(_config(case, context, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"train.py ended with status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    lines = (context.folder / name / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    late = [record for record in records if record["step"] > case["steps"] // 2]
    row: Row = {key: statistics.median(record[key] for record in late) for key in ("images_per_second", "data_wait")}
    return {**row, "memory_gib": late[-1]["memory_gib"], "first_loss": records[0]["loss"], "last_loss": late[-1]["loss"]}


def _look(case: Row, context: Context) -> Row:
    """Take steps as train.py's loop does, some of them under the profiler."""
    endless = {**case, "steps": 1 << 20}
    config = load_config(_config(endless, context, f"look_{case['batch']}"), [], NAMED)
    setup = set_up(config)
    model = build_model(config, setup)
    torch.backends.cudnn.benchmark = True
    parallel, world, late = distributed.as_data_parallel(model.backbone, setup.world), setup.world, LateValues()
    heads = [model.heads[task.name] for task in setup.tasks]
    ahead = iter(StepsAhead(open_loaders(config, setup, 0), heads, 0, config.train.accumulation))

    def step() -> None:
        prepared = next(ahead)
        late.post(prepared.number, train_step(config, setup.tasks, model, parallel, prepared, (1e-3, 1e-3), world))
        late.take(prepared.number)

    def steps() -> None:
        for _ in range(_LOOKED_AT):
            step()

    try:
        for _ in range(2 if context.quick else 10):  # kernels are compiled, memory is taken
            step()
        row: Row = {"steps": _LOOKED_AT, "step_ms": times_of(context.device, steps, 1)[0] / _LOOKED_AT}
        intervals = record(context.device, steps)
    finally:
        ahead.close()
        distributed.stop()
    if context.device.type == "cuda":
        row |= device_figures(intervals, _LOOKED_AT)
    shown = [interval for interval in outermost(intervals) if interval.end - interval.start > 5][:20_000]
    return {**row, "timeline": [[i.lane, i.name.removeprefix(_BACKWARD)[:40], round(i.start), round(i.end)] for i in shown]}
