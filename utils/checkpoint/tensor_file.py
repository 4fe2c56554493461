"""Writes .safetensors files as a stream: in blocks, hashed on the way, flushed to the disk, without a second copy in memory.

The library's own writer needs whole tensors at once, does its file operations in compiled code, where tests cannot simulate a
full disk, and creates files that only their owner may read. Reading uses the library. The format: 8 bytes with the length of
the header, little endian; the header, JSON {name: {dtype, shape, data_offsets}}, padded with blanks to a multiple of 8 bytes;
then the numbers of all tensors without gaps (https://github.com/huggingface/safetensors#format).
"""

import errno
import hashlib
import json
import math
import os
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..cli import Advance
from ..files import HASH, NewFile

NETWORK = "network"  # the metadata of weights: JSON of the section backbone, and of data.image_size
_MOST_IN_TUPLE = 1 << 12  # tuples in tuples counted each time; shapes and settings of optimizers have a few
BLOCK = 16 << 20  # bytes hashed and written at once
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class NotFiniteError(ValueError):
    """A tensor that was about to be written has non-finite numbers; the message names it."""


class Planned(NamedTuple):
    """A tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Callable[[], Iterable[Tensor]]  # its parts along the first dimension, in order; a scalar is one part


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write tensors of any device, and texts by name, to a new .safetensors file; return {"size", HASH}."""
    return write_planned(path, {name: _planned(tensor.detach()) for name, tensor in tensors.items()}, metadata)


def write_planned(path: Path, tensors: Mapping[str, Planned], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write a new .safetensors file of tensors that are produced part by part; return {"size", HASH}.

    Equal tensors and metadata give equal bytes, whatever their parts and order.

    Raises:
        OSError: it cannot be written.
        ValueError: the parts of a tensor do not match its plan, or its dtype is not supported.
        NotFiniteError: a tensor holds nan or inf, so the file would be useless.
    """
    # wide types first, so that each tensor starts at a multiple of its element size
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, dict[str, Any]] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        plan = tensors[name]
        if plan.dtype not in DTYPES:
            raise ValueError(f"{path}: {name} has the dtype {plan.dtype}, must be one of {', '.join(map(str, DTYPES))}")
        end = offset + plan.dtype.itemsize * math.prod(plan.shape)
        header[name] = {"dtype": DTYPES[plan.dtype], "shape": list(plan.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            start = file.size
            for part in tensors[name].rows():
                if part.dtype != tensors[name].dtype:
                    raise ValueError(f"{path}: {name} was planned as {tensors[name].dtype}, got a part of {part.dtype}")
                for block in _blocks(part):
                    if not _is_finite(block):
                        raise NotFiniteError(f"{path.name}: {name} holds numbers that are not finite")
                    file.write(block.view(torch.uint8).numpy().data)
            planned = header[name]["data_offsets"]
            if file.size - start != planned[1] - planned[0]:
                raise ValueError(f"{path}: {name} was planned with {planned[1] - planned[0]} bytes, got {file.size - start}")
        return file.close()


def write_object(path: Path, value: Any) -> dict[str, Any]:
    """Write a value to a new file that torch.load can read with weights_only=True; return {"size", HASH}.

    Raises:
        OSError: it cannot be written.
        NotFiniteError: a float or a tensor in the value has nan or inf.
    """
    for name, tensor in _numbers(value):
        if not all(map(_is_finite, _blocks(tensor))):
            raise NotFiniteError(f"{path.name}: {name} holds numbers that are not finite")
    with NewFile(path) as file:
        try:
            torch.save(value, cast(IO[bytes], file))
        except RuntimeError as error:  # torch says "unexpected pos" whatever the cause
            raise file.failure or error from None
        return file.close()


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, including new and renamed ones, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # file systems such as CIFS cannot flush a folder
            raise
    finally:
        os.close(handle)


class RefusedError(ValueError):
    """A file that torch would load, and that may take far more memory or time than its size; the message says what to do."""


def load_plain(path: Path, mmap: bool = False) -> Any:
    """Return what torch.save wrote, on the CPU: only tensors and plain values, so no code in the file is ever run.

    Args:
        mmap: map the tensors into memory, so that only used pages are read.

    Raises:
        RefusedError: it is compressed, or has enormous tuples.
        Exception: of nearly any type, if the file is damaged or holds anything else.
    """
    with path.open("rb") as file:
        is_zip, pickles = file.read(4) == b"PK\x03\x04", 5 * [cast(IO[bytes], file)]  # of torch's format before 1.6
        file.seek(0)
        if is_zip:
            parts = (archive := zipfile.ZipFile(file)).infolist()
            if any(part.compress_type for part in parts) or sum(part.file_size for part in parts) > path.stat().st_size:
                raise RefusedError("it is compressed, or TorchScript, and torch.save writes neither; save the tensors again")
            pickles = [archive.open(part) for part in parts if part.filename.endswith("data.pkl")]
        try:
            largest = max(map(_largest_tuple, pickles), default=0)
        except Exception as error:  # of nearly any type, as for torch
            raise pickle.UnpicklingError(str(error)) from None
        if largest > _MOST_IN_TUPLE:
            raise RefusedError(f"it holds a tuple of more than {_MOST_IN_TUPLE} values; save the tensors again without it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about files that then raise
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _largest_tuple(file: IO[bytes]) -> int:
    """Return the most values of a tuple in a pickle, tuples inside counted each time: as a key it may take years to hash."""
    largest, stack, memo = 0, list[int](), dict[Any, int]()  # the number of values of a tuple, 1 for all else, 0 for a mark
    for code, place, _ in pickletools.genops(file):
        if "PUT" in code.name or code.name == "MEMOIZE":
            memo[len(memo) if place is None else place] = stack[-1]
        elif "GET" in code.name or code.name == "MARK":
            stack.append(memo[place] if place is not None else 0)
        else:
            kinds, taken = code.stack_before, []
            if pickletools.markobject in kinds:
                kinds = kinds[: kinds.index(pickletools.markobject)]
                while value := stack.pop():
                    taken.append(value)
            taken += [stack.pop() for _ in kinds]
            values = min(1 + sum(taken), _MOST_IN_TUPLE + 1) if "TUPLE" in code.name else 1
            largest = max(largest, values)
            stack += [values] * len(code.stack_after)
    return largest


def overlaps(tensor: Tensor) -> bool:
    """Return whether numbers of a dense tensor share memory, such as a row repeated 10^9 times by stride 0 in a tiny file."""
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes() or any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor from a file is dense, on the CPU, and has separate memory for each of its numbers."""
    dense = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"
    return dense and not overlaps(tensor)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file, or of a .pt/.pth file that holds only a flat dict of tensors."""
    try:
        if path.suffix == ".safetensors":
            path.open("rb").close()  # of a file that may not be read, safetensors says that it is not there
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        state = load_plain(path)
    except (OSError, RuntimeError, SafetensorError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"weights {path}: cannot be read: {str(error).splitlines()[0]}") from None
    except Exception as error:  # weights_only refuses pickled code with pickle.UnpicklingError
        raise ValueError(
            f"weights {path}: cannot be loaded: it is damaged or holds more than tensors ({type(error).__name__})"
        ) from None
    if not isinstance(state, dict):
        raise ValueError(f"weights {path}: must be a state dict, names to tensors, got {type(state).__name__}")
    for name, value in state.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise ValueError(
                f"weights {path}: must be a state dict, names to tensors, but {name!r} is of type {type(value).__name__}; save "
                "only the network, or convert a checkpoint of arcface_torch with face migrate checkpoint"
            )
        if not is_plain(value):
            raise ValueError(f"weights {path}: {name} is not a dense tensor with memory for all its numbers; save a copy of it")
    if sum(value.nbytes for value in state.values()) > 2 * path.stat().st_size:
        raise ValueError(f"weights {path}: its tensors have their memory in common; save copies of them")
    return state


def read_metadata(path: Path) -> dict[str, str]:
    """Return the texts in the header of a .safetensors file; none if it is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


class Place(NamedTuple):
    """Where a tensor lies in a .safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file
    size: int  # bytes


def tensor_places(path: Path) -> dict[str, Place]:
    """Return where the tensors of a .safetensors file lie, without mapping it.

    The library's own map is private and writable, so that the kernel counts all of it as memory of the process (ulimit -d).

    Raises:
        ValueError: it is no such file, or has a dtype that no file of ours has.
    """
    try:
        with safe_open(path, framework="pt", backend="pread"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error}") from None
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = next((key for key, value in DTYPES.items() if value == entry["dtype"]), None)
        if dtype is None:
            raise ValueError(f"{path}: {name} has the dtype {entry['dtype']}, must be one of {', '.join(DTYPES.values())}")
        first, last = entry["data_offsets"]
        places[name] = Place(dtype, tuple(entry["shape"]), 8 + length + first, last - first)
    return places


def read_part(path: Path, place: Place, first: int, last: int) -> Tensor:
    """Return the rows [first, last) of a tensor of a file in memory of their own; OSError if the file has no such bytes."""
    rows = torch.empty((last - first, *place.shape[1:]), dtype=place.dtype)
    with path.open("rb") as file:
        file.seek(place.start + first * (place.size // max(1, place.shape[0])))
        if file.readinto(rows.view(torch.uint8).numpy().data) != rows.nbytes:
            raise OSError(errno.EIO, "it ends too early")
    return rows


def mapped_tensor(path: Path, name: str) -> Tensor:
    """Return a memory-mapped tensor of a .safetensors file, so that reading a few rows is cheap. Nothing may write into it.

    Args:
        name: the tensor's name; if the file has only one tensor, its name does not matter.

    Raises:
        ValueError: the tensor does not exist, or the file is not a .safetensors file.
    """
    places = tensor_places(path)
    names = sorted(places)
    if name not in names and len(names) != 1:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise ValueError(f"{path}: has no tensor {name!r}, it has {', '.join(names[:5])}{more}")
    place = places[name if name in names else names[0]]
    if not place.size:
        return torch.empty(place.shape, dtype=place.dtype)
    data = np.memmap(path, np.uint8, "r", offset=place.start, shape=(place.size,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not writable
        return torch.from_numpy(data).view(place.dtype).view(place.shape)


def file_hash(path: Path, kind: str = HASH, progress: Advance = int) -> str:
    """Return the hash of a file, in hexadecimal.

    Args:
        kind: HASH, or "sha256" of older checkpoints, which is as slow as the disk.
        progress: called with the number of bytes read since the last call.
    """
    digest = hashlib.sha256() if kind == "sha256" else xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _planned(tensor: Tensor) -> Planned:
    return Planned(tensor.dtype, tuple(tensor.shape), lambda: (tensor,))


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the numbers of a tensor in blocks on the CPU; a tensor on a device is copied block by block."""
    flat = tensor.detach().contiguous().reshape(-1)
    step = max(1, BLOCK // flat.element_size())
    for start in range(0, len(flat), step):
        yield flat[start : start + step].cpu()


def _is_finite(block: Tensor) -> bool:
    """Return whether no number of a block is nan or inf. The sum is fast; only if it is not finite is each number checked."""
    return not block.is_floating_point() or bool(block.sum().isfinite()) or bool(block.isfinite().all())


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted path, tensor) of each tensor and float in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, float):
        yield name, torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _numbers(item, f"{name}.{number}")
