"""Single PTX instructions on the DSL's scalars: shared and global memory by address, approximate functions, packed conversions.

Addresses are integers (`Tensor.iterator.toint()`), offsets in bytes are Python integers that end up in the instruction. Words are 32-bit
registers (`Uint32`).
"""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import dsl_user_op

_CONSTRAINT = {Float32: "f", Int32: "r", Uint32: "r", Int64: "l"}


@dsl_user_op
def asm(text, results, args, *, volatile=True, loc=None, ip=None):
    """Inline PTX: `$0...` are the results, then the arguments. One result is returned bare, several as a list.

    Volatile statements keep their order among each other and stay where control flow has put them.
    """
    values = [a.ir_value(loc=loc, ip=ip) for a in args]
    constraints = ",".join(
        [("=&" if len(results) > 1 else "=") + _CONSTRAINT[r] for r in results] + [_CONSTRAINT[type(a)] for a in args]
    )
    types = [r.mlir_type for r in results]
    res = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    out = llvm.inline_asm(
        res, values, text, constraints, has_side_effects=volatile, is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    if not types:
        return None
    if len(types) == 1:
        return results[0](out)
    return [r(llvm.extractvalue(r.mlir_type, out, [i], loc=loc, ip=ip)) for i, r in enumerate(results)]


# ---- memory ------------------------------------------------------------------------------------------------------------------------
def _list(first, n):
    names = ", ".join(f"${first + i}" for i in range(n))
    return f"{{{names}}}" if n > 1 else names


def _vector(n):
    return f".v{n}" if n > 1 else ""


def load_shared(address, offset, n, dtype=Float32):
    """n (1, 2, 4) registers at a shared-memory address, as a list."""
    out = asm(f"ld.shared{_vector(n)}.b32 {_list(0, n)}, [${n}+{offset}];", [dtype] * n, [Int32(address)])
    return out if n > 1 else [out]


def _store(space, address, offset, values, valid=None):
    n = len(values)
    text = f"st.{space}{_vector(n)}.b32 [$0+{offset}], {_list(1, n)};"
    if valid is None:
        asm(text, [], [address, *values])
    else:
        text = f"{{\n.reg .pred p;\nsetp.ne.b32 p, ${n + 1}, 0;\n@p {text}\n}}"
        asm(text, [], [address, *values, Int32(valid)])


def store_shared(address, offset, values):
    _store("shared", Int32(address), offset, values)


def store_shared_if(address, offset, values, valid):
    """As `store_shared` where `valid` is not 0."""
    _store("shared", Int32(address), offset, values, valid)


def load_shared_half(address, offset):
    """16 bits at a shared-memory address in the low half of a word."""
    text = f"{{\n.reg .b16 h;\nld.shared.b16 h, [$1+{offset}];\ncvt.u32.u16 $0, h;\n}}"
    return asm(text, [Uint32], [Int32(address)])


def load_shared_if(address, offset, n, valid, dtype=Float32):
    """As `load_shared` for n = 2, 4; zeros, without an access, where `valid` is 0."""
    zero = " ".join(f"mov.b32 ${i}, 0;" for i in range(n))
    text = (
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, ${n + 1}, 0;\n{zero}\n"
        f"@p ld.shared{_vector(n)}.b32 {_list(0, n)}, [${n}+{offset}];\n}}"
    )
    return asm(text, [dtype] * n, [Int32(address), Int32(valid)])


def load_global(address, offset, n, dtype=Uint32, early=False, policy=None):
    """n (1, 2, 4) registers at a global address, as a list.

    early: as a relaxed load, past L1, which ptxas leaves before the next branch. It moves others down next to their use to save registers,
    and what should overlap comes one after the other. policy: what L2 does with the line (`uncached.first_out`).
    """
    order = ".relaxed.gpu" if early else ""
    hint, last = ("", "") if policy is None else (".L2::cache_hint", f", ${n + 1}")
    args = [Int64(address)] if policy is None else [Int64(address), policy]
    out = asm(f"ld{order}.global{hint}{_vector(n)}.b32 {_list(0, n)}, [${n}+{offset}]{last};", [dtype] * n, args)
    return out if n > 1 else [out]


def load_global_half(address, early=False):
    """16 bits at a global address in the low half of a word; early as for `load_global`."""
    order = ".relaxed.gpu" if early else ""
    return asm(f"ld{order}.global.u16 $0, [$1];", [Uint32], [Int64(address)])


def store_global(address, offset, values):
    _store("global", Int64(address), offset, values)


def store_global_if(address, offset, values, valid):
    """As `store_global` where `valid` is not 0."""
    _store("global", Int64(address), offset, values, valid)


def load_acquire(address):
    """32 bits at a global address, and all that came before the `store_release` that another CTA may have put them there by."""
    return asm("ld.acquire.gpu.global.b32 $0, [$1];", [Int32], [Int64(address)])


def store_release(address, value):
    """The other half of `load_acquire`."""
    asm("st.release.gpu.global.b32 [$0], $1;", [], [Int64(address), Int32(value)])


def barrier_of(group, threads, first=1, groups=2):
    """A barrier of the `threads` threads of each of some groups, of numbers from `first` on. Written out, since a number in a register
    takes all 16 of them."""
    names = [f"p{i}" for i in range(groups)]
    text = " ".join(f"setp.eq.s32 {p}, $0, {i};" for i, p in enumerate(names))
    text += "".join(f"\n@{p} bar.sync {first + i}, {threads};" for i, p in enumerate(names))
    asm(f"{{\n.reg .pred {', '.join(names)};\n{text}\n}}", [], [Int32(group)])


# ---- arithmetic --------------------------------------------------------------------------------------------------------------------
def exp2(x):
    """2^x to 2 ulp; results below 2^-126 are 0."""
    return asm("ex2.approx.ftz.f32 $0, $1;", [Float32], [x], volatile=False)


def log2(x):
    return asm("lg2.approx.ftz.f32 $0, $1;", [Float32], [x], volatile=False)


def reciprocal(x):
    return asm("rcp.approx.ftz.f32 $0, $1;", [Float32], [x], volatile=False)


def rsqrt(x):
    return asm("rsqrt.approx.ftz.f32 $0, $1;", [Float32], [x], volatile=False)


def fma(a, b, c):
    return asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [Float32(a), Float32(b), Float32(c)], volatile=False)


def fmax(a, b):
    return asm("max.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], volatile=False)


def fmin(a, b):
    return asm("min.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)], volatile=False)


def at_least(x, least):
    """x, or `least` where x is less; NaN where x is."""
    return asm("max.NaN.f32 $0, $1, $2;", [Float32], [Float32(x), Float32(least)], volatile=False)


def at_most(x, most):
    """x, or `most` where x is more; NaN where x is."""
    return asm("min.NaN.f32 $0, $1, $2;", [Float32], [Float32(x), Float32(most)], volatile=False)


def minus_abs(x):
    return asm("{\n.reg .f32 a;\nabs.f32 a, $1;\nneg.f32 $0, a;\n}", [Float32], [x], volatile=False)


@dsl_user_op
def select(condition, a, b, *, loc=None, ip=None):
    """a where the condition (a Boolean, or 0 or 1) holds, else b, as values: both are evaluated."""
    condition = condition if isinstance(condition, Boolean) else condition != 0
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(arith.select(condition.ir_value(loc=loc, ip=ip), *values, loc=loc, ip=ip))


def mad_wide(a, b, c):
    """a b + c of Int32 a, b and Int64 c, all bits of the product."""
    return asm("mad.wide.s32 $0, $1, $2, $3;", [Int64], [Int32(a), Int32(b), c], volatile=False)


def mad_long(a, b, c):
    """a b + c of Int32 a, which is not negative, and Int64 b, c."""
    text = "{\n.reg .u64 a;\ncvt.u64.u32 a, $1;\nmad.lo.u64 $0, a, $2, $3;\n}"
    return asm(text, [Int64], [Int32(a), b, c], volatile=False)


def pack(dtype, low, high):
    """Two fp32 numbers rounded to bf16 or fp16 in one word."""
    name = {BFloat16: "bf16x2", Float16: "f16x2"}[dtype]
    return asm(f"cvt.rn.{name}.f32 $0, $2, $1;", [Uint32], [low, high], volatile=False)


def unpack(dtype, word):
    """The two numbers of a word in fp32."""
    if dtype is BFloat16:
        return (
            asm("shl.b32 $0, $1, 16;", [Float32], [word], volatile=False),
            asm("and.b32 $0, $1, 0xffff0000;", [Float32], [word], volatile=False),
        )
    return tuple(
        asm(
            f"{{\n.reg .b16 l, h;\nmov.b32 {{l, h}}, $1;\ncvt.f32.f16 $0, {half};\n}}",
            [Float32],
            [word],
            volatile=False,
        )
        for half in "lh"
    )


def opaque(x):
    """x (Int32), of which the compiler knows nothing: what is made of it is not kept from earlier on."""
    return asm("mov.b32 $0, $1;", [Int32], [x])


def as_float(word):
    """The fp32 number whose bits a word is."""
    return asm("mov.b32 $0, $1;", [Float32], [word], volatile=False)


def as_word(x):
    """The reverse."""
    return asm("mov.b32 $0, $1;", [Uint32], [x], volatile=False)


def to_tf32(x):
    """x rounded to tf32, as bits."""
    return asm("cvt.rna.tf32.f32 $0, $1;", [Uint32], [x], volatile=False)
