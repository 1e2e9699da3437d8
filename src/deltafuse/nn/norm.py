"""RMS norms, computed in at least float32 whatever the input's dtype."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..problem import fail

ACTIVATIONS = ("swish", "silu", "sigmoid")


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm of `x` over its last dimension, in the wider of float32 and its dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight.to(wide.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm: `y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Args:
        hidden_size: size of the last dimension.
        elementwise_affine: whether there is a `weight` `[hidden_size]`, ones at first.
        eps: added to the mean square.
        device, dtype: of the weight.

    The output has the dtype of `x`; the arithmetic is float32 (float64 for float64 input).
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        if elementwise_affine:
            self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, elementwise_affine={self.weight is not None}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` `[..., hidden_size]`."""
        return _rms_norm(x, self.weight, self.eps).to(x.dtype)


class RMSNormGated(RMSNorm):
    """RMS norm with an output gate: `y = x / sqrt(mean(x^2) + eps) * weight * act(g)`.

    Args:
        hidden_size, elementwise_affine, eps, device, dtype: as for `RMSNorm`.
        activation: `act`, "swish" or "silu" (`g * sigmoid(g)`), or "sigmoid".

    Raises:
        ValueError: another `activation`.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, elementwise_affine, eps, device, dtype)
        if activation not in ACTIVATIONS:
            fail("activation", repr(activation), ", ".join(map(repr, ACTIVATIONS)))
        self.activation = activation

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise `x` `[..., hidden_size]` (plus `residual`, if given) and gate it by `g` of the same shape.

        With `prenorm` the sum `x + residual` is returned too, in the dtype of `residual` (of `x` without one; float32
        with `residual_in_fp32` and no `residual`).
        """
        dtype = x.dtype
        if residual is not None:
            wide = torch.promote_types(torch.promote_types(dtype, residual.dtype), torch.float32)
            x = x.to(wide) + residual.to(wide)
        y = _rms_norm(x, self.weight, self.eps)
        gate = g.to(y.dtype)
        y = y * (torch.sigmoid(gate) if self.activation == "sigmoid" else F.silu(gate))
        y = y.to(dtype)
        if not prenorm:
            return y
        if residual is not None:
            return y, x.to(residual.dtype)
        return y, x.to(torch.promote_types(dtype, torch.float32)) if residual_in_fp32 else x
