"""Sequences in a flat stream of tokens: [B, T] row after row, or packed sequences with bounds cu_seqlens [N + 1].

A thread that walks down the stream keeps (n, end, after): its sequence, the sequence's end, the next one's end. Before the first token
of a sequence it is in the one before, at whose end it enters the next: so the first token of every sequence is met in one place.
Bounds None: sequences of T tokens each, whose ends need no look ahead. Bounds that make no sense lead to no sequence (-1) or to a
wrong one, never out of the tensors.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

STEPS = 4
"""Sequences that a walk tries one by one before it searches: empty ones in a row are few or very many."""


@cute.jit
def bound(mBounds: cute.Tensor, i: Int32) -> Int32:
    """Bound i, or the last one."""
    return Int32(mBounds[cutlass.min(i, Int32(mBounds.shape[0]) - 1)])


@cute.jit
def bounds_up_to(mBounds: cute.Tensor, token: Int32) -> Int32:
    """How many bounds are at most `token`."""
    low, high = Int32(0), Int32(mBounds.shape[0])
    while low < high:
        middle = (low + high) // 2
        if Int32(mBounds[middle]) <= token:
            low = middle + 1
        else:
            high = middle
    return low


@cute.jit
def before(mBounds: cute.Tensor | None, tokens: Int32, first: Int32):
    """(n, end, after) of the walk just before token `first`; n is -1 before the first sequence."""
    n, end, after = Int32(0), Int32(0), Int32(0)
    if const_expr(mBounds is None):
        n = (first + tokens - 1) // tokens - 1
        end = (n + 1) * tokens
    else:
        n = bounds_up_to(mBounds, first - 1) - 1
        end = bound(mBounds, n + 1)
        after = bound(mBounds, n + 2)
    return n, end, after


@cute.jit
def enter(mBounds: cute.Tensor | None, tokens: Int32, token: Int32, n: Int32, end: Int32, after: Int32):
    """(n, end, after) of the sequence that begins at `token`, the end of sequence n."""
    if const_expr(mBounds is None):
        # Once: as a loop it stays a branch, which whoever calls this for every token almost never takes.
        while token >= end:
            n += 1
            end += tokens
    else:
        for _ in cutlass.range_constexpr(STEPS):
            if token >= end:
                n += 1
                end = after
                after = bound(mBounds, n + 2)
        if token >= end:
            n = cutlass.min(bounds_up_to(mBounds, token), Int32(mBounds.shape[0]) - 1) - 1
            end = bound(mBounds, n + 1)
            after = bound(mBounds, n + 2)
    return n, end, after


@cute.jit
def sequence(mBounds: cute.Tensor | None, tokens: Int32, n: Int32):
    """(first token, end) of sequence n, within the stream's tokens."""
    first, end = n * tokens, (n + 1) * tokens
    if const_expr(mBounds is not None):
        first = cutlass.max(Int32(mBounds[n]), 0)
        end = cutlass.min(Int32(mBounds[n + 1]), tokens)
    return first, end
