"""Conversions: every pair of types against rational references."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from alu_reference import FORMATS, Format, check, columns, execute, flushed, is_nan, samples, saturated, width

import ptxemu

INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
MODES = ("rn", "rz", "rm", "rp")


def limits(type_: str) -> tuple[int, int]:
    w = width(type_)
    return (0, (1 << w) - 1) if type_[0] == "u" else (-(1 << w - 1), (1 << w - 1) - 1)


def integer(code: int, type_: str) -> int:
    w = width(type_)
    code &= (1 << w) - 1
    return code - (1 << w) if type_[0] == "s" and code >> (w - 1) else code


def holder(type_: str) -> str:
    """The register that a test loads a type of 8 bits into."""
    return f"b{max(16, width(type_))}"


@pytest.mark.parametrize("of", INTS)
def test_integer_to_integer(of: str) -> None:
    for to, sat in itertools.product(INTS, (False, True)):
        w = int(holder(to)[1:])
        if sat and limits(to)[0] <= limits(of)[0] and limits(of)[1] <= limits(to)[1]:
            continue  # refused: nothing to clamp

        def reference(a: int, to: str = to, sat: bool = sat, w: int = w) -> int:
            value = integer(a, of)
            low, high = limits(to)
            value = max(low, min(high, value)) if sat else integer(value, to)
            return value & (1 << w) - 1

        check(f"cvt.{'sat.' if sat else ''}{to}.{of} {{d}}, {{a}}", holder(to), [holder(of)], reference)


def test_wider_registers() -> None:
    """Sources wider than their type give their low bits; results are extended by the sign of their type."""
    for of, to, source, result in (
        ("u8", "u32", "b32", "b32"), ("s8", "s32", "b32", "b32"), ("s16", "s32", "b32", "b64"), ("u16", "u16", "b64", "b32"),
        ("s32", "s16", "b64", "b64"), ("u32", "s8", "b32", "b32"), ("s64", "u8", "b64", "b32"),
    ):  # fmt: skip
        w = width(result)

        def reference(a: int, of: str = of, to: str = to, w: int = w) -> int:
            return integer(integer(a, of), to) & (1 << w) - 1

        check(f"cvt.{to}.{of} {{d}}, {{a}}", result, [source], reference)
    half, single = FORMATS["f16"], FORMATS["f32"]
    check("cvt.rn.f16.f32 {d}, {a}", "b32", ["f32"], lambda a: half.code(single.value(a)))
    check("cvt.f32.f16 {d}, {a}", "f32", ["b32"], lambda a: single.code(half.value(a & 0xFFFF)))


@pytest.mark.parametrize("of", INTS)
def test_integer_to_float(of: str) -> None:
    for to, mode in itertools.product(FLOATS, MODES):
        f = FORMATS[to]
        check(
            f"cvt.{mode}.{to}.{of} {{d}}, {{a}}",
            to,
            [holder(of) if to != "bf16" or width(of) > 8 else "b8"],
            lambda a, f=f, mode=mode: f.code(Fraction(integer(a, of)), mode),
        )
    for to in ("f16", "f32", "f64"):
        f = FORMATS[to]
        check(
            f"cvt.rn.sat.{to}.{of} {{d}}, {{a}}",
            to,
            [holder(of)],
            lambda a, f=f: f.code(saturated(Fraction(integer(a, of)))),
        )


INTEGRAL: dict[str, Callable[[Fraction], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def integral_samples(type_: str) -> list[int]:
    """Codes near integers, ties and the limits of the integer types, beside the usual ones."""
    f = FORMATS[type_]
    near = [Fraction(n) + Fraction(k, 4) for n in (0, 1, 2, 3, 127, 128, 254, 255, 32767, 65535) for k in range(-3, 4)]
    near += [Fraction(2) ** e + d for e in (31, 32, 63, 64) for d in (-1, -0.5, 0, 1)]
    codes = [f.code(x, "rz") for x in near]
    codes += [c ^ f.sign for c in codes]
    return codes + samples(type_, 640 - len(codes), 3)


@pytest.mark.parametrize("of", FLOATS)
def test_float_to_integer(of: str) -> None:
    f = FORMATS[of]
    codes = integral_samples(of)
    for to, mode in itertools.product(INTS, INTEGRAL):
        low, high = limits(to)
        w = int(holder(to)[1:])
        nan = 1 << (width(to) - 1) if of == "f64" or width(to) == 64 else 0
        nan = integer(nan, to) & (1 << w) - 1
        for ftz in (False, True) if of == "f32" else (False,):

            def reference(
                a: int,
                to: str = to,
                mode: str = mode,
                ftz: bool = ftz,
                low: int = low,
                high: int = high,
                w: int = w,
                nan: int = nan,
            ) -> int:
                x = f.value(flushed(a, f) if ftz else a)
                if isinstance(x, float):
                    if math.isnan(x):
                        return nan
                    value = high if x == math.inf else low if x == -math.inf else 0
                else:
                    value = max(low, min(high, INTEGRAL[mode](x)))
                return value & (1 << w) - 1

            small = of == "bf16" and width(to) == 8
            check(
                f"cvt.{mode}.{'ftz.' if ftz else ''}{to}.{of} {{d}}, {{a}}",
                "b8" if small else holder(to),
                [of],
                (lambda a, f=reference: f(a) & 255) if small else reference,
                values=[codes],
            )


@pytest.mark.parametrize("type_", FLOATS)
def test_rounding_to_integers(type_: str) -> None:
    f = FORMATS[type_]
    codes = integral_samples(type_)
    for mode, sat, ftz in itertools.product(INTEGRAL, (False, True), (False, True)):
        if (ftz and type_ != "f32") or (sat and type_ == "bf16"):
            continue

        def reference(a: int, mode: str = mode, sat: bool = sat, ftz: bool = ftz) -> int:
            a = flushed(a, f) if ftz else a
            x = f.value(a)
            if isinstance(x, Fraction):
                value = Fraction(INTEGRAL[mode](x))
                x = -0.0 if value == 0 and a & f.sign else value
            return f.code(saturated(x) if sat else x)

        text = f"cvt.{mode}.{'ftz.' if ftz else ''}{'sat.' if sat else ''}{type_}.{type_} {{d}}, {{a}}"
        check(
            text, type_, [type_], reference, values=[codes], same=lambda x, y: x == y or (is_nan(x, f) and is_nan(y, f))
        )


@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
def test_float_to_float(to: str, of: str) -> None:
    f, g = FORMATS[of], FORMATS[to]
    widening = g.mantissa >= f.mantissa and g.exponent >= f.exponent
    for mode, ftz, sat in itertools.product(("",) if widening else MODES, (False, True), (False, True)):
        if (ftz and "f32" not in (of, to)) or (sat and "bf16" in (to, of)):
            continue

        def reference(a: int, mode: str = mode, ftz: bool = ftz, sat: bool = sat) -> int:
            if to == of and not sat and not ftz and not is_nan(a, f):
                return a
            a = flushed(a, f) if ftz and of == "f32" and to != "f16" else a  # hardware does not flush here
            x = f.value(a)
            code = g.code(saturated(x) if sat else x, mode or "rn")
            return flushed(code, g) if ftz and to == "f32" else code

        text = f"cvt.{mode + '.' if mode else ''}{'ftz.' if ftz else ''}{'sat.' if sat else ''}{to}.{of} {{d}}, {{a}}"
        check(text, to, [of], reference, n=512, same=lambda x, y: x == y or (is_nan(x, g) and is_nan(y, g)))


@pytest.mark.parametrize("to", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_single_and_packed_halves(mode: str, to: str) -> None:
    """cvt.f16.f32, cvt.f16x2.f32: relu, satfinite."""
    f, g = FORMATS["f32"], FORMATS[to]

    def one(a: int, relu: bool, finite: bool) -> int:
        code = g.code(f.value(a), mode, satfinite=finite)
        return 0 if relu and code & g.sign and not is_nan(code, g) else code

    for relu, finite in itertools.product((False, True), repeat=2):
        mods = f"{mode}.{'relu.' if relu else ''}{'satfinite.' if finite else ''}"
        check(f"cvt.{mods}{to}.f32 {{d}}, {{a}}", to, ["f32"], lambda a, r=relu, s=finite: one(a, r, s), n=512)
        check(
            f"cvt.{mods}{to}x2.f32 {{d}}, {{a}}, {{b}}",
            "b32",
            ["f32"] * 2,
            lambda a, b, r=relu, s=finite: one(a, r, s) << 16 | one(b, r, s),
            n=512,
        )


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_stochastic_rounding(to: str) -> None:
    f, g = FORMATS["f32"], FORMATS[to]
    count = 13 if to == "f16" else 16
    rng = np.random.default_rng(3)
    # Normal results: the random bits then are as many as the discarded ones.
    a, b = ([int(x) for x in (rng.normal(0, 3, 512) + 0.01).astype(np.float32).view(np.uint32)] for _ in range(2))
    bits = [int(x) for x in rng.integers(0, 1 << 32, 512)]

    def reference(a: int, b: int, r: int) -> int:
        mask = (1 << count) - 1
        high = g.code(f.value(a), "rs", random=(count, r >> 16 & mask))
        return high << 16 | g.code(f.value(b), "rs", random=(count, r & mask))

    big = [i for i in range(512) if all(abs(f.value(v[i])) > 2.0**-14 for v in (a, b))][:448]
    values = [[v[i] for i in big] for v in (a, b, bits)]
    check(
        f"cvt.rs.{to}x2.f32 {{d}}, {{a}}, {{b}}, {{c}}",
        "b32",
        ["f32", "f32", "b32"],
        reference,
        values=values,
        arch="sm_100a",
    )


def test_tf32() -> None:
    f, g = FORMATS["f32"], FORMATS["tf32"]

    def code(a: int, mode: str, finite: bool, relu: bool) -> int:
        if (
            mode == "rna" and a & 0x7FFFFFFF >= f.infinity
        ):  # NaN and infinity: truncated, and one place less where finite
            return (a & 0xFFFFE000) - (0x2000 if finite and a & 0x7FFFE000 >= f.infinity else 0)
        if is_nan(a, f):
            return 0x7FFFE000
        result = g.code(f.value(a), mode, satfinite=finite) << 13
        return 0 if relu and result >> 31 else result

    for mode, finite, relu in itertools.product(("rna", "rn", "rz"), (False, True), (False, True)):
        if mode == "rna" and relu:
            continue
        mods = f"{mode}.{'satfinite.' if finite else ''}{'relu.' if relu else ''}"
        arch = "sm_100a" if finite and mode != "rna" else "sm_90a"
        check(
            f"cvt.{mods}tf32.f32 {{d}}, {{a}}",
            "b32",
            ["f32"],
            lambda a, m=mode, s=finite, r=relu: code(a, m, s, r),
            n=512,
            arch=arch,
        )


SMALL = {"e4m3x2": 8, "e5m2x2": 8, "e2m3x2": 8, "e3m2x2": 8, "e2m1x2": 4}


def small_samples() -> list[list[int]]:
    """f32 codes around every value of the small formats: values, ties, and a little beside."""
    values: set[Fraction] = set()
    for name in SMALL:
        f = FORMATS[name[:-2]]
        codes = [Fraction(f.value(c)) for c in range(f.largest + 1)]
        values |= (
            set(codes)
            | {(x + y) / 2 for x, y in itertools.pairwise(codes)}
            | {codes[-1] * Fraction(33, 32), codes[-1] * 2}
        )
    f = FORMATS["f32"]
    exact = [f.code(x) for x in sorted(values)]
    around = [c + d for c in exact for d in (-1, 0, 1) if c + d >= 0]
    both = around + [c | f.sign for c in around] + samples("f32", 256, 1)
    both = both[: len(both) // 64 * 64]
    return [both, both[::-1]]


@pytest.mark.parametrize("to", SMALL)
def test_small_formats(to: str) -> None:
    f, g, shift = FORMATS["f32"], FORMATS[to[:-2]], SMALL[to]
    half = FORMATS["f16"]
    result = "b8" if shift == 4 else "b16"
    arch = "sm_90a" if to in ("e4m3x2", "e5m2x2") else "sm_100a"

    def one(x: Fraction | float, relu: bool) -> int:
        nan = isinstance(x, float) and math.isnan(x)
        code = g.code(x, satfinite=True)
        return 0 if relu and not nan and code & g.sign else code

    for relu in (False, True):
        mods = f"rn.satfinite.{'relu.' if relu else ''}"
        check(
            f"cvt.{mods}{to}.f32 {{d}}, {{a}}, {{b}}", result, ["f32"] * 2,
            lambda a, b, r=relu: one(f.value(a), r) << shift | one(f.value(b), r), values=small_samples(), arch=arch,
        )  # fmt: skip
        if shift == 8 and arch == "sm_90a":
            pairs = [x | y << 16 for x, y in zip(*columns(["f16", "f16"], 1024), strict=True)]
            check(
                f"cvt.{mods}{to}.f16x2 {{d}}, {{a}}", result, ["b32"],
                lambda a, r=relu: one(half.value(a >> 16), r) << shift | one(half.value(a & 0xFFFF), r), values=[pairs], arch=arch,
            )  # fmt: skip
        codes = (
            list(range(1 << 2 * shift))
            if shift == 4
            else [x for x in range(1 << 16) if x >> 8 < 2 * g.sign and x & 255 < 2 * g.sign][::13]
        )
        codes = codes[: len(codes) // 64 * 64]

        def widened(a: int, r: bool = relu) -> int:
            out = 0
            for k in (1, 0):
                x = half.code(g.value(a >> shift * k & (1 << shift) - 1))
                out = out << 16 | (0 if r and x & half.sign and not is_nan(x, half) else x)
            return out

        check(
            f"cvt.rn.{'relu.' if relu else ''}f16x2.{to} {{d}}, {{a}}",
            "b32",
            [result],
            widened,
            values=[codes],
            arch=arch,
        )


def test_scales() -> None:
    """ue8m0: the exponent of the magnitude, rounded down or up; no zero, no infinity."""

    def scale(x: Fraction | float, mode: str, finite: bool) -> int:
        over = 0xFE if finite else 0xFF
        if isinstance(x, float):
            return 0xFF if math.isnan(x) else over if math.isinf(x) else 0
        x = abs(x)
        code = next((c for c in range(255) if Fraction(2) ** (c - 127) >= x), 255)
        if mode == "rz" and code and (code == 255 or Fraction(2) ** (code - 127) > x):
            code -= 1
        return over if code == 255 else code

    f, g = FORMATS["f32"], FORMATS["bf16"]
    for mode, finite in itertools.product(("rz", "rp"), (False, True)):
        mods = f"{mode}.{'satfinite.' if finite else ''}"
        check(
            f"cvt.{mods}ue8m0x2.f32 {{d}}, {{a}}, {{b}}", "b16", ["f32"] * 2,
            lambda a, b, m=mode, s=finite: scale(f.value(a), m, s) << 8 | scale(f.value(b), m, s), arch="sm_100a",
        )  # fmt: skip
        pairs = [x | y << 16 for x, y in zip(*columns(["bf16", "bf16"], 512), strict=True)]
        check(
            f"cvt.{mods}ue8m0x2.bf16x2 {{d}}, {{a}}", "b16", ["b32"],
            lambda a, m=mode, s=finite: scale(g.value(a >> 16), m, s) << 8 | scale(g.value(a & 0xFFFF), m, s),
            values=[pairs], arch="sm_100a",
        )  # fmt: skip

    def widened(code: int) -> int:
        return 0x7FFF if code == 0xFF else g.code(Fraction(2) ** (code - 127))

    codes = [x | (255 - x) << 8 for x in range(256)]
    check(
        "cvt.rn.bf16x2.ue8m0x2 {d}, {a}",
        "b32",
        ["b16"],
        lambda a: widened(a >> 8) << 16 | widened(a & 255),
        values=[codes],
        arch="sm_100a",
    )


def test_packed_fp4_registers() -> None:
    """Four results of 8 bits joined in one register, as inline assembly does."""
    a, b = columns(["f32", "f32"], 256)
    declare = ".reg .b8 %y<4>;"
    text = (
        "".join(f"cvt.rn.satfinite.e2m1x2.f32 %y{k}, %a{k % 2}, %a{1 - k % 2};" for k in range(4))
        + "mov.b32 %d0, {%y0, %y1, %y2, %y3};"
    )
    (found,) = execute(text, ["b32"], [("f32", a), ("f32", b)], arch="sm_100a", declare=declare)
    f, g = FORMATS["f32"], FORMATS["e2m1"]
    for x, y, r in zip(a, b, found, strict=True):
        first = g.code(f.value(x)) << 4 | g.code(f.value(y))
        second = g.code(f.value(y)) << 4 | g.code(f.value(x))
        assert r == first | second << 8 | first << 16 | second << 24


@pytest.mark.parametrize("type_", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_integer_packing(type_: str) -> None:
    w = int(type_[1:])
    low, high = (0, (1 << w) - 1) if type_[0] == "u" else (-(1 << w - 1), (1 << w - 1) - 1)

    def one(x: int) -> int:
        return max(low, min(high, integer(x, "s32"))) & (1 << w) - 1

    if w == 16:
        check(f"cvt.pack.sat.{type_}.s32 {{d}}, {{a}}, {{b}}", "b32", ["s32"] * 2, lambda a, b: one(a) << w | one(b))
    else:
        check(
            f"cvt.pack.sat.{type_}.s32.b32 {{d}}, {{a}}, {{b}}, {{c}}", "b32", ["s32", "s32", "b32"],
            lambda a, b, c: (c << 2 * w | one(a) << w | one(b)) & 0xFFFFFFFF,
        )  # fmt: skip


REFUSED = [
    "cvt.rn.s32.f32 %d0, %a0", "cvt.rni.f32.f16 %d0, %h", "cvt.rna.f16.f32 %h, %a0", "cvt.rs.f16x2.f32 %d0, %a0, %a0, %a0",
    "cvt.rn.satfinite.e4m3x2.bf16x2 %h, %a0", "cvt.rn.satfinite.ue8m0x2.f32 %h, %a0, %a0", "cvt.rn.tf32.f16 %d0, %h",
    "cvt.rni.s16.f32 %d1x, %a0",
    "cvt.rn.relu.f16.f64 %h, %d1", "cvt.ftz.s32.s16 %d0, %h", "cvt.rn.f16x2.f32 %d0, %a0", "cvt.pack.sat.u8.s32 %d0, %a0, %a0",
    "cvt.rn.bf16.f32 %d0, %a0",
    "cvt.sat.s32.s32 %d0, %a0", "cvt.sat.s64.u32 %d1, %a0", "cvt.sat.u32.u8 %d0, %a0", "cvt.sat.f32.bf16 %d0, %h",
    "cvt.rn.sat.f16.bf16 %h, %h", "cvt.rn.sat.bf16.s32 %h, %a0", "cvt.rni.u8.bf16 %h, %h", "cvt.rn.bf16.s8 %h, %h",
    "cvt.rni.u8.bf16 %d0, %h", "cvt.rzi.ftz.s32.f16 %d0, %h", "cvt.rn.f32.f16 %d0, %h", "cvt.rz.f64.f32 %d1, %a0",
    "cvt.rn.f16.f16 %h, %h",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ptxemu.Unsupported) as error:
        execute(text + ";", ["b32", "b64"], [("b32", [0] * 64)])
    assert text in str(error.value)


def test_formats_of_the_references() -> None:
    assert FORMATS["e4m3"].value(FORMATS["e4m3"].largest) == 448
    assert FORMATS["e5m2"].value(FORMATS["e5m2"].largest) == 57344
    assert [FORMATS["e2m1"].value(c) for c in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert FORMATS["e2m3"].value(31) == 7.5
    assert FORMATS["e3m2"].value(31) == 28
    assert isinstance(FORMATS["f16"], Format)
