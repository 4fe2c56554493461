"""Datasets: forms of record sets, labels, pixels against mxnet's decoder, folders, synthetic images."""

import hashlib
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from configs import load_config, rules
from configs.loader import SCHEMA
from data import datasets
from data.base import FaceDataset
from data.datasets import FolderDataset, SyntheticDataset, build_dataset
from data.record_dataset import RecordDataset
from data.recordio.image_record import IndexedRecordFile, RecordWriter, pack, unpack

SETS = Path(__file__).parent / "fixtures" / "rec"
LIMIT = 1 << 24


def _pixels(dataset: FaceDataset, index: int) -> np.ndarray:
    out = np.zeros((112, 112, 3), dtype=np.uint8)
    assert dataset.decode_into(index, out) == dataset.label(index) == dataset.sample(index)[1]
    return out


def _write(folder: Path, records: list[tuple[int, Any, bytes]], property_text: str | None = None) -> str:
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key, label, payload in records:
            writer.write(key, pack(label, key, 0, payload))
    if property_text is not None:
        (folder / "property").write_text(property_text)
    return str(folder)


def _labels(dataset: FaceDataset) -> list[int]:
    return [dataset.label(i) for i in range(dataset.num_images)]


def _keys(dataset: FaceDataset) -> list[int]:
    """Return the record keys in the order of the samples."""
    return [int(dataset.key(i).split()[1]) for i in range(dataset.num_images)]


def _check_decoding(folder: Path, hashes: dict[int, str]) -> int:
    """Compare all images of 112 x 112 that mxnet decoded, and return how many."""
    dataset = RecordDataset(str(folder))
    found = {key: i for i, key in enumerate(_keys(dataset)) if key in hashes}
    for key, i in found.items():
        assert hashlib.sha256(_pixels(dataset, i).tobytes()).hexdigest() == hashes[key], f"record {key} of {folder.name}"
    return len(found)


@pytest.mark.parametrize(
    ("name", "form", "labels"),
    [
        ("01_plain_float", "no header record", [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
        ("02_insightface_vec", "header record", [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]),
        ("08_no_header_shuffled", "no header record", [1, 0, 0, 3, 0]),
        ("09_sequential_no_idx", "index rebuilt", [0, 0, 1, 1, 2, 2, 3]),
        ("12_py2_mxnet151", "header record", [0, 0, 1, 1, 2, 2]),
    ],
)
def test_the_form_of_a_set_and_its_labels_are_recognised(name: str, form: str, labels: list[int]) -> None:
    dataset = RecordDataset(str(SETS / name))
    assert f"train.rec: {form}, " in dataset.describe()
    assert (dataset.num_images, _labels(dataset)) == (len(labels), labels)
    assert dataset.num_classes == max(labels) + 1


def test_a_vector_of_two_labels_with_an_image_is_no_header(tmp_path: Path) -> None:
    source = SETS / "04_vector_labels"
    records = IndexedRecordFile(source / "train.rec", source / "train.idx")
    record = records.read_position(records.keys.tolist().index(0))
    assert len(np.atleast_1d(unpack(record).label)) == 2
    dataset = RecordDataset(_write(tmp_path, [(0, [2.0, 3.0], b"image"), (1, 0, b"image"), (2, 1, b"image")]))
    assert (_keys(dataset), _labels(dataset)) == ([0, 1, 2], [2, 0, 1])


@pytest.mark.parametrize(
    "name", ["01_plain_float", "02_insightface_vec", "06_encodings", "08_no_header_shuffled", "12_py2_mxnet151"]
)
def test_pixels_equal_those_of_mxnet(name: str) -> None:
    records = json.loads((SETS / name / "expected.json").read_text())["records"]
    whole = [r for r in records if r.get("rgb_shape") == [112, 112, 3] and r["key"] != 22]  # 22 is cut off
    count = _check_decoding(SETS / name, {r["key"]: r["rgb_sha256"] for r in whole})
    assert count == len(whole)
    assert count or name.startswith("12")


def test_all_oracle_sets_decode_as_mxnet_does(face_oracle: Path) -> None:
    counts = {}
    for folder in [*(face_oracle / "oracle" / "rec").iterdir(), face_oracle / "london" / "rec"]:
        expected = json.loads((folder / "expected.json").read_text())["records"]
        decoded = [r for r in expected if r.get("mx_imdecode_rgb", {}).get("shape") == [112, 112, 3]]
        hashes = {r["key"]: r["mx_imdecode_rgb"]["sha256"] for r in decoded if "key" in r}
        if folder.name == "06_png_jpeg":
            del hashes[22]
        if folder.name not in ("04_vector_labels", "05_magic_payload", "07_zero_and_short"):  # no classes in these
            counts[folder.parent.name] = _check_decoding(folder, hashes)
    assert counts["london"] == 204


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (12, r"must be 112 x 112 pixels \(height x width\), got 97 x 113\. Align"),
        (9, "got 112 x 80"),  # stored upright, turned by EXIF alone
        (22, "cannot be decoded"),  # cut off in the middle
        (23, "cannot be decoded"),  # no image
    ],
)
def test_an_image_that_cannot_be_used_is_an_error_that_names_the_record(key: int, reason: str) -> None:
    dataset = RecordDataset(str(SETS / "06_encodings"))
    with pytest.raises(ValueError, match=rf"^record {key} of .*train\.rec: .*{reason}"):
        _pixels(dataset, _keys(dataset).index(key))


def test_above_2_to_the_24_images_are_found_by_what_records_hold(tmp_path: Path) -> None:
    first, count = LIMIT - 2, 7  # so the header says [2^24 + 5, 2^24 + 11], which is rounded to even numbers
    images = [(first + i, [float(i // 3), 1.0], bytes([i]) * 9) for i in range(count)]
    identities = [(first + count + i, [LIMIT + 1, LIMIT + 3], b"") for i in range(6)]
    header = [first + count, first + count + len(identities)]
    assert np.array(header, dtype=np.float32).tolist() == [LIMIT + 4, LIMIT + 12]
    records = [*images, *identities, (0, header, b"")]
    dataset = RecordDataset(_write(tmp_path, records))
    assert _keys(dataset) == [key for key, _, _ in images]
    assert _labels(dataset) == [0, 0, 0, 1, 1, 1, 2]
    assert [bytes(dataset.sample(i)[0]) for i in range(count)] == [payload for _, _, payload in images]
    assert "train.rec: header record" in dataset.describe()


@pytest.mark.parametrize("label", [0.5, -1, float("nan"), float("inf"), LIMIT, [2.5, 1.0]])
def test_a_label_that_is_no_class_is_an_error_that_names_the_record(label: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^record 7 of .*train\.rec: a label must be an integer in \[0, 2\^24\)"):
        RecordDataset(_write(tmp_path, [(3, 0, b"image"), (7, label, b"image"), (8, 1, b"image")]))


def test_a_record_with_a_label_and_no_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^record 7 of .*: has a label, but no image"):
        RecordDataset(_write(tmp_path, [(3, 0, b"image"), (7, 1, b"")]))
    with pytest.raises(ValueError, match="none of the 1 records holds an image"):
        RecordDataset(_write(tmp_path, [(0, [1.0, 2.0], b"")]))


@pytest.mark.parametrize(
    ("keys", "which"), [([1, 3, 4], "2 has no image .1 missing, 0 too"), ([1, 2, 3, 9], "9 has one .0 missing, 1 too")]
)
def test_images_that_the_header_does_not_know_are_an_error(keys: list[int], which: str, tmp_path: Path) -> None:
    end = 5 if 4 in keys else 4
    records = [*((key, 0, b"image") for key in keys), (end, [1, end], b""), (0, [end, end + 1], b"")]
    with pytest.raises(ValueError, match=f"keys 1 to {end - 1}, but record {which}"):
        RecordDataset(_write(tmp_path, records))


def test_bytes_behind_the_index_are_reported(tmp_path: Path) -> None:
    folder = _write(tmp_path, [(key, 0, b"image") for key in range(5)])
    assert "not in the index" not in RecordDataset(folder).describe()
    lines = (tmp_path / "train.idx").read_text().splitlines(keepends=True)
    (tmp_path / "train.idx").write_text("".join(lines[:3]))
    assert "3 images" in RecordDataset(folder).describe()
    assert "the last 80 bytes of the file are not in the index" in RecordDataset(folder).describe()


@pytest.mark.parametrize(
    ("text", "num_classes", "described"),
    [
        (None, 3, "3 classes (largest label + 1), 1 of them without images"),
        ("3,112,112", 3, "3 classes (property), 1 of them"),
        ("5,112,112\n2\nshuffled\n", 5, "5 classes (property), 3 of them"),
    ],
)
def test_property_gives_the_number_of_classes(text: str | None, num_classes: int, described: str, tmp_path: Path) -> None:
    dataset = RecordDataset(_write(tmp_path, [(0, 0, b"image"), (1, 2, b"image")], text))
    assert dataset.num_classes == num_classes
    assert described in dataset.describe()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2,112,112\n", r"record 1 of .*train.rec: its label is 2, but .*property says 2 classes"),
        ("", "first line"),
        ("1000000000000,112,112", "at most 2\\^24 classes"),
    ],
)
def test_property_that_contradicts_the_labels_is_an_error(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        RecordDataset(_write(tmp_path, [(0, 0, b"image"), (1, 2, b"image")], text))


def test_property_that_cannot_be_read_is_not_to_be_deleted(tmp_path: Path) -> None:
    folder = _write(tmp_path, [(0, 0, b"image"), (1, 2, b"image")])
    (tmp_path / "property").mkdir()
    with pytest.raises(ValueError, match=r"property: cannot be read: [^.]*$"):
        RecordDataset(folder)


def _write_image(path: Path, value: int, height: int = 112) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((height, 112, 3), (value, 0, 0), dtype=np.uint8))


def test_a_folder_has_one_class_per_sub_folder_in_order_of_names(tmp_path: Path) -> None:
    for value, name in enumerate(["b/2.png", "b/10.png", "a/x.JPG", "a/more/y.jpeg", "c/z.bmp", "c/z.webp", ".git/n.png"]):
        _write_image(tmp_path / name, 20 * value)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "list.txt").write_text("no class")
    dataset = FolderDataset(str(tmp_path))
    names = ["a/more/y.jpeg", "a/x.JPG", "b/10.png", "b/2.png", "c/z.bmp", "c/z.webp"]
    assert [dataset.key(i) for i in range(dataset.num_images)] == [str(tmp_path / name) for name in names]
    assert (_labels(dataset), dataset.num_classes) == ([0, 0, 1, 1, 2, 2], 3)
    assert _pixels(dataset, 3)[0, 0].tolist() == [0, 0, 0]
    assert _pixels(dataset, 2)[0, 0].tolist() == [0, 0, 20]  # RGB: OpenCV wrote blue
    assert "6 images, 3 classes" in dataset.describe()


def test_folder_errors_name_the_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^no folder .*/none"):
        FolderDataset(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"^no sub-folder in"):
        FolderDataset(str(tmp_path))
    _write_image(tmp_path / "a" / "small.png", 0, height=96)
    dataset = FolderDataset(str(tmp_path))
    with pytest.raises(ValueError, match=r"a/small\.png: an image must be 112 x 112 .* got 96 x 112"):
        _pixels(dataset, 0)
    (tmp_path / "a" / "small.png").unlink()
    with pytest.raises(ValueError, match=r"a/small\.png: cannot be read"):
        _pixels(dataset, 0)
    with pytest.raises(ValueError, match=r"no image in it or below it"):
        FolderDataset(str(tmp_path))


def _bilinear(image: np.ndarray, size: int) -> np.ndarray:
    """Return a square image at `size` places a side, each weighted by its distance to the two nearest pixels."""
    places = ((np.arange(size) + 0.5) * len(image) / size - 0.5).clip(0, len(image) - 1)
    weights = (1 - np.abs(places[:, None] - np.arange(len(image)))).clip(0)
    return np.einsum("yr,rsc,xs->yxc", weights, image, weights, optimize=True)


def test_square_images_are_resized_where_another_size_is_asked_for(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (144, 144, 3)).astype(np.uint8)
    for name, pixels in (("square", image), ("flat", image[:80])):
        (tmp_path / name / "a").mkdir(parents=True)
        cv2.imwrite(str(tmp_path / name / "a" / "x.png"), pixels[:, :, ::-1])
    dataset = FolderDataset(str(tmp_path / "square"))
    shrunk = dataset.pixels_and_label(0, 48)[0]
    means = image.astype(float).reshape(48, 3, 48, 3, 3).mean((1, 3))
    assert np.abs(shrunk - means).max() <= 0.501  # rounded
    enlarged = dataset.pixels_and_label(0, 160)[0]
    assert np.abs(enlarged - _bilinear(image.astype(float), 160)).max() <= 1.0  # OpenCV's weights have eleven bits
    assert np.array_equal(dataset.pixels_and_label(0, 144)[0], image)
    with pytest.raises(ValueError, match=r"must be 112 x 112 .* got 144 x 144\. Align"):  # the default, which all sets have
        dataset.pixels_and_label(0)
    with pytest.raises(ValueError, match=r"must be 160 x 160 pixels .* got 80 x 144\. Align"):
        FolderDataset(str(tmp_path / "flat")).pixels_and_label(0, 160)


@pytest.mark.parametrize("size", [48, 448])
def test_synthetic_images_have_the_size_that_is_asked_for(size: int) -> None:
    dataset = SyntheticDataset(2, 4, seed=1, image_size=size)
    pixels = [dataset.sample(index)[0] for index in range(4)]
    assert all(image.shape == (size, size, 3) for image in pixels)
    tiles = [image.reshape(8, size // 8, 8, size // 8, 3).mean((1, 3)) for image in pixels]  # the noise averages out
    assert np.abs(tiles[0] - tiles[2]).mean() < 0.5 * np.abs(tiles[0] - tiles[1]).mean()  # of one class, of two


def test_synthetic_images_are_a_function_of_seed_and_index() -> None:
    datasets = [SyntheticDataset(5, 40, seed) for seed in (1, 1, 2)]
    images = [[_pixels(dataset, i) for i in range(40)] for dataset in datasets]
    assert all((a == b).all() for a, b in zip(images[0], images[1], strict=True))
    assert not any((a == b).all() for a, b in zip(images[0], images[2], strict=True))
    assert len({image.tobytes() for image in images[0]}) == 40


def test_synthetic_labels_are_balanced_and_can_be_learned() -> None:
    dataset = SyntheticDataset(num_classes=7, num_images=30, seed=0)
    assert sorted(np.bincount(_labels(dataset)).tolist()) == [4, 4, 4, 4, 4, 5, 5]
    tiles = np.stack([_pixels(dataset, i).reshape(8, 14, 8, 14, 3).mean((1, 3)).ravel() for i in range(30)])
    distance = ((tiles[:, None] - tiles) ** 2).sum(2)
    np.fill_diagonal(distance, np.inf)
    assert [dataset.label(int(i)) for i in distance.argmin(1)] == _labels(dataset)


def _section(**keys: Any) -> Any:
    return {**load_config(SCHEMA).data, **keys}


def test_build_dataset_takes_sizes_from_the_data() -> None:
    folder = str(SETS / "02_insightface_vec")
    for num_classes, num_images in [(0, 0), (4, 10)]:
        dataset = build_dataset(_section(path=folder, num_classes=num_classes, num_images=num_images), 0, None)
        assert (dataset.num_classes, dataset.num_images) == (4, 10)
    assert build_dataset(_section(source="synthetic", num_classes=3, num_images=9), 0, None).num_images == 9


def test_each_source_that_a_configuration_may_name_can_be_opened() -> None:
    assert {*datasets.SOURCES, "synthetic"} == set(rules.SOURCES)


@pytest.mark.parametrize(
    ("source", "name", "num_classes", "num_images", "reason"),
    [
        ("recordio", "02_insightface_vec", 3, 0, r"data\.num_classes is 3, but the data has 4 .* to 0 or 4"),
        ("recordio", "02_insightface_vec", 5, 0, r"data\.num_classes is 5, but the data has 4"),
        ("recordio", "02_insightface_vec", 4, 11, r"data\.num_images is 11, but the data has 10"),
        ("recordio", "none", 0, 0, r"data\.path: no file .*train\.rec"),
        ("synthetic", "", 0, 10, r"data\.num_classes, data\.num_images: synthetic data need at least one .* got 0 classes"),
        ("synthetic", "", 11, 10, r"data\.num_images: .* an image for each, got 11 classes, 10 images"),
    ],
)
def test_build_dataset_refuses_what_the_data_contradicts(
    source: str, name: str, num_classes: int, num_images: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        path = str(SETS / name)
        build_dataset(_section(source=source, path=path, num_classes=num_classes, num_images=num_images), 0, None)
