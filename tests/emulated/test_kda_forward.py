"""The whole forward pass of KDA on the emulated kernels, from raw inputs to o and states, against float64."""

from __future__ import annotations

import importlib
import math
import re
from functools import cache
from typing import Any

import kernels
import pytest
import torch

import deltafuse
from deltafuse.autograd.kda import _by_chunk
from deltafuse.autograd.kda_backward import backward
from deltafuse.autograd.kda_cute import Form, flags_of, forward, kernels_for, run
from deltafuse.cli.specs import DeltaSpec
from deltafuse.kernels.config import CombineConfig, PrepareConfig, ScanConfig, SegmentsConfig
from deltafuse.kernels.schedule import Schedule
from deltafuse.problem import parse_delta

RAW: dict[str, Any] = {"l2norm": True, "beta_sigmoid": True}
TRAINED: dict[str, Any] = RAW | {"gate": "softplus", "decay": "remembering"}
STATES: dict[str, Any] = {"initial_state": True, "final_state": True}
ARGUMENTS = {
    "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "safe_gate", "lower_bound",
    "initial_state", "output_final_state", "return_intermediate_states", "state_v_first", "cu_seqlens", "A_log", "dt_bias", "scale",
    "chunk_size",
}  # fmt: skip

CASES = {
    "plain": DeltaSpec("chunk_kda", tokens=130),
    "trained": DeltaSpec("chunk_kda", tokens=200, heads=1, key_dim=128, value_dim=128, **TRAINED, **STATES),
    "bounded, GVA": DeltaSpec(
        "chunk_kda", batch=2, tokens=96, heads=1, value_heads=2, gate="bounded", safe_gate=True, final_state=True, **RAW
    ),
    "padded K and V, V first": DeltaSpec(
        "chunk_kda", tokens=65, key_dim=60, value_dim=100, gate="softplus", v_first=True, **RAW, **STATES
    ),
    "negative eigenvalues, wide beta": DeltaSpec("chunk_kda", tokens=70, neg_eigval=True, wide_beta=True, scale=0.3, **RAW),
    "packed": DeltaSpec("chunk_kda", tokens=255, lengths=(15, 85, 1, 64, 0, 90), heads=1, **STATES),
    "strong decays": DeltaSpec("chunk_kda", tokens=130, decay="strong", **STATES),
    "strong softplus gate": DeltaSpec("chunk_kda", tokens=70, gate="softplus", decay="strong", final_state=True, **RAW),
    "strided, short": DeltaSpec("chunk_kda", tokens=7, strided=True, **STATES),
    "states of chunks": DeltaSpec("chunk_kda", tokens=150, heads=1, intermediate=True, **STATES),
    "states of packed chunks": DeltaSpec("chunk_kda", tokens=150, lengths=(70, 0, 80), heads=1, intermediate=True, v_first=True),
}  # fmt: skip


@cache
def _compiled(kernel: str, config: Any) -> Any:
    return kernels.need("sm_90a", lambda: importlib.import_module(f"deltafuse.kernels.{kernel}").compile(config))


def load(kernel: str, config: Any, arch: str) -> Any:
    assert arch == "sm_90a"
    return _compiled(kernel, config)


def arguments(spec: DeltaSpec, dtype: torch.dtype) -> dict[str, Any]:
    return spec.arguments(dtype, seed=3)


def exact(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
    with torch.inference_mode():
        return deltafuse.chunk_kda(**wide, backend="torch")


def emulate(given: dict[str, Any], plan: Schedule | None = None) -> tuple[torch.Tensor | None, ...]:
    """o, the final state and the chunks' states."""
    names = {"transpose_state_layout"} | ARGUMENTS
    assert set(given) <= names | {"q", "k", "v", "g", "beta"}
    with torch.no_grad():
        call = parse_delta("chunk_kda", per_key=True, **given)
    flags = flags_of(call.problem)
    rest = (call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, call.cu_seqlens, flags)
    chosen = kernels_for(call.q, call.v, *rest, sms=132, plan=plan)
    o, state, states, _ = forward(call.q, call.k, call.v, *rest, chosen, "sm_90a", load)
    return o, state, None if states is None else _by_chunk(states, call.q, call.cu_seqlens)


def compare(got: tuple[torch.Tensor | None, ...], want: tuple[torch.Tensor, ...], allowed: float) -> None:
    for name, x, y in zip(("o", "final state", "states"), got, want, strict=False):
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.shape == y.shape
            error = (x.double() - y).norm() / y.norm()
            assert error < allowed, (name, float(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(emulated: Any, name: str, dtype: torch.dtype) -> None:
    emulated("sm_90a")
    given = arguments(CASES[name], dtype)
    compare(emulate(given), exact(given), 5e-3 if dtype == torch.bfloat16 else 1e-3)


def masked(value: float, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Slow decays, and in one token one of `value`, as masks and resets have them."""
    given = arguments(DeltaSpec("chunk_kda", tokens=70, heads=1, l2norm=True), dtype)
    given["g"] = -0.1 * torch.rand(1, 70, 1, 64, generator=torch.Generator().manual_seed(1))
    given["g"][0, 5] = value
    return given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("value", [-300.0, -1e6, -1e9, -math.inf])
def test_any_log_decay(emulated: Any, value: float, dtype: torch.dtype) -> None:
    emulated("sm_90a")
    given = masked(value, dtype)
    compare(emulate(given), exact(given), 5e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize(("name", "value"), [("g", math.inf), ("g", 1e30), ("A_log", 200.0)])
def test_any_raw_gate(emulated: Any, name: str, value: float) -> None:
    """A softplus gate or a rate beyond all bounds: the state is gone, and comes back after it."""
    emulated("sm_90a")
    given = arguments(
        DeltaSpec("chunk_kda", tokens=70, heads=1, gate="softplus", decay="remembering", l2norm=True), torch.bfloat16
    )
    if name == "g":
        given["g"][0, 5] = value
    else:
        given["A_log"].fill_(value)
    compare(emulate(given), exact(given), 5e-3)


@pytest.mark.usefixtures("nan_in_new_tensors")
def test_rows_of_no_sequence_are_zeros(emulated: Any) -> None:
    emulated("sm_90a")
    given = arguments(DeltaSpec("chunk_kda", tokens=70, heads=1, l2norm=True), torch.bfloat16)
    given |= {"cu_seqlens": torch.tensor([0, 30, 50, 50]), "use_graph": True}
    with torch.no_grad():
        call = parse_delta("chunk_kda", per_key=True, **given)
    flags = flags_of(call.problem)
    inputs = (call.q, call.k, call.v, call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, call.cu_seqlens)
    chosen = kernels_for(call.q, call.v, *inputs[3:], flags, sms=132)
    o, *_ = run(Form.of(call.q, call.v, call.cu_seqlens, flags, chosen, "sm_90a", load), inputs, True)
    grads = backward(
        *inputs, flags, chosen, torch.ones_like(call.v), None, "sm_90a", 4, load, may_end_early=True
    )  # fmt: skip
    for x in (o, grads.q, grads.k, grads.v, grads.g, grads.beta):
        assert x[:, :50].isfinite().all()
        assert (x[:, 50:] == 0).all()


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_segments_give_the_whole(emulated: Any, initial: bool, v_first: bool) -> None:
    emulated("sm_90a")
    spec = DeltaSpec(
        "chunk_kda", tokens=64 * 5 + 9, heads=1, gate="softplus", decay="remembering", final_state=True, initial_state=initial,
        v_first=v_first, **RAW,
    )  # fmt: skip
    given = arguments(spec, torch.bfloat16)
    given["A_log"] = given["A_log"] - 3  # states outlive a segment, so that its transition counts
    compare(emulate(given, Schedule(64, 1, 3, 2)), exact(given), 5e-3)


def test_packed_sequences_by_segments(emulated: Any) -> None:
    emulated("sm_90a")
    spec = DeltaSpec(
        "chunk_kda", tokens=64 * 4, lengths=(190, 0, 66), heads=1, gate="softplus", decay="remembering", **RAW, **STATES
    )
    given = arguments(spec, torch.bfloat16)
    compare(emulate(given, Schedule(64, 1, 2, 2)), exact(given), 5e-3)


LAUNCHED_EARLY: dict[str, tuple[str, Any]] = {
    "segments": ("sm90.kda_segments", SegmentsConfig(cluster=2)),
    "segments, packed, strips": ("sm90.kda_segments", SegmentsConfig(cu_seqlens="int64", strips=True)),
    "combination": ("warp.kda_combine", CombineConfig(initial=True, final=True, early=True)),
}
TOUCHES = re.compile(r"\b(ld|st|red|atom|cp)\.\S*(global|tensor)")
WAITS = re.compile(r"griddepcontrol\.wait;")


@pytest.mark.parametrize("name", LAUNCHED_EARLY)
def test_memory_is_touched_after_the_kernel_before(name: str) -> None:
    """A kernel that is launched while another runs neither reads what it writes nor overwrites what it reads."""
    ptx = _compiled(*LAUNCHED_EARLY[name]).artifacts.PTX
    (wait,) = (m.start() for m in WAITS.finditer(ptx))
    touched = [m.start() for m in TOUCHES.finditer(ptx)]
    assert touched
    assert wait < min(touched)


def test_the_last_pass_first_awaits_its_code() -> None:
    """Until the kernels before have ended, or a code says that it need not wait for that; and it never ends before them."""
    config = ScanConfig(cluster=2, initial=True, final=True, strips=True, early="follow")
    ptx = _compiled("sm90.kda_scan", config).artifacts.PTX
    first, last = (m.start() for m in WAITS.finditer(ptx))
    touched = {m.start(): m.group() for m in TOUCHES.finditer(ptx)}
    assert {text for at, text in touched.items() if at < first} == {"ld.acquire.gpu.global"}
    assert last > max(touched)
    # What others have stored in the ordinary way is about to be copied by TMA.
    first_copy = min(at for at, text in touched.items() if text.startswith("cp"))
    assert len(re.findall(r"fence\.proxy\.async;", ptx[:first_copy])) == 1
    segments = _compiled(*LAUNCHED_EARLY["segments, packed, strips"]).artifacts.PTX
    assert "st.release.gpu.global" in segments


def test_codes_are_undecided_before_others_may_start() -> None:
    """The first kernel lets the next ones start once its stores of codes are there for them, by one thread of each CTA."""
    ptx = _compiled("warp.kda_prepare", PrepareConfig(bound=True, strips=True)).artifacts.PTX
    (start,) = (m.start() for m in re.finditer(r"griddepcontrol\.launch_dependents;", ptx))
    (fence,) = (m.start() for m in re.finditer(r"fence\.acq_rel\.gpu;", ptx))
    stores = [m.start() for m in re.finditer(r"st\.global", ptx) if m.start() < start]
    assert len(stores) == 1
    assert stores[0] < fence < start


def test_no_later_token_changes_an_earlier_output(emulated: Any) -> None:
    emulated("sm_90a")
    given = arguments(DeltaSpec("chunk_kda", tokens=100, heads=1, decay="strong"), torch.bfloat16)
    before = emulate(given)[0]
    changed = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, 77] = changed[name][:, 77] * 3 - 1
    after = emulate(changed)[0]
    assert before is not None
    assert after is not None
    assert torch.equal(before[:, :77], after[:, :77])
    assert not torch.equal(before[:, 77:], after[:, 77:])
