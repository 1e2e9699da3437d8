"""Values of memory that was never written: silent while nothing depends on them, a fault where something does."""

from __future__ import annotations

import pytest
import torch
from memory_ptx import run

import ptxemu

SHARED = "uninitialised shared memory at offset"
GLOBAL = "a value stored to global memory"
STORE = "    mul.wide.u32 %d5, %r0, 4;\n    add.u64 %d5, %d5, %d0;\n    st.global.b32 [%d5], {};\n"
READ = "    ld.shared.b32 %r2, [%r1+64];\n"
"""%r2 is undefined in all lanes; the buffer's offset 64 is never written."""
OWN = "    mad.lo.u32 %r1, %r0, 4, %r1;\n"
"""Each lane gets a word of its own: of lanes that write one place hardware lets any be the last."""
ODD = "    and.b32 %r3, %r0, 1;\n    setp.eq.u32 %p1, %r3, 1;\n"
HALF = """
    setp.lt.u32 %p2, %r0, 16;
    mad.lo.u32 %r4, %r0, 4, %r1;
    @%p2 st.shared.b32 [%r4], %r0;
    bar.sync 0;
    ld.shared.b32 %r5, [%r4];
"""
"""%r5 is defined in the first 16 lanes, which %p2 tells."""


def out() -> torch.Tensor:
    return torch.full((32,), -1, dtype=torch.int32)


SILENT = [
    ("never used", READ),
    ("overwritten", READ + "    mov.b32 %r2, 7;\n" + STORE.format("%r2")),
    ("arithmetic that is never used", READ + "    add.u32 %r3, %r2, 1;\n    mul.lo.u32 %r3, %r3, %r3;\n"),
    ("not selected", HALF + "    selp.b32 %r6, %r5, 3, %p2;\n" + STORE.format("%r6")),
    ("lanes that do not store", HALF + STORE.format("%r5").replace("st.global", "@%p2 st.global")),
    ("masked bits", READ + "    and.b32 %r2, %r2, 0;\n" + STORE.format("%r2")),
    ("bits set", READ + "    or.b32 %r2, %r2, -1;\n" + STORE.format("%r2")),
    ("a byte of it", OWN + "    st.shared.u8 [%r1+64], %r0;\n" + READ + "    and.b32 %r2, %r2, 255;\n" + STORE.format("%r2")),
    ("shifted out", OWN + "    st.shared.b16 [%r1+66], %r0;\n" + READ + "    shr.u32 %r2, %r2, 16;\n" + STORE.format("%r2")),
    ("half of a pack", OWN + "    st.shared.b16 [%r1+64], %r0;\n"
     + READ + "    mov.b32 {%h1, %h2}, %r2;\n    cvt.u32.u16 %r3, %h1;\n" + STORE.format("%r3")),
    ("a permutation", OWN + "    st.shared.b16 [%r1+64], %r0;\n" + READ + "    prmt.b32 %r3, %r2, 0, 0x5410;\n" + STORE.format("%r3")),
    ("lop3", READ + "    mov.b32 %r4, 0;\n    lop3.b32 %r3, %r2, %r4, %r0, 0xEA;\n" + STORE.format("%r3")),
    ("a condition that another decides", HALF + "    setp.gt.and.s32 %p3, %r5, -1, %p2;\n    @%p3 bra NEXT;\nNEXT:\n"),
    ("predicates of which one decides", HALF + "    setp.gt.s32 %p3, %r5, -1;\n    and.pred %p3, %p3, %p2;\n    @%p3 bra NEXT;\nNEXT:\n"),
    ("packed halves do not mix",
     OWN + "    st.shared.b16 [%r1+64], %r0;\n"
     + READ + "    add.rn.bf16x2 %r3, %r2, %r2;\n    and.b32 %r3, %r3, 0xffff;\n" + STORE.format("%r3")),
    ("another lane's through a shuffle",
     HALF + "    and.b32 %r6, %r0, 15;\n    shfl.sync.idx.b32 %r7, %r5, %r6, 31, -1;\n" + STORE.format("%r7")),
    ("through shared memory and masked", HALF + "    st.shared.b32 [%r4+128], %r5;\n    ld.shared.b32 %r6, [%r4+128];\n"
     + STORE.format("%r6").replace("st.global", "@%p2 st.global")),
    ("a local variable that is not read", "    .local .b32 l[2];\n    mov.u64 %d6, l;\n" + READ
     + "    st.local.b32 [%d6], %r2;\n    st.local.b32 [%d6+4], %r0;\n    ld.local.b32 %r3, [%d6+4];\n" + STORE.format("%r3")),
    ("a 64-bit pair", READ + "    mov.b64 %d6, {%r0, %r2};\n    mov.b64 {%r3, %r4}, %d6;\n" + STORE.format("%r3")),
]  # fmt: skip


@pytest.mark.parametrize("body", [b for _, b in SILENT], ids=[n for n, _ in SILENT])
def test_silent(body: str) -> None:
    run(body, [out()], shared=512)


USED = [
    ("an address", "    add.u32 %r3, %r1, %r2;\n    ld.shared.b32 %r3, [%r3];", "an operand that must be defined"),
    ("an address in global memory", "    cvt.u64.u32 %d6, %r2;\n    add.u64 %d6, %d6, %d0;\n    ld.global.b32 %r3, [%d6];", "an operand"),
    ("a branch", "    setp.eq.u32 %p1, %r2, 0;\n    @%p1 bra NEXT;\nNEXT:\n", "a branch"),
    ("a guard", "    setp.eq.u32 %p1, %r2, 0;\n    @!%p1 mov.b32 %r3, 1;\n", "the guard of an instruction"),
    ("a selection", "    setp.eq.u32 %p1, %r2, 0;\n    selp.b32 %r3, 1, 2, %p1;\n", "a condition"),
    ("a stored value", STORE.format("%r2"), GLOBAL),
    ("arithmetic", "    add.u32 %r3, %r2, 1;\n" + STORE.format("%r3"), GLOBAL),
    ("a product with zero", "    mul.lo.u32 %r3, %r2, 0;\n" + STORE.format("%r3"), GLOBAL),
    ("a value selected", ODD + "    selp.b32 %r3, %r2, 3, %p1;\n" + STORE.format("%r3"), GLOBAL),
    ("a float", "    mov.b32 %f1, %r2;\n    fma.rn.f32 %f2, %f1, %f1, %f1;\n    mov.b32 %r3, %f2;\n"
     + STORE.format("%r3"), GLOBAL),
    ("a conversion", "    mov.b32 %f1, %r2;\n    cvt.rn.bf16x2.f32 %r3, 0f00000000, %f1;\n" + STORE.format("%r3"), GLOBAL),
    ("a bit that is kept", "    and.b32 %r2, %r2, 1;\n" + STORE.format("%r2"), GLOBAL),
    ("sign extended", "    shr.s32 %r2, %r2, 31;\n" + STORE.format("%r2"), GLOBAL),
    ("a vote", "    setp.eq.u32 %p1, %r2, 0;\n    vote.sync.any.pred %p2, %p1, -1;\n    @%p2 bra NEXT;\nNEXT:\n", "a branch"),
    ("a reduction", "    redux.sync.add.u32 %r3, %r2, -1;\n" + STORE.format("%r3"), GLOBAL),
    ("a shuffle", "    shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;\n" + STORE.format("%r3"), GLOBAL),
    ("an atomic", "    red.global.add.u32 [%d0], %r2;", "an operand that must be defined"),
    ("a carry", "    add.cc.u32 %r3, %r2, 1;\n    addc.u32 %r4, 0, 0;\n" + STORE.format("%r4"), GLOBAL),
    ("shared memory", "    st.shared.b32 [%r1+128], %r2;\n    ld.shared.b32 %r3, [%r1+128];\n" + STORE.format("%r3"), GLOBAL),
    ("local memory", "    .local .b32 l[2];\n    mov.u64 %d6, l;\n"
     "    st.local.b32 [%d6], %r2;\n    ld.local.b32 %r3, [%d6];\n" + STORE.format("%r3"),
     GLOBAL),
    ("a barrier's number", "    and.b32 %r2, %r2, 0x1;\n    bar.sync %r2;", "an operand that must be defined"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "what"), [u[1:] for u in USED], ids=[u[0] for u in USED])
def test_used(body: str, what: str) -> None:
    with pytest.raises(
        ptxemu.MemoryFault,
        match=rf"{what}.* depends on {SHARED} (64|128), read at PTX line \d+",
    ):
        run(READ + body, [out()], shared=512)


def test_the_right_lanes() -> None:
    x = out()
    run(HALF + STORE.format("%r5").replace("st.global", "@%p2 st.global"), [x], shared=512)
    assert x.tolist() == [*range(16), *[-1] * 16]
    with pytest.raises(
        ptxemu.MemoryFault, match=r"stored to global memory depends on uninitialised shared memory at offset 64"
    ):
        run(HALF + STORE.format("%r5"), [out()], shared=512)


MATRIX = """
    and.b32 %r6, %r0, 15;
    mad.lo.u32 %r4, %r6, 16, %r1;
    setp.lt.u32 %p2, %r6, 8;
    @%p2 st.shared.v4.b32 [%r4], {{%r0, %r0, %r0, %r0}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r10, %r11}}, [%r4];
    mov.b32 %r12, 0;
    mov.f32 %f0, 0f00000000;
    mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {{%f1, %f2, %f3, %f4}}, {{{a}}}, {{{b}}}, {{%f0, %f0, %f0, %f0}};
    mov.b32 %r13, %f{use};
"""
"""%r10 is a defined matrix, %r11 one that was never written."""


@pytest.mark.parametrize(
    ("a", "b", "use", "right"),
    [
        ("%r10, %r11", "%r12", 1, True),
        ("%r10, %r11", "%r12", 2, True),
        ("%r10, %r11", "%r12", 3, False),
        ("%r11, %r10", "%r12", 4, True),
        ("%r12, %r12", "%r11", 1, False),
        ("%r12, %r12", "%r10", 1, True),
    ],
)
def test_rows_of_a_matrix_product(a: str, b: str, use: int, right: bool) -> None:
    body = MATRIX.format(a=a, b=b, use=use) + STORE.format("%r13")
    if right:
        run(body, [out()], shared=512)
    else:
        with pytest.raises(
            ptxemu.MemoryFault,
            match=f"{GLOBAL} depends on {SHARED} 128",
        ):
            run(body, [out()], shared=512)


BULK = """
    mul.wide.u32 %d5, %r0, 4;
    mad.lo.u32 %r4, %r0, 4, %r1;
    setp.lt.u32 %p2, %r0, {n};
    @%p2 st.shared.b32 [%r4], %r0;
    fence.proxy.async;
    bar.sync 0;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
"""


def test_bulk_store() -> None:
    x = out()
    run(BULK.format(n=32), [x], shared=512)
    assert x.tolist() == list(range(32))
    with pytest.raises(ptxemu.MemoryFault, match=r"cp\.async\.bulk of uninitialised shared memory at offset 124"):
        run(BULK.format(n=31), [out()], shared=512)
