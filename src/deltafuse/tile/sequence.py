"""Slots of chunks: where a chunk's operands lie in the workspace, and which tokens they are.

Dense [B, T]: slot = b * ceil(T / 64) + c. Packed sequences (bounds cu_seqlens [N + 1], one batch): chunk c of sequence n, which starts at
token bos, has slot bos // 64 + n + c; there are T // 64 + N slots, a number that needs no look at the bounds, and some are nobody's.

Bounds are the caller's, who may have changed them since they were looked at. Whatever they say, slots and tokens that are made of them here
are within the T tokens and their slots.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

CHUNK = 64


@cute.jit
def tokens_of(mCu: cute.Tensor, n: Int32, tokens: Int32):
    """(first token, end) of packed sequence n, within the `tokens` that there are."""
    first = cutlass.min(cutlass.max(Int32(mCu[n]), 0), tokens)
    return first, cutlass.max(cutlass.min(Int32(mCu[n + 1]), tokens), first)


@cute.jit
def base_slot(mCu: cute.Tensor, n: Int32) -> Int32:
    """The slot of the first chunk of packed sequence n (also n = N: one past the last slot)."""
    return Int32(mCu[n]) // CHUNK + n


@cute.jit
def chunk_of_slot(mCu: cute.Tensor, slot: Int32, tokens: Int32):
    """(first token, number of tokens) of a slot of packed sequences; no tokens where the slot is nobody's. To be called by whole warps.

    `tokens`: how many there are. A search of base slots, which grow strictly with n, 32 at a time.
    """
    lane = cute.arch.lane_idx()
    n = Int32(0)
    left = Int32(mCu.shape[0]) - 1
    while left > 1:
        step = (left + 31) // 32
        mine = n + lane * step
        below = Int32(0)
        if lane * step < left:
            below = Int32(base_slot(mCu, mine) <= slot)
        found = cutlass.max(cute.arch.popc(cute.arch.vote_ballot_sync(below != 0)) - 1, 0)
        n += found * step
        left = cutlass.min(step, left - found * step)
    first = cutlass.max(Int32(mCu[n]) + (slot - base_slot(mCu, n)) * CHUNK, 0)
    rows = cutlass.min(tokens - first, CHUNK)
    return first, cutlass.min(Int32(mCu[n + 1]) - first, rows)
