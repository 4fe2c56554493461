"""Convert a configuration of arcface_torch, configs/NAME.py, to one of this project, with comments where the meaning differs.

The file is read, never executed. Keys without a counterpart here are listed in a comment of the result, and on stderr.

The file has lines config.KEY = VALUE, with literals, arithmetic and earlier keys.

Example: face migrate config arcface_torch/configs/ms1mv3_r50.py --gpus 8 --out mine.yaml
"""

import argparse
import math
import re
import shlex
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from backbones import list_backbones
from configs import load_config
from migration.config_file import Given, default_values, read_config
from migration.network import VISION_TRANSFORMERS
from training.sections import NAMED
from utils.cli import int_in_range, make_parser
from utils.program import run_main

# key there: why it has no counterpart here
_DROPPED = {
    "resume": "resuming needs no key: the same command goes on",
    "save_all_states": "every checkpoint here has all states",
    "dali": "no DALI; data.threads decodes JPEG",
    "dali_aug": "no DALI; the section augment has augmentations",
    "num_workers": "threads decode here: data.threads",
    "dataset": "names a set; data.path does",
}
_SECRET = re.compile(r"key|token|secret|password", re.I)
_OLD_MARGINS = {"arcface": [1.0, 0.5, 0.0], "cosface": [1.0, 0.0, 0.4]}  # the key `loss` of 2021


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face migrate config", __doc__)
    parser.add_argument("file", type=Path, help="configuration of arcface_torch, a .py file")
    parser.add_argument("--base", type=Path, help="its configs/base.py (default: the keys of the last published one)")
    parser.add_argument("--gpus", type=int_in_range(1), required=True, metavar="N", help="of the original run, on all machines")
    parser.add_argument("--power", type=float, default=2.0, help="power of the schedule (default 2, as in the published runs)")
    parser.add_argument("--out", type=Path, help="YAML file to write (default: print it)")
    return run_main(convert, parser.parse_args(arguments))


def convert(options: argparse.Namespace) -> None:
    """Read, translate, check by loading, and write."""
    if options.out is not None and options.out.exists():
        raise ValueError(f"{options.out}: exists already and is never overwritten; choose another name")
    given = default_values()
    if options.base is not None:
        given = read_config(options.base, given)
    given = read_config(options.file, given)
    translation = Translation(given, options.gpus, options.power)
    lost = translation.lost()
    name = options.out.stem if options.out is not None else options.file.stem
    text = translation.text(name, lost)
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / f"{name}.yaml"
        trial.write_text(text, encoding="utf-8")
        try:
            load_config(trial, (), NAMED)
        except ValueError as error:
            said = str(error).replace(f"{trial}: ", "").replace(str(trial), name)
            raise ValueError(f"{translation.place_of(said) or options.file}: cannot be converted: {said}") from None
    if options.out is None:
        print(text, end="")
    else:
        with options.out.open("x", encoding="utf-8") as file:  # never overwrite an existing file
            file.write(text)
        print(f"{options.out}: written; start with {translation.command(str(options.out))}")
    for line in [*lost, *filter(None, [translation.advice])]:
        print(f"note: {line}", file=sys.stderr)


class Translation:
    """Translates the keys of one run.

    Raises:
        ValueError: naming the line, if a key that changes the run has no counterpart.
    """

    def __init__(self, given: dict[str, Given], gpus: int, power: float) -> None:
        self._given, self._used, self.gpus = given, set[str](), gpus
        self._made_of: dict[str, str] = {}  # key here: key there that its value was made of
        self._last = ""  # key there that was read last
        self._sections: dict[str, list[tuple[str, Any, str]]] = {
            name: [] for name in ("run", "data", "backbone", "loss", "head", "optimizer", "schedule", "train", "eval", "log")
        }
        self._model()
        self._data()
        self._training(power)

    def _get(self, key: str, kinds: tuple[type, ...], what: str) -> Any:
        """Return the value of a required key, of one of these types."""
        self._used.add(key)
        self._last = key
        entry = self._given.get(key)
        if entry is None:
            raise ValueError(f"config.{key} is not set; it must be {what}")
        if not isinstance(entry.value, kinds) or (isinstance(entry.value, bool) and bool not in kinds):
            raise ValueError(f"{entry.place}: config.{key} must be {what}, got {entry.value!a}")
        return entry.value

    def _number(self, key: str) -> float:
        return float(self._get(key, (int, float), "a number"))

    def _count(self, key: str, low: int = 0) -> int:
        value = self._get(key, (int, float), "a whole number")
        if value != int(value) or value < low:
            raise ValueError(f"{self._given[key].place}: config.{key} must be a whole number of at least {low}, got {value}")
        return int(value)

    def _put(self, name: str, value: Any, comment: str = "", of: str = "") -> None:
        """Set a key here, which is made of the key `of` there, by default of that which was read last."""
        section, key = name.split(".")
        self._made_of[name] = of or self._last
        self._sections[section].append((key, value, comment))

    def _model(self) -> None:
        network = self._get("network", (str,), "a name")
        if network not in list_backbones() and network not in VISION_TRANSFORMERS:
            place = self._given["network"].place
            raise ValueError(f"{place}: network {network!a} has no counterpart here: {', '.join(list_backbones())}")
        arguments = VISION_TRANSFORMERS.get(network, {"name": network})
        for key, value in arguments.items():
            tenth = key == "mask_ratio" and network.endswith("mask_005")
            self._put(f"backbone.{key}", value, "whatever the name says: there a mask is always a tenth" if tenth else "")
        self._put("backbone.embedding_size", self._count("embedding_size", 1))
        self._margin()
        rate = self._number("sample_rate")
        if rate <= 0:
            self._put("head.sample_rate", 1e-9, "0 there: the classes of the batch alone; to the same effect")
        else:
            comment = "there centres that were not sampled decay and move on too: head.inactive_rows=decay" if rate < 1 else ""
            self._put("head.sample_rate", min(rate, 1.0), comment)
        threshold = self._number("interclass_filtering_threshold")
        comment = "such negatives are left out; there their logit becomes 0" if threshold else ""
        self._put("head.interclass_filtering_threshold", max(threshold, 0.0), comment)

    def _margin(self) -> None:
        margins = self._get("margin_list", (list, tuple), "three numbers (m1, m2, m3)")
        old = self._given.get("loss")
        if old is not None:
            self._used.add("loss")
            if not self._given["margin_list"].explicit:
                if not isinstance(old.value, str) or old.value not in _OLD_MARGINS:
                    raise ValueError(f"{old.place}: config.loss must be {' or '.join(_OLD_MARGINS)}, got {old.value!a}")
                margins = _OLD_MARGINS[old.value]
        if len(margins) != 3 or not all(isinstance(m, (int, float)) and not isinstance(m, bool) for m in margins):
            raise ValueError(f"{self._given['margin_list'].place}: config.margin_list must be three numbers, got {margins!a}")
        m1, m2, m3 = map(float, margins)
        if m3 > 0:
            ignored = m1 != 1 or m2 != 0
            comment = f"there m1 = {m1:g} and m2 = {m2:g} are ignored; loss.name=combined would use them" if ignored else ""
            self._put("loss.name", "cosface", comment)
            self._put("loss.margin", m3)
        elif m1 == 1 and m3 == 0:
            self._put("loss.name", "arcface", "the exact gradient; theirs since 2022-12 is loss.gradient=straight_through")
            self._put("loss.margin", m2)
        else:
            self._put("loss.name", "combined", "arcface_torch stops at these margins")
            for name, value in (("m1", m1), ("m2", m2), ("m3", m3)):
                self._put(f"loss.{name}", value)
        self._put("loss.scale", 64.0)

    def _data(self) -> None:
        path = self._get("rec", (str,), "a folder, or synthetic")
        if path == "synthetic":
            self._put("data.source", "synthetic", "there always 1,000,000 times one image")
        else:
            if Path(path).is_dir() and not (Path(path) / "train.rec").is_file():
                self._put("data.source", "folder")
            self._put("data.path", path, "with train.rec; for a folder per identity add source: folder")
        same = "" if path == "synthetic" else "checked against the data; 0 = what the data says"
        self._put("data.num_classes", self._count("num_classes"), same)
        self._put("data.num_images", self._count("num_image"), same)
        targets = self._get("val_targets", (list, tuple), "a list of names")
        if not all(isinstance(name, str) for name in targets):
            raise ValueError(f"{self._given['val_targets'].place}: config.val_targets must be a list of names, got {targets!a}")
        self._put("eval.targets", list(targets))

    def _training(self, power: float) -> None:
        accumulation = self._count("gradient_acc", 1)
        per_gpu = self._count("batch_size", 1)
        steps = f", in optimizer steps, {accumulation} micro-batches each" if accumulation > 1 else ""
        product = f"{per_gpu} x {self.gpus} GPUs" + (f" x {accumulation} micro-batches" if accumulation > 1 else "")
        self._put("train.epochs", self._number("num_epoch"))
        self._put(
            "train.batch_size", per_gpu * self.gpus * accumulation, f"{product}: images a step, whatever the GPUs", "batch_size"
        )
        self.advice = self._as_summed(accumulation) if accumulation > 1 else ""
        self._put("train.accumulation", accumulation, self.advice, "gradient_acc")
        fp16 = self._get("fp16", (bool,), "True or False")
        self._put("train.precision", "fp16" if fp16 else "fp32", "bf16 needs no loss scale, on newer GPUs" if fp16 else "")
        name = self._get("optimizer", (str,), "sgd or adamw")
        self._put("optimizer.name", name)
        old = "decay_epoch" in self._given or "loss" in self._given
        self._put("optimizer.lr", self._number("lr"), "before 2022 they used lr x global batch / 512" if old else "")
        momentum = self._number("momentum")
        self._put("optimizer.momentum", 0.9, f"config.momentum = {momentum:g} is ignored there" if momentum != 0.9 else "")
        self._put("optimizer.weight_decay", self._number("weight_decay"))
        warmup = self._number("warmup_epoch")
        self._put("schedule.warmup_epochs", max(0.0, warmup), f"{warmup:g} there" if warmup < 0 else "")
        if "decay_epoch" in self._given:
            self._steps()
        else:
            self._put("schedule.power", power, "2 in the published runs; the last arcface_torch has 1", "--power")
        verbose = self._count("verbose")
        self._put("eval.every", max(min(verbose, 1), verbose // accumulation), f"and after the last step{steps}")
        self._put("log.every", max(1, self._count("frequent", 1) // accumulation), steps.lstrip(", "))
        self._put("run.seed", self._count("seed"))
        self._used.add("output")
        output = self._given["output"].value
        if isinstance(output, str) and PurePosixPath(output).name:
            self._put("run.name", PurePosixPath(output).name, of="output")
            if str(PurePosixPath(output).parent) != ".":
                self._put("run.output", str(PurePosixPath(output).parent), of="output")

    def _as_summed(self, parts: int) -> str:
        """Return what gives a mean over micro-batches the update that their sum, `parts` times as large, has there."""
        same = f"optimizer.lr={parts * self._number('lr'):g} optimizer.weight_decay={self._number('weight_decay') / parts:g}"
        same = same if self._given["optimizer"].value == "sgd" else f"optimizer.eps={1e-8 / parts:g}"
        return f"gradients are averaged, there summed: to repeat that, set {same} optimizer.clip_norm={5 / parts:g}"

    def _steps(self) -> None:
        """Translate the schedule of 2021: a tenth of the rate after each of these epochs."""
        last = self._number("num_epoch")
        epochs = self._get("decay_epoch", (list, tuple), "a list of epochs")
        if not all(isinstance(epoch, (int, float)) and not isinstance(epoch, bool) for epoch in epochs):
            raise ValueError(f"{self._given['decay_epoch'].place}: config.decay_epoch must be epochs, got {epochs!a}")
        reached = [float(epoch) for epoch in epochs if epoch < last]
        self._put("schedule.kind", "step" if reached else "constant", "" if reached else "config.decay_epoch is never reached")
        if reached:
            self._put("schedule.milestones", reached)
            self._put("schedule.factor", 0.1)

    def place_of(self, said: str) -> str:
        """Return line and key there of what an error says of a key here, "" where it names none."""
        named = [(said.find(ours), theirs) for ours, theirs in self._made_of.items() if ours in said and theirs in self._given]
        return f"{self._given[min(named)[1]].place}: config.{min(named)[1]}" if named else ""

    def lost(self) -> list[str]:
        """Return a line about each key that was set and has no counterpart."""
        lines = []
        for key, entry in self._given.items():
            if key in self._used or not entry.explicit:
                continue
            value = "..." if _SECRET.search(key) else ascii(entry.value)
            reason = _DROPPED.get(key, "no counterpart here")
            lines.append(f"config.{key} = {value if len(value) <= 60 else value[:57] + '...'}: {reason}")
        return lines

    def command(self, config: str) -> str:
        """Return the command line that starts this configuration on as many processes."""
        machines = f" --machines {self.gpus // 8} --head HOST" if self.gpus > 8 and self.gpus % 8 == 0 else ""
        return f"./face train {shlex.quote(config)}{machines}"

    def text(self, name: str, lost: list[str]) -> str:
        """Return the YAML."""
        lines = [f"# {self.command(ascii(name)[1:-1])}", "# From a configuration of arcface_torch."]
        lines += [f"# Not converted: {line}" for line in lost]
        for section, entries in self._sections.items():
            if entries:
                lines.append(f"{section}:")
            for key, value, comment in entries:
                in_one_line = yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
                lines.append(f"  {key}: {in_one_line}" + (f"  # {comment}" if comment else ""))
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
