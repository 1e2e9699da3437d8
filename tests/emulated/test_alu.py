"""Integer, logic, comparison, selection and move instructions against references on Python integers (floats: `test_alu_float`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from alu_reference import FORMATS, check, columns, execute, is_nan, samples, width

import ptxemu

TYPES = ("u16", "s16", "u32", "s32", "u64", "s64")


def signed(x: int, w: int) -> int:
    return x - (1 << w) if x >> (w - 1) else x


def number(x: int, type_: str) -> int:
    return signed(x, width(type_)) if type_[0] == "s" else x


def wrapped(value: int, w: int) -> int:
    return value & (1 << w) - 1


def clamped(value: int, type_: str) -> int:
    w = width(type_)
    low, high = (0, (1 << w) - 1) if type_[0] == "u" else (-(1 << w - 1), (1 << w - 1) - 1)
    return wrapped(max(low, min(high, value)), w)


def quotient(a: int, b: int) -> int:
    """Rounded towards zero; -1 for division by zero (all ones, as on the device)."""
    return -1 if b == 0 else abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


def arithmetic(type_: str, f: Callable[..., int], to: int | None = None) -> Callable[..., int]:
    return lambda *x: wrapped(f(*(number(v, type_) for v in x)), to or width(type_))


BINARY = {
    "add.{t}": lambda a, b: a + b,
    "sub.{t}": lambda a, b: a - b,
    "mul.lo.{t}": lambda a, b: a * b,
    "min.{t}": min,
    "max.{t}": max,
    "div.{t}": quotient,
    "rem.{t}": lambda a, b: -1 if b == 0 else a - b * quotient(a, b),
}


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("form", BINARY)
def test_binary(form: str, type_: str) -> None:
    check(form.format(t=type_) + " {d}, {a}, {b}", type_, [type_] * 2, arithmetic(type_, BINARY[form]))


@pytest.mark.parametrize("type_", TYPES)
def test_multiply(type_: str) -> None:
    w = width(type_)
    check(f"mul.hi.{type_} {{d}}, {{a}}, {{b}}", type_, [type_] * 2, arithmetic(type_, lambda a, b: a * b >> w))
    check(
        f"mad.lo.{type_} {{d}}, {{a}}, {{b}}, {{c}}", type_, [type_] * 3, arithmetic(type_, lambda a, b, c: a * b + c)
    )
    check(
        f"mad.hi.{type_} {{d}}, {{a}}, {{b}}, {{c}}",
        type_,
        [type_] * 3,
        arithmetic(type_, lambda a, b, c: (a * b >> w) + c),
    )
    check(
        f"sad.{type_} {{d}}, {{a}}, {{b}}, {{c}}", type_, [type_] * 3, arithmetic(type_, lambda a, b, c: abs(a - b) + c)
    )


@pytest.mark.parametrize("type_", TYPES[:4])
def test_wide(type_: str) -> None:
    wide = f"{type_[0]}{2 * width(type_)}"
    check(
        f"mul.wide.{type_} {{d}}, {{a}}, {{b}}", wide, [type_] * 2, arithmetic(type_, lambda a, b: a * b, width(wide))
    )
    check(
        f"mad.wide.{type_} {{d}}, {{a}}, {{b}}, {{c}}", wide, [type_, type_, wide],
        lambda a, b, c: wrapped(number(a, type_) * number(b, type_) + c, width(wide)),
    )  # fmt: skip


def top24(x: int, type_: str) -> int:
    return signed(x & 0xFFFFFF, 24) if type_ == "s32" else x & 0xFFFFFF


@pytest.mark.parametrize("type_", ["u32", "s32"])
def test_24_bits(type_: str) -> None:
    def product(a: int, b: int) -> int:
        return top24(a, type_) * top24(b, type_)

    check(f"mul24.lo.{type_} {{d}}, {{a}}, {{b}}", type_, [type_] * 2, lambda a, b: wrapped(product(a, b), 32))
    check(f"mul24.hi.{type_} {{d}}, {{a}}, {{b}}", type_, [type_] * 2, lambda a, b: wrapped(product(a, b) >> 16, 32))
    check(
        f"mad24.lo.{type_} {{d}}, {{a}}, {{b}}, {{c}}",
        type_,
        [type_] * 3,
        lambda a, b, c: wrapped(product(a, b) + c, 32),
    )
    check(
        f"mad24.hi.{type_} {{d}}, {{a}}, {{b}}, {{c}}",
        type_,
        [type_] * 3,
        lambda a, b, c: wrapped((product(a, b) >> 16) + c, 32),
    )


def test_saturating() -> None:
    s = ["s32"] * 3
    check("add.sat.s32 {d}, {a}, {b}", "s32", s[:2], lambda a, b: clamped(signed(a, 32) + signed(b, 32), "s32"))
    check("sub.sat.s32 {d}, {a}, {b}", "s32", s[:2], lambda a, b: clamped(signed(a, 32) - signed(b, 32), "s32"))
    high = lambda a, b: signed(a, 32) * signed(b, 32) >> 32  # noqa: E731
    check("mad.hi.sat.s32 {d}, {a}, {b}, {c}", "s32", s, lambda a, b, c: clamped(high(a, b) + signed(c, 32), "s32"))
    check(
        "mad24.hi.sat.s32 {d}, {a}, {b}, {c}", "s32", s,
        lambda a, b, c: clamped(signed(wrapped(top24(a, "s32") * top24(b, "s32") >> 16, 32), 32) + signed(c, 32), "s32"),
    )  # fmt: skip
    for op, f in (("min", min), ("max", max)):
        check(
            f"{op}.relu.s32 {{d}}, {{a}}, {{b}}",
            "s32",
            s[:2],
            lambda a, b, f=f: max(0, f(signed(a, 32), signed(b, 32))),
        )


def both_halves(f: Callable[..., int]) -> Callable[..., int]:
    return lambda *x: f(*(v & 0xFFFF for v in x)) | f(*(v >> 16 for v in x)) << 16


@pytest.mark.parametrize("type_", ["u16x2", "s16x2"])
def test_packed_integers(type_: str) -> None:
    one = type_[:-2]
    forms = {"add": lambda a, b: a + b, "min": min, "max": max}
    for op, f in forms.items():
        check(f"{op}.{type_} {{d}}, {{a}}, {{b}}", "b32", ["b32"] * 2, both_halves(arithmetic(one, f)))
    if type_ == "s16x2":
        for op, f in (("min", min), ("max", max)):
            check(
                f"{op}.relu.s16x2 {{d}}, {{a}}, {{b}}",
                "b32",
                ["b32"] * 2,
                both_halves(arithmetic(one, lambda a, b, f=f: max(0, f(a, b)))),
            )


@pytest.mark.parametrize("type_", ["s16", "s32", "s64"])
def test_unary(type_: str) -> None:
    check(f"neg.{type_} {{d}}, {{a}}", type_, [type_], arithmetic(type_, lambda a: -a))
    check(f"abs.{type_} {{d}}, {{a}}", type_, [type_], arithmetic(type_, abs))


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_carry_chains(type_: str) -> None:
    """Sums, differences and products of twice the width."""
    w = width(type_)
    a, b, c, e = columns([type_] * 4, 256, 3)
    pair = [(x | y << w, u | v << w) for x, y, u, v in zip(a, b, c, e, strict=True)]
    sources = [(type_, v) for v in (a, b, c, e)]
    for op, f in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y)):
        text = f"{op}.cc.{type_} %d0, %a0, %a2; {op}c.cc.{type_} %d1, %a1, %a3; {op}c.{type_} %d2, 0, 0;"
        low, high, carry = execute(text, [type_] * 3, sources)
        for x, y, z, (p, q) in zip(low, high, carry, pair, strict=True):
            total = f(p, q)
            assert x | y << w == wrapped(total, 2 * w)
            assert signed(z, w) == total >> 2 * w  # a carry of 1, a borrow of -1
    text = f"mad.lo.cc.{type_} %d0, %a0, %a1, %a2; madc.hi.cc.{type_} %d1, %a0, %a1, %a3; addc.{type_} %d2, 0, 0;"
    low, high, carry = execute(text, [type_] * 3, sources)
    for i in range(len(a)):
        product = number(a[i], type_) * number(b[i], type_)
        first = (product & (1 << w) - 1) + c[i]
        second = (wrapped(product >> w, w)) + e[i] + (first >> w)
        assert (low[i], high[i], carry[i]) == (wrapped(first, w), wrapped(second, w), second >> w)
    text = f"add.cc.{type_} %d0, %a0, %a1; madc.lo.{type_} %d1, %a2, %a3, 1;"
    _, found = execute(text, [type_] * 2, sources)
    assert found == [wrapped(z * u + 1 + (x + y >> w), w) for x, y, z, u in zip(a, b, c, e, strict=True)]


def test_carry_is_kept_outside_the_guard() -> None:
    a, b, _ = columns(["u32", "u32", "u32"], 256)
    text = "add.cc.u32 %d0, %a0, %a1; @%g add.cc.u32 %d0, 0, 0; addc.u32 %d1, 0, 0;"
    guard = [i % 3 == 0 for i in range(256)]
    _, carry = execute(text, ["u32"] * 2, [("u32", a), ("u32", b)], guard=guard)
    assert carry == [0 if g else x + y >> 32 for x, y, g in zip(a, b, guard, strict=True)]


# ---- bits ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("w", [32, 64])
def test_counting(w: int) -> None:
    b = f"b{w}"
    check(f"popc.{b} {{d}}, {{a}}", "b32", [b], lambda a: bin(a).count("1"))
    check(f"clz.{b} {{d}}, {{a}}", "b32", [b], lambda a: w - a.bit_length())
    check(f"brev.{b} {{d}}, {{a}}", b, [b], lambda a: int(f"{a:0{w}b}"[::-1], 2))
    for sign, shift in itertools.product("us", (False, True)):

        def find(a: int, sign: str = sign, shift: bool = shift) -> int:
            a = wrapped(~a, w) if sign == "s" and a >> (w - 1) else a
            return 0xFFFFFFFF if a == 0 else w - a.bit_length() if shift else a.bit_length() - 1

        check(f"bfind.{'shiftamt.' if shift else ''}{sign}{w} {{d}}, {{a}}", "b32", [b], find)


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_bit_fields(type_: str) -> None:
    w = width(type_)
    a, b, c, e = columns([type_, type_, "u32", "u32"], 512, 5)
    positions = [x % 70 if i % 4 else x for i, x in enumerate(c)]
    lengths = [x % 70 if i % 3 else x for i, x in enumerate(e)]

    def extract(a: int, pos: int, length: int) -> int:
        pos, length = (x & 255 if w == 32 else min(x, 255) for x in (pos, length))
        sign = a >> min(pos + length - 1, w - 1) & 1 if type_[0] == "s" and length else 0
        return sum((a >> (pos + i) & 1 if i < length and pos + i < w else sign) << i for i in range(w))

    def insert(a: int, b: int, pos: int, length: int) -> int:
        pos, length = (x & 255 if w == 32 else min(x, 255) for x in (pos, length))
        for i in range(length):
            if pos + i < w:
                b = b & ~(1 << pos + i) | (a >> i & 1) << pos + i
        return b

    check(
        f"bfe.{type_} {{d}}, {{a}}, {{b}}, {{c}}", type_, [type_, "u32", "u32"], extract, values=[a, positions, lengths]
    )
    if type_[0] == "u":
        kinds = [type_, type_, "u32", "u32"]
        check(f"bfi.b{w} {{d}}, {{a}}, {{b}}, {{c}}, {{e}}", type_, kinds, insert, values=[a, b, positions, lengths])


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_extension_and_masks(mode: str) -> None:
    small = [i % 40 if i % 5 else x for i, x in enumerate(samples("u32", 512, 8))]
    a = columns(["u32"], 512)[0]
    for type_ in ("u32", "s32"):

        def extend(a: int, n: int, type_: str = type_) -> int:
            if n >= 32 and mode == "clamp":
                return a
            n %= 32
            a &= (1 << n) - 1
            return wrapped(signed(a, n), 32) if n and type_ == "s32" else a

        check(f"szext.{mode}.{type_} {{d}}, {{a}}, {{b}}", type_, [type_, "u32"], extend, values=[a, small])

    def mask(at: int, n: int) -> int:
        if mode == "clamp":
            return 0 if at >= 32 else wrapped(((1 << min(n, 32)) - 1) << at, 32)
        return wrapped(((1 << n % 32) - 1) << at % 32, 32)

    check(f"bmsk.{mode}.b32 {{d}}, {{a}}, {{b}}", "b32", ["b32", "b32"], mask, values=[small[::-1], small])


def test_find_nth_set() -> None:
    masks = samples("b32", 512, 9)
    bases = [i % 32 for i in range(512)]
    offsets = [wrapped(i % 13 - 6, 32) for i in range(512)]

    def nth(mask: int, base: int, offset: int) -> int:
        offset = signed(offset, 32)
        order = range(base, 32) if offset >= 0 else range(base, -1, -1)
        hits = [i for i in order if mask >> i & 1]
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        return hits[abs(offset) - 1] if len(hits) >= abs(offset) else 0xFFFFFFFF

    check("fns.b32 {d}, {a}, {b}, {c}", "b32", ["b32"] * 3, nth, values=[masks, bases, offsets])


@pytest.mark.parametrize(("a", "b"), list(itertools.product(("u32", "s32"), repeat=2)))
def test_dot_products(a: str, b: str) -> None:
    def part(x: int, i: int, w: int, type_: str) -> int:
        x = x >> w * i & (1 << w) - 1
        return signed(x, w) if type_ == "s32" else x

    kinds = ["b32"] * 3
    check(
        f"dp4a.{a}.{b} {{d}}, {{a}}, {{b}}, {{c}}", "b32", kinds,
        lambda x, y, z: wrapped(z + sum(part(x, i, 8, a) * part(y, i, 8, b) for i in range(4)), 32),
    )  # fmt: skip
    for mode, first in (("lo", 0), ("hi", 2)):
        check(
            f"dp2a.{mode}.{a}.{b} {{d}}, {{a}}, {{b}}, {{c}}", "b32", kinds,
            lambda x, y, z, first=first: wrapped(z + sum(part(x, i, 16, a) * part(y, first + i, 8, b) for i in range(2)), 32),
        )  # fmt: skip


# ---- logic and shifts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", ["b16", "b32", "b64", "pred"])
def test_logic(type_: str) -> None:
    w = width(type_)
    for op, f in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)):
        values = [[i >> 1 & 1 for i in range(64)], [i & 1 for i in range(64)]] if w == 1 else None
        check(f"{op}.{type_} {{d}}, {{a}}, {{b}}", type_, [type_] * 2, f, values=values)
    values = [[i & 1 for i in range(64)]] if w == 1 else None
    check(f"not.{type_} {{d}}, {{a}}", type_, [type_], lambda a: wrapped(~a, w), values=values)
    if w > 1:
        check(f"cnot.{type_} {{d}}, {{a}}", type_, [type_], lambda a: int(a == 0))


@pytest.mark.parametrize("w", [16, 32, 64])
def test_shifts(w: int) -> None:
    a = columns([f"b{w}"], 512)[0]
    by = [i % 70 if i % 7 else x for i, x in enumerate(samples("u32", 512, 4))]
    kinds = [f"b{w}", "u32"]
    check(f"shl.b{w} {{d}}, {{a}}, {{b}}", f"b{w}", kinds, lambda a, n: wrapped(a << min(n, w), w), values=[a, by])
    for type_ in (f"u{w}", f"b{w}"):
        check(f"shr.{type_} {{d}}, {{a}}, {{b}}", f"b{w}", kinds, lambda a, n: a >> min(n, w), values=[a, by])
    check(
        f"shr.s{w} {{d}}, {{a}}, {{b}}",
        f"b{w}",
        kinds,
        lambda a, n: wrapped(signed(a, w) >> min(n, w), w),
        values=[a, by],
    )


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shift(mode: str) -> None:
    def left(a: int, b: int, n: int) -> int:
        n = min(n, 32) if mode == "clamp" else n % 32
        return wrapped((b << 32 | a) << n >> 32, 32)

    def right(a: int, b: int, n: int) -> int:
        n = min(n, 32) if mode == "clamp" else n % 32
        return wrapped((b << 32 | a) >> n, 32)

    a, b = columns(["b32", "b32"], 512)
    by = [i % 40 if i % 7 else x for i, x in enumerate(samples("u32", 512, 4))]
    for name, f in (("l", left), ("r", right)):
        check(f"shf.{name}.{mode}.b32 {{d}}, {{a}}, {{b}}, {{c}}", "b32", ["b32", "b32", "u32"], f, values=[a, b, by])


def test_lop3() -> None:
    rng = np.random.default_rng(0)
    a, b, c = ([int(x) for x in rng.integers(0, 1 << 32, 64)] for _ in range(3))
    sources = [("b32", v) for v in (a, b, c)]
    for start in range(0, 256, 32):
        tables = range(start, start + 32)
        text = "".join(f"lop3.b32 %d{i}, %a0, %a1, %a2, {t};" for i, t in enumerate(tables))
        for t, found in zip(tables, execute(text, ["b32"] * 32, sources), strict=True):
            table = [t >> k & 1 for k in range(8)]
            for x, y, z, r in zip(a, b, c, found, strict=True):
                assert r == sum(table[(x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1] << i for i in range(32)), hex(
                    t
                )


@pytest.mark.parametrize("boolean", ["or", "and"])
def test_lop3_with_predicate(boolean: str) -> None:
    a, b = columns(["b32", "b32"], 256)
    b = [x if i % 2 else a[i] for i, x in enumerate(b)]
    q = [i >> 1 & 1 for i in range(256)]
    for not_, sink in itertools.product(("", "!"), (False, True)):
        text = f"lop3.{boolean}.b32 {'_' if sink else '%d0'}|%d1, %a0, %a1, 0, 0x3c, {not_}%a2;"
        d, p = execute(text, ["b32", "pred"], [("b32", a), ("b32", b), ("pred", q)], initial=0)
        f = {"or": lambda x, y: x | y, "and": lambda x, y: x & y}[boolean]
        assert d == [0 if sink else x ^ y for x, y in zip(a, b, strict=True)]
        assert p == [f(int(x != y), z ^ (not_ == "!")) for x, y, z in zip(a, b, q, strict=True)]
    # The predicate may be the one that is combined with, the result one of the sources.
    text = f"mov.b32 %d0, %a0; mov.pred %d1, %a2; lop3.{boolean}.b32 %d0|%d1, %d0, %a1, 0, 0x3c, %d1;"
    d, p = execute(text, ["b32", "pred"], [("b32", a), ("b32", b), ("pred", q)])
    assert d == [x ^ y for x, y in zip(a, b, strict=True)]
    assert p == [f(int(x != y), z) for x, y, z in zip(a, b, q, strict=True)]


PRMT = {
    "f4e": lambda n: [n, n + 1, n + 2, n + 3], "b4e": lambda n: [n, (n - 1) % 8, (n - 2) % 8, (n - 3) % 8], "rc8": lambda n: [n] * 4,
    "ecl": lambda n: [max(i, n) for i in range(4)], "ecr": lambda n: [min(i, n) for i in range(4)],
    "rc16": lambda n: [2 * (n % 2), 2 * (n % 2) + 1] * 2,
}  # fmt: skip


def test_permute() -> None:
    def generic(a: int, b: int, c: int) -> int:
        value = (b << 32 | a).to_bytes(8, "little")
        out = []
        for k in range(4):
            s = c >> 4 * k & 15
            byte = value[s & 7]
            out.append((255 if byte >> 7 else 0) if s & 8 else byte)
        return int.from_bytes(bytes(out), "little")

    check("prmt.b32 {d}, {a}, {b}, {c}", "b32", ["b32"] * 3, generic, n=512)
    for mode, pick in PRMT.items():

        def special(a: int, b: int, c: int, pick: Callable[[int], list[int]] = pick) -> int:
            value = (b << 32 | a).to_bytes(8, "little")
            return int.from_bytes(bytes(value[k] for k in pick(c & 3)), "little")

        check(f"prmt.b32.{mode} {{d}}, {{a}}, {{b}}, {{c}}", "b32", ["b32"] * 3, special)


# ---- comparison and selection ----------------------------------------------------------------------------------------------------
COMPARE: dict[str, Callable[[object, object], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
FLAVOURS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOAT_COMPARE = [*COMPARE, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


def compared(op: str, type_: str, a: int, b: int, ftz: bool = False) -> bool:
    if type_ in FORMATS:
        f = FORMATS[type_]
        if ftz:
            a, b = (x if x & f.infinity else 0 for x in (a, b))
        unordered = is_nan(a, f) or is_nan(b, f)
        if op in ("num", "nan"):
            return unordered == (op == "nan")
        if unordered:
            return op.endswith("u")
        return COMPARE[op.removesuffix("u")](f.value(a), f.value(b))
    return COMPARE[FLAVOURS.get(op, op)](number(a, type_), number(b, type_))


def compared_pairs(type_: str, n: int = 256) -> list[list[int]]:
    a, b = columns([type_, type_], n, 11)
    return [a, [x if i % 4 else y for i, (x, y) in enumerate(zip(b, a, strict=True))]]


def forms_of(type_: str) -> list[str]:
    if type_ in FORMATS:
        return FLOAT_COMPARE
    return ["eq", "ne"] if type_[0] == "b" else [*COMPARE, *(FLAVOURS if type_[0] == "u" else ())]


@pytest.mark.parametrize("type_", ["b16", "b32", "b64", *TYPES, "f32", "f64", "f16", "bf16"])
def test_setp(type_: str) -> None:
    values = compared_pairs(type_)
    for op in forms_of(type_):
        for ftz in (False, True) if type_ in ("f32", "f16") else (False,):
            form = f"setp.{op}.{'ftz.' if ftz else ''}{type_} {{d}}, {{a}}, {{b}}"
            check(
                form,
                "pred",
                [type_] * 2,
                lambda a, b, op=op, ftz=ftz: int(compared(op, type_, a, b, ftz)),
                values=values,
            )


BOOLEAN = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}


@pytest.mark.parametrize("type_", ["s32", "u64", "f32"])
@pytest.mark.parametrize("boolean", BOOLEAN)
def test_setp_combined(boolean: str, type_: str) -> None:
    a, b = compared_pairs(type_)
    c = [i >> 2 & 1 for i in range(len(a))]
    for op, negated in itertools.product(("eq", "lt", "ge"), (False, True)):
        t = [int(compared(op, type_, x, y)) for x, y in zip(a, b, strict=True)]
        z = [x ^ negated for x in c]
        first, second = ([BOOLEAN[boolean](x ^ flip, y) for x, y in zip(t, z, strict=True)] for flip in (0, 1))
        sources = [(type_, a), (type_, b), ("pred", c)]
        sign = "!" if negated else ""
        text = f"setp.{op}.{boolean}.{type_} %d0|%d1, %a0, %a1, {sign}%a2;"
        assert execute(text, ["pred"] * 2, sources) == [first, second]
        text = f"setp.{op}.{boolean}.{type_} %d0, %a0, %a1, {sign}%a2; setp.{op}.{boolean}.{type_} _|%d1, %a0, %a1, {sign}%a2;"
        assert execute(text, ["pred"] * 2, sources) == [first, second]
        text = f"setp.{op}.{type_} %d0|%d1, %a0, %a1;"
        assert execute(text, ["pred"] * 2, sources[:2]) == [t, [1 - x for x in t]]


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_setp_packed(type_: str) -> None:
    a, b = compared_pairs(type_, 512)
    c = [i % 2 for i in range(256)]
    packed = [[x | y << 16 for x, y in zip(v[::2], v[1::2], strict=True)] for v in (a, b)]
    sources = [("b32", packed[0]), ("b32", packed[1]), ("pred", c)]
    for op in FLOAT_COMPARE:
        t = [int(compared(op, type_, x, y)) for x, y in zip(a, b, strict=True)]
        assert execute(f"setp.{op}.{type_}x2 %d0|%d1, %a0, %a1;", ["pred"] * 2, sources[:2]) == [t[::2], t[1::2]]
        found = execute(f"setp.{op}.and.{type_}x2 %d0|%d1, %a0, %a1, !%a2;", ["pred"] * 2, sources)
        assert found == [[x & (1 - y) for x, y in zip(t[k::2], c, strict=True)] for k in (0, 1)]
        for to, yes in (("u32", 0xFFFF), (f"{type_}x2", {"f16": 0x3C00, "bf16": 0x3F80}[type_])):
            (found,) = execute(f"set.{op}.{to}.{type_}x2 %d0, %a0, %a1;", ["b32"], sources[:2])
            assert found == [(yes if x else 0) | (yes if y else 0) << 16 for x, y in zip(t[::2], t[1::2], strict=True)]


# The assembler (CUDA 13.0) expands these instructions to several and guards only the first of them, so that lanes outside the guard change
# on hardware, against the ISA.
EXPANDED: dict[str, bool] = {"guard_on_hardware": False}


@pytest.mark.parametrize("to", ["u32", "s32", "f32", "u16", "s16", "f16", "bf16"])
def test_set(to: str) -> None:
    yes = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(to, (1 << width(to)) - 1)
    of_types = {"f32": ("u16", "s32", "b64", "f32", "f64"), "f16": ("s32", "f16", "f64"), "bf16": ("s32", "f16", "bf16"),
                "u16": ("f16", "bf16"), "s16": ("f16", "bf16")}  # fmt: skip
    for of in of_types.get(to, ("u16", "s32", "b64", "f32", "f64", "f16", "bf16")):
        values = compared_pairs(of)
        for op in ("eq", "ne", *(() if of[0] == "b" and of != "bf16" else ("lt", "ge"))):
            check(
                f"set.{op}.{to}.{of} {{d}}, {{a}}, {{b}}",
                to,
                [of] * 2,
                lambda a, b, op=op, of=of: yes if compared(op, of, a, b) else 0,
                values=values,
                **EXPANDED,
            )
    of = "f16" if to in ("u16", "s16") else "s32"
    values = [*compared_pairs(of), [i % 2 for i in range(256)]]
    check(
        f"set.lt.xor.{to}.{of} {{d}}, {{a}}, {{b}}, !{{c}}", to, [of, of, "pred"],
        lambda a, b, c: yes if compared("lt", of, a, b) ^ (1 - c) else 0, values=values, **EXPANDED,
    )  # fmt: skip


@pytest.mark.parametrize("type_", ["b16", "b32", "b64", "u16", "s32", "f32", "f64"])
def test_selection(type_: str) -> None:
    a, b = columns([type_, type_], 256)
    c = [i % 2 for i in range(256)]
    check(
        f"selp.{type_} {{d}}, {{a}}, {{b}}, {{c}}",
        type_,
        [type_, type_, "pred"],
        lambda a, b, c: a if c else b,
        values=[a, b, c],
    )
    by = samples("s32", 256, 2)
    check(
        f"slct.{type_}.s32 {{d}}, {{a}}, {{b}}, {{c}}",
        type_,
        [type_, type_, "s32"],
        lambda a, b, c: b if c >> 31 else a,
        values=[a, b, by],
    )
    f = FORMATS["f32"]
    by = samples("f32", 256, 2)
    for ftz in ("", "ftz."):

        def choose(a: int, b: int, c: int, ftz: str = ftz) -> int:
            if is_nan(c, f):
                return b
            return a if (ftz and not c & f.infinity) or f.value(c) >= 0 else b

        check(
            f"slct.{ftz}{type_}.f32 {{d}}, {{a}}, {{b}}, {{c}}", type_, [type_, type_, "f32"], choose, values=[a, b, by]
        )


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_float_bits(type_: str) -> None:
    f = FORMATS[type_]
    check(f"copysign.{type_} {{d}}, {{a}}, {{b}}", type_, [type_] * 2, lambda a, b: a & f.sign | b & (f.sign - 1))

    def kind(x: int) -> str:
        x &= f.sign - 1
        return (
            "nan"
            if x > f.infinity
            else "inf"
            if x == f.infinity
            else "subnormal"
            if 0 < x < 1 << f.mantissa
            else "normal"
        )

    properties = {
        "finite": ("normal", "subnormal"), "infinite": ("inf",), "number": ("normal", "subnormal", "inf"), "notanumber": ("nan",),
        "normal": ("normal",), "subnormal": ("subnormal",),
    }  # fmt: skip
    for name, kinds in properties.items():
        check(
            f"testp.{name}.{type_} {{d}}, {{a}}",
            "pred",
            [type_],
            lambda a, kinds=kinds: int(kind(a) in kinds),
            **EXPANDED,
        )


# ---- moves -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", ["b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64", "pred"])
def test_mov(type_: str) -> None:
    values = [[i % 3 % 2 for i in range(64)]] if type_ == "pred" else None
    check(f"mov.{type_} {{d}}, {{a}}", type_, [type_], lambda a: a, values=values)


@pytest.mark.parametrize(("whole", "part"), [(16, 8), (32, 8), (32, 16), (64, 16), (64, 32)])
def test_packing(whole: int, part: int) -> None:
    n = whole // part
    parts = [[x & (1 << part) - 1 for x in v] for v in columns([f"b{part}"] * n, 256)]
    joined = [sum(x << part * k for k, x in enumerate(row)) for row in zip(*parts, strict=True)]
    text = f"mov.b{whole} %d0, {{{', '.join(f'%a{k}' for k in range(n))}}};"
    guard = [i % 5 != 0 for i in range(256)]
    for g in (None, guard):
        (found,) = execute(
            ("@%g " if g else "") + text, [f"b{whole}"], [(f"b{part}", v) for v in parts], guard=g, initial=7
        )
        assert found == [x if g is None or g[i] else 7 for i, x in enumerate(joined)]
    text = f"mov.b{whole} {{{', '.join(f'%d{k}' for k in range(n))}}}, %a0;"
    assert execute(text, [f"b{part}"] * n, [(f"b{whole}", joined)]) == parts
    sinks = f"mov.b{whole} {{{', '.join('_' if k % 2 == 0 else f'%d{k // 2}' for k in range(n))}}}, %a0;"
    assert execute(sinks, [f"b{part}"] * (n // 2), [(f"b{whole}", joined)]) == parts[1::2]


def test_packing_128_bits() -> None:
    a, b = columns(["b64", "b64"], 256)
    declare = ".reg .b128 %wide; .reg .b128 %other; .reg .b32 %q<4>;"
    text = "mov.b128 %wide, {%a0, %a1}; mov.b128 %other, %wide; mov.b128 {%d0, %d1}, %other; mov.b128 {%q0, %q1, %q2, %q3}, %wide;"
    text += "mov.b128 %other, {%q1, %q0, %q3, %q2}; mov.b128 {%d2, %d3}, %other;"
    found = execute(text, ["b64"] * 4, [("b64", a), ("b64", b)], declare=declare)
    swapped = [[x >> 32 | (x & 0xFFFFFFFF) << 32 for x in v] for v in (a, b)]
    assert found == [a, b, *swapped]


def test_special_registers_and_immediates() -> None:
    text = "mov.u32 %d0, %tid.x; mov.u32 %d1, %ctaid.x; mov.u32 %d2, %laneid; cvt.u16.u32 %d3, %ntid.x; mov.b32 %d4, 0fC0000000;"
    text += "mov.f64 %d5, 0d4000000000000000; mov.f32 %d6, 1.5; add.s32 %d7, -3, -0x10; mad.lo.s32 %d8, %d1, 64, %d0;"
    text += "cvt.u16.u32 %d9, %tid.x; cvt.u64.u32 %d10, %ntid.x; add.f32 %d11, 0f40000000, 0f3F800000; mov.u32 %d12, WARP_SZ;"
    types = ["u32", "u32", "u32", "u16", "b32", "f64", "f32", "s32", "s32", "u16", "u64", "f32", "u32"]
    found = execute(text, types, [("u32", list(range(128)))])
    expected = [
        [i % 64 for i in range(128)], [i // 64 for i in range(128)], [i % 32 for i in range(128)], [64] * 128, [0xC0000000] * 128,
        [0x4000000000000000] * 128, [0x3FC00000] * 128, [0xFFFFFFED] * 128, list(range(128)), [i % 64 for i in range(128)], [64] * 128,
        [0x40400000] * 128, [32] * 128,
    ]  # fmt: skip
    assert found == expected


def test_clocks_grow() -> None:
    text = "mov.u32 %d0, %clock; mov.u64 %d1, %clock64; mov.u64 %d2, %globaltimer; mov.b32 %d3, %clock_hi; mov.u32 %d4, %clock;"
    a, b, c, high, e = execute(text, ["u32", "u64", "u64", "u32", "u32"], [("u32", [0] * 64)])
    for i in range(64):
        assert a[i] < b[i] < c[i] < high[i] << 32 | e[i]


def test_addresses() -> None:
    """Symbols' addresses, generic and in their own space, and the tests for windows."""
    declare = ".shared .align 16 .b8 sh[64]; .local .align 8 .b8 stack[32]; .reg .b64 %x<8>;"
    text = (
        "mov.u32 %d0, sh; mov.u64 %x0, sh; cvta.shared.u64 %x5, %x0; setp.ne.u64 %d1, %x5, %x0;"
        "cvta.to.shared.u64 %d2, %x5; cvt.u32.u64 %d3, %d2;"
    )
    text += "mov.u32 %d4, sh+8; mov.u64 %x1, stack; cvta.local.u64 %x2, %x1; cvta.global.u64 %x3, %a0; cvta.to.global.u64 %d5, %x3;"
    text += "mov.u64 %x4, in0; cvta.param.u64 %x4, %x4;"
    types = ["u32", "pred", "u64", "u32", "u32", "u64"]
    spaces = ("shared", "shared::cta", "shared::cluster", "local", "global", "param", "const")
    k = len(types)
    for register in ("%x5", "%x2", "%x3", "%x4"):
        for space in spaces:
            text += f"isspacep.{space} %d{k}, {register};"
            k += 1
    found = execute(text, [*types, *["pred"] * (k - len(types))], [("u64", [12345] * 64)], declare=declare)
    plain, generic, back, low, plus, same = (v[0] for v in found[:6])
    assert plain == back == low == plus - 8
    assert generic == 1
    assert same == 12345
    rows = [[v[0] for v in found[6 + 7 * r : 13 + 7 * r]] for r in range(4)]
    assert rows == [[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0]]


# ---- refusals --------------------------------------------------------------------------------------------------------------------
REFUSED = [
    "add.sat.u32 %d0, %a0, %a0", "add.foo.s32 %d0, %a0, %a0", "add.s32 %d0, %a0", "mul.wide.u64 %d1, %a1, %a1", "abs.u32 %d0, %a0",
    "min.relu.u32 %d0, %a0, %a0", "lop3.b32 %d0, %a0, %a0, %a0, %a0", "prmt.b32.xyz %d0, %a0, %a0, %a0", "setp.foo.s32 %p, %a0, %a0",
    "setp.lt.b32 %p, %a0, %a0", "setp.ltu.s32 %p, %a0, %a0", "selp.b32 %d0, %a0, %a1, %p", "mov.b32 {%d0, %d0}, %a0",
    "mov.b32 %d0, nothing",
    "mov.b32 %d0, %envreg3", "add.u32 %d0, %tid.x, 1", "mov.u16 %h, %tid.x", "mov.u64 %d1, %ntid.x",
    "sub.u16x2 %d0, %a0, %a0", "sub.s16x2 %d0, %a0, %a0", "add.f32 %d0, %a0, 2",
    "set.eq.f16.bf16 %h, %h, %h", "set.eq.f32.f16 %d0, %h, %h", "set.lt.u16.s32 %h, %a0, %a0", "set.lt.s16.s32 %h, %a0, %a0",
    "set.eq.f32.f16x2 %d0, %a0, %a0", "set.eq.ftz.u32.s32 %d0, %a0, %a0", "set.eq.ftz.bf16.f32 %h, %a0, %a0",
    "setp.eq.ftz.s32 %p, %a0, %a0", "setp.lo.s32 %p, %a0, %a0", "ex2.approx.ftz.f16 %h, %h", "ex2.approx.ftz.f16x2 %d0, %a0",
    "mad.rn.f16 %h, %h, %h, %h", "mad.f32 %d0, %a0, %a0, %a0", "div.f32 %d0, %a0, %a0", "fma.rn.oob.ftz.f16 %h, %h, %h, %h",
    "cvta.shared.u32 %d0, %a0", "isspacep.u64 %p, %a1", "shf.l.b32 %d0, %a0, %a0, %a0", "cvt.s32.f32 %d0, %a0",
    "cvt.f32.s32 %d0, %a0", "cvt.f16.f32 %h, %a0", "cvt.rn.e4m3x2.f32 %h, %a0, %a0", "cvt.rn.satfinite.e2m1x2.f32 %b, %a0, %a0",
    "add.f32x2 %d1, %a1, %a1", "add.rn.rz.f32 %d0, %a0, %a0", "fma.rn.sat.f64 %d1, %a1, %a1, %a1", "min.f32 %d0, %a0, %a0, %a0",
    "ex2.f32 %d0, %a0", "rcp.f32 %d0, %a0", "tanh.approx.ftz.f32 %d0, %a0", "fma.rn.f32.bf16 %d0, %h, %h, %a0", "add.ftz.bf16 %h, %h, %h",
    "mov.b16 %h, 1.0", "max.xorsign.f32 %d0, %a0, %a0", "mad.lo.cc.u16 %h, %h, %h, %h", "frobnicate.s32 %d0, %a0",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    declare = ".reg .pred %p; .reg .b8 %b;"
    with pytest.raises(ptxemu.Unsupported) as error:
        execute(text + ";", ["b32", "b64"], [("b32", [0] * 64), ("b64", [0] * 64)], declare=declare)
    assert text in str(error.value)
    assert error.value.line > 0


def test_partial_warp() -> None:
    """Lanes that do not exist compute nothing that shows."""
    text = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 o)
{
.reg .b32 %r<4>; .reg .b64 %rd<3>;
ld.param.u64 %rd1, [o];
mov.u32 %r1, %tid.x;
mad.wide.u32 %rd2, %r1, 4, %rd1;
mul.lo.s32 %r2, %r1, %r1;
st.global.b32 [%rd2], %r2;
ret;
}
"""
    out = torch.full((40,), -1, dtype=torch.int32)
    ptxemu.run_ptx(text, "k", (1,), (37,), [out])
    assert out.tolist() == [i * i for i in range(37)] + [-1] * 3
