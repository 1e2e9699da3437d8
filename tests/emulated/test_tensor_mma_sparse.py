"""tcgen05.mma.sp against numpy: kinds, data path layouts, metadata in tensor memory; and its faults."""

from __future__ import annotations

import pytest
from tensor_mma_ptx import META, Case, Narrow, check, execute, narrow, operands, store_in_flight
from tensor_ptx import BF16, F16, S8, TF32, U8, Element

import ptxemu

NARROW = narrow("f8f6f4")
KINDS = {"f16": F16, "bf16": BF16, "tf32": TF32, "u8": U8, "s8": S8, **NARROW}


def case_of(name: str, **options: object) -> Case:
    element: Element | Narrow = KINDS[name]
    return Case(**({"a": element, "b": element, "sparse": True} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("a_tensor", [False, True], ids=["shared", "tensor"])
@pytest.mark.parametrize(
    ("m", "group", "lane"), [(64, 1, 0), (64, 1, 16), (128, 1, 0), (128, 2, 0), (128, 2, 16), (256, 2, 0)]
)
@pytest.mark.parametrize("name", ["f16", "tf32", "e4m3", "s8"])
def test_layouts(name: str, m: int, group: int, lane: int, a_tensor: bool) -> None:
    """Layouts F (half of the lanes), D, C (half of them, of a pair) and A."""
    check(case_of(name, m=m, group=group, lane=lane, a_tensor=a_tensor, n=64))


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    check(case_of(name, n=128, accumulate=False))


@pytest.mark.parametrize("selector", [0, 1])
@pytest.mark.parametrize("name", ["bf16", "tf32"])
def test_sparsity_selector(name: str, selector: int) -> None:
    check(case_of(name, selector=selector))
    check(case_of(name, selector=selector, m=64, lane=16))


@pytest.mark.parametrize("mode", ["none", "64", "128"])
@pytest.mark.parametrize("name", ["f16", "u8"])
def test_shared_layouts_along_k(name: str, mode: str) -> None:
    check(case_of(name, mode=mode))


@pytest.mark.parametrize("mode", ["none", "32", "64", "128"])
@pytest.mark.parametrize("name", ["f16", "e5m2", "e2m1", "e2m3"])
def test_transposed(name: str, mode: str) -> None:
    check(case_of(name, mode=mode, a_mn=True, b_mn=True))


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e2m1"), ("e3m2", "e5m2"), ("e2m1", "e2m3")])
def test_mixed_types(a: str, b: str) -> None:
    check(Case(a=NARROW[a], b=NARROW[b], sparse=True))


def test_accumulators() -> None:
    check(case_of("f16", d=0))
    check(case_of("f16", scale=3))
    check(case_of("tf32", negate=True))


@pytest.mark.parametrize("options", [{"eager": True}, {"shuffle": True, "seed": 3, "quantum": 7}])
def test_any_schedule(options: dict[str, object]) -> None:
    check(case_of("f16"), **options)


# ---- faults -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "shift"), [("f16", 4), ("tf32", 4), ("s8", 8)])
def test_metadata_without_meaning(name: str, shift: int) -> None:
    case = case_of(name)
    on = operands(case)
    on.before[0, 5, META] &= 0xFFFFFFFF - (0xF << shift)
    with pytest.raises(ptxemu.TensorFault, match=r"metadata 0 of the row at lane 5, elements .* means nothing"):
        execute(case, on)


@pytest.mark.parametrize(
    ("case", "column", "pattern"),
    [
        (case_of("f16"), META + 1, "it starts at an even one"),
        (case_of("s8"), 10, "D and an operand overlap"),
        (case_of("s8"), 511, "even one|outside"),
    ],
)
def test_place_of_the_metadata(case: Case, column: int, pattern: str) -> None:
    on = operands(case)
    case.columns["meta"] = column
    with pytest.raises(ptxemu.TensorFault, match=pattern):
        execute(case, on)


def test_lane_of_the_metadata() -> None:
    case = case_of("f16", m=64, lane=16)
    on = operands(case)
    case.columns["meta"] = META - (16 << 16)
    with pytest.raises(ptxemu.TensorFault, match="metadata at lane 0 and D at lane 16"):
        execute(case, on)


def test_undefined_metadata() -> None:
    case = case_of("f16")
    on = operands(case)
    case.columns["meta"] = 400
    with pytest.raises(
        ptxemu.MemoryFault, match=r"metadata of tcgen05.mma.sp .* uninitialised tensor memory at lane 0, column 400"
    ):
        execute(case, on)


def test_metadata_overwritten_in_flight() -> None:
    case = case_of("f16")
    on = operands(case)

    with pytest.raises(ptxemu.RaceFault, match="metadata or scale factors"):
        execute(case, on, edit=lambda text: store_in_flight(text, META, 1))


@pytest.mark.parametrize(
    ("case", "kind", "pattern"),
    [
        (case_of("f16", extra_bits=1 << 2), ptxemu.TensorFault, "asks for a dense A, in tcgen05.mma.sp"),
        (case_of("s8", selector=1), ptxemu.TensorFault, "selector of kind::i8 must be 0"),
        (case_of("f16", extra_bits=2), ptxemu.Unsupported, "sparsity selector 2"),
        (case_of("f16", mode="32"), ptxemu.Unsupported, "32-byte swizzling, in whose rows 64 bytes"),
    ],
)
def test_descriptor_faults(case: Case, kind: type[Exception], pattern: str) -> None:
    with pytest.raises(kind, match=pattern):
        execute(case, operands(case))
