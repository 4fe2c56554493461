"""Inert stand-ins for the objects that a verification set may contain besides plain data: names, dtypes and arrays.

They store bytes and shapes and check that these agree, without numpy and mxnet. A numpy array built from a hostile dtype or
shape could point anywhere in memory, or allocate terabytes.

Source: `__reduce__` and `__setstate__` of numpy's arrays, scalars and dtypes; NDArray.__reduce__ of mxnet 1.9.1.
"""

import re
import struct
from dataclasses import dataclass

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
