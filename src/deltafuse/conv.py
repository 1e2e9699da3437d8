"""The short convolution: depthwise and causal over the last few tokens, before q, k and v.

Signatures are those of flash-linear-attention 0.6.0. With a residual it is the Canon layer (Physics of Language Models:
Part 4.1, 2025).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .autograd import conv
from .backends import plan
from .problem_conv import conv_backend, parse_conv, parse_conv_update


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    r"""Depthwise causal convolution over whole sequences, differentiable in every tensor.

    For each channel and token, with the last W inputs before a sequence from `initial_state`, or 0:

        y[t] = act(sum_w weight[w] x[t - W + 1 + w] + bias) + residual[t]

    Args:
        x: `[B, T, D]`, or `[B, T, H, D / H]`; float16, bfloat16, float32 or float64, any strides. Sums are float32
            (float64 where a tensor is float64).
        weight: `[D, W]`, W >= 1, any float dtype; the last column meets the token itself.
        bias: `[D]`, any float dtype.
        residual: `[B, T, D]` or x's shape, any float dtype; added after the activation.
        initial_state: `[N, D, W]`, any float dtype: the last W inputs of each of the N sequences, the newest last.
        output_final_state: return the last W inputs of every sequence, older ones from `initial_state`, before that 0.
        activation: None, `"silu"` or `"swish"` (the same).
        backend: `"auto"`, `"cute"`, `"fla"` or `"torch"`; None asks `set_backend`, as do the names of fla's kernels
            (`"triton"`, `"cuda"`, `"mix"`).
        cu_seqlens: bounds `[N + 1]` of sequences packed along T, int32 or int64; then B = 1. Empty sequences
            pass their state through.
        cu_seqlens_cpu: the same on the CPU; with it no device is waited for.
        chunk_indices: fla's table of tiles, a hint that no result depends on.
        cp_context: fla's context parallel, without states; runs in backend `"fla"` alone.

    Returns:
        `(y, final_state)`, both in x's dtype: y of x's shape; the final state `[N, D, W]`, or None.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value: it is named, with what it got and what is
            allowed.
        UnsupportedError: the backend that was asked for cannot take the call.
    """
    call = parse_conv(
        x, weight, bias, residual, initial_state, output_final_state, activation, cu_seqlens, cu_seqlens_cpu,
        chunk_indices, cp_context,
    )  # fmt: skip
    return conv.conv(call, plan(call.problem, call.problem.device, conv_backend(backend)))


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""One more token of every sequence, the state moved on in place; without gradients.

        cache <- [cache[1:], x];   y = act(sum_w weight[w] cache[w] + bias) + residual

    Args:
        x: `[N, D]`, `[1, N, D]` or `[N, 1, D]` (D may be two axes in the last two), as in `causal_conv1d`.
        cache: `[N, D, W]`, any float dtype, any strides: the last W inputs of every sequence; it is written.
        residual: x's shape or `[N, D]`, any float dtype; added after the activation.
        weight: `[D, W]`, any float dtype. It has to be given; the order of the arguments is fla's.
        bias: `[D]`, any float dtype.
        activation: None, `"silu"` or `"swish"` (the same).
        backend: `"auto"`, `"cute"`, `"fla"` or `"torch"`; None asks `set_backend`, as do the names of fla's kernels
            (`"triton"`, `"cuda"`, `"mix"`).

    Returns:
        `(y, cache)`: y of x's shape and dtype; the cache that was given.

    Raises:
        ValueError: an argument of a wrong shape, dtype, device or value; a call where gradients are wanted or tangents carried.
        UnsupportedError: the backend that was asked for cannot take the call.
    """
    call = parse_conv_update(x, cache, residual, weight, bias, activation)
    return conv.update(call, plan(call.problem, call.problem.device, conv_backend(backend)))
