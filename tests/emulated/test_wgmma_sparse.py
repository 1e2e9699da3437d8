"""wgmma.mma_async.sp against numpy: shapes, types, layouts of A and B, metadata, and what is a fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from matrix_ptx import (
    BYTES,
    decode,
    fragment_a,
    fragment_d,
    fused,
    launch,
    matrix_d,
    module,
    names,
    place,
    random_bits,
    tensor,
    words_in,
    words_out,
)
from sparse_ptx import CHUNK, SMALL, Sparse, metadata_registers, sparse
from test_wgmma import WAIT, Layout, judge, setup

import ptxemu

K = {2: 32, 4: 16, 1: 64}


def wide(swizzle: str, n: int, at: int, size: int = 2, *, n_major: bool = False) -> Layout:
    """B without gaps: 64 bytes along k."""
    width = {"none": 16, "32": 32, "64": 64, "128": 128}[swizzle]
    if n_major and swizzle == "none":
        return Layout(swizzle, True, lead=n * size // 16 * 128, stride=128, at=at)
    if n_major:
        groups = -(-n * size // width)
        return Layout(swizzle, True, lead=8 * width, stride=8 * width * groups, at=at)
    if swizzle == "none":
        return Layout(swizzle, False, lead=128, stride=512, at=at)
    return Layout(swizzle, False, lead=16, stride=8 * width, at=at)


@dataclass
class Case:
    """One wgmma.mma_async.sp of a warpgroup."""

    n: int = 64
    ta: str = "bf16"
    tb: str = "bf16"
    td: str = "f32"
    registers: bool = False
    a: Layout = field(default_factory=Layout)
    b: Layout = field(default_factory=lambda: Layout(at=8192))
    selector: int = 0
    scale_d: str = "%p1"
    scale_a: int = 1
    saturate: bool = False
    ordered: bool = False
    seed: int = 0

    @property
    def k(self) -> int:
        return K[BYTES[self.ta]]

    @property
    def n_d(self) -> int:
        return self.n // 4 if self.td == "f16" else self.n // 2

    def instruction(self) -> str:
        source = names("a", 4) if self.registers else "%desc0"
        tail = [] if self.td == "s32" else [str(self.scale_a), "1"]
        if self.k == 32:
            tail += [] if self.registers else [str(int(self.a.mn_major))]
            tail.append(str(int(self.b.mn_major)))
        mod = ".satfinite" if self.saturate else ""
        opcode = f"wgmma.mma_async.sp.sync.aligned.m64n{self.n}k{self.k}{mod}.{self.td}.{self.ta}.{self.tb}"
        operands = [names("d", self.n_d), source, "%desc1", "%r0", str(self.selector), self.scale_d, *tail]
        return f"{opcode} {', '.join(operands)};"

    def matrices(self) -> tuple[Sparse, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        stored = random_bits(rng, (64, self.k // 2), self.ta)
        a = sparse(rng, stored, CHUNK[self.ta], ordered=self.ordered)
        return a, random_bits(rng, (self.n, self.k), self.tb), random_bits(rng, (64, self.n), self.td)


def run(case: Case, a: Sparse, b: np.ndarray, c: np.ndarray, before: str = "", after: str = "", **options: Any) -> Any:
    """D's bits."""
    image = np.zeros(65536, np.uint8)
    if not case.registers:
        place(image, a.stored, case.a.at, case.a.swizzle, case.a.mn_major, case.a.lead, case.a.stride)
    place(image, b, case.b.at, case.b.swizzle, case.b.mn_major, case.b.lead, case.b.stride)
    body = (
        setup(case)
        + f"""{words_in("r", 1, "meta", 128)}
    {before}
    wgmma.fence.sync.aligned;
    {case.instruction()}
    {after}
    {WAIT}
"""
        + words_out("d", case.n_d, "out", 128)
    )
    warps = range(4)
    regs = [fragment_a(a.stored[16 * w : 16 * w + 16]) for w in warps] if case.registers else [np.zeros((4, 32))] * 4
    holders = a.nibbles.shape[1] // 4  # threads of four that one selector names
    selector = case.selector % (4 // holders)
    meta = [metadata_registers(a.nibbles[16 * w : 16 * w + 16], case.ta in SMALL, selector) for w in warps]
    out = tensor(np.zeros((case.n_d, 128), np.uint32))
    args = [
        out, tensor(np.concatenate([fragment_d(c[16 * w : 16 * w + 16]) for w in warps], axis=1)),
        tensor(np.concatenate(regs, axis=1).astype(np.uint32)), tensor(image),
        tensor(np.array([case.a.descriptor(), case.b.descriptor()], np.uint64)), tensor(np.concatenate(meta)),
    ]  # fmt: skip
    text = module(body, ["out", "acc", "regs", "image", "descs", "meta"])
    launched = launch(text, 128, args, shared=65536, **options)
    assert not launched.notes
    words = out.numpy().view(np.uint32).reshape(case.n_d, 4, 32)
    return np.concatenate([matrix_d(words[:, w], 16, case.n, c.dtype.type) for w in warps])


def check(case: Case, **options: Any) -> None:
    a, b, c = case.matrices()
    raw = run(case, a, b, c, **options)
    x, y, z = decode(a.dense, case.ta), decode(b, case.tb), decode(c, case.td)
    z = z * (case.scale_d == "%p1")
    exact, size = case.scale_a * (x @ y.T) + z, np.abs(x) @ np.abs(y.T) + np.abs(z)
    judge(case, raw, exact, size)


# ---- results ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("selector", [0, 1])
@pytest.mark.parametrize(
    ("type_", "td"), [("f16", "f32"), ("f16", "f16"), ("bf16", "f32"), ("tf32", "f32")], ids=lambda x: str(x)
)
def test_wide_float_types(type_: str, td: str, selector: int, registers: bool) -> None:
    check(Case(n=48, ta=type_, tb=type_, td=td, registers=registers, selector=selector))


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("td", ["f16", "f32"])
@pytest.mark.parametrize(("ta", "tb"), [(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")])
def test_8_bit_float_types(ta: str, tb: str, td: str, registers: bool) -> None:
    check(Case(n=24, ta=ta, tb=tb, td=td, registers=registers))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(("ta", "tb"), [("s8", "s8"), ("s8", "u8"), ("u8", "s8"), ("u8", "u8")])
def test_integer_types(ta: str, tb: str, registers: bool, saturate: bool) -> None:
    check(Case(n=24, ta=ta, tb=tb, td="s32", registers=registers, saturate=saturate, ordered=True))


@pytest.mark.parametrize("n", [8, 16, 40, 128, 256])
@pytest.mark.parametrize(
    ("swizzle", "n_major"),
    [(s, n_major) for s in ("none", "32", "64", "128") for n_major in (False, True) if n_major or s != "32"],
)
def test_layouts_of_b(swizzle: str, n_major: bool, n: int) -> None:
    check(Case(n=n, b=wide(swizzle, n, 8192, n_major=n_major)))


@pytest.mark.parametrize("m_major", [False, True], ids=["k", "m"])
@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
def test_layouts_of_a(swizzle: str, m_major: bool) -> None:
    width = {"none": 16, "32": 32, "64": 64, "128": 128}[swizzle]
    if m_major:
        lead, stride = (1024, 128) if swizzle == "none" else (16 * width, 8 * width)
    else:
        lead, stride = (128, 256) if swizzle == "none" else (16, 8 * width)
    check(Case(n=32, a=Layout(swizzle, m_major, lead=lead, stride=stride)))


def test_signs_and_overwriting() -> None:
    check(Case(n=16, scale_d="%p2"))
    check(Case(n=16, scale_a=-1))


@pytest.mark.parametrize(("ta", "td"), [("bf16", "f32"), ("f16", "f16"), ("tf32", "f32"), ("e4m3", "f32")])
def test_rule_of_the_sum(ta: str, td: str) -> None:
    """Bit for bit the rule that dot.h states, over what is stored."""
    case = Case(n=8, ta=ta, tb=ta, td=td)
    a, b, c = case.matrices()
    d = decode(run(case, a, b, c), td)
    x, y, z = decode(a.dense, ta), decode(b, ta), decode(c, td)
    emin, narrow = {"f16": -14, "e4m3": -6}.get(ta, -126), ta == "e4m3"
    for i in range(64):
        for j in range(8):
            products = [(float(p), float(q)) for p, q in zip(x[i], y[j], strict=True)]
            assert d[i, j] == fused(
                float(z[i, j]), products, 13 if narrow else 25, (emin, emin), td, 13 if narrow else 23
            )


@pytest.mark.parametrize("options", [{"shuffle": True, "seed": 3, "quantum": 5}, {"eager": True}])
def test_metadata_is_that_of_the_issue(options: dict[str, Any]) -> None:
    """The metadata's register may change while the product is in flight: a warp that runs ahead does so."""
    check(Case(n=16), after="mov.b32 %r0, 0;", **options)


# ---- faults -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("type_", "nibble"), [("bf16", 0b0101), ("tf32", 0b1101), ("e4m3", 0)])
def test_metadata_without_meaning(type_: str, nibble: int) -> None:
    case = Case(n=8, ta=type_, tb=type_)
    a, b, c = case.matrices()
    a.nibbles[37, 1] = nibble
    with pytest.raises(ptxemu.WgmmaFault, match=f"metadata {nibble:#x}|metadata 0 of row 37"):
        run(case, a, b, c)


def test_undefined_metadata() -> None:
    """Only where a thread holds some."""
    case = Case(n=8)
    a, b, c = case.matrices()
    load = "add.u32 %r18, %r18, 0; mov.u32 %r18, smem; and.b32 %r3, %thread, 3; setp.eq.u32 %p3, %r3, {}; "
    load += "@%p3 ld.shared.b32 %r0, [%r18+65536]; // emulator only: the address is edited"
    options: dict[str, Any] = {"before": load.format(2)}
    fault = "the metadata of a sparse matrix depends on uninitialised shared"
    run_with_room(case, a, b, c, **options)
    with pytest.raises(ptxemu.MemoryFault, match=fault):
        run_with_room(case, a, b, c, before=load.format(1))


def run_with_room(case: Case, a: Sparse, b: np.ndarray, c: np.ndarray, before: str) -> None:
    """Shared memory ends with a word that nobody writes."""

    def edit(text: str) -> str:
        return text.replace("mov.u32 %r19, 65536;", "mov.u32 %r19, 65408;").replace("+65536]", "+65408]")

    run(case, a, b, c, before=before, edit=edit)


def test_32_byte_rows_of_b() -> None:
    case = Case(n=8, b=wide("32", 8, 8192))
    a, b, c = case.matrices()
    with pytest.raises(ptxemu.Unsupported, match="32-byte swizzling, in whose rows 64 bytes along k"):
        run(case, a, b, c)


def test_accumulator_used_in_flight() -> None:
    case = Case(n=8)
    a, b, c = case.matrices()
    with pytest.raises(ptxemu.WgmmaFault, match="an accumulator is used while a wgmma is in flight"):
        run(case, a, b, c, after="mov.b32 %r1, %d0;")


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(selector=2), "below 2 for 8 chunks"),
        (Case(ta="s8", tb="s8", td="s32", selector=1), "below 1 for 16 chunks"),
        (Case(ta="bf16", tb="f16"), "A and B of different types|shape"),
    ],
)
def test_unsupported_forms_are_named(case: Case, why: str) -> None:
    a, b, c = case.matrices()
    with pytest.raises(ptxemu.Unsupported, match=why):
        run(case, a, b, c)
