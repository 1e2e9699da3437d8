"""The whole backward pass of KDA on the emulated kernels, from raw inputs to every gradient, against float64."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from test_kda_forward import RAW, STATES, TRAINED, arguments, load

import deltafuse
from deltafuse.autograd.common import Load
from deltafuse.autograd.kda_backward import KdaGradients, backward
from deltafuse.autograd.kda_cute import flags_of, forward, kernels_for
from deltafuse.cli.specs import DeltaSpec
from deltafuse.kernels.schedule import Schedule
from deltafuse.problem import parse_delta

# As the field's tests allow, for o and the final state together.
ALLOWED = {
    "q": 8e-3,
    "k": 8e-3,
    "v": 8e-3,
    "g": 2e-2,
    "beta": 2e-2,
    "A_log": 8e-3,
    "dt_bias": 8e-3,
    "initial_state": 8e-3,
}
FIELDS = {"A_log": "a_log"}

CASES = {
    "plain": DeltaSpec("chunk_kda", tokens=130),
    "trained": DeltaSpec("chunk_kda", tokens=140, heads=1, key_dim=128, value_dim=128, **TRAINED, **STATES),
    "bounded, GVA": DeltaSpec(
        "chunk_kda", batch=2, tokens=70, heads=1, value_heads=2, gate="bounded", safe_gate=True, final_state=True, **RAW
    ),
    "padded K and V, V first": DeltaSpec(
        "chunk_kda", tokens=65, key_dim=60, value_dim=100, v_first=True, **TRAINED, **STATES
    ),
    "negative eigenvalues, wide beta": DeltaSpec(
        "chunk_kda", tokens=70, neg_eigval=True, wide_beta=True, scale=0.3, **RAW
    ),
    "packed": DeltaSpec("chunk_kda", tokens=255, lengths=(15, 85, 1, 64, 0, 90), heads=1, **STATES),
    "strong decays": DeltaSpec("chunk_kda", tokens=130, decay="strong", **STATES),
    "strong softplus gate": DeltaSpec("chunk_kda", tokens=70, gate="softplus", decay="strong", final_state=True, **RAW),
    "strided, short": DeltaSpec("chunk_kda", tokens=7, strided=True, **STATES),
}


def compare(given: dict[str, Any], plan: Schedule | None = None, load: Load = load, keep: bool = False) -> KdaGradients:
    """Gradients against float64; `keep`: from what the forward pass has kept."""
    dtype = given["q"].dtype
    names = [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    exact = {n: given[n].double().requires_grad_() if n in names else given[n] for n in given}
    o, state = deltafuse.chunk_kda(**exact, backend="torch")
    source = torch.Generator().manual_seed(5)
    do = torch.randn(o.shape, generator=source).to(dtype)
    ds = None if state is None else torch.randn(state.shape, generator=source)
    outs, weights = ([o], [do.double()]) if state is None else ([o, state], [do.double(), ds.double()])
    want = torch.autograd.grad(outs, [exact[n] for n in names], weights)
    with torch.no_grad():
        call = parse_delta("chunk_kda", per_key=True, **given)
        rest = (
            call.g,
            call.beta,
            call.a_log,
            call.dt_bias,
            call.initial_state,
            call.cu_seqlens,
            replace(flags_of(call.problem), keep=keep),
        )
        kernels = kernels_for(call.q, call.v, *rest, sms=132, plan=plan)
        kept = None
        if keep:
            o, state, _, kept = forward(call.q, call.k, call.v, *rest, kernels, "sm_90a", load)
            found, wanted = [x for x in (o, state) if x is not None], outs
            for x, y in zip(found, wanted, strict=True):
                assert float((x.double() - y).norm() / y.norm()) < 5e-3
            assert kept is not None
        got = backward(call.q, call.k, call.v, *rest, kernels, do, ds, "sm_90a", 4, load, kept)
    for name, y in zip(names, want, strict=True):
        x = _of(got, name)
        assert x.shape == y.shape, name
        error = float((x.double() - y).norm() / y.norm())
        assert error < ALLOWED[name], (name, error)
    return got


def _of(grads: KdaGradients, name: str) -> torch.Tensor:
    return getattr(grads, FIELDS.get(name, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(emulated: Any, name: str, dtype: torch.dtype) -> None:
    emulated("sm_90a")
    compare(arguments(CASES[name], dtype))


@pytest.mark.parametrize("value", [-300.0, -1e9, -math.inf])
def test_any_log_decay(emulated: Any, value: float) -> None:
    emulated("sm_90a")
    given = arguments(DeltaSpec("chunk_kda", tokens=70, heads=1, l2norm=True), torch.bfloat16)
    given["g"] = -0.1 * torch.rand(1, 70, 1, 64, generator=torch.Generator().manual_seed(1))
    given["g"][0, 5] = value
    compare(given)


@pytest.mark.parametrize("initial", [False, True])
def test_segments_give_the_whole(emulated: Any, initial: bool) -> None:
    emulated("sm_90a")
    spec = DeltaSpec("chunk_kda", tokens=64 * 4 + 9, heads=1, final_state=initial, initial_state=initial, **TRAINED)
    compare(arguments(spec, torch.bfloat16), Schedule(64, 1, 2, 3))


@pytest.mark.parametrize(
    ("fields_of", "plan"),
    [
        ({"tokens": 140, "value_dim": 128} | STATES, None),
        ({"tokens": 130, "v_first": True, "lengths": (64, 1, 0, 65)} | STATES, None),
        ({"tokens": 64 * 4 + 9, "final_state": True}, Schedule(64, 1, 2, 3)),
    ],
    ids=["states", "packed, V first", "segments"],
)
def test_what_is_kept_is_not_computed_again(emulated: Any, fields_of: dict[str, Any], plan: Schedule | None) -> None:
    emulated("sm_90a")
    given = arguments(DeltaSpec("chunk_kda", heads=1, **TRAINED, **fields_of), torch.bfloat16)
    ran: Counter[str] = Counter()

    def counted(kernel: str, config: Any, arch: str) -> Any:
        ran[kernel] += 1
        return load(kernel, config, arch)

    again = compare(given, plan, counted)
    assert ran["warp.kda_prepare"] == 1
    ran.clear()
    kept = compare(given, plan, counted, keep=True)
    # Prepared once, by the forward pass, whose last scan has written the states too.
    assert ran["warp.kda_prepare"] == 1
    assert ran["sm90.kda_scan"] == 1
    assert ran["sm90.kda_segments"] == (plan is not None)
    for field in fields(KdaGradients):
        x, y = getattr(kept, field.name), getattr(again, field.name)
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y), field.name
