"""Bounds of packed sequences that lie: values that were changed after they were looked at, by a graph's replay or behind torch's back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_kda_forward import TRAINED, arguments, load

from deltafuse.autograd.kda_backward import backward
from deltafuse.autograd.kda_cute import flags_of, forward, kernels_for
from deltafuse.cli.specs import DeltaSpec
from deltafuse.kernels.schedule import Schedule
from deltafuse.problem import parse_delta

LENGTHS = (70, 0, 95)
T = sum(LENGTHS)
LOW, HIGH = -(2**31), 2**31 - 1
BOUNDS = {
    "decreasing": [0, 165, 70, 20],
    "overlapping": [0, 150, 10, 165],
    "negative": [-200, 70, -64, 100],
    "first and last": [130, 140, 150, 160],
    "beyond T": [0, 70, 166, 100_000],
    "nothing but beyond T": [10_000] * 4,
    "extremes": [LOW, HIGH, LOW, HIGH],
    "extremes, from within": [1, LOW, 64, HIGH],
    "more than 32 bits": [0, 2**40 + 70, -(2**40), 2**33],
}


@pytest.mark.parametrize("plan", [Schedule(64, 1, 1, 3), Schedule(64, 1, 2, 2)], ids=["whole", "segments"])
@pytest.mark.parametrize("name", BOUNDS)
def test_nothing_outside_the_tensors_is_touched(emulated: Any, name: str, plan: Schedule) -> None:
    """The emulator reports every access outside, and what comes out is of the right shape; its values may be any."""
    # Sequences that overlap are written by several CTAs.
    launched = emulated("sm_90a", races=False)
    spec = DeltaSpec("chunk_kda", tokens=T, lengths=LENGTHS, heads=1, initial_state=True, final_state=True, **TRAINED)
    given = arguments(spec, torch.bfloat16)
    with torch.no_grad():
        call = parse_delta("chunk_kda", per_key=True, **given)
    flags = flags_of(call.problem)
    inputs = (call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, torch.tensor(BOUNDS[name]), flags)
    kernels = kernels_for(call.q, call.v, *inputs, sms=132, plan=plan)
    o, state, _, _ = forward(call.q, call.k, call.v, *inputs, kernels, "sm_90a", load)
    seeds = (torch.ones_like(call.v), torch.ones_like(call.initial_state))
    grads = backward(call.q, call.k, call.v, *inputs, kernels, *seeds, "sm_90a", 4, load)
    assert [x.shape for x in (o, state)] == [call.v.shape, call.initial_state.shape]
    assert [x.shape for x in (grads.q, grads.g, grads.initial_state)] == [
        call.q.shape,
        call.g.shape,
        call.initial_state.shape,
    ]
    assert len(launched) >= 7 + 5 * (plan.segments > 1)
