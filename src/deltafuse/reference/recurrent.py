"""The delta rule token by token: the definition, and the form that decodes.

    S <- exp(g_i) S
    S <- S + beta_i k_i (v_i - k_i^T S)^T
    o_i = s q_i^T S

Pure functions of torch operations, so autograd can differentiate `recurrent_forward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import inputs
from .chunk import DeltaTensors
from .layout import sequence_bounds
from .options import DeltaOptions, compute_dtype


def delta_step(
    state: Tensor, token: tuple[Tensor, ...], scale: float, gv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token of every sequence: `(o [N, HV, V], new state [N, HV, K, V])`.

    token is q, k, v, g, beta: q, k `[N, HV, K]`; v `[N, HV, V]`; g `[N, HV, K or 1]`; beta `[N, HV, 1 or V]`; gv `[N, HV, V]`, a
    decay per value dimension.
    """
    q, k, v, g, beta = token
    state = state * g.exp().unsqueeze(-1)
    if gv is not None:
        state = state * gv.exp().unsqueeze(-2)
    predicted = torch.matmul(k.unsqueeze(-2), state).squeeze(-2)
    state = state + k.unsqueeze(-1) * (beta * (v - predicted)).unsqueeze(-2)
    return scale * torch.matmul(q.unsqueeze(-2), state).squeeze(-2), state


def _prepared(tensors: DeltaTensors, options: DeltaOptions) -> tuple[Tensor, ...]:
    """q, k, v, g, beta on the flattened token axis, heads expanded, everything before the delta rule done."""
    dtype = compute_dtype(tensors.q.dtype)
    q, k, v, g, beta = (x.to(dtype).flatten(0, 1) for x in (tensors.q, tensors.k, tensors.v, tensors.g, tensors.beta))
    heads = v.shape[1]
    if options.l2norm:
        q, k = inputs.l2norm(q)[0], inputs.l2norm(k)[0]
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    g = g if g.dim() == 3 else g.unsqueeze(-1)
    a_log = None if tensors.a_log is None else tensors.a_log.to(dtype).view(heads, 1)
    dt_bias = None if tensors.dt_bias is None else tensors.dt_bias.to(dtype).view(heads, -1)
    g = inputs.gate(g, a_log, dt_bias, options)
    beta = inputs.beta(beta, options)
    return q, k, v, g, beta if beta.dim() == 3 else beta.unsqueeze(-1)


def recurrent_forward(tensors: DeltaTensors, options: DeltaOptions, gv: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`(o [B, T, HV, V] in q's dtype, final state in float32 or float64)`."""
    prepared = _prepared(tensors, options)
    q, _, v, *_ = prepared
    if gv is not None:
        gv = gv.to(q.dtype).flatten(0, 1)
    batch, total = tensors.q.shape[:2]
    starts, lengths = sequence_bounds(batch, total, tensors.cu_seqlens)
    order = torch.argsort(lengths, descending=True, stable=True)
    starts, lengths = starts[order].to(q.device, non_blocking=True), lengths[order]
    state = tensors.initial_state
    if state is None:
        state = q.new_zeros(order.numel(), q.shape[1], q.shape[2], v.shape[2])
    else:
        state = state.transpose(-1, -2) if options.state_v_first else state
        state = state.to(q.dtype).index_select(0, order.to(state.device, non_blocking=True))
    longest = int(lengths[0]) if lengths.numel() else 0
    running = lengths.numel() - torch.searchsorted(lengths.flip(0), torch.arange(longest), right=True)
    outputs, places, finished = [], [], []
    for step, n in enumerate(running.tolist()):
        finished.append(state[n:])
        at = starts[:n] + step
        token = tuple(x.index_select(0, at) for x in prepared)
        o, state = delta_step(state[:n], token, options.scale, None if gv is None else gv.index_select(0, at))
        outputs.append(o)
        places.append(at)
    final = torch.cat([state, *reversed(finished)]).index_select(
        0, torch.argsort(order).to(q.device, non_blocking=True)
    )
    final = final.transpose(-1, -2) if options.state_v_first else final
    o = torch.zeros_like(v)
    if outputs:
        o = o.index_copy(0, torch.cat(places), torch.cat(outputs))
    return o.unflatten(0, (batch, total)).to(tensors.q.dtype), final.contiguous()


def recurrent_serve(
    tensors: DeltaTensors,
    options: DeltaOptions,
    pool: Tensor,
    indices: Tensor,
    accepted: Tensor | None,
    out: Tensor,
    token_states: Tensor | None,
) -> None:
    """Decode on a pool of states: fills `out`, and writes states into `pool`, or into `token_states` where given.

    pool `[slots, HV, K, V]` (`state_v_first`: `[slots, HV, V, K]`). indices `[N]`: the one slot of a sequence, written after its
    last token; `[N, S]`: token `t` writes slot `indices[n, t]`, and the first state is read from `indices[n, accepted[n] - 1]`
    (`accepted` absent: from `indices[n, 0]`). A slot of -1 is none: a sequence that starts from it gives 0 and writes nothing, a
    token that has it as
    its own is computed and not stored. token_states `[B * T, HV, K, V]` takes the state after every token.
    """
    prepared = _prepared(tensors, options)
    q, _, v, *_ = prepared
    batch, total = tensors.q.shape[:2]
    starts, lengths = (x.to(q.device, non_blocking=True) for x in sequence_bounds(batch, total, tensors.cu_seqlens))
    slots = indices.to(torch.int64)
    per_token = slots.dim() == 2
    slots = slots if per_token else slots.unsqueeze(1)
    column = torch.zeros_like(starts) if accepted is None else accepted.to(torch.int64) - 1
    first = slots.gather(1, column.clamp(min=0).unsqueeze(1)).squeeze(1)
    live = ((first >= 0) & (lengths > 0)).nonzero().squeeze(1)
    # `out` may be an input of the same call, so it is written last.
    result = torch.zeros_like(out)
    flat_out = result.view(batch * total, *v.shape[1:])
    if token_states is not None:
        token_states.zero_()
    starts, lengths, slots = starts[live], lengths[live], slots[live]
    state = pool.index_select(0, first[live]).to(q.dtype)
    state = state.transpose(-1, -2) if options.state_v_first else state
    for step in range(int(lengths.max()) if lengths.numel() else 0):
        still = (lengths > step).nonzero().squeeze(1)
        at = starts[still] + step
        o, new = delta_step(state[still], tuple(x[at] for x in prepared), options.scale)
        flat_out[at] = o.to(out.dtype)
        state = state.index_copy(0, still, new)
        outer = new.transpose(-1, -2) if options.state_v_first else new
        if token_states is not None:
            token_states[at] = outer.to(token_states.dtype)
            continue
        if per_token:
            target, written = slots[still, min(step, slots.shape[1] - 1)], still.new_ones(still.shape, dtype=torch.bool)
        else:
            target, written = slots[still, 0], lengths[still] == step + 1
        written = written & (target >= 0)
        pool[target[written]] = outer[written].to(pool.dtype)
    out.copy_(result)
