"""Loads of shared memory that may still be queued at an arrival (`queued.c`), and the instructions that touch what they load."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from . import flow
from .lower_defined import WRITTEN

_GENERIC, _SHARED = 0, 2
_RENAMES = re.compile(r"mov\.\d+|(part|pack)\.(64\.32|128)")
"""Functions that move whole registers, for which ptxas has no instructions: the value is where it was."""
_FENCES = {"fence", "fence.proxy.async", "bar.red", "barrier.cluster.wait"}
_ISSUES = {"cp.bulk", "tensor.load", "st.async", "red.async", "tcgen05.commit"}
"""What lets a copy go without an arrival: it is one itself, or arrives on behalf of others."""


@dataclass(frozen=True)
class Step:
    """An instruction of the core as this module sees it."""

    fn: str
    args: Sequence[int]
    forms: bytes
    imm: Sequence[int]
    guarded: bool

    def registers(self, *, written: bool) -> list[int]:
        """The places of its registers that it writes, or of those that it reads."""
        return [a for a, form in zip(self.args, self.forms, strict=True) if a >= 0 and bool(form & WRITTEN) == written]

    @property
    def loads(self) -> bool:
        """Whether it may read shared memory into registers."""
        if self.fn not in ("ld", "ldmatrix", "atom", "atom.b128"):
            return False
        return self.imm[1] >> 20 & 7 in (_GENERIC, _SHARED) and bool(self.registers(written=True))

    @property
    def renames(self) -> bool:
        return _RENAMES.fullmatch(self.fn) is not None

    @property
    def fences(self) -> bool:
        """Whether past it all reads before it are done."""
        if self.fn == "bar":
            return self.imm[0] != 1
        if self.fn == "mbarrier.arrive":
            return bool(self.imm[1] & 8)
        if self.fn == "barrier.cluster.arrive":
            return not self.imm[1]
        return self.fn in _FENCES

    @property
    def releases(self) -> bool:
        """Whether it tells others, or copies, that the reads before it are over, without waiting for them."""
        return self.fn in ("bar", "mbarrier.arrive", *_ISSUES) and not self.fences


@dataclass
class Queued:
    """Numbers of instructions: `loads` to be followed, what touches registers with their values, and what of that only renames."""

    loads: set[int]
    touches: set[int]
    renames: set[int]


def queued(steps: Sequence[Step], control: Sequence[int], targets: Sequence[int]) -> Queued:
    """What the core has to follow: loads that an arrival may find unused, on some path that the control flow allows."""
    loads = [i for i, s in enumerate(steps) if s.loads]
    if not loads or not any(s.releases for s in steps):
        return Queued(set(), set(), set())
    late = _late(steps, loads, control, targets)
    held = {a for i in late for a in steps[i].registers(written=True)}
    before = -1
    while len(held) != before:
        before = len(held)
        for s in steps:
            if s.renames and held.intersection(s.registers(written=False)):
                held.update(s.registers(written=True))
    touches = {i for i, s in enumerate(steps) if held.intersection(s.args)}
    return Queued(late, touches, {i for i in touches if steps[i].renames})


def _late(steps: Sequence[Step], loads: Sequence[int], control: Sequence[int], targets: Sequence[int]) -> set[int]:
    """Loads that are unused at some release: a set is a number with a bit for each load.

    Guarded instructions end nothing, nor do uses of registers that others write too, which may hold their values: then the core decides.
    """
    writers: dict[int, list[int]] = defaultdict(list)
    for i, s in enumerate(steps):
        for a in s.registers(written=True):
            writers[a].append(i)
    bit = {i: 1 << k for k, i in enumerate(loads)}
    every = (1 << len(loads)) - 1
    ends = [0] * len(steps)
    for i, s in enumerate(steps):
        if s.guarded or s.renames:
            continue
        if s.fences:
            ends[i] = every
            continue
        for a in s.registers(written=False):
            if len(writers[a]) == 1:
                ends[i] |= bit.get(writers[a][0], 0)

    def through(block: range, live: int) -> tuple[int, int]:
        """What is queued at a block's end, and what was at its releases."""
        seen = 0
        for i in block:
            live &= ~ends[i]
            if steps[i].releases:
                seen |= live
            live |= bit.get(i, 0)
        return live, seen

    blocks, successors = flow.blocks(len(steps), control, [s.guarded for s in steps], targets)
    begins = [0] * len(blocks)
    found, work = 0, list(range(len(blocks)))
    while work:
        b = work.pop()
        live, seen = through(blocks[b], begins[b])
        found |= seen
        for following in successors[b]:
            if live & ~begins[following]:
                begins[following] |= live
                work.append(following)
    return {i for i in loads if bit[i] & found}
