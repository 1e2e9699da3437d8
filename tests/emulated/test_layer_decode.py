"""One token of a KDA layer in one launch, against the layer's parts in float64."""

from __future__ import annotations

import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deltafuse
import ptxemu
from deltafuse.autograd import decode_cute
from deltafuse.autograd import layer as autograd_layer
from deltafuse.autograd.decode_cute import LayerToken
from deltafuse.kernels.config import LayerDecodeConfig
from deltafuse.nn import Cache, KimiDeltaAttention
from deltafuse.reference.chunk import DeltaTensors
from deltafuse.reference.conv import conv_update
from deltafuse.reference.options import DeltaOptions
from deltafuse.reference.recurrent import recurrent_forward
from deltafuse.support import Plan

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from cases import label, pairwise

BF, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDED = {BF: 3e-3, F16: 4e-4, F32: 1e-5}
ARCH, EPS = "sm_90a", 1e-5


@cache
def _compiled(config: LayerDecodeConfig) -> Any:
    def get() -> Any:
        from deltafuse.kernels.warp import layer_decode

        return layer_decode.compile(config)

    return kernels.need(ARCH, get)


def load(kernel: str, config: LayerDecodeConfig, arch: str) -> Any:
    assert (kernel, arch) == ("warp.layer_decode", ARCH)
    return _compiled(config)


def make(
    *, N: int = 2, H: int = 1, ratio: int = 1, sizes: tuple[int, int] = (64, 32), dtype: torch.dtype = BF, conv: torch.dtype = BF,
    taps: int = 4, bias: bool = False, norm: torch.dtype | None = F32, gate: str = "softplus", state: torch.dtype | None = F32,
    v_first: bool = True, neg: bool = False, **_: Any,
) -> tuple[LayerToken, DeltaOptions, Tensor | None]:  # fmt: skip
    gen = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
    (K, V), HV = sizes, H * ratio
    widths = (H * K, H * K, HV * V)
    joined = rand(N, 2 * H * K + 8).to(dtype)
    token = LayerToken(
        joined[:, : H * K], joined[:, H * K : 2 * H * K], rand(N, HV * V).to(dtype), rand(N, HV * K).to(dtype), rand(N, HV).to(dtype),
        rand(N, HV * V).to(dtype), [rand(N, d, taps).to(dtype) for d in widths], [(rand(d, taps) * 0.5).to(conv) for d in widths],
        [rand(d).to(conv) for d in widths] if bias else None, None if norm is None else (1 + 0.1 * rand(V)).to(norm),
        rand(HV) * 0.3 if gate != "bounded, no A_log" else None, rand(HV * K) * 0.5 - 1, K, V,
    )  # fmt: skip
    bounded = gate.startswith("bounded")
    options = DeltaOptions(
        K**-0.5, "bounded" if bounded else gate, -3.0 if bounded else 0.0, True, True, 2.0 if neg else 1.0, v_first
    )
    inner = (V, K) if v_first else (K, V)
    return token, options, None if state is None else rand(N, HV, *inner).to(state)


def reference(t: LayerToken, options: DeltaOptions, state: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, the states and the caches afterwards."""
    caches = [x.double() for x in t.caches]
    biases = t.biases or (None,) * 3
    q, k, v = (
        conv_update(x.double(), cache, w.double(), None if b is None else b.double(), None, True)
        for x, cache, w, b in zip((t.xq, t.xk, t.xv), caches, t.weights, biases, strict=True)
    )
    heads = lambda x, d: x.double().unflatten(-1, (-1, d)).unsqueeze(1)  # noqa: E731
    double = lambda x: None if x is None else x.double()  # noqa: E731
    o, after = recurrent_forward(
        DeltaTensors(
            heads(q, t.key_dim), heads(k, t.key_dim), heads(v, t.value_dim), heads(t.f, t.key_dim), t.beta.double().unsqueeze(1),
            double(t.a_log), double(t.dt_bias), double(state),
        ),
        options,
    )  # fmt: skip
    y = F.rms_norm(o, (t.value_dim,), double(t.norm), EPS) * torch.sigmoid(heads(t.z, t.value_dim))
    return y.flatten(1), after, caches


def assert_near(got: Tensor, want: Tensor, limit: float, name: str) -> None:
    error = float((got.double() - want).norm() / want.norm())
    assert error <= limit, f"{name}: error {error:.3g}, allowed {limit:.3g}"


def nan_like(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)


COMBINATIONS = list(
    pairwise(
        ratio=[1, 2, 4], sizes=[(64, 48), (128, 64)], dtype=[BF, F16, F32], conv=[BF, F32], taps=[4, 2], bias=[False, True],
        norm=[F32, BF, None], gate=["softplus", "bounded", "bounded, no A_log"], state=[F32, BF, None], v_first=[True, False],
        neg=[False, True], inplace=[True, False],
    )
)  # fmt: skip


@pytest.mark.parametrize("combination", COMBINATIONS, ids=label)
def test_equals_the_parts(emulated, combination: dict[str, Any]) -> None:
    t, options, state = make(**combination)
    want, want_state, want_caches = reference(t, options, state)
    inplace = combination["inplace"] and state is not None
    final = state if inplace else nan_like(want_state.float())
    assert decode_cute.layer_unsupported(t, state) is None
    y = nan_like(t.xv)
    emulated(ARCH)
    decode_cute.layer_token(t, options, state, final, eps=EPS, out=y, arch=ARCH, load=load)
    assert_near(y, want, ROUNDED[y.dtype], "y")
    assert final is not None
    assert_near(final, want_state, ROUNDED[final.dtype], "state")
    for got, expected in zip(t.caches, want_caches, strict=True):
        assert torch.equal(got.double(), expected)


def test_schedules_give_the_same_bits() -> None:
    found = []
    for seed in range(4):
        t, options, state = make(ratio=2, H=2)
        y = nan_like(t.xv)
        ptxemu.setup(ARCH)
        with ptxemu.emulate(ARCH, seed=seed, shuffle=bool(seed)):
            decode_cute.layer_token(t, options, state, state, eps=EPS, out=y, arch=ARCH, load=load)
        found.append((y, state, *t.caches))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


def test_says_what_it_cannot_take() -> None:
    t, _, state = make()
    assert decode_cute.layer_unsupported(t, state) is None
    sizes = [dict(sizes=pair) for pair in ((32, 32), (64, 40), (128, 272))]
    for changed in (*sizes, dict(taps=3), dict(ratio=3), dict(norm=torch.float64)):
        t, _, state = make(**changed)
        assert decode_cute.layer_unsupported(t, state), changed


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> list[LayerDecodeConfig]:
    """Calls of the layer go to the emulated kernel as they would on a GPU; what was launched is noted."""
    launched: list[LayerDecodeConfig] = []

    def noted(kernel: str, config: LayerDecodeConfig, arch: str) -> Any:
        launched.append(config)
        return load(kernel, config, arch)

    monkeypatch.setattr(deltafuse.kda, "plan", lambda *_: Plan("cute"))
    monkeypatch.setattr(autograd_layer, "machine", lambda _, known: {"arch": ARCH})
    monkeypatch.setattr(autograd_layer.cache, "load", noted)
    return launched


def prefilled(dtype: torch.dtype = F32, **fields: Any) -> tuple[KimiDeltaAttention, Cache, Tensor]:
    """A layer, its cache after five tokens, and the next token."""
    torch.manual_seed(0)
    fields = dict(hidden_size=48, head_dim=64, expand_v=0.5, num_heads=1, num_v_heads=2) | fields
    layer, cache = KimiDeltaAttention(**fields, layer_idx=0).to(dtype).eval(), Cache()
    with torch.no_grad():
        layer(torch.randn(3, 5, 48).to(dtype), past_key_values=cache, use_cache=True)
    return layer, cache, torch.randn(3, 1, 48).to(dtype)


def states(cache: Cache) -> list[Tensor]:
    return [cache[0]["recurrent_state"], *cache[0]["conv_state"]]


@pytest.mark.parametrize("dtype", [F32, BF])
@pytest.mark.parametrize("fields", [{}, dict(conv_bias=True, lower_bound=-4.0, allow_neg_eigval=True, num_v_heads=1)])
def test_a_layer_generates_with_it(emulated, request, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    layer, cache, x = prefilled(dtype, **fields)
    other = deepcopy(cache)
    with torch.no_grad():
        want, _, _ = layer(x, past_key_values=other, use_cache=True)
    launched = request.getfixturevalue("on_kernels")
    before = states(cache)
    kept = before[0].clone()
    emulated(ARCH)
    with torch.inference_mode():
        y, _, _ = layer(x, past_key_values=cache, use_cache=True)
    assert len(launched) == 1
    limit = 1e-5 if dtype is F32 else 1e-2  # op by op q, k, v and o are rounded in between
    assert y.dtype == dtype
    assert y.shape == want.shape
    assert_near(y, want.double(), limit, "y")
    assert_near(states(cache)[0], states(other)[0].double(), limit, "state")
    for got, expected in zip(states(cache)[1:], states(other)[1:], strict=True):
        assert torch.equal(got, expected)
    # As op by op: convolutions' states move on in place, the recurrent one is another tensor.
    assert all(a is b for a, b in zip(states(cache)[1:], before[1:], strict=True))
    assert torch.equal(before[0], kept)
    assert cache.get_seq_length() == other.get_seq_length() == 6


def _hook(layer: KimiDeltaAttention) -> dict[str, Any]:
    layer.o_norm.register_forward_hook(lambda *_: None)
    return {}


def _backend(layer: KimiDeltaAttention) -> dict[str, Any]:
    layer.k_conv1d.backend = "torch"
    return {}


def _no_silu(layer: KimiDeltaAttention) -> dict[str, Any]:
    for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d):
        conv.activation = None
    return {}


OP_BY_OP: dict[str, Any] = {
    "a hook": _hook,
    "a backend of its own": _backend,
    "no SiLU": _no_silu,
    "a mask": lambda _: {"attention_mask": torch.tensor([[1], [0], [1]])},
    "packed": lambda _: {"cu_seqlens": torch.tensor([0, 1])},
    "no cache kept": lambda _: {"use_cache": False},
}


@pytest.mark.parametrize("why", OP_BY_OP)
def test_a_layer_goes_op_by_op(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    layer, cache, x = prefilled()
    options = {"use_cache": True} | OP_BY_OP[why](layer)
    if why == "packed":
        x = x[:1]
        cache.update(states(cache)[0][:1], tuple(c[:1] for c in states(cache)[1:]), 0, 0)
    monkeypatch.setattr("deltafuse.nn.kda.kda_layer_token", lambda *_, **__: pytest.fail("asked for the kernel"))
    with torch.no_grad():
        y, _, _ = layer(x, past_key_values=cache, **options)
    assert y.isfinite().all()


@pytest.mark.parametrize("change", ["backend", "shape", "strides", "taps", "dtype", "empty"])
def test_what_the_kernel_does_not_take_is_left_alone(on_kernels, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """None, before anything was written."""
    t, _, state = make(ratio=2, dtype=F32, conv=F32)
    assert state is not None
    caches, weights = list(t.caches), list(t.weights)
    if change == "backend":
        monkeypatch.setattr(deltafuse.kda, "plan", lambda *_: Plan("torch"))
    elif change == "shape":
        caches[1] = caches[1][:1]
    elif change == "strides":
        caches[2] = caches[2][:1].expand_as(caches[2])
    elif change == "taps":
        caches, weights = ([x[..., 1:].contiguous() for x in xs] for xs in (caches, weights))
    elif change == "dtype":
        caches = [x.double() for x in caches]
    heads = [
        x.unflatten(1, (-1, d)).unsqueeze(1)
        for x, d in zip((t.xq, t.xk, t.xv, t.f, t.z), (64, 64, 32, 64, 32), strict=True)
    ]
    if change == "empty":
        heads, caches, state = [x[:0] for x in heads], [x[:0] for x in caches], state[:0]
    beta = t.beta.unsqueeze(1)[: heads[0].shape[0]]
    copies = [x.clone() for x in (*caches, state)]
    with torch.no_grad():
        found = deltafuse.kda.kda_layer_token(
            *heads[:4], beta, heads[4], caches=caches, weights=weights, biases=None, norm=t.norm, eps=EPS, A_log=t.a_log,
            dt_bias=t.dt_bias, initial_state=state,
        )  # fmt: skip
    assert found is None
    assert on_kernels == []
    assert all(torch.equal(a, b) for a, b in zip(copies, (*caches, state), strict=True))
