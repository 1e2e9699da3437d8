"""ldmatrix and stmatrix of elements of 8 bits and fewer (sm_100), against the layouts of the PTX ISA's figures."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from memory_ptx import EMULATOR_ONLY, copy_in, copy_out, run

import ptxemu

LANES = range(32)


def pack(elements: np.ndarray, bits: int) -> np.ndarray:
    """Rows of 16 elements as they lie in 16 bytes: one after another from the lowest bit, then padding, which is not zero here."""
    out = np.full((len(elements), 16), 0xEE, np.uint8)
    for row, packed in zip(elements, out, strict=True):
        whole = sum(int(e) << bits * i for i, e in enumerate(row))
        packed[: 2 * bits] = np.frombuffer(whole.to_bytes(2 * bits, "little"), np.uint8)
    return out


def four(elements: np.ndarray) -> int:
    return int.from_bytes(bytes(int(e) for e in elements), "little")


def load(
    modifiers: str, registers: int, rows: int, memory: np.ndarray, *, arch: str = "sm_100a", undefined: int = 0
) -> np.ndarray:
    """[register, lane] of a load of rows that lie 32 bytes apart. undefined: bytes at the end that are not written before."""
    source = torch.zeros(32 * rows, dtype=torch.uint8)
    source.view(rows, 32)[:, :16] = torch.from_numpy(memory)
    out = torch.zeros(registers, 32, dtype=torch.int32)
    names = ", ".join(f"%r{10 + i}" for i in range(registers))
    body = copy_in("%r1", "%d0", 32 * rows - undefined) + (
        "    bar.warp.sync 0xffffffff;\n"
        f"    and.b32 %r2, %r0, {rows - 1};\n    mad.lo.u32 %r3, %r2, 32, %r1;\n    mul.wide.u32 %d4, %r0, 4;\n    add.u64 %d4, %d4, %d1;\n"
        f"    ldmatrix.sync.aligned.{modifiers} {{{names}}}, [%r3];\n"
        + "".join(f"    st.global.b32 [%d4+{128 * i}], %r{10 + i};\n" for i in range(registers))
    )  # fmt: skip
    run(body, [source, out], shared=32 * rows, arch=arch)
    return out.numpy().view(np.uint32)


@pytest.mark.parametrize(("form", "bits"), [(".b8", 8), (".b8x16.b6x16_p32", 6), (".b8x16.b4x16_p64", 4)])
@pytest.mark.parametrize("count", [1, 2])
def test_matrices_of_16_columns(form: str, bits: int, count: int) -> None:
    """Lane l has row l / 4 of the transposed matrix, columns 4 (l % 4) and on, in its first register; row l / 4 + 8 in its second."""
    elements = np.random.default_rng(bits).integers(0, 1 << bits, (16 * count, 16))
    got = load(f"m16n16.x{count}.trans.shared{form}", 2 * count, 16 * count, pack(elements, bits))
    for matrix in range(count):
        transposed = elements[16 * matrix : 16 * matrix + 16].T
        for lane in LANES:
            for half in range(2):
                row = transposed[lane // 4 + 8 * half, 4 * (lane % 4) : 4 * (lane % 4) + 4]
                assert got[2 * matrix + half, lane] == four(row)


@pytest.mark.parametrize(("form", "bits"), [(".b8x16.b6x16_p32", 6), (".b8x16.b4x16_p64", 4)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_of_8_rows(form: str, bits: int, count: int) -> None:
    elements = np.random.default_rng(bits).integers(0, 1 << bits, (8 * count, 16))
    got = load(f"m8n16.x{count}.shared::cta{form}", count, 8 * count, pack(elements, bits))
    for matrix in range(count):
        for lane in LANES:
            assert got[matrix, lane] == four(elements[8 * matrix + lane // 4, 4 * (lane % 4) : 4 * (lane % 4) + 4])


STORE = """
    mul.wide.u32 %d4, %r0, 4;
    add.u64 %d4, %d4, %d0;
{loads}    and.b32 %r2, %r0, {last};
    mad.lo.u32 %r3, %r2, 32, %r1;
    stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r3], {{{names}}};
    bar.warp.sync 0xffffffff;
"""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stores(count: int) -> None:
    """Registers hold a matrix of 16x8 as accumulators of mma do, two bytes of row l / 4 and two of row l / 4 + 8; columns become rows."""
    matrices = np.random.default_rng(count).integers(0, 256, (count, 16, 8), dtype=np.uint8)
    registers = np.zeros((count, 32), np.uint32)
    for matrix in range(count):
        for lane in LANES:
            column = slice(2 * (lane % 4), 2 * (lane % 4) + 2)
            rows = [matrices[matrix, lane // 4 + 8 * half, column] for half in range(2)]
            registers[matrix, lane] = four(np.concatenate(rows))
    source = torch.from_numpy(registers.view(np.int32))
    out = torch.zeros(256 * count, dtype=torch.uint8)
    body = STORE.format(
        loads="".join(f"    ld.global.b32 %r{10 + i}, [%d4+{128 * i}];\n" for i in range(count)),
        names=", ".join(f"%r{10 + i}" for i in range(count)), count=count, last=8 * count - 1,
    )  # fmt: skip
    for i in range(8 * count):  # rows lie 32 bytes apart; what lies between stays unwritten
        body += f"    add.u32 %r4, %r1, {32 * i};\n" + copy_out("%d5", "%r4", 16, f"OUT{i}").replace(
            f"OUT{i}_LOOP:", f"    add.u64 %d5, %d1, {16 * i};\nOUT{i}_LOOP:", 1
        )
    run(body, [source, out], shared=256 * count, arch="sm_100a")
    want = np.concatenate([m.T for m in matrices])
    assert np.array_equal(out.numpy()[: 128 * count].reshape(-1, 16), want)


def test_padding_may_be_undefined_and_elements_not() -> None:
    elements = np.arange(128).reshape(8, 16) % 16
    form = "m8n16.x1.shared.b8x16.b4x16_p64"
    assert np.array_equal(load(form, 1, 8, pack(elements, 4)), load(form, 1, 8, pack(elements, 4), undefined=24))
    with pytest.raises(ptxemu.MemoryFault, match="depends on uninitialised shared memory at offset 228"):
        load(form, 1, 8, pack(elements, 4), undefined=28)


def test_undefined_registers_reach_memory() -> None:
    """%r10 is read from memory that was never written; stores take that along, and the fault comes where it leaves."""
    body = (
        "    mad.lo.u32 %r2, %r0, 4, %r1;\n    ld.shared.b32 %r10, [%r2+512];\n"
        "    and.b32 %r3, %r0, 7;\n    mad.lo.u32 %r3, %r3, 16, %r1;\n"
        "    stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r3], {%r10};\n    bar.warp.sync 0xffffffff;\n"
    )  # fmt: skip
    out = torch.zeros(32, dtype=torch.int32)
    run(body, [out], shared=1024, arch="sm_100a", head=EMULATOR_ONLY)
    with pytest.raises(ptxemu.MemoryFault, match="depends on uninitialised shared memory"):
        run(body + copy_out("%d0", "%r1", 128), [out], shared=1024, arch="sm_100a")


@pytest.mark.parametrize(("form", "registers", "message"), [
    ("m16n16.x1.shared.b8", 2, "this shape"), ("m16n16.x4.trans.shared.b8", 4, r"\.x4 of \.m16n16"),
    ("m16n16.x1.trans.shared.b16", 2, "this shape"), ("m8n16.x1.shared.b8", 1, "this shape"),
    ("m8n16.x1.trans.shared.b8x16.b4x16_p64", 1, "this shape"), ("m8n8.x1.shared.b8", 1, "only .b16"),
    ("m16n16.x1.trans.shared.b8", 1, "1 registers where 2 are due"), ("m16n16.x2.trans.shared.b8x16.b6x16_p32.b8", 4, "this shape"),
])  # fmt: skip
def test_forms_that_do_not_exist(form: str, registers: int, message: str) -> None:
    with pytest.raises(ptxemu.Unsupported, match=message):
        load(form, registers, 32, np.zeros((32, 16), np.uint8))


def test_architectures() -> None:
    with pytest.raises(ptxemu.Unsupported, match=re.escape("needs sm_100a")):
        load("m16n16.x1.trans.shared.b8", 2, 16, np.zeros((16, 16), np.uint8), arch="sm_90a")
    body = "    stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r1], {%r10};\n"
    with pytest.raises(ptxemu.Unsupported, match=re.escape("needs sm_100a")):
        run(body, [torch.zeros(1)], shared=128)


def test_misaligned_rows() -> None:
    body = "    add.u32 %r3, %r1, 8;\n    ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%r10}, [%r3];\n"
    with pytest.raises(ptxemu.MemoryFault, match="misaligned 16-byte shared access"):
        run(body, [torch.zeros(1)], shared=128, arch="sm_100a")
