"""`deltafuse explain`."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from deltafuse.backends import explain_problem, problem_of

from ..parse import AXES, MACHINES, parse_dtype, parse_machine, parse_op, parse_spec
from ..specs import CONV_OPS, DELTA_OPS, given
from .common import Gate, option, output

_FORMS = "; ".join(f"{form} for {op}" for op, form in AXES.items() if op not in DELTA_OPS)
_SWITCHES = "Switches of the call"


def _flag(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel=_SWITCHES)


def explain(
    op: Annotated[str, typer.Argument(help=f"One of {', '.join(AXES)}.")],
    shape: Annotated[str, typer.Option(help=f"B,T,H,K,V; {_FORMS}.")],
    hv: Annotated[int | None, typer.Option(help="Number of value heads, H if not given.", min=1)] = None,
    packed: Annotated[str | None, typer.Option(help="Lengths of packed sequences (1300,547); their sum is T.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp64.")] = "bf16",
    device: Annotated[
        str | None,
        typer.Option(help=f"One of this machine, or of {', '.join(MACHINES)}. [default: the first GPU, else cpu]"),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="auto, cute, fla, torch. [default: DELTAFUSE_BACKEND]")] = None,
    fla: Annotated[bool | None, typer.Option("--fla/--no-fla", help="Whether fla is there. [default: as here]")] = None,
    dsl: Annotated[
        bool | None, typer.Option("--dsl/--no-dsl", help="Whether the CuTe DSL is there. [default: as here]")
    ] = None,
    gate: Annotated[Gate | None, _flag("log: g is the decay's logarithm. softplus, bounded: g is raw.")] = None,
    lower_bound: Annotated[float | None, _flag("Of the bounded gate. [default: -5]")] = None,
    safe_gate: Annotated[bool, _flag("safe_gate")] = False,
    l2norm: Annotated[bool, _flag("use_qk_l2norm_in_kernel")] = False,
    beta_sigmoid: Annotated[bool, _flag("use_beta_sigmoid_in_kernel")] = False,
    neg_eigval: Annotated[bool, _flag("allow_neg_eigval")] = False,
    initial_state: Annotated[bool, _flag("With an initial state.")] = False,
    final_state: Annotated[bool, _flag("output_final_state")] = False,
    intermediate: Annotated[bool, _flag("return_intermediate_states")] = False,
    v_first: Annotated[bool, _flag("state_v_first")] = False,
    chunk_size: Annotated[int | None, _flag("chunk_size")] = None,
    slots: Annotated[bool, _flag("States in a pool, updated in place (fused_recurrent_kda).")] = False,
    activation: Annotated[str | None, _flag("silu or swish (convolutions).")] = None,
    bias: Annotated[bool, _flag("With a bias (convolutions).")] = False,
    residual: Annotated[bool, _flag("With a residual (convolutions).")] = False,
    backward: Annotated[bool, _flag("Gradients are wanted.")] = False,
) -> None:
    """Which backend takes a call on a machine, and why the others do not. Nothing is computed.

    Exits with 1 where no backend takes the call, or the op refuses its arguments.
    """
    with option("OP"):
        parse_op(op)
    switches: dict[str, Any] = {
        "gate": gate.value if gate else None, "safe_gate": safe_gate, "l2norm": l2norm, "beta_sigmoid": beta_sigmoid,
        "neg_eigval": neg_eigval, "initial_state": initial_state, "final_state": final_state,
        "intermediate": intermediate, "v_first": v_first, "chunk_size": chunk_size,
        "slots": "sequence" if slots else None, "activation": activation, "bias": bias, "residual": residual,
    }  # fmt: skip
    switches = _applying(op, {name: value for name, value in switches.items() if given(value)})
    if lower_bound is not None:
        if gate is not Gate.bounded:
            raise typer.BadParameter("goes with --gate bounded", param_hint="'--lower-bound'")
        switches["lower_bound"] = lower_bound
    with option("--shape" if packed is None else "--shape, --packed"):
        spec = parse_spec(op, shape, hv, packed, **switches)
    with option("--dtype"):
        torch_dtype = parse_dtype(dtype)
    with option("--device"):
        machine = parse_machine(device, fla, dsl)
    try:
        arguments = spec.arguments(torch_dtype, "meta")
        if backward:
            for x in arguments.values():
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    x.requires_grad_()
        with torch.set_grad_enabled(backward), torch.inference_mode(not backward):
            problem, _ = problem_of(op, **arguments)
        explanation = explain_problem(problem, machine, backend)
    except (TypeError, ValueError) as error:
        typer.echo(f"{op}: {error}", err=True)
        raise typer.Exit(1) from None

    console = output()
    verdict = explanation.chosen or "no backend takes it"
    asked = f"{spec.shape} {dtype} on {escape(explanation.device)}, backend {explanation.requested!r}"
    console.print(f"[bold]{op}[/bold] {asked}: [bold]{verdict}[/bold]")
    table = Table("", "backend", "takes it", "reason")
    for v in explanation.verdicts:
        answer = "[green]yes[/green]" if v.supported else "[red]no[/red]"
        table.add_row("->" if v.backend == explanation.chosen else "", v.backend, answer, escape(v.reason))
    console.print(table)
    if explanation.chosen is None:
        raise typer.Exit(1)


_CONV = {"activation", "bias", "residual", "initial_state", "final_state"}


def _applying(op: str, switches: dict[str, Any]) -> dict[str, Any]:
    """The switches, all of which the op must have as arguments of its kind; the op itself judges the rest."""
    known = set(switches) - {"activation", "bias", "residual"}
    if op in CONV_OPS:
        known = _CONV
    elif op not in DELTA_OPS:
        known = {"gate"}
    foreign = [name for name in switches if name not in known]
    if foreign:
        name = "--" + foreign[0].replace("_", "-")
        raise typer.BadParameter(f"{op} has no such argument", param_hint=f"'{name}'")
    return switches
