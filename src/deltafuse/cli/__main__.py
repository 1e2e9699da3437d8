"""`python -m deltafuse.cli`, where the `deltafuse` script is not on the path."""

from __future__ import annotations

from . import main

main()
