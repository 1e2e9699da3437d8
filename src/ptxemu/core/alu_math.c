/* Approximate functions (PTX ISA: "Floating Point Instructions" and "Half Precision Floating Point Instructions": ex2, lg2, rcp, rsqrt,
 * sqrt, sin, cos, tanh).
 *
 * Hardware approximates; here every result is the exact value, computed in double precision to far below an f32's last place and rounded
 * once. A kernel that is right on hardware is right here; tolerances against hardware are its documented accuracy:
 *
 *     rcp.approx.f32    1 ulp                                  lg2.approx.f32     2^-22 absolute in (0.5, 2), 2^-22 relative elsewhere
 *     sqrt.approx.f32   2^-23 relative                         sin, cos.approx    2^-20.5 absolute in [-2 pi, 2 pi], 2^-14.7 in 100 pi
 *     rsqrt.approx.f32  2^-22.9 relative                       tanh.approx.f32    2^-11 relative
 *     ex2.approx.f32    2 ulp                                  tanh.approx.f16    2^-10.987 absolute; .bf16 2^-8
 *     div.approx.f32    2 ulp for |b| in [2^-126, 2^126]       ex2.approx.f16     2^-9.9 relative; .bf16 2^-7
 *     div.full.f32      2 ulp                                  rcp, rsqrt.approx.ftz.f64: 20 bits of mantissa
 */
#include "alu.h"

#include <math.h>

/* 2^x for |x| <= 1000: 2^n times the Taylor series of e^(f ln 2), |f| <= 1/2. */
static inline double exp2_of(double x)
{
    const double shift = 0x1.8p52; /* the sum's low bits are the nearest integer */
    double biased = x + shift, n = biased - shift, t = (x - n) * 0x1.62e42fefa39efp-1;
    double p = 1.0 / 6227020800;
    p = p * t + 1.0 / 479001600;
    p = p * t + 1.0 / 39916800;
    p = p * t + 1.0 / 3628800;
    p = p * t + 1.0 / 362880;
    p = p * t + 1.0 / 40320;
    p = p * t + 1.0 / 5040;
    p = p * t + 1.0 / 720;
    p = p * t + 1.0 / 120;
    p = p * t + 1.0 / 24;
    p = p * t + 1.0 / 6;
    p = p * t + 0.5;
    p = p * t + 1;
    p = p * t + 1;
    return p * f64_of((f64_bits(biased) + 1023) << 52);
}

/* log2 of a positive normal number: with s = (m - 1) / (m + 1), log m = 2 (s + s^3 / 3 + s^5 / 5 + ...), |s| < 0.172. */
static inline double log2_of(double x)
{
    uint64_t bits = f64_bits(x);
    uint64_t e = bits >> 52, m = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
    uint64_t up = m > 0x3ff6a09e667f3bcdu; /* sqrt 2 */
    double mantissa = f64_of(m - (up << 52)), exponent = f64_of(0x4330000000000000u | (e + up)) - (0x1p52 + 1023);
    double s = (mantissa - 1) / (mantissa + 1), q = s * s, p = 1.0 / 23;
    p = p * q + 1.0 / 21;
    p = p * q + 1.0 / 19;
    p = p * q + 1.0 / 17;
    p = p * q + 1.0 / 15;
    p = p * q + 1.0 / 13;
    p = p * q + 1.0 / 11;
    p = p * q + 1.0 / 9;
    p = p * q + 1.0 / 7;
    p = p * q + 1.0 / 5;
    p = p * q + 1.0 / 3;
    p = p * q + 1;
    return exponent + p * s * (2 / 0x1.62e42fefa39efp-1);
}

/* The exact values as doubles; NaN and infinite arguments included. */
static inline double ex2(double x)
{
    double inside = x > 1000 ? 1000 : x > -1000 ? x : -1000, r = exp2_of(inside);
    r = x < -1000 ? 0 : x > 1000 ? INFINITY : r;
    return x != x ? x : r;
}

static inline double lg2(double x)
{
    double r = log2_of(x > 0x1p-1000 ? x : 1);
    r = x == INFINITY ? x : r;
    r = x == 0 ? -INFINITY : r;
    return x < 0 || x != x ? NAN : r;
}

static inline double tanh_of(double x)
{
    double size = fabs(x), inside = size < 40 ? size : 40, e = exp2_of(inside * 0x1.71547652b82fep1), square = x * x;
    double r = size < 0x1p-8 ? size * (1 - square * (1.0 / 3 - square * (2.0 / 15))) : (e - 1) / (e + 1); /* 2 / ln 2 in the exponent */
    return x != x ? x : copysign(r, x);
}

/* exp2 of a result that may be subnormal: flushed ones are not computed. */
static inline float ex2_ftz(float x)
{
    float y = flush(x);
    double r = ex2(y < -126 ? -126 : y);
    return y < -126 ? 0 : canonical((float)r);
}

static inline uint16_t keep(uint16_t x) { return x; }

/* Functions of half precision: d, a; rounded once, by way of rounding to odd. FLUSH: of operands and results. */
#define HALF(ID, NAME, N, FUNCTION, WIDEN, NARROW, FLUSH) \
    HEAD(ID) \
    { \
        SOURCE(u16, pa, 1); \
        RESULT(u16, N); \
        float wide[N]; \
        EACH(N) wide[i] = WIDEN(FLUSH(pa[i])); \
        EACH(N) wide[i] = round_odd(FUNCTION(wide[i])); \
        EACH(N) out[i] = FLUSH(NARROW(wide[i])); \
        FINISH; \
    }
#define HALVES(F) \
    F(ex2_f16, "ex2.f16", LANES, ex2, f16_to_f32, f32_to_f16, keep) F(ex2_f16x2, "ex2.f16x2", 2 * LANES, ex2, f16_to_f32, f32_to_f16, keep) \
    F(ex2_bf16, "ex2.bf16", LANES, ex2, bf16_to_f32, f32_to_bf16, flush_bf16) \
    F(ex2_bf16x2, "ex2.bf16x2", 2 * LANES, ex2, bf16_to_f32, f32_to_bf16, flush_bf16) \
    F(tanh_f16, "tanh.f16", LANES, tanh_of, f16_to_f32, f32_to_f16, keep) \
    F(tanh_f16x2, "tanh.f16x2", 2 * LANES, tanh_of, f16_to_f32, f32_to_f16, keep) \
    F(tanh_bf16, "tanh.bf16", LANES, tanh_of, bf16_to_f32, f32_to_bf16, keep) \
    F(tanh_bf16x2, "tanh.bf16x2", 2 * LANES, tanh_of, bf16_to_f32, f32_to_bf16, keep)
HALVES(HALF)

#define FORMS(F1) \
    F1(ex2_f32, "ex2.f32", LANES, f32, f32, canonical((float)ex2(a))) F1(ex2_f32_ftz, "ex2.f32.ftz", LANES, f32, f32, ex2_ftz(a)) \
    F1(lg2_f32, "lg2.f32", LANES, f32, f32, canonical((float)lg2(a))) \
    F1(lg2_f32_ftz, "lg2.f32.ftz", LANES, f32, f32, flush(canonical((float)lg2(flush(a))))) \
    F1(rsqrt_f32, "rsqrt.f32", LANES, f32, f32, canonical((float)(1 / sqrt((double)a)))) \
    F1(rsqrt_f32_ftz, "rsqrt.f32.ftz", LANES, f32, f32, flush(canonical((float)(1 / sqrt((double)flush(a)))))) \
    F1(sin_f32, "sin.f32", LANES, f32, f32, canonical((float)sin(a))) \
    F1(sin_f32_ftz, "sin.f32.ftz", LANES, f32, f32, flush(canonical((float)sin(flush(a))))) \
    F1(cos_f32, "cos.f32", LANES, f32, f32, canonical((float)cos(a))) \
    F1(cos_f32_ftz, "cos.f32.ftz", LANES, f32, f32, flush(canonical((float)cos(flush(a))))) \
    F1(tanh_f32, "tanh.f32", LANES, f32, f32, canonical((float)tanh_of(a))) \
    F1(rsqrt_f64, "rsqrt.f64", LANES, f64, f64, 1 / sqrt(a)) \
    F1(rcp_high, "rcp.high.f64", LANES, u64, u64, high_word(1 / f64_of(top_word(a)))) \
    F1(rsqrt_high, "rsqrt.high.f64", LANES, u64, u64, high_word(1 / sqrt(f64_of(top_word(a)))))

/* The .approx.ftz.f64 forms read and write the high word alone; subnormals are zeros. */
static inline uint64_t top_word(uint64_t a)
{
    a &= 0xffffffff00000000u;
    return a & 0x7ff0000000000000u ? a : a & 0x8000000000000000u;
}
static inline uint64_t high_word(double x) { return x != x ? 0x7fffffff00000000u : top_word(f64_bits(x) + 0x80000000u); }

FORMS(DEFINE1)

static const Entry alu_math[] = {FORMS(ENTRY) HALVES(ENTRY)};
REGISTER(alu_math)
