"""Gated DeltaNet as a layer."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .layer import DeltaRuleLayer, Gates, inverse_softplus_steps, log_uniform_decay
from .norm import RMSNorm, RMSNormGated


class GatedDeltaNet(DeltaRuleLayer):
    """Gated DeltaNet: a gated delta rule with one decay for every head and token.

    q, k and v are projections through a short convolution; `g = -exp(A_log) * softplus(a_proj(x) + dt_bias)` decays
    the state, `beta = sigmoid(b_proj(x))` is the step; the output of `deltafuse.chunk_gated_delta_rule` is normed by
    head, gated by `g_proj(x)` and projected back.

    Args:
        hidden_size: of input and output.
        expand_v: V of a head over `head_dim`.
        head_dim: K of a head.
        num_heads: heads of q and k.
        num_v_heads: heads of v, gate and beta, a multiple of `num_heads`; None: as many.
        mode: the op without autograd, "chunk" or "fused_recurrent"; with autograd it is "chunk".
        use_gate: whether there is an output gate.
        use_short_conv: whether q, k and v pass short convolutions (else SiLU alone).
        allow_neg_eigval: beta reaches 2 instead of 1.
        conv_size, conv_bias: of the convolutions.
        layer_idx: this layer's place in a cache.
        norm_eps: of the output norm.
        output_gate_activation: of the output gate, "swish", "silu" or "sigmoid".

    Parameters have the names and shapes of flash-linear-attention's layer of this name, so that its checkpoints load.

    Raises:
        ValueError: an unknown `mode` or `output_gate_activation`, or head sizes that do not fit.
    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
    ) -> None:
        super().__init__(
            hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, use_short_conv, allow_neg_eigval, conv_size,
            conv_bias, layer_idx,
        )  # fmt: skip
        self.use_gate = use_gate
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.b_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        self.A_log = nn.Parameter(log_uniform_decay(0, 16, self.num_v_heads))
        self.dt_bias = nn.Parameter(inverse_softplus_steps(self.num_v_heads))
        # Trainers that group parameters look for this mark.
        self.A_log._no_weight_decay = True  # type: ignore[attr-defined]
        self.dt_bias._no_weight_decay = True  # type: ignore[attr-defined]
        if not use_short_conv:
            warnings.warn(
                "GatedDeltaNet without its short convolutions (use_short_conv=False) learns worse", stacklevel=2
            )
        self._add_convolutions()
        self.o_norm: RMSNorm
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
            self.o_norm = RMSNormGated(self.head_v_dim, eps=norm_eps, activation=output_gate_activation)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def _gates(self, hidden_states: torch.Tensor) -> Gates:
        output = self._heads(self.g_proj(hidden_states), self.head_v_dim) if self.use_gate else None
        return self.a_proj(hidden_states), self.b_proj(hidden_states), output

    def _recurrence(
        self,
        recurrent: bool,
        gates: Gates,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        op = fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule
        return op(
            q,
            k,
            v,
            gates[0],
            beta=gates[1],
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            **options,
        )

    def _normed(self, o: torch.Tensor, gates: Gates) -> torch.Tensor:
        return self.o_norm(o) if gates[2] is None else self.o_norm(o, gates[2])
