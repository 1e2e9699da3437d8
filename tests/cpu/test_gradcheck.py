"""`torch.autograd.gradcheck` in float64: finite differences of each op itself, without the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import GATES, Call, label, make, pairwise

from deltafuse import fused_kda_gate

# 5 tokens are checked element by element; more (chunks and sequences that end inside one) along random directions.
SIZES = [{"T": 5}, {"T": 5, "lengths": [2, 0, 3]}, {"T": 35, "B": 2}, {"lengths": [33, 0, 1, 40]}]

EVERY = [
    pytest.param(family, c, id=f"{family}-{label(c)}")
    for family, gates, chunks in (("kda", GATES, [32, 64]), ("gdn", GATES[:2], [16, 32, 64]))
    for c in pairwise(
        size=SIZES, gate=gates, l2norm=[False, True], beta=["plain", "sigmoid", "negative"], initial=[False, True],
        v_first=[False, True], HV=[1, 2], chunk_size=chunks, disable_recompute=[False, True], final=[False, True],
    )
]  # fmt: skip


def check(call: Call, op: Any, *, fast: bool, final: bool = True, **more: Any) -> None:
    leaves = call.leaves()
    names = list(leaves.tensors)

    def function(*tensors: torch.Tensor) -> Any:
        result = call.with_tensors(**dict(zip(names, tensors, strict=True))).run(op, output_final_state=final, **more)
        return result if final else result[0]

    torch.manual_seed(0)  # the directions of the fast mode
    assert torch.autograd.gradcheck(function, tuple(leaves.tensors.values()), fast_mode=fast)


@pytest.mark.parametrize(("family", "combination"), EVERY)
def test_chunked(family: str, combination: dict[str, Any]) -> None:
    options = {**combination, **combination["size"]}
    more = {n: options.pop(n) for n in ("chunk_size", "disable_recompute", "final")}
    if family == "gdn":
        del more["disable_recompute"]
    size = options.pop("size")
    call = make(family, K=3, V=2, **options)
    check(call, call.chunk, fast=size.get("T") != 5, **more)


@pytest.mark.parametrize(("family", "combination"), EVERY[::3])
def test_recurrent(family: str, combination: dict[str, Any]) -> None:
    options = {**combination, **combination["size"]}
    for name in ("chunk_size", "disable_recompute", "size"):
        del options[name]
    final = options.pop("final")
    call = make(family, K=3, V=2, **options)
    check(call, call.recurrent, fast=combination["size"].get("T") != 5, final=final)


@pytest.mark.parametrize("disable_recompute", [False, True])
def test_across_windows(disable_recompute: bool) -> None:
    call = make("kda", lengths=[530, 0, 515], K=2, V=2, gate="softplus", initial=True)
    check(call, call.chunk, fast=True, chunk_size=32, disable_recompute=disable_recompute)


def test_two_gates_of_the_recurrent_op() -> None:
    call = make("gdn", T=5, K=3, V=2, gate="softplus", initial=True)
    gk = -torch.rand(1, 5, 1, 3, dtype=torch.float64)
    check(call.with_tensors(gk=gk), call.recurrent, fast=False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", GATES[1:])
def test_gate_alone(gate: str, bias: bool) -> None:
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    a_log = None if gate == "bounded, no A_log" else draw(2)
    dt_bias = draw(6) if bias else None
    bound = None if gate == "softplus" else -4.0
    inputs = (draw(3, 2, 3), a_log, dt_bias)
    assert torch.autograd.gradcheck(lambda g, a, b: fused_kda_gate(g, a, b, bound, torch.float64), inputs)
