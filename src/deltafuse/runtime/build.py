"""Kernels compiled by the CuTe DSL and linked into objects that load without it.

An object is a shared library with two TVM-FFI functions: `kernel` launches, `preload` loads the device code without a launch. It needs
the DSL's runtime library and TVM-FFI's, no driver and no DSL, to be loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .log import log_once, logger

KERNELS = "deltafuse.kernels"
"""The package of kernels; `compile(config)` of its module `<name>` compiles the kernel of that name."""

_RUNTIME = "libcute_dsl_runtime.so"
_LINKERS = ("ld", "ld.lld", "ld.gold", "ld.bfd")


class MissingError(RuntimeError):
    """A package is not installed that kernels need."""


# The DSL compiles for one architecture at a time, which is a setting of the process.
_compiling = threading.Lock()

# What the first launch does before it launches, as a function of its own: under CUDA graph capture device code must be there already.
# `cuda_load` sets attributes of the kernels' functions on the current device, which a driver that loads lazily has to load for it.
_PRELOAD = """
llvm.mlir.global external @{state}() : i64
llvm.func @cuda_init(!llvm.ptr) -> i32
llvm.func @cuda_load_to_device(!llvm.ptr, i32) -> i32
llvm.func @cuda_load(!llvm.ptr) -> i32
llvm.func @TVMFFIErrorSetRaisedFromCStr(!llvm.ptr, !llvm.ptr)
llvm.func @cuda_dialect_init_library_once(!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
llvm.func @preload(%self: !llvm.ptr, %args: !llvm.ptr, %count: i32, %result: !llvm.ptr) -> i32 {{
  %state = llvm.mlir.addressof @{state} : !llvm.ptr
  %init = llvm.mlir.addressof @cuda_init : !llvm.ptr
  %load = llvm.mlir.addressof @cuda_load_to_device : !llvm.ptr
  %error = llvm.mlir.addressof @TVMFFIErrorSetRaisedFromCStr : !llvm.ptr
  %code = llvm.call @cuda_dialect_init_library_once(%state, %init, %load, %error)
    : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %done = llvm.icmp "eq" %code, %zero : i32
  llvm.cond_br %done, ^functions, ^end
^functions:
  %ignored = llvm.call @cuda_load(%state) : (!llvm.ptr) -> i32
  llvm.br ^end
^end:
  llvm.return %code : i32
}}
"""


def _dsl_front_ends() -> list[Any]:
    """The DSL's front ends, each with settings of its own; none before it is imported."""
    if "cutlass" not in sys.modules:
        return []
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    return list(DSLSingletonMeta._instances.values())


@contextmanager
def _architecture(arch: str) -> Iterator[None]:
    """Have the DSL compile for `arch`, then for what it compiled for before."""
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        for front_end in _dsl_front_ends():
            front_end.envar.arch = arch
        yield
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before
        for front_end in _dsl_front_ends():
            del front_end.envar.arch  # read from the environment again, or detected, at the next compilation


def compile_kernel(kernel: str, config: Any, arch: str) -> Any:
    """What `cute.compile` returns for a kernel. Raises `MissingError` where the DSL is not installed."""
    if find_spec("cutlass") is None:
        raise MissingError(
            f"{kernel} has to be compiled for {arch}, which needs the CuTe DSL: pip install 'deltafuse[cuda]'"
        )
    with _compiling, _architecture(arch):
        return importlib.import_module(f"{KERNELS}.{kernel}").compile(config)


def link(compiled: Any) -> bytes | None:
    """A compiled kernel as a shared library; None, said once, where nothing can link."""
    linker = find_linker()
    if linker is None:
        message = "no linker (%s) on the PATH: compiled kernels are not kept on disk and load at their first launch"
        log_once(logging.WARNING, message, ", ".join(_LINKERS))
        return None
    with tempfile.TemporaryDirectory(prefix="deltafuse-") as folder:
        part, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        with _compiling:
            _add_preload(compiled)
            compiled.export_to_c(str(part), "kernel")
        libraries = [runtime_library(), _tvm_ffi_library()]
        needed = [x for path in libraries for x in ("-L", str(path.parent), f"-l:{path.name}")]
        alias = "__tvm_ffi_preload=__cute_internal_kernel_preload"
        command = [linker, "-shared", "-Bsymbolic", "-s", f"--defsym={alias}", "-o", str(linked), str(part), *needed]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            log_once(logging.WARNING, "%s could not link a kernel, which is not kept: %s", linker, done.stderr.strip())
            return None
        return linked.read_bytes()


def _add_preload(compiled: Any) -> None:
    """Give a compiled module the function `preload`, once."""
    ir: Any = importlib.import_module("cutlass._mlir.ir")

    module = compiled.ir_module
    text = _PRELOAD.format(state=f"__{compiled.function_name}_cuda_state")
    with module.context, ir.Location.unknown():
        names = [op.attributes["sym_name"].value for op in module.body.operations if "sym_name" in op.attributes]
        if "preload" not in names:
            scratch = ir.Module.parse(text)  # alive until the copy is made
            function = list(scratch.body.operations)[-1].operation
            function.clone(ir.InsertionPoint(module.body))


def find_linker() -> str | None:
    """A linker of this machine."""
    return next(filter(None, map(shutil.which, _LINKERS)), None)


@cache
def runtime_library() -> Path:
    """The DSL's runtime library, for torch's version of CUDA where there are several; the DSL is not imported."""
    listed = [Path(p) for p in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep) if p.endswith(_RUNTIME)]
    spec = find_spec("nvidia_cutlass_dsl")
    roots = (spec and spec.submodule_search_locations) or ()
    found = [*listed, *sorted((x for r in roots for x in Path(r).glob(f"cu*/lib/{_RUNTIME}")), reverse=True)]
    if not found:
        raise MissingError(f"kernels need {_RUNTIME} of the CuTe DSL: pip install 'deltafuse[cuda]'")
    ours = f"cu{(torch.version.cuda or '').partition('.')[0]}"
    return next((x for x in found if x in listed or x.parent.parent.name == ours), found[0])


def _tvm_ffi_library() -> Path:
    from tvm_ffi import libinfo

    return Path(libinfo.find_libtvm_ffi())


@cache
def _runtime() -> ctypes.CDLL:
    """The DSL's runtime library, loaded: objects find it by its name from then on."""
    return ctypes.CDLL(str(runtime_library()))


def open_object(path: Path) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """The functions `kernel` and `preload` of an object.

    Raises RuntimeError or AttributeError where it cannot be loaded, `MissingError` where no object could.
    """
    try:
        import tvm_ffi
    except ModuleNotFoundError:
        raise MissingError("kernels need TVM-FFI: pip install 'deltafuse[cuda]'") from None
    _runtime()
    module = tvm_ffi.load_module(str(path))
    functions = module.get_function("kernel"), module.get_function("preload")
    logger.debug("loaded %s", path)
    return functions
