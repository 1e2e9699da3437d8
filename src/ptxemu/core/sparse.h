/* Rows of A of which half the elements are stored, and the metadata that says where they belong (PTX ISA: "Sparse matrix storage",
 * "Matrix fragments for multiply-accumulate operation with sparse matrix A"); for mma.sp, wgmma.mma_async.sp and tcgen05.mma.sp.
 *
 * Every chunk of a row has 4 bits of metadata: two indices of the elements (or pairs of them) that are stored, the first lowest.
 */
#pragma once
#include "core.h"

/* Of 2 elements 1 (tf32), of 4 elements 2, of 8 elements two pairs (4 bits); lower_mma.py has the same numbers. */
enum { SPARSE_NONE, SPARSE_1_2, SPARSE_2_4, SPARSE_4_8 };

static inline int sparse_chunk(int form) { return 1 << form; } /* elements, half of them stored */

/* Where the k / 2 stored elements of a row belong; chunk c has bits 4 c of `meta`. Returns the first chunk whose metadata means nothing, or -1. */
static inline int sparse_places(uint8_t *place, uint64_t meta, int k, int form, int ordered)
{
    const int chunk = sparse_chunk(form), each = form == SPARSE_4_8 ? 2 : 1;
    for (int c = 0; c < k / chunk; c++) {
        const int bits = meta >> 4 * c & 15, first = bits & 3, second = bits >> 2;
        if (form == SPARSE_1_2) {
            if (bits != 4 && bits != 14)
                return c;
            *place++ = c * chunk + (bits == 14);
            continue;
        }
        if (first == second || (ordered && first > second))
            return c;
        for (int i = 0; i < 2 * each; i++)
            *place++ = c * chunk + (i < each ? first : second) * each + i % each;
    }
    return -1;
}

/* Of a warp's metadata registers that of row `row` of 16. Elements of 16 and 32 bits: a thread holds four chunks of two rows, eight apart;
 * smaller ones: eight chunks of one row. `selector`: which threads of four hold it. */
static inline uint64_t sparse_of_row(const uint32_t *word, int row, int chunks, int small, int selector)
{
    const int quad = row % 8 * 4;
    uint64_t meta = 0;
    if (small)
        for (int t = 0; t < chunks / 8; t++)
            meta |= (uint64_t)word[quad + 2 * selector + row / 8 + 2 * t] << 32 * t;
    else
        for (int t = 0; t < chunks / 4; t++)
            meta |= (uint64_t)(word[quad + selector * (chunks / 4) + t] >> 16 * (row / 8) & 0xffff) << 16 * t;
    return meta;
}

/* The lanes whose registers that reads. */
static inline uint32_t sparse_lanes(int chunks, int small, int selector)
{
    const int count = chunks / 4, first = small ? 2 * selector : selector * count;
    return 0x11111111u * (((1u << count) - 1) << first);
}
