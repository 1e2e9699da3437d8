"""The custom op of the KDA gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import GateCall
from ..reference import inputs
from ..reference.options import DeltaOptions, compute_dtype
from ..support import Plan
from .common import with_gradients, without_gradients


def _shaped(g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dtype = compute_dtype(g.dtype)
    heads, key_dim = g.shape[-2:]
    return (
        g.to(dtype),
        None if a_log is None else a_log.to(dtype).view(heads, 1),
        None if dt_bias is None else dt_bias.to(dtype).view(heads, key_dim),
    )


@torch.library.custom_op(
    "deltafuse::kda_gate",
    mutates_args=(),
    schema="(Tensor g, Tensor? a_log, Tensor? dt_bias, str gate, float lower_bound, ScalarType dtype) -> Tensor",
)
def _gate(g, a_log, dt_bias, gate, lower_bound, dtype):  # type: ignore[no-untyped-def]
    return _compute(g, a_log, dt_bias, gate, lower_bound, dtype)


def _compute(
    g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, gate: str, lower_bound: float, dtype: torch.dtype
) -> Tensor:
    raw, rate, bias = _shaped(g, a_log, dt_bias)
    value = inputs.gate(raw, rate, bias, DeltaOptions(1.0, gate, lower_bound))
    return value.to(dtype).contiguous()


@_gate.register_fake
def _(g, a_log, dt_bias, gate, lower_bound, dtype):  # type: ignore[no-untyped-def]
    return torch.empty_like(g, dtype=dtype, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "deltafuse::kda_gate_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor? a_log, Tensor? dt_bias, str gate, float lower_bound, Tensor grad) -> (Tensor, Tensor, Tensor)",
)
def _gate_backward(g, a_log, dt_bias, gate, lower_bound, grad):  # type: ignore[no-untyped-def]
    raw, rate, bias = _shaped(g, a_log, dt_bias)
    draw, da = inputs.gate_backward(raw, rate, bias, grad.to(raw.dtype), DeltaOptions(1.0, gate, lower_bound))
    empty = g.new_empty(0)
    return (
        draw.to(g.dtype).contiguous(),
        empty if a_log is None or da is None else da.reshape(-1, *g.shape[-2:]).sum((0, 2)).to(a_log.dtype),
        empty.clone() if dt_bias is None else draw.reshape(-1, *g.shape[-2:]).sum(0).flatten().to(dt_bias.dtype),
    )


@_gate_backward.register_fake
def _(g, a_log, dt_bias, gate, lower_bound, grad):  # type: ignore[no-untyped-def]
    empty = g.new_empty(0)
    return (
        torch.empty_like(g, memory_format=torch.contiguous_format),
        empty if a_log is None else torch.empty_like(a_log),
        empty.clone() if dt_bias is None else torch.empty_like(dt_bias),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.rest = inputs[3:5]


def _grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = _run_backward(*tensors, *ctx.rest, grad)
    wanted = zip(grads, tensors, ctx.needs_input_grad, strict=False)
    return *(grad if x is not None and need else None for grad, x, need in wanted), None, None, None


_run_backward = without_gradients(_gate_backward)
_run = with_gradients(_gate, _setup, _grad)


def kda_gate(call: GateCall, plan: Plan) -> Tensor:
    """Run the gate on the plan's backend."""
    p = call.problem
    if plan.backend == "fla":
        from . import fla

        return fla.kda_gate(call)
    given = (call.g, call.a_log, call.dt_bias, p.gate, p.lower_bound, p.output_dtype)
    return _compute(*given) if p.tangents else _run(*given)
