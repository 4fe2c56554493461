"""Mending sets on disk, against files that mxnet wrote, a plain reader of our own, and known damage."""

import csv
import json
import shutil
import struct
from pathlib import Path

import cv2
import numpy as np
import pytest
from pictures import folder_of_people, jpeg, picture, png_chunk

from data.record_dataset import RecordDataset
from scripts.data import folder_to_rec
from scripts.data import repair as repair_data
from scripts.data import verify as verify_data

FIXTURES = Path(__file__).parent / "fixtures"
MAGIC = b"\x0a\x23\xd7\xce"


def _copy(source: Path, target: Path, names: tuple[str, ...] = ("train.rec", "property")) -> Path:
    target.mkdir()
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    return target


def _everything(folder: Path) -> list[tuple[int, bytes]]:
    dataset = RecordDataset(folder)
    assert not dataset.warnings
    return [(dataset.label(i), bytes(dataset.sample(i)[0])) for i in range(dataset.num_images)]


def _plain_records(path: Path) -> list[bytes]:
    """Return all records of a file, read by a loop that knows nothing of the code under test."""
    data, offset, records, parts = path.read_bytes(), 0, [], []
    while offset < len(data):
        magic, word = struct.unpack_from("<4sI", data, offset)
        assert magic == MAGIC
        length = word & 0x1FFFFFFF
        parts.append(data[offset + 8 : offset + 8 + length])
        offset += 8 + (length + 3) // 4 * 4
        if word >> 29 in (0, 3):
            records.append(MAGIC.join(parts))
            parts = []
    return records


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = repair_data.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """A set of 4 people with 12 pictures, header form."""
    folder_of_people(tmp_path / "people", [3, 3, 2, 4])
    assert folder_to_rec.main([str(tmp_path / "people"), str(tmp_path / "set")]) == 0
    return tmp_path / "set"


@pytest.mark.parametrize(
    "name", ["01_plain_float", "02_insightface_vec", "06_encodings", "08_no_header_shuffled", "12_py2_mxnet151"]
)
@pytest.mark.parametrize("index", [None, b"", b"no index\n", b"0\t0\n", b"0\t4\n1\t8\n"])
def test_a_lost_or_wrong_index_becomes_the_one_that_mxnet_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, index: bytes | None
):
    folder = _copy(FIXTURES / "rec" / name, tmp_path / "set")
    if index is not None:
        (folder / "train.idx").write_bytes(index)
    before = (folder / "train.rec").read_bytes()
    assert _run(capsys, folder)[0] == 0
    assert (folder / "train.idx").read_bytes() == (FIXTURES / "rec" / name / "train.idx").read_bytes()
    assert (folder / "train.rec").read_bytes() == before
    assert _everything(folder) == _everything(FIXTURES / "rec" / name)
    kept = [path.read_bytes() for path in folder.glob("train.idx.*")]
    assert kept == ([] if index is None else [index])


def test_a_set_without_index_warns_with_the_command_until_it_is_mended(
    tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]
):
    index = (people / "train.idx").read_bytes()
    for damaged in (None, b"".join(index.splitlines(keepends=True)[:5])):
        (people / "train.idx").unlink(missing_ok=True)
        if damaged:
            (people / "train.idx").write_bytes(damaged)
        for cache in (None, tmp_path / "cache", tmp_path / "cache"):  # without a cache, made, and found
            (warning,) = RecordDataset(people, cache).warnings
            assert f"face data repair {people}" in warning
        assert verify_data.main([str(people)]) == 0
        assert f"face data repair {people}" in capsys.readouterr().err
        assert _run(capsys, people)[0] == 0
        assert (people / "train.idx").read_bytes() == index
        assert not RecordDataset(people, tmp_path / "cache").warnings


def test_the_old_index_is_never_lost(people: Path, capsys: pytest.CaptureFixture[str]):
    (people / "train.idx.old1").symlink_to("../nowhere")  # a name that is taken
    for number in range(3):
        (people / "train.idx").write_text(f"{number}\t4\n")
        assert _run(capsys, people)[0] == 0
    kept = {path.name: path.read_text() for path in people.glob("train.idx.old*") if path.exists()}
    assert kept == {"train.idx.old": "0\t4\n", "train.idx.old2": "1\t4\n", "train.idx.old3": "2\t4\n"}


def test_a_sound_set_is_left_as_it_is(people: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in people.iterdir()}
    status, said = _run(capsys, people)
    assert status == 0 and "nothing to mend" in said
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in people.iterdir()} == before


SOUND = {"base", "idx_crlf", "idx_duplicate_pos", "idx_no_final_newline", "idx_spaces", "pad_nonzero"}
MENDED = {  # by an index made of the records
    "cut_between_records", "idx_binary", "idx_float_key", "idx_huge_offset", "idx_into_part2", "idx_mid_record", "idx_negative",
    "idx_one_column", "idx_truncated_line",
}  # fmt: skip
NO_RECORD = {
    "cut_after_magic", "cut_in_first_magic", "cut_in_irheader", "cut_in_lrecord", "cut_in_payload", "empty_rec",
    "text_instead_of_rec",
}  # fmt: skip
CORRUPT = sorted(path.stem for path in (FIXTURES / "corrupt").glob("*.rec"))  # of the rest, a copy is to be made


@pytest.mark.parametrize("name", CORRUPT)
def test_a_damaged_file_is_sound_or_mended_by_an_index_or_left_as_it_is_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
):
    folder = tmp_path / "set"
    folder.mkdir()
    for ending in ("rec", "idx"):
        shutil.copyfile(FIXTURES / "corrupt" / f"{name}.{ending}", folder / f"train.{ending}")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    status, said = _run(capsys, folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before["train.rec"] == after["train.rec"] and before["train.idx"] in after.values()
    assert status == (name not in SOUND | MENDED) and (after == before) == (name not in MENDED)
    assert ("nothing to mend" in said) == (name in SOUND)
    if status:
        assert ("no sound record" if name in NO_RECORD else "--out COPY writes a copy without them") in said
    if name in MENDED:
        records = _plain_records(folder / "train.rec")
        payloads = [record[24 + 4 * struct.unpack_from("<I", record)[0] :] for record in records]
        assert [payload for _, payload in _everything(folder)] == payloads and payloads


def test_every_damaged_file_has_its_verdict():
    assert set(CORRUPT) >= SOUND | MENDED | NO_RECORD and not SOUND & MENDED | SOUND & NO_RECORD | MENDED & NO_RECORD


def _spoil(people: Path) -> tuple[list[tuple[int, bytes]], dict[str, str]]:
    """Damage six records of the set, each in another way; return what must remain, and key -> reason of what goes."""
    path, expected = people / "train.rec", _everything(people)
    offsets = [int(line.split("\t")[1]) for line in (people / "train.idx").read_text().splitlines()]  # of keys 1, 2, ...
    data = bytearray(path.read_bytes())
    data[offsets[0] : offsets[0] + 4] = bytes(4)  # record 1: no magic; the first bytes of the file, too
    data[offsets[3] + 4 : offsets[3] + 8] = struct.pack("<I", 1 << 20)  # record 4: a length too large
    data[offsets[5] + 8 + 4 : offsets[5] + 8 + 8] = struct.pack("<f", 2.5)  # record 6: no class
    data[offsets[7] + 8 + 24 : offsets[7] + 8 + 400] = bytes(376)  # record 8: no JPEG any more
    length = struct.unpack_from("<I", data, offsets[9] + 4)[0]
    data[offsets[9] + 4 : offsets[9] + 8] = struct.pack("<I", length - 4)  # record 10: a length too small
    path.write_bytes(data[: offsets[11] + 300])  # record 12, and all behind it: cut
    gone = {"1": "no sound record", "4": "no sound record", "6": "label is 2.5", "8": "cannot be decoded"}
    gone |= {"10": "cannot be decoded", "12": "no sound record"}
    return [image for key, image in enumerate(expected, 1) if str(key) not in gone], gone


@pytest.mark.parametrize("with_index", [True, False])
def test_a_copy_has_all_that_is_sound_and_lists_the_rest(
    tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str], with_index: bool
):
    left, gone = _spoil(people)
    if not with_index:
        (people / "train.idx").unlink()
    before = {path.name: path.read_bytes() for path in people.iterdir()}
    status, said = _run(capsys, people)
    assert status == 1 and "--out COPY" in said
    status, said = _run(capsys, people, "--out", tmp_path / "copy")
    assert status == 0 and "left out: 7" in said
    assert {path.name: path.read_bytes() for path in people.iterdir()} == before
    assert _everything(tmp_path / "copy") == left
    assert RecordDataset(tmp_path / "copy").num_classes == 4
    records = _plain_records(tmp_path / "copy" / "train.rec")
    assert [(int(struct.unpack_from("<f", r, 4)[0]), r[24:]) for r in records] == left
    with open(tmp_path / "copy" / "left_out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    (rest,) = [row for row in rows if row["reason"] == "4 bytes hold no sound record"]  # of record 10
    rows.remove(rest)
    assert len(rows) == 6
    for row, (key, reason) in zip(rows, gone.items(), strict=True):
        assert reason in row["reason"] and row["record"] == (key if with_index else "")
    assert verify_data.main([str(tmp_path / "copy")]) == 0
    assert _run(capsys, people, "--out", tmp_path / "copy")[0] == 1  # never over what is there
    assert _run(capsys, people, "--out", tmp_path / "copy", "--overwrite")[0] == 0
    assert _run(capsys, people, "--out", people)[0] == 1


def test_an_image_with_the_magic_inside_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    noted = cv2.imencode(".png", picture(3)[:, :, ::-1])[1].tobytes()
    (tmp_path / "in" / "a").mkdir(parents=True)
    for shift in range(4):
        place = noted.index(b"IDAT") - 4
        (tmp_path / "in" / "a" / f"{shift}.png").write_bytes(
            noted[:place] + png_chunk(b"tEXt", b"note"[: 1 + shift] + b"\0" + MAGIC * 8) + noted[place:]
        )
    (tmp_path / "in" / "a" / "9.jpg").write_bytes(jpeg(picture(4)))
    assert folder_to_rec.main([str(tmp_path / "in"), str(tmp_path / "set")]) == 0
    expected, index = _everything(tmp_path / "set"), (tmp_path / "set" / "train.idx").read_bytes()
    assert any(MAGIC in image for _, image in expected)
    (tmp_path / "set" / "train.idx").unlink()
    assert _run(capsys, tmp_path / "set")[0] == 0
    assert (tmp_path / "set" / "train.idx").read_bytes() == index and _everything(tmp_path / "set") == expected


def test_what_cannot_be_mended_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "no file" in _run(capsys, tmp_path)[1]
    (tmp_path / "train.rec").write_text("a text, no records, of some length")
    status, said = _run(capsys, tmp_path)
    assert status == 1 and "this is not a RecordIO file" in said
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["train.rec"]'


def test_identities_that_lost_all_images_keep_their_number(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    offsets = [int(line.split("\t")[1]) for line in (people / "train.idx").read_text().splitlines()]
    data = bytearray((people / "train.rec").read_bytes())
    data[offsets[6] : offsets[8]] = bytes(offsets[8] - offsets[6])  # both pictures of person 2
    (people / "train.rec").write_bytes(data)
    assert _run(capsys, people, "--out", tmp_path / "copy")[0] == 0
    dataset = RecordDataset(tmp_path / "copy")
    assert np.bincount(dataset.labels(), minlength=dataset.num_classes).tolist() == [3, 3, 0, 4]
