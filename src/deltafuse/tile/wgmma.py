"""Warpgroup products with A in registers."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def product(
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    rA: cute.Tensor,
    rB: cute.Tensor,
    first: cutlass.Constexpr[int],
    steps: cutlass.Constexpr[int],
    zero: cutlass.Constexpr[bool],
):
    """acc (+)= A B over the k-steps `first` .. `first + steps` of 16, issued and left in flight.

    The atom is made anew so that its accumulate flag is a constant of this product.
    """
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, not zero)
    for k in cutlass.range_constexpr(first, first + steps):
        cute.gemm(atom, acc, rA[None, None, k], rB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
