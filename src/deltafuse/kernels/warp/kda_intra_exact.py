"""`kda_intra`, own blocks: a block's pairs among themselves where its operands of 16 bits are not made to meet.

Blocks that do not fit go level by level (`tile.levels`), with factors of at most 1 at any gate that does not grow; sums wait in local
memory. fp16 has no exponents for blocks that fit. Its own blocks take operands in tf32, which has the significant bits of fp16 and the
exponents of bf16, made from q and k group by group: once through local memory would cost more than the products.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ...tile import blocks, panel
from ...tile.levels import meeting_factors, only_level
from ...tile.matrices import load_transposed
from ...tile.mma import mma_16bit, mma_tf32
from ...tile.ptx import as_float, as_word, asm, exp2, fma, load_global, to_tf32, unpack
from .kda_intra_gate import BETA, NORM_K, OF_Q, SCALE_Q, SHIFT

EXACT_Y, EXACT_X, EXACT_Z, EXACT_G, EXACT_K = range(5)
"""What the exact way gives; the last is k itself."""


class OwnBlocks:
    """What `KdaIntra` does where a block's rows and columns do not meet directly."""

    def exact_sums(self):
        """What blocks that do not fit give, [kind][row][column]: in local memory, since a variable indexes it. Others leave it alone."""
        return cute.make_rmem_tensor((5, 2, 16), Float32)

    @cute.jit
    def own_block_exactly(self, x, mQ, mK):
        """The own block's part of Y, X, Z, dG and the sum q . Y, group by group and level by level."""
        x = self.afresh(x)
        addresses = [self.row_addresses(m, x, x.key_head, 2) for m in (mQ, mK)]
        for c in cutlass.range(4, unroll=1):
            sums = [cute.make_rmem_tensor((2, 4), Float32) for _ in range(5)]
            rY, rX, rZ, rG, rK = sums
            rQ = cute.make_rmem_tensor((2, 4), Float32)
            for r, at, which in ((rQ, addresses[0], SCALE_Q), (rK, addresses[1], NORM_K)):
                self.load_group(x, r, at, which, c)
            rX.fill(0.0)
            rG.fill(0.0)
            # The pairs i = j cancel in dG.
            for h in cutlass.range_constexpr(2):
                own = self.diagonal(x, h)
                for e in cutlass.range_constexpr(4):
                    rY[h, e] = own * rK[h, e]
                    rZ[h, e] = own * rQ[h, e]
            for n in cutlass.range(4, unroll=1):
                self.level(x, rQ, sums, 3 - n, c)
            for h in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(4):
                    if const_expr(self.config.l2norm):
                        x.rSums[OF_Q, h] = fma(rQ[h, e], rY[h, e], x.rSums[OF_Q, h])
                    for kind, r in enumerate(sums):
                        x.rExact[kind, h, 4 * c + e] = r[h, e]

    def load_group(self, x, r, addresses, which, c):
        """This lane's normed q or k of a group."""
        factors = self.scalars_of(x, which)
        for h in range(2):
            words = load_global(addresses[h] + Int64(self.at_group(c, 2)), 0, 2)
            for e, f in enumerate(self.numbers(words)):
                r[h, e] = f * factors[h]

    def level(self, x, rQ, sums, level, c):
        """One level's pairs."""
        rY, rX, rZ, rG, rK = sums
        f, q, k, beta_k = self.level_operands(x, rQ, rK, level, c)
        rows = [blocks.load_block((x.sBlocks ^ (32 * x.block)) + i * panel.BYTES) for i in range(2)]
        columns = [load_transposed(x.sTransposed + x.block * blocks.ROWS + i * panel.BYTES) for i in range(2)]
        rows = [only_level(a, level, False, x.lane) for a in rows]
        columns = [only_level(a, level, True, x.lane) for a in columns]
        zero = [Float32(0.0)] * 4
        for u in range(2):
            of_q, of_k, of_beta = ([blocks.transpose(w[h][u]) for h in range(2)] for w in (q, k, beta_k))
            y, z = mma_16bit(self.dtype, rows[0], of_k, zero), mma_16bit(self.dtype, rows[1], of_k, zero)
            self.add_scaled(rY, y, f, u)
            self.add_scaled(rX, z, f, u)
            self.add_scaled(rG, y, [self.numbers(w) for w in q], u)
            self.add_scaled(rG, z, [self.numbers(w) for w in beta_k], u)
            z = mma_16bit(self.dtype, columns[1], of_beta, mma_16bit(self.dtype, columns[0], of_q, zero))
            self.add_scaled(rZ, z, f, u)
            self.add_scaled(rG, z, [[-a for a in self.numbers(w)] for w in k], u)

    def level_operands(self, x, rQ, rK, level, c):
        """2^|H - H_ref|; with it, words of s q, k and beta k of rows r, r + 8."""
        f = [
            meeting_factors(lambda row: self.row_of_gate(x, row) ^ self.at_group(c, 4), x.r + 8 * h, level)
            for h in range(2)
        ]
        words = []
        for r, s in ((rQ, [1.0, 1.0]), (rK, [1.0, 1.0]), (rK, self.scalars_of(x, BETA))):
            words.append([self.packed([r[h, e] * s[h] * f[h][e] for e in range(4)]) for h in range(2)])
        return f, *words

    def add_scaled(self, sums, z, f, u):
        for i in range(4):
            h, e = i // 2, 2 * u + i % 2
            sums[h, e] = fma(z[i], f[h][e], sums[h, e])

    def diagonal(self, x, h):
        """dA_ii of row r + 8 h of the block."""
        row, column = x.mine + 8 * h, x.r
        at = x.sAll + panel.vector_offset(row, 2 * x.block + h) + column * 2
        word = asm("{\n.reg .b16 h;\nld.shared.b16 h, [$1];\ncvt.u32.u16 $0, h;\n}", [Uint32], [Int32(at)])
        return unpack(self.dtype, word)[0]

    @cute.jit
    def add_own(self, x, sums, c: cutlass.Constexpr, mQ, mK):
        """The own block's part where the products with blocks have left it out."""
        if const_expr(self.bf16):
            if not x.fits:
                self.add_exact(x, sums, c)
        elif x.fits:
            self.add_wide(x, sums, c, mQ, mK)
        else:
            self.add_exact(x, sums, c)

    def add_exact(self, x, sums, c):
        """What the exact way gave, and k, which the operand may have lost."""
        for h in range(2):
            for e in range(4):
                for kind, r in enumerate(sums):
                    given = x.rExact[kind, h, 4 * c + e]
                    r[h, e] = given if kind == EXACT_K else r[h, e] + given

    # ---- tf32: the significant bits of fp16, the exponents of bf16 -----------------------------------------------------------------
    def add_wide(self, x, sums, c, mQ, mK):
        """The own block by q 2^(H + S), beta k 2^(H + S) and k 2^(-H - S) in tf32, a tile of 8 columns at a time; k itself."""
        rQ = cute.make_rmem_tensor((2, 4), Float32)
        for r, m, which in ((rQ, mQ, SCALE_Q), (sums[EXACT_K], mK, NORM_K)):
            self.load_group(x, r, self.row_addresses(m, x, x.key_head, 2), which, c)
        H = [self.sums_of_gate(x, h, c) for h in range(2)]
        for u in range(2):
            self.add_wide_tile(x, sums, rQ, [f[2 * u : 2 * u + 2] for f in H], u)

    def add_wide_tile(self, x, sums, rQ, H, u):
        rY, rX, rZ, rG, rK = sums
        beta = self.scalars_of(x, BETA)
        places = [(h, 2 * u + e) for h in range(2) for e in range(2)]
        up = [exp2(f + SHIFT) for row in H for f in row]
        down = [exp2(-SHIFT - f) for row in H for f in row]
        q = [to_tf32(rQ[at] * f) for at, f in zip(places, up, strict=True)]
        k = [to_tf32(rK[at] * f) for at, f in zip(places, down, strict=True)]
        beta_k = [to_tf32(rK[at] * beta[at[0]] * f) for at, f in zip(places, up, strict=True)]
        y, z, x_sums = ([Float32(0.0)] * 4 for _ in range(3))
        for h in range(2):
            of_q, of_k, of_beta = (blocks.transpose_words(w[2 * h : 2 * h + 2]) for w in (q, k, beta_k))
            da, dl = (
                self.wide_block(blocks.load_block((x.sBlocks ^ (32 * x.block)) + i * panel.BYTES), h) for i in range(2)
            )
            y, x_sums = mma_tf32(da, of_k, y), mma_tf32(dl, of_k, x_sums)
            da, dl = (
                self.wide_block(load_transposed(x.sTransposed + x.block * blocks.ROWS + i * panel.BYTES), h)
                for i in range(2)
            )
            z = mma_tf32(dl, of_beta, mma_tf32(da, of_q, z))
        for i, at in enumerate(places):
            of_q, of_k, of_beta = (as_float(w[i]) for w in (q, k, beta_k))
            if self.config.l2norm:
                x.rSums[OF_Q, at[0]] = fma(of_q, y[i], x.rSums[OF_Q, at[0]])
            rG[at] = rG[at] + fma(of_q, y[i], fma(of_beta, x_sums[i], -of_k * z[i]))
            rY[at] = fma(y[i], up[i], rY[at])
            rX[at] = fma(x_sums[i], up[i], rX[at])
            rZ[at] = fma(z[i], down[i], rZ[at])

    def wide_block(self, words, h):
        """Columns 8h .. + 7 of an A operand of 16 bits as one of tf32, which has columns 2t, 2t + 1 as its t, t + 4."""
        numbers = [self.numbers([w]) for w in words[2 * h : 2 * h + 2]]
        return [as_word(numbers[i][e]) for e in range(2) for i in range(2)]
