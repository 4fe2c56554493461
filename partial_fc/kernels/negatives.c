/* The negatives whose logit is not just a constant times the cosine: logits, derivatives, weights and sums in one sweep.

   losses/negatives.py defines the functions, and PlainKernels.weights and PlainKernels.maxima in plain.py the results. Each kind
   of function has a sweep of its own, so that the loop over samples has no branch and is vectorised. Each thread gets an equal
   range of classes. The number of threads changes how the sums are grouped, and nothing else. */

#include "numbers.h"

enum { LINEAR = 0, HARD, ARCNEG, CIRCLE, ANGLE, ANGLE_SQUARED, POWER }; /* the order of KINDS in cpu.py */
enum { SOFTMAX = 0, SUM, LARGEST };
enum { SCALE = 0, QUADRATIC, SLOPE, CONSTANT, THRESHOLD, OFFSET, SHIFT, LESS, TABLE_ROWS };

#define SUMS 3
#define TILE 8 /* classes in a row for one block of samples, whose numbers then stay in the first cache */
#define INSIDE 0.99999f /* 1 - POLE_EPS of losses/negatives.py, where derivatives of an angle are taken that lies beyond */
#define NO_NEGATIVE -1e30f /* the largest logit of a sample without negatives */
#define PI 3.14159265f

typedef struct {
    void *products;       /* (classes, samples): of centres with unit embeddings; the weights take their place */
    int format;           /* of products, FLOAT32 or BFLOAT16 */
    int64_t classes, samples;
    const float *inverse; /* (classes), v; NULL = 1 */
    const float *rows;    /* (classes), weights r of the classes, or their logarithms in maxima; NULL = 1, or 0 */
    const int32_t *own;   /* (samples): the row of each sample's own class; -1 if it is not among the rows */
    const float *table;   /* (TABLE_ROWS, samples): the coefficients, then K and what is taken off each E */
    int straight;
    float limit;
} Sweep;

/* Logit and derivative of one negative, both without the offset and the factor SCALE; c is finite, and may be beyond [-1, 1]. */
INLINE void value_of(int kind, float c, float quadratic, float slope, float constant, float threshold, float *value,
                     float *derivative) {
    *value = c;
    *derivative = 1.0f;
    if (kind == HARD) {
        int hard = c > threshold;
        *value = hard ? (quadratic * c + slope) * c + constant : c;
        *derivative = hard ? 2.0f * quadratic * c + slope : 1.0f;
    } else if (kind == ARCNEG) {
        float apart = c - threshold;
        *derivative = slope * exponential(-(apart * apart) / constant);
        *value = *derivative * c + *derivative - 1.0f;
    } else if (kind == CIRCLE) {
        *derivative = c + constant > 0.0f ? c + constant : 0.0f;
        *value = *derivative * (c - constant);
    } else if (kind == POWER) {
        float half = (c + 1.0f) * 0.5f;
        half = half < 0.0f ? 0.0f : (half > 1.0f ? 1.0f : half); /* NaN stays NaN */
        float power = exponential((slope - 1.0f) * logarithm(half > 1e-37f ? half : 1e-37f));
        float at_zero = slope > 1.0f ? 0.0f : power;
        power = half < 1e-37f ? at_zero : power;
        *value = 2.0f * power * half - 1.0f + constant;
        *derivative = slope * power;
    } else if (kind == ANGLE || kind == ANGLE_SQUARED) {
        float whole = c > 1.0f ? 1.0f : (c < -1.0f ? -1.0f : c);
        float inside = c > INSIDE ? INSIDE : (c < -INSIDE ? -INSIDE : c);
        float by_cosine = 1.0f / sqrtf((1.0f - inside) * (1.0f + inside)); /* - d theta / d c */
        if (kind == ANGLE) {
            *value = arcsine(whole) * (2.0f / PI); /* pi - 2 theta = 2 asin(c) */
            *derivative = by_cosine * (2.0f / PI);
        } else {
            float rest = 1.5f * PI + arcsine(whole); /* 2 pi - theta */
            *value = rest * rest;
            *derivative = 2.0f * (1.5f * PI + arcsine(inside)) * by_cosine;
        }
    }
}

/* Replace `count` cosines of one class, of samples from `low` on, by their weights times v; add to the sums. `to` is LARGEST:
   leave the cosines alone, and raise the first of the sums to their logits. */
INLINE void sweep_block(int kind, int to, const Sweep *s, int64_t row, int64_t low, int64_t count, float *restrict c,
                        float *restrict sums) {
    const float *table = s->table + low, *scale = table + SCALE * s->samples, *quadratic = table + QUADRATIC * s->samples;
    const float *slope = table + SLOPE * s->samples, *constant = table + CONSTANT * s->samples;
    const float *threshold = table + THRESHOLD * s->samples, *offset = table + OFFSET * s->samples;
    const float *shift = table + SHIFT * s->samples, *less = table + LESS * s->samples;
    float *restrict first = sums + low, *restrict second = first + s->samples, *restrict third = second + s->samples;
    const int32_t *own = s->own + low;
    float v = s->inverse ? s->inverse[row] : 1.0f, limit = s->limit;
    float r = s->rows ? s->rows[row] : (to == LARGEST ? 0.0f : 1.0f);
    int straight = s->straight;
    #pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        float cosine = v * c[i], value, derivative;
        int left_out = (cosine > limit) | (own[i] == (int32_t)row);
        value_of(kind, cosine, quadratic[i], slope[i], constant[i], threshold[i], &value, &derivative);
        float logit = scale[i] * value + offset[i], weight;
        if (to == LARGEST) {
            logit = left_out ? NO_NEGATIVE : logit + r;
            first[i] = logit > first[i] ? logit : first[i];
            continue;
        }
        if (to == SOFTMAX) {
            weight = left_out ? 0.0f : r * exponential(logit - shift[i]);
            first[i] += weight;
            if (kind == HARD) {
                int counts = (cosine > threshold[i]) & !left_out;
                second[i] += counts ? 1.0f : 0.0f;
                third[i] += counts ? cosine : 0.0f;
            }
            weight -= less[i];
        } else { /* softplus(z) = max(z, 0) + log(1 + exp(-|z|)) */
            float small = exponential(-fabsf(logit));
            float softplus = (logit > 0.0f ? logit : 0.0f) + log_of_one_plus(small);
            weight = r * ((logit > 0.0f ? 1.0f : small) / (1.0f + small));
            first[i] += left_out ? 0.0f : r * softplus;
            second[i] += left_out ? 0.0f : weight;
        }
        weight *= scale[i] * (straight ? 1.0f : derivative);
        c[i] = left_out ? 0.0f : weight * v;
    }
}

/* Sweep over the classes [begin, end). */
INLINE void sweep_classes(int kind, int to, const Sweep *s, int64_t begin, int64_t end, float *sums) {
    for (int64_t tile = begin; tile < end; tile += TILE) {
        for (int64_t low = 0; low < s->samples; low += BLOCK) {
            int64_t count = s->samples - low < BLOCK ? s->samples - low : BLOCK;
            for (int64_t row = tile; row < end && row < tile + TILE; row++) {
                float *c = (float *)s->products + row * s->samples + low, widened[BLOCK];
                uint16_t *narrow = (uint16_t *)s->products + row * s->samples + low;
                if (s->format == BFLOAT16) {
                    c = widened;
                    #pragma omp simd
                    for (int64_t i = 0; i < count; i++) widened[i] = from_bits((uint32_t)narrow[i] << 16);
                }
                sweep_block(kind, to, s, row, low, count, c, sums);
                if (s->format == BFLOAT16 && to != LARGEST) {
                    #pragma omp simd
                    for (int64_t i = 0; i < count; i++) narrow[i] = nearest_bfloat16(widened[i]);
                }
            }
        }
    }
}

#define SWEEP(kind) \
    static void sweep_##kind(int to, const Sweep *s, int64_t begin, int64_t end, float *sums) { \
        if (to == SOFTMAX) sweep_classes(kind, SOFTMAX, s, begin, end, sums); \
        else if (to == SUM) sweep_classes(kind, SUM, s, begin, end, sums); \
        else sweep_classes(kind, LARGEST, s, begin, end, sums); \
    }
SWEEP(LINEAR) SWEEP(HARD) SWEEP(ARCNEG) SWEEP(CIRCLE) SWEEP(ANGLE) SWEEP(ANGLE_SQUARED) SWEEP(POWER)

static void (*const SWEEPS[])(int, const Sweep *, int64_t, int64_t, float *) = {
    sweep_LINEAR, sweep_HARD, sweep_ARCNEG, sweep_CIRCLE, sweep_ANGLE, sweep_ANGLE_SQUARED, sweep_POWER,
};

/* The two methods of PlainKernels: `to` is SOFTMAX or SUM for weights, whose sums (SUMS, samples) are added to, and LARGEST for
   maxima, whose sums (samples) are raised. partial: (threads, SUMS, samples) scratch. Sweep has the other arguments. */
void negatives(void *products, int format, int64_t classes, int64_t samples, const float *inverse, const float *rows,
               const int32_t *own, const float *table, int straight, float limit, int kind, int to, float *sums,
               float *partial, int threads) {
    Sweep sweep = {products, format, classes, samples, inverse, rows, own, table, straight, limit};
    int64_t width = (to == LARGEST ? 1 : SUMS) * samples;
    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; t++) {
        float *sum = partial + t * SUMS * samples;
        for (int64_t i = 0; i < width; i++) sum[i] = to == LARGEST ? NO_NEGATIVE : 0.0f;
        SWEEPS[kind](to, &sweep, classes * t / threads, classes * (t + 1) / threads, sum);
    }
    for (int t = 0; t < threads; t++) {
        const float *sum = partial + t * SUMS * samples;
        for (int64_t i = 0; i < width; i++) sums[i] = to != LARGEST ? sums[i] + sum[i] : (sum[i] > sums[i] ? sum[i] : sums[i]);
    }
}
