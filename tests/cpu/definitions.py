"""The ops token by token in float64, written from their equations alone: what every other form is judged by.

Nothing of the package is imported. Everything is a plain torch expression, so autograd gives the gradients. Arguments have the names
that the ops give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Defined:
    """`o` `[B, T, HV, V]`; `final_state` `[N, HV, K, V]` and `states` (after every token) `[B, T, HV, K, V]`, or V-first."""

    o: Tensor
    final_state: Tensor
    states: Tensor


def kda_gate(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """`-exp(A_log) softplus(g + dt_bias)`, or `b sigmoid(exp(A_log) (g + dt_bias))`; g `[..., HV, K]`."""
    x = g.double()
    if dt_bias is not None:
        x = x + dt_bias.double().reshape(x.shape[-2:])
    rate = 1.0 if A_log is None else A_log.double().reshape(-1, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    assert A_log is not None
    return -rate * torch.logaddexp(x, torch.zeros_like(x))


def _l2norm(x: Tensor) -> Tensor:
    return x / ((x * x).sum(-1, keepdim=True) + 1e-6).sqrt()


def bounds(tokens: int, cu_seqlens: Tensor | Sequence[int]) -> list[tuple[int, int]]:
    """First token and the one after the last of every packed sequence."""
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    assert ends[-1] <= tokens
    return list(pairwise(ends))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Defined:
    """KDA (g `[B, T, HV, K]`) and GDN (g `[B, T, HV]`), one token after the other."""
    q, k, v = q.double(), k.double(), v.double()
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q), _l2norm(k)
    group = value_heads // heads
    reads = [head // group for head in range(value_heads)]
    q, k = q[:, :, reads], k[:, :, reads]

    decay = q.new_zeros(batch, tokens, value_heads, 1)
    if g is not None:
        raw = g.double() if g.dim() == 4 else g.double().unsqueeze(-1)
        decay = decay + (kda_gate(raw, A_log, dt_bias, lower_bound) if use_gate_in_kernel else raw)
    if gk is not None:
        decay = decay + gk.double()
    decay = decay.exp()
    value_decay = None if gv is None else gv.double().exp()

    b = q.new_ones(batch, tokens, value_heads) if beta is None else beta.double()
    if use_beta_sigmoid_in_kernel:
        b = torch.sigmoid(b) * (2 if allow_neg_eigval else 1)
    b = b if b.dim() == 4 else b.unsqueeze(-1)
    s = key_dim**-0.5 if scale is None else scale

    def sequence(rows: Any, state: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The tokens `rows` of every batch row: outputs, states after each, the last state."""
        outputs, states = [], []
        for t in rows:
            state = decay[:, t].unsqueeze(-1) * state
            if value_decay is not None:
                state = state * value_decay[:, t].unsqueeze(-2)
            predicted = (k[:, t].unsqueeze(-1) * state).sum(-2)
            state = state + k[:, t].unsqueeze(-1) * (b[:, t] * (v[:, t] - predicted)).unsqueeze(-2)
            outputs.append(s * (q[:, t].unsqueeze(-1) * state).sum(-2))
            states.append(state)
        return outputs, states, state

    spans = None if cu_seqlens is None else bounds(tokens, cu_seqlens)
    if initial_state is None:
        first = q.new_zeros(batch if spans is None else len(spans), value_heads, key_dim, value_dim)
    else:
        first = initial_state.double()
        first = first.transpose(-1, -2) if state_v_first else first

    outputs: list[Tensor] = []
    states: list[Tensor] = []
    if spans is None:
        outputs, states, final = sequence(range(tokens), first)
    else:
        finals = []
        for n, (start, end) in enumerate(spans):
            more_outputs, more_states, last = sequence(range(start, end), first[n : n + 1])
            outputs += more_outputs
            states += more_states
            finals.append(last)
        final = torch.cat(finals) if finals else first
    # Rows after the last sequence (a padded call) are 0.
    missing = tokens - len(outputs)
    outputs += [q.new_zeros(batch, value_heads, value_dim)] * missing
    states += [q.new_zeros(batch, value_heads, key_dim, value_dim)] * missing
    o = torch.stack(outputs, 1) if tokens else v.new_zeros(v.shape)
    every = torch.stack(states, 1) if tokens else first.new_zeros(batch, 0, *first.shape[1:])
    if state_v_first:
        final, every = final.transpose(-1, -2), every.transpose(-1, -2)
    return Defined(o, final, every)


def chunk_states(
    defined: Defined, initial_state: Tensor | None, chunk_size: int, cu_seqlens: Sequence[int] | None = None
) -> Tensor:
    """States at the start of every chunk, `[B, NT, HV, K, V]`; sequences start at `initial_state` or 0, each with chunks of its own."""
    tokens = defined.states.shape[1]
    spans = [(0, tokens)] if cu_seqlens is None else bounds(tokens, cu_seqlens)
    found = []
    for n, (start, end) in enumerate(spans):
        for row in range(start, end, chunk_size):
            if row > start:
                found.append(defined.states[:, row - 1])
            elif initial_state is None:
                found.append(torch.zeros_like(defined.states[:, 0]))
            else:
                found.append(initial_state.double() if cu_seqlens is None else initial_state[n : n + 1].double())
    return torch.stack(found, 1) if found else defined.states[:, :0]
