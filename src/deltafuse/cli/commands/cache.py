"""`deltafuse cache`: the compiled kernels on disk."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from deltafuse.runtime import cache

from .common import output

app = typer.Typer(help="The compiled kernels on disk: DELTAFUSE_CACHE_DIR.", no_args_is_help=True)


def _folder() -> Path:
    path = cache.cache_path()
    if path is None:
        typer.echo("compiled kernels are not kept: DELTAFUSE_CACHE_DIR is empty, or there is no home folder", err=True)
        raise typer.Exit(1)
    return path


@app.command("path")
def path() -> None:
    """Print the folder that compiled kernels are kept in."""
    typer.echo(_folder())


@app.command("list")
def listing() -> None:
    """List the compiled kernels: what each is, and its size."""
    folder = _folder()
    table = Table("kernel", "architecture", "config", "DSL", "kB", title=str(folder), title_justify="left")
    total = 0
    for about, size in cache.listed(folder):
        config = ", ".join(f"{name}={value}" for name, value in about["config"].items() if name != "type")
        table.add_row(about["kernel"], about["arch"], escape(config), about["dsl"], f"{size / 1e3:.0f}")
        total += size
    console = output()
    console.print(table)
    console.print(f"{table.row_count} kernels, {total / 1e6:.1f} MB", style="dim")


@app.command("clear")
def clear() -> None:
    """Remove all compiled kernels from the folder."""
    folder = _folder()
    typer.echo(f"removed {cache.clear(folder)} kernels from {folder}")
