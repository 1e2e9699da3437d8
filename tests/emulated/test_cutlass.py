"""CUTLASS's dense GEMMs for Hopper and Blackwell, block-scaled ones among them, unmodified, against float64."""

from __future__ import annotations

from typing import Any

import kernels
import pytest
from kernels import Case

WITHIN = 2e-3
"""Of a float32 sum rounded to bfloat16, in the Frobenius norm."""
SHUFFLED = [dict(seed=s, shuffle=True) for s in (1, 2)] + [dict(eager=True)]

HOPPER: dict[str, dict[str, Any]] = {
    "64x128": dict(size=(256, 256, 192), tile=(64, 128)),
    "128x128": dict(size=(256, 256, 512), tile=(128, 128)),
    "128x256": dict(size=(128, 256, 192), tile=(128, 256)),
    "edges": dict(size=(200, 152, 200), tile=(128, 128)),
    "other majors": dict(size=(128, 128, 128), tile=(128, 128), majors="mnn"),
    "output along m": dict(size=(128, 128, 128), tile=(64, 64), majors="mkm"),
    "cluster 2x1": dict(size=(256, 128, 256), tile=(128, 128), cluster=(2, 1)),
    "cluster 1x2": dict(size=(128, 256, 256), tile=(128, 128), cluster=(1, 2)),
    "cluster 2x2": dict(size=(256, 256, 256), tile=(128, 128), cluster=(2, 2)),
}
BLACKWELL: dict[str, dict[str, Any]] = {
    "64x64": dict(size=(128, 128, 192), tile=(64, 64)),
    "128x128": dict(size=(256, 256, 256), tile=(128, 128)),
    "128x256": dict(size=(128, 256, 192), tile=(128, 256)),
    "edges": dict(size=(200, 152, 200), tile=(128, 128)),
    "other majors": dict(size=(128, 128, 128), tile=(128, 128), majors="mnn"),
    "cluster 2x1": dict(size=(256, 128, 128), tile=(128, 128), cluster=(2, 1)),
    "cluster 2x2": dict(size=(256, 256, 128), tile=(128, 128), cluster=(2, 2)),
    "pairs": dict(size=(256, 256, 256), tile=(256, 128), cluster=(2, 1), pairs=True),
    "pairs, cluster 2x2": dict(size=(256, 256, 128), tile=(256, 128), cluster=(2, 2), pairs=True),
    "persistent": dict(size=(256, 512, 128), tile=(128, 128), persistent=True),
    "persistent pairs": dict(size=(512, 256, 128), tile=(256, 128), cluster=(2, 1), pairs=True, persistent=True),
}


def gemm(arch: str, what: dict[str, Any]) -> Case:
    return kernels.gemm(arch, **what)


@pytest.mark.parametrize(
    ("arch", "what"),
    [pytest.param("sm_90a", w, id=f"sm_90a {n}") for n, w in HOPPER.items()]
    + [pytest.param("sm_100a", w, id=f"sm_100a {n}") for n, w in BLACKWELL.items()],
)
def test_gemm(arch: str, what: dict[str, Any]) -> None:
    case = kernels.need(arch, gemm, arch, what)
    # Its Blackwell kernels free tensor memory, or let it be written, when the registers of a tcgen05.ld have been used.
    use = dict(loads_end_by_use=arch == "sm_100a")
    launched = case.run(**use)
    x, y = what.get("cluster", (1, 1))
    assert launched.cluster[0] * launched.cluster[1] == x * y
    assert case.errors()["c"] < WITHIN
    bits = case.bits()
    for options in SHUFFLED:
        case.run(**options, **use)
        assert case.bits() == bits, options


SCALED: dict[str, dict[str, Any]] = {
    "128x128": dict(size=(128, 128, 256), tile=(128, 128)),
    "128x256": dict(size=(128, 256, 256), tile=(128, 256)),
    "128x192": dict(size=(128, 384, 256), tile=(128, 192)),
    "128x64": dict(size=(256, 128, 256), tile=(128, 64)),
    "pairs": dict(size=(256, 256, 256), tile=(256, 128), cluster=(2, 1)),
    "pairs, cluster 2x2": dict(size=(512, 512, 256), tile=(256, 256), cluster=(2, 2)),
}


@pytest.mark.parametrize("what", SCALED.values(), ids=SCALED)
def test_block_scaled_gemm(what: dict[str, Any]) -> None:
    """Scale factors come by TMA and tcgen05.cp; of tiles of 64 and 192 columns every other one starts inside a block of them."""
    case = kernels.need("sm_100a", lambda: kernels.scaled_gemm(**what))
    case.run(loads_end_by_use=True)
    assert case.errors()["c"] < 1e-6
    bits = case.bits()
    case.run(loads_end_by_use=True, **SHUFFLED[0])
    assert case.bits() == bits
