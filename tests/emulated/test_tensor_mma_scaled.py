"""Block-scaled tcgen05.mma against numpy: kinds, sizes of scale vectors, IDs, layouts; scale factors by tcgen05.cp; and its faults."""

from __future__ import annotations

import numpy as np
import pytest
from tensor_mma_ptx import (
    COLUMNS,
    F4,
    NVF4,
    SCALES_A,
    SCALES_B,
    Case,
    Narrow,
    check,
    execute,
    narrow,
    operands,
    store_in_flight,
)

import ptxemu

MX = narrow("mxf8f6f4")
FORMS = [
    *[(MX[name], 1, size, False) for name, size in zip(MX, ("", ".scale_vec::1X", ".block32", "", ""), strict=True)],
    *[(F4, 2, size, False) for size in ("", ".scale_vec::2X", ".block32")],
    *[(NVF4, blocks, size, False) for blocks, size in ((2, ".scale_vec::2X"), (2, ".block32"), (4, ".scale_vec::4X"))],
    *[(NVF4, 4, size, True) for size in (".scale_vec::4X", ".block16")],
]
"""Element, scale factors a row, how the instruction says so, UE4M3 scale factors."""


def case_of(form: tuple[Narrow, int, str, bool], **options: object) -> Case:
    element, blocks, size, e4m3 = form
    return Case(**({"a": element, "b": element, "blocks": blocks, "size": size, "e4m3": e4m3} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f[0].kind}-{f[0].code}-{f[2]}-{f[3]}")
def test_forms(form: tuple[Narrow, int, str, bool], is_sparse: bool) -> None:
    check(case_of(form, n=72, sparse=is_sparse))


@pytest.mark.parametrize("a_tensor", [False, True], ids=["shared", "tensor"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize(("m", "group", "n"), [(128, 1, 8), (128, 1, 256), (128, 2, 96), (256, 2, 256), (256, 2, 48)])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[4], FORMS[5], FORMS[11]], ids=lambda f: f"{f[0].kind}-{f[0].code}")
def test_layouts(
    form: tuple[Narrow, int, str, bool], m: int, group: int, n: int, is_sparse: bool, a_tensor: bool
) -> None:
    case = case_of(form, m=m, group=group, n=n, sparse=is_sparse, a_tensor=a_tensor)
    if is_sparse and (m, group) == (128, 2):
        with pytest.raises(ptxemu.TensorFault, match=r"M 128, N 96 is not a shape of .cta_group::2 \(M 256"):
            execute(case, operands(case))
        return
    check(case)


@pytest.mark.parametrize("ids", [(0, 1), (1, 3), (3, 0), (2, 2)])
def test_ids_of_one_factor(ids: tuple[int, int]) -> None:
    check(case_of(FORMS[0], ids=ids, n=160))


@pytest.mark.parametrize("ids", [(0, 2), (2, 0), (2, 2)])
@pytest.mark.parametrize("form", [FORMS[5], FORMS[8]], ids=lambda f: f[0].kind)
def test_ids_of_two_factors(form: tuple[Narrow, int, str, bool], ids: tuple[int, int]) -> None:
    check(case_of(form, ids=ids))


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e2m1"), ("e2m3", "e5m2"), ("e3m2", "e2m3")])
def test_mixed_types(a: str, b: str) -> None:
    check(Case(a=MX[a], b=MX[b], blocks=1))
    check(Case(a=MX[a], b=MX[b], blocks=1, a_mn=True, b_mn=True))


def test_signs_collectors_and_overwriting() -> None:
    check(case_of(FORMS[0], negate=True, accumulate=False))
    check(case_of(FORMS[11], collector=".collector::a::fill", accumulate=False))


@pytest.mark.parametrize("options", [{"eager": True}, {"shuffle": True, "seed": 3, "quantum": 7}])
def test_any_schedule(options: dict[str, object]) -> None:
    check(case_of(FORMS[5]), **options)


def test_addresses_with_the_id_in_their_highest_bits() -> None:
    """As compilers form them: the descriptor has the ID again."""
    case = case_of(FORMS[0], ids=(1, 3))
    on = operands(case)
    case.columns |= {"scales_a": SCALES_A | 1 << 30, "scales_b": SCALES_B | 3 << 30}
    np.testing.assert_array_equal(execute(case, on), on.want)


def test_special_scale_factors() -> None:
    """NaN makes the row's or column's sums NaN; the smallest and the greatest power of two cancel."""
    case = case_of(FORMS[0], n=32, accumulate=False)
    on = operands(case)
    on.before[0, 3::32, SCALES_A] = 0xFF
    plain = operands(case)
    got = execute(case, on).view(np.float32)
    assert np.isnan(got[0, 3, :32]).all()
    np.testing.assert_array_equal(got[0, 4, :32], plain.want.view(np.float32)[0, 4, :32])
    on.before[0, :, SCALES_A : SCALES_A + 4] = 0xFE
    on.before[0, :, SCALES_B] = 0
    got = execute(case, on).view(np.float32)
    reference = operands(case_of(FORMS[0], n=32, accumulate=False))
    reference.before[0, :, SCALES_A : SCALES_A + 4] = reference.before[0, :, SCALES_B : SCALES_B + 1] = 127
    unit = execute(case, reference).view(np.float32)
    np.testing.assert_array_equal(got[0, :, :32], unit[0, :, :32])


def test_scale_factors_by_copies() -> None:
    """tcgen05.cp brings them right before the MMA that reads them: the two are executed in order."""
    case = case_of(FORMS[5], n=128)
    on = operands(case)
    factors = on.before[0, :32, SCALES_A : SCALES_A + 4].copy(), on.before[0, :32, SCALES_B : SCALES_B + 4].copy()
    at = 40960
    for i, words in enumerate(factors):
        on.image[0, at + 512 * i : at + 512 * i + 512] = words.view(np.uint8).reshape(-1)
    on.before[0, :, SCALES_A : SCALES_A + 4] = on.before[0, :, SCALES_B : SCALES_B + 4] = 0
    descriptors = [
        ((1024 + 1024 + at + 512 * i) >> 4) | (128 >> 4) << 16 | (128 >> 4) << 32 | 1 << 46 for i in range(2)
    ]
    before = "".join(
        f"mov.u64 %desc3, {d}; tcgen05.cp.cta_group::1.32x128b.warpx4 [%r{r}], %desc3;\n"
        for d, r in zip(descriptors, (35, 36), strict=True)
    )
    np.testing.assert_array_equal(execute(case, on, before_mma=before), on.want)


# ---- faults -------------------------------------------------------------------------------------------------------------------------
def test_copies_of_scale_factors_must_agree() -> None:
    case = case_of(FORMS[5], n=128)
    on = operands(case)
    on.before[0, 64 + 7, SCALES_B + 2] ^= 1
    with pytest.raises(
        ptxemu.TensorFault, match="scale factors of column 71 differ between tensor memory lanes 7 and 71"
    ):
        execute(case, on)


def test_undefined_scale_factors() -> None:
    case = case_of(FORMS[0])
    on = operands(case)
    case.columns["scales_b"] = 400
    with pytest.raises(ptxemu.MemoryFault, match="stored to global memory depends on uninitialised tensor memory"):
        execute(case, on)


def test_scale_factors_overwritten_in_flight() -> None:
    case = case_of(FORMS[0])
    on = operands(case)

    with pytest.raises(ptxemu.RaceFault, match="metadata or scale factors"):
        execute(case, on, edit=lambda text: store_in_flight(text, SCALES_B, 2))


@pytest.mark.parametrize(
    ("case", "kind", "pattern"),
    [
        (case_of(FORMS[0], m=64), ptxemu.TensorFault, "M 0, N 64 is not a shape"),
        (case_of(FORMS[0], extra_bits=1 << 24), ptxemu.TensorFault, "reserved bits set .*24 to 26"),
        (case_of(FORMS[0], e4m3=True), ptxemu.TensorFault, "not allowed for kind::mxf8f6f4"),
        (case_of(FORMS[5], e4m3=True), ptxemu.TensorFault, "not allowed for kind::mxf4"),
        (case_of(FORMS[8], e4m3=True), ptxemu.TensorFault, "not allowed for kind::mxf4nvf4"),
        (
            case_of(FORMS[5], ids=(1, 0)),
            ptxemu.TensorFault,
            "scale factor IDs 1 of A, 0 of B; with 2 factors a row they are 0 or 2",
        ),
        (case_of(FORMS[10], ids=(0, 2)), ptxemu.TensorFault, "with 4 factors a row they are 0$|they are 0"),
        (case_of(FORMS[5], extra_bits=1 << 31), ptxemu.Unsupported, "K 96"),
        (case_of(FORMS[5], extra_bits=1 << 15), ptxemu.TensorFault, "not allowed for kind::mxf4"),
        (case_of(FORMS[0], columns={"scales_a": SCALES_A + (32 << 16)}), ptxemu.TensorFault, "they start at lane 0"),
        (case_of(FORMS[0], columns={"scales_a": 510}), ptxemu.TensorFault, "outside"),
        (case_of(FORMS[0], columns={"scales_b": 40}), ptxemu.TensorFault, "D and an operand overlap"),
    ],
)
def test_faults(case: Case, kind: type[Exception], pattern: str) -> None:
    on = operands(case_of(FORMS[0] if case.kind == "mxf8f6f4" else FORMS[5]))
    with pytest.raises(kind, match=pattern):
        execute(case, on)


@pytest.mark.parametrize(
    ("old", "new", "pattern"),
    [
        (".block_scale", "", "tcgen05.mma.block_scale and its size"),
        (".block_scale", ".block_scale.scale_vec::2X", "kind::mxf8f6f4 has no .scale_vec::2X"),
        ("kind::mxf8f6f4", "kind::mxf4nvf4", "kind::mxf4nvf4 needs a size"),
        ("kind::mxf8f6f4", "kind::f8f6f4", "block_scale and its size"),
        ("tcgen05.mma.cta", "tcgen05.mma.ws.cta", "is not block-scaled"),
        ("[%r36], ", "", "operands"),
        (".kind::mxf8f6f4", ".kind::mxf8f6f4.ashift", "ashift"),
    ],
)
def test_forms_that_do_not_exist(old: str, new: str, pattern: str) -> None:
    case = case_of(FORMS[0])
    with pytest.raises(ptxemu.Unsupported, match=pattern):
        execute(case, operands(case), edit=lambda text: text.replace(old, new))


def test_room() -> None:
    """The regions of the tests' tensor memory do not meet."""
    assert SCALES_A + 8 <= SCALES_B <= COLUMNS - 8
