"""tcgen05.mma.ws against numpy: data path layouts D, E and G, every kind, a sparse A, the zero-column mask; and its faults."""

from __future__ import annotations

import numpy as np
import pytest
from tensor_mma_ptx import Case, D, Narrow, check, execute, narrow, operands, store_in_flight
from tensor_ptx import BF16, F16, S8, TF32, U8, Element

import ptxemu

NARROW = narrow("f8f6f4")
KINDS = {"f16": F16, "bf16": BF16, "tf32": TF32, "u8": U8, "s8": S8, **NARROW}


def case_of(name: str, **options: object) -> Case:
    element: Element | Narrow = KINDS[name]
    return Case(**({"a": element, "b": element, "ws": True} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("a_tensor", [False, True], ids=["shared", "tensor"])
@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("m", [32, 64, 128])
def test_layouts(m: int, n: int, a_tensor: bool) -> None:
    check(case_of("f16", m=m, n=n, a_tensor=a_tensor))


@pytest.mark.parametrize("m", [32, 64, 128])
@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str, m: int) -> None:
    check(case_of(name, m=m, a_tensor=m == 64))


@pytest.mark.parametrize("a_tensor", [False, True], ids=["shared", "tensor"])
@pytest.mark.parametrize("m", [32, 64, 128])
@pytest.mark.parametrize("name", ["f16", "tf32", "s8", "e4m3"])
def test_sparse(name: str, m: int, a_tensor: bool) -> None:
    check(case_of(name, m=m, n=128, sparse=True, a_tensor=a_tensor))


@pytest.mark.parametrize("mode", ["none", "128"])
@pytest.mark.parametrize("name", ["bf16", "u8"])
def test_transposed(name: str, mode: str) -> None:
    check(case_of(name, mode=mode, a_mn=True, b_mn=True, accumulate=False))


@pytest.mark.parametrize("use", ["fill", "use", "lastuse", "discard"])
@pytest.mark.parametrize("buffer", range(4))
def test_collector_usage_changes_nothing(buffer: int, use: str) -> None:
    check(case_of("f16", collector=f".collector::b{buffer}::{use}"))


# ---- the zero-column mask -----------------------------------------------------------------------------------------------------------
def descriptor(
    starts: tuple[int, ...], firsts: tuple[int, ...], skip: int, use: int, shift: int = 0, on: int = 1
) -> int:
    """A zero-column mask descriptor; starts and firsts: of mask0, mask1, ...."""
    bits = sum(s << 8 * i for i, s in enumerate(starts)) | sum(f << 32 + i for i, f in enumerate(firsts))
    return bits | on << 39 | skip << 40 | use << 48 | shift << 56


def columns(text: str, width: int) -> list[bool]:
    """A sub-mask as the ISA writes it, the lowest column last; what is written repeats from the left."""
    digits = text.replace(" ", "")[::-1]
    period = 7
    while len(digits) < width:
        digits += digits[-period]
    return [c == "1" for c in digits[:width]]


EXAMPLES = [
    (128, descriptor((0,), (0,), 4, 3, on=0), ["0000 0000"], 0),
    (128, descriptor((0,), (0,), 2, 3), ["111 0000 111 0000"], 0),
    (64, descriptor((0, 0), (1, 0), 2, 3), ["111 0000 111 0000 111", "0000 111 0000 111 0000"], 0),
    (
        32,
        descriptor((0, 1, 2, 1), (1, 1, 0, 0), 2, 3, shift=2),
        ["0000 111 0000 111", "0000 111 0000 11", "111 0000 111 00", "111 0000 111 000"],
        2,
    ),
]
"""The examples of the PTX ISA's section "Zero-Column Mask Descriptor": M, descriptor, sub-masks, shift."""


@pytest.mark.parametrize("b_mn", [False, True], ids=["k", "n"])
@pytest.mark.parametrize(("m", "mask", "parts", "shift"), EXAMPLES, ids=range(1, 5))
def test_zero_columns(m: int, mask: int, parts: list[str], shift: int, b_mn: bool) -> None:
    case = case_of("f16", m=m, n=128, mask=mask, max_shift=1 if shift else 0, b_mn=b_mn)
    zero = np.array([c for part in parts for c in columns(part, 128 // len(parts))])
    on = operands(case, zero, shift)
    np.testing.assert_array_equal(execute(case, on), on.want)


def test_zero_columns_need_no_values() -> None:
    """Columns that count as zeros may be undefined, others not."""
    mask = descriptor((64,), (1,), 127, 255)  # zeros in columns 0 to 63
    for used, n in ((False, 64), (True, 128)):
        case = case_of("f16", n=n, mask=mask, accumulate=False)
        zero = np.arange(n) < 64
        on = operands(case, zero)
        first = on.b_desc & 0x3FFF
        on.b_desc += 0x3000 - first  # where nobody has written
        if not used:
            np.testing.assert_array_equal(execute(case, on, shared=212992), on.want)
            continue
        with pytest.raises(ptxemu.MemoryFault, match="stored to global memory depends on uninitialised tensor memory"):
            execute(case, on, shared=212992)


# ---- faults -------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        (case_of("f16", n=96), "M 128, N 96 is not a shape"),
        (case_of("f16", m=256), "M 256, N 64 is not a shape"),
        (case_of("f16", n=256, sparse=True), r"N 64, 128 with a sparse A\)"),
        (case_of("f16", m=64, lane=16), "allows lane 0"),
        (case_of("f16", extra_bits=1 << 29), "reserved bits"),
        (case_of("f16", mask=1 << 62), "zero-column mask descriptor .* reserved bits"),
        (case_of("f16", mask=descriptor((0,), (0,), 1, 1, shift=9), max_shift=1), "shifts by 9 columns; .* allows 8"),
        (case_of("f16", m=32, mask=descriptor((0,), (0,), 1, 1, shift=20), max_shift=3), "M 32 up to 16"),
    ],
)
def test_faults(case: Case, pattern: str) -> None:
    on = operands(Case(a=case.a, b=case.b, ws=True))
    with pytest.raises(ptxemu.TensorFault, match=pattern):
        execute(case, on)


def test_accumulators_in_all_lanes() -> None:
    """Layout G's accumulators lie in all lanes: a write to one that warp 3 holds is seen."""
    case = case_of("f16", m=32)
    on = operands(case)

    with pytest.raises(ptxemu.RaceFault, match="lane 96, column 0, that a tcgen05"):
        execute(case, on, edit=lambda text: store_in_flight(text, D, 3))
