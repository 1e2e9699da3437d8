"""PTX of kernels on tensor memory, and the layouts of the PTX ISA's tables in numpy (never the emulator's own code)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ptxemu

BASE = 1024
"""The shared address of a kernel's first dynamic byte (no static shared memory); what descriptors are built from."""
BARRIER, SLOT, IMAGE = 0, 8, 1024
"""Offsets in shared memory: an mbarrier, where tcgen05.alloc writes, and the image that the kernel's arguments bring."""


def names(prefix: str, n: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(n)) + "}"


def module(body: str, params: str, arch: str = "sm_100a", extra: str = "") -> str:
    return f"""
.version 8.8
.target {arch}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({params})
{{
    .reg .pred %p<20>;
    .reg .b16 %h<10>;
    .reg .b32 %r<60>, %v<160>, %u<160>;
    .reg .b64 %rd<40>, %desc<8>;
    .reg .b32 %thread, %warp, %lane, %tmem, %rank, %base, %quad;
    .reg .b64 %out, %at;
    {extra}
    mov.u32 %thread, %tid.x;
    shr.u32 %warp, %thread, 5;
    and.b32 %lane, %thread, 31;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %base, smem;
{body}
    ret;
}}
"""


def alloc(columns: int = 512, group: int = 1, relinquish: bool = True) -> str:
    """Warp 0 allocates and every thread learns the address; %quad is the address of the warp's own lanes."""
    give = f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;" if relinquish else ""
    return f"""
    setp.ne.u32 %p19, %warp, 0;
    add.u32 %r59, %base, {SLOT};
    @%p19 bra ALLOCATED;
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r59], {columns};
    {give}
ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %tmem, [%r59];
    shl.b32 %r58, %warp, 21;
    and.b32 %r58, %r58, 0x600000;
    add.u32 %quad, %tmem, %r58;
"""


def dealloc(columns: int = 512, group: int = 1) -> str:
    return f"""
    bar.sync 0;
    setp.ne.u32 %p19, %warp, 0;
    @%p19 bra FREED;
    tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tmem, {columns};
FREED:
"""


def barrier_init(count: int = 1) -> str:
    return f"""
    setp.ne.u32 %p18, %thread, 0;
    @%p18 bra READY;
    mbarrier.init.shared::cta.b64 [%base], {count};
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
"""


def wait(label: str, parity: int = 0) -> str:
    return f"""
{label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p17, [%base], {parity};
    @!%p17 bra {label};
    tcgen05.fence::after_thread_sync;
"""


def copy_in(parameter: str, size: int, threads: int = 128, fence: bool = True) -> str:
    """Bring `size` bytes (of each CTA of the cluster its own) from a parameter's memory to IMAGE."""
    assert size % 16 == 0
    return f"""
    ld.param.u64 %rd39, [{parameter}];
    mul.lo.u32 %r57, %rank, {size};
    cvt.u64.u32 %rd38, %r57;
    add.u64 %rd39, %rd39, %rd38;
    mul.lo.u32 %r56, %thread, 16;
COPY:
    setp.ge.u32 %p16, %r56, {size};
    @%p16 bra COPIED;
    cvt.u64.u32 %rd38, %r56;
    add.u64 %rd37, %rd39, %rd38;
    ld.global.v4.b32 {{%r52, %r53, %r54, %r55}}, [%rd37];
    add.u32 %r51, %base, %r56;
    st.shared.v4.b32 [%r51+{IMAGE}], {{%r52, %r53, %r54, %r55}};
    add.u32 %r56, %r56, {threads * 16};
    bra COPY;
COPIED:
    {"fence.proxy.async.shared::cta;" if fence else ""}
    bar.sync 0;
"""


def row_pointer(parameter: str, columns: int) -> str:
    """%at: this thread's row of a (cluster, 128, columns) array of 32 bits, for 128 threads."""
    return f"""
    ld.param.u64 %out, [{parameter}];
    mad.lo.u32 %r50, %rank, 128, %thread;
    mad.wide.u32 %at, %r50, {4 * columns}, %out;
"""


def fill(parameter: str, columns: int, first: int = 0) -> str:
    """Tensor memory columns from an array, by tcgen05.st.32x32b."""
    text = row_pointer(parameter, columns)
    for c in range(0, columns, 32):
        n = min(32, columns - c)
        text += "".join(f"    ld.global.b32 %v{i}, [%at+{4 * (c + i)}];\n" for i in range(n))
        text += f"    tcgen05.st.sync.aligned.32x32b.x{n}.b32 [%quad+{first + c}], {names('v', n)};\n"
    return text + "    tcgen05.wait::st.sync.aligned;\n    tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n"


def dump(parameter: str, columns: int, first: int = 0) -> str:
    """Tensor memory columns to an array, by tcgen05.ld.32x32b."""
    text = row_pointer(parameter, columns)
    for c in range(0, columns, 32):
        n = min(32, columns - c)
        text += f"    tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {names('v', n)}, [%quad+{first + c}];\n    tcgen05.wait::ld.sync.aligned;\n"
        text += "".join(f"    st.global.b32 [%at+{4 * (c + i)}], %v{i};\n" for i in range(n))
    return text


def launch(
    text: str, args: Sequence[Any], *, threads: int = 128, shared: int = 65536, pair: bool = False, **options: Any
) -> Any:
    cluster = (2, 1, 1) if pair else (1, 1, 1)
    return ptxemu.run_ptx(text, "k", cluster, (threads,), args, shared=shared, cluster=cluster, **options)


def tensor(a: np.ndarray) -> torch.Tensor:
    """A torch tensor over the same bytes."""
    return torch.from_numpy(np.ascontiguousarray(a).view(np.int32 if a.dtype.itemsize == 4 else np.uint8))


# ---- elements --------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Element:
    """A matrix element type: `code` in the instruction descriptor, raw storage, values."""

    kind: str
    code: int
    raw: type
    torch: torch.dtype | None

    @property
    def size(self) -> int:
        return np.dtype(self.raw).itemsize

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Raw elements whose sums of products are exact in float32: small integers and quarters."""
        if self.kind == "i8":
            return rng.integers(0, 256, shape).astype(np.uint8)
        values = torch.from_numpy(rng.integers(-8, 9, shape).astype(np.float32) / 4)
        return self.encode(values)

    def encode(self, values: torch.Tensor) -> np.ndarray:
        if self.kind == "tf32":
            return values.numpy().view(np.uint32).copy()
        assert self.torch is not None
        return values.to(self.torch).view(torch.uint8 if self.size == 1 else torch.int16).numpy().view(self.raw).copy()

    def values(self, raw: np.ndarray) -> np.ndarray:
        if self.kind == "tf32":
            return (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
        if self.kind == "i8":
            return (raw.view(np.int8) if self.code else raw).astype(np.float64)
        assert self.torch is not None
        view = torch.from_numpy(raw.view(np.uint8 if self.size == 1 else np.int16).copy()).view(self.torch)
        return view.to(torch.float64).numpy()


F16 = Element("f16", 0, np.uint16, torch.float16)
BF16 = Element("f16", 1, np.uint16, torch.bfloat16)
TF32 = Element("tf32", 2, np.uint32, None)
E4M3 = Element("f8f6f4", 0, np.uint8, torch.float8_e4m3fn)
E5M2 = Element("f8f6f4", 1, np.uint8, torch.float8_e5m2)
U8 = Element("i8", 0, np.uint8, None)
S8 = Element("i8", 1, np.uint8, None)


# ---- shared memory: the canonical layouts (PTX ISA, "Canonical Layouts") -----------------------------------------------------------
SWIZZLE = {"none": (0, 16), "32": (6, 32), "64": (4, 64), "128": (2, 128), "128base32": (1, 128)}
"""Descriptor code and bytes of a row of the atom."""
SWIZZLE_FUNCTION = {"none": (0, 4, 3), "32": (1, 4, 3), "64": (2, 4, 3), "128": (3, 4, 3), "128base32": (2, 5, 2)}
"""Swizzle<bits, base, shift> on byte addresses."""


def swizzle(address: np.ndarray, mode: str) -> np.ndarray:
    bits, base, shift = SWIZZLE_FUNCTION[mode]
    return address ^ ((address & (((1 << bits) - 1) << (base + shift))) >> shift)


def evaluate(shape: Any, stride: Any, index: np.ndarray) -> np.ndarray:
    """A (flat) CuTe layout: the coordinate that `index` has in `shape`, the first mode fastest, times the strides."""
    total = np.zeros_like(index)
    for i, (n, s) in enumerate(zip(shape, stride, strict=True)):
        if i == len(shape) - 1:
            return total + index * s
        total = total + index % n * s
        index = index // n
    return total


@dataclass(frozen=True)
class Operand:
    """Where a matrix of mn rows by k columns lies: its first byte, strides in bytes, swizzle and what is contiguous."""

    start: int
    mode: str
    mn_major: bool
    lbo: int
    sbo: int

    def addresses(self, mn: int, k: int, size: int) -> np.ndarray:
        """Byte address of every element [mn, k]; the formulas of the ISA's table with T = 16 / size."""
        t, width = 16 // size, SWIZZLE[self.mode][1]
        i, j = np.arange(mn)[:, None], np.arange(k)[None, :]
        if not self.mn_major:
            rows = evaluate((8, 0), (width, self.sbo), i)
            columns = evaluate((t, 0), (size, self.lbo if self.mode == "none" else 16), j)
        elif self.mode == "none":
            rows = evaluate((t, 0), (size, self.sbo), i)
            columns = evaluate((8, 0), (16, self.lbo), j)
        else:
            group = 4 if self.mode == "128base32" else 8
            rows = evaluate((t, width // 16, 0), (size, 16, self.lbo), i)
            columns = evaluate((group, 0), (width, self.sbo), j)
        return swizzle(self.start + rows + columns, self.mode)

    def descriptor(self) -> int:
        code = SWIZZLE[self.mode][0]
        return (self.start >> 4 & 0x3FFF) | self.lbo >> 4 << 16 | self.sbo >> 4 << 32 | 1 << 46 | code << 61


def place(mode: str, mn_major: bool, mn: int, k: int, size: int, start: int) -> Operand:
    """A packed operand at `start` (a shared address)."""
    t, width = 16 // size, SWIZZLE[mode][1]
    if not mn_major:
        if mode == "none":
            return Operand(start, mode, False, 128, 128 * (k // t))
        return Operand(start, mode, False, 16, 8 * width)
    if mode == "none":
        return Operand(start, mode, True, 128 * (mn // t), 128)
    group = 4 if mode == "128base32" else 8
    atoms = -(-mn * size // width)
    return Operand(start, mode, True, group * width, group * width * atoms)


def write(image: np.ndarray, operand: Operand, raw: np.ndarray) -> None:
    """Put raw elements [mn, k] into an image of the shared memory from address BASE + IMAGE on."""
    size = raw.dtype.itemsize
    at = operand.addresses(*raw.shape, size) - BASE - IMAGE
    for byte in range(size):
        image[at + byte] = (raw >> (8 * byte) & 0xFF).astype(np.uint8)


def instruction_descriptor(
    m: int, n: int, a: Element, b: Element, *, d: int = 1, a_mn: bool = False, b_mn: bool = False, negate_a: bool = False,
    negate_b: bool = False, saturate: bool = False,
) -> int:  # fmt: skip
    return (
        saturate << 3 | d << 4 | a.code << 7 | b.code << 10 | negate_a << 13 | negate_b << 14 | a_mn << 15 | b_mn << 16
        | n >> 3 << 17 | m >> 4 << 24
    )  # fmt: skip


# ---- tensor memory: data path layouts (PTX ISA, "Data Path Layout Organization") ----------------------------------------------------
def data_path(m: int, n: int, group: int, lane: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CTA of the pair, lane and column of every element [m, n] of D."""
    row, column = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    cta, r = np.divmod(row, m // group)
    if group == 1 and m == 64:  # F
        return cta, lane + r // 16 * 32 + r % 16, column
    if group == 2 and m == 128:  # B: the second half of the columns lies 64 lanes below
        half, c = np.divmod(column, n // 2)
        return cta, r + 64 * half, c
    return cta, r, column  # A, D
