"""The gate's side of `kda_intra`: raw gates in, their gradients out, a lane with 2 columns of its block's 16 rows.

The base of the kernel's class, with what both sides share: the layout of shared memory and addresses of rows.
"""

# mypy: ignore-errors

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from ...tile import panel
from ...tile.arguments import DTYPES
from ...tile.gate import SummedGate
from ...tile.gate_gradient import GateGradient
from ...tile.lanes import sum_lanes
from ...tile.ptx import (
    as_float,
    asm,
    fma,
    fmax,
    fmin,
    load_global,
    load_shared,
    mad_wide,
    opaque,
    pack,
    select,
    store_shared,
    unpack,
)
from ..config import CHUNK, IntraConfig

SHIFT = 60
LOWEST, HIGHEST = -120.0, 30.0
"""Of H, for blocks that fit."""
# Rows of the table of vectors, the first of each kind: see `powers`. The sums of blocks and of biases take over the places of used ones.
TOTAL, COLUMN, LAST, LINK, LATER, BEFORE, AFTER, VECTORS = 0, 4, 8, 12, 14, 16, 20, 24
BLOCK_SUM, BIAS_SUM = COLUMN, LAST
BETA, NORM_Q, NORM_K, SCALE_Q, BETA_K, ALONG = range(6)
"""Factors of rows in shared memory; the last is -k' . dk'."""
OF_Q, OF_K, OF_BETA = range(3)
"""Operands (the last is beta k), and sums over a row's columns: |q|^2, later q . dq; |k|^2; k . X."""


def store_global_if(address, words, valid):
    """Words to a global address, where `valid` holds; nobody here reads them again, and what is read has L2 for itself."""
    n = len(words)
    names = ", ".join(f"${1 + i}" for i in range(n))
    vector = f".v{n}" if n > 1 else ""
    text = f"{{\n.reg .pred p;\nsetp.ne.b32 p, ${n + 1}, 0;\n@p st.global.cs{vector}.b32 [$0], {{{names}}};\n}}"
    asm(text, [], [Int64(address), *words, Int32(valid)])


class GateSide:
    """The layout of shared memory for one `IntraConfig`, and the gate."""

    def __init__(self, config: IntraConfig) -> None:
        self.config = config
        self.K = config.key_dim
        self.halves = self.K // 64
        self.threads = 128 * self.halves
        self.dtype = DTYPES[config.dtype]
        self.gate_dtype = DTYPES[config.gate_dtype]
        self.beta_dtype = DTYPES[config.beta_dtype]
        self.bf16 = self.dtype is BFloat16
        self.shift = float(SHIFT) if self.bf16 else 0.0
        # What `columns` does at a time: Z of neighbouring groups, and of these what Y and X are made of at once. Two groups read a block
        # of scores half as often, while there are registers: later, dq and dk have them, and without the norm ptxas needs more.
        by_pairs = self.bf16 and config.l2norm
        self.plan = (((0, 1),), ((2,), (3,))) if by_pairs else tuple(((c,),) for c in range(4))
        self.h_row = self.K * 4
        self.vector = self.K * 4
        # Byte offsets in shared memory.
        self.operand_bytes = self.halves * panel.BYTES
        self.at_operands = 2 * panel.BYTES
        self.at_h = self.at_operands + 3 * self.operand_bytes
        self.at_vectors = self.at_h + CHUNK * self.h_row
        self.at_beta = self.at_vectors + VECTORS * self.vector
        self.at_sums = self.at_beta + 6 * CHUNK * 4
        self.at_warps = self.at_sums + 3 * self.halves * CHUNK * 4
        self.shared_bytes = self.at_warps + 8 * 4

    # ---- rows of global memory -----------------------------------------------------------------------------------------------------
    def batch(self, x):
        return 0 if x.batch is None else x.batch

    def row_address(self, mX, x, row, column, head, size):
        """Of an element of a [B, T, H, D] tensor, `row` counting from the chunk's first token."""
        start = Int64(x.first) * Int64(mX.stride[1]) + Int64(self.batch(x)) * Int64(mX.stride[0])
        start = start + Int64(head) * Int64(mX.stride[2]) + Int64(column)
        return mad_wide(row, Int32(mX.stride[1]) * size, mX.iterator.toint() + start * size)

    def load_gate(self, x, mG):
        """This lane's words of the raw gate: [row of the block][word]; behind the end, of the last row."""
        size = self.gate_dtype.width // 8
        start = self.row_address(mG, x, 0, x.gate_column, x.head, size)
        first = opaque(16 * x.block)
        rows = [cutlass.min(first + i, x.rows - 1) for i in range(16)]
        return [load_global(mad_wide(r, Int32(mG.stride[1]) * size, start), 0, size // 2, early=True) for r in rows]

    def gate_numbers(self, words):
        """The two columns of a row."""
        return [as_float(w) for w in words] if self.gate_dtype is Float32 else unpack(self.gate_dtype, words[0])

    def gate_place(self, x, i):
        """Address and offset of this lane's two columns of H and dG in row i of the block."""
        return (x.sOddGate if i % 2 else x.sGate), i * self.h_row

    # ---- in ------------------------------------------------------------------------------------------------------------------------
    def gate_parameters(self, x, mALog, mBias):
        a_log = None if mALog is None else mALog[x.head]
        bias = [None if mBias is None else mBias[x.head * self.K + 64 * x.half + 2 * x.lane + e] for e in range(2)]
        return [(self.config.gate, a_log, b, x.lower_bound) for b in bias]

    def sum_gate(self, x, raw, mALog, mBias):
        """H, t_b and c_b of the warp's block to shared memory; H_i = H_(i-1) + log2 decay_i. Returns whether the block fits."""
        gates = [SummedGate(*p) for p in self.gate_parameters(x, mALog, mBias)]
        sums = [Float32(0.0)] * 2
        low = high = Float32(0.0)
        for i in range(16):
            on = 16 * x.block + i < x.rows
            factor = select(on, gates[0].factor(on), 0.0)
            for e, value in enumerate(self.gate_numbers(raw[i])):
                sums[e] = fma(factor, gates[e].value(value), sums[e])
                if self.config.gate == "log":
                    low, high = fmin(low, sums[e]), fmax(high, sums[e])
            store_shared(*self.gate_place(x, i), sums)
        store_shared(x.sOwnGate, TOTAL * self.vector, sums)
        if self.config.gate != "log":
            # These gates are negative: the last row is the lowest.
            low = fmin(sums[0], sums[1])
        fits = cute.arch.vote_all_sync((low >= Float32(LOWEST)) & (high <= Float32(HIGHEST)))
        store_shared(x.sOwnGate, COLUMN * self.vector, [select(fits, 0.0, s) for s in sums] if self.bf16 else sums)
        cute.arch.sync_warp()
        return fits

    # ---- out -----------------------------------------------------------------------------------------------------------------------
    def sum_columns(self, x, mDalog):
        """dG summed over the block's rows and the warp's sum for A_log, to shared memory."""
        total = [Float32(0.0)] * 2
        for i in reversed(range(16)):
            total = [a + b for a, b in zip(total, load_shared(*self.gate_place(x, i), 2), strict=True)]
        store_shared(x.sOwnGate, BLOCK_SUM * self.vector, total)
        if mDalog is not None and self.config.gate == "softplus":
            # dG G = dG H + dG (t of the blocks before)
            before = [Float32(0.0)] * 2
            for b in range(3):
                t = load_shared(x.sOwnGate - x.block * self.vector, (TOTAL + b) * self.vector, 2)
                before = [a + select(b < x.block, f, 0.0) for a, f in zip(before, t, strict=True)]
            self.put_warp_sum(x, fma(total[0], before[0], fma(total[1], before[1], x.rALog[0])) * math.log(2))

    @cute.jit
    def put_warp_sum(self, x, value):
        value = sum_lanes(value)
        if x.lane == 0:
            store_shared(x.sAll + self.at_warps + (4 * x.half + x.block) * 4, 0, [value])

    @cute.jit
    def write_gate(self, x, raw, mDg, mALog, mBias):
        """dg: the reverse cumulative sum of dG, times the gate's derivative; this thread's sums for dt_bias and A_log."""
        gate, size = const_expr(self.config.gate), const_expr(self.gate_dtype.width // 8)
        sums = [Float32(0.0)] * 2
        for b in cutlass.range_constexpr(1, 4):
            part = load_shared(x.sOwnGate - x.block * self.vector, (BLOCK_SUM + b) * self.vector, 2)
            sums = [a + select(x.block < b, f, 0.0) for a, f in zip(sums, part, strict=True)]
        if const_expr(gate != "log"):
            gradients = [GateGradient(*p) for p in self.gate_parameters(x, mALog, mBias)]
            bias, a_log = [Float32(0.0)] * 2, Float32(0.0)
        first = 16 * x.block
        start = self.row_address(mDg, x, first, x.gate_column, x.head, size)
        for n in cutlass.range_constexpr(16):
            i = 15 - n
            sums = [a + b for a, b in zip(sums, load_shared(*self.gate_place(x, i), 2), strict=True)]
            out = sums
            if const_expr(gate != "log"):
                out = []
                for e, value in enumerate(self.gate_numbers(raw[i])):
                    slope, y = gradients[e].slope(value)
                    out.append(slope * (sums[e] * gradients[e].outer))
                    bias[e] = bias[e] + out[e]
                    a_log = fma(y, out[e], a_log)
            words = out if const_expr(self.gate_dtype is Float32) else [pack(self.gate_dtype, *out)]
            store_global_if(mad_wide(i, Int32(mDg.stride[1]) * size, start), words, first + i < x.rows)
        if const_expr(gate != "log"):
            if const_expr(self.config.dt_bias):
                store_shared(x.sOwnGate, BIAS_SUM * self.vector, bias)
            if const_expr(self.config.a_log and gate == "bounded"):
                self.put_warp_sum(x, a_log * gradients[0].of_a_log)

    @cute.jit
    def write_partials(self, x, mDalog, mDbias):
        """Sums over the chunk: of a column for dt_bias, of everything for A_log. With tid < K."""
        if const_expr(mDbias is not None):
            sV = x.sAll + self.at_vectors + x.tid * 4
            parts = [load_shared(sV, (BIAS_SUM + b) * self.vector, 1)[0] for b in range(4)]
            mDbias[x.slot, x.head, x.tid] = (parts[0] + parts[1]) + (parts[2] + parts[3])
        if const_expr(mDalog is not None):  # noqa: SIM102
            if x.tid == 0:
                total = Float32(0.0)
                for c in cutlass.range_constexpr(self.halves):
                    for f in load_shared(x.sAll + self.at_warps, 16 * c, 4):
                        total = total + f
                mDalog[x.slot, x.head] = total
