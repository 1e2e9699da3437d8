"""KDA: the inverse of a chunk applied to its keys, for the scan that works in tensor memory.

    w = M' kd        M' [64, 64] lower triangular, kd = -k 2^G, both from `warp.kda_prepare`

Roles: a CTA of four warps for a slot, value head and panel of 64 columns of w; warp i computes rows 16 i .. 16 i + 15 by
`mma.m16n8k16`, from M' columns 0 .. 16 i + 15 (the rest is zero). Panels of one chunk are neighbours in the grid: they read the same M'.

Timeline: M' and kd by bulk copies | barrier | products | rows into a panel, and from there by one bulk copy a warp.

Rows beyond a sequence's end are zero in w because they are in M'. Slots that are nobody's get a w that is nobody's. Shared memory: three
panels, 24 KB.

Constraints: K 64 or 128.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from ...tile.arguments import DTYPES
from ...tile.bulk import bulk_load
from ...tile.matrices import load, load_transposed, store
from ...tile.mma import mma_16bit
from ...tile.panel import BYTES, vector_offset
from ...tile.panel import ELEMENTS as PANEL
from ...tile.ptx import pack
from ..config import ApplyConfig


class KdaApply:
    """The kernel for one `ApplyConfig`."""

    def __init__(self, config: ApplyConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.keys = config.key_dim // 64

    @cute.jit
    def __call__(self, factors: cute.Tensor, scores: cute.Tensor, w: cute.Tensor, stream):
        """Launch: one CTA for a slot, value head and panel."""
        slots, heads = w.shape[0], w.shape[1]
        by_head = cute.fast_divmod_create_divisor_v2(heads)
        self.kernel(factors, scores, w, by_head).launch(
            grid=(slots * heads * self.keys, 1, 1), block=(128, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=False
        )

    @cute.kernel
    def kernel(self, mF: cute.Tensor, mM: cute.Tensor, mW: cute.Tensor, by_head: cute.FastDivmodDivisorV2):
        # The scan may be put on SMs as they become free; it waits for this grid's end before it reads.
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        panel = block % self.keys
        slot, hv = divmod(block // self.keys, by_head)
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
        if tid < 32:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * BYTES)
                kd = mF[slot, hv, 0, panel, None, None].iterator
                bulk_load(mM[slot, hv, 0, None, None].iterator.align(16), sM, PANEL, barrier, 1, Int32(0))
                bulk_load(kd.align(16), sX, PANEL, barrier, 1, Int32(0))
        cute.arch.mbarrier_wait(barrier, 0)
        warp = cute.arch.make_warp_uniform(tid // 32)
        self.multiply(sM.toint(), sX.toint(), sY.toint(), warp, tid % 32)
        # This warp's rows are 2 KB in one piece, here as in memory.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            part = const_expr(PANEL // 4)
            shape = cute.make_layout(part)
            dst = mW[slot, hv, panel, None, None].iterator + warp * part
            atom = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), self.dtype)
            cute.copy(
                atom, cute.make_tensor((sY + warp * part).align(16), shape), cute.make_tensor(dst.align(16), shape)
            )
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def multiply(self, sM, sX, sY, warp, lane):
        """Rows 16 warp .. of M' kd, rounded into a panel."""
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
        for j in cutlass.range_constexpr(4):
            words = [pack(self.dtype, acc[x, n], acc[x + 1, n]) for n in (2 * j, 2 * j + 1) for x in (0, 2)]
            store(sY + vector_offset(row, 2 * j + lane // 16), words)


def compile(config: ApplyConfig):
    """The launch function for `config`: `(factors, scores, w)`.

    factors [slots, HV, 3, K/64, 64, 64] and scores [slots, HV, 2, 64, 64] of `warp.kda_prepare`, w [slots, HV, K/64, 64, 64].
    """
    kernel = KdaApply(config)
    dt, keys = kernel.dtype, kernel.keys
    slots, heads = cute.sym_int(), cute.sym_int()

    def images(*shape):
        strides = (cute.sym_int64(divisibility=PANEL), cute.sym_int64(divisibility=PANEL), PANEL, 64, 1)
        if len(shape) == 6:
            strides = (*strides[:2], keys * PANEL, *strides[2:])
        return make_fake_tensor(dt, shape, stride=strides, assumed_align=16)

    return cute.compile(
        kernel,
        images(slots, heads, 3, keys, 64, 64),
        images(slots, heads, 2, 64, 64),
        images(slots, heads, keys, 64, 64),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
