"""Launches of the emulated tests are compared with what hardware gave, or written down to be run on it: see `conformance`."""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import conformance
import pytest

from ptxemu import launch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance-corpus", help="write every launch without fault to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--conformance-corpus") and config.getoption("dist", "no") != "no":
        raise pytest.UsageError(
            "--conformance-corpus: every worker would write its own file over the others'; allowed: -n 0"
        )


def _bytes(tensors: list[Any]) -> list[bytes]:
    import torch

    return [bytes(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for t in tensors]


class Conformance:
    """Observes launches; `checked` counts those that hardware has run."""

    def __init__(self, corpus: str | None) -> None:
        self.corpus = corpus
        self.known = {} if corpus else conformance.known()
        self.recorded: dict[str, conformance.Recorded] = {}
        self.checked = 0

    def __call__(self, call: launch.PtxCall) -> Callable[[], None]:
        varies = any(name in call.text for name in ("%clock", "%globaltimer", "%smid", "%warpid", "// emulator only"))
        varies = varies or re.search(r"\b(tex|tld4|txq|suld|sust|sured|suq)\.", call.text) is not None
        if "sm_90" not in call.text or varies or not all(t.is_contiguous() for t in call.tensors):
            return lambda: None
        pointers = [t.data_ptr() for t in call.tensors]
        before = _bytes(call.tensors)

        def after() -> None:
            r = conformance.Recorded(
                call.text, call.name, call.grid, call.block, call.cluster, call.shared, call.args, pointers, before,
                _bytes(call.tensors),
            )  # fmt: skip
            if self.corpus:
                self.recorded.setdefault(r.key, r)
            elif r.key in self.known:
                self.compare(r, self.known[r.key])

        return after

    def compare(self, r: conformance.Recorded, hardware: dict[str, Any]) -> None:
        self.checked += 1
        wrong = conformance.compare(r, hardware)
        assert not wrong, f"{r.name}: {wrong}"


@pytest.fixture(scope="session", autouse=True)
def _conformance(request: pytest.FixtureRequest) -> Iterator[Conformance]:
    observer = Conformance(request.config.getoption("--conformance-corpus"))
    launch.observers.append(observer)
    yield observer
    launch.observers.remove(observer)
    if observer.corpus:
        Path(observer.corpus).write_bytes(zlib.compress(pickle.dumps(list(observer.recorded.values())), 9))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The score of the mutations: a line a kernel, and one for each mutation with -v or where it was missed."""
    scores: dict[str, list[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", []):
                if name == "mutation" and report.when == "call":
                    scores.setdefault(value[0], []).append(value[1])
    for kernel, lines in sorted(scores.items()):
        caught = sum(x.startswith("caught") for x in lines)
        terminalreporter.section(f"{kernel}: {caught} of {len(lines)} mutations caught")
        for line in lines:
            if terminalreporter.verbosity > 0 or not line.startswith("caught"):
                terminalreporter.write_line("  " + line)


@pytest.fixture
def nan_in_new_tensors() -> Iterator[None]:
    """What a kernel does not write is NaN."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
