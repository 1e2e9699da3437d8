"""KDA forward on datacentre Blackwell: the serial pass over chunks, products in tensor memory.

For every chunk of 64 tokens, with the state S [K, V] in fp32 and the operands in the io dtype

    of slots, the workspace of `warp.kda_prepare`    of tokens, as flash-linear-attention has them
    v' = M' v + w S           (w = M' kd)            v' = u - w S
    o  = qg S + Aqk v'        (scale in qg)          o  = s qg S + Aqk v'
    S <- diag(2^(G_C)) S + kg^T v'                   the same

Everything is computed transposed, so that the left operands S^T and v'^T are rounded accumulators: they go from registers back to tensor
memory, not through shared memory, and the right operands are used as they come. v^T is a left operand as it comes, too.

    P   = v^T M'^T + S^T w^T    v'^T = P             P = S^T w^T    v'^T = u^T - P
    o^T = S^T qg^T + v'^T Aqk^T
    D   = v'^T kg               S^T <- S^T diag(2^(G_C)) + D

Of slots M' v is never rounded. Every product is made of blocks `tile` x 64 x 64, for each of which the right operand is one panel of
shared memory (see `tile.panel`); v^T is tile / 64 panels. S^T w^T and S^T qg^T sum over the K / 64 blocks of S^T, D has one for each.

Work: a CTA takes one sequence n, one value head and `tile` columns of V: index (n * HV + hv) * (V / tile) + tile.

Warps:
    0        fetches: w, qg, kg, Aqk and, of slots, M' of a chunk (`operands`), v (`values`), decay and, of tokens, u (`decay`); pipelines
             of their own, since they are done with at different times (`kda_fetch`)
    1        issues the products; allocates tensor memory and frees it
    2, 3     where operands are not clean, set to zero in shared memory: of tokens Aqk above its diagonal and kg's rows beyond the sequence,
             of slots v's rows beyond it (`kda_fetch`)
    4 to 7   recurrence: v'^T from P, S^T in registers, its rounded form as the next chunk's operand; each 32 rows (tile 64: 16)
    8 to 11  epilogue: o^T to o through shared memory; never waited for by the recurrence as long as it keeps within a chunk of it

Barriers, one phase a chunk unless staged:
    operands_full, operands_empty [stages]   bytes; the products of the chunk (commit), of both CTAs of a cluster
    values_full, values_empty [value stages] of slots: bytes; commit of v^T M'^T
    decay_full, decay_empty [decay stages]   bytes; recurrence warps
    clean [stages, value stages of slots]    warps 2 and 3: what is full is clean as well
    state [K / 64]                           recurrence warps: a block of S^T is in tensor memory (and D's block was read)
    p                                        commit of P
    new_values                               recurrence warps: v'^T is in tensor memory (and P was read)
    update [K / 64]                          commit of a block of D
    o_full, o_empty [readout stages]         commit of o^T; epilogue warps

Timeline of a chunk; every line waits for the one before it, except that blocks overlap:

    products     P (+)= S^T w^T | o^T = S^T qg^T | D_0 | D_1 | o^T += v'^T Aqk^T | of slots, the next chunk's P = v^T M'^T
    recurrence   of tokens, u to registers | (P) v'^T | (D_0) S^T, k < 64 | (D_1) S^T, k >= 64
    next chunk   S^T w^T starts with S^T's first block while the second is still being updated

A commit covers all products issued before it. So D's first block being complete means that P and S^T qg^T are, and S^T and v'^T have no
barrier that says that they may be overwritten. Of slots the next chunk's P is begun when `new_values` has said that P was read, while D
still is being read, and has columns of its own; of tokens it is begun when `state` has said that D was read, and shares D's first
columns (see `plan`).

Rows beyond a sequence's end: tensor copies fill with zeros beyond T. Packed sequences have the next one's rows there, which may hold
anything, and 0 * NaN is NaN. Of tokens, v'^T's columns are selected to zero, kg's rows are cleared, Aqk's columns lie above its
diagonal; rows of w, qg, Aqk, u reach only their own column. Of slots, images have zeros there, and v's rows are cleared: v'^T's columns
are then zero because rows of M' and w are. o's rows beyond the end are not stored.

Clusters: the CTAs of two neighbouring tiles of V fetch half of the operands each, for both; a stage is free when both have used it.

Memory at K = 128, tile 128, of slots: 64 KB of operands a stage (three), 16 KB of v (one stage: it is free again when a chunk's products
begin, and wanted when they end), 0.5 KB of decay a stage (three), 16 KB of o; 480 columns of tensor memory. Of tokens 56 KB of operands
and 16.5 KB of u and decay a stage (two), 416 columns (see `plan`). One CTA an SM.

Constraints: K 64 or 128; V a multiple of `tile` * `cluster`; last dimensions contiguous, other strides multiples of 16 bytes.
"""

# mypy: ignore-errors

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from ...tile.arguments import DTYPES
from ...tile.matrices import load_transposed, store_transposed
from ...tile.panel import BYTES as PANEL_BYTES
from ...tile.panel import ELEMENTS as PANEL
from ...tile.panel import vector_offset
from ...tile.ptx import exp2, fma, load_shared, pack, store_global, unpack
from ...tile.sequence import tokens_of
from ...tile.tensor import fence_after, fence_before, lanes, load_fp32, store_pairs, wait_loads, wait_stores
from ..config import CHUNK, BlackwellScanConfig
from .kda_fetch import Fetch
from .plan import STATE_STAGES, plan

THREADS = 384
GROUP = 128
SHIFT = CHUNK.bit_length() - 1
REGISTERS = {"fetch": 96, "recurrence": 240}
"""A thread of these warpgroups; the epilogue keeps the 168 that every thread starts with, which makes 504 together."""
O_BARRIER = 1


class KdaScan(Fetch):
    """The kernel for one `BlackwellScanConfig`. `stages` and `value_stages` override the depth of its pipelines."""

    def __init__(
        self, config: BlackwellScanConfig, *, stages: int | None = None, value_stages: int | None = None
    ) -> None:
        self.config = config
        self.plan = plan(config, stages, value_stages)
        self.dtype = DTYPES[config.dtype]
        self.K = config.key_dim
        self.blocks = self.K // 64
        self.groups = config.tile // 64
        self.stages, self.value_stages = self.plan.stages, self.plan.value_stages
        self.decay_stages, self.clean_stages = self.plan.decay_stages, self.plan.clean_stages
        self.o_stages = self.plan.readout_stages
        self.slots = config.operands == "slots"
        self.packed = bool(config.cu_seqlens)
        # What warps 2 and 3 have to do: above Aqk's diagonal, and anything at all.
        self.mask = not self.slots and not config.zeroed
        self.cleaned = self.mask or self.packed
        # Panels of a stage; M' is there of slots alone.
        self.w, self.qg, self.kg, self.inverse = 0, self.blocks, 2 * self.blocks, 3 * self.blocks
        self.operand_panels = self.plan.operand_panels
        self.aqk = self.operand_panels - 1
        self.cluster = config.cluster

    # ---------------------------------------------------------------------------------------------------------------- host
    @cute.jit
    def __call__(
        self,
        qg: cute.Tensor,
        kg: cute.Tensor | None,
        w: cute.Tensor,
        u: cute.Tensor,
        aqk: cute.Tensor,
        g: cute.Tensor,
        h0: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        o: cute.Tensor,
        ht: cute.Tensor | None,
        scale: Float32,
        stream,
    ):
        """Launch: one CTA for a sequence, value head and tile of V. Of slots: factors for qg, v for u, scores for aqk, decay for g."""
        batch, _, heads, value_dim = o.shape
        sequences = batch
        if const_expr(cu_seqlens is not None):
            sequences = cu_seqlens.shape[0] - 1
        tiles = value_dim // self.config.tile
        store, to = self.tensor_copy(cpasync.CopyBulkTensorTileS2GOp(), o)
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_x, tx = self.tensor_copy(load, u)
        loads = [(None, None)] * 4
        if const_expr(not self.slots):
            shared = load if const_expr(self.cluster == 1) else cpasync.CopyBulkTensorTileG2SMulticastOp()
            loads = [self.tensor_copy(shared, x, self.cluster) for x in (w, qg, kg, aqk)]
        (load_w, tw), (load_q, tq), (load_k, tk), (load_a, ta) = loads
        self.kernel(
            load_w, tw, load_q, tq, load_k, tk, load_a, ta, load_x, tx, store, to,
            qg if const_expr(self.slots) else None, w if const_expr(self.slots) else None, aqk if const_expr(self.slots) else None,
            g, h0, cu_seqlens, o, ht, scale, Int32(tiles),
        ).launch(
            grid=(sequences * heads * tiles, 1, 1), block=(THREADS, 1, 1), cluster=(self.cluster, 1, 1), stream=stream,
            min_blocks_per_mp=1, use_pdl=False,
        )  # fmt: skip

    def tensor_copy(self, op, x, ctas=1):
        """The copy of panels of x [B, T, HV, D], of which `ctas` CTAs fetch a share each, and the tensor of coordinates (T, D, HV, B)."""
        view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))
        return cpasync.make_tiled_tma_atom(op, view, self.panel_layout(None), (CHUNK, 64), num_multicast=ctas)

    def panel_layout(self, panels):
        """A panel, or several, as (row, column) or (row, column, panel)."""
        shape, stride = ((64, 64), (64, 1)) if panels is None else ((64, 64, panels), (64, 1, PANEL))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(shape, stride=stride))

    def products(self):
        """Blocks of `tile` x 64 x 64 with A in tensor memory, B with rows as N (w, qg, Aqk) or with columns (kg); with A in shared memory,
        its columns as M (v), B with rows as N (M')."""
        by_rows, by_columns = OperandMajorMode.K, OperandMajorMode.MN
        tensor, shared = tcgen05.OperandSource.TMEM, tcgen05.OperandSource.SMEM
        return tuple(
            sm100.make_trivial_tiled_mma(
                self.dtype, self.dtype, a, b, Float32, tcgen05.CtaGroup.ONE, (self.config.tile, 64), source
            )
            for a, b, source in (
                (by_rows, by_rows, tensor),
                (by_rows, by_columns, tensor),
                (by_columns, by_rows, shared),
            )
        )

    # -------------------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def kernel(
        self,
        load_w: cute.CopyAtom | None,
        tW: cute.Tensor | None,
        load_q: cute.CopyAtom | None,
        tQ: cute.Tensor | None,
        load_k: cute.CopyAtom | None,
        tK: cute.Tensor | None,
        load_a: cute.CopyAtom | None,
        tA: cute.Tensor | None,
        load_x: cute.CopyAtom,
        tX: cute.Tensor,
        store: cute.CopyAtom,
        tO: cute.Tensor,
        mF: cute.Tensor | None,
        mW: cute.Tensor | None,
        mM: cute.Tensor | None,
        mG: cute.Tensor,
        mH: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mO: cute.Tensor,
        mHt: cute.Tensor | None,
        scale: Float32,
        tiles: Int32,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tid, _, _ = cute.arch.thread_idx()
        s = self.shared()
        b = self.barriers(s, tid)
        if warp_idx == 1:
            cute.arch.alloc_tmem(self.plan.allocated, s.tensor_at)
            cute.arch.relinquish_tmem_alloc_permit()
        fence_before()
        if const_expr(self.cluster > 1):
            # The other CTA's copies and commits arrive at these barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        fence_after()
        tensor_base = cute.make_tensor(s.tensor_at, cute.make_layout(1))[0]
        # What the kernel before writes is read from here on.
        cute.arch.griddepcontrol_wait()

        # Each role finds out for itself what to work on: values that live from here on would be spilled where registers are handed over.
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(REGISTERS["fetch"])
            if warp_idx == 0:
                at = self.unit(mCu, mO, tiles)
                if const_expr(self.slots):
                    self.fetch_slots(s, b, mF, mW, mM, mG, load_x, tX, at)
                else:
                    loads = ((load_w, tW), (load_q, tQ), (load_k, tK), (load_a, tA), (load_x, tX))
                    self.fetch_tokens(s, b, loads, mG, at)
            elif warp_idx == 1:
                self.issue(s, b, self.unit(mCu, mO, tiles))
            else:
                if const_expr(self.cleaned):
                    self.clean(s, b, self.unit(mCu, mO, tiles))
        elif warp_idx < 8:
            cute.arch.setmaxregister_increase(REGISTERS["recurrence"])
            self.recur(s, b, mH, mHt, self.unit(mCu, mO, tiles), tensor_base)
        else:
            self.epilogue(s, b, store, tO, mO, scale, self.unit(mCu, mO, tiles), tensor_base)
        fence_before()
        cute.arch.sync_threads()
        fence_after()
        if warp_idx == 1:
            cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, s.tensor_at), self.plan.allocated)

    def shared(self):
        """Shared memory: panels of operands, of v or u and of o, decay factors, barriers, the address of tensor memory."""
        smem, s = SmemAllocator(), SimpleNamespace()

        def panels(n):
            raw = smem.allocate_array(self.dtype, n * PANEL, byte_alignment=1024)
            layout = self.panel_layout(n)
            return raw, cute.make_tensor(cute.recast_ptr(raw, layout.inner, self.dtype), layout.outer)

        s.operands_at, s.operands = panels(self.stages * self.operand_panels)
        s.values_at, s.values = panels(self.value_stages * self.groups)
        s.o_at, s.o = panels(self.groups)
        s.decay_at = smem.allocate_array(Float32, self.decay_stages * self.K, byte_alignment=128)
        s.barriers_at = smem.allocate_array(Int64, self.plan.barriers, byte_alignment=8)
        s.tensor_at = smem.allocate_array(Int32, 1, byte_alignment=8)
        return s

    @cute.jit
    def barriers(self, s, tid):
        """All barriers, initialised; the caller synchronises."""
        b, counts = SimpleNamespace(), []

        def several(n, count):
            counts.extend([count] * n)
            return s.barriers_at + (len(counts) - n)

        b.operands_full, b.operands_empty = several(self.stages, 1), several(self.stages, self.cluster)
        b.clean = several(self.clean_stages, 2)
        b.decay_full, b.decay_empty = several(self.decay_stages, 1), several(self.decay_stages, 4)
        b.state, b.update = several(self.blocks, 4), several(self.blocks, 1)
        b.p, b.new_values = several(1, 1), several(1, 4)
        b.o_full, b.o_empty = several(self.o_stages, 1), several(self.o_stages, 4)
        if const_expr(self.slots):
            b.values_full, b.values_empty = several(self.value_stages, 1), several(self.value_stages, 1)
        if tid == 0:
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(s.barriers_at + i, counts[i])
        cute.arch.mbarrier_init_fence()
        assert len(counts) == self.plan.barriers
        return b

    @cute.jit
    def unit(self, mCu, mO, tiles):
        """What this CTA works on: sequence, head and tile, tokens and slots of its chunks; and this warp's place in its warpgroup."""
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        tile = block % tiles
        hv = block // tiles % mO.shape[2]
        n = block // tiles // mO.shape[2]
        start = Int32(0)
        length = Int32(mO.shape[1])
        batch = n
        chunks = (length + (CHUNK - 1)) >> SHIFT
        slot = n * chunks
        if const_expr(mCu is not None):
            # Whatever the bounds say, nothing outside the tensors is touched.
            start, end = tokens_of(mCu, n, length)
            length = end - start
            batch = Int32(0)
            chunks = (length + (CHUNK - 1)) >> SHIFT
            slot = (start >> SHIFT) + n
        return SimpleNamespace(
            tile=tile, hv=hv, n=n, batch=batch, start=start, length=length, chunks=chunks, slot=slot, warp=warp
        )  # fmt: skip

    def rows(self, at, c):
        """Tokens of chunk c."""
        return cutlass.min(CHUNK, at.length - c * CHUNK)

    @cute.jit
    def arrive(self, barrier):
        """This warp is done with, or has written, tensor or shared memory that the barrier is about."""
        fence_before()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    # ------------------------------------------------------------------------------------------------------------- products
    @cute.jit
    def product(self, mma, tD, tA, rB, panel, accumulate: cutlass.Constexpr[bool]):
        """tD (+)= tA times one panel, issued and left in flight. The atom is made anew, so that its flag is a constant."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(tcgen05.Field.ACCUMULATE, accumulate)
        for k in cutlass.range_constexpr(4):
            cute.gemm(atom, tD, tA[None, None, k], rB[None, None, k, panel], tD)
            atom.set(tcgen05.Field.ACCUMULATE, True)

    @cute.jit
    def commit(self, barrier, ctas: cutlass.Constexpr[int] = 1):
        """Arrives, when the products so far are done, at this CTA's barrier or at the same one of all CTAs of the cluster."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier, None if const_expr(ctas == 1) else (1 << ctas) - 1)

    @cute.jit
    def issue(self, s, b, at):
        """The products of all chunks, in an order in which the serial ones never queue behind those of o."""
        by_rows, by_columns, by_values = self.products()
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, s.tensor_at)
        tile, blocks = const_expr(self.config.tile), const_expr(self.blocks)
        n = const_expr(self.stages * self.operand_panels)

        def operands(mma):
            layout = sm100.make_smem_layout_b(mma, (tile, 64, 64), self.dtype, n)
            return mma.make_fragment_B(cute.make_tensor(s.operands.iterator, layout.outer))

        rows, columns = operands(by_rows), operands(by_columns)
        a_layout = by_rows.make_fragment_A(by_rows.partition_shape_A((tile, 64))).layout
        d_layout = by_rows.make_fragment_C(by_rows.partition_shape_C((tile, 64))).layout
        half_base = cute.recast_ptr(base, dtype=self.dtype)

        v_layout = sm100.make_smem_layout_a(by_values, (tile, 64, 64), self.dtype, self.value_stages)
        values = by_values.make_fragment_A(cute.make_tensor(s.values.iterator, v_layout.outer))
        tP = cute.make_tensor(base + self.plan.p, d_layout)
        tV = cute.make_tensor(half_base + 2 * self.plan.new_values, a_layout)
        for c in cutlass.range(at.chunks, unroll=1):
            stage, phase = c % self.stages, c // self.stages & 1
            even = c & 1
            panel = stage * self.operand_panels
            state = self.plan.state + c % STATE_STAGES * (self.K // 2)
            cute.arch.mbarrier_wait(b.operands_full + stage, phase)
            if const_expr(self.slots):
                # P = v^T M'^T: the P before has been read, or its v'^T would not have come
                at_v = c % self.value_stages
                ready = b.clean if const_expr(self.cleaned) else b.values_full
                cute.arch.mbarrier_wait(ready + at_v, c // self.value_stages & 1)
                fence_after()
                self.product(by_values, tP, values[None, None, None, at_v], rows, panel + self.inverse, False)
                self.commit(b.values_empty + at_v)
            # P (+)= S^T w^T, block by block as S^T gets ready
            for k in cutlass.range_constexpr(blocks):
                cute.arch.mbarrier_wait(b.state + k, even)
                fence_after()
                self.product(
                    by_rows,
                    tP,
                    cute.make_tensor(half_base + 2 * (state + 32 * k), a_layout),
                    rows,
                    panel + self.w + k,
                    self.slots or k > 0,
                )
            self.commit(b.p)
            # o^T = S^T qg^T
            slot = c % self.o_stages
            cute.arch.mbarrier_wait(b.o_empty + slot, c // self.o_stages & 1 ^ 1)
            fence_after()
            out = self.plan.readout + slot * 64
            for k in cutlass.range_constexpr(blocks):
                self.product(
                    by_rows,
                    cute.make_tensor(base + (out), d_layout),
                    cute.make_tensor(half_base + 2 * (state + 32 * k), a_layout),
                    rows,
                    panel + self.qg + k,
                    k > 0,
                )
            # D = v'^T kg
            if const_expr(self.cleaned and not self.slots):
                cute.arch.mbarrier_wait(b.clean + stage, phase)
            cute.arch.mbarrier_wait(b.new_values, even)
            fence_after()
            for k in cutlass.range_constexpr(blocks):
                self.product(
                    by_columns,
                    cute.make_tensor(base + (self.plan.update + 64 * k), d_layout),
                    tV,
                    columns,
                    panel + self.kg + k,
                    False,
                )
                self.commit(b.update + k)
            # o^T += v'^T Aqk^T, or apart where the first addend is still to be scaled
            out = out if const_expr(self.slots) else self.plan.readout + 64
            self.product(by_rows, cute.make_tensor(base + (out), d_layout), tV, rows, panel + self.aqk, self.slots)
            self.commit(b.o_full + slot)
            self.commit(b.operands_empty + stage, self.cluster)

    # ----------------------------------------------------------------------------------------------------------- recurrence
    def value_row(self, at, h):
        """First of the 16 rows of half h that this warp has, among the tile's."""
        return at.warp * (16 * self.groups) + 16 * h

    def half(self, at, address, h):
        """Where these rows are in tensor memory."""
        return lanes(address, 32 * at.warp + 16 * h)

    def matrix_offset(self, at, row, i):
        """Of this lane's part of four 8 x 8 matrices [token][v]: tokens 8 i .. 8 i + 15, columns `row` .. `row` + 15 of the tile's V."""
        token = 8 * (i + cute.arch.lane_idx() // 16) + cute.arch.lane_idx() % 8
        return row // 64 * PANEL_BYTES + vector_offset(token, row % 64 // 8 + cute.arch.lane_idx() // 8 % 2)

    @cute.jit
    def recur(self, s, b, mH, mHt, at, tensor_base):
        """Rows of S^T in registers: v'^T, the update, and the rounded state for the next chunk."""
        groups, blocks = const_expr(self.groups), const_expr(self.blocks)
        rS = cute.make_rmem_tensor((32, blocks, groups), Float32)
        if const_expr(mH is not None):
            self.state_elements(rS, mH, at, False)
        else:
            rS.fill(0.0)
        if at.chunks > 0:
            for k in cutlass.range_constexpr(blocks):
                self.share_state(rS, b, at, tensor_base, Int32(0), k)

        for c in cutlass.range(at.chunks, unroll=1):
            stage, phase = c % self.decay_stages, c // self.decay_stages & 1
            even = c & 1
            cute.arch.mbarrier_wait(b.decay_full + stage, phase)
            if const_expr(not self.slots):
                u = self.load_u(s, at, stage)
            # v'^T = P, or u^T - P
            cute.arch.mbarrier_wait(b.p, even)
            fence_after()
            p = [load_fp32(self.half(at, tensor_base + self.plan.p, h), 64) for h in range(groups)]
            wait_loads()
            for h in cutlass.range_constexpr(groups):
                words = []
                for i in cutlass.range_constexpr(16):
                    low, high = p[h][2 * i : 2 * i + 2]
                    if const_expr(not self.slots):
                        u_low, u_high = unpack(self.dtype, u[h][i])
                        low, high = u_low - low, u_high - high
                    words.append(pack(self.dtype, low, high))
                if const_expr(self.packed and not self.slots):
                    words = self.keep_tokens(words, self.rows(at, c), cute.arch.lane_idx())
                store_pairs(self.half(at, tensor_base + self.plan.new_values, h), words)
            wait_stores()
            self.arrive(b.new_values)
            # S^T <- S^T diag(decay) + D
            decay_at = s.decay_at.toint() + stage * (4 * self.K) + cute.arch.lane_idx() % 4 * 8
            for k in cutlass.range_constexpr(blocks):
                decay = [x for i in range(8) for x in load_shared(decay_at, 256 * k + 32 * i, 2)]
                if const_expr(not self.slots):
                    decay = [exp2(x) for x in decay]
                cute.arch.mbarrier_wait(b.update + k, even)
                fence_after()
                d = [load_fp32(self.half(at, tensor_base + (self.plan.update + 64 * k), h), 64) for h in range(groups)]
                wait_loads()
                for h in cutlass.range_constexpr(groups):
                    for i in cutlass.range_constexpr(32):
                        rS[i, k, h] = fma(rS[i, k, h], decay[i // 4 * 2 + i % 2], d[h][i])
                if c + 1 < at.chunks:
                    self.share_state(rS, b, at, tensor_base, (c + 1) % STATE_STAGES, k)
            self.arrive(b.decay_empty + stage)

        if const_expr(mHt is not None):
            self.state_elements(rS, mHt, at, True)

    def load_u(self, s, at, stage):
        """This warp's rows of u^T, in pairs, in the order of accumulators."""
        values = s.values_at.toint() + stage * (self.groups * PANEL_BYTES)
        return [
            [
                w
                for i in range(0, 8, 2)
                for w in load_transposed(values + self.matrix_offset(at, self.value_row(at, h), i))
            ]
            for h in range(self.groups)
        ]

    @cute.jit
    def share_state(self, rS, b, at, tensor_base, stage, k: cutlass.Constexpr[int]):
        """Block k of S^T, rounded, as an operand."""
        for h in cutlass.range_constexpr(self.groups):
            words = [pack(self.dtype, rS[2 * i, k, h], rS[2 * i + 1, k, h]) for i in range(16)]
            column = tensor_base + (self.plan.state + 32 * k) + stage * (self.K // 2)
            store_pairs(self.half(at, column, h), words)
        wait_stores()
        self.arrive(b.state + k)

    @cute.jit
    def keep_tokens(self, words, rows, lane):
        """Columns `rows` and beyond of 16 words of a fragment become 0, whatever they held."""
        kept = []
        for i in cutlass.range_constexpr(16):
            left = rows - (i // 2 * 8 + lane % 4 * 2)
            mask = Uint32(0)
            if left == 1:
                mask = Uint32(0xFFFF)
            if left > 1:
                mask = Uint32(0xFFFFFFFF)
            kept.append(words[i] & mask)
        return kept

    @cute.jit
    def state_elements(self, rS, mS, at, write: cutlass.Constexpr[bool]):
        """This thread's rows of S^T from, or to, a state in the caller's layout."""
        first = at.tile * self.config.tile + cute.arch.lane_idx() // 4
        for h in cutlass.range_constexpr(self.groups):
            for k in cutlass.range_constexpr(self.blocks):
                for i in cutlass.range_constexpr(32):
                    v = first + self.value_row(at, h) + i // 2 % 2 * 8
                    d = 64 * k + i // 4 * 8 + cute.arch.lane_idx() % 4 * 2 + i % 2
                    index = (at.n, at.hv, v, d) if const_expr(self.config.state_v_first) else (at.n, at.hv, d, v)
                    if const_expr(write):
                        mS[index] = rS[i, k, h]
                    else:
                        rS[i, k, h] = mS[index]

    # ------------------------------------------------------------------------------------------------------------- epilogue
    @cute.jit
    def epilogue(self, s, b, store, tO, mO, scale, at, tensor_base):
        """o^T to shared memory as panels [token][v], and from there to o."""
        groups = const_expr(self.groups)
        gO = cute.local_tile(
            cute.domain_offset((at.start, 0), tO[None, None, at.hv, at.batch]), (CHUNK, 64), (None, None)
        )
        oS, oG = cpasync.tma_partition(
            store, 0, cute.make_layout(1), cute.group_modes(s.o, 0, 2), cute.group_modes(gO, 0, 2)
        )
        staging = s.o_at.toint()
        for c in cutlass.range(at.chunks, unroll=1):
            slot = c % self.o_stages
            cute.arch.mbarrier_wait(b.o_full + slot, c // self.o_stages & 1)
            fence_after()
            column = tensor_base + self.plan.readout + slot * 64
            words = []
            for h in cutlass.range_constexpr(groups):
                o = load_fp32(self.half(at, column, h), 64)
                if const_expr(self.slots):
                    wait_loads()
                else:
                    # o = s (qg S) + Aqk v'
                    inner = load_fp32(self.half(at, column + 64, h), 64)
                    wait_loads()
                    o = [fma(scale, o[i], inner[i]) for i in range(32)]
                words.append([pack(self.dtype, o[2 * i], o[2 * i + 1]) for i in range(16)])
            self.arrive(b.o_empty + slot)
            # The last chunk's copy has read the staging.
            if at.warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=O_BARRIER, number_of_threads=GROUP)
            for h in cutlass.range_constexpr(groups):
                for i in cutlass.range_constexpr(0, 8, 2):
                    address = staging + self.matrix_offset(at, self.value_row(at, h), i)
                    store_transposed(address, words[h][2 * i : 2 * i + 4])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=O_BARRIER, number_of_threads=GROUP)
            whole = Boolean(True)
            if const_expr(self.packed):
                whole = self.rows(at, c) == CHUNK
            if whole:
                if at.warp == 0:
                    for p in cutlass.range_constexpr(groups):
                        cute.copy(store, oS[None, p], oG[None, c, at.tile * groups + p])
                    cute.arch.cp_async_bulk_commit_group()
            elif const_expr(self.packed):
                self.store_rows(staging, mO, at, c)
        if at.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def store_rows(self, staging, mO, at, c):
        """A chunk that ends a packed sequence: its own rows only, 16 bytes at a time."""
        vectors = const_expr(self.config.tile // 8)
        for i in cutlass.range(32 * at.warp + cute.arch.lane_idx(), self.rows(at, c) * vectors, GROUP, unroll=1):
            row = i // vectors
            v = i % vectors
            words = load_shared(staging + v // 8 * PANEL_BYTES + vector_offset(row, v % 8), 0, 4, Uint32)
            dst = mO[at.batch, at.start + c * CHUNK + row, at.hv, None].iterator + (at.tile * self.config.tile + 8 * v)
            store_global(dst.toint(), 0, words)


def compile(config: BlackwellScanConfig, **tuning):
    """The launch function for `config`: `(qg, kg, w, u | v, aqk, g, h0, cu_seqlens, o, ht, scale)`.

    "tokens": qg, kg, w [B, T, HV, K], u, o [B, T, HV, V], aqk [B, T, HV, 64], g [B, T, HV, K] or [slots, HV, K] float32. "slots": qg is
    factors [slots, HV, 3, K/64, 64, 64], w the images of w = M' kd [slots, HV, K/64, 64, 64], v [B, T, HV, V], aqk scores [slots, HV, 2,
    64, 64], g decay [slots, HV, K]; kg is None, scale is not used. None also: h0 without `initial`, cu_seqlens of sequences that are not
    packed, ht without `final`. `tuning` is `KdaScan`'s.
    """
    kernel = KdaScan(config, **tuning)
    dt, K = kernel.dtype, config.key_dim
    slots, heads, batch, tokens, value_dim, sequences = (cute.sym_int() for _ in range(6))

    def tensor(dtype, shape):
        """Row-major with a contiguous last dimension."""
        width = 16 * 8 // dtype.width
        strides = [cute.sym_int64(divisibility=width) for _ in shape[:-1]] + [1]
        return make_fake_tensor(dtype, shape, stride=tuple(strides), assumed_align=16)

    def by_token(width, dtype=dt):
        return tensor(dtype, (batch, tokens, heads, width))

    def images(*shape):
        """Panels, whose places follow from the shape."""
        strides = [1]
        for n in reversed(shape[2:]):
            strides.append(strides[-1] * n if isinstance(n, int) else strides[-1])
        inner = list(reversed(strides[: len(shape) - 2]))
        outer = [cute.sym_int64(divisibility=PANEL), cute.sym_int64(divisibility=PANEL)]
        return make_fake_tensor(dt, shape, stride=tuple(outer + inner), assumed_align=16)

    state = (sequences, heads, value_dim, K) if config.state_v_first else (sequences, heads, K, value_dim)
    if kernel.slots:
        operands = (
            images(slots, heads, 3, K // 64, 64, 64), None, images(slots, heads, K // 64, 64, 64), by_token(value_dim),
            images(slots, heads, 2, 64, 64),
        )  # fmt: skip
    else:
        operands = (by_token(K), by_token(K), by_token(K), by_token(value_dim), by_token(CHUNK))
    gates = by_token(K, Float32) if not kernel.slots and config.gates == "all" else tensor(Float32, (slots, heads, K))
    return cute.compile(
        kernel,
        *operands,
        gates,
        tensor(Float32, state) if config.initial else None,
        make_fake_tensor(DTYPES[config.cu_seqlens], (cute.sym_int(),), stride=(1,), assumed_align=8)
        if config.cu_seqlens
        else None,
        by_token(value_dim),
        tensor(Float32, state) if config.final else None,
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
