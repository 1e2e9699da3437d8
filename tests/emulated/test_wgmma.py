"""wgmma: layouts, swizzles, types and shapes against numpy; and each rule of its asynchrony broken once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from matrix_ptx import (
    BYTES,
    decode,
    descriptor,
    encode,
    fragment_a,
    fragment_d,
    fused,
    image_in,
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

import ptxemu

K = {2: 16, 4: 8, 1: 32}
WAIT = "wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;"


@dataclass
class Layout:
    """Where an operand lies in shared memory."""

    swizzle: str = "128"
    mn_major: bool = False
    lead: int = 16
    stride: int = 1024
    at: int = 0
    base: int = 0

    def descriptor(self) -> int:
        return descriptor(self.at, self.swizzle, self.lead, self.stride, self.base)


def compact(swizzle: str, mn_major: bool, mn: int, size: int, at: int) -> Layout:
    """A layout without gaps: for K-major a slice of 32 bytes along k of rows as wide as the swizzle."""
    width = {"none": 16, "32": 32, "64": 64, "128": 128}[swizzle]
    if not mn_major:
        if swizzle == "none":
            return Layout(swizzle, mn_major, lead=128, stride=256, at=at)
        return Layout(swizzle, mn_major, lead=16, stride=8 * width, at=at)
    if swizzle == "none":
        return Layout(swizzle, mn_major, lead=mn * size // 16 * 128, stride=128, at=at)
    return Layout(swizzle, mn_major, lead=16 * width, stride=8 * width, at=at)


@dataclass
class Case:
    """One wgmma.mma_async of one warpgroup."""

    n: int = 64
    ta: str = "bf16"
    tb: str = "bf16"
    td: str = "f32"
    registers: bool = False
    a: Layout = field(default_factory=Layout)
    b: Layout = field(default_factory=lambda: Layout(at=8192))
    scale_d: str = "%p1"
    scale_a: int = 1
    scale_b: int = 1
    saturate: bool = False
    seed: int = 0
    scale: float = 1.0

    @property
    def k(self) -> int:
        return K[BYTES[self.ta]]

    @property
    def n_d(self) -> int:
        return self.n // 4 if self.td == "f16" else self.n // 2

    def instruction(self, a: str = "", b: str = "%desc1", d: str = "d") -> str:
        mod = ".satfinite" if self.saturate else ""
        source = a or (names("a", 4) if self.registers else "%desc0")
        tail = [self.scale_d]
        if self.td != "s32":
            tail += [str(self.scale_a), str(self.scale_b)]
        if self.k == 16:
            tail += [] if self.registers else [str(int(self.a.mn_major))]
            tail.append(str(int(self.b.mn_major)))
        shape = f"m64n{self.n}k{self.k}"
        opcode = f"wgmma.mma_async.sync.aligned.{shape}{mod}.{self.td}.{self.ta}.{self.tb}"
        return f"{opcode} {names(d, self.n_d)}, {source}, {b}, {', '.join(tail)};"

    def matrices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        a = random_bits(rng, (64, self.k), self.ta, self.scale)
        return a, random_bits(rng, (self.n, self.k), self.tb), random_bits(rng, (64, self.n), self.td)

    def image(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        image = np.zeros(65536, np.uint8)
        if not self.registers:
            place(image, a, self.a.at, self.a.swizzle, self.a.mn_major, self.a.lead, self.a.stride, self.a.base)
        place(image, b, self.b.at, self.b.swizzle, self.b.mn_major, self.b.lead, self.b.stride, self.b.base)
        return image


def setup(case: Any, groups: int = 1, fence: bool = True, barrier: bool = True) -> str:
    """Shared memory, descriptors, accumulators and A's registers are loaded; %p1 is true."""
    threads = 128 * groups
    return f"""
    mov.u32 %r19, 65536;
    {image_in(fence=fence, barrier=barrier)}
    ld.global.u64 %desc0, [%descs];
    ld.global.u64 %desc1, [%descs+8];
    setp.eq.u32 %p1, 0, 0;
    setp.ne.u32 %p2, 0, 0;
{words_in("d", case.n_d, "acc", threads)}
{words_in("a", 4, "regs", threads)}
"""


def run(
    case: Case, body: str | None = None, groups: int = 1, bits: tuple[np.ndarray, ...] | None = None, **options: Any
) -> tuple[np.ndarray, Any]:
    """D's bits of every warpgroup (or a body's output), and what was launched."""
    a, b, c = bits or case.matrices()
    threads = 128 * groups
    if body is None:
        body = setup(case, groups) + f"""
    wgmma.fence.sync.aligned;
    {case.instruction()}
    {WAIT}
""" + words_out("d", case.n_d, "out", threads)  # fmt: skip
    warps = [fragment_d(c[16 * w : 16 * w + 16]) for w in range(4)] * groups
    registers = [np.zeros((4, 32), np.uint32)] * 4 * groups
    if case.registers:
        registers = [fragment_a(a[16 * w : 16 * w + 16]) for w in range(4)] * groups
    out = tensor(np.zeros((case.n_d, threads), np.uint32))
    args = [
        out, tensor(np.concatenate(warps, axis=1)), tensor(np.concatenate(registers, axis=1)), tensor(case.image(a, b)),
        tensor(np.array([case.a.descriptor(), case.b.descriptor()], np.uint64)),
    ]  # fmt: skip
    text = module(body, ["out", "acc", "regs", "image", "descs"])
    launched = launch(text, threads, args, shared=65536, **options)
    words = out.numpy().view(np.uint32).reshape(case.n_d, 4 * groups, 32)
    return np.concatenate([matrix_d(words[:, w], 16, case.n, c.dtype.type) for w in range(4 * groups)]), launched


def check(case: Case, **options: Any) -> None:
    a, b, c = case.matrices()
    raw, launched = run(case, **options)
    x, y, z = decode(a, case.ta), decode(b, case.tb), decode(c, case.td)
    z = z * (case.scale_d in ("%p1", "!%p2", "1"))
    sign = case.scale_a * case.scale_b
    exact, size = sign * (x @ y.T) + z, np.abs(x) @ np.abs(y.T) + np.abs(z)
    judge(case, raw, exact, size)
    assert not launched.notes


def judge(case: Any, raw: np.ndarray, exact: np.ndarray, size: np.ndarray) -> None:
    """D's bits against exact sums of terms whose absolute values sum to `size`."""
    if case.td == "s32":
        expected = np.clip(exact, -(2**31), 2**31 - 1) if case.saturate else exact
        assert (raw.view(np.int32) == expected.astype(np.int64).astype(np.int32)).all()
        return
    error = 2.0**-10 if case.td == "f16" else 2.0**-11 if BYTES[case.ta] == 1 else 2.0**-22
    assert (np.abs(decode(raw, case.td) - exact) <= error * size).all()


# ---- layouts ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [8, 24, 64, 128, 256])
@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
def test_layouts_of_b(swizzle: str, b_major: str, n: int) -> None:
    b = compact(swizzle, b_major == "n", n, 2, at=8192)
    check(Case(n=n, b=b, a=compact("128", False, 64, 2, 0)))


@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("swizzle", ["none", "32", "64", "128"])
@pytest.mark.parametrize("type_", ["bf16", "f16"])
def test_layouts_of_a(type_: str, swizzle: str, a_major: str) -> None:
    check(Case(n=32, ta=type_, tb=type_, a=compact(swizzle, a_major == "m", 64, 2, 0)))


@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_strides_with_gaps(a_major: str, b_major: str) -> None:
    """Strides that no dense tile has, so that every field of the descriptor counts."""
    a = (
        Layout("none", a_major == "m", lead=2320, stride=272)
        if a_major == "k"
        else Layout("none", True, lead=2064, stride=144)
    )
    b = Layout("64", b_major == "n", lead=3072, stride=1536, at=16384)
    check(Case(n=72, a=a, b=b))


@pytest.mark.parametrize("step", [32, 64, 96])
def test_slice_along_k_of_a_wide_tile(step: int) -> None:
    """The start address moves inside the swizzle pattern, as for the k blocks of a 64-element tile."""
    check(Case(n=64, a=Layout(at=step), b=Layout(at=8192 + step)))


@pytest.mark.parametrize("lines", [1, 3, 7])
def test_base_offset(lines: int) -> None:
    """A pattern that starts off a 1024-byte boundary has its 128-byte lines counted from there."""
    check(Case(n=64, a=Layout(at=128 * lines, base=lines), b=Layout(at=16384 + 128 * lines, base=lines)))


# ---- shapes and types ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_n(n: int) -> None:
    check(Case(n=n, registers=n % 16 == 0))


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(
    ("ta", "tb", "td"),
    [("f16", "f16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32")]
    + [(a, b, d) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for d in ("f16", "f32")],
)
def test_float_types(ta: str, tb: str, td: str, registers: bool) -> None:
    check(Case(n=48, ta=ta, tb=tb, td=td, registers=registers))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(("ta", "tb"), [("s8", "s8"), ("s8", "u8"), ("u8", "s8"), ("u8", "u8")])
def test_integer_types(ta: str, tb: str, registers: bool, saturate: bool) -> None:
    case = Case(n=24, ta=ta, tb=tb, td="s32", registers=registers, saturate=saturate)
    check(case)
    a, b, c = case.matrices()
    a[:], b[:] = 100, 100
    c[:, ::2] = 0x7FFFFFF0
    d = run(case, bits=(a, b, c))[0].view(np.int32)
    assert (d[:, ::2] == (2**31 - 1 if saturate else -(2**31) + 320000 - 16)).all()


@pytest.mark.parametrize("signs", [(1, 1), (-1, 1), (1, -1), (-1, -1)])
@pytest.mark.parametrize("scale_d", ["%p1", "%p2", "!%p1", "!%p2", "1", "0"])
def test_scales(scale_d: str, signs: tuple[int, int]) -> None:
    check(Case(n=16, scale_d=scale_d, scale_a=signs[0], scale_b=signs[1]))


@pytest.mark.parametrize(("ta", "td"), [("bf16", "f32"), ("f16", "f16"), ("tf32", "f32"), ("e4m3", "f32")])
def test_rule_of_the_sum(ta: str, td: str) -> None:
    """Bit for bit the rule that dot.h states; mma.sync's tests have the numbers' range."""
    case = Case(n=8, ta=ta, tb=ta, td=td)
    a, b, c = case.matrices()
    d = decode(run(case)[0], td)
    x, y, z = decode(a, ta), decode(b, ta), decode(c, td)
    emin, narrow = {"f16": -14, "e4m3": -6}.get(ta, -126), ta == "e4m3"
    for i in range(64):
        for j in range(8):
            products = [(float(p), float(q)) for p, q in zip(x[i], y[j], strict=True)]
            assert d[i, j] == fused(
                float(z[i, j]), products, 13 if narrow else 25, (emin, emin), td, 13 if narrow else 23
            )


def test_a_chain_accumulates() -> None:
    """Several wgmma of one shape in one group, between one fence and one wait."""
    case = Case(n=64)
    a, b, c = case.matrices()
    body = (
        setup(case)
        + "wgmma.fence.sync.aligned;\n"
        + 3 * (case.instruction() + "\n")
        + WAIT
        + words_out("d", 32, "out", 128)
    )
    d = decode(run(case, body)[0], "f32")
    exact = 3 * (decode(a, "bf16") @ decode(b, "bf16").T) + decode(c, "f32")
    assert np.abs(d - exact).max() < 1e-4


# ---- schedules ------------------------------------------------------------------------------------------------------------------------
def pipelined(case: Case, groups: int = 1) -> str:
    """Two groups in flight; the first is read after wait_group 1."""
    threads = 128 * groups
    return setup(case, groups) + f"""
    wgmma.fence.sync.aligned;
    {case.instruction()}
    {case.instruction()}
    wgmma.commit_group.sync.aligned;
    {case.instruction(d="c").replace("%p1", "%p2")}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 1;
""" + words_out("d", case.n_d, "out", threads) + """
    wgmma.wait_group.sync.aligned 0;
"""  # fmt: skip


@pytest.mark.parametrize("groups", [1, 2])
def test_schedules_do_not_matter(groups: int) -> None:
    case = Case(n=40, registers=True)
    first, _ = run(case, pipelined(case, groups), groups)
    for seed in range(6):
        again, launched = run(case, pipelined(case, groups), groups, seed=seed, shuffle=True, quantum=1 + 7 * seed)
        assert (again == first).all()
        assert not launched.notes


# ---- faults ------------------------------------------------------------------------------------------------------------------------------
def faulty(
    body: str, kind: type[ptxemu.EmulatorError], match: str, case: Case | None = None, groups: int = 1, **options: Any
) -> None:
    """The body has this fault, whatever the schedule."""
    for seed in range(3):
        with pytest.raises(kind, match=match):
            run(case or Case(n=16), body, groups, seed=seed, shuffle=seed > 0, quantum=(2000, 3, 40)[seed], **options)


def body_of(*parts: str, case: Case | None = None, groups: int = 1, **options: bool) -> str:
    case = case or Case(n=16)
    end = words_out("d", case.n_d, "out", 128 * groups)
    return setup(case, groups, **options) + "\n".join(parts) + end


FENCE = "wgmma.fence.sync.aligned;"
COMMIT = "wgmma.commit_group.sync.aligned;"
MMA = Case(n=16).instruction()
MMA_REGISTERS = Case(n=16, registers=True).instruction()


def test_missing_fence() -> None:
    faulty(body_of(MMA, WAIT), ptxemu.WgmmaFault, "no wgmma.fence before the first")


@pytest.mark.parametrize(
    "write",
    ["mov.b32 %d3, 0;", "ld.global.b32 %d0, [%at];", "@%p1 add.f32 %d3, %d3, %d3;", "mov.b64 {%r1, %d2}, %desc0;"],
)
def test_accumulator_written_without_a_fence(write: str) -> None:
    match = "an accumulator was written after a wgmma on it and there is no wgmma.fence"
    faulty(body_of(FENCE, MMA, WAIT, write, MMA, WAIT), ptxemu.WgmmaFault, match)
    other = MMA.replace("%d", "%c").replace("%cesc", "%desc")
    faulty(body_of(FENCE, MMA, WAIT, write, other, MMA, WAIT), ptxemu.WgmmaFault, match)
    run(Case(n=16), body_of(FENCE, MMA, WAIT, write, FENCE, MMA, WAIT))


def test_what_compilers_do_over_a_fence() -> None:
    """They move writes behind it, also between other wgmma, and read accumulators with none after it."""
    case = Case(n=16)
    write, read = "mov.b32 %d3, 0;", "mov.b32 %r1, %d3;"
    other = MMA.replace("%d", "%c").replace("%cesc", "%desc")
    ordered, _ = run(case, body_of(FENCE, MMA, WAIT, write, FENCE, MMA, WAIT))
    moved, launched = run(case, body_of(FENCE, MMA, WAIT, FENCE, other, write, MMA, WAIT))
    assert (moved == ordered).all()
    assert not launched.notes
    run(case, body_of(FENCE, MMA, WAIT, read, MMA, WAIT))


def test_operand_a_written_without_a_fence() -> None:
    case, body = Case(n=16, registers=True), body_of(FENCE, MMA_REGISTERS, WAIT, "mov.b32 %a2, 0;", MMA_REGISTERS, WAIT)
    faulty(body, ptxemu.WgmmaFault, "a register of operand A was written", case)


def test_a_guarded_off_use_is_none() -> None:
    run(Case(n=16), body_of(FENCE, "@%p2 mov.b32 %d3, 0;", MMA, "@%p2 mov.b32 %d3, 0;", WAIT))


@pytest.mark.parametrize("use", ["mov.b32 %r1, %d7;", "mov.b32 %d0, 0;", "st.global.b32 [%at], %d1;"])
def test_accumulator_used_in_flight(use: str) -> None:
    for wait in ("", COMMIT, COMMIT + "wgmma.wait_group.sync.aligned 1;"):
        faulty(
            body_of(FENCE, MMA, wait, use, WAIT), ptxemu.WgmmaFault, "an accumulator is used while a wgmma is in flight"
        )


@pytest.mark.parametrize("use", ["mov.b32 %r1, %a0;", "mov.b32 %a3, 0;"])
def test_operand_a_used_in_flight(use: str) -> None:
    case = Case(n=16, registers=True)
    faulty(
        body_of(FENCE, MMA_REGISTERS, COMMIT, use, WAIT),
        ptxemu.WgmmaFault,
        "a register of operand A is used while",
        case,
    )


def test_accumulator_as_operand_a() -> None:
    case = Case(n=16, registers=True)
    chained = case.instruction(a="{%d0, %d1, %d2, %d3}", d="c")
    faulty(
        body_of(FENCE, MMA_REGISTERS, chained, WAIT),
        ptxemu.WgmmaFault,
        "operand A is the accumulator of a wgmma in flight",
        case,
    )
    faulty(body_of(FENCE, MMA_REGISTERS, WAIT, chained, WAIT), ptxemu.WgmmaFault, "operand A is the accumulator", case)
    run(case, body_of(FENCE, MMA_REGISTERS, WAIT, FENCE, chained, WAIT))


def test_operand_a_as_accumulator() -> None:
    case = Case(n=8, registers=True)
    onto = case.instruction(a="{%c0, %c1, %c2, %c3}").replace(names("d", 4), names("a", 4))
    faulty(
        body_of(FENCE, MMA_REGISTERS, onto, WAIT), ptxemu.WgmmaFault, "an accumulator is operand A of a wgmma in flight"
    )


def test_another_shape_on_an_accumulator() -> None:
    other = Case(n=8).instruction()
    faulty(body_of(FENCE, MMA, other, WAIT), ptxemu.WgmmaFault, "another shape with no wgmma.fence")
    run(Case(n=16), body_of(FENCE, MMA, FENCE, other, WAIT))


@pytest.mark.parametrize("offset", [0, 4096])
def test_operand_overwritten_in_flight(offset: int) -> None:
    """Rows 0 and 32 of A: none may write them, whether or not the warp that reads them has issued its part."""
    write = f"mov.u32 %r1, smem;\n setp.eq.u32 %p3, %thread, 37;\n @%p3 st.shared.b32 [%r1+{offset}], %r1;"
    faulty(
        body_of(FENCE, MMA, COMMIT, write, WAIT),
        ptxemu.RaceFault,
        "after the wgmma that reads it, of warps 0 to 3|after the write by warp 1",
    )


def test_operand_overwritten_by_the_other_warpgroup() -> None:
    """A wait is each warp's own: another warp needs a barrier after it."""
    case = Case(n=16)
    write = "mov.u32 %r1, smem;\n st.shared.b32 [%r1+8192], %r1;\n"
    first = "setp.ge.u32 %p3, %thread, 128;\n@%p3 bra SECOND;\n" + FENCE + MMA + WAIT
    second = "bra END;\nSECOND:\nsetp.ne.u32 %p4, %thread, 128;\n@%p4 bra END;\n" + write + "END:\n"
    faulty(body_of(first, second, groups=2), ptxemu.RaceFault, "shared offset 8192", groups=2)
    ordered = (
        first
        + "bar.arrive 1, 160;\nbra END;\nSECOND:\nsetp.ge.u32 %p4, %thread, 160;\n@%p4 bra END;\nbar.sync 1, 160;\n"
        "setp.ne.u32 %p4, %thread, 128;\n@%p4 bra END;\n" + write + "END:\n"
    )
    run(case, body_of(ordered, groups=2), 2)


def test_a_wait_covers_the_whole_warpgroup() -> None:
    """The operation is the warpgroup's: a warp that has waited for it may write what its neighbours' part has read."""
    write = """
    xor.b32 %r1, %warp, 3;
    shl.b32 %r1, %r1, 11;
    mov.u32 %r2, smem;
    add.u32 %r1, %r1, %r2;
    and.b32 %r2, %thread, 31;
    shl.b32 %r2, %r2, 2;
    add.u32 %r1, %r1, %r2;
    st.shared.b32 [%r1], %r2;
"""
    for seed in range(4):
        run(Case(n=16), body_of(FENCE, MMA, WAIT, write), seed=seed, shuffle=True, quantum=5)
    again = body_of(FENCE, MMA, WAIT, write, "fence.proxy.async;", FENCE, MMA, WAIT)
    faulty(again, ptxemu.RaceFault, "not ordered after the")


@pytest.mark.parametrize("use", ["mov.b32 %r1, %d7;", "mov.b32 %d0, 0;"])
def test_registers_need_each_warps_own_wait(use: str) -> None:
    """Warps 1 to 3 wait, then all meet: warp 0's accumulators are still in flight."""
    others = (
        f"setp.lt.u32 %p3, %thread, 32;\n@%p3 bra MEET;\nwgmma.wait_group.sync.aligned 0;\nMEET:\nbar.sync 0;\n{use}\n"
    )
    faulty(
        body_of(FENCE, MMA, COMMIT, others, WAIT),
        ptxemu.WgmmaFault,
        "an accumulator is used while a wgmma is in flight",
    )
    run(Case(n=16), body_of(FENCE, MMA, COMMIT, others.replace("@%p3 bra MEET;\n", ""), WAIT))


def test_missing_proxy_fence() -> None:
    faulty(body_of(FENCE, MMA, WAIT, fence=False), ptxemu.ProxyFault, "wgmma read of operand [AB]")


def test_missing_barrier_after_the_writes() -> None:
    faulty(
        body_of(FENCE, MMA, WAIT, barrier=False), (ptxemu.RaceFault, ptxemu.MemoryFault), "not ordered|uninitialised"
    )


def test_uninitialised_operand() -> None:
    case = Case(n=16)
    body = body_of(FENCE, MMA, WAIT).replace("mov.u32 %r19, 65536", "mov.u32 %r19, 9216")
    faulty(
        body,
        ptxemu.MemoryFault,
        "a value stored to global memory depends on uninitialised shared memory at offset 9216",
        case,
    )
    run(case, body[: body.index(WAIT)] + WAIT)  # nothing depends on it


def test_descriptor_out_of_bounds() -> None:
    far = "or.b64 %desc1, %desc1, 0x3fff00000000;"
    faulty(body_of(far, FENCE, MMA, WAIT), ptxemu.MemoryFault, "reaches shared offset")


def test_descriptor_with_reserved_bits() -> None:
    faulty(body_of("or.b64 %desc0, %desc0, 0x4000;", FENCE, MMA, WAIT), ptxemu.WgmmaFault, "reserved bits")


def test_descriptors_differ() -> None:
    lanes = "mul.wide.u32 %rd1, %thread, 2;\nadd.u64 %desc1, %desc1, %rd1;"
    faulty(body_of(lanes, FENCE, MMA, WAIT), ptxemu.WgmmaFault, "differs between the lanes")
    warps = "mul.wide.u32 %rd1, %warp, 64;\nadd.u64 %desc1, %desc1, %rd1;"
    faulty(body_of(warps, FENCE, MMA, WAIT), ptxemu.WgmmaFault, "with different operands")


def test_scale_d_differs() -> None:
    faulty(body_of("setp.eq.u32 %p1, %thread, 5;", FENCE, MMA, WAIT), ptxemu.WgmmaFault, "scale-d differs")


def test_warps_issue_different_instructions() -> None:
    parted = f"setp.ge.u32 %p3, %thread, 96;\n{FENCE}\n@%p3 bra OTHER;\n{MMA}\nbra JOIN;\nOTHER:\n{MMA}\nJOIN:\n{WAIT}"
    faulty(body_of(parted), ptxemu.WgmmaFault, "different wgmma.mma_async")


def test_a_warp_stays_away() -> None:
    parted = f"setp.ge.u32 %p3, %thread, 96;\n@%p3 bra JOIN;\n{FENCE}\n{MMA}\n{WAIT}\nJOIN:\n"
    faulty(body_of(parted), ptxemu.WgmmaFault, "warp 3 of the warpgroup has ended without")
    never = f"setp.ge.u32 %p3, %thread, 96;\n@%p3 bra JOIN;\n{FENCE}\n{MMA}\n{COMMIT}\nret;\nJOIN:\n"
    faulty(body_of(never), ptxemu.WgmmaFault, "not all warps of the warpgroup issued")


def test_warps_that_are_no_warpgroup() -> None:
    """Warps 1 to 4 are not one: warpgroups start at multiples of four."""
    wrong = (
        f"setp.lt.u32 %p3, %thread, 32;\n@%p3 bra JOIN;\n"
        f"setp.ge.u32 %p3, %thread, 160;\n@%p3 bra JOIN;\n{FENCE}\n{MMA}\n{WAIT}\nJOIN:\n"
    )
    faulty(body_of(wrong, groups=2), ptxemu.WgmmaFault, "of the warpgroup has ended without", groups=2)


def test_a_block_without_whole_warpgroups() -> None:
    case = Case(n=16)
    a, b, _ = case.matrices()
    args = [tensor(np.zeros((8, 128), np.uint32))] * 3 + [tensor(case.image(a, b)), tensor(np.zeros(2, np.uint64))]
    with pytest.raises(ptxemu.WgmmaFault, match="the CTA has 3 warps"):
        launch(module(body_of(FENCE, MMA, WAIT), ["out", "acc", "regs", "image", "descs"]), 96, args, shared=65536)


def test_part_of_a_warp() -> None:
    gone = "setp.eq.u32 %p3, %thread, 7;\n@%p3 ret;\n"
    faulty(body_of(gone, FENCE, MMA, WAIT), ptxemu.WgmmaFault, "by lanes 0xffffff7f only")


def test_never_waited_for_is_noted() -> None:
    body = setup(Case(n=16)) + FENCE + MMA
    assert any("uncommitted" in line for line in run(Case(n=16), body)[1].notes)
    assert any("not waited for" in line for line in run(Case(n=16), body + COMMIT)[1].notes)


@pytest.mark.parametrize(
    ("instruction", "why"),
    [
        (MMA.replace("mma_async", "mma_async.sp"), "shape"),
        (MMA.replace("n16k16", "n12k16"), "shape"),
        (MMA.replace("f32.bf16.bf16", "f16.bf16.bf16"), "shape"),
        (MMA.replace("bf16.bf16", "bf16.f16"), "shape"),
        (MMA.replace(", 0, 0;", ", 0;"), "immediates"),
        (MMA.replace("%p1, 1,", "%p1, 2,"), "scale-a"),
        (MMA.replace("%d7}", "%d7, %d8}"), "D has 9 registers"),
        (MMA.replace("aligned", "aligned.weak"), "modifier .weak"),
        ("wgmma.wait_group.sync.aligned %r1;", "immediate"),
    ],
)  # fmt: skip
def test_unsupported_forms_are_named(instruction: str, why: str) -> None:
    with pytest.raises(ptxemu.Unsupported, match=why):
        run(Case(n=16), body_of(FENCE, instruction, WAIT))


def test_wgmma_is_of_sm_90() -> None:
    with pytest.raises(ptxemu.Unsupported, match="sm_90a only"):
        run(Case(n=16), edit=lambda text: text.replace("sm_90a", "sm_100a"))


def test_encoding_of_reference_types() -> None:
    """The references' own number formats: values that the OCP FP8 and IEEE formats define."""
    assert decode(np.array([0x7E, 0x08, 0x01, 0xFE], np.uint8), "e4m3").tolist() == [448, 2.0**-6, 2.0**-9, -448]
    assert decode(np.array([0x7B, 0x04, 0x01], np.uint8), "e5m2").tolist() == [57344, 2.0**-14, 2.0**-16]
    assert encode(np.array([1.0, -2.0]), "bf16").tolist() == [0x3F80, 0xC000]
