"""Asynchronous copies: cp.async, bulk copies, stores that an mbarrier counts. Tensor copies: test_tma.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from memory_ptx import EMULATOR_ONLY, INIT, copy_in, copy_out, expect, run, wait

import ptxemu

SEEDS = range(4)
LANE = "    mul.wide.u32 %d20, %r0, {n};\n    add.u64 %d10, %d0, %d20;\n    mad.lo.u32 %r2, %r0, {n}, %r1;\n"
"""%d10 is the thread's place of n bytes in the first tensor, %r2 that in the shared buffer."""


def words(n: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, n).astype(np.int32))


# ---- cp.async -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("form", "n"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
@pytest.mark.parametrize("eager", [False, True])
def test_cp_async(form: str, n: int, eager: bool) -> None:
    source, out = words(8 * n), torch.zeros(8 * n, dtype=torch.int32)
    body = LANE.format(n=n) + (
        f"    cp.async.{form}.shared.global.L2::128B [%r2], [%d10], {n};\n    cp.async.commit_group;\n"
        f"    cp.async.wait_group 0;\n"
        "    bar.warp.sync 0xffffffff;\n"
    )
    for seed in SEEDS:
        run(body + copy_out("%d1", "%r1", 32 * n), [source, out], shared=512, seed=seed, eager=eager)
        assert torch.equal(out, source)


def test_cp_async_fills_with_zeros() -> None:
    """src-size by lane, and ignore-src for odd lanes of the second copy; nothing is read where nothing is valid."""
    source, out = words(32 * 4)[: 31 * 4 + 2], torch.zeros(2 * 128, dtype=torch.int32)
    body = LANE.format(n=16) + (
        "    and.b32 %r3, %r0, 3;\n    mul.lo.u32 %r4, %r3, 4;\n    setp.eq.u32 %p2, %r0, 31;\n"
        "    selp.u32 %r4, 8, %r4, %p2;\n"
        "    cp.async.cg.shared.global [%r2], [%d10], 16, %r4;\n    and.b32 %r5, %r0, 1;\n"
        "    setp.eq.u32 %p3, %r5, 1;\n"
        "    cp.async.ca.shared.global [%r2+512], [%d10], 16, %p3;\n    cp.async.wait_all;\n"
        "    bar.warp.sync 0xffffffff;\n"
    )
    run(body + copy_out("%d1", "%r1", 1024), [source, out], shared=1024)
    padded = torch.cat([source, torch.zeros(2, dtype=torch.int32)]).reshape(32, 4)
    for lane in range(32):
        valid = 2 if lane == 31 else lane % 4
        assert out.reshape(64, 4)[lane].tolist() == [*padded[lane, :valid].tolist(), *[0] * (4 - valid)]
        assert out.reshape(64, 4)[32 + lane].tolist() == ([0] * 4 if lane % 2 else padded[lane].tolist())


PIPE = LANE.format(n=16) + (
    "    cp.async.cg.shared.global [%r2], [%d10], 16;\n    cp.async.commit_group;\n"
    "    cp.async.cg.shared.global [%r2+512], [%d10], 16;\n    cp.async.commit_group;\n    {wait}\n"
)


@pytest.mark.parametrize(("wait_", "read", "right"), [
    ("cp.async.wait_group 1;", 0, True), ("cp.async.wait_group 0;", 512, True), ("cp.async.wait_all;", 512, True),
    ("cp.async.wait_group 1;", 512, False), ("cp.async.wait_group 2;", 0, False), ("", 0, False),
])  # fmt: skip
def test_groups_of_cp_async(wait_: str, read: int, right: bool) -> None:
    source, out = words(128), torch.zeros(32, dtype=torch.int32)
    body = PIPE.replace("{wait}", wait_) + (
        f"    ld.shared.u32 %r4, [%r2+{read}];\n    mul.wide.u32 %d21, %r0, 4;\n    add.u64 %d11, %d1, %d21;\n"
        f"    st.global.u32 [%d11], %r4;"
    )
    for seed in SEEDS:
        if right:
            run(body, [source, out], shared=1024, seed=seed)
            assert torch.equal(out, source[::4])
        else:
            with pytest.raises(ptxemu.RaceFault, match="asynchronous"):
                run(body, [source, out], shared=1024, seed=seed)


def test_groups_of_single_lanes() -> None:
    """Lanes commit at different times: lane 0 has one group more than the others, so its first is the older one."""
    source, out = words(128), torch.zeros(32, dtype=torch.int32)
    body = LANE.format(n=16) + (
        "    setp.eq.u32 %p1, %r0, 0;\n    mov.u32 %r4, 0;\n"
        "    cp.async.cg.shared.global [%r2], [%d10], 16;\n    cp.async.commit_group;\n"
        "    @%p1 cp.async.commit_group;\n    cp.async.wait_group {n};\n    ld.shared.u32 %r4, [%r2];\n"
        "    mul.wide.u32 %d21, %r0, 4;\n"
        "    add.u64 %d11, %d1, %d21;\n    {guard} st.global.u32 [%d11], %r4;"
    )
    run(body.replace("{n}", "0").replace("{guard}", ""), [source, out], shared=512)
    assert torch.equal(out, source[::4])
    run(body.replace("{n}", "1").replace("{guard}", "").replace("    ld.", "    @%p1 ld."), [source, out], shared=512)
    with pytest.raises(ptxemu.RaceFault):
        run(body.replace("{n}", "1").replace("{guard}", ""), [source, out], shared=512)


def test_cp_async_needs_a_barrier_for_other_warps() -> None:
    source, out = words(64), torch.zeros(64, dtype=torch.int32)
    body = LANE.format(n=4) + (
        "    cp.async.ca.shared.global [%r2], [%d10], 4;\n    cp.async.wait_all;\n    {sync}\n"
        "    xor.b32 %r3, %r0, 32;\n"
        "    mad.lo.u32 %r4, %r3, 4, %r1;\n    ld.shared.u32 %r5, [%r4];\n    mul.wide.u32 %d21, %r0, 4;\n"
        "    add.u64 %d11, %d1, %d21;\n"
        "    st.global.u32 [%d11], %r5;"
    )
    run(body.replace("{sync}", "bar.sync 0;"), [source, out], threads=64, shared=256)
    assert torch.equal(out.reshape(2, 32), source.reshape(2, 32).flip(0))
    for seed in SEEDS:
        with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault)):
            run(body.replace("{sync}", ""), [source, out], threads=64, shared=256, seed=seed)


@pytest.mark.parametrize("noinc", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_an_mbarrier_counts_cp_async(noinc: bool, waits: bool) -> None:
    """Warp 0 copies and arrives, warp 1 waits on the mbarrier (32 arrivals with .noinc; without, 32 ordinary ones besides)."""
    source, out = words(32), torch.zeros(32, dtype=torch.int32)
    body = (
        "    setp.eq.u32 %p1, %r0, 0;\n    @%p1 mbarrier.init.shared.b64 [%r1], 32;\n    bar.sync 0;\n"
        "    setp.ge.u32 %p2, %r0, 32;\n"
        "    @%p2 bra CONSUMER;\n" + LANE.format(n=4) + "    cp.async.ca.shared.global [%r2+128], [%d10], 4;\n"
        + ("    cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];\n" if noinc
           else "    cp.async.mbarrier.arrive.shared.b64 [%r1];\n    mbarrier.arrive.shared.b64 %d30, [%r1];\n")
        + "    bra DONE;\nCONSUMER:\n" + (wait() if waits else "")
        + copy_out("%d1", "%r3", 128).replace("OUT_LOOP:", "    add.u32 %r3, %r1, 128;\nOUT_LOOP:")
        + "DONE:\n"
    )  # fmt: skip
    for seed in SEEDS:
        if waits:
            run(body, [source, out], threads=64, shared=256, seed=seed, shuffle=True)
            assert torch.equal(out, source)
        else:
            with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault)):
                run(body, [source, out], threads=64, shared=256, seed=seed)


def test_cp_async_goes_through_the_generic_proxy() -> None:
    """A bulk store of what cp.async brought needs a fence."""
    source, out = words(128), torch.zeros(128, dtype=torch.int32)
    body = LANE.format(n=16) + (
        "    setp.eq.u32 %p1, %r0, 0;\n    cp.async.cg.shared.global [%r2], [%d10], 16;\n"
        "    cp.async.wait_all;\n    {fence}\n"
        "    bar.warp.sync 0xffffffff;\n    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 512;\n"
        "    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group 0;"
    )
    run(body.replace("{fence}", "fence.proxy.async.shared::cta;"), [source, out], shared=512)
    assert torch.equal(out, source)
    with pytest.raises(ptxemu.ProxyFault, match="no fence"):
        run(body.replace("{fence}", ""), [source, out], shared=512)


@pytest.mark.parametrize(("body", "error", "message"), [
    ("    cp.async.cg.shared.global [%r1+8], [%d0], 16;", ptxemu.MemoryFault, "misaligned 16-byte shared"),
    ("    cp.async.cg.shared.global [%r1], [%d0+8], 16;", ptxemu.MemoryFault, "misaligned cp.async"),
    ("    cp.async.cg.shared.global [%r1], [%d0+64], 16;", ptxemu.MemoryFault, "out of bounds: offset 64 of argument 0"),
    ("    cp.async.cg.shared.global [%r1+512], [%d0], 16;", ptxemu.MemoryFault, "outside"),
    ("    mov.u32 %r3, 20;\n    cp.async.cg.shared.global [%r1], [%d0], 16, %r3;", ptxemu.MemoryFault, "src-size of 20"),
    ("    cp.async.cg.shared.global [%r1], [%d0], 16;\n    st.shared.u32 [%r1], 1;",
     ptxemu.RaceFault, "asynchronous write to it is in flight"),
])  # fmt: skip
def test_faults_of_cp_async(body: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(body, [words(16)], threads=1, shared=512)


def test_what_is_never_waited_for_is_noted() -> None:
    done = run(
        "    cp.async.cg.shared.global [%r1], [%d0], 16;\n    cp.async.commit_group;",
        [words(16)],
        threads=1,
        shared=512,
        head=EMULATOR_ONLY,
    )
    assert any("without waiting for the cp.async" in n for n in done.notes)
    store = "    st.shared.v4.u32 [%r1], {%r0, %r0, %r0, %r0};\n    fence.proxy.async;\n"
    store += "    cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16;\n"
    for more, message in (
        ("", "without committing"), ("    cp.async.bulk.commit_group;", "without waiting"),
        ("    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group.read 0;", None),
    ):  # fmt: skip
        out = words(4)
        done = run(store + more, [out], threads=1, shared=512, head=EMULATOR_ONLY)
        assert [message in n for n in done.notes] == [True] if message else not done.notes
        assert not out.any()
    done = run(INIT + expect(64) + "    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+16], [%d0], 64, [%r1];",
               [words(16)], shared=128, head=EMULATOR_ONLY)  # fmt: skip
    assert any("in flight" in n for n in done.notes)


# ---- bulk copies ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
@pytest.mark.parametrize("n", [16, 512, 4096])
def test_bulk_load_and_store(space: str, n: int) -> None:
    source, out, again = words(n // 4), torch.zeros(n // 4, dtype=torch.int32), torch.zeros(n // 4, dtype=torch.int32)
    body = (
        INIT + expect(n) + f"    add.u32 %r2, %r1, 128;\n    mov.u64 %d9, 0;\n"
        f"    @%p1 cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r2], [%d0], {n}, [%r1], %d9;\n"
        + wait() + copy_out("%d1", "%r2", n)
        + f"    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r2], {n};\n"
        f"    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group.read 0;\n"
    )  # fmt: skip
    for seed in SEEDS:
        run(body, [source, out, again], shared=n + 128, seed=seed)
        assert torch.equal(out, source)
        assert torch.equal(again, source)


LOAD = INIT + expect("{expected}") + (
    "    add.u32 %r2, %r1, 128;\n"
    "    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], 256, [%r1];\n"
)  # fmt: skip


def test_a_load_that_nobody_waits_for() -> None:
    for seed in SEEDS:
        with pytest.raises(ptxemu.RaceFault, match="missing mbarrier wait"):
            run(
                LOAD.replace("{expected}", "256") + copy_out("%d1", "%r2", 256),
                [words(64), words(64)],
                shared=512,
                seed=seed,
            )


def test_expected_bytes_must_agree() -> None:
    args = [words(64), words(64)]
    with pytest.raises(ptxemu.Deadlock, match="tx-count 16"):
        run(LOAD.replace("{expected}", "272") + wait() + copy_out("%d1", "%r2", 256), args, shared=512)
    with pytest.raises(ptxemu.BarrierFault, match="more transaction bytes"):
        run(LOAD.replace("{expected}", "240") + wait() + copy_out("%d1", "%r2", 256), args, shared=512)


def test_a_copy_that_every_lane_issues() -> None:
    """32 copies to one place, each counted: the second already meets the first in flight."""
    with pytest.raises(ptxemu.RaceFault, match="asynchronous write to it is in flight"):
        run(LOAD.replace("{expected}", "256").replace("@%p1 cp", "cp") + wait(), [words(64)], shared=512)


def test_lanes_that_issue_copies_of_their_own() -> None:
    source, out = words(512), torch.zeros(512, dtype=torch.int32)
    body = INIT + expect(2048) + (
        "    bar.warp.sync 0xffffffff;\n    mad.lo.u32 %r2, %r0, 64, %r1;\n    mul.wide.u32 %d5, %r0, 64;\n"
        "    add.u64 %d6, %d0, %d5;\n"
        "    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+128], [%d6], 64, [%r1];\n"
        "    add.u32 %r3, %r1, 128;\n"
    ) + wait() + copy_out("%d1", "%r3", 2048)  # fmt: skip
    run(body, [source, out], shared=2048 + 128)
    assert torch.equal(out, source)


STORE = (
    copy_in("%r1", "%d0", 512)
    + """
    setp.eq.u32 %p1, %r0, 0;
    {fence}
    bar.warp.sync 0xffffffff;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 512;
    {commit}
    {wait}
    bar.warp.sync 0xffffffff;
    mad.lo.u32 %r9, %r0, 4, %r1;
    st.shared.u32 [%r9], %r0;
"""
)


@pytest.mark.parametrize(("fence", "commit", "wait_", "error", "message"), [
    ("fence.proxy.async;", "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;", None, ""),
    ("fence.proxy.async;", "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;", None, ""),
    ("", "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;", ptxemu.ProxyFault, "no fence.proxy.async"),
    ("fence.proxy.async;", "cp.async.bulk.commit_group;", "", ptxemu.RaceFault, "asynchronous read of it is in flight"),
    ("fence.proxy.async;", "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 1;", ptxemu.RaceFault, "asynchronous read"),
    ("fence.proxy.async;", "", "cp.async.bulk.wait_group.read 0;", ptxemu.RaceFault, "asynchronous read"),
])  # fmt: skip
def test_stores_and_their_waits(
    fence: str, commit: str, wait_: str, error: type[Exception] | None, message: str
) -> None:
    body = STORE.replace("{fence}", fence).replace("{commit}", commit).replace("{wait}", wait_)
    for seed in SEEDS:
        source, out = words(128), torch.zeros(128, dtype=torch.int32)
        if error is None:
            run(body, [source, out], shared=512, seed=seed)
            assert torch.equal(out, source)
        else:
            with pytest.raises(error, match=message):
                run(body, [source, out], shared=512, seed=seed)


def test_another_warp_may_not_overwrite_before_it_is_told() -> None:
    """Warp 0 waits for its store's read; warp 1 writes the source without a barrier."""
    body = copy_in("%r1", "%d0", 512).replace("IN_DONE:", "IN_DONE:\n    fence.proxy.async;\n    bar.sync 0;") + (
        "    setp.eq.u32 %p1, %r0, 0;\n    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 512;\n"
        "    @%p1 cp.async.bulk.commit_group;\n    @%p1 cp.async.bulk.wait_group.read 0;\n    {sync}\n"
        "    setp.ge.u32 %p2, %r0, 32;\n"
        "    @%p2 st.shared.u32 [%r1], %r0;"
    )
    init = "    setp.ge.u32 %p2, %r0, 32;\n    @%p2 bra IN_DONE;\n"
    run(init + body.replace("{sync}", "bar.sync 0;"), [words(128), words(128)], threads=64, shared=512)
    with pytest.raises(ptxemu.RaceFault):
        run(init + body.replace("{sync}", ""), [words(128), words(128)], threads=64, shared=512)


def test_the_source_of_a_store_is_read_at_the_latest_when_waited_for() -> None:
    """The copy to global memory may come later than wait_group.read, with what the source held then."""
    for seed in range(8):
        source, out = words(128), torch.zeros(128, dtype=torch.int32)
        body = STORE.replace("{fence}", "fence.proxy.async;").replace("{commit}", "cp.async.bulk.commit_group;")
        run(body.replace("{wait}", "cp.async.bulk.wait_group.read 0;"), [source, out], shared=512, seed=seed)
        assert torch.equal(out, source)


REDUCTIONS = [
    ("add", "u32"), ("add", "s32"), ("add", "u64"), ("min", "u32"), ("max", "s32"), ("min", "s64"), ("max", "u64"),
    ("inc", "u32"), ("dec", "u32"),
    ("and", "b32"), ("or", "b32"), ("xor", "b64"), ("add", "f32"), ("add", "f64"), ("add.noftz", "f16"), ("add.noftz", "bf16"),
    ("min", "f16"), ("max", "bf16"),
]  # fmt: skip


def reduced(operation: str, type_: str, a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """The bytes of a reduction of two arrays of raw bytes."""
    floats = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
    name = operation.split(".")[0]
    if type_ in floats:
        x, y = a.view(floats[type_]), b.view(floats[type_])
        z = {"add": torch.add, "min": torch.minimum, "max": torch.maximum}[name](x, y)
        return z.view(torch.uint8).numpy()
    code = f"{'i' if type_[0] == 's' else 'u'}{int(type_[1:]) // 8}"
    x, y = a.numpy().view(code), b.numpy().view(code)
    if name == "inc":
        z = np.where(x >= y, 0, x + 1).astype(code)
    elif name == "dec":
        z = np.where((x == 0) | (x > y), y, x - 1).astype(code)
    else:
        bitwise = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
        z = ({"add": np.add, "min": np.minimum, "max": np.maximum} | bitwise)[name](x, y)
    return z.view(np.uint8)


def operands(type_: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two arrays of 256 bytes of a type."""
    g = torch.Generator().manual_seed(7)
    floats = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
    if type_ in floats:
        pair = torch.randn(2, 256, generator=g, dtype=torch.float64).to(floats[type_])
        return tuple(x.view(torch.uint8)[:256].clone() for x in pair)
    a, b = (torch.randint(0, 256, (256,), dtype=torch.uint8, generator=g) for _ in range(2))
    b[:64] = a[:64]
    a[8:16] = 0
    return a, b


@pytest.mark.parametrize(("operation", "type_"), REDUCTIONS)
def test_bulk_reductions_to_global_memory(operation: str, type_: str) -> None:
    a, b = operands(type_)
    expected = reduced(operation, type_, a, b)
    body = copy_in("%r1", "%d1", 256) + (
        "    setp.eq.u32 %p1, %r0, 0;\n    fence.proxy.async;\n    bar.warp.sync 0xffffffff;\n"
        f"    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{type_} [%d0], [%r1], 256;\n"
        "    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group 0;"
    )
    run(body, [a, b], shared=256)
    assert np.array_equal(a.numpy(), expected)


def test_bulk_reductions_of_many_ctas_add_up() -> None:
    total, ones = torch.zeros(64, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    body = copy_in("%r1", "%d1", 256) + (
        "    setp.eq.u32 %p1, %r0, 0;\n    fence.proxy.async;\n    bar.warp.sync 0xffffffff;\n"
        "    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%d0], [%r1], 256;\n"
        "    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group.read 0;"
    )
    run(body, [total, ones], grid=50, shared=256)
    assert total.tolist() == [50] * 64


def test_prefetch_checks_its_range() -> None:
    run("    cp.async.bulk.prefetch.L2.global [%d0], 64;", [words(16)], threads=1)
    with pytest.raises(ptxemu.MemoryFault, match="out of bounds"):
        run("    cp.async.bulk.prefetch.L2.global [%d0], 80;", [words(16)], threads=1)


@pytest.mark.parametrize(("copy", "error", "message"), [
    ("[%r2], [%d0], %r5, [%r1]", ptxemu.MemoryFault, "24 bytes: the size must be a multiple of 16"),
    ("[%r2+8], [%d0], 16, [%r1]", ptxemu.MemoryFault, "misaligned cp.async.bulk: its destination"),
    ("[%r2], [%d0+8], 16, [%r1]", ptxemu.MemoryFault, "misaligned cp.async.bulk: its source"),
    ("[%r2], [%d0], 272, [%r1]", ptxemu.MemoryFault, "out of bounds"),
    ("[%r2+512], [%d0], 256, [%r1]", ptxemu.MemoryFault, "outside"),
    ("[%r2], [%d0], 64, [%r1+8]", ptxemu.BarrierFault, "no mbarrier is initialised at shared offset 8"),
    ("[%r1], [%d0], 64, [%r1]", ptxemu.MemoryFault, "holds a live mbarrier"),
])  # fmt: skip
def test_faults_of_bulk_copies(copy: str, error: type[Exception], message: str) -> None:
    body = INIT + "    add.u32 %r2, %r1, 128;\n    mov.u32 %r5, 24;\n"
    body += f"    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {copy};"
    with pytest.raises(error, match=message):
        run(body, [words(64)], shared=512)


# ---- clusters -------------------------------------------------------------------------------------------------------------------------
MEET = "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n"
RANK = "    mov.u32 %r10, %cluster_ctarank;\n    mov.u32 %r11, %ctaid.x;\n"


def test_multicast_of_a_bulk_copy() -> None:
    """CTA 1 of 4 sends to CTAs 0, 1 and 3; each waits on its own barrier."""
    source, out = words(64), torch.zeros(4, 64, dtype=torch.int32)
    body = RANK + INIT + MEET + (
        "    setp.eq.u32 %p3, %r10, 2;\n    @%p3 bra SKIP;\n" + expect(256) + "    setp.eq.u32 %p4, %r10, 1;\n    and.pred %p4, %p4, %p1;\n"
        "    mov.u16 %h1, 11;\n    add.u32 %r2, %r1, 128;\n"
        "    @%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2], [%d0], 256, [%r1], %h1;\n"
        + wait() + "    mul.wide.u32 %d5, %r11, 256;\n    add.u64 %d5, %d1, %d5;\n" + copy_out("%d5", "%r2", 256) + "SKIP:\n" + MEET
    )  # fmt: skip
    for seed in SEEDS:
        run(body, [source, out], grid=4, cluster=4, shared=512, seed=seed)
        for rank in (0, 1, 3):
            assert torch.equal(out[rank], source)
        assert not out[2].any()
    with pytest.raises(ptxemu.MemoryFault, match="CTA mask 0x1b of a cluster of 4"):
        run(body.replace("%h1, 11", "%h1, 27"), [source, out], grid=4, cluster=4, shared=512)


@pytest.mark.parametrize("reduce", [False, True])
def test_bulk_copies_between_ctas(reduce: bool) -> None:
    """Each CTA sends its row to the next CTA's shared memory, or all add theirs to CTA 0's."""
    source, out = words(4 * 64).reshape(4, 64) >> 4, torch.zeros(4, 64, dtype=torch.int32)
    own = "    mul.wide.u32 %d5, %r11, 256;\n    add.u64 %d6, %d0, %d5;\n    add.u64 %d7, %d1, %d5;\n"
    own += "    add.u32 %r2, %r1, 128;\n    add.u32 %r3, %r1, 512;\n"
    to = "0" if reduce else "%r12"
    name = "cp.reduce.async" if reduce else "cp.async"
    form = ".add.s32" if reduce else ""
    clear = "    mad.lo.u32 %r20, %r0, 8, %r3;\n    st.shared.v2.u32 [%r20], {0, 0};\n" if reduce else ""
    first = "    setp.eq.u32 %p5, %r10, 0;\n    and.pred %p5, %p5, %p1;\n" + expect(1024).replace("%p1", "%p5")
    body = RANK + INIT + own + clear + (first if reduce else expect(256)) + (
        copy_in("%r2", "%d6", 256) + "    fence.proxy.async;\n" + MEET + "    add.u32 %r12, %r10, 1;\n    and.b32 %r12, %r12, 3;\n"
        f"    mapa.shared::cluster.u32 %r13, %r3, {to};\n    mapa.shared::cluster.u32 %r14, %r1, {to};\n"
        f"    @%p1 {name}.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{form} [%r13], [%r2], 256, [%r14];\n"
        + ("    setp.ne.u32 %p6, %r10, 0;\n    @%p6 bra SKIP;\n" if reduce else "") + wait()
        + copy_out("%d7", "%r3", 256) + "SKIP:\n" + MEET
    )  # fmt: skip
    for seed in SEEDS:
        run(body, [source, out], grid=4, cluster=4, shared=1024, seed=seed)
        if reduce:
            assert torch.equal(out[0], source.sum(0, dtype=torch.int32))
        else:
            assert torch.equal(out, source.roll(1, 0))


def test_a_barrier_in_another_cta_than_the_destination() -> None:
    body = RANK + INIT + MEET + (
        "    xor.b32 %r12, %r10, 1;\n    mapa.shared::cluster.u32 %r13, %r1, %r12;\n"
        "    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+128], [%d0], 64, [%r13];\n" + MEET
    )  # fmt: skip
    with pytest.raises(
        ptxemu.BarrierFault, match=r"the mbarrier is in CTA (\d) of the cluster, the destination in CTA (?!\1)\d"
    ):
        run(body, [words(64)], grid=2, cluster=2, shared=512, workers=1)


@pytest.mark.parametrize(("form", "values"), [
    ("b32", ["%r20"]), ("v4.b32", ["%r20", "%r21", "%r20", "%r21"]), ("v2.f32", ["%f1", "%f2"]), ("b64", ["%d20"]),
    ("v2.u64", ["%d20", "%d21"]),
])  # fmt: skip
def test_st_async(form: str, values: list[str]) -> None:
    """All lanes store to the other CTA; its barrier counts the bytes."""
    n = int(form[-2:]) // 8 * len(values)
    out = torch.zeros(2, 32 * n // 4, dtype=torch.int32)
    operand = values[0] if len(values) == 1 else "{" + ", ".join(values) + "}"
    body = RANK + INIT + expect(32 * n) + MEET + (
        "    xor.b32 %r12, %r10, 1;\n    mad.lo.u32 %r2, %r0, {n}, %r1;\n"
        "    mapa.shared::cluster.u32 %r13, %r2, %r12;\n    mapa.shared::cluster.u32 %r14, %r1, %r12;\n"
        "    mad.lo.u32 %r20, %r10, 1000, %r0;\n    add.u32 %r21, %r20, 500;\n    mov.b32 %f1, %r20;\n"
        "    mov.b32 %f2, %r21;\n"
        "    mov.b64 %d20, {%r20, %r21};\n    mov.b64 %d21, {%r21, %r20};\n"
        "    st.async.shared::cluster.mbarrier::complete_tx::bytes.{form} [%r13+128], {operand}, [%r14];\n"
        + wait() + "    add.u32 %r3, %r1, 128;\n"
        "    mul.wide.u32 %d5, %r10, {bytes};\n    add.u64 %d5, %d0, %d5;\n" + copy_out("%d5", "%r3", 32 * n) + MEET
    ).replace("{n}", str(n)).replace("{form}", form).replace("{operand}", operand).replace("{bytes}", str(32 * n))  # fmt: skip
    patterns = {"b32": [0], "v4.b32": [0, 500, 0, 500], "v2.f32": [0, 500], "b64": [0, 500], "v2.u64": [0, 500, 500, 0]}
    for seed in SEEDS:
        run(body, [out], grid=2, cluster=2, shared=1024, seed=seed)
        for rank in range(2):
            expected = [1000 * (1 - rank) + lane + more for lane in range(32) for more in patterns[form]]
            assert out[rank].tolist() == expected
    with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault)):
        run(body.replace(wait(), ""), [out], grid=2, cluster=2, shared=1024)


@pytest.mark.parametrize(("operation", "type_", "start", "expected"), [
    ("add", "u32", 5, 5 + 2 * sum(range(32))), ("add", "u64", 5, 5 + 2 * sum(range(32))),
    ("max", "s32", -7, 31), ("min", "s32", 3, 0), ("min", "u32", 9, 0),
    ("or", "b32", 64, 127 - 32), ("xor", "b32", 9, 9), ("and", "b32", 31, 0), ("inc", "u32", 3, 67),
    ("dec", "u32", 70, 6),
])  # fmt: skip
def test_red_async(operation: str, type_: str, start: int, expected: int) -> None:
    """All lanes of both CTAs reduce into one place of CTA 0."""
    value = "1000" if operation in ("inc", "dec") else "%r0"
    n, r = int(type_[1:]) // 8, "r" if type_[1:] == "32" else "d"
    out = torch.zeros(1, dtype=torch.int64)
    body = RANK + INIT + (
        f"    setp.eq.u32 %p5, %r10, 0;\n    and.pred %p5, %p5, %p1;\n    mov.b{8 * n} %{r}30, {start};\n"
        f"    @%p5 st.shared.b{8 * n} [%r1+16], %{r}30;\n"
        + expect(64 * n).replace("%p1", "%p5") + MEET
        + f"    mapa.shared::cluster.u32 %r13, %r1, 0;\n    cvt.u64.u32 %d20, %r0;\n    mov.u32 %r20, {value};\n"
        f"    red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}.{type_} [%r13+16], %{r}20, [%r13];\n"
        "    @!%p5 bra SKIP;\n" + wait()
        + f"    ld.shared.b{8 * n} %{r}31, [%r1+16];\n    st.global.b{8 * n} [%d0], %{r}31;\nSKIP:\n" + MEET
    )  # fmt: skip
    run(body, [out], grid=2, cluster=2, shared=64)
    assert (out.item() if n == 8 else int(np.int32(out.item() & 0xFFFFFFFF))) == expected
