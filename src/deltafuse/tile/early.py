"""Segments of a sequence that start early from a zero state instead of from the combined one.

`warp.kda_prepare` bounds what a chunk leaves of any state, as a base-2 logarithm. Where the bounds of the W chunks before a segment add up
to LIMIT or less, the state before them adds at most 2^LIMIT of its size to the one that enters the segment. fp32 rounds at 2^-24: what is
missed would show in no bit unless the state had been 2^72 times as large as what has entered it since. The segment then starts W chunks
early from zero, and nobody needs to know its own initial state.

A segment's code, which the kernel for segments' ends and maps writes down for those after it:

    W > 0   it starts W chunks early
    0       it starts from the state that the combination finds (segment 0: the sequence's initial state)
    -1      its sequence has one segment only: there is nothing to combine
    -2      nobody has decided yet: `warp.kda_prepare` writes it, before the pass that decides can start

A code depends on the chunks before its segment alone, so that no later token changes a bit of an earlier output. Segments behind the end
have the code of its last one. A segment's end is needed where the next one's code is 0 (the last one's where its own is); that of
a segment which starts early itself is the state that leaves it, else its transition is needed too. Gradients of states go the other way,
with the chunks behind a segment; there the last segment and those behind the end have code 0.

The forward's last pass asks for its unit's code until there is one: what starts early does not wait for the combination.
"""

# mypy: ignore-errors

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .ptx import load_acquire, select, store_global, store_release

LIMIT = -96.0
"""Of a sum of bounds: a segment starts early at this or less."""
UNDECIDED = -2
REACH = 16
"""Chunks by which a segment starts early at most."""


@cute.jit
def codes(
    mBound: cute.Tensor,
    head: Int32,
    base: Int32,
    chunks: Int32,
    segment: Int32,
    segment_chunks: Int32,
    back: cutlass.Constexpr[bool],
):
    """(code of a segment, code of the next), found by a whole warp; `base` and `chunks` are the sequence's first slot and chunks.

    Lanes 0 to 15 look at the chunks by which this segment could start early, the others at the next one's. `back`: states come from
    behind, as gradients do, and the next segment is the one before.
    """
    last = cutlass.max(chunks - 1, 0) // segment_chunks
    lane = cute.arch.lane_idx()
    w = lane % REACH
    if const_expr(back):
        at = (cutlass.max(segment - lane // REACH, 0) + 1) * segment_chunks + w
    else:
        at = cutlass.min(segment + lane // REACH, last) * segment_chunks - 1 - w
    total = Float32(float("inf"))
    if (at >= 0) & (at < chunks):
        total = mBound[base + at, head]
    for i in (1, 2, 4, 8):
        total = total + select(w >= i, cute.arch.shuffle_sync_up(total, offset=i), 0.0)
    enough = cute.arch.vote_ballot_sync(total <= Float32(LIMIT))
    return _code(enough & 0xFFFF, last), _code(enough >> REACH, last)


@cute.jit
def nothing_decided(mEarly: cute.Tensor):
    """Marks all units as undecided. One thread of every CTA calls; kernels after this one may start once all these have, if no other thread
    lets them."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    count = mEarly.shape[0] * mEarly.shape[1]
    if block < count:
        for i in cutlass.range(block, count, blocks, unroll=1):
            store_global(_code_at(mEarly) + Int64(i) * 4, 0, [Int32(UNDECIDED)])
        cute.arch.fence_acq_rel_gpu()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def decide(mEarly: cute.Tensor, unit: Int32, hv: Int32, code: Int32):
    """A unit's code, for passes that may be running; one thread calls."""
    store_release(_code_at(mEarly, unit, hv), code)


@cute.jit
def decided(mEarly: cute.Tensor, unit: Int32, hv: Int32):
    """A unit's code, once there is one. Then all is there that the kernels before the pass that decides have written."""
    code = load_acquire(_code_at(mEarly, unit, hv))
    while code == UNDECIDED:
        code = load_acquire(_code_at(mEarly, unit, hv))
    return code


def _code_at(mEarly, unit=0, hv=0):
    return mEarly.iterator.toint() + (Int64(unit) * mEarly.shape[1] + hv) * 4


@cute.jit
def early_start(
    mBound: cute.Tensor | None,
    mEarly: cute.Tensor | None,
    hv: Int32,
    unit: Int32,
    segment: Int32,
    segments: Int32,
    segment_chunks: Int32,
    base: Int32,
    total: Int32,
    chunks: Int32,
    how: cutlass.Constexpr[str],
    initial: cutlass.Constexpr[bool],
    transition: cutlass.Constexpr[bool],
    back: cutlass.Constexpr[bool],
):
    """A unit's `code`; `skip` chunks without output; `out`, where its last state goes, and `ends`: whether it is wanted there.

    `base` and `total` are the first slot and the chunks of its sequence, `chunks` its own. `how`: "decide" by the bounds, found by
    whole warps, "follow" what `mEarly` says, "await" it; `initial`: in the last pass, which reads initial states; `transition`: the last
    state is a map of states.
    """
    if const_expr(how == "decide"):
        code, following = codes(mBound, hv, base, total, segment, segment_chunks, back)
    else:
        step = const_expr(-1 if back else 1)
        neighbour = unit - segment + cutlass.min(cutlass.max(segment + step, 0), segments - 1)
        if const_expr(how == "follow"):
            code, following = mEarly[unit, hv], mEarly[neighbour, hv]
        else:
            code = decided(mEarly, unit, hv)
            following = Int32(0) if const_expr(initial) else decided(mEarly, neighbour, hv)
    out = unit
    if const_expr(initial):
        # A sequence's last state, from the one unit that ends with it.
        out = unit // segments
        last = Int32(0) if const_expr(back) else cutlass.max(total - 1, 0) // segment_chunks
        ends = Int32((code != 0) & (segment == last))
    elif const_expr(transition):
        ends = Int32((following == 0) & (code == 0))
    else:
        ends = Int32(following == 0)
    skip = cutlass.max(code, 0) * Int32(chunks > 0)
    if const_expr(not initial):
        skip = skip * ends
    return SimpleNamespace(code=code, skip=skip, out=out, ends=ends)


@cute.jit
def _code(enough: Int32, last: Int32) -> Int32:
    """The number of the first lane that has enough, from 1; 0 where none has."""
    code = Int32(0)
    if enough != 0:
        code = Int32(cute.arch.popc(enough ^ (enough - 1)))
    if last == 0:
        code = Int32(-1)
    return code
