"""What a run trains: backbone, heads, their optimizers and averages, built, compiled, and resumed or begun with other weights.

torch.compile: only training runs the compiled network: its batches have one shape. Evaluation and checkpoints use the network
itself, so the names in its state dict do not change, and no other shape or mode has to be compiled. CUDA graphs are those of
make_graphed_callables: torch.compile's own look at each weight in every pass, which takes longer than launching them.

The moving average (EMA): after good optimizer step number t (from 1), average <- d average + (1 - d) weights with d =
min(decay, (1 + t) / (10 + t)): a new average follows the weights closely, and the more steps it has seen, the longer it
remembers (Polyak and Juditsky, 1992, for the average; the warm-up of d is that of tf.train.ExponentialMovingAverage).
BatchNorm's means and variances are averaged in the same way, since they belong to the averaged weights no less than to the
weights; its counters of batches are copied.
"""

import copy
import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from easydict import EasyDict
from torch import Tensor, nn

from backbones import backbone_arguments, build_backbone
from backbones.checkpointing import set_checkpointing
from backbones.lora import add_lora, all_called
from eval.embed import EmbedSettings, class_means
from losses import margin_arguments
from losses.margin import Margin
from partial_fc import HeadConfig, PartialFC, check_head_fits, check_loss, head_config
from partial_fc.init import InitCounts, has_head, init_centres
from utils.allocator import out_of_memory
from utils.checkpoint.format import BACKBONE, EMA, SOFTMAX, TRAINER, read_manifest
from utils.checkpoint.reading import load_initial
from utils.checkpoint.resume import SavedState, restore
from utils.checkpoint.trainer import TrainerState, trained_names
from utils.checkpoint.writer import Shard
from utils.distributed import SharedError, World, all_gather_objects, as_data_parallel, raise_on_all_ranks
from utils.distributed.patience import patiently
from utils.distributed.sync_norm import synchronise_norms
from utils.image import normalise
from utils.memory import BackboneMemory, Undrawn, available_bytes, backbone_memory, bytes_beside_heads
from utils.optim import ParameterRule, build_optimizer, freeze, frozen_parts, layer_numbers, set_training
from utils.precision import AUTOCAST, LossScaler
from utils.randomness import derive
from utils.text import first_line, prefix_errors

from .compatible import COMPATIBLE, fill_old_centres
from .setup import Setup, naming_task
from .stages import head_stages, staged_margin
from .teachers import PROJECTION, Teacher, centre_bytes
from .topology import topology_bytes

_RECORDED = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def for_training(config: EasyDict, setup: Setup, model: "Model") -> nn.Module:
    """Return what a training step calls: the backbone in its modes of training, compiled, and shared by the ranks.

    A collective call. No other thread may use CUDA meanwhile, because it may record graphs.
    """
    mode, world, device, module = setup.compile, setup.world, setup.world.device, model.backbone
    set_training(module, config.backbone.freeze_norm, frozen_parts(module, config.backbone.freeze, config.backbone.train_last))
    if mode != "off":
        warnings.filterwarnings("ignore", "TensorFloat32")  # train.tf32 decides
        # dropout, drop path and token masks are then those of the network itself; the compiler's own would be others
        torch._inductor.config.fallback_random = True
        recorded = _RECORDED.get(mode) if device.type == "cuda" else None
        module = torch.compile(module, mode=recorded or mode, dynamic=False)  # type: ignore[assignment]
        if recorded:
            count, size = config.train.batch_size // config.train.accumulation // world.world_size, config.data.image_size
            images = torch.zeros(count, size, size, 3, dtype=torch.uint8, device=device)
            module = Recorded(module, normalise(images), model.autocast)
    return as_data_parallel(module, world)


class Recorded(nn.Module):
    """A network whose passes over batches like `images` are CUDA graphs; its parameters and buffers are the same tensors.

    autocast is the dtype of mixed precision, None = fp32. The passes that warm it up change no parameter and no buffer.
    ValueError if the network cannot be recorded; no CUDA work of this process can be relied on then.
    """

    def __init__(self, network: nn.Module, images: Tensor, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.network = network
        before = copy.deepcopy(dict(network.named_buffers()))
        mixed = torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None, cache_enabled=False)
        with mixed, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")  # which is another than that of a step
            try:
                torch.cuda.make_graphed_callables(self, (images,), allow_unused_input=True)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                cause = error.__context__ if "during capture" in str(error) else None  # what broke the recording
                why = first_line(cause or error)
                raise ValueError(f"the backbone cannot be compiled and recorded: {why}; set train.compile=off") from None
        network.load_state_dict(before, strict=False)
        self._output.detach_()  # it would keep nodes of the weights, and each gradient of a step would wait for their stream

    def forward(self, images: Tensor) -> Tensor:
        """Return the embeddings; the graph takes the place of this method."""
        self._output: Tensor = self.network(images).clone()  # no view, which could not be detached
        return self._output


class WeightAverage:
    """The moving average of a network's parameters and buffers, whose names it has."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._source, self.decay = network, decay  # d of late steps, in (0, 1)
        self.network = copy.deepcopy(network).requires_grad_(False).eval()  # the average
        self.updates = torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device)  # t
        tensors = ([*one.parameters(), *one.buffers()] for one in (self.network, network))
        self._averaged = [(mean, value) for mean, value in zip(*tensors, strict=True) if mean.is_floating_point()]

    def begin(self) -> None:
        """Begin again, with the weights as they are now."""
        self.network.load_state_dict(self._source.state_dict())
        self.updates.zero_()

    @torch.no_grad()
    def update(self, good: Tensor) -> None:
        """Take the weights of a step into the average, unless `good`, () bool, is False; the host waits for nothing."""
        self.updates += good
        count = self.updates.double()
        share = (1.0 - ((1.0 + count) / (10.0 + count)).clamp(max=self.decay)) * good
        means, values = map(list, zip(*self._averaged, strict=True))
        if share.is_cuda:
            move(means, values, share.float())
            return
        shares = {mean.dtype: share.to(mean.dtype) for mean in means}
        torch._foreach_lerp_(means, values, [shares[mean.dtype] for mean in means])

    def state(self) -> dict[str, Tensor]:
        """Return the average as a state dict of the network."""
        counters = {name: value for name, value in self._source.state_dict().items() if not value.is_floating_point()}
        return {**self.network.state_dict(), **counters}

    def load(self, state: dict[str, Tensor]) -> None:
        """Load an average that `state` returned; RuntimeError if it is of another network."""
        self.network.load_state_dict(state)


def move(means: list[Tensor], values: list[Tensor], share: Tensor) -> None:
    """Move means by a share, (), of the way to the values. On CUDA, lerp with such a share is a launch for each tensor."""
    ways = torch._foreach_sub(values, means)
    torch._foreach_mul_(ways, share)
    torch._foreach_add_(means, ways)


_OPTIMIZER_KEYS = ("name", "lr", "momentum", "weight_decay", "beta2", "eps", "nesterov", "layer_decay")


class Model(NamedTuple):
    """All that training changes."""

    backbone: nn.Module
    optimizer: torch.optim.Optimizer
    heads: dict[str, PartialFC]  # by the name of their task, and that with the centres of an old network
    scaler: LossScaler
    autocast: torch.dtype | None
    ema: WeightAverage | None = None
    compatible_weight: float = 1.0  # of the loss with the old centres
    teacher: Teacher | None = None  # which does not change; only its projection is saved

    def saved_states(self) -> dict[str, SavedState]:
        """Return all parts of a checkpoint by name; what is added here is saved, and loaded by a run that resumes."""
        margins, ema = {name: head.margin for name, head in self.heads.items()}, self.ema
        updates = None if ema is None else ema.updates
        projection = None if self.teacher is None else self.teacher.projection
        trainer = TrainerState(self.backbone, margins, self.optimizer, self.scaler, updates)
        return {
            BACKBONE: SavedState(self.backbone.state_dict, self.backbone.load_state_dict),
            TRAINER: SavedState(trainer.state, trainer.load),
            **({} if ema is None else {EMA: SavedState(ema.state, ema.load, ema.begin)}),
            **({} if projection is None else {PROJECTION: SavedState(projection.state, projection.load, lambda: None)}),
            **{name: SavedState(functools.partial(_shard, head), head.load_rows) for name, head in self.heads.items()},
        }


def _shard(head: PartialFC) -> Shard:
    return Shard(head.shard_state(), (head.first_slot, head.end_slot))


def build_model(config: EasyDict, setup: Setup) -> Model:
    """Return the model of a run from scratch; SharedError on every rank if it does not fit into the memory, with what would."""
    world, autocast, count = setup.world, AUTOCAST[setup.precision], setup.share["world_size"]
    dim = config.backbone.embedding_size
    # before the backbone takes its share; the least of all ranks, so that all say the same
    free = min(all_gather_objects(available_bytes(world), world))
    copies = (1 if config.optimizer.name == "sgd" else 2) + (config.train.ema > 0)  # of the weights
    backbone = _new_backbone(config, world, copies, free)
    margins, settings = _losses_and_heads(config, setup, autocast)
    with raise_on_all_ranks(world):
        with prefix_errors("backbone.train_last"):
            frozen = frozen_parts(backbone, config.backbone.freeze, config.backbone.train_last)
        with prefix_errors("backbone.freeze"):
            freeze(backbone, frozen)
        if config.backbone.checkpointing:
            with prefix_errors("backbone.checkpointing"):
                set_checkpointing(backbone)
        with prefix_errors("optimizer.layer_decay"):
            if config.optimizer.layer_decay != 1:
                layer_numbers(trained_names(backbone))
        with prefix_errors("optimizer.rules"):
            own = [(rule.match, rule.lr_factor, rule.weight_decay) for rule in config.optimizer.rules]
            rules = [ParameterRule(match, factor, None if decay == -1 else decay) for match, factor, decay in own]
            optimizer = build_optimizer(backbone, **{key: config.optimizer[key] for key in _OPTIMIZER_KEYS}, rules=rules)
        with prefix_errors("backbone.lora_rank"), all_called(backbone):
            memory = backbone_memory(backbone, autocast, copies, config.data.image_size)
        memory = memory if setup.teacher is None else setup.teacher.beside(memory, world.device, setup.compile in _RECORDED)
        beside = backbone_bytes(memory, config.train, count, world.device.type, free)
        if setup.teacher is not None:
            taught = setup.tasks[0]
            beside += centre_bytes(setup.teacher, config, taught, settings[taught.name], count, world.device)
        ranks, parts = world._replace(world_size=count), config.train.accumulation
        for task in setup.tasks:
            margin, classes, how = margins[task.name], task.dataset.num_classes, settings[task.name]
            check_loss(margin, how, classes)
            samples = task.order.batch_size // parts
            if task.config.loss.topology:
                beside += topology_bytes(backbone, samples, count, config.data.image_size, free - beside)
            beside += check_head_fits(margin, classes, dim, ranks, how, samples, parts, beside, free)
            if config.compatible.path:
                check_head_fits(margin, classes, dim, ranks, how.as_frozen(), samples, parts, beside, free)
    heads = _build_heads(config, setup, margins, settings)
    scaler = LossScaler(enabled=autocast is torch.float16, device=world.device)
    ema = WeightAverage(backbone, config.train.ema) if config.train.ema else None
    with raise_on_all_ranks(world):
        first, average = heads[setup.tasks[0].name], None if ema is None else ema.network
        teacher = None if setup.teacher is None else setup.teacher.on(world.device, average, first)
    return Model(backbone, optimizer, heads, scaler, autocast, ema, config.compatible.weight, teacher)


def _new_backbone(config: EasyDict, world: World, copies: int, free: int) -> nn.Module:
    """Return the network with random weights, after checking that its weights, gradients and `copies` moments fit."""
    network = {key: config.backbone[key] for key in ("name", *backbone_arguments(config.backbone.name))}

    def build() -> nn.Module:
        with prefix_errors("data"):
            backbone = build_backbone(**network, image_size=config.data.image_size)
        if config.backbone.lora_rank:
            with prefix_errors("backbone.lora_rank"):
                add_lora(backbone, config.backbone.lora_rank, config.backbone.lora_alpha)
        return backbone

    with torch.device("meta"), Undrawn():  # which takes no memory
        counts = {True: 0, False: 0}  # of the numbers that train, and of those that LoRA leaves as they are
        for parameter in build().parameters():
            counts[parameter.requires_grad] += parameter.numel()
    number, each = sum(counts.values()), 4 * (2 + copies)
    if counts[True] * each + counts[False] * 8 > free:
        raise SharedError(
            f"backbone: its {number / 1e6:,.0f} M parameters need {number * each / 2**30:,.1f} GiB with gradients and moments, "
            f"{free / 2**30:.1f} are free; {free // each / 1e6:,.0f} M would fit: set a smaller backbone.width or backbone.name"
        )
    torch.manual_seed(derive(config.run.seed, "backbone"))
    backbone = build()
    if config.backbone.sync_norm:
        synchronise_norms(backbone, world)
    return backbone.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]


def _losses_and_heads(
    config: EasyDict, setup: Setup, autocast: torch.dtype | None
) -> tuple[dict[str, Margin], dict[str, HeadConfig]]:
    """Return the margin of each task, and what its head is."""
    margins, settings = {}, {}
    steps_per_epoch = sum(task.dataset.num_images for task in setup.tasks) / config.train.batch_size
    for task in setup.tasks:
        head, loss = task.config.head, task.config.loss
        with raise_on_all_ranks(setup.world), naming_task(config, task.name):
            stages = head_stages(head, loss, steps_per_epoch)
            margins[task.name] = staged_margin({key: loss[key] for key in ("name", *margin_arguments(loss.name))}, stages)
        late = [stage.first for stage in stages if stage.first >= setup.total_steps]
        if late:
            setup.warnings.append(
                f"head.stages: {len(late)} of {len(stages)} stages begin after the last step, {setup.total_steps}: at step "
                f"{', '.join(map(str, late))}; they change nothing. Train longer, or take them out"
            )
        how = head_config(head, loss, config.optimizer, autocast, setup.world)
        settings[task.name] = dataclasses.replace(how, rates=tuple((stage.first, stage.sample_rate) for stage in stages))
    return margins, settings


def _build_heads(
    config: EasyDict, setup: Setup, margins: dict[str, Margin], settings: dict[str, HeadConfig]
) -> dict[str, PartialFC]:
    """Return the head of each task, and that with the centres of an old network. A collective call."""
    world, count, dim = setup.world, setup.share["world_size"], config.backbone.embedding_size
    heads, facts = {}, _head_sections(setup.facts)
    recorded = _head_sections({} if setup.resume_from is None else read_manifest(setup.resume_from))
    place = next(place for place in (setup.folder, *setup.folder.absolute().parents) if place.is_dir())  # for --check
    for task in setup.tasks:
        margin, classes, how = margins[task.name], task.dataset.num_classes, settings[task.name]
        with raise_on_all_ranks(world):
            heads[task.name] = PartialFC(margin, classes, dim, world.rank, count, task.seed, how, world.device, place)
        with raise_on_all_ranks(world):  # which communicates, and so raises on all of them or on none
            if world.world_size == count:  # not for --check, where one process stands for all
                was = str(recorded.get(task.name, {}).get("kernels", ""))
                if form := heads[task.name].choose_form(task.order.batch_size // config.train.accumulation, was):
                    facts[task.name]["kernels"] = form
    if config.compatible.path:
        with raise_on_all_ranks(world):
            heads[COMPATIBLE] = heads[setup.tasks[0].name].frozen(place)
    return heads


def _head_sections(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the section `head` of each task of a manifest, or of a part of one, by the name of the task."""
    config = manifest.get("config", {})
    return {part.get("name", SOFTMAX): part.get("head", {}) for part in config.get("tasks") or [config]}


def backbone_bytes(memory: BackboneMemory, train: Any, processes: int, device: str, free: int) -> int:
    """Return the bytes that a process needs beside its heads for the batch of the section `train`; ValueError if not free."""
    images = train.batch_size // train.accumulation // processes
    parts = (part for part in range(1, images // 2 + 1) if images % part == 0)
    part = next((part for part in parts if bytes_beside_heads(memory, images // part, device) <= free), 0)
    needed = bytes_beside_heads(memory, images, device)
    if part == 1:
        return needed
    fix = "take fewer, or a smaller backbone"
    fix = f"{train.batch_size // part} would fit, or train.accumulation={part * train.accumulation}" if part else fix
    raise ValueError(
        f"train.batch_size={train.batch_size}: the backbone needs {needed / 2**30:.1f} GiB for {images} images in one process, "
        f"{free / 2**30:.1f} are free; {fix}"
    )


def resume_or_init(config: EasyDict, setup: Setup, model: Model, images: bool = True) -> tuple[int, InitCounts]:
    """Load the checkpoint to resume, or the weights to begin with; return the steps done, and whence this rank has its centres.

    Without `images`, new classes start at random, whatever init.new_classes says.

    Raises:
        SharedError: on every rank, if they do not fit.
    """
    with raise_on_all_ranks(setup.world), patiently(setup.world, "reading weights"):
        if setup.resume_from is not None:
            return restore(setup.resume_from, model.saved_states()), InitCounts(0, 0, 0)
        if config.compatible.path:
            fill_old_centres(model.heads[COMPATIBLE], config, setup.tasks[0].dataset, setup.world.device, images)
        if config.init.backbone:
            return 0, _init(config, setup, model, images and config.init.new_classes == "images")
    return 0, InitCounts(0, 0, 0)


def _init(config: EasyDict, setup: Setup, model: Model, images: bool) -> InitCounts:
    """Fill the backbone and the class centres from another training, as the section `init` says."""
    init, counts = config.init, []
    load_initial(model.backbone, Path(init.backbone), config.data.image_size)
    if model.ema is not None:
        model.ema.begin()
    for number, task in enumerate(setup.tasks):
        means = functools.partial(
            class_means,
            model.backbone,
            functools.partial(task.dataset.pixels_and_label, size=config.data.image_size),
            task.dataset.labels(),
            per_class=init.images_per_class,
            device=setup.world.device,
            settings=EmbedSettings(config.eval.batch_size, model.autocast, config.data.threads, config.data.image_size),
        )
        # labels of another training, and init.classes, are those of the first task, unless it had a task of that name
        source = init.head if number == 0 or has_head(init.head, task.name) else ""
        classes = "" if number else init.classes
        counts.append(init_centres(model.heads[task.name], source, classes, means if images else None, task.name))
    return InitCounts(*map(sum, zip(*counts, strict=True)))
