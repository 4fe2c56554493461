"""Shards of strangers: each damaged one is an error of one line that names it."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from tiny_runs import error_of, face, tiny_run

import train
from data.tar_dataset import TarDataset

BLOCK = 512


def _member(name: str, data: bytes, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return a member as tarfile writes it, header and data."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def _good(number: int = 0) -> bytes:
    return _member(f"{number}.jpg", face(0, number)) + _member(f"{number}.cls", b"0")


def _header(member: bytes, place: int, field: bytes) -> bytes:
    """Return a member whose header holds `field` at a place, with the checksum that belongs to it."""
    header = bytearray(member[:BLOCK])
    header[place : place + len(field)] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + member[BLOCK:]


def _sized(member: bytes, size: int) -> bytes:
    """Return a member with a size in GNU's binary form, which may be below zero."""
    return _header(member, 124, (b"\x80" if size >= 0 else b"\xff") + (size % 256**11).to_bytes(11, "big"))


def _pax(records: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    text = b""
    for key, value in records.items():
        length = len(key) + len(value) + 3
        length += len(str(length + len(str(length))))
        text += f"{length} {key}={value}\n".encode()
    return _member("pax", text, kind)


SPARSE_1_0 = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.jpg", "GNU.sparse.realsize": "9"}
# what is wrong with a shard, the words that say so, and its bytes: the byte 8192 is behind eight headers, 9216 behind _good()
BAD: dict[str, tuple[str, Callable[[], bytes]]] = {
    "negative size": ("a size of -1024 bytes", lambda: _good() + _sized(_member("1.jpg", b"x" * 600), -1024)),
    "size of minus one": ("a size of -1 bytes", lambda: _good() + _sized(_member("1.jpg", b""), -1)),
    "size of minus its header": ("a size of -512 bytes", lambda: _good() + _sized(_member("1.jpg", b""), -BLOCK)),
    "negative size of a class": ("a size of -7000 bytes", lambda: _good() + _sized(_member("1.cls", b"1"), -7000)),
    "giant size": ("cut off in 1.jpg", lambda: _good() + _sized(_member("1.jpg", b"x"), 1 << 80)),
    "size beyond the end": ("cut off in 1.jpg", lambda: _good() + _sized(_member("1.jpg", b"x"), 1 << 20)),
    "pax size below zero": ("a size of -2048 bytes", lambda: _good() + _pax({"size": "-2048"}) + _member("1.jpg", b"x")),
    "pax size of 4,000 digits": ("cut off in 1.jpg", lambda: _good() + _pax({"size": "9" * 4000}) + _member("1.jpg", b"x")),
    "pax of a giant size": ("an extended header of 17179869184 bytes",
                            lambda: _good() + _sized(_pax({"path": "a"}), 1 << 34) + _member("1.jpg", b"x")),
    "pax of a negative size": ("an extended header of -4096 bytes",
                               lambda: _good() + _sized(_pax({"path": "a"}), -4096) + _member("1.jpg", b"x")),
    "pax global of a negative size": ("an extended header of -512 bytes",
                                      lambda: _sized(_pax({"path": "a"}, tarfile.XGLTYPE), -512) + _good()),
    "sparse 1.0 with countless parts": ("a sparse file", lambda: _pax(SPARSE_1_0) + _member("1.jpg", b"9" * 700) + _good()),
    "sparse 0.1 with a map of words": ("a sparse file",
                                       lambda: _pax({"GNU.sparse.map": "a,b,c", "GNU.sparse.size": "9"}) + _good()),
    "sparse of old GNU": (
        "a sparse file", lambda: _header(_member("1.jpg", b"x", tarfile.GNUTYPE_SPARSE), 482, b"\1") + 3 * bytes(512) + _good()
    ),
    "3,000 long names": ("byte 8192: more than 8 headers",
                         lambda: 3000 * _member("l", b"n" * 200, tarfile.GNUTYPE_LONGNAME) + _good()),
    "3,000 pax headers": ("byte 8192: more than 8 headers", lambda: 3000 * _pax({"path": "a"}) + _good()),
    "a long name of a negative size": ("an extended header of -512 bytes",
                                       lambda: _sized(_member("l", b"", tarfile.GNUTYPE_LONGNAME), -512) + _good()),
    "a long name at the end": ("byte 9216: a damaged header",
                               lambda: _good() + _member("l", b"n" * 200, tarfile.GNUTYPE_LONGNAME)),
    "a wrong checksum": ("byte 9216: a damaged header", lambda: _good() + b"2" + _good(1)[1:] + _good(2)),
    "half a header": ("cut off in 1.jpg", lambda: _good() + _good(1)[:300]),
    "a length of 5,000 digits": (
        "byte 9216: a damaged header",
        lambda: _good() + _member("pax", b"9" * 5000 + b" path=a\n", tarfile.XHDTYPE) + _member("1.jpg", b"x"),
    ),
    "compressed": ("not an uncompressed tar file", lambda: b"\x1f\x8b" + _good()[2:]),
    "no tar file": ("not an uncompressed tar file", lambda: b"no tar file" * 100),
    "letters in the size": ("byte 9216: a damaged header",
                            lambda: _good() + _header(_member("1.jpg", b""), 124, b"zzzzzzzzzzz")),
    "letters in the time": ("byte 9216: a damaged header",
                            lambda: _good() + _header(_member("1.jpg", b""), 136, b"zzzzzzzzzzz")),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(BAD))
def test_a_damaged_shard_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str):
    words, content = BAD[kind]
    (tmp_path / "bad.tar").write_bytes(content() + bytes(2 * BLOCK))
    said = error_of(train.main([*tiny_run(tmp_path, tmp_path), "data.source=tar", "eval.targets=[]", "--check"]), capsys)
    assert said.startswith(f"error: data.path: {tmp_path / 'bad.tar'}: ") and words in said, said


@pytest.mark.parametrize("missing", [1, 511])
def test_a_shard_that_ends_within_the_padding_is_cut_off(tmp_path: Path, missing: int):
    (tmp_path / "a.tar").write_bytes(_good()[:-missing])
    with pytest.raises(ValueError, match=r"a\.tar: the shard is cut off in 0\.cls; copy it again"):
        TarDataset(tmp_path)


@pytest.mark.parametrize("error", [LookupError, OverflowError, RecursionError, TypeError, EOFError])
def test_whatever_the_parser_of_another_python_stumbles_over_names_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    (tmp_path / "a.tar").write_bytes(_good() + bytes(2 * BLOCK))
    monkeypatch.setattr(tarfile.TarInfo, "frombuf", mock.Mock(side_effect=error("a number")))
    with pytest.raises(ValueError, match=r"a\.tar: a header is damaged: a number; copy the shard again, or rewrite it"):
        TarDataset(tmp_path)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_many_samples_are_no_chain_of_headers_and_zeros_at_the_end_may_be_missing(tmp_path: Path, zeros: int):
    (tmp_path / "a.tar").write_bytes(b"".join(map(_good, range(20))) + bytes(zeros * BLOCK))
    dataset = TarDataset(tmp_path)
    assert [bytes(dataset.sample(index)[0]) for index in range(20)] == [face(0, number) for number in range(20)]
    assert dataset.labels().tolist() == 20 * [0]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_attributes_are_no_damage(tmp_path: Path, form: int):
    name = "n" * 300 if form != tarfile.USTAR_FORMAT else "n" * 90
    with tarfile.open(tmp_path / "a.tar", "w", format=form) as tar:
        for suffix, data in (("jpg", face(0, 0)), ("cls", b"3")):
            info = tarfile.TarInfo(f"people/{name}.{suffix}")
            info.size, info.mtime = len(data), 1.5 if form == tarfile.PAX_FORMAT else 1
            tar.addfile(info, io.BytesIO(data))
    dataset = TarDataset(tmp_path)
    assert dataset.labels().tolist() == [3] and bytes(dataset.sample(0)[0]) == face(0, 0)
    assert dataset.key(0).startswith(f"people/{name}.jpg in ")
