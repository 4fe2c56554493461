"""Train a face recognition network: python train.py CONFIG, or torchrun --nproc_per_node=N train.py CONFIG.

CONFIG is a YAML file that names what differs from configs/base.yaml, where the keys are explained; see docs/configuration.md.
Example: python train.py configs/ms1mv3_r50.yaml data.path=/data/ms1m-retinaface-t1 optimizer.lr=0.05 train.epochs=2

One process or many, CPU or CUDA, run the same lines. The optimizer step is the one clock: whatever is periodic counts in it.
"""

if __name__ == "__main__":
    from utils.machine import begin_imports, leave

    begin_imports()

import argparse
import itertools
import math
import time
from collections import Counter

import torch
from easydict import EasyDict

from configs import dump_config, load_config
from data.loader import write_bad_batch
from eval.embed import EmbedSettings
from eval.monitor import Evaluator
from losses.first_loss import FirstStep, judge_first_loss
from partial_fc.init import InitCounts
from training.ahead import StepsAhead
from training.model import Model, build_model, for_training, resume_or_init
from training.sections import NAMED
from training.setup import Setup, decode_sample, open_loaders, set_up
from training.step import LateValues, StepValues, train_step
from utils import distributed
from utils.checkpoint.format import RetentionPolicy, best_score, list_checkpoints, note_score, read_manifest
from utils.checkpoint.resume import changed_keys, write_config
from utils.checkpoint.writer import CheckpointWriter
from utils.cli import make_parser
from utils.distributed import SharedError
from utils.distributed.watchdog import Watchdog
from utils.log import RunLog, Speed, peak_memory_gib
from utils.machine import waited_for_core
from utils.optim import describe_groups, is_finite
from utils.program import StoppedError, StopSignal, run_main, untested_torch


def train(config: EasyDict, stop: StopSignal) -> None:
    """Run one training from its configuration: set up, build, resume, loop."""
    setup = set_up(config)
    model = build_model(config, setup)
    start_step, counts = resume_or_init(config, setup, model)
    write_config(setup.folder, dump_config(setup.facts["config"]), setup.resume_from, setup.world)  # of a start that was sound
    world, total_steps, saving = setup.world, setup.total_steps, config.checkpoint
    last_evaluation = total_steps if config.eval.at_end else 0
    torch.backends.cudnn.benchmark = True  # from here on every batch has the same shape
    keep = RetentionPolicy(saving.keep_last, saving.keep_every, saving.keep_best)
    with (
        RunLog(setup.folder, world.rank, start_step, total_steps, setup.epochs_per_step) as log,
        CheckpointWriter(setup.folder, world, keep, saving.background, saving.max_failed_saves, log.warn) as writer,
        Watchdog(world, config.run.timeout_minutes) as watch,
    ):
        introduce(config, setup, model, counts, start_step, log)
        evaluator = build_evaluator(config, setup, model, log, stop)
        evaluate_first(config, setup, start_step, evaluator, stop, watch)
        if start_step >= total_steps:
            log.info("training is complete already; nothing to do. Raise train.max_steps or epochs, or choose another run.name")
            return
        best = distributed.all_gather_objects(best_score(setup.folder, setup.facts) if world.rank == 0 else None, world)[0]
        parallel = for_training(config, setup, model)
        heads = [model.heads[task.name] for task in setup.tasks]
        steps = StepsAhead(open_loaders(config, setup, start_step), heads, start_step, config.train.accumulation)
        steps.flags = lambda: [bool(stop.name), writer.is_writing, writer.is_overdue(saving.every_minutes)]
        late, meter = LateValues(), Meter(config, setup, model, log)
        stop.can_save = setup.compile == "off"  # its compilers, in the first step, get the signal, too
        watch.at(start_step, steps.doing)
        for prepared in steps:
            # ---- one optimizer step, of which the host reads nothing before the next one
            step, done = prepared.number, prepared.number + 1
            watch.at(step, "training")
            rates = (setup.schedule.rate(step), setup.head_schedule.rate(step))
            late.post(step, train_step(config, setup.tasks, model, parallel, prepared, rates, world))
            for task, head in zip(setup.tasks, heads, strict=True):
                if head.news:
                    log.info(named(task.name, head.news, model))
            meter.speed.count()
            if step == start_step:
                stop.can_save = True

            # ---- after the step: `done` optimizer steps are finished
            logs, evaluates = is_due(done, config.log.every, total_steps), is_due(done, config.eval.every, last_evaluation)
            saves = is_due(done, saving.every, total_steps)
            meter.take(late, done if logs or evaluates or saves or step == start_step else step)
            if logs:  # before the flags, which come with labels of the next step, or with its error
                meter.report(done, rates, steps.waited)
            if world.world_size == 1 or evaluates or saves:  # the ranks meet here anyway
                stopping, writing, timed = distributed.any_ranks(steps.flags(), world)
            else:
                watch.at(done, steps.doing)
                stopping, writing, timed = steps.shared_flags()
                watch.at(step, "training")
            writer.advance(writing)
            if saves := saves or stopping or timed:
                meter.take(late, done)
            pause, score, stopping = time.perf_counter(), None, stopping and done < total_steps
            if evaluates and not stopping:
                watch.at(done, "evaluating", limited=False)
                try:
                    score = evaluator.score(done)
                    stopping = score is None and bool(setup.protocols)  # while it evaluated
                except ValueError:  # on every rank: save before re-raising, unless the weights are not finite
                    if is_finite(model.backbone):
                        save(done, None, setup, model, writer, watch, last=True)
                    raise
            new_best = saving.keep_best > 0 and score is not None and (best is None or score > best)
            best = score if new_best else best
            if saves or new_best or stopping:
                save(done, score, setup, model, writer, watch, last=stopping or done == total_steps)
            if stopping:
                raise stopped(stop, saving.resume, done, total_steps, bool(evaluates and setup.protocols))
            meter.speed.pause(time.perf_counter() - pause)
            watch.at(done, steps.doing)
        log.info(f"finished {total_steps} steps; checkpoints, log and figures are in {setup.folder}")


def build_evaluator(config: EasyDict, setup: Setup, model: Model, log: RunLog, stop: StopSignal) -> Evaluator:
    """Return what scores the backbone, and the moving average of its weights if there is one."""
    return Evaluator(
        model.backbone,
        setup.protocols,
        setup.world,
        EmbedSettings(config.eval.batch_size, model.autocast, config.data.threads, config.data.image_size),
        config.eval.metric,
        log,
        config.run.name,
        setup.total_steps,
        setup.folder,
        average=None if model.ema is None else model.ema.network,
        is_stopped=lambda: bool(stop.name),
    )


def evaluate_first(
    config: EasyDict, setup: Setup, start_step: int, evaluator: Evaluator, stop: StopSignal, watch: Watchdog
) -> None:
    """Make the evaluation that comes before the first step, if any: eval.at_start, or one that a stop or an error left out."""
    saved, last = setup.resume_from, setup.total_steps if config.eval.at_end else 0
    due = config.eval.at_start and start_step == 0
    if saved is not None and start_step > 0 and setup.protocols:
        due = is_due(start_step, config.eval.every, last) and read_manifest(saved).get("score") is None
    if not distributed.all_gather_objects(due, setup.world)[0]:  # another machine may see the manifest as it was
        return
    watch.at(start_step, "evaluating", limited=False)
    score = evaluator.score(start_step)
    if score is None and setup.protocols:
        raise stopped(stop, config.checkpoint.resume, start_step, setup.total_steps, unrated=True)
    if score is not None and setup.world.rank == 0 and saved is not None:
        with evaluator.log.tolerant(f"the score of {saved}"):
            if any(map(saved.samefile, list_checkpoints(setup.folder))):  # it is of this run, whatever path leads to it
                note_score(saved, score, setup.facts["config"])


def introduce(config: EasyDict, setup: Setup, model: Model, counts: InitCounts, start_step: int, log: RunLog) -> None:
    """Log what the run is made of, and where it begins. A collective call."""
    world = setup.world
    for task in setup.tasks:
        log.info(task.dataset.in_words())
    for line in filter(None, [untested_torch(), distributed.lone_tasks(), *setup.warnings]):
        log.warn(line)
    parameters = sum(parameter.numel() for parameter in model.backbone.parameters()) / 1e6
    classes = sum(task.dataset.num_classes for task in setup.tasks)
    log.info(
        f"{config.run.name}: {setup.total_steps} steps of {config.train.batch_size} images, {world.world_size} x "
        f"{world.device.type}, {setup.precision}, {parameters:.2f} M backbone parameters, {classes} classes"
    )
    log.info(f"learning rate: {setup.schedule.describe()}")
    if setup.head_schedule != setup.schedule:
        log.info(f"learning rate of the class centres, before head.lr_factor: {setup.head_schedule.describe()}")
    for line in describe_groups(model.optimizer):
        log.info(line)
    if model.ema is not None:
        seen = int(model.ema.updates)
        what = f"goes on after {seen} steps" if seen else "begins with the weights that training begins with"
        log.info(f"moving average of the backbone: decay {config.train.ema:g}; it {what}")
    if model.teacher is not None:
        log.info(f"teacher: {model.teacher.describe()}")
    if setup.compile != "off":
        log.info(f"backbone: torch.compile in mode {setup.compile}; training waits for it, perhaps minutes")
    for task in setup.tasks if len(setup.tasks) > 1 else []:
        log.info(f"task {task.name}: {task.order.batch_size} images of each step, {task.weight:g} of the loss")
    for name, head in model.heads.items():
        log.info(named(name, head.describe(), model))
        for line in head.warnings:
            log.warn(line)
        if head.news:
            log.info(head.news)
    if setup.resume_from is None and config.init.backbone:
        total = InitCounts(*map(sum, zip(*distributed.all_gather_objects(counts, world), strict=True)))
        log.info(f"starting from {config.init.backbone}; class centres: {total}")
    if setup.resume_from is not None:
        log.info(f"resumed from {setup.resume_from} after step {start_step}")
        for line in changed_keys(setup.resume_from, setup.facts["config"]):
            log.info(line)


def named(head: str, text: str, model: Model) -> str:
    """Return a line about a head, with its name in front if there are several."""
    return f"{head}: {text}" if len(model.heads) > 1 else text


def judge_losses(losses: dict[str, float], model: Model, embedding_size: int, log: RunLog) -> None:
    """Log whether the losses of the first step are those of an untrained network."""
    for name, loss in losses.items():
        head = model.heads[name]
        step = FirstStep(
            head.num_active(),
            embedding_size,
            head.num_people(),
            head.num_counted(),
            (head.num_classes, head.first_counted),
            head.config.focal,
            head.config.label_smoothing,
            head.config.sub_centers,
            head.config.entropy_weights,
        )
        text, sound = judge_first_loss(loss, head.margin, step)
        (log.info if sound else log.warn)(named(name, text, model))


def check_finite(values: StepValues, setup: Setup, can_overflow: bool) -> None:
    """Write down the batch of a step whose loss or gradient is not finite, and raise SharedError; it changed nothing.

    A collective call then.

    Args:
        can_overflow: whether a smaller loss scale may help.
    """
    if values.good or (can_overflow and math.isfinite(values.loss) and values.loss_scale > 2.0**-10):
        return
    what = "the gradient is not finite" if math.isfinite(values.loss) else f"the loss is {values.loss}"
    words = []
    for task, rows in zip(setup.tasks, values.embeddings, strict=True):
        path = setup.folder / f"bad_batch_step_{values.step:08d}{f'_{task.name}' if len(setup.tasks) > 1 else ''}.json"
        samples = task.order.samples(values.step, **setup.share)
        words.append(write_bad_batch(path, values.step, what, task.dataset, samples, rows, setup.world))
    raise SharedError(
        f"{what} in step {values.step}; stopped before it reached the weights. {'. '.join(words)}. Checkpoints in "
        f"{setup.folder} hold finite numbers only; lower optimizer.lr or lengthen schedule.warmup_epochs"
    )


def save(
    step: int, score: float | None, setup: Setup, model: Model, writer: CheckpointWriter, watch: Watchdog, last: bool
) -> None:
    """Begin to save a checkpoint after `step` optimizer steps; wait for its end if it is the last one."""
    watch.at(step, "saving", limited=False)
    for network in (model.backbone, *([] if model.ema is None else [model.ema.network])):
        distributed.broadcast_module(network, setup.world)
    files = {name: part.state() for name, part in model.saved_states().items()}
    writer.save(step, files, {**setup.facts, "score": score}, last)


def stopped(stop: StopSignal, resume: str, done: int, total_steps: int, unrated: bool) -> StoppedError:
    """Return the error that ends a run which was told to stop and has saved."""
    again = "checkpoint.resume=auto" if resume == "never" else "the same command"
    cause = stop.name or "a signal to another process"
    place = f"{'saved after' if done else 'in'} step {done} of {total_steps}{', without its evaluation' if unrated else ''}"
    return StoppedError(f"{cause}: {place}; {again} goes on from there", stop.status)


class Meter:
    """Collects the numbers of training between two lines of the log."""

    def __init__(self, config: EasyDict, setup: Setup, model: Model, log: RunLog) -> None:
        self.config, self.setup, self.model, self.log = config, setup, model, log
        self.speed = Speed(config.train.batch_size)
        self._waits: tuple[float, float] | None = waited_for_core()
        self._loss_sum, self._count, self._grad_norm = 0.0, 0, 0.0
        self._losses: Counter[str] = Counter()  # sums, of the tasks and of other terms

    def take(self, late: LateValues, before: int) -> None:
        """Note the numbers of the optimizer steps before that number, and judge them; the host waits for them."""
        for values in late.take(before):
            check_finite(values, self.setup, self.model.scaler.enabled)
            self._loss_sum, self._count, self._grad_norm = self._loss_sum + values.loss, self._count + 1, values.grad_norm
            self._losses.update(values.losses)
            self.log.advance(values.step + 1, values.loss)
            if values.step == 0 and not self.config.init.backbone:
                tasks = {task.name: values.losses[task.name] for task in self.setup.tasks}
                judge_losses(tasks, self.model, self.config.backbone.embedding_size, self.log)

    def report(self, done: int, rates: tuple[float, float], waited: float) -> None:
        """Log the numbers since the last report, and what the dataset has to say. A collective call.

        Args:
            rates: of the last step, as train_step takes them.
        """
        images_per_second, data_wait = self.speed.lap(waited)
        heads = self.model.heads
        numbers = {
            "loss": self._loss_sum / self._count,
            "lr": rates[0],
            "grad_norm": self._grad_norm,
            "positive_cosine": float(torch.stack([heads[task.name].positive_cosine for task in self.setup.tasks]).mean()),
            "images_per_second": images_per_second,
            "data_wait": data_wait,
            "memory_gib": peak_memory_gib(self.setup.world.device),
        }
        for name, total in self._losses.items() if len(self._losses) > 1 else []:
            numbers[f"loss_{name}"] = total / self._count
            if name in heads:
                numbers[f"positive_cosine_{name}"] = float(heads[name].positive_cosine)
        if self.setup.head_schedule != self.setup.schedule:
            numbers["lr_centres"] = rates[1]
        if self.model.scaler.enabled:
            numbers["loss_scale"] = float(self.model.scaler.scale)
        self.log.train(done, numbers, self.speed.eta(self.setup.total_steps - done))
        self._warn_once_if_busy()
        self._loss_sum, self._count = 0.0, 0
        self._losses.clear()
        if self.config.data.on_bad_record == "skip":
            mine = [line for task in self.setup.tasks for line in task.dataset.take_warnings()]
            warnings = distributed.all_gather_objects(mine, self.setup.world)
            for line in itertools.chain(*warnings):
                self.log.warn(line)

    def _warn_once_if_busy(self) -> None:
        if self._waits is None:
            return
        now = waited_for_core()
        ran, waited = now[0] - self._waits[0], now[1] - self._waits[1]
        self._waits = now
        if waited > 1.0 and waited > ran / 2:
            self.log.warn(
                f"too few cores are free: training waited for one in {100 * waited / (ran + waited):.0f} % of the time that "
                "it could have computed. Other programs run here, or run.threads is too many"
            )
            self._waits = None


def is_due(done: int, every: int, total_steps: int) -> bool:
    """Return whether something periodic is due after `done` steps: after each `every` of them (0 = never), and at the end."""
    return done == total_steps or (every > 0 and done % every == 0)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("python train.py", __doc__)
    parser.add_argument("config", help="YAML file of the run, for example configs/demo_cpu.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="such as optimizer.lr=0.05")
    parser.add_argument("--print-config", action="store_true", help="print the merged configuration and stop")
    parser.add_argument("--check", action="store_true", help="do what comes before the first step, without a run folder")
    parser.set_defaults(processes=1, machines=1)  # of --check, which `face train` can do for more
    return run_main(run, parser.parse_intermixed_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Train, print the configuration, or check the data, according to the command line."""
    config = load_config(options.config, options.overrides, NAMED)
    if options.print_config:
        print(dump_config(config), end="")
    elif options.check:  # what `train` does before its first step, but alone and without a run folder
        setup = set_up(config, options.processes or 1, options.machines)
        resume_or_init(config, setup, build_model(config, setup), images=False)
        found = []
        for task in setup.tasks:
            decode_sample(task.dataset, config.data.image_size)
            found += [task.dataset.in_words(), *task.dataset.take_warnings()]
        sets = [f"{protocol.name}: {protocol.describe()}" for protocol in setup.protocols]
        print("\n".join([*found, *setup.warnings, *sets, "nothing wrong was found"]))
    else:
        with StopSignal() as stop:
            train(config, stop)


if __name__ == "__main__":
    leave(main)
