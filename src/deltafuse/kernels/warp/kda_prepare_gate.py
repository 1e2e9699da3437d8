"""`kda_prepare`, the gate: from raw numbers to sums of base-2 logarithms in a block.

A warp has 16 rows of one half of the K columns, a thread 2 (K = 64: 1) columns of these.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr

from ...tile.fetch import copy_async
from ...tile.ptx import (
    fma,
    fmax,
    fmin,
    load_global,
    load_shared,
    load_shared_half,
    mad_wide,
    store_shared,
    store_shared_if,
    unpack,
)
from .kda_prepare_exact import HIGHEST, LOWEST, SHIFT

MINUS_INFINITY = {BFloat16: 0xFF80FF80, Float16: 0xFC00FC00, Float32: 0xFF800000}


class GateSums:
    """The part of `KdaPrepare` that reads and sums the gate."""

    def copy_gate(self, mG, place, last, head, sRaw, half, block, lane):
        """The raw gate of the warp's rows and columns to shared memory, under way until `wait_copies`."""
        size = self.raw_bits // 8
        vectors = self.width * size // 16
        row, vector = lane // vectors, lane % vectors
        start = self.head_address(mG, place[0], head, half * self.width + vector * (16 // size), size)
        step = Int32(mG.stride[1]) * size
        rows = 32 // vectors
        to = sRaw + row * self.raw_row + vector * 16
        for i in range(0, 16, rows):
            address = mad_wide(place[1] + cutlass.min(16 * block + i + row, last), step, start)
            copy_async(to + i * self.raw_row, address, 0)

    def load_parameters(self, mALog, mBias, head, half, lane):
        """A_log, and dt_bias of this thread's columns."""
        n = self.gate_columns
        a_log = None if mALog is None else load_global(mALog.iterator.toint() + Int64(head) * 4, 0, 1, Float32, True)[0]
        if mBias is None:
            return a_log, [None] * n
        column = half * self.width + n * lane
        return a_log, load_global(mBias.iterator.toint() + (Int64(head) * self.K + column) * 4, 0, n, Float32, True)

    @cute.jit
    def fill_gate(self, sRaw, rows, lane):
        """What has no decay into the rows behind the end: those from `rows` on."""
        size = const_expr(self.raw_bits // 8)
        word = const_expr(0 if self.config.gate == "log" else MINUS_INFINITY[self.gate_dtype])
        words = const_expr(self.width * size // 4)
        for i in cutlass.range(cutlass.max(rows, 0), 16, unroll=1):
            for x in cutlass.range_constexpr(0, words, 32):
                store_shared_if(sRaw + i * self.raw_row + lane * 4, 4 * x, [Uint32(word)], Int32(lane < words - x))
            cute.arch.sync_warp()

    def sum_gate(self, sRaw, gates, sT, sH, sLeast, block, lane):
        """H + 60 of the warp's rows and columns and t_b to shared memory: H_i = H_(i-1) + log2 decay_i. Returns whether every row fits."""
        n = self.gate_columns
        sums = [Float32(0.0)] * n
        low = high = least = Float32(0.0)
        for i in range(16):
            values = []
            for x, value in enumerate(self.raw_gate(sRaw + lane * (n * self.raw_bits // 8), i * self.raw_row)):
                values.append(gates[x].value(value))
                sums[x] = fma(gates[x].outer, values[x], sums[x])
                if self.config.gate == "log":
                    low, high = fmin(low, sums[x]), fmax(high, sums[x])
            store_shared(sH + lane * (4 * n), i * self.h_row, [x + float(SHIFT) for x in sums])
            if self.config.bound:
                least = self.least_of_row(values, i, least, lane)
        if self.config.gate != "log":
            # These gates are negative: the last row is the lowest.
            for x in sums:
                low = fmin(low, x)
        store_shared(sT + block * (self.K * 4) + lane * (4 * n), 0, sums)
        if self.config.bound:
            store_shared_if(sLeast + lane * 4, 0, [least], Int32(lane < 16))
        fits = (low >= Float32(LOWEST)) & (high <= Float32(HIGHEST))
        return cute.arch.vote_all_sync(fits)

    def raw_gate(self, address, offset):
        """The raw gate at the thread's columns of a row."""
        n = self.gate_columns
        if self.raw_bits == 32:
            return load_shared(address, offset, n)
        word = load_shared(address, offset, 1, Uint32)[0] if n == 2 else load_shared_half(address, offset)
        return unpack(self.gate_dtype, word)[:n]
