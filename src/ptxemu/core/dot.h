/* Inner products as a tensor core forms them, and the conversions of matrix elements; for mma.sync, wgmma and tcgen05.mma.
 *
 * The PTX ISA leaves the order and the rounding of the sums open. The rule here is a truncated fused sum: the products of a block (exact)
 * and the accumulator are aligned to the largest exponent among them, cut off towards zero `fraction` bits below it, summed exactly, and the
 * sum is cut off towards zero to the accumulator's precision (to nearest for an f16 accumulator). `dot_rule` has its parameters: change
 * them to fit another generation.
 */
#pragma once
#include <math.h>
#include <string.h>

#include "core.h"
#include "half.h"

/* Element types of matrices; lower_mma.py has the same numbers. */
enum { T_F16, T_BF16, T_TF32, T_E4M3, T_E5M2, T_S8, T_U8, T_F32, T_S32, T_F64, T_S4, T_U4 };

static inline int elements_per_row(int type) { return type <= T_BF16 ? 8 : type == T_TF32 ? 4 : type >= T_S4 ? 32 : 16; } /* of 16 bytes */

typedef struct {
    int block;     /* products in one fused sum */
    int fraction;  /* bits kept below the largest exponent */
    int mantissa;  /* bits of the result's mantissa; 10: an f16 result */
    int emin;      /* the type's smallest exponent, which its subnormal numbers have */
} DotRule;

static inline DotRule dot_rule(int type, int f16_result, int arch)
{
    static const int emin[] = {-14, -126, -126, -6, -14};
    int eight = type == T_E4M3 || type == T_E5M2;
    int narrow = eight && arch < 100; /* sm_90 keeps 13 bits of sums of 8-bit products */
    DotRule r = {eight ? 32 : type == T_TF32 ? 8 : 16, narrow ? 13 : 25, f16_result ? 10 : narrow ? 13 : 23, emin[type]};
    return r;
}

/* ---- conversions ------------------------------------------------------------------------------------------------------------- */
static inline float e4m3_to_float(uint32_t v)
{
    uint32_t e = v >> 3 & 15, m = v & 7;
    float x = e == 15 && m == 7 ? NAN : e ? float_of((e + 120) << 23 | m << 20) : m * 0x1p-9f;
    return v & 0x80 ? -x : x;
}

static inline float e5m2_to_float(uint32_t v) { return f16_to_float(v << 8); }

/* The elements of 16 bytes. Integers become floats, in which sums of their products are exact. */
static inline void elements_of_row(float *restrict out, const void *restrict row, int type)
{
    uint8_t b[16];
    uint16_t h[8];
    uint32_t x[4];
    switch (type) {
    case T_F16:
        memcpy(h, row, 16);
        for (int i = 0; i < 8; i++)
            out[i] = f16_to_float(h[i]);
        return;
    case T_BF16:
        memcpy(h, row, 16);
        for (int i = 0; i < 8; i++)
            out[i] = float_of((uint32_t)h[i] << 16);
        return;
    case T_TF32: /* the low 13 bits are ignored */
        memcpy(x, row, 16);
        for (int i = 0; i < 4; i++)
            out[i] = float_of(x[i] & 0xffffe000u);
        return;
    }
    memcpy(b, row, 16);
    for (int i = 0; type >= T_S4 && i < 32; i++) {
        const int v = b[i / 2] >> i % 2 * 4 & 15;
        out[i] = (float)(type == T_S4 && v > 7 ? v - 16 : v);
    }
    for (int i = 0; type < T_S4 && i < 16; i++)
        out[i] = type == T_E4M3 ? e4m3_to_float(b[i]) : type == T_E5M2 ? e5m2_to_float(b[i]) : type == T_S8 ? (float)(int8_t)b[i] : (float)b[i];
}

/* ---- fused sums of 32 outputs at once ---------------------------------------------------------------------------------------------- */
/* A zero's exponent, and that of infinities and NaN: beyond all others whatever it is added to. */
enum { DOT_ZERO = -4000, DOT_SPECIAL = 8000 };

/* Exponents of n elements, for `dot32`. */
static inline void dot_exponents(int16_t *restrict e, const float *restrict x, int n, int emin)
{
    for (int i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
        int32_t exponent = (int32_t)(magnitude >> 23) - 127;
        exponent = exponent < emin ? emin : exponent == 128 ? DOT_SPECIAL : exponent;
        e[i] = (int16_t)(magnitude ? exponent : DOT_ZERO);
    }
}

/* A sum to the accumulator's format. */
static inline float dot_round(double sum, int mantissa)
{
    float f = (float)sum;
    uint32_t bits = bits_of(f);
    if (isnan(sum))
        return float_of(0x7fffffffu);
    if (isinf(f))
        return f;
    bits -= fabs((double)f) > fabs(sum); /* towards zero */
    if (mantissa == 10) {                /* to odd, then to nearest */
        bits |= (double)float_of(bits) != sum;
        return f16_to_float(f16_of_float(float_of(bits)));
    }
    return float_of(bits & ~0u << (23 - mantissa));
}

/* One output by the rule's definition, whatever the operands' range. `stride`: between the k of a, b, ea and eb. */
static float dot_any(float acc, const float *a, const float *b, const int16_t *ea, const int16_t *eb, int k, int stride, DotRule rule)
{
    int16_t e;
    double plain = acc, sum;
    dot_exponents(&e, &acc, 1, rule.mantissa == 10 ? -14 : -126);
    for (int i = 0; i < k; i++) {
        int16_t x = (int16_t)(ea[i * stride] + eb[i * stride]);
        e = x > e ? x : e;
        plain += (double)a[i * stride] * b[i * stride];
    }
    if (!isfinite(plain) || e <= DOT_ZERO / 2)
        return dot_round(plain, rule.mantissa);
    int shift = rule.fraction - e;
    sum = trunc(ldexp(acc, shift));
    for (int i = 0; i < k; i++)
        sum += trunc(ldexp((double)a[i * stride] * b[i * stride], shift));
    return dot_round(ldexp(sum, -shift), rule.mantissa);
}

/* `dot32` for a constant k, so that the compiler keeps every lane's sum in registers. */
static inline __attribute__((always_inline)) void dot32_of(float *restrict acc, const float (*restrict a)[LANES], const int16_t (*restrict ea)[LANES],
                                                           const float (*restrict b)[LANES], const int16_t (*restrict eb)[LANES], const int k,
                                                           const DotRule rule)
{
    int16_t e[LANES], lo = INT16_MAX, hi = INT16_MIN;
    int32_t low[LANES], high[LANES]; /* terms are below 2^27: eight of them fit 32 bits (8-bit operands: 2^15, sixteen) */
    float scale[LANES];
    dot_exponents(e, acc, LANES, rule.mantissa == 10 ? -14 : -126);
    for (int t = 0; t < LANES; t++) {
        int16_t most = e[t];
#pragma GCC unroll 32
        for (int i = 0; i < k; i++) {
            int16_t x = (int16_t)(ea[i][t] + eb[i][t]);
            most = x > most ? x : most;
        }
        e[t] = most <= DOT_ZERO / 2 ? 0 : most; /* nothing but zeros: any exponent will do */
    }
    for (int t = 0; t < LANES; t++) {
        lo = e[t] < lo ? e[t] : lo;
        hi = e[t] > hi ? e[t] : hi;
    }
    if (lo < -75 || hi > 100) { /* float products might leave their range, or there are infinities */
        for (int t = 0; t < LANES; t++)
            acc[t] = dot_any(acc[t], a[0] + t, b[0] + t, ea[0] + t, eb[0] + t, k, LANES, rule);
        return;
    }
    for (int t = 0; t < LANES; t++)
        scale[t] = float_of((uint32_t)(127 + rule.fraction - e[t]) << 23);
    for (int t = 0; t < LANES; t++) {
        int32_t sum = 0, other = 0;
#pragma GCC unroll 32
        for (int i = 0; i < k / 2; i++) {
            sum += (int32_t)(a[i][t] * b[i][t] * scale[t]);
            other += (int32_t)(a[i + k / 2][t] * b[i + k / 2][t] * scale[t]);
        }
        low[t] = sum;
        high[t] = other;
    }
    if (rule.mantissa == 10) {
        for (int t = 0; t < LANES; t++)
            acc[t] = dot_round(((double)(int32_t)(acc[t] * scale[t]) + low[t] + high[t]) / scale[t], 10);
        return;
    }
    const uint32_t keep = ~0u << (23 - rule.mantissa);
    for (int t = 0; t < LANES; t++) {
        double undo = float_of((uint32_t)(127 - rule.fraction + e[t]) << 23);
        double total = ((double)(int32_t)(acc[t] * scale[t]) + low[t] + high[t]) * undo;
        float f = (float)total;
        acc[t] = float_of((bits_of(f) - (fabs((double)f) > fabs(total))) & keep);
    }
}

/* acc[t] += sum over k of a[k][t] * b[k][t]; k is even and at most the rule's block. */
static inline void dot32(float *restrict acc, const float (*restrict a)[LANES], const int16_t (*restrict ea)[LANES],
                         const float (*restrict b)[LANES], const int16_t (*restrict eb)[LANES], int k, DotRule rule)
{
    switch (k) {
    case 16:
        dot32_of(acc, a, ea, b, eb, 16, rule);
        return;
    case 8:
        dot32_of(acc, a, ea, b, eb, 8, rule);
        return;
    case 32:
        dot32_of(acc, a, ea, b, eb, 32, rule);
        return;
    default:
        dot32_of(acc, a, ea, b, eb, k, rule);
    }
}

/* ---- the fragments of 16 x 8 tiles -------------------------------------------------------------------------------------------------- */
/* Lane t holds, of a 16 x 8 tile of D, row t / 4 (+ 8 in the upper half h) and columns 2 (t % 4) + {0, 1} (PTX ISA: "Matrix Fragments for
 * mma.m16n8k16", "Register Fragments for wgmma.mma_async.m64nNk16"). The operands of such tiles, spread over the lanes that need them: */
enum { MAX_K = 128, MAX_STORED = 64 }; /* elements of a row; of a sparse one as stored, or a dense one */
typedef struct {
    float v[MAX_STORED][LANES];
    int16_t e[MAX_STORED][LANES];
} Spread;

/* Rows of A (16 x k) for the half h. */
static inline void spread_a(Spread *s, const float *rows, int h, int k, int emin)
{
    for (int t = 0; t < LANES; t++)
        for (int i = 0; i < k; i++)
            s->v[i][t] = rows[(t / 4 + 8 * h) * k + i];
    dot_exponents(s->e[0], s->v[0], k * LANES, emin);
}

/* Columns 2 q + b of B, given as eight columns of k elements. */
static inline void spread_b(Spread *s, const float *columns, int b, int k, int emin)
{
    for (int i = 0; i < k; i++) {
        float four[4];
        for (int q = 0; q < 4; q++)
            four[q] = columns[(2 * q + b) * k + i];
        for (int t = 0; t < LANES; t += 4)
            memcpy(&s->v[i][t], four, sizeof four);
    }
    dot_exponents(s->e[0], s->v[0], k * LANES, emin);
}

/* The same of eight columns of k elements, of which a sparse A's 16 rows take n, at `place`, in the half h. */
static inline void spread_b_sparse(Spread *s, const float *columns, int b, int k, const uint8_t *place, int h, int n, int emin)
{
    for (int i = 0; i < n; i++)
        for (int t = 0; t < LANES; t++)
            s->v[i][t] = columns[(2 * (t % 4) + b) * k + place[(t / 4 + 8 * h) * n + i]];
    dot_exponents(s->e[0], s->v[0], n * LANES, emin);
}

/* One register of the tile: acc[t] += A row . B column. */
static inline void dot_tile(float *acc, const Spread *a, const Spread *b, int k, DotRule rule)
{
    for (int at = 0; at < k; at += rule.block) {
        int n = k - at < rule.block ? k - at : rule.block;
        dot32(acc, a->v + at, a->e + at, b->v + at, b->e + at, n, rule);
    }
}

/* The same of integers: exact, then the low 32 bits or the nearest 32-bit number. */
static inline void dot_tile_int(int32_t *acc, const Spread *a, const Spread *b, int k, int saturate)
{
    float sum[LANES] = {0};
    for (int i = 0; i < k; i++)
        for (int t = 0; t < LANES; t++)
            sum[t] += a->v[i][t] * b->v[i][t];
    for (int t = 0; t < LANES; t++) {
        int64_t x = (int64_t)acc[t] + (int32_t)sum[t];
        if (saturate)
            x = x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x;
        acc[t] = (int32_t)x;
    }
}
