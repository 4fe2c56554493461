"""The tool for checkpoints, on one that several gloo ranks wrote and on damaged copies of it."""

import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from faulty_disk import Disk, faulty
from safetensors.torch import load_file
from saving import no_space, save_now
from tiny_runs import FEW_IMAGES, error_of, write_dataset

from backbones import build_backbone
from eval import __main__ as evaluation
from partial_fc.centres.shard import classes_of_slots, shard_range
from scripts import checkpoint
from scripts.benchmark import checkpoint as benchmark_checkpoint
from scripts.deploy import export
from utils.checkpoint.reading import read_backbone, shard_reader
from utils.checkpoint.tensor_file import write_tensors
from utils.distributed import World

CLASSES, DIM, SEED = 11, 4, 5
BACKBONE = {"name": "r18", "embedding_size": 16, "width": 0.125, "se": True}


def _network() -> torch.nn.Module:
    return build_backbone("r18", 16, 0.125, image_size=48, se=True)


def _centres() -> torch.Tensor:
    """Return rows in slot order, of length k + 1 for slot k."""
    rows = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
    return rows / rows.norm(dim=1, keepdim=True) * torch.arange(1, CLASSES + 1)[:, None]


def _save(rank: int, world_size: int, folder: str, step: int, shift: float, init: str = "") -> None:
    torch.manual_seed(0)
    weights = {k: v + shift if v.is_floating_point() else v + step for k, v in _network().state_dict().items()}
    start, stop = shard_range(CLASSES, rank, world_size)
    facts = {"run_signature": {"backbone": ["r18", 16, 0.125], "num_classes": CLASSES, "seed": SEED}, "score": 0.5}
    facts["config"] = {"backbone": BACKBONE, "data": {"image_size": 48}, "init": {"backbone": init}}
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    softmax = {"centres": _centres()[start:stop], "momentum": torch.zeros(stop - start, DIM)}
    save_now(Path(folder), step, weights, softmax, (start, stop), {"optimizer": {}}, facts, world)


@pytest.fixture
def run_folder(tmp_path: Path, run_ranks: Callable[..., None]) -> Path:
    run_ranks(_save, 3, str(tmp_path / "run"), 7, 0.0)
    return tmp_path / "run"


@pytest.mark.numeric
def test_merged_centres_are_unit_rows_in_the_order_of_the_labels(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    classes = classes_of_slots(np.arange(CLASSES), CLASSES, SEED)
    expected = torch.empty(CLASSES, DIM)
    for slot, label in enumerate(classes.tolist()):
        expected[label] = _centres()[slot] / (slot + 1)
    assert checkpoint.main(["merge", str(run_folder), str(tmp_path / "all.safetensors")]) == 0
    torch.testing.assert_close(load_file(tmp_path / "all.safetensors")["weight"], expected)
    usual, blocks, alive = torch.nn.functional.normalize, [], []

    def normalize(values: torch.Tensor, **how: float) -> torch.Tensor:
        alive.append(sum(block() is not None for block in blocks))
        blocks.append(weakref.ref(made := usual(values, **how)))
        return made

    monkeypatch.setattr(torch.nn.functional, "normalize", normalize)
    monkeypatch.setattr(checkpoint, "_ROWS_AT_ONCE", 2)
    assert checkpoint.main(["merge", str(run_folder), str(tmp_path / "all.pt")]) == 0
    assert len(alive) == 6 and max(alive) < 2  # beside the matrix, not all of it again
    torch.testing.assert_close(torch.load(tmp_path / "all.pt", weights_only=True), expected)
    assert checkpoint.main(["merge", str(run_folder), str(tmp_path / "all.pt")]) == 1  # never over what is there
    assert checkpoint.main(["merge", str(run_folder), str(tmp_path / "all.npy")]) == 1


def test_resharding_there_and_back_gives_the_same_bytes(run_folder: Path, tmp_path: Path):
    original = run_folder / "checkpoints" / "step_00000007"
    last = original
    for number, ranks in enumerate((1, 2, 3, 4, 2, 1, 3)):
        out = tmp_path / f"{number}_{ranks}"
        assert checkpoint.main(["reshard", str(last), str(ranks), str(out)]) == 0
        assert checkpoint.main(["verify", str(out)]) == 0
        last = out / "checkpoints" / "step_00000007"
        assert len(list(last.glob("softmax_*"))) == ranks
        rows = shard_reader(last)(0, CLASSES)
        assert torch.equal(rows["centres"], _centres()) and not rows["momentum"].any()
    before, after = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (original, last))
    manifests = [json.loads(files.pop("manifest.json")) for files in (before, after)]
    assert before == after and manifests[0] == manifests[1]
    assert checkpoint.main(["reshard", str(last), "12", str(tmp_path / "more")]) == 1  # 11 classes
    assert checkpoint.main(["reshard", str(last), "2", str(tmp_path / "1_2")]) == 1  # never over what is there


@pytest.mark.numeric
def test_the_mean_of_backbones_loads_and_lies_between_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for step, shift in ((3, 0.0), (4, 0.5), (8, 1.0)):
        _save(0, 1, str(tmp_path / "run"), step, shift)
    paths = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoint.main(["average", *map(str, paths), "--out", str(tmp_path / "mean.safetensors")]) == 0
    found, first = load_file(tmp_path / "mean.safetensors"), read_backbone(paths[0])
    for name, value in first.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value + 0.5, rtol=2**-22, atol=2**-22)  # four roundings
        else:
            assert torch.equal(found[name], read_backbone(paths[2])[name])
    _network().load_state_dict(found)
    with faulty(Disk(before=lambda name: no_space() if name == "write" else None)):
        said = error_of(checkpoint.main(["average", *map(str, paths), "--out", str(tmp_path / "full.pt")]), capsys)
    assert "full.pt.unfinished: No space left on device" in said
    assert not list(tmp_path.glob("full*"))


def test_a_mean_says_its_network_and_unrelated_trainings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_dataset(tmp_path, FEW_IMAGES)
    a, b, tuned, mean = (tmp_path / name for name in ("a", "b", "tuned", "mean.safetensors"))
    for run, step, init in ((a, 1, ""), (a, 2, ""), (b, 1, ""), (tuned, 1, str(a))):
        _save(0, 1, str(run), step, 0.0, init)
    for paths, warned in (((a, b), f"warning: {a / 'checkpoints' / 'step_00000002'} and {b}"), ((a, tuned), ""), ((a, a), "")):
        both = [str(paths[0]), str(paths[1] / "checkpoints" / "step_00000001"), "--out", str(mean), "--overwrite"]
        assert checkpoint.main(["average", *both]) == 0
        said = capsys.readouterr().err
        assert said.startswith(warned) and bool(said) == bool(warned)
    score = [str(mean), "--targets", str(tmp_path / "tiny.bin"), "--device", "cpu"]  # neither --backbone nor its size
    assert evaluation.main(score) == 0 and export.main([str(mean), "--to", "pt2", "--out", str(tmp_path / "mean.pt2")]) == 0
    wrong = [({"name": "r200", "width": 64}, 48), ({"name": "nobody"}, 48), ({"width": 1e300}, 48), ({}, 10**9), ({}, "48")]
    capsys.readouterr()  # with bars
    texts = [json.dumps({"backbone": BACKBONE | other, "image_size": size}) for other, size in wrong]
    for text in ("[" * 70_000, "3", '{"image_size": 48}', *texts):
        mean.unlink()
        write_tensors(mean, _network().state_dict(), {"network": text})
        said = error_of(evaluation.main(score), capsys)
        assert said.startswith(f"error: {mean}: ") and len(said) < 500, said


def test_show_names_what_is_there(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert checkpoint.main(["show", str(run_folder)]) == 0
    said = capsys.readouterr().out
    assert "step 7, score 0.5000" in said and "num_classes   11" in said and "backbone      r18, 16-d, width 0.125\n" in said
    assert "slots 0 to 3; centres F32 (4, 4); momentum F32 (4, 4)" in said and "slots 8 to 10" in said


def test_whole_checkpoints_verify_and_all_damage_is_named(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert checkpoint.main(["verify", str(run_folder)]) == 0
    out, progress = capsys.readouterr()
    assert out.startswith("ok") and re.search(r"100%\|.*\| [\d.]+k/[\d.]+k \[.*B/s\]", progress)

    def broken(damage: Callable[[Path], object]) -> str:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(run_folder / "checkpoints" / "step_00000007", tmp_path / "bad")
        damage(tmp_path / "bad")
        assert checkpoint.main(["verify", str(tmp_path / "bad")]) == 1
        return capsys.readouterr().out

    def flip(folder: Path) -> None:
        data = bytearray((folder / "backbone.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "backbone.safetensors").write_bytes(data)

    def drop_a_shard(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"].pop("softmax_00001_of_00003.safetensors")
        (folder / "manifest.json").write_text(json.dumps(manifest))

    assert "backbone.safetensors is damaged: its hash differs" in broken(flip)
    assert "softmax_00002_of_00003.safetensors is missing" in broken(
        lambda f: (f / "softmax_00002_of_00003.safetensors").unlink()
    )
    assert "class slots 4 to 7 are in no file" in broken(drop_a_shard)
    assert "cannot be read" in broken(lambda folder: (folder / "manifest.json").write_text("{"))


def test_a_path_that_is_easily_mistaken_is_one_line(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    step = run_folder / "checkpoints" / "step_00000007"
    (tmp_path / "folder.pt").mkdir()
    for arguments, message in [
        (["average", run_folder, "--out", tmp_path / "mean.pt"], "alone has no mean; name each checkpoint"),
        (["average", step, run_folder, "--out", tmp_path / "mean.pt"], "alone has no mean; name each checkpoint"),
        (["merge", run_folder, tmp_path / "folder.pt", "--overwrite"], "folder.pt is a folder; choose another name"),
        (["reshard", run_folder, 2, step], "step_00000007 is a checkpoint itself; choose a run folder"),
    ]:
        assert message in error_of(checkpoint.main([str(word) for word in arguments]), capsys)
    assert not (step / "checkpoints").exists()
    shutil.copytree(run_folder / "checkpoints", tmp_path / "copy")
    (tmp_path / "copy").rename(step / "checkpoints")  # what lies in a checkpoint does not hide it
    (step / "backbone.safetensors").write_bytes(b"")
    assert checkpoint.main(["verify", str(step)]) == 1


def test_the_benchmark_of_checkpoints_reports_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []
    small = ["--classes", "3000", "--backbone", "mbf", "--rounds", "1", "--folder", str(tmp_path)]
    small += ["--json", str(tmp_path / "out")]
    assert benchmark_checkpoint.main(small) == 0
    found = json.loads((tmp_path / "out").read_text())
    state = benchmark_checkpoint.training_state("mbf", 3000)
    trained = sum(moments["momentum_buffer"].nbytes for moments in state["trainer.pt"]["optimizer"]["state"].values())
    saved = (state["backbone.safetensors"], state["softmax"].rows)
    assert found["save"]["bytes"] == sum(tensor.nbytes for part in saved for tensor in part.values()) + trained
    assert 0 < found["save"]["wait"] < found["save"]["complete"]
    assert "times as long" in capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == ["out"]
    monkeypatch.setattr(benchmark_checkpoint, "measure_save", lambda options, folder: sizes.append(options.classes))
    for free, arguments in ((9, []), (7, []), (7, ["--classes", "5"])):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free << 30))
        assert benchmark_checkpoint.main(arguments) == 0
    assert sizes == [200_000, 100_000, 5]  # half of it on a small disk
