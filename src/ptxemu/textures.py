"""Textures and surfaces over CPU tensors, whose handles kernels take as 64-bit parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from . import dsl
from .errors import EmulatorError

Geometry = Literal["1d", "2d", "3d", "a1d", "a2d"]
Address = Literal["wrap", "mirror", "clamp", "border"]
_GEOMETRIES = {"1d": (1, False), "2d": (2, False), "3d": (3, False), "a1d": (1, True), "a2d": (2, True)}
_ADDRESSES = {"wrap": 0, "mirror": 1, "clamp": 3, "border": 4}
_UNSIGNED, _SIGNED, _FLOAT = range(3)
_KINDS = {
    "uint8": (_UNSIGNED, 1), "uint16": (_UNSIGNED, 2), "uint32": (_UNSIGNED, 4), "int8": (_SIGNED, 1), "int16": (_SIGNED, 2),
    "int32": (_SIGNED, 4), "float16": (_FLOAT, 2), "float32": (_FLOAT, 4),
}  # fmt: skip


class CTexture(ctypes.Structure):
    """`Texture` of core.h."""

    _fields_ = (
        ("base", ctypes.c_uint64), ("pitch", ctypes.c_uint64), ("slice", ctypes.c_uint64), ("size", ctypes.c_uint32 * 3),
        ("layers", ctypes.c_uint32), ("channels", ctypes.c_uint32), ("bytes", ctypes.c_uint32), ("kind", ctypes.c_int32),
        ("dims", ctypes.c_int32), ("surface", ctypes.c_int32), ("linear", ctypes.c_int32), ("normalized", ctypes.c_int32),
        ("fractions", ctypes.c_int32), ("address", ctypes.c_int32 * 3), ("border", ctypes.c_float * 4),
    )  # fmt: skip


class Texture:
    """A texture or surface of a tensor: an argument of `run_ptx`, or one of its `tensors` where `handle` lies in memory."""

    def __init__(self, tensor: Any, description: CTexture) -> None:
        self.tensor, self.description = tensor, description

    @property
    def handle(self) -> int:
        """The number that kernels know it by."""
        return ctypes.addressof(self.description)


def textures_in(x: Any) -> Iterator[Texture]:
    """All textures and surfaces in nested lists, tuples and dicts."""
    return dsl.found_in(x, lambda y: isinstance(y, Texture))


def _describe(tensor: Any, geometry: str) -> CTexture:
    dsl.check_cpu(tensor)
    name = str(tensor.dtype).removeprefix("torch.")
    if geometry not in _GEOMETRIES:
        raise EmulatorError(f"geometry: got {geometry!r}; allowed: {', '.join(_GEOMETRIES)}")
    if name not in _KINDS:
        raise EmulatorError(f"tensor: got {tensor.dtype}; textures and surfaces have {', '.join(_KINDS)}")
    dims, array = _GEOMETRIES[geometry]
    outer = dims + array
    channels = tensor.shape[-1] if tensor.dim() == outer + 1 else 1
    if tensor.dim() not in (outer, outer + 1) or channels not in (1, 2, 4) or 0 in tensor.shape:
        raise EmulatorError(
            f"tensor: got the shape {tuple(tensor.shape)}; .{geometry} takes {outer} dimensions, and one of 1, 2 or 4 channels"
        )
    kind, size = _KINDS[name]
    strides = [s * size for s in tensor.stride()]
    if tensor.dim() == outer:
        strides.append(size)
    if strides[-1] != size or strides[-2] != channels * size:
        raise EmulatorError("tensor: texels along the last dimension (and their channels) must follow each other")
    shape = list(reversed(tensor.shape[:outer]))
    layers = shape.pop() if array else 0
    steps = [*reversed(strides[: outer - 1])]  # bytes along the dimensions beyond the first, layers last
    return CTexture(
        base=tensor.data_ptr(), pitch=steps[0] if dims > 1 else 0,
        slice=steps[-1] if outer > dims or dims > 2 else 0, size=(*shape, 0, 0)[:3], layers=layers,
        channels=channels, bytes=size, kind=kind, dims=dims, address=(_ADDRESSES["clamp"],) * 3,
    )  # fmt: skip


def texture(
    tensor: Any, geometry: Geometry = "2d", *, filter: Literal["nearest", "linear"] = "nearest",
    address: Address | Sequence[Address] = "clamp", normalized: bool = False, fractions: bool = False,
    border: Sequence[float] = (0, 0, 0, 0),
) -> Texture:  # fmt: skip
    """A texture of a tensor: {layers or depth} {height} width {channels}, 1, 2 or 4 of them.

    address: what coordinates outside do, one for all dimensions or one each (x, y, z); wrap and mirror need normalized coordinates.
    normalized: float coordinates count from 0 to 1. fractions: integers are read as parts of their largest value
    (cudaReadModeNormalizedFloat). border: the color outside.
    """
    d = _describe(tensor, geometry)
    modes = [address] * 3 if isinstance(address, str) else [*address, *["clamp"] * 3][:3]
    for mode in modes:
        if mode not in _ADDRESSES or (mode in ("wrap", "mirror") and not normalized):
            raise EmulatorError(
                f"address: got {mode!r}; allowed: {', '.join(_ADDRESSES)}, the first two with normalized coordinates"
            )
    if filter not in ("nearest", "linear") or (filter == "linear" and d.kind != _FLOAT and not fractions):
        raise EmulatorError(f"filter: got {filter!r}; allowed: nearest, and linear of floats or fractions")
    if fractions and (d.kind == _FLOAT or d.bytes == 4):
        raise EmulatorError(f"fractions: of {tensor.dtype}; allowed: of integers of 8 and 16 bits")
    d.address = (ctypes.c_int32 * 3)(*(_ADDRESSES[m] for m in modes))
    d.linear, d.normalized, d.fractions = filter == "linear", normalized, fractions
    d.border = (ctypes.c_float * 4)(*border)
    return Texture(tensor, d)


def surface(tensor: Any, geometry: Geometry = "2d") -> Texture:
    """A surface of a tensor, laid out as for `texture`."""
    d = _describe(tensor, geometry)
    d.surface = 1
    return Texture(tensor, d)
