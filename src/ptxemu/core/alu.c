/* Integer arithmetic, logic, comparison, selection and moves (PTX ISA: "Integer Arithmetic Instructions", "Extended-Precision Integer
 * Arithmetic Instructions", "Comparison and Selection Instructions", "Logic and Shift Instructions", "Data Movement: mov, prmt"). */
#include "alu.h"

void merge_lanes(void *d, const void *from, uint32_t m, unsigned bytes)
{
    switch (bytes) {
    case 2:
        for (int i = 0; i < LANES; i++)
            ((u16 *)d)[i] = m >> i & 1 ? ((const u16 *)from)[i] : ((u16 *)d)[i];
        return;
    case 4:
        for (int i = 0; i < LANES; i++)
            ((u32 *)d)[i] = m >> i & 1 ? ((const u32 *)from)[i] : ((u32 *)d)[i];
        return;
    case 8:
        for (int i = 0; i < LANES; i++)
            ((u64 *)d)[i] = m >> i & 1 ? ((const u64 *)from)[i] : ((u64 *)d)[i];
        return;
    default:
        for (int i = 0; i < LANES; i++)
            if (m >> i & 1)
                memcpy((char *)d + i * bytes, (const char *)from + i * bytes, bytes);
    }
}

/* ---- forms by size: the sign does not matter ------------------------------------------------------------------------------- */
/* Unsigned zeros keep the promoted arithmetic of short types unsigned. */
#define BY_SIZE(F1, F2, F3, N, T, W, S) \
    F2(add_##S, "add." #S, N, T, T, T, 0u + a + b) \
    F2(sub_##S, "sub." #S, N, T, T, T, 0u + a - b) \
    F1(neg_##S, "neg." #S, N, T, T, 0u - a)

#define BY_WIDTH(F1, F2, F3, T, W) \
    BY_SIZE(F1, F2, F3, LANES, T, W, W) \
    F2(mul_##W, "mul.lo." #W, LANES, T, T, T, (0u + a) * b) \
    F3(mad_##W, "mad.lo." #W, LANES, T, T, T, T, (0u + a) * b + c) \
    F1(mov_##W, "mov." #W, LANES, T, T, a) \
    F2(and_##W, "and." #W, LANES, T, T, T, a & b) \
    F2(or_##W, "or." #W, LANES, T, T, T, a | b) \
    F2(xor_##W, "xor." #W, LANES, T, T, T, a ^ b) \
    F1(not_##W, "not." #W, LANES, T, T, ~a) \
    F1(cnot_##W, "cnot." #W, LANES, T, T, a == 0) \
    F2(shl_##W, "shl." #W, LANES, T, T, u32, b >= W ? 0 : a << (b & (W - 1))) \
    F3(slct_s32_##W, "slct.s32." #W, LANES, T, T, T, s32, c >= 0 ? a : b) \
    F3(slct_f32_##W, "slct.f32." #W, LANES, T, T, T, f32, c >= 0 ? a : b) \
    F3(slct_ftz_##W, "slct.f32.ftz." #W, LANES, T, T, T, f32, flush(c) >= 0 ? a : b)

/* ---- forms by type --------------------------------------------------------------------------------------------------------- */
#define MINMAX(F2, N, T, S) \
    F2(min_##S, "min." #S, N, T, T, T, a < b ? a : b) \
    F2(max_##S, "max." #S, N, T, T, T, a > b ? a : b)

#define RELU(F2, N, T, S) \
    F2(min_relu_##S, "min.relu." #S, N, T, T, T, (a < b ? a : b) < 0 ? 0 : a < b ? a : b) \
    F2(max_relu_##S, "max.relu." #S, N, T, T, T, (a > b ? a : b) < 0 ? 0 : a > b ? a : b)

/* Division by zero gives all ones, as on the device; the least integer divided by -1 is itself.
 * X: a type for the whole product. */
#define BY_TYPE(F1, F2, F3, T, U, W, X, MINUS_ONE) \
    MINMAX(F2, LANES, T, T) \
    F2(div_##T, "div." #T, LANES, T, T, T, b == 0 ? (T)-1 : MINUS_ONE ? (T)(0u - (U)a) : a / b) \
    F2(rem_##T, "rem." #T, LANES, T, T, T, b == 0 ? (T)-1 : MINUS_ONE ? 0 : a % b) \
    F2(mulhi_##T, "mul.hi." #T, LANES, T, T, T, (X)a * (X)b >> W) \
    F3(madhi_##T, "mad.hi." #T, LANES, T, T, T, T, (U)((X)a * (X)b >> W) + (U)c) \
    F3(sad_##T, "sad." #T, LANES, T, T, T, T, (U)c + (a < b ? (U)b - (U)a : (U)a - (U)b)) \
    F2(shr_##T, "shr." #T, LANES, T, T, u32, a >> (b >= W ? W - 1 : b) >> (b >= W))

#define SIGNED(F1, F2, F3, T, U) F1(abs_##T, "abs." #T, LANES, T, T, a < 0 ? (T)(0u - (U)a) : a)

#define WIDE(F2, F3, T, D) \
    F2(mulwide_##T, "mul.wide." #T, LANES, D, T, T, (D)a * (D)b) \
    F3(madwide_##T, "mad.wide." #T, LANES, u##D, T, T, u##D, (u##D)((D)a * (D)b) + c)
#define uu32 u32
#define uu64 u64
#define us32 u32
#define us64 u64

/* ---- single forms ---------------------------------------------------------------------------------------------------------- */
static inline int32_t clamp32(int64_t x) { return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x; }
static inline int32_t top24s(uint32_t x) { return (int32_t)(x << 8) >> 8; }

static inline uint32_t lookup3(uint32_t a, uint32_t b, uint32_t c, uint32_t lut)
{
#define K(n) (-(lut >> n & 1))
    uint32_t ab = (c & K(7)) | (~c & K(6)), a_ = (c & K(5)) | (~c & K(4)), b_ = (c & K(3)) | (~c & K(2)), none = (c & K(1)) | (~c & K(0));
#undef K
    return (a & ((b & ab) | (~b & a_))) | (~a & ((b & b_) | (~b & none)));
}

static inline uint32_t permute(uint64_t v, uint32_t selectors)
{
    uint32_t r = 0;
    for (int k = 0; k < 4; k++) {
        uint32_t s = selectors >> 4 * k, byte = v >> 8 * (s & 7) & 0xff;
        r |= (s & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * k;
    }
    return r;
}

/* Selectors of prmt's modes f4e, b4e, rc8, ecl, ecr, rc16 for the four values of c[1:0]. */
static const uint32_t prmt_selectors[6][4] = {
    {0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123}, {0x0000, 0x1111, 0x2222, 0x3333},
    {0x3210, 0x3211, 0x3222, 0x3333}, {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232},
};

/* A position or length in a value of this width. The ISA gives it 0 to 255; hardware takes 8 bits of it in the forms of 32 bits, all 32
 * in those of 64, where everything beyond the width is alike. */
static inline uint32_t field_place(uint32_t x, int width) { return width == 32 ? x & 0xff : x < 255 ? x : 255; }

/* The field of len bits from bit pos of a value of W bits; the sign bit fills what lies beyond. */
static inline uint64_t extract(uint64_t a, uint32_t pos, uint32_t len, int width, int is_signed)
{
    pos = field_place(pos, width);
    len = field_place(len, width);
    if (len == 0)
        return 0;
    int last = (int)(pos + len) - 1 < width - 1 ? (int)(pos + len) - 1 : width - 1;
    uint64_t fill = is_signed && a >> last & 1 ? ~(uint64_t)0 : 0;
    int have = (int)pos > last ? 0 : last - (int)pos + 1;
    if (have == 0)
        return fill;
    uint64_t mask = have == 64 ? ~(uint64_t)0 : ((uint64_t)1 << have) - 1;
    return (a >> pos & mask) | (fill & ~mask);
}

static inline uint64_t insert(uint64_t a, uint64_t b, uint32_t pos, uint32_t len, uint32_t width)
{
    pos = field_place(pos, width);
    len = field_place(len, width);
    if (len == 0 || pos >= width)
        return b;
    len = len > width - pos ? width - pos : len;
    uint64_t mask = (len == 64 ? ~(uint64_t)0 : ((uint64_t)1 << len) - 1) << pos;
    return (b & ~mask) | (a << pos & mask);
}

static inline uint32_t find_top(uint64_t a, int width, int shiftamt)
{
    if (a == 0)
        return 0xffffffffu;
    int at = 63 - __builtin_clzll(a);
    return shiftamt ? width - 1 - at : at;
}

static inline uint64_t reverse64(uint64_t a)
{
    a = (a >> 1 & 0x5555555555555555u) | (a & 0x5555555555555555u) << 1;
    a = (a >> 2 & 0x3333333333333333u) | (a & 0x3333333333333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0f0f0f0f0fu) | (a & 0x0f0f0f0f0f0f0f0fu) << 4;
    return __builtin_bswap64(a);
}

/* fns: the offset-th set bit of mask from bit base, upwards or (offset < 0) downwards. */
static inline uint32_t nth_set(uint32_t mask, uint32_t base, int32_t offset)
{
    if (offset == 0)
        return base < 32 && mask >> base & 1 ? base : 0xffffffffu;
    int64_t count = offset > 0 ? offset : -(int64_t)offset;
    for (int64_t at = base; at >= 0 && at < 32; at += offset > 0 ? 1 : -1)
        if (mask >> at & 1 && --count == 0)
            return at;
    return 0xffffffffu;
}

/* szext: a's low n bits; n counts modulo 32 unless it is clamped. */
static inline uint32_t extend_low(uint32_t a, uint32_t n, int clamp, int is_signed)
{
    if (clamp && n >= 32)
        return a;
    n &= 31;
    if (n == 0)
        return 0;
    return is_signed ? (uint32_t)((int32_t)(a << (32 - n)) >> (32 - n)) : a << (32 - n) >> (32 - n);
}

static inline uint32_t bit_mask(uint32_t at, uint32_t n, int clamp)
{
    if (clamp && at >= 32)
        return 0;
    n = clamp && n > 32 ? 32 : clamp ? n : n & 31;
    return (uint32_t)((((uint64_t)1 << n) - 1) << (at & 31));
}

/* imm[0], imm[1]: a, b are signed. */
static inline uint32_t dot4(uint32_t a, uint32_t b, uint32_t c, const int64_t *imm)
{
    for (int k = 0; k < 32; k += 8)
        c += (uint32_t)((imm[0] ? (s8)(a >> k) : (u8)(a >> k)) * (imm[1] ? (s8)(b >> k) : (u8)(b >> k)));
    return c;
}

/* imm[2]: 16 for the high bytes of b. */
static inline uint32_t dot2(uint32_t a, uint32_t b, uint32_t c, const int64_t *imm)
{
    b >>= imm[2];
    for (int k = 0; k < 2; k++)
        c += (uint32_t)((imm[0] ? (int16_t)(a >> 16 * k) : (uint16_t)(a >> 16 * k)) * (imm[1] ? (s8)(b >> 8 * k) : (u8)(b >> 8 * k)));
    return c;
}

#define SINGLE(F1, F2, F3) \
    F2(add_sat, "add.sat.s32", LANES, s32, s32, s32, clamp32((int64_t)a + b)) \
    F2(sub_sat, "sub.sat.s32", LANES, s32, s32, s32, clamp32((int64_t)a - b)) \
    F3(madhi_sat, "mad.hi.sat.s32", LANES, s32, s32, s32, s32, clamp32(((int64_t)a * b >> 32) + c)) \
    F2(mul24_lo, "mul24.lo", LANES, u32, u32, u32, (a << 8 >> 8) * (b << 8 >> 8)) \
    F2(mul24_lo_s, "mul24.lo.s32", LANES, u32, u32, u32, (uint32_t)top24s(a) * (uint32_t)top24s(b)) \
    F2(mul24_hi, "mul24.hi.u32", LANES, u32, u32, u32, (uint64_t)(a << 8 >> 8) * (b << 8 >> 8) >> 16) \
    F2(mul24_hi_s, "mul24.hi.s32", LANES, u32, u32, u32, (int64_t)top24s(a) * top24s(b) >> 16) \
    F3(mad24_lo, "mad24.lo.u32", LANES, u32, u32, u32, u32, (a << 8 >> 8) * (b << 8 >> 8) + c) \
    F3(mad24_lo_s, "mad24.lo.s32", LANES, u32, u32, u32, u32, (uint32_t)top24s(a) * (uint32_t)top24s(b) + c) \
    F3(mad24_hi, "mad24.hi.u32", LANES, u32, u32, u32, u32, (uint32_t)((uint64_t)(a << 8 >> 8) * (b << 8 >> 8) >> 16) + c) \
    F3(mad24_hi_s, "mad24.hi.s32", LANES, u32, u32, u32, u32, (uint32_t)((int64_t)top24s(a) * top24s(b) >> 16) + c) \
    F3(mad24_sat, "mad24.hi.sat.s32", LANES, s32, u32, u32, s32, clamp32((int64_t)(int32_t)((int64_t)top24s(a) * top24s(b) >> 16) + c)) \
    F3(lop3, "lop3", LANES, u32, u32, u32, u32, lookup3(a, b, c, ins->imm[0])) \
    F3(shf_l_clamp, "shf.l.clamp", LANES, u32, u32, u32, u32, c >= 32 ? a : ((uint64_t)b << 32 | a) << c >> 32) \
    F3(shf_l_wrap, "shf.l.wrap", LANES, u32, u32, u32, u32, ((uint64_t)b << 32 | a) << (c & 31) >> 32) \
    F3(shf_r_clamp, "shf.r.clamp", LANES, u32, u32, u32, u32, ((uint64_t)b << 32 | a) >> (c >= 32 ? 32 : c)) \
    F3(shf_r_wrap, "shf.r.wrap", LANES, u32, u32, u32, u32, ((uint64_t)b << 32 | a) >> (c & 31)) \
    F3(prmt, "prmt", LANES, u32, u32, u32, u32, permute((uint64_t)b << 32 | a, c)) \
    F3(prmt_mode, "prmt.mode", LANES, u32, u32, u32, u32, permute((uint64_t)b << 32 | a, prmt_selectors[ins->imm[0]][c & 3])) \
    F3(bfe_u32, "bfe.u32", LANES, u32, u32, u32, u32, extract(a, b, c, 32, 0)) \
    F3(bfe_s32, "bfe.s32", LANES, u32, u32, u32, u32, extract(a, b, c, 32, 1)) \
    F3(bfe_u64, "bfe.u64", LANES, u64, u64, u32, u32, extract(a, b, c, 64, 0)) \
    F3(bfe_s64, "bfe.s64", LANES, u64, u64, u32, u32, extract(a, b, c, 64, 1)) \
    F1(popc32, "popc.32", LANES, u32, u32, __builtin_popcount(a)) \
    F1(popc64, "popc.64", LANES, u32, u64, __builtin_popcountll(a)) \
    F1(clz32, "clz.32", LANES, u32, u32, a ? __builtin_clz(a) : 32) \
    F1(clz64, "clz.64", LANES, u32, u64, a ? __builtin_clzll(a) : 64) \
    F1(brev32, "brev.32", LANES, u32, u32, reverse64(a) >> 32) \
    F1(brev64, "brev.64", LANES, u64, u64, reverse64(a)) \
    F1(bfind_u32, "bfind.u32", LANES, u32, u32, find_top(a, 32, ins->imm[0])) \
    F1(bfind_s32, "bfind.s32", LANES, u32, s32, find_top((uint32_t)(a < 0 ? ~a : a), 32, ins->imm[0])) \
    F1(bfind_u64, "bfind.u64", LANES, u32, u64, find_top(a, 64, ins->imm[0])) \
    F1(bfind_s64, "bfind.s64", LANES, u32, s64, find_top(a < 0 ? ~a : a, 64, ins->imm[0])) \
    F3(fns, "fns", LANES, u32, u32, u32, s32, nth_set(a, b, c)) \
    F2(szext, "szext", LANES, u32, u32, u32, extend_low(a, b, ins->imm[0], ins->imm[1])) \
    F2(bmsk, "bmsk", LANES, u32, u32, u32, bit_mask(a, b, ins->imm[0])) \
    F3(dp4a, "dp4a", LANES, u32, u32, u32, u32, dot4(a, b, c, ins->imm)) \
    F3(dp2a, "dp2a", LANES, u32, u32, u32, u32, dot2(a, b, c, ins->imm)) \
    F2(copysign32, "copysign.f32", LANES, u32, u32, u32, (a & 0x80000000u) | (b & 0x7fffffffu)) \
    F2(copysign64, "copysign.f64", LANES, u64, u64, u64, (a >> 63 << 63) | (b << 1 >> 1)) \
    F1(or_imm64, "or.imm.64", LANES, u64, u64, a | (uint64_t)ins->imm[0]) \
    F1(and_imm64, "and.imm.64", LANES, u64, u64, a & (uint64_t)ins->imm[0])

#define FORMS(F1, F2, F3) \
    BY_WIDTH(F1, F2, F3, u16, 16) BY_WIDTH(F1, F2, F3, u32, 32) BY_WIDTH(F1, F2, F3, u64, 64) \
    BY_SIZE(F1, F2, F3, 2 * LANES, u16, 16, 16x2) \
    BY_TYPE(F1, F2, F3, u16, u16, 16, uint32_t, 0) BY_TYPE(F1, F2, F3, s16, u16, 16, int32_t, b == -1) \
    BY_TYPE(F1, F2, F3, u32, u32, 32, uint64_t, 0) BY_TYPE(F1, F2, F3, s32, u32, 32, int64_t, b == -1) \
    BY_TYPE(F1, F2, F3, u64, u64, 64, unsigned __int128, 0) BY_TYPE(F1, F2, F3, s64, u64, 64, __int128, b == -1) \
    MINMAX(F2, 2 * LANES, u16, u16x2) MINMAX(F2, 2 * LANES, s16, s16x2) RELU(F2, 2 * LANES, s16, s16x2) RELU(F2, LANES, s32, s32) \
    SIGNED(F1, F2, F3, s16, u16) SIGNED(F1, F2, F3, s32, u32) SIGNED(F1, F2, F3, s64, u64) \
    WIDE(F2, F3, u16, u32) WIDE(F2, F3, s16, s32) WIDE(F2, F3, u32, u64) WIDE(F2, F3, s32, s64) \
    SINGLE(F1, F2, F3)

FORMS(DEFINE1, DEFINE2, DEFINE3)

/* bfi f, a, b, c, d */
#define BFI(ID, T, W) \
    HEAD(ID) \
    { \
        SOURCE(T, pa, 1); \
        SOURCE(T, pb, 2); \
        SOURCE(u32, pc, 3); \
        SOURCE(u32, pd, 4); \
        RESULT(T, LANES); \
        EACH(LANES) out[i] = (T)insert(pa[i], pb[i], pc[i], pd[i], W); \
        FINISH; \
    }
BFI(bfi32, u32, 32)
BFI(bfi64, u64, 64)

/* ---- extended precision ---------------------------------------------------------------------------------------------------- */
/* d, a, b, [c], carry. imm[0]: 1 add the carry in; imm[1]: 1 write the carry out; imm[2]: 1 subtract (the carry is a borrow). */
#define CARRY(ID, T, X, W) \
    HEAD(ID) \
    { \
        SOURCE(T, pa, 1); \
        SOURCE(T, pb, 2); \
        u32 *cc = operand(w, ins->arg[3]); \
        const uint32_t in = ins->imm[0] ? *cc : 0; \
        uint32_t carry = 0; \
        RESULT(T, LANES); \
        for (int i = 0; i < LANES; i++) { \
            X sum = ins->imm[2] ? (X)pa[i] - pb[i] - (in >> i & 1) : (X)pa[i] + pb[i] + (in >> i & 1); \
            out[i] = (T)sum; \
            carry |= (uint32_t)(sum >> W & 1) << i; \
        } \
        if (ins->imm[1]) \
            *cc = (*cc & ~m) | (carry & m); \
        FINISH; \
    }
CARRY(carry32, u32, uint64_t, 32)
CARRY(carry64, u64, unsigned __int128, 64)

/* mad.cc and madc: imm[2]: 0 low, 1 high half of the unsigned, 2 of the signed product. */
#define MAD_CARRY(ID, T, S, X, SX, W) \
    HEAD(ID) \
    { \
        SOURCE(T, pa, 1); \
        SOURCE(T, pb, 2); \
        SOURCE(T, pc, 3); \
        u32 *cc = operand(w, ins->arg[4]); \
        const uint32_t in = ins->imm[0] ? *cc : 0; \
        uint32_t carry = 0; \
        RESULT(T, LANES); \
        for (int i = 0; i < LANES; i++) { \
            T part = ins->imm[2] == 0 ? (T)((X)pa[i] * pb[i]) : ins->imm[2] == 1 ? (T)((X)pa[i] * pb[i] >> W) \
                                                                               : (T)((SX)(S)pa[i] * (S)pb[i] >> W); \
            X sum = (X)part + pc[i] + (in >> i & 1); \
            out[i] = (T)sum; \
            carry |= (uint32_t)(sum >> W & 1) << i; \
        } \
        if (ins->imm[1]) \
            *cc = (*cc & ~m) | (carry & m); \
        FINISH; \
    }
MAD_CARRY(mad_carry32, u32, int32_t, uint64_t, int64_t, 32)
MAD_CARRY(mad_carry64, u64, int64_t, unsigned __int128, __int128, 64)

/* ---- comparison ------------------------------------------------------------------------------------------------------------ */
/* p, a, b [, q, c]: p = BoolOp(t, c), q = BoolOp(!t, c). imm[0]: all ones to invert t; imm[1]: operator (`combine`); imm[2]: all ones to
 * invert c. */
static inline int compared(Warp *w, const Ins *ins, uint32_t m, uint32_t t)
{
    t ^= (uint32_t)ins->imm[0];
    if (ins->n == 3) {
        put_predicate(w, ins->arg[0], m, t);
        return NEXT;
    }
    uint32_t c = ins->imm[1] ? *(u32 *)operand(w, ins->arg[4]) ^ (uint32_t)ins->imm[2] : 0;
    put_predicate(w, ins->arg[0], m, combine(ins->imm[1], t, c));
    put_predicate(w, ins->arg[3], m, combine(ins->imm[1], ~t, c));
    return NEXT;
}

/* R: an accumulator as wide as the elements keeps the loop in one vector width. */
#define COMPARE(ID, NAME, T, R, ...) \
    HEAD(ID) \
    { \
        SOURCE(T, pa, 1); \
        SOURCE(T, pb, 2); \
        R bits = 0; \
        for (int i = 0; i < LANES; i++) { const T a = pa[i], b = pb[i]; bits |= (R)(__VA_ARGS__) << i; } \
        return compared(w, ins, m, (uint32_t)bits); \
    }

#define F16_NAN(x) (((x) & 0x7fff) > 0x7c00)
#define BF16_NAN(x) (((x) & 0x7fff) > 0x7f80)
static inline float widen_f16(uint16_t h) { return f16_to_f32(h); }
static inline float widen_f16_ftz(uint16_t h) { return f16_to_f32(flush_f16(h)); }
static inline float widen_bf16(uint16_t h) { return bf16_to_f32(h); }
static inline float widen_f32(float x) { return x; }
static inline double widen_f64(double x) { return x; }

#define ORDERED_INT(F, T, R) \
    F(eq_##T, "setp.eq." #T, T, R, a == b) \
    F(lt_##T, "setp.lt." #T, T, R, a < b)
#define ORDERED_FLOAT(F, S, T, R, V) \
    F(eq_##S, "setp.eq." #S, T, R, V(a) == V(b)) \
    F(lt_##S, "setp.lt." #S, T, R, V(a) < V(b)) \
    F(le_##S, "setp.le." #S, T, R, V(a) <= V(b)) \
    F(ne_##S, "setp.ne." #S, T, R, (V(a) < V(b)) | (V(a) > V(b))) \
    F(num_##S, "setp.num." #S, T, R, (V(a) == V(a)) & (V(b) == V(b)))
#define COMPARISONS(F) \
    ORDERED_INT(F, u16, u32) ORDERED_INT(F, s16, u32) ORDERED_INT(F, u32, u32) ORDERED_INT(F, s32, u32) \
    ORDERED_INT(F, u64, u64) ORDERED_INT(F, s64, u64) \
    ORDERED_FLOAT(F, f32, f32, u32, widen_f32) ORDERED_FLOAT(F, f32_ftz, f32, u32, flush) ORDERED_FLOAT(F, f64, f64, u64, widen_f64) \
    ORDERED_FLOAT(F, f16, u16, u32, widen_f16) ORDERED_FLOAT(F, f16_ftz, u16, u32, widen_f16_ftz) ORDERED_FLOAT(F, bf16, u16, u32, widen_bf16)
COMPARISONS(COMPARE)

/* The halves of packed operands become registers of 16 bits: d, a. imm[0]: 0 low, 16 high. */
HEAD(half_of)
{
    SOURCE(u32, pa, 1);
    RESULT(u16, LANES);
    EACH(LANES) out[i] = (u16)(pa[i] >> ins->imm[0]);
    FINISH;
}

/* testp p, a. imm[0]: bits of the classes zero 1, subnormal 2, normal 4, infinite 8, NaN 16. */
#define CLASSES(ID, T, EXP, TOP) \
    HEAD(ID) \
    { \
        SOURCE(T, pa, 1); \
        uint32_t bits = 0; \
        for (int i = 0; i < LANES; i++) { \
            T x = pa[i] & (TOP - 1), e = x & (EXP); \
            int kind = x == 0 ? 0 : e == 0 ? 1 : e != (EXP) ? 2 : x == (EXP) ? 3 : 4; \
            bits |= (uint32_t)(ins->imm[0] >> kind & 1) << i; \
        } \
        put_predicate(w, ins->arg[0], m, bits); \
        return NEXT; \
    }
CLASSES(testp32, u32, 0x7f800000u, 0x80000000u)
CLASSES(testp64, u64, 0x7ff0000000000000u, 0x8000000000000000u)

/* ---- selection and predicates ---------------------------------------------------------------------------------------------- */
#define SELECT(ID, T) \
    HEAD(ID) \
    { \
        SOURCE(T, pa, 1); \
        SOURCE(T, pb, 2); \
        const uint32_t c = *(u32 *)operand(w, ins->arg[3]); \
        RESULT(T, LANES); \
        EACH(LANES) { const T a = pa[i], b = pb[i]; out[i] = c >> i & 1 ? a : b; } \
        FINISH; \
    }
SELECT(selp16, u16)
SELECT(selp32, u32)
SELECT(selp64, u64)

/* d, a, b: predicates. imm[0]: operator (`combine`); imm[1], imm[2]: all ones to invert a, b; imm[3]: all ones to invert the result. */
HEAD(pred_logic)
{
    uint32_t a = *(u32 *)operand(w, ins->arg[1]) ^ (uint32_t)ins->imm[1], b = *(u32 *)operand(w, ins->arg[2]) ^ (uint32_t)ins->imm[2];
    put_predicate(w, ins->arg[0], m, combine(ins->imm[0], a, b) ^ (uint32_t)ins->imm[3]);
    return NEXT;
}

/* lop3.BoolOp's predicate: p, d, q: (d != 0) BoolOp q. imm[0]: operator; imm[1]: all ones to invert q. */
HEAD(lop3_pred)
{
    SOURCE(u32, pa, 1);
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++)
        bits |= (uint32_t)(pa[i] != 0) << i;
    put_predicate(w, ins->arg[0], m, combine(ins->imm[0], bits, *(u32 *)operand(w, ins->arg[2]) ^ (uint32_t)ins->imm[1]));
    return NEXT;
}

/* isspacep p, a. imm[0]: window's number (0 global, 1 shared, 2 param, 3 local); imm[1]: 1 only the own CTA's shared memory. */
HEAD(in_space)
{
    SOURCE(u64, pa, 1);
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) {
        uint32_t window = pa[i] >> 56;
        int in = window == ins->imm[0];
        if (ins->imm[0] == 0)
            in = window == 0 || window == 2; /* kernel parameters lie within global memory's window */
        if (ins->imm[1])
            in = in && ((uint32_t)pa[i] >> CTA_SHIFT) == (uint32_t)w->cta->rank;
        bits |= (uint32_t)in << i;
    }
    put_predicate(w, ins->arg[0], m, bits);
    return NEXT;
}

/* ---- packing --------------------------------------------------------------------------------------------------------------- */
#define PACK2(ID, T, S, W, PART) \
    HEAD(ID) \
    { \
        SOURCE(S, pa, 1); \
        SOURCE(S, pb, 2); \
        RESULT(T, LANES); \
        EACH(LANES) out[i] = (T)((T)(PART)pa[i] | (T)(PART)pb[i] << W); \
        FINISH; \
    }
#define PACK4(ID, T, S, W, PART) \
    HEAD(ID) \
    { \
        SOURCE(S, pa, 1); \
        SOURCE(S, pb, 2); \
        SOURCE(S, pc, 3); \
        SOURCE(S, pd, 4); \
        RESULT(T, LANES); \
        EACH(LANES) out[i] = (T)(PART)pa[i] | (T)(PART)pb[i] << W | (T)(PART)pc[i] << 2 * W | (T)(PART)pd[i] << 3 * W; \
        FINISH; \
    }
PACK2(pack_16_8, u16, u16, 8, u8)
PACK4(pack_32_8, u32, u16, 8, u8)
PACK2(pack_32_16, u32, u16, 16, u16)
PACK4(pack_64_16, u64, u16, 16, u16)
PACK2(pack_64_32, u64, u32, 32, u32)

/* d, a: the part of a from bit imm[0] on. */
#define PART(ID, D, T, KEEP) DEFINE1(ID, "", LANES, D, T, (KEEP)(a >> ins->imm[0]))
PART(part_16_8, u16, u16, u8)
PART(part_32_8, u16, u32, u8)
PART(part_32_16, u16, u32, u16)
PART(part_64_16, u16, u64, u16)
PART(part_64_32, u32, u64, u32)

/* Values of 128 bits lie whole, lane after lane. d, parts... */
HEAD(pack_128)
{
    const unsigned parts = ins->n - 1, bytes = 16 / parts;
    char *d = operand(w, ins->arg[0]);
    for (unsigned k = 0; k < parts; k++) {
        const char *p = operand(w, ins->arg[1 + k]);
        for (int i = 0; i < LANES; i++)
            if (m >> i & 1)
                memcpy(d + 16 * i + bytes * k, p + bytes * i, bytes);
    }
    return NEXT;
}

/* d, a. imm[0]: first byte of the part; imm[1]: its bytes. */
HEAD(part_128)
{
    char *d = operand(w, ins->arg[0]);
    const char *a = operand(w, ins->arg[1]);
    for (int i = 0; i < LANES; i++)
        if (m >> i & 1)
            memcpy(d + ins->imm[1] * i, a + 16 * i + ins->imm[0], ins->imm[1]);
    return NEXT;
}

/* ---- clocks ---------------------------------------------------------------------------------------------------------------- */
/* Fills the clock registers: what the warps of the cluster have executed, so that it grows for all and is the same in every run. */
HEAD(read_clock)
{
    (void)ins;
    (void)m;
    uint64_t now = 0;
    const Cluster *c = w->cta->cluster;
    for (int r = 0; r < c->n_ctas; r++)
        for (int i = 0; i < c->cta[r].n_warps; i++)
            now += c->cta[r].warp[i].retired;
    for (int i = 0; i < LANES; i++) {
        ((u32 *)(w->reg + SR_CLOCK))[i] = (u32)now;
        ((u32 *)(w->reg + SR_CLOCK_HI))[i] = (u32)(now >> 32);
        ((u64 *)(w->reg + SR_CLOCK64))[i] = now;
        ((u64 *)(w->reg + SR_GLOBALTIMER))[i] = now;
    }
    return NEXT;
}

static const Entry alu[] = {
    FORMS(ENTRY, ENTRY, ENTRY) COMPARISONS(ENTRY)
    {"bfi.32", bfi32}, {"bfi.64", bfi64}, {"carry.32", carry32}, {"carry.64", carry64}, {"mad.carry.32", mad_carry32},
    {"mad.carry.64", mad_carry64}, {"half", half_of}, {"testp.f32", testp32}, {"testp.f64", testp64}, {"selp.16", selp16},
    {"selp.32", selp32}, {"selp.64", selp64}, {"pred", pred_logic}, {"lop3.pred", lop3_pred}, {"in.space", in_space},
    {"pack.16.8", pack_16_8}, {"pack.32.8", pack_32_8}, {"pack.32.16", pack_32_16}, {"pack.64.16", pack_64_16}, {"pack.64.32", pack_64_32},
    {"part.16.8", part_16_8}, {"part.32.8", part_32_8}, {"part.32.16", part_32_16}, {"part.64.16", part_64_16}, {"part.64.32", part_64_32},
    {"pack.128", pack_128}, {"part.128", part_128}, {"clock", read_clock},
};
REGISTER(alu)
