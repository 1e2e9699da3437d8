"""A pytest fixture: a test's launches run in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from . import Launched, emulate


@pytest.fixture
def emulated() -> Iterator[Callable[..., list[Launched]]]:
    """`emulated("sm_90a", seed=1)`: from there to the test's end, launches run in the emulator; returns the list of them as it grows.

    The arguments are those of `ptxemu.emulate`.
    """
    with ExitStack() as stack:

        def start(arch: str, **options: Any) -> list[Launched]:
            return stack.enter_context(emulate(arch, **options))

        yield start
