"""Integer arithmetic, logic, comparison, selection and moves (floating point and conversions: `lower_float`, `lower_convert`)."""

from __future__ import annotations

from . import lower_convert, lower_float  # noqa: F401 (lower_convert registers)
from .lower import SINK, WINDOW_LOCAL, WINDOW_PARAM, WINDOW_SHARED, Lowering, lowers
from .lower_common import (
    BITS,
    BOOLEANS,
    FLOATS,
    arity,
    bits,
    predicate,
    read,
    split,
    temporary,
    write,
)
from .ptx import SINK as PTX_SINK
from .ptx import Imm, Instr, Operand, Pair, Vec

ARITHMETIC = ("u16", "s16", "u32", "s32", "u64", "s64")
PACKED = ("u16x2", "s16x2")
CARRY_FLAG = 1000
"""The scratch predicate that is the condition code register's carry."""


def _is_float(ins: Instr) -> bool:
    return any(p in FLOATS for p in ins.parts[1:])


def _simple(low: Lowering, ins: Instr, fn: str, result: str, *sources: str, imm: tuple[int, ...] = ()) -> None:
    """One function of the core: destination of the type `result`, sources of these."""
    arity(low, ins, 1 + len(sources))
    args = [read(low, a, t) for a, t in zip(ins.args[1:], sources, strict=True)]
    low.emit(fn, [write(low, ins.args[0], bits(result)), *args], imm)


# ---- integer arithmetic ----------------------------------------------------------------------------------------------------------
@lowers("add", "sub")
def _add(low: Lowering, ins: Instr) -> None:
    if _is_float(ins):
        lower_float.arithmetic(low, ins)
        return
    if "cc" in ins.parts:
        _carry(low, ins)
        return
    (t,), mods = split(low, ins, (*ARITHMETIC, *(PACKED if ins.op == "add" else ())), {"sat"})
    if "sat" in mods:
        if t != "s32":
            raise low.unsupported(".sat is for .s32")
        _simple(low, ins, f"{ins.op}.sat.s32", t, t, t)
    else:
        _simple(low, ins, f"{ins.op}.{'16x2' if t in PACKED else bits(t)}", t, t, t)


@lowers("addc", "subc")
def _carry(low: Lowering, ins: Instr) -> None:
    (t,), mods = split(low, ins, ("u32", "s32", "u64", "s64"), {"cc"})
    arity(low, ins, 3)
    args = [
        write(low, ins.args[0], bits(t)),
        read(low, ins.args[1], t),
        read(low, ins.args[2], t),
        low.scratch(1, CARRY_FLAG),
    ]
    low.emit(f"carry.{bits(t)}", args, [ins.op.endswith("c"), "cc" in mods, ins.op.startswith("sub")])


@lowers("mul")
def _mul(low: Lowering, ins: Instr) -> None:
    if _is_float(ins):
        lower_float.arithmetic(low, ins)
        return
    (t,), mods = split(low, ins, ARITHMETIC, {"lo", "hi", "wide"})
    if "wide" in mods:
        _simple(low, ins, f"mul.wide.{t}", _wide(low, t), t, t)
    else:
        _simple(low, ins, f"mul.hi.{t}" if "hi" in mods else f"mul.lo.{bits(t)}", t, t, t)


def _wide(low: Lowering, t: str) -> str:
    if bits(t) == 64:
        raise low.unsupported(".wide is for 16 and 32 bits")
    return f"{t[0]}{2 * bits(t)}"


@lowers("mad", "madc")
def _mad(low: Lowering, ins: Instr) -> None:
    if _is_float(ins):
        lower_float.arithmetic(low, ins)
        return
    (t,), mods = split(low, ins, ARITHMETIC, {"lo", "hi", "wide", "sat", "cc"})
    if ins.op == "madc" or "cc" in mods:
        if mods - {"lo", "hi", "cc"} or bits(t) == 16:
            raise low.unsupported("a carry is for .lo and .hi of 32 and 64 bits")
        arity(low, ins, 4)
        args = [write(low, ins.args[0], bits(t)), *(read(low, a, t) for a in ins.args[1:4]), low.scratch(1, CARRY_FLAG)]
        part = 0 if "hi" not in mods else 1 if t[0] == "u" else 2
        low.emit(f"mad.carry.{bits(t)}", args, [ins.op == "madc", "cc" in mods, part])
    elif "sat" in mods:
        if t != "s32" or "hi" not in mods:
            raise low.unsupported(".sat is for .hi.s32")
        _simple(low, ins, "mad.hi.sat.s32", t, t, t, t)
    elif "wide" in mods:
        d = _wide(low, t)
        _simple(low, ins, f"mad.wide.{t}", d, t, t, d)
    else:
        _simple(low, ins, f"mad.hi.{t}" if "hi" in mods else f"mad.lo.{bits(t)}", t, t, t, t)


@lowers("mul24", "mad24")
def _mul24(low: Lowering, ins: Instr) -> None:
    (t,), mods = split(low, ins, ("u32", "s32"), {"lo", "hi", "sat"})
    half = "hi" if "hi" in mods else "lo"
    if ins.op == "mad24":
        if "sat" in mods and (t, half) != ("s32", "hi"):
            raise low.unsupported(".sat is for .hi.s32")
        _simple(low, ins, "mad24.hi.sat.s32" if "sat" in mods else f"mad24.{half}.{t}", t, t, t, t)
    elif "sat" in mods:
        raise low.unsupported("modifier .sat")
    else:
        _simple(low, ins, "mul24.lo" if (half, t) == ("lo", "u32") else f"mul24.{half}.{t}", t, t, t)


@lowers("sad")
def _sad(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, ARITHMETIC, ())
    _simple(low, ins, f"sad.{t}", t, t, t, t)


@lowers("div", "rem")
def _div(low: Lowering, ins: Instr) -> None:
    if _is_float(ins):
        lower_float.divide(low, ins)
        return
    (t,), _ = split(low, ins, ARITHMETIC, ())
    _simple(low, ins, f"{ins.op}.{t}", t, t, t)


@lowers("neg", "abs")
def _neg(low: Lowering, ins: Instr) -> None:
    if _is_float(ins):
        lower_float.sign(low, ins)
        return
    (t,), _ = split(low, ins, ("s16", "s32", "s64"), ())
    _simple(low, ins, f"abs.{t}" if ins.op == "abs" else f"neg.{bits(t)}", t, t)


@lowers("min", "max")
def _min(low: Lowering, ins: Instr) -> None:
    if _is_float(ins):
        lower_float.minmax(low, ins)
        return
    (t,), mods = split(low, ins, ARITHMETIC + PACKED, {"relu"})
    if mods and t not in ("s32", "s16x2"):
        raise low.unsupported(".relu is for .s32 and .s16x2")
    _simple(low, ins, f"{ins.op}.{'relu.' if mods else ''}{t}", t, t, t)


@lowers("popc", "clz")
def _popc(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, ("b32", "b64"), ())
    _simple(low, ins, f"{ins.op}.{bits(t)}", "b32", t)


@lowers("brev")
def _brev(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, ("b32", "b64"), ())
    _simple(low, ins, f"brev.{bits(t)}", t, t)


@lowers("bfind")
def _bfind(low: Lowering, ins: Instr) -> None:
    (t,), mods = split(low, ins, ("u32", "s32", "u64", "s64"), {"shiftamt"})
    _simple(low, ins, f"bfind.{t}", "b32", t, imm=(int("shiftamt" in mods),))


@lowers("fns")
def _fns(low: Lowering, ins: Instr) -> None:
    split(low, ins, ("b32",), ())
    _simple(low, ins, "fns", "b32", "b32", "b32", "b32")


@lowers("bfe")
def _bfe(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, ("u32", "s32", "u64", "s64"), ())
    _simple(low, ins, f"bfe.{t}", t, t, "u32", "u32")


@lowers("bfi")
def _bfi(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, ("b32", "b64"), ())
    _simple(low, ins, f"bfi.{bits(t)}", t, t, t, "u32", "u32")


@lowers("szext")
def _szext(low: Lowering, ins: Instr) -> None:
    (t,), mods = split(low, ins, ("u32", "s32"), {"clamp", "wrap"})
    _simple(low, ins, "szext", t, t, "u32", imm=(int("clamp" in mods), int(t == "s32")))


@lowers("bmsk")
def _bmsk(low: Lowering, ins: Instr) -> None:
    _, mods = split(low, ins, ("b32",), {"clamp", "wrap"})
    _simple(low, ins, "bmsk", "b32", "b32", "b32", imm=(int("clamp" in mods),))


@lowers("dp4a", "dp2a")
def _dot(low: Lowering, ins: Instr) -> None:
    (a, b), mods = split(low, ins, ("u32", "s32"), {"lo", "hi"} if ins.op == "dp2a" else (), count=2)
    _simple(
        low, ins, ins.op, "b32", "b32", "b32", "b32", imm=(int(a == "s32"), int(b == "s32"), 16 if "hi" in mods else 0)
    )


# ---- logic and shifts ------------------------------------------------------------------------------------------------------------
@lowers("and", "or", "xor", "not", "cnot")
def _logic(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, BITS if ins.op == "cnot" else ("pred", *BITS), ())
    unary = ins.op in ("not", "cnot")
    if t != "pred":
        _simple(low, ins, f"{ins.op}.{bits(t)}", t, t, *(() if unary else (t,)))
        return
    arity(low, ins, 2 if unary else 3)
    a, not_a = predicate(low, ins.args[1])
    b, not_b = (a, not_a) if unary else predicate(low, ins.args[2])
    operator = 0 if unary else 1 + BOOLEANS.index(ins.op)
    low.emit("pred", [low.target(ins.args[0], 1), a, b], [operator, not_a, not_b, -int(unary)])


@lowers("shl", "shr")
def _shift(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, BITS if ins.op == "shl" else (*BITS, *ARITHMETIC), ())
    fn = f"shl.{bits(t)}" if ins.op == "shl" else f"shr.{'s' if t[0] == 's' else 'u'}{bits(t)}"
    _simple(low, ins, fn, t, t, "u32")


@lowers("shf")
def _shf(low: Lowering, ins: Instr) -> None:
    _, mods = split(low, ins, ("b32",), {"l", "r", "clamp", "wrap"})
    if len(mods) != 2:
        raise low.unsupported("shf needs a direction and a mode")
    _simple(
        low,
        ins,
        f"shf.{'l' if 'l' in mods else 'r'}.{'clamp' if 'clamp' in mods else 'wrap'}",
        "b32",
        "b32",
        "b32",
        "u32",
    )


@lowers("lop3")
def _lop3(low: Lowering, ins: Instr) -> None:
    _, mods = split(low, ins, ("b32",), {"and", "or"})
    arity(low, ins, 6 if mods else 5)
    d, p = (ins.args[0].a, ins.args[0].b) if isinstance(ins.args[0], Pair) else (ins.args[0], None)
    if (p is None) == bool(mods) or not isinstance(ins.args[4], Imm):
        raise low.unsupported("lop3 takes a table as immediate, and a second destination with .and or .or")
    sources = [read(low, a, "b32") for a in ins.args[1:4]]
    if p is None:
        low.emit("lop3", [write(low, d, 32), *sources], [ins.args[4].value])
        return
    # The sources and q are read before either destination is written.
    result = temporary(low, "lop3", 32, sources, [ins.args[4].value])
    q, negated = predicate(low, ins.args[5])
    if d is not PTX_SINK:
        low.emit("mov.32", [low.target(d, 32), result])
    low.emit("lop3.pred", [low.target(p, 1), result, q], [1 if "and" in mods else 2, negated])


PRMT_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


@lowers("prmt")
def _prmt(low: Lowering, ins: Instr) -> None:
    _, mods = split(low, ins, ("b32",), PRMT_MODES)
    if mods:
        _simple(low, ins, "prmt.mode", "b32", "b32", "b32", "b32", imm=(PRMT_MODES.index(mods.pop()),))
    else:
        _simple(low, ins, "prmt", "b32", "b32", "b32", "b32")


# ---- comparison and selection ----------------------------------------------------------------------------------------------------
# Operator: the core's comparison, 1 if its operands are exchanged, 1 if its result is inverted.
_INT_COMPARE = {
    "eq": ("eq", 0, 0), "ne": ("eq", 0, 1), "lt": ("lt", 0, 0), "ge": ("lt", 0, 1), "gt": ("lt", 1, 0), "le": ("lt", 1, 1),
    "lo": ("lt", 0, 0), "hs": ("lt", 0, 1), "hi": ("lt", 1, 0), "ls": ("lt", 1, 1),
}  # fmt: skip
_FLOAT_COMPARE = {
    "eq": ("eq", 0, 0), "neu": ("eq", 0, 1), "ne": ("ne", 0, 0), "equ": ("ne", 0, 1), "lt": ("lt", 0, 0), "geu": ("lt", 0, 1),
    "gt": ("lt", 1, 0), "leu": ("lt", 1, 1), "le": ("le", 0, 0), "gtu": ("le", 0, 1), "ge": ("le", 1, 0), "ltu": ("le", 1, 1),
    "num": ("num", 0, 0), "nan": ("num", 0, 1),
}  # fmt: skip
_COMPARED = (*BITS, *ARITHMETIC, "f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


def _compare(
    low: Lowering,
    operator: str,
    type_: str,
    ftz: bool,
    a: int,
    b: int,
    p: int,
    q: int = SINK,
    boolean: int = 0,
    c: tuple[int, int] | None = None,
) -> None:
    """p = (a operator b) boolean c, q the same of the inverted comparison."""
    if type_ in ("f32", "f64", "f16", "bf16"):
        table, suffix = _FLOAT_COMPARE, type_ + ("_ftz" if ftz else "")
    else:
        table, suffix = (
            _INT_COMPARE,
            ("s" if type_[0] == "s" else "u") + str(bits(type_)),
        )
    if ftz and type_ not in ("f32", "f16"):
        raise low.unsupported(f".ftz of .{type_}")
    if operator in ("lo", "ls", "hi", "hs") and type_[0] != "u":
        raise low.unsupported(f"comparison .{operator} of .{type_}")
    if operator not in table or (type_[0] == "b" and type_ != "bf16" and operator not in ("eq", "ne")):
        raise low.unsupported(f"comparison .{operator} of .{type_}")
    name, exchanged, inverted = table[operator]
    args = [p, b, a] if exchanged else [p, a, b]
    if q == SINK and not boolean:
        low.emit(f"setp.{name}.{suffix}", args, [-inverted])
    else:
        other, negated = c or (p, 0)
        low.emit(f"setp.{name}.{suffix}", [*args, q, other], [-inverted, boolean, negated])


def _comparison(low: Lowering, ins: Instr, count: int) -> tuple[str, list[str], bool, int, tuple[int, int] | None]:
    """Operator, types, .ftz, boolean operator and its predicate of setp and set."""
    operators = set(_INT_COMPARE) | set(_FLOAT_COMPARE)
    rest = Instr(ins.op, [ins.op, *ins.parts[2:]], ins.args)
    types, mods = split(low, rest, _COMPARED, {"ftz", *BOOLEANS}, count=count)
    booleans = mods & set(BOOLEANS)
    if ins.parts[1] not in operators or len(booleans) > 1:
        raise low.unsupported(f"comparison .{ins.parts[1]}")
    arity(low, ins, 4 if booleans else 3)
    if not booleans:
        return ins.parts[1], types, "ftz" in mods, 0, None
    return ins.parts[1], types, "ftz" in mods, 1 + BOOLEANS.index(booleans.pop()), predicate(low, ins.args[3])


def _halves(low: Lowering, a: Operand, which: int) -> tuple[int, int]:
    """The two halves of a packed operand."""
    x = read(low, a, "b32")
    return temporary(low, "half", 16, [x], [0], which=which), temporary(low, "half", 16, [x], [16], which=which + 1)


@lowers("setp")
def _setp(low: Lowering, ins: Instr) -> None:
    operator, (t,), ftz, boolean, c = _comparison(low, ins, 1)
    d = ins.args[0]
    p, q = (low.target(d.a, 1), low.target(d.b, 1)) if isinstance(d, Pair) else (low.target(d, 1), SINK)
    if t.endswith("x2"):
        a, b = _halves(low, ins.args[1], 0), _halves(low, ins.args[2], 2)
        both = low.scratch(1, 1), low.scratch(1, 2)
        for i in range(2):
            _compare(low, operator, t[:-2], ftz, a[i], b[i], both[i], SINK, boolean, c)
        for target, value in zip((p, q), both, strict=True):
            low.emit("pred", [target, value, value])
        return
    _compare(low, operator, t, ftz, read(low, ins.args[1], t), read(low, ins.args[2], t), p, q, boolean, c)


_ONE = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}


def _set_types(low: Lowering, dt: str, st: str, ftz: bool) -> None:
    """Refuses what ptxas does (PTX ISA: "Comparison and Selection Instructions: set", and its half precision form)."""
    halves = ("f16", "bf16")
    if st.endswith("x2"):
        known = dt in ("u32", "s32", st)
    elif dt in ("u16", "s16"):
        known = st in halves
    elif dt == "f32":
        known = st not in halves
    else:
        known = dt in ("u32", "s32", "f16", "bf16") and (dt, st) != ("f16", "bf16")
    if not known or (ftz and (st not in ("f32", "f16", "f16x2") or dt == "bf16")):
        raise low.unsupported(f"set{'.ftz' if ftz else ''} from .{st} to .{dt}")


@lowers("set")
def _set(low: Lowering, ins: Instr) -> None:
    operator, (dt, st), ftz, boolean, c = _comparison(low, ins, 2)
    _set_types(low, dt, st, ftz)
    d, p = write(low, ins.args[0], bits(dt)), low.scratch(1, 1)
    if not st.endswith("x2"):
        _compare(low, operator, st, ftz, read(low, ins.args[1], st), read(low, ins.args[2], st), p, SINK, boolean, c)
        yes = _ONE.get(dt, -1)
        low.emit(f"selp.{bits(dt)}", [d, low.constant(yes, bits(dt)), low.constant(0, bits(dt)), p])
        return
    a, b = _halves(low, ins.args[1], 0), _halves(low, ins.args[2], 2)
    yes = low.constant(_ONE[st[:-2]] if dt == st else -1, 16)
    parts = []
    for i in range(2):
        _compare(low, operator, st[:-2], ftz, a[i], b[i], p, SINK, boolean, c)
        parts.append(temporary(low, "selp.16", 16, [yes, low.constant(0, 16), p], which=4 + i))
    low.emit("pack.32.16", [d, *parts])


@lowers("selp")
def _selp(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, (*BITS, *ARITHMETIC, "f32", "f64"), ())
    arity(low, ins, 4)
    p, negated = low.predicate(ins.args[3])
    a, b = (read(low, x, t) for x in ins.args[1:3])
    low.emit(f"selp.{bits(t)}", [write(low, ins.args[0], bits(t)), *((b, a) if negated else (a, b)), p])


@lowers("slct")
def _slct(low: Lowering, ins: Instr) -> None:
    rest = Instr(ins.op, [ins.op, *ins.parts[1:-1]], ins.args)
    (t,), mods = split(low, rest, (*BITS, *ARITHMETIC, "f32", "f64"), {"ftz"})
    by = ins.parts[-1]
    if by not in ("s32", "f32") or (mods and by != "f32"):
        raise low.unsupported(f"slct by .{by}")
    _simple(low, ins, f"slct.{by}{'.ftz' if mods else ''}.{bits(t)}", t, t, t, by)


# ---- moves and addresses ---------------------------------------------------------------------------------------------------------
@lowers("mov")
def _mov(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(
        low,
        ins,
        ("pred", "b8", *BITS, "b128", *ARITHMETIC, "f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2"),
        (),
    )
    arity(low, ins, 2)
    d, a = ins.args
    if t == "pred":
        p, negated = predicate(low, a)
        low.emit("pred", [low.target(d, 1), p, p], [0, negated])
    elif isinstance(d, Vec):
        _unpack(low, d.items, a, bits(t))
    elif isinstance(a, Vec):
        _pack(low, d, a.items, bits(t))
    elif t == "b128":
        low.emit("part.128", [low.target(d, 128), low.operand(a, "b128")], [0, 16])
    else:
        width = bits(t)
        low.emit(f"mov.{max(width, 16)}", [write(low, d, width), read(low, a, t)])


def _elements(low: Lowering, count: int, width: int) -> int:
    """The width of a vector's elements."""
    element = width // count
    if count not in (2, 4) or element not in (8, 16, 32, 64) or (width, element) == (64, 8):
        raise low.unsupported(f"{count} elements in {width} bits")
    return element


def _pack(low: Lowering, d: Operand, items: tuple[Operand, ...], width: int) -> None:
    element = _elements(low, len(items), width)
    sources = [read(low, x, f"b{element}") for x in items]
    fn = "pack.128" if width == 128 else f"pack.{width}.{element}"
    low.emit(fn, [low.target(d, width), *sources])


def _unpack(low: Lowering, items: tuple[Operand, ...], a: Operand, width: int) -> None:
    element = _elements(low, len(items), width)
    source = low.operand(a, "b128") if width == 128 else read(low, a, f"b{width}")
    for i, item in enumerate(items):
        if item is PTX_SINK:
            continue
        if width == 128:
            low.emit("part.128", [low.target(item, element), source], [i * element // 8, element // 8])
        else:
            low.emit(f"part.{width}.{element}", [low.target(item, element), source], [i * element])


_WINDOWS = {"shared": WINDOW_SHARED, "shared::cta": WINDOW_SHARED, "shared::cluster": WINDOW_SHARED, "local": WINDOW_LOCAL,
            "param": WINDOW_PARAM, "param::entry": WINDOW_PARAM, "global": 0, "const": 0}  # fmt: skip


@lowers("cvta")
def _cvta(low: Lowering, ins: Instr) -> None:
    _, mods = split(low, ins, ("u64",), {"to", *_WINDOWS})
    arity(low, ins, 2)
    space = next((s for s in _WINDOWS if s in mods), "")
    args = [write(low, ins.args[0], 64), read(low, ins.args[1], "u64")]
    if "to" not in mods:
        low.emit("or.imm.64", args, [_WINDOWS.get(space, 0)])
    elif space.startswith("shared"):
        low.emit("and.imm.64", args, [0xFFFFFFFF])
    else:
        low.emit("mov.64", args)  # the other spaces are told apart by the windows of their addresses


@lowers("isspacep")
def _isspacep(low: Lowering, ins: Instr) -> None:
    numbers = {
        "global": 0,
        "shared": 1,
        "shared::cta": 1,
        "shared::cluster": 1,
        "param": 2,
        "param::entry": 2,
        "local": 3,
        "const": 4,
    }
    _, mods = split(low, ins, (), set(numbers), count=0)
    arity(low, ins, 2)
    space = mods.pop() if len(mods) == 1 else ""
    if not space:
        raise low.unsupported("isspacep needs one state space")
    own = space in ("shared", "shared::cta")
    low.emit("in.space", [low.target(ins.args[0], 1), read(low, ins.args[1], "u64")], [numbers[space], int(own)])


@lowers("copysign")
def _copysign(low: Lowering, ins: Instr) -> None:
    (t,), _ = split(low, ins, ("f32", "f64"), ())
    _simple(low, ins, f"copysign.{t}", t, t, t)


_CLASSES = {
    "finite": 0b00111,
    "infinite": 0b01000,
    "number": 0b01111,
    "notanumber": 0b10000,
    "normal": 0b00101,
    "subnormal": 0b00010,
}


@lowers("testp")
def _testp(low: Lowering, ins: Instr) -> None:
    (t,), mods = split(low, ins, ("f32", "f64"), set(_CLASSES))
    arity(low, ins, 2)
    if len(mods) != 1:
        raise low.unsupported("testp needs one property")
    low.emit(f"testp.{t}", [low.target(ins.args[0], 1), read(low, ins.args[1], t)], [_CLASSES[mods.pop()]])
