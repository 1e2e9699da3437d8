"""The ops as parts of torch: opcheck, torch.compile, torch.export, autocast, checkpointing, and the same bits every time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Call, assert_near, gradients, make, seeds_of
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deltafuse
from deltafuse import chunk_kda, fused_kda_gate, fused_recurrent_kda


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def low_precision() -> Call:
    """bfloat16 inputs with a float32 gate and beta, as layers have them."""
    options: dict[str, Any] = {"T": 70, "K": 4, "V": 3, "gate": "softplus", "initial": True}
    exact = make("kda", dtype=torch.float32, **options)
    return make("kda", dtype=torch.bfloat16, **options).with_tensors(g=exact.tensors["g"], beta=exact.tensors["beta"])


# Every kind of call: forms, gates, layouts, packing, results.
CALLS: dict[str, tuple[Call, dict[str, Any]]] = {
    "kda": (
        make("kda", B=2, T=35, H=2, HV=4, K=4, V=3, gate="softplus", l2norm=True, beta="negative", initial=True),
        {},
    ),
    "kda-bounded-v-first": (
        make("kda", T=70, K=4, V=3, gate="bounded", initial=True, v_first=True),
        {"safe_gate": True},
    ),
    "kda-log": (make("kda", T=35, K=4, V=3, beta="sigmoid"), {"output_final_state": False, "chunk_size": 32}),
    "kda-packed": (make("kda", lengths=[5, 0, 66], K=4, V=3, gate="softplus"), {"disable_recompute": True}),
    "gdn": (make("gdn", B=2, T=35, HV=2, K=4, V=3, gate="softplus", initial=True), {"chunk_size": 16}),
    "kda-bfloat16": (low_precision(), {}),
    "gdn-packed": (make("gdn", lengths=[5, 0, 66], K=4, V=3, v_first=True, initial=True), {}),
}
every_call = pytest.mark.parametrize("name", CALLS)


def without_chunks(more: dict[str, Any]) -> dict[str, Any]:
    """Flags of the chunked op that the recurrent one has too."""
    return {n: x for n, x in more.items() if n not in ("safe_gate", "chunk_size", "disable_recompute")}


# --- opcheck ---------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """The package's custom ops that run below it, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "deltafuse":
            self.seen.append((func, tuple(x.clone() if isinstance(x, Tensor) else x for x in args)))
        return func(*args, **(kwargs or {}))


def check(function: Callable[[], Any], expected: set[str], differentiable: bool = True) -> None:
    """opcheck on the ops that `function` runs, with gradients of all their floating inputs where they have any."""
    with Recorder() as recorder:
        function()
    names = {op.__name__.partition(".")[0] for op, _ in recorder.seen}
    assert names == expected
    for op, args in recorder.seen:
        if differentiable and "backward" not in op.__name__:
            floats = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
            for x in floats:
                x.requires_grad_()
        found = torch.library.opcheck(op, args, raise_exception=True)
        assert set(found.values()) == {"SUCCESS"}
        assert len(found) == 4


@every_call
def test_opcheck_chunked(name: str) -> None:
    call, more = CALLS[name]

    def both() -> None:
        leaves = call.leaves()
        outputs = [x for x in leaves.run(**more) if x is not None]
        gradients(leaves, outputs, seeds_of(leaves)[: len(outputs)])

    check(both, {"chunk_delta_rule", "chunk_delta_rule_backward"})


@every_call
def test_opcheck_recurrent(name: str) -> None:
    call, more = CALLS[name]
    check(lambda: call.run(call.recurrent, **without_chunks(more)), {"recurrent_delta_rule"})


def test_opcheck_intermediate_states() -> None:
    for call in (make("kda", B=2, T=70, K=4, V=3), make("kda", lengths=[5, 0, 66], K=4, V=3, v_first=True)):
        check(lambda call=call: call.run(return_intermediate_states=True), {"chunk_delta_rule"}, differentiable=False)


def test_opcheck_gate_per_value() -> None:
    call = make("gdn", T=9, K=4, V=3)
    gv, beta = -torch.rand(1, 9, 1, 3, dtype=torch.float64), torch.rand(1, 9, 1, 3, dtype=torch.float64)
    call = call.with_tensors(beta=beta, gv=gv)
    check(lambda: call.run(call.recurrent), {"recurrent_delta_rule"}, differentiable=False)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_opcheck_serving_form(per_token: bool, inplace: bool) -> None:
    for call in (
        make("kda", B=2, T=3, HV=2, K=4, V=3, gate="softplus"),
        make("kda", lengths=[2, 1], HV=2, K=4, V=3, v_first=True),
    ):
        inner = (3, 4) if call.flags.get("state_v_first") else (4, 3)
        pool = torch.randn(7, 2, *inner, dtype=torch.float64)
        indices = torch.tensor([[6, 1, 2], [3, 4, -1]])
        more: dict[str, Any] = {"ssm_state_indices": indices if per_token else indices[:, 0]}
        if per_token:
            more["num_accepted_tokens"] = torch.tensor([2, 1])
        pooled = call.with_tensors(initial_state=pool)
        check(
            lambda c=pooled, m=more: c.run(fused_recurrent_kda, inplace_final_state=inplace, **m),
            {"recurrent_serve"},
            False,
        )


@pytest.mark.parametrize("bound", [None, -4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_gate(bound: float | None, dtype: torch.dtype) -> None:
    for shape in ((3, 4), (2, 5, 3, 4)):
        g = torch.randn(shape, dtype=dtype, requires_grad=True)
        a_log, bias = torch.randn(3), torch.randn(12) if bound is None else None

        def both(g: Tensor = g, a_log: Tensor = a_log, bias: Tensor | None = bias) -> None:
            fused_kda_gate(g, a_log, bias, bound, dtype).sum().backward()

        check(both, {"kda_gate", "kda_gate_backward"})


# --- torch.compile ---------------------------------------------------------------------------------------------------


def outcome(call: Call, function: Callable[..., Any]) -> list[Tensor]:
    """Outputs and gradients, of a function of the call's tensors."""
    leaves = call.leaves()
    outputs = [x for x in function(leaves.tensors) if x is not None]
    found = gradients(leaves, outputs, seeds_of(leaves)[: len(outputs)])
    return [*outputs, *found.values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@every_call
def test_compiled_forward_and_backward(name: str, form: str) -> None:
    call, more = CALLS[name]
    op = getattr(call, form)
    flags = {"output_final_state": True, **call.flags, **(more if form == "chunk" else without_chunks(more))}

    def function(tensors: dict[str, Tensor]) -> Any:
        return op(**tensors, **flags)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert same(outcome(call, compiled), outcome(call, function))


def test_compiled_among_other_operations() -> None:
    """Through inductor: one op's results are another's inputs, and are used again. Few others: each costs a C++ compiler."""
    call, _ = CALLS["kda"]
    flags = {"output_final_state": True, **call.flags}

    def function(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        g = fused_kda_gate(t["g"], t["A_log"], t["dt_bias"], output_dtype=torch.float64)
        o, state = chunk_kda(
            t["q"], t["k"], t["v"], g, t["beta"], initial_state=t["initial_state"], output_final_state=True
        )
        second, state = fused_recurrent_kda(**{**t, "v": o, "initial_state": state}, **flags)
        return second + o, state

    compiled = torch.compile(function, fullgraph=True, backend="inductor")
    for got, want in zip(outcome(call, compiled), outcome(call, function), strict=True):
        assert_near(got, want, 1e-12)


@pytest.mark.parametrize("bound", [None, -4.0])
def test_compiled_gate(bound: float | None) -> None:
    def function(g: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
        return fused_kda_gate(g, a_log, bias, bound, torch.bfloat16)

    inputs = [torch.randn(2, 5, 3, 4), torch.randn(3), torch.randn(12)]
    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = f(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    assert same(*results)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_serving_form(inplace: bool) -> None:
    call = make("kda", B=2, T=2, HV=2, gate="softplus")
    before = torch.randn(7, 2, 8, 6, dtype=torch.float64)
    indices, accepted = torch.tensor([[6, 1], [3, -1]]), torch.tensor([2, 1])

    def function(pool: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return fused_recurrent_kda(
            **tensors, **call.flags, initial_state=pool, ssm_state_indices=indices, num_accepted_tokens=accepted,
            inplace_final_state=inplace,
        )  # fmt: skip

    results = []
    for f in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        pool = before.clone()
        o, states = f(pool, call.tensors)
        assert (states.data_ptr() == pool.data_ptr()) == inplace
        results.append([o, states, pool])
    assert same(*results)
    assert torch.equal(results[0][2], before) != inplace


def counting() -> tuple[Any, list[int]]:
    """A backend that runs the traced graphs as they are, and how many forward and backward ones there were."""
    count = [0, 0]

    def compiler(place: int) -> Callable[..., Any]:
        def compile_graph(graph: Any, _: Any) -> Any:
            count[place] += 1
            return make_boxed_func(graph)

        return compile_graph

    return aot_autograd(fw_compiler=compiler(0), bw_compiler=compiler(1)), count


def test_one_graph_for_all_shapes() -> None:
    """dynamic=True: any batch, any length, whether states are kept for the backward pass or not."""
    backend, count = counting()
    flags = {**CALLS["kda"][0].flags, "output_final_state": True}
    compiled = torch.compile(lambda t: chunk_kda(**t, **flags), fullgraph=True, backend=backend, dynamic=True)
    for tokens, batch in ((70, 2), (71, 3), (64, 4), (1024, 2), (1025, 2), (2050, 3), (17, 7)):
        # No two sizes of the first call are the same: torch would take them for one.
        call = make(
            "kda", B=batch, T=tokens, H=3, HV=6, K=8, V=5, gate="softplus", l2norm=True, beta="negative", initial=True
        )
        assert same(outcome(call, compiled), outcome(call, lambda t: chunk_kda(**t, **flags)))
        assert count == [1, 1]


def test_one_graph_for_all_packings() -> None:
    backend, count = counting()

    def function(t: dict[str, Tensor], bounds: Tensor) -> Any:
        return chunk_kda(**t, output_final_state=True, use_gate_in_kernel=True, cu_seqlens=bounds)

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for lengths in ([70, 2, 1, 4, 6], [3, 0, 5, 9], [1100, 7], [2, 2100, 1], [4, 4, 4, 4, 4, 4]):
        call = make("kda", lengths=lengths, H=4, HV=8, K=16, V=9, gate="softplus", initial=True)
        bounds = call.flags["cu_seqlens"]
        got = outcome(call, lambda t, b=bounds: compiled(t, b))
        assert same(got, outcome(call, lambda t, b=bounds: function(t, b)))
        assert count == [1, 1]


def test_recompiles_by_default() -> None:
    """A new length makes the length dynamic, a new batch the batch; then nothing more is compiled."""
    counter = CompileCounter()
    compiled = torch.compile(lambda t: chunk_kda(**t, use_gate_in_kernel=True), fullgraph=True, backend=counter)
    seen = []
    for tokens, batch in ((70, 2), (71, 2), (64, 3), (129, 4), (1100, 2), (17, 5)):
        compiled(make("kda", B=batch, T=tokens, gate="softplus", dtype=torch.float32).leaves().tensors)
        seen.append(counter.frame_count)
    assert seen == [1, 2, 3, 3, 3, 3]


def test_scale_need_not_be_constant() -> None:
    call = make("kda", T=9)
    compiled = torch.compile(lambda t, s: chunk_kda(**t, scale=s)[0], fullgraph=True, backend="aot_eager")
    for scale in (0.25, 0.5, 0.75, 1):
        assert torch.equal(compiled(call.tensors, scale), chunk_kda(**call.tensors, scale=scale)[0])


def test_compiled_calls_report_bad_arguments() -> None:
    call = packed = make("kda", lengths=[3, 4])
    compiled = torch.compile(lambda t, b: chunk_kda(**t, cu_seqlens=b)[0], backend="aot_eager")
    with pytest.raises(ValueError, match="`cu_seqlens`: got 6 last; allowed: T = 7 last"):
        compiled(packed.tensors, torch.tensor([0, 3, 6]))
    with pytest.raises(Exception, match="`beta`: got a tensor of shape"):
        compiled({**call.tensors, "beta": torch.rand(1, 7, 2)}, call.flags["cu_seqlens"])


def test_compiled_without_gradients() -> None:
    call = make("kda", T=70, gate="softplus", initial=True).leaves()
    compiled = torch.compile(
        lambda t: chunk_kda(**t, use_gate_in_kernel=True, output_final_state=True), fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad():
        got = compiled(call.tensors)
    assert not got[0].requires_grad
    assert torch.equal(got[0], call.run()[0])
    with torch.inference_mode():
        assert torch.equal(compiled(call.tensors)[0], call.run()[0])
    assert compiled(call.tensors)[0].requires_grad


# --- torch.export ----------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    """An op with a parameter in front, so that the graph carries gradients."""

    def __init__(self, op: Callable[..., Any], flags: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.flags = op, flags
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None
    ) -> Any:
        return self.op(
            q * self.weight, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens, output_final_state=True, **self.flags
        )


def arguments(call: Call) -> tuple[Tensor, ...]:
    bounds = (call.flags["cu_seqlens"],) if "cu_seqlens" in call.flags else ()
    return (*(call.tensors[n] for n in ("q", "k", "v", "g", "beta")), *bounds)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_export_for_any_length(family: str, form: str, strict: bool) -> None:
    example = make(family, B=2, T=70)
    module = Module(getattr(example, form), {})
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(module, arguments(example), dynamic_shapes=[{1: tokens}] * 5, strict=strict)
    exported = program.module()
    for length in (70, 2, 64, 1030, 2100):
        call = make(family, B=2, T=length)
        results = []
        for m in (exported, module):
            outputs = m(*arguments(call))
            (dweight,) = torch.autograd.grad(outputs, list(m.parameters()), list(seeds_of(call)))
            results.append([*outputs, dweight])
        assert same(*results)


@pytest.mark.parametrize("strict", [False, True])
def test_export_packed(strict: bool) -> None:
    example = make("kda", lengths=[20, 0, 50])
    module = Module(chunk_kda, {})
    tokens, bounds = torch.export.Dim("tokens", min=2), torch.export.Dim("bounds", min=3)
    shapes = [*[{1: tokens}] * 5, {0: bounds}]
    program = torch.export.export(module, arguments(example), dynamic_shapes=shapes, strict=strict)
    for lengths in ([20, 0, 50], [3, 4], [1100, 2, 1, 5, 0]):
        call = make("kda", lengths=lengths)
        assert same(list(program.module()(*arguments(call))), list(module(*arguments(call))))


@pytest.mark.parametrize("strict", [False, True])
def test_export_intermediate_states(strict: bool) -> None:
    """The number of chunks of packed sequences depends on their lengths."""
    example = make("kda", lengths=[20, 0, 150])
    module = Module(chunk_kda, {"return_intermediate_states": True})
    with torch.no_grad():
        program = torch.export.export(module, arguments(example), strict=strict)
        for lengths in ([20, 0, 150], [1, 1, 168], [0, 0, 170]):
            call = make("kda", lengths=lengths)
            assert same(list(program.module()(*arguments(call))), list(module(*arguments(call))))


# --- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_autocast_leaves_the_arithmetic_alone(family: str, dtype: torch.dtype) -> None:
    """Products inside would become low precision; the result is bitwise that of the same call outside."""
    call = make(family, T=150, HV=2, gate="softplus", initial=True, dtype=torch.float32)
    for op in (call.chunk, call.recurrent):
        leaves = call.leaves()
        want_outputs = leaves.run(op)
        want = gradients(leaves, want_outputs, seeds_of(call))
        with torch.autocast("cpu", dtype):
            outputs = leaves.run(op)
            found = gradients(leaves, outputs, seeds_of(call))
        assert outputs[0].dtype == torch.float32
        assert same(list(outputs), list(want_outputs))
        assert all(torch.equal(found[n], want[n]) for n in want)
    g = call.tensors["g"]
    if family == "kda":
        with torch.autocast("cpu", dtype):
            cast = fused_kda_gate(g, call.tensors["A_log"])
        assert torch.equal(cast, fused_kda_gate(g, call.tensors["A_log"]))


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_mixes_dtypes(compiled: bool) -> None:
    """Layers under autocast hand over float32 q and k and bfloat16 v; all three are taken in autocast's dtype."""
    call = make("kda", T=70, dtype=torch.float32, gate="softplus", initial=True)
    mixed = call.with_tensors(v=call.tensors["v"].bfloat16(), beta=call.tensors["beta"].bfloat16())
    op = torch.compile(chunk_kda, fullgraph=True, backend="aot_eager") if compiled else chunk_kda
    with torch.autocast("cpu", torch.bfloat16):
        o, state = mixed.run(op)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    low = mixed.with_tensors(q=call.tensors["q"].bfloat16(), k=call.tensors["k"].bfloat16())
    assert same([o, state], list(low.run()))
    with pytest.raises(ValueError, match=r"`v`: got .*bfloat16.*; allowed: dtype float32"):
        mixed.run()


def test_autocast_gradients_have_the_dtypes_of_the_inputs() -> None:
    call = make("kda", T=70, dtype=torch.float32, gate="softplus")
    mixed = call.with_tensors(v=call.tensors["v"].bfloat16()).leaves()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = mixed.run()
    found = gradients(mixed, outputs, seeds_of(call))
    assert {n: x.dtype for n, x in found.items()} == {n: x.dtype for n, x in mixed.tensors.items()}
    want = call.leaves()
    exact = gradients(want, want.run(), seeds_of(call))
    for name, grad in found.items():
        assert_near(grad, exact[name], 0.02, name)


# --- autograd --------------------------------------------------------------------------------------------------------


def subsets(names: list[str]) -> list[list[str]]:
    return [*[[n] for n in names], *[[m for m in names if m != n] for n in names], names]


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_gradients_of_any_subset(family: str, form: str) -> None:
    call = make(family, T=40, HV=2, gate="softplus", l2norm=True, beta="sigmoid", initial=True)
    whole = call.leaves()
    want = gradients(whole, whole.run(getattr(call, form)), seeds_of(call))
    for names in subsets(list(call.tensors)):
        part = call.leaves(names)
        found = gradients(part, part.run(getattr(call, form)), seeds_of(call))
        assert set(found) == set(names)
        assert all(torch.equal(found[n], want[n]) for n in names)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_no_gradient_wanted(form: str) -> None:
    call = make("kda", T=40, gate="softplus", initial=True)
    o, state = call.run(getattr(call, form))
    assert not o.requires_grad
    assert not state.requires_grad
    leaves = call.leaves()
    with torch.no_grad():
        o, state = leaves.run(getattr(call, form))
    assert not o.requires_grad
    with torch.inference_mode():
        assert torch.equal(leaves.run(getattr(call, form))[0], o)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_backward_twice_and_inputs_used_twice(form: str) -> None:
    call = make("kda", T=70, gate="softplus", initial=True).leaves()
    op = getattr(call, form)
    seeds = seeds_of(call)
    once = gradients(call, call.run(op), seeds)
    outputs = list(call.run(op))
    for _ in range(2):
        again = torch.autograd.grad(outputs, list(call.tensors.values()), list(seeds), retain_graph=True)
        assert same(list(again), list(once.values()))
    first, second = call.run(op), call.run(op)
    both = torch.autograd.grad([*first, *second], list(call.tensors.values()), [*seeds, *seeds])
    for grad, single in zip(both, once.values(), strict=True):
        assert torch.equal(grad, 2 * single)


def test_gradients_accumulate_in_leaves() -> None:
    call = make("kda", T=40).leaves()
    for _ in range(2):
        call.run()[0].sum().backward()
    twice = {n: x.grad.clone() for n, x in call.tensors.items()}
    fresh = call.leaves()
    fresh.run()[0].sum().backward()
    assert all(torch.equal(twice[n], 2 * x.grad) for n, x in fresh.tensors.items())


@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_incoming_gradients_of_any_strides(family: str) -> None:
    call = make(family, T=70, B=2, HV=2, gate="softplus", initial=True).leaves()
    do, ds = seeds_of(call)
    kinds = {
        "transposed": (
            do.transpose(1, 2).contiguous().transpose(1, 2),
            ds.transpose(2, 3).contiguous().transpose(2, 3),
        ),
        "every other": (torch.stack([do, -do], -1)[..., 0], torch.stack([ds, -ds], -1)[..., 0]),
        "expanded": (do[:, :1].expand_as(do), ds[:1].expand_as(ds)),
        "one number": (
            torch.tensor(2.0, dtype=torch.float64).expand_as(do),
            torch.tensor(-1.0, dtype=torch.float64).expand_as(ds),
        ),
    }
    for op in (call.chunk, call.recurrent):
        for kind, seeds in kinds.items():
            assert not any(s.is_contiguous() for s in seeds), kind
            found = gradients(call, call.run(op), seeds)
            want = gradients(call, call.run(op), tuple(s.clone(memory_format=torch.contiguous_format) for s in seeds))
            assert all(torch.equal(found[n], want[n]) for n in want), kind


def test_anomaly_mode_sees_nothing_wrong() -> None:
    call = make("kda", T=9, gate="softplus", initial=True).leaves()
    with torch.autograd.detect_anomaly():
        found = gradients(call, call.run(output_final_state=True), seeds_of(call))
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    call = make("kda", T=150, HV=2, gate="softplus", initial=True).leaves()
    names = list(call.tensors)

    def block(*tensors: Tensor) -> Any:
        o, state = chunk_kda(**dict(zip(names, tensors, strict=True)), use_gate_in_kernel=True, output_final_state=True)
        return o.tanh(), state

    seeds = seeds_of(call)
    results = []
    for run in (block, lambda *t: checkpoint(block, *t, use_reentrant=reentrant)):
        for x in call.tensors.values():
            x.grad = None
        outputs = run(*call.tensors.values())
        torch.autograd.backward(list(outputs), [s.clone() for s in seeds])
        results.append([*outputs, *(x.grad.clone() for x in call.tensors.values())])
    assert same(*results)


def test_compiled_checkpointing() -> None:
    call, _ = CALLS["kda"]
    flags = {**call.flags, "output_final_state": True}

    def block(tensors: dict[str, Tensor]) -> Any:
        return checkpoint(lambda t: chunk_kda(**t, **flags), tensors, use_reentrant=False)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert same(outcome(call, compiled), outcome(call, lambda t: chunk_kda(**t, **flags)))


def test_functional_calls() -> None:
    """A module's parameters may be other tensors for one call."""
    call = make("kda", B=2, T=40)
    module = Module(chunk_kda, {})
    other = {"weight": (module.weight.detach() * 2).requires_grad_()}
    o, _ = torch.func.functional_call(module, other, arguments(call))
    (found,) = torch.autograd.grad(o.sum(), other["weight"])
    doubled = Module(chunk_kda, {})
    with torch.no_grad():
        doubled.weight.mul_(2)
    want, _ = doubled(*arguments(call))
    assert torch.equal(o, want)
    assert torch.equal(found, torch.autograd.grad(want.sum(), doubled.weight)[0])


def test_hooks_on_saved_tensors() -> None:
    """Offloading: what the forward pass saves goes elsewhere and comes back."""
    call = make("kda", T=1100, K=4, V=3, gate="softplus").leaves()
    want = gradients(call, call.run(), seeds_of(call))
    packed = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.shape)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = call.run()
    assert packed
    found = gradients(call, outputs, seeds_of(call))
    assert all(torch.equal(found[n], want[n]) for n in want)


def test_changed_inputs_are_noticed() -> None:
    """An input that is written between the forward and the backward pass is an error, not a wrong gradient."""
    call = make("kda", T=40).leaves(["q"])
    o, _ = call.run()
    call.tensors["v"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_nothing_keeps_the_graph_alive() -> None:
    call = make("kda", T=40).leaves()
    o, state = call.run()
    gone = weakref.ref(o.grad_fn)
    o.sum().backward()
    del o, state
    gc.collect()
    assert gone() is None


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_deterministic(family: str, dtype: torch.dtype) -> None:
    for lengths in (None, [300, 0, 17, 1100]):
        call = make(
            family, B=2, T=300, H=2, HV=4, K=32, V=32, gate="softplus", initial=True, dtype=dtype, lengths=lengths
        )
        runs = [outcome(call, lambda t, c=call: c.with_tensors(**t).run()) for _ in range(5)]
        assert all(same(run, runs[0]) for run in runs[1:])
        if lengths is None:
            runs = [list(call.run(call.recurrent)) for _ in range(5)]
            assert all(same(run, runs[0]) for run in runs[1:])


def test_deterministic_algorithms_are_used() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        call = make("kda", lengths=[30, 0, 41], gate="softplus", initial=True)
        got = outcome(call, lambda t: call.with_tensors(**t).run())
        pool = torch.randn(7, 1, 8, 6, dtype=torch.float64)
        more = {"ssm_state_indices": torch.tensor([3, 1, -1]), "inplace_final_state": True}
        call.with_tensors(initial_state=pool).run(fused_recurrent_kda, **more)
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(got, outcome(call, lambda t: call.with_tensors(**t).run()))


def test_every_custom_op_was_checked() -> None:
    """A new custom op of these files needs its own opcheck."""
    import deltafuse.autograd.delta_rule as rule
    import deltafuse.autograd.gate as gate

    custom = torch._library.custom_ops.CustomOpDef
    names = {x._name for module in (rule, gate) for x in vars(module).values() if isinstance(x, custom)}
    assert names == {
        "chunk_delta_rule", "chunk_delta_rule_backward", "recurrent_delta_rule", "recurrent_serve", "kda_gate", "kda_gate_backward",
    }  # fmt: skip
    assert deltafuse.OPS
