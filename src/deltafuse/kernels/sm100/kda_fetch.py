"""`kda_scan`: operands to shared memory, by bulk copies of a workspace's images or by tensor copies, and zeros where they are not clean."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...tile.bulk import bulk_load
from ...tile.panel import BYTES as PANEL_BYTES
from ...tile.panel import ELEMENTS as PANEL
from ...tile.panel import ROW, vector_offset
from ...tile.ptx import load_shared, store_shared
from ..config import CHUNK


class Fetch:
    """Part of `KdaScan`: warp 0, and warps 2 and 3."""

    def rank(self):
        """This CTA's place in its cluster."""
        return Int32(0) if self.cluster == 1 else cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def tiles(self, load, t, shared, at, rank, ctas):
        """Panels in shared memory, and a sequence's chunks of t [T, D, HV, B] as panels, for a copy that `ctas` CTAs share."""
        g = cute.local_tile(
            cute.domain_offset((at.start, 0), t[None, None, at.hv, at.batch]), (CHUNK, 64), (None, None)
        )
        return cpasync.tma_partition(
            load, rank, cute.make_layout(ctas), cute.group_modes(shared, 0, 2), cute.group_modes(g, 0, 2)
        )

    @cute.jit
    def announce(self, full, empty, stage, phase, size: cutlass.Constexpr[int]):
        """Waits until a stage is free and says how many bytes will come; the phase is that of the stage's use."""
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)

    @cute.jit
    def drain(self, empty, stages: cutlass.Constexpr[int], at):
        """Waits for the last uses of the stages: products must not arrive at barriers of a CTA that is gone."""
        for i in cutlass.range(cutlass.min(at.chunks, stages), unroll=1):
            c = at.chunks - 1 - i
            cute.arch.mbarrier_wait(empty + c % stages, c // stages & 1)

    @cute.jit
    def fetch_values(self, load, xS, xG, bar, at, c, stage):
        """The tile's columns of a chunk's v, or u."""
        for p in cutlass.range_constexpr(self.groups):
            cute.copy(load, xG[None, c, at.tile * self.groups + p], xS[None, stage * self.groups + p], tma_bar_ptr=bar)

    @cute.jit
    def fetch_slots(self, s, b, mF, mW, mM, mD, load_v, tV, at):
        """Images of the workspace by bulk copies, v by tensor copies."""
        blocks, K = const_expr(self.blocks), const_expr(self.K)
        cluster, rank = const_expr(self.cluster), self.rank()
        vS, vG = self.tiles(load_v, tV, s.values, at, 0, 1)
        for c in cutlass.range(at.chunks, unroll=1):
            stage, phase = c % self.stages, c // self.stages & 1
            slot = at.slot + c
            self.announce(b.operands_full, b.operands_empty, stage, phase, self.operand_panels * PANEL_BYTES)
            dst = s.operands_at + stage * (self.operand_panels * PANEL)
            with cute.arch.elect_one():
                bar = b.operands_full + stage
                w = mW[slot, at.hv, 0, None, None].iterator
                factors = mF[slot, at.hv, 1, 0, None, None].iterator
                scores = mM[slot, at.hv, 0, None, None].iterator
                bulk_load(w.align(16), (dst + self.w * PANEL).align(16), blocks * PANEL, bar, cluster, rank)
                bulk_load(factors.align(16), (dst + self.qg * PANEL).align(16), 2 * blocks * PANEL, bar, cluster, rank)
                bulk_load(scores.align(16), (dst + self.inverse * PANEL).align(16), 2 * PANEL, bar, cluster, rank)
            if const_expr(self.value_stages == 1):
                # v's one stage is free a chunk's time before it is wanted; v is on its way to L2 as early as the operands.
                for p in cutlass.range_constexpr(self.groups):
                    cute.prefetch(load_v, vG[None, c, at.tile * self.groups + p])
            stage, phase = c % self.value_stages, c // self.value_stages & 1
            self.announce(b.values_full, b.values_empty, stage, phase, self.groups * PANEL_BYTES)
            self.fetch_values(load_v, vS, vG, b.values_full + stage, at, c, stage)
            stage, phase = c % self.decay_stages, c // self.decay_stages & 1
            self.announce(b.decay_full, b.decay_empty, stage, phase, 4 * K)
            with cute.arch.elect_one():
                decay = (s.decay_at + stage * K).align(16)
                bulk_load(mD[slot, at.hv, None].iterator.align(16), decay, K, b.decay_full + stage, 1, rank)
        self.drain(b.values_empty, self.value_stages, at)
        self.drain(b.operands_empty, self.stages, at)

    @cute.jit
    def fetch_tokens(self, s, b, loads, mG, at):
        """Tensors by tensor copies, whose rows may start at any token; of the gates the row of a chunk's last token."""
        K = const_expr(self.K)
        rank = self.rank()
        mask = None if const_expr(self.cluster == 1) else Int16((1 << self.cluster) - 1)
        parts = [self.tiles(load, t, s.operands, at, rank, self.cluster) for load, t in loads[:4]]
        load_u, tU = loads[4]
        uS, uG = self.tiles(load_u, tU, s.values, at, 0, 1)
        for c in cutlass.range(at.chunks, unroll=1):
            stage, phase = c % self.stages, c // self.stages & 1
            self.announce(b.operands_full, b.operands_empty, stage, phase, self.operand_panels * PANEL_BYTES)
            bar = b.operands_full + stage
            for i in cutlass.range_constexpr(4):
                xS, xG = parts[i]
                for p in cutlass.range_constexpr(self.blocks if const_expr(i < 3) else 1):
                    panel = stage * self.operand_panels + i * self.blocks + p
                    cute.copy(loads[i][0], xG[None, c, p], xS[None, panel], tma_bar_ptr=bar, mcast_mask=mask)
            stage, phase = c % self.decay_stages, c // self.decay_stages & 1
            self.announce(b.decay_full, b.decay_empty, stage, phase, self.groups * PANEL_BYTES + 4 * K)
            bar = b.decay_full + stage
            self.fetch_values(load_u, uS, uG, bar, at, c, stage)
            if const_expr(self.config.gates == "all"):
                row = mG[at.batch, at.start + c * CHUNK + self.rows(at, c) - 1, at.hv, None].iterator
            else:
                row = mG[at.slot + c, at.hv, None].iterator
            with cute.arch.elect_one():
                bulk_load(row.align(16), (s.decay_at + stage * K).align(16), K, bar, 1, Int32(0))
        self.drain(b.operands_empty, self.stages, at)

    # ------------------------------------------------------------------------------------------------------------- cleaning
    @cute.jit
    def clean(self, s, b, at):
        """Row by row, whatever is there: zeros in Aqk right of the diagonal; beyond the sequence in kg, or in v of slots."""
        row = at.warp * 32 + cute.arch.lane_idx() - 64
        full = b.values_full if const_expr(self.slots) else b.operands_full
        for c in cutlass.range(at.chunks, unroll=1):
            stage = c % self.clean_stages
            cute.arch.mbarrier_wait(full + stage, c // self.clean_stages & 1)
            if const_expr(self.slots):
                values = s.values_at.toint() + stage * (self.groups * PANEL_BYTES)
                self.clear_row(values, self.groups, row, row >= self.rows(at, c))
            else:
                base = s.operands_at.toint() + stage * (self.operand_panels * PANEL_BYTES)
                if const_expr(self.mask):
                    self.mask_row(base + self.aqk * PANEL_BYTES, row)
                if const_expr(self.packed):
                    self.clear_row(base + self.kg * PANEL_BYTES, self.blocks, row, row >= self.rows(at, c))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(b.clean + stage)

    @cute.jit
    def mask_row(self, aqk, row):
        for v in cutlass.range_constexpr(8):
            if 8 * v > row:
                store_shared(aqk + vector_offset(row, v), 0, [Uint32(0)] * 4)
        # The vector that holds the diagonal: words below it stay, of the one with it the upper half goes where the row is even.
        vector = aqk + vector_offset(row, row // 8)
        words = load_shared(vector, 0, 4, Uint32)
        inside = row % 8
        for i in cutlass.range_constexpr(4):
            keep = Uint32(0)
            if inside == 2 * i:
                keep = Uint32(0xFFFF)
            if inside > 2 * i:
                keep = Uint32(0xFFFFFFFF)
            words[i] = words[i] & keep
        store_shared(vector, 0, words)

    @cute.jit
    def clear_row(self, panels, n: cutlass.Constexpr[int], row, beyond):
        if beyond:
            for p in cutlass.range_constexpr(n):
                for v in cutlass.range_constexpr(8):
                    store_shared(panels + p * PANEL_BYTES + row * ROW, 16 * v, [Uint32(0)] * 4)
