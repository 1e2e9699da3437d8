"""Floating-point arithmetic against exact rational results, rounded once; approximate functions against double precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from alu_reference import (
    FORMATS,
    Format,
    check,
    columns,
    exact,
    execute,
    flushed,
    is_nan,
    samples,
    saturated,
    square_root,
)

MODES = ("rn", "rz", "rm", "rp")


def same_nan(f: Format) -> Callable[[int, int], bool]:
    """Double precision propagates payloads: any NaN is right."""
    return lambda x, y: x == y or (is_nan(x, f) and is_nan(y, f))


def subnormal(result: Fraction | float, op: str, f: Format, mode: str) -> bool:
    """What hardware flushes: products and sums that are subnormal once rounded as if exponents had no end; the exact quotients."""
    least = Fraction(2) ** (1 - f.bias)
    if not abs(result) < least:
        return False
    if isinstance(result, Fraction) and op in ("mul", "fma"):
        high = 1 / least  # brings what is just below to just below 1, where no exponent ends
        return abs(Fraction(f.value(f.code(result * high, mode)))) < 1
    return True


def operation(
    type_: str, op: str, mode: str = "rn", *, ftz: bool = False, sat: bool = False, relu: bool = False
) -> Callable[..., int]:
    """The reference of add, sub, mul, fma, div, rcp, sqrt on codes."""
    f = FORMATS[type_]

    def apply(*codes: int) -> int:
        codes = tuple(flushed(c, f) for c in codes) if ftz else codes
        x = [f.value(c) for c in codes]
        if op == "sqrt":
            if isinstance(x[0], float) or x[0] <= 0:
                special = x[0] == 0 or (isinstance(x[0], float) and x[0] > 0)
                code = codes[0] if special else f.code(math.nan)
            else:
                code = square_root(x[0], f, mode)
        else:
            result = exact(op, mode, *x)
            code = f.code(saturated(result) if sat else result, mode)
            if ftz and subnormal(result, op, f, mode):
                code &= f.sign
        if relu and code & f.sign and not is_nan(code, f):
            code = 0
        return flushed(code, f) if ftz else code

    return apply


def form(op: str, type_: str, mode: str = "", *, n: int = 2, **flags: bool) -> str:
    parts = [op, *([mode] if mode else []), *(k for k, on in flags.items() if on), type_]
    return ".".join(parts) + " {d}, " + ", ".join(["{a}", "{b}", "{c}"][:n])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt"])
def test_f32(op: str, mode: str) -> None:
    n = {"fma": 3, "mad": 3, "rcp": 1, "sqrt": 1}.get(op, 2)
    sats = (False, True) if op in ("add", "sub", "mul", "fma") else (False,)
    for ftz, sat in itertools.product((False, True), sats):
        reference = operation("f32", "fma" if op == "mad" else op, mode, ftz=ftz, sat=sat)
        check(form(op, "f32", mode, n=n, ftz=ftz, sat=sat), "f32", ["f32"] * n, reference)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt"])
def test_f64(op: str, mode: str) -> None:
    n = {"fma": 3, "mad": 3, "rcp": 1, "sqrt": 1}.get(op, 2)
    reference = operation("f64", "fma" if op == "mad" else op, mode)
    check(form(op, "f64", mode, n=n), "f64", ["f64"] * n, reference, same=same_nan(FORMATS["f64"]))


@pytest.mark.parametrize("type_", ["f32", "f16"])
def test_results_next_to_subnormal(type_: str) -> None:
    """Exact results within a place of the smallest normal number, on both sides of it: what .ftz takes for subnormal."""
    f = FORMATS[type_]
    least, one = 1 << f.mantissa, f.bias << f.mantissa
    rows = [(least + i, one + j) for i in range(8) for j in range(-16, 16)]
    rows += [(a | f.sign, b) for a, b in rows]
    a, b = ([row[k] for row in rows] for k in range(2))
    c = [(0, f.sign, 1, least)[i % 4] for i in range(len(rows))]
    for mode in MODES if type_ == "f32" else ("rn",):
        for sat in (False, True):
            flags = {"ftz": True, "sat": sat}
            check(
                form("mul", type_, mode, **flags),
                type_,
                [type_] * 2,
                operation(type_, "mul", mode, **flags),
                values=[a, b],
            )
            text = form("fma", type_, mode, n=3, **flags)
            check(text, type_, [type_] * 3, operation(type_, "fma", mode, **flags), values=[a, b, c])
        if type_ == "f32":
            check(
                form("div", type_, mode, ftz=True),
                type_,
                [type_] * 2,
                operation(type_, "div", mode, ftz=True),
                values=[a, b],
            )
            top = [(2 * f.bias - 2 << f.mantissa) + i | (i & 1) * f.sign for i in range(64)]
            text = form("rcp", type_, mode, n=1, ftz=True)
            check(text, type_, [type_], operation(type_, "rcp", mode, ftz=True), values=[top])


def test_default_rounding() -> None:
    for op in ("add", "sub", "mul"):
        for type_ in ("f32", "f64", "f16", "bf16"):
            check(form(op, type_), type_, [type_] * 2, operation(type_, op), same=same_nan(FORMATS[type_]))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_f32x2(op: str) -> None:
    n = 3 if op == "fma" else 2
    halves = columns(["f32"] * 2 * n, 256, 7)
    packed = [[x | y << 32 for x, y in zip(halves[2 * k], halves[2 * k + 1], strict=True)] for k in range(n)]
    for mode, ftz in itertools.product(MODES, (False, True)):
        one = operation("f32", op, mode, ftz=ftz)

        def both(*x: int, one: Callable[..., int] = one) -> int:
            return one(*(v & 0xFFFFFFFF for v in x)) | one(*(v >> 32 for v in x)) << 32

        check(form(op, "f32x2", mode, n=n, ftz=ftz), "b64", ["b64"] * n, both, values=packed, arch="sm_100a")


def packed_pairs(type_: str, n: int, count: int) -> list[list[int]]:
    singles = columns([type_] * count, 2 * n, 5)
    return [[x | y << 16 for x, y in zip(v[::2], v[1::2], strict=True)] for v in singles]


def both_halves(f: Callable[..., int]) -> Callable[..., int]:
    return lambda *x: f(*(v & 0xFFFF for v in x)) | f(*(v >> 16 for v in x)) << 16


@pytest.mark.parametrize("type_", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_halves(op: str, type_: str) -> None:
    n = 3 if op == "fma" else 2
    flags = [{}]
    if type_ == "f16":
        flags += [{"ftz": True}, {"sat": True}, {"ftz": True, "sat": True}]
    if op == "fma":
        flags += [{"relu": True}]
    pairs = packed_pairs(type_, 256, n)
    for given in flags:
        reference = operation(type_, op, **given)
        check(form(op, type_, "rn", n=n, **given), type_, [type_] * n, reference, n=1024)
        check(form(op, f"{type_}x2", "rn", n=n, **given), "b32", ["b32"] * n, both_halves(reference), values=pairs)


def test_bf16_fma_rounds_once() -> None:
    """Products at a tie of bf16, moved off it by an addend far below a double's last place."""
    tie = 0x3F81  # 1 + 2^-7
    factor = 0x3F81
    product = (tie, factor)
    addends = [sign | exponent << 7 for sign in (0, 0x8000) for exponent in range(1, 120, 3)]
    rows = [(a, b, c) for a, b in (product, (0x3FC1, 0x3F82), (0x3F88, 0x3F88), (0x3FC0, 0x3F81)) for c in addends]
    rows = (rows * 3)[: len(rows) // 64 * 64]
    check(
        "fma.rn.bf16 {d}, {a}, {b}, {c}",
        "bf16",
        ["bf16"] * 3,
        operation("bf16", "fma"),
        values=[list(v) for v in zip(*rows, strict=True)],
    )


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_out_of_bounds_nan(type_: str) -> None:
    """The NaN that tensor copies fill with, 0x7ff7 in every 16 bits, as a factor (as the addend it is any NaN)."""
    a, b, c = columns([type_] * 3, 256)
    a = [0x7FF7 if i % 3 == 0 else x for i, x in enumerate(a)]
    b = [0x7FF7 if i % 5 == 0 else x for i, x in enumerate(b)]
    c = [0x7FF7 if i % 7 == 0 else x for i, x in enumerate(c)]
    for relu in (False, True):
        reference = operation(type_, "fma", relu=relu)
        check(
            f"fma.rn.oob.{'relu.' if relu else ''}{type_} {{d}}, {{a}}, {{b}}, {{c}}", type_, [type_] * 3,
            lambda *x, f=reference: 0 if 0x7FF7 in x[:2] else f(*x), values=[a, b, c],
        )  # fmt: skip


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_mixed_precision(half: str) -> None:
    f, wide = FORMATS[half], FORMATS["f32"]
    for op, mode, sat in itertools.product(("add", "sub", "fma"), MODES, (False, True)):
        n = 3 if op == "fma" else 2

        def reference(*codes: int, op: str = op, mode: str = mode, sat: bool = sat) -> int:
            x = [f.value(c) for c in codes[:-1]] + [wide.value(codes[-1])]
            result = exact(op, mode, *x)
            return wide.code(saturated(result) if sat else result, mode)

        text = f"{op}.{mode}.{'sat.' if sat else ''}f32.{half} {{d}}, " + ", ".join(["{a}", "{b}", "{c}"][:n])
        check(text, "f32", [half] * (n - 1) + ["f32"], reference, arch="sm_100a")


# ---- signs, minimum, maximum -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("type_", ["f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2"])
def test_signs(type_: str) -> None:
    one = type_.removesuffix("x2")
    f = FORMATS[one]
    w = f.exponent + f.mantissa + 1
    bits = f"b{2 * w}" if type_ != one else one
    for ftz in (False, True) if one in ("f32", "f16") and type_ != "f32x2" else (False,):
        for op, change in (("neg", lambda x: x ^ f.sign), ("abs", lambda x: x & (f.sign - 1))):

            def reference(a: int, change: Callable[[int], int] = change, ftz: bool = ftz) -> int:
                parts = [a & (1 << w) - 1, a >> w] if type_ != one else [a]
                return sum(change(flushed(p, f) if ftz else p) << w * i for i, p in enumerate(parts))

            check(f"{op}.{'ftz.' if ftz else ''}{type_} {{d}}, {{a}}", bits, [bits], reference, arch="sm_100a")


def extreme(
    type_: str, op: str, *, ftz: bool = False, strict: bool = False, xorsign: bool = False, absolute: bool = False
) -> Callable[..., int]:
    f = FORMATS[type_]

    def pick(a: int, b: int) -> int:
        if is_nan(a, f) and is_nan(b, f) and type_ == "f64":
            return b | 1 << 51  # the second, made quiet
        if (is_nan(a, f) and is_nan(b, f)) or (strict and (is_nan(a, f) or is_nan(b, f))):
            return f.nan or 0
        if is_nan(a, f) or is_nan(b, f):
            return b if is_nan(a, f) else a
        order = lambda x: (f.value(x), not x & f.sign)  # noqa: E731
        return (min if op == "min" else max)(a, b, key=order)

    def apply(*codes: int) -> int:
        x = [flushed(c, f) if ftz else c for c in codes]
        sign = (x[0] ^ x[1]) & f.sign
        if xorsign or absolute:
            x = [c & (f.sign - 1) for c in x]
        result = x[0]
        for c in x[1:]:
            result = pick(result, c)
        return result ^ sign if xorsign and not is_nan(result, f) else result

    return apply


@pytest.mark.parametrize("type_", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_minmax(op: str, type_: str) -> None:
    pairs = packed_pairs(type_, 256, 2) if type_.endswith("16") else None
    for ftz, strict, xorsign in itertools.product((False, True), repeat=3):
        if (type_ == "f64" and (ftz or strict or xorsign)) or (type_ == "bf16" and ftz):
            continue
        mods = "".join(m for m, on in (("ftz.", ftz), ("NaN.", strict), ("xorsign.abs.", xorsign)) if on)
        reference = extreme(type_, op, ftz=ftz, strict=strict, xorsign=xorsign)
        check(f"{op}.{mods}{type_} {{d}}, {{a}}, {{b}}", type_, [type_] * 2, reference, n=1024)
        if pairs:
            check(f"{op}.{mods}{type_}x2 {{d}}, {{a}}, {{b}}", "b32", ["b32"] * 2, both_halves(reference), values=pairs)


@pytest.mark.parametrize("op", ["min", "max"])
def test_minmax_of_three(op: str) -> None:
    for ftz, strict, absolute in itertools.product((False, True), repeat=3):
        mods = "".join(m for m, on in (("ftz.", ftz), ("NaN.", strict), ("abs.", absolute)) if on)
        reference = extreme("f32", op, ftz=ftz, strict=strict, absolute=absolute)
        check(f"{op}.{mods}f32 {{d}}, {{a}}, {{b}}, {{c}}", "f32", ["f32"] * 3, reference, arch="sm_100a", n=512)


# ---- approximate functions -------------------------------------------------------------------------------------------------------
def steps(x: int, y: int, f: Format) -> int:
    """Distance in units of the last place."""
    place = lambda c: -(c & (f.sign - 1)) if c & f.sign else c  # noqa: E731
    return abs(place(x) - place(y))


def domain(op: str, type_: str) -> list[int]:
    """Codes: edge values, random ones, and many where the function does something."""
    if type_ != "f32":
        return list(range(1 << 16))
    rng = np.random.default_rng(1)
    spread = {"ex2": 150, "tanh": 12, "sin": 300, "cos": 300}.get(op, 4)
    near = np.concatenate(
        [rng.normal(0, spread, 3000), rng.normal(1, 1e-3, 500), rng.normal(0, 1e-4, 500), np.linspace(-152, 130, 600)]
    )
    return (samples("f32", 2000, 3) + [int(v) for v in near.astype(np.float32).view(np.uint32)])[: 6600 // 64 * 64]


def true_value(op: str, x: float) -> float:
    if math.isnan(x):
        return math.nan
    if op == "ex2":
        return math.inf if x > 1000 else 2.0**x
    if op == "lg2":
        return math.nan if x < 0 else -math.inf if x == 0 else math.log2(x)
    if op == "rsqrt":
        return math.nan if x < 0 else math.copysign(math.inf, x) if x == 0 else 1 / math.sqrt(x)
    if op == "tanh":
        return math.tanh(x)
    return math.nan if math.isinf(x) else math.sin(x) if op == "sin" else math.cos(x)


def function_errors(op: str, text: str, type_: str, ftz: bool) -> list[int]:
    """Distances to the rounded true value, specials exactly."""
    f = FORMATS[type_]
    codes = domain(op, type_)
    (found,) = execute(text.format(d="%d0", a="%a0") + ";", [type_], [(type_, codes)])
    out = []
    for c, r in zip(codes, found, strict=True):
        x = float(f.value(flushed(c, f) if ftz else c))
        expected = f.code(true_value(op, x))
        expected = flushed(expected, f) if ftz else expected
        out.append(steps(r, expected, f))
        if math.isnan(x) or math.isinf(x) or x == 0:
            assert r == expected, (text, hex(c), hex(r), hex(expected))
    return out


@pytest.mark.parametrize(
    ("op", "type_", "ftz"),
    [(op, "f32", ftz) for op in ("ex2", "lg2", "rsqrt", "sin", "cos") for ftz in (False, True)]
    + [("tanh", t, False) for t in ("f32", "f16", "bf16")]
    + [("ex2", "f16", False), ("ex2", "bf16", True)],
)
def test_functions(op: str, type_: str, ftz: bool) -> None:
    """Correctly rounded but for rare ties of the references' own rounding."""
    errors = function_errors(op, f"{op}.approx.{'ftz.' if ftz else ''}{type_} {{d}}, {{a}}", type_, ftz)
    assert max(errors) <= 1
    assert sum(errors) <= len(errors) // 1000


@pytest.mark.parametrize(("op", "type_"), [("tanh", "f16"), ("tanh", "bf16"), ("ex2", "f16"), ("ex2", "bf16")])
def test_packed_functions(op: str, type_: str) -> None:
    codes = samples(type_, 512, 2)
    pairs = [x | y << 16 for x, y in zip(codes, codes[::-1], strict=True)]
    ftz = "ftz." if (op, type_) == ("ex2", "bf16") else ""
    (single,) = execute(f"{op}.approx.{ftz}{type_} %d0, %a0;", [type_], [(type_, codes)])
    (both,) = execute(f"{op}.approx.{ftz}{type_}x2 %d0, %a0;", ["b32"], [("b32", pairs)])
    assert both == [x | y << 16 for x, y in zip(single, single[::-1], strict=True)]


def test_approximate_f32_division() -> None:
    for ftz in (False, True):
        dot = ".ftz" if ftz else ""
        check(f"rcp.approx{dot}.f32 {{d}}, {{a}}", "f32", ["f32"], operation("f32", "rcp", ftz=ftz), n=512)
        check(f"sqrt.approx{dot}.f32 {{d}}, {{a}}", "f32", ["f32"], operation("f32", "sqrt", ftz=ftz), n=512)
        check(f"div.full{dot}.f32 {{d}}, {{a}}, {{b}}", "f32", ["f32"] * 2, operation("f32", "div", ftz=ftz), n=512)
        f, quotient = FORMATS["f32"], operation("f32", "div", ftz=ftz)

        def approx(a: int, b: int, quotient: Callable[..., int] = quotient, f: Format = f) -> int:
            size = b & 0x7FFFFFFF
            if not 0x7E800000 < size < 0x7F800000 or is_nan(a, f):
                return quotient(a, b)
            return 0x7FFFFFFF if a & 0x7FFFFFFF == 0x7F800000 else (a ^ b) & f.sign

        a, b = columns(["f32", "f32"], 512)
        b = [x if i % 4 else 0x7E800000 + 0x10000 * (i % 256) | (i & 8) << 28 for i, x in enumerate(b)]
        check(f"div.approx{dot}.f32 {{d}}, {{a}}, {{b}}", "f32", ["f32"] * 2, approx, values=[a, b])


def test_approximate_f64() -> None:
    """The .approx.ftz.f64 forms: the high word alone, 20 bits of mantissa."""
    f = FORMATS["f64"]
    short = Format(11, 20, 0x7FFFFFFF)
    codes = samples("f64", 1024, 6)
    for op in ("rcp", "rsqrt"):
        (found,) = execute(f"{op}.approx.ftz.f64 %d0, %a0;", ["f64"], [("f64", codes)])
        for c, r in zip(codes, found, strict=True):
            x = f.value(flushed(c >> 32 << 32, f))
            if isinstance(x, float) or x <= 0:
                value = float(x)
                expected = (
                    short.nan if math.isnan(value) or (op == "rsqrt" and value < 0)
                    else short.code(math.copysign(0.0 if math.isinf(value) else math.inf, value)) if value in (0, math.inf, -math.inf)
                    else short.code(1 / Fraction(x))
                )  # fmt: skip
            else:
                expected = short.code(1 / x) if op == "rcp" else square_root(1 / x, short, "rn")
            expected = flushed(expected, short)
            assert r >> 32 == expected, (op, hex(c), hex(r), hex(expected))
            assert r & 0xFFFFFFFF == 0
    (found,) = execute("rsqrt.approx.f64 %d0, %a0;", ["f64"], [("f64", codes)])
    for c, r in zip(codes, found, strict=True):
        x = f.value(c)
        if isinstance(x, Fraction) and x > 0:
            assert steps(r, square_root(1 / x, f, "rn"), f) <= 1
        elif x == 0:
            assert r == f.code(math.copysign(math.inf, x))
        elif x == math.inf:
            assert r == 0
        else:
            assert is_nan(r, f)


def test_accuracy_of_references() -> None:
    """The rounding reference agrees with the machine's own arithmetic where that is known to be right."""
    f = FORMATS["f32"]
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 1 << 32, 2000, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    with np.errstate(all="ignore"):
        sums = (x.view(np.float32) + y.view(np.float32)).view(np.uint32)
        halves = x.view(np.float32).astype(np.float16).view(np.uint16)
    for a, b, total, half in zip(x, y, sums, halves, strict=True):
        value = exact("add", "rn", f.value(int(a)), f.value(int(b)))
        assert is_nan(int(total), f) if isinstance(value, float) and math.isnan(value) else f.code(value) == int(total)
        if not is_nan(int(a), f):
            assert FORMATS["f16"].code(f.value(int(a))) == int(half)
