"""`deltafuse verify`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deltafuse.backends import CHOICES

from ..cases import full_cases, quick_cases
from ..machine import device_name
from ..parse import dtype_name, parse_device, parse_dtype, parse_list, parse_op
from ..verify import BASE, Error, Outcome, run
from .common import option, output, progress_output

DTYPES = ("float64", "float32", "bfloat16")


def verify(
    full: Annotated[bool, typer.Option("--full/--quick", help="Many combinations, or a covering few.")] = False,
    op: Annotated[list[str] | None, typer.Option(help="Ops to verify, all if not given; may be repeated.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. [default: the first GPU, else cpu]")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="May be repeated. [default: fp64,fp32,bf16]")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, cute, fla, torch. [default: DELTAFUSE_BACKEND]")] = None,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    each: Annotated[bool, typer.Option("--each", help="Also a line for every case.")] = False,
) -> None:
    """Every op against its float64 definition: results and gradients.

    Errors are RMS(out - ref) / RMS(ref), the worst of all cases. Exits with 1 if one is above its tolerance or not a
    number, if an op fails, or if nothing could be run.
    """
    with option("--op"):
        ops = [parse_op(name) for name in parse_list(op or [])]
    with option("--device"):
        place = parse_device(device)
    with option("--dtype"):
        dtypes = [parse_dtype(name) for name in parse_list(dtype or DTYPES)]
    if backend is not None and backend not in CHOICES:
        raise typer.BadParameter(f"got {backend!r}; allowed: {', '.join(CHOICES)}", param_hint="'--backend'")
    cases = [case for case in (full_cases() if full else quick_cases()) if not ops or case.spec.op in ops]

    started = time.monotonic()
    outcomes = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=progress_output(), transient=True) as progress:
        task = progress.add_task("", total=len(cases) * len(dtypes))
        for case in cases:
            progress.update(task, description=f"{case.spec.op}: {case.name}")
            for each_dtype in dtypes:
                outcomes.append(run(case, each_dtype, place, backend, seed))
                progress.advance(task)
    _report(outcomes, dtypes, place, each, time.monotonic() - started)
    if not all(o.passed or o.refused for o in outcomes) or not any(o.passed for o in outcomes):
        raise typer.Exit(1)


def _number(error: Error) -> str:
    colour = "green" if error.passed else "bold red"
    return f"[{colour}]{error.value:.1e}[/{colour}] / {error.allowed:.0e}"


def _worst(errors: Sequence[Error]) -> Error:
    """A NaN is worse than anything."""
    return max(errors, key=lambda e: (e.value != e.value, e.value / e.allowed))


def _table(outcomes: Sequence[Outcome], dtypes: Sequence[torch.dtype]) -> Table:
    """The worst error of every tensor of every op, by dtype."""
    names = map(dtype_name, dtypes)
    table = Table("op", "backend", "tensor", *names, title="worst error / tolerance", title_justify="left")
    for name in dict.fromkeys(o.case.spec.op for o in outcomes):
        own = [o for o in outcomes if o.case.spec.op == name and o.errors]
        backends = ", ".join(dict.fromkeys(o.backend for o in own))
        first = True
        for tensor in sorted({e.tensor for o in own for e in o.errors}, key=list(BASE).index):
            cells = []
            for dtype in dtypes:
                found = [e for o in own if o.dtype == dtype for e in o.errors if e.tensor == tensor]
                cells.append(_number(_worst(found)) if found else "[dim]not run[/dim]")
            table.add_row(name if first else "", backends if first else "", tensor, *cells)
            first = False
        table.add_section()
    return table


def _report(
    outcomes: Sequence[Outcome], dtypes: Sequence[torch.dtype], device: torch.device, each: bool, seconds: float
) -> None:
    console = output()
    if any(o.errors for o in outcomes):
        console.print(_table(outcomes, dtypes))
    for o in outcomes if each else ():
        worst = escape(o.refused or o.broken or "")
        if o.errors:
            error = _worst(o.errors)
            worst = f"{error.tensor} {_number(error)}"
        console.print(f"{o.case.spec.op}: {escape(o.case.name)}, {dtype_name(o.dtype)}: {worst}")
    for o in outcomes:
        where = f"{o.case.spec.op}: {escape(o.case.name)}, {dtype_name(o.dtype)}, backend {o.backend}"
        if o.broken:
            console.print(f"[bold red]failed[/bold red] {where}: {escape(o.broken)}")
        for error in o.errors:
            if not error.passed:
                console.print(f"[bold red]failed[/bold red] {where}: {error.tensor} {_number(error)}")
    refusals = dict.fromkeys((o.case.spec.op, o.refused) for o in outcomes if o.refused)
    for _, reason in refusals:
        console.print(f"[yellow]not run[/yellow] {escape(reason or '')}")
    passed = sum(o.passed for o in outcomes)
    refused = sum(o.refused is not None for o in outcomes)
    failed = len(outcomes) - passed - refused
    console.print(
        f"{passed} passed, [{'bold red' if failed else 'default'}]{failed} failed[/], {refused} not run, "
        f"in {seconds:.0f} s on {escape(device_name(device))}"
    )
