"""docs/optimisation.md tells the truth: its keys exist, its tables are those of the code, its commands are taken."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from configs import load_config
from configs.loader import SCHEMA
from configs.rules import CHOICES
from training.sections import NAMED
from utils.optim import PRESETS
from utils.schedule import SCHEDULES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "optimisation.md").read_text()
BASE = yaml.safe_load(SCHEMA.read_text())


def _rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose header row begins with these words."""
    lines = PAGE.partition(f"| {heading}")[2].splitlines()[2:]
    end = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def test_the_tables_have_every_kind_with_its_defaults_and_its_counterpart_in_torch():
    schedules = _rows("`schedule.kind`")
    assert [row[0].strip("`") for row in schedules] == list(SCHEDULES)
    for row in schedules:
        for key, value in re.findall(r"`(\w+)=([^`]+)`", row[2]):
            assert f"{BASE['schedule'][key]}" == value, key
        assert hasattr(torch.optim.lr_scheduler, row[3].strip("`"))
    assert [row[0].strip("`") for row in _rows("`optimizer.name`")] == list(CHOICES["optimizer.name"])
    assert [row[0].strip("`") for row in _rows("`match`")] == list(PRESETS)
    preset = {row[0].strip("`"): row[1:] for row in _rows("`match`")}
    for name, (norms, biases) in PRESETS.items():
        assert (norms.weight_decay, biases.weight_decay) == (0.0, 0.0) and preset[name][0].startswith("no weight decay")
        assert ("twice the rate" in preset[name][1]) == (biases.lr_factor == 2.0)


def test_every_setting_on_the_page_is_one_that_a_run_takes(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("")
    needed = {  # settings that are valid only beside others
        "schedule.milestone_steps": ["schedule.kind=step"],
        "optimizer.name=lamb": ["head.optimizer=sgd"],
    }
    found = re.findall(r"`'?([a-z]+\.[a-z_]+=[^`]*?)'?`", PAGE) + re.findall(r"^'(optimizer\.rules=.*)'$", PAGE, re.M)
    for override in found:
        beside = next((more for begin, more in needed.items() if override.startswith(begin)), [])
        load_config(tmp_path / "run.yaml", [override, *beside], NAMED)
    assert len(set(found)) >= 15
    for name in re.findall(r"`([a-z]+\.[a-z_]+)`", PAGE):
        section, key = name.split(".")
        assert name.endswith((".safetensors", ".md")) or key in BASE[section], name


def test_the_commands_of_the_page_are_ones_that_their_programs_take(monkeypatch: pytest.MonkeyPatch):
    from eval.__main__ import main as evaluate

    commands = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
    seen = []
    monkeypatch.setattr("eval.__main__.run", lambda options: seen.append((options.ema, options.best)))
    for line in commands:
        if line.startswith("./face eval "):
            assert evaluate(shlex.split(line)[2:]) == 0
        elif line.startswith("./face train "):
            config, *overrides = shlex.split(line)[2:]
            assert load_config(config, overrides, NAMED).init.backbone.endswith("/ema.safetensors")
    assert seen == [(True, False), (True, True)]
