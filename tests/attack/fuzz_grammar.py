"""Generates hostile contents: bytes, values, pickles and tensors that are well formed but wrong."""

import copy
import io
import pickle
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .fuzz_files import MARKER

Rng = np.random.Generator
WORDS = (0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 29, 2 << 29, 3 << 29, 7 << 29, (1 << 29) - 1, 0xCED7230A)
_LARGEST_SAVE = 16 << 20  # bytes
_TOUCH = f"../{MARKER}"  # relative, because a payload runs in the case's folder
# callables that a pickle can name, with arguments that would create the marker
_CALLS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("os", "system", (f"touch {_TOUCH}",)), ("posix", "system", (f"touch {_TOUCH}",)), ("os", "mkdir", (_TOUCH,)),
    ("os", "open", (_TOUCH, 0o102)), ("subprocess", "Popen", (["touch", _TOUCH],)),
    ("subprocess", "check_output", (["touch", _TOUCH],)), ("builtins", "open", (_TOUCH, "w")), ("io", "open", (_TOUCH, "w")),
    ("_io", "FileIO", (_TOUCH, "w")), ("__builtin__", "file", (_TOUCH, "w")), ("builtins", "exec", (f"open({_TOUCH!r}, 'w')",)),
    ("builtins", "eval", (f"open({_TOUCH!r}, 'w')",)), ("builtins", "__import__", ("os",)),
    ("builtins", "getattr", ("", "join")), ("shutil", "copyfile", ("/proc/self/status", _TOUCH)),
    ("pathlib", "Path.touch", (_TOUCH,)), ("numpy", "memmap", (_TOUCH, "u1", "w+", 0, 8)),
    ("numpy", "savetxt", (_TOUCH, [1.0])), ("numpy", "load", ("payload.npy", None, True)),
    ("torch", "from_file", (_TOUCH, True, 8)), ("torch", "load", ("payload.pt",)), ("torch", "save", (1, _TOUCH)),
    ("torch.storage", "_load_from_bytes", (pickle.dumps(1),)), ("torch.serialization", "load", ("payload.pt",)),
    ("torch._utils", "_rebuild_tensor_v2", (1, 2, 3, 4, 5, 6)), ("torch.jit", "load", ("payload.pt",)),
    ("torch.hub", "load", ("x", "y")), ("codecs", "open", (_TOUCH, "w")), ("logging", "FileHandler", (_TOUCH,)),
    ("runpy", "run_path", ("payload.py",)), ("importlib", "import_module", ("antigravity",)),
    ("webbrowser", "open", ("http://localhost:9",)), ("socket", "create_connection", (("127.0.0.1", 9),)),
    ("collections", "OrderedDict", ([1],)), ("numpy.core.multiarray", "_reconstruct", (1, 2, 3)),
    ("numpy._core.multiarray", "scalar", (1, 2)), ("_codecs", "encode", ("x" * 9, "rot13")),
    ("copyreg", "_reconstructor", (dict, dict, {})),
)  # fmt: skip


def pick(rng: Rng, values: Sequence[Any]) -> Any:
    """Return one of the values."""
    return values[int(rng.integers(len(values)))]


# ---- bytes


def damage(data: bytes, others: Sequence[bytes], rng: Rng) -> bytes:
    """Return the bytes with one or more changes: bits, bytes, sizes, cuts, repeats, and parts of other files."""
    changed = bytearray(data)
    for _ in range(int(rng.geometric(0.4))):
        _change(changed, others, rng)
    return bytes(changed)


def _change(data: bytearray, others: Sequence[bytes], rng: Rng) -> None:
    """Make one change to the bytes, in place."""
    place = int(rng.integers(len(data) + 1)) if rng.random() < 0.7 else int(rng.integers(min(len(data), 64) + 1))
    length = int(rng.integers(1, 40))
    kind = int(rng.integers(8))
    if kind == 0 and place < len(data):
        data[place] ^= 1 << int(rng.integers(8))
    elif kind == 1 and place < len(data):
        data[place] = int(rng.integers(256))
    elif kind == 2:
        data[place : place + 4] = pick(rng, WORDS).to_bytes(4, "little" if rng.random() < 0.8 else "big")
    elif kind == 3:
        del data[place : place + length]
    elif kind == 4:
        data[place:place] = rng.bytes(length)
    elif kind == 5:
        data[place:place] = data[place : place + length]
    elif kind == 6 and rng.random() < 0.3:
        del data[place:]
    elif others:
        source = pick(rng, others)
        begin = int(rng.integers(len(source) + 1))
        data[place : place + length] = source[begin : begin + length]


# ---- plain values

TEXTS = (
    "", "text", "../../x", "/etc/passwd", "a\0b", "a\x1b[2J\x1b]0;x\x07", "a\nerror: b", "\u202eabc", "x" * 5000, "\ud800",
    "nan", "1e999",
)  # fmt: skip
_NUMBERS = (None, True, False, -1, 0, 1, 2, 7, 10**9, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**30), 1.5, -0.0, 1e-320, 1e308)


def value(rng: Rng) -> Any:
    """Return a plain value that a program probably does not expect."""
    kind = int(rng.integers(8))
    if kind < 3:
        return pick(rng, _NUMBERS)
    if kind == 3:
        return pick(rng, (float("nan"), float("inf"), float("-inf")))
    if kind < 6:
        return pick(rng, TEXTS)
    deep: Any = [] if rng.random() < 0.5 else {}
    for _ in range(int(pick(rng, (0, 1, 2, 40, 300)))):
        deep = [deep] if rng.random() < 0.7 else {"a": deep}
    return deep


def change_tree(tree: Any, rng: Rng, lie: Callable[[Any, Rng], Any] = lambda old, rng: value(rng)) -> Any:
    """Return a copy of nested dicts and lists with one or more entries replaced, deleted, added or copied."""
    tree = copy.deepcopy(tree)
    for _ in range(int(rng.geometric(0.6))):
        spots = list(_spots(tree))
        if not spots:
            return lie(tree, rng)
        holder, key = pick(rng, spots)
        kind = rng.random()
        if kind < 0.65:
            holder[key] = lie(holder[key], rng)
        elif kind < 0.8:
            del holder[key]
        elif kind < 0.9:
            try:
                other, name = pick(rng, spots)
                holder[key] = copy.deepcopy(other[name])
            except (KeyError, IndexError, RecursionError):  # deleted already, or nested too deeply
                holder[key] = None
        elif isinstance(holder, dict):
            holder[pick(rng, ("", "x", "../x", "a\0b", "\x1b[2J", 7, "step", "slots"))] = value(rng)
        else:
            holder.append(value(rng))
    return tree


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Return (holder, key) of all entries in nested dicts and lists."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            waiting.append(holder[key])
    return found


# ---- pickles


def evil_pickle(rng: Rng) -> bytes:
    """Return a pickle that calls a forbidden function, encoded in a random way, or one that costs memory or time."""
    module, name, words = pick(rng, _CALLS)
    head = pick(rng, (b"", b"\x80\x02", b"\x80\x04", b"\x80\x05", b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little")))
    arguments = pickle.dumps(tuple(words), 2)[2:-1]
    named = f"c{module}\n{name}\n".encode()
    if rng.random() < 0.5:
        named = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"
    first = b"".join(pickle.dumps(word, 2)[2:-1] for word in words)
    bodies = (
        named + arguments + b"R.", b"(" + first + f"i{module}\n{name}\n.".encode(), b"(" + named + first + b"o.",
        named + arguments + b"\x81.", named + arguments + b"}\x92.", b"]" + named + arguments + b"Ra.",
        b"}" + named + arguments + b"RK\x01s.", b"}K\x01" + named + arguments + b"Rs.",
        named + b")\x81}\x8c\x08__dict__" + named + arguments + b"Rsb.", b"\x82\x01.", b"\x84\xff\xff\xff\x7f.", b"P1\n.",
        first + b"Q.", b"\x8b" + (1 << 30).to_bytes(4, "little") + b"\xff" * 8 + b".",
        b"\x8e" + (1 << 62).to_bytes(8, "little") + b"abc.", b"\x96" + (1 << 40).to_bytes(8, "little") + b"abc.",
        b"L" + b"9" * 6000 + b"L\n.", b"]q\0" + b"(h\0h\0h\0h\0h\0h\0h\0h\0lq\0" * 60 + b".",
        b"(" * 100_000 + b"l" * 99_999 + b".", b"]q\0h\0a.", b"r" + b"\xff" * 4 + b".",
        b"]r" + (1 << 31).to_bytes(4, "little") + b".", b"]p99999999999999999999\n.",
    )  # fmt: skip
    return head + pick(rng, bodies)


def evil_zip(rng: Rng, seed: bytes = b"") -> bytes:
    """Return an archive like those of torch.save in which data.pkl is an evil pickle, with wrong members besides."""
    out = io.BytesIO()
    compression = pick(rng, (zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(out, "w", compression) as archive:

        def add(name: str, data: str | bytes) -> None:  # without the time of day, so that a case repeats
            archive.writestr(zipfile.ZipInfo(name), data, compression)

        add("archive/data.pkl", evil_pickle(rng))
        add("archive/version", pick(rng, ("3\n", "", "99999999999999999999", "x")))
        add("archive/byteorder", pick(rng, ("little", "big", "", "x")))
        if rng.random() < 0.5:
            add("archive/data/0", b"\0" * int(pick(rng, (0, 4, 1 << 20))))
        if rng.random() < 0.3:
            add("archive/code/__torch__.py", "def f():\n  pass\n")
            add("archive/constants.pkl", evil_pickle(rng))
        if rng.random() < 0.2:
            add(pick(rng, ("../x", "/x", "archive/data/1", "archive/.data/serialization_id")), b"x")
    return out.getvalue()


# ---- tensors


def tensor(old: Any, rng: Rng) -> Any:
    """Return a replacement of a tensor with wrong shape, type, memory or numbers; for other objects, a plain value."""
    if not isinstance(old, Tensor):
        return value(rng)
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)
    lies: tuple[Callable[[], Any], ...] = (
        lambda: torch.tensor(0.5),
        lambda: old.reshape(-1)[:1].clone(),
        lambda: old.reshape(1, *old.shape),
        lambda: old.reshape(-1)[:1].clone().expand(10**9),
        lambda: torch.zeros(1).as_strided(old.shape, [0] * old.dim()),
        lambda: torch.zeros(1).expand(10**9, 16),
        lambda: torch.zeros(1, 16).expand(10**7, 16),
        lambda: torch.empty(10**12, device="meta"),
        lambda: torch.empty_like(old, device="meta"),
        lambda: old.to_sparse(),
        lambda: torch.sparse_coo_tensor(torch.tensor([[10**6]]), torch.ones(1), (10**9,), check_invariants=True),
        lambda: old.to(torch.float8_e4m3fn),
        lambda: old.to(pick(rng, dtypes)),
        lambda: torch.full_like(old.float(), float(pick(rng, (float("nan"), float("inf"), 3e38)))),
        lambda: old.flatten().flip(0)[: int(rng.integers(old.numel() + 1))],
        lambda: torch.empty(0),
        lambda: torch.empty(0, 10**6, 10**6),
        lambda: old.mT if old.dim() >= 2 else old,
        lambda: old.tolist(),
        lambda: torch.nn.Parameter(old.float()),
        lambda: {"weight": old},
        lambda: value(rng),
    )
    try:
        return pick(rng, lies)()
    except (RuntimeError, MemoryError):  # an empty tensor, which cannot be expanded; a list of 10**9 numbers
        return torch.tensor(0.5)


def saved(tree: Any) -> bytes:
    """Return the file that torch.save writes; RuntimeError beyond 16 MiB, as of a copied expanded tensor: valid, only long."""
    out = io.BytesIO()
    torch.save(tree, out)
    if out.tell() > _LARGEST_SAVE:
        raise RuntimeError(f"a file of {out.tell()} bytes")
    return out.getvalue()


def changed_save(data: bytes, rng: Rng) -> bytes:
    """Return a file of torch.save with wrong values in it."""
    tree = torch.load(io.BytesIO(data), weights_only=True)
    for _ in range(9):
        try:
            return saved(change_tree(tree, rng, tensor))
        except (RuntimeError, pickle.PicklingError, UnicodeEncodeError, NotImplementedError, RecursionError):
            continue  # torch cannot save it
    return data
