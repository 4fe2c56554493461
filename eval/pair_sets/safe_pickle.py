"""Reads a pickle of plain data and arrays without executing anything.

Verification sets are pickles from the internet, and a pickle is a program: `pickle.load` calls whatever it names. Here a
small interpreter executes only the opcodes that build data. A global is only a name to it: the few globals of genuine sets
become inert stand-ins, and every other one is rejected. So nothing is imported or called, no size is trusted before its
bytes are read, and only strings are ever hashed or compared.

Python's pickletools read opcodes (protocols 0 to 5) and their arguments. A string of Python 2 becomes bytes, as it does with
`encoding="bytes"`; so does a bytearray. The stand-ins for names, dtypes and arrays store bytes and shapes and check that these
agree, without numpy and mxnet: a numpy array built from a hostile dtype or shape could point anywhere in memory, or allocate
terabytes. Source: `__reduce__` and `__setstate__` of numpy's arrays, scalars and dtypes; NDArray.__reduce__ of mxnet 1.9.1.
"""

import codecs
import io
import mmap
import pickletools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

_MAX_STEPS = 4_000_000  # a genuine set takes up to 30 per image
_MAX_LINE = 200  # bytes of a number or a name in text
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
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error) as error:
        reason = f": {error!s:.100}" if isinstance(error, ValueError) else ""  # of pickletools
        raise UnsafePickleError(f"it is no pickle, or a damaged one (byte {machine.file.tell()}{reason})") from None
    if machine.file.tell() != len(data):
        raise UnsafePickleError(f"{len(data) - machine.file.tell()} bytes follow the pickle")
    return result


class _Machine:
    """The file, the stack, the stacks that MARK saved, and the memo."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.file: Any = io.BytesIO(data) if isinstance(data, bytes) else data
        self.size = len(data)
        self.stack: list[object] = []
        self.aside: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.made = 0  # copied bytes; a genuine set copies each byte once, an mxnet array of protocol 2 twice

    def run(self) -> object:
        self.file.seek(0)
        for _ in range(_MAX_STEPS):
            code = self.file.read(1)
            opcode = _OPCODES.get(code)
            name = opcode.name if opcode is not None else ""
            if name == "STOP":
                return self.stack.pop()
            if name not in _VALUES and name not in _ACTIONS:
                place = f"opcode 0x{code.hex()} at byte {self.file.tell() - 1}" if code else "it has no end"
                raise UnsafePickleError(f"it is no pickle of plain data ({place})")
            value: Any = None
            if name == "STRING":
                value = self.quoted()
            elif opcode is not None and opcode.arg is not None:
                if opcode.arg.n == pickletools.UP_TO_NEWLINE and name != "UNICODE":
                    self.check_line()
                value = opcode.arg.reader(self.file)
            if name in _VALUES:
                value = _VALUES[name](self, value)  # may replace the stack
                self.stack.append(value)
            else:
                _ACTIONS[name](self, value)
        raise UnsafePickleError(f"it takes more than {_MAX_STEPS} steps to build")

    def quoted(self) -> bytes:
        """Read a string; pickletools wants ASCII, and writes all of one without quotes into its error."""
        line = self.file.readline()
        if len(line) < 3 or line[:1] not in (b"'", b'"') or line[-2:] != line[:1] + b"\n":
            raise ValueError("no string in quotes")
        return codecs.escape_decode(line[1:-2])[0]

    def check_line(self) -> None:
        """Refuse a long line: to compute with thousands of digits takes long, and errors of Python repeat what is no number."""
        place = self.file.tell()
        if (length := len(self.file.readline())) > _MAX_LINE:
            raise ValueError(f"a line of {length} bytes")
        self.file.seek(place)

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
        if self.made > 2 * self.size:
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


def _short(number: int) -> int:
    return number if number.bit_length() <= 127 else _refuse("it holds a number of more than 16 bytes")


_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_READ = "BININT BININT1 BININT2 FLOAT BINFLOAT BINBYTES SHORT_BINBYTES BINBYTES8 STRING UNICODE BINUNICODE SHORT_BINUNICODE"
_VALUES: dict[str, Callable[[_Machine, Any], object]] = {  # opcodes that push what they return of their argument
    **dict.fromkeys((*_READ.split(), "BINUNICODE8"), lambda m, value: value),
    **dict.fromkeys(("INT", "LONG", "LONG1", "LONG4"), lambda m, number: _short(number)),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), lambda m, text: text.encode("latin-1")),
    "BYTEARRAY8": lambda m, value: bytes(value),
    **{"NONE": lambda m, _: None, "NEWTRUE": lambda m, _: True, "NEWFALSE": lambda m, _: False},
    **{"EMPTY_LIST": lambda m, _: [], "LIST": lambda m, _: m.marked()},
    **{"EMPTY_TUPLE": lambda m, _: (), "TUPLE": lambda m, _: tuple(m.marked())},
    **{f"TUPLE{count}": lambda m, _, count=count: tuple(m.last(count)) for count in (1, 2, 3)},  # type: ignore[misc]
    **{"EMPTY_DICT": lambda m, _: {}, "DICT": lambda m, _: m.dictionary(m.marked())},
    "DUP": lambda m, _: m.stack[-1],
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, place: m.memo[place]),
    "GLOBAL": lambda m, names: m.global_name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.global_name(*m.last(2)),
    "REDUCE": lambda m, _: m.reduce(),
}
_ACTIONS: dict[str, Callable[[_Machine, Any], object]] = {  # opcodes that push nothing
    "PROTO": lambda m, protocol: protocol <= 5 or _refuse(f"it is no pickle of protocol 0 to 5, but of {protocol}"),
    "FRAME": lambda m, size: None,
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: m.stack.pop() if m.stack else m.marked(),
    "POP_MARK": lambda m, _: m.marked(),
    "APPEND": lambda m, _: m.extend(m.last(1)),
    "APPENDS": lambda m, _: m.extend(m.marked()),
    "SETITEM": lambda m, _: m.update(m.last(2)),
    "SETITEMS": lambda m, _: m.update(m.marked()),
    "BUILD": lambda m, _: m.build(),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, place: m.keep(place)),
    "MEMOIZE": lambda m, _: m.keep(len(m.memo)),
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
