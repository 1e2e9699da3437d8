"""The Hopper scan of KDA: every variant against float64, under many schedules, on operands as the prepare kernel lays them out."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import kda_model
import pytest
import torch

import ptxemu
from deltafuse.kernels.config import CHUNK, ScanConfig

WITHIN = {torch.bfloat16: 5e-3, torch.float16: 1e-3}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
FULL = 2**31 - 1


@cache
def kernel(config: ScanConfig) -> Any:
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("the CuTe DSL is not installed: pip install 'deltafuse[emulator]'")
    ptxemu.setup("sm_90a")
    from deltafuse.kernels.sm90 import kda_scan

    return kda_scan.compile(config)


def image(x: torch.Tensor) -> torch.Tensor:
    """[.., 64, 64 P] as P panels [.., P, 64, 64]: groups of 8 columns change places with the row's last three bits."""
    rows, groups = torch.arange(64), torch.arange(8)
    order = (groups[None, :] ^ (rows[:, None] & 7))[..., None] * 8 + torch.arange(8)
    panels = x.unflatten(-1, (-1, 64)).movedim(-2, -3)
    return panels.gather(-1, order.reshape(64, 64).argsort(-1).expand(panels.shape))


@dataclass(frozen=True)
class Problem:
    """Sequences (`lengths`, packed or all of one length), value heads, columns of V."""

    lengths: tuple[int, ...]
    heads: int = 1
    value_dim: int = 64
    packed: bool = False
    config: ScanConfig = field(default_factory=lambda: ScanConfig(final=True))
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.dtype]

    @property
    def chunks(self) -> list[int]:
        return [-(-n // CHUNK) for n in self.lengths]

    def places(self) -> list[tuple[int, int]]:
        """First slot and first token of every sequence."""
        if not self.packed:
            return [(n * self.chunks[0], 0) for n in range(len(self.lengths))]
        starts = torch.tensor((0, *self.lengths)).cumsum(0).tolist()[:-1]
        return [(start // CHUNK + n, start) for n, start in enumerate(starts)]

    @property
    def slots(self) -> int:
        return sum(self.lengths) // CHUNK + len(self.lengths) if self.packed else sum(self.chunks)

    def columns(self) -> int:
        return self.config.key_dim if self.config.transition else self.value_dim


class Operands:
    """What the prepare kernel hands over, as matrices and as the workspace; NaN where it writes nothing."""

    def __init__(self, p: Problem) -> None:
        g = torch.Generator().manual_seed(p.seed)
        shape, k = (p.slots, p.heads), p.config.key_dim

        def normal(size: float, *more: int) -> torch.Tensor:
            return (torch.randn(*shape, *more, generator=g) * size).to(p.dtype)

        self.kd, self.qg, self.kg = normal(0.05, CHUNK, k), normal(0.05, CHUNK, k), normal(0.1, CHUNK, k)
        self.m, self.a = (x.tril() for x in (normal(0.1, CHUNK, CHUNK), normal(0.1, CHUNK, CHUNK)))
        self.decay = torch.rand(*shape, k, generator=g)
        used = torch.zeros(p.slots, dtype=torch.bool)
        for (slot, _), length, chunks in zip(p.places(), p.lengths, p.chunks, strict=True):
            used[slot : slot + chunks] = True
            if rows := length % CHUNK:
                last = slot + chunks - 1
                for x in (self.kd, self.qg, self.kg, self.m, self.a):
                    x[last, :, rows:] = 0
                for x in (self.m, self.a):
                    x[last, :, :, rows:] = 0
        for x in (self.kd, self.qg, self.kg, self.m, self.a, self.decay):
            x[~used] = float("nan")
        live = torch.randint(1, 5, shape, generator=g, dtype=torch.int32)
        if p.config.strips:
            for x in (self.kd, self.qg):
                x[torch.arange(CHUNK) >= 16 * live[..., None]] = 0
        self.factors = torch.stack([image(x) for x in (self.kd, self.qg, self.kg)], 2)
        scores = [kda_model.strips(x) if p.config.strips else image(x)[:, :, 0] for x in (self.m, self.a)]
        self.scores = torch.stack(scores, 2)
        if p.config.strips:
            views, behind = kda_model.rows_behind(self.factors, live)
            for x in views:
                x[behind] = float("nan")
            kda_model.live_blocks(self.scores)[:] = live


class Run:
    """A problem's tensors; `launch` runs the kernel into outputs that are NaN before."""

    def __init__(
        self, p: Problem, segments: int = 1, segment_chunks: int = FULL, h0: torch.Tensor | None = None
    ) -> None:
        self.p, self.segments, self.segment_chunks = p, segments, segment_chunks
        config, g = p.config, torch.Generator().manual_seed(p.seed + 1)
        self.x = Operands(p)
        batch, tokens = (1, sum(p.lengths)) if p.packed else (len(p.lengths), p.lengths[0])
        wide = torch.randn(batch, tokens, p.heads, p.value_dim + 8, generator=g).to(p.dtype)
        self.v = None if config.transition else wide[..., : p.value_dim]
        self.cu = None
        if config.cu_seqlens:
            self.cu = torch.tensor((0, *p.lengths)).cumsum(0).to(getattr(torch, config.cu_seqlens))
        units = len(p.lengths) * segments
        self.h0 = None
        if config.initial:
            self.h0 = (
                self.state(torch.randn(units, p.heads, config.key_dim, p.columns(), generator=g)) if h0 is None else h0
            )
        self.o = torch.empty(batch, tokens, p.heads, p.value_dim, dtype=p.dtype) if config.readout else None
        self.ht = self.hs = None
        if config.final or config.transition:
            self.ht = self.state(torch.empty(units, p.heads, config.key_dim, p.columns()))
        if config.states:
            self.hs = self.state(torch.empty(p.slots, p.heads, config.key_dim, p.columns(), dtype=p.dtype))

    def state(self, x: torch.Tensor) -> torch.Tensor:
        """A state [.., K, V] in the layout of the configuration (or back)."""
        return x.transpose(-1, -2).contiguous() if self.p.config.state_v_first else x

    def outputs(self) -> dict[str, torch.Tensor]:
        return {n: x for n, x in (("o", self.o), ("ht", self.ht), ("hs", self.hs)) if x is not None}

    def launch(self, **options: Any) -> ptxemu.Launched:
        for x in self.outputs().values():
            x.fill_(float("nan"))
        (launched,) = ptxemu.run(kernel(self.p.config), *self.args(), **options)
        assert not launched.notes
        return launched

    def args(self) -> tuple[Any, ...]:
        return (
            self.x.factors, self.x.scores, self.x.decay, self.v, self.h0, self.cu, self.o, self.ht, self.hs,
            None, None, self.segments, self.segment_chunks,
        )  # fmt: skip

    def expected(self) -> dict[str, torch.Tensor]:
        """The equations in float64; NaN where nothing is to be written."""
        p, x = self.p, self.x
        out = {n: torch.full_like(t, float("nan"), dtype=torch.float64) for n, t in self.outputs().items()}
        for n, ((slot, token), length, chunks) in enumerate(zip(p.places(), p.lengths, p.chunks, strict=True)):
            for s in range(self.segments):
                unit, first = n * self.segments + s, min(s * self.segment_chunks, chunks)
                if p.config.transition:
                    state = torch.eye(p.config.key_dim, dtype=torch.float64).expand(p.heads, -1, -1)
                elif self.h0 is not None:
                    state = self.state(self.h0[unit]).double()
                else:
                    state = torch.zeros(p.heads, p.config.key_dim, p.columns(), dtype=torch.float64)
                for c in range(first, min(first + self.segment_chunks, chunks)):
                    at, rows, start = slot + c, min(CHUNK, length - CHUNK * c), token + CHUNK * c
                    where = (0 if p.packed else n, slice(start, start + rows))
                    v = torch.zeros(p.heads, CHUNK, p.columns(), dtype=torch.float64)
                    if self.v is not None:
                        v[:, :rows] = self.v[where].double().transpose(0, 1)
                    if self.hs is not None:
                        out["hs"][at] = self.state(state)
                    new = x.m[at].double() @ (v + x.kd[at].double() @ state)
                    if self.o is not None:
                        o = x.qg[at].double() @ state + x.a[at].double() @ new
                        out["o"][where] = o[:, :rows].transpose(0, 1)
                    state = x.decay[at].double()[..., None] * state + x.kg[at].double().transpose(-1, -2) @ new
                if self.ht is not None:
                    out["ht"][unit] = self.state(state)
        return out

    def check(self) -> None:
        expected = self.expected()
        for name, x in self.outputs().items():
            e, x = expected[name], x.double()
            assert torch.equal(x.isnan(), e.isnan()), f"{name}: written where it must not be, or not written"
            error = ((x - e).nan_to_num().norm() / e.nan_to_num().norm().clamp_min(1e-30)).item()
            assert error < WITHIN[self.p.dtype], (name, error)

    def bits(self) -> dict[str, bytes]:
        return {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in self.outputs().items()}


def config(**options: Any) -> ScanConfig:
    return ScanConfig(**{"final": True, **options})


PACKED = (1, 130, 0, 64, 65, 0, 200, 63)

CASES = {
    # every tile, cluster, key size and dtype; 1 to 7 chunks; tails
    "one chunk": Problem((64,), 2, 64),
    "two chunks": Problem((128,), 1, 128),
    "seven chunks": Problem((448,), 1, 64),
    "no state": Problem((192,), 1, 64, config=config(final=False)),
    "initial": Problem((192, 192), 2, 64, config=config(initial=True)),
    "cluster": Problem((256, 256), 1, 128, config=config(cluster=2, initial=True)),
    "cluster, V 256": Problem((192,), 2, 256, config=config(cluster=2)),
    "two warpgroups": Problem((320,), 1, 128, config=config(tile=128, initial=True)),
    "two warpgroups, V 256": Problem((192,), 1, 256, config=config(tile=128)),
    "V 192": Problem((128,), 1, 192, config=config(initial=True)),
    "two warpgroups, cluster": Problem((192,), 1, 256, config=config(tile=128, cluster=2)),
    "K 64": Problem((320,), 2, 64, config=config(key_dim=64, initial=True)),
    "K 64, two warpgroups": Problem((256,), 1, 128, config=config(key_dim=64, tile=128)),
    "K 64, cluster": Problem((384,), 1, 128, config=config(key_dim=64, cluster=2)),
    "fp16": Problem((256,), 1, 64, config=config(dtype="float16", initial=True)),
    "fp16, K 64, two warpgroups": Problem((192,), 1, 128, config=config(dtype="float16", key_dim=64, tile=128)),
    "fp16, cluster": Problem((192,), 1, 128, config=config(dtype="float16", cluster=2)),
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
    # states with V first, states of chunks
    "V first": Problem((192, 192), 2, 128, config=config(state_v_first=True, initial=True)),
    "V first, two warpgroups": Problem((128,), 1, 128, config=config(state_v_first=True, initial=True, tile=128)),
    "states": Problem((320,), 2, 64, config=config(states=True, initial=True)),
    "states, V first": Problem((200,), 1, 64, config=config(states=True, state_v_first=True)),
    "states, two warpgroups": Problem((256,), 1, 128, config=config(states=True, tile=128, initial=True)),
    "states, cluster, V first": Problem(
        (256,), 1, 128, config=config(states=True, cluster=2, state_v_first=True, initial=True)
    ),
    "states, packed": Problem(PACKED, 1, 64, True, config(states=True, initial=True, cu_seqlens="int64")),
    "states, K 64": Problem((192,), 1, 64, config=config(states=True, key_dim=64)),
    # without o
    "final state only": Problem((320,), 2, 64, config=config(readout=False, initial=True)),
    "final state only, cluster": Problem((200,), 1, 128, config=config(readout=False, cluster=2)),
    "states only": Problem((256,), 1, 128, config=config(readout=False, states=True, final=False, tile=128)),
    "states only, packed": Problem(PACKED, 1, 64, True, config(readout=False, states=True, cu_seqlens="int64")),
}  # fmt: skip


@pytest.mark.parametrize("strips", [False, True], ids=["panels", "strips"])
@pytest.mark.parametrize("name", CASES)
def test_result(name: str, strips: bool) -> None:
    problem = CASES[name]
    run = Run(replace(problem, config=replace(problem.config, strips=strips)))
    launched = run.launch(seed=len(name), shuffle=True)
    assert launched.cluster == (run.p.config.cluster, 1, 1)
    run.check()


@pytest.mark.parametrize("cluster", [1, 2])
def test_live_rows_of_long_units(cluster: int) -> None:
    """Their numbers are looked at 32 chunks at a time, the next ones ahead."""
    run = Run(Problem((64 * 98 + 5,), 1, 64 * cluster, config=config(key_dim=64, cluster=cluster, strips=True)))
    run.launch()
    run.check()


def test_zeros_behind_live_rows_are_fenced() -> None:
    """A warp writes what tensor cores read: without its fence the emulator says so."""
    fences = re.compile(r"fence\.proxy\.async\.shared::cta;")

    def without(ptx: str) -> str:
        _, behind_rows, *_ = fences.finditer(ptx)
        return ptx[: behind_rows.start()] + ptx[behind_rows.end() :]

    run = Run(Problem((320,), config=config(strips=True)))
    with pytest.raises(ptxemu.ProxyFault, match="wgmma read of operand B"):
        run.launch(edit=without)


def test_any_number_of_live_rows_is_one_of_them() -> None:
    """Slots that nobody has written hold anything: the scan ends all the same."""
    run = Run(Problem((320,), config=config(strips=True)))
    kda_model.live_blocks(run.x.scores)[:] = torch.tensor([0, -7, 5, 2**31 - 1, -(2**31)], dtype=torch.int32)[:, None]
    run.launch()


SCHEDULES = [dict(seed=s, shuffle=True) for s in (1, 2, 3)] + [
    dict(seed=4, eager=True),
    dict(seed=5, shuffle=True, quantum=17),
]


@pytest.mark.parametrize(
    "name", ["seven chunks", "cluster", "two warpgroups", "K 64, cluster", "packed", "states, packed"]
)
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
    assert run.v is not None
    before = {n: x.clone() for n, x in run.outputs().items()}
    run.v[:, :30] = float("nan")
    run.v[:, 130:] = float("inf")
    run.launch()
    assert torch.equal(run.o[:, 30:130], before["o"][:, 30:130])  # type: ignore[index]
    assert torch.equal(run.ht[1], before["ht"][1])  # type: ignore[index]


def test_later_tokens_do_not_matter() -> None:
    """A token's v changes no bit of the outputs before it."""
    run = Run(Problem((150,), 1, 64, config=config(initial=True)))
    run.launch()
    assert run.o is not None
    assert run.v is not None
    before = run.o.clone()
    for token in (149, 100, 64):
        run.v[:, token] *= -30
        run.launch()
        assert torch.equal(run.o[:, :token], before[:, :token])
        assert not torch.equal(run.o[:, token:], before[:, token:])


@pytest.mark.parametrize(
    ("options", "grid", "block"), [(dict(initial=True), 4, 192), (dict(tile=128, cu_seqlens="int32"), 2, 384)]
)
def test_ordinary_call(options: dict[str, Any], grid: int, block: int) -> None:
    run = Run(Problem((100, 100), 1, 128, "cu_seqlens" in options, config(**options)))
    compiled = kernel(run.p.config)
    for x in run.outputs().values():
        x.fill_(float("nan"))
    with ptxemu.emulate("sm_90a") as launches:
        compiled(*run.args())
    assert [(x.grid, x.block) for x in launches] == [((grid, 1, 1), (block, 1, 1))]
    run.check()


@pytest.mark.parametrize("name", ["whole", "packed", "V first"])
def test_segments(name: str) -> None:
    """States of segments from zero and their transitions give every segment's first state; the segmented scan then is the whole one."""
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
    ht, t = ends.state(ends.ht).double(), maps.state(maps.ht).double()  # type: ignore[arg-type]
    starts = torch.empty_like(ht)
    for n in range(len(lengths)):
        state = whole.state(whole.h0[n]).double()  # type: ignore[index]
        for u in range(n * segments, (n + 1) * segments):
            starts[u] = state
            state = t[u] @ state + ht[u]
    h0 = whole.state(starts.float())
    parts = Run(replace(whole.p, config=config(initial=True, **options)), segments, length, h0)
    parts.launch()
    parts.check()
    last = torch.arange(segments - 1, len(lengths) * segments, segments)
    for x, y in ((parts.o, whole.o), (parts.ht[last], whole.ht)):  # type: ignore[index]
        assert ((x.double() - y.double()).norm() / y.double().norm()).item() < 5e-3  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [dict(), dict(tile=128), dict(cluster=2), dict(key_dim=64), dict(dtype="float16")])
def test_transition(options: dict[str, Any]) -> None:
    run = Run(Problem((200, 200), 2, config=config(readout=False, transition=True, **options)))
    run.launch()
    run.check()


@pytest.mark.parametrize("initial", [False, True])
def test_unit_without_chunks_passes_its_state_through(initial: bool) -> None:
    run = Run(Problem((0, 70, 0), 1, 64, True, config(initial=initial, cu_seqlens="int64")), 3, 1)
    run.launch()
    run.check()
    for unit in (0, 1, 2, 5, 6, 7, 8):
        passed = run.h0[unit] if run.h0 is not None else torch.zeros(())
        assert torch.equal(run.ht[unit], passed.expand_as(run.ht[unit]))  # type: ignore[index]
