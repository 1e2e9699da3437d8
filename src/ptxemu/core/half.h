/* Half-precision numbers. */
#pragma once
#include <stdint.h>
#include <string.h>

static inline float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t bits_of(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static inline float f16_to_float(uint32_t h)
{
    float magnitude = float_of((h & 0x7fffu) << 13) * 0x1p112f;
    uint32_t bits = bits_of(magnitude) | ((h & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u);
    return float_of(bits | (h & 0x8000u) << 16);
}

/* To nearest even. NaN becomes 0x7fff. */
static inline uint32_t f16_of_float(float f)
{
    uint32_t bits = bits_of(f), sign = bits >> 16 & 0x8000u, x = bits & 0x7fffffffu;
    if (x > 0x7f800000u)
        return 0x7fff;
    if (x >= 0x477ff000u) /* 65520 and more */
        return sign | 0x7c00u;
    if (x < 0x38800000u) /* below 2^-14: the sum leaves the f16 mantissa in the low bits */
        return sign | (bits_of(float_of(x) + 0.5f) - bits_of(0.5f));
    return sign | ((x + 0xfffu + (x >> 13 & 1) - 0x38000000u) >> 13);
}
