"""KDA's backward pass inside chunks against autograd of the float64 definition: every kind of input, gates that do not fit, schedules.

The gradients that enter are random. What should come out are the derivatives of

    sum over chunks of <dqg, qg> + <dkd, kd> + <dkg, kg> + <dA, Aqk> + <dL, L> + <dD, decay> + <direct, beta>

with respect to raw q, k, gate, beta and the gate's parameters, where everything is a function of these in float64. k . dk of the normed
k, which the kernel is given, is the same sum's derivative with respect to a factor of k.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import kda_model
import pytest
import torch

import ptxemu

NAN = math.nan
WITHIN = {torch.bfloat16: 5e-3, torch.float16: 8e-4}
"""Of relative errors (root of mean squares): what rounding operands and outputs to the type makes unavoidable, and a margin."""
ONCE = 1.66e-3
"""The error of rounding to bfloat16 once; dq and dk have little beside it, less than a second rounding would add."""


@cache
def _compiled(config: Any) -> Any:
    from deltafuse.kernels.warp import kda_intra

    return kda_intra.compile(config)


@dataclass
class Case:
    """Inputs of a call, what it should give in float64, and its outputs, filled with NaN before."""

    config: Any
    inputs: dict[str, torch.Tensor]
    scale: float
    lower_bound: float
    beta_limit: float
    bounds: list[int] | None
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    out: dict[str, torch.Tensor] = field(default_factory=dict)

    def prepare(self, random: torch.Generator) -> None:
        """Random gradients, and what follows from them."""
        leaves = {n: x.double().requires_grad_() for n, x in self.inputs.items() if n != "cu_seqlens"}
        stretch = torch.ones(*self.inputs["g"].shape[:3], 1, dtype=torch.float64, requires_grad=True)
        factors, scores, rest, chunks, slots = self.definition(leaves, stretch)
        io, hv = self.inputs["q"].dtype, self.inputs["g"].shape[2]
        keep = torch.zeros(slots, 1, 64, 1, dtype=torch.float64)
        for c in chunks:
            keep[c.slot, :, : c.rows] = 1

        def normal(*shape: int, size: float = 1.0, to: torch.dtype = torch.float64) -> torch.Tensor:
            return (torch.randn(shape, generator=random, dtype=torch.float64) * size).to(to).double()

        dfactors = normal(slots, hv, 3, 64, leaves["g"].shape[3], to=io) * keep[:, :, None]
        both = keep * keep.transpose(2, 3)
        lower = torch.ones(64, 64, dtype=torch.float64).tril()
        dscores = normal(slots, hv, 2, 64, 64, to=io) * both[:, :, None] * torch.stack([lower, lower.tril(-1)])
        decays = normal(slots, hv, leaves["g"].shape[3])
        direct = normal(slots, hv, 64, to=torch.float32) * keep[..., 0]
        decay, beta = rest
        loss = (dfactors * factors).sum() + (dscores * scores).sum() + (decays * decay).sum() + (direct * beta).sum()
        names = list(leaves)
        *grads, along = torch.autograd.grad(loss, [*(leaves[n] for n in names), stretch], allow_unused=True)
        self.expected = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, grads, strict=True)}
        # d/dG (in units of log2, without their ln 2) of what does not pass through the scores.
        qg, kd, kg = (dfactors * factors).detach().unbind(2)
        dgi = qg + kd - kg
        for c in chunks:
            dgi[c.slot, :, c.rows - 1] += kg[c.slot].sum(1) + decays[c.slot] * decay[c.slot].detach()
        dim = leaves["g"].shape[3]
        shares = normal(slots, hv, dim // 64, 64)
        for c in chunks:
            shares[c.slot, :, -1, : c.rows] = along[c.batch, c.first : c.first + c.rows, :, 0].T
            shares[c.slot, :, -1, : c.rows] -= shares[c.slot, :, :-1, : c.rows].sum(1)
        self.given = {
            "dfactors": dfactors.to(io), "dscores": kda_model.image(dscores)[..., 0, :, :].to(io), "dgi": dgi.float(),
            "direct": torch.cat([direct[:, :, None], shares], 2).float(),
        }  # fmt: skip

    def definition(
        self, x: dict[str, torch.Tensor], stretch: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor], Any, int]:
        """Factors [slots, HV, 3, 64, K], scores (Aqk, L) [slots, HV, 2, 64, 64], decay [slots, HV, K] and beta [slots, HV, 64].

        `stretch`: factors of k after its norm, [B, T, HV, 1].
        """
        c, group = self.config, x["g"].shape[2] // x["q"].shape[2]
        q, k, beta = x["q"], x["k"], x["beta"]
        if c.l2norm:
            q, k = (a * torch.rsqrt(a.square().sum(-1, keepdim=True) + 1e-6) for a in (q, k))
        q, k = (a.repeat_interleave(group, 2) for a in (q, k))
        k = k * stretch
        if c.beta_sigmoid:
            beta = beta.sigmoid() * self.beta_limit
        decays = kda_model.log2_decay(c.gate, x["g"], x.get("a_log"), x.get("dt_bias"), self.lower_bound)
        slots, chunks = kda_model.chunks_of(q.shape[0], q.shape[1], self.bounds)
        hv, dim = decays.shape[2:]
        shapes = ((hv, 3, 64, dim), (hv, 2, 64, 64), (hv, dim), (hv, 64))
        out = [[torch.zeros(s, dtype=torch.float64) for _ in range(slots)] for s in shapes]
        lower = torch.ones(64, 64, dtype=torch.bool).tril()
        for ch in chunks:
            qc, kc, gc, bc = (
                torch.nn.functional.pad(
                    a[ch.batch, ch.first : ch.first + ch.rows].transpose(0, 1), (0, 0, 0, 64 - ch.rows)
                )
                for a in (q, k, decays, beta[..., None])
            )
            sums = gc.cumsum(1)
            between = (sums[:, :, None] - sums[:, None]).masked_fill(~lower[None, :, :, None], -math.inf).exp2()
            factors = (self.scale * qc * sums.exp2(), -kc * sums.exp2(), kc * (sums[:, -1:] - sums).exp2())
            aqk = self.scale * torch.einsum("hid,hjd,hijd->hij", qc, kc, between)
            products = torch.einsum("hid,hjd,hijd->hij", kc, kc, between).tril(-1) * bc
            made = (torch.stack(factors, 1), torch.stack((aqk, products), 1), sums[:, -1].exp2(), bc[..., 0])
            for o, m in zip(out, made, strict=True):
                o[ch.slot] = m
        factors, scores, decay, beta = (torch.stack(o) for o in out)
        return factors, scores, (decay, beta), chunks, slots

    def run(self, **options: Any) -> ptxemu.Launched:
        x, c = self.inputs, self.config
        slots, hv, dim = self.given["dgi"].shape[0], *x["g"].shape[2:]
        rows = torch.full((*x["q"].shape[:2], hv, dim), NAN) if c.grouped else torch.full_like(x["q"].contiguous(), NAN)
        self.out = {
            "q": rows, "k": rows.clone(), "g": torch.full_like(x["g"].contiguous(), NAN),
            "beta": torch.full_like(x["beta"].contiguous(), NAN),
        }  # fmt: skip
        if c.a_log:
            self.out["a_log"] = torch.full((slots, hv), NAN)
        if c.dt_bias:
            self.out["dt_bias"] = torch.full((slots, hv, dim), NAN)
        args = [x.get(n) for n in ("q", "k", "g", "beta", "a_log", "dt_bias", "cu_seqlens")]
        outs = [self.out.get(n) for n in ("q", "k", "g", "beta", "a_log", "dt_bias")]
        (launched,) = ptxemu.run(
            _compiled(c), *args, *self.given.values(), *outs, self.scale, self.lower_bound, self.beta_limit, **options
        )
        return launched

    def errors(self) -> dict[str, float]:
        """Relative errors of all outputs, beyond what is below fp16's smallest number; infinite where they hold NaN."""
        found = {}
        floor = 2.0**-25 if self.inputs["q"].dtype == torch.float16 else 1e-30
        for name, out in self.out.items():
            got, want = out.double(), self.expected[name]
            if name in ("q", "k") and self.config.grouped:
                got = got.unflatten(2, (want.shape[2], -1)).sum(3)
            if name in ("a_log", "dt_bias"):
                got = got.sum(0).flatten()
            error, size = ((x.square().mean().sqrt().item()) for x in (got - want, want))
            found[name] = max(error - floor, 0.0) / max(size, floor) if error == error else math.inf
        return found

    def bits(self) -> list[bytes]:
        return [t.view(torch.uint8).numpy().tobytes() for t in self.out.values()]


def make(
    *,
    dtype: torch.dtype = torch.bfloat16,
    key_dim: int = 128,
    gate: str = "softplus",
    gate_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype = torch.float32,
    batch: int = 1,
    tokens: int = 64,
    heads: int = 1,
    value_heads: int | None = None,
    a_log: bool | None = None,
    dt_bias: bool | None = None,
    bounds: list[int] | None = None,
    bounds_dtype: torch.dtype = torch.int32,
    l2norm: bool = True,
    beta_sigmoid: bool = False,
    beta_limit: float = 1.0,
    lower_bound: float = -5.0,
    strided: bool = False,
    seed: int = 0,
    change: Any = None,
) -> Case:
    """`change`: a function that changes the inputs, by name."""
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("the CuTe DSL is not installed: pip install 'deltafuse[emulator]'")
    ptxemu.setup("sm_90a")
    from deltafuse.kernels.config import IntraConfig

    name = lambda t: str(t).removeprefix("torch.")  # noqa: E731
    hv = value_heads or heads
    gate_dtype = gate_dtype or dtype
    r = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 1.0, to: torch.dtype = dtype) -> torch.Tensor:
        x = (torch.randn(shape, generator=r) * size).to(to)
        if strided:
            # Rows and heads with others' numbers in between.
            wide = torch.full((*shape[:-2], shape[-2] + 1, shape[-1] + 8), NAN, dtype=to)
            wide[..., : shape[-2], : shape[-1]] = x
            x = wide[..., : shape[-2], : shape[-1]]
        return x

    size = 1.0 if l2norm else key_dim**-0.5
    x = {
        "q": normal(batch, tokens, heads, key_dim, size=size),
        "k": normal(batch, tokens, heads, key_dim, size=size),
        "g": normal(batch, tokens, hv, key_dim, to=gate_dtype),
        "beta": normal(batch, tokens, hv, to=beta_dtype),
    }
    if gate == "log":
        x["g"] = (-0.5 * torch.rand(x["g"].shape, generator=r)).to(gate_dtype)
    if not beta_sigmoid:
        x["beta"] = torch.rand(x["beta"].shape, generator=r).to(beta_dtype)
    with_a = gate != "log" if a_log is None else a_log
    with_bias = gate != "log" if dt_bias is None else dt_bias
    if with_a:
        x["a_log"] = torch.rand(hv, generator=r) * 2 - 2
    if with_bias:
        x["dt_bias"] = torch.randn(hv * key_dim, generator=r) * 0.5
    if bounds is not None:
        x["cu_seqlens"] = torch.tensor(bounds, dtype=bounds_dtype)
    if change is not None:
        change(x)
    config = IntraConfig(
        dtype=name(dtype), key_dim=key_dim, gate=gate, gate_dtype=name(gate_dtype), beta_dtype=name(beta_dtype), a_log=with_a,
        dt_bias=with_bias, l2norm=l2norm, beta_sigmoid=beta_sigmoid, cu_seqlens="" if bounds is None else name(bounds_dtype),
        grouped=hv != heads,
    )  # fmt: skip
    case = Case(config, x, key_dim**-0.5, lower_bound, beta_limit, bounds)
    case.prepare(r)
    return case


def check(case: Case, within: float | None = None) -> None:
    case.run()
    within = within or WITHIN[case.inputs["q"].dtype]
    errors = case.errors()
    assert max(errors.values()) < within, errors
    if case.inputs["q"].dtype == torch.bfloat16:
        assert errors["q"] < 1.5 * ONCE, errors
        assert errors["k"] < 1.25 * ONCE, errors


CASES: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "fp16": dict(dtype=torch.float16, beta_sigmoid=True),
    "two chunks and a tail": dict(key_dim=64, tokens=150, batch=2),
    "last row alone": dict(tokens=65),
    "fewer rows than a block": dict(key_dim=64, tokens=5),
    "groups": dict(key_dim=64, heads=2, value_heads=4, tokens=70),
    "groups, fp16": dict(dtype=torch.float16, heads=1, value_heads=2, l2norm=False),
    "log gate": dict(gate="log", l2norm=False, gate_dtype=torch.float32, beta_dtype=torch.bfloat16),
    "log gate, K 64": dict(gate="log", key_dim=64, gate_dtype=torch.bfloat16, tokens=40),
    "bounded gate": dict(gate="bounded", tokens=100, beta_sigmoid=True),
    "bounded gate without parameters": dict(gate="bounded", a_log=False, dt_bias=False, key_dim=64),
    "softplus gate without a bias": dict(dt_bias=False, key_dim=64, gate_dtype=torch.float32),
    "negative eigenvalues": dict(beta_sigmoid=True, beta_limit=2.0, beta_dtype=torch.bfloat16, key_dim=64),
    "fp16 beta, fp16 gate": dict(dtype=torch.float16, beta_dtype=torch.float16, key_dim=64, tokens=33),
    "packed": dict(bounds=[0, 0, 1, 1, 70, 200, 200], tokens=200, key_dim=64, beta_sigmoid=True),
    "packed, long bounds": dict(bounds=[0, 64, 129], bounds_dtype=torch.int64, tokens=129, gate="log", key_dim=64),
    "strided": dict(strided=True, tokens=65, batch=2, key_dim=64),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    check(make(**CASES[name]))


def _fill(value: float) -> Any:
    return lambda x: x["g"].fill_(value)


def _rows(value: float) -> Any:
    """Single rows, and columns of a row, in blocks that fit otherwise."""

    def change(x: dict[str, torch.Tensor]) -> None:
        x["g"][:, 5] = x["g"][:, 37] = value
        x["g"][:, 38, :, :7] = value

    return change


def _growing(x: dict[str, torch.Tensor]) -> None:
    x["g"].copy_(0.3 * torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(1)) - 0.1)


GATES: dict[str, dict[str, Any]] = {
    "-20": dict(gate="log", change=_fill(-20.0)),
    "-1000": dict(gate="log", change=_fill(-1000.0)),
    "rows of -20": dict(gate="log", change=_rows(-20.0)),
    "rows of -1000": dict(gate="log", change=_rows(-1000.0)),
    # Not A_log: its gradient is one number, which may cancel almost to nothing.
    "bounded": dict(gate="bounded", a_log=False),
    "-5 by the bound": dict(gate="bounded", change=_fill(30.0)),
    "saturated softplus": dict(change=_fill(-60.0)),
    "large softplus": dict(change=_rows(60.0)),
    "growing": dict(gate="log", change=_growing, gate_dtype=torch.float32),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GATES)
def test_gates(name: str, dtype: torch.dtype) -> None:
    case = make(**{"key_dim": 64, "dtype": dtype, **GATES[name]})
    check(case)


def test_slots_of_no_sequence() -> None:
    """Their partial sums are zeros; nothing else is made for them."""
    case = make(bounds=[0, 3, 3, 6], tokens=6, key_dim=64)
    check(case)
    _, chunks = kda_model.chunks_of(1, 6, case.bounds)
    unused = sorted(set(range(case.given["dgi"].shape[0])) - {c.slot for c in chunks})
    assert unused
    assert all((case.out[n][unused] == 0).all() for n in ("a_log", "dt_bias"))


@pytest.mark.parametrize("change", [None, _rows(-1000.0)])
def test_schedules_give_the_same_bits(change: Any) -> None:
    case = make(tokens=70, gate="log" if change else "softplus", change=change, a_log=False if change else None)
    case.run()
    bits = case.bits()
    for options in (dict(seed=1, shuffle=True), dict(seed=2, shuffle=True, quantum=17), dict(seed=3, eager=True)):
        case.run(**options)
        assert case.bits() == bits, options
