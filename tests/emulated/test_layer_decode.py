"""One token of a KDA layer in one launch, against the layer's parts in float64."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ptxemu
from deltafuse.autograd import decode_cute
from deltafuse.autograd.decode_cute import LayerToken
from deltafuse.kernels.config import LayerDecodeConfig
from deltafuse.reference.chunk import DeltaTensors
from deltafuse.reference.conv import conv_update
from deltafuse.reference.options import DeltaOptions
from deltafuse.reference.recurrent import recurrent_forward

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
