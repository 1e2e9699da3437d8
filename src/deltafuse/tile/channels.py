"""Runs of neighbouring channels: global memory to 32-bit words, words to fp32 numbers and back.

A run of n elements is one access of 2, 4, 8 or 16 bytes, or several of 16. It starts at a multiple of the access's size.
"""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import BFloat16, Float16, Float32, Int64, Uint32

from .ptx import as_float, asm, exp2, pack, reciprocal, store_global, unpack

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}
LOG2_E = 1.4426950408889634
_HALVES = {BFloat16: "bf16", Float16: "f16"}


def size(dtype) -> int:
    """Bytes an element."""
    return dtype.width // 8


def word_count(n: int, dtype) -> int:
    """Registers that a run of n elements takes."""
    return -(-n * size(dtype) // 4)


def load(address, n: int, dtype, run: int | None = None, *, constant: bool = True):
    """n elements at an address as words, in accesses of at most `run` elements; `constant`: nothing writes them during the launch."""
    step = min(n, run or n, 16 // size(dtype))
    space = "global.nc" if constant else "global"
    if step * size(dtype) == 2:
        halves = [_load_half(address + Int64(2 * i), space) for i in range(n)]
        pairs = zip(halves[::2], halves[1::2], strict=False)
        return [low | (high << 16) for low, high in pairs] + halves[n - n % 2 :]
    words = []
    count = step * size(dtype) // 4
    for offset in range(0, n * size(dtype), step * size(dtype)):
        names = ", ".join(f"${i}" for i in range(count))
        vector, names = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
        found = asm(f"ld.{space}{vector}.b32 {names}, [${count}+{offset}];", [Uint32] * count, [Int64(address)])
        words += found if count > 1 else [found]
    return words


def _load_half(address, space):
    text = f"{{\n.reg .b16 h;\nld.{space}.b16 h, [$1];\ncvt.u32.u16 $0, h;\n}}"
    return asm(text, [Uint32], [Int64(address)])


def floats(words, n: int, dtype):
    """The n numbers of a run in fp32."""
    if dtype is Float32:
        return [as_float(w) for w in words]
    return [x for w in words for x in unpack(dtype, w)][:n]


def to_words(values, dtype):
    """fp32 numbers rounded to dtype, as the words of a run."""
    if dtype is Float32:
        return [asm("mov.b32 $0, $1;", [Uint32], [x], volatile=False) for x in values]
    if len(values) % 2:
        values = [*values, Float32(0.0)]
    return [pack(dtype, low, high) for low, high in zip(values[::2], values[1::2], strict=True)]


def store(address, words, n: int, dtype, run: int | None = None) -> None:
    """A run of n elements to global memory, in accesses of at most `run` elements."""
    step = min(n, run or n, 16 // size(dtype))
    if step * size(dtype) == 2:
        for i in range(n):
            word = words[i // 2] >> 16 if i % 2 else words[i // 2]
            text = "{\n.reg .b16 h;\ncvt.u16.u32 h, $1;\nst.global.b16 [$0], h;\n}"
            asm(text, [], [Int64(address) + Int64(2 * i), word])
        return
    count = step * size(dtype) // 4
    for i in range(0, len(words), count):
        store_global(address, 4 * i, words[i : i + count])


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return reciprocal(exp2(x * Float32(-LOG2_E)) + Float32(1.0))
