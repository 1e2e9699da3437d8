/* Floating-point arithmetic (PTX ISA: "Floating Point Instructions", "Half Precision Floating Point Instructions").
 *
 * Single and half precision instructions return the canonical NaN, double precision propagates payloads. Half precision is computed in
 * wider formats whose rounding does not disturb the last one: sums and products of f16 and bf16 in f32 (24 >= 2 * 11 + 2 bits), fused
 * multiply-adds in f64 with rounding to odd.
 */
#include "alu.h"

#include <fenv.h>
#include <math.h>

/* ---- results of .ftz ------------------------------------------------------------------------------------------------------- */
/* Hardware flushes what is subnormal once rounded as if exponents had no end (measured on an H200): 2^-126 (1 - 2^-24) gives zero,
 * 2^-126 (1 - 2^-25) rounds to the smallest normal number and stays. Sums that are so small are exact; for the others the exact value is
 * compared in double precision, where products of f32 are exact. mode: 0 rn, 1 rz, 2 rm, 3 rp. */
static inline int tiny_in(double size, double unit, int negative, int64_t mode)
{
    if (mode == 0)
        return size < unit * (1 - 0x1p-25);
    return mode == (negative ? 2 : 3) ? size <= unit * (1 - 0x1p-24) : size < unit;
}
static inline int tiny(double exact, int64_t mode) { return tiny_in(fabs(exact), 0x1p-126, exact < 0, mode); }
/* Quotients, which the assembler makes of several instructions, are flushed by their exact value. */
static inline int tiny_quotient(double a, double b) { return fabs(a) < fabs(b) * 0x1p-126; }
static inline float no_size(float x) { return f32_of(f32_bits(x) & 0x80000000u); }

/* p + c rounded to odd (the error of the sum is exact), so that it compares with any f32 as the exact sum does. */
static inline double add_odd(double p, double c)
{
    double s = p + c, back = s - p, error = (p - (s - back)) + (c - back);
    uint64_t bits = f64_bits(s), up = error > 0 ? 1 : 0, down = error < 0 ? 1 : 0, step = (up - down) * (s > 0 ? (uint64_t)1 : ~(uint64_t)0);
    return f64_of(bits + (~bits & 1) * step);
}

/* ---- f32, f32x2, f64: round to nearest even -------------------------------------------------------------------------------- */
#define PLAIN(x, tiny) canonical(x)
#define FTZ(x, tiny) (tiny) ? no_size(x) : flush(canonical(x))
#define SAT(x, tiny) saturate(x)
#define FTZ_SAT(x, tiny) (tiny) ? no_size(saturate(x)) : flush(saturate(x))
#define SAME(x) (x)

/* Forms of one flavour: IN is applied to operands, OUT to results, of which it is told whether they are tiny. */
#define ARITHMETIC(F1, F2, F3, FLAVOUR, SUFFIX, N, TYPE, IN, OUT) \
    F2(add_##FLAVOUR, "add." TYPE SUFFIX, N, f32, f32, f32, OUT(IN(a) + IN(b), 0)) \
    F2(sub_##FLAVOUR, "sub." TYPE SUFFIX, N, f32, f32, f32, OUT(IN(a) - IN(b), 0)) \
    F2(mul_##FLAVOUR, "mul." TYPE SUFFIX, N, f32, f32, f32, OUT(IN(a) * IN(b), tiny((double)IN(a) * (double)IN(b), 0))) \
    F3(fma_##FLAVOUR, "fma." TYPE SUFFIX, N, f32, f32, f32, f32, \
       OUT(fmaf(IN(a), IN(b), IN(c)), tiny(add_odd((double)IN(a) * (double)IN(b), IN(c)), 0)))
#define DIVISION(F1, F2, F3, FLAVOUR, SUFFIX, IN, OUT) \
    F2(div_##FLAVOUR, "div.f32" SUFFIX, LANES, f32, f32, f32, OUT(IN(a) / IN(b), tiny_quotient(IN(a), IN(b)))) \
    F2(div_approx_##FLAVOUR, "div.approx.f32" SUFFIX, LANES, f32, f32, f32, OUT(divide_approx(IN(a), IN(b)), tiny_quotient(IN(a), IN(b)))) \
    F1(rcp_##FLAVOUR, "rcp.f32" SUFFIX, LANES, f32, f32, OUT(1.0f / IN(a), tiny_quotient(1, IN(a)))) \
    F1(sqrt_##FLAVOUR, "sqrt.f32" SUFFIX, LANES, f32, f32, OUT(sqrtf(IN(a)), 0))
#define SIGNS(F1, FLAVOUR, TYPE, N, T, SIGN) \
    F1(neg_##FLAVOUR, "neg." TYPE, N, T, T, a ^ SIGN) \
    F1(abs_##FLAVOUR, "abs." TYPE, N, T, T, a & (SIGN - 1))

/* div.approx is a * (1 / b): for |b| in (2^126, 2^128) the reciprocal is lost. */
static inline float divide_approx(float a, float b)
{
    float size = fabsf(b);
    float lost = isinf(a) ? NAN : f32_of((f32_bits(a) ^ f32_bits(b)) & 0x80000000u);
    return size > 0x1p126f && size < INFINITY ? (a != a ? a : lost) : a / b;
}

#define FORMS(F1, F2, F3) \
    ARITHMETIC(F1, F2, F3, f32, "", LANES, "f32", SAME, PLAIN) ARITHMETIC(F1, F2, F3, f32_ftz, ".ftz", LANES, "f32", flush, FTZ) \
    ARITHMETIC(F1, F2, F3, f32_sat, ".sat", LANES, "f32", SAME, SAT) \
    ARITHMETIC(F1, F2, F3, f32_ftz_sat, ".ftz.sat", LANES, "f32", flush, FTZ_SAT) \
    ARITHMETIC(F1, F2, F3, f32x2, "", 2 * LANES, "f32x2", SAME, PLAIN) \
    ARITHMETIC(F1, F2, F3, f32x2_ftz, ".ftz", 2 * LANES, "f32x2", flush, FTZ) \
    DIVISION(F1, F2, F3, f32, "", SAME, PLAIN) DIVISION(F1, F2, F3, f32_ftz, ".ftz", flush, FTZ) \
    SIGNS(F1, f32, "f32", LANES, u32, 0x80000000u) SIGNS(F1, f64, "f64", LANES, u64, 0x8000000000000000u) \
    SIGNS(F1, f32x2, "f32x2", 2 * LANES, u32, 0x80000000u) \
    SIGNS(F1, half, "half", LANES, u16, 0x8000) SIGNS(F1, half2, "half2", 2 * LANES, u16, 0x8000) \
    F1(flushed_f32, "flush.f32", LANES, u32, u32, a & 0x7f800000u ? a : a & 0x80000000u) \
    F1(flushed_f16, "flush.f16", LANES, u16, u16, flush_f16(a)) F1(flushed_f16x2, "flush.f16x2", 2 * LANES, u16, u16, flush_f16(a)) \
    F2(add_f64, "add.f64", LANES, f64, f64, f64, a + b) F2(sub_f64, "sub.f64", LANES, f64, f64, f64, a - b) \
    F2(mul_f64, "mul.f64", LANES, f64, f64, f64, a * b) F2(div_f64, "div.f64", LANES, f64, f64, f64, a / b) \
    F3(fma_f64, "fma.f64", LANES, f64, f64, f64, f64, fma(a, b, c)) \
    F1(rcp_f64, "rcp.f64", LANES, f64, f64, 1.0 / a) F1(sqrt_f64, "sqrt.f64", LANES, f64, f64, sqrt(a))
FORMS(DEFINE1, DEFINE2, DEFINE3)

/* ---- the other rounding modes ---------------------------------------------------------------------------------------------- */
/* imm[0]: 0 rn, 1 rz, 2 rm, 3 rp; imm[1]: flush; imm[2]: saturate. Operands are loaded and results stored between the two changes of
 * mode, so that the compiler cannot move the arithmetic out. */
static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

static inline float in32(float x, int64_t ftz) { return ftz ? flush(x) : x; }
static inline float out32(float x, int64_t ftz, int64_t sat, int small)
{
    x = sat ? saturate(x) : canonical(x);
    return ftz ? (small ? no_size(x) : flush(x)) : x;
}
static inline double in64(double x, int64_t ftz) { (void)ftz; return x; }
static inline double out64(double x, int64_t ftz, int64_t sat, int small) { (void)ftz; (void)sat; (void)small; return x; }

#define ROUNDED(ID, NAME, N, T, IN, OUT, TINY, ...) \
    HEAD(ID) \
    { \
        const int64_t ftz = ins->imm[1], sat = ins->imm[2]; \
        SOURCE(T, pa, 1); \
        const T *const pb = ins->n > 2 ? operand(w, ins->arg[2]) : (void *)pa, *const pc = ins->n > 3 ? operand(w, ins->arg[3]) : (void *)pa; \
        (void)pb; \
        (void)pc; \
        T raw[N]; \
        RESULT(T, N); \
        fesetround(modes[ins->imm[0]]); \
        for (int i = 0; i < (N); i++) { const T a = IN(pa[i], ftz), b = IN(pb[i], ftz), c = IN(pc[i], ftz); (void)b; (void)c; raw[i] = (__VA_ARGS__); } \
        __asm__ volatile("" : : "r"(raw) : "memory"); \
        fesetround(FE_TONEAREST); \
        EACH(N) { const T a = IN(pa[i], ftz), b = IN(pb[i], ftz), c = IN(pc[i], ftz); (void)a; (void)b; (void)c; out[i] = OUT(raw[i], ftz, sat, TINY); } \
        FINISH; \
    }
#define ROUNDED_FORMS(F) \
    F(add_any, "add.f32.any", LANES, f32, in32, out32, 0, a + b) \
    F(add2_any, "add.f32x2.any", 2 * LANES, f32, in32, out32, 0, a + b) \
    F(sub_any, "sub.f32.any", LANES, f32, in32, out32, 0, a - b) \
    F(sub2_any, "sub.f32x2.any", 2 * LANES, f32, in32, out32, 0, a - b) \
    F(mul_any, "mul.f32.any", LANES, f32, in32, out32, tiny((double)a * (double)b, ins->imm[0]), a * b) \
    F(mul2_any, "mul.f32x2.any", 2 * LANES, f32, in32, out32, tiny((double)a * (double)b, ins->imm[0]), a * b) \
    F(fma_any, "fma.f32.any", LANES, f32, in32, out32, tiny(add_odd((double)a * (double)b, c), ins->imm[0]), fmaf(a, b, c)) \
    F(fma2_any, "fma.f32x2.any", 2 * LANES, f32, in32, out32, tiny(add_odd((double)a * (double)b, c), ins->imm[0]), fmaf(a, b, c)) \
    F(div_any, "div.f32.any", LANES, f32, in32, out32, tiny_quotient(a, b), a / b) \
    F(rcp_any, "rcp.f32.any", LANES, f32, in32, out32, tiny_quotient(1, a), 1.0f / a) \
    F(sqrt_any, "sqrt.f32.any", LANES, f32, in32, out32, 0, sqrtf(a)) \
    F(add64_any, "add.f64.any", LANES, f64, in64, out64, 0, a + b) \
    F(sub64_any, "sub.f64.any", LANES, f64, in64, out64, 0, a - b) \
    F(mul64_any, "mul.f64.any", LANES, f64, in64, out64, 0, a * b) \
    F(fma64_any, "fma.f64.any", LANES, f64, in64, out64, 0, fma(a, b, c)) \
    F(div64_any, "div.f64.any", LANES, f64, in64, out64, 0, a / b) \
    F(rcp64_any, "rcp.f64.any", LANES, f64, in64, out64, 0, 1.0 / a) \
    F(sqrt64_any, "sqrt.f64.any", LANES, f64, in64, out64, 0, sqrt(a))
ROUNDED_FORMS(ROUNDED)

/* ---- minimum and maximum --------------------------------------------------------------------------------------------------- */
/* On the bits, whose order is the numbers' once negative ones are mirrored; -0 < +0. imm[0]: 1 maximum; imm[1]: .NaN;
 * imm[2]: .xorsign.abs; imm[3]: flush. Of two NaNs in double precision the second is returned, made quiet. */
#define MINMAX(ID, NAME, N, T, S, W, EXPONENT, NAN_BITS) \
    HEAD(ID) \
    { \
        SOURCE(T, pa, 1); \
        SOURCE(T, pb, 2); \
        const T sign = (T)1 << (W - 1), magnitude = (T)(sign - 1), mirror = ins->imm[0] ? (T)~(T)0 : 0; \
        const T keep = ins->imm[2] ? magnitude : (T)~(T)0, xorsign = ins->imm[2] ? sign : 0; \
        const int strict = ins->imm[1] != 0, ftz = ins->imm[3] != 0; \
        RESULT(T, N); \
        EACH(N) \
        { \
            T a = pa[i], b = pb[i]; \
            a = ftz && !(a & (EXPONENT)) ? a & sign : a; \
            b = ftz && !(b & (EXPONENT)) ? b & sign : b; \
            const T flip = (T)((a ^ b) & xorsign); \
            a &= keep; \
            b &= keep; \
            const S ka = (S)(a ^ (T)((T)((S)a >> (W - 1)) & magnitude) ^ mirror), kb = (S)(b ^ (T)((T)((S)b >> (W - 1)) & magnitude) ^ mirror); \
            const int na = (a & magnitude) > (EXPONENT), nb = (b & magnitude) > (EXPONENT); \
            T r = ka < kb ? a : b; \
            r = na ? b : r; \
            r = nb ? a : r; \
            r = (T)(r ^ flip); \
            out[i] = (strict & (na | nb)) | (na & nb) ? (NAN_BITS) : r; \
        } \
        FINISH; \
    }
#define MINMAX_FORMS(F) \
    F(minmax_f32, "minmax.f32", LANES, u32, s32, 32, 0x7f800000u, NAN_F32) \
    F(minmax_f64, "minmax.f64", LANES, u64, s64, 64, 0x7ff0000000000000u, b | 0x8000000000000u) \
    F(minmax_f16, "minmax.f16", LANES, u16, s16, 16, 0x7c00, NAN_F16) F(minmax_f16x2, "minmax.f16x2", 2 * LANES, u16, s16, 16, 0x7c00, NAN_F16) \
    F(minmax_bf16, "minmax.bf16", LANES, u16, s16, 16, 0x7f80, NAN_BF16) \
    F(minmax_bf16x2, "minmax.bf16x2", 2 * LANES, u16, s16, 16, 0x7f80, NAN_BF16)
MINMAX_FORMS(MINMAX)

/* ---- half precision -------------------------------------------------------------------------------------------------------- */
/* imm[0]: flush; imm[1]: saturate; imm[2]: relu; imm[3]: oob: a factor that is the NaN of tensor copies' out-of-bounds fill gives +0. */
static inline float half_result(float x, const int64_t *imm)
{
    x = imm[1] ? saturate(x) : x;
    return imm[2] && x <= 0 ? 0 : x;
}

/* .ftz of f16: as in single precision. */
static inline uint16_t flush_exact(uint16_t r, float exact) { return fabsf(exact) < 0x1p-14f * (1 - 0x1p-12f) ? r & 0x8000 : r; }

#define HALF2(ID, NAME, N, WIDEN, NARROW, FLUSH, ...) \
    HEAD(ID) \
    { \
        SOURCE(u16, pa, 1); \
        SOURCE(u16, pb, 2); \
        const int64_t *imm = ins->imm; \
        RESULT(u16, N); \
        if (!(imm[0] | imm[1] | imm[2])) { \
            EACH(N) { const float a = WIDEN(pa[i]), b = WIDEN(pb[i]); out[i] = NARROW(__VA_ARGS__); } \
            FINISH; \
        } \
        for (int i = 0; i < (N); i++) { \
            const float a = WIDEN(imm[0] ? FLUSH(pa[i]) : pa[i]), b = WIDEN(imm[0] ? FLUSH(pb[i]) : pb[i]); \
            const float x = half_result(__VA_ARGS__, imm); \
            out[i] = imm[0] ? flush_exact(NARROW(x), x) : NARROW(x); \
        } \
        FINISH; \
    }
#define HALF3(ID, NAME, N, WIDEN, NARROW, FLUSH) \
    HEAD(ID) \
    { \
        SOURCE(u16, pa, 1); \
        SOURCE(u16, pb, 2); \
        SOURCE(u16, pc, 3); \
        const int64_t *imm = ins->imm; \
        RESULT(u16, N); \
        if (!(imm[0] | imm[1] | imm[2] | imm[3])) { \
            float wide[4][N]; /* steps of their own, as few loops vectorise from 16 bits to 64 */ \
            EACH(N) wide[0][i] = WIDEN(pa[i]), wide[1][i] = WIDEN(pb[i]), wide[2][i] = WIDEN(pc[i]); \
            EACH(N) wide[3][i] = round_odd(add_odd((double)wide[0][i] * (double)wide[1][i], wide[2][i])); \
            EACH(N) out[i] = NARROW(wide[3][i]); \
            FINISH; \
        } \
        for (int i = 0; i < (N); i++) { \
            const u16 xa = imm[0] ? FLUSH(pa[i]) : pa[i], xb = imm[0] ? FLUSH(pb[i]) : pb[i], xc = imm[0] ? FLUSH(pc[i]) : pc[i]; \
            const double product = (double)WIDEN(xa) * (double)WIDEN(xb); \
            const float x = half_result(round_odd(add_odd(product, WIDEN(xc))), imm); \
            const int none = imm[3] && (xa == OOB_NAN || xb == OOB_NAN); \
            out[i] = none ? 0 : imm[0] ? flush_exact(NARROW(x), x) : NARROW(x); \
        } \
        FINISH; \
    }
#define HALF_FORMS(F2, F3, S, N, WIDEN, NARROW, FLUSH) \
    F2(add_##S, "add." #S, N, WIDEN, NARROW, FLUSH, a + b) \
    F2(sub_##S, "sub." #S, N, WIDEN, NARROW, FLUSH, a - b) \
    F2(mul_##S, "mul." #S, N, WIDEN, NARROW, FLUSH, a * b) \
    F3(fma_##S, "fma." #S, N, WIDEN, NARROW, FLUSH)
#define ALL_HALVES(F2, F3) \
    HALF_FORMS(F2, F3, f16, LANES, f16_to_f32, f32_to_f16, flush_f16) HALF_FORMS(F2, F3, f16x2, 2 * LANES, f16_to_f32, f32_to_f16, flush_f16) \
    HALF_FORMS(F2, F3, bf16, LANES, bf16_to_f32, f32_to_bf16, flush_bf16) \
    HALF_FORMS(F2, F3, bf16x2, 2 * LANES, bf16_to_f32, f32_to_bf16, flush_bf16)
ALL_HALVES(HALF2, HALF3)

static const Entry alu_float[] = {
    FORMS(ENTRY, ENTRY, ENTRY) ROUNDED_FORMS(ENTRY) MINMAX_FORMS(ENTRY) ALL_HALVES(ENTRY, ENTRY)
};
REGISTER(alu_float)
