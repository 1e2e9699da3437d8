"""What the kernels of the short convolution share: rows of a strided tensor one after the other, states, taps, windows.

A window holds a channel's last W - 1 inputs in fp32, the oldest first. States are `[N, D, W]`, contiguous: a thread's channels are one run.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102 (conditions of compile time and of run time do not mix)

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from .channels import floats, load, size, store, to_words, word_count
from .ptx import asm, fma
from .stream import sequence


@cute.jit
def place(mX: cute.Tensor, packed: cutlass.Constexpr, token: Int32, c: Int32):
    """Address of channel c of a token of the flat stream, and the token at which its batch row ends."""
    t, row = token, Int32(0)
    if const_expr(not packed):
        row = token // Int32(mX.shape[1])
        t = token - row * Int32(mX.shape[1])
    element = Int64(row) * Int64(mX.stride[0]) + Int64(t) * Int64(mX.stride[1]) + Int64(c)
    return mX.iterator.toint() + element * size(mX.element_type), (row + 1) * Int32(mX.shape[1])


def given(*tensors):
    """Those that are there."""
    return [m for m in tensors if m is not None]


def rows_at(tensors, packed: bool, token, c):
    """(addresses, place): where the rows of `token` lie in each tensor; the token and the end of its batch row."""
    mark = cute.make_rmem_tensor((len(tensors),), Int64)
    at = cute.make_rmem_tensor((2,), Int32)
    at[0] = token
    for i, mX in enumerate(tensors):
        mark[i], at[1] = place(mX, packed, token, c)
    if packed:
        at[1] = Int32(2**31 - 1)
    return mark, at


def fetch(rX, slot: int, mark, ahead: int, vector: int, tensors) -> None:
    """The rows `ahead` of `mark`, in the same batch row, into `rX[tensor, word, slot]`."""
    for i, mX in enumerate(tensors):
        for j, w in enumerate(load(mark[i] + ahead * step(mX), vector, mX.element_type)):
            rX[i, j, slot] = w


def forward(mark, at, rows: int, tensors) -> None:
    """`rows` tokens on, in the same batch row."""
    at[0] = at[0] + rows
    for i, mX in enumerate(tensors):
        mark[i] = mark[i] + rows * step(mX)


@cute.jit
def read(
    rX, slot: cutlass.Constexpr, mark, at, limit: Int32, vector: cutlass.Constexpr, mX: cute.Tensor,
    mMore: cute.Tensor | None = None,
):  # fmt: skip
    """The rows at `mark` into `rX[tensor, word, slot]`, and on to the next token before `limit`, wherever it lies."""
    tensors = given(mX, mMore)
    fetch(rX, slot, mark, 0, vector, tensors)
    if at[0] + 1 < limit:
        forward(mark, at, 1, tensors)
        if at[0] == at[1]:
            at[1] = at[1] + Int32(mX.shape[1])
            for i in cutlass.range_constexpr(len(tensors)):
                mark[i] = mark[i] + jump(tensors[i])


@cute.jit
def refill(
    rX, first: cutlass.Constexpr, count: cutlass.Constexpr, mark, at, limit: Int32, vector: cutlass.Constexpr, mX: cute.Tensor,
    mMore: cute.Tensor | None = None,
):  # fmt: skip
    """`read` for `count` slots from `first` on; at once where the rows are all in one batch row."""
    if at[0] + count < cutlass.min(limit, at[1]):
        tensors = given(mX, mMore)
        for j in cutlass.range_constexpr(count):
            fetch(rX, first + j, mark, j, vector, tensors)
        forward(mark, at, count, tensors)
    else:
        for j in cutlass.range_constexpr(count):
            read(rX, first + j, mark, at, limit, vector, mX, mMore)


def step(mX):
    """Bytes from a row to the next one."""
    return Int64(mX.stride[1]) * size(mX.element_type)


def jump(mX):
    """Bytes from where a batch row ends to where the next one begins."""
    return Int64(mX.stride[0]) * size(mX.element_type) - Int64(mX.shape[1]) * step(mX)


def row_buffer(tensors, rows: int, vector: int):
    """Registers for `rows` rows of each tensor: `[tensor, word, row]`."""
    words = max(word_count(vector, m.element_type) for m in tensors)
    return cute.make_rmem_tensor((len(tensors), words, rows), Uint32)


def row(rX, tensor: int, slot: int, vector: int, dtype):
    """A row in fp32."""
    return floats([rX[tensor, j, slot] for j in range(word_count(vector, dtype))], vector, dtype)


# ---- parameters --------------------------------------------------------------------------------------------------------------------
def whole(n: int) -> int:
    """Elements an access where runs of n elements lie one after the other from an aligned start."""
    return n & -n


def load_taps(mWeight, c, vector: int, width: int):
    """`rW[v, w]`: the weight's rows c .. c + vector - 1 in fp32."""
    dtype = mWeight.element_type
    address = mWeight.iterator.toint() + Int64(c) * (width * size(dtype))
    values = floats(load(address, vector * width, dtype, whole(vector * width)), vector * width, dtype)
    rW = cute.make_rmem_tensor((vector, width), Float32)
    for v in range(vector):
        for w in range(width):
            rW[v, w] = values[v * width + w]
    return rW


def load_bias(mBias, c, vector: int):
    """The bias of the thread's channels in fp32; None without one."""
    if mBias is None:
        return None
    dtype = mBias.element_type
    values = floats(load(mBias.iterator.toint() + Int64(c) * size(dtype), vector, dtype), vector, dtype)
    rB = cute.make_rmem_tensor((vector,), Float32)
    for v in range(vector):
        rB[v] = values[v]
    return rB


# ---- states and windows ------------------------------------------------------------------------------------------------------------
def state_address(mState, n, c, width: int):
    """Address of channel c of state n."""
    element = (Int64(n) * Int64(mState.shape[1]) + Int64(c)) * width
    return mState.iterator.toint() + element * size(mState.element_type)


def load_state(mState, n, c, vector: int, width: int):
    """State n of the thread's channels in fp32: element `v * width + w`."""
    dtype = mState.element_type
    count = vector * width
    return floats(load(state_address(mState, n, c, width), count, dtype, whole(count)), count, dtype)


def store_state(rOut, mState, n, c) -> None:
    """`rOut[v, w]` as the thread's channels of state n."""
    vector, width = rOut.shape
    values = [rOut[v, w] for v in range(vector) for w in range(width)]
    dtype = mState.element_type
    store(state_address(mState, n, c, width), to_words(values, dtype), len(values), dtype, whole(len(values)))


def open_window(rH, mInit, n, c) -> None:
    """The window before a sequence's first token: the newest inputs of its initial state, or zeros."""
    vector, history = rH.shape
    if mInit is None:
        for v in range(vector):
            for j in range(history):
                # Not to be computed ahead of the branch and chosen by it: the window would be there twice.
                rH[v, j] = asm("mov.b32 $0, 0;", [Float32], [])
        return
    values = load_state(mInit, n, c, vector, history + 1)
    for v in range(vector):
        for j in range(history):
            rH[v, j] = values[v * (history + 1) + j + 1]


def shift(rH, x) -> None:
    """A token's inputs become the newest of the window."""
    vector, history = rH.shape
    for v in range(vector):
        for j in range(history - 1):
            rH[v, j] = rH[v, j + 1]
        rH[v, history - 1] = x[v]


def convolve(rW, rH, x, rB):
    """sum_w weight[w] x[t - W + 1 + w] + bias of the thread's channels; summed from the oldest input to the newest, then the bias."""
    vector, width = rW.shape
    sums = []
    for v in range(vector):
        taps = [*(rH[v, j] for j in range(width - 1)), x[v]]
        total = taps[0] * rW[v, 0]
        for w in range(1, width):
            total = fma(taps[w], rW[v, w], total)
        sums.append(total if rB is None else total + rB[v])
    return sums


@cute.jit
def last_inputs(
    rOut, mX: cute.Tensor, mInit: cute.Tensor | None, mBounds: cute.Tensor | None, n: Int32, c: Int32,
    vector: cutlass.Constexpr, width: cutlass.Constexpr,
):  # fmt: skip
    """The last W inputs of sequence n into `rOut[v, w]` in fp32: tokens, then its initial state, before that 0."""
    first, end = sequence(mBounds, Int32(mX.shape[1]), n)
    length = end - first
    rOut.fill(0.0)
    if const_expr(mInit is not None):
        if length < width:
            state = load_state(mInit, n, c, vector, width)
            for k in cutlass.range_constexpr(width):
                if length == k:
                    for v in cutlass.range_constexpr(vector):
                        for w in cutlass.range_constexpr(width - k):
                            rOut[v, w] = state[v * width + w + k]
    for w in cutlass.range_constexpr(width):
        token = end - width + w
        if token >= first:
            address, _ = place(mX, mBounds is not None, token, c)
            x = floats(load(address, vector, mX.element_type), vector, mX.element_type)
            for v in cutlass.range_constexpr(vector):
                rOut[v, w] = x[v]
