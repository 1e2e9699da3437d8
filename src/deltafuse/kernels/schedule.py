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
    """Measured on an H200 on 2026-11-30, in SM cycles at 1.755 GHz: a chunk of the scan by columns of V a CTA, a launch, a combined
    segment; and the bytes that the card's memory moves in a cycle."""

    chunk_64: float = 1_570.0
    chunk_128: float = 2_600.0
    states_only: float = 0.8  # share of a chunk's cycles where no output is wanted
    combine: float = 8_800.0
    start: float = 8_000.0
    bytes_a_cycle: float = 2_400.0
    hidden: float = 0.05  # what counts of the shorter of two times that overlap


COSTS = Costs()
MAX_SEGMENTS = 64
MIN_SEGMENT = 4
"""Chunks that a segment has at least."""


def _overlap(a: float, b: float, costs: Costs) -> float:
    return max(a, b) + costs.hidden * min(a, b)


def _scan(
    units: int, columns: int, tile: int, chunks: int, row_bytes: int, sms: int, costs: Costs, share: float = 1.0
) -> float:
    """Cycles of one pass over `chunks` chunks of every unit: the serial chain or the bytes, whichever takes longer."""
    cycles = (costs.chunk_64 if tile == 64 else costs.chunk_128) * share
    waves = -(-units * (columns // tile) // sms)
    moved = units * chunks * CHUNK * row_bytes / costs.bytes_a_cycle
    return _overlap(waves * chunks * cycles, moved, costs) + costs.start


def _cost(
    heads: int, chunks: int, key_dim: int, value_dim: int, tile: int, segments: int, sms: int, costs: Costs
) -> float:
    """Cycles of a whole scan; `heads` counts sequences times value heads."""
    row = 2 * (3 * key_dim + 2 * CHUNK + 2 * value_dim)  # kd, qg, kg, M', Aqk, v and o
    if segments == 1:
        return _scan(heads, value_dim, tile, chunks, row, sms, costs)
    length, units = -(-chunks // segments), heads * segments
    first = 2 * (2 * (2 * key_dim + CHUNK) + value_dim)  # kd, kg, M', twice; v
    both = _scan(units, value_dim + key_dim, 64, length, first, sms, costs, costs.states_only)
    return both + segments * costs.combine + costs.start + _scan(units, value_dim, tile, length, row, sms, costs)


def schedule(
    sequences: int,
    tokens: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    sms: int,
    *,
    packed: bool = False,
    wide: bool = False,
    costs: Costs = COSTS,
) -> Schedule:
    """The cheapest schedule for `sequences` sequences of `tokens` tokens each, or of `tokens` together where they are packed.

    The lengths of packed sequences are known to the device alone. Segments are therefore long enough for one sequence that has all tokens,
    and what they cost is reckoned for that case; where sequences and heads fill the GPU none is cut.

    `wide`: whether a CTA may take 128 columns. By default none does: two of 64 columns, which share their operands, are about as fast where
    the GPU is full (within 2 % either way on an H200) and faster where it is not.
    """
    chunks = max(1, -(-tokens // CHUNK))
    cut = sequences * value_heads * (value_dim // 64) < sms and chunks >= 2 * MIN_SEGMENT
    heads = max(1, value_heads * (1 if packed and cut else sequences))
    mean = max(1, chunks // max(1, sequences)) if packed and not cut else chunks
    candidates = [1, *range(2, min(MAX_SEGMENTS, chunks // MIN_SEGMENT) + 1)] if cut else [1]
    tiles = (64, 128) if value_dim % 128 == 0 and wide else (64,)
    options = ((s, tile) for s in candidates for tile in tiles)
    segments, tile = min(options, key=lambda x: _cost(heads, mean, key_dim, value_dim, x[1], x[0], sms, costs))
    length = -(-chunks // segments)
    # Two neighbouring tiles of a head read the same operands: one fetch serves both.
    cluster = 2 if value_dim % (2 * tile) == 0 else 1
    return Schedule(tile, cluster, -(-chunks // length), length)
