"""Short convolution, backward: gradients of x, weight, bias and initial state.

With z[t] = sum_w weight[w] x[t - W + 1 + w] + bias as in the forward pass, computed again, and s = 1 / (1 + e^-z):

    dz[t]      = dy[t] s (1 + z (1 - s))                 or dy[t] without SiLU
    dx[t]      = sum_w weight[w] dz[t + W - 1 - w]       over tokens of t's sequence
                 + dfinal[n, t - end + W]                for the last W tokens of sequence n, which ends at `end`
    dweight[w] = sum_t dz[t] x[t - W + 1 + w]            x before a sequence is its initial state
    dbias      = sum_t dz[t]
    dinit[n, j] = sum_{s < min(j, length)} weight[j - 1 - s] dz[s]  (s counts from the sequence's first token)
                 + dfinal[n, j - length]                 where the sequence is shorter than W

Roles: as in the forward kernel a thread slides down a range of the flat stream, `vector` channels wide. Beside the window of inputs it
keeps the sums of the last W - 1 tokens' dx, to which later tokens still add, and its range's dweight and dbias. dx of a token is written
W - 1 tokens later; the W - 1 tokens behind the range are visited for that alone. CTAs behind those write dinit, a thread for `vector`
channels of a sequence. A second kernel adds the ranges' dweight and dbias.

Pipeline and timeline: as in the forward kernel, with rows of dy and x in flight. A row near a sequence's first token or behind the range
masks what it adds; all others are straight code.

The sums of dweight and dbias are taken in a fixed order: down the range in a thread; then range r with r + 32, r + 64, ...; then those 32.

Bytes: x, dy and dx once; 2 (W - 1) rows of x and W - 1 of dy a range again, from L2; (W + 1) D fp32 numbers a range, written and read.
Constraints: those of the forward kernel; `tokens` >= W - 1.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102 (conditions of compile time and of run time do not mix)

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...tile.channels import DTYPES, floats, load, sigmoid, size, store, to_words
from ...tile.conv import (
    convolve,
    given,
    load_bias,
    load_state,
    load_taps,
    open_window,
    place,
    refill,
    row,
    row_buffer,
    rows_at,
    shift,
    store_state,
)
from ...tile.ptx import fma
from ...tile.stream import before, enter, sequence
from ..config import ConvBackwardConfig

THREADS = 128
COLUMNS, SLICES = 32, 32
"""The second kernel's CTA: sums of 32 neighbouring columns, each in 32 slices."""


class ConvBackward:
    """The kernels for one `ConvBackwardConfig`."""

    def __init__(self, config: ConvBackwardConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.packed = bool(config.cu_seqlens)
        self.ranges = THREADS // config.columns
        self.sums = config.dweight or config.dbias
        self.reads_x = config.silu or config.dweight
        self.slides = config.dx or self.sums
        self.sum_rows = config.width * config.dweight + config.dbias

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        dy: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        initial_state: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        dfinal: cute.Tensor | None,
        dx: cute.Tensor | None,
        partial: cute.Tensor | None,
        dweight: cute.Tensor | None,
        dbias: cute.Tensor | None,
        dinit: cute.Tensor | None,
        tokens: Int32,
        stream,
    ):
        """Launch: CTAs for ranges of `tokens` tokens and for initial states; then the sums over ranges."""
        cfg = const_expr(self.config)
        batch, length, channels = x.shape
        tiles = (Int32(channels) + cfg.columns * cfg.vector - 1) // (cfg.columns * cfg.vector)
        ranges = (Int32(batch) * Int32(length) + tokens - 1) // tokens
        blocks = Int32(0)
        if const_expr(self.slides):
            blocks = tiles * ((ranges + self.ranges - 1) // self.ranges)
        grid = Int64(blocks)
        if const_expr(dinit is not None):
            runs = Int64(dinit.shape[0]) * Int64(channels) // cfg.vector
            grid += (runs + THREADS - 1) // THREADS
        # Without tokens and sequences one CTA has nothing to do; the sums are zeros.
        grid = cutlass.max(grid, Int64(1))
        self.kernel(
            x, dy, weight, bias, initial_state, cu_seqlens, dfinal, dx, partial, dinit, tokens, tiles, blocks
        ).launch(
            grid=(Int32(grid), 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=cfg.blocks,
            preferred_smem_carveout=0,
        )  # fmt: skip
        if const_expr(self.sums):
            columns = Int32(channels) * self.sum_rows
            self.add_ranges(partial, dweight, dbias, ranges).launch(
                grid=((columns + COLUMNS - 1) // COLUMNS, 1, 1), block=(COLUMNS * SLICES, 1, 1), stream=stream
            )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mDy: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mInit: cute.Tensor | None,
        mBounds: cute.Tensor | None,
        mDfinal: cute.Tensor | None,
        mDx: cute.Tensor | None,
        mPartial: cute.Tensor | None,
        mDinit: cute.Tensor | None,
        tokens: Int32,
        tiles: Int32,
        blocks: Int32,
    ):
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        columns = const_expr(self.config.columns)
        if const_expr(self.slides):
            if block < blocks:
                c = (block % tiles * columns + tid % columns) * self.config.vector
                part = block // tiles * self.ranges
                if const_expr(self.ranges > 1):
                    part += tid // columns
                begin = Int64(part) * Int64(tokens)
                total = Int32(mX.shape[0]) * Int32(mX.shape[1])
                if c < Int32(mX.shape[2]):
                    if begin < Int64(total):
                        f0 = Int32(begin)
                        f1 = f0 + cutlass.min(tokens, total - f0)
                        self.slide(mX, mDy, mWeight, mBias, mInit, mBounds, mDfinal, mDx, mPartial, f0, f1, c, part)
        if const_expr(mDinit is not None):
            if block >= blocks:
                run = Int64(block - blocks) * THREADS + tid
                self.initial_state(mX, mDy, mWeight, mBias, mInit, mBounds, mDfinal, mDinit, run)

    @cute.jit
    def slide(
        self,
        mX,
        mDy,
        mWeight,
        mBias,
        mInit,
        mBounds,
        mDfinal,
        mDx,
        mPartial,
        f0: Int32,
        f1: Int32,
        c: Int32,
        part: Int32,
    ):
        """The tokens f0 .. f1 - 1 of the stream, and the W - 1 behind them."""
        cfg = const_expr(self.config)
        history = const_expr(cfg.width - 1)
        total = Int32(mX.shape[0]) * Int32(mX.shape[1])
        length = Int32(mX.shape[1])
        end = cutlass.min(f1 + history, total)
        first = f0
        if f0 > 0:
            first = f0 - history
        tensors = given(mDy, mX if self.reads_x else None)
        mark, at = rows_at(tensors, self.packed, first, c)
        rBefore = row_buffer(tensors, history, cfg.vector)
        if f0 > 0:
            refill(rBefore, 0, history, mark, at, end, cfg.vector, *tensors)
        rX = row_buffer(tensors, cfg.rows, cfg.vector)
        refill(rX, 0, cfg.rows, mark, at, end, cfg.vector, *tensors)
        rW = load_taps(mWeight, c, cfg.vector, cfg.width)
        rB = load_bias(mBias, c, cfg.vector)
        rH = cute.make_rmem_tensor((cfg.vector, history), Float32)
        # dx of the last tokens, the newest first; dweight and dbias of the range.
        rDx = cute.make_rmem_tensor((cfg.vector, cfg.width), Float32)
        rSum = cute.make_rmem_tensor((cfg.vector, cfg.width + 1), Float32)
        rH.fill(0.0)
        rDx.fill(0.0)
        rSum.fill(0.0)
        # walk: the sequence, its end, the next one's; since: tokens since its first, or many.
        walk = cute.make_rmem_tensor((4,), Int32)
        walk[0], walk[1], walk[2] = before(mBounds, length, first)
        walk[3] = Int32(history)
        if f0 > 0:
            for j in cutlass.range_constexpr(history):
                self.cross(rH, walk, mX, mInit, mBounds, first + j, end, c)
                if const_expr(self.reads_x):
                    shift(rH, row(rBefore, 1, j, cfg.vector, self.dtype))

        row_bytes = Int64(mX.shape[2]) * size(self.dtype)
        out = Int64(0)
        if const_expr(mDx is not None):
            out = mDx.iterator.toint() + (Int64(f0) - history) * row_bytes + Int64(c) * size(self.dtype)
        for f in cutlass.range(f0, f1 + history, cfg.rows, unroll=1):
            for i in cutlass.range_constexpr(cfg.rows):
                # A branch a row also keeps rows apart: interleaved they would take twice the registers.
                token = f + i
                self.cross(rH, walk, mX, mInit, mBounds, token, end, c)
                dz = self.gradient(rX, i, rH, rW, rB)
                plain = walk[3] >= history
                if token >= f1:
                    plain = False
                if plain:
                    self.add_parameters(rX, i, rH, rSum, dz)
                    self.add_inputs(rDx, rW, dz)
                else:
                    if token < f1:
                        self.add_parameters(rX, i, rH, rSum, dz)
                    self.add_inputs_near(rDx, rW, dz, walk[3])
                walk[3] = walk[3] + 1
                if const_expr(mDfinal is not None):
                    if token < end and walk[0] >= 0:
                        self.add_final(rDx, mDfinal, walk, token, c)
                self.next_token(rX, i, rH)
                if const_expr(mDx is not None):
                    words = self.finished(rDx)
                    if Uint32(token - history - f0) < Uint32(f1 - f0):
                        store(out, words, cfg.vector, self.dtype)
                    out += row_bytes
                if const_expr(i % cfg.batch == cfg.batch - 1):
                    refill(rX, i + 1 - cfg.batch, cfg.batch, mark, at, end, cfg.vector, *tensors)
        if const_expr(mPartial is not None):
            self.write_sums(rSum, mPartial, part, c)

    @cute.jit
    def cross(self, rH, walk, mX, mInit, mBounds, token: Int32, end: Int32, c: Int32):
        """At a sequence's first token: into the sequence. At the last one's end: as if another followed, which adds to no earlier token."""
        if token >= walk[1]:
            walk[3] = Int32(0)
            if token < end:
                walk[0], walk[1], walk[2] = enter(mBounds, Int32(mX.shape[1]), token, walk[0], walk[1], walk[2])
                if const_expr(self.reads_x):
                    if walk[0] >= 0:
                        open_window(rH, mInit, walk[0], c)

    # ---- one token -------------------------------------------------------------------------------------------------------------------
    def gradient(self, rX, i: int, rH, rW, rB):
        """dz[t] = dy[t] s (1 + z (1 - s))."""
        cfg = self.config
        dy = row(rX, 0, i, cfg.vector, self.dtype)
        if not cfg.silu:
            return dy
        return silu_gradient(dy, convolve(rW, rH, row(rX, 1, i, cfg.vector, self.dtype), rB))

    def add_parameters(self, rX, i: int, rH, rSum, dz) -> None:
        """dweight[w] += dz[t] x[t - W + 1 + w];  dbias += dz[t]."""
        cfg = self.config
        if cfg.dweight:
            x = row(rX, 1, i, cfg.vector, self.dtype)
            for v in range(cfg.vector):
                for w in range(cfg.width - 1):
                    rSum[v, w] = fma(dz[v], rH[v, w], rSum[v, w])
                rSum[v, cfg.width - 1] = fma(dz[v], x[v], rSum[v, cfg.width - 1])
        if cfg.dbias:
            for v in range(cfg.vector):
                rSum[v, cfg.width] = rSum[v, cfg.width] + dz[v]

    def add_inputs(self, rDx, rW, dz) -> None:
        """dx[t - j] += weight[W - 1 - j] dz[t] for the last W tokens, all of one sequence."""
        width = self.config.width
        if not self.config.dx:
            return
        for v in range(self.config.vector):
            for j in range(width - 1, 0, -1):
                rDx[v, j] = fma(rW[v, width - 1 - j], dz[v], rDx[v, j - 1])
            rDx[v, 0] = rW[v, width - 1] * dz[v]

    @cute.jit
    def add_inputs_near(self, rDx, rW, dz, since: Int32):
        """The same where the sequence began `since` tokens ago: what is older is another sequence's."""
        width = const_expr(self.config.width)
        if const_expr(self.config.dx):
            self.add_nothing(rDx)
            for j in cutlass.range_constexpr(width):
                if since >= j:
                    for v in cutlass.range_constexpr(self.config.vector):
                        if const_expr(j == 0):
                            rDx[v, j] = rW[v, width - 1] * dz[v]
                        else:
                            rDx[v, j] = fma(rW[v, width - 1 - j], dz[v], rDx[v, j])

    def add_nothing(self, rDx) -> None:
        """One token on, whose own dx is still 0."""
        for v in range(self.config.vector):
            for j in range(self.config.width - 1, 0, -1):
                rDx[v, j] = rDx[v, j - 1]
            rDx[v, 0] = Float32(0.0)

    @cute.jit
    def add_final(self, rDx, mDfinal, walk, token: Int32, c: Int32):
        """dx[t] += dfinal[n, t - end + W]."""
        cfg = const_expr(self.config)
        if const_expr(cfg.dx):
            column = token - walk[1] + cfg.width
            if column >= 0:
                state = load_state(mDfinal, walk[0], c, cfg.vector, cfg.width)
                for w in cutlass.range_constexpr(cfg.width):
                    if column == w:
                        for v in cutlass.range_constexpr(cfg.vector):
                            rDx[v, 0] = rDx[v, 0] + state[v * cfg.width + w]

    def next_token(self, rX, i: int, rH) -> None:
        if self.reads_x:
            shift(rH, row(rX, 1, i, self.config.vector, self.dtype))

    def finished(self, rDx):
        """dx of the token W - 1 tokens ago, to which nothing more is added, as words."""
        cfg = self.config
        return to_words([rDx[v, cfg.width - 1] for v in range(cfg.vector)], self.dtype)

    def write_sums(self, rSum, mPartial, part, c) -> None:
        """The range's rows of `partial` [ranges, W + 1, D]; only the rows that are wanted exist."""
        cfg = self.config
        rows = [*range(cfg.width)] * cfg.dweight + [cfg.width] * cfg.dbias
        for i, w in enumerate(rows):
            element = (Int64(part) * len(rows) + i) * Int64(mPartial.shape[2]) + Int64(c)
            words = to_words([rSum[v, w] for v in range(cfg.vector)], Float32)
            store(mPartial.iterator.toint() + element * 4, words, cfg.vector, Float32)

    # ---- initial states --------------------------------------------------------------------------------------------------------------
    @cute.jit
    def initial_state(self, mX, mDy, mWeight, mBias, mInit, mBounds, mDfinal, mDinit, run: Int64):
        """dinit[n, j]: from the first W - 1 tokens' dz, and from the final state where the sequence is shorter than W."""
        cfg = const_expr(self.config)
        runs = Int64(mDinit.shape[1]) // cfg.vector
        if run < Int64(mDinit.shape[0]) * runs:
            n = Int32(run // runs)
            c = Int32(run % runs) * cfg.vector
            first, end = sequence(mBounds, Int32(mX.shape[1]), n)
            rW = load_taps(mWeight, c, cfg.vector, cfg.width)
            rB = load_bias(mBias, c, cfg.vector)
            rH = cute.make_rmem_tensor((cfg.vector, cfg.width - 1), Float32)
            rD = cute.make_rmem_tensor((cfg.vector, cfg.width), Float32)
            rD.fill(0.0)
            open_window(rH, mInit, n, c)
            for s in cutlass.range_constexpr(cfg.width - 1):
                if first + s < end:
                    dz = self.one_row(mDy, first + s, c)
                    if const_expr(cfg.silu):
                        x = self.one_row(mX, first + s, c)
                        dz = silu_gradient(dz, convolve(rW, rH, x, rB))
                        shift(rH, x)
                    for v in cutlass.range_constexpr(cfg.vector):
                        for j in cutlass.range_constexpr(s + 1, cfg.width):
                            rD[v, j] = fma(rW[v, j - 1 - s], dz[v], rD[v, j])
            if const_expr(mDfinal is not None):
                if end - first < cfg.width:
                    state = load_state(mDfinal, n, c, cfg.vector, cfg.width)
                    for k in cutlass.range_constexpr(cfg.width):
                        if end - first == k:
                            for v in cutlass.range_constexpr(cfg.vector):
                                for j in cutlass.range_constexpr(k, cfg.width):
                                    rD[v, j] = rD[v, j] + state[v * cfg.width + j - k]
            store_state(rD, mDinit, n, c)

    def one_row(self, mT, token, c):
        address, _ = place(mT, self.packed, token, c)
        return floats(load(address, self.config.vector, self.dtype), self.config.vector, self.dtype)

    # ---- sums over ranges ------------------------------------------------------------------------------------------------------------
    @cute.kernel
    def add_ranges(self, mPartial: cute.Tensor, mDw: cute.Tensor | None, mDb: cute.Tensor | None, ranges: Int32):
        """dweight and dbias: slice s of a column adds ranges s, s + 32, ...; a warp then adds a column's slices."""
        cfg = const_expr(self.config)
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        lane, slice_ = tid % COLUMNS, tid // COLUMNS
        channels = Int32(mPartial.shape[2])
        columns = channels * self.sum_rows
        smem = cutlass.memory.SmemAllocator()
        sSum = smem.allocate_tensor(Float32, cute.make_layout((SLICES, COLUMNS), stride=(COLUMNS + 1, 1)), 16)
        total = Float32(0.0)
        column = block * COLUMNS + lane
        if column < columns:
            address = mPartial.iterator.toint() + (Int64(slice_) * Int64(columns) + Int64(column)) * 4
            for _ in cutlass.range(slice_, ranges, SLICES, unroll=8):
                total += floats(load(address, 1, Float32), 1, Float32)[0]
                address += Int64(columns) * (4 * SLICES)
        sSum[slice_, lane] = total
        cute.arch.sync_threads()
        column = block * COLUMNS + slice_
        total = cute.arch.warp_reduction_sum(sSum[lane, slice_])
        if lane == 0:
            if column < columns:
                w, c = column // channels, column % channels
                if const_expr(cfg.dweight):
                    if w < cfg.width:
                        mDw[c, w] = total.to(mDw.element_type)
                if const_expr(cfg.dbias):
                    if w == self.sum_rows - 1:
                        mDb[c] = total.to(mDb.element_type)


def silu_gradient(dy, z):
    """dy s (1 + z (1 - s)), s = 1 / (1 + e^-z)."""
    found = []
    for a, b in zip(dy, z, strict=True):
        s = sigmoid(b)
        found.append(a * s * fma(b, Float32(1.0) - s, 1.0))
    return found


def compile(config: ConvBackwardConfig):
    """The launch function: `(x, dy, weight, bias, initial_state, cu_seqlens, dfinal, dx, partial, dweight, dbias, dinit, tokens)`.

    None where absent. Shapes as in the forward kernel; `partial` fp32 `[ceil(B T / tokens), rows, D]` with W rows for dweight and one for
    dbias. dweight, dbias and dinit have the dtypes of weight, bias and initial state.
    """
    batch, length, channels, sequences, bounds, ranges = (cute.sym_int() for _ in range(6))
    kernel = ConvBackward(config)

    def rows(dtype):
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(
            DTYPES[dtype], (batch, length, channels), stride=strides, assumed_align=size(DTYPES[dtype])
        )

    def flat(wanted, dtype, *shape):
        if not wanted:
            return None
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, extent * strides[0] if isinstance(extent, int) else cute.sym_int64())
        return make_fake_tensor(DTYPES[dtype], shape, stride=tuple(strides), assumed_align=16)

    state = (sequences, channels, config.width)
    integer = {"int32": Int32, "int64": Int64}
    return cute.compile(
        kernel,
        rows(config.dtype),
        rows(config.dtype),
        flat(True, config.weight_dtype, channels, config.width),
        flat(config.bias_dtype, config.bias_dtype, channels),
        flat(config.state_dtype, config.state_dtype, *state),
        make_fake_tensor(integer[config.cu_seqlens], (bounds,), stride=(1,)) if config.cu_seqlens else None,
        flat(config.grad_state, config.dtype, *state),
        rows(config.dtype) if config.dx else None,
        flat(kernel.sums, "float32", ranges, kernel.sum_rows, channels),
        flat(config.dweight, config.weight_dtype, channels, config.width),
        flat(config.dbias, config.bias_dtype, channels),
        flat(config.dstate, config.state_dtype, *state),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
