"""`warmup`: kernels made ready before the first call that needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .backends import get_backend, problem_of
from .runtime import launch
from .runtime.probe import Environment, environment
from .support import Problem, choose

Device = torch.device | str | int
KernelsOf = Callable[[Problem, Environment], Iterable[tuple[str, Any]]]
"""The kernels, each a name and its config, that a call on the `cute` backend launches."""


def kernels_of(problem: Problem, env: Environment) -> Iterable[tuple[str, Any]]:
    """The kernels of a call that the `cute` backend takes."""
    from .autograd import kernels

    return kernels.kernels_of(problem, env)


def warmup(
    op: str | Callable[..., Any],
    *args: Any,
    device: Device | Iterable[Device] | None = None,
    **kwargs: Any,
) -> tuple[str, ...]:
    """Compile, or load from disk, the kernels that a call needs; nothing is computed. Returns their names.

    `op` is a public op or its name, the rest are the op's own arguments; tensors may be on the `meta` device. Sizes of batch,
    tokens and heads decide nothing but how the call is scheduled: one call of every kind and rough size that a model makes is
    enough. `device` is one GPU or several, by default that of the tensors, or the current one for `meta` tensors. Afterwards such
    calls neither compile nor load anything there and may be captured in a CUDA graph at once. Where another backend takes
    the call, or the device is no GPU, there is nothing to do: an empty tuple.

        deltafuse.warmup("chunk_kda", q, k, v, g, beta, use_gate_in_kernel=True, A_log=A_log, device=["cuda:0", "cuda:1"])

    Raises what the op itself raises for bad arguments, and RuntimeError where a kernel cannot be compiled.
    """
    problem, found = problem_of(op, *args, **kwargs)
    return warm(problem, kwargs.get("backend") or get_backend(), _devices(device, found), kernels_of)


def warm(problem: Problem, requested: str, devices: Iterable[torch.device], wanted: KernelsOf) -> tuple[str, ...]:
    """`warmup` of a problem on devices with an index; `wanted` tells its kernels."""
    names: dict[str, None] = {}
    for device in devices:
        env = environment(device.type, device.index)
        if choose(problem, env, requested).backend == "cute" and env.arch is not None:
            names |= dict.fromkeys(launch.prepare(wanted(problem, env), env.arch, [device]))
    return tuple(names)


def _devices(given: Device | Iterable[Device] | None, found: torch.device) -> list[torch.device]:
    """The devices that are meant, each with its index."""
    if given is None:
        given = found if found.type != "meta" else "cuda" if torch.cuda.is_available() else "cpu"
    several = [given] if isinstance(given, str | int | torch.device) else list(given)
    devices = [torch.device(x) for x in several]
    return [torch.device("cuda", torch.cuda.current_device()) if str(x) == "cuda" else x for x in devices]
