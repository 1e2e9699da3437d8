"""The package's logger, and lines that are said once."""

from __future__ import annotations

import logging
from functools import cache

from .constant import constant

logger = logging.getLogger("deltafuse")


@cache
def _log(level: int, message: str, *args: str) -> None:
    logger.log(level, message, *args)


@constant
def log_once(level: int, message: str, *args: str) -> None:
    """Log a message the first time that a process comes by it; under torch.compile, at tracing time."""
    _log(level, message, *args)
