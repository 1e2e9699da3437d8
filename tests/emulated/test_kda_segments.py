"""Ends and maps of segments in one launch: bit for bit what two launches of the scan give, under many schedules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import kernels
import pytest
import torch
from test_kda_scan import SCHEDULES, Operands, Problem, config
from test_kda_scan import kernel as scan

import ptxemu
from deltafuse.kernels.config import SegmentsConfig

NAN = float("nan")
UNWRITTEN = -9
BOUNDS = (-192.0, -49.0, -33.0, -1.0, float("inf"))
"""Of a chunk. A segment starts early at a sum of -96 (`tile.early.LIMIT`), which takes one chunk, two, three, more than there are; infinity
keeps every sum from it."""


@cache
def kernel(config: SegmentsConfig) -> Any:
    def compiled() -> Any:
        from deltafuse.kernels.sm90 import kda_segments

        return kda_segments.compile(config)

    return kernels.need("sm_90a", compiled)


PLAIN = SegmentsConfig()


@dataclass(frozen=True)
class Case:
    """`bounds` of chunks, an index into BOUNDS for every head, or None: any."""

    lengths: tuple[int, ...]
    segments: int
    segment_chunks: int
    value_dim: int = 64
    config: SegmentsConfig = PLAIN
    bounds: tuple[int | None, ...] = (1, 3, None)
    seed: int = 0


class Run:
    """A case's tensors, and what the kernels make of them; what they leave unwritten is NaN, codes are UNWRITTEN."""

    def __init__(self, case: Case) -> None:
        self.case, self.heads = case, len(case.bounds)
        c = case.config
        packed = c.cu_seqlens != ""
        common = dict(dtype=c.dtype, key_dim=c.key_dim, cu_seqlens=c.cu_seqlens, strips=c.strips, panels=c.panels)
        self.scan = config(**common, state_v_first=True, readout=False)
        problem = Problem(case.lengths, self.heads, case.value_dim, packed, self.scan, case.seed)
        x, source = Operands(problem), torch.Generator().manual_seed(case.seed + 7)
        scores = x.scores
        if c.panels == 3:
            scores = torch.cat([scores, torch.full_like(scores[:, :, :1], NAN)], 2)
        batch, tokens = (1, sum(case.lengths)) if packed else (len(case.lengths), case.lengths[0])
        v = torch.randn(batch, tokens, self.heads, case.value_dim, generator=source).to(problem.dtype)
        cu = None
        if packed:
            cu = torch.tensor((0, *case.lengths)).cumsum(0).to(getattr(torch, c.cu_seqlens))
        self.operands, self.v, self.cu = (x.factors, scores, x.decay), v, cu
        chosen = torch.randint(len(BOUNDS), (problem.slots, self.heads), generator=source)
        for head, kind in enumerate(case.bounds):
            if kind is not None:
                chosen[:, head] = kind
        self.bound = torch.tensor(BOUNDS)[chosen]
        self.bound[x.decay.isnan().any(2)] = NAN  # slots without a chunk

    def empty(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        units, k = len(self.case.lengths) * self.case.segments, self.case.config.key_dim
        ends, maps = (torch.full((units, self.heads, n, k), NAN) for n in (self.case.value_dim, k))
        return ends, maps, torch.full((units, self.heads), UNWRITTEN, dtype=torch.int32)

    def fused(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ends, maps, early = self.empty()
        (launched,) = ptxemu.run(
            kernel(self.case.config), *self.operands, self.v, self.cu, ends, maps, self.bound, early, *self.length,
            **options,
        )  # fmt: skip
        assert not launched.notes
        columns = self.case.value_dim + self.case.config.key_dim
        assert launched.grid == (early.numel() * columns // 64, 1, 1)
        assert launched.cluster == (self.case.config.cluster, 1, 1)
        return ends, maps, early

    def apart(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """By the scan: first the ends, which decide, then the maps, which follow."""
        ends, maps, early = self.empty()
        first = replace(self.scan, early="decide", cluster=2 if self.case.value_dim % 128 == 0 else 1)
        second = replace(
            self.scan, early="follow", transition=True, cluster=2 if self.case.config.key_dim == 128 else 1
        )
        absent = (None, self.cu, None)
        ptxemu.run(scan(first), *self.operands, self.v, *absent, ends, None, self.bound, early, *self.length)
        ptxemu.run(scan(second), *self.operands, None, *absent, maps, None, None, early, *self.length)
        return ends, maps, early

    @property
    def length(self) -> tuple[int, int]:
        return self.case.segments, self.case.segment_chunks


def bits(found: tuple[torch.Tensor, ...]) -> list[bytes]:
    return [x.view(torch.uint8).numpy().tobytes() for x in found]


PACKED = (64 * 7 + 9, 0, 70, 64 * 6)
CASES = {
    "V 64": Case((64 * 7 + 9,), 3, 3),
    "V 128": Case((64 * 7,) * 2, 4, 2, 128, SegmentsConfig(cluster=2, strips=True)),
    "V 256, tail": Case((64 * 5 + 1,), 3, 2, 256, SegmentsConfig(cluster=2)),
    "V 192": Case((300,), 2, 3, 192, SegmentsConfig(strips=True), (1, 3)),
    "K 64": Case((64 * 7 + 63,), 4, 2, 64, SegmentsConfig(key_dim=64, strips=True)),
    "K 64, V 128": Case((64 * 6,), 3, 2, 128, SegmentsConfig(key_dim=64)),
    "three panels": Case((64 * 5 + 9,), 3, 2, 128, SegmentsConfig(cluster=2, panels=3), (1, 3)),
    "fp16": Case((64 * 5 + 9,), 3, 2, 64, SegmentsConfig("float16", strips=True)),
    "remembers": Case((64 * 6 + 9,), 4, 2, 128, SegmentsConfig(cluster=2, strips=True), (3, 4)),
    "forgets": Case((64 * 6 + 9,), 4, 2, 128, SegmentsConfig(cluster=2, strips=True), (0, 1)),
    "packed": Case(PACKED, 3, 3, 64, SegmentsConfig(cu_seqlens="int64")),
    "packed, cluster": Case(PACKED, 3, 3, 128, SegmentsConfig(cu_seqlens="int32", cluster=2, strips=True), (2, None)),
    "packed, K 64": Case(PACKED, 4, 2, 64, SegmentsConfig(key_dim=64, cu_seqlens="int32", panels=3), (None, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_two_passes_of_the_scan(name: str) -> None:
    run = Run(CASES[name])
    want = run.apart()
    assert not (want[2] == UNWRITTEN).any()
    assert bits(run.fused(seed=len(name), shuffle=True)) == bits(want)


def test_what_is_written() -> None:
    """A head that forgets has no ends and maps, one that remembers has them all, whatever the order of CTAs."""
    run = Run(CASES["V 128"])
    for options in (dict(), dict(seed=2, shuffle=True)):
        ends, maps, early = run.fused(**options)
        assert early[:, 0].tolist() == [0, 2, 2, 2] * 2
        assert not early[:, 1].any()
        for x in (ends, maps):
            assert x[:, 0].isnan().all()
            assert x[:, 1].isfinite().all()


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_any_bounds(seed: int) -> None:
    length = 1 + seed % 2
    run = Run(replace(CASES["K 64"], segments=8 // length, segment_chunks=length, bounds=(None,) * 4, seed=seed))
    want = run.apart()
    assert {0} < set(want[2].flatten().tolist()), "no segment starts early"
    assert bits(run.fused(seed=seed, shuffle=True)) == bits(want)


@pytest.mark.parametrize("name", ["V 128", "packed, K 64"])
def test_schedules_give_the_same_bits(name: str) -> None:
    run = Run(CASES[name])
    want = bits(run.fused())
    for options in SCHEDULES:
        assert bits(run.fused(**options)) == want, options
