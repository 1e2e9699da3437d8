"""One thread a test process, and hypothesis without deadlines; the same examples every time where `CI` is set."""

from __future__ import annotations

import os

import hypothesis
import torch

hypothesis.settings.register_profile("local", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure() -> None:
    torch.set_num_threads(1)
