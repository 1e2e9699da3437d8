"""A kernel that came from disk computes: its object, loaded through TVM-FFI alone, launches in the emulator."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ptxemu
from deltafuse.runtime import build, cache
from ptxemu import dsl

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
import toy


class Loaded:
    """A loaded function as the emulator takes compiled ones; the PTX is found by the kernel's name."""

    artifacts = SimpleNamespace(PTX=None)

    def __init__(self, function: Any) -> None:
        self._tvm_ffi_function = function

    def __call__(self, *args: Any) -> None:
        self._tvm_ffi_function(*args)


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads a toy from disk, a compilation before."""
    ptxemu.setup("sm_90a")
    ctypes.CDLL(str(dsl.shim()), ctypes.RTLD_GLOBAL)  # its CUDA calls go before those of the DSL's runtime library
    monkeypatch.setenv("DELTAFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("DELTAFUSE_AOT_DIR", raising=False)
    toy.install()

    def load(config: toy.ScaleConfig) -> Loaded:
        path = cache.write_object("scale", config, "sm_90a", tmp_path)
        function, preload = build.open_object(path)
        assert preload() is None
        return Loaded(function)

    yield load
    toy.uninstall()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_object_computes(loaded: Any, dtype: torch.dtype) -> None:
    function = loaded(toy.ScaleConfig(str(dtype).removeprefix("torch."), 3.0))
    for n in (1, 200):
        x, y = torch.arange(n).to(dtype), torch.full((n,), torch.nan, dtype=dtype)
        (launched,) = ptxemu.run(function, x, y, 0.5)
        assert launched.grid == (-(-n // 128), 1, 1)
        torch.testing.assert_close(y, (x.float() * 3 + 0.5).to(dtype), rtol=0, atol=0)
