"""Every op against its definition in float64: the error of every result and gradient, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import deltafuse

from .cases import Case
from .definitions import DEFINITIONS, Results, named

BASE = {
    **dict.fromkeys(("o", "final_state", "h", "pool", "y", "cache", "gate"), 0.005),
    **dict.fromkeys(("dq", "dk", "dv", "dinitial_state", "dA_log", "ddt_bias"), 0.008),
    **dict.fromkeys(("dx", "dweight", "dbias", "dresidual"), 0.008),
    **dict.fromkeys(("dg", "dgk", "dbeta"), 0.02),
}
"""Allowed errors of float16 and bfloat16, as this field's libraries test for them."""

FLOAT32 = 1e-2
"""What float32 may have of that."""

FLOAT64 = 1e-10

TINY = 1e-30
"""Where every value of the definition is below this, only zeros are expected: float32 holds nothing else."""


FEW = 16
"""Gradients of fewer numbers than these, each a sum over all tokens and columns, whose terms cancel as they like: a number by itself may be
far smaller than what it is summed from. They are allowed what dg is.

With n numbers, errors and values both normal, the square of the relative error is as F(n, n) is about what it would be with many. BASE has
2.3 times what the kernels' dA_log has with many numbers (0.0035). Chance alone is above that in one of 15 cases with 4 numbers, one of 66
with 8 and one of 1,200 with 16; above what dg is allowed in one of 380 with 4."""


def tolerance(tensor: str, dtype: torch.dtype, count: int = FEW) -> float:
    """The allowed error of a result (`"o"`) or of a gradient (`"dq"`) of `count` numbers."""
    if tensor == "dA_log" and count < FEW:
        tensor = "dg"
    if dtype == torch.float64:
        return FLOAT64
    if dtype == torch.float32:
        return BASE[tensor] * FLOAT32
    return BASE[tensor]


def relative_error(got: Tensor, want: Tensor) -> float:
    """`RMS(got - want) / RMS(want)`; NaN where `got` has one, infinity for a wrong shape."""
    if got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = got.detach().to("cpu", torch.float64), want.detach().to("cpu", torch.float64)
    difference, size = ((x.square().mean().sqrt()) for x in (got - want, want))
    return float(difference / size.clamp(min=TINY))


@dataclass(frozen=True)
class Error:
    """One comparison."""

    tensor: str
    value: float
    allowed: float
    count: int = FEW
    """How many numbers were compared."""

    @property
    def passed(self) -> bool:
        return self.value <= self.allowed  # False for NaN


@dataclass(frozen=True)
class Outcome:
    """One case in one dtype. `refused`: why the backend does not take it; `broken`: the exception that ended it."""

    case: Case
    dtype: torch.dtype
    backend: str
    errors: tuple[Error, ...] = ()
    refused: str | None = None
    broken: str | None = None

    @property
    def passed(self) -> bool:
        return self.refused is None and self.broken is None and bool(self.errors) and all(e.passed for e in self.errors)


def _leaves(arguments: dict[str, Any], wanted: bool) -> dict[str, Tensor]:
    """The arguments that get a gradient; they are replaced by leaves of autograd, whatever views they are."""
    leaves = {}
    for name, x in arguments.items():
        if wanted and isinstance(x, Tensor) and x.is_floating_point():
            leaves[name] = arguments[name] = x.detach().requires_grad_()
    return leaves


def _exact(x: Any) -> Any:
    """A copy in float64 on the CPU: an op may write to its own arguments (a pool of states)."""
    if not isinstance(x, Tensor):
        return x
    return x.detach().to("cpu", torch.float64 if x.is_floating_point() else None, copy=True)


def _gradients(results: Results, leaves: dict[str, Tensor], weights: Results) -> Results:
    outputs = [results[name] for name in weights]
    weights_on = [weights[name].to(results[name].device, results[name].dtype) for name in weights]
    grads = torch.autograd.grad(outputs, list(leaves.values()), weights_on, materialize_grads=True)
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def compare(
    case: Case, arguments: dict[str, Any], dtype: torch.dtype, backend: str | None = None, seed: int = 0
) -> tuple[Error, ...]:
    """Run a case's op and its definition on the same values; raises what the op raises."""
    op = case.spec.op
    exact = {name: _exact(x) for name, x in arguments.items()}
    leaves, exact_leaves = _leaves(arguments, case.gradients), _leaves(exact, case.gradients)
    with torch.set_grad_enabled(case.gradients):
        got = named(op, getattr(deltafuse, op)(**arguments, backend=backend), arguments)
        want = DEFINITIONS[op](**exact)
    if got.keys() != want.keys():
        raise AssertionError(f"{op} returned {', '.join(got)}; expected: {', '.join(want)}")
    pairs = [(name, got[name], want[name]) for name in want]
    if case.gradients:
        # Random gradients of the results, the same for both: rounded as the op's results are.
        source = torch.Generator().manual_seed(seed + 1)
        weights = {name: torch.randn(x.shape, generator=source).to(got[name].dtype) for name, x in want.items()}
        grads, exact_grads = _gradients(got, leaves, weights), _gradients(want, exact_leaves, weights)
        pairs += [(name, grads[name], exact_grads[name]) for name in exact_grads]
    return tuple(Error(n, relative_error(x, y), tolerance(n, dtype, y.numel()), y.numel()) for n, x, y in pairs)


def run(case: Case, dtype: torch.dtype, device: torch.device, backend: str | None = None, seed: int = 0) -> Outcome:
    """`compare`, with what became of it: errors, a backend's refusal, or the exception that ended it."""
    name = backend or deltafuse.get_backend()
    try:
        arguments = case.spec.arguments(dtype, device, seed)
        _leaves(arguments, case.gradients)
        with torch.set_grad_enabled(case.gradients):
            name = deltafuse.explain(case.spec.op, **arguments, backend=backend).chosen or name
        return Outcome(case, dtype, name, compare(case, arguments, dtype, backend, seed))
    except deltafuse.UnsupportedError as error:
        return Outcome(case, dtype, name, refused=str(error))
    except Exception as error:
        return Outcome(case, dtype, name, broken=f"{type(error).__name__}: {error}")
