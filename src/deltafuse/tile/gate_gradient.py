"""Derivatives of the gates in `gate` and of the sigmoid of beta, in natural logarithms; 0 where a gate is saturated.

softplus  d/dx -e^A softplus(x)    = -e^A sigmoid(x)                     d/dA = g
bounded   d/dx b sigmoid(e^A x)    = b e^A s (1 - s)                     d/dA = x d/dx
"""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import Float32

from .gate import LARGE, LOG2E
from .ptx import at_most, exp2, fma, minus_abs, reciprocal


def sigmoid_slope2(y):
    """s (1 - s) of s = 1 / (1 + 2^-y)."""
    e = exp2(minus_abs(y))
    w = reciprocal(e + 1.0)
    return e * w * w


def sigmoid_slope(x):
    return sigmoid_slope2(x * LOG2E)


class GateGradient:
    """One head's gate ("softplus" or "bounded") at one column; parameters as in `gate.Gate`."""

    def __init__(self, kind, a_log, dt_bias, lower_bound):
        self.kind = kind
        rate = Float32(1.0) if a_log is None else at_most(exp2(a_log * LOG2E), LARGE)
        self.inner = Float32(LOG2E) if kind == "softplus" else rate * LOG2E
        self.outer = -rate if kind == "softplus" else lower_bound * rate
        self.shift = Float32(0.0) if dt_bias is None else dt_bias * self.inner
        # d gate / d A_log = (d gate / d raw) y of_a_log, of the bounded gate: x = y / inner
        self.of_a_log = reciprocal(self.inner)

    def slope(self, raw):
        """(d gate / d raw / `outer`, y) with y = `inner` (raw + dt_bias)."""
        y = fma(raw, self.inner, self.shift)
        if self.kind == "softplus":
            return reciprocal(exp2(-y) + 1.0), y
        return sigmoid_slope2(y), y
