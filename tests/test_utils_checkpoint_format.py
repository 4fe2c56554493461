"""Manifests that lie: every program that reads one ends in one line, or works; and no old one stops a new save."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import some
from pictures import jpeg, picture
from tiny_runs import small_run, write_dataset

import train
from eval.__main__ import main as evaluate
from eval.pair_sets.bin_file import write_bin
from scripts.checkpoint import main as checkpoint
from utils.checkpoint.format import list_checkpoints, step_of

DEEP: Any = []
for _ in range(800):
    DEEP = [DEEP]
VALUES = [
    None, True, -1, 0, 10**30, 1.5, math.nan, math.inf, "text", "", "../../x", "a\0b", [], [1], [5, 3], {}, {"a": {}}, DEEP,
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a run folder with one checkpoint, and its command line."""
    folder = tmp_path_factory.mktemp("run")
    write_dataset(folder)
    arguments = small_run(folder, folder, "train.max_steps=1", "eval.targets=[]", "run.name=sound")
    assert train.main(arguments) == 0
    write_bin(folder / "faces.bin", [jpeg(picture(number)) for number in range(40)], [bool(pair % 2) for pair in range(20)])
    return folder / "sound", arguments


def _lies(sound: str) -> Iterator[tuple[str, Any]]:
    """Yield each way to a field with the whole manifest, in which that field holds something else or is missing."""

    def changed(place: tuple[Any, ...], value: Any = None, missing: bool = False) -> Any:
        whole = json.loads(sound)
        at = whole
        for key in place[:-1]:
            at = at[key]
        if missing:
            del at[place[-1]]
        else:
            at[place[-1]] = value
        return whole

    def places(value: Any, way: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, dict):
            for key in value:
                # of the configuration only what a program reads by name
                if way[:1] != ("config",) or (len(way) == 1) or key in ("name", "seed", "width", "embedding_size", "targets"):
                    yield (*way, key)
                    yield from places(value[key], (*way, key))
        elif isinstance(value, list):
            for number in range(len(value)):
                yield (*way, number)

    for place in places(json.loads(sound), ()):
        name = ".".join(map(str, place))
        yield f"{name} missing", changed(place, missing=True)
        for value in VALUES if place[0] != "config" or len(place) == 3 else [None, 5, "text", [1]]:
            yield f"{name} {value!r:.20}", changed(place, value)
    yield from ((f"whole {value!r:.20}", value) for value in VALUES)


def test_no_lie_in_a_manifest_is_a_traceback(run: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]):
    folder, arguments = run
    newest = list_checkpoints(folder)[0]
    path = newest / "manifest.json"
    sound = path.read_text()
    texts = {name: json.dumps(lie) for name, lie in _lies(sound)}
    texts |= {"empty": "", "half": sound[: len(sound) // 2], "deep": "[" * 100_000, "digits": '{"step": ' + "9" * 5000 + "}"}
    texts["twice"] = sound.replace('"step": 1', '"step": 1, "step": "1"')
    refused, tried = 0, some(texts.items(), 3)
    try:
        for number, (name, text) in enumerate(tried):
            path.write_text(text)
            slow = [
                (train.main, [*arguments, f"checkpoint.resume={newest}"]),
                (evaluate, [str(newest), "--targets", "no_such_set", "--device", "cpu"]),
            ]
            # every third lie meets one of the slow programs, each field both of them
            for program, words in (
                (checkpoint, ["show", str(newest)]),
                (checkpoint, ["verify", str(newest)]),
                *([slow[number // 3 % 2]] if number % 3 == 0 else []),
            ):
                status = program(words)
                said = capsys.readouterr().err
                assert status in (0, 1), name
                errors = [line for line in said.splitlines() if line.startswith("error: ")]
                assert len(errors) == status and "Traceback" not in said, f"{name}: {said}"
                assert all(len(line) < 900 for line in errors), f"{name}: {said}"
                refused += status
    finally:
        path.write_text(sound)
    assert refused > len(tried) / 2


@pytest.mark.parametrize("score", ["very good", [1], {"a": 1}, True, math.nan, 10**400])
def test_an_old_manifest_with_a_score_that_is_none_does_not_stop_new_saves(
    run: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], score: Any
):
    arguments = small_run(run[0].parent, tmp_path, "eval.targets=[]", "checkpoint.every=1", "checkpoint.keep_last=2")
    assert train.main([*arguments, "train.max_steps=2"]) == 0
    oldest, other = list_checkpoints(tmp_path / "tiny")
    for path, written in ((oldest, score), (other, 0.5)):  # which would be compared
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**manifest, "score": written}))
    assert train.main([*arguments, "train.max_steps=5"]) == 0
    said = capsys.readouterr().out
    assert "could not be saved" not in said and f"{oldest}: manifest.json cannot be read (score must be" in said
    assert {4, 5} <= {step_of(path) for path in list_checkpoints(tmp_path / "tiny")}
    assert oldest.is_dir()  # a bad one is left alone, and named
