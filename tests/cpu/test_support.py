"""Which backend runs a call, on any described machine, and how a user asks for one."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases import Call, make
from torch import Tensor

import deltafuse
import deltafuse.backends as backends
import deltafuse.runtime.log as log
from deltafuse import UnsupportedError, chunk_kda, explain, get_backend, set_backend, use_backend
from deltafuse.backends import explain_problem, problem_of
from deltafuse.runtime.probe import Environment
from deltafuse.support import BACKENDS, Plan, Verdict, choose, verdicts

CPU = Environment("cpu", name="CPU")
CPU_FLA = Environment("cpu", name="CPU", fla="0.6.0", dsl="4.8.1")
H100 = Environment("cuda", (9, 0), "NVIDIA H100", dsl="4.8.1")
H100_FLA = dataclasses.replace(H100, fla="0.6.0")
B200 = Environment("cuda", (10, 0), "NVIDIA B200", dsl="4.8.1")
B200_FLA = dataclasses.replace(B200, fla="0.6.0")
MACHINES = [CPU, CPU_FLA, H100, H100_FLA, B200, B200_FLA]
GPUS = [H100, H100_FLA, B200, B200_FLA]
WITH_FLA = [H100_FLA, B200_FLA]


@pytest.fixture(autouse=True)
def _as_new(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DELTAFUSE_BACKEND", raising=False)
    monkeypatch.setattr(backends, "_process_backend", None)
    log._log.cache_clear()
    yield
    log._log.cache_clear()


def problem(
    op: str = "chunk_kda", *, leaves: bool = False, dtype: torch.dtype = torch.bfloat16, options: Any = (), **more: Any
) -> Any:
    """The parsed problem of a call on the meta device."""
    call = make("gdn" if "gated" in op else "kda", dtype=dtype, **dict(options))
    tensors = {n: x.to("meta") for n, x in call.tensors.items()}
    flags = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in call.flags.items()}
    if leaves:
        tensors["q"].requires_grad_()
    return problem_of(op, **{**tensors, **flags, **more})[0]


def pool_arguments() -> dict[str, Tensor]:
    return {
        "initial_state": torch.zeros(4, 1, 8, 6, device="meta"),
        "ssm_state_indices": torch.zeros(1, dtype=torch.int64, device="meta"),
    }


# What is asked, with what arguments, and why fla cannot take it (None: it can).
ASKED: list[tuple[str, Any, str | None]] = [
    ("chunk_kda", problem(), None),
    ("chunk_kda, training", problem(leaves=True), None),
    ("chunk_kda, packed", problem(options={"lengths": [3, 4]}), None),
    ("chunk_kda, float64", problem(dtype=torch.float64), "float64"),
    ("chunk_kda, no tokens", problem(options={"T": 0}), "empty"),
    ("chunk_kda, no rows", problem(options={"B": 0}), "empty"),
    ("chunk_kda, K 256", problem(options={"K": 256}), None),
    ("chunk_kda, K 257", problem(options={"K": 257}), "K up to 256, not 257"),
    ("chunk_kda, intermediate states", problem(return_intermediate_states=True), "torch.inference_mode"),
    ("fused_recurrent_kda", problem("fused_recurrent_kda"), None),
    ("fused_recurrent_kda, K 257", problem("fused_recurrent_kda", options={"K": 257}), None),
    ("fused_recurrent_kda, training", problem("fused_recurrent_kda", leaves=True), "no gradient"),
    ("fused_recurrent_kda, in place", problem("fused_recurrent_kda", options={"initial": True}, inplace_final_state=True), None),
    ("fused_recurrent_kda, pool", problem("fused_recurrent_kda", **pool_arguments(), inplace_final_state=True), "slot of -1"),
    ("fused_recurrent_kda, states", problem("fused_recurrent_kda", **pool_arguments()), "slot of -1"),
    ("chunk_gated_delta_rule", problem("chunk_gated_delta_rule"), None),
    ("chunk_gated_delta_rule, K 257", problem("chunk_gated_delta_rule", options={"K": 257}), "K up to 256, not 257"),
    ("fused_recurrent_gated_delta_rule", problem("fused_recurrent_gated_delta_rule"), None),
    ("fused_recurrent_gated_delta_rule, training", problem("fused_recurrent_gated_delta_rule", leaves=True), "no gradient"),
    ("fused_recurrent_kda, K 64", problem("fused_recurrent_kda", options={"K": 64, "V": 32}), None),
    ("fused_recurrent_kda, V 20", problem("fused_recurrent_kda", options={"K": 64, "V": 20}), None),
    ("fused_recurrent_kda, K 64, training", problem("fused_recurrent_kda", leaves=True, options={"K": 64, "V": 32}), "no gradient"),
    ("fused_recurrent_gated_delta_rule, K 64", problem("fused_recurrent_gated_delta_rule", options={"K": 64, "V": 32}), None),
    ("fused_kda_gate", problem_of("fused_kda_gate", torch.zeros(2, 3, 4, device="meta"), torch.zeros(3, device="meta"))[0], None),
]  # fmt: skip
# Why this package's own kernels cannot take it on the GPUs that they are made for (absent: they can).
NOT_OWN = {
    "chunk_kda, float64": "bfloat16 and float16, not float64",
    "chunk_kda, no tokens": "empty",
    "chunk_kda, no rows": "empty",
    "chunk_kda, K 256": "K up to 128, not 256",
    "chunk_kda, K 257": "K up to 128, not 257",
    "fused_recurrent_kda, V 20": "V in multiples of 16, not 20",
    **{
        n: "K of 64, 128, 256, not"
        for n, p, _ in ASKED
        if p.op.startswith("fused_recurrent") and p.key_dim not in (64, 128, 256)
    },
    **{n: "no GPU kernel" for n, p, _ in ASKED if p.op in ("fused_kda_gate", "chunk_gated_delta_rule")},
}
BLACKWELL = {(10, 0), (10, 3)}


def reason_against(asked: Any, machine: Environment) -> str | None:
    """What the own kernels' verdict says, None where they take the call."""
    against = NOT_OWN.get(next(name for name, p, _ in ASKED if p is asked))
    if against == "no GPU kernel":
        return against
    if machine.device != "cuda":
        return "on a GPU, the tensors are on cpu"
    if (
        machine.capability in BLACKWELL
        and asked.op == "chunk_kda"
        and (asked.requires_grad or asked.intermediate_states)
    ):
        return "kernels for Blackwell"
    return against


every_case = pytest.mark.parametrize(("asked", "why"), [(p, why) for _, p, why in ASKED], ids=[n for n, *_ in ASKED])


# --- the decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: f"{m.title}, fla {m.fla}")
@every_case
def test_auto(asked: Any, why: str | None, machine: Environment) -> None:
    """Own kernels, else fla where it is there and can, else plain torch; every one that was passed over says why."""
    plan = choose(asked, machine)
    against = reason_against(asked, machine)
    takes = machine.device == "cuda" and machine.fla is not None and why is None
    assert plan.backend == ("cute" if against is None else "fla" if takes else "torch")
    assert [v.backend for v in plan.skipped] == list(BACKENDS[: BACKENDS.index(plan.backend)])
    assert all(not v.supported and v.reason for v in plan.skipped)
    found = {v.backend: v for v in verdicts(asked, machine)}
    assert list(found) == ["cute", "fla", "torch"]
    assert found["cute"].supported == (against is None)
    assert against is None or against in found["cute"].reason
    assert found["torch"].supported
    assert found["fla"].supported == takes
    if machine.device != "cuda":
        assert "runs on a GPU, the tensors are on cpu" in found["fla"].reason
    elif machine.fla is None:
        assert "not installed" in found["fla"].reason
    elif why is not None:
        assert why in found["fla"].reason


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: f"{m.title}, fla {m.fla}")
@every_case
def test_requested(asked: Any, why: str | None, machine: Environment) -> None:
    assert choose(asked, machine, "torch") == Plan("torch")
    for name in ("cute", "fla"):
        verdict = next(v for v in verdicts(asked, machine) if v.backend == name)
        if verdict.supported:
            assert choose(asked, machine, name) == Plan(name)
            continue
        with pytest.raises(UnsupportedError) as caught:
            choose(asked, machine, name)
        message = str(caught.value)
        assert message.startswith(
            f"`backend`: got {name!r} for {asked.op} on {machine.title}: {name}: {verdict.reason}; allowed: "
        )
        assert "'torch'" in message


@every_case
def test_the_decision_is_pure(asked: Any, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the described machine alone: this one is not asked, and no mode of this process matters."""

    def touched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the machine was asked")

    want = [(verdicts(asked, m), choose(asked, m)) for m in MACHINES]
    for name in ("is_available", "get_device_capability", "get_device_name", "current_device"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr("deltafuse.runtime.probe._version", touched)
    before = set(sys.modules)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            assert [(verdicts(asked, m), choose(asked, m)) for m in MACHINES] == want
    assert not {n.partition(".")[0] for n in set(sys.modules) - before} & {"fla", "triton", "cutlass"}
    hash(asked)


def test_intermediate_states_of_fla() -> None:
    with torch.inference_mode():
        asked = problem(return_intermediate_states=True)
        halves = problem(return_intermediate_states=True, chunk_size=32)
    assert choose(asked, B200_FLA).backend == "fla"
    assert choose(asked, H100_FLA).backend == "cute"
    assert choose(halves, H100_FLA).backend == "fla"
    assert "chunks of 64, not 32" in verdicts(halves, H100_FLA)[0].reason


def conv_problem(width: int = 4, dtype: torch.dtype = torch.bfloat16, tokens: int = 5, **more: Any) -> Any:
    x, weight = torch.zeros(2, tokens, 8, dtype=dtype, device="meta"), torch.zeros(8, width, dtype=dtype, device="meta")
    return problem_of("causal_conv1d", x, weight, **more)[0]


def test_convolutions_on_own_kernels() -> None:
    a100, volta = (
        Environment("cuda", (8, 0), "NVIDIA A100", dsl="4.8.1"),
        Environment("cuda", (7, 0), "V100", dsl="4.8.1"),
    )
    for machine in (a100, H100_FLA, B200_FLA):
        assert choose(conv_problem(), machine) == Plan("cute")
    reasons = {
        "W = 2 to 4, not 5": conv_problem(5),
        "not float64": conv_problem(dtype=torch.float64),
        "up to 2147418112 tokens": conv_problem(tokens=2**31),
        "bfloat16, float16 and float32": conv_problem(bias=torch.zeros(8, dtype=torch.float64, device="meta")),
    }
    for reason, asked in reasons.items():
        assert reason in verdicts(asked, H100)[0].reason
    assert "8.0 or later" in verdicts(conv_problem(), volta)[0].reason


def test_own_kernels_need_their_compiler() -> None:
    bare = dataclasses.replace(H100, dsl=None)
    assert choose(problem(), bare).backend == "torch"
    assert "CuTe DSL is not installed" in verdicts(problem(), bare)[0].reason
    wide = problem(options={"V": 513})
    assert "V up to 512, not 513" in verdicts(wide, H100)[0].reason


def test_context_parallel_is_flas() -> None:
    call = make("kda", lengths=[3, 4], dtype=torch.bfloat16)
    asked = problem_of("chunk_kda", **call.tensors, cp_context=SimpleNamespace(**call.flags))[0]
    assert choose(asked, H100_FLA) == Plan("fla", verdicts(asked, H100_FLA)[:1])
    for machine in (CPU, H100, B200):
        with pytest.raises(UnsupportedError, match=r"allowed: no backend takes this call$") as caught:
            choose(asked, machine)
        assert all(f"{name}: " in str(caught.value) for name in BACKENDS)
    with pytest.raises(UnsupportedError, match=r"allowed: 'fla'$"):
        choose(asked, B200_FLA, "torch")


def test_titles_of_machines() -> None:
    assert (CPU.title, H100.title, B200.title) == ("CPU", "NVIDIA H100 (sm_90)", "NVIDIA B200 (sm_100)")
    assert Environment("mps").title == "mps"


# --- asking for a backend --------------------------------------------------------------------------------------------


def test_order_of_the_ways_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyword before `use_backend` and `set_backend` before the environment before "auto"."""
    assert get_backend() == "auto"
    monkeypatch.setenv("DELTAFUSE_BACKEND", "cute")
    assert get_backend() == "cute"
    set_backend("torch")
    assert get_backend() == "torch"
    with use_backend("fla"):
        assert get_backend() == "fla"
        with use_backend("auto"):
            assert get_backend() == "auto"
        assert get_backend() == "fla"
    assert get_backend() == "torch"
    set_backend(None)
    assert get_backend() == "cute"
    monkeypatch.setenv("DELTAFUSE_BACKEND", "")
    assert get_backend() == "auto"


@pytest.mark.parametrize(
    "op",
    [
        "chunk_kda",
        "fused_recurrent_kda",
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        "fused_kda_gate",
    ],
)
def test_every_op_obeys(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make("gdn" if "gated" in op else "kda", T=3)
    arguments: Any = call.tensors if op != "fused_kda_gate" else {"g": torch.randn(2, 3, 4), "A_log": torch.zeros(3)}
    function = getattr(deltafuse, op)
    refused = pytest.raises(UnsupportedError, match=f"got 'cute' for {op} on CPU: cute: .*; allowed: 'torch'")
    with refused:
        function(**arguments, backend="cute")
    with refused, use_backend("cute"):
        function(**arguments)
    with use_backend("cute"):
        function(**arguments, backend="torch")
    set_backend("cute")
    with refused:
        function(**arguments)
    set_backend(None)
    monkeypatch.setenv("DELTAFUSE_BACKEND", "cute")
    with refused:
        function(**arguments)
    monkeypatch.delenv("DELTAFUSE_BACKEND")
    for backend in (None, "auto", "torch"):
        function(**arguments, backend=backend)


def test_use_backend_takes_itself_back_after_an_error() -> None:
    with pytest.raises(KeyError), use_backend("torch"):
        raise KeyError
    assert get_backend() == "auto"


@pytest.mark.parametrize("wrong", ["triton", "", "AUTO", 3])
def test_wrong_names(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = "allowed: 'auto', 'cute', 'fla', 'torch'"
    for ask in (set_backend, lambda name: use_backend(name).__enter__()):
        with pytest.raises(ValueError, match="`backend`: got .*" + allowed):
            ask(wrong)
    assert get_backend() == "auto"
    with pytest.raises(ValueError, match="`backend`: got .*" + allowed):
        make("kda").run(backend=wrong)
    if wrong:
        monkeypatch.setenv("DELTAFUSE_BACKEND", str(wrong))
        with pytest.raises(ValueError, match="`DELTAFUSE_BACKEND`: got .*" + allowed):
            make("kda").run()


def test_unsupported_is_a_value_error() -> None:
    assert issubclass(UnsupportedError, ValueError)


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain() -> None:
    call = make("kda")
    found = explain("chunk_kda", **call.tensors)
    assert (found.op, found.chosen, found.requested) == ("chunk_kda", "torch", "auto")
    assert [v.backend for v in found.verdicts] == list(BACKENDS)
    assert all(isinstance(v, Verdict) for v in found.verdicts)
    lines = str(found).splitlines()
    assert len(lines) == 4
    assert "chunk_kda on CPU" in lines[0]
    assert [line.startswith("->") for line in lines[1:]] == [False, False, True]
    for line, verdict in zip(lines[1:], found.verdicts, strict=True):
        assert verdict.backend in line
        assert verdict.reason in line
        assert ("yes" if verdict.supported else "no ") in line
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.chosen = "fla"  # type: ignore[misc]
    assert explain(chunk_kda, *call.tensors.values()) == found


def test_explain_answers_where_the_op_refuses() -> None:
    call = make("kda")
    for ask in (lambda: explain("chunk_kda", **call.tensors, backend="cute"), lambda: use_and_explain("cute", call)):
        found = ask()
        assert (found.chosen, found.requested) == (None, "cute")
        assert "not supported" in str(found)


def use_and_explain(name: str, call: Call) -> Any:
    with use_backend(name):
        return explain("chunk_kda", **call.tensors)


@pytest.mark.parametrize("machine", GPUS, ids=lambda m: f"{m.title}, fla {m.fla}")
def test_explain_on_another_machine(machine: Environment) -> None:
    found = explain_problem(problem(), machine)
    assert found.chosen == "cute"
    assert found.device == machine.title
    assert str(found).startswith(f"chunk_kda on {machine.title}, backend 'auto': {found.chosen}")


def test_explain_computes_nothing() -> None:
    call = make("kda", B=2, T=3)
    pool, out = torch.randn(4, 1, 8, 6, dtype=torch.float64), torch.full_like(call.tensors["v"], 7.0)
    before = pool.clone()
    # Slots outside the pool and bounds that go down are found where the op runs.
    found = explain(
        "fused_recurrent_kda",
        **call.tensors,
        initial_state=pool,
        ssm_state_indices=torch.tensor([99, 0]),
        inplace_final_state=True,
        out=out,
    )
    assert found.chosen == "torch"
    assert torch.equal(pool, before)
    assert torch.equal(out, torch.full_like(out, 7.0))
    packed = make("kda", lengths=[3, 4])
    assert explain("chunk_kda", **packed.tensors, cu_seqlens=torch.tensor([0, 5, 2])).chosen == "torch"


def test_explain_takes_tensors_without_storage() -> None:
    call = make("kda", dtype=torch.bfloat16)
    meta = {n: x.to("meta") for n, x in call.tensors.items()}
    assert explain("chunk_kda", **meta).device == "meta"
    mixed = {**meta, "v": meta["v"].float()}
    with pytest.raises(ValueError, match=r"`v`: got .*float32"):
        explain("chunk_kda", **mixed)


def test_explain_raises_what_the_op_raises() -> None:
    call = make("kda")
    with pytest.raises(ValueError, match="`chunk_size`: got 7"):
        explain("chunk_kda", **call.tensors, chunk_size=7)
    with pytest.raises(TypeError, match="'head_first'"):
        explain("chunk_kda", **call.tensors, head_first=True)
    for wrong in ("chunk_gla", "", 3, torch.nn.functional.linear):
        with pytest.raises(ValueError, match=r"`op`: got .*; allowed: chunk_kda, "):
            explain(wrong, **call.tensors)
    # And leaves nothing behind.
    assert isinstance(chunk_kda(**call.tensors)[0], Tensor)


def test_explain_under_gradients_and_compile() -> None:
    call = make("kda").leaves()
    assert explain("chunk_kda", **call.tensors).chosen == "torch"
    assert problem_of("chunk_kda", **call.tensors)[0].requires_grad
    compiled = torch.compile(lambda t: chunk_kda(**t)[0], backend="eager")
    assert torch.equal(compiled(call.tensors), call.run()[0])


# --- what is logged --------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.name == "deltafuse"]


def test_one_line_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "deltafuse")
    call = make("kda")
    for _ in range(3):
        call.run()
    (line,) = lines(caplog)
    assert line.levelno == logging.INFO
    assert "chunk_kda runs on backend 'torch'" in line.getMessage()
    assert "cute: " in line.getMessage()
    assert "fla: " in line.getMessage()
    call.run(call.recurrent)
    call.run(call.recurrent, backend="torch")
    assert len(lines(caplog)) == 2
    call.run(backend="torch")
    explain("chunk_gated_delta_rule", **make("gdn").tensors)
    assert len(lines(caplog)) == 2


def test_a_fallback_on_a_gpu_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "environment", lambda *_: H100)
    for _ in range(2):
        make("kda").run()
    (line,) = lines(caplog)
    assert line.levelno == logging.WARNING
    assert "fla is not installed" in line.getMessage()


def test_one_line_under_compile(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    caplog.set_level(logging.INFO, "deltafuse")
    compiled = torch.compile(lambda t: chunk_kda(**t)[0], fullgraph=True, backend="eager")
    for tokens in (7, 8, 9, 9):
        compiled(make("kda", T=tokens).tensors)
    assert len(lines(caplog)) == 1
    assert "chunk_kda runs on backend 'torch'" in lines(caplog)[0].getMessage()
    make("kda").run()
    assert len(lines(caplog)) == 1


def test_another_backend_is_noticed_under_compile() -> None:
    torch._dynamo.reset()
    call = make("kda", T=5)
    compiled = torch.compile(lambda t: chunk_kda(**t)[0], fullgraph=True, backend="eager")
    want = compiled(call.tensors)
    with use_backend("cute"), pytest.raises(Exception, match="kernels run on a GPU"):
        compiled(call.tensors)
    assert torch.equal(compiled(call.tensors), want)


# --- calls that are handed on to fla ---------------------------------------------------------------------------------


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A machine with a GPU and fla on it, whose ops take what fla 0.6.0's take, note it, and answer through plain torch."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def stand_in(name: str, ours: str, allowed: str) -> Any:
        names = set(allowed.split())

        def op(*args: Any, **kwargs: Any) -> Any:
            # fla swallows what it does not know; here it would be an argument that is lost.
            assert set(kwargs) <= names, set(kwargs) - names
            seen.append((name, kwargs))
            return getattr(deltafuse, ours)(*args, **kwargs, backend="torch")

        return op

    modules = {name: ModuleType(name) for name in (
        "fla", "fla.ops", "fla.ops.kda", "fla.ops.kda.fused_recurrent", "fla.ops.kda.gate", "fla.ops.gated_delta_rule",
    )}  # fmt: skip
    flags = "use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first A_log dt_bias"
    common = f"q k v g beta scale initial_state output_final_state cu_seqlens {flags}"
    chunked = f"{common} cu_seqlens_cpu cp_context chunk_size"
    modules["fla.ops.kda"].chunk_kda = stand_in(  # type: ignore[attr-defined]
        "chunk_kda", "chunk_kda",
        f"{chunked} safe_gate lower_bound disable_recompute return_intermediate_states use_graph max_num_seqs",
    )  # fmt: skip
    modules["fla.ops.kda.fused_recurrent"].fused_recurrent_kda_fwd = stand_in(  # type: ignore[attr-defined]
        "fused_recurrent_kda_fwd", "fused_recurrent_kda",
        f"{common} lower_bound inplace_final_state ssm_state_indices num_accepted_tokens out",
    )  # fmt: skip
    modules["fla.ops.kda.gate"].fused_kda_gate = stand_in("fused_kda_gate", "fused_kda_gate", "")  # type: ignore[attr-defined]
    rule = modules["fla.ops.gated_delta_rule"]
    rule.chunk_gated_delta_rule = stand_in(  # type: ignore[attr-defined]
        "chunk_gated_delta_rule", "chunk_gated_delta_rule", f"{chunked} chunk_indices",
    )  # fmt: skip
    rule.fused_recurrent_gated_delta_rule = stand_in(  # type: ignore[attr-defined]
        "fused_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule", f"{common} gk gv",
    )  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(backends, "environment", lambda *_: H100_FLA)
    return seen


@pytest.mark.parametrize("options", [
    {}, {"gate": "softplus", "l2norm": True, "initial": True}, {"lengths": [3, 0, 4], "beta": "sigmoid", "scale": 0.3},
    {"gate": "bounded", "beta": "negative", "v_first": True, "initial": True}, {"gate": "bounded, no A_log"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_fla_gets_the_call_as_it_was(family: str, form: str, options: dict[str, Any], fla: list[Any]) -> None:
    """Nothing lost on the way: the answer is that of plain torch to the same call."""
    if family == "gdn" and options.get("gate", "").startswith("bounded"):
        options = {**options, "gate": "softplus"}
    call = make(family, T=40, HV=2, dtype=torch.float32, **options)
    op = getattr(call, form)
    got, want = call.run(op), call.run(op, backend="torch")
    assert len(fla) == 1
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    o, nothing = call.run(op, output_final_state=False)
    assert nothing is None
    assert torch.equal(o, want[0])


def test_fla_gets_the_flags_that_change_no_result(fla: list[Any]) -> None:
    call = make("kda", lengths=[3, 4], gate="bounded", dtype=torch.float32)
    bounds = call.flags["cu_seqlens"]
    call.run(safe_gate=True, disable_recompute=True, chunk_size=32, cu_seqlens_cpu=bounds)
    call.run(use_graph=True)
    (_, first), (_, second) = fla
    assert (first["safe_gate"], first["disable_recompute"], first["chunk_size"]) == (True, True, 32)
    assert first["cu_seqlens_cpu"] is bounds
    assert (second["use_graph"], second["chunk_size"]) == (True, 64)
    with torch.inference_mode():
        assert len(call.run(return_intermediate_states=True)) == 3
    assert fla[-1][1]["return_intermediate_states"]
    make("gdn", dtype=torch.float32).run(chunk_size=16)
    assert fla[-1][1]["chunk_size"] == 16


@pytest.mark.parametrize("family", ["kda", "gdn"])
def test_fla_gets_the_context_of_context_parallel(family: str, fla: list[Any]) -> None:
    call = make(family, lengths=[3, 4], dtype=torch.float32)
    context = SimpleNamespace(**call.flags)
    # The stand-in notes the call; plain torch, which it asks, refuses it.
    with pytest.raises(UnsupportedError, match="cp_context"):
        Call(family, call.tensors).run(output_final_state=False, cp_context=context)
    assert fla[-1][1]["cp_context"] is context


def test_fla_gets_the_serving_form_that_it_can(fla: list[Any]) -> None:
    call = make("kda", T=3, initial=True, dtype=torch.float32)
    want = call.run(call.recurrent, backend="torch")
    state, out = call.tensors["initial_state"].clone(), torch.empty_like(call.tensors["v"])
    o, final = call.with_tensors(initial_state=state).run(call.recurrent, inplace_final_state=True, out=out)
    assert [name for name, _ in fla] == ["fused_recurrent_kda_fwd"]
    assert o is out
    assert final is state
    assert torch.equal(o, want[0])
    assert torch.equal(state, want[1])
    # The default of fla's inner function is to write the state in place.
    before = call.tensors["initial_state"].clone()
    call.run(call.recurrent)
    assert fla[-1][1]["inplace_final_state"] is False
    assert torch.equal(call.tensors["initial_state"], before)


def test_fla_gets_both_gates(fla: list[Any]) -> None:
    call = make("gdn", T=5, gate="softplus", dtype=torch.float32)
    call = call.with_tensors(gk=-torch.rand(1, 5, 1, 8), gv=-torch.rand_like(call.tensors["v"]))
    got, want = call.run(call.recurrent), call.run(call.recurrent, backend="torch")
    assert len(fla) == 1
    assert torch.allclose(got[0], want[0], atol=1e-6)


def test_fla_gets_the_gate(fla: list[Any]) -> None:
    g, a_log, bias = torch.randn(2, 3, 4), torch.randn(3), torch.randn(12)
    for bound in (None, -4.0):
        got = deltafuse.fused_kda_gate(g, a_log, bias, bound, torch.bfloat16)
        assert torch.equal(got, deltafuse.fused_kda_gate(g, a_log, bias, bound, torch.bfloat16, backend="torch"))
    assert len(fla) == 2


def test_bad_bounds_do_not_reach_fla(fla: list[Any]) -> None:
    """fla would read and write outside the tensors; with bounds on the CPU the check waits for no device."""
    for family in ("kda", "gdn"):
        call = make(family, lengths=[3, 4], dtype=torch.float32)
        with pytest.raises(ValueError, match="`cu_seqlens`: got 9 last"):
            call.run(cu_seqlens_cpu=torch.tensor([0, 3, 9]))
        with pytest.raises(ValueError, match="`cu_seqlens`: got 9 last"):
            call.run(cu_seqlens=torch.tensor([0, 3, 9]))
        with pytest.raises(ValueError, match="`cu_seqlens`: got 9 last"):
            call.run(call.recurrent, cu_seqlens_cpu=torch.tensor([0, 3, 9]))
    assert not fla


def test_gradients_that_fla_refuses_on_hopper_go_to_torch() -> None:
    trained = problem("chunk_gated_delta_rule", leaves=True)
    refused = dataclasses.replace(H100_FLA, triton="3.6.0")
    assert choose(trained, refused).backend == "torch"
    assert "Triton 3.6.0" in next(v.reason for v in verdicts(trained, refused) if v.backend == "fla")
    assert choose(problem("chunk_gated_delta_rule"), refused).backend == "fla"
    for able in (dataclasses.replace(H100_FLA, triton="3.7.1"), dataclasses.replace(B200_FLA, triton="3.6.0+git1")):
        assert choose(trained, able).backend == "fla"
