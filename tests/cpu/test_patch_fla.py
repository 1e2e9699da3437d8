"""`patch_fla` against a stand-in for flash-linear-attention's registry of backends."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import unwrap
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

import deltafuse
from deltafuse import patch_fla, unpatch_fla
from deltafuse.runtime.probe import packages

# --- the stand-in: what fla 0.6 documents of `fla.backends`, and the entry points that it dispatches ------------------


class BaseBackend:
    backend_type: ClassVar[str] = "base"
    env_var: str | None = None
    priority: ClassVar[int] = 5

    def is_available(self) -> bool:
        return True

    def is_enabled(self) -> bool:
        return self.env_var is None or os.environ.get(self.env_var, "1") != "0"

    def verify(self, name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        verifier = getattr(self, f"{name}_verifier", None)
        return verifier(*args, **kwargs) if verifier else (True, None)


class Registry:
    def __init__(self) -> None:
        self.backends: dict[str, BaseBackend] = {}

    def dispatch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for backend in sorted(self.backends.values(), key=lambda b: b.priority):
                if not backend.is_available() or not backend.is_enabled():
                    continue
                accepted, reason = backend.verify(name, *args, **kwargs)
                if not accepted:
                    REASONS.append(str(reason))
                elif hasattr(backend, name):
                    return getattr(backend, name)(*args, **kwargs)
            return function(*args, **kwargs)

        return torch.compiler.disable(wrapper)


REASONS: list[str] = []
FLA = "fla ran"


class Rival(BaseBackend):
    """One of fla's own backends, which takes whatever reaches it."""

    backend_type = "rival"
    priority = 0

    def chunk_kda(self, *args: Any, **kwargs: Any) -> str:
        return "rival ran"


class Fla:
    """The modules of a stand-in fla, with their registries."""

    def __init__(self) -> None:
        self.by_name: dict[str, Registry] = {}
        self.by_function: dict[Callable[..., Any], Registry] = {}
        self.modules = {
            name: ModuleType(name)
            for name in ("fla", "fla.backends", "fla.ops", "fla.ops.kda", "fla.modules", "fla.modules.causal_conv1d")
        }
        for name, module in self.modules.items():
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        backends = self.modules["fla.backends"]
        backends.BaseBackend = BaseBackend  # type: ignore[attr-defined]
        backends.register = self.register  # type: ignore[attr-defined]
        self.chunk_kda = self.entry("chunk_kda", None, "fla.ops.kda")
        self.fused_recurrent_kda_fwd = self.entry("fused_recurrent_kda_fwd", "kda")
        self.fused_kda_gate = self.entry("fused_kda_gate", "kda")
        self.kda_gate_fwd = self.entry("kda_gate_fwd", "kda")
        self.chunk_gated_delta_rule = self.entry("chunk_gated_delta_rule", "gated_delta_rule")
        self.causal_conv1d_fwd = self.entry("causal_conv1d_fwd", None, "fla.modules.causal_conv1d")
        self.causal_conv1d_bwd = self.entry("causal_conv1d_bwd", None, "fla.modules.causal_conv1d")
        self.causal_conv1d_update = self.entry("causal_conv1d_update", None, "fla.modules.causal_conv1d")

    def entry(self, name: str, operation: str | None, module: str | None = None) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> str:
            return FLA

        function.__name__ = name
        if operation is None:
            registry = self.by_function[function] = Registry()
        else:
            registry = self.by_name.setdefault(operation, Registry())
        dispatched = registry.dispatch(function)
        if module is not None:
            setattr(self.modules[module], name, dispatched)
        return dispatched

    def register(self, entry_point: Callable[..., Any] | str) -> Callable[[type], type]:
        def decorator(cls: type) -> type:
            named = isinstance(entry_point, str)
            registry = self.by_name[entry_point] if named else self.by_function[unwrap(entry_point)]  # type: ignore
            registry.backends[cls.backend_type] = cls()  # type: ignore[attr-defined]
            return cls

        return decorator


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fla]:
    torch.manual_seed(0)
    REASONS.clear()
    packages()  # what is installed is looked up once: before the stand-in is there
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH", raising=False)
    monkeypatch.delenv("FLA_DELTAFUSE", raising=False)
    monkeypatch.delenv("DELTAFUSE_BACKEND", raising=False)
    stand_in = Fla()
    for name, module in stand_in.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield stand_in
    unpatch_fla()


# --- calls -----------------------------------------------------------------------------------------------------------


def kda_inputs(device: str = "cpu", batch: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(batch, length, *shape, device=device)

    q, k, v = randn(2, 8), randn(2, 8), randn(4, 6)
    return {"q": q, "k": k, "v": v, "g": -randn(4, 8).exp(), "beta": randn(4).sigmoid()}


def same(got: Any, want: Any) -> bool:
    if isinstance(want, tuple):
        return len(got) == len(want) and all(same(a, b) for a, b in zip(got, want, strict=True))
    return got is None if want is None else torch.equal(got, want)


def test_chunk_kda_runs_ours_until_unpatched(fla: Fla) -> None:
    x = kda_inputs()
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "state_v_first": True}
    want = deltafuse.chunk_kda(**x, **options)
    assert fla.chunk_kda(**x, **options) == FLA
    patch_fla()
    assert same(fla.chunk_kda(**x, **options), want)
    assert same(fla.chunk_kda(*x.values(), 0.5), deltafuse.chunk_kda(*x.values(), 0.5)), "positional, too"
    patch_fla()
    assert same(fla.chunk_kda(**x, **options), want)
    unpatch_fla()
    unpatch_fla()
    assert fla.chunk_kda(**x, **options) == FLA
    patch_fla("torch")
    assert same(fla.chunk_kda(**x, **options), want)
    registries = [*fla.by_function.values(), *fla.by_name.values()]
    assert [len(r.backends) for r in registries] == [1] * len(registries), "registered once"


def test_gradients_go_through_ours(fla: Fla) -> None:
    x = {name: t.requires_grad_() for name, t in kda_inputs().items()}
    patch_fla()
    (o, _), (want, _) = fla.chunk_kda(**x), deltafuse.chunk_kda(**x)
    got = torch.autograd.grad(o.square().sum(), list(x.values()))
    assert same(got, torch.autograd.grad(want.square().sum(), list(x.values())))


def test_ours_is_asked_before_those_of_fla(fla: Fla) -> None:
    fla.register(fla.chunk_kda)(Rival)
    x = kda_inputs()
    patch_fla()
    assert same(fla.chunk_kda(**x), deltafuse.chunk_kda(**x))
    unpatch_fla()
    assert fla.chunk_kda(**x) == "rival ran"


def test_recurrent_kda_below_its_public_name(fla: Fla) -> None:
    x = kda_inputs()
    x["g"] = x["g"] * 3
    options: dict[str, Any] = {
        "A_log": torch.rand(4),
        "dt_bias": torch.rand(32),
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }
    state = torch.randn(2, 4, 8, 6)
    kept = state.clone()
    want = deltafuse.fused_recurrent_kda(**x, **options, initial_state=state)
    assert fla.fused_recurrent_kda_fwd(**x, initial_state=state, inplace_final_state=False) == FLA
    patch_fla()
    got = fla.fused_recurrent_kda_fwd(**x, **options, initial_state=state, inplace_final_state=False)
    assert same(got, want)
    assert torch.equal(state, kept)
    # fla's order: the state before the scale; and by default the state is written in place.
    options.pop("output_final_state")
    o, final = fla.fused_recurrent_kda_fwd(*x.values(), options.pop("A_log"), options.pop("dt_bias"), state, **options)
    assert final is state
    assert same((o, final), want)


def test_serving_form(fla: Fla) -> None:
    x = kda_inputs(batch=1, length=3)
    pool = torch.randn(5, 4, 8, 6)
    options = {
        "inplace_final_state": True,
        "cu_seqlens": torch.arange(4),
        "ssm_state_indices": torch.tensor([4, -1, 0], dtype=torch.int32),
    }
    ours = pool.clone()
    want, _ = deltafuse.fused_recurrent_kda(**x, initial_state=ours, **options)
    patch_fla()
    o, final = fla.fused_recurrent_kda_fwd(**x, initial_state=pool, **options)
    assert final is pool
    assert same((o, pool), (want, ours))


def test_gate(fla: Fla) -> None:
    raw, a_log, bias = torch.randn(2, 5, 3, 8), torch.randn(3), torch.randn(24)
    patch_fla()
    assert same(fla.fused_kda_gate(raw, a_log, bias), deltafuse.fused_kda_gate(raw, a_log, bias))
    assert fla.kda_gate_fwd(raw, a_log, bias) == FLA, "what we do not have stays fla's"


def test_gated_delta_rule(fla: Fla) -> None:
    x = kda_inputs()
    x["g"] = x["g"][..., 0]
    more = {"A_log": torch.rand(4), "dt_bias": torch.rand(4), "use_gate_in_kernel": True}
    patch_fla()
    assert same(fla.chunk_gated_delta_rule(**x, **more), deltafuse.chunk_gated_delta_rule(**x, **more))


def test_convolution_forward_and_step(fla: Fla) -> None:
    x, weight, bias, residual = torch.randn(2, 9, 6), torch.randn(6, 4), torch.randn(6), torch.randn(2, 9, 6)
    state = torch.randn(2, 6, 4)
    want = deltafuse.causal_conv1d(x, weight, bias, residual, state, True, "silu")
    patch_fla()
    # What fla hands down besides, about its own tiles, is none of our concern.
    tiles = {"chunk_size": 32, "layout_fallback": False, "chunk_indices": torch.zeros(1, 2, dtype=torch.int64)}
    assert same(fla.causal_conv1d_fwd(x, weight, bias, residual, state, True, "silu", **tiles), want)
    cache, other = state.clone(), state.clone()
    y, same_cache = fla.causal_conv1d_update(x[:, :1], cache, residual[:, :1], weight, bias, "silu")
    want_y, _ = deltafuse.causal_conv1d_update(x[:, :1], other, residual[:, :1], weight, bias, "silu")
    assert same_cache is cache
    assert same((y, cache), (want_y, other))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_convolution_backward(fla: Fla, packed: bool, full: bool) -> None:
    batch, sequences = (1, 3) if packed else (2, 2)
    x, weight, dy = torch.randn(batch, 9, 6), torch.randn(6, 4), torch.randn(batch, 9, 6)
    bias, residual, state = torch.randn(6), torch.randn(batch, 9, 6), torch.randn(sequences, 6, 4)
    dht = torch.randn(sequences, 6, 4) if full else None
    options: dict[str, Any] = {"activation": "silu", "cu_seqlens": torch.tensor([0, 1, 1, 9]) if packed else None}
    tensors: list[torch.Tensor | None] = [x, weight, bias, residual, state] if full else [x, weight, None, None, None]
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    y, final = deltafuse.causal_conv1d(*leaves, output_final_state=full, **options)
    loss = (y * dy).sum() + ((final * dht).sum() if full else 0)
    present = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(loss, present))
    want = tuple(None if leaf is None else next(found) for leaf in leaves)
    assert fla.causal_conv1d_bwd(x, dy, dht, *tensors[1:], **options) == FLA
    patch_fla()
    with torch.no_grad():
        got = fla.causal_conv1d_bwd(x, dy, dht, *tensors[1:], **options)
        named = dict(zip(("weight", "bias", "residual", "initial_state"), tensors[1:], strict=True))
        assert same(fla.causal_conv1d_bwd(x=x, dy=dy, dht=dht, **named, **options), got)
    assert len(got) == 5
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b)


# --- whose call it is ------------------------------------------------------------------------------------------------


def test_on_a_gpu_plain_torch_runs_only_where_asked_for(fla: Fla, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tensor without a CPU behind it takes the same decision as one on a GPU without a kernel of ours.
    x = kda_inputs("meta")
    patch_fla()
    assert fla.chunk_kda(**x) == FLA
    assert REASONS[-1].startswith("cute: ")
    for forced in ("torch", "auto", "cute"):
        patch_fla(forced)
        if forced == "torch":
            assert fla.chunk_kda(**x)[0].shape == (2, 9, 4, 6)
        else:
            assert fla.chunk_kda(**x) == FLA
    patch_fla()
    with deltafuse.use_backend("torch"):
        assert fla.chunk_kda(**x)[0].shape == (2, 9, 4, 6)
    monkeypatch.setenv("DELTAFUSE_BACKEND", "torch")
    assert fla.chunk_kda(**x)[0].shape == (2, 9, 4, 6)


def test_asked_for_fla_the_call_stays_with_fla(fla: Fla) -> None:
    x = kda_inputs()
    patch_fla()
    with deltafuse.use_backend("fla"):
        assert fla.chunk_kda(**x) == FLA
    assert REASONS == ["the backend asked for is fla"]
    patch_fla("torch")
    with deltafuse.use_backend("fla"):
        assert fla.chunk_kda(**x) != FLA, "the argument goes before"


def test_what_we_do_not_take_stays_with_fla(fla: Fla) -> None:
    x = kda_inputs()
    patch_fla()
    for options, reason in [
        ({"chunk_size": 16}, "chunk_size"),
        ({"an_option_of_tomorrow": 1}, "an_option_of_tomorrow"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval"),
    ]:
        assert fla.chunk_kda(**x, **options) == FLA
        assert reason in REASONS[-1]
    context = ModuleType("context")
    context.cu_seqlens = torch.tensor([0, 9])  # type: ignore[attr-defined]
    one = {name: t[:1] for name, t in x.items()}
    assert fla.chunk_kda(**one, cp_context=context) == FLA
    assert "torch: cp_context" in REASONS[-1]


def test_switched_off_from_outside(fla: Fla, monkeypatch: pytest.MonkeyPatch) -> None:
    x = kda_inputs()
    patch_fla()
    monkeypatch.setenv("FLA_DELTAFUSE", "0")
    assert fla.chunk_kda(**x) == FLA
    monkeypatch.setenv("FLA_DELTAFUSE", "1")
    assert fla.chunk_kda(**x) != FLA


def test_what_patching_refuses(fla: Fla, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("fla", "triton"):
        with pytest.raises(ValueError, match=f"`backend`: got '{backend}'"):
            patch_fla(backend)
    with monkeypatch.context() as m:
        m.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
        with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH"):
            patch_fla()
    monkeypatch.delattr(fla.modules["fla.backends"], "BaseBackend")
    with pytest.raises(ImportError, match=r"0.6 or later: pip install \"deltafuse\[fla\]\""):
        patch_fla()
    assert fla.chunk_kda(**kda_inputs()) == FLA


def test_without_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH", raising=False)
    with pytest.raises(ImportError, match=r"pip install \"deltafuse\[fla\]\""):
        patch_fla()
    unpatch_fla()
