"""The panel: a [64 rows][64 columns] tile of 16-bit numbers as the 128-byte-swizzled shared-memory image that wgmma and TMA know.

    element (row i, column c)  at  i * 64 + (((c // 8) ^ (i & 7)) * 8 + c % 8)

It is laid out the same in global memory, so that it travels by plain bulk copies. Offsets here are in bytes.

A lower triangular panel can be strips instead: four of 16 columns, each a 32-byte-swizzled image of its 64 rows. Strip s has zeros in rows
before 16 s, which only shared memory holds: in global memory the rows from there on of all strips follow each other, at the start of the
panel's place.

    element (row i, column c of strip s)  at  s * 1024 + i * 16 + ((c // 8) ^ (i // 4 & 1)) * 8 + c % 8        in shared memory

Where a head forgets, kd and qg decay to zeros within a chunk. Of a chunk whose scores are strips, the rows of kd and qg from 16 n on are
not in global memory: they are zeros. n (1 to 4) is a word behind the strips of M', in their panel's place (`LIVE`).
"""

# mypy: ignore-errors

from __future__ import annotations

ROW = 128
BYTES = 64 * ROW
ELEMENTS = 64 * 64
STRIP_ROW = 32
STRIP = 64 * STRIP_ROW
STRIPS_BYTES = 4 * STRIP - (16 + 32 + 48) * STRIP_ROW
"""Of a panel's strips in global memory."""
LIVE = STRIPS_BYTES
"""Where a chunk's scores have the number of live blocks of rows."""
BLOCK_BYTES = 16 * ROW
"""Of a block of 16 rows of a panel."""


def vector_offset(row, vector):
    """Of the 16 bytes that hold columns 8 * vector ... 8 * vector + 7 of a row."""
    return row * ROW + ((vector ^ (row & 7)) * 16)


def strip_vector_offset(row, vector):
    """Of the 16 bytes that hold columns 8 * vector ... 8 * vector + 7 (vector 0 or 1) of a row of a strip in shared memory."""
    return row * STRIP_ROW + ((vector ^ (row >> 2 & 1)) * 16)


def packed_strip(s):
    """Where row 0 of strip s would be in global memory: its first row there is 16 s."""
    return s * STRIP - s * (s + 1) // 2 * (16 * STRIP_ROW)


ZEROS = (BYTES - STRIPS_BYTES) // 16
"""Vectors of 16 bytes of a panel's strips in shared memory that global memory does not hold."""


def zeros_vector(i):
    """Which vector of the strips the i-th of them is: 32 at the start of strip 1, 64 of strip 2, 96 of strip 3."""
    return i + 128 + (i + 224) // 256 * 96 + (i + 160) // 256 * 64
