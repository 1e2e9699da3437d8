/* What the arithmetic families share: lane types, the shape of a lanewise instruction, number formats.
 *
 * A lanewise instruction computes all lanes, into its destination or, where some lanes must keep their value, into a temporary whose
 * active lanes are then copied. The loops have no dependencies between lanes: a source is the destination itself or apart from it.
 */
#pragma once
#pragma GCC optimize("no-trapping-math") /* both sides of a selection may be computed: without it such loops are not vectorised */
#include "core.h"

#include <math.h>
#include <string.h>

/* Registers are untyped memory: the types that read them may alias. */
#define ALIASES __attribute__((may_alias))
typedef uint8_t u8;
typedef int8_t s8;
typedef uint16_t u16 ALIASES;
typedef int16_t s16 ALIASES;
typedef uint32_t u32 ALIASES;
typedef int32_t s32 ALIASES;
typedef uint64_t u64 ALIASES;
typedef int64_t s64 ALIASES;
typedef float f32 ALIASES;
typedef double f64 ALIASES;

/* Copy the lanes of m, of so many bytes each. */
void merge_lanes(void *d, const void *from, uint32_t m, unsigned bytes);

#define EACH(N) _Pragma("GCC ivdep") for (int i = 0; i < (N); i++)
#define HEAD(ID) static int ID(Warp *w, const Ins *ins, uint32_t m)
#define SOURCE(T, p, k) const T *const p = operand(w, ins->arg[k])
#define RESULT(T, N) \
    T temp[N]; \
    T *const dest = operand(w, ins->arg[0]), *const out = m == FULL ? dest : temp
#define FINISH \
    if (m != FULL) \
        merge_lanes(dest, temp, m, sizeof temp / LANES); \
    return NEXT

/* Definitions from lists of F1(id, "name", elements, result, source..., expression of a, b, c), one to three sources; `imm` is ins->imm. */
#define DEFINE1(ID, NAME, N, D, A, ...) \
    HEAD(ID) \
    { \
        SOURCE(A, pa, 1); \
        RESULT(D, N); \
        EACH(N) { const A a = pa[i]; out[i] = (D)(__VA_ARGS__); } \
        FINISH; \
    }
#define DEFINE2(ID, NAME, N, D, A, B, ...) \
    HEAD(ID) \
    { \
        SOURCE(A, pa, 1); \
        SOURCE(B, pb, 2); \
        RESULT(D, N); \
        EACH(N) { const A a = pa[i]; const B b = pb[i]; out[i] = (D)(__VA_ARGS__); } \
        FINISH; \
    }
#define DEFINE3(ID, NAME, N, D, A, B, C, ...) \
    HEAD(ID) \
    { \
        SOURCE(A, pa, 1); \
        SOURCE(B, pb, 2); \
        SOURCE(C, pc, 3); \
        RESULT(D, N); \
        EACH(N) { const A a = pa[i]; const B b = pb[i]; const C c = pc[i]; out[i] = (D)(__VA_ARGS__); } \
        FINISH; \
    }
#define ENTRY(ID, NAME, ...) {NAME, ID},

/* ---- predicates ------------------------------------------------------------------------------------------------------------ */
static inline void put_predicate(Warp *w, int32_t at, uint32_t m, uint32_t value)
{
    if (at == SINK)
        return;
    u32 *p = operand(w, at);
    *p = (*p & ~m) | (value & m);
}

/* Boolean operators of setp, set, lop3 by number: none, and, or, xor. */
static inline uint32_t combine(int64_t op, uint32_t t, uint32_t c) { return op == 1 ? t & c : op == 2 ? t | c : op == 3 ? t ^ c : t; }

/* ---- number formats -------------------------------------------------------------------------------------------------------- */
static inline uint32_t f32_bits(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float f32_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
static inline uint64_t f64_bits(double x) { uint64_t b; memcpy(&b, &x, 8); return b; }
static inline double f64_of(uint64_t b) { double x; memcpy(&x, &b, 8); return x; }

#define NAN_F32 0x7fffffffu /* what single and half precision instructions return for NaN */
#define NAN_F16 0x7fffu
#define NAN_BF16 0x7fffu

static inline float canonical(float x) { return x != x ? f32_of(NAN_F32) : x; }
static inline float flush(float x) { return (f32_bits(x) & 0x7f800000u) == 0 ? f32_of(f32_bits(x) & 0x80000000u) : x; }
static inline float saturate(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; } /* NaN: 0 */
static inline uint16_t flush_f16(uint16_t x) { return x & 0x7c00 ? x : x & 0x8000; }
static inline uint16_t flush_bf16(uint16_t x) { return x & 0x7f80 ? x : x & 0x8000; }

static inline float f16_to_f32(uint16_t h)
{
    uint32_t magnitude = h & 0x7fff, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t normal = (magnitude << 13) + 0x38000000u, small = f32_bits((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t r = magnitude < 0x400 ? small : normal;
    r = magnitude >= 0x7c00 ? magnitude << 13 | 0x7f800000u : r;
    return f32_of(r | sign);
}

/* Round to nearest even. */
static inline uint16_t f32_to_f16(float x)
{
    uint32_t b = f32_bits(x), a = b & 0x7fffffffu, sign = b >> 16 & 0x8000u;
    uint32_t normal = (a - 0x38000000u + 0xfffu + (a >> 13 & 1)) >> 13;
    uint32_t small = f32_bits(f32_of(a) + 0.5f) - 0x3f000000u; /* the sum's last place is a subnormal's */
    uint32_t r = a < 0x38800000u ? small : normal;
    r = a >= 0x47800000u ? 0x7c00u : r;
    return a > 0x7f800000u ? NAN_F16 : r | sign;
}

static inline float bf16_to_f32(uint16_t h) { return f32_of((uint32_t)h << 16); }

static inline uint16_t f32_to_bf16(float x)
{
    uint32_t b = f32_bits(x), r = (b + 0x7fffu + (b >> 16 & 1)) >> 16;
    return (b & 0x7fffffffu) > 0x7f800000u ? NAN_BF16 : r;
}

/* To f32, rounding to odd: a later rounding to a format of at most 22 bits then is that of the exact value. An inexact result with an
 * even last place is moved by one towards the exact value. */
static inline float round_odd(double x)
{
    float f = (float)x;
    double back = f, size = fabs(x), size_back = fabs(back);
    uint64_t step = (size_back < size ? (uint64_t)1 : 0) - (size_back > size ? (uint64_t)1 : 0); /* as wide as what is compared */
    uint32_t b = f32_bits(f);
    return f32_of(b + (~b & 1) * (uint32_t)step);
}
