"""Model cards: what they say is what the checkpoint and the results say, and no text of a file becomes markup."""

import copy
import errno
import html
import json
import os
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
import torch
from faulty_disk import Disk, faulty
from onnx import TensorProto, helper
from saving import save_now
from tiny_runs import SHALLOW, error_of, one_line

from backbones import build_backbone
from deploy.card.card import FIELDS
from eval.foreign_networks import InputContract
from eval.verification import verify
from scripts.deploy import card
from utils.checkpoint.tensor_file import write_tensors
from utils.distributed.agreement import digest_tensors

MARKUP = "a|b <img src=x onerror=alert(1)> `c` [d](javascript:e) **f** \x1b[31m\u202e"
STAGES = [{"epochs": 0.0, "steps": 3, "margin": 0.0}, {"epochs": 1.0, "steps": 0, "margin": 0.3, "scale": -1.0}]
CONFIG = {
    "run": {"name": "small", "seed": 3},
    "data": {"source": "recordio", "path": "/home/somebody/ms1mv3", "image_size": 112, "flip": True},
    "backbone": {"name": "shallow", "embedding_size": 16, "width": 0.125, "dropout": 0.0, "train_last": 2},
    "loss": {"name": "cosface", "margin": 0.25, "scale": 32.0, "focal": 0.0, "label_smoothing": 0.125},
    "head": {"sample_rate": 0.5, "stages": STAGES, "sub_centers": 1, "storage": "exact"},
    "teacher": {"path": "/home/somebody/teach.npy", "embedding": 5.0, "embedding_loss": "mse", "relations": 0.0},
    "compatible": {"path": "/home/somebody/old", "weight": 0.5},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "beta2": 0.999, "weight_decay": 0.0005, "layer_decay": 1.0},
    "schedule": {"kind": "poly", "power": 2.0, "min_lr": 0.0, "factor": 0.1, "warmup_epochs": 1.0},
    "train": {"epochs": 2.0, "max_steps": 0, "batch_size": 8, "precision": "bf16", "ema": 0.0},
    "augment": {"crop": 0.0, "crop_area": 0.2, "blur": 0.3, "blur_sigma": 2.0},
    "init": {"backbone": ""},
}
SIGNATURE = {"num_classes": 1234, "num_images": 20, "batch_size": 8, "seed": 3, "labels": "abc123"}
LAST = 5  # int(2 epochs * 20 images / 8)


PNG = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()


def _save(folder: Path, config: dict[str, Any] = CONFIG, step: int = LAST, **signature: Any) -> Path:
    torch.manual_seed(signature.get("seed", 0))
    weights = build_backbone(config.get("backbone", CONFIG["backbone"])["name"], 16, 0.125).state_dict()
    known = {"config": config, "run_signature": {**SIGNATURE, **signature}, "score": 0.75}
    save_now(folder, step, weights, {"centres": torch.ones(2, 16)}, (0, 2), {}, known)
    return folder


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the contents of a results.json of one set of 200 pairs."""
    rng = np.random.default_rng(0)
    same = np.arange(200) % 2 == 0
    first = rng.normal(size=(200, 8))
    second = np.where(same[:, None], first, rng.normal(size=(200, 8))) + 0.6 * rng.normal(size=(200, 8))
    rows = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in (first, second)]
    result = verify(*rows, same, xnorm=7.0)
    found = {"lfw": result.as_json()}
    found["lfw"]["intervals_95"] = result.intervals()
    return json.loads(json.dumps(found))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, results: dict[str, Any]) -> Path:
    """Return a run that has ended, with its results."""
    folder = _save(tmp_path_factory.mktemp("runs") / "small")
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "verification.png").write_bytes(PNG)
    return folder


def _card(*arguments: object) -> int:
    return card.main([*map(str, arguments), "--device", "cpu"])


def _cells(text: str) -> list[list[str]]:
    """Return the rows of all tables of a Markdown text."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[html.unescape(re.sub(r"\\(.)", r"\1", cell.strip())) for cell in row] for row in rows]


def test_a_card_says_what_the_checkpoint_says(run: Path, tmp_path: Path):
    assert _card(run, "--out", tmp_path) == 0
    text = (tmp_path / "card.md").read_text()
    facts = {row[0]: row[1] for row in _cells(text) if len(row) == 2}
    network = SHALLOW["shallow"](16, 0.125)
    torch.manual_seed(0)
    assert facts["hash of the weights"] == digest_tensors(build_backbone("shallow", 16, 0.125).state_dict())
    assert facts["parameters"] == f"{sum(p.numel() for p in network.parameters()):,}"
    counts: list[int] = []  # multiply-adds: numbers that a layer returns, times weights of one of them
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            layer.register_forward_hook(lambda layer, _, out: counts.append(out.numel() * layer.weight[0].numel()))
    network.eval()(torch.zeros(1, 3, 112, 112))
    assert facts["multiply-adds for one image"] == f"{sum(counts) / 1e9:.3g} billion"
    assert facts["backbone"] == "shallow: width=0.125" and facts["checkpoint"] == f"step {LAST}"
    assert facts["training set"] == "ms1mv3" and facts["people (classes)"] == "1,234"
    assert facts["hash of the labels"] == "abc123"
    assert facts["loss"] == "cosface: margin=0.25, scale=32" and facts["label smoothing"] == "0.125"
    assert facts["teacher"] == "teach.npy: embedding=5, embedding_loss=mse" and facts["compatible with"] == "old: weight=0.5"
    assert facts["trained in part"] == "train_last=2"
    assert facts["head"].startswith("sample_rate=0.5, stages=steps=3 margin=0; epochs=1 margin=0.3, sub_centers=1")
    assert facts["batch"] == "8 images" and facts["precision"] == "bf16"
    assert facts["optimizer"] == "sgd: lr=0.05, momentum=0.9, weight_decay=0.0005"  # no beta2, which sgd does not have
    assert facts["schedule"] == "poly: power=2, warmup_epochs=1"
    assert facts["length"] == "5 optimizer steps, 2.00 epochs"
    assert facts["initial weights"] == "random" and facts["seed"] == "3"
    assert facts["augmentation"] == "mirrored with probability 1/2; blur=0.3, blur_sigma=2"
    assert facts["input"] == "(images, 3, 112, 112), RGB, float32"
    assert facts["output"].startswith("embeddings of 16 numbers, raw")
    assert ["left eye", "38.29", "51.70"] in _cells(text)
    assert "somebody" not in text and str(run.parent) not in text  # no folder of the machine is on the card


def test_numbers_and_thresholds_are_those_of_the_file(run: Path, results: dict[str, Any], tmp_path: Path):
    assert _card(run, "--out", tmp_path) == 0
    text, lfw = (tmp_path / "card.md").read_text(), results["lfw"]
    rows = [row for row in _cells(text) if row[0] == "lfw"]
    low, high = lfw["intervals_95"]["accuracy"]
    assert rows[0][1:5] == ["100", "100", f"{100 * lfw['accuracy']:.2f}", f"{100 * low:.2f} to {100 * high:.2f}"]
    tenth, hundredth = lfw["operating_points"][:2]
    assert rows[1][:4] == ["lfw", "1e-1", f"{tenth['cosine_threshold']:.4f}", f"{100 * tenth['tar']:.2f}"]
    assert rows[2][2] == f"{hundredth['cosine_threshold']:.4f}" and rows[2][6] == str(hundredth["num_accepted"])
    assert rows[3] == ["lfw", "1e-3 and less", "-", "-", "-", "-", "-"]
    assert "not measurable" in text and "lfw has 100 impostor pairs" in text
    assert "](card_verification.png)" in text and (tmp_path / "card_verification.png").read_bytes() == PNG


def test_pictures_of_errors_are_named_and_not_shown(run: Path, results: dict[str, Any], tmp_path: Path):
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "results.json").write_text(json.dumps(results))
    (tmp_path / "report" / "lfw_false_matches.png").write_bytes(b"")
    (tmp_path / "report" / "curves.png").write_bytes(PNG)
    (tmp_path / "report" / "similarities.png").write_bytes(b"no picture")
    assert _card(run, "--out", tmp_path, "--results", tmp_path / "report" / "results.json") == 0
    text = (tmp_path / "card.md").read_text()
    assert "lfw_false_matches.png" in text.replace("\\", "") and "lfw_false_non_matches.png" not in text.replace("\\", "")
    assert text.count("![") == 1 and "](card_curves.png)" in text


def test_what_a_person_wrote_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = _save(tmp_path / "small")
    assert _card(run, "--out", tmp_path) == 0
    assert f"card.yaml: {', '.join(FIELDS)}" in capsys.readouterr().out
    fields, text = tmp_path / "card.yaml", (tmp_path / "card.md").read_text()
    assert text.count("**To be filled in:**") == len(FIELDS)
    written = (
        fields.read_text()
        .replace("contact:", "contact: we@example.org")
        .replace("limits:", "limits: |\n  Not tested on <children>.\n\n  Nor on twins | triplets.")
    )
    fields.write_text(written)
    assert _card(run, "--out", tmp_path) == 0
    text = (tmp_path / "card.md").read_text()
    assert fields.read_text() == written
    assert "Not tested on &lt;children&gt;.\n\nNor on twins \\| triplets.\n" in text and "we@example.org" in text
    assert text.count("**To be filled in:**") == len(FIELDS) - 2 and "written by python -m scripts.deploy.card;" in text
    assert capsys.readouterr().out.rstrip().endswith("intended_use, not_for, data_licence, weights_licence")
    # a card that was changed by hand is not replaced; one that git gave other line ends is ours all the same
    (tmp_path / "card.md").write_bytes(text.replace("\n", "\r\n").encode())
    assert _card(run, "--out", tmp_path) == 0 and (tmp_path / "card.md").read_text() == text
    (tmp_path / "card.md").write_text(text.replace("cosface", "our own loss"))
    assert _card(run, "--out", tmp_path) == 1
    assert "was changed by hand" in one_line(capsys) and "our own loss" in (tmp_path / "card.md").read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("contakt: me", "'contakt' is no field. Did you mean contact?"),
        ("contact: [a, b]", "contact must be text"),
        ("contact: a\ncontact: b", "given twice"),
        ("- a", "must have lines"),
        ("a: {" * 200, "nested too deep"),
        ("contact: *x", "line 1"),
        ("contact: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("\xff", "no UTF-8 text"),
    ],
)
def test_fields_that_are_none_are_named_in_one_line(
    run: Path, tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "card.yaml").write_bytes(text.encode("latin-1"))
    said = error_of(_card(run, "--out", tmp_path), capsys)
    assert says in said and str(tmp_path / "card.yaml") in said and not (tmp_path / "card.md").exists()


def test_no_text_of_a_file_becomes_markup(results: dict[str, Any], tmp_path: Path):
    config = copy.deepcopy(CONFIG)
    config["data"] |= {"path": MARKUP.replace("/", ""), "source": MARKUP}
    config["loss"] |= {"name": MARKUP, "margin": [MARKUP, {"a": MARKUP}], MARKUP: 1}
    config["augment"] |= {f"{MARKUP}x": True}
    run = _save(tmp_path / "run <b>|x", config, labels=MARKUP)
    (tmp_path / "r.json").write_text(json.dumps({MARKUP: results["lfw"]}))
    (tmp_path / "f.yaml").write_text(f"contact: |\n  {MARKUP.replace(chr(27), '')}\n  # x\n  ===\n")
    out = tmp_path / "out"
    assert _card(run, "--out", out, "--results", tmp_path / "r.json", "--fields", tmp_path / "f.yaml") == 0
    text = (out / "card.md").read_text()
    assert "<img" not in text and "\x1b" not in text and "\u202e" not in text
    assert not re.search(r"(?<!\\)`", text) and not re.search(r"(?<!\\)\]\(javascript", text)
    assert "\n===" not in text and "\n# x" not in text
    widths = {len(row) for row in _cells(text)}
    assert widths <= {2, 3, 7, 8}  # no bar of a name made a column
    names = [row[0] for row in _cells(text) if len(row) == 8]
    assert names[-1].startswith("a|b <img src=x onerror=alert(1)> `c` [d](javascript:e)")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "an object with an entry for each"),
        ("{}", "an object with an entry for each"),
        ('{"lfw": 3}', "must be an object"),
        ('{"lfw": {"accuracy": NaN}}', "NaN is no number"),
        ('{"lfw": {"accuracy": 1e999}}', "lfw.accuracy must be a number from 0 to 1"),
        ('{"lfw": {"accuracy": true}}', "lfw.accuracy must be a number"),
        ('{"lfw": {"num_genuine": -1}}', "lfw.num_genuine must be a whole number"),
        ('{"lfw": {"num_genuine": 1' + "0" * 400 + "}}", "lfw.num_genuine must be a whole number"),
        ('{"lfw": {"operating_points": {}}}', "a list of at most 20"),
        ('{"lfw": {"operating_points": [{"target": "often"}]}}', "target must be a FAR"),
        ('{"lfw": {"operating_points": [{"target": "1e-3", "tar": 2}]}}', "tar must be a number"),
        ('{"lfw": {"intervals_95": {"accuracy": [0.9]}}}', "low and the high end"),
        ('{"lfw": {"intervals_95": {"accuracy": [0.9, 0.1]}}}', "low and the high end"),
        ('{"lfw": {"similarities": {"cosine": [0, 1], "genuine": [1, 2], "impostor": [1]}}}', "one more edge"),
        ('{"lfw": {"similarities": {"cosine": [1, 0], "genuine": [1], "impostor": [1]}}}', "must ascend"),
        ("[" * 100_000, "nested too deep"),
        ('{"lfw": {"accuracy": 0.5', "Expecting"),
        ("\xff", "no UTF-8 text"),
        (" " * (1 << 24) + "{}", "16,777,218 bytes"),
    ],
)
def test_results_that_are_none_are_named_in_one_line(
    run: Path, tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "r.json").write_bytes(text.encode("latin-1"))
    said = error_of(_card(run, "--out", tmp_path / "out", "--results", tmp_path / "r.json"), capsys)
    assert says in said and str(tmp_path / "r.json") in said


def test_a_set_of_any_name_is_on_the_card(run: Path, results: dict[str, Any], tmp_path: Path):
    """Also one that no file can have."""
    for number, name in enumerate(("x" * 300, "a\0b", "")):
        (tmp_path / "r.json").write_text(json.dumps({name: results["lfw"]}))
        out = tmp_path / str(number)
        assert _card(run, "--out", out, "--results", tmp_path / "r.json") == 0
        assert len([row for row in _cells((out / "card.md").read_text()) if len(row) == 8]) == 3


def test_a_full_disk_is_one_line_that_names_the_file_and_leaves_what_was_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def files(out: Path, fail_at: int = -1, error: int = 0) -> tuple[dict[str, bytes], list[str]]:
        with faulty(Disk(fail_at, error)) as disk:
            assert _card(run, "--out", out) == (fail_at >= 0)
        said = one_line(capsys) if error else ""
        assert not error or (os.strerror(error) in said and any(f"{out}/{name}: " in said for name in names)), said
        return {path.name: path.read_bytes() for path in out.iterdir()}, disk.done

    names = ["card.yaml", "card_verification.png", "card.md"]
    files(tmp_path / "first")  # of a process: matplotlib makes folders and files of its own
    whole, done = files(tmp_path / "whole")
    for place, number in enumerate([number for number, name in enumerate(done) if name in ("write", "fsync")]):
        assert files(tmp_path / str(number), number, errno.ENOSPC)[0] == {name: whole[name] for name in names[: place // 2]}
    _, done = files(tmp_path / "whole")  # which has a card now
    for number in [number for number, name in enumerate(done) if name in ("write", "fsync")]:
        assert files(tmp_path / "whole", number, errno.EIO)[0] == whole


def test_a_template_never_replaces_what_a_person_wrote_meanwhile(run: Path, tmp_path: Path):
    def write(operation: str) -> None:
        if disk.done == ["open", "mkdir", operation]:  # the next one would make the template
            (tmp_path / "card.yaml").write_text("contact: me")

    disk = Disk(before=write)
    with faulty(disk):
        assert _card(run, "--out", tmp_path) == 0
    assert (tmp_path / "card.yaml").read_text() == "contact: me"


def test_a_card_without_results_says_so(run: Path, tmp_path: Path):
    """Results of another checkpoint are not taken for this one's."""
    unfinished = _save(tmp_path / "unfinished", step=LAST - 1)
    (unfinished / "results.json").write_text((run / "results.json").read_text())
    checkpoint = run / "checkpoints" / f"step_{LAST:08d}"
    for number, (path, more) in enumerate(((unfinished, []), (checkpoint, []), (run, ["--best"]), (run, []))):
        out = tmp_path / str(number)
        assert _card(path, "--out", out, *more) == 0
        text = (out / "card.md").read_text()
        assert ("No results: " in text) == (number < 3) and ("## Thresholds" in text) == (number == 3)
        assert f"Model card: {path.name if number == 0 else 'small'}" in text


def test_results_of_the_moving_average_describe_the_moving_average(
    run: Path, results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = {**results["lfw"], "accuracy": 0.123}
    (tmp_path / "r.json").write_text(json.dumps({**results, "ema/lfw": other}))
    assert _card(run, "--out", tmp_path / "plain", "--results", tmp_path / "r.json") == 0
    row = next(row for row in _cells((tmp_path / "plain" / "card.md").read_text()) if row[0].endswith("lfw"))
    assert row[0] == "lfw" and row[3] == f"{100 * results['lfw']['accuracy']:.2f}"
    (tmp_path / "r.json").write_text(json.dumps({"ema/lfw": other}))
    assert "add --ema" in error_of(_card(run, "--out", tmp_path / "other", "--results", tmp_path / "r.json"), capsys)


def test_a_file_of_weights_has_a_card_without_a_training(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    weights = tmp_path / "face.safetensors"
    torch.manual_seed(0)
    write_tensors(weights, build_backbone("shallow", 16, 0.125).state_dict())
    named = ("--backbone", "shallow", "--embedding-size", "16", "--width", "0.125", "--colour", "bgr", "--input-std", "128")
    assert _card(weights, *named, "--out", tmp_path) == 0
    text = (tmp_path / "card.md").read_text()
    assert "# Model card: face.safetensors" in text and "no configuration of a training" in text and "## Recipe" not in text
    assert "No results: there is no results.json of the network." in text and "BGR" in text and "(x - 127.5) / 128" in text
    assert _card(run, "--untrained", "--out", tmp_path) == 1 and "--untrained" in one_line(capsys)
    assert _card(tmp_path / "none", "--out", tmp_path / "new") == 1 and "no run folder" in one_line(capsys)
    assert not (tmp_path / "new").exists()


def test_the_card_of_an_exported_file_says_what_the_file_says(tmp_path: Path):
    """Of a file that takes the bytes of images and returns unit vectors."""
    points = ((1.0, 2.0),) * 5
    contract = InputContract(
        32, "NHWC", "rgb", 0.0, 1.0, "uint8", points, 3, True, True, "int8", "small <b>", "5", "mbf|x", "ab" * 16
    )
    ends = [("images", TensorProto.UINT8, ["n", 32, 32, 3]), ("embeddings", TensorProto.FLOAT, ["n", 3])]
    nodes = [
        helper.make_node("Cast", ["images"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["numbers"], ["embeddings"], axes=[1, 2], keepdims=0),
    ]
    first, last = (helper.make_tensor_value_info(*end) for end in ends)
    model = helper.make_model(helper.make_graph(nodes, "x", [first], [last]), opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 9
    helper.set_model_props(model, contract.as_texts())
    onnx.save(model, str(tmp_path / "face.onnx"))
    assert _card(tmp_path / "face.onnx", "--out", tmp_path) == 0
    rows = _cells((tmp_path / "card.md").read_text())
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert ["nose", "1.00", "2.00"] in rows
    assert facts["file"] == "face.onnx" and facts["exported from"] == "small <b>" and facts["step"] == "5"
    assert facts["backbone"] == "mbf|x" and facts["hash of the weights"] == "ab" * 16 and facts["precision"] == "int8"
    assert facts["input"] == "(images, 32, 32, 3), RGB, uint8" and facts["values"] == "0 to 255"
    assert facts["output"] == "embeddings of 3 numbers, of length 1" and "include the mirror image" in facts["comparison"]


def test_a_checkpoint_with_an_arbitrary_configuration_is_one_line_or_a_card(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sections = {name: {key: {"deep": [None, 1e308, {}]} for key in section} for name, section in CONFIG.items()}
    odd = {**sections, "backbone": CONFIG["backbone"], "run": {"seed": 3}, "data": {"path": "", "source": [1], "sources": 3}}
    assert _card(_save(tmp_path / "odd", odd), "--out", tmp_path / "out") == 0
    assert "its configuration lacks" in error_of(_card(_save(tmp_path / "none", {}), "--out", tmp_path / "out"), capsys)
