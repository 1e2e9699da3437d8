"""`chunk_kda` on this package's own kernels: every flag, length and layout against float64, and what a kernel can do wrong beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from own_kernels import check, poisoned

import deltafuse
from deltafuse.autograd import kda_cute
from deltafuse.autograd.kda_cute import forward
from deltafuse.cli.cases import Case, full_cases
from deltafuse.cli.specs import DeltaSpec
from deltafuse.cli.verify import relative_error
from deltafuse.kernels.schedule import Schedule
from deltafuse.runtime.probe import environment
from deltafuse.support import verdicts

CUDA = torch.device("cuda")


def _supported() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


pytestmark = pytest.mark.skipif(not _supported(), reason="needs a Hopper GPU")

RAW: dict[str, Any] = {"l2norm": True, "beta_sigmoid": True}
TRAINED: dict[str, Any] = RAW | {"gate": "softplus", "decay": "remembering"}
STATES: dict[str, Any] = {"initial_state": True, "final_state": True}


def _cases() -> list[Case]:
    found = []
    for case in full_cases():
        if case.spec.op == "chunk_kda" and case.spec.key_dim <= 128 and not case.spec.intermediate:
            found.append(case if case.spec.tokens <= 200 else replace(case, gradients=False))
    states = DeltaSpec("chunk_kda", tokens=600, heads=1, intermediate=True, v_first=True, **STATES)
    packed = replace(states, tokens=255, lengths=(15, 85, 1, 64, 0, 90), v_first=False)
    # Enough heads for the gradient of A_log, a number a head, to be judged by.
    many: dict[str, Any] = RAW | {"tokens": 130, "heads": 64, "final_state": True}
    return [
        *found,
        Case("many heads", DeltaSpec("chunk_kda", gate="softplus", decay="remembering", **many)),
        Case("many heads, bounded", DeltaSpec("chunk_kda", gate="bounded", **many)),
        Case("states of chunks", states, gradients=False),
        Case("of packed chunks", packed, gradients=False),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", _cases() if _supported() else [], ids=lambda case: case.name)
def test_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def arguments(**fields: Any) -> dict[str, Any]:
    return DeltaSpec("chunk_kda", **fields).arguments(torch.bfloat16, CUDA)


def cute(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return tuple(x for x in deltafuse.chunk_kda(**given, backend="cute") if x is not None)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 1000, "heads": 64, "key_dim": 128, "value_dim": 128, **TRAINED, **STATES},
        {"tokens": 4096, "heads": 2, "key_dim": 128, "value_dim": 128, **TRAINED, **STATES},
        {"tokens": 3000, "heads": 4, "lengths": (1000, 1, 0, 63, 1936), "gate": "bounded", **RAW, **STATES},
    ],
    ids=["whole", "segments", "packed"],
)
def test_fifty_times_the_same_bits(fields: dict[str, Any]) -> None:
    given = arguments(**fields)
    first = cute(given)
    for _ in range(50):
        with poisoned():
            assert all(torch.equal(x, y) for x, y in zip(first, cute(given), strict=True))
    assert all(bool(x.isfinite().all()) for x in first)


@pytest.mark.parametrize("decay", ["remembering", "strong"])
def test_no_later_token_changes_an_earlier_output(decay: str) -> None:
    given = arguments(tokens=500, heads=2, decay=decay)
    before = cute(given)[0]
    for changed in (12, 77, 300, 498):
        other = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        for name in ("q", "k", "v", "g", "beta"):
            other[name][:, changed:] = given[name][:, changed:].flip(1)
        after = cute(other)[0]
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.equal(before[:, changed:], after[:, changed:])


def test_in_pieces_with_the_state_carried() -> None:
    given = arguments(tokens=1500, heads=2, key_dim=128, value_dim=128, **TRAINED, **STATES)
    whole_o, whole_state = cute(given)
    state, parts = given["initial_state"], []
    for start, end in ((0, 500), (500, 501), (501, 1100), (1100, 1500)):
        piece = {n: x[:, start:end] if n in ("q", "k", "v", "g", "beta") else x for n, x in given.items()}
        o, state = cute(piece | {"initial_state": state})
        parts.append(o)
    assert relative_error(torch.cat(parts, 1), whole_o) < 5e-3
    assert relative_error(state, whole_state) < 5e-3


@pytest.mark.parametrize(
    "plan",
    [
        Schedule(64, 1, 1, 64),
        Schedule(64, 2, 1, 64),
        Schedule(128, 1, 1, 64),
        Schedule(64, 2, 7, 10),
        Schedule(128, 1, 16, 4),
    ],
)
def test_every_schedule(plan: Schedule) -> None:
    given = arguments(tokens=64 * 63 + 5, heads=2, key_dim=128, value_dim=128, **TRAINED, **STATES)
    given["A_log"] = given["A_log"] - 3  # states outlive a segment, so that its transition counts
    exact = deltafuse.chunk_kda(
        **{n: x.double() if isinstance(x, torch.Tensor) else x for n, x in given.items()}, backend="torch"
    )
    call = deltafuse.problem.parse_delta("chunk_kda", per_key=True, **given)
    rest = (call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, None, kda_cute.flags_of(call.problem))
    kernels = kda_cute.kernels_for(call.q, call.v, *rest, sms=132, plan=plan)
    with poisoned():
        o, state, *_ = forward(call.q, call.k, call.v, *rest, kernels, "sm_90a")
    assert relative_error(o, exact[0]) < 5e-3
    assert relative_error(state, exact[1]) < 5e-3
    for _ in range(50):
        with poisoned():
            again = forward(call.q, call.k, call.v, *rest, kernels, "sm_90a")
        assert torch.equal(o, again[0])
        assert torch.equal(state, again[1])


def test_captured_in_a_graph() -> None:
    given = arguments(tokens=700, heads=4, key_dim=128, value_dim=128, **TRAINED, **STATES)
    eager = cute(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cute(given)
    for x in captured:
        x.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(eager, captured, strict=True))


def test_another_stream() -> None:
    given = arguments(tokens=700, heads=4, key_dim=128, value_dim=128, **TRAINED, **STATES)
    eager = cute(given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = cute(given)
    stream.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(eager, again, strict=True))


def test_compiled_by_torch() -> None:
    given = arguments(tokens=300, heads=2, **TRAINED, **STATES)
    compiled = torch.compile(lambda **x: deltafuse.chunk_kda(**x, backend="cute"), fullgraph=True)
    with torch.no_grad():
        assert all(torch.equal(x, y) for x, y in zip(cute(given), compiled(**given), strict=True))


def test_offsets_beyond_31_bits() -> None:
    """The last tokens of q, k, g and o lie more than 2^31 elements from the first."""
    heads, tokens = 64, 2**31 // (64 * 128) + 300
    given = arguments(tokens=200, heads=heads, key_dim=128, value_dim=128, **TRAINED)
    want = cute(given)[0]
    wide = {
        n: x.new_zeros((1, tokens, *x.shape[2:])) if n in ("q", "k", "v", "g", "beta") else x for n, x in given.items()
    }
    start = tokens - 200
    for name in ("q", "k", "v", "g", "beta"):
        wide[name][:, start:] = given[name]
    bounds = torch.tensor([0, start, tokens], device=CUDA)
    o = cute(wide | {"cu_seqlens": bounds})[0]
    assert torch.equal(o[:, start:], want)


def test_auto_chooses_the_kernels() -> None:
    given = arguments(tokens=100, heads=2, **TRAINED)
    assert deltafuse.explain("chunk_kda", **given).chosen == "cute"
    problem, device = deltafuse.backends.problem_of("chunk_kda", **given)
    assert verdicts(problem, environment(device.type, device.index))[0].supported


def leaves(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that get a gradient, made leaves in place."""
    found = {
        n: x.detach().requires_grad_()
        for n, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    given.update(found)
    return found


TRAINING = [
    {"tokens": 700, "heads": 4, "key_dim": 128, "value_dim": 128, **TRAINED, **STATES},
    {"tokens": 4096, "heads": 2, "key_dim": 128, "value_dim": 128, **TRAINED, **STATES},
    {
        "tokens": 3000,
        "heads": 2,
        "value_heads": 4,
        "lengths": (1000, 1, 0, 63, 1936),
        "gate": "bounded",
        **RAW,
        **STATES,
    },
]


def step(given: dict[str, Any], wanted: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    o, state = deltafuse.chunk_kda(**given, backend="cute")
    return torch.autograd.grad([o, state], list(wanted.values()), [torch.ones_like(o), torch.ones_like(state)])


@pytest.mark.parametrize("fields", TRAINING, ids=["whole", "segments", "packed, GVA"])
def test_gradients_fifty_times_the_same_bits(fields: dict[str, Any]) -> None:
    given = arguments(**fields)
    wanted = leaves(given)
    first = step(given, wanted)
    for _ in range(50):
        with poisoned():
            assert all(torch.equal(x, y) for x, y in zip(first, step(given, wanted), strict=True))
    assert all(bool(x.isfinite().all()) for x in first)


def test_a_training_step_in_a_graph() -> None:
    given = arguments(**TRAINING[0])
    wanted = leaves(given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = step(given, wanted)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(given, wanted)
    for x in captured:
        x.fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(eager, captured, strict=True))


def test_training_compiled_by_torch() -> None:
    given = arguments(**TRAINING[0])
    wanted = leaves(given)
    compiled = torch.compile(lambda **x: deltafuse.chunk_kda(**x, backend="cute"), fullgraph=True)
    o, state = compiled(**given)
    got = torch.autograd.grad([o, state], list(wanted.values()), [torch.ones_like(o), torch.ones_like(state)])
    assert all(torch.equal(x, y) for x, y in zip(got, step(given, wanted), strict=True))


def test_strong_gates_have_finite_gradients() -> None:
    given = arguments(tokens=200, heads=2, decay="strong", gate="softplus", **RAW)
    given["g"] = (given["g"] * 40).to(torch.bfloat16)  # saturated both ways
    wanted = leaves(given)
    o, _ = deltafuse.chunk_kda(**given, backend="cute")
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(o, list(wanted.values()), torch.ones_like(o)))
