"""Kimi Delta Attention (KDA): one decay per key dimension.

Source: Kimi Linear, arXiv 2510.26692. Signatures are those of flash-linear-attention 0.6.0, with `backend` beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import delta_rule, layer
from .autograd.gate import kda_gate
from .backends import plan
from .problem import parse_delta, parse_gate


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    r"""Kimi Delta Attention over whole sequences, differentiable in every tensor.

    For each head and token, with a state `S` `[K, V]` that starts at `initial_state` or 0:

        S <- diag(exp(g)) S;   S <- S + beta k (v - k^T S)^T;   o = scale q^T S

    Args:
        q, k: queries and keys `[B, T, H, K]`; float16, bfloat16, float32 or float64. Value head `hv` reads head `hv // (HV / H)`.
        v: values `[B, T, HV, V]`, in q's dtype; HV is a multiple of H.
        g: logarithms of the decay (natural, at most 0) `[B, T, HV, K]`, any float dtype; with `use_gate_in_kernel` the raw gate, and then
            `g = -exp(A_log) softplus(g + dt_bias)`, or with `lower_bound` `g = lower_bound sigmoid(exp(A_log) (g + dt_bias))`.
        beta: `[B, T, HV]`, any float dtype; with `use_beta_sigmoid_in_kernel` it goes through a sigmoid, times 2 with `allow_neg_eigval`.
        scale: defaults to `K ** -0.5`.
        initial_state: `[N, HV, K, V]` float32 (or float64 with float64 q), N the number of sequences; `[N, HV, V, K]` with `state_v_first`.
        output_final_state: return the state after the last token of every sequence.
        use_qk_l2norm_in_kernel: divide q and k by `sqrt(sum(x^2) + 1e-6)` first.
        safe_gate: a promise that the gate is within `[lower_bound, 0)`, `lower_bound` in `[-5, 0)`. Results never depend on it.
        lower_bound: a negative number; also without `safe_gate` it chooses the bounded gate.
        disable_recompute: keep for the backward pass what it would compute again (states of chunks; on this package's kernels
            operands too): more memory, less work.
        return_intermediate_states: return a third result, the states at the start of every chunk, `[B, NT, HV, K, V]` in q's dtype
            (NT counts the chunks of all sequences where they are packed). Only without gradients.
        state_v_first: all states are `[..., V, K]`. `transpose_state_layout` is its old name.
        cu_seqlens: bounds `[N + 1]` of sequences packed along T, int32 or int64; then B = 1. Empty sequences pass their state through.
        cu_seqlens_cpu: the same on the CPU; with it no device is waited for.
        cp_context: fla's context parallel; runs in backend `"fla"` alone.
        use_graph: `cu_seqlens` may be padded by empty sequences and end before T; `max_num_seqs` then checks its length.
        A_log, dt_bias: the gate's parameters, HV and HV * K elements.
        chunk_size: 32 or 64; no result but the intermediate states depends on it beyond rounding.
        backend: `"auto"`, `"cute"`, `"fla"` or `"torch"`; None asks `set_backend`.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in q's dtype; the final state `[N, HV, K, V]` float32 (float64), or None.
        With `return_intermediate_states` `(o, final_state, h)`.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value: it is named, with what it got and what is allowed.
        UnsupportedError: the backend that was asked for cannot take the call.
    """
    call = parse_delta(
        "chunk_kda", q, k, v, g, beta, per_key=True, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, safe_gate=safe_gate, lower_bound=lower_bound, disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states, state_v_first=state_v_first,
        transpose_state_layout=transpose_state_layout, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        cp_context=cp_context, use_graph=use_graph, max_num_seqs=max_num_seqs, A_log=A_log, dt_bias=dt_bias,
        chunk_size=chunk_size,
    )  # fmt: skip
    return delta_rule.chunk(call, plan(call.problem, call.problem.device, backend))


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Kimi Delta Attention token by token: decoding, and the serving form on a pool of states.

    The equation and the arguments are `chunk_kda`'s; beta may also be `[B, T, HV, V]`, and states may have any float dtype.
    Gradients are `chunk_kda`'s
    (none with a beta per value, nor in the serving form).

    Args:
        inplace_final_state: write the final states into `initial_state` and return it.
        ssm_state_indices: with it `initial_state` is a pool `[slots, HV, K, V]`. `[N]`: the slot of every sequence, read first and written
            after its last token. `[N, S]`: token t's state goes to slot `[n, t]`, and the sequence starts from slot
            `[n, num_accepted_tokens[n] - 1]` (`[n, 0]` without). -1 is no slot: a sequence that starts from it gives 0 and
            leaves the pool alone. Any strides. Without `inplace_final_state` the pool is not written; the state after every token
            is returned,
            `[B * T, HV, K, V]` in the pool's dtype.
        num_accepted_tokens: `[N]`, 1 to S: how many of the last call's tokens were accepted (speculative decoding).
        out: a contiguous `[B, T, HV, V]` tensor that takes o.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in q's dtype; the final state `[N, HV, K, V]` (float32, or float64 with float64 q; in
        place: the
        tensor given), or None.

    Raises:
        ValueError, UnsupportedError: as `chunk_kda`; slots outside the pool; in place or with `out` where gradients are wanted or tangents
            carried.
    """
    call = parse_delta(
        "fused_recurrent_kda", q, k, v, g, beta, per_key=True, recurrent=True, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first,
        transpose_state_layout=transpose_state_layout, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, A_log=A_log,
        dt_bias=dt_bias, inplace_final_state=inplace_final_state, ssm_state_indices=ssm_state_indices,
        num_accepted_tokens=num_accepted_tokens, out=out,
    )  # fmt: skip
    return delta_rule.recurrent(call, plan(call.problem, call.problem.device, backend))


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    backend: str | None = None,
) -> Tensor:
    r"""The KDA gate alone: the logarithm of the decay from its raw value, differentiable.

        g = -exp(A_log) softplus(g + dt_bias),   with lower_bound b:  g = b sigmoid(exp(A_log) (g + dt_bias))

    Args:
        g: raw gate `[..., HV, K]`, any float dtype.
        A_log: HV elements; may be None with `lower_bound`: `b sigmoid(g + dt_bias)`.
        dt_bias: HV * K elements, or None.
        lower_bound: a negative number, or None.
        output_dtype: of the result; the arithmetic is float32 (float64 for float64 g).

    Returns:
        a tensor of g's shape in `output_dtype`.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value.
        UnsupportedError: the backend that was asked for cannot take the call.
    """
    call = parse_gate(g, A_log, dt_bias, lower_bound, output_dtype)
    return kda_gate(call, plan(call.problem, call.problem.device, backend))


def kda_layer_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    z: Tensor,
    *,
    caches: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    norm: Tensor | None,
    eps: float,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor] | None:
    r"""One token of every sequence of a KDA layer, from its projections to what its output projection takes, in one launch.

        q, k, v <- silu(bias + sum_w weight[w] cache[w]);   o = fused_recurrent_kda(q, k, v, g, beta);   y = rms_norm(o) sigmoid(z)

    Not an op of its own: it has neither gradients nor another implementation, and is what `deltafuse.nn` asks before it goes op by op.

    Args:
        q, k, v: projections `[N, 1, H, K]`, `[N, 1, HV, V]` that are not convolved yet.
        g, beta, A_log, dt_bias, initial_state, allow_neg_eigval, lower_bound: as `fused_recurrent_kda` takes them, raw; the state is
            `[N, HV, V, K]`.
        z: the output gate's projection `[N, 1, HV, V]`.
        caches, weights, biases: of the convolutions of q, k and v, `[N, D, W]`, `[D, W]` and `[D]`; the caches are moved on in place.
        norm, eps: the output norm's weight `[V]` and what it adds to the mean square.

    Returns:
        `(y [N, 1, HV * V], final state in float32)`; None, and nothing is changed, where another backend than `"cute"` would run
        `fused_recurrent_kda`, or the kernel does not take these sizes, dtypes or strides.

    Raises:
        ValueError, UnsupportedError: as `fused_recurrent_kda`.
    """
    call = parse_delta(
        "fused_recurrent_kda", q, k, v, g, beta, per_key=True, recurrent=True, initial_state=initial_state,
        output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=allow_neg_eigval, lower_bound=lower_bound, state_v_first=True, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    return layer.token(call, plan(call.problem, call.problem.device, None), z, caches, weights, biases, norm, eps)
