"""Several centres for each class in memory, in checkpoints, in other runs, and through a whole training."""

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_reference import all_centres
from head_losses import SEED, C, D, load_saved, saved, train_steps
from safetensors.torch import load_file
from tiny_runs import NUM_CLASSES, equal_weights, error_of, tiny_run, write_dataset

import train
from configs import load_config
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.centres.store import FORMATS
from partial_fc.init import open_centres
from scripts import checkpoint as tool
from scripts.arcface_torch import export_checkpoint as export
from utils.checkpoint.format import list_checkpoints

pytestmark = pytest.mark.numeric

K = 3
OPTIMIZERS = {"sgd": RowSGD(), "adamw": RowAdamW()}
SHORT = ["head.sub_centers=3", "head.sample_rate=0.5", "eval.targets=[]", "checkpoint.keep_last=99"]


def _head(rank: int = 0, world_size: int = 1, sub_centers: int = K, optimizer: str = "sgd", **more: object) -> PartialFC:
    config = HeadConfig(0.6, OPTIMIZERS[optimizer], chunk=10, sub_centers=sub_centers, **more)  # type: ignore[arg-type]
    return PartialFC(build_margin("curricularface"), C, D, rank, world_size, SEED, config)


_train = functools.partial(train_steps, centres=all_centres(C, D, SEED, K), lr=0.05)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("storage", FORMATS)
def test_a_head_that_is_loaded_goes_on_to_the_same_bits(storage: str, optimizer: str):
    more = {"storage": storage, "optimizer": optimizer, "inactive_rows": "decay"}
    whole, again = _head(**more), _head(**more)  # type: ignore[arg-type]
    _train(whole, range(4))
    middle = saved(whole)
    assert all(tensor.shape[:2] == (C, K) for tensor in middle[0].values())
    expected = [*_train(whole, range(4, 8)), *whole.shard_state().values()]
    load_saved(again, middle)
    found = [*_train(again, range(4, 8)), *again.shard_state().values()]
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def _reshard(rank: int, world_size: int) -> None:
    """One rank trains, all go on, then one reads what they left."""
    alone = _head()
    _train(alone, range(3))
    first = saved(alone)
    several = load_saved(_head(rank, world_size), first)
    assert all(torch.equal(tensor, first[0][name]) for name, tensor in saved(several)[0].items())
    _train(several, range(3, 5))
    later = saved(several)
    again = load_saved(_head(), later)
    assert all(torch.equal(tensor, later[0][name]) for name, tensor in again.shard_state().items())
    assert not torch.equal(later[0]["centres"], first[0]["centres"])


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_reads_them(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_reshard, world_size)


@pytest.mark.parametrize(("was", "now"), [(1, 3), (3, 1), (2, 3)])
def test_a_checkpoint_of_another_number_is_refused(was: int, now: int):
    said = f"has {was} centres for each class, .* head.sub_centers={now}. Set head.sub_centers={was}"
    with pytest.raises(ValueError, match=said):
        load_saved(_head(sub_centers=now), saved(_head(sub_centers=was)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `data`, and a run `tiny` on it whose classes have three centres each."""
    folder = tmp_path_factory.mktemp("source")
    write_dataset(folder / "data")
    assert train.main(tiny_run(folder / "data", folder, *SHORT)) == 0
    return folder


def test_a_training_says_what_it_is_and_a_resumed_one_ends_in_the_same_bits(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    newest = list_checkpoints(source / "tiny")[-1]
    shutil.copytree(source / "tiny", tmp_path / "tiny")
    for path in list_checkpoints(tmp_path / "tiny")[1:]:
        shutil.rmtree(path)
    assert train.main(tiny_run(source / "data", tmp_path, *SHORT)) == 0
    assert list_checkpoints(tmp_path / "tiny")[-1].name == newest.name
    assert equal_weights(source / "tiny", tmp_path / "tiny")["centres"].shape == (NUM_CLASSES, K, 16)
    log = (source / "tiny" / "train.log").read_text()
    assert f"{NUM_CLASSES} classes of {K} sub-centers" in log and "first loss" in log and "check labels" not in log
    capsys.readouterr()
    (tmp_path / "one").mkdir()
    shutil.copytree(source / "tiny", tmp_path / "one" / "tiny")
    one = tiny_run(source / "data", tmp_path / "one", *SHORT, "head.sub_centers=1", "train.epochs=3")
    said = error_of(train.main(one), capsys)
    assert re.search(r"error: .*has 3 centres for each class, this run has head.sub_centers=1. Set head.sub_centers=3", said)


def test_tools_read_them(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = source / "tiny"
    assert tool.main(["verify", str(run)]) == 0
    assert tool.main(["show", str(run)]) == 0
    assert f"centres F32 ({NUM_CLASSES}, {K}, 16)" in capsys.readouterr().out
    assert tool.main(["reshard", str(run), "5", str(tmp_path / "five")]) == 0
    assert tool.main(["merge", str(tmp_path / "five"), str(tmp_path / "all.safetensors")]) == 0
    assert f"; {K} sub-centers in each" in capsys.readouterr().out
    merged, labels = load_file(tmp_path / "all.safetensors")["weight"], np.array([7, 0, 7])
    found = open_centres(run)
    assert (found.num_classes, found.sub_centers, found.embedding_size) == (NUM_CLASSES, K, 16)
    torch.testing.assert_close(F.normalize(found.read(np.arange(NUM_CLASSES)), dim=-1), merged)
    again = open_centres(tmp_path / "all.safetensors")
    assert again.sub_centers == K and torch.equal(again.read(labels), merged[torch.from_numpy(labels)])
    assert export.main([str(run), str(tmp_path / "theirs"), "--ranks", "1"]) == 1
    assert "has 3 centres for each class (head.sub_centers), and the head of arcface_torch only one" in capsys.readouterr().err
    assert not (tmp_path / "theirs").exists()


def test_another_run_begins_with_them(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = source / "tiny"
    # labels 9 to 11 are new people here, the others those of the run
    (tmp_path / "map.txt").write_text("".join(f"{label} {label}\n" for label in range(9)))
    init = [f"init.backbone={run}", f"init.head={run}", f"init.classes={tmp_path / 'map.txt'}", "init.images_per_class=3"]
    once = ["optimizer.lr=0", "train.max_steps=1", "checkpoint.every=1"]
    assert train.main(tiny_run(source / "data", tmp_path, *SHORT, *init, *once)) == 0
    assert "9 kept, 3 from images, 0 at random" in capsys.readouterr().out
    old, new = (open_centres(path).read(np.arange(NUM_CLASSES)) for path in (run, tmp_path / "tiny"))
    assert torch.equal(new[:9], old[:9])
    size = old[:9].norm(dim=2).mean()
    torch.testing.assert_close(new[9:].norm(dim=2), size.expand(3, K))
    random = all_centres(NUM_CLASSES, 16, train.load_config(tiny_run(source / "data", tmp_path)[0]).run.seed, K)
    torch.testing.assert_close(F.normalize(new[9:, 1:], dim=2), F.normalize(random[9:, 1:], dim=2))
    one = [setting for setting in SHORT if "sub_centers" not in setting]
    alone = [init[0], init[3], "run.name=alone"]  # one centre for each class, all from images
    assert train.main(tiny_run(source / "data", tmp_path, *one, *alone, *once)) == 0
    means = open_centres(tmp_path / "alone").read(np.arange(NUM_CLASSES))
    torch.testing.assert_close(F.normalize(new[9:, 0], dim=1), F.normalize(means[9:], dim=1))
    capsys.readouterr()
    said = error_of(train.main(tiny_run(source / "data", tmp_path, *one, *init, *once, "run.name=one")), capsys)
    words = "init.head: .* has 3 centres for each class, this run has head.sub_centers=1; set head.sub_centers=3"
    assert re.search(words, said)


def test_a_configuration_that_makes_no_sense_is_refused():
    base = ["run.name=a", "data.source=synthetic", "data.num_classes=9", "data.num_images=9"]
    with pytest.raises(ValueError, match=r"head.sub_centers must be from 1 to 64, got 0"):
        load_config("configs/base.yaml", [*base, "head.sub_centers=0"])
    with pytest.raises(ValueError, match=r"head.sampling must be uniform .* got neighbours with head.sub_centers=3"):
        load_config("configs/base.yaml", [*base, "head.sub_centers=3", "head.sampling=neighbours", "head.sample_rate=0.5"])
