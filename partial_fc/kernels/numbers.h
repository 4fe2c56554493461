/* Arithmetic that cpu.c and negatives.c share: bf16, and functions that a compiler can vectorise. */

#ifndef NUMBERS_H
#define NUMBERS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 256 /* samples at once where a loop would mix element widths */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

INLINE float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE uint16_t nearest_bfloat16(float x) {
    uint32_t bits = to_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded;
}

/* exp(x), relative error about 1e-7; 0 below fp32's normal numbers. exp(x) = 2^n exp(r), |r| <= ln(2) / 2, Taylor to r^7. */
INLINE float exponential(float x) {
    float clamped = x < -87.0f ? -87.0f : (x > 88.5f ? 88.5f : x);
    float n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f; /* nearest integer, by the rounding of 1.5 * 2^23 */
    float r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    float value = p * from_bits((uint32_t)((int32_t)n + 127) << 23);
    return x < -87.0f ? 0.0f : (x > 88.5f ? INFINITY : value);
}

/* log((1 + s) / (1 - s)) = 2 atanh(s) for |s| <= 1/3, relative error about 1e-7. atanh(s) / s is a polynomial in s^2, fitted for
   the smallest relative error (5e-9) on [0, 1/9]. */
INLINE float log_of_ratio(float s) {
    float t = s * s;
    float p = 0.140122294f;
    p = p * t + 0.139995709f;
    p = p * t + 0.200108498f;
    p = p * t + 0.333332062f;
    return 2.0f * (s + s * t * p);
}

/* log(1 + x) for x in [0, 1]. */
INLINE float log_of_one_plus(float x) { return log_of_ratio(x / (2.0f + x)); }

/* log(x) of a normal number above 0: x = 2^n m, 1 / sqrt(2) <= m < sqrt(2). */
INLINE float logarithm(float x) {
    uint32_t bits = to_bits(x) - 0x3f3504f3u; /* of 1 / sqrt(2), so that n is the integer part of what is left */
    float n = (float)((int32_t)bits >> 23);
    float m = from_bits((bits & 0x007fffffu) + 0x3f3504f3u);
    return n * 0.693147181f + log_of_ratio((m - 1.0f) / (m + 1.0f));
}

/* asin(x) for |x| <= 1, absolute error about 1e-7. Above 1/2 it is pi / 2 - 2 asin(sqrt((1 - x) / 2)). The polynomial in x^2 was
   fitted for the smallest relative error (5e-9) on [0, 1/4]. */
INLINE float arcsine(float x) {
    float size = fabsf(x);
    float t = size > 0.5f ? (1.0f - size) * 0.5f : x * x;
    float root = size > 0.5f ? sqrtf(t) : size;
    float p = 0.0422185659f;
    p = p * t + 0.0241475999f;
    p = p * t + 0.0454770997f;
    p = p * t + 0.0749524161f;
    p = p * t + 0.166667536f;
    float angle = root + root * t * p;
    angle = size > 0.5f ? 1.57079633f - 2.0f * angle : angle;
    return x < 0.0f ? -angle : angle;
}

#endif
