"""Inverse of a unit lower triangular 64x64 matrix in shared memory, by 128 threads, in fp32.

    (I + L)^-1 of 16x16 diagonal blocks        forward substitution, one warp a block
    [A 0; L B]^-1 = [A' 0; -B' L A' B']         twice: from 16 to 32 rows, from 32 to 64 (A', B' the inverses of A, B)

The second step's products take the tensor cores with operands split in two tf32 numbers (`mma_3xtf32`), so that they are as good as fp32's
where elements of the inverse are large (|beta| up to 2, keys without norm).

Both matrices are fp32 with rows `STRIDE` floats apart: two columns of a row are one vector, and B fragments touch every bank once.
Contractions run in the order that lets accumulators pass for A fragments: slot t of a tf32 step is column 2t, slot t + 4 column 2t + 1.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .mma import mma_3xtf32, split_tf32
from .ptx import fma, load_shared, select, store_shared

STRIDE = 68
BYTES = 64 * STRIDE * 4


def at(row, column):
    """Offset in bytes."""
    return (row * STRIDE + column) * 4


@cute.jit
def invert_block(sL, sM, warp, lane):
    """Diagonal block `warp` of M by forward substitution: lane j (and j + 16) has column j, m_i = [i = j] - sum_{k < i} L_ik m_k."""
    j = lane % 16
    block = at(16 * warp, 16 * warp)
    column = []
    for i in cutlass.range_constexpr(16):
        m = select(j == i, 1.0, 0.0)
        for k in cutlass.range_constexpr(0, i, 4):
            for x, value in enumerate(load_shared(sL + block, at(i, k), 4)):
                if cutlass.const_expr(k + x < i):
                    m = fma(-value, column[k + x], m)
        column.append(m)
    # Each half of the warp writes 8 rows, 4 apart (16 banks).
    half = lane // 16
    to = sM + block + at(4 * half, j)
    for i in cutlass.range_constexpr(8):
        row = i + i // 4 * 4
        store_shared(to, at(row, 0), [select(half, column[row + 4], column[row])])


def _load_a(address, row, column):
    """Split A fragment of rows row + r, row + r + 8 and 8 columns; `address` has the lane's (r, 2t)."""
    upper, lower = load_shared(address, at(row, column), 2), load_shared(address, at(row + 8, column), 2)
    return [split_tf32(x) for x in (upper[0], lower[0], upper[1], lower[1])]


def _load_b(address, row, column):
    """Split B fragment of 8 rows and columns column + r; `address` has the lane's (2t, r)."""
    return [split_tf32(load_shared(address, at(row + i, column), 1)[0]) for i in range(2)]


def _as_a(c):
    return [split_tf32(x) for x in (c[0], c[2], c[1], c[3])]


def _zeros():
    return [Float32(0.0)] * 4


def _store_minus(address, column, c):
    store_shared(address, at(0, column), [-c[0], -c[1]])
    store_shared(address, at(8, column), [-c[2], -c[3]])


def combine_16(sL, sM, warp, lane):
    """Blocks (1, 0) and (3, 2) of M, a warp for 8 columns of one: -(M_22 L_21) M_11."""
    r, t = lane // 4, lane % 4
    pair, part = warp // 2, warp % 2
    corner = at(32 * pair, 32 * pair)
    a = sM + corner + at(r, 2 * t)
    b = corner + at(2 * t, r)
    z = [_zeros(), _zeros()]
    for step in range(2):
        m = _load_a(a, 16, 16 + 8 * step)
        for n in range(2):
            z[n] = mma_3xtf32(m, _load_b(sL + b, 16 + 8 * step, 8 * n), z[n])
    y = _zeros()
    to = a + 8 * part * 4
    for step in range(2):
        y = mma_3xtf32(_as_a(z[step]), _load_b(sM + b + 8 * part * 4, 8 * step, 0), y)
    _store_minus(to + at(16, 0), 0, y)


@cute.jit
def combine_32(sL, sM, warp, lane):
    """Rows 32..63, columns 0..31 of M, a warp for 16 rows and 16 columns: -(M_B L_BA) M_A, without the products with blocks of zeros."""
    r, t = lane // 4, lane % 4
    row, half = warp // 2, warp % 2
    a = sM + at(32 + 16 * row + r, 32 + 2 * t)
    b = at(2 * t, r)
    rZ = cute.make_rmem_tensor((4, 4), Float32)
    rZ.fill(0.0)
    for k in cutlass.range(row + 1, unroll=1):
        for step in cutlass.range_constexpr(2):
            m = _load_a(a + k * 64, 0, 8 * step)
            for n in cutlass.range_constexpr(4):
                below = _load_b(sL + b + k * at(16, 0), 32 + 8 * step, 8 * n)
                z = mma_3xtf32(m, below, [rZ[i, n] for i in range(4)])
                for i in cutlass.range_constexpr(4):
                    rZ[i, n] = z[i]
    rY = cute.make_rmem_tensor((4, 2), Float32)
    rY.fill(0.0)
    from_m = sM + b + half * 64
    if half == 0:
        multiply_rows(rZ, rY, from_m, 0)
    multiply_rows(rZ, rY, from_m, 2)
    to = sM + at(32 + 16 * row + r, 16 * half + 2 * t)
    for n in cutlass.range_constexpr(2):
        _store_minus(to, 8 * n, [rY[i, n] for i in range(4)])


@cute.jit
def multiply_rows(rZ, rY, address, first: cutlass.Constexpr):
    """Y += Z[:, 16 columns] M_A[these 16 rows, 16 columns]."""
    for step in cutlass.range_constexpr(first, first + 2):
        z = _as_a([rZ[i, step] for i in range(4)])
        for n in cutlass.range_constexpr(2):
            y = mma_3xtf32(z, _load_b(address, 8 * step, 8 * n), [rY[i, n] for i in range(4)])
            for i in cutlass.range_constexpr(4):
                rY[i, n] = y[i]


@cute.jit
def invert_rest(sL, sM, warp, lane):
    """All of M below the diagonal blocks, which `invert_block` has made. 128 threads together, L and these blocks complete in shared
    memory after the first barrier here, M after the last; above its diagonal blocks M is not written."""
    cute.arch.sync_threads()
    combine_16(sL, sM, warp, lane)
    cute.arch.sync_threads()
    combine_32(sL, sM, warp, lane)
    cute.arch.sync_threads()
