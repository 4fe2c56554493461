"""Checkpoints that lie: resuming ends in one line, never in a crash, a traceback or memory that belongs to something else.

The lies stand in a sound checkpoint's trainer.pt or class centres; training runs in another process, so that a crash is seen.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import some
from safetensors.torch import load_file, save_file
from tiny_runs import run_file, run_program, small_run

import train
from utils.checkpoint.format import list_checkpoints

# one process tries all lies of an optimizer; what it says before each is how the parent knows which one ended it
TRY_ALL = """
import sys
import train
for arguments in open(sys.argv[1]).read().splitlines():
    name, *words = arguments.split("\\t")
    print(f"CASE {name}", file=sys.stderr, flush=True)
    print(f"STATUS {train.main(words)}", file=sys.stderr, flush=True)
"""
Trainer = dict[str, Any]


def _moments(trainer: Trainer) -> dict[int, dict[str, Any]]:
    return trainer["optimizer"]["state"]


def _change(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Trainer], None]:
    def lie(trainer: Trainer) -> None:
        kept = _moments(trainer)[0]
        kept[name] = change(kept[name])

    return lie


def _narrow(moment: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape whose numbers share memory."""
    return moment.reshape(-1)[:1].clone().expand(moment.numel()).reshape(-1).as_strided(moment.shape, [0] * moment.dim())


def _set(path: str, value: Any) -> Callable[[Trainer], None]:
    *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]

    def lie(trainer: Trainer) -> None:
        at: Any = trainer
        for key in way:
            at = at[key]
        at[last] = value

    return lie


def _lies_of_a_moment(name: str) -> dict[str, Callable[[Trainer], None]]:
    return {
        f"{name} a scalar": _change(name, lambda old: torch.tensor(0.5)),
        f"{name} short": _change(name, lambda old: old.reshape(-1)[:1].clone()),
        f"{name} transposed": _change(name, lambda old: old.reshape(1, *old.shape)),
        f"{name} halved": _change(name, lambda old: old.half()),
        f"{name} double": _change(name, lambda old: old.double()),
        f"{name} whole": _change(name, lambda old: old.long()),
        f"{name} complex": _change(name, lambda old: old.to(torch.complex64)),
        f"{name} expanded": _change(name, _narrow),
        f"{name} nan": _change(name, lambda old: torch.full_like(old, float("nan"))),
        f"{name} sparse": _change(name, lambda old: old.to_sparse()),
        f"{name} meta": _change(name, lambda old: torch.empty_like(old, device="meta")),
        f"{name} a list": _change(name, lambda old: old.tolist()),
        f"{name} None": _change(name, lambda old: None),
        f"{name} text": _change(name, lambda old: "0.5"),
        f"{name} missing": lambda trainer: _moments(trainer)[0].pop(name),
        f"{name} all missing": lambda trainer: [kept.pop(name) for kept in _moments(trainer).values()],
    }


COMMON = {
    "a moment too many": _set("optimizer.state.0.more", torch.zeros(3)),
    "state one missing": lambda trainer: _moments(trainer).pop(3),
    "state of a stranger": lambda trainer: _moments(trainer).update({10**20: _moments(trainer).pop(0)}),
    "state a list": _set("optimizer.state", [1, 2]),
    "state text": _set("optimizer.state.2", "momentum"),
    "params doubled": _set("optimizer.param_groups.0.params.1", 0),
    "params huge": _set("optimizer.param_groups.0.params.1", 10**30),
    "params negative": _set("optimizer.param_groups.0.params.1", -1),
    "params text": _set("optimizer.param_groups.0.params", "012"),
    "params unhashable": _set("optimizer.param_groups.0.params.1", [1]),
    "groups a number": _set("optimizer.param_groups", 5),
    "groups none": _set("optimizer.param_groups", []),
    "groups of numbers": _set("optimizer.param_groups", [1]),
    "optimizer a tensor": _set("optimizer", torch.zeros(3)),
    "scaler a tensor": _set("scaler", torch.zeros(3)),
    "no optimizer": lambda trainer: trainer.pop("optimizer"),
    "no scaler": lambda trainer: trainer.pop("scaler"),
    "scaler a list": _set("scaler", [1.0]),
    "margin a tensor": _set("margins", {"softmax": {"more": torch.zeros(3)}}),
    "margins text": _set("margins", "none"),
    "margin text": _set("margins", {"softmax": "none"}),
    "no margin": _set("margins", {}),
    "another margin": _set("margins", {"other": {}}),
    "trained text": _set("trained", "all of it"),
    "trained numbers": _set("trained", [1, None]),
}


def _run(folder: Path, cases: dict[str, list[str]]) -> None:
    """Resume each case, and check that it ends with status 1 and one line."""
    program, lines = folder / "try_all.py", folder / "cases"
    program.write_text(TRY_ALL)
    lines.write_text("\n".join("\t".join([name, *arguments]) for name, arguments in cases.items()))
    ended = run_program(run_file, [[str(program), str(lines)]], timeout=300)
    said = {part.splitlines()[0]: part.splitlines()[1:] for part in ended.stderr.split("CASE ")[1:]}
    assert ended.returncode == 0, f"status {ended.returncode} in {list(said)[-1]}: {ended.stderr[-2000:]}"
    assert list(said) == list(cases)
    taken = [name for name, printed in said.items() if len(printed) != 2]
    assert not taken, f"no line, or several: {taken}"
    for name, (error, status) in said.items():
        assert status == "STATUS 1" and error.startswith("error: checkpoint "), f"{name}: {error}"
        assert "Error(" not in error and len(error) < 600, error


def _prepare(dataset: Path, folder: Path, lies: dict[str, Callable[[Trainer], None]], overrides: list[str]) -> None:
    arguments = small_run(dataset, folder, "train.max_steps=2", "eval.targets=[]", *overrides)
    assert train.main([*arguments, "run.name=sound"]) == 0
    cases = {}
    for number, (name, lie) in enumerate(some(lies.items(), 2)):
        shutil.copytree(folder / "sound", folder / str(number))
        checkpoint = list_checkpoints(folder / str(number))[-1]
        trainer = torch.load(checkpoint / "trainer.pt", weights_only=True)
        lie(trainer)
        torch.save(trainer, checkpoint / "trainer.pt")
        _tell_sizes(checkpoint)
        cases[name] = [*arguments, "train.max_steps=4", f"run.name={number}"]
    _run(folder, cases)


def _tell_sizes(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry["size"] = (checkpoint / name).stat().st_size
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_lie_in_the_state_of_sgd_is_one_line(dataset: Path, tmp_path: Path):
    _prepare(dataset, tmp_path, {**_lies_of_a_moment("momentum_buffer"), **COMMON}, [])


def test_a_lie_in_the_state_of_adamw_is_one_line(dataset: Path, tmp_path: Path):
    steps = {
        "step negative": _set("optimizer.state.0.step", torch.tensor(-1.0)),
        "step huge": _set("optimizer.state.0.step", torch.tensor(1e30)),
        "step nan": _set("optimizer.state.0.step", torch.tensor(float("nan"))),
        "step long": _set("optimizer.state.0.step", torch.zeros(1000)),
        "step empty": _set("optimizer.state.0.step", torch.zeros(0)),
        "step whole": _set("optimizer.state.0.step", torch.tensor(2)),
        "step a number": _set("optimizer.state.0.step", 10**400),
        "variance negative": _change("exp_avg_sq", lambda old: old - 1),
    }
    lies = {**_lies_of_a_moment("exp_avg"), **_lies_of_a_moment("exp_avg_sq"), **steps}
    _prepare(dataset, tmp_path, lies, ["optimizer.name=adamw", "optimizer.momentum=0.9", "optimizer.lr=0.001"])


def test_a_lie_about_the_loss_scale_is_one_line(dataset: Path, tmp_path: Path):
    scales = [0, -1.0, float("nan"), float("inf"), 1e39, 10**400, "65536", [1.0], None, torch.tensor(1.0), True]
    steps = [-1, 10**30, 1.5, "3", None, True, float("nan")]
    lies = {f"scale {value!r:.20}": _set("scaler.scale", value) for value in scales}
    lies |= {f"good_steps {value!r:.20}": _set("scaler.good_steps", value) for value in steps}
    lies |= {"no scale": lambda trainer: trainer["scaler"].pop("scale")}
    _prepare(dataset, tmp_path, lies, ["train.precision=fp16"])


def test_a_lie_in_the_rows_of_class_centres_is_one_line(dataset: Path, tmp_path: Path):
    """With AdamW, sampled negatives by neighbours and the format that has most tensors."""
    overrides = ["head.optimizer=adamw", "head.storage=mini", "head.sample_rate=0.5", "head.sampling=neighbours"]
    overrides += ["head.neighbours_every=1", "head.neighbours=3"]
    arguments = small_run(dataset, tmp_path, "train.max_steps=2", "eval.targets=[]", *overrides)
    assert train.main([*arguments, "run.name=sound"]) == 0
    shard = next(list_checkpoints(tmp_path / "sound")[-1].glob("softmax_*"))
    sound = load_file(shard)
    lies: dict[str, torch.Tensor | None] = {}
    for name, rows in sound.items():
        lies[f"{name} missing"] = None
        lies[f"{name} short"] = rows[:3].clone()
        lies[f"{name} deeper"] = rows[..., None].clone()
        if rows.is_floating_point():
            lies[f"{name} nan"] = torch.full_like(rows, float("nan"))
            lies[f"{name} whole"] = rows.to(torch.int64)
        else:
            lies[f"{name} huge"] = torch.full_like(rows, torch.iinfo(rows.dtype).max)
            lies[f"{name} wide"] = torch.full(rows.shape, 2**62)
            lies[f"{name} negative"] = torch.full_like(rows, -5)
    lies = {name: lie for name, lie in lies.items() if name not in HARMLESS and not name.startswith("neighbours")}
    cases = {}
    for number, (name, lie) in enumerate(some(lies.items(), 2)):
        shutil.copytree(tmp_path / "sound", tmp_path / str(number))
        checkpoint = list_checkpoints(tmp_path / str(number))[-1]
        tensors = {key: lie if key == name.split()[0] else rows for key, rows in sound.items()}
        save_file({key: rows for key, rows in tensors.items() if rows is not None}, checkpoint / shard.name)
        _tell_sizes(checkpoint)
        cases[name] = [*arguments, "train.max_steps=4", f"run.name={number}"]
    _run(tmp_path, cases)


# what may be: norms are computed anew, any int8 is a centre or a momentum, and neighbours out of range are of another rank
HARMLESS = {"inverse_norms missing", *(f"{name} {lie}" for name in ("centres", "momentum") for lie in ("huge", "negative"))}
