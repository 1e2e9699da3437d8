"""The package's logger, and lines that are said once."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

logger = logging.getLogger("deltafuse")


@lru_cache(maxsize=None)
def _log(level: int, message: str, *args: str) -> None:
    logger.log(level, message, *args)


@torch.compiler.assume_constant_result
def log_once(level: int, message: str, *args: str) -> None:
    """Log a message the first time that a process comes by it; under torch.compile, at tracing time."""
    _log(level, message, *args)
