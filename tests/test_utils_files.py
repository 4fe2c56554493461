"""Text files of a user, line by line: what editors add to them is no part of them, and errors are one line that says where."""

from pathlib import Path

import pytest

from utils.files import read_lines, read_numbers


def test_lines_are_the_same_from_every_editor(tmp_path: Path):
    for data in (b"a 1\n\xc3\xa9 2", b"a 1\n\xc3\xa9 2\n", b"\xef\xbb\xbfa 1\r\n\xc3\xa9 2\r\n", b"a 1\r\xc3\xa9 2\r"):
        (tmp_path / "list.txt").write_bytes(data)
        assert read_lines(tmp_path / "list.txt") == ["a 1", "\u00e9 2"]


def test_what_is_no_text_is_an_error_that_names_the_file(tmp_path: Path):
    (tmp_path / "list.txt").write_bytes(b"caf\xe9")
    for path, message in [
        (tmp_path / "list.txt", r"list\.txt: cannot be read: no UTF-8 text"),
        (tmp_path, r"cannot be read: it is a folder"),
        (tmp_path / "none.txt", r"none\.txt: cannot be read: No such file"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_lines(path)


def test_numbers_come_with_the_line_they_stand_in(tmp_path: Path):
    path = tmp_path / "map.txt"
    path.write_text("# old new\n\n3 4  # a remark\n\t0 999999999999999999\n")
    assert list(read_numbers(path, "old new")) == [(3, [3, 4]), (4, [0, 10**18 - 1])]
    for line in ("3", "3 4 5", "3 -4", "3 4.0", "3 \u00b2", f"3 {10**18}"):
        path.write_text(f"1 2\n{line}\n")
        with pytest.raises(ValueError, match=r"map\.txt: line 2 must be 'old new', 2 whole numbers, got '3"):
            list(read_numbers(path, "old new"))
