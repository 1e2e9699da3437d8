"""What the commands share: errors of options, and the console."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import typer
from rich.console import Console


class Gate(str, Enum):
    """What g is, on the command line."""

    log = "log"
    softplus = "softplus"
    bounded = "bounded"


@contextmanager
def option(name: str) -> Iterator[None]:
    """A ValueError inside, or an argument that an op does not have, is the fault of what was given to this option."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=f"'{name}'") from None


def output() -> Console:
    """Where results go. Wide enough for a table's columns where the output is a file or a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 140
    return console


def progress_output() -> Console:
    """Where progress bars go."""
    return Console(stderr=True)
