"""The serving form of `fused_recurrent_kda`: a pool of states, slots, accepted tokens, results in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import GATES, Call, assert_near, label, make, pairwise
from definitions import bounds, delta_rule
from torch import Tensor

from deltafuse import fused_recurrent_kda

SLOTS = 9
NEAR = 1e-13


def serve(call: Call, pool: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    return call.with_tensors(initial_state=pool).run(fused_recurrent_kda, **more)


def pool_of(call: Call, dtype: torch.dtype = torch.float64, slots: int = SLOTS) -> Tensor:
    v = call.tensors["v"]
    inner = (6, 8) if call.flags.get("state_v_first") else (8, 6)
    gen = torch.Generator().manual_seed(5)
    return torch.randn(slots, v.shape[2], *inner, generator=gen, dtype=torch.float64).to(dtype)


def expected(
    call: Call, pool: Tensor, indices: Tensor, accepted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the pool afterwards and the state after every token `[B * T, ...]`, sequence by sequence from the definition."""
    batch, tokens = call.tensors["v"].shape[:2]
    cu = call.flags.get("cu_seqlens")
    flags = {n: x for n, x in call.flags.items() if n != "cu_seqlens"}
    spans = [(n, 0, tokens) for n in range(batch)] if cu is None else [(0, a, b) for a, b in bounds(tokens, cu)]
    o, after = torch.zeros_like(call.tensors["v"], dtype=torch.float64), pool.double().clone()
    states = torch.zeros(batch, tokens, *pool.shape[1:], dtype=torch.float64)
    for n, (row, start, end) in enumerate(spans):
        own = [int(indices[n])] if indices.dim() == 1 else indices[n].tolist()
        first = own[0 if accepted is None else int(accepted[n]) - 1]
        if first < 0 or start == end:
            continue
        rows = {m: x[row : row + 1, start:end] for m, x in call.tensors.items() if m in ("q", "k", "v", "g", "beta")}
        parameters = {m: call.tensors[m] for m in ("A_log", "dt_bias") if m in call.tensors}
        found = delta_rule(**rows, **parameters, **flags, initial_state=pool[first : first + 1])
        o[row, start:end], states[row, start:end] = found.o[0], found.states[0]
        if indices.dim() == 1:
            after[first] = found.final_state[0]
        else:
            for t in range(end - start):
                if own[t] >= 0:
                    after[own[t]] = found.states[0, t]
    return o, after, states.flatten(0, 1)


def untouched(pool: Tensor, indices: Tensor) -> list[int]:
    return sorted(set(range(pool.shape[0])) - set(indices.flatten().tolist()))


COMBINATIONS = list(
    pairwise(
        gate=GATES, l2norm=[False, True], beta=["plain", "sigmoid", "negative"], v_first=[False, True], HV=[2, 4],
        T=[1, 2, 4], index_dtype=[torch.int32, torch.int64], scale=[None, 0.3],
    )
)  # fmt: skip


@pytest.mark.parametrize("combination", COMBINATIONS, ids=label)
def test_one_slot_a_sequence(combination: dict[str, Any]) -> None:
    options = dict(combination)
    index_dtype = options.pop("index_dtype")
    call = make("kda", B=4, H=2, **options)
    pool, indices = pool_of(call), torch.tensor([7, -1, 0, 3], dtype=index_dtype)
    before = pool.clone()
    want_o, want_pool, _ = expected(call, pool, indices)
    o, returned = serve(call, pool, ssm_state_indices=indices, inplace_final_state=True)
    assert returned is pool
    assert_near(o, want_o, NEAR)
    assert_near(pool, want_pool, NEAR)
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    rest = untouched(pool, indices)
    assert torch.equal(pool[rest], before[rest])
    assert not torch.equal(pool[[7, 0, 3]], before[[7, 0, 3]])


@pytest.mark.parametrize("with_accepted", [False, True])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=label)
def test_a_slot_for_every_token(combination: dict[str, Any], with_accepted: bool) -> None:
    options = dict(combination)
    index_dtype, tokens = options.pop("index_dtype"), options["T"]
    call = make("kda", B=2, H=2, **options)
    indices = torch.tensor([[6, 1, 4, 8], [2, 7, 0, 5]], dtype=index_dtype)[:, : max(tokens, 2)]
    accepted = torch.tensor([2, 1], dtype=index_dtype) if with_accepted else None
    pool = pool_of(call)
    before = pool.clone()
    want_o, want_pool, _ = expected(call, pool, indices, accepted)
    o, returned = serve(call, pool, ssm_state_indices=indices, num_accepted_tokens=accepted, inplace_final_state=True)
    assert returned is pool
    assert_near(o, want_o, NEAR)
    assert_near(pool, want_pool, NEAR)
    rest = untouched(pool, indices[:, :tokens])
    assert torch.equal(pool[rest], before[rest])


def test_slots_of_none_among_the_tokens() -> None:
    """A token whose own slot is none is computed, and its state is not stored; a first slot of none stops the sequence."""
    call = make("kda", B=3, T=3)
    indices = torch.tensor([[4, -1, 5], [-1, 2, 3], [0, 1, -1]])
    for accepted in (None, torch.tensor([1, 2, 3]), torch.tensor([3, 1, 2])):
        pool = pool_of(call)
        before = pool.clone()
        want_o, want_pool, _ = expected(call, pool, indices, accepted)
        o, _ = serve(call, pool, ssm_state_indices=indices, num_accepted_tokens=accepted, inplace_final_state=True)
        assert_near(o, want_o, NEAR)
        assert_near(pool, want_pool, NEAR)
        assert torch.equal(pool[6:], before[6:])


@pytest.mark.parametrize("lengths", [[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("per_token", [False, True])
def test_packed_sequences(lengths: list[int], per_token: bool) -> None:
    """An empty sequence leaves its slot alone."""
    call = make("kda", lengths=lengths, gate="softplus")
    indices = torch.tensor([[8, 1, 2], [3, 4, 5], [6, 7, 0], [-1, -1, -1]])
    indices = indices if per_token else indices[:, 0]
    accepted = torch.tensor([1, 3, 2, 1]) if per_token else None
    pool = pool_of(call)
    want_o, want_pool, _ = expected(call, pool, indices, accepted)
    more = {"ssm_state_indices": indices, "num_accepted_tokens": accepted, "inplace_final_state": True}
    again = pool.clone()
    o, _ = serve(call, pool, **more)
    assert_near(o, want_o, NEAR)
    assert_near(pool, want_pool, NEAR)
    assert torch.equal(serve(call, again, **more, cu_seqlens_cpu=call.flags["cu_seqlens"].int())[0], o)
    assert torch.equal(again, pool)


def test_strided_indices_and_pool() -> None:
    call = make("kda", B=3, T=2, HV=2, gate="softplus")
    wide = torch.tensor([[7, 99, 2, 99], [1, 99, -1, 99], [0, 99, 5, 99]])
    accepted = torch.tensor([2, 99, 1, 99, 1, 99])[::2]
    big = pool_of(call, slots=2 * SLOTS)
    for indices, taken in ((wide[:, ::2], accepted), (wide[:, 0], None), (wide.t()[::2].t(), accepted)):
        assert not indices.is_contiguous()
        storage = big.clone()
        pool = storage[::2]
        dense = pool.clone()
        o, returned = serve(call, pool, ssm_state_indices=indices, num_accepted_tokens=taken, inplace_final_state=True)
        want_o, want = serve(
            call, dense, ssm_state_indices=indices.clone(memory_format=torch.contiguous_format),
            num_accepted_tokens=None if taken is None else taken.clone(), inplace_final_state=True,
        )  # fmt: skip
        assert returned is pool
        assert torch.equal(o, want_o)
        assert torch.equal(pool, want)
        assert torch.equal(storage[1::2], big[1::2])


def test_a_pool_whose_heads_are_strided() -> None:
    """Such as a view of one buffer for the states of several layers."""
    call = make("kda", B=2, T=2, HV=2)
    buffer = torch.randn(SLOTS, 3, 2, 8, 6, dtype=torch.float64)
    before = buffer.clone()
    indices = torch.tensor([5, 2])
    o, _ = serve(call, buffer[:, 1], ssm_state_indices=indices, inplace_final_state=True)
    want_o, want_pool, _ = expected(call, before[:, 1], indices)
    assert_near(o, want_o, NEAR)
    assert_near(buffer[:, 1], want_pool, NEAR)
    assert torch.equal(buffer[:, ::2], before[:, ::2])


@pytest.mark.parametrize("v_first", [False, True])
def test_state_after_every_token(v_first: bool) -> None:
    """Without `inplace_final_state` the pool is only read."""
    call = make("kda", B=3, T=4, HV=2, v_first=v_first, gate="bounded")
    pool = pool_of(call)
    before = pool.clone()
    rows = torch.tensor([[6, 1, 4, 8], [2, 7, 0, 5], [-1, 3, -1, -1]])
    for indices, accepted in ((rows, None), (rows, torch.tensor([3, 4, 2])), (rows[:, 0], None)):
        want_o, _, want_states = expected(call, pool, indices, accepted)
        o, states = serve(call, pool, ssm_state_indices=indices, num_accepted_tokens=accepted)
        assert torch.equal(pool, before)
        assert_near(o, want_o, NEAR)
        assert_near(states, want_states, NEAR)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_pool(pool_dtype: torch.dtype) -> None:
    """Arithmetic between the tokens of a call is float32; only what is stored is rounded."""
    call = make("kda", B=2, T=4, dtype=torch.float32, gate="softplus")
    pool = pool_of(call, pool_dtype)
    indices = torch.tensor([[6, 1, 4, 8], [2, 7, 0, 5]])
    want_o, want_pool, want_states = expected(call, pool, indices)
    _, states = serve(call, pool, ssm_state_indices=indices)
    assert states.dtype == pool_dtype
    o, returned = serve(call, pool, ssm_state_indices=indices, inplace_final_state=True)
    assert returned.dtype == pool_dtype
    assert_near(o, want_o, 1e-6)
    rounding = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}[pool_dtype]
    assert_near(pool, want_pool, rounding)
    assert_near(states, want_states, rounding)


def test_in_place_without_slots() -> None:
    for lengths in (None, [3, 0, 4]):
        call = make("kda", B=2, T=7, initial=True, lengths=lengths, v_first=True)
        want = call.define()
        state = call.tensors["initial_state"].clone()
        o, returned = serve(call, state, inplace_final_state=True, output_final_state=False)
        assert returned is state
        assert_near(o, want.o, NEAR)
        assert_near(state, want.final_state, NEAR)


@pytest.mark.parametrize("initial", [False, True])
def test_out(initial: bool) -> None:
    call = make("kda", B=2, T=5, initial=initial)
    state = call.tensors.get("initial_state")
    before = None if state is None else state.clone()
    want = call.run(fused_recurrent_kda)
    out = torch.full_like(call.tensors["v"], float("nan"))
    o, final = call.run(fused_recurrent_kda, out=out)
    assert o is out
    assert_near(out, want[0], NEAR)
    assert_near(final, want[1], NEAR)
    if state is not None:
        assert torch.equal(state, before)
        assert final.data_ptr() != state.data_ptr()
    assert call.run(fused_recurrent_kda, out=out, output_final_state=False)[1] is None


def test_out_with_a_pool() -> None:
    call = make("kda", B=3, T=2)
    pool, indices = pool_of(call), torch.tensor([3, -1, 5])
    want_o, want_pool, _ = expected(call, pool, indices)
    out = torch.full_like(call.tensors["v"], float("nan"))
    o, _ = serve(call, pool, ssm_state_indices=indices, inplace_final_state=True, out=out)
    assert o is out
    assert_near(out, want_o, NEAR)
    assert_near(pool, want_pool, NEAR)


def test_out_may_be_an_input() -> None:
    """o in the place of v: read before it is written."""
    call = make("kda", B=2, T=5)
    want, _ = call.run(fused_recurrent_kda)
    v = call.tensors["v"].clone()
    o, _ = call.with_tensors(v=v).run(fused_recurrent_kda, out=v)
    assert o is v
    assert_near(o, want, NEAR)


def test_beta_per_value_in_the_serving_form() -> None:
    call = make("kda", B=2, T=3, HV=2)
    call = call.with_tensors(beta=torch.rand_like(call.tensors["v"]))
    pool, indices = pool_of(call), torch.tensor([3, 5])
    want_o, want_pool, _ = expected(call, pool, indices)
    o, _ = serve(call, pool, ssm_state_indices=indices, inplace_final_state=True)
    assert_near(o, want_o, NEAR)
    assert_near(pool, want_pool, NEAR)


def test_decoding_with_rejected_tokens() -> None:
    """Speculative decoding: 3 drafted tokens a call, of which some are accepted, equals one pass over the accepted ones."""
    torch.manual_seed(0)
    whole = make("kda", B=2, T=12, H=2, HV=4, gate="softplus", l2norm=True, beta="sigmoid", dtype=torch.float64)
    want = whole.define().o
    pool = torch.zeros(SLOTS, 4, 8, 6, dtype=torch.float64)
    slots = torch.tensor([[0, 1, 2], [3, 4, 5]])
    place, accepted = [0, 0], torch.ones(2, dtype=torch.int64)
    for taken in ([1, 3], [2, 1], [3, 2], [1, 1], [2, 3]):
        rows = {}
        for name in ("q", "k", "v", "g", "beta"):
            x = whole.tensors[name]
            rows[name] = torch.stack([x[n, p : p + 3] for n, p in enumerate(place)])
            for n in range(2):
                rows[name][n, taken[n] :] = torch.randn_like(rows[name][n, taken[n] :])  # drafts that get rejected
        o, _ = serve(
            whole.with_tensors(**rows),
            pool,
            ssm_state_indices=slots,
            num_accepted_tokens=accepted,
            inplace_final_state=True,
        )
        for n in range(2):
            assert_near(o[n, : taken[n]], want[n, place[n] : place[n] + taken[n]], 1e-12)
            place[n] += taken[n]
        accepted = torch.tensor(taken)
    assert place == [9, 10]


def test_many_sequences() -> None:
    """2,050 sequences of 32 heads: a grid's y and z end at 65,535."""
    call = make("kda", B=2050, T=1, H=32, K=4, V=4, dtype=torch.float32)
    pool = torch.randn(2050, 32, 4, 4)
    before = pool.clone()
    indices = torch.randperm(2050, generator=torch.Generator().manual_seed(0)).masked_fill(
        torch.arange(2050) % 7 == 3, -1
    )
    o, _ = serve(call, pool, ssm_state_indices=indices, inplace_final_state=True)
    live = indices >= 0
    want = call.with_tensors(initial_state=before[indices.clamp(min=0)]).define()
    assert_near(o[live], want.o[live], 1e-6)
    assert_near(pool[indices[live]], want.final_state[live], 1e-6)
    assert torch.equal(o[~live], torch.zeros_like(o[~live]))
    rest = untouched(pool, indices)
    assert len(rest) == int((~live).sum())
    assert torch.equal(pool[rest], before[rest])


def test_errors_leave_the_pool_alone() -> None:
    call = make("kda", B=2, T=2)
    pool = pool_of(call)
    before, out = pool.clone(), torch.full_like(call.tensors["v"], 3.0)
    wrong = [
        ({"ssm_state_indices": torch.tensor([0, SLOTS])}, "ssm_state_indices"),
        ({"ssm_state_indices": torch.tensor([-2, 0])}, "ssm_state_indices"),
        ({"ssm_state_indices": torch.tensor([[0, 1], [2, SLOTS]])}, "ssm_state_indices"),
        (
            {"ssm_state_indices": torch.tensor([[0, 1], [2, 3]]), "num_accepted_tokens": torch.tensor([0, 1])},
            "num_accepted_tokens",
        ),
        (
            {"ssm_state_indices": torch.tensor([[0, 1], [2, 3]]), "num_accepted_tokens": torch.tensor([1, 3])},
            "num_accepted_tokens",
        ),
    ]
    for arguments, name in wrong:
        with pytest.raises(ValueError, match=f"`{name}`: got .*; allowed: "):
            serve(call, pool, inplace_final_state=True, out=out, **arguments)
        assert torch.equal(pool, before)
        assert torch.equal(out, torch.full_like(out, 3.0))


def test_packed_sequences_longer_than_their_slots() -> None:
    call = make("kda", lengths=[1, 3])
    pool = pool_of(call)
    before = pool.clone()
    with pytest.raises(
        ValueError, match="`ssm_state_indices`: got 2 slots a sequence; allowed: one for each of 3 tokens"
    ):
        serve(call, pool, ssm_state_indices=torch.tensor([[0, 1], [2, 3]]), inplace_final_state=True)
    assert torch.equal(pool, before)


def test_a_state_that_is_written_has_memory_for_every_element() -> None:
    x = torch.randn(1, 5, 2, 8)
    arguments = {"q": x, "k": x, "v": x, "g": -x.abs(), "beta": torch.rand(1, 5, 2)}
    expanded = torch.randn(1, 1, 8, 8).expand(1, 2, 8, 8)
    for more in ({}, {"ssm_state_indices": torch.tensor([0])}):
        with pytest.raises(ValueError, match=r"`initial_state`: got strides .* memory for every element"):
            fused_recurrent_kda(**arguments, initial_state=expanded, inplace_final_state=True, **more)
    # One that is only read may be expanded.
    o, _ = fused_recurrent_kda(**arguments, initial_state=expanded)
    assert torch.equal(o, fused_recurrent_kda(**arguments, initial_state=expanded.clone())[0])
