"""kernel-fun's Blackwell scan, broken in many ways: each must be noticed, by the right kind of error or by its result."""

from __future__ import annotations

import re
from collections.abc import Callable

import kernels
import pytest
from kernels import Case
from mutate import Edit, Mutation, every, judge, nth, swap

from ptxemu import BarrierFault, Deadlock, EmulatorError, MemoryFault, ProxyFault, RaceFault, TensorFault

INIT = r"(mov\.b32 \s*%r\d+), {};(\n\s*mbarrier\.init)"
ARRIVE = r"mbarrier\.arrive\.shared\.b64[^;]*;"
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, [^;]*;"
LOAD = r"cp\.async\.bulk\.tensor\.2d\.shared[^;]*;"
COMMIT = r"tcgen05\.commit[^;]*;"
FENCE = r"fence\.proxy\.async[^;]*;"
MMA = r"tcgen05\.mma[^;]*;"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
PASSED = "setp.eq.u32 P1, 0, 0;"
COUNT = (BarrierFault, RaceFault, Deadlock)
EARLY = (RaceFault, BarrierFault, MemoryFault, ProxyFault, TensorFault)
STUCK = "waits for"


def elected(before: str, n: int = 0) -> Edit:
    """Drops the branch that leaves match n of `before` to one lane."""
    return nth(rf"@%p\d+ bra[^;]*;((?:\n(?!\$)(?!.*bra)[^\n]*)*?\n\s*{before})", r"\1", n)


def early_release(text: str) -> str:
    """Moves the last two arrivals before the loads from tensor memory that they follow."""
    released = [m.group() for m in list(re.finditer(rf"mov\.b32 \s*%r193, 1;|{ARRIVE}", text))[-3:]]
    for line in released:
        text = text.replace(line, "", 1) if text.count(line) == 1 else text
    first = list(re.finditer(r"tcgen05\.ld[^;]*;", text))[-2]
    return text[: first.start()] + "\n".join(released) + "\n" + text[first.start() :]


COUNTS = [
    Mutation(f"barrier {i} of 128 counts {n}", nth(INIT.format(128), rf"\1, {n};\2", i), COUNT, "")
    for i, n in ((0, 64), (1, 96), (2, 129), (3, 129), (4, 129), (5, 96), (6, 129))
]
FENCES = [Mutation(f"proxy fence {i} dropped", nth(FENCE, "", i), (ProxyFault,), "fence") for i in range(5)]
COMMITS = [Mutation(f"tcgen05.commit {i} dropped", nth(COMMIT, "", i), (Deadlock,)) for i in range(9)]
ARRIVALS = [Mutation(f"arrival {i} dropped", nth(ARRIVE, "", i), (Deadlock,)) for i in range(9)]
WAITS = [
    Mutation(f"wait {i} dropped", nth(WAIT, PASSED, i), EARLY, "") for i in (0, 1, 6, 7, 9, 10, 12, 20, 24, 26, 27)
]
WAITS += [Mutation("wait 21 dropped", nth(WAIT, PASSED, 21), (*EARLY, Deadlock), "uninitialised")]
# Waits that nothing depends on: what they wait for has happened when an earlier wait is over (for the accumulators of w h, of the state's
# update and of A v the release of an operand that is made from them), or at once (the first phase of the state's first stage).
IMPLIED = (8, 11, 13, 19)

MUTATIONS = [
    *COUNTS, *FENCES, *COMMITS, *ARRIVALS, *WAITS,
    Mutation("barrier of 129 counts 64", nth(INIT.format(129), r"\1, 64;\2"), COUNT),
    Mutation("full barrier counts 2", nth(INIT.format(1), r"\1, 2;\2"), (Deadlock,)),
    Mutation("no CTA barrier after the initialisation", every(r"bar\.sync\s+0(, 384)?;"), (BarrierFault, RaceFault, MemoryFault)),
    Mutation("address of tensor memory read before its allocation", nth(r"bar\.sync\s+0, 384;"), (MemoryFault, RaceFault)),
    Mutation("16 bytes too few expected", nth(r", 57344;", ", 57328;"), COUNT),
    Mutation("16 bytes too many expected", nth(r", 57344;", ", 57360;"), (Deadlock,)),
    Mutation("one of the loads dropped", nth(LOAD, "", 3), (Deadlock,)),
    Mutation("bytes expected without election", elected(r"mbarrier\.arrive\.expect_tx"), COUNT),
    Mutation("a load without election", elected(LOAD, 1), (*COUNT, MemoryFault)),
    Mutation("an MMA without election", elected(MMA), (TensorFault,), "elect"),
    Mutation("a commit without election", elected(COMMIT), (TensorFault, BarrierFault), "elect|arriv"),
    Mutation("commit to another barrier", nth(r"(tcgen05\.commit[^;]*)\[%r10\]", r"\1[%r12]"), COUNT),
    Mutation("release of the wrong stage", nth(r"(tcgen05\.commit[^;]*)\[%r37\+16\]", r"\1[%r37+24]"), (*COUNT, MemoryFault)),
    Mutation("producer's first phase is 0", nth(r"mov\.b32 (\s*%r1014), 1;", r"mov.b32 \1, 0;"), (Deadlock,)),
    Mutation("first MMA accumulates", nth(r"mov\.pred (\s*%p50), 0;", r"mov.pred \1, -1;"), (MemoryFault, TensorFault)),
    Mutation("no wait for loads from tensor memory", every(r"tcgen05\.wait::ld[^;]*;"), (RaceFault,), "missing tcgen05.wait::ld"),
    Mutation("accumulators of o released before they are read", early_release, (RaceFault,)),
    Mutation("no fence after the initialisation", nth(r"fence\.mbarrier_init[^;]*;"), (ProxyFault,), "fence.mbarrier_init"),
    Mutation("tensor memory not freed", nth(r"tcgen05\.dealloc[^;]*;"), (TensorFault,), "free|dealloc"),
    Mutation("tensor memory freed while in use", nth(r"bar\.sync\s+2, 384;"), (TensorFault, RaceFault)),
    Mutation("128 columns allocated, 256 used", nth(r", 512;(\n\s*tcgen05\.alloc)", r", 128;\1"), (TensorFault, MemoryFault)),
    Mutation("half of the columns freed", nth(r"(mov\.b32 \s*%r1012), 512;", r"\1, 256;"), (TensorFault,)),
    Mutation("allocation after the permit is given up", nth(r"(tcgen05\.alloc)", RELINQUISH + r"\n\1"), (TensorFault,)),
    Mutation("accumulators overlap", nth(r"add\.s32 (\s*%r21, %r20), 64;", r"add.s32 \1, 32;"), (RaceFault, TensorFault)),
    Mutation("a warp reads another's lanes", nth(r"add\.s32 (\s*%r22, %r20), 128;", r"add.s32 \1, 131200;"), (*EARLY, Deadlock)),
    Mutation("store: barrier dropped", nth(r"bar\.sync\s+3, 128;", "", 0), (RaceFault, ProxyFault, MemoryFault)),
    Mutation("staging reused: barrier dropped", nth(r"bar\.sync\s+3, 128;", "", 1), (RaceFault,)),
    Mutation("barrier waits for 3 of 4 warps", nth(r"bar\.sync\s+3, 128;", "bar.sync 3, 96;", 0), (BarrierFault, RaceFault)),
    Mutation("barrier waits for 5 warps", nth(r"bar\.sync\s+3, 128;", "bar.sync 3, 160;", 0), (Deadlock, BarrierFault)),
    Mutation("two groups use one barrier number", every(r"bar\.sync\s+3, 128;", "bar.sync 1, 128;"), (*EARLY, Deadlock)),
    Mutation("staging reused before the store has read", nth(r"cp\.async\.bulk\.wait_group\.read\s+0;", "", 0), (RaceFault,)),
    Mutation("store not committed", nth(r"cp\.async\.bulk\.commit_group;", "", 0), (RaceFault,)),
    Mutation("a load lands 16 bytes off", nth(r"(shared::cta[^[]*\[%r27\+)1024\]", r"\g<1>1040]"), (MemoryFault,), "align"),
    Mutation("a load lands one tile further", nth(r"(shared::cta[^[]*\[%r27\+)66560\]", r"\g<1>74752]"), (MemoryFault, RaceFault)),
    Mutation("a stage too far", nth(r"shl\.b32 (\s*%r977, %r1017), 14;", r"shl.b32 \1, 15;"), (MemoryFault, RaceFault)),
    Mutation("operand's other stage", nth(r"shl\.b32 (\s*%r39, %r1022), 10;", r"shl.b32 \1, 11;"), (MemoryFault, RaceFault)),
    Mutation("w's box a row short", errors=(Deadlock, MemoryFault), says=f"{STUCK}|uninit", box=(0, 1, -1)),
    Mutation("w's box a row long", errors=(*COUNT, MemoryFault), box=(0, 1, 1)),
    Mutation("w's map swizzles 64 bytes", errors=(MemoryFault,), says="swizzle", swizzle=(0, 2)),
    # What no rule forbids: the numbers are wrong.
    Mutation("A and B swapped", swap(r"%rd313", r"%rd312", MMA)),
    Mutation("next k block", nth(r"add\.s32 (\s*%r42, %r41), 2;", r"add.s32 \1, 4;")),
    Mutation("descriptor's swizzle 64 instead of 128", nth(r"4611756662049538048", "9223442680477040640")),
    Mutation("second MMA overwrites", nth(r"mov\.pred (\s*%p53), -1;", r"mov.pred \1, 0;")),
    Mutation("A's sign in the instruction descriptor", nth(r"68158608", str(68158608 | 1 << 13))),
    Mutation("coordinates of a load swapped", swap(r"%r979", r"%r25", LOAD)),
    Mutation("a load one token late", nth(r"add\.s32 (\s*%r25, %r1013), 256;", r"add.s32 \1, 257;")),
    Mutation("stored transposed", nth(r"stmatrix\.sync\.aligned\.m8n8\.x4\.trans", "stmatrix.sync.aligned.m8n8.x4")),
    Mutation("fragments of a store swapped", swap(r"%r502", r"%r504", r"stmatrix[^;]*%r502[^;]*;")),
    Mutation("w's map does not swizzle", swizzle=(0, 0)),
]  # fmt: skip


@pytest.fixture(scope="module")
def scan() -> Case:
    return kernels.need("sm_100a", kernels.kernel_fun_scan, False, 256, 1, 128, 64)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_noticed(scan: Case, record_property: Callable[[str, object], None], mutation: Mutation) -> None:
    verdict = judge(scan, mutation)
    record_property("mutation", (scan.name, verdict.line))
    assert verdict.caught, str(verdict)


@pytest.mark.parametrize("wait", IMPLIED)
def test_no_false_alarm(scan: Case, wait: int) -> None:
    verdict = judge(scan, Mutation(f"wait {wait} dropped", nth(WAIT, PASSED, wait), (EmulatorError,)))
    assert verdict.error is None, str(verdict)
    assert verdict.difference < 6e-3
