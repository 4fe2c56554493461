"""Makes the valid files that the fuzzer starts from, with this project's own writers and a training run of two steps."""

import contextlib
import io
import os
import sqlite3
import tarfile
import traceback
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import torch

from backbones import build_backbone
from data.recordio.image_record import RecordSetWriter
from data.tar_dataset import TarDataset
from eval.pair_sets.bin_file import read_pairs, write_bin, write_safetensors
from utils.files import write_csv

from .fuzz_cases import find_program
from .fuzz_grammar import saved

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures"
CONFIG = (
    "run: {name: tiny, output: runs, threads: 1, device: cpu}\n"
    "data: {source: synthetic, num_classes: 12, num_images: 48, index_cache: 'off', threads: 1, prefetch: 1}\n"
    "backbone: {name: r18, width: 0.015625, embedding_size: 16}\n"
    "loss: {name: cosface, margin: 0.2, scale: 16}\n"
    "head: {kernels: plain}\n"
    "train: {batch_size: 8, epochs: 1}\n"
    "optimizer: {lr: 0.05}\n"
    "checkpoint: {every: 0, background: false}\n"
    "log: {every: 1}\n"
)
CHECKPOINT = "runs/tiny/checkpoints/step_00000002"
_CLASSES, _DIM = 12, 16
_PEOPLE = 22  # of a table: as many as cleaning needs


def encoded(seed: int, ending: str = ".jpg", side: int = 112) -> bytes:
    """Return a picture of coloured tiles as a file of this kind."""
    tiles = np.random.default_rng(seed).integers(0, 256, (7, 7, 3)).astype(np.uint8)
    return bytes(cv2.imencode(ending, cv2.resize(tiles, (side, side), interpolation=cv2.INTER_NEAREST))[1])


def make_seeds(folder: Path) -> None:
    """Write all seeds below a folder, in a child process, because training starts threads, which do not survive a fork."""
    child = os.fork()
    if not child:
        status = 1
        try:
            os.chdir(folder)
            with open("log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                _write_all(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise ValueError(f"the valid files that the fuzzer starts from cannot be made in {folder}; see above")


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by their relative names."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _write_all(folder: Path) -> None:
    for name in ("set", "people", "pairs", "run", "ijb/meta", "ijb/loose_crop", "tar", "arcface", "weights", "tables"):
        (folder / name).mkdir(parents=True)
    _write_pictures(folder)
    with RecordSetWriter(folder / "set") as writer:
        for number in range(6):
            writer.add(number // 2, encoded(number))
    images = [encoded(100 + pair + (side and pair % 2)) for pair in range(20) for side in (0, 1)]
    write_bin(folder / "pairs" / "tiny.bin", images, [not pair % 2 for pair in range(20)])
    write_safetensors(folder / "pairs" / "tiny.safetensors", read_pairs(folder / "pairs" / "tiny.bin"))
    _write_tar(folder / "tar")
    (folder / "run" / "tiny.yaml").write_text(CONFIG)
    os.chdir(folder / "run")
    if find_program("train")(["tiny.yaml", "train.max_steps=2"]):
        raise ValueError("the training of two steps failed")
    os.chdir(folder)
    if find_program("scripts.deploy.enrol")(["run/runs/tiny", "g.gallery", "people"]):
        raise ValueError("the enrolment of the people failed")
    with contextlib.closing(sqlite3.connect("g.gallery", isolation_level=None)) as gallery:  # the same bytes always
        gallery.execute("UPDATE images SET added = 1000000000")
        gallery.execute("UPDATE facts SET network_path = 'run/runs/tiny'")
        gallery.execute("VACUUM")
    _write_arcface(folder / "arcface")
    _write_weights(folder / "weights")
    _write_tables(folder / "tables")


def _write_tables(folder: Path) -> None:
    """Write a table of embeddings, texts about its faces, and the journal of a count that did not end."""
    names = [f"{person:02}/{number}.jpg" for person in range(_PEOPLE) for number in range(2)]
    rng = np.random.default_rng(0)
    vectors = np.repeat(rng.normal(size=(_PEOPLE, 8)), 2, axis=0) + 0.5 * rng.normal(size=(len(names), 8))
    rows = [(name, 0, name.partition("/")[0], 1.0 + number) for number, name in enumerate(names)]
    write_csv(folder / "t.csv", ("name", "face", "person", "norm"), rows)
    np.save(folder / "t.npy", (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32))
    write_csv(folder / "groups.csv", ("name", "kind"), [(name, number // 2 % 2) for number, name in enumerate(names)])
    pairs = [(one, other, int(one[:2] == other[:2]), one[1], other[1]) for one in names for other in names[:9] if one != other]
    write_csv(folder / "pairs.csv", ("p1", "p2", "label", "att1", "att2"), pairs)
    write_csv(folder / "measures.csv", ("name", "sharp"), [(name, number / 7) for number, name in enumerate(names)])
    decisions = [("drop", 0, 0, ""), ("move", 1, 0, 2), ("merge", "", 1, 2), ("split", 3, 1, "1+1")]
    write_csv(folder / "decisions.csv", ("action", "image", "identity", "to"), decisions)
    for name in ("t.npy", "t.csv"):
        os.utime(folder / name, ns=(10**18, 10**18))  # as in every case: a journal knows a table by it
    os.chdir(folder)
    with mock.patch.object(Path, "unlink"):
        if find_program("scripts.analysis.pairs")(["t.npy", "--out", "out"]):
            raise ValueError("the pairs could not be counted")
    for path in (folder / "out").iterdir():
        if path.name != "unfinished":
            path.unlink()


def _write_pictures(folder: Path) -> None:
    """Write people with pictures, and a tiny IJB."""
    names = [f"p{person}/{number}.jpg" for person in range(3) for number in range(2)]
    for seed, name in enumerate(names):
        path = folder / "people" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(seed))
    meta, points = folder / "ijb" / "meta", "40 50 72 50 56 70 44 86 68 86"
    for number in range(6):
        (folder / "ijb" / "loose_crop" / f"{number}.jpg").write_bytes(encoded(number))
    (meta / "ijbc_face_tid_mid.txt").write_text("".join(f"{n}.jpg {n // 2 + 1} {n}\n" for n in range(6)))
    (meta / "ijbc_name_5pts_score.txt").write_text("".join(f"{n}.jpg {points} 0.9\n" for n in range(6)))
    (meta / "ijbc_template_pair_label.txt").write_text("1 2 0\n1 1 1\n2 3 0\n3 3 1\n")
    for part in ("gallery_G1", "gallery_G2", "probe_mixed"):
        (meta / f"ijbc_1N_{part}.csv").write_text("TEMPLATE_ID,SUBJECT_ID\n1,1\n2,2\n3,3\n")


def _write_tar(folder: Path) -> None:
    """Write a shard of pictures with their classes, and the cache of its index."""
    with tarfile.open(folder / "0.tar", "w") as tar:
        for number in range(6):
            for ending, data in (("jpg", encoded(number)), ("cls", str(number // 2).encode())):
                member = tarfile.TarInfo(f"people/{number:05d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    os.utime(folder / "0.tar", ns=(10**18, 10**18))
    TarDataset(folder, folder / "cache")


def _write_arcface(folder: Path) -> None:
    """Write the files of arcface_torch in the formats of three versions, the newest of one rank and of two."""
    torch.manual_seed(1)
    model = build_backbone("r18", _DIM, 1 / 64)
    state, weight = model.state_dict(), torch.randn(_CLASSES, _DIM)
    moments = {n: {"momentum_buffer": torch.zeros_like(p)} for n, p in enumerate(model.parameters())}
    groups = [{"lr": 0.05, "weight_decay": 5e-4, "momentum": 0.9, "params": [n]} for n in range(len(moments) + 1)]
    groups = [{**groups[0], "params": list(moments)}, groups[-1]]

    def newest(shard: torch.Tensor) -> dict[str, object]:
        return {
            "epoch": 2,
            "global_step": 40,
            "state_dict_backbone": state,
            "state_dict_softmax_fc": {"weight": shard},
            "state_optimizer": {
                "state": {**moments, len(moments): {"momentum_buffer": torch.zeros_like(shard)}},
                "param_groups": groups,
            },
            "state_lr_scheduler": {"last_epoch": 40},
        }

    years = {
        "old/backbone.pth": {f"module.{name}": value for name, value in state.items()},
        "old/rank_0_softmax_weight.pt": weight,
        "old/rank_0_softmax_weight_mom.pt": weight,
        "middle/model.pt": state,
        "middle/softmax_fc_gpu_0.pt": {"weight": weight},
        "new/checkpoint_gpu_0.pt": newest(weight),
        "ranks/checkpoint_gpu_0.pt": newest(weight[: _CLASSES // 2].clone()),
        "ranks/checkpoint_gpu_1.pt": newest(weight[_CLASSES // 2 :].clone()),
    }
    for name, tree in years.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(saved(tree))


def _write_weights(folder: Path) -> None:
    """Write a network in each form that evaluation reads; ONNX only if the package onnx is installed."""
    model = build_backbone("r18", _DIM, 1 / 64).eval()
    (folder / "weights.pt").write_bytes(saved(model.state_dict()))
    (folder / "weights.pth").write_bytes(saved({f"module.{name}": value for name, value in model.state_dict().items()}))
    torch.jit.save(torch.jit.script(torch.nn.Flatten()), folder / "script.pt")
    torch.jit.save(torch.jit.script(torch.nn.Flatten()), folder / "program.pt2")
    with contextlib.suppress(ImportError):
        from tests.tiny_networks import MEAN_COLOUR, write_onnx

        write_onnx(folder / "network.onnx", MEAN_COLOUR, 3)
