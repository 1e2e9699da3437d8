"""The tests for a GPU are all found where there is one: no machine of continuous integration would notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "gpu"
COLLECT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: {capability}
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "{folder}"]))
"""


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)], ids=str)
def test_collection(capability: tuple[int, int]) -> None:
    code = COLLECT.format(capability=capability, folder=FOLDER.as_posix())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for file in FOLDER.glob("test_*.py"):
        # Without fla one file skips itself, by name.
        assert f"gpu/{file.name}::" in done.stdout or "fla" in file.name, file.name
