"""Every program explains itself: purpose, examples that its own parser takes, help and default of every option."""

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_runs import ROOT, error_of, write_dataset

from configs import load_config
from configs.loader import SCHEMA, find_config
from scripts import face
from training.sections import NAMED


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))
# started as files: face by the executable, torchrun by `face train`, arcface_torch_loop by scripts.benchmark.train without the
# packages of this project
FILES = ("face", "torchrun", "arcface_torch_loop")
PROGRAMS = [_module(path) for path in SCRIPTS if "make_parser(" in path.read_text()]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PARTS = [path for path in SCRIPTS if _module(path) not in PROGRAMS and path.stem not in FILES]
MODULES = {"train": "python train.py", "scripts.tables": "python -m scripts.tables"} | {
    module: f"face {verb}" for verb, module in face.all_verbs().items()
}


class _ParsedError(Exception):
    """Raised in place of parsing, with the parser."""


def _parser(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return the parser that a program builds."""
    program = importlib.import_module(module)

    def caught(parser: argparse.ArgumentParser, *args: Any) -> None:
        raise _ParsedError(parser)

    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, caught)
        with pytest.raises(_ParsedError) as found:
            program.main([])
    return found.value.args[0]


def _with_subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    inner = [action.choices.values() for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(sub for subs in inner for sub in subs)]


@pytest.mark.parametrize("module", MODULES)
def test_every_option_has_a_help_text_and_shows_its_default(module: str, monkeypatch: pytest.MonkeyPatch):
    for parser in _with_subcommands(_parser(module, monkeypatch)):
        text = parser.format_help()
        assert "None" not in text and "SUPPRESS" not in text
        formatter = parser._get_formatter()
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, f"{parser.prog}: {action.option_strings or action.dest}"
            shown = formatter._expand_help(action)
            assert shown[:30].split()[0] in text
            if action.default not in (None, False, "", argparse.SUPPRESS) and action.default != []:
                assert "default" in shown, f"{parser.prog}: {action.option_strings}"


def _check_taken(program: ModuleType, command: str, arguments: str) -> None:
    """Check that a program, whose run_main does nothing, takes these arguments."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            status = program.main(shlex.split(arguments, comments=True))
        except SystemExit as end:
            status = end.code
    assert status == 0, f"{command} {arguments}: {said.getvalue()}"


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_program_are_taken_by_its_own_parser(module: str, monkeypatch: pytest.MonkeyPatch):
    command = MODULES[module]
    text = _parser(module, monkeypatch).format_help()
    examples = re.findall(
        rf"^ *(?:Example: )?{re.escape(command)} (.+)$", text.split("Example")[-1].join(("Example", "")), re.M
    )
    assert examples, f"no example of {command}"
    assert len(text.split("\n\n")[1]) > 20, "no purpose"
    program = importlib.import_module(module)
    monkeypatch.setattr(program, "run_main", lambda *_: 0, raising=module != "scripts.doctor")  # parse, and do nothing
    for example in examples:
        _check_taken(program, command, example)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_commands_of_a_page_are_taken_by_the_programs(page: Path, monkeypatch: pytest.MonkeyPatch):
    text = page.read_text().replace("\\\n", " ")  # a command may go on in the next line
    modules = {f"python -m {name.removesuffix('.__main__')}": name for name in MODULES} | {"python train.py": "train"}
    for command, arguments in re.findall(r"(python train\.py|python -m (?:eval|scripts[.\w]+)\b)([^`\n]*--[^`\n]*)", text):
        if command not in modules:
            continue
        program = importlib.import_module(modules[command])
        monkeypatch.setattr(program, "run_main", lambda *_: 0)  # parse, and do nothing
        _check_taken(program, command, arguments)


def _face_commands(text: str) -> list[str]:
    """Return the commands `face VERB ...` of a page, without `face`: lines of code, and what is in backticks."""
    blocks = [text] if text.startswith("#!") else re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`((?:\./)?face [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    found = [match[1] for line in lines + inline if (match := re.match(r"(?:\./)?face +([^#\s].*)", line))]
    return [command for command in found if not command.startswith("VERB")]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "scripts" / "quickstart.sh"], ids=lambda path: path.name)
def test_the_verbs_of_a_page_and_their_arguments_are_taken(page: Path, monkeypatch: pytest.MonkeyPatch):
    text, verbs = page.read_text().replace("\\\n", " "), face.all_verbs()
    for command in _face_commands(text):
        words = shlex.split(command, comments=True)
        verb = next((name for count in (2, 1) if (name := " ".join(words[:count])) in verbs), None)
        if verb is None:  # `face data`, of all programs of a group
            assert len(words) == 1 and any(name.startswith(f"{words[0]} ") for name in verbs), f"face {command}: no such verb"
            continue
        arguments = words[len(verb.split()) :]
        only_names = "".join(arguments[:1]).startswith("--") or not re.search("[-=]", "".join(arguments))
        if f"face {command}`" in text and only_names:
            parsers = _with_subcommands(_parser(verbs[verb], monkeypatch))  # a sentence that names a program and its options
            known = {option for parser in parsers for option in parser._option_string_actions}
            assert known.issuperset(word for word in arguments if word.startswith("--")), f"face {command}: no such option"
            continue
        program = importlib.import_module(verbs[verb])
        for module in (program, importlib.import_module("train")):
            if hasattr(module, "run_main"):  # face doctor has none
                monkeypatch.setattr(module, "run_main", lambda *_: 0)  # parse, and do nothing
        _check_taken(program, f"face {verb}", shlex.join(arguments))
        if "timm:" in command and None in map(importlib.util.find_spec, ("timm", "torchvision")):
            continue  # the network's arguments are those of packages that are not here
        if verb == "train" and (config := find_config(Path(arguments[0]))).parent == SCHEMA.parent and config.is_file():
            load_config(config, [word for word in arguments[1:] if "=" in word and not word.startswith("--")], NAMED)


def test_only_benchmarks_have_parts_that_are_no_programs():
    """What other programs share is in the package that it serves."""
    assert {path.relative_to(ROOT / "scripts").parts[0] for path in PARTS} <= {"benchmark"}


def test_every_program_has_a_verb():
    assert {"scripts.tables", *face.all_verbs().values()} == {*PROGRAMS, "eval.__main__"} and len(PROGRAMS) > 30
    assert all('__name__ == "__main__"' in path.read_text() for path in SCRIPTS if _module(path) in PROGRAMS)  # python -m


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "command", ["face_training.py", "face_training.py doctor", "-m scripts", "train.py configs/base.yaml --print-config"]
)
def test_a_program_whose_output_nobody_reads_ends_quietly(command: str, buffered: bool):
    reader, writer = os.pipe()
    os.close(reader)  # as head does when it has its lines
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    whole = [sys.executable, *command.split()]
    done = subprocess.run(whole, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_torchrun_shows_its_purpose_and_the_options_of_torchrun(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/launch/torchrun.py", "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and "without its traceback" in done.stdout and "--max-restarts" in done.stdout


def _damaged(folder: Path, what: str) -> Path:
    """Make a sound set one that no program takes; return it."""
    if what in ("no set", "nothing", "folder of a person", "unknown ending", "text"):
        shutil.rmtree(folder)
    if what == "no set":
        folder.mkdir()
    elif what == "classes":
        (folder / "property").write_text("5,112,112")
    elif what == "index":
        (folder / "train.idx").write_text("0\tx\n")
    elif what == "records":
        (folder / "train.rec").write_bytes(b"")
    elif what == "text":
        folder.write_text("no list at all\n")
    elif what != "nothing":
        (folder / "a").mkdir(parents=True)
    if what == "unknown ending":
        (folder / "a" / "1.pgm").write_bytes(b"P5 1 1 255 x")
    return folder


OF_RECORDS = ["classes", "index", "records"]  # which `face data repair` may mend


@pytest.mark.parametrize("what", ["no set", *OF_RECORDS, "nothing", "folder of a person", "unknown ending", "text"])
def test_a_tool_names_no_key_of_a_configuration_that_its_user_did_not_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
):
    """A set is the value of data.path in a training, and a word of the command line elsewhere."""
    keys = {f"{section}.{key}" for section, entries in load_config(SCHEMA).items() for key in entries}
    write_dataset(tmp_path / "set")
    folder, out = _damaged(tmp_path / "set", what), tmp_path / "out"
    start = ["configs/base.yaml", f"data.path={folder}", f"run.output={tmp_path}", "data.index_cache=off", "eval.targets=[]"]
    assert error_of(importlib.import_module("train").main([*start, "--check"]), capsys).startswith("error: data.path: ")
    programs = {
        "inspect": [folder, "--out", out],
        "verify": [folder],
        "filter": [folder, out],
        "merge": [folder, folder, "--out", out],
        "split": [folder, out],
        "shuffle": [folder, out],
        "rec_to_folder": [folder, out],
        "show_augmentation": [folder, tmp_path / "sheet.png"],
        "pairs_to_bin": ["sample", folder, tmp_path / "pairs.bin"],
    }
    programs |= {} if what in OF_RECORDS else {"repair": [folder], "folder_to_rec": [folder, out]}
    for name, arguments in programs.items():
        assert importlib.import_module(f"scripts.data.{name}").main(list(map(str, arguments))) == 1, name
        said = capsys.readouterr().err
        assert str(folder) in said and not [key for key in keys if key in said], f"{name}: {said}"
        assert len([line for line in said.splitlines() if line.startswith("error:")]) == 1, said


def test_usage_of_train_says_that_overrides_are_optional(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        importlib.import_module("train").main([])
    said = capsys.readouterr().err
    assert "[section.key=value ...]" in said and said.endswith("the following arguments are required: config\n")
