"""Matrix multiply-accumulate of a warp (mma.sync, mma.sp) and of a warpgroup (wgmma), dense and with a sparse A."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .lower import Lowering, lowers
from .ptx import Imm, Instr, Operand, Vec

TYPES = {
    "f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "s8": 5, "u8": 6, "f32": 7, "s32": 8, "f64": 9, "s4": 10, "u4": 11,
}  # fmt: skip
"""Element types, numbered as in dot.h."""
EIGHT_BIT_FLOATS = ("e4m3", "e5m2")
INTEGERS = ("s8", "u8")
NIBBLES = ("s4", "u4")
SPARSE = ("sp", "sp::ordered_metadata")
SPARSE_FORMS = {"tf32": 1, "f16": 2, "bf16": 2, "f8": 2, "i8": 2, "i4": 3}
"""Granularity of a sparse A by its kind, numbered as in sparse.h."""

# (types of A and B, of C and D) to shapes (PTX ISA: "Multiply-and-Accumulate Instruction: mma").
_MMA = {
    ("f16", "f16"): ((16, 8, 8), (16, 8, 16)),
    ("f16", "f32"): ((16, 8, 8), (16, 8, 16)),
    ("bf16", "f32"): ((16, 8, 8), (16, 8, 16)),
    ("tf32", "f32"): ((16, 8, 4), (16, 8, 8)),
    ("f8", "f16"): ((16, 8, 16), (16, 8, 32)),
    ("f8", "f32"): ((16, 8, 16), (16, 8, 32)),
    ("i8", "s32"): ((8, 8, 16), (16, 8, 16), (16, 8, 32)),
    ("i4", "s32"): ((8, 8, 32), (16, 8, 32), (16, 8, 64)),
    ("f64", "f64"): ((8, 8, 4), (16, 8, 4), (16, 8, 8), (16, 8, 16)),
}
# The same of a sparse A ("Multiply-and-Accumulate Instruction: mma.sp / mma.sp::ordered_metadata").
_MMA_SPARSE = {
    ("f16", "f16"): ((16, 8, 16), (16, 8, 32)),
    ("f16", "f32"): ((16, 8, 16), (16, 8, 32)),
    ("bf16", "f32"): ((16, 8, 16), (16, 8, 32)),
    ("tf32", "f32"): ((16, 8, 8), (16, 8, 16)),
    ("f8", "f32"): ((16, 8, 64),),
    ("i8", "s32"): ((16, 8, 32), (16, 8, 64)),
    ("i4", "s32"): ((16, 8, 64), (16, 8, 128)),
}
_WGMMA_K = {
    ("f16", "f16"): 16, ("f16", "f32"): 16, ("bf16", "f32"): 16, ("tf32", "f32"): 8, ("f8", "f16"): 32, ("f8", "f32"): 32,
    ("i8", "s32"): 32,
}  # fmt: skip


def _kind(type_: str) -> str:
    return "f8" if type_ in EIGHT_BIT_FLOATS else "i8" if type_ in INTEGERS else "i4" if type_ in NIBBLES else type_


def _selector(low: Lowering, a: Operand, kind: str, chunks: int) -> int:
    """The sparsity selector: which of four threads hold the metadata of a row's chunks."""
    small = kind in ("f8", "i8", "i4")
    holders = 4 // (chunks // 4)
    if not isinstance(a, Imm) or a.isfloat or not 0 <= a.value < holders:
        why = "4-bit and 8-bit" if small else "16-bit and 32-bit"
        raise low.unsupported(
            f"the sparsity selector must be an immediate below {holders} for {chunks} chunks of {why} elements"
        )
    return a.value


def _shape(low: Lowering, ins: Instr) -> tuple[int, int, int]:
    for part in ins.parts:
        m = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", part)
        if m:
            return int(m[1]), int(m[2]), int(m[3])
    raise low.unsupported("no shape")


def _registers(low: Lowering, a: Operand, count: int, type_: str, name: str) -> list[int]:
    items = low.vector(a)
    if len(items) != count:
        raise low.unsupported(f"{name} has {len(items)} registers; the shape takes {count}")
    return [low.operand(x, type_) for x in items]


def _targets(low: Lowering, a: Operand, count: int, width: int) -> list[int]:
    items = low.vector(a)
    if len(items) != count:
        raise low.unsupported(f"D has {len(items)} registers; the shape takes {count}")
    places = [low.target(x, width) for x in items]
    if any(p < 0 for p in places):
        raise low.unsupported("the destination _")
    return places


def _types(low: Lowering, ins: Instr, first: int, known: Sequence[str], count: int) -> tuple[list[str], set[str]]:
    """The `count` types that end an opcode, and the modifiers before them; one that is not known is unsupported."""
    for part in ins.parts:
        if part == "block_scale" or part.startswith("kind::"):
            raise low.unsupported(
                f".{part} (narrow floats of warps, block-scaled ones too) needs sm_120a, not emulated"
            )
    types, mods = list(ins.parts[-count:]), ins.parts[first:-count]
    for type_ in types:
        if type_ not in TYPES:
            raise low.unsupported(f"type .{type_}")
    for mod in mods:
        if mod not in known and not re.fullmatch(r"m\d+n\d+k\d+", mod):
            raise low.unsupported(f"modifier .{mod}")
    return types, set(mods)


@lowers("mma")
def _mma(low: Lowering, ins: Instr) -> None:
    (d, a, b, c), mods = _types(low, ins, 1, ("sync", "aligned", "row", "col", "satfinite", *SPARSE), 4)
    m, n, k = _shape(low, ins)
    kind, sparse = _kind(a), bool(mods & set(SPARSE))
    shapes = _MMA_SPARSE if sparse else _MMA
    if d != c or kind != _kind(b) or (m, n, k) not in shapes.get((kind, d), ()):
        raise low.unsupported("this shape with these types")
    if not {"row", "col"} <= mods:
        raise low.unsupported("layouts other than .row.col")
    if "satfinite" in mods and a not in INTEGERS + NIBBLES:
        raise low.unsupported("modifier .satfinite")
    if len(ins.args) != (6 if sparse else 4):
        raise low.unsupported("operands other than d, a, b, c" + (", metadata, selector" if sparse else ""))
    halves = m // 8
    groups = k // {"f64": 4, "tf32": 4, "i4": 32, "f8": 16, "i8": 16}.get(kind, 8)
    stored = groups // 2 if sparse else groups
    count = halves if d == "f16" else 2 * halves
    source, accumulator = ("f64", "f64") if a == "f64" else ("b32", "f32" if d == "f32" else "b32")
    args = [
        *_targets(low, ins.args[0], count, 64 if a == "f64" else 32),
        *_registers(low, ins.args[1], halves * stored, source, "A"),
        *_registers(low, ins.args[2], groups, source, "B"),
        *_registers(low, ins.args[3], count, accumulator, "C"),
    ]
    flags = int("satfinite" in mods)
    if sparse:
        form = SPARSE_FORMS[kind]
        args.append(low.operand(ins.args[4], "b32"))
        selector = _selector(low, ins.args[5], kind, k >> form)
        flags |= form << 1 | ("sp::ordered_metadata" in mods) << 3 | selector << 4
    shares = count | halves * stored << 8 | groups << 16
    imm = [m | n << 8 | k << 16, TYPES[a] | TYPES[b] << 8 | TYPES[d] << 16, flags, shares]
    low.emit("mma.sync.f64" if a == "f64" else "mma.sync", args, imm, aligned=True)


@lowers("wgmma")
def _wgmma(low: Lowering, ins: Instr) -> None:
    if low.arch != 90:
        raise low.unsupported("wgmma exists on sm_90a only")
    what, mods = ins.parts[1], set(ins.parts[2:])
    if what == "mma_async":
        _mma_async(low, ins)
        return
    if mods != {"sync", "aligned"} or what not in ("fence", "commit_group", "wait_group"):
        raise low.unsupported()
    if what != "wait_group":
        low.emit(f"wgmma.{what}", aligned=True)
        return
    count = ins.args[0]
    if not isinstance(count, Imm) or not 0 <= count.value <= 7:
        raise low.unsupported("wgmma.wait_group takes an immediate from 0 to 7")
    low.emit("wgmma.wait_group", [], [count.value], aligned=True, blocking=True)


def _mma_async(low: Lowering, ins: Instr) -> None:
    """wgmma.mma_async d, a, b {, metadata, selector}, scale-d {, scale-a, scale-b {, trans-a} {, trans-b}}"""
    (d, a, b), mods = _types(low, ins, 2, ("sync", "aligned", "satfinite", "sp"), 3)
    m, n, k = _shape(low, ins)
    kind, integer, sparse = _kind(a), a in INTEGERS, "sp" in mods
    if m != 64 or n % 8 or not 8 <= n <= 256 or kind != _kind(b) or _WGMMA_K.get((kind, d), 0) << sparse != k:
        raise low.unsupported("this shape with these types")
    if kind != "f8" and not integer and a != b:
        raise low.unsupported("A and B of different types")
    if integer and n % 16 and n not in (8, 24):
        raise low.unsupported("this shape with these types")
    if "satfinite" in mods and not integer:
        raise low.unsupported("modifier .satfinite")
    registers = isinstance(ins.args[1], Vec)
    names = [] if integer else ["scale-a", "scale-b"]
    if kind in ("f16", "bf16"):
        names += ["trans-b"] if registers else ["trans-a", "trans-b"]
    first = 5 if sparse else 3
    given = ins.args[first + 1 :]
    if len(ins.args) <= first or len(given) != len(names):
        raise low.unsupported(f"{len(given)} immediates; this form takes {', '.join(names) or 'none'}")
    value = {"scale-a": 1, "scale-b": 1, "trans-a": 0, "trans-b": 0}
    for name, x in zip(names, given, strict=True):
        allowed = (1, -1) if name.startswith("scale") else (0, 1)
        if not isinstance(x, Imm) or x.isfloat or x.value not in allowed:
            raise low.unsupported(f"imm-{name} must be one of {allowed}")
        value[name] = x.value
    scale, negated = low.predicate(ins.args[first])
    args = _targets(low, ins.args[0], n // 4 if d == "f16" else n // 2, 32)
    args += _registers(low, ins.args[1], 4, "b32", "A") if registers else [low.operand(ins.args[1], "b64")]
    args += [low.operand(ins.args[2], "b64"), scale]
    flags = registers | (value["scale-a"] != value["scale-b"]) << 1 | value["trans-a"] << 2 | value["trans-b"] << 3
    flags |= negated << 4 | ("satfinite" in mods) << 5
    if sparse:
        form = SPARSE_FORMS[kind]
        args.append(low.operand(ins.args[3], "b32"))
        flags |= form << 6 | _selector(low, ins.args[4], kind, k >> form) << 8
    imm = [n | k << 16, TYPES[a] | TYPES[b] << 8 | TYPES[d] << 16, flags]
    low.emit("wgmma.mma_async", args, imm, aligned=True)
