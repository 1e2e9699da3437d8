"""Global memory that will be needed: to shared memory behind the thread's back, or to L2 only."""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import Int32, Int64

from .ptx import asm


def copy_async(shared, address, offset):
    """16 bytes to shared memory, `offset` (a constant) behind both addresses; there once the thread has called `wait_copies`."""
    text = f"cp.async.cg.shared.global [$0+{offset}], [$1+{offset}], 16;"
    asm(text, [], [Int32(shared), Int64(address)])


def wait_copies():
    """All of this thread's copies are done."""
    asm("cp.async.wait_all;", [], [])


def prefetch(address):
    """The line of 128 bytes to L2."""
    asm("prefetch.global.L2 [$0];", [], [Int64(address)])
