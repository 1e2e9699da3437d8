"""Lanes of one warp that exchange data through shared memory (`warp_races`)."""

from __future__ import annotations

import pytest
import torch
from memory_ptx import EMULATOR_ONLY, copy_out, run

import ptxemu

PLACES = """
    shl.b32 %r2, %r0, 2;
    add.u32 %r2, %r2, %r1;
    xor.b32 %r3, %r2, 4;
"""
"""%r2: the lane's own word; %r3: its neighbour's."""
WRITE = "    st.shared.b32 [%r2], %r0;\n"
READ = "    ld.shared.b32 %r4, [%r3];\n"
SYNC = "    bar.warp.sync 0xffffffff;\n"
OUT = "    mul.wide.u32 %d4, %r0, 4;\n    add.u64 %d4, %d4, %d0;\n    st.global.b32 [%d4], %r4;\n"
MISSING = r"lane \d+ is not ordered after the {} by lane \d+ of the same warp \(missing bar.warp.sync\)"


def launch(
    body: str, *, threads: int = 32, head: str = "", warp_races: bool = True, arch: str = "sm_90a"
) -> torch.Tensor:
    out = torch.zeros(threads, dtype=torch.int32)
    only = "" if warp_races else EMULATOR_ONLY
    run(head + PLACES + body, [out], threads=threads, shared=1024, warp_races=warp_races, arch=arch, head=only)
    return out


@pytest.mark.parametrize("between", ["", "    shfl.sync.bfly.b32 %r9, %r0, 1, 31, 0xffffffff;\n", "    membar.cta;\n"])
def test_a_read_of_another_lanes_write(between: str) -> None:
    """What makes lanes meet but orders no memory is not enough."""
    with pytest.raises(ptxemu.RaceFault, match="read of shared offset .* by " + MISSING.format("write")):
        launch(WRITE + between + READ + OUT)
    assert launch(WRITE + between + READ + OUT, warp_races=False).tolist() == [i ^ 1 for i in range(32)]


@pytest.mark.parametrize("between", [SYNC, "    bar.sync 0;\n"])
def test_a_read_past_a_barrier(between: str) -> None:
    assert launch(WRITE + between + READ + OUT).tolist() == [i ^ 1 for i in range(32)]


def test_an_own_word_needs_nothing() -> None:
    assert launch(WRITE + READ.replace("%r3", "%r2") + OUT).tolist() == list(range(32))


def test_a_write_over_what_another_lane_read() -> None:
    over = WRITE + SYNC + READ + "{}    st.shared.b32 [%r2], 7;\n" + OUT
    with pytest.raises(ptxemu.RaceFault, match="write of shared offset .* by " + MISSING.format("read")):
        launch(over.format(""))
    assert launch(over.format(SYNC)).tolist() == [i ^ 1 for i in range(32)]


def test_a_write_over_another_lanes_write() -> None:
    """One value from all is no race."""
    over = WRITE + "    st.shared.b32 [%r3], {};\n"
    with pytest.raises(ptxemu.RaceFault, match="write of shared offset .* by " + MISSING.format("write")):
        launch(over.format("%r0"))
    launch("    st.shared.b32 [%r2], 5;\n    st.shared.b32 [%r3], 5;\n")


@pytest.mark.parametrize(
    ("store", "lanes", "offset"),
    [
        ("st.shared.b32 [%r1+8], %r0;", (0, 1), 8),
        ("@%p1 st.shared.u8 [%r1+8], %r0;", (30, 31), 8),
        ("st.shared.v4.b32 [%r1+16], {7, 7, 7, %r0};", (0, 1), 28),
    ],
)
def test_different_values_for_one_place(store: str, lanes: tuple[int, int], offset: int) -> None:
    """Of lanes that write a place with one instruction, any may be the last: an H200 was seen to keep lane 0's value."""
    before = "    setp.ge.u32 %p1, %r0, 30;\n    "
    message = f"lanes {lanes[0]} and {lanes[1]} write different values to shared offset {offset} at once"
    with pytest.raises(ptxemu.RaceFault, match=message):
        launch(before + store)
    launch(before + store, warp_races=False)
    launch(before + store.replace("%r0", "7"))


def test_a_sync_of_some_lanes_orders_those() -> None:
    """Lanes below 16 meet; lane 16 reads what lane 17 wrote."""
    part = "    setp.ge.u32 %p1, %r0, 16;\n    @%p1 bra REST;\n    bar.warp.sync 0x0000ffff;\nREST:\n"
    low = "    setp.lt.u32 %p2, %r0, 16;\n    mov.b32 %r4, 0;\n    @%p2 ld.shared.b32 %r4, [%r3];\n"
    assert launch(WRITE + part + low + OUT).tolist() == [i ^ 1 if i < 16 else 0 for i in range(32)]
    with pytest.raises(ptxemu.RaceFault, match="by lane 16 is not ordered after the write by lane 17"):
        launch(WRITE + part + READ + OUT)


def test_order_is_passed_on() -> None:
    """Lane 0's write is seen by 1, which meets 2: then 2 is ordered after 0."""
    meet = "    setp.gt.u32 %p1, %r0, 1;\n    @%p1 bra A;\n    bar.warp.sync 3;\nA:\n"
    meet += "    setp.eq.u32 %p2, %r0, 0;\n    setp.gt.u32 %p3, %r0, 2;\n"
    meet += "    or.pred %p3, %p2, %p3;\n    @%p3 bra B;\n    bar.warp.sync 6;\nB:\n"
    read = "    mov.b32 %r4, 0;\n    setp.eq.u32 %p4, %r0, {};\n    @%p4 ld.shared.b32 %r4, [%r1];\n"
    launch(WRITE + meet + read.format(2) + OUT)
    with pytest.raises(ptxemu.RaceFault, match="by lane 3 is not ordered after the write by lane 0"):
        launch(WRITE + meet + read.format(3) + OUT)


@pytest.mark.parametrize(
    "operation",
    [
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r5];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r2};",
    ],
)
def test_matrices_are_everyones(operation: str) -> None:
    """A row of a matrix belongs to all lanes, whichever gave its address."""
    rows = "    and.b32 %r5, %r0, 7;\n    mad.lo.u32 %r5, %r5, 16, %r1;\n"
    after = "" if operation.startswith("ld") else SYNC + READ
    with pytest.raises(ptxemu.RaceFault, match=MISSING.format("write")):
        launch(WRITE + rows + f"    {operation}\n" + after + OUT)
    launch(WRITE + rows + SYNC + f"    {operation}\n" + after + OUT)


def test_a_stored_matrix_is_read_past_a_sync() -> None:
    rows = "    and.b32 %r5, %r0, 7;\n    mad.lo.u32 %r5, %r5, 16, %r1;\n    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r5], {%r0};\n"
    with pytest.raises(ptxemu.RaceFault, match=MISSING.format("write")):
        launch(rows + READ + OUT)
    assert launch(rows + SYNC + READ + OUT).tolist() == [i ^ 1 for i in range(32)]


def test_an_mbarrier_orders_lanes() -> None:
    """Lane 0 writes and arrives; the lanes that wait are ordered after it."""
    init = "    setp.eq.u32 %p1, %r0, 0;\n    @%p1 mbarrier.init.shared.b64 [%r1+512], 1;\n" + SYNC
    body = (
        "    @%p1 st.shared.b32 [%r1], 9;\n    @%p1 mbarrier.arrive.shared.b64 _, [%r1+512];\n{}    ld.shared.b32 %r4, [%r1];\n" + OUT
    )  # fmt: skip
    wait = "WAIT:\n    mbarrier.try_wait.parity.shared.b64 %p2, [%r1+512], 0;\n    @!%p2 bra WAIT;\n"
    assert launch(body.format(wait), head=init).tolist() == [9] * 32
    with pytest.raises(ptxemu.RaceFault, match="after the write by lane 0"):
        launch(body.format(""), head=init)


def test_asynchronous_copies_of_threads() -> None:
    """A wait for cp.async makes its bytes visible to the thread that waited, and to no other lane."""
    body = (
        "    mul.wide.u32 %d4, %r0, 4;\n    add.u64 %d5, %d4, %d1;\n    add.u64 %d4, %d4, %d0;\n"
        "    cp.async.ca.shared.global [%r2], [%d5], 4;\n    cp.async.wait_all;\n{}" + READ + "    st.global.b32 [%d4], %r4;\n"
    )  # fmt: skip
    source, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run(PLACES + body.format(SYNC), [out, source], shared=1024, warp_races=True)
    assert out.tolist() == [i ^ 1 for i in range(32)]
    with pytest.raises(ptxemu.RaceFault, match=MISSING.format("write")):
        run(PLACES + body.format(""), [out, source], shared=1024, warp_races=True)


def test_lanes_that_have_left() -> None:
    gone = "    setp.ge.u32 %p1, %r0, 16;\n    @%p1 ret;\n"
    row = "    and.b32 %r5, %r0, 7;\n    mad.lo.u32 %r5, %r5, 16, %r1;\n"
    launch(gone + WRITE + "    bar.warp.sync 0x0000ffff;\n" + READ + OUT)
    launch(
        row
        + WRITE
        + SYNC
        + "    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r5];\n"
        + OUT
        + copy_out("%d0", "%r1", 128),
        threads=32,
    )
