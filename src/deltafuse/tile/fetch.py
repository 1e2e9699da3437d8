"""Global memory that will be needed: to shared memory behind the thread's back, or to L2 only."""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import Int32, Int64

from .ptx import asm


def copy_async(shared, address, offset, policy=None):
    """16 bytes to shared memory, `offset` (a constant) behind both addresses; there once the thread has called `wait_copies`.

    policy: what L2 does with the line (`uncached.first_out`).
    """
    hint, last = ("", "") if policy is None else (".L2::cache_hint", ", $2")
    text = f"cp.async.cg.shared.global{hint} [$0+{offset}], [$1+{offset}], 16{last};"
    asm(text, [], [Int32(shared), Int64(address), *([] if policy is None else [policy])])


def wait_copies():
    """All of this thread's copies are done."""
    asm("cp.async.wait_all;", [], [])


def copy_bulk(shared, address, size, barrier):
    """`size` bytes (a multiple of 16, as both addresses are) to shared memory by one thread; they count at the mbarrier."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    asm(text, [], [Int32(shared), Int64(address), Int32(size), Int32(barrier)])


def prefetch_bulk(address, size):
    """`size` bytes (a multiple of 16, as the address is) to L2 by one thread."""
    asm("cp.async.bulk.prefetch.L2.global [$0], $1;", [], [Int64(address), Int32(size)])
