"""Warp matrix products by `mma.sync`: D[16, 8] = A[16, k] B[k, 8] + C, fp32 sums.

With lane = 4 r + t, an accumulator is [row r: columns 2t, 2t+1, row r + 8: columns 2t, 2t+1]. Operands are words: of 16-bit numbers
(k = 16) A is [row r: k = 2t, 2t+1; row r + 8: the same; row r: k = 2t+8, 2t+9; row r + 8: the same] and B [k = 2t, 2t+1; k = 2t+8, 2t+9] of
column r; of tf32 (k = 8) A is [(r, t), (r + 8, t), (r, t + 4), (r + 8, t + 4)] and B [t, t + 4] of column r.
"""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import BFloat16, Float16, Float32, Uint32

from .ptx import asm


def _mma(form, a, b, c):
    text = f"mma.sync.aligned.{form} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
    return asm(text, [Float32] * 4, [Uint32(x) for x in (*a, *b)] + [Float32(x) for x in c])


def mma_16bit(dtype, a, b, c):
    """m16n8k16 of bf16 or fp16."""
    name = {BFloat16: "bf16", Float16: "f16"}[dtype]
    return _mma(f"m16n8k16.row.col.f32.{name}.{name}.f32", a, b, c)


def mma_16bit_short(dtype, a, b, c):
    """m16n8k8 of bf16 or fp16: A is the first two words of m16n8k16's, B the first one."""
    name = {BFloat16: "bf16", Float16: "f16"}[dtype]
    text = (
        f"mma.sync.aligned.m16n8k8.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
    )
    return asm(text, [Float32] * 4, [Uint32(x) for x in (*a, b)] + [Float32(x) for x in c])


def mma_tf32(a, b, c):
    """m16n8k8 of tf32."""
    return _mma("m16n8k8.row.col.f32.tf32.tf32.f32", a, b, c)


def split_tf32(x):
    """x = hi + lo, hi of 11 significant bits: words of hi, lo."""
    hi = Uint32(asm("and.b32 $0, $1, 0xffffe000;", [Uint32], [x], volatile=False))
    lo = asm("{\n.reg .f32 h;\nmov.b32 h, $2;\nsub.f32 h, $1, h;\nmov.b32 $0, h;\n}", [Uint32], [x, hi], volatile=False)
    return hi, lo


def sum_3xtf32(*pairs):
    """m16n8k8 of fp32 numbers to about 2^-21, the sum over pairs of operands (lists of `split_tf32`): a b = lo hi + hi lo + hi hi, of which
    each has a sum of its own, so that products need not wait for each other."""
    parts = [[Float32(0.0)] * 4 for _ in range(3)]
    for a, b in pairs:
        for i, (x, y) in enumerate(((1, 0), (0, 1), (0, 0))):
            parts[i] = mma_tf32([e[x] for e in a], [e[y] for e in b], parts[i])
    return [x + y + z for x, y, z in zip(*parts, strict=True)]
