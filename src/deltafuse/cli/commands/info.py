"""`deltafuse info`."""

from __future__ import annotations

import torch
from rich.table import Table

import deltafuse
from deltafuse.backends import explain_problem, problem_of
from deltafuse.runtime.probe import environment

from ..bench import FORWARD, spec_of
from ..machine import device_name, devices, versions
from .common import output

_SHAPES = {"causal_conv1d": "1,4096,2048,4", "causal_conv1d_update": "8,2048,4", "fused_kda_gate": "1,4096,32,128"}


def info() -> None:
    """Versions, devices, and the backend that each op gets on each device."""
    console = output()
    packages = Table("package", "version", title="versions", title_justify="left")
    for name, version in versions().items():
        packages.add_row(name, version or "[dim]not installed[/dim]")
    console.print(packages)

    here = devices()
    machines = Table("device", "name", "details", title="devices", title_justify="left")
    for device in here:
        machines.add_row(str(device), device_name(device), _details(device))
    console.print(machines)

    requested = deltafuse.get_backend()
    chosen = Table("op", *map(str, here), title=f"backend of each op, {requested!r} asked for", title_justify="left")
    for op in deltafuse.OPS:
        spec = spec_of(op, _SHAPES.get(op, "1,4096,32,128,128"), FORWARD)
        with torch.inference_mode():
            problem, _ = problem_of(op, **spec.arguments(torch.bfloat16, "meta"))
        answers = [explain_problem(problem, environment(device.type, device.index)).chosen for device in here]
        chosen.add_row(op, *(answer or "[red]none[/red]" for answer in answers))
    console.print(chosen)
    console.print("bfloat16, K = V = 128; `deltafuse explain` answers for other calls and machines.", style="dim")


def _details(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{threads} thread{'s' if threads > 1 else ''}"
    properties = torch.cuda.get_device_properties(device)
    return f"sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
