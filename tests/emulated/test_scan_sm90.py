"""The Hopper scan: every variant against float64, under many schedules, and called as on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import kernels
import pytest

import ptxemu

WITHIN = 4e-3
SCHEDULES = [dict(seed=s, shuffle=True) for s in range(1, 5)] + [
    dict(seed=5, eager=True),
    dict(seed=6, shuffle=True, quantum=17),
]


# From three chunks on: with fewer, the kernel reads a stage of u that it never filled.
@pytest.mark.parametrize("tokens", [192, 320, 448])
@pytest.mark.parametrize("variant", kernels.HOPPER_SCANS)
def test_result(variant: str, tokens: int) -> None:
    case = kernels.need("sm_90a", kernels.hopper_scan, variant, tokens)
    launched = case.run()
    assert max(case.errors().values()) < WITHIN, case.errors()
    assert launched.cluster == ((2, 1, 1) if variant == "cluster" else (1, 1, 1))
    assert not launched.notes


@pytest.mark.parametrize("variant", kernels.HOPPER_SCANS)
def test_schedules_give_the_same_bits(variant: str) -> None:
    case = kernels.need("sm_90a", kernels.hopper_scan, variant, 384)
    case.run()
    bits = case.bits()
    for options in SCHEDULES:
        case.run(**options)
        assert case.bits() == bits, options


def test_variants_give_the_same_bits() -> None:
    bits = []
    for variant in kernels.HOPPER_SCANS:
        case = kernels.need("sm_90a", kernels.hopper_scan, variant, 256, 2)
        case.run()
        bits.append(case.bits())
    assert bits[1:] == bits[:-1]


def test_stage_that_was_never_filled() -> None:
    """One chunk alone: the kernel reads ahead what no load has filled, and uses none of it."""
    case = kernels.need("sm_90a", kernels.hopper_scan, "one", 64)
    case.run()
    assert max(case.errors().values()) < WITHIN, case.errors()


@pytest.mark.parametrize("variant", kernels.HOPPER_SCANS)
def test_reads_that_may_be_queued(variant: str) -> None:
    """Every variant releases a stage of u right after the ldmatrix that read it."""
    case = kernels.need("sm_90a", kernels.hopper_scan, variant, 256)
    with pytest.raises(ptxemu.RaceFault, match=r"read at PTX line \d+: ldmatrix.*may still be queued"):
        case.run(queued_reads=True)


def test_ordinary_call() -> None:
    one = kernels.need("sm_90a", kernels.hopper_scan, "one", 256)
    two = kernels.need("sm_90a", kernels.hopper_scan, "two", 256)
    for case in (one, two):
        case.clear()
    with ptxemu.emulate("sm_90a", **kernels.HOPPER_OPTIONS) as launches:
        one.compiled(*one.args)
        two.compiled(*two.args)
    assert [x.block for x in launches] == [(160, 1, 1), (384, 1, 1)]
    for case in (one, two):
        assert max(case.errors().values()) < WITHIN, case.errors()


def test_fixture(emulated: Callable[..., list[ptxemu.Launched]]) -> None:
    case = kernels.need("sm_90a", kernels.hopper_scan, "one", 256)
    case.clear()
    launches = emulated("sm_90a", seed=2, shuffle=True, **kernels.HOPPER_OPTIONS)
    case.compiled(*case.args)
    assert [x.block for x in launches] == [(160, 1, 1)]
    assert max(case.errors().values()) < WITHIN
