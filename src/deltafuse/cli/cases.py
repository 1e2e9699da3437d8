"""The calls that `verify` makes: a few that cover every switch, length and layout, and many for a thorough run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from .specs import ConvSpec, DeltaSpec, GateSpec, Spec


@dataclass(frozen=True)
class Case:
    """One call; `gradients` says whether they are compared too."""

    name: str
    spec: Spec
    gradients: bool = True


EMPTY_FIRST = (0, 0, 100, 0, 27)
UNEVEN = (15, 85, 1, 64, 0, 90)
_RAW: dict[str, Any] = {"l2norm": True, "beta_sigmoid": True}
_TRAINED: dict[str, Any] = _RAW | {"gate": "softplus", "decay": "remembering"}


def _delta(op: str, name: str, gradients: bool = True, **fields: Any) -> Case:
    return Case(name, DeltaSpec(op, **fields), gradients)


def _chunk_kda() -> list[Case]:
    op, raw = "chunk_kda", _RAW
    return [
        _delta(op, "plain", tokens=63),
        _delta(op, "states, T 500", tokens=500, heads=1, initial_state=True, final_state=True),
        _delta(op, "softplus gate, V first", tokens=130, key_dim=60, value_dim=100, initial_state=True,
               final_state=True, v_first=True, **_TRAINED),
        _delta(op, "bounded gate, GVA", batch=2, tokens=96, heads=1, value_heads=4, gate="bounded", safe_gate=True,
               final_state=True, chunk_size=32, **raw),
        _delta(op, "bounded gate without A_log and dt_bias", tokens=65, gate="bounded", a_log=False, dt_bias=False,
               key_dim=32, **raw),
        _delta(op, "negative eigenvalues, wide beta", tokens=100, neg_eigval=True, wide_beta=True, scale=0.3,
               value_heads=4, value_dim=60, **raw),
        _delta(op, "packed with empty sequences", tokens=127, lengths=EMPTY_FIRST, initial_state=True, final_state=True,
               value_heads=4, key_dim=100, value_dim=64),
        _delta(op, "packed, V first, raw", tokens=sum(UNEVEN), lengths=UNEVEN, initial_state=True, final_state=True,
               v_first=True, heads=1, **_TRAINED),
        _delta(op, "strong decays", tokens=200, decay="strong", initial_state=True, final_state=True),
        _delta(op, "strong softplus gate", tokens=200, gate="softplus", decay="strong", final_state=True, **raw),
        _delta(op, "all states kept, T 1100", tokens=1100, heads=1, key_dim=32, value_dim=32, disable_recompute=True,
               initial_state=True, decay="remembering"),
        _delta(op, "strided, short", tokens=7, strided=True, initial_state=True, final_state=True),
        _delta(op, "intermediate states", gradients=False, tokens=600, heads=1, initial_state=True, final_state=True,
               intermediate=True, v_first=True, chunk_size=32),
    ]  # fmt: skip


def _recurrent_kda() -> list[Case]:
    op, raw = "fused_recurrent_kda", _TRAINED
    return [
        _delta(op, "one token", batch=3, tokens=1, initial_state=True, final_state=True, **raw),
        _delta(op, "packed, GVA, V first", tokens=127, lengths=EMPTY_FIRST, value_heads=4, key_dim=60, value_dim=100,
               initial_state=True, final_state=True, v_first=True, **raw),
        _delta(op, "strong decays", tokens=63, decay="strong", initial_state=True, final_state=True),
        _delta(op, "slot a sequence", gradients=False, batch=4, tokens=2, slots="sequence", value_heads=4, **raw),
        _delta(op, "slot a token", gradients=False, batch=3, tokens=3, slots="token", v_first=True, **raw),
    ]  # fmt: skip


def _chunk_gdn() -> list[Case]:
    op, raw = "chunk_gated_delta_rule", _RAW
    return [
        _delta(op, "plain", tokens=63),
        _delta(op, "states, T 500, V first", tokens=500, heads=1, initial_state=True, final_state=True, v_first=True),
        _delta(op, "softplus gate, GVA", batch=2, tokens=96, heads=1, value_heads=4, key_dim=60, value_dim=100,
               final_state=True, chunk_size=16, **_TRAINED),
        _delta(op, "packed, negative eigenvalues", tokens=sum(UNEVEN), lengths=UNEVEN, neg_eigval=True,
               initial_state=True, final_state=True, value_heads=4, **raw),
        _delta(op, "strong decays", tokens=200, decay="strong", initial_state=True, final_state=True),
        _delta(op, "strided, T 1100", tokens=1100, heads=1, key_dim=32, value_dim=32, strided=True,
               decay="remembering"),
    ]  # fmt: skip


def _recurrent_gdn() -> list[Case]:
    op, raw = "fused_recurrent_gated_delta_rule", _TRAINED
    return [
        _delta(op, "one token", batch=3, tokens=1, initial_state=True, final_state=True, **raw),
        _delta(op, "packed, both gates", tokens=127, lengths=EMPTY_FIRST, key_gate=True, initial_state=True,
               final_state=True, value_heads=4, v_first=True),
        _delta(op, "gate per value", gradients=False, tokens=63, value_gate=True, initial_state=True, final_state=True),
    ]  # fmt: skip


def _conv() -> list[Case]:
    op = "causal_conv1d"
    whole = ConvSpec(
        op, 2, 63, 100, 4, activation="silu", bias=True, residual=True, initial_state=True, final_state=True
    )
    return [
        Case("plain", ConvSpec(op, 1, 500, 64, 3)),
        Case("all arguments", whole),
        Case("packed with empty sequences", replace(whole, batch=1, tokens=127, lengths=EMPTY_FIRST)),
        Case("shorter than the width", replace(whole, batch=3, tokens=2, channels=60, activation=None)),
        Case("one-token sequences", replace(whole, batch=1, tokens=3, lengths=(1, 1, 1))),
        Case("width 2, silu", ConvSpec(op, 2, 64, 64, 2, activation="silu")),
    ]


def _others() -> list[Case]:
    update = ConvSpec("causal_conv1d_update", 5, 1, 100, 4, activation="silu", bias=True, residual=True)
    gate = GateSpec(batch=2, tokens=63, heads=3, key_dim=60)
    return [
        Case("all arguments", update, gradients=False),
        Case("plain", ConvSpec("causal_conv1d_update", 2, 1, 64, 3), gradients=False),
        Case("softplus", gate),
        Case("softplus, strong", replace(gate, decay="strong")),
        Case("bounded", replace(gate, gate="bounded")),
        Case("bounded without A_log and dt_bias", replace(gate, gate="bounded", a_log=False, dt_bias=False)),
        Case("softplus without dt_bias", replace(gate, dt_bias=False)),
    ]


def quick_cases() -> list[Case]:
    """Every switch, layout and kind of length at least once; small sizes."""
    return [*_chunk_kda(), *_recurrent_kda(), *_chunk_gdn(), *_recurrent_gdn(), *_conv(), *_others()]


def _grid() -> list[Case]:
    """The chunked ops over gates, lengths and head sizes, the other switches going round."""
    lengths: tuple[tuple[int, tuple[int, ...] | None], ...] = (
        (63, None), (500, None), (1024, None), (500, (0, 256, 244)), (2000, (15, 85, 200, 900, 800)),
    )  # fmt: skip
    sizes = ((60, 60), (64, 128), (100, 64), (128, 128), (256, 64))
    cases = []
    for op, gates in (("chunk_kda", ("log", "softplus", "bounded")), ("chunk_gated_delta_rule", ("log", "softplus"))):
        combinations = itertools.product(gates, lengths, sizes, ("remembering", "strong"))
        for i, (gate, (tokens, packed), (key_dim, value_dim), decay) in enumerate(combinations):
            on = [bool(i >> bit & 1) for bit in range(3)]
            heads, value_heads = ((2, 2), (1, 4), (2, 4))[i % 3]
            spec = DeltaSpec(
                op, 1, tokens, heads, key_dim, value_dim, value_heads, packed, gate, decay=decay, l2norm=True,
                beta_sigmoid=on[0], neg_eigval=on[0] and on[1], initial_state=on[1], final_state=on[2], v_first=on[0],
                chunk_size=32 if on[1] else 64,
            )  # fmt: skip
            form = "" if packed is None else f", {len(packed)} sequences"
            cases.append(Case(f"{gate} gate, {decay}, T {tokens}{form}, K {key_dim}, V {value_dim}", spec))
    return cases


def full_cases() -> list[Case]:
    """The quick cases, larger sizes and the product of gates, lengths and head sizes."""
    return [*quick_cases(), *_grid(), Case("wide", ConvSpec("causal_conv1d", 2, 2000, 1024, 4, activation="silu"))]
