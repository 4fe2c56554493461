"""Beginning with the weights of another training: its network, its class centres, new people, frozen and slow parts."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import FP32_UNIT, network_bound
from safetensors.torch import load_file, save_file
from tiny_runs import IRESNET, NUM_CLASSES, NUM_IMAGES, ended_well, error_of, face, read_metrics, run_train, write_old_and_new
from tiny_runs import tiny_run as run_of

import train
from backbones import build_backbone
from data import build_dataset
from data.recordio.image_record import RecordWriter, pack
from partial_fc.init import open_centres, read_class_map
from scripts import checkpoint as tool
from scripts.arcface_torch import export_checkpoint as export
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import read_backbone, read_trainer
from utils.checkpoint.trainer import load_optimizer
from utils.optim import ParameterRule, build_optimizer, freeze

SHORT = ["eval.targets=[]", "schedule.power=0", "checkpoint.every=1", "checkpoint.keep_last=99"]


def tiny_run(dataset: Path, output: Path, *overrides: str) -> list[str]:
    return run_of(dataset, output, IRESNET, *overrides, image_size=64)  # its parts are named here


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `data`, a run `tiny` on it by two processes, and `more`: its people and three new ones."""
    folder = tmp_path_factory.mktemp("source")
    write_old_and_new(folder)
    ended_well(run_train(2, tiny_run(folder / "data", folder, "eval.targets=[]")))
    return folder


def _centres(run: Path) -> torch.Tensor:
    found = open_centres(run)
    return found.read(np.arange(found.num_classes))


@pytest.mark.numeric
def test_centres_are_read_by_label_from_every_form(source: Path, tmp_path: Path):
    run = source / "tiny"
    assert tool.main(["merge", str(run), str(tmp_path / "all.safetensors")]) == 0
    assert tool.main(["merge", str(run), str(tmp_path / "all.pt")]) == 0
    merged = load_file(tmp_path / "all.safetensors")["weight"]
    torch.testing.assert_close(torch.nn.functional.normalize(_centres(run)), merged)
    for name in ("all.safetensors", "all.pt"):
        found = open_centres(tmp_path / name)
        assert (found.num_classes, found.embedding_size) == (NUM_CLASSES, 16)
        assert torch.equal(found.read(np.array([7, 0, 7])), merged[[7, 0, 7]])
    assert tool.main(["reshard", str(run), "5", str(tmp_path / "five")]) == 0
    assert torch.equal(_centres(tmp_path / "five"), _centres(run))


def test_a_run_begins_where_the_other_ended(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = source / "tiny"
    init = [f"init.backbone={run}", f"init.head={run}", "optimizer.lr=0", "train.max_steps=1"]
    assert train.main(tiny_run(source / "data", tmp_path, *SHORT, *init)) == 0
    said = capsys.readouterr().out
    assert f"starting from {run}; class centres: 12 kept, 0 from images, 0 at random" in said
    assert "first loss" not in said  # what an untrained network would show is no measure here
    first = list_checkpoints(tmp_path / "tiny")[0]
    before, after = read_backbone(list_checkpoints(run)[-1]), read_backbone(first)
    assert all(torch.equal(before[name], after[name]) for name in before if "running" not in name and "num_batches" not in name)
    assert torch.equal(_centres(tmp_path / "tiny"), _centres(run))
    assert read_metrics(tmp_path / "tiny")[1]["loss"] < 0.5 * read_metrics(run)[1]["loss"]


def _mean_by_hand(run: Path, arguments: list[str], label: int, of_label: slice) -> torch.Tensor:
    """Return the direction of the mean of some images of a label by the network at the end of a run."""
    backbone = build_backbone("r18", 16, 0.125, image_size=64)
    backbone.load_state_dict(read_backbone(list_checkpoints(run)[-1]))
    dataset = build_dataset(train.load_config(arguments[0]).data, 0, None)
    rows = np.flatnonzero(dataset.labels() == label)[of_label]
    pixels = torch.stack([torch.from_numpy(dataset.pixels_and_label(int(row), 64)[0]) for row in rows])
    with torch.inference_mode():
        embeddings = backbone.eval()((pixels.permute(0, 3, 1, 2).float() - 127.5) / 127.5)
    return torch.nn.functional.normalize(torch.nn.functional.normalize(embeddings).mean(0), dim=0)


@pytest.mark.numeric
@pytest.mark.parametrize("num_processes", [1, 2])
def test_new_people_get_the_mean_of_their_images_and_known_ones_keep_centres(source: Path, tmp_path: Path, num_processes: int):
    run = source / "tiny"
    init = [f"init.backbone={run}", f"init.head={run}", f"init.classes={source / 'map.txt'}", "init.images_per_class=3"]
    init += ["optimizer.lr=0", "train.max_steps=1"]
    ended_well(run_train(num_processes, tiny_run(source / "more", tmp_path, *SHORT, *init)))
    old, new = _centres(run), _centres(tmp_path / "tiny")
    assert new.shape == (15, 16)
    for label in range(NUM_CLASSES):
        assert torch.equal(new[14 - label], old[label])
    for label in (0, 1, 2):
        by_hand = _mean_by_hand(run, tiny_run(source / "more", tmp_path), label, slice(3))
        expected = by_hand * old.norm(dim=1).mean()
        torch.testing.assert_close(new[label], expected, rtol=0, atol=network_bound() * expected.norm().item())


def test_without_known_people_all_centres_come_from_images_or_at_random(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    init = [f"init.backbone={source / 'tiny'}", "train.max_steps=2"]
    for name in ("images", "random"):
        arguments = tiny_run(source / "more", tmp_path, *SHORT, *init, f"init.new_classes={name}", f"run.name={name}")
        assert train.main(arguments) == 0
        count = {"images": "15 from images, 0 at random", "random": "0 from images, 15 at random"}[name]
        assert f"0 kept, {count}" in capsys.readouterr().out
    cosines = [read_metrics(tmp_path / name)[1]["positive_cosine"] for name in ("images", "random")]
    assert cosines[0] > 0.5 > 0.3 > cosines[1]


@pytest.mark.numeric
def test_a_replaced_bad_image_enters_no_mean(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of the new people, label 0 has three bad images among its five, label 1 has none that is good."""
    left = {0: 3, 1: 99}
    (tmp_path / "bad").mkdir()
    with RecordWriter(tmp_path / "bad" / "train.rec", tmp_path / "bad" / "train.idx") as writer:
        for key in range(NUM_IMAGES + 15):
            label = 14 - key % 15
            left[label] = left.get(label, 0) - 1
            image = b"no image" if left[label] >= 0 else face(14 - label if label > 2 else 100 + label, key)
            writer.write(key, pack(float(label), key, 0, image))
    run = source / "tiny"
    init = [f"init.backbone={run}", f"init.head={run}", f"init.classes={source / 'map.txt'}", "init.images_per_class=5"]
    skip = ["data.on_bad_record=skip", "data.max_bad_fraction=0.3", "optimizer.lr=0", "train.max_steps=1"]
    assert train.main(tiny_run(tmp_path / "bad", tmp_path, *SHORT, *init, *skip)) == 0
    assert "12 kept, 2 from images, 1 at random" in capsys.readouterr().out
    expected = _mean_by_hand(run, tiny_run(tmp_path / "bad", tmp_path), 0, slice(3, None))  # of the good ones
    found = torch.nn.functional.normalize(_centres(tmp_path / "tiny")[0], dim=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=network_bound())


SLOW = "optimizer.rules=[{match: layer3.1, lr_factor: 0.5}, {match: layer3, lr_factor: 0.1}, {match: fc, lr_factor: 0}]"


@pytest.mark.numeric
def test_frozen_parts_stay_and_slow_parts_move_less(source: Path, tmp_path: Path):
    before = read_backbone(list_checkpoints(source / "tiny")[-1])
    init = [f"init.backbone={source / 'tiny'}", "train.max_steps=1", "optimizer.weight_decay=0", "optimizer.clip_norm=0"]
    frozen = ["backbone.freeze=[conv1, bn1, prelu, layer1, layer2.0]"]
    ends = {}
    for name, more in {"plain": [], "slow": [SLOW]}.items():
        assert train.main(tiny_run(source / "data", tmp_path, *SHORT, *init, *frozen, *more, f"run.name={name}")) == 0
        ends[name] = read_backbone(list_checkpoints(tmp_path / name)[-1])
    plain, slow = ends["plain"], ends["slow"]
    for name, value in before.items():
        if name.startswith(("conv1.", "bn1.", "prelu.", "layer1.", "layer2.0.")):
            assert torch.equal(plain[name], value) and torch.equal(slow[name], value), name
        elif name.startswith("fc."):
            assert not torch.equal(plain[name], value) and torch.equal(slow[name], value), name
        elif name.endswith("weight") and name != "features.weight":
            factor = 0.5 if name.startswith("layer3.1.") else 0.1 if name.startswith("layer3.") else 1.0
            assert not torch.equal(plain[name], value), name
            rounding = 4 * FP32_UNIT * max(value.abs().max().item(), plain[name].abs().max().item())  # both ends were rounded
            torch.testing.assert_close(slow[name] - value, factor * (plain[name] - value), rtol=4 * FP32_UNIT, atol=rounding)


def test_a_fine_tuning_resumes_to_the_same_bits_and_with_other_factors(source: Path, tmp_path: Path):
    init = [f"init.backbone={source / 'tiny'}", f"init.head={source / 'tiny'}", "backbone.freeze=[layer1]"]
    factors = "optimizer.rules=[{match: layer2, lr_factor: 0.1}]"
    for steps in (3, 6):
        assert train.main(tiny_run(source / "data", tmp_path, *SHORT, *init, factors, f"train.max_steps={steps}")) == 0
    assert train.main(tiny_run(source / "data", tmp_path, *SHORT, *init, factors, "train.max_steps=6", "run.name=whole")) == 0
    ends = [read_backbone(list_checkpoints(tmp_path / name)[-1]) for name in ("tiny", "whole")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    # one group of parameters now
    assert train.main(tiny_run(source / "data", tmp_path, *SHORT, *init, "train.max_steps=7")) == 0


def test_rules_are_logged_and_a_run_goes_on_under_others(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The last rules have no effect, but number the parameters in another order, in which a norm would be rounded otherwise."""
    rules = "optimizer.rules=[{match: biases}, {match: layer2, weight_decay: 0.0005}]"
    run = tiny_run(source / "data", tmp_path, *SHORT, "train.max_steps=6", "checkpoint.every=3", "optimizer.clip_norm=0")
    for name in ("whole", "tiny"):
        assert train.main([*run, f"run.name={name}"]) == 0
    shutil.rmtree(list_checkpoints(tmp_path / "tiny")[-1])
    capsys.readouterr()
    assert train.main([*run, rules]) == 0
    said = capsys.readouterr().out
    table = [line.split() for line in said.splitlines() if line.startswith("optimizer, ")]
    assert [line[1] for line in table] == ["biases:", "layer2:", "all"] and "optimizer.rules was []" in said
    trainable = [p for p in build_backbone("r18", 16, 0.125, image_size=64).parameters() if p.requires_grad]
    counts = [int(re.search(r"(\d+) parameters", " ".join(line))[1]) for line in table]
    numbers = [int(re.search(r"([\d,]+) numbers", " ".join(line))[1].replace(",", "")) for line in table]
    assert sum(counts) == len(trainable) and sum(numbers) == sum(parameter.numel() for parameter in trainable)
    ends = [read_backbone(list_checkpoints(tmp_path / name)[-1]) for name in ("whole", "tiny")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_other_frozen_parts_are_no_way_to_resume(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Blocks 1 and 2 of layer3 of an r50 are alike: one's moments would fit the other."""
    run = tiny_run(source / "data", tmp_path, *SHORT, "backbone.name=r50", "backbone.width=0.0625")
    assert train.main([*run, "train.max_steps=1", "backbone.freeze=[layer3.1]"]) == 0
    error = error_of(train.main([*run, "train.max_steps=2", "backbone.freeze=[layer3.2]"]), capsys)
    assert "layer3.1.bn1.bias did not train then and does here; set backbone.freeze to what it was" in error
    assert train.main([*run, "train.max_steps=2", "backbone.freeze=[layer3.1.conv1, layer3.1]"]) == 0


def test_a_fine_tuned_run_goes_to_arcface_torch_with_moments(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rules = [ParameterRule("norms", weight_decay=0.0), ParameterRule("layer2", 0.5), ParameterRule("fc", 0.0)]
    entries = "[{match: norms, weight_decay: 0}, {match: layer2, lr_factor: 0.5}, {match: fc, lr_factor: 0}]"
    parts = ["backbone.freeze=[layer1, layer3.0.bn1]", f"optimizer.rules={entries}"]
    assert train.main(run_of(source / "data", tmp_path, IRESNET, *SHORT, *parts, "train.max_steps=2")) == 0
    assert export.main([str(tmp_path / "tiny"), str(tmp_path / "theirs"), "--ranks", "1"]) == 0
    assert "backbone.freeze and optimizer.rules have no counterpart" in capsys.readouterr().out
    newest = list_checkpoints(tmp_path / "tiny")[-1]
    backbone = build_backbone("r18", 16, 0.125)
    freeze(backbone, ["layer1", "layer3.0.bn1"])
    ours = build_optimizer(backbone, "sgd", 0.05, 0.9, 5e-4, rules=rules)
    trainer = read_trainer(newest)
    load_optimizer(ours, trainer["optimizer"], backbone, trainer["trained"])
    theirs = torch.load(tmp_path / "theirs" / "checkpoint_gpu_0.pt", weights_only=True)["state_optimizer"]
    for number, (name, parameter) in enumerate(backbone.named_parameters()):
        assert (number in theirs["state"]) == parameter.requires_grad, name
        if parameter.requires_grad:
            assert torch.equal(theirs["state"][number]["momentum_buffer"], ours.state[parameter]["momentum_buffer"]), name
    assert [group["lr"] for group in theirs["param_groups"]] == [0.05, 0.05]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["init.backbone=/nowhere"], "no run folder, checkpoint or weights file at /nowhere"),
        (["init.head=RUN"], "init.head needs init.backbone"),
        (["init.classes=RUN"], "init.classes needs init.head"),
        (["init.backbone=RUN", "backbone.width=0.25"], "conv1.weight is (16, 16, 3, 3), in this backbone it is (32,"),
        (["init.backbone=RUN", "init.head=/nowhere"], "init.head: no run folder, checkpoint or matrix"),
        (["init.backbone=RUN", "init.head=RUN", "data.path=MORE"], "has 12 classes, the data 15; say with init.classes"),
        (["init.backbone=RUN", "init.head=RUN", "init.classes=/nowhere"], "init.classes: /nowhere: cannot be read"),
        (["backbone.freeze=[layer9]"], "backbone.freeze: this backbone has no trainable part 'layer9'"),
        (["backbone.freeze=[conv1,bn1,prelu,layer1,layer2,layer3,layer4,bn2,fc,features]"], "no parameter is trainable"),
        (["optimizer.lr_factors=[layer1=0.1]"], "is now optimizer.rules, a list of entries like {match: layer1, lr_"),
        (["optimizer.rules=[layer1]"], "must be a list of entries like {match, lr_factor, weight_decay}"),
        (["optimizer.rules=[{lr_factor: 0.1}]"], "optimizer.rules[0].match must name a part of the backbone"),
        (["optimizer.rules=[{match: fc, lr_factor: -1}]"], "optimizer.rules[0].lr_factor must be 0 or more, got -1"),
        (["optimizer.rules=[{match: fc, weight_decay: -2}]"], "optimizer.rules[0].weight_decay must be 0 or more, or -1"),
        (["optimizer.rules=[{match: layr1}]"], "optimizer.rules: this backbone has no trainable part 'layr1'"),
        (["optimizer.rules=[{match: '*.gamma'}]"], "optimizer.rules: this backbone has no trainable part '*.gamma'"),
        (
            ["optimizer.rules=[{match: layer1}, {match: layer1.0}]"],
            "match 'layer1.0': all parameters that it matches are matched by an earlier",
        ),
        (["optimizer.rules=[{match: layer1.0}]", "backbone.freeze=[layer1]"], "parameters that it matches are frozen; take"),
    ],
)
def test_a_mistake_is_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], says: str):
    words = [text.replace("RUN", str(source / "tiny")).replace("MORE", str(source / "more")) for text in given]
    assert says in error_of(train.main(tiny_run(source / "data", tmp_path, *SHORT, *words)), capsys)


def test_weights_that_are_no_numbers_and_centres_without_direction_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = source / "tiny"
    weights = read_backbone(list_checkpoints(run)[-1])
    weights["layer2.0.bn1.running_var"][3] = torch.nan
    torch.save(weights, tmp_path / "nan.pth")
    for name, value in (("zero", 0.0), ("inf", torch.inf)):
        centres = _centres(run)
        centres[7] = value
        torch.save(centres, tmp_path / f"{name}.pt")
    for init, message in [
        ([f"init.backbone={tmp_path / 'nan.pth'}"], "nan.pth holds numbers that are not finite"),
        ([f"init.backbone={run}", f"init.head={tmp_path / 'zero.pt'}"], "zero.pt the centre of label 7 is zero or not finite"),
        ([f"init.backbone={run}", f"init.head={tmp_path / 'inf.pt'}"], "inf.pt the centre of label 7 is zero or not finite"),
    ]:
        assert message in error_of(train.main(tiny_run(source / "data", tmp_path, *SHORT, *init)), capsys)


def test_files_of_other_kinds_are_one_line_that_names_the_key(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = source / "tiny"
    newest = list_checkpoints(run)[-1]
    for name in ("no_identity", "no_shards"):
        shutil.copytree(newest, tmp_path / name)
        manifest = json.loads((newest / "manifest.json").read_text())
        if name == "no_identity":
            del manifest["run_signature"]
        else:
            manifest["files"] = {key: entry for key, entry in manifest["files"].items() if "slots" not in entry}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    torch.save({"state_dict": read_backbone(newest)}, tmp_path / "wrapped.pth")
    torch.save({1: torch.zeros(2)}, tmp_path / "numbered.pth")
    torch.save(torch.zeros(NUM_CLASSES, 16).to_sparse(), tmp_path / "sparse.pt")
    torch.save(torch.zeros(1, 16).expand(NUM_CLASSES, 16), tmp_path / "expanded.pt")
    save_file({"weight": torch.zeros(NUM_CLASSES, 16).to(torch.float8_e4m3fn)}, tmp_path / "float8.safetensors")
    for key, value, message in [
        ("backbone", "/nowhere", "no run folder, checkpoint or weights file at /nowhere"),
        ("backbone", tmp_path / "wrapped.pth", "but 'state_dict' is of type dict; save only the network"),
        ("backbone", tmp_path / "numbered.pth", "but 1 is of type Tensor"),
        ("head", tmp_path / "sparse.pt", "its tensor is no plain one with memory for all its numbers"),
        ("head", tmp_path / "expanded.pt", "its tensor is no plain one with memory for all its numbers"),
        ("head", tmp_path / "float8.safetensors", "weight has the dtype F8_E4M3, must be one of F64, F32"),
        ("head", newest / "backbone.safetensors", "has no tensor 'weight', it has bn1.bias, "),
        ("head", tmp_path / "no_identity", "has no num_classes and seed"),
        ("head", tmp_path / "no_shards", "do not hold each of the 12 class centres once"),
        ("head", source / "data", "no complete checkpoint at"),
    ]:
        init = [f"init.{key}={value}"] + ([f"init.backbone={run}"] if key == "head" else [])
        error = error_of(train.main(tiny_run(source / "data", tmp_path, *SHORT, *init)), capsys)
        assert error.startswith(f"error: init.{key}: ") and message in error, error
        assert len(error) < 600, error
    assert tool.main(["merge", str(tmp_path / "no_identity"), str(tmp_path / "out.pt")]) == 1
    assert "has no num_classes and seed" in capsys.readouterr().err
    assert tool.main(["reshard", str(tmp_path / "no_shards"), "2", str(tmp_path / "out")]) == 1
    assert "0 class centres cannot be shared by 2 files" in capsys.readouterr().err


def test_a_map_of_classes_is_checked_line_by_line(tmp_path: Path):
    for text, message in [
        ("0 1\n0 1\n", "line 2: label 1 has an old label already"),
        ("0 1\n5 2\n", "line 2: labels must be below 5"),
        ("0 1 2\n", "line 1 must be 'old new'"),
        ("a b\n", "line 1 must be 'old new'"),
        ("\u00b2 1\n", "line 1 must be 'old new'"),
        (f"1 {'9' * 5000}\n", "line 1 must be 'old new'"),
        ("# nothing\n", "maps no class"),
    ]:
        (tmp_path / "map.txt").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_class_map(tmp_path / "map.txt", 5, 4)
    (tmp_path / "map.txt").write_bytes(b"\xef\xbb\xbf0 1\r\n2 3\r\n")  # as editors of Windows write it
    assert read_class_map(tmp_path / "map.txt", 5, 4).tolist() == [-1, 0, -1, 2]
    (tmp_path / "map.txt").write_text("4 0\n\n# two classes become one label each\n4 3\n")
    assert read_class_map(tmp_path / "map.txt", 5, 4).tolist() == [4, -1, -1, 4]
