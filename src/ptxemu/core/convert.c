/* Conversion (PTX ISA: "Data Movement and Conversion Instructions: cvt, cvt.pack").
 *
 * Common pairs of types have loops of their own. All others go through one description of a number, which every format decodes to and is
 * rounded from.
 */
#include "alu.h"

#include <math.h>

/* ---- integer to integer ---------------------------------------------------------------------------------------------------- */
/* Types of 8 bits live in registers of 16, extended by their sign: d = (register of D)(D)(S)a. */
typedef u16 hold_u8;
typedef s16 hold_s8;
typedef u16 hold_u16;
typedef s16 hold_s16;
typedef u32 hold_u32;
typedef s32 hold_s32;
typedef u64 hold_u64;
typedef s64 hold_s64;
#define TO_INT(F1, D, S) F1(cvt_##D##_##S, "cvt." #D "." #S, LANES, hold_##D, hold_##S, (D)(S)a)
#define FROM_INT(F1, S) \
    TO_INT(F1, u8, S) TO_INT(F1, s8, S) TO_INT(F1, u16, S) TO_INT(F1, s16, S) TO_INT(F1, u32, S) TO_INT(F1, s32, S) TO_INT(F1, u64, S) TO_INT(F1, s64, S) \
    F1(clamp_##S, "clamp." #S, LANES, hold_##S, hold_##S, (S)a < (S)ins->imm[0] ? (S)ins->imm[0] : (S)a > (S)ins->imm[1] ? (S)ins->imm[1] : (S)a) \
    F1(f32_##S, "cvt.f32." #S, LANES, f32, hold_##S, (float)(S)a) F1(f64_##S, "cvt.f64." #S, LANES, f64, hold_##S, (double)(S)a)
#define INTEGERS(F1) \
    FROM_INT(F1, u8) FROM_INT(F1, s8) FROM_INT(F1, u16) FROM_INT(F1, s16) FROM_INT(F1, u32) FROM_INT(F1, s32) FROM_INT(F1, u64) FROM_INT(F1, s64)

/* ---- common conversions of floats: to nearest even -------------------------------------------------------------------------- */
static inline float relu(float x, int64_t on) { return on && x <= 0 ? 0 : x; }

/* tf32: 10 bits of mantissa, the others zero; ties away from zero. As on hardware a NaN is truncated, so that one with a payload in the
 * low bits alone becomes an infinity; .satfinite takes one from the last place of both, whatever that gives for a NaN. */
static inline uint32_t tf32_rna(float x, int64_t finite)
{
    uint32_t b = f32_bits(x);
    b = ((b & 0x7fffffffu) >= 0x7f800000u ? b : b + 0x1000u) & 0xffffe000u;
    return finite && (b & 0x7fffffffu) >= 0x7f800000u ? b - 0x2000u : b;
}

static inline float to_integral(float x, int64_t mode) { return mode == 0 ? rintf(x) : mode == 1 ? truncf(x) : mode == 2 ? floorf(x) : ceilf(x); }
static inline double to_integral64(double x, int64_t mode) { return mode == 0 ? rint(x) : mode == 1 ? trunc(x) : mode == 2 ? floor(x) : ceil(x); }

#define COMMON(F1, F2) \
    F1(f32_f16, "cvt.f32.f16", LANES, f32, u16, canonical(f16_to_f32(a))) F1(f32_bf16, "cvt.f32.bf16", LANES, f32, u16, bf16_to_f32(a)) \
    F1(f16_f32, "cvt.f16.f32", LANES, u16, f32, f32_to_f16(relu(a, ins->imm[0]))) \
    F1(bf16_f32, "cvt.bf16.f32", LANES, u16, f32, f32_to_bf16(relu(a, ins->imm[0]))) \
    F2(f16x2_f32, "cvt.f16x2.f32", LANES, u32, f32, f32, \
       (uint32_t)f32_to_f16(relu(a, ins->imm[0])) << 16 | f32_to_f16(relu(b, ins->imm[0]))) \
    F2(bf16x2_f32, "cvt.bf16x2.f32", LANES, u32, f32, f32, \
       (uint32_t)f32_to_bf16(relu(a, ins->imm[0])) << 16 | f32_to_bf16(relu(b, ins->imm[0]))) \
    F1(f64_f32, "cvt.f64.f32", LANES, f64, f32, a) F1(f32_f64, "cvt.f32.f64", LANES, f32, f64, (float)a) \
    F1(tf32_f32, "cvt.rna.tf32.f32", LANES, u32, f32, tf32_rna(a, ins->imm[0])) \
    F1(round_f32, "round.f32", LANES, f32, f32, canonical(to_integral(a, ins->imm[0]))) \
    F1(round_f64, "round.f64", LANES, f64, f64, to_integral64(a, ins->imm[0])) \
    F1(round_f16, "round.f16", LANES, u16, u16, f32_to_f16(to_integral(f16_to_f32(a), ins->imm[0]))) \
    F1(round_bf16, "round.bf16", LANES, u16, u16, f32_to_bf16(to_integral(bf16_to_f32(a), ins->imm[0]))) \
    F1(sat_f32, "sat.f32", LANES, f32, f32, saturate(a)) F1(sat_f64, "sat.f64", LANES, f64, f64, a > 0 ? (a < 1 ? a : 1) : 0) \
    F1(sat_f16, "sat.f16", LANES, u16, u16, f32_to_f16(saturate(f16_to_f32(a)))) \
    F1(relu_f16, "relu.f16", LANES, u16, u16, f32_to_f16(relu(f16_to_f32(a), 1))) \
    F1(relu_bf16, "relu.bf16", LANES, u16, u16, f32_to_bf16(relu(bf16_to_f32(a), 1)))

INTEGERS(DEFINE1)
COMMON(DEFINE1, DEFINE2)

/* ---- float to integer: clamped --------------------------------------------------------------------------------------------- */
enum { U8, S8, U16, S16, U32, S32, U64, S64, F16, BF16, F32, F64, TF32, E4M3, E5M2, E2M3, E3M2, E2M1, UE8M0 }; /* as the lowering numbers them */

static void load_doubles(double *r, const void *p, int type, int ftz)
{
    switch (type) {
    case F16: for (int i = 0; i < LANES; i++) r[i] = f16_to_f32(((const u16 *)p)[i]); break;
    case BF16: for (int i = 0; i < LANES; i++) r[i] = bf16_to_f32(((const u16 *)p)[i]); break;
    case F32: for (int i = 0; i < LANES; i++) r[i] = ftz ? flush(((const f32 *)p)[i]) : ((const f32 *)p)[i]; break;
    default: for (int i = 0; i < LANES; i++) r[i] = ((const f64 *)p)[i];
    }
}

/* LOW, LIMIT: the least value and one past the greatest, as doubles. NaN gives `nan`. */
#define CLAMP(T, HOLD, LOW, LIMIT, LEAST, GREATEST) \
    for (int i = 0; i < LANES; i++) { \
        double x = r[i], inside = x >= (LOW) && x < (LIMIT) ? x : 0; \
        T v = (T)inside; \
        v = x >= (LIMIT) ? (GREATEST) : x < (LOW) ? (LEAST) : v; \
        ((HOLD *)out)[i] = x != x ? (T)nan : v; \
    } \
    break

/* d, a. imm[0]: d's type; imm[1]: a's; imm[2]: 0 rni, 1 rzi, 2 rmi, 3 rpi; imm[3]: flush. */
HEAD(float_to_int)
{
    static const uint8_t bytes[] = {2, 2, 2, 2, 4, 4, 8, 8}, bits[] = {8, 8, 16, 16, 32, 32, 64, 64};
    const int type = (int)ins->imm[0], from = (int)ins->imm[1];
    double r[LANES];
    uint64_t temp[LANES];
    void *dest = operand(w, ins->arg[0]), *out = m == FULL ? dest : temp;
    load_doubles(r, operand(w, ins->arg[1]), from, ins->imm[3] != 0);
    switch (ins->imm[2]) {
    case 0: for (int i = 0; i < LANES; i++) r[i] = rint(r[i]); break;
    case 1: for (int i = 0; i < LANES; i++) r[i] = trunc(r[i]); break;
    case 2: for (int i = 0; i < LANES; i++) r[i] = floor(r[i]); break;
    default: for (int i = 0; i < LANES; i++) r[i] = ceil(r[i]);
    }
    /* NaN: zero if neither side has 64 bits, else the top bit. */
    const uint64_t nan = from == F64 || type >= U64 ? (uint64_t)1 << (bits[type] - 1) : 0;
    switch (type) {
    case U8: CLAMP(u8, hold_u8, 0, 256.0, 0, 255);
    case S8: CLAMP(s8, hold_s8, -128.0, 128.0, -128, 127);
    case U16: CLAMP(uint16_t, hold_u16, 0, 65536.0, 0, 65535);
    case S16: CLAMP(int16_t, hold_s16, -32768.0, 32768.0, -32768, 32767);
    case U32: CLAMP(uint32_t, hold_u32, 0, 0x1p32, 0, UINT32_MAX);
    case S32: CLAMP(int32_t, hold_s32, -0x1p31, 0x1p31, INT32_MIN, INT32_MAX);
    case U64: CLAMP(uint64_t, hold_u64, 0, 0x1p64, 0, UINT64_MAX);
    default: CLAMP(int64_t, hold_s64, -0x1p63, 0x1p63, INT64_MIN, INT64_MAX);
    }
    if (m != FULL)
        merge_lanes(dest, temp, m, bytes[type]);
    return NEXT;
}

/* ---- any format to any ----------------------------------------------------------------------------------------------------- */
enum { ZERO, FINITE, INFINITE, NOT };
/* mantissa * 2^(exponent - 63), its top bit set; a NaN's payload lies at the top. */
typedef struct { int kind, sign, exponent; uint64_t mantissa; } Number;

/* `low`: bits of the container below the format's. */
typedef struct { uint8_t exponent, mantissa, low; uint64_t nan; } Format;
static const Format formats[] = {
    [F16] = {5, 10, 0, NAN_F16}, [BF16] = {8, 7, 0, NAN_BF16}, [F32] = {8, 23, 0, NAN_F32}, [F64] = {11, 52, 0, 0xfff8000000000000u},
    [TF32] = {8, 10, 13, 0x7fffe000u},
};

static Number integer(uint64_t magnitude, int sign)
{
    if (!magnitude)
        return (Number){ZERO, 0, 0, 0};
    int zeros = __builtin_clzll(magnitude);
    return (Number){FINITE, sign, 63 - zeros, magnitude << zeros};
}

static Number decode(int type, uint64_t bits)
{
    switch (type) {
    case U8: return integer((u8)bits, 0);
    case U16: return integer((uint16_t)bits, 0);
    case U32: return integer((uint32_t)bits, 0);
    case U64: return integer(bits, 0);
    case S8: bits = (uint64_t)(s8)bits; break;
    case S16: bits = (uint64_t)(int16_t)bits; break;
    case S32: bits = (uint64_t)(int32_t)bits; break;
    case UE8M0:
        return (bits & 0xff) == 0xff ? (Number){NOT, 0, 0, 0} : (Number){FINITE, 0, (int)(bits & 0xff) - 127, (uint64_t)1 << 63};
    }
    if (type <= S64)
        return integer((int64_t)bits < 0 ? 0 - bits : bits, (int64_t)bits < 0);
    const Format f = formats[type];
    bits >>= f.low;
    const int bias = (1 << (f.exponent - 1)) - 1, top = (1 << f.exponent) - 1;
    int sign = bits >> (f.exponent + f.mantissa) & 1, e = (int)(bits >> f.mantissa) & top;
    uint64_t fraction = bits & (((uint64_t)1 << f.mantissa) - 1);
    if (e == top)
        return (Number){fraction ? NOT : INFINITE, sign, 0, fraction << (64 - f.mantissa)};
    Number n = integer(e ? fraction | (uint64_t)1 << f.mantissa : fraction, sign);
    n.sign = sign; /* of zero, too */
    n.exponent += (e ? e : 1) - bias - f.mantissa;
    return n;
}

/* Rounding: rn, rz, rm, rp as elsewhere, then ties away from zero, and by random bits. */
enum { RN, RZ, RM, RP, RNA, RS };
enum { IS_FTZ = 1, IS_SAT = 2, IS_RELU = 4, IS_SATFINITE = 8, IS_PAYLOAD = 16 };

/* ue8m0 has neither sign nor zero: the exponent of |n|, rounded down or up (PTX ISA, and CUDA's cuda_fp8 conversions). */
static uint64_t encode_scale(Number n, int mode, int flags)
{
    const uint64_t over = flags & IS_SATFINITE ? 0xfe : 0xff;
    if (n.kind == NOT)
        return 0xff;
    if (n.kind == INFINITE)
        return over;
    if (n.kind == ZERO || n.exponent < -127)
        return 0;
    int e = n.exponent + 127 + (mode == RP && n.mantissa != (uint64_t)1 << 63);
    return e >= 0xff ? over : (uint64_t)e;
}

/* The discarded bits, aligned to the top of 64, decide whether the magnitude is rounded up. `sticky`: further ones below. */
static int rounds_up(int mode, int sign, int odd, uint64_t rest, int sticky, uint64_t random)
{
    const uint64_t half = (uint64_t)1 << 63;
    switch (mode) {
    case RN: return rest > half || (rest == half && (sticky || odd));
    case RNA: return rest >= half;
    case RM: return sign && (rest || sticky);
    case RP: return !sign && (rest || sticky);
    case RS: return rest + random < rest;
    default: return 0;
    }
}

static uint64_t encode(int type, Number n, int mode, int flags, uint64_t random)
{
    if (type == UE8M0)
        return encode_scale(n, mode, flags);
    const Format f = formats[type];
    const int bias = (1 << (f.exponent - 1)) - 1, least = 1 - bias;
    const uint64_t sign = (uint64_t)n.sign << (f.exponent + f.mantissa), infinite = (((uint64_t)1 << f.exponent) - 1) << f.mantissa;
    const uint64_t last = infinite - 1;
    if (n.kind == NOT && flags & IS_SAT)
        return 0;
    if (n.kind == NOT && flags & IS_PAYLOAD)
        return sign | infinite | (uint64_t)1 << (f.mantissa - 1) | n.mantissa >> (64 - f.mantissa);
    if (n.kind == NOT)
        return f.nan;
    if (flags & (IS_RELU | IS_SAT) && n.sign)
        return 0;
    if (flags & IS_SAT && (n.kind == INFINITE || (n.kind == FINITE && n.exponent >= 0)))
        n = (Number){FINITE, 0, 0, (uint64_t)1 << 63};
    if (n.kind == ZERO)
        return sign << f.low;
    if (n.kind == INFINITE)
        return (sign | (flags & IS_SATFINITE ? last : infinite)) << f.low;
    /* Bits below the last place of the result's binade. */
    const int e = n.exponent < least ? least : n.exponent, drop = 63 - f.mantissa + (e - n.exponent);
    uint64_t keep = drop > 63 ? 0 : n.mantissa >> drop;
    uint64_t rest = drop > 64 ? (drop > 127 ? 0 : n.mantissa >> (drop - 64)) : n.mantissa << (64 - drop);
    const int sticky = drop > 64 && (drop > 127 || n.mantissa << (128 - drop));
    keep += rounds_up(mode, n.sign, keep & 1, rest, sticky, random);
    uint64_t bits = ((uint64_t)(e - least) << f.mantissa) + keep; /* a subnormal's leading bit, and a carry, count in the exponent */
    if (bits > last) {
        const int away = mode == RN || mode == RNA || mode == RS || (mode == RM && n.sign) || (mode == RP && !n.sign);
        bits = away && !(flags & IS_SATFINITE) ? infinite : last;
    }
    if (type == F32 && flags & IS_FTZ && bits < (uint64_t)1 << 23)
        bits = 0;
    return (sign | bits) << f.low;
}

static inline uint64_t lane_bits(const void *p, int i, int bytes)
{
    return bytes == 2 ? ((const u16 *)p)[i] : bytes == 4 ? ((const u32 *)p)[i] : ((const u64 *)p)[i];
}
static inline void set_lane(void *p, int i, int bytes, uint64_t v)
{
    if (bytes == 2)
        ((u16 *)p)[i] = (u16)v;
    else if (bytes == 4)
        ((u32 *)p)[i] = (u32)v;
    else
        ((u64 *)p)[i] = v;
}
static int holds(int type)
{
    switch (type) {
    case U32: case S32: case F32: case TF32: return 4;
    case U64: case S64: case F64: return 8;
    default: return 2;
    }
}

static Number flushed(int type, Number n, int flags)
{
    if (flags & IS_FTZ && type == F32 && n.kind == FINITE && n.exponent < -126)
        n.kind = ZERO;
    if (flags & IS_FTZ && type == F32 && n.kind == NOT)
        return decode(F32, NAN_F32);
    return n;
}

/* d, a. imm[0]: d's type; imm[1]: a's; imm[2]: rounding; imm[3]: flags. Between double precision and the others NaNs keep their sign and
 * payload and become quiet; but .ftz replaces them by the canonical NaN first. Other NaNs are canonical. */
HEAD(any_to_any)
{
    const int to = (int)ins->imm[0], from = (int)ins->imm[1], mode = (int)ins->imm[2];
    const int flags = (int)ins->imm[3] | (to == F64 || from == F64 ? IS_PAYLOAD : 0);
    const void *a = operand(w, ins->arg[1]);
    void *d = operand(w, ins->arg[0]);
    for (int i = 0; i < LANES; i++)
        if (m >> i & 1)
            set_lane(d, i, holds(to), encode(to, flushed(from, decode(from, lane_bits(a, i, holds(from))), flags), mode, flags, 0));
    return NEXT;
}

/* The bits that an element takes in a packed operand. */
static int field(int type) { return type == E2M1 ? 4 : type == F16 || type == BF16 ? 16 : 8; }

/* The formats of 4 to 8 bits again, for loops over all lanes: places of mantissa, bias, greatest finite code, first code of NaN, NaN. */
typedef struct { uint32_t mantissa, bias, last, first_nan, nan; } Small;
static const Small smalls[] = {
    [E4M3] = {3, 7, 0x7e, 0x7f, 0x7f}, [E5M2] = {2, 15, 0x7b, 0x7d, 0x7f}, [E2M3] = {3, 1, 0x1f, 0x20, 0x1f},
    [E3M2] = {2, 3, 0x1f, 0x20, 0x1f}, [E2M1] = {1, 1, 0x7, 0x8, 0x7},
};
static int is_small(int type) { return type >= E4M3 && type <= E2M1; }

/* Round to nearest even, saturating. A subnormal is the last places of a sum with 2^23 times its unit. `sign`: where the sign goes. */
static inline uint32_t small_code(uint32_t b, Small f, uint32_t sign, uint32_t drop_negative)
{
    const uint32_t shift = 23 - f.mantissa, least = (128 - f.bias) << 23, unit = (128 - f.bias + 23 - f.mantissa) << 23;
    const uint32_t a = b & 0x7fffffffu, negative = b >> 31;
    uint32_t normal = ((a + ((1u << shift >> 1) - 1) + (a >> shift & 1)) >> shift) - ((127 - f.bias) << f.mantissa);
    uint32_t r = a < least ? f32_bits(f32_of(a) + f32_of(unit)) - unit : normal;
    r = r > f.last ? f.last : r;
    r = negative & drop_negative ? 0 : r | (negative & ~drop_negative) * sign;
    return a > 0x7f800000u ? f.nan : r;
}

static inline float small_value(uint32_t code, Small f, uint32_t sign)
{
    const uint32_t a = code & (sign - 1), negative = (code & sign ? 0x80000000u : 0);
    uint32_t normal = (a << (23 - f.mantissa)) + ((127 - f.bias) << 23);
    uint32_t r = a >> f.mantissa ? normal : f32_bits((float)(int32_t)a * f32_of((128 - f.bias - f.mantissa) << 23));
    r = a > f.last ? 0x7f800000u : r;
    return f32_of(a >= f.first_nan ? NAN_F32 : r | negative);
}

/* The place of a small format's sign. */
static uint32_t sign_of(int type) { return type == E2M1 ? 8 : type == E2M3 || type == E3M2 ? 32 : 128; }

static void pack_small(u16 *out, const f32 *a, const f32 *b, int to, int flags)
{
    const Small f = smalls[to];
    const uint32_t sign = sign_of(to), drop = (flags & IS_RELU) != 0, width = field(to);
    for (int i = 0; i < LANES; i++)
        out[i] = (u16)(small_code(f32_bits(a[i]), f, sign, drop) << width | small_code(f32_bits(b[i]), f, sign, drop));
}

/* d, a, b [, random bits]: f32 a above, f32 b below. imm as above. Random bits: 13 for f16, 16 for bf16, from either half. */
HEAD(pair_to_packed)
{
    const int to = (int)ins->imm[0], mode = (int)ins->imm[2], flags = (int)ins->imm[3], width = field(to), used = to == F16 ? 13 : 16;
    SOURCE(u32, pa, 1);
    SOURCE(u32, pb, 2);
    const u32 *random = ins->n > 3 ? operand(w, ins->arg[3]) : NULL;
    void *d = operand(w, ins->arg[0]);
    if (is_small(to)) { /* always to nearest, saturating */
        RESULT(u16, LANES);
        pack_small(out, (const f32 *)pa, (const f32 *)pb, to, flags);
        FINISH;
    }
    for (int i = 0; i < LANES; i++) {
        if (!(m >> i & 1))
            continue;
        const uint64_t bits = random ? random[i] : 0;
        const uint64_t high = encode(to, flushed(F32, decode(F32, pa[i]), flags), mode, flags, bits >> 16 << (64 - used));
        const uint64_t low = encode(to, flushed(F32, decode(F32, pb[i]), flags), mode, flags, bits << (64 - used));
        set_lane(d, i, width == 16 ? 4 : 2, high << width | low);
    }
    return NEXT;
}

/* d, a: two packed elements each. imm as above. */
HEAD(packed_to_packed)
{
    const int to = (int)ins->imm[0], from = (int)ins->imm[1], mode = (int)ins->imm[2], flags = (int)ins->imm[3];
    const int in = field(from), width = field(to);
    const void *a = operand(w, ins->arg[1]);
    void *d = operand(w, ins->arg[0]);
    if (is_small(to)) {
        float high[LANES], low[LANES];
        RESULT(u16, LANES);
        EACH(LANES) high[i] = f16_to_f32((u16)(((const u32 *)a)[i] >> 16)), low[i] = f16_to_f32((u16)((const u32 *)a)[i]);
        pack_small(out, high, low, to, flags);
        FINISH;
    }
    if (is_small(from)) {
        const Small f = smalls[from];
        const uint32_t sign = sign_of(from), mask = (1u << in) - 1;
        const int drop = (flags & IS_RELU) != 0;
        RESULT(u32, LANES);
        EACH(LANES)
        {
            const uint32_t bits = ((const u16 *)a)[i];
            const uint32_t high = f32_to_f16(relu(small_value(bits >> in & mask, f, sign), drop));
            out[i] = high << 16 | f32_to_f16(relu(small_value(bits & mask, f, sign), drop));
        }
        FINISH;
    }
    for (int i = 0; i < LANES; i++) {
        if (!(m >> i & 1))
            continue;
        const uint64_t bits = lane_bits(a, i, in == 16 ? 4 : 2), mask = ((uint64_t)1 << in) - 1;
        const uint64_t high = encode(to, decode(from, bits >> in & mask), mode, flags, 0), low = encode(to, decode(from, bits & mask), mode, flags, 0);
        set_lane(d, i, width == 16 ? 4 : 2, high << width | low);
    }
    return NEXT;
}

/* cvt.pack d, a, b [, c]: imm[0], imm[1]: the range; imm[2]: bits of an element. */
HEAD(pack_integers)
{
    SOURCE(s32, pa, 1);
    SOURCE(s32, pb, 2);
    const u32 *c = ins->n > 3 ? operand(w, ins->arg[3]) : NULL;
    const int32_t low = (int32_t)ins->imm[0], high = (int32_t)ins->imm[1], bits = (int32_t)ins->imm[2];
    const uint32_t mask = (1u << bits) - 1;
    RESULT(u32, LANES);
    for (int i = 0; i < LANES; i++) {
        const int32_t a = pa[i] < low ? low : pa[i] > high ? high : pa[i], b = pb[i] < low ? low : pb[i] > high ? high : pb[i];
        out[i] = ((uint32_t)a & mask) << bits | ((uint32_t)b & mask) | (c ? c[i] << 2 * bits : 0);
    }
    FINISH;
}

static const Entry convert[] = {
    INTEGERS(ENTRY) COMMON(ENTRY, ENTRY)
    {"cvt.int", float_to_int}, {"cvt.any", any_to_any}, {"cvt.pair", pair_to_packed}, {"cvt.packed", packed_to_packed}, {"cvt.pack", pack_integers},
};
REGISTER(convert)
