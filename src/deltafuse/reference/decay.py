"""Products of rows that have decayed towards each other, at any gate, without a look into the future.

For rows `i > j` of a chunk, `exp(g_{j+1} + ... + g_i)` is split at the border of the two halves of the smallest aligned block
of `2m` rows that has `j` in its upper (earlier) and `i` in its lower half:

    left_i  = exp(g_{border} + ... + g_i)          inclusive prefix inside the lower half
    right_j = exp(g_{j+1} + ... + g_{border-1})    exclusive suffix inside the upper half

Log decays are at most 0, so both factors are at most 1 and each is 0 only where the product is (below rounding). No factor of row
`i` reads a later row. All blocks of one size are one batched product, so a chunk of C rows takes log2(C) of them.

The factors of size `2m` are those of size `m` times the decay over a half: one exponential a row, no difference of large sums. A
gate of -1000
leaves the precision of its neighbours alone, and `-inf` gives 0, not NaN. The gradient runs back through the same tree, as
gradients of exponents, which only add.

g is `[X, C, Kg]` with Kg = K (KDA) or 1 (one decay per head and token: Gated DeltaNet); X is any batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _halves(x: Tensor, m: int) -> Tensor:
    """`[X, C, D]` as `[X, C / 2m, 2, m, D]`: index 0 of the third axis is the upper (earlier) half of each block."""
    return x.unflatten(1, (-1, 2, m))


def _levels(prefix: Tensor, suffix: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """`(m, left, right)` for blocks of 2m rows, m = 1, 2, 4, ...; left and right are views that hold until the next step.

    `prefix` enters as `exp(g)` and `suffix` as ones; they leave as the factors over the whole chunk, `exp(g_0 + ... + g_i)` and
    `exp(g_{j+1} + ... + g_{C-1})`.
    """
    m = 1
    while m < prefix.shape[1]:
        p, s = _halves(prefix, m), _halves(suffix, m)
        yield m, p[:, :, 1], s[:, :, 0]
        # suffix_2m = [suffix_upper total_lower, suffix_lower],  prefix_2m = [prefix_upper, prefix_lower total_upper]
        s[:, :, 0] *= p[:, :, 1, -1:]
        p[:, :, 1] *= p[:, :, 0, -1:]
        m *= 2


def _diagonal_blocks(scores: Tensor, m: int) -> Tensor:
    """The blocks of `[X, 2, C, C]` at rows of a lower, columns of an upper half: a view `[X, C / 2m, 2, m, m]`."""
    blocks = scores.unflatten(3, (-1, 2 * m)).unflatten(2, (-1, 2 * m)).diagonal(dim1=2, dim2=4)
    return blocks[:, :, m:, :m].permute(0, 4, 1, 2, 3)


def _left_rows(q: Tensor, k: Tensor, left: Tensor, m: int) -> Tensor:
    """Decayed lower halves of q and k, stacked: `[X, C / 2m, 2, m, K]`."""
    rows = q.new_empty(q.shape[0], q.shape[1] // (2 * m), 2, m, q.shape[2])
    torch.mul(_halves(q, m)[:, :, 1], left, out=rows[:, :, 0])
    torch.mul(_halves(k, m)[:, :, 1], left, out=rows[:, :, 1])
    return rows


def decayed_scores(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(A [X, 2, C, C], prefix, suffix [X, C, Kg])` of q, k `[X, C, K]` and log decays g.

    `A[0, i, j] = sum_d q[i] k[j] exp(g_{j+1} + ... + g_i)` for `i >= j`, and `A[1, i, j]` the same with k for q for `i > j`; else 0.
    `prefix` is the decay from the chunk's start through row i (its last row: the chunk's), `suffix` that from after row j to the
    chunk's end.
    """
    x, c, dim = q.shape
    scores = q.new_zeros(x, 2, c, c)
    scores[:, 0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    prefix = g.exp()
    suffix = torch.ones_like(prefix)
    for m, left, right in _levels(prefix, suffix):
        rows = _left_rows(q, k, left, m).view(-1, 2 * m, dim)
        columns = (_halves(k, m)[:, :, 0] * right).view(-1, m, dim)
        block = torch.bmm(rows, columns.transpose(1, 2))
        _diagonal_blocks(scores, m).copy_(block.view(x, -1, 2, m, m))
    return scores, prefix, suffix


def decayed_scores_backward(
    q: Tensor, k: Tensor, g: Tensor, dscores: Tensor, dq: Tensor, dk: Tensor, dprefix: Tensor, dsuffix: Tensor
) -> Tensor:
    """Gradient of g; adds those of q and k to `dq` and `dk`.

    `dscores` is `[X, 2, C, C]`; what lies outside the scores' own triangle is not read. `dprefix` and `dsuffix` are gradients of the
    exponents of `prefix` and `suffix`, from all other uses; they are overwritten.
    """
    dim = q.shape[2]
    per_key = g.shape[2] == dim
    diagonal = dscores[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
    dq.addcmul_(diagonal, k)
    dk.addcmul_(diagonal, q)
    dexponents = []
    prefix = g.exp()
    for m, left, right in _levels(prefix, torch.ones_like(prefix)):
        rows = _left_rows(q, k, left, m)
        columns = _halves(k, m)[:, :, 0] * right
        dblock = _diagonal_blocks(dscores, m).reshape(-1, 2 * m, m)
        drows = torch.bmm(dblock, columns.view(-1, m, dim)).view(rows.shape)
        dcolumns = torch.bmm(dblock.transpose(1, 2), rows.view(-1, 2 * m, dim)).view(columns.shape)
        _halves(dq, m)[:, :, 1].addcmul_(drows[:, :, 0], left)
        _halves(dk, m)[:, :, 1].addcmul_(drows[:, :, 1], left)
        _halves(dk, m)[:, :, 0].addcmul_(dcolumns, right)
        dleft = (rows[:, :, 0] * drows[:, :, 0]).addcmul_(rows[:, :, 1], drows[:, :, 1])
        dright = columns * dcolumns
        if not per_key:
            dleft, dright = dleft.sum(-1, keepdim=True), dright.sum(-1, keepdim=True)
        dexponents.append((m, dleft, dright))
    for m, dleft, dright in reversed(dexponents):
        p, s = _halves(dprefix, m), _halves(dsuffix, m)
        # A half's total, its last prefix row, is in the wider prefix of the lower and the wider suffix of the upper half.
        dtotal_upper, dtotal_lower = p[:, :, 1].sum(2), s[:, :, 0].sum(2)
        p[:, :, 0, -1] += dtotal_upper
        p[:, :, 1, -1] += dtotal_lower
        p[:, :, 1] += dleft
        s[:, :, 0] += dright
    return dprefix
