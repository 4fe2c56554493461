"""Stores the class centres of a shard and their optimizer state, in four formats.

    exact   centres fp32, momentum fp32                               4.1 kB per class at D = 512
    lean    centres and momentum bf16, rounded stochastically         2.1 kB
    tiny    as lean, momentum int8 with one fp32 scale per row        1.55 kB
    mini    both int8 with one fp32 scale per row each                1.05 kB

AdamW adds a second moment, fp32 or (all others) bf16. Arithmetic is always fp32: rows are loaded into a buffer (fp32 rows are
used in place), changed there and stored again. 1 / norm of each centre is also stored, 4 bytes.

Numbers are rounded to bf16 and int8 stochastically: up or down at random, so that the mean is the number itself. Rounding to
the nearest would lose every update smaller than half a step of the format; with bf16 centres those are most updates.
Source: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, https://arxiv.org/abs/1502.02551.

The centres of mini have three bits more for the update: the lowest of their momentum's byte (-4 to 3 eighths of a step), which
leaves 5 bits. All else takes the whole steps, without the scale, for their direction; `inverse_norms` is theirs.
What rounds a number grows by the golden ratio modulo 1 with each update of its row (for the momentum by the root of 2), so that
the errors of successive updates cancel. What rounding adds to the momentum of SGD will move the centre, so the centre is moved
back at once. The lower half of the bits of the centres' scale counts the updates.
Shapes: n = classes of the shard, D = embedding size, c = selected rows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from utils.allocator import read_ahead
from utils.cli import progress

from ..workspace import Workspace
from .placement import Memory
from .shard import initial_blocks

FORMATS = {  # name: dtype of the centres, of the momentum, of AdamW's second moment
    "exact": (torch.float32, torch.float32, torch.float32),
    "lean": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "tiny": (torch.bfloat16, torch.int8, torch.bfloat16),
    "mini": (torch.int8, torch.int8, torch.bfloat16),
}
# in checkpoints
BY_ROW = ("centres", "centres_scale", "momentum", "momentum_scale", "variance", "variance_scale", "updates", "inverse_norms")
Select = slice | Tensor  # consecutive rows, or single rows (int64, distinct)
Read = Callable[[int, int], dict[str, Tensor]]  # (first row, last row) of the shard -> tensors by name
_BLOCK = 2048  # rows converted at once when a checkpoint is read: 4 MiB of 512 numbers
_LONG = 1 << 31  # numbers whose drawing takes so long that it is shown
_SMALLEST_NORM = 1e-12
_LOW = {"centres": 0.125, "momentum": -1.0}  # of mini: what the low bits of the momentum's byte add to each
_VALUES = 1 << 16  # of the random bits for rounding
_ROW_STRIDE, _OTHER_STRIDE = 7919, 27145  # of mini, from row to row; near 2^16 times the root of 2, for the momentum
_STRIDE = 40503  # odd, so its multiples reach all offsets; near the golden ratio, so successive offsets are far apart
_LAST_STEP = 99_999_999  # the largest that the name of a checkpoint's folder can hold


class CentreStore:
    """Centres and moments of n classes in one format.

    Args:
        second_moment: also keep AdamW's `variance`.
        count_updates: also keep `updates`, int32, the number of updates of each row (see row_optimizer.py).
        block: the largest number of rows that are loaded or stored at once.
        placement, folder: where the tensors of n x D numbers lie, see placement.py; all others are on the device.
        frozen: keep no momentum.

    Raises:
        ValueError: there is no room for them.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        form: str,
        second_moment: bool,
        count_updates: bool,
        block: int,
        workspace: Workspace,
        placement: str = "device",
        folder: Path | None = None,
        frozen: bool = False,
    ) -> None:
        device = workspace.device
        self.form, self.num_rows, self.dim, self.workspace = form, num_rows, dim, workspace
        dtypes = dict(
            zip(("centres", "momentum", "variance"), FORMATS[form][: 1 if frozen else 2 + second_moment], strict=False)
        )
        size = sum(Memory.padded(num_rows * dim, dtype) for dtype in dtypes.values())
        self.memory = Memory(placement, device, size, folder)
        placed = {name: self.memory.zeros((num_rows, dim), dtype) for name, dtype in dtypes.items()}
        self.tensors = {name: tensor for name, (tensor, _) in placed.items()}
        self._on_host = placed["centres"][1]
        self._fetched: list[tuple[Select, Tensor]] = []  # what `fetch` has copied
        for name in [name for name, tensor in self.tensors.items() if tensor.dtype == torch.int8]:
            self.tensors[f"{name}_scale"] = torch.zeros(num_rows, device=device)
        if count_updates:
            self.tensors["updates"] = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.inverse_norms = torch.empty(num_rows, device=device)
        self.noise = Noise(block * dim, device) if form != "exact" else None

    @property
    def bytes_per_row(self) -> int:
        """Stored bytes per class."""
        return sum(tensor[:1].nbytes for tensor in (*self.tensors.values(), self.inverse_norms))

    def fill_initial(self, start: int, seed: int) -> None:
        """Give the centres their initial values, those of the slots from `start` on."""
        blocks = initial_blocks(start, start + self.num_rows, self.dim, seed)
        if start == 0 and self.num_rows * self.dim > _LONG:
            blocks = iter(progress(blocks, None, "first class centres", " blocks of 1024"))
        for rows, values in blocks:
            self.write_centres(rows, values)
            self._take_norms(rows, {})

    def write_centres(self, select: Select, values: Tensor) -> None:
        """Replace centres by (c, D) fp32, rounded to the nearest, before training; refresh_norms must follow."""
        values = values.to(self.inverse_norms)
        if self.form == "mini":
            values, scale = _nearest_int8(values, 127.0)
            self.tensors["centres_scale"][select] = scale.masked_fill_(scale == 0.0, 1.0)
        self.tensors["centres"][select] = values.to(self.tensors["centres"])

    def refresh_norms(self) -> None:
        """Recompute 1 / norm of every centre, after they were changed from outside."""
        for low in range(0, self.num_rows, _BLOCK):
            self._take_norms(slice(low, min(low + _BLOCK, self.num_rows)), {})

    def operand(self, select: Select, dtype: torch.dtype, num_rows: int) -> Tensor:
        """Return centres for a matrix product, (num_rows, D) in dtype, not normalised: the selected ones first.

        Consecutive rows that are stored in dtype on the device are a view, and finite rows of any value follow those selected.
        Otherwise they are copied into a buffer that is valid until the next call, and zeros follow, unless `fetch` has them.
        """
        centres = self.tensors["centres"]
        for known, rows in self._fetched:
            if known is select and (rows.dtype, len(rows)) == (dtype, num_rows):
                return rows
        is_here = centres.dtype == dtype and not self.memory.is_far
        if is_here and isinstance(select, slice) and select.start + num_rows <= self.num_rows:
            return centres[select.start : select.start + num_rows]
        return self._copied(select, self.workspace.buffer("operand", (num_rows, self.dim), dtype))

    def fetch(self, selects: Sequence[tuple[Select, int]], dtype: torch.dtype) -> None:
        """Copy to the device what `operand` will be asked for with these arguments, unless the centres are there.

        The same objects must be given to it, and nothing else may change these rows before `forget`.
        """
        self._fetched = []
        if not self.memory.is_far:
            return
        block = self.workspace.buffer("fetched", (sum(num_rows for _, num_rows in selects), self.dim), dtype)
        parts = block.split([num_rows for _, num_rows in selects])
        self._fetched = [(select, self._copied(select, rows)) for (select, _), rows in zip(selects, parts, strict=True)]

    def forget(self) -> None:
        """Give up what `fetch` has copied: the centres change now."""
        self._fetched = []

    def read_ahead(self, selects: Sequence[Select]) -> None:
        """Let the kernel begin to read rows that a coming step needs, if they lie in a file; another thread may call it."""
        for tensor in [tensor for tensor in self.tensors.values() if self.memory.is_file and tensor.ndim == 2]:
            for select in selects:
                if isinstance(select, slice):
                    read_ahead(tensor, select.start, select.stop)
                    continue
                for row in select.tolist():
                    read_ahead(tensor, row, row + 1)

    def _copied(self, select: Select, rows: Tensor) -> Tensor:
        """Return the buffer of rows, after the selected centres are copied to its beginning, and zeros behind them."""
        centres = self.tensors["centres"]
        count = len(select) if isinstance(select, Tensor) else select.stop - select.start
        rows[count:].zero_()
        if isinstance(select, Tensor) and centres.dtype == rows.dtype:
            torch.index_select(centres, 0, select, out=rows[:count])
        elif centres.dtype == rows.dtype:  # from locked memory of the host by the engine for copies, beside the kernels
            rows[:count].copy_(self._on_host[select], non_blocking=True)
        else:
            rows[:count].copy_(centres[select])
        return rows

    def load(self, name: str, select: Select) -> Tensor:
        """Return rows (c, D) of centres, momentum or variance as fp32: a view of the storage if possible, else a buffer."""
        stored = self.tensors[name][select]
        if stored.dtype == torch.float32:
            return stored  # a view for consecutive rows, a copy for single rows
        rows = self.workspace.buffer(name, tuple(stored.shape), torch.float32).copy_(stored)
        if stored.dtype == torch.int8:
            if self.form == "mini":
                rows.add_(_low_bits(self.tensors["momentum"][select]), alpha=_LOW[name])
            rows.mul_(self.tensors[f"{name}_scale"][select][:, None])
        return rows

    def save(self, name: str, select: Select, rows: Tensor, centres: Tensor | None = None, carry: float = 0.0) -> None:
        """Store rows that `load` returned, after they were changed; fp32 `rows` may be rounded in place.

        Args:
            centres: (c, D) fp32, of a momentum, to be saved next; mini adds carry times what rounding adds to the momentum.
        """
        target = self.tensors[name]
        if target.dtype == torch.float32:
            if not isinstance(select, slice):
                target[select] = rows
        elif target.dtype == torch.bfloat16:
            assert self.noise is not None
            rounded = round_to_bfloat16_(rows, self.noise)  # bf16 holds these numbers, so the conversion is exact
            target[select] = rounded if isinstance(select, slice) else rounded.to(target.dtype)
        else:
            assert self.noise is not None
            quantised = self.workspace.buffer("int8", tuple(rows.shape), torch.int8)
            scale = self.workspace.buffer("scale", (len(rows),), torch.float32)
            scratch = self.workspace.buffer("scratch", tuple(rows.shape), torch.float32)
            if self.form == "mini":
                if centres is not None:
                    centres.sub_(rows, alpha=carry)
                self._quantise_mini(name, select, rows, scale, scratch)
                quantised.copy_(rows)
                if centres is not None:
                    centres.add_(rows.mul_(scale[:, None]), alpha=carry)
            else:
                quantise_rows(rows, self.noise, quantised, scale, scratch)
            target[select], self.tensors[f"{name}_scale"][select] = quantised, scale

    def _quantise_mini(self, name: str, select: Select, rows: Tensor, scale: Tensor, scratch: Tensor) -> None:
        """Round rows to bytes, and set scale (c,); centres, which follow their momentum, add their low bits to its bytes."""
        unit, top, stride = (8.0, 1016.0, _STRIDE) if name == "centres" else (0.125, 15.0, _OTHER_STRIDE)
        count = self.tensors["centres_scale"][select].view(torch.int32)
        torch.div(torch.abs(rows, out=scratch).amax(dim=1), 127.0 if name == "centres" else 120.0, out=scale)
        if name == "centres":
            bits = scale.masked_fill_(scale == 0.0, 1.0).view(torch.int32)  # the gradient is divided by it
            bits.add_(0xFFFF).bitwise_and_(-_VALUES).bitwise_or_(count + 1 & 0xFFFF)
        number = torch.arange(select.start, select.stop, device=rows.device) if isinstance(select, slice) else select
        noise = self.workspace.buffer("noise", tuple(rows.shape), torch.int32)
        noise.copy_((number * _ROW_STRIDE + count)[:, None])
        noise.add_(torch.arange(self.dim, dtype=torch.int32, device=rows.device)).mul_(stride).bitwise_and_(0xFFFF)
        rows.mul_((unit / scale.clamp_min(1e-38))[:, None]).add_(noise, alpha=1 / _VALUES).add_(0.5 / _VALUES)
        rows.floor_().clamp_(-top, top)
        if name == "centres":
            torch.add(rows, 4.0, out=scratch).div_(8.0).floor_()
            self.tensors["momentum"][select] += rows.sub_(scratch, alpha=8.0).to(torch.int8)
            rows.copy_(scratch)
        else:
            rows.mul_(8.0)

    def save_centres(self, select: Select, rows: Tensor) -> None:
        """Store changed centres (c, D), and 1 / norm of the stored, rounded values."""
        self.save("centres", select, rows)
        norms = torch.linalg.vector_norm(rows, dim=1).clamp_min_(_SMALLEST_NORM)
        self.inverse_norms[select] = norms.reciprocal_()

    def read_rows(self, read: Read, also: dict[str, Tensor], per_slot: int = 1) -> None:
        """Fill all tensors from saved rows of any format.

        Args:
            read: of slots, each of which has per_slot rows here.
            also: more tensors (slots, ...) to fill; unchanged if nothing of that name and shape was saved.

        Raises:
            ValueError: a tensor is missing or has another shape; this shard must not be used then.
        """
        slots = self.num_rows // per_slot
        for low in range(0, slots, max(1, _BLOCK // per_slot)):
            high = min(low + max(1, _BLOCK // per_slot), slots)
            saved, rows = _rows_of_slots(read(low, high), per_slot), slice(low * per_slot, high * per_slot)
            _check_saved(saved, rows.stop - rows.start)
            if ("variance" in saved) != ("variance" in self.tensors):
                was, now = ("adamw", "sgd") if "variance" in saved else ("sgd", "adamw")
                raise ValueError(
                    f"head: the checkpoint's class centres were trained by {was}, not {now}; set head.optimizer={was}"
                )
            for name in ("centres", "momentum", "variance", "updates"):
                # SGD saves no updates, because all its rows are up to date. AdamW needs them for the bias correction
                if name in self.tensors and (name in saved or name != "updates" or "variance" in saved):
                    self._convert(name, rows, saved)
            for name, target in also.items():
                if name in saved and saved[name].shape == target[low:high].shape:
                    target[low:high].copy_(saved[name])
            self._take_norms(rows, saved)

    def _take_norms(self, rows: slice, saved: dict[str, Tensor]) -> None:
        """Set 1 / norm of rows. Restore the saved norms if possible; recomputed ones may differ in the last bit."""
        if "inverse_norms" in saved and saved["centres"].dtype == self.tensors["centres"].dtype:
            self.inverse_norms[rows].copy_(saved["inverse_norms"])
            return
        centres = self.tensors["centres"][rows]
        centres = centres.float() if centres.dtype == torch.int8 else centres
        norms = torch.linalg.vector_norm(centres, dim=1, dtype=torch.float32)
        self.inverse_norms[rows] = norms.clamp_min_(_SMALLEST_NORM).reciprocal_()

    def _convert(self, name: str, select: slice, saved: dict[str, Tensor]) -> None:
        target = self.tensors[name][select]
        if name not in saved:
            raise ValueError(f"head: the checkpoint's class centres have no {name}")
        rows = saved[name]
        if rows.shape != target.shape:
            raise ValueError(f"head: saved {name} are {tuple(rows.shape)} here, this run needs {tuple(target.shape)}")
        scale = saved.get(f"{name}_scale")
        same_form = name not in _LOW or saved["centres"].dtype == self.tensors["centres"].dtype
        if rows.dtype == target.dtype and same_form:
            target.copy_(rows)
            if scale is not None:
                self.tensors[f"{name}_scale"][select].copy_(scale)
            return
        # a change of format happens once, so the nearest number is right: nothing accumulates
        values = rows.float()
        if saved["centres"].dtype == torch.int8 and name in _LOW:
            values.add_(_low_bits(saved["momentum"]), alpha=_LOW[name])
        if scale is not None:
            values *= scale[:, None]
        if name == "centres":
            self.write_centres(select, values)
            return
        if target.dtype == torch.int8:
            bits = 8.0 if self.form == "mini" else 1.0  # the lowest three are the centre's
            values, scale = _nearest_int8(values, 127.0 // bits)
            self.tensors[f"{name}_scale"][select].copy_(scale / bits)
            values *= bits
        target.copy_(values)


def _rows_of_slots(saved: dict[str, Tensor], per_slot: int) -> dict[str, Tensor]:
    """Return saved tensors by slot, (slots, per_slot, ...), by row; raise ValueError if a slot has another number of rows."""
    centres = saved.get("centres")
    was = centres.shape[1] if centres is not None and centres.ndim == 3 else 1
    if was != per_slot:
        raise ValueError(
            f"head: the checkpoint has {was} centres for each class, this run has head.sub_centers={per_slot}. Set "
            f"head.sub_centers={was}, or start a new run with another run.name, with the backbone's weights in init.backbone"
        )
    if per_slot == 1:
        return saved
    return {
        name: rows.flatten(0, 1) if name in BY_ROW and rows.shape[1:2] == (per_slot,) else rows for name, rows in saved.items()
    }


def _check_saved(saved: dict[str, Tensor], num_rows: int) -> None:
    """Raise ValueError unless saved rows are what `load` and the kernels take for granted, whatever format they are in."""
    for name, rows in saved.items():
        is_whole = not (rows.is_floating_point() or rows.is_complex())
        is_row_number = name.endswith("_scale") or name in ("inverse_norms", "updates")
        if rows.is_complex() or (is_whole and (name in ("variance", "inverse_norms") or name.endswith("_scale"))):
            raise ValueError(f"head: saved {name} must be floats, they are {rows.dtype}")
        if is_row_number and rows.shape != (num_rows,):
            raise ValueError(f"head: saved {name} must be ({num_rows},) here, they are {tuple(rows.shape)}")
        if not is_whole and not bool(rows.isfinite().all()):
            raise ValueError(f"head: saved {name} hold numbers that are not finite")
        if name in _LOW and is_whole and (rows.dtype != torch.int8 or f"{name}_scale" not in saved):
            raise ValueError(f"head: saved {name} of {rows.dtype} needs int8 and a {name}_scale")
        other = saved.get("momentum") if name == "centres" and is_whole else rows
        if other is None or (other.dtype, other.shape) != (rows.dtype, rows.shape):
            raise ValueError("head: saved centres of int8 need a momentum of int8 and their shape")
        if name == "centres_scale" and not bool((rows > 0.0).all()):
            raise ValueError("head: saved centres_scale must be above 0")
        if name == "updates" and not (rows.dtype == torch.int32 and 0 <= int(rows.min()) <= int(rows.max()) <= _LAST_STEP):
            raise ValueError(f"head: saved updates must be int32 from 0 to {_LAST_STEP}, they are {rows.dtype} or beyond")


class Noise:
    """Random numbers for blocks of at most `size` elements, on one device; a function of the seeds given to `begin`.

    Generating random bits costs more than a matrix product of the same size. So the noise is one small table, read at an offset
    that changes with every use. The table repeats a permutation of all values of 16 bits. Over all offsets each element gets
    each value exactly once, so the mean over them is exact.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._tables: dict[str, Tensor] = {}  # created at first use
        self._offset = 0

    def begin(self, seed: int) -> None:
        """Set the seed of the numbers that follow, for example once per optimizer step."""
        self._offset = seed % _VALUES

    def next(self, name: str, shape: torch.Size) -> Tensor:
        """Return read-only numbers: "bits", int32 in [0, 65536), or "uniform", fp32 in (0, 1)."""
        if name not in self._tables:
            order = torch.randperm(_VALUES, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
            values = order if name == "bits" else (order + 0.5) / _VALUES
            # one period more than needed, so that any offset fits
            self._tables[name] = values.repeat(-(-self.size // _VALUES) + 1).to(self.device)
        self._offset = (self._offset + _STRIDE) % _VALUES
        return self._tables[name][self._offset : self._offset + shape.numel()].view(shape)


def round_to_bfloat16_(values: Tensor, noise: Noise) -> Tensor:
    """Round contiguous fp32 values in place to numbers that bf16 holds, stochastically; return them (still fp32).

    bf16 is the upper half of fp32's bits; 16 random bits added below carry into it with exactly the right probability.
    """
    values.view(torch.int32).add_(noise.next("bits", values.shape)).bitwise_and_(-_VALUES)
    return values


def quantise_rows(values: Tensor, noise: Noise, out: Tensor, scale: Tensor, scratch: Tensor) -> None:
    """Write (c, D) fp32 values as int8 `out` (c, D) and `scale` (c,): value ~ out * scale; the largest of a row is +-127.

    Args:
        scratch: (c, D) fp32, overwritten.
    """
    largest = torch.abs(values, out=scratch).amax(dim=1)
    torch.div(largest, 127.0, out=scale)
    factor = torch.where(largest > 0, 127.0 / largest, 0.0)
    torch.mul(values, factor[:, None], out=scratch)
    out.copy_(scratch.add_(noise.next("uniform", values.shape)).floor_().clamp_(-127, 127))


def _nearest_int8(values: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Return the nearest integers (c, D) to fp32 values over a scale, as fp32, and the scale (c,); the largest is +-top."""
    scale = values.abs().amax(dim=1) / top
    return (values / scale.clamp_min(1e-38)[:, None]).round_(), scale


def _low_bits(momentum: Tensor) -> Tensor:
    """Return what the bytes (c, D) of a momentum of mini hold of the centre, int8 from -4 to 3."""
    return ((momentum + 4) & 7) - 4
