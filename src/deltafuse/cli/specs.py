"""Calls of the ops, described by sizes and switches, and the tensors that go with them.

A spec turns into the keyword arguments of its op on any device: random values for `verify` and `bench`, no values on
the `meta` device for `explain`. Only switches that are on become arguments, so an op refuses those that it lacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DELTA_OPS = ("chunk_kda", "fused_recurrent_kda", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
CONV_OPS = ("causal_conv1d", "causal_conv1d_update")
GATE_OPS = ("fused_kda_gate",)
GATES = ("log", "softplus", "bounded")
DECAYS = ("ordinary", "strong", "remembering", "forgetting")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and parameters beside tensors of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def given(value: object) -> bool:
    """Whether a switch is on; a 0 is a value, for the op to judge."""
    return value is not None and value is not False


class _Source:
    """Random tensors of one dtype on one device; on `meta` there are no values and no generator."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.generator = None
        if self.device.type != "meta":
            self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, dtype=self.dtype, device=self.device, generator=self.generator)


def _bounds(lengths: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    arguments = {"cu_seqlens": torch.tensor(bounds, device=device)}
    if device.type not in ("cpu", "meta"):
        arguments["cu_seqlens_cpu"] = torch.tensor(bounds)
    return arguments


def _gate_parameters(source: _Source, heads: int, per_head: int, decay: str) -> tuple[Tensor, Tensor]:
    """`A_log` and `dt_bias`, as layers initialise them (a decay of 0.001 to 0.1 a token, times 1 to 16), stronger, or 0."""
    a_log = (1 + 15 * source.uniform(heads)).log()
    if decay == "strong":
        return a_log, source.normal(heads * per_head)
    if decay == "forgetting":
        return torch.zeros_like(a_log), a_log.new_zeros(heads * per_head)
    step = (math.log(0.001) + source.uniform(heads * per_head) * math.log(100)).exp()
    return a_log, step + (-(-step).expm1()).log()


@dataclass(frozen=True)
class DeltaSpec:
    """A call of a delta-rule op.

    `lengths` are those of packed sequences (their sum is `tokens`). `decay` says what the gate is like: `"ordinary"`
    halves a state every token or so, `"strong"` has decays of `exp(-20)` and `exp(-1000)` in between, `"remembering"`
    is what layers start with, `"forgetting"` loses about 2.5 of the logarithm a token in every channel (with a bounded gate).
    `slots` is the serving form: every `"sequence"` or `"token"` has a slot in a pool.
    """

    op: str
    batch: int = 1
    tokens: int = 64
    heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    value_heads: int | None = None
    lengths: tuple[int, ...] | None = None
    gate: str = "log"
    lower_bound: float = -5.0
    decay: str = "ordinary"
    a_log: bool = True
    dt_bias: bool = True
    safe_gate: bool = False
    l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    wide_beta: bool = False
    scale: float | None = None
    initial_state: bool = False
    final_state: bool = False
    intermediate: bool = False
    v_first: bool = False
    chunk_size: int | None = None
    disable_recompute: bool = False
    strided: bool = False
    key_gate: bool = False
    value_gate: bool = False
    slots: str | None = None

    @property
    def hv(self) -> int:
        return self.value_heads or self.heads

    @property
    def per_key(self) -> bool:
        return "kda" in self.op

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def shape(self) -> str:
        """The sizes as the command line takes them."""
        sizes = [self.batch, self.tokens, self.heads, self.key_dim, self.value_dim]
        if self.hv != self.heads:
            sizes.append(self.hv)
        return _shape(sizes, self.lengths)

    def arguments(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of the op."""
        source = _Source(wide(dtype), device, seed)
        b, t, hv, k, v = self.batch, self.tokens, self.hv, self.key_dim, self.value_dim
        arguments: dict[str, Any] = dict(zip("qkv", self._qkv(source, dtype), strict=True))
        arguments["g"] = self._decays(source, (b, t, hv, k) if self.per_key else (b, t, hv), dtype)
        if self.key_gate:
            arguments["gk"] = self._decays(source, (b, t, hv, k), dtype)
        if self.value_gate:
            arguments["gv"] = F.logsigmoid(source.normal(b, t, hv, v) + 2)
        beta = source.normal(b, t, hv)
        beta = beta if self.beta_sigmoid else beta.sigmoid()
        arguments["beta"] = beta if self.wide_beta else beta.to(dtype)
        if self.gate != "log":
            arguments["use_gate_in_kernel"] = True
            a_log, bias = _gate_parameters(source, hv, k if self.per_key else 1, self.decay)
            arguments |= {"A_log": a_log} if self.a_log else {}
            arguments |= {"dt_bias": bias} if self.dt_bias else {}
            arguments |= {"lower_bound": self.lower_bound} if self.gate == "bounded" else {}
        if self.initial_state and not self.slots:
            arguments["initial_state"] = self._state(source, self.sequences)
        if self.lengths is not None:
            arguments |= _bounds(self.lengths, source.device)
        if self.slots:
            arguments |= self._serving(source)
        arguments |= {name: value for name, value in self._switches().items() if given(value)}
        return arguments

    def _switches(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "output_final_state": self.final_state,
            "use_qk_l2norm_in_kernel": self.l2norm,
            "use_beta_sigmoid_in_kernel": self.beta_sigmoid,
            "allow_neg_eigval": self.neg_eigval,
            "safe_gate": self.safe_gate,
            "disable_recompute": self.disable_recompute,
            "return_intermediate_states": self.intermediate,
            "state_v_first": self.v_first,
            "chunk_size": self.chunk_size,
        }

    def _qkv(self, source: _Source, dtype: torch.dtype) -> list[Tensor]:
        # Without the op's own L2 norm, q and k of norm 1 keep the state bounded.
        b, t, h, hv = self.batch, self.tokens, self.heads, self.hv
        q, k = source.normal(b, t, h, self.key_dim), source.normal(b, t, h, self.key_dim)
        if not self.l2norm:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        tensors = [x.to(dtype) for x in (q, k, source.normal(b, t, hv, self.value_dim))]
        if self.strided:  # as a model's one projection leaves them: parts of the rows of one tensor
            sizes = [x.shape[2] * x.shape[3] for x in tensors]
            parts = torch.cat([x.flatten(2) for x in tensors], -1).split(sizes, -1)
            tensors = [part.unflatten(-1, x.shape[2:]) for part, x in zip(parts, tensors, strict=True)]
        return tensors

    def _decays(self, source: _Source, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The logarithm of the decay in float32 or better, or the raw gate in `dtype`."""
        raw = source.normal(*shape)
        if self.gate != "log":
            return (raw * {"ordinary": 1.0, "strong": 3.0, "remembering": 0.3, "forgetting": 1.0}[self.decay]).to(dtype)
        if self.decay == "remembering":
            return F.logsigmoid(raw + 5)
        if self.decay == "forgetting":
            return self.lower_bound * raw.sigmoid()
        g = F.logsigmoid(raw)
        if self.decay == "strong":
            chance = source.uniform(*shape)
            g = torch.where(chance < 0.1, -20.0, g)
            g = torch.where(chance < 0.03, -1000.0, g)
        return g

    def _state(self, source: _Source, count: int) -> Tensor:
        inner = (self.value_dim, self.key_dim) if self.v_first else (self.key_dim, self.value_dim)
        return source.normal(count, self.hv, *inner)

    def _serving(self, source: _Source) -> dict[str, Any]:
        """A pool with a slot to spare, the second sequence without one; every token its own slot, or every sequence."""
        n = self.sequences
        arguments: dict[str, Any] = {"inplace_final_state": True}
        if self.slots == "sequence":
            slots = list(range(n, 0, -1))
            slots[1:2] = [-1] * len(slots[1:2])
            indices = torch.tensor(slots, device=source.device)
        else:
            indices = torch.arange(n * self.tokens, device=source.device).view(n, self.tokens)
            arguments["num_accepted_tokens"] = torch.arange(n, device=source.device) % self.tokens + 1
        arguments["initial_state"] = self._state(source, indices.numel() + 1)
        arguments["ssm_state_indices"] = indices
        return arguments


@dataclass(frozen=True)
class ConvSpec:
    """A call of `causal_conv1d`, or of `causal_conv1d_update`, where `batch` counts the sequences and `tokens` is 1."""

    op: str
    batch: int = 1
    tokens: int = 64
    channels: int = 64
    width: int = 4
    lengths: tuple[int, ...] | None = None
    activation: str | None = None
    bias: bool = False
    residual: bool = False
    initial_state: bool = False
    final_state: bool = False

    @property
    def updates(self) -> bool:
        return self.op == "causal_conv1d_update"

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def shape(self) -> str:
        """The sizes as the command line takes them."""
        sizes = [self.batch] if self.updates else [self.batch, self.tokens]
        return _shape([*sizes, self.channels, self.width], self.lengths)

    def arguments(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of the op."""
        source = _Source(wide(dtype), device, seed)
        b, t, d, w = self.batch, self.tokens, self.channels, self.width
        arguments: dict[str, Any] = {"x": source.normal(b, t, d).to(dtype)}
        state = source.normal(self.sequences, d, w).to(dtype)
        if self.updates:
            arguments["cache"] = state
        elif self.initial_state:
            arguments["initial_state"] = state
        arguments["weight"] = (source.normal(d, w) * w**-0.5).to(dtype)
        if self.bias:
            arguments["bias"] = source.normal(d).to(dtype)
        if self.residual:
            arguments["residual"] = source.normal(b, t, d).to(dtype)
        if self.activation is not None:
            arguments["activation"] = self.activation
        if self.final_state:
            arguments["output_final_state"] = True
        if self.lengths is not None:
            arguments |= _bounds(self.lengths, source.device)
        return arguments


@dataclass(frozen=True)
class GateSpec:
    """A call of `fused_kda_gate`."""

    op: str = "fused_kda_gate"
    batch: int = 1
    tokens: int = 64
    heads: int = 2
    key_dim: int = 64
    gate: str = "softplus"
    lower_bound: float = -5.0
    decay: str = "ordinary"
    a_log: bool = True
    dt_bias: bool = True

    @property
    def shape(self) -> str:
        """The sizes as the command line takes them."""
        return _shape([self.batch, self.tokens, self.heads, self.key_dim], None)

    def arguments(self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of the op."""
        source = _Source(wide(dtype), device, seed)
        g = source.normal(self.batch, self.tokens, self.heads, self.key_dim)
        a_log, bias = _gate_parameters(source, self.heads, self.key_dim, self.decay)
        arguments: dict[str, Any] = {"g": (3 * g if self.decay == "strong" else g).to(dtype)}
        arguments |= {"A_log": a_log} if self.a_log else {}
        arguments |= {"dt_bias": bias} if self.dt_bias else {}
        arguments |= {"lower_bound": self.lower_bound} if self.gate == "bounded" else {}
        arguments |= {"output_dtype": torch.float64} if dtype == torch.float64 else {}
        return arguments


Spec = DeltaSpec | ConvSpec | GateSpec


def _shape(sizes: list[int], lengths: tuple[int, ...] | None) -> str:
    text = ",".join(map(str, sizes))
    return text if lengths is None else f"{text}:{','.join(map(str, lengths))}"
