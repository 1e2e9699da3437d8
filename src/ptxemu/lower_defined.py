"""How instructions pass undefined bits on: a rule for each of the core's functions, and what it does with each operand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

RULES = (
    "any", "clear", "own", "move", "extend", "bits", "and", "or", "shl", "shr", "shr_signed", "halves", "words", "pair", "select",
    "lop3", "prmt", "part", "pack", "part_128", "pack_128", "compare", "predicate", "warp", "mma",
)  # fmt: skip
"""In the order of defined.h."""
READ, NEEDED, WRITTEN = 32, 64, 128

_RULE_OF = [
    (r"part\.128", "part_128"), (r"pack\.128", "pack_128"), (r"part\..*", "part"), (r"pack\..*", "pack"),
    (r"mov\..*|or\.imm\..*|and\.imm\..*|cvt\.[us]\d+\.u\d+", "move"), (r"cvt\.[us]\d+\.s\d+", "extend"), (r"(xor|not)\..*", "bits"),
    (r"and\..*", "and"), (r"or\..*", "or"), (r"shl\..*", "shl"), (r"shr\.u.*", "shr"), (r"shr\.s.*", "shr_signed"),
    (r"half", "part"), (r"cvt\.(bf16|f16)x2\.f32", "pair"), (r"cvt\..*", "any"), (r".*\.f32x2(\..*)?", "words"),
    (r".*16x2(\..*)?|(neg|abs)\.half2", "halves"), (r"selp\..*", "select"), (r"lop3", "lop3"), (r"prmt", "prmt"), (r"setp\..*", "compare"),
    (r"pred", "predicate"), (r"vote|match|redux", "warp"), (r"mma\.sync.*", "mma"),
    (r"ld|st|(ld|st)matrix(\.b8)?|movmatrix|shfl|tcgen05\.(ld|st)|wgmma\.mma_async|tcgen05\.used", "own"),
]  # fmt: skip
"""The first pattern that matches a whole name; what none matches is "any" where it is arithmetic, else "clear"."""

_CONTROL = re.compile(
    r"ld\.param|createpolicy|elect|activemask|clock|nothing|yield|trap|call\.results|printf|assertion|fence.*|bar.*|mbarrier.*|setmaxnreg|mapa|getctarank|st\..*|red\..*"
    r"|atom.*|tex|txq|su(ld|st|red)|cp\..*|tensor\..*|tensormap\..*|group\..*|tcgen05\..*|wgmma\..*"
)
"""Functions whose sources all must be defined, but for those of `_data`."""


@cache
def _control(fn: str) -> bool:
    return _CONTROL.fullmatch(fn) is not None


@cache
def rule(fn: str) -> str:
    """The rule of one of the core's functions."""
    for pattern, name in _RULE_OF:
        if re.fullmatch(pattern, fn):
            return name
    return "clear" if _control(fn) else "any"


def _written(fn: str, n: int, imm: Sequence[int]) -> set[int]:
    """Operands that are destinations."""
    if fn.startswith("setp."):
        return {0, 3} if n > 3 else {0}
    if fn in ("ld", "ldmatrix", "ldmatrix.b8", "tcgen05.ld"):
        return set(range(1, n))
    if fn == "ld.param":
        return set(range(n))
    if fn in ("tex", "suld"):
        return set(range(imm[2]))
    if fn.startswith("atom"):
        return {1} if fn == "atom.b128" else set(range(1, 1 + (imm[1] >> 12 & 15)))
    if fn.startswith("mma.sync"):
        return set(range(imm[3] & 0xFF))
    if fn in ("elect", "shfl", "match"):
        return {0, 1}
    if fn == "bar.red":
        return {2}
    if fn.startswith("carry."):
        return {0, 3}
    if fn.startswith("mad.carry."):
        return {0, 4}
    if fn in (
        "mbarrier.arrive",
        "mbarrier.wait",
        "ld.param",
        "createpolicy",
        "activemask",
        "mapa",
        "getctarank",
        "txq",
    ):
        return {0}
    if fn in ("st", "stmatrix", "stmatrix.b8", "tcgen05.st", "wgmma.mma_async") or _control(fn):
        return set()
    return {0}


def _needed(fn: str, n: int, imm: Sequence[int]) -> Callable[[int], bool]:
    """Which sources must be defined."""
    if fn.removesuffix(".b8") in ("ld", "st", "ldmatrix", "stmatrix", "tcgen05.ld", "tcgen05.st"):
        return lambda k: k == 0
    if fn == "shfl":
        return lambda k: k > 2
    if fn == "wgmma.mma_async":
        registers = (imm[0] & 0xFFFF) // (4 if imm[1] >> 16 == 0 else 2) + (4 if imm[2] & 1 else 0)
        end = n - (1 if imm[2] >> 6 & 3 else 0)
        return lambda k: registers <= k < end  # those of D and A may be undefined; of metadata, lanes that hold none
    if fn.startswith(("selp.", "slct.")):
        return lambda k: k == 3
    if fn in ("vote", "match", "redux"):
        return lambda k: k == n - 1
    return (lambda k: True) if _control(fn) else (lambda k: False)


def forms(fn: str, args: Sequence[int], imm: Sequence[int], size_at: Callable[[int], int]) -> bytes:
    """What the core is told of every operand: FORM_* of defined.h. size_at: bytes of a lane of the register at an offset."""
    written, needed = _written(fn, len(args), imm), _needed(fn, len(args), imm)
    carry = fn.startswith(("carry.", "mad.carry."))
    out = bytearray()
    for k, at in enumerate(args):
        form = size_at(at)
        if k in written:
            form |= WRITTEN | (READ if carry and k and imm[0] else 0)
        elif needed(k):
            form |= NEEDED
        out.append(form)
    return bytes(out)
