"""KDA backward, last kernel: from the gradients of a chunk's factors and scores to those of q, k, gate and beta.

G is the inclusive cumulative sum of the gate's base-2 logarithms within the chunk of 64 tokens, s the scale; q and k here are
those after the L2 norm, beta that after the sigmoid. Given dqg, dkd, dkg (of qg = s q 2^G, kd = -k 2^G, kg = k 2^(G_C - G)),
dA of Aqk and dL of L, and dGi, what these factors and the chunk's decay give to dG:

    Y_i = sum_{j <= i} dA_ij k_j 2^(G_i - G_j)          X_i = sum_{j < i} dL_ij k_j 2^(G_i - G_j)
    Z_j = sum_{i >= j} s dA_ij q_i 2^(G_i - G_j) + sum_{i > j} beta_i dL_ij k_i 2^(G_i - G_j)

    dq = s (2^G dqg + Y)                                dbeta = direct + sum_d k X
    dk = 2^(G_C - G) dkg - 2^G dkd + beta X + Z         dG = dGi + s q Y + beta k X - k Z
    dg_i = sum_{i' >= i} dG_i'                          dA_log = sum dG G ln 2 where the gate is linear in e^A (softplus)

then the derivatives of gate, sigmoid and L2 norm: of x' = n x, n = 1 / sqrt(|x|^2 + epsilon), dx = n (dx' - (x' . dx') x'). k' . dk' is
known (`direct`), so that dk is rounded once, on its way out; q' . dq' is a sum over all columns, for which dq waits in fp32.

One CTA makes one chunk of one value head. Warp (b, c) owns rows 16b .. 16b + 15, "block b", of columns 64c .. 64c + 63:
4 warps for K = 64, 8 for K = 128. Warp-level instructions only. The gate's side is in `kda_intra_gate`.

Exponents. H is the cumulative sum within a block, t_b its last row. With S = 60 for bf16 and 0 for fp16, every block has one
version of its operands:

    rows  q_i, beta_i k_i  times 2^(H_i + S)            columns  k_j 2^(c_b - H_j - S)

c_b = 0 where the block's H are within -120 .. 30 ("fits") and the type is bf16: rows and columns of the block then meet directly.
Else c_b = t_b, all factors are at most 1, and the own block is done by `kda_intra_exact`: at once in tf32 where it fits, level by
level where it does not. Between blocks, sums decay in the accumulators: after the products with a block they are multiplied by a
vector over columns (`powers`).

Registers. Lane 4 r + t has, of rows r and r + 8, columns 32 p + 8 t .. + 7 of the warp's 64 for p = 0, 1: 16 bytes of the io type, which
is what a load or store takes. "Group" c is half of that, columns 32 (c / 2) + 8 t + 4 (c % 2) .. + 3 of all t. Tile u = 0, 1 of the
products over these 16 columns has the lane's columns 2 u, 2 u + 1 as its 2 t, 2 t + 1, so that accumulators are these elements. Products
and what follows are done group by group; dk leaves by pairs of groups, dq waits for what the norm takes away. The gate goes the other
way, a lane has 2 columns of the block's 16 rows, and crosses over through shared memory: H on the way in, dG on the way out. In odd rows
neighbouring 16 bytes change places, so that both ways are free of bank conflicts.

Registers are short: little may be spilled where blocks fit, since a stack of all CTAs is as large as L2. Loads are `early`, where
nothing would wait for them otherwise, and addresses are made anew rather than kept. q and the raw gate come a second time from L2.

Timeline (| is a barrier of the CTA)
    q, k, g, beta into registers; dA and dL to shared memory by a bulk copy; H; |x|^2 | the other gradients on their way to L2;
    a thread a column: powers; operands to shared memory; wait for the copy | by groups: products, dq, dG, dk out; row sums; dG summed
    over a block's rows | dq, dbeta, dg out | sums over blocks for dt_bias, over warps for A_log

Shared memory, bytes (K = 128: 113,704)
    images     16,384  dA, dL
    operands   49,152  q, k, beta k: [K / 64] panels each
    H, dG      32,768  [64][K] fp32
    vectors    12,288  [24][K] fp32
    rows        3,104  factors [6][64], sums [3][K / 64][64], sums of warps [8], fp32
    mbarrier        8  of the copy
Two CTAs an SM with K = 128, three with K = 64: 128 and 168 registers a thread.

Constraints: K 64 or 128; rows of q, k, g, dq, dk, dg are 16-byte aligned with contiguous elements; rows of dfactors and dGi, and
rows and columns of dscores, behind a sequence's end are zeros. H + 60 stays below 127 within a block, also of gates that grow.
"""

# mypy: ignore-errors

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ...tile import blocks, panel
from ...tile.arguments import DTYPES
from ...tile.fetch import copy_bulk, prefetch_bulk
from ...tile.gate import sigmoid
from ...tile.gate_gradient import sigmoid_slope
from ...tile.lanes import sum_lanes
from ...tile.matrices import load, load_transposed, store
from ...tile.mma import mma_16bit
from ...tile.ptx import (
    exp2,
    fma,
    load_global,
    load_global_half,
    load_shared,
    load_shared_if,
    opaque,
    pack,
    rsqrt,
    select,
    store_shared,
    store_shared_if,
    unpack,
)
from ...tile.sequence import chunk_of_slot
from ...tile.uncached import load_uncached
from ..config import CHUNK, IntraConfig
from .kda_intra_exact import OwnBlocks
from .kda_intra_gate import (
    AFTER,
    ALONG,
    BEFORE,
    BETA,
    BETA_K,
    COLUMN,
    LAST,
    LATER,
    LINK,
    NORM_K,
    NORM_Q,
    OF_BETA,
    OF_K,
    OF_Q,
    SCALE_Q,
    TOTAL,
    GateSide,
    store_global_if,
)

EPSILON = 1e-6
"""Of the L2 norm."""


class KdaIntra(OwnBlocks, GateSide):
    """The kernel for one `IntraConfig`."""

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
        dfactors: cute.Tensor,
        dscores: cute.Tensor,
        dgi: cute.Tensor,
        direct: cute.Tensor,
        dq: cute.Tensor,
        dk: cute.Tensor,
        dg: cute.Tensor,
        dbeta: cute.Tensor,
        da_log: cute.Tensor | None,
        ddt_bias: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        stream,
    ):
        """Launch: one CTA for a slot and value head."""
        slots, value_heads, batches = dfactors.shape[0], dfactors.shape[1], q.shape[0]
        divisors = tuple(
            cute.fast_divmod_create_divisor_v2(n) for n in (value_heads, slots // batches, value_heads // q.shape[2])
        )
        # The carveout is given, for without it the DSL asks a driver while it compiles.
        self.kernel(
            q, k, g, beta, a_log, dt_bias, cu_seqlens, dfactors, dscores, dgi, direct, dq, dk, dg, dbeta, da_log, ddt_bias, scale,
            lower_bound, beta_limit, *divisors,
        ).launch(
            grid=(slots * value_heads, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=4 - self.halves,
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
        mDfactors: cute.Tensor,
        mDscores: cute.Tensor,
        mDgi: cute.Tensor,
        mDirect: cute.Tensor,
        mDq: cute.Tensor,
        mDk: cute.Tensor,
        mDg: cute.Tensor,
        mDbeta: cute.Tensor,
        mDalog: cute.Tensor | None,
        mDbias: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        by_head: cute.FastDivmodDivisorV2,
        by_chunks: cute.FastDivmodDivisorV2,
        by_group: cute.FastDivmodDivisorV2,
    ):
        smem = cutlass.memory.SmemAllocator()
        sAll = smem.allocate(self.shared_bytes, 1024).toint()
        copied = smem.allocate_array(Int64, 1, byte_alignment=8)
        index, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        value_heads = mDfactors.shape[1]
        slot, head = divmod(index, by_head)
        if const_expr(mCu is not None):
            # No number: a branch turns constants that it finds in x into values of its own.
            batch = None
            first, rows = chunk_of_slot(mCu, slot, Int32(mQ.shape[1]))
        else:
            batch, chunk = divmod(slot, by_chunks)
            first = chunk * CHUNK
            rows = cutlass.min(mQ.shape[1] - first, CHUNK)
        warp = cute.arch.make_warp_uniform(tid >> 5)
        x = SimpleNamespace(
            sAll=sAll, batch=batch, first=first, rows=rows, head=head, slot=slot, tid=tid, lane=tid & 31,
            block=warp & 3, half=warp >> 2, unit=Int64(slot) * value_heads + head, key_head=head // by_group,
            scale=scale, lower_bound=lower_bound, beta_limit=beta_limit,
        )  # fmt: skip
        if rows > 0:
            self.chunk(
                x, copied, mQ, mK, mG, mBeta, mALog, mBias, mDfactors, mDscores, mDgi, mDirect, mDq, mDk, mDg, mDbeta, mDalog, mDbias,
            )  # fmt: skip
        elif tid < self.K:
            self.no_chunk(x, mDalog, mDbias)

    @cute.jit
    def no_chunk(self, x, mDalog, mDbias):
        """The slot is nobody's: its partial sums are zeros."""
        if const_expr(mDalog is not None):  # noqa: SIM102
            if x.tid == 0:
                mDalog[x.slot, x.head] = Float32(0.0)
        if const_expr(mDbias is not None):
            mDbias[x.slot, x.head, x.tid] = Float32(0.0)

    @cute.jit
    def chunk(
        self, x, copied, mQ, mK, mG, mBeta, mALog, mBias, mDfactors, mDscores, mDgi, mDirect, mDq, mDk, mDg, mDbeta, mDalog, mDbias,
    ):  # fmt: skip
        self.places(x)
        raw = self.load_gate(x, mG)
        words_q, words_k = (self.load_rows(x, m) for m in (mQ, mK))
        self.fetch(x, copied, mDscores)
        self.load_beta(x, mBeta, mDirect)
        x.fits = self.sum_gate(x, raw, mALog, mBias)
        if const_expr(self.config.l2norm):
            for operand, words in ((OF_Q, words_q), (OF_K, words_k)):
                self.put_squares(x, operand, words)
        cute.arch.sync_threads()

        self.expect(x, mDfactors, mDgi)
        if x.tid < self.K:
            self.powers(x)
        scalars = self.row_scalars(x)
        for c in cutlass.range_constexpr(4):
            self.share_operands(x, words_q, words_k, scalars, c)
        cute.arch.mbarrier_wait(copied, 0)
        cute.arch.sync_threads()

        # dq [c][h][4], still without what the norm takes away; sums over columns [kind][row]; the sum for A_log.
        x.rSums, x.rALog = cute.make_rmem_tensor((3, 2), Float32), cute.make_rmem_tensor((1,), Float32)
        x.rSums.fill(0.0)
        x.rALog.fill(0.0)
        x.rDq = cute.make_rmem_tensor((4, 2, 4), Float32)
        # Words [dq, dk][h][2] of a pair's first group, where the second follows at once.
        x.rPair = cute.make_rmem_tensor((2, 2, 2), Uint32)
        x.rExact = self.exact_sums()
        if not x.fits:
            self.own_block_exactly(x, mQ, mK)
        x = self.afresh(x)
        inner = (x.mine * self.K + x.column) * 2
        x.aD = mDfactors.iterator.toint() + x.unit * (3 * CHUNK * self.K * 2) + Int64(inner)
        x.aGi = mDgi.iterator.toint() + x.unit * (CHUNK * self.K * 4) + Int64(2 * inner)
        for groups in const_expr(self.plan):
            self.columns(x, groups, mQ, mK, mDq, mDk)
        cute.arch.sync_warp()
        x = self.afresh(x)
        # What the rest needs is on its way before the barrier.
        if const_expr(self.config.l2norm):
            words_q = self.load_rows(x, mQ)
        direct = self.load_direct(x, mDirect)
        raw_beta = None
        if const_expr(self.config.beta_sigmoid):
            raw_beta = self.raw_beta(x, mBeta)
        self.put_sums(x)
        self.sum_columns(x, mDalog)
        cute.arch.sync_threads()

        if const_expr(self.config.l2norm):
            self.write_queries(x, mDq, words_q)
        if const_expr(self.config.gate != "log"):
            raw = self.load_gate(x, mG)
        if x.tid < CHUNK:
            self.write_beta(x, raw_beta, direct, mDbeta)
        self.write_gate(x, raw, mDg, mALog, mBias)
        if const_expr(mDalog is not None or mDbias is not None):
            cute.arch.sync_threads()
            if x.tid < self.K:
                self.write_partials(x, mDalog, mDbias)

    # ---- where things are ----------------------------------------------------------------------------------------------------------
    def places(self, x):
        """Addresses in shared memory of this lane's elements: by rows (r, r + 8; 4 columns of a group) and by columns (2 and 16 rows)."""
        x.r, x.t = x.lane >> 2, x.lane & 3
        x.mine = 16 * x.block + x.r
        x.column, x.gate_column = 64 * x.half + 8 * x.t, 64 * x.half + 2 * x.lane
        by_rows, by_columns = x.column * 4, x.gate_column * 4
        x.sBlockH = x.sAll + self.at_h + 16 * x.block * self.h_row + by_rows
        x.sH = self.row_of_gate(x, x.r)
        x.sGate = x.sAll + self.at_h + 16 * x.block * self.h_row + by_columns
        x.sOddGate = x.sGate ^ 16
        x.sVectors = x.sAll + self.at_vectors + by_rows
        x.sOwn = x.sVectors + x.block * self.vector
        x.sOwnGate = x.sAll + self.at_vectors + x.block * self.vector + by_columns
        x.sRows = x.sAll + self.at_beta + x.mine * 4
        # Of the images: blocks and transposed blocks of the block's rows or columns. Of the operands: B operands, and the warp's own rows.
        x.sBlocks = blocks.block_address(x.sAll, x.lane) + x.block * blocks.ROWS
        x.sTransposed = blocks.transposed_address(x.sAll, x.lane) ^ (32 * x.block)
        sOperands = x.sAll + self.at_operands + x.half * panel.BYTES
        x.sColumns = blocks.block_address(sOperands, x.lane)
        x.sMine = x.sColumns + x.block * blocks.ROWS

    def afresh(self, x):
        """x with addresses made anew: they would take registers from here to there."""
        x = SimpleNamespace(**vars(x))
        x.tid = opaque(x.tid)
        x.lane = x.tid & 31
        self.places(x)
        return x

    def row_of_gate(self, x, row):
        """Address of H and dG of group 0 in a row of the block; `^ at_group(c, 4)` makes it that of group c."""
        return (x.sBlockH + row * self.h_row) ^ (16 * (row & 1))

    def row_addresses(self, mX, x, head, size):
        """Of this lane's first column in its two rows; behind the end, in the last row."""
        mine = opaque(x.mine)
        rows = [cutlass.min(mine + 8 * h, x.rows - 1) for h in range(2)]
        return [self.row_address(mX, x, row, x.column, head, size) for row in rows]

    def at_group(self, c, size):
        """Offset of this lane's 4 columns of group c."""
        return (32 * (c // 2) + 4 * (c % 2)) * size

    def vector_of(self, address, row, c):
        """This lane's columns of a row of the table of vectors."""
        return load_shared(address + row * self.vector, self.at_group(c, 4), 4)

    def sums_of_gate(self, x, h, c):
        """H in row r + 8 h."""
        return load_shared(x.sH ^ self.at_group(c, 4), 8 * h * self.h_row, 4)

    def scalars_of(self, x, which):
        """Of rows r, r + 8."""
        return [load_shared(x.sRows, which * (CHUNK * 4) + 32 * h, 1)[0] for h in range(2)]

    def numbers(self, words):
        """The numbers in words of the io type."""
        return [f for w in words for f in unpack(self.dtype, w)]

    def packed(self, f):
        return [pack(self.dtype, f[i], f[i + 1]) for i in range(0, len(f), 2)]

    # ---- loads ---------------------------------------------------------------------------------------------------------------------
    @cute.jit
    def fetch(self, x, copied, mDscores):
        """dA and dL on their way to shared memory."""
        if x.tid == 0:
            cute.arch.mbarrier_init(copied, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(copied, 2 * panel.BYTES)
            scores = mDscores.iterator.toint() + x.unit * (2 * panel.BYTES)
            copy_bulk(x.sAll, scores, 2 * panel.BYTES, copied.toint())

    @cute.jit
    def expect(self, x, mDfactors, mDgi):
        """The other gradients on their way to L2: not before what is waited for first."""
        if x.tid == 0:
            factors, known = 3 * CHUNK * self.K * 2, CHUNK * self.K * 4
            prefetch_bulk(mDfactors.iterator.toint() + x.unit * factors, factors)
            prefetch_bulk(mDgi.iterator.toint() + x.unit * known, known)

    def load_rows(self, x, mX):
        """This lane's words of q or k: [pair of groups][row r, row r + 8][4]."""
        addresses = self.row_addresses(mX, x, x.key_head, 2)
        return [[load_global(a, self.at_group(2 * p, 2), 4, early=True) for a in addresses] for p in range(2)]

    def group_of(self, words, c, h):
        """The words of group c in row r + 8 h, of those of pairs."""
        return words[c // 2][h][2 * (c % 2) :][:2]

    def load_gradients(self, x, groups):
        """This lane's words of neighbouring groups, of dkg, dqg and dkd: [which][row r, row r + 8][2 a group]."""
        # The first to be used goes first.
        places = [which * (CHUNK * self.K * 2) + self.at_group(groups[0], 2) for which in (2, 0, 1)]
        rows = [h * (8 * self.K * 2) for h in range(2)]
        return [[load_uncached(x.aD, at + row, 2 * len(groups), early=True) for row in rows] for at in places]

    def load_known(self, x, c):
        """What is known of dG in group c: [row r, row r + 8][4]."""
        places = [h * (8 * self.K * 4) + self.at_group(c, 4) for h in range(2)]
        return [load_global(x.aGi, at, 4, Float32) for at in places]

    def raw_beta(self, x, mBeta):
        """Row `tid`, behind the end the last one."""
        row = cutlass.min(x.tid, x.rows - 1)
        address = self.row_address(mBeta, x, row, 0, x.head, self.beta_dtype.width // 8)
        if self.beta_dtype is Float32:
            return load_global(address, 0, 1, Float32, early=True)[0]
        return unpack(self.beta_dtype, load_global_half(address, early=True))[0]

    def load_direct(self, x, mDirect):
        """What is known of dbeta in row `tid`, behind the end in the last one."""
        return self.direct_of(x, mDirect, 0, cutlass.min(x.tid, CHUNK - 1))

    def direct_of(self, x, mDirect, which, row):
        at = (x.unit * (1 + self.halves) + which) * CHUNK + row
        return load_global(mDirect.iterator.toint() + at * 4, 0, 1, Float32, early=True)[0]

    @cute.jit
    def load_beta(self, x, mBeta, mDirect):
        """beta of the 64 rows, as it enters L, to shared memory, 0 behind the end; and -k' . dk', by the next two warps."""
        if x.tid < CHUNK:
            beta = self.raw_beta(x, mBeta)
            if const_expr(self.config.beta_sigmoid):
                beta = sigmoid(beta) * x.beta_limit
            store_shared(x.sAll + self.at_beta + x.tid * 4, 0, [select(x.tid < x.rows, beta, 0.0)])
        elif x.tid < 2 * CHUNK:  # noqa: SIM102
            if const_expr(self.config.l2norm):
                shares = [self.direct_of(x, mDirect, 1 + c, x.tid - CHUNK) for c in range(self.halves)]
                along = shares[0] if const_expr(self.halves == 1) else shares[0] + shares[1]
                store_shared(x.sAll + self.at_beta + (x.tid - CHUNK) * 4, ALONG * (CHUNK * 4), [-along])

    # ---- gate ----------------------------------------------------------------------------------------------------------------------
    def powers(self, x):
        """Vectors over columns for every block, a thread a column. Rows of the table:

        TOTAL   t_b                               COLUMN  c_b, read where it is not 0
        LAST    2^(t_b - c_b)                     Y, X: after the last block before the own one; Z: before the own block
        LINK    2^(t_b - c_b + c_(b+1))           Y, X: after earlier blocks; b = 0, 1
        LATER   2^(t_b)                           Z: after the products with block b + 1; b = 1, 2
        BEFORE  2^(t before b - S)                times a row's 2^(H + S): 2^G
        AFTER   2^(t_b - c_b + S + t after b)     times a column's 2^(c_b - H - S): 2^(G_C - G)
        """
        sV = x.sAll + self.at_vectors + x.tid * 4
        t = [load_shared(sV, (TOTAL + b) * self.vector, 1)[0] for b in range(4)]
        c = [load_shared(sV, (COLUMN + b) * self.vector, 1)[0] for b in range(4)]
        before = [Float32(-self.shift)]
        for b in range(3):
            before.append(before[b] + t[b])
        after = [Float32(0.0)]
        for b in (3, 2, 1):
            after.insert(0, after[0] + t[b])
        rest = [t[b] - c[b] for b in range(4)]
        table = {
            LAST: rest,
            LINK: [rest[b] + c[b + 1] for b in range(2)],
            LATER: [t[1], t[2]],
            BEFORE: before,
            AFTER: [a + b + self.shift for a, b in zip(rest, after, strict=True)],
        }
        for row, values in table.items():
            for i, f in enumerate(values):
                store_shared(sV, (row + i) * self.vector, [exp2(f)])

    # ---- operands ------------------------------------------------------------------------------------------------------------------
    def row_scalars(self, x):
        """Factors of rows r, r + 8, kept in shared memory by the first half's warps; zeros behind the end."""
        valid = [x.mine + 8 * h < x.rows for h in range(2)]
        norms = [[Float32(1.0)] * 2] * 2
        if self.config.l2norm:
            norms = [[rsqrt(s + EPSILON) for s in self.get_row_sums(x, operand)] for operand in (OF_Q, OF_K)]
        norm_q, norm_k = ([select(v, n, 0.0) for v, n in zip(valid, norm, strict=True)] for norm in norms)
        beta = self.scalars_of(x, BETA)
        table = {
            NORM_Q: norm_q,
            NORM_K: norm_k,
            SCALE_Q: [x.scale * n for n in norm_q],
            BETA_K: [b * n for b, n in zip(beta, norm_k, strict=True)],
        }
        first = Int32((x.t == 0) & (x.half == 0))
        for which, values in table.items():
            for h in range(2):
                store_shared_if(x.sRows, which * (CHUNK * 4) + 32 * h, [values[h]], first)
        return table

    def share_operands(self, x, words_q, words_k, scalars, c):
        """Group c of q 2^(H + S), k 2^(c_b - H - S) and beta k 2^(H + S) to their panels, each tile's columns a vector."""
        column = self.column_shift(x, c)
        words = {operand: [None] * 4 for operand in (OF_Q, OF_K, OF_BETA)}
        for h in range(2):
            H = self.sums_of_gate(x, h, c)
            H = [a + self.shift for a in H]
            up = [exp2(a) for a in H]
            q, k = (self.numbers(self.group_of(w, c, h)) for w in (words_q, words_k))
            values = {
                OF_Q: [a * b * scalars[SCALE_Q][h] for a, b in zip(q, up, strict=True)],
                OF_K: [a * scalars[NORM_K][h] * exp2(b - d) for a, b, d in zip(k, column, H, strict=True)],
                OF_BETA: [a * b * scalars[BETA_K][h] for a, b in zip(k, up, strict=True)],
            }
            for operand in words:
                words[operand][h::2] = self.packed(values[operand])
        for operand in words:
            store(self.own_tiles(x, operand, c), words[operand])

    def column_shift(self, x, c):
        """c_b of this lane's columns of group c."""
        if not self.bf16:
            return self.vector_of(x.sOwn, COLUMN, c)
        return load_shared_if(x.sOwn, COLUMN * self.vector + self.at_group(c, 4), 4, Int32(1) - Int32(x.fits))

    def own_tiles(self, x, operand, c):
        """A lane's address of the block's rows in the two tiles of group c."""
        return (x.sMine ^ (32 * c)) + operand * self.operand_bytes

    # ---- products ------------------------------------------------------------------------------------------------------------------
    def columns(self, x, parts, mQ, mK, mDq, mDk):
        """Groups, of which a lane has consecutive columns: dq, dk out, sums over rows, and dG to shared memory.

        A pair i >= j of rows adds to dG_i what it takes from dG_j. Both are made of the operands as they were rounded, so that the two
        cancel in the sum over rows.
        """
        groups = [c for part in parts for c in part]
        # No load moves up to where the groups before need the registers, and H is read before dG takes its place.
        cute.arch.sync_warp()
        given = self.load_gradients(x, groups)
        rZ = cute.make_rmem_tensor((2, 4 * len(groups)), Float32)
        self.later_blocks(x, rZ, groups)
        for part in parts:
            known = [self.load_known(x, c) for c in part]
            cute.arch.sync_warp()
            rY, rX = (cute.make_rmem_tensor((2, 4 * len(part)), Float32) for _ in range(2))
            self.earlier_blocks(x, rY, rX, part)
            for g, c in enumerate(part):
                n = c - groups[0]
                sums = [cute.make_rmem_tensor((2, 4), Float32) for _ in range(5)]
                for to, r, first in zip(sums, (rY, rX, rZ), (4 * g, 4 * g, 4 * n), strict=False):
                    for h in range(2):
                        for e in range(4):
                            to[h, e] = r[h, first + e]
                self.apply_powers(x, [[w[2 * n :][:2] for w in words] for words in given], known[g], sums, c)
                self.add_own(x, sums, c, mQ, mK)
                self.finish_group(x, sums, c, mDq, mDk)

    def apply_powers(self, x, given, known, sums, c):
        """From sums over blocks to Y + 2^G dqg, X and Z + 2^(G_C - G) dkg - 2^G dkd, dG; k and the sum q . dq."""
        rDq, rX, rDk, rG, rK = sums
        column, after, before = (self.vector_of(x.sOwn, row, c) for row in (COLUMN, AFTER, BEFORE))
        own = [self.own_operand(x, operand, c) for operand in (OF_Q, OF_K, OF_BETA)]
        for h in range(2):
            q, k, beta_k = (numbers[h] for numbers in own)
            dkg, dqg, dkd = (self.numbers(w[h]) for w in given)
            for e, H in enumerate(self.sums_of_gate(x, h, c)):
                up, down = exp2(H + self.shift), exp2(column[e] - (H + self.shift))
                dq = fma(dqg[e], before[e], rDq[h, e])
                lost = fma(-k[e], rDk[h, e], known[h][e])
                rG[h, e] = fma(beta_k[e], rX[h, e], fma(q[e], rDq[h, e], lost))
                rDk[h, e] = fma(-dkd[e], up * before[e], fma(dkg[e], after[e], rDk[h, e]) * down)
                rDq[h, e] = dq * up
                rX[h, e] = rX[h, e] * up
                rK[h, e] = k[e] * up
                if self.config.l2norm:
                    x.rSums[OF_Q, h] = fma(q[e], dq, x.rSums[OF_Q, h])

    def finish_group(self, x, sums, c, mDq, mDk):
        """Sums over rows, dG, dk out, and dq, out or put by for the norm."""
        rDq, rX, rDk, rG, rK = sums
        beta, norm_k = (self.scalars_of(x, which) for which in (BETA, NORM_K))
        other = self.scalars_of(x, ALONG if self.config.l2norm else SCALE_Q)
        for h in range(2):
            if self.config.a_log and self.config.gate == "softplus":
                for e, H in enumerate(self.sums_of_gate(x, h, c)):
                    x.rALog[0] = fma(rG[h, e], H, x.rALog[0])
            store_shared(x.sH ^ self.at_group(c, 4), 8 * h * self.h_row, [rG[h, e] for e in range(4)])
            dk = []
            for e in range(4):
                d = fma(beta[h], rX[h, e], rDk[h, e])
                x.rSums[OF_BETA, h] = fma(rK[h, e], rX[h, e], x.rSums[OF_BETA, h])
                if self.config.l2norm:
                    d = fma(other[h], rK[h, e], d)
                    x.rDq[c, h, e] = rDq[h, e]
                dk.append(d * norm_k[h])
            self.put_out(x, mDk, 1, dk, c, h)
            if not self.config.l2norm:
                self.put_out(x, mDq, 0, [rDq[h, e] * other[h] for e in range(4)], c, h)

    def put_out(self, x, mOut, which, values, c, h):
        """Group c of a row of dq or dk: fp32 at once, the io type by pairs of groups, which are 16 bytes."""
        size = 4 if self.config.grouped else 2
        if not self.config.grouped:
            words = self.packed(values)
            if c % 2 == 0:
                x.rPair[which, h, 0], x.rPair[which, h, 1] = words
                return
            values = [x.rPair[which, h, 0], x.rPair[which, h, 1], *words]
            c = c - 1
        row, head = x.mine + 8 * h, Int32(x.head)
        if self.config.grouped:
            # An address for every group, so that none is kept.
            head = opaque(head)
        to = self.row_address(mOut, x, row, x.column, head, size)
        store_global_if(to + Int64(self.at_group(c, size)), values, row < x.rows)

    def own_operand(self, x, operand, c):
        """This lane's numbers of an operand, as they were rounded, in rows r, r + 8."""
        words = load(self.own_tiles(x, operand, c))
        return [self.numbers(words[h::2]) for h in range(2)]

    def add_products(self, x, pairs, operand, b, groups):
        """Each (sums, A) of `pairs`: sums += A times rows 16b .. + 15 of an operand, in columns of some groups."""
        for g, c in enumerate(groups):
            right = load_transposed((x.sColumns ^ (32 * c)) + b * blocks.ROWS + operand * self.operand_bytes)
            for sums, a in pairs:
                for u in range(2):
                    places = [(h, 4 * g + 2 * u + e) for h in range(2) for e in range(2)]
                    product = mma_16bit(self.dtype, a, right[2 * u : 2 * u + 2], [sums[place] for place in places])
                    for place, f in zip(places, product, strict=True):
                        sums[place] = f

    def decay(self, x, tensors, row, groups):
        """Multiply by a row of the table of vectors."""
        for g, c in enumerate(groups):
            f = self.vector_of(x.sVectors, row, c)
            for r in tensors:
                for h in range(2):
                    for e in range(4):
                        r[h, 4 * g + e] = r[h, 4 * g + e] * f[e]

    @cute.jit
    def earlier_blocks(self, x, rY, rX, groups):
        """Y and X but for the rows' factors, from the blocks before and, where it fits, the own one."""
        rY.fill(0.0)
        rX.fill(0.0)
        for b in cutlass.range(x.block, unroll=1):
            self.earlier_block(x, rY, rX, b, groups)
            self.decay(x, (rY, rX), LAST + b + (LINK - LAST) * Int32(b + 1 < x.block), groups)
        if const_expr(self.bf16):  # noqa: SIM102
            if x.fits:
                self.earlier_block(x, rY, rX, x.block, groups)

    def earlier_block(self, x, rY, rX, b, groups):
        da = blocks.load_block(x.sBlocks ^ (32 * b))
        dl = blocks.load_block((x.sBlocks ^ (32 * b)) + panel.BYTES)
        self.add_products(x, ((rY, da), (rX, dl)), OF_K, b, groups)

    @cute.jit
    def later_blocks(self, x, rZ, groups):
        """Z but for the columns' factors, from the blocks behind and, where it fits, the own one."""
        rZ.fill(0.0)
        for n in cutlass.range(3 - x.block, unroll=1):
            b = 3 - n
            self.later_block(x, rZ, b, groups)
            row = LATER + b - 2
            if b - 1 == x.block:
                row = LAST + x.block
            self.decay(x, (rZ,), row, groups)
        if const_expr(self.bf16):  # noqa: SIM102
            if x.fits:
                self.later_block(x, rZ, x.block, groups)

    def later_block(self, x, rZ, b, groups):
        da = load_transposed(x.sTransposed + b * blocks.ROWS)
        dl = load_transposed(x.sTransposed + b * blocks.ROWS + panel.BYTES)
        self.add_products(x, ((rZ, da),), OF_Q, b, groups)
        self.add_products(x, ((rZ, dl),), OF_BETA, b, groups)

    # ---- sums over rows ------------------------------------------------------------------------------------------------------------
    def put_squares(self, x, operand, words):
        """|x|^2 over the warp's columns: the diagonal of x x^T, of which lane (r, r / 2) has elements of rows r, r + 8."""
        own = [[Float32(0.0)] * 4 for _ in range(2)]
        for c in range(4):
            rows = [self.group_of(words, c, h) for h in range(2)]
            a = (rows[0][0], rows[1][0], rows[0][1], rows[1][1])
            own = [mma_16bit(self.dtype, a, rows[h], own[h]) for h in range(2)]
        squares = [select(x.r % 2, own[h][2 * h + 1], own[h][2 * h]) for h in range(2)]
        self.put_row_sums(x, operand, squares, x.t == x.r // 2)

    def put_row_sums(self, x, which, sums, holder):
        """Of the warp's columns, for rows r, r + 8, by the lane of the row that is the holder."""
        at = x.sAll + self.at_sums + (x.half * CHUNK + x.mine) * 4
        for h in range(2):
            store_shared_if(at, which * (self.halves * CHUNK * 4) + 32 * h, [sums[h]], Int32(holder))

    def get_row_sums(self, x, which):
        """Of all columns."""
        at = x.sAll + self.at_sums + x.mine * 4
        parts = [
            [load_shared(at, (which * self.halves + c) * CHUNK * 4 + 32 * h, 1)[0] for c in range(self.halves)]
            for h in range(2)
        ]
        return [p[0] if self.halves == 1 else p[0] + p[1] for p in parts]

    def put_sums(self, x):
        """The warp's row sums to shared memory."""
        for which in (OF_Q, OF_BETA) if self.config.l2norm else (OF_BETA,):
            self.put_row_sums(x, which, [sum_lanes(x.rSums[which, h], (1, 2)) for h in range(2)], x.t == 0)

    # ---- results -------------------------------------------------------------------------------------------------------------------
    @cute.jit
    def write_queries(self, x, mDq, raw):
        """dq: scale norm d - norm^2 (q' . dq') q of the raw rows q."""
        # Groups a store has: 16 bytes are a pair's numbers of the io type.
        size, per = const_expr((4, 1) if self.config.grouped else (2, 2))
        to = self.row_addresses(mDq, x, x.head, size)
        for h in cutlass.range_constexpr(2):
            n, scale = (self.scalars_of(x, which)[h] for which in (NORM_Q, SCALE_Q))
            back = -n * n * self.get_row_sums(x, OF_Q)[h]
            for c in cutlass.range_constexpr(0, 4, per):
                own = [f for g in range(per) for f in self.numbers(self.group_of(raw, c + g, h))]
                d = [x.rDq[c + g, h, e] for g in range(per) for e in range(4)]
                out = [fma(back, a, b * scale) for a, b in zip(own, d, strict=True)]
                if const_expr(not self.config.grouped):
                    out = self.packed(out)
                store_global_if(to[h] + Int64(self.at_group(c, size)), out, x.mine + 8 * h < x.rows)

    @cute.jit
    def write_beta(self, x, raw, d, mDbeta):
        """dbeta of row `tid` < 64, from what is known of it, and raw beta."""
        if x.tid < x.rows:
            sums = x.sAll + self.at_sums + OF_BETA * self.halves * CHUNK * 4 + x.tid * 4
            for c in cutlass.range_constexpr(self.halves):
                d = d + load_shared(sums, c * CHUNK * 4, 1)[0]
            if const_expr(self.config.beta_sigmoid):
                d = d * x.beta_limit * sigmoid_slope(raw)
            mDbeta[self.batch(x), x.first + x.tid, x.head] = d.to(self.beta_dtype)


def compile(config: IntraConfig):
    """The launch function for `config`:

    `(q, k, g, beta, a_log | None, dt_bias | None, cu_seqlens | None, dfactors, dscores, dgi, direct, dq, dk, dg, dbeta,
    da_log | None, ddt_bias | None, scale, lower_bound, beta_limit)`, None where the config does not have them.

    Inputs as for `kda_prepare`, and contiguous: dfactors [slots, HV, 3, 64, K] (dqg, dkd, dkg), dscores [slots, HV, 2, 64, 64]
    (images of dA and dL), dgi fp32 [slots, HV, 64, K] (the part of dG that is known) and direct fp32 [slots, HV, 1 + K / 64, 64]
    (that of dbeta, then k' . dk' in shares, whose sum counts, of the normed k'; not read without the norm).
    Outputs: dq, dk [B, T, H, K], or fp32 [B, T, HV, K] where `grouped`; dg as g; dbeta as beta; contiguous fp32 da_log
    [slots, HV] and ddt_bias [slots, HV, K], to be summed over slots, zeros in slots of no sequence.
    """
    batch, tokens, heads, value_heads, slots = (cute.sym_int() for _ in range(5))
    io, K = DTYPES[config.dtype], config.key_dim

    def strided(dtype, heads):
        strides = tuple(cute.sym_int64(divisibility=16 * 8 // dtype.width) for _ in range(3))
        return make_fake_tensor(dtype, (batch, tokens, heads, K), stride=(*strides, 1), assumed_align=16)

    def packed(dtype, shape):
        return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)

    def beta():
        dtype = DTYPES[config.beta_dtype]
        strides = tuple(cute.sym_int64() for _ in range(3))
        return make_fake_tensor(dtype, (batch, tokens, value_heads), stride=strides, assumed_align=dtype.width // 8)

    gate_dtype = DTYPES[config.gate_dtype]
    rows = (Float32, value_heads) if config.grouped else (io, heads)
    return cute.compile(
        KdaIntra(config),
        strided(io, heads),
        strided(io, heads),
        strided(gate_dtype, value_heads),
        beta(),
        packed(Float32, (value_heads,)) if config.a_log else None,
        packed(Float32, (cute.sym_int(),)) if config.dt_bias else None,
        packed(DTYPES[config.cu_seqlens], (cute.sym_int(),)) if config.cu_seqlens else None,
        packed(io, (slots, value_heads, 3, CHUNK, K)),
        packed(io, (slots, value_heads, 2, CHUNK, CHUNK)),
        packed(Float32, (slots, value_heads, CHUNK, K)),
        packed(Float32, (slots, value_heads, 1 + K // 64, CHUNK)),
        strided(*rows),
        strided(*rows),
        strided(gate_dtype, value_heads),
        beta(),
        packed(Float32, (slots, value_heads)) if config.a_log else None,
        packed(Float32, (slots, value_heads, K)) if config.dt_bias else None,
        Float32(1.0),
        Float32(1.0),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
