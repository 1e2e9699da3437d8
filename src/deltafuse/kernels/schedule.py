"""How the serial scan is spread over a GPU: tile of V, clusters, segments of the sequence. A cost model in SM cycles, pure arithmetic.

A CTA takes one sequence, value head and tile of V, chunk after chunk. Few sequences and heads leave most SMs idle, so a long sequence is
cut into segments: a first pass gives every segment's final state from zero and its K x K transition, a short serial
combination gives every segment's initial state, and the scan then runs all segments at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import CHUNK


@dataclass(frozen=True)
class Schedule:
    """`tile` columns of V a CTA, `cluster` CTAs sharing operands, `segments` a sequence of `segment_chunks` chunks each."""

    tile: int
    cluster: int
    segments: int
    segment_chunks: int


@dataclass(frozen=True)
class Costs:
    """Cycles a chunk of the scan, by columns of V a CTA, and what a launch and a combined segment cost; measured on an H200."""

    chunk_64: float = 1_500.0
    chunk_128: float = 2_200.0
    states_only: float = 0.8  # share of a chunk's cycles where no output is wanted
    combine: float = 2_500.0  # a segment of the serial combination
    start: float = 8_000.0  # a launch, and a CTA's first operands and last state


COSTS = Costs()
MAX_SEGMENTS = 64
MIN_SEGMENT = 4
"""Chunks that a segment has at least."""


def _waves(ctas: int, sms: int) -> int:
    return -(-ctas // sms)


def _scan(units: int, value_dim: int, tile: int, chunks: int, sms: int, costs: Costs) -> float:
    cycles = costs.chunk_64 if tile == 64 else costs.chunk_128
    return _waves(units * (value_dim // tile), sms) * chunks * cycles + costs.start


def _cost(
    heads: int, chunks: int, key_dim: int, value_dim: int, tile: int, segments: int, sms: int, costs: Costs
) -> float:
    """Cycles of a whole scan; `heads` counts sequences times value heads."""
    if segments == 1:
        return _scan(heads, value_dim, tile, chunks, sms, costs)
    length = -(-chunks // segments)
    units = heads * segments
    first = _scan(units, value_dim + key_dim, 64, length, sms, costs) * costs.states_only
    return first + segments * costs.combine + costs.start + _scan(units, value_dim, tile, length, sms, costs)


def schedule(
    sequences: int,
    tokens: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    sms: int,
    *,
    packed: bool = False,
    costs: Costs = COSTS,
) -> Schedule:
    """The cheapest schedule for `sequences` sequences of `tokens` tokens each, or of `tokens` together where they are packed.

    The lengths of packed sequences are known to the device alone. Segments are therefore long enough for one sequence that has all tokens,
    and what they cost is reckoned for that case; where sequences and heads fill the GPU none is cut.
    """
    chunks = max(1, -(-tokens // CHUNK))
    cut = sequences * value_heads * (value_dim // 64) < sms and chunks >= 2 * MIN_SEGMENT
    heads = max(1, value_heads * (1 if packed and cut else sequences))
    mean = max(1, chunks // max(1, sequences)) if packed and not cut else chunks
    candidates = [1, *range(2, min(MAX_SEGMENTS, chunks // MIN_SEGMENT) + 1)] if cut else [1]
    tiles = (64, 128) if value_dim % 128 == 0 else (64,)
    options = ((s, tile) for s in candidates for tile in tiles)
    segments, tile = min(options, key=lambda x: _cost(heads, mean, key_dim, value_dim, x[1], x[0], sms, costs))
    length = -(-chunks // segments)
    # Two neighbouring tiles of a head read the same operands: one fetch serves both.
    cluster = 2 if tile == 64 and value_dim % 128 == 0 else 1
    return Schedule(tile, cluster, -(-chunks // length), length)
