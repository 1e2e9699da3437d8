"""`deltafuse bench`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from deltafuse import OPS
from deltafuse.runtime.probe import packages

from ..bench import (
    BACKENDS,
    BACKWARD,
    FORWARD,
    INFERENCE_ONLY,
    RECURRENT,
    Job,
    Row,
    check,
    check_csv,
    default_shapes,
    measure,
    plot,
    spec_of,
    with_ratios,
    write_csv,
)
from ..machine import device_name
from ..parse import parse_device, parse_dtype, parse_list, parse_op
from ..specs import DELTA_OPS
from .common import Gate, option, output, progress_output

REPS_CPU, REPS_GPU = 3, 20


def bench(
    op: Annotated[
        list[str] | None, typer.Option(help="May be repeated. [default: all; chunk_kda with --shapes]")
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="B,T,H,K,V[,HV][:length,length,...]; B,T,D,W of a convolution, N,D,W of its update, B,T,HV,K of "
            "the gate. May be repeated, or separated by ';'."
        ),
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {', '.join(BACKENDS)}; {RECURRENT} is token by token in torch. "
            f"[default: torch,{RECURRENT}; on a GPU cute,fla,torch]"
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, fp64. [default: fp32; on a GPU bf16]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. [default: the first GPU, else cpu]")] = None,
    peer: Annotated[
        str | None, typer.Option(help="The backend to compare with. [default: fla or the last one]")
    ] = None,
    backward: Annotated[
        bool | None,
        typer.Option(
            "--backward/--forward",
            help="Both passes as in training, or the forward pass as in serving. [default: one after the other]",
        ),
    ] = None,
    gate: Annotated[Gate | None, typer.Option(help="Of KDA and GDN. [default: softplus; KDA forward: bounded]")] = None,
    reps: Annotated[
        int | None, typer.Option(min=1, help=f"Calls to time. [default: {REPS_CPU}; on a GPU {REPS_GPU}]")
    ] = None,
    csv: Annotated[Path | None, typer.Option(dir_okay=False, help="Append the rows to this file.")] = None,
    png: Annotated[Path | None, typer.Option(dir_okay=False, help="Plot the times into this file.")] = None,
) -> None:
    """Times of ops by shape and backend, with the bytes and operations that they need.

    The ratio says how many times as long the peer takes. GB/s and TFLOP/s count what a call has to move and to
    multiply, which is the same for every backend.
    """
    with option("--device"):
        place = parse_device(device)
    on_cpu = place.type == "cpu"
    with option("--dtype"):
        torch_dtype = parse_dtype(dtype or ("fp32" if on_cpu else "bf16"))
    with option("--op"):
        ops = [parse_op(name) for name in parse_list(op or [])]
    given = parse_list(shapes or [], ";")
    names = _backends(backends, on_cpu)
    _check_files(csv, png)
    peer = peer or ("fla" if "fla" in names and packages()["fla"] and not on_cpu else names[-1])
    if peer not in names:
        allowed = f"{', '.join(names)} (the backends that are timed)"
        raise typer.BadParameter(f"got {peer!r}; allowed: {allowed}", param_hint="'--peer'")
    jobs = []
    for name in ops or (["chunk_kda"] if given else OPS):
        phases = [BACKWARD if backward else FORWARD] if backward is not None else [FORWARD, BACKWARD]
        for phase in phases:
            if phase == BACKWARD and name in INFERENCE_ONLY:
                if backward and name in ops:
                    raise typer.BadParameter(f"{name} is timed forward alone", param_hint="'--backward'")
                continue
            for shape in given or default_shapes(name, phase, place):
                with option("--shapes"):
                    spec = spec_of(name, shape, phase, gate.value if gate else None)
                own = [Job(spec, phase, torch_dtype, place, backend) for backend in names]
                with option("--op, --shapes, --gate"):
                    check(own[0])
                # By default only what there is to compare; a backend that was asked for says why it cannot.
                jobs += [job for job in own if backends or name in DELTA_OPS or job.backend != RECURRENT]

    rows = []
    columns = (
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=progress_output(), transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for job in jobs:
            progress.update(task, description=job.title)
            rows.append(measure(job, reps or (REPS_CPU if on_cpu else REPS_GPU)))
            progress.advance(task)
    rows = with_ratios(rows, peer)
    _report(rows, place, peer)
    if csv is not None:
        write_csv(csv, rows, place, peer)
        typer.echo(f"rows: {csv}", err=True)
    if png is not None:
        plot(png, rows, place)
        typer.echo(f"plot: {png}", err=True)
    if not any(row.ms for row in rows):
        raise typer.Exit(1)


def _backends(text: str | None, on_cpu: bool) -> list[str]:
    if text is None:
        return ["torch", RECURRENT] if on_cpu else ["cute", "fla", "torch"]
    names = list(dict.fromkeys(parse_list([text])))
    for name in names:
        if name not in BACKENDS:
            raise typer.BadParameter(f"got {name!r}; allowed: {', '.join(BACKENDS)}", param_hint="'--backends'")
    if not names:
        raise typer.BadParameter(f"got {text!r}; allowed: {', '.join(BACKENDS)}", param_hint="'--backends'")
    return names


def _check_files(csv: Path | None, png: Path | None) -> None:
    """Before minutes are spent: whether the results can be written."""
    if csv is not None:
        with option("--csv"):
            check_csv(csv)
    if png is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install 'deltafuse[cli]'", param_hint="'--png'")


def _report(rows: Sequence[Row], device: torch.device, peer: str) -> None:
    console = output()
    title = f"{device_name(device)}, {rows[0].dtype}"
    table = Table("op", "shape", "pass", "backend", title=title, title_justify="left")
    for heading in ("ms", "GB/s", "TFLOP/s", f"{peer} / this"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if before is not None and before[0] != row.op:
            table.add_section()
        call = (row.op, row.shape, row.phase) if row.call != before else ("", "", "")
        numbers = (row.ms, row.gb_per_second, row.tflops or None, row.ratio)
        table.add_row(*call, row.backend, *("-" if x is None else f"{x:.4g}" for x in numbers))
        before = row.call
    console.print(table)
    for note in dict.fromkeys(f"{row.op}, {row.backend}: {row.note}" for row in rows if row.note):
        console.print(f"[yellow]not timed[/yellow] {escape(note)}")
