"""KDA's forward pass on this package's own kernels: which kernels a call needs, their order, and the custom op.

    prepare   q, k, g, beta -> factors, scores, decay     every chunk and value head at once
    scan      factors, scores, decay, v -> o, state       chunk after chunk

Where sequences and heads are few, the scan runs by segments: `segments` gives every segment's state from zero and its map of
states, `combine` every segment's initial state, and `scan` the output (see `kernels.schedule`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..kernels.config import CHUNK, CombineConfig, PrepareConfig, ScanConfig, SegmentsConfig
from ..kernels.schedule import Schedule, schedule
from ..problem import DeltaProblem
from ..runtime import cache
from .common import DTYPE_NAMES, INDEX_NAMES, Function, Load, Maker, maker
from .scan import scan_slots, slot_kernels


def _padded(size: int, allowed: tuple[int, ...]) -> int:
    """The next size that kernels take."""
    return next(x for x in allowed if x >= size)


padded = lru_cache(maxsize=4096)(_padded)
"""`_padded`, remembered; symbols cannot be."""


BLACKWELL = {"sm_100a": 148, "sm_103a": 148}
"""Architectures whose scan works in tensor memory, and the multiprocessors of their cards."""
KEY_DIMS = (64, 128)
VALUE_DIMS = tuple(range(64, 513, 64))


@dataclass(frozen=True)
class Flags:
    """What a call computes, beside its tensors: the custom op's plain arguments."""

    scale: float
    gate: str
    lower_bound: float
    l2norm: bool
    beta_sigmoid: bool
    beta_limit: float
    state_v_first: bool
    final: bool
    states: bool
    keep: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The fields in order, as the custom op takes them."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Kernels:
    """The kernels of one call, each a name and what it is compiled for, and the schedule of its scan."""

    prepare: PrepareConfig
    scan: ScanConfig
    schedule: Schedule
    over_segments: SegmentsConfig | None = None
    combine: CombineConfig | None = None

    def __iter__(self) -> Any:
        yield "warp.kda_prepare", self.prepare
        if self.over_segments is not None:
            yield "sm90.kda_segments", self.over_segments
            yield "warp.kda_combine", self.combine
        yield "sm90.kda_scan", self.scan


@lru_cache(maxsize=4096)
def plan_kernels(
    flags: Flags,
    *,
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    beta_dtype: torch.dtype,
    a_log: bool,
    dt_bias: bool,
    initial: bool,
    cu_seqlens: torch.dtype | None,
    sequences: int,
    tokens: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    sms: int,
    plan: Schedule | None = None,
) -> Kernels:
    """The kernels of a call of these sizes, `key_dim` and `value_dim` as padded."""
    plan = plan or schedule(sequences, tokens, value_heads, key_dim, value_dim, sms, packed=cu_seqlens is not None)
    io, bounds = DTYPE_NAMES[dtype], "" if cu_seqlens is None else INDEX_NAMES[cu_seqlens]
    prepare = PrepareConfig(
        dtype=io, key_dim=key_dim, gate=flags.gate, gate_dtype=DTYPE_NAMES.get(gate_dtype, "float32"),
        beta_dtype=DTYPE_NAMES.get(beta_dtype, "float32"), a_log=a_log, dt_bias=dt_bias, l2norm=flags.l2norm,
        beta_sigmoid=flags.beta_sigmoid, cu_seqlens=bounds, bound=plan.segments > 1, inverse=flags.keep, strips=not flags.keep,
    )  # fmt: skip
    common: dict[str, Any] = dict(dtype=io, key_dim=key_dim, cu_seqlens=bounds)
    common |= dict(panels=3 if flags.keep else 2, strips=not flags.keep)
    states: dict[str, Any] = dict(states=flags.states or flags.keep, by_value=flags.keep)
    if plan.segments == 1:
        scan = ScanConfig(
            **common, tile=plan.tile, cluster=plan.cluster, state_v_first=flags.state_v_first, initial=initial, final=flags.final,
            **states,
        )  # fmt: skip
        return Kernels(prepare, scan, plan)
    scan = ScanConfig(
        **common,
        tile=plan.tile,
        cluster=plan.cluster,
        state_v_first=flags.state_v_first,
        initial=True,
        final=flags.final,
        early="follow",
        **states,
    )
    over_segments = SegmentsConfig(**common, cluster=SegmentsConfig.cluster_of(key_dim, value_dim))
    combine = CombineConfig(key_dim, flags.state_v_first, initial, flags.final, early=True)
    return Kernels(prepare, scan, plan, over_segments, combine)


def kernels_for(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    flags: Flags,
    sms: int,
    plan: Schedule | None = None,
) -> Kernels:
    """The kernels for these tensors; `plan` replaces the schedule that the cost model chooses."""
    batch, tokens, _, key_dim = q.shape
    return plan_kernels(
        flags, dtype=q.dtype, gate_dtype=g.dtype, beta_dtype=beta.dtype, a_log=a_log is not None, dt_bias=dt_bias is not None,
        initial=initial_state is not None, cu_seqlens=None if cu_seqlens is None else cu_seqlens.dtype,
        sequences=batch if cu_seqlens is None else cu_seqlens.shape[0] - 1, tokens=tokens, value_heads=v.shape[2],
        key_dim=padded(key_dim, KEY_DIMS), value_dim=padded(v.shape[3], VALUE_DIMS), sms=sms, plan=plan,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def kernels_of(problem: DeltaProblem, sms: int) -> Kernels:
    """The kernels that a checked call runs."""
    p = problem
    return plan_kernels(
        flags_of(p), dtype=p.dtype, gate_dtype=p.gate_dtype, beta_dtype=p.beta_dtype, a_log=p.has_a_log, dt_bias=p.has_dt_bias,
        initial=p.has_initial_state, cu_seqlens=p.bounds_dtype, sequences=p.sequences, tokens=p.tokens,
        value_heads=p.value_heads, key_dim=padded(p.key_dim, KEY_DIMS), value_dim=padded(p.value_dim, VALUE_DIMS), sms=sms,
    )  # fmt: skip


def for_blackwell(prepare: PrepareConfig) -> PrepareConfig:
    """`prepare` for Blackwell's scan, which is not cut into segments and reads whole panels."""
    return replace(prepare, bound=False, strips=False)


def blackwell_kernels(p: DeltaProblem, prepare: PrepareConfig, arch: str) -> Iterator[tuple[str, Any]]:
    """The kernels of a call on Blackwell; `prepare` is Hopper's."""
    prepare = for_blackwell(prepare)
    yield "warp.kda_prepare", prepare
    apply, scan = slot_kernels(
        prepare.dtype, prepare.key_dim, padded(p.value_dim, VALUE_DIMS), p.sequences * p.value_heads, prepare.cu_seqlens,
        p.state_v_first, p.has_initial_state, p.output_final_state, BLACKWELL[arch],
    )  # fmt: skip
    yield "warp.kda_apply", apply
    yield "sm100.kda_scan", scan


def flags_of(p: DeltaProblem) -> Flags:
    """The flags of a checked call."""
    return Flags(
        p.scale, p.gate, p.lower_bound, p.l2norm, p.beta_sigmoid, p.beta_limit, p.state_v_first, p.output_final_state,
        p.intermediate_states, p.disable_recompute and p.requires_grad,
    )  # fmt: skip


def aligned(x: Tensor) -> Tensor:
    """x itself where its rows are contiguous and start at multiples of 16 bytes, else one copy."""
    unit = 16 // x.element_size()
    dense = x.is_contiguous()
    fine = x.data_ptr() % 16 == 0
    if not dense or x.shape[-1] % unit:
        fine = fine and x.stride(-1) == 1
        fine = fine and all(s % unit == 0 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)
    return x if fine else x.clone() if dense else x.contiguous()


def widened(x: Tensor, size: int) -> Tensor:
    """x with zeros up to `size` columns, aligned for the kernels."""
    return aligned(x) if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def parameter(x: Tensor | None, width: int, size: int) -> Tensor | None:
    """A parameter of the gate in float32, its rows of `width` padded to `size`."""
    if x is None:
        return None
    if x.dtype != torch.float32 or not x.is_contiguous() or x.data_ptr() % 16:
        x = x.detach().float().contiguous().clone()
    return x if width == size else pad(x.reshape(-1, width), (0, size - width)).reshape(-1)


def padded_state(state: Tensor, key_dim: int, value_dim: int, v_first: bool) -> Tensor:
    columns, rows = (key_dim, value_dim) if v_first else (value_dim, key_dim)
    have_rows, have_columns = state.shape[-2:]
    if (have_rows, have_columns) == (rows, columns):
        return aligned(state.contiguous())
    return pad(state, (0, columns - have_columns, 0, rows - have_rows))


@dataclass
class Form:
    """What calls whose tensors look the same have in common: flags, launch functions, what is allocated.

    `fine`: tensors that look so were handed to the kernels as they are; only their addresses can keep others from it.
    """

    flags: Flags
    kernels: Kernels
    arch: str
    load: Load
    prepare: Function
    scan: Function | None
    value_heads: int
    key_dim: int
    value_dim: int
    widths: tuple[int, int]
    sequences: int
    slots: int
    inner: tuple[int, int]
    factors: Maker
    scores: Maker
    decay: Maker
    bound: Maker
    early: Maker
    output: Maker
    final: Maker
    states: Maker
    fine: bool = False

    @staticmethod
    def of(
        q: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        flags: Flags,
        kernels: Kernels,
        arch: str,
        load: Load = cache.load,
    ) -> Form:
        batch, tokens, _, width = q.shape
        value_heads, value_width = v.shape[2:]
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if arch in BLACKWELL:
            kernels = replace(kernels, prepare=for_blackwell(kernels.prepare))
        key_dim, value_dim = padded(width, KEY_DIMS), padded(value_width, VALUE_DIMS)
        inner = (value_dim, key_dim) if flags.state_v_first else (key_dim, value_dim)
        head = (slots(batch, tokens, sequences, cu_seqlens is not None), value_heads)

        def room(*shape: int, dtype: torch.dtype = q.dtype) -> Maker:
            return maker(shape, dtype, q.device)

        wide: Any = {"dtype": torch.float32}
        return Form(
            flags, kernels, arch, load, load("warp.kda_prepare", kernels.prepare, arch),
            None if arch in BLACKWELL else load("sm90.kda_scan", kernels.scan, arch), value_heads, key_dim, value_dim,
            (width, value_width), sequences, head[0], inner,
            factors=room(*head, 3, key_dim // 64, 64, 64), scores=room(*head, 2, 64, 64), decay=room(*head, key_dim, **wide),
            bound=room(*head, **wide), early=room(sequences * kernels.schedule.segments, value_heads, dtype=torch.int32),
            output=room(batch, tokens, value_heads, value_dim),
            final=room(sequences, value_heads, *inner, **wide), states=room(*head, *inner),
        )  # fmt: skip

    def laid_out(self, given: Inputs) -> Inputs:
        """Inputs as kernels read them: in dtypes that they know, padded, aligned; themselves where they are so already."""
        q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens = given
        if g.dtype not in DTYPE_NAMES:
            g = g.float()
        if beta.dtype not in DTYPE_NAMES:
            beta = beta.float()
        h0 = initial_state
        if h0 is not None:
            h0 = padded_state(h0, self.key_dim, self.value_dim, self.flags.state_v_first)
        return (
            widened(q, self.key_dim), widened(k, self.key_dim), widened(v, self.value_dim), widened(g, self.key_dim), beta,
            parameter(a_log, 1, 1), parameter(dt_bias, self.widths[0], self.key_dim), h0,
            None if cu_seqlens is None else aligned(cu_seqlens),
        )  # fmt: skip


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""q, k, v, g, beta, A_log, dt_bias, the initial state, cu_seqlens."""


class Kept(NamedTuple):
    """What the forward pass leaves to a backward pass that is not to compute it again: operands, and first states `[slots, HV, V, K]`."""

    factors: Tensor
    scores: Tensor
    decay: Tensor
    beta: Tensor
    states: Tensor
    bound: Tensor


Outputs = tuple[Tensor, Tensor | None, Tensor | None, Kept | None]
"""o, the final state, every slot's first state and what is kept, the latter three None where not asked for. A slot is a chunk's place
in the workspace: see `slots`."""


def forward(
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
    arch: str,
    load: Load = cache.load,
) -> Outputs:
    """The forward pass, computed by the kernels."""
    form = Form.of(q, v, cu_seqlens, flags, kernels, arch, load)
    return run(form, (q, k, v, g, beta, a_log, dt_bias, initial_state, cu_seqlens))


def run(form: Form, given: Inputs, may_end_early: bool = False) -> Outputs:
    """`forward` of inputs of a known form. `may_end_early`: the last sequence may end before the tokens do; o is 0 behind it."""
    starts = given[0].data_ptr() | given[1].data_ptr() | given[2].data_ptr() | given[3].data_ptr()
    for x in given[5:]:
        if x is not None:
            starts |= x.data_ptr()
    if not form.fine or starts & 15:
        inputs = form.laid_out(given)
        form.fine = form.fine or all(a is b for a, b in zip(given, inputs, strict=True))
        given = inputs
    q, k, v, g, beta, a_log, dt_bias, h0, cu_seqlens = given
    flags = form.flags
    kept = beta_eff = hs = bound = early = None
    if flags.keep:
        kept = room_for_kept(q, v, form.sequences, cu_seqlens is not None)
        factors, scores, decay, beta_eff, hs, bound = kept
    else:
        factors, scores, decay = form.factors(), form.scores(), form.decay()
    if not form.kernels.prepare.bound:
        bound = None
    else:
        bound = form.bound() if bound is None else bound
        early = form.early()
    form.prepare(
        q, k, g, beta, a_log, dt_bias, cu_seqlens, factors, scores, decay, beta_eff, bound, early, flags.scale,
        flags.lower_bound, flags.beta_limit,
    )  # fmt: skip
    operands = (factors, scores, decay)
    if form.scan is None:
        o, ht = scan_slots(
            *operands, v, h0, cu_seqlens, final=flags.final, state_v_first=flags.state_v_first, arch=form.arch,
            sms=BLACKWELL[form.arch], load=form.load, may_end_early=may_end_early,
        )  # fmt: skip
        return *_narrowed(form, o, ht, None), None
    ht = form.final() if flags.final else None
    if flags.states:
        hs = form.states()
    # All that the scan writes is allocated before what segments leave is freed: it may run while they do.
    o = form.output()
    if may_end_early:
        o.zero_()
    used = form.kernels
    length = (used.schedule.segments, used.schedule.segment_chunks)
    if used.schedule.segments > 1:
        both = (used.over_segments, used.combine)
        h0 = segment_states(both, form.load, form.arch, operands, v, h0, ht, cu_seqlens, bound, early, *length)
    form.scan(factors, scores, decay, v, h0, cu_seqlens, o, ht, hs, None, early, *length)
    if kept is not None:
        return *_narrowed(form, o, ht, None), kept
    return *_narrowed(form, o, ht, hs), None


def segment_states(
    kernels: tuple[SegmentsConfig | None, CombineConfig | None],
    load: Load,
    arch: str,
    operands: tuple[Tensor, Tensor, Tensor],
    v: Tensor,
    h0: Tensor | None,
    ht: Tensor | None,
    cu_seqlens: Tensor | None,
    bound: Tensor | None,
    early: Tensor | None,
    segments: int,
    segment_chunks: int,
) -> Tensor:
    """Segments' initial states, of which some have none: `early` then holds the segments' codes (`tile.early`), no longer undecided.

    Writes the final state `ht`, where it is wanted, of sequences whose last segment does not start early. States are in the layout of the
    second config, `ends` and `maps` transposed.
    """
    over_segments, combine = kernels
    assert over_segments is not None
    assert combine is not None
    (batch, _, heads, value_dim), key_dim, decay = v.shape, combine.key_dim, operands[2]
    units = (batch if cu_seqlens is None else cu_seqlens.shape[0] - 1) * segments
    inner = (value_dim, key_dim) if combine.state_v_first else (key_dim, value_dim)
    ends = decay.new_empty((units, heads, value_dim, key_dim))
    maps = decay.new_empty((units, heads, key_dim, key_dim))
    starts = decay.new_empty((units, heads, *inner))
    launch = load("sm90.kda_segments", over_segments, arch)
    launch(*operands, v, cu_seqlens, ends, maps, bound, early, segments, segment_chunks)
    load("warp.kda_combine", combine, arch)(ends, maps, h0, starts, ht, early, segments)
    return starts


def room_for_kept(q: Tensor, v: Tensor, sequences: int, packed: bool) -> Kept:
    """What is kept of a call, not yet written; of any call, cut into segments or not, since sizes may be symbols here."""
    key_dim, value_dim = _padded(q.shape[3], KEY_DIMS), _padded(v.shape[3], VALUE_DIMS)
    head = (slots(q.shape[0], q.shape[1], sequences, packed), v.shape[2])
    wide: dict[str, Any] = dict(dtype=torch.float32)
    return Kept(
        q.new_empty((*head, 3, key_dim // 64, 64, 64)), q.new_empty((*head, 3, 64, 64)), q.new_empty((*head, key_dim), **wide),
        q.new_empty((*head, 64), **wide), q.new_empty((*head, value_dim, key_dim)), q.new_empty(head, **wide),
    )  # fmt: skip


def slots(batch: int, tokens: int, sequences: int, packed: bool) -> int:
    """Places for chunks in the workspace. Packed: chunk c of sequence n, which starts at token b, has slot b // 64 + n + c."""
    return tokens // CHUNK + sequences if packed else batch * -(-tokens // CHUNK)


def _narrowed(
    form: Form, o: Tensor, ht: Tensor | None, hs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Outputs without the columns that were padded."""
    key_dim, value_dim = form.widths
    if (key_dim, value_dim) == (form.key_dim, form.value_dim):
        return o, ht, hs
    rows, columns = (value_dim, key_dim) if form.flags.state_v_first else (key_dim, value_dim)

    def cut(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[-2:] == (rows, columns) else x[..., :rows, :columns].contiguous()

    return o if o.shape[-1] == value_dim else o[..., :value_dim].contiguous(), cut(ht), cut(hs)
