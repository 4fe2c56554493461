"""The elementwise work of the head's two passes on CUDA, each in one sweep over memory; cuda.py calls it.

The same arithmetic as the plain torch code in plain.py and row_optimizer.py. With w a centre, v = 1 / |w|, g = dL / d(w v):

    exp_mask_sum    E = exp(z - K), 0 for target classes and above the limit;  Z_i += sum_j E_ji
    sgd_update      G = v g - t v w,  t = v^2 (g . w);  m <- mu m + G + weight_decay w;  w <- w - lr m
    adamw_update    m <- beta1 m + (1 - beta1) G;  s <- beta2 s + (1 - beta2) G^2;
                    w <- (1 - lr weight_decay) w - lr (m / (1 - beta1^k)) / (sqrt(s / (1 - beta2^k)) + eps)

Formats narrower than fp32 are rounded stochastically, so that a stored number is right on average (see rounding.py).
The noise is Philox of (seed, row, column). It depends neither on the chunks nor on the order in which they are processed.
Shapes: c = classes of one chunk, B = samples of the global (micro-)batch, n = classes of the shard, D = embedding size.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_DIM = 4096  # one program holds a row in its registers
_SMALLEST_NORM = tl.constexpr(1e-12)
_ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass BigCrush, https://doi.org/10.1145/2063384.2063405, table 2
_CLASSES, _SAMPLES = tl.constexpr(8), tl.constexpr(256)  # the tile that a program of exp_mask_sum holds at once
_TILES = tl.constexpr(8)  # tiles of consecutive classes per program; each program writes one row of partial sums


def exp_mask_sum(logits: Tensor, target: Tensor, shift: float | None, limit: float | None, z_sum: Tensor) -> None:
    """Replace logits (c, B) by E = exp(logits - shift), 0 for target classes and above the limit; add E's sums to z_sum.

    Args:
        logits: fp32 or bf16; each row is contiguous. The arithmetic is fp32.
        target: int32 (B,), the row of logits with the target class of sample i; outside [0, c) if it is in another chunk.
        shift: K; None = 0.
        limit: logits above it are left out of the softmax (the interclass filter); None = none.
        z_sum: (B,) fp32; the sums are of the fp32 values, before E is rounded to the dtype of logits.
    """
    num_classes, num_samples = logits.shape
    assert logits.stride(1) == 1 or num_samples == 1, "each row of logits must be contiguous"
    assert target.dtype == torch.int32 and z_sum.dtype == torch.float32
    if not logits.numel():
        return
    grid = (triton.cdiv(num_classes, _CLASSES.value * _TILES.value), triton.cdiv(num_samples, _SAMPLES.value))
    # one row of partial sums per program, then a sum in a fixed order; atomics would add in a varying order
    partial = torch.empty(grid[0], num_samples, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        numbers = (num_classes, num_samples, logits.stride(0), float(shift or 0.0), math.inf if limit is None else float(limit))
        _exp_mask_sum_kernel[grid](logits, target, partial, *numbers)
    z_sum += partial.sum(dim=0)


def sgd_update(
    centres: Tensor,
    momentum: Tensor,
    momentum_scale: Tensor | None,
    gradient: Tensor,
    inverse_norms: Tensor,
    select: int | Tensor,
    lr: float,
    momentum_factor: float,
    weight_decay: float,
    seed: int,
    apply: Tensor,
) -> None:
    """Take one step of SGD with the selected centres, from the gradient (c, D) of their unit vectors; fp32 or bf16.

    Args:
        centres: (n, D) fp32 or bf16.
        momentum: (n, D) fp32, bf16, or int8 in units of momentum_scale (n,) fp32, which is None otherwise.
        inverse_norms: (n,) fp32, 1 / max(|w|, 1e-12) of the centres as stored; read and rewritten.
        select: the first of c consecutive rows, or c distinct rows (int64).
        seed: of the stochastic rounding; only its low 63 bits are used.
        apply: device flag, one number: 0 skips the update without a host sync.
    """
    states = [centres, momentum] if momentum_scale is None else [centres, momentum, momentum_scale]
    block, warps = _check(states, gradient, inverse_norms, select)
    if not len(gradient):
        return
    index, start = (select, 0) if isinstance(select, Tensor) else (None, select)
    with torch.cuda.device_of(centres):
        _sgd_kernel[(len(gradient),)](
            *(centres, momentum, momentum_scale, gradient, inverse_norms, index, apply, start, seed & (2**63 - 1)),
            *(float(lr), float(momentum_factor), float(weight_decay), centres.shape[1], block),
            num_warps=warps,
        )


def adamw_update(
    centres: Tensor,
    momentum: Tensor,
    momentum_scale: Tensor | None,
    variance: Tensor,
    updates: Tensor,
    gradient: Tensor,
    inverse_norms: Tensor,
    select: int | Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    seed: int,
    apply: Tensor,
) -> None:
    """Take one step of AdamW with the selected centres; see sgd_update.

    Args:
        variance: (n, D) fp32 or bf16.
        updates: (n,) int32, the number of updates of each row so far; k is one more. Incremented here.
    """
    states = [centres, momentum, variance, updates] + ([] if momentum_scale is None else [momentum_scale])
    block, warps = _check(states, gradient, inverse_norms, select)
    if not len(gradient):
        return
    index, start = (select, 0) if isinstance(select, Tensor) else (None, select)
    # in double precision: 1 - 0.999 and log(0.999) in fp32 would be wrong in the fifth digit
    logs = [math.log(beta) if beta > 0.0 else -math.inf for beta in (beta1, beta2)]
    with torch.cuda.device_of(centres):
        _adamw_kernel[(len(gradient),)](
            *(centres, momentum, momentum_scale, variance, updates, gradient, inverse_norms, index, apply, start),
            *(seed & (2**63 - 1), float(lr), 1.0 - beta1, float(beta2), 1.0 - beta2, *logs, float(eps)),
            *(1.0 - lr * weight_decay, centres.shape[1], block),
            num_warps=warps,
        )


def _check(states: list[Tensor], gradient: Tensor, inverse_norms: Tensor, select: int | Tensor) -> tuple[int, int]:
    """Return the columns (a power of two) and warps of a program, after checking what the kernels assume."""
    num_rows, dim = states[0].shape
    assert dim <= _LARGEST_DIM, f"rows of at most {_LARGEST_DIM} numbers, got {dim}"
    assert all(tensor.is_contiguous() and len(tensor) == num_rows for tensor in [*states, inverse_norms])
    assert gradient.is_contiguous() and gradient.shape[1] == dim
    if isinstance(select, Tensor):
        assert select.dtype == torch.int64 and select.shape == gradient.shape[:1] and select.is_contiguous()
    else:
        assert 0 <= select <= num_rows - len(gradient)
    block = max(16, triton.next_power_of_2(dim))
    return block, min(max(block // 256, 1), 8)


@triton.jit
def _exp_mask_sum_kernel(logits, target, partial, num_classes, num_samples, stride, shift, limit):
    samples = tl.program_id(1) * _SAMPLES + tl.arange(0, _SAMPLES)
    inside = samples < num_samples
    target_class = tl.load(target + samples, mask=inside, other=-1)
    total = tl.zeros((_CLASSES, _SAMPLES), tl.float32)
    for tile in range(_TILES):
        classes = (tl.program_id(0) * _TILES + tile) * _CLASSES + tl.arange(0, _CLASSES)
        places = logits + classes[:, None].to(tl.int64) * stride + samples[None, :]
        mask = (classes < num_classes)[:, None] & inside[None, :]
        z = tl.load(places, mask=mask, other=float("-inf")).to(tl.float32)
        left_out = (z > limit) | (classes[:, None] == target_class[None, :])
        exponential = tl.where(left_out, 0.0, tl.exp(z - shift))
        tl.store(places, exponential.to(logits.dtype.element_ty), mask=mask)
        total += exponential
    sums = partial + tl.program_id(0).to(tl.int64) * num_samples + samples
    tl.store(sums, tl.sum(total, axis=0), mask=inside)


@triton.jit(do_not_specialize=["start", "seed"])  # they change with every call; specialising would recompile
def _sgd_kernel(
    centres, momentum, scale, gradient, inverse_norms, index, apply, start, seed, lr, factor, decay, dim, block: tl.constexpr
):
    if tl.load(apply) != 0:
        columns = tl.arange(0, block)
        mask = columns < dim
        row = _row_number(index, start)
        places = row * dim + columns
        w = tl.load(centres + places, mask=mask, other=0.0).to(tl.float32)
        m = _load_momentum(momentum, scale, row, places, mask)
        full = _gradient_of_centre(gradient, inverse_norms, row, columns, mask, w, dim)
        m = factor * m + full + decay * w
        w = w - lr * m
        noise = _random_bits(seed, row, 0, block)
        _store_momentum(momentum, scale, row, places, mask, m, noise >> 16)
        _store_centre(centres, inverse_norms, row, places, mask, w, noise & 0xFFFF)


@triton.jit(do_not_specialize=["start", "seed"])
def _adamw_kernel(
    centres,
    momentum,
    scale,
    variance,
    updates,
    gradient,
    inverse_norms,
    index,
    apply,
    start,
    seed,
    lr,
    rate1,
    beta2,
    rate2,
    log_beta1,
    log_beta2,
    eps,
    keep,
    dim,
    block: tl.constexpr,
):
    if tl.load(apply) != 0:
        columns = tl.arange(0, block)
        mask = columns < dim
        row = _row_number(index, start)
        places = row * dim + columns
        w = tl.load(centres + places, mask=mask, other=0.0).to(tl.float32)
        m = _load_momentum(momentum, scale, row, places, mask)
        s = tl.load(variance + places, mask=mask, other=0.0).to(tl.float32)
        count = tl.load(updates + row) + 1
        full = _gradient_of_centre(gradient, inverse_norms, row, columns, mask, w, dim)
        m = m + rate1 * (full - m)
        s = beta2 * s + rate2 * full * full
        spread = tl.sqrt(s / _one_minus_power(log_beta2, count)) + eps
        w = keep * w - lr / _one_minus_power(log_beta1, count) * m / spread
        noise = _random_bits(seed, row, 0, block)
        _store(variance, places, mask, s, _random_bits(seed, row, 1, block) & 0xFFFF)
        _store_momentum(momentum, scale, row, places, mask, m, noise >> 16)
        _store_centre(centres, inverse_norms, row, places, mask, w, noise & 0xFFFF)
        tl.store(updates + row, count)


@triton.jit
def _row_number(index, start):
    """Return this program's row of the shard; 64 bits, because its product with D needs more than 32."""
    row = tl.program_id(0).to(tl.int64)
    return row + start if index is None else tl.load(index + row)


@triton.jit
def _gradient_of_centre(gradient, inverse_norms, row, columns, mask, w, dim):
    """Return G: g without its component along w, divided by the norm of w."""
    g = tl.load(gradient + tl.program_id(0).to(tl.int64) * dim + columns, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(inverse_norms + row)
    along = tl.sum(g * w, axis=0) * v * v
    return v * g - along * v * w


@triton.jit
def _one_minus_power(log_beta, count):
    """Return 1 - beta^count; near 1 by the Taylor series of exp(x) - 1, since the difference would lose most digits."""
    x = tl.maximum(log_beta * count.to(tl.float32), -100.0)  # exp(-100) is 0 here; without the bound the series would overflow
    series = x * (1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7))))))
    return tl.where(x > -0.5, -series, 1.0 - tl.exp(x))


@triton.jit
def _random_bits(seed, row, stream, block: tl.constexpr):
    """Return 32 random bits (uint32) for each column of a row; Philox makes four numbers at a time."""
    groups = (row * 2 + stream) * (block // 4) + tl.arange(0, block // 4)
    first, second, third, fourth = tl.randint4x(seed, groups, _ROUNDS)
    return tl.reshape(tl.join(tl.join(first, second), tl.join(third, fourth)), (block,))


@triton.jit
def _store(tensor, places, mask, values, noise):
    """Store fp32 values, in bf16 rounded by 16 random bits; return what was stored.

    bf16 is the upper half of fp32's bits; 16 random bits added below carry into it with exactly the right probability.
    """
    if tensor.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000  # a carry would turn CUDA's NaN, all ones, into -0
        rounded = ((bits + noise.to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
        values = tl.where(finite, rounded, values)
    tl.store(tensor + places, values.to(tensor.dtype.element_ty), mask=mask)
    return values


@triton.jit
def _load_momentum(momentum, scale, row, places, mask):
    """Return a row of the momentum in fp32; scale is None unless it is int8."""
    values = tl.load(momentum + places, mask=mask, other=0).to(tl.float32)
    if scale is not None:
        values = values * tl.load(scale + row)
    return values


@triton.jit
def _store_momentum(momentum, scale, row, places, mask, values, noise):
    if scale is None:
        _store(momentum, places, mask, values, noise)
    else:
        step = tl.max(tl.abs(values), axis=0) / 127.0
        quotients = values / tl.where(step > 0.0, step, 1.0)
        quotients = tl.floor(quotients + (noise.to(tl.float32) + 0.5) / 65536.0)  # strictly between 0 and 1: integers stay
        tl.store(momentum + places, tl.minimum(tl.maximum(quotients, -127.0), 127.0).to(tl.int8), mask=mask)
        tl.store(scale + row, step)


@triton.jit
def _store_centre(centres, inverse_norms, row, places, mask, values, noise):
    """Store a centre and 1 / norm of what is stored, rounding included."""
    values = _store(centres, places, mask, values, noise)
    norm = tl.sqrt(tl.sum(tl.where(mask, values * values, 0.0), axis=0))
    tl.store(inverse_norms + row, 1.0 / tl.where(norm < _SMALLEST_NORM, _SMALLEST_NORM, norm))  # NaN stays NaN
