"""The short convolution against its definition token by token in float64, and as torch's machinery sees it."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import pairwise as neighbours
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_near, label, pairwise
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import deltafuse
from deltafuse.conv import causal_conv1d, causal_conv1d_update

HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float64, torch.float32, *HALVES]
FORWARD = {torch.float64: 1e-13, torch.float32: 5e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
BACKWARD = {torch.float64: 1e-13, torch.float32: 5e-5, torch.bfloat16: 8e-3, torch.float16: 8e-3}
NAMES = ("x", "weight", "bias", "residual", "initial_state")


def define(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`y` `[B, T, D]` and the last W inputs `[N, D, W]`, one token after the other."""
    x, weight = x.double(), weight.double()
    (batch, tokens, channels), width = x.shape, weight.shape[1]
    if cu_seqlens is None:
        sequences = [[(b, t) for t in range(tokens)] for b in range(batch)]
    else:
        bounds = cu_seqlens.tolist()
        sequences = [[(0, t) for t in range(a, b)] for a, b in neighbours(bounds)]
    outputs: dict[tuple[int, int], Tensor] = {}
    states = []
    for n, places in enumerate(sequences):
        window = [x.new_zeros(channels)] * width
        if initial_state is not None:
            window = list(initial_state[n].double().unbind(1))
        for b, t in places:
            window = [*window[1:], x[b, t]]
            y = sum((weight[:, w] * window[w] for w in range(width)), x.new_zeros(channels))
            if bias is not None:
                y = y + bias.double()
            if activation is not None:
                y = y / (1 + torch.exp(-y))
            if residual is not None:
                y = y + residual[b, t].double()
            outputs[b, t] = y
        states.append(torch.stack(window, 1))
    rows = [outputs[b, t] for b in range(batch) for t in range(tokens)]
    y = torch.stack(rows).view(x.shape) if rows else x * 1
    return y, torch.stack(states) if states else x.new_zeros(0, channels, width)


def packed(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths, dtype=dtype).cumsum(0).tolist()], dtype=dtype)


def make(
    *,
    B: int = 2,
    T: int = 9,
    D: int = 6,
    W: int = 4,
    lengths: Sequence[int] | None = None,
    bias: bool = False,
    residual: bool = False,
    initial: bool = False,
    activation: str | None = None,
    dtype: torch.dtype = torch.float64,
    weight_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and flags of a call."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(to)

    flags: dict[str, Any] = {"activation": activation}
    if lengths is not None:
        B, T = 1, sum(lengths)
        flags["cu_seqlens"] = packed(lengths, index_dtype)
    weight_dtype = weight_dtype or dtype
    tensors = {"x": rand(B, T, D), "weight": rand(D, W, to=weight_dtype)}
    if bias:
        tensors["bias"] = rand(D, to=weight_dtype)
    if residual:
        tensors["residual"] = rand(B, T, D)
    if initial:
        tensors["initial_state"] = rand(B if lengths is None else len(lengths), D, W)
    return tensors, flags


def leaves(tensors: dict[str, Tensor], wanted: Sequence[str] = NAMES) -> dict[str, Tensor]:
    """The same values as leaves, strides kept, of which the wanted ones require gradients."""
    return {name: t.detach().requires_grad_(name in wanted) for name, t in tensors.items()}


def seeds(tensors: dict[str, Tensor], flags: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Incoming gradients of y and of the final state, in x's dtype."""
    x, weight, cu = tensors["x"], tensors["weight"], flags.get("cu_seqlens")
    gen = torch.Generator().manual_seed(7)
    n = x.shape[0] if cu is None else len(cu) - 1
    shapes = (x.shape, (n, *weight.shape))
    dy, ds = (torch.randn(shape, generator=gen, dtype=torch.float64).to(x.dtype) for shape in shapes)
    return dy, ds


def gradients(
    outputs: Sequence[Tensor], tensors: dict[str, Tensor], grads: Sequence[Tensor], *, unused: bool = False
) -> dict[str, Tensor]:
    """Gradients in the tensors that require them; with `unused` those that no output depends on are zeros."""
    names = [name for name, t in tensors.items() if t.requires_grad]
    pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=True) if o.requires_grad or not unused]
    found = torch.autograd.grad(
        [o for o, _ in pairs], [tensors[n] for n in names], [g for _, g in pairs], materialize_grads=unused
    )
    return dict(zip(names, found, strict=True))


def check(tensors: dict[str, Tensor], flags: dict[str, Any], floor: float = 0.0) -> None:
    """Outputs, states and all gradients against the definition on the same (rounded) values.

    `floor` is the least RMS that errors are measured by: single numbers near 0 are sums of larger ones.
    """

    def near(got: Tensor, want: Tensor, limit: float, name: str) -> None:
        rms = float(want.detach().norm()) / max(want.numel(), 1) ** 0.5
        assert_near(got, want, limit * max(1.0, floor / rms) if rms else limit, name)

    dtype = tensors["x"].dtype
    ours, theirs = leaves(tensors), leaves({name: t.double() for name, t in tensors.items()})
    y, state = causal_conv1d(**ours, **flags, output_final_state=True)
    want_y, want_state = define(**theirs, **flags)
    assert state is not None
    assert y.dtype == state.dtype == dtype
    assert y.is_contiguous()
    assert state.is_contiguous()
    near(y, want_y, FORWARD[dtype], "y")
    near(state, want_state, FORWARD[dtype], "state")
    grads = seeds(tensors, flags)
    got = gradients((y, state), ours, grads)
    want = gradients((want_y, want_state), theirs, grads, unused=True)
    for name in tensors:
        assert got[name].dtype == tensors[name].dtype
        near(got[name], want[name], BACKWARD[dtype], name)


FLAGS = {
    "bias": [False, True], "residual": [False, True], "initial": [False, True], "activation": [None, "silu", "swish"],
    "W": [4, 1, 2, 3, 7], "lengths": [None, [3, 0, 6], [1, 2, 3, 4, 5, 1], [0, 9, 0, 0]],
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("combination", list(pairwise(**FLAGS)), ids=label)
def test_definition(combination: dict[str, Any], dtype: torch.dtype) -> None:
    check(*make(**combination, D=16, dtype=dtype))


@pytest.mark.parametrize("lengths", [[15], [256, 244, 500], [15, 85, 200, 900]], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_long_sequences(lengths: list[int], dtype: torch.dtype) -> None:
    check(
        *make(lengths=lengths, D=4, bias=True, initial=True, activation="silu", dtype=dtype, weight_dtype=torch.float64)
    )


@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
def test_the_weight_keeps_its_dtype(weight_dtype: torch.dtype) -> None:
    for dtype in FLOATS:
        tensors, flags = make(bias=True, residual=True, initial=True, dtype=dtype, weight_dtype=weight_dtype)
        tensors["initial_state"] = tensors["initial_state"].float()
        tensors["residual"] = tensors["residual"].to(weight_dtype)
        ours = leaves(tensors)
        y, state = causal_conv1d(**ours, **flags, output_final_state=True)
        assert y.dtype == state.dtype == dtype
        for name, grad in gradients((y, state), ours, seeds(tensors, flags)).items():
            assert grad.dtype == tensors[name].dtype
        # Nothing but the results' own rounding: a weight in float32 is not rounded to x's dtype.
        want, _ = define(**{name: t.double() for name, t in tensors.items()})
        limit = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
        assert_near(y, want, max(limit[dtype], 1e-13), "y")


@pytest.mark.parametrize("combination", list(pairwise(**FLAGS)), ids=label)
def test_gradcheck(combination: dict[str, Any]) -> None:
    tensors, flags = make(**combination, T=5, D=2)
    names, ours = list(tensors), leaves(tensors)

    def run(*values: Tensor) -> tuple[Tensor, ...]:
        return causal_conv1d(**dict(zip(names, values, strict=True)), **flags, output_final_state=True)

    assert torch.autograd.gradcheck(run, tuple(ours.values()))


def strided(x: Tensor, how: str) -> Tensor:
    """The same values in other memory."""
    if how == "slice of a projection":
        wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), torch.nan, dtype=x.dtype)
        part = wide[..., x.shape[-1] : 2 * x.shape[-1]]
        part.copy_(x)
        return part
    if how == "channels before tokens" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "every other":
        wide = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype)
        wide[..., 1] = x
        return wide[..., 1]
    return x


STRIDES = ["contiguous", "slice of a projection", "channels before tokens", "every other"]


@given(data=st.data())
def test_any_call(data: st.DataObject) -> None:
    draw = data.draw
    lengths = draw(st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=5), "lengths")
    tensors, flags = make(
        B=draw(st.integers(1, 3), "B"),
        T=draw(st.integers(0, 12), "T"),
        D=draw(st.integers(1, 9), "D"),
        W=draw(st.integers(1, 6), "W"),
        lengths=lengths,
        bias=draw(st.booleans(), "bias"),
        residual=draw(st.booleans(), "residual"),
        initial=draw(st.booleans(), "initial"),
        activation=draw(st.sampled_from([None, "silu", "swish"]), "activation"),
        dtype=draw(st.sampled_from([torch.float64, torch.float32]), "dtype"),
        index_dtype=draw(st.sampled_from([torch.int64, torch.int32]), "index"),
        seed=draw(st.integers(0, 99), "seed"),
    )
    tensors = {name: strided(t, draw(st.sampled_from(STRIDES), name)) for name, t in tensors.items()}
    if lengths is not None and draw(st.booleans(), "copy on the CPU"):
        ours = {**flags, "cu_seqlens_cpu": flags["cu_seqlens"].long()}
        y, _ = causal_conv1d(**tensors, **ours)
        assert torch.equal(y, causal_conv1d(**tensors, **flags)[0])
    check(tensors, flags, floor=1.0)


def test_seventy_thousand_sequences_of_one_token() -> None:
    count, D, W = 70_000, 2, 4
    tensors, flags = make(lengths=[1] * count, D=D, W=W, initial=True, activation="silu", dtype=torch.float32)
    ours, theirs = leaves(tensors), leaves({name: t.double() for name, t in tensors.items()})
    y, state = causal_conv1d(**ours, **flags, output_final_state=True)
    want_state = torch.cat([theirs["initial_state"][:, :, 1:], theirs["x"][0, :, :, None]], 2)
    want_y = F.silu((want_state * theirs["weight"]).sum(2))[None]
    assert_near(y, want_y, 5e-5)
    assert_near(state, want_state, 5e-5)
    grads = seeds(tensors, flags)
    got, want = gradients((y, state), ours, grads), gradients((want_y, want_state), theirs, grads)
    for name in tensors:
        assert_near(got[name], want[name], 5e-5, name)


@pytest.mark.parametrize("lengths", [None, [1, 2, 1]], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_short_chunk_passes_the_state_on(tokens: int, lengths: list[int] | None) -> None:
    """Gradients of the final state alone: each slot comes from a token or from a later slot of the initial state."""
    tensors, flags = make(T=tokens, lengths=lengths, initial=True, activation="silu")
    ours = leaves(tensors)
    _, state = causal_conv1d(**ours, **flags, output_final_state=True)
    _, ds = seeds(tensors, flags)
    got = gradients((state,), ours, (ds,)) if state is not None else {}
    of = lengths or [tokens, tokens]
    for n, size in enumerate(of):
        want = torch.zeros_like(ds[n])
        want[:, size:] = ds[n][:, : 4 - size]
        assert torch.equal(got["initial_state"][n], want)
    x = got["x"][0] if lengths else got["x"].flatten(0, 1)
    assert torch.equal(x, torch.cat([ds[n][:, 4 - size :].t() for n, size in enumerate(of)]))
    assert torch.equal(got["weight"], torch.zeros_like(tensors["weight"]))


def test_empty_sequences_pass_their_state() -> None:
    tensors, flags = make(lengths=[0, 0, 100, 0], initial=True, activation="silu")
    ours = leaves(tensors)
    y, state = causal_conv1d(**ours, **flags, output_final_state=True)
    for n in (0, 1, 3):
        assert torch.equal(state[n], tensors["initial_state"][n])
    assert y.isfinite().all()
    dy, ds = seeds(tensors, flags)
    grads = gradients((y, state), ours, (dy, ds))
    assert torch.equal(grads["initial_state"][[0, 1, 3]], ds[[0, 1, 3]])
    alone, _ = causal_conv1d(
        tensors["x"], tensors["weight"], initial_state=tensors["initial_state"][2:3], activation="silu"
    )
    assert_near(y, alone, 1e-13)


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"lengths": []}, {"lengths": [0, 0]}], ids=str)
def test_no_tokens(sizes: dict[str, Any], initial: bool) -> None:
    tensors, flags = make(**sizes, initial=initial, bias=True, residual=True, activation="silu")
    ours = leaves(tensors)
    y, state = causal_conv1d(**ours, **flags, output_final_state=True)
    assert y.shape == tensors["x"].shape
    assert torch.equal(state, tensors.get("initial_state", torch.zeros_like(state)))
    dy, ds = seeds(tensors, flags)
    grads = gradients((y, state), ours, (dy, ds))
    assert not grads["weight"].any()
    assert not grads["bias"].any()
    if initial:
        assert torch.equal(grads["initial_state"], ds)


@pytest.mark.parametrize("pieces", [[1, 1, 1, 17], [7, 13], [2, 0, 3, 15]], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pieces_equal_one_pass(pieces: list[int], dtype: torch.dtype) -> None:
    tensors, flags = make(T=20, bias=True, residual=True, initial=True, activation="silu", dtype=dtype)
    want_y, want_state = causal_conv1d(**tensors, **flags, output_final_state=True)
    outputs, state = [], tensors["initial_state"]
    for x, residual in zip(tensors["x"].split(pieces, 1), tensors["residual"].split(pieces, 1), strict=True):
        y, state = causal_conv1d(
            x, tensors["weight"], tensors["bias"], residual, state, output_final_state=True, **flags
        )
        outputs.append(y)
    assert_near(torch.cat(outputs, 1), want_y, FORWARD[dtype])
    assert torch.equal(state, want_state)


def test_pieces_have_the_gradients_of_one_pass() -> None:
    tensors, flags = make(T=11, initial=True, activation="silu")
    grads = seeds(tensors, flags)
    whole, parts = leaves(tensors), leaves(tensors)
    want = gradients(causal_conv1d(**whole, **flags, output_final_state=True), whole, grads)
    outputs, state = [], parts["initial_state"]
    for x in parts["x"].split([1, 2, 8], 1):
        y, state = causal_conv1d(x, parts["weight"], initial_state=state, output_final_state=True, **flags)
        outputs.append(y)
    got = gradients((torch.cat(outputs, 1), state), parts, grads)
    for name in tensors:
        assert_near(got[name], want[name], 1e-13, name)


FORMS = {
    "N, D": lambda t: t,
    "1, N, D": lambda t: t.unsqueeze(0),
    "N, 1, D": lambda t: t.unsqueeze(1),
    "N, 1, H, D / H": lambda t: t.unflatten(1, (2, -1)).unsqueeze(1),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_update_token_by_token(dtype: torch.dtype, form: str) -> None:
    shaped = FORMS[form]
    for c in pairwise(bias=[False, True], residual=[False, True], activation=[None, "silu", "swish"], W=[4, 1, 3]):
        tensors, flags = make(B=3, T=8, initial=True, dtype=dtype, weight_dtype=torch.float32, **c)
        want_y, want_state = define(**tensors, **flags)
        # A row of a pool, so that the cache has strides of its own; its neighbours stay.
        pool = torch.full((3, 2, *tensors["initial_state"].shape[1:]), 5.0, dtype=dtype)
        cache = pool[:, 1]
        cache.copy_(tensors["initial_state"])
        outputs = []
        for t in range(8):
            residual = tensors["residual"][:, t] if "residual" in tensors else None
            x = tensors["x"][:, t]
            y, same = causal_conv1d_update(
                shaped(x), cache, residual if t % 2 or residual is None else shaped(residual), tensors["weight"],
                tensors.get("bias"), **flags,
            )  # fmt: skip
            assert same is cache
            assert y.shape == shaped(x).shape
            assert y.dtype == dtype
            outputs.append(y.reshape(x.shape))
        assert_near(torch.stack(outputs, 1), want_y, FORWARD[dtype] if dtype != torch.float64 else 1e-13)
        assert_near(cache, want_state, 0 if dtype == torch.float64 else FORWARD[dtype])
        assert (pool[:, 0] == 5).all()


def test_update_keeps_a_wide_cache_and_input_wide() -> None:
    """Sums see x and the cache as they are, not rounded to each other's dtype."""
    tensors, _ = make(B=5, T=1, initial=True, dtype=torch.float32)
    x, weight, state = tensors["x"][:, 0], tensors["weight"], tensors["initial_state"]
    cache = state.bfloat16()
    want = (torch.cat([cache[:, :, 1:].double(), x.double()[..., None]], 2) * weight.double()).sum(2)
    y, _ = causal_conv1d_update(x, cache, weight=weight)
    assert_near(y, want, 1e-6)
    assert torch.equal(cache[:, :, 3], x.bfloat16())


def test_update_of_sequences_none_and_of_a_view_of_the_cache() -> None:
    y, cache = causal_conv1d_update(torch.zeros(0, 6), torch.zeros(0, 6, 4), weight=torch.ones(6, 4))
    assert y.shape == (0, 6)
    cache = torch.arange(12.0).view(1, 3, 4)
    y, cache = causal_conv1d_update(cache[:, :, 0], cache, weight=torch.ones(3, 4))
    assert cache.tolist() == [[[1, 2, 3, 0], [5, 6, 7, 4], [9, 10, 11, 8]]]
    assert y.tolist() == [[6, 22, 38]]


def test_heads_as_a_fourth_axis() -> None:
    tensors, flags = make(D=6, residual=True, activation="silu")
    want, state = causal_conv1d(**tensors, **flags, output_final_state=True)
    for heads in (1, 2, 6):
        x = leaves({"x": tensors["x"].unflatten(2, (heads, -1))})["x"]
        for residual in (tensors["residual"], tensors["residual"].unflatten(2, (heads, -1))):
            y, got = causal_conv1d(x, tensors["weight"], residual=residual, output_final_state=True, **flags)
            assert torch.equal(y.flatten(2), want)
            assert torch.equal(got, state)
            y.sum().backward()
            assert x.grad.shape == x.shape


def test_inputs_stay_and_outputs_are_new() -> None:
    for c in pairwise(**FLAGS, dtype=FLOATS):
        tensors, flags = make(**c)
        ours = leaves(tensors)
        y, state = causal_conv1d(**ours, **flags, output_final_state=True)
        grads = seeds(tensors, flags)
        found = gradients((y, state), ours, grads)
        before, _ = make(**c)
        for name, t in before.items():
            assert torch.equal(t, tensors[name])
        outputs = [y, state, *(grad for name, grad in found.items() if name != "residual")]
        memory = [t.untyped_storage().data_ptr() for t in outputs if t.numel()]
        assert len(set(memory)) == len(memory)
        assert not {t.untyped_storage().data_ptr() for t in (*tensors.values(), *grads) if t.numel()} & set(memory)


def test_any_subset_requires_gradients() -> None:
    tensors, flags = make(lengths=[4, 0, 2], bias=True, residual=True, initial=True, activation="silu")
    grads = seeds(tensors, flags)
    every = leaves(tensors)
    want = gradients(causal_conv1d(**every, **flags, output_final_state=True), every, grads)
    for subset in range(1, 2 ** len(NAMES)):
        wanted = [name for i, name in enumerate(NAMES) if subset >> i & 1]
        some = leaves(tensors, wanted)
        outputs = causal_conv1d(**some, **flags, output_final_state=True)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for name in NAMES:
            if name in wanted:
                assert torch.equal(some[name].grad, want[name])
            else:
                assert some[name].grad is None
    outputs = causal_conv1d(**leaves(tensors, ()), **flags, output_final_state=True)
    assert not any(o.requires_grad for o in outputs)


def test_one_output_alone_and_gradients_of_any_strides() -> None:
    tensors, flags = make(bias=True, residual=True, initial=True, activation="silu")
    ours = leaves(tensors)
    y, state = causal_conv1d(**ours, **flags, output_final_state=True)
    dy, ds = seeds(tensors, flags)
    want = gradients((y, state), ours, (torch.ones_like(dy), ds))
    y, state = causal_conv1d(**ours, **flags, output_final_state=True)
    (y.sum() + (state * strided(ds, "channels before tokens")).sum()).backward(retain_graph=True)
    for name, t in ours.items():
        assert_near(t.grad, want[name], 1e-13, name)
    for how in STRIDES:
        y, state = causal_conv1d(**ours, **flags, output_final_state=True)
        got = gradients((y, state), ours, (strided(torch.ones_like(dy), how), strided(ds, how)))
        for name in ours:
            assert_near(got[name], want[name], 1e-13, name)
    y, none = causal_conv1d(**ours, **flags)
    assert none is None
    alone = gradients((y,), ours, (dy,))
    y, state = causal_conv1d(**ours, **flags, output_final_state=True)
    both = gradients((y, state), ours, (dy, torch.zeros_like(ds)))
    for name in ours:
        assert torch.equal(alone[name], both[name])


def test_one_tensor_twice_and_one_graph_twice() -> None:
    tensors, _ = make()
    x = tensors["x"].requires_grad_()
    y, _ = causal_conv1d(x, tensors["weight"], residual=x)
    want, _ = define(x, tensors["weight"], residual=x)
    (expected,) = torch.autograd.grad(want.square().sum(), x)
    for _ in range(2):
        (got,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        assert_near(got, expected, 1e-13)


@pytest.mark.parametrize("lengths", [None, [3, 0, 17, 1, 200, 79]], ids=str)
def test_the_same_bits_fifty_times(lengths: list[int] | None) -> None:
    tensors, flags = make(
        T=300, D=32, lengths=lengths, bias=True, initial=True, activation="silu", dtype=torch.bfloat16
    )
    grads = seeds(tensors, flags)

    def once() -> list[Tensor]:
        ours = leaves(tensors)
        outputs = causal_conv1d(**ours, **flags, output_final_state=True)
        return [*outputs, *gradients(outputs, ours, grads).values()]

    first = once()
    for _ in range(49):
        assert all(map(torch.equal, once(), first))


@pytest.mark.parametrize("packing", [False, True])
def test_later_tokens_change_no_earlier_bit(packing: bool) -> None:
    tensors, flags = make(B=1, T=12, lengths=[12] if packing else None, activation="silu", dtype=torch.float32)
    want, _ = causal_conv1d(**tensors, **flags)
    for t in range(12):
        x = tensors["x"].clone()
        x[:, t:] = torch.inf
        y, _ = causal_conv1d(**{**tensors, "x": x}, **flags)
        assert torch.equal(y[:, :t], want[:, :t])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_sequences_keep_their_infinities(activation: str | None) -> None:
    """What is not finite in a sequence, or in an unused slot, reaches neither outputs nor gradients of the others."""
    tensors, flags = make(lengths=[5, 2, 0, 6], initial=True, activation=activation)
    dy, ds = seeds(tensors, flags)
    dy[:, 5:7] = 0
    clean = leaves(tensors)
    outputs = causal_conv1d(**clean, **flags, output_final_state=True)
    want = gradients(outputs, clean, (dy, ds))
    dirty = {name: t.clone() for name, t in tensors.items()}
    dirty["x"][:, 5:7] = torch.inf
    dirty["initial_state"][1] = torch.nan
    dirty = leaves(dirty)
    y, state = causal_conv1d(**dirty, **flags, output_final_state=True)
    got = gradients((y, state), dirty, (dy, ds))
    rest, others = [0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12], [0, 2, 3]
    assert torch.equal(y[:, rest], outputs[0][:, rest])
    assert torch.equal(state[others], outputs[1][others])
    assert torch.equal(got["x"][:, rest], want["x"][:, rest])
    assert torch.equal(got["initial_state"][others], want["initial_state"][others])

    unused = leaves({**tensors, "initial_state": tensors["initial_state"].clone()})
    with torch.no_grad():
        unused["initial_state"][:, :, 0] = torch.nan
    y, state = causal_conv1d(**unused, **flags, output_final_state=True)
    got = gradients((y, state), unused, (dy, ds))
    assert torch.equal(y, outputs[0])
    for name in got:
        assert torch.equal(got[name], want[name])


def test_autocast_changes_no_arithmetic() -> None:
    for lengths in (None, [2, 7]):
        tensors, flags = make(B=1, lengths=lengths, bias=True, initial=True, activation="silu", dtype=torch.float32)
        grads = seeds(tensors, flags)
        ours = leaves(tensors)
        outputs = causal_conv1d(**ours, **flags, output_final_state=True)
        want = [*outputs, *gradients(outputs, ours, grads).values()]
        cache = tensors["initial_state"][:1].clone()
        step = causal_conv1d_update(tensors["x"][:, 0], cache, weight=tensors["weight"])
        with torch.autocast("cpu", torch.bfloat16):
            outputs = causal_conv1d(**ours, **flags, output_final_state=True)
            got = [*outputs, *gradients(outputs, ours, grads).values()]
            cache = tensors["initial_state"][:1].clone()
            again = causal_conv1d_update(tensors["x"][:, 0], cache, weight=tensors["weight"])
        assert all(map(torch.equal, got, want))
        assert all(map(torch.equal, again, step))


# What torch's own machinery makes of the ops.

OPS = torch.ops.deltafuse
COMPILED = list(
    pairwise(
        bias=[False, True], residual=[False, True], initial=[False, True], activation=[None, "silu"],
        lengths=[None, [3, 0, 6]], dtype=[torch.float32, torch.bfloat16], strides=STRIDES[:3], final=[True, False],
    )
)  # fmt: skip


def build(combination: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
    tensors, flags = make(**{k: v for k, v in combination.items() if k not in ("final", "strides")})
    return {n: strided(t, combination["strides"]) for n, t in tensors.items()}, flags, combination["final"]


@pytest.mark.parametrize("combination", COMPILED, ids=label)
def test_opcheck(combination: dict[str, Any]) -> None:
    tensors, flags, final = build(combination)
    silu, cu = flags["activation"] is not None, flags.get("cu_seqlens")
    ours = leaves(tensors)
    args = [ours.get(name) for name in NAMES]
    torch.library.opcheck(OPS.causal_conv1d_fwd.default, (*args, cu, cu, silu, final, False))
    dy, ds = seeds(tensors, flags)
    x, weight, bias, _, state = [None if t is None else t.detach() for t in args]
    for needs in ([True] * 4, [False, True, False, True]):
        rest = (cu, None, silu, False, dy, ds if final else None, needs)
        torch.library.opcheck(OPS.causal_conv1d_bwd.default, (x, weight, bias, state, *rest))


@pytest.mark.parametrize("strides", STRIDES)
def test_opcheck_update(strides: str) -> None:
    for W in (1, 4):
        tensors, _ = make(B=3, T=1, W=W, bias=True, residual=True, initial=True, dtype=torch.bfloat16)
        tensors["x"], tensors["residual"] = tensors["x"][:, 0], tensors["residual"][:, 0]
        x, weight, bias, residual, cache = (strided(tensors[name], strides) for name in NAMES)
        torch.library.opcheck(OPS.causal_conv1d_update.default, (x, cache, weight, bias, residual, True, False))
        torch.library.opcheck(OPS.causal_conv1d_update.default, (x, cache, weight, None, None, False, False))


@pytest.mark.parametrize("combination", COMPILED, ids=label)
def test_compile_fullgraph(combination: dict[str, Any]) -> None:
    tensors, flags, final = build(combination)
    torch._dynamo.reset()

    def run(tensors: dict[str, Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        # Strided on the way in and on the way back.
        x = torch.cat([tensors["x"], tensors["x"]], 2)[..., : tensors["x"].shape[2]]
        rest = {name: t for name, t in tensors.items() if name != "x"}
        y, state = causal_conv1d(
            x, **rest, output_final_state=final, activation=flags["activation"], cu_seqlens=cu_seqlens
        )
        return y.transpose(1, 2) * 2, state

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    cu = flags.get("cu_seqlens")
    grads = seeds(tensors, flags)
    found = []
    for function in (run, compiled):
        ours = leaves(tensors)
        y, state = function(ours, cu)
        outputs = [y] if state is None else [y, state]
        assert (state is not None) == final
        found.append(
            [*outputs, *gradients(outputs, ours, [grads[0].transpose(1, 2), grads[1]][: len(outputs)]).values()]
        )
    # The incoming gradient may have other strides, and vector and scalar code round differently.
    dtype = tensors["x"].dtype
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert_near(got, want, BACKWARD[dtype])


def test_compile_with_changing_lengths_and_update() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(causal_conv1d, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([3, 5], [1, 0, 12], [7, 7, 7, 7]):
        tensors, flags = make(lengths=lengths, initial=True, activation="silu")
        ours = leaves(tensors)
        got = compiled(**ours, **flags, output_final_state=True)
        want = causal_conv1d(**ours, **flags, output_final_state=True)
        grads = seeds(tensors, flags)
        found = [[*outputs, *gradients(outputs, ours, grads).values()] for outputs in (got, want)]
        for a, b in zip(*found, strict=True):
            assert_near(a, b, 1e-13)
    step = torch.compile(causal_conv1d_update, backend="aot_eager", fullgraph=True)
    tensors, _ = make(B=3, T=2, initial=True)
    cache, other = tensors["initial_state"].clone(), tensors["initial_state"].clone()
    for t in range(2):
        y, same = step(tensors["x"][:, t], cache, weight=tensors["weight"], activation="silu")
        want_y, _ = causal_conv1d_update(tensors["x"][:, t], other, weight=tensors["weight"], activation="silu")
        assert same is cache
        assert_near(y, want_y, 1e-13)
        assert torch.equal(cache, other)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor, cu_seqlens: Tensor, state: Tensor) -> tuple[Tensor, Tensor | None]:
        return causal_conv1d(
            x, self.weight, initial_state=state, output_final_state=True, activation="silu", cu_seqlens=cu_seqlens
        )


def test_export() -> None:
    tokens = torch.export.Dim("tokens", min=2)
    model, args = Model(), (torch.randn(1, 9, 6), packed([4, 5]), torch.randn(2, 6, 4))
    program = torch.export.export(model, args, dynamic_shapes=({1: tokens}, None, None))
    assert "deltafuse.causal_conv1d_fwd" in str(program.graph)
    for lengths in ([4, 5], [1, 20]):
        args = (torch.randn(1, sum(lengths), 6), packed(lengths), torch.randn(2, 6, 4))
        for got, want in zip(program.module()(*args), model(*args), strict=True):
            assert_near(got, want, 1e-6)


def test_meta_tensors_and_inference_mode() -> None:
    y, state = causal_conv1d(
        torch.empty(2, 9, 6, device="meta"), torch.empty(6, 4, device="meta"), output_final_state=True
    )
    assert y.shape == (2, 9, 6)
    assert state.shape == (2, 6, 4)
    tensors, flags = make()
    ours = leaves(tensors)
    with torch.inference_mode():
        y, _ = causal_conv1d(**ours, **flags)
    assert not y.requires_grad
    assert torch.equal(y, causal_conv1d(**ours, **flags)[0])


# Arguments.


def test_signatures_are_flas() -> None:
    fla = [*NAMES, "output_final_state", "activation", "backend", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices"]
    assert list(signature(causal_conv1d).parameters) == [*fla, "cp_context"]
    update = ["x", "cache", "residual", "weight", "bias", "activation", "backend"]
    assert list(signature(causal_conv1d_update).parameters) == update
    with pytest.raises(TypeError, match="seq_idx"):
        causal_conv1d(torch.zeros(1, 2, 3), torch.zeros(3, 4), seq_idx=None)  # type: ignore[call-arg]


@pytest.mark.parametrize("backend", [None, "auto", "torch", "triton", "cuda", "mix"])
def test_backend_names(backend: str | None) -> None:
    tensors, flags = make(initial=True)
    y, _ = causal_conv1d(**tensors, **flags, backend=backend)
    assert_near(y, define(**tensors, **flags)[0], 1e-13)
    x, weight, cache = tensors["x"][:, 0], tensors["weight"], tensors["initial_state"]
    causal_conv1d_update(x, cache, weight=weight, backend=backend)
    if backend in (None, "triton", "cuda", "mix"):
        with deltafuse.use_backend("cute"), pytest.raises(deltafuse.UnsupportedError, match="cute"):
            causal_conv1d(**tensors, **flags, backend=backend)


def test_explain() -> None:
    assert deltafuse.explain("causal_conv1d", torch.zeros(1, 2, 3), torch.zeros(3, 4)).chosen == "torch"
    cache = torch.ones(2, 3, 4)
    explained = deltafuse.explain("causal_conv1d_update", torch.zeros(2, 3), cache, weight=torch.zeros(3, 4))
    assert explained.chosen == "torch"
    assert (cache == 1).all()


def test_chunk_indices_are_a_hint() -> None:
    tensors, flags = make(lengths=[3, 6])
    y, _ = causal_conv1d(**tensors, **flags, chunk_indices=torch.tensor([[0, 0], [1, 0]]))
    assert torch.equal(y, causal_conv1d(**tensors, **flags)[0])


def test_the_copy_on_the_cpu_is_the_one_that_is_read() -> None:
    tensors, flags = make(lengths=[3, 6])
    want, _ = causal_conv1d(**tensors, **flags)
    y, _ = causal_conv1d(**tensors, cu_seqlens=torch.tensor([5, 1, 7]), cu_seqlens_cpu=flags["cu_seqlens"].int())
    assert torch.equal(y, want)
    with pytest.raises(ValueError, match=r"`cu_seqlens`: got 8 last; allowed: T = 9 last"):
        causal_conv1d(**tensors, **flags, cu_seqlens_cpu=torch.tensor([0, 3, 8]))


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x no tensor": ({"x": [1.0]}, r"`x`: got list .*allowed: a tensor \[B, T, D\]"),
    "x of integers": ({"x": zeros(1, 9, 6, dtype=torch.int64)}, r"`x`: .*int64.*allowed: dtype float16"),
    "x with two axes": ({"x": zeros(9, 6)}, r"`x`: .*\[9, 6\].*allowed: shape \[B, T, D\]"),
    "x of other channels": ({"x": zeros(1, 9, 5)}, r"`x`: .*\[1, 9, 5\].*D = 6"),
    "x on another device": ({"x": zeros(1, 9, 6, device="meta")}, r"`weight`: .*cpu; allowed: a tensor on meta"),
    "weight None": ({"weight": None}, r"`weight`: got NoneType None; allowed: a tensor \[D, W\]"),
    "weight of Conv1d": ({"weight": zeros(6, 1, 4)}, r"`weight`: .*\[6, 1, 4\].*allowed: shape \[D, W\]"),
    "weight without taps": ({"weight": zeros(6, 0)}, r"`weight`: .*\[6, 0\].*W >= 1"),
    "weight complex": ({"weight": zeros(6, 4, dtype=torch.complex64)}, r"`weight`: .*complex64"),
    "bias shape": ({"bias": zeros(4)}, r"`bias`: .*\[4\].*allowed: shape \[D\] = \[6\]"),
    "bias dtype": ({"bias": zeros(6, dtype=torch.int32)}, r"`bias`: .*int32"),
    "bias device": ({"bias": zeros(6, device="meta")}, r"`bias`: .*meta; allowed: a tensor on cpu"),
    "residual shape": ({"residual": zeros(1, 8, 6)}, r"`residual`: .*\[1, 8, 6\].*allowed: shape .*\[1, 9, 6\]"),
    "residual no tensor": ({"residual": 1.0}, r"`residual`: got float 1.0"),
    "state count": ({"initial_state": zeros(2, 6, 4)}, r"`initial_state`: .*allowed: shape \[N, D, W\] = \[1, 6, 4\]"),
    "state of W - 1": ({"initial_state": zeros(1, 6, 3)}, r"`initial_state`: .*\[1, 6, 3\]"),
    "state dtype": ({"initial_state": zeros(1, 6, 4, dtype=torch.int8)}, r"`initial_state`: .*int8"),
    "activation": ({"activation": "gelu"}, r"`activation`: got 'gelu'; allowed: None, 'silu' or 'swish'"),
    "activation no name": ({"activation": True}, r"`activation`: got True"),
    "backend": ({"backend": "cudnn"}, r"`backend`: got 'cudnn'; allowed: 'auto'"),
    "bounds of a batch": ({"x": zeros(2, 9, 6), "cu_seqlens": packed([9])}, r"`cu_seqlens`: got a batch of 2"),
    "bounds no tensor": ({"cu_seqlens": [0, 9]}, r"`cu_seqlens`: got list"),
    "bounds dtype": ({"cu_seqlens": zeros(2)}, r"`cu_seqlens`: .*float32.*allowed: dtype int32, int64"),
    "bounds axes": ({"cu_seqlens": packed([9])[None]}, r"`cu_seqlens`: .*\[1, 2\]"),
    "bounds empty": ({"cu_seqlens": torch.zeros(0, dtype=torch.int64)}, r"`cu_seqlens`: .*\[0\].*\[N \+ 1\]"),
    "bounds device": ({"cu_seqlens": packed([9]).to("meta")}, r"`cu_seqlens`: .*meta"),
    "bounds start": ({"cu_seqlens": torch.tensor([1, 9])}, r"`cu_seqlens`: got 1 first; allowed: 0 first"),
    "bounds order": ({"cu_seqlens": torch.tensor([0, 5, 4, 9])}, r"`cu_seqlens`: got 4 after 5"),
    "bounds end": ({"cu_seqlens": torch.tensor([0, 8])}, r"`cu_seqlens`: got 8 last; allowed: T = 9 last"),
    "bounds past the end": ({"cu_seqlens": torch.tensor([0, 10])}, r"`cu_seqlens`: got 10 last"),
    "copy alone": ({"cu_seqlens_cpu": packed([9])}, r"`cu_seqlens_cpu`: .*allowed: None where `cu_seqlens` is None"),
    "copy shape": ({"cu_seqlens": packed([9]), "cu_seqlens_cpu": packed([4, 5])}, r"`cu_seqlens_cpu`: .*\[3\]"),
    "context": ({"cp_context": SimpleNamespace()}, r"torch: cp_context \(context parallel\) runs in fla alone"),
    "context with a state": (
        {"cp_context": SimpleNamespace(), "initial_state": zeros(1, 6, 4)}, r"`cp_context`: .*no `initial_state`",
    ),
    "context with a final state": (
        {"cp_context": SimpleNamespace(), "output_final_state": True}, r"`cp_context`: .*no `output_final_state`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        causal_conv1d(**{"x": zeros(1, 9, 6), "weight": zeros(6, 4), **arguments})


BAD_UPDATE: dict[str, tuple[dict[str, Any], str]] = {
    "weight missing": ({"weight": None}, r"`weight`: got NoneType None"),
    "x axes": ({"x": zeros(6)}, r"`x`: .*\[6\].*\[N, D\], \[1, N, D\] or \[N, 1, D\]"),
    "x channels": ({"x": zeros(3, 5)}, r"`x`: .*\[3, 5\].*D = 6"),
    "x of many tokens": ({"x": zeros(3, 2, 6)}, r"`x`: .*\[3, 2, 6\]"),
    "x of heads without an axis for tokens": ({"x": zeros(3, 2, 3)}, r"`x`: .*\[3, 2, 3\]"),
    "cache None": ({"cache": None}, r"`cache`: got NoneType None; allowed: a tensor \[N, D, W\]"),
    "cache count": ({"cache": zeros(2, 6, 4)}, r"`cache`: .*allowed: shape \[N, D, W\] = \[3, 6, 4\]"),
    "cache width": ({"cache": zeros(3, 6, 3)}, r"`cache`: .*\[3, 6, 3\]"),
    "cache dtype": ({"cache": zeros(3, 6, 4, dtype=torch.int64)}, r"`cache`: .*int64"),
    "cache shared": ({"cache": zeros(1, 6, 4).expand(3, 6, 4)}, r"`cache`: got strides \[0, 4, 1\]"),
    "residual": ({"residual": zeros(3, 5)}, r"`residual`: .*\[3, 5\].*allowed: shape \[N, D\] = \[3, 6\]"),
    "bias": ({"bias": zeros(3)}, r"`bias`: .*\[3\]"),
    "activation": ({"activation": "relu"}, r"`activation`: got 'relu'"),
    "backend": ({"backend": "cute"}, r"`backend`: got 'cute'"),
    "gradients": ({"weight": zeros(6, 4).requires_grad_()}, r"`cache`: got a call where gradients are wanted"),
}


@pytest.mark.parametrize("name", BAD_UPDATE)
def test_bad_arguments_of_the_update(name: str) -> None:
    arguments, message = BAD_UPDATE[name]
    call: dict[str, Any] = {"x": zeros(3, 6), "cache": zeros(3, 6, 4), "weight": zeros(6, 4), **arguments}
    with pytest.raises(ValueError, match=message):
        causal_conv1d_update(**call)
    if name == "gradients":
        with torch.no_grad():
            assert not causal_conv1d_update(**call)[0].requires_grad
