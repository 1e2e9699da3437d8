"""A kernel for tests of the runtime: y = factor x, launched with `(x, y, shift)` as y = factor x + shift."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 128


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, shift: cutlass.Float32, stream):
        blocks = (cute.size(x) + THREADS - 1) // THREADS
        self.kernel(x, y, shift).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, y: cute.Tensor, shift: cutlass.Float32):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < cute.size(x):
            y[i] = (x[i].to(cutlass.Float32) * self.factor + shift).to(y.element_type)


def compile(config):
    dtype = {"float32": cutlass.Float32, "bfloat16": cutlass.BFloat16}[config.dtype]
    n = cute.sym_int()
    x, y = (make_fake_compact_tensor(dtype, (n,)) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(Scale(config.factor), x, y, cutlass.Float32(0), stream, options="--enable-tvm-ffi")
