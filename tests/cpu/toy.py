"""The kernel of `toys/` beside the package's own, and processes that load it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "toys"

needs_dsl = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the CuTe DSL, a part of the test extra, is for Linux"
)


@dataclass(frozen=True)
class ScaleConfig:
    dtype: str = "float32"
    factor: float = 2.0


def install(*folders: Path) -> None:
    """Have the modules of these folders (the toys, if none are given) found as kernels of the package, in this process."""
    package = importlib.import_module("deltafuse.kernels")
    package.__path__ = [*package.__path__[:1], *map(str, folders or [TOYS])]


def uninstall() -> None:
    """Take them back."""
    package = importlib.import_module("deltafuse.kernels")
    package.__path__ = package.__path__[:1]


PREAMBLE = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import toy
from deltafuse.runtime import cache
toy.install()
"""


def start(code: str, cache_dir: Path | str, **environment: str) -> subprocess.Popen[str]:
    """A process that runs `code` with the toys installed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_DSL_", "DELTAFUSE_"))}
    variables |= {"DELTAFUSE_CACHE_DIR": str(cache_dir), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-c", PREAMBLE + code]
    return subprocess.Popen(command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> str:
    """What a process printed, which must have gone well."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip()


def run(code: str, cache_dir: Path | str, **environment: str) -> str:
    return finish(start(code, cache_dir, **environment))
