"""docs/deploy.md tells the truth: its commands are taken, and its tables and numbers are those of the code."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from analysis import all_pairs, clustering, group_files, groups, quality
from configs import values
from data import scan, tar_dataset
from data.recordio.container import MAX_LENGTH
from data.recordio.image_record import MAX_CLASSES
from deploy import results
from deploy.card.card import FIELDS
from deploy.embed import table as embed_table
from deploy.export import checks as export_checks
from deploy.export import graph as export_graph
from deploy.faces import detect as detect_sheet
from deploy.faces import tracks, video
from deploy.faces.detector import CenterFace, RetinaFace, Scrfd, YuNet
from deploy.gallery.database import MAX_FACE, PATIENCE
from deploy.serve import answers, server
from eval.foreign_networks import InputContract
from eval.pair_sets import bin_file, safe_pickle
from eval.pair_sets.sample import USUAL
from eval.verification import FAR_TARGETS, FOLDS
from partial_fc.config import EXACT_UP_TO
from partial_fc.sampling import neighbour_search, planning
from scripts.demo.make_data import PAIRS_PER_FOLD
from scripts.deploy import export
from scripts.deploy.verify import DIFFERENT
from scripts.face import all_verbs
from utils import files, image
from utils.alignment import TEMPLATE
from utils.distributed import watchdog

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
    assert (tracks.KEPT, tracks.GAP) == (8, 1) and "eight best faces" in PAGE and "away for a second" in PAGE
    assert PATIENCE == 60 and "gives up after a minute" in PAGE


def test_the_limits_on_other_pages_are_those_of_the_code():
    limits = video.MAX_FRAME_PIXELS, image.MAX_PIXELS, image.MAX_PHOTO_PIXELS, answers._MAX_PIXELS
    frame, small, large, sent = (pixels // 10**6 for pixels in limits)
    for name, words in (
        ("security", f"{frame} million pixels a frame, {video._MEMORY >> 30} GiB, {video._PATIENCE} s a frame"),
        ("security", f"2^{(MAX_LENGTH + 1).bit_length() - 1} bytes a record, 2^{MAX_CLASSES.bit_length() - 1} classes"),
        ("security", f"{bin_file._MAX_FILE_SIZE >> 30} GiB; {safe_pickle._MAX_STEPS // 10**6} million operations"),
        ("security", f"{files.MAX_TEXT >> 30} GiB a list, {files.MAX_PICTURE >> 20} MiB an image file"),
        ("security", f"{files.MAX_DEPTH} folders deep"),
        ("security", f"chained headers of {tar_dataset._MAX_EXTENSION >> 20} MiB"),
        ("security", f"{small} million pixels in a set, {large} million for a photograph"),
        ("security", f"{image.MAX_SIDE:,} a side; sides 1 : {image.MAX_RATIO}; {image.MAX_SCANS} scans"),
        ("security", f"{files.MAX_SMALL_TEXT >> 20} MiB; {results._MAX_SETS} sets; {results._MAX_LIST:,} points of a curve"),
        ("security", f"{server.MAX_PICTURE >> 20} MiB and {sent} million pixels a picture; {server.MAX_WAITING} requests"),
        ("security", f"{server.MAX_CONNECTIONS} connections (more with TLS"),
        ("security", f"every number has bounds | {values._LONGEST >> 10} KiB"),
        ("security", f"{MAX_FACE >> 20} MiB a face"),
        ("configuration", f"brackets nested more than {values._DEEPEST} deep"),
        ("head", f"at most {neighbour_search._MOST_LISTS:,}; k-means over a sample"),
        ("head", f"its recall, for {planning._CHECKED} classes"),
        ("head", f"exact up to {EXACT_UP_TO:,} classes"),
        ("running", f"ends the run {watchdog._SILENCE:.0f} s after the last"),
        ("data", f"at most {scan.MAX_DISTANCE} apart"),
        ("data", f"at least {scan.MIN_CORRELATION})"),
        ("data", f"give {USUAL:,} pairs"),
        ("analysis", f"larger of {groups._LEAST} and {groups._SAMPLED:,} / groups"),
        ("analysis", f"lowest edge of {all_pairs.NUM_BINS:,} bins"),
        ("analysis", f"others first, with none, {str(clustering.NEIGHBOURS[1:-1])[1:-1]} or {clustering.NEIGHBOURS[-1]}"),
        ("analysis", f"Gain, up to {100 * quality.WITHIN:.0f} %"),
    ):
        assert words in " ".join((ROOT / "docs" / f"{name}.md").read_text().split()), words
    assert group_files._MOST_NUMBERS == 10 and "more than ten ages are grouped" in (ROOT / "docs" / "analysis.md").read_text()
