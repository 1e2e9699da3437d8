"""KDA's backward pass on this package's own kernels: which kernels it needs and their order.

    prepare    q, k, g, beta -> factors, scores (with the inverse), decay, beta      as in the forward pass
    scan       -> the state at the start of every chunk                            chunk after chunk
    reverse    do -> dv, y, the gradient of the state at the end of every chunk       chunk before chunk
    inter      -> gradients of factors and scores                                  every chunk and value head at once
    intra      -> gradients of q, k, gate and beta                                 every chunk and value head at once

Sums over chunks (A_log, dt_bias) and over the value heads that share q and k are torch's, in float32 and always in the same order.
Where sequences and heads are few, both scans run by segments, as in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.config import (
    CombineConfig,
    InterConfig,
    IntraConfig,
    PrepareConfig,
    ReverseConfig,
    ScanConfig,
    SegmentsConfig,
)
from ..runtime import cache
from .common import Load
from .kda_cute import (
    KEY_DIMS,
    VALUE_DIMS,
    Flags,
    Kept,
    Kernels,
    aligned,
    padded,
    padded_state,
    parameter,
    room_for_kept,
    segment_states,
    slots,
    widened,
)


@dataclass(frozen=True)
class BackwardKernels:
    """The kernels of one backward pass; the last five are None where sequences are not cut into segments."""

    prepare: PrepareConfig
    scan: ScanConfig
    reverse: ReverseConfig
    inter: InterConfig
    intra: IntraConfig
    segments: int
    segment_chunks: int
    over_segments: SegmentsConfig | None = None
    combine: CombineConfig | None = None
    reverse_ends: ReverseConfig | None = None
    reverse_transitions: ReverseConfig | None = None
    reverse_combine: CombineConfig | None = None

    def __iter__(self) -> Any:
        for name, configs in (
            ("warp.kda_prepare", (self.prepare,)),
            ("sm90.kda_segments", (self.over_segments,)),
            ("sm90.kda_scan", (self.scan,)),
            ("sm90.kda_reverse", (self.reverse_ends, self.reverse_transitions, self.reverse)),
            ("warp.kda_combine", (self.combine, self.reverse_combine)),
            ("sm90.kda_inter", (self.inter,)),
            ("warp.kda_intra", (self.intra,)),
        ):
            yield from ((name, config) for config in configs if config is not None)

    def launched(self, kept: bool) -> list[tuple[str, Any]]:
        """Those that run; what the forward pass has kept is not made again."""
        again = (self.prepare, self.over_segments, self.combine, self.scan)
        return [(name, config) for name, config in self if not (kept and config in again)]


@lru_cache(maxsize=4096)
def plan_backward(
    kernels: Kernels,
    value_dim: int,
    *,
    grouped: bool,
    initial: bool,
    grad_state: bool,
    grad_initial: bool,
    v_first: bool,
) -> BackwardKernels:
    """The backward pass of a forward pass; `grad_state`: the final state has a gradient, `grad_initial`: the initial one's is wanted."""
    p, plan = kernels.prepare, kernels.schedule
    common: dict[str, Any] = dict(dtype=p.dtype, key_dim=p.key_dim, cu_seqlens=p.cu_seqlens)
    prepare = replace(p, inverse=True, strips=False)
    spread: dict[str, Any] = dict(tile=plan.tile, cluster=plan.cluster)
    narrow: dict[str, Any] = dict(tile=64, cluster=2 if value_dim % 128 == 0 else 1, readout=False, final=True)
    square: dict[str, Any] = dict(
        tile=64, cluster=2 if p.key_dim == 128 else 1, readout=False, final=True, transition=True
    )
    inter = InterConfig(**common, tile=128 if value_dim % 128 == 0 else 64)
    intra = IntraConfig(
        **common, gate=p.gate, gate_dtype=p.gate_dtype, beta_dtype=p.beta_dtype, a_log=p.a_log, dt_bias=p.dt_bias, l2norm=p.l2norm,
        beta_sigmoid=p.beta_sigmoid, grouped=grouped,
    )  # fmt: skip
    if plan.segments == 1:
        return BackwardKernels(
            prepare,
            ScanConfig(**common, **spread, state_v_first=True, initial=initial, states=True, readout=False, panels=3),
            ReverseConfig(**common, **spread, state_v_first=v_first, initial=grad_state, final=grad_initial),
            inter, intra, 1, plan.segment_chunks,
        )  # fmt: skip
    return BackwardKernels(
        prepare,
        ScanConfig(
            **common, **spread, state_v_first=True, initial=True, states=True, readout=False, panels=3, early="follow"
        ),
        ReverseConfig(**common, **spread, state_v_first=True, initial=True, final=grad_initial, early="follow"),
        inter, intra, plan.segments, plan.segment_chunks,
        over_segments=SegmentsConfig(**common, cluster=SegmentsConfig.cluster_of(p.key_dim, value_dim), panels=3),
        combine=CombineConfig(p.key_dim, True, initial, early=True),
        reverse_ends=ReverseConfig(**common, **narrow, state_v_first=True, early="decide"),
        reverse_transitions=ReverseConfig(**common, **square, state_v_first=True, early="follow"),
        reverse_combine=CombineConfig(p.key_dim, True, grad_state, grad_initial, reverse=True, early=True),
    )  # fmt: skip


@dataclass(frozen=True)
class KdaGradients:
    """Of the inputs; absent inputs have none."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    a_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    flags: Flags,
    kernels: Kernels,
    grad_o: Tensor,
    grad_state: Tensor | None,
    arch: str,
    sms: int,
    load: Load = cache.load,
    kept: Kept | None = None,
    may_end_early: bool = False,
) -> KdaGradients:
    """Gradients of every input from those of o and of the final state; `kernels` and what is `kept` are the forward pass's.

    `may_end_early` as in `kda_cute.run`: gradients of tokens of no sequence are 0.
    """
    batch, tokens, heads, width = q.shape
    value_heads, value_width = v.shape[2:]
    key_dim, value_dim = padded(width, KEY_DIMS), padded(value_width, VALUE_DIMS)
    own = plan_backward(
        kernels, value_dim, grouped=heads != value_heads, initial=initial_state is not None, grad_state=grad_state is not None,
        grad_initial=initial_state is not None, v_first=flags.state_v_first,
    )  # fmt: skip
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    count = slots(batch, tokens, sequences, cu_seqlens is not None)
    wide = (widened(q, key_dim), widened(k, key_dim), widened(g if g.dtype != torch.float64 else g.float(), key_dim))
    b = beta if beta.dtype != torch.float64 else beta.float()
    v, do = widened(v, value_dim), widened(grad_o.to(q.dtype), value_dim)
    gate = (parameter(a_log, 1, 1), parameter(dt_bias, width, key_dim))
    head = (count, value_heads)

    numbers = (flags.scale, flags.lower_bound, flags.beta_limit)
    made = kept or room_for_kept(q, v, sequences, cu_seqlens is not None)
    factors, scores, decay, beta_eff, hs, room = made
    bound = room if own.prepare.bound else None
    given = _Given(factors, scores, decay, beta_eff, bound, v, do, cu_seqlens, own, arch, load, may_end_early)
    shape = (sequences, value_heads, value_dim, key_dim)
    if kept is None:
        early = None
        if bound is not None:
            early = q.new_empty((sequences * own.segments, value_heads), dtype=torch.int32)
        load("warp.kda_prepare", own.prepare, arch)(
            *wide, b, *gate, cu_seqlens, factors, scores, decay, beta_eff, bound, early, *numbers
        )
        _states(given, shape, hs, initial_state, early, flags.state_v_first)
    y, dv, dhs, dh0 = _reverse(given, shape, grad_state, flags.state_v_first, initial_state is not None)
    dfactors, dscores = q.new_empty((*head, 3, 64, key_dim)), q.new_empty((*head, 2, 64, 64))
    known = ((64, key_dim), (1 + key_dim // 64, 64))
    dgi, direct = (q.new_empty((*head, *shape), dtype=torch.float32) for shape in known)
    load("sm90.kda_inter", own.inter, arch)(
        factors, scores, decay, beta_eff, hs, dhs, v, do, y, cu_seqlens, dfactors, dscores, dgi, direct, sms
    )
    del factors, scores, hs, dhs, y, given, made, kept, room
    grouped = heads != value_heads
    rows = (batch, tokens, value_heads if grouped else heads, key_dim)
    dq, dk = (q.new_empty(rows, dtype=torch.float32 if grouped else q.dtype) for _ in range(2))
    dg, dbeta = torch.empty_like(wide[2], memory_format=torch.contiguous_format), torch.empty_like(b)
    if may_end_early:
        for x in (dq, dk, dg, dbeta):
            x.zero_()
    da_log = None if a_log is None else q.new_zeros(head, dtype=torch.float32)
    dbias = None if dt_bias is None else q.new_zeros((*head, key_dim), dtype=torch.float32)
    load("warp.kda_intra", own.intra, arch)(
        *wide, b, *gate, cu_seqlens, dfactors, dscores, dgi, direct, dq, dk, dg, dbeta, da_log, dbias, *numbers
    )
    if grouped:
        dq, dk = (x.unflatten(2, (heads, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return KdaGradients(
        q=dq[..., :width].contiguous(),
        k=dk[..., :width].contiguous(),
        v=dv[..., :value_width].contiguous(),
        g=dg[..., :width].to(g.dtype).contiguous(),
        beta=dbeta.to(beta.dtype),
        a_log=None if da_log is None or a_log is None else da_log.sum(0).to(a_log.dtype),
        dt_bias=None if dbias is None or dt_bias is None else dbias.sum(0)[:, :width].reshape(-1).to(dt_bias.dtype),
        initial_state=None if dh0 is None else _cut(dh0, width, value_width, flags.state_v_first),
    )


@dataclass(frozen=True)
class _Given:
    """What both scans read."""

    factors: Tensor
    scores: Tensor
    decay: Tensor
    beta: Tensor
    bound: Tensor | None
    v: Tensor
    do: Tensor
    cu_seqlens: Tensor | None
    kernels: BackwardKernels
    arch: str
    load: Load
    may_end_early: bool

    def reverse(
        self, config: ReverseConfig | None, do: Tensor | None, dht: Tensor | None, *outs: Tensor | None
    ) -> None:
        length = (self.kernels.segments, self.kernels.segment_chunks)
        operands = (self.factors, self.scores, self.decay, self.beta)
        self.load("sm90.kda_reverse", config, self.arch)(*operands, do, dht, self.cu_seqlens, *outs, *length)

    def combine(self, config: CombineConfig | None, *tensors: Tensor | None) -> None:
        self.load("warp.kda_combine", config, self.arch)(*tensors, self.kernels.segments)


def _v_first(state: Tensor, key_dim: int, value_dim: int, v_first: bool) -> Tensor:
    """A state of the caller's, padded, as [N, HV, V, K]."""
    state = padded_state(state, key_dim, value_dim, v_first)
    return state if v_first else aligned(state.transpose(-1, -2).contiguous())


def _cut(state: Tensor, key_dim: int, value_dim: int, v_first: bool) -> Tensor:
    rows, columns = (value_dim, key_dim) if v_first else (key_dim, value_dim)
    return state[..., :rows, :columns].contiguous()


def _states(
    given: _Given, shape: tuple[int, ...], hs: Tensor, initial_state: Tensor | None, early: Tensor | None, v_first: bool
) -> None:
    """Write the state at the start of every chunk, hs [slots, HV, V, K] in the io dtype."""
    k = given.kernels
    value_dim, key_dim = shape[2:]
    h0 = None if initial_state is None else _v_first(initial_state.detach(), key_dim, value_dim, v_first)
    length = (k.segments, k.segment_chunks)
    operands = (given.factors, given.scores, given.decay)
    if k.segments > 1:
        h0 = segment_states(
            (k.over_segments, k.combine), given.load, given.arch, operands, given.v, h0, None, given.cu_seqlens, given.bound, early,
            *length,
        )  # fmt: skip
    given.load("sm90.kda_scan", k.scan, given.arch)(
        *operands, given.v, h0, given.cu_seqlens, None, None, hs, None, early, *length
    )


def _reverse(
    given: _Given, shape: tuple[int, ...], grad_state: Tensor | None, v_first: bool, initial: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """y, dv, the gradient of the state at the end of every chunk, and that of the initial state in the caller's layout."""
    k = given.kernels
    sequences, value_heads, value_dim, key_dim = shape
    f, inner = given.factors, (value_dim, key_dim) if v_first else (key_dim, value_dim)
    y, dhs = f.new_empty((f.shape[0], value_heads, 64, value_dim)), f.new_empty((f.shape[0], *shape[1:]))
    dv = f.new_empty((*given.v.shape[:2], value_heads, value_dim))
    if given.may_end_early:
        dv.zero_()
    if k.segments == 1:
        dht = None if grad_state is None else padded_state(grad_state, key_dim, value_dim, v_first)
        dh0 = f.new_empty((sequences, value_heads, *inner), dtype=torch.float32) if initial else None
        given.reverse(k.reverse, given.do, dht, y, dv, dhs, dh0, None, None)
        return y, dv, dhs, dh0
    units = sequences * k.segments
    ends, starts = (f.new_empty((units, *shape[1:]), dtype=torch.float32) for _ in range(2))
    transitions = f.new_empty((units, value_heads, key_dim, key_dim), dtype=torch.float32)
    dht = None if grad_state is None else _v_first(grad_state, key_dim, value_dim, v_first)
    dh0 = f.new_empty(shape, dtype=torch.float32) if initial else None
    early = f.new_empty((units, value_heads), dtype=torch.int32)
    given.reverse(k.reverse_ends, given.do, None, None, None, None, ends, given.bound, early)
    given.reverse(k.reverse_transitions, None, None, None, None, None, transitions, None, early)
    given.combine(k.reverse_combine, ends, transitions, dht, starts, dh0, early)
    given.reverse(k.reverse, given.do, starts, y, dv, dhs, dh0, None, early)
    if dh0 is not None and not v_first:
        dh0 = dh0.transpose(-1, -2).contiguous()
    return y, dv, dhs, dh0
