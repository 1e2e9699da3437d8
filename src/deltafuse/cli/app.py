"""The typer application: every command with its options."""

from __future__ import annotations

from typing import Annotated

import typer

from deltafuse import get_backend

from .commands import bench, cache, demo, explain, info, verify
from .machine import versions

app = typer.Typer(
    name="deltafuse",
    help="Delta-rule linear attention for PyTorch: what runs where, whether it is right, how fast it is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltafuse {versions()['deltafuse']}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What every command shares."""
    try:
        get_backend()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="the environment") from None


app.command("info")(info.info)
app.command("explain")(explain.explain)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)
app.add_typer(cache.app, name="cache")
