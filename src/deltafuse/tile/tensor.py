"""Tensor memory from a warp's side: 16 lanes at a time, in the fragments of 8 x 8 matrices.

With t = lane index, the accumulators' columns 8 i + 2 (t % 4) and the next one of row t / 4 are registers 4 i and 4 i + 1 of a load,
those of row t / 4 + 8 registers 4 i + 2 and 4 i + 3. Rounded to 16 bits and packed in pairs they are, in the same order, what a store of
an operand takes. A warp reaches the 32 lanes that begin at 32 (warp % 4): rows 0 to 15 of an address at lane l are lanes l to l + 15.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from .ptx import asm


def lanes(address, lane):
    """The address of a column at another lane."""
    return address + (lane << 16)


def load_fp32(address, columns):
    """16 rows of `columns` accumulators; they may be used after `wait_loads`."""
    n = columns // 2
    names = ", ".join(f"${i}" for i in range(n))
    return asm(
        f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32 {{{names}}}, [${n}];", [Float32] * n, [Int32(address)]
    )


def store_pairs(address, words):
    """16 rows of an operand: `words` hold two of 4 len(words) numbers a row each. Complete after `wait_stores`."""
    n = len(words)
    names = ", ".join(f"${i + 1}" for i in range(n))
    asm(f"tcgen05.st.sync.aligned.16x128b.x{n // 2}.b32 [$0], {{{names}}};", [], [Int32(address), *words])


def wait_loads():
    cute.arch.fence_view_async_tmem_load()


def wait_stores():
    cute.arch.fence_view_async_tmem_store()


def fence_before():
    """Orders this thread's accesses of tensor memory before a barrier that it arrives at next."""
    asm("tcgen05.fence::before_thread_sync;", [], [])


def fence_after():
    """Orders this thread's accesses of tensor memory after a barrier that it has waited for."""
    asm("tcgen05.fence::after_thread_sync;", [], [])
