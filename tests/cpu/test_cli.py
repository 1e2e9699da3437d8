"""The commands as a user types them."""

from __future__ import annotations

import csv
import importlib
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import deltafuse
from deltafuse import cli, demo
from deltafuse.cli.app import app
from deltafuse.kernels.config import CombineConfig
from deltafuse.runtime import cache

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str, code: int = 0) -> str:
    """The output of a command that leaves with `code`, white space as single blanks."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code == code, result.output
    return " ".join(re.sub(r"[│┃╭╮╰╯─]", " ", result.output).split())


@pytest.fixture
def unloaded() -> Iterator[None]:
    """The modules of the command line as before they are first imported."""

    def modules() -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.startswith("deltafuse.cli.")}

    loaded, attributes = modules(), dict(vars(cli))
    for name in loaded:
        del sys.modules[name]
    yield
    for name in modules():
        del sys.modules[name]
    sys.modules.update(loaded)
    vars(cli).update(attributes)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_one_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as Python marks a module that cannot be imported
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == f"deltafuse: the command line needs {package}: pip install 'deltafuse[cli]'"


@pytest.mark.usefixtures("unloaded")
def test_another_missing_package_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltafuse.reference.recurrent", None)
    with pytest.raises(ModuleNotFoundError, match=r"deltafuse\.reference\.recurrent"):
        cli.main()


@pytest.mark.usefixtures("unloaded")
def test_the_pieces_need_neither_typer_nor_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("typer", "rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    for piece in ("specs", "definitions", "cases", "verify", "bench", "parse"):
        importlib.import_module(f"deltafuse.cli.{piece}")


def test_version_and_help() -> None:
    assert invoke("--version") == f"deltafuse {deltafuse.__version__}"
    shown = invoke("--help")
    for command in ("info", "explain", "verify", "bench", "demo", "cache"):
        assert command in shown
        assert invoke(command, "--help")


# info


def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = invoke("info")
    assert f"torch {torch.__version__}" in shown
    assert f"deltafuse {deltafuse.__version__}" in shown
    for name in ("python", "fla", "CuTe DSL", "triton"):
        assert name in shown
    for op in deltafuse.OPS:
        assert f" {op} torch" in shown
    monkeypatch.setenv("DELTAFUSE_BACKEND", "cute")
    shown = invoke("info")
    assert "'cute' asked for" in shown
    assert " chunk_kda none" in shown


def test_a_bad_environment_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAFUSE_BACKEND", "gpu")
    for command in ("info", "verify", "bench"):
        assert "`DELTAFUSE_BACKEND`: got 'gpu'; allowed: 'auto'" in invoke(command, code=2)


# explain


KDA = ("explain", "chunk_kda", "--shape", "1,128,2,64,64")


def test_explain_here_and_elsewhere() -> None:
    assert "backend 'auto': torch" in invoke(*KDA, "--device", "cpu")
    shown = invoke(*KDA, "--device", "h200", "--fla", "--packed", "100,28", "--gate", "bounded", "--safe-gate")
    assert "chunk_kda 1,128,2,64,64:100,28 bf16 on NVIDIA H200 (sm_90), backend 'auto': cute" in shown
    assert "-> cute yes" in shown
    assert "fla yes" in shown
    shown = invoke(*KDA, "--device", "a100", "--no-fla", "--hv", "4")
    assert "1,128,2,64,64,4 bf16 on NVIDIA A100 (sm_80), backend 'auto': torch" in shown
    assert "fla is not installed" in shown
    assert "cute no" in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--dtype", "fp64"), "fla has no float64"),
        (("--shape", "1,128,2,512,64"), "K up to 256, not 512"),
        (("--intermediate",), "torch"),
    ],
)
def test_explain_gives_the_reasons(arguments: tuple[str, ...], reason: str) -> None:
    assert reason in invoke(*KDA, "--device", "h100", "--fla", *arguments)


def test_explain_every_op() -> None:
    shapes = {"causal_conv1d": "1,64,32,4", "causal_conv1d_update": "8,32,4", "fused_kda_gate": "1,64,2,32"}
    for op in deltafuse.OPS:
        shown = invoke("explain", op, "--shape", shapes.get(op, "1,64,2,32,32"), "--device", "cpu")
        assert "backend 'auto': torch" in shown
    slots = ("explain", "fused_recurrent_kda", "--shape", "2,1,2,32,32", "--slots", "--device", "cpu")
    assert "backend 'auto': torch" in invoke(*slots)
    conv = ("explain", "causal_conv1d", "--shape", "1,64,32,4", "--activation", "silu", "--bias", "--residual")
    assert "backend 'auto': torch" in invoke(*conv, "--initial-state", "--final-state", "--backward", "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "cute"), "no backend takes it"),
        (("--backend", "gpu"), "`backend`: got 'gpu'"),
        (("--neg-eigval",), "`allow_neg_eigval`: got True"),
        (("--chunk-size", "0"), "`chunk_size`: got 0; allowed: 32 or 64"),
        (("--hv", "3"), "`v`: got 3 value heads"),
        (("--gate", "bounded", "--safe-gate", "--lower-bound", "-6"), "`lower_bound`: got -6.0"),
        (("--intermediate", "--backward"), "`return_intermediate_states`"),
    ],
)
def test_explain_leaves_with_1_where_nothing_runs(arguments: tuple[str, ...], message: str) -> None:
    assert message in invoke(*KDA, *arguments, "--device", "cpu", code=1)


def test_explain_leaves_with_1_for_an_unknown_argument() -> None:
    arguments = ("explain", "chunk_gated_delta_rule", "--shape", "1,128,2,64,64", "--safe-gate")
    assert "unexpected keyword argument 'safe_gate'" in invoke(*arguments, code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "chunk_gla", "--shape", "1"), "'OP': got 'chunk_gla'; allowed: chunk_kda"),
        (("explain", "chunk_kda", "--shape", "1,2"), "'--shape': got '1,2'; allowed: 5 numbers"),
        ((*KDA, "--packed", "100"), "'--shape, --packed': got '100'; allowed: lengths that add up to T = 128"),
        ((*KDA, "--dtype", "int8"), "'--dtype': got 'int8'"),
        ((*KDA, "--device", "h900"), "'--device': got 'h900'; allowed: cpu"),
        ((*KDA, "--activation", "silu"), "'--activation': chunk_kda has no such argument"),
        (("explain", "causal_conv1d", "--shape", "1,64,32,4", "--l2norm"), "'--l2norm': causal_conv1d has no such"),
        ((*KDA, "--gate", "tanh"), "'--gate'"),
        ((*KDA, "--lower-bound", "-3"), "'--lower-bound': goes with --gate bounded"),
        (("verify", "--op", "chunk_gla"), "'--op': got 'chunk_gla'"),
        (("verify", "--dtype", "int8"), "'--dtype': got 'int8'"),
        (("verify", "--device", "cuda:99"), "'--device': got 'cuda:99'"),
        (("verify", "--backend", "gpu"), "'--backend': got 'gpu'; allowed: auto"),
        (("bench", "--device", "cpu", "--backends", "gpu"), "'--backends': got 'gpu'; allowed: torch"),
        (("bench", "--device", "cpu", "--backends", ","), "'--backends': got ','"),
        (("bench", "--device", "cpu", "--peer", "fla"), "'--peer': got 'fla'; allowed: torch, recurrent"),
        (("bench", "--device", "cpu", "--shapes", "1,2,3"), "'--shapes': got '1,2,3'; allowed: 5 numbers"),
        (("bench", "--device", "cpu", "--op", "chunk_gated_delta_rule", "--gate", "bounded"), "'lower_bound'"),
        (("bench", "--device", "cpu", "--shapes", "1,64,2,32,32,3"), "`v`: got 3 value heads"),
        (("bench", "--device", "cpu", "--op", "causal_conv1d_update", "--backward"), "timed forward alone"),
        (("bench", "--device", "cpu", "--csv", str(ROOT / "pyproject.toml")), "a file with other columns"),
        (("bench", "--device", "cpu", "--reps", "0"), "'--reps'"),
        (("demo", "--device", "cuda:99"), "'--device': got 'cuda:99'"),
        (("demo", "--seconds", "0"), "`seconds`: got 0"),
    ],
)
def test_bad_options_are_explained(arguments: tuple[str, ...], message: str) -> None:
    shown = invoke(*arguments, code=2)
    assert message in shown
    assert "Traceback" not in shown


SHOWN = re.findall(
    r"```sh\ndeltafuse (explain [^\n]*)\n```\n\n```text\n(.*?)```", (ROOT / "docs" / "cli.md").read_text(), re.DOTALL
)


@pytest.mark.parametrize(("line", "text"), SHOWN)
def test_the_documented_answers_are_given(line: str, text: str) -> None:
    result = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "140", "NO_COLOR": "1"})
    assert result.output == text


def test_the_page_shows_every_kind_of_answer() -> None:
    assert len(SHOWN) >= 3


# verify


def test_verify_passes_in_every_dtype() -> None:
    shown = invoke("verify", "--device", "cpu", "--dtype", "fp64,fp32", "--dtype", "bf16,fp16")
    for name in ("float64", "float32", "bfloat16", "float16", *deltafuse.OPS, "dinitial_state", "dA_log", "pool"):
        assert name in shown
    assert "0 failed, 0 not run" in shown
    assert " 0 passed" not in shown


GDN = ("verify", "--op", "chunk_gated_delta_rule", "--dtype", "fp32", "--device", "cpu")


def test_verify_lists_each_case() -> None:
    shown = invoke(*GDN, "--each")
    assert "chunk_gated_delta_rule: strong decays, float32: " in shown
    assert "chunk_kda" not in shown


def _breaking(kind: str) -> Any:
    """An op that is wrong in one way, from the right one."""
    right = deltafuse.chunk_gated_delta_rule

    def broken(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kind == "raises":
            raise RuntimeError("no such kernel")
        if kind == "gradient":
            q = 1.001 * q - 0.001 * q.detach()
        o, *rest = right(q, *args, **kwargs)
        if kind == "value":
            o = o * 1.001
        if kind == "nan":
            o = torch.where(torch.arange(o.numel()).view(o.shape) == 7, float("nan"), o)
        if kind == "shape":
            o = o[:, :-1]
        return (o, None) if kind == "no state" else (o, *rest)

    return broken


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("value", "backend torch: o 1.0e-03 / 5e-05"),
        ("gradient", "backend torch: dq 1.0e-03 / 8e-05"),
        ("nan", "backend torch: o nan / 5e-05"),
        ("shape", "backend torch: RuntimeError"),
        ("raises", "RuntimeError: no such kernel"),
        ("no state", "AssertionError: chunk_gated_delta_rule returned o; expected: o, final_state"),
    ],
)
def test_verify_leaves_with_1_for_a_broken_op(kind: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _breaking(kind)
    broken.__name__ = "chunk_gated_delta_rule"
    monkeypatch.setattr(deltafuse, "chunk_gated_delta_rule", broken)
    shown = invoke(*GDN, code=1)
    assert message in shown
    assert "failed chunk_gated_delta_rule: " in shown


def test_verify_leaves_with_1_where_nothing_runs() -> None:
    shown = invoke(*GDN, "--backend", "cute", code=1)
    assert "not run `backend`: got 'cute' for chunk_gated_delta_rule" in shown
    assert "0 passed, 0 failed, 6 not run" in shown


# bench


def test_bench_writes_table_csv_and_plot(tmp_path: Path) -> None:
    table, plot = tmp_path / "rows.csv", tmp_path / "deep" / "plot.png"
    shapes = "1,64,2,32,32;1,70,1,16,16,2:30,40"
    arguments = ("bench", "--device", "cpu", "--shapes", shapes, "--backends", "torch,recurrent,fla", "--reps", "2")
    shown = invoke(*arguments, "--peer", "recurrent", "--csv", str(table), "--png", str(plot))
    assert "recurrent / this" in shown
    assert "not timed chunk_kda, fla: `backend`: got 'fla' for chunk_kda on CPU" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["shape"], row["phase"], row["backend"]) for row in rows] == [
        (shape, phase, backend)
        for phase in ("forward", "forward+backward")
        for shape in shapes.split(";")
        for backend in ("torch", "recurrent", "fla")
    ]
    for row in rows:
        if row["backend"] == "fla":
            assert row["ms"] == row["ratio"] == ""
            assert "fla runs on a GPU" in row["note"]
            continue
        assert float(row["ms"]) > 0
        assert float(row["gb_per_second"]) > 0
        assert float(row["tflops"]) > 0
        assert row["torch"] == torch.__version__
        assert row["date"][:2] == "20"
    torch_row, recurrent_row = rows[:2]
    assert float(torch_row["ratio"]) == pytest.approx(float(recurrent_row["ms"]) / float(torch_row["ms"]))


def test_bench_other_ops() -> None:
    ops = "fused_kda_gate,causal_conv1d,causal_conv1d_update,fused_recurrent_kda"
    shown = invoke("bench", "--device", "cpu", "--op", ops, "--reps", "1", "--forward")
    assert "causal_conv1d 2,1024,512,4 forward torch" in shown
    assert "not timed" not in shown


def test_bench_leaves_with_1_where_nothing_runs() -> None:
    arguments = ("bench", "--device", "cpu", "--shapes", "1,64,2,32,32", "--backends", "cute", "--reps", "1")
    assert "not timed chunk_kda, cute" in invoke(*arguments, code=1)


def test_bench_needs_matplotlib_for_a_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deltafuse.cli.commands.bench.find_spec", lambda name: None)
    arguments = ("bench", "--device", "cpu", "--shapes", "1,64,2,32,32", "--png", str(tmp_path / "a.png"))
    assert "pip install 'deltafuse[cli]'" in invoke(*arguments, code=2)


# demo


@pytest.mark.parametrize("code", [0, 1])
def test_demo_hands_on_its_options(code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[demo.Settings] = []

    def run(settings: demo.Settings, console: object) -> int:
        given.append(settings)
        return code

    monkeypatch.setattr(demo, "run", run)
    invoke("demo", code=code)
    options = (
        "--seconds",
        "3",
        "--steps",
        "4",
        "--seed",
        "5",
        "--prompt",
        "A",
        "--generate",
        "6",
        "--temperature",
        "0.5",
    )
    invoke("demo", "--small", "--out", str(tmp_path), *options, code=code)
    assert given == [
        demo.Settings(),
        demo.Settings.small(
            seconds=3.0, steps=4, seed=5, prompt="A", generate=6, temperature=0.5, out=tmp_path, device="cpu"
        ),
    ]


def test_demo_has_the_options_of_the_example() -> None:
    script = (ROOT / "examples" / "train_lm.py").read_text()
    command: Any = get_command(app)
    own = {option for parameter in command.commands["demo"].params for option in parameter.opts}
    assert own - {"--help"} == set(re.findall(r'add_argument\("(--[\w-]+)"', script))


# The script beside the command


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_reference_in_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(ROOT / "bench" / "cpu_reference.py"))["main"]
    names = main.__globals__
    table = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["cpu_reference.py", "--threads", "1", "--reps", "1", "--csv", str(table)])
    elsewhere, here = names["backward_bytes_elsewhere"], names["backward_bytes"]
    # One of the two lengths in a process of its own, as in earnest.
    names["backward_bytes_elsewhere"] = lambda tokens, threads: elsewhere(tokens, 1) if tokens == 512 else here(tokens)
    names |= {"SPEED_TOKENS": 128, "MEMORY_TOKENS": (512, 1024), "SPEED_UP": 0.1, "MEMORY_RATIO": 100.0}
    assert main() == 0
    assert "wanted >= 0.1: yes" in capsys.readouterr().out
    with table.open(newline="") as file:
        rows = {row["figure"] + row["shape"]: row for row in csv.DictReader(file)}
    gradients = 4 * 64 * 4 * 4  # those of q, k, v, g, in bytes a token
    assert float(rows["peak of the backward1,512,4,64,64"]["value"]) > gradients
    assert rows["peak a token, long to short"]["met"] == "True"
    names |= {"SPEED_UP": 1e9, "backward_bytes_elsewhere": lambda tokens, threads: 1}
    assert main() == 1


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    assert invoke("cache", "path") == str(tmp_path / "kernels")
    assert "0 kernels" in invoke("cache", "list")
    assert invoke("cache", "clear").startswith("removed 0 kernels")
    (tmp_path / "kernels").mkdir()
    for final in (False, True):
        config = CombineConfig(final=final)
        cache.store(cache.Entry.of("warp.kda_combine", config, "sm_90a"), bytes(5000), tmp_path / "kernels")
    shown = invoke("cache", "list")
    assert shown.count("warp.kda_combine") == 2
    for part in ("sm_90a", "key_dim=128", "final=True", "2 kernels, 0.0 MB"):
        assert part in shown
    assert invoke("cache", "clear").startswith("removed 2 kernels")
    assert "0 kernels" in invoke("cache", "list")
    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", "")
    assert "are not kept" in invoke("cache", "path", code=1)
