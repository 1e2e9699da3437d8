"""The core's build, its agreement with Python, and clear words for bad use."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ptxemu
from ptxemu import build, launch, lower, textures


def test_python_and_c_agree_on_structures() -> None:
    core = build.core()
    structures = (lower.CIns, lower.CProgram, launch.CLaunch, launch.CRange, textures.CTexture)
    assert [core.emu_sizeof(i) for i in range(5)] == [ctypes.sizeof(s) for s in structures]


def test_every_function_of_the_core_has_a_name_of_its_own() -> None:
    core = build.core()
    names = [core.emu_name(i) for i in range(core.emu_count())]
    assert len(names) > 200
    assert len(set(names)) == len(names)


def test_the_core_compiles_without_warnings(tmp_path: Path) -> None:
    for source in sorted(build.SOURCES.glob("*.c")):
        command = [
            "gcc",
            "-O1",
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-c",
            str(source),
            "-o",
            str(tmp_path / "x.o"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "x.c"
    source.write_text("int x;")
    monkeypatch.setenv("PTXEMU_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ptxemu.EmulatorError, match="gcc, which is not on the PATH"):
        build.compile_c("x", [source])
    monkeypatch.delenv("CC")
    source.write_text("int x")
    with pytest.raises(ptxemu.EmulatorError, match="could not compile"):
        build.compile_c("x", [source])


def test_bad_use_is_named() -> None:
    with pytest.raises(ptxemu.EmulatorError, match=r"arch: got 'sm_80'; allowed: sm_90"), ptxemu.emulate("sm_80"):
        pass
    with pytest.raises(ptxemu.EmulatorError, match="on meta; the emulator takes CPU tensors"):
        ptxemu.run_ptx(".entry k(.param .u64 a) { ret; }", "k", (1,), (32,), [torch.zeros(1, device="meta")])
    code = "import cutlass, ptxemu\ntry:\n    ptxemu.setup('sm_90a')\nexcept ptxemu.EmulatorError as e:\n    print(e)"
    if (
        importlib.util.find_spec("cutlass") is None
    ):  # importing it here would keep the emulator from being set up in this process
        pytest.skip("the CuTe DSL is not installed")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "before the first import of cutlass" in done.stdout, done.stderr
