"""Compiled kernels: in memory, then on disk, then by compiling them.

    memory -> DELTAFUSE_AOT_DIR (read only) -> DELTAFUSE_CACHE_DIR -> the CuTe DSL

An object on disk is found by all that its code depends on: kernel, config, architecture, the sources that the kernel is made
of, the versions of the DSL and of TVM-FFI, the kind of machine. Its file ends with the digests of that description and of its
own bytes, so a file that is damaged or not ours is known before it is loaded; it is removed and compiled again.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import build
from .log import log_once, logger

Function = Callable[..., Any]
Key = tuple[str, Any, str]

_MARK = b"\0deltafuse kernel"
_PATIENCE = 300.0
"""Seconds that a process waits for another one that compiles the same kernel, before it compiles too."""

_loaded: dict[Key, Function] = {}
_preloads: dict[Key, Function] = {}
_locks: dict[Key, threading.Lock] = {}
_lock = threading.Lock()


def load(kernel: str, config: Any, arch: str) -> Function:
    """The launch function of a kernel: `kernel` names a module of `deltafuse.kernels`, `config` is what its `compile` takes.

    `arch` is the DSL's name of an architecture ("sm_90a"). Quick where the function was loaded before; of many threads or processes that
    ask for the same one, one compiles. The function takes torch tensors, launches on torch's current stream of their device, and may be
    called from any thread. Raises RuntimeError where it has to be compiled and the DSL is not installed, and where it is not loaded yet
    while a CUDA graph is captured.
    """
    key = (kernel, config, arch)
    function = _loaded.get(key)
    return _first(key) if function is None else function


def preload(kernel: str, config: Any, arch: str) -> None:
    """Load a kernel and its code on the current GPU, so that its first launch there does nothing but launch.

    A kernel that could not be linked (no linker) is loaded only: its code follows at the first launch.
    """
    load(kernel, config, arch)
    function = _preloads.get((kernel, config, arch))
    if function is not None:
        function()


def _first(key: Key) -> Function:
    with _lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        function = _loaded.get(key)
        if function is not None:
            return function
        on_gpu = torch.cuda.is_initialized()
        if on_gpu and torch.cuda.is_current_stream_capturing():
            message = "is launched for the first time while a CUDA graph is captured; call deltafuse.warmup, or the op, before"
            raise RuntimeError(f"{key[0]} {message}")
        function = _find(key)
        if on_gpu and key in _preloads:
            try:
                _preloads[key]()
            except RuntimeError as error:  # another GPU's kernel; a launch would say so
                logger.debug("%s for %s: %s", key[0], key[2], error)
        _loaded[key] = function
        return function


def _find(key: Key) -> Function:
    entry = Entry.of(*key)
    ready, folder = aot_dir(), cache_dir()
    if ready is not None:
        found = _open(key, entry, ready, repair=False)
        if found is not None:
            return found
        message = "%s has no %s: its objects are of other kernels, sources or versions"
        log_once(logging.WARNING, message, str(ready), entry.file)
    if folder is None:
        compiled = build.compile_kernel(*key)
        return compiled if _disk_is_off() else _from_scratch(key, entry, compiled)
    found = _open(key, entry, folder)
    if found is not None:
        return found
    with _exclusively(folder, entry):
        found = _open(key, entry, folder)
        if found is not None:
            return found
        compiled = _compile(key)
        return _from_scratch(key, entry, compiled, folder)


def _compile(key: Key) -> Any:
    start = time.perf_counter()
    compiled = build.compile_kernel(*key)
    logger.info("compiled %s for %s in %.1f s: %s", key[0], key[2], time.perf_counter() - start, key[1])
    return compiled


def _from_scratch(key: Key, entry: Entry, compiled: Any, folder: Path | None = None) -> Function:
    """Link what was compiled, keep it in `folder` if that can be, and load it; without a linker the function as it is."""
    data = build.link(compiled)
    if data is None:
        return compiled
    if folder is not None and store(entry, data, folder) is not None:
        found = _open(key, entry, folder)
        if found is not None:
            return found
    with tempfile.TemporaryDirectory(prefix="deltafuse-") as scratch:  # a file may be removed once it is loaded
        path = Path(scratch) / entry.file
        path.write_bytes(data)
        return _keep(key, path)


def _open(key: Key, entry: Entry, folder: Path, *, repair: bool = True) -> Function | None:
    """The function of a folder's object, None where it has none. `repair`: remove an object that is damaged, foreign or does not load."""
    path = folder / entry.file
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log_once(logging.WARNING, "%s cannot be read: %s", str(path), str(error))
        return None
    if not data.endswith(entry.seal(data[: -entry.seal_size])):
        wrong = "it is damaged, or not of this package"
    else:
        try:
            return _keep(key, path)
        except build.MissingError:
            raise
        except (RuntimeError, AttributeError, OSError) as error:
            wrong = str(error)
    logger.warning("%s is not used%s: %s", path, " and removed" if repair else "", wrong)
    if repair:
        with suppress(OSError):
            path.unlink()
    return None


def _keep(key: Key, path: Path) -> Function:
    function, _preloads[key] = build.open_object(path)
    return function


# ---- what an object is -------------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Entry:
    """An object's description and, made of it, its name and digest."""

    about: dict[str, Any]
    digest: bytes

    @staticmethod
    def of(kernel: str, config: Any, arch: str) -> Entry:
        about = {
            "kernel": kernel,
            "arch": arch,
            "config": {"type": type(config).__qualname__, **dataclasses.asdict(config)},
            "sources": hashlib.sha256(json.dumps(sources(kernel), sort_keys=True).encode()).hexdigest(),
            **_versions(),
        }
        text = json.dumps(about, sort_keys=True)
        return Entry(about, hashlib.sha256(text.encode()).digest())

    @property
    def name(self) -> str:
        return f"{self.about['kernel']}-{self.about['arch']}-{self.digest.hex()[:16]}"

    @property
    def file(self) -> str:
        return self.name + ".so"

    seal_size = len(_MARK) + 64

    def seal(self, data: bytes) -> bytes:
        """The end of the file of an object whose library is `data`."""
        return _MARK + self.digest + hashlib.sha256(data).digest()


@cache
def _versions() -> dict[str, str]:
    """What beside our own sources makes the code: a package that is missing has no version."""
    found = {}
    for name, distribution in (("dsl", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found | {"machine": f"{platform.system()} {platform.machine()}".lower()}


@cache
def sources(kernel: str) -> dict[str, str]:
    """The modules that an object is made of, each with the digest of its file: the kernel's own, all of this package that
    it imports, and `build`, which gives it its form."""
    name = f"{build.KERNELS}.{kernel}"
    importlib.import_module(build.KERNELS)
    found = {build.__name__: _read(Path(build.__file__), build.__name__)[0]}
    todo = [name]
    while todo:
        module = todo.pop()
        path = _source(module)
        if path is not None and module not in found:
            found[module], imported = _read(path, module)
            todo += imported
    if name not in found:
        raise ValueError(f"`kernel`: got {kernel!r}; {build.KERNELS} has no such module")
    return found


@cache
def _read(path: Path, module: str) -> tuple[str, tuple[str, ...]]:
    """Digest of a source file, and what it imports."""
    text = path.read_bytes()
    return hashlib.sha256(text).hexdigest(), tuple(_imports(ast.parse(text), module, path.name == "__init__.py"))


def _source(module: str) -> Path | None:
    """The file of a module of this package, which is not imported for it."""
    for folder in _folders(module.rpartition(".")[0]):
        leaf = folder / module.rpartition(".")[2]
        for path in (leaf.with_suffix(".py"), leaf / "__init__.py"):
            if path.is_file():
                return path
    return None


def _folders(package: str) -> list[Path]:
    """Where the modules of a package of ours are."""
    if package.partition(".")[0] != __name__.partition(".")[0]:
        return []
    loaded = sys.modules.get(package)
    if loaded is not None:
        return [Path(p) for p in getattr(loaded, "__path__", ())]
    parent, _, leaf = package.rpartition(".")
    return [folder / leaf for folder in _folders(parent)]


def _imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Names of what a module imports; some may name what is in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


# ---- folders -----------------------------------------------------------------------------------------------------------------------
def _disk_is_off() -> bool:
    return os.environ.get("DELTAFUSE_CACHE_DIR") == ""


def cache_path() -> Path | None:
    """The folder that objects are kept in: `DELTAFUSE_CACHE_DIR` (None where it is set to nothing), else the user's cache folder."""
    chosen = os.environ.get("DELTAFUSE_CACHE_DIR")
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "deltafuse"
    except RuntimeError:  # a user without a home
        return None


def cache_dir() -> Path | None:
    """`cache_path`, made; None, said once, where it cannot be."""
    path = cache_path()
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log_once(logging.WARNING, "compiled kernels are not kept: %s (set DELTAFUSE_CACHE_DIR)", str(error))
        return None
    return path


def aot_dir() -> Path | None:
    """`DELTAFUSE_AOT_DIR`: a folder of ready objects, looked at first and never written."""
    chosen = os.environ.get("DELTAFUSE_AOT_DIR")
    return Path(chosen).expanduser() if chosen else None


def store(entry: Entry, data: bytes, folder: Path) -> Path | None:
    """Keep an object and, for people, its description beside it; None, said once, where the folder cannot be written."""
    about = json.dumps(entry.about, indent=1) + "\n"
    try:
        _write(folder / f"{entry.name}.json", about.encode())
        return _write(folder / entry.file, data + entry.seal(data))
    except OSError as error:
        log_once(logging.WARNING, "compiled kernels are not kept: %s (set DELTAFUSE_CACHE_DIR)", str(error))
        return None


def _write(path: Path, data: bytes) -> Path:
    """Write a file that nobody sees half written."""
    part = path.with_name(f".part-{uuid.uuid4().hex}")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    return path


@contextmanager
def _exclusively(folder: Path, entry: Entry) -> Iterator[None]:
    """Of several processes one is inside at a time. Where locks do not work, or one is held for long, all are: that costs work alone."""
    try:
        import fcntl

        locks = folder / ".locks"
        locks.mkdir(exist_ok=True)
        file = (locks / entry.name).open("ab")
    except (ImportError, OSError):
        yield
        return
    with file:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield


def write_object(kernel: str, config: Any, arch: str, folder: Path) -> Path:
    """Compile a kernel into `folder` and return the object's file; one that is there already stays. Nothing is loaded, no GPU needed.

    Raises RuntimeError where the DSL, a linker or the right to write is missing.
    """
    entry = Entry.of(kernel, config, arch)
    path = folder / entry.file
    with suppress(OSError):
        data = path.read_bytes()
        if data.endswith(entry.seal(data[: -entry.seal_size])):
            return path
    data_or_none = build.link(_compile((kernel, config, arch)))
    if data_or_none is None or store(entry, data_or_none, folder) is None:
        raise RuntimeError(f"{entry.file} could not be written to {folder}: see the log")
    return path


def listed(folder: Path) -> list[tuple[dict[str, Any], int]]:
    """Description and size in bytes of every object of a folder, sorted by name."""
    found = []
    for path in sorted(folder.glob("*-sm_*.json")):
        with suppress(OSError, ValueError):
            found.append((json.loads(path.read_text()), path.with_suffix(".so").stat().st_size))
    return found


def clear(folder: Path) -> int:
    """Remove every object of a folder, and what was left half written; other files stay. Returns how many objects there were."""
    objects = 0
    for path in [
        *folder.glob("*-sm_*.so"),
        *folder.glob("*-sm_*.json"),
        *folder.glob(".part-*"),
        *folder.glob(".locks/*"),
    ]:
        path.unlink(missing_ok=True)
        objects += path.suffix == ".so"
    return objects
