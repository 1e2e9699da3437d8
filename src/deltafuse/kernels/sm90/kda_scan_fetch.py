"""`kda_scan`, its producers: a warp that fetches operands, a warp that fetches v (`kda_reverse` has the latter, too)."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...tile import panel
from ...tile.bulk import bulk_load
from ...tile.panel import ELEMENTS as PANEL
from ...tile.ptx import load_global, store_shared
from ..config import CHUNK

MOST_STAGES = 4
"""Whose live blocks one register holds."""


class ScanFetch:
    """Part of `KdaScan`."""

    @cute.jit
    def fetch_operands(self, s, operands, mF, mM, mD, at):
        """A chunk's factors, scores and decay."""
        K, cluster = const_expr(self.K), const_expr(self.cluster)
        rank = Int32(0)
        if const_expr(cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        # Live blocks of the chunk that is this lane's among 32, and of the next 32; for every stage, in 4 bits, the block from which on its
        # rows are known to be zeros: none at first.
        live = coming = Int32(0)
        filled = Int32(0x4444)
        if const_expr(self.config.strips):
            live = coming = self.live_blocks(mM, at, cute.arch.lane_idx())
        for c in cutlass.range(at.chunks, unroll=1):
            if const_expr(self.config.strips):
                if c % 32 == 0:
                    live = coming
                if c % 32 == 16:
                    coming = self.live_blocks(mM, at, c + 16 + cute.arch.lane_idx())
            operands.sync_object_empty.wait(state.index, state.phase)
            bar = operands.producer_get_barrier(state)
            stage = state.index
            slot = at.slot + c
            with cute.arch.elect_one():
                self.fetch_scores(s.scores_at + stage * (self.readers * PANEL), mM, slot, at.hv, bar, rank)
                kg = s.kg_at + stage * (CHUNK * K)
                bulk_load(
                    mF[slot, at.hv, 2, 0, None, None].iterator.align(16), kg.align(16), CHUNK * K, bar, cluster, rank
                )
                decay = s.decay_at + stage * K
                bulk_load(mD[slot, at.hv, None].iterator.align(16), decay.align(16), K, bar, cluster, rank)
            rows = mF[slot, at.hv, 0, 0, None, None].iterator
            if const_expr(self.config.strips):
                filled = self.fetch_rows(s, rows, cute.arch.shuffle_sync(live, c % 32), filled, stage, bar, rank)
            else:
                with cute.arch.elect_one():
                    to = s.rows_at + stage * (self.readers * CHUNK * K)
                    bulk_load(rows.align(16), to.align(16), self.readers * CHUNK * K, bar, cluster, rank)
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, self.copied_bytes)
            state.advance()

    @cute.jit
    def live_blocks(self, mM, at, c):
        """How many blocks of 16 rows chunk c has of kd and qg in memory; behind them come zeros.

        Some number of 1 to 4 whatever is there: in a slot that nobody has written, anything is (`tile.sequence`).
        """
        live = Int32(4)
        if c < at.chunks:
            live = load_global(mM[at.slot + c, at.hv, 0, None, None].iterator.toint(), panel.LIVE, 1, Int32)[0]
        return cutlass.min(cutlass.max(live, 1), 4)

    @cute.jit
    def fetch_rows(self, s, rows, live, filled, stage, bar, rank):
        """kd and qg of a chunk, their first `live` blocks of 16 rows, into a stage, and zeros behind them; the stages' next state."""
        panels = const_expr(self.readers * self.panels)
        to = s.rows_at + stage * (panels * PANEL)
        before = filled >> (4 * stage) & 15
        if live < before:
            for i in cutlass.range(cute.arch.lane_idx(), (before - live) * (panel.BLOCK_BYTES // 16), 32, unroll=1):
                for p in cutlass.range_constexpr(panels):
                    address = to.toint() + live * panel.BLOCK_BYTES + i * 16
                    store_shared(address, p * panel.BYTES, [Uint32(0)] * 4)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
        with cute.arch.elect_one():
            if live == 4:
                # All panels lie one behind the other: one copy.
                bulk_load(rows.align(16), to.align(16), panels * PANEL, bar, self.cluster, rank)
            for n in cutlass.range_constexpr(1, 4):
                if live == n:
                    for p in cutlass.range_constexpr(panels):
                        size = const_expr(n * panel.BLOCK_BYTES // 2)
                        bulk_load(
                            (rows + p * PANEL).align(16), (to + p * PANEL).align(16), size, bar, self.cluster, rank
                        )
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.copied_bytes - (4 - live) * (panels * panel.BLOCK_BYTES))
        return (filled & ~(15 << (4 * stage))) | live << (4 * stage)

    @cute.jit
    def fetch_scores(self, scores, mM, slot, hv, bar, rank):
        """A chunk's M' and Aqk; of strips the rows that are not zeros."""
        cluster = const_expr(self.cluster)
        if const_expr(self.config.strips):
            for x in cutlass.range_constexpr(self.readers):
                for i in cutlass.range_constexpr(4):
                    first = const_expr(16 * i * panel.STRIP_ROW)
                    src = mM[slot, hv, x, None, None].iterator + (panel.packed_strip(i) + first) // 2
                    dst = scores + (x * panel.BYTES + i * panel.STRIP + first) // 2
                    bulk_load(src.align(16), dst.align(16), (panel.STRIP - first) // 2, bar, cluster, rank)
        else:
            src = mM[slot, hv, 0, None, None].iterator
            bulk_load(src.align(16), scores.align(16), self.readers * PANEL, bar, cluster, rank)

    @cute.jit
    def fetch_values(self, s, values, tma_v, tV, at):
        """A chunk's v^T (going back: do^T), 64 columns of V for each warpgroup."""
        gV = cute.domain_offset((0, at.token), tV[None, None, at.hv, at.batch])
        gV = cute.local_tile(gV, (64, CHUNK), (None, None))
        vS, vG = cpasync.tma_partition(
            tma_v, 0, cute.make_layout(1), cute.group_modes(s.v, 0, 2), cute.group_modes(gV, 0, 2)
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.v_stages)
        for i in cutlass.range(at.chunks, unroll=1):
            values.producer_acquire(state)
            bar = values.producer_get_barrier(state)
            for group in cutlass.range_constexpr(self.groups):
                chunk = at.chunks - 1 - i if const_expr(self.back) else i
                source = vG[None, at.tile * self.groups + group, chunk]
                cute.copy(tma_v, source, vS[None, state.index * self.groups + group], tma_bar_ptr=bar)
            state.advance()
