"""Several sets as one: which images an epoch takes, and what their labels become."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from configs import as_plain, dump_config, load_config
from configs.loader import SCHEMA
from data import build_dataset
from data.datasets import SyntheticDataset
from data.mixture import MixedDataset, Source, class_maps
from data.recordio.image_record import RecordSetWriter
from data.sampler import SampleOrder


def _mixture(repeats: list[float], sizes: list[int], seeds: tuple[int, int] = (0, 1)) -> MixedDataset:
    parts = [SyntheticDataset(3, size, seed) for seed, size in zip(seeds, sizes, strict=True)]
    maps = class_maps([3] * len(parts), "offset")
    return MixedDataset([Source(*triple) for triple in zip(parts, repeats, maps, strict=True)], seed=5)


def _epochs(dataset: MixedDataset, count: int, shuffle: str = "full") -> list[np.ndarray]:
    order = SampleOrder(dataset.num_images, 8, 2, False, shuffle, 16, 4, dataset.epoch_indices)
    n = dataset.num_images
    return [order.at(np.arange(e * n, (e + 1) * n)).indices for e in range(count)]


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_whole_repeats_take_every_image_that_often_in_every_epoch(shuffle: str):
    dataset = _mixture([1, 3], [40, 9])
    for epoch in _epochs(dataset, 3, shuffle):
        assert np.bincount(epoch, minlength=49).tolist() == [1] * 40 + [3] * 9


def test_half_of_a_set_in_one_epoch_and_the_other_half_in_the_next():
    dataset = _mixture([1, 0.5], [40, 30])
    first, second, third, fourth = _epochs(dataset, 4)
    assert len(first) == 55
    assert sorted([*first, *second]) == sorted([*third, *fourth]) == sorted([*range(40), *range(40), *range(40, 70)])


def test_any_repeat_is_exact_over_epochs():
    dataset = _mixture([0.3, 2.5], [50, 20])
    counts = np.bincount(np.concatenate(_epochs(dataset, 10)), minlength=70)
    assert counts.tolist() == [3] * 50 + [25] * 20


def test_samples_come_from_their_source_with_their_class():
    dataset = _mixture([1, 1], [10, 7])
    assert (dataset.num_classes, dataset.num_stored) == (6, 17)
    parts = [source.dataset for source in dataset.sources]
    for index in range(17):
        part, inside = (parts[0], index) if index < 10 else (parts[1], index - 10)
        pixels, label = dataset.sample(index)
        np.testing.assert_array_equal(pixels, part.sample(inside)[0])
        assert label == dataset.label(index) == dataset.labels()[index] == part.label(inside) + (0 if index < 10 else 3)
        assert dataset.key(index) == part.key(inside)
    others = [_mixture([1, 1], [10, 7], seeds) for seeds in ((2, 1), (0, 2))]
    assert len({each.fingerprint()["hash of the places of the images"] for each in (dataset, *others)}) == 3


def test_labels_become_classes_by_rule_or_by_file(tmp_path: Path):
    assert [m.tolist() for m in class_maps([2, 3], "offset")] == [[0, 1], [2, 3, 4]]
    assert [m.tolist() for m in class_maps([2, 3], "same")] == [[0, 1], [0, 1, 2]]
    path = tmp_path / "map.txt"
    path.write_text("# source label class\n0 0 0\n0 1 1\n1 2 1\n1 0 2\n\n1 1 3\n")
    assert [m.tolist() for m in class_maps([2, 3], str(path))] == [[0, 1], [2, 3, 1]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 0\n", "line 1 must be 'source label class'"),
        ("0 0 0\n0 1 x\n", "line 2 must be"),
        ("0 2 0\n", "there is no label 2 in a source 0"),
        ("0 0 0\n0 0 1\n", "has class 0 already"),
        ("0 0 0\n", "label 1 of source 0 has no class"),
        ("0 0 0\n0 1 2\n1 0 0\n1 1 0\n1 2 0\n", "1 is missing"),
    ],
)
def test_a_wrong_map_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    (tmp_path / "map.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        class_maps([2, 3], str(tmp_path / "map.txt"))
    with pytest.raises(ValueError, match=r"^labels must be offset, same, or a file"):
        class_maps([2], "ofset")


def _make_sets(folder: Path) -> tuple[Path, Path]:
    """Return a RecordIO set of 3 classes and a folder of 2."""
    jpeg = cv2.imencode(".jpg", np.full((112, 112, 3), 9, np.uint8))[1].tobytes()
    with RecordSetWriter(folder / "a") as writer:
        for label in (0, 1, 1, 2):
            writer.add(label, jpeg)
    for name in ("ann", "bob"):
        (folder / "b" / name).mkdir(parents=True)
        (folder / "b" / name / "1.jpg").write_bytes(jpeg)
    return folder / "a", folder / "b"


def test_a_config_names_sources_and_its_dump_reads_back(tmp_path: Path):
    a, b = _make_sets(tmp_path)
    (tmp_path / "run.yaml").write_text(f"data:\n  sources:\n  - {{path: {a}}}\n  - {{path: {b}, source: folder, repeat: 2}}\n")
    config = load_config(tmp_path / "run.yaml")
    assert config.data.sources[1].repeat == 2.0 and config.data.sources[0].source == "recordio"
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert as_plain(load_config(tmp_path / "again.yaml")) == as_plain(config)
    dataset = build_dataset(config.data, 0, None)
    assert (dataset.num_images, dataset.num_stored, dataset.num_classes) == (8, 6, 5)
    assert "2 sources, 8 images per epoch, 5 classes" in dataset.describe()
    with pytest.raises(TypeError, match="read-only"):
        config.data.sources[0].path = "elsewhere"


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("[a]", r"data\.sources must be a list of entries like \{path, source, repeat\}"),
        ("[{pth: a}]", r"no key 'data\.sources\[0\]\.pth'\. Did you mean data\.sources\[0\]\.path"),
        ("[{path: a, repeat: 0}]", r"data\.sources\[0\]\.repeat must be above 0"),
        ("[{path: a, repeat: two}]", "must be a number"),
        ("[{repeat: 1}]", r"data\.sources\[0\]\.path must name a set"),
        ("[{path: a, source: synthetic}]", r"data\.sources\[0\]\.source must be one of"),
    ],
)
def test_wrong_sources_are_refused_by_name(sources: str, message: str):
    with pytest.raises(ValueError, match=message):
        load_config(SCHEMA, [f"data.sources={sources}"])
    with pytest.raises(ValueError, match=r"data\.path must be empty"):
        load_config(SCHEMA, ["data.sources=[{path: a}]", "data.path=b"])


def test_a_source_that_gives_no_image_is_refused():
    values: Any = [1, 0.01]
    with pytest.raises(ValueError, match="raise its repeat"):
        _mixture(values, [10, 20])
