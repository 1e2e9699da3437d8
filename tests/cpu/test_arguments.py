"""Bad arguments: what is raised, and that it says which argument, what it got and what is allowed. Good ones: inputs stay as they are."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Call, assert_near, gradients, make, seeds_of
from torch import Tensor

import deltafuse
from deltafuse import chunk_kda, fused_kda_gate
from deltafuse.problem import parse_delta

CHUNK = ("chunk_kda", "chunk_gated_delta_rule")
RECURRENT = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule")
KDA = ("chunk_kda", "fused_recurrent_kda")
GDN = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
ONE_GATE = (*KDA, "chunk_gated_delta_rule")  # the other one has several gates and needs none
EVERY = (*CHUNK, *RECURRENT)

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 5


def base(op: str, **more: Any) -> Call:
    return make("kda" if op in KDA else "gdn", B=B, T=T, H=H, HV=HV, K=K, V=V, dtype=torch.float32, **more)


def packed(op: str) -> Call:
    return base(op, lengths=[2, 4])


def raises(op: str, call: Call, name: str, got: str, allowed: str, **arguments: Any) -> None:
    """The op raises ValueError with "`name`: got ...; allowed: ..." that has these two pieces."""
    with pytest.raises(ValueError, match=re.escape(f"`{name}`: got ")) as caught:
        getattr(deltafuse, op)(**{**call.tensors, **call.flags, **arguments})
    assert type(caught.value) is ValueError
    message = str(caught.value)
    seen, _, may = message.partition("; allowed: ")
    assert got in seen, message
    assert allowed in may, message


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


# op(s), argument, its bad value, what the message shows of it, what it says is allowed
Bad = tuple[tuple[str, ...], str, Any, str, str]
TENSORS: list[Bad] = [
    (EVERY, "q", None, "None", "a tensor [B, T, H, K]"),
    (EVERY, "q", [[1.0]], "[[1.0]]", "a tensor [B, T, H, K]"),
    (EVERY, "q", randn(B, T, K), f"[{B}, {T}, {K}]", "[B, T, H, K]"),
    (EVERY, "q", randn(B, T, 0, K), f"[{B}, {T}, 0, {K}]", "H, K >= 1"),
    (CHUNK, "q", randn(B, T, H, 0), f"[{B}, {T}, {H}, 0]", "H, K >= 1"),
    (EVERY, "q", torch.ones(B, T, H, K, dtype=torch.int64), "int64", "float16, bfloat16, float32, float64"),
    (EVERY, "q", torch.ones(B, T, H, K, dtype=torch.complex64), "complex64", "float16, bfloat16, float32, float64"),
    (EVERY, "k", None, "None", "a tensor [B, T, H, K]"),
    (EVERY, "k", randn(B, T, H, K + 1), f"[{B}, {T}, {H}, {K + 1}]", f"[{B}, {T}, {H}, {K}]"),
    (EVERY, "k", randn(B, T, HV, K), f"[{B}, {T}, {HV}, {K}]", f"[{B}, {T}, {H}, {K}]"),
    (EVERY, "k", randn(B, T + 1, H, K), f"[{B}, {T + 1}, {H}, {K}]", f"[{B}, {T}, {H}, {K}]"),
    (EVERY, "k", randn(B, T, H, K).bfloat16(), "bfloat16", "float32"),
    (EVERY, "k", randn(B, T, H, K).to("meta"), "on meta", "on cpu"),
    (EVERY, "v", None, "None", "a tensor [B, T, HV, V]"),
    (EVERY, "v", randn(B, T, HV), f"[{B}, {T}, {HV}]", "[B, T, HV, V]"),
    (EVERY, "v", randn(B, T, HV, V).bfloat16(), "bfloat16", "float32"),
    (EVERY, "v", randn(B, T, HV, V).to("meta"), "on meta", "on cpu"),
    (CHUNK, "v", randn(B, T + 1, HV, V), f"[{B}, {T + 1}, {HV}, {V}]", f"[{B}, {T}, HV, V]"),
    (CHUNK, "v", randn(B, T, 0, V), f"[{B}, {T}, 0, {V}]", "HV, V >= 1"),
    (EVERY, "v", randn(B, T, HV, 0), f"[{B}, {T}, {HV}, 0]", "HV, V >= 1"),
    (ONE_GATE, "v", randn(B, T, 3, V), "3 value heads", f"multiple of q's {H} heads"),
    (ONE_GATE, "g", None, "None", "a tensor [B, T, HV"),
    (KDA, "g", randn(B, T, HV), f"[{B}, {T}, {HV}]", f"[{B}, {T}, {HV}, {K}]"),
    (KDA, "g", randn(B, T, H, K), f"[{B}, {T}, {H}, {K}]", f"[{B}, {T}, {HV}, {K}]"),
    (GDN, "g", randn(B, T, HV, K), f"[{B}, {T}, {HV}, {K}]", f"[{B}, {T}, {HV}]"),
    (EVERY, "g", torch.ones(1, dtype=torch.int32), "[1]", "HV"),
    (KDA, "g", torch.ones(B, T, HV, K, dtype=torch.int32), "int32", "float16, bfloat16, float32, float64"),
    (ONE_GATE, "beta", None, "None", "a tensor [B, T, HV]"),
    (EVERY, "beta", randn(B, T, H), f"[{B}, {T}, {H}]", f"[{B}, {T}, {HV}]"),
    (CHUNK, "beta", randn(B, T, HV, V), f"[{B}, {T}, {HV}, {V}]", f"[{B}, {T}, {HV}]"),
    (RECURRENT, "beta", randn(B, T, HV, V + 1), f"[{B}, {T}, {HV}, {V + 1}]", f"[{B}, {T}, {HV}, {V}]"),
    (EVERY, "beta", torch.ones(B, T, HV, dtype=torch.bool), "bool", "float16, bfloat16, float32, float64"),
    (EVERY, "initial_state", [0], "[0]", "a tensor [N, HV, K, V]"),
    (EVERY, "initial_state", randn(B + 1, HV, K, V), f"[{B + 1}, {HV}, {K}, {V}]", f"[{B}, {HV}, {K}, {V}]"),
    (EVERY, "initial_state", randn(B, HV, V, K), f"[{B}, {HV}, {V}, {K}]", f"[{B}, {HV}, {K}, {V}]"),
    (EVERY, "initial_state", randn(B, H, K, V), f"[{B}, {H}, {K}, {V}]", f"[{B}, {HV}, {K}, {V}]"),
    (("chunk_kda",), "initial_state", randn(B, HV, K, V).bfloat16(), "bfloat16", "float32"),
    (("chunk_kda",), "initial_state", randn(B, HV, K, V).double(), "float64", "float32"),
    ((*RECURRENT, "chunk_gated_delta_rule"), "initial_state", torch.zeros(B, HV, K, V, dtype=torch.int64), "int64",
     "float16, bfloat16, float32, float64"),
    (EVERY, "initial_state", randn(B, HV, K, V).to("meta"), "on meta", "on cpu"),
    (("fused_recurrent_gated_delta_rule",), "gk", randn(B, T, HV), f"[{B}, {T}, {HV}]", f"[{B}, {T}, {HV}, {K}]"),
    (("fused_recurrent_gated_delta_rule",), "gk", 1.0, "1.0", "a tensor [B, T, HV, K]"),
    (("fused_recurrent_gated_delta_rule",), "gv", randn(B, T, HV, K), f"[{B}, {T}, {HV}, {K}]", f"[{B}, {T}, {HV}, {V}]"),
]  # fmt: skip
VALUES: list[Bad] = [
    (EVERY, "scale", float("nan"), "nan", "a finite number"),
    (EVERY, "scale", float("inf"), "inf", "a finite number"),
    (EVERY, "scale", "1", "'1'", "a finite number, or None"),
    (EVERY, "scale", True, "True", "a finite number"),
    (EVERY, "scale", torch.tensor(1.0), "a tensor of shape []", "a finite number"),
    (("chunk_kda",), "chunk_size", 16, "16", "32 or 64"),
    (("chunk_kda",), "chunk_size", 128, "128", "32 or 64"),
    (CHUNK, "chunk_size", 63, "63", "32 or 64"),
    (CHUNK, "chunk_size", 64.0, "64.0", "32 or 64"),
    (CHUNK, "chunk_size", None, "None", "32 or 64"),
    (CHUNK, "chunk_size", "64", "'64'", "32 or 64"),
    (CHUNK, "chunk_size", torch.tensor(64), "a tensor", "32 or 64"),
    (("chunk_gated_delta_rule",), "chunk_size", 8, "8", "16 or 32 or 64"),
    (EVERY, "allow_neg_eigval", True, "True", "use_beta_sigmoid_in_kernel=True"),
    (("chunk_kda",), "cp_context", object(), "object", "a context with cu_seqlens"),
    (("chunk_kda",), "cp_context", SimpleNamespace(cu_seqlens=None), "without cu_seqlens", "a context with cu_seqlens"),
    (EVERY, "backend", "triton", "'triton'", "'auto', 'cute', 'fla', 'torch'"),
    (EVERY, "backend", 3, "3", "'auto', 'cute', 'fla', 'torch'"),
]  # fmt: skip


def spread(rows: list[Bad]) -> list[Any]:
    return [
        pytest.param(op, *row, id=f"{op}-{row[0]}-{row[2][:30]}") for ops, *row in rows for op in ops
    ]  # fmt: skip


@pytest.mark.parametrize(("op", "name", "value", "got", "allowed"), spread(TENSORS))
def test_tensors(op: str, name: str, value: Any, got: str, allowed: str) -> None:
    raises(op, base(op), name, got, allowed, **{name: value})


@pytest.mark.parametrize(("op", "name", "value", "got", "allowed"), spread(VALUES))
def test_values(op: str, name: str, value: Any, got: str, allowed: str) -> None:
    raises(op, base(op), name, got, allowed, **{name: value})


@pytest.mark.parametrize("op", EVERY)
def test_heads(op: str) -> None:
    """HV is a multiple of H; q is never repeated the other way."""
    call = base(op)
    q = randn(B, T, 3, K)
    raises(op, call.with_tensors(q=q, k=q), "v", f"{HV} value heads", "multiple of q's 3 heads")
    q = randn(B, T, 8, K)
    raises(op, call.with_tensors(q=q, k=q), "v", f"{HV} value heads", "multiple of q's 8 heads")


@pytest.mark.parametrize("op", EVERY)
def test_layout_of_the_state(op: str) -> None:
    call = base(op, initial=True, v_first=True)
    raises(
        op,
        call,
        "initial_state",
        f"[{B}, {HV}, {V}, {K}]",
        f"[N, HV, K, V] = [{B}, {HV}, {K}, {V}]",
        state_v_first=False,
    )
    raises(op, call, "transpose_state_layout", "True", "one of `state_v_first` and", transpose_state_layout=True)
    raises(op, call, "transpose_state_layout", "False", "one of `state_v_first` and", transpose_state_layout=False)
    call = base(op, initial=True)
    raises(
        op,
        call,
        "initial_state",
        f"[{B}, {HV}, {K}, {V}]",
        f"[N, HV, V, K] = [{B}, {HV}, {V}, {K}]",
        transpose_state_layout=True,
    )


@pytest.mark.parametrize("op", EVERY)
def test_packing(op: str) -> None:
    call = packed(op)
    raises(op, base(op), "cu_seqlens", f"a batch of {B}", "batch 1", cu_seqlens=torch.tensor([0, 2, T]))
    bad: list[tuple[Any, str, str]] = [
        (torch.tensor([1, 2, 6]), "1 first", "0 first"),
        (torch.tensor([-1, 2, 6]), "-1 first", "0 first"),
        (torch.tensor([0, 4, 2, 6]), "2 after 4", "never decrease"),
        (torch.tensor([0, 2, 5]), "5 last", "T = 6 last"),
        (torch.tensor([0, 2, 7]), "7 last", "T = 6 last"),
        (torch.tensor([0]), "0 last", "T = 6 last"),
        (torch.tensor([], dtype=torch.int64), "shape [0]", "shape [N + 1]"),
        (torch.tensor([[0, 2, 6]]), "shape [1, 3]", "shape [N + 1]"),
        (torch.tensor(6), "shape []", "shape [N + 1]"),
        (torch.tensor([0.0, 2, 6]), "float32", "int32, int64"),
        (torch.tensor([0, 2, 6], dtype=torch.int16), "int16", "int32, int64"),
        ([0, 2, 6], "[0, 2, 6]", "a tensor [N + 1]"),
        (torch.tensor([0, 2, 6]).to("meta"), "on meta", "on cpu"),
    ]
    for value, got, allowed in bad:
        raises(op, call, "cu_seqlens", got, allowed, cu_seqlens=value)
    state = randn(3, HV, K, V)
    raises(op, call, "initial_state", f"[3, {HV}, {K}, {V}]", f"[2, {HV}, {K}, {V}]", initial_state=state)
    for dtype in (torch.int32, torch.int64):
        getattr(deltafuse, op)(**call.tensors, cu_seqlens=torch.tensor([0, 2, 6], dtype=dtype))


@pytest.mark.parametrize("op", EVERY)
def test_bounds_on_the_cpu(op: str) -> None:
    call = packed(op)
    for value, got, allowed in (
        (torch.tensor([0, 6]), "shape [2]", "[N + 1] (as cu_seqlens) = [3]"),
        (torch.tensor([0.0, 2, 6]), "float32", "int32, int64"),
        ([0, 2, 6], "[0, 2, 6]", "a tensor"),
    ):
        raises(op, call, "cu_seqlens_cpu", got, allowed, cu_seqlens_cpu=value)
    raises(op, call, "cu_seqlens", "5 last", "T = 6 last", cu_seqlens_cpu=torch.tensor([0, 2, 5]))
    raises(
        op, base(op), "cu_seqlens_cpu", "[2]", "None where `cu_seqlens` is None", cu_seqlens_cpu=torch.tensor([0, 6])
    )


def test_bounds_that_are_padded() -> None:
    call = packed("chunk_kda")
    raises("chunk_kda", call, "max_num_seqs", "3", "number of packed sequences (2)", use_graph=True, max_num_seqs=3)
    raises("chunk_kda", call, "use_graph", "True", "disable_recompute", use_graph=True, disable_recompute=True)
    bounds = torch.tensor([0, 2, 7])
    raises(
        "chunk_kda",
        call,
        "cu_seqlens",
        "7 last",
        "T = 6 last, or less with use_graph",
        cu_seqlens=bounds,
        use_graph=True,
    )
    # fla reads `max_num_seqs` with `use_graph` alone.
    assert torch.equal(call.run(max_num_seqs=7)[0], call.run()[0])


@pytest.mark.parametrize("op", EVERY)
def test_gates(op: str) -> None:
    call = base(op, gate="softplus")
    raises(op, call, "A_log", "None", "a tensor [HV]", A_log=None)
    raises(op, call, "A_log", "[3]", f"{HV} elements, [HV]", A_log=randn(3))
    raises(op, call, "A_log", "int64", "float32", A_log=torch.zeros(HV, dtype=torch.int64))
    raises(op, call, "A_log", "1.0", "a tensor [HV]", A_log=1.0)
    raises(op, call, "A_log", "on meta", "on cpu", A_log=randn(HV).to("meta"))
    count = HV * K if op in KDA else HV
    raises(op, call, "dt_bias", "[3]", f"{count} elements", dt_bias=randn(3))
    raises(op, call, "dt_bias", "[1.0]", "a tensor [HV", dt_bias=[1.0])
    # Parameters of a gate that is off are not read.
    plain = base(op)
    unused = plain.run(getattr(deltafuse, op), A_log=randn(3), dt_bias=randn(HV))[0]
    assert torch.equal(unused, plain.run(getattr(deltafuse, op))[0])


@pytest.mark.parametrize("op", KDA)
def test_lower_bounds(op: str) -> None:
    call = base(op, gate="bounded")
    for value, got in (
        (0.0, "0.0"),
        (1, "1"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ("-5", "'-5'"),
        (True, "True"),
    ):
        raises(op, call, "lower_bound", got, "a negative number or None", lower_bound=value)
    if op == "chunk_kda":
        raises(op, call, "lower_bound", "None", "[-5, 0) with safe_gate", lower_bound=None, safe_gate=True)
        for value, got in ((0.0, "0.0"), (-5.01, "-5.01"), (2, "2")):
            raises(op, call, "lower_bound", got, "[-5, 0) with safe_gate", lower_bound=value, safe_gate=True)
        call.run(safe_gate=True, lower_bound=-5)
    call.run(getattr(deltafuse, op), lower_bound=-20)
    raises(op, base(op, gate="softplus"), "A_log", "None", "or give `lower_bound`", A_log=None)


def test_gate_with_two_gates() -> None:
    """`fused_recurrent_gated_delta_rule` with g and gk checks the parameters as without gk."""
    call = base("fused_recurrent_gated_delta_rule", gate="softplus")
    op, gk = "fused_recurrent_gated_delta_rule", -torch.rand(B, T, HV, K)
    raises(op, call, "A_log", "None", "a tensor [HV]", gk=gk, A_log=None)
    raises(op, call, "A_log", "[1.0]", "a tensor [HV]", gk=gk, A_log=[1.0])
    raises(op, call, "A_log", "[3]", f"{HV} elements", gk=gk, A_log=randn(3))
    raises(op, call, "dt_bias", "[3]", f"{HV} elements", gk=gk, dt_bias=randn(3))
    raises(op, call, "dt_bias", "0", "a tensor [HV]", gk=gk, dt_bias=0)
    raises(op, call, "g", "None", "a tensor [B, T, HV] with use_gate_in_kernel=True", gk=gk, g=None)
    raises(op, call, "g", "None", "a tensor [B, T, HV] with use_gate_in_kernel=True", g=None)


def test_intermediate_states_are_for_inference() -> None:
    call = base("chunk_kda")
    raises(
        "chunk_kda",
        call,
        "return_intermediate_states",
        "True",
        "no_grad",
        return_intermediate_states=True,
        disable_recompute=True,
    )
    leaf = call.leaves(["beta"])
    raises("chunk_kda", leaf, "return_intermediate_states", "True", "no_grad", return_intermediate_states=True)
    with torch.no_grad():
        assert len(leaf.run(return_intermediate_states=True)) == 3


def test_context_parallel() -> None:
    for op in CHUNK:
        call = packed(op)
        context = SimpleNamespace(cu_seqlens=call.flags["cu_seqlens"], cu_seqlens_cpu=None)
        raises(op, call, "cp_context", "with states", "no `initial_state`", cp_context=context, output_final_state=True)
        raises(
            op,
            call,
            "cp_context",
            "with states",
            "no `initial_state`",
            cp_context=context,
            initial_state=randn(2, HV, K, V),
        )
        with pytest.raises(deltafuse.UnsupportedError, match="cp_context"):
            call.run(cp_context=context, output_final_state=False)


def test_serving_form() -> None:
    op, call = "fused_recurrent_kda", base("fused_recurrent_kda")
    pool, slots = randn(9, HV, K, V), torch.zeros(B, dtype=torch.int64)
    rows = torch.zeros(B, T, dtype=torch.int64)
    per_token = {"initial_state": pool, "ssm_state_indices": rows}
    bad: list[tuple[str, dict[str, Any], str, str]] = [
        ("inplace_final_state", {"inplace_final_state": True}, "True", "`initial_state`"),
        ("ssm_state_indices", {"ssm_state_indices": slots}, f"[{B}]", "None without `initial_state`"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": [0, 1]}, "[0, 1]", "a tensor [N] or [N, T]"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": slots.float()}, "float32", "int32, int64"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": slots.to("meta")}, "on meta", "on cpu"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": torch.zeros(B + 1, dtype=torch.int64)}, "[3]", f"N = {B}"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": torch.tensor(0)}, "[]", f"N = {B}"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": rows[:, :0]}, f"[{B}, 0]", f"N = {B}"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": rows[:, :3]}, f"[{B}, 3]", f"T = {T}"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": slots + 9}, "9 to 9", "-1 (none) to 8"),
        ("ssm_state_indices", {"initial_state": pool, "ssm_state_indices": slots - 2}, "-2 to -2", "-1 (none) to 8"),
        ("initial_state", {"initial_state": pool[0], "ssm_state_indices": slots}, f"[{HV}, {K}, {V}]", f"{HV}, {K}, {V}]"),
        ("initial_state", {"initial_state": randn(9, HV, V, K), "ssm_state_indices": slots}, f"[9, {HV}, {V}, {K}]", "[slots, HV, K, V]"),
        ("num_accepted_tokens", {"num_accepted_tokens": slots + 1}, f"[{B}]", "None unless `ssm_state_indices` is [N, T]"),
        ("num_accepted_tokens", {"initial_state": pool, "ssm_state_indices": slots, "num_accepted_tokens": slots + 1}, f"[{B}]", "[N, T]"),
        ("num_accepted_tokens", {**per_token, "num_accepted_tokens": slots}, "0 to 0", f"1 to {T}"),
        ("num_accepted_tokens", {**per_token, "num_accepted_tokens": slots + 7}, "7 to 7", f"1 to {T}"),
        ("num_accepted_tokens", {**per_token, "num_accepted_tokens": slots[:1] + 1}, "[1]", "[2]"),
        ("num_accepted_tokens", {**per_token, "num_accepted_tokens": slots + 1.0}, "float", "int32"),
        ("out", {"out": 1}, "1", "a tensor [B, T, HV, V]"),
        ("out", {"out": randn(B, T, HV, V + 1)}, f"[{B}, {T}, {HV}, {V + 1}]", f"[{B}, {T}, {HV}, {V}]"),
        ("out", {"out": randn(B, T, HV, V).double()}, "float64", "float32"),
        ("out", {"out": randn(T, B, HV, V).transpose(0, 1)}, "strides", "contiguous"),
        ("out", {"out": randn(B, T, HV, V).to("meta")}, "on meta", "on cpu"),
    ]  # fmt: skip
    before = pool.clone()
    for name, arguments, got, allowed in bad:
        raises(op, call, name, got, allowed, **arguments)
    assert torch.equal(pool, before)
    leaf = call.leaves(["q"])
    raises(
        op,
        leaf,
        "inplace_final_state",
        "True",
        "where gradients are wanted",
        initial_state=randn(B, HV, K, V),
        inplace_final_state=True,
    )
    raises(
        op,
        leaf,
        "ssm_state_indices",
        f"[{B}]",
        "where gradients are wanted",
        initial_state=pool,
        ssm_state_indices=slots,
    )
    raises(op, leaf, "out", f"[{B}, {T}, {HV}, {V}]", "where gradients are wanted", out=randn(B, T, HV, V))
    with torch.no_grad():
        leaf.run(deltafuse.fused_recurrent_kda, out=randn(B, T, HV, V))


def test_gate_alone() -> None:
    call = Call("kda", {"g": randn(2, 3, HV, K), "A_log": randn(HV), "dt_bias": randn(HV * K)})
    bad: list[tuple[str, Any, str, str]] = [
        ("g", None, "None", "a tensor [..., HV, K]"),
        ("g", randn(K), f"[{K}]", "[..., HV, K]"),
        ("g", randn(2, HV, 0), f"[2, {HV}, 0]", "HV, K >= 1"),
        ("g", torch.ones(HV, K, dtype=torch.int64), "int64", "float32"),
        ("A_log", randn(3), "[3]", f"{HV} elements"),
        ("A_log", None, "None", "a tensor [HV]"),
        ("A_log", 2.0, "2.0", "a tensor [HV]"),
        ("A_log", randn(HV).to("meta"), "on meta", "on cpu"),
        ("dt_bias", randn(HV), f"[{HV}]", f"{HV * K} elements"),
        ("lower_bound", 0, "0", "a negative number or None"),
        ("lower_bound", "-5", "'-5'", "a negative number or None"),
        ("lower_bound", float("nan"), "nan", "a negative number or None"),
        ("output_dtype", torch.int64, "torch.int64", "float32"),
        ("output_dtype", "float32", "float32", "float32"),
        ("backend", "gpu", "'gpu'", "'torch'"),
    ]
    for name, value, got, allowed in bad:
        raises("fused_kda_gate", call, name, got, allowed, **{name: value})


@pytest.mark.parametrize("op", [*EVERY, "fused_kda_gate"])
def test_unknown_arguments(op: str) -> None:
    """fla swallows them."""
    call = base(op) if op != "fused_kda_gate" else Call("kda", {"g": randn(2, HV, K), "A_log": randn(HV)})
    for name in ("use_qk_l2norm", "head_first", "output_attentions", "A_logs"):
        with pytest.raises(TypeError, match=f"{op}.*'{name}'"):
            getattr(deltafuse, op)(**call.tensors, **{name: True})
    with pytest.raises(TypeError, match="missing"):
        getattr(deltafuse, op)()


def test_arguments_of_the_other_ops_are_unknown() -> None:
    """No flag is taken and then ignored."""
    for op, names in {
        "fused_recurrent_kda": ("safe_gate", "chunk_size", "use_graph", "return_intermediate_states"),
        "chunk_gated_delta_rule": ("safe_gate", "lower_bound", "return_intermediate_states", "disable_recompute", "gk"),
        "fused_recurrent_gated_delta_rule": ("lower_bound", "ssm_state_indices", "out", "inplace_final_state"),
        "chunk_kda": ("ssm_state_indices", "out", "gk", "chunk_indices", "inplace_final_state"),
    }.items():
        for name in names:
            with pytest.raises(TypeError, match=f"'{name}'"):
                base(op).run(getattr(deltafuse, op), **{name: None})


# --- inputs and outputs ----------------------------------------------------------------------------------------------


def strided(x: Tensor) -> Tensor:
    """The same values in a wider buffer, its axes in another order, every other element of the last."""
    order = list(range(x.dim()))[::-1]
    buffer = torch.full([2 * n for n in x.permute(order).shape], 9.0, dtype=x.dtype)
    view = buffer[tuple(slice(None, None, 2) for _ in order)].permute(order)
    view.copy_(x)
    return view


@pytest.mark.parametrize("lengths", [None, [30, 0, 41]], ids=str)
@pytest.mark.parametrize("op", EVERY)
def test_strided_inputs(op: str, lengths: list[int] | None) -> None:
    function = getattr(deltafuse, op)
    dense = make("kda" if op in KDA else "gdn", T=71, B=2, H=2, HV=4, gate="softplus", initial=True, lengths=lengths)
    views = dense.with_tensors(**{n: strided(x) for n, x in dense.tensors.items()})
    assert not any(x.is_contiguous() for n, x in views.tensors.items())
    if lengths is not None:
        views = views.with_flags(cu_seqlens=strided(dense.flags["cu_seqlens"].float()).long().repeat_interleave(2)[::2])
    for got, want in zip(views.run(function), dense.run(function), strict=True):
        assert_near(got, want, 1e-15)
        assert got.is_contiguous()
    leaves = dense.leaves()
    inner = {n: strided(x).detach().requires_grad_() for n, x in dense.tensors.items()}
    seeds = seeds_of(dense)
    want = gradients(leaves, leaves.run(function), seeds)
    views = dense.with_tensors(**inner)
    found = gradients(views, views.run(function), tuple(strided(s) for s in seeds))
    for name, grad in want.items():
        assert_near(found[name], grad, 1e-14, name)


@pytest.mark.parametrize("op", EVERY)
def test_expanded_inputs(op: str) -> None:
    """Tensors whose elements share memory, such as one beta for all heads."""
    call = base(op, initial=True)
    shared = {n: x[..., :1].expand_as(x) for n, x in call.tensors.items()}
    view, dense = call.with_tensors(**shared), call.with_tensors(**{n: x.clone() for n, x in shared.items()})
    for got, want in zip(view.run(getattr(deltafuse, op)), dense.run(getattr(deltafuse, op)), strict=True):
        assert_near(got, want, 1e-6)


def storages(tensors: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if isinstance(x, Tensor) and x.numel()}


@pytest.mark.parametrize("lengths", [None, [30, 0, 41], [0]], ids=str)
@pytest.mark.parametrize("op", EVERY)
@pytest.mark.parametrize("gate", ["log", "softplus"])
def test_inputs_are_read_only_and_outputs_new(op: str, lengths: list[int] | None, gate: str) -> None:
    function = getattr(deltafuse, op)
    for v_first in (False, True):
        call = make(
            "kda" if op in KDA else "gdn", T=71, gate=gate, initial=True, lengths=lengths, v_first=v_first
        ).leaves()
        seeds = seeds_of(call)
        given = [*call.tensors.values(), *seeds]
        before, versions = [x.detach().clone() for x in given], [x._version for x in given]
        results = list(call.run(function, output_final_state=True))
        found = gradients(call, results, seeds)
        if op == "chunk_kda":
            with torch.no_grad():
                results += call.run(return_intermediate_states=True)
        assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))
        assert versions == [x._version for x in given]
        made = [*results, *found.values()]
        assert storages(made).isdisjoint(storages(given))
        assert len(storages(made)) == sum(x.numel() > 0 for x in made)


def test_gate_alone_reads_its_inputs() -> None:
    for dtype in (torch.float32, torch.float64):
        g, bias = randn(3, 2, 4, dtype=dtype).requires_grad_(), randn(8, dtype=dtype).requires_grad_()
        before = g.detach().clone()
        y = fused_kda_gate(g, None, bias, -4.0, output_dtype=dtype)
        grads = torch.autograd.grad(y, [g, bias], torch.ones_like(y))
        assert torch.equal(g, before)
        assert len(storages([g, bias, y, *grads])) == 5
        wide = strided(g.detach())
        assert_near(fused_kda_gate(wide, None, bias, -4.0, output_dtype=dtype), y, 4 * torch.finfo(dtype).eps)


def test_same_tensor_as_several_arguments() -> None:
    """q is k is v, and their gradients add up."""
    x = torch.randn(1, 40, 2, 8, dtype=torch.float64, requires_grad=True)
    call = make("kda", T=40, H=2, V=8)
    shared = call.with_tensors(q=x, k=x, v=x)
    apart = call.with_tensors(**{n: x.detach().clone().requires_grad_() for n in "qkv"})
    seeds = seeds_of(call)
    want = gradients(apart, apart.run(), seeds)
    o, state = shared.run()
    (found,) = torch.autograd.grad([o, state], [x], list(seeds))
    assert_near(found, want["q"] + want["k"] + want["v"], 1e-15)


# --- a call like an earlier one --------------------------------------------------------------------------------------


def test_a_remembered_call_is_still_checked() -> None:
    """What was right once is not looked at again; what differs in anything is."""
    call = make("kda", T=3)
    call.run()
    for name, wrong in (("chunk_size", 64.0), ("chunk_size", True), ("scale", True), ("scale", "1")):
        with pytest.raises(ValueError, match=f"`{name}`"):
            call.run(**{name: wrong})
    for name in ("k", "v", "g", "beta"):
        x = call.tensors[name]
        for other in (x[:, :2], x.to("meta"), x.to(torch.int32)):
            with pytest.raises(ValueError, match=f"`{name}`"):
                chunk_kda(**{**call.tensors, name: other})
    call.run()


def test_a_remembered_problem_belongs_to_its_call() -> None:
    call = make("kda", T=3)
    arguments = {**call.tensors, **call.flags}
    plain = parse_delta("chunk_kda", per_key=True, **arguments).problem
    assert parse_delta("chunk_kda", per_key=True, **arguments).problem is plain
    assert not plain.requires_grad
    leaf = {**arguments, "q": arguments["q"].clone().requires_grad_()}
    assert parse_delta("chunk_kda", per_key=True, **leaf).problem.requires_grad
    with torch.no_grad():
        assert not parse_delta("chunk_kda", per_key=True, **leaf).problem.requires_grad
    with torch.inference_mode():
        assert parse_delta("chunk_kda", per_key=True, **arguments).problem.inference_mode
    final = parse_delta("chunk_kda", per_key=True, **arguments, output_final_state=True).problem
    assert final.output_final_state
    assert not plain.output_final_state
