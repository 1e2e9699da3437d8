"""Breaking a kernel on purpose: edits of its PTX and of its tensor maps, and a judge of whether the emulator notices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kernels import Case

from ptxemu import (
    BarrierFault,
    Deadlock,
    EmulatorError,
    MemoryFault,
    ProxyFault,
    RaceFault,
    TensorFault,
    WgmmaFault,
    dsl,
)

Edit = Callable[[str], str]
WRONG = 2e-2
"""A relative error from which a result counts as wrong; the kernels themselves stay below 5e-3."""

SAYS = {
    MemoryFault: r"uninitialised|misaligned|out of bounds|outside|reaches|live mbarrier|swizzle",
    RaceFault: r"not ordered after|in flight|may still be queued",
    ProxyFault: r"fence\.proxy\.async",
    BarrierFault: r"still expected|more transaction bytes|no mbarrier is initialised|threads? count|arrives twice|threads arrived",
    Deadlock: r"warp \d+.*: waits for .* at PTX line \d+",
    WgmmaFault: r"in flight|wgmma\.(fence|wait_group|commit_group)",
    TensorFault: r"tcgen05\.\w+",
}
"""What the message of each kind of error must tell."""


def nth(pattern: str, replacement: str = "", n: int = 0) -> Edit:
    """Replaces match n of a regular expression; negative n count from the end."""

    def edit(text: str) -> str:
        matches = list(re.finditer(pattern, text))
        assert -len(matches) <= n < len(matches), f"{pattern}: {len(matches)} matches, number {n} was asked for"
        m = matches[n]
        new = text[: m.start()] + m.expand(replacement) + text[m.end() :]
        assert new != text, f"{pattern}: the replacement changes nothing"
        return new

    return edit


def every(pattern: str, replacement: str = "") -> Edit:
    """Replaces all matches."""

    def edit(text: str) -> str:
        new, n = re.subn(pattern, replacement, text)
        assert n, f"{pattern}: no match"
        assert new != text, f"{pattern}: the replacement changes nothing"
        return new

    return edit


def swap(first: str, second: str, line: str, n: int = 0) -> Edit:
    """Swaps what two patterns match in match n of `line`."""

    def edit(text: str) -> str:
        m = list(re.finditer(line, text))[n]
        whole = m.group()
        a, b = re.search(first, whole), re.search(second, whole)
        assert a is not None
        assert b is not None
        assert a.group() != b.group()
        new = whole[: a.start()] + b.group() + whole[a.end() : b.start()] + a.group() + whole[b.end() :]
        return text[: m.start()] + new + text[m.end() :]

    return edit


@dataclass(frozen=True)
class Mutation:
    """One way to break a kernel.

    errors: what the emulator must raise, with a message that matches `says` or, without it, what SAYS has for the error; none of them: no
    checker can see it, the result is wrong.
    note: instead a remark that contains this, of a rule that hardware does not depend on.
    box: tensor map number, dimension, and what is added to the box there. swizzle: tensor map number and its new swizzle mode.
    """

    name: str
    edit: Edit | None = None
    errors: tuple[type[EmulatorError], ...] = ()
    says: str = ""
    box: tuple[int, int, int] | None = None
    swizzle: tuple[int, int] | None = None
    note: str = ""


@contextmanager
def _tensor_maps(mutation: Mutation) -> Iterator[None]:
    """Inside the block, launches get a tensor map with another box or swizzle (laid out as shim.c describes)."""
    own = dsl._callback
    assert own is not None
    launched = own

    def edited(number: int, raw: bytes) -> bytes:
        x = bytearray(raw)
        if mutation.box is not None and mutation.box[0] == number:
            _, dimension, by = mutation.box
            x[55 + dimension] += by  # byte 55 is the box of dimension 0, bytes 56 to 59 are those of dimensions 1 to 4
        if mutation.swizzle is not None and mutation.swizzle[0] == number:
            x[9] = x[9] & ~0x60 | mutation.swizzle[1] << 5
        return bytes(x)

    def callback(
        name: str, grid: Any, block: Any, cluster: Any, shared: int, read: Callable[[int, int], bytes]
    ) -> bool:
        count = 0

        def edited_read(i: int, size: int) -> bytes:
            nonlocal count
            raw = read(i, size)
            if size != 128:
                return raw
            count += 1
            return edited(count - 1, raw)

        return launched(name, grid, block, cluster, shared, edited_read)

    dsl.set_callback(callback)
    try:
        yield
    finally:
        dsl.set_callback(own)


@dataclass
class Verdict:
    """How a mutation was noticed: by an error, by a wrong result, or not at all."""

    mutation: Mutation
    error: EmulatorError | None
    difference: float
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def caught(self) -> bool:
        if self.mutation.errors:
            if not isinstance(self.error, self.mutation.errors):
                return False
            return bool(re.search(self.mutation.says or SAYS[type(self.error)], str(self.error)))
        if self.mutation.note:
            return self.error is None and any(self.mutation.note in n for n in self.notes)
        return self.error is None and self.difference > WRONG

    @property
    def line(self) -> str:
        """A line of the score, see conftest."""
        return f"{'caught' if self.caught else 'MISSED'}  {self.mutation.name:55}  {str(self)[:150]}"

    def __str__(self) -> str:
        if self.error is None and self.mutation.note and self.notes:
            return "note: " + self.notes[0]
        if self.error is None:
            return f"no error; the result is off by {self.difference:.1e}"
        return f"{type(self.error).__name__}, seed {self.seed}: " + str(self.error).split("\n", 1)[0]


def judge(case: Case, mutation: Mutation, seeds: int = 8) -> Verdict:
    """Runs the broken kernel under several schedules until one raises."""
    difference = 0.0
    with _tensor_maps(mutation):
        for seed in range(seeds):
            try:
                launched = case.run(seed=seed, shuffle=seed > 0, workers=1, limit=2_000_000, edit=mutation.edit)
            except EmulatorError as error:
                return Verdict(mutation, error, 0.0, seed)
            difference = max(difference, *case.errors().values())
            if not mutation.errors:
                break
    return Verdict(mutation, None, difference, 0, launched.notes)
