"""docs/optimisation.md tells the truth: its keys exist, and its tables are those of the code."""

import re
from pathlib import Path

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
        "head.sampling=neighbours": ["head.sample_rate=0.1"],
    }
    found = re.findall(r"`'?([a-z]+\.[a-z_]+=[^`]*?)'?`", PAGE) + re.findall(
        r"^'((?:optimizer\.rules|head\.stages)=.*)'$", PAGE, re.M
    )
    for override in found:
        beside = next((more for begin, more in needed.items() if override.startswith(begin)), [])
        load_config(tmp_path / "run.yaml", [override, *beside], NAMED)
    assert len(set(found)) >= 15
    for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)`", PAGE):
        assert key in ("safetensors", "md") or key in BASE[section], (section, key)
