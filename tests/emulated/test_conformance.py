"""The comparison with hardware's results: it passes what may differ and nothing more."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import conformance
import numpy as np
import pytest

TEXT = """.version 8.8
.target sm_90a
{{
ld.global.b32 %a0, [%q]; {form} %d0, %a0;
@%g add.f32 %d0, %d0, 0f00000000; st.global.b32 [%q], %d0;
}}
"""


def launch(form: str, x: np.ndarray, result: np.ndarray) -> conformance.Recorded:
    before = [x.tobytes(), bytes(result.nbytes)]
    return conformance.Recorded(
        TEXT.format(form=form), "k", (1,), (32,), (1,), 0, [], [], before, [before[0], result.tobytes()]
    )


def row(r: conformance.Recorded, hardware: np.ndarray) -> dict[str, object]:
    results = [r.before[0], hardware.tobytes()]
    kept = ["", base64.b64encode(zlib.compress(results[1])).decode()]
    return {"same": False, "digest": conformance.digest(results), "results": kept}


def test_forms_of_a_text() -> None:
    text = TEXT.format(form="ex2.approx.ftz.f32")
    assert conformance.opcodes(text) == ["add.f32", "ex2.approx.ftz.f32", "ld.global.b32", "st.global.b32"]


@pytest.mark.parametrize(("form", "type_", "places", "enough"), [
    ("ex2.approx.f32", np.float32, 2, 3), ("rcp.approx.ftz.f32", np.float32, 1, 2), ("lg2.approx.f32", np.float32, 1, 16),
    ("tanh.approx.f32", np.float32, 4096, 65536), ("tanh.approx.f16", np.float16, 1, 4), ("sin.approx.f32", np.float32, 8, 256),
])  # fmt: skip
def test_approximate_functions(form: str, type_: type, places: int, enough: int) -> None:
    x = np.array([0.75, 0.5, 1.25, 0.875], type_)
    y = np.array([0.75, 0.625, 0.9375, 0.875], type_)
    integers = {4: np.int32, 2: np.int16}[y.itemsize]
    r = launch(form, x, y)
    for far, wrong in ((places, False), (enough, True)):
        hardware = (y.view(integers) + np.array([0, 0, far, 0], integers)).view(type_)
        assert bool(conformance.compare(r, row(r, hardware))) == wrong, (form, far)
    hardware = y.copy()
    hardware[3] = np.nan
    assert "hardware np.float64(nan)" in conformance.compare(r, row(r, hardware))


def test_sine_far_out() -> None:
    """Documented up to 100 pi only."""
    r = launch("sin.approx.f32", np.array([100, 400], np.float32), np.array([0.5, 0.5], np.float32))
    assert not conformance.compare(r, row(r, np.array([0.5, 0.75], np.float32)))
    assert conformance.compare(r, row(r, np.array([0.75, 0.5], np.float32)))


def test_the_gpu_of_a_machine_with_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1; do case "$*" in *--id=$i*) echo "NVIDIA H200, 580.1"; esac; done\n'
                    'case "$*" in *--id=*) ;; *) echo "NVIDIA H200, 580.1"; echo "NVIDIA H200, 580.1"; esac\n')  # fmt: skip
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert conformance._gpu() == {"gpu": "NVIDIA H200", "driver": "580.1"}


def test_all_else_has_the_same_bits() -> None:
    x, y = np.array([1, 2], np.float32), np.array([1.5, 2.5], np.float32)
    r = launch("sqrt.rn.f32", x, y)
    assert not conformance.compare(r, row(r, y))
    assert conformance.compare(r, row(r, np.nextafter(y, 9).astype(np.float32)))
    good = {"same": True, "digest": conformance.digest(r.after)}
    assert not conformance.compare(r, good)
    assert conformance.compare(launch("sqrt.rn.f32", x, -y), good)
    unchanged = {"same": False, "digest": conformance.digest(r.before), "results": ["", ""]}
    assert conformance.compare(r, unchanged)
