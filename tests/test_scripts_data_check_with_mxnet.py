"""The comparison with mxnet: on answers that mxnet gave once, and, where its environment is made, on what it says today."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.data import check_with_mxnet

ROOT = Path(__file__).parent.parent
SETS = sorted(path.parent for path in (ROOT / "tests" / "fixtures" / "rec").glob("*/expected.json"))

ANSWERED = [folder for folder in SETS if folder.name[:2] in ("01", "02", "06")]  # the answers hold pixels, too


def _answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Return what mxnet said about a fixture when it was made, in the words of scripts/data/mxnet_judge.py."""
    for number, record in enumerate(json.loads((folder / "expected.json").read_text())["records"]):
        found = {"key": record.get("key", number), "raw": record["raw_sha256"][:32]}
        if "flag" in record:
            label = record["label"]
            values = [float(value) for value in label] if isinstance(label, list) else float(label)
            if not isinstance(values, list):
                values = float(np.float32(values))
            found |= {"flag": record["flag"], "label": repr(values), "id": record["id"], "id2": record["id2"]}
            found["payload"] = record["payload_sha256"][:32]
            if "rgb_sha256" in record:
                found["pixels"] = [record["rgb_shape"], record["rgb_sha256"][:32]]
            elif record["payload_len"]:
                found["pixels"] = None
        else:
            found["error"] = "mxnet cannot unpack it"
        yield found


@pytest.mark.parametrize("folder", ANSWERED, ids=lambda folder: folder.name)
def test_nothing_differs_from_what_mxnet_once_said(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert check_with_mxnet.compare(folder, _answers(folder)) == 0, capsys.readouterr().out
    only_one_decodes = 2 if folder.name == "06_encodings" else 0  # a WebP, a truncated JPEG
    assert f", {only_one_decodes} decoded by only one" in capsys.readouterr().out


@pytest.mark.parametrize("name, value", [("raw", "0"), ("label", "7.5"), ("id2", 9), ("pixels", [[1, 1, 3], "0"])])
def test_a_difference_is_found_and_named(name: str, value: object, capsys: pytest.CaptureFixture[str]):
    folder = SETS[0]
    answers = list(_answers(folder))
    answers[3][name] = value
    assert check_with_mxnet.compare(folder, iter(answers)) == 1
    said = capsys.readouterr().out
    assert f"record {answers[3]['key']} of" in said and name in said and f"{value} by mxnet" in said


@pytest.mark.parametrize("folder", SETS, ids=lambda folder: folder.name)
def test_mxnet_says_so_today(folder: Path):
    venv = ROOT / ".venv-mxnet"
    if not (venv / "installed").is_file():
        pytest.skip("mxnet's environment is not made; `python -m scripts.data.check_with_mxnet tests/fixtures/rec/*` makes it")
    assert check_with_mxnet.main([str(folder), "--venv", str(venv)]) == 0
