"""PTX of kernels with mma.sync and wgmma, and the fragments, number formats and shared-memory layouts of the PTX ISA in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import ptxemu

BASE = 1024
"""The shared address of a kernel's first dynamic byte (no static shared memory)."""
EMIN = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}
"""Exponents of the smallest normal numbers."""
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "f32": 4, "s32": 4, "f64": 8}
_TORCH = {
    "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "s8": torch.int8, "u8": torch.uint8, "f32": torch.float32, "s32": torch.int32, "f64": torch.float64,
}  # fmt: skip
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


# ---- numbers --------------------------------------------------------------------------------------------------------------------
def encode(values: np.ndarray, type_: str) -> np.ndarray:
    """Values to a type's bits, in an array of unsigned numbers. tf32: all of a float's bits."""
    x = torch.from_numpy(np.ascontiguousarray(values)).to(_TORCH[type_])
    return x.view(_RAW[BYTES[type_]]).numpy().view(_NUMPY[BYTES[type_]])


def decode(raw: np.ndarray, type_: str) -> np.ndarray:
    """Bits to float64, exactly. tf32: the upper 19 bits count."""
    if type_ == "tf32":
        raw = raw & np.uint32(0xFFFFE000)
    raw = np.ascontiguousarray(raw).astype(_NUMPY[BYTES[type_]])
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[BYTES[type_]]
    return torch.from_numpy(raw.view(signed)).view(_TORCH[type_]).to(torch.float64).numpy()


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], type_: str, scale: float = 1.0) -> np.ndarray:
    """Random numbers of a type as bits."""
    if type_ in ("s8", "u8", "s32"):
        low, high = {"s8": (-128, 128), "u8": (0, 256), "s32": (-(2**20), 2**20)}[type_]
        return encode(rng.integers(low, high, shape), type_)
    return encode(rng.standard_normal(shape) * scale, type_)


def fused(
    c: float, products: Sequence[tuple[float, float]], fraction: int, emin: tuple[int, int], result: str, keep: int = 23
) -> float:
    """c + sum of products by the rule that dot.h states, in Python's unlimited integers. emin: the smallest exponents of the factors."""
    products = [(a, b) for a, b in products if a and b]
    plain = c + sum(a * b for a, b in products)
    if not np.isfinite(plain):
        return plain

    def exponent(x: float, least: int) -> int:
        return max(int(np.frexp(x)[1]) - 1, least)

    exponents = [exponent(a, emin[0]) + exponent(b, emin[1]) for a, b in products]
    if c:
        exponents.append(exponent(c, -14 if result == "f16" else -126))
    if not exponents:
        return 0.0
    shift = fraction - max(exponents)
    total = sum(int(np.ldexp(x, shift)) for x in [c, *(a * b for a, b in products)])
    if result == "f16":
        return float(np.float16(np.ldexp(float(total), -shift)))
    size = abs(total)
    cut = max(size.bit_length() - keep - 1, 0)
    return float(np.ldexp(float(size >> cut << cut), -shift)) * (1 if total >= 0 else -1)


def warp_sum(
    c: float, products: Sequence[tuple[float, float]], types: tuple[str, str], result: str, pair: int = 2
) -> float:
    """The same as mma.sync forms it on sm_90. 8-bit floats: every other `pair` of the products, as products of f16, then upon
    them the others, then c."""
    if BYTES[types[0]] > 1:
        return fused(c, products, 25, (EMIN[types[0]], EMIN[types[1]]), result)
    total = 0.0
    for half in range(2):
        total = fused(
            total, [p for i, p in enumerate(products) if i // pair % 2 == half], 25, (EMIN["f16"],) * 2, result
        )
    kind = np.float16 if result == "f16" else np.float32
    return float(kind(kind(total) + kind(c)))


# ---- fragments ------------------------------------------------------------------------------------------------------------------
def packed(elements: np.ndarray) -> np.ndarray:
    """[..., elements of a register] of 8, 16 or 32 bits to 32-bit words, the first element lowest."""
    return np.ascontiguousarray(elements).view(np.uint32)[..., 0]


def fragment_a(matrix: np.ndarray) -> np.ndarray:
    """A (rows x k, as bits) to [register, lane] (PTX ISA: "Matrix Fragments for mma.m16n8k..."; a register holds 32 bits)."""
    rows, k = matrix.shape
    per = 4 // matrix.itemsize
    halves, groups = rows // 8, k // (4 * per)
    out = np.zeros((halves * groups, 32), np.uint32)
    for r in range(halves * groups):
        for lane in range(32):
            row = lane // 4 + 8 * (r % halves)
            col = 4 * per * (r // halves) + lane % 4 * per
            out[r, lane] = packed(matrix[row, col : col + per])
    return out


def fragment_b(matrix: np.ndarray) -> np.ndarray:
    """B (k x 8, as bits) to [register, lane]."""
    k = matrix.shape[0]
    per = 4 // matrix.itemsize
    out = np.zeros((k // (4 * per), 32), np.uint32)
    for r in range(len(out)):
        for lane in range(32):
            row = 4 * per * r + lane % 4 * per
            out[r, lane] = packed(matrix[row : row + per, lane // 4])
    return out


def fragment_d(matrix: np.ndarray) -> np.ndarray:
    """C or D (16 or 8 rows x n, as bits) to [register, lane] of a warp."""
    rows, n = matrix.shape
    per = 4 // matrix.itemsize
    count = rows * n // 32 // per
    out = np.zeros((count, 32), np.uint32)
    for r in range(count):
        for lane in range(32):
            i = (
                r * per
            )  # the element's number in the thread: pairs of columns, then halves of rows, then tiles of 8 columns
            row = lane // 4 + 8 * (i // 2 % (rows // 8))
            col = i // 2 // (rows // 8) * 8 + lane % 4 * 2 + i % 2
            out[r, lane] = packed(matrix[row, col : col + per])
    return out


def matrix_d(registers: np.ndarray, rows: int, n: int, dtype: type) -> np.ndarray:
    """[register, lane] of a warp to the matrix of bits: the inverse of `fragment_d`."""
    size = np.dtype(dtype).itemsize
    index = np.arange(rows * n, dtype=np.uint32).reshape(rows, n)
    out = np.zeros(rows * n, dtype)
    if size == 4:
        out[fragment_d(index).ravel()] = registers.ravel().view(dtype)
    else:
        halves = np.ascontiguousarray(registers).view(dtype).reshape(len(registers), 32, 2)
        where = fragment_d((index % 65536).astype(np.uint16))
        out[(where & 0xFFFF).ravel()] = halves[..., 0].ravel()
        out[(where >> 16).ravel()] = halves[..., 1].ravel()
    return out.reshape(rows, n)


# ---- matrices in shared memory ----------------------------------------------------------------------------------------------------
SWIZZLES = {"none": 0, "32": 3, "64": 2, "128": 1}
"""Swizzling modes by their number in a descriptor (bits 62 to 63)."""


def crosswise(offset: int, swizzle: str) -> int:
    """The swizzle of the byte address `offset`: bits 4 and up, exclusive-or with the bits from 7 on."""
    bits = {"none": 0, "32": 1, "64": 2, "128": 3}[swizzle]
    return offset ^ (offset >> 7 & (1 << bits) - 1) << 4


def place(
    image: np.ndarray, matrix: np.ndarray, at: int, swizzle: str, mn_major: bool, lead: int, stride: int, base: int = 0
) -> None:
    """Write a matrix (mn x k, as bits) into the bytes `image` of shared memory as its canonical layout has it, from offset `at`.

    Canonical layouts in units of 16 bytes (T elements), as nested shapes and strides:
    K-major:  ((8, m), (T, 2)) : ((width, stride), (1, lead or 1)), with a width of 1, 2, 4 or 8 units;
    MN-major: ((T, width, m), (8, k)) : ((1, 1, lead), (width, stride)); without swizzle ((T, 1, m), (8, k)) : ((1, -, stride), (1, lead)).
    base: the descriptor's base offset; the pattern starts so many 128-byte lines after a 1024-byte boundary.
    """
    mn, k = matrix.shape
    size = matrix.itemsize
    t = 16 // size
    atom = {"none": 1, "32": 2, "64": 4, "128": 8}[swizzle]
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(mn, k, size)
    for i in range(mn):
        for j in range(k):
            if not mn_major:
                inner, column = j % t, j // t
                unit = i % 8 * atom * 16 + i // 8 * stride + column * (lead if swizzle == "none" else 16)
            elif swizzle == "none":
                inner = i % t
                unit = i // t * stride + j % 8 * 16 + j // 8 * lead
            else:
                inner = i % t
                unit = i // t % atom * 16 + i // (t * atom) * lead + j % 8 * atom * 16 + j // 8 * stride
            byte = at + unit + inner * size
            byte = crosswise(byte - 128 * base, swizzle) + 128 * base
            image[byte : byte + size] = raw[i, j]


def descriptor(at: int, swizzle: str, lead: int, stride: int, base: int = 0) -> int:
    """A matrix descriptor of a matrix at this offset in shared memory (PTX ISA: "Matrix-Descriptor Format")."""
    encoded = [(x & 0x3FFFF) >> 4 for x in (at + BASE, lead, stride)]
    return encoded[0] | encoded[1] << 16 | encoded[2] << 32 | base << 49 | SWIZZLES[swizzle] << 62


# ---- kernels ----------------------------------------------------------------------------------------------------------------------
def names(prefix: str, n: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(n)) + "}"


def module(body: str, params: Sequence[str], words: int = 160) -> str:
    """A kernel around a body. %in is the thread's place in the argument `in`, with the words of one index 4 * threads bytes apart."""
    declared = ", ".join(f".param .u64 {p}" for p in params)
    loads = "\n".join(f"    ld.param.u64 %{p}, [{p}];" for p in params)
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({declared})
{{
    .reg .pred %p<8>;
    .reg .b32 %d<{words}>, %a<8>, %b<8>, %c<{words}>, %r<20>;
    .reg .b64 %desc<8>, %rd<10>, %w<8>, %x<8>, %y<8>, %z<8>;
    .reg .b32 %thread, %warp, %threads;
    .reg .b64 {", ".join("%" + p for p in params)}, %at;
{loads}
    mov.u32 %thread, %tid.x;
    mov.u32 %threads, %ntid.x;
    shr.u32 %warp, %thread, 5;
{body}
    ret;
}}
"""


def words_in(prefix: str, n: int, source: str, threads: int, type_: str = "b32", first: int = 0) -> str:
    """Load registers from [index, thread] words of an argument."""
    size = 8 if type_ == "b64" else 4
    lines = [f"    mad.wide.u32 %at, %thread, {size}, %{source};"]
    lines += [f"    ld.global.{type_} %{prefix}{i}, [%at+{size * threads * (first + i)}];" for i in range(n)]
    return "\n".join(lines)


def words_out(prefix: str, n: int, target: str, threads: int, type_: str = "b32") -> str:
    size = 8 if type_ == "b64" else 4
    lines = [f"    mad.wide.u32 %at, %thread, {size}, %{target};"]
    lines += [f"    st.global.{type_} [%at+{size * threads * i}], %{prefix}{i};" for i in range(n)]
    return "\n".join(lines)


def image_in(source: str = "image", loop: str = "COPY", fence: bool = True, barrier: bool = True) -> str:
    """Copy the argument into shared memory from its start: %r19 bytes, a multiple of 4; then a proxy fence and a barrier."""
    return f"""
    mov.u32 %r18, smem;
    mad.lo.u32 %r18, %thread, 4, %r18;
    mul.lo.u32 %r17, %thread, 4;
    mad.wide.u32 %rd9, %thread, 4, %{source};
    mul.lo.u32 %r16, %threads, 4;
    mul.wide.u32 %rd8, %threads, 4;
{loop}:
    setp.ge.u32 %p7, %r17, %r19;
    @%p7 bra {loop}_END;
    ld.global.b32 %r15, [%rd9];
    st.shared.b32 [%r18], %r15;
    add.u32 %r17, %r17, %r16;
    add.u32 %r18, %r18, %r16;
    add.u64 %rd9, %rd9, %rd8;
    bra {loop};
{loop}_END:
    {"fence.proxy.async.shared::cta;" if fence else ""}
    {"bar.sync 0;" if barrier else ""}
"""


def launch(text: str, threads: int, args: Sequence[object], **options: object) -> ptxemu.Launched:
    return ptxemu.run_ptx(text, "k", (1,), (threads,), list(args), **options)


def tensor(x: np.ndarray) -> torch.Tensor:
    """A copy as int32 words."""
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(-1)
    return torch.from_numpy(raw.copy()).view(torch.int32)
