from pathlib import Path

import numpy as np
import pytest
from pictures import folder_of_people, jpeg, picture
from safetensors.numpy import load_file, save_file

from eval.monitor import load_pair_sets
from eval.pair_sets.bin_file import PairSet, read_bin, read_pairs, write_bin
from scripts.data import convert_bin


@pytest.fixture
def bin_file(tmp_path: Path) -> Path:
    images = [jpeg(picture(number % 9)) for number in range(24)]
    write_bin(tmp_path / "tiny.bin", images, [bool(pair % 3) for pair in range(12)])
    return tmp_path / "tiny.bin"


def _same(one: PairSet, other: PairSet) -> bool:
    pairs = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("first", "second", "same"))
    return pairs and one.images == other.images


def test_the_container_holds_what_the_bin_holds_and_goes_back(bin_file: Path, tmp_path: Path):
    assert convert_bin.main([str(bin_file), "--out", str(tmp_path / "safe")]) == 0
    assert _same(read_pairs(tmp_path / "safe" / "tiny.safetensors"), read_bin(bin_file))
    assert convert_bin.main([str(bin_file), "--out", str(tmp_path / "safe")]) == 1  # never over what is there
    back = ["--to", "bin", "--out", str(tmp_path / "back")]
    assert convert_bin.main([str(tmp_path / "safe" / "tiny.safetensors"), *back]) == 0
    assert _same(read_bin(tmp_path / "back" / "tiny.bin"), read_bin(bin_file))


def test_targets_are_found_in_each_form(bin_file: Path, tmp_path: Path):
    expected = read_bin(bin_file)
    assert convert_bin.main([str(bin_file), "--out", str(tmp_path / "safe")]) == 0
    assert _same(load_pair_sets(tmp_path / "safe", ["tiny"], "eval.targets", "eval.path")[0], expected)
    people = folder_of_people(tmp_path / "people", [3, 3])
    people_of_pairs, numbers = ((0, 0), (0, 1), (1, 1), (1, 0)), ((0, 1), (1, 2), (2, 0))
    lines = [f"person_{a}/{i}.jpg,person_{b}/{j}.jpg,{int(a == b)}\n" for a, b in people_of_pairs for i, j in numbers]
    (people / "mine.csv").write_text("".join(lines))
    found = load_pair_sets(people, ["mine"], "eval.targets", "eval.path")[0]
    assert found.name == "mine" and len(found.images) == 6
    assert found.same.tolist() == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert found.images[found.second[3]] == (people / "person_1" / "1.jpg").read_bytes()
    with pytest.raises(ValueError, match=r"no file .*minn\.bin. Did you mean 'mine'"):
        load_pair_sets(people, ["minn"], "eval.targets", "eval.path")
    (people / "person_0" / "0.jpg").unlink()
    with pytest.raises(ValueError, match=r"0\.jpg: cannot be read"):
        load_pair_sets(people, ["mine"], "eval.targets", "eval.path")


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("ends", np.array([5, 3], dtype=np.int64), "ends must rise"),
        ("ends", np.array([1.0]), "one axis of int64"),
        ("first", np.array([99] * 12), "must name images 0 to 8"),
        ("second", np.array([-1] * 12), "must name images 0 to 8"),
        ("same", np.array([True]), "one entry for each pair"),
        ("bytes", np.zeros((2, 2), np.uint8), "one axis of uint8"),
        ("same", None, "must hold same"),
    ],
)
def test_a_damaged_container_is_one_line(bin_file: Path, tmp_path: Path, key: str, value: np.ndarray | None, said: str):
    assert convert_bin.main([str(bin_file)]) == 0
    tensors = load_file(tmp_path / "tiny.safetensors")
    tensors.pop(key)
    save_file(tensors if value is None else {**tensors, key: value}, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match=rf"bad\.safetensors: not a verification set: .*{said}"):
        read_pairs(tmp_path / "bad.safetensors")


def test_a_truncated_container_is_one_line(bin_file: Path, tmp_path: Path):
    assert convert_bin.main([str(bin_file)]) == 0
    path = tmp_path / "tiny.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="not a verification set"):
        read_pairs(path)


def test_a_folder_of_people_is_a_set_of_drawn_pairs(tmp_path: Path):
    people = folder_of_people(tmp_path / "mine", [3] * 20)
    found = load_pair_sets(tmp_path, ["mine"], "eval.targets", "eval.path")[0]
    label_of = {path.read_bytes(): path.parent.name for path in people.rglob("*.jpg")}
    labels = np.array([label_of[image] for image in found.images])
    np.testing.assert_array_equal(labels[found.first] == labels[found.second], found.same)
    assert len(found.same) == 120 and found.same.sum() == 60  # two people of three pictures in a fold: six genuine pairs
    again = load_pair_sets(tmp_path, ["mine"], "eval.targets", "eval.path")[0]
    assert _same(found, again)
    with pytest.raises(ValueError, match="need 20 people or more"):
        read_pairs(folder_of_people(tmp_path / "few", [2] * 5))
