import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from saving import ALONE, no_space, save_now

from utils.checkpoint import format as ckpt
from utils.checkpoint import reading
from utils.checkpoint import writer as checkpoint_writer
from utils.checkpoint.tensor_file import read_tensors
from utils.distributed import World, raise_on_all_ranks

NUM_SLOTS, D = 11, 3
CENTRES = torch.arange(NUM_SLOTS * D, dtype=torch.float32).view(NUM_SLOTS, D)


@mock.patch("utils.checkpoint.tensor_file.BLOCK", 16)  # bytes: several blocks of a tensor
def _save(folder: Path, world: World, step: int = 7, score: float | None = 0.5) -> Path:
    low = NUM_SLOTS * world.rank // world.world_size
    high = NUM_SLOTS * (world.rank + 1) // world.world_size
    rows = CENTRES[low:high]
    trainer = {"optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}}
    backbone = {"w": torch.full((2, 2), 3.0), "steps": torch.tensor(5)}
    return save_now(folder, step, backbone, {"centres": rows, "momentum": -rows}, (low, high), trainer, {"score": score}, world)


def test_what_is_saved_is_read_back(tmp_path: Path):
    path = _save(tmp_path, ALONE)
    assert path == tmp_path / "checkpoints" / "step_00000007" == ckpt.find_checkpoint(tmp_path)
    assert sorted(p.name for p in path.iterdir()) == [
        "backbone.safetensors", "manifest.json", "softmax_00000_of_00001.safetensors", "trainer.pt",
    ]  # fmt: skip
    assert reading.read_backbone(path)["steps"].item() == 5 and ckpt.read_manifest(path)["step"] == 7
    assert reading.read_trainer(path)["optimizer"]["state"][0]["momentum_buffer"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"its manifest does not list ema\.safetensors"):
        reading.read_file(path, ckpt.EMA)


def _save_and_read_slices(rank: int, world_size: int, folder: str) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    path = _save(Path(folder), world)
    for low, high in [(0, NUM_SLOTS), (3, 9), (2, 3), (10, 11)]:  # whatever another world size asks for
        rows = reading.shard_reader(path)(low, high)
        assert torch.equal(rows["centres"], CENTRES[low:high]) and torch.equal(rows["momentum"], -CENTRES[low:high])
    with pytest.raises(ValueError, match="slots 11 to 11 are in no file"):
        reading.shard_reader(path)(9, 12)
    # a rank that cannot write: an error on all, and what was there stays
    if rank == 1:
        original, checkpoint_writer.write_tensors = checkpoint_writer.write_tensors, no_space
    with pytest.raises(ValueError, match=r"step_00000008 could not be saved \(rank 1: .*No space left"):
        _save(Path(folder), world, step=8)
    if rank == 1:
        checkpoint_writer.write_tensors = original
    assert [p.name for p in ckpt.list_checkpoints(Path(folder))] == ["step_00000007"]
    with raise_on_all_ranks(world):
        pass
    _save(Path(folder), world, step=8)  # the leftovers of the failure are no obstacle


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_range_of_slots_is_read_whatever_ranks_wrote(run_ranks: Callable[..., None], tmp_path: Path, world_size: int):
    if world_size == 1:
        rows = reading.shard_reader(_save(tmp_path, ALONE))(4, 6)
        assert torch.equal(rows["centres"], CENTRES[4:6])
    else:
        run_ranks(_save_and_read_slices, world_size, str(tmp_path))


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path):
    path = _save(tmp_path, ALONE)
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match="never overwritten"):
        _save(tmp_path, ALONE)
    assert (path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(("was", "now", "noted"), [(0.0, 0.0, 0.5), (0.9, 0.9, 0.5), (0.0, 0.9, 0.5), (0.9, 0.0, None)])
def test_a_score_that_is_found_later_is_noted_if_it_is_of_what_was_saved(
    tmp_path: Path, was: float, now: float, noted: float | None
):
    """Not if a moving average was saved, and the run has none any more."""
    path = _save(tmp_path, ALONE, score=None)
    manifest = {**ckpt.read_manifest(path), "config": {"train": {"ema": was}}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    ckpt.note_score(path, 0.5, {"train": {"ema": now}, "eval": {"metric": "auc"}})
    config = {"train": {"ema": was}} | ({"eval": {"metric": "auc"}} if noted else {})
    assert ckpt.read_manifest(path) == {**manifest, "score": noted, "config": config}


SCORES = [0.1, None, 0.9, 0.2, 0.7, 0.8, 0.3, 0.4]


@pytest.mark.parametrize(
    ("scores", "keep", "left"),
    [
        ([0.3, 0.9, None, 0.2, 0.0], ckpt.RetentionPolicy(2), [2, 4, 5]),
        ([0.5] * 10, ckpt.RetentionPolicy(2, every=4), [4, 8, 9, 10]),
        *((SCORES, ckpt.RetentionPolicy(1, best=best), left) for best, left in ((0, [8]), (1, [3, 8]), (3, [3, 5, 6, 8]))),
    ],
)
def test_pruning_keeps_the_newest_the_best_and_each_of_so_many(
    tmp_path: Path, scores: list[float | None], keep: ckpt.RetentionPolicy, left: list[int]
):
    for step, score in enumerate(scores, 1):
        _save(tmp_path, ALONE, step, score)
    assert ckpt.prune(tmp_path, keep) == []
    checkpoints = ckpt.list_checkpoints(tmp_path)
    assert [ckpt.step_of(path) for path in checkpoints] == left
    assert ckpt.step_of(ckpt.best_checkpoint(checkpoints)) == max(left, key=lambda step: (scores[step - 1] or 0, step))


def test_pruning_never_deletes_the_only_whole_checkpoint(tmp_path: Path):
    """A newer one whose file is gone neither counts as one that is kept nor is deleted."""
    for step in (1, 2, 3):
        _save(tmp_path, ALONE, step, None)
    for step in (2, 3):
        (ckpt.checkpoint_path(tmp_path, step) / "trainer.pt").unlink()
    warnings = ckpt.prune(tmp_path, ckpt.RetentionPolicy(1))
    assert [ckpt.step_of(path) for path in ckpt.list_checkpoints(tmp_path)] == [1, 2, 3]
    assert len(warnings) == 2 and "trainer.pt is missing" in warnings[0]


@pytest.mark.parametrize("name", ["backbone.safetensors", "softmax_00000_of_00001.safetensors", "trainer.pt"])
@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, damage: str):
    path = _save(tmp_path, ALONE)
    file = path / name
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(data[:-1])
    else:
        data[-1] ^= 1
        file.write_bytes(data)
    if damage == "flipped":  # hashes are compared on request
        assert reading.check_hashes(path) == [f"checkpoint {path}: {name} is damaged: its hash differs from the manifest's"]
        shares = [reading.check_hashes(path, share, 2) for share in (0, 1)]
        assert sorted(map(len, shares)) == [0, 1]
        return
    with pytest.raises(ValueError, match=f"{name} is (missing|{len(data) - 1} bytes, {len(data)} were written)"):
        reading.read_backbone(path), reading.read_trainer(path), reading.shard_reader(path)(0, NUM_SLOTS)


@pytest.mark.parametrize(
    "tampering",
    [
        lambda manifest: [manifest],
        lambda manifest: {**manifest, "files": list(manifest["files"])},
        lambda manifest: {**manifest, "files": {"../" + name: entry for name, entry in manifest["files"].items()}},
        lambda manifest: {**manifest, "files": {"/etc/passwd": {"size": Path("/etc/passwd").stat().st_size}}},
        lambda manifest: {**manifest, "files": {ckpt.TRAINER: {"size": float("inf")}}},
        lambda manifest: {**manifest, "files": {"x": {"size": 1, "slots": [-3, 8]}}},
        lambda manifest: {**manifest, "files": {"x": {"size": 1, "slots": 8}}},
        lambda manifest: {key: value for key, value in manifest.items() if key != "step"},
        lambda manifest: {**manifest, "score": "high"},
        lambda manifest: {**manifest, "run_signature": 3},
        lambda manifest: {**manifest, "run_signature": {"tasks": {"asia": {"num_classes": "x"}}}},
    ],
)
def test_a_manifest_that_lies_is_one_line(tmp_path: Path, tampering: Callable[[Any], Any]):
    path = _save(tmp_path, ALONE)
    text = (path / "manifest.json").read_text()
    for name in ckpt.read_manifest(path)["files"]:
        (path.parent / name).write_bytes((path / name).read_bytes())
    (path / "manifest.json").write_text(json.dumps(tampering(json.loads(text))))
    with pytest.raises(ValueError, match=r"manifest.json cannot be read") as caught:
        ckpt.read_manifest(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_the_disk_cannot_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _save(tmp_path, ALONE)
    monkeypatch.setattr(reading, "file_hash", mock.Mock(side_effect=OSError(5, "Input/output error")))
    found = reading.check_hashes(path)
    assert len(found) == 3 and all("it cannot be read (Input/output error)" in line for line in found)


def test_a_trainer_file_with_flipped_bytes_is_one_line(tmp_path: Path):
    """The unpickler raises nearly anything; none of it may be a traceback."""
    path = _save(tmp_path, ALONE)
    whole, refused = (path / "trainer.pt").read_bytes(), 0
    for place in range(0, len(whole), 2):
        (path / "trainer.pt").write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
        try:
            reading.read_trainer(path)
        except ValueError as error:
            refused += 1
            assert "trainer.pt cannot be read" in str(error) and "\n" not in str(error)
    assert refused > 100


def test_a_folder_without_its_manifest_is_no_checkpoint(tmp_path: Path):
    first, second = _save(tmp_path, ALONE, 1), _save(tmp_path, ALONE, 2)
    (second / "manifest.json").unlink()
    assert ckpt.list_checkpoints(tmp_path) == [first]
    (first / "manifest.json").write_text(json.dumps({"format": 99, "step": 1, "files": {}}))
    with pytest.raises(ValueError, match="format 99"):
        ckpt.read_manifest(first)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        ckpt.find_checkpoint(tmp_path / "nowhere")


def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path):
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(ValueError, match="cannot be read"):
        read_tensors(tmp_path / "text.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ValueError, match="Is a directory"):
        read_tensors(tmp_path / "folder.safetensors")


def test_checkpoints_with_the_hash_of_earlier_versions_verify(tmp_path: Path):
    path = _save(tmp_path, ALONE)
    manifest = json.loads((path / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        del entry["xxh3_128"]
        entry["sha256"] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert reading.check_hashes(path) == []
    manifest["files"]["trainer.pt"]["sha256"] = "0"
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert len(reading.check_hashes(path)) == 1
    del manifest["files"]["trainer.pt"]["sha256"]  # none at all is no proof
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert len(reading.check_hashes(path)) == 1
