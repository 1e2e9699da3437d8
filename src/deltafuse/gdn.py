"""Gated DeltaNet (GDN): one decay per head and token.

Source: Gated Delta Networks, arXiv 2412.06464. Signatures are those of flash-linear-attention 0.6.0, with `backend` beside them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .autograd import delta_rule
from .backends import plan
from .problem import parse_delta, recurrent_gates


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Gated delta rule over whole sequences, differentiable in every tensor.

    For each head and token, with a state `S` `[K, V]` that starts at `initial_state` or 0:

        S <- exp(g) S;   S <- S + beta k (v - k^T S)^T;   o = scale q^T S

    Args:
        q, k: queries and keys `[B, T, H, K]`; float16, bfloat16, float32 or float64. Value head `hv` reads head `hv // (HV / H)`.
        v: values `[B, T, HV, V]`, in q's dtype; HV is a multiple of H.
        g: logarithm of the decay (natural, at most 0) `[B, T, HV]`, any float dtype; with `use_gate_in_kernel` the raw gate, and then
            `g = -exp(A_log) softplus(g + dt_bias)`.
        beta: `[B, T, HV]`, any float dtype; with `use_beta_sigmoid_in_kernel` it goes through a sigmoid, times 2 with `allow_neg_eigval`.
        scale: defaults to `K ** -0.5`.
        initial_state: `[N, HV, K, V]`, any float dtype, N the number of sequences; `[N, HV, V, K]` with `state_v_first`.
        output_final_state: return the state after the last token of every sequence.
        use_qk_l2norm_in_kernel: divide q and k by `sqrt(sum(x^2) + 1e-6)` first.
        state_v_first: all states are `[..., V, K]`. `transpose_state_layout` is its old name.
        cu_seqlens: bounds `[N + 1]` of sequences packed along T, int32 or int64; then B = 1. Empty sequences pass their state through.
        cu_seqlens_cpu: the same on the CPU; with it no device is waited for.
        chunk_indices: fla's own hint; accepted, not needed.
        cp_context: fla's context parallel; runs in backend `"fla"` alone.
        A_log, dt_bias: the gate's parameters, HV elements each; dt_bias may be None.
        chunk_size: 16, 32 or 64; no result depends on it beyond rounding.
        backend: `"auto"`, `"cute"`, `"fla"` or `"torch"`; None asks `set_backend`.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in q's dtype; the final state `[N, HV, K, V]` float32 (float64), or None.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value: it is named, with what it got and what is allowed.
        UnsupportedError: the backend that was asked for cannot take the call.
    """
    call = parse_delta(
        "chunk_gated_delta_rule", q, k, v, g, beta, per_key=False, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, transpose_state_layout=transpose_state_layout,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, A_log=A_log, dt_bias=dt_bias,
        chunk_size=chunk_size, chunk_sizes=(16, 32, 64),
    )  # fmt: skip
    o, state, *_ = delta_rule.chunk(call, plan(call.problem, call.problem.device, backend))
    return o, state


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Gated delta rule token by token: decoding.

    The equation and the arguments are `chunk_gated_delta_rule`'s, and

        S <- exp(g) diag(exp(gk)) S diag(exp(gv))

    Args:
        g, gk, gv: logarithms of the decay per head `[B, T, HV]`, per key dimension `[B, T, HV, K]`, per value dimension
            `[B, T, HV, V]`; each may be None. `use_gate_in_kernel` makes a raw gate of g alone.
        beta: `[B, T, HV]` or `[B, T, HV, V]`; None is 1.
        initial_state: as in `chunk_gated_delta_rule`, in any float dtype.

    Returns:
        `(o, final_state)`: o `[B, T, HV, V]` in q's dtype; the final state `[N, HV, K, V]` float32 (float64), or None. Gradients are the
        chunked op's; with `gv` or a beta per value there are none (NotImplementedError in the backward pass).

    Raises:
        ValueError, UnsupportedError: as `chunk_gated_delta_rule`.
    """
    g, per_key, beta, use_gate_in_kernel = recurrent_gates(q, v, g, gk, beta, use_gate_in_kernel, A_log, dt_bias)
    call = parse_delta(
        "fused_recurrent_gated_delta_rule", q, k, v, g, beta, per_key=per_key, recurrent=True, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, transpose_state_layout=transpose_state_layout,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, A_log=A_log, dt_bias=dt_bias, gv=gv,
    )  # fmt: skip
    return delta_rule.recurrent(call, plan(call.problem, call.problem.device, backend))
