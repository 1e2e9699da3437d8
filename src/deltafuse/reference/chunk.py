"""The chunked form of the delta rule, forward and backward, in torch.

    [w | u] = M [beta k exp(P) | beta v]                   M = (I + L)^-1, L = beta A_kk, one unit-triangular solve
    v' = u - w S                                           serial over chunks
    S <- exp(P_C) S + (k exp(suffix))^T v'                 serial over chunks
    o  = s (q exp(P)) S + s A_qk v'

with P, the suffix sums and the products A from `decay`. A window of 8 chunks of every sequence is in memory at a time. The forward
pass keeps
the states at some borders of chunks (`DeltaOptions.keep_every`); the backward pass goes through the windows in reverse, computes
each again from its first state, and keeps no tape, so memory is linear in the number of tokens with a small factor.

X counts (chunk, value head) pairs, C the rows of a chunk. Everything is float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import inputs
from .decay import decayed_scores, decayed_scores_backward
from .layout import ChunkLayout, chunk_layouts
from .options import CHUNKS_A_WINDOW, GATE_LOG, DeltaOptions, ceil_div, compute_dtype, kept_states


@dataclass(slots=True)
class DeltaTensors:
    """The tensors of one call as the caller passes them (`g` `[B, T, HV, K]` or `[B, T, HV]`)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


@dataclass(frozen=True)
class DeltaGradients:
    """Gradients in the dtypes and shapes of the inputs; those of absent inputs are None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    a_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor


class _Tokens:
    """A `[B, T, heads, D]` tensor of which windows of chunks are read as `[chunks, heads, C, D]`, or that is written so.

    A written one has one row more than there are tokens; rows past a sequence's end go there.
    """

    def __init__(self, flat: Tensor, call: _Chunked, dtype: torch.dtype) -> None:
        self.flat, self.call, self.dtype = flat, call, dtype

    @classmethod
    def of(cls, x: Tensor, call: _Chunked) -> _Tokens:
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        return cls(x.reshape(call.layout.total_tokens, *x.shape[2:]), call, call.dtype)

    @classmethod
    def empty(cls, like: Tensor, call: _Chunked) -> _Tokens:
        tail = like.shape[2:] if like.dim() == 4 else (*like.shape[2:], 1)
        # Rows that no sequence covers (a packed call may end before T) stay 0.
        return cls(like.new_zeros(call.layout.total_tokens + 1, *tail), call, like.dtype)

    def read(self, first: int, last: int) -> Tensor:
        layout = self.call.layout
        rows = layout.tokens[first:last]
        pad = any(layout.padded[first:last])
        index = rows.clamp(max=layout.total_tokens - 1) if pad else rows
        picked = self.flat.index_select(0, index.flatten()).unflatten(0, rows.shape)
        if pad:
            picked = picked.masked_fill_((rows == layout.total_tokens)[:, :, None, None], 0)
        out = torch.empty_like(picked.transpose(1, 2), dtype=self.dtype, memory_format=torch.contiguous_format)
        return out.copy_(picked.transpose(1, 2))

    def write(self, first: int, last: int, x: Tensor) -> None:
        rows = self.call.layout.tokens[first:last].flatten()
        self.flat.index_copy_(0, rows, x.transpose(1, 2).flatten(0, 1).to(self.dtype))

    def result(self, shape: torch.Size) -> Tensor:
        return self.flat[:-1].reshape(shape)


@dataclass(frozen=True)
class _Window:
    """What both passes compute of a window; `[X, C, ...]` unless it says otherwise."""

    q: Tensor  # [chunks, H, C, K] normalised
    k: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    qx: Tensor  # q and k of each value head
    kx: Tensor
    v: Tensor
    raw: Tensor  # [chunks, HV, C, Kg]
    beta: Tensor  # [X, C, 1]
    g: Tensor  # log decays, [X, C, Kg]
    prefix: Tensor
    suffix: Tensor
    scores: Tensor  # [X, 2, C, C]
    aqk: Tensor  # with the scale
    inverse: Tensor  # M = (I + L)^-1
    wu: Tensor  # [w | u]
    qg: Tensor  # s q exp(P)
    kg: Tensor  # k exp(suffix)
    decay: Tensor  # exp(P_C), [X, Kg, 1]


class _Chunked:
    """One call: its tables (`layout`: those of the sequences at work), and what its windows share."""

    def __init__(self, tensors: DeltaTensors, options: DeltaOptions) -> None:
        q, v = tensors.q, tensors.v
        self.tensors, self.options = tensors, options
        self.dtype = compute_dtype(q.dtype)
        self.batch, self.total = q.shape[0], q.shape[1]
        self.heads, self.key_dim = q.shape[2:]
        self.value_heads, self.value_dim = v.shape[2:]
        self.layouts = chunk_layouts(self.batch, self.total, tensors.cu_seqlens, options.chunk_size, q.device)
        self.layout = self.layouts[0]
        self.readers = {name: _Tokens.of(getattr(tensors, name), self) for name in ("q", "k", "v", "g", "beta")}
        self.a_log = None if tensors.a_log is None else tensors.a_log.to(self.dtype).view(-1, 1, 1)
        self.dt_bias = None
        if tensors.dt_bias is not None:
            self.dt_bias = tensors.dt_bias.to(self.dtype).view(self.value_heads, 1, -1)

    # States: `[N, HV, K, V]` in the caller's layout and order outside, `[rank, HV, K, V]` in the compute dtype inside.

    def state_in(self, state: Tensor | None) -> Tensor:
        if state is None:
            return self.new_states(self.layout.order.numel())
        state = state.transpose(-1, -2) if self.options.state_v_first else state
        return state.index_select(0, self.layout.order).to(self.dtype)

    def new_states(self, count: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = (count, self.value_heads, self.key_dim, self.value_dim)
        return self.tensors.q.new_zeros(shape, dtype=dtype or self.dtype)

    def state_out(self, states: Tensor) -> Tensor:
        return states.transpose(-1, -2).contiguous() if self.options.state_v_first else states

    def groups(self) -> Iterator[ChunkLayout]:
        """Every layout in turn as the one at work."""
        for layout in self.layouts:
            self.layout = layout
            yield layout

    def windows(self) -> list[range]:
        """Steps of every window; each but the first starts where a state is kept."""
        every, steps = self.options.keep_every, self.layout.steps
        width = CHUNKS_A_WINDOW if every == 1 else every
        return [range(s, min(s + width, steps)) for s in range(0, steps, width)]

    def span(self, steps: range) -> tuple[int, int]:
        return self.layout.offsets[steps.start], self.layout.offsets[steps.stop]

    def kept_rows(self) -> dict[int, slice]:
        """Where the states at the start of a step lie among the kept ones."""
        rows, first = {}, 0
        for step in range(self.options.keep_every, self.layout.steps, self.options.keep_every):
            rows[step] = slice(first, first + self.layout.active(step))
            first += self.layout.active(step)
        return rows

    def expand(self, x: Tensor) -> Tensor:
        """`[chunks, H, C, K]` to `[X, C, K]`: value head `hv` reads head `hv // (HV / H)`."""
        return x.repeat_interleave(self.value_heads // self.heads, dim=1).flatten(0, 1)

    def reduce(self, dx: Tensor) -> Tensor:
        """The gradient of `expand`."""
        group = self.value_heads // self.heads
        return dx.unflatten(0, (-1, self.heads, group)).sum(2)

    def gate_padding(self, first: int, last: int) -> Tensor | None:
        """True at rows past a sequence's end, `[chunks, 1, C, 1]`: a raw gate of 0 there is not a decay of 1."""
        if not any(self.layout.padded[first:last]):
            return None
        return (self.layout.tokens[first:last] == self.layout.total_tokens)[:, None, :, None]

    def prepare(self, steps: range) -> _Window:
        first, last = self.span(steps)
        options = self.options
        q, k, v, raw, beta = (self.readers[name].read(first, last) for name in ("q", "k", "v", "g", "beta"))
        q_rstd = k_rstd = None
        if options.l2norm:
            q, q_rstd = inputs.l2norm(q)
            k, k_rstd = inputs.l2norm(k)
        g = inputs.gate(raw, self.a_log, self.dt_bias, options)
        padding = self.gate_padding(first, last)
        if padding is not None:
            g = g.masked_fill(padding, 0)
        beta = inputs.beta(beta, options).flatten(0, 1)
        qx, kx, v = self.expand(q), self.expand(k), v.flatten(0, 1)
        g = g.flatten(0, 1)
        scores, prefix, suffix = decayed_scores(qx, kx, g)
        identity = torch.eye(self.layout.chunk, dtype=self.dtype, device=scores.device).expand_as(scores[:, 1])
        inverse = torch.linalg.solve_triangular(scores[:, 1] * beta, identity, upper=False, unitriangular=True)
        wu = torch.bmm(inverse, torch.cat([beta * kx * prefix, beta * v], -1))
        return _Window(
            q, k, q_rstd, k_rstd, qx, kx, v, raw, beta, g, prefix, suffix, scores,
            aqk=scores[:, 0] * options.scale,
            inverse=inverse,
            wu=wu,
            qg=qx * prefix * options.scale,
            kg=kx * suffix,
            decay=prefix[:, -1].unsqueeze(-1),
        )  # fmt: skip

    def scan(self, window: _Window, steps: range, state: Tensor) -> tuple[Tensor, Tensor]:
        """States at the start of every chunk and `v'`, `[X, ...]`; `state` becomes the one after the window."""
        w, u = window.wu.split([self.key_dim, self.value_dim], -1)
        v_new = torch.empty_like(window.v)
        h = state.new_empty(v_new.shape[0], self.key_dim, self.value_dim)
        heads, base = self.value_heads, self.layout.offsets[steps.start]
        kg = window.kg.transpose(1, 2)
        for step in steps:
            n = self.layout.active(step) * heads
            at = slice((self.layout.offsets[step] - base) * heads, (self.layout.offsets[step] - base) * heads + n)
            s = state.flatten(0, 1)[:n]
            h[at] = s
            # v' = u - w S
            torch.baddbmm(u[at], w[at], s, alpha=-1, out=v_new[at])
            # S <- exp(P_C) S + kg^T v'
            s.mul_(window.decay[at]).baddbmm_(kg[at], v_new[at])
        return h, v_new

    def scan_backward(self, window: _Window, steps: range, do: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """`dv'` and the gradient of the state that leaves each chunk; `dstate` becomes that of the window's first state."""
        w = window.wu[..., : self.key_dim].transpose(1, 2)
        dv_new = torch.bmm(window.aqk.transpose(1, 2), do)
        from_outputs = torch.bmm(window.qg.transpose(1, 2), do)
        dh_out = torch.empty_like(from_outputs)
        heads, base = self.value_heads, self.layout.offsets[steps.start]
        for step in reversed(steps):
            n = self.layout.active(step) * heads
            at = slice((self.layout.offsets[step] - base) * heads, (self.layout.offsets[step] - base) * heads + n)
            ds = dstate.flatten(0, 1)[:n]
            dh_out[at] = ds
            # dv' = A_qk^T do + kg dS'
            dv_new[at].baddbmm_(window.kg[at], ds)
            # dS = exp(P_C) dS' + (s q exp(P))^T do - w^T dv'
            ds.mul_(window.decay[at]).add_(from_outputs[at]).baddbmm_(w[at], dv_new[at], alpha=-1)
        return dv_new, dh_out

    def prepare_backward(
        self, window: _Window, h: Tensor, v_new: Tensor, do: Tensor, dv_new: Tensor, dh_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of qx, kx, v, beta and of the gate's logarithm, `[X, C, ...]`."""
        key, scale = self.key_dim, self.options.scale
        per_key = window.g.shape[-1] == key
        h_t = h.transpose(1, 2)
        dqg = torch.bmm(do, h_t)
        dkg = torch.bmm(v_new, dh_out.transpose(1, 2))
        # dR = M^T [dw | du],   dw = -dv' S^T,  du = dv';   dL = -dR [w | u]^T
        dwu = torch.cat([-torch.bmm(dv_new, h_t), dv_new], -1)
        dright = torch.bmm(window.inverse.transpose(1, 2), dwu)
        dright_k, dright_v = dright.split([key, self.value_dim], -1)
        dscores = torch.empty_like(window.scores)
        torch.bmm(do, v_new.transpose(1, 2), out=dscores[:, 0])
        dlower = torch.bmm(dright, window.wu.transpose(1, 2)).neg_()
        k_prefix = window.kx * window.prefix
        dbeta = (dlower * window.scores[:, 1]).sum(-1, keepdim=True)
        dbeta += (dright_k * k_prefix).sum(-1, keepdim=True) + (dright_v * window.v).sum(-1, keepdim=True)
        dscores[:, 0] *= scale
        torch.mul(dlower, window.beta, out=dscores[:, 1])
        dq = dqg * window.prefix * scale
        dk = dright_k * window.beta * window.prefix
        dprefix = window.qg * dqg + dk * window.kx
        dk.addcmul_(dkg, window.suffix)
        dsuffix = window.kg * dkg
        # The chunk's total also decays the state.
        dtotal = (dh_out * h).sum(-1) if per_key else (dh_out * h).sum((-1, -2)).unsqueeze(-1)
        if not per_key:
            dprefix, dsuffix = dprefix.sum(-1, keepdim=True), dsuffix.sum(-1, keepdim=True)
        dprefix[:, -1] += dtotal * window.decay.squeeze(-1)
        dg = decayed_scores_backward(window.qx, window.kx, window.g, dscores, dq, dk, dprefix, dsuffix)
        return dq, dk, dright_v * window.beta, dbeta, dg


def chunk_forward(
    tensors: DeltaTensors, options: DeltaOptions, *, keep: bool = False, intermediate: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`(o, final state, kept states, states at the start of every chunk)`; the last two are None unless asked for.

    o has q's dtype, the final state `[N, HV, K, V]` and the kept ones are float32 (float64); the intermediate states `[B, NT, HV,
    K, V]` have q's dtype.
    """
    call = _Chunked(tensors, options)
    out = _Tokens.empty(tensors.v, call)
    final = call.new_states(tensors.sequences)
    kept = call.new_states(kept_states(call.batch, call.total, options)) if keep else None
    states = None
    if intermediate:
        chunks = ceil_div(call.total, options.chunk_size)
        if tensors.cu_seqlens is not None:
            chunks = sum(layout.offsets[-1] for layout in call.layouts)
        states = call.new_states(call.batch * chunks, tensors.q.dtype)
    for layout in call.groups():
        state = call.state_in(tensors.initial_state)
        rows = call.kept_rows()
        for steps in call.windows():
            first, last = call.span(steps)
            window = call.prepare(steps)
            h, v_new = call.scan(window, steps, state)
            per_chunk = h.unflatten(0, (-1, call.value_heads))
            for step in steps:
                if kept is not None and step in rows:
                    at = layout.offsets[step] - first
                    kept[rows[step]] = per_chunk[at : at + layout.active(step)]
            if states is not None:
                states[layout.sequence_major[first:last]] = per_chunk.to(states.dtype)
            o = torch.bmm(window.qg, h).baddbmm_(window.aqk, v_new)
            out.write(first, last, o.unflatten(0, (-1, call.value_heads)))
        final.index_copy_(0, layout.order, state)
    if states is not None:
        states = call.state_out(states.view(call.batch, chunks, *states.shape[1:]))
    return out.result(tensors.v.shape), call.state_out(final), kept, states


def chunk_backward(
    tensors: DeltaTensors, options: DeltaOptions, kept: Tensor, do: Tensor, dfinal: Tensor | None
) -> DeltaGradients:
    """Gradients of everything that `chunk_forward` read, from those of its output and final state."""
    call = _Chunked(tensors, options)
    heads = call.value_heads
    reader = _Tokens.of(do, call)
    grads = {name: _Tokens.empty(getattr(tensors, name), call) for name in ("q", "k", "v", "g", "beta")}
    da_log = None if call.a_log is None else torch.zeros_like(call.a_log)
    ddt_bias = None if call.dt_bias is None else torch.zeros_like(call.dt_bias)
    dinitial = call.new_states(tensors.sequences)
    for layout in call.groups():
        dstate = call.state_in(dfinal)
        initial = call.state_in(tensors.initial_state)
        rows = call.kept_rows()
        for steps in reversed(call.windows()):
            first, last = call.span(steps)
            window = call.prepare(steps)
            active = call.layout.active(steps.start)
            state = kept[rows[steps.start]].clone() if steps.start else initial[:active].clone()
            if options.keep_every == 1:
                later = [kept[rows[step]] for step in steps[1:]]
                h = torch.cat([state, *later]).flatten(0, 1)
                w, u = window.wu.split([call.key_dim, call.value_dim], -1)
                v_new = torch.baddbmm(u, w, h, alpha=-1)
            else:
                h, v_new = call.scan(window, steps, state)
            do_window = reader.read(first, last).flatten(0, 1)
            dv_new, dh_out = call.scan_backward(window, steps, do_window, dstate)
            dqx, dkx, dv, dbeta, dg = call.prepare_backward(window, h, v_new, do_window, dv_new, dh_out)
            dq, dk = call.reduce(dqx), call.reduce(dkx)
            if window.q_rstd is not None and window.k_rstd is not None:
                dq = inputs.l2norm_backward(window.q, window.q_rstd, dq)
                dk = inputs.l2norm_backward(window.k, window.k_rstd, dk)
            dg = dg.unflatten(0, (-1, heads))
            padding = call.gate_padding(first, last)
            if padding is not None:
                dg = dg.masked_fill(padding, 0)
            draw, da_elements = inputs.gate_backward(window.raw, call.a_log, call.dt_bias, dg, options)
            if da_log is not None and da_elements is not None:
                da_log += da_elements.sum((0, 2, 3)).view_as(da_log)
            if ddt_bias is not None and options.gate != GATE_LOG:
                ddt_bias += draw.sum((0, 2)).view_as(ddt_bias)
            dbeta = inputs.beta_backward(window.beta, dbeta, options)
            for name, grad in zip(("q", "k", "v", "g", "beta"), (dq, dk, dv, draw, dbeta), strict=True):
                grad = grad if name in "qkg" else grad.unflatten(0, (-1, heads))
                grads[name].write(first, last, grad)
        dinitial.index_copy_(0, layout.order, dstate)
    shapes = {name: getattr(tensors, name).shape for name in grads}
    return DeltaGradients(
        **{name: tokens.result(shapes[name]) for name, tokens in grads.items()},
        a_log=None if tensors.a_log is None or da_log is None else da_log.view_as(tensors.a_log).to(tensors.a_log),
        dt_bias=None
        if tensors.dt_bias is None or ddt_bias is None
        else ddt_bias.view_as(tensors.dt_bias).to(tensors.dt_bias),
        initial_state=call.state_out(dinitial),
    )
