"""What tests of this package's own kernels share: a case's judgement, and memory that nobody has written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deltafuse.cli.cases import Case
from deltafuse.cli.verify import run


def check(case: Case, dtype: torch.dtype) -> None:
    """The case is taken, runs, and every error is allowed."""
    outcome = run(case, dtype, torch.device("cuda"), "cute")
    assert outcome.refused is None, outcome.refused
    assert outcome.broken is None, outcome.broken
    failed = [f"{e.tensor}: {e.value:.2e} > {e.allowed:.1e}" for e in outcome.errors if not e.passed]
    assert outcome.errors
    assert not failed


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch hands out holds NaN: the allocator would give a repeated call blocks with the right values in them."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
