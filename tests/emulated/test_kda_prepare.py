"""KDA's prepare kernel against float64: every kind of input, gates that do not fit, causality to the bit, schedules."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import kda_model
import pytest
import torch

import ptxemu

NAN = math.nan
WITHIN = {torch.bfloat16: 3.5e-3, torch.float16: 6e-4}
"""Of relative errors (root of mean squares): what rounding inputs and outputs to the type makes unavoidable, and a margin."""


@cache
def _compiled(config: Any, arch: str) -> Any:
    """The kernel for an architecture, which `ptxemu.setup` has chosen."""
    from deltafuse.kernels.warp import kda_prepare

    return kda_prepare.compile(config)


@dataclass
class Case:
    """Inputs of a call, and its outputs filled with NaN."""

    config: Any
    inputs: dict[str, torch.Tensor]
    scale: float
    lower_bound: float
    beta_limit: float
    bounds: list[int] | None
    arch: str = "sm_90a"
    out: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self, **options: Any) -> ptxemu.Launched:
        x = self.inputs
        slots, _ = kda_model.chunks_of(x["q"].shape[0], x["q"].shape[1], self.bounds)
        io, (_, _, hv, dim) = x["q"].dtype, x["g"].shape
        self.out = {
            "factors": torch.full((slots, hv, 3, dim // 64, 64, 64), NAN, dtype=io),
            "scores": torch.full((slots, hv, 3 if self.config.inverse else 2, 64, 64), NAN, dtype=io),
            "decay": torch.full((slots, hv, dim), NAN),
        }
        if self.config.inverse:
            self.out["beta"] = torch.full((slots, hv, 64), NAN)
        if self.config.bound:
            self.out["bound"] = torch.full((slots, hv), NAN)
            # More units than there are slots: packed sequences may be that many.
            self.out["early"] = torch.full((2 * slots + 1, hv), -9, dtype=torch.int32)
        args = [x.get(n) for n in ("q", "k", "g", "beta", "a_log", "dt_bias", "cu_seqlens")]
        (launched,) = ptxemu.run(
            _compiled(self.config, self.arch),
            *args,
            *(self.out.get(n) for n in ("factors", "scores", "decay", "beta", "bound", "early")),
            self.scale,
            self.lower_bound,
            self.beta_limit,
            **options,
        )
        if self.config.bound:
            assert (self.out["early"] == kda_model.UNDECIDED).all()
        return launched

    def expected(self) -> kda_model.Prepared:
        x, c = self.inputs, self.config
        return kda_model.prepare_model(
            x["q"], x["k"], x["g"], x["beta"], gate=c.gate, a_log=x.get("a_log"), dt_bias=x.get("dt_bias"), bounds=self.bounds,
            scale=self.scale, lower_bound=self.lower_bound, beta_limit=self.beta_limit, l2norm=c.l2norm, beta_sigmoid=c.beta_sigmoid,
        )  # fmt: skip

    def matrices(self) -> dict[str, torch.Tensor]:
        """kd, qg, kg, m, aqk, decay and, where they are outputs, inverse and beta as the model has them."""
        strips, scores, factors = self.config.strips, self.out["scores"], self.out["factors"]
        if strips:
            # Rows behind the live blocks are zeros, which nobody has written.
            factors = factors.clone()
            views, behind = kda_model.rows_behind(factors, kda_model.live_blocks(scores))
            for x in views:
                assert x[behind].isnan().all()
                x[behind] = 0
        rows = kda_model.matrix(factors)
        scores = kda_model.from_strips(scores) if strips else kda_model.matrix(scores.unsqueeze(-3))
        names = ("m", "aqk", "inverse")[: scores.shape[2]]
        return {
            **{n: rows[:, :, i] for i, n in enumerate(("kd", "qg", "kg"))},
            **{n: scores[:, :, i] for i, n in enumerate(names)},
            **{n: self.out[n] for n in ("decay", "beta") if n in self.out},
        }

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
    inverse: bool = False,
    bound: bool = False,
    strips: bool = False,
    arch: str = "sm_90a",
    seed: int = 0,
) -> Case:
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("the CuTe DSL is not installed: pip install 'deltafuse[emulator]'")
    ptxemu.setup(arch)
    from deltafuse.kernels.config import PrepareConfig

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
    config = PrepareConfig(
        dtype=name(dtype), key_dim=key_dim, gate=gate, gate_dtype=name(gate_dtype), beta_dtype=name(beta_dtype), a_log=with_a,
        dt_bias=with_bias, l2norm=l2norm, beta_sigmoid=beta_sigmoid, cu_seqlens="" if bounds is None else name(bounds_dtype),
        inverse=inverse, bound=bound, strips=strips,
    )  # fmt: skip
    return Case(config, x, key_dim**-0.5, lower_bound, beta_limit, bounds, arch)


def check(case: Case, within: float | None = None) -> None:
    """Every output against the model; zeros where they are exact; slots of no sequence untouched."""
    case.run()
    expected, got = case.expected(), case.matrices()
    dtype = case.inputs["q"].dtype
    within = within or WITHIN[dtype]
    floor = 2.0**-25 if dtype == torch.float16 else 1e-30
    used = [c.slot for c in expected.chunks]
    for name, x in got.items():
        e = getattr(expected, name)
        free = torch.ones(len(x), dtype=torch.bool)
        free[used] = False
        assert x[free].isnan().all(), name
        x, e = x[used].double(), e[used]
        assert x.isfinite().all(), name
        limit = 1e-4 if name in ("decay", "beta") else within
        assert (x - e).square().mean().sqrt() <= limit * e.square().mean().sqrt() + floor, (
            name,
            ((x - e).norm() / e.norm()).item(),
        )
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    for c in expected.chunks:
        for name in {"m", "aqk", "inverse"} & set(got):
            x = got[name][c.slot]
            assert (x[:, above] == 0).all(), name
            assert (x[:, c.rows :] == 0).all(), name
            assert (x[:, :, c.rows :] == 0).all(), name
        for name in ("kd", "qg", "kg"):
            assert (got[name][c.slot][:, c.rows :] == 0).all(), name


KINDS: dict[str, dict[str, Any]] = {
    "softplus": dict(beta_sigmoid=True),
    "softplus, fp16": dict(dtype=torch.float16, beta_sigmoid=True, beta_dtype=torch.float16),
    "softplus, K 64": dict(key_dim=64, tokens=128),
    "softplus, fp16, K 64": dict(key_dim=64, dtype=torch.float16, gate_dtype=torch.float32),
    "log": dict(gate="log", l2norm=False, tokens=90),
    "log, fp32, negative eigenvalues": dict(
        gate="log", gate_dtype=torch.float32, beta_sigmoid=True, beta_limit=2.0, beta_dtype=torch.bfloat16
    ),
    "log, fp32, K 64": dict(gate="log", gate_dtype=torch.float32, key_dim=64),
    "bounded": dict(gate="bounded", beta_dtype=torch.bfloat16),
    "bounded, no A_log, no dt_bias": dict(gate="bounded", a_log=False, dt_bias=False, gate_dtype=torch.float32),
    "softplus, no dt_bias": dict(dt_bias=False, gate_dtype=torch.float16),
    "several batches and heads": dict(batch=2, tokens=130, heads=2, seed=3),
    "grouped value heads": dict(heads=2, value_heads=6, tokens=70),
    "one token": dict(tokens=1),
    "Blackwell": dict(arch="sm_100a", beta_sigmoid=True, tokens=100),
    "Blackwell, fp16": dict(arch="sm_100a", dtype=torch.float16, tokens=100),
    "strided": dict(strided=True, tokens=100, heads=2, value_heads=4, beta_sigmoid=True),
    "inverse": dict(inverse=True, tokens=100, heads=2, beta_sigmoid=True, beta_dtype=torch.bfloat16),
    "inverse, fp16, K 64": dict(
        inverse=True, tokens=70, heads=2, value_heads=4, key_dim=64, dtype=torch.float16, beta_sigmoid=True, beta_limit=2.0
    ),
    "inverse, Blackwell": dict(inverse=True, tokens=30, gate="log", arch="sm_100a"),
    "strided, K 64": dict(strided=True, tokens=100, key_dim=64, gate="log", gate_dtype=torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    check(make(**KINDS[kind]))


@pytest.mark.parametrize("kind", [kind for kind, options in KINDS.items() if "inverse" not in options])
def test_strips(kind: str) -> None:
    """The scores as strips: bit for bit those of the panels."""
    panels, strips = make(**KINDS[kind]), make(**KINDS[kind], strips=True)
    check(strips)
    panels.run()
    for name, x in panels.matrices().items():
        assert torch.equal(x, strips.matrices()[name]), name


DECAYING = {
    "none decays": (-0.1, {}, 4),
    "three": (-1.2, {}, 3),
    "two": (-2.5, {}, 2),
    "one": (-5.0, {}, 1),
    "all but a column": (-5.0, {77: -0.1}, 4),
    "a column less": (-5.0, {0: -1.2}, 3),
    "no number": (-5.0, {5: NAN}, 4),
}
"""Natural logarithms of decays, single columns' own ones, how many blocks of 16 rows are live: 67 ln 2 = 46.4 have to be behind them."""


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("kind", DECAYING)
def test_rows_that_have_decayed_are_not_written(kind: str, key_dim: int) -> None:
    decay, columns, live = DECAYING[kind]
    case = make(gate="log", gate_dtype=torch.float32, tokens=64 * 2 + 50, key_dim=key_dim, strips=True)
    g = case.inputs["g"].fill_(decay)
    for column, own in columns.items():
        g[:, 64:, :, column % key_dim] = own
    case.run()
    other = live if not columns else 1
    assert kda_model.live_blocks(case.out["scores"])[:, 0].tolist() == [other, live, live]
    assert case.matrices()["kd"].shape[-1] == key_dim


def test_rows_that_come_back_are_written() -> None:
    """Decay, then growth: the rows from the last block on that has any are zeros, not those before it."""
    case = make(gate="log", gate_dtype=torch.float32, tokens=64, strips=True)
    g = case.inputs["g"].fill_(0.0)
    g[:, :16] = -5.0
    g[:, 16:32, :, 9] = 3.0
    g[:, 32:] = -3.0
    case.run()
    # Behind 80, 32 in column 9, and 80.
    assert kda_model.live_blocks(case.out["scores"]).tolist() == [[3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "bounds", [[0, 100], [0, 0, 1, 1, 65, 193, 194, 194], [0, 64, 128, 200], [0, *range(1, 41), 150]], ids=str
)
def test_packed(bounds: list[int], dtype: torch.dtype) -> None:
    check(make(tokens=bounds[-1], bounds=bounds, bounds_dtype=dtype, key_dim=64))


def strong(kind: str, dtype: torch.dtype, tokens: int = 64, key_dim: int = 64) -> Case:
    """Log gates that reach far beyond what a block's rows can share, on ordinary ones."""
    case = make(dtype=dtype, gate="log", gate_dtype=torch.float32, tokens=tokens, key_dim=key_dim, seed=7)
    g = case.inputs["g"]
    if kind == "all -20":
        g.fill_(-20.0)
    elif kind == "all -1000":
        g.fill_(-1000.0)
    elif kind == "single rows of -1000":
        g[:, [3, 16, 31, 40, 41, 63]] = -1000.0
    elif kind == "single columns":
        g[:, 20:30, :, 5] = -100.0
        g[:, 50:, :, 33] = -30.0
    elif kind == "just fits":
        g[:, :16] = -119.9 / 16 * math.log(2)
        g[:, 32:48] = -120.1 / 16 * math.log(2)
    elif kind == "growing":
        g += 0.3
    return case


STRONG = ["all -20", "all -1000", "single rows of -1000", "single columns", "just fits", "growing"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", STRONG)
def test_strong_gates(kind: str, dtype: torch.dtype) -> None:
    case = strong(kind, dtype)
    # Growing gates make L and so the inverse large: its relative error grows along.
    check(case, 2 * WITHIN[dtype] if kind == "growing" else None)
    if kind == "growing":
        return
    # Entries that a strong gate leaves alone are as good as others: one by one, not only in the mean of all. |q| = |k| = 1.
    error = (case.matrices()["aqk"][0] - case.expected().aqk[0]).abs().max()
    assert error < WITHIN[dtype] * case.scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bounded_at_its_bound(dtype: torch.dtype) -> None:
    case = make(dtype=dtype, gate="bounded", gate_dtype=torch.float32)
    case.inputs["g"].fill_(1000.0)
    check(case)


def test_small_gates_keep_their_digits() -> None:
    """softplus(-10) = 4.54e-5: 64 tokens of it decay by 0.3 %, which shows in the last digits of fp32 alone."""
    case = make(gate="softplus", gate_dtype=torch.float32, a_log=False, dt_bias=False)
    case.inputs["g"].copy_(torch.linspace(-14, -3, 128).expand(1, 64, 1, 128))
    case.run()
    got, expected = 1 - case.out["decay"].double(), 1 - case.expected().decay
    # fp32's spacing below 1 is 6e-8.
    assert ((got - expected).abs() < 1e-4 * expected + 1.5e-7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_inverse(dtype: torch.dtype) -> None:
    """Long keys that resemble each other with beta near 2: elements of M' grow far beyond 1."""
    case = make(
        dtype=dtype, gate="log", gate_dtype=torch.float32, key_dim=64, beta_sigmoid=True, beta_limit=2.0, l2norm=False
    )
    case.inputs["g"].mul_(0.01)
    source = torch.Generator().manual_seed(1)
    base = torch.randn(64, generator=source)
    keys = base / base.norm() + 0.1 * torch.randn(case.inputs["k"].shape, generator=source)
    case.inputs["k"].copy_(keys.to(dtype))
    case.inputs["beta"].fill_(4.0)
    case.run()
    m = case.matrices()["m"][0, 0].double()
    # The inverse itself: of the L that the kernel must have had, to the rounding of M'; L is read back from M'.
    beta = torch.sigmoid(torch.tensor(4.0, dtype=torch.float64)) * 2
    assert m.isfinite().all()
    e = case.expected().m[0, 0]
    assert e.abs().max() > beta
    assert (m - e).norm() < 20 * WITHIN[dtype] * e.norm()


@pytest.mark.parametrize("kind", ["softplus", "log", "all -20", "single rows of -1000"])
@pytest.mark.parametrize("last", [9, 30, 63])
def test_no_later_token_changes_a_bit(kind: str, last: int) -> None:
    """The last token of a chunk, or what lies behind its end, is changed: earlier rows of qg, kd, M', Aqk stay to the bit."""
    case = strong(kind, torch.bfloat16) if kind in STRONG else make(gate=kind, tokens=64, key_dim=64)
    case.run()
    before = case.matrices()
    for name, value in (("q", 3.0), ("k", -2.0), ("g", -150.0), ("beta", 0.9)):
        case.inputs[name][:, last:] = value
    case.run()
    after = case.matrices()
    for name in ("qg", "kd", "m", "aqk"):
        a, b = (x[name][:, :, :last].contiguous().view(torch.int16) for x in (before, after))
        assert torch.equal(a, b), name
    assert not torch.equal(before["aqk"][:, :, last:], after["aqk"][:, :, last:])


def test_rows_behind_the_end_are_not_read() -> None:
    """Neighbouring sequences' numbers, NaN even, do not reach a tail chunk."""
    case = make(tokens=200, bounds=[0, 70, 200], key_dim=64)
    case.run()
    first = [x[:2] for x in case.matrices().values()]
    for name in ("q", "k", "g", "beta"):
        case.inputs[name][:, 70:] = NAN
    case.run()
    for a, b in zip(first, case.matrices().values(), strict=True):
        assert torch.equal(a, b[:2])
        assert a.isfinite().all()


def test_schedules_give_the_same_bits() -> None:
    for case in (make(tokens=100), strong("single columns", torch.float16)):
        case.run()
        bits = case.bits()
        for seed in range(1, 5):
            launched = case.run(seed=seed, shuffle=True)
            assert case.bits() == bits, seed
            assert not launched.notes
        assert launched.block == (256, 1, 1)


@pytest.mark.parametrize("which", range(13))
def test_no_barrier_is_idle(which: int) -> None:
    """Without any one of the barriers, of the CTA, of half of it or of two warps, the kernel has a race, which the emulator reports."""
    pattern = re.compile(r"^\s*(@\S+\s+)?bar\.sync\s[^;]*;", re.MULTILINE)
    case = make(tokens=64, key_dim=64, bound=True, strips=True)

    def without(ptx: str) -> str:
        found = list(pattern.finditer(ptx))
        assert len(found) == 13
        return ptx[: found[which].start()] + ptx[found[which].end() :]

    with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault)):
        case.run(edit=without)
