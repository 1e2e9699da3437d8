"""How the serial scan is spread over a GPU: tile of V, clusters, segments of the sequence. A cost model in SM cycles, pure arithmetic.

A CTA takes one sequence, value head and tile of V, chunk after chunk. Few sequences and heads leave most SMs idle, so a long sequence is
cut into segments: one launch gives every segment's final state from zero and its K x K transition, a short serial
combination gives every segment's initial state, and the scan then runs all segments at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tile.panel import STRIPS_BYTES
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
    """Measured on an H200 on 2026-11-30, in SM cycles at 1.755 GHz: a chunk of the scan, a combined segment, a launch; and the bytes that
    the card's memory moves in a cycle."""

    chunk: float = 1_570.0
    states_only: float = 0.8  # share of a chunk's cycles where no output is wanted
    combine: float = 8_800.0
    start: float = 8_000.0
    bytes_a_cycle: float = 2_400.0
    hidden: float = 0.05  # what counts of the shorter of two times that overlap


COSTS = Costs()
STRIPS = STRIPS_BYTES // (2 * CHUNK)
"""Numbers of M' or Aqk a token, zeros above the blocks on the diagonal left out."""
TILE = 64
"""Columns of V a CTA. The scan can do 128: two of 64, which share their operands, are about as fast where the GPU is full (within 2 %
either way on an H200) and faster where it is not."""
MAX_SEGMENTS = 64
MIN_SEGMENT = 4
"""Chunks that a segment has at least."""


def _overlap(a: float, b: float, costs: Costs) -> float:
    return max(a, b) + costs.hidden * min(a, b)


def _scan(units: int, columns: int, chunks: int, row_bytes: int, sms: int, costs: Costs, share: float = 1.0) -> float:
    """Cycles of one pass over `chunks` chunks of every unit: the serial chain or the bytes, whichever takes longer."""
    waves = -(-units * (columns // TILE) // sms)
    moved = units * chunks * CHUNK * row_bytes / costs.bytes_a_cycle
    return _overlap(waves * chunks * (costs.chunk * share), moved, costs) + costs.start


def _cost(heads: int, chunks: int, key_dim: int, value_dim: int, segments: int, sms: int, costs: Costs) -> float:
    """Cycles of a whole scan; `heads` counts sequences times value heads."""
    row = 2 * (3 * key_dim + 2 * STRIPS + 2 * value_dim)  # kd, qg, kg, M', Aqk, v and o
    if segments == 1:
        return _scan(heads, value_dim, chunks, row, sms, costs)
    length, units = -(-chunks // segments), heads * segments
    first = 2 * (2 * (2 * key_dim + STRIPS) + value_dim)  # kd, kg, M', twice; v
    both = _scan(units, value_dim + key_dim, length, first, sms, costs, costs.states_only)
    return both + segments * costs.combine + costs.start + _scan(units, value_dim, length, row, sms, costs)


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
    cut = sequences * value_heads * (value_dim // TILE) < sms and chunks >= 2 * MIN_SEGMENT
    heads = max(1, value_heads * (1 if packed and cut else sequences))
    mean = max(1, chunks // max(1, sequences)) if packed and not cut else chunks
    candidates = [1, *range(2, min(MAX_SEGMENTS, chunks // MIN_SEGMENT) + 1)] if cut else [1]
    segments = min(candidates, key=lambda s: _cost(heads, mean, key_dim, value_dim, s, sms, costs))
    length = -(-chunks // segments)
    # Two neighbouring tiles of a head read the same operands: one fetch serves both.
    cluster = 2 if value_dim % (2 * TILE) == 0 else 1
    return Schedule(TILE, cluster, -(-chunks // length), length)
