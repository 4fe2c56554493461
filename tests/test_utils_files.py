"""Text files of a user, line by line, with errors that say where; and files and folders that a program writes aside."""

import errno
import tracemalloc
from pathlib import Path

import pytest

from utils.files import NewFile, new_file, read_csv, read_lines, read_numbers, unfinished_folder, write_csv


def test_lines_are_the_same_from_every_editor(tmp_path: Path):
    for data in (b"a 1\n\xc3\xa9 2", b"a 1\n\xc3\xa9 2\n", b"\xef\xbb\xbfa 1\r\n\xc3\xa9 2\r\n", b"a 1\r\xc3\xa9 2\r"):
        (tmp_path / "list.txt").write_bytes(data)
        assert read_lines(tmp_path / "list.txt") == ["a 1", "\u00e9 2"]


def test_names_and_cells_keep_characters_at_which_python_ends_lines(tmp_path: Path):
    names = ["a\u2028b", "c\x0bd", "e\x85f", "g\x1ch"]
    (tmp_path / "list.txt").write_text("\n".join(["", *names, ""]) + "\n", encoding="utf-8")
    assert read_lines(tmp_path / "list.txt") == ["", *names, ""]
    (tmp_path / "empty.txt").touch()
    assert read_lines(tmp_path / "empty.txt") == list(read_csv(tmp_path / "empty.txt")) == []
    for between in (",", ";"):
        rows = [["name", "group"], *([name, "one\ntwo"] for name in names)]
        text = "".join(between.join(f'"{cell}"' for cell in row) + "\r\n" for row in rows)
        (tmp_path / "table.csv").write_text(text, encoding="utf-8", newline="")
        assert list(read_csv(tmp_path / "table.csv")) == rows
    (tmp_path / "table.csv").write_text("drop,0,blurred; dark")
    assert list(read_csv(tmp_path / "table.csv")) == [["drop", "0", "blurred; dark"]]
    (tmp_path / "table.csv").write_text("x" * 200_000)
    with pytest.raises(ValueError, match=r"table\.csv: is no table: field larger than field limit"):
        list(read_csv(tmp_path / "table.csv"))


def test_a_long_table_is_never_in_memory_as_rows(tmp_path: Path):
    rows = (("a, b", f"{number:06}", number) for number in range(20_000))  # of 20 bytes as text, of 200 as objects
    tracemalloc.start()
    write_csv(tmp_path / "table.csv", ("name", "text", "number"), rows)
    most = [tracemalloc.get_traced_memory()[1]]
    tracemalloc.reset_peak()
    read = read_csv(tmp_path / "table.csv")
    assert next(read) == ["name", "text", "number"]
    assert all(row == ["a, b", f"{number:06}", str(number)] for number, row in zip(range(20_000), read, strict=True))
    most.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert max(most) < 100 * 20_000


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


def test_an_unfinished_folder_that_another_program_made_meanwhile_is_kept(tmp_path: Path):
    with unfinished_folder(tmp_path / "out") as first:
        with pytest.raises(ValueError, match="another program is writing there"), unfinished_folder(tmp_path / "out"):
            pass
        first.rename(tmp_path / "out")
        second = unfinished_folder(tmp_path / "out")
        (second.__enter__() / "file").touch()
    assert (first / "file").is_file()
    second.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_an_unfinished_folder_that_was_deleted_and_made_anew_is_another_one(tmp_path: Path):
    with unfinished_folder(tmp_path / "out") as folder:
        folder.rmdir()  # as the message says to a user, if he takes the program for dead
        second = unfinished_folder(tmp_path / "out")
        (second.__enter__() / "file").touch()
    assert (folder / "file").is_file()
    second.__exit__(None, None, None)
    assert not folder.exists()


def test_an_unfinished_folder_is_removed_whatever_happens(tmp_path: Path):
    with pytest.raises(RuntimeError), unfinished_folder(tmp_path / "out") as folder:
        (folder / "file").touch()
        raise RuntimeError
    assert not list(tmp_path.iterdir())


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


def test_a_link_that_was_put_in_the_place_of_a_new_file_is_not_followed(tmp_path: Path):
    (tmp_path / "mine").write_bytes(b"mine")
    for name, target in (("train.rec", "mine"), ("net.pt2", "nothing")):  # before the program made it
        (tmp_path / name).symlink_to(target)
        with pytest.raises(FileExistsError):
            NewFile(tmp_path / name)
    assert (tmp_path / "mine").read_bytes() == b"mine" and not (tmp_path / "nothing").exists()
