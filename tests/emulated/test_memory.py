"""Loads, stores, atomics and matrix moves against numpy and plain Python."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
import torch
from memory_ptx import run

import ptxemu

EACH = "    mul.wide.u32 %d20, %r0, {n};\n    add.u64 %d10, %d0, %d20;\n    mul.wide.u32 %d20, %r0, {m};\n    add.u64 %d11, %d1, %d20;\n"
"""%d10 is the thread's place of n bytes in the first tensor, %d11 that of m bytes in the second."""


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8))


# ---- ld, st -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("space", ["global", "generic", "shared", "shared_generic", "local"])
@pytest.mark.parametrize(("vector", "type_"), [
    (1, "b8"), (1, "u8"), (1, "b16"), (1, "b32"), (1, "u64"), (1, "f32"), (1, "f64"), (2, "b8"), (4, "u8"), (2, "b16"), (4, "b16"),
    (2, "u32"), (4, "b32"), (2, "b64"), (4, "f32"), (2, "f64"), (1, "b128"),
])  # fmt: skip
def test_copies_of_every_size(space: str, vector: int, type_: str) -> None:
    bits = int(type_[1:])
    n = bits * vector // 8
    reg = {8: "h", 16: "h", 32: "f" if type_[0] == "f" else "r", 64: "e" if type_[0] == "f" else "d", 128: "q"}[bits]
    items = [f"%{reg}{(40 if reg == 'd' else 10 if reg != 'q' else 0) + i}" for i in range(vector)]
    values = items[0] if vector == 1 else "{" + ", ".join(items) + "}"
    kind = ("" if vector == 1 else f".v{vector}") + f".{type_}"
    through = ""
    if space.startswith("shared"):
        through = f"    mad.lo.u32 %r2, %r0, {n}, %r1;\n"
        address, name = "%r2", ".shared"
        if space == "shared_generic":
            through += "    cvt.u64.u32 %d21, %r2;\n    cvta.shared.u64 %d22, %d21;\n"
            address, name = "%d22", ""
        through += f"    st{name}{kind} [{address}], {values};\n    ld{name}{kind} {values}, [{address}];\n"
    elif space == "local":
        through = f"    .local .align 16 .b8 l[64];\n    st.local{kind} [l+16], {values};\n    ld.local{kind} {values}, [l+16];\n"
    name = ".global" if space == "global" else ""
    body = (
        EACH.format(n=n, m=n) + f"    ld{name}{kind} {values}, [%d10];\n{through}    st{name}{kind} [%d11], {values};"
    )
    source = random_bytes(32 * n)
    out = torch.zeros_like(source)
    run(body, [source, out], shared=1024)
    assert torch.equal(out, source)


@pytest.mark.parametrize(("type_", "reg"), [
    (t, r) for t in ("u8", "s8", "u16", "s16", "u32", "s32") for r in ("h", "r", "d") if not (t[1:] == "32" and r == "h")
])  # fmt: skip
def test_extension(type_: str, reg: str) -> None:
    n, width = int(type_[1:]) // 8, {"h": 2, "r": 4, "d": 8}[reg]
    source = random_bytes(32 * n, 1)
    out = torch.zeros(32 * width, dtype=torch.uint8)
    body = (
        EACH.format(n=n, m=width)
        + f"    ld.global.{type_} %{reg}10, [%d10];\n    st.global.b{8 * width} [%d11], %{reg}10;"
    )
    if reg == "d":
        body = body.replace("%d10, [%d10]", "%d30, [%d10]").replace("], %d10", "], %d30")
    run(body, [source, out])
    letter = "i" if type_[0] == "s" else "u"
    expected = source.numpy().view(f"{letter}{n}").astype(f"{letter}{width}")
    assert np.array_equal(out.numpy().view(f"{letter}{width}"), expected)


def test_narrow_stores_take_the_low_bits() -> None:
    out = torch.zeros(32 * 4, dtype=torch.uint8)
    run("    mul.wide.u32 %d20, %r0, 4;\n    add.u64 %d10, %d0, %d20;\n    add.u32 %r2, %r0, 0xabcd00;\n"
        "    st.global.u8 [%d10], %r2;\n    st.global.u16 [%d10+2], %r2;", [out])  # fmt: skip
    raw = out.numpy().reshape(32, 4)
    assert np.array_equal(raw[:, 0], np.arange(32))
    assert np.array_equal(raw[:, 2:].copy().view("<u2")[:, 0], 0xCD00 + np.arange(32))
    assert not raw[:, 1].any()


def test_wide_vectors_of_sm_100() -> None:
    source = torch.arange(32 * 8, dtype=torch.int32)
    out = torch.zeros_like(source)
    body = EACH.format(n=32, m=32) + (
        "    ld.global.v8.b32 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%d10];\n"
        "    st.global.v4.b64 [%d11], {%d30, %d31, %d32, %d33};\n"
    )
    pack = "".join(f"    mov.b64 %d{30 + i}, {{%r{10 + 2 * i}, %r{11 + 2 * i}}};\n" for i in range(4))
    run(body.replace("    st.", pack + "    st."), [source, out], arch="sm_100a")
    assert torch.equal(out, source)


def test_sinks_immediates_and_negative_offsets() -> None:
    out = torch.zeros(8, dtype=torch.int32)
    source = torch.arange(8, dtype=torch.int32) + 100
    run("    add.u64 %d10, %d0, 16;\n    ld.global.v4.b32 {_, %r10, _, %r11}, [%d10+-16];\n    st.global.v2.u32 [%d1], {%r10, %r11};\n"
        "    st.global.v2.b32 [%d1+8], {7, -1};\n    st.global.f32 [%d1+16], 0f3f800000;\n"
        "    st.global.u64 [%d1+24], 5;",
        [source, out], threads=1)  # fmt: skip
    assert out.tolist() == [101, 103, 7, -1, 0x3F800000, 0, 5, 0]


def test_guards_and_partial_warps_leave_other_lanes_alone() -> None:
    source, out = torch.arange(64, dtype=torch.int32), torch.full((64,), -5, dtype=torch.int32)
    body = EACH.format(n=4, m=4) + (
        "    and.b32 %r2, %r0, 3;\n    setp.eq.u32 %p1, %r2, 1;\n    mov.u32 %r10, 77;\n"
        "    @%p1 ld.global.b32 %r10, [%d10];\n    setp.ne.u32 %p2, %r2, 2;\n    @%p2 st.global.b32 [%d11], %r10;"
    )
    run(body, [source, out], threads=45)
    for i in range(64):
        expected = -5 if i >= 45 or i % 4 == 2 else i if i % 4 == 1 else 77
        assert out[i] == expected


def test_parameters() -> None:
    out = torch.zeros(8, dtype=torch.int64)
    raw = struct.pack("<iihbBq", -3, 9, -2, -1, 200, 1 << 40).ljust(24, b"\0")
    body = (
        "    ld.param.s32 %d10, [q];\n    st.global.u64 [%d0], %d10;\n"
        "    ld.param.v2.u32 {%r10, %r11}, [q];\n    st.global.u32 [%d0+8], %r11;\n"
        "    ld.param.s16 %r12, [q+8];\n    st.global.s32 [%d0+16], %r12;\n    mov.b64 %d11, q;\n"
        "    ld.param.u8 %r13, [%d11+11];\n"
        "    st.global.u32 [%d0+24], %r13;\n    cvta.param.u64 %d12, %d11;\n    ld.u64 %d13, [%d12+16];\n"
        "    st.global.u64 [%d0+32], %d13;\n"
    )
    raw = struct.pack("<iihbB4xq", -3, 9, -2, -1, 200, 1 << 40)
    run(body, [out, raw], extra=".param .align 8 .b8 q[24]", threads=1)
    assert out[0] == -3
    assert out[1] == 9
    assert out[2].item() & 0xFFFFFFFF == 0xFFFFFFFE
    assert out[3] == 200
    assert out[4] == 1 << 40


def test_lanes_of_one_generic_load_in_different_windows() -> None:
    source, out = torch.arange(32, dtype=torch.int32) + 5, torch.zeros(32, dtype=torch.int32)
    body = EACH.format(n=4, m=4) + (
        "    mad.lo.u32 %r2, %r0, 4, %r1;\n    add.u32 %r3, %r0, 1000;\n    st.shared.u32 [%r2], %r3;\n"
        "    cvt.u64.u32 %d21, %r2;\n"
        "    cvta.shared.u64 %d22, %d21;\n    and.b32 %r4, %r0, 1;\n    setp.eq.u32 %p1, %r4, 1;\n"
        "    selp.b64 %d23, %d22, %d10, %p1;\n"
        "    ld.u32 %r5, [%d23];\n    st.global.u32 [%d11], %r5;"
    )
    run(body, [source, out], shared=128)
    assert out.tolist() == [1000 + i if i % 2 else i + 5 for i in range(32)]


def test_cache_hints_and_policies_change_nothing() -> None:
    source, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    body = EACH.format(n=16, m=16) + (
        "    createpolicy.fractional.L2::evict_last.b64 %d30, 1.0;\n    prefetch.global.L2 [%d10];\n"
        "    ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%r10, %r11, %r12, %r13}, [%d10];\n"
        "    ld.global.L1::evict_last.L2::cache_hint.b32 %r10, [%d10], %d30;\n    ldu.global.b32 %r11, [%d10+4];\n"
        "    ld.global.cg.b32 %r12, [%d10+8];\n    ld.weak.global.ca.b32 %r13, [%d10+12];\n"
        "    st.global.L1::no_allocate.L2::cache_hint.v2.b32 [%d11], {%r10, %r11}, %d30;\n"
        "    st.global.cs.v2.b32 [%d11+8], {%r12, %r13};"
    )
    run(body, [source, out])
    assert torch.equal(out, source)


def test_bulk_store_of_zeros() -> None:
    out = torch.full((16,), -1, dtype=torch.int32)
    body = (
        "    mov.u64 %d20, 64;\n    cvt.u64.u32 %d21, %r1;\n    st.bulk.weak.shared::cta [%d21], %d20, 0;\n"
        + "".join(
            f"    ld.shared.b32 %r10, [%r1+{4 * i}];\n    st.global.b32 [%d0+{4 * i}], %r10;\n" for i in range(16)
        )
    )
    run(body, [out], threads=1, shared=128, arch="sm_100a")
    assert not out.any()


# ---- faults --------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("body", "message"), [
    ("    ld.global.b32 %r2, [%d0+64];",
     r"load of 4 bytes at global address 0x\w+ is out of bounds: offset 64 of argument 0 \(16,\), which has 64"),
    ("    st.global.b32 [%d0+-4], %r0;", r"store of 4 bytes .* offset -4 of argument 0"),
    ("    ld.global.b32 %r2, [%d0+62];", r"misaligned load .*: 2 bytes past a multiple of 4"),
    ("    ld.global.v2.b32 {%r2, %r3}, [%d0+4];", r"misaligned load .*: 4 bytes past a multiple of 8"),
    ("    ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%d0+56];", "misaligned"),
    ("    mov.u64 %d5, 0;\n    ld.global.b32 %r2, [%d5+16];", "null pointer"),
    ("    mul.wide.u32 %d5, %r0, 4;\n    add.u64 %d5, %d5, %d0;\n    atom.global.add.u32 %r2, [%d5], 1;",
     "atomic of 4 bytes .* offset 64 "),
    ("    ld.shared.b32 %r2, [%r1+128];", r"outside \[0, 128\)"),
    ("    ld.shared.b32 %r2, [%r1];\n    st.global.b32 [%d0], %r2;", "depends on uninitialised shared memory at offset 0"),
    ("    st.shared.b32 [%r1+2], %r0;", "misaligned 4-byte shared access at offset 2"),
    ("    .local .b32 l[2];\n    mov.u64 %d5, l;\n    ld.local.b32 %r2, [%d5+8];", "local memory, which has 8"),
    ("    mov.u64 %d5, p0;\n    cvta.param.u64 %d6, %d5;\n    st.b32 [%d6], %r0;", "store to the kernel's parameters"),
    ("    ld.shared::cluster.b32 %r2, [%r1+0x3000000];", "names CTA 3 of a cluster of 1"),
    ("    ld.shared.b32 %r2, [%d0];", "not in shared memory"),
])  # fmt: skip
def test_memory_faults(body: str, message: str) -> None:
    x = torch.zeros(16, dtype=torch.int32)
    with pytest.raises(ptxemu.MemoryFault, match=message) as fault:
        run(body, [x], shared=128)
    assert fault.value.line > 0


def test_a_lane_past_the_end_is_found() -> None:
    x = torch.zeros(31, dtype=torch.int32)
    with pytest.raises(ptxemu.MemoryFault, match="offset 124 of argument 0"):
        run("    mul.wide.u32 %d5, %r0, 4;\n    add.u64 %d5, %d5, %d0;\n    st.global.b32 [%d5], %r0;", [x])
    run(
        "    setp.lt.u32 %p1, %r0, 31;\n    mul.wide.u32 %d5, %r0, 4;\n    add.u64 %d5, %d5, %d0;\n    @%p1 st.global.b32 [%d5], %r0;",
        [x],
    )
    assert torch.equal(x, torch.arange(31, dtype=torch.int32))


@pytest.mark.parametrize("body", [
    "    ld.global.v3.b32 %r2, [%d0];", "    ld.global.bogus.b32 %r2, [%d0];", "    atom.global.mul.u32 %r2, [%d0], 1;",
    "    atom.global.max.f32 %f2, [%d0], %f1;", "    ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r2, %r3}, [%r1];",
    "    multimem.red.global.add.u32 [%d0], %r2;",
])  # fmt: skip
def test_unknown_forms_are_named(body: str) -> None:
    with pytest.raises(ptxemu.Unsupported, match=body.strip().split()[0].split(".")[0]):
        run(body, [torch.zeros(16, dtype=torch.int32)], shared=128)


# ---- races --------------------------------------------------------------------------------------------------------------------------
def test_unordered_accesses_of_two_warps_race() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    body = (
        "    mad.lo.u32 %r2, %r0, 4, %r1;\n    st.shared.u32 [%r2], %r0;\n    {sync}\n"
        "    xor.b32 %r3, %r0, 32;\n    mad.lo.u32 %r3, %r3, 4, %r1;\n"
        "    ld.shared.u32 %r4, [%r3];\n    mul.wide.u32 %d5, %r0, 4;\n    add.u64 %d5, %d5, %d0;\n"
        "    st.global.u32 [%d5], %r4;"
    )
    run(body.replace("{sync}", "bar.sync 0;"), [out], threads=64, shared=256)
    assert torch.equal(out, torch.arange(64, dtype=torch.int32) ^ 32)
    with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault)):
        run(body.replace("{sync}", ""), [out], threads=64, shared=256)


FLAG = """
    setp.lt.u32 %p1, %r0, 32;
    setp.eq.u32 %p3, %r0, 0;
    mov.u32 %r9, 0;
    @%p3 st.shared.u32 [%r1], %r9;
    bar.sync 0;
    @!%p1 bra CONSUMER;
    mad.lo.u32 %r2, %r0, 4, %r1;
    st.shared.u32 [%r2+128], %r0;
    bar.warp.sync 0xffffffff;
    {publish}
    bra DONE;
CONSUMER:
    {wait}
    setp.ne.u32 %p2, %r3, 1;
    @%p2 bra CONSUMER;
    {after}
    mad.lo.u32 %r2, %r0, 4, %r1;
    ld.shared.u32 %r4, [%r2];
    mul.wide.u32 %d5, %r0, 4;
    add.u64 %d5, %d5, %d0;
    st.global.u32 [%d5+-128], %r4;
DONE:
"""


@pytest.mark.parametrize(("publish", "wait", "after", "right"), [
    ("@%p3 st.release.cta.shared.u32 [%r1], 1;", "ld.acquire.cta.shared.u32 %r3, [%r1];", "", True),
    ("@%p3 st.relaxed.cta.shared.u32 [%r1], 1;", "ld.acquire.cta.shared.u32 %r3, [%r1];", "", False),
    ("@%p3 st.release.cta.shared.u32 [%r1], 1;", "ld.relaxed.cta.shared.u32 %r3, [%r1];", "", False),
    ("fence.acq_rel.cta;\n    @%p3 st.relaxed.cta.shared.u32 [%r1], 1;", "ld.acquire.cta.shared.u32 %r3, [%r1];", "", True),
    ("membar.cta;\n    @%p3 st.volatile.shared.u32 [%r1], 1;", "ld.volatile.shared.u32 %r3, [%r1];", "membar.cta;", True),
    ("@%p3 st.volatile.shared.u32 [%r1], 1;", "ld.volatile.shared.u32 %r3, [%r1];", "membar.cta;", False),
    ("membar.cta;\n    @%p3 st.volatile.shared.u32 [%r1], 1;", "ld.volatile.shared.u32 %r3, [%r1];", "", False),
    ("@%p3 atom.release.cta.shared.exch.b32 %r8, [%r1], 1;", "ld.acquire.cta.shared.u32 %r3, [%r1];", "", True),
    ("@%p3 red.release.cta.shared.add.u32 [%r1], 1;", "atom.acquire.cta.shared.or.b32 %r3, [%r1], 0;", "", True),
    ("@%p3 red.shared.add.u32 [%r1], 1;", "atom.acquire.cta.shared.or.b32 %r3, [%r1], 0;", "", False),
    ("@%p3 st.shared.u32 [%r1], 1;", "ld.acquire.cta.shared.u32 %r3, [%r1];", "", False),
])  # fmt: skip
def test_flags_in_shared_memory(publish: str, wait: str, after: str, right: bool) -> None:
    out = torch.zeros(32, dtype=torch.int32)
    body = FLAG.format(publish=publish, wait=wait, after=after)
    for seed in range(3):
        if right:
            run(body, [out], threads=64, shared=256, seed=seed, shuffle=True)
            assert torch.equal(out, torch.arange(32, dtype=torch.int32))
        else:
            with pytest.raises(ptxemu.RaceFault):
                run(body, [out], threads=64, shared=256, seed=seed, shuffle=True)


def test_flags_between_ctas() -> None:
    """CTA i waits for CTA i - 1 on a flag in global memory, whatever order the workers take them in."""
    out, flag = torch.zeros(24, dtype=torch.int32), torch.zeros(25, dtype=torch.int32)
    flag[24] = 1
    body = (
        "    mov.u32 %r2, %ctaid.x;\n    mul.wide.u32 %d5, %r2, 4;\n    add.u64 %d6, %d0, %d5;\n"
        "    add.u64 %d7, %d1, %d5;\n"
        "WAIT:\n    ld.acquire.gpu.global.u32 %r3, [%d7+4];\n    setp.eq.u32 %p1, %r3, 0;\n    @%p1 bra WAIT;\n"
        "    setp.eq.u32 %p2, %r2, 23;\n    mov.u32 %r4, 0;\n    @!%p2 ld.global.u32 %r4, [%d6+4];\n"
        "    add.u32 %r4, %r4, %r2;\n"
        "    st.global.u32 [%d6], %r4;\n    st.release.gpu.global.u32 [%d7], 1;"
    )
    run(body, [out, flag], threads=1, grid=24)
    assert out.tolist() == [sum(range(i, 24)) for i in range(24)]


# ---- atomics ------------------------------------------------------------------------------------------------------------------------
INTEGER = {
    "add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "inc": lambda a, b: 0 if a >= b else a + 1, "dec": lambda a, b: b if a == 0 or a > b else a - 1, "exch": lambda a, b: b,
}  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared", "generic", "shared_generic"])
@pytest.mark.parametrize(("operation", "type_"), [
    *((op, t) for op in ("add", "min", "max") for t in ("u32", "s32", "u64")), ("min", "s64"), ("max", "s64"),
    *((op, t) for op in ("and", "or", "xor", "exch") for t in ("b32", "b64")), ("inc", "u32"), ("dec", "u32"),
])  # fmt: skip
def test_integer_atomics(space: str, operation: str, type_: str) -> None:
    n = int(type_[1:]) // 8
    code = f"{'i' if type_[0] == 's' else 'u'}{n}"
    rng = np.random.default_rng(list(f"{operation}.{type_}".encode()))
    start = rng.integers(0, 1 << 30, 32).astype(code) - (1 << 29 if type_[0] == "s" else 0)
    start[:4] = [0, 5, 6, 7]
    value = rng.integers(0, 1 << 30, 32).astype(code) - (1 << 29 if type_[0] == "s" else 0)
    value[:4] = [7, 5, 7, 6]
    memory, values = torch.from_numpy(start.view(np.uint8).copy()), torch.from_numpy(value.view(np.uint8).copy())
    old = torch.zeros(32 * n, dtype=torch.uint8)
    r = "r" if n == 4 else "d"
    place, name, after = "%d10", f".{space}" if space in ("global", "shared") else "", ""
    body = EACH.format(n=n, m=n) + f"    mul.wide.u32 %d20, %r0, {n};\n    add.u64 %d12, %d2, %d20;\n"
    body += f"    ld.global.b{8 * n} %{r}30, [%d11];\n"
    if space.startswith("shared"):
        body += (
            f"    ld.global.b{8 * n} %{r}31, [%d10];\n    mad.lo.u32 %r2, %r0, {n}, %r1;\n"
            f"    st.shared.b{8 * n} [%r2], %{r}31;\n"
        )
        place = "%r2"
        if space == "shared_generic":
            body += "    cvt.u64.u32 %d21, %r2;\n    cvta.shared.u64 %d22, %d21;\n"
            place = "%d22"
        after = f"    ld.shared.b{8 * n} %{r}33, [%r2];\n    st.global.b{8 * n} [%d10], %{r}33;\n"
    body += (
        f"    atom{name}.{operation}.{type_} %{r}32, [{place}], %{r}30;\n"
        f"    st.global.b{8 * n} [%d12], %{r}32;\n{after}"
    )
    run(body, [memory, values, old], shared=256)
    mask = (1 << 8 * n) - 1
    expected = [INTEGER[operation](int(a), int(b)) & mask for a, b in zip(start, value, strict=True)]
    assert np.array_equal(memory.numpy().view(f"u{n}"), np.array(expected, dtype=f"u{n}"))
    assert np.array_equal(old.numpy().view(code), start)


@pytest.mark.parametrize("type_", ["b16", "b32", "b64"])
def test_compare_and_swap(type_: str) -> None:
    n = int(type_[1:]) // 8
    r, x = {2: "h", 4: "r", 8: "d"}[n], 40 if n == 8 else 20
    memory = torch.from_numpy(np.arange(32).astype(f"u{n}").view(np.uint8).copy())
    old = torch.zeros(32 * n, dtype=torch.uint8)
    body = EACH.format(n=n, m=n) + f"    mov.b{8 * n} %{r}{x}, 7;\n    mov.b{8 * n} %{r}{x + 1}, 99;\n"
    body += f"    atom.global.cas.{type_} %{r}{x + 2}, [%d10], %{r}{x}, %{r}{x + 1};\n    st.global.b{8 * n} [%d11], %{r}{x + 2};"
    run(body, [memory, old])
    assert memory.numpy().view(f"u{n}").tolist() == [99 if i == 7 else i for i in range(32)]
    assert old.numpy().view(f"u{n}").tolist() == list(range(32))


@pytest.mark.parametrize("shared", [False, True])
def test_atomics_of_128_bits(shared: bool) -> None:
    memory = torch.arange(64, dtype=torch.int64)
    old = torch.zeros(64, dtype=torch.int64)
    body = EACH.format(n=16, m=16) + "    mov.b64 %d30, 4;\n    mov.b64 %d31, 5;\n    mov.b128 %q1, {%d30, %d31};\n"
    body += "    mov.b128 %q2, {%d31, %d30};\n"
    place, name = "%d10", ".global"
    if shared:
        body += "    mad.lo.u32 %r2, %r0, 16, %r1;\n    ld.global.b128 %q4, [%d10];\n    st.shared.b128 [%r2], %q4;\n"
        place, name = "%r2", ".shared"
    body += (
        f"    atom{name}.cas.b128 %q3, [{place}], %q1, %q2;\n    st.global.b128 [%d11], %q3;\n"
        f"    setp.eq.u32 %p1, %r0, 9;\n    @%p1 atom{name}.exch.b128 %q3, [{place}], %q1;\n"
    )
    if shared:
        body += "    ld.shared.b128 %q4, [%r2];\n    st.global.b128 [%d10], %q4;\n"
    expected = memory.clone()
    expected[4], expected[5], expected[18], expected[19] = 5, 4, 4, 5
    run(body, [memory, old], shared=1024)
    assert torch.equal(old, torch.arange(64))
    assert torch.equal(memory, expected)


def test_many_threads_add_to_one_place() -> None:
    """64 CTAs on all workers, in global memory; one counter a CTA in shared memory."""
    total, each = torch.zeros(2, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = (
        "    setp.eq.u32 %p1, %r0, 0;\n    @%p1 st.shared.u32 [%r1], 0;\n    bar.sync 0;\n"
        "    red.global.add.u32 [%d0], 1;\n"
        "    atom.global.add.f32 %f1, [%d0+4], 0f3f800000;\n    red.shared.add.u32 [%r1], %r0;\n"
        "    bar.sync 0;\n    mov.u32 %r2, %ctaid.x;\n"
        "    mul.wide.u32 %d5, %r2, 4;\n    add.u64 %d5, %d1, %d5;\n    ld.shared.u32 %r3, [%r1];\n"
        "    @%p1 st.global.u32 [%d5], %r3;"
    )
    run(body, [total, each], threads=128, grid=64, shared=16)
    assert total[0] == 64 * 128
    assert total.view(torch.float32)[1] == 64 * 128
    assert each.tolist() == [127 * 64] * 64


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("type_", "dtype"), [
    ("f32", torch.float32), ("f64", torch.float64), ("f16", torch.float16), ("bf16", torch.bfloat16), ("f16x2", torch.float16),
    ("bf16x2", torch.bfloat16),
])  # fmt: skip
def test_float_additions(space: str, type_: str, dtype: torch.dtype) -> None:
    n = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}.get(type_, 4)
    reg = {"f32": "f", "f64": "e", "f16": "h", "bf16": "h"}.get(type_, "r")
    g = torch.Generator().manual_seed(3)
    count = 32 * n // torch.empty(0, dtype=dtype).element_size()
    a, b = torch.randn(count, generator=g).to(dtype), (torch.randn(count, generator=g) * 4).to(dtype)
    a[0], b[0] = float("inf"), float("-inf")
    a[1], b[1] = -0.0, -0.0
    expected = a + b
    noftz = "" if type_ in ("f32", "f64") else ".noftz"
    body = EACH.format(n=n, m=n) + f"    ld.global.b{8 * n} %{reg}20, [%d11];\n"
    place = "%d10"
    if space == "shared":
        body += (
            f"    mad.lo.u32 %r2, %r0, {n}, %r1;\n    ld.global.b{8 * n} %{reg}21, [%d10];\n"
            f"    st.shared.b{8 * n} [%r2], %{reg}21;\n"
        )
        place = "%r2"
    body += f"    atom.{space}.add{noftz}.{type_} %{reg}22, [{place}], %{reg}20;\n"
    if space == "shared":
        body += f"    ld.shared.b{8 * n} %{reg}21, [%r2];\n    st.global.b{8 * n} [%d10], %{reg}21;\n"
    run(body, [a, b], shared=256)
    torch.testing.assert_close(a, expected, rtol=0, atol=0, equal_nan=True)


def test_additions_of_subnormals_flush_in_global_memory_only() -> None:
    tiny = torch.tensor([1e-40, 1e-40], dtype=torch.float32)
    body = (
        "    ld.global.b32 %r2, [%d0];\n    st.shared.b32 [%r1], %r2;\n    ld.global.f32 %f1, [%d0];\n"
        "    atom.global.add.f32 %f2, [%d0], %f1;\n"
        "    atom.shared.add.f32 %f2, [%r1], %f1;\n    ld.shared.b32 %r2, [%r1];\n    st.global.b32 [%d0+4], %r2;"
    )
    expected = tiny[1] + tiny[1]
    run(body, [tiny], threads=1, shared=16)
    assert tiny[0] == 0
    assert tiny[1] == expected


@pytest.mark.parametrize(("form", "dtype", "count"), [
    ("add.v2.f32", torch.float32, 2), ("add.v4.f32", torch.float32, 4), ("add.noftz.v2.f16", torch.float16, 2),
    ("add.noftz.v8.bf16", torch.bfloat16, 8), ("max.noftz.v4.bf16", torch.bfloat16, 4), ("min.noftz.v2.f16x2", torch.float16, 4),
    ("add.noftz.v4.bf16x2", torch.bfloat16, 8),
])  # fmt: skip
@pytest.mark.parametrize("opcode", ["atom", "red"])
def test_vector_atomics(opcode: str, form: str, dtype: torch.dtype, count: int) -> None:
    operation, type_ = form.split(".")[0], form.split(".")[-1]
    vector = int(form.split(".v")[1].split(".")[0])
    bits = 16 if type_ in ("f16", "bf16") else 32
    reg = "h" if bits == 16 else "f" if type_ == "f32" else "r"
    g = torch.Generator().manual_seed(4)
    a, b = torch.randn(32, count, generator=g).to(dtype), torch.randn(32, count, generator=g).to(dtype)
    old = torch.zeros_like(a)
    expected = {"add": torch.add, "max": torch.maximum, "min": torch.minimum}[operation](a, b)
    n = vector * bits // 8
    loads = "".join(f"    ld.global.b{bits} %{reg}{10 + i}, [%d11+{i * bits // 8}];\n" for i in range(vector))
    stores = "".join(f"    st.global.b{bits} [%d12+{i * bits // 8}], %{reg}{20 + i};\n" for i in range(vector))
    values = "{" + ", ".join(f"%{reg}{10 + i}" for i in range(vector)) + "}"
    results = "{" + ", ".join(f"%{reg}{20 + i}" for i in range(vector)) + "}"
    body = EACH.format(n=n, m=n) + f"    mul.wide.u32 %d20, %r0, {n};\n    add.u64 %d12, %d2, %d20;\n{loads}"
    body += (
        f"    atom.global.{form} {results}, [%d10], {values};\n{stores}"
        if opcode == "atom"
        else f"    red.global.{form} [%d10], {values};\n"
    )
    before = a.clone()
    run(body, [a, b, old])
    assert torch.equal(a, expected)
    assert torch.equal(old, before if opcode == "atom" else torch.zeros_like(a))


def test_a_lock_in_global_memory() -> None:
    """Every CTA adds to an unprotected counter under a lock that another CTA may hold."""
    memory = torch.zeros(2, dtype=torch.int32)
    body = (
        "LOCK:\n    atom.acquire.gpu.global.cas.b32 %r2, [%d0], 0, 1;\n    setp.ne.u32 %p1, %r2, 0;\n"
        "    @%p1 bra LOCK;\n"
        "    ld.global.u32 %r3, [%d0+4];\n    add.u32 %r3, %r3, 1;\n    st.global.u32 [%d0+4], %r3;\n"
        "    st.release.gpu.global.u32 [%d0], 0;"
    )
    run(body, [memory], threads=1, grid=200, quantum=3)
    assert memory.tolist() == [0, 200]


# ---- matrices -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(count: int, transposed: bool) -> None:
    """Rows at scattered addresses; the PTX ISA's fragment: lane l holds row l / 4, columns 2 (l % 4) and the next."""
    rng = np.random.default_rng(5)
    source = rng.integers(0, 1 << 16, (count * 8, 8)).astype(np.uint16)
    regs, out = torch.zeros(32 * count, dtype=torch.int32), torch.zeros(count * 8 * 16, dtype=torch.uint8)
    lists = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
    trans = ".trans" if transposed else ""
    # Row i lies at 16 * (5 i mod 32); stmatrix puts it at 16 * i, 512 bytes on.
    body = EACH.format(n=16, m=4 * count) + (
        f"    setp.lt.u32 %p1, %r0, {8 * count};\n    mul.lo.u32 %r2, %r0, 5;\n    and.b32 %r2, %r2, 31;\n"
        f"    mad.lo.u32 %r3, %r2, 16, %r1;\n"
        "    @%p1 ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%d10];\n"
        "    @%p1 st.shared.v4.b32 [%r3], {%r20, %r21, %r22, %r23};\n"
        f"    bar.warp.sync 0xffffffff;\n    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {lists}, [%r3];\n"
        + "".join(f"    st.global.b32 [%d11+{4 * i}], %r{10 + i};\n" for i in range(count))
        + f"    mad.lo.u32 %r4, %r0, 16, %r1;\n"
        f"    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r4+512], {lists};\n"
        f"    bar.warp.sync 0xffffffff;\n    mul.wide.u32 %d20, %r0, 16;\n    add.u64 %d12, %d2, %d20;\n"
        "    @%p1 ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r4+512];\n"
        "    @%p1 st.global.v4.b32 [%d12], {%r20, %r21, %r22, %r23};"
    )
    run(body, [torch.from_numpy(source.view(np.uint8).reshape(-1).copy()), regs, out], shared=1024)
    for lane in range(32):
        for i in range(count):
            matrix = source[8 * i : 8 * i + 8]
            matrix = matrix.T if transposed else matrix
            low, high = (int(matrix[lane // 4, 2 * (lane % 4) + j]) for j in range(2))
            assert regs[lane * count + i].item() & 0xFFFFFFFF == low | high << 16
    assert np.array_equal(out.numpy().view(np.uint16).reshape(-1, 8), source)


def test_movmatrix() -> None:
    source = np.random.default_rng(6).integers(0, 1 << 16, (8, 8)).astype(np.uint16)
    out = torch.zeros(32, dtype=torch.int32)
    body = EACH.format(n=4, m=4) + "    ld.global.b32 %r2, [%d10];\n"
    body += "    movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2;\n    st.global.b32 [%d11], %r3;"
    run(body, [torch.from_numpy(source.view(np.int32).reshape(-1).copy()), out])
    assert np.array_equal(out.numpy().view(np.uint16).reshape(8, 8), source.T)


def test_a_matrix_row_must_be_aligned() -> None:
    body = "    mad.lo.u32 %r2, %r0, 8, %r1;\n    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r2], {%r0, %r0, %r0, %r0};"
    with pytest.raises(ptxemu.MemoryFault, match="misaligned 16-byte shared access at offset 8"):
        run(body, [], shared=1024)


# ---- clusters -----------------------------------------------------------------------------------------------------------------------
def test_mapa_reaches_the_other_cta() -> None:
    """Every CTA of a cluster reads its neighbour's shared memory, and adds to that of CTA 0."""
    out = torch.zeros(8, dtype=torch.int32)
    body = (
        "    mov.u32 %r2, %cluster_ctarank;\n    mov.u32 %r12, %ctaid.x;\n    st.shared.u32 [%r1], %r12;\n"
        "    st.shared.u32 [%r1+4], 0;\n"
        "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n    xor.b32 %r3, %r2, 3;\n"
        "    mapa.shared::cluster.u32 %r4, %r1, %r3;\n"
        "    ld.shared::cluster.u32 %r5, [%r4];\n    getctarank.shared::cluster.u32 %r6, %r4;\n"
        "    mad.lo.u32 %r5, %r6, 100, %r5;\n"
        "    mapa.shared::cluster.u32 %r7, %r1, 0;\n    red.relaxed.cluster.shared::cluster.add.u32 [%r7+4], 1;\n"
        "    cvt.u64.u32 %d20, %r1;\n    cvta.shared.u64 %d21, %d20;\n    mapa.u64 %d22, %d21, %r3;\n"
        "    ld.u32 %r8, [%d22];\n"
        "    mad.lo.u32 %r5, %r8, 10000, %r5;\n    barrier.cluster.arrive;\n    barrier.cluster.wait;\n"
        "    ld.shared.u32 %r9, [%r1+4];\n"
        "    mad.lo.u32 %r5, %r9, 1000000, %r5;\n    mul.wide.u32 %d5, %r12, 4;\n    add.u64 %d5, %d0, %d5;\n"
        "    st.global.u32 [%d5], %r5;\n"
    )
    run(body, [out], threads=1, grid=8, cluster=4, shared=16)
    for i in range(8):
        other = i ^ 3
        assert out[i] == other + 100 * (other % 4) + 10000 * other + (4_000_000 if i % 4 == 0 else 0)


def test_the_shared_memory_of_a_cta_that_has_left() -> None:
    body = (
        "    mov.u32 %r2, %cluster_ctarank;\n    st.shared.u32 [%r1], %r2;\n    barrier.cluster.arrive;\n"
        "    barrier.cluster.wait;\n"
        "    setp.eq.u32 %p1, %r2, 1;\n    @%p1 bra DONE;\n    mov.u32 %r5, 0;\nLOOP:\n"
        "    add.u32 %r5, %r5, 1;\n    setp.lt.u32 %p2, %r5, 5000;\n"
        "    @%p2 bra LOOP;\n    mapa.shared::cluster.u32 %r4, %r1, 1;\n    ld.shared::cluster.u32 %r6, [%r4];\nDONE:"
    )
    with pytest.raises(ptxemu.MemoryFault, match="CTA 1 of the cluster has left"):
        run(body, [], threads=1, grid=2, cluster=2, shared=16)


def test_shared_cta_accesses_stay_in_the_cta() -> None:
    body = "    mov.u32 %r2, 1;\n    mapa.shared::cluster.u32 %r4, %r1, %r2;\n    st.shared::cta.u32 [%r4], %r2;"
    with pytest.raises(ptxemu.MemoryFault, match="shared::cta access to the shared memory of CTA 1"):
        run(body, [], threads=1, grid=2, cluster=2, shared=16)


def test_a_store_far_behind_the_starts_of_nine_smaller_tensors() -> None:
    """Views of one storage: a large tensor that begins before many small ones, and is written behind them."""
    memory = (ctypes.c_int32 * 256)()
    small = [torch.frombuffer(memory, dtype=torch.int32, count=2, offset=16 * i) for i in range(1, 10)]
    big = torch.frombuffer(memory, dtype=torch.int32)
    run("    ld.global.b32 %r2, [%d1];\n    st.global.b32 [%d0+1000], 7;", [big, small[4]], tensors=small, threads=1)
    assert big[250] == 7
