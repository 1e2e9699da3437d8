"""The delta rule's custom ops: what runs, what a fake tensor sees, and the gradients.

`deltafuse::chunk_delta_rule` and `deltafuse::recurrent_delta_rule` share one backward op, since they compute one function.
Absent tensors are empty inside the ops and None outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import DeltaCall, DeltaProblem, fail
from ..reference.chunk import DeltaTensors, chunk_backward, chunk_forward
from ..reference.options import CHUNKS_A_WINDOW, DeltaOptions, ceil_div, compute_dtype, kept_states
from ..reference.recurrent import recurrent_forward, recurrent_serve
from ..support import Plan
from . import decode_cute, kda
from .common import (
    check_once,
    checked_bounds,
    host_bounds,
    machine,
    observed,
    with_gradients,
    without_autocast,
    without_gradients,
    written,
)

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log, Tensor? dt_bias"
_PACKING = "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, bool may_end_early"
_OPTIONS = (
    "float scale, str gate, float lower_bound, bool l2norm, bool beta_sigmoid, float beta_limit, bool state_v_first, "
    "int chunk_size, int keep_every"
)
OptionArgs = tuple[float, str, float, bool, bool, float, bool, int, int]


def _option_args(p: DeltaProblem) -> OptionArgs:
    keep_every = 1 if p.disable_recompute else CHUNKS_A_WINDOW
    return (
        p.scale, p.gate, p.lower_bound, p.l2norm, p.beta_sigmoid, p.beta_limit, p.state_v_first, p.chunk_size, keep_every,
    )  # fmt: skip


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


@torch.library.custom_op(
    "deltafuse::chunk_delta_rule",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor? initial_state, {_PACKING}, {_OPTIONS}, bool final, bool keep, bool intermediate)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def _chunk(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, cu_cpu, early, *rest):  # type: ignore[no-untyped-def]
    *options, final, keep, intermediate = rest
    bounds = checked_bounds(q, cu, cu_cpu, early)
    tensors = DeltaTensors(q, k, v, g, beta, a_log, dt_bias, initial_state, bounds)
    with without_autocast(q):
        o, state, kept, states = chunk_forward(tensors, DeltaOptions(*options), keep=keep, intermediate=intermediate)
    empty = _empty(q)
    return (
        o,
        state if final else empty,
        empty.clone() if kept is None else kept,
        empty.clone() if states is None else states,
    )


def _state_shape(q: Tensor, v: Tensor, cu: Tensor | None, v_first: bool) -> tuple[int, ...]:
    n = q.shape[0] if cu is None else cu.shape[0] - 1
    inner = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    return (n, v.shape[2], *inner)


@_chunk.register_fake
def _(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, cu_cpu, early, *rest):  # type: ignore[no-untyped-def]
    *option_args, final, keep, intermediate = rest
    options = DeltaOptions(*option_args)
    dtype = compute_dtype(q.dtype)
    shape = _state_shape(q, v, cu, options.state_v_first)
    empty = _empty(q)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = q.new_empty(shape, dtype=dtype) if final else empty
    kept = empty.clone()
    if keep:
        count = kept_states(q.shape[0], q.shape[1], options)
        kept = q.new_empty((count, v.shape[2], q.shape[3], v.shape[3]), dtype=dtype)
    states = empty.clone()
    if intermediate:
        chunks = ceil_div(q.shape[1], options.chunk_size) if cu is None else torch.library.get_ctx().new_dynamic_size()
        states = q.new_empty((q.shape[0], chunks, *shape[1:]))
    return o, state, kept, states


@torch.library.custom_op(
    "deltafuse::chunk_delta_rule_backward",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor? initial_state, {_PACKING}, {_OPTIONS}, Tensor? kept, Tensor grad_o, Tensor? grad_state)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, cu_cpu, early, *rest):  # type: ignore[no-untyped-def]
    *option_args, kept, grad_o, grad_state = rest
    options = DeltaOptions(*option_args)
    tensors = DeltaTensors(q, k, v, g, beta, a_log, dt_bias, initial_state, host_bounds(cu, cu_cpu))
    with without_autocast(q):
        if kept is None:
            kept = chunk_forward(tensors, options, keep=True)[2]
        grads = chunk_backward(tensors, options, kept, grad_o, grad_state)
    empty = _empty(q)
    return (
        grads.q, grads.k, grads.v, grads.g, grads.beta,
        empty if grads.a_log is None else grads.a_log,
        empty.clone() if grads.dt_bias is None else grads.dt_bias,
        empty.clone() if initial_state is None else grads.initial_state.to(initial_state.dtype),
    )  # fmt: skip


@_backward.register_fake
def _(q, k, v, g, beta, a_log, dt_bias, initial_state, *rest):  # type: ignore[no-untyped-def]
    def like(x: Tensor | None) -> Tensor:
        return _empty(q) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)

    return tuple(like(x) for x in (q, k, v, g, beta, a_log, dt_bias, initial_state))


@torch.library.custom_op(
    "deltafuse::recurrent_delta_rule",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor? initial_state, {_PACKING}, {_OPTIONS}, Tensor? gv, bool final, bool own) -> (Tensor, Tensor)",
)
def _recurrent(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, cu_cpu, early, *rest):  # type: ignore[no-untyped-def]
    *options, gv, final, own = rest
    if own:
        check_once(q, cu, cu_cpu, early, within=True)
        tensors = DeltaTensors(q, k, v, g, beta, a_log, dt_bias, initial_state, cu)
        arch = machine(q)["arch"]
        o, state = decode_cute.recurrent_forward(tensors, DeltaOptions(*options), final=final, out=None, arch=arch)
        return o, _empty(q) if state is None else state
    bounds = checked_bounds(q, cu, cu_cpu, early)
    tensors = DeltaTensors(q, k, v, g, beta, a_log, dt_bias, initial_state, bounds)
    with torch.no_grad(), without_autocast(q):
        o, state = recurrent_forward(tensors, DeltaOptions(*options), gv)
    return o, state if final else _empty(q)


@_recurrent.register_fake
def _(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, cu_cpu, early, *rest):  # type: ignore[no-untyped-def]
    *options, _gv, final, _own = rest
    state = q.new_empty(_state_shape(q, v, cu, DeltaOptions(*options).state_v_first), dtype=compute_dtype(q.dtype))
    return torch.empty_like(v, memory_format=torch.contiguous_format), state if final else _empty(q)


_READ = 8  # tensors that the backward pass reads again: q, k, v, g, beta, a_log, dt_bias, initial_state


def _save(ctx: Any, inputs: tuple[Any, ...], kept: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_READ], inputs[_READ], inputs[_READ + 1], kept)
    ctx.rest = inputs[_READ + 2 : _READ + 3 + 9]


def _gradients(ctx: Any, grad_o: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    *read, cu, cu_cpu, kept = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(read[2])
    grads = _run_backward(*read, cu, cu_cpu, *ctx.rest, kept, grad_o, grad_state)
    wanted = zip(grads, read, ctx.needs_input_grad, strict=False)
    return tuple(grad if x is not None and need else None for grad, x, need in wanted)


def _chunk_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output[2])
    ctx.final = inputs[-3]


def _chunk_grad(ctx: Any, grad_o: Tensor | None, grad_state: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    grads = _gradients(ctx, grad_o, grad_state if ctx.final else None)
    return *grads, *([None] * (3 + 9 + 3))


def _recurrent_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, None)
    ctx.final = inputs[-2]
    ctx.per_value = inputs[-3] is not None or inputs[4].dim() == 4


def _recurrent_grad(ctx: Any, grad_o: Tensor | None, grad_state: Tensor | None) -> tuple[Any, ...]:
    if ctx.per_value:
        raise NotImplementedError(
            "fused_recurrent ops have no gradient with a gate (`gv`) or `beta` per value dimension"
        )
    grads = _gradients(ctx, grad_o, grad_state if ctx.final else None)
    return *grads, *([None] * (3 + 9 + 3))


_run_backward = without_gradients(_backward)
_run_chunk = with_gradients(_chunk, _chunk_setup, _chunk_grad)
_run_recurrent = with_gradients(_recurrent, _recurrent_setup, _recurrent_grad)


@torch.library.custom_op(
    "deltafuse::recurrent_serve",
    mutates_args=("pool", "out", "token_states"),
    schema=f"({_TENSORS}, Tensor(a!) pool, Tensor indices, Tensor? accepted, Tensor(b!) out, Tensor(c!)? token_states, "
    f"{_PACKING}, {_OPTIONS}, bool own) -> ()",
)
def _serve(q, k, v, g, beta, a_log, dt_bias, pool, indices, accepted, out, states, cu, cu_cpu, early, *rest):  # type: ignore[no-untyped-def]
    *options, own = rest
    if own:
        check_once(q, cu, cu_cpu, early, within=True)
        tensors = DeltaTensors(q, k, v, g, beta, a_log, dt_bias, None, cu)
        arch = machine(q)["arch"]
        decode_cute.recurrent_serve(tensors, DeltaOptions(*options), pool, indices, accepted, out, states, arch=arch)
        return
    bounds = checked_bounds(q, cu, cu_cpu, early)
    _check_slots(q, pool, indices, accepted, bounds)
    tensors = DeltaTensors(q, k, v, g, beta, a_log, dt_bias, None, bounds)
    with torch.no_grad(), without_autocast(q):
        recurrent_serve(tensors, DeltaOptions(*options), pool, indices, accepted, out, states)


@_serve.register_fake
def _(*args):  # type: ignore[no-untyped-def]
    return None


def _check_slots(q: Tensor, pool: Tensor, indices: Tensor, accepted: Tensor | None, bounds: Tensor | None) -> None:
    """Values of the indices, before anything is written."""
    slots = pool.shape[0]
    if indices.numel() and (int(indices.min()) < -1 or int(indices.max()) >= slots):
        fail("ssm_state_indices", f"values {int(indices.min())} to {int(indices.max())}", f"-1 (none) to {slots - 1}")
    if indices.dim() == 2:
        longest = q.shape[1] if bounds is None else int(bounds.diff().max()) if bounds.numel() > 1 else 0
        if longest > indices.shape[1]:
            fail("ssm_state_indices", f"{indices.shape[1]} slots a sequence", f"one for each of {longest} tokens")
    if accepted is not None and accepted.numel():
        low, high = int(accepted.min()), int(accepted.max())
        if low < 1 or high > indices.shape[1]:
            fail("num_accepted_tokens", f"values {low} to {high}", f"1 to {indices.shape[1]}")


def _tensor_args(call: DeltaCall) -> tuple[Tensor | None, ...]:
    return call.q, call.k, call.v, call.g, call.beta, call.a_log, call.dt_bias


def _definition(call: DeltaCall) -> tuple[Tensor, Tensor | None]:
    """The function of both kinds of op in operations that torch differentiates itself, forwards too: token by token."""
    p = call.problem
    bounds = checked_bounds(call.q, call.cu_seqlens, call.cu_seqlens_cpu, p.use_graph)
    tensors = DeltaTensors(
        call.q, call.k, call.v, call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, bounds
    )
    with without_autocast(call.q):
        o, state = recurrent_forward(tensors, DeltaOptions(*_option_args(p)), call.gv)
    return o, state if p.output_final_state else None


def chunk(call: DeltaCall, plan: Plan) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Run a chunked call on the plan's backend: `(o, final state or None)`, with the intermediate states third where asked for."""
    p = call.problem
    if plan.backend == "fla":
        from . import fla

        return fla.chunk(call)
    if plan.backend == "cute":
        return kda.chunk(call)
    if p.tangents:
        return _definition(call)
    o, state, _, states = _run_chunk(
        *_tensor_args(call), call.initial_state, call.cu_seqlens, call.cu_seqlens_cpu, p.use_graph, *_option_args(p),
        p.output_final_state, p.requires_grad, p.intermediate_states,
    )  # fmt: skip
    final = state if p.output_final_state else None
    return (o, final, states) if p.intermediate_states else (o, final)


def recurrent(call: DeltaCall, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """Run a token-by-token call on the plan's backend: `(o, final state or None)`."""
    p = call.problem
    if plan.backend == "fla":
        from . import fla

        return fla.recurrent(call)
    own = plan.backend == "cute"
    if own and not (p.requires_grad or observed(*call.tensors)):
        check_once(call.q, call.cu_seqlens, call.cu_seqlens_cpu, p.use_graph, within=True)
        results = decode_cute.recurrent(call, arch=machine(call.q, call.known)["arch"])
        if p.inplace or call.out is not None:
            written(call.out, call.initial_state if p.inplace else None)
        return results
    if p.pooled or p.inplace or call.out is not None:
        return _served(call, own)
    if p.tangents:
        return _definition(call)
    o, state = _run_recurrent(
        *_tensor_args(call), call.initial_state, call.cu_seqlens, call.cu_seqlens_cpu, p.use_graph, *_option_args(p),
        call.gv, p.output_final_state, own,
    )  # fmt: skip
    return o, state if p.output_final_state else None


def _served(call: DeltaCall, own: bool) -> tuple[Tensor, Tensor | None]:
    """The serving form. The second result is the pool (in place), or the state after every token, or the final states."""
    p = call.problem
    out = torch.empty_like(call.v, memory_format=torch.contiguous_format) if call.out is None else call.out
    indices, states = call.state_indices, None
    if call.initial_state is None:
        pool = call.q.new_zeros(p.state_shape, dtype=compute_dtype(p.dtype))
    else:
        pool = call.initial_state
    if indices is None:
        indices = torch.arange(p.sequences, device=p.device)
        if not p.inplace and call.initial_state is not None:
            pool = pool.to(compute_dtype(p.dtype), copy=True)
    elif not p.inplace:
        states = pool.new_empty((p.batch * p.tokens, *pool.shape[1:]))
    torch.ops.deltafuse.recurrent_serve(
        *_tensor_args(call), pool, indices, call.accepted, out, states, call.cu_seqlens, call.cu_seqlens_cpu,
        p.use_graph, *_option_args(p), own,
    )  # fmt: skip
    if states is not None:
        return out, states
    return out, pool if p.inplace or p.output_final_state else None
