"""The negatives whose logit is not just a constant times the cosine, on CUDA in one sweep over memory; cuda.py launches it.

losses/negatives.py defines the functions, and PlainKernels in plain.py the results. Each kind has a program of its own, since
`kind` is a constant of the compilation. asin and log are the polynomials of numbers.h: Triton's interpreter, in which the tests
run without a GPU, has no asin, and a library's pow would take longer than all else here.
Shapes: c = classes of one chunk, B = samples of the global (micro-)batch.
"""

import triton
import triton.language as tl

CLASSES, SAMPLES = tl.constexpr(8), tl.constexpr(256)  # the tile that a program holds at once
TILES = tl.constexpr(8)  # tiles of consecutive classes per program; each program writes its own rows of partial sums
SUMS = tl.constexpr(3)
NO_NEGATIVE = tl.constexpr(-1e30)  # the largest logit of a sample without negatives
_INSIDE = tl.constexpr(0.99999)  # 1 - POLE_EPS of losses/negatives.py, where derivatives of an angle are taken that lies beyond
_PI = tl.constexpr(3.14159265358979)


# what changes from call to call is not specialised: each new alignment would be compiled
@triton.jit(do_not_specialize=["inverse_norms", "row_weights", "num_classes", "begin"])
def negatives_kernel(
    products,
    inverse_norms,
    row_weights,
    places,
    coefficients,
    shifts,
    less,
    partial,
    num_classes,
    num_samples,
    stride,
    begin,
    shift,
    limit,
    kind: tl.constexpr,
    straight: tl.constexpr,
    sweep: tl.constexpr,
):
    """Replace products (c, B) by W v, and write this program's sums to its rows of partial (programs, 3, B).

    If sweep is "largest" instead of a link, leave the products, and write the largest logits to partial (programs, 1, B). Then
    row_weights are logarithms. shifts (B,) take the place of shift if they are given.
    """
    samples = tl.program_id(1) * SAMPLES + tl.arange(0, SAMPLES)
    inside = samples < num_samples
    target_class = tl.load(places + samples, mask=inside, other=-1) - begin
    scale = _of_samples(coefficients, 0, num_samples, samples)
    quadratic = _of_samples(coefficients, 1, num_samples, samples)
    slope = _of_samples(coefficients, 2, num_samples, samples)
    constant = _of_samples(coefficients, 3, num_samples, samples)
    threshold = _of_samples(coefficients, 4, num_samples, samples)
    offset = _of_samples(coefficients, 5, num_samples, samples)
    if shifts is not None:
        shift = _of_samples(shifts, 0, num_samples, samples)
    if less is not None:
        taken = _of_samples(less, 0, num_samples, samples)
    first = tl.full((CLASSES, SAMPLES), NO_NEGATIVE if sweep == "largest" else 0.0, tl.float32)
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
            first = tl.maximum(first, tl.where(counts, logit, NO_NEGATIVE))
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
def _of_samples(table, row, num_samples, samples):
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
