"""Randomness as pure functions: every random number of a run depends on (seed, purpose, position), never on earlier calls.

So a resumed run draws the same numbers as an uninterrupted one, and another number of processes sees the same samples and the
same initial class centres. `permute` is a Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", CT-RSA 2002): a permutation of n numbers that is computed, not stored. The mixing function is the finaliser of
SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). It is plain integer arithmetic, so the values do not depend on a library's
version. Checkpoints rely on that, because the order of the class centres is such a permutation.
"""

import functools

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
_ROUNDS = 6


def derive(seed: int, *parts: int | str) -> int:
    """Return a seed in [0, 2^63) for one purpose, for example derive(seed, "flip", epoch)."""
    state = _mix(seed & _MASK)
    for part in parts:
        words = part.encode() if isinstance(part, str) else int(part).to_bytes(16, "little", signed=True)
        for start in range(0, len(words), 8):
            word = int.from_bytes(words[start : start + 8], "little")
            state = _mix((state ^ word) + _GOLDEN & _MASK)
        state = _mix(state + len(words) & _MASK)
    return state >> 1


def uniform(seed: int, index: np.ndarray) -> np.ndarray:
    """Return float64 numbers in [0, 1), one for each entry of the int64 array `index`, as a function of (seed, entry)."""
    return (_mix_array(index.astype(np.uint64), seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(index: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Return the images of `index` (int64, each in [0, size)) under the pseudo-random permutation of range(size) of `seed`.

    Takes O(len(index)) time and memory for any size.
    """
    return _walk(index, size, seed, range(_ROUNDS))


def unpermute(index: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Return the inverse of `permute`: unpermute(permute(i, n, s), n, s) == i."""
    return _walk(index, size, seed, range(_ROUNDS - 1, -1, -1))


def _walk(index: np.ndarray, size: int, seed: int, rounds: range) -> np.ndarray:
    """Apply the network until each value falls inside range(size); under four rounds on average."""
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)  # bits of each half of the Feistel block
    values = np.asarray(index, dtype=np.uint64)
    if values.size and int(values.max()) >= size:
        raise ValueError(f"index {int(values.max())} is outside [0, {size})")
    values = _feistel(values, half, seed, rounds)
    while True:
        outside = np.flatnonzero(values >= np.uint64(size))
        if outside.size == 0:
            return values.astype(np.int64)
        values[outside] = _feistel(values[outside], half, seed, rounds)


def _feistel(values: np.ndarray, half: int, seed: int, rounds: range) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    forward = rounds.step > 0
    keys = _round_keys(seed)
    for number in rounds:
        key = keys[number]
        if forward:
            left, right = right, left ^ (_mix_array(right, key) & mask)
        else:
            left, right = right ^ (_mix_array(left, key) & mask), left
    return (left << shift) | right


@functools.lru_cache(maxsize=1024)
def _round_keys(seed: int) -> tuple[int, ...]:
    return tuple(derive(seed, "feistel", number) for number in range(_ROUNDS))


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MUL1 & _MASK
    value = (value ^ (value >> 27)) * _MUL2 & _MASK
    return value ^ (value >> 31)


def _mix_array(values: np.ndarray, key: int) -> np.ndarray:
    """Return the 64-bit mix of (value, key), elementwise on a uint64 array; array arithmetic wraps modulo 2^64."""
    out = values * np.uint64(_GOLDEN) + np.uint64(key & _MASK)
    out ^= out >> np.uint64(30)
    out *= np.uint64(_MUL1)
    out ^= out >> np.uint64(27)
    out *= np.uint64(_MUL2)
    out ^= out >> np.uint64(31)
    return out
