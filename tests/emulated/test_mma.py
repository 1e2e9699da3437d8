"""mma.sync: every shape and type against numpy, with fragments as the PTX ISA lays them out."""

from __future__ import annotations

import numpy as np
import pytest
from matrix_ptx import (
    decode,
    encode,
    fragment_a,
    fragment_b,
    fragment_d,
    launch,
    matrix_d,
    module,
    names,
    random_bits,
    tensor,
    warp_sum,
    words_in,
    words_out,
)

import ptxemu


def kernel(opcode: str, counts: tuple[int, int, int, int], type_: str = "b32", before: str = "") -> str:
    """d = a * b + c on one warp's registers; `counts`: registers of d, a, b, c."""
    prefix = ("w", "x", "y", "z") if type_ == "b64" else ("d", "a", "b", "c")
    d, a, b, c = (names(p, n) for p, n in zip(prefix, counts, strict=True))
    body = "\n".join(
        words_in(p, n, s, 32, type_) for p, n, s in zip(prefix[1:], counts[1:], ("a", "b", "c"), strict=True)
    )
    body += f"\n{before}\n    {opcode} {d}, {a}, {b}, {c};\n" + words_out(prefix[0], counts[0], "out", 32, type_)
    return module(body, ["out", "a", "b", "c"])


def run(opcode: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, **options: object) -> np.ndarray:
    """Bits of d for bits of a (m x k), b (k x n) and c (m x n)."""
    fa, fb, fc = fragment_a(a), fragment_b(b), fragment_d(c)
    out = tensor(np.zeros(fc.shape, np.uint32))
    text = kernel(opcode, (len(fc), len(fa), len(fb), len(fc)))
    launch(text, 32, [out, tensor(fa), tensor(fb), tensor(fc)], **options)
    return matrix_d(out.numpy().view(np.uint32).reshape(fc.shape), *c.shape, c.dtype.type)


FLOATS = [
    (t, t, d, k) for t, d, ks in (
        ("f16", "f32", (8, 16)), ("f16", "f16", (8, 16)), ("bf16", "f32", (8, 16)), ("tf32", "f32", (4, 8)),
    ) for k in ks
] + [
    (a, b, d, k) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for d in ("f32", "f16") for k in (16, 32)
]  # fmt: skip


@pytest.mark.parametrize(("ta", "tb", "td", "k"), FLOATS)
def test_float_shapes(ta: str, tb: str, td: str, k: int) -> None:
    rng = np.random.default_rng(k)
    a, b, c = random_bits(rng, (16, k), ta), random_bits(rng, (k, 8), tb), random_bits(rng, (16, 8), td)
    d = decode(run(f"mma.sync.aligned.m16n8k{k}.row.col.{td}.{ta}.{tb}.{td}", a, b, c), td)
    exact = decode(a, ta) @ decode(b, tb) + decode(c, td)
    size = np.abs(decode(a, ta)) @ np.abs(decode(b, tb)) + np.abs(decode(c, td))
    error = 2.0**-22 if td == "f32" else 2.0**-11 if ta == "f16" else 3 * 2.0**-11
    assert (np.abs(d - exact) <= size * error).all()
    assert (np.abs(exact) > 0.1).any()


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e30, 1e-25])
@pytest.mark.parametrize(
    ("ta", "td", "k"),
    [
        ("bf16", "f32", 16), ("f16", "f32", 16), ("f16", "f16", 16), ("tf32", "f32", 8), ("e4m3", "f32", 32), ("e4m3", "f16", 32),
        ("e5m2", "f32", 16), ("e5m2", "f16", 16),
    ],
)  # fmt: skip
def test_rule_of_the_sum(ta: str, td: str, k: int, scale: float) -> None:
    """Bit for bit the rule that dot.h states, whatever the numbers' range."""
    if scale not in (1.0, 1e-4) and ta not in ("bf16", "tf32"):
        scale = {1e30: 100.0, 1e-25: 1e-6}[scale]
    rng = np.random.default_rng(7)
    spread = 2.0 ** rng.integers(-6, 6, (16, k))
    a = encode(rng.standard_normal((16, k)) * spread * scale, ta)
    b = random_bits(rng, (k, 8), tb := ta, 3.0)
    a[3] = 0
    b[:, 2] = 0
    b[1] = 0
    c = encode(rng.standard_normal((16, 8)) * min(scale, 1e3) * 0.3, td)
    d = decode(run(f"mma.sync.aligned.m16n8k{k}.row.col.{td}.{ta}.{tb}.{td}", a, b, c), td)
    x, y, z = decode(a, ta), decode(b, tb), decode(c, td)
    for i in range(16):
        for j in range(8):
            products = [(float(p), float(q)) for p, q in zip(x[i], y[:, j], strict=True)]
            assert d[i, j] == warp_sum(float(z[i, j]), products, (ta, tb), td), (i, j)


def test_special_values() -> None:
    rng = np.random.default_rng(0)
    a, b, c = random_bits(rng, (16, 16), "bf16"), random_bits(rng, (16, 8), "bf16"), random_bits(rng, (16, 8), "f32")
    x, y, z = decode(a, "bf16"), decode(b, "bf16"), decode(c, "f32")
    x[0, 3], x[1, 4], y[5, 2], z[3, 3] = np.inf, np.nan, -np.inf, -np.inf
    x[5], z[5] = 0, 0
    y[3] = np.abs(y[3]) + 1
    x[:, 5] = np.abs(x[:, 5]) + 1
    x[5, 5] = 0
    a, b, c = encode(x, "bf16"), encode(y, "bf16"), encode(z, "f32")
    raw = run("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", a, b, c)
    d = decode(raw, "f32")
    with np.errstate(invalid="ignore"):
        exact = x @ y + z
    assert (np.isnan(d) == np.isnan(exact)).all()
    assert (d[np.isinf(exact)] == exact[np.isinf(exact)]).all()
    assert (raw[np.isnan(exact)] == 0x7FFFFFFF).all()
    assert (d[5, [0, 1, 3]] == 0).all()
    assert np.isnan(d[5, 2])


@pytest.mark.parametrize("special", [np.inf, np.nan])
def test_special_values_times_tiny_ones(special: float) -> None:
    """Their products' exponents are small, and they are special all the same."""
    a, b, c = np.zeros((16, 16)), np.full((16, 8), 2.0**-120), np.ones((16, 8))
    a[2, 5] = special
    bits = encode(a, "bf16"), encode(b, "bf16"), encode(c, "f32")
    d = decode(run("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", *bits), "f32")
    assert np.array_equal(d[2], np.full(8, special), equal_nan=True)
    assert (np.delete(d, 2, 0) == 1).all()


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("ta", ["s8", "u8"])
@pytest.mark.parametrize("tb", ["s8", "u8"])
@pytest.mark.parametrize(("m", "k"), [(8, 16), (16, 16), (16, 32)])
def test_integer_shapes(m: int, k: int, ta: str, tb: str, saturate: bool) -> None:
    rng = np.random.default_rng(k)
    a, b = random_bits(rng, (m, k), ta), random_bits(rng, (k, 8), tb)
    a[1], b[:, 1] = 127, 127
    c = random_bits(rng, (m, 8), "s32")
    c[0, 0], c[1, 1], c[2, 2] = np.uint32(0x7FFFFFFF), np.uint32(0x7FFFFFF0), np.uint32(0x80000000)
    mod = ".satfinite" if saturate else ""
    d = run(f"mma.sync.aligned.m{m}n8k{k}.row.col{mod}.s32.{ta}.{tb}.s32", a, b, c).view(np.int32)
    exact = (decode(a, ta) @ decode(b, tb) + decode(c, "s32")).astype(np.int64)
    expected = (
        np.clip(exact, -(2**31), 2**31 - 1) if saturate else exact.astype(np.uint64).astype(np.uint32).view(np.int32)
    )
    assert exact.max() > 2**31 - 1
    assert (d == expected).all()


@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_f64(m: int, k: int) -> None:
    rng = np.random.default_rng(k)
    a, b, c = (rng.standard_normal(s) for s in ((m, k), (k, 8), (m, 8)))
    halves = m // 8
    lane = np.arange(32)
    group, inner = lane // 4, lane % 4
    fa = np.stack([a[group + 8 * (r % halves), r // halves * 4 + inner] for r in range(halves * k // 4)])
    fb = np.stack([b[4 * r + inner, group] for r in range(k // 4)])
    fc = np.stack([c[group + 8 * (i // 2), 2 * inner + i % 2] for i in range(2 * halves)])
    out = tensor(np.zeros((2 * halves, 32)))
    text = kernel(f"mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64", (len(fc), len(fa), len(fb), len(fc)), "b64")
    launch(text, 32, [out, tensor(fa), tensor(fb), tensor(fc)])
    d = out.numpy().view(np.float64).reshape(2 * halves, 32)
    exact = a @ b + c
    for i in range(2 * halves):
        assert np.allclose(d[i], exact[group + 8 * (i // 2), 2 * inner + i % 2], rtol=1e-14, atol=1e-14)


def test_result_may_overwrite_operands() -> None:
    rng = np.random.default_rng(1)
    a, b, c = random_bits(rng, (16, 16), "f16"), random_bits(rng, (16, 8), "f16"), random_bits(rng, (16, 8), "f32")
    text = kernel("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", (4, 4, 2, 4))
    text = text.replace("f32 {%d0, %d1, %d2, %d3}", "f32 {%a0, %b0, %c0, %a2}")
    for i, name in enumerate(("%a0", "%b0", "%c0", "%a2")):
        text = text.replace(f"], %d{i};", f"], {name};")
    out = tensor(np.zeros((4, 32), np.uint32))
    launch(text, 32, [out, tensor(fragment_a(a)), tensor(fragment_b(b)), tensor(fragment_d(c))])
    d = matrix_d(out.numpy().view(np.uint32).reshape(4, 32), 16, 8, np.uint32)
    assert (d == run("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", a, b, c)).all()


def test_part_of_a_warp_is_a_fault() -> None:
    text = kernel(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        (4, 4, 2, 4),
        before="setp.lt.u32 %p1, %thread, 16;\n@%p1 ret;",
    )
    data = [tensor(np.zeros((n, 32), np.uint32)) for n in (4, 4, 2, 4)]
    with pytest.raises(ptxemu.BarrierFault, match="all 32 lanes"):
        launch(text, 32, data)


@pytest.mark.parametrize(
    ("opcode", "why"),
    [
        ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "metadata, selector"),
        ("mma.sync.aligned.m16n8k16.row.col.kind::f8f6f4.f32.f16.f16.f32", "kind::f8f6f4"),
        ("mma.sync.aligned.m16n8k16.row.row.f32.f16.f16.f32", "row.col"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", "shape"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.e2m1.e2m1.f32", "e2m1"),
    ],
)  # fmt: skip
def test_unsupported_forms_are_named(opcode: str, why: str) -> None:
    text = kernel(opcode, (4, 4, 2, 4))
    data = [tensor(np.zeros((n, 32), np.uint32)) for n in (4, 4, 2, 4)]
    with pytest.raises(ptxemu.Unsupported, match=why):
        launch(text, 32, data)
