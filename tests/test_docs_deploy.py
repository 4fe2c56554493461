"""docs/deploy.md tells the truth: its commands are taken, and its tables and numbers are those of the code."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from deploy.card.card import FIELDS
from deploy.embed import table as embed_table
from deploy.export import checks as export_checks
from deploy.export import graph as export_graph
from deploy.faces import detect as detect_sheet
from deploy.faces import tracks, video
from deploy.faces.detector import CenterFace, RetinaFace, Scrfd, YuNet
from deploy.gallery.database import PATIENCE
from deploy.serve import answers, server
from eval.foreign_networks import InputContract
from eval.verification import FAR_TARGETS, FOLDS
from scripts.demo.make_data import PAIRS_PER_FOLD
from scripts.deploy import export
from scripts.deploy.verify import DIFFERENT
from scripts.face import all_verbs
from utils.alignment import TEMPLATE

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "deploy.md").read_text()
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


def _first_cells(heading: str) -> list[str]:
    """Return what is in backticks in the first column of the table whose header row begins with these words."""
    lines = PAGE.partition(f"| {heading}")[2].splitlines()[2:]
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return [name for line in lines[:end] for name in re.findall("`([^`]+)`", line.split("|")[1])]


def _program(command: str) -> tuple[str, list[str]]:
    """Return the module and the arguments of `face VERB ...`."""
    face, *words = shlex.split(command, comments=True)
    assert face == "face"
    verbs = all_verbs()
    count = 1 if words[0] in verbs else 2
    return verbs[" ".join(words[:count])], words[count:]


def test_each_far_that_is_shown_is_measured_by_the_sets_of_the_demo_and_packages_come_in_tested_versions_beside_this_torch():
    # docs/analysis.md measures rates on all pairs of a table, of which there are more
    pages = [path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if path.name != "analysis.md"]
    texts = [path.read_text() for path in pages]
    programs = [path.read_text() for path in (ROOT / "scripts" / "deploy").glob("*.py")]
    rates = {far for text in texts + programs for far in re.findall(r"--far (\d[^`\s]*)", text)}
    assert rates and all(far in FAR_TARGETS and float(far) * FOLDS * PAIRS_PER_FOLD / 2 >= 1 for far in rates)
    commands = [command for text in texts for command in re.findall(r"`(pip install [^`]+)`", text)]
    assert {"onnx", "pyarrow", "uvicorn", "torchvision"} <= {name for command in commands for name in command.split()}
    for command in commands:
        assert re.search(" -(r|c) requirements|-e [.]$", command), command
        assert "torchvision" not in command or " -c requirements.txt -c requirements-optional.txt" in command


def test_every_program_of_the_folder_is_on_the_page():
    programs = {path.stem for path in (ROOT / "scripts" / "deploy").glob("*.py") if "run_main(" in path.read_text()}
    on_page = {_program(command)[0] for command in COMMANDS if command.startswith("face ")}
    assert programs == {name.rpartition(".")[2] for name in on_page if name.startswith("scripts.deploy.")}


def test_the_tables_have_every_key_column_and_field():
    contract = InputContract(112, "NCHW", "rgb", 0.0, 1.0, "uint8", tuple(map(tuple, TEMPLATE)), 512, *[False] * 2, *[""] * 5)
    assert sorted(_first_cells("key | meaning |")) == sorted(contract.as_texts())
    assert _first_cells("column | meaning |") == [*embed_table._COLUMNS, "embedding"]
    assert _first_cells("field | what") == list(FIELDS)


def test_the_numbers_of_the_page_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    monkeypatch.setattr(export, "export", seen.append)
    assert export.main(["run", "--to", "onnx", "--out", "a.onnx"]) == 0
    counts = ("no", "one", "two", "three", "four", "five", "six", "seven")
    for words in (
        "in batches of {}, {} and {} images".format(*export_checks.BATCHES),
        f"may differ from torch's by {export_checks.PARITY:.0e}".replace("e-0", "e-"),
        f"come from {seen[0].calibration_images} images",
        f"more than {export_graph.LARGEST_FILE / 1e9} GB",
        f"`--min-score` is {CenterFace.own_min_score} for CenterFace, {Scrfd.own_min_score} for SCRFD, "
        f"{RetinaFace.own_min_score} for RetinaFace and {YuNet.own_min_score} for YuNet",
        f"up to {detect_sheet._FACES} photographs",
        f"up to {detect_sheet._REJECTED} rejected ones",
        f"shows the {counts[answers._TOP]} people",
        f"above {server.MAX_PICTURE >> 20} MiB or {answers._MAX_PIXELS // 10**6} million pixels",
        f"while {server.MAX_WAITING} others are in memory",
        f"more than {server._SECONDS:.0f} seconds to arrive",
        f"same person (or without a threshold), {DIFFERENT} for different people, 1 for an error, 2 for a wrong",
    ):
        assert words in " ".join(PAGE.split()), words
    limits = video.MAX_FRAME_PIXELS // 10**6, video._MEMORY >> 30, video._PATIENCE
    assert "{} million pixels a frame, {} GiB, {} s a frame".format(*limits) in (ROOT / "docs" / "security.md").read_text()
    assert (tracks.KEPT, tracks.GAP) == (8, 1) and "eight best faces" in PAGE and "away for a second" in PAGE
    assert PATIENCE == 60 and "gives up after a minute" in PAGE
