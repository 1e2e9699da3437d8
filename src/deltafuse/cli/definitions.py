"""What each op computes, token by token in plain torch, for float64 on the CPU; autograd gives the gradients.

Nothing is shared with the code that is verified. The arguments are the ops' own; switches that change no result are
accepted and not read. Results are dicts by the names of `verify`'s tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Tensor]


def _sequences(batch: int, tokens: int, cu_seqlens: Tensor | None) -> Iterator[tuple[int, int, int]]:
    """Row of the batch, first and last bound of every sequence."""
    if cu_seqlens is None:
        yield from ((row, 0, tokens) for row in range(batch))
    else:
        bounds = cu_seqlens.tolist()
        yield from ((0, start, end) for start, end in pairwise(bounds))


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _gate(raw: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """raw `[..., HV, K]`."""
    z = raw if dt_bias is None else raw + dt_bias.view(raw.shape[-2:])
    rate = 1.0 if A_log is None else A_log.exp().view(-1, 1)
    if lower_bound is None:
        return -rate * _softplus(z)
    return lower_bound / (1 + (-rate * z).exp())


def _steps(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    value_decay: Tensor | None,
    scale: float,
) -> Iterator[tuple[Tensor, Tensor]]:
    """`(state, o)` after every token of one sequence: state `[HV, K, V]`, the rest `[T, HV, ...]`."""
    tokens = [x.unbind(0) for x in (q, k, v, decay, beta)]
    for t, (qt, kt, vt, dt, bt) in enumerate(zip(*tokens, strict=True)):
        state = state * dt.unsqueeze(-1)
        if value_decay is not None:
            state = state * value_decay[t].unsqueeze(-2)
        predicted = (kt.unsqueeze(-1) * state).sum(-2)
        state = state + kt.unsqueeze(-1) * (bt * (vt - predicted)).unsqueeze(-2)
        yield state, scale * (qt.unsqueeze(-1) * state).sum(-2)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int = 64,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> Results:
    """All four delta-rule ops: `o`, and where asked for `final_state`, `h` or, in the serving form, `pool`."""
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], dim=2) for x in (q, k))
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound)
    decay = (g if gk is None else g + gk).exp()
    value_decay = None if gv is None else gv.exp()
    if use_beta_sigmoid_in_kernel:
        beta = (2 if allow_neg_eigval else 1) / (1 + (-beta).exp())
    beta = beta if beta.dim() == 4 else beta.unsqueeze(-1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def turned(state: Tensor) -> Tensor:
        return state.transpose(-1, -2) if state_v_first else state

    pool = None if ssm_state_indices is None or initial_state is None else initial_state.clone()
    outputs, finals, between = [], [], []
    for n, (row, start, end) in enumerate(_sequences(q.shape[0], q.shape[1], cu_seqlens)):
        slots: list[int] = []
        first = n
        if ssm_state_indices is not None:
            slots = ssm_state_indices[n].view(-1).tolist()
            first = slots[0 if num_accepted_tokens is None else int(num_accepted_tokens[n]) - 1]
        if first < 0:
            outputs.append(torch.zeros_like(v[row, start:end]))
            continue
        state = q.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        if initial_state is not None:
            state = turned((initial_state if pool is None else pool)[first]).clone()
        parts = [x[row, start:end] for x in (q, k, v, decay, beta)]
        gate = None if value_decay is None else value_decay[row, start:end]
        steps = _steps(state, parts[0], parts[1], parts[2], parts[3], parts[4], gate, scale)
        before, rows = state, []
        for t, (after, o) in enumerate(steps):
            if return_intermediate_states and t % chunk_size == 0:
                between.append(before)
            if pool is not None and (len(slots) > 1 or t == end - start - 1):
                pool[slots[min(t, len(slots) - 1)]] = turned(after)
            rows.append(o)
            before = state = after
        outputs.append(torch.stack(rows) if rows else v[row, start:end])
        finals.append(turned(state))
    results = {"o": torch.cat(outputs).view(v.shape)}
    if pool is not None:
        return results | {"pool": pool}
    if output_final_state:
        results["final_state"] = torch.stack(finals)
    if return_intermediate_states:
        h = torch.stack(between)
        results["h"] = turned(h.view(q.shape[0], -1, *h.shape[1:]))
    return results


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Results:
    """`y[t] = act(bias + sum_w weight[w] x[t - W + 1 + w]) + residual[t]`; the state is the last W inputs."""
    channels, width = weight.shape
    outputs, finals = [], []
    for n, (row, start, end) in enumerate(_sequences(x.shape[0], x.shape[1], cu_seqlens)):
        before = x.new_zeros(channels, width) if initial_state is None else initial_state[n]
        known = torch.cat([before, x[row, start:end].transpose(0, 1)], 1)
        finals.append(known[:, known.shape[1] - width :])
        windows = known.unfold(1, width, 1)[:, 1:]  # [D, T, W]
        y = (windows * weight.unsqueeze(1)).sum(-1).transpose(0, 1)
        outputs.append(y if bias is None else y + bias)
    y = torch.cat(outputs).view(x.shape)
    if activation in ("silu", "swish"):
        y = y / (1 + (-y).exp())
    results = {"y": y if residual is None else y + residual}
    if output_final_state:
        results["final_state"] = torch.stack(finals)
    return results


def conv_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Results:
    """One token of every sequence: `conv` from the state `cache`."""
    assert weight is not None
    results = conv(x, weight, bias, residual, cache, True, activation)
    return {"y": results["y"], "cache": results["final_state"]}


def kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Results:
    """The logarithm of the decay."""
    return {"gate": _gate(g, A_log, dt_bias, lower_bound)}


DEFINITIONS: dict[str, Callable[..., Results]] = {
    "chunk_kda": delta_rule,
    "fused_recurrent_kda": delta_rule,
    "chunk_gated_delta_rule": delta_rule,
    "fused_recurrent_gated_delta_rule": delta_rule,
    "causal_conv1d": conv,
    "causal_conv1d_update": conv_update,
    "fused_kda_gate": kda_gate,
}


def named(op: str, returned: Any, arguments: dict[str, Any]) -> Results:
    """What an op returned, by the names of its definition's results."""
    if isinstance(returned, Tensor):
        return {"gate": returned}
    second = "final_state"
    if op == "causal_conv1d_update":
        second = "cache"
    elif "ssm_state_indices" in arguments:
        second = "pool"
    names = ("y" if op.startswith("causal_conv1d") else "o", second, "h")
    return {name: x for name, x in zip(names, returned, strict=False) if x is not None}
