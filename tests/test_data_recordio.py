"""Record files against files that mxnet 1.9.1 and 1.5.1 wrote and read (tests/fixtures/rec, tests/fixtures/corrupt)."""

import errno
import hashlib
import json
import mmap
import multiprocessing
import pickle
import struct
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tiny_runs import ended_well, run_file, run_program

from data.recordio import image_record as recordio
from data.recordio.image_record import MAGIC, IndexedRecordFile, RecordFile, RecordWriter, pack, unpack

ROOT = Path(__file__).parents[1]
FIXTURES = Path(__file__).parent / "fixtures"
SETS = sorted(path.name for path in (FIXTURES / "rec").iterdir())
CORRUPT = json.loads((FIXTURES / "corrupt" / "expected.json").read_text())


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _expected(folder: Path) -> list[dict[str, Any]]:
    """Return what mxnet read of each record; without an index file the keys count the records."""
    records = json.loads((folder / "expected.json").read_text())["records"]
    return [{"key": i, **record} for i, record in enumerate(records)]


def _open(folder: Path) -> IndexedRecordFile:
    return IndexedRecordFile(folder / "train.rec", folder / "train.idx")


def _write(folder: Path, records: list[tuple[int, bytes]]) -> IndexedRecordFile:
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key, record in records:
            writer.write(key, record)
    return _open(folder)


def _read(records: IndexedRecordFile, key: int) -> bytes | memoryview:
    return records.read_position(records.keys.tolist().index(key))


def _in_order(path: str | Path) -> Iterator[bytes]:
    file, offset = RecordFile(path), 0
    while offset < file.size:
        record, offset = file.read_until(offset)
        yield bytes(record)


def _check_against_mxnet(folder: Path) -> None:
    records = _open(folder)
    expected = _expected(folder)
    assert len(records) == len(expected)
    for want in expected:
        raw = _read(records, want["key"])
        assert (len(raw), _sha256(raw)) == (want["raw_len"], want["raw_sha256"])
        if "payload_sha256" not in want:
            continue
        label, record_id, id2, payload = unpack(raw)
        np.testing.assert_array_equal(np.float32(label), np.array(want["label"], dtype=np.float32))
        assert np.ndim(label) == (want["flag"] > 0)
        assert (record_id, id2, _sha256(payload)) == (want["id"], want["id2"], want["payload_sha256"])


def _check_rewriting(folder: Path, out: Path) -> None:
    records = _open(folder)
    _write(out, [(key, bytes(records.read_position(i))) for i, key in enumerate(records.keys.tolist())])
    assert (out / "train.rec").read_bytes() == (folder / "train.rec").read_bytes()
    if not records.rebuilt:
        assert (out / "train.idx").read_bytes() == (folder / "train.idx").read_bytes()


@pytest.mark.parametrize("name", SETS)
def test_records_labels_ids_and_payloads_are_those_mxnet_reads(name: str) -> None:
    _check_against_mxnet(FIXTURES / "rec" / name)


@pytest.mark.parametrize("name", SETS)
def test_writer_output_equals_mxnet_output_byte_for_byte(name: str, tmp_path: Path) -> None:
    _check_rewriting(FIXTURES / "rec" / name, tmp_path)


def test_every_oracle_set_is_read_and_rewritten_as_mxnet_does(face_oracle: Path, tmp_path: Path) -> None:
    for folder in [*sorted((face_oracle / "oracle" / "rec").iterdir()), face_oracle / "london" / "rec"]:
        _check_against_mxnet(folder)
        _check_rewriting(folder, tmp_path)


@pytest.mark.parametrize(
    ("label", "flag", "number", "vector"),
    [
        (3, 0, 3.0, []), (True, 0, 1.0, []), (np.float64(0.5), 0, 0.5, []), ([], 0, 0.0, []), ([7.0], 1, 0.0, [7.0]),
        (np.array(5), 1, 0.0, [5.0]), ([[1, 2], [3, 4]], 4, 0.0, [1.0, 2.0, 3.0, 4.0]),
    ],
)  # fmt: skip
def test_only_a_number_is_packed_as_a_number(label: Any, flag: int, number: float, vector: list[float]) -> None:
    assert pack(label, 9, 8, b"x") == struct.pack(f"<IfQQ{flag}f", flag, number, 9, 8, *vector) + b"x"


def _read_all(path: Path) -> None:
    records = IndexedRecordFile(path.with_suffix(".rec"), path.with_suffix(".idx"))
    for key in records.keys.tolist():
        unpack(_read(records, key))


def _pass_over_headers(path: Path) -> None:
    list(IndexedRecordFile(path.with_suffix(".rec"), path.with_suffix(".idx")).headers())


def _read_in_order(path: Path) -> None:
    list(_in_order(path.with_suffix(".rec")))


@pytest.mark.parametrize("case", sorted(CORRUPT["cases"]))
def test_damage_is_an_error_that_names_the_file(case: str) -> None:
    path = FIXTURES / "corrupt" / case
    tracemalloc.start()
    for read, verdict in [
        (_read_all, "indexed_error"),
        (_pass_over_headers, "indexed_error"),
        (_read_in_order, "sequential_error"),
    ]:
        if not CORRUPT["cases"][case][verdict]:
            read(path)
            continue
        with pytest.raises(ValueError) as caught:
            read(path)
        if case != "irheader_short" or read is not _read_all:  # unpack does not know where a record comes from
            assert case in str(caught.value)
        assert "\n" not in str(caught.value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6, "a length was believed before it was checked"


@pytest.mark.parametrize("case", [name for name, case in CORRUPT["cases"].items() if not case["indexed_error"]])
def test_harmless_oddities_change_no_byte(case: str) -> None:
    path = FIXTURES / "corrupt" / case
    records = IndexedRecordFile(path.with_suffix(".rec"), path.with_suffix(".idx"))
    for want in CORRUPT["records"]:
        assert _sha256(_read(records, want["key"])) == want["sha256"]


def test_headers_in_bulk_equal_headers_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    raw = []
    for i in range(100):
        label = [float(i), 1.0][: i % 3] or float(i)
        payload = MAGIC * int(rng.integers(3)) + bytes(int(rng.integers(9)))
        raw.append(pack(label, int.from_bytes(MAGIC, "little") if i % 7 == 0 else i, 0, payload))
    records = _write(tmp_path, list(enumerate(raw)))
    order = rng.permutation(100)[:90]  # a shuffled index, of most records
    (tmp_path / "train.idx").write_text("".join(f"{i}\t{records.offsets[i]}\n" for i in order))
    monkeypatch.setattr(recordio, "_CHUNK", 16)
    seen = 0
    for headers in _open(tmp_path).headers():
        for position, flag, label, size in zip(*headers, strict=True):
            want = unpack(raw[order[position]])
            vector = np.atleast_1d(want.label)
            assert (flag, label, size) == (len(vector) if np.ndim(want.label) else 0, vector[0], len(want.payload))
            seen += 1
    assert seen == 90


@pytest.mark.parametrize(("record", "reason"), [(bytes(23), "at least 24 bytes"), (b"\x02" + bytes(30), "announces 2")])
def test_a_record_without_room_for_its_header_is_an_error(record: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack(record)


def test_writer_refuses_a_record_of_2_to_the_29_bytes(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "train.rec") as writer:
        with pytest.raises(ValueError, match="record 4 has 536870912"):
            writer.write(4, bytes(1 << 29))
        writer.write(5, b"ok")
    assert list(_in_order(tmp_path / "train.rec")) == [b"ok"]


def test_reader_refuses_parts_that_join_to_2_to_the_29_bytes(tmp_path: Path) -> None:
    path = tmp_path / "train.rec"
    first = (1 << 29) - 4
    with open(path, "wb") as file:  # sparse: the zeros take no disk
        file.write(struct.pack("<4sI", MAGIC, 1 << 29 | first))
        file.seek(first, 1)
        file.write(struct.pack("<4sI", MAGIC, 3 << 29 | 0))
    with pytest.raises(ValueError, match="byte 0: the parts of this record add up"):
        RecordFile(path).read_until(0)


def test_records_behind_4_gib_are_read(tmp_path: Path) -> None:
    path, far = tmp_path / "train.rec", 5 << 30
    record = pack(3.0, 1, 0, b"far away")
    with open(path, "wb") as file:
        file.write(struct.pack("<4sI", MAGIC, 0))
        file.seek(far)
        file.write(struct.pack("<4sI", MAGIC, len(record)) + record)
    (tmp_path / "train.idx").write_text(f"0\t{far}\n")
    records = _open(tmp_path)
    assert bytes(_read(records, 0)) == record
    assert next(records.headers()).labels.tolist() == [3.0]
    path.unlink()


def test_files_appear_only_when_the_writer_closes(tmp_path: Path) -> None:
    (tmp_path / "train.rec").write_bytes(b"old")
    writer = RecordWriter(tmp_path / "train.rec", tmp_path / "train.idx")
    writer.write(0, b"new")
    assert (tmp_path / "train.rec").read_bytes() == b"old"
    assert not (tmp_path / "train.idx").exists()
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.idx", "train.rec"]


def test_a_part_that_goes_on_must_have_a_length_of_whole_words(tmp_path: Path) -> None:
    (tmp_path / "train.rec").write_bytes(struct.pack("<4sI4s4sI", MAGIC, 1 << 29 | 3, b"abc", MAGIC, 3 << 29))
    with pytest.raises(ValueError, match="byte 0: a part of 3 bytes does not fit here"):
        RecordFile(tmp_path / "train.rec").read_until(0)


def _hashes(records: IndexedRecordFile) -> list[str]:
    return [_sha256(records.read_position(i)) for i in range(len(records))]


def test_spawned_processes_and_threads_read_the_same_bytes() -> None:
    records = _open(FIXTURES / "rec" / "05_magic_payload")
    expected = _hashes(records)
    assert _hashes(pickle.loads(pickle.dumps(records))) == expected
    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(_hashes, [records] * 8))
    with multiprocessing.get_context("spawn").Pool(1) as processes:
        assert processes.apply(_hashes, (records,)) == expected


def test_a_file_that_cannot_be_mapped_or_changed_its_size_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = _write(tmp_path, [(0, b"record")])
    copy = pickle.dumps(records)
    (tmp_path / "train.rec").write_bytes(b"")
    (tmp_path / "train.rec").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="had 16 bytes when opened, now 100"):
        pickle.loads(copy).read_position(0)
    monkeypatch.setattr(mmap, "mmap", mock.Mock(side_effect=OSError(errno.ENODEV, "No such device")))
    with pytest.raises(ValueError, match=r"train\.rec: cannot be read: No such device"):
        pickle.loads(copy).read_position(0)


def test_threads_that_read_a_file_first_at_the_same_time_share_one_handle(tmp_path: Path):
    """A handle that loses the race must not be closed under the thread that has its number."""
    with RecordWriter(tmp_path / "train.rec", tmp_path / "train.idx") as writer:
        writer.write(0, b"record")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(300):
                file, start = RecordFile(tmp_path / "train.rec"), threading.Barrier(8)

                def read(file: RecordFile = file, start: threading.Barrier = start) -> bytes:
                    start.wait()
                    return bytes(file.read_span(0, 16))

                assert {job.result() for job in [pool.submit(read) for _ in range(8)]} == {b"record"}
    finally:
        sys.setswitchinterval(interval)


def test_a_set_cut_short_while_it_is_open_is_an_error_and_no_signal(tmp_path: Path):
    """A gap above 1 MiB between two images: the record's length is looked up first. Through a map, that would be SIGBUS."""
    with RecordWriter(tmp_path / "train.rec", tmp_path / "train.idx") as writer:
        for key, size in enumerate((100, 3 << 20, 100)):
            writer.write(key, pack(0.0, key, 0, b"\xff" * size))
    program = "import os, sys\nfrom data.record_dataset import RecordDataset\n"
    program += "dataset = RecordDataset(sys.argv[1])\nos.truncate(sys.argv[1] + '/train.rec', 4096)\n"
    program += "try:\n    dataset.sample(1)\nexcept ValueError as error:\n    print(error)"
    (tmp_path / "program.py").write_text(program)
    done = ended_well(run_program(run_file, [[str(tmp_path / "program.py"), str(tmp_path)]], timeout=60))
    assert "train.rec" in done.stdout and "the file ends; it had" in done.stdout
