"""8 x 8 matrices of 16-bit numbers between shared memory and fragments, four at a time.

Lane 8 m + r gives the address of row r of matrix m. With t = lane index, register m holds of matrix m as it lies in shared memory (row t
/ 4, columns 2 (t % 4) and the next), or transposed (column t / 4, rows 2 (t % 4) and the next): of memory [token][v] a fragment with
rows v and columns tokens.
"""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import Int32, Uint32

from .ptx import asm


def load_transposed(address):
    """Four words."""
    return asm("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", [Uint32] * 4, [Int32(address)])


def store_transposed(address, words):
    asm("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};", [], [Int32(address), *words])


def load(address):
    """Four words."""
    return asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", [Uint32] * 4, [Int32(address)])


def store(address, words):
    asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", [], [Int32(address), *words])
