"""tcgen05.mma against numpy: data path layouts, descriptors, element types, operand A in tensor memory; its asynchrony and its faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tensor_ptx import (
    BASE,
    BF16,
    E4M3,
    E5M2,
    F16,
    IMAGE,
    S8,
    TF32,
    U8,
    Element,
    alloc,
    barrier_init,
    copy_in,
    data_path,
    dealloc,
    dump,
    fill,
    instruction_descriptor,
    launch,
    module,
    names,
    place,
    tensor,
    wait,
    write,
)  # fmt: skip

import ptxemu

SIZE = 49152


@dataclass
class Case:
    """One MMA of M x N x K (K: 32 bytes) or, with several steps, of a longer K."""

    m: int = 128
    n: int = 64
    group: int = 1
    a: Element = BF16
    b: Element = BF16
    a_mode: str = "128"
    b_mode: str = "128"
    a_mn: bool = False
    b_mn: bool = False
    a_tensor: bool = False
    accumulate: bool = False
    d: int = -1  # of D: by the kind
    lane: int = 0
    steps: int = 1
    scale: int | None = None
    disable: tuple[int, ...] = ()
    flags: dict[str, bool] = field(default_factory=dict)
    collector: str = ""

    def __post_init__(self) -> None:
        if self.d < 0:
            self.d = 2 if self.a.kind == "i8" else 1


def operand_values(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    k = 32 // case.a.size
    return case.a.random(rng, (case.m, k * case.steps)), case.b.random(rng, (case.n, k * case.steps)), k


def images(case: Case, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, list[int], list[int]]:
    """Shared memory of each CTA, and the descriptors of every step of k."""
    image = np.zeros((case.group, SIZE), np.uint8)
    k = a.shape[1]
    rows, columns = case.m // case.group, case.n // case.group
    descriptors: list[list[int]] = []
    start = BASE + IMAGE
    for raw, mode, mn_major, per in ((a, case.a_mode, case.a_mn, rows), (b, case.b_mode, case.b_mn, columns)):
        size = raw.dtype.itemsize
        width = {"none": 16, "32": 32, "64": 64, "128": 128, "128base32": 128}[mode]
        step = 32 // size
        if mn_major or mode == "none":
            operand = place(mode, mn_major, per, k, size, start)
            for c in range(case.group):
                write(image[c], operand, raw[c * per : (c + 1) * per])
            at = [operand.addresses(8, k, size)[0, i * step] if mode == "none" else None for i in range(case.steps)]
            offsets = [
                int(at[i]) - start if at[i] is not None else i * step // (4 if mode == "128base32" else 8) * operand.sbo
                for i in range(case.steps)
            ]
            descriptors.append([replace(operand, start=start + o).descriptor() for o in offsets])
        else:
            # blocks of `width` bytes of k, one after another; inside one a step moves the start address by 32 bytes
            inner = min(k, width // size)
            found = []
            for block in range(k // inner):
                operand = place(mode, False, per, inner, size, start + block * per * width)
                for c in range(case.group):
                    write(image[c], operand, raw[c * per : (c + 1) * per, block * inner : (block + 1) * inner])
                found += [replace(operand, start=operand.start + 32 * i).descriptor() for i in range(inner // step)]
            descriptors.append(found)
        start += -(-max(per, 8) * max(k * size, width) // 1024) * 1024
    assert start - BASE - IMAGE <= SIZE
    return image, descriptors[0], descriptors[1]


def kernel(case: Case, *, columns: int, before_mma: str = "", threads: int = 128, fence: bool = True) -> str:
    group = case.group
    pair = group == 2
    multicast, mask = (".multicast::cluster", ", %h0") if pair else ("", "")
    meet = "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n" if pair else "    bar.sync 0;\n"
    k_words = 8 * case.steps
    body = barrier_init() + alloc(512, group) + copy_in("image", SIZE, threads, fence) + fill("before", columns, 64)
    if case.a_tensor:
        body += fill("a_words", k_words, 0)
    body += meet
    body += f"""
    or.b32 %r30, %thread, %rank;
    setp.ne.u32 %p1, %r30, 0;
    ld.param.u32 %r31, [idesc];
    add.u32 %r32, %tmem, {case.lane << 16 | 64};
    mov.u32 %r33, {1 if case.accumulate else 0};
    setp.ne.u32 %p2, %r33, 0;
    mov.u32 %r34, 0;
    setp.eq.u32 %p3, %r34, 0;
    mov.b16 %h0, 3;
"""
    for i, value in enumerate(case.disable):
        body += f"    mov.b32 %u{i}, {value};\n"
    body += "    @%p1 bra ISSUED;\n" + before_mma
    disable = f", {names('u', len(case.disable))}" if case.disable else ""
    scale = f", {case.scale}" if case.scale is not None else ""
    for i in range(case.steps):
        body += f"    ld.param.u64 %desc0, [a_desc+{8 * i}];\n    ld.param.u64 %desc1, [b_desc+{8 * i}];\n"
        a = f"[%r35+{8 * i}]" if case.a_tensor else "%desc0"
        if case.a_tensor:
            body += f"    add.u32 %r35, %tmem, {case.lane << 16};\n"
        body += (
            f"    tcgen05.mma.cta_group::{group}.kind::{case.a.kind}{case.collector} [%r32], {a}, %desc1, %r31{disable}, "
            f"{'%p2' if i == 0 else '%p3'}{scale};\n"
        )
    body += f"    tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%base]{mask};\nISSUED:\n"
    body += wait("DONE") + dump("after", columns, 64) + (meet if pair else "") + dealloc(512, group)
    return module(
        body,
        f".param .u64 image, .param .u64 before, .param .align 8 .b8 a_desc[{8 * case.steps}], "
        f".param .align 8 .b8 b_desc[{8 * case.steps}], .param .u32 idesc, .param .u64 a_words, .param .u64 after",
    )


def accumulator(case: Case, cells: np.ndarray) -> np.ndarray:
    """Values of D's cells."""
    if case.a.kind == "i8":
        return cells.view(np.int32).astype(np.float64)
    if case.d == 0:
        return (cells & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    return cells.view(np.float32).astype(np.float64)


def execute(
    case: Case, seed: int = 0, edit: Callable[[str], str] | None = None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Run a case; returns tensor memory's cells after it, and what they must be."""
    rng = np.random.default_rng(seed)
    a, b, _ = operand_values(case, rng)
    image, a_desc, b_desc = images(case, a, b)
    cta, lane, column = data_path(case.m, case.n, case.group, case.lane)
    columns = int(column.max()) + 1
    columns = -(-columns // 32) * 32 if columns > 32 else 1 << (columns - 1).bit_length()
    if case.a.kind == "i8":
        before = rng.integers(-1000, 1000, (case.group, 128, columns)).astype(np.int32).view(np.uint32)
    elif case.d == 0:
        before = (
            (rng.integers(-16, 17, (case.group, 128, columns)) / 4).astype(np.float16).view(np.uint16).astype(np.uint32)
        )
    else:
        before = (rng.integers(-64, 65, (case.group, 128, columns)) / 8).astype(np.float32).view(np.uint32)
    words = np.zeros((case.group, 128, 8 * case.steps), np.uint32)
    if case.a_tensor:
        rows = np.ascontiguousarray(a).view(np.uint32)
        for r in range(case.m):
            c, i = divmod(r, case.m // case.group)
            if case.group == 1 and case.m == 64:
                words[c, case.lane + i // 16 * 32 + i % 16] = rows[r]
            elif case.group == 2 and case.m == 128:  # both halves of the data path read their own copy
                words[c, i] = words[c, i + 64] = rows[r]
            else:
                words[c, i] = rows[r]
    idesc = instruction_descriptor(
        case.m, case.n, case.a, case.b, d=case.d, a_mn=case.a_mn, b_mn=case.b_mn, **case.flags
    )
    text = kernel(case, columns=columns)
    if edit is not None:
        changed = edit(text)
        assert changed != text
        text = changed
    after = torch.zeros(case.group, 128, columns, dtype=torch.int32)
    pack = lambda values: b"".join(int(v).to_bytes(8, "little") for v in values)  # noqa: E731
    args = [tensor(image), tensor(before), pack(a_desc), pack(b_desc), idesc, tensor(words), after]
    launch(text, args, pair=case.group == 2, **options)

    product = case.a.values(a) @ case.b.values(b).T
    if case.flags.get("negate_a", False) != case.flags.get("negate_b", False):
        product = -product
    old = accumulator(case, before)[cta, lane, column]
    total = product + (old * 2.0 ** -(case.scale or 0) if case.accumulate else 0)
    want = before.copy()
    if case.a.kind == "i8":
        cells = total.astype(np.int64).astype(np.int32).view(np.uint32)
    elif case.d == 0:
        cells = total.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        cells = total.astype(np.float32).view(np.uint32)
    keep = np.zeros(cells.shape, bool)
    if case.disable:
        keep = np.array(case.disable)[cta * 4 + lane // 32] >> (lane % 32) & 1 == 1
    want[cta[~keep], lane[~keep], column[~keep]] = cells[~keep]
    return after.numpy().view(np.uint32), want


def check(case: Case, **options: Any) -> None:
    got, want = execute(case, **options)
    np.testing.assert_array_equal(got, want)


# ---- results ------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("m", "group", "n"),
    [
        (64, 1, 8),
        (64, 1, 24),
        (64, 1, 256),
        (128, 1, 16),
        (128, 1, 72),
        (128, 1, 256),
        (128, 2, 32),
        (128, 2, 96),
        (128, 2, 256),
        (256, 2, 16),
        (256, 2, 64),
        (256, 2, 256),
    ],
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_shapes(m: int, group: int, n: int, accumulate: bool) -> None:
    check(Case(m=m, n=n, group=group, accumulate=accumulate))


@pytest.mark.parametrize("element", [F16, BF16, E4M3, S8], ids=lambda e: f"{e.kind}-{e.code}")
@pytest.mark.parametrize("b_mn", [False, True], ids=["b-k", "b-mn"])
@pytest.mark.parametrize("a_mn", [False, True], ids=["a-k", "a-mn"])
@pytest.mark.parametrize("b_mode", ["none", "32", "64", "128"])
@pytest.mark.parametrize("a_mode", ["none", "32", "64", "128"])
def test_descriptors(a_mode: str, b_mode: str, a_mn: bool, b_mn: bool, element: Element) -> None:
    check(Case(m=128, n=64, a=element, b=element, a_mode=a_mode, b_mode=b_mode, a_mn=a_mn, b_mn=b_mn))


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("a_mode", "a_mn"), [("none", False), ("32", False), ("64", False), ("128", False), ("128base32", True)]
)
@pytest.mark.parametrize(("b_mode", "b_mn"), [("none", False), ("128", False), ("128base32", True)])
def test_tf32(a_mode: str, a_mn: bool, b_mode: str, b_mn: bool, group: int) -> None:
    check(Case(m=128 * group, n=64, group=group, a=TF32, b=TF32, a_mode=a_mode, b_mode=b_mode, a_mn=a_mn, b_mn=b_mn))


@pytest.mark.parametrize("mn", [False, True], ids=["k", "mn"])
@pytest.mark.parametrize("mode", ["none", "32", "64", "128"])
def test_steps_of_k(mode: str, mn: bool) -> None:
    """Four MMAs of one k after another, as a GEMM's inner loop advances its descriptors."""
    check(Case(m=128, n=64, steps=4, a_mode=mode, b_mode=mode, a_mn=mn, b_mn=mn))


@pytest.mark.parametrize("element", [F16, BF16, TF32, E5M2, U8], ids=lambda e: f"{e.kind}-{e.code}")
@pytest.mark.parametrize(("m", "group", "lane"), [(64, 1, 0), (64, 1, 16), (128, 1, 0), (128, 2, 0), (256, 2, 0)])
def test_a_in_tensor_memory(element: Element, m: int, group: int, lane: int) -> None:
    check(Case(m=m, n=64, group=group, lane=lane, a=element, b=element, a_tensor=True, accumulate=True, steps=2))


def test_layout_f_in_the_other_half_of_the_lanes() -> None:
    check(Case(m=64, n=32, lane=16))


@pytest.mark.parametrize(
    ("a", "b"), [(E4M3, E5M2), (E5M2, E4M3), (S8, U8), (U8, S8), (U8, U8)], ids=lambda e: f"{e.kind}-{e.code}"
)
def test_mixed_types(a: Element, b: Element) -> None:
    check(Case(a=a, b=b, accumulate=True))


@pytest.mark.parametrize("element", [F16, E4M3], ids=lambda e: e.kind)
def test_f16_accumulator(element: Element) -> None:
    check(Case(a=element, b=element, d=0, accumulate=True))


@pytest.mark.parametrize("flags", [{"negate_a": True}, {"negate_b": True}, {"negate_a": True, "negate_b": True}])
def test_negation(flags: dict[str, bool]) -> None:
    check(Case(flags=flags, accumulate=True))


@pytest.mark.parametrize("scale", [0, 3, 15])
@pytest.mark.parametrize("element", [F16, TF32], ids=lambda e: e.kind)
def test_scaled_input(element: Element, scale: int) -> None:
    check(Case(a=element, b=element, scale=scale, accumulate=True))


def test_disabled_lanes() -> None:
    check(Case(disable=(0x1, 0xF0F0F0F0, 0, 0x80000001)))
    check(Case(m=256, group=2, disable=(0x1, 0xF0F0F0F0, 0, 0x80000001, 0x2, 0, 0xFFFFFFFF, 0x7)))


@pytest.mark.parametrize("use", ["fill", "use", "lastuse", "discard"])
def test_collector_usage_changes_nothing(use: str) -> None:
    check(Case(collector=f".collector::a::{use}"))


def test_integers_saturate() -> None:
    """Accumulators near the limits: clamped with the saturate flag, else wrapped."""
    for saturate in (False, True):
        case = Case(a=U8, b=U8, d=2, accumulate=True, flags={"saturate": saturate})
        rng = np.random.default_rng(0)
        a, b, _ = operand_values(case, rng)
        image, a_desc, b_desc = images(case, a, b)
        before = np.full((1, 128, 64), 2**31 - 1000, np.int64).astype(np.int32)
        after = torch.zeros(1, 128, 64, dtype=torch.int32)
        idesc = instruction_descriptor(128, 64, U8, U8, d=2, saturate=saturate)
        args = [tensor(image), tensor(before), a_desc[0].to_bytes(8, "little"), b_desc[0].to_bytes(8, "little"), idesc]
        launch(kernel(case, columns=64), [*args, torch.zeros(1, dtype=torch.int32), after])
        total = a.astype(np.int64) @ b.astype(np.int64).T + 2**31 - 1000
        want = np.clip(total, -(2**31), 2**31 - 1) if saturate else (total + 2**31) % 2**32 - 2**31
        np.testing.assert_array_equal(after.numpy()[0], want)


@pytest.mark.parametrize(
    "options", [{"eager": True}, {"shuffle": True, "seed": 3}, {"shuffle": True, "seed": 4, "quantum": 7}]
)
def test_any_schedule(options: dict[str, Any]) -> None:
    check(Case(steps=4, accumulate=True), **options)
    check(Case(m=256, group=2, steps=2), **options)


def test_rounding_stays_near_exact() -> None:
    """Values that are not exact in sums: within the error of float sums of 64 products."""
    case = Case(steps=4)
    rng = np.random.default_rng(1)
    random = lambda shape: BF16.encode(torch.from_numpy(rng.standard_normal(shape).astype(np.float32)))  # noqa: E731
    a, b = random((128, 64)), random((64, 64))
    image, a_desc, b_desc = images(case, a, b)
    after = torch.zeros(1, 128, 64, dtype=torch.int32)
    pack = lambda values: b"".join(int(v).to_bytes(8, "little") for v in values)  # noqa: E731
    args = [tensor(image), torch.zeros(1, 128, 64, dtype=torch.int32), pack(a_desc), pack(b_desc)]
    launch(
        kernel(case, columns=64),
        [*args, instruction_descriptor(128, 64, BF16, BF16), torch.zeros(1, dtype=torch.int32), after],
    )
    exact = BF16.values(a) @ BF16.values(b).T
    bound = 64 * 2.0**-22 * (np.abs(BF16.values(a)) @ np.abs(BF16.values(b)).T)
    assert (np.abs(after.numpy().view(np.float32)[0] - exact) <= bound).all()


# ---- faults -------------------------------------------------------------------------------------------------------------------------
def fails(kind: type[Exception], pattern: str, case: Case, old: str, new: str) -> None:
    with pytest.raises(kind, match=pattern):
        execute(case, edit=lambda text: text.replace(old, new))


FIRST_WARP = "    setp.ne.u32 %p8, %warp, 0;\n    @%p8 bra DONE;\n"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%base];"


def test_missing_commit() -> None:
    fails(ptxemu.Deadlock, "the mbarrier at shared offset", Case(), COMMIT, "")


def test_plain_arrival_in_place_of_the_commit() -> None:
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%base];"
    fails(ptxemu.RaceFault, "that a tcgen05.mma in flight writes", Case(), COMMIT, arrive)


def test_commit_before_the_mma() -> None:
    with pytest.raises(ptxemu.RaceFault, match=r"in flight writes|not ordered after the tcgen05.mma"):
        execute(
            Case(), edit=lambda t: t.replace(COMMIT, "").replace("    tcgen05.mma", f"    {COMMIT}\n    tcgen05.mma")
        )


def test_commit_of_another_warp_does_not_cover_the_mma() -> None:
    """Warp 1 commits what warp 0 issued."""

    def edit(text: str) -> str:
        return text.replace(COMMIT, "").replace(
            "ISSUED:",
            f"ISSUED:\n    bar.sync 1;\n    setp.ne.u32 %p9, %thread, 32;\n    @%p9 bra OTHER;\n    {COMMIT}\nOTHER:",
        )

    with pytest.raises(ptxemu.RaceFault, match=r"missing tcgen05.commit and mbarrier wait"):
        execute(Case(), edit=lambda t: edit(t).replace("bar.sync 1;", ""))


def test_no_wait_for_the_mbarrier() -> None:
    poll = "mbarrier.try_wait.parity.shared::cta.b64 %p17, [%base], 0;\n    @!%p17 bra DONE;"
    fails(ptxemu.RaceFault, r"in flight writes|not ordered after the tcgen05.ld", Case(), poll, "")


def test_fence_after_a_relaxed_wait() -> None:
    def relaxed(text: str) -> str:
        return text.replace("try_wait.parity.shared::cta", "try_wait.parity.relaxed.cluster.shared::cta")

    execute(Case(), edit=relaxed)
    with pytest.raises(ptxemu.RaceFault, match=r"not ordered after the tcgen05.mma"):
        execute(Case(), edit=lambda t: relaxed(t).replace("tcgen05.fence::after_thread_sync;", ""))


def test_issued_by_a_whole_warp() -> None:
    fails(
        ptxemu.TensorFault,
        "tcgen05.mma issued by 32 threads",
        Case(),
        "or.b32 %r30, %thread, %rank;",
        "or.b32 %r30, %warp, %rank;",
    )


@pytest.mark.parametrize("what", ["commit", "cp", "shift"])
def test_others_issued_by_a_whole_warp(what: str) -> None:
    line = {
        "commit": COMMIT,
        "cp": "tcgen05.cp.cta_group::1.128x128b [%tmem], %desc1;",
        "shift": "tcgen05.shift.cta_group::1.down [%tmem];",
    }[what]
    body = barrier_init() + alloc(32) + f"    mov.u64 %desc1, 0;\n    {line}\n"
    with pytest.raises(ptxemu.TensorFault, match=f"tcgen05.{what} issued by 32 threads"):
        launch(module(body, ".param .u64 out"), [torch.zeros(1, dtype=torch.int32)])


def test_missing_proxy_fence() -> None:
    fails(ptxemu.ProxyFault, "operand A by warp 0", Case(), "fence.proxy.async.shared::cta;", "")


def test_operand_overwritten_in_flight() -> None:
    store = f"    st.shared.b32 [%base+{IMAGE}], %thread;\n"
    fails(ptxemu.RaceFault, "asynchronous read of it is in flight", Case(), "ISSUED:", f"{store}ISSUED:")


def test_store_to_the_accumulator_in_flight() -> None:
    line = FIRST_WARP + "    tcgen05.st.sync.aligned.32x32b.x1.b32 [%quad+64], {%thread};\n"
    fails(ptxemu.RaceFault, "that a tcgen05.mma in flight writes", Case(), "\nDONE:", "\n" + line + "DONE:")


def test_store_to_operand_a_in_flight() -> None:
    line = FIRST_WARP + "    tcgen05.st.sync.aligned.32x32b.x1.b32 [%quad], {%thread};\n"
    fails(ptxemu.RaceFault, "in flight reads as operand A", Case(a_tensor=True), "\nDONE:", "\n" + line + "DONE:")


def test_operand_a_without_waiting_for_its_store() -> None:
    def edit(text: str) -> str:
        head, mark, tail = text.rpartition("    tcgen05.wait::st.sync.aligned;\n")
        assert mark
        return head + tail

    with pytest.raises(ptxemu.RaceFault, match=r"missing tcgen05.wait::st"):
        execute(Case(a_tensor=True), edit=edit)


def test_mma_before_the_other_warps_have_stored() -> None:
    def edit(text: str) -> str:
        head, _, tail = text.partition("    or.b32 %r30, %thread, %rank;")
        for _ in range(2):
            head = head[: head.rindex("    bar.sync 0;\n")]
        return head + "    or.b32 %r30, %thread, %rank;" + tail

    with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault), match=r"not ordered after the tcgen05.st|uninitialised"):
        execute(Case(accumulate=True), edit=edit)


def test_mma_over_cells_that_are_still_read() -> None:
    """A second MMA right after the loads of the first's result."""
    again = """
    setp.ne.u32 %p5, %thread, 0;
    @%p5 bra AGAIN;
    tcgen05.mma.cta_group::1.kind::f16 [%r32], %desc0, %desc1, %r31, %p2;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%base];
AGAIN:
"""
    last = "    bar.sync 0;\n    setp.ne.u32 %p19, %warp, 0;\n    @%p19 bra FREED;"

    def edit(text: str, barrier: str) -> str:
        head, mark, tail = text.rpartition(last)
        assert mark
        return head + barrier + again + wait("MORE", 1) + mark + tail

    execute(Case(), edit=lambda t: edit(t, "    bar.sync 0;\n"))
    with pytest.raises(
        ptxemu.RaceFault, match=r"not ordered after the tcgen05.ld by warp [123]|that a tcgen05.mma in flight writes"
    ):
        execute(Case(), edit=lambda t: edit(t, ""))

    def forget(text: str) -> str:
        unwaited = edit(text, "    bar.sync 0;\n").replace("tcgen05.wait::ld.sync.aligned;", "")
        return re.sub(r"st\.global\.b32 \[%at\+\d+\], %v\d+;", "", unwaited)

    with pytest.raises(ptxemu.RaceFault, match=r"missing tcgen05.wait::ld"):
        execute(Case(), edit=forget)


def test_accumulating_into_nothing() -> None:
    def forget(text: str) -> str:
        return re.sub(r"tcgen05\.st[^;]*;", "", text, count=1)

    execute(Case(), edit=forget)
    with pytest.raises(
        ptxemu.MemoryFault, match="a value stored to global memory depends on uninitialised tensor memory"
    ):
        execute(Case(accumulate=True), edit=forget)


def test_accumulator_outside_the_allocation() -> None:
    fails(ptxemu.TensorFault, r"columns \[464, 528\) outside", Case(), "[%r32]", "[%r32+400]")


def test_lanes_that_a_layout_does_not_allow() -> None:
    with pytest.raises(ptxemu.TensorFault, match=r"M 128 with .cta_group::1 allows lane 0"):
        execute(Case(), edit=lambda t: t.replace("add.u32 %r32, %tmem, 64;", f"add.u32 %r32, %tmem, {16 << 16 | 64};"))
    with pytest.raises(ptxemu.TensorFault, match="must have the same lane"):
        execute(
            Case(m=64, a_tensor=True),
            edit=lambda t: t.replace("add.u32 %r32, %tmem, 64;", f"add.u32 %r32, %tmem, {16 << 16 | 64};"),
        )


@pytest.mark.parametrize(
    ("m", "n", "group", "element"),
    [
        (64, 4, 1, BF16),
        (128, 264, 1, BF16),
        (32, 64, 1, BF16),
        (256, 64, 1, BF16),
        (64, 64, 2, BF16),
        (128, 24, 2, BF16),
        (128, 40, 1, S8),
        (128, 48, 2, S8),
    ],
)
def test_shapes_that_do_not_exist(m: int, n: int, group: int, element: Element) -> None:
    case = Case(group=group, m=128 * group, a=element, b=element)
    wrong = instruction_descriptor(m, n, element, element, d=case.d)
    with pytest.raises(
        ptxemu.TensorFault, match=rf"M {m}, N {n >> 3 << 3 & 511} is not a shape of .cta_group::{group}"
    ):
        execute(case, edit=lambda t: t.replace("ld.param.u32 %r31, [idesc];", f"mov.u32 %r31, {wrong};"))


@pytest.mark.parametrize(
    ("bits", "kind", "pattern"),
    [
        (1 << 2, ptxemu.TensorFault, "sparse"),
        (1 << 6, ptxemu.TensorFault, "reserved bits"),
        (1 << 30, ptxemu.TensorFault, "reserved bits"),
        (1 << 3, ptxemu.TensorFault, "types .* or flags"),
        (2 << 4, ptxemu.TensorFault, "types .* or flags"),
        (2 << 7, ptxemu.TensorFault, "types .* or flags"),
    ],
)
def test_instruction_descriptor_faults(bits: int, kind: type[Exception], pattern: str) -> None:
    fails(
        kind,
        pattern,
        Case(),
        "ld.param.u32 %r31, [idesc];",
        f"ld.param.u32 %r31, [idesc];\n    or.b32 %r31, %r31, {bits};",
    )


@pytest.mark.parametrize(
    ("bits", "kind", "pattern"),
    [
        (1 << 47, ptxemu.TensorFault, "bits 46 to 48"),
        (1 << 53, ptxemu.TensorFault, "reserved bits 53 to 60"),
        (1 << 52, ptxemu.Unsupported, "absolute leading-dimension"),
        (1 << 61, ptxemu.TensorFault, "swizzle mode 3"),
        (0x3000, ptxemu.MemoryFault, "covers shared offset"),
    ],
)
def test_shared_memory_descriptor_faults(bits: int, kind: type[Exception], pattern: str) -> None:
    fails(kind, pattern, Case(), "    tcgen05.mma", f"    or.b64 %desc0, %desc0, {bits};\n    tcgen05.mma")


def test_uninitialised_operand() -> None:
    fails(
        ptxemu.MemoryFault,
        "a value stored to global memory depends on uninitialised tensor memory",
        Case(),
        "    tcgen05.mma",
        f"    add.u64 %desc1, %desc1, {(SIZE - 16384) // 16};\n    tcgen05.mma",
    )


def test_transposed_tf32_needs_its_own_swizzle() -> None:
    with pytest.raises(ptxemu.TensorFault, match="32-byte atomicity"):
        execute(Case(a=TF32, b=TF32, a_mode="128", a_mn=True))
    with pytest.raises(ptxemu.TensorFault, match="not have 128-byte swizzling with 32-byte atomicity"):
        execute(Case(a_mode="128base32", a_mn=True))


def test_commit_to_an_mbarrier_that_does_not_exist() -> None:
    fails(
        ptxemu.BarrierFault,
        "no mbarrier is initialised at shared offset 16",
        Case(),
        ".b64 [%base];\nISSUED",
        ".b64 [%base+16];\nISSUED",
    )


def test_multicast_outside_the_cluster() -> None:
    fails(
        ptxemu.TensorFault,
        "CTA mask 0xc in a cluster of 2",
        Case(m=256, group=2),
        "mov.b16 %h0, 3;",
        "mov.b16 %h0, 12;",
    )


def test_pair_without_multicast_leaves_the_peer_waiting() -> None:
    fails(
        ptxemu.Deadlock,
        "CTA 1 warp 0: waits for the mbarrier",
        Case(m=256, group=2),
        ".shared::cluster.multicast::cluster.b64 [%base], %h0;",
        ".shared::cluster.b64 [%base];",
    )
