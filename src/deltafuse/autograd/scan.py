"""KDA's serial stage on datacentre Blackwell, usable alone: from what the stages before it make, as flash-linear-attention has it, to o
and state."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.config import CHUNK, ApplyConfig, BlackwellScanConfig
from ..kernels.sm100.plan import choose
from ..problem import fail
from ..runtime import cache
from ..runtime.probe import environment
from .common import INDEX_NAMES, Load, check_once

ARCHITECTURES = {(10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capabilities that the scan is made for, and the DSL's names of them."""
_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def scan_forward(
    qg: Tensor,
    kg: Tensor,
    w: Tensor,
    u: Tensor,
    aqk: Tensor,
    g: Tensor,
    h0: Tensor | None = None,
    scale: float | None = None,
    *,
    output_final_state: bool = True,
    state_v_first: bool = False,
    aqk_zeroed: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o `[B, T, HV, V]` and the final state `[N, HV, K, V]` (`[N, HV, V, K]` with `state_v_first`) in float32, or None.

    Chunk after chunk of 64 tokens, with G the cumulative sum of the log2 gates inside a chunk and G_C its last row:

        v' = u - w S;   o = scale qg S + Aqk v';   S <- 2^(G_C) S + kg^T v'

    - `qg` = q 2^G, `kg` = k 2^(G_C - G), `w`: `[B, T, HV, K]`; `u`: `[B, T, HV, V]`; `aqk`: `[B, T, HV, 64]`, the scale in it; all
      bfloat16 or all float16. K is 64 or 128, V a multiple of 64.
    - `aqk`'s elements above the diagonal of a chunk may hold anything, unless `aqk_zeroed` says that they are zero.
    - `g` float32: G, `[B, T, HV, K]`, or its rows G_C alone, `[B, ceil(T / 64), HV, K]` (packed: `[T // 64 + N, HV, K]`, chunk c of
      sequence n, which starts at token b, in row b // 64 + n + c).
    - `h0`: float32, as the final state; None is zero. `scale`: K ** -0.5 where None.
    - `cu_seqlens` `[N + 1]`, int32 or int64: bounds of sequences packed along T; B is 1 then. `cu_seqlens_cpu`: the same on the CPU.

    No argument is written, the outputs are new at every call and have no gradient. Raises ValueError for anything else, and on devices
    other than sm_100 and sm_103.
    """
    env = environment(qg.device.type, qg.device.index)
    if env.capability not in ARCHITECTURES:
        fail(
            "qg",
            f"a tensor on {env.title}",
            "tensors on a GPU of " + " or ".join(f"sm_{a}{b}" for a, b in ARCHITECTURES),
        )
    check_scan(qg, kg, w, u, aqk, g, h0, state_v_first, cu_seqlens)
    check_once(qg, cu_seqlens, cu_seqlens_cpu, may_end_early=True)
    return scan_tokens(
        qg, kg, w, u, aqk, g, h0, qg.shape[3] ** -0.5 if scale is None else scale, cu_seqlens, final=output_final_state,
        state_v_first=state_v_first, zeroed=aqk_zeroed, arch=ARCHITECTURES[env.capability], sms=env.sms,
    )  # fmt: skip


def check_scan(
    qg: Tensor,
    kg: Tensor,
    w: Tensor,
    u: Tensor,
    aqk: Tensor,
    g: Tensor,
    h0: Tensor | None,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
) -> None:
    """`scan_forward`'s arguments but for the values of the bounds."""
    if qg.dim() != 4:
        fail("qg", f"shape {tuple(qg.shape)}", "[B, T, HV, K]")
    batch, tokens, heads, key_dim = qg.shape
    if qg.dtype not in _NAMES:
        fail("qg", str(qg.dtype), "torch.bfloat16, torch.float16")
    if key_dim not in (64, 128):
        fail("qg", f"K = {key_dim}", "K of 64 or 128")
    if u.dim() != 4 or u.shape[3] == 0 or u.shape[3] % 64:
        fail("u", f"shape {tuple(u.shape)}", "[B, T, HV, V] with V a multiple of 64")
    value_dim = u.shape[3]
    for name, x, width in (("kg", kg, key_dim), ("w", w, key_dim), ("u", u, value_dim), ("aqk", aqk, CHUNK)):
        if x.shape != (batch, tokens, heads, width):
            fail(name, f"shape {tuple(x.shape)}", f"{(batch, tokens, heads, width)}")
        if x.dtype != qg.dtype:
            fail(name, str(x.dtype), f"qg's {qg.dtype}")
    sequences = batch
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in INDEX_NAMES:
            fail("cu_seqlens", f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}", "[N + 1], torch.int32 or torch.int64")
        if batch != 1:
            fail("qg", f"B = {batch}", "B = 1 with cu_seqlens")
        sequences = cu_seqlens.shape[0] - 1
    last = (
        (tokens // CHUNK + sequences, heads, key_dim)
        if cu_seqlens is not None
        else (batch, -(-tokens // CHUNK), heads, key_dim)
    )
    if g.shape not in ((batch, tokens, heads, key_dim), last):
        fail("g", f"shape {tuple(g.shape)}", f"{(batch, tokens, heads, key_dim)}, or {last} for the chunks' last rows")
    if g.dtype != torch.float32:
        fail("g", str(g.dtype), "torch.float32")
    inner = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
    if h0 is not None and h0.shape != (sequences, heads, *inner):
        fail("h0", f"shape {tuple(h0.shape)}", f"{(sequences, heads, *inner)}")
    if h0 is not None and h0.dtype != torch.float32:
        fail("h0", str(h0.dtype), "torch.float32")
    for name, y in (("kg", kg), ("w", w), ("u", u), ("aqk", aqk), ("g", g), ("h0", h0), ("cu_seqlens", cu_seqlens)):
        if y is not None and y.device != qg.device:
            fail(name, f"a tensor on {y.device}", f"qg's {qg.device}")


def scan_tokens(
    qg: Tensor,
    kg: Tensor,
    w: Tensor,
    u: Tensor,
    aqk: Tensor,
    g: Tensor,
    h0: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    *,
    final: bool,
    state_v_first: bool,
    zeroed: bool,
    arch: str,
    sms: int,
    load: Load = cache.load,
) -> tuple[Tensor, Tensor | None]:
    """`scan_forward` on checked arguments."""
    batch, tokens, heads, key_dim = qg.shape
    value_dim = u.shape[3]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o, ht = _outputs(qg, (batch, tokens, heads), sequences, key_dim, value_dim, h0, final, state_v_first)
    if o.numel() and sequences:
        every = g.dim() == 4 and g.shape[1] == tokens
        tile, cluster = choose(sequences * heads, value_dim, sms)
        config = BlackwellScanConfig(
            _NAMES[qg.dtype], key_dim, tile, cluster, "tokens", "all" if every else "last", zeroed, state_v_first, h0 is not None, final,
            "" if cu_seqlens is None else INDEX_NAMES[cu_seqlens.dtype],
        )  # fmt: skip
        if not every:
            g = g.reshape(-1, heads, key_dim)
        load("sm100.kda_scan", config, arch)(
            *(_aligned(x) for x in (qg, kg, w, u, aqk, g)),
            None if h0 is None else _aligned(h0),
            _bounds(cu_seqlens),
            o,
            ht,
            float(scale),
        )
    return o, ht


def slot_kernels(
    dtype: str,
    key_dim: int,
    value_dim: int,
    units: int,
    cu_seqlens: str,
    v_first: bool,
    initial: bool,
    final: bool,
    sms: int,
) -> tuple[ApplyConfig, BlackwellScanConfig]:
    """What `scan_slots` compiles `warp.kda_apply` and `sm100.kda_scan` for; `units` counts sequences times value heads."""
    tile, cluster = choose(units, value_dim, sms)
    config = BlackwellScanConfig(
        dtype,
        key_dim,
        tile,
        cluster,
        "slots",
        state_v_first=v_first,
        initial=initial,
        final=final,
        cu_seqlens=cu_seqlens,
    )
    return ApplyConfig(dtype, key_dim), config


def scan_slots(
    factors: Tensor,
    scores: Tensor,
    decay: Tensor,
    v: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    final: bool,
    state_v_first: bool,
    arch: str,
    sms: int,
    load: Load = cache.load,
    may_end_early: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """o and the final state from what `warp.kda_prepare` hands over: factors, scores, decay by slot, and v `[B, T, HV, V]`.

    `may_end_early` as in `kda_cute.run`.
    """
    slots, heads, _, keys = factors.shape[:4]
    key_dim, value_dim = 64 * keys, v.shape[3]
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    o, ht = _outputs(v, tuple(v.shape[:3]), sequences, key_dim, value_dim, h0, final, state_v_first)
    if may_end_early:
        o.zero_()
    if o.numel() and sequences:
        bounds = "" if cu_seqlens is None else INDEX_NAMES[cu_seqlens.dtype]
        cu_seqlens, v = _bounds(cu_seqlens), _aligned(v)
        w = v.new_empty((slots, heads, keys, 64, 64))
        apply, config = slot_kernels(
            _NAMES[v.dtype], key_dim, value_dim, sequences * heads, bounds, state_v_first, h0 is not None, final, sms
        )
        load("warp.kda_apply", apply, arch)(factors, scores, w)
        load("sm100.kda_scan", config, arch)(
            factors, None, w, v, scores, decay, None if h0 is None else _aligned(h0), cu_seqlens, o, ht, 1.0
        )
    return o, ht


def _outputs(
    like: Tensor,
    shape: tuple[int, ...],
    sequences: int,
    key_dim: int,
    value_dim: int,
    h0: Tensor | None,
    final: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """New outputs; the state complete where there is nothing to scan."""
    o = like.new_empty((*shape, value_dim))
    if not final:
        return o, None
    inner = (value_dim, key_dim) if state_v_first else (key_dim, value_dim)
    ht = like.new_empty((sequences, shape[2], *inner), dtype=torch.float32)
    if o.numel() == 0:
        ht.zero_() if h0 is None else ht.copy_(h0)
    return o, ht


def _bounds(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """x without gradient, where its rows are contiguous and start at multiples of 16 bytes, as tensor copies need; else a copy of it."""
    x, unit = x.detach(), 16 // x.element_size()
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s % unit == 0 for s in x.stride()[:-1]):
        return x
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
