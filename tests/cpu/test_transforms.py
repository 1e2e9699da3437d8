"""Forward-mode differentiation and `torch.func` through the ops: right, or refused by name, never silently without tangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Call, gradients, make
from torch import Tensor
from torch.autograd import forward_ad as fa
from torch.func import functional_call, grad, hessian, jacfwd, jvp, linearize, vmap

import deltafuse
from deltafuse import backends
from deltafuse.nn import KimiDeltaAttention
from deltafuse.problem import tangents
from deltafuse.runtime.probe import Environment
from deltafuse.support import UnsupportedError

Outputs = tuple[Tensor, ...]
Function = Callable[[dict[str, Tensor]], Outputs]
HOPPER = Environment("cuda", (9, 0), "a Hopper", dsl="4.8.1", fla="0.6.0", triton="3.7.1", sms=132)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of(call: Call, *, recurrent: bool = False) -> tuple[Function, dict[str, Tensor]]:
    op = call.recurrent if recurrent else call.chunk
    return lambda tensors: call.with_tensors(**tensors).run(op), call.tensors


def convolution(packed: bool) -> tuple[Function, dict[str, Tensor]]:
    sizes: dict[str, tuple[int, ...]] = {"x": (1, 9, 6) if packed else (2, 9, 6), "weight": (6, 4), "bias": (6,)}
    sizes |= {"residual": sizes["x"], "initial_state": (2, 6, 4)}
    flags = {
        "cu_seqlens": torch.tensor([0, 3, 9]) if packed else None,
        "output_final_state": True,
        "activation": "silu",
    }
    tensors = {name: randn(*size, seed=i) for i, (name, size) in enumerate(sizes.items())}
    return lambda t: deltafuse.causal_conv1d(**t, **flags), tensors


def gate() -> tuple[Function, dict[str, Tensor]]:
    tensors = {"g": randn(2, 5, 2, 3), "A_log": randn(2, seed=1), "dt_bias": randn(6, seed=2)}
    return lambda t: (deltafuse.fused_kda_gate(**t, output_dtype=torch.float64),), tensors


def layer() -> tuple[Function, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = KimiDeltaAttention(hidden_size=16, num_heads=2, head_dim=8).double()
    tensors = {name: x.detach() for name, x in module.named_parameters()}

    def run(given: dict[str, Tensor]) -> Outputs:
        given = dict(given)
        x = given.pop("x")
        return (functional_call(module, given, (x,))[0],)

    return run, tensors | {"x": randn(2, 5, 16)}


FUNCTIONS: dict[str, Callable[[], tuple[Function, dict[str, Tensor]]]] = {
    "chunk_kda": lambda: of(make(B=2, T=35, H=2, HV=4, K=4, V=3, gate="softplus", l2norm=True, beta="negative", initial=True)),
    "chunk_kda, packed": lambda: of(make(K=4, V=3, lengths=[5, 0, 66], gate="bounded", initial=True, v_first=True)),
    "fused_recurrent_kda": lambda: of(make(T=5, K=4, V=3, initial=True), recurrent=True),
    "chunk_gated_delta_rule": lambda: of(make("gdn", T=35, HV=2, K=4, V=3, gate="softplus")),
    "fused_recurrent_gated_delta_rule": lambda: of(make("gdn", T=5, K=4, V=3), recurrent=True),
    "causal_conv1d": lambda: convolution(False),
    "causal_conv1d, packed": lambda: convolution(True),
    "fused_kda_gate": gate,
    "KimiDeltaAttention": layer,
}  # fmt: skip
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def inner(a: Any, b: Any) -> Tensor:
    """The inner product of tensors of one kind."""
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def directions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: randn(*x.shape, seed=7 + i) for i, (name, x) in enumerate(tensors.items())}


def by_levels(function: Function, at: dict[str, Tensor], along: dict[str, Tensor]) -> Outputs:
    with fa.dual_level():
        outputs = function({name: fa.make_dual(x, along[name]) for name, x in at.items()})
        return tuple(fa.unpack_dual(y).tangent for y in outputs)


@every_function
def test_tangents_are_what_gradients_say(name: str) -> None:
    """`w . (J d) = (w J) . d`, with levels and with `torch.func.jvp`; a plain call before is not what the other is taken for."""
    function, tensors = FUNCTIONS[name]()
    along = directions(tensors)
    plain = function(tensors)
    seeds = [randn(*y.shape, seed=3 + i) for i, y in enumerate(plain)]
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    grads = torch.autograd.grad(function(leaves), list(leaves.values()), seeds)
    want = inner(grads, along.values())
    torch.testing.assert_close(inner(by_levels(function, tensors, along), seeds), want)
    values, found = jvp(function, (tensors,), (along,))
    torch.testing.assert_close(inner(found, seeds), want)
    torch.testing.assert_close(values, plain)
    with torch.no_grad():
        torch.testing.assert_close(inner(by_levels(function, tensors, along), seeds), want)


@every_function
def test_each_tensor_s_tangent_counts(name: str) -> None:
    function, tensors = FUNCTIONS[name]()
    along = directions(tensors)
    seeds = [randn(*y.shape, seed=3 + i) for i, y in enumerate(function(tensors))]
    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    grads = torch.autograd.grad(function(leaves), list(leaves.values()), seeds)
    for (one, direction), own in zip(along.items(), grads, strict=True):
        with fa.dual_level():
            outputs = function({**tensors, one: fa.make_dual(tensors[one], direction)})
            parts = [fa.unpack_dual(y).tangent for y in outputs]
        found = inner(
            [y for y in parts if y is not None], [s for y, s in zip(parts, seeds, strict=True) if y is not None]
        )
        torch.testing.assert_close(found, (own * direction).sum())


@every_function
def test_transforms_of_gradients(name: str) -> None:
    function, tensors = FUNCTIONS[name]()

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.stack([y.square().sum() for y in function(given)]).sum()

    leaves = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    want = dict(zip(leaves, torch.autograd.grad(loss(leaves), list(leaves.values())), strict=True))
    torch.testing.assert_close(grad(loss)(tensors), want)
    twice = vmap(grad(loss))({n: torch.stack([x, x]) for n, x in tensors.items()})
    torch.testing.assert_close(twice, {n: torch.stack([x, x]) for n, x in want.items()})


@every_function
def test_batches_of_tangents(name: str) -> None:
    """vmap of jvp and jvp of vmap; a batch of all tensors, and of each alone, where the others have none."""
    function, tensors = FUNCTIONS[name]()
    along = directions(tensors)
    for batched in (list(tensors), *([one] for one in tensors)):
        at, d = ({n: torch.stack([x[n], 1.5 * x[n]]) for n in batched} for x in (tensors, along))

        def tangent(at: dict[str, Tensor], d: dict[str, Tensor]) -> Outputs:
            return jvp(lambda part: function(tensors | part), (at,), (d,))[1]

        each = [tangent(*({n: x[i] for n, x in batch.items()} for batch in (at, d))) for i in range(2)]
        want = tuple(map(torch.stack, zip(*each, strict=True)))
        torch.testing.assert_close(tuple(vmap(tangent)(at, d)), want)
        torch.testing.assert_close(tuple(jvp(vmap(lambda part: function(tensors | part)), (at,), (d,))[1]), want)


@pytest.mark.parametrize("name", ["causal_conv1d", "fused_kda_gate"])
def test_linearized(name: str) -> None:
    """What is traced once may be split into what depends on tangents and what does not: nothing is written twice."""
    function, tensors = FUNCTIONS[name]()
    along = directions(tensors)
    values, want = jvp(function, (tensors,), (along,))
    found, linear = linearize(function, tensors)
    torch.testing.assert_close(found, values)
    torch.testing.assert_close(linear(along), want)


@pytest.mark.parametrize("name", ["chunk_kda", "causal_conv1d", "fused_kda_gate"])
def test_second_derivatives_go_forwards(name: str) -> None:
    function, tensors = FUNCTIONS[name]()
    first = next(iter(tensors))
    small = tensors[first].flatten()[:3]

    def loss(part: Tensor) -> Tensor:
        x = torch.cat([part, tensors[first].flatten()[3:]]).view_as(tensors[first])
        return torch.stack([y.square().sum() for y in function({**tensors, first: x})]).sum()

    step = 1e-5
    columns = [
        (grad(loss)(small + step * e) - grad(loss)(small - step * e)) / (2 * step) for e in torch.eye(3).double()
    ]
    torch.testing.assert_close(hessian(loss)(small), torch.stack(columns, 1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(jacfwd(loss)(small), grad(loss)(small))
    with pytest.raises(NotImplementedError, match="of gradients there are no gradients"):
        grad(lambda part: grad(loss)(part).sum())(small)


def test_a_decoding_step_of_a_layer() -> None:
    """Without gradients a step's convolutions move their states on in place; a tangent has them go the other way."""
    torch.manual_seed(0)
    module = KimiDeltaAttention(hidden_size=16, num_heads=2, head_dim=8).double().eval()
    x, along = randn(2, 1, 16), randn(2, 1, 16, seed=1)
    with torch.no_grad(), fa.dual_level():
        found = fa.unpack_dual(module(fa.make_dual(x, along))[0]).tangent
    _, want = jvp(lambda x: module(x)[0], (x,), (along,))
    torch.testing.assert_close(found, want)


def test_refused_by_name() -> None:
    x, cache, weight = randn(2, 6), randn(2, 6, 4), randn(6, 4)
    call = make(T=3, K=4, V=3)
    state = randn(1, 1, 4, 3)
    with fa.dual_level():
        with pytest.raises(ValueError, match=r"`cache`: got a call where tangents are carried \(forward-mode"):
            deltafuse.causal_conv1d_update(fa.make_dual(x, x), cache, weight=weight)
        dual = call.with_tensors(v=fa.make_dual(call.tensors["v"], call.tensors["v"]))
        slots = torch.zeros(1, dtype=torch.int64)
        for more in (
            {"out": torch.zeros(1, 3, 1, 3, dtype=torch.float64)},
            {"initial_state": state, "inplace_final_state": True},
            {"initial_state": state, "ssm_state_indices": slots},
        ):
            with pytest.raises(ValueError, match="where tangents are carried"):
                dual.run(call.recurrent, **more)
        with pytest.raises(UnsupportedError, match="intermediate states have no forward-mode derivatives"):
            dual.run(return_intermediate_states=True)
        call.run(return_intermediate_states=True)  # a level that is open is no tangent


def test_a_backward_pass_that_is_given_tangents() -> None:
    call = make(T=3, K=4, V=3).leaves()
    o, state = call.run()
    with fa.dual_level(), pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        gradients(call, (o, state), (fa.make_dual(torch.ones_like(o), torch.ones_like(o)), torch.ones_like(state)))


def test_what_a_gpu_says(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Neither this package's kernels nor fla know tangents: the call goes to torch, or is refused where one of them is asked for."""
    monkeypatch.setattr(backends, "environment", lambda *_: HOPPER)
    call = make(T=3, K=64, V=64, dtype=torch.bfloat16)
    x, weight = torch.randn(1, 3, 8), torch.randn(8, 4)
    with fa.dual_level():
        dual = call.with_tensors(v=fa.make_dual(call.tensors["v"], call.tensors["v"]))
        for _ in range(2):
            assert fa.unpack_dual(dual.run()[0]).tangent is not None
        (line,) = [r.getMessage() for r in caplog.records if r.name == "deltafuse"]
        reason = "forward-mode derivatives (tangents) are computed by plain torch alone"
        assert line == f"chunk_kda runs on backend 'torch' (cute: {reason}; fla: {reason})"
        for backend in ("cute", "fla"):
            for function in (
                lambda backend: dual.run(backend=backend),
                lambda backend: dual.run(call.recurrent, backend=backend),
                lambda backend: deltafuse.causal_conv1d(fa.make_dual(x, x), weight, backend=backend),
            ):
                with pytest.raises(UnsupportedError, match="forward-mode"):
                    function(backend)
        assert deltafuse.explain("chunk_kda", **call.tensors).chosen == "cute"
    with pytest.raises(UnsupportedError, match="forward-mode"):
        jvp(lambda x: deltafuse.causal_conv1d(x, weight, backend="cute")[0], (x,), (x,))


def test_nothing_is_asked_of_tensors_where_no_level_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa, "unpack_dual", lambda x: pytest.fail("a tensor was looked at"))
    call = make(T=3, K=4, V=3).leaves()
    gradients(call, call.run(), [torch.ones_like(x) for x in call.run()])
    assert not tangents(*call.tensors.values())


def test_compiled() -> None:
    function, tensors = FUNCTIONS["chunk_kda"]()
    along = directions(tensors)
    want = jvp(function, (tensors,), (along,))
    compiled = torch.compile(lambda at, along: jvp(function, (at,), (along,)), backend="eager")
    torch.testing.assert_close(compiled(tensors, along), want)
