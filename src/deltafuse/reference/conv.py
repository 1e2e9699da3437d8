"""The short convolution: W shifted products over sequences that lie behind their states.

    y[t] = act(sum_w weight[w] x[t - W + 1 + w] + bias) + residual[t]

Each sequence is laid into a stream of rows behind the W rows of its initial state (zeros without one). Inside the
stream every output is the same sum of W neighbouring rows, however short the sequence is, and the last W rows of a
sequence are its final state. Rows of the stream that are no tokens yield sums across two sequences; these are dropped,
never multiplied by zero, so that one sequence's infinities stay out of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class _Writes:
    """How one tensor is made of another and more: into its memory, or into memory of its own."""

    add: Callable[..., Tensor]
    addcmul: Callable[..., Tensor]
    silu: Callable[[Tensor], Tensor]
    index_copy: Callable[..., Tensor]


_INTO = _Writes(Tensor.add_, Tensor.addcmul_, partial(F.silu, inplace=True), Tensor.index_copy_)
_APART = _Writes(torch.add, torch.addcmul, F.silu, torch.index_copy)
"""For functional transforms: what they add to a tensor, a batch for one, has no room in the memory of one that is without it."""


class _Stream(Protocol):
    """Where the sequences lie.

    Tensors over the whole stream are `[S, R, D]`, those over its outputs (the rows from W on) `[S, R - W, D]`.
    """

    def lay(self, x: Tensor, state: Tensor | None, dtype: torch.dtype, writes: _Writes = _INTO) -> Tensor:
        """The stream of tokens `[B, T, D]` behind states `[N, W, D]`."""
        ...

    def spread(self, tokens: Tensor) -> Tensor:
        """Tokens among the outputs, zeros elsewhere."""
        ...

    def tokens(self, outputs: Tensor) -> Tensor:
        """`[B, T, D]` of the outputs."""
        ...

    def clear(self, outputs: Tensor) -> None:
        """Set the outputs that are no tokens to zero."""
        ...

    def first(self, stream: Tensor) -> Tensor:
        """The W rows `[N, W, D]` before every sequence."""
        ...

    def last(self, stream: Tensor) -> Tensor:
        """The last W rows `[N, W, D]` of every sequence."""
        ...

    def add_last(self, stream: Tensor, value: Tensor) -> None:
        """Add `[N, W, D]` to the last W rows of every sequence."""
        ...


class _Batch:
    """One sequence a batch row: all parts of the stream are slices."""

    def __init__(self, x: Tensor, width: int) -> None:
        self.size, self.width = x.shape[1], width

    def lay(self, x: Tensor, state: Tensor | None, dtype: torch.dtype, writes: _Writes = _INTO) -> Tensor:
        if state is None:
            state = x.new_zeros((x.shape[0], self.width, x.shape[2]), dtype=dtype)
        return torch.cat([state.to(dtype), x], 1)

    def spread(self, tokens: Tensor) -> Tensor:
        return tokens

    def tokens(self, outputs: Tensor) -> Tensor:
        return outputs

    def clear(self, outputs: Tensor) -> None:
        pass

    def first(self, stream: Tensor) -> Tensor:
        return stream[:, : self.width]

    def last(self, stream: Tensor) -> Tensor:
        return stream[:, self.size :]

    def add_last(self, stream: Tensor, value: Tensor) -> None:
        stream[:, self.size :] += value


class _Packed:
    """Sequences one after the other in a batch of one: rows are found by index."""

    def __init__(self, x: Tensor, width: int, bounds: Tensor) -> None:
        bounds = bounds.to(torch.int64)
        t = torch.arange(x.shape[1], device=x.device)
        sequence = torch.searchsorted(bounds[1:], t, right=True)
        self.count, self.width = bounds.shape[0] - 1, width
        # At least W rows, so that a stream without sequences has outputs too: none.
        self.rows = max(self.count, 1) * width + x.shape[1]
        state = torch.arange(self.count * width, device=x.device).view(self.count, width)
        self.token_outputs = t + sequence * width
        self.first_rows = (bounds[:-1, None] + state).flatten()
        self.last_rows = (bounds[1:, None] + state).flatten()

    def lay(self, x: Tensor, state: Tensor | None, dtype: torch.dtype, writes: _Writes = _INTO) -> Tensor:
        stream = x.new_zeros((1, self.rows, x.shape[2]), dtype=dtype)
        stream = writes.index_copy(stream, 1, self.token_outputs + self.width, x.to(dtype))
        if state is not None:
            stream = writes.index_copy(stream, 1, self.first_rows, state.to(dtype).flatten(0, 1).unsqueeze(0))
        return stream

    def spread(self, tokens: Tensor) -> Tensor:
        outputs = tokens.new_zeros((1, self.rows - self.width, tokens.shape[2]))
        return outputs.index_copy_(1, self.token_outputs, tokens)

    def tokens(self, outputs: Tensor) -> Tensor:
        return outputs.index_select(1, self.token_outputs)

    def clear(self, outputs: Tensor) -> None:
        # The rows before the first sequence are no outputs.
        outputs.index_fill_(1, self.first_rows[self.width :] - self.width, 0)

    def first(self, stream: Tensor) -> Tensor:
        return stream.index_select(1, self.first_rows).view(self.count, self.width, stream.shape[2])

    def last(self, stream: Tensor) -> Tensor:
        return stream.index_select(1, self.last_rows).view(self.count, self.width, stream.shape[2])

    def add_last(self, stream: Tensor, value: Tensor) -> None:
        stream.index_add_(1, self.last_rows, value.flatten(0, 1).unsqueeze(0))


def _stream(x: Tensor, width: int, bounds: Tensor | None) -> _Stream:
    return _Batch(x, width) if bounds is None else _Packed(x, width, bounds)


def _compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of all sums: float64 as soon as one tensor has it, else float32."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


def _fresh(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy with memory of its own."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _taps(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as W rows of D: read along channels, as x lies."""
    return weight.to(dtype).t().contiguous()


def _state_rows(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.transpose(1, 2)


def _convolve(stream: Tensor, taps: Tensor, writes: _Writes = _INTO) -> Tensor:
    """The sums `[S, R - W, D]` that end at row W, W + 1, ... of the stream."""
    width = taps.shape[0]
    count = stream.shape[1] - width
    outputs = stream[:, 1 : 1 + count] * taps[0]
    for w in range(1, width):
        outputs = writes.addcmul(outputs, stream[:, 1 + w : 1 + w + count], taps[w])
    return outputs


def conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    bounds: Tensor | None,
    silu: bool,
    output_final_state: bool,
    in_place: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`y` `[B, T, D]` and the last W inputs `[N, D, W]` of every sequence, both in x's dtype.

    Without `in_place` no tensor is written twice, as functional transforms want it.
    """
    writes = _INTO if in_place else _APART
    dtype = _compute_dtype(x, weight, bias, residual, initial_state)
    lie = _stream(x, weight.shape[1], bounds)
    stream = lie.lay(x, _state_rows(initial_state), dtype, writes)
    y = lie.tokens(_convolve(stream, _taps(weight, dtype), writes))
    if bias is not None:
        y = writes.add(y, bias)
    if silu:
        y = writes.silu(y)
    if residual is not None:
        y = writes.add(y, residual)
    state = _fresh(lie.last(stream).transpose(1, 2), x.dtype) if output_final_state else None
    return y.to(x.dtype), state


def conv_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    bounds: Tensor | None,
    silu: bool,
    grad_y: Tensor | None,
    grad_state: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial state, each in its tensor's dtype, None where `needs` has no use for it.

    The stream and the sums before the activation are computed again. An absent incoming gradient counts as zeros.
    """
    dtype = _compute_dtype(x, weight, bias, initial_state, grad_y, grad_state)
    need_x, need_weight, need_bias, need_state = needs
    width = weight.shape[1]
    lie = _stream(x, width, bounds)
    taps = _taps(weight, dtype)
    grad = torch.zeros_like(x, dtype=dtype) if grad_y is None else grad_y.to(dtype)
    stream = lie.lay(x, _state_rows(initial_state), dtype) if silu or need_weight else None
    if silu:
        assert stream is not None
        sums = lie.tokens(_convolve(stream, taps))
        if bias is not None:
            sums += bias
        grad = torch.ops.aten.silu_backward(grad, sums)
    outputs = lie.spread(grad)
    count = outputs.shape[1]

    grad_x = grad_weight = grad_bias = grad_initial = None
    if need_bias and bias is not None:
        grad_bias = grad.sum((0, 1)).to(bias.dtype)
    if need_weight:
        assert stream is not None
        grad_taps = torch.empty_like(taps)
        product = torch.empty_like(outputs, memory_format=torch.contiguous_format)
        for w in range(width):
            torch.mul(outputs, stream[:, 1 + w : 1 + w + count], out=product)
            lie.clear(product)
            grad_taps[w] = product.sum((0, 1))
        grad_weight = _fresh(grad_taps.t(), weight.dtype)
    if need_x or (need_state and initial_state is not None):
        grad_stream = outputs.new_zeros((outputs.shape[0], width + count, outputs.shape[2]))
        for w in range(width):
            grad_stream[:, 1 + w : 1 + w + count].addcmul_(outputs, taps[w])
        if grad_state is not None:
            lie.add_last(grad_stream, grad_state.to(dtype).transpose(1, 2))
        if need_x:
            grad_x = _fresh(lie.tokens(grad_stream[:, width:]), x.dtype)
        if need_state and initial_state is not None:
            grad_initial = _fresh(lie.first(grad_stream).transpose(1, 2), initial_state.dtype)
    return grad_x, grad_weight, grad_bias, grad_initial


def conv_update(
    x: Tensor, cache: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, silu: bool
) -> Tensor:
    """One more token x `[N, D]` of every sequence: its output in x's dtype; the cache `[N, D, W]` moves on in place."""
    dtype = _compute_dtype(x, cache, weight, bias, residual)
    taps = _taps(weight, dtype)
    # The order of the sum is `_convolve`'s, so that decoding rounds as a whole pass does.
    inputs = [*cache[:, :, 1:].to(dtype).unbind(2), x.to(dtype)]
    y = inputs[0] * taps[0]
    for value, tap in zip(inputs[1:], taps[1:], strict=True):
        y.addcmul_(value, tap)
    if bias is not None:
        y += bias
    if silu:
        F.silu(y, inplace=True)
    if residual is not None:
        y += residual
    cache.copy_(torch.cat([cache[:, :, 1:], x.to(cache.dtype).unsqueeze(2)], 2))
    return _fresh(y, x.dtype)
