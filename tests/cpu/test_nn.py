"""Layers: the checkpoint format, the arithmetic against the definition, and every way to feed the same tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deltafuse.nn import Cache, GatedDeltaNet, KimiDeltaAttention, RMSNorm, RMSNormGated, ShortConvolution

D, K, H = 24, 8, 2

LAYERS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "kda": (KimiDeltaAttention, {}),
    "kda-gva": (KimiDeltaAttention, {"num_v_heads": 4, "expand_v": 1.5, "conv_bias": True}),
    "kda-bounded": (KimiDeltaAttention, {"safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True}),
    "kda-no-conv": (KimiDeltaAttention, {"use_short_conv": False}),
    "gdn": (GatedDeltaNet, {}),
    "gdn-gva": (GatedDeltaNet, {"num_v_heads": 4, "expand_v": 0.5, "conv_bias": True, "allow_neg_eigval": True}),
    "gdn-no-gate": (GatedDeltaNet, {"use_gate": False, "conv_size": 2}),
    "gdn-sigmoid-no-conv": (GatedDeltaNet, {"output_gate_activation": "sigmoid", "use_short_conv": False}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
main_layers = pytest.mark.parametrize("name", ["kda", "kda-gva", "gdn"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    cls, options = LAYERS[name]
    options = {"hidden_size": D, "head_dim": K, "num_heads": H, "layer_idx": 0, **options, **more}
    if options.get("use_short_conv", True) or cls is KimiDeltaAttention:
        return cls(**options).to(dtype)
    with pytest.warns(UserWarning, match="use_short_conv"):
        return cls(**options).to(dtype)


def tokens(batch: int, length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(batch, length, D, dtype=dtype)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm())


# --- the checkpoint format -------------------------------------------------------------------------------------------


def conv_shapes(key: int, value: int, width: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for letter, size in (("q", key), ("k", key), ("v", value)):
        shapes[f"{letter}_conv1d.weight"] = (size, 1, width)
        if bias:
            shapes[f"{letter}_conv1d.bias"] = (size,)
    return shapes


def kda_shapes(hidden: int, k: int, v: int, heads: int, v_heads: int, bias: bool) -> dict[str, tuple[int, ...]]:
    key, value = heads * k, v_heads * v
    return {
        "A_log": (v_heads,),
        "dt_bias": (v_heads * k,),
        "q_proj.weight": (key, hidden),
        "k_proj.weight": (key, hidden),
        "v_proj.weight": (value, hidden),
        **conv_shapes(key, value, 4, bias),
        "f_proj.0.weight": (v, hidden),
        "f_proj.1.weight": (v_heads * k, v),
        "b_proj.weight": (v_heads, hidden),
        "g_proj.0.weight": (v, hidden),
        "g_proj.1.weight": (value, v),
        "g_proj.1.bias": (value,),
        "o_norm.weight": (v,),
        "o_proj.weight": (hidden, value),
    }


def gdn_shapes(hidden: int, k: int, v: int, heads: int, v_heads: int, gate: bool) -> dict[str, tuple[int, ...]]:
    key, value = heads * k, v_heads * v
    shapes: dict[str, tuple[int, ...]] = {
        "A_log": (v_heads,),
        "dt_bias": (v_heads,),
        "q_proj.weight": (key, hidden),
        "k_proj.weight": (key, hidden),
        "v_proj.weight": (value, hidden),
        "a_proj.weight": (v_heads, hidden),
        "b_proj.weight": (v_heads, hidden),
        **conv_shapes(key, value, 4, False),
        "o_norm.weight": (v,),
        "o_proj.weight": (hidden, value),
    }
    return {**shapes, "g_proj.weight": (value, hidden)} if gate else shapes


CHECKPOINTS = {
    "kda": (lambda: KimiDeltaAttention(64, head_dim=16, num_heads=3), kda_shapes(64, 16, 16, 3, 3, False)),
    "kda-gva": (
        lambda: KimiDeltaAttention(64, expand_v=2, head_dim=16, num_heads=2, num_v_heads=4, conv_bias=True),
        kda_shapes(64, 16, 32, 2, 4, True),
    ),
    "gdn": (lambda: GatedDeltaNet(64, head_dim=16, num_heads=3), gdn_shapes(64, 16, 32, 3, 3, True)),
    "gdn-no-gate": (
        lambda: GatedDeltaNet(64, expand_v=1, head_dim=16, num_heads=2, num_v_heads=4, use_gate=False),
        gdn_shapes(64, 16, 16, 2, 4, False),
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_fla_loads_strictly(name: str) -> None:
    make, shapes = CHECKPOINTS[name]
    layer = make()
    assert {key: tuple(value.shape) for key, value in layer.state_dict().items()} == shapes
    checkpoint = {key: torch.randn(shape) for key, shape in shapes.items()}
    layer.load_state_dict(checkpoint, strict=True)
    assert all(torch.equal(value, checkpoint[key]) for key, value in layer.state_dict().items())


def test_initial_gates() -> None:
    layer = KimiDeltaAttention(64, head_dim=64, num_heads=32)
    assert layer.A_log.min() >= 0
    assert layer.A_log.max() <= math.log(16)
    assert layer.A_log.exp().std() > 2
    steps = F.softplus(layer.dt_bias)
    assert steps.min() > 0.00099
    assert steps.max() < 0.1001
    assert abs(steps.log().mean() - math.log(0.01)) < 0.2
    assert KimiDeltaAttention(64, safe_gate=True, lower_bound=-5.0).A_log.abs().max() == 0
    for parameter in (layer.A_log, layer.dt_bias):
        assert parameter._no_weight_decay
        assert parameter.dtype == torch.float32


# --- the arithmetic --------------------------------------------------------------------------------------------------


def by_definition(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """One sequence `[T, D]` through a layer, written down from the equations alone."""

    def mixed(letter: str) -> torch.Tensor:
        y = x @ getattr(layer, f"{letter}_proj").weight.T
        if layer.use_short_conv:
            conv = getattr(layer, f"{letter}_conv1d")
            taps = conv.weight[:, 0]
            padded = torch.cat([y.new_zeros(taps.shape[1] - 1, y.shape[1]), y])
            y = sum(padded[w : w + len(x)] * taps[:, w] for w in range(taps.shape[1]))  # type: ignore[assignment]
            y = y if conv.bias is None else y + conv.bias
        return y * torch.sigmoid(y)

    groups = layer.num_v_heads // layer.num_heads
    q, k = (mixed(letter).view(len(x), layer.num_heads, -1).repeat_interleave(groups, 1) for letter in "qk")
    v = mixed("v").view(len(x), layer.num_v_heads, -1)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if isinstance(layer, KimiDeltaAttention):
        raw = x @ layer.f_proj[0].weight.T @ layer.f_proj[1].weight.T
        gate = x @ layer.g_proj[0].weight.T @ layer.g_proj[1].weight.T + layer.g_proj[1].bias
        activation, lower_bound = "sigmoid", layer.lower_bound
    else:
        raw, lower_bound = x @ layer.a_proj.weight.T, None
        gate = x @ layer.g_proj.weight.T if layer.use_gate else None
        activation = layer.o_norm.activation if layer.use_gate else ""
    raw = (raw + layer.dt_bias).view(len(x), layer.num_v_heads, -1)
    a = layer.A_log.exp()[:, None]
    g = -a * torch.log1p(raw.exp()) if lower_bound is None else lower_bound * torch.sigmoid(a * raw)
    beta = torch.sigmoid(x @ layer.b_proj.weight.T) * (2 if layer.allow_neg_eigval else 1)

    state = x.new_zeros(layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    rows = []
    for t in range(len(x)):
        state = g[t].exp()[..., None] * state
        delta = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], delta)
        rows.append(torch.einsum("hk,hkv->hv", q[t], state) * layer.head_k_dim**-0.5)
    o = torch.stack(rows)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.o_norm.weight
    if gate is not None:
        gate = gate.view_as(o)
        o = o * torch.sigmoid(gate) * (1 if activation == "sigmoid" else gate)
    return o.flatten(1) @ layer.o_proj.weight.T


@every_layer
def test_a_layer_is_its_definition(name: str) -> None:
    layer = build(name)
    x = tokens(2, 70)
    want = torch.stack([by_definition(layer, row) for row in x])
    o, weights, cache = layer(x)
    assert weights is None
    assert cache is None
    assert o.dtype == x.dtype
    assert error(o, want) < 1e-10
    with torch.no_grad():
        layer.eval()
        assert error(layer(x[:, :64])[0], want[:, :64]) < 1e-10
        assert error(layer(x)[0], want) < 1e-10


@main_layers
def test_gradients_are_those_of_the_definition(name: str) -> None:
    layer = build(name)
    x, weight = tokens(1, 40), tokens(1, 40)
    inputs = [x.requires_grad_(), *layer.parameters()]
    got = torch.autograd.grad((layer(x)[0] * weight).sum(), inputs)
    want = torch.autograd.grad((by_definition(layer, x[0]) * weight[0]).sum(), inputs)
    names = ["x", *(key for key, _ in layer.named_parameters())]
    assert {key: error(a, b) < 1e-9 for key, a, b in zip(names, got, want, strict=True)} == dict.fromkeys(names, True)


@main_layers
def test_autocast_trains_in_bfloat16(name: str) -> None:
    layer = build(name, torch.float32)
    x = tokens(2, 70, torch.float32)
    want = layer(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        o = layer(x)[0]
    assert o.dtype == torch.bfloat16
    assert error(o.float(), want) < 0.03
    o.float().square().sum().backward()
    for key, parameter in layer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.dtype == torch.float32, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@main_layers
def test_a_layer_in_bfloat16(name: str) -> None:
    layer = build(name, torch.float32)
    x = tokens(2, 70, torch.float32)
    want = layer(x)[0]
    o = layer.bfloat16()(x.bfloat16())[0]
    assert o.dtype == torch.bfloat16
    assert error(o.float(), want) < 0.03


@pytest.mark.parametrize("name", ["kda", "gdn"])
def test_compiles_whole(name: str) -> None:
    layer = build(name, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = tokens(2, 70, torch.float32)
    inputs = list(layer.parameters())
    want = layer(x)[0]
    want_grads = torch.autograd.grad(want.square().sum(), inputs)
    got = compiled(x)[0]
    got_grads = torch.autograd.grad(got.square().sum(), inputs)
    assert error(got, want) < 1e-5
    assert all(error(a, b) < 1e-4 for a, b in zip(got_grads, want_grads, strict=True))


# --- the same tokens in pieces ---------------------------------------------------------------------------------------

PIECES = [[70, 1, 1, 1], [1, 1, 66, 3, 1], [2, 5, 130, 1]]


def in_pieces(layer: Any, x: torch.Tensor, pieces: list[int], cache: Any, **more: Any) -> torch.Tensor:
    outputs = []
    for piece in x.split(pieces, dim=1):
        o, _, same = layer(piece, past_key_values=cache, use_cache=True, **more)
        assert same is cache
        outputs.append(o)
    return torch.cat(outputs, 1)


@every_layer
@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_equal_one_pass(name: str, pieces: list[int]) -> None:
    layer = build(name).eval()
    x = tokens(2, sum(pieces))
    want = layer(x)[0].detach()
    cache = Cache()
    with torch.no_grad():
        assert error(in_pieces(layer, x, pieces, cache), want) < 1e-10
    assert cache.get_seq_length() == sum(pieces)
    assert cache[0]["recurrent_state"].shape == (2, layer.num_v_heads, layer.head_v_dim, K)
    # With autograd every piece goes by the chunked op.
    assert error(in_pieces(layer, x, pieces, Cache()), want) < 1e-10


@main_layers
def test_pieces_equal_one_pass_in_float32_and_bfloat16(name: str) -> None:
    layer = build(name, torch.float32).eval()
    x = tokens(2, 73, torch.float32)
    with torch.no_grad():
        assert error(in_pieces(layer, x, [66, 1, 5, 1], Cache()), layer(x)[0]) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            got, want = in_pieces(layer, x, [66, 1, 5, 1], Cache()), layer(x)[0]
        assert got.dtype == want.dtype == torch.bfloat16
        assert error(got.float(), want.float()) < 0.02


class ForeignCache:
    """The cache protocol of flash-linear-attention's layers, with its signature of `update`; states start as None."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any] | None] = [None]

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any] | None:
        return self.states[layer_idx]

    def update(
        self,
        recurrent_state: Any = None,
        attn_state: Any = None,
        conv_state: Any = None,
        ffn_state: Any = None,
        layer_idx: int = 0,
        offset: int | None = 1,
        cache_kwargs: Any = None,
    ) -> dict[str, Any]:
        assert attn_state is None
        assert ffn_state is None
        assert cache_kwargs is None
        assert offset
        self.states[layer_idx] = {"recurrent_state": recurrent_state, "conv_state": conv_state, "attn_state": None}
        return self.states[layer_idx]  # type: ignore[return-value]


@main_layers
def test_a_cache_of_fla(name: str) -> None:
    layer = build(name).eval()
    x = tokens(2, 70)
    with torch.no_grad():
        assert error(in_pieces(layer, x, [66, 1, 3], ForeignCache()), layer(x)[0]) < 1e-10


@every_layer
def test_a_call_that_does_not_keep_states_leaves_the_cache(name: str) -> None:
    layer = build(name).eval()
    x = tokens(2, 12)
    cache = Cache()
    with torch.no_grad():
        want = layer(x)[0]
        layer(x[:, :10], past_key_values=cache, use_cache=True)
        before = [cache[0]["recurrent_state"].clone(), *(s.clone() for s in cache[0]["conv_state"] or ())]
        for _ in range(2):
            assert error(layer(x[:, 10:11], past_key_values=cache)[0], want[:, 10:11]) < 1e-10
        after = [cache[0]["recurrent_state"], *(cache[0]["conv_state"] or ())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert cache.get_seq_length() == 10


# --- packed and padded sequences -------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_are_separate(name: str, dtype: torch.dtype) -> None:
    layer = build(name).eval()
    bounds = torch.tensor([0, 3, 3, 75, 80], dtype=dtype)
    x = tokens(1, 80)
    want = torch.cat([layer(x[:, i:j])[0] for i, j in pairwise(bounds.tolist()) if j > i], 1).detach()
    assert error(layer(x, cu_seqlens=bounds, cu_seqlens_cpu=bounds)[0], want) < 1e-10
    mask = torch.zeros(1, 80)
    assert error(layer(x, mask, cu_seqlens=bounds)[0], want) < 1e-10, "cu_seqlens goes before attention_mask"
    with torch.no_grad():
        assert error(layer(x, cu_seqlens=bounds)[0], want) < 1e-10
        assert error(layer(x[:, :60], cu_seqlens=bounds.clamp(max=60))[0], want[:, :60]) < 1e-10


@main_layers
def test_packed_sequences_in_pieces(name: str) -> None:
    layer = build(name).eval()
    sequences = [tokens(1, 71), tokens(1, 4), tokens(1, 9)]
    first, second = [68, 0, 5], [1, 2, 2]
    cache = Cache()
    with torch.no_grad():
        want = [layer(x)[0] for x in sequences]
        for starts, lengths in (([0, 0, 0], first), (first, second)):
            pieces = [x[:, s : s + n] for x, s, n in zip(sequences, starts, lengths, strict=True)]
            bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
            o, _, _ = layer(torch.cat(pieces, 1), past_key_values=cache, use_cache=True, cu_seqlens=bounds)
            expected = torch.cat([w[:, s : s + n] for w, s, n in zip(want, starts, lengths, strict=True)], 1)
            assert error(o, expected) < 1e-10
        # The states of packed sequences are those of a batch: one more token of each, packed and as a batch.
        at = [s + n for s, n in zip(first, second, strict=True)]
        last = torch.cat([x[:, t : t + 1] for x, t in zip(sequences, at, strict=True)], 1)
        expected = torch.cat([w[:, t : t + 1] for w, t in zip(want, at, strict=True)], 1)
        o, _, _ = layer(last, past_key_values=cache, cu_seqlens=torch.arange(4))
        assert error(o, expected) < 1e-10
        o, _, _ = layer(last.transpose(0, 1), past_key_values=cache, use_cache=True)
        assert error(o.transpose(0, 1), expected) < 1e-10


@main_layers
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_padding_counts_for_nothing(name: str, side: str, kind: torch.dtype) -> None:
    layer = build(name)
    lengths, total = [70, 75, 0, 3], 75
    x = tokens(4, total)
    mask = torch.zeros(4, total, dtype=kind)
    spans = []
    for row, n in enumerate(lengths):
        start = {"left": total - n, "right": 0, "both": (total - n) // 2}[side]
        mask[row, start : start + n] = 1
        spans.append((row, start, start + n))
    x.requires_grad_()
    o, _, _ = layer(x, mask)
    assert o.shape == x.shape
    for row, i, j in spans:
        if j > i:
            assert error(o[row, i:j], layer(x[row : row + 1, i:j])[0][0]) < 1e-10
    assert o[mask == 0].abs().max() == 0
    (dx,) = torch.autograd.grad(o.square().sum(), x)
    assert dx[mask == 0].abs().max() == 0
    assert dx[mask == 1].abs().min() > 0


@main_layers
def test_generation_from_a_padded_prompt(name: str) -> None:
    layer = build(name).eval()
    prompts, steps = [10, 66, 3], 3
    sequences = [tokens(1, n + steps) for n in prompts]
    width = max(prompts)
    x, mask = torch.zeros(3, width, D, dtype=torch.float64), torch.zeros(3, width, dtype=torch.int64)
    for row, (sequence, n) in enumerate(zip(sequences, prompts, strict=True)):
        x[row, width - n :], mask[row, width - n :] = sequence[0, :n], 1
    cache = Cache()
    with torch.no_grad():
        want = [layer(sequence)[0][0] for sequence in sequences]
        o, _, _ = layer(x, mask, cache, True)
        assert all(error(o[i, width - n :], want[i][:n]) < 1e-10 for i, n in enumerate(prompts))
        for step in range(steps):
            mask = F.pad(mask, (0, 1), value=1)
            following = torch.cat([s[:, n + step : n + step + 1] for s, n in zip(sequences, prompts, strict=True)])
            # Every other step with the mask of all tokens so far, as generation loops hand it over, or without.
            o, _, _ = layer(following, mask if step % 2 == 0 else None, cache, True)
            assert all(error(o[i, 0], want[i][n + step]) < 1e-10 for i, n in enumerate(prompts))
    assert cache.get_seq_length() == width + steps


# --- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
def test_gated_norm(activation: str) -> None:
    norm = RMSNormGated(16, activation=activation, eps=1e-3).double()
    nn.init.normal_(norm.weight)
    x, g = torch.randn(2, 3, 16, dtype=torch.float64), torch.randn(2, 3, 16, dtype=torch.float64)
    gate = torch.sigmoid(g) if activation == "sigmoid" else g * torch.sigmoid(g)
    want = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight * gate
    assert error(norm(x, g), want) < 1e-12
    low = norm.bfloat16()(x.bfloat16(), g.bfloat16())
    assert low.dtype == torch.bfloat16
    assert error(low.double(), want) < 0.02

    bare = RMSNormGated(16, elementwise_affine=False, activation=activation, eps=1e-3)
    assert not bare.state_dict()
    total = x + g
    want = total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gate
    y, carried = bare(x, g, residual=g, prenorm=True)
    assert error(y, want) < 1e-12
    assert torch.equal(carried, total)
    y, carried = bare(x.bfloat16(), g.bfloat16(), prenorm=True, residual_in_fp32=True)
    assert y.dtype == torch.bfloat16
    assert carried.dtype == torch.float32


def test_norm_does_not_overflow_in_half() -> None:
    x = torch.full((1, 8), 3e4, dtype=torch.float16)
    y = RMSNorm(8, dtype=torch.float16)(x)
    assert y.dtype == torch.float16
    assert error(y.float(), torch.ones(1, 8)) < 1e-3


@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution(activation: str | None, bias: bool) -> None:
    conv = ShortConvolution(6, 4, bias=bias, activation=activation).double()
    x, residual = torch.randn(2, 9, 6, dtype=torch.float64), torch.randn(2, 9, 6, dtype=torch.float64)
    want = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), conv.weight, conv.bias, groups=6).transpose(1, 2)
    want = (want if activation is None else F.silu(want)) + residual
    y, state = conv(x, residual)
    assert state is None
    assert error(y, want) < 1e-12
    mask = torch.ones(2, 9)
    mask[:, :2] = 0
    kept = x.clone()
    assert error(conv(x, mask=mask)[0], conv(x * mask[..., None])[0]) < 1e-12
    assert torch.equal(x, kept)
    with torch.no_grad():
        y, state = conv(x[:, :5], residual[:, :5], output_final_state=True)
        outputs = [y]
        assert torch.equal(state[..., -4:], x[:, 1:5].transpose(1, 2))
        assert conv.state_size == 24
        for t in range(5, 9):
            y, same = conv(x[:, t : t + 1], residual[:, t : t + 1], cache=state, output_final_state=True)
            assert same is state, "one token updates its state in place"
            outputs.append(y)
        assert error(torch.cat(outputs, 1), want) < 1e-12
        assert error(conv(x[:, :1], residual[:, :1])[0], want[:, :1]) < 1e-12


def test_cache() -> None:
    cache = Cache()
    assert len(cache) == 0
    assert cache.get_seq_length() == 0
    state = torch.zeros(1)
    cache.update(layer_idx=1, recurrent_state=state, conv_state=(state,), offset=5)
    assert len(cache) == 2
    assert cache[0]["recurrent_state"] is None
    assert cache[1]["recurrent_state"] is state
    cache.update(layer_idx=1, offset=2)
    assert cache[1]["conv_state"] == (state,)
    assert cache.get_seq_length(1) == 7
    assert cache.get_seq_length(0) == 0
    with pytest.raises(KeyError, match=r"below 2.*got 2"):
        cache[2]
    cache.reset()
    assert list(cache) == []


def test_what_a_layer_refuses() -> None:
    for options, message in [
        ({"mode": "parallel"}, "`mode`: got 'parallel'; allowed: 'chunk'"),
        ({"num_v_heads": 3}, "`num_v_heads`: got 3; allowed: a multiple of num_heads = 2"),
        ({"expand_v": 0.3}, "`expand_v`: got 0.3; .* head_dim = 8"),
    ]:
        for name in ("kda", "gdn"):
            with pytest.raises(ValueError, match=message):
                build(name, **options)
    with pytest.raises(ValueError, match="`activation`: got 'relu'"):
        build("gdn", output_gate_activation="relu")
    with pytest.raises(ValueError, match="`activation`: got 'relu'"):
        ShortConvolution(4, 4, activation="relu")
    with pytest.raises(ValueError, match=r"`mask`: got .*cu_seqlens"):
        ShortConvolution(4, 4)(torch.zeros(1, 2, 4), mask=torch.ones(1, 2), cu_seqlens=torch.tensor([0, 2]))
    with pytest.raises(TypeError, match="num_head"):
        KimiDeltaAttention(num_head=3)  # type: ignore[call-arg]
    layer, x = build("kda"), tokens(2, 5)
    for shape in [(2, 5, 5), (2, 4), (3, 5)]:
        with pytest.raises(ValueError, match=r"`attention_mask`: got .*; allowed: shape"):
            layer(x, torch.ones(shape))
    with pytest.raises(ValueError, match="`layer_idx`: got None"):
        build("kda", layer_idx=None)(x, past_key_values=Cache(), use_cache=True)
    with pytest.raises(ValueError, match="`mode`: got 'fused_recurrent'; allowed: 'chunk' in training"):
        build("gdn", mode="fused_recurrent")(x)


def test_what_models_hand_over_besides_is_not_read() -> None:
    layer, x = build("kda").eval(), tokens(1, 5)
    want = layer(x)[0]
    assert torch.equal(layer(x, output_attentions=True, position_ids=torch.arange(5), cache_position=None)[0], want)
    recurrent = build("kda", mode="fused_recurrent").eval()
    recurrent.load_state_dict(layer.state_dict())
    with torch.no_grad():
        x = tokens(1, 66)
        assert error(recurrent(x)[0], layer(x)[0]) < 1e-10


@pytest.mark.parametrize("layer", [KimiDeltaAttention, GatedDeltaNet])
@pytest.mark.parametrize("name", ["hidden_size", "head_dim", "num_heads", "conv_size"])
def test_sizes_below_one(layer: type, name: str) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "num_heads": 4, "conv_size": 4}
    with pytest.raises(ValueError, match=f"`{name}`: got 0; allowed: 1 or more"):
        layer(**{**sizes, name: 0})
