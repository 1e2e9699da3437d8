"""Sums and minima over the lanes of a warp."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from .ptx import asm, select


def exchange(x, mask):
    """x of the lane whose number differs in the bits of `mask`."""
    return cute.arch.shuffle_sync_bfly(x, offset=mask)


def sum_lanes(x, masks=(16, 8, 4, 2, 1)):
    """The sum over the lanes that differ in these bits, the same bits in all of them."""
    for mask in masks:
        x = x + exchange(x, mask)
    return x


def least_lane(x):
    """The least of the lanes' numbers where none has a sign; else one that has."""
    text = "{\n.reg .b32 x;\nmov.b32 x, $1;\nredux.sync.min.s32 x, x, 0xffffffff;\nmov.b32 $0, x;\n}"
    return asm(text, [Float32], [x])


def reduce_scatter(values, masks, lane):
    """Sums of 2^n values over the 2^n lanes that differ in n `masks`, one sum a lane.

    A lane's sum is that of the value whose index has the lane's bits, the first mask the highest. 2^n - 1 shuffles.
    """
    for mask in masks:
        half = len(values) // 2
        upper = (lane // mask) & 1
        pairs = zip(values[:half], values[half:], strict=True)
        values = [select(upper, high, low) + exchange(select(upper, low, high), mask) for low, high in pairs]
    (total,) = values
    return total
