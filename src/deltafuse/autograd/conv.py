"""The custom ops of the short convolution: what runs, what a fake tensor sees, and the gradients.

Absent tensors are empty inside the ops and None outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem_conv import ConvCall, ConvUpdateCall
from ..reference.conv import conv_backward, conv_forward, conv_update
from ..support import Plan
from . import conv_cute
from .common import (
    check_once,
    checked_bounds,
    differentiable,
    machine,
    observed,
    with_gradients,
    without_autocast,
    without_gradients,
    written,
)

_PACKING = "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu"


def _bounds(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    """Sequence bounds beside x: the copy that was checked where x is on the CPU, too."""
    return cu_seqlens if cu_seqlens_cpu is None or x.device.type != "cpu" else cu_seqlens_cpu


def _compute(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    silu: bool,
    output_final_state: bool,
    own: bool,
    known: dict[Any, Any] | None = None,
    in_place: bool = True,
) -> tuple[Tensor, Tensor | None]:
    if own:
        check_once(x, cu_seqlens, cu_seqlens_cpu)
        given = (x, weight, bias, residual, initial_state, cu_seqlens, silu, output_final_state)
        return conv_cute.forward(*given, **machine(x, known), known=known)
    checked_bounds(x, cu_seqlens, cu_seqlens_cpu)
    bounds = _bounds(x, cu_seqlens, cu_seqlens_cpu)
    with without_autocast(x):
        return conv_forward(x, weight, bias, residual, initial_state, bounds, silu, output_final_state, in_place)


@torch.library.custom_op(
    "deltafuse::causal_conv1d_fwd",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? initial_state, "
    f"{_PACKING}, bool silu, bool output_final_state, bool own) -> (Tensor, Tensor)",
)
def _forward(x, *rest):  # type: ignore[no-untyped-def]
    y, state = _compute(x, *rest)
    return y, x.new_empty(0) if state is None else state


@_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    silu: bool,
    output_final_state: bool,
    own: bool,
) -> tuple[Tensor, Tensor]:
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = x.new_empty((count, *weight.shape) if output_final_state else 0)
    return x.new_empty(x.shape), state


def _compute_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    silu: bool,
    own: bool,
    grad_y: Tensor | None,
    grad_state: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    if own:
        where = machine(x)
        found = conv_cute.backward(x, weight, bias, initial_state, cu_seqlens, silu, grad_y, grad_state, needs, **where)
        return tuple(x.new_empty(0) if grad is None else grad for grad in found)
    bounds = _bounds(x, cu_seqlens, cu_seqlens_cpu)
    with without_autocast(x):
        grads = conv_backward(x, weight, bias, initial_state, bounds, silu, grad_y, grad_state, needs)
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


_backward = torch.library.custom_op(
    "deltafuse::causal_conv1d_bwd",
    _compute_gradients,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, "
    f"{_PACKING}, bool silu, bool own, Tensor? grad_y, Tensor? grad_state, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_backward.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    silu: bool,
    own: bool,
    grad_y: Tensor | None,
    grad_state: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    of = zip((x, weight, bias, initial_state), needs, strict=True)
    return tuple(t.new_empty(t.shape) if t is not None and need else x.new_empty(0) for t, need in of)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, residual, initial_state, cu_seqlens, cu_seqlens_cpu, ctx.silu, ctx.final, ctx.own, *known = inputs
    ctx.known = len(known)
    ctx.set_materialize_grads(False)
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens, cu_seqlens_cpu)


def _gradients(ctx: Any, grad_y: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_bias, need_residual, need_state = ctx.needs_input_grad[:5]
    needs = [need_x, need_weight, need_bias, need_state]
    grads: list[Tensor | None] = [None] * 4
    if any(needs):
        # Gradients of gradients there are none, which the op says.
        op: Any = (
            _observed_backward
            if torch.is_grad_enabled() or observed(*ctx.saved_tensors, grad_y, grad_state)
            else _compute_gradients
        )
        found = op(*ctx.saved_tensors, ctx.silu, ctx.own, grad_y, grad_state if ctx.final else None, needs)
        grads = [grad if need else None for grad, need in zip(found, needs, strict=True)]
    grad_x, grad_weight, grad_bias, grad_initial = grads
    grad_residual = grad_y.to(ctx.residual_dtype) if need_residual and grad_y is not None else None
    return grad_x, grad_weight, grad_bias, grad_residual, grad_initial, *([None] * (5 + ctx.known))


_observed_backward = without_gradients(_backward)
_observed = with_gradients(_forward, _setup, _gradients)
_differentiable = differentiable(_compute, _setup, _gradients)


@torch.library.custom_op(
    "deltafuse::causal_conv1d_update",
    mutates_args=("cache",),
    schema="(Tensor x, Tensor(a!) cache, Tensor weight, Tensor? bias, Tensor? residual, bool silu, bool own) -> Tensor",
)
def _update(
    x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, silu: bool, own: bool
) -> Tensor:
    if own:
        return conv_cute.update(x, cache, weight, bias, residual, silu, **machine(x))
    with torch.no_grad(), without_autocast(x):
        return conv_update(x, cache, weight, bias, residual, silu)


@_update.register_fake
def _(
    x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, silu: bool, own: bool
) -> Tensor:
    return x.new_empty(x.shape)


def conv(call: ConvCall, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Run a convolution on the plan's backend: `(y, final state or None)`."""
    p = call.problem
    if plan.backend == "fla":
        from . import fla

        y, state = fla.conv(call)
    else:
        own = plan.backend == "cute"
        given = (
            call.x, call.weight, call.bias, call.residual, call.initial_state, call.cu_seqlens, call.cu_seqlens_cpu,
            p.silu, p.output_final_state, own,
        )  # fmt: skip
        if p.tangents:
            y, state = _compute(*given, in_place=False)
        elif not own or observed(*given[:7]):
            y, state = _observed(*given)
        else:
            y, state = (_differentiable if p.requires_grad else _compute)(*given, call.known)
    return y if y.shape == call.shape else y.view(call.shape), state if p.output_final_state else None


def update(call: ConvUpdateCall, plan: Plan) -> tuple[Tensor, Tensor]:
    """Run an update on the plan's backend: `(y, cache)`."""
    p = call.problem
    if plan.backend == "fla":
        from . import fla

        y = fla.conv_update(call)
    else:
        own = plan.backend == "cute"
        given = (call.x, call.cache, call.weight, call.bias, call.residual, p.silu)
        if not own or observed(*given[:5]):
            y = torch.ops.deltafuse.causal_conv1d_update(*given, own)
        else:
            y = conv_cute.update(*given, **machine(call.x, call.known), known=call.known)
            written(call.cache)
    return y if y.shape == call.shape else y.view(call.shape), call.cache
