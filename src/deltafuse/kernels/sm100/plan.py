"""What the Blackwell scan keeps where: columns of tensor memory and bytes of shared memory. Arithmetic on a config, nothing of the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from ...tile.shared import room
from ..config import CHUNK, BlackwellScanConfig

TENSOR_COLUMNS = 512
SHARED_BYTES = room()
PANEL_BYTES = 64 * 64 * 2
STATE_STAGES = 2
"""Chunks whose state is held as an operand."""
READOUT_COLUMNS = 128
"""Of o's accumulators: two stages, or one of each addend where the scale is still to be applied to the first."""


@dataclass(frozen=True)
class Plan:
    """Where things lie. Columns are 32 bits wide: a 64-column block of a 16-bit operand takes 32 of them.

    Of tokens, P takes the first columns of the accumulators of the state's update: it is read before they are written, and they are read
    before the next chunk's P is written. Of slots, the next chunk's P is begun while the update is still being read, in columns of its own.
    """

    state: int  # S^T rounded, the operand of P and of o: STATE_STAGES of key_dim / 2 columns
    new_values: int  # v'^T rounded, the operand of the state's update and of o: CHUNK / 2
    p: int  # accumulators of P: CHUNK
    update: int  # accumulators of the state's update: key_dim
    readout: int  # accumulators of o: READOUT_COLUMNS
    columns: int  # used
    allocated: int  # a power of two
    readout_stages: int
    operand_panels: int  # w, qg, kg, Aqk of a chunk; of slots M' too
    value_panels: int  # u or v of a chunk
    stages: int  # of operands
    value_stages: int  # of u or v
    decay_stages: int
    clean_stages: int  # of what may have to be cleaned: operands of tokens, v of slots
    barriers: int
    shared_bytes: int

    def __str__(self) -> str:
        own = self.p < self.update
        rows = [
            ("S^T, io type, 2 stages", self.state, self.new_values),
            ("v'^T, io type", self.new_values, self.p),
            *([("P, fp32", self.p, self.update)] if own else []),
            (f"update of S^T, fp32{'' if own else ' (first 64: P)'}", self.update, self.readout),
            (f"o^T, fp32, {self.readout_stages} stage{'s' * (self.readout_stages > 1)}", self.readout, self.columns),
        ]
        lines = [f"{name:36} columns {first:3} to {last - 1:3}" for name, first, last in rows]
        return "\n".join([*lines, f"{self.columns} of {TENSOR_COLUMNS} columns used, {self.allocated} allocated"])


def plan(config: BlackwellScanConfig, stages: int | None = None, value_stages: int | None = None) -> Plan:
    """The plan for a config; as many stages of operands as fit, at most three, then of values, at most two, unless told otherwise.

    One stage of v is enough: it is free again when a chunk's products begin and wanted when they end. u is in use for longer.
    """
    slots = config.operands == "slots"
    state = 0
    new_values = state + STATE_STAGES * config.key_dim // 2
    p = new_values + CHUNK // 2
    update = p + (CHUNK if slots else 0)
    readout = update + config.key_dim
    columns = readout + READOUT_COLUMNS
    allocated = 1 << (columns - 1).bit_length()
    readout_stages = 2 if slots else 1
    blocks, groups = config.key_dim // 64, config.tile // 64
    operand_panels = 3 * blocks + (2 if slots else 1)
    operands, values, decay = operand_panels * PANEL_BYTES, groups * PANEL_BYTES, 4 * config.key_dim
    # Slots' decay factors come with neither: operands are free before they are. Of tokens they come with u.
    if slots:
        operands += decay
    else:
        values += decay
    least = 1 if slots else 2
    # o on its way out, barriers and what alignment takes.
    free = SHARED_BYTES - groups * PANEL_BYTES - 1024
    if stages is None:
        stages = min(3, (free - (value_stages or least) * values) // operands)
    if value_stages is None:
        value_stages = max(least, min(2, (free - stages * operands) // values))
    shared = SHARED_BYTES - free + stages * operands + value_stages * values
    if columns > TENSOR_COLUMNS or shared > SHARED_BYTES or stages < 2 or value_stages < least:
        raise ValueError(
            f"{config}: {columns} columns, {stages} and {value_stages} stages, {shared} bytes of shared memory do not fit"
        )
    decay_stages, clean_stages = (stages, value_stages) if slots else (value_stages, stages)
    barriers = (
        2 * (stages + decay_stages + blocks + 1 + readout_stages) + clean_stages + (2 * value_stages if slots else 0)
    )
    return Plan(
        state, new_values, p, update, readout, columns, allocated, readout_stages, operand_panels, groups, stages, value_stages,
        decay_stages, clean_stages, barriers, shared,
    )  # fmt: skip


CHUNK_CYCLES = {64: 1_312.0, 128: 1_568.0}
"""Cycles a chunk takes by columns of V a CTA, K = 128, as the model on paper has them (docs/blackwell.md)."""


def choose(units: int, value_dim: int, sms: int) -> tuple[int, int]:
    """(tile, cluster) for `units` sequences times value heads: the tile whose CTAs are done first.

    CTAs of one head share all operands but v or u; wherever there are two, they fetch a half each.
    """
    tiles = [t for t in (128, 64) if value_dim % t == 0]
    tile = min(tiles, key=lambda t: -(-units * (value_dim // t) // sms) * CHUNK_CYCLES[t])
    return tile, 2 if value_dim // tile % 2 == 0 else 1
