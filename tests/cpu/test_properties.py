"""Laws that hold for any call: hypothesis draws shapes, lengths, flags, strides and dtypes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import Call, assert_near, gradients, make, seeds_of
from definitions import chunk_states
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor

TOKEN_TENSORS = ("q", "k", "v", "g", "beta")
NEAR = {torch.float64: 1e-12, torch.float32: 3e-6}


@st.composite
def calls(
    draw: st.DrawFn, families: tuple[str, ...] = ("kda", "gdn"), packed: bool | None = None, **fixed: Any
) -> Call:
    """Any call on ordinary inputs; `fixed` are arguments of `make`."""
    family = draw(st.sampled_from(families))
    gates = ["log", "softplus"] + (["bounded", "bounded, no A_log"] if family == "kda" else [])
    heads, l2norm = draw(st.integers(1, 3)), draw(st.booleans())
    options: dict[str, Any] = {
        # One normalised dimension has no gradient but rounding.
        "H": heads, "HV": heads * draw(st.integers(1, 3)), "K": draw(st.integers(1 + l2norm, 12)), "V": draw(st.integers(1, 12)),
        "gate": draw(st.sampled_from(gates)), "l2norm": l2norm,
        "beta": draw(st.sampled_from(["plain", "sigmoid", "negative"])), "initial": draw(st.booleans()),
        "v_first": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.25, 1.5])), "seed": draw(st.integers(0, 2**16)),
        "dtype": draw(st.sampled_from([torch.float64, torch.float32])),
    }  # fmt: skip
    if draw(st.booleans()) if packed is None else packed:
        options["lengths"] = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 140)), min_size=1, max_size=5))
    else:
        options |= {"B": draw(st.integers(1, 3)), "T": draw(st.one_of(st.integers(1, 20), st.integers(1, 300)))}
    options |= fixed
    note(f"{family} {options}")
    return make(family, **options)


def chunk_sizes(call: Call) -> st.SearchStrategy[int]:
    return st.sampled_from([32, 64] if call.family == "kda" else [16, 32, 64])


def near(call: Call) -> float:
    return NEAR[call.tensors["q"].dtype]


def restride(draw: st.DrawFn, x: Tensor) -> Tensor:
    """The same values with other strides: axes permuted in memory, gaps between elements, an offset, negative nothing."""
    order = draw(st.permutations(range(x.dim())))
    gaps = [draw(st.integers(1, 2)) for _ in order]
    buffer = torch.full(
        [n * gap + 1 for n, gap in zip(x.permute(order).shape, gaps, strict=True)], float("nan"), dtype=x.dtype
    )
    window = buffer[tuple(slice(1, 1 + n * gap, gap) for n, gap in zip(x.permute(order).shape, gaps, strict=True))]
    window.copy_(x.permute(order))
    view = window.permute([order.index(i) for i in range(x.dim())])
    assert torch.equal(view, x)
    return view


def compare(got: Any, want: Any, limit: float) -> None:
    for name, a, b in zip(("o", "state"), got, want, strict=True):
        assert_near(a, b, limit, name)


def all_gradients(call: Call, op: Any, **more: Any) -> dict[str, Tensor]:
    leaves = call.leaves()
    outputs = leaves.run(op, **more)
    return {"o": outputs[0].detach(), "state": outputs[1].detach(), **gradients(leaves, outputs, seeds_of(call))}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], limit: float) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert_near(got[name], x, limit, name)


@given(st.data())
def test_both_forms_are_the_definition(data: st.DataObject) -> None:
    """Outputs, states and gradients, from tensors with any strides."""
    call = data.draw(calls())
    strided = call.with_tensors(**{n: restride(data.draw, x) for n, x in call.tensors.items()})
    leaves = call.leaves()
    defined = leaves.define()
    seeds = seeds_of(call)
    want = (
        {"o": defined.o, "state": defined.final_state, **gradients(leaves, [defined.o, defined.final_state], seeds)}
        if call.tensors["q"].numel()
        else None
    )
    for op, more in ((call.chunk, {"chunk_size": data.draw(chunk_sizes(call))}), (call.recurrent, {})):
        compare(strided.run(op, **more), (defined.o, defined.final_state), near(call))
        if want is not None:
            assert_same(all_gradients(strided, op, **more), want, 4 * near(call))


@given(st.data())
def test_prefill_in_pieces(data: st.DataObject) -> None:
    """Any cut, the state carried on, each piece by either form, equals one pass."""
    call = data.draw(calls(packed=False))
    tokens = call.tensors["q"].shape[1]
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    want_o, want_state = call.run()
    state = call.tensors.get("initial_state")
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        op = data.draw(st.sampled_from([call.chunk, call.recurrent]))
        piece = {n: x[:, start:end] if n in TOKEN_TENSORS else x for n, x in call.tensors.items()}
        if state is not None:
            piece["initial_state"] = state
        o, state = Call(call.family, piece, call.flags).run(op)
        pieces.append(o)
    assert state is not None
    compare((torch.cat(pieces, 1), state), (want_o, want_state), near(call))


@given(st.data())
def test_packed_sequences_are_separate_ones(data: st.DataObject) -> None:
    call = data.draw(calls(packed=True))
    form = data.draw(st.sampled_from(["chunk", "recurrent"]))
    found = all_gradients(call, getattr(call, form))
    bounds = call.flags["cu_seqlens"].tolist()
    do, ds = seeds_of(call)
    sums: dict[str, Tensor] = {}
    for n, (start, end) in enumerate(pairwise(bounds)):
        tensors = {
            m: x[:, start:end] if m in TOKEN_TENSORS else x[n : n + 1] if m == "initial_state" else x
            for m, x in call.tensors.items()
        }
        flags = {m: x for m, x in call.flags.items() if m != "cu_seqlens"}
        alone = Call(call.family, tensors, flags).leaves()
        o, state = alone.run(getattr(call, form))
        assert_near(found["o"][:, start:end], o, near(call), "o")
        assert_near(found["state"][n : n + 1], state, near(call), "state")
        for m, grad in gradients(alone, [o, state], (do[:, start:end], ds[n : n + 1])).items():
            if m in TOKEN_TENSORS:
                assert_near(found[m][:, start:end], grad, 4 * near(call), f"d{m}")
            elif m == "initial_state":
                assert_near(found[m][n : n + 1], grad, 4 * near(call), f"d{m}")
            else:
                sums[m] = sums.get(m, torch.zeros_like(grad)) + grad
    for m, total in sums.items():
        assert_near(found[m], total, 20 * near(call), f"d{m}")


@given(st.data())
def test_a_batch_is_packed_sequences(data: st.DataObject) -> None:
    call = data.draw(calls(packed=False, dtype=torch.float64))
    batch, tokens = call.tensors["q"].shape[:2]
    tensors = {
        n: x.reshape(1, batch * tokens, *x.shape[2:]) if n in TOKEN_TENSORS else x for n, x in call.tensors.items()
    }
    packed = Call(
        call.family, tensors, {**call.flags, "cu_seqlens": torch.arange(batch + 1, dtype=torch.int32) * tokens}
    )
    form = data.draw(st.sampled_from(["chunk", "recurrent"]))
    found, want = all_gradients(packed, getattr(call, form)), {}
    leaves = call.leaves()
    outputs = leaves.run(getattr(call, form))
    do, ds = seeds_of(packed)
    want = {"o": outputs[0], "state": outputs[1], **gradients(leaves, outputs, (do.reshape(outputs[0].shape), ds))}
    assert_same(found, {n: x.detach().reshape(found[n].shape) for n, x in want.items()}, near(call))


@given(st.data())
def test_grouped_values_are_repeated_heads(data: st.DataObject) -> None:
    call = data.draw(calls(dtype=torch.float64))
    heads, group = call.tensors["q"].shape[2], call.tensors["v"].shape[2] // call.tensors["q"].shape[2]
    repeated = call.with_tensors(**{n: call.tensors[n].repeat_interleave(group, 2) for n in "qk"})
    form = data.draw(st.sampled_from(["chunk", "recurrent"]))
    found, want = all_gradients(call, getattr(call, form)), all_gradients(repeated, getattr(call, form))
    for n in "qk":
        want[n] = want[n].unflatten(2, (heads, group)).sum(3)
    assert_same(found, want, 4 * near(call))


@given(st.data())
def test_v_first_is_transposed(data: st.DataObject) -> None:
    call = data.draw(calls(initial=True, v_first=False))
    turned = call.with_tensors(initial_state=call.tensors["initial_state"].transpose(-1, -2)).with_flags(
        state_v_first=True
    )
    form = data.draw(st.sampled_from(["chunk", "recurrent"]))
    do, ds = seeds_of(call)
    results = []
    for c, seeds in ((call, (do, ds)), (turned, (do, ds.transpose(-1, -2)))):
        leaves = c.leaves()
        outputs = leaves.run(getattr(call, form))
        results.append({"o": outputs[0], "state": outputs[1], **gradients(leaves, outputs, seeds)})
    want, found = results
    for n in ("state", "initial_state"):
        found[n] = found[n].transpose(-1, -2)
    assert all(torch.equal(found[n], want[n]) for n in want)


@given(st.data())
def test_gdn_is_kda_with_equal_gates(data: st.DataObject) -> None:
    gdn = data.draw(calls(("gdn",), gate="log"))
    key_dim = gdn.tensors["q"].shape[3]
    kda = Call(
        "kda", {**gdn.tensors, "g": gdn.tensors["g"].unsqueeze(-1).expand(*gdn.tensors["g"].shape, key_dim)}, gdn.flags
    )
    form = data.draw(st.sampled_from(["chunk", "recurrent"]))
    found, want = all_gradients(gdn, getattr(gdn, form)), all_gradients(kda, getattr(kda, form))
    want["g"] = want["g"].sum(-1)
    assert_same(found, want, 10 * near(gdn))


@given(st.data())
def test_chunk_size_is_rounding(data: st.DataObject) -> None:
    call = data.draw(calls(dtype=torch.float64))
    sizes = [32, 64] if call.family == "kda" else [16, 32, 64]
    first, *others = (all_gradients(call, call.chunk, chunk_size=size) for size in sizes)
    for other in others:
        assert_same(other, first, near(call))


@given(st.data())
def test_intermediate_states_are_the_definitions(data: st.DataObject) -> None:
    call = data.draw(calls(("kda",)))
    size = data.draw(chunk_sizes(call))
    cu = call.flags.get("cu_seqlens")
    states = call.run(chunk_size=size, return_intermediate_states=True)[2]
    want = chunk_states(call.define(), call.tensors.get("initial_state"), size, None if cu is None else cu.tolist())
    assert_near(states, want, near(call))


@given(st.data())
def test_one_slot_for_every_sequence_is_a_gathered_state(data: st.DataObject) -> None:
    """The serving form on any pool is the plain one on the pool's rows."""
    call = data.draw(calls(("kda",), initial=True))
    state = call.tensors["initial_state"]
    sequences, slots = state.shape[0], state.shape[0] + data.draw(st.integers(0, 3))
    indices = torch.tensor(data.draw(st.permutations(range(slots)))[:sequences])
    skipped = torch.tensor(data.draw(st.lists(st.booleans(), min_size=sequences, max_size=sequences)))
    indices = indices.masked_fill(skipped, -1)
    pool = torch.randn(slots, *state.shape[1:], dtype=state.dtype)
    before = pool.clone()
    # An empty sequence passes its state on either way.
    want_o, want_state = call.with_tensors(initial_state=before[indices]).run(call.recurrent)
    o, _ = call.with_tensors(initial_state=pool).run(
        call.recurrent, ssm_state_indices=indices, inplace_final_state=True
    )
    bounds = call.flags.get("cu_seqlens")
    tokens = o.shape[1]
    spans = (
        [(n, slice(0, tokens)) for n in range(sequences)]
        if bounds is None
        else [(0, slice(a, b)) for a, b in pairwise(bounds)]
    )
    expected = before.clone()
    for n, (row, span) in enumerate(spans):
        if skipped[n]:
            assert not o[row, span].any()
        else:
            assert_near(o[row, span], want_o[row, span], near(call), "o")
            expected[indices[n]] = want_state[n]
    assert_near(pool, expected, near(call), "pool")
    rest = [s for s in range(slots) if s not in indices.tolist()]
    assert torch.equal(pool[rest], before[rest])


@given(st.integers(1, 5), st.integers(0, 2**16), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_linear_in_the_values(heads: int, seed: int, dtype: torch.dtype) -> None:
    """Without an initial state o and the final state are linear in v; exactly so for a factor of two."""
    call = make("kda", T=80, HV=heads, gate="softplus", dtype=dtype, seed=seed)
    o, state = call.run()
    doubled_o, doubled_state = call.with_tensors(v=call.tensors["v"] * 2).run()
    assert torch.equal(doubled_o, o * 2)
    assert torch.equal(doubled_state, state * 2)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_a_beta_of_zero_only_decays(form: str) -> None:
    call = make("kda", T=70, initial=True)
    call = call.with_tensors(beta=torch.zeros_like(call.tensors["beta"]))
    state = call.run(getattr(call, form))[1]
    assert_near(state, call.tensors["initial_state"] * call.tensors["g"].sum(1).exp().unsqueeze(-1), 1e-12)
