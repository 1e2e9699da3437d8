"""`import deltafuse` is quick and loads none of the packages that only some backends and the command line need."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = 5
SECONDS_BEYOND_TORCH = 0.2
OPTIONAL = ["cutlass", "cuda", "tvm_ffi", "triton", "fla", "typer", "rich", "matplotlib"]

# Processor time, since the machine may be busy with other tests; torch is loaded before the clock starts.
PROBE = """
import importlib, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
importlib.import_module(sys.argv[1])
print(time.process_time() - start)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def _probe(module: str, *path: Path) -> tuple[float, set[str]]:
    """Seconds that importing `module` takes beyond torch, and the packages that it loads; `path` is searched first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", PROBE, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, loaded = done.stdout.splitlines()
    return float(seconds), set(loaded.split())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an empty package of every optional name, so that each could be loaded on this machine."""
    folder = tmp_path_factory.mktemp("packages")
    for name in OPTIONAL:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    return folder


def test_import_loads_no_optional_package(installed: Path) -> None:
    _, loaded = _probe("deltafuse", installed)
    assert "deltafuse" in loaded
    assert loaded.isdisjoint(OPTIONAL)


def test_import_is_quick() -> None:
    times = [_probe("deltafuse")[0] for _ in range(RUNS)]
    assert statistics.median(times) < SECONDS_BEYOND_TORCH, times


def test_probe_sees_a_greedy_package(installed: Path, tmp_path: Path) -> None:
    lines = ["try:", "    import fla", "except ImportError:", "    pass", f"for _ in range({10**7}):", "    pass"]
    (tmp_path / "greedy.py").write_text("\n".join(lines))
    seconds, loaded = _probe("greedy", tmp_path, installed)
    assert "fla" in loaded
    assert seconds > 0.02
