"""What the README and the documentation show is so.

Python blocks run and print what the text block after them says; `deltafuse` commands have the options that they use.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from deltafuse.cli.app import app
from deltafuse.reference.options import CHUNKS_A_WINDOW

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(path: Path) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def _with(language: str) -> list[Path]:
    return [path for path in PAGES if any(found == language for found, _ in _blocks(path))]


@pytest.mark.parametrize("page", _with("python"), ids=lambda page: page.name)
def test_examples_run(page: Path) -> None:
    names: dict[str, Any] = {}
    printed = ""
    for language, text in _blocks(page):
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(text, str(page), "exec"), names)
            printed = output.getvalue()
        elif language == "text" and printed:
            assert text == printed
            printed = ""
    assert not printed, "no text block shows what the last example prints"


COMMANDS = [
    line
    for page in _with("sh")
    for language, text in _blocks(page)
    for line in text.splitlines()
    if language == "sh" and line.startswith("deltafuse ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments)


def test_readme_and_commands_are_covered() -> None:
    assert ROOT / "README.md" in _with("python")
    commands = {line.split()[1] for line in COMMANDS}
    assert commands >= {"explain", "verify", "bench", "demo"}


def test_readme_names_the_two_commands() -> None:
    shown = "".join(text for language, text in _blocks(ROOT / "README.md") if language == "sh")
    assert "make demo" in shown
    assert "make test" in shown


def test_maths_page_names_the_window() -> None:
    assert f"windows of {CHUNKS_A_WINDOW} chunks" in (ROOT / "docs" / "maths.md").read_text(encoding="utf-8")
