"""Folders of faces become unit vectors: equal to the plain forward pass, and the same bytes however the work was done."""

import argparse
import csv
import errno
import fcntl
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import zlib
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.multiprocessing as mp
import xxhash
from faulty_disk import Disk, faulty
from pictures import png_of
from tiny_detectors import picture, write_detector
from tiny_networks import MEAN_COLOUR, write_onnx
from tiny_runs import Started, error_of, one_line, wait_for

from backbones import build_backbone
from data.recordio.image_record import RecordSetWriter
from deploy.embed import embedder
from deploy.embed import parts as embed_parts
from deploy.embed import table as embed_table
from deploy.embed.embedder import open_embedder
from eval.embedding_table import read_table
from eval.networks import add_network_arguments
from scripts.analysis.pairs import main as find_pairs
from scripts.deploy import embed
from scripts.deploy.embed import main
from utils.allocator import keep_freed_memory
from utils.checkpoint.tensor_file import write_tensors
from utils.image import to_png

SIZE, DIM, COUNT = 48, 16, 22
FLAGS = ["--backbone=shallow", "--width=0.125", f"--embedding-size={DIM}", f"--image-size={SIZE}", "--device=cpu"]


def _network(name: str = "shallow") -> torch.nn.Module:
    torch.manual_seed(3)
    model = build_backbone(name, DIM, 0.125, image_size=SIZE).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):  # as after a training, so that faces differ
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("network") / "network.safetensors"
    write_tensors(path, _network().state_dict())
    return path


def _pixels(number: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def crops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 22 crops of four people and one of nobody, a photograph, a bomb, and a file that is no picture."""
    root = tmp_path_factory.mktemp("crops")
    for number in range(COUNT):
        person = root / f"person{number % 4}"
        person.mkdir(exist_ok=True)
        (person / f"{number:02}.png").write_bytes(to_png(_pixels(number)))
    (root / "alone.png").write_bytes(to_png(_pixels(99)))
    (root / "person1" / "photograph.png").write_bytes(to_png(_pixels(98, 64)))
    (root / "person2" / "bomb.png").write_bytes(png_of(60_000, 60_000, zlib.compress(bytes(1000))))
    (root / "person2" / "text.jpg").write_text("no picture")
    return root


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the few pictures here are several parts."""
    monkeypatch.setitem(embed_parts.PICTURES, "cpu", 5)


def _run(network: Path, folder: Path, out: Path, *words: object, flags: list[str] = FLAGS) -> int:
    return main([str(word) for word in (network, folder, "--out", out, *flags, *(words or ("--processes", 1)))])


def _files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.parent.iterdir() if path.name.startswith(out.stem)}


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.numeric
def test_vectors_are_those_of_a_forward_pass(weights: Path, crops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert _run(weights, crops, tmp_path / "f.npy") == 0
    said = capsys.readouterr().out
    assert "3 of 26 pictures rejected, with the reason in f.npy.rejected.csv" in said
    assert f"f.npy: 23 faces of 23 pictures, embedded by {weights}" in said
    rows, vectors = _rows(tmp_path / "f.csv"), np.load(tmp_path / "f.npy")
    assert vectors.shape == (23, DIM) and vectors.dtype == np.float32
    names = [row["name"] for row in rows]
    assert names == sorted(names) and names[0] == "alone.png"
    model = _network()
    for row, vector in zip(rows, vectors, strict=True):
        number = 99 if row["name"] == "alone.png" else int(Path(row["name"]).stem)
        assert row["person"] == ("" if number == 99 else f"person{number % 4}")
        assert (row["face"], row["padding"], row["score"]) == ("0", "0.0000", "")
        image = (torch.from_numpy(_pixels(number)).permute(2, 0, 1)[None].float() - 127.5) / 127.5
        with torch.inference_mode():
            plain = (model(image) + model(image.flip(3)))[0].double().numpy()
        # a forward pass in float32
        assert abs(float(row["norm"]) / np.linalg.norm(plain) - 1) < 1e-4
        assert np.abs(vector - plain / np.linalg.norm(plain)).max() < 1e-4
    assert np.abs(np.linalg.norm(vectors.astype(np.float64), axis=1) - 1).max() < 1e-6
    reasons = {row["name"]: row["reason"] for row in _rows(tmp_path / "f.npy.rejected.csv")}
    assert set(reasons) == {"person1/photograph.png", "person2/bomb.png", "person2/text.jpg"}
    assert "is 64 x 64 pixels, no aligned crop of 48 x 48" in reasons["person1/photograph.png"]
    assert "is 60000 x 60000 pixels, no aligned crop" in reasons["person2/bomb.png"]
    assert sorted(_files(tmp_path / "f.npy")) == ["f.csv", "f.npy", "f.npy.rejected.csv"]


@pytest.mark.numeric
def test_ser_fiq_is_the_formula_of_its_paper(weights: Path, crops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Terhoerst et al., equation 1, over all masks and pairs; and the column reaches `face quality`."""
    assert _run(weights, crops, tmp_path / "plain.npy") == 0
    assert _run(weights, crops, tmp_path / "f.parquet", "--ser-fiq", "--processes", 1) == 0
    faces, model = read_table(tmp_path / "f.parquet"), _network().double()
    assert np.abs(faces.vectors - np.load(tmp_path / "plain.npy")).max() < 1e-5  # more rows in the last products
    (dropout,) = (module for module in model.modules() if isinstance(module, torch.nn.Dropout))
    size = next(layer for layer in reversed(list(model.modules())) if isinstance(layer, torch.nn.Linear)).in_features
    halves = torch.rand(100, size, generator=torch.Generator().manual_seed(0)) < 0.5
    dropout.register_forward_hook(lambda module, inputs, x: x * halves / 0.5)
    assert len(torch.unique(halves, dim=0)) == 100 and abs(halves.double().mean() - 0.5) < 0.01
    for name, found in list(zip(faces.names, faces.qualities["ser_fiq"].tolist(), strict=True))[:3]:
        number = 99 if name == "alone.png" else int(Path(name).stem)
        image = (torch.from_numpy(_pixels(number)).permute(2, 0, 1)[None].double() - 127.5) / 127.5
        expected = []
        for view in (image, image.flip(3)):
            with torch.inference_mode():
                passes = model(view.expand(100, -1, -1, -1))
            unit = passes / passes.norm(dim=1, keepdim=True)
            total = float((unit[:, None] - unit).norm(dim=2).triu().sum())
            expected.append(2 / (1 + np.exp(2 / 100**2 * total)))
        assert found == pytest.approx(np.mean(expected), rel=1e-4)
    assert len(set(faces.qualities["ser_fiq"].tolist())) > 20
    assert {row["ser_fiq"] for row in _rows(tmp_path / "plain.csv")} == {""}
    onnx = write_onnx(tmp_path / "n.onnx", MEAN_COLOUR, 3, SIZE)
    assert _run(Path(onnx), crops, tmp_path / "g.npy", "--ser-fiq", flags=["--device=cpu"]) == 1
    assert "--ser-fiq needs a network with a layer of dropout" in capsys.readouterr().err


@pytest.mark.parametrize("group", [8192, 4])
def test_parquet_has_the_same_rows(weights: Path, crops: Path, tmp_path: Path, group: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embed_table, "_ROW_GROUP", group)
    assert _run(weights, crops, tmp_path / "f.npy") == 0
    assert _run(weights, crops, tmp_path / "g.parquet") == 0
    table = pyarrow.parquet.read_table(tmp_path / "g.parquet")
    assert table.column_names == ["name", "face", "person", "norm", "padding", "score", "ser_fiq", "embedding"]
    rows = _rows(tmp_path / "f.csv")
    for name in ("name", "person"):
        assert table[name].to_pylist() == [row[name] for row in rows]
    assert [f"{norm:.6g}" for norm in table["norm"].to_pylist()] == [row["norm"] for row in rows]
    assert table["score"].null_count == len(rows) and table["face"].to_pylist() == [0] * len(rows)
    vectors = np.array(table["embedding"].to_pylist(), dtype=np.float32)
    assert np.array_equal(vectors, np.load(tmp_path / "f.npy"))
    assert table.schema.metadata[b"network"] == str(weights).encode()
    read = pyarrow.parquet.ParquetFile.read
    whole = lambda file, columns: pytest.fail("all at once") if "embedding" in columns else read(file, columns)  # noqa: E731
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read", whole)  # which takes four times the memory of the vectors
    with pyarrow.parquet.ParquetWriter(tmp_path / "g.parquet", table.schema) as file:
        for rows in (table[:0], table[:1], table[:0], table[1:]):  # other programs write groups without a row, too
            file.write_table(rows)
    assert np.array_equal(read_table(tmp_path / "g.parquet").vectors, vectors)


@pytest.mark.numeric
@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_the_precision_that_the_device_is_fast_at(
    weights: Path, crops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
):
    for module in (embed, embedder):
        monkeypatch.setattr(module, "is_fast_in_bf16", lambda device: fast)
    words = ["--precision", "bf16" if fast else "fp32", "--processes", 1]
    assert _run(weights, crops / "person0", tmp_path / "a" / "f.npy", *words) == 0
    assert _run(weights, crops / "person0", tmp_path / "b" / "f.npy", "--precision", "auto", "--processes", 1) == 0
    assert _files(tmp_path / "a" / "f.npy") == _files(tmp_path / "b" / "f.npy")
    parser = argparse.ArgumentParser()
    add_network_arguments(parser)
    found = []
    for name in (words[1], "auto"):  # as the programs of a gallery open it
        network = open_embedder(parser.parse_args([str(weights), *FLAGS, "--precision", str(name)]))
        found.append(network.embed(np.stack([_pixels(1), _pixels(2)])))
    assert np.array_equal(*found)


@pytest.mark.numeric
def test_two_processes_write_the_bytes_of_one(weights: Path, crops: Path, tmp_path: Path):
    for folder, count in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        assert _run(weights, crops, tmp_path / folder / "f.npy", "--processes", count) == 0
        assert _run(weights, crops, tmp_path / folder / "f.parquet", "--processes", 1) == 0
    assert _files(tmp_path / "one" / "f.npy") == _files(tmp_path / "two" / "f.npy")
    assert len(_files(tmp_path / "one" / "f.npy")) == 5


@pytest.mark.numeric
def test_the_images_of_a_training_set_are_embedded_as_those_of_a_folder_and_a_table_is_read_back(
    weights: Path, crops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with RecordSetWriter(tmp_path / "set") as writer:
        for number in sorted(range(COUNT), key=lambda number: number % 4):
            writer.add(number % 4, to_png(_pixels(number)))
    for count, name in ((1, "one.npy"), (2, "two.npy"), (1, "one.parquet")):
        assert _run(weights, tmp_path / "set", tmp_path / name, "--processes", count) == 0
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "two.npy").read_bytes()
    assert _run(weights, crops, tmp_path / "folder.npy") == 0
    folder = read_table(tmp_path / "folder.npy")
    of_folder = {Path(name).stem: row for name, row in zip(folder.names, folder.vectors, strict=True)}
    for name in ("one.npy", "one.parquet"):
        table = read_table(tmp_path / name)
        assert table.names == [str(index) for index in range(COUNT)]
        numbers = sorted(range(COUNT), key=lambda number: number % 4)
        assert table.people == [str(number % 4) for number in numbers]
        assert table.labels()[0].tolist() == [number % 4 for number in numbers]
        assert np.array_equal(table.vectors, np.stack([of_folder[f"{number:02}"] for number in numbers]))
        assert not table.vectors.flags.writeable and np.isfinite(table.norms).all()
    with pytest.raises(ValueError, match=r"alone\.png: has no person"):
        folder.labels()
    capsys.readouterr()
    assert _run(weights, tmp_path / "set", tmp_path / "d.npy", "--detector", tmp_path / "none.onnx") == 1
    assert "is a training set, whose faces are aligned already" in one_line(capsys, "embedding")


def test_a_table_that_is_none_is_one_line(tmp_path: Path):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(6, 4)).astype(np.float32)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = "name,person\n" + "".join(f"{n}.png,p\n" for n in range(6))
    for array, text, reason in (
        (vectors, rows, "divide each by its length"),
        (np.where(np.arange(6)[:, None] == 3, np.float32("nan"), unit), rows, "vector 3 has the length nan"),
        (unit.astype(np.float64), rows, r"must be \(faces, D\) float32, got \(6, 4\) float64"),
        (unit[:5], rows, "5 vectors, but more rows"),
        (unit, rows.replace("person", "who"), "'person' is not in list"),
        (np.array([{}] * 6), rows, "no table of `face embed`"),
    ):
        np.save(tmp_path / "t.npy", array)
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(ValueError, match=reason):
            read_table(tmp_path / "t.npy")
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    for name, reason in (("t.parquet", "no table of"), ("none.npy", "No such file"), ("t.csv", "ends in .parquet or .npy")):
        with pytest.raises(ValueError, match=reason):
            read_table(tmp_path / name)


def test_a_small_parquet_file_that_would_take_all_memory_or_lacks_values_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def said(count: int, name: str | None = "x", width: int = 512) -> str:
        vectors = np.zeros((count, width), dtype=np.float32)
        vectors[:, 0] = 1
        column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), width)
        names = ["0.jpg", *[name] * (count - 1)]
        columns = {"name": names, "person": ["p"] * count, "face": [0] * count, "norm": [1.0] * count}
        path = tmp_path / "t.parquet"
        pyarrow.parquet.write_table(pyarrow.table({**columns, "embedding": column}), path, compression="zstd")
        assert path.stat().st_size < 10_000
        assert find_pairs([str(path), "--out", str(tmp_path / "out")]) == 1
        return capsys.readouterr().err

    bomb = said(50_000)
    assert "t.parquet: is no table of `face embed` (it takes 103," in bomb and "over 10 times its size)" in bomb
    assert bomb.count("\n") == 1
    assert "(a row lacks its name, face, person or embedding)" in said(3, None)


@pytest.mark.numeric
def test_the_embedding_of_a_crop_does_not_depend_on_what_else_is_in_its_batch(weights: Path):
    parser = argparse.ArgumentParser()
    add_network_arguments(parser)
    embedder = open_embedder(parser.parse_args([str(weights), *FLAGS]))
    batch = np.stack([_pixels(number) for number in range(19)])
    together = embedder.embed(batch)
    assert (embedder.embedding_size, embedder.image_size, embedder.config) == (DIM, SIZE, {})
    assert np.array_equal(np.concatenate([embedder.embed(batch[n : n + 1]) for n in range(19)]), together)
    assert np.array_equal(embedder.embed(batch[::-1].copy())[::-1], together)
    assert np.array_equal(embedder.embed(batch[5:12]), together[5:12])
    assert embedder.embed(batch[:0]).shape == (0, DIM)
    with pytest.raises(ValueError, match=r"crops must be \(n, 48, 48, 3\) uint8"):
        embedder.embed(batch[:, :40])


def test_photographs_are_detected_and_their_faces_numbered(weights: Path, tmp_path: Path):
    detector = write_detector(tmp_path / "face.onnx", "retinaface")
    folder = tmp_path / "photographs"
    (folder / "anna").mkdir(parents=True)
    (folder / "anna" / "two.png").write_bytes(to_png(picture(112, 200, (48, 40), (136, 56))))
    (folder / "none.png").write_bytes(to_png(picture(112, 200)))
    assert _run(weights, folder, tmp_path / "f.parquet", "--detector", detector, "--which", "all", "--processes", 1) == 0
    table = pyarrow.parquet.read_table(tmp_path / "f.parquet").to_pylist()
    assert [(row["name"], row["face"], row["person"]) for row in table] == [("anna/two.png", n, "anna") for n in (0, 1)]
    assert all(abs(row["score"] - 0.95) < 1e-3 and row["padding"] == 0 for row in table)
    assert _rows(tmp_path / "f.parquet.rejected.csv") == [{"name": "none.png", "reason": "no face found"}]


def test_a_run_killed_at_any_moment_goes_on_and_ends_with_the_same_bytes(weights: Path, crops: Path, tmp_path: Path):
    """Killed before each of some file operations, one after the other on the same files, by a child of this process."""
    (tmp_path / "whole").mkdir()
    assert _run(weights, crops, tmp_path / "whole" / "f.npy") == 0
    (tmp_path / "killed").mkdir()
    out = tmp_path / "killed" / "f.npy"
    moments = random.Random(1).sample(range(24), 5)
    deaths = 0
    for moment in [*sorted(moments), 60]:
        process = mp.get_context("forkserver").Process(target=_killed_at, args=(moment, str(weights), str(crops), str(out)))
        process.start()
        process.join(60)
        deaths += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            break
    assert deaths >= 3
    if out.with_name("f.npy.unfinished").exists():
        assert _run(weights, crops, out) == 0
    assert _files(out) == _files(tmp_path / "whole" / "f.npy")


def _killed_at(moment: int, weights: str, crops: str, out: str) -> None:
    embed_parts.PICTURES["cpu"] = 5
    torch.set_num_threads(1)
    with faulty(Disk(moment)):
        raise SystemExit(_run(Path(weights), Path(crops), Path(out)))


def test_what_is_done_is_not_done_again(
    weights: Path, crops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "f.npy"
    assert _run(weights, crops, tmp_path / "whole.npy") == 0
    original, done = embed_parts.Parts.add, []

    def add(parts: embed_parts.Parts, number: int, part: embed_parts.Part) -> None:
        if number == 3 and 3 not in done:
            done.append(3)
            raise ValueError("stopped here")
        original(parts, number, part)
        done.append(number)

    monkeypatch.setattr(embed_parts.Parts, "add", add)
    assert _run(weights, crops, out) == 1
    assert done == [0, 1, 2, 3]
    capsys.readouterr()
    data = (tmp_path / "f.npy.unfinished").read_bytes()
    second = data.index(b'{"part": 1')
    (tmp_path / "f.npy.unfinished").write_bytes(data[: second + 300] + bytes([data[second + 300] ^ 1]) + data[second + 301 :])
    assert _run(weights, crops, out) == 0
    assert done == [0, 1, 2, 3, 1, 3, 4, 5] and "10 of 26 pictures were done already" in capsys.readouterr().out
    assert np.load(out).tobytes() == np.load(tmp_path / "whole.npy").tobytes()


@pytest.mark.parametrize(
    ("words", "what"),
    [(["--colour", "bgr"], "network"), (["--precision", "bf16"], "precision"),
     (["--detector", "face.onnx"], "detector"), (["--ser-fiq"], "--ser-fiq"), ([], "list of pictures")],
)  # fmt: skip
def test_parts_of_another_run_are_not_mixed(
    weights: Path,
    tmp_path: Path,
    words: list[str],
    what: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    write_detector(Path("face.onnx"), "scrfd")
    folder, out = tmp_path / "crops", tmp_path / "f.npy"
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.png").write_bytes(to_png(_pixels(number)))
    with faulty(Disk(12, errno.ENOSPC)):
        assert _run(weights, folder, out) == 1
    assert "No space left on device" in one_line(capsys, "embedding") and (tmp_path / "f.npy.unfinished").exists()
    if not words:
        (folder / "2.png").write_bytes(to_png(_pixels(2)))
    assert _run(weights, folder, out, *words, "--processes", 1) == 1
    assert (
        f"f.npy.unfinished: was begun with another {what}; go on with that one, choose another --out, or add --again"
        in one_line(capsys, "embedding", "warning: --precision bf16")  # which the processor may emulate
    )
    assert _run(weights, folder, out, *words, "--again", "--processes", 1) == (1 if "--detector" in words else 0)


def test_a_result_is_replaced_only_with_again_and_a_folder_that_is_not_ours_never(
    weights: Path, crops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "f.npy"
    out.write_text("mine")
    assert _run(weights, crops, out) == 1
    assert "f.npy exists already; choose another name, or --again to replace it" in one_line(capsys, "embedding")
    (tmp_path / "f.npy.unfinished").write_text("mine\n")
    assert "f.npy.unfinished: is no file of this program" in error_of(_run(weights, crops, out, "--again"), capsys, "embedding")
    assert out.read_text() == "mine" and (tmp_path / "f.npy.unfinished").read_text() == "mine\n"
    (tmp_path / "f.npy.unfinished").unlink()
    for again in (["--again"], []):  # a run that fails at once does not make the next one replace the result
        assert _run(tmp_path / "missing", crops, out, *again) == 1
        assert "missing" in one_line(capsys, "embedding") if again else "exists already" in one_line(capsys, "embedding")
    assert out.read_text() == "mine" and not (tmp_path / "f.npy.unfinished").exists()
    (tmp_path / "k.csv").write_text("mine")  # where the other columns of k.npy would go
    assert _run(weights, crops, tmp_path / "k.npy") == 1
    assert "k.csv exists already; choose another name" in one_line(capsys, "embedding")
    assert (tmp_path / "k.csv").read_text() == "mine" and not (tmp_path / "k.npy").exists()
    assert "must end in .parquet or .npy" in error_of(_run(weights, crops, tmp_path / "f.txt"), capsys, "embedding")
    (tmp_path / "g.npy").mkdir()
    assert "g.npy is a folder; name a file" in error_of(_run(weights, crops, tmp_path / "g.npy"), capsys, "embedding")
    assert _run(weights, tmp_path / "missing", tmp_path / "h.npy") == 1
    assert "no such folder" in one_line(capsys, "embedding") and not (tmp_path / "h.npy.unfinished").exists()


def test_a_second_run_on_one_file_is_refused(weights: Path, crops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with open(tmp_path / "f.npy.unfinished", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "f.npy is in use by another run" in error_of(_run(weights, crops, tmp_path / "f.npy"), capsys, "embedding")
    assert _run(weights, crops, tmp_path / "f.npy") == 0


def test_a_part_that_was_tampered_with_is_made_again(weights: Path, tmp_path: Path):
    folder, out = tmp_path / "crops", tmp_path / "f.npy"
    folder.mkdir()
    (folder / "a.png").write_bytes(to_png(_pixels(1)))
    assert _run(weights, folder, out) == 0
    expected = _files(out)
    rows = b'{"rows": [], "dim": -1}\n'
    sound = json.dumps({"part": 0, "bytes": len(rows), "hash": xxhash.xxh3_128_hexdigest(rows)}).encode() + b"\n" + rows
    for damage in (b"", b"[]\n", b"[" * 100_000 + b"\n", b'{"part": 0}\n', b'{"part": 0, "bytes": 99}\nab', sound):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embed_parts.Parts, "add", lambda *arguments: (_ for _ in ()).throw(ValueError("stopped")))
            assert _run(weights, folder, out, "--again", "--processes", 1) == 1
        with open(tmp_path / "f.npy.unfinished", "ab") as file:
            file.write(damage)
        assert _run(weights, folder, out) == 0
        assert _files(out) == expected


def _onnx(path: Path, factor: float) -> Path:
    """Write a network whose embedding is the mean of each channel, times a number."""
    return Path(write_onnx(path, [*MEAN_COLOUR, ("Mul", {})], 3, SIZE, factor=np.array([factor], np.float32)))


def test_embeddings_that_are_not_finite_or_zero_are_rejected(tmp_path: Path, crops: Path, capsys: pytest.CaptureFixture[str]):
    for number, bias in enumerate((float("nan"), float("inf"), 0.0)):
        network = _onnx(tmp_path / f"{number}.onnx", bias)
        said = error_of(_run(network, crops, tmp_path / f"f{number}.npy", "--processes", 1, flags=[]), capsys, "embedding")
        assert "no face in any of 26 pictures; the first, alone.png, the network has no finite embedding of face 0" in said
        assert not list(tmp_path.glob(f"f{number}.npy*[!v]"))  # nor what another start would go on with
    assert _run(_onnx(tmp_path / "sound.onnx", 2.0), crops, tmp_path / "f.npy", "--processes", 1, flags=[]) == 0


def test_names_that_attack_stay_names(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "crops"
    folder.mkdir()
    names = ["a\nb.png", "\x1b[2J.png", "<img src=x>,|.png", '"quoted".png']
    for name in names:
        (folder / name).write_bytes(to_png(_pixels(len(name))))
    (folder / os.fsdecode(b"\xff.png")).write_bytes(to_png(_pixels(1)))
    (folder / "pipe.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "fifo.png")
    assert _run(weights, folder, tmp_path / "f.parquet") == 0
    assert _run(weights, folder, tmp_path / "f.npy") == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err.replace("\x1b[A", "")
    assert sorted(row["name"] for row in _rows(tmp_path / "f.csv")) == sorted(names)
    assert sorted(pyarrow.parquet.read_table(tmp_path / "f.parquet")["name"].to_pylist()) == sorted(names)
    rejected = (tmp_path / "f.npy.rejected.csv").read_text(errors="surrogateescape")
    assert "its name is no UTF-8" in rejected and "it is a pipe" in rejected and "it is a device" in rejected


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def many(crops: Path, tmp_path: Path) -> Path:
    """Return a folder of 900 crops, which take longer than it takes to end the run."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(900):
        (folder / f"{number}.png").symlink_to(crops / "alone.png")
    return folder


@pytest.mark.parametrize("how", ["child", "interrupt"])
def test_a_process_that_dies_and_ctrl_c_end_the_run_in_one_line_and_all_processes(
    weights: Path, many: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
):
    server = forkserver._forkserver._forkserver_pid  # the parent of all
    before, workers, out = set(_children(server)), [], tmp_path / "f.npy"

    def strike() -> None:
        wait_for(lambda: (path := tmp_path / "f.npy.unfinished").exists() and b'{"part"' in path.read_bytes())
        workers.extend(sorted(set(_children(server)) - before))
        os.kill(workers[0] if how == "child" else os.getpid(), signal.SIGKILL if how == "child" else signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    status = _run(weights, many, out, "--processes", 2)
    thread.join()
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("embedding")]
    if how == "child":
        said = "error: one of the processes ended; what is done is kept: start the same command again to go on"
    else:
        said = "interrupted: what is done is kept: start the same command again to go on"
    assert status == (1 if how == "child" else 130) and len(lines) == 1 and lines[0].startswith(said), lines
    assert len(workers) == 2 and not any(map(_is_running, workers))
    assert not out.exists() and b'{"part"' in (tmp_path / "f.npy.unfinished").read_bytes()


class Failing(type(Path())):  # type: ignore[misc]
    """A path whose processes fail as torch does when it has no memory, or as arithmetic does."""

    def __truediv__(self, name: object) -> Path:
        if multiprocessing.parent_process() is not None and str(name) == "alone.png":
            _fail(self.name)
        return super().__truediv__(name)


def _out_of_memory() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


ERRORS: dict[str, tuple[Exception, str]] = {
    "python": (MemoryError(), "the memory is full"),
    "torch": (_out_of_memory(), "the memory is full"),
    "cuda": (torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate"), "the memory is full"),
    "driver": (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"), "the memory is full"),
    "other": (RuntimeError("a first line\nand a second"), "embedding fails: a first line; what is done is kept"),
    "nameless": (RuntimeError(), "embedding fails: RuntimeError; what is done is kept"),
}


def _fail(name: str) -> None:
    raise ERRORS[name][0]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["python", "other"])
def test_a_full_memory_and_failing_arithmetic_are_one_line_and_keep_what_is_done(
    weights: Path, crops: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, processes: int
):
    folder, out = tmp_path / kind, tmp_path / "f.npy"
    shutil.copytree(crops, folder)
    with pytest.MonkeyPatch.context() as patch:
        if processes == 1:
            patch.setattr(embed_parts, "embed_part", lambda *arguments: _fail(kind))
        else:  # whose processes have their own copy of the program
            patch.setattr(embed, "Path", Failing)
        assert _run(weights, folder, out, "--processes", processes) == 1
    said = one_line(capsys, "embedding")
    assert said.startswith(f"error: {ERRORS[kind][1]}") and "start the same command again" in said
    assert not out.exists() and (tmp_path / "f.npy.unfinished").exists()
    assert _run(weights, folder, out) == 0


class Allocating(int):
    """A number of threads; a process of the pool makes tensors before it begins them, and fails with their page faults."""

    def __mul__(self, ahead: int) -> int:
        if multiprocessing.parent_process() is None:
            return int(self) * ahead
        faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
        for _ in range(21):
            torch.ones(8 << 20)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        raise RuntimeError(f"faults: {faults[1] - faults[0]} {faults[-1] - faults[1]};")


def test_the_processes_of_the_pool_keep_the_memory_that_they_free(
    weights: Path, crops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = embed.run
    monkeypatch.setattr(embed, "run", lambda options: run(argparse.Namespace(**vars(options) | {"threads": Allocating(2)})))
    assert _run(weights, crops, tmp_path / "f.npy", "--processes", 2) == 1
    first, later = map(int, one_line(capsys, "embedding").partition("faults: ")[2].partition(";")[0].split())
    assert later < 5 * first or not keep_freed_memory()  # of 20 tensors, and of one


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_of_memory_are_told_from_others(kind: str):
    error, says = ERRORS[kind]
    said = str(embed_parts.in_words(error))
    assert said.startswith(says) and "\n" not in said and ("--processes" in said) == (says == "the memory is full")


def test_when_the_run_is_killed_its_processes_end(many: Path, tmp_path: Path):
    write_tensors(weights := tmp_path / "weights.safetensors", _network("mbf").state_dict())
    words = [str(weights), str(many), "--out", str(tmp_path / "f.npy"), *FLAGS, "--backbone", "mbf", "--processes", "2"]
    started = Started(main, [words], tmp_path)
    own = started.processes[0].pid
    assert own is not None
    wait_for(lambda: (path := tmp_path / "f.npy.unfinished").exists() and b'{"part"' in path.read_bytes())
    workers = [pid for server in _children(own) for pid in _children(server)]
    assert len(workers) == 2
    os.kill(own, signal.SIGKILL)
    wait_for(lambda: not any(map(_is_running, workers)))
    assert started.wait().returncode == -signal.SIGKILL
