"""What the commands are made of: parsing, calls and their tensors, definitions, errors, counted work, timing."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import deltafuse
from deltafuse.cli import bench, counts, definitions, machine, parse, timing
from deltafuse.cli.cases import full_cases, quick_cases
from deltafuse.cli.specs import ConvSpec, DeltaSpec, GateSpec
from deltafuse.cli.verify import Error, Outcome, relative_error, run, tolerance

CPU = torch.device("cpu")


# Parsing


@pytest.mark.parametrize(
    ("op", "text", "spec"),
    [
        ("chunk_kda", "1,8,2,4,6", DeltaSpec("chunk_kda", 1, 8, 2, 4, 6)),
        ("chunk_kda", "1,8,2,4,6,4", DeltaSpec("chunk_kda", 1, 8, 2, 4, 6, 4)),
        ("chunk_kda", "1,8,2,4,6:3,0,5", DeltaSpec("chunk_kda", 1, 8, 2, 4, 6, lengths=(3, 0, 5))),
        ("causal_conv1d", "1,8,16,4:8", ConvSpec("causal_conv1d", 1, 8, 16, 4, (8,))),
        ("causal_conv1d_update", "3,16,4", ConvSpec("causal_conv1d_update", 3, 1, 16, 4)),
        ("fused_kda_gate", "1,8,2,4", GateSpec("fused_kda_gate", 1, 8, 2, 4)),
    ],
)
def test_a_shape_is_parsed_and_written_the_same(op: str, text: str, spec: object) -> None:
    parsed = parse.parse_spec(op, text)
    assert parsed == spec
    assert parsed.shape == text


@pytest.mark.parametrize(
    ("op", "text", "options", "message"),
    [
        ("chunk_kda", "1,8,2,4", {}, "allowed: 5 numbers B,T,H,K,V"),
        ("chunk_kda", "1,8,2,4,x", {}, "allowed: whole numbers B,T,H,K,V"),
        ("chunk_kda", "1,-8,2,4,6", {}, "none negative"),
        ("chunk_kda", "1,8,2,4,6,4", {"hv": 8}, "HV once"),
        ("chunk_kda", "1,8,2,4,6:3,4", {}, "add up to T = 8 [(]these: 7[)]"),
        ("chunk_kda", "1,8,2,4,6:9,-1", {}, "lengths of 0 or more"),
        ("chunk_kda", "1,8,2,4,6:a", {}, "the lengths of the sequences"),
        ("chunk_kda", "1,8,2,4,6:8", {"packed": "8"}, "the lengths once"),
        ("chunk_kda", "2,8,2,4,6:8", {}, "B = 1 with packed sequences, not 2"),
        ("causal_conv1d", "1,8,16,4", {"hv": 2}, "causal_conv1d has none"),
        ("causal_conv1d_update", "1,16,4:1", {}, "has no packed sequences"),
        ("fused_kda_gate", "1,8,2,4", {"gate": "log"}, "softplus, bounded"),
    ],
)
def test_a_bad_shape_says_what_is_allowed(op: str, text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse.parse_spec(op, text, **options)  # type: ignore[arg-type]


def test_dtypes_devices_ops() -> None:
    assert parse.parse_dtype("bf16") == parse.parse_dtype("bfloat16") == torch.bfloat16
    assert parse.dtype_name(torch.float16) == "float16"
    assert parse.parse_device("cpu") == CPU
    for function, text in (
        (parse.parse_dtype, "int8"),
        (parse.parse_device, "nonsense"),
        (parse.parse_device, "meta"),
        (parse.parse_op, "chunk_gla"),
    ):
        with pytest.raises(ValueError, match=f"got '{text}'; allowed: "):
            function(text)
    assert parse.parse_list(["a,b", "c"]) == ["a", "b", "c"]


def test_the_default_device_is_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert parse.parse_device(None) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert parse.parse_device(None) == torch.device("cuda")
    with pytest.raises(ValueError, match="allowed: cpu, cuda:0"):
        parse.parse_device("cuda:1")


def test_machines_can_be_described() -> None:
    h200 = parse.parse_machine("h200", fla=True, dsl=False)
    assert (h200.device, h200.capability, h200.name, h200.dsl) == ("cuda", (9, 0), "NVIDIA H200", None)
    assert h200.fla is not None
    assert parse.parse_machine("B200").capability == (10, 0)
    assert parse.parse_machine("cpu").device == "cpu"
    assert parse.parse_machine("cuda", fla=False).fla is None
    with pytest.raises(ValueError, match=r"allowed: cpu.*h200"):
        parse.parse_machine("h900")


# Calls and their tensors


def test_the_cases_cover_every_op_and_switch() -> None:
    quick = quick_cases()
    assert {case.spec.op for case in quick} == set(deltafuse.OPS)
    assert {case.spec.op for case in quick if case.gradients} == set(deltafuse.OPS) - {"causal_conv1d_update"}
    arguments = {name for case in quick for name in case.spec.arguments(torch.float64, "meta")}
    for op in deltafuse.OPS:
        hints = getattr(deltafuse, op).__annotations__
        # What has no bearing on results, is another name of something else, or cannot run here.
        other = {
            "return",
            "backend",
            "cp_context",
            "use_graph",
            "max_num_seqs",
            "chunk_indices",
            "transpose_state_layout",
        }
        other |= {"cu_seqlens_cpu", "out"}
        assert set(hints) - other <= arguments
    delta = [case.spec for case in quick if isinstance(case.spec, DeltaSpec)]
    assert {63, 500} <= {spec.tokens for spec in delta}
    assert {60, 64, 100} <= {spec.key_dim for spec in delta} | {spec.value_dim for spec in delta}
    assert any(0 in spec.lengths for spec in delta if spec.lengths)
    assert len({case.name + case.spec.op for case in quick}) == len(quick)


def test_strong_decays_are_strong() -> None:
    g = DeltaSpec("chunk_kda", tokens=200, decay="strong").arguments(torch.float32)["g"]
    assert {-20.0, -1000.0} <= set(g.flatten().tolist())
    assert DeltaSpec("chunk_kda", tokens=200).arguments(torch.float32)["g"].min() > -20


def test_tensors_are_the_same_for_a_seed_and_absent_on_meta() -> None:
    spec = DeltaSpec("chunk_kda", tokens=9, gate="softplus", initial_state=True, lengths=(4, 5))
    first, again, other = (spec.arguments(torch.bfloat16, seed=seed) for seed in (3, 3, 4))
    meta = spec.arguments(torch.bfloat16, "meta")
    assert first.keys() == meta.keys()
    for name, x in first.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, again[name])
            assert (meta[name].shape, meta[name].dtype, meta[name].is_meta) == (x.shape, x.dtype, True)
    assert not torch.equal(first["q"], other["q"])
    assert first["q"].dtype == torch.bfloat16
    assert first["A_log"].dtype == first["initial_state"].dtype == torch.float32


def test_strided_tensors_are_parts_of_one() -> None:
    arguments = DeltaSpec("chunk_kda", strided=True).arguments(torch.float32)
    assert not arguments["q"].is_contiguous()
    assert arguments["q"].untyped_storage().data_ptr() == arguments["v"].untyped_storage().data_ptr()


# Definitions


def test_the_delta_rule_by_hand() -> None:
    """Two tokens with K = V = 1: every number is written out."""
    q, k, v = [torch.tensor(x, dtype=torch.float64).view(1, 2, 1, 1) for x in ([1.0, 2.0], [0.5, 2.0], [3.0, -1.0])]
    g = torch.tensor([0.5, 0.25], dtype=torch.float64).log().view(1, 2, 1)
    beta = torch.tensor([1.0, 0.5], dtype=torch.float64).view(1, 2, 1)
    state = torch.full((1, 1, 1, 1), 4.0, dtype=torch.float64)
    found = definitions.delta_rule(q, k, v, g, beta, scale=2.0, initial_state=state, output_final_state=True)
    s1 = 4 * 0.5
    s1 += 0.5 * 1.0 * (3.0 - 0.5 * s1)
    s2 = s1 * 0.25
    s2 += 2.0 * 0.5 * (-1.0 - 2.0 * s2)
    assert found["o"].flatten().tolist() == pytest.approx([2 * s1, 2 * 2 * s2])
    assert found["final_state"].item() == pytest.approx(s2)


def test_the_convolution_is_torch_s_own() -> None:
    spec = ConvSpec("causal_conv1d", 2, 9, 5, 3, activation="silu", bias=True, residual=True, final_state=True)
    arguments = spec.arguments(torch.float64)
    found = definitions.conv(**arguments)
    x = F.pad(arguments["x"].transpose(1, 2), (2, 0))
    y = F.conv1d(x, arguments["weight"].unsqueeze(1), arguments["bias"], groups=5)
    torch.testing.assert_close(found["y"], F.silu(y).transpose(1, 2) + arguments["residual"])
    torch.testing.assert_close(found["final_state"], arguments["x"].transpose(1, 2)[..., -3:])


def test_a_packed_convolution_is_each_sequence_s_own() -> None:
    spec = ConvSpec("causal_conv1d", 1, 9, 5, 4, lengths=(2, 0, 7), initial_state=True, final_state=True)
    arguments = spec.arguments(torch.float64)
    found = definitions.conv(**arguments)
    for n, (start, end) in enumerate(((0, 2), (2, 2), (2, 9))):
        own = {"x": arguments["x"][:, start:end], "weight": arguments["weight"], "output_final_state": True}
        alone = definitions.conv(**own, initial_state=arguments["initial_state"][n : n + 1])
        assert torch.equal(found["y"][:, start:end], alone["y"])
        assert torch.equal(found["final_state"][n], alone["final_state"][0])
    assert torch.equal(found["final_state"][1], arguments["initial_state"][1])


def test_the_gate_by_hand() -> None:
    raw, a_log, bias = torch.tensor([[0.3, -2.0]]), torch.tensor([0.7]), torch.tensor([0.1, 0.2])
    want = [-math.exp(0.7) * math.log1p(math.exp(0.4)), -math.exp(0.7) * math.log1p(math.exp(-1.8))]
    assert definitions.kda_gate(raw, a_log, bias)["gate"].flatten().tolist() == pytest.approx(want)
    want = [-5 / (1 + math.exp(-math.exp(0.7) * x)) for x in (0.4, -1.8)]
    assert definitions.kda_gate(raw, a_log, bias, -5.0)["gate"].flatten().tolist() == pytest.approx(want)


# Errors and tolerances


def test_relative_error() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want, want) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([3.0, float("nan")]), want))
    assert relative_error(torch.tensor([3.0, float("inf")]), want) == float("inf")
    assert relative_error(torch.zeros(3), want) == float("inf")
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.tensor([0.0, 1e-3]), torch.zeros(2)) > 1
    assert relative_error(torch.zeros(2), torch.full((2,), 1e-200, dtype=torch.float64)) < 1e-100
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


def test_tolerances() -> None:
    assert tolerance("o", torch.bfloat16) == 0.005
    assert tolerance("dg", torch.float16) == 0.02
    assert tolerance("dq", torch.float32) == pytest.approx(0.008 / 100)
    assert tolerance("dA_log", torch.float64) == 1e-10
    assert tolerance("dA_log", torch.bfloat16, 16) == 0.008
    assert tolerance("dA_log", torch.bfloat16, 15) == 0.02
    assert tolerance("dq", torch.bfloat16, 15) == 0.008


def test_a_nan_passes_nothing() -> None:
    case = quick_cases()[0]
    good, bad = Error("o", 0.0, 1.0), Error("dq", float("nan"), 1.0)
    assert Outcome(case, torch.float32, "torch", (good,)).passed
    assert not Outcome(case, torch.float32, "torch", (good, bad)).passed
    assert not Outcome(case, torch.float32, "torch").passed
    assert not Outcome(case, torch.float32, "torch", (good,), broken="RuntimeError").passed


@pytest.mark.parametrize(
    "case", full_cases()[len(quick_cases()) :: 25], ids=lambda case: f"{case.spec.op}: {case.name}"
)
def test_thorough_cases_pass(case: object) -> None:
    outcome = run(case, torch.float32, CPU)  # type: ignore[arg-type]
    assert outcome.passed, outcome


# Counted work


def test_counts_of_kda() -> None:
    """1,282 bytes and 180,224 operations a token and head, from the shapes of the tensors."""
    spec = bench.spec_of("chunk_kda", "1,128,2,128,128", bench.BACKWARD)
    arguments = spec.arguments(torch.bfloat16, "meta")
    parameters = counts.size((arguments["A_log"], arguments["dt_bias"]))
    work = counts.forward(spec, arguments.values(), [arguments["v"]])
    assert (work.bytes - parameters) / (128 * 2) == 1282
    assert work.operations / (128 * 2) == 180_224
    back = counts.backward(spec, arguments.values(), [arguments["v"]], arguments.values())
    assert (back.bytes - 2 * parameters) / (128 * 2) == 4 * 256 + 2 + 256 + 4 * 256 + 2
    assert back.operations / (128 * 2) == 507_904


def test_counts_of_decoding_and_convolution() -> None:
    spec = bench.spec_of("fused_recurrent_kda", "128,1,32,128,128", bench.FORWARD)
    arguments = spec.arguments(torch.bfloat16, "meta")
    work = counts.forward(spec, arguments.values(), [arguments["v"], arguments["initial_state"]])
    assert work.bytes / 4.27e12 == pytest.approx(0.126e-3, rel=0.02)
    assert work.operations == 128 * 32 * 7 * 128 * 128

    spec = bench.spec_of("causal_conv1d", "16,8192,2048,4", bench.BACKWARD)
    arguments = spec.arguments(torch.bfloat16, "meta")
    results = [arguments["x"]]
    assert counts.forward(spec, arguments.values(), results).bytes / 4.27e12 == pytest.approx(0.252e-3, rel=0.01)
    back = counts.backward(spec, arguments.values(), results, arguments.values())
    assert back.bytes / 4.27e12 == pytest.approx(0.377e-3, rel=0.01)
    total = counts.Counts(2_000_000, 3_000_000_000)
    assert (total.gb_per_second(2.0), total.tflops(2.0)) == (1.0, 1.5)


# Timing and rows


def test_times_are_milliseconds_of_each_call() -> None:
    calls = []

    def call() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.01)

    found = timing.times(call, CPU, reps=3, warmup=2)
    assert len(calls) == 5
    assert len(found) == 3
    assert min(found) >= 10


def test_ratios_are_the_peer_s_time_over_this() -> None:
    rows = [bench.Row("a", "s", "d", "p", backend, ms) for backend, ms in (("x", 2.0), ("y", 8.0), ("z", None))]
    rows.append(bench.Row("a", "other", "d", "p", "x", 1.0))
    assert [row.ratio for row in bench.with_ratios(rows, "y")] == [4.0, 1.0, None, None]


@pytest.mark.parametrize("phase", [bench.FORWARD, bench.BACKWARD])
@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gated_delta_rule"])
def test_token_by_token_is_the_same_function(op: str, phase: str) -> None:
    """What is timed as `recurrent` computes what the op does."""
    spec = bench.spec_of(op, "1,40,2,16,16,4:13,27", phase)
    results = []
    for backend in ("torch", bench.RECURRENT):
        arguments = spec.arguments(torch.float64)
        job = bench.Job(spec, phase, torch.float64, CPU, backend)
        results.append(bench._call(job, arguments)())
    assert len(results[0]) == len(results[1]) == (2 if phase == bench.FORWARD else 1)
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_every_default_shape_is_one_that_its_op_takes() -> None:
    for device in (CPU, torch.device("cuda")):
        for op in deltafuse.OPS:
            for phase in (bench.FORWARD,) if op in bench.INFERENCE_ONLY else (bench.FORWARD, bench.BACKWARD):
                for shape in bench.default_shapes(op, phase, device):
                    bench.check(bench.Job(bench.spec_of(op, shape, phase), phase, torch.bfloat16, device, "torch"))


def test_rows_are_appended_under_the_same_columns_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    rows = [bench.Row("op", "1,2", "float32", "forward", "torch", 1.5, note="a, b")]
    bench.write_csv(path, rows, CPU, "torch")
    bench.write_csv(path, rows, CPU, "torch")
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].split(",") == list(bench.COLUMNS)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="a file with other columns"):
        bench.write_csv(path, rows, CPU, "torch")
    assert path.read_text() == "a,b\n1,2\n"


def test_versions_and_names() -> None:
    assert machine.versions()["torch"] == torch.__version__
    assert machine.versions()["deltafuse"] == deltafuse.__version__
    assert machine.device_name(CPU)
    assert CPU in machine.devices()
