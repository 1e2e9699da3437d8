"""Branches that part and meet, warp collectives, barriers, mbarriers, deadlocks, CTAs that wait for each other, clusters."""

from __future__ import annotations

from typing import Any

import memory_ptx
import pytest
import torch

import ptxemu
from ptxemu import flow


def kernel(body: str, params: str = ".param .u64 out", shared: str = "") -> str:
    """A kernel around a body; `out` is in %out, the thread's number in %thread."""
    return f"""
.version 8.6
.target sm_90a
.address_size 64
.visible .entry k({params})
{{
    .reg .pred %p<20>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<20>;
    .reg .b32 %thread;
    .reg .b64 %out, %at;
    {shared}
    ld.param.u64 %out, [out];
    mov.u32 %thread, %tid.x;
    mad.wide.u32 %at, %thread, 4, %out;
{body}
    ret;
}}
"""


def run(body: str, threads: int = 32, grid: int = 1, shared: str = "", **options: object) -> torch.Tensor:
    out = torch.full((threads * grid,), -1, dtype=torch.int32)
    ptxemu.run_ptx(kernel(body, shared=shared), "k", (grid,), (threads,), [out], **options)
    return out


STORE = "st.global.b32 [%at], %r0;"


def test_loops_of_different_length_meet_again() -> None:
    body = f"""
    mov.b32 %r0, 0;
    mov.b32 %r1, 0;
LOOP:
    add.s32 %r0, %r0, %r1;
    add.s32 %r1, %r1, 1;
    setp.le.s32 %p1, %r1, %thread;
    @%p1 bra LOOP;
    activemask.b32 %r2;
    shl.b32 %r2, %r2, 16;
    or.b32 %r0, %r0, %r2;
    {STORE}
"""
    out = run(body)
    assert [x & 0xFFFF for x in out.tolist()] == [i * (i + 1) // 2 for i in range(32)]
    assert all(x & 0xFFFF0000 == 0xFFFF0000 for x in out.tolist())  # every lane is back together


def test_a_join_before_the_code_that_jumps_back_to_it() -> None:
    graph = flow.order(5, [1, 0, 1, 0, 2], [True, False, False, False, False], [3, -1, 4, -1, -1])
    leaders, rank = graph
    assert leaders == {0, 1, 3, 4}
    assert rank[4] > max(rank[1], rank[3])


@pytest.mark.parametrize(
    ("mode", "b", "c", "expected"),
    [
        ("idx", 3, 31, lambda i: 3),
        ("up", 1, 0, lambda i: max(i - 1, 0)),
        ("down", 2, 31, lambda i: i + 2 if i + 2 < 32 else i),
        ("bfly", 5, 31, lambda i: i ^ 5),
        ("idx", 1, 0x1C03, lambda i: (i & 0x1C) | 1),
        ("down", 1, 0x1803, lambda i: i + 1 if i % 4 != 3 and i + 1 <= ((i & 0x18) | 3) else i),
    ],
)
def test_shfl(mode: str, b: int, c: int, expected: object) -> None:
    out = run(f"shfl.sync.{mode}.b32 %r0|%p1, %thread, {b}, {c}, -1;\n{STORE}")
    if mode == "down" and c == 0x1803:
        # clamp 3 within segments of 8: lanes 0..3 of a segment shift, others have nothing above the limit.
        want = [i + 1 if i + 1 <= ((i & 0x18) | (3 & ~0x18)) else i for i in range(32)]
        assert out.tolist() == want
    else:
        assert out.tolist() == [expected(i) for i in range(32)]  # type: ignore[operator]


def test_shfl_from_a_lane_that_is_not_there() -> None:
    body = f"setp.lt.u32 %p1, %thread, 8;\n@!%p1 bra END;\nshfl.sync.idx.b32 %r0, %thread, 9, 31, 0xff;\n{STORE}\nEND:"
    with pytest.raises(ptxemu.BarrierFault, match="lane 0 reads lane 9, which does not take part"):
        run(body)


def test_vote_redux_match_elect() -> None:
    body = f"""
    setp.gt.u32 %p1, %thread, 28;
    vote.sync.ballot.b32 %r0, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, -1;
    vote.sync.uni.pred %p4, %p3, -1;
    selp.b32 %r1, 1, 0, %p2;
    selp.b32 %r2, 2, 0, %p3;
    selp.b32 %r3, 4, 0, %p4;
    or.b32 %r0, %r0, %r1;
    or.b32 %r0, %r0, %r2;
    or.b32 %r0, %r0, %r3;
    {STORE}
"""
    assert set(run(body).tolist()) == {(7 << 29 | 1 | 4) - (1 << 32)}
    assert set(run(f"redux.sync.add.u32 %r0, %thread, -1;\n{STORE}").tolist()) == {496}
    assert set(run(f"sub.s32 %r1, %thread, 5;\nredux.sync.min.s32 %r0, %r1, -1;\n{STORE}").tolist()) == {-5}
    parity = run(f"and.b32 %r1, %thread, 1;\nmatch.any.sync.b32 %r0, %r1, -1;\n{STORE}").tolist()
    assert parity == [0x55555555, 0xAAAAAAAA - (1 << 32)] * 16
    elected = run(f"elect.sync %r1|%p1, -1;\nselp.b32 %r0, 1, 0, %p1;\n{STORE}").tolist()
    assert elected == [1] + [0] * 31


def test_named_barriers_order_warps() -> None:
    shared = ".shared .align 4 .b8 buf[256];"
    body = f"""
    mov.b32 %r1, buf;
    shl.b32 %r2, %thread, 2;
    add.s32 %r3, %r1, %r2;
    st.shared.b32 [%r3], %thread;
    {{barrier}}
    xor.b32 %r4, %r2, 128;
    add.s32 %r5, %r1, %r4;
    ld.shared.b32 %r0, [%r5];
    {STORE}
"""
    out = run(body.replace("{barrier}", "bar.sync 1, 64;"), threads=64, shared=shared)
    assert out.tolist() == [i ^ 32 for i in range(64)]
    for options in ({}, {"shuffle": True, "seed": 3}):
        with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault)):
            run(body.replace("{barrier}", ""), threads=64, shared=shared, **options)


def test_barrier_misuse() -> None:
    with pytest.raises(ptxemu.BarrierFault, match="not a multiple of the warp size"):
        run("bar.sync 1, 33;")
    with pytest.raises(ptxemu.BarrierFault, match="differs from"):
        run("setp.lt.u32 %p1, %thread, 32;\nselp.b32 %r1, 64, 96, %p1;\nbar.sync 1, %r1;", threads=64)
    with pytest.raises(ptxemu.Deadlock, match=r"barrier 2: 32 of 64 threads"):
        run("setp.lt.u32 %p1, %thread, 32;\n@!%p1 bra END;\nbar.sync 2, 64;\nEND:", threads=64)
    with pytest.raises(ptxemu.BarrierFault, match="ends with barrier 3 incomplete"):
        run("bar.arrive 3, 64;")


MBAR = ".shared .align 8 .b8 bar[8];\n.shared .align 4 .b8 word[4];"
HANDOVER = f"""
    mov.b32 %r10, bar;
    mov.b32 %r11, word;
    setp.eq.u32 %p1, %thread, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r10], COUNT;
    bar.sync 0;
    setp.lt.u32 %p2, %thread, 32;
    @%p2 bra CONSUMER;
    setp.eq.u32 %p3, %thread, 32;
    @!%p3 bra END;
    mov.b32 %r1, 77;
    st.shared.b32 [%r11], %r1;
    ARRIVE
    bra END;
CONSUMER:
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r10], PARITY;
    @!%p4 bra WAIT;
    ld.shared.b32 %r0, [%r11];
    {STORE}
END:
"""


def handover(
    count: int = 1, arrive: str = "mbarrier.arrive.shared::cta.b64 %rd1, [%r10];", parity: int = 0, **o: object
) -> torch.Tensor:
    body = HANDOVER.replace("COUNT", str(count)).replace("ARRIVE", arrive).replace("PARITY", str(parity))
    return run(body, threads=64, shared=MBAR, **o)


@pytest.mark.parametrize("seed", range(4))
def test_an_mbarrier_hands_over(seed: int) -> None:
    assert handover(shuffle=True, seed=seed)[:32].tolist() == [77] * 32


def test_mbarrier_misuse() -> None:
    with pytest.raises(ptxemu.Deadlock, match=r"the mbarrier at shared offset 0[\s\S]*1 of 2 arrivals missing"):
        handover(count=2)
    with pytest.raises(ptxemu.BarrierFault, match="only 1 of 1 are still expected"):
        handover(arrive="mbarrier.arrive.shared::cta.b64 %rd1, [%r10], 2;")
    for seed in range(4):
        # The phase before the first counts as complete: too early, or, once the first is complete too, too late.
        with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault, ptxemu.Deadlock)):
            handover(parity=1, shuffle=True, seed=seed)
    with pytest.raises(ptxemu.Deadlock, match="tx-count 16"):
        handover(arrive="mbarrier.arrive.expect_tx.shared::cta.b64 %rd1, [%r10], 16;")
    with pytest.raises(ptxemu.BarrierFault, match="no mbarrier is initialised at shared offset 8"):
        handover(arrive="mbarrier.arrive.shared::cta.b64 %rd1, [%r10+8];")


def test_ctas_may_wait_for_each_other() -> None:
    body = """
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %thread, 0;
    @%p1 bra END;
    setp.eq.u32 %p2, %r1, 1;
    @%p2 bra SECOND;
SPIN:
    ld.acquire.gpu.global.b32 %r2, [%out+4];
    setp.ne.s32 %p3, %r2, 5;
    @%p3 bra SPIN;
    st.global.b32 [%out], %r2;
    bra END;
SECOND:
    mov.b32 %r3, 5;
    st.release.gpu.global.b32 [%out+4], %r3;
END:
"""
    for workers in (1, 2):
        assert run(body, grid=2, workers=workers)[:2].tolist() == [5, 5]
    with pytest.raises(ptxemu.Deadlock, match="waits for memory that nothing writes"):
        run(body.replace("mov.b32 %r3, 5", "mov.b32 %r3, 6"), grid=2, limit=1_000_000)


def test_a_cluster_shares_its_shared_memory() -> None:
    body = f"""
    mov.b32 %r10, word;
    mov.u32 %r1, %cluster_ctarank;
    setp.eq.u32 %p1, %thread, 0;
    add.s32 %r2, %r1, 40;
    @%p1 st.shared.b32 [%r10], %r2;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    xor.b32 %r3, %r1, 1;
    mapa.shared::cluster.u32 %r4, %r10, %r3;
    ld.shared::cluster.b32 %r0, [%r4];
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r5, %ctaid.x;
    mad.wide.u32 %at, %r5, 128, %at;
    {STORE}
"""
    out = run(body, grid=4, shared=MBAR, cluster=(2,))
    assert out.view(4, 32)[:, 0].tolist() == [41, 40, 41, 40]
    waits = "barrier.cluster.arrive.release.aligned;\n    barrier.cluster.wait.acquire.aligned;"
    with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault)):
        run(body.replace(waits, "", 1), grid=4, shared=MBAR, cluster=(2,))
    with pytest.raises(ptxemu.BarrierFault, match="wait without an arrive"):
        run(body.replace("barrier.cluster.arrive.release.aligned;", "", 1), grid=2, shared=MBAR, cluster=(2,))


def test_bad_launches_and_unknown_instructions() -> None:
    out = torch.zeros(32, dtype=torch.int32)
    text = kernel("")
    with pytest.raises(ptxemu.EmulatorError, match="grid must be a multiple"):
        ptxemu.run_ptx(text, "k", (3,), (32,), [out], cluster=(2,))
    with pytest.raises(ptxemu.EmulatorError, match="allowed: 1 to 1024"):
        ptxemu.run_ptx(text, "k", (1,), (2048,), [out])
    with pytest.raises(ptxemu.EmulatorError, match="got 2 arguments; it has 1 parameters"):
        ptxemu.run_ptx(text, "k", (1,), (32,), [out, out])
    with pytest.raises(ptxemu.EmulatorError, match="kernel: got 'other'"):
        ptxemu.run_ptx(text, "other", (1,), (32,), [out])
    with pytest.raises(ptxemu.EmulatorError, match="meta"):
        ptxemu.run_ptx(text, "k", (1,), (32,), [torch.zeros(4, device="meta")])
    with pytest.raises(ptxemu.Unsupported, match=r"PTX line \d+: frobnicate"):
        run("frobnicate.u32 %r1, %r1;")
    with pytest.raises(ptxemu.Unsupported, match=r"modifier \.wide"):
        run("elect.wide %r1|%p1, -1;")
    with pytest.raises(ValueError, match="unchanged"):
        run("", edit=lambda text: text)
    with pytest.raises(ptxemu.EmulatorError, match="the kernel traps"):
        run("trap;")


# ---- initialised mbarriers ----------------------------------------------------------------------------------------------------------
MBARRIER = """
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [%r1], {count};
    {after}
"""


@pytest.mark.parametrize(
    ("after", "right"),
    [
        ("bar.sync 0;", True),
        ("fence.mbarrier_init.release.cluster;", False),
        ("", False),
        ("fence.proxy.async;", False),
    ],
)
def test_an_mbarrier_of_another_warp(after: str, right: bool) -> None:
    body = MBARRIER.format(count=64, after=after) + "    mbarrier.arrive.shared.b64 %d3, [%r1];\n"
    for seed in range(3):
        if right:
            memory_ptx.run(body, [torch.zeros(1)], threads=64, shared=64, seed=seed, shuffle=True)
        else:
            with pytest.raises(
                (ptxemu.RaceFault, ptxemu.BarrierFault),
                match=r"not ordered after its mbarrier.init by warp 0|no mbarrier is init",
            ):
                memory_ptx.run(body, [torch.zeros(1)], threads=64, shared=64, seed=seed, shuffle=seed > 0)


CLUSTER = "barrier.cluster.arrive{};\n    barrier.cluster.wait;"


@pytest.mark.parametrize(
    ("after", "right"),
    [
        (CLUSTER.format(""), True),
        ("fence.mbarrier_init.release.cluster;\n    " + CLUSTER.format(".relaxed"), True),
        ("fence.acq_rel.cluster;\n    " + CLUSTER.format(".relaxed"), True),
        (CLUSTER.format(".relaxed"), False),
        ("fence.proxy.async;\n    " + CLUSTER.format(".relaxed"), False),
    ],
)
def test_an_mbarrier_of_another_cta(after: str, right: bool) -> None:
    body = MBARRIER.format(count=64, after=after) + (
        "    mapa.shared::cluster.u32 %r4, %r1, 0;\n    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];\n"
        "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n"
    )
    for seed in range(3):
        options: dict[str, Any] = dict(threads=32, grid=2, cluster=2, shared=64, seed=seed, shuffle=seed > 0)
        if right:
            memory_ptx.run(body, [torch.zeros(1)], **options)
        else:
            with pytest.raises(
                ptxemu.RaceFault, match=r"not ordered after its mbarrier.init .*fence.mbarrier_init before a relaxed"
            ):
                memory_ptx.run(body, [torch.zeros(1)], **options)


@pytest.mark.parametrize(
    ("fence", "right"),
    [
        ("fence.mbarrier_init.release.cluster;", True),
        ("fence.proxy.async;", True),
        ("", False),
        ("fence.acq_rel.cta;", False),
    ],
)
def test_an_mbarrier_of_the_asynchronous_proxy(fence: str, right: bool) -> None:
    body = MBARRIER.format(count=1, after=f"{fence}\n    bar.sync 0;") + memory_ptx.expect(64) + (
        "    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+64], [%d0], 64, [%r1];\n" + memory_ptx.wait()
    )  # fmt: skip
    if right:
        memory_ptx.run(body, [torch.zeros(16)], shared=256)
        return
    with pytest.raises(ptxemu.ProxyFault, match=r"initialised by warp 0 with no fence\.mbarrier_init or"):
        memory_ptx.run(body, [torch.zeros(16)], shared=256)
