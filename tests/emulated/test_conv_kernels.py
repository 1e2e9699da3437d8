"""The short convolution's kernels in the emulator against float64: results, gradients, layouts, neighbours, order."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import kernels
import pytest
import torch
from torch import Tensor

import ptxemu
from deltafuse.autograd import conv_cute
from deltafuse.autograd.conv_cute import Tuning, backward, forward, update
from deltafuse.reference import conv as reference

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WITHIN = {BF16: 3e-3, FP16: 5e-4, FP32: 1e-6}
MACHINE: dict[str, Any] = dict(arch="sm_90a", sms=132)
ALL = (True, True, True, True)
SHORT = Tuning(tokens=11)
"""Ranges of a few tokens: their ends fall everywhere."""


@cache
def _compiled(kernel: str, config: Any) -> Any:
    return kernels.need("sm_90a", lambda: importlib.import_module(f"deltafuse.kernels.{kernel}").compile(config))


pytestmark = pytest.mark.usefixtures("nan_in_new_tensors")


@pytest.fixture
def load(emulated: Callable[..., Any]) -> Loader:
    return Loader(emulated)


class Loader:
    """Kernels from memory, launched in the emulator; keeps what was asked for and with what arguments."""

    def __init__(self, emulated: Callable[..., Any]) -> None:
        self.emulated = emulated
        self.asked: list[tuple[str, Any]] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.started = False

    def __call__(self, kernel: str, config: Any, arch: str) -> Callable[..., None]:
        compiled = _compiled(kernel, config)
        if not self.started:
            self.emulated(arch)
            self.started = True
        self.asked.append((kernel, config))

        def launch(*arguments: Any) -> None:
            self.arguments.append(arguments)
            compiled(*arguments)

        return launch


@dataclass(frozen=True)
class Case:
    """A call: packed sequences of `lengths`, or `batch` sequences of `tokens`. `start`: where in a wider projection x begins."""

    dtype: torch.dtype = BF16
    width: int = 4
    batch: int = 2
    tokens: int = 37
    channels: int = 136
    lengths: tuple[int, ...] | None = None
    weight: torch.dtype = BF16
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    initial: torch.dtype | None = None
    final: bool = False
    silu: bool = True
    bounds: torch.dtype = torch.int64
    start: int | None = None
    tuning: Tuning = field(default_factory=Tuning)

    def tensors(self) -> dict[str, Tensor | None]:
        g = torch.Generator().manual_seed(11)

        def rand(*shape: int, dtype: torch.dtype | None) -> Tensor | None:
            return None if dtype is None else torch.randn(*shape, generator=g).to(dtype)

        batch, tokens = (self.batch, self.tokens) if self.lengths is None else (1, sum(self.lengths))
        sequences = batch if self.lengths is None else len(self.lengths)
        d, start = self.channels, self.start or 0
        x = rand(batch, tokens, d if self.start is None else start + d + 24, dtype=self.dtype)
        assert x is not None
        bounds = None
        if self.lengths is not None:
            bounds = torch.tensor([0, *self.lengths]).cumsum(0).to(self.bounds)
        return {
            "x": x[..., start : start + d],
            "weight": rand(d, self.width, dtype=self.weight),
            "bias": rand(d, dtype=self.bias),
            "residual": rand(batch, tokens, d, dtype=self.residual),
            "initial_state": rand(sequences, d, self.width, dtype=self.initial),
            "bounds": bounds,
        }

    def gradients(self, t: dict[str, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        g = torch.Generator().manual_seed(12)
        x, bounds = t["x"], t["bounds"]
        assert x is not None
        n = x.shape[0] if bounds is None else len(bounds) - 1
        state = torch.randn(n, self.channels, self.width, generator=g).to(self.dtype) if self.final else None
        return torch.randn(x.shape, generator=g).to(self.dtype), state


def define(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, initial_state: Tensor | None,
    bounds: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and final states, a sequence after the other, differentiable."""
    width, tokens = weight.shape[1], x.shape[1]
    flat = x.flatten(0, 1)
    ends = bounds.tolist() if bounds is not None else [b * tokens for b in range(x.shape[0] + 1)]
    outputs, states = [flat[:0]], []
    for n, (a, b) in enumerate(pairwise(ends)):
        state = x.new_zeros(width, x.shape[2]) if initial_state is None else initial_state[n].T
        rows = torch.cat([state, flat[a:b]])
        outputs.append(sum(rows[1 + w : 1 + w + b - a] * weight[:, w] for w in range(width)))
        states.append(rows[b - a :].T)
    y = torch.cat(outputs).view(x.shape)
    if bias is not None:
        y = y + bias
    if silu:
        y = torch.nn.functional.silu(y)
    if residual is not None:
        y = y + residual
    return y, torch.stack(states) if states else x.new_zeros(0, x.shape[2], width)


def wide(t: dict[str, Tensor | None], grad: bool = False) -> dict[str, Tensor | None]:
    return {n: x if x is None or n == "bounds" else x.double().requires_grad_(grad) for n, x in t.items()}


def near(got: Tensor | None, want: Tensor, name: str, scale: float = 1.0) -> None:
    assert got is not None, name
    assert got.shape == want.shape, name
    if not want.numel():
        return
    assert not got.isnan().any(), name
    error = (got.double() - want).norm() / want.norm().clamp_min(1e-30)
    assert error < WITHIN[got.dtype] * scale, (name, float(error))


EMPTY = (3, 0, 1, 2, 9, 0, 0, 1, 17, 40, 2, 2, 1)
CASES = {
    "dense": Case(),
    "automatic ranges": Case(batch=1, tokens=300, channels=64, tuning=Tuning(), residual=BF16),
    "packed": Case(lengths=EMPTY, bias=BF16, initial=BF16, final=True, tuning=SHORT),
    "packed int32, no activation": Case(lengths=EMPTY, bounds=torch.int32, silu=False, tuning=SHORT, width=3),
    "unaligned slice": Case(FP16, 3, residual=FP32, bias=FP32, weight=FP32, final=True, start=1, channels=48, tuning=SHORT),
    "slice at two channels": Case(start=2, channels=40, tuning=SHORT, initial=FP32),
    "fp32": Case(FP32, 2, weight=FP32, lengths=EMPTY, initial=BF16, final=True, channels=36, tuning=SHORT),
    "fp32, weight in bf16": Case(FP32, weight=BF16, bias=FP16, residual=BF16, channels=68, tuning=SHORT),
    "odd channels": Case(FP16, channels=37, weight=FP16, lengths=EMPTY, initial=FP16, final=True, tuning=SHORT),
    "one token": Case(batch=5, tokens=1, channels=24, initial=BF16, final=True, bias=BF16, tuning=SHORT),
    "two tokens": Case(batch=9, tokens=2, channels=8, width=3, final=True, tuning=SHORT),
    "few channels, aligned slice": Case(batch=3, tokens=50, channels=8, start=16, residual=BF16, final=True, tuning=Tuning(tokens=8)),
    "empty sequences in rows": Case(lengths=(*[0] * 9, 5, *[0] * 40, 3, 1, *[0] * 12), channels=16, initial=BF16, final=True, tuning=SHORT),
    "wide, two tiles": Case(batch=1, tokens=19, channels=1048, tuning=SHORT),
    "only empty sequences": Case(lengths=(0, 0, 0), channels=16, initial=BF16, final=True),
    "no sequences": Case(lengths=(), channels=16, bias=BF16, initial=BF16, final=True),
    "no tokens": Case(batch=2, tokens=0, channels=16, final=True),
}  # fmt: skip


def run(case: Case, load: Loader, **changed: Any) -> tuple[Tensor, Tensor | None]:
    t = {**case.tensors(), **changed}
    return forward(*t.values(), case.silu, case.final, **MACHINE, load=load, tuning=case.tuning)  # type: ignore[arg-type]


def run_backward(
    case: Case, load: Loader, needs: Sequence[bool] = ALL, tuning: Tuning | None = None, **changed: Any
) -> tuple[Tensor | None, ...]:
    dy, dstate = case.gradients(case.tensors())
    t = {**case.tensors(), "dy": dy, **changed}
    args = [t[n] for n in ("x", "weight", "bias", "initial_state", "bounds")]
    return backward(*args, case.silu, t["dy"], dstate, needs, **MACHINE, load=load, tuning=tuning or case.tuning)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, load: Loader) -> None:
    case = CASES[name]
    t = case.tensors()
    y, state = run(case, load)
    want, want_state = define(**wide(t), silu=case.silu)
    assert y.dtype == case.dtype
    near(y, want, "y")
    if not case.final:
        assert state is None
    else:
        assert state is not None
        # A copy of inputs: exact but for a rounding of the initial state.
        assert torch.equal(state, want_state.to(case.dtype))
    ours, _ = reference.conv_forward(*t.values(), case.silu, case.final)  # type: ignore[arg-type]
    if y.numel():
        assert (y.double() - ours.double()).norm() <= WITHIN[case.dtype] * ours.double().norm()


@pytest.mark.parametrize("name", CASES)
def test_backward(name: str, load: Loader) -> None:
    case = CASES[name]
    t = case.tensors()
    got = dict(zip(("x", "weight", "bias", "initial_state"), run_backward(case, load), strict=True))
    leaves = wide(t, grad=True)
    y, state = define(**leaves, silu=case.silu)
    dy, dstate = case.gradients(t)
    wanted = [n for n in got if leaves[n] is not None]
    outputs = [(y, dy.double())] + ([(state, dstate.double())] if dstate is not None else [])
    outputs = [(o, g) for o, g in outputs if o.requires_grad]
    results, seeds = zip(*outputs, strict=True)
    found = torch.autograd.grad(results, [leaves[n] for n in wanted], seeds, allow_unused=True)  # type: ignore[arg-type]
    expected = dict(zip(wanted, found, strict=True))
    for n, value in got.items():
        if leaves[n] is None:
            assert value is None
            continue
        assert value is not None
        assert value.dtype == t[n].dtype  # type: ignore[union-attr]
        near(value, torch.zeros(value.shape, dtype=FP64) if expected[n] is None else expected[n], n)


@pytest.mark.parametrize(
    "needs", [(True, False, False, False), (False, True, False, False), (False, False, True, True)], ids=str
)
@pytest.mark.parametrize("silu", [False, True])
def test_only_what_is_needed(needs: tuple[bool, ...], silu: bool, load: Loader) -> None:
    case = replace(CASES["packed"], silu=silu, channels=16)
    every, some = run_backward(case, load), run_backward(case, load, needs)
    for need, a, b in zip(needs, every, some, strict=True):
        assert (b is not None) == need
        if need:
            assert a is not None
            assert torch.equal(a, b)


def test_gradient_of_the_final_state_alone(load: Loader) -> None:
    case = CASES["packed"]
    t = case.tensors()
    _, dstate = case.gradients(t)
    args = [t[n] for n in ("x", "weight", "bias", "initial_state", "bounds")]
    got = backward(*args, True, None, dstate, ALL, **MACHINE, load=load)  # type: ignore[arg-type]
    want = reference.conv_backward(*args, True, None, dstate, list(ALL))  # type: ignore[arg-type]
    for a, b in zip(got, want, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


# ---- neighbours, order -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["packed", "dense"])
def test_a_sequence_keeps_its_nan(name: str, value: float, load: Loader) -> None:
    case = CASES[name]
    t = case.tensors()
    x = t["x"]
    assert x is not None
    bounds = [0, 37, 74] if t["bounds"] is None else t["bounds"].tolist()
    bad = 1 if name == "dense" else 8
    inside = torch.zeros(x.shape[:2], dtype=torch.bool)
    inside.view(-1)[bounds[bad] : bounds[bad + 1]] = True
    clean, clean_state = run(case, load)
    dirty = x.masked_fill(inside[..., None], value)
    y, state = run(case, load, x=dirty)
    assert torch.equal(y[~inside], clean[~inside])
    if state is not None and clean_state is not None:
        others = [n for n in range(state.shape[0]) if n != bad]
        assert torch.equal(state[others], clean_state[others])
    want = run_backward(case, load)
    for changed in ({"x": dirty}, {"dy": case.gradients(t)[0].masked_fill(inside[..., None], value)}):
        other = run_backward(case, load, **changed)
        assert other[0] is not None
        assert want[0] is not None
        assert torch.equal(other[0][~inside], want[0][~inside])


def test_later_tokens_change_nothing(load: Loader) -> None:
    case = CASES["dense"]
    x = case.tensors()["x"]
    assert x is not None
    changed = x.clone()
    changed[:, 20:] = float("nan")
    assert torch.equal(run(case, load, x=changed)[0][:, :20], run(case, load)[0][:, :20])


def test_ranges_and_vectors_do_not_change_bits(load: Loader) -> None:
    case = CASES["packed"]
    y, state = run(case, load)
    grads = run_backward(case, load)
    for tuning in (Tuning(tokens=3), Tuning(tokens=40), Tuning(tokens=10**6), Tuning(vector=2, rows=4, batch=2)):
        other, other_state = run(replace(case, tuning=tuning), load)
        assert torch.equal(y, other)
        assert torch.equal(state, other_state)
        found = run_backward(case, load, tuning=tuning)
        for i in (0, 3):
            assert torch.equal(grads[i], found[i]), (tuning, i)


SCHEDULES = [dict(seed=s, shuffle=True) for s in (1, 2)] + [
    dict(seed=3, eager=True),
    dict(seed=4, shuffle=True, quantum=13),
]


def test_schedules_give_the_same_bits() -> None:
    case = CASES["packed"]
    kernels.need("sm_90a", lambda: None)
    found = []
    for options in [{}, *SCHEDULES]:
        with ptxemu.emulate("sm_90a", **options):
            load = Loader(lambda arch: None)
            found.append([*run(case, load), *run_backward(case, load)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_blackwell_gives_the_bits_of_hopper() -> None:
    case = CASES["packed"]
    found = []
    for arch in ("sm_90a", "sm_100a"):
        kernels.need(arch, lambda: None)
        with ptxemu.emulate(arch):
            compiled = {}

            def load(kernel: str, config: Any, arch: str, compiled: dict[Any, Any] = compiled) -> Any:
                compiled[kernel] = importlib.import_module(f"deltafuse.kernels.{kernel}").compile(config)
                return compiled[kernel]

            found.append([*run(case, load), *run_backward(case, load)])  # type: ignore[arg-type]
            assert all(f".target {arch}" in k.artifacts.PTX for k in compiled.values())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_many_sequences(load: Loader) -> None:
    lengths = tuple(1 + i % 3 for i in range(3000))
    case = Case(lengths=lengths, channels=8, initial=BF16, final=True)
    y, state = run(case, load)
    want, want_state = define(**wide(case.tensors()), silu=True)
    near(y, want, "y")
    assert torch.equal(state, want_state.to(BF16))


@pytest.mark.parametrize(
    "bounds", [[0, 50, 20, 10**6, -5, 37], [5, 10, 12], [0], [40, 50], [2**40, 3, 9], [0, 10]], ids=str
)
def test_senseless_bounds_stay_in_memory(bounds: list[int], load: Loader) -> None:
    case = Case(batch=1, channels=16, initial=BF16, final=True, bias=BF16, tuning=SHORT)
    n = len(bounds) - 1
    t = case.tensors() | {"bounds": torch.tensor(bounds), "initial_state": torch.zeros(n, 16, 4, dtype=BF16)}
    forward(*t.values(), True, True, **MACHINE, load=load, tuning=SHORT)  # type: ignore[arg-type]
    args = [t[n] for n in ("x", "weight", "bias", "initial_state", "bounds")]
    dy, dstate = case.gradients(t)
    backward(*args, True, dy, dstate, ALL, **MACHINE, load=load, tuning=SHORT)  # type: ignore[arg-type]


# ---- layouts -----------------------------------------------------------------------------------------------------------------------
def test_slices_are_not_copied(load: Loader) -> None:
    for start, vector in ((8, 8), (2, 2), (1, 1)):
        case = Case(start=start, channels=40, batch=1, tokens=9)
        t = case.tensors()
        forward(*t.values(), True, False, **MACHINE, load=load)  # type: ignore[arg-type]
        assert load.arguments[-1][0].data_ptr() == t["x"].data_ptr()  # type: ignore[union-attr]
        assert load.asked[-1][1].vector == vector


@pytest.mark.parametrize("layout", ["time first", "channels first", "expanded"])
def test_any_strides(layout: str, load: Loader) -> None:
    case = Case(batch=3, tokens=9, channels=16, tuning=SHORT)
    x = case.tensors()["x"]
    assert x is not None
    if layout == "expanded":
        x = x[:1].expand(3, -1, -1)
    dims = {"time first": (1, 0, 2), "channels first": (0, 2, 1), "expanded": (0, 1, 2)}[layout]
    back = tuple(dims.index(i) for i in range(3))
    strided = x if layout == "expanded" else x.permute(dims).contiguous().permute(back)
    assert not strided.is_contiguous()
    assert torch.equal(run(case, load, x=strided)[0], run(case, load, x=x.contiguous())[0])
    for a, b in zip(run_backward(case, load, x=strided), run_backward(case, load, x=x.contiguous()), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]


def test_kernels_of_names_what_is_launched(load: Loader) -> None:
    for case in (CASES["packed"], CASES["unaligned slice"], CASES["dense"]):
        t = case.tensors()
        load.asked.clear()
        run(case, load)
        run_backward(case, load)
        t["cu_seqlens"] = t.pop("bounds")
        wanted = conv_cute.kernels_of(**t, silu=case.silu, output_final_state=case.final, needs=ALL)  # type: ignore[arg-type]
        assert {n for n, _ in wanted} == {n for n, _ in load.asked}
        assert set(load.asked) <= set(wanted)


# ---- one token ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "width", "channels", "extra"),
    [
        (BF16, BF16, 4, 520, True),
        (BF16, FP32, 3, 36, False),
        (FP32, BF16, 2, 24, True),
        (FP16, FP16, 4, 37, True),
        (BF16, BF16, 3, 10, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 7])
def test_update(
    dtype: torch.dtype, cache_dtype: torch.dtype, width: int, channels: int, extra: bool, count: int, load: Loader
) -> None:
    g = torch.Generator().manual_seed(3)

    def rand(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g).to(to)

    x, weight, state = rand(count, channels), rand(channels, width), rand(count, channels, width, to=cache_dtype)
    bias, residual = (rand(channels, to=FP32), rand(count, channels, to=FP16)) if extra else (None, None)
    exact = [None if t is None else t.double() for t in (x, state, weight, bias, residual)]
    want = reference.conv_update(*exact, silu=extra)  # type: ignore[arg-type]
    for tokens in (None, 4):
        cache = state.clone()
        y = update(x, cache, weight, bias, residual, extra, **MACHINE, load=load, tuning=Tuning(tokens=tokens))
        near(y, want, "y")
        assert torch.equal(cache, exact[1].to(cache_dtype))  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["slots apart", "channels last", "unaligned"])
def test_update_of_strided_caches(layout: str, load: Loader) -> None:
    g = torch.Generator().manual_seed(4)
    pool = (
        torch.randn(5, 17, 4, generator=g).to(BF16)
        if layout == "unaligned"
        else torch.randn(5, 24, 4, generator=g).to(BF16)
    )
    if layout == "channels last":
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    cache = pool[1:4, 1:17] if layout == "unaligned" else pool[1:4, :16]
    x = torch.randn(3, 20, generator=g).to(BF16)[:, 2:18]
    weight = torch.randn(16, 4, generator=g).to(BF16)
    before, expected = pool.clone(), cache.clone()
    want = reference.conv_update(x, expected, weight, None, None, True)
    y = update(x, cache, weight, None, None, True, **MACHINE, load=load)
    near(y, want.double(), "y")
    assert torch.equal(cache, expected)
    cache.copy_(before[1:4, 1:17] if layout == "unaligned" else before[1:4, :16])
    assert torch.equal(pool, before)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_token_by_token_gives_the_bits_of_a_whole_pass(width: int, load: Loader) -> None:
    case = Case(batch=3, tokens=6, channels=24, width=width, bias=BF16, residual=BF16, initial=BF16, final=True)
    t = case.tensors()
    y, state = run(case, load)
    cache = t["initial_state"].clone()  # type: ignore[union-attr]
    for i in range(case.tokens):
        at = (t["x"][:, i], cache, t["weight"], t["bias"], t["residual"][:, i])  # type: ignore[index]
        assert torch.equal(update(*at, True, **MACHINE, load=load), y[:, i])  # type: ignore[arg-type]
    assert torch.equal(cache, state)
    assert load.asked[-1] == conv_cute.update_kernels_of(*at, silu=True)[0]  # type: ignore[arg-type]


# ---- choices -----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("channels", "vector", "columns"),
    [(2048, 8, 128), (1536, 8, 64), (8, 8, 8), (100, 4, 32), (37, 1, 8), (2049, 1, 128)],
)
def test_threads_along_the_channels(channels: int, vector: int, columns: int) -> None:
    assert conv_cute.columns_of(channels, vector) == columns


@pytest.mark.parametrize("tokens", [1, 7, 4096, 131072, 2**31 - 2**16])
@pytest.mark.parametrize(("group", "less"), [(8, 0), (4, 0), (8, 3), (4, 1)])
def test_ranges_cover_all_tokens(tokens: int, group: int, less: int) -> None:
    for channels in (8, 2048, 65536):
        columns = conv_cute.columns_of(channels, 4)
        size = conv_cute.range_tokens(tokens, channels, 4, columns, 132, 4, most=256, group=group, less=less)
        assert size >= 3
        assert (size + less) % group == 0
        grid = -(-channels // (4 * columns)) * -(-tokens // size)
        assert grid < 2**31
