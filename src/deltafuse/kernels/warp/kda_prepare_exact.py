"""`kda_prepare`, rows that do not fit: a block's scores with factors of at most 1 at any gate that does not grow."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...tile.ptx import exp2, fmax, fmin, load_global, load_shared, select, store_global

SHIFT = 60
LOWEST, HIGHEST = -120.0, 30.0
"""Of H, for rows that fit."""


class ExactRows:
    """What `KdaPrepare` does where a row of a block lies too far from the block's start."""

    @cute.jit
    def exact_block(self, scratch, from_q, from_k, factor_q, factor_k, sH, lane):
        """Own block's scores of the warp's columns, for rows that do not fit, with factors of at most 1 (for gates that do not grow).

        Rows i and j of which l = 8, 4, 2 or 1 is the highest different bit of the number meet at the last row before i's half,
        ref = (i and not (2l - 1)) + l - 1: x_i 2^(H_i - H_ref) with k_j 2^(H_ref - H_j). i = j: no factor.
        Sums of q, then of k, to 1,024 bytes each at `scratch`, two vectors a lane.
        """
        r, t = lane // 4, lane % 4
        for which in cutlass.range(2, unroll=1):
            taken = cute.make_rmem_tensor((4, 2), Float32)
            taken.fill(0.0)
            address = cute.make_rmem_tensor((2,), Int64)
            factor = cute.make_rmem_tensor((2,), Float32)
            for h in cutlass.range_constexpr(2):
                address[h] = from_q[h]
                factor[h] = factor_q[h]
                if which == 1:
                    address[h] = from_k[h]
                    factor[h] = factor_k[h]
            for step in cutlass.range(5, unroll=1):
                bit = Int32(8) >> step
                sums = cute.make_rmem_tensor((4, 2), Float32)
                sums.fill(0.0)
                for m in cutlass.range(self.steps, unroll=1):
                    upper, lower = [], []
                    for h in cutlass.range_constexpr(2):
                        x, y = (load_global(a + Int64(m) * 64, 0, 4) for a in (address[h], from_k[h]))
                        a, b = self.exact_words(x, y, factor[h], factor_k[h], sH + (32 * m + 8 * t) * 4, r + 8 * h, bit)
                        upper.append(a)
                        lower.append(b)
                    for n in cutlass.range_constexpr(2):
                        x = self.product(upper, lower[n], [sums[i, n] for i in range(4)])
                        for i in cutlass.range_constexpr(4):
                            sums[i, n] = x[i]
                for n in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(4):
                        i, j = r + 8 * (e // 2), 8 * n + 2 * t + e % 2
                        # The highest different bit is `bit`; in the last pass there is none.
                        meet = (i ^ j) // cutlass.max(bit, 1) == cutlass.min(bit, 1)
                        taken[e, n] = select(Int32(meet & (i >= j)), sums[e, n], taken[e, n])
            for n in cutlass.range_constexpr(2):
                store_global(scratch + Int64(which) * 1024, 512 * n, [taken[i, n] for i in range(4)])

    def take_exact(self, sums, scratch, first_bad, lane):
        """These sums in the rows that do not fit."""
        for n in range(2):
            exact = load_global(scratch, 512 * n, 4, Float32)
            for e in range(4):
                sums[e, n] = select(Int32(lane // 4 + 8 * (e // 2) >= first_bad), exact[e], sums[e, n])

    def exact_words(self, words_x, words_k, factor_x, factor_k, sColumn, row, bit):
        """Words of x as a row of the upper half, of k as a column of the lower half; zeros where the row is in the other half."""
        upper = Int32((row & bit) != 0) | Int32(bit == 0)
        lower = Int32((row & bit) == 0)
        # Without a bit 2l - 1 is -1: ref would be row -1, and is the row itself.
        ref = cutlass.max((row & ~(2 * bit - 1)) + bit - 1, row * Int32(bit == 0))
        H, at_ref = self.vector(sColumn + row * self.h_row), self.vector(sColumn + ref * self.h_row)
        f = [exp2(select(upper, a - b, b - a)) for a, b in zip(H, at_ref, strict=True)]
        x = [select(upper, a * factor_x * b, 0.0) for a, b in zip(self.numbers(words_x), f, strict=True)]
        k = [select(lower, a * factor_k * b, 0.0) for a, b in zip(self.numbers(words_k), f, strict=True)]
        return self.packed(x), self.packed(k)

    def first_bad_row(self, sH, lane):
        """The first row of the block that does not fit, 16 if all do."""
        n = self.gate_columns
        fitting = Int32(0)
        low = high = Float32(SHIFT)
        for i in range(16):
            for x in load_shared(sH + lane * (4 * n), i * self.h_row, n):
                low, high = fmin(low, x), fmax(high, x)
            fits = (low >= Float32(LOWEST + SHIFT)) & (high <= Float32(HIGHEST + SHIFT))
            fitting = fitting + Int32(cute.arch.vote_all_sync(fits))
        return fitting
