"""KDA forward on Hopper: the serial pass over chunks.

For every chunk of 64 tokens, with the state S [K, V] in fp32 and the operands of `warp.kda_prepare` in the io dtype

    R  = v + kd S              v' = M' R
    o  = qg S + Aqk v'         S <- diag(decay) S + kg^T v'

Everything is computed transposed, so that S^T stays in wgmma accumulators and every left operand is made of accumulators in registers:

    R^T  = v^T + S^T kd^T             64 x 64 x K,  A = S^T rounded
    o^T  = S^T qg^T                   64 x 64 x K,  the same A
    v'^T = R^T M'^T                   64 x 64 x 64, A = R^T rounded
    S^T  = S^T diag(decay) + v'^T kg  64 x K x 64,  A = v'^T rounded
    o^T  = o^T + v'^T Aqk^T           64 x 64 x 64, the same A

Work: a CTA takes one unit (sequence n, segment s of its chunks), one value head and `tile` columns of V, 64 for each consumer warpgroup:
index ((n * segments + s) * HV + hv) * (V / tile) + tile. Segment s has the chunks from s * segment_chunks on; states are indexed by unit
n * segments + s. A unit without chunks passes its state through.

With `early`, units whose state or map nobody needs have nothing to do, and others take up to 16 chunks before their own first one, without
output, from a zero state: see `tile.early`. Final states are then those of sequences whose last segment need not be combined.
`kda_segments` launches the two passes before the combination, for ends and maps (`transition`), as one. The last pass ("follow") starts
while that launch runs and awaits its unit's code from it; only a unit that does not start early waits for the kernels before to end.

Warps: consumer warpgroups first, then one warp that fetches operands (bulk copies of panels that lie in memory as they are wanted in shared
memory; a cluster's CTAs fetch a half each for both), then one that fetches v (tensor copies, whose rows may start at any token). With
`strips` the first one leaves out rows of kd and qg that have decayed to zeros (`tile.panel`) and writes zeros where a stage has none.

Pipelines: `operands` (kd, qg, kg, M', Aqk, decay of a chunk; `stages` deep) and `values` (v^T; read into registers a chunk ahead).

Timeline of a consumer's chunk c; on the left the products as the tensor cores have them, on the right what goes on meanwhile:

    S^T kd^T, k < 64         | S^T, k >= 64, is rounded
    S^T kd^T, k >= 64        | o(c-1) to shared memory and its copy out; decay and v(c+1) to registers
    half of S^T qg^T         | S^T times decay; R^T rounded
    R^T M'^T                 |
    other half of S^T qg^T   | v'^T rounded
    v'^T kg, k < 64          |
    v'^T Aqk^T               | S^T, k < 64, rounded; wait for the next chunk's operands
    v'^T kg, k >= 64         | o(c) rounded; v(c+1) into the accumulators of R

Shared memory at K = 128: 64.5 KB a stage (three; of strips of M' and Aqk 58.5 KB are copied, their zeros stay), v and o 16 KB each (two
slots of 64 x 64 with one warpgroup, one each with two).

Rows after a sequence's end: the operands are zero there; v is loaded from whatever follows (the next sequence, or zeros outside the tensor)
and selected away, and o is stored row by row. Without packing the tensor copies end where a sequence does.

Constraints: K 64 or 128; V a multiple of `tile` * `cluster`; v and o with a contiguous last dimension, other strides multiples of 16 bytes.

Order matters to ptxas as much as to the tensor cores: no accumulator may be in flight over the loop's back edge, and a `wait_group` that
waits for nothing keeps it from waiting for everything where registers beside those in flight are touched. R and o have accumulators of
their own: one product of 64 x 128 columns for both, taken apart afterwards, made ptxas serialise all of them.
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
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ...tile import panel
from ...tile.arguments import DTYPES, dense, row_major
from ...tile.bulk import reads_done
from ...tile.early import decide, early_start
from ...tile.fragments import keep_columns, round_to, widen
from ...tile.panel import ELEMENTS as PANEL
from ...tile.pipeline import copy_pipeline
from ...tile.ptx import store_shared
from ...tile.sequence import tokens_of
from ...tile.shared import room
from ...tile.state import part_of, set_identity, transposed
from ...tile.wgmma import product
from ..config import CHUNK, ScanConfig
from .kda_scan_fetch import MOST_STAGES, ScanFetch


class KdaScan(ScanFetch):
    """The kernel for one `ScanConfig`.

    `stages`, `v_stages`, `o_stages` override the depth of its pipelines, `early` how many of the K / 16 steps of S^T qg^T are issued
    before R is there. `blocks` CTAs share an SM.
    """

    back = False
    """Whether chunks come from the last to the first."""

    @property
    def awaits(self) -> bool:
        """Whether the pass that decides which units start early may be running still."""
        return self.config.early == "follow" and not self.back

    def __init__(
        self,
        config: ScanConfig,
        *,
        stages: int | None = None,
        v_stages: int | None = None,
        o_stages: int | None = None,
        early: int | None = None,
        blocks: int = 1,
    ) -> None:
        if config.transition and (config.readout or config.states or config.initial):
            raise ValueError("transition: there is no output, no initial state and no states of chunks")
        self.config = config
        self.blocks = blocks
        self.dtype = DTYPES[config.dtype]
        self.K = config.key_dim
        self.panels = self.K // 64
        self.groups = config.tile // 64
        self.cluster = config.cluster
        # Operands of the state's readers: kd and, where o is wanted, qg; M' and Aqk.
        self.readers = 2 if config.readout else 1
        self.early = 2 * self.panels if early is None else early
        self.consumers = 128 * self.groups
        # Warpgroups of their own for the producers where setmaxnreg is needed; it acts on whole warpgroups.
        self.threads = self.consumers + (128 if self.groups > 1 else 64)
        self.v_stages = v_stages or (2 if self.groups == 1 else 1)
        self.o_stages = o_stages or (2 if self.groups == 1 else 1)
        # factors, scores (io dtype); decay (fp32)
        self.stage_bytes = 2 * PANEL * (self.panels * (self.readers + 1) + self.readers) + 4 * self.K
        # What of it is copied.
        self.copied_bytes = self.stage_bytes - config.strips * self.readers * (panel.BYTES - panel.STRIPS_BYTES)
        other = 512 + 2 * PANEL * self.groups * (
            self.v_stages * (not config.transition) + self.o_stages * config.readout + self.panels * config.states
        )
        self.stages = stages or min(4, (room(blocks) - other) // self.stage_bytes)
        if config.strips and self.stages > MOST_STAGES:
            raise ValueError(f"stages: got {self.stages}; allowed with strips: up to {MOST_STAGES}")

    # ---------------------------------------------------------------------------------------------------------------- host
    @cute.jit
    def __call__(
        self,
        factors: cute.Tensor,
        scores: cute.Tensor,
        decay: cute.Tensor,
        v: cute.Tensor | None,
        h0: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        o: cute.Tensor | None,
        ht: cute.Tensor | None,
        hs: cute.Tensor | None,
        bound: cute.Tensor | None,
        early: cute.Tensor | None,
        segments: Int32,
        segment_chunks: Int32,
        stream,
    ):
        """Launch: one CTA for a unit, value head and tile of V."""
        value_dim = const_expr(self.K) if const_expr(v is None) else v.shape[3]
        if const_expr(cu_seqlens is not None):
            sequences = cu_seqlens.shape[0] - 1
        elif const_expr(v is not None):
            sequences = v.shape[0]
        else:
            sequences = ht.shape[0] // segments
        tiles = value_dim // self.config.tile
        heads = factors.shape[1]

        layouts = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_v, tV, tma_o, tO, tma_s, tS = None, None, None, None, None, None
        if const_expr(v is not None):
            tma_v, tV = self.tensor_copy(load, v, (3, 1, 2, 0), layouts.v)
        if const_expr(o is not None):
            tma_o, tO = self.tensor_copy(store, o, (3, 1, 2, 0), layouts.o)
        if const_expr(hs is not None):
            order = (2, 3, 1, 0) if const_expr(self.config.states_v_first) else (3, 2, 1, 0)
            tma_s, tS = self.tensor_copy(store, hs, order, layouts.states)
        self.kernel(
            factors, scores, decay, h0, cu_seqlens, bound, early, ht, o, tma_v, tV, tma_o, tO, tma_s, tS,
            Int32(sequences), Int32(tiles), segments, segment_chunks,
        ).launch(
            grid=(sequences * segments * heads * tiles, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.config.early != "",
        )  # fmt: skip

    def layouts(self):
        """Shared memory: operands as they lie in the workspace; v, o and the states of chunks as 64 x 64 tiles, one a slot."""
        dt, row, col = self.dtype, LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        return SimpleNamespace(
            # kd and qg; M' and Aqk: tiles 2 stage and 2 stage + 1 (one tile a stage without readout)
            rows=sm90.make_smem_layout_b(row, (64, CHUNK, self.K), dt, self.stages * self.readers),
            kg=sm90.make_smem_layout_b(col, (64, self.K, CHUNK), dt, self.stages),
            scores=self.layout_of_scores(),
            v=sm90.make_smem_layout_epi(dt, col, (64, CHUNK), self.v_stages * self.groups),
            o=sm90.make_smem_layout_epi(dt, col, (64, CHUNK), self.o_stages * self.groups),
            states=sm90.make_smem_layout_epi(
                dt, row if self.config.states_v_first else col, (64, 64), self.panels * self.groups
            ),
        )

    def layout_of_scores(self):
        """M' and Aqk, as panels or as strips."""
        tiles = self.stages * self.readers
        if not self.config.strips:
            return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, CHUNK, CHUNK), self.dtype, tiles)
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, self.dtype)
        return cute.tile_to_shape(atom, (CHUNK, CHUNK, tiles), order=(0, 1, 2))

    def tensor_copy(self, op, x, order, layout):
        """The copy of 64 x 64 tiles of `x` with its modes in `order`, and the tensor of its coordinates."""
        view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(order)))
        return cpasync.make_tiled_tma_atom(op, view, cute.slice_(layout, (None, None, 0)), (64, 64))

    def products(self):
        """Tiled products of a warpgroup: B's rows are tokens (kd, qg, M', Aqk) or its columns are (kg)."""

        def tiled(major, n):
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, OperandMajorMode.K, major, Float32, (1, 1, 1), (64, n),
                warpgroup.OperandSource.RMEM,
            )  # fmt: skip

        return SimpleNamespace(
            rows=tiled(OperandMajorMode.K, CHUNK),
            columns=tiled(OperandMajorMode.MN, 64),
        )

    # ---------------------------------------------------------------------------------------------------------------- device
    @cute.kernel
    def kernel(
        self,
        mF: cute.Tensor,
        mM: cute.Tensor,
        mD: cute.Tensor,
        mH: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mBound: cute.Tensor | None,
        mEarly: cute.Tensor | None,
        mHt: cute.Tensor | None,
        mO: cute.Tensor | None,
        tma_v: cute.CopyAtom | None,
        tV: cute.Tensor | None,
        tma_o: cute.CopyAtom | None,
        tO: cute.Tensor | None,
        tma_s: cute.CopyAtom | None,
        tS: cute.Tensor | None,
        sequences: Int32,
        tiles: Int32,
        segments: Int32,
        segment_chunks: Int32,
    ):
        s, operands, values = self.start()
        block, _, _ = cute.arch.block_idx()
        where = (block, mF, mCu, mBound, mEarly, mO, sequences, tiles, segments, segment_chunks)
        if const_expr(self.awaits):
            # What starts early needs nothing of the passes before this one but its code, and that they have waited for those before them.
            at = self.unit(*where)
            self.ready()
            cute.arch.fence_proxy("async")
            if at.code <= 0:
                cute.arch.griddepcontrol_wait()
        else:
            self.ready()
            cute.arch.griddepcontrol_wait()
            at = self.unit(*where)
        self.work(s, operands, values, at, mF, mM, mD, mH, mEarly, mHt, mO, tma_v, tV, tma_o, tO, tma_s, tS)
        self.finish()
        if const_expr(self.awaits):
            # This grid does not end before those that it did not wait for.
            cute.arch.griddepcontrol_wait()

    def start(self):
        """Shared memory and pipelines."""
        s = self.shared()
        operands, values = self.pipelines(s)
        cute.arch.mbarrier_init_fence()
        if self.cluster > 1:
            cute.arch.cluster_arrive_relaxed()
        self.clear_scores(s)
        return s, operands, values

    def ready(self):
        """All that `start` does has been done, by every thread. Behind a `griddepcontrol_wait` after this the kernel before has ended, and
        so have all before it, which waited likewise. Nothing is read or written earlier, but by units of the last pass that start early."""
        if self.cluster > 1:
            cute.arch.cluster_wait()
        cute.arch.sync_threads()
        if not self.config.readout:
            # What comes after a pass over segments may be put on SMs as they become free.
            cute.arch.griddepcontrol_launch_dependents()

    def finish(self):
        if self.cluster > 1:
            # The other CTA's copies and releases reach this one's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def work(self, s, operands, values, at, mF, mM, mD, mH, mEarly, mHt, mO, tma_v, tV, tma_o, tO, tma_s, tS):
        """What a CTA does with its unit; absent tensors are None."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.pass_on(mEarly, at, warp_idx)
        if warp_idx >= 4 * self.groups:
            if const_expr(self.groups > 1):
                cute.arch.setmaxregister_decrease(24)
            if warp_idx == 4 * self.groups:
                self.fetch_operands(s, operands, mF, mM, mD, at)
            if const_expr(tma_v is not None):
                if warp_idx == 4 * self.groups + 1:
                    self.fetch_values(s, values, tma_v, tV, at)
        else:
            if const_expr(self.groups > 1):
                cute.arch.setmaxregister_increase(240)
            self.consume(s, operands, values, mH, mHt, mO, tma_o, tO, tma_s, tS, at, warp_idx)

    def shared(self):
        """Shared memory: raw pointers for bulk copies, tensors for the rest."""
        smem, layouts = SmemAllocator(), self.layouts()
        config, s = self.config, SimpleNamespace()

        def carve(layout):
            raw = smem.allocate_array(self.dtype, cute.cosize(layout), byte_alignment=1024)
            return raw, cute.make_tensor(cute.recast_ptr(raw, layout.inner, self.dtype), layout.outer)

        s.rows_at, s.rows = carve(layouts.rows)
        s.kg_at, s.kg = carve(layouts.kg)
        s.scores_at, s.scores = carve(layouts.scores)
        s.v = None if config.transition else carve(layouts.v)[1]
        s.o_at, s.o = carve(layouts.o) if config.readout else (None, None)
        s.states = carve(layouts.states)[1] if config.states else None
        s.decay_at = smem.allocate_array(Float32, self.K * self.stages, byte_alignment=128)
        s.operand_barriers = smem.allocate_array(Int64, 2 * self.stages, byte_alignment=8)
        s.value_barriers = smem.allocate_array(Int64, 2 * self.v_stages, byte_alignment=8)
        return s

    @cute.jit
    def clear_scores(self, s):
        """Zeros where strips have them, for good: no copy writes there."""
        if const_expr(self.config.strips):
            tid, _, _ = cute.arch.thread_idx()
            # Nowhere else: the other CTA of a cluster may have begun to copy.
            for i in cutlass.range(tid, const_expr(self.stages * self.readers * panel.ZEROS), self.threads, unroll=1):
                at = i // panel.ZEROS * panel.BYTES + panel.zeros_vector(i % panel.ZEROS) * 16
                store_shared(s.scores_at.toint() + at, 0, [Uint32(0)] * 4)
            cute.arch.fence_proxy("async.shared", space="cta")

    def pipelines(self, s):
        """`operands`, whose stages every consumer warp of the cluster releases, and `values`."""

        warps = 4 * self.groups
        operands = copy_pipeline(s.operand_barriers, self.stages, self.copied_bytes, warps, self.cluster)
        values = copy_pipeline(s.value_barriers, self.v_stages, 2 * PANEL * self.groups, warps)
        return operands, values

    @cute.jit
    def unit(self, block, mF, mCu, mBound, mEarly, mOut, sequences, tiles, segments, segment_chunks):
        """What this CTA works on: slots and tokens of its chunks, indices of its states. mOut [B, T, HV, V] is what is written, or None."""
        tile = block % tiles
        hv = block // tiles % mF.shape[1]
        unit = block // tiles // mF.shape[1]
        n = unit // segments
        start = Int32(0)
        length = Int32(0)
        batch = n
        if const_expr(mCu is not None):
            # As many tokens as may have so many slots, where only these are touched.
            limit = (Int32(mF.shape[0]) - sequences) * CHUNK + (CHUNK - 1)
            if const_expr(mOut is not None):
                limit = Int32(mOut.shape[1])
            start, end = tokens_of(mCu, n, limit)
            length = end - start
            total = (length + (CHUNK - 1)) // CHUNK
            base = start // CHUNK + n
            batch = Int32(0)
        else:
            total = Int32(mF.shape[0]) // sequences
            base = n * total
        segment = unit % segments
        first = cutlass.min(segment * segment_chunks, total)
        chunks = cutlass.min(segment_chunks, total - first)
        early = SimpleNamespace(code=Int32(0), skip=Int32(0), out=unit, ends=Int32(1))
        if const_expr(self.config.early != ""):
            how = const_expr("await" if self.awaits else self.config.early)
            kind = (how, self.config.initial, self.config.transition, self.back)
            where = (hv, unit, segment, segments, segment_chunks, base, total, chunks)
            early = early_start(mBound, mEarly, *where, *kind)
            if const_expr(not self.config.initial):
                chunks = chunks * early.ends
        chunks = chunks + early.skip
        if const_expr(not self.back):
            first = first - early.skip
        # Rows of the last chunk; without packing the tensor copies stop at the end by themselves.
        last_rows = Int32(CHUNK)
        if const_expr(mCu is not None):
            last_rows = cutlass.min(CHUNK, length - CHUNK * (first + chunks - 1))
        return SimpleNamespace(
            tile=tile, hv=hv, unit=unit, batch=batch, slot=base + first, token=start + CHUNK * first, chunks=chunks,
            last_rows=last_rows, **vars(early),
        )  # fmt: skip

    @cute.jit
    def pass_on(self, mEarly, at, warp_idx):
        """The unit's code to the passes after this one."""
        if const_expr(self.config.early == "decide" and mEarly is not None):
            if (at.tile == 0) & (warp_idx == 0):
                with cute.arch.elect_one():
                    decide(mEarly, at.unit, at.hv, at.code)

    # -------------------------------------------------------------------------------------------------------------- consumers
    def registers(self, s, mma, tid):
        """Accumulators, fragments and the views of shared memory through which a thread reads and writes."""
        K, panels, dt = self.K, self.panels, self.dtype
        r = SimpleNamespace(mma=mma, tid=tid)
        rows, columns = mma.rows.get_slice(tid), mma.columns.get_slice(tid)
        r.thr_state = columns
        half = cute.make_layout(((2, 2, 8), 1, 1), stride=((1, 2, 4), 0, 0))

        # Accumulators: S^T a panel each, R^T (whose place v'^T takes) and o^T.
        r.S = cute.make_rmem_tensor(columns.partition_shape_C((64, K)), Float32)
        r.S_panel = [cute.make_tensor(r.S.iterator + 32 * p, half) for p in range(panels)]
        r.R = cute.make_rmem_tensor(half, Float32)
        r.O = cute.make_rmem_tensor(half, Float32)

        # A fragments.
        r.fS = cute.make_rmem_tensor(rows.partition_shape_A((64, K)), dt)
        r.fR = cute.make_rmem_tensor(rows.partition_shape_A((64, CHUNK)), dt)
        r.fV = cute.make_rmem_tensor(rows.partition_shape_A((64, CHUNK)), dt)

        # B descriptors.
        r.rows = mma.rows.make_fragment_B(rows.partition_B(s.rows))
        r.scores = mma.rows.make_fragment_B(rows.partition_B(s.scores))
        r.kg = [
            mma.columns.make_fragment_B(columns.partition_B(cute.local_tile(s.kg, (64, CHUNK), (p, 0, None))))
            for p in range(panels)
        ]

        # Factors of the state's columns: the same for every row.
        sD = cute.make_tensor(s.decay_at, cute.make_layout((64, K, self.stages), stride=(0, 1, K)))
        r.decay_at = columns.partition_C(sD)
        r.decay = cute.make_rmem_tensor((2, 8, panels), Float32)

        # v^T and o^T by 8 x 8 matrices, transposed on the way; so are states unless their columns are contiguous.
        def matrices(trans):
            store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(trans, 4), dt)
            tile = cute.make_tiled_copy_C_atom(store, mma.rows)
            load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(trans, 4), dt)
            return cute.make_tiled_copy_S(load, tile), cute.make_tiled_copy_S(store, tile)

        by_matrix = cute.make_layout(((8, 1), 1, 4), stride=((1, 0), 0, 8))
        r.load, r.store = matrices(True)
        if s.v is not None:
            r.fU = cute.make_rmem_tensor((32,), dt)
            r.fU_matrices = cute.make_tensor(r.fU.iterator, by_matrix)
            r.v_at = r.load.get_slice(tid).partition_S(s.v)
        if s.o is not None:
            r.fO = cute.make_rmem_tensor((32,), dt)
            r.fO_matrices = cute.make_tensor(r.fO.iterator, by_matrix)
            r.o_at = r.store.get_slice(tid).partition_D(s.o)
        if s.states is not None:
            r.store_state = matrices(not self.config.states_v_first)[1]
            r.fS_matrices = [cute.make_tensor(r.fS.iterator + 32 * p, by_matrix) for p in range(panels)]
            r.states_at = r.store_state.get_slice(tid).partition_D(s.states)
        return r

    @cute.jit
    def consume(self, s, operands, values, mH, mHt, mO, tma_o, tO, tma_s, tS, at, warp_idx):
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
        early = const_expr(self.early)

        self.first_state(r, mH, at, v_tile)
        round_to(r.S, r.fS, 0, 32)
        oS, oG, sS, sG = None, None, None, None
        if const_expr(config.readout):
            oS, oG = self.destination(tma_o, s.o, tO, at.token, v_tile, at.hv, at.batch)
        if const_expr(config.states):
            sS, sG = self.destination(tma_s, s.states, tS, 0, v_tile, at.hv, None)

        now = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        v_now = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.v_stages)
        if const_expr(values_in):
            if chunks > 0:
                values.consumer_wait(v_now)
                cute.copy(r.load, r.v_at[None, None, None, v_now.index * self.groups + group], r.fU_matrices)
                reads_done()
                values.consumer_release(v_now)
                if const_expr(config.cu_seqlens != ""):
                    if chunks == 1:
                        keep_columns(r.fU, at.last_rows, r.tid)
                widen(r.fU, r.R)
            v_now.advance()
        if chunks > 0:
            operands.consumer_wait(now)

        for c in cutlass.range(chunks, unroll=1):
            stage = now.index
            o_slot = (c + 1) % self.o_stages * self.groups + group
            if const_expr(config.states):
                # The copies out of the last chunk have read what is overwritten now.
                if leader:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=bar, number_of_threads=128)
            # R = v + kd S
            for p in cutlass.range_constexpr(panels):
                if const_expr(p > 0):
                    round_to(r.S, r.fS, 32 * p, 32)
                if const_expr(config.states):
                    # Before the product, during which nobody else may read its operand.
                    cute.copy(r.store_state, r.fS_matrices[p], r.states_at[None, None, None, group * panels + p])
                warpgroup.fence()
                kd = r.rows[None, None, None, stage * self.readers]
                product(mma.rows, r.R, r.fS, kd, 4 * p, 4, values_in is False and p == 0)
                warpgroup.commit_group()
                warpgroup.wait_group(p + 1)
            # o = qg S, the first half
            if const_expr(config.readout):
                qg = r.rows[None, None, None, stage * self.readers + 1]
                product(mma.rows, r.O, r.fS, qg, 0, early, True)
                warpgroup.commit_group()
                warpgroup.wait_group(panels + 1)
            if const_expr(values_in):
                if c + 1 < chunks:
                    values.consumer_wait(v_now)
            if const_expr(self.o_stages == 1 and not config.states):
                # The copies out of the last chunk have read what is overwritten now.
                if leader:
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=bar, number_of_threads=128)
            if const_expr(config.readout):
                if c > 0:
                    cute.copy(r.store, r.fO_matrices, r.o_at[None, None, None, o_slot])
            if const_expr(self.blocks == 1):
                cute.autovec_copy(r.decay_at[(None, 0, None), 0, None, stage], r.decay)
            else:
                # A panel at a time: registers are scarce.
                self.scale_state(r, stage)
            if const_expr(values_in):
                # After the last chunk slot 0, which has been filled, for nothing: cheaper than a branch around the loads.
                v_slot = v_now.index * self.groups + group
                if c + 1 == chunks:
                    v_slot = group
                cute.copy(r.load, r.v_at[None, None, None, v_slot], r.fU_matrices)
            # S <- diag(decay) S
            if const_expr(self.blocks == 1):
                self.scale_state(r)
            if const_expr(values_in):
                # The fence is one for the thread's writes too, which the copies out read.
                reads_done()
                if c + 1 < chunks:
                    values.consumer_release(v_now)
                v_now.advance()
            if const_expr(config.readout or config.states):
                self.copy_out(r, leader, bar, c, tma_o, oS, oG, o_slot, tma_s, sS, sG, at, group)
            warpgroup.wait_group(int(config.readout))

            # v' = M' R, and the other half of o
            round_to(r.R, r.fR, 0, 32)
            warpgroup.fence()
            product(mma.rows, r.R, r.fR, r.scores[None, None, None, stage * self.readers], 0, 4, True)
            warpgroup.commit_group()
            if const_expr(config.readout):
                product(mma.rows, r.O, r.fS, qg, early, 4 * panels - early, early == 0)
                warpgroup.commit_group()
            warpgroup.wait_group(int(config.readout))
            round_to(r.R, r.fV, 0, 32)

            # S <- S + kg^T v', panel by panel; o <- o + Aqk v' between them
            warpgroup.fence()
            for p in cutlass.range_constexpr(panels):
                product(mma.columns, r.S_panel[p], r.fV, r.kg[p][None, None, None, stage], 0, 4, False)
                warpgroup.commit_group()
                if const_expr(p == 0 and config.readout):
                    product(mma.rows, r.O, r.fV, r.scores[None, None, None, stage * self.readers + 1], 0, 4, False)
                    warpgroup.commit_group()
            pending = const_expr(panels + config.readout)
            warpgroup.wait_group(pending + 1)
            # Branches, not waits alone, keep what is between them from sinking to the last one.
            done = now.clone()
            now.advance()
            warpgroup.wait_group(pending - 1)
            round_to(r.S, r.fS, 0, 32)
            if c + 1 < chunks:
                operands.consumer_wait(now)
            if const_expr(config.readout):
                warpgroup.wait_group(pending - 2)
                round_to(r.O, r.fO, 0, 32)
            if const_expr(values_in):
                if c + 1 < chunks:
                    if const_expr(config.cu_seqlens != ""):
                        if c + 2 == chunks:
                            keep_columns(r.fU, at.last_rows, r.tid)
                    widen(r.fU, r.R)
            warpgroup.wait_group(0)
            cute.arch.sync_warp()
            operands.consumer_release(done)

        if const_expr(config.readout):
            if chunks > 0:
                self.last_output(s, r, leader, bar, group, v_tile, tma_o, oS, oG, mO, at)
        if const_expr(mHt is not None):
            self.last_state(r, mHt, at, v_tile)
        if const_expr(config.readout or config.states):
            if leader:
                cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def first_state(self, r, mH, at, v_tile):
        if const_expr(self.config.transition):
            set_identity(r.thr_state, r.S, v_tile, self.K)
        elif const_expr(mH is not None):
            gH = part_of(r.thr_state, transposed(mH, at.unit, at.hv, self.config.state_v_first), v_tile, self.K)
            if const_expr(self.config.early != ""):
                r.S.fill(0.0)
                if at.code <= 0:
                    cute.autovec_copy(gH, r.S)
            else:
                cute.autovec_copy(gH, r.S)
        else:
            r.S.fill(0.0)

    @cute.jit
    def last_state(self, r, mHt, at, v_tile):
        gHt = part_of(r.thr_state, transposed(mHt, at.out, at.hv, self.config.state_v_first), v_tile, self.K)
        if const_expr(self.config.early != ""):
            if at.ends != 0:
                cute.autovec_copy(r.S, gHt)
        else:
            cute.autovec_copy(r.S, gHt)

    def destination(self, tma, smem, t, token, v_tile, hv, batch):
        """Tiles of a tensor copy out of shared memory: source by slot; destination by chunk (o) or by panel and slot (states)."""
        g = cute.domain_offset((0, token), t[None, None, hv, batch]) if batch is not None else t[None, None, hv, None]
        g = cute.local_tile(g, (64, 64), (v_tile, None) if batch is not None else (v_tile, None, None))
        return cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(g, 0, 2)
        )

    def scale_state(self, r, stage=None):
        """S <- diag(decay) S; with `stage` the decay is read from there, a panel at a time."""
        for p in range(self.panels):
            if stage is not None:
                cute.autovec_copy(r.decay_at[(None, 0, None), 0, p, stage], r.decay[None, None, p])
            for j in range(8):
                for e in range(2):
                    for i in range(2):
                        r.S[(e, i, j), 0, p] = r.S[(e, i, j), 0, p] * r.decay[e, j, p]

    @cute.jit
    def copy_out(self, r, leader, bar, c, tma_o, oS, oG, o_slot, tma_s, sS, sG, at, group):
        """Start the copies of the last chunk's o and of this chunk's first state, once all warps have written and fenced them."""
        if const_expr(self.o_stages > 1 and not self.config.states):
            # The slot that the next chunk writes was read by the last chunk's copy.
            if leader:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=bar, number_of_threads=128)
        if leader:
            if const_expr(self.config.readout):
                if c > at.skip:
                    cute.copy(tma_o, oS[None, o_slot], oG[None, c - 1])
            if const_expr(self.config.states):
                if c >= at.skip:
                    for p in cutlass.range_constexpr(self.panels):
                        cute.copy(tma_s, sS[None, group * self.panels + p], sG[None, p, at.slot + c])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def last_output(self, s, r, leader, bar, group, v_tile, tma_o, oS, oG, mO, at):
        """o of the unit's last chunk: whole by a tensor copy, else its valid rows only, for others' rows follow."""
        slot = (at.chunks + 1) % self.o_stages * self.groups + group
        if leader:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=bar, number_of_threads=128)
        cute.copy(r.store, r.fO_matrices, r.o_at[None, None, None, slot])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=bar, number_of_threads=128)
        if at.last_rows == CHUNK:
            if leader:
                cute.copy(tma_o, oS[None, slot], oG[None, at.chunks - 1])
                cute.arch.cp_async_bulk_commit_group()
        else:
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
            vector = cute.make_layout(8)
            for i in cutlass.range_constexpr(4):
                row = (r.tid + 128 * i) // 8
                group8 = r.tid % 8
                if row < at.last_rows:
                    # Where the 128-byte swizzle has put this row's group of 8 columns.
                    src = s.o_at + (slot * PANEL + row * 64 + (group8 ^ (row & 7)) * 8)
                    token = at.token + CHUNK * (at.chunks - 1) + row
                    dst = mO[at.batch, token, at.hv, None].iterator + (64 * v_tile + 8 * group8)
                    rX = cute.make_rmem_tensor((8,), self.dtype)
                    cute.copy(atom, cute.make_tensor(src.align(16), vector), rX)
                    cute.copy(atom, rX, cute.make_tensor(dst.align(16), vector))


def compile(config: ScanConfig, **tuning):
    """The launch function for `config`: `(factors, scores, decay, v, h0, cu_seqlens, o, ht, hs, bound,
    early, segments, segment_chunks)`.

    Absent tensors are None: v with `transition`, h0 without `initial`, cu_seqlens of sequences that are not packed, o without `readout`,
    ht without `final` (`transition` implies it), hs without `states`; bound
    fp32 [slots, HV] without `early` "decide", early int32 [units, HV] without `early`. `tuning` is `KdaScan`'s.
    """
    kernel = KdaScan(config, **tuning)
    dt, K = kernel.dtype, config.key_dim
    slots, heads, batch, tokens, value_dim, units = (cute.sym_int() for _ in range(6))
    ended = cute.sym_int() if config.early and config.initial else units

    def state(dtype, n, columns, v_first=config.state_v_first):
        return row_major(dtype, (n, heads, columns, K) if v_first else (n, heads, K, columns))

    columns = K if config.transition else value_dim
    return cute.compile(
        kernel,
        row_major(dt, (slots, heads, 3, K // 64, 64, 64), (1, 2, 3, 4)),
        row_major(dt, (slots, heads, config.panels, 64, 64), (1, 2, 3)),
        row_major(Float32, (slots, heads, K), (1,)),
        None if config.transition else row_major(dt, (batch, tokens, heads, value_dim)),
        state(Float32, units, columns) if config.initial else None,
        make_fake_tensor(DTYPES[config.cu_seqlens], (cute.sym_int(),), stride=(1,)) if config.cu_seqlens else None,
        row_major(dt, (batch, tokens, heads, value_dim)) if config.readout else None,
        state(Float32, ended, columns) if config.final or config.transition else None,
        state(dt, slots, columns, config.states_v_first) if config.states else None,
        dense(Float32, (slots, heads)) if config.early == "decide" else None,
        dense(Int32, (units, heads)) if config.early else None,
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
