"""KDA forward, first kernel: a chunk's q, k, gate and beta to the operands of the scan.

G is the inclusive cumulative sum of the gate's base-2 logarithms within the chunk of 64 tokens, s the scale:

    kd  = -k 2^G          qg = s q 2^G          kg = k 2^(G_C - G)          decay = 2^(G_C)
    Aqk[i, j] = s sum_d q_i k_j 2^(G_i - G_j)        i >= j, else 0
    L[i, j]   = beta_i sum_d k_i k_j 2^(G_i - G_j)   i > j            M' = M diag(beta)        M = (I + L)^-1

With `inverse` (for the backward pass) M and beta itself, as it enters L, are outputs too.

One CTA of 4 warps makes one chunk of one value head; warp b owns rows 16b .. 16b + 15, "block b". Warp-level instructions only.

Exponents. H is the cumulative sum within a block and t_b its last row, so that G = H + (t of the blocks before). No exponential
is taken of a difference of rows:

    rows     x_i 2^(H_i + 60)                                  for its own block and all before it
    columns  k_j 2^(-H_j - 60)                                 for its own block (rows and columns are in range while -120 <= H <= 30)
             k_j 2^(t_b' - H_j) 2^(t strictly between b', b)   for each later block b; carries 2^-60 where the rows' 2^60 is to be undone

fp16 does not hold 2^60 and 2^-60: there the own block's products are tf32's, and rows meet blocks before without 2^60. A row that ends
beyond this range, or comes after one that does, "does not fit" and gets its own block's scores from `exact_block`: a pass for each power
of two at which i and j can part company, with factors of at most 1. Nothing that scales or decides for row i comes from a later row.

Registers. Contractions run in an order of the columns in which lane 4 r + t has, of rows r and r + 8, columns 32 m + 8 t .. + 7 for
every m: 16-byte vectors of global memory are A and B fragments as they are, and outputs leave as such vectors. The gate goes the other
way, a thread has 4 (K = 64: 2) columns of its warp's 16 rows, and crosses over through shared memory as H.

Timeline (| is a barrier of the CTA)
    q, k, g, beta into registers; H; |x|^2 as the diagonal of x x^T | a thread a column: 2^(sums of t), decay |
    qg, kd, kg out; columns to shared memory; own block's scores | other blocks' scores; Aqk out; inverse of the own block |
    M from 16 to 32 rows | to 64 rows | M' out

Shared memory, bytes (K = 128: 68,864)
    matrices   34,816  H + 60 [4][16][K + 4] fp32 until the third barrier, then L and M [64][68] fp32
    vectors     9,216  t [4][K] and 2^(sums) [11][K] fp32 until the third barrier, then Aqk [64][72] io
    columns    24,576  [6 pairs of blocks (b', b) by b - b', b'][K / 32][2][32 lanes][16 bytes], in fragment order   (12,288 with K = 64)
    beta          256  fp32
Three CTAs an SM: 168 registers a thread.

Constraints: K 64 or 128; rows of q, k, g are 16-byte aligned with contiguous elements, tokens less than 2 GiB apart; rows of a chunk
behind its sequence's end are not read and give zeros.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ...tile import inverse, panel
from ...tile.gate import Gate, sigmoid
from ...tile.mma import mma_16bit, mma_tf32
from ...tile.ptx import (
    as_float,
    exp2,
    fma,
    fmax,
    fmin,
    load_global,
    load_global_half,
    load_shared,
    load_shared_if,
    mad_wide,
    opaque,
    pack,
    rsqrt,
    select,
    store_global,
    store_shared,
    store_shared_if,
    to_tf32,
    unpack,
)
from ...tile.sequence import chunk_of_slot
from ..config import CHUNK, PrepareConfig

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "int32": Int32, "int64": Int64}
SHIFT = 60
LOWEST, HIGHEST = -120.0, 30.0
"""Of H, for rows that fit."""
AQK_ROW = 144
"""Bytes of a row of Aqk in shared memory."""
EPSILON = 1e-6
"""Of the L2 norm."""


class KdaPrepare:
    """The kernel for one `PrepareConfig`."""

    def __init__(self, config: PrepareConfig) -> None:
        self.config = config
        self.K = config.key_dim
        self.dtype = DTYPES[config.dtype]
        self.gate_dtype = DTYPES[config.gate_dtype]
        self.beta_dtype = DTYPES[config.beta_dtype]
        self.bf16 = self.dtype is BFloat16
        # Panels of scores: M', Aqk and, where it is wanted, M.
        self.scores = 3 if config.inverse else 2
        self.h_row = (self.K + 4) * 4
        # Exponents of the columns for later blocks, and what kg has to make up for.
        self.column_shift = SHIFT if self.bf16 else 0
        self.gate_columns = self.K // 32
        # Byte offsets in shared memory.
        self.at_m = inverse.BYTES
        self.at_vectors = 2 * inverse.BYTES
        self.at_powers = self.at_vectors + 4 * self.K * 4
        self.at_columns = self.at_vectors + CHUNK * AQK_ROW
        self.pair_bytes = self.K // 32 * 1024
        self.at_beta = self.at_columns + 6 * self.pair_bytes
        self.shared_bytes = self.at_beta + CHUNK * 4

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
            q, k, g, beta, a_log, dt_bias, cu_seqlens, factors, scores, decay, beta_eff, scale, lower_bound, beta_limit,
            slots // batches, by_head, by_batch, by_group,
        ).launch(
            grid=(slots * value_heads, 1, 1),
            block=(128, 1, 1),
            stream=stream,
            min_blocks_per_mp=3,
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
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        chunks: Int32,
        by_head: cute.FastDivmodDivisorV2,
        by_batch: cute.FastDivmodDivisorV2,
        by_group: cute.FastDivmodDivisorV2,
    ):
        # The scan may be put on SMs as they become free; it waits for this grid's end before it reads.
        cute.arch.griddepcontrol_launch_dependents()
        smem = cutlass.memory.SmemAllocator()
        sAll = smem.allocate(self.shared_bytes, 128).toint()
        # The last chunks come first, so that the first chunks' operands are the ones still in L2 when the scan starts.
        index, _, _ = cute.arch.block_idx()
        order, head = divmod(index, by_head)
        if const_expr(mCu is not None):
            slot = mFactors.shape[0] - 1 - order
            batch = Int32(0)
            first, rows = chunk_of_slot(mCu, slot)
        else:
            back, batch = divmod(order, by_batch)
            chunk = chunks - 1 - back
            slot = batch * chunks + chunk
            first = chunk * CHUNK
            rows = cutlass.min(mQ.shape[1] - first, CHUNK)
        key_head = head // by_group
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % 32
        warp = cute.arch.make_warp_uniform(tid // 32)
        # Behind the end the last row is read again; what is made of it is multiplied by zeros. A slot that is nobody's reads some row.
        last = cutlass.max(rows, 1) - 1
        place = (batch, cutlass.min(first, mQ.shape[1] - 1))
        a_log, dt_bias = self.load_parameters(mALog, mBias, head, lane)
        beta = self.load_beta(mBeta, place, cutlass.min(tid % CHUNK, last), head)
        gate = self.load_gate(mG, place, last, head, warp, lane)
        k = self.load_rows(self.row_addresses(mK, place, last, key_head, warp, lane))
        q = self.load_rows(self.row_addresses(mQ, place, last, key_head, warp, lane))
        # The branch keeps these loads above all else.
        if rows > 0:
            self.chunk(
                mQ, mK, mFactors, mScores, mDecay, mBetaEff, scale, lower_bound, beta_limit, sAll, place, rows, head, key_head,
                slot, warp, lane, a_log, dt_bias, beta, gate, k, q,
            )  # fmt: skip

    @cute.jit
    def chunk(
        self, mQ, mK, mFactors, mScores, mDecay, mBetaEff, scale, lower_bound, beta_limit, sAll, place, rows, head, key_head,
        slot, warp, lane, a_log, dt_bias, raw_beta, raw_gate, words_k, words_q,
    ):  # fmt: skip
        """All that follows the loads."""
        tid = 32 * warp + lane
        mine = 16 * warp + lane // 4  # rows mine, mine + 8
        valid = [mine + 8 * h < rows for h in range(2)]
        unit = Int64(slot) * mFactors.shape[1] + head
        to_beta = mBetaEff.iterator.toint() + unit * (CHUNK * 4) if const_expr(self.config.inverse) else None
        self.share_beta(raw_beta, rows, beta_limit, sAll, to_beta, tid)
        sH = sAll + warp * (16 * self.h_row)
        gates = [Gate(self.config.gate, a_log, x, lower_bound) for x in dt_bias]
        fits = self.sum_gate(raw_gate, gates, rows, sAll, sH, warp, lane)
        factor_q, factor_k = [scale] * 2, [Float32(1.0)] * 2
        if const_expr(self.config.l2norm):
            factor_q = [scale * x for x in self.row_norms(words_q, lane)]
            factor_k = self.row_norms(words_k, lane)
        factor_q = [select(v, x, 0.0) for v, x in zip(valid, factor_q, strict=True)]
        factor_k = [select(v, x, 0.0) for v, x in zip(valid, factor_k, strict=True)]
        cute.arch.sync_threads()

        if tid < self.K:
            self.powers(sAll, tid, mDecay.iterator.toint() + unit * (self.K * 4))
        cute.arch.sync_threads()

        out = mFactors.iterator.toint() + unit * (3 * self.K * CHUNK * 2)
        rows_q, rows_k, own_q, own_k = self.factors(words_q, words_k, factor_q, factor_k, sAll, sH, out, warp, lane)
        rQ = self.registers(own_q)
        rK = self.registers(own_k)
        if not fits:
            # Addresses anew from a lane number of their own: they would take eight registers until here.
            again = opaque(lane)
            from_q = self.row_addresses(mQ, place, rows - 1, key_head, warp, again)
            from_k = self.row_addresses(mK, place, rows - 1, key_head, warp, again)
            self.exact_block(rQ, rK, from_q, from_k, factor_q, factor_k, sH, lane)
        cute.arch.sync_threads()

        sBeta = sAll + self.at_beta
        beta = [load_shared(sBeta + mine * 4, 32 * h, 1)[0] for h in range(2)]
        self.write_scores(rQ, rK, beta, sAll, warp, warp, lane, True)
        for b in cutlass.range(warp, unroll=1):
            self.other_block(rows_q, rows_k, beta, sAll, b, warp, lane)
        cute.arch.sync_warp()
        image = mScores.iterator.toint() + unit * (self.scores * panel.BYTES)
        self.write_aqk(image + panel.BYTES, sAll, warp, lane)
        inverse.invert_block(sAll, sAll + self.at_m, warp, lane)
        inverse.invert_rest(sAll, sAll + self.at_m, warp, lane)
        self.write_inverse(image, sAll, rows, warp, lane)

    # ---- loads ---------------------------------------------------------------------------------------------------------------------
    def row_address(self, mX, place, head, column, size):
        """Of the first token's element of a [B, T, H, D] tensor; place is (batch entry, first token)."""
        offset = Int64(place[0]) * Int64(mX.stride[0]) + Int64(place[1]) * Int64(mX.stride[1])
        return mX.iterator.toint() + (offset + Int64(head) * Int64(mX.stride[2]) + Int64(column)) * size

    def row_addresses(self, mX, place, last, head, warp, lane):
        """Of this lane's first column in its two rows of q or k; `last` is the last row there is."""
        start = self.row_address(mX, place, head, 8 * (lane % 4), 2)
        rows = [cutlass.min(16 * warp + lane // 4 + 8 * h, last) for h in range(2)]
        return [mad_wide(row, Int32(mX.stride[1]) * 2, start) for row in rows]

    def load_rows(self, addresses):
        """This lane's words of q or k: [m][row r, row r + 8][4]."""
        return [[load_global(a, 64 * m, 4, early=True) for a in addresses] for m in range(self.K // 32)]

    def load_gate(self, mG, place, last, head, warp, lane):
        """This thread's words of the raw gate: [row of the block][words]."""
        size = self.gate_dtype.width // 8
        columns = self.gate_columns
        start = self.row_address(mG, place, head, columns * lane, size)
        step = Int32(mG.stride[1]) * size
        rows = [cutlass.min(16 * warp + i, last) for i in range(16)]
        return [load_global(mad_wide(row, step, start), 0, columns * size // 4, early=True) for row in rows]

    def load_parameters(self, mALog, mBias, head, lane):
        """A_log, and dt_bias of this thread's columns."""
        n = self.gate_columns
        a_log = None if mALog is None else load_global(mALog.iterator.toint() + Int64(head) * 4, 0, 1, Float32)[0]
        if mBias is None:
            return a_log, [None] * n
        return a_log, load_global(mBias.iterator.toint() + (Int64(head) * self.K + n * lane) * 4, 0, n, Float32)

    def load_beta(self, mBeta, place, row, head):
        size = self.beta_dtype.width // 8
        address = self.row_address(mBeta, place, head, 0, size)
        address = mad_wide(row, Int32(mBeta.stride[1]) * size, address)
        return load_global(address, 0, 1)[0] if size == 4 else load_global_half(address)

    @cute.jit
    def share_beta(self, word, rows, beta_limit, sAll, to_beta, tid):
        """beta of the 64 rows, as it enters L and M', to shared memory and, where wanted, out; 0 behind the end."""
        if const_expr(self.beta_dtype is Float32):
            beta = as_float(word)
        else:
            beta = unpack(self.beta_dtype, word)[0]
        if const_expr(self.config.beta_sigmoid):
            beta = sigmoid(beta) * beta_limit
        beta = select(tid < rows, beta, 0.0)
        if tid < CHUNK:
            store_shared(sAll + self.at_beta + tid * 4, 0, [beta])
            if const_expr(self.config.inverse):
                store_global(to_beta + Int64(tid) * 4, 0, [beta])

    # ---- gate ----------------------------------------------------------------------------------------------------------------------
    def sum_gate(self, raw, gates, rows, sAll, sH, warp, lane):
        """H + 60 of the warp's block and t_b to shared memory: H_i = H_(i-1) + log2 decay_i. Returns whether every row fits."""
        n = self.gate_columns
        sums = [Float32(0.0)] * n
        low = high = Float32(0.0)
        for i in range(16):
            factor = gates[0].factor(16 * warp + i < rows)
            for x, value in enumerate(self.numbers(raw[i])):
                sums[x] = fma(factor, gates[x].value(value), sums[x])
                if self.config.gate == "log":
                    low, high = fmin(low, sums[x]), fmax(high, sums[x])
            store_shared(sH + lane * (4 * n), i * self.h_row, [x + float(SHIFT) for x in sums])
        if self.config.gate != "log":
            # These gates are negative: the last row is the lowest.
            for x in sums:
                low = fmin(low, x)
        store_shared(sAll + self.at_vectors + warp * (self.K * 4) + lane * (4 * n), 0, sums)
        fits = (low >= Float32(LOWEST)) & (high <= Float32(HIGHEST))
        return cute.arch.vote_all_sync(fits)

    def numbers(self, words):
        """The gate's numbers in a vector's words."""
        if self.gate_dtype is Float32:
            return [as_float(w) for w in words]
        return [x for w in words for x in unpack(self.gate_dtype, w)]

    def row_norms(self, words, lane):
        """1 / sqrt(|x|^2 + epsilon) of rows r, r + 8: squares of norms are the diagonal of x x^T."""
        own = [[Float32(0.0)] * 4 for _ in range(2)]
        for m in range(self.K // 32):
            for n in range(2):
                own[n] = self.product(words[m], words[m][n], own[n])
        r = lane // 4
        holder = 4 * r + r // 2
        return [
            rsqrt(cute.arch.shuffle_sync(select(r & 1, own[h][2 * h + 1], own[h][2 * h]), holder) + EPSILON)
            for h in range(2)
        ]

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
    def powers(self, sAll, column, decay):
        """One column's 2^(sums of t) for every block to shared memory, and 2^(G_C) to global memory. Rows of the table:

        b      2^(t before b) without the rows' 2^60       4 + b   2^(t after b), with 2^60 where the columns lack it
        8, 9   2^t_1, 2^t_2                                10      2^(t_1 + t_2)
        """
        sT = sAll + self.at_vectors + column * 4
        t = [load_shared(sT, b * self.K * 4, 1)[0] for b in range(4)]
        middle = t[1] + t[2]
        total = t[0] + middle + t[3]
        before = [Float32(0.0), t[0], t[0] + t[1], t[0] + middle]
        after = [middle + t[3], t[2] + t[3], t[3], Float32(0.0)]
        table = (
            [x - float(SHIFT) for x in before] + [x + float(self.column_shift) for x in after] + [t[1], t[2], middle]
        )
        for i, x in enumerate(table):
            store_shared(sT, self.at_powers - self.at_vectors + i * self.K * 4, [exp2(x)])
        store_global(decay + Int64(column) * 4, 0, [exp2(total)])

    @cute.jit
    def factors(self, words_q, words_k, factor_q, factor_k, sAll, sH, out, warp, lane):
        """qg, kd, kg out; columns for later blocks to shared memory; own block's scores.

        Returns the words of the rows [m][row][4] and the own block's sums [tile][4], for q and for k.
        """
        r, t = lane // 4, lane % 4
        images = const_expr(self.K // 64 * panel.BYTES)
        out = out + Int64((16 * warp + r) * panel.ROW)
        places = [out + Int64((v ^ r) * 16) for v in (t, 4 + t)]
        own_q = [[Float32(0.0)] * 4 for _ in range(2)]
        own_k = [[Float32(0.0)] * 4 for _ in range(2)]
        rows_q, rows_k = [], []
        for m in cutlass.range_constexpr(self.K // 32):
            column = 32 * m + 8 * t
            x = []
            for h in cutlass.range_constexpr(2):
                sRow = sH + (r + 8 * h) * self.h_row + column * 4
                x.append(
                    self.elements(words_q[m][h], words_k[m][h], factor_q[h], factor_k[h], sAll, sRow, warp, column)
                )
                offset = m // 2 * panel.BYTES + h * 8 * panel.ROW
                for i, name in enumerate(("kd", "qg", "kg")):
                    store_global(places[m % 2], offset + i * images, x[h][name])
                self.share_columns(x[h]["later"], sAll, sAll + self.at_powers + column * 4, m, h, warp, lane)
            for n in cutlass.range_constexpr(2):
                if const_expr(self.bf16):
                    own_q[n] = self.product([y["q"] for y in x], x[n]["own"], own_q[n])
                    own_k[n] = self.product([y["k"] for y in x], x[n]["own"], own_k[n])
                else:
                    own_q[n] = self.product_tf32([y["q32"] for y in x], x[n]["own"], own_q[n])
                    own_k[n] = self.product_tf32([y["k32"] for y in x], x[n]["own"], own_k[n])
            rows_q.append([y["q"] for y in x])
            rows_k.append([y["k"] for y in x])
        return rows_q, rows_k, own_q, own_k

    def elements(self, words_q, words_k, factor_q, factor_k, sAll, sRow, warp, column):
        """All that is elementwise, for 8 columns of a row: words of every product, by name.

        "later": k 2^(t_b - H) in fp32, from which the columns for later blocks are made.
        """
        names = ("q", "k", "own", "qg", "kd", "kg", "later") + (() if self.bf16 else ("q32", "k32"))
        out = {name: [] for name in names}
        sT = sAll + self.at_vectors + warp * (self.K * 4) + column * 4
        sPowers = sAll + self.at_powers + warp * (self.K * 4) + column * 4
        for u in range(2):
            H = load_shared(sRow, 16 * u, 4)
            total = load_shared(sT, 16 * u, 4)
            before = load_shared(sPowers, 16 * u, 4)
            after = load_shared(sPowers, 16 * u + 4 * self.K * 4, 4)
            if not self.bf16:
                total = [x + float(SHIFT) for x in total]
            q = [x * factor_q for w in words_q[2 * u : 2 * u + 2] for x in unpack(self.dtype, w)]
            k = [x * factor_k for w in words_k[2 * u : 2 * u + 2] for x in unpack(self.dtype, w)]
            up = [exp2(x) for x in H]
            row_q = [a * b for a, b in zip(q, up, strict=True)]
            row_k = [a * b for a, b in zip(k, up, strict=True)]
            own = [a * exp2(-b) for a, b in zip(k, H, strict=True)]
            end = [a * exp2(b - c) for a, b, c in zip(k, total, H, strict=True)]
            out["later"].extend(end)
            out["qg"].extend(self.packed([a * b for a, b in zip(row_q, before, strict=True)]))
            out["kd"].extend(self.packed([-a * b for a, b in zip(row_k, before, strict=True)]))
            out["kg"].extend(self.packed([a * b for a, b in zip(end, after, strict=True)]))
            if self.bf16:
                out["q"].extend(self.packed(row_q))
                out["k"].extend(self.packed(row_k))
                out["own"].extend(self.packed(own))
            else:
                out["q"].extend(self.packed([x * 2.0**-SHIFT for x in row_q]))
                out["k"].extend(self.packed([x * 2.0**-SHIFT for x in row_k]))
                for name, values in (("q32", row_q), ("k32", row_k), ("own", own)):
                    out[name].extend(to_tf32(x) for x in values)
        return out

    def packed(self, x):
        return [pack(self.dtype, x[i], x[i + 1]) for i in range(0, len(x), 2)]

    @cute.jit
    def share_columns(self, later, sAll, sPowers, m, h, warp, lane):
        """8 columns of a row, as B fragments for blocks b = warp + 1, + 2, + 3: times 2^(t strictly between). Block 3 wants none made."""
        self.share(later, None, sAll, m, h, warp, 1, lane)
        if warp < 2:
            self.share(later, sPowers + (8 + warp) * (self.K * 4), sAll, m, h, warp, 2, lane)
            self.share(later, sPowers + 10 * (self.K * 4), sAll, m, h, warp, 3, lane)

    def share(self, later, sPowers, sAll, m, h, own, distance, lane):
        to = sAll + self.at_columns + own * self.pair_bytes + lane * 16
        offset = self.pair_bytes * (0, 3, 5)[distance - 1] + m * 1024 + h * 512
        if sPowers is not None:
            powers = [x for u in range(2) for x in load_shared(sPowers, 16 * u, 4)]
            later = [a * p for a, p in zip(later, powers, strict=True)]
        store_shared_if(to, offset, self.packed(later), Int32(own + distance < 4))

    # ---- scores --------------------------------------------------------------------------------------------------------------------
    def registers(self, sums):
        r = cute.make_rmem_tensor((4, 2), Float32)
        for n in range(2):
            for i in range(4):
                r[i, n] = sums[n][i]
        return r

    @cute.jit
    def other_block(self, rows_q, rows_k, beta, sAll, b, warp, lane):
        """Scores of the warp's rows with the columns of block b before it."""
        sums_q = [[Float32(0.0)] * 4 for _ in range(2)]
        sums_k = [[Float32(0.0)] * 4 for _ in range(2)]
        distance = warp - b
        pair = ((distance - 1) * (8 - distance) >> 1) + b
        sColumns = sAll + self.at_columns + pair * self.pair_bytes + lane * 16
        for m in cutlass.range_constexpr(self.K // 32):
            for n in cutlass.range_constexpr(2):
                column = load_shared(sColumns, m * 1024 + n * 512, 4, Uint32)
                sums_q[n] = self.product(rows_q[m], column, sums_q[n])
                sums_k[n] = self.product(rows_k[m], column, sums_k[n])
        self.write_scores(self.registers(sums_q), self.registers(sums_k), beta, sAll, b, warp, lane, False)

    def write_scores(self, rQ, rK, beta, sAll, b, warp, lane, diagonal):
        """A 16x16 block of Aqk in the io type and of L = diag(beta) K K^T in fp32 to shared memory; above the diagonal zeros."""
        r, t = lane // 4, lane % 4
        row = 16 * warp + r
        sA = sAll + self.at_vectors + row * AQK_ROW + (16 * b + 2 * t) * 2
        sL = sAll + inverse.at(row, 16 * b + 2 * t)
        for n in range(2):
            for h in range(2):
                q, k = [rQ[2 * h + c, n] for c in range(2)], [rK[2 * h + c, n] * beta[h] for c in range(2)]
                if diagonal:
                    i, j = r + 8 * h, 8 * n + 2 * t
                    q = [select(Int32(i >= j + c), q[c], 0.0) for c in range(2)]
                    k = [select(Int32(i > j + c), k[c], 0.0) for c in range(2)]
                store_shared(sA, 8 * h * AQK_ROW + 16 * n, self.packed(q))
                store_shared(sL, inverse.at(8 * h, 8 * n), k)

    @cute.jit
    def exact_block(self, rQ, rK, from_q, from_k, factor_q, factor_k, sH, lane):
        """Own block's scores of the rows that do not fit, with factors of at most 1 (for gates that do not grow).

        Rows i and j of which l = 8, 4, 2 or 1 is the highest different bit of the number meet at the last row before i's half,
        ref = (i and not (2l - 1)) + l - 1: x_i 2^(H_i - H_ref) with k_j 2^(H_ref - H_j). i = j: no factor.
        """
        r, t = lane // 4, lane % 4
        first_bad = self.first_bad_row(sH, lane)
        for step in cutlass.range(5, unroll=1):
            bit = Int32(8) >> step
            sums_q = cute.make_rmem_tensor((4, 2), Float32)
            sums_k = cute.make_rmem_tensor((4, 2), Float32)
            sums_q.fill(0.0)
            sums_k.fill(0.0)
            for m in cutlass.range(self.K // 32, unroll=1):
                upper_q, upper_k, lower = [], [], []
                for h in cutlass.range_constexpr(2):
                    x, y = (load_global(a[h] + Int64(m) * 64, 0, 4) for a in (from_q, from_k))
                    a, b, c = self.exact_words(
                        x, y, factor_q[h], factor_k[h], sH + (32 * m + 8 * t) * 4, r + 8 * h, bit
                    )
                    upper_q.append(a)
                    upper_k.append(b)
                    lower.append(c)
                for n in cutlass.range_constexpr(2):
                    q = self.product(upper_q, lower[n], [sums_q[i, n] for i in range(4)])
                    k = self.product(upper_k, lower[n], [sums_k[i, n] for i in range(4)])
                    for i in cutlass.range_constexpr(4):
                        sums_q[i, n] = q[i]
                        sums_k[i, n] = k[i]
            for n in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(4):
                    i, j = r + 8 * (e // 2), 8 * n + 2 * t + e % 2
                    # The highest different bit is `bit`; in the last pass there is none.
                    meet = (i ^ j) // cutlass.max(bit, 1) == cutlass.min(bit, 1)
                    taken = Int32(meet & (i >= j) & (i >= first_bad))
                    rQ[e, n] = select(taken, sums_q[e, n], rQ[e, n])
                    rK[e, n] = select(taken, sums_k[e, n], rK[e, n])

    def exact_words(self, words_q, words_k, factor_q, factor_k, sColumn, row, bit):
        """Words of q and k as rows of the upper half, of k as columns of the lower half; zeros where the row is in the other half."""
        upper = Int32((row & bit) != 0) | Int32(bit == 0)
        lower = Int32((row & bit) == 0)
        # Without a bit 2l - 1 is -1: ref would be row -1, and is the row itself.
        ref = cutlass.max((row & ~(2 * bit - 1)) + bit - 1, row * Int32(bit == 0))
        q, k, c = [], [], []
        for u in range(2):
            H = load_shared(sColumn + row * self.h_row, 16 * u, 4)
            Href = load_shared(sColumn + ref * self.h_row, 16 * u, 4)
            for e in range(4):
                d = H[e] - Href[e]
                f = exp2(select(upper, d, -d))
                part = 4 * u + e
                x = unpack(self.dtype, words_q[part // 2])[part % 2] * factor_q
                y = unpack(self.dtype, words_k[part // 2])[part % 2] * factor_k
                q.append(select(upper, x * f, 0.0))
                k.append(select(upper, y * f, 0.0))
                c.append(select(lower, y * f, 0.0))
        return self.packed(q), self.packed(k), self.packed(c)

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

    # ---- M' and Aqk out ------------------------------------------------------------------------------------------------------------
    def write_aqk(self, image, sAll, warp, lane):
        """The warp's 16 rows; zeros to the right of its own block."""
        vector = lane % 8
        for i in range(0, 16, 4):
            row = 16 * warp + i + lane // 8
            words = load_shared_if(
                sAll + self.at_vectors + row * AQK_ROW + vector * 16, 0, 4, Int32(vector // 2 <= warp), Uint32
            )
            store_global(image + Int64(panel.vector_offset(row, vector)), 0, words)

    def write_inverse(self, image, sAll, rows, warp, lane):
        """M' = M diag(beta) and, where wanted, M, the warp's 16 rows; zeros to the right of its own block and behind the end."""
        vector = lane % 8
        valid = Int32(vector // 2 <= warp)
        beta = [x for u in range(2) for x in load_shared(sAll + self.at_beta + vector * 32, 16 * u, 4)]
        for i in range(0, 16, 4):
            row = 16 * warp + i + lane // 8
            m = [
                x
                for u in range(2)
                for x in load_shared_if(sAll + self.at_m + inverse.at(row, 8 * vector), 16 * u, 4, valid, Float32)
            ]
            to = image + Int64(panel.vector_offset(row, vector))
            store_global(to, 0, self.packed([a * b for a, b in zip(m, beta, strict=True)]))
            if self.config.inverse:
                # Behind the end L is 0 and beta too, but the inverse has ones on its diagonal.
                store_global(to, 2 * panel.BYTES, self.packed([select(row < rows, x, 0.0) for x in m]))


def compile(config: PrepareConfig):
    """The launch function for `config`:

    `(q, k, g, beta, a_log | None, dt_bias | None, cu_seqlens | None, factors, scores, decay, beta_eff | None, scale, lower_bound,
    beta_limit)`, None where the config does not have it. q, k [B, T, H, K]; g [B, T, HV, K]; beta [B, T, HV]; a_log fp32 [HV]; dt_bias
    fp32 [HV * K], 16-byte aligned; cu_seqlens [N + 1]; contiguous factors [slots, HV, 3, K / 64, 64, 64], scores [slots, HV, 2, 64, 64]
    (M', Aqk) and decay fp32 [slots, HV, K]; with `inverse` scores [slots, HV, 3, 64, 64] (M', Aqk, M) and beta_eff fp32 [slots, HV, 64];
    floats scale, lower_bound (of gate "bounded"), beta_limit (the factor of beta's sigmoid). At least one token.
    """
    batch, tokens, heads, value_heads, slots = (cute.sym_int() for _ in range(5))
    io, K = DTYPES[config.dtype], config.key_dim
    kernel = KdaPrepare(config)

    def strided(dtype, shape, align):
        whole = align * 8 // dtype.width
        strides = tuple(cute.sym_int64(divisibility=whole) for _ in shape[1:])
        return make_fake_tensor(dtype, shape, stride=(*strides, 1), assumed_align=align)

    def packed(dtype, shape):
        return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)

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
        packed(Float32, (value_heads,)) if config.a_log else None,
        packed(Float32, (cute.sym_int(),)) if config.dt_bias else None,
        packed(DTYPES[config.cu_seqlens], (cute.sym_int(),)) if config.cu_seqlens else None,
        packed(io, (slots, value_heads, 3, K // 64, 64, 64)),
        packed(io, (slots, value_heads, kernel.scores, 64, 64)),
        packed(Float32, (slots, value_heads, K)),
        packed(Float32, (slots, value_heads, CHUNK)) if config.inverse else None,
        Float32(1.0),
        Float32(1.0),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
