"""Copies into shared memory: contiguous pieces of global memory without a tensor map, and what has to come before one may overwrite."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int16, const_expr
from cutlass.cute.nvgpu import cpasync


def reads_done():
    """This warp has read what it has asked shared memory for; then a thread of it may say so to a copy that overwrites it.

    An arrival at an mbarrier does not wait for loads: it overtakes those that queue behind others, such as a first state's from global
    memory, and the copy that it lets go can be faster than they are. A load whose value has been used needs none of this.
    """
    cute.arch.fence_proxy("async.shared", space="cta")
    # One thread arrives for all, whose reads its own arrival alone does not order.
    cute.arch.sync_warp()


@cute.jit
def bulk_load(
    src: cute.Pointer,
    dst: cute.Pointer,
    elements: cutlass.Constexpr[int],
    barrier: cute.Pointer,
    cluster: cutlass.Constexpr[int],
    rank: cutlass.Int32,
):
    """`elements` from `src` to `dst` of every CTA of the cluster, of which this one fetches its share; one thread calls.

    The barrier at the same place of every CTA receives all bytes, whoever fetched them.
    """
    part = const_expr(elements // cluster)
    if const_expr(cluster == 1):
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), src.dtype)
        shape = cute.make_layout(elements)
        cute.copy(atom, cute.make_tensor(src, shape), cute.make_tensor(dst, shape), mbar_ptr=barrier)
    else:
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SMulticastOp(), src.dtype)
        shape = cute.make_layout(part)
        cute.copy(
            atom,
            cute.make_tensor((src + rank * part).align(16), shape),
            cute.make_tensor((dst + rank * part).align(16), shape),
            mbar_ptr=barrier,
            mcast_mask=Int16((1 << cluster) - 1),
        )
