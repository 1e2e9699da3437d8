"""The backward pass of KDA between chunks and their states: every variant against float64, under many schedules."""

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
from deltafuse.kernels.config import InterConfig

NAN = math.nan
WITHIN = {torch.bfloat16: 5e-3, torch.float16: 8e-4}
"""Of relative errors (root of mean squares): rounding to the type of R, v' and the outputs, and a margin."""
PACKED = (1, 130, 0, 64, 65, 0, 70, 63)


@cache
def kernel(config: InterConfig) -> Any:
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("the CuTe DSL is not installed: pip install 'deltafuse[emulator]'")
    ptxemu.setup("sm_90a")
    from deltafuse.kernels.sm90 import kda_inter

    return kda_inter.compile(config)


@dataclass(frozen=True)
class Problem:
    """Sequences (`lengths`, packed or all of one length), value heads, columns of V; NaN in v and do behind packed sequences' ends."""

    lengths: tuple[int, ...]
    heads: int = 1
    value_dim: int = 128
    config: InterConfig = field(default_factory=InterConfig)
    ctas: int = 2
    seed: int = 0


class Run:
    """A problem's operands, random and NaN where nobody writes them, and its outputs, NaN before."""

    def __init__(self, p: Problem) -> None:
        self.p, k, v = p, p.config.key_dim, p.value_dim
        io = getattr(torch, p.config.dtype)
        random = torch.Generator().manual_seed(p.seed)
        packed = p.config.cu_seqlens != ""
        bounds = torch.tensor((0, *p.lengths)).cumsum(0)
        batch, tokens = (1, sum(p.lengths)) if packed else (len(p.lengths), p.lengths[0])
        slots, self.chunks = kda_model.chunks_of(batch, tokens, bounds.tolist() if packed else None)
        self.cu = bounds.to(getattr(torch, p.config.cu_seqlens)) if packed else None

        def normal(size: float, *shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64) * size

        per = (slots, p.heads)
        self.factors = {n: normal(0.1, *per, 64, k) for n in ("kd", "qg", "kg")}
        self.m, self.y = normal(0.1, *per, 64, 64).tril(), normal(0.2, *per, 64, v)
        self.decay, self.beta = (torch.rand(*per, n, generator=random) for n in (k, 64))
        self.hs, self.dhs = (normal(0.3, *per, v, k) for _ in range(2))
        # Rows of more columns than are used: strides that are no sizes.
        self.v, self.do = (normal(1.0, batch, tokens, p.heads, v + 8).to(io)[..., :v] for _ in range(2))
        unused = torch.ones(slots, dtype=torch.bool)
        for c in self.chunks:
            unused[c.slot] = False
            for x in (*self.factors.values(), self.m, self.y, self.beta):
                x[c.slot, :, c.rows :] = 0
            self.m[c.slot, :, :, c.rows :] = 0
        for x in (*self.factors.values(), self.m, self.y, self.hs, self.dhs, self.decay, self.beta):
            x[unused] = NAN
        self.factors = {n: x.to(io) for n, x in self.factors.items()}
        self.m, self.y, self.hs, self.dhs = (x.to(io) for x in (self.m, self.y, self.hs, self.dhs))
        scores = torch.full((*per, 3, 64, 64), NAN, dtype=io)
        scores[:, :, 2] = kda_model.image(self.m)[:, :, 0]
        factors = kda_model.image(torch.stack(list(self.factors.values()), 2))
        self.given = (factors, scores, self.decay, self.beta, self.hs, self.dhs, self.v, self.do, self.y, self.cu)
        self.out = {
            "dfactors": torch.empty(*per, 3, 64, k, dtype=io), "dscores": torch.empty(*per, 2, 64, 64, dtype=io),
            "dgi": torch.empty(*per, 64, k), "direct": torch.empty(*per, 1 + k // 64, 64),
        }  # fmt: skip

    def launch(self, **options: Any) -> ptxemu.Launched:
        for x in self.out.values():
            x.fill_(NAN)
        args = (*self.given, *self.out.values(), self.p.ctas)
        (launched,) = ptxemu.run(kernel(self.p.config), *args, **options)
        assert not launched.notes
        return launched

    def results(self) -> dict[str, torch.Tensor]:
        direct = self.out["direct"].double()
        out = {"dgi": self.out["dgi"].double(), "direct": direct[:, :, 0], "along": direct[:, :, 1:].sum(2)}
        for i, n in enumerate(("dqg", "dkd", "dkg")):
            out[n] = self.out["dfactors"][:, :, i].double()
        for i, n in enumerate(("dA", "dL")):
            out[n] = kda_model.matrix(self.out["dscores"][:, :, i, None]).double()
        return out

    def expected(self) -> dict[str, torch.Tensor]:
        """The equations in float64; NaN where nothing is to be written."""
        out = {n: torch.full_like(x, NAN) for n, x in self.results().items()}
        for c in self.chunks:
            kd, qg, kg = (x[c.slot].double() for x in self.factors.values())
            m, y, s, ds = (x[c.slot].double() for x in (self.m, self.y, self.hs, self.dhs))
            v, do = (
                torch.nn.functional.pad(
                    x[c.batch, c.first : c.first + c.rows].double().transpose(0, 1), (0, 0, 0, 64 - c.rows)
                )
                for x in (self.v, self.do)
            )
            r = v + kd @ s.mT
            beta = self.beta[c.slot].double()[..., None]
            new = m @ (beta * r)
            dqg, dkd, dkg = do @ s, beta * (y @ s), new @ ds
            dgi = qg * dqg + kd * dkd - kg * dkg
            dgi[:, c.rows - 1] += (kg * dkg).sum(1) + self.decay[c.slot].double() * (s * ds).sum(1)
            made = {
                "dgi": dgi, "direct": (y * r).sum(-1), "dqg": dqg, "dkd": dkd, "dkg": dkg,
                "dA": (do @ new.mT).tril(), "dL": -(y @ new.mT).tril(-1),
                "along": (y * (2 * new - beta * r)).sum(-1) + (kd * dkd).sum(-1),
            }  # fmt: skip
            for n, x in made.items():
                out[n][c.slot] = x
        return out

    def check(self) -> dict[str, float]:
        expected, errors = self.expected(), {}
        for n, x in self.results().items():
            e = expected[n]
            assert torch.equal(x.isnan(), e.isnan()), f"{n}: written where it must not be, or not written"
            for c in self.chunks:
                assert not x[c.slot, :, c.rows :].any(), f"{n}: not zero behind the end"
            errors[n] = ((x - e).nan_to_num().norm() / e.nan_to_num().norm().clamp_min(1e-30)).item()
            # Sums of fp32 that are not rounded again.
            within = WITHIN[self.y.dtype] / (2 if n in ("dgi", "direct", "along") else 1)
            assert errors[n] < within, (n, errors[n])
        zero = self.results()["dA"].triu(1).nan_to_num(), self.results()["dL"].triu().nan_to_num()
        assert not any(x.any() for x in zero)
        return errors

    def bits(self) -> dict[str, bytes]:
        return {n: x.view(torch.uint8).numpy().tobytes() for n, x in self.out.items()}


def config(**options: Any) -> InterConfig:
    return InterConfig(**options)


CASES = {
    "one chunk": Problem((64,)),
    "chunks": Problem((192,), 2),
    "a CTA a chunk": Problem((128,), 1, ctas=7),
    "V 256": Problem((128,), 1, 256),
    "V 512": Problem((64,), 1, 512),
    "tile 64": Problem((192,), 1, 64, config(tile=64)),
    "tile 64, V 192": Problem((128,), 1, 192, config(tile=64)),
    "K 64": Problem((192,), 2, 128, config(key_dim=64)),
    "K 64, V 256": Problem((128,), 1, 256, config(key_dim=64), ctas=1),
    "K 64, tile 64": Problem((320,), 1, 64, config(key_dim=64, tile=64), ctas=1),
    "K 64, tile 64, V 192": Problem((192,), 1, 192, config(key_dim=64, tile=64), ctas=1),
    "fp16": Problem((192,), 1, 128, config(dtype="float16")),
    "fp16, K 64": Problem((100,), 1, 64, config(dtype="float16", key_dim=64, tile=64)),
    "tail": Problem((100, 100), 1),
    "tail, one token": Problem((1,), 8),
    "tail, K 64": Problem((65, 65), 1, 128, config(key_dim=64)),
    "packed": Problem(PACKED, 2, 128, config(cu_seqlens="int64")),
    "packed, V 256": Problem((30, 100), 1, 256, config(cu_seqlens="int32"), ctas=1),
    "packed, tile 64": Problem(PACKED, 1, 64, config(tile=64, cu_seqlens="int32")),
    "packed, K 64": Problem(PACKED, 1, 128, config(key_dim=64, cu_seqlens="int64")),
    "packed, K 64, tile 64": Problem(PACKED, 1, 64, config(key_dim=64, tile=64, cu_seqlens="int32")),
}


@pytest.mark.parametrize("name", CASES)
def test_result(name: str) -> None:
    run = Run(CASES[name])
    run.launch(seed=len(name), shuffle=True)
    run.check()


SCHEDULES = [dict(seed=s, shuffle=True) for s in (1, 2, 3)] + [
    dict(seed=4, eager=True),
    dict(seed=5, shuffle=True, quantum=17),
]


@pytest.mark.parametrize("name", ["chunks", "V 256", "tile 64, V 192", "K 64, tile 64", "packed"])
def test_schedules_give_the_same_bits(name: str) -> None:
    run = Run(CASES[name])
    run.launch()
    bits = run.bits()
    for options in SCHEDULES:
        run.launch(**options)
        assert run.bits() == bits, options


def test_number_of_ctas_changes_no_bit() -> None:
    bits = []
    for ctas in (1, 2, 5):
        run = Run(Problem((150,), 2, 128, ctas=ctas))
        run.launch()
        bits.append(run.bits())
    assert bits[1:] == bits[:-1]


@pytest.mark.parametrize("options", [dict(), dict(tile=64), dict(key_dim=64)])
def test_neighbours_do_not_matter(options: dict[str, Any]) -> None:
    """Sequences beside one change no bit of its outputs, whatever their values are."""
    run = Run(Problem((30, 100, 50), 1, 128, config(cu_seqlens="int64", **options)))
    run.launch()
    mine = [c.slot for c in run.chunks if c.sequence == 1]
    before = {n: x[mine].clone() for n, x in run.out.items()}
    for x in (run.v, run.do):
        x[:, :30] = NAN
        x[:, 130:] = math.inf
    run.launch()
    for n, x in run.out.items():
        assert torch.equal(x[mine], before[n]), n


def test_ordinary_call() -> None:
    run = Run(Problem((100, 100), 2, 128, ctas=3))
    compiled = kernel(run.p.config)
    for x in run.out.values():
        x.fill_(NAN)
    with ptxemu.emulate("sm_90a") as launches:
        compiled(*run.given, *run.out.values(), 3)
    assert [(x.grid, x.block) for x in launches] == [((3, 1, 1), (384, 1, 1))]
    run.check()
