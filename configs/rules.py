"""The rules of a configuration, besides the types that base.yaml defines: allowed names, ranges, and rules across keys."""

import itertools
import re
import sys
from typing import Any

from utils.schedule import SCHEDULES
from utils.text import did_you_mean

SOURCES = ("recordio", "folder", "list", "tar", "synthetic")

# key of a list -> the keys of its entries, with their defaults
ENTRIES: dict[str, dict[str, Any]] = {
    "data.sources": {"path": "", "source": "recordio", "repeat": 1.0},
    "head.stages": {"epochs": 0.0, "steps": 0, "sample_rate": -1.0, "scale": -1.0, "margin": -1.0},
    "optimizer.rules": {"match": "", "lr_factor": 1.0, "weight_decay": -1.0},
}

# an entry of `tasks`: keys with their defaults, and sections, which begin with those of the run
TASK: dict[str, Any] = {"name": "", "batch_size": 0, "weight": 1.0}
TASK_SECTIONS = ("data", "head", "loss")
# keys of these sections that all tasks share
_OF_ALL_TASKS = {
    "data": ("image_size", "index_cache", "on_bad_record", "max_bad_fraction", "threads", "decoders", "prefetch"),
    "head": ("schedule",),
}

RENAMED = {
    "head.state": "head.storage",
    "optimizer.lr_factors": "optimizer.rules, a list of entries like {match: layer1, lr_factor: 0.1}",
}

CHOICES = {
    "run.device": ("auto", "cpu", "cuda"),
    "data.source": SOURCES,
    "data.shuffle": ("full", "block"),
    "data.on_bad_record": ("error", "skip"),
    "data.decoders": ("auto", "threads", "process"),
    "init.new_classes": ("images", "random"),
    "head.sampling": ("uniform", "neighbours"),
    "head.neighbours_search": ("auto", "exact", "inverted_lists"),
    "head.storage": ("exact", "lean", "tiny", "mini"),
    "head.placement": ("device", "host", "disk"),
    "head.optimizer": ("same", "sgd", "adamw"),
    "head.logit_correction": ("none", "log_r"),
    "head.inactive_rows": ("keep", "decay"),
    "head.schedule": ("same", *SCHEDULES),
    "head.matmul_dtype": ("auto", "fp32", "bf16"),
    "head.wire_dtype": ("fp32", "bf16"),
    "head.kernels": ("auto", "plain", "separate", "fused_64x128", "fused_128x128", "fused_128x256"),
    "optimizer.name": ("sgd", "adamw", "lamb"),
    "schedule.kind": SCHEDULES,
    "teacher.embedding_loss": ("cosine", "mse"),
    "train.compile": ("auto", "off", "default", "reduce-overhead", "max-autotune"),
    "train.precision": ("fp32", "bf16", "fp16", "auto"),
    "eval.metric": ("accuracy", "auc", "eer", "tar@1e-1", "tar@1e-2", "tar@1e-3", "tar@1e-4", "tar@1e-5", "tar@1e-6", "rank_1"),
}

_SHARES = (
    "augment.affine", "augment.affine_shift", "augment.crop", "augment.low_resolution", "augment.photometric",
    "augment.photometric_strength", "augment.blur", "augment.grayscale", "augment.jpeg", "augment.cutout",
    "head.sample_rate", "head.interclass_filtering_threshold", "schedule.factor",
)  # fmt: skip
_COUNTS = (
    "data.num_classes", "data.num_images", "head.chunk", "eval.every", "checkpoint.every", "checkpoint.keep_every",
    "checkpoint.keep_best", "checkpoint.max_failed_saves",
)  # fmt: skip
_COUNTS_FROM_1 = ("data.block", "data.window", "head.neighbours_every", "checkpoint.keep_last", "log.every")
_RATES = (
    "head.lr_factor", "optimizer.lr", "optimizer.weight_decay", "optimizer.clip_norm", "optimizer.clip_value", "schedule.min_lr"
)  # fmt: skip
_WEIGHTS = (
    "loss.topology", "schedule.power", "schedule.warmup_epochs", "teacher.embedding", "teacher.relations", "teacher.logits",
)  # fmt: skip
# key -> (smallest, largest), inclusive. No use needs more than 2**40 or 1e30; larger values would overflow a dtype or a date
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_SHARES, (0, 1)),
    **dict.fromkeys(_COUNTS, (0, 2**40)),
    **dict.fromkeys(_COUNTS_FROM_1, (1, 2**40)),
    **dict.fromkeys(_RATES, (0, 1e30)),
    **dict.fromkeys(_WEIGHTS, (0, 1e6)),
    "run.seed": (0, 2**62),
    "run.threads": (0, 4096),
    "data.image_size": (48, 448),
    "data.max_bad_fraction": (0, 0.999),
    "data.threads": (1, 256),
    "data.prefetch": (1, 1024),
    "augment.affine_degrees": (0, 180),
    "augment.affine_scale": (0, 0.9),
    "augment.crop_area": (0.01, 1),
    "augment.low_resolution_side": (0.02, 1),
    "augment.blur_sigma": (0.2, 50),
    "augment.jpeg_quality": (1, 95),
    "augment.cutout_side": (0.01, 1),
    "backbone.train_last": (0, 10_000),
    "backbone.lora_rank": (0, 4096),
    "init.images_per_class": (1, 100_000),
    "compatible.weight": (0, 1000),
    "loss.focal": (0, 10),
    "loss.label_smoothing": (0, 0.999),
    "head.sub_centers": (1, 64),
    "head.neighbours": (1, 1000),
    "head.neighbours_probes": (1, 16384),
    "head.weight_decay": (-1, 1e30),
    "head.cache_mb": (-1, 2**40),
    "optimizer.momentum": (0, 0.9999),
    "optimizer.beta2": (0, 0.999999),
    "optimizer.layer_decay": (0.01, 1),
    "schedule.warmup_steps": (0, 99_999_999),
    "train.max_steps": (0, 99_999_999),  # the name of a checkpoint has eight digits
    "train.ema": (0, 0.99999),
    "train.batch_size": (1, 2**31),
    "train.accumulation": (1, 2**31),
    "teacher.temperature": (0.01, 1000),
    "eval.batch_size": (1, 2**31),
    "checkpoint.every_minutes": (0, 1e9),
}

_LARGEST = {"run.timeout_minutes": 1e6, "train.epochs": 1e6, "backbone.lora_alpha": 1e6}
# must be above 0 and at most _LARGEST, or 1e30
POSITIVE = (
    "run.timeout_minutes", "backbone.lora_alpha", "compatible.weight", "head.sample_rate", "optimizer.eps", "train.epochs",
)  # fmt: skip


def check_rules(tree: dict[str, Any]) -> None:
    """Raise ValueError at the first broken rule; `tree` is the merged configuration as plain dicts."""

    def get(name: str) -> Any:
        section, key = name.split(".")
        return tree[section][key]

    for name, allowed in CHOICES.items():
        if get(name) not in allowed:
            hint = did_you_mean(get(name), allowed)
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {get(name)!r}.{hint}")
    for name, (low, high) in RANGES.items():
        if get(name) < low or get(name) > high:
            rule = f"at least {low}" if get(name) < low and high >= 2**31 else f"from {low} to {high:.15g}"
            raise ValueError(f"{name} must be {rule}, got {get(name)}")
    for name in POSITIVE:
        if get(name) <= 0:
            raise ValueError(f"{name} must be above 0, got {get(name)}")
        if get(name) > _LARGEST.get(name, 1e30):
            raise ValueError(f"{name} must be at most {_LARGEST.get(name, 1e30):g}, got {get(name)}")
    _check_run_name(tree["run"]["name"])
    _check_across(tree)


def check_tasks(tree: dict[str, Any]) -> None:
    """Raise ValueError at the first broken rule of the entries of `tasks`, whose sections are checked already."""
    tasks, total = tree["tasks"], tree["train"]["batch_size"]
    names = [task["name"] for task in tasks]
    for number, task in enumerate(tasks):
        where = f"tasks[{number}]"
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", task["name"]):
            raise ValueError(f"{where}.name must be letters a to z, digits and _, as part of a file name, got {task['name']!r}")
        own = names.count(task["name"]) == 1 and not task["name"].startswith(("teacher_", "topology_"))
        if not own or task["name"] in ("backbone", "ema", "trainer", "compatible", "landmarks"):
            raise ValueError(f"{where}.name must be its own, and no other part of a checkpoint, got {task['name']!r}")
        if not 0 < task["weight"] <= 1e6:
            raise ValueError(f"{where}.weight must be above 0 and at most 1e6, got {task['weight']}")
        if task["batch_size"] < 0:
            raise ValueError(f"{where}.batch_size must be 0 (by the number of images) or more, got {task['batch_size']}")
        for section, keys in _OF_ALL_TASKS.items():
            for key in keys:
                if task[section][key] != tree[section][key]:
                    raise ValueError(
                        f"{where}.{section}.{key} must be that of all tasks, {tree[section][key]}, got {task[section][key]}; "
                        f"set {section}.{key}"
                    )
    if tasks and tree["compatible"]["path"]:
        raise ValueError(f"compatible.path is for a run without tasks, got {len(tasks)}; take one of the two out")
    given = sum(task["batch_size"] for task in tasks)
    if tasks and (given > total or (given != total and all(task["batch_size"] for task in tasks))):
        raise ValueError(f"tasks: their batch_size add up to {given}, train.batch_size is {total}; make the two equal")


def _check_run_name(name: str) -> None:
    """Reject a name that would put the run folder anywhere but directly in run.output."""
    if "/" in name or "\\" in name or name in (".", "..") or name != name.strip() or len(name.encode()) > 200:
        raise ValueError(
            "run.name must be the name of one folder, without / or \\ and of at most 200 bytes: the run folder is "
            f"run.output/run.name; got {name!r}. For another place set run.output=FOLDER"
        )


def _check_across(tree: dict[str, Any]) -> None:
    data, train, schedule = tree["data"], tree["train"], tree["schedule"]
    _check_sources(data)
    _check_parameter_rules(tree["optimizer"]["rules"])
    _check_optimizers(tree["optimizer"], tree["head"]["optimizer"])
    init = tree["init"]
    if init["head"] and not init["backbone"]:
        raise ValueError(f"init.head needs init.backbone: centres mean nothing to another network, got {init['head']!r} alone")
    for key in ("train_last", "lora_rank"):
        if tree["backbone"][key] and not init["backbone"]:
            raise ValueError(f"backbone.{key} needs init.backbone, weights worth keeping, got {tree['backbone'][key]} without")
    if init["classes"] and not init["head"]:
        raise ValueError(f"init.classes needs init.head, whose labels it maps, got {init['classes']!r} alone")
    _check_compatible(tree["compatible"], tree["head"]["sub_centers"])
    if -1 < tree["head"]["weight_decay"] < 0:
        raise ValueError(f"head.weight_decay must be 0 or more, or -1 for the optimizer's, got {tree['head']['weight_decay']}")
    stages = tree["head"]["stages"]
    _check_stages(stages)
    rates = [tree["head"]["sample_rate"], *(stage["sample_rate"] for stage in stages if stage["sample_rate"] != -1)]
    if tree["head"]["sampling"] == "neighbours" and min(rates) == 1:
        raise ValueError("head.sampling=neighbours needs head.sample_rate below 1; at 1 every class is in every step")
    if tree["head"]["placement"] == "disk" and tree["checkpoint"]["background"]:
        raise ValueError(
            "head.placement=disk needs checkpoint.background=false, got true: a copy of the class centres in memory, to write "
            "from beside training, would be as large as what does not fit there"
        )
    if tree["head"]["sampling"] == "neighbours" and tree["head"]["sub_centers"] > 1:
        raise ValueError(
            "head.sampling must be uniform where a class has several centres, got neighbours with head.sub_centers="
            f"{tree['head']['sub_centers']}; the graph of neighbours knows one for each class. Set one of them back"
        )
    if data["image_size"] % 16:
        near = 16 * round(data["image_size"] / 16)
        raise ValueError(f"data.image_size must be a multiple of 16, got {data['image_size']}; the nearest is {near}")
    if data["decoders"] == "process" and not sys.platform.startswith("linux"):
        raise ValueError("data.decoders=process needs Linux, where a process can be forked safely; set data.decoders=threads")
    if data["source"] == "synthetic":
        for key in ("num_classes", "num_images"):
            if data[key] < 1:
                raise ValueError(f"data.{key} must be at least 1 for data.source=synthetic, got {data[key]}")
    if tree["backbone"]["sync_norm"] and train["compile"] not in ("auto", "off"):
        raise ValueError(
            f"backbone.sync_norm=true needs train.compile=off, got {train['compile']}: what other processes send cannot be "
            "compiled"
        )
    if train["batch_size"] % train["accumulation"]:
        raise ValueError(
            f"train.batch_size must be a multiple of train.accumulation, got {train['batch_size']} and {train['accumulation']}"
        )
    _check_schedule(schedule, tree)
    _check_teacher(tree)
    if not tree["tasks"]:  # else of each
        _check_landmarks(tree["backbone"]["name"], data, train["compile"])
    if len(set(tree["eval"]["targets"])) != len(tree["eval"]["targets"]):
        raise ValueError(f"eval.targets names a set twice: {', '.join(tree['eval']['targets'])}")


def _check_landmarks(backbone: str, data: dict[str, Any], mode: str) -> None:
    if backbone.startswith("vit_kprpe") != bool(data["landmarks"]):
        raise ValueError(
            f"data.landmarks is for backbone.name=vit_kprpe_..., which needs the file, got {data['landmarks']!r} with "
            f"{backbone}; face data landmarks writes it"
        )
    if data["landmarks"] and (data["sources"] or data["on_bad_record"] == "skip"):
        raise ValueError(
            "data.landmarks goes without data.sources and data.on_bad_record=skip: it is of the images of one set, got "
            f"{data['landmarks']!r}; name several sets as tasks"
        )
    if data["landmarks"] and mode in ("reduce-overhead", "max-autotune"):
        raise ValueError(f"train.compile must be default or off with data.landmarks, which no CUDA graph takes, got {mode}")


def _check_compatible(compatible: dict[str, Any], sub_centers: int) -> None:
    if compatible["classes"] and not compatible["path"]:
        raise ValueError(f"compatible.classes needs compatible.path, whose labels it maps, got {compatible['classes']!r} alone")
    if compatible["path"] and sub_centers > 1:
        raise ValueError(
            f"compatible.path needs head.sub_centers=1, got {sub_centers}: an old gallery is near one centre of each person"
        )


def _check_teacher(tree: dict[str, Any]) -> None:
    teacher = tree["teacher"]
    used = any(teacher[key] > 0 for key in ("embedding", "relations", "logits"))
    if teacher["path"] and not used:
        raise ValueError(
            f"teacher.path={teacher['path']} needs a weight above 0, got none; set teacher.embedding, relations or logits"
        )
    if used and not teacher["path"]:
        raise ValueError("teacher.embedding, relations and logits need teacher.path, got ''; name a network, or set them to 0")
    if teacher["path"] == "average" and not tree["train"]["ema"]:
        raise ValueError("teacher.path=average needs train.ema, the decay of that average, got 0; set it, such as 0.999")
    if teacher["logits"] and (teacher["path"] == "average" or tree["tasks"] or tree["head"]["sub_centers"] > 1):
        raise ValueError(
            "teacher.logits goes without tasks, teacher.path=average and head.sub_centers: each class has one centre of the "
            f"teacher, got it with {teacher['path']!r}; set teacher.embedding or teacher.relations"
        )
    table = teacher["path"].endswith(".npy")
    data = tree["data"]
    if table and (tree["tasks"] or teacher["logits"] or data["on_bad_record"] == "skip" or data["sources"]):
        raise ValueError(
            "teacher.path, a table, goes without tasks, data.sources, teacher.logits and data.on_bad_record=skip: its rows are "
            f"the images of one set, got {teacher['path']!r}; name a network instead"
        )
    if teacher["options"] and (table or teacher["path"] in ("", "average")):
        raise ValueError(f"teacher.options is for a file or a run in teacher.path, got {teacher['options']!r}; take it out")


def _check_schedule(schedule: dict[str, Any], tree: dict[str, Any]) -> None:
    train, kinds = tree["train"], {schedule["kind"], tree["head"]["schedule"]} - {"same"}
    if not train["max_steps"] and schedule["warmup_epochs"] >= train["epochs"]:
        raise ValueError(
            f"schedule.warmup_epochs must be below train.epochs, got {schedule['warmup_epochs']} and {train['epochs']}"
        )
    for first, second in (("warmup_epochs", "warmup_steps"), ("milestones", "milestone_steps")):
        if schedule[first] and schedule[second]:
            raise ValueError(
                f"schedule.{first} and schedule.{second} say the same in two units, got {schedule[first]} and "
                f"{schedule[second]}; set one of them back"
            )
    key = "milestone_steps" if schedule["milestone_steps"] else "milestones"
    milestones = schedule[key]
    if milestones and "step" not in kinds:
        raise ValueError(f"schedule.{key} is for schedule.kind=step, got {milestones} with {schedule['kind']}; take it out")
    if not milestones and "step" in kinds:
        raise ValueError("schedule.milestones must name the epochs after which schedule.kind=step lowers the rate, got []")
    if any(high <= low for low, high in itertools.pairwise([0.0, *milestones])):
        raise ValueError(f"schedule.{key} must ascend and be above 0, got {milestones}")
    if any(milestone != int(milestone) or milestone > 1e8 for milestone in schedule["milestone_steps"]):
        raise ValueError(f"schedule.milestone_steps must be whole numbers of optimizer steps, got {milestones}")
    min_lr, lr = schedule["min_lr"], tree["optimizer"]["lr"]
    if min_lr and not kinds & {"poly", "cosine"}:
        raise ValueError(f"schedule.min_lr is for poly and cosine, got {min_lr} with {schedule['kind']}; take it out")
    if min_lr > lr:
        raise ValueError(f"schedule.min_lr must be at most optimizer.lr, got {min_lr} and {lr}")


def _check_optimizers(optimizer: dict[str, Any], of_head: str) -> None:
    if optimizer["name"] == "lamb" and of_head == "same":
        raise ValueError(
            "head.optimizer must be sgd or adamw with optimizer.name=lamb, got 'same': LAMB would turn every class centre by "
            "the same angle in each step, however small its gradient"
        )
    if optimizer["nesterov"] and "sgd" not in (optimizer["name"], of_head):
        raise ValueError(f"optimizer.nesterov is for sgd, got it with optimizer.name={optimizer['name']}; take it out")
    if optimizer["nesterov"] and not optimizer["momentum"]:
        raise ValueError("optimizer.nesterov needs optimizer.momentum above 0, got 0; take it out, or set the usual 0.9")


def _check_parameter_rules(rules: list[dict[str, Any]]) -> None:
    for number, rule in enumerate(rules):
        name, decay = f"optimizer.rules[{number}]", rule["weight_decay"]
        if not rule["match"]:
            raise ValueError(f"{name}.match must name a part of the backbone, a pattern, norms or biases, got ''")
        if not 0 <= rule["lr_factor"] <= 1e30:
            raise ValueError(f"{name}.lr_factor must be 0 or more, got {rule['lr_factor']}")
        if decay != -1 and not 0 <= decay <= 1e30:
            raise ValueError(f"{name}.weight_decay must be 0 or more, or -1 for the optimizer's, got {decay}")


def _check_stages(stages: list[dict[str, Any]]) -> None:
    for number, stage in enumerate(stages):
        name = f"head.stages[{number}]"
        if not (0 <= stage["epochs"] <= 1e6 and 0 <= stage["steps"] <= 99_999_999) or (stage["epochs"] and stage["steps"]):
            got = f"{stage['epochs']:g} and {stage['steps']}"
            raise ValueError(f"{name} must begin after some epochs, or steps, from 0 on, got {got}; set one of the two")
        if stage["sample_rate"] != -1 and not 0 < stage["sample_rate"] <= 1:
            raise ValueError(f"{name}.sample_rate must be above 0 and at most 1, got {stage['sample_rate']}")
        if all(stage[key] == -1 for key in ("sample_rate", "scale", "margin")):
            raise ValueError(f"{name} must set sample_rate, scale or margin; add one, or take the entry out")


def _check_sources(data: dict[str, Any]) -> None:
    if data["sources"] and data["path"]:
        raise ValueError(f"data.path must be empty if data.sources is given, got {data['path']!r}; make it one of the sources")
    for number, entry in enumerate(data["sources"]):
        name = f"data.sources[{number}]"
        if entry["source"] not in SOURCES or entry["source"] == "synthetic":
            raise ValueError(f"{name}.source must be one of {', '.join(SOURCES[:-1])}, got {entry['source']!r}")
        if not entry["path"]:
            raise ValueError(f"{name}.path must name a set, got ''")
        if not 0 < entry["repeat"] <= 1000:
            raise ValueError(f"{name}.repeat must be above 0 and at most 1000, times in an epoch, got {entry['repeat']}")
