"""The cache of a set's index: equal to parsing, never out of date, never trusted when damaged, never in the dataset."""

import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from pictures import jpeg, picture
from tiny_runs import ended_well, run_file, run_program

import train
from data import record_dataset
from data.index_cache import cache_path, read_cache, stamp, write_cache
from data.record_dataset import RecordDataset
from data.recordio.image_record import RecordSetWriter
from eval.pair_sets.bin_file import write_bin


def _make(folder: Path, labels: list[int]) -> Path:
    with RecordSetWriter(folder, overwrite=True) as writer:
        for i, label in enumerate(labels):
            writer.add(label, b"image %d of %d" % (i, label))
    return folder


def _everything(dataset: RecordDataset) -> list[tuple[str, int, bytes]]:
    return [(dataset.key(i), dataset.label(i), bytes(dataset.sample(i)[0])) for i in range(dataset.num_images)]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What parses a set that is not taken from a cache; it counts its calls."""
    counted = mock.Mock(side_effect=record_dataset._index_set)
    monkeypatch.setattr(record_dataset, "_index_set", counted)
    return counted


def test_a_cached_set_equals_a_parsed_one_and_is_parsed_once(tmp_path: Path, parsed: mock.Mock) -> None:
    folder, cache = _make(tmp_path / "set", [0, 0, 1, 2, 2]), tmp_path / "cache"
    plain = RecordDataset(folder)
    first, second = RecordDataset(folder, cache), RecordDataset(folder, cache)
    assert parsed.call_count == 2  # without the cache, and to make it
    assert _everything(plain) == _everything(first) == _everything(second)
    assert plain.describe() == first.describe() == second.describe()
    assert isinstance(second.labels().base, np.memmap) and isinstance(first.labels().base, np.memmap)
    assert second.labels().dtype == plain.labels().dtype and len(list(cache.iterdir())) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["property", "train.idx", "train.rec"]


@pytest.mark.parametrize("changed", ["train.rec", "train.idx", "property"])
def test_a_set_that_changed_is_parsed_again(tmp_path: Path, parsed: mock.Mock, changed: str) -> None:
    folder, cache = _make(tmp_path / "set", [0, 1]), tmp_path / "cache"
    RecordDataset(folder, cache)
    if changed == "property":
        (folder / "property").write_text("3,112,112")
    else:
        os.utime(folder / changed, ns=(1, 1))
    assert RecordDataset(folder, cache).num_classes == (3 if changed == "property" else 2)
    assert parsed.call_count == 2
    (folder / "property").unlink()
    assert RecordDataset(folder, cache).num_classes == 2
    assert parsed.call_count == 3


def test_any_damage_of_the_cache_means_parsing_again(tmp_path: Path, parsed: mock.Mock) -> None:
    folder, cache = _make(tmp_path / "set", [0, 1, 1]), tmp_path / "cache"
    expected = _everything(RecordDataset(folder, cache))
    path = cache_path(cache, folder / "train.rec")
    good = path.read_bytes()
    damages = [
        b"", good[:5], good[:40], good[:-1], b"X" + good[1:], good[:12] + b"\xff" * 8 + good[20:],
        good.replace(b"offsets", b"offset5"),
    ]  # fmt: skip
    for number, damaged in enumerate(damages, 2):
        path.write_bytes(damaged)
        assert _everything(RecordDataset(folder, cache)) == expected
        assert parsed.call_count == number and path.read_bytes() == good


@pytest.mark.parametrize("place", [60, -70])  # in the JSON, and in the arrays
def test_a_changed_byte_of_the_cache_is_found_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(train, "decode_sample", lambda dataset, size: None)  # these records are no images
    folder, cache = _make(tmp_path / "set", [0, 1, 1]), tmp_path / "runs" / "index_cache"
    expected = _everything(RecordDataset(folder, cache))
    path = cache_path(cache, folder / "train.rec")
    good = path.read_bytes()
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    arguments = ["configs/ms1mv2_r50.yaml", f"data.path={folder}", f"run.output={tmp_path / 'runs'}", "eval.targets=[]"]
    assert train.main([*arguments, "data.num_classes=0", "data.num_images=0", "backbone.width=0.125", "--check"]) == 0
    assert f"{path}: the cached index is damaged; it is rebuilt from the set" in capsys.readouterr().out
    assert path.read_bytes() == good
    again = RecordDataset(folder, cache)
    assert _everything(again) == expected and not again.warnings


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    folder = _make(tmp_path / "set", [0, 1])
    (tmp_path / "file").write_text("no folder")
    dataset = RecordDataset(folder, tmp_path / "file")
    assert dataset.num_images == 2
    assert len(dataset.warnings) == 1 and str(tmp_path / "file") in dataset.warnings[0]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_new_files_have_the_mode_of_the_users_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """In a process of its own: the umask belongs to the whole process."""
    folder = _make(tmp_path / "set", [0, 1])
    write_bin(tmp_path / "held.bin", [jpeg(picture(1)), jpeg(picture(2))], [False])
    program = (
        f"import os; os.umask({umask})\n"
        "from data.record_dataset import RecordDataset; from scripts.data import convert_bin, repair\n"
        f"RecordDataset({str(folder)!r}, {str(tmp_path / 'cache')!r})\n"
        f"assert convert_bin.main([{str(tmp_path / 'held.bin')!r}]) == 0\n"
        f"os.unlink({str(folder / 'train.idx')!r})\n"
        f"assert repair.main([{str(folder)!r}]) == 0\n"
    )
    (tmp_path / "program.py").write_text(program)
    ended_well(run_program(run_file, [[str(tmp_path / "program.py")]]))
    made = [*(tmp_path / "cache").iterdir(), tmp_path / "held.safetensors", folder / "train.idx"]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == [oct(mode)] * 3


LIES = {
    "offset beyond the file": lambda facts, arrays: arrays["offsets"].__setitem__(0, 1 << 40),
    "negative offset": lambda facts, arrays: arrays["offsets"].__setitem__(0, -8),
    "label beyond the classes": lambda facts, arrays: arrays["labels"].__setitem__(0, 7),
    "negative label": lambda facts, arrays: arrays["labels"].__setitem__(0, -1),
    "fewer labels": lambda facts, arrays: arrays.update(labels=arrays["labels"][1:]),
    "keys of some": lambda facts, arrays: arrays.update(keys=np.arange(1)),
    "floats": lambda facts, arrays: arrays.update(labels=arrays["labels"].astype(np.float32)),
    "no image": lambda facts, arrays: arrays.update({name: values[:0] for name, values in arrays.items()}),
    "no record": lambda facts, arrays: facts.update(num_records=0),
    "classes in words": lambda facts, arrays: facts.update(num_classes="3"),
    "no first key": lambda facts, arrays: facts.pop("first_key"),
    "facts missing": lambda facts, arrays: facts.clear(),
    "warnings of numbers": lambda facts, arrays: facts.update(warnings=[1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_cache_with_a_right_checksum_that_cannot_be_the_sets_is_made_anew(tmp_path: Path, lie: str) -> None:
    folder, cache = _make(tmp_path / "set", [0, 0, 1, 2, 2]), tmp_path / "cache"
    plain = RecordDataset(folder, cache)
    place = cache_path(cache, folder / "train.rec")
    wanted, names = stamp([folder / name for name in ("train.rec", "train.idx", "property")]), ("offsets", "labels", "keys")
    found = read_cache(place, wanted, names)
    assert found is not None
    facts, arrays = dict(found[0]), {name: values.copy() for name, values in found[1].items()}
    LIES[lie](facts, arrays)
    write_cache(place, wanted, facts, arrays)
    dataset = RecordDataset(folder, cache)
    assert "damaged; it is rebuilt" in dataset.warnings[0] and _everything(dataset) == _everything(plain)
    assert not RecordDataset(folder, cache).warnings
