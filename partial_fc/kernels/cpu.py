"""Builds cpu.c and negatives.c with the system's C compiler at first use, and calls it on tensors.

The library is stored in the user's cache folder under a hash of sources, compiler and processor, so later runs start at once.
Without a compiler (or outside Linux, or if the build fails), `load` returns None and why, and the plain torch code of plain.py
does the same work in more sweeps over memory. The library is not linked to an OpenMP runtime. It uses the one
that torch has loaded, so both share their threads.
"""

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..centres.row_optimizer import RowOptimizer, RowSGD
from ..centres.store import CentreStore
from .plain import CentreGradient, PlainKernels, Tile

_SOURCES = [Path(__file__).with_name(name) for name in ("cpu.c", "negatives.c")]
_HEADER = Path(__file__).with_name("numbers.h")
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-c"]
_LARGEST_DIM = 16384  # each thread holds rows on its stack
_NO_LIMIT = float("inf")
# the numbers that negatives.c has for the functions of losses/negatives.py, and for what a sweep is to find
_KINDS = {"linear": 0, "hard": 1, "arcneg": 2, "circle": 3, "angle": 4, "angle_squared": 5, "power": 6}
_SWEEPS = {"softmax": 0, "sum": 1, "largest": 2}
_TABLE_ROWS = 8

_POINTER, _INT, _LONG, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_double
_ARGUMENTS = {
    "exponentials": [_POINTER, _INT, _LONG, _LONG, _POINTER, _POINTER, _LONG, _FLOAT, _FLOAT, _POINTER, _POINTER, _INT],
    "negatives": [_POINTER, _INT, _LONG, _LONG, *[_POINTER] * 4, _INT, _FLOAT, _INT, _INT, _POINTER, _POINTER, _INT],
    "update_rows": [
        *(_POINTER, _INT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT, *[_POINTER] * 3, *[_LONG] * 3),
        *(_POINTER, _INT, _POINTER, _POINTER, _POINTER, _LONG, _INT, _INT, *[_DOUBLE] * 5, ctypes.c_uint64, _POINTER),
    ],
}


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, which is built if necessary, and ""; or None and why it cannot be built."""
    if sys.platform != "linux":
        return None, f"they are built on Linux only, this is {sys.platform}"
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
    except ValueError as error:  # an open quotation mark
        return None, f"CC is no command: {error}"
    if not compiler:
        return None, "the environment variable CC is empty; unset it, or let it name a C compiler"
    if shutil.which(compiler[0]) is None:
        return None, f"no C compiler {compiler[0]}; install gcc, or let the environment variable CC name one"
    reason = ""
    for wide in (["-mprefer-vector-width=512"], []):  # x86 only, and some compilers do not know it
        for attempt in ("found or built", "built anew"):
            try:
                path = _path(compiler, [*_FLAGS, *wide])
                if attempt == "built anew" or not path.is_file():
                    _build(compiler, [*_FLAGS, *wide], path)
                library = ctypes.CDLL(str(path))
                for name, types in _ARGUMENTS.items():
                    getattr(library, name).argtypes = types
                return library, ""
            except (OSError, AttributeError, subprocess.SubprocessError) as error:
                reason = f"{shlex.join(compiler)} cannot build them: {_last_line(error)}"
                continue  # the second attempt also replaces a damaged file
    return None, reason


def _last_line(error: Exception) -> str:
    """Return the last line of a compiler's output, or the error itself."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = (said.decode(errors="replace") if isinstance(said, bytes) else said or "").strip().splitlines()
    return lines[-1].strip() if lines else " ".join(str(error).split())


def why_unsuited(dim: int) -> str:
    """Return why the library cannot be used for rows of this length, "" if it can."""
    return f"rows of {dim} numbers are longer than {_LARGEST_DIM}" if dim > _LARGEST_DIM else load()[1]


class CKernels(PlainKernels):
    """The kernels of cpu.c and negatives.c; see PlainKernels for the arguments."""

    name = "c"
    words = "C kernels"
    reads_flag = True

    def exponentials(self, tile: Tile, shift: float, z_sum: Tensor) -> None:
        products, inverse_norms, places, begin, limit = tile[:5]
        partial = self.workspace.buffer("partial", (torch.get_num_threads(), products.shape[1]), torch.float32)
        assert products.is_contiguous() and z_sum.is_contiguous() and places.is_contiguous()
        assert inverse_norms is None or inverse_norms.is_contiguous()
        _library().exponentials(
            *(products.data_ptr(), _FORMATS[products.dtype], *products.shape, _pointer(inverse_norms)),
            *(places.data_ptr(), begin, shift, _NO_LIMIT if limit is None else limit),
            *(z_sum.data_ptr(), partial.data_ptr(), len(partial)),
        )

    def weights(self, tile: Tile, link: str, shift: float | Tensor, less: Tensor | None, sums: Tensor) -> None:
        self._sweep(link, tile, shift, less, sums)

    def maxima(self, tile: Tile, maximum: Tensor) -> None:
        self._sweep("largest", tile.with_log_weights(), 0.0, None, maximum)

    def _sweep(self, sweep: str, tile: Tile, shift: float | Tensor, less: Tensor | None, sums: Tensor) -> None:
        """Call `negatives` of negatives.c for a link, or for the largest logits."""
        products, inverse_norms, places, begin, limit, function, row_weights, _ = tile
        assert function is not None
        classes, samples = products.shape
        threads, buffer = torch.get_num_threads(), self.workspace.buffer
        partial = buffer("partial", (threads, 3, samples), torch.float32)
        table = buffer("table", (_TABLE_ROWS, samples), torch.float32)  # the rows of negatives.c
        table[:-2] = function.coefficients
        table[-2] = shift
        table[-1] = 0.0 if less is None else less
        own = buffer("own", (samples,), torch.int32).copy_((places - begin).clamp(-1, classes))
        read = (products, sums, inverse_norms, row_weights)
        assert all(tensor is None or tensor.is_contiguous() for tensor in read)
        _library().negatives(
            *(products.data_ptr(), _FORMATS[products.dtype], classes, samples, _pointer(inverse_norms), _pointer(row_weights)),
            *(own.data_ptr(), table.data_ptr(), int(function.straight), _NO_LIMIT if limit is None else limit),
            *(_KINDS[function.kind], _SWEEPS[sweep], sums.data_ptr(), partial.data_ptr(), threads),
        )

    def update_rows(
        self, optimizer: RowOptimizer, store: CentreStore, gradient: CentreGradient, lr: float, seed: int, apply: Tensor | None
    ) -> None:
        sgd, tensors, inverse = isinstance(optimizer, RowSGD), store.tensors, store.inverse_norms
        settings = (optimizer.momentum, 0.0, 0.0, optimizer.weight_decay) if isinstance(optimizer, RowSGD) else optimizer
        nesterov = isinstance(optimizer, RowSGD) and optimizer.nesterov
        centres, momentum, variance = tensors["centres"], tensors["momentum"], tensors.get("variance")
        select, rows, class_index, sample_index, values = gradient
        assert all(tensor.is_contiguous() for tensor in (*tensors.values(), inverse, *gradient[1:]))
        _library().update_rows(
            *(centres.data_ptr(), _FORMATS[centres.dtype], _pointer(tensors.get("centres_scale"))),
            *(momentum.data_ptr(), _FORMATS[momentum.dtype]),
            *(_pointer(tensors.get("momentum_scale")), _pointer(variance), 0 if variance is None else _FORMATS[variance.dtype]),
            *(_pointer(tensors.get("updates")), inverse.data_ptr(), None if isinstance(select, slice) else select.data_ptr()),
            *(select.start if isinstance(select, slice) else 0, *rows.shape, rows.data_ptr(), _FORMATS[rows.dtype]),
            *(values.data_ptr(), class_index.data_ptr(), sample_index.data_ptr(), len(sample_index)),
            *(int(not sgd), int(nesterov), lr, *settings, seed, _pointer(apply)),
        )


def _library() -> ctypes.CDLL:
    library, _ = load()
    assert library is not None, "call only where why_unsuited() is empty"
    return library


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _path(compiler: list[str], flags: list[str]) -> Path:
    """Return the path of the library for this source, compiler and processor, built or not."""
    ask = functools.partial(subprocess.run, capture_output=True, errors="replace", check=True, timeout=60)
    version = ask([*compiler, "--version"]).stdout
    # the macros name every instruction set that -march=native enables, even if /proc does not list them
    macros = ask([*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull]).stdout
    sources = [path.read_text() for path in (*_SOURCES, _HEADER)]
    parts = (*sources, " ".join(compiler), version, " ".join(flags), macros, _processor())
    return compiled_folder() / f"cpu_kernels_{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}.so"


def compiled_folder() -> Path:
    """Return the folder of compiled code, under the home of this user, to whom it belongs; else one for this process."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "face_head"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} belongs to another user")  # code loaded from there would run as this user
    except (OSError, RuntimeError):  # RuntimeError: there is no HOME, and this user has no name
        folder = Path(_private_folder())
    return folder


@functools.cache
def _private_folder() -> str:
    """Return a new folder that is deleted when the process ends."""
    folder = tempfile.mkdtemp(prefix="face_head_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _build(compiler: list[str], flags: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        objects = [Path(work) / f"{source.stem}.o" for source in _SOURCES]
        library = Path(work) / path.name
        run = functools.partial(subprocess.run, capture_output=True, check=True, timeout=120)
        for source, output in zip(_SOURCES, objects, strict=True):
            run([*compiler, *flags, str(source), "-o", str(output)])
        run([*compiler, "-shared", *map(str, objects), "-lm", "-o", str(library)])  # without -fopenmp: torch's runtime is used
        library.replace(path)  # atomic, so that no other process ever loads half a file


def _processor() -> str:
    """Return an identification of the processor: -march=native code must not run on another one that shares the cache."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))
    return platform.processor()
