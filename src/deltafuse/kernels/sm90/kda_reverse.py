"""KDA backward on Hopper: the serial pass over chunks, from the last to the first.

For every chunk of 64 tokens, with dS+ [K, V] the gradient of the state that leaves the chunk, in fp32, and the operands of
`warp.kda_prepare` (with `inverse`) in the io dtype

    dv' = Aqk^T do + kg dS+        y  = M^T dv'
    dR  = diag(beta) y             dS = diag(decay) dS+ + qg^T do + kd^T dR

dR is the gradient of v. Outputs: y and dR of every token, dS+ of every chunk, dS of the first. All is computed transposed, so that dS^T
stays in wgmma accumulators and every left operand is in registers:

    dv'^T = do^T Aqk + dS+^T kg^T     64 x 64 x 64 and K,  A = do^T as it comes from shared memory, dS+^T rounded
    y^T   = dv'^T M                   64 x 64 x 64,        A = dv'^T rounded
    dR^T  = y^T diag(beta)
    dS^T  = dS+^T diag(decay) + do^T qg + dR^T kd          64 x K x 64 twice,  A = do^T, dR^T rounded

Work, warps and pipelines are those of `kda_scan`, with do in the place of v: index ((n * segments + s) * HV + hv) * (V / tile) + tile;
consumer warpgroups of 64 columns of V each, a warp that fetches operands, one that fetches do. There are two pipelines of operands, since
a stage is fetched anew from its last use on: `early` (kg, Aqk, decay, beta; used until dv' is there) and `late` (M, kd, qg). `values` has
do^T, read into registers a chunk ahead. A segment's first gradient is that of the state that leaves it.
`early` as in `kda_scan`: others take up to 16 chunks behind their own last one first, and dh0 is that of sequences whose first segment need
not be combined.

Timeline of a consumer's chunk; on the left the products as the tensor cores have them, on the right what goes on meanwhile:

    dS+^T kg^T, k < 64       | dS+^T, k >= 64, is rounded and goes to shared memory
    dS+^T kg^T, k >= 64      | beta, the next do; dS+^T times decay; wait for the chunk's late operands
    do^T qg, k < 64          | dv'^T rounded
    dv'^T M                  |
    do^T qg, k >= 64         | y^T rounded; times beta, rounded; both to shared memory
    dR^T kd, k < 64          | wait for the next chunk's early operands
    do^T Aqk of the next     | y, dR, dS+ on their way out; the next decay; dS^T, k < 64, rounded and to shared memory
    dR^T kd, k >= 64         |

Shared memory at K = 128: 24.75 + 40 KB a stage (two); do 16 KB (two slots of 64 x 64 with one warpgroup, one each with two); y, dR and dS+
64 KB (32 KB a slot: two with one warpgroup, one each with two).

Rows after a sequence's end: the operands are zero there and so are y and dR; do is loaded from whatever follows (the next sequence, or
zeros outside the tensor) and selected away, and dv is stored row by row. Without packing the tensor copies end where a sequence does.

Constraints: K 64 or 128; V a multiple of `tile` * `cluster`; do, dv, y with a contiguous last dimension, other strides multiples of 16
bytes. `kda_scan` says what order does to ptxas.
"""

# mypy: ignore-errors
# A nested `if` is one of compile time and one of run time, which `and` would make one of run time.
# ruff: noqa: SIM102

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ...tile.arguments import DTYPES, dense, row_major
from ...tile.bulk import bulk_load, reads_done
from ...tile.fragments import keep_columns, round_to, words
from ...tile.panel import ELEMENTS as PANEL
from ...tile.pipeline import copy_pipeline
from ...tile.shared import room
from ...tile.wgmma import product
from ..config import CHUNK, ReverseConfig
from .kda_scan import KdaScan


class KdaReverse(KdaScan):
    """The kernel for one `ReverseConfig`. `stages`, `v_stages`, `out_stages` override the depth of its pipelines."""

    back = True

    def __init__(
        self,
        config: ReverseConfig,
        *,
        stages: int | None = None,
        v_stages: int | None = None,
        out_stages: int | None = None,
    ) -> None:
        if config.transition and (config.readout or config.initial):
            raise ValueError("transition: there are no outputs of chunks and no first gradient")
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.K = config.key_dim
        self.panels = self.K // 64
        self.groups = config.tile // 64
        self.cluster = config.cluster
        # Operands by columns: kd and, where there is do, qg.
        self.readers = 1 if config.transition else 2
        self.consumers = 128 * self.groups
        # Warpgroups of their own for the producers where setmaxnreg is needed; it acts on whole warpgroups.
        self.threads = self.consumers + (128 if self.groups > 1 else 64)
        self.v_stages = v_stages or (2 if self.groups == 1 else 1)
        self.out_stages = out_stages or (2 if self.groups == 1 else 1)
        # kg, Aqk (io dtype), decay, beta (fp32); M, kd, qg
        self.early_bytes = 2 * PANEL * (self.panels + self.readers - 1) + 4 * (self.K + CHUNK)
        self.late_bytes = 2 * PANEL * (1 + self.readers * self.panels)
        other = 512 + 2 * PANEL * self.groups * (
            self.v_stages * (not config.transition) + self.out_stages * (2 + self.panels) * config.readout
        )
        self.stages = stages or min(4, (room() - other) // (self.early_bytes + self.late_bytes))

    # ---------------------------------------------------------------------------------------------------------------- host
    @cute.jit
    def __call__(
        self,
        factors: cute.Tensor,
        scores: cute.Tensor,
        decay: cute.Tensor,
        beta: cute.Tensor,
        do: cute.Tensor | None,
        dht: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        y: cute.Tensor | None,
        dv: cute.Tensor | None,
        dhs: cute.Tensor | None,
        dh0: cute.Tensor | None,
        bound: cute.Tensor | None,
        decided: cute.Tensor | None,
        segments: Int32,
        segment_chunks: Int32,
        stream,
    ):
        """Launch: one CTA for a unit, value head and tile of V."""
        value_dim = const_expr(self.K) if const_expr(do is None) else do.shape[3]
        if const_expr(cu_seqlens is not None):
            sequences = cu_seqlens.shape[0] - 1
        elif const_expr(do is not None):
            sequences = do.shape[0]
        else:
            sequences = dh0.shape[0] // segments
        tiles = value_dim // self.config.tile
        heads = factors.shape[1]

        layouts = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_do, tDo, tma_y, tY, tma_dv, tDv, tma_s, tS = None, None, None, None, None, None, None, None
        if const_expr(do is not None):
            tma_do, tDo = self.tensor_copy(load, do, (3, 1, 2, 0), layouts.v)
        if const_expr(self.config.readout):
            tma_y, tY = self.tensor_copy(store, y, (3, 2, 1, 0), layouts.out)
            tma_dv, tDv = self.tensor_copy(store, dv, (3, 1, 2, 0), layouts.out)
            tma_s, tS = self.tensor_copy(store, dhs, (2, 3, 1, 0), layouts.states)
        self.kernel(
            factors, scores, decay, beta, dht, cu_seqlens, bound, decided, dh0, dv, tma_do, tDo, tma_y, tY, tma_dv, tDv, tma_s, tS,
            Int32(sequences), Int32(tiles), segments, segment_chunks,
        ).launch(
            grid=(sequences * segments * heads * tiles, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=False,
        )  # fmt: skip

    def layouts(self):
        """Shared memory: operands as they lie in the workspace; do, y, dR and states of chunks as 64 x 64 tiles, one a slot."""
        dt, row, col = self.dtype, LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        return SimpleNamespace(
            # kd and qg: tiles 2 stage and 2 stage + 1 (kd alone, one tile a stage, without do)
            columns=sm90.make_smem_layout_b(col, (64, self.K, CHUNK), dt, self.stages * self.readers),
            kg=sm90.make_smem_layout_b(row, (64, CHUNK, self.K), dt, self.stages),
            scores=sm90.make_smem_layout_b(col, (64, CHUNK, CHUNK), dt, self.stages),
            v=sm90.make_smem_layout_epi(dt, col, (64, CHUNK), self.v_stages * self.groups),
            out=sm90.make_smem_layout_epi(dt, col, (64, CHUNK), self.out_stages * self.groups),
            states=sm90.make_smem_layout_epi(dt, row, (64, 64), self.out_stages * self.groups * self.panels),
        )

    # ---------------------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def kernel(
        self,
        mF: cute.Tensor,
        mM: cute.Tensor,
        mD: cute.Tensor,
        mBeta: cute.Tensor,
        mDht: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mBound: cute.Tensor | None,
        mEarly: cute.Tensor | None,
        mDh0: cute.Tensor | None,
        mDv: cute.Tensor | None,
        tma_do: cute.CopyAtom | None,
        tDo: cute.Tensor | None,
        tma_y: cute.CopyAtom | None,
        tY: cute.Tensor | None,
        tma_dv: cute.CopyAtom | None,
        tDv: cute.Tensor | None,
        tma_s: cute.CopyAtom | None,
        tS: cute.Tensor | None,
        sequences: Int32,
        tiles: Int32,
        segments: Int32,
        segment_chunks: Int32,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        s = self.shared()
        early, late, values = self.pipelines(s)
        cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        # What the kernel before writes is read from here on.
        cute.arch.griddepcontrol_wait()

        block, _, _ = cute.arch.block_idx()
        at = self.unit(block, mF, mCu, mBound, mEarly, mDv, sequences, tiles, segments, segment_chunks)
        self.pass_on(mEarly, at, warp_idx)
        if warp_idx >= 4 * self.groups:
            if const_expr(self.groups > 1):
                cute.arch.setmaxregister_decrease(24)
            if warp_idx == 4 * self.groups:
                self.fetch_operands(s, early, late, mF, mM, mD, mBeta, at)
            if const_expr(tma_do is not None):
                if warp_idx == 4 * self.groups + 1:
                    self.fetch_values(s, values, tma_do, tDo, at)
        else:
            if const_expr(self.groups > 1):
                cute.arch.setmaxregister_increase(240)
            self.consume(s, early, late, values, mDht, mDh0, mDv, tma_y, tY, tma_dv, tDv, tma_s, tS, at, warp_idx)
        self.finish()

    def shared(self):
        """Shared memory: raw pointers for bulk copies, tensors for the rest."""
        smem, layouts = SmemAllocator(), self.layouts()
        config, s = self.config, SimpleNamespace()

        def carve(layout):
            raw = smem.allocate_array(self.dtype, cute.cosize(layout), byte_alignment=1024)
            return raw, cute.make_tensor(cute.recast_ptr(raw, layout.inner, self.dtype), layout.outer)

        s.columns_at, s.columns = carve(layouts.columns)
        s.kg_at, s.kg = carve(layouts.kg)
        s.m_at, s.m = carve(layouts.scores)
        s.aqk_at, s.aqk = (None, None) if config.transition else carve(layouts.scores)
        s.v = None if config.transition else carve(layouts.v)[1]
        s.y = carve(layouts.out)[1] if config.readout else None
        s.dv_at, s.dv = carve(layouts.out) if config.readout else (None, None)
        s.states = carve(layouts.states)[1] if config.readout else None
        s.decay_at = smem.allocate_array(Float32, self.K * self.stages, byte_alignment=128)
        s.beta_at = smem.allocate_array(Float32, CHUNK * self.stages, byte_alignment=128)
        s.early_barriers = smem.allocate_array(Int64, 2 * self.stages, byte_alignment=8)
        s.late_barriers = smem.allocate_array(Int64, 2 * self.stages, byte_alignment=8)
        s.value_barriers = smem.allocate_array(Int64, 2 * self.v_stages, byte_alignment=8)
        return s

    def pipelines(self, s):
        """`early` and `late`, whose stages every consumer warp of the cluster releases, and `values`."""

        warps = 4 * self.groups
        return (
            copy_pipeline(s.early_barriers, self.stages, self.early_bytes, warps, self.cluster),
            copy_pipeline(s.late_barriers, self.stages, self.late_bytes, warps, self.cluster),
            copy_pipeline(s.value_barriers, self.v_stages, 2 * PANEL * self.groups, warps),
        )

    # ------------------------------------------------------------------------------------------------------------- producers
    @cute.jit
    def fetch_operands(self, s, early, late, mF, mM, mD, mBeta, at):
        """A chunk's factors, scores, decay and beta."""
        K, n = const_expr(self.K), const_expr(self.readers)
        rank = Int32(0)
        if const_expr(self.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for i in cutlass.range(at.chunks, unroll=1):
            slot = at.slot + at.chunks - 1 - i
            parts = [
                (mF[slot, at.hv, 2, 0, None, None], s.kg_at, CHUNK * K),
                (mD[slot, at.hv, None], s.decay_at, K),
                (mBeta[slot, at.hv, None], s.beta_at, CHUNK),
            ]
            if const_expr(s.aqk_at is not None):
                parts.append((mM[slot, at.hv, 1, None, None], s.aqk_at, PANEL))
            self.fetch(early, state, parts, rank)
            parts = [
                (mM[slot, at.hv, 2, None, None], s.m_at, PANEL),
                (mF[slot, at.hv, 0, 0, None, None], s.columns_at, n * CHUNK * K),
            ]
            self.fetch(late, state, parts, rank)
            state.advance()

    @cute.jit
    def fetch(self, operands, state, parts, rank):
        """A stage of a pipeline: (source, first stage's place, elements) each."""
        operands.producer_acquire(state)
        bar = operands.producer_get_barrier(state)
        with cute.arch.elect_one():
            for source, to, size in parts:
                to = (to + state.index * size).align(16)
                bulk_load(source.iterator.align(16), to, size, bar, self.cluster, rank)

    # -------------------------------------------------------------------------------------------------------------- consumers
    def registers(self, s, mma, tid):
        """Accumulators, fragments and the views of shared memory through which a thread reads and writes."""
        K, panels, dt = self.K, self.panels, self.dtype
        r = SimpleNamespace(mma=mma, tid=tid)
        rows, columns = mma.rows.get_slice(tid), mma.columns.get_slice(tid)
        r.thr_state = columns
        half = cute.make_layout(((2, 2, 8), 1, 1), stride=((1, 2, 4), 0, 0))

        # Accumulators: dS^T a panel each, dv'^T (whose place y^T and dR^T take).
        r.S = cute.make_rmem_tensor(columns.partition_shape_C((64, K)), Float32)
        r.S_panel = [cute.make_tensor(r.S.iterator + 32 * p, half) for p in range(panels)]
        r.P = cute.make_rmem_tensor(half, Float32)

        # A fragments: dS+, this chunk's do and the next one's, dv', dR; y for its way out.
        r.fS = cute.make_rmem_tensor(rows.partition_shape_A((64, K)), dt)
        r.fDo, r.fNext, r.fV, r.fR, r.fY = (
            cute.make_rmem_tensor(rows.partition_shape_A((64, CHUNK)), dt) for _ in range(5)
        )

        # B descriptors.
        r.kg = mma.rows.make_fragment_B(rows.partition_B(s.kg))
        r.m = mma.columns.make_fragment_B(columns.partition_B(s.m))
        r.aqk = None if s.aqk is None else mma.columns.make_fragment_B(columns.partition_B(s.aqk))
        r.columns = [
            mma.columns.make_fragment_B(columns.partition_B(cute.local_tile(s.columns, (64, CHUNK), (p, 0, None))))
            for p in range(panels)
        ]

        # Factors of columns: the same for every row.
        sD = cute.make_tensor(s.decay_at, cute.make_layout((64, K, self.stages), stride=(0, 1, K)))
        r.decay_at = columns.partition_C(sD)
        r.decay = cute.make_rmem_tensor((2, 8, panels), Float32)
        sBeta = cute.make_tensor(s.beta_at, cute.make_layout((64, CHUNK, self.stages), stride=(0, 1, CHUNK)))
        r.beta_at = columns.partition_C(sBeta)
        r.beta = cute.make_rmem_tensor((2, 8), Float32)

        # do^T, y^T and dR^T by 8 x 8 matrices, transposed on the way; states as they are.
        def matrices(op):
            atom = cute.make_copy_atom(op, dt)
            store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), dt)
            return cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(store, mma.rows))

        by_matrix = cute.make_layout(((8, 1), 1, 4), stride=((1, 0), 0, 8))

        def as_matrices(fragment, start=0):
            return cute.make_tensor(fragment.iterator + start, by_matrix)

        r.load = matrices(warp.LdMatrix8x8x16bOp(True, 4))
        if s.v is not None:
            r.fDo_matrices, r.fNext_matrices = as_matrices(r.fDo), as_matrices(r.fNext)
            r.do_at = r.load.get_slice(tid).partition_S(s.v)
        r.store, r.store_state = matrices(warp.StMatrix8x8x16bOp(True, 4)), matrices(warp.StMatrix8x8x16bOp(False, 4))
        if self.config.readout:
            r.fY_matrices, r.fR_matrices = as_matrices(r.fY), as_matrices(r.fR)
            r.y_at, r.dv_at = (r.store.get_slice(tid).partition_D(x) for x in (s.y, s.dv))
            r.fS_matrices = [as_matrices(r.fS, 32 * p) for p in range(panels)]
            r.states_at = r.store_state.get_slice(tid).partition_D(s.states)
        return r

    @cute.jit
    def consume(self, s, early, late, values, mDht, mDh0, mDv, tma_y, tY, tma_dv, tDv, tma_s, tS, at, warp_idx):
        """A warpgroup's 64 columns of V over all chunks of the unit."""
        config, panels = self.config, self.panels
        tid, _, _ = cute.arch.thread_idx()
        group = warp_idx // 4
        v_tile = at.tile * self.groups + group
        mma = self.products()
        r = self.registers(s, mma, tid % 128)
        leader = warp_idx % 4 == 0
        bar = 1 + group
        values_in = const_expr(not config.transition)
        chunks = at.chunks
        to = None
        if const_expr(config.readout):
            to = self.destinations(s, tma_y, tY, tma_dv, tDv, tma_s, tS, at, v_tile)

        self.first_state(r, mDht, at, v_tile)
        round_to(r.S, r.fS, 0, 32)
        now = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        v_now = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.v_stages)
        if chunks > 0:
            self.first_chunk(r, mma, early, values, now, v_now, group, at)
        v_now.advance()

        for i in cutlass.range(chunks, unroll=1):
            stage = now.index
            kd = [x[None, None, None, stage * self.readers] for x in r.columns]
            out = i % self.out_stages * self.groups + group
            # dv' = Aqk^T do + kg dS+, whose first term is there
            for p in cutlass.range_constexpr(panels):
                if const_expr(p > 0):
                    round_to(r.S, r.fS, 32 * p, 32)
                    if const_expr(config.readout):
                        # Before the product, during which nobody else may read its operand.
                        cute.copy(r.store_state, r.fS_matrices[p], r.states_at[None, None, None, out * panels + p])
                warpgroup.fence()
                product(mma.rows, r.P, r.fS, r.kg[None, None, None, stage], 4 * p, 4, values_in is False and p == 0)
                warpgroup.commit_group()
                warpgroup.wait_group(p + 1)
            cute.autovec_copy(r.beta_at[(None, 0, None), 0, 0, stage], r.beta)
            if const_expr(values_in):
                # After the last chunk slot 0, which has been filled, for nothing: cheaper than a branch around the loads.
                v_slot = group
                if i + 1 < chunks:
                    values.consumer_wait(v_now)
                    v_slot = v_now.index * self.groups + group
                cute.copy(r.load, r.do_at[None, None, None, v_slot], r.fNext_matrices)
            # dS = diag(decay) dS+ + qg^T do, the second term's other half after the next product
            self.scale_state(r)
            late.consumer_wait(now)
            if const_expr(values_in):
                qg = [x[None, None, None, stage * self.readers + 1] for x in r.columns]
                warpgroup.fence()
                product(mma.columns, r.S_panel[0], r.fDo, qg[0], 0, 4, False)
                warpgroup.commit_group()
            warpgroup.wait_group(int(values_in))
            reads_done()
            if const_expr(values_in):
                if i + 1 < chunks:
                    values.consumer_release(v_now)
                v_now.advance()
            early.consumer_release(now)

            # y = M^T dv'
            round_to(r.P, r.fV, 0, 32)
            warpgroup.fence()
            product(mma.columns, r.P, r.fV, r.m[None, None, None, stage], 0, 4, True)
            warpgroup.commit_group()
            behind = const_expr(values_in and panels > 1)
            if const_expr(behind):
                product(mma.columns, r.S_panel[1], r.fDo, qg[1], 0, 4, False)
                warpgroup.commit_group()
            warpgroup.wait_group(int(behind))
            # dR = diag(beta) y
            if const_expr(config.readout):
                round_to(r.P, r.fY, 0, 32)
            self.scale_tokens(r)
            round_to(r.P, r.fR, 0, 32)
            if const_expr(config.readout):
                cute.copy(r.store, r.fR_matrices, r.dv_at[None, None, None, out])
                cute.copy(r.store, r.fY_matrices, r.y_at[None, None, None, out])

            # dS <- dS + kd^T dR, panel by panel; dv' <- Aqk^T do of the next chunk between them
            done = now.clone()
            now.advance()
            following = done.index
            for p in cutlass.range_constexpr(panels):
                if const_expr(p == 0):
                    warpgroup.fence()
                product(mma.columns, r.S_panel[p], r.fR, kd[p], 0, 4, False)
                warpgroup.commit_group()
                if const_expr(p == 0):
                    warpgroup.wait_group(1 + int(behind))
                    if i + 1 < chunks:
                        early.consumer_wait(now)
                        following = now.index
                    if const_expr(values_in):
                        # After the last chunk for nothing, as above.
                        product(mma.columns, r.P, r.fNext, r.aqk[None, None, None, following], 0, 4, True)
                        warpgroup.commit_group()
            pending = const_expr(panels + values_in)
            warpgroup.wait_group(pending)
            cute.autovec_copy(r.decay_at[(None, 0, None), 0, None, following], r.decay)
            if const_expr(config.readout):
                self.copy_out(s, r, leader, bar, i, out, group, to, mDv, v_tile, at)
            warpgroup.wait_group(pending - 1)
            round_to(r.S, r.fS, 0, 32)
            if const_expr(config.readout):
                if const_expr(self.out_stages == 1):
                    # The copies out have read what is overwritten now.
                    if leader:
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.barrier(barrier_id=bar, number_of_threads=128)
                into = ((i + 1) % self.out_stages * self.groups + group) * panels
                cute.copy(r.store_state, r.fS_matrices[0], r.states_at[None, None, None, into])
            warpgroup.wait_group(0)
            late.consumer_release(done)
            if const_expr(values_in):
                words(r.fDo).store(words(r.fNext).load())

        if const_expr(mDh0 is not None):
            self.last_state(r, mDh0, at, v_tile)
        if const_expr(config.readout):
            if leader:
                cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def first_chunk(self, r, mma, early, values, now, v_now, group, at):
        """What a chunk finds when its turn comes: its do, Aqk^T do, its decay, and dS+ of the first columns of K in shared memory."""
        if const_expr(not self.config.transition):
            values.consumer_wait(v_now)
            cute.copy(r.load, r.do_at[None, None, None, v_now.index * self.groups + group], r.fDo_matrices)
            reads_done()
            values.consumer_release(v_now)
            if const_expr(self.config.cu_seqlens != ""):
                keep_columns(r.fDo, at.last_rows, r.tid)
        early.consumer_wait(now)
        cute.autovec_copy(r.decay_at[(None, 0, None), 0, None, now.index], r.decay)
        if const_expr(not self.config.transition):
            warpgroup.fence()
            product(mma.columns, r.P, r.fDo, r.aqk[None, None, None, now.index], 0, 4, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        if const_expr(self.config.readout):
            cute.copy(r.store_state, r.fS_matrices[0], r.states_at[None, None, None, group * self.panels])

    def destinations(self, s, tma_y, tY, tma_dv, tDv, tma_s, tS, at, v_tile):
        """Copies out of shared memory: source by slot; destination by slot of the workspace (y), chunk (dv), panel and slot (states)."""

        def copies(tma, smem, g):
            source, to = cpasync.tma_partition(
                tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
            )
            return SimpleNamespace(tma=tma, source=source, to=to)

        y = cute.local_tile(tY[None, None, at.hv, None], (64, 64), (v_tile, 0, None))
        dv = cute.domain_offset((0, at.token), tDv[None, None, at.hv, at.batch])
        dv = cute.local_tile(dv, (64, 64), (v_tile, None))
        states = cute.local_tile(tS[None, None, at.hv, None], (64, 64), (v_tile, None, None))
        return copies(tma_y, s.y, y), copies(tma_dv, s.dv, dv), copies(tma_s, s.states, states)

    def scale_tokens(self, r):
        for j in range(8):
            for e in range(2):
                for i in range(2):
                    r.P[(e, i, j), 0, 0] = r.P[(e, i, j), 0, 0] * r.beta[e, j]

    @cute.jit
    def copy_out(self, s, r, leader, bar, i, out, group, to, mDv, v_tile, at):
        """Start the copies of a chunk's y, dv and dS+, once all warps have written them."""
        y, dv, states = to
        chunk = at.chunks - 1 - i
        packed = const_expr(self.config.cu_seqlens != "")
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(self.out_stages > 1):
            # The slot that is written next was read by the last chunk's copies.
            if leader:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=bar, number_of_threads=128)
        if leader:
            if i >= at.skip:
                cute.copy(y.tma, y.source[None, out], y.to[None, at.slot + chunk])
                if const_expr(packed):
                    if i > 0 or at.last_rows == CHUNK:
                        cute.copy(dv.tma, dv.source[None, out], dv.to[None, chunk])
                else:
                    cute.copy(dv.tma, dv.source[None, out], dv.to[None, chunk])
                for p in cutlass.range_constexpr(self.panels):
                    source = states.source[None, out * self.panels + p]
                    cute.copy(states.tma, source, states.to[None, p, at.slot + chunk])
            cute.arch.cp_async_bulk_commit_group()
        if const_expr(packed):
            # The sequence's last rows alone, for others' rows follow.
            if i == 0 and at.skip == 0 and at.last_rows < CHUNK:
                self.store_rows(s.dv_at + out * PANEL, mDv, at.token + CHUNK * chunk, at.last_rows, v_tile, r.tid, at)

    @cute.jit
    def store_rows(self, tile, mX, token, rows, v_tile, tid, at):
        """The first rows of a tile [64 tokens][64 columns of V] in shared memory."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        vector = cute.make_layout(8)
        for i in cutlass.range_constexpr(4):
            row = (tid + 128 * i) // 8
            group8 = tid % 8
            if row < rows:
                # Where the 128-byte swizzle has put this row's group of 8 columns.
                src = tile + (row * 64 + (group8 ^ (row & 7)) * 8)
                dst = mX[at.batch, token + row, at.hv, None].iterator + (64 * v_tile + 8 * group8)
                rX = cute.make_rmem_tensor((8,), self.dtype)
                cute.copy(atom, cute.make_tensor(src.align(16), vector), rX)
                cute.copy(atom, rX, cute.make_tensor(dst.align(16), vector))


def compile(config: ReverseConfig, **tuning):
    """The launch function for `config`:

    `(factors, scores, decay, beta_eff, do, dht, cu_seqlens, y, dv, dhs, dh0, bound, early, segments, segment_chunks)`. factors, scores,
    decay, beta_eff are what `warp.kda_prepare` writes with `inverse`; do, dv [B, T, HV, V], y [slots, HV, 64, V] and dhs [slots, HV, V, K]
    in the io dtype; dht, dh0 fp32 [units, HV, K, V], with `state_v_first` [units, HV, V, K].
    Absent tensors are None: do with `transition`, dht without `initial`, cu_seqlens of sequences that are not packed, y, dv and dhs without
    `readout`, dh0 without `final` (`transition` implies it), bound fp32 [slots, HV] without `early` "decide", early int32 [units, HV]
    without `early`. `tuning` is `KdaReverse`'s.
    """
    kernel = KdaReverse(config, **tuning)
    dt, K = kernel.dtype, config.key_dim
    slots, heads, batch, tokens, value_dim, units = (cute.sym_int() for _ in range(6))
    ended = cute.sym_int() if config.early and config.initial else units

    def state(n, columns):
        return row_major(Float32, (n, heads, columns, K) if config.state_v_first else (n, heads, K, columns))

    def by_token():
        return row_major(dt, (batch, tokens, heads, value_dim))

    columns = K if config.transition else value_dim
    return cute.compile(
        kernel,
        row_major(dt, (slots, heads, 3, K // 64, 64, 64), (1, 2, 3, 4)),
        row_major(dt, (slots, heads, 3, 64, 64), (1, 2, 3)),
        row_major(Float32, (slots, heads, K), (1,)),
        row_major(Float32, (slots, heads, CHUNK), (1,)),
        None if config.transition else by_token(),
        state(units, columns) if config.initial else None,
        make_fake_tensor(DTYPES[config.cu_seqlens], (cute.sym_int(),), stride=(1,)) if config.cu_seqlens else None,
        row_major(dt, (slots, heads, CHUNK, value_dim)) if config.readout else None,
        by_token() if config.readout else None,
        row_major(dt, (slots, heads, value_dim, K)) if config.readout else None,
        state(ended, columns) if config.final or config.transition else None,
        dense(Float32, (slots, heads)) if config.early == "decide" else None,
        dense(Int32, (units, heads)) if config.early else None,
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
