"""kernel-fun's scan and reverse scan for Blackwell: every variant against float64, and under many schedules."""

from __future__ import annotations

import kernels
import pytest

import ptxemu

WITHIN = 6e-3
SCHEDULES = [dict(seed=s, shuffle=True) for s in range(1, 4)] + [
    dict(seed=4, eager=True),
    dict(seed=5, shuffle=True, quantum=17),
]
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


@pytest.mark.parametrize(("k", "v"), [(64, 64), (64, 128), (128, 64), (128, 128)])
@DIRECTIONS
def test_result(reverse: bool, k: int, v: int) -> None:
    case = kernels.need("sm_100a", kernels.kernel_fun_scan, reverse, 192, 1, k, v)
    launched = case.run()
    assert launched.grid[0] * launched.grid[1] * launched.grid[2] == v // 64
    assert max(case.errors().values()) < WITHIN, case.errors()


@DIRECTIONS
def test_heads(reverse: bool) -> None:
    case = kernels.need("sm_100a", kernels.kernel_fun_scan, reverse, 128, 2, 128, 64)
    case.run()
    assert max(case.errors().values()) < WITHIN, case.errors()


@DIRECTIONS
def test_schedules_give_the_same_bits(reverse: bool) -> None:
    case = kernels.need("sm_100a", kernels.kernel_fun_scan, reverse, 384, 1, 128, 64)
    case.run()
    bits = case.bits()
    for options in SCHEDULES:
        case.run(**options)
        assert case.bits() == bits, options


def test_architectures_take_turns() -> None:
    blackwell = kernels.need("sm_100a", kernels.kernel_fun_scan, False, 192, 1, 128, 64)
    hopper = kernels.need("sm_90a", kernels.hopper_scan, "one", 192)
    for case, target in ((blackwell, "sm_100a"), (hopper, "sm_90a")):
        assert f".target {target}" in case.ptx
        case.run()
        assert max(case.errors().values()) < WITHIN, case.errors()
    with ptxemu.emulate("sm_100a") as launches:
        blackwell.compiled(*blackwell.args)
    assert len(launches) == 1
