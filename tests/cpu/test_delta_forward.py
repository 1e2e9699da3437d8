"""Outputs and states of the delta-rule ops in float64 against the definition: every flag, layout and way of packing."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

import pytest
import torch
from cases import GATES, Call, assert_near, label, make, pairwise
from definitions import chunk_states, kda_gate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deltafuse
from deltafuse import chunk_gated_delta_rule, chunk_kda, fused_kda_gate, fused_recurrent_gated_delta_rule
from deltafuse.reference.chunk import DeltaTensors, chunk_forward
from deltafuse.reference.options import CHUNKS_A_WINDOW, DeltaOptions

EXACT = 1e-13  # float64 on ordinary inputs; what is measured is below 2e-15
LENGTHS = [[5, 0, 70, 33], [1, 1, 129], [0, 0, 100, 0]]

KDA = list(
    pairwise(
        gate=GATES, l2norm=[False, True], beta=["plain", "sigmoid", "negative"], initial=[False, True],
        v_first=[False, True], HV=[2, 4], lengths=[None, *LENGTHS], scale=[None, 0.3], chunk_size=[64, 32],
    )
)  # fmt: skip
GDN = list(
    pairwise(
        gate=["log", "softplus"], l2norm=[False, True], beta=["plain", "sigmoid", "negative"], initial=[False, True],
        v_first=[False, True], HV=[2, 6], lengths=[None, *LENGTHS], scale=[None, 0.3], chunk_size=[64, 32, 16],
    )
)  # fmt: skip
EVERY = [pytest.param("kda", c, id="kda-" + label(c)) for c in KDA]
EVERY += [pytest.param("gdn", c, id="gdn-" + label(c)) for c in GDN]


def build(family: str, combination: dict[str, Any]) -> tuple[Call, int]:
    options = dict(combination)
    chunk_size = options.pop("chunk_size")
    return make(family, B=2, T=131, H=2, **options), chunk_size


@pytest.mark.parametrize(("family", "combination"), EVERY)
def test_both_forms_equal_the_definition(family: str, combination: dict[str, Any]) -> None:
    call, chunk_size = build(family, combination)
    want = call.define()
    for op, more in ((call.chunk, {"chunk_size": chunk_size}), (call.recurrent, {})):
        o, state = call.run(op, **more)
        assert o.dtype == state.dtype == torch.float64
        assert_near(o, want.o, EXACT, f"{op.__name__} o")
        assert_near(state, want.final_state, EXACT, f"{op.__name__} state")
        o_alone, nothing = call.run(op, **more, output_final_state=False)
        assert nothing is None
        assert torch.equal(o_alone, o)


@pytest.mark.parametrize("combination", [c for c in KDA if c["HV"] == 4 or c["lengths"]], ids=label)
def test_intermediate_states(combination: dict[str, Any]) -> None:
    call, chunk_size = build("kda", combination)
    o, state, states = call.run(chunk_size=chunk_size, return_intermediate_states=True)
    cu = call.flags.get("cu_seqlens")
    want = chunk_states(
        call.define(), call.tensors.get("initial_state"), chunk_size, None if cu is None else cu.tolist()
    )
    assert_near(states, want, EXACT)
    assert torch.equal(o, call.run(chunk_size=chunk_size)[0])
    assert torch.equal(state, call.run(chunk_size=chunk_size)[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_of_results(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for family in ("kda", "gdn"):
        call = make(family, gate="softplus", dtype=dtype, T=70, initial=True)
        for op in (call.chunk, call.recurrent):
            o, state = call.run(op)
            assert (o.dtype, state.dtype) == (dtype, wide)
    assert make("kda", dtype=dtype).run(return_intermediate_states=True)[2].dtype == dtype


WINDOW = 32 * CHUNKS_A_WINDOW  # tokens that chunks of 32 hold at a time


@pytest.mark.parametrize(
    "tokens", [1, 2, 31, 32, 33, 64, 65, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 5]
)
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_lengths_around_chunks_and_windows(family: str, tokens: int) -> None:
    call = make(family, T=tokens, K=4, V=3, initial=True)
    want = call.define()
    o, state = call.run(chunk_size=32)
    assert_near(o, want.o, EXACT, "o")
    assert_near(state, want.final_state, EXACT, "state")


@pytest.mark.parametrize(("K", "V"), [(1, 1), (1, 5), (3, 1), (2, 7), (60, 33), (100, 64), (128, 128), (300, 2)])
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_any_head_size(family: str, K: int, V: int) -> None:
    for v_first in (False, True):
        call = make(family, T=70, K=K, V=V, initial=True, v_first=v_first)
        want = call.define()
        for op in (call.chunk, call.recurrent):
            o, state = call.run(op)
            assert_near(o, want.o, EXACT, f"{op.__name__} o")
            assert_near(state, want.final_state, EXACT, f"{op.__name__} state")


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [0, 64, 0, 64, 1], [63, 65, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_packing(lengths: list[int], dtype: torch.dtype) -> None:
    for family in ("kda", "gdn"):
        call = make(family, lengths=lengths, initial=True, gate="softplus")
        want = call.define()
        bounds = call.flags["cu_seqlens"].to(dtype)
        call = call.with_flags(cu_seqlens=bounds)
        for op in (call.chunk, call.recurrent):
            o, state = call.run(op)
            assert_near(o, want.o, EXACT, "o")
            assert_near(state, want.final_state, EXACT, "state")
            # The copy on the CPU is what is read.
            again = call.run(op, cu_seqlens_cpu=bounds.to(torch.int64))
            assert torch.equal(again[0], o)
            assert torch.equal(again[1], state)


def test_empty_sequence_passes_its_state_through() -> None:
    call = make("kda", lengths=[0, 7, 0], initial=True)
    for op in (call.chunk, call.recurrent):
        state = call.run(op)[1]
        assert torch.equal(state[[0, 2]], call.tensors["initial_state"][[0, 2]])
    states = make("kda", lengths=[0, 7, 0], initial=False).run()[1]
    assert torch.equal(states[[0, 2]], torch.zeros_like(states[[0, 2]]))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made below it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(made) if isinstance(x, torch.Tensor))])
        return made


@pytest.mark.parametrize("lengths", [[1] * 512, [4] * 128], ids=["512 x 1", "128 x 4"])
def test_short_sequences_are_not_padded_to_whole_chunks(lengths: list[int]) -> None:
    """Memory of packed decoding goes with its tokens and states, not with a chunk of 64 rows for every token."""
    found = []
    for each in ([512], lengths):
        tensors = make("kda", lengths=each, K=8, V=8)
        with Largest() as largest:
            chunk_forward(DeltaTensors(**tensors.tensors, cu_seqlens=tensors.flags["cu_seqlens"]), DeltaOptions(1.0))
        found.append(largest.elements)
    states = len(lengths) * 8 * 8
    assert found[1] <= 2 * (found[0] + states)


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0), (0, 0), (1, 0)])
def test_no_tokens(B: int, T: int) -> None:
    for family in ("kda", "gdn"):
        call = make(family, B=B, T=T, initial=True, gate="softplus")
        for op in (call.chunk, call.recurrent):
            o, state = call.run(op)
            assert o.shape == (B, T, 1, 6)
            assert torch.equal(state, call.tensors["initial_state"])


@pytest.mark.parametrize(("B", "T"), [(1, 0), (2, 0), (0, 0), (0, 70), (3, 70)])
def test_shape_of_intermediate_states(B: int, T: int) -> None:
    chunks = -(-T // 64)
    assert make("kda", B=B, T=T).run(return_intermediate_states=True)[2].shape == (B, chunks, 1, 8, 6)


def test_padded_bounds_may_end_early() -> None:
    """`use_graph`: empty sequences at the end, and tokens that no sequence covers, whose rows are 0 (fla leaves them undefined)."""
    call = make("kda", T=90, initial=False, gate="softplus")
    call = call.with_flags(cu_seqlens=torch.tensor([0, 30, 75, 75, 75]))
    call = call.with_tensors(initial_state=torch.randn(4, 1, 8, 6, dtype=torch.float64))
    want = call.define()
    o, state = call.run(use_graph=True, max_num_seqs=4)
    assert_near(o, want.o, EXACT, "o")
    assert_near(state, want.final_state, EXACT, "state")
    assert torch.equal(o[:, 75:], torch.zeros_like(o[:, 75:]))


@pytest.mark.parametrize("per_value", [False, True])
@pytest.mark.parametrize("beta", ["plain", "sigmoid", "negative"])
def test_recurrent_kda_takes_beta_per_value(beta: str, per_value: bool) -> None:
    call = make("kda", H=2, HV=4, initial=True, beta=beta)
    if per_value:
        call = call.with_tensors(beta=torch.rand_like(call.tensors["v"]))
    want = call.define()
    o, state = call.run(call.recurrent)
    assert_near(o, want.o, EXACT, "o")
    assert_near(state, want.final_state, EXACT, "state")


@pytest.mark.parametrize(
    "combination",
    list(
        pairwise(
            g=["none", "log", "softplus"], gk=[False, True], gv=[False, True], beta=["none", "head", "value"],
            bias=[False, True], v_first=[False, True], initial=[False, True], lengths=[None, [4, 0, 9]],
        )
    ),
    ids=label,
)  # fmt: skip
def test_recurrent_gated_delta_rule_with_every_gate(combination: dict[str, Any]) -> None:
    c = combination
    call = make(
        "gdn", B=2, T=13, H=2, HV=4, gate="softplus" if c["g"] == "softplus" else "log",
        v_first=c["v_first"], initial=c["initial"], lengths=c["lengths"],
    )  # fmt: skip
    v, tensors = call.tensors["v"], dict(call.tensors)
    if not c["bias"]:
        tensors.pop("dt_bias", None)
    if c["g"] == "none":
        tensors.pop("g")
    if c["gk"]:
        tensors["gk"] = -torch.rand(*v.shape[:3], 8, dtype=v.dtype)
    if c["gv"]:
        tensors["gv"] = -torch.rand_like(v)
    if c["beta"] == "none":
        tensors.pop("beta")
    elif c["beta"] == "value":
        tensors["beta"] = torch.rand_like(v)
    call = Call("gdn", tensors, call.flags)
    want = call.define()
    o, state = call.run(call.recurrent)
    assert_near(o, want.o, EXACT, "o")
    assert_near(state, want.final_state, EXACT, "state")


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_recurrent_ops_take_states_of_any_dtype(state_dtype: torch.dtype) -> None:
    for family in ("kda", "gdn"):
        call = make(family, T=9, initial=True, dtype=torch.float32)
        call = call.with_tensors(initial_state=call.tensors["initial_state"].to(state_dtype))
        want = call.define()
        o, state = call.run(call.recurrent)
        assert state.dtype == torch.float32
        assert_near(o, want.o, 1e-6, "o")
        assert_near(state, want.final_state, 1e-6, "state")


def test_gate_alone() -> None:
    gen = torch.Generator().manual_seed(0)
    a_log, bias = torch.randn(3, generator=gen).double(), torch.randn(12, generator=gen).double()
    for shape in ((3, 4), (5, 3, 4), (2, 5, 3, 4), (0, 3, 4), (2, 2, 2, 3, 4)):
        g = torch.randn(shape, generator=gen).double() * 30
        for kwargs in (
            {"A_log": a_log}, {"A_log": a_log, "dt_bias": bias}, {"A_log": a_log.view(1, 1, 3, 1), "dt_bias": bias.view(3, 4)},
            {"A_log": a_log, "dt_bias": bias, "lower_bound": -5}, {"dt_bias": bias, "lower_bound": -0.5}, {"lower_bound": -20.0},
        ):  # fmt: skip
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                got = fused_kda_gate(g, **kwargs, output_dtype=dtype)
                assert got.dtype == dtype
                assert_near(got, kda_gate(g, **kwargs).to(dtype), EXACT if dtype == torch.float64 else 1e-7)
    assert fused_kda_gate(g.bfloat16(), a_log).dtype == torch.float32


def test_gate_alone_is_the_gate_in_the_kernel() -> None:
    for gate in GATES[1:]:
        call = make("kda", gate=gate)
        parameters = {n: call.tensors[n] for n in ("A_log", "dt_bias") if n in call.tensors}
        bound = call.flags.get("lower_bound")
        g = fused_kda_gate(call.tensors["g"], **parameters, lower_bound=bound, output_dtype=torch.float64)
        plain = Call("kda", {**{n: x for n, x in call.tensors.items() if n not in parameters}, "g": g})
        assert_near(call.run()[0], plain.run()[0], EXACT)


def test_flags_that_change_no_result() -> None:
    """`safe_gate` is a promise, `disable_recompute` trades memory for time, parameters without the gate are not read."""
    call = make("kda", gate="bounded", T=150)
    o, state = call.run()
    for flags in ({"safe_gate": True}, {"disable_recompute": True}):
        again = call.run(**flags)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], state)
    plain = make("kda", T=150)
    o, _ = plain.run()
    assert torch.equal(plain.run(safe_gate=True)[0], o)
    unused = {"A_log": torch.randn(1).double(), "dt_bias": torch.randn(8).double(), "lower_bound": -1.0}
    assert torch.equal(plain.run(**unused)[0], o)
    assert torch.equal(plain.run(plain.recurrent, **unused)[0], plain.run(plain.recurrent)[0])


def test_the_old_name_of_the_layout() -> None:
    call = make("kda", initial=True, v_first=True)
    old = Call("kda", call.tensors, {"transpose_state_layout": True})
    for op in (call.chunk, call.recurrent):
        assert torch.equal(old.run(op)[1], call.run(op)[1])
    call = make("gdn", initial=True, v_first=True)
    old = Call("gdn", call.tensors, {"transpose_state_layout": True})
    for op in (call.chunk, call.recurrent):
        assert torch.equal(old.run(op)[1], call.run(op)[1])


def test_chunk_indices_are_a_hint() -> None:
    call = make("gdn", lengths=[70, 5])
    assert torch.equal(call.run(chunk_indices=torch.tensor([[0, 0], [0, 1], [1, 0]]))[0], call.run()[0])


# fla 0.6.0: argument order and defaults (a default that is not given is None).
SIGNATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "chunk_kda": (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute return_intermediate_states "
        "state_v_first cu_seqlens cu_seqlens_cpu cp_context use_graph max_num_seqs",
        {"A_log": None, "dt_bias": None, "chunk_size": 64, "transpose_state_layout": None},
    ),
    "fused_recurrent_kda": (
        "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens",
        {
            "cu_seqlens_cpu": None, "inplace_final_state": False, "ssm_state_indices": None, "num_accepted_tokens": None,
            "out": None, "transpose_state_layout": None,
        },
    ),
    "fused_kda_gate": ("g A_log dt_bias lower_bound output_dtype", {}),
    "chunk_gated_delta_rule": (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel "
        "allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
        {"use_gate_in_kernel": False, "A_log": None, "dt_bias": None, "chunk_size": 64, "transpose_state_layout": None},
    ),
    "fused_recurrent_gated_delta_rule": (
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias "
        "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens",
        {"cu_seqlens_cpu": None, "transpose_state_layout": None},
    ),
}  # fmt: skip
FALSE = {
    "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate",
    "disable_recompute", "return_intermediate_states", "state_v_first", "use_graph",
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flas(name: str) -> None:
    positional, keyword = SIGNATURES[name]
    parameters = signature(getattr(deltafuse, name)).parameters
    assert " ".join(n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD) == positional
    assert {n: p.default for n, p in parameters.items() if p.kind is Parameter.KEYWORD_ONLY} == {
        **keyword,
        "backend": None,
    }
    required = {"fused_kda_gate": 1, "fused_recurrent_gated_delta_rule": 3}.get(name, 5)
    for place, n in enumerate(positional.split()):
        default = (
            Parameter.empty
            if place < required
            else False
            if n in FALSE
            else torch.float32
            if n == "output_dtype"
            else None
        )
        assert parameters[n].default is default, n


def test_positional_arguments() -> None:
    call = make("kda", gate="softplus", initial=True)
    q, k, v, g, beta, a_log, bias, state = (
        call.tensors[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    )
    want = call.run()
    got = chunk_kda(q, k, v, g, beta, None, state, True, False, True, A_log=a_log, dt_bias=bias)
    assert torch.equal(got[0], want[0])
    want = call.run(call.recurrent)
    got = deltafuse.fused_recurrent_kda(q, k, v, g, beta, a_log, bias, None, state, True, False, True)
    assert torch.equal(got[0], want[0])
    call = make("gdn")
    q, k, v, g, beta = (call.tensors[n] for n in ("q", "k", "v", "g", "beta"))
    assert torch.equal(chunk_gated_delta_rule(q, k, v, g, beta)[0], call.run()[0])
    got = fused_recurrent_gated_delta_rule(q, k, v, g, None, None, beta)
    assert torch.equal(got[0], call.run(call.recurrent)[0])


def test_a_long_sequence_does_not_pad_the_short_ones_beside_it() -> None:
    """Packed lengths of every kind: sequences of a length class share chunks, so memory stays with the tokens."""
    tensors = make("kda", lengths=[1] * 400 + [65] + [3] * 30, K=8, V=8)
    whole = make("kda", lengths=[400 + 65 + 90], K=8, V=8)
    found = []
    for call in (tensors, whole):
        with Largest() as largest:
            chunk_forward(DeltaTensors(**call.tensors, cu_seqlens=call.flags["cu_seqlens"]), DeltaOptions(1.0))
        found.append(largest.elements)
    assert found[0] <= 2 * (found[1] + 431 * 64)
    want = tensors.define()
    o, state = tensors.run()
    assert_near(o, want.o, EXACT, "o")
    assert_near(state, want.final_state, EXACT, "state")


def test_gated_delta_rule_takes_initial_states_of_any_float_dtype() -> None:
    call = make("gdn", T=70, initial=True, dtype=torch.float32)
    low = call.tensors["initial_state"].bfloat16()
    want, want_state = call.with_tensors(initial_state=low.float()).run()
    start = low.requires_grad_()
    o, state = call.with_tensors(initial_state=start).run()
    assert torch.equal(o, want)
    assert torch.equal(state, want_state)
    (grad,) = torch.autograd.grad(o.sum(), start)
    assert grad.dtype == torch.bfloat16
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("gate_dtype", [torch.float16, torch.bfloat16])
def test_two_gates_add_up_in_full_precision(gate_dtype: torch.dtype) -> None:
    """g and gk in 16 bits give what the same numbers in float32 give."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, gk = (torch.randn(1, 40, 2, 16, generator=generator) for _ in range(4))
    g, beta = (torch.rand(1, 40, 2, generator=generator) for _ in range(2))
    g, gk = (-g).to(gate_dtype), (-gk.abs()).to(gate_dtype)
    half, full = (
        deltafuse.fused_recurrent_gated_delta_rule(q, k, v, g=x, gk=y, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        for x, y in ((g, gk), (g.float(), gk.float()))
    )
    assert torch.equal(half, full)
