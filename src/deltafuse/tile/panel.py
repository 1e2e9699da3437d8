"""The panel: a [64 rows][64 columns] tile of 16-bit numbers as the 128-byte-swizzled shared-memory image that wgmma and TMA know.

    element (row i, column c)  at  i * 64 + (((c // 8) ^ (i & 7)) * 8 + c % 8)

It is laid out the same in global memory, so that it travels by plain bulk copies. Offsets here are in bytes.
"""

# mypy: ignore-errors

from __future__ import annotations

ROW = 128
BYTES = 64 * ROW


def vector_offset(row, vector):
    """Of the 16 bytes that hold columns 8 * vector ... 8 * vector + 7 of a row."""
    return row * ROW + ((vector ^ (row & 7)) * 16)
