"""Products of rows that have decayed towards each other, at any gate, without a look into the future.

For rows `i > j` of a chunk, `exp(g_{j+1} + ... + g_i)` is split at the border of the two halves of the smallest aligned block
of `2m` rows that has `j` in its upper and `i` in its lower half:

    left_i  = exp(g_{border} + ... + g_i)          inclusive prefix sum inside the lower half
    right_j = exp(g_{j+1} + ... + g_{border-1})    exclusive suffix sum inside the upper half

Log decays are at most 0, so both factors are at most 1 and each is 0 only where the product is (below rounding). No factor of row
`i` reads a later row. All blocks of one size are one batched product, so a chunk of C rows takes log2(C) of them.

The sums of size `2m` come from those of size `m` by adding block totals, never by subtracting prefix sums: a gate of -1000 leaves
the precision of its neighbours alone, and `-inf` gives 0, not NaN. The gradient runs back through the same tree.

g is `[X, C, Kg]` with Kg = K (KDA) or 1 (one decay per head and token: Gated DeltaNet); X is any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecayTree:
    """`levels[l] = (left, right)` for blocks of `m = 2^l` rows, each `[X, C / 2m, m, Kg]`; `prefix` and `suffix` `[X, C, Kg]` are
    the sums over the whole chunk: `prefix[C - 1]` is the chunk's total."""

    levels: list[tuple[Tensor, Tensor]]
    prefix: Tensor
    suffix: Tensor


def _halves(x: Tensor, m: int) -> Tensor:
    """`[X, C, D]` as `[X, C / 2m, 2, m, D]`: index 0 of the third axis is the upper (earlier) half of each block."""
    return x.unflatten(1, (-1, 2, m))


def decay_tree(g: Tensor) -> DecayTree:
    prefix, suffix = g, torch.zeros_like(g)
    levels = []
    m = 1
    while m < g.shape[1]:
        p, s = _halves(prefix, m), _halves(suffix, m)
        levels.append((p[:, :, 1].exp(), s[:, :, 0].exp()))
        total = p[:, :, :, -1:]
        prefix = torch.cat([p[:, :, 0], p[:, :, 1] + total[:, :, 0]], dim=2).flatten(1, 2)
        suffix = torch.cat([s[:, :, 0] + total[:, :, 1], s[:, :, 1]], dim=2).flatten(1, 2)
        m *= 2
    return DecayTree(levels, prefix, suffix)


def decay_tree_backward(tree: DecayTree, dprefix: Tensor, dsuffix: Tensor, dlevels: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Gradient of g. `dlevels` are gradients of the exponents (not of the factors); `dprefix` and `dsuffix` are overwritten."""
    for level in reversed(range(len(tree.levels))):
        m = 1 << level
        p, s = _halves(dprefix, m), _halves(dsuffix, m)
        # prefix_2m = [p_upper, p_lower + total_upper],  suffix_2m = [s_upper + total_lower, s_lower],  total = p's last row
        dtotal_upper, dtotal_lower = p[:, :, 1].sum(2), s[:, :, 0].sum(2)
        p[:, :, 0, -1] += dtotal_upper
        p[:, :, 1, -1] += dtotal_lower
        dleft, dright = dlevels[level]
        p[:, :, 1] += dleft
        s[:, :, 0] += dright
    return dprefix


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


def decayed_scores(q: Tensor, k: Tensor, tree: DecayTree) -> Tensor:
    """`A[0, i, j] = sum_d q[i] k[j] exp(G[i] - G[j])` for `i >= j` and `A[1, i, j]`, the same with k for q, for `i > j`; else 0.

    q, k `[X, C, K]`; returns `[X, 2, C, C]`.
    """
    x, c, dim = q.shape
    scores = q.new_zeros(x, 2, c, c)
    scores[:, 0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
    for level, (left, right) in enumerate(tree.levels):
        m = 1 << level
        rows = _left_rows(q, k, left, m).view(-1, 2 * m, dim)
        columns = (_halves(k, m)[:, :, 0] * right).view(-1, m, dim)
        block = torch.bmm(rows, columns.transpose(1, 2))
        _diagonal_blocks(scores, m).copy_(block.view(x, -1, 2, m, m))
    return scores


def decayed_scores_backward(
    q: Tensor, k: Tensor, tree: DecayTree, dscores: Tensor, dq: Tensor, dk: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Adds the gradients of q and k to `dq` and `dk`; returns those of the tree's exponents, level by level.

    `dscores` is `[X, 2, C, C]`; what lies outside the scores' own triangle is not read.
    """
    x, _, dim = q.shape
    per_key = tree.prefix.shape[-1] == dim
    diagonal = dscores[:, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
    dq.addcmul_(diagonal, k)
    dk.addcmul_(diagonal, q)
    dlevels = []
    for level, (left, right) in enumerate(tree.levels):
        m = 1 << level
        rows = _left_rows(q, k, left, m)
        columns = _halves(k, m)[:, :, 0] * right
        dblock = _diagonal_blocks(dscores, m).reshape(-1, 2 * m, m)
        drows = torch.bmm(dblock, columns.view(-1, m, dim)).view(rows.shape)
        dcolumns = torch.bmm(dblock.transpose(1, 2), rows.view(-1, 2 * m, dim)).view(columns.shape)
        _halves(dq, m)[:, :, 1].addcmul_(drows[:, :, 0], left)
        _halves(dk, m)[:, :, 1].addcmul_(drows[:, :, 1], left)
        _halves(dk, m)[:, :, 0].addcmul_(dcolumns, right)
        dleft, dright = (rows * drows).sum(2), columns * dcolumns
        if not per_key:
            dleft, dright = dleft.sum(-1, keepdim=True), dright.sum(-1, keepdim=True)
        dlevels.append((dleft, dright))
    return dlevels
