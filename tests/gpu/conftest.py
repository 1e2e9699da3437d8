"""fla's launch settings on a GPU."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def _without_autotuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla tries dozens of launch settings for every new shape, minutes of compilation; any of them computes the same."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda *args, **kwargs: prune(*args, **kwargs)[:1])
