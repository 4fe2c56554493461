"""The benchmark of the losses: its trainings, what it keeps of them, its tables, and that another start goes on."""

import argparse
import contextlib
import io
import json
import re
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tiny_runs import FORKS, REAL, Started, error_of, one_line, tiny_run, write_dataset

from backbones import build_backbone
from configs import load_config
from eval.embed import EmbedSettings
from eval.monitor import evaluate, load_pair_sets
from eval.networks import add_network_arguments, load_network
from eval.protocol import Embed
from losses import MARGINS, margin_arguments
from scripts.benchmark import kit, losses
from scripts.benchmark.losses import SETTINGS, chosen_settings
from training.sections import NAMED
from utils.checkpoint.format import list_checkpoints
from utils.distributed import World

GONE = {"run": "gone_1", "setting": "gone", "rate": 1.0, "steps": 3, "setup": "a set", "common": "c", "machine": "M"}
GONE |= {"accuracy": {"tiny": 0.5}}  # of a loss that this version does not have


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    write_dataset(folder / "set")
    return Path(tiny_run(folder / "set", folder, REAL)[0])


class Done(NamedTuple):
    """Two starts of the program for two losses, of which one cannot be trained in the first."""

    out: Path
    said: str  # on stderr by the first
    table: str  # of the first


@pytest.fixture(scope="module")
def done(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    out = tmp_path_factory.mktemp("out")
    (out / "page.md").write_text(f"Before\n\n{losses.BEGIN}\n\nold\n\n{kit.END}\n\nAfter\n")
    arguments = [*_arguments(config, out), "--page", str(out / "page.md"), "--json", str(out / "all.json")]
    (out / "all.json").write_text(json.dumps([GONE]))
    broken = losses.list_jobs(losses.parse(arguments), ["cosface"])[0].folder
    broken.mkdir(parents=True)
    (broken / "checkpoints").write_text("no folder")  # so this run cannot save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "subprocess", FORKS)  # an interrupted program, below, starts its own
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert losses.main(arguments) == 1
        table = (out / "table.md").read_text()
        (broken / "checkpoints").unlink()
        assert losses.main(arguments) == 0
    return Done(out, said.getvalue(), table)


@pytest.fixture
def out(done: Done) -> Path:
    return done.out


def _arguments(config: Path, out: Path) -> list[str]:
    chosen = ["--losses", "cosface", "sphereface2", "--seeds", "2", "--rates", "0.5", "--processes", "2"]
    return [
        *chosen, "--config", str(config), "--out", str(out), "--set", "train.max_steps=3", "log.every=1", "data.image_size=48",
    ]  # fmt: skip


def test_every_loss_has_a_row_at_its_defaults_and_a_row_names_only_arguments_that_exist():
    for name, setting in SETTINGS.items():
        assert set(setting.row.arguments) <= set(margin_arguments(setting.loss)), name
    defaults = [SETTINGS[name].loss for name in chosen_settings(None) if not SETTINGS[name].row.head]
    assert sorted(defaults) == sorted(list(MARGINS))
    assert chosen_settings(["all"]) == list(SETTINGS)
    with pytest.raises(ValueError, match=r"--losses must be all, or among .*; got arcface arcfaze"):
        chosen_settings(["arcface", "arcfaze"])


def test_a_training_that_fails_costs_itself_and_is_tried_again(done: Done):
    assert re.search(r"1 of 2 trainings failed: cosface, rate 0.5, seed 2: \S.*checkpoints", done.said)
    assert "| SphereFace2 | " in done.table and "CosFace" not in done.table
    table = (done.out / "table.md").read_text()
    assert "| SphereFace2 | " in table and "| CosFace | " in table


def test_the_numbers_of_a_run_are_those_of_its_log_and_of_an_evaluation_of_its_network(config: Path, out: Path):
    rows = {row["setting"]: row for row in json.loads((out / "all.json").read_text())}
    folder = next((out / "runs").glob("cosface_rate_0.5_seed_2_*"))
    row = rows["cosface"]
    assert set(rows) == {"cosface", "sphereface2", "gone"} and row["run"] == folder.name and rows["gone"] == GONE
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "train"]
    assert row["steps"] == 3 == records[-1]["step"] and row["loss"] == records[-1]["loss"]
    assert row["step_seconds"] == pytest.approx(np.median([8 / record["images_per_second"] for record in records[1:]]))
    assert row["memory_gib"] == max(record["memory_gib"] for record in records)
    sets = load_pair_sets(config.parent / "set", ["tiny"], "eval.targets", "eval.path")
    network = load_network(_network_options(folder), build_backbone).model
    _, result = next(evaluate(Embed(network, World(0, 1, 0, 1, torch.device("cpu")), EmbedSettings(16, None, 1, 48)), sets))
    assert result.accuracy == row["accuracy"]["tiny"]


def _network_options(folder: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_network_arguments(parser)
    return parser.parse_args([str(folder)])


def test_a_run_has_the_loss_rate_and_seed_of_its_row_and_all_else_of_the_configuration(out: Path):
    folder = next((out / "runs").glob("sphereface2_rate_0.5_seed_2_*"))
    text = (folder / "config.yaml").read_text()
    assert "name: sphereface2" in text and "seed: 2" in text and "sample_rate: 0.5" in text and "width: 0.125" in text
    assert "scale: 40.0" in text  # and not the 16 that the configuration has for its own loss


def test_the_table_is_written_also_into_the_page_and_the_curves_beside_it(out: Path):
    text = (out / "table.md").read_text().strip()
    assert (out / "page.md").read_text() == f"Before\n\n{losses.BEGIN}\n\n{text}\n\n{kit.END}\n\nAfter\n"
    assert "12 identities, 60 images of 48 x 48; mbf of width 0.125, fp32; 8 images a step" in text and "; 3 steps. " in text
    assert text == losses.tables(json.loads((out / "all.json").read_text())) and "a set" not in text
    pictures = {path.name for path in (out / "images").iterdir()}
    assert pictures == {f"losses_{group}.png" for group in [*losses.GROUPS, "negatives"]}


def test_a_mean_has_the_deviation_of_its_seeds_and_one_run_has_none():
    row = {"setting": "cosface", "rate": 1.0, "steps": 9, "setup": "a set", "machine": "M, torch 2", "common": "c"}
    two = [{**row, "accuracy": {"demo": 0.90}}, {**row, "accuracy": {"demo": 0.94}}]
    assert "| loss | demo at 1 |" in losses.tables(two) and "| CosFace | 92.00+-2.83 |" in losses.tables(two)
    assert "| CosFace | 92.00+-2.83 | 90.00 |" in losses.tables([*two, {**two[0], "rate": 0.1}])
    assert losses.tables([]) == losses.NOTHING
    for other in ({"steps": 12}, {"common": "other"}, {"setup": "another set"}):  # a table mixes no settings
        found = losses.tables([two[0], {**two[1], **other}])
        assert found.count("| loss |") == 2 and "| CosFace | 90.00 |" in found and "| CosFace | 94.00 |" in found
    more = [{**two[0], "setup": f"{number} identities"} for number in ("10,000", "500")]
    assert re.findall(r"\S+ identities", losses.tables(more)) == ["500 identities", "10,000 identities"]


def test_a_run_that_ended_is_kept_and_another_setting_is_another_run(config: Path, out: Path, capsys: pytest.CaptureFixture):
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    assert losses.main([*_arguments(config, out), "--json", str(out / "all.json")]) == 0
    assert "2 trainings, 0 of which are to be done" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    options = losses.parse([*_arguments(config, out), "optimizer.lr=0.01"])
    folders = {job.folder for job in losses.list_jobs(options, ["cosface"])}
    assert len(folders) == 1 and not any(folder.exists() for folder in folders)


def test_results_of_an_earlier_start_or_another_copy_of_the_data_are_kept(
    config: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(config.parent / "set", tmp_path / "elsewhere")
    kept = tmp_path / "all.json"
    shutil.copy(out / "all.json", kept)
    elsewhere = [*_arguments(config, tmp_path / "out"), f"data.path={tmp_path / 'elsewhere'}"]
    for fewer in ([], ["--losses", "cosface"]):  # what it has of others goes into the tables, too
        assert losses.main([*elsewhere, *fewer, "--json", str(kept)]) == 0
        assert " 0 of which are to be done" in capsys.readouterr().out
        assert kept.read_bytes() == (out / "all.json").read_bytes()
        assert (tmp_path / "out" / "table.md").read_text() == (out / "table.md").read_text()


@pytest.mark.parametrize("changed", ["pixels", "pairs"])
def test_other_pixels_or_pairs_are_another_training(config: Path, out: Path, tmp_path: Path, changed: str):
    """As in an aligned copy of a set: the same number of images, with the same labels, names and sizes."""
    shutil.copytree(config.parent / "set", tmp_path / "elsewhere")
    path = tmp_path / "elsewhere" / ("train.rec" if changed == "pixels" else "tiny.bin")
    data = bytearray(path.read_bytes())
    for end in re.finditer(b"\xff\xd9", bytes(data)):
        data[end.start() - 40] ^= 1  # an encoded pixel
    path.write_bytes(data)
    elsewhere = [*_arguments(config, tmp_path / "out"), f"data.path={tmp_path / 'elsewhere'}"]
    rows = [job.folder.name for job in losses.list_jobs(losses.parse(elsewhere), ["cosface", "sphereface2"])]
    assert not {row["run"] for row in json.loads((out / "all.json").read_text())} & set(rows)


def test_what_has_an_option_of_its_own_is_no_key_of_set(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for given, option in (("run.seed=7", "--seeds"), ("loss.scale=7", "--losses")):
        assert losses.main([*_arguments(config, tmp_path / "out"), given]) == 1
        line = f"error: --set {given.split('=')[0]}: this program sets it itself; use {option}\n"
        assert capsys.readouterr().err == line


@pytest.mark.parametrize("option", ["--page", "--json"])
def test_where_nothing_can_be_written_is_said_before_the_first_training(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
):
    assert losses.main([*_arguments(config, tmp_path / "out"), option, str(tmp_path / "none" / "file")]) == 1
    assert "none" in one_line(capsys) and not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize(
    "text",
    [
        *("[{}]", "{", "{}", '""', "[[]]", "[1]", "null", '{"run": 1}', "[" * 100_000, "\xff"),
        *(
            json.dumps([{**GONE, "setting": "cosface", key: wrong}])
            for key, wrong in (("setup", None), ("accuracy", {"tiny": "0.9"}), ("rate", "1"))
        ),
    ],
)
def test_a_file_that_holds_no_results_is_one_line(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    (tmp_path / "known.json").write_text(text, encoding="latin-1")
    line = error_of(losses.main([*_arguments(config, tmp_path / "out"), "--json", str(tmp_path / "known.json")]), capsys)
    assert line.startswith("error: --json: ") and "it is no file of results, as this program writes it" in line
    assert (tmp_path / "known.json").read_text(encoding="latin-1") == text and not (tmp_path / "out" / "runs").exists()


def test_the_order_is_seeds_then_rates_then_losses(config: Path, tmp_path: Path):
    options = losses.parse(["--config", str(config), "--out", str(tmp_path), "--seeds", "5", "6"])
    jobs = losses.list_jobs(options, ["arcface", "normface"])
    cases = [(job.setting, job.rate, job.seed) for job in jobs]
    assert cases == [(name, rate, seed) for seed in (5, 6) for rate in (1.0, 0.1) for name in ("arcface", "normface")]
    assert len({job.folder for job in jobs}) == 8


def test_the_row_of_sub_centers_trains_with_three_for_each_class(config: Path, tmp_path: Path):
    options = losses.parse(["--config", str(config), "--out", str(tmp_path), "--seeds", "5", "--rates", "1"])
    jobs = losses.list_jobs(options, ["arcface", "sub_center"])
    heads = [load_config(config, job.overrides, NAMED) for job in jobs]
    assert [(found.loss.name, found.head.sub_centers) for found in heads] == [("arcface", 1), ("arcface", 3)]


def test_an_interrupted_program_lets_its_training_save_and_goes_on_from_there(config: Path, tmp_path: Path):
    arguments = ["--losses", "cosface", "--seeds", "1", "--rates", "1", "--config", str(config), "--out", str(tmp_path)]
    more = ["--set", "log.every=1", "train.max_steps=400", "data.image_size=48"]
    program = Started(losses.main, [[*arguments, *more]], tmp_path)
    logs = (tmp_path / "runs").glob
    program.wait_until(lambda: any(log.read_text().count('"train"') >= 3 for log in logs("*/metrics.jsonl")), 100)
    program.send(signal.SIGTERM, 0)
    assert program.wait(60).returncode != 0
    folder = next((tmp_path / "runs").glob("cosface_*"))
    saved = list_checkpoints(folder)
    assert saved and not (tmp_path / "losses.json").exists()
    at = int(saved[-1].name.split("_")[1])
    assert 3 <= at < 400
    log = (folder / "train.log").read_text()
    assert f"saved after step {at} of 400" in (folder / "output.txt").read_text() and "resumed" not in log
