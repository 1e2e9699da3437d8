"""Inverse of a unit lower triangular 64x64 matrix in shared memory, by 8 warps, in fp32.

    (I + L)^-1 of 8x8 diagonal blocks          forward substitution, one warp two blocks
    [A 0; L B]^-1 = [A' 0; -B' L A' B']         three times: from 8 to 16, to 32, to 64 rows (A', B' the inverses of A, B)

The second step's products take the tensor cores with operands split in two tf32 numbers (`sum_3xtf32`), so that they are as good as fp32's
where elements of the inverse are large (|beta| up to 2, keys without norm).

Both matrices are fp32, at distances in which A and C fragments (two columns of a row are one vector) and B fragments touch every bank once:
rows are 72 floats apart, and 8 more between the fourth and the fifth of 8 rows.
Contractions run in the order that lets accumulators pass for A fragments: slot t of a tf32 step is column 2t, slot t + 4 column 2t + 1.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .mma import split_tf32, sum_3xtf32
from .ptx import barrier_of, fma, load_shared, select, store_shared

PAIRS, HALVES = 5, 7
"""The first of two barriers each."""
STRIDE = 72
BYTES = 64 * STRIDE * 4


def at(row, column):
    """Offset in bytes. Offsets of rows add up where one of them is a multiple of 8."""
    return (row * STRIDE + (row >> 2 & 1) * 8 + column) * 4


@cute.jit
def invert_block(sL, sM, warp, lane):
    """Diagonal block `warp` of M: its two diagonal blocks of 8 rows by forward substitution, the block below by tensor cores."""
    block = at(16 * warp, 16 * warp)
    invert_8(sL + block, sM + block, lane)
    cute.arch.sync_warp()
    combine_8(sL + block, sM + block, lane)


@cute.jit
def invert_8(sL, sM, lane):
    """Lane j (and j + 16) has column j of one of the blocks: m_i = [i = j] - sum_{k < i} L_ik m_k."""
    j, part = lane % 8, lane // 8 % 2
    corner = part * at(8, 8)
    column = []
    for i in cutlass.range_constexpr(8):
        m = select(j == i, 1.0, 0.0)
        for k in cutlass.range_constexpr(0, i, 4):
            for x, value in enumerate(load_shared(sL + corner, at(i, k), 4)):
                if cutlass.const_expr(k + x < i):
                    m = fma(-value, column[k + x], m)
        column.append(m)
    # Each half of the warp writes 4 rows, and a pair of the zeros above the diagonal.
    half = lane // 16
    to = sM + corner + half * at(4, 0) + at(0, j)
    for i in cutlass.range_constexpr(4):
        store_shared(to, at(i, 0), [select(half, column[i + 4], column[i])])
    store_shared(sM + at(lane // 4, 8 + lane % 4 * 2), 0, [Float32(0.0)] * 2)


def combine_8(sL, sM, lane):
    """Rows 8..15, columns 0..7 of a block: -(M_22 L_21) M_11, in the upper half of the tensor cores' tiles."""
    r, t = lane // 4, lane % 4
    zero = split_tf32(Float32(0.0))
    upper = [split_tf32(x) for x in load_shared(sM + at(r, 2 * t), at(8, 8), 2)]
    b = at(2 * t, r)
    z = sum_3xtf32(((upper[0], zero, upper[1], zero), _load_b(sL + b, 8, 0)))
    y = sum_3xtf32(((split_tf32(z[0]), zero, split_tf32(z[1]), zero), _load_b(sM + b, 0, 0)))
    store_shared(sM + at(r, 2 * t), at(8, 0), [-y[0], -y[1]])


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


def combine_16(sL, sM, block, lane):
    """Blocks (1, 0) and (3, 2) of M, the warp of a diagonal block for 8 columns of its pair's one: -(M_22 L_21) M_11."""
    r, t = lane // 4, lane % 4
    pair, part = block // 2, block % 2
    corner = at(32 * pair, 32 * pair)
    a = sM + corner + at(r, 2 * t)
    b = corner + at(2 * t, r)
    m = [_load_a(a, 16, 16 + 8 * step) for step in range(2)]
    z = [sum_3xtf32(*[(m[s], _load_b(sL + b, 16 + 8 * s, 8 * n)) for s in range(2)]) for n in range(2)]
    y = sum_3xtf32(*[(_as_a(z[s]), _load_b(sM + b + 8 * part * 4, 8 * s, 0)) for s in range(2)])
    _store_minus(a + 8 * part * 4 + at(16, 0), 0, y)


@cute.jit
def multiply_left(sL, sM, warp, lane):
    """Z = M_B L_BA, rows 32..63 and columns 0..31, a warp for 16 rows and 8 columns, without the products with blocks of zeros.

    It goes where M is above its diagonal blocks, 32 rows up and 32 columns to the right.
    """
    r, t = lane // 4, lane % 4
    row, part = warp // 4, warp % 4
    a = sM + at(32 + 16 * row + r, 32 + 2 * t)
    b = sL + at(32 + 2 * t, 8 * part + r)
    rZ = cute.make_rmem_tensor((4,), Float32)
    rZ.fill(0.0)
    multiply(rZ, a, b, 0)
    if row == 1:
        multiply(rZ, a, b, 2)
    to = sM + at(16 * row + r, 32 + 8 * part + 2 * t)
    for h in cutlass.range_constexpr(2):
        store_shared(to, at(8 * h, 0), [rZ[2 * h], rZ[2 * h + 1]])


@cute.jit
def multiply_right(sM, warp, lane):
    """-Z M_A into rows 32..63, columns 0..31 of M, a warp for 16 rows and 8 columns."""
    r, t = lane // 4, lane % 4
    row, part = warp // 4, warp % 4
    a = sM + at(16 * row + r, 32 + 2 * t)
    b = sM + at(2 * t, 8 * part + r)
    rY = cute.make_rmem_tensor((4,), Float32)
    rY.fill(0.0)
    if part < 2:
        multiply(rY, a, b, 0)
    multiply(rY, a, b, 2)
    _store_minus(sM + at(32 + 16 * row + r, 8 * part + 2 * t), 0, [rY[i] for i in range(4)])


@cute.jit
def multiply(acc, a, b, first: cutlass.Constexpr):
    """acc += A[16 rows, 16 columns] B[these 16 rows, 8 columns]; steps of 8 of them, `first` and the next."""
    x = sum_3xtf32(*[(_load_a(a, 0, 8 * s), _load_b(b, 8 * s, 0)) for s in range(first, first + 2)])
    for i in cutlass.range_constexpr(4):
        acc[i] = acc[i] + x[i]


@cute.jit
def invert_pair(sL, sM, block, lane):
    """Of M two diagonal blocks and the block below the first one, by the two warps whose blocks they are; L's are complete there."""
    invert_block(sL, sM, block, lane)
    barrier_of(block // 2, 64, PAIRS)
    combine_16(sL, sM, block, lane)


@cute.jit
def invert_rest(sL, sM, warp, lane):
    """Rows 32..63 and columns 0..31 of M. 8 warps together; L and what `invert_pair` makes are complete after the first barrier here.

    Warps 0 to 3 and 4 to 7 go on by themselves, and so does what follows: those have rows 32..47 complete, these 48..63; blocks of M
    above its diagonal hold other numbers.
    """
    cute.arch.sync_threads()
    multiply_left(sL, sM, warp, lane)
    barrier_of(warp // 4, 128, HALVES)
    multiply_right(sM, warp, lane)
    barrier_of(warp // 4, 128, HALVES)
