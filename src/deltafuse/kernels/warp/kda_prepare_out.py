"""`kda_prepare`, what leaves: M', Aqk and M to global memory, as panels or as strips of them, and how many rows of kd and qg
(see `tile.panel`)."""

# mypy: ignore-errors
# A nested `if` is one of compile time and one of run time, which `and` would make one of run time.

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...tile import inverse, panel
from ...tile.ptx import load_shared, load_shared_if, select, store_global, store_global_if
from .kda_prepare_exact import SHIFT

AQK_ROW = 144
"""Bytes of a row of Aqk in shared memory."""


class ScoresOut:
    """Part of `KdaPrepare`."""

    @cute.jit
    def live_blocks(self, sT, lane):
        """How many blocks' rows of kd and qg are written: from the next one on 2^(t before b - 60), which is in all of them, is 0."""
        live = None
        if const_expr(self.config.strips):
            n = const_expr(self.K // 32)
            t = [load_shared(sT + lane * (4 * n), b * self.K * 4, n) for b in range(3)]
            sums = [[x - float(SHIFT) for x in t[0]]]
            for b in cutlass.range_constexpr(1, 3):
                sums.append([x + y for x, y in zip(sums[b - 1], t[b], strict=True)])
            live = Int32(4)
            if self.vanishes(sums[2]):
                live = Int32(3)
                if self.vanishes(sums[1]):
                    live = Int32(2)
                    if self.vanishes(sums[0]):
                        live = Int32(1)
        return live

    def vanishes(self, exponents):
        """Whether 2^x is 0 for all of the warp's: `exp2` has nothing below 2^-126. What is no number does not vanish."""
        low = exponents[0] <= -127.0
        for x in exponents[1:]:
            low = low & (x <= -127.0)
        return cute.arch.vote_all_sync(low)

    def write_live(self, image, live, block, lane):
        """The number of live blocks, where there is one; before, there was scratch in its place."""
        if live is not None:
            store_global_if(image, panel.LIVE, [live], Int32((block == 0) & (lane == 0)))

    @cute.jit
    def write_aqk(self, image, sAll, block, lane):
        """The block's 16 rows; zeros to the right of its own columns, of strips those up to these columns."""
        if const_expr(self.config.strips):
            # Eight lanes read rows two apart: all banks.
            row, vector = lane // 16 * 8 + lane % 8 // 2 * 2 + lane // 8 % 2, lane % 2
            at = self.aqk_row(sAll, block, row) + vector * 16
            to = image + Int64(panel.strip_vector_offset(16 * block + row, vector))
            # All loads before the branches, which they would not pass; what lies right of the block is read and not used.
            words = [load_shared(at, 32 * s, 4, Uint32) for s in range(4)]
            for s in cutlass.range_constexpr(4):
                if s <= block:
                    store_global(to, panel.packed_strip(s), words[s])
        else:
            vector = lane % 8
            for i in cutlass.range_constexpr(0, 16, 4):
                row = i + lane // 8
                at = self.aqk_row(sAll, block, row) + vector * 16
                words = load_shared_if(at, 0, 4, Int32(vector // 2 <= block), Uint32)
                store_global(image + Int64(panel.vector_offset(16 * block + row, vector)), 0, words)

    @cute.jit
    def write_inverse(self, image, sAll, rows, warp, lane):
        """M' = M diag(beta) and, where wanted, M, 8 rows a warp; zeros to the right of their block and behind the end.

        Of strips, which come without M, the rows' columns up to their block.
        """
        # Rows 0 to 15 and 32 to 47 are complete for warps 0 to 3, the others for 4 to 7.
        eight = warp // 4 * 2 + warp % 4 // 2 * 4 + warp % 2
        if const_expr(self.config.strips):
            # Eight lanes read two rows two apart: all banks.
            row = 8 * eight + lane // 16 * 4 + lane // 4 % 2 * 2 + lane // 8 % 2
            at = sAll + self.at_m + inverse.at(row, lane % 4 * 4)
            to = image + Int64(panel.strip_vector_offset(row, lane % 4 // 2) + lane % 2 * 8)
            beta = [load_shared(sAll + self.at_beta + lane % 4 * 16, 64 * s, 4) for s in range(4)]
            m = [load_shared(at, 64 * s, 4) for s in range(4)]
            for s in cutlass.range_constexpr(4):
                if s <= eight // 2:
                    words = self.packed([a * b for a, b in zip(m[s], beta[s], strict=True)])
                    store_global(to, panel.packed_strip(s), words)
        else:
            column = lane % 16 * 4
            valid = Int32(column // 16 <= eight // 2)
            beta = load_shared(sAll + self.at_beta + column * 4, 0, 4)
            for i in cutlass.range_constexpr(0, 8, 2):
                row = 8 * eight + i + lane // 16
                m = load_shared_if(sAll + self.at_m + inverse.at(row, column), 0, 4, valid, Float32)
                to = image + Int64(panel.vector_offset(row, column // 8) + lane % 2 * 8)
                store_global(to, 0, self.packed([a * b for a, b in zip(m, beta, strict=True)]))
                if const_expr(self.config.inverse):
                    # Behind the end L is 0 and beta too, but the inverse has ones on its diagonal.
                    store_global(to, 2 * panel.BYTES, self.packed([select(row < rows, x, 0.0) for x in m]))
