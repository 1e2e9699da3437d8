"""Timing ops over shapes and backends: what to run, how it is run, and the rows that come of it."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deltafuse
from deltafuse.backends import problem_of
from deltafuse.reference.chunk import DeltaTensors
from deltafuse.reference.options import DeltaOptions
from deltafuse.reference.recurrent import recurrent_forward

from . import counts
from .machine import device_name, versions
from .parse import dtype_name, parse_spec
from .specs import CONV_OPS, DELTA_OPS, DeltaSpec, Spec
from .timing import times

RECURRENT = "recurrent"
"""Beside the ops' backends: the delta rule token by token in torch, differentiated by autograd."""

BACKENDS = ("torch", RECURRENT, "fla", "cute")
FORWARD, BACKWARD = "forward", "forward+backward"

INFERENCE_ONLY = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule", "causal_conv1d_update")

_PACKED = ("1,8192,64,128,128:1300,547,2048,963,271,3063", "1,8192,64,128,128:" + ",".join(["1024"] * 8))
_GPU = {
    "chunk_kda": ("1,8192,64,128,128", "1,8192,96,128,128", *_PACKED, "1,32768,8,128,128", "2,8192,32,128,128"),
    "chunk_gated_delta_rule": ("2,8192,32,128,128",),
    "fused_recurrent_kda": ("1,1,32,128,128", "128,1,32,128,128"),
    "fused_recurrent_gated_delta_rule": ("1,1,32,128,128", "128,1,32,128,128"),
    "causal_conv1d": ("16,8192,2048,4",),
    "causal_conv1d_update": ("128,4096,4",),
    "fused_kda_gate": ("2,8192,32,128",),
}
_GPU_TRAINING = {"chunk_kda": ("2,8192,32,128,128", "16,8192,16,128,256", "1,32768,8,128,128")}
_CPU = {
    "chunk_kda": ("1,256,4,64,64", "1,1024,4,64,64"),
    "chunk_gated_delta_rule": ("1,1024,4,64,64",),
    "fused_recurrent_kda": ("8,1,4,64,64",),
    "fused_recurrent_gated_delta_rule": ("8,1,4,64,64",),
    "causal_conv1d": ("2,1024,512,4",),
    "causal_conv1d_update": ("8,1024,4",),
    "fused_kda_gate": ("2,1024,4,64",),
}


def default_shapes(op: str, phase: str, device: torch.device) -> tuple[str, ...]:
    """The shapes that this field measures, on a GPU; small ones on a CPU."""
    if device.type == "cpu":
        return _CPU[op]
    return _GPU_TRAINING.get(op, _GPU[op]) if phase == BACKWARD else _GPU[op]


def spec_of(op: str, shape: str, phase: str, gate: str | None = None) -> Spec:
    """The call that is timed: serving with states forward alone, training with both passes."""
    switches: dict[str, Any] = {}
    serving = phase == FORWARD
    if op in DELTA_OPS:
        bounded = op == "chunk_kda" and serving
        gate = gate or ("bounded" if bounded else "softplus")
        switches = {"l2norm": True, "beta_sigmoid": True, "decay": "remembering", "gate": gate}
        switches |= {"initial_state": serving, "final_state": serving, "v_first": serving}
        switches |= {"safe_gate": op == "chunk_kda" and gate == "bounded"}
    elif op in CONV_OPS:
        switches = {"activation": "silu"}
    elif gate is not None:
        switches = {"gate": gate}
    return parse_spec(op, shape, **switches)


@dataclass(frozen=True)
class Job:
    """One measurement to make."""

    spec: Spec
    phase: str
    dtype: torch.dtype
    device: torch.device
    backend: str

    @property
    def title(self) -> str:
        return f"{self.spec.op} {self.spec.shape} {self.phase} {self.backend}"


@dataclass(frozen=True)
class Row:
    """A measurement: the median in ms, and by it the counted bytes and operations; `note` says why there is none."""

    op: str
    shape: str
    dtype: str
    phase: str
    backend: str
    ms: float | None = None
    gb_per_second: float | None = None
    tflops: float | None = None
    reps: int = 0
    ratio: float | None = None
    note: str = ""

    @property
    def call(self) -> tuple[str, str, str, str]:
        """What rows of different backends are compared by."""
        return self.op, self.shape, self.dtype, self.phase


def _token_by_token(spec: Spec, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    if not isinstance(spec, DeltaSpec) or spec.slots or spec.key_gate:
        raise deltafuse.UnsupportedError(f"{RECURRENT!r} is the delta rule token by token; {spec.op} is not timed so")
    raw = spec.gate != "log"
    given = {name: arguments[name] for name in ("q", "k", "v", "g", "beta")}
    optional: dict[str, Any] = {
        name.lower(): arguments.get(name) for name in ("A_log", "dt_bias", "initial_state", "cu_seqlens")
    }
    options = DeltaOptions(
        scale=spec.scale or spec.key_dim**-0.5,
        gate=spec.gate,
        lower_bound=spec.lower_bound if raw else 0.0,
        l2norm=spec.l2norm,
        beta_sigmoid=spec.beta_sigmoid,
        beta_limit=2.0 if spec.neg_eigval else 1.0,
        state_v_first=spec.v_first,
    )
    o, state = recurrent_forward(DeltaTensors(**given, **optional), options)
    return (o, state) if spec.final_state else (o,)


def _call(job: Job, arguments: dict[str, Any]) -> Callable[[], tuple[Tensor, ...]]:
    """The op on its backend; its results that are tensors."""
    if job.backend == RECURRENT:
        return lambda: _token_by_token(job.spec, arguments)
    op = getattr(deltafuse, job.spec.op)

    def call() -> tuple[Tensor, ...]:
        returned = op(**arguments, backend=job.backend)
        returned = returned if isinstance(returned, tuple) else (returned,)
        return tuple(x for x in returned if x is not None)

    return call


def check(job: Job) -> None:
    """Raise what the op itself raises for the arguments of a job; nothing is computed."""
    with torch.inference_mode(job.phase == FORWARD):
        problem_of(job.spec.op, **job.spec.arguments(job.dtype, "meta"))


def measure(job: Job, reps: int, seed: int = 0) -> Row:
    """Time a job; a refusal by the backend and a lack of memory become the row's note."""
    row = Row(job.spec.op, job.spec.shape, dtype_name(job.dtype), job.phase, job.backend)
    warmup = 1 if job.device.type == "cpu" else 3
    arguments = job.spec.arguments(job.dtype, job.device, seed)
    try:
        if job.phase == FORWARD:
            with torch.inference_mode():
                call = _call(job, arguments)
                work = counts.forward(job.spec, arguments.values(), call())
                ms = statistics.median(times(call, job.device, reps, warmup))
        else:
            work, step = _training_step(job, arguments)
            ms = statistics.median(times(step, job.device, reps, warmup))
    except deltafuse.UnsupportedError as error:
        return replace(row, note=str(error))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return replace(row, note="out of memory")
    return replace(row, ms=ms, gb_per_second=work.gb_per_second(ms), tflops=work.tflops(ms), reps=reps)


def _training_step(job: Job, arguments: dict[str, Any]) -> tuple[counts.Counts, Callable[[], object]]:
    """Both passes as one call, and what they have to do."""
    leaves = []
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            arguments[name] = x.detach().requires_grad_()
            leaves.append(arguments[name])
    call = _call(job, arguments)
    results = call()
    weights = [torch.ones_like(x) for x in results]
    work = counts.forward(job.spec, arguments.values(), results)
    work += counts.backward(job.spec, arguments.values(), results, leaves)
    return work, lambda: torch.autograd.grad(call(), leaves, weights)


def with_ratios(rows: Sequence[Row], peer: str) -> list[Row]:
    """Each row with how many times as long the peer takes for the same call."""
    of_peer = {row.call: row.ms for row in rows if row.backend == peer}
    found = []
    for row in rows:
        base = of_peer.get(row.call)
        found.append(row if base is None or not row.ms else replace(row, ratio=base / row.ms))
    return found


def about_run(device: torch.device) -> dict[str, Any]:
    """What is kept beside a measurement: date, versions, machine."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        **{name.replace(" ", "_"): version or "" for name, version in versions().items()},
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else "",
    }


COLUMNS = (*about_run(torch.device("cpu")), "peer", *(field.name for field in fields(Row)))


def write_csv(path: Path, rows: Iterable[Row], device: torch.device, peer: str) -> None:
    """Append the rows, with the date, the versions and the machine."""
    about = about_run(device) | {"peer": peer}
    append_csv(path, [about | asdict(row) for row in rows])


def check_csv(path: Path, header: Sequence[str] = COLUMNS) -> None:
    """Raise a ValueError where a file has other columns."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open(newline="") as file:
        known = next(csv.reader(file), [])
    if known != list(header):
        raise ValueError(f"got {str(path)!r}, a file with other columns; allowed: a new file, or one with these rows")


def append_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a file of such rows, or start one."""
    check_csv(path, list(rows[0]))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, rows: Sequence[Row], device: torch.device) -> None:
    """Bars of the times, a group for every call, a colour for every backend, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.ms is not None]
    calls = list(dict.fromkeys(row.call for row in timed))
    backends = list(dict.fromkeys(row.backend for row in timed))
    height = 0.8 / max(len(backends), 1)
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(calls) * max(len(backends), 1)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, backend in enumerate(backends):
        own = {row.call: row.ms for row in timed if row.backend == backend}
        places = [y + (i - (len(backends) - 1) / 2) * height for y, call in enumerate(calls) if call in own]
        bars = axes.barh(places, [own[call] or 0.0 for call in calls if call in own], height, label=backend)
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=7)
    axes.set_yticks(range(len(calls)), [f"{op}\n{_short(shape)}, {phase}" for op, shape, _, phase in calls], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="ms (median)", xscale="log", title=f"{device_name(device)}, {timed[0].dtype if timed else ''}")
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.3)
    if timed:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _short(shape: str) -> str:
    sizes, colon, lengths = shape.partition(":")
    return f"{sizes} packed {lengths.count(',') + 1}" if colon else sizes
