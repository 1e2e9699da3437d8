"""What comes before the delta rule: L2 norm, gate, beta; each with its gradient.

    l2norm    x / sqrt(sum(x^2) + 1e-6)
    softplus  g = -exp(A_log) * softplus(raw + dt_bias)
    bounded   g = b * sigmoid(exp(A_log) * (raw + dt_bias))        A_log absent: b * sigmoid(raw + dt_bias)
    beta      limit * sigmoid(raw)

Heads are the third axis from the right of q, k, g (`[..., HV, C, K]`) in the chunked form and the second in the others; the
parameters come already shaped to broadcast.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .options import GATE_BOUNDED, GATE_LOG, L2NORM_EPS, DeltaOptions

# Where softplus(x) becomes x: torch's default of 20 is off by 2e-9, which float64 sees.
SOFTPLUS_THRESHOLD = 40.0


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised rows and `1 / norm`."""
    rstd = torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
    return x * rstd, rstd


def l2norm_backward(y: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """`dx = (dy - y (y . dy)) / norm`."""
    return (dy - y * (y * dy).sum(-1, keepdim=True)) * rstd


def gate(raw: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, options: DeltaOptions) -> Tensor:
    """The logarithm of the decay, from what the caller passed."""
    if options.gate == GATE_LOG:
        return raw
    z = raw if dt_bias is None else raw + dt_bias
    if options.gate == GATE_BOUNDED:
        return options.lower_bound * torch.sigmoid(z if a_log is None else a_log.exp() * z)
    assert a_log is not None
    return -a_log.exp() * F.softplus(z, threshold=SOFTPLUS_THRESHOLD)


def gate_backward(
    raw: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, dg: Tensor, options: DeltaOptions
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the raw value (that of `dt_bias` is its sum) and, per element, of `A_log`."""
    if options.gate == GATE_LOG:
        return dg, None
    z = raw if dt_bias is None else raw + dt_bias
    if options.gate == GATE_BOUNDED:
        rate = None if a_log is None else a_log.exp()
        s = torch.sigmoid(z if rate is None else rate * z)
        dz = options.lower_bound * s * (1 - s) * dg
        if rate is None:
            return dz, None
        dz = dz * rate
        return dz, dz * z
    assert a_log is not None
    rate = -a_log.exp()
    return rate * torch.sigmoid(z) * dg, rate * F.softplus(z, threshold=SOFTPLUS_THRESHOLD) * dg


def beta(raw: Tensor, options: DeltaOptions) -> Tensor:
    return options.beta_limit * torch.sigmoid(raw) if options.beta_sigmoid else raw


def beta_backward(value: Tensor, dbeta: Tensor, options: DeltaOptions) -> Tensor:
    """`value` is what `beta` returned."""
    return dbeta * value * (1 - value / options.beta_limit) if options.beta_sigmoid else dbeta
