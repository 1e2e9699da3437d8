"""The Blackwell scan of KDA, broken in many ways: each must be noticed, by the right kind of error or by its result."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import kernels
import pytest
import torch
from kernels import Case
from mutate import Edit, Mutation, every, judge, nth
from scan_inputs import Inputs

from deltafuse.kernels.config import BlackwellScanConfig
from ptxemu import BarrierFault, Deadlock, EmulatorError, MemoryFault, ProxyFault, RaceFault, TensorFault

INIT = r"(mbarrier\.init\.shared\.b64[^,]*,) [^;]*;"
ARRIVE = r"mbarrier\.arrive\.shared\.b64[^;]*;"
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, [^;]*;"
COPY = r"cp\.async\.bulk\.tensor\.4d\.shared[^;]*;"
BULK = r"cp\.async\.bulk\.shared[^;]*;"
COMMIT = r"tcgen05\.commit[^;]*;"
FENCE = r"fence\.proxy\.async[^;]*;"
MMA = r"tcgen05\.mma[^;]*;"
LOAD = r"tcgen05\.ld[^;]*;"
STORE = r"tcgen05\.st\.[^;]*;"
ZERO = r"st\.shared\.v4\.b32[^;]*;"
PASSED = "setp.eq.u32 P1, 0, 0;"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
COUNT = (BarrierFault, RaceFault, Deadlock)
EARLY = (RaceFault, BarrierFault, MemoryFault, ProxyFault, TensorFault)
FIRST = 326
"""Tokens of the first of two packed sequences; the second one is all NaN."""


@cache
def scan(form: str, cluster: int = 1, tile: int = 128) -> Case:
    """Two packed sequences, of which the first is looked at."""

    def build() -> Case:
        from deltafuse.kernels.sm100 import kda_scan

        x = Inputs([FIRST, 140], packed=True, value_dim=tile * cluster, seed=5)
        want = x.expected(True, images=form == "slots")
        config = BlackwellScanConfig(
            operands=form, cluster=cluster, tile=tile, initial=True, final=True, cu_seqlens="int64"
        )
        o, ht = torch.empty(x.batch, x.T, 1, x.value_dim, dtype=x.dtype), torch.empty_like(x.h0)
        t, s = x.tokens, x.slots
        operands: tuple[Any, ...] = (s["factors"], None, s["w"], x.v, s["scores"], s["decay"])
        for y in s.values():
            y[x.slot(1, 0) :] = float("nan")
        x.v[:, FIRST:] = float("nan")
        if form == "tokens":
            operands = (t["qg"], t["kg"], t["w"], t["u"], t["aqk"], s["g_last"])
            t["aqk"][0, :FIRST, 0][torch.arange(64)[None] > (torch.arange(FIRST) % 64)[:, None]] = float("nan")
            for y in operands[:5]:
                y[:, FIRST:] = float("nan")
        expected = {"o": want[0][:, :FIRST], "ht": want[1][:1]}
        name = f"KDA scan, {form}{f', cluster of {cluster}' * (cluster > 1)}{f', tile {tile}' * (tile < 128)}"
        args = (*operands, x.h0, x.cu, o, ht, x.scale)
        return Case(name, kda_scan.compile(config), args, {"o": o[:, :FIRST], "ht": ht[:1]}, expected, 5)

    return kernels.need("sm_100a", build)


def counts(values: list[int]) -> list[Mutation]:
    """Every barrier's count one too many; those of several warps also one too few."""
    more = [
        Mutation(f"barrier {i} counts {n + 1}", nth(INIT, rf"\1 {n + 1};", i), (*COUNT, MemoryFault))
        for i, n in enumerate(values)
    ]
    fewer = [
        Mutation(f"barrier {i} counts {n - 1}", nth(INIT, rf"\1 {n - 1};", i), COUNT)
        for i, n in enumerate(values)
        if n > 1
    ]
    return more + fewer


def elected(before: str, n: int = 0) -> Edit:
    """Drops the branch that leaves match n of `before` to one lane."""
    return nth(rf"@%p\d+ bra[^;]*;((?:\n(?!\$)(?!.*bra)[^\n]*)*?\n\s*{before})", r"\1", n)


def dropped(what: str, pattern: str, n: int, errors: Any, says: str = "") -> list[Mutation]:
    replacement = PASSED if pattern == WAIT else ""
    return [Mutation(f"{what} {i} dropped", nth(pattern, replacement, i), errors, says) for i in range(n)]


def begun_again(text: str) -> str:
    """The first product of v^T M'^T once more, right after the commit of P, which the recurrence is then reading."""
    product = re.search(r"elect\.sync(?:(?!elect)[\s\S])*?tcgen05\.mma[^;]*;\n\$L__\w+:\n", text)
    assert product is not None
    copy = re.sub(r"\$L__(\w+)", r"$AGAIN_\1", product.group())
    commit = list(re.finditer(COMMIT + r"\n\$L__\w+:\n", text))[1]
    return text[: commit.end()] + copy + text[commit.end() :]


# Waits for the last uses of the stages before a CTA ends: nothing here can see what would arrive after it.
UNSEEN: dict[tuple[str, int], tuple[int, ...]] = {("tokens", 128): (2,), ("slots", 64): (3, 4)}
TOKENS = [
    *counts([1] * 6 + [2] * 3 + [1] * 2 + [4] * 4 + [1] * 3 + [4, 1, 4]),
    *dropped("commit", COMMIT, 5, (Deadlock,)),
    *dropped("arrival", ARRIVE, 8, (Deadlock,)),
    *[Mutation(f"wait {i} dropped", nth(WAIT, PASSED, i), EARLY) for i in range(15) if i not in UNSEEN["tokens", 128]],
    *dropped("proxy fence", FENCE, 2, (ProxyFault,), "fence"),
    *dropped("copy", COPY, 9, (Deadlock,)),
    *dropped("store of the state", STORE, 4, (MemoryFault, TensorFault, RaceFault), "init|written|order"),
    Mutation("decay's copy dropped", nth(BULK), (Deadlock,)),
    Mutation("16 bytes too few expected", nth(r", 57344;", ", 57328;"), (*COUNT, MemoryFault)),
    Mutation("16 bytes too many expected", nth(r", 57344;", ", 57360;"), (Deadlock,)),
    Mutation("bytes expected without election", elected(r"mbarrier\.arrive\.expect_tx"), COUNT),
    Mutation("a copy without election", elected(COPY, 1), (*COUNT, MemoryFault)),
    Mutation("a product without election", elected(MMA), (TensorFault,), "elect"),
    Mutation("a commit without election", elected(COMMIT), (TensorFault, BarrierFault), "elect|arriv"),
    Mutation("no barrier after the initialisation", nth(r"bar\.sync\s+0;"), EARLY),
    Mutation("tensor memory not freed", nth(r"tcgen05\.dealloc[^;]*;"), (TensorFault,), "free|dealloc"),
    Mutation("tensor memory freed while in use", nth(r"bar\.sync\s+0;", "", 1), (TensorFault, RaceFault, MemoryFault)),
    Mutation("256 columns allocated, 416 used", nth(r", 512;(\n\s*tcgen05\.alloc)", r", 256;\1"), (TensorFault, MemoryFault)),
    Mutation("allocation after the permit is given up", nth(r"(tcgen05\.alloc)", RELINQUISH + r"\n\1"), (TensorFault,)),
    Mutation("no wait for loads of P", nth(r"tcgen05\.wait::ld[^;]*;"), (RaceFault,), "wait::ld"),
    Mutation("no wait for stores of v'", nth(r"tcgen05\.wait::st[^;]*;", "", 2), (RaceFault,), "wait::st"),
    Mutation("no wait for stores of S", nth(r"tcgen05\.wait::st[^;]*;", "", 3), (RaceFault,), "wait::st"),
    Mutation("o's accumulators are those of D", nth(r"add\.s32 (\s*%r\d+, %r\d+), 288;", r"add.s32 \1, 224;"), (MemoryFault, RaceFault)),
    Mutation("v' over P", nth(r"add\.s32 (\s*%r\d+, %r\d+), 128;", r"add.s32 \1, 160;"), (RaceFault, TensorFault, MemoryFault)),
    Mutation("o: barrier before the copy dropped", nth(r"bar\.sync\s+1, 128;", "", 1), (RaceFault, ProxyFault, MemoryFault)),
    Mutation("o: barrier before the staging dropped", nth(r"bar\.sync\s+1, 128;", "", 0), (RaceFault,)),
    Mutation("o: barrier of 3 warps", nth(r"bar\.sync\s+1, 128;", "bar.sync 1, 96;", 1), (BarrierFault, RaceFault)),
    Mutation("o: barrier of 5 warps", nth(r"bar\.sync\s+1, 128;", "bar.sync 1, 160;", 1), (Deadlock, BarrierFault)),
    Mutation("o: staging reused before it is read", nth(r"cp\.async\.bulk\.wait_group\.read\s+0;"), (RaceFault,)),
    Mutation("o: copy not committed", nth(r"cp\.async\.bulk\.commit_group;"), (RaceFault,)),
    Mutation("a copy lands one panel further", nth(r"\+8192\](, \[%rd)", r"+16384]\1"), EARLY),
    Mutation("a box a row short", errors=(Deadlock, MemoryFault), says="waits for|uninit", box=(0, 1, -1)),
    Mutation("a box a row long", errors=(*COUNT, MemoryFault), says="", box=(0, 1, 1)),
    Mutation("a map swizzles 64 bytes", errors=(MemoryFault,), says="swizzle", swizzle=(0, 2)),
    Mutation("P's first product accumulates", nth(r"mov\.pred (\s*%p\d+), 0;", r"mov.pred \1, -1;"), (MemoryFault,)),
    Mutation("A and D of another place", nth(r"(tcgen05\.mma[^\[]*)(\[%r\d+\]), (\[%r\d+\])", r"\1\3, \2"), (RaceFault,)),
    # What no rule forbids: the numbers are wrong.
    Mutation("a map does not swizzle", swizzle=(2, 0)),
    Mutation("P's second product overwrites", nth(r"mov\.pred (\s*%p\d+), -1;", r"mov.pred \1, 0;")),
    Mutation("another k-step of w", nth(r"add\.s32 (\s*%r\d+, %r\d+), 2;(\n\s*mov\.b64)", r"add.s32 \1, 4;\2")),
    Mutation("another k-step of S", nth(r"add\.s32 (\s*%r\d+, %r\d+), 8;(\n\s*elect)", r"add.s32 \1, 16;\2")),
    Mutation("A's sign in the instruction descriptor", nth(r"135267472", str(135267472 | 1 << 13))),
    Mutation("descriptor's swizzle 64 instead of 128", nth(r"4611756662049538048", "9223442680477040640")),
    Mutation("words of an operand swapped", nth(r"(tcgen05\.st\.[^{]*\{[^,]*,) (%r\d+), (%r\d+)", r"\1 \3, \2", 4)),
    Mutation("u not transposed", nth(r"(ldmatrix\.sync\.aligned\.m8n8\.x4)\.trans", r"\1")),
    Mutation("o not transposed", nth(r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.trans", r"\1")),
    Mutation("decay is the gate", every(r"ex2\.approx\.ftz\.f32 (%r\d+), (%r\d+);", r"mov.b32 \1, \2;")),
    Mutation("Aqk not cleared right of a row's vector", nth(ZERO, "", 7)),
    Mutation("Aqk's diagonal vector not cleared", nth(ZERO, "", 8)),
    Mutation("kg not cleared beyond the end", nth(ZERO, "", 9)),
    Mutation("v' not cleared beyond the end", nth(r"selp\.b32 (\s*%r\d+), -1, %r\d+, %p\d+;", r"mov.b32 \1, -1;", 4)),
]  # fmt: skip

# Two stages of v. With the one that there is room for at a tile of 128, its release says what others say here.
NARROW = [
    *counts([1] * 6 + [2] * 2 + [1] * 3 + [4] * 5 + [1] * 3 + [4] + [1] * 2 + [4] * 2 + [1] * 4),
    *[Mutation(f"wait {i} dropped", nth(WAIT, PASSED, i), EARLY) for i in range(17) if i not in UNSEEN["slots", 64]],
    *dropped("arrival", ARRIVE, 8, (Deadlock,)),
    *dropped("commit", COMMIT, 6, (Deadlock,)),
]

SLOTS = [
    *dropped("bulk copy", BULK, 4, (Deadlock,)),
    *dropped("copy of v", COPY, 2, (Deadlock,)),
    *dropped("commit", COMMIT, 6, (Deadlock,)),
    *dropped("arrival", ARRIVE, 8, (Deadlock,)),
    Mutation("v's release not waited for", nth(WAIT, PASSED, 1), EARLY),
    *dropped("proxy fence", FENCE, 2, (ProxyFault,), "fence"),
    Mutation("v: 16 bytes too few expected", nth(r", 16384;(?=\s*mbarrier\.arrive\.expect)", ", 16368;"), (*COUNT, MemoryFault)),
    Mutation("v not cleared beyond the end", nth(ZERO)),
    Mutation("v's second panel not cleared beyond the end", nth(ZERO, "", 8)),
    Mutation("P begun again before it is read", begun_again, (RaceFault,)),
    Mutation("P in D's columns", every(r"add\.s32 (\s*%r\d+, %r\d+), 160;", r"add.s32 \1, 224;"), (RaceFault, MemoryFault, TensorFault)),
    Mutation("P in v''s columns", every(r"add\.s32 (\s*%r\d+, %r\d+), 160;", r"add.s32 \1, 128;"), (RaceFault, MemoryFault, TensorFault)),
    Mutation("v^T M'^T added to the P before", nth(r"mov\.pred (\s*%p\d+), 0;", r"mov.pred \1, -1;"), (MemoryFault,)),
    Mutation("256 columns allocated, 480 used", nth(r", 512;(\n\s*tcgen05\.alloc)", r", 256;\1"), (TensorFault, MemoryFault)),
    Mutation("no wait for loads of P", nth(r"tcgen05\.wait::ld[^;]*;"), (RaceFault,), "wait::ld"),
    Mutation("a map swizzles 64 bytes", errors=(MemoryFault,), says="swizzle", swizzle=(0, 2)),
    Mutation("a box a row short", errors=(Deadlock, MemoryFault), says="waits for|uninit", box=(0, 1, -1)),
    Mutation("v not transposed", every(r"\b135300240\b", "135267472"), (RaceFault,)),
    # What no rule forbids: the numbers are wrong.
    Mutation("a map does not swizzle", swizzle=(0, 0)),
    Mutation("S^T w^T overwrites v^T M'^T", nth(r"mov\.pred (\s*%p\d+), -1;", r"mov.pred \1, 0;", 3)),
    Mutation("v^T M'^T's second step overwrites", nth(r"mov\.pred (\s*%p\d+), -1;", r"mov.pred \1, 0;")),
    Mutation("a step's columns of Aqk for those of M'", nth(r"(add\.s32 \s*%r\d+, %r\d+), 2;(?=\n\s*mov\.b64)", r"\1, 514;")),
    Mutation("another k-step of v", nth(r"\b4611756662083027072\b", "4611756662083027200")),
    Mutation("v's second panel is the first", nth(r"\b4611756662083026944\b", str(4611756662083026944 - (512 << 16)))),
    Mutation(
        "o's accumulator overwritten",
        nth(r"mov\.pred (\s*%p\d+), -1;(?=(?:(?!mov\.pred)[\s\S])*$)", r"mov.pred \1, 0;"),
    ),
]  # fmt: skip

CLUSTER = [
    Mutation("copies reach this CTA alone", every(r"(\.multicast::cluster \[[^;]*), %rs\d+;", r"\1, 1;"), (*COUNT, MemoryFault)),
    Mutation(
        "a stage's release reaches this CTA alone",
        nth(r"(tcgen05\.commit[^;]*multicast[^;]*), %rs\d+;", r"\1, 1;"), (*COUNT, MemoryFault),
    ),
    Mutation("the other CTA's products are not waited for", nth(INIT, r"\1 1;", 3), COUNT),
    Mutation("no cluster barrier after the initialisation", every(r"barrier\.cluster\.(arrive|wait);"), EARLY),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "mutation"),
    [pytest.param(("tokens",), m, id=m.name) for m in TOKENS]
    + [pytest.param(("slots",), m, id=f"slots: {m.name}") for m in SLOTS]
    + [pytest.param(("slots", 1, 64), m, id=f"narrow: {m.name}") for m in NARROW]
    + [pytest.param(("slots", 2), m, id=f"cluster: {m.name}") for m in CLUSTER],
)
def test_noticed(case: tuple[Any, ...], record_property: Callable[[str, object], None], mutation: Mutation) -> None:
    broken = scan(*case)
    verdict = judge(broken, mutation)
    record_property("mutation", (broken.name, verdict.line))
    assert verdict.caught, str(verdict)


def test_no_false_alarm() -> None:
    """What is not broken is right under many schedules, the second sequence's NaN notwithstanding."""
    for form, cluster, tile in (("tokens", 1, 128), ("slots", 1, 128), ("slots", 1, 64), ("slots", 2, 128)):
        case = scan(form, cluster, tile)
        for seed in range(3):
            case.run(seed=seed, shuffle=seed > 0)
            assert max(case.errors().values()) < 5e-3, case.errors()
    for (form, tile), waits in UNSEEN.items():
        for i in waits:
            verdict = judge(
                scan(form, 1, tile),
                Mutation("wait for the end dropped", nth(WAIT, PASSED, i), (EmulatorError,)),
                seeds=3,
            )
            assert verdict.error is None, str(verdict)
            assert verdict.difference < 5e-3
