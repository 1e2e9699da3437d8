"""How exact the ops are in each dtype, at any gate, on hard inputs; and that nothing looks into the future or at its neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import FIELD, GATES, Call, assert_near, error, gradients, make, seeds_of
from torch import Tensor

# float32 on ordinary inputs. The promise is a hundredth of FIELD (5e-5 and more); what is measured is below 5e-7.
FLOAT32 = 2e-6
FLOAT64 = 1e-12
DTYPES = [torch.float32, torch.float64]


def limit(dtype: torch.dtype, name: str) -> float:
    if dtype == torch.float64:
        return FLOAT64
    assert FIELD[name] >= 100 * FLOAT32
    return FLOAT32


def errors(call: Call, op: Any = None, **more: Any) -> dict[str, float]:
    """Of both outputs and every gradient, against the definition in float64 on the same inputs."""
    call = call.leaves()
    seeds = seeds_of(call)
    want, got = call.define(), call.run(op, **more)
    exact = gradients(call, [want.o, want.final_state], seeds)
    found = gradients(call, got, seeds)
    outputs = {"o": error(got[0], want.o), "final_state": error(got[1], want.final_state)}
    return {**outputs, **{name: error(found[name], grad) for name, grad in exact.items()}}


def assert_exact(call: Call, dtype: torch.dtype, op: Any = None, factor: float = 1, **more: Any) -> None:
    for name, found in errors(call, op, **more).items():
        allowed = factor * limit(dtype, name)
        assert found <= allowed, f"{name}: error {found:.3g}, allowed {allowed:.3g}"


# --- ordinary inputs -------------------------------------------------------------------------------------------------

# Lengths and head sizes of the field's tests, with every gate and both families.
SHAPES = [
    ("kda", 1, 1, 1, 64, 64, "log"), ("kda", 15, 2, 2, 60, 60, "softplus"), ("gdn", 16, 1, 2, 64, 100, "log"),
    ("kda", 17, 2, 4, 100, 64, "bounded"), ("kda", 63, 1, 4, 128, 128, "softplus"), ("gdn", 63, 1, 4, 128, 64, "softplus"),
    ("kda", 64, 2, 2, 64, 60, "bounded, no A_log"), ("kda", 65, 1, 2, 60, 128, "log"), ("gdn", 65, 2, 4, 100, 100, "log"),
    ("kda", 500, 1, 2, 64, 64, "softplus"), ("gdn", 500, 1, 4, 60, 64, "softplus"), ("kda", 1000, 1, 1, 64, 128, "log"),
    ("kda", 1024, 2, 2, 100, 60, "softplus"), ("gdn", 1025, 1, 1, 64, 64, "log"), ("kda", 1500, 1, 2, 64, 64, "bounded"),
    ("kda", 65, 1, 1, 256, 256, "softplus"), ("kda", 2048, 1, 1, 32, 64, "softplus"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "T", "H", "HV", "K", "V", "gate"), SHAPES)
def test_float32(family: str, T: int, H: int, HV: int, K: int, V: int, gate: str) -> None:
    call = make(
        family, T=T, H=H, HV=HV, K=K, V=V, gate=gate, l2norm=True, beta="sigmoid", initial=True, dtype=torch.float32
    )
    assert_exact(call, torch.float32)


@pytest.mark.parametrize("lengths", [[15], [256, 244, 500], [15, 85, 200, 900, 800], [0, 100, 0]], ids=str)
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_float32_packed(family: str, lengths: list[int]) -> None:
    call = make(
        family,
        lengths=lengths,
        HV=2,
        K=32,
        V=32,
        gate="softplus",
        l2norm=True,
        beta="negative",
        initial=True,
        dtype=torch.float32,
    )
    assert_exact(call, torch.float32)


def test_float32_packed_one_long_and_one_of_a_token() -> None:
    call = make(
        "kda",
        lengths=[8191, 1],
        K=8,
        V=8,
        gate="softplus",
        l2norm=True,
        beta="sigmoid",
        initial=True,
        dtype=torch.float32,
    )
    assert_exact(call, torch.float32)


def test_many_sequences() -> None:
    """2,050 sequences of 32 heads decode: more than a grid's y and z hold."""
    lengths = [(1, 2, 0, 1)[n % 4] for n in range(2050)]
    for form, heads in (("recurrent", 32), ("chunk", 3)):
        call = make("kda", lengths=lengths, H=heads, K=4, V=4, initial=True, dtype=torch.float32)
        want = call.define()
        o, state = call.run(getattr(call, form))
        assert_near(o, want.o, FLOAT32, "o")
        assert_near(state, want.final_state, FLOAT32, "state")


@pytest.mark.parametrize(
    ("family", "gate"), [("kda", "softplus"), ("kda", "bounded"), ("gdn", "softplus"), ("kda", "log")]
)
def test_float32_of_the_recurrent_form(family: str, gate: str) -> None:
    call = make(
        family, T=500, HV=2, K=64, V=64, gate=gate, l2norm=True, beta="sigmoid", initial=True, dtype=torch.float32
    )
    assert_exact(call, torch.float32, call.recurrent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["kda", "gdn"])
@pytest.mark.parametrize("lengths", [None, [256, 244, 15]], ids=str)
def test_low_precision_is_within_the_fields_errors(family: str, dtype: torch.dtype, lengths: list[int] | None) -> None:
    """Only the inputs and the results are rounded: half of what the field allows, and states as exact as in float32."""
    call = make(
        family,
        T=500,
        H=2,
        HV=4,
        K=64,
        V=60,
        gate="softplus",
        l2norm=True,
        beta="sigmoid",
        initial=True,
        dtype=dtype,
        lengths=lengths,
    )
    for op in (call.chunk, call.recurrent):
        found = errors(call, op)
        assert found.pop("final_state") <= FLOAT32
        for name, size in found.items():
            assert size <= FIELD[name] / 2, f"{name}: error {size:.3g}, allowed {FIELD[name] / 2:.3g}"


def test_low_precision_inputs_keep_a_float32_beta_and_gate() -> None:
    """Neither is rounded to the dtype of q on the way."""
    low = make("kda", T=200, K=32, V=32, l2norm=True, dtype=torch.bfloat16)
    exact = make("kda", T=200, K=32, V=32, l2norm=True, dtype=torch.float32)
    call = low.with_tensors(g=exact.tensors["g"], beta=exact.tensors["beta"])
    want = call.define().final_state
    for op in (call.chunk, call.recurrent):
        assert_near(call.run(op)[1], want, FLOAT32)


def test_gradients_of_low_precision_inputs_are_summed_in_float32() -> None:
    """GVA: 16 value heads share a key; A_log and dt_bias sum over all tokens."""
    call = make("kda", T=300, H=1, HV=16, K=16, V=16, gate="softplus", l2norm=True, dtype=torch.bfloat16)
    found = errors(call)
    for name in ("q", "k"):
        assert found[name] <= 0.004  # one rounding to bfloat16, 2 ** -9 at most, on top of that of the gradient of o
    for name in ("A_log", "dt_bias"):
        assert found[name] <= 0.002


# --- gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
@pytest.mark.parametrize("value", [-20.0, -1000.0, -1e30, float("-inf")])
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_unbounded_gates(family: str, value: float, share: float, dtype: torch.dtype) -> None:
    """Some tokens, half or all of them forget (almost) everything; also gates of single key dimensions."""
    call = make(family, T=200, HV=2, K=32, V=16, initial=True, dtype=dtype)
    g = call.tensors["g"]
    gen = torch.Generator().manual_seed(1)
    masks = [torch.rand(g.shape[:2], generator=gen) < share, torch.rand(g.shape, generator=gen) < share]
    for mask in masks:
        hard = call.with_tensors(g=g.masked_fill(mask[(..., *[None] * (g.dim() - mask.dim()))], value))
        for op in (call.chunk, call.recurrent):
            leaves = hard.leaves()
            outputs = leaves.run(op)
            assert all(x.isfinite().all() for x in [*outputs, *gradients(leaves, outputs, seeds_of(call)).values()])
            assert_exact(hard, dtype, op)


@pytest.mark.parametrize("value", [-20.0, -1000.0, float("-inf")])
def test_a_forgetting_token_starts_anew(value: float) -> None:
    """After a gate of -1000 in all dimensions nothing is left of what came before; -20 leaves 2e-9 of it."""
    call = make("kda", T=150, initial=True, v_first=True)
    g = call.tensors["g"].clone()
    g[:, 70] = value
    call = call.with_tensors(g=g)
    rest = Call("kda", {n: x[:, 70:] for n, x in call.tensors.items() if n != "initial_state"}, call.flags)
    for op in (call.chunk, call.recurrent):
        o, state = call.run(op)
        o_rest, state_rest = rest.run(op)
        assert_near(o[:, 70:], o_rest, 1e-13 if value < -20 else 1e-6)
        assert_near(state, state_rest, 1e-13 if value < -20 else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_strong_decay_from_a_log(family: str, dtype: torch.dtype) -> None:
    """exp(A_log) of 1 to 16 on softplus of around 1: -1 to -40 a token. dg is a small difference where it is computed carelessly."""
    call = make(
        family, T=300, HV=4, K=32, V=32, gate="softplus", l2norm=True, beta="sigmoid", initial=True, dtype=dtype
    )
    a_log = torch.tensor([1.0, 4.0, 9.0, 16.0]).log().to(call.tensors["A_log"].dtype)
    call = call.with_tensors(A_log=a_log, dt_bias=torch.zeros_like(call.tensors["dt_bias"]), g=call.tensors["g"] * 2)
    assert_exact(call, dtype)
    # Each head by itself: the head that forgets most has the smallest gradients.
    leaves = call.leaves()
    seeds = seeds_of(call)
    want = leaves.define()
    exact = gradients(leaves, [want.o, want.final_state], seeds)["g"]
    found = gradients(leaves, leaves.run(), seeds)["g"]
    for head in range(4):
        assert_near(found[:, :, head], exact[:, :, head], 2 * limit(dtype, "g"), f"dg of head {head}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_remembering_gates(dtype: torch.dtype) -> None:
    """The initialisation of fla's layer: many channels that forget a thousandth a token."""
    gen = torch.Generator().manual_seed(3)
    call = make("kda", T=1000, H=2, K=32, V=32, gate="softplus", l2norm=True, beta="sigmoid", initial=True, dtype=dtype)
    wide = call.tensors["A_log"].dtype
    step = torch.exp(torch.rand(64, generator=gen, dtype=torch.float64) * math.log(100) + math.log(0.001))
    a_log = (torch.rand(2, generator=gen, dtype=torch.float64) * 15 + 1).log()
    bias = step + torch.log(-torch.expm1(-step))
    call = call.with_tensors(g=call.tensors["g"] * 0.3, A_log=a_log.to(wide), dt_bias=bias.to(wide))
    assert_exact(call, dtype)


@pytest.mark.parametrize("gate", GATES[1:])
def test_raw_gates_of_any_size(gate: str) -> None:
    """softplus and sigmoid at +-100: no overflow, and float64 stays float64 (torch's softplus is x from 20 on)."""
    call = make("kda", T=100, gate=gate, initial=True, HV=2)
    for factor in (10, 100):
        assert_exact(call.with_tensors(g=call.tensors["g"] * factor), torch.float64)


# --- hard keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "factor"), [(1.0, 1), (1.3, 1), (2.0, 4)])
def test_beta_up_to_two_without_l2norm(size: float, factor: float, dtype: torch.dtype) -> None:
    """Keys of any length, so that tokens amplify the state (32-fold at size 2) and the inverse has large elements."""
    gen = torch.Generator().manual_seed(1)
    call = make("kda", T=200, H=2, K=32, V=32, initial=True, dtype=dtype)
    shape = call.tensors["k"].shape
    call = call.with_tensors(
        k=(torch.randn(shape, generator=gen, dtype=torch.float64) * size / math.sqrt(32)).to(dtype),
        q=torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype),
        beta=(torch.rand(shape[:3], generator=gen, dtype=torch.float64) * 2).to(dtype),
    )
    for op in (call.chunk, call.recurrent):
        assert_exact(call, dtype, op, factor=factor)


@pytest.mark.parametrize(("beta", "single", "double"), [(0.5, 1e-6, 1e-13), (1.0, 1e-5, 1e-13), (2.0, 1e-3, 1e-11)])
def test_one_key_for_all_tokens(beta: float, single: float, double: float) -> None:
    """The worst case of the inverse: no decay, so that with a beta of 2 every token reflects the state and an error is never forgotten."""
    for dtype, allowed in ((torch.float32, single), (torch.float64, double)):
        call = make("kda", T=600, K=16, V=16, initial=True, dtype=dtype)
        k = call.tensors["k"][:, :1].expand_as(call.tensors["k"])
        call = call.with_tensors(k=k, q=k, g=torch.zeros_like(k), beta=torch.full_like(call.tensors["beta"], beta))
        for name, found in errors(call).items():
            assert found <= allowed, f"{name}: error {found:.3g}, allowed {allowed:.3g}"


def test_rows_of_zeros() -> None:
    """L2 norm of a zero row is 0, and its gradient is finite."""
    call = make("kda", T=70, l2norm=True, initial=True)
    tensors = {n: x.clone() for n, x in call.tensors.items()}
    for n in "qkv":
        tensors[n][:, 10:30] = 0
    assert_exact(call.with_tensors(**tensors), torch.float64)


@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_l2norm_at_any_size(size: float) -> None:
    call = make("kda", T=70, l2norm=True, initial=True, dtype=torch.float32)
    call = call.with_tensors(q=call.tensors["q"] * size, k=call.tensors["k"] * size)
    assert_exact(call, torch.float32, factor=2)


# --- the future, and the neighbours ----------------------------------------------------------------------------------


def changed(call: Call, token: int, name: str, value: float | None, gen: torch.Generator) -> Call:
    """The call with one token's row of one tensor replaced; None: by other ordinary numbers."""
    x = call.tensors[name].clone()
    row = torch.rand(x[:, token].shape, generator=gen, dtype=torch.float64)
    if value is not None:
        row = torch.full_like(row, value)
    elif name == "g":
        row = -row
    x[:, token] = row.to(x.dtype)
    return call.with_tensors(**{name: x})


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "gate"), [*(("kda", g) for g in GATES), ("gdn", "log"), ("gdn", "softplus")])
def test_no_later_token_changes_a_bit(family: str, gate: str, dtype: torch.dtype, form: str) -> None:
    gen = torch.Generator().manual_seed(0)
    call = make(family, T=150, HV=2, K=16, V=16, gate=gate, l2norm=True, beta="sigmoid", initial=True, dtype=dtype)
    op = getattr(call, form)
    more: list[dict[str, Any]] = [{}] if form == "recurrent" else [{}, {"chunk_size": 32}]
    if form == "chunk" and gate.startswith("bounded"):
        more.append({"safe_gate": True})
    for flags in more:
        before = call.run(op, **flags)[0]
        for token in (1, 11, 12, 16, 33, 63, 64, 149):
            for name, value in (
                *((n, None) for n in ("q", "k", "v", "g", "beta")),
                *(("g", x) for x in (-1000.0, -20.0, 0.0, 5.0 if gate != "log" else -1e30)), ("v", 1e4), ("beta", -30.0),
            ):  # fmt: skip
                after = changed(call, token, name, value, gen).run(op, **flags)[0]
                assert torch.equal(after[:, :token], before[:, :token]), f"token {token}, {name} = {value}"


def test_the_last_token_does_change_its_own_row() -> None:
    """So that the test above sees something."""
    gen = torch.Generator().manual_seed(0)
    call = make("kda", T=150, dtype=torch.float32)
    before = call.run()[0]
    for name in ("q", "k", "v", "g", "beta"):
        assert not torch.equal(changed(call, 149, name, None, gen).run()[0][:, 149], before[:, 149])


def test_later_states_do_not_change_earlier_ones() -> None:
    call = make("kda", T=200, dtype=torch.float32)
    before = call.run(return_intermediate_states=True)[2]
    gen = torch.Generator().manual_seed(0)
    after = changed(call, 128, "g", -1000.0, gen).run(return_intermediate_states=True)[2]
    assert torch.equal(after[:, :3], before[:, :3])
    assert not torch.equal(after[:, 3], before[:, 3])


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_sequences_are_apart(form: str) -> None:
    """What is not a number in one sequence, batch row or head stays there, in results and in gradients."""
    call = make("kda", lengths=[30, 0, 40, 25], HV=2, gate="softplus", initial=True, dtype=torch.float32)
    seeds = seeds_of(call)
    clean = call.leaves()
    outputs = clean.run(getattr(call, form))
    grads = gradients(clean, outputs, seeds)
    dirty = {n: call.tensors[n].clone() for n in ("q", "k", "v", "g", "beta")}
    for x in dirty.values():
        x[:, 30:70] = float("nan")
    leaves = call.with_tensors(**dirty).leaves()
    found_outputs = leaves.run(getattr(call, form))
    found = gradients(leaves, found_outputs, seeds)
    rest = [*range(30), *range(70, 95)]
    assert found_outputs[0][:, 30:70].isnan().all()
    assert torch.equal(found_outputs[0][:, rest], outputs[0][:, rest])
    assert torch.equal(found_outputs[1][[0, 1, 3]], outputs[1][[0, 1, 3]])
    assert all(torch.equal(found[n][:, rest], grads[n][:, rest]) for n in dirty)
    assert torch.equal(found["initial_state"][[0, 1, 3]], grads["initial_state"][[0, 1, 3]])

    call = make("kda", B=3, T=70, HV=2, dtype=torch.float32)
    o = call.run(getattr(call, form))[0]
    v = call.tensors["v"].clone()
    v[1] = float("nan")
    assert torch.equal(call.with_tensors(v=v).run(getattr(call, form))[0][::2], o[::2])
    v = call.tensors["v"].clone()
    v[:, :, 1] = float("nan")
    assert torch.equal(call.with_tensors(v=v).run(getattr(call, form))[0][:, :, 0], o[:, :, 0])


def test_rows_that_no_sequence_covers_are_not_read() -> None:
    call = make("kda", T=95, gate="softplus", dtype=torch.float32).with_flags(
        cu_seqlens=torch.tensor([0, 30, 70, 70]), use_graph=True
    )
    tensors = {n: call.tensors[n].clone() for n in ("q", "k", "v", "g", "beta")}
    do, ds = seeds_of(call)
    for x in (*tensors.values(), do):
        x[:, 70:] = float("nan")
    leaves = call.with_tensors(**tensors).leaves()
    outputs = leaves.run()
    found = gradients(leaves, outputs, (do, ds))
    assert not outputs[0][:, 70:].any()
    for x in (*outputs, *found.values()):
        assert x.isfinite().all()


def test_what_is_not_a_number_stays_in_its_chunk_and_after_it() -> None:
    call = make("kda", T=200, dtype=torch.float32)
    before = call.run()[0]
    v = call.tensors["v"].clone()
    v[:, 130] = float("nan")
    after = call.with_tensors(v=v).run()[0]
    assert torch.equal(after[:, :128], before[:, :128])
    assert after[:, 130:].isnan().all()
    token = call.with_tensors(v=v).run(call.recurrent)[0]
    assert torch.equal(token[:, :130], call.run(call.recurrent)[0][:, :130])


# --- the measure itself ----------------------------------------------------------------------------------------------


def test_the_measure_sees_what_is_wrong() -> None:
    x = torch.randn(100, dtype=torch.float64)
    assert error(x, x) == 0
    assert error(x * 1.01, x) == pytest.approx(0.01)
    for bad in (float("nan"), float("inf")):
        y: Tensor = x.clone()
        y[3] = bad
        assert error(y, x) == float("inf")
    assert error(torch.ones(3), torch.zeros(3)) > 1
    with pytest.raises(AssertionError, match="shape"):
        error(x[None], x)
