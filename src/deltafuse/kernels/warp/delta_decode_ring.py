"""Single tokens as `delta_decode` takes them, the states through a ring in shared memory.

A CTA owns one head's state at a time, of all columns of V, and takes `grid` CTAs' share of all heads one after the other. States come and
go by bulk copies, which are contiguous in either layout, so that memory reads and writes them while warps compute:

    slot i       computed on: read into registers by the warps, written back as it is updated
    slot i + 1   being read, or read
    slot i - 1   being written; when it has left shared memory, the state of i + slots - 1 is asked for in its place

Each thread that has read or written a slot fences before the CTA's barrier; one thread stores, waits for the store before, and loads. q, k,
g, v, beta of the next head are loaded into registers before the sums of this one.

Lanes of [V, K] states hold row group r ^ 2 c rather than r: eight lanes then read 128 different bytes of shared memory at once. The sums
stay what they were, since their partners' row groups differ in the same bits.

Constraints: those of `delta_decode`; single tokens, states given and written in the same dtype, V = `warps` times `columns`.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...tile.bulk import bulk_load, reads_done
from ...tile.gate import Gate
from ...tile.ptx import load_shared, store_shared
from ..config import DecodeConfig
from . import delta_decode
from .delta_decode import DeltaDecode, packed

MULTIPROCESSORS = 132
"""Those of an H200."""
PIECES = 4
"""Copies a state: several queue better than one."""


class DecodeRing(DeltaDecode):
    """The kernel for one `DecodeConfig`, `slots` states a CTA and at most `grid` CTAs."""

    def __init__(self, config: DecodeConfig, slots: int = 3, grid: int = MULTIPROCESSORS) -> None:
        super().__init__(config)
        c = config
        if not c.single or c.store != "last" or c.state_dtype != c.final_dtype or c.value_dim != c.warps * c.columns:
            raise ValueError(f"`config`: got {c}; allowed: single tokens, states read and written, one CTA a head")
        self.slots, self.grid = slots, grid
        self.elements = c.key_dim * c.value_dim
        self.bytes = self.elements * self.read_type.width // 8

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        state: cute.Tensor | None,
        indices: cute.Tensor | None,
        accepted: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        out: cute.Tensor,
        final: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        stream,
    ):
        """Launch: a CTA for every `grid`th head of a sequence."""
        units = v.shape[0] * v.shape[2]
        by_heads = cute.fast_divmod_create_divisor_v2(v.shape[2])
        by_ratio = cute.fast_divmod_create_divisor_v2(v.shape[2] // q.shape[2])
        self.ring_kernel(
            (q, k, v, g, beta, by_ratio), a_log, dt_bias, state, indices, accepted, out, final, scale, lower_bound, beta_limit,
            Int32(units), by_heads,
        ).launch(
            grid=(cutlass.min(units, self.grid), 1, 1), block=(32 * self.config.warps, 1, 1), stream=stream,
            min_blocks_per_mp=max(1, self.grid // MULTIPROCESSORS), preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def ring_kernel(
        self,
        tensors: tuple,
        mA: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mS: cute.Tensor,
        mIndices: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        mO: cute.Tensor,
        mF: cute.Tensor,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        units: Int32,
        by_heads: cute.FastDivmodDivisorV2,
    ):
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = tid // 32, tid % 32
        smem = cutlass.memory.SmemAllocator()
        sStates = smem.allocate_array(self.read_type, self.slots * self.elements, byte_alignment=128)
        sVectors = smem.allocate_array(
            Float32, self.config.key_dim * self.vectors * self.config.warps, byte_alignment=16
        )
        full = smem.allocate_array(Int64, self.slots, byte_alignment=8)
        # Slots of the states that are in the ring, the one that is computed on first.
        rSlots = cute.make_rmem_tensor((self.slots,), Int32)
        for i in cutlass.range_constexpr(self.slots):
            rSlots[i] = self.slot_of(mS, mIndices, mAccepted, block + i * grid, units, by_heads)
        if tid == 0:
            for i in cutlass.range_constexpr(self.slots):
                cute.arch.mbarrier_init(full + i, 1)
            cute.arch.mbarrier_init_fence()
            for i in cutlass.range_constexpr(self.slots - 1):
                self.ask(mS, rSlots[i], block + i * grid, by_heads, sStates, full, Int32(i))
        cute.arch.sync_threads()
        v0, c = warp * self.config.columns, lane % self.column_groups
        r = lane // self.column_groups
        if const_expr(self.config.state_v_first):
            r = r ^ (2 * c)
        column = v0 + self.column(lane)
        vectors = Int32(sVectors.toint()) + warp * (self.vectors * self.config.key_dim * 4)
        rWords = cute.make_rmem_tensor((self.words(),), Uint32)
        rGates = cute.make_rmem_tensor((1 + self.own,), Float32)
        self.load_inputs(rWords, rGates, tensors, mA, mBias, block, units, by_heads, column, lane)
        for i in cutlass.range((units - block + grid - 1) // grid, unroll=1):
            unit = block + i * grid
            at = i % self.slots
            slot, later = rSlots[0], rSlots[self.slots - 1]
            n = Int32(unit // by_heads)
            head = unit - n * mO.shape[2]
            token = self.prepared(rWords, self.gates_of(rGates, mA, mBias, lower_bound), scale, beta_limit)
            self.load_inputs(rWords, rGates, tensors, mA, mBias, unit + grid, units, by_heads, column, lane)
            for j in cutlass.range_constexpr(self.slots - 1):
                rSlots[j] = rSlots[j + 1]
            rSlots[self.slots - 1] = self.slot_of(
                mS, mIndices, mAccepted, unit + self.slots * grid, units, by_heads
            )  # fmt: skip
            cute.arch.mbarrier_wait(full + at, i // self.slots % 2)
            if slot >= 0:
                address = Int32((sStates + at * self.elements).toint())
                rS = self.state_at(address, v0, r, c)
                o, deltas = self.sums(rS, token, vectors, lane, r, c)
                self.write_update(rS, address, token[1], deltas, vectors, v0, r, c)
                self.write_outputs(mO, o, (n, Int32(0), head), column, lane)
            else:
                self.clear(mO, mF, (n, Int32(0), head, v0, lane), Int32(1))
            reads_done()
            cute.arch.sync_threads()
            if tid == 0:
                if slot >= 0:
                    self.give(mF, slot, head, sStates + at * self.elements)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(1, read=True)
                before = (i + self.slots - 1) % self.slots
                self.ask(mS, later, unit + (self.slots - 1) * grid, by_heads, sStates, full, before)
        if tid == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def slot_of(self, mS, mIndices, mAccepted, unit, units, by_heads):
        """The slot of a head's sequence; -1 where there is none."""
        slot = Int32(-1)
        if unit < units:
            slot = self.first_slot(mS, mIndices, mAccepted, Int32(unit // by_heads))
        return slot

    @cute.jit
    def ask(self, mS, slot, unit, by_heads, sStates, full, at):
        """A state into its place in the ring; without one, the place is full at once."""
        barrier = full + at
        if slot >= 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.bytes)
            head = unit - Int32(unit // by_heads) * mS.shape[1]
            src, part = mS[slot, head, None, None].iterator, const_expr(self.elements // PIECES)
            for i in cutlass.range_constexpr(PIECES):
                dst = sStates + at * self.elements + i * part
                bulk_load((src + i * part).align(16), dst.align(16), part, barrier, 1, Int32(0))
        else:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def give(self, mF, slot, head, src):
        """A state back to memory."""
        part = const_expr(self.elements // PIECES)
        atom, shape = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.write_type), cute.make_layout(part)
        dst = mF[slot, head, None, None].iterator
        for i in cutlass.range_constexpr(PIECES):
            cute.copy(
                atom,
                cute.make_tensor((src + i * part).align(16), shape),
                cute.make_tensor((dst + i * part).align(16), shape),
            )

    @cute.jit
    def load_inputs(self, rWords, rGates, tensors, mA, mBias, unit, units, by_heads, column, lane):
        """`load_token` of a head, and the parameters of its gate."""
        if unit < units:
            n = Int32(unit // by_heads)
            head = unit - n * tensors[2].shape[2]
            self.load_token(rWords, tensors, (n, Int32(0), head), column, lane, Int32(1))
            if const_expr(mA is not None):
                rGates[0] = Float32(mA[head])
            if const_expr(mBias is not None):
                for i in cutlass.range_constexpr(self.own if self.config.per_key else 1):
                    rGates[1 + i] = Float32(
                        mBias[head * self.config.key_dim + lane * self.own + i if self.config.per_key else head]
                    )

    def gates_of(self, rGates, mA, mBias, lower_bound):
        """As `gates`, of what `load_inputs` has loaded."""
        a_log = None if mA is None else rGates[0]
        biases = [None if mBias is None else rGates[1 + i] for i in range(self.own if self.config.per_key else 1)]
        return [Gate(self.config.gate, a_log, bias, lower_bound) for bias in biases]

    def load_words(self, address, v0, r, c, valid=None):
        size = self.read_type.width // 8
        first = address + self.first_element(v0, r, c) * size
        return [load_shared(first, offset * size, 4, Uint32) for offset, _ in self.runs()]

    def store_run(self, policy, first, offset, values):
        words = packed(self.write_type, values)
        store_shared(first, offset * (self.write_type.width // 8), words)


def compile(config: DecodeConfig, slots: int = 3, grid: int = MULTIPROCESSORS):
    """As `delta_decode.compile`."""
    return delta_decode.compile(config, DecodeRing(config, slots, grid))
