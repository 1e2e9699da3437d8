"""How much shared memory a CTA has."""

from __future__ import annotations


def room(blocks: int = 1) -> int:
    """Bytes of each of `blocks` CTAs that share an SM of Hopper or datacentre Blackwell: of its 228 KiB, less 1 KiB a CTA."""
    return 228 * 1024 // blocks - 1024
