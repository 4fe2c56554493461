"""The restricted pickle reader: hostile and broken files are refused, and nothing in them runs."""

import io
import json
import pickle
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from eval.pair_sets import safe_pickle
from eval.pair_sets.safe_pickle import UnsafePickleError, load

ROOT = Path(__file__).parent.parent
FIXTURES = Path(__file__).parent / "fixtures" / "bin" / "bad"
JPEGS = [cv2.imencode(".jpg", np.full((112, 112, 3), 60 * i, dtype=np.uint8))[1].tobytes() for i in range(4)]
SAME = [True, False]


def _pickle(*contents: Any) -> bytes:
    return pickle.dumps(contents, protocol=4)


def _archive() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, first=np.zeros(9))
    return buffer.getvalue()


def _bad_files() -> dict[str, tuple[bytes, str]]:
    """Return, by name, the bytes of files that must be refused, and a part of the reason."""
    run = b"(S'touch /tmp/PWNED_BY_BIN_test'\ntR."
    text = b"X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20)
    encode_again = b"h\x00h\x01h\x02\x86R0"
    doubled = b"".join(b"q\x00h\x00\x86" for _ in range(60))
    reconstruct = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02%bK\x00K\x01\x87R"
    return {
        "system": (b"cos\nsystem\n" + run, "'os.system'"),
        "exec": (b"c__builtin__\nexec\n" + run, "'__builtin__.exec'"),
        "eval of Python 3": (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "'builtins.eval'"),
        "name with line feed": (b"\x80\x04\x8c\x02o\n\x8c\x04eval\x93.", r"'o\\n.eval'"),
        "endless name": (b"\x80\x04X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"\x8c\x01b\x93.", "an import"),
        "dotted": (b"\x80\x04\x8c\x05numpy\x8c\x0bdtype.dtype\x93.", "'numpy.dtype.dtype'"),
        "new object": (b"\x80\x02cnumpy\nndarray\n)\x81.", "opcode 0x81"),
        "extension": (b"\x80\x02\x82\x01.", "opcode 0x82"),
        "persistent": (b"Pname\n.", "opcode 0x50"),
        "array called": (b"\x80\x02cnumpy\nndarray\nK\x01\x85U\x01OU\x08AAAAAAAA\x87R.", "calls something"),
        "array of pointers": (reconstruct + b"(K\x01K\x01\x85" + dtype % b"O8" + b"\x89U\x08AAAAAAAAtb.", "content"),
        "array of nothing": (reconstruct + b"(K\x01K\xff\x85" + dtype % b"S0" + b"\x89U\x00tb.", "of a type"),
        "array too short": (reconstruct + b"(K\x01K\xff\x85" + dtype % b"u1" + b"\x89U\x01atb.", "does not fit its shape"),
        "state of a name": (b"\x80\x02cnumpy\nndarray\n}b.", "sets the state"),
        "state of a list": (b"\x80\x02]}b.", "sets the state"),
        "bytes of a size": (b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "of what are none"),
        "memo far away": (b"\x80\x02]r\xff\xff\xff\x7f.", "must be the pair"),
        "tuple to hash": (b"\x80\x02}N" + doubled + b"Ns.", "other keys than strings"),
        "doubled tuples": (b"\x80\x02N" + doubled + b".", "entry 0 of issame"),
        "encoded again and again": (
            b"\x80\x02c_codecs\nencode\nq\x00" + text + b"q\x01X\x06\x00\x00\x00latin1q\x02" + encode_again * 5000 + b".",
            "more bytes than it has",
        ),
        "nested": (b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "must be the pair"),
        "long number": (b"\x80\x02\x8a\x11" + b"\x01" * 17 + b".", "more than 16 bytes"),
        "number of 2 GiB": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "not enough data in stream to read long4"),
        "long number in text": (b"L" + b"9" * 100_000 + b"L\n.", "a line of 100002 bytes"),
        "number of 17 bytes in text": (b"I" + b"9" * 40 + b"\n.", "more than 16 bytes"),  # many would be a shape
        "string of 2 GiB": (b"\x80\x02T\xff\xff\xff\x7fabc.", "expected 2147483647 bytes in a string4, but only 4 remain"),
        "frame": (b"\x80\x04\x95" + b"\xff" * 8 + b".", "damaged"),
        "protocol 200": (b"\x80\xc8N.", "protocol 0 to 5"),
        "two pickles": (_pickle(JPEGS, SAME) + _pickle(JPEGS, SAME), "bytes follow the pickle"),
        "line feed behind": (_pickle(JPEGS, SAME) + b"\n", "1 bytes follow"),
        "cut": (_pickle(JPEGS, SAME)[:-100], r"damaged one \(byte \d+: expected \d+ bytes in"),
        "empty": (b"", "0 bytes"),
        "zeros": (bytes(1000), "no pickle"),
        "random": (np.random.default_rng(0).bytes(1000), "no pickle of plain data .opcode 0x5f at byte 0."),
        "stack empty": (b"\x80\x04a.", "damaged"),
        "stop only": (b".", "damaged"),
        "archive": (_archive(), "zip archive"),
        "jpeg": (JPEGS[0], "a JPEG image"),
        "decoded": (_pickle([np.zeros((112, 112, 3), np.uint8)] * 4, SAME), "array of pixels"),
        "floats": (_pickle([np.zeros(9)] * 4, SAME), "of a type"),
        "int8": (_pickle([np.zeros(9, np.int8)] * 4, SAME), "other numbers"),
        "not an image": (_pickle([*JPEGS[:3], b"GIF89a"], SAME), "image 3 .6 bytes. is not a JPEG"),
        "text as image": (_pickle([*JPEGS[:3], "text"], SAME), "image 3 must be .* its type is str"),
        "three": (_pickle(JPEGS, SAME, []), "must be the pair"),
        "set": (pickle.dumps({1, 2}, protocol=4), "opcode 0x8f"),
        "too few": (_pickle(JPEGS[:3], SAME), "it has 3 for 2 pairs"),
        "no pairs": (_pickle(JPEGS, []), "it has 4 for 0 pairs"),
        "maybe": (_pickle(JPEGS, [True, None]), "entry 1 of issame"),
        "half": (_pickle(JPEGS, [True, 0.5]), "entry 1 of issame"),
        "two": (_pickle(JPEGS, np.array([1, 2])), "entry 1 of issame"),
        "text": (_pickle(JPEGS, "TF"), "issame must be"),
        "two axes": (_pickle(JPEGS, np.array([[True], [False]])), "issame must be .* one axis"),
    }


BAD = _bad_files()

_REFUSE_ALL = """
import json, os, resource, sys
from eval.pair_sets.bin_file import read_bin

with open("/proc/self/statm") as file:
    in_use = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), -1))
for path in sys.stdin.read().splitlines():
    try:
        read_bin(path)
        message = None
    except ValueError as error:
        message = str(error)
    print(json.dumps([path, message]), flush=True)
"""


def _check_refusals(paths: list[Path]) -> dict[str, str]:
    """Open files in a process of little memory; return what was said of each, after the checks that hold for all."""
    before = set(Path("/tmp").glob("PWNED_BY_BIN_*"))
    names = "\n".join(map(str, paths))
    result = subprocess.run(
        [sys.executable, "-c", _REFUSE_ALL], input=names, capture_output=True, text=True, cwd=ROOT, timeout=300
    )  # a hang would take for ever
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == len(paths), f"died of {paths[len(rows)]}: {result.stderr[-1000:]}"
    assert set(Path("/tmp").glob("PWNED_BY_BIN_*")) == before, "a file ran its command"
    for path, message in rows:
        assert message is not None, f"{path} was read"
        assert message.startswith(f"{path}: "), message
        assert "\n" not in message
        assert len(message) < len(path) + 250
    return {Path(path).name: message for path, message in rows}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_hostile_and_broken_files_are_refused_in_one_line_without_running_anything(tmp_path: Path) -> None:
    for name, (data, _) in BAD.items():
        (tmp_path / name).write_bytes(data)
    messages = _check_refusals([*(tmp_path / name for name in BAD), *sorted(FIXTURES.iterdir())])
    for name, (_, reason) in BAD.items():
        assert re.search(reason, messages[name].removeprefix(str(tmp_path))), f"{name}: {messages[name]}"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
def test_every_hostile_oracle_file_is_refused(face_oracle: Path) -> None:
    _check_refusals(sorted((face_oracle / "oracle" / "bin" / "bad").iterdir()))


@pytest.mark.parametrize("opcode", [b"S", b"F", b"c"])
def test_a_line_of_nonsense_takes_little_more_memory_than_its_bytes(opcode: bytes) -> None:
    data = opcode + bytes(1 << 20) + b"\n."
    tracemalloc.start()
    with pytest.raises(UnsafePickleError, match="damaged"):
        load(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(data)


def test_a_pickle_of_too_many_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pickle, "_MAX_STEPS", 1000)
    with pytest.raises(UnsafePickleError, match="more than 1000 steps"):
        load(b"N0" * 501 + b"N.")


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_loaded_as_pickle_loads_it(protocol: int) -> None:
    shared = ["shared"]
    data: list[Any] = [None, True, False, 0, -1, 255, 256, 70_000, -(2**40), 2**63, 0.5, "text \u20ac\n", b"\0\xff"]
    data += [(), (1,)]
    data += [(1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1], {"a": 1, b"b": {}}, shared, shared, "x" * 300, b"y" * 300]
    assert load(pickle.dumps(data, protocol=protocol)) == data
