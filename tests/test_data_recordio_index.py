"""The text index of a record file: what mxnet accepts is read, anything else is an error with its line."""

from pathlib import Path

import pytest

from data.recordio import index as record_index
from data.recordio.image_record import read_index


@pytest.mark.parametrize(
    ("lines", "keys", "offsets"),
    [
        (b"-3\t0\n5000000000\t8\n0\t16\n", [-3, 5_000_000_000, 0], [0, 8, 16]),
        (b"1\t0\n2\t8\n1\t16", [2, 1], [8, 16]),  # the last of two equal keys wins
        (b"1\t0\textra\r\n2\t8\r\n", [1, 2], [0, 8]),
        (b"1 0\n2 8\n", [1, 2], [0, 8]),
        (b"7\t9223372036854775807\n", [7], [2**63 - 1]),
    ],
)
@pytest.mark.parametrize("block", [1, 10, 1 << 24])
def test_index_lines_are_read_as_mxnet_reads_them(
    lines: bytes, keys: list[int], offsets: list[int], block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_index, "_BLOCK", block)
    (tmp_path / "train.idx").write_bytes(lines)
    found = read_index(tmp_path / "train.idx")
    assert (found[0].tolist(), found[1].tolist()) == (keys, offsets)


@pytest.mark.parametrize(
    "line", [b"", b"1", b"\t1", b"1\t", b"1.0\t2", b"1 2\t3", b"x\t1", b"1\t-4", b"1\t9223372036854775808", b"1\t\t8"]
)
@pytest.mark.parametrize("block", [8, 1 << 24])
def test_a_wrong_index_line_is_an_error_with_its_number(
    line: bytes, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_index, "_BLOCK", block)
    (tmp_path / "train.idx").write_bytes(b"5\t0\n6\t8\n" + line + b"\n7\t16\n")
    with pytest.raises(ValueError, match=r"train\.idx: line 3\b"):
        read_index(tmp_path / "train.idx")


def test_an_empty_or_missing_index_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.idx").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        read_index(tmp_path / "train.idx")
    with pytest.raises(ValueError, match="cannot be read"):
        read_index(tmp_path / "other.idx")
