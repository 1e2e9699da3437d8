"""The short convolution on this package's own kernels: what a call is compiled for, how it is cut into ranges, and the launches.

`forward`, `backward` and `update` take the arguments of their namesakes in `reference.conv` and return the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.config import ConvBackwardConfig, ConvConfig, ConvUpdateConfig
from ..runtime import cache
from .common import DTYPE_NAMES, INDEX_NAMES, Function, Load, Maker, leaf, maker

FORWARD, BACKWARD, UPDATE = "warp.conv_forward", "warp.conv_backward", "warp.conv_update"

_THREADS = 128
_COLUMNS = (128, 64, 32, 16, 8)


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut; None where the shape decides.

    `tokens` of a range (an update: sequences of a thread); the rest as in the configs, `vector` as far as the tensors allow it.
    """

    tokens: int | None = None
    vector: int | None = None
    rows: int | None = None
    batch: int | None = None
    blocks: int | None = None


AUTO = Tuning()


# ---- layouts -----------------------------------------------------------------------------------------------------------------------
def _name(x: Tensor | None) -> str:
    return "" if x is None else DTYPE_NAMES[x.dtype]


def _rows(x: Tensor) -> Tensor:
    """x itself where its channels lie side by side, else a copy."""
    if x.stride(-1) == 1 and (x.shape[-1] > 1 or x.is_contiguous()):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def _rows_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _rows(x)


def _flat(x: Tensor) -> Tensor:
    """x itself where it is contiguous and aligned, else a copy."""
    x = leaf(x)
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


@dataclass(frozen=True)
class _Launch:
    """What calls have in common whose tensors look the same and start at the same bytes of 16: a launch function, None where there is
    nothing to do, tokens of a range (sequences of a thread in an update), whether tensors are handed over as they are, and what is made."""

    function: Function | None
    span: int
    fine: bool
    output: Maker
    state: Maker | None = None


def _starts(given: Iterable[Tensor | None], load: Load) -> tuple[object, ...]:
    """What a launch is known by: where tensors start, as far as it matters, and where its function is from."""
    return load, *[None if x is None else x.data_ptr() & 15 for x in given]


def _laid_out(given: Iterable[Tensor | None], right: Iterable[Callable[[Any], Any]]) -> Any:
    return tuple([f(x) for f, x in zip(right, given, strict=True)])


def _same(given: Iterable[Tensor | None], laid_out: Iterable[Tensor | None]) -> bool:
    return all(a is b for a, b in zip(given, laid_out, strict=True))


def _flat_or_none(x: Tensor | None) -> Tensor | None:
    return None if x is None else _flat(x)


def _aligned(x: Tensor, vector: int, inner: int = 1) -> bool:
    """Whether rows of x (all axes but the last `inner`) start at multiples of `vector` elements, as far as 16 bytes."""
    size = x.element_size()
    unit = min(16, vector * size)
    if x.data_ptr() % unit:
        return False
    strides = zip(x.stride()[:-inner], x.shape[:-inner], strict=True)
    return not any(s * size % unit and n > 1 for s, n in strides)


def _vector(channels: int, most: int, *rows: Tensor | None) -> int:
    """Channels a thread: the most of which all rows of all tensors are made."""
    given = [x for x in rows if x is not None]
    sizes = [v for v in (8, 4, 2) if v <= most and channels % v == 0]
    return next((v for v in sizes if all(_aligned(x, v) for x in given)), 1)


@lru_cache(4096)
def columns_of(channels: int, vector: int) -> int:
    """Threads along the channels: the most of which few idle."""
    runs = -(-channels // vector)

    def busy(columns: int) -> float:
        return runs / (-(-runs // columns) * columns)

    best = max(busy(c) for c in _COLUMNS)
    return next(c for c in _COLUMNS if busy(c) >= 0.9 * best)


@lru_cache(4096)
def range_tokens(
    tokens: int, channels: int, vector: int, columns: int, sms: int, blocks: int, *, most: int, group: int, less: int
) -> int:
    """Tokens a range: all ranges in a whole number of waves of CTAs, `most` tokens or so each, and a whole number of groups.

    A range of `group` n - `less` tokens is n groups of rows.
    """
    tiles = -(-channels // (vector * columns))
    wave = max(1, sms * blocks * (_THREADS // columns) // tiles)
    waves = max(1, round(tokens / (wave * most)))
    groups = -(-(-(-tokens // (wave * waves)) + less) // group)
    return max(groups, 2) * group - less


# ---- whole sequences ---------------------------------------------------------------------------------------------------------------
def forward_config(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    output_final_state: bool,
    tuning: Tuning = AUTO,
) -> ConvConfig:
    """What the forward kernel is compiled for; looks at dtypes, the number of channels and alignment alone."""
    channels, width = weight.shape
    wide = 16 // x.element_size()
    vector = _vector(channels, tuning.vector or wide, x, residual)
    # What else a thread holds takes the registers of rows in flight.
    rows = tuning.rows or (8 if residual is None and initial_state is None else 4)
    return ConvConfig(
        dtype=_name(x), width=width, weight_dtype=_name(weight), bias_dtype=_name(bias), residual_dtype=_name(residual),
        state_dtype=_name(initial_state), final=output_final_state, silu=silu,
        cu_seqlens="" if cu_seqlens is None else INDEX_NAMES[cu_seqlens.dtype], vector=vector,
        columns=columns_of(channels, vector), rows=rows, batch=tuning.batch or rows // 2, blocks=tuning.blocks or 4,
    )  # fmt: skip


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    bounds: Tensor | None,
    silu: bool,
    output_final_state: bool,
    *,
    arch: str,
    sms: int,
    load: Load = cache.load,
    tuning: Tuning = AUTO,
    known: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`y` `[B, T, D]` and the last W inputs `[N, D, W]` of every sequence, both in x's dtype.

    `known`: what is known of calls with tensors that look like these and the same other arguments.
    """
    known = {} if known is None else known
    given: tuple[Any, ...] = tuple(
        [t if t is None else leaf(t) for t in (x, weight, bias, residual, initial_state, bounds)]
    )
    starts = _starts(given, load)
    launch: _Launch | None = known.get(starts)
    if launch is None or not launch.fine:
        right = (_rows, _flat, _flat_or_none, _rows_or_none, _flat_or_none, _flat_or_none)
        laid_out: tuple[Any, Any, Any, Any, Any, Any] = _laid_out(given, right)
        if launch is None:
            config = forward_config(*laid_out, silu=silu, output_final_state=output_final_state, tuning=tuning)
            rows = x.shape[0] * x.shape[1]
            sequences = x.shape[0] if bounds is None else bounds.shape[0] - 1
            tokens = tuning.tokens or range_tokens(
                rows,
                weight.shape[0],
                config.vector,
                config.columns,
                sms,
                config.blocks,
                most=24,
                group=config.rows,
                less=0,
            )
            idle = x.numel() == 0 and not (output_final_state and sequences)
            launch = _Launch(
                None if idle else load(FORWARD, config, arch), tokens, _same(given, laid_out), maker(x.shape, x.dtype, x.device),
                maker((sequences, *weight.shape), x.dtype, x.device) if output_final_state else None,
            )  # fmt: skip
            known[starts] = launch
        given = laid_out
    y, state = launch.output(), launch.state() if launch.state is not None else None
    if launch.function is not None:
        launch.function(*given, y, state, launch.span)
    return y, state


def backward_config(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    grad_y: Tensor,
    grad_state: bool,
    needs: Sequence[bool],
    tuning: Tuning = AUTO,
) -> ConvBackwardConfig:
    """What the backward kernel is compiled for; looks at dtypes, the number of channels and alignment alone."""
    channels, width = weight.shape
    vector = _vector(channels, tuning.vector or 4, x, grad_y)
    roomy = vector * x.element_size() <= 8 and initial_state is None and not grad_state
    rows = tuning.rows or (8 if roomy else 4)
    need_x, need_weight, need_bias, need_state = needs
    return ConvBackwardConfig(
        dtype=_name(x), width=width, weight_dtype=_name(weight), bias_dtype=_name(bias), state_dtype=_name(initial_state),
        grad_state=grad_state, silu=silu, cu_seqlens="" if cu_seqlens is None else INDEX_NAMES[cu_seqlens.dtype], dx=need_x,
        dweight=need_weight, dbias=need_bias and bias is not None, dstate=need_state and initial_state is not None, vector=vector,
        columns=columns_of(channels, vector), rows=rows, batch=tuning.batch or rows // 2, blocks=tuning.blocks or 4,
    )  # fmt: skip


def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    bounds: Tensor | None,
    silu: bool,
    grad_y: Tensor | None,
    grad_state: Tensor | None,
    needs: Sequence[bool],
    *,
    arch: str,
    sms: int,
    load: Load = cache.load,
    tuning: Tuning = AUTO,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial state, each in its tensor's dtype, None where `needs` has no use for it."""
    x = _rows(x)
    dy = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if grad_y is None else _rows(grad_y.to(x.dtype))
    weight, bias, initial_state, bounds = _flat(weight), *map(_flat_or_none, (bias, initial_state, bounds))
    dfinal = None if grad_state is None else _flat(grad_state.to(x.dtype))
    config = backward_config(x, weight, bias, initial_state, bounds, silu, dy, dfinal is not None, needs, tuning)
    batch, length, channels = x.shape
    tokens = tuning.tokens or range_tokens(
        batch * length, channels, config.vector, config.columns, sms, config.blocks,
        most=512, group=config.rows, less=config.width - 1,
    )  # fmt: skip
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if config.dx else None
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device) if config.dweight else None
    dbias = torch.empty(channels, dtype=bias.dtype, device=x.device) if config.dbias and bias is not None else None
    dstate = None
    if config.dstate and initial_state is not None:
        dstate = torch.empty(initial_state.shape, dtype=initial_state.dtype, device=x.device)
    partial = None
    if config.dweight or config.dbias:
        shape = (-(-batch * length // tokens), config.width * config.dweight + config.dbias, channels)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    if any(t is not None for t in (dx, dweight, dbias, dstate)):
        load(BACKWARD, config, arch)(
            x, dy, weight, bias, initial_state, bounds, dfinal, dx, partial, dweight, dbias, dstate, tokens
        )
    return dx, dweight, dbias, dstate


# ---- one token ---------------------------------------------------------------------------------------------------------------------
def _lies_well(state: Tensor) -> bool:
    """Whether every sequence of a cache `[N, D, W]` is contiguous."""
    _, channels, width = state.shape
    return state.stride(2) == 1 and (channels == 1 or state.stride(1) == width)


def _states(state: Tensor) -> Tensor:
    """A cache itself where it lies well, else a copy."""
    return state if _lies_well(state) else torch.empty(state.shape, dtype=state.dtype, device=state.device).copy_(state)


def update_config(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    silu: bool,
    tuning: Tuning = AUTO,
) -> ConvUpdateConfig:
    """What the update kernel is compiled for, for a cache whose sequences are contiguous."""
    channels, width = weight.shape
    most = tuning.vector or max(1, 16 // (4 * state.element_size() if width > 2 else 2 * state.element_size()))
    vector = _vector(channels, most, x, residual)
    whole = _aligned(state, 16, inner=2)
    while not whole and not _aligned(state, vector, inner=2):
        vector //= 2
    return ConvUpdateConfig(
        dtype=_name(x), cache_dtype=_name(state), width=width, weight_dtype=_name(weight), bias_dtype=_name(bias),
        residual_dtype=_name(residual), silu=silu, vector=vector, whole=whole, columns=columns_of(channels, vector),
        rows=tuning.rows or 4,
    )  # fmt: skip


def update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    silu: bool,
    *,
    arch: str,
    sms: int,
    load: Load = cache.load,
    tuning: Tuning = AUTO,
    known: dict[Any, Any] | None = None,
) -> Tensor:
    """One more token x `[N, D]` of every sequence: its output in x's dtype; the cache `[N, D, W]` moves on in place.

    `known` as in `forward`.
    """
    known = {} if known is None else known
    given: tuple[Any, ...] = tuple([t if t is None else leaf(t) for t in (x, state, weight, bias, residual)])
    starts = _starts(given, load)
    launch: _Launch | None = known.get(starts)
    if launch is None or not launch.fine:
        right = (_rows, _states, _flat, _flat_or_none, _rows_or_none)
        laid_out: tuple[Any, Any, Any, Any, Any] = _laid_out(given, right)
        if launch is None:
            config = update_config(*laid_out, silu=silu, tuning=tuning)
            count, channels = x.shape
            tiles = -(-channels // (config.vector * config.columns))
            span = tuning.tokens or -(-count * tiles // (sms * 8 * (_THREADS // config.columns)))
            if span > 1:
                span = -(-span // config.rows) * config.rows
            function = load(UPDATE, config, arch) if count else None
            launch = _Launch(function, span, _same(given, laid_out), maker(x.shape, x.dtype, x.device))
            known[starts] = launch
        given = laid_out
    y = launch.output()
    if launch.function is not None:
        launch.function(*given, y, launch.span)
        moved = given[1]
        if not launch.fine and moved.data_ptr() != state.data_ptr():
            state.copy_(moved)
    return y


# ---- kernels of a call -------------------------------------------------------------------------------------------------------------
def kernels_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    silu: bool = False,
    output_final_state: bool = False,
    needs: Sequence[bool] = (),
) -> tuple[tuple[str, Any], ...]:
    """The kernels, each a name and its config, of a call of `causal_conv1d`; `needs`: and of these gradients, as in `backward`.

    x and the residual `[B, T, D]`; tensors may be on the `meta` device. The gradient of y is taken to be contiguous. With a final
    state there are two kernels for the gradient: the state may have one or not.
    """
    x, residual = _rows(x), _rows_or_none(residual)
    kernels: list[tuple[str, Any]] = [
        (FORWARD, forward_config(x, weight, bias, residual, initial_state, cu_seqlens, silu, output_final_state))
    ]
    if any(needs):
        grad_y = torch.empty(x.shape, dtype=x.dtype, device="meta")
        for grad_state in (False, True) if output_final_state else (False,):
            config = backward_config(x, weight, bias, initial_state, cu_seqlens, silu, grad_y, grad_state, needs)
            kernels.append((BACKWARD, config))
    return tuple(kernels)


def update_kernels_of(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu: bool = False,
) -> tuple[tuple[str, Any], ...]:
    """The kernel of a call of `causal_conv1d_update`, as `kernels_of`."""
    x, residual = _rows(x), _rows_or_none(residual)
    if not _lies_well(state):
        state = torch.empty(state.shape, dtype=state.dtype, device="meta")
    return ((UPDATE, update_config(x, state, weight, bias, residual, silu)),)
