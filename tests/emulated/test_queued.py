"""Reads of shared memory that may still be queued when a copy overwrites what they read: small kernels, in both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_ptx import run, wait

import ptxemu

LOAD = "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];"
MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3];"
ATOMIC = "atom.shared.add.u32 %r4, [%r3], 1;\n    mov.b32 %r5, 0;"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r1+8];"
FENCE = "fence.proxy.async.shared::cta;"
SAYS = r"read at PTX line \d+: .*may still be queued, .*the arrival at PTX line \d+: .*arrive"
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+1024], [%d0], 512, [%r1];"


def ring(read: str, arrive: str, copy: str = COPY, once: str = "") -> str:
    """Warp 0 waits for a copy, reads it and arrives; then warp 1 lets the next copy overwrite it. Warp 0 uses what it read at its end."""
    return f"""
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [%r1], 1;
    @%p1 mbarrier.init.shared.b64 [%r1+8], 32;
    @%p1 fence.mbarrier_init.release.cluster;
    {once}
    bar.sync 0;
    setp.ge.u32 %p2, %r0, 32;
    @%p2 bra PRODUCER;
{wait("FULL")}
    shl.b32 %r3, %r0, 4;
    add.u32 %r3, %r3, %r1;
    add.u32 %r3, %r3, 1024;
    {read}
    {arrive}
    mul.wide.u32 %d5, %r0, 4;
    add.u64 %d5, %d5, %d1;
    xor.b32 %r8, %r4, %r5;
    st.global.b32 [%d5], %r8;
    bra DONE;
PRODUCER:
    setp.ne.u32 %p3, %r0, 32;
    @%p3 bra DONE;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    {COPY}
{wait("FREE", 0, "%r1+8")}
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 512;
    {copy}
{wait("AGAIN", 1)}
DONE:
"""


def judged(right: bool, body: str, says: str = SAYS, threads: int = 64, **options: Any) -> None:
    """Silent under any schedule, or a race under each."""
    for seed in range(3):
        args = [torch.arange(128, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)]
        if right:
            run(body, args, threads=threads, shared=2048, seed=seed, shuffle=seed > 0, **options)
        else:
            with pytest.raises(ptxemu.RaceFault, match=says):
                run(body, args, threads=threads, shared=2048, seed=seed, shuffle=seed > 0, **options)


@pytest.mark.parametrize(
    ("between", "right"),
    [
        ("", False),
        ("xor.b32 %r9, %r5, 1;", True),
        ("@%p1 xor.b32 %r9, %r5, 1;", True),
        ("@%p2 xor.b32 %r9, %r5, 1;", False),
        ("shfl.sync.bfly.b32 %r9, %r7, 1, 31, -1;", True),
        (FENCE, True),
        ("fence.proxy.async;", True),
        ("membar.cta;", True),
        ("fence.acq_rel.cluster;", True),
        ("fence.mbarrier_init.release.cluster;", False),
        ("bar.sync 1, 32;", True),
        ("bar.warp.sync -1;", False),
        ("st.release.cta.shared.u32 [%r1+16], 0;", True),
        ("st.relaxed.cta.shared.u32 [%r1+16], 0;", False),
    ],
)
def test_between_read_and_arrival(between: str, right: bool) -> None:
    body = ring(LOAD, f"{between}\n    {ARRIVE}")
    judged(right, body)
    judged(True, body, queued_reads=False)


@pytest.mark.parametrize(
    ("arrive", "right"),
    [
        ("mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1+8];", False),
        ("mbarrier.arrive.release.cluster.shared::cta.b64 _, [%r1+8];", True),
        ("mapa.shared::cluster.u32 %r10, %r1, 0;\n    mbarrier.arrive.shared::cluster.b64 _, [%r10+8];", False),
        (
            "mapa.shared::cluster.u32 %r10, %r1, 0;\n    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10+8];",
            True,
        ),
    ],
)
def test_arrivals(arrive: str, right: bool) -> None:
    """Where the release names the scope of a cluster, ptxas puts a fence before it."""
    judged(right, ring(LOAD, arrive))


@pytest.mark.parametrize(("barrier", "right"), [("bar.sync 1, 64;", True), ("bar.arrive 1, 64;", False)])
def test_named_barriers(barrier: str, right: bool) -> None:
    """A bar.sync promises that what came before it is done, a bar.arrive does not."""
    body = ring(LOAD, barrier)
    free = wait("FREE", 0, "%r1+8")
    for line in ("@%p3 bra DONE;", free):
        assert line in body
    body = body.replace("@%p3 bra DONE;", "@%p3 bra SECOND;").replace(
        free, "SECOND:\n    bar.sync 1, 64;\n    @%p3 bra DONE;\n"
    )
    judged(right, body)


@pytest.mark.parametrize("read", [LOAD, MATRICES, ATOMIC, LOAD.replace("ld.", "ld.volatile.")])
def test_reads(read: str) -> None:
    judged(False, ring(read, ARRIVE))
    judged(True, ring(read, f"{FENCE}\n    {ARRIVE}"))
    judged(True, ring(read, f"add.u32 %r9, %r4, 1;\n    {ARRIVE}"))


@pytest.mark.parametrize(
    ("moves", "right"),
    [
        ("mov.b32 %r9, %r5;", False),
        ("mov.b64 %d6, {%r4, %r5};\n    mov.b64 {%r10, %r11}, %d6;", False),
        ("mov.b64 %d6, {%r4, %r5};\n    mov.b64 {%r10, %r11}, %d6;\n    add.u32 %r11, %r11, 1;", True),
        ("mov.b32 %r9, %r5;\n    mov.b32 %r9, 0;\n    add.u32 %r9, %r9, 1;", False),
        ("mov.b32 %r9, %r5;\n    mov.b32 %r10, %r9;\n    add.u32 %r11, %r10, 1;", True),
    ],
)
def test_moves_are_no_uses(moves: str, right: bool) -> None:
    """A register's move has no instruction of the hardware: the value is used where its copy is."""
    judged(right, ring(LOAD, f"{moves}\n    {ARRIVE}"))


def test_a_value_of_the_last_round() -> None:
    """In a loop that reads ahead the register used before the arrival holds what the round before read."""
    body = ring(
        "mov.b32 %r4, 0;\n    mov.b32 %r5, 0;\n    mov.b32 %r20, 0;\n    mov.b32 %r21, 0;\nROUND:\n    ld.shared.b32 %r22, [%r3];\n"
        "    add.u32 %r5, %r5, %r21;\n    mov.b32 %r21, %r22;\n    add.u32 %r20, %r20, 1;\n    setp.lt.u32 %p5, %r20, 3;\n"
        "    @%p5 bra ROUND;",
        f"{ARRIVE}\n    add.u32 %r5, %r5, %r21;",
    )
    judged(False, body)
    judged(True, body.replace("@%p5 bra ROUND;", "@%p5 bra ROUND;\n    add.u32 %r23, %r21, 1;"))


def test_used_too_late() -> None:
    """A use after the arrival orders the read for those who wait for a later one."""
    late = f"{ARRIVE}\n    add.u32 %r9, %r4, 1;\n    mbarrier.arrive.shared.b64 _, [%r1+24];"
    init = "@%p1 mbarrier.init.shared.b64 [%r1+24], 32;"
    body = ring(LOAD, late, once=init)
    judged(False, body)
    both = wait("USED", 0, "%r1+24")
    judged(True, ring(LOAD, late, copy=f"{both}    {COPY}", once=init))


def test_what_may_overwrite() -> None:
    """Generic writes take the same way as the reads; all of the asynchronous proxy does not."""
    store = "st.shared.b32 [%r1+1024], 0;\n    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 512;"
    judged(True, ring(LOAD, ARRIVE, copy=store))
    # An H200 that launches no clusters takes an st.async for an illegal instruction. The second CTA has nothing to do.
    alone = "mov.u32 %r11, %cluster_ctarank;\n    setp.ne.u32 %p4, %r11, 0;\n    @%p4 bra DONE;"
    remote = (
        "mapa.shared::cluster.u32 %r10, %r1, 0;\n"
        "    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r10+{0}], %r0, [%r10];\n"
        "    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 508;"
    )
    judged(False, ring(LOAD, ARRIVE, remote.format(1028), alone), grid=2, cluster=2)
    judged(True, ring(LOAD, ARRIVE, remote.format(1028 + 512), alone), grid=2, cluster=2)


@pytest.mark.parametrize(("between", "right"), [("", False), (FENCE, True), ("add.u32 %r9, %r4, 1;", True)])
def test_a_copy_of_the_same_warp(between: str, right: bool) -> None:
    """Nor does a copy wait for the reads of the thread that starts it."""
    body = f"""
    setp.eq.u32 %p1, %r0, 0;
    st.shared.b32 [%r1+1024], %r0;
    @%p1 mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async;
    bar.sync 0;
    ld.shared.b32 %r4, [%r1+1024];
    {between}
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+0], 512;
    @%p1 {COPY}
{wait("FULL")}
    add.u32 %r5, %r4, 1;
    """
    judged(
        right,
        body.replace("st.shared.b32 [%r1+1024], %r0;", "@%p1 st.shared.b32 [%r1+1024], %r0;"),
        "may still be queued",
        32,
    )
