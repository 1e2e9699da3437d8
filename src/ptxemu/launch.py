"""Launching kernels: from PTX text, from a compiled CuTe DSL function, or from whatever launches inside `emulate`."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from . import dsl
from .build import core
from .errors import BY_NUMBER, EmulatorError, Unsupported
from .lower import CProgram, Lowered, lower
from .ptx import parse
from .textures import Texture, textures_in

MAX_SHARED = 232_448
"""Bytes of dynamic shared memory that a CTA may ask for on sm_90 and sm_100."""


class CRange(ctypes.Structure):
    """`Range` of core.h."""

    _fields_ = (("lo", ctypes.c_uint64), ("hi", ctypes.c_uint64), ("name", ctypes.c_char_p))


class CLaunch(ctypes.Structure):
    """`Launch` of core.h."""

    _fields_ = (
        ("program", ctypes.POINTER(CProgram)), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3), ("dynamic_shared", ctypes.c_uint32), ("params", ctypes.c_void_p),
        ("range", ctypes.POINTER(CRange)), ("n_range", ctypes.c_int32), ("n_texture", ctypes.c_int32), ("texture", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("eager", ctypes.c_int32), ("shuffle", ctypes.c_int32), ("workers", ctypes.c_int32), ("quantum", ctypes.c_int32),
        ("limit", ctypes.c_uint64), ("races", ctypes.c_int32), ("loads_end_by_use", ctypes.c_int32),
        ("warp_races", ctypes.c_int32),
        ("queued_reads", ctypes.c_int32),
        ("error", ctypes.c_int32), ("error_line", ctypes.c_int32),
        ("error_cta", ctypes.c_uint32 * 3), ("error_warp", ctypes.c_int32), ("message", ctypes.c_char * 4096),
        ("notes", ctypes.c_char * 4096), ("instructions", ctypes.c_uint64), ("next_cluster", ctypes.c_uint32),
        ("progress", ctypes.c_uint64), ("race", ctypes.c_void_p),
    )  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How a launch is executed.

    seed: chooses the order in which asynchronous operations complete (and, with `shuffle`, in which warps run and for how long).
    eager: complete asynchronous operations as soon as they are issued.
    shuffle: run warps in random order for random stretches.
    workers: threads that run CTAs (0: one a core).
    quantum: instructions that a warp runs before another has its turn.
    limit: instructions without progress after which a launch counts as stuck.
    races: look for accesses of global memory that nothing orders.
    warp_races: look for accesses of shared memory by lanes of one warp that nothing orders: a lane may touch what another one wrote or
        read only past a bar.warp.sync of both, or past what its warp acquires (a barrier, an mbarrier), and one store of different
        values to a place leaves any of them.
    loads_end_by_use: a tcgen05.ld is over where its registers are used, also for the order of memory accesses, which the PTX ISA
        does not promise without tcgen05.wait::ld.
    queued_reads: look for reads of shared memory that an arrival does not wait for, where a copy then overwrites what they read.
    edit: a change of the PTX text before it runs; it must change something.
    """

    seed: int = 0
    eager: bool = False
    shuffle: bool = False
    workers: int = 0
    quantum: int = 2000
    limit: int = 20_000_000
    races: bool = True
    warp_races: bool = False
    loads_end_by_use: bool = False
    queued_reads: bool = True
    edit: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Launched:
    """One executed launch. `notes` are remarks that are no faults."""

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    seconds: float
    instructions: int
    notes: tuple[str, ...]


@dataclass
class _Memory:
    """The global memory that a launch may touch: the storages of tensors."""

    ranges: list[tuple[int, int, str]] = field(default_factory=list)
    textures: list[Texture] = field(default_factory=list)

    def add(self, tensors: Any, name: str = "tensor") -> None:
        for t in textures_in(tensors):
            self.textures.append(t)
            self.add([t.tensor], "surface" if t.description.surface else "texture")
        for i, t in enumerate(dsl.tensors_in(tensors)):
            storage = t.untyped_storage()
            if storage.nbytes():
                lo = storage.data_ptr()
                self.ranges.append((lo, lo + storage.nbytes(), f"{name} {i} {tuple(t.shape)}"))

    def array(self) -> Any:
        merged: dict[int, tuple[int, int, str]] = {}
        for lo, hi, name in self.ranges:
            if lo not in merged or merged[lo][1] < hi:
                merged[lo] = (lo, hi, name)
        rows = sorted(merged.values())
        array = (CRange * max(len(rows), 1))(*[CRange(lo, hi, name.encode()) for lo, hi, name in rows])
        return array, len(rows)


ARCHITECTURES = {"sm_90": 90, "sm_90a": 90, "sm_100": 100, "sm_100a": 100, "sm_100f": 100, "sm_103a": 103}
"""What the core is told of each target that kernels are emulated for."""


def check_arch(arch: str) -> None:
    """Raises EmulatorError for an architecture that is not emulated."""
    if arch not in ARCHITECTURES:
        raise EmulatorError(f"arch: got {arch!r}; allowed: {', '.join(ARCHITECTURES)}")


_parsed = lru_cache(maxsize=16)(parse)


@lru_cache(maxsize=64)
def _program(text: str, name: str) -> Lowered:
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.M)
    arch = target.group(1) if target else "sm_90a"
    kernels = _parsed(text)
    if name not in kernels:
        raise EmulatorError(f"kernel: got {name!r}; the PTX has {', '.join(kernels) or 'none'}")
    return lower(kernels[name], ARCHITECTURES.get(arch, 90))


def _execute(
    text: str, name: str, grid: Sequence[int], block: Sequence[int], cluster: Sequence[int], shared: int,
    params: bytes, memory: _Memory, options: Options,
) -> Launched:  # fmt: skip
    """Run a launch in the core; raises its first fault."""
    if options.edit is not None:
        edited = options.edit(text)
        if edited == text:
            raise ValueError("`edit`: the PTX text is unchanged")
        text = edited
    lowered = _program(text, name)
    kernel = lowered.kernel
    if kernel.reqntid and tuple(block) != (*kernel.reqntid, 1, 1)[:3]:
        raise EmulatorError(f"launch with blocks of {tuple(block)} threads; the kernel requires {kernel.reqntid}")
    threads = block[0] * block[1] * block[2]
    if not 1 <= threads <= 1024:
        raise EmulatorError(f"launch with {threads} threads a block; allowed: 1 to 1024")
    if kernel.dynamic_base + shared > MAX_SHARED:
        raise EmulatorError(
            f"launch with {shared} bytes of dynamic shared memory; allowed: up to {MAX_SHARED - kernel.dynamic_base}"
        )
    if any(g < 1 for g in grid) or grid[1] > 65535 or grid[2] > 65535:
        raise EmulatorError(
            f"launch with a grid of {tuple(grid)} blocks; allowed: at least 1, at most 65535 on y and z"
        )
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise EmulatorError(
            f"launch of a grid of {tuple(grid)} blocks in clusters of {tuple(cluster)}; the grid must be a multiple"
        )
    own = [(v.address, v.address + len(v.initial), f"variable {v.name}") for v in kernel.variables.values()]
    ranges, count = _Memory(memory.ranges + own).array()
    handles = [t.handle for t in memory.textures]
    textures = (ctypes.c_uint64 * max(len(handles), 1))(*handles)
    padded = ctypes.create_string_buffer(params, max(len(params), 8) + 64)
    launch = CLaunch(
        program=ctypes.pointer(lowered.program), grid=tuple(grid), block=tuple(block), cluster=tuple(cluster),
        dynamic_shared=shared, params=ctypes.addressof(padded), range=ranges, n_range=count,
        n_texture=len(handles), texture=ctypes.addressof(textures), seed=options.seed,
        eager=options.eager, shuffle=options.shuffle, workers=options.workers or os.cpu_count() or 1,
        quantum=options.quantum, limit=options.limit, races=options.races,
        loads_end_by_use=options.loads_end_by_use, warp_races=options.warp_races, queued_reads=options.queued_reads,
    )  # fmt: skip
    start = time.perf_counter()
    core().emu_launch(ctypes.byref(launch))
    seconds = time.perf_counter() - start
    if launch.error:
        raise _error(launch, text)
    notes = tuple(launch.notes.decode().splitlines())
    return Launched(name, tuple(grid), tuple(block), tuple(cluster), seconds, launch.instructions, notes)


def _error(launch: CLaunch, text: str) -> EmulatorError:
    """The fault as an exception, with the PTX lines that it names."""
    lines = text.split("\n")

    def quoted(line: int) -> str:
        return " ".join(lines[line - 1].split())[:140] if 0 < line <= len(lines) else "?"

    message = re.sub(
        r"at PTX line (\d+)",
        lambda m: f"at PTX line {m[1]}: {quoted(int(m[1]))}",
        launch.message.decode(errors="replace"),
    )
    if launch.error_line:
        message += f"\n  at PTX line {launch.error_line}: {quoted(launch.error_line)}"
    message += f"\n  CTA {tuple(launch.error_cta)}, warp {launch.error_warp}"
    kind = BY_NUMBER[launch.error] or EmulatorError
    error = kind(message)
    error.line = launch.error_line
    return error


def run_ptx(
    text: str, name: str, grid: Sequence[int], block: Sequence[int], args: Sequence[Any] = (), *, shared: int = 0,
    cluster: Sequence[int] = (1, 1, 1), tensors: Any = (), **options: Any,
) -> Launched:  # fmt: skip
    """Launch a kernel of a PTX text.

    args: CPU tensors (their pointers are passed, their storages may be touched), textures and surfaces (their handles), bytes, or numbers
    (packed to the parameter's size). shared: dynamic shared memory in bytes. tensors: further tensors and textures that the kernel may
    touch. options: see `Options`.
    """
    grid, block, cluster = ((*x, 1, 1)[:3] for x in (grid, block, cluster))
    memory = _Memory()
    memory.add([a for a in args if dsl.is_tensor(a) or isinstance(a, Texture)], "argument")
    memory.add(tensors)
    kernel = _program(text, name).kernel
    params = bytearray(kernel.param_size)
    if len(args) != len(kernel.params):
        raise EmulatorError(f"{name}: got {len(args)} arguments; it has {len(kernel.params)} parameters")
    packed = [_packed(a, size) for (_, size, _, _), a in zip(kernel.params, args, strict=True)]
    for (_, size, _, offset), raw in zip(kernel.params, packed, strict=True):
        params[offset : offset + size] = raw
    call = PtxCall(
        text, name, tuple(grid), tuple(block), tuple(cluster), shared, packed, [*dsl.tensors_in([args, tensors])]
    )
    for variable in _program(text, name).kernel.variables.values():
        variable.reset()
    before = [observe(call) for observe in observers]
    launched = _execute(text, name, grid, block, cluster, shared, bytes(params), memory, Options(**options))
    for done in before:
        done()
    return launched


@dataclass(frozen=True)
class PtxCall:
    """A launch by `run_ptx` as observers see it: arguments as bytes (tensors: their addresses), and all tensors in reach."""

    text: str
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared: int
    args: list[bytes]
    tensors: list[Any]


observers: list[Callable[[PtxCall], Callable[[], None]]] = []
"""Called before every `run_ptx`; what they return is called after a launch without fault."""


def _packed(a: Any, size: int) -> bytes:
    if dsl.is_tensor(a):
        dsl.check_cpu(a)
        return int(a.data_ptr()).to_bytes(8, "little")
    if isinstance(a, Texture):
        return a.handle.to_bytes(8, "little")
    if isinstance(a, bytes | bytearray):
        return bytes(a).ljust(size, b"\0")
    if isinstance(a, float):
        return bytes(ctypes.c_float(a) if size == 4 else ctypes.c_double(a))
    return (int(a) & (1 << 8 * size) - 1).to_bytes(size, "little")


# ---- launches of CuTe DSL functions -----------------------------------------------------------------------------------------------
@dataclass
class _Session:
    """What a launch that the shim reports belongs to."""

    options: Options
    memory: _Memory = field(default_factory=_Memory)
    text: str | None = None
    launches: list[Launched] = field(default_factory=list)
    error: BaseException | None = None


_session: _Session | None = None


def _on_launch(name: str, grid: Any, block: Any, cluster: Any, shared: int, read: Callable[[int, int], bytes]) -> bool:
    """A launch that host code makes; False (an error to the host code) after a fault, which `_session` keeps."""
    session = _session
    if session is None:
        return False
    try:
        text = session.text or dsl.find_ptx(name)
        kernel = _program(text, name).kernel
        params = bytearray(kernel.param_size)
        for i, (_, size, _, offset) in enumerate(kernel.params):
            params[offset : offset + size] = read(i, size)
        session.launches.append(
            _execute(text, name, grid, block, cluster, shared, bytes(params), session.memory, session.options)
        )
    except BaseException as error:
        session.error = error
        return False
    return True


@contextmanager
def _sessions(session: _Session) -> Iterator[_Session]:
    global _session
    if _session is not None:
        raise EmulatorError("the emulator is already running a function")
    _session = session
    try:
        yield session
    finally:
        _session = None


def run(compiled: Any, *args: Any, ptx: str | None = None, tensors: Any = (), **options: Any) -> list[Launched]:
    """Call a compiled CuTe DSL function on CPU tensors; its launches run in the emulator.

    compiled: what `cute.compile` returned in this process after `setup` (or PTX text: then see `run_ptx`, whose arguments follow). ptx:
    another PTX text than the function's own. tensors: further tensors that the kernel may touch (behind pointer arguments).
    options: see `Options`.

    Raises the first fault, an `EmulatorError`.
    """
    if isinstance(compiled, str):
        return [run_ptx(compiled, *args, tensors=tensors, **options)]
    dsl.check_ready()
    dsl.check_cpu(args)
    session = _Session(Options(**options), text=ptx or compiled.artifacts.PTX)
    session.memory.add(args, "argument")
    session.memory.add(tensors)
    with _sessions(session):
        try:
            dsl.call(compiled, args)
        except Exception:
            if session.error is None:
                raise
    if session.error is not None:
        raise session.error
    return session.launches


@contextmanager
def emulate(arch: str, **options: Any) -> Iterator[list[Launched]]:
    """Inside the block, compiled CuTe DSL functions take CPU tensors and their launches run in the emulator.

    Everything behind an ordinary launch function is the kernel's own: host code, grid, tensor maps, parameters. Yields the list of
    launches as it grows. arch: `"sm_90a"` or `"sm_100a"`. options: see `Options`. Raises the first fault from the call that launched.
    """
    check_arch(arch)
    dsl.setup(arch)
    session = _Session(Options(**options))

    def before(args: Any, ptx: str | None) -> None:
        dsl.check_cpu(args)
        session.text = ptx
        # Tensors of calls before may be freed by now, and others in their place.
        session.memory = _Memory()
        session.memory.add(args, "argument")

    def after(failed: BaseException | None) -> None:
        error, session.error = session.error, None
        if error is not None:
            raise error from failed

    with _sessions(session), dsl.intercept(before, after):
        yield session.launches


dsl.set_callback(_on_launch)
__all__ = ["Launched", "Options", "Unsupported", "emulate", "run", "run_ptx"]
