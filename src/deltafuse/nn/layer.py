"""What the delta-rule layers share: projections, short convolutions, padding, cache and the choice of the op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..problem import fail
from .cache import LayerCache
from .conv import ShortConvolution
from .padding import repad, unpad

MODES = ("chunk", "fused_recurrent")
Gates = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Raw decay and beta of every token, and the output gate by head, if there is one."""
# Up to this many tokens a call without autograd goes token by token: shorter than building a chunk.
RECURRENT_TOKENS = 64


def log_uniform_decay(low: float, high: float, size: int) -> torch.Tensor:
    """`A_log`: the logarithm of `size` values that are uniform in `[low, high)`."""
    return torch.log(torch.empty(size, dtype=torch.float32).uniform_(low, high))


def inverse_softplus_steps(size: int) -> torch.Tensor:
    """`dt_bias`: `size` values whose softplus is log-uniform in `[0.001, 0.1)`."""
    low, high = math.log(0.001), math.log(0.1)
    dt = torch.exp(torch.rand(size, dtype=torch.float32) * (high - low) + low).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


class DeltaRuleLayer(nn.Module):
    """Base of `KimiDeltaAttention` and `GatedDeltaNet`: everything but the gate, the op and the output gate."""

    o_proj: nn.Linear

    def __init__(
        self,
        hidden_size: int,
        expand_v: float,
        head_dim: int,
        num_heads: int,
        num_v_heads: int | None,
        mode: str,
        use_short_conv: bool,
        allow_neg_eigval: bool,
        conv_size: int,
        conv_bias: bool,
        layer_idx: int | None,
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        if mode not in MODES:
            fail("mode", repr(mode), ", ".join(map(repr, MODES)))
        sizes = {"hidden_size": hidden_size, "head_dim": head_dim, "num_heads": num_heads, "conv_size": conv_size}
        for name, size in sizes.items():
            if size < 1:
                fail(name, size, "1 or more")
        if num_v_heads % num_heads != 0:
            fail("num_v_heads", num_v_heads, f"a multiple of num_heads = {num_heads}")
        head_v_dim = round(head_dim * expand_v)
        if head_v_dim < 1 or not math.isclose(head_dim * expand_v, head_v_dim, rel_tol=1e-5):
            fail("expand_v", expand_v, f"a factor that makes a whole number of head_dim = {head_dim}")
        self.mode = mode
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.head_dim = self.head_k_dim = head_dim
        self.head_v_dim = head_v_dim
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.key_dim = num_heads * head_dim
        self.value_dim = num_v_heads * head_v_dim
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.layer_idx = layer_idx

        self.q_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)

    def _add_convolutions(self) -> None:
        if self.use_short_conv:
            self.q_conv1d = ShortConvolution(self.key_dim, self.conv_size, bias=self.conv_bias)
            self.k_conv1d = ShortConvolution(self.key_dim, self.conv_size, bias=self.conv_bias)
            self.v_conv1d = ShortConvolution(self.value_dim, self.conv_size, bias=self.conv_bias)

    def _gates(self, hidden_states: torch.Tensor) -> Gates:
        raise NotImplementedError

    def _next_token(
        self,
        projected: list[torch.Tensor],
        gates: Gates,
        conv_state: tuple[torch.Tensor, ...],
        recurrent_state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A single token without autograd, mask or packing in one go: o `[B, 1, HV * V]` after its norm and the new state, the
        convolutions' states moved on. None where that cannot be done; then nothing is changed."""
        return None

    def _recurrence(
        self,
        recurrent: bool,
        gates: Gates,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The op on q, k `[B, T, H, K]` and v `[B, T, HV, V]`."""
        raise NotImplementedError

    def _normed(self, o: torch.Tensor, gates: Gates) -> torch.Tensor:
        """The output norm of o `[B, T, HV, V]`, with the output gate if there is one."""
        raise NotImplementedError

    def _heads(self, x: torch.Tensor, size: int) -> torch.Tensor:
        return x.unflatten(-1, (-1, size))

    def _by_heads(self, projected: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
        return [self._heads(x, size) for x, size in zip(projected, sizes, strict=True)]

    def _goes_token_by_token(self, length: int) -> bool:
        if self.training and self.mode != "chunk":
            fail("mode", repr(self.mode), "'chunk' in training")
        if torch.is_grad_enabled():
            return False
        return self.mode == "fused_recurrent" or (length <= RECURRENT_TOKENS and not self.training)

    def _cached(self, past_key_values: LayerCache | None) -> dict[str, Any] | None:
        if past_key_values is None:
            return None
        if self.layer_idx is None:
            fail("layer_idx", None, "the place of this layer in the cache, where `past_key_values` is given")
        return past_key_values[self.layer_idx] if len(past_key_values) > self.layer_idx else None

    def _convolved(
        self,
        projected: list[torch.Tensor],
        states: tuple[torch.Tensor, ...] | None,
        use_cache: bool,
        cu_seqlens: torch.Tensor | None,
        cu_seqlens_cpu: torch.Tensor | None,
    ) -> tuple[list[torch.Tensor], tuple[torch.Tensor | None, ...] | None]:
        """q, k and v `[B, T, D]` after their convolutions (or SiLU alone), and the convolutions' states."""
        if not self.use_short_conv:
            return [F.silu(x) for x in projected], None
        if states is not None and not use_cache:
            # A single token updates its state in place, which only a call that keeps the state may do.
            states = tuple(state.clone() for state in states)
        results = [
            conv(x, cache=state, output_final_state=use_cache, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
            for conv, x, state in zip(
                (self.q_conv1d, self.k_conv1d, self.v_conv1d), projected, states or (None,) * 3, strict=True
            )
        ]
        return [y for y, _ in results], tuple(state for _, state in results)

    def _mixed(
        self,
        recurrent: bool,
        gates: Gates,
        convolved: list[torch.Tensor],
        state: torch.Tensor | None,
        use_cache: bool,
        cu_seqlens: torch.Tensor | None,
        cu_seqlens_cpu: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """o `[B, T, HV * V]` after its norm, and the final state."""
        options: dict[str, Any] = {
            "initial_state": state,
            "output_final_state": use_cache,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "state_v_first": True,
            "cu_seqlens": cu_seqlens,
        }
        if not recurrent:
            options["cu_seqlens_cpu"] = cu_seqlens_cpu
        q, k, v = self._by_heads(convolved)
        o, state = self._recurrence(recurrent, gates, q, k, v, **options)
        return self._normed(o, gates).flatten(2), state

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: LayerCache | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        *,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None, LayerCache | None]:
        """Mix the tokens of `hidden_states` `[B, T, hidden_size]`.

        Args:
            hidden_states: input; B is 1 with `cu_seqlens`.
            attention_mask: `[B, L]`, `L >= T`, nonzero for a token and 0 for padding, left or right; the output is 0
                at padding. Not read where `cu_seqlens` is given.
            past_key_values: states of earlier calls (`nn.Cache` or a cache of flash-linear-attention).
            use_cache: whether to write the states after this call to `past_key_values`.
            output_attentions: there are no attention weights; the second result is None either way.
            cu_seqlens: `[N + 1]`, bounds of packed sequences.
            cu_seqlens_cpu: the same on the CPU, which spares a GPU a synchronisation.
            unused: whatever else a model hands to its layers (positions, for example) is not needed.

        Returns:
            The output `[B, T, hidden_size]`, None, and `past_key_values`.

        Raises:
            ValueError: a mask that is not `[B, L]`; a cache without `layer_idx`; training with `mode` not "chunk".
        """
        batch, length, _ = hidden_states.shape
        recurrent = self._goes_token_by_token(length)
        last = self._cached(past_key_values) or {}
        use_cache = bool(use_cache)

        indices = None
        if cu_seqlens is None:
            cu_seqlens_cpu = None
            if attention_mask is not None:
                hidden_states, indices, cu_seqlens = unpad(hidden_states, attention_mask)

        projected = [self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)]
        gates = self._gates(hidden_states)
        conv_state, recurrent_state = last.get("conv_state"), last.get("recurrent_state")
        token = None
        if (
            recurrent
            and length == 1
            and cu_seqlens is None
            and use_cache
            and conv_state
            and recurrent_state is not None
        ):
            token = self._next_token(projected, gates, conv_state, recurrent_state)
        if token is not None:
            o, recurrent_state = token
        else:
            convolved, conv_state = self._convolved(projected, conv_state, use_cache, cu_seqlens, cu_seqlens_cpu)
            o, recurrent_state = self._mixed(
                recurrent, gates, convolved, recurrent_state, use_cache, cu_seqlens, cu_seqlens_cpu
            )

        if past_key_values is not None and use_cache:
            past_key_values.update(
                layer_idx=self.layer_idx,  # type: ignore[arg-type]
                recurrent_state=recurrent_state,
                conv_state=conv_state,
                offset=length,
            )
        o = self.o_proj(o)
        if indices is not None:
            o = repad(o, indices, batch, length)
        return o, None, past_key_values
