"""Short convolution, forward: depthwise, causal, over W = 2 to 4 tokens.

For every channel and token, inputs before a sequence from its initial state, or 0:

    z[t] = sum_w weight[w] x[t - W + 1 + w] + bias
    y[t] = silu(z[t]) + residual[t]        or z[t] + residual[t]
    final[n] = the last W inputs of sequence n

Roles: a thread owns `vector` neighbouring channels (16 bytes where x allows it) and a range of `tokens` tokens of the flat stream (all
batch rows, or all packed sequences, one after the other), down which it slides a window of W - 1 inputs in registers. `columns` threads
lie side by side along the channels, 128 / `columns` ranges below each other in a CTA. CTAs behind those write the final states, a thread
for `vector` channels of a sequence.

Pipeline: `rows` rows are in flight a thread; a batch of them is asked for as soon as its registers were used, the range's last row in place
of those behind it.
Timeline: W - 1 rows before the range and the first `rows` rows asked for | taps | window from the rows before | groups of `rows` rows.
Every row is looked at for a sequence's first token, where the window is replaced (never multiplied by zero: what stands in a neighbouring
sequence stays there).

Bytes: x once and y once; the rows before a range a second time, which the neighbouring CTA has just brought into L2.
Constraints: W 2 to 4; B T < 2^31; x, residual with contiguous channels, rows at multiples of `vector` elements; D a multiple of `vector`;
weight, bias, states, y contiguous; pointers of all but x and the residual at multiples of 16 bytes; `tokens` >= W - 1.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102 (conditions of compile time and of run time do not mix)

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...tile.channels import DTYPES, sigmoid, size, store, to_words
from ...tile.conv import (
    convolve,
    given,
    last_inputs,
    load_bias,
    load_taps,
    open_window,
    refill,
    row,
    row_buffer,
    rows_at,
    shift,
    store_state,
)
from ...tile.stream import before, enter
from ..config import ConvConfig

THREADS = 128


class ConvForward:
    """The kernel for one `ConvConfig`."""

    def __init__(self, config: ConvConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.packed = bool(config.cu_seqlens)
        self.ranges = THREADS // config.columns

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        initial_state: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        y: cute.Tensor,
        final_state: cute.Tensor | None,
        tokens: Int32,
        stream,
    ):
        """Launch: CTAs for ranges of `tokens` tokens, the channels' tiles of a range next to each other, then CTAs for final states."""
        batch, length, channels = y.shape
        tiles = (Int32(channels) + self.config.columns * self.config.vector - 1) // (
            self.config.columns * self.config.vector
        )
        ranges = (Int32(batch) * Int32(length) + tokens - 1) // tokens
        blocks = tiles * ((ranges + self.ranges - 1) // self.ranges)
        grid = Int64(blocks)
        if const_expr(final_state is not None):
            runs = Int64(final_state.shape[0]) * Int64(channels) // self.config.vector
            grid += (runs + THREADS - 1) // THREADS
        self.kernel(x, weight, bias, residual, initial_state, cu_seqlens, y, final_state, tokens, tiles, blocks).launch(
            grid=(Int32(grid), 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=self.config.blocks,
            preferred_smem_carveout=0,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mRes: cute.Tensor | None,
        mInit: cute.Tensor | None,
        mBounds: cute.Tensor | None,
        mY: cute.Tensor,
        mFinal: cute.Tensor | None,
        tokens: Int32,
        tiles: Int32,
        blocks: Int32,
    ):
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        columns = const_expr(self.config.columns)
        if block < blocks:
            c = (block % tiles * columns + tid % columns) * self.config.vector
            part = block // tiles * self.ranges
            if const_expr(self.ranges > 1):
                part += tid // columns
            # The last range may begin beyond 2^31.
            begin = Int64(part) * Int64(tokens)
            total = Int32(mX.shape[0]) * Int32(mX.shape[1])
            if c < Int32(mX.shape[2]):
                if begin < Int64(total):
                    f0 = Int32(begin)
                    f1 = f0 + cutlass.min(tokens, total - f0)
                    self.slide(mX, mWeight, mBias, mRes, mInit, mBounds, mY, f0, f1, c)
        if const_expr(mFinal is not None):
            if block >= blocks:
                self.final_state(mX, mInit, mBounds, mFinal, Int64(block - blocks) * THREADS + tid)

    @cute.jit
    def slide(self, mX, mWeight, mBias, mRes, mInit, mBounds, mY, f0: Int32, f1: Int32, c: Int32):
        """The tokens f0 .. f1 - 1 of the stream."""
        cfg = const_expr(self.config)
        history = const_expr(cfg.width - 1)
        tensors = given(mX, mRes)
        first = f0
        if f0 > 0:
            first = f0 - history
        mark, at = rows_at(tensors, self.packed, first, c)
        rBefore = row_buffer(tensors, history, cfg.vector)
        if f0 > 0:
            refill(rBefore, 0, history, mark, at, f1, cfg.vector, mX, mRes)
        rX = row_buffer(tensors, cfg.rows, cfg.vector)
        refill(rX, 0, cfg.rows, mark, at, f1, cfg.vector, mX, mRes)
        rW = load_taps(mWeight, c, cfg.vector, cfg.width)
        rB = load_bias(mBias, c, cfg.vector)
        rH = cute.make_rmem_tensor((cfg.vector, history), Float32)
        rH.fill(0.0)
        # walk: the sequence, its end, the next one's end.
        walk = cute.make_rmem_tensor((3,), Int32)
        walk[0], walk[1], walk[2] = before(mBounds, Int32(mX.shape[1]), first)
        if f0 > 0:
            for j in cutlass.range_constexpr(history):
                self.cross(rH, walk, mX, mInit, mBounds, first + j, f1, c)
                shift(rH, row(rBefore, 0, j, cfg.vector, self.dtype))

        row_bytes = Int64(mY.shape[2]) * size(self.dtype)
        out = mY.iterator.toint() + Int64(f0) * row_bytes + Int64(c) * size(self.dtype)
        for f in cutlass.range(f0, f1, cfg.rows, unroll=1):
            for i in cutlass.range_constexpr(cfg.rows):
                # A branch a row also keeps rows apart: interleaved they would take twice the registers.
                self.cross(rH, walk, mX, mInit, mBounds, f + i, f1, c)
                y = self.row(rX, i, rH, rW, rB, mRes)
                if f + i < f1:
                    store(out, y, cfg.vector, self.dtype)
                out += row_bytes
                if const_expr(i % cfg.batch == cfg.batch - 1):
                    refill(rX, i + 1 - cfg.batch, cfg.batch, mark, at, f1, cfg.vector, mX, mRes)

    @cute.jit
    def cross(self, rH, walk, mX, mInit, mBounds, token: Int32, f1: Int32, c: Int32):
        """At a sequence's first token: into the sequence."""
        if token >= walk[1]:
            if token < f1:
                walk[0], walk[1], walk[2] = enter(mBounds, Int32(mX.shape[1]), token, walk[0], walk[1], walk[2])
                if walk[0] >= 0:
                    open_window(rH, mInit, walk[0], c)

    def row(self, rX, i: int, rH, rW, rB, mRes):
        """y[t] = silu(sum_w weight[w] x[t - W + 1 + w] + bias) + residual[t], as words."""
        cfg = self.config
        x = row(rX, 0, i, cfg.vector, self.dtype)
        y = convolve(rW, rH, x, rB)
        if cfg.silu:
            y = [z * sigmoid(z) for z in y]
        if mRes is not None:
            y = [a + b for a, b in zip(y, row(rX, 1, i, cfg.vector, mRes.element_type), strict=True)]
        shift(rH, x)
        return to_words(y, self.dtype)

    @cute.jit
    def final_state(self, mX, mInit, mBounds, mFinal, run: Int64):
        """final[n]: tokens, then the initial state, before that 0."""
        cfg = const_expr(self.config)
        runs = Int64(mFinal.shape[1]) // cfg.vector
        if run < Int64(mFinal.shape[0]) * runs:
            n = Int32(run // runs)
            c = Int32(run % runs) * cfg.vector
            rOut = cute.make_rmem_tensor((cfg.vector, cfg.width), Float32)
            last_inputs(rOut, mX, mInit, mBounds, n, c, cfg.vector, cfg.width)
            store_state(rOut, mFinal, n, c)


def compile(config: ConvConfig):
    """The launch function: `(x, weight, bias, residual, initial_state, cu_seqlens, y, final_state, tokens)`, None where absent.

    Shapes `[B, T, D]`, `[D, W]`, `[D]`, x's, `[N, D, W]`, `[N + 1]`, x's, `[N, D, W]`; `tokens` a thread.
    """
    batch, length, channels, sequences, bounds = (cute.sym_int() for _ in range(5))

    def rows(dtype):
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(
            DTYPES[dtype], (batch, length, channels), stride=strides, assumed_align=size(DTYPES[dtype])
        )

    def flat(dtype, *shape):
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, extent * strides[0] if isinstance(extent, int) else cute.sym_int64())
        return make_fake_tensor(DTYPES[dtype], shape, stride=tuple(strides), assumed_align=16)

    state = (sequences, channels, config.width)
    integer = {"int32": Int32, "int64": Int64}
    return cute.compile(
        ConvForward(config),
        rows(config.dtype),
        flat(config.weight_dtype, channels, config.width),
        flat(config.bias_dtype, channels) if config.bias_dtype else None,
        rows(config.residual_dtype) if config.residual_dtype else None,
        flat(config.state_dtype, *state) if config.state_dtype else None,
        make_fake_tensor(integer[config.cu_seqlens], (bounds,), stride=(1,)) if config.cu_seqlens else None,
        rows(config.dtype),
        flat(config.dtype, *state) if config.final else None,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
