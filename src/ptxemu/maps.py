"""Tensor maps of CPU tensors, for kernels that are launched from PTX text: what cuTensorMapEncode* make on a GPU's host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from . import dsl
from .errors import EmulatorError

_TYPES = {
    "uint8": 0, "int8": 0, "bool": 0, "uint16": 1, "int16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""CU_TENSOR_MAP_DATA_TYPE_* of torch's dtypes; those of 8 bits that are not named here are bytes."""
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_WIDE = {"im2col::w": 0, "im2col::w::128": 1}


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(dsl.shim()))


def _head(tensor: Any, swizzle: int) -> tuple[Any, ...]:
    """Type, rank, address, sizes and strides as the encoders take them, innermost dimension first."""
    dsl.check_cpu(tensor)
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TYPES and tensor.element_size() != 1:
        raise EmulatorError(f"tensor: got {tensor.dtype}; a tensor map has no such type")
    if swizzle not in _SWIZZLES:
        raise EmulatorError(f"swizzle: got {swizzle}; allowed: {', '.join(map(str, _SWIZZLES))} (bytes)")
    rank = tensor.dim()
    if rank > 1 and tensor.stride(-1) != 1:
        raise EmulatorError(f"tensor: its innermost dimension has stride {tensor.stride(-1)}; it must have 1")
    sizes = (ctypes.c_uint64 * 5)(*reversed(tensor.shape))
    strides = (ctypes.c_uint64 * 5)(*(s * tensor.element_size() for s in reversed(tensor.stride()[:-1])))
    return _TYPES.get(name, 0), rank, ctypes.c_void_p(tensor.data_ptr()), sizes, strides


def _steps(given: Sequence[int] | None, rank: int, first: int) -> Any:
    """Element strides from dimension `first` on, innermost first."""
    values = [1] * rank
    for i, step in enumerate(reversed(given or ())):
        values[first + i] = step
    return (ctypes.c_uint32 * 5)(*values)


def _encode(function: str, *args: Any) -> bytes:
    out = ctypes.create_string_buffer(128)
    if getattr(_library(), function)(out, *args):
        raise EmulatorError(
            f"{function[1:]}: a size, stride, box, corner or alignment is out of its range (CUDA driver API, tensor maps)"
        )
    return out.raw


def tiled_map(
    tensor: Any, box: Sequence[int], *, step: Sequence[int] | None = None, swizzle: int = 0, nan_fill: bool = False
) -> bytes:
    """The 128 bytes of a tiled tensor map: an argument of `run_ptx` for a parameter `.param .align 64 .b8 map[128]`.

    tensor: 1 to 5 dimensions as torch has them, outermost first, the innermost contiguous; pass it to `run_ptx` too (among `args` or
    `tensors`). box: elements of a tile along each of them. step: element strides. swizzle: bytes, 0, 32, 64 or 128.
    """
    rank = tensor.dim()
    if len(box) != rank:
        raise EmulatorError(f"box: got {len(box)} sizes for a tensor of {rank} dimensions")
    boxes = (ctypes.c_uint32 * 5)(*reversed(box))
    return _encode(
        "_cuTensorMapEncodeTiled",
        *_head(tensor, swizzle),
        boxes,
        _steps(step, rank, 0),
        0,
        _SWIZZLES[swizzle],
        0,
        int(nan_fill),
    )


def im2col_map(
    tensor: Any, lower: Sequence[int], upper: Sequence[int], channels: int, pixels: int, *, step: Sequence[int] | None = None,
    swizzle: int = 0, nan_fill: bool = False, mode: Literal["im2col", "im2col::w", "im2col::w::128"] = "im2col",
) -> bytes:  # fmt: skip
    """The 128 bytes of a tensor map of im2col: an argument of `run_ptx`, as `tiled_map` makes them.

    tensor: N {D} {H} W C, outermost first. lower, upper: corners of the bounding box along {D} {H} W, relative to the tensor's first and
    last element; where convolution filters may begin. channels, pixels: what a copy takes. step: traversal strides along {D} {H} W.
    mode: `im2col::w` and `im2col::w::128` (sm_100) have corners along W alone.
    """
    rank = tensor.dim()
    wide = mode != "im2col"
    count = 1 if wide else rank - 2
    if rank < 3 or rank > 5 or len(lower) != count or len(upper) != count or len(step or ()) not in (0, rank - 2):
        raise EmulatorError(
            f"lower, upper, step: got {len(lower)}, {len(upper)}, {len(step or ())} numbers; {rank} dimensions, mode {mode}"
        )
    head, steps = _head(tensor, swizzle), _steps(step, rank, 1)
    tail = (_SWIZZLES[swizzle], 0, int(nan_fill))
    if wide:
        return _encode(
            "_cuTensorMapEncodeIm2colWide", *head, lower[0], upper[0], channels, pixels, steps, 0, _WIDE[mode], *tail
        )
    corners = [(ctypes.c_int * 3)(*reversed(c)) for c in (lower, upper)]
    return _encode("_cuTensorMapEncodeIm2col", *head, *corners, channels, pixels, steps, 0, *tail)
