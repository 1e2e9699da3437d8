"""Decoding on this package's own kernels: the recurrent ops against float64, a layer's token against its ops one by one, CUDA graphs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from own_kernels import check
from torch import Tensor

import deltafuse
from deltafuse.cli.cases import Case, quick_cases
from deltafuse.cli.specs import DeltaSpec
from deltafuse.cli.verify import relative_error
from deltafuse.nn import Cache, KimiDeltaAttention
from deltafuse.support import ARCHITECTURES, DECODE_COLUMNS, DECODE_KEY_DIMS

CUDA = torch.device("cuda")
BF, F32 = torch.bfloat16, torch.float32


def _supported() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() in ARCHITECTURES["fused_recurrent_kda"]


pytestmark = pytest.mark.skipif(not _supported(), reason="needs a Hopper or datacentre Blackwell GPU")

OPS = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule")
RAW: dict[str, Any] = {"l2norm": True, "beta_sigmoid": True, "gate": "softplus", "decay": "remembering"}
STATES: dict[str, Any] = {"initial_state": True, "final_state": True}


def _taken(case: Case) -> Case | None:
    """The case in sizes that the kernel has; None where no size would help."""
    spec = case.spec
    if not isinstance(spec, DeltaSpec) or spec.op not in OPS or spec.value_gate or spec.key_gate:
        return None
    sizes = {} if spec.key_dim in DECODE_KEY_DIMS else {"key_dim": 64}
    sizes |= {} if spec.value_dim % DECODE_COLUMNS == 0 else {"value_dim": 80}
    return replace(case, spec=replace(spec, **sizes))


def _cases() -> list[Case]:
    found = [case for case in map(_taken, quick_cases()) if case is not None]
    for op in OPS:
        token = DeltaSpec(op, batch=3, tokens=1, heads=2, **RAW, **STATES)
        for v_first in (False, True):
            turned = replace(token, v_first=v_first)
            layout = "V first" if v_first else "K first"
            # More than `decode_cute.FEW` warps of work: the layout for many sequences.
            many = replace(turned, batch=70, heads=4, key_dim=128, value_dim=128)
            found += [
                Case(f"many, {layout}", many, gradients=False),
                Case(f"many, K 64, GVA, {layout}", replace(many, key_dim=64, value_heads=8), gradients=False),
                Case(f"V 48, {layout}", replace(many, value_dim=48, batch=180), gradients=False),
                Case(f"K 256, {layout}", replace(turned, key_dim=256, value_dim=64), gradients=False),
                Case(f"16 tokens, {layout}", replace(turned, tokens=16, key_dim=128, value_dim=128), gradients=False),
                Case(f"no states, {layout}", replace(turned, initial_state=False, final_state=False), gradients=False),
            ]
    pool = DeltaSpec(
        "fused_recurrent_kda", batch=70, tokens=1, heads=4, key_dim=128, value_dim=128, slots="sequence", **RAW
    )
    return [
        *found,
        Case("many slots", pool, gradients=False),
        Case("many slots, V first", replace(pool, v_first=True), gradients=False),
        Case("many slots of tokens", replace(pool, tokens=3, slots="token"), gradients=False),
    ]


@pytest.mark.parametrize("dtype", [BF, torch.float16, F32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", _cases() if _supported() else [], ids=lambda case: f"{case.spec.op}: {case.name}")
def test_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


def test_says_what_it_does_not_take() -> None:
    for fields in ({"key_dim": 100}, {"value_dim": 100}):
        arguments = DeltaSpec("fused_recurrent_kda", tokens=1, **fields).arguments(BF, CUDA)
        with pytest.raises(deltafuse.UnsupportedError, match="decode kernel"):
            deltafuse.fused_recurrent_kda(**arguments, backend="cute")


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [BF, F32])
def test_a_sequence_has_the_same_bits_in_any_batch(dtype: torch.dtype, v_first: bool) -> None:
    """Fifty launches, with 70 sequences in wide warps and the first 3 in narrow ones; states in the dtype of q."""
    spec = DeltaSpec(
        "fused_recurrent_kda", batch=70, tokens=1, heads=4, key_dim=128, value_dim=128, v_first=v_first, **RAW, **STATES
    )
    arguments = spec.arguments(dtype, CUDA)
    arguments["initial_state"] = arguments["initial_state"].to(dtype)
    few = {n: x[:3] if isinstance(x, Tensor) and n not in ("A_log", "dt_bias") else x for n, x in arguments.items()}
    with torch.inference_mode():
        first = deltafuse.fused_recurrent_kda(**arguments, backend="cute")
        for _ in range(50):
            torch.full((64 * 2**20,), float("nan"), device=CUDA)  # what the allocator hands out next
            again = deltafuse.fused_recurrent_kda(**arguments, backend="cute")
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        alone = deltafuse.fused_recurrent_kda(**few, backend="cute")
    assert all(torch.equal(x[:3], y) for x, y in zip(first, alone, strict=True))


def captured(call: Any) -> torch.cuda.CUDAGraph:
    """A graph of one call that was made before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_a_pool_in_a_graph() -> None:
    """Three tokens by replays equal three calls; slots of other sequences keep their bits."""
    spec = DeltaSpec("fused_recurrent_kda", batch=5, tokens=1, heads=4, key_dim=128, value_dim=128, **RAW)
    given = spec.arguments(BF, CUDA)
    pool = torch.randn(9, 4, 128, 128, device=CUDA, dtype=BF)
    indices = torch.tensor([7, -1, 2, 0, 5], device=CUDA, dtype=torch.int32)
    out = torch.full_like(given["v"], float("nan"))
    own, graphs = pool.clone(), pool.clone()

    def call(states: Tensor) -> Tensor:
        o, _ = deltafuse.fused_recurrent_kda(
            **given, initial_state=states, ssm_state_indices=indices, inplace_final_state=True, out=out, backend="cute"
        )
        return o

    with torch.inference_mode():
        call(pool.clone())
        graph = captured(lambda: call(graphs))
        for _ in range(3):
            want = call(own).clone()
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, want)
            assert torch.equal(graphs, own)
    untouched = [1, 3, 4, 6, 8]
    assert torch.equal(own[untouched], pool[untouched])
    assert not torch.equal(own, pool)


def prefilled(dtype: torch.dtype, **fields: Any) -> tuple[KimiDeltaAttention, Cache, Tensor]:
    torch.manual_seed(0)
    layer = KimiDeltaAttention(hidden_size=256, head_dim=128, num_heads=4, layer_idx=0, **fields).to(CUDA, dtype).eval()
    cache = Cache()
    with torch.no_grad(), deltafuse.use_backend("torch"):
        layer(torch.randn(3, 5, 256, device=CUDA, dtype=dtype), past_key_values=cache, use_cache=True)
    return layer, cache, torch.randn(3, 1, 256, device=CUDA, dtype=dtype)


def token(layer: KimiDeltaAttention, cache: Cache, x: Tensor) -> Tensor:
    return layer(x, past_key_values=cache, use_cache=True)[0]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the layer's kernel took each token that a layer asked it about."""
    found: list[bool] = []
    ask = deltafuse.nn.kda.kda_layer_token

    def noted(*args: Any, **kwargs: Any) -> Any:
        answer = ask(*args, **kwargs)
        found.append(answer is not None)
        return answer

    monkeypatch.setattr(deltafuse.nn.kda, "kda_layer_token", noted)
    return found


FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "GVA, biases": {"num_v_heads": 8, "conv_bias": True, "allow_neg_eigval": True},
    "bounded, narrow V": {"lower_bound": -4.0, "expand_v": 0.5},
}


@pytest.mark.parametrize("dtype", [BF, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", FIELDS)
def test_a_layer_generates_as_its_ops_do(answers: list[bool], name: str, dtype: torch.dtype) -> None:
    layer, cache, x = prefilled(dtype, **FIELDS[name])
    other = deepcopy(cache)
    with torch.inference_mode():
        y = token(layer, cache, x)
        assert answers == [True]
        with deltafuse.use_backend("torch"):
            want = token(layer, other, x)
        assert answers == [True, False]
    limit = 1e-5 if dtype is F32 else 1e-2  # op by op q, k, v and o are rounded in between
    assert relative_error(y, want) <= limit
    assert relative_error(cache[0]["recurrent_state"], other[0]["recurrent_state"]) <= limit
    for got, expected in zip(cache[0]["conv_state"], other[0]["conv_state"], strict=True):
        assert torch.equal(got, expected)


def test_a_layers_token_in_a_graph(answers: list[bool]) -> None:
    layer, cache, x = prefilled(BF)
    own, warm = deepcopy(cache), deepcopy(cache)
    results: list[Tensor] = []
    with torch.inference_mode():
        token(layer, warm, x)
        graph = captured(lambda: results.append(token(layer, cache, x)))
        graph.replay()
        want = token(layer, own, x)
    assert answers == [True] * 3
    assert torch.equal(results[0], want)
    assert torch.equal(cache[0]["recurrent_state"], own[0]["recurrent_state"])
    for got, expected in zip(cache[0]["conv_state"], own[0]["conv_state"], strict=True):
        assert torch.equal(got, expected)
