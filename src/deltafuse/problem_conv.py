"""Arguments of the short convolution, parsed and checked once: see `problem`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .problem import (
    TANGENTS,
    Hashed,
    check_packing,
    check_tensor,
    check_written,
    describe,
    fail,
    recall,
    remember,
    tangents,
)

_FLA_BACKENDS = ("triton", "cuda", "mix")


@dataclass(frozen=True)
class ConvProblem(Hashed):
    """All of a convolution call but its tensors; `tokens` is 1 and `batch` the number of sequences in an update."""

    op: str
    device: torch.device
    batch: int
    tokens: int
    channels: int
    width: int
    sequences: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    silu: bool = False
    has_bias: bool = False
    has_residual: bool = False
    has_initial_state: bool = False
    output_final_state: bool = False
    packed: bool = False
    context_parallel: bool = False
    requires_grad: bool = False
    tangents: bool = False
    bounds_dtype: torch.dtype | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    """Of all tensors that are there."""

    __hash__ = Hashed.__hash__  # a frozen dataclass would make its own


class ConvCall(NamedTuple):
    """A checked `causal_conv1d` call: x and the residual as `[B, T, D]`, `shape` as the caller has them; `known` as in `DeltaCall`."""

    problem: ConvProblem
    known: dict[Any, Any]
    shape: torch.Size
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    chunk_indices: Tensor | None = None
    cp_context: Any = None


class ConvUpdateCall(NamedTuple):
    """A checked `causal_conv1d_update` call: x and the residual as `[N, D]`, `shape` as the caller has them; `known` as in `DeltaCall`."""

    problem: ConvProblem
    known: dict[Any, Any]
    shape: torch.Size
    x: Tensor
    cache: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None


def conv_backend(backend: str | None) -> str | None:
    """The backend asked for: a name of fla's own kernels asks for none of ours in particular."""
    return None if backend in _FLA_BACKENDS else backend


def _silu(activation: object) -> bool:
    if activation is not None and activation not in ("silu", "swish"):
        fail("activation", describe(activation), "None, 'silu' or 'swish'")
    return activation is not None


def _parameters(x: Tensor, weight: object, bias: object) -> tuple[Tensor, Tensor | None]:
    weight = check_tensor("weight", weight, device=x.device, axes="[D, W]")
    if weight.dim() != 2 or 0 in weight.shape:
        fail("weight", describe(weight), "shape [D, W] with D, W >= 1")
    if bias is None:
        return weight, None
    return weight, check_tensor("bias", bias, weight.shape[:1], device=x.device, axes="[D]")


def _residual(residual: object, x: Tensor, flat: Sequence[int], axes: str) -> Tensor | None:
    """The residual, which may have x's shape or the flattened one."""
    if residual is None:
        return None
    same = isinstance(residual, Tensor) and residual.shape == x.shape
    return check_tensor("residual", residual, x.shape if same else flat, device=x.device, axes=axes)


def _reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x if x.shape == shape else x.reshape(shape)


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def parse_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    cp_context: Any,
) -> ConvCall:
    """Check one call of `causal_conv1d`; one like an earlier one takes over the earlier one's problem."""
    args = (
        x,
        weight,
        bias,
        residual,
        initial_state,
        output_final_state,
        activation,
        cu_seqlens,
        cu_seqlens_cpu,
        cp_context,
    )
    form, problem, known = recall(("causal_conv1d",), args)
    if problem is None:
        problem = _check_conv(*args)
        if cp_context is None:  # what a context holds is not in the form
            remember(form, problem, known)
    flat = (*x.shape[:2], problem.channels)
    if cp_context is not None:  # the context says how the sequences lie, on all ranks together
        cu_seqlens = cu_seqlens_cpu = None
    return ConvCall(
        problem, known, x.shape, _reshaped(x, flat), weight, bias, None if residual is None else _reshaped(residual, flat),
        initial_state, cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context,
    )  # fmt: skip


def _check_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    activation: str | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: Any,
) -> ConvProblem:
    check_tensor("x", x, axes="[B, T, D]")
    weight, bias = _parameters(x, weight, bias)
    channels, width = weight.shape
    if x.dim() < 3 or math.prod(x.shape[2:]) != channels:
        fail("x", describe(x), f"shape [B, T, D], or [B, T, H, D / H], with D = {channels} as in weight")
    batch, tokens = x.shape[:2]
    if cp_context is not None:
        if initial_state is not None or output_final_state:
            fail("cp_context", "a context with states", "no `initial_state` and no `output_final_state`")
        cu_seqlens = cu_seqlens_cpu = None
    sequences = check_packing(cu_seqlens, cu_seqlens_cpu, batch, x.device)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, (sequences, channels, width), device=x.device, axes="[N, D, W]")
    residual = _residual(residual, x, (batch, tokens, channels), "[B, T, D]")
    return ConvProblem(
        op="causal_conv1d",
        device=x.device,
        batch=batch,
        tokens=tokens,
        channels=channels,
        width=width,
        sequences=sequences,
        dtype=x.dtype,
        weight_dtype=weight.dtype,
        silu=_silu(activation),
        has_bias=bias is not None,
        has_residual=residual is not None,
        has_initial_state=initial_state is not None,
        output_final_state=bool(output_final_state),
        packed=cu_seqlens is not None,
        context_parallel=cp_context is not None,
        requires_grad=_wants_gradients(x, weight, bias, residual, initial_state),
        tangents=tangents(x, weight, bias, residual, initial_state),
        bounds_dtype=None if cu_seqlens is None else cu_seqlens.dtype,
        dtypes=tuple(t.dtype for t in (x, weight, bias, residual, initial_state) if t is not None),
    )


def parse_conv_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> ConvUpdateCall:
    """Check one call of `causal_conv1d_update`; one like an earlier one takes over the earlier one's problem."""
    args = (x, cache, residual, weight, bias, activation)
    form, problem, known = recall(("causal_conv1d_update",), args)
    if problem is None:
        problem = _check_update(*args)
        remember(form, problem, known)
    flat = (problem.batch, problem.channels)
    return ConvUpdateCall(
        problem, known, x.shape, _reshaped(x, flat), cache, weight, bias,  # type: ignore[arg-type]
        None if residual is None else _reshaped(residual, flat),
    )  # fmt: skip


def _check_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> ConvProblem:
    check_tensor("x", x, axes="[N, D], [1, N, D] or [N, 1, D]")
    weight, bias = _parameters(x, weight, bias)
    channels, width = weight.shape
    rows = x.shape[:1] if x.dim() == 2 else x.shape[:2]
    if x.dim() < 2 or math.prod(x.shape[len(rows) :]) != channels or (len(rows) == 2 and 1 not in rows):
        fail("x", describe(x), f"shape [N, D], [1, N, D] or [N, 1, D], with D = {channels} as in weight")
    sequences = math.prod(rows)
    check_tensor("cache", cache, (sequences, channels, width), device=x.device, axes="[N, D, W]")
    check_written("cache", cache)
    residual = _residual(residual, x, (sequences, channels), "[N, D]")
    if tangents(x, cache, weight, bias, residual):
        fail(
            "cache",
            f"a call where {TANGENTS}",
            "calls without, as it is overwritten (use causal_conv1d with initial_state)",
        )
    if _wants_gradients(x, cache, weight, bias, residual):
        instead = "use torch.no_grad, or causal_conv1d with initial_state"
        fail("cache", "a call where gradients are wanted", f"calls without, as it is overwritten ({instead})")
    return ConvProblem(
        op="causal_conv1d_update",
        device=x.device,
        batch=sequences,
        tokens=1,
        channels=channels,
        width=width,
        sequences=sequences,
        dtype=x.dtype,
        weight_dtype=weight.dtype,
        silu=_silu(activation),
        has_bias=bias is not None,
        has_residual=residual is not None,
        has_initial_state=True,
        output_final_state=True,
        dtypes=tuple(t.dtype for t in (x, weight, bias, residual, cache) if t is not None),
    )
