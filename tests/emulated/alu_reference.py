"""References for the arithmetic instructions on Python integers and fractions, and a kernel for any instruction."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

import ptxemu

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


# ---- number formats --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Format:
    """A binary format: bits of exponent and mantissa; which codes are special; its NaN."""

    exponent: int
    mantissa: int
    nan: int | None
    infinities: bool = True

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    @property
    def largest(self) -> int:
        if self.infinities:
            return self.infinity - 1
        return self.sign - 1 - (self.nan is not None)

    def value(self, code: int) -> Fraction | float:
        """Its value; infinities, NaN and -0.0 as floats."""
        negative, code = bool(code & self.sign), code & (self.sign - 1)
        if code > self.largest:
            return math.nan if not self.infinities or code > self.infinity else -math.inf if negative else math.inf
        e, m = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        x = Fraction(m + (1 << self.mantissa if e else 0)) * Fraction(2) ** ((e or 1) - self.bias - self.mantissa)
        return -0.0 if negative and x == 0 else -x if negative else x

    def code(
        self, x: Fraction | float, mode: str = "rn", *, satfinite: bool = False, random: tuple[int, int] | None = None
    ) -> int:
        """The code of the rounded value. random: stochastic rounding by so many random bits of this value."""
        if isinstance(x, float):
            if math.isnan(x):
                return self.largest if self.nan is None else self.nan
            negative = self.sign if math.copysign(1, x) < 0 else 0
            if math.isinf(x):
                return negative | (self.largest if satfinite or not self.infinities else self.infinity)
            if x == 0:
                return negative
            x = Fraction(x)
        if x == 0:
            return 0
        negative, size = (self.sign if x < 0 else 0), abs(x)
        e = max(_log2(size), 1 - self.bias)
        unit = Fraction(2) ** (e - self.mantissa)
        whole, rest = divmod(size, unit)
        rest /= unit
        up = {
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1), "rna": rest >= Fraction(1, 2), "rz": False,
            "rm": bool(negative) and rest > 0, "rp": not negative and rest > 0,
        }.get(mode)  # fmt: skip
        if mode == "rs":
            assert random is not None
            up = math.floor(rest * (1 << random[0])) + random[1] >= 1 << random[0]
        steps = int(whole) + bool(up)
        code = ((e - (1 - self.bias)) << self.mantissa) + steps
        if code > self.largest:
            away = mode in ("rn", "rna", "rs") or (mode == "rm" and negative) or (mode == "rp" and not negative)
            code = self.infinity if away and not satfinite and self.infinities else self.largest
        return negative | code


def _log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if x >= Fraction(2) ** e else e - 1


FORMATS = {
    "f16": Format(5, 10, 0x7FFF), "bf16": Format(8, 7, 0x7FFF), "f32": Format(8, 23, 0x7FFFFFFF), "f64": Format(11, 52, 0xFFF8 << 48),
    "tf32": Format(8, 10, 0x3FFFF), "e4m3": Format(4, 3, 0x7F, False), "e5m2": Format(5, 2, 0x7F), "e2m3": Format(2, 3, None, False),
    "e3m2": Format(3, 2, None, False), "e2m1": Format(2, 1, None, False),
}  # fmt: skip
WIDTHS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "tf32": 32}


def width(type_: str) -> int:
    """Bits of a PTX type."""
    if type_ == "pred":
        return 1
    if type_ in WIDTHS:
        return WIDTHS[type_]
    return int(type_.lstrip("busf").removesuffix("x2")) * (2 if type_.endswith("x2") else 1)


def flushed(code: int, f: Format) -> int:
    return code & f.sign if not code & f.infinity else code


def is_nan(code: int, f: Format) -> bool:
    return (code & (f.sign - 1)) > f.infinity


def saturated(x: Fraction | float) -> Fraction | float:
    if isinstance(x, float) and math.isnan(x):
        return Fraction(0)
    return Fraction(0) if x <= 0 else Fraction(1) if x >= 1 else x


def negative(x: Fraction | float) -> bool:
    return math.copysign(1, x) < 0 if isinstance(x, float) else x < 0


def exact(op: str, mode: str, *x: Fraction | float) -> Fraction | float:
    """The exact result of an operation; -0.0, infinities and NaN are floats. The mode decides the sign of a difference that is zero."""
    if op == "rcp":
        return exact("div", mode, Fraction(1), *x)
    if op == "fma":
        return exact("add", mode, exact("mul", mode, x[0], x[1]), x[2])
    a, b = x
    if op == "sub":
        return exact("add", mode, a, -b if b != 0 else Fraction(0) if negative(b) else -0.0)
    if any(isinstance(v, float) and math.isnan(v) for v in x):
        return math.nan
    infinite = [isinstance(v, float) and math.isinf(v) for v in x]
    if op == "add":
        if any(infinite):
            return sum((v for v, i in zip(x, infinite, strict=True) if i), 0.0)
        total = Fraction(a) + Fraction(b)
        if total != 0:
            return total
        return -0.0 if (negative(a) if negative(a) == negative(b) else mode == "rm") else Fraction(0)
    sign = -1.0 if negative(a) != negative(b) else 1.0
    if op == "mul":
        if any(infinite):
            return math.nan if a == 0 or b == 0 else sign * math.inf
        return Fraction(a) * Fraction(b) if a != 0 and b != 0 else sign * 0.0
    if all(infinite) or (a == 0 and b == 0):
        return math.nan
    if infinite[0] or b == 0:
        return sign * math.inf
    return sign * 0.0 if infinite[1] or a == 0 else Fraction(a) / Fraction(b)


def square_root(x: Fraction, f: Format, mode: str) -> int:
    """The code of a correctly rounded square root: an integer root with a sticky bit."""
    shift = 2 * (f.mantissa + 80 - _log2(x) // 2)
    scaled = x * Fraction(2) ** shift
    n = int(scaled)
    root = math.isqrt(n)
    value = Fraction(root) + (Fraction(1, 2) if root * root != scaled else 0)
    return f.code(value / Fraction(2) ** (shift // 2), mode)


def bits_of(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


# ---- values ----------------------------------------------------------------------------------------------------------------------
def samples(kind: str, n: int, seed: int) -> list[int]:
    """Codes of a type: edge values first, then random ones of all magnitudes."""
    rng = np.random.default_rng(seed)
    w = width(kind)
    if kind in FORMATS:
        f = FORMATS[kind]
        one = f.bias << f.mantissa
        edges = [0, 1, f.infinity >> 1, (1 << f.mantissa) - 1, 1 << f.mantissa, one - 1, one, one + 1, one + (1 << f.mantissa),
                 f.largest, f.infinity, f.infinity + 1, f.nan or 0]  # fmt: skip
        edges += [e | f.sign for e in edges if e <= f.infinity]
        near = [
            int(one + x)
            for x in rng.integers(-8 << f.mantissa if f.bias > 8 else -2 << f.mantissa, 8 << f.mantissa, n // 2)
        ]
        near = [x | (f.sign if rng.integers(2) else 0) for x in near]
        return (
            edges + near + [int(x) & (2 * f.sign - 1) for x in rng.integers(0, 1 << 63, n, dtype=np.uint64) * 2 + 1]
        )[:n]
    top = 1 << w
    edges = [
        0,
        1,
        2,
        3,
        top - 1,
        top - 2,
        top >> 1,
        (top >> 1) - 1,
        (top >> 1) + 1,
        0x55,
        31,
        32,
        33,
        63,
        64,
        8,
        16,
        255 % top,
    ]
    wide = [
        int(x) % top for x in rng.integers(0, 1 << 63, n, dtype=np.uint64) * 2 + rng.integers(0, 2, n, dtype=np.uint64)
    ]
    short = [x >> int(s) for x, s in zip(wide, rng.integers(0, w, n), strict=True)]
    return (edges + [x for pair in zip(wide, short, strict=True) for x in pair])[:n]


def columns(kinds: Sequence[str], n: int, seed: int = 0) -> list[list[int]]:
    """Operands: every edge value of one against many of the others."""
    out = []
    for i, kind in enumerate(kinds):
        values = samples(kind, n, seed + 17 * i)
        order = np.random.default_rng(seed + i).permutation(n)
        if i:
            head = 24
            mixed = [values[(j * (5 + 2 * i) + j // head) % head] for j in range(n // 2)]
            values = mixed + [values[j] for j in order[: n - len(mixed)]]
        else:
            values = [values[j % 24] if j < n // 2 else values[j] for j in range(n)]
        out.append(values)
    return out


# ---- a kernel for any instruction ------------------------------------------------------------------------------------------------
def _array(values: Sequence[int], w: int) -> torch.Tensor:
    store = {1: 32, 8: 16}.get(w, w)
    return torch.from_numpy(np.array(values, dtype=UNSIGNED[store]).view(SIGNED[store]).copy())


def execute(
    text: str, results: Sequence[str], sources: Sequence[tuple[str, Sequence[int]]], *, arch: str = "sm_90a",
    guard: Sequence[int] | None = None, declare: str = "", initial: int = 0, on_hardware: bool = True,
) -> list[list[int]]:  # fmt: skip
    """Run PTX `text` once per element: sources %a0, %a1... are loaded, results %d0... stored. guard: a predicate %g an element.

    Returns the results' bits. Results start as `initial`.
    """
    n = len(sources[0][1]) if sources else 64
    inputs = [*sources, *([("pred", guard)] if guard is not None else [])]
    body, args, params = [], [], []
    for i, (type_, values) in enumerate(inputs):
        name = "%g" if guard is not None and i == len(sources) else f"%a{i}"
        w = width(type_)
        params.append(f".param .u64 in{i}")
        args.append(_array(values, w))
        size = {1: 4, 8: 2}.get(w, w // 8)
        body += [
            f".reg .{'pred' if w == 1 else f'b{w}'} {name};",
            f"ld.param.u64 %q, [in{i}];",
            f"mad.wide.u32 %q, %index, {size}, %q;",
        ]
        if w == 1:
            body += ["ld.global.b32 %w, [%q];", f"setp.ne.b32 {name}, %w, 0;"]
        elif w == 8:
            body += ["ld.global.b16 %h, [%q];", f"mov.b16 {{{name}, %x}}, %h;"]
        else:
            body.append(f"ld.global.b{w} {name}, [%q];")
    outputs = []
    for i, type_ in enumerate(results):
        w = width(type_)
        body.append(f".reg .{'pred' if w == 1 else f'b{w}'} %d{i};")
        if w == 1:
            body.append(f"setp.ne.b32 %d{i}, {initial & 1}, 0;")
        elif w == 8:
            body += [f"mov.b16 %h, {initial & 0xFFFF};", f"mov.b16 {{%d{i}, %x}}, %h;"]
        else:
            body.append(f"mov.b{w} %d{i}, {initial & (1 << w) - 1};")
    body += [declare, text]
    for i, type_ in enumerate(results):
        w = width(type_)
        size = {1: 4, 8: 2}.get(w, w // 8)
        params.append(f".param .u64 out{i}")
        outputs.append(_array([0] * n, w))
        body += [f"ld.param.u64 %q, [out{i}];", f"mad.wide.u32 %q, %index, {size}, %q;"]
        if w == 1:
            body += [f"selp.b32 %w, 1, 0, %d{i};", "st.global.b32 [%q], %w;"]
        elif w == 8:
            body += [f"mov.b16 %h, {{%d{i}, %d{i}}};", "and.b16 %h, %h, 255;", "st.global.b16 [%q], %h;"]
        else:
            body.append(f"st.global.b{w} [%q], %d{i};")
    block = 64
    assert n % block == 0, n
    head = "" if on_hardware else "// emulator only\n"
    ptx = f"""{head}.version 8.8
.target {arch}
.address_size 64
.visible .entry kernel({", ".join(params)})
{{
.reg .b64 %q; .reg .b32 %w; .reg .b32 %index; .reg .b32 %t; .reg .b16 %h; .reg .b8 %x;
mov.u32 %index, %ctaid.x;
mov.u32 %t, %tid.x;
mad.lo.u32 %index, %index, {block}, %t;
{chr(10).join(body)}
ret;
}}
"""
    ptxemu.run_ptx(ptx, "kernel", (n // block,), (block,), [*args, *outputs], workers=1)
    found = []
    for out in outputs:
        raw = out.numpy()
        found.append([int(x) for x in raw.view(UNSIGNED[raw.itemsize * 8])])
    return found


def check(
    instruction: str, result: str, kinds: Sequence[str], reference: Callable[..., int], *, n: int = 256, seed: int = 0,
    arch: str = "sm_90a", values: Sequence[Sequence[int]] | None = None, same: Callable[[int, int], bool] | None = None,
    guard_on_hardware: bool = True,
) -> None:  # fmt: skip
    """An instruction against its reference on codes, for all lanes and under a guard (which `guard_on_hardware` may keep from hardware).

    instruction: PTX with `{d}`, `{a}`, `{b}`, `{c}`, `{e}` for the operands.
    """
    operands = list(values) if values is not None else columns(kinds, n, seed)
    names = dict(zip("abce", (f"%a{i}" for i in range(len(kinds))), strict=False))
    text = instruction.format(d="%d0", **names) + ";"
    sources = list(zip(kinds, operands, strict=True))
    expected = [reference(*row) for row in zip(*operands, strict=True)]
    (found,) = execute(text, [result], sources, arch=arch)
    same = same or (lambda x, y: x == y)
    for row, x, y in zip(zip(*operands, strict=True), found, expected, strict=True):
        assert same(x, y), f"{instruction}: operands {[hex(v) for v in row]} gave {x:#x}, expected {y:#x}"
    guard = [int(v) for v in np.random.default_rng(seed + 99).integers(0, 2, len(expected))]
    initial = 0x5A5A5A5A5A5A5A5A & (1 << max(width(result), 1)) - 1
    (kept,) = execute(
        f"@%g {text}", [result], sources, arch=arch, guard=guard, initial=initial, on_hardware=guard_on_hardware
    )
    wanted = [x if g else initial & (1 if width(result) == 1 else -1) for x, g in zip(found, guard, strict=True)]
    assert kept == wanted, f"@p {instruction}: lanes outside the guard changed, or inside differ"
