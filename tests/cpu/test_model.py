"""The performance model on paper (`bench/model.py`): its arithmetic by hand, and its predictions of what was measured on Hopper."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from deltafuse.kernels.sm100.plan import CHUNK_CYCLES


def _load() -> ModuleType:
    path = Path(__file__).parents[2] / "bench" / "model.py"
    spec = importlib.util.spec_from_file_location("bench_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_model"] = module
    spec.loader.exec_module(module)
    return module


model = _load()


def test_hopper_is_predicted() -> None:
    rows = model.hopper_check()
    assert len(rows) == 12
    for shape, scan, p, measured in rows:
        assert abs(p.total / measured - 1) <= 0.25, (shape, scan.name, p)
    # Not only by one of the bounds.
    assert {p.bound for *_, p, _ in rows} == {"chain", "memory", "l2"}


def test_this_packages_scan_is_predicted() -> None:
    """All but the call whose four CTAs of a head fetch the same operands each by itself."""
    rows = model.hopper_check(own=True)
    off = [(shape.heads, scan.tile, scan.share) for shape, scan, p, ms in rows if abs(p.total / ms - 1) > 0.25]
    assert len(rows) == 11
    assert off == [(16, 64, 1)]


def test_tensor_cycles_by_hand() -> None:
    # 64 x 64 x (3 x 128 + 64) multiply-adds at 2048 a cycle.
    assert model.tensor_cycles(model.H200, 128, 64) == 64 * 64 * 448 / 2048 == 896
    assert model.tensor_cycles(model.H200, 128, 64, inverse=True) == 1024
    # Blackwell's 64-row instruction takes as long as its 128-row one.
    assert model.tensor_cycles(model.B300, 128, 64) == model.tensor_cycles(model.B300, 128, 128) == 896
    assert model.tensor_cycles(model.B300, 64, 128) == 512
    # v M' on top of them: 128 x 64 x 64 at 4096 a cycle.
    assert (
        model.blackwell(model.B300, 128, 128, 1).tensor == model.blackwell(model.B300, 128, 64, 1).tensor == 896 + 128
    )


def test_bytes_by_hand() -> None:
    assert model.operand_bytes(128) == 64 * (3 * 256 + 128) + 512
    assert model.operand_bytes(64, inverse=True) == 64 * (3 * 128 + 256) + 256
    assert model.operand_bytes(128, inverse=True, strips=True) == 64 * (3 * 256 + 2 * 80) + 512
    chip = model.on_chip_bytes(128, 128)
    # w, qg, kg two panels each, Aqk, M'; v and o two.
    assert model.blackwell(model.B300, 128, 128, 2).operands == 8 * 8192 + 512
    assert chip["shared, products"] == (8 + 2) * 8192
    assert chip["shared, copies"] == (8 + 2 + 2) * 8192 + 512
    assert chip["shared, warps"] == 2 * 8192 + 4 * 512
    assert chip["tensor, products"] == 7 * 3 * 16384 + 2 * 16384
    assert chip["tensor, warps"] == 16384 * (2 + 1 + 6 + 2)


def test_chain_is_the_sum_of_its_steps_and_what_the_kernel_is_scheduled_by() -> None:
    for tile, cycles in CHUNK_CYCLES.items():
        steps = model.blackwell_steps(model.B300, 128, tile)
        assert sum(c for _, c in steps) == model.blackwell(model.B300, 128, tile, 1).chain == cycles
    shorter = dict(model.blackwell_steps(model.B300, 64, 128))
    whole = dict(model.blackwell_steps(model.B300, 128, 128))
    assert whole["S^T updated, 2 blocks"] == 2 * shorter["S^T updated, 1 block"]
    assert whole["D's first block"] == 128 * 64 * 64 / 4096 + 100


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("tile", [64, 128])
def test_the_inverse_on_v_is_off_the_chain(key_dim: int, tile: int) -> None:
    """After D's first block: its other ones, v' Aqk and v M', done before the last block of S^T can be waited for."""
    steps = dict(model.blackwell_steps(model.B300, key_dim, tile))
    update = next(cycles for name, cycles in steps.items() if name.startswith("S^T updated"))
    products = (key_dim // 64 - 1 + 1 + 1) * 128
    assert products < steps["D handed over"] + update


MACHINE = model.Machine("toy", 10, 1.0, 4096, 1.0, 2.0)


def scan(**change: object) -> object:
    return replace(model.Scan("toy", 64, 1, 1000.0, 100.0, 50_000, 10_000), **change)


def test_prediction_by_hand() -> None:
    # 30 CTAs on 10 SMs: three waves of 10 chunks of 1000 cycles of a nanosecond.
    p = model.predict(MACHINE, scan(), model.Shape(1, 640, 30, 128, 64))
    assert p.waves == 3
    assert p.total == pytest.approx(0.03)
    assert p.chain == pytest.approx(0.03)
    assert p.tensor == pytest.approx(0.003)
    assert p.memory == pytest.approx(30 * 10 * 60_000 / 1e12 * 1e3)
    assert p.l2 == pytest.approx(30 * 10 * 60_000 / 2e12 * 1e3)
    assert p.bound == "chain"


def test_last_wave_may_be_bound_otherwise() -> None:
    # The first wave's bytes take 10 x 10 x 1.2e5 / 1e12 s = 0.012 ms, its chain 0.01; the second has one CTA.
    p = model.predict(MACHINE, scan(operands=110_000), model.Shape(1, 640, 11, 128, 64))
    assert p.total == pytest.approx(0.012 + 0.01)


def test_tiles_share_memory_and_pairs_share_l2() -> None:
    shape = model.Shape(1, 640, 5, 128, 128)
    alone, pair = (model.predict(MACHINE, scan(share=n), shape) for n in (1, 2))
    assert alone.memory == pair.memory == pytest.approx(10 * 10 * 35_000 / 1e12 * 1e3)
    assert alone.l2 == pytest.approx(10 * 10 * 60_000 / 2e12 * 1e3)
    assert pair.l2 == pytest.approx(10 * 10 * 35_000 / 2e12 * 1e3)


def test_pairs_pay_where_l2_is_the_bound() -> None:
    narrow = [model.predict(model.B300, model.blackwell(model.B300, 128, 64, n), model.TARGET) for n in (1, 2)]
    assert narrow[0].bound == "l2"
    assert narrow[1].total < narrow[0].total


def test_prediction_of_the_published_call() -> None:
    """What docs/blackwell.md says, to its two digits."""
    p = model.predict(model.B300, model.blackwell(model.B300, 128, 128, 2), model.TARGET)
    assert f"{p.total:.2f}" == "0.62"
    text = (Path(__file__).parents[2] / "docs" / "blackwell.md").read_text()
    assert "| B300 | 128, pairs | 1,568 | 4 | **0.62** |" in text


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    model.main()
    out = capsys.readouterr().out
    assert "B300 tile 128, pairs" in out
    assert "published on B300: kernel-fun 5.95" in out
