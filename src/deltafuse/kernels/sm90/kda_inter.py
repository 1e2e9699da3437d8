"""KDA backward on Hopper, the part that is parallel over chunks: gradients of a chunk's factors and scores.

Given the state S before the chunk, the gradient dS of the state after it, do, and y = M^T dv' of the reverse pass, with the factors and
the inverse M of `warp.kda_prepare`:

    R   = v + kd S                 v'  = M diag(beta) R
    dqg = do S^T                   dkd = beta y S^T                       dkg = v' dS^T
    dA  = tril(do v'^T)            dL  = -strict_tril(y v'^T)             dbeta = sum_v y R
    dGi = qg dqg + kd dkd - kg dkg, in the last valid row also sum_i kg_i dkg_i + decay sum_v dS S

Sums over V go over tiles of `tile` columns, in accumulators. dv = beta y is not read: beta is a factor of the rows of dkd. It is one of
the rows of R too, before R is rounded: M has ones on its diagonal, which the io type holds, where M' = M diag(beta) has rounded betas.

For the gradient of the norm of k, the sum over K of k dk, dk what `warp.kda_intra` makes of all this, is already known here:

    k . dk = 2 y . v' - beta y . R + kd . dkd

from dL = -y v'^T, (I + L) v' = beta R, (I + L)^T y = dv' and dv' = Aqk^T do + kg dS. y . v' is what dL has on its diagonal before that is
cleared.

Work: a unit is a slot and a value head, slot * HV + hv. CTA b takes units b, b + grid, ... without the slots that are nobody's.

Warps: K / 64 consumer warpgroups, then "fetch", which finds the CTA's units and hands them on with their operands, then "store", which
copies results out. Consumer group g has columns 64 g .. + 63 of dqg, dkd and dkg. Panels of V are dealt out for R and v'; with two
groups the first makes dA, the second dL.

Shared memory is panels of 64 x 64 (see `tile.panel`) but for vectors:
    head       kd, M (and beta, decay, which unit it is), two stages
    tile       S^T, dS^T, v, y, do of a tile of V, `stages`
    late       qg, kg, one stage
    scores     dA, dL on their way out
R and v' take the place of v; dkd, dqg and dkg that of kd, qg and kg, from where they are copied out. At K = V = 128: 26 panels, 208 KB.

Barriers: full (of a head, the two parts of a tile, late), with the bytes that are to come; `left` of a tile, at which consumer warps
arrive when they have read it; `done` of a unit, at which they arrive when results are in shared memory; `free` of head and late, at
which store arrives when they have been copied out.

Timeline of a consumer, for every tile and then for the unit; at | it waits for its products, at || for the other group too:

    kd S, do S^T, y S^T | y R; beta R rounded | M (beta R) | v' rounded || v' dS^T, do v'^T or y v'^T; meanwhile sum_v dS S |
    scores to shared memory; factors' gradients to shared memory, dGi in registers; sums over rows; dGi and k . dk to global memory

At K = V = 128 a unit's products take the tensor cores 2,816 cycles, its 264 KB an H200's memory about 14,000. Copies of the next tile
begin where this one's products end.

Rows behind a sequence's end: factors, M, beta and y are zero there. v and do may be anything: v is selected away before R; what comes
of do is in the same row and is selected away there.

Constraints: K 64 or 128, V a multiple of `tile`; v and do with a contiguous last dimension, other strides multiples of 16 bytes.
"""

# mypy: ignore-errors

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ...tile.arguments import DTYPES, row_major
from ...tile.bulk import bulk_load, reads_done
from ...tile.fragments import linear, pack2
from ...tile.lanes import reduce_scatter, sum_lanes
from ...tile.panel import BYTES, vector_offset
from ...tile.panel import ELEMENTS as PANEL
from ...tile.ptx import fma, load_shared, select, store_global, store_shared, unpack
from ...tile.sequence import chunk_of_slot
from ...tile.shared import room
from ...tile.wgmma import product
from ..config import CHUNK, InterConfig

QG, KD, KG = 0, 1, 2
"""Order of dfactors; the factors themselves are kd, qg, kg."""
HEADS = 2
"""Stages of heads."""
PAIR = 8
"""Named barrier of all consumers; group g has 1 + g."""


class KdaInter:
    """The kernel for one `InterConfig`; `stages` overrides how many tiles are in shared memory at once."""

    def __init__(self, config: InterConfig, *, stages: int | None = None) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.K = config.key_dim
        self.groups = self.K // 64
        self.parts = config.tile // 64
        self.consumers = 128 * self.groups
        # A warpgroup of producers where setmaxnreg is needed; it acts on whole warpgroups.
        self.threads = self.consumers + (128 if self.groups > 1 else 64)
        kp, vp = self.groups, self.parts
        # Panels: heads, late, scores; tiles after them.
        self.late = HEADS * (kp + 1)
        self.scores = self.late + 2 * kp
        self.tiles = self.scores + 2
        self.tile_panels = 2 * kp * vp + 3 * vp
        # beta, decay and unit of heads; sums of beta's gradient; sums over rows; barriers.
        self.at_beta = 0
        self.at_decay = self.at_beta + HEADS * CHUNK * 4
        self.at_unit = self.at_decay + HEADS * self.K * 4
        self.at_direct = self.at_unit + HEADS * 8
        self.at_sums = self.at_direct + 2 * self.groups * CHUNK * 4
        self.small = self.at_sums + self.groups * 8 * 64 * 4
        left = (room() - self.small - 512) // BYTES - self.tiles
        self.stages = stages or min(4, left // self.tile_panels)
        self.panels = self.tiles + self.stages * self.tile_panels
        # Barriers.
        self.head_full, self.head_free = 0, HEADS
        self.late_full, self.late_free, self.done = 2 * HEADS, 2 * HEADS + 1, 2 * HEADS + 2
        self.first_full = self.done + 1
        self.second_full = self.first_full + self.stages
        self.left = self.second_full + self.stages
        self.barriers = self.left + self.stages

    # ---------------------------------------------------------------------------------------------------------------- host
    @cute.jit
    def __call__(
        self,
        factors: cute.Tensor,
        scores: cute.Tensor,
        decay: cute.Tensor,
        beta: cute.Tensor,
        hs: cute.Tensor,
        dhs: cute.Tensor,
        v: cute.Tensor,
        do: cute.Tensor,
        y: cute.Tensor,
        cu_seqlens: cute.Tensor | None,
        dfactors: cute.Tensor,
        dscores: cute.Tensor,
        dgi: cute.Tensor,
        direct: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        """Launch: `ctas` CTAs, or fewer where there are fewer units."""
        slots, heads = factors.shape[0], factors.shape[1]
        by_head = cute.fast_divmod_create_divisor_v2(heads)
        by_chunks = cute.fast_divmod_create_divisor_v2(slots // v.shape[0])
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        copies = [self.tensor_copy(load, x, (2, 3, 1, 0)) for x in (hs, dhs, y)]
        copies += [self.tensor_copy(load, x, (1, 3, 2, 0)) for x in (v, do)]
        copies.append(self.tensor_copy(store, dfactors, (3, 4, 2, 1, 0)))
        self.kernel(
            factors, scores, decay, beta, cu_seqlens, dscores, dgi, direct, *(x for c in copies for x in c),
            Int32(v.shape[3] // self.config.tile), Int32(v.shape[1]), by_head, by_chunks,
        ).launch(
            grid=(cutlass.min(ctas, slots * heads), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=False,
        )  # fmt: skip

    def layout(self, kind):
        """All panels as operands: "a", "rows" (B with rows as N), "columns" (B with columns as N)."""
        tile = (64, 64, 64)
        if kind == "a":
            return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.panels)
        major = LayoutEnum.ROW_MAJOR if kind == "rows" else LayoutEnum.COL_MAJOR
        return sm90.make_smem_layout_b(major, tile, self.dtype, self.panels)

    def tensor_copy(self, op, x, order):
        """The copy of panels of `x` with its modes in `order`, rows and columns first, and the tensor of its coordinates."""
        view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(order)))
        return cpasync.make_tiled_tma_atom(op, view, cute.slice_(self.layout("a"), (None, None, 0)), (64, 64))

    def products(self):
        """Tiled products of a warpgroup, 64 x 64: B's rows are its N, or its columns are."""

        def tiled(major):
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, OperandMajorMode.K, major, Float32, (1, 1, 1), (64, 64),
                warpgroup.OperandSource.SMEM,
            )  # fmt: skip

        return tiled(OperandMajorMode.K), tiled(OperandMajorMode.MN)

    # ---------------------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def kernel(
        self,
        mF: cute.Tensor,
        mM: cute.Tensor,
        mD: cute.Tensor,
        mBeta: cute.Tensor,
        mCu: cute.Tensor | None,
        mDscores: cute.Tensor,
        mDgi: cute.Tensor,
        mDirect: cute.Tensor,
        tma_s: cute.CopyAtom,
        tS: cute.Tensor,
        tma_ds: cute.CopyAtom,
        tDs: cute.Tensor,
        tma_y: cute.CopyAtom,
        tY: cute.Tensor,
        tma_v: cute.CopyAtom,
        tV: cute.Tensor,
        tma_do: cute.CopyAtom,
        tDo: cute.Tensor,
        tma_out: cute.CopyAtom,
        tOut: cute.Tensor,
        tiles: Int32,
        tokens: Int32,
        by_head: cute.FastDivmodDivisorV2,
        by_chunks: cute.FastDivmodDivisorV2,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        s = self.shared()
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.barriers):
                    cute.arch.mbarrier_init(s.barrier + i, self.arrivals(i))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # What the kernel before writes is read from here on.
        cute.arch.griddepcontrol_wait()

        if warp >= 4 * self.groups:
            if const_expr(self.groups > 1):
                cute.arch.setmaxregister_decrease(40)
            if warp == 4 * self.groups:
                self.fetch(
                    s, mF, mM, mD, mBeta, mCu, ((tma_s, tS), (tma_ds, tDs), (tma_y, tY), (tma_v, tV), (tma_do, tDo)),
                    mDscores.shape[0] * mDscores.shape[1], tiles, tokens, by_head, by_chunks,
                )  # fmt: skip
            if warp == 4 * self.groups + 1:
                self.store(s, mDscores, tma_out, tOut, by_head)
        else:
            if const_expr(self.groups > 1):
                cute.arch.setmaxregister_increase(232)
            self.consume(s, mDgi, mDirect, tiles, warp)

    def arrivals(self, barrier):
        return 4 * self.groups if barrier == self.done or barrier >= self.left else 1

    def shared(self):
        """Shared memory: panels as operands and by address, the rest by address."""
        smem, s = SmemAllocator(), SimpleNamespace()
        s.raw = smem.allocate_array(self.dtype, self.panels * PANEL, byte_alignment=1024)
        views = []
        for kind in ("a", "rows", "columns"):
            layout = self.layout(kind)
            views.append(cute.make_tensor(cute.recast_ptr(s.raw, layout.inner, self.dtype), layout.outer))
        s.a, s.rows, s.columns = views
        s.panels = s.raw.toint()
        s.small_at = smem.allocate_array(Float32, self.small // 4, byte_alignment=128)
        s.small = s.small_at.toint()
        s.barrier = smem.allocate_array(Int64, self.barriers, byte_alignment=8)
        return s

    # ------------------------------------------------------------------------------------------------------------- producers
    @cute.jit
    def fetch(self, s, mF, mM, mD, mBeta, mCu, copies, units, tiles, tokens, by_head, by_chunks):
        """Operands of all units of the CTA; unit -1 after the last."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        n, m = Int32(0), Int32(0)
        for unit in cutlass.range(block, units, grid, unroll=1):
            slot, hv = divmod(unit, by_head)
            batch, first, rows = Int32(0), Int32(0), Int32(0)
            if const_expr(mCu is not None):
                first, rows = chunk_of_slot(mCu, slot, tokens)
            else:
                batch, chunk = divmod(slot, by_chunks)
                first = chunk * CHUNK
                rows = cutlass.min(tokens - first, CHUNK)
            if rows > 0:
                self.fetch_head(s, mF, mM, mD, mBeta, slot, hv, unit, rows, n)
                for t in cutlass.range(tiles, unroll=1):
                    self.fetch_tile(s, copies, slot, hv, batch, first, t, m)
                    m += 1
                # qg and kg are wanted last.
                bar = s.barrier + self.late_full
                cute.arch.mbarrier_wait(s.barrier + self.late_free, (n & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, 2 * self.groups * BYTES)
                    for i in cutlass.range_constexpr(2):
                        src = mF[slot, hv, 1 + i, 0, None, None].iterator
                        dst = s.raw + (self.late + i * self.groups) * PANEL
                        bulk_load(src.align(16), dst.align(16), CHUNK * self.K, bar, 1, Int32(0))
                n += 1
        stage = n % HEADS
        cute.arch.mbarrier_wait(s.barrier + self.head_free + stage, ((n // HEADS) & 1) ^ 1)
        with cute.arch.elect_one():
            store_shared(s.small + self.at_unit + 8 * stage, 0, [Int32(-1), Int32(0)])
            cute.arch.mbarrier_arrive(s.barrier + self.head_full + stage)

    @cute.jit
    def fetch_head(self, s, mF, mM, mD, mBeta, slot, hv, unit, rows, n):
        """kd, M, beta and decay of the n-th unit, and which it is."""
        stage = n % HEADS
        bar = s.barrier + self.head_full + stage
        cute.arch.mbarrier_wait(s.barrier + self.head_free + stage, ((n // HEADS) & 1) ^ 1)
        with cute.arch.elect_one():
            store_shared(s.small + self.at_unit + 8 * stage, 0, [unit, rows])
            cute.arch.mbarrier_arrive_and_expect_tx(bar, (self.groups + 1) * BYTES + 4 * (CHUNK + self.K))
            panel = s.raw + stage * ((self.groups + 1) * PANEL)
            kd = mF[slot, hv, 0, 0, None, None].iterator
            bulk_load(kd.align(16), panel.align(16), CHUNK * self.K, bar, 1, Int32(0))
            m = mM[slot, hv, 2, None, None].iterator
            bulk_load(m.align(16), (panel + self.groups * PANEL).align(16), PANEL, bar, 1, Int32(0))
            beta = s.small_at + (self.at_beta // 4 + stage * CHUNK)
            bulk_load(mBeta[slot, hv, None].iterator.align(16), beta.align(16), CHUNK, bar, 1, Int32(0))
            decay = s.small_at + (self.at_decay // 4 + stage * self.K)
            bulk_load(mD[slot, hv, None].iterator.align(16), decay.align(16), self.K, bar, 1, Int32(0))

    @cute.jit
    def fetch_tile(self, s, copies, slot, hv, batch, first, t, m):
        """S^T, v, y and dS^T, do of the t-th tile of V, the CTA's m-th."""
        (tma_s, tS), (tma_ds, tDs), (tma_y, tY), (tma_v, tV), (tma_do, tDo) = copies
        stage = m % self.stages
        at = self.tile_places(stage)
        first_full, second_full = s.barrier + self.first_full + stage, s.barrier + self.second_full + stage
        kp, vp = self.groups, self.parts
        cute.arch.mbarrier_wait(s.barrier + self.left + stage, ((m // self.stages) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(first_full, (kp + 2) * vp * BYTES)
            cute.arch.mbarrier_arrive_and_expect_tx(second_full, (kp + 1) * vp * BYTES)
        self.load_state(s, tma_s, tS[None, None, hv, slot], t, at.S, first_full)
        self.load_rows(s, tma_v, cute.domain_offset((first, 0), tV[None, None, hv, batch]), t, at.v, first_full)
        self.load_rows(s, tma_y, tY[None, None, hv, slot], t, at.y, first_full)
        self.load_rows(s, tma_do, cute.domain_offset((first, 0), tDo[None, None, hv, batch]), t, at.do, second_full)
        self.load_state(s, tma_ds, tDs[None, None, hv, slot], t, at.dS, second_full)

    def load_state(self, s, tma, x, t, base, barrier):
        """Rows of the t-th tile of V of a transposed state [V, K]."""
        sX, gX = self.partition(tma, s, cute.local_tile(x, (64, 64), (None, None)))
        for i in range(self.parts):
            for j in range(self.groups):
                panel = base + i * self.groups + j
                cute.copy(tma, gX[None, t * self.parts + i, j], sX[None, panel], tma_bar_ptr=barrier)

    def load_rows(self, s, tma, x, t, base, barrier):
        """The first 64 rows of the t-th tile of V of x [.., V]."""
        sX, gX = self.partition(tma, s, cute.local_tile(x, (64, 64), (0, None)))
        for i in range(self.parts):
            cute.copy(tma, gX[None, t * self.parts + i], sX[None, base + i], tma_bar_ptr=barrier)

    def partition(self, tma, s, tiles):
        """A tensor copy's shared memory by panel, its global memory by tile."""
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(s.a, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    def tile_places(self, stage):
        """Panels of a tile's stage: S^T and dS^T [V / 64][K / 64], v, y, do [V / 64]."""
        base, kp, vp = self.tiles + stage * self.tile_panels, self.groups, self.parts
        states = 2 * kp * vp
        return SimpleNamespace(
            S=base, dS=base + kp * vp, v=base + states, y=base + states + vp, do=base + states + 2 * vp
        )

    @cute.jit
    def store(self, s, mDscores, tma_out, tOut, by_head):
        """Results of all units from shared memory to global memory."""
        n = Int32(0)
        unit, _ = self.unit(s, n)
        while unit >= 0:
            slot, hv = divmod(unit, by_head)
            stage = n % HEADS
            cute.arch.mbarrier_wait(s.barrier + self.done, n & 1)
            head = stage * (self.groups + 1)
            for f, base in ((KD, head), (QG, self.late), (KG, self.late + self.groups)):
                dst = cute.local_tile(tOut[None, None, f, hv, slot], (64, 64), (0, None))
                sX, gX = self.partition(tma_out, s, dst)
                for p in cutlass.range_constexpr(self.groups):
                    cute.copy(tma_out, sX[None, base + p], gX[None, p])
            with cute.arch.elect_one():
                flat = cute.make_layout(2 * PANEL)
                src = (s.raw + self.scores * PANEL).align(16)
                dst = mDscores[slot, hv, 0, None, None].iterator.align(16)
                atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.dtype)
                cute.copy(atom, cute.make_tensor(src, flat), cute.make_tensor(dst, flat))
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(s.barrier + self.head_free + stage)
                cute.arch.mbarrier_arrive(s.barrier + self.late_free)
            n += 1
            unit, _ = self.unit(s, n)
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def unit(self, s, n):
        """The CTA's n-th unit and its chunk's rows, once its head is there; -1 after the last."""
        stage = n % HEADS
        cute.arch.mbarrier_wait(s.barrier + self.head_full + stage, (n // HEADS) & 1)
        unit, rows = load_shared(s.small + self.at_unit + 8 * stage, 0, 2, Int32)
        return unit, rows

    # -------------------------------------------------------------------------------------------------------------- consumers
    def registers(self, s, tid, group):
        """Accumulators, descriptors and the places of a thread's elements."""
        r = SimpleNamespace(group=group, tid=tid, lane=tid % 32, warp=tid // 32)
        r.by_rows, r.by_columns = self.products()
        rows, columns = r.by_rows.get_slice(tid), r.by_columns.get_slice(tid)
        r.a = r.by_rows.make_fragment_A(rows.partition_A(s.a))
        r.rows = r.by_rows.make_fragment_B(rows.partition_B(s.rows))
        r.columns = r.by_columns.make_fragment_B(columns.partition_B(s.columns))
        half = cute.make_layout(((2, 2, 8), 1, 1), stride=((1, 2, 4), 0, 0))
        # R and v', later dGi; dqg, dkd / beta, dkg; dA and dL (or one of them).
        r.R, r.dqg, r.dkd, r.dkg = (cute.make_rmem_tensor(half, Float32) for _ in range(4))
        r.scores = [cute.make_rmem_tensor(half, Float32) for _ in range(2 // self.groups)]
        r.direct, r.states = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((8,), Float32)
        # Accumulators are (e, h, j): rows row + 8 h, columns 8 j + 2 (lane % 4) + e.
        r.row = 16 * r.warp + r.lane // 4
        r.element = vector_offset(r.row, 0) + 4 * (r.lane % 4)
        return r

    def own(self, r, i):
        """Of two things that are dealt out, the group's i-th."""
        return i if self.groups == 1 else r.group

    def word(self, s, r, panel, j):
        """Address of a thread's elements (., 0, j) in a panel; h = 1 is 8 rows on."""
        return (s.panels + panel * BYTES + r.element) ^ (16 * j)

    @cute.jit
    def consume(self, s, mDgi, mDirect, tiles, warp):
        """A warpgroup's 64 columns of K."""
        thread, _, _ = cute.arch.thread_idx()
        r = self.registers(s, thread % 128, cute.arch.make_warp_uniform(warp // 4))
        n, m = Int32(0), Int32(0)
        unit, rows = self.unit(s, n)
        while unit >= 0:
            for x in (r.dqg, r.dkd, r.dkg, *r.scores, r.direct, r.states):
                x.fill(0.0)
            for _ in cutlass.range(tiles, unroll=1):
                self.tile(s, r, rows, n, m)
                m += 1
            self.finish(s, r, mDgi, mDirect, unit, rows, n)
            n += 1
            unit, rows = self.unit(s, n)

    @cute.jit
    def tile(self, s, r, rows, n, m):
        """Sums over a tile of V."""
        stage, phase = m % self.stages, (m // self.stages) & 1
        at = self.tile_places(stage)
        cute.arch.mbarrier_wait(s.barrier + self.first_full + stage, phase)
        if const_expr(self.parts >= self.groups):
            for i in cutlass.range_constexpr(self.parts // self.groups):
                self.values(s, r, at, self.own(r, i), n, rows, stage, phase, i == 0)
        else:
            if r.group == 0:
                self.values(s, r, at, 0, n, rows, stage, phase, False)
            cute.arch.mbarrier_wait(s.barrier + self.second_full + stage, phase)
            warpgroup.fence()
            self.from_state(r, at)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        # dbeta over this group's columns, in one of two places: the other group may still read that of the unit before.
        for h in cutlass.range_constexpr(2):
            total = sum_lanes(r.direct[h], (2, 1))
            if r.lane % 4 == 0:
                place = ((n & 1) * self.groups + r.group) * CHUNK + r.row + 8 * h
                store_shared(s.small + self.at_direct + 4 * place, 0, [total])
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=PAIR, number_of_threads=self.consumers)

        # dkg += v' dS^T; dA += do v'^T, dL += y v'^T
        warpgroup.fence()
        for i in cutlass.range_constexpr(self.parts):
            rA = r.a[None, None, None, at.v + i]
            rB = r.columns[None, None, None, at.dS + i * self.groups + r.group]
            product(r.by_columns, r.dkg, rA, rB, 0, 4, False)
        for x in cutlass.range_constexpr(len(r.scores)):
            left = at.y if x == 1 else at.do
            if const_expr(self.groups == 2):
                left = at.do - r.group * self.parts
            for i in cutlass.range_constexpr(self.parts):
                rA, rB = r.a[None, None, None, left + i], r.rows[None, None, None, at.v + i]
                product(r.by_rows, r.scores[x], rA, rB, 0, 4, False)
        warpgroup.commit_group()
        self.sum_states(s, r, at)
        warpgroup.wait_group(0)
        reads_done()
        cute.arch.sync_warp()
        if r.lane == 0:
            cute.arch.mbarrier_arrive(s.barrier + self.left + stage)

    @cute.jit
    def values(self, s, r, at, part, n, rows, stage, phase, others: cutlass.Constexpr[bool]):
        """beta R and v' of 64 columns of V in place of v, y R; `others`: products with the state go along."""
        bar, head = 1 + r.group, n % HEADS * (self.groups + 1)
        # R = v + kd S
        for j in cutlass.range_constexpr(8):
            for h in cutlass.range_constexpr(2):
                (word,) = load_shared(self.word(s, r, at.v + part, j), 1024 * h, 1, Uint32)
                for e, x in enumerate(unpack(self.dtype, word)):
                    r.R[4 * j + 2 * h + e] = select(r.row + 8 * h < rows, x, Float32(0.0))
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.groups):
            rA, rB = r.a[None, None, None, head + k], r.rows[None, None, None, at.S + part * self.groups + k]
            product(r.by_rows, r.R, rA, rB, 0, 4, False)
        warpgroup.commit_group()
        if const_expr(others):
            cute.arch.mbarrier_wait(s.barrier + self.second_full + stage, phase)
            self.from_state(r, at)
            warpgroup.commit_group()
        warpgroup.wait_group(int(others))
        # dbeta = sum_v y R
        beta = self.beta_of(s, r, n)
        for j in cutlass.range_constexpr(8):
            for h in cutlass.range_constexpr(2):
                (word,) = load_shared(self.word(s, r, at.y + part, j), 1024 * h, 1, Uint32)
                for e, x in enumerate(unpack(self.dtype, word)):
                    r.direct[h] = fma(x, r.R[4 * j + 2 * h + e], r.direct[h])
                    r.R[4 * j + 2 * h + e] = beta[h] * r.R[4 * j + 2 * h + e]
        self.put(s, r, r.R, at.v + part)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=bar, number_of_threads=128)
        # v' = M (beta R)
        warpgroup.fence()
        rA, rB = r.a[None, None, None, head + self.groups], r.columns[None, None, None, at.v + part]
        product(r.by_columns, r.R, rA, rB, 0, 4, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        # All warps' products have read R.
        cute.arch.barrier(barrier_id=bar, number_of_threads=128)
        self.put(s, r, r.R, at.v + part)

    def beta_of(self, s, r, n):
        """beta of a thread's two rows."""
        at = s.small + self.at_beta + 4 * (n % HEADS * CHUNK + r.row)
        return [load_shared(at, 32 * h, 1)[0] for h in range(2)]

    def from_state(self, r, at):
        """dqg += do S^T, dkd / beta += y S^T"""
        for acc, left in ((r.dqg, at.do), (r.dkd, at.y)):
            for i in range(self.parts):
                rA, rB = r.a[None, None, None, left + i], r.columns[None, None, None, at.S + i * self.groups + r.group]
                product(r.by_columns, acc, rA, rB, 0, 4, False)

    def put(self, s, r, acc, panel):
        """Accumulators, rounded, to a panel."""
        x = linear(acc)
        for j in range(8):
            for h in range(2):
                i = 4 * j + 2 * h
                store_shared(self.word(s, r, panel, j), 1024 * h, [pack2(x[i], x[i + 1], self.dtype)])

    def sum_states(self, s, r, at):
        """sum_v dS S over rows tid / 8 + 16 i of 8 columns."""
        offset = vector_offset(r.tid // 8, (r.tid % 8))
        panel = s.panels + (at.S + r.group) * BYTES + offset
        for i in range(self.parts):
            for x in range(4):
                base = panel + (i * self.groups * BYTES + 16 * x * 128)
                words = load_shared(base, 0, 4, Uint32)
                more = load_shared(base, self.groups * self.parts * BYTES, 4, Uint32)
                for c in range(4):
                    pairs = zip(unpack(self.dtype, words[c]), unpack(self.dtype, more[c]), strict=True)
                    for e, (a, b) in enumerate(pairs):
                        r.states[2 * c + e] = fma(a, b, r.states[2 * c + e])

    # ---------------------------------------------------------------------------------------------------------- end of a unit
    @cute.jit
    def finish(self, s, r, mDgi, mDirect, unit, rows, n):
        """From accumulators to results."""
        stage = n % HEADS
        # late_free also says that dA and dL of the unit before have been read.
        cute.arch.mbarrier_wait(s.barrier + self.late_full, n & 1)
        for x in cutlass.range_constexpr(len(r.scores)):
            self.put_scores(s, r, r.scores[x], Int32(self.own(r, x)), rows)

        beta = self.beta_of(s, r, n)
        # This thread's share of k . dk; `direct` becomes it.
        for h in cutlass.range_constexpr(2):
            r.direct[h] = fma(-beta[h], r.direct[h], self.twice_diagonal(r, h))
        head = stage * (self.groups + 1) + r.group
        for acc, panel, kind in (
            (r.dkd, head, KD), (r.dqg, self.late + r.group, QG), (r.dkg, self.late + self.groups + r.group, KG),
        ):  # fmt: skip
            self.put_factor(s, r, acc, panel, kind, beta, rows)
        cute.arch.fence_view_async_shared()

        # sum_i kg_i dkg_i, of the warp's rows, and decay sum_v dS S, of its share of V: eight numbers a column
        sums = s.small + self.at_sums + r.group * (8 * 64 * 4)
        pairs = [reduce_scatter([r.dkg[4 * j + e] for j in range(8)], (16, 8, 4), r.lane) for e in range(2)]
        store_shared(sums + r.warp * 256 + r.lane * 8, 0, pairs)
        totals = [sum_lanes(r.states[c], (16, 8)) for c in range(8)]
        if r.lane < 8:
            for c in cutlass.range_constexpr(0, 8, 4):
                at = s.small + self.at_decay + 4 * (stage * self.K + 64 * r.group) + 32 * r.lane
                decay = load_shared(at, 4 * c, 4)
                scaled = [a * b for a, b in zip(totals[c : c + 4], decay, strict=True)]
                store_shared(sums + 1024 + r.warp * 256 + r.lane * 32, 4 * c, scaled)
        # Also the last of this warp's reads of the head.
        cute.arch.sync_warp()
        if r.lane == 0:
            cute.arch.mbarrier_arrive(s.barrier + self.done)
        cute.arch.barrier(barrier_id=1 + r.group, number_of_threads=128)
        for h in cutlass.range_constexpr(2):
            if r.row + 8 * h == rows - 1:
                self.add_sums(r, sums, h)

        self.put_along(r, mDirect, unit)
        at = mDgi.iterator.toint() + (Int64(unit) * CHUNK + r.row) * (4 * self.K) + (256 * r.group + 8 * (r.lane % 4))
        for h in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(8):
                store_global(at, 8 * h * 4 * self.K + 32 * j, [r.R[4 * j + 2 * h + e] for e in range(2)])
        if r.group == 0 and r.tid < CHUNK:
            place = s.small + self.at_direct + 4 * ((n & 1) * self.groups * CHUNK + r.tid)
            total = load_shared(place, 0, 1)[0]
            if const_expr(self.groups == 2):
                total = total + load_shared(place, 4 * CHUNK, 1)[0]
            store_global(mDirect.iterator.toint() + (Int64(unit) * ((1 + self.groups) * CHUNK) + r.tid) * 4, 0, [total])

    def twice_diagonal(self, r, h):
        """2 y_i . v'_i of row i = row + 8 h where this thread has it, from the sums for -dL; else 0."""
        acc, found = r.scores[-1], Float32(0.0)
        for j in range(8):
            for e in range(2):
                mine = r.row + 8 * h == 8 * j + 2 * (r.lane % 4) + e
                if self.groups == 2:
                    mine = mine & (r.group == 1)
                found = select(mine, 2.0 * acc[4 * j + 2 * h + e], found)
        return found

    @cute.jit
    def put_along(self, r, mDirect, unit):
        """The group's share of k . dk of its rows, behind dbeta's part."""
        at = mDirect.iterator.toint() + ((Int64(unit) * (1 + self.groups) + 1 + r.group) * CHUNK + r.row) * 4
        for h in cutlass.range_constexpr(2):
            total = sum_lanes(r.direct[h], (2, 1))
            if r.lane % 4 == 0:
                store_global(at, 32 * h, [total])

    @cute.jit
    def put_scores(self, s, r, acc, index, rows):
        """dA (index 0) or dL (1) with zeros where they have nothing."""
        sign = Float32(1 - 2 * index)
        for j in cutlass.range_constexpr(8):
            for h in cutlass.range_constexpr(2):
                row = r.row + 8 * h
                # Columns below `limit` are kept.
                limit = row + 1 - index
                if row >= rows:
                    limit = Int32(0)
                column = 8 * j + 2 * (r.lane % 4)
                i = 4 * j + 2 * h
                values = [select(column + e < limit, acc[i + e] * sign, Float32(0.0)) for e in range(2)]
                address = self.word(s, r, self.scores + index, j)
                store_shared(address, 1024 * h, [pack2(values[0], values[1], self.dtype)])

    @cute.jit
    def put_factor(self, s, r, acc, panel, kind: cutlass.Constexpr[int], beta, rows):
        """A factor's gradient into the factor's place; its share of dGi into r.R; of kg, products over two rows into acc."""
        for j in cutlass.range_constexpr(8):
            pairs = []
            for h in cutlass.range_constexpr(2):
                i = 4 * j + 2 * h
                address = self.word(s, r, panel, j)
                (word,) = load_shared(address, 1024 * h, 1, Uint32)
                values = [acc[i], acc[i + 1]]
                if const_expr(kind == KD):
                    values = [x * beta[h] for x in values]
                if const_expr(kind == QG):
                    values = [select(r.row + 8 * h < rows, x, Float32(0.0)) for x in values]
                store_shared(address, 1024 * h, [pack2(values[0], values[1], self.dtype)])
                factor = unpack(self.dtype, word)
                for e in cutlass.range_constexpr(2):
                    if const_expr(kind == KD):
                        r.R[i + e] = factor[e] * values[e]
                        r.direct[h] = r.direct[h] + r.R[i + e]
                    elif const_expr(kind == QG):
                        r.R[i + e] = fma(factor[e], values[e], r.R[i + e])
                    else:
                        term = factor[e] * values[e]
                        r.R[i + e] = r.R[i + e] - term
                        pairs.append(term)
            if const_expr(kind == KG):
                for e in cutlass.range_constexpr(2):
                    acc[4 * j + e] = pairs[e] + pairs[2 + e]

    @cute.jit
    def add_sums(self, r, sums, h: cutlass.Constexpr[int]):
        """The sums over rows and over V to the row of the last valid token."""
        for j in cutlass.range_constexpr(8):
            for w in cutlass.range_constexpr(8):
                found = load_shared(sums + 8 * (r.lane % 4), 256 * w + 32 * j, 2)
                for e in cutlass.range_constexpr(2):
                    i = 4 * j + 2 * h + e
                    r.R[i] = r.R[i] + found[e]


def compile(config: InterConfig, **tuning):
    """The launch function for `config`.

    Its arguments: `(factors, scores, decay, beta, hs, dhs, v, do, y, cu_seqlens, dfactors, dscores, dgi, direct, ctas)`. cu_seqlens is None
    for sequences that are not packed; `ctas` is how many CTAs to launch, the device's multiprocessors. direct, fp32 [slots, HV, 1 + K / 64,
    64], has dbeta's part and then k . dk, in a share for every 64 columns of K. `tuning` is `KdaInter`'s.
    """
    kernel = KdaInter(config, **tuning)
    dt, K = kernel.dtype, config.key_dim
    slots, heads, batch, tokens, value_dim = (cute.sym_int() for _ in range(5))

    values = row_major(dt, (batch, tokens, heads, value_dim))
    return cute.compile(
        kernel,
        row_major(dt, (slots, heads, 3, K // 64, 64, 64), (1, 2, 3, 4)),
        row_major(dt, (slots, heads, 3, 64, 64), (1, 2, 3)),
        row_major(Float32, (slots, heads, K), (1,)),
        row_major(Float32, (slots, heads, 64), (1,)),
        row_major(dt, (slots, heads, value_dim, K), (2,)),
        row_major(dt, (slots, heads, value_dim, K), (2,)),
        values,
        row_major(dt, (batch, tokens, heads, value_dim)),
        row_major(dt, (slots, heads, 64, value_dim)),
        make_fake_tensor(DTYPES[config.cu_seqlens], (cute.sym_int(),), stride=(1,)) if config.cu_seqlens else None,
        row_major(dt, (slots, heads, 3, 64, K), (1, 2, 3)),
        row_major(dt, (slots, heads, 2, 64, 64), (1, 2, 3)),
        row_major(Float32, (slots, heads, 64, K), (1, 2)),
        row_major(Float32, (slots, heads, 1 + K // 64, 64), (1, 2)),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
