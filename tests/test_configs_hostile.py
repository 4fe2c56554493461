"""Configurations that attack: each ends quickly in one line that says what is wrong."""

from pathlib import Path

import pytest
from tiny_runs import error_of, one_line, run_program

import train
from configs.rules import POSITIVE, RANGES

TEXTS = {
    "a list as a key": "train: {[1, 2]: 3}",
    "a mapping as a key": "train: {{a: 1}: 3}",
    "a list as a section": "? [1, 2]\n: 3",
    "tag map on a list": "train: !!map [1]",
    "tag map on text": "train: !!map x",
    "tag int on text": "train: {batch_size: !!int x}",
    "tag int on a list": "train: {batch_size: !!int [1]}",
    "tag float on text": "train: {epochs: !!float x}",
    "tag bool on text": "train: {batch_size: !!bool x}",
    "tag timestamp on text": "train: {batch_size: !!timestamp x}",
    "tag binary on text": "run: {name: !!binary é}",
    "tag set on a list": "train: !!set [1]",
    "tag omap on text": "train: !!omap x",
    "tag pairs on text": "train: !!pairs x",
    "tag of a program": "run: {name: !!python/object/apply:os.system [ls]}",
    "deep lists": "train: " + "[" * 1500 + "]" * 1500,
    "deep mappings": "train: " + "{a: " * 1500 + "1" + "}" * 1500,
    "400 digits": f"train: {{batch_size: {'9' * 400}}}",
    "5000 digits": f"train: {{batch_size: {'9' * 5000}}}",
    "tagged 5000 digits": f"train: {{batch_size: !!int {'9' * 5000}}}",
    "400 digits as a rate": f"optimizer: {{lr: {'9' * 400}}}",
    "tagged digits as a rate": f"optimizer: {{lr: !!int {'9' * 400}}}",
    "a long mapping": "train: {" + "a: 1, " * 50_000 + "}",
    "a merge of text": "train: {<<: x}",
    "a circle": "train: &a {batch_size: *a}",
    "laughs under a key": "eval: {targets: [&a [x], &b [*a, *a, *a], &c [*b, *b, *b]]}",
}

# what is said of some of them; a general error would have an unfit fix
WORDS = {
    **dict.fromkeys(("a list as a key", "a mapping as a key", "a list as a section"), "line 1: a key must be a name"),
    **dict.fromkeys(("tag map on a list", "tag map on text", "tag set on a list"), "line 1: a tag says mapping"),
    "tag int on text": "line 1: the tag !!int does not fit 'x'; leave out the tag",
    "tag float on text": "line 1: the tag !!float does not fit 'x'; leave out the tag",
    "tagged 5000 digits": "line 1: the tag !!int does not fit '99999999999999999999'; leave out the tag",
    **dict.fromkeys(("tag bool on text", "tag timestamp on text"), "a tag does not fit its value"),
    **dict.fromkeys(("deep lists", "deep mappings"), "nested too deeply"),
    "400 digits": "got '99999999999999999999... (400 characters)'",
    "5000 digits": "got '99999999999999999999... (5000 characters)'",
    "a long mapping": "it has 300,009 characters, and may have 262,144 at most",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str):
    (tmp_path / "run.yaml").write_text(TEXTS[name], encoding="utf-8")
    assert WORDS.get(name, "run.yaml") in error_of(train.main([str(tmp_path / "run.yaml"), "--print-config"]), capsys)


def test_a_billion_laughs_end_within_seconds(tmp_path: Path):
    lines = [f"    - &{new} [{', '.join(['*' + old] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    (tmp_path / "run.yaml").write_text("\n".join(["eval:", "  targets:", "    - &a [x, x]", *lines]))
    ended = run_program(train.main, [[str(tmp_path / "run.yaml"), "--print-config"]], timeout=60)
    assert ended.returncode == 1 and "at most 16 aliases (*name) are allowed" in ended.stderr


@pytest.mark.parametrize("name", [*RANGES, *POSITIVE])
@pytest.mark.parametrize("value", ["1e308", str(10**21), "9" * 400])
def test_a_number_beyond_all_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: str):
    (tmp_path / "run.yaml").write_text("")
    # what 10**21 is small enough for is no overflow later: the keys that take numbers up to 1e30
    fits = value == str(10**21) and (RANGES.get(name, (0, 0))[1] >= 1e30 or name in ("loss.scale", "optimizer.eps"))
    fits = fits and name != "schedule.min_lr"  # which optimizer.lr bounds
    assert train.main([str(tmp_path / "run.yaml"), f"{name}={value}", "--print-config"]) == (0 if fits else 1)
    if not fits:
        assert name in one_line(capsys)
