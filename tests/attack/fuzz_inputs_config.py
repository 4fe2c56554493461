"""Inputs that hold settings: configurations, overrides of the command line, configurations of arcface_torch."""

import json
from pathlib import Path
from typing import Any

import yaml

from backbones import backbone_arguments
from losses import MARGINS, margin_arguments

from .fuzz_files import Case, Entry
from .fuzz_grammar import TEXTS, Rng, change_tree, damage, pick, value
from .fuzz_inputs import Input, Sound
from .fuzz_seeds import CONFIG

_BASE = Path(__file__).parents[2] / "configs" / "base.yaml"


def inputs() -> dict[str, Input]:
    """Return the inputs by name."""
    return {
        "yaml": Input({}, [_yaml_tree, _yaml_text], 700, 20),
        "overrides": Input({"tiny.yaml": CONFIG.encode()}, [_overrides], 700, 20),
        "arcface-config": Input({}, [_arcface_config], 256, 20),
    }


# ---- configurations


def _yaml_tree(sound: Sound, rng: Rng) -> Case:
    """Return a case with a configuration that is well-formed YAML of wrong values."""
    base = _keys()
    section = str(pick(rng, sorted(base)))
    tree = yaml.safe_load(CONFIG)
    tree.setdefault(section, {})
    key = str(pick(rng, sorted(base[section])))
    kind = rng.random()
    tree[section][key] = (
        value(rng) if kind < 0.6 else change_tree(base[section][key], rng) if kind < 0.8 else base[section][key]
    )
    if rng.random() < 0.1:
        tasks = [{"name": "a", section: tree[section]}, {"name": "b"}]
        tree["tasks"] = tasks if rng.random() < 0.5 else change_tree(tasks, rng)
    if rng.random() < 0.2:
        tree = change_tree(tree, rng)
    if rng.random() < 0.2:
        tree["_base_"] = pick(rng, ("tiny.yaml", "../x.yaml", "other.yaml", 3, [], "/dev/zero", "\0", "x" * 5000))
    try:
        text = yaml.safe_dump(tree, allow_unicode=bool(rng.random() < 0.5), default_flow_style=bool(rng.random() < 0.5))
    except (yaml.YAMLError, RecursionError, ValueError):
        text = json.dumps({section: {key: None}})
    files: dict[str, Entry] = {"tiny.yaml": text.encode("utf-8", "surrogatepass"), "other.yaml": b"_base_: tiny.yaml\n"}
    return Case(["train", "tiny.yaml", str(pick(rng, ("--check", "--print-config")))], files)


def _keys() -> dict[str, Any]:
    """Return all keys with their defaults, including those of every loss and of the default backbone."""
    base: dict[str, Any] = yaml.safe_load(_BASE.read_text())
    del base["tasks"]  # a list, which _yaml_tree makes of a section
    for name in list(MARGINS):
        base["loss"] |= margin_arguments(name)
    base["backbone"] |= backbone_arguments(base["backbone"]["name"])
    return base


# fmt: off
_TAGS = (
    "python/object/apply:os.system", "python/name:os.system", "python/module:os", "int", "float", "binary", "set",
    "omap", "timestamp", "bool", "null", "merge", "x", "",
)
_SCALARS = (
    "010", "0b11", "1:30:00", "190:20:30.15", "1_000", "+.inf", ".NaN", "1e5", "1.e+5", "~", "yes", "2001-99-99",
    "2001-12-14t21:59:43.10-05:00", "0o17", "-0", "=", "<<",
)
_SIGNS = (
    "'", '"', "|", ">", "%", "@", "`", "*x", "&", "!", "? ", "- -", "a: b: c", "\t", "#", "\x00", "\x85", "\ufeff",
    '"\\ud800"', '"\\x1b[2J"',
)
# fmt: on


def _bad_yaml(rng: Rng) -> str:
    """Return a hostile value in YAML."""
    depth = int(pick(rng, (3, 60, 1500, 20000)))
    laughs = "&a0 [x]" + "".join(f", &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, int(pick(rng, (3, 12, 40)))))
    words = ("[touch ../marker]", "x", "{a: b}", "3", '""')
    forms = (
        f"!!{pick(rng, _TAGS)} {pick(rng, words)}", f"!<tag:yaml.org,2002:{pick(rng, _TAGS)}> [touch ../marker]",
        "[" * depth + "]" * int(pick(rng, (depth, depth - 1))), "{a: " * depth + "1" + "}" * depth, f"[{laughs}]", "&a [*a]",
        "&a {b: *a}", "{<<: {a: 1}, <<: [x]}", "{? [1, 2] : 3}", "{? {a: b} : 3}",
        "9" * int(pick(rng, (30, 400, 5000, 100_000))), f"0x{'f' * int(pick(rng, (20, 5000)))}", str(pick(rng, _SCALARS)),
        str(pick(rng, _SIGNS)),
    )  # fmt: skip
    return str(pick(rng, forms))


def _yaml_text(sound: Sound, rng: Rng) -> Case:
    """Return a case with a configuration that abuses features of YAML."""
    base = _keys()
    section = str(pick(rng, sorted(base)))
    place = (f"{section}: {{{pick(rng, sorted(base[section]))}: ", "}", f"{section}: ", "", "", "", "? ", "\n: 1")
    start = 2 * int(rng.integers(4))
    data = (CONFIG if rng.random() < 0.3 else "").encode() + (place[start] + _bad_yaml(rng) + place[start + 1]).encode(
        "utf-8", "replace"
    )
    if rng.random() < 0.4:
        data = damage(data[:100_000], [CONFIG.encode()], rng)
    return Case(["train", "tiny.yaml", str(pick(rng, ("--check", "--print-config")))], {"tiny.yaml": data})


_NUMBERS = (
    10**21, 10**400, -1, 0, 1, 3, 1e308, 5e-324, "1e400", "nan", ".inf", "-.inf", "010", "1.5", 2**31, 2**63, 2**64, "true",
)  # fmt: skip


def _overrides(sound: Sound, rng: Rng) -> Case:
    """Return a case with wrong overrides on the command line."""
    base = _keys()
    words = []
    for _ in range(int(rng.integers(1, 4))):
        section = str(pick(rng, sorted(base)))
        key = str(pick(rng, sorted(base[section])))
        number = str(pick(rng, _NUMBERS))
        default = json.dumps(base[section][key])
        text = pick(
            rng,
            (
                default, default, number, number, str(value(rng)), _bad_yaml(rng)[:50_000], json.dumps(value(rng))[:50_000],
                str(pick(rng, TEXTS)),
            ),
        )  # fmt: skip
        words.append(
            pick(rng, (*[f"{section}.{key}={text}"] * 6, f"{section}.{key}{text}", f"{key}={text}", f".{key}=1", "=", text))
        )
    words = [word.replace("\0", "") for word in words]  # a command line cannot contain it
    return Case(["train", "tiny.yaml", str(pick(rng, ("--check", "--print-config"))), *words], {})


# ---- arcface_torch

_EXPRESSIONS = (
    "10**10**10", "2**2**2**99", "'a' * 10**10", "[0] * 10**10", "__import__('os').system('touch ../marker')",
    "open('../marker', 'w')", "(lambda: 1)()", "f'{1/0}'", "1/0", "1e400", "-1", "None", "True", "edict()", "config",
    "config.lr", "config.x.y", "{'a': [1, (2,)]}", "[x for x in range(10**9)]", "1 if 2 else 3", "'\\x1b[2J'", "b'x'",
    "...", "1j", "0.1 * 3", "1 << 10**9", "10**400", "float('nan')", "(1.0, 0.5, 0.0)", "'arcface'", "0x10", "int('9')",
    "'%s' % 1", "'x'.format", "1 % 0", "2.0**9999",
    *("9" * 5000, "(" * 300 + ")" * 300, "-" * 9000 + "1", "[" * 90 + "]" * 90, "1+" * 3000 + "1"),
)  # fmt: skip
_KEYS = (
    "margin_list", "network", "resume", "output", "embedding_size", "sample_rate", "fp16", "momentum", "weight_decay",
    "batch_size", "lr", "rec", "num_classes", "num_image", "num_epoch", "warmup_epoch", "val_targets", "optimizer",
    "gradient_acc", "seed", "loss", "wandb_key", "interclass_filtering_threshold", "x", "__class__", "save_all_states",
)  # fmt: skip


def _arcface_config(sound: Sound, rng: Rng) -> Case:
    """Return a case with a Python configuration whose values would be expensive or harmful if they were evaluated."""
    lines = [
        "from easydict import EasyDict as edict", "config = edict()", "config.network = 'r50'", "config.batch_size = 128",
        "config.lr = 0.1", "config.rec = 'synthetic'", "config.margin_list = (1.0, 0.5, 0.0)", "config.num_classes = 100",
        "config.num_image = 1000", "config.num_epoch = 20", "config.warmup_epoch = 0", "config.val_targets = ['lfw']",
    ]  # fmt: skip
    for _ in range(int(rng.integers(0, 4))):
        expression = str(
            pick(rng, _EXPRESSIONS if rng.random() < 0.7 else ("0.1 * 3", "2", "'x'", "None", "True", "config.lr", "1 + 1"))
        )
        expression = repr(value(rng)) if rng.random() < 0.2 else expression
        key = pick(rng, _KEYS)
        forms = (f"config.{key} = {expression}",) * 5 + (
            f"config['{key}'] = {expression}", f"import os; {expression}", f"{key} = {expression}",
            f"if True:\n    config.{key} = {expression}", f"config.{key} += {expression}", f"config.{key}: int = {expression}",
            f"config.a = config.{key} = {expression}", f"del config.{key}", f"def f():\n  return {expression}",
            f"config.{key}, x = {expression}",
        )  # fmt: skip
        lines.append(str(pick(rng, forms)))
    text = "\n".join(lines).encode("utf-8", "replace")
    data = (
        damage(text, [text], rng)
        if rng.random() < 0.3
        else pick(rng, (*[text] * 12, b"# coding: utf-16\n" + text, b"\xff\xfe" + text, text + b"\0"))
    )
    out = pick(rng, ([], ["--out", "out.yaml"]))
    return Case(["scripts.arcface_torch.import_config", "x.py", "--gpus", "1", *out], {"x.py": data})
