"""Functions whose results torch.compile takes as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, without the second that importing torch.compile's machinery takes.

    The mark is all that torch's decorator leaves on a function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
