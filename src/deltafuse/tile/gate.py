"""Gates: from raw numbers to the base-2 logarithm of a token's decay, and beta.

log       g / ln 2
softplus  -exp(A_log) softplus(g + dt_bias) / ln 2
bounded   lower_bound sigmoid(exp(A_log) (g + dt_bias)) / ln 2
"""

# mypy: ignore-errors

from __future__ import annotations

import math

from cutlass import Float32

from .ptx import at_least, at_most, exp2, fma, fmax, fmin, minus_abs, reciprocal, select

LOG2E = math.log2(math.e)
LEAST = -256.0
"""The least logarithm of a token's decay where they are summed."""
LARGE = 2.0**120
"""Short of infinity, which times 0 is not 0."""
SERIES = (1.4426829, -0.72042614, 0.4691741, -0.30303621, 0.14603285, -0.034435887)
"""Of log2(1 + t) / t, t from 0 to 1: to 9e-6 of its value."""


def softplus2(y):
    """log2(1 + 2^y), with full relative accuracy where it is small."""
    t = exp2(minus_abs(y))
    quotient = Float32(SERIES[-1])
    for c in reversed(SERIES[:-1]):
        quotient = fma(t, quotient, c)
    return fma(t, quotient, fmax(y, 0.0))


def sigmoid2(y):
    """1 / (1 + 2^-y)."""
    return reciprocal(exp2(-y) + 1.0)


def sigmoid(x):
    return sigmoid2(x * LOG2E)


class Gate:
    """One head's gate at one column: `log2_decay(raw, on)`, which is 0 where `on` is 0.

    `a_log` (None: exp(A_log) is 1), `dt_bias` (None: 0) and `lower_bound` are fp32 scalars.
    """

    def __init__(self, kind, a_log, dt_bias, lower_bound):
        self.kind = kind
        if kind == "log":
            self.outer = Float32(LOG2E)
            return
        rate = Float32(1.0) if a_log is None else exp2(a_log * LOG2E)
        if kind == "softplus":
            self.inner, self.outer = Float32(LOG2E), -rate
        else:
            # Not 0, so that minus infinity stays a way to say no decay.
            self.inner, self.outer = fmax(rate * LOG2E, 2.0**-120), lower_bound * LOG2E
        self.shift = Float32(0.0) if dt_bias is None else dt_bias * self.inner

    def factor(self, on):
        """The factor of a row's `value`: the same for all columns."""
        return select(on, self.outer, 0.0)

    def value(self, raw):
        """log2_decay / factor."""
        if self.kind == "log":
            return raw
        y = fma(raw, self.inner, self.shift)
        return softplus2(y) if self.kind == "softplus" else sigmoid2(y)


class SummedGate(Gate):
    """A gate whose logarithms are summed over tokens.

    A decay of less than 2^-256 is taken for that: it is 0 as well wherever fp32 meets it, but the sums keep the digits of the others.
    """

    def __init__(self, kind, a_log, dt_bias, lower_bound):
        super().__init__(kind, a_log, dt_bias, lower_bound)
        if kind == "softplus":
            self.outer = at_least(self.outer, -LARGE)
            self.most = fmin(LEAST * reciprocal(self.outer), LARGE)
        elif kind == "bounded":
            self.outer = at_least(self.outer, LEAST)

    def value(self, raw):
        """log2_decay / factor."""
        if self.kind == "log":
            return at_least(raw, LEAST / LOG2E)
        value = super().value(raw)
        return at_most(value, self.most) if self.kind == "softplus" else value
