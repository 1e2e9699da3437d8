"""The kernels of a checked call, for `warmup` and for objects that are built ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..problem import DeltaProblem
from ..problem_conv import ConvProblem
from ..runtime.probe import Environment
from . import conv_cute, decode_cute, kda_backward, kda_cute


def kernels_of(problem: Any, env: Environment) -> Iterable[tuple[str, Any]]:
    """Names and configs of the kernels that a call of this package's own kernels launches, its gradients' among them where it has any.

    Tensors are taken to be contiguous: a convolution of a slice that starts elsewhere than at 16 bytes has other kernels.
    """
    if isinstance(problem, ConvProblem):
        return _conv(problem)
    assert isinstance(problem, DeltaProblem)
    if problem.op.startswith("fused_recurrent"):
        return decode_cute.kernels_of(problem)
    return _chunk(problem, env)


def _chunk(p: DeltaProblem, env: Environment) -> Iterator[tuple[str, Any]]:
    kernels = kda_cute.kernels_of(p, env.sms)
    if env.arch in kda_cute.BLACKWELL:
        yield from kda_cute.blackwell_kernels(p, kernels.prepare, env.arch)
        return
    yield from kernels
    for grad_state in (False, True)[: 1 + p.output_final_state] if p.requires_grad else ():
        backward = kda_backward.plan_backward(
            kernels, kda_cute.padded(p.value_dim, kda_cute.VALUE_DIMS), grouped=p.heads != p.value_heads,
            initial=p.has_initial_state, grad_state=grad_state, grad_initial=p.has_initial_state, v_first=p.state_v_first,
        )  # fmt: skip
        yield from backward.launched(kernels.prepare.inverse)


def _conv(p: ConvProblem) -> Iterable[tuple[str, Any]]:
    dtypes = iter(p.dtypes)

    def meta(present: bool, *shape: int) -> Tensor | None:
        return torch.empty(shape, dtype=next(dtypes), device="meta") if present else None

    whole = (p.batch, p.tokens, p.channels) if p.op == "causal_conv1d" else (p.batch, p.channels)
    x, weight = meta(True, *whole), meta(True, p.channels, p.width)
    bias, residual = meta(p.has_bias, p.channels), meta(p.has_residual, *whole)
    state = meta(p.has_initial_state, p.sequences, p.channels, p.width)
    assert x is not None
    assert weight is not None
    if p.op == "causal_conv1d_update":
        assert state is not None
        return conv_cute.update_kernels_of(x, state, weight, bias, residual, p.silu)
    bounds = None if p.bounds_dtype is None else torch.empty(p.sequences + 1, dtype=p.bounds_dtype, device="meta")
    needs = (True, True, p.has_bias, p.has_initial_state) if p.requires_grad else ()
    return conv_cute.kernels_of(x, weight, bias, residual, state, bounds, p.silu, p.output_final_state, needs)
