"""KDA: the inverse of a chunk applied to its keys and values, for scans that take w and u.

    w = M' (k 2^G) = -M' kd        u = M' v        M' [64, 64] lower triangular, kd = -k 2^G, both from `warp.kda_prepare`

Roles: a CTA of four warps for a slot, value head and panel of 64 columns of [w | u]; warp i computes rows 16 i .. 16 i + 15 by
`mma.m16n8k16`, from M' columns 0 .. 16 i + 15 (the rest is zero). Panels of one chunk are neighbours in the grid: they read the same M'.

Timeline: M' and kd by bulk copies, or v row by row into a panel, zeros beyond the sequence | barrier | products | rows into a panel, and
from there by one bulk copy a warp.

Rows beyond a sequence's end are zero in w and u because they are in M'; rows of v there belong to another sequence and are not read.
Slots that are nobody's are neither read nor written. Shared memory: three panels, 24 KB.

Constraints: K 64 or 128; V a multiple of 64; v with a contiguous last dimension, other strides multiples of 16 bytes.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from ...tile.arguments import DTYPES
from ...tile.bulk import bulk_load
from ...tile.matrices import load, load_transposed, store
from ...tile.mma import mma_16bit
from ...tile.panel import BYTES, vector_offset
from ...tile.ptx import pack, store_shared
from ...tile.sequence import chunk_of_slot
from ..config import CHUNK, ApplyConfig

PANEL = 64 * 64


class KdaApply:
    """The kernel for one `ApplyConfig`."""

    def __init__(self, config: ApplyConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.keys = config.key_dim // 64

    @cute.jit
    def __call__(
        self,
        factors: cute.Tensor,
        scores: cute.Tensor,
        v: cute.Tensor,
        cu_seqlens: cute.Tensor | None,
        wu: cute.Tensor,
        stream,
    ):
        """Launch: one CTA for a slot, value head and panel."""
        slots, heads, panels = wu.shape[0], wu.shape[1], wu.shape[2]
        by_panel, by_head, by_batch = (cute.fast_divmod_create_divisor_v2(x) for x in (panels, heads, v.shape[0]))
        self.kernel(factors, scores, v, cu_seqlens, wu, by_panel, by_head, by_batch).launch(
            grid=(slots * heads * panels, 1, 1), block=(128, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=False
        )

    @cute.kernel
    def kernel(
        self,
        mF: cute.Tensor,
        mM: cute.Tensor,
        mV: cute.Tensor,
        mCu: cute.Tensor | None,
        mWU: cute.Tensor,
        by_panel: cute.FastDivmodDivisorV2,
        by_head: cute.FastDivmodDivisorV2,
        by_batch: cute.FastDivmodDivisorV2,
    ):
        # The scan may be put on SMs as they become free; it waits for this grid's end before it reads.
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        rest, panel = divmod(block, by_panel)
        slot, hv = divmod(rest, by_head)
        if const_expr(mCu is not None):
            batch = Int32(0)
            first, rows = chunk_of_slot(mCu, slot)
            # Whatever the bounds say, nothing outside v is read.
            first = cutlass.max(first, 0)
            rows = cutlass.min(rows, mV.shape[1] - first)
        else:
            # Entries of the batch have the same number of chunks, and neighbouring slots are chunks of one.
            chunks, _ = divmod(mWU.shape[0], by_batch)
            batch = slot // chunks
            first = (slot - batch * chunks) * CHUNK
            rows = cutlass.min(mV.shape[1] - first, CHUNK)
        smem = SmemAllocator()
        sM = smem.allocate_array(self.dtype, PANEL, byte_alignment=128)
        sX = smem.allocate_array(self.dtype, PANEL, byte_alignment=128)
        sY = smem.allocate_array(self.dtype, PANEL, byte_alignment=128)
        barrier = smem.allocate_array(Int64, 1, byte_alignment=8)
        if tid == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # What prepare writes is read from here on.
        cute.arch.griddepcontrol_wait()
        if rows > 0:
            self.fetch(mF, mM, mV, sM, sX, barrier, slot, hv, panel, batch, first, rows, tid)
            cute.arch.sync_threads()
            cute.arch.mbarrier_wait(barrier, 0)
            warp = cute.arch.make_warp_uniform(tid // 32)
            self.multiply(sM.toint(), sX.toint(), sY.toint(), panel < self.keys, warp, tid % 32)
            # This warp's rows are 2 KB in one piece, here as in memory.
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                part = const_expr(PANEL // 4)
                shape = cute.make_layout(part)
                dst = mWU[slot, hv, panel, None, None].iterator + warp * part
                atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.dtype)
                cute.copy(
                    atom, cute.make_tensor((sY + warp * part).align(16), shape), cute.make_tensor(dst.align(16), shape)
                )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def fetch(self, mF, mM, mV, sM, sX, barrier, slot, hv, panel, batch, first, rows, tid):
        """M' and what it is applied to: an image of kd, or rows of v made one."""
        keys = panel < self.keys
        if tid < 32:
            size = Int32(BYTES)
            if keys:
                size = Int32(2 * BYTES)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
                bulk_load(mM[slot, hv, 0, None, None].iterator.align(16), sM, PANEL, barrier, 1, Int32(0))
                if keys:
                    kd = mF[slot, hv, 0, panel, None, None].iterator
                    bulk_load(kd.align(16), sX, PANEL, barrier, 1, Int32(0))
        if panel >= self.keys:
            for i in cutlass.range_constexpr(4):
                self.fetch_vector(mV, sX, batch, first, tid // 8 + 16 * i, rows, hv, (panel - self.keys) * 64, tid % 8)

    @cute.jit
    def fetch_vector(self, mV, sX, batch, first, row, rows, hv, column, vector):
        """Eight columns of a row of v into the panel."""
        words = cute.make_rmem_tensor((4,), Uint32)
        words.fill(0)
        if row < rows:
            src = (mV[batch, first + row, hv, None].iterator + (column + 8 * vector)).align(16)
            cute.autovec_copy(cute.make_tensor(cute.recast_ptr(src, dtype=Uint32), cute.make_layout(4)), words)
        store_shared(sX.toint() + vector_offset(row, vector), 0, [words[x] for x in range(4)])

    @cute.jit
    def multiply(self, sM, sX, sY, negate, warp, lane):
        """Rows 16 warp .. of M' x, negated for kd, rounded into a panel."""
        acc = cute.make_rmem_tensor((4, 8), Float32)
        acc.fill(0.0)
        row = 16 * warp + lane % 16
        for step in cutlass.range(warp + 1, unroll=1):
            # A: rows, columns 16 step ..; matrices (rows 0-7, 8-15) x (columns 0-7, 8-15), the rows first.
            a = load(sM + vector_offset(row, 2 * step + lane // 16))
            token = 16 * step + lane % 16
            for j in cutlass.range_constexpr(4):
                # B: tokens 16 step .., columns 16 j ..: two tiles of 8 columns.
                b = load_transposed(sX + vector_offset(token, 2 * j + lane // 16))
                for i in cutlass.range_constexpr(2):
                    n = 2 * j + i
                    sums = mma_16bit(self.dtype, a, b[2 * i : 2 * i + 2], [acc[x, n] for x in range(4)])
                    for x in cutlass.range_constexpr(4):
                        acc[x, n] = sums[x]
        sign = Float32(1.0)
        if negate:
            sign = Float32(-1.0)
        for j in cutlass.range_constexpr(4):
            words = [
                pack(self.dtype, sign * acc[x, n], sign * acc[x + 1, n]) for n in (2 * j, 2 * j + 1) for x in (0, 2)
            ]
            store(sY + vector_offset(row, 2 * j + lane // 16), words)


def compile(config: ApplyConfig):
    """The launch function for `config`: `(factors, scores, v, cu_seqlens | None, wu)`.

    factors [slots, HV, 3, K/64, 64, 64] and scores [slots, HV, 2, 64, 64] of `warp.kda_prepare`, v [B, T, HV, V], wu [slots, HV, K/64 +
    V/64, 64, 64], images of w and u.
    """
    kernel = KdaApply(config)
    dt, keys = kernel.dtype, kernel.keys
    slots, heads, batch, tokens, width, panels = (cute.sym_int() for _ in range(6))

    def images(*shape):
        strides = (cute.sym_int64(divisibility=PANEL), cute.sym_int64(divisibility=PANEL), PANEL, 64, 1)
        if len(shape) == 6:
            strides = (*strides[:2], keys * PANEL, *strides[2:])
        return make_fake_tensor(dt, shape, stride=strides, assumed_align=16)

    v_strides = tuple(cute.sym_int64(divisibility=8) for _ in range(3))
    return cute.compile(
        kernel,
        images(slots, heads, 3, keys, 64, 64),
        images(slots, heads, 2, 64, 64),
        make_fake_tensor(dt, (batch, tokens, heads, width), stride=(*v_strides, 1), assumed_align=16),
        make_fake_tensor(DTYPES[config.cu_seqlens], (cute.sym_int(),), stride=(1,), assumed_align=8)
        if config.cu_seqlens
        else None,
        images(slots, heads, panels, 64, 64),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
