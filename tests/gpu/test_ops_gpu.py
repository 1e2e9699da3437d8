"""Every op on a GPU against its float64 definition, through plain torch and through an installed fla."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

import deltafuse
from deltafuse.cli.cases import Case, quick_cases
from deltafuse.cli.verify import run
from deltafuse.runtime import log

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="needs flash-linear-attention 0.6")

CASES = quick_cases()
# fla compiles for seconds for each new family of shapes, so a few cases stand for the rest.
FLA_CASES = [
    next(case for case in CASES if (case.spec.op, case.name) == wanted)
    for wanted in (
        ("chunk_kda", "states, T 500"),
        ("fused_recurrent_gated_delta_rule", "gate per value"),
        ("fused_kda_gate", "softplus"),
        ("causal_conv1d", "width 2, silu"),
        ("causal_conv1d_update", "all arguments"),
    )
]


def ident(case: Case) -> str:
    return f"{case.spec.op}: {case.name}"


def check(case: Case, dtype: torch.dtype, backend: str) -> None:
    outcome = run(case, dtype, torch.device("cuda"), backend)
    assert outcome.refused is None, outcome.refused
    assert outcome.broken is None, outcome.broken
    failed = [f"{e.tensor}: {e.value:.2e} > {e.allowed:.1e}" for e in outcome.errors if not e.passed]
    assert outcome.errors
    assert not failed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ident)
def test_torch(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    check(case, dtype, "torch")


@needs_fla
@pytest.mark.parametrize("case", FLA_CASES, ids=ident)
def test_fla(case: Case) -> None:
    check(case, torch.bfloat16, "fla")


def call(**more: object) -> dict[str, object]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    # Heads that are wider than the package's own kernels take.
    q, k, v = (torch.nn.functional.normalize(randn(1, 200, 2, 192), dim=-1) for _ in range(3))
    g = -torch.rand(1, 200, 2, 192, device="cuda")
    return {"q": q, "k": k, "v": v, "g": g, "beta": randn(1, 200, 2).sigmoid(), **more}


@needs_fla
def test_auto_goes_to_fla_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    log._log.cache_clear()
    inputs = call()
    with caplog.at_level(logging.INFO, logger="deltafuse"):
        first, _ = deltafuse.chunk_kda(**inputs)
        again, _ = deltafuse.chunk_kda(**inputs)
    lines = [record for record in caplog.records if record.name == "deltafuse"]
    assert len(lines) == 1
    assert lines[0].levelno == logging.WARNING
    assert "'fla'" in lines[0].getMessage()
    plain, _ = deltafuse.chunk_kda(**inputs, backend="torch")
    assert torch.equal(first, again)
    error = (first.double() - plain.double()).norm() / plain.double().norm()
    assert 0 < error < 0.005  # another implementation ran, and agrees


def test_cute_is_refused() -> None:
    with pytest.raises(deltafuse.UnsupportedError, match="cute"):
        deltafuse.chunk_kda(**call(), backend="cute")


@pytest.mark.parametrize("op", ["chunk_kda", "causal_conv1d"])
def test_packed_bounds_on_the_cpu_spare_a_synchronisation(op: str) -> None:
    bounds = torch.tensor([0, 15, 15, 200])
    packed = {"cu_seqlens": bounds.cuda(), "cu_seqlens_cpu": bounds, "backend": "torch"}
    if op == "chunk_kda":
        arguments = call(**packed)
    else:
        x = torch.randn(1, 200, 64, device="cuda")
        arguments = {"x": x, "weight": torch.randn(64, 4, device="cuda"), **packed}
    expected, _ = getattr(deltafuse, op)(**arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got, _ = getattr(deltafuse, op)(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, expected)
    arguments["cu_seqlens_cpu"] = torch.tensor([0, 15, 10, 200])
    with pytest.raises(ValueError, match="cu_seqlens"):
        getattr(deltafuse, op)(**arguments)


def test_a_compiled_layer_trains() -> None:
    torch.manual_seed(0)
    layer = deltafuse.nn.KimiDeltaAttention(hidden_size=64, head_dim=32, num_heads=2).cuda()
    x = torch.randn(2, 100, 64, device="cuda", requires_grad=True)
    with deltafuse.use_backend("torch"):
        (eager,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
        (compiled,) = torch.autograd.grad(torch.compile(layer, fullgraph=True)(x)[0].square().sum(), x)
    assert (eager - compiled).norm() <= 1e-4 * eager.norm()
