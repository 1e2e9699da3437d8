"""The Hopper scan, broken in many ways: each must be noticed, by the right kind of error or by its result."""

from __future__ import annotations

from collections.abc import Callable

import kernels
import pytest
from kernels import Case
from mutate import Mutation, every, judge, nth, swap

from ptxemu import BarrierFault, Deadlock, MemoryFault, ProxyFault, RaceFault, WgmmaFault

INIT = r"(mov\.b32 \s*%r\d+), {};(\n\s*mbarrier\.init)"
ARRIVE = r"mbarrier\.arrive\.shared\.b64[^;]*;"
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, [^;]*;"
PEEK = r"mbarrier\.try_wait\.parity\.acquire\S* (%p\d+), [^;]*;"
LOAD = r"cp\.async\.bulk\.tensor\.4d\.shared[^;]*;"
ELECTED = r"@%p\d+ bra[^;]*;(\n\s*mov\.b32 \s*%r\d+, \d+;\n\s*mbarrier\.arrive\.expect_tx)"
MMA = r"wgmma\.mma_async[^;]*;"
FENCE = r"fence\.proxy\.async[^;]*;"
PASSED = "setp.eq.u32 P1, 0, 0;"
COUNT = (BarrierFault, RaceFault, Deadlock)
UNREAD = "uninitialised|not ordered after|in flight"
EARLY = (RaceFault, BarrierFault, MemoryFault)
FLIGHT = "flight|fence|wait_group|commit"


def last_fences(text: str) -> str:
    for _ in range(3):
        text = nth(r"wgmma\.fence[^;]*;", "", -1)(text)
    return text


MUTATIONS = [
    # Barriers: how many arrive, what they wait for, which phase.
    Mutation("release barrier of A counts 4 of 8 warps", nth(INIT.format(8), r"\1, 4;\2"), COUNT),
    Mutation("release barrier of A counts 9", nth(INIT.format(8), r"\1, 9;\2"), (Deadlock,)),
    Mutation("release barrier of u counts 7 of 8 warps", nth(INIT.format(8), r"\1, 7;\2", 1), COUNT),
    Mutation("release barrier of u counts 9", nth(INIT.format(8), r"\1, 9;\2", 1), (Deadlock,)),
    Mutation("full barrier of A counts 2", nth(INIT.format(1), r"\1, 2;\2"), (Deadlock,)),
    Mutation("a stage's full barrier is not initialised", nth(r"mbarrier\.init[^;]*\+8\][^;]*;"), (BarrierFault, MemoryFault), "init"),
    Mutation("no CTA barrier after the initialisation", nth(r"bar\.sync\s+0;"), EARLY),
    Mutation("release of A dropped", nth(ARRIVE, "", 2), (Deadlock,)),
    Mutation("release of u dropped", nth(ARRIVE, "", 1), (Deadlock,)),
    Mutation("first release of u dropped", nth(ARRIVE, "", 0), (Deadlock,)),
    Mutation("release of A by every lane", nth(r"@%p28 bra[^;]*;"), COUNT),
    Mutation("release of A arrives at the wrong stage", nth(r"(arrive\.shared\.b64 \s*%rd57, \[%r311\+)24", r"\g<1>32"), COUNT),
    Mutation("u's bytes expected without election", nth(ELECTED, r"\1", 1), COUNT),
    Mutation("A's bytes expected without election", nth(ELECTED, r"\1", 0), COUNT),
    Mutation("16 bytes too few expected", nth(r", 57856;", ", 57840;"), COUNT),
    Mutation("16 bytes too many expected", nth(r", 57856;", ", 57872;"), (Deadlock,), "bytes|wait"),
    Mutation("one of the loads dropped", nth(LOAD, "", 2), (Deadlock, MemoryFault), "bytes|wait|uninit"),
    Mutation("a load made twice", nth(f"({LOAD})", r"\1\n\1", 2), (*COUNT, MemoryFault)),
    Mutation("producer's first phase is 0", nth(r"mov\.b32 (\s*%r391), 1;", r"mov.b32 \1, 0;"), (Deadlock,)),
    Mutation("producer does not wait for A's stages", nth(WAIT, PASSED, 0), (*EARLY, Deadlock)),
    Mutation("producer does not wait for u's stages", nth(WAIT, PASSED, 1), (*EARLY, Deadlock)),
    Mutation("first wait for u dropped", nth(WAIT, PASSED, 3), (*EARLY, Deadlock), UNREAD),
    Mutation("first wait for A dropped", nth(WAIT, PASSED, 4), EARLY),
    Mutation("wait for u dropped", nth(WAIT, PASSED, 5), EARLY),
    Mutation("wait for A dropped", nth(WAIT, PASSED, 6), EARLY),
    Mutation("what a look at A's barrier found is ignored", nth(PEEK, r"setp.eq.u32 \1, 0, 0;", 0), EARLY),
    Mutation("what a look at u's barrier found is ignored", nth(PEEK, r"setp.eq.u32 \1, 0, 0;", 1), EARLY),
    Mutation("wait for A has the other parity", nth(r"(P1, \[%r303\]), %r427", r"\1, 1"), (*EARLY, Deadlock)),
    Mutation("no fence after the initialisation", nth(r"fence\.mbarrier_init[^;]*;"), (ProxyFault,), "fence.mbarrier_init"),
    Mutation("producer keeps 40 registers", nth(r"(setmaxnreg\.dec\S*\s*)24;", r"\g<1>40;"), (Deadlock,), "pool of registers"),
    Mutation("consumers take 248 registers", nth(r"(setmaxnreg\.inc\S*\s*)240;", r"\g<1>248;"), (Deadlock,), "pool of registers"),
    Mutation("consumers give registers back", nth(r"setmaxnreg\.inc(\S*\s*)240;", r"setmaxnreg.dec\1 240;"), (BarrierFault,), "setmaxnreg"),
    # Named barriers and the asynchronous proxy.
    Mutation("store: proxy fence dropped", nth(FENCE, "", 0), (ProxyFault,), "fence"),
    Mutation("last store: proxy fence dropped", nth(FENCE, "", 1), (ProxyFault,), "fence"),
    Mutation("store: barrier dropped", nth(r"bar\.sync \s*%r285, 128;"), (RaceFault, ProxyFault)),
    Mutation("before staging: barrier dropped", nth(r"bar\.sync \s*%r139, 128;"), (RaceFault,)),
    Mutation("barrier waits for 3 of 4 warps", nth(r"(bar\.sync \s*%r285), 128;", r"\1, 96;"), (BarrierFault, RaceFault)),
    Mutation("barrier waits for 5 warps", nth(r"(bar\.sync \s*%r285), 128;", r"\1, 160;"), (Deadlock, BarrierFault)),
    Mutation("both groups use barrier 1", every(r"bar\.sync \s*%r\d+, 128;", "bar.sync 1, 128;"), (RaceFault, BarrierFault, ProxyFault)),
    Mutation("store: group not committed", nth(r"cp\.async\.bulk\.commit_group;", "", 0), (RaceFault,)),
    Mutation("staging reused before the store has read", nth(r"cp\.async\.bulk\.wait_group\.read\s+0;", "", 0), (RaceFault,)),
    Mutation("staging reused too early at the end", nth(r"cp\.async\.bulk\.wait_group\.read\s+0;", "", 1), (RaceFault,)),
    # wgmma.
    Mutation("wgmma.fence before P dropped", nth(r"wgmma\.fence[^;]*;", "", 0), (WgmmaFault,), "fence"),
    Mutation("only the first wgmma.fence is left", last_fences, (WgmmaFault,), "fence"),
    Mutation("P not waited for", nth(r"wgmma\.wait_group\S* \s*1;", "wgmma.wait_group.sync.aligned 2;", 1), (WgmmaFault,), FLIGHT),
    Mutation("O not waited for", nth(r"wgmma\.wait_group\S* \s*1;", "wgmma.wait_group.sync.aligned 2;", 2), (WgmmaFault,), FLIGHT),
    Mutation("S not waited for", nth(r"wgmma\.wait_group\S* \s*1;", "wgmma.wait_group.sync.aligned 3;", 3), (WgmmaFault,), FLIGHT),
    Mutation("last wait dropped, stage released", nth(r"wgmma\.wait_group\S* \s*0;"), (WgmmaFault, RaceFault)),
    Mutation("P not committed", nth(r"wgmma\.commit_group[^;]*;", "", 0), (WgmmaFault,), FLIGHT),
    Mutation("S not committed", nth(r"wgmma\.commit_group[^;]*;", "", 2), (WgmmaFault,), FLIGHT),
    Mutation("B beyond its stage", nth(r"(add\.s64 \s*%rd29, %rd22), 518;", r"\1, 14848;"), (MemoryFault, RaceFault)),
    # Addresses.
    Mutation("a load lands 16 bytes off", nth(r"(shared::cta[^[]*\[%r17\+)2048\]", r"\g<1>2064]"), (MemoryFault,), "align"),
    Mutation("a load lands one tile further", nth(r"(\[%r17\+)100352\]", r"\g<1>108544]"), (MemoryFault, RaceFault)),
    Mutation("a stage too far", nth(r"shl\.b32 (\s*%r334, %r388), 14;", r"shl.b32 \1, 15;"), (MemoryFault, RaceFault)),
    Mutation("state stored past its tensor", nth(r"(st\.global\.b32 \s*\[%rd64\+)\d+", r"\g<1>1073741824"), (MemoryFault,)),
    # What no rule forbids: the numbers are wrong.
    Mutation("other stage of W's half", nth(r"(add\.s64 \s*%rd26, %rd22), 512;", r"\1, 0;")),
    Mutation("next k block of W", nth(r"(add\.s64 \s*%rd24, %rd22), 4;", r"\1, 6;")),
    Mutation("A fragments swapped", swap(r"%r495", r"%r497", MMA)),
    Mutation("A fragment rows swapped", swap(r"%r495", r"%r496", MMA)),
    Mutation("W's swizzle 64 instead of 128", nth(r"1073741888", "2147483712")),
    Mutation("product overwrites u", nth(r"mov\.b32 (\s*%r117), 1;", r"mov.b32 \1, 0;")),
    Mutation("O accumulates", nth(r"(setp\.ne\.b32 p, [^;]*), 0;([^;]*wgmma)", r"setp.eq.b32 p, 0, 0;\2", 8)),
    Mutation("products of S scaled by -1", nth(r"(m64n128k16[^;]*, p, )1,", r"\g<1>-1,", 0)),
    Mutation("time and width swapped in a load", swap(r"%r338", r"%r386", LOAD)),
    Mutation("a load one token late", nth(r"add\.s32 (\s*%r15, %r386), 64;", r"add.s32 \1, 65;")),
    Mutation("row of u's halves", nth(r"(ldmatrix[^;]*)\+2048\]", r"\1+4096]", -1)),
    Mutation("A's box a row short", errors=(Deadlock, MemoryFault), says="bytes|wait|uninit", box=(0, 1, -1)),
    Mutation("A's box a row long", errors=(*COUNT, MemoryFault), box=(0, 1, 1)),
    Mutation("o's box a row short", box=(5, 1, -1)),
    Mutation("W's map swizzles 64 bytes", errors=(MemoryFault,), says="swizzle", swizzle=(0, 2)),
    Mutation("W's map does not swizzle", box=None, swizzle=(0, 0)),
]  # fmt: skip


MULTICAST = r"(mov\.b16 \s*%rs\d+), 3;"
CLUSTER_BARRIER = r"barrier\.cluster\.arrive\.relaxed;|barrier\.cluster\.wait;(?=\n\s*setp)"
MAPPED = r"(mapa\.shared::cluster\.u32 \s*%r332, %r330), %r331;"
CLUSTER_MUTATIONS = [
    Mutation("no fence after the initialisation", nth(r"fence\.mbarrier_init[^;]*;"), (ProxyFault, RaceFault), "mbarrier.init|fence"),
    Mutation("no cluster barrier at first", every(CLUSTER_BARRIER), EARLY),
    Mutation("no cluster barrier at the end", every(r"barrier\.cluster\.arrive;\s*barrier\.cluster\.wait;"), (MemoryFault,), "has left"),
    Mutation("a copy goes to CTA 0 alone", nth(MULTICAST, r"\1, 1;"), (Deadlock, MemoryFault)),
    Mutation("a copy goes to a CTA that is not there", nth(MULTICAST, r"\1, 5;"), (MemoryFault, Deadlock), "CTA|cluster"),
    Mutation("a CTA loads all, multicast too", nth(r"(add\.s32 \s*%r20), %r15, %r379;", r"\1, %r1, %r379;"), (*COUNT, MemoryFault)),
    Mutation("release barrier counts its own CTA's warps", nth(INIT.format(8), r"\1, 4;\2"), (*COUNT, MemoryFault)),
    Mutation("release barrier counts 9", nth(INIT.format(8), r"\1, 9;\2"), (Deadlock,)),
    Mutation("release reaches CTA 0 alone", nth(MAPPED, r"\1, 0;"), COUNT),
    Mutation("release stays in its own CTA", nth(r"and\.b32 (\s*%r331), %r5, 1;", r"mov.u32 \1, %cluster_ctarank;"), (*COUNT, MemoryFault)),
    Mutation("release reaches a CTA that is not there", nth(MAPPED, r"\1, 2;"), (MemoryFault,), "CTA|cluster"),
    Mutation("remote release dropped", nth(r"mbarrier\.arrive\.shared::cluster[^;]*;"), (Deadlock,)),
    Mutation("bytes of its own half alone expected", nth(r", 57856;", ", 29184;"), COUNT),
]  # fmt: skip


@pytest.fixture(scope="module")
def scan() -> Case:
    return kernels.need("sm_90a", kernels.hopper_scan, "two", 320)


CTA_Y = r"(mov\.u32 \s*%r\d+), %ctaid\.y;"
HEADS_MUTATIONS = [
    Mutation("every CTA is that of head 0", every(CTA_Y, r"\1, 0;"), (RaceFault,), "between CTAs"),
]


@pytest.fixture(scope="module")
def heads() -> Case:
    return kernels.need("sm_90a", kernels.hopper_scan, "two", 192, 2)


@pytest.fixture(scope="module")
def clusters() -> Case:
    return kernels.need("sm_90a", kernels.hopper_scan, "cluster", 320)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_noticed(scan: Case, record_property: Callable[[str, object], None], mutation: Mutation) -> None:
    verdict = judge(scan, mutation)
    record_property("mutation", (scan.name, verdict.line))
    assert verdict.caught, str(verdict)


@pytest.mark.parametrize("mutation", CLUSTER_MUTATIONS, ids=lambda m: m.name)
def test_noticed_in_clusters(
    clusters: Case, record_property: Callable[[str, object], None], mutation: Mutation
) -> None:
    verdict = judge(clusters, mutation)
    record_property("mutation", (clusters.name, verdict.line))
    assert verdict.caught, str(verdict)


@pytest.mark.parametrize("mutation", HEADS_MUTATIONS, ids=lambda m: m.name)
def test_noticed_between_ctas(heads: Case, record_property: Callable[[str, object], None], mutation: Mutation) -> None:
    verdict = judge(heads, mutation)
    record_property("mutation", (heads.name, verdict.line))
    assert verdict.caught, str(verdict)
