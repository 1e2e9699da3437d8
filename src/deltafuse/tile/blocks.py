"""16x16 blocks of a panel in shared memory as operands of `mma_16bit`, and their transposes.

A panel is [64 rows][64 columns] in the layout of `panel`, at an address that is a multiple of 128. From a lane's address of a
block in block column 0, that in column j is `address ^ (32 * j)`, and that of the next block row `address + ROWS`.
"""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import Int32, Uint32

from .matrices import load_transposed
from .panel import ROW, vector_offset
from .ptx import asm

ROWS = 16 * ROW


def block_address(panel, lane):
    """For `load_block`, and for `load_transposed` of a block as two B operands of 8 columns each, in a list of four words."""
    return panel + vector_offset(lane & 15, lane >> 4)


def transposed_address(panel, lane):
    """For `load_transposed`: the transpose of a block as an A operand."""
    return panel + vector_offset((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1)


def load_block(address):
    """A block as an A operand."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    return asm(text, [Uint32] * 4, [Int32(address)])


def transpose(word):
    """The transpose of an 8x8 matrix over the warp, of which lane 4 r + t has (r, 2t), (r, 2t + 1): rows to half a B operand."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", [Uint32], [word])


def _halves(a, b, which):
    """The low (0) or high (1) halves of two words in one."""
    return asm(f"prmt.b32 $0, $1, $2, {(0x5410, 0x7632)[which]:#x};", [Uint32], [a, b], volatile=False)


def transpose_words(words):
    """The same of 32-bit numbers, (r, 2t), (r, 2t + 1) to (2t, r), (2t + 1, r): a B operand of tf32 but for the order of rows."""
    low, high = (transpose(_halves(*words, i)) for i in range(2))
    return [_halves(low, high, i) for i in range(2)]


__all__ = [
    "ROWS",
    "block_address",
    "load_block",
    "load_transposed",
    "transpose",
    "transpose_words",
    "transposed_address",
]
