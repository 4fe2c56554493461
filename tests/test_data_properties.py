"""Properties over random data: what is written is read; whatever the bytes, reading ends in a value or a ValueError."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.record_dataset import RecordDataset
from data.recordio.image_record import MAGIC, IndexedRecordFile, RecordSetWriter, RecordWriter, is_protobuf, pack, unpack
from eval.pair_sets.bin_file import read_bin, write_bin
from tests.attack import fuzz_inputs

# random bytes rarely have the magic word, which splits a record into parts, so half of the pieces are that word
PIECES = st.one_of(st.just(MAGIC), st.just(MAGIC[:3]), st.binary(max_size=9))
RAW = st.lists(PIECES, max_size=12).map(b"".join)
U64 = st.integers(0, 2**64 - 1)
LABELS = st.one_of(
    st.floats(width=32, allow_nan=False), st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=70)
)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=150, deadline=None)
@given(records=st.dictionaries(st.integers(0, 2**40), RAW, min_size=1, max_size=9))
def test_records_come_back_by_key_and_by_walking(records: dict[int, bytes]):
    with _folder() as folder:
        with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
            for key, record in records.items():
                writer.write(key, record)
        indexed = IndexedRecordFile(folder / "train.rec", folder / "train.idx")
        assert {key: bytes(indexed.read_position(i)) for i, key in enumerate(indexed.keys.tolist())} == records
        walked = IndexedRecordFile(folder / "train.rec", folder / "none.idx")
        assert [bytes(walked.read_position(i)) for i in range(len(walked))] == list(records.values())
        np.testing.assert_array_equal(walked.offsets, indexed.offsets)


@settings(max_examples=200, deadline=None)
@given(label=LABELS, record_id=U64, id2=U64, payload=RAW)
def test_pack_and_unpack_are_inverse(label: float | list[float], record_id: int, id2: int, payload: bytes):
    record = unpack(pack(label, record_id, id2, payload))
    np.testing.assert_array_equal(np.float32(label), record.label)
    assert (record.id, record.id2, bytes(record.payload)) == (record_id, id2, payload)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=8), images=st.randoms(use_true_random=False))
def test_sets_come_back_with_their_labels(counts: list[int], images: "object"):
    labels = np.repeat(np.arange(len(counts)), counts).tolist()
    payloads = [b"\xff\xd8\xff" + images.randbytes(images.randrange(200)) + MAGIC for _ in labels]  # type: ignore[attr-defined]
    with _folder() as folder:
        with RecordSetWriter(folder) as writer:
            for label, payload in zip(labels, payloads, strict=True):
                writer.add(label, payload)
        for path in (folder / "train.idx", None):  # with its index, and with one that is rebuilt
            if path is None:
                (folder / "train.idx").unlink()
            dataset = RecordDataset(folder)
            assert dataset.labels().tolist() == labels and dataset.num_classes == len(counts)
            assert [bytes(dataset.sample(i)[0]) for i in range(len(labels))] == payloads


@settings(max_examples=60, deadline=None)
@given(pairs=st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40), st.booleans()), min_size=1, max_size=8))
def test_pair_files_come_back(pairs: list[tuple[bytes, bytes, bool]]):
    # a JPEG that ends at once: its header claims no size, which would be checked
    images = [b"\xff\xd8\xff\xd9" + half for one, other, _ in pairs for half in (one, other)]
    with _folder() as folder:
        write_bin(folder / "set.bin", images, [same for _, _, same in pairs])
        found = read_bin(folder / "set.bin")
    ordered = np.stack([found.first, found.second], axis=1).ravel()
    assert [found.images[i] for i in ordered] == images
    assert found.same.tolist() == [same for _, _, same in pairs]
    assert len(set(found.images)) == len(found.images)


@settings(max_examples=200, deadline=None)
@given(record=st.binary(max_size=80), index=st.binary(max_size=40))
def test_any_bytes_end_in_a_value_or_a_value_error(record: bytes, index: bytes):
    with _folder() as folder:
        (folder / "train.rec").write_bytes(MAGIC + record)
        (folder / "train.idx").write_bytes(index)
        with contextlib.suppress(ValueError):
            fuzz_inputs.read_records(folder)
        (folder / "set.bin").write_bytes(b"\x80\x04" + record)
        with contextlib.suppress(ValueError):
            fuzz_inputs.read_pairs(folder / "set.bin")


# ---- SageMaker's protobuf in the same container


def _field(number: int, payload: bytes) -> bytes:
    length, size = b"", len(payload)
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + payload


def test_sagemaker_records_are_recognised_and_refused(tmp_path: Path):
    values = _field(1, b"values") + _field(2, _field(2, _field(1, np.arange(300, dtype="<f4").tobytes())))
    message = _field(1, values) + _field(2, _field(1, b"values") + _field(2, b"\x12\x06\x0a\x04\0\0\0\0"))
    assert is_protobuf(message)
    with RecordWriter(tmp_path / "train.rec", tmp_path / "train.idx") as writer:
        writer.write(0, message)
    with pytest.raises(ValueError, match=r"record 0 of .*train\.rec: .*recordio-protobuf.*folder_to_rec"):
        RecordDataset(tmp_path)
    (tmp_path / "train.idx").unlink()
    with pytest.raises(ValueError, match="recordio-protobuf"):
        RecordDataset(tmp_path)


@settings(max_examples=100, deadline=None)
@given(label=LABELS, payload=st.binary(min_size=1, max_size=200))
def test_image_records_are_not_taken_for_protobuf(label: float | list[float], payload: bytes):
    image = b"\xff\xd8\xff" + payload
    record = pack(label, 1, 0, image)
    assert not is_protobuf(record) and bytes(unpack(record).payload) == image
