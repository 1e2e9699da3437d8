"""The C core: compiled by gcc at first use, kept by its sources' hash."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from .errors import EmulatorError

SOURCES = Path(__file__).parent / "core"
FLAGS = ("-O2", "-ftree-vectorize", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-std=gnu11", "-pthread")


def cache_dir() -> Path:
    """Where compiled parts are kept: `PTXEMU_CACHE_DIR`, else `ptxemu` in the user's cache folder."""
    chosen = os.environ.get("PTXEMU_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptxemu"


def compile_c(name: str, sources: list[Path], headers: Sequence[Path] = (), flags: tuple[str, ...] = FLAGS) -> Path:
    """A shared library of these sources, compiled unless the cache has it. Raises EmulatorError without gcc."""
    digest = hashlib.sha256()
    for path in [*sources, *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(" ".join(flags).encode() + _cpu())
    library = cache_dir() / f"{name}-{digest.hexdigest()[:20]}.so"
    if library.exists():
        return library
    gcc = shutil.which(os.environ.get("CC", "gcc"))
    if gcc is None:
        raise EmulatorError(
            "the emulator compiles its core with gcc, which is not on the PATH (Debian: apt-get install gcc; or set CC)"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one compiles
        if not library.exists():
            _compile(gcc, sources, flags, library)
    return library


def _compile(gcc: str, sources: list[Path], flags: tuple[str, ...], library: Path) -> None:
    def run(*command: str) -> None:
        done = subprocess.run([gcc, *command], capture_output=True, text=True)
        if done.returncode:
            raise EmulatorError(f"gcc could not compile the emulator's core:\n{done.stderr[:4000]}")

    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [
                pool.submit(run, *flags, "-fPIC", "-c", str(s), "-o", o) for s, o in zip(sources, objects, strict=True)
            ]
            for job in jobs:
                job.result()
        part = str(Path(folder) / library.name)
        run("-shared", "-pthread", "-o", part, *objects, "-lm")
        Path(part).replace(library)


def _cpu() -> bytes:
    """What `-march=native` depends on: a cache folder may be shared by machines."""
    try:
        return next(
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")
        ).encode()
    except (OSError, StopIteration):
        return b""


@cache
def core() -> ctypes.CDLL:
    """The core, loaded."""
    library = ctypes.CDLL(str(compile_c("core", sorted(SOURCES.glob("*.c")), sorted(SOURCES.glob("*.h")))))
    library.emu_lookup.restype, library.emu_lookup.argtypes = ctypes.c_size_t, [ctypes.c_char_p]
    library.emu_launch.argtypes = [ctypes.c_void_p]
    library.emu_count.restype = ctypes.c_size_t
    library.emu_name.restype, library.emu_name.argtypes = ctypes.c_char_p, [ctypes.c_size_t]
    library.emu_sizeof.restype, library.emu_sizeof.argtypes = ctypes.c_size_t, [ctypes.c_int]
    return library
