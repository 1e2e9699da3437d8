"""`warmup` and `python -m deltafuse.aot`: which kernels, for which machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deltafuse
from deltafuse import aot, warm
from deltafuse.backends import problem_of
from deltafuse.kernels.config import CombineConfig, PrepareConfig, ScanConfig
from deltafuse.runtime import cache, launch
from deltafuse.runtime.probe import Environment
from deltafuse.support import Problem

HOPPER = Environment("cuda", (9, 0), "a Hopper", dsl="4.8.1", sms=132)
AMPERE = Environment("cuda", (8, 0), "an Ampere", dsl="4.8.1", sms=108)


def arguments(device: str = "meta", dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """A call of `chunk_kda`."""
    x = torch.zeros(1, 128, 2, 64, device=device, dtype=dtype)
    return {"q": x, "k": x, "v": x, "g": x.float(), "beta": x[..., 0]}


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is prepared, on a machine whose cuda:0 and cuda:1 are Hoppers and cuda:2 an Ampere."""
    calls: list[Any] = []

    def prepare(kernels: Any, arch: str, devices: Any) -> tuple[str, ...]:
        kernels = list(kernels)
        calls.append((kernels, arch, [str(device) for device in devices]))
        return tuple(kernel for kernel, _ in kernels)

    machines = {("cuda", 0): HOPPER, ("cuda", 1): HOPPER, ("cuda", 2): AMPERE}
    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(warm, "environment", lambda kind, index: machines.get((kind, index), Environment(kind)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return calls


# ---- warmup ------------------------------------------------------------------------------------------------------------------------
def test_the_kernels_of_a_call_on_the_current_gpu(prepared: list[Any]) -> None:
    with torch.inference_mode():
        names = deltafuse.warmup("chunk_kda", **arguments())
    ((kernels, arch, devices),) = prepared
    assert (arch, devices) == ("sm_90a", ["cuda:1"])
    assert set(names) == {kernel for kernel, _ in kernels} >= {"warp.kda_prepare", "sm90.kda_scan"}
    prepare = dict(kernels)["warp.kda_prepare"]
    assert (prepare.dtype, prepare.key_dim, prepare.gate_dtype) == ("bfloat16", 64, "float32")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", ["cuda:0"]),
        (torch.device("cuda", 1), ["cuda:1"]),
        ("cuda", ["cuda:1"]),
        (["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]),
        (["cuda:0", "cuda:2", "cpu"], ["cuda:0"]),
        ("cpu", []),
    ],
)
def test_devices(device: Any, expected: list[str], prepared: list[Any]) -> None:
    with torch.inference_mode():
        names = deltafuse.warmup(deltafuse.chunk_kda, **arguments(), device=device)
    assert [x for _, _, devices in prepared for x in devices] == expected
    assert bool(names) == bool(expected)


@pytest.mark.usefixtures("prepared")
def test_other_backends_need_nothing(prepared: list[Any]) -> None:
    with torch.inference_mode():
        assert deltafuse.warmup("chunk_kda", **arguments(), backend="torch") == ()
        with deltafuse.use_backend("torch"):
            assert deltafuse.warmup("chunk_kda", **arguments()) == ()
        assert deltafuse.warmup("chunk_kda", **arguments(dtype=torch.float32)) == ()
        assert deltafuse.warmup("chunk_kda", **arguments("cpu")) == ()  # the tensors' own device
        with pytest.raises(deltafuse.UnsupportedError, match="float32"):
            deltafuse.warmup("chunk_kda", **arguments(dtype=torch.float32), backend="cute")
    assert prepared == []


@pytest.mark.usefixtures("prepared")
def test_bad_arguments_are_the_ops_own() -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        deltafuse.warmup("chunk_kda", **arguments(), chunk_size=48)
    with pytest.raises(ValueError, match="`op`: got 'nothing'"):
        deltafuse.warmup("nothing")


def test_another_source_of_kernels(prepared: list[Any]) -> None:
    asked: list[tuple[Problem, Environment]] = []

    def wanted(problem: Problem, env: Environment) -> list[tuple[str, Any]]:
        asked.append((problem, env))
        return [("toy", 1), ("toy", 2)]

    with torch.inference_mode():
        problem, _ = problem_of("chunk_kda", **arguments())
    devices = [torch.device("cuda", i) for i in range(3)]
    assert warm.warm(problem, "auto", devices, wanted) == ("toy",)
    assert asked == [(problem, HOPPER)] * 2
    assert [x for _, _, found in prepared for x in found] == ["cuda:0", "cuda:1"]


def test_names_of_architectures() -> None:
    known = {
        (8, 0): "sm_80",
        (8, 9): "sm_89",
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (10, 3): "sm_103a",
        (12, 0): "sm_120a",
    }
    assert {capability: Environment("cuda", capability).arch for capability in known} == known
    assert {aot.machine(arch).capability: arch for arch in known.values()} == known
    for wrong in ("90", "sm90", "sm_9", "sm_90x", ""):
        with pytest.raises(ValueError, match="allowed: names such as sm_90a"):
            aot.machine(wrong)


# ---- ahead of time -----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The DSL as installed, whether it is or not."""
    monkeypatch.setattr(aot, "packages", lambda: {"fla": None, "dsl": "4.8.1", "triton": None})


@pytest.mark.usefixtures("dsl")
def test_the_common_set() -> None:
    found = aot.common("sm_90a", [torch.bfloat16], [(128, 128)])
    assert len(found) == len(set(found))
    by_name: dict[str, list[Any]] = {}
    for kernel, config in found:
        by_name.setdefault(kernel, []).append(config)
    backward = {"sm90.kda_reverse", "sm90.kda_inter", "warp.kda_intra"}
    assert set(by_name) == {"warp.kda_prepare", "warp.kda_combine", "sm90.kda_segments", "sm90.kda_scan"} | backward
    assert all(isinstance(config, aot.CONFIGS[kernel]) for kernel, config in found)
    prepares, scans = by_name["warp.kda_prepare"], by_name["sm90.kda_scan"]
    assert {config.gate for config in prepares} == {"log", "softplus", "bounded"}
    assert {config.cu_seqlens for config in prepares} == {"", "int32", "int64"}
    assert {config.dtype for config in scans} == {"bfloat16"}
    whole = {(c.initial, c.final, c.state_v_first) for c in scans if c.readout}
    assert whole >= {(False, False, False), (False, True, True), (True, True, False), (True, True, True)}
    more = aot.common("sm_90a", [torch.bfloat16, torch.float16], [(128, 128), (64, 64)])
    assert set(found) < set(more)
    assert {config.key_dim for kernel, config in more if kernel == "sm90.kda_scan"} == {64, 128}
    assert aot.common("sm_80", [torch.bfloat16], [(128, 128)]) == []


@pytest.mark.usefixtures("dsl")
def test_a_call_of_the_common_set_finds_its_kernels() -> None:
    found = set(aot.common("sm_90a", [torch.bfloat16], [(128, 128)]))
    spec = aot.DeltaSpec(
        "chunk_kda", 4, 2048, 32, 128, 128, gate="softplus", beta_sigmoid=True, l2norm=True, initial_state=True,
        final_state=True, v_first=True,
    )  # fmt: skip
    with torch.inference_mode():
        problem, _ = problem_of("chunk_kda", **spec.arguments(torch.bfloat16, "meta"))
    assert set(warm.kernels_of(problem, HOPPER)) <= found


def test_kernels_by_name() -> None:
    assert aot.named("sm90.kda_scan") == ("sm90.kda_scan", ScanConfig())
    assert aot.named("sm90.kda_scan: tile=128, final=true,dtype=float16") == (
        "sm90.kda_scan",
        ScanConfig(tile=128, final=True, dtype="float16"),
    )
    for text, wrong in [
        ("sm90.scan", "got 'sm90.scan'; allowed: warp"),
        ("sm90.kda_scan:tiles=64", "got 'tiles' for sm90.kda_scan; allowed: dtype"),
        ("sm90.kda_scan:tile=wide", "got 'wide' for tile"),
        ("sm90.kda_scan:final=1", "got '1' for final"),
    ]:
        with pytest.raises(ValueError, match=wrong):
            aot.named(text)


def test_kernels_of_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = [("sm90.kda_scan", ScanConfig(final=True)), ("warp.kda_combine", CombineConfig(64))]
    for kernel, config in kernels:
        for arch in ("sm_90a", "sm_100a"):
            cache.store(cache.Entry.of(kernel, config, arch), b"object", tmp_path)
    entry = cache.Entry.of("warp.kda_prepare", PrepareConfig(), "sm_90a")
    cache.store(dataclasses.replace(entry, about={**entry.about, "kernel": "warp.gone"}), b"object", tmp_path)
    assert sorted(aot.like(tmp_path), key=str) == sorted(kernels, key=str)
    assert "left out: got 'warp.gone'" in capsys.readouterr().err


def _listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert aot.main(["--out", "nowhere", "--list", *options]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("dsl")
def test_the_command_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _listed(capsys, "--arch", "sm_90a")
    assert len(lines) == len(aot.common("sm_90a", [torch.bfloat16], [(128, 128)]))
    only = _listed(capsys, "--arch", "sm_90a", "--only", "warp.kda_prepare")
    assert only == [line for line in lines if " warp.kda_prepare " in line] != []
    chosen = ["--config", "warp.kda_combine", "--config", "sm90.kda_scan:tile=128"]
    assert [line.split()[:2] for line in _listed(capsys, "--arch", "sm_90a", "--arch", "sm_100a", *chosen)] == [
        ["sm_90a", "warp.kda_combine"],
        ["sm_90a", "sm90.kda_scan"],
        ["sm_100a", "warp.kda_combine"],
    ]
    assert len(_listed(capsys, "--arch", "sm_90a", "--arch", "sm_90a", *chosen)) == 2


@pytest.mark.usefixtures("dsl")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--arch", "hopper"], "got 'hopper'"),
        (["--arch", "sm_90a", "--dtype", "int8"], "got 'int8'"),
        (["--arch", "sm_90a", "--sizes", "128"], "2 numbers K,V"),
        (["--arch", "sm_90a", "--config", "nothing"], "got 'nothing'"),
        ([], "--arch"),
    ],
)
def test_the_command_refuses(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        aot.main(["--out", "nowhere", *options])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("dsl")
def test_the_command_says_that_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert aot.main(["--out", str(tmp_path / "out"), "--arch", "sm_80"]) == 1
    assert "no kernels for sm_80" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Pool:
    """Stands in for the processes: a job runs when its result is asked for."""

    def __init__(self, workers: int, mp_context: Any) -> None:
        self.workers = workers

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except RuntimeError as error:
            future.set_exception(error)
        return future


def test_a_kernel_that_fails_is_named_and_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(kernel: str, config: Any, arch: str, folder: Path) -> Path:
        if config.final:
            raise RuntimeError("out of registers")
        return folder / f"{kernel}-{arch}.so"

    monkeypatch.setattr(aot, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(cache, "write_object", write)
    options = ["--arch", "sm_90a", "--out", str(tmp_path / "out")]
    good = ["--config", "sm90.kda_scan"]
    assert aot.main([*options, *good]) == 0
    assert "[1/1] sm90.kda_scan-sm_90a.so" in capsys.readouterr().out
    assert aot.main([*options, *good, "--config", "sm90.kda_scan:final=true"]) == 1
    said = capsys.readouterr().out
    assert "failed: sm90.kda_scan: out of registers" in said
    assert "1 objects in" in said
    assert "; 1 failed" in said
