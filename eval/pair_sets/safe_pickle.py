"""Reads a pickle of plain data and arrays without executing anything.

Verification sets are pickles from the internet, and a pickle is a program: `pickle.load` calls whatever it names. Here a
small interpreter executes only the opcodes that build data. A global is only a name to it: the few globals of genuine sets
become inert stand-ins, and every other one is rejected. So nothing is imported or called, no size is trusted before its
bytes are read, and only strings are ever hashed or compared.

Source: the opcodes in Python's pickletools (protocols 0 to 5). A string of Python 2 becomes bytes, as it does with
`encoding="bytes"`; so does a bytearray. The stand-ins for names, dtypes and arrays store bytes and shapes and check that these
agree, without numpy and mxnet: a numpy array built from a hostile dtype or shape could point anywhere in memory, or allocate
terabytes. Source: `__reduce__` and `__setstate__` of numpy's arrays, scalars and dtypes; NDArray.__reduce__ of mxnet 1.9.1.
"""

import codecs
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

_MAX_STEPS = 4_000_000  # a genuine set takes up to 30 per image
_MAX_DIGITS = 40  # more than any 64-bit number has
_DTYPE = re.compile(r"[<>|=]?([biuSO])([1-9][0-9]{0,8})")  # bool, int, uint, bytes, object
_MX_HEAD = struct.Struct("<Iii")  # magic, storage (0 = dense), number of axes; then an int64 for each axis
_MX_TAIL = struct.Struct("<iii")  # kind of device, its number, type of the items (3 = uint8); then the items


class UnsafePickleError(ValueError):
    """The bytes are not a pickle, or the pickle does more than build data."""


@dataclass(frozen=True)
class Global:
    """The name of something importable, which is never imported."""

    module: str
    name: str


class Dtype:
    """Stands for `numpy.dtype(code)`: kind (a letter), bytes per item, and whether it is big-endian."""

    def __init__(self, code: object) -> None:
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        match = _DTYPE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UnsafePickleError("it holds an array of a type that no verification set has")
        self.kind, self.item_size = match[1], int(match[2])
        self.big_endian = False

    def set_state(self, state: object) -> None:
        """Read the byte order from the state of a dtype; reject fields."""
        if not isinstance(state, tuple) or len(state) < 5 or any(part is not None for part in state[2:5]):
            raise UnsafePickleError("it holds an array with fields")
        self.big_endian = state[1] in (">", b">")


class Array:
    """Stands for a numpy array, a numpy scalar (shape ()) or an mxnet array. Items are bytes, or a list of objects."""

    def __init__(self) -> None:
        self.dtype = Dtype("u1")
        self.shape: tuple[int, ...] = (0,)
        self.items: bytes | list[object] = b""

    def fill(self, dtype: object, shape: object, items: object) -> "Array":
        """Set the content, whose size must agree with dtype and shape, and return the array."""
        if not isinstance(dtype, Dtype) or not isinstance(shape, tuple) or len(shape) > 32:
            raise UnsafePickleError("it holds an array without type or shape")
        count = 1
        for extent in shape:
            if not isinstance(extent, int) or extent < 0:
                raise UnsafePickleError("it holds an array with an invalid shape")
            count *= extent
        expected = (list, count) if dtype.kind == "O" else (bytes, count * dtype.item_size)
        if not isinstance(items, bytes | list) or (type(items), len(items)) != expected:
            raise UnsafePickleError("it holds an array whose content does not fit its shape")
        self.dtype, self.shape, self.items = dtype, shape, items
        return self

    def integers(self) -> list[int]:
        """Return the items of an array of bool or int."""
        if self.dtype.kind not in "biu" or not isinstance(self.items, bytes):
            raise UnsafePickleError("it holds an array of another type where integers are expected")
        width, order = self.dtype.item_size, "big" if self.dtype.big_endian else "little"
        parts = [self.items[begin : begin + width] for begin in range(0, len(self.items), width)]
        return [int.from_bytes(part, order, signed=self.dtype.kind == "i") for part in parts]  # type: ignore[arg-type]

    def set_state(self, state: object) -> None:
        """Take numpy's (version, shape, dtype, is_fortran, content)."""
        if not isinstance(state, tuple) or len(state) != 5:
            raise UnsafePickleError("it holds an array in an unknown form")
        self.fill(state[2], state[1], state[4])


class MxArray(Array):
    """Stands for an mxnet NDArray of uint8; its state is a dict with the bytes that mxnet would save."""

    def set_state(self, state: object) -> None:
        raw = state.get("handle", state.get(b"handle")) if isinstance(state, dict) else None
        if not isinstance(raw, bytes) or len(raw) < _MX_HEAD.size:
            raise UnsafePickleError("it holds an mxnet array without content")
        magic, storage, axes = _MX_HEAD.unpack_from(raw)
        tail = _MX_HEAD.size + 8 * axes
        # 0xF993FACA marks numpy's rules for shapes
        if magic not in (0xF993FAC9, 0xF993FACA) or storage or not 0 < axes <= 32 or tail + _MX_TAIL.size > len(raw):
            raise UnsafePickleError("it holds an mxnet array in an unknown form")
        if _MX_TAIL.unpack_from(raw, tail)[2] != 3:
            raise UnsafePickleError("it holds an mxnet array of another type than uint8")
        shape = struct.unpack_from(f"<{axes}q", raw, _MX_HEAD.size)
        self.fill(Dtype("u1"), shape, raw[tail + _MX_TAIL.size :])


def load(data: bytes | mmap.mmap) -> object:
    """Return the object that the pickle builds: None, bool, int, float, str, bytes, list, tuple, dict, Array, or a Global.

    A list may contain itself, and a few bytes can build 2^60 leaves: inspect the result level by level, never print it.

    Raises:
        UnsafePickleError: the reason, in one line.
    """
    machine = _Machine(data)
    try:
        result = machine.run()
    except UnsafePickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error):
        raise UnsafePickleError(f"it is no pickle, or a damaged one (byte {machine.position})") from None
    if machine.position != len(data):
        raise UnsafePickleError(f"{len(data) - machine.position} bytes follow the pickle")
    return result


class _Machine:
    """Position in the data, the stack, the stacks that MARK saved, and the memo."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.data, self.position = data, 0
        self.stack: list[object] = []
        self.aside: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.made = 0  # copied bytes; a genuine set copies each byte once, an mxnet array of protocol 2 twice

    def run(self) -> object:
        for _ in range(_MAX_STEPS):
            opcode = self.number(1)
            if opcode == ord("."):
                return self.stack.pop()
            if opcode in _VALUES:
                value = _VALUES[opcode](self)  # may replace the stack
                self.stack.append(value)
            elif opcode in _ACTIONS:
                _ACTIONS[opcode](self)
            else:
                raise UnsafePickleError(f"it is no pickle of plain data (opcode 0x{opcode:02x} at byte {self.position - 1})")
        raise UnsafePickleError(f"it takes more than {_MAX_STEPS} steps to build")

    def take(self, size: int) -> bytes:
        """Return the next bytes; `size` is checked first."""
        self.check_room(size)
        self.position += size
        return self.data[self.position - size : self.position]

    def check_room(self, size: int) -> None:
        if size > len(self.data) - self.position:
            raise UnsafePickleError(f"it is cut off (byte {self.position} announces {size} more)")

    def number(self, size: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(size), "little", signed=signed)

    def long(self, size: int) -> int:
        return self.number(size if size <= 16 else _refuse("it holds a number of more than 16 bytes"), signed=True)

    def line(self, limit: int | None = _MAX_DIGITS) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0 or (limit is not None and end - self.position > limit):
            raise UnsafePickleError(f"it is no pickle, or a damaged one (byte {self.position})")
        return self.take(end + 1 - self.position)[:-1]

    def quoted(self) -> bytes:
        text = self.line(None).strip()
        if len(text) < 2 or text[0] != text[-1] or text[:1] not in (b"'", b'"'):
            raise UnsafePickleError(f"it holds a string without quotes (before byte {self.position})")
        return codecs.escape_decode(text[1:-1])[0]

    def text(self, size: int) -> str:
        return self.take(size).decode("utf-8", "surrogatepass")

    def last(self, count: int) -> list[object]:
        """Pop the topmost objects, in their order."""
        if len(self.stack) < count:
            raise IndexError
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def marked(self) -> list[object]:
        """Pop everything above the topmost mark."""
        items, self.stack = self.stack, self.aside.pop()
        return items

    def mark(self) -> None:
        self.aside.append(self.stack)
        self.stack = []

    def extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        target.extend(items) if isinstance(target, list) else _refuse("it appends to what is no list")

    def update(self, items: list[object]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[0::2], items[1::2], strict=True):
            # a tuple of tuples can take years to hash
            if not isinstance(target, dict) or not isinstance(key, str | bytes):
                raise UnsafePickleError("it holds a dict with other keys than strings")
            target[key] = value

    def dictionary(self, items: list[object]) -> object:
        self.stack.append({})
        self.update(items)
        return self.stack.pop()

    def keep(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def global_name(self, module: object, name: object) -> Global:
        if isinstance(module, str) and isinstance(name, str) and len(module) + len(name) < 200:
            found = Global(module, name)
            if found in _CALLS or found == _NDARRAY:
                return found
            dotted = f"{module}.{name}"
            raise UnsafePickleError(f"it asks for {dotted!a}, which could run code: do not load it by other means")
        raise UnsafePickleError("it asks for an import, which could run code: do not load it by other means")

    def reduce(self) -> object:
        function, arguments = self.last(2)
        if not isinstance(function, Global) or function not in _CALLS or not isinstance(arguments, tuple):
            raise UnsafePickleError("it calls something other than a constructor of data")
        return _CALLS[function](self, *arguments)

    def build(self) -> None:
        target, state = self.last(2)
        if not isinstance(target, Array | Dtype):
            raise UnsafePickleError("it sets the state of an object without state")
        target.set_state(state)
        if isinstance(target, MxArray):
            self.spend(len(target.items))
        self.stack.append(target)

    def spend(self, size: int) -> None:
        """Count copied bytes, so that a short pickle cannot copy the same ones over and over."""
        self.made += size
        if self.made > 2 * len(self.data):
            raise UnsafePickleError("it makes more bytes than it has")

    def encode(self, text: object, codec: object) -> bytes:
        """Stand for _codecs.encode(text, "latin1"), by which Python 3 stores bytes in protocols 0 to 2."""
        if not isinstance(text, str) or codec not in ("latin1", "latin-1", b"latin1", b"latin-1"):
            raise UnsafePickleError("it encodes text in another way than latin1")
        self.spend(len(text))
        return text.encode("latin-1")

    def to_bytes(self, *arguments: object) -> bytes:
        """Stand for bytes(...) and bytearray(...)."""
        if len(arguments) == 2:
            return self.encode(*arguments)
        data = arguments[0] if arguments else b""
        return data if isinstance(data, bytes) and len(arguments) <= 1 else _refuse("it makes bytes of what are none")

    def reconstruct(self, kind: object, shape: object, code: object) -> Array:
        return Array() if kind == _NDARRAY else _refuse("it makes an array of another class")

    def scalar(self, dtype: object, raw: object) -> Array:
        return Array().fill(dtype, (), raw)

    def from_buffer(self, raw: object, dtype: object, shape: object, order: object) -> Array:
        return Array().fill(dtype, shape, raw)


def _refuse(reason: str) -> NoReturn:
    raise UnsafePickleError(reason)


def _check_protocol(machine: _Machine) -> None:
    protocol = machine.number(1)
    if protocol > 5:
        raise UnsafePickleError(f"it is no pickle of protocol 0 to 5 (byte {machine.position - 1} is {protocol})")


def _integer(line: bytes) -> object:
    return {b"00": False, b"01": True}.get(line, int(line))


_VALUES: dict[int, Callable[[_Machine], object]] = {  # opcodes that push what they return
    ord("N"): lambda m: None,
    0x88: lambda m: True,
    0x89: lambda m: False,
    ord("I"): lambda m: _integer(m.line()),
    ord("L"): lambda m: int(m.line().rstrip(b"L")),
    ord("F"): lambda m: float(m.line()),
    ord("J"): lambda m: m.number(4, signed=True),
    ord("K"): lambda m: m.number(1),
    ord("M"): lambda m: m.number(2),
    0x8A: lambda m: m.long(m.number(1)),
    0x8B: lambda m: m.long(m.number(4)),
    ord("G"): lambda m: struct.unpack(">d", m.take(8))[0],
    ord("S"): _Machine.quoted,
    **dict.fromkeys(b"UC", lambda m: m.take(m.number(1))),
    **dict.fromkeys(b"TB", lambda m: m.take(m.number(4))),
    **dict.fromkeys((0x8E, 0x96), lambda m: m.take(m.number(8))),
    ord("V"): lambda m: m.line(None).decode("raw-unicode-escape"),
    ord("X"): lambda m: m.text(m.number(4)),
    0x8C: lambda m: m.text(m.number(1)),
    0x8D: lambda m: m.text(m.number(8)),
    ord("]"): lambda m: [],
    ord("l"): _Machine.marked,
    ord(")"): lambda m: (),
    ord("t"): lambda m: tuple(m.marked()),
    0x85: lambda m: tuple(m.last(1)),
    0x86: lambda m: tuple(m.last(2)),
    0x87: lambda m: tuple(m.last(3)),
    ord("}"): lambda m: {},
    ord("d"): lambda m: m.dictionary(m.marked()),
    ord("2"): lambda m: m.stack[-1],
    ord("g"): lambda m: m.memo[int(m.line())],
    ord("h"): lambda m: m.memo[m.number(1)],
    ord("j"): lambda m: m.memo[m.number(4)],
    ord("c"): lambda m: m.global_name(m.line(200).decode(), m.line(200).decode()),
    0x93: lambda m: m.global_name(*m.last(2)),
    ord("R"): _Machine.reduce,
}
_ACTIONS: dict[int, Callable[[_Machine], object]] = {  # opcodes that push nothing
    0x80: _check_protocol,
    0x95: lambda m: m.check_room(m.number(8)),
    ord("("): _Machine.mark,
    ord("0"): lambda m: m.stack.pop() if m.stack else m.marked(),
    ord("1"): _Machine.marked,
    ord("a"): lambda m: m.extend(m.last(1)),
    ord("e"): lambda m: m.extend(m.marked()),
    ord("s"): lambda m: m.update(m.last(2)),
    ord("u"): lambda m: m.update(m.marked()),
    ord("b"): _Machine.build,
    ord("p"): lambda m: m.keep(int(m.line())),
    ord("q"): lambda m: m.keep(m.number(1)),
    ord("r"): lambda m: m.keep(m.number(4)),
    0x94: lambda m: m.keep(len(m.memo)),
}
_NDARRAY = Global("numpy", "ndarray")  # only ever an argument
_CORES = ("numpy.core", "numpy._core")  # before and since numpy 2
_CALLS: dict[Global, Callable[..., object]] = {
    Global("numpy", "dtype"): lambda m, code, *flags: Dtype(code),
    Global("_codecs", "encode"): _Machine.encode,
    Global("mxnet.ndarray.ndarray", "NDArray"): lambda m, handle=None: MxArray(),
    **{Global(place, name): _Machine.to_bytes for place in ("builtins", "__builtin__") for name in ("bytes", "bytearray")},
    **{Global(f"{core}.multiarray", "_reconstruct"): _Machine.reconstruct for core in _CORES},
    **{Global(f"{core}.multiarray", "scalar"): _Machine.scalar for core in _CORES},
    **{Global(f"{core}.numeric", "_frombuffer"): _Machine.from_buffer for core in _CORES},
}
