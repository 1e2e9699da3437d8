"""Which backend can take a problem on a device, and why the others cannot. Pure: no tensor, no device is touched.

Backends in order of preference:

- `cute`: this package's own GPU kernels.
- `fla`: an installed flash-linear-attention, on a GPU.
- `torch`: `deltafuse.reference`, on any device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

import torch

from .runtime.probe import Environment

BACKENDS = ("cute", "fla", "torch")

GRID_LIMIT = 65_535
"""Blocks that CUDA's second and third grid dimension hold."""


class UnsupportedError(ValueError):
    """A backend was asked for that cannot take the call."""


class Problem(Protocol):
    """What every problem has, of whatever op."""

    @property
    def op(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def tokens(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def context_parallel(self) -> bool: ...
    @property
    def tangents(self) -> bool: ...


@dataclass(frozen=True)
class Verdict:
    """Whether a backend takes a problem; `reason` says why not, or what speaks for it."""

    backend: str
    supported: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """The backend that runs a problem, and the reasons of those that come before it and do not."""

    backend: str
    skipped: tuple[Verdict, ...] = ()


HOPPER, BLACKWELL = (9, 0), ((10, 0), (10, 3))
ARCHITECTURES = {
    "chunk_kda": dict.fromkeys((HOPPER, *BLACKWELL), "Hopper and datacentre Blackwell"),
    "fused_recurrent_kda": dict.fromkeys((HOPPER, *BLACKWELL), "Hopper and datacentre Blackwell"),
    "fused_recurrent_gated_delta_rule": dict.fromkeys((HOPPER, *BLACKWELL), "Hopper and datacentre Blackwell"),
}
"""Compute capabilities that own kernels are made for, where not every one from 8.0 on will do."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CONV_WIDTHS = (2, 3, 4)
CONV_TOKENS = 2**31 - 2**16
DECODE_KEY_DIMS = (64, 128, 256)
DECODE_COLUMNS = 16


_FORWARD_MODE = "forward-mode derivatives (tangents) are computed by plain torch alone"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cute(problem: Problem, env: Environment) -> str | None:
    if problem.op not in _OWN:
        return f"this version has no GPU kernel for {problem.op}"
    if env.device != "cuda" or env.capability is None:
        return f"kernels run on a GPU, the tensors are on {env.device}"
    made_for = ARCHITECTURES.get(problem.op)
    if made_for is not None and env.capability not in made_for:
        return f"this version has kernels for {next(iter(made_for.values()))}, not for {env.title}"
    if env.capability < (8, 0):
        return f"kernels need compute capability 8.0 or later, not {env.title}"
    if env.dsl is None:
        return "the CuTe DSL is not installed (pip install 'deltafuse[cuda]')"
    if problem.context_parallel:
        return "cp_context (context parallel) runs in fla alone"
    if problem.tangents:
        return _FORWARD_MODE
    return _OWN[problem.op](problem, env)


def _own_chunk(problem: Problem, env: Environment) -> str | None:
    """Where the chunked kernels do not reach."""
    if env.capability in BLACKWELL:
        if getattr(problem, "requires_grad", False):
            return "the kernels for Blackwell have no gradients yet"
        if getattr(problem, "intermediate_states", False):
            return "the kernels for Blackwell return no intermediate states"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"kernels take bfloat16 and float16, not {_name(problem.dtype)}"
    if problem.batch == 0 or problem.tokens == 0:
        return "kernels take no empty input"
    if getattr(problem, "key_dim", 0) > 128:
        return f"kernels take K up to 128, not {getattr(problem, 'key_dim', 0)}"
    if getattr(problem, "value_dim", 0) > 512:
        return f"kernels take V up to 512, not {getattr(problem, 'value_dim', 0)}"
    if getattr(problem, "intermediate_states", False) and getattr(problem, "chunk_size", 64) != 64:
        return f"kernels return the states of chunks of 64, not {getattr(problem, 'chunk_size', 64)}"
    return None


def _own_recurrent(problem: Problem, env: Environment) -> str | None:
    """Where the decode kernel does not reach."""
    for tensor, field in (("q, k, v", "dtype"), ("g", "gate_dtype"), ("beta", "beta_dtype"), ("states", "state_dtype")):
        dtype = getattr(problem, field)
        if dtype not in FLOATS:
            return f"the decode kernel takes {tensor} in bfloat16, float16 and float32, not {_name(dtype)}"
    key_dim, value_dim = getattr(problem, "key_dim", 0), getattr(problem, "value_dim", 0)
    if key_dim not in DECODE_KEY_DIMS:
        return f"the decode kernel takes K of {', '.join(map(str, DECODE_KEY_DIMS))}, not {key_dim}"
    if value_dim % DECODE_COLUMNS:
        return f"the decode kernel takes V in multiples of {DECODE_COLUMNS}, not {value_dim}"
    if getattr(problem, "value_gate", False):
        return "the decode kernel has no gate per value dimension (`gv`)"
    return None


def _own_conv(problem: Problem, env: Environment) -> str | None:
    """Where the convolution's kernels do not reach."""
    width = getattr(problem, "width", 0)
    if width not in CONV_WIDTHS:
        return f"the kernels take W = 2 to 4, not {width}"
    rows = problem.batch * problem.tokens
    if rows > CONV_TOKENS:
        return f"the kernels take up to {CONV_TOKENS} tokens, not {rows}"
    other = next((t for t in getattr(problem, "dtypes", ()) if t not in FLOATS), None)
    return None if other is None else f"the kernels take bfloat16, float16 and float32, not {_name(other)}"


_OWN = {
    "chunk_kda": _own_chunk,
    "fused_recurrent_kda": _own_recurrent,
    "fused_recurrent_gated_delta_rule": _own_recurrent,
    "causal_conv1d": _own_conv,
    "causal_conv1d_update": _own_conv,
}


def _fla(problem: Problem, env: Environment) -> str | None:
    if env.device != "cuda":
        return f"fla runs on a GPU, the tensors are on {env.device}"
    if env.fla is None:
        return "fla is not installed (pip install 'deltafuse[fla]')"
    if problem.dtype == torch.float64:
        return "fla has no float64"
    if problem.tangents:
        return _FORWARD_MODE
    if problem.batch == 0 or problem.tokens == 0:
        return "fla takes no empty input"
    if problem.op.startswith("chunk") and getattr(problem, "key_dim", 0) > 256:
        return f"fla's chunked ops take K up to 256, not {getattr(problem, 'key_dim', 0)}"
    if problem.op.startswith("fused_recurrent"):
        if getattr(problem, "requires_grad", False):
            return "fla's recurrent ops have no gradient"
        if getattr(problem, "pooled", False):
            return "fla reads and writes outside the pool at a slot of -1"
    if problem.op == "causal_conv1d":
        return _fla_conv(problem)
    gated = problem.op == "chunk_gated_delta_rule" and getattr(problem, "requires_grad", False)
    if gated and env.capability == (9, 0) and (3, 4, 0) <= _release(env.triton) < (3, 7, 1):
        return f"fla refuses this gradient on Hopper with Triton {env.triton} (from 3.4.0 to before 3.7.1)"
    if getattr(problem, "intermediate_states", False) and not getattr(problem, "inference_mode", False):
        return "fla returns intermediate states under torch.inference_mode alone"
    return None


def _release(version: str | None) -> tuple[int, ...]:
    """The numbers of a version such as "3.6.0+git1"; empty where it is unknown."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    return tuple(int(x or 0) for x in match.groups()) if match else ()


def _fla_conv(problem: Problem) -> str | None:
    """Where fla 0.6.0's convolution gives wrong gradients or cannot be launched."""

    def has(field: str) -> bool:
        return bool(getattr(problem, field, False))

    if has("requires_grad") and has("output_final_state"):
        return "fla's gradient of x misses a final state's oldest row"
    if has("requires_grad") and has("packed") and has("has_initial_state"):
        return "fla's gradient of the initial state is wrong for empty packed sequences"
    rows = getattr(problem, "sequences", problem.batch) + problem.tokens // 64
    if rows > GRID_LIMIT:
        return f"fla's grid holds {GRID_LIMIT} blocks of tokens, not {rows}"
    return None


def _torch(problem: Problem, env: Environment) -> str | None:
    if problem.context_parallel:
        return "cp_context (context parallel) runs in fla alone"
    if problem.tangents and getattr(problem, "intermediate_states", False):
        return "intermediate states have no forward-mode derivatives"
    return None


_RULES = {"cute": _cute, "fla": _fla, "torch": _torch}
_MERITS = {"cute": "own GPU kernels", "fla": "installed fla", "torch": "plain torch, any device"}


def verdicts(problem: Problem, env: Environment) -> tuple[Verdict, ...]:
    """What each backend says to a problem, in order of preference."""
    reasons = ((name, _RULES[name](problem, env)) for name in BACKENDS)
    return tuple(Verdict(name, why is None, why or _MERITS[name]) for name, why in reasons)


def choose(problem: Problem, env: Environment, requested: str = "auto") -> Plan:
    """The plan for a problem: the first backend that takes it, or the requested one.

    Raises `UnsupportedError` where the requested backend, or every one, cannot take it.
    """
    skipped: list[Verdict] = []
    for name in BACKENDS if requested == "auto" else (requested,):
        why = _RULES[name](problem, env)
        if why is None:
            return Plan(name, tuple(skipped))
        skipped.append(Verdict(name, False, why))
    able = ", ".join(repr(v.backend) for v in verdicts(problem, env) if v.supported) or "no backend takes this call"
    why = "; ".join(f"{v.backend}: {v.reason}" for v in skipped)
    raise UnsupportedError(f"`backend`: got {requested!r} for {problem.op} on {env.title}: {why}; allowed: {able}")
