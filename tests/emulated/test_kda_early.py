"""Segments that start early from a zero state: KDA on the emulated kernels with heads that forget, remember, and do both."""

from __future__ import annotations

import math
from typing import Any

import kda_model
import pytest
import test_kda_forward as whole
import torch
from test_kda_backward import compare as compare_gradients
from test_kda_prepare import make

from deltafuse.autograd.kda_cute import flags_of, forward, kernels_for
from deltafuse.cli.specs import DeltaSpec
from deltafuse.kernels.schedule import Schedule
from deltafuse.problem import parse_delta

PLAN = Schedule(64, 1, 3, 3)
"""Three segments of three chunks."""
STATES: dict[str, Any] = {"initial_state": True, "final_state": True}
KINDS = ("forgets", "remembers", "forgets but for the middle", "forgets in the middle")
NAN = math.nan


def decays(kinds: tuple[str, ...], tokens: int, key_dim: int) -> torch.Tensor:
    """g [1, T, H, K]. Heads that forget: -0.8 a token and less, so that two chunks leave 2^-147 of a state.

    The middle are two of the three chunks of the middle segment; where a head remembers there, one element grows, which no bound allows.
    """
    source = torch.Generator().manual_seed(11)
    strong, weak = (torch.rand(1, tokens, key_dim, generator=source) for _ in range(2))
    strong, weak = -0.8 - strong, -0.01 * weak
    middle = (torch.arange(tokens) // 128 == 2)[None, :, None]
    without = torch.where(middle, weak, strong)
    without[0, 64 * 5 + 40 : 64 * 5 + 41, 3] = 0.01
    every = dict(zip(KINDS, (strong, weak, without, torch.where(middle, strong, weak)), strict=True))
    return torch.stack([every[kind] for kind in kinds], 2)


class Watched:
    """`load` of the forward tests; whatever kernels may leave unwritten is NaN before, and what passes on is kept."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.codes: list[torch.Tensor] = []
        self.starts: list[torch.Tensor] = []
        self.ends: list[torch.Tensor] = []
        self.transitions: list[torch.Tensor] = []

    def __call__(self, kernel: str, config: Any, arch: str) -> Any:
        function = whole.load(kernel, config, arch)

        def launch(*args: Any) -> None:
            self.names.append(kernel)
            if kernel == "warp.kda_combine":
                self.starts.append(args[3].fill_(NAN))
                if args[4] is not None:
                    args[4].fill_(NAN)
            elif kernel == "sm90.kda_segments":
                self.ends.append(args[5].fill_(NAN))
                self.transitions.append(args[6].fill_(NAN))
                assert bool((args[8] == kda_model.UNDECIDED).all())
                self.codes.append(args[8])
            elif kernel == "sm90.kda_reverse":
                last = args[-5]
                if config.early == "decide":
                    self.codes.append(args[-3].fill_(-9))
                    self.ends.append(last.fill_(NAN))
                elif config.transition:
                    self.transitions.append(last.fill_(NAN))
            function(*args)

        return launch


def run(given: dict[str, Any], plan: Schedule = PLAN) -> tuple[tuple[torch.Tensor | None, ...], Watched]:
    """o, the final state and the chunks' states as slots; what was seen on the way."""
    with torch.no_grad():
        call = parse_delta("chunk_kda", per_key=True, **given)
    flags = flags_of(call.problem)
    rest = (call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, call.cu_seqlens, flags)
    chosen, seen = kernels_for(call.q, call.v, *rest, sms=132, plan=plan), Watched()
    return forward(call.q, call.k, call.v, *rest, chosen, "sm_90a", seen), seen


def inputs(
    kinds: tuple[str, ...] = KINDS, dtype: torch.dtype = torch.bfloat16, tokens: int = 64 * 8 + 9, **spec: Any
) -> dict[str, Any]:
    options: dict[str, Any] = {"l2norm": True, "beta_sigmoid": True, "key_dim": 64, "value_dim": 64} | spec
    given = DeltaSpec("chunk_kda", tokens=tokens, heads=len(kinds), **options).arguments(dtype, seed=3)
    given["g"] = decays(kinds, tokens, options["key_dim"])
    return given


def finite(states: torch.Tensor) -> list[list[bool]]:
    """Of states or maps of states [segments, H, .., ..]: by head and segment."""
    found: list[list[bool]] = states.isfinite().flatten(2).all(2).T.tolist()
    return found


def check(found: tuple[torch.Tensor | None, ...], given: dict[str, Any], allowed: float = 5e-3) -> None:
    whole.compare(found[:2], whole.exact(given)[:2], allowed)


@pytest.mark.parametrize(
    "spec",
    [
        STATES,
        {"final_state": True, "key_dim": 128, "value_dim": 128},
        STATES | {"v_first": True, "value_dim": 128},
        {"initial_state": True, "l2norm": False, "beta_sigmoid": False},
    ],
    ids=["states", "K and V 128", "V first", "no norm"],
)
def test_heads_of_every_kind_in_one_call(emulated: Any, spec: dict[str, Any]) -> None:
    emulated("sm_90a")
    given = inputs(**spec)
    if not spec.get("l2norm", True):
        given["k"] = given["k"] / 8
    found, seen = run(given, Schedule(64, 2 if spec.get("value_dim") == 128 else 1, 3, 3))
    check(found, given)
    assert seen.names == ["warp.kda_prepare", "sm90.kda_segments", "warp.kda_combine", "sm90.kda_scan"]
    assert seen.codes[0].T.tolist() == [[0, 2, 2], [0, 0, 0], [0, 2, 0], [0, 0, 2]]
    # Only what somebody needs is there: the states of segments with code 0, and the ends and transitions that lead to them.
    assert finite(seen.starts[0]) == [
        [True, False, False],
        [True, True, True],
        [True, False, True],
        [True, True, False],
    ]
    assert finite(seen.ends[0]) == [[False] * 3, [True] * 3, [False, True, True], [True, False, False]]
    assert finite(seen.transitions[0]) == [[False] * 3, [True] * 3, [False, False, True], [True, False, False]]


def test_fp16(emulated: Any) -> None:
    emulated("sm_90a")
    given = inputs(KINDS[:2], torch.float16, **STATES)
    found, seen = run(given)
    check(found, given, 1e-3)
    assert seen.codes[0].T.tolist() == [[0, 2, 2], [0, 0, 0]]


def test_packed_sequences(emulated: Any) -> None:
    """A long one, none, one of a single segment, one whose last segment is empty."""
    emulated("sm_90a")
    lengths = (64 * 8 + 9, 0, 70, 64 * 4)
    given = inputs(KINDS[:2], tokens=sum(lengths), lengths=lengths, **STATES)
    first, last = given["g"][:, : 64 * 8 + 9], given["g"][:, -64 * 4 :]
    last.copy_(first[:, : 64 * 4])
    found, seen = run(given)
    check(found, given)
    forgets, remembers = seen.codes[0].view(4, 3, 2).unbind(2)
    assert forgets.tolist() == [[0, 2, 2], [-1] * 3, [-1] * 3, [0, 2, 2]]
    assert remembers.tolist() == [[0, 0, 0], [-1] * 3, [-1] * 3, [0, 0, 0]]
    assert seen.ends[0].view(4, 3, 2, -1)[1:3].isnan().all()


def test_states_of_chunks(emulated: Any) -> None:
    emulated("sm_90a")
    given = inputs(KINDS[:3], intermediate=True, **STATES)
    (o, state, states, _), _ = run(given)
    assert states is not None
    whole.compare((o, state, states.unflatten(0, (1, -1))), whole.exact(given), 5e-3)


def test_bits_are_the_same_again_and_before_a_change(emulated: Any) -> None:
    """A later token decides nothing: here one that keeps a segment from starting early."""
    emulated("sm_90a")
    given = inputs(KINDS[:1], **STATES)
    (o, state, *_), seen = run(given)
    again = run(given)[0]
    assert torch.equal(o, again[0])
    assert torch.equal(state, again[1])
    given["g"] = given["g"].clone()
    given["g"][:, 64 * 5 + 7, :, 5] = 0.5
    later, other = run(given)
    assert (seen.codes[0].tolist(), other.codes[0].tolist()) == ([[0], [2], [2]], [[0], [2], [0]])
    assert torch.equal(o[:, : 64 * 5 + 7], later[0][:, : 64 * 5 + 7])
    assert not torch.equal(o[:, 64 * 5 + 7 :], later[0][:, 64 * 5 + 7 :])


def test_what_is_not_a_number_goes_as_far_as_an_early_start(emulated: Any) -> None:
    emulated("sm_90a")
    given = inputs(KINDS[:2], **STATES)
    given["v"] = given["v"].clone()
    given["v"][:, 64 + 5, :, 2] = NAN
    (o, state, *_), seen = run(given)
    assert seen.codes[0].T.tolist() == [[0, 2, 2], [0, 0, 0]]
    # By segment and head: chunk 1 is one of the two before segment 1, not of those before segment 2.
    wrong = [part.isnan().any(3).any(1)[0] for part in o.split(64 * 3, 1)]
    assert torch.stack(wrong).tolist() == [[True, True], [True, True], [False, True]]
    assert state.isnan().flatten(2).any(2).tolist() == [[False, True]]


@pytest.mark.parametrize("v_first", [False, True])
def test_gradients(emulated: Any, v_first: bool) -> None:
    """Gradients of states start early too, from behind."""
    emulated("sm_90a")
    seen = Watched()
    compare_gradients(inputs(v_first=v_first, **STATES), PLAN, seen)
    states, gradients = seen.codes
    assert states.T.tolist() == [[0, 2, 2], [0, 0, 0], [0, 2, 0], [0, 0, 2]]
    assert gradients.T.tolist() == [[2, 2, 0], [0, 0, 0], [0, 2, 0], [3, 0, 0]]
    assert finite(seen.starts[1]) == [
        [False, False, True],
        [True, True, True],
        [True, False, True],
        [False, True, True],
    ]
    assert finite(seen.ends[1]) == [[False] * 3, [True] * 3, [True, True, False], [False, False, True]]
    assert finite(seen.transitions[1]) == [[False] * 3, [True] * 3, [True, False, False], [False, False, True]]


def test_gradients_of_packed_sequences(emulated: Any) -> None:
    emulated("sm_90a")
    lengths = (64 * 6 + 9, 0, 70)
    given = inputs(KINDS[:2], tokens=sum(lengths), lengths=lengths, **STATES)
    seen = Watched()
    compare_gradients(given, Schedule(64, 1, 3, 3), seen)
    forgets, remembers = seen.codes[1].view(3, 3, 2).unbind(2)
    assert forgets.tolist() == [[2, 0, 0], [-1] * 3, [-1] * 3]
    assert remembers.tolist() == [[0, 0, 0], [-1] * 3, [-1] * 3]


BOUNDS: dict[str, dict[str, Any]] = {
    "softplus": {"beta_sigmoid": True},
    "bounded": {"gate": "bounded", "beta_sigmoid": True, "beta_limit": 2.0, "dtype": torch.float16},
    "log, fp32": {"gate": "log", "gate_dtype": torch.float32},
    "log, no norm, K 64": {"gate": "log", "l2norm": False, "key_dim": 64},
    "no norm, sigmoid, inverse": {"l2norm": False, "beta_sigmoid": True, "inverse": True},
    "packed": {"tokens": 150, "bounds": [0, 70, 70, 150]},
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bound_of_a_chunk(name: str) -> None:
    """What the equations say, and never less than the norm of the chunk's map of states."""
    case = make(**{"tokens": 100, "bound": True} | BOUNDS[name])
    if not case.config.beta_sigmoid:
        case.inputs["beta"] = case.inputs["beta"] * 3 - 1
    case.run()
    x, c = case.inputs, case.config
    k, beta = x["k"].double(), x["beta"].double()
    if c.l2norm:
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    if c.beta_sigmoid:
        beta = beta.sigmoid() * case.beta_limit
    log2_decay = kda_model.log2_decay(c.gate, x["g"], x.get("a_log"), x.get("dt_bias"), case.lower_bound)
    own = log2_decay.amax(-1) + (1 - beta * k.square().sum(-1)).abs().clamp(min=1).log2()
    _, chunks = kda_model.chunks_of(x["q"].shape[0], x["q"].shape[1], case.bounds)
    for chunk in chunks:
        at = slice(chunk.first, chunk.first + chunk.rows)
        got = case.out["bound"][chunk.slot, 0].double()
        torch.testing.assert_close(got, own[0, at, 0].sum(), rtol=2e-5, atol=1e-5)
        state = torch.eye(c.key_dim, dtype=torch.float64)
        for i in range(at.start, at.stop):
            state = log2_decay[0, i, 0].exp2()[:, None] * state
            state = state - beta[0, i, 0] * torch.outer(k[0, i, 0], k[0, i, 0] @ state)
        assert torch.linalg.matrix_norm(state, 2).log2() <= got + 1e-3


@pytest.mark.parametrize("column", [0, 1, 64, 127])
def test_a_decay_that_grows_has_no_bound(column: int) -> None:
    case = make(gate="log", tokens=128, bound=True)
    case.inputs["g"][0, 70] = -0.0
    case.inputs["g"][0, 70, 0, column] = 2.0**-20
    case.run()
    assert case.out["bound"][:, 0].tolist() == [pytest.approx(-0.5, abs=0.5), math.inf]
