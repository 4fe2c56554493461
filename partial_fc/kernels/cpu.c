/* The elementwise work of the head's two passes on the CPU, each in one sweep over memory; built and called by cpu.py.

   The reference is the plain torch code in plain.py, store.py and row_optimizer.py, which does the same arithmetic.
   torch sweeps over memory once per operation, and these sweeps are the main cost of an elementwise step.
   The threads belong to the OpenMP runtime that torch has loaded. Each thread gets an equal range of classes. Results depend on
   the number of threads only where partial sums over the classes are added (exponentials), and never on timing. */

#include "numbers.h"

#include <omp.h>

#define SMALLEST_NORM 1e-12f

/* Return 32 random bits, a hash of x; Wellons' lowbias32, https://nullprogram.com/blog/2018/07/31/ */
static inline uint32_t hash(uint32_t x) {
    x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
    return x;
}

static inline uint32_t row_seed(uint64_t seed, int64_t row) {
    return hash((uint32_t)seed ^ hash((uint32_t)(seed >> 32) ^ hash((uint32_t)row ^ hash((uint32_t)((uint64_t)row >> 32) + 1u))));
}

static inline void load_row(const void *base, int kind, int64_t row, int64_t dim, float scale, float *out) {
    if (kind == FLOAT32) {
        memcpy(out, (const float *)base + row * dim, dim * sizeof(float));
    } else if (kind == BFLOAT16) {
        const uint16_t *in = (const uint16_t *)base + row * dim;
        #pragma omp simd
        for (int64_t j = 0; j < dim; j++) out[j] = from_bits((uint32_t)in[j] << 16);
    } else {
        const int8_t *in = (const int8_t *)base + row * dim;
        #pragma omp simd
        for (int64_t j = 0; j < dim; j++) out[j] = (float)in[j] * scale;
    }
}

/* 32 random bits per element of a row: 16 to round the centre, 16 to round the momentum. */
static inline void random_row(uint32_t seed, int64_t dim, uint32_t *random) {
    #pragma omp simd
    for (int64_t j = 0; j < dim; j++) random[j] = hash(seed + (uint32_t)j * 0x9e3779b9u);
}

static inline float largest_of(const float *values, int64_t dim) {
    float largest = 0.0f;
    #pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < dim; j++) { float a = fabsf(values[j]); largest = a > largest ? a : largest; }
    return largest;
}

/* Replace values by integers up to +-top, which stands for `largest`, rounded stochastically by random >> shift. */
static inline void quantise_row(float *values, int64_t dim, float largest, float top, const uint32_t *random, int shift) {
    float factor = largest > 0.0f ? top / largest : 0.0f;
    #pragma omp simd
    for (int64_t j = 0; j < dim; j++) {
        float u = ((float)((random[j] >> shift) & 0xffffu) + 0.5f) * (1.0f / 65536.0f);
        float q = floorf(values[j] * factor + u);
        values[j] = q > top ? top : (q < -top ? -top : q);
    }
}

/* Store a row, rounded stochastically if the format is narrower than fp32. `values` is overwritten: with bf16 by the stored
   values. The bits used are random >> shift, so that two matrices are rounded independently. */
static inline void store_row(void *base, int kind, int64_t row, int64_t dim, float *scale, const uint32_t *random, int shift,
                             float *values) {
    if (kind == FLOAT32) {
        memcpy((float *)base + row * dim, values, dim * sizeof(float));
    } else if (kind == BFLOAT16) {
        uint16_t *out = (uint16_t *)base + row * dim;
        #pragma omp simd
        for (int64_t j = 0; j < dim; j++) {
            uint32_t noise = (random[j] >> shift) & 0xffffu;
            uint32_t bits = to_bits(values[j]);
            uint32_t finite = (bits & 0x7f800000u) != 0x7f800000u ? 0xffffffffu : 0u;
            bits += noise & finite;
            out[j] = (uint16_t)(bits >> 16);
            values[j] = from_bits(bits & 0xffff0000u);
        }
    } else {
        int8_t *out = (int8_t *)base + row * dim;
        float largest = largest_of(values, dim);
        scale[row] = largest / 127.0f;
        quantise_row(values, dim, largest, 127.0f, random, shift);
        #pragma omp simd
        for (int64_t j = 0; j < dim; j++) out[j] = (int8_t)(int32_t)values[j];
    }
}

/* Format mini: store a row of both; w is overwritten by the stored centre without its low bits and its scale. What rounding adds
   to m will move w by -carry times that, so it is added to w. kept: (dim) scratch. */
static inline void store_mini(int8_t *centre, int8_t *momentum, int64_t row, int64_t dim, float *centre_scale,
                              float *momentum_scale, uint32_t *random, float *w, float *m, float *kept, float carry) {
    uint32_t start = (uint32_t)row * 7919u + to_bits(centre_scale[row]);
    #pragma omp simd
    for (int64_t j = 0; j < dim; j++)
        random[j] = ((start + (uint32_t)j) * 40503u & 0xffffu) | (start + (uint32_t)j) * 27145u << 16;
    float largest = largest_of(m, dim);
    memcpy(kept, m, dim * sizeof(float));
    quantise_row(m, dim, largest, 15.0f, random, 16);
    momentum_scale[row] = largest / 120.0f;
    #pragma omp simd
    for (int64_t j = 0; j < dim; j++) w[j] += carry * (m[j] * (largest / 15.0f) - kept[j]);
    float step = largest_of(w, dim) / 127.0f;
    uint32_t count = (to_bits(centre_scale[row]) + 1u) & 0xffffu;
    centre_scale[row] = from_bits(((to_bits(step > 0.0f ? step : 1.0f) + 0xffffu) & 0xffff0000u) | count);
    quantise_row(w, dim, 127.0f * centre_scale[row], 1016.0f, random, 0);
    centre += row * dim;
    momentum += row * dim;
    #pragma omp simd
    for (int64_t j = 0; j < dim; j++) {
        float whole = floorf((w[j] + 4.0f) * 0.125f);
        centre[j] = (int8_t)(int32_t)whole;
        momentum[j] = (int8_t)(int32_t)(8.0f * (m[j] - whole) + w[j]);
        w[j] = whole;
    }
}

/* Replace products (classes, samples) by E v with E = exp(v product - shift), v = inverse (classes), or 1 if that is NULL. E is 0
   above the limit, and in row places[i] - begin of column i, the target class, if there is one. Add the sums of E to z_sum
   (samples). partial: (threads, samples) scratch. */
void exponentials(void *products, int kind, int64_t classes, int64_t samples, const float *inverse, const int64_t *places,
                  int64_t begin, float shift, float limit, float *z_sum, float *partial, int threads) {
    for (int64_t i = 0; i < samples; i++) {
        int64_t target = places[i] - begin;
        if (target < 0 || target >= classes) continue;
        if (kind == FLOAT32) ((float *)products)[target * samples + i] = -INFINITY;
        else ((uint16_t *)products)[target * samples + i] = 0xff80u;
    }
    #pragma omp parallel for schedule(static) num_threads(threads)
    for (int t = 0; t < threads; t++) {
        float *sum = partial + (int64_t)t * samples;
        memset(sum, 0, samples * sizeof(float));
        for (int64_t c = classes * t / threads; c < classes * (t + 1) / threads; c++) {
            float v = inverse ? inverse[c] : 1.0f;
            if (kind == FLOAT32) {
                float *z = (float *)products + c * samples;
                #pragma omp simd
                for (int64_t i = 0; i < samples; i++) {
                    float logit = v * z[i];
                    float e = logit > limit ? 0.0f : exponential(logit - shift);
                    z[i] = v * e;
                    sum[i] += e;
                }
            } else {
                uint16_t *z = (uint16_t *)products + c * samples;
                for (int64_t low = 0; low < samples; low += BLOCK) { /* one element width per loop: twice as fast */
                    int64_t count = samples - low < BLOCK ? samples - low : BLOCK;
                    float e[BLOCK];
                    #pragma omp simd
                    for (int64_t i = 0; i < count; i++) e[i] = v * from_bits((uint32_t)z[low + i] << 16);
                    #pragma omp simd
                    for (int64_t i = 0; i < count; i++) {
                        e[i] = e[i] > limit ? 0.0f : exponential(e[i] - shift);
                        sum[low + i] += e[i];
                    }
                    #pragma omp simd
                    for (int64_t i = 0; i < count; i++) z[low + i] = nearest_bfloat16(v * e[i]);
                }
            }
        }
    }
    for (int t = 0; t < threads; t++)
        for (int64_t i = 0; i < samples; i++) z_sum[i] += partial[(int64_t)t * samples + i];
}

/* One step of SGD (adamw = 0; with Nesterov's momentum if nesterov = 1) or AdamW for `classes` centres; row_optimizer.py has the
   formulas.
   gradient (classes, dim) is that of the unit centres times v = 1 / norm, without the part of the target classes. That part,
   not yet times v, is target (samples, dim) fp32: row sample_index[n] of it belongs to row class_index[n] of gradient;
   class_index ascends. If index is NULL, the centres are consecutive rows of the shard, starting at row `first`. Nothing is
   done if `apply` points to 0. Only format mini has a centre_scale. */
void update_rows(void *centres, int centre_kind, float *centre_scale, void *momentum, int momentum_kind, float *momentum_scale,
                 void *variance, int variance_kind, int32_t *updates, float *inverse, const int64_t *index, int64_t first,
                 int64_t classes, int64_t dim, const void *gradient, int gradient_kind, const float *target,
                 const int64_t *class_index, const int64_t *sample_index, int64_t num_targets, int adamw, int nesterov, double lr,
                 double beta1, double beta2, double eps, double weight_decay, uint64_t seed, const float *apply) {
    if (apply && *apply == 0.0f) return;
    float rate1 = (float)(1.0 - beta1), rate2 = (float)(1.0 - beta2);
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < classes; i++) {
        float w[dim], m[dim], g[dim], s[adamw ? dim : 1];
        int64_t row = index ? index[i] : first + i;
        int mini = centre_kind == INT8;
        uint32_t random[centre_kind == FLOAT32 ? 1 : dim], start = row_seed(seed, row);
        load_row(centres, centre_kind, row, dim, mini ? centre_scale[row] : 1.0f, w);
        load_row(momentum, momentum_kind, row, dim, momentum_scale ? momentum_scale[row] : 1.0f, m);
        load_row(gradient, gradient_kind, i, dim, 1.0f, g);
        float v = inverse[row], along = 0.0f, square = 0.0f;
        if (mini) { /* v, and with it the gradient, is that of the centre over its scale */
            const int8_t *bytes = (int8_t *)momentum + row * dim;
            float whole = centre_scale[row], step = momentum_scale[row];
            v /= whole;
            #pragma omp simd
            for (int64_t j = 0; j < dim; j++) {
                float low = (float)(((bytes[j] + 4) & 7) - 4);
                w[j] += 0.125f * low * whole;
                m[j] -= low * step;
                g[j] /= whole;
            }
        }
        int64_t low = 0, high = num_targets;
        while (low < high) { /* the first n with class_index[n] >= i */
            int64_t middle = (low + high) / 2;
            if (class_index[middle] < i) low = middle + 1; else high = middle;
        }
        for (int64_t n = low; n < num_targets && class_index[n] == i; n++) {
            const float *add = target + sample_index[n] * dim;
            #pragma omp simd
            for (int64_t j = 0; j < dim; j++) g[j] += v * add[j];
        }
        #pragma omp simd reduction(+ : along)
        for (int64_t j = 0; j < dim; j++) along += g[j] * w[j];
        along *= v * v;
        if (!adamw && nesterov) {
            #pragma omp simd
            for (int64_t j = 0; j < dim; j++) {
                float full = g[j] + ((float)weight_decay - along) * w[j];
                m[j] = (float)beta1 * m[j] + full;
                w[j] -= (float)lr * (full + (float)beta1 * m[j]);
            }
        } else if (!adamw) {
            #pragma omp simd
            for (int64_t j = 0; j < dim; j++) {
                m[j] = (float)beta1 * m[j] + g[j] + ((float)weight_decay - along) * w[j];
                w[j] -= (float)lr * m[j];
            }
        } else {
            load_row(variance, variance_kind, row, dim, 1.0f, s);
            double count = (double)updates[row] + 1.0;
            float rate = (float)(lr / (1.0 - pow(beta1, count))), inverse_bias = (float)(1.0 / (1.0 - pow(beta2, count)));
            float keep = (float)(1.0 - lr * weight_decay);
            #pragma omp simd
            for (int64_t j = 0; j < dim; j++) {
                float full = g[j] - along * w[j];
                m[j] += rate1 * (full - m[j]);
                s[j] = (float)beta2 * s[j] + rate2 * full * full;
                w[j] = keep * w[j] - rate * m[j] / (sqrtf(s[j] * inverse_bias) + (float)eps);
            }
            if (variance_kind != FLOAT32) random_row(hash(start), dim, random);
            store_row(variance, variance_kind, row, dim, NULL, random, 0, s);
        }
        if (mini) {
            float carry = adamw ? 0.0f : (float)(lr * beta1 / (1.0 - beta1) * (nesterov ? beta1 : 1.0));
            store_mini(centres, momentum, row, dim, centre_scale, momentum_scale, random, w, m, g, carry);
        } else {
            if (centre_kind != FLOAT32) random_row(start, dim, random);
            store_row(momentum, momentum_kind, row, dim, momentum_scale, random, 16, m);
            store_row(centres, centre_kind, row, dim, NULL, random, 0, w);
        }
        #pragma omp simd reduction(+ : square)
        for (int64_t j = 0; j < dim; j++) square += w[j] * w[j];
        float norm = sqrtf(square);
        inverse[row] = 1.0f / (norm > SMALLEST_NORM ? norm : SMALLEST_NORM);
        if (updates) updates[row] += 1;
    }
}
