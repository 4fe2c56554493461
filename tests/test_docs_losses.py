"""The pages tell the truth about losses and backbones: their tables are those of the classes, and published rows train."""

import json
import re
from pathlib import Path

import pytest

import train
from backbones import list_backbones
from configs import load_config
from losses import MARGINS, Published
from scripts import tables
from scripts.benchmark.kit import END
from scripts.benchmark.losses import BEGIN, GROUPS
from scripts.benchmark.losses import tables as measured_tables
from training.sections import NAMED

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "losses.md").read_text()
ROWS = [(name, row) for name, margin in MARGINS.items() for row in margin.published]


@pytest.mark.parametrize("page", ["losses.md", "backbones.md"])
def test_the_tables_of_a_page_are_made_from_the_classes(page: str, tmp_path: Path):
    copy = tmp_path / page
    copy.write_text((ROOT / "docs" / page).read_text())
    assert tables.main([str(copy)]) == 0
    assert copy.read_text() == (ROOT / "docs" / page).read_text(), f"run python -m scripts.tables docs/{page}"


def test_a_page_without_a_place_for_a_table_is_an_error_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "page.md").write_text("no place\n")
    assert tables.main([str(tmp_path / "page.md")]) == 1
    assert "must have a line <!-- begin: losses -->" in capsys.readouterr().err


def test_the_tables_have_every_loss_and_backbone_with_their_defaults():
    cells = [row.split(" | ") for row in PAGE.splitlines() if row.startswith("| `")]
    assert [row[0].strip("| `") for row in cells][1:] == list(MARGINS) and all(len(row) == 4 and all(row) for row in cells)
    assert "| `cosface` | A margin on the cosine" in PAGE and "| `scale=64.0` `margin=0.4` | [CosFace](" in PAGE
    page = (ROOT / "docs" / "backbones.md").read_text().partition("<!-- end -->")[0]
    titles = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(titles))) == sorted(list_backbones())
    assert "`embedding_size=512` `width=1.0` `dropout=0.0` `se=False` `trained_scale=False` |" in page
    assert "`edgeface_xs`: `gamma=0.6`;" in page


def test_the_measured_tables_are_those_of_the_file_beside_it():
    rows = json.loads((ROOT / "docs" / "losses.json").read_text())
    measured = PAGE.partition(BEGIN)[2].partition(END)[0]
    assert measured_tables(rows) in measured
    assert len({row["run"] for row in rows}) == len(rows)


def test_the_pictures_of_the_page_exist_and_the_program_finds_where_to_write():
    pictures = re.findall(r"\]\((images/[\w.]+)\)", PAGE)
    assert {f"images/losses_{group}.png" for group in [*GROUPS, "negatives"]} <= set(pictures)
    assert all((ROOT / "docs" / picture).is_file() for picture in pictures)
    assert PAGE.index(BEGIN) < PAGE.rindex(END) and PAGE.count(BEGIN) == 1


def _overrides(name: str, row: Published) -> list[str]:
    settings = [f"loss.{key}={value}" for key, value in row.arguments.items()]
    return [f"loss.name={name}", *settings, *(f"head.{key}={value}" for key, value in row.head.items()), *row.training.split()]


@pytest.mark.parametrize(("name", "row"), ROWS, ids=[row.name for _, row in ROWS])
def test_a_published_row_is_a_configuration_that_takes_effect(name: str, row: Published):
    path = ROOT / "configs" / "ms1mv3_r50.yaml"
    base, config = (load_config(path, overrides, NAMED) for overrides in ((), _overrides(name, row)))
    assert config.loss.name == name and {key: config.loss[key] for key in row.arguments} == row.arguments
    for override in _overrides(name, row)[1:]:
        section, key = override.partition("=")[0].split(".")
        assert section == "loss" or config[section][key] != base[section][key], override
    assert [row.name for row in MARGINS[name].published if not (row.arguments or row.head)][:1] == [name]


# one of each way in which losses work: hard negatives, a trained bias, numbers of classes, norms, a scale of the batch, several
# centres of a class
@pytest.mark.parametrize(
    "title", ["curricularface", "sphereface2", "kappaface", "adaptiveface", "magface", "adacos", "sub_center"]
)
def test_a_published_row_trains(title: str, tmp_path: Path):
    name, row = next((name, row) for name, row in ROWS if row.name == title)
    small = ["data.source=synthetic", "data.num_classes=12", "data.num_images=24", "eval.targets=[]", "train.max_steps=1"]
    network = ["backbone.name=mbf", "backbone.width=0.125", "backbone.embedding_size=16", "train.precision=fp32"]
    rest = ["train.batch_size=4", "head.sample_rate=0.5", "run.threads=1", "run.device=cpu", f"run.output={tmp_path / 'out'}"]
    config = str(ROOT / "configs" / "ms1mv3_r50.yaml")
    assert train.main([config, *_overrides(name, row), *small, *network, *rest, "run.name=run"]) == 0
    log = (tmp_path / "out" / "run" / "train.log").read_text()
    assert "finished 1 steps" in log and "check labels" not in log
