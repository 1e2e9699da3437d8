"""Inputs of the delta-rule ops as users have them, calls on them, and how errors are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import torch
import torch.nn.functional as F
from definitions import Defined, delta_rule
from torch import Tensor

import deltafuse

GATES = ("log", "softplus", "bounded", "bounded, no A_log")

# Errors that the field's own tests allow, as RMS(got - want) / RMS(want).
FIELD = {
    "o": 0.005, "final_state": 0.005,
    "q": 0.008, "k": 0.008, "v": 0.008, "initial_state": 0.008,
    "g": 0.02, "beta": 0.02, "A_log": 0.003, "dt_bias": 0.008,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """Tensors and flags of one call, by the names of the op's arguments."""

    family: str  # "kda" or "gdn"
    tensors: dict[str, Tensor]
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def chunk(self) -> Callable[..., Any]:
        return deltafuse.chunk_kda if self.family == "kda" else deltafuse.chunk_gated_delta_rule

    @property
    def recurrent(self) -> Callable[..., Any]:
        return deltafuse.fused_recurrent_kda if self.family == "kda" else deltafuse.fused_recurrent_gated_delta_rule

    def run(self, op: Callable[..., Any] | None = None, **more: Any) -> Any:
        """The op's result (the chunked one's by default), with the final state unless `more` says otherwise."""
        return (op or self.chunk)(**self.tensors, **{"output_final_state": True, **self.flags, **more})

    def define(self, **more: Any) -> Defined:
        return delta_rule(**{**self.tensors, **self.flags, **more})

    def with_tensors(self, **tensors: Tensor) -> Call:
        return replace(self, tensors={**self.tensors, **tensors})

    def with_flags(self, **flags: Any) -> Call:
        return replace(self, flags={**self.flags, **flags})

    def leaves(self, names: Iterable[str] | None = None) -> Call:
        """The same call on leaf tensors, of which those named (by default all) require gradients."""
        wanted = set(self.tensors if names is None else names)
        return self.with_tensors(**{n: x.detach().clone().requires_grad_(n in wanted) for n, x in self.tensors.items()})

    def to(self, dtype: torch.dtype) -> Call:
        """q, k, v, g and beta in another dtype; parameters and states stay."""
        return self.with_tensors(**{n: self.tensors[n].to(dtype) for n in ("q", "k", "v", "g", "beta")})


def make(
    family: str = "kda",
    *,
    B: int = 1,
    T: int = 37,
    H: int = 1,
    HV: int | None = None,
    K: int = 8,
    V: int = 6,
    gate: str = "log",
    l2norm: bool = False,
    beta: str = "plain",
    initial: bool = False,
    v_first: bool = False,
    lengths: Sequence[int] | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Call:
    """A call on ordinary inputs: |k| = 1, beta within 0 and 1 (0 and 2 with `beta="negative"`), decays of a few per cent to a half a token.

    `beta` is "plain", "sigmoid" or "negative"; `lengths` packs sequences (then B = 1 and T is their sum).
    """
    gen = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)  # noqa: E731
    HV = H if HV is None else HV
    if lengths is not None:
        B, T = 1, sum(lengths)
    q, k, v = rand(B, T, H, K), rand(B, T, H, K), rand(B, T, HV, V)
    if not l2norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    shape = (B, T, HV, K) if family == "kda" else (B, T, HV)
    g = rand(*shape)
    if gate == "log":
        g = F.logsigmoid(g + 2)
    b = rand(B, T, HV)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": b if beta != "plain" else b.sigmoid()}
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    flags: dict[str, Any] = {}
    if gate != "log":
        flags["use_gate_in_kernel"] = True
        if gate != "bounded, no A_log":
            tensors["A_log"] = (rand(HV) * 0.3).to(wide)
        tensors["dt_bias"] = (rand(HV * (K if family == "kda" else 1)) * 0.5 - 1).to(wide)
        if gate.startswith("bounded"):
            flags["lower_bound"] = -3.0
    if l2norm:
        flags["use_qk_l2norm_in_kernel"] = True
    if beta != "plain":
        flags["use_beta_sigmoid_in_kernel"] = True
    if beta == "negative":
        flags["allow_neg_eigval"] = True
    if scale is not None:
        flags["scale"] = scale
    if lengths is not None:
        flags["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0])
    if initial:
        state = rand(B if lengths is None else len(lengths), HV, K, V).to(wide)
        tensors["initial_state"] = state.transpose(-1, -2).contiguous() if v_first else state
    if v_first:
        flags["state_v_first"] = True
    return Call(family, tensors, flags)


def pairwise(**factors: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Few combinations of the factors' values such that every pair of values of every two factors occurs."""
    names = list(factors)
    missing = {
        ((a, x), (b, y)) for a, b in combinations(range(len(names)), 2)
        for x, y in product(range(len(factors[names[a]])), range(len(factors[names[b]])))
    }  # fmt: skip
    while missing:
        row = dict(min(missing))
        for i in (i for i in range(len(names)) if i not in row):
            gains = [
                sum(tuple(sorted(((i, x), other))) in missing for other in row.items())
                for x in range(len(factors[names[i]]))
            ]
            row[i] = gains.index(max(gains))
        missing -= set(combinations(sorted(row.items()), 2))
        yield {name: factors[name][row[i]] for i, name in enumerate(names)}


def label(combination: dict[str, Any]) -> str:
    """A test's name."""
    return "-".join(
        f"{n}={v}" if isinstance(v, bool | int) else str(v).replace(" ", "") for n, v in combination.items()
    )


def error(got: Tensor, want: Tensor) -> float:
    """RMS(got - want) / RMS(want); absolute where nothing but 0 is wanted. NaN and infinity fail any comparison."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    size = want.norm()
    difference = float((got - want).norm() / (size if size > 0 else 1))
    return difference if difference == difference else float("inf")


def assert_near(got: Tensor, want: Tensor, limit: float, name: str = "") -> None:
    found = error(got, want)
    assert found <= limit, f"{name}: error {found:.3g}, allowed {limit:.3g}"


def gradients(call: Call, outputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradients of `sum(output . seed)` in the call's tensors that require them."""
    names = [n for n, x in call.tensors.items() if x.requires_grad]
    pairs = [(o, s.to(o.dtype)) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
    grads = torch.autograd.grad([o for o, _ in pairs], [call.tensors[n] for n in names], [s for _, s in pairs])
    return dict(zip(names, grads, strict=True))


def seeds_of(call: Call, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Incoming gradients of o and of the final state."""
    gen = torch.Generator().manual_seed(seed)
    defined_shape = call.tensors["v"].shape
    q, v, cu = call.tensors["q"], call.tensors["v"], call.flags.get("cu_seqlens")
    n = q.shape[0] if cu is None else len(cu) - 1
    inner = (v.shape[3], q.shape[3]) if call.flags.get("state_v_first") else (q.shape[3], v.shape[3])
    do = torch.randn(defined_shape, generator=gen, dtype=torch.float64)
    return do, torch.randn(n, v.shape[2], *inner, generator=gen, dtype=torch.float64)
