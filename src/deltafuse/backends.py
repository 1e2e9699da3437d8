"""Which backend is asked for, and what would run: `set_backend`, `use_backend`, `DELTAFUSE_BACKEND`, `explain`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .runtime.log import log_once
from .runtime.probe import Environment, environment
from .support import BACKENDS, Plan, Problem, UnsupportedError, Verdict, choose, verdicts

CHOICES = ("auto", *BACKENDS)

# A plain global, so that torch.compile guards on it and traces again when it changes.
_process_backend: str | None = None
_explaining: ContextVar[bool] = ContextVar("deltafuse_explaining", default=False)


def _checked(backend: object, name: str) -> str:
    if backend not in CHOICES:
        raise ValueError(f"`{name}`: got {backend!r}; allowed: {', '.join(map(repr, CHOICES))}")
    return str(backend)


def set_backend(backend: str | None) -> None:
    """Choose the backend of every later call in this process that does not name one itself.

    `"auto"`, `"cute"`, `"fla"`, `"torch"`; None takes the choice back, so that `DELTAFUSE_BACKEND` counts again. Raises ValueError
    for another name.
    """
    global _process_backend
    _process_backend = None if backend is None else _checked(backend, "backend")


def get_backend() -> str:
    """The backend that a call which names none asks for: `use_backend` or `set_backend`, else `DELTAFUSE_BACKEND`, else `"auto"`."""
    if _process_backend is not None:
        return _process_backend
    return _checked(os.environ.get("DELTAFUSE_BACKEND") or "auto", "DELTAFUSE_BACKEND")


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """`set_backend` for the length of a `with` block (for the whole process). Raises ValueError for an unknown name."""
    before = _process_backend
    set_backend(backend)
    try:
        yield
    finally:
        set_backend(before)


_choose = lru_cache(maxsize=4096)(choose)


def plan(problem: Problem, device: torch.device, backend: str | None) -> Plan:
    """Decide what runs a problem; a fallback is said once for every reason."""
    compiling = torch.compiler.is_compiling()
    if not compiling and _explaining.get():
        raise _Asked(problem, device)
    requested = get_backend() if backend is None else _checked(backend, "backend")
    env = environment(device.type, device.index)
    chosen = (choose if compiling else _choose)(problem, env, requested)  # type: ignore[arg-type]
    if chosen.skipped:
        # On a CPU plain torch is what a user expects; on a GPU it is a fallback worth a warning.
        level = logging.WARNING if env.device == "cuda" else logging.INFO
        reasons = [f"{v.backend}: {v.reason}" for v in chosen.skipped]
        log_once(level, "%s runs on backend %r (%s)", problem.op, chosen.backend, "; ".join(reasons))
    return chosen


@dataclass(frozen=True)
class Explanation:
    """What would run a call: the chosen backend (None: no backend takes it) and every backend's verdict."""

    op: str
    device: str
    requested: str
    chosen: str | None
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}, backend {self.requested!r}: {self.chosen or 'not supported'}"]
        for v in self.verdicts:
            mark = "->" if v.backend == self.chosen else "  "
            lines.append(f"{mark} {v.backend:<6}{'yes' if v.supported else 'no':<5}{v.reason}")
        return "\n".join(lines)


def explain_problem(problem: Problem, env: Environment, backend: str | None = None) -> Explanation:
    """`explain` for a problem on any described machine."""
    requested = get_backend() if backend is None else _checked(backend, "backend")
    try:
        chosen: str | None = choose(problem, env, requested).backend
    except UnsupportedError:
        chosen = None
    return Explanation(problem.op, env.title, requested, chosen, verdicts(problem, env))


def explain(op: str | Callable[..., Any], *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Which backend would run this call, and why not the others; nothing is computed.

    `op` is a public op or its name, the rest are the op's own arguments; tensors may be on the `meta` device, or on the device
    that is asked about. Raises what the op itself raises for bad arguments.
    """
    problem, device = problem_of(op, *args, **kwargs)
    return explain_problem(problem, environment(device.type, device.index), backend)


class _Asked(BaseException):
    """Carries a parsed problem out of an op that is called to be explained, before anything runs."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem, self.device = problem, device


def problem_of(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Problem, torch.device]:
    """The parsed problem and the device of a call that is checked but not run."""
    import deltafuse

    name = op if isinstance(op, str) else getattr(op, "__name__", "")
    if name not in deltafuse.OPS:
        raise ValueError(f"`op`: got {op!r}; allowed: {', '.join(deltafuse.OPS)}")
    token = _explaining.set(True)
    try:
        getattr(deltafuse, name)(*args, **kwargs)
    except _Asked as asked:
        return asked.problem, asked.device
    finally:
        _explaining.reset(token)
    raise AssertionError(f"{name} ran without a plan")
