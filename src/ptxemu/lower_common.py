"""What the arithmetic lowerings share: types and modifiers of an instruction, operands of any kind, destinations."""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence

from .lower import SPECIAL, Lowering
from .ptx import SINK as PTX_SINK
from .ptx import Imm, Instr, Operand, Reg, Sym

INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
FLOATS = ("f32", "f64", "f32x2", *HALVES)
BITS = ("b16", "b32", "b64")
ROUNDINGS = ("rn", "rz", "rm", "rp")
"""In the order of the core's numbers."""
BOOLEANS = ("and", "or", "xor")
"""The core's numbers of these begin at 1."""

_CLOCKS = {"%clock", "%clock_hi", "%clock64", "%globaltimer"}
_WIDE = {"%clock64", "%globaltimer"}


def bits(type_: str) -> int:
    """The width of a value of a PTX type, also of the packed ones."""
    digits = "".join(c for c in type_.split("x")[0] if c.isdigit())
    return 1 if type_ == "pred" else int(digits) * (2 if type_.endswith("x2") else 1)


def split(
    low: Lowering, ins: Instr, types: Container[str], modifiers: Container[str], *, count: int = 1
) -> tuple[list[str], set[str]]:
    """The types and the modifiers of an instruction, of which there are no others than these; so many types."""
    found, mods = [], set()
    for part in ins.parts[1:]:
        if part in types:
            found.append(part)
        elif part in modifiers:
            mods.add(part)
        else:
            raise low.unsupported(f"modifier .{part}")
    if len(found) != count:
        raise low.unsupported(f"types {found}; {count} of them expected")
    return found, mods


def arity(low: Lowering, ins: Instr, *allowed: int) -> None:
    """The number of operands, the destination included."""
    if len(ins.args) not in allowed:
        raise low.unsupported(f"{len(ins.args)} operands; allowed: {', '.join(map(str, allowed))}")


def read(low: Lowering, a: Operand, type_: str) -> int:
    """The offset of a source operand: a register, an immediate, an address, or a special register."""
    width = bits(type_)
    if isinstance(a, Sym) and a.name in SPECIAL:
        low.special(a)
        if a.name in _CLOCKS:
            low.emit("clock")
        own = 64 if a.name in _WIDE else 32
        if width != own:
            raise low.unsupported(f"{a.name} read as {type_}")
        return SPECIAL[a.name]
    if isinstance(a, Imm) and a.isfloat:
        if width not in (32, 64):
            raise low.unsupported('a floating-point immediate of 16 bits (PTX ISA, "Constants": give its bits)')
        return low.constant(_float_bits(a, width), width)
    if width in (8, 16) and isinstance(a, Reg) and a.width == width and not a.neg:
        return low.place[a.idx]
    base = {1: "pred", 8: "b8", 16: "b16", 32: "b32", 64: "b64"}[width]
    if isinstance(a, Imm) and type_ in ("f32", "f64"):
        base = type_
    return low.operand(a, base)


def _float_bits(a: Imm, width: int) -> int:
    if a.isfloat == width:
        return a.value
    if width == 64:
        return int(
            struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", a.value & 0xFFFFFFFF))[0]))[0]
        )
    (number,) = struct.unpack("<d", struct.pack("<Q", a.value & (1 << 64) - 1))
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def write(low: Lowering, a: Operand, width: int) -> int:
    """The offset of a destination register; a scratch register for the sink."""
    return low.scratch(width, 99) if a is PTX_SINK else low.target(a, width)


def temporary(
    low: Lowering, fn: str, width: int, args: Sequence[int], imm: Sequence[int] = (), *, which: int = 0
) -> int:
    """A scratch register with a function's result."""
    d = low.scratch(width, 10 + which)
    low.emit(fn, [d, *args], imm)
    return d


def predicate(low: Lowering, a: Operand) -> tuple[int, int]:
    """The offset of a predicate, and all ones (-1) if it is negated."""
    offset, negated = low.predicate(a)
    return offset, -int(negated)


def requires(low: Lowering, arch: int, what: str) -> None:
    if low.arch < arch:
        raise low.unsupported(f"{what} needs sm_{arch}a or later")
