"""Train a face recognition network: python train.py CONFIG, or torchrun --nproc_per_node=N train.py CONFIG.

CONFIG is a YAML file that names what differs from configs/base.yaml, where every key is explained; see docs/configuration.md.
Example: python train.py configs/ms1mv3_r50.yaml data.path=/data/ms1m-retinaface-t1 optimizer.lr=0.05 train.epochs=2

One process or many, CPU or CUDA, run the same lines. The optimizer step is the one clock: whatever is periodic counts in it.
Shapes: b = images of this rank in one micro-batch, A = micro-batches per optimizer step, D = embedding size.
"""

import functools
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from easydict import EasyDict
from torch import nn

from backbones import backbone_arguments, build_backbone, check_backbone
from configs import NamedSection, as_plain, dump_config, load_config, shared_settings
from data import build_dataset
from data.augment import Augment, prepare
from data.bad_batch import write_bad_batch
from data.base import FaceDataset
from data.loader import Loader
from data.sampler import SampleOrder, Samples, check_batch
from eval.embed import class_means
from eval.evaluate import check_metric, load_pair_sets
from eval.monitor import check_names, score_and_log
from eval.pair_sets.bin_file import PairSet
from losses import build_margin, margin_arguments
from losses.first_loss import judge_first_loss
from partial_fc import PartialFC, build_head, check_head_fits, head_config
from partial_fc.init_centres import InitCounts, init_centres
from utils import distributed
from utils.checkpoint.resume import changed_keys, prepare_run_folder, restore, trainer_state
from utils.checkpoint.retention import best_score
from utils.checkpoint.weights import load_initial
from utils.checkpoint.writer import CheckpointWriter, RetentionPolicy
from utils.cli import make_parser
from utils.distributed import SharedError, World, raise_on_all_ranks
from utils.distributed.agreement import require_equal, require_same_program
from utils.distributed.watchdog import Watchdog
from utils.log import RunLog, Speed, peak_memory_gib
from utils.memory import available_bytes, backbone_memory
from utils.optim import AUTOCAST, LossScaler, build_optimizer, freeze, is_finite, set_training, unscale_and_clip_grad_norm_
from utils.program import StoppedError, StopSignal, run_main
from utils.randomness import derive
from utils.schedule import learning_rate

NAMED = {"backbone": NamedSection(backbone_arguments, check_backbone), "loss": NamedSection(margin_arguments, build_margin)}


def train(config: EasyDict, stop: StopSignal) -> None:
    """Run one training from its configuration: set up, build, resume, loop, finish."""
    # ---- set up: processes, data, verification sets, run folder; whatever is wrong is said before anything is trained
    # a minute more than the watchdog's, which knows where the others are and is to speak first
    world = distributed.init_distributed(config.run.device, config.run.threads, config.run.timeout_minutes + 1)
    unlike = require_same_program(shared_settings(as_plain(config)), world)
    batch_size, accumulation = config.train.batch_size, config.train.accumulation
    data = config.data
    for first in (True, False):  # one process of each machine parses the data, the others map what it found
        with raise_on_all_ranks(world):
            if (world.local_rank == 0) is first:
                dataset, pair_sets = open_data(config, world.world_size)
    seen = {**dataset.fingerprint(), **{f"hash of {pair_set.name}": pair_set.digest() for pair_set in pair_sets}}
    require_equal(seen, world, "data.path and eval.path must hold the same data for all processes; copy them again")
    order = SampleOrder(
        dataset.num_images, batch_size, config.run.seed, data.flip, data.shuffle, data.block, data.window, dataset.epoch_indices
    )
    share = {"rank": world.rank, "world_size": world.world_size, "accumulation": accumulation}  # of each global batch
    total_steps = config.train.max_steps or max(1, int(config.train.epochs * dataset.num_images / batch_size))
    warmup_steps = round(config.schedule.warmup_epochs * dataset.num_images / batch_size)
    facts = {
        "run_signature": {
            "backbone": [config.backbone.name, config.backbone.embedding_size, config.backbone.width],
            "num_classes": dataset.num_classes,
            "num_images": dataset.num_images,
            "batch_size": batch_size,
            "seed": config.run.seed,
            "labels": seen["hash of the labels"],
        },
        "config": as_plain(config),
    }
    folder, saving = Path(config.run.output) / config.run.name, config.checkpoint
    resume_from, warnings = prepare_run_folder(folder, saving, dump_config(config), facts["run_signature"], world)

    # ---- build
    autocast = AUTOCAST[config.train.precision]
    torch.manual_seed(derive(config.run.seed, "backbone"))
    backbone = build_backbone(**{key: config.backbone[key] for key in ("name", *backbone_arguments(config.backbone.name))})
    backbone = backbone.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    margin = build_margin(**config.loss)
    classes, dim, seed = dataset.num_classes, config.backbone.embedding_size, config.run.seed
    settings = ("name", "lr", "momentum", "weight_decay", "beta2", "eps", "lr_factors")
    of_head = head_config(config.head, config.optimizer, autocast, world.device)
    free = min(distributed.all_gather_objects(available_bytes(world), world))  # so that all ranks say the same
    with raise_on_all_ranks(world):
        freeze(backbone, config.backbone.freeze)
        optimizer = build_optimizer(backbone, **{key: config.optimizer[key] for key in settings})
        moments, rows = 2 if config.optimizer.name == "adamw" else 1, batch_size // accumulation
        beside = backbone_memory(backbone, autocast, moments).total(rows // world.world_size)
        check_head_fits(classes, dim, world, of_head, rows, accumulation, beside, free)
    head = build_head(margin, classes, dim, world, seed, of_head)
    scaler = LossScaler(enabled=autocast is torch.float16)

    # ---- resume, or begin with the weights of another training
    start_step, started = 0, InitCounts(0, 0, 0)
    with raise_on_all_ranks(world):
        if resume_from is not None:
            start_step = restore(resume_from, backbone, margin, optimizer, scaler, head.load_rows)
        elif config.init.backbone:
            started = start_from(config, backbone, head, dataset, world, autocast)
    torch.backends.cudnn.benchmark = True  # from here on every batch has the same shape
    model = distributed.as_data_parallel(backbone, world)
    best = distributed.all_gather_objects(best_score(folder, facts) if world.rank == 0 else None, world)[0]
    set_training(backbone, config.backbone.freeze_norm, config.backbone.freeze)

    keep = RetentionPolicy(saving.keep_last, saving.keep_every, saving.keep_best)
    with (
        RunLog(folder, world.rank, start_step, total_steps, batch_size / dataset.num_images) as log,
        CheckpointWriter(folder, world, keep, saving.background, saving.max_failed_saves, log.warn) as writer,
        Watchdog(world, config.run.timeout_minutes) as watch,
    ):
        log.info(dataset.describe())
        for line in (*dataset.warnings, *unlike, *warnings):
            log.warn(line)
        log.info(
            f"{config.run.name}: {total_steps} steps of {batch_size} images, {world.world_size} x {world.device.type}, "
            f"{sum(p.numel() for p in backbone.parameters()) / 1e6:.2f} M backbone parameters, {dataset.num_classes} classes"
        )
        log.info(head.describe())
        for line in head.warnings:
            log.warn(line)
        if resume_from is None and config.init.backbone:
            total = InitCounts(*map(sum, zip(*distributed.all_gather_objects(started, world), strict=True)))
            log.info(f"starting from {config.init.backbone}; class centres: {total}")
        if resume_from is not None:
            log.info(f"resumed from {resume_from} after step {start_step}")
            for line in changed_keys(resume_from, facts["config"]):
                log.info(line)
        if start_step >= total_steps:
            log.info("training is complete already; nothing to do. Raise train.epochs, or choose another run.name")
            return

        def score(step: int) -> float | None:
            """Evaluate all sets after `step` optimizer steps; return what checkpoints are compared by."""
            watch.at(step, "evaluating", limited=False)
            settings, title = (config.eval.batch_size, autocast, data.threads), f"{config.run.name} after step {step}"
            at_end = folder if step == total_steps else None
            return score_and_log(backbone, pair_sets, world, settings, config.eval.metric, log, step, title, at_end)

        def save(step: int, selection: float | None, last: bool = False) -> None:
            watch.at(step, "saving", limited=False)
            distributed.broadcast_module(backbone, world)
            trainer, slots = trainer_state(backbone, margin, optimizer, scaler), (head.first_slot, head.end_slot)
            known = {**facts, "score": selection}
            writer.save(step, backbone.state_dict(), head.shard_state(), slots, trainer, known, last)

        if config.eval.at_start and start_step == 0:
            score(0)

        # ---- loop
        def samples(step: int) -> Samples:
            return order.samples(step, **share)

        ahead = functools.partial(order.read_ahead, first_step=start_step, **share)
        steps, augment = (start_step, total_steps), Augment(config.augment, config.run.seed)
        loader = Loader(dataset, samples, *steps, data.threads, data.prefetch, world.device, ahead, augment)

        def not_finite(what: str) -> SharedError:
            words = write_bad_batch(folder, step, what, dataset, samples(step), outputs, world)
            return SharedError(
                f"{what} in step {step}; stopped before it reached the weights. {words}. Checkpoints in {folder} hold finite "
                "numbers only; lower optimizer.lr or lengthen schedule.warmup_epochs"
            )

        speed, loss_sum, loss_count, stop.can_save = Speed(batch_size), 0.0, 0, True
        watch.at(start_step, "waiting for data")
        for step, batch in enumerate(loader, start_step):
            watch.at(step, "training")
            lr = learning_rate(step, config.optimizer.lr, total_steps, warmup_steps, config.schedule.power)
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_factor"]
            torch.manual_seed(derive(config.run.seed, "step", step, world.rank))  # dropout; so a resumed run draws the same
            head.begin_step(batch.labels.view(accumulation, -1), step)
            optimizer.zero_grad(set_to_none=True)
            loss, outputs = 0.0, []
            micro_batches = zip(batch.images.chunk(accumulation), batch.mirrored.chunk(accumulation), strict=True)
            for micro, (images, mirrored) in enumerate(micro_batches):
                last = micro == accumulation - 1
                with distributed.gradients_shared(model, now=last):
                    with torch.autocast(world.device.type, dtype=autocast, enabled=autocast is not None):
                        embeddings = model(prepare(images, mirrored))  # (b, D)
                    micro_loss = head(embeddings.float(), micro)
                    # the head's gradient is that of the global mean; x world_size cancels the mean that DDP takes
                    (micro_loss * (world.world_size * scaler.scale / accumulation)).backward()
                loss += float(micro_loss.detach()) / accumulation
                outputs.append(embeddings.detach())
            if not math.isfinite(loss):
                raise not_finite(f"the loss is {loss}")
            if step == 0 and not config.init.backbone:
                text, sound = judge_first_loss(loss, margin, head.num_active(), dim, head.num_people())
                (log.info if sound else log.warn)(text)
            norm = unscale_and_clip_grad_norm_(backbone, scaler.scale, config.optimizer.clip_norm)
            timed = saving.every_minutes > 0 and writer.minutes_since_save() >= saving.every_minutes and world.rank == 0
            overflow, stopping, writing, timed = distributed.any_ranks(
                [not bool(norm.isfinite()), bool(stop.name), writer.is_writing, timed], world
            )
            writer.advance(writing)
            if overflow and not (scaler.enabled and scaler.scale > 2.0**-10):
                raise not_finite("the gradient is not finite")
            if not overflow:  # of fp16; an optimizer step is that of backbone and centres, or none
                head.step(lr * config.head.lr_factor)
                optimizer.step()
            scaler.update(overflow)

            # ---- after the step: `done` optimizer steps are finished
            done = step + 1
            speed.count()
            loss_sum, loss_count = loss_sum + loss, loss_count + 1
            log.advance(done, loss)
            if done % config.log.every == 0 or done == total_steps:
                images_per_second, data_wait = speed.lap(loader.waited)
                numbers = {
                    "loss": loss_sum / loss_count,
                    "lr": lr,
                    "grad_norm": float(norm),
                    "positive_cosine": float(head.positive_cosine),
                    "images_per_second": images_per_second,
                    "data_wait": data_wait,
                    "memory_gib": peak_memory_gib(world.device),
                }
                if scaler.enabled:
                    numbers["loss_scale"] = scaler.scale
                log.train(done, numbers, speed.eta(total_steps - done))
                loss_sum, loss_count = 0.0, 0
                if data.on_bad_record == "skip":
                    for line in itertools.chain(*distributed.all_gather_objects(dataset.take_warnings(), world)):
                        log.warn(line)
            pause = time.perf_counter()
            selection = None
            stopping = stopping and done < total_steps
            if is_due(done, config.eval.every, total_steps if config.eval.at_end else 0) and not stopping:
                try:
                    selection = score(done)
                except ValueError:  # on every rank; what was trained is not lost with it, unless it is worth nothing
                    if is_finite(backbone):
                        save(done, None, last=True)
                    raise
            new_best = saving.keep_best > 0 and selection is not None and (best is None or selection > best)
            best = selection if new_best else best
            if stopping or timed or new_best or is_due(done, saving.every, total_steps):
                save(done, selection, last=stopping or done == total_steps)
            if stopping:
                again = "checkpoint.resume=auto" if saving.resume == "never" else "the same command"
                cause = stop.name or "a signal to another process"
                raise StoppedError(
                    f"{cause}: saved after step {done} of {total_steps}; {again} goes on from there", stop.status
                )
            speed.pause(time.perf_counter() - pause)
            watch.at(done, "waiting for data")

        log.info(f"finished {total_steps} steps; checkpoints, log and figures are in {folder}")


def open_data(config: EasyDict, num_processes: int) -> tuple[FaceDataset, list[PairSet]]:
    """Return the training data and the verification sets, after checking what can be checked of them before training."""
    data = config.data
    check_batch(config.train.batch_size, config.train.accumulation, num_processes)
    cache = {"auto": str(Path(config.run.output) / "index_cache"), "off": None}.get(data.index_cache, data.index_cache)
    dataset = build_dataset(data, config.run.seed, cache)
    pair_sets = load_pair_sets(config.eval.path or data.path, config.eval.targets)
    check_names(pair_sets)
    check_metric(pair_sets, config.eval.metric)
    return dataset, pair_sets


def is_due(done: int, every: int, total_steps: int) -> bool:
    return done == total_steps or (every > 0 and done % every == 0)


def start_from(
    config: EasyDict, backbone: nn.Module, head: PartialFC, dataset: FaceDataset, world: World, autocast: torch.dtype | None
) -> InitCounts:
    """Fill backbone and class centres from another training, as the section `init` says; return how many of this rank's are."""
    init = config.init
    load_initial(backbone, Path(init.backbone))
    means = functools.partial(
        class_means,
        backbone,
        dataset.pixels_and_label,
        dataset.labels(),
        per_class=init.images_per_class,
        device=world.device,
        batch_size=config.eval.batch_size,
        autocast=autocast,
        threads=config.data.threads,
    )
    return init_centres(head, init.head, init.classes, means if init.new_classes == "images" else None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and train; return the exit status."""
    parser = make_parser("python train.py", __doc__)
    parser.add_argument("config", help="YAML file of the run, for example configs/demo_cpu.yaml")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="such as optimizer.lr=0.05")
    parser.add_argument("--print-config", action="store_true", help="print the merged configuration and stop")
    parser.add_argument("--check", action="store_true", help="check configuration, data and verification sets, and stop")
    options = parser.parse_intermixed_args(arguments)

    def run() -> None:
        config = load_config(options.config, options.overrides, NAMED)
        if options.print_config:
            print(dump_config(config), end="")
        elif options.check:
            dataset, pair_sets = open_data(config, num_processes=1)
            sets = [f"{pair_set.name}: {len(pair_set.same)} pairs" for pair_set in pair_sets]
            print("\n".join([dataset.describe(), *dataset.warnings, *sets, "nothing wrong was found"]))
        else:
            with StopSignal() as stop:
                train(config, stop)

    return run_main(run)


if __name__ == "__main__":
    raise SystemExit(main())
