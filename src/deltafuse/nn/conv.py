"""Depthwise causal convolution over a few tokens, as a layer with a state."""

from __future__ import annotations

import torch
from torch import nn

from ..conv import causal_conv1d, causal_conv1d_update
from ..problem import describe, fail, tangents


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution: `y[t] = act(bias + sum_w weight[w] x[t - W + 1 + w]) + residual[t]`.

    Args:
        hidden_size: number of channels D.
        kernel_size: number of tokens W that an output sees, its own included.
        bias: whether there is a bias `[D]`.
        activation: "silu" or "swish" (the same), or None.
        backend: of the op, as in `deltafuse.causal_conv1d`.
        device, dtype: of the parameters; `weight` is `[D, 1, W]`.

    Raises:
        ValueError: another `activation`; `mask` together with `cu_seqlens`.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden_size, hidden_size, kernel_size, padding=kernel_size - 1, groups=hidden_size, bias=bias,
            device=device, dtype=dtype,
        )  # fmt: skip
        if activation not in ("silu", "swish", None):
            fail("activation", repr(activation), "'silu', 'swish', None")
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = backend

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.hidden_size}, kernel_size={self.kernel_size[0]}, bias={bias}, activation={self.activation}"

    @property
    def runs_by_default(self) -> bool:
        """Whether it has SiLU and leaves the choice of the backend to the package."""
        return self.activation in ("silu", "swish") and self.backend is None

    @property
    def state_size(self) -> int:
        """Number of values that the state of one sequence holds."""
        return self.hidden_size * self.kernel_size[0]

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Convolve `x` `[B, T, D]`.

        Args:
            x: input; B is 1 with `cu_seqlens`.
            residual: `[B, T, D]`, added after the activation.
            mask: `[B, T]`, 0 where a token counts as zeros.
            cache: the state `[N, D, W]` to start from: the last W inputs of each of the N sequences. Where T is 1,
                without autograd (forwards too) and without `cu_seqlens`, it is updated in place.
            output_final_state: whether to return the state after the last token.
            cu_seqlens: `[N + 1]`, bounds of packed sequences.
            cu_seqlens_cpu: the same on the CPU.

        Returns:
            The output `[B, T, D]`, and the state `[N, D, W]` or None.
        """
        if mask is not None:
            if cu_seqlens is not None:
                fail("mask", describe(mask), "None with `cu_seqlens`: packed sequences have no padding")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        weight = self.weight.squeeze(1)
        plain = not torch.is_grad_enabled() and not tangents(x, residual, cache, weight, self.bias)
        if x.shape[1] == 1 and cu_seqlens is None and plain:
            if cache is None:
                cache = x.new_zeros(x.shape[0], self.hidden_size, self.kernel_size[0])
            y, state = causal_conv1d_update(
                x, cache, residual, weight, self.bias, self.activation, backend=self.backend
            )
            return y, state if output_final_state else None
        return causal_conv1d(
            x,
            weight,
            bias=self.bias,
            residual=residual,
            initial_state=cache,
            output_final_state=output_final_state,
            activation=self.activation,
            backend=self.backend,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
        )
