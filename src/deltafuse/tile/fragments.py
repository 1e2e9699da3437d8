"""Accumulators to operand fragments and back: wgmma's accumulators of 16 columns are, in their linear order, an A fragment.

The conversions are volatile assembly: a compiler that is free to sink them past the next product's wait holds both forms in registers.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def pack2(lo: Float32, hi: Float32, dtype: cutlass.Constexpr, *, loc=None, ip=None) -> Int32:
    """Two numbers rounded to `dtype`, the first in the lower half."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    args = [Float32(lo).ir_value(loc=loc, ip=ip), Float32(hi).ir_value(loc=loc, ip=ip)]
    return Int32(_volatile(T.i32(), args, f"cvt.rn.{kind}.f32 $0, $2, $1;", "=r,f,f"))


@dsl_user_op
def unpack_one(bits: Int32, dtype: cutlass.Constexpr, high: cutlass.Constexpr[bool], *, loc=None, ip=None) -> Float32:
    """One half of a pair as float32."""
    if dtype is BFloat16:
        text = "and.b32 $0, $1, 0xffff0000;" if high else "shl.b32 $0, $1, 16;"
    else:
        half = "h" if high else "l"
        text = f"{{.reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.f32.f16 $0, {half};}}"
    return Float32(_volatile(T.f32(), [Int32(bits).ir_value(loc=loc, ip=ip)], text, "=f,r"))


def _volatile(result, args, text, constraints):
    return llvm.inline_asm(
        result,
        args,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def linear(x, start=0, size=None):
    """A register tensor's elements in memory order, from `start` on."""
    return cute.make_tensor(x.iterator + start, cute.make_layout(cute.size(x) - start if size is None else size))


@cute.jit
def words(fragment: cute.Tensor) -> cute.Tensor:
    """A 16-bit fragment as pairs."""
    n = const_expr(cute.size(fragment) // 2)
    return cute.make_tensor(cute.recast_ptr(fragment.iterator, dtype=Int32), cute.make_layout(n))


@cute.jit
def round_to(acc: cute.Tensor, fragment: cute.Tensor, start: cutlass.Constexpr[int], size: cutlass.Constexpr[int]):
    """Elements `start` .. `start + size` of accumulators, rounded into the same elements of a fragment."""
    x, f = linear(acc), words(fragment)
    for i in cutlass.range_constexpr(start // 2, (start + size) // 2):
        f[i] = pack2(x[2 * i], x[2 * i + 1], fragment.element_type)


@cute.jit
def widen(fragment: cute.Tensor, acc: cute.Tensor):
    """A fragment's elements as float32 accumulators."""
    x, f = linear(acc), words(fragment)
    for i in cutlass.range_constexpr(cute.size(fragment) // 2):
        x[2 * i] = unpack_one(f[i], fragment.element_type, False)
        x[2 * i + 1] = unpack_one(f[i], fragment.element_type, True)


@cute.jit
def keep_columns(fragment: cute.Tensor, valid: Int32, thread: Int32):
    """Columns `valid` and beyond of a fragment of accumulators become 0, whatever they held."""
    f = words(fragment)
    for j in cutlass.range_constexpr(cute.size(fragment) // 4):
        left = valid - (8 * j + 2 * (thread % 4))
        mask = Int32(0)
        if left == 1:
            mask = Int32(0xFFFF)
        if left > 1:
            mask = Int32(-1)
        f[2 * j] = f[2 * j] & mask
        f[2 * j + 1] = f[2 * j + 1] & mask
