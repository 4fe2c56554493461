"""The elementwise work of the head's two passes on CUDA, each in one sweep over memory; cuda.py launches it.

The same arithmetic as the plain torch code in plain.py and row_optimizer.py. With w a centre, v = 1 / |w|, g = dL / d(w v):

    exp_mask_sum_kernel  E = exp(v y - K), 0 for target classes and above the limit;  y <- E v;  Z_i += sum_j E_ji
    sgd_kernel           v g = y + v sum_n t_n,  of the samples n of this class;  G = v g - t w,  t = v^2 (v g . w)
                         m <- mu m + G + weight_decay w;  w <- w - lr m, or w - lr (G + weight_decay w + mu m) if nesterov
    adamw_kernel         m <- beta1 m + (1 - beta1) G;  s <- beta2 s + (1 - beta2) G^2;
                         w <- (1 - lr weight_decay) w - lr (m / (1 - beta1^k)) / (sqrt(s / (1 - beta2^k)) + eps)

Formats narrower than fp32 are rounded stochastically, so that a stored number is right on average (see centres/store.py).
The noise is Philox of (seed, row, column). It depends neither on the chunks nor on the order in which they are processed.
Shapes: c = classes of one chunk, B = samples of the global (micro-)batch, n = classes of the shard, D = embedding size.
"""

import triton
import triton.language as tl

_SMALLEST_NORM = tl.constexpr(1e-12)
_ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass BigCrush, https://doi.org/10.1145/2063384.2063405, table 2
CLASSES, SAMPLES = tl.constexpr(8), tl.constexpr(256)  # the tile that a program of exp_mask_sum_kernel holds at once
TILES = tl.constexpr(8)  # tiles of consecutive classes per program; each program writes one row of partial sums


# what changes from call to call is not specialised: each new alignment would be compiled
@triton.jit(do_not_specialize=["inverse_norms", "num_classes", "begin"])
def exp_mask_sum_kernel(products, inverse_norms, places, partial, num_classes, num_samples, stride, begin, shift, limit):
    """Replace products (c, B) by E v, and write the sums of E over this program's classes to its row of partial."""
    samples = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)
    inside = samples < num_samples
    target_class = tl.load(places + samples, mask=inside, other=-1) - begin
    total = tl.zeros((CLASSES, SAMPLES), tl.float32)
    for tile in range(TILES):
        classes = (tl.program_id(0) * TILES + tile) * CLASSES + tl.arange(0, CLASSES)
        at = products + classes[:, None].to(tl.int64) * stride + samples[None, :]
        mask = (classes < num_classes)[:, None] & inside[None, :]
        logits = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
        if inverse_norms is not None:
            v = tl.load(inverse_norms + classes, mask=classes < num_classes, other=1.0)[:, None]
            logits = v * logits
        left_out = (logits > limit) | (classes[:, None] == target_class[None, :])
        exponential = tl.where(left_out, 0.0, tl.exp(logits - shift))
        total += exponential
        if inverse_norms is not None:
            exponential = v * exponential
        tl.store(at, exponential.to(products.dtype.element_ty), mask=mask)
    sums = partial + tl.program_id(0).to(tl.int64) * num_samples + samples
    tl.store(sums, tl.sum(total, axis=0), mask=inside)


@triton.jit(do_not_specialize=["class_index", "sample_index", "num_targets", "start", "seed"])
def sgd_kernel(
    centres,
    momentum,
    scale,
    gradient,
    class_index,
    sample_index,
    values,
    num_targets,
    inverse_norms,
    index,
    apply,
    start,
    seed,
    lr,
    factor,
    decay,
    dim,
    block: tl.constexpr,
    nesterov: tl.constexpr,
):
    """Take one step of SGD with the centre of this program."""
    if tl.load(apply) != 0:
        columns = tl.arange(0, block)
        mask = columns < dim
        row = _row_number(index, start)
        places = row * dim + columns
        w = tl.load(centres + places, mask=mask, other=0.0).to(tl.float32)
        m = _load_momentum(momentum, scale, row, places, mask)
        v = tl.load(inverse_norms + row)
        g = _gradient_of_unit(gradient, class_index, sample_index, values, num_targets, v, columns, mask, dim)
        if nesterov:
            full = _gradient_of_centre(g, v, w) + decay * w
            m = factor * m + full
            w = w - lr * (full + factor * m)
        else:
            m = factor * m + _gradient_of_centre(g, v, w) + decay * w
            w = w - lr * m
        noise = _random_bits(seed, row, 0, block)
        _store_momentum(momentum, scale, row, places, mask, m, noise >> 16)
        _store_centre(centres, inverse_norms, row, places, mask, w, noise & 0xFFFF)


@triton.jit(do_not_specialize=["class_index", "sample_index", "num_targets", "start", "seed"])
def adamw_kernel(
    centres,
    momentum,
    scale,
    variance,
    updates,
    gradient,
    class_index,
    sample_index,
    values,
    num_targets,
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
    """Take one step of AdamW with the centre of this program."""
    if tl.load(apply) != 0:
        columns = tl.arange(0, block)
        mask = columns < dim
        row = _row_number(index, start)
        places = row * dim + columns
        w = tl.load(centres + places, mask=mask, other=0.0).to(tl.float32)
        m = _load_momentum(momentum, scale, row, places, mask)
        s = tl.load(variance + places, mask=mask, other=0.0).to(tl.float32)
        count = tl.load(updates + row) + 1
        v = tl.load(inverse_norms + row)
        g = _gradient_of_unit(gradient, class_index, sample_index, values, num_targets, v, columns, mask, dim)
        full = _gradient_of_centre(g, v, w)
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
def _gradient_of_unit(gradient, class_index, sample_index, values, num_targets, v, columns, mask, dim):
    """Return v g of this program's row, both parts, the samples of its class added in their order."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.load(gradient + row * dim + columns, mask=mask, other=0.0).to(tl.float32)
    low, high = row * 0, row * 0 + num_targets
    while low < high:  # the first n with class_index[n] >= row
        middle = (low + high) // 2
        is_before = tl.load(class_index + middle) < row
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    while tl.load(class_index + low, mask=low < num_targets, other=-1) == row:
        sample = tl.load(sample_index + low)
        g += v * tl.load(values + sample * dim + columns, mask=mask, other=0.0)
        low += 1
    return g


@triton.jit
def _gradient_of_centre(g, v, w):
    """Return G from v g: without its component along w."""
    return g - tl.sum(g * w, axis=0) * v * v * w


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
