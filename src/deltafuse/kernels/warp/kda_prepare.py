"""KDA forward, first kernel: a chunk's q, k, gate and beta to the operands of the scan.

G is the inclusive cumulative sum of the gate's base-2 logarithms within the chunk of 64 tokens, s the scale:

    kd  = -k 2^G          qg = s q 2^G          kg = k 2^(G_C - G)          decay = 2^(G_C)
    Aqk[i, j] = s sum_d q_i k_j 2^(G_i - G_j)        i >= j, else 0
    L[i, j]   = beta_i sum_d k_i k_j 2^(G_i - G_j)   i > j            M' = M diag(beta)        M = (I + L)^-1

With `inverse` (for the backward pass) M and beta itself, as it enters L, are outputs too; with `bound` what `kda_prepare_bound` says; with
`strips` M' and Aqk leave without most of their zeros, and rows of kd and qg that are zeros to the chunk's end do not leave (`tile.panel`).

One CTA of 8 warps makes one chunk of one value head. A warp owns the 16 rows of block b, 16b .. 16b + 15, in one half of the K columns;
for the products of rows it owns q's of a block in all columns (half 0, which makes Aqk) or k's (half 1, which makes L). Warp-level
instructions only.

Exponents. H is the cumulative sum within a block and t_b its last row, so that G = H + (t of the blocks before). No exponential
is taken of a difference of rows:

    rows     x_i 2^(H_i + 60)                                  for its own block and all before it
    columns  k_j 2^(-H_j - 60)                                 for its own block (rows and columns are in range while -120 <= H <= 30)
             k_j 2^(t_b' - H_j) 2^(t strictly between b', b)   for each later block b; carries 2^-60 where the rows' 2^60 is to be undone

2^(t_b' - H_j) is 2^(-H_j - 60) 2^(t_b' + 60), unless a row of the block does not fit (below): then it is an exponential of its own.

fp16 does not hold 2^60 and 2^-60: there the own block's products are tf32's, and rows meet blocks before without 2^60. A row that ends
beyond this range, or comes after one that does, "does not fit" and gets its own block's scores from `exact_block`: a pass for each power
of two at which i and j can part company, with factors of at most 1. Nothing that scales or decides for row i comes from a later row.

Registers. Contractions run in an order of the columns in which lane 4 r + t has, of rows r and r + 8, columns 32 m + 8 t .. + 7 of its
half for every m: 16-byte vectors of global memory are A and B fragments as they are, and outputs leave as such vectors. The gate goes
the other way, a thread has 2 (K = 64: 1) columns of its warp's 16 rows, and crosses over through shared memory as H.

Timeline (| is a barrier of the CTA, ! one of half of it, : one of two warps, / one of the warp)
    raw g on its way to shared memory, q, k, beta into registers / H; |x|^2 as the diagonal of x x^T, of half the columns |
    2^(sums of t), decay / qg, kd, kg out; columns to shared memory; own block's scores of half the columns; rows to shared memory |
    rows of all columns : own and other blocks' scores / Aqk out; inverse of the own block : M from 16 to 32 rows |
    to 64 rows: one product ! the other ! M' out

Shared memory, bytes (K = 128: 78,080, with `bound` 78,592)
    matrices   36,864  of a warp: H + 60 [16][K / 2 + 4] fp32, in place of which come its rows of q and k as fragments; 4,608 bytes apart,
                       at half, b. After that L and M [64][72] fp32 (`tile.inverse`): the rows of L take the place of the block's half 0,
                       those of M of half 1
    t, norms    6,144  [4][K] fp32 and [64][q, k][half] fp32; then sums that a block's warps exchange
    tables     10,240  of a warp: powers [5][K / 2] fp32, then the own block's sums for the other half [2][32 lanes][16 bytes]; then, of two
                       warps, a block's 16 rows of Aqk [16][72] io
    columns    24,576  raw g where its type has 16 bits [8 warps][16][K / 2] (of fp32 it lies where H will be); then
                       [6 pairs of blocks (b', b) by b - b', b'][K / 32][2][32 lanes][16 bytes], in fragment order   (12,288 with K = 64)
    beta          256  fp32
    least         512  [half][64] fp32, with `bound`
Two CTAs an SM: 128 registers a thread.

Constraints: K 64 or 128; rows of q, k, g are 16-byte aligned with contiguous elements, tokens less than 2 GiB apart; rows of a chunk
behind its sequence's end are not read and give zeros.
"""

# mypy: ignore-errors
# A nested `if` is one of compile time and one of run time, which `and` would make one of run time.
# ruff: noqa: SIM102

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...tile import inverse, panel
from ...tile.arguments import DTYPES, dense
from ...tile.early import nothing_decided
from ...tile.fetch import copy_async, wait_copies
from ...tile.gate import SummedGate, sigmoid
from ...tile.mma import mma_16bit, mma_16bit_short, mma_tf32
from ...tile.ptx import (
    as_float,
    barrier_of,
    exp2,
    fma,
    fmax,
    fmin,
    load_global,
    load_global_half,
    load_shared,
    load_shared_half,
    mad_long,
    mad_wide,
    pack,
    reciprocal,
    rsqrt,
    select,
    store_global,
    store_global_if,
    store_shared,
    store_shared_if,
    to_tf32,
    unpack,
)
from ...tile.sequence import chunk_of_slot
from ...tile.uncached import first_out
from ..config import CHUNK, EPSILON, PrepareConfig
from .kda_prepare_bound import ChunkBound
from .kda_prepare_exact import HIGHEST, LOWEST, SHIFT, ExactRows
from .kda_prepare_out import AQK_ROW, ScoresOut

ROWS_AHEAD = 6
"""Rows of the raw gate that are on their way from shared memory."""
MINUS_INFINITY = {BFloat16: 0xFF80FF80, Float16: 0xFC00FC00, Float32: 0xFF800000}


class KdaPrepare(ExactRows, ChunkBound, ScoresOut):
    """The kernel for one `PrepareConfig`."""

    def __init__(self, config: PrepareConfig) -> None:
        self.config = config
        self.K = config.key_dim
        self.dtype = DTYPES[config.dtype]
        self.gate_dtype = DTYPES[config.gate_dtype]
        self.beta_dtype = DTYPES[config.beta_dtype]
        self.bf16 = self.dtype is BFloat16
        # Three CTAs an SM leave 80 registers a thread: what spills costs more than the third one gains.
        self.blocks = 2
        # Panels of scores: M', Aqk and, where it is wanted, M.
        self.scores = 3 if config.inverse else 2
        # Of a warp's half: columns, steps of 32 of them, the gate's columns of a thread.
        self.width = self.K // 2
        self.steps = self.K // 64
        self.gate_columns = self.K // 64
        self.h_row = (self.width + 4) * 4
        # The raw gate's rows: where H will be, if it has H's size.
        self.raw_bits = self.gate_dtype.width
        self.raw_row = self.h_row if self.raw_bits == 32 else self.width * 2
        # Exponents of the columns for later blocks, and what kg has to make up for.
        self.column_shift = SHIFT if self.bf16 else 0
        # Byte offsets in shared memory.
        self.region = 16 * inverse.STRIDE * 4
        self.at_m = inverse.BYTES
        self.at_t = 2 * inverse.BYTES
        self.at_norms = self.at_t + 4 * self.K * 4
        # Sums that a block's warps exchange are 6 KiB.
        self.at_tables = self.at_t + max(4 * self.K * 4 + CHUNK * 16, 6 * 1024)
        self.table = max(5 * self.width * 4, 8 * AQK_ROW)
        self.at_columns = self.at_tables + 8 * self.table
        self.pair_bytes = self.K // 32 * 1024
        self.at_beta = self.at_columns + 6 * self.pair_bytes
        self.at_least = self.at_beta + CHUNK * 4
        self.shared_bytes = self.at_least + config.bound * 2 * CHUNK * 4

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        factors: cute.Tensor,
        scores: cute.Tensor,
        decay: cute.Tensor,
        beta_eff: cute.Tensor | None,
        bound: cute.Tensor | None,
        early: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        stream,
    ):
        """Launch: one CTA for a slot and value head."""
        slots, value_heads, batches = factors.shape[0], factors.shape[1], q.shape[0]
        by_head = cute.fast_divmod_create_divisor_v2(value_heads)
        by_batch = cute.fast_divmod_create_divisor_v2(batches)
        by_group = cute.fast_divmod_create_divisor_v2(value_heads // q.shape[2])
        # All of an SM's memory but L1's minimum as shared memory, said outright: the DSL would ask a driver for its size.
        self.kernel(
            q, k, g, beta, a_log, dt_bias, cu_seqlens, factors, scores, decay, beta_eff, bound, early, scale, lower_bound,
            beta_limit, slots // batches, by_head, by_batch, by_group,
        ).launch(
            grid=(slots * value_heads, 1, 1),
            block=(256, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mALog: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mFactors: cute.Tensor,
        mScores: cute.Tensor,
        mDecay: cute.Tensor,
        mBetaEff: cute.Tensor | None,
        mBound: cute.Tensor | None,
        mEarly: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        chunks: Int32,
        by_head: cute.FastDivmodDivisorV2,
        by_batch: cute.FastDivmodDivisorV2,
        by_group: cute.FastDivmodDivisorV2,
    ):
        tid, _, _ = cute.arch.thread_idx()
        # What comes after may be put on SMs as they become free; it waits for this grid's end before it reads what is made here, but for
        # codes, which are there before.
        if const_expr(mEarly is None):
            cute.arch.griddepcontrol_launch_dependents()
        elif tid == 0:
            nothing_decided(mEarly)
        smem = cutlass.memory.SmemAllocator()
        sAll = smem.allocate(self.shared_bytes, 128).toint()
        # The last chunks come first, so that the first chunks' operands are the ones still in L2 when the scan starts.
        index, _, _ = cute.arch.block_idx()
        order, head = divmod(index, by_head)
        if const_expr(mCu is not None):
            slot = mFactors.shape[0] - 1 - order
            batch = Int32(0)
            first, rows = chunk_of_slot(mCu, slot, Int32(mQ.shape[1]))
        else:
            back, batch = divmod(order, by_batch)
            chunk = chunks - 1 - back
            slot = batch * chunks + chunk
            first = chunk * CHUNK
            rows = cutlass.min(mQ.shape[1] - first, CHUNK)
        key_head = head // by_group
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        # Of the warps of a scheduler, w and w + 4, the one has as many blocks before its own as the other has behind it.
        half = warp >> 2
        block = half * 7 + warp - 2 * half * warp
        # Behind the end the last row is read again; what is made of it is multiplied by zeros. A slot that is nobody's reads some row.
        last = cutlass.max(rows, 1) - 1
        place = (batch, cutlass.min(first, mQ.shape[1] - 1))
        sH = sAll + (4 * half + block) * self.region
        sRaw = sH if const_expr(self.raw_bits == 32) else sAll + self.at_columns + warp * (16 * self.raw_row)
        # Inputs that nobody else reads leave L2 to the outputs, for the scan. q and k of grouped heads are read several times.
        once = first_out(mQ.shape[2] == mFactors.shape[1])
        self.copy_gate(mG, place, last, head, sRaw, half, block, lane)
        k = self.load_rows(self.row_addresses(mK, place, last, key_head, half, block, lane), once)
        q = self.load_rows(self.row_addresses(mQ, place, last, key_head, half, block, lane), once)
        a_log, dt_bias = self.load_parameters(mALog, mBias, head, half, lane)
        beta = Uint32(0)
        if warp < 2:
            beta = self.load_beta(mBeta, place, cutlass.min(tid, last), head)
        # The branch keeps these loads above all else.
        if rows > 0:
            self.chunk(
                mQ, mK, mFactors, mScores, mDecay, mBetaEff, mBound, scale, lower_bound, beta_limit, sAll, place, rows, head, key_head,
                slot, tid, half, block, lane, a_log, dt_bias, beta, sH, sRaw, k, q,
            )  # fmt: skip
        else:
            # Shared memory is somebody else's after the end.
            wait_copies()

    @cute.jit
    def chunk(
        self, mQ, mK, mFactors, mScores, mDecay, mBetaEff, mBound, scale, lower_bound, beta_limit, sAll, place, rows, head, key_head,
        slot, tid, half, block, lane, a_log, dt_bias, raw_beta, sH, sRaw, words_k, words_q,
    ):  # fmt: skip
        """All that follows the loads."""
        mine = 16 * block + lane // 4  # rows mine, mine + 8
        unit = Int64(slot) * mFactors.shape[1] + head
        to_beta = mBetaEff.iterator.toint() + unit * (CHUNK * 4) if const_expr(self.config.inverse) else None
        if const_expr(self.config.l2norm):
            self.share_norms(words_q, sAll + self.at_norms + half * 4, block, lane)
        if const_expr(self.config.l2norm or self.bound_grows):
            self.share_norms(words_k, sAll + self.at_norms + 8 + half * 4, block, lane)
        self.share_beta(raw_beta, rows, beta_limit, sAll, to_beta, tid)
        wait_copies()
        cute.arch.sync_warp()
        self.fill_gate(sRaw, rows - 16 * block, lane)
        gates = [SummedGate(self.config.gate, a_log, x, lower_bound) for x in dt_bias]
        sT = sAll + self.at_t + half * (self.width * 4)
        sLeast = sAll + self.at_least + (half * CHUNK + 16 * block) * 4
        fits = self.sum_gate(sRaw, gates, sT, sH, sLeast, block, lane)
        cute.arch.sync_threads()
        if const_expr(self.config.bound):
            if (half == 0) & (block == 3):
                self.write_bound(sAll, gates[0].outer, mBound.iterator.toint() + unit * 4, lane)

        table = sAll + self.at_tables + (2 * block + half) * self.table
        self.powers(sT, table, half, block, lane, mDecay.iterator.toint() + unit * (self.K * 4))
        factor_q, factor_k = [scale] * 2, [Float32(1.0)] * 2
        if const_expr(self.config.l2norm):
            factor_q, factor_k = self.row_factors(sAll + self.at_norms + mine * 16, scale)
        valid = [mine + 8 * h < rows for h in range(2)]
        factor_q = [select(v, x, 0.0) for v, x in zip(valid, factor_q, strict=True)]
        factor_k = [select(v, x, 0.0) for v, x in zip(valid, factor_k, strict=True)]
        cute.arch.sync_warp()

        out = self.places(mFactors.iterator.toint() + unit * (3 * self.K * CHUNK * 2), half, mine, lane)
        image = mScores.iterator.toint() + unit * (self.scores * panel.BYTES)
        live = self.live_blocks(sAll + self.at_t, lane)
        written = None if const_expr(live is None) else Int32(block < live)
        rQ = cute.make_rmem_tensor((4, 2), Float32)
        rK = cute.make_rmem_tensor((4, 2), Float32)
        rows_q = cute.make_rmem_tensor((4, 2, self.steps), Uint32)
        rows_k = cute.make_rmem_tensor((4, 2, self.steps), Uint32)
        if fits:
            self.factors(
                rQ, rK, rows_q, rows_k, words_q, words_k, factor_q, factor_k, sAll, table, sT, sH, out, written, half, block, lane, True
            )  # fmt: skip
        else:
            from_q = self.row_addresses(mQ, place, rows - 1, key_head, half, block, lane)
            from_k = self.row_addresses(mK, place, rows - 1, key_head, half, block, lane)
            # Sums wait where M' and Aqk will be: what takes registers here takes them from everything.
            scratch = image + Int64((4 * half + block) * 2048 + lane * 16)
            self.exact_block(scratch, from_q, from_k, factor_q, factor_k, sH, lane)
            first_bad = self.first_bad_row(sH, lane)
            cute.arch.sync_warp()
            # Read again: the words would not have stayed in registers.
            again_q, again_k = self.load_rows(from_q), self.load_rows(from_k)
            self.factors(
                rQ, rK, rows_q, rows_k, again_q, again_k, factor_q, factor_k, sAll, table, sT, sH, out, written, half, block, lane, False
            )  # fmt: skip
            self.take_exact(rQ, scratch, first_bad, lane)
            self.take_exact(rK, scratch + 1024, first_bad, lane)
        cute.arch.sync_warp()
        self.share_sums(rQ, rK, table, half, lane)
        cute.arch.sync_threads()

        role = (sAll, half, block, lane)
        own = self.load_sums(rQ, rK, table + self.table - 2 * half * self.table, half, lane)
        beta = [load_shared(sAll + self.at_beta + mine * 4, 32 * h, 1)[0] for h in range(2)]
        self.other_blocks(rows_q, rows_k, own, beta, role)
        cute.arch.sync_warp()
        if half == 0:
            self.write_aqk(image + panel.BYTES, sAll, block, lane)
            self.write_live(image, live, block, lane)
        else:
            inverse.invert_pair(sAll, sAll + self.at_m, block, lane)
        warp = cute.arch.make_warp_uniform(tid // 32)
        inverse.invert_rest(sAll, sAll + self.at_m, warp, lane)
        self.write_inverse(image, sAll, rows, warp, lane)

    # ---- loads ---------------------------------------------------------------------------------------------------------------------
    def head_address(self, mX, batch, head, column, size):
        """Of token 0's element of a [B, T, H, D] tensor."""
        offset = mad_long(batch, Int64(mX.stride[0]), mad_long(head, Int64(mX.stride[2]), Int64(0)))
        return mad_wide(column, size, mX.iterator.toint() + offset * size)

    def row_addresses(self, mX, place, last, head, half, block, lane):
        """Of this lane's first column in its two rows of q or k; place is (batch entry, first token), `last` the last row there is."""
        start = self.head_address(mX, place[0], head, half * self.width + 8 * (lane % 4), 2)
        rows = [place[1] + cutlass.min(16 * block + lane // 4 + 8 * h, last) for h in range(2)]
        return [mad_wide(row, Int32(mX.stride[1]) * 2, start) for row in rows]

    def load_rows(self, addresses, policy=None):
        """This lane's words of q or k: [m][row r, row r + 8][4]."""
        return [[load_global(a, 64 * m, 4, early=True, policy=policy) for a in addresses] for m in range(self.steps)]

    def copy_gate(self, mG, place, last, head, sRaw, half, block, lane):
        """The raw gate of the warp's rows and columns to shared memory, under way until `wait_copies`."""
        size = self.raw_bits // 8
        vectors = self.width * size // 16
        row, vector = lane // vectors, lane % vectors
        start = self.head_address(mG, place[0], head, half * self.width + vector * (16 // size), size)
        step = Int32(mG.stride[1]) * size
        rows = 32 // vectors
        policy = first_out()
        to = sRaw + row * self.raw_row + vector * 16
        for i in range(0, 16, rows):
            address = mad_wide(place[1] + cutlass.min(16 * block + i + row, last), step, start)
            copy_async(to + i * self.raw_row, address, 0, policy)

    def load_parameters(self, mALog, mBias, head, half, lane):
        """A_log, and dt_bias of this thread's columns."""
        n = self.gate_columns
        a_log = None if mALog is None else load_global(mALog.iterator.toint() + Int64(head) * 4, 0, 1, Float32, True)[0]
        if mBias is None:
            return a_log, [None] * n
        column = half * self.width + n * lane
        return a_log, load_global(mBias.iterator.toint() + (Int64(head) * self.K + column) * 4, 0, n, Float32, True)

    def load_beta(self, mBeta, place, row, head):
        size = self.beta_dtype.width // 8
        address = self.head_address(mBeta, place[0], head, 0, size)
        address = mad_wide(place[1] + row, Int32(mBeta.stride[1]) * size, address)
        return load_global(address, 0, 1, early=True)[0] if size == 4 else load_global_half(address, early=True)

    @cute.jit
    def share_beta(self, word, rows, beta_limit, sAll, to_beta, tid):
        """beta of the 64 rows, as it enters L and M', to shared memory and, where wanted, out; 0 behind the end."""
        if tid < CHUNK:
            if const_expr(self.beta_dtype is Float32):
                beta = as_float(word)
            else:
                beta = unpack(self.beta_dtype, word)[0]
            if const_expr(self.config.beta_sigmoid):
                beta = sigmoid(beta) * beta_limit
            beta = select(tid < rows, beta, 0.0)
            store_shared(sAll + self.at_beta + tid * 4, 0, [beta])
            if const_expr(self.config.inverse):
                store_global(to_beta + Int64(tid) * 4, 0, [beta])

    # ---- gate ----------------------------------------------------------------------------------------------------------------------
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
        raw = sRaw + lane * (n * self.raw_bits // 8)
        # A row's load would have to wait for the stores of those before it: they go to the same memory, for all that ptxas knows.
        words = [self.raw_words(raw, i * self.raw_row) for i in range(ROWS_AHEAD)]
        for i in range(16):
            if i + ROWS_AHEAD < 16:
                words.append(self.raw_words(raw, (i + ROWS_AHEAD) * self.raw_row))
            values = []
            for x, value in enumerate(self.raw_gate(words[i])):
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

    def raw_words(self, address, offset):
        """The raw gate at the thread's columns of a row, as it lies in shared memory."""
        n = self.gate_columns
        if self.raw_bits == 32:
            return load_shared(address, offset, n)
        return load_shared(address, offset, 1, Uint32) if n == 2 else [load_shared_half(address, offset)]

    def raw_gate(self, words):
        """The same as numbers."""
        return words if self.raw_bits == 32 else unpack(self.gate_dtype, words[0])[: self.gate_columns]

    @cute.jit
    def share_norms(self, words, to, block, lane):
        """|x|^2 of the half's columns for the 16 rows to shared memory: squares of norms are the diagonal of x x^T.

        Words w, w' side by side are an A fragment as they are, with w' for another 8 rows: with w as B they give w w in rows r, with w'
        as B w' w' in rows r + 8; what else comes is not wanted.
        """
        r = lane // 4
        holds = Int32(lane % 4 == r // 2)
        for h in cutlass.range_constexpr(2):
            even, odd = [Float32(0.0)] * 4, [Float32(0.0)] * 4
            for m in cutlass.range_constexpr(self.steps):
                for s in cutlass.range_constexpr(0, 4, 2):
                    pair = words[m][h][s : s + 2]
                    even = mma_16bit_short(self.dtype, pair, pair[0], even)
                    odd = mma_16bit_short(self.dtype, pair, pair[1], odd)
            square = select(r & 1, even[1] + odd[3], even[0] + odd[2])
            store_shared_if(to + (16 * block + r) * 16, 128 * h, [square], holds)

    def row_factors(self, sNorms, scale):
        """scale / sqrt(|q|^2 + epsilon) and 1 / sqrt(|k|^2 + epsilon) of rows r, r + 8."""
        sums = [load_shared(sNorms, 128 * h, 4) for h in range(2)]
        return (
            [scale * rsqrt(s[0] + s[1] + EPSILON) for s in sums],
            [rsqrt(s[2] + s[3] + EPSILON) for s in sums],
        )

    def product(self, rows, column, sums):
        """sums + rows column^T over 32 columns of the 16-bit type: words [2][4] of rows r, r + 8 and [4] of column r."""
        for s in (0, 2):
            a = (rows[0][s], rows[1][s], rows[0][s + 1], rows[1][s + 1])
            sums = mma_16bit(self.dtype, a, (column[s], column[s + 1]), sums)
        return sums

    def product_tf32(self, rows, column, sums):
        """The same of tf32: words [2][8] and [8]."""
        for s in range(0, 8, 2):
            a = (rows[0][s], rows[1][s], rows[0][s + 1], rows[1][s + 1])
            sums = mma_tf32(a, (column[s], column[s + 1]), sums)
        return sums

    # ---- factors -------------------------------------------------------------------------------------------------------------------
    @cute.jit
    def powers(self, sT, table, half, block, lane, decay):
        """2^(sums of t) in the warp's columns to its table, and, from the warps of block 0, 2^(G_C) to global memory. Rows of the table:

        0   2^(t before b) without the rows' 2^60       1   2^t_b, what makes columns for later blocks of the own block's ones
        2   2^(t after b), with 2^60 where columns lack it    3, 4   2^(t between) for the columns of blocks b + 2, b + 3
        """
        n = const_expr(self.gate_columns)
        sT, table = sT + lane * (4 * n), table + lane * (4 * n)
        if block == 0:
            self.powers_of(sT, table, 0, decay + Int64(half * self.width + n * lane) * 4)
        elif block == 1:
            self.powers_of(sT, table, 1, None)
        elif block == 2:
            self.powers_of(sT, table, 2, None)
        else:
            self.powers_of(sT, table, 3, None)

    def powers_of(self, sT, table, block, decay):
        n = self.gate_columns
        t = [load_shared(sT, b * self.K * 4, n) for b in range(4)]

        def total(blocks, shift):
            sums = [Float32(float(shift))] * n if shift or not blocks else None
            for b in blocks:
                sums = t[b] if sums is None else [x + y for x, y in zip(sums, t[b], strict=True)]
            return [exp2(x) for x in sums]

        rows = [total(range(block), -SHIFT), total((block,), SHIFT - self.column_shift)]
        rows.append(total(range(block + 1, 4), self.column_shift))
        rows += [total(range(block + 1, block + 1 + i), 0) for i in ((1, 2) if block < 2 else ())]
        for i, x in enumerate(rows):
            store_shared(table, i * self.width * 4, x)
        if decay is not None:
            store_global(decay, 0, total(range(4), 0))

    def places(self, out, half, row, lane):
        """Addresses of the lane's vectors of row `row` in kd, for each step of 32 columns."""
        r, t = lane // 4, lane % 4
        out = out + Int64(row * panel.ROW)
        if self.steps == 1:
            return [out + Int64(((4 * half + t) ^ r) * 16)]
        return [out + Int64(half * panel.BYTES + (v ^ r) * 16) for v in (t, 4 + t)]

    @cute.jit
    def factors(
        self, rQ, rK, rows_q, rows_k, words_q, words_k, factor_q, factor_k, sAll, table, sT, sH, out, written, half, block, lane,
        fits: cutlass.Constexpr,
    ):  # fmt: skip
        """qg, kd, kg out; columns for later blocks to shared memory; own block's scores of the warp's columns into rQ, rK."""
        r, t = lane // 4, lane % 4
        own_q = [[Float32(0.0)] * 4 for _ in range(2)]
        own_k = [[Float32(0.0)] * 4 for _ in range(2)]
        for m in cutlass.range_constexpr(self.steps):
            column = 4 * (32 * m + 8 * t)
            x = self.elements(
                words_q[m], words_k[m], factor_q, factor_k, table + column, sH + r * self.h_row + column, sAll, out[m], written, m,
                half, block, lane, None if fits else sT + block * (self.K * 4) + column,
            )  # fmt: skip
            for n in cutlass.range_constexpr(2):
                if const_expr(self.bf16):
                    own_q[n] = self.product(x["q"], x["own"][n], own_q[n])
                    own_k[n] = self.product(x["k"], x["own"][n], own_k[n])
                else:
                    own_q[n] = self.product_tf32(x["q32"], x["own"][n], own_q[n])
                    own_k[n] = self.product_tf32(x["k32"], x["own"][n], own_k[n])
            for h in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(4):
                    rows_q[i, h, m] = x["q"][h][i]
                    rows_k[i, h, m] = x["k"][h][i]
        for n in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(4):
                rQ[i, n] = own_q[n][i]
                rK[i, n] = own_k[n][i]

    def elements(
        self, words_q, words_k, factor_q, factor_k, table, sRow, sAll, out, written, m, half, block, lane, sTotal
    ):  # fmt: skip
        """All that is elementwise, for 8 columns of rows r, r + 8: outputs, columns for later blocks; words of the products, by name.

        sTotal: t_b, where rows do not fit. There the columns for later blocks take an exponential of t_b - H.
        """
        words = {}
        H = [self.vector(sRow + h * 8 * self.h_row) for h in range(2)]
        up = [[exp2(x) for x in y] for y in H]
        before = self.vector(table)
        for name, output, raw, factor in (("q", 1, words_q, factor_q), ("k", 0, words_k, factor_k)):
            signed = before if output else [-b for b in before]
            words[name], words[name + "32"] = [], []
            for h in range(2):
                row = [a * factor[h] * b for a, b in zip(self.numbers(raw[h]), up[h], strict=True)]
                if self.bf16:
                    words[name].append(self.packed(row))
                else:
                    words[name].append(self.packed([x * 2.0**-SHIFT for x in row]))
                    words[name + "32"].append([to_tf32(x) for x in row])
                self.write(out, output, h, [a * b for a, b in zip(row, signed, strict=True)], written)
        own = [
            [a * factor_k[h] * reciprocal(b) for a, b in zip(self.numbers(words_k[h]), up[h], strict=True)]
            for h in range(2)
        ]
        words["own"] = [self.packed(x) if self.bf16 else [to_tf32(y) for y in x] for x in own]
        if sTotal is None:
            ends = self.vector(table + 4 * self.width)
            late = [[a * b for a, b in zip(x, ends, strict=True)] for x in own]
        else:
            total = [x + float(SHIFT - self.column_shift) for x in self.vector(sTotal)]
            late = [
                [a * factor_k[h] * exp2(b - c) for a, b, c in zip(self.numbers(words_k[h]), total, H[h], strict=True)]
                for h in range(2)
            ]
        self.share_late(late, table, sAll, out, m, half, block, lane)
        return words

    def vector(self, address):
        """8 fp32 numbers."""
        return [x for u in range(2) for x in load_shared(address, 16 * u, 4)]

    def numbers(self, words):
        """The 8 numbers of a vector of q or k."""
        return [x for w in words for x in unpack(self.dtype, w)]

    def write(self, out, i, h, values, written=None):
        """8 numbers of row r + 8 h of kd, qg, kg (i = 0, 1, 2), unless `written` is 0."""
        at = i * self.K // 64 * panel.BYTES + h * 8 * panel.ROW
        if written is None:
            store_global(out, at, self.packed(values))
        else:
            store_global_if(out, at, self.packed(values), written)

    def packed(self, x):
        return [pack(self.dtype, x[i], x[i + 1]) for i in range(0, len(x), 2)]

    @cute.jit
    def share_late(self, late, table, sAll, out, m, half, block, lane):
        """Of k 2^(t_b - H) in 8 columns of rows r, r + 8: kg out, and B fragments for blocks b + 1, + 2, + 3. Block 3 wants none."""
        after = self.vector(table + 8 * self.width)
        to = sAll + self.at_columns + (half * self.steps + m) * 1024 + block * self.pair_bytes + lane * 16
        for h in cutlass.range_constexpr(2):
            self.write(out, 2, h, [a * b for a, b in zip(late[h], after, strict=True)])
            store_shared_if(to, 512 * h, self.packed(late[h]), Int32(block < 3))
        if block < 2:
            for i in cutlass.range_constexpr(2):
                powers = self.vector(table + (12 + 4 * i) * self.width)
                for h in cutlass.range_constexpr(2):
                    values = self.packed([a * p for a, p in zip(late[h], powers, strict=True)])
                    store_shared_if(to, self.pair_bytes * (3, 5)[i] + 512 * h, values, Int32(block + i < 2))

    # ---- scores --------------------------------------------------------------------------------------------------------------------
    def registers(self, sums):
        r = cute.make_rmem_tensor((4, 2), Float32)
        for n in range(2):
            for i in range(4):
                r[i, n] = sums[n][i]
        return r

    def share_sums(self, rQ, rK, to, half, lane):
        """The own block's sums that the block's other warp goes on with."""
        for n in range(2):
            store_shared(to + lane * 16, 512 * n, [select(half, rQ[i, n], rK[i, n]) for i in range(4)])

    def load_sums(self, rQ, rK, address, half, lane):
        """The own block's sums over all columns, of Aqk or L."""
        r = cute.make_rmem_tensor((4, 2), Float32)
        for n in range(2):
            for i, x in enumerate(load_shared(address + lane * 16, 512 * n, 4)):
                r[i, n] = select(half, rK[i, n], rQ[i, n]) + x
        return r

    @cute.jit
    def other_blocks(self, rows_q, rows_k, own, beta, role):
        """Scores of the block's rows: `own` with its own columns, and those with the columns of the blocks before it.

        A warp multiplies both q's and k's rows in its half of the columns, and gives the other warp what that one goes on with.
        """
        sAll, half, block, lane = role
        kept = cute.make_rmem_tensor((4, 2, 3), Float32)
        to, at = self.exchange(sAll, half, block, lane), self.exchange(sAll, 1 - half, block, lane)
        for b in cutlass.range_constexpr(3):
            if b < block:
                sums = self.scores_of_half(rows_q, rows_k, sAll, half, block, b, lane)
                for n in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(4):
                        kept[i, n, b] = select(half, sums[1][n][i], sums[0][n][i])
                    store_shared(
                        to,
                        1024 * b + 512 * n,
                        [select(half, x, y) for x, y in zip(sums[0][n], sums[1][n], strict=True)],
                    )
        # The own block's sums, too, lie where Aqk goes.
        barrier_of(block, 64, groups=4)
        self.write_scores(own, beta, role, block, True)
        for b in cutlass.range_constexpr(3):
            if b < block:
                sums = cute.make_rmem_tensor((4, 2), Float32)
                for n in cutlass.range_constexpr(2):
                    x = load_shared(at, 1024 * b + 512 * n, 4)
                    for i in cutlass.range_constexpr(4):
                        sums[i, n] = kept[i, n, b] + x[i]
                self.write_scores(sums, beta, role, b, False)

    def exchange(self, sAll, half, block, lane):
        """Where a warp leaves sums for the other one of its block: k's where M will be, q's where t was and behind it."""
        k, q = self.at_m + block * self.region, self.at_t + (block * (block - 1) >> 1) * 1024
        return sAll + k + half * (q - k) + lane * 16

    def scores_of_half(self, rows_q, rows_k, sAll, half, block, b, lane):
        """Sums over the warp's columns for q's and k's rows with the columns of block b before them."""
        distance = block - b
        pair = ((distance - 1) * (8 - distance) >> 1) + b
        sColumns = sAll + self.at_columns + pair * self.pair_bytes + half * (self.steps * 1024) + lane * 16
        sums = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2)]
        columns = [[load_shared(sColumns, m * 1024 + n * 512, 4, Uint32) for n in range(2)] for m in range(self.steps)]
        for m in range(self.steps):
            for n in range(2):
                for i, rows in enumerate((rows_q, rows_k)):
                    words = [[rows[x, h, m] for x in range(4)] for h in range(2)]
                    sums[i][n] = self.product(words, columns[m][n], sums[i][n])
        return sums

    @cute.jit
    def write_scores(self, sums, beta, role, b, diagonal: cutlass.Constexpr):
        """A 16x16 block of Aqk in the io type or of L = diag(beta) K K^T in fp32 to shared memory; above the diagonal zeros."""
        sAll, half, block, lane = role
        r, t = lane // 4, lane % 4
        x = [[sums[2 * h, n], sums[2 * h + 1, n]] for n in range(2) for h in range(2)]
        if const_expr(diagonal):
            # Of L the diagonal itself is none: a column further on.
            i, j = r, 2 * t + half
            x = [
                [select(Int32(i + 8 * h >= j + 8 * n + c), x[2 * n + h][c], 0.0) for c in range(2)]
                for n in range(2)
                for h in range(2)
            ]
        if half == 0:
            self.store_aqk(x, self.aqk_row(sAll, block, r) + (16 * b + 2 * t) * 2)
        else:
            self.store_l(x, beta, sAll + inverse.at(16 * block + r, 16 * b + 2 * t))

    def store_aqk(self, pairs, to):
        for i, x in enumerate(pairs):
            store_shared(to, i % 2 * 8 * AQK_ROW + i // 2 * 16, self.packed(x))

    def store_l(self, pairs, beta, to):
        for i, x in enumerate(pairs):
            store_shared(to, inverse.at(i % 2 * 8, i // 2 * 8), [y * beta[i % 2] for y in x])

    def aqk_row(self, sAll, block, row):
        return sAll + self.at_tables + block * (2 * self.table) + row * AQK_ROW


def compile(config: PrepareConfig):
    """The launch function for `config`:

    `(q, k, g, beta, a_log | None, dt_bias | None, cu_seqlens | None, factors, scores, decay, beta_eff | None, bound | None,
    early | None, scale, lower_bound, beta_limit)`, None where the config does not have it. q, k [B, T, H, K]; g [B, T, HV, K];
    beta [B, T, HV]; a_log fp32 [HV]; dt_bias fp32 [HV * K], 16-byte aligned; cu_seqlens [N + 1]; contiguous factors
    [slots, HV, 3, K / 64, 64, 64], scores [slots, HV, 2, 64, 64] (M', Aqk; with `inverse` 3: M too) and decay fp32 [slots, HV, K]; with
    `inverse` beta_eff fp32 [slots, HV, 64]; with `bound` bound fp32 [slots, HV] and early int32 [units, HV] (every unit undecided); floats
    scale, lower_bound (of gate "bounded"), beta_limit (the factor of beta's sigmoid). At least one token.
    """
    batch, tokens, heads, value_heads, slots = (cute.sym_int() for _ in range(5))
    io, K = DTYPES[config.dtype], config.key_dim
    kernel = KdaPrepare(config)

    def strided(dtype, shape, align):
        whole = align * 8 // dtype.width
        strides = tuple(cute.sym_int64(divisibility=whole) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=align)

    beta_dtype = DTYPES[config.beta_dtype]
    beta_strides = tuple(cute.sym_int64() for _ in range(3))
    return cute.compile(
        kernel,
        strided(io, (batch, tokens, heads, K), 16),
        strided(io, (batch, tokens, heads, K), 16),
        strided(DTYPES[config.gate_dtype], (batch, tokens, value_heads, K), 16),
        make_fake_tensor(
            beta_dtype, (batch, tokens, value_heads), stride=beta_strides, assumed_align=beta_dtype.width // 8
        ),
        dense(Float32, (value_heads,)) if config.a_log else None,
        dense(Float32, (cute.sym_int(),)) if config.dt_bias else None,
        dense(DTYPES[config.cu_seqlens], (cute.sym_int(),)) if config.cu_seqlens else None,
        dense(io, (slots, value_heads, 3, K // 64, 64, 64)),
        dense(io, (slots, value_heads, kernel.scores, 64, 64)),
        dense(Float32, (slots, value_heads, K)),
        dense(Float32, (slots, value_heads, CHUNK)) if config.inverse else None,
        dense(Float32, (slots, value_heads)) if config.bound else None,
        dense(Int32, (cute.sym_int(), value_heads)) if config.bound else None,
        Float32(1.0),
        Float32(1.0),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
