"""Calls handed on to an installed flash-linear-attention, with the arguments that it takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..problem import DeltaCall, GateCall, check_bounds
from ..problem_conv import ConvCall, ConvUpdateCall


def _common(call: DeltaCall) -> dict[str, Any]:
    p = call.problem
    arguments: dict[str, Any] = dict(
        q=call.q, k=call.k, v=call.v, g=call.g, beta=call.beta, scale=p.scale, initial_state=call.initial_state,
        output_final_state=p.output_final_state, use_qk_l2norm_in_kernel=p.l2norm,
        use_beta_sigmoid_in_kernel=p.beta_sigmoid, allow_neg_eigval=p.neg_eigval, state_v_first=p.state_v_first,
        cu_seqlens=call.cu_seqlens,
    )  # fmt: skip
    if p.gate != "log":
        arguments.update(use_gate_in_kernel=True, A_log=call.a_log, dt_bias=call.dt_bias)
    if p.gate == "bounded":
        arguments.update(lower_bound=p.lower_bound)
    return arguments


def _check_bounds(call: DeltaCall, may_wait: bool) -> None:
    """fla takes bounds as they are. Those on the device alone are looked at where the call may wait for it, as none in a CUDA graph may."""
    p = call.problem
    bounds = call.cu_seqlens if call.cu_seqlens_cpu is None and may_wait else call.cu_seqlens_cpu
    if bounds is not None and not p.context_parallel:
        check_bounds(bounds, p.tokens, may_end_early=p.use_graph)


def chunk(call: DeltaCall) -> Any:
    """`fla.ops.kda.chunk_kda` or `fla.ops.gated_delta_rule.chunk_gated_delta_rule`."""
    p = call.problem
    _check_bounds(call, may_wait=not p.use_graph)
    arguments = _common(call)
    arguments.update(cu_seqlens_cpu=call.cu_seqlens_cpu, chunk_size=p.chunk_size, cp_context=call.cp_context)
    if not p.per_key:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule(**arguments)
    from fla.ops.kda import chunk_kda

    arguments.update(
        safe_gate=p.safe_gate, disable_recompute=p.disable_recompute, return_intermediate_states=p.intermediate_states,
        use_graph=p.use_graph,
    )  # fmt: skip
    return chunk_kda(**arguments)


def recurrent(call: DeltaCall) -> tuple[Tensor, Tensor | None]:
    """fla's recurrent ops; the serving form is its inner `fused_recurrent_kda_fwd`."""
    p = call.problem
    _check_bounds(call, may_wait=False)
    arguments = _common(call)
    if p.op == "fused_recurrent_kda":
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        o, state = fused_recurrent_kda_fwd(
            **arguments, inplace_final_state=p.inplace, ssm_state_indices=call.state_indices,
            num_accepted_tokens=call.accepted, out=call.out,
        )  # fmt: skip
        return o, state
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    if p.per_key:
        arguments["gk"] = arguments.pop("g")
    return fused_recurrent_gated_delta_rule(**arguments, gv=call.gv)


def kda_gate(call: GateCall) -> Tensor:
    """`fla.ops.kda.gate.fused_kda_gate`."""
    from fla.ops.kda.gate import fused_kda_gate

    p = call.problem
    bound = p.lower_bound if p.gate == "bounded" else None
    return fused_kda_gate(call.g, call.a_log, call.dt_bias, bound, p.output_dtype)


def conv(call: ConvCall) -> tuple[Tensor, Tensor | None]:
    """`fla.modules.causal_conv1d.causal_conv1d`."""
    from fla.modules.causal_conv1d import causal_conv1d

    p = call.problem
    y, state = causal_conv1d(
        call.x, call.weight, call.bias, call.residual, call.initial_state, p.output_final_state,
        "silu" if p.silu else None, cu_seqlens=call.cu_seqlens, cu_seqlens_cpu=call.cu_seqlens_cpu,
        chunk_indices=call.chunk_indices, cp_context=call.cp_context,
    )  # fmt: skip
    return y, state


def conv_update(call: ConvUpdateCall) -> Tensor:
    """`fla.modules.causal_conv1d.causal_conv1d_update`."""
    from fla.modules.causal_conv1d import causal_conv1d_update

    activation = "silu" if call.problem.silu else None
    y, _ = causal_conv1d_update(call.x, call.cache, call.residual, call.weight, call.bias, activation)
    return y
