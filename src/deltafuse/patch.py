"""Our ops behind flash-linear-attention's registry of backends, so that an unchanged model uses them.

fla asks the backends registered for an entry point, lowest priority first, whether they take a call, and runs its own
code where none does. Its entry points and ours differ in places (the recurrent op is dispatched below its public name,
the convolution inside its autograd function); the adapters here bridge that.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .backends import explain, get_backend
from .conv import causal_conv1d, causal_conv1d_update
from .gdn import chunk_gated_delta_rule
from .kda import chunk_kda, fused_kda_gate, fused_recurrent_kda
from .problem import fail

Verdict = tuple[bool, str | None]

# Ahead of fla's own backends, which start at 0.
PRIORITY = -10


class _Patch:
    """Whether our backend takes part, and which of ours it must be; every registered adapter reads it."""

    enabled = False
    backend: str | None = None


def _ours(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The one of our backends that a call would go to.

    Without a choice this is `cute`, or `torch` for tensors on a CPU, where fla has no kernels.
    """
    asked = _Patch.backend or get_backend()
    if asked != "auto":
        return asked
    tensor = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    return "torch" if tensor is not None and tensor.device.type == "cpu" else "cute"


def _verify(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
    backend = _ours(args, kwargs)
    if backend == "fla":
        return False, "the backend asked for is fla"
    try:
        verdicts = explain(op, *args, **kwargs).verdicts
    except (TypeError, ValueError) as error:
        return False, f"deltafuse does not take this call: {error}"
    verdict = next(verdict for verdict in verdicts if verdict.backend == backend)
    return verdict.supported, None if verdict.supported else f"{backend}: {verdict.reason}"


def _run(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Never "auto" nor "fla": the call must not come back here through fla.
    return op(*args, **kwargs, backend=_ours(args, kwargs))


def _recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    **rest: Any,
) -> dict[str, Any]:
    """Keywords of `fused_recurrent_kda` for a call of fla's `fused_recurrent_kda_fwd`, whose order differs."""
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "initial_state": initial_state,
        "scale": scale,
        "output_final_state": output_final_state,
        "inplace_final_state": inplace_final_state,
        **rest,
    }


def _conv(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> dict[str, Any]:
    """Keywords of `causal_conv1d` for a call of fla's `causal_conv1d_fwd`; its tiling has no meaning for us."""
    return {
        "x": x,
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "activation": activation,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_cpu": cu_seqlens_cpu,
    }


def _conv_backward(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Keywords of the `causal_conv1d` whose gradients a call of fla's `causal_conv1d_bwd` asks for, on fresh leaves.

    The residual is left out: its gradient is `dy` itself.
    """
    tensors = [None if t is None else t.detach().requires_grad_() for t in (x, weight, bias, initial_state)]
    x_, weight_, bias_, state = tensors
    return _conv(x_, weight_, bias_, None, state, dht is not None, *args, **kwargs)  # type: ignore[arg-type]


@cache
def _backend_class(base: Any) -> Any:
    """The adapter, for one `fla.backends.BaseBackend`; its methods are named after fla's dispatched functions."""

    class DeltafuseBackend(base):  # type: ignore[misc]
        backend_type = "deltafuse"
        env_var = "FLA_DELTAFUSE"
        priority = PRIORITY

        def is_enabled(self) -> bool:
            return _Patch.enabled and super().is_enabled()

        def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> Verdict:
            return _verify("chunk_kda", args, kwargs)

        def chunk_kda(self, *args: Any, **kwargs: Any) -> Any:
            return _run(chunk_kda, args, kwargs)

        def fused_recurrent_kda_fwd_verifier(self, *args: Any, **kwargs: Any) -> Verdict:
            return _verify("fused_recurrent_kda", (), _recurrent_kda(*args, **kwargs))

        def fused_recurrent_kda_fwd(self, *args: Any, **kwargs: Any) -> Any:
            return _run(fused_recurrent_kda, (), _recurrent_kda(*args, **kwargs))

        def fused_kda_gate_verifier(self, *args: Any, **kwargs: Any) -> Verdict:
            return _verify("fused_kda_gate", args, kwargs)

        def fused_kda_gate(self, *args: Any, **kwargs: Any) -> Any:
            return _run(fused_kda_gate, args, kwargs)

        def chunk_gated_delta_rule_verifier(self, *args: Any, **kwargs: Any) -> Verdict:
            return _verify("chunk_gated_delta_rule", args, kwargs)

        def chunk_gated_delta_rule(self, *args: Any, **kwargs: Any) -> Any:
            return _run(chunk_gated_delta_rule, args, kwargs)

        def causal_conv1d_fwd_verifier(self, *args: Any, **kwargs: Any) -> Verdict:
            return _verify("causal_conv1d", (), _conv(*args, **kwargs))

        def causal_conv1d_fwd(self, *args: Any, **kwargs: Any) -> Any:
            return _run(causal_conv1d, (), _conv(*args, **kwargs))

        def causal_conv1d_bwd_verifier(self, *args: Any, **kwargs: Any) -> Verdict:
            with torch.enable_grad():
                return _verify("causal_conv1d", (), _conv_backward(*args, **kwargs))

        def causal_conv1d_bwd(
            self, x: Tensor, dy: Tensor, dht: Tensor | None, *args: Any, **kwargs: Any
        ) -> tuple[Tensor | None, ...]:
            residual = kwargs["residual"] if "residual" in kwargs else (args[2] if len(args) > 2 else None)
            with torch.enable_grad():
                call = _conv_backward(x, dy, dht, *args, **kwargs)
                y, state = _run(causal_conv1d, (), call)
                names = [n for n in ("x", "weight", "bias", "initial_state") if call[n] is not None]
                outputs, gradients = ([y, state], [dy, dht]) if dht is not None else ([y], [dy])
                found = torch.autograd.grad(outputs, [call[n] for n in names], gradients)
            d = dict(zip(names, found, strict=True))
            dr = None if residual is None else dy
            return d["x"], d.get("weight"), d.get("bias"), dr, d.get("initial_state")

        def causal_conv1d_update_verifier(self, *args: Any, **kwargs: Any) -> Verdict:
            return _verify("causal_conv1d_update", args, kwargs)

        def causal_conv1d_update(self, *args: Any, **kwargs: Any) -> Any:
            return _run(causal_conv1d_update, args, kwargs)

    return DeltafuseBackend


def patch_fla(backend: str | None = None) -> None:
    """Let flash-linear-attention's ops run ours where ours support the call; fla's own run everywhere else.

    Of fla 0.6 these are dispatched, and so can be taken over: `chunk_kda`, `fused_recurrent_kda`, `fused_kda_gate`,
    `chunk_gated_delta_rule`, `causal_conv1d` (forward and backward), `causal_conv1d_update`. Its
    `fused_recurrent_gated_delta_rule` is not. Calling it again changes `backend`; `unpatch_fla` undoes it. The
    environment variable `FLA_DELTAFUSE=0` turns it off from outside.

    Args:
        backend: which of our backends: "cute" or "torch"; "auto" for "cute" on a GPU and "torch" on a CPU; None for
            what `deltafuse.set_backend` says at the time of a call, "auto" unless it was told otherwise.

    Raises:
        ValueError: another `backend`.
        ImportError: fla is not installed, or older than 0.6.
        RuntimeError: fla's dispatch is turned off (`FLA_DISABLE_BACKEND_DISPATCH=1`).
    """
    if backend not in (None, "auto", "cute", "torch"):
        fail("backend", repr(backend), '"auto", "cute", "torch" or None')
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise RuntimeError(
            "fla asks no backends while FLA_DISABLE_BACKEND_DISPATCH is 1: unset it before fla is imported"
        )
    try:
        fla = importlib.import_module("fla.backends")
        conv = importlib.import_module("fla.modules.causal_conv1d")
        kda = importlib.import_module("fla.ops.kda")
        entry_points = (
            kda.chunk_kda,
            "kda",
            "gated_delta_rule",
            conv.causal_conv1d_fwd,
            conv.causal_conv1d_bwd,
            conv.causal_conv1d_update,
        )
        adapter = _backend_class(fla.BaseBackend)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f'patch_fla needs flash-linear-attention 0.6 or later: pip install "deltafuse[fla]" ({error})'
        ) from error
    # fla keeps one backend of a type for each entry point, so that registering again changes nothing.
    for entry_point in entry_points:
        fla.register(entry_point)(adapter)
    _Patch.enabled, _Patch.backend = True, backend


def unpatch_fla() -> None:
    """Let flash-linear-attention run its own code again; nothing happens where it was not patched."""
    _Patch.enabled, _Patch.backend = False, None
