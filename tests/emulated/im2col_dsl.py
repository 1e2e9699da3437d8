"""A CuTe DSL function that makes a tensor map of im2col. Imported after `ptxemu.setup`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

TILE = (64, 32)


@cute.kernel
def _kernel(atom: cute.CopyAtom) -> None:
    cpasync.prefetch_descriptor(atom)


def compiled(x: torch.Tensor, lower: Sequence[int], upper: Sequence[int], step: Sequence[int]) -> tuple[Any, Any]:
    """A function and its argument, whose launch takes one parameter: the map of 64 pixels and 32 channels of x, N {D} {H} W C.

    lower, upper, step: along {D} {H} W.
    """
    *pixels, channels = x.shape
    *strides, _ = x.stride()
    shape, stride = tuple(reversed(pixels)), tuple(reversed(strides))
    lower_, upper_, step_ = (tuple(reversed(v)) for v in (lower, upper, step))
    zeros, ones = (0,) * len(lower), (1,) * len(lower)

    @cute.jit
    def host(tensor: cute.Tensor) -> None:
        view = cute.make_tensor(tensor.iterator, cute.make_layout((shape, channels), stride=(stride, 1)))
        tile = cute.make_layout(TILE, stride=(TILE[1], 1))
        swizzled = cute.make_composed_layout(cute.make_swizzle(2, 4, 3), 0, tile)
        op = cpasync.CopyBulkTensorIm2ColG2SOp()
        info = cpasync.make_im2col_tma_atom(op, view, swizzled, TILE, lower_, upper_, zeros, zeros, step_, zeros, ones)
        _kernel(info[0]).launch(grid=(1, 1, 1), block=(32, 1, 1))

    tensor = from_dlpack(x, assumed_align=16)
    return cute.compile(host, tensor), tensor
