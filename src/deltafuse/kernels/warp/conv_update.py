"""Short convolution, one more token of every sequence; the cache of its last W inputs moves on in place.

    cache[n] <- [cache[n, :, 1:], x[n]];   y[n] = silu(sum_w weight[w] cache[n, :, w] + bias) + residual[n]

x itself meets the last tap, not the cache's rounding of it. Sums are taken in the forward kernel's order: both give the same bits.

Roles: a thread owns `vector` channels, whose caches are one run of 16 bytes where W and the dtype allow it, and `span` sequences; `columns`
threads lie side by side along the channels.
Pipeline: none beside the `rows` sequences that a thread asks for at once.
Timeline: taps | groups of `rows` sequences: all loads, then sums and stores.
Bytes: cache read and written, x, y; the weight once a thread, from L2.
Constraints: W 2 to 4; cache [N, D, W] with the last two axes contiguous, its sequences at multiples of `vector` elements, or of 16 bytes
where `whole`; x, residual [N, D] with contiguous channels, rows at multiples of `vector` elements; D a multiple of `vector`; y, weight,
bias contiguous.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102 (conditions of compile time and of run time do not mix)

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...tile.channels import DTYPES, floats, load, sigmoid, size, store, to_words
from ...tile.conv import convolve, load_bias, load_taps, whole
from ..config import ConvUpdateConfig

THREADS = 128


class ConvUpdate:
    """The kernel for one `ConvUpdateConfig`."""

    def __init__(self, config: ConvUpdateConfig) -> None:
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.cache_dtype = DTYPES[config.cache_dtype]
        self.lines = THREADS // config.columns
        self.step = whole(config.vector * config.width) if config.whole else config.vector

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        cache: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        y: cute.Tensor,
        span: Int32,
        stream,
    ):
        """Launch: tiles of the channels side by side, `span` sequences a thread."""
        count, channels = y.shape
        tile = const_expr(self.config.columns * self.config.vector)
        tiles = (Int32(channels) + tile - 1) // tile
        lines = (Int32(count) + span - 1) // span
        blocks = tiles * ((lines + self.lines - 1) // self.lines)
        self.kernel(x, cache, weight, bias, residual, y, span, tiles).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mCache: cute.Tensor,
        mWeight: cute.Tensor,
        mBias: cute.Tensor | None,
        mRes: cute.Tensor | None,
        mY: cute.Tensor,
        span: Int32,
        tiles: Int32,
    ):
        cfg = const_expr(self.config)
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        c = (block % tiles * cfg.columns + tid % cfg.columns) * cfg.vector
        line = block // tiles * self.lines
        if const_expr(self.lines > 1):
            line += tid // cfg.columns
        begin = Int64(line) * Int64(span)
        count = Int32(mX.shape[0])
        if c < Int32(mX.shape[1]):
            if begin < Int64(count):
                first = Int32(begin)
                rW = load_taps(mWeight, c, cfg.vector, cfg.width)
                rB = load_bias(mBias, c, cfg.vector)
                last = first + cutlass.min(span, count - first)
                for n in cutlass.range(first, last, cfg.rows, unroll=1):
                    self.group(mX, mCache, mRes, mY, rW, rB, n, last, c)

    @cute.jit
    def group(self, mX, mCache, mRes, mY, rW, rB, n: Int32, last: Int32, c: Int32):
        """Sequences n .. n + rows - 1 before `last`: the last one is loaded in place of those behind it."""
        cfg = const_expr(self.config)
        caches, rows, residuals = [], [], []
        for i in cutlass.range_constexpr(cfg.rows):
            at = cutlass.min(n + i, last - 1)
            caches.append(
                load(
                    self.address(mCache, at, c * cfg.width),
                    cfg.vector * cfg.width,
                    self.cache_dtype,
                    self.step,
                    constant=False,
                )
            )
            rows.append(load(self.address(mX, at, c), cfg.vector, self.dtype))
            if const_expr(mRes is not None):
                residuals.append(load(self.address(mRes, at, c), cfg.vector, mRes.element_type))
        for i in cutlass.range_constexpr(cfg.rows):
            if n + i < last:
                state = floats(caches[i], cfg.vector * cfg.width, self.cache_dtype)
                x = floats(rows[i], cfg.vector, self.dtype)
                residual = None
                if const_expr(mRes is not None):
                    residual = floats(residuals[i], cfg.vector, mRes.element_type)
                self.token(mCache, mY, rW, rB, state, x, residual, n + i, c)

    def token(self, mCache, mY, rW, rB, state, x, residual, n, c) -> None:
        """y[n], and the cache moved on."""
        cfg = self.config
        window = Window(state, cfg.vector, cfg.width)
        y = convolve(rW, window, x, rB)
        if cfg.silu:
            y = [z * sigmoid(z) for z in y]
        if residual is not None:
            y = [a + b for a, b in zip(y, residual, strict=True)]
        store(self.address(mY, n, c), to_words(y, self.dtype), cfg.vector, self.dtype)
        moved = [new for v in range(cfg.vector) for new in (*(window[v, j] for j in range(cfg.width - 1)), x[v])]
        words = to_words(moved, self.cache_dtype)
        store(self.address(mCache, n, c * cfg.width), words, len(moved), self.cache_dtype, self.step)

    def address(self, mT, n, element):
        """Address of an element of row n."""
        return mT.iterator.toint() + (Int64(n) * Int64(mT.stride[0]) + Int64(element)) * size(mT.element_type)


class Window:
    """The newest W - 1 inputs of a state, as the forward kernel's window."""

    def __init__(self, state, vector: int, width: int) -> None:
        self.state, self.width = state, width
        self.shape = (vector, width - 1)

    def __getitem__(self, place):
        v, j = place
        return self.state[v * self.width + j + 1]


def compile(config: ConvUpdateConfig):
    """The launch function: `(x, cache, weight, bias, residual, y, span)`, None where absent; `span` sequences a thread."""
    count, channels = cute.sym_int(), cute.sym_int()

    def rows(dtype):
        kind = DTYPES[dtype]
        return make_fake_tensor(kind, (count, channels), stride=(cute.sym_int64(), 1), assumed_align=size(kind))

    cache = DTYPES[config.cache_dtype]
    weight = DTYPES[config.weight_dtype]
    width = config.width
    return cute.compile(
        ConvUpdate(config),
        rows(config.dtype),
        make_fake_tensor(
            cache, (count, channels, width), stride=(cute.sym_int64(), width, 1), assumed_align=size(cache)
        ),
        make_fake_tensor(weight, (channels, width), stride=(width, 1), assumed_align=16),
        make_fake_tensor(DTYPES[config.bias_dtype], (channels,), stride=(1,), assumed_align=16)
        if config.bias_dtype
        else None,
        rows(config.residual_dtype) if config.residual_dtype else None,
        rows(config.dtype),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
