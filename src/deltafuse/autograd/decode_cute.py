"""Decoding on this package's own kernel: what a call's tensors need of it, and its launch.

`recurrent_forward` and `recurrent_serve` do what those of `reference.recurrent` do, on a GPU's current stream. They wait for no value on
the device: slots outside the pool count as none, bounds are kept inside the tensors. Where `out` and the pool are given and the tensors
are laid out as kernels read them, nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.config import DecodeConfig, LayerDecodeConfig
from ..problem import DeltaCall, DeltaProblem
from ..reference.chunk import DeltaTensors
from ..reference.options import DeltaOptions
from ..runtime import cache
from .common import DTYPE_NAMES, INDEX_NAMES, Function, Load, Maker, leaf, maker

KERNEL = "warp.delta_decode"
COLUMNS = 16
"""V is a multiple of it: the columns of a narrow warp."""
FEW = 2048
"""Up to so many warps of work every warp is a CTA of its own, so that they spread over all multiprocessors."""


def decode_config(
    t: DeltaTensors,
    options: DeltaOptions,
    *,
    state: torch.dtype | None,
    final: torch.dtype | None,
    store: str,
    indices: Tensor | None = None,
    accepted: Tensor | None = None,
    layout: tuple[int, int] | None = None,
) -> DecodeConfig:
    """What the kernel of a call is compiled for: `state` and `final` are the dtypes of what is read and, as `store` says, written.

    `layout`: warps a CTA and columns of V a warp, None for what suits the size.
    """
    work = t.sequences * t.v.shape[2] * (t.v.shape[3] // COLUMNS)
    config = DecodeConfig(
        dtype=DTYPE_NAMES[t.q.dtype], key_dim=t.q.shape[3], value_dim=t.v.shape[3], per_key=t.g.dim() == 4, gate=options.gate,
        gate_dtype=DTYPE_NAMES[t.g.dtype], beta_dtype=DTYPE_NAMES[t.beta.dtype], beta_per_value=t.beta.dim() == 4,
        a_log=t.a_log is not None, dt_bias=t.dt_bias is not None, l2norm=options.l2norm, beta_sigmoid=options.beta_sigmoid,
        state_dtype="" if state is None else DTYPE_NAMES[state],
        final_dtype="float32" if final is None else DTYPE_NAMES[final], store=store,
        state_v_first=options.state_v_first, indices="" if indices is None else INDEX_NAMES[indices.dtype],
        per_token=indices is not None and indices.dim() == 2, accepted="" if accepted is None else INDEX_NAMES[accepted.dtype],
        cu_seqlens="" if t.cu_seqlens is None else INDEX_NAMES[t.cu_seqlens.dtype],
        single=t.q.shape[1] == 1 and t.cu_seqlens is None,
    )  # fmt: skip
    warps, columns = layout or _layout(config, work <= FEW)
    return replace(config, warps=warps, columns=columns)


def _layout(config: DecodeConfig, few: bool) -> tuple[int, int]:
    """Warps a CTA and columns of V a warp.

    Few narrow warps spread over the multiprocessors. Of many, single tokens' want whole lines of 128 bytes: 32 columns of fp32 or 64 of 16
    bits of [K, V], two such warps a CTA where registers let few compute. [V, K] has whole lines anyway: 16 bits, which leave room for more
    warps, do best with many of them.
    """
    packed = config.state_dtype in ("bfloat16", "float16")
    wide = config.single and config.key_dim <= 128
    if few or (wide and packed and config.state_v_first):
        return 1, COLUMNS
    if not wide or config.value_dim % (2 * COLUMNS):
        return 4, COLUMNS
    if not packed:
        return 1, 2 * COLUMNS
    return (4, 2 * COLUMNS) if config.value_dim % (4 * COLUMNS) else (2, 4 * COLUMNS)


def options_of(p: DeltaProblem) -> DeltaOptions:
    """The options of a call that goes token by token."""
    return DeltaOptions(p.scale, p.gate, p.lower_bound, p.l2norm, p.beta_sigmoid, p.beta_limit, p.state_v_first)


def known_options(p: DeltaProblem, known: dict[Any, Any]) -> DeltaOptions:
    """`options_of`, looked up in what is known of a call."""
    options = known.get(DeltaOptions)
    if options is None:
        options = known[DeltaOptions] = options_of(p)
    return options


def _store(indices: Tensor | None, token_states: bool) -> str:
    """How a call on a pool writes states."""
    return "each" if token_states else "tokens" if indices is not None and indices.dim() == 2 else "last"


def kernels_of(p: DeltaProblem) -> tuple[tuple[str, DecodeConfig], ...]:
    """The kernels that calls of this form run, for few and for many sequences."""
    read = p.state_dtype if p.has_initial_state else None
    written: torch.dtype | None
    if p.pooled or p.inplace:
        store = "each" if p.pooled and not p.inplace else "tokens" if p.slot_per_token else "last"
        written = read
    else:
        written, store = (torch.float32, "last") if p.output_final_state else (None, "")
    name: dict[Any, str] = {None: "", **INDEX_NAMES}
    config = DecodeConfig(
        dtype=DTYPE_NAMES[p.dtype], key_dim=p.key_dim, value_dim=p.value_dim, per_key=p.per_key, gate=p.gate,
        gate_dtype=DTYPE_NAMES[p.gate_dtype], beta_dtype=DTYPE_NAMES[p.beta_dtype], beta_per_value=p.beta_per_value, a_log=p.has_a_log,
        dt_bias=p.has_dt_bias, l2norm=p.l2norm, beta_sigmoid=p.beta_sigmoid, state_dtype="" if read is None else DTYPE_NAMES[read],
        final_dtype="float32" if written is None else DTYPE_NAMES[written], store=store, state_v_first=p.state_v_first,
        indices=name[p.index_dtype], per_token=p.slot_per_token, accepted=name[p.accepted_dtype], cu_seqlens=name[p.bounds_dtype],
        single=p.tokens == 1 and not p.packed,
    )  # fmt: skip
    layouts = (_layout(config, few) for few in (True, False))
    return tuple((KERNEL, replace(config, warps=warps, columns=columns)) for warps, columns in layouts)


def recurrent(call: DeltaCall, *, arch: str, load: Load = cache.load) -> tuple[Tensor, Tensor | None]:
    """A checked call of a recurrent op, without gradients: `(o, final states, pool or the state after every token; or None)`."""
    p, known = call.problem, call.known
    tensors = DeltaTensors(
        call.q, call.k, call.v, call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, call.cu_seqlens
    )
    options = known_options(p, known)
    if not (p.pooled or p.inplace):
        return recurrent_forward(
            tensors, options, final=p.output_final_state, out=call.out, arch=arch, load=load, known=known
        )
    pool, states = call.initial_state, None
    assert pool is not None
    out = _makers(tensors, options, known)[0]() if call.out is None else call.out
    if not p.inplace:
        states = pool.new_empty((p.batch * p.tokens, *pool.shape[1:]))
    recurrent_serve(
        tensors, options, pool, call.state_indices, call.accepted, out, states, arch=arch, load=load, known=known,
        apart=call.out is None,
    )  # fmt: skip
    return out, pool if states is None else states


def _rows_fine(x: Tensor, key_dim: int) -> bool:
    """Whether a lane can read x's last dimension in vectors of up to 16 bytes, from an aligned start."""
    if x.is_contiguous():
        return True
    unit = min(16 // x.element_size(), key_dim // 32)
    return x.stride(-1) == 1 and all(
        s % unit == 0 or n == 1 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True)
    )


def _states_fine(x: Tensor) -> bool:
    """Whether states [slots, HV, rows, columns] lie as the kernel reads and writes them, from an aligned start."""
    if x.is_contiguous():
        return True
    unit = 16 // x.element_size()
    rows, columns = x.shape[-2:]
    inner = x.stride(-1) == 1 and (rows == 1 or x.stride(-2) == columns)
    return inner and all(s % unit == 0 or n == 1 for s, n in zip(x.stride()[:2], x.shape[:2], strict=True))


def _parameter_fine(x: Tensor | None) -> bool:
    return x is None or (x.dtype == torch.float32 and x.is_contiguous())


def _parameter(x: Tensor | None) -> Tensor | None:
    return x if x is None else leaf(x) if _parameter_fine(x) else x.detach().float().contiguous()


def _bytes(x: Tensor) -> int:
    """From x's first byte to its last."""
    if not x.numel():
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


@dataclass(frozen=True)
class _Plan:
    """What depends on the dtypes, shapes and strides of a call alone: its kernel, whether tensors lie right, and how long they are."""

    function: Function
    rows: tuple[bool, bool, bool]
    states: tuple[bool, bool]
    parameters: bool
    spans: tuple[int, ...]

    @property
    def fine(self) -> bool:
        return all(self.rows) and all(self.states) and self.parameters


_plans: dict[Any, tuple[_Plan, bool]] = {}
_PLANS = 4096
"""Plans that are remembered before all are forgotten: a server's shapes are few."""


def _plan(
    t: DeltaTensors,
    out: Tensor,
    state: Tensor | None,
    final: Tensor | None,
    config: DecodeConfig,
    load: Load,
    arch: str,
) -> _Plan:
    keys = (t.q, t.k, t.g) if config.per_key else (t.q, t.k)
    rows = [_rows_fine(x, config.key_dim) for x in keys]
    return _Plan(
        load(KERNEL, config, arch), (rows[0], rows[1], rows[2] if config.per_key else True),
        (state is None or _states_fine(state), final is None or _states_fine(final)),
        _parameter_fine(t.a_log) and _parameter_fine(t.dt_bias), tuple(map(_bytes, (t.q, t.k, t.v, t.g, t.beta, out))),
    )  # fmt: skip


def _find_plan(
    t: DeltaTensors,
    options: DeltaOptions,
    tensors: tuple[Tensor | None, ...],
    store: str,
    arch: str,
    load: Load,
    layout: tuple[int, int] | None,
) -> tuple[_Plan, bool] | None:
    """The plan of a launch on the kernel's tensors, and whether all lie right; None where there is nothing to launch."""
    forms = tuple([None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors])
    key = (arch, load, layout, store, options, forms)
    found = _plans.get(key)
    if found is None:
        state, indices, accepted, _, out, final = tensors[7:]
        assert out is not None
        if t.sequences == 0 or (indices is not None and state is not None and not state.shape[0]):
            return None
        read, written = (None if x is None else x.dtype for x in (state, final))
        config = decode_config(
            t, options, state=read, final=written, store=store, indices=indices, accepted=accepted, layout=layout
        )
        if len(_plans) >= _PLANS:
            _plans.clear()
        plan = _plan(t, out, state, final, config, load, arch)
        found = _plans[key] = plan, plan.fine
    return found


def launch(
    t: DeltaTensors,
    options: DeltaOptions,
    *,
    state: Tensor | None,
    final: Tensor | None,
    store: str,
    out: Tensor,
    indices: Tensor | None = None,
    accepted: Tensor | None = None,
    arch: str,
    load: Load = cache.load,
    layout: tuple[int, int] | None = None,
    known: dict[Any, Any] | None = None,
    apart: bool = False,
) -> None:
    """Run the kernel: reads `state` (None: zeros), writes `out`, and `final` (which may be `state`) as `store` says.

    What does not lie as the kernel wants it is copied, and copied back where it is written. `layout` as in `decode_config`.
    `known`: what is known of calls with tensors that look like these and the same other arguments. `apart`: `out` was made for this call.
    """
    given = (t.q, t.k, t.v, t.g, t.beta, t.a_log, t.dt_bias, state, indices, accepted, t.cu_seqlens, out, final)
    tensors = tuple([x if x is None else leaf(x) for x in given])
    found = None if known is None else known.get((_Plan, load))
    if found is None:
        found = _find_plan(t, options, tensors, store, arch, load, layout)
        if found is None:
            out.zero_()
            if store == "each" and final is not None:
                final.zero_()
            return
        if known is not None:
            known[_Plan, load] = found
    plan, fine = found
    starts = [t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.g.data_ptr(), t.beta.data_ptr()]
    if not apart:
        first = out.data_ptr()
        last = first + plan.spans[5]
        apart = all(start >= last or first >= start + span for start, span in zip(starts, plan.spans, strict=False))
    misplaced = starts[0] | starts[1] | (starts[3] if t.g.dim() == 4 else 0)
    for x in (state, final):
        if x is not None:
            misplaced |= x.data_ptr()
    if fine and apart and not misplaced & 15:
        plan.function(*tensors, options.scale, options.lower_bound, options.beta_limit)
    else:
        _launch_on_copies(plan, t, options, state, final, out, apart, tensors)


def _launch_on_copies(
    plan: _Plan,
    t: DeltaTensors,
    options: DeltaOptions,
    state: Tensor | None,
    final: Tensor | None,
    out: Tensor,
    apart: bool,
    tensors: tuple[Tensor | None, ...],
) -> None:
    def right(x: Tensor | None, fine: bool) -> Tensor | None:
        if x is None or (fine and x.data_ptr() % 16 == 0):
            return x if x is None else leaf(x)
        return x.detach().clone(memory_format=torch.contiguous_format)

    args = list(tensors)
    for place, fine in zip((0, 1, 3), plan.rows, strict=True):
        args[place] = right(args[place], fine) if place != 3 or t.g.dim() == 4 else t.g
    args[5], args[6] = _parameter(t.a_log), _parameter(t.dt_bias)
    args[7] = right(state, plan.states[0])
    args[12] = args[7] if final is state else right(final, plan.states[1])
    args[11] = out if apart else torch.empty_like(out)
    plan.function(*args, options.scale, options.lower_bound, options.beta_limit)
    for place, x in ((11, out), (12, final)):
        held = args[place]
        if x is not None and held is not None and held is not x:
            x.copy_(held)


def recurrent_forward(
    t: DeltaTensors,
    options: DeltaOptions,
    *,
    final: bool = True,
    out: Tensor | None = None,
    arch: str,
    load: Load = cache.load,
    known: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`(o [B, T, HV, V] in q's dtype, final state in float32, or None where it is not wanted)`."""
    apart = out is None
    output, state = _makers(t, options, known)
    if out is None:
        out = output()
    written = state() if final else None
    launch(
        t,
        options,
        state=t.initial_state,
        final=written,
        store="last" if final else "",
        out=out,
        arch=arch,
        load=load,
        known=known,
        apart=apart,
    )
    return out, written


def _makers(t: DeltaTensors, options: DeltaOptions, known: dict[Any, Any] | None) -> tuple[Maker, Maker]:
    """What makes the output and the final state in float32."""
    found = None if known is None else known.get(_makers)
    if found is None:
        heads, value_dim = t.v.shape[2:]
        inner = (value_dim, t.q.shape[3]) if options.state_v_first else (t.q.shape[3], value_dim)
        states = (t.sequences, heads, *inner)
        found = maker(t.v.shape, t.v.dtype, t.v.device), maker(states, torch.float32, t.v.device)
        if known is not None:
            known[_makers] = found
    return found


def recurrent_serve(
    t: DeltaTensors,
    options: DeltaOptions,
    pool: Tensor,
    indices: Tensor | None,
    accepted: Tensor | None,
    out: Tensor,
    token_states: Tensor | None,
    *,
    arch: str,
    load: Load = cache.load,
    known: dict[Any, Any] | None = None,
    apart: bool = False,
) -> None:
    """Decode on a pool of states, which is written unless `token_states` is there to take the state after every token.

    As `reference.recurrent.recurrent_serve`; without `indices` the slot of sequence n is n. `apart` as in `launch`.
    """
    final = pool if token_states is None else token_states
    launch(
        t, options, state=pool, final=final, store=_store(indices, token_states is not None), out=out, indices=indices,
        accepted=accepted, arch=arch, load=load, known=known, apart=apart,
    )  # fmt: skip


# ---- a layer's token ---------------------------------------------------------------------------------------------------------------
LAYER_KERNEL = "warp.layer_decode"
LAYER_WARPS = {64: 24, 128: 16, 256: 8}
"""Warps of 16 columns of V that a CTA of the layer's kernel holds, by K."""


class LayerToken(NamedTuple):
    """One token a sequence of a KDA layer: what its projections give, rows `[N, ...]`, and its parameters.

    xq, xk `[N, H * K]`, xv, z `[N, HV * V]`, f `[N, HV * K]` the raw gate, beta `[N, HV]` raw; of the convolutions of q, k, v the caches
    `[N, D, W]`, the weights `[D, W]` and the biases `[D]` or None; norm `[V]` or None.
    """

    xq: Tensor
    xk: Tensor
    xv: Tensor
    f: Tensor
    beta: Tensor
    z: Tensor
    caches: Sequence[Tensor]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor] | None
    norm: Tensor | None
    a_log: Tensor | None
    dt_bias: Tensor | None
    key_dim: int
    value_dim: int

    @property
    def ratio(self) -> int:
        return self.f.shape[1] // self.xq.shape[1]


def layer_misplaced(t: LayerToken) -> bool:
    """Whether caches or weights start where the layer's kernel cannot read a channel's taps at once."""
    starts = [0, 0]
    for i, group in enumerate((t.caches, t.weights)):
        for x in group:
            starts[i] |= x.data_ptr()
    taps, cache, weight = t.weights[0].shape[1], t.caches[0].element_size(), t.weights[0].element_size()
    return starts[0] % (taps * cache) != 0 or starts[1] % (taps * weight) != 0


def layer_unsupported(t: LayerToken, state: Tensor | None) -> str | None:
    """Why the layer's kernel cannot take a token, wherever its tensors start; None where it can."""
    rows = (t.xq, t.xk, t.xv, t.f, t.beta, t.z)
    if any(x.dtype != t.xq.dtype or x.dtype not in DTYPE_NAMES for x in rows):
        return "the layer kernel takes projections in one dtype, bfloat16, float16 or float32"
    groups = {
        "caches": t.caches,
        "weights": t.weights,
        "biases": t.biases or (),
        "state": () if state is None else (state,),
    }
    for name, group in groups.items():
        if len({x.dtype for x in group}) > 1 or any(x.dtype not in DTYPE_NAMES for x in group):
            return f"the layer kernel takes {name} in one dtype, bfloat16, float16 or float32"
    if t.biases and t.biases[0].dtype != t.weights[0].dtype:
        return "the layer kernel takes biases in the weights' dtype"
    if t.norm is not None and t.norm.dtype not in DTYPE_NAMES:
        return "the layer kernel takes the norm's weight in bfloat16, float16 or float32"
    taps = t.weights[0].shape[1]
    if taps not in (2, 4) or any(x.stride(2) != 1 or x.stride(1) != taps or x.stride(0) % taps for x in t.caches):
        return "the layer kernel takes 2 or 4 taps, caches contiguous in their last two dimensions"
    if not all(x.is_contiguous() for x in t.weights):
        return "the layer kernel takes contiguous weights"
    if t.key_dim not in LAYER_WARPS or t.value_dim % COLUMNS or t.value_dim > COLUMNS * LAYER_WARPS[t.key_dim]:
        return f"the layer kernel takes no K {t.key_dim} with V {t.value_dim}"
    if t.ratio not in (1, 2, 4, 8):
        return f"the layer kernel takes 1, 2, 4 or 8 value heads a key head, not {t.ratio}"
    return None


def layer_config(t: LayerToken, options: DeltaOptions, state: Tensor | None, final: Tensor | None) -> LayerDecodeConfig:
    return LayerDecodeConfig(
        dtype=DTYPE_NAMES[t.xq.dtype], key_dim=t.key_dim, value_dim=t.value_dim, ratio=t.ratio, conv_size=t.weights[0].shape[1],
        conv_bias=t.biases is not None, conv_dtype=DTYPE_NAMES[t.weights[0].dtype], cache_dtype=DTYPE_NAMES[t.caches[0].dtype],
        norm_dtype="" if t.norm is None else DTYPE_NAMES[t.norm.dtype], gate=options.gate, a_log=t.a_log is not None,
        dt_bias=t.dt_bias is not None, state_dtype="" if state is None else DTYPE_NAMES[state.dtype],
        final_dtype="float32" if final is None else DTYPE_NAMES[final.dtype], final=final is not None, state_v_first=options.state_v_first,
    )  # fmt: skip


def layer_token(
    t: LayerToken,
    options: DeltaOptions,
    state: Tensor | None,
    final: Tensor | None,
    *,
    eps: float,
    out: Tensor | None = None,
    arch: str,
    load: Load = cache.load,
    known: dict[Any, Any] | None = None,
) -> Tensor:
    """What the layer's output projection takes, `[N, HV * V]`; moves the caches on, and writes the states after the token to `final`.

    y = rms_norm(delta_rule(silu(conv(x)))) sigmoid(z), with q and k normalised, `options.gate` and beta's sigmoid. `final` may be `state`.
    `known` as in `launch`.
    """
    found = None if known is None else known.get((layer_token, load))
    if found is None:
        function = load(LAYER_KERNEL, layer_config(t, options, state, final), arch)
        found = function, maker(t.xv.shape, t.xv.dtype, t.xv.device)
        if known is not None:
            known[layer_token, load] = found
    function, output = found
    if out is None:
        out = output()
    if state is not None and not _aligned_states(state):
        state = state.clone(memory_format=torch.contiguous_format)
    held = (
        final
        if final is None or _aligned_states(final)
        else torch.empty_like(final, memory_format=torch.contiguous_format)
    )
    xq, xk, xv, f, beta, z = (x if x.stride(1) == 1 else x.contiguous() for x in (t.xq, t.xk, t.xv, t.f, t.beta, t.z))
    if not _rows_fine(f, t.key_dim) or f.data_ptr() % 16:
        f = f.clone(memory_format=torch.contiguous_format)
    function(
        xq, xk, xv, *t.caches, *t.weights, *(t.biases or (None,) * 3), f, beta, z, t.norm,
        _parameter(t.a_log), _parameter(t.dt_bias), state, out, held, options.scale, options.lower_bound, options.beta_limit, eps,
    )  # fmt: skip
    if final is not None and held is not None and held is not final:
        final.copy_(held)
    return out


def _aligned_states(x: Tensor) -> bool:
    return _states_fine(x) and x.data_ptr() % 16 == 0
