"""The fuzzer over all inputs finds nothing; broken readers are found, each kind of bad end; what it once found is mended."""

import base64
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

from tests.attack import fuzz as fuzz_formats
from tests.attack import fuzz_inputs
from tests.attack.fuzz_cases import Outcome, find_program
from tests.attack.fuzz_files import Case, Entry, Fifo, Folder, Link, Place, dump_case
from tests.attack.fuzz_finds import minimise, run_one
from tests.attack.fuzz_grammar import saved
from tests.attack.fuzz_inputs import Input, make_case
from utils.program import run_main

FINDS = Path(__file__).parent / "fixtures" / "finds"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Input]]:
    yield fuzz_formats.load_inputs(tmp_path_factory.mktemp("seeds"))


def test_a_short_attack_on_all_inputs_finds_nothing(tmp_path: Path):
    out, report = tmp_path / "finds", tmp_path / "report.json"
    # so many cases on any machine, however long it takes; each input has some before one has many
    arguments = ["--cases", "490", "--minutes", "9", "--seed", "5", "--out", str(out), "--json", str(report)]
    assert fuzz_formats.main(arguments) == 0, [path.read_text() for path in out.glob("*/said.txt")]
    found = json.loads(report.read_text())["inputs"]
    assert len(found) == 29 and not any(tally["finds"] for tally in found.values())
    assert sum(tally["cases"] for tally in found.values()) == 490 and all(tally["cases"] for tally in found.values())
    assert sum(tally["read"] for tally in found.values()) > 30  # the damage is not total
    assert sum(tally["refused"] for tally in found.values()) > 100  # and not none


def test_the_page_names_each_input_of_the_fuzzer(inputs: dict[str, Input]):
    rows = re.findall(r"^\| .* \| ((?:`[\w-]+`(?:, )?)+) \|$", (FINDS.parents[2] / "docs" / "security.md").read_text(), re.M)
    assert len(rows) == 19 and {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == inputs.keys()


def test_case_n_of_a_seed_is_the_same_always(inputs: dict[str, Input], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    clock, now = itertools.count(10**9, 3600), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 10**6)
    other = fuzz_formats.load_inputs(tmp_path)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    for name in inputs:
        first, again = ([dump_case(make_case(name, one[name], 7, k), {}) for k in range(12)] for one in (inputs, other))
        assert first == again and first[3] != first[4], name


# ---- every kind of bad end is found; each function is a reader with one fault


def _good(words: list[str]) -> int:
    return run_main(lambda: None)


def _refuses(words: list[str]) -> int:
    def run() -> None:
        raise ValueError("no such thing")

    return run_main(run)


def _refuses_behind_a_bar(words: list[str]) -> int:
    def run() -> None:
        bar = tqdm(total=30, mininterval=0)
        bar.update(2)
        raise ValueError("no such thing")  # the bar is drawn once more when it goes

    return run_main(run)


def _raises(words: list[str]) -> int:
    def run() -> None:
        raise KeyError("a fault")

    return run_main(run)


def _crashes(words: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _leaves(words: list[str]) -> int:
    os._exit(0)


def _sleeps(words: list[str]) -> int:
    time.sleep(60)
    return 0


def _spins(words: list[str]) -> int:
    while True:
        pass


def _swallows(words: list[str]) -> int:
    return int(np.ones(40 << 20, dtype=np.uint8)[0]) - 1


def _marks(words: list[str]) -> int:
    os.mknod("../marker")  # as a payload does in C, where Python's hooks see nothing
    return 0


def _writes_beside(words: list[str]) -> int:
    os.mknod("../elsewhere")
    return 0


def _writes_far_away(words: list[str]) -> int:
    with open("../../elsewhere", "w") as file:
        file.write("x")
    return 0


def _removes(words: list[str]) -> int:
    os.rename("x", "../../x")
    return 0


def _runs(words: list[str]) -> int:
    return os.system("true")


def _calls(words: list[str]) -> int:
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.2", 9)) * 0


def _two_lines(words: list[str]) -> int:
    os.write(2, b"error: one\nand more\n")
    return 1


def _no_line(words: list[str]) -> int:
    return 1


def _error_and_success(words: list[str]) -> int:
    os.write(2, b"error: one\n")
    return 0


def _escapes(words: list[str]) -> int:
    os.write(1, b"\x1b[2J")
    return 0


BAD = {
    _raises: "traceback: KeyError", _crashes: "died: SIGSEGV", _leaves: "died: exit status 0", _sleeps: "hang", _spins: "hang",
    _swallows: "large", _marks: "marker", _writes_beside: "outside", _writes_far_away: "event: open outside",
    _removes: "event: os.rename outside", _runs: "event: os.system", _calls: "event: socket.connect", _two_lines: "lines",
    _no_line: "lines", _error_and_success: "silent", _escapes: "escape",
}  # fmt: skip


def _outcome(reader: Callable[[list[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(fuzz_inputs, "image", reader)
    case = Case(["tests.attack.fuzz_inputs:image", "x"], {"x": b"1"})
    return run_one(case, Place.below(tmp_path / "place"), {}, memory=20)


@pytest.mark.parametrize("reader", BAD, ids=lambda reader: reader.__name__)
def test_a_bad_end_is_found(reader: Callable[[list[str]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if BAD[reader] == "hang":  # the others have the usual time: on a busy machine even a fork may take two seconds
        monkeypatch.setattr("tests.attack.fuzz_cases.MAX_SECONDS", 2)
    outcome = _outcome(reader, tmp_path, monkeypatch)
    assert outcome.is_find and outcome.kind.startswith(BAD[reader])
    assert not (tmp_path / "place" / "marker").exists()  # cleared away for the next case


def test_memory_that_the_fuzzer_had_and_freed_counts_when_a_case_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = [np.ones(64 << 10, dtype=np.uint8) for _ in range(1024)]  # small enough for the heap
    last = np.ones(64 << 10, dtype=np.uint8)  # above them, so that the heap cannot shrink when they go
    del blocks
    assert _outcome(_swallows, tmp_path, monkeypatch).kind == "large: resident memory"
    assert last[0] == 1


@pytest.mark.parametrize("end", ["of another arena", "not continued"])
def test_memory_that_cannot_be_given_back_counts_too(end: str, tmp_path: Path):
    command = [sys.executable, "-c", _KEEPS, end, str(tmp_path / "place")]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert done.stdout == "large: resident memory\n"


_KEEPS = """
import ctypes, sys
from pathlib import Path
import numpy as np, pytest
from tests.test_attack_fuzz import _outcome, _swallows
from utils.allocator import keep_freed_memory

keep_freed_memory()
if sys.argv[1] == "of another arena":
    with pytest.raises(MemoryError):
        np.empty(1 << 48, dtype=np.uint8)  # moves this thread there
large = np.ones(50 << 20, dtype=np.uint8)
if sys.argv[1] == "not continued":
    ctypes.CDLL(None).sbrk(4096)
del large
with pytest.MonkeyPatch.context() as patch:
    print(_outcome(_swallows, Path(sys.argv[2]), patch).kind)
"""


def test_success_and_one_line_are_no_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert _outcome(_good, tmp_path / "a", monkeypatch).kind == "read"
    assert _outcome(_refuses, tmp_path / "b", monkeypatch).kind == "refused"
    assert _outcome(_refuses_behind_a_bar, tmp_path / "c", monkeypatch).kind == "refused"


def _load_entry(entry: Any) -> Entry:
    if entry is None or isinstance(entry, str):
        return entry if entry is None else entry.encode("ascii")
    if "base64" in entry:
        return base64.b64decode(entry["base64"])
    return Link(entry["link"]) if "link" in entry else Fifo() if "fifo" in entry else Folder()


def _load_case(path: Path) -> tuple[dict[str, Any], Case]:
    """Return the facts and the case that `dump_case` wrote."""
    tree = json.loads(path.read_text())
    files = {name: _load_entry(entry) for name, entry in tree.pop("files").items()}
    return tree, Case(tree.pop("command"), files)


def test_a_find_is_made_small_and_kept_with_the_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(words: list[str]) -> int:
        if b"\x89PNG" in Path(words[0]).read_bytes():
            raise KeyError("a fault")
        return 0

    monkeypatch.setattr(fuzz_inputs, "image", broken)
    arguments = ["--inputs", "image", "--cases", "40", "--minutes", "10", "--out", str(tmp_path / "finds")]
    assert fuzz_formats.main(arguments) == 1
    said = capsys.readouterr().out
    kept = [_load_case(path) for path in (tmp_path / "finds").glob("*/case.json")]
    facts, case = next((facts, case) for facts, case in kept if case.command[0].endswith(":image"))
    assert facts["kind"].startswith("traceback: KeyError") and facts["repeat"] in said
    content = case.files["image"]
    assert isinstance(content, bytes) and b"\x89PNG" in content and len(content) < 64
    again = facts["repeat"].split()[3:]
    assert fuzz_formats.main(again) == 1 and "KeyError" in capsys.readouterr().out


def test_minimising_leaves_what_the_fault_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(words: list[str]) -> int:
        os.write(2, b"error: x\n" * (Path("a").exists() and b"key" in Path("a").read_bytes()))
        return 0

    monkeypatch.setattr(fuzz_inputs, "image", broken)
    place = Place.below(tmp_path / "place")
    case = Case(["tests.attack.fuzz_inputs:image"], {"a": b"x" * 300 + b"key" + b"y" * 300, "b": b"unused", "p": Fifo()})
    kind = run_one(case, place, {}, 20).kind
    assert minimise(case, kind, place, {}, 20, seconds=60).files == {"a": b"key"}


def test_minimising_a_large_file_ends_in_time(tmp_path: Path):
    case = Case(["tests.attack.fuzz_inputs:image"], {"a": bytes(200_000_000)})
    started = time.monotonic()
    assert minimise(case, "no such end", Place.below(tmp_path / "place"), {}, 20, seconds=0) == case
    assert time.monotonic() - started < 20  # cut byte by byte, it would take years


def test_no_case_holds_a_file_that_is_only_long():
    grown = torch.zeros(1, 16).expand(10**6, 16).contiguous()
    with pytest.raises(RuntimeError, match="a file of 640"):
        saved(grown)
    assert len(saved(torch.zeros(3))) < 3000


def test_cases_come_back_from_json(tmp_path: Path):
    files = {"a": b"text", "b": b"\xff\0", "c/d": None, "l": Link("/dev/zero"), "p": Fifo(), "f": Folder(), "\udcff": b""}
    (tmp_path / "case.json").write_text(dump_case(Case(["train", "x"], files), {"input": "list"}))
    assert _load_case(tmp_path / "case.json") == ({"input": "list"}, Case(["train", "x"], files))


@pytest.mark.parametrize("path", sorted(FINDS.glob("*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_was_found_is_mended(path: Path, inputs: dict[str, Input], tmp_path: Path):
    facts, case = _load_case(path)
    entry = inputs[facts["input"]]
    outcome = run_one(case, Place.below(tmp_path / "place"), entry.sound, entry.memory)
    assert not outcome.is_find, f"{outcome.kind}: {outcome.detail}"


def test_an_error_is_one_line_of_bounded_length_that_no_terminal_obeys(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train = find_program("train")
    assert train([str(tmp_path / "a\x1b[2J\nerror: b.yaml"), "--check"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "a\\x1b[2J\\nerror: b.yaml" in said and "\x1b" not in said
    (tmp_path / "x.yaml").write_text("")
    assert train([str(tmp_path / "x.yaml"), "--check", f"{'k' * 30_000}=1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: override 'kkk") and " ... " in said and said.count("\n") == 1 and len(said) < 5000
