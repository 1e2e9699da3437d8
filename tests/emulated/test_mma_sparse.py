"""mma.sp: every shape and type against numpy, metadata in the threads that the PTX ISA's figures name; and 4-bit integers."""

from __future__ import annotations

import numpy as np
import pytest
from matrix_ptx import (
    decode,
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
from sparse_ptx import CHUNK, SMALL, Sparse, metadata_registers, sparse

import ptxemu


def nibbles_packed(matrix: np.ndarray) -> np.ndarray:
    """Elements of 4 bits, one a byte, two to a byte along the last axis, the first lower."""
    return (matrix[..., 0::2] | matrix[..., 1::2] << 4).astype(np.uint8)


def bits_of(matrix: np.ndarray, type_: str) -> np.ndarray:
    """The elements as they lie in registers, along the last axis."""
    return nibbles_packed(matrix) if type_ in ("s4", "u4") else matrix


def values_of(matrix: np.ndarray, type_: str) -> np.ndarray:
    if type_ not in ("s4", "u4"):
        return decode(matrix, type_)
    return np.where((type_ == "s4") & (matrix > 7), matrix.astype(np.int64) - 16, matrix).astype(np.float64)


def random_of(rng: np.random.Generator, shape: tuple[int, ...], type_: str) -> np.ndarray:
    return rng.integers(0, 16, shape).astype(np.uint8) if type_ in ("s4", "u4") else random_bits(rng, shape, type_)


def kernel(opcode: str, counts: tuple[int, int, int, int], selector: int | None, before: str = "") -> str:
    """d = a * b + c on one warp's registers; `counts`: registers of d, a, b, c."""
    d, a, b, c = (names(p, n) for p, n in zip(("d", "a", "b", "c"), counts, strict=True))
    params = ("a", "b", "c")
    body = "\n".join(words_in(p, n, p, 32) for p, n in zip(params, counts[1:], strict=True))
    tail = ""
    if selector is not None:
        body += "\n" + words_in("r", 1, "e", 32)
        tail = f", %r0, {selector}"
        params += ("e",)
    body += f"\n{before}\n    {opcode} {d}, {a}, {b}, {c}{tail};\n" + words_out("d", counts[0], "out", 32)
    return module(body, ["out", *params])


def run(
    opcode: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    types: tuple[str, str],
    meta: np.ndarray | None = None,
    selector: int = 0,
    before: str = "",
    **options: object,
) -> np.ndarray:
    """Bits of d for what is stored of a (m x k), for b (k x n) and c (m x n)."""
    fa = fragment_a(bits_of(a, types[0]))
    fb = fragment_b(np.ascontiguousarray(bits_of(np.ascontiguousarray(b.T), types[1]).T))
    fc = fragment_d(c)
    out = tensor(np.zeros(fc.shape, np.uint32))
    text = kernel(opcode, (len(fc), len(fa), len(fb), len(fc)), None if meta is None else selector, before)
    args = [out, tensor(fa), tensor(fb), tensor(fc), *([] if meta is None else [tensor(meta)])]
    launch(text, 32, args, **options)
    return matrix_d(out.numpy().view(np.uint32).reshape(fc.shape), *c.shape, c.dtype.type)


def sparse_of(rng: np.random.Generator, k: int, type_: str, ordered: bool) -> Sparse:
    return sparse(rng, random_of(rng, (16, k // 2), type_), CHUNK[type_], ordered=ordered)


FLOATS = [
    (t, t, d, k, s)
    for t, d in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"))
    for k, selectors in ((16, 4), (32, 2))
    for s in range(selectors)
] + [("tf32", "tf32", "f32", k, s) for k, selectors in ((8, 4), (16, 2)) for s in range(selectors)]
FLOATS += [(a, b, "f32", 64, 0) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]


@pytest.mark.parametrize("ordered", [False, True], ids=["sp", "ordered"])
@pytest.mark.parametrize(("ta", "tb", "td", "k", "selector"), FLOATS)
def test_float_shapes(ta: str, tb: str, td: str, k: int, selector: int, ordered: bool) -> None:
    """Bit for bit the rule that dot.h states, over what is stored."""
    rng = np.random.default_rng(k + selector)
    a = sparse_of(rng, k, ta, ordered)
    b, c = random_bits(rng, (k, 8), tb), random_bits(rng, (16, 8), td)
    form = "sp::ordered_metadata" if ordered else "sp"
    opcode = f"mma.{form}.sync.aligned.m16n8k{k}.row.col.{td}.{ta}.{tb}.{td}"
    meta = metadata_registers(a.nibbles, ta in SMALL, selector)
    d = decode(run(opcode, a.stored, b, c, (ta, tb), meta, selector), td)
    x, y, z = decode(a.dense, ta), decode(b, tb), decode(c, td)
    for i in range(16):
        for j in range(8):
            products = [(float(p), float(q)) for p, q in zip(x[i], y[:, j], strict=True)]
            assert d[i, j] == warp_sum(float(z[i, j]), products, (ta, tb), td, pair=4), (i, j)
    exact = x @ y + z
    assert np.abs(d - exact).max() < (0.1 if td == "f16" else 1e-4)


INTEGERS = [(k, s, a, b) for k, s in ((32, 0), (32, 1), (64, 0)) for a in ("s8", "u8") for b in ("s8", "u8")]
INTEGERS += [(k, s, a, b) for k, s in ((64, 0), (64, 1), (128, 0)) for a in ("s4", "u4") for b in ("s4", "u4")]


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("k", "selector", "ta", "tb"), INTEGERS)
def test_integer_shapes(k: int, selector: int, ta: str, tb: str, saturate: bool) -> None:
    rng = np.random.default_rng(k)
    a = sparse_of(rng, k, ta, saturate)
    b, c = random_of(rng, (k, 8), tb), random_bits(rng, (16, 8), "s32")
    c[:, 3] = np.where(np.arange(16) % 2, 0x7FFFFFFF, 0x80000000)
    form, mod = ("sp::ordered_metadata", ".satfinite") if saturate else ("sp", "")
    opcode = f"mma.{form}.sync.aligned.m16n8k{k}.row.col{mod}.s32.{ta}.{tb}.s32"
    meta = metadata_registers(a.nibbles, True, selector)
    d = run(opcode, a.stored, b, c, (ta, tb), meta, selector).view(np.int32)
    exact = (values_of(a.dense, ta) @ values_of(b, tb) + decode(c, "s32")).astype(np.int64)
    expected = np.clip(exact, -(2**31), 2**31 - 1) if saturate else (exact + 2**31) % 2**32 - 2**31
    assert (d == expected).all()


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("ta", ["s4", "u4"])
@pytest.mark.parametrize("tb", ["s4", "u4"])
@pytest.mark.parametrize(("m", "k"), [(8, 32), (16, 32), (16, 64)])
def test_dense_4_bit_integers(m: int, k: int, ta: str, tb: str, saturate: bool) -> None:
    rng = np.random.default_rng(k)
    a, b = random_of(rng, (m, k), ta), random_of(rng, (k, 8), tb)
    c = random_bits(rng, (m, 8), "s32")
    mod = ".satfinite" if saturate else ""
    d = run(f"mma.sync.aligned.m{m}n8k{k}.row.col{mod}.s32.{ta}.{tb}.s32", a, b, c, (ta, tb)).view(np.int32)
    assert (d == values_of(a, ta) @ values_of(b, tb) + decode(c, "s32")).all()


def test_what_is_not_stored_is_not_multiplied() -> None:
    """Infinities of B meet no element of A where its chunks leave them out."""
    rng = np.random.default_rng(0)
    a = sparse_of(rng, 16, "f16", True)
    b, c = random_bits(rng, (16, 8), "f16"), random_bits(rng, (16, 8), "f32")
    a.dense[:, 4:8] = 0
    a.dense[:, [4, 7]] = a.stored[:, 2:4]
    a.nibbles[:, 1] = 0b1100
    opcode, meta = OPCODE.format("", "f16", "f16"), metadata_registers(a.nibbles, False, 0)
    plain = run(opcode, a.stored, b, c, ("f16", "f16"), meta)
    b[5:7] = 0x7C00
    assert (run(opcode, a.stored, b, c, ("f16", "f16"), meta) == plain).all()
    b[4] = 0x7C00
    assert (~np.isfinite(decode(run(opcode, a.stored, b, c, ("f16", "f16"), meta), "f32"))).all()


# ---- faults -------------------------------------------------------------------------------------------------------------------------
OPCODE = "mma.sp{}.sync.aligned.m16n8k16.row.col.f32.{}.{}.f32"


def with_metadata(nibble: int, type_: str = "f16", form: str = "", before: str = "", k: int = 16) -> None:
    rng = np.random.default_rng(0)
    a = sparse_of(rng, k, type_, True)
    a.nibbles[3, 2] = nibble
    b, c = random_bits(rng, (k, 8), type_), random_bits(rng, (16, 8), "f32")
    opcode = OPCODE.format(form, type_, type_).replace("k16", f"k{k}")
    run(opcode, a.stored, b, c, (type_, type_), metadata_registers(a.nibbles, False, 0), 0, before)


@pytest.mark.parametrize("nibble", [0b0000, 0b0101, 0b1010, 0b1111])
def test_metadata_without_meaning(nibble: int) -> None:
    with pytest.raises(ptxemu.EmulatorError, match=r"metadata .* of row 3, elements 8 to 11, means nothing"):
        with_metadata(nibble)


def test_ordered_metadata_must_be_ordered() -> None:
    with_metadata(0b0001)
    with pytest.raises(ptxemu.EmulatorError, match=r"means nothing \(.sp::ordered_metadata\)"):
        with_metadata(0b0001, form="::ordered_metadata")


@pytest.mark.parametrize("nibble", [0b0001, 0b1000, 0b1100])
def test_metadata_of_tf32(nibble: int) -> None:
    with pytest.raises(ptxemu.EmulatorError, match="row 3, elements 4 to 5, means nothing"):
        with_metadata(nibble, "tf32", k=8)


def test_undefined_metadata() -> None:
    """Only where a thread holds some."""
    load = "mov.u32 %r18, smem; @{} ld.shared.b32 %r0, [%r18];"
    select = "and.b32 %r2, %thread, 3; setp.eq.u32 %p1, %r2, 0;\n"
    rng = np.random.default_rng(0)
    a = sparse_of(rng, 16, "f16", True)
    b, c = random_bits(rng, (16, 8), "f16"), random_bits(rng, (16, 8), "f32")
    args = (OPCODE.format("", "f16", "f16"), a.stored, b, c, ("f16", "f16"), metadata_registers(a.nibbles, False, 0), 0)
    run(*args, select + load.format("!%p1"), shared=128)
    with pytest.raises(ptxemu.MemoryFault, match="the metadata of a sparse matrix depends on uninitialised shared"):
        run(*args, select + load.format("%p1"), shared=128)


def test_undefined_operand_rows() -> None:
    """A row of A that is undefined makes a row of D so; what is stored elsewhere stays defined."""
    load = "mov.u32 %r18, smem; setp.lt.u32 %p1, %thread, 4; @%p1 ld.shared.b32 %a0, [%r18];\n"
    rng = np.random.default_rng(0)
    a = sparse_of(rng, 16, "f16", True)
    b, c = random_bits(rng, (16, 8), "f16"), random_bits(rng, (16, 8), "f32")
    meta = metadata_registers(a.nibbles, False, 0)
    with pytest.raises(ptxemu.MemoryFault, match="stored to global memory depends on uninitialised"):
        run(OPCODE.format("", "f16", "f16"), a.stored, b, c, ("f16", "f16"), meta, 0, load, shared=128)


@pytest.mark.parametrize(
    ("opcode", "counts", "selector", "why"),
    [
        ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", (4, 2, 2, 4), 4, "below 4 for 4 chunks"),
        ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", (4, 4, 4, 4), 2, "below 2 for 8 chunks"),
        ("mma.sp.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32", (4, 4, 4, 4), 1, "below 1 for 16 chunks"),
        ("mma.sp.sync.aligned.m16n8k64.row.col.f16.e4m3.e4m3.f16", (2, 4, 4, 2), 0, "shape"),
        ("mma.sp.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", (4, 2, 2, 4), 0, "shape"),
        (
            "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0",
            (4, 4, 2, 4),
            None,
            "sm_120a",
        ),
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e4m3.f32", (4, 4, 2, 4), None, "sm_120a"),
    ],
)
def test_unsupported_forms_are_named(
    opcode: str, counts: tuple[int, int, int, int], selector: int | None, why: str
) -> None:
    data = [tensor(np.zeros((n, 32), np.uint32)) for n in (*counts, *([] if selector is None else [1]))]
    with pytest.raises(ptxemu.Unsupported, match=why):
        launch(kernel(opcode, counts, selector), 32, data)
