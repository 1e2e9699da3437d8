"""A KDA layer's next token on this package's own kernel for it, where that takes the call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..problem import DeltaCall, recall, remember, tangents
from ..runtime import cache
from ..support import Plan
from . import decode_cute
from .common import leaf, machine, maker, observed, written


def token(
    call: DeltaCall,
    plan: Plan,
    z: Tensor,
    caches: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor] | None:
    """`(what the output projection takes [N, 1, HV * V], final state)`, the caches moved on; None, and nothing done, where the kernel does
    not reach. `call` has the projections that the convolutions have not seen yet as its q, k and v.
    """
    p, state = call.problem, call.initial_state
    if (
        plan.backend != "cute"
        or p.requires_grad
        or (forward_ad._current_level >= 0 and tangents(z, *caches, *weights, *(biases or ()), norm))
        or observed(*call.tensors, z, *caches, *weights, *(biases or ()), norm)
    ):
        return None
    if (
        p.tokens != 1
        or p.packed
        or p.batch == 0
        or state is None
        or not (p.l2norm and p.beta_sigmoid)
        or p.gate == "log"
    ):
        return None
    given = (z, *caches, *weights, *(biases or ()), norm)
    form, fits, known = recall(("kda_layer_token", p, None if biases is None else len(biases)), given)
    rows = [x.reshape(p.batch, -1) for x in (call.q, call.k, call.v, call.g, call.beta, z)]
    xq, xk, xv, f, beta, output_gate = rows
    weights, biases = [leaf(x) for x in weights], None if biases is None else [leaf(x) for x in biases]
    norm = None if norm is None else leaf(norm)
    t = decode_cute.LayerToken(
        xq, xk, xv, f, beta, output_gate, caches, weights, biases, norm, call.a_log, call.dt_bias, p.key_dim, p.value_dim
    )  # fmt: skip
    if fits is None:
        fits = _fits(p.batch, rows, caches, weights, biases, norm, p.value_dim)
        fits = fits and decode_cute.layer_unsupported(t, state) is None
        remember(form, fits, known)
    if not fits or decode_cute.layer_misplaced(t):
        return None
    # Parameters stay leaves that want gradients where there is no autograd; DLPack may refuse to hand them over.
    state = leaf(state)
    make = known.get(maker)
    if make is None:
        make = known[maker] = maker(state.shape, torch.float32, state.device)
    final = make()
    y = decode_cute.layer_token(
        t, decode_cute.known_options(p, call.known), state, final, eps=eps, arch=machine(call.q, call.known)["arch"], load=cache.load,
        known=known,
    )  # fmt: skip
    written(*caches)
    return y.unsqueeze(1), final


def _fits(
    sequences: int,
    rows: Sequence[Tensor],
    caches: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    norm: Tensor | None,
    value_dim: int,
) -> bool:
    """Whether shapes and devices are those of one layer: what is not is for the separate ops to complain about."""
    widths = [x.shape[1] for x in rows[:3]]
    taps = weights[0].shape[-1]
    shapes = [
        *zip(weights, ((d, taps) for d in widths), strict=True),
        *zip(caches, ((sequences, d, taps) for d in widths), strict=True),
        *zip(biases or (), ((d,) for d in widths[: len(biases or ())]), strict=True),
        (rows[5], (sequences, widths[2])),
    ]
    if norm is not None:
        shapes.append((norm, (value_dim,)))
    if any(tuple(x.shape) != shape or x.device != rows[0].device for x, shape in shapes):
        return False
    apart = all(sequences == 1 or x.stride(0) >= d * taps for x, d in zip(caches, widths, strict=True))
    return apart and all(x.is_contiguous() for x in (*(biases or ()), *(() if norm is None else (norm,))))
