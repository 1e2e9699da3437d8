"""KDA's custom ops on this package's own kernels: the forward pass, and the gradients from the call's own inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import DeltaCall
from ..reference.options import ceil_div
from ..runtime.probe import environment
from .common import check_once, differentiable, host_bounds, observed, with_gradients, without_gradients
from .kda_backward import backward
from .kda_cute import Flags, Form, Inputs, Kept, Outputs, flags_of, kernels_for, kernels_of, room_for_kept, run

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, bool may_end_early, float scale, str gate, float lower_bound, bool l2norm, "
    "bool beta_sigmoid, float beta_limit, bool state_v_first, bool final, bool states, bool keep)"
)
_TENSORS = 10  # tensors at the front of the schema
_READ = 8  # of which the backward pass reads again
_RESULTS = 3 + len(Kept._fields)
_LATER = ", ".join(["Tensor grad_o", *(f"Tensor? {x}" for x in ("grad_state", *(f"kept_{x}" for x in Kept._fields)))])


def _compute(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, cu_cpu, early, *rest):  # type: ignore[no-untyped-def]
    flags = Flags(*rest)
    env = environment(q.device.type, q.device.index)
    kernels = kernels_for(q, v, g, beta, a_log, dt_bias, initial_state, cu, flags, env.sms)
    assert env.arch is not None
    form = Form.of(q, v, cu, flags, kernels, env.arch)
    return _run(form, (q, k, v, g, beta, a_log, dt_bias, initial_state, cu), cu_cpu, early)


def _run(form: Form, given: Inputs, cu_cpu: Tensor | None, early: bool) -> Outputs:
    q, cu = given[0], given[8]
    if cu is not None:
        check_once(q, cu, cu_cpu, early)
    o, state, states, kept = run(form, given, early)
    return o, state, None if states is None else _by_chunk(states, q, host_bounds(cu, cu_cpu)), kept


def _known(*inputs: Any) -> tuple[Tensor | None, ...]:
    """`_compute` of tensors of a known form, which comes last."""
    *given, cu_cpu, early, form = inputs
    *results, kept = _run(form, tuple(given), cu_cpu, early)
    return tuple(results) if kept is None else (*results, *kept)


def _flat(outputs: Outputs) -> tuple[Tensor | None, ...]:
    """What is kept as outputs of their own."""
    *results, kept = outputs
    return *results, *([None] * len(Kept._fields) if kept is None else kept)


@torch.library.custom_op(
    "deltafuse::kda_forward", mutates_args=(), schema=f"{_SCHEMA} -> ({', '.join(['Tensor'] * _RESULTS)})"
)
def _forward(q, *rest):  # type: ignore[no-untyped-def]
    return tuple(q.new_empty(0) if x is None else x for x in _flat(_compute(q, *rest)))


def _by_chunk(states: Tensor, q: Tensor, bounds: Tensor | None) -> Tensor:
    """States by slot to `[B, NT, ...]`, NT the chunks of all sequences where they are packed."""
    if bounds is None:
        return states.unflatten(0, (q.shape[0], -1))
    counts = [ceil_div(int(n), 64) for n in bounds.diff()]
    index = [
        int(b) // 64 + n + c for n, (b, count) in enumerate(zip(bounds[:-1], counts, strict=True)) for c in range(count)
    ]
    return states[torch.tensor(index, device=states.device, dtype=torch.int64)].unsqueeze(0)


@_forward.register_fake
def _(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, cu_cpu, early, *flags):  # type: ignore[no-untyped-def]
    f = Flags(*flags)
    n = q.shape[0] if cu is None else cu.shape[0] - 1
    inner = (v.shape[3], q.shape[3]) if f.state_v_first else (q.shape[3], v.shape[3])
    empty = q.new_empty(0)
    state = q.new_empty((n, v.shape[2], *inner), dtype=torch.float32) if f.final else empty
    states = empty.clone()
    if f.states:
        chunks = ceil_div(q.shape[1], 64) if cu is None else torch.library.get_ctx().new_dynamic_size()
        states = q.new_empty((q.shape[0], chunks, v.shape[2], *inner))
    kept = [empty.clone() for _ in Kept._fields]
    if f.keep:
        kept = list(room_for_kept(q, v, n, cu is not None))
    return torch.empty_like(v, memory_format=torch.contiguous_format), state, states, *kept


def _compute_gradients(q, k, v, g, beta, a_log, dt_bias, initial_state, cu, cu_cpu, early, *rest):  # type: ignore[no-untyped-def]
    *numbers, keep, grad_o, grad_state = rest[: -len(Kept._fields)]
    flags = Flags(*numbers, states=False, keep=keep)  # type: ignore[misc]
    kept = Kept(*rest[-len(Kept._fields) :]) if keep else None
    env = environment(q.device.type, q.device.index)
    kernels = kernels_for(q, v, g, beta, a_log, dt_bias, initial_state, cu, flags, env.sms)
    tensors = (q, k, v, g, beta, a_log, dt_bias, initial_state)
    assert env.arch is not None
    grads = backward(
        *tensors, cu, flags, kernels, grad_o, grad_state, env.arch, env.sms, kept=kept, may_end_early=early
    )
    found = (grads.q, grads.k, grads.v, grads.g, grads.beta, grads.a_log, grads.dt_bias, grads.initial_state)
    return tuple(q.new_empty(0) if x is None else x for x in found)


_backward = torch.library.custom_op(
    "deltafuse::kda_backward",
    _compute_gradients,
    mutates_args=(),
    schema=_SCHEMA.replace("bool states, bool keep)", f"bool keep, {_LATER})") + f" -> ({', '.join(['Tensor'] * _READ)})",
)  # fmt: skip


@_backward.register_fake
def _(q, k, v, g, beta, a_log, dt_bias, initial_state, *rest):  # type: ignore[no-untyped-def]
    tensors = (q, k, v, g, beta, a_log, dt_bias, initial_state)
    return tuple(
        q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _save(ctx, Flags(*inputs[_TENSORS + 1 :]), inputs, output)


def _setup_known(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    _save(ctx, inputs[-1].flags, inputs, output)


def _save(ctx: Any, flags: Flags, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.flags = flags
    kept = output[3:] if flags.keep else ()
    if kept:
        ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*inputs[:_TENSORS], *kept)
    ctx.early = inputs[_TENSORS]
    ctx.count = len(inputs)


def _gradients(ctx: Any, grad_o: Tensor | None, grad_state: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    read, bounds = saved[:_READ], saved[_READ:_TENSORS]
    kept = saved[_TENSORS:] or [None] * len(Kept._fields)
    f = ctx.flags
    if grad_o is None:
        grad_o = torch.zeros_like(read[2])
    *numbers, _states, keep = f.arguments
    # Gradients of gradients there are none, which the op says.
    op: Any = (
        _observed_backward if torch.is_grad_enabled() or observed(*saved, grad_o, grad_state) else _compute_gradients
    )
    grads = op(*read, *bounds, ctx.early, *numbers, keep, grad_o, grad_state if f.final else None, *kept)
    wanted = zip(grads, read, ctx.needs_input_grad, strict=False)
    own = [grad if x is not None and need else None for grad, x, need in wanted]
    return *own, *([None] * (ctx.count - _READ))


_observed_backward = without_gradients(_backward)
_observed = with_gradients(_forward, _setup, _gradients)
_differentiable = differentiable(_known, _setup_known, _gradients)


def chunk(call: DeltaCall) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Run a chunked KDA call on this package's kernels."""
    p = call.problem
    given = (call.q, call.k, call.v, call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, call.cu_seqlens)
    state: Tensor | None
    states: Tensor | None
    if observed(*given):
        o, state, states, *_ = _observed(*given, call.cu_seqlens_cpu, p.use_graph, *flags_of(p).arguments)
    else:
        form = call.known.get(Form)
        if form is None:
            env = environment(p.device.type, p.device.index)
            assert env.arch is not None
            form = Form.of(call.q, call.v, call.cu_seqlens, flags_of(p), kernels_of(p, env.sms), env.arch)
            call.known[Form] = form
        if p.requires_grad:
            o, state, states, *_ = _differentiable(*given, call.cu_seqlens_cpu, p.use_graph, form)
        else:
            o, state, states, _ = _run(form, given, call.cu_seqlens_cpu, p.use_graph)
    final = state if p.output_final_state else None
    if not p.intermediate_states:
        return o, final
    assert states is not None
    return o, final, states
