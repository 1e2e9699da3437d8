"""tcgen05.mma in all its forms: a kernel around one of them, its operands in shared and tensor memory, and what must come of it, in numpy.

Layouts follow the PTX ISA's figures ("Data Path Layout Organization", "Sparsity selector", "Scale Factor A ID", "Packing formats of
elements"), never the emulator's code. Values are such that every sum is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sparse_ptx import sparse
from tensor_ptx import (
    BASE,
    IMAGE,
    Element,
    alloc,
    barrier_init,
    copy_in,
    dealloc,
    dump,
    fill,
    launch,
    module,
    place,
    tensor,
    wait,
    write,
)

D, A, META, SCALES_A, SCALES_B, COLUMNS = 0, 256, 272, 280, 288, 304
"""Columns of tensor memory."""
SIZE = 57344
"""Bytes of the image of shared memory."""


# ---- elements -----------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Narrow:
    """A float of 4, 6 or 8 bits: its number in the instruction descriptor, bits of exponent and mantissa, bias; raw: a code a byte."""

    kind: str
    code: int
    exponent: int
    mantissa: int
    bias: int

    raw = np.uint8

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        low, high = (0, 4) if self.exponent == 2 else (self.bias - 2, self.bias + 2)
        exponent = rng.integers(low, high, shape)
        fields = rng.integers(0, 2, shape) << self.exponent | exponent
        return (fields << self.mantissa | rng.integers(0, 1 << self.mantissa, shape)).astype(np.uint8)

    def values(self, raw: np.ndarray) -> np.ndarray:
        e = (raw >> self.mantissa & (1 << self.exponent) - 1).astype(np.int64)
        f = (raw & (1 << self.mantissa) - 1) / 2.0**self.mantissa
        size = np.where(e > 0, (1 + f) * 2.0 ** (e - self.bias), f * 2.0 ** (1 - self.bias))
        return np.where(raw >> self.bits - 1 & 1 == 1, -size, size)


def narrow(kind: str) -> dict[str, Narrow]:
    """The element types of kind::f8f6f4 and kind::mxf8f6f4."""
    table = {
        "e4m3": (0, 4, 3, 7), "e5m2": (1, 5, 2, 15), "e2m3": (3, 2, 3, 1), "e3m2": (4, 3, 2, 3), "e2m1": (5, 2, 1, 1),
    }  # fmt: skip
    return {name: Narrow(kind, *row) for name, row in table.items()}


F4 = Narrow("mxf4", 1, 2, 1, 1)
NVF4 = Narrow("mxf4nvf4", 1, 2, 1, 1)


def packed(element: Element | Narrow, raw: np.ndarray) -> np.ndarray:
    """Elements along the last axis as bytes of shared memory."""
    if isinstance(element, Element):
        return np.ascontiguousarray(raw).view(np.uint8)
    rows = raw.reshape(-1, raw.shape[-1])
    if element.bits == 8:
        return raw
    if element.kind.startswith("mxf4"):
        return (raw[..., 0::2] | raw[..., 1::2] << 4).astype(np.uint8)
    out = np.zeros(rows.shape, np.uint8)
    for r, row in enumerate(rows):
        for first in range(0, len(row), 16):
            number = sum(int(x) << element.bits * i for i, x in enumerate(row[first : first + 16]))
            out[r, first : first + 16] = np.frombuffer(number.to_bytes(16, "little"), np.uint8)
    return out.reshape(raw.shape)


def in_tensor_memory(element: Element | Narrow, raw: np.ndarray) -> np.ndarray:
    """The same as 32-bit words of tensor memory: 4-bit floats of mixed kinds are in the middle of a byte, 6-bit ones at its bottom."""
    mixed = isinstance(element, Narrow) and not element.kind.startswith("mxf4")
    if mixed and element.bits == 4:
        return np.ascontiguousarray(raw << 2).view(np.uint32)
    if mixed:
        return np.ascontiguousarray(raw).view(np.uint32)
    return np.ascontiguousarray(packed(element, raw)).view(np.uint32)


# ---- cases --------------------------------------------------------------------------------------------------------------------------
@dataclass
class Case:
    """One tcgen05.mma."""

    a: Element | Narrow
    b: Element | Narrow
    m: int = 128
    n: int = 64
    group: int = 1
    ws: bool = False
    sparse: bool = False
    selector: int = 0
    a_tensor: bool = False
    a_mn: bool = False
    b_mn: bool = False
    mode: str = "128"
    d: int = -1
    accumulate: bool = True
    negate: bool = False
    lane: int = 0
    blocks: int = 0
    size: str = ""
    ids: tuple[int, int] = (0, 0)
    e4m3: bool = False
    mask: int | None = None
    max_shift: int = 0
    scale: int | None = None
    collector: str = ""
    seed: int = 0
    extra_bits: int = 0
    columns: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.a.kind

    @property
    def per(self) -> int:
        """Elements of 16 bytes."""
        if isinstance(self.a, Narrow):
            return 32 if self.kind.startswith("mxf4") else 16
        return 16 // self.a.size

    @property
    def chunk(self) -> int:
        return {"tf32": 2, "mxf4": 8, "mxf4nvf4": 8}.get(self.kind, 4)

    @property
    def half_lanes(self) -> bool:
        """Layouts F and C."""
        return not self.ws and (self.m == 64 if self.group == 1 else self.m == 128 and self.sparse)

    @property
    def splits(self) -> int:
        """Parts of D's columns that lie in lanes of their own: layouts B, E (two), G (four)."""
        if self.ws:
            return {32: 4, 64: 2, 128: 1}[self.m]
        return 2 if self.group == 2 and self.m == 128 and not self.sparse else 1

    def d_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """CTA, lane and column of every element [m, n]."""
        row, column = np.meshgrid(np.arange(self.m), np.arange(self.n), indexing="ij")
        cta, r = np.divmod(row, self.m // self.group)
        part, c = np.divmod(column, self.n // self.splits)
        lanes = self.lane + r // 16 * 32 + r % 16 if self.half_lanes else r + part * (128 // self.splits)
        return cta, lanes, c

    def row_lanes(self, r: int) -> list[int]:
        """All lanes that row r of a CTA has, for what every part of the data path reads itself."""
        if self.half_lanes:
            return [self.lane + r // 16 * 32 + r % 16]
        return [r + 128 // self.splits * i for i in range(self.splits)]

    def instruction_descriptor(self) -> int:
        bits = self.sparse << 2 | self.a.code << 7 | self.b.code << 10 | self.negate << 13
        bits |= self.a_mn << 15 | self.b_mn << 16 | self.n >> 3 << 17
        if self.blocks:
            bits |= self.ids[1] << 4 | (not self.e4m3) << 23 | self.m >> 7 << 27 | self.ids[0] << 29
        else:
            d = self.d if self.d >= 0 else 2 if self.kind == "i8" else 1
            bits |= self.selector | d << 4 | self.m >> 4 << 24 | self.max_shift << 30
        return bits ^ self.extra_bits

    def instruction(self) -> str:
        form = (".ws" if self.ws else "") + (".sp" if self.sparse else "")
        scaled = f".block_scale{self.size}" if self.blocks else ""
        opcode = f"tcgen05.mma{form}.cta_group::{self.group}.kind::{self.kind}{scaled}{self.collector}"
        operands = ["[%r32]", "[%r33]" if self.a_tensor else "%desc0", "%desc1"]
        operands += ["[%r34]"] if self.sparse else []
        operands += ["%r31"] + (["[%r35]", "[%r36]"] if self.blocks else []) + ["%p2"]
        operands += ["%desc2"] if self.mask is not None else []
        operands += [str(self.scale)] if self.scale is not None else []
        return f"{opcode} {', '.join(operands)};"


def metadata_words(case: Case, nibbles: np.ndarray, cells: np.ndarray) -> None:
    """A's metadata, [m, chunks] of four bits, into tensor memory's [cta, lane, column].

    16-bit and 32-bit elements: of 16 rows' lanes, the first eight hold the first half of the columns and the others the second; the
    low half of a word is that of rows 0 to 7, the high half that of rows 8 to 15. Others: 64 bits a row.
    """
    rows = case.m // case.group
    for cta in range(case.group):
        for r in range(rows):
            row = nibbles[cta * rows + r]
            for lane in case.row_lanes(r):
                if case.kind not in ("f16", "tf32"):
                    for c, nibble in enumerate(row):
                        cells[cta, lane, META + c // 8] |= np.uint32(int(nibble) << 4 * (c % 8))
                    continue
                first = lane - r % 16 + r % 8
                for c, nibble in enumerate(row):
                    place_in_word = 4 * (c % 4) + 16 * (r % 16 // 8)
                    cells[cta, first + 8 * (c // 4), META + case.selector] |= np.uint32(int(nibble) << place_in_word)


def scale_words(case: Case, scales: np.ndarray, of_b: bool, cells: np.ndarray) -> None:
    """Scale factors, bytes [rows, blocks], into all four 32-lane partitions: row i at lane i % 32, word i / 32."""
    rows = len(scales) if of_b else case.m // case.group
    for cta in range(case.group):
        for i in range(rows):
            for quarter in range(4):
                at = i
                if of_b and case.splits == 2:  # every half of the lanes has its own half of the columns
                    at = i + (quarter // 2) * (len(scales) // 2)
                    if i >= len(scales) // 2:
                        continue
                source = scales[at if of_b else cta * rows + i]
                word = sum(int(s) << 8 * (case.ids[of_b] + k) for k, s in enumerate(source))
                cells[cta, quarter * 32 + i % 32, (SCALES_B if of_b else SCALES_A) + i // 32] |= np.uint32(word)


def scale_values(raw: np.ndarray, e4m3: bool) -> np.ndarray:
    return narrow("")["e4m3"].values(raw) if e4m3 else 2.0 ** (raw.astype(np.float64) - 127)


@dataclass
class Operands:
    """What a case runs on, and what must come out."""

    image: np.ndarray
    before: np.ndarray
    a_desc: int
    b_desc: int
    want: np.ndarray


def _product(case: Case, x: np.ndarray, y: np.ndarray, sa: np.ndarray | None, sb: np.ndarray | None) -> np.ndarray:
    if sa is None or sb is None:
        return x @ y.T
    k = x.shape[1] // case.blocks
    a = x * np.repeat(scale_values(sa, case.e4m3), k, axis=1)
    b = y * np.repeat(scale_values(sb, case.e4m3), k, axis=1)
    return np.asarray(a @ b.T)


def _shared(case: Case, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Images of the CTAs' shared memory and the descriptors; a, b: raw elements [rows, k]."""
    image = np.zeros((case.group, SIZE), np.uint8)
    start, found = BASE + IMAGE, []
    for raw, element, mn in ((a, case.a, case.a_mn), (b, case.b, case.b_mn)):
        rows = len(raw) // case.group
        if mn and isinstance(element, Element):
            data = raw
        elif mn:
            data = np.ascontiguousarray(packed(element, np.ascontiguousarray(raw.T)).T)
        else:
            data = packed(element, raw)
        operand = place(case.mode, mn, rows, data.shape[1], data.itemsize, start)
        for c in range(case.group):
            write(image[c], operand, data[c * rows : (c + 1) * rows])
        found.append(operand.descriptor())
        start += -(-rows * max(data.shape[1] * data.itemsize, 128) // 1024) * 1024 + 1024
    assert start - BASE - IMAGE <= SIZE
    return image, found[0], found[1]


def accumulators(case: Case, cells: np.ndarray) -> np.ndarray:
    if case.kind == "i8":
        return cells.view(np.int32).astype(np.float64)
    if case.d == 0:
        return (cells & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    return cells.view(np.float32).astype(np.float64)


def cells_of(case: Case, values: np.ndarray) -> np.ndarray:
    if case.kind == "i8":
        return values.astype(np.int64).astype(np.int32).view(np.uint32)
    if case.d == 0:
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return values.astype(np.float32).view(np.uint32)


def operands(case: Case, zero: np.ndarray | None = None, shift: int = 0) -> Operands:
    """zero: columns of B that count as zeros; shift: the column of B that comes first."""
    rng = np.random.default_rng(case.seed)
    stored = case.a.random(rng, (case.m, 2 * case.per))
    k = 2 * case.per << case.sparse
    b = case.b.random(rng, (case.n + (32 if shift else 0), k))
    before = np.zeros((case.group, 128, COLUMNS), np.uint32)
    old = rng.integers(-64, 65, (case.group, 128, 256)) / (1 if case.kind == "i8" else 8)
    before[:, :, D : D + 256] = cells_of(case, old)
    dense = stored
    if case.sparse:
        a = sparse(rng, stored, case.chunk, ordered=False)
        dense = a.dense
        metadata_words(case, a.nibbles, before)
    sa = sb = None
    if case.blocks:
        low, high = (0x38, 0x48) if case.e4m3 else (125, 130)
        sa, sb = (rng.integers(low, high, (rows, case.blocks)).astype(np.uint8) for rows in (case.m, case.n))
        scale_words(case, sa, False, before)
        scale_words(case, sb, True, before)
    if case.a_tensor:
        words, rows = in_tensor_memory(case.a, stored), case.m // case.group
        for r in range(case.m):
            for lane in case.row_lanes(r % rows):
                before[r // rows, lane, A : A + 8] = words[r]
    image, a_desc, b_desc = _shared(case, stored, b)
    y = case.b.values(b)[shift : shift + case.n]
    if zero is not None:
        y = np.where(zero[:, None], 0, y)
    total = _product(case, case.a.values(dense), y, sa, sb) * (-1 if case.negate else 1)
    cta, lane, column = case.d_places()
    if case.accumulate:
        total = total + accumulators(case, before[:, :, D : D + 256])[cta, lane, column] * 2.0 ** -(case.scale or 0)
    want = before.copy()
    want[cta, lane, D + column] = cells_of(case, total)
    return Operands(image, before, a_desc, b_desc, want)


def kernel(case: Case, before_mma: str = "", after_mma: str = "") -> str:
    pair = case.group == 2
    multicast, mask = (".multicast::cluster", ", %h0") if pair else ("", "")
    meet = "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n" if pair else "    bar.sync 0;\n"
    at = {"d": D, "a": A, "meta": META, "scales_a": SCALES_A, "scales_b": SCALES_B} | case.columns
    lane = case.lane << 16
    body = barrier_init() + alloc(512, case.group) + copy_in("image", SIZE) + fill("before", COLUMNS) + meet
    body += f"""
    or.b32 %r30, %thread, %rank;
    setp.ne.u32 %p1, %r30, 0;
    ld.param.u32 %r31, [idesc];
    add.u32 %r32, %tmem, {at["d"] + lane};
    add.u32 %r33, %tmem, {at["a"] + lane};
    add.u32 %r34, %tmem, {at["meta"] + lane};
    add.u32 %r35, %tmem, {at["scales_a"]};
    add.u32 %r36, %tmem, {at["scales_b"]};
    setp.eq.u32 %p2, {int(case.accumulate)}, 1;
    mov.b16 %h0, 3;
    ld.param.u64 %desc0, [a_desc];
    ld.param.u64 %desc1, [b_desc];
    mov.u64 %desc2, {case.mask or 0};
    @%p1 bra ISSUED;
    {before_mma}
    {case.instruction()}
    {after_mma}
    tcgen05.commit.cta_group::{case.group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%base]{mask};
ISSUED:
"""
    body += wait("DONE") + dump("after", COLUMNS) + (meet if pair else "") + dealloc(512, case.group)
    params = ".param .u64 image, .param .u64 before, .param .u64 a_desc, .param .u64 b_desc, .param .u32 idesc, .param .u64 after"
    return module(body, params)


def execute(case: Case, on: Operands, edit: Callable[[str], str] | None = None, **options: Any) -> np.ndarray:
    """Tensor memory after it."""
    text = kernel(case, options.pop("before_mma", ""), options.pop("after_mma", ""))
    if edit is not None:
        changed = edit(text)
        assert changed != text
        text = changed
    after = torch.zeros(case.group, 128, COLUMNS, dtype=torch.int32)
    descriptors = [d.to_bytes(8, "little") for d in (on.a_desc, on.b_desc)]
    args = [tensor(on.image), tensor(on.before), *descriptors, case.instruction_descriptor(), after]
    launch(text, args, pair=case.group == 2, **options)
    return np.asarray(after.numpy().view(np.uint32))


def check(case: Case, **options: Any) -> None:
    on = operands(case)
    np.testing.assert_array_equal(execute(case, on, **options), on.want)


def store_in_flight(text: str, column: int, warp: int) -> str:
    """The kernel with a store of a warp to its lanes of a column, while the MMA may be in flight."""
    store = f"""
    setp.ne.u32 %p8, %warp, {warp};
    @%p8 bra DONE;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%quad+{column}], {{%thread}};
"""
    return text.replace("\nDONE:", store + "DONE:")
