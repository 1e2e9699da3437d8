"""The Hopper kernel of KDA's serial backward pass: every variant against float64, under many schedules."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from kda_model import CHUNK, Chunk, chunks_of, image

import ptxemu
from deltafuse.kernels.config import ReverseConfig

WITHIN = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FULL = 2**31 - 1
NAN = float("nan")


@cache
def kernel(config: ReverseConfig) -> Any:
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("the CuTe DSL is not installed: pip install 'deltafuse[emulator]'")
    ptxemu.setup("sm_90a")
    from deltafuse.kernels.sm90 import kda_reverse

    return kda_reverse.compile(config)


@dataclass(frozen=True)
class Problem:
    """Sequences (`lengths`, packed or all of one length), value heads, columns of V."""

    lengths: tuple[int, ...]
    heads: int = 1
    value_dim: int = 64
    packed: bool = False
    config: ReverseConfig = field(default_factory=lambda: ReverseConfig(final=True))
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.dtype]

    @property
    def shape(self) -> tuple[int, int]:
        return (1, sum(self.lengths)) if self.packed else (len(self.lengths), self.lengths[0])

    def chunks(self) -> tuple[int, list[Chunk]]:
        bounds = torch.tensor((0, *self.lengths)).cumsum(0).tolist() if self.packed else None
        return chunks_of(*self.shape, bounds)

    def columns(self) -> int:
        return self.config.key_dim if self.config.transition else self.value_dim


class Operands:
    """What the prepare kernel hands over, as matrices and as the workspace; NaN where it writes nothing and where nothing is to be read."""

    def __init__(self, p: Problem) -> None:
        g = torch.Generator().manual_seed(p.seed)
        slots, chunks = p.chunks()
        shape, k = (slots, p.heads), p.config.key_dim

        def normal(size: float, *more: int) -> torch.Tensor:
            return (torch.randn(*shape, *more, generator=g) * size).to(p.dtype)

        self.kd, self.qg, self.kg = normal(0.05, CHUNK, k), normal(0.05, CHUNK, k), normal(0.1, CHUNK, k)
        self.m, self.a = (x.tril() for x in (normal(0.1, CHUNK, CHUNK), normal(0.1, CHUNK, CHUNK)))
        self.decay, self.beta = torch.rand(*shape, k, generator=g), 2 * torch.rand(*shape, CHUNK, generator=g)
        free = torch.ones(slots, dtype=torch.bool)
        for c in chunks:
            free[c.slot] = False
            for x in (self.kd, self.qg, self.kg, self.m, self.a, self.beta):
                x[c.slot, :, c.rows :] = 0
            for x in (self.m, self.a):
                x[c.slot, :, :, c.rows :] = 0
        for x in (self.kd, self.qg, self.kg, self.m, self.a, self.decay, self.beta):
            x[free] = NAN
        self.factors = torch.stack([image(x) for x in (self.kd, self.qg, self.kg)], 2)
        unread = torch.full_like(self.a, NAN)
        self.scores = torch.stack([image(x)[:, :, 0] for x in (unread, self.a, self.m)], 2)


class Run:
    """A problem's tensors; `launch` runs the kernel into outputs that are NaN before."""

    def __init__(
        self, p: Problem, segments: int = 1, segment_chunks: int = FULL, dht: torch.Tensor | None = None
    ) -> None:
        self.p, self.segments, self.segment_chunks = p, segments, segment_chunks
        config, g = p.config, torch.Generator().manual_seed(p.seed + 1)
        self.x = Operands(p)
        slots, self.chunks = p.chunks()
        batch, tokens = p.shape
        k, v = config.key_dim, p.value_dim
        wide = torch.randn(batch, tokens, p.heads, v + 8, generator=g).to(p.dtype)
        self.do = None if config.transition else wide[..., :v]
        self.cu = None
        if config.cu_seqlens:
            self.cu = torch.tensor((0, *p.lengths)).cumsum(0).to(getattr(torch, config.cu_seqlens))
        units = len(p.lengths) * segments
        self.dht = None
        if config.initial:
            self.dht = self.state(torch.randn(units, p.heads, k, v, generator=g)) if dht is None else dht
        self.y = self.dv = self.dhs = self.dh0 = None
        if config.readout:
            self.y = torch.empty(slots, p.heads, CHUNK, v, dtype=p.dtype)
            self.dv = torch.empty(batch, tokens, p.heads, v, dtype=p.dtype)
            self.dhs = torch.empty(slots, p.heads, v, k, dtype=p.dtype)
        if config.final or config.transition:
            self.dh0 = self.state(torch.empty(units, p.heads, k, p.columns()))

    def state(self, x: torch.Tensor) -> torch.Tensor:
        """A state [.., K, V] in the layout of the configuration (or back)."""
        return x.transpose(-1, -2).contiguous() if self.p.config.state_v_first else x

    def outputs(self) -> dict[str, torch.Tensor]:
        named = (("y", self.y), ("dv", self.dv), ("dhs", self.dhs), ("dh0", self.dh0))
        return {n: x for n, x in named if x is not None}

    def launch(self, **options: Any) -> ptxemu.Launched:
        for x in self.outputs().values():
            x.fill_(NAN)
        (launched,) = ptxemu.run(kernel(self.p.config), *self.args(), **options)
        assert not launched.notes
        return launched

    def args(self) -> tuple[Any, ...]:
        return (
            self.x.factors, self.x.scores, self.x.decay, self.x.beta, self.do, self.dht, self.cu, self.y, self.dv, self.dhs,
            self.dh0, None, None, self.segments, self.segment_chunks,
        )  # fmt: skip

    def expected(self) -> dict[str, torch.Tensor]:
        """The equations in float64; NaN where nothing is to be written."""
        p, x = self.p, self.x
        out = {n: torch.full_like(t, NAN, dtype=torch.float64) for n, t in self.outputs().items()}
        for unit in range(len(p.lengths) * self.segments):
            n, s = divmod(unit, self.segments)
            ds = torch.zeros(p.heads, p.config.key_dim, p.columns(), dtype=torch.float64)
            if p.config.transition:
                ds += torch.eye(p.config.key_dim)
            elif self.dht is not None:
                ds = self.state(self.dht[unit]).double()
            for c in reversed([c for c in self.chunks if c.sequence == n and c.index // self.segment_chunks == s]):
                where = (c.batch, slice(c.first, c.first + c.rows))
                do = torch.zeros(p.heads, CHUNK, p.columns(), dtype=torch.float64)
                if self.do is not None:
                    do[:, : c.rows] = self.do[where].double().transpose(0, 1)
                kd, qg, kg, m, a = (t[c.slot].double() for t in (x.kd, x.qg, x.kg, x.m, x.a))
                y = m.mT @ (a.mT @ do + kg @ ds)
                dv = x.beta[c.slot].double()[..., None] * y
                if p.config.readout:
                    out["dhs"][c.slot] = ds.mT
                    out["y"][c.slot] = y
                    out["dv"][where] = dv[:, : c.rows].transpose(0, 1)
                ds = x.decay[c.slot].double()[..., None] * ds + qg.mT @ do + kd.mT @ dv
            if self.dh0 is not None:
                out["dh0"][unit] = self.state(ds)
        return out

    def check(self) -> None:
        expected = self.expected()
        for name, x in self.outputs().items():
            e, x = expected[name], x.double()
            assert torch.equal(x.isnan(), e.isnan()), f"{name}: written where it must not be, or not written"
            assert (x[e == 0] == 0).all(), name
            error = ((x - e).nan_to_num().norm() / e.nan_to_num().norm().clamp_min(1e-30)).item()
            assert error < WITHIN[self.p.dtype], (name, error)

    def bits(self) -> dict[str, bytes]:
        return {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in self.outputs().items()}


def config(**options: Any) -> ReverseConfig:
    return ReverseConfig(**{"final": True, **options})


PACKED = (1, 130, 0, 64, 65, 0, 200, 63)

CASES = {
    # every tile, cluster, key size and dtype; 1 to 7 chunks; tails
    "one chunk": Problem((64,), 2, 64),
    "two chunks": Problem((128,), 1, 128),
    "seven chunks": Problem((448,), 1, 64),
    "no first state": Problem((192,), 1, 64, config=config(final=False)),
    "initial": Problem((192, 192), 2, 64, config=config(initial=True)),
    "cluster": Problem((256, 256), 1, 128, config=config(cluster=2, initial=True)),
    "cluster, V 256": Problem((192,), 2, 256, config=config(cluster=2)),
    "two warpgroups": Problem((320,), 1, 128, config=config(tile=128, initial=True)),
    "V 192": Problem((128,), 1, 192, config=config(initial=True)),
    "two warpgroups, cluster": Problem((192,), 1, 256, config=config(tile=128, cluster=2)),
    "K 64": Problem((320,), 2, 64, config=config(key_dim=64, initial=True)),
    "K 64, two warpgroups": Problem((256,), 1, 128, config=config(key_dim=64, tile=128)),
    "K 64, cluster": Problem((384,), 1, 128, config=config(key_dim=64, cluster=2)),
    "fp16": Problem((256,), 1, 64, config=config(dtype="float16", initial=True)),
    "fp16, K 64, two warpgroups": Problem((192,), 1, 128, config=config(dtype="float16", key_dim=64, tile=128)),
    "tail": Problem((100, 100), 2, 64, config=config(initial=True)),
    "tail, one token": Problem((1,), 1, 64),
    "tail, two warpgroups": Problem((321,), 1, 128, config=config(tile=128)),
    "tail, cluster": Problem((95,), 1, 128, config=config(cluster=2)),
    # packed sequences
    "packed": Problem(PACKED, 2, 64, True, config(initial=True, cu_seqlens="int64")),
    "packed, two warpgroups": Problem(PACKED, 1, 128, True, config(tile=128, initial=True, cu_seqlens="int32")),
    "packed, cluster": Problem(PACKED, 1, 128, True, config(cluster=2, initial=True, cu_seqlens="int64")),
    "packed, K 64": Problem(PACKED, 1, 64, True, config(key_dim=64, cu_seqlens="int64")),
    "packed, fp16": Problem(PACKED, 1, 64, True, config(dtype="float16", cu_seqlens="int32")),
    # states with V first
    "V first": Problem((192, 192), 2, 128, config=config(state_v_first=True, initial=True)),
    "V first, two warpgroups": Problem((128,), 1, 128, config=config(state_v_first=True, initial=True, tile=128)),
    # the first state's gradient alone
    "first state only": Problem((320,), 2, 64, config=config(readout=False, initial=True)),
    "first state only, cluster": Problem((200,), 1, 128, config=config(readout=False, cluster=2)),
    "first state only, packed": Problem(PACKED, 1, 128, True, config(readout=False, tile=128, cu_seqlens="int64")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_result(name: str) -> None:
    run = Run(CASES[name])
    launched = run.launch(seed=len(name), shuffle=True)
    assert launched.cluster == (run.p.config.cluster, 1, 1)
    run.check()


SCHEDULES = [dict(seed=s, shuffle=True) for s in (1, 2, 3)] + [
    dict(seed=4, eager=True),
    dict(seed=5, shuffle=True, quantum=17),
]


@pytest.mark.parametrize("name", ["seven chunks", "cluster", "two warpgroups", "K 64, cluster", "packed"])
def test_schedules_give_the_same_bits(name: str) -> None:
    run = Run(CASES[name])
    run.launch()
    bits = run.bits()
    for options in SCHEDULES:
        run.launch(**options)
        assert run.bits() == bits, options


def test_variants_give_the_same_bits() -> None:
    bits = []
    for options in (dict(), dict(cluster=2), dict(tile=128)):
        run = Run(Problem((250,), 1, 128, config=config(initial=True, **options)))
        run.launch()
        bits.append(run.bits())
    assert bits[1:] == bits[:-1]


@pytest.mark.parametrize("tile", [64, 128])
def test_neighbours_do_not_matter(tile: int) -> None:
    """Sequences beside one change no bit of its outputs, whatever their values are."""
    run = Run(Problem((30, 100, 50), 1, 128, True, config(tile=tile, initial=True, cu_seqlens="int64")))
    run.launch()
    slots = [c.slot for c in run.chunks if c.sequence == 1]
    assert run.do is not None

    def of_sequence() -> list[torch.Tensor]:
        x = run.outputs()
        return [x["dv"][:, 30:130].clone(), x["dh0"][1].clone(), x["y"][slots], x["dhs"][slots]]

    before = of_sequence()
    run.do[:, :30] = NAN
    run.do[:, 130:] = float("inf")
    run.launch()
    assert all(torch.equal(a, b) for a, b in zip(of_sequence(), before, strict=True))


def test_earlier_tokens_do_not_matter() -> None:
    """Gradients of a token's output change no bit of what is made of later chunks."""
    run = Run(Problem((200,), 1, 64, config=config(initial=True)))
    run.launch()
    assert run.do is not None
    assert run.dv is not None
    before = run.dv.clone()
    for token, later in ((0, 64), (100, 128), (150, 192)):
        run.do[:, token] *= -30
        run.launch()
        assert torch.equal(run.dv[:, later:], before[:, later:])
        assert not torch.equal(run.dv[:, :later], before[:, :later])


@pytest.mark.parametrize(
    ("options", "grid", "block"), [(dict(initial=True), 4, 192), (dict(tile=128, cu_seqlens="int32"), 2, 384)]
)
def test_ordinary_call(options: dict[str, Any], grid: int, block: int) -> None:
    run = Run(Problem((100, 100), 1, 128, "cu_seqlens" in options, config(**options)))
    compiled = kernel(run.p.config)
    for x in run.outputs().values():
        x.fill_(NAN)
    with ptxemu.emulate("sm_90a") as launches:
        compiled(*run.args())
    assert [(x.grid, x.block) for x in launches] == [((grid, 1, 1), (block, 1, 1))]
    run.check()


@pytest.mark.parametrize("name", ["whole", "packed", "V first"])
def test_segments(name: str) -> None:
    """Gradients of segments from zero and their transitions give every segment's first gradient; by segments then all is as in one pass."""
    v_first = name == "V first"
    options: dict[str, Any] = dict(state_v_first=v_first, cu_seqlens="int64" if name == "packed" else "")
    lengths = (1, 400, 0, 130) if name == "packed" else (448, 448)
    segments, length = (4, 2) if name == "packed" else (3, 3)
    whole = Run(Problem(lengths, 2, 128, name == "packed", config(initial=True, tile=128, **options)))
    whole.launch()
    ends = Run(replace(whole.p, config=config(readout=False, **options)), segments, length)
    maps = Run(replace(whole.p, config=config(readout=False, transition=True, **options)), segments, length)
    for run in (ends, maps):
        run.launch()
        run.check()
    end, t = ends.state(ends.dh0).double(), maps.state(maps.dh0).double()  # type: ignore[arg-type]
    starts = torch.empty_like(end)
    for n in range(len(lengths)):
        ds = whole.state(whole.dht[n]).double()  # type: ignore[index]
        for u in reversed(range(n * segments, (n + 1) * segments)):
            starts[u] = ds
            ds = t[u] @ ds + end[u]
    dht = whole.state(starts.float())
    parts = Run(replace(whole.p, config=config(initial=True, **options)), segments, length, dht)
    parts.launch()
    parts.check()
    pairs = [(parts.outputs()[n], whole.outputs()[n]) for n in ("y", "dv", "dhs")]
    for x, y in (*pairs, (parts.dh0[::segments], whole.dh0)):  # type: ignore[index]
        x, y = x.double().nan_to_num(), y.double().nan_to_num()
        assert ((x - y).norm() / y.norm()).item() < 5e-3


@pytest.mark.parametrize("options", [dict(), dict(tile=128), dict(cluster=2), dict(key_dim=64), dict(dtype="float16")])
def test_transition(options: dict[str, Any]) -> None:
    run = Run(Problem((200, 200), 2, config=config(readout=False, transition=True, **options)))
    run.launch()
    run.check()


@pytest.mark.parametrize("initial", [False, True])
def test_unit_without_chunks_passes_its_gradient_through(initial: bool) -> None:
    run = Run(Problem((0, 70, 0), 1, 64, True, config(initial=initial, cu_seqlens="int64")), 3, 1)
    run.launch()
    run.check()
    for unit in (0, 1, 2, 5, 6, 7, 8):
        passed = run.dht[unit] if run.dht is not None else torch.zeros(())
        assert torch.equal(run.dh0[unit], passed.expand_as(run.dh0[unit]))  # type: ignore[index]
