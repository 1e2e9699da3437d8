"""What a kernel is compiled for in place of tensors: fake ones, and the DSL's names of dtypes."""

# mypy: ignore-errors

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "int32": Int32, "int64": Int64}
"""Of the names that configs have."""


def dense(dtype, shape):
    """A contiguous tensor at a multiple of 16 bytes."""
    return make_fake_compact_tensor(dtype, shape, stride_order=tuple(reversed(range(len(shape)))), assumed_align=16)


def row_major(dtype, shape, static=()):
    """A tensor with a contiguous last dimension, rows at multiples of 16 bytes; the strides named in `static` follow from the shape."""
    width = 16 * 8 // dtype.width
    strides = [cute.sym_int64(divisibility=width) for _ in shape[:-1]] + [1]
    size = 1
    for i in reversed(range(len(shape))):
        if i in static:
            strides[i] = size
        size = size * shape[i] if isinstance(shape[i], int) and isinstance(size, int) else None
    return make_fake_tensor(dtype, shape, stride=tuple(strides), assumed_align=16)
