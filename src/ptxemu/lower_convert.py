"""Conversions: cvt and cvt.pack."""

from __future__ import annotations

from .lower import Lowering, lowers
from .lower_common import INTS, ROUNDINGS, arity, bits, read, requires, split, temporary, write
from .ptx import Imm, Instr, Operand, Reg

_NUMBER = {
    name: i
    for i, name in enumerate(
        (*INTS, "f16", "bf16", "f32", "f64", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "ue8m0")
    )
}
"""The core's numbers of the formats."""
_SCALARS = ("f16", "bf16", "f32", "f64", "tf32")
_SMALL = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2")
_PACKED = ("f16x2", "bf16x2", *_SMALL)
_INTEGRAL = ("rni", "rzi", "rmi", "rpi")
_MODES = (*ROUNDINGS, "rna", "rs")
_FTZ, _SAT, _RELU, _SATFINITE = 1, 2, 4, 8


def _holder(type_: str) -> int:
    """The width of the register that holds a value of this type in the core's functions."""
    return 32 if type_ == "tf32" else max(16, bits(type_))


def _source(low: Lowering, a: Operand, type_: str) -> int:
    """A source operand, whose register may be wider than its type: then the low bits count."""
    width = _holder(type_)
    if isinstance(a, Reg) and a.width != width and a.width >= bits(type_):
        if a.width == 8:
            return low.place[a.idx]
        return temporary(low, f"cvt.u{width}.u{a.width}", width, [low.place[a.idx]], which=60)
    if isinstance(a, Imm) and type_ in INTS:
        return low.constant(a.value, width)
    return read(low, a, type_ if type_ not in ("u8", "s8") else "b16")


def _deliver(low: Lowering, d: Operand, type_: str, fn: str, args: list[int], imm: list[int]) -> None:
    """A function's result in a destination, which may be wider: then extended, by the sign of signed integers."""
    width = _holder(type_)
    if not isinstance(d, Reg) or d.width == width or (d.width == 8 and bits(type_) == 8):
        low.emit(fn, [write(low, d, width) if not isinstance(d, Reg) else low.place[d.idx], *args], imm)
        return
    if d.width < width or type_ in ("bf16", "tf32"):
        raise low.unsupported(f"a destination of {d.width} bits for .{type_}")
    x = temporary(low, fn, width, args, imm, which=61)
    kind = type_ if type_ in INTS else f"u{width}"
    low.emit(f"cvt.{kind[0]}{d.width}.{kind}", [low.place[d.idx], x])


def _limits(type_: str) -> tuple[int, int]:
    n = bits(type_)
    return (0, (1 << n) - 1) if type_[0] == "u" else (-(1 << n - 1), (1 << n - 1) - 1)


def _signed64(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


@lowers("cvt")
def _cvt(low: Lowering, ins: Instr) -> None:
    if "pack" in ins.parts:
        _pack(low, ins)
        return
    types, mods = split(
        low, ins, _NUMBER.keys() | set(_PACKED), {*_INTEGRAL, *_MODES, "ftz", "sat", "relu", "satfinite"}, count=2
    )
    to, of = types
    rounding = mods & {*_INTEGRAL, *_MODES}
    if len(rounding) > 1:
        raise low.unsupported("two rounding modes")
    mode = rounding.pop() if rounding else ""
    mods -= {mode}
    if to in _PACKED or of in _PACKED:
        _packed(low, ins, to, of, mode, mods)
        return
    arity(low, ins, 2)
    if any(t in _NUMBER and _NUMBER[t] > _NUMBER["tf32"] for t in types) or of == "tf32":
        raise low.unsupported(f"a single .{of} to .{to}")
    d, a = ins.args
    _modifiers(low, d, a, to, of, mode, mods)
    if of in INTS:
        if "ftz" in mods and to != "f32":
            raise low.unsupported("modifier .ftz")
        x = _source(low, a, of)
        _from_integer(low, d, x, to, of, mode, mods)
    elif to in INTS:
        if mode not in _INTEGRAL or mods & {"relu", "satfinite"}:
            raise low.unsupported("float to integer needs .rni, .rzi, .rmi or .rpi")
        x = _source(low, a, of)
        _deliver(low, d, to, "cvt.int", [x], [_NUMBER[to], _NUMBER[of], _INTEGRAL.index(mode), "ftz" in mods])
    else:
        _from_float(low, d, _source(low, a, of), to, of, mode, mods)


def _modifiers(low: Lowering, d: Operand, a: Operand, to: str, of: str, mode: str, mods: set[str]) -> None:
    """Refuses what ptxas does and no other rule here covers."""
    if to in INTS and of in INTS:
        (low_, high), (least, greatest) = _limits(to), _limits(of)
        if "sat" in mods and low_ <= least and greatest <= high:
            raise low.unsupported(f".sat where every .{of} is a .{to}")
    if "ftz" in mods and to in INTS and of != "f32":
        raise low.unsupported(f".ftz of .{of}")
    if "bf16" in (to, of):
        if "sat" in mods:
            raise low.unsupported(".sat of .bf16")
        small = [x for x, t in ((d, to), (a, of)) if t in ("u8", "s8")]
        if any(not isinstance(x, Reg) or x.width != 8 for x in small):
            raise low.unsupported("between .bf16 and 8 bits a register of 8 bits is needed")
    exact = of not in INTS and (to == of or (bits(to) > bits(of) and of != "bf16"))
    if mode in ROUNDINGS and exact and to != "tf32":
        raise low.unsupported(f".{mode} of an exact conversion")


def _from_integer(low: Lowering, d: Operand, x: int, to: str, of: str, mode: str, mods: set[str]) -> None:
    if mods & {"relu", "satfinite"} or to == "tf32":
        raise low.unsupported(f"integer to .{to}")
    if to in INTS:
        if mode:
            raise low.unsupported(f"modifier .{mode}")
        if "sat" in mods:
            bounds = [_limits(to), _limits(of)]
            low_, high = max(b[0] for b in bounds), min(b[1] for b in bounds)
            x = temporary(low, f"clamp.{of}", _holder(of), [x], [_signed64(low_), _signed64(high)], which=62)
        _deliver(low, d, to, f"cvt.{to}.{of}", [x], [])
    elif mode not in ROUNDINGS:
        raise low.unsupported("integer to float needs .rn, .rz, .rm or .rp")
    elif mode == "rn" and to in ("f32", "f64") and "sat" not in mods:
        _deliver(low, d, to, f"cvt.{to}.{of}", [x], [])
    else:
        _deliver(low, d, to, "cvt.any", [x], [_NUMBER[to], _NUMBER[of], _MODES.index(mode), _flags(mods)])


def _flags(mods: set[str]) -> int:
    return sum(
        bit for name, bit in (("ftz", _FTZ), ("sat", _SAT), ("relu", _RELU), ("satfinite", _SATFINITE)) if name in mods
    )


_FAST = {("f16", "f32"), ("bf16", "f32"), ("f32", "f64")}


def _from_float(low: Lowering, d: Operand, x: int, to: str, of: str, mode: str, mods: set[str]) -> None:
    if "ftz" in mods and "f32" not in (to, of):
        raise low.unsupported(".ftz without .f32")
    if mode in _INTEGRAL:
        if to != of or mods & {"relu", "satfinite"}:
            raise low.unsupported(f".{mode} from .{of} to .{to}")
        if "ftz" in mods:
            x = temporary(low, "flush.f32", 32, [x], which=63)
        if "sat" in mods:
            x = temporary(low, f"round.{of}", _holder(of), [x], [_INTEGRAL.index(mode)], which=64)
            _deliver(low, d, to, f"sat.{to}", [x], [])
        else:
            _deliver(low, d, to, f"round.{of}", [x], [_INTEGRAL.index(mode)])
        return
    if to == "tf32":
        if (
            of != "f32"
            or mode not in ("rna", "rn", "rz")
            or mods - {"satfinite", "relu"}
            or (mode == "rna" and "relu" in mods)
        ):
            raise low.unsupported(f"cvt.{mode}.tf32.{of}")
        if mode != "rna" and "satfinite" in mods:
            requires(low, 100, ".satfinite with this rounding")
    elif mode in ("rna", "rs"):
        raise low.unsupported(f"modifier .{mode}")
    if not mode and bits(to) < bits(of):
        raise low.unsupported("a narrowing conversion needs a rounding mode")
    if mods & {"relu", "satfinite"} and (of != "f32" or to not in ("f16", "bf16", "tf32")):
        raise low.unsupported(f".relu and .satfinite from .{of} to .{to}")
    if to == "f16" and of == "f32":
        mods = mods - {"ftz"}  # hardware's conversion does not flush its operand
    if to == of and not mode and not mods and to in ("f32", "f64"):  # half precision: the NaN becomes the canonical one
        _deliver(low, d, to, f"mov.{_holder(to)}", [x], [])
    elif (to, of) in _FAST and mode == "rn" and mods <= {"relu"}:
        _deliver(low, d, to, f"cvt.{to}.{of}", [x], ["relu" in mods])
    elif (to, of) == ("tf32", "f32") and mode == "rna":
        _deliver(low, d, to, "cvt.rna.tf32.f32", [x], ["satfinite" in mods])
    elif bits(to) > bits(of) and not mods and (of, to) in (("f16", "f32"), ("bf16", "f32"), ("f32", "f64")):
        _deliver(low, d, to, f"cvt.{to}.{of}", [x], [])
    else:
        _deliver(low, d, to, "cvt.any", [x], [_NUMBER[to], _NUMBER[of], _MODES.index(mode or "rn"), _flags(mods)])


def _packed(low: Lowering, ins: Instr, to: str, of: str, mode: str, mods: set[str]) -> None:
    """Two elements at once: two f32 to a packed pair, or pair to pair."""
    if mods - {"relu", "satfinite"}:
        raise low.unsupported(f"modifier .{sorted(mods - {'relu', 'satfinite'})[0]}")
    small = to in _SMALL
    if small and to != "ue8m0x2" and (mode != "rn" or "satfinite" not in mods):
        raise low.unsupported(f".{to} needs .rn.satfinite")
    if to == "ue8m0x2" and mode not in ("rz", "rp"):
        raise low.unsupported(".ue8m0x2 needs .rz or .rp")
    if not small and mode not in ("rn", "rz", "rs"):
        raise low.unsupported(f".{to} needs .rn, .rz or .rs")
    if not {to, of} <= {"f32", "f16x2", "bf16x2", "e4m3x2", "e5m2x2"} or mode == "rs":
        requires(low, 100, f"cvt.{mode}.{to}.{of}")
    width = 32 if not small else 8 if to == "e2m1x2" else 16
    imm = [_NUMBER[to[:-2]], _NUMBER[of.removesuffix("x2")], _MODES.index(mode), _flags(mods)]
    if of == "f32":
        arity(low, ins, 4 if mode == "rs" else 3)
        args = [read(low, a, "b32" if i == 2 else "f32") for i, a in enumerate(ins.args[1:])]
        if not small and mode == "rn" and mods <= {"relu"}:
            low.emit(f"cvt.{to}.f32", [write(low, ins.args[0], 32), *args], ["relu" in mods])
        else:
            low.emit("cvt.pair", [write(low, ins.args[0], width), *args], imm)
        return
    arity(low, ins, 2)
    pairs = {"f16x2": _SMALL[:5], "bf16x2": ("ue8m0x2",)}
    forward, backward = of in pairs and to in (*_SMALL[:2], "ue8m0x2"), to in pairs and of in pairs[to]
    if not (forward and (to == "ue8m0x2") == (of == "bf16x2")) and not backward:
        raise low.unsupported(f"cvt from .{of} to .{to}")
    if backward and (mode != "rn" or "satfinite" in mods):
        raise low.unsupported(f".{to} from .{of} needs .rn")
    source = read(low, ins.args[1], "b32" if of in pairs else "b8" if of == "e2m1x2" else "b16")
    low.emit("cvt.packed", [write(low, ins.args[0], width), source], imm)


def _pack(low: Lowering, ins: Instr) -> None:
    """cvt.pack.sat.convertType.s32[.b32] d, a, b [, c]."""
    types, mods = split(low, ins, {*INTS, "u2", "s2", "u4", "s4", "b32"}, {"pack", "sat"}, count=len(ins.parts) - 3)
    if "sat" not in mods or len(types) not in (2, 3) or types[1] != "s32" or bits(types[0]) > 16:
        raise low.unsupported("cvt.pack needs .sat, a type of at most 16 bits, and .s32")
    with_c = bits(types[0]) < 16
    if with_c != (len(types) == 3):
        raise low.unsupported("cvt.pack takes a third operand below 16 bits")
    arity(low, ins, 4 if with_c else 3)
    sources = [read(low, a, "b32") for a in ins.args[1:]]
    low.emit("cvt.pack", [write(low, ins.args[0], 32), *sources], [*_limits(types[0]), bits(types[0])])
