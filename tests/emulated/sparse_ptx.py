"""Matrices of which half the elements are stored, and their metadata as the PTX ISA's figures lay it out, in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHUNK = {"tf32": 2, "f16": 4, "bf16": 4, "e4m3": 4, "e5m2": 4, "s8": 4, "u8": 4, "s4": 8, "u4": 8}
"""Elements of a chunk, half of them stored."""
SMALL = ("e4m3", "e5m2", "s8", "u8", "s4", "u4")


@dataclass
class Sparse:
    """A sparse matrix: what is stored (as bits), all of it (as bits), and four bits of metadata for every chunk."""

    stored: np.ndarray
    dense: np.ndarray
    nibbles: np.ndarray


def sparse(rng: np.random.Generator, stored: np.ndarray, chunk: int, *, ordered: bool = True) -> Sparse:
    """Random places for the stored elements of rows x k / 2."""
    rows, half = stored.shape
    dense = np.zeros((rows, 2 * half), stored.dtype)
    nibbles = np.zeros((rows, 2 * half // chunk), np.uint32)
    each = chunk // 4  # elements that an index stands for
    for r in range(rows):
        for c in range(2 * half // chunk):
            if chunk == 2:
                place = int(rng.integers(2))
                dense[r, 2 * c + place] = stored[r, c]
                nibbles[r, c] = (0b0100, 0b1110)[place]
                continue
            first, second = rng.choice(4, 2, replace=False)
            if ordered:
                first, second = min(first, second), max(first, second)
            nibbles[r, c] = first | second << 2
            for i in range(each):
                dense[r, chunk * c + each * first + i] = stored[r, chunk // 2 * c + i]
                dense[r, chunk * c + each * second + i] = stored[r, chunk // 2 * c + each + i]
    return Sparse(stored, dense, nibbles)


def metadata_registers(nibbles: np.ndarray, small: bool, selector: int, noise: int = 0xAAAAAAAA) -> np.ndarray:
    """[32] of a warp's metadata registers for 16 rows; threads that hold none have `noise`, which means nothing.

    Elements of 16 and 32 bits ("Sparse MMA .m16n8k16 metadata layout for .f16/.bf16 type" and its like): a thread of row g's four
    holds columns in its low half, those of row g + 8 in its high half. Smaller elements (".m16n8k64 metadata layout"): two threads
    hold rows g and g + 8, the next two the other half of the columns.
    """
    out = np.full(32, noise, np.uint32)
    chunks = nibbles.shape[1]
    holders = chunks // 4
    for g in range(8):
        for t in range(holders):
            lane = 4 * g + selector * holders + t
            word = 0
            if small:
                row, first = g + 8 * (t % 2), 8 * (t // 2)
                for c in range(8):
                    word |= int(nibbles[row, first + c]) << 4 * c
            else:
                for c in range(4):
                    word |= int(nibbles[g, 4 * t + c]) << 4 * c | int(nibbles[g + 8, 4 * t + c]) << 16 + 4 * c
            out[lane] = word
    return out
