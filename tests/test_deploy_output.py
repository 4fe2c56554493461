"""Files that programs write aside and move into place, while another program writes the same."""

import errno
from pathlib import Path

import pytest

from deploy.journal import new_file


@pytest.mark.parametrize("first_ends", ["before", "after"])
def test_of_two_that_write_one_file_the_first_fails_and_none_is_half(tmp_path: Path, first_ends: str):
    path = tmp_path / "features.npy"
    path.write_bytes(b"old")
    first, second = new_file(path), new_file(path)
    first.__enter__().write(b"first")
    file = second.__enter__()
    file.write(b"half of the sec")
    if first_ends == "after":
        file.write(b"ond")
        second.__exit__(None, None, None)
    with pytest.raises(OSError, match="another program is writing it") as caught:
        first.__exit__(None, None, None)
    assert caught.value.errno == errno.EBUSY and caught.value.filename == str(path)
    if first_ends == "before":
        assert path.read_bytes() == b"old"
        file.write(b"ond")
        second.__exit__(None, None, None)
    assert path.read_bytes() == b"half of the second"
    assert list(tmp_path.iterdir()) == [path]


def test_one_that_fails_leaves_the_file_that_another_is_writing(tmp_path: Path):
    path = tmp_path / "features.npy"
    first, second = new_file(path), new_file(path)
    first.__enter__().write(b"first")
    second.__enter__().write(b"second")
    with pytest.raises(OSError, match="full"):
        first.__exit__(OSError, OSError(errno.ENOSPC, "full"), None)
    second.__exit__(None, None, None)
    assert path.read_bytes() == b"second" and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_program_left_is_written_over(tmp_path: Path):
    path = tmp_path / "features.npy"
    killed = new_file(path)
    killed.__enter__().write(b"half of a very long file")
    (left,) = tmp_path.iterdir()
    with new_file(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole" and not left.exists()
