"""The CuTe DSL's side: an environment without a driver, PTX of compiled functions, CPU tensors that pass for device tensors."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .build import compile_c
from .errors import EmulatorError

Callback = Callable[[str, Any, Any, Any, int, Callable[[int, int], bytes]], bool]
_Dim = ctypes.POINTER(ctypes.c_uint * 3)
_ON_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, _Dim, _Dim, _Dim, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
)
_callback: Callback | None = None
_state: dict[str, Any] = {}


def set_callback(callback: Callback) -> None:
    """What takes the launches that the shim reports."""
    global _callback
    _callback = callback


def _launched(name: bytes, grid: Any, block: Any, cluster: Any, shared: int, args: Any) -> int:
    if _callback is None:
        return 1
    sizes = (tuple(grid.contents), tuple(block.contents), tuple(cluster.contents))
    ok = _callback(name.decode(), *sizes, shared, lambda i, size: ctypes.string_at(args[i], size))
    return 0 if ok else 1


@cache
def shim() -> Path:
    """The library of shim.c."""
    return compile_c("shim", [Path(__file__).parent / "shim.c"])


def setup(arch: str) -> None:
    """Prepare the process for compiling and emulating for an architecture; the first time before the first import of cutlass.

    Sets CUTE_DSL_ARCH, CUTE_DSL_LIBS (the shim, then the DSL's own runtime for what needs no driver), CUTE_DSL_KEEP and
    CUTE_DSL_DUMP_DIR. Called again for another architecture, it changes what is compiled from then on; functions that are
    compiled already stay what they are. Raises EmulatorError where cutlass was imported before the first call, and where the
    DSL is not installed.
    """
    if _state:
        _choose(arch)
        return
    if "cutlass" in sys.modules:
        raise EmulatorError("call ptxemu.setup (or enter ptxemu.emulate) before the first import of cutlass")
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None:
        raise EmulatorError("the CuTe DSL is not installed: pip install 'deltafuse[emulator]'")
    library_path = shim()
    folder = os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp(prefix="ptxemu-"))
    roots = [str(p) for p in spec.submodule_search_locations or ()]
    own = [x for r in roots for x in sorted(glob.glob(os.path.join(r, "cu*", "lib", "libcute_dsl_runtime.so")))]
    os.environ.update(
        CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=folder, CUTE_DSL_LIBS=os.pathsep.join([str(library_path), *own[-1:]]),
    )  # fmt: skip
    library = ctypes.CDLL(str(library_path))
    hook = _ON_LAUNCH(_launched)
    library.ptxemu_set_launch(hook)
    _state.update(library=library, hook=hook, folder=folder)
    _choose(arch)


def _choose(arch: str) -> None:
    """What the CuTe DSL compiles for: from the environment when it is imported, then a field of each of its front ends."""
    if _state.get("arch") == arch:
        return
    os.environ["CUTE_DSL_ARCH"] = arch
    if "cutlass" in sys.modules:
        from cutlass.base_dsl.dsl import DSLSingletonMeta

        for front_end in DSLSingletonMeta._instances.values():
            front_end.envar.arch = arch
    _state["library"].ptxemu_set_sms(132 if arch.startswith("sm_90") else 148)
    _state["arch"] = arch


def check_ready() -> None:
    """Raises EmulatorError before `setup`."""
    if not _state:
        raise EmulatorError("call ptxemu.setup(arch) before cutlass is imported and the function is compiled")


def find_ptx(name: str) -> str:
    """The PTX of the newest compiled kernel of this name."""
    files = sorted(Path(_state["folder"]).glob("*.ptx"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
    for file in files:
        text = file.read_text()
        if f".entry {name}(" in text:
            return text
    raise EmulatorError(f"no PTX of kernel {name} in {_state['folder']}")


# ---- tensors -----------------------------------------------------------------------------------------------------------------------
def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor (torch itself is not imported)."""
    return hasattr(x, "untyped_storage")


def found_in(x: Any, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """All that is wanted in nested lists, tuples and dicts."""
    if wanted(x):
        yield x
    elif isinstance(x, dict):
        for y in x.values():
            yield from found_in(y, wanted)
    elif isinstance(x, list | tuple):
        for y in x:
            yield from found_in(y, wanted)


def tensors_in(x: Any) -> Iterator[Any]:
    """All tensors in nested lists, tuples and dicts."""
    return found_in(x, is_tensor)


def check_cpu(x: Any) -> None:
    """Raises EmulatorError for a tensor that is not in this process's memory."""
    for t in tensors_in(x):
        if t.device.type != "cpu":
            raise EmulatorError(f"tensor: got one on {t.device}; the emulator takes CPU tensors")


class _OnDevice:
    """A CPU tensor whose DLPack capsule claims a CUDA device, for the device check of TVM FFI."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        capsule = self.tensor.__dlpack__()
        device = ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8)  # DLTensor.device.device_type
        device.value = 2
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def _on_device(x: Any) -> Any:
    if is_tensor(x):
        import tvm_ffi

        return tvm_ffi.from_dlpack(_OnDevice(x))
    if isinstance(x, list | tuple):
        return type(x)(map(_on_device, x))
    return x


def call(compiled: Any, args: Any) -> Any:
    """Call a compiled function, pretending a device where it checks for one."""
    type(compiled).num_devices = 1
    if hasattr(compiled, "_tvm_ffi_function"):
        return compiled(*_on_device(args))
    return compiled(*args)


@contextmanager
def intercept(
    before: Callable[[Any, str | None], None], after: Callable[[BaseException | None], None]
) -> Iterator[None]:
    """Inside the block, every call of a compiled function passes through `before(args, its PTX)` and `after(exception)`."""
    from cutlass.cutlass_dsl import cuda_jit_executor

    classes: list[Any] = [cuda_jit_executor.CudaDialectJitCompiledFunction]
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider

        classes += [
            c for n, c in vars(tvm_ffi_provider).items()
            if isinstance(c, type) and "TVMFFI" in n and "__call__" in vars(c)
        ]  # fmt: skip
    except ImportError:
        pass
    originals = [(c, vars(c).get("__call__")) for c in classes]

    def wrap(original: Any) -> Any:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            before([args, kwargs], getattr(getattr(self, "artifacts", None), "PTX", None))
            failed: BaseException | None = None
            result = None
            if hasattr(self, "_tvm_ffi_function"):
                args = tuple(map(_on_device, args))
                kwargs = {k: _on_device(v) for k, v in kwargs.items()}
            try:
                result = original(self, *args, **kwargs)
            except Exception as error:
                failed = error
            after(failed)
            if failed is not None:
                raise failed
            return result

        return wrapped

    for c, original in originals:
        if original is not None:
            c.num_devices = 1
            c.__call__ = wrap(original)
    try:
        yield
    finally:
        for c, original in originals:
            if original is not None:
                c.__call__ = original
