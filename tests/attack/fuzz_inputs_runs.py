"""Inputs that hold networks: checkpoints, weights, files of arcface_torch; and the lists of IJB."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load, save

from utils.checkpoint.tensor_file import HASH

from .fuzz_files import Case, Entry, Fifo, Folder, Link
from .fuzz_grammar import Rng, change_tree, changed_save, damage, evil_pickle, evil_zip, pick, saved, tensor
from .fuzz_inputs import Input, Maker, Sound
from .fuzz_inputs_sets import changed_header
from .fuzz_seeds import CHECKPOINT, CONFIG, files_below

_SIZES = ["--backbone", "r18", "--width", "0.015625", "--embedding-size", "16"]
_EVAL = ["--data", ".", "--targets", "tiny", "--threads", "1", "--batch-size", "16"]
_RESUME = ["train", "tiny.yaml", "train.max_steps=3"]
_TRAINER, _BACKBONE = f"{CHECKPOINT}/trainer.pt", f"{CHECKPOINT}/backbone.safetensors"
_SHARD, _MANIFEST = f"{CHECKPOINT}/softmax_00000_of_00001.safetensors", f"{CHECKPOINT}/manifest.json"


def inputs(seeds: Path) -> dict[str, Input]:
    """Return the inputs by name, from the seeds of fuzz_seeds.make_seeds."""
    run = files_below(seeds / "run")
    kept: Sound = {name: run[name] for name in (_TRAINER, _BACKBONE, _SHARD, _MANIFEST, "tiny.yaml")}
    kept[_MANIFEST] = json.dumps({**json.loads(run[_MANIFEST]), "score": 0.5}).encode()
    sets: Sound = {"tiny.bin": files_below(seeds / "pairs")["tiny.bin"]}
    weights = files_below(seeds / "weights")
    arcface: Sound = dict(files_below(seeds / "arcface"))
    ijb: Sound = {f"ijb/{name}": data for name, data in files_below(seeds / "ijb").items()}
    return {
        "manifest": Input({**kept, **sets}, [_manifest], 700, 5),
        "run-folder": Input({**kept, **sets}, [_folder], 700, 5),
        "trainer": Input(kept, [_changed(_TRAINER, _RESUME)], 700, 5),
        "centres": Input(kept, [_changed(_SHARD, _RESUME, *_CENTRES)], 700, 5),
        "backbone": Input({**kept, **sets}, [_changed(_BACKBONE, _RESUME, ["eval", "runs/tiny", *_EVAL])], 700, 5),
        "weights": Input(sets, [_weights(weights), _init(weights)], 700, 5),
        "arcface-torch": Input(arcface, [_arcface_files], 700, 5),
        "ijb": Input({**kept, **ijb}, [_ijb], 700, 5),
    }


_CENTRES = (
    ["scripts.checkpoint", "show", "runs/tiny"],
    ["scripts.checkpoint", "merge", "runs/tiny", "centres.safetensors"],
    ["scripts.checkpoint", "merge", "runs/tiny", "centres.pt"],
    ["scripts.checkpoint", "reshard", "runs/tiny", "3", "out"],
    ["scripts.arcface_torch.export_checkpoint", "runs/tiny", "out", "--ranks", "2"],
)

# ---- checkpoints


def _sealed(files: dict[str, Entry], sound: Sound) -> dict[str, Entry]:
    """Return the files with a manifest of matching sizes and hashes, so that no checksum rejects them."""
    manifest = json.loads(bytes(sound[_MANIFEST] or b""))  # type: ignore[arg-type]
    for name, entry in manifest["files"].items():
        data = files.get(f"{CHECKPOINT}/{name}")
        if isinstance(data, bytes):
            entry |= {"size": len(data), HASH: xxhash.xxh3_128(data).hexdigest()}
    return {**files, _MANIFEST: json.dumps(manifest).encode()}


def _manifest(sound: Sound, rng: Rng) -> Case:
    data = bytes(sound[_MANIFEST] or b"")  # type: ignore[arg-type]
    if rng.random() < 0.75:
        data = json.dumps(change_tree(json.loads(data), rng)).encode()
    elif rng.random() < 0.3:
        data = pick(
            rng, (b"", b"null", b"[]", b"[" * 5000, b"{" * 5000, b'{"format": ' + b"9" * 5000 + b"}", b"\xff\xfe", b'"\\ud800"')
        )
    else:
        data = damage(data, [data], rng)
    commands = (
        _RESUME,
        [*_RESUME, "checkpoint.verify=true"],
        ["scripts.checkpoint", "verify", "runs/tiny"],
        ["eval", "runs/tiny", *_EVAL],
        ["eval", "runs/tiny", "--best", *_EVAL, "--report", "report"],
        ["train", "tiny.yaml", "run.name=other", "train.max_steps=1", "init.backbone=runs/tiny", "init.head=runs/tiny"],
        *_CENTRES,
    )
    return Case(list(pick(rng, commands)), {_MANIFEST: data})


_PLACES = [
    *(f"runs/tiny/{name}" for name in (".lock", ".holder", "config.yaml", "train.log", "metrics.jsonl", "tensorboard")),
    *(f"runs/tiny/{name}" for name in ("results.json", "results.md", "verification.png", "checkpoints", "evaluation", "best")),
    *(f"runs/tiny/checkpoints/{name}" for name in (".step_00000003.partial", ".step_00000002.deleted", "step_00000003")),
    *(f"runs/tiny/evaluation/{name}" for name in ("report.html", "results.json", "results.md", "verification.png")),
    *(_MANIFEST, _BACKBONE, _TRAINER, _SHARD, "card/card.md", "card/card.yaml"),
]


def _folder(sound: Sound, rng: Rng) -> Case:
    """Put links, pipes and folders in the places of the files and folders of a run, and of what is written about it."""
    files: dict[str, Entry] = {}
    for name in rng.choice(_PLACES, int(rng.integers(1, 4)), replace=False).tolist():
        if any(other.startswith(f"{name}/") or name.startswith(f"{other}/") for other in files):
            continue  # what lies below a link is no longer in the folder of the case
        files |= {below: None for below in sound if below.startswith(f"{name}/")}
        out = "../" * (name.count("/") + 1)
        target = pick(rng, (f"{out}canary", f"{out}elsewhere", out, out, "/dev/full", ".", name))
        files[name] = pick(rng, (Link(target), Link(target), Link(target), Fifo(), Folder(), b"\0" * 99))
    commands = (
        _RESUME, _RESUME, [*_RESUME, "--check"], ["eval", "runs/tiny", *_EVAL], ["scripts.checkpoint", "show", "runs/tiny"],
        ["scripts.deploy.card", "runs/tiny", "--out", "card"],
    )  # fmt: skip
    return Case(list(pick(rng, commands)), files)


def _changed(name: str, *commands: list[str]) -> Maker:
    """Return a maker that changes one file of a checkpoint."""

    def make(sound: Sound, rng: Rng) -> Case:
        seed = bytes(sound[name] or b"")  # type: ignore[arg-type]
        kind = rng.random()
        if kind < 0.2:
            data = damage(seed, [seed], rng)
        elif name.endswith(".pt"):
            data = changed_save(seed, rng) if kind < 0.85 else pick(rng, (evil_zip, evil_pickle))(rng)
        else:
            data = changed_header(seed, rng) if kind < 0.6 else _other_tensors(seed, rng)
        files: dict[str, Entry] = {name: data}
        return Case(list(pick(rng, commands)), _sealed(files, sound) if rng.random() < 0.9 else files)

    return make


def _other_tensors(data: bytes, rng: Rng) -> bytes:
    """Return a valid .safetensors file with other tensors than before."""
    tensors = load(data)
    for _ in range(int(rng.geometric(0.6))):
        name = str(pick(rng, sorted(tensors)))
        new = tensor(tensors[name], rng) if rng.random() < 0.8 else None
        if (
            not isinstance(new, torch.Tensor)
            or new.layout != torch.strided
            or new.is_quantized
            or new.is_meta
            or new.numel() > 10**6
        ):
            del tensors[name]
            new = torch.full((2,), math.nan)
            name = str(pick(rng, ("x", "../x", "", "\x1b[2J", "a\nb", name)))
        tensors[name] = new.detach().contiguous()
        if not tensors:
            break
    return bytes(save(tensors))


# ---- weights


def _evil_weights(weights: dict[str, bytes], rng: Rng) -> tuple[str, bytes]:
    """Return the name and the bytes of a hostile weights file."""
    seeds = [data for name, data in weights.items() if name.endswith((".pt", ".pth"))]
    kind = rng.random()
    if kind < 0.35:
        data = changed_save(weights["weights.pt"], rng)
    elif kind < 0.55:
        data = pick(rng, (evil_zip, evil_pickle))(rng)
    elif kind < 0.75:
        data = damage(pick(rng, seeds), seeds, rng)
    else:
        data = pick(rng, seeds)
    return str(pick(rng, ("w.pt", "w.pth", "w.pt2", "w.bin", "w.safetensors", "w.zip", "w"))), data


def _weights(weights: dict[str, bytes]) -> Maker:
    def make(sound: Sound, rng: Rng) -> Case:
        name, data = _evil_weights(weights, rng)
        if rng.random() < 0.25 and "network.onnx" in weights:
            name, data = "w.onnx", damage(weights["network.onnx"], [weights["network.onnx"]], rng)
        elif rng.random() < 0.3:
            name, data = "w.safetensors", changed_header(_as_safetensors(weights), rng)
        words = [] if name == "w.onnx" or rng.random() < 0.25 else _SIZES
        return Case(["eval", name, *words, *_EVAL], {name: data})

    return make


def _as_safetensors(weights: dict[str, bytes]) -> bytes:
    import io

    return bytes(save({key: one.contiguous() for key, one in torch.load(io.BytesIO(weights["weights.pt"])).items()}))


def _init(weights: dict[str, bytes]) -> Maker:
    """Return a maker of training runs that start from hostile weights."""

    def make(sound: Sound, rng: Rng) -> Case:
        name, data = _evil_weights(weights, rng)
        words = ["train", "tiny.yaml", "train.max_steps=1", f"init.backbone={name}"]
        if rng.random() < 0.4:
            centres = torch.randn(12, 16)
            files: dict[str, Entry] = {"centres.pt": changed_save(_saved({"weight": centres}), rng)}
            if rng.random() < 0.4:
                files = {"centres.pt": _saved(tensor(centres, rng))} if rng.random() < 0.5 else {"centres.pt": evil_zip(rng)}
            words = ["train", "tiny.yaml", "train.max_steps=1", "init.backbone=w.pt", "init.head=centres.pt"]
            return Case(words, {"tiny.yaml": CONFIG.encode(), "w.pt": weights["weights.pt"], **files})
        return Case(words, {"tiny.yaml": CONFIG.encode(), name: data})

    return make


def _saved(tree: Any) -> bytes:
    try:
        return saved(tree)
    except (RuntimeError, NotImplementedError, UnicodeEncodeError, RecursionError):
        return saved(torch.zeros(3))


# ---- arcface_torch


def _arcface_files(sound: Sound, rng: Rng) -> Case:
    year = str(pick(rng, ("old", "middle", "new", "ranks")))
    names = [name for name in sound if name.startswith(f"{year}/")]
    files: dict[str, Entry] = {}
    for name in sorted(set(rng.choice(names, int(rng.integers(1, 3))).tolist())):
        seed = bytes(sound[name] or b"")  # type: ignore[arg-type]
        kind = rng.random()
        if kind < 0.6:
            files[name] = changed_save(seed, rng)
        else:
            files[name] = damage(seed, [seed], rng) if kind < 0.8 else pick(rng, (evil_zip, evil_pickle))(rng)
        if rng.random() < 0.1:
            files[name] = None
    if rng.random() < 0.1:
        files[f"{year}/rank_1_softmax_weight.pt"] = files[next(iter(files))]
    more = pick(rng, ([], [], ["--num-classes", "20", "--fill", "random"], ["--ranks", "2"]))
    return Case(["scripts.arcface_torch.import_checkpoint", year, "runs/new", *more], files)


# ---- IJB


def _ijb(sound: Sound, rng: Rng) -> Case:
    files: dict[str, Entry] = {}
    lists = [name for name in sound if "/meta/" in name]
    words = (
        "-1", "nan", "inf", "1e308", "99999999999", "2147483648", "", "x", "../canary", "/dev/zero", "\x1b[2J", "\xff", "1e9",
        "0", "1.5", "nowhere.jpg",
    )  # fmt: skip
    for name in sorted(set(rng.choice(lists, 2).tolist())):
        rows = [line.replace(",", " , ").split(" ") for line in bytes(sound[name] or b"").decode().splitlines()]  # type: ignore[arg-type]
        for _ in range(int(rng.integers(3))):
            row = pick(rng, rows)
            row[int(rng.integers(len(row)))] = str(pick(rng, words))
        data = "\n".join(" ".join(row).replace(" , ", ",") for row in rows).encode("latin-1", "replace") + b"\n"
        files[name] = damage(data, [data], rng) if rng.random() < 0.3 else data
        if rng.random() < 0.05:
            files[name] = pick(rng, (None, b"", b"\0" * 99))
    return Case(["eval", "runs/tiny", "--targets", "ijbc:ijb", "--threads", "1", "--batch-size", "16"], files)
