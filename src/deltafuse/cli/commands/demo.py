"""`deltafuse demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..parse import parse_device
from .common import option, output


def demo(
    seconds: Annotated[float | None, typer.Option(help="Training time. [default: 90]")] = None,
    steps: Annotated[int | None, typer.Option(help="Train so many steps instead: the same result every time.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the plot and the text. [default: demo]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, batches and sampling. [default: 0]")] = None,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    prompt: Annotated[str | None, typer.Option(help="What the generated text starts with.")] = None,
    generate: Annotated[int | None, typer.Option(help="Bytes to generate. [default: 400]")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampling, 0 for greedy. [default: 0.7]")] = None,
    small: Annotated[bool, typer.Option("--small", help="A smaller model and 15 s.")] = False,
) -> None:
    """Train a small language model on Python's own documentation and generate text from it.

    Exits with 1 if it does not beat a bigram model, or if generation token by token differs from one pass.
    """
    from deltafuse.demo import Settings, run

    with option("--device"):
        parse_device(device)
    options: dict[str, Any] = {
        "seconds": seconds, "steps": steps, "out": out, "seed": seed, "device": device, "prompt": prompt,
        "generate": generate, "temperature": temperature,
    }  # fmt: skip
    build = Settings.small if small else Settings
    try:
        settings = build(**{name: value for name, value in options.items() if value is not None})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(run(settings, output()))
