"""Floating-point arithmetic and approximate functions."""

from __future__ import annotations

from .lower import Lowering, lowers
from .lower_common import FLOATS, HALVES, ROUNDINGS, arity, bits, read, requires, split, temporary, write
from .ptx import Instr


def _rounding(low: Lowering, mods: set[str]) -> int:
    chosen = mods & set(ROUNDINGS)
    if len(chosen) > 1:
        raise low.unsupported("two rounding modes")
    return ROUNDINGS.index(chosen.pop()) if chosen else 0


def _emit(low: Lowering, name: str, d: int, sources: list[int], mods: set[str]) -> None:
    """A form of f32, f32x2 or f64: its own function to nearest, a common one for the other rounding modes."""
    mode = _rounding(low, mods)
    if mode:
        low.emit(f"{name}.any", [d, *sources], [mode, "ftz" in mods, "sat" in mods])
    else:
        low.emit(name + "".join(f".{m}" for m in ("ftz", "sat") if m in mods), [d, *sources])


def arithmetic(low: Lowering, ins: Instr) -> None:
    """add, sub, mul, fma, mad of floats, and the mixed-precision forms of add, sub and fma."""
    types = [p for p in ins.parts[1:] if p in FLOATS]
    op = "fma" if ins.op == "mad" else ins.op
    n = 3 if op == "fma" else 2
    arity(low, ins, n + 1)
    t = types[0]
    if ins.op == "mad" and (t not in ("f32", "f64") or not set(ins.parts) & set(ROUNDINGS)):
        raise low.unsupported("mad of floats is for .f32 and .f64, with a rounding mode")
    if len(types) == 2:
        (t, half), mods = split(low, ins, ("f32", "f16", "bf16"), {*ROUNDINGS, "sat"}, count=2)
        requires(low, 100, "mixed precision")
        if t != "f32" or half == "f32" or ins.op not in ("add", "sub", "fma"):
            raise low.unsupported(f"{ins.op} of .{half} to .{t}")
        narrow = n - 1
        sources = [
            temporary(low, f"cvt.f32.{half}", 32, [read(low, a, half)], which=i)
            for i, a in enumerate(ins.args[1 : 1 + narrow])
        ]
        _emit(low, f"{op}.f32", write(low, ins.args[0], 32), [*sources, read(low, ins.args[-1], "f32")], mods)
        return
    if t in HALVES:
        bf, fma = t.startswith("bf"), op == "fma"
        _, mods = split(low, ins, HALVES, {"rn", *(() if bf else ("ftz", "sat")), *(("relu", "oob") if fma else ())})
        if {"sat", "relu"} <= mods or {"ftz", "oob"} <= mods:
            raise low.unsupported(".sat with .relu, or .ftz with .oob")
        args = [write(low, ins.args[0], bits(t)), *(read(low, a, t) for a in ins.args[1:])]
        low.emit(f"{op}.{t}", args, [m in mods for m in ("ftz", "sat", "relu", "oob")])
        return
    allowed = {*ROUNDINGS, *(() if t == "f64" else ("ftz", "sat") if t == "f32" else ("ftz",))}
    _, mods = split(low, ins, ("f32", "f64", "f32x2"), allowed)
    if t == "f32x2":
        requires(low, 100, ".f32x2")
    _emit(low, f"{op}.{t}", write(low, ins.args[0], bits(t)), [read(low, a, t) for a in ins.args[1:]], mods)


@lowers("fma")
def _fma(low: Lowering, ins: Instr) -> None:
    if not any(p in FLOATS for p in ins.parts[1:]):
        raise low.unsupported("no type")
    arithmetic(low, ins)


def divide(low: Lowering, ins: Instr) -> None:
    (t,), mods = split(low, ins, ("f32", "f64"), {*ROUNDINGS, "approx", "full", "ftz"})
    arity(low, ins, 3)
    if ins.op != "div" or not mods - {"ftz"} or (t == "f64" and mods & {"approx", "full", "ftz"}):
        raise low.unsupported(f"{ins.op} of .{t}")
    name = "div.approx.f32" if "approx" in mods else f"div.{t}"
    _emit(low, name, write(low, ins.args[0], bits(t)), [read(low, a, t) for a in ins.args[1:]], mods)


def _flushed(low: Lowering, type_: str, x: int, which: int = 0) -> int:
    return temporary(low, f"flush.{type_}", bits(type_), [x], which=40 + which)


def sign(low: Lowering, ins: Instr) -> None:
    """neg and abs: the sign bit alone, also of NaN."""
    (t,), mods = split(low, ins, FLOATS, {"ftz"})
    arity(low, ins, 2)
    if mods and t not in ("f32", "f16", "f16x2"):
        raise low.unsupported(f".ftz of .{t}")
    x = read(low, ins.args[1], t)
    if mods:
        x = _flushed(low, t, x)
    name = {"f16": "half", "bf16": "half", "f16x2": "half2", "bf16x2": "half2"}.get(t, t)
    low.emit(f"{ins.op}.{name}", [write(low, ins.args[0], bits(t)), x])


def minmax(low: Lowering, ins: Instr) -> None:
    (t,), mods = split(low, ins, ("f32", "f64", *HALVES), {"ftz", "NaN", "xorsign", "abs"})
    arity(low, ins, 3, 4)
    three = len(ins.args) == 4
    if (t == "f64" and mods) or ("ftz" in mods and t.startswith("bf")) or (three and t != "f32"):
        raise low.unsupported(f"modifiers of .{t}")
    if ("xorsign" in mods) != ("abs" in mods) if not three else "xorsign" in mods:
        raise low.unsupported(".xorsign and .abs go together")
    flags = [ins.op == "max", "NaN" in mods, "xorsign" in mods, "ftz" in mods]
    d, sources = write(low, ins.args[0], bits(t)), [read(low, a, t) for a in ins.args[1:]]
    if three:
        requires(low, 100, "three operands")
        if "abs" in mods:
            sources = [temporary(low, "abs.f32", 32, [x], which=i) for i, x in enumerate(sources)]
        first = temporary(low, "minmax.f32", 32, sources[:2], flags, which=3)
        sources = [first, sources[2]]
    low.emit(f"minmax.{t}", [d, *sources], flags)


@lowers("rcp", "sqrt", "rsqrt")
def _root(low: Lowering, ins: Instr) -> None:
    (t,), mods = split(low, ins, ("f32", "f64"), {*ROUNDINGS, "approx", "ftz"})
    arity(low, ins, 2)
    approximate = "approx" in mods
    if approximate == bool(mods & set(ROUNDINGS)) or (ins.op == "rsqrt" and not approximate):
        raise low.unsupported(f"{ins.op} needs .approx or a rounding mode")
    d, x = write(low, ins.args[0], bits(t)), read(low, ins.args[1], t)
    if t == "f32":
        _emit(low, f"{ins.op}.f32", d, [x], mods)
    elif approximate and "ftz" in mods and ins.op != "sqrt":
        low.emit(f"{ins.op}.high.f64", [d, x])
    elif "ftz" not in mods and (not approximate or ins.op == "rsqrt"):
        _emit(low, f"{ins.op}.f64", d, [x], mods)
    else:
        raise low.unsupported("no such form of .f64")


@lowers("sin", "cos", "lg2", "ex2", "tanh")
def _function(low: Lowering, ins: Instr) -> None:
    halves = HALVES if ins.op in ("ex2", "tanh") else ()
    (t,), mods = split(low, ins, ("f32", *halves), {"approx", *(("ftz",) if ins.op != "tanh" else ())})
    arity(low, ins, 2)
    if "approx" not in mods or (t in HALVES and ("ftz" in mods) != (ins.op == "ex2" and t.startswith("bf"))):
        raise low.unsupported(f"{ins.op} of .{t} with these modifiers")
    d, x = write(low, ins.args[0], bits(t)), read(low, ins.args[1], t)
    if t == "f32":
        _emit(low, f"{ins.op}.f32", d, [x], mods)
    else:
        low.emit(f"{ins.op}.{t}", [d, x])
