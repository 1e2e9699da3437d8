"""Gradients of the delta-rule ops in float64 against autograd through the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import GATES, Call, assert_near, gradients, label, make, pairwise, seeds_of
from definitions import kda_gate

from deltafuse import fused_kda_gate
from deltafuse.reference.options import CHUNKS_A_WINDOW

EXACT = 1e-12  # float64 on ordinary inputs; what is measured is below 1e-14
WINDOW = 32 * CHUNKS_A_WINDOW  # tokens that chunks of 32 hold at a time
LENGTHS = [[5, 0, 70, 33], [1, 1, 129], [0, 0, 100, 0]]

EVERY = [
    pytest.param(family, c, id=f"{family}-{label(c)}")
    for family, gates, chunks in (("kda", GATES, [64, 32]), ("gdn", GATES[:2], [64, 32, 16]))
    for c in pairwise(
        gate=gates, l2norm=[False, True], beta=["plain", "sigmoid", "negative"], initial=[False, True],
        v_first=[False, True], HV=[2, 4], lengths=[None, *LENGTHS], scale=[None, 0.3], chunk_size=chunks,
        disable_recompute=[False, True],
    )
]  # fmt: skip


def compare(call: Call, op: Any, seeds: tuple[torch.Tensor, torch.Tensor], **more: Any) -> None:
    """Every gradient of `op` against the definition's; the tensors of `call` are leaves."""
    want = call.define()
    expected = gradients(call, [want.o, want.final_state], seeds)
    found = gradients(call, call.run(op, **more), seeds)
    for name, grad in expected.items():
        assert found[name].dtype == call.tensors[name].dtype
        assert_near(found[name], grad, EXACT, f"{op.__name__} d{name}")


@pytest.mark.parametrize(("family", "combination"), EVERY)
def test_gradients_equal_the_definitions(family: str, combination: dict[str, Any]) -> None:
    options = dict(combination)
    more = {"chunk_size": options.pop("chunk_size")}
    disable = options.pop("disable_recompute")
    if family == "kda":
        more["disable_recompute"] = disable
    call = make(family, B=2, T=131, H=2, **options).leaves()
    compare(call, call.chunk, seeds_of(call), **more)
    compare(call, call.recurrent, seeds_of(call))


@pytest.mark.parametrize("disable_recompute", [False, True])
@pytest.mark.parametrize(
    ("T", "lengths"),
    [
        (WINDOW - 1, None), (WINDOW, None), (WINDOW + 1, None), (2 * WINDOW + 1, None), (3 * WINDOW + 5, None),
        (0, [2 * WINDOW + 9, 0, 20, WINDOW + 50]), (0, [3, WINDOW + 1, WINDOW, 1]), (0, [5, 4 * WINDOW + 3]),
        (0, [WINDOW + 8] * 4 + [1]),
    ],
    ids=str,
)  # fmt: skip
def test_states_are_kept_and_recomputed_across_windows(
    T: int, lengths: list[int] | None, disable_recompute: bool
) -> None:
    call = make("kda", T=T, B=2, K=4, V=3, gate="softplus", initial=True, lengths=lengths).leaves()
    compare(call, call.chunk, seeds_of(call), chunk_size=32, disable_recompute=disable_recompute)


@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_windows_of_other_chunks(family: str) -> None:
    call = make(family, T=2 * WINDOW + 6, K=4, V=3, initial=True, v_first=True).leaves()
    compare(call, call.chunk, seeds_of(call))
    if family == "gdn":
        compare(call, call.chunk, seeds_of(call), chunk_size=16)
    compare(call, call.recurrent, seeds_of(call))


@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_gradient_of_one_output_alone(family: str) -> None:
    """Without a gradient of o, without one of the final state, and with o alone asked for."""
    call = make(family, T=70, HV=2, gate="softplus", initial=True, v_first=True).leaves()
    do, ds = seeds_of(call)
    want = call.define()
    names = list(call.tensors)
    for op in (call.chunk, call.recurrent):
        for place, seed in ((0, do), (1, ds)):
            expected = torch.autograd.grad(
                (want.o, want.final_state)[place],
                list(call.tensors.values()),
                seed,
                retain_graph=True,
                materialize_grads=True,
            )
            found = torch.autograd.grad(call.run(op)[place], list(call.tensors.values()), seed)
            for name, got, exact in zip(names, found, expected, strict=True):
                assert_near(got, exact, EXACT, f"{op.__name__} d{name} of output {place}")
            if place == 0:
                alone = torch.autograd.grad(
                    call.run(op, output_final_state=False)[0], list(call.tensors.values()), seed
                )
                assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_gradient_of_the_state_alone_reaches_no_query() -> None:
    call = make("kda", T=70).leaves()
    (dq,) = torch.autograd.grad(call.run()[1].sum(), call.tensors["q"])
    assert torch.equal(dq, torch.zeros_like(dq))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 5), (5, 1), (60, 33), (128, 128)])
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_any_head_size(family: str, K: int, V: int) -> None:
    call = make(family, T=70, K=K, V=V, initial=True, gate="softplus").leaves()
    compare(call, call.chunk, seeds_of(call))


@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [0, 64, 0, 64, 1], [63, 65, 0]], ids=str)
def test_packing(lengths: list[int]) -> None:
    for family in ("kda", "gdn"):
        call = make(family, lengths=lengths, initial=True, gate="softplus").leaves()
        found = gradients(call, call.run(), seeds_of(call))
        if sum(lengths):
            compare(call, call.chunk, seeds_of(call))
            compare(call, call.recurrent, seeds_of(call))
        else:
            assert torch.equal(found["initial_state"], seeds_of(call)[1])
            assert float(found["A_log"].abs().sum()) == 0


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0)])
def test_no_tokens(B: int, T: int) -> None:
    for family in ("kda", "gdn"):
        call = make(family, B=B, T=T, initial=True, gate="softplus").leaves()
        for op in (call.chunk, call.recurrent):
            found = gradients(call, call.run(op), seeds_of(call))
            assert torch.equal(found.pop("initial_state"), seeds_of(call)[1])
            assert all(grad.shape == call.tensors[name].shape and not grad.any() for name, grad in found.items())


def test_padded_bounds_that_end_early() -> None:
    call = make("kda", T=90, gate="softplus")
    call = call.with_flags(cu_seqlens=torch.tensor([0, 30, 75, 75, 75]))
    call = call.with_tensors(initial_state=torch.randn(4, 1, 8, 6, dtype=torch.float64)).leaves()
    compare(call, call.chunk, seeds_of(call), use_graph=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradients_have_the_dtypes_of_their_inputs(dtype: torch.dtype) -> None:
    for family in ("kda", "gdn"):
        call = make(family, dtype=dtype, gate="softplus", initial=True)
        call = call.with_tensors(g=call.tensors["g"].float(), A_log=call.tensors["A_log"].bfloat16()).leaves()
        for op in (call.chunk, call.recurrent):
            found = gradients(call, call.run(op), seeds_of(call))
            assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in call.tensors.items()}
            assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in call.tensors.items()}


def test_parameters_keep_their_shapes() -> None:
    call = make("kda", HV=2, gate="softplus")
    a_log, bias = call.tensors["A_log"].view(1, 1, 2, 1), call.tensors["dt_bias"].view(2, 8)
    call = call.with_tensors(A_log=a_log, dt_bias=bias).leaves()
    compare(call, call.chunk, seeds_of(call))


@pytest.mark.parametrize(
    "combination", list(pairwise(gk=[False, True], raw=[False, True], beta=[False, True])), ids=label
)
def test_gradients_of_two_gates(combination: dict[str, bool]) -> None:
    """g and gk of the recurrent op become one gate; their gradients come apart again."""
    call = make("gdn", T=40, HV=2, gate="softplus" if combination["raw"] else "log", initial=True)
    tensors = dict(call.tensors)
    if combination["gk"]:
        tensors["gk"] = -torch.rand(1, 40, 2, 8, dtype=torch.float64)
    if not combination["beta"]:
        del tensors["beta"]
    call = Call("gdn", tensors, call.flags).leaves()
    compare(call, call.recurrent, seeds_of(call))


def test_a_gate_or_a_beta_per_value_has_no_gradient() -> None:
    call = make("gdn", T=5).leaves()
    o, _ = call.run(call.recurrent, gv=-torch.rand_like(call.tensors["v"]))
    with pytest.raises(NotImplementedError, match="gv"):
        o.sum().backward()
    call = make("kda", T=5)
    call = call.with_tensors(beta=torch.rand_like(call.tensors["v"])).leaves()
    o, _ = call.run(call.recurrent)
    with pytest.raises(NotImplementedError, match="beta"):
        o.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    """It is not there, and is not taken for 0."""
    call = make("kda", T=5).leaves()
    (dq,) = torch.autograd.grad(call.run()[0].square().sum(), call.tensors["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="autograd formula"):
        dq.sum().backward()


@pytest.mark.parametrize("gate", GATES[1:])
@pytest.mark.parametrize("shape", [(3, 4), (5, 3, 4), (2, 5, 3, 4), (0, 3, 4)], ids=str)
def test_gate_alone(gate: str, shape: tuple[int, ...]) -> None:
    gen = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=gen, dtype=torch.float64, requires_grad=True)  # noqa: E731
    g, tensors = draw(*shape), {"dt_bias": draw(12)}
    if gate != "bounded, no A_log":
        tensors["A_log"] = draw(3)
    bound = None if gate == "softplus" else -4.0
    seed = torch.randn(shape, generator=gen, dtype=torch.float64)
    got = fused_kda_gate(g, **tensors, lower_bound=bound, output_dtype=torch.float64)
    want = kda_gate(g, **tensors, lower_bound=bound)
    inputs = [g, *tensors.values()]
    for found, exact in zip(
        torch.autograd.grad(got, inputs, seed), torch.autograd.grad(want, inputs, seed), strict=True
    ):
        assert_near(found, exact, EXACT)
