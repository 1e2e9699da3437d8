"""tcgen05: allocation, loads and stores, waits, copies and shifts, against the layouts of the PTX ISA."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from tensor_ptx import (
    BASE,
    IMAGE,
    alloc,
    barrier_init,
    copy_in,
    dealloc,
    dump,
    fill,
    launch,
    module,
    names,
    place,
    tensor,
    wait,
    write,
)  # fmt: skip

import ptxemu

RNG = np.random.default_rng(5)
WORDS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}
REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
FORMS = [
    (shape, count)
    for shape in WORDS
    for count in (1, 2, 4, 8, 16, 32, 64, 128)
    if REGISTERS[shape] * count <= 128
]  # fmt: skip


def fragment(shape: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, word) of register r in thread t, arrays [r, t]: bit numbers of the ISA's fragment figures, as CuTe's atoms write them.

    A rectangle of rows by `width` bits is numbered row by row; each (thread, bit) maps to one number.
    """
    width = 32 * WORDS[shape] * count
    t, r = np.arange(32)[None, :], np.arange(REGISTERS[shape] * count)[:, None]
    if shape == "32x32b":
        bit = t * width + r * 32
    elif shape == "16x64b":
        bit = t % 2 * 8 * width + t // 2 % 2 * 32 + t // 4 * width + r * 64
    elif shape == "16x128b":
        bit = t % 4 * 32 + t // 4 * width + r % 2 * 8 * width + r // 2 * 128
    elif shape == "16x256b":
        bit = t % 4 * 64 + t // 4 * width + r % 2 * 32 + r // 2 % 2 * 8 * width + r // 4 * 256
    else:
        bit = t % 16 * width + r * 32 + 0 * t
    return bit // width, bit % width // 32


REDUCTIONS = [
    ("min.f32", "f32"), ("max.f32", "f32"), ("min.abs.f32", "f32"), ("max.abs.NaN.f32", "f32"), ("max.NaN.f32", "f32"),
    ("min.u32", "u32"), ("max.u32", "u32"), ("min.s32", "s32"), ("max.s32", "s32"),
]  # fmt: skip


def reduction(op: str, count: int) -> str:
    return alloc(128) + fill("data", 128) + f"""
    tcgen05.ld.red.sync.aligned.32x32b.x{count}.{op} {names("v", count)}, %u0, [%quad+3];
    tcgen05.wait::ld.sync.aligned;
    ld.param.u64 %out, [result];
    mad.wide.u32 %at, %thread, {4 * count + 4}, %out;
    st.global.b32 [%at+{4 * count}], %u0;
""" + "".join(f"    st.global.b32 [%at+{4 * i}], %v{i};\n" for i in range(count)) + dealloc(128)  # fmt: skip


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize(("op", "type_"), REDUCTIONS)
def test_load_and_reduce(op: str, type_: str, count: int) -> None:
    """Every lane's columns; NaN counts with .NaN alone."""
    data = RNG.integers(0, 2**32, (128, 128), dtype=np.uint64).astype(np.uint32)
    if type_ == "f32":
        data = RNG.standard_normal((128, 128)).astype(np.float32).view(np.uint32)
        data[5, 4], data[6, 3], data[7, 3:5] = 0x7FC00000, 0xFFC00001, 0x7FC00000
    out = torch.zeros(128, count + 1, dtype=torch.int32)
    text = module(reduction(op, count), ".param .u64 data, .param .u64 result", arch="sm_103a")
    launch(text, [tensor(data), out])
    got = out.numpy().view(np.uint32)
    np.testing.assert_array_equal(got[:, :count], data[:, 3 : 3 + count])
    kind = {"f32": np.float32, "u32": np.uint32, "s32": np.int32}[type_]
    x = data[:, 3 : 3 + count].copy().view(kind)
    x = np.abs(x) if "abs" in op else x
    if type_ == "f32" and "NaN" not in op:
        with np.errstate(all="ignore"):
            want = (np.fmin if "min" in op else np.fmax).reduce(x, axis=1)
    else:
        want = (np.min if "min" in op else np.max)(x, axis=1)
    np.testing.assert_array_equal(got[:, count].copy().view(kind), want)


def test_reduction_of_what_is_undefined() -> None:
    body = reduction("max.u32", 2).replace(fill("data", 128), "").replace("st.global.b32 [%at+4], %v1;", "")
    text = module(
        body.replace("st.global.b32 [%at+0], %v0;", ""), ".param .u64 data, .param .u64 result", arch="sm_103a"
    )
    out = torch.zeros(128, 3, dtype=torch.int32)
    with pytest.raises(ptxemu.MemoryFault, match=r"uninitialised tensor memory: lane \d+, column [34], read"):
        launch(text, [out, out])


def spots(shape: str, count: int, packed: bool, half: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Lane and column of the register's (one or, packed, two) pieces."""
    row, word = fragment(shape, count)
    if shape == "16x32bx2":
        shift = half * (np.arange(32)[None, :] // 16)
    else:
        shift = 0
    if not packed:
        return [(row, word + shift)]
    return [(row, 2 * word + shift), (row, 2 * word + 1 + shift)]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(("shape", "count"), FORMS)
def test_load_and_store(shape: str, count: int, packed: bool) -> None:
    """Fill tensor memory lane by lane; load with the form; store those registers elsewhere with the same form; dump."""
    columns = WORDS[shape] * count << packed
    half = columns + 3 if shape == "16x32bx2" else 0
    source, target = 1, 256
    if columns + half >= 256:  # too wide for two places
        source = target = 0
        half = columns if half else 0
    registers = REGISTERS[shape] * count
    lane = 16 if shape != "32x32b" else 0
    split = f", {half}" if half else ""
    pack, unpack = (".pack::16b", ".unpack::16b") if packed else ("", "")
    body = alloc() + fill("data", 512)
    body += f"""
    add.u32 %r40, %quad, {lane << 16};
    tcgen05.ld.sync.aligned.{shape}.x{count}{pack}.b32 {names("v", registers)}, [%r40+{source}]{split};
    tcgen05.wait::ld.sync.aligned;
    ld.param.u64 %out, [registers];
    mad.wide.u32 %at, %thread, {4 * registers}, %out;
"""
    body += "".join(f"    st.global.b32 [%at+{4 * i}], %v{i};\n" for i in range(registers))
    body += "".join(f"    add.u32 %v{i}, %v{i}, 0x10001;\n" for i in range(registers))
    body += f"""
    tcgen05.st.sync.aligned.{shape}.x{count}{unpack}.b32 [%r40+{target}]{split}, {names("v", registers)};
    tcgen05.wait::st.sync.aligned;
"""
    body += dump("result", 512) + dealloc()
    text = module(body, ".param .u64 data, .param .u64 registers, .param .u64 result")
    data = RNG.integers(0, 2**31, (128, 512), dtype=np.int64).astype(np.uint32)
    got = torch.zeros(128, registers, dtype=torch.int32)
    result = torch.zeros(128, 512, dtype=torch.int32)
    launch(text, [tensor(data), got, result])

    want_registers = np.zeros((128, registers), np.uint32)
    want = data.copy()
    for warp in range(4):
        pieces = [(32 * warp + lane + row, column) for row, column in spots(shape, count, packed, half)]
        if packed:
            low, high = (data[row, column + source] & 0xFFFF for row, column in pieces)
            value = low | high << 16
        else:
            value = data[pieces[0][0], pieces[0][1] + source]
        want_registers[32 * warp : 32 * warp + 32] = value.T
        value = value + np.uint32(0x10001)
        for i, (row, column) in enumerate(pieces):
            want[row, column + target] = value >> (16 * i) & 0xFFFF if packed else value
    np.testing.assert_array_equal(got.numpy().view(np.uint32), want_registers)
    np.testing.assert_array_equal(result.numpy().view(np.uint32), want)


# ---- tcgen05.cp ---------------------------------------------------------------------------------------------------------------------
COPIES = {
    "128x256b": (128, 2, lambda r: [r]),
    "128x128b": (128, 1, lambda r: [r]),
    "4x256b": (4, 2, lambda r: [7 + 32 * r]),
    "64x128b.warpx2::02_13": (64, 1, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 1, lambda r: [r % 32 + r // 32 * 64, r % 32 + r // 32 * 64 + 32]),
    "32x128b.warpx4": (32, 1, lambda r: [r, r + 32, r + 64, r + 96]),
}


def spread(raw: np.ndarray, bits: int) -> np.ndarray:
    """16 elements of so many bits at the start of every 16 bytes, a byte each: 4-bit ones in the middle of it, 6-bit ones at its bottom."""
    out = np.zeros(raw.shape, np.uint8)
    for at in np.ndindex(raw.shape[:-1]):
        for first in range(0, raw.shape[-1], 16):
            number = int.from_bytes(raw[at][first : first + 16].tobytes(), "little")
            for i in range(16):
                out[at][first + i] = (number >> bits * i & (1 << bits) - 1) << (2 if bits == 4 else 0)
    return out


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("form", COPIES)
def test_decompressing_copy(form: str, bits: int) -> None:
    rows, chunks, lanes = COPIES[form]
    source = RNG.integers(0, 256, (rows, 16 * chunks), dtype=np.uint8)
    image = np.zeros((1, 16384), np.uint8)
    operand = place("128", False, max(rows, 8), 128, 1, BASE + IMAGE)
    write(image[0], operand, source)
    suffix = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
    text = copy_kernel(form, f".b8x16.{suffix}")
    before = RNG.integers(0, 2**31, (1, 128, 64), dtype=np.int64).astype(np.uint32)
    after = torch.zeros(1, 128, 64, dtype=torch.int32)
    launch(text, [tensor(image), tensor(before), operand.descriptor().to_bytes(8, "little"), after])
    want, words = before.copy(), spread(source, bits).view(np.uint32)
    for r in range(rows):
        for lane in lanes(r):
            want[0, lane, 16 : 16 + 4 * chunks] = words[r]
    np.testing.assert_array_equal(after.numpy().view(np.uint32), want)


def test_padding_of_a_decompressing_copy_may_be_undefined() -> None:
    """Half of the source is never written: the padding of 4-bit elements; of 6-bit ones a part counts."""
    form, rows = "128x128b", 128
    for bits, fails in ((4, False), (6, True)):
        image = RNG.integers(0, 256, (1, 16384), dtype=np.uint8)
        suffix = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
        text = copy_kernel(form, f".b8x16.{suffix}")
        text = text.replace(
            "st.shared.v4.b32 [%r51+1024], {%r52, %r53, %r54, %r55};", "st.shared.v2.b32 [%r51+1024], {%r52, %r53};"
        )
        operand = place("none", False, rows, 16, 1, BASE + IMAGE)
        before = torch.zeros(1, 128, 64, dtype=torch.int32)
        after = torch.zeros(1, 128, 64, dtype=torch.int32)
        args = [tensor(image), before, operand.descriptor().to_bytes(8, "little"), after]
        if not fails:
            launch(text, args)
            continue
        with pytest.raises(ptxemu.MemoryFault, match="depends on uninitialised tensor memory"):
            launch(text, args)


def copy_kernel(form: str, suffix: str) -> str:
    """tcgen05.cp to column 16, of 64 that are filled before and dumped after."""
    lane = 7 << 16 if form == "4x256b" else 0
    body = barrier_init() + alloc(64) + copy_in("image", 16384) + fill("before", 64) + f"""
    setp.ne.u32 %p1, %thread, 0;
    ld.param.u64 %desc0, [desc];
    add.u32 %r1, %tmem, {lane + 16};
    @%p1 bra ISSUED;
    tcgen05.cp.cta_group::1.{form}{suffix} [%r1], %desc0;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%base];
ISSUED:
""" + wait("DONE") + dump("after", 64) + dealloc(64)  # fmt: skip
    return module(body, ".param .u64 image, .param .u64 before, .param .u64 desc, .param .u64 after")


@pytest.mark.parametrize("mode", ["none", "32", "64", "128"])
@pytest.mark.parametrize("form", COPIES)
@pytest.mark.parametrize("pair", [False, True], ids=["one", "pair"])
def test_copy(form: str, mode: str, pair: bool) -> None:
    rows, chunks, lanes = COPIES[form]
    ctas = 2 if pair else 1
    group = ctas
    size = 16384
    images = np.zeros((ctas, size), np.uint8)
    source = RNG.integers(0, 2**32, (ctas, rows, 4 * chunks), dtype=np.uint64).astype(np.uint32)
    width = {"none": 16, "32": 32, "64": 64, "128": 128}[mode]
    operand = place(mode, False, max(rows, 8), max(8, width // 4) if mode != "none" else 8, 4, BASE + IMAGE)
    for c in range(ctas):
        write(images[c], operand, source[c])
    before = RNG.integers(0, 2**31, (ctas, 128, 64), dtype=np.int64).astype(np.uint32)
    lane = 7 << 16 if form == "4x256b" else 0
    mask, multicast = (", %h0", ".multicast::cluster") if pair else ("", "")
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if pair else "bar.sync 0;"
    body = barrier_init() + alloc(64, group) + copy_in("image", size) + fill("before", 64)
    body += f"""
    {meet}
    or.b32 %r30, %thread, %rank;
    setp.ne.u32 %p1, %r30, 0;
    ld.param.u64 %desc0, [desc];
    mov.b16 %h0, 3;
    add.u32 %r1, %tmem, {lane + 16};
    @%p1 bra ISSUED;
    tcgen05.cp.cta_group::{group}.{form} [%r1], %desc0;
    tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%base]{mask};
ISSUED:
"""
    body += wait("DONE") + dump("after", 64) + (f"    {meet}\n" if pair else "") + dealloc(64, group)
    text = module(body, ".param .u64 image, .param .u64 before, .param .u64 desc, .param .u64 after")
    after = torch.zeros(ctas, 128, 64, dtype=torch.int32)
    launch(text, [tensor(images), tensor(before), operand.descriptor(), after], pair=pair)
    want = before.copy()
    for c in range(ctas):
        for r in range(rows):
            for at in lanes(r):
                want[c, at, 16 : 16 + 4 * chunks] = source[c, r]
    np.testing.assert_array_equal(after.numpy().view(np.uint32), want)


def test_shift() -> None:
    before = RNG.integers(0, 2**31, (128, 32), dtype=np.int64).astype(np.uint32)
    body = barrier_init() + alloc(32) + fill("before", 32)
    body += """
    add.u32 %r1, %tmem, 0x400008;
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra ISSUED;
    tcgen05.shift.cta_group::1.down [%r1];
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%rd30];
ISSUED:
"""
    body = "    cvt.u64.u32 %rd29, %base;\n    cvta.shared.u64 %rd30, %rd29;\n" + body
    body += wait("DONE") + dump("after", 32) + dealloc(32)
    after = torch.zeros(128, 32, dtype=torch.int32)
    launch(module(body, ".param .u64 before, .param .u64 after"), [tensor(before), after])
    want = before.copy()
    want[64:95, 8:16] = before[65:96, 8:16]
    np.testing.assert_array_equal(after.numpy().view(np.uint32), want)


# ---- allocation ---------------------------------------------------------------------------------------------------------------------
def simple(body: str, threads: int = 128, pair: bool = False, **options: object) -> ptxemu.Launched:
    return launch(
        module(body, ".param .u64 out"), [torch.zeros(4096, dtype=torch.int32)], threads=threads, pair=pair, **options
    )


def raises(kind: type[Exception], pattern: str, body: str, **options: object) -> None:
    with pytest.raises(kind, match=pattern):
        simple(body, **options)


FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, {};\n"


def test_allocations_are_disjoint_and_reused() -> None:
    body = """
    ld.param.u64 %out, [out];
"""
    for i, n in enumerate((128, 128, 64, 32)):
        body += f"    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], {n};\n    ld.shared.b32 %r{i}, [%base];\n"
    body += "    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64;\n"
    body += (
        "    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 32;\n    ld.shared.b32 %r4, [%base];\n"
    )
    for i, n in enumerate((128, 128, None, 32, 32)):
        body += f"    st.global.b32 [%out+{4 * i}], %r{i};\n"
        if n:
            body += f"    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r{i}, {n};\n"
    body += "    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
    out = torch.zeros(8, dtype=torch.int32)
    launch(module(body, ".param .u64 out"), [out], threads=32)
    at = out.tolist()
    spans = sorted((at[i], at[i] + n) for i, n in ((0, 128), (1, 128), (3, 32), (4, 32)))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] <= 512


def test_alloc_blocks_until_columns_are_free() -> None:
    """Warp 1 waits for the columns that warp 0 frees after a while."""
    body = """
    ld.param.u64 %out, [out];
    setp.ne.u32 %p1, %warp, 0;
    @%p1 bra SECOND;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base], 512;
    ld.shared.b32 %tmem, [%base];
    bar.sync 1, 64;
    mov.b32 %r1, 0;
SPIN:
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, 5000;
    @%p2 bra SPIN;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 512;
    bra END;
SECOND:
    bar.sync 1, 64;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%base+4], 256;
    ld.shared.b32 %tmem, [%base+4];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 256;
    st.global.b32 [%out], %tmem;
END:
"""
    simple(body, threads=64)


def test_pair_allocates_together() -> None:
    body = alloc(128, 2) + dealloc(128, 2)
    simple(body, pair=True)


ALLOC = "    tcgen05.alloc.cta_group::{}.sync.aligned.shared::cta.b32 [%base], {};\n    ld.shared.b32 %tmem, [%base];\n"


@pytest.mark.parametrize("columns", [0, 16, 33, 96, 1024])
def test_alloc_of_a_wrong_number_of_columns(columns: int) -> None:
    raises(ptxemu.TensorFault, f"tcgen05.alloc of {columns} columns", ALLOC.format(1, columns), threads=32)


def test_leaked_tensor_memory() -> None:
    raises(ptxemu.TensorFault, r"ends with tensor memory columns \[0, 64\) allocated", ALLOC.format(1, 64), threads=32)


def test_alloc_after_relinquish() -> None:
    body = "    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n" + ALLOC.format(1, 32)
    raises(ptxemu.TensorFault, "after tcgen05.relinquish_alloc_permit", body, threads=32)


def test_alloc_that_grows() -> None:
    body = ALLOC.format(1, 32) + ALLOC.format(1, 64)
    raises(ptxemu.TensorFault, "must not grow", body, threads=32)


def test_alloc_without_room_is_a_deadlock() -> None:
    body = ALLOC.format(1, 512) + ALLOC.format(1, 32)
    raises(ptxemu.Deadlock, "free columns of tensor memory", body, threads=32)


def test_dealloc_of_what_is_not_allocated() -> None:
    body = ALLOC.format(1, 64) + FREE.format(32)
    raises(ptxemu.TensorFault, "there is no such allocation", body, threads=32)
    body = ALLOC.format(1, 64) + FREE.format(64) + FREE.format(64)
    raises(ptxemu.TensorFault, "there is no such allocation", body, threads=32)


def test_cta_groups_do_not_mix() -> None:
    body = ALLOC.format(1, 64) + "    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;\n"
    raises(ptxemu.TensorFault, "must name the same", body, threads=32)


def test_pair_without_a_peer() -> None:
    raises(ptxemu.TensorFault, "it has no peer", ALLOC.format(2, 64), threads=32)


def test_pair_with_one_dealloc_is_a_deadlock() -> None:
    body = ALLOC.format(2, 64) + "    setp.ne.u32 %p1, %rank, 0;\n    @%p1 bra END;\n"
    body += "    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %tmem, 64;\nEND:\n"
    with pytest.raises((ptxemu.Deadlock, ptxemu.TensorFault), match=r"dealloc in the peer CTA|peer CTA has exited"):
        simple(body, threads=32, pair=True)


def test_pair_that_disagrees() -> None:
    body = """
    mov.b32 %r1, 64;
    setp.eq.u32 %p1, %rank, 0;
    @%p1 mov.b32 %r1, 128;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%base], %r1;
"""
    raises(ptxemu.TensorFault, "in the peer CTA", body, threads=32, pair=True)


# ---- faults of ld and st ------------------------------------------------------------------------------------------------------------
LD = "    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%v0, %v1}}, [{}];\n"
ST = "    tcgen05.st.sync.aligned.32x32b.x2.b32 [{}], {{%thread, %thread}};\n"
WAIT_LD, WAIT_ST = "    tcgen05.wait::ld.sync.aligned;\n", "    tcgen05.wait::st.sync.aligned;\n"


def test_uninitialised_read() -> None:
    body = alloc(32) + ST.format("%quad") + WAIT_ST + LD.format("%quad+1")
    simple(body + WAIT_LD + dealloc(32))  # nothing depends on it
    use = "    setp.eq.u32 %p1, {}, 0;\n    @%p1 bra NEXT;\nNEXT:\n"
    simple(body + WAIT_LD + use.format("%v0") + dealloc(32))
    message = r"a branch depends on uninitialised tensor memory: lane \d+, column 2"
    raises(ptxemu.MemoryFault, message, body + WAIT_LD + use.format("%v1") + dealloc(32))


def test_columns_that_are_not_allocated() -> None:
    raises(ptxemu.TensorFault, r"columns \[31, 33\) are not allocated", alloc(32) + ST.format("%quad+31"))
    raises(ptxemu.TensorFault, r"\[511, 513\) outside", alloc(512) + ST.format("%quad+511"))


def test_lanes_of_another_warp() -> None:
    raises(ptxemu.TensorFault, r"it may touch lanes \[\d+, \d+\) only", alloc(32) + ST.format("%tmem"))


def test_address_that_differs_between_threads() -> None:
    raises(
        ptxemu.TensorFault,
        "differs between the threads",
        alloc(32) + "    add.u32 %quad, %quad, %lane;\n" + ST.format("%quad"),
    )


def test_load_without_waiting_for_the_store() -> None:
    raises(ptxemu.RaceFault, "missing tcgen05.wait::st", alloc(32) + ST.format("%quad") + LD.format("%quad"))


def test_store_without_waiting_for_the_load() -> None:
    body = alloc(32) + ST.format("%quad") + WAIT_ST + LD.format("%quad")
    raises(ptxemu.RaceFault, "missing tcgen05.wait::ld", body + ST.format("%quad"))


def test_use_of_a_loads_registers_completes_it() -> None:
    """PTX ISA, "Register dependencies, same thread"; each load by its own registers, wherever the use stands."""
    two = LD.format("%quad") + "    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%v2, %v3}, [%quad+2];\n"
    start = alloc(32) + ST.format("%quad") + ST.format("%quad+2") + WAIT_ST
    store = ST.format("%quad") + WAIT_ST
    end = WAIT_LD + dealloc(32)
    by_use = start + two + "    add.u32 %v8, %v0, 1;\n" + store + end
    raises(ptxemu.RaceFault, r"only the use of its registers is known to be over.*missing tcgen05.wait::ld", by_use)
    simple(start + two + "    add.u32 %v8, %v0, 1;\n" + end)  # the use itself is legal
    notes = simple(by_use, loads_end_by_use=True).notes
    assert notes == (
        "tcgen05.st after a tcgen05.ld that only the use of its registers has completed (no tcgen05.wait::ld)",
    )
    assert not simple(start + two + "    add.u32 %v8, %v0, 1;\n" + WAIT_LD + store + end).notes
    raises(ptxemu.RaceFault, "missing tcgen05.wait::ld", start + two + "    add.u32 %v8, %v2, 1;\n" + store + end)
    # A further use or a late wait does not move the load's end past what the warp has published since.
    other = f"""
    setp.ne.u32 %p1, %warp, 4;
    bar.sync 1, 256;
    @%p1 bra END;
{store}
END:
"""
    later = "    bra NEXT;\nNEXT:\n    add.u32 %v9, %v1, 1;\n"
    once = f"    setp.ge.u32 %p1, %warp, 4;\n    @%p1 bra MEET;\n{ST.format('%quad')}{WAIT_ST}{LD.format('%quad')}"
    published = "    add.u32 %v8, %v0, 1;\nMEET:\n" + other + later + WAIT_LD
    simple(alloc(32) + once + published + dealloc(32), threads=256, loads_end_by_use=True)
    loop = f"""
    mov.u32 %r1, 0;
AGAIN:
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra FIRST;
    add.u32 %v8, %v1, 1;
{store}
FIRST:
{LD.format("%quad")}
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p1, %r1, 3;
    @%p1 bra AGAIN;
"""
    simple(start + loop + end, loads_end_by_use=True)
    raises(ptxemu.RaceFault, "missing tcgen05.wait::ld", start + loop + end)
    raises(ptxemu.RaceFault, "missing tcgen05.wait::ld", start + loop.replace("%v8, %v1, 1", "%v8, %v9, 1") + end)


def test_warps_of_one_quadrant_need_a_barrier() -> None:
    """Warps 0 and 4 share lanes 0 to 31."""

    def body(between: str) -> str:
        return alloc(32) + f"""
    setp.ge.u32 %p1, %warp, 4;
    @%p1 bra UPPER;
{ST.format("%quad")}{WAIT_ST}
    bar.sync 1, 256;
{LD.format("%quad")}{WAIT_LD}
    {between}
    bra END;
UPPER:
    bar.sync 1, 256;
    {between}
{ST.format("%quad")}{WAIT_ST}
END:
""" + dealloc(32)  # fmt: skip

    simple(body("bar.sync 2, 256;"), threads=256)
    raises(ptxemu.RaceFault, "not ordered after the tcgen05.(ld|st)", body(""), threads=256)


def test_dealloc_before_others_have_read() -> None:
    body = alloc(32) + ST.format("%quad") + WAIT_ST + "    bar.sync 0;\n" + LD.format("%quad") + WAIT_LD + dealloc(32)
    simple(body)
    early = body.rpartition("bar.sync 0;")
    raises(ptxemu.RaceFault, "tcgen05.dealloc by warp 0", early[0] + early[2])


def test_older_targets_have_no_tensor_memory() -> None:
    text = module(ALLOC.format(1, 32), ".param .u64 out", arch="sm_90a")
    with pytest.raises(ptxemu.Unsupported, match="tcgen05 needs sm_100a"):
        launch(text, [torch.zeros(1, dtype=torch.int32)], threads=32)


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("tcgen05.mma.ws.cta_group::2.kind::f16 [%r0], %desc0, %desc1, %r1, %p1;", "has .cta_group::1"),
        (
            "tcgen05.mma.ws.cta_group::1.kind::f16.collector::a::use [%r0], %desc0, %desc1, %r1, %p1;",
            "collector::a::use",
        ),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r0], %desc0, %desc1, [%r2], %r1, %p1, %p2;", "scale-input-d"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r0], [%r2], %desc1, %r1, %p1;", "ashift"),
        ("tcgen05.cp.cta_group::1.128x128b.b6x16_p32 [%r0], %desc0;", "decompression"),
        ("tcgen05.cp.cta_group::1.128x128b.b8x16 [%r0], %desc0;", "decompression"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%v0, %v1}, %v2, [%r0];", "needs sm_103a"),
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 " + names("v", 128) + ", [%r0];", "x64 does not exist"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%v0}, [%r0];", "1 registers"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r0], %desc0, %desc1, %r1, {%r2, %r3}, %p1;", "disable-output-lane"),
        ("tcgen05.mma.cta_group::1.kind::i8 [%r0], %desc0, %desc1, %r1, %p1, 1;", "scale-input-d"),
        ("tcgen05.frob [%r0];", "no tcgen05.frob"),
    ],
)
def test_unsupported_forms_are_named(line: str, pattern: str) -> None:
    with pytest.raises(ptxemu.Unsupported, match=re.escape(pattern)):
        simple("    " + line + "\n", threads=32)
