"""Races in global memory: between warps, between CTAs, with asynchronous copies; and what orders them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_ptx import INIT, expect, run, wait

import ptxemu

ADDRESS = "    mul.wide.u32 %d5, %r0, 4;\n    add.u64 %d5, %d5, %d0;\n"
OTHER = "    xor.b32 %r3, %r0, 32;\n    mul.wide.u32 %d6, %r3, 4;\n    add.u64 %d6, %d6, %d0;\n"
"""%d5: the thread's word; %d6: that of the same lane of the other of two warps."""


def words(n: int = 64) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


def judged(right: bool, body: str, args: list[Any], match: str = "not ordered after", **options: Any) -> None:
    """Silent under any schedule, or a race under each."""
    for seed in range(4):
        if right:
            run(body, args, seed=seed, shuffle=seed > 0, **options)
        else:
            with pytest.raises(ptxemu.RaceFault, match=match):
                run(body, args, seed=seed, shuffle=seed > 0, **options)


@pytest.mark.parametrize(
    ("between", "right"), [("bar.sync 0;", True), ("", False), ("bar.sync 1, 32;", False), ("membar.gl;", False)]
)
def test_two_warps(between: str, right: bool) -> None:
    if between == "bar.sync 1, 32;":
        between = "shr.u32 %r7, %r0, 5;\n    add.u32 %r7, %r7, 1;\n    bar.sync %r7, 32;"
    read_after_write = (
        ADDRESS + OTHER + f"    st.global.b32 [%d5], %r0;\n    {between}\n    ld.global.b32 %r4, [%d6];\n"
    )
    judged(
        right,
        read_after_write,
        [words()],
        r"(load|store) at offset \d+ of argument 0 .* is not ordered after the (write|read) by warp",
        threads=64,
    )
    write_after_read = (
        ADDRESS + OTHER + f"    ld.global.b32 %r4, [%d6];\n    {between}\n    st.global.b32 [%d5], %r0;\n"
    )
    judged(right, write_after_read, [words()], "missing barrier", threads=64)
    both_write = ADDRESS + OTHER + f"    st.global.b32 [%d5], %r0;\n    {between}\n    st.global.b32 [%d6], %r0;\n"
    judged(right, both_write, [words()], "store at .* is not ordered after the write", threads=64)


def test_what_does_not_overlap() -> None:
    """Neighbouring bytes, by neighbouring warps and CTAs, and reads by all."""
    body = (
        "    mov.u32 %r2, %ctaid.x;\n    mad.lo.u32 %r2, %r2, 64, %r0;\n    cvt.u64.u32 %d5, %r2;\n    add.u64 %d5, %d5, %d0;\n"
        "    ld.global.u8 %r4, [%d1];\n    st.global.u8 [%d5], %r4;\n    st.global.u8 [%d5], %r0;\n"
    )
    x, y = torch.zeros(192, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    judged(True, body, [x, y], threads=64, grid=3)
    assert x.tolist() == [*range(64)] * 3
    # The same with every second byte a warp's.
    body = body.replace("mad.lo.u32 %r2, %r2, 64, %r0;", "mad.lo.u32 %r2, %r0, 3, %r2;")
    judged(True, body, [x, y], threads=64, grid=3)
    judged(
        False,
        body.replace("%r0, 3, %r2", "%r0, 2, %r2"),
        [x, y],
        "missing release and acquire between CTAs",
        threads=64,
        grid=3,
    )


def test_ctas() -> None:
    same = ADDRESS + "    st.global.b32 [%d5], %r0;\n"
    judged(
        False,
        same,
        [words()],
        r"store at offset 0 .* the write by warp 0 of CTA \([01], 0, 0\) \(missing release",
        grid=2,
    )
    judged(True, same, [words()], grid=2, races=False)
    judged(True, same, [words()], grid=1)
    judged(True, ADDRESS + "    ld.global.b32 %r2, [%d5];\n", [words()], grid=4)
    read = (
        ADDRESS
        + "    mov.u32 %r2, %ctaid.x;\n    setp.eq.u32 %p1, %r2, 3;\n    ld.global.b32 %r2, [%d5];\n    @%p1 st.global.b32 [%d5], %r0;\n"
    )
    judged(False, read, [words()], grid=4)


def test_a_cluster() -> None:
    body = (
        ADDRESS
        + "    mov.u32 %r2, %cluster_ctarank;\n    setp.eq.u32 %p1, %r2, 0;\n    @%p1 st.global.b32 [%d5], %r0;\n"
        "    barrier.cluster.arrive{};\n    barrier.cluster.wait;\n    @!%p1 ld.global.b32 %r4, [%d5];\n"
    )
    judged(True, body.format(""), [words()], grid=2, cluster=2)
    judged(False, body.format(".relaxed"), [words()], grid=2, cluster=2)


@pytest.mark.parametrize(
    ("atomic", "plain", "right"),
    [
        ("red.global.add.u32 [%d0], 1;", "", True),
        ("red.global.add.u32 [%d0], 1;", "ld.relaxed.gpu.global.u32 %r4, [%d0];", True),
        ("st.volatile.global.u32 [%d0], 1;", "ld.volatile.global.u32 %r4, [%d0];", True),
        ("red.global.add.u32 [%d0], 1;", "ld.global.u32 %r4, [%d0];", False),
        ("red.global.add.u32 [%d0], 1;", "st.global.u32 [%d0], %r0;", False),
        ("st.global.u32 [%d0], %r0;", "atom.global.add.u32 %r4, [%d0], 1;", False),
    ],
)
def test_atomics(atomic: str, plain: str, right: bool) -> None:
    judged(right, f"    {atomic}\n    {plain}\n", [words()], grid=3)


LAST = """
    mov.u32 %r2, %ctaid.x;
    mad.lo.u32 %r3, %r2, 32, %r0;
    mul.wide.u32 %d5, %r3, 4;
    add.u64 %d5, %d5, %d0;
    st.global.b32 [%d5], %r3;
    bar.sync 0;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra MEET;
    {before}
    atom{semantics}.gpu.global.add.u32 %r4, [%d1], 1;
    {after}
    st.shared.u32 [%r1], %r4;
MEET:
    bar.sync 0;
    ld.shared.u32 %r4, [%r1];
    setp.ne.u32 %p2, %r4, 7;
    @%p2 bra DONE;
    mul.wide.u32 %d5, %r0, 4;
    add.u64 %d5, %d5, %d0;
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
AGAIN:
    ld.global.b32 %r7, [%d5];
    add.u32 %r5, %r5, %r7;
    add.u64 %d5, %d5, 128;
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p2, %r6, 8;
    @%p2 bra AGAIN;
    mul.wide.u32 %d5, %r0, 4;
    add.u64 %d5, %d5, %d2;
    st.global.b32 [%d5], %r5;
DONE:
"""
"""The last of eight CTAs adds up what all have written."""


@pytest.mark.parametrize(
    ("before", "semantics", "after", "right"),
    [
        ("membar.gl;", ".relaxed", "membar.gl;", True),
        ("fence.acq_rel.gpu;", ".relaxed", "fence.acq_rel.gpu;", True),
        ("", ".acq_rel", "", True),
        ("membar.gl;", ".acquire", "", True),
        ("", ".release", "membar.gl;", True),
        ("", ".relaxed", "membar.gl;", False),
        ("membar.gl;", ".relaxed", "", False),
        ("", ".release", "", False),
        ("", ".acquire", "", False),
    ],
)
def test_the_last_cta(before: str, semantics: str, after: str, right: bool) -> None:
    for workers in (1, 2):
        args = [words(256), words(1), words(32)]
        body = LAST.format(before=before, semantics=semantics, after=after)
        options: dict[str, Any] = dict(grid=8, threads=64, shared=16, workers=workers)
        if right:
            run(
                body.replace("setp.ne.u32 %p1", "and.b32 %r0, %r0, 31;\n    setp.ne.u32 %p1", 0),
                args,
                **(options | {"threads": 32}),
            )
            assert args[2].tolist() == [sum(32 * c + i for c in range(8)) for i in range(32)]
        else:
            with pytest.raises(ptxemu.RaceFault, match="missing release and acquire between CTAs"):
                run(body, args, **(options | {"threads": 32}))


@pytest.mark.parametrize("kind", ["acquire", "relaxed"])
def test_a_chain_of_ctas(kind: str) -> None:
    """CTA i takes what CTA i + 1 wrote; the last but one step's order reaches through the chain."""
    x, flag = words(8), torch.zeros(9, dtype=torch.int32)
    flag[8] = 1
    body = (
        "    mov.u32 %r2, %ctaid.x;\n    mul.wide.u32 %d5, %r2, 4;\n    add.u64 %d6, %d0, %d5;\n    add.u64 %d7, %d1, %d5;\n"
        f"WAIT:\n    ld.{kind}.gpu.global.u32 %r3, [%d7+4];\n    setp.eq.u32 %p1, %r3, 0;\n    @%p1 bra WAIT;\n"
        "    setp.eq.u32 %p2, %r2, 7;\n    mov.u32 %r4, 0;\n    @!%p2 ld.global.u32 %r4, [%d0+28];\n    add.u32 %r4, %r4, 1;\n"
        "    @%p2 st.global.u32 [%d6], %r4;\n    st.release.gpu.global.u32 [%d7], 1;\n"
    )
    for workers in (1, 2):
        flag[:8] = 0
        if kind == "acquire":
            run(body, [x, flag], grid=8, threads=1, workers=workers)
        else:
            with pytest.raises(ptxemu.RaceFault, match="between CTAs"):
                run(body, [x, flag], grid=8, threads=1, workers=workers)


STORE = """
    mad.lo.u32 %r4, %r0, 4, %r1;
    setp.lt.u32 %p3, %r0, 32;
    @%p3 st.shared.b32 [%r4], %r0;
    fence.proxy.async;
    bar.sync 0;
    setp.eq.u32 %p1, %r0, 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 128;
    cp.async.bulk.commit_group;
    {}
    bar.sync 0;
    mul.wide.u32 %d5, %r0, 4;
    add.u64 %d5, %d5, %d0;
    @!%p3 ld.global.b32 %r5, [%d5+-128];
"""


@pytest.mark.parametrize(
    ("waits", "right"),
    [
        ("cp.async.bulk.wait_group 0;", True),
        ("cp.async.bulk.wait_group.read 0;\n    cp.async.bulk.wait_group 0;", True),
        ("cp.async.bulk.wait_group.read 0;", False),
    ],
)
def test_bulk_store(waits: str, right: bool) -> None:
    if right:
        judged(True, STORE.format(waits), [words()], threads=64, shared=256)
        return
    with pytest.raises(
        ptxemu.RaceFault, match=r"cp\.async\.bulk to global memory .* not ordered after the read by warp 1"
    ):
        run(STORE.format(waits), [words()], threads=64, shared=256)


def test_bulk_load() -> None:
    body = INIT + expect(128) + (
        "    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+128], [%d0], 128, [%r1];\n{}\n"
        "    setp.ge.u32 %p2, %r0, 32;\n" + ADDRESS + "    @%p2 st.global.b32 [%d5+-128], %r0;\n{}\n"
    )  # fmt: skip
    judged(True, body.format(wait(), ""), [words()], threads=64, shared=512)
    judged(False, body.format("", wait()), [words()], "copy|not ordered", threads=64, shared=512)
    copy, reduction = "cp.async.bulk.global", "cp.reduce.async.bulk.global"
    reductions = (
        STORE.format("cp.async.bulk.wait_group 0;")
        .replace(copy, reduction)
        .replace("bulk_group [", "bulk_group.add.u32 [")
    )
    judged(True, reductions[: reductions.rindex("@!%p3")], [words()], threads=64, shared=256, grid=3)
    judged(
        False, STORE.format("cp.async.bulk.wait_group 0;"), [words()], "between CTAs", threads=64, shared=256, grid=3
    )
