"""The transposed state S^T [V, K] in accumulators and the caller's tensors [.., K, V] or [.., V, K]."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32


def transposed(mS, unit, head, v_first):
    """One state as [V, K]."""
    s = mS[unit, head, None, None]
    return s if v_first else cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0]))


def part_of(thr_mma, s, v_tile, key_dim):
    """This thread's elements of rows 64 v_tile .. + 63, in accumulator order."""
    return thr_mma.partition_C(cute.local_tile(s, (64, key_dim), (v_tile, 0)))


@cute.jit
def set_identity(thr_mma: cute.ThrMma, acc: cute.Tensor, v_tile: cutlass.Int32, key_dim: cutlass.Constexpr[int]):
    """Ones where row 64 v_tile + i is column i."""
    at = thr_mma.partition_C(cute.make_identity_tensor((64, key_dim)))
    for p in cutlass.range_constexpr(cute.size(acc) // 32):
        for i in cutlass.range_constexpr(32 * p, 32 * p + 32):
            row, column = at[i]
            one = Float32(0.0)
            if row + 64 * v_tile == column:
                one = Float32(1.0)
            acc[i] = one
