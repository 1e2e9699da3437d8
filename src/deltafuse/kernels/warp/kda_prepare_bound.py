"""`kda_prepare`, how much of a state a chunk leaves: a bound on the norm of its map of states, as a base-2 logarithm.

A token maps the state by (I - beta k k^T) diag(2^g), whose spectral norm is at most max(1, |1 - beta |k|^2|) 2^(max_d g_d). A chunk's bound
is the sum of the logarithms of these over its tokens: rigorous for any finite input, infinite where a column grows. With normed keys and
a sigmoid times at most 2 the first factor is 1.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, const_expr

from ...tile.lanes import least_lane, sum_lanes
from ...tile.ptx import fma, fmax, fmin, load_shared, log2, minus_abs, reciprocal, select, store_global
from ..config import CHUNK, EPSILON


class ChunkBound:
    """What `KdaPrepare` does with `bound`."""

    @property
    def bound_grows(self):
        """Whether beta and keys may make a state grow."""
        config = self.config
        return config.bound and not (config.l2norm and config.beta_sigmoid)

    def least_of_row(self, values, row, least, lane):
        """Row `row`'s least forgetting over the half's columns, in lane `row` of `least`; values are those of `Gate.value`.

        For gate "log" a value's negative; where a column grows, something below 0.
        """
        if self.config.gate == "log":
            # A difference, since -0 would count as negative.
            values = [Float32(0.0) - x for x in values]
        x = values[0] if len(values) == 1 else fmin(*values)
        return select(lane == row, least_lane(x), least)

    @cute.jit
    def write_bound(self, sAll, outer, to, lane):
        """The sum over all rows to global memory; one warp, two rows a lane."""
        sign = const_expr(-1.0 if self.config.gate == "log" else 1.0)
        total = Float32(0.0)
        for i in (0, 32):
            row = lane + i
            halves = [load_shared(sAll + self.at_least + row * 4, h * CHUNK * 4, 1)[0] for h in range(2)]
            least = fmin(*halves)
            # Below 0 it is some column's that grows, not the extreme one's.
            own = select(least < 0.0, Float32(float("inf")), outer * sign * least)
            if const_expr(self.bound_grows):
                own = own + self.growth(sAll, row)
            total = total + own
        total = sum_lanes(total)
        if lane == 0:
            store_global(to, 0, [total])

    def growth(self, sAll, row):
        """log2 max(1, |1 - beta |k|^2|) of a row, k as the products have it."""
        halves = load_shared(sAll + self.at_norms + row * 16 + 8, 0, 2)
        square = halves[0] + halves[1]
        if self.config.l2norm:
            square = square * reciprocal(square + EPSILON)
        (beta,) = load_shared(sAll + self.at_beta + row * 4, 0, 1)
        return log2(fmax(-minus_abs(fma(-beta, square, Float32(1.0))), 1.0))
