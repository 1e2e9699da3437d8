"""What this machine has: asked once, by looking packages up, never by importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from .constant import constant


@dataclass(frozen=True)
class Environment:
    """A device and the packages beside it: all that `support` decides by, so that any machine can be described in a test.

    `capability` is CUDA's compute capability, `(9, 0)` for Hopper, `sms` its number of multiprocessors; `fla`, `dsl` and
    `triton` are versions, None where not installed.
    """

    device: str
    capability: tuple[int, int] | None = None
    name: str = ""
    fla: str | None = None
    dsl: str | None = None
    triton: str | None = None
    sms: int = 0

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def __hash__(self) -> int:  # asked for at every call
        return self._hash

    @cached_property
    def arch(self) -> str | None:
        """What kernels are compiled for here, with all of the architecture's own instructions: "sm_90a"."""
        if self.capability is None:
            return None
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    @property
    def title(self) -> str:
        if self.capability is None:
            return self.name or self.device
        return f"{self.name or self.device} (sm_{self.capability[0]}{self.capability[1]})"


def _version(module: str, *distributions: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@cache
def packages() -> dict[str, Any]:
    """Versions of fla, the CuTe DSL and Triton, None where not installed."""
    return {
        "fla": _version("fla", "fla-core", "flash-linear-attention"),
        "dsl": _version("cutlass", "nvidia-cutlass-dsl"),
        "triton": _version("triton", "triton", "pytorch-triton"),
    }


@cache
def _environment(kind: str, index: int | None) -> Environment:
    if kind == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        return Environment(kind, capability, properties.name, **packages(), sms=properties.multi_processor_count)
    return Environment(kind, None, "CPU" if kind == "cpu" else kind, **packages())


@constant
def environment(kind: str, index: int | None) -> Environment:
    """The environment of a torch device, given as its type and index; asked once, a constant to torch.compile."""
    return _environment(kind, index)
