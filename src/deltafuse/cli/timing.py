"""Milliseconds of a call: CUDA events on a GPU, the clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20
"""More than any cache of a GPU holds: written between two calls, so that each reads its arguments from memory."""


def times(call: Callable[[], object], device: torch.device, reps: int, warmup: int = 1) -> list[float]:
    """The time of each of `reps` calls in ms, after `warmup` calls that are not counted."""
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return [_clocked(call) for _ in range(reps)]
    with torch.cuda.device(device):
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        pairs = []
        for _ in range(reps):
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(device)
    return [float(start.elapsed_time(end)) for start, end in pairs]


def _clocked(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
