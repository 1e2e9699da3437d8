"""Pairs of rows i > j of a block of 16, sorted by where their decays can be split without growth.

Rows of which l = 2^level (8, 4, 2 or 1) is the highest different bit of the number meet at the last row before i's half of 2l rows,

    ref = (i and not (2l - 1)) + l - 1        2^(H_i - H_j) = 2^(H_i - H_ref) 2^(H_ref - H_j)

with both factors at most 1 where H falls. A product of 16x16 blocks for each level has all pairs.
"""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import Int32, Uint32

from .ptx import exp2, load_shared, select


def meeting_factors(at, row, level):
    """2^(H - H_ref) of a row in the upper half of its rows, 2^(H_ref - H) in the lower, of 4 columns.

    `at` gives the address in shared memory of these columns' fp32 H in a row.
    """
    bit = Int32(1) << level
    upper = (row & bit) != 0
    ref = (row & ~(2 * bit - 1)) + bit - 1
    pairs = zip(*(load_shared(at(x), 0, 4) for x in (row, ref)), strict=True)
    return [exp2(select(upper, a - b, b - a)) for a, b in pairs]


def only_level(words, level, transposed, lane):
    """Of an A operand, element (i, j) or transposed (j, i): the pairs of one level, zeros for the others."""
    r, t = lane // 4, lane % 4
    out = []
    for n, word in enumerate(words):
        mask = Uint32(0)
        for e in range(2):
            a, b = r + 8 * (n % 2), 2 * t + e + 8 * (n // 2)
            i = b if transposed else a
            meet = (((a ^ b) >> level) == 1) & (((i >> level) & 1) == 1)
            mask = mask | Uint32(Int32(meet)) * Uint32(0xFFFF << (16 * e))
        out.append(word & mask)
    return out
