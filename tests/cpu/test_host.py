"""Calls on this package's own kernels, without a GPU: what launch functions are handed, the first time and when a call is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deltafuse
from deltafuse import problem
from deltafuse.autograd import common, decode_cute
from deltafuse.autograd.kernels import kernels_of
from deltafuse.kda import kda_layer_token
from deltafuse.runtime import cache, probe

HOPPER = probe.Environment("cuda", (9, 0), "a Hopper", dsl="4.8.1", sms=132)
BF16 = torch.bfloat16
Launch = tuple[str, Any, tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What is launched on a CPU that passes for a Hopper, with the arguments; tensors are left as they are."""
    found: list[Launch] = []

    def find(key: cache.Key) -> cache.Function:
        return lambda *args: found.append((key[0], key[1], args))

    monkeypatch.setattr(probe, "_environment", lambda *_: HOPPER)
    monkeypatch.setattr(cache, "_find", find)
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setattr(problem, "_checked", {})
    monkeypatch.setattr(decode_cute, "_plans", {})
    return found


def at(start: int, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Contiguous random numbers that start `start` elements after a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    return torch.randn(size + 64).to(dtype)[start : start + size].view(shape)


def chunked(start: int = 0, **changed: Any) -> dict[str, Any]:
    given = {name: at(start, 1, 70, 2, 64) for name in "qkvg"} | {"beta": at(0, 1, 70, 2)}
    given |= {"A_log": torch.rand(2), "dt_bias": torch.rand(128)}
    return given | {"use_gate_in_kernel": True, "backend": "cute"} | changed


def token(start: int = 0, **changed: Any) -> dict[str, Any]:
    given = {name: at(start, 2, 1, 2, 64) for name in "qkvg"} | {"beta": at(0, 2, 1, 2)}
    return given | {"initial_state": at(0, 2, 2, 64, 64, dtype=torch.float32), "backend": "cute"} | changed


def sequences(start: int = 0, **changed: Any) -> dict[str, Any]:
    return {"x": at(start, 2, 9, 48), "weight": at(0, 48, 4), "backend": "cute"} | changed


def step(start: int = 0, **changed: Any) -> dict[str, Any]:
    return {"x": at(start, 3, 48), "cache": at(0, 3, 48, 4), "weight": at(0, 48, 4), "backend": "cute"} | changed


OPS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]], Sequence[str]]] = {
    "chunk_kda": (deltafuse.chunk_kda, chunked, "qkvg"),
    "fused_recurrent_kda": (deltafuse.fused_recurrent_kda, token, "qkvg"),
    "causal_conv1d": (deltafuse.causal_conv1d, sequences, ("x", "weight")),
    "causal_conv1d_update": (deltafuse.causal_conv1d_update, step, ("x", "weight")),
}
every_op = pytest.mark.parametrize("name", OPS)


def described(launches: list[Launch]) -> list[Any]:
    """Launches without addresses and values."""
    form = [[(x.dtype, x.shape) if isinstance(x, Tensor) else x for x in args] for *_, args in launches]
    return [(kernel, config, args) for (kernel, config, _), args in zip(launches, form, strict=True)]


def handed(launches: list[Launch]) -> list[Tensor]:
    return [x for *_, args in launches for x in args if isinstance(x, Tensor)]


@every_op
def test_a_remembered_call_launches_the_same_on_its_own_tensors(name: str, launches: list[Launch]) -> None:
    op, inputs, read = OPS[name]
    with torch.no_grad():
        op(**inputs())
        first = described(launches)
        for _ in range(2):
            launches.clear()
            given = inputs()
            op(**given)
            assert described(launches) == first
            assert all(any(given[x] is y for y in handed(launches)) for x in read)


@pytest.mark.parametrize(("name", "read"), [("chunk_kda", "qkvg"), ("fused_recurrent_kda", "qkg")])
def test_kernels_get_aligned_tensors_wherever_a_remembered_call_s_start(
    name: str, read: str, launches: list[Launch]
) -> None:
    """Also after a call whose tensors were handed over as they are, and the other way round."""
    op, inputs, _ = OPS[name]
    with torch.no_grad():
        for start, aligned in ((8, True), (3, False), (0, True), (3, False), (8, True)):
            launches.clear()
            given = inputs(start)
            op(**given)
            places = {x.data_ptr() for x in handed(launches)}
            for x in read:
                assert (given[x].data_ptr() in places) == aligned
                assert any(y.shape == given[x].shape and y.data_ptr() % 16 == 0 for y in handed(launches))


def test_rows_of_a_convolution_start_anywhere(launches: list[Launch]) -> None:
    with torch.no_grad():
        for start, vector in ((0, 8), (1, 1), (4, 4), (2, 2), (0, 8)):
            given = sequences(start)
            deltafuse.causal_conv1d(**given)
            assert launches[-1][1].vector == vector
            assert launches[-1][2][0] is given["x"]


@every_op
def test_a_bad_call_is_refused_after_a_good_one(name: str, launches: list[Launch]) -> None:
    op, inputs, read = OPS[name]
    with torch.no_grad():
        op(**inputs())
        for x in read:
            right = inputs()[x]
            shape = right[:0] if x in ("v", "weight") else right[..., :3]  # V and W may be 3
            for wrong in (shape, right.to("meta"), right.int(), None):
                with pytest.raises(ValueError, match="`"):
                    op(**inputs(**{x: wrong}))


def test_in_place_calls_of_one_form_need_memory_for_every_element(launches: list[Launch]) -> None:
    with torch.no_grad():
        deltafuse.causal_conv1d_update(**step())
        with pytest.raises(ValueError, match="`cache`"):
            deltafuse.causal_conv1d_update(**step(cache=at(0, 1, 48, 4).expand(3, 48, 4)))
        deltafuse.fused_recurrent_kda(**token(inplace_final_state=True))
        one = at(0, 1, 2, 64, 64, dtype=torch.float32).expand(2, 2, 64, 64)
        with pytest.raises(ValueError, match="`initial_state`"):
            deltafuse.fused_recurrent_kda(**token(inplace_final_state=True, initial_state=one))
    with pytest.raises(ValueError, match="`cache`"):
        deltafuse.causal_conv1d_update(**step(weight=at(0, 48, 4).requires_grad_()))


class Watched(TorchDispatchMode):
    """A mode that changes nothing: calls under it go through the dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["chunk_kda", "causal_conv1d"])
def test_gradients_take_the_same_launches_with_and_without_the_dispatcher(name: str, launches: list[Launch]) -> None:
    op, inputs, _ = OPS[name]
    found = []
    for watched in (False, True):
        launches.clear()
        given = {n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in inputs().items()}
        leaves = [x for x in given.values() if isinstance(x, Tensor)]
        if watched:
            with Watched():
                y, state = op(**given, output_final_state=True)
                grads = torch.autograd.grad([y, state], leaves, [torch.ones_like(y), torch.ones_like(state)])
        else:
            y, state = op(**given, output_final_state=True)
            grads = torch.autograd.grad([y, state], leaves, [torch.ones_like(y), torch.ones_like(state)])
        found.append((described(launches), [(x.shape, x.dtype) for x in (y, state, *grads)]))
        assert [x.shape for x in grads] == [x.shape for x in leaves]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["chunk_kda", "causal_conv1d"])
def test_gradients_of_torch_func_take_the_same_launches(name: str, launches: list[Launch]) -> None:
    op, inputs, read = OPS[name]
    given = inputs()
    leaf = given[read[0]].clone().requires_grad_()
    y, _ = op(**given | {read[0]: leaf})
    y.backward(torch.ones_like(y))
    want = described(launches)
    launches.clear()
    y, pull = torch.func.vjp(lambda x: op(**given | {read[0]: x})[0], given[read[0]])
    (grad,) = pull(torch.ones_like(y))
    assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
    assert described(launches) == want


@pytest.mark.parametrize("name", ["chunk_kda", "causal_conv1d"])
def test_there_are_no_gradients_of_gradients(name: str, launches: list[Launch]) -> None:
    op, inputs, read = OPS[name]
    given = inputs()
    leaf = given[read[0]].requires_grad_()
    y, _ = op(**given)
    (grad,) = torch.autograd.grad(y.float().square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        grad.sum().backward()


def test_autograd_sees_what_is_written_in_place(launches: list[Launch]) -> None:
    given, served = step(), token(inplace_final_state=True, out=at(0, 2, 1, 2, 64))
    before = [x._version for x in (given["cache"], served["initial_state"], served["out"])]
    with torch.no_grad():
        deltafuse.causal_conv1d_update(**given)
        deltafuse.fused_recurrent_kda(**served)
    after = [x._version for x in (given["cache"], served["initial_state"], served["out"])]
    assert all(a > b for a, b in zip(after, before, strict=True))
    with torch.inference_mode():  # which counts nothing
        deltafuse.causal_conv1d_update(**step())


def test_a_layer_s_token_looks_at_addresses_every_time(launches: list[Launch]) -> None:
    def call(start: int) -> object:
        given: dict[str, Any] = {name: at(0, 2, 1, 2, 64) for name in "qkvgz"} | {"beta": at(0, 2, 1, 2)}
        state = at(0, 2, 2, 64, 64, dtype=torch.float32)
        return kda_layer_token(
            **given, caches=[at(start, 2, 128, 4) for _ in range(3)], weights=[at(0, 128, 4)] * 3, biases=None, norm=None, eps=1e-5,
            A_log=torch.rand(2), dt_bias=torch.rand(128), initial_state=state,
        )  # fmt: skip

    with torch.no_grad():
        for start, taken in ((1, False), (0, True), (1, False), (4, True)):
            launches.clear()
            assert (call(start) is not None) == taken
            assert len(launches) == taken


@every_op
def test_new_memory_is_filled_where_results_are_deterministic(name: str, launches: list[Launch]) -> None:
    """As torch fills its own; also of a form of call that is remembered from before."""
    op, inputs, _ = OPS[name]
    with torch.no_grad():
        op(**inputs())
        torch.use_deterministic_algorithms(True)
        try:
            assert op(**inputs())[0].isnan().all()
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_a_remembered_call(launches: list[Launch], keep: bool) -> None:
    found = []
    for _ in range(3):
        launches.clear()
        given = {n: x.requires_grad_() if isinstance(x, Tensor) else x for n, x in chunked().items()}
        y, state = deltafuse.chunk_kda(**given, output_final_state=True, disable_recompute=keep)
        assert not y.is_inference()
        grads = torch.autograd.grad(
            [y, state], [given[x] for x in "qkvg"], [torch.ones_like(y), torch.ones_like(state)]
        )
        assert [x.shape for x in grads] == [given[x].shape for x in "qkvg"]
        assert given["q"].data_ptr() in pointers(launches)
        found.append(described(launches))
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4)])
@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_made_is_contiguous_memory_of_its_own(
    shape: tuple[int, ...], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    make = common.maker(shape, torch.float16, torch.device("cpu"))
    one, other = make(), make()
    like = torch.empty(shape, dtype=torch.float16)
    assert (one.shape, one.stride(), one.dtype, one.device) == (like.shape, like.stride(), like.dtype, like.device)
    assert not one.numel() or one.data_ptr() != other.data_ptr()
    with torch.inference_mode():
        assert make().is_inference()
    assert common.maker(shape, torch.int32, torch.device("meta"))().shape == shape


def test_threads_share_what_is_remembered(launches: list[Launch]) -> None:
    def call(size: int) -> torch.Size:
        with torch.inference_mode():
            given = {name: torch.zeros(1, size, 2, 64, dtype=BF16) for name in "qkvg"}
            return deltafuse.chunk_kda(**given, beta=torch.zeros(1, size, 2, dtype=BF16), backend="cute")[0].shape

    sizes = [70 + i % 5 for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert [shape[1] for shape in pool.map(call, sizes)] == sizes


def pointers(found: list[Launch]) -> list[int]:
    return [x.data_ptr() for _, _, args in found for x in args if isinstance(x, Tensor) and x.numel()]


@pytest.mark.parametrize("gradients", [False, True])
def test_tensors_that_wrap_others_are_unwrapped(launches: list[Launch], gradients: bool) -> None:
    """Kernels get what a subclass wraps, each part in a call of its own, as the dispatcher has it."""
    given = {n: TwoTensor(x, x.clone()) if isinstance(x, Tensor) else x for n, x in chunked().items()}
    for x in given.values():
        if isinstance(x, Tensor) and gradients:
            x.requires_grad_()
    o, _ = deltafuse.chunk_kda(**given)
    assert type(o) is TwoTensor
    assert len(launches) == 4
    assert 0 not in pointers(launches)
    launches.clear()
    given = {n: TwoTensor(x, x.clone()) if isinstance(x, Tensor) else x for n, x in sequences().items()}
    y, _ = deltafuse.causal_conv1d(**given)
    assert type(y) is TwoTensor
    assert 0 not in pointers(launches)


@pytest.mark.parametrize("gradients", [False, True])
def test_negations_that_are_put_off(launches: list[Launch], gradients: bool) -> None:
    beta = torch.complex(torch.zeros(1, 70, 2), torch.rand(1, 70, 2)).conj().imag
    assert beta.is_neg()
    given = chunked(beta=beta)
    given["q"].requires_grad_(gradients)
    deltafuse.chunk_kda(**given)
    assert launches
    for _, _, args in launches:
        assert not any(isinstance(x, Tensor) and x.is_neg() for x in args)


def test_bounds_that_change_in_inference_mode_are_looked_at_again(launches: list[Launch]) -> None:
    """Their tensors do not count what is written to them."""
    with torch.inference_mode():
        bounds = torch.tensor([0, 30, 70])
        deltafuse.chunk_kda(**chunked(cu_seqlens=bounds))
        bounds[2] = 400
        with pytest.raises(ValueError, match="cu_seqlens"):
            deltafuse.chunk_kda(**chunked(cu_seqlens=bounds))


def leaves(tokens: int) -> dict[str, Any]:
    given = {name: at(0, 1, tokens, 2, 64) for name in "qkvg"} | {"beta": at(0, 1, tokens, 2)}
    return {n: x.requires_grad_() for n, x in given.items()} | {"disable_recompute": True, "backend": "cute"}


@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_kept_is_traced_for_any_length(launches: list[Launch], dynamic: bool | None) -> None:
    compiled = torch.compile(
        lambda **x: deltafuse.chunk_kda(**x)[0], fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for tokens in (70, 71, 200):
        given = leaves(tokens)
        compiled(**given).sum().backward()
        assert given["q"].grad.shape == given["q"].shape


def test_what_is_kept_is_the_same_in_a_mode_and_outside(launches: list[Launch]) -> None:
    """A checkpoint's second forward pass may run where the first one's mode is gone."""
    given = leaves(70)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Mode():
        o = checkpoint(lambda: deltafuse.chunk_kda(**given)[0], use_reentrant=False)
    o.sum().backward()
    assert given["q"].grad is not None


def test_only_what_runs_is_warmed_up(launches: list[Launch]) -> None:
    given = leaves(64 * 40)
    listed, _ = deltafuse.backends.problem_of("chunk_kda", **given)
    kernels = list(kernels_of(listed, HOPPER))
    o, _ = deltafuse.chunk_kda(**given)
    o.sum().backward()
    assert {(name, config) for name, config, _ in launches} <= set(kernels)
    given["disable_recompute"] = False
    again, _ = deltafuse.backends.problem_of("chunk_kda", **given)
    assert len(kernels) < len(list(kernels_of(again, HOPPER)))
