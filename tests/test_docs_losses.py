"""The pages tell the truth about losses: every one is on them with its defaults, and every recipe trains."""

import json
import re
from pathlib import Path

import pytest

import train
from configs import load_config
from losses import MARGINS, margin_arguments
from scripts.benchmark.losses_curves import GROUPS
from scripts.benchmark.losses_report import BEGIN, END, tables
from scripts.benchmark.losses_settings import SETTINGS, loss_arguments
from training.sections import NAMED

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "losses.md").read_text()
SHARED = {"gradient", "margin_start", "margin_steps"}  # that the page explains once, below its table


def _rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table under a header row that begins with these words."""
    _, _, rest = text.partition(f"| {heading}")
    lines = rest.splitlines()[2:]
    end = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[:end]]


def test_the_tables_of_the_page_are_those_of_the_file_beside_it():
    rows = json.loads((ROOT / "docs" / "losses.json").read_text())
    measured = PAGE.partition(BEGIN)[2].partition(END)[0]
    assert tables(rows) in measured
    assert len({row["run"] for row in rows}) == len(rows)


RECIPES = {
    name.strip("`"): re.findall(r"`([^`]+)`", lines) for name, lines in _rows(PAGE, "file in `configs`")
}  # name of the file: its lines


@pytest.mark.parametrize("page", ["README.md", "docs/losses.md"])
def test_a_page_has_every_loss_once_with_the_defaults_of_its_class(page: str):
    rows = _rows((ROOT / page).read_text(), "`loss.name` |")
    assert sorted(row[0].strip("`") for row in rows) == sorted(list(MARGINS))
    for row in rows:
        defaults = {key: value for key, value in margin_arguments(row[0].strip("`")).items() if key not in SHARED}
        assert re.findall(r"`(\w+)=([^`]+)`", row[-1]) == [(key, str(value)) for key, value in defaults.items()]


def test_the_page_says_of_every_loss_when_to_choose_it_what_it_keeps_and_what_sampling_does():
    rows = _rows(PAGE, "`loss.name` | choose it when")
    assert sorted(row[0].strip("`") for row in rows) == sorted(list(MARGINS))
    assert all(len(row) == 4 and all(row) for row in rows)
    without_state = {row[0].strip("`") for row in rows if row[2].startswith("none")}
    for name in list(MARGINS):
        margin = MARGINS[name]()
        kept = {**margin.state_dict(), **margin.class_numbers(8)}
        # SphereFace keeps the number of the step, which is the run's
        assert (name in without_state) == (not kept and name != "sphereface"), name


def test_the_pictures_of_the_page_exist_and_the_program_finds_where_to_write():
    pictures = re.findall(r"\]\((images/[\w.]+)\)", PAGE)
    assert {f"images/losses_{group}.png" for group in [*GROUPS, "negatives"]} <= set(pictures)
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)
    assert PAGE.index(BEGIN) < PAGE.index(END) and PAGE.count(BEGIN) == PAGE.count(END) == 1


def test_every_loss_has_a_recipe_of_at_most_three_lines():
    assert all(lines[0].startswith("_base_: ") and len(lines) <= 3 for lines in RECIPES.values())
    found = [re.search(r"name: (\w+)", lines[1]) for lines in RECIPES.values()]  # sub-centers have no name
    assert {match.group(1) for match in found if match} == set(list(MARGINS))


@pytest.mark.parametrize("file", RECIPES)
def test_a_recipe_is_a_configuration_that_takes_effect(file: str, tmp_path: Path):
    (tmp_path / file).write_text("\n".join(_with_base_there(RECIPES[file])) + "\n")
    config, base = load_config(tmp_path / file, (), NAMED), load_config(_base(file), (), NAMED)
    assert config.run.name == file.removesuffix(".yaml") and not (ROOT / "configs" / file).exists()
    changed = {section for section in config if config[section] != base[section]} - {"run"}
    assert changed == {line.split(":")[0] for line in RECIPES[file][1:]}
    wanted = loss_arguments(next(s for s in SETTINGS.values() if s.loss == config.loss.name and not s.is_variant), 5058)
    named = re.findall(r"(\w+): ", RECIPES[file][1])
    # what the line does not name is as published
    assert {key: config.loss[key] for key in wanted if key not in named} == {k: v for k, v in wanted.items() if k not in named}


# one of each way in which losses work: hard negatives, a trained bias, numbers of classes, norms, a scale of the batch, several
# centres of a class
@pytest.mark.parametrize(
    "name", ["curricularface", "sphereface2", "kappaface", "adaptiveface", "magface", "adacos", "sub_centers"]
)
def test_a_recipe_trains(name: str, tmp_path: Path):
    file = f"ms1mv3_r50_{name}.yaml"
    (tmp_path / file).write_text("\n".join(_with_base_there(RECIPES[file])) + "\n")
    small = ["data.source=synthetic", "data.num_classes=12", "data.num_images=24", "eval.targets=[]", "train.max_steps=1"]
    network = ["backbone.name=mbf", "backbone.width=0.125", "backbone.embedding_size=16", "train.precision=fp32"]
    rest = ["train.batch_size=4", "head.sample_rate=0.5", "run.threads=1", "run.device=cpu", f"run.output={tmp_path / 'out'}"]
    assert train.main([str(tmp_path / file), *small, *network, *rest]) == 0
    log = (tmp_path / "out" / file.removesuffix(".yaml") / "train.log").read_text()
    assert "finished 1 steps" in log and "check labels" not in log


def _base(file: str) -> Path:
    return ROOT / "configs" / RECIPES[file][0].removeprefix("_base_: ")


def _with_base_there(lines: list[str]) -> list[str]:
    return [f"_base_: {ROOT / 'configs' / lines[0].removeprefix('_base_: ')}", *lines[1:]]
