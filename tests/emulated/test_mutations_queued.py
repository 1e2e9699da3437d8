"""The Hopper scans of KDA without the fences that their reads of a stage need before its release: each must be noticed."""

from __future__ import annotations

from collections.abc import Callable

import kernels
import pytest
import test_kda_reverse
import test_kda_scan
from kernels import Case
from mutate import Mutation, judge, nth

from deltafuse.kernels.config import ReverseConfig, ScanConfig
from ptxemu import RaceFault

FENCE = r"fence\.proxy\.async[^;]*;"
LENGTHS = (320,)


def forward() -> Case:
    p = test_kda_scan.Problem(LENGTHS, config=ScanConfig(initial=True, final=True))
    run = test_kda_scan.Run(p)
    return Case("KDA scan", test_kda_scan.kernel(p.config), run.args(), run.outputs(), run.expected(), 5)


def reverse() -> Case:
    p = test_kda_reverse.Problem(LENGTHS, config=ReverseConfig(initial=True, final=True))
    run = test_kda_reverse.Run(p)
    return Case("KDA reverse scan", test_kda_reverse.kernel(p.config), run.args(), run.outputs(), run.expected(), 5)


@pytest.mark.parametrize(
    ("build", "name", "n"),
    [
        (forward, "first v: fence before the release dropped", 0),
        (forward, "next v: fence before the release dropped", 1),
        (reverse, "first do: fence before the release dropped", 0),
        (reverse, "next do and decay: fence before the release dropped", 1),
    ],
)
def test_noticed(build: Callable[[], Case], name: str, n: int, record_property: Callable[[str, object], None]) -> None:
    case = kernels.need("sm_90a", build)
    verdict = judge(case, Mutation(name, nth(FENCE, "", n), (RaceFault,), "may still be queued"))
    record_property("mutation", (case.name, verdict.line))
    assert verdict.caught, str(verdict)
