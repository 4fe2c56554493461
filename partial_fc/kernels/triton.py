"""The elementwise work of the head's two passes on CUDA, each in one sweep over memory; cuda.py launches it.

The same arithmetic as the plain torch code in plain.py. With w a centre, v = 1 / |w|, g = dL / d(w v):

    exp_mask_sum_kernel       PlainKernels.exponentials
    negatives_kernel          PlainKernels.weights and maxima: any other function of the cosine (losses/negatives.py)
    update_kernel             PlainKernels.update_rows; row_optimizer.py has the formulas

Formats narrower than fp32 are rounded stochastically, so that a stored number is right on average (see centres/store.py).
The noise is Philox of (seed, row, column), whatever rows are updated with it; the head counts its chunks into the seed.
negatives_kernel has a program of its own for each kind of function. asin and log are the polynomials of numbers.h: Triton's
interpreter, in which the tests run without a GPU, has no asin, and a library's pow would take longer than all else here.
Shapes: c = classes of one chunk, B = samples of the global (micro-)batch, n = classes of the shard, D = embedding size.
"""

import triton
import triton.language as tl

_SMALLEST_NORM = tl.constexpr(1e-12)
_ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass BigCrush, https://doi.org/10.1145/2063384.2063405, table 2
CLASSES, SAMPLES = tl.constexpr(8), tl.constexpr(256)  # the tile that a program of the first two holds at once
TILES = tl.constexpr(8)  # tiles of consecutive classes per program; each program writes rows of partial sums of its own
SUMS = tl.constexpr(3)
_NO_NEGATIVE = tl.constexpr(-1e30)  # the largest logit of a sample without negatives
_INSIDE = tl.constexpr(0.99999)  # 1 - POLE_EPS of losses/negatives.py, where derivatives of an angle are taken that lies beyond
_PI = tl.constexpr(3.14159265358979)


# what changes from call to call is not specialised: each new alignment would be compiled
@triton.jit(do_not_specialize=["inverse_norms", "num_classes", "begin"])
def exp_mask_sum_kernel(products, inverse_norms, places, partial, num_classes, num_samples, stride, begin, shift, limit):
    """Replace products (c, B) by E v, and write the sums of E over this program's classes to its row of partial."""
    samples = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)
    inside = samples < num_samples
    target_class = (tl.load(places + samples, mask=inside, other=-1) - begin).to(tl.int32)
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


@triton.jit(do_not_specialize=["inverse_norms", "row_weights", "num_classes", "begin"])
def negatives_kernel(
    products, inverse_norms, row_weights, places, coefficients, shifts, less, partial, num_classes, num_samples, stride,
    begin, shift, limit, kind: tl.constexpr, straight: tl.constexpr, sweep: tl.constexpr
):  # fmt: skip
    """Replace products (c, B) by W v, and write this program's sums to its rows of partial (programs, 3, B).

    If sweep is "largest" instead of a link, leave the products, and write the largest logits to partial (programs, 1, B). Then
    row_weights are logarithms. shifts (B,) take the place of shift if they are given.
    """
    samples = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)
    inside = samples < num_samples
    target_class = (tl.load(places + samples, mask=inside, other=-1) - begin).to(tl.int32)
    scale = _by_sample(coefficients, 0, num_samples, samples)
    quadratic = _by_sample(coefficients, 1, num_samples, samples)
    slope = _by_sample(coefficients, 2, num_samples, samples)
    constant = _by_sample(coefficients, 3, num_samples, samples)
    threshold = _by_sample(coefficients, 4, num_samples, samples)
    offset = _by_sample(coefficients, 5, num_samples, samples)
    if shifts is not None:
        shift = _by_sample(shifts, 0, num_samples, samples)
    if less is not None:
        taken = _by_sample(less, 0, num_samples, samples)
    first = tl.full((CLASSES, SAMPLES), _NO_NEGATIVE if sweep == "largest" else 0.0, tl.float32)
    second, third = tl.zeros((CLASSES, SAMPLES), tl.float32), tl.zeros((CLASSES, SAMPLES), tl.float32)
    for tile in range(TILES):
        classes = (tl.program_id(0) * TILES + tile) * CLASSES + tl.arange(0, CLASSES)
        here = classes < num_classes
        at = products + classes[:, None].to(tl.int64) * stride + samples[None, :]
        mask = here[:, None] & inside[None, :]
        cosine = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if inverse_norms is not None:
            v = tl.load(inverse_norms + classes, mask=here, other=1.0)[:, None]
            cosine = v * cosine
        left_out = (cosine > limit) | (classes[:, None] == target_class[None, :])
        counts = mask & (left_out == 0)
        value, derivative = _value(cosine, quadratic, slope, constant, threshold, kind)
        logit = scale * value + offset
        if sweep == "largest":
            if row_weights is not None:
                logit += tl.load(row_weights + classes, mask=here, other=0.0)[:, None]
            first = tl.maximum(first, tl.where(counts, logit, _NO_NEGATIVE))
        else:
            gain, weight = _gain(logit, shift, sweep)
            if row_weights is not None:
                r = tl.load(row_weights + classes, mask=here, other=1.0)[:, None]
                weight, gain = r * weight, r * gain
            first += tl.where(counts, gain, 0.0)
            if sweep == "sum":
                second += tl.where(counts, weight, 0.0)
            elif kind == "hard":
                is_hard = counts & (cosine > threshold)
                second += tl.where(is_hard, 1.0, 0.0)
                third += tl.where(is_hard, cosine, 0.0)
            if less is not None:
                weight -= taken
            weight *= scale if straight else scale * derivative
            weight = tl.where(counts, weight, 0.0)
            if inverse_norms is not None:
                weight *= v
            tl.store(at, weight.to(products.dtype.element_ty), mask=mask)
    if sweep == "largest":
        tl.store(partial + tl.program_id(0).to(tl.int64) * num_samples + samples, tl.max(first, axis=0), mask=inside)
    else:
        _store_sums(partial, num_samples, samples, first, second, third)


@triton.jit
def _by_sample(table, row, num_samples, samples):
    """Return a row of numbers of the samples, (1, SAMPLES); 1 beyond the last."""
    return tl.load(table + row * num_samples + samples, mask=samples < num_samples, other=1.0)[None, :]


@triton.jit
def _store_sums(partial, num_samples, samples, first, second, third):
    row, inside = partial + tl.program_id(0).to(tl.int64) * (SUMS * num_samples) + samples, samples < num_samples
    tl.store(row, tl.sum(first, axis=0), mask=inside)
    tl.store(row + num_samples, tl.sum(second, axis=0), mask=inside)
    tl.store(row + 2 * num_samples, tl.sum(third, axis=0), mask=inside)


@triton.jit
def _gain(logit, shift, link: tl.constexpr):
    """Return what a negative adds to its sample's sum, and the derivative with respect to the logit."""
    if link == "softmax":
        weight = tl.exp(logit - shift)
        gain = weight
    else:
        small = tl.exp(-tl.abs(logit))
        gain = tl.where(logit > 0.0, logit, 0.0) + _log_of_ratio(small / (2.0 + small))  # softplus
        weight = tl.where(logit > 0.0, 1.0, small) / (1.0 + small)
    return gain, weight


@triton.jit
def _value(c, quadratic, slope, constant, threshold, kind: tl.constexpr):
    """Return the logit of a cosine and its derivative, both without the offset and the factor `scale`; NaN stays NaN."""
    if kind == "hard":
        hard = c > threshold
        value = tl.where(hard, (quadratic * c + slope) * c + constant, c)
        derivative = tl.where(hard, 2.0 * quadratic * c + slope, 1.0)
    elif kind == "arcneg":
        apart = c - threshold
        derivative = slope * tl.exp(-(apart * apart) / constant)
        value = derivative * c + derivative - 1.0
    elif kind == "circle":
        derivative = tl.where(c + constant > 0.0, c + constant, 0.0)
        value = derivative * (c - constant)
    elif kind == "power":
        half = (c + 1.0) * 0.5
        half = tl.where(half < 0.0, 0.0, tl.where(half > 1.0, 1.0, half))
        power = tl.exp((slope - 1.0) * _logarithm(tl.where(half > 1e-37, half, 1e-37)))
        power = tl.where((half < 1e-37) & (slope > 1.0), 0.0, power)
        value = 2.0 * power * half - 1.0 + constant
        derivative = slope * power
    elif kind == "angle":
        value = _arcsine(_within(c, 1.0)) * (2.0 / _PI)  # pi - 2 theta = 2 asin(c)
        derivative = _by_cosine(_within(c, _INSIDE)) * (2.0 / _PI)
    elif kind == "angle_squared":
        rest = 1.5 * _PI + _arcsine(_within(c, 1.0))  # 2 pi - theta
        value = rest * rest
        inside = _within(c, _INSIDE)
        derivative = 2.0 * (1.5 * _PI + _arcsine(inside)) * _by_cosine(inside)
    else:
        tl.static_assert(kind == "linear")
        value, derivative = c, tl.full(c.shape, 1.0, tl.float32)
    return value, derivative


@triton.jit
def _within(x, bound):
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def _by_cosine(c):
    """Return - d theta / d cosine."""
    return 1.0 / tl.sqrt((1.0 - c) * (1.0 + c))


@triton.jit
def _log_of_ratio(s):
    """Return log((1 + s) / (1 - s)) for |s| <= 1/3; see numbers.h."""
    t = s * s
    p = ((0.140122294 * t + 0.139995709) * t + 0.200108498) * t + 0.333332062
    return 2.0 * (s + s * t * p)


@triton.jit
def _logarithm(x):
    """Return log(x) of a normal number above 0; see numbers.h."""
    bits = x.to(tl.int32, bitcast=True) - 0x3F3504F3
    n = (bits >> 23).to(tl.float32)
    m = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    return n * 0.693147181 + _log_of_ratio((m - 1.0) / (m + 1.0))


@triton.jit
def _arcsine(x):
    """Return asin(x) for |x| <= 1; see numbers.h."""
    size = tl.abs(x)
    t = tl.where(size > 0.5, (1.0 - size) * 0.5, x * x)
    root = tl.where(size > 0.5, tl.sqrt(t), size)
    p = 0.0422185659 * t + 0.0241475999
    p = ((p * t + 0.0454770997) * t + 0.0749524161) * t + 0.166667536
    angle = root + root * t * p
    angle = tl.where(size > 0.5, 1.57079633 - 2.0 * angle, angle)
    return tl.where(x < 0.0, -angle, angle)


@triton.jit(do_not_specialize=["class_index", "sample_index", "num_targets", "start", "seed"])
def update_kernel(
    centres, momentum, centre_scale, scale, variance, updates, gradient, class_index, sample_index, values, num_targets,
    inverse_norms, index, apply, start, seed, lr, rate1, decay, beta2, rate2, log_beta1, log_beta2, eps, dim,
    block: tl.constexpr, nesterov: tl.constexpr
):  # fmt: skip
    """Take one step with the centre of this program: of AdamW, or of SGD if variance is None.

    Of SGD rate1 is the momentum and decay is added to the gradient. Of AdamW rate1 is 1 - beta1 and decay is a factor.
    """
    if tl.load(apply) != 0:
        columns = tl.arange(0, block)
        mask = columns < dim
        row = _row_number(index, start)
        places = row * dim + columns
        w = tl.load(centres + places, mask=mask, other=0.0).to(tl.float32)
        m = _load_momentum(momentum, scale, row, places, mask)
        if variance is not None:
            s = tl.load(variance + places, mask=mask, other=0.0).to(tl.float32)
        if updates is not None:
            count = tl.load(updates + row) + 1
        v = tl.load(inverse_norms + row)
        g = _gradient_of_unit(gradient, class_index, sample_index, values, num_targets, v, columns, mask, dim)
        w, m, v, g = _with_scale(momentum, centre_scale, scale, row, places, mask, w, m, v, g)
        full = _gradient_of_centre(g, v, w)
        carry = 0.0
        if variance is not None:
            m = m + rate1 * (full - m)
            s = beta2 * s + rate2 * full * full
            spread = tl.sqrt(s / _one_minus_power(log_beta2, count)) + eps
            w = decay * w - lr / _one_minus_power(log_beta1, count) * m / spread
        elif nesterov:
            full = full + decay * w
            m = rate1 * m + full
            w = w - lr * (full + rate1 * m)
            carry = lr * rate1 / (1.0 - rate1) * rate1
        else:
            m = rate1 * m + full + decay * w
            w = w - lr * m
            carry = lr * rate1 / (1.0 - rate1)
        noise = _random_bits(seed, row, 0, block)
        if variance is not None:
            _store(variance, places, mask, s, _random_bits(seed, row, 1, block) & 0xFFFF)
        w = _store_momentum(momentum, centre_scale, scale, row, places, mask, w, m, noise, carry)
        _store_centre(centres, inverse_norms, row, places, mask, w, noise & 0xFFFF)
        if updates is not None:
            tl.store(updates + row, count)


@triton.jit
def _row_number(index, start):
    """Return this program's row of the shard; 64 bits, because its product with D needs more than 32."""
    row = tl.program_id(0).to(tl.int64)
    return row + start if index is None else tl.load(index + row)


@triton.jit
def _gradient_of_unit(gradient, class_index, sample_index, values, num_targets, v, columns, mask, dim):
    """Return v g of this program's row, both parts, the samples of its class added in their order."""
    row = tl.program_id(0)
    g = tl.load(gradient + row.to(tl.int64) * dim + columns, mask=mask, other=0.0).to(tl.float32)
    low, high = row * 0, row * 0 + num_targets
    while low < high:  # the first n with class_index[n] >= row; numbers of targets and of a chunk's rows have 32 bits
        middle = (low + high) // 2
        is_before = tl.load(class_index + middle).to(tl.int32) < row
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    while tl.load(class_index + low, mask=low < num_targets, other=-1).to(tl.int32) == row:
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
def _store_momentum(momentum, centre_scale, scale, row, places, mask, w, m, noise, carry):
    """Store a row of the momentum; return what is to be stored of its centre: of mini whole steps, the rest is stored here."""
    if scale is None:
        _store(momentum, places, mask, m, noise >> 16)
    elif centre_scale is None:
        step = tl.max(tl.abs(m), axis=0) / 127.0
        tl.store(momentum + places, _quantise(m, step, noise >> 16, 127.0).to(tl.int8), mask=mask)
        tl.store(scale + row, step)
    else:
        count = tl.load(centre_scale + row).to(tl.int32, bitcast=True)  # the lower half counts the updates; see store.py
        turns = (row * 7919).to(tl.int32) + count + tl.arange(0, w.shape[0])
        step = tl.max(tl.abs(m), axis=0) / 15.0
        rounded = _quantise(m, step, turns * 27145 & 0xFFFF, 15.0)
        w += carry * (rounded * step - m)
        tl.store(scale + row, step * 0.125)
        whole = tl.max(tl.abs(w), axis=0) / 127.0
        whole = (tl.where(whole > 0.0, whole, 1.0).to(tl.int32, bitcast=True) + 0xFFFF & -65536) | (count + 1 & 0xFFFF)
        whole = whole.to(tl.float32, bitcast=True)
        tl.store(centre_scale + row, whole)
        eighths = _quantise(w, whole * 0.125, turns * 40503 & 0xFFFF, 1016.0)
        w = tl.floor((eighths + 4.0) * 0.125)
        tl.store(momentum + places, (8.0 * (rounded - w) + eighths).to(tl.int8), mask=mask)
    return w


@triton.jit
def _quantise(values, step, noise, top):
    """Return integers up to +-top, rounded by 16 random bits, as fp32."""
    quotients = values / tl.where(step > 0.0, step, 1.0)
    quotients = tl.floor(quotients + (noise.to(tl.float32) + 0.5) / 65536.0)  # strictly between 0 and 1: integers stay
    return tl.minimum(tl.maximum(quotients, -top), top)


@triton.jit
def _with_scale(momentum, centre_scale, scale, row, places, mask, w, m, v, g):
    """Return centre, momentum, v and gradient; of mini with the low bits of the momentum's bytes and the centre's scale."""
    if centre_scale is not None:
        low = (((tl.load(momentum + places, mask=mask, other=0).to(tl.int32) + 4) & 7) - 4).to(tl.float32)
        whole = tl.load(centre_scale + row)
        w, m = (w + 0.125 * low) * whole, m - low * tl.load(scale + row)
        v, g = v / whole, g / whole
    return w, m, v, g


@triton.jit
def _store_centre(centres, inverse_norms, row, places, mask, values, noise):
    """Store a centre and 1 / norm of what is stored, rounding included."""
    values = _store(centres, places, mask, values, noise)
    norm = tl.sqrt(tl.sum(tl.where(mask, values * values, 0.0), axis=0))
    tl.store(inverse_norms + row, 1.0 / tl.where(norm < _SMALLEST_NORM, _SMALLEST_NORM, norm))  # NaN stays NaN
