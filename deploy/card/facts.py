"""What a checkpoint tells of its network: the data and the recipe of its training, in words.

A manifest may hold any values under any keys of its configuration; what is missing is left out, and nothing is trusted to have
a type.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from utils.schedule import steps_of
from utils.text import one_line

Facts = list[tuple[str, str]]
Config = Mapping[str, Mapping[str, Any]]  # section -> key -> value

_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", [], {})  # values that say that something is not used
_NOT_OF_THE_LOSS = ("name", "focal", "label_smoothing", "entropy_weights", "topology")
_NOT_OF_THE_BACKBONE = (
    "name", "embedding_size", "freeze", "freeze_norm", "sync_norm", "checkpointing", "train_last", "lora_rank", "lora_alpha",
)  # fmt: skip
_MOMENTS = {"sgd": ("momentum", "nesterov")}
_OF_ADAM = ("momentum", "beta2", "eps")
_OF_SCHEDULE = {"poly": ("power", "min_lr"), "cosine": ("min_lr",), "step": ("milestones", "milestone_steps", "factor")}
_LONGEST = 300  # characters of a value
_LENGTHS = ("epochs", "steps")


def words(value: Any) -> str:
    """Return a value of a configuration in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):  # a stage of the head, in which -1 stands for what stays; it has epochs or steps
        known = {key: item for key, item in value.items() if item != -1.0 and (item or key not in _LENGTHS)}
        return one_line(" ".join(f"{key}={words(item)}" for key, item in known.items()))[:_LONGEST]
    if isinstance(value, list):
        between = "; " if any(isinstance(item, dict) for item in value) else " "
        return one_line(between.join(words(item) for item in value[:_LONGEST]))[:_LONGEST]
    return one_line(value)[:_LONGEST]


def backbone_words(config: Config) -> str:
    """Return the name of the network of a configuration and its arguments, "" if it has none."""
    section = config.get("backbone", {})
    return _named(section, "name", [key for key in section if key not in _NOT_OF_THE_BACKBONE])


def tasks_of(config: Config) -> list[dict[str, Any]]:
    """Return the entries of `tasks`, which a checkpoint's manifest was checked for."""
    found: Any = config.get("tasks")
    return list(found) if isinstance(found, list) else []


def _data_of(config: Config) -> list[Mapping[str, Any]]:
    return [task["data"] for task in tasks_of(config)] or [config.get("data", {})]


def data_facts(config: Config, signature: Mapping[str, Any]) -> Facts:
    """Return name, kind, people, images and hash of labels of the training set; `signature` is the manifest's run_signature."""
    data, parts = config.get("data", {}), _data_of(config)
    paths: list[Any] = []
    for part in parts:
        several: Any = part.get("sources")
        entries = several if isinstance(several, list) else []
        paths += [entry.get("path") for entry in entries if isinstance(entry, dict)] or [part.get("path")]
    names = [PurePath(path).name for path in paths if isinstance(path, str) and path]  # folders above may name the user
    kinds = [words(part["source"]) for part in parts if part.get("source")]
    found = [("training set", ", ".join(names)), ("kind", ", ".join(dict.fromkeys(kinds)))]
    for title, key in (("people (classes)", "num_classes"), ("images", "num_images")):
        value = signature.get(key)
        found.append((title, f"{value:,}" if type(value) is int else ""))
    size = data.get("image_size")
    found.append(("size of the images", f"{size} x {size} pixels" if type(size) is int else ""))
    labels = signature.get("labels")
    found.append(("hash of the labels", words(labels) if isinstance(labels, str) else ""))
    return _present(found)


def _head_facts(name: str, loss: Mapping[str, Any], head: Mapping[str, Any]) -> Facts:
    """Return the facts of a loss and its head, with ` of TASK` after their titles."""
    sampled = ("sampling", "neighbours") if head.get("sampling") == "neighbours" else ()
    return [
        (f"loss{name}", _named(loss, "name", [key for key in loss if key not in _NOT_OF_THE_LOSS])),
        *((f"{key.replace('_', ' ')}{name}", _unless_off(loss.get(key))) for key in _NOT_OF_THE_LOSS[1:]),
        (f"head{name}", _pairs(head, ("sample_rate", "stages", "sub_centers", "storage", *sampled))),
    ]


def recipe_facts(config: Config, step: int, signature: Mapping[str, Any]) -> Facts:
    """Return how the network was trained: loss, head, optimizer, schedule, batch, length, precision, augmentation."""
    parts = [(f" of {one_line(task['name'])}", task["loss"], task["head"]) for task in tasks_of(config)]
    parts = parts or [("", config.get("loss", {}), config.get("head", {}))]
    optimizer, schedule, train, augment = (config.get(name, {}) for name in ("optimizer", "schedule", "train", "augment"))
    images, batch = signature.get("num_images"), signature.get("batch_size")
    epochs = f", {step * batch / images:.2f} epochs" if type(images) is int and images and type(batch) is int else ""
    flips = ["mirrored with probability 1/2"] if all(part.get("flip") is True for part in _data_of(config)) else []
    start, backbone = config.get("init", {}).get("backbone"), config.get("backbone", {})
    teacher = config.get("teacher", {})
    by = ("embedding_loss",) if teacher.get("embedding") else ()
    of_schedule = _OF_SCHEDULE.get(str(schedule.get("kind")), ())
    return _present(
        [
            *(fact for name, loss, head in parts for fact in _head_facts(name, loss, head)),
            ("optimizer", _optimizer_words(optimizer)),
            ("schedule", _named(schedule, "kind", [*of_schedule, "warmup_epochs", "warmup_steps"])),
            ("batch", f"{batch:,} images" if type(batch) is int else ""),
            ("length", f"{step:,} optimizer steps{epochs}"),
            ("precision", words(train["precision"]) if train.get("precision") else ""),
            ("teacher", _of_network(teacher, ("embedding", *by, "relations", "logits"))),
            ("compatible with", _of_network(config.get("compatible", {}), ("weight",))),
            ("trained in part", _pairs(backbone, ("freeze", "freeze_norm", "train_last"))),
            ("rank of LoRA", _unless_off(backbone.get("lora_rank"))),
            ("moving average of the weights", _unless_off(train.get("ema"))),
            ("augmentation", "; ".join(filter(None, [*flips, _augment_words(augment)])) or "none"),
            ("initial weights", (PurePath(start).name or "random") if isinstance(start, str) else ""),
            ("seed", words(signature["seed"]) if "seed" in signature else ""),
        ]
    )


def planned_steps(config: Config, signature: Mapping[str, Any]) -> int | None:
    """Return the steps that a run was to take, None if its manifest does not tell."""
    train: Any = config.get("train", {})
    most, epochs = train.get("max_steps"), train.get("epochs")
    images: Any = signature.get("num_images")
    batch: Any = signature.get("batch_size")
    if type(most) is int and most > 0:
        return int(most)
    if type(images) is int and type(batch) is int and batch and type(epochs) in (int, float) and 0 < epochs < 1e9:
        return steps_of(epochs, images, batch)
    return None


def _optimizer_words(section: Mapping[str, Any]) -> str:
    keys = ("lr", *_MOMENTS.get(str(section.get("name")), _OF_ADAM), "weight_decay", "clip_value", "clip_norm")
    decay = ("layer_decay",) if section.get("layer_decay", 1.0) != 1.0 else ()
    return _named(section, "name", [*keys, *decay])


def _augment_words(section: Mapping[str, Any]) -> str:
    """Return the operations that are on, each with its strength, whose key begins with that of the operation."""
    operations = [key for key in section if not any(key.startswith(f"{other}_") for other in section)]
    used = [key for key in operations if section[key] not in _OFF]
    return _pairs(section, [key for key in section if any(key == one or key.startswith(f"{one}_") for one in used)])


def _named(section: Mapping[str, Any], key: str, keys: Sequence[str]) -> str:
    """Return 'name: key=value, ...' of a section whose `key` picks a class."""
    if section.get(key) in _OFF:
        return ""
    pairs = _pairs(section, keys)
    return f"{words(section[key])}{f': {pairs}' if pairs else ''}"


def _of_network(section: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return 'FILE: key=value, ...' of a section that names another network; folders above may name the user."""
    path = section.get("path")
    return _named({**section, "path": PurePath(path).name if isinstance(path, str) else ""}, "path", keys)


def _pairs(section: Mapping[str, Any], keys: Any) -> str:
    return ", ".join(f"{key}={words(section[key])}" for key in keys if section.get(key) not in _OFF)


def _unless_off(value: Any) -> str:
    return "" if value in _OFF else words(value)


def _present(facts: Facts) -> Facts:
    return [(name, value) for name, value in facts if value]
