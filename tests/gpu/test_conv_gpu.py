"""The short convolution on this package's own kernels: against float64, strides, the same bits 50 times, more blocks than a grid has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from own_kernels import check, poisoned
from torch import Tensor

import deltafuse
from deltafuse.cli.cases import Case, quick_cases
from deltafuse.cli.specs import ConvSpec

CUDA = torch.device("cuda")
BF, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def _supported() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


pytestmark = pytest.mark.skipif(not _supported(), reason="needs a GPU from Ampere on")


def _short(count: int) -> tuple[int, ...]:
    """Lengths of 1 to 3 tokens."""
    source = random.Random(0)
    return tuple(source.randint(1, 3) for _ in range(count))


def _packed(lengths: tuple[int, ...], **options: object) -> ConvSpec:
    return ConvSpec("causal_conv1d", tokens=sum(lengths), lengths=lengths, activation="silu", **options)  # type: ignore[arg-type]


DENSE = ConvSpec("causal_conv1d", batch=2, tokens=1000, channels=512, activation="silu")
STATES = {"initial_state": True, "final_state": True}
CASES = {
    "dense": DENSE,
    "all at once": replace(DENSE, bias=True, residual=True, **STATES),
    "W 2": replace(DENSE, width=2, activation=None, **STATES),
    "W 3, D 1000": replace(DENSE, width=3, channels=1000),
    "D 37": replace(DENSE, batch=7, channels=37, **STATES),
    "one token": replace(DENSE, batch=5, tokens=1, **STATES),
    "two tokens": replace(DENSE, batch=5, tokens=2, **STATES),
    "empty sequences among others": _packed((0, 0, 5000, 0, 1, 2, 0, 700, 0), channels=96, **STATES),
    "update": ConvSpec("causal_conv1d_update", batch=128, tokens=1, channels=12_288, activation="silu"),
}
MANY = {
    "rows of one token": replace(DENSE, batch=70_000, tokens=1, channels=64, **STATES),
    "sequences": _packed(_short(70_000), channels=64, bias=True),
    "sequences with states": _packed(_short(70_000), channels=40, **STATES),
    "update": ConvSpec("causal_conv1d_update", batch=70_000, tokens=1, channels=64, bias=True, residual=True),
}
"""70,000 of each: against torch's path in float64, which takes no loop over sequences."""


def _cases() -> Iterator[Case]:
    yield from (case for case in quick_cases() if isinstance(case.spec, ConvSpec) and 2 <= case.spec.width <= 4)
    for name, spec in CASES.items():
        yield Case(name, spec, gradients=not spec.updates)


@pytest.mark.parametrize("dtype", [BF, F16, F32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", _cases() if _supported() else [], ids=lambda case: f"{case.spec.op}: {case.name}")
def test_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def _results(spec: ConvSpec, given: dict[str, Tensor], backend: str) -> list[Tensor]:
    """Results, then gradients of their sum with weights, of all that have one."""
    if spec.updates:
        return list(deltafuse.causal_conv1d_update(**given, backend=backend))
    leaves = [x.requires_grad_() for x in given.values() if isinstance(x, Tensor) and x.is_floating_point()]
    outputs = [y for y in deltafuse.causal_conv1d(**given, backend=backend) if y is not None]
    weights = [torch.linspace(-1, 1, y.numel(), device=CUDA).reshape(y.shape).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, weights)]


@pytest.mark.parametrize("dtype", [BF, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", MANY)
def test_many_sequences(name: str, dtype: torch.dtype) -> None:
    given = MANY[name].arguments(dtype, CUDA)
    exact = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in given.items()}
    got, want = _results(MANY[name], given, "cute"), _results(MANY[name], exact, "torch")
    within = 8e-3 if dtype == BF else 1e-5
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < within * y.norm()


def _tensors(spec: ConvSpec) -> dict[str, Tensor]:
    return spec.arguments(BF, CUDA, seed=1)


@pytest.mark.parametrize("start", [1, 8, 64])
def test_a_slice_of_a_wider_projection_is_not_copied(start: int) -> None:
    given = _tensors(DENSE)
    x = given.pop("x")
    wide = torch.full((*x.shape[:2], 3 * x.shape[2]), float("nan"), dtype=x.dtype, device=CUDA)
    part = wide[..., start : start + x.shape[2]]
    part.copy_(x)
    want, _ = deltafuse.causal_conv1d(x, **given, backend="cute")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got, _ = deltafuse.causal_conv1d(part, **given, backend="cute")
    assert torch.cuda.max_memory_allocated() - before < 1.5 * x.nbytes  # y alone
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["all at once", "D 37", "sequences with states", "empty sequences among others"])
def test_fifty_times_the_same_bits(name: str) -> None:
    """Forward and backward, into memory that is NaN before."""
    spec = (CASES | MANY)[name]
    given = _tensors(spec)
    first: list[Tensor] | None = None
    with poisoned():
        for _ in range(50):
            found = _results(spec, given, "cute")
            assert all(x.isfinite().all() for x in found)
            first = first or [x.detach().clone() for x in found]
            assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))


def test_beyond_32_bits() -> None:
    """More than 2^31 elements: channels are independent, so a few of them say whether all are where they should be."""
    x = torch.randn(2, 600_000, 2048, dtype=BF, device=CUDA)
    weight = torch.randn(2048, 2, dtype=BF, device=CUDA)
    y, _ = deltafuse.causal_conv1d(x, weight, activation="silu", backend="cute")
    for first, last in pairwise((0, 8, 1024, 1032, 2040, 2048)):
        if last - first > 8:
            continue
        part = slice(first, last)
        want, _ = deltafuse.causal_conv1d(
            x[..., part].float(), weight[part].float(), activation="silu", backend="torch"
        )
        assert (y[..., part].float() - want).norm() < 4e-3 * want.norm()
