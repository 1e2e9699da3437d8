"""What results are kept with: versions, and the name of a device."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from deltafuse import __version__
from deltafuse.runtime.probe import environment, packages


def versions() -> dict[str, str | None]:
    """Versions of what decides a result; None where not installed. Nothing is imported for it."""
    installed = packages()
    return {
        "deltafuse": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fla": installed["fla"],
        "CuTe DSL": installed["dsl"],
        "triton": installed["triton"],
    }


def cpu_name() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    return cpu_name() if device.type == "cpu" else environment(device.type, device.index).name


def devices() -> list[torch.device]:
    """The devices of this machine."""
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
