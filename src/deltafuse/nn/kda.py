"""Kimi Delta Attention as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kda import chunk_kda, fused_recurrent_kda, kda_layer_token
from .conv import ShortConvolution
from .layer import DeltaRuleLayer, Gates, inverse_softplus_steps, log_uniform_decay
from .norm import RMSNormGated


def _runs_as_written(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of a module does what its class says and nothing beside: no subclass, no parametrization, no hooks."""
    return type(module) is kind and not (module._forward_hooks or module._forward_pre_hooks)


class KimiDeltaAttention(DeltaRuleLayer):
    """Kimi Delta Attention: a gated delta rule whose decay is of every head, token and key channel.

    q, k and v are projections through a short convolution; `g = -exp(A_log) * softplus(f_proj(x) + dt_bias)` decays
    the state, `beta = sigmoid(b_proj(x))` is the step; the output of `deltafuse.chunk_kda` is normed by head, gated
    by `sigmoid(g_proj(x))` and projected back.

    Args:
        hidden_size: of input and output.
        expand_v: V of a head over `head_dim`.
        head_dim: K of a head.
        num_heads: heads of q and k.
        num_v_heads: heads of v, gate and beta, a multiple of `num_heads`; None: as many.
        mode: the op without autograd, "chunk" or "fused_recurrent"; with autograd it is "chunk".
        use_short_conv: whether q, k and v pass short convolutions (else SiLU alone).
        allow_neg_eigval: beta reaches 2 instead of 1.
        safe_gate: handed to `chunk_kda`; `A_log` then starts at 0.
        lower_bound: the gate becomes `lower_bound * sigmoid(exp(A_log) * (f_proj(x) + dt_bias))`.
        conv_size, conv_bias: of the convolutions.
        layer_idx: this layer's place in a cache.
        norm_eps: of the output norm.

    Parameters have the names and shapes of flash-linear-attention's layer of this name, so that its checkpoints load.

    Raises:
        ValueError: an unknown `mode`, or head sizes that do not fit.
    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(
            hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, use_short_conv, allow_neg_eigval, conv_size,
            conv_bias, layer_idx,
        )  # fmt: skip
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound
        self._add_convolutions()

        gate_dim = self.num_v_heads * self.head_k_dim
        self.f_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, gate_dim, bias=False)
        )
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(
            torch.zeros(self.num_v_heads) if safe_gate else log_uniform_decay(1, 16, self.num_v_heads)
        )
        self.dt_bias = nn.Parameter(inverse_softplus_steps(gate_dim))
        # Trainers that group parameters look for this mark.
        self.A_log._no_weight_decay = True  # type: ignore[attr-defined]
        self.dt_bias._no_weight_decay = True  # type: ignore[attr-defined]
        self.g_proj = nn.Sequential(
            nn.Linear(hidden_size, self.head_v_dim, bias=False), nn.Linear(self.head_v_dim, self.value_dim, bias=True)
        )
        self.o_norm = RMSNormGated(self.head_v_dim, activation="sigmoid", eps=norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _gates(self, hidden_states: torch.Tensor) -> Gates:
        return (
            self._heads(self.f_proj(hidden_states), self.head_k_dim),
            self.b_proj(hidden_states),
            self._heads(self.g_proj(hidden_states), self.head_v_dim),
        )

    def _next_token(
        self,
        projected: list[torch.Tensor],
        gates: Gates,
        conv_state: tuple[torch.Tensor, ...],
        recurrent_state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        as_built = all(_runs_as_written(x, ShortConvolution) and x.runs_by_default for x in convs)
        if not (as_built and _runs_as_written(self.o_norm, RMSNormGated)) or self.o_norm.activation != "sigmoid":
            return None
        q, k, v = self._by_heads(projected)
        f, beta, z = gates
        assert z is not None
        biases = [x.bias for x in convs if x.bias is not None]
        return kda_layer_token(
            q, k, v, f, beta, z, caches=conv_state, weights=[x.weight.squeeze(1) for x in convs], biases=biases or None,
            norm=self.o_norm.weight, eps=self.o_norm.eps, A_log=self.A_log, dt_bias=self.dt_bias,
            initial_state=recurrent_state, allow_neg_eigval=self.allow_neg_eigval, lower_bound=self.lower_bound,
        )  # fmt: skip

    def _recurrence(
        self,
        recurrent: bool,
        gates: Gates,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        op = fused_recurrent_kda if recurrent else chunk_kda
        if not recurrent:
            options["safe_gate"] = self.safe_gate
        o, state, *_ = op(
            q,
            k,
            v,
            gates[0],
            gates[1],
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            **options,
        )
        return o, state

    def _normed(self, o: torch.Tensor, gates: Gates) -> torch.Tensor:
        return self.o_norm(o, gates[2])
