"""The `deltafuse` command.

Nothing here is loaded by `import deltafuse`. typer and rich are loaded by `main` alone: the modules that do not print
can be used without them.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `deltafuse` command."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        sys.exit(f"deltafuse: the command line needs {package}: pip install 'deltafuse[cli]'")
    app()
