"""tcgen05: Blackwell's tensor memory and tensor core."""

from __future__ import annotations

from .lower import SINK, Lowering, lowers
from .lower_flow import known
from .ptx import Imm, Instr, Mem, Operand, Vec

KINDS = {
    "kind::f16": 0, "kind::tf32": 1, "kind::f8f6f4": 2, "kind::i8": 3, "kind::mxf8f6f4": 4, "kind::mxf4": 5, "kind::mxf4nvf4": 6,
}  # fmt: skip
"""Numbered as in tensor_core.h."""
SCALES = {
    "kind::mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "kind::mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "kind::mxf4nvf4": {"scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4, "block32": 2},
}
"""Scale factors a row, by what an instruction says of them ("Valid combinations of scale_vectorsize with types and MMA-Kind")."""
SIZES = {"scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32"}
USES = ("fill", "use", "lastuse", "discard")
COLLECTOR = {f"collector::a::{use}" for use in USES}
COLLECTOR_WS = {f"collector::b{i}::{use}" for i in range(4) for use in USES}
GROUPS = {"cta_group::1": 1, "cta_group::2": 2}
SHAPES = {"32x32b": (0, 1), "16x64b": (1, 1), "16x128b": (2, 2), "16x256b": (3, 4), "16x32bx2": (4, 1)}
"""Code and registers for `.x1` of the shapes of tcgen05.ld and .st."""
COPIES = {
    ("128x256b", None): 0, ("4x256b", None): 1, ("128x128b", None): 2, ("64x128b", "warpx2::02_13"): 3,
    ("64x128b", "warpx2::01_23"): 4, ("32x128b", "warpx4"): 5,
}  # fmt: skip
PACKED = {"b4x16_p64": 4, "b6x16_p32": 6}
"""Bits of an element of the source formats that tcgen05.cp decompresses."""


@lowers("tcgen05")
def _tcgen05(low: Lowering, ins: Instr) -> None:
    if low.arch < 100:
        raise low.unsupported("tcgen05 needs sm_100a; this PTX is for an older target")
    what = ins.parts[1]
    handler = _HANDLERS.get(what)
    if handler is None:
        raise low.unsupported(f"no tcgen05.{what} here")
    handler(low, ins)


def _group(low: Lowering, mods: set[str]) -> int:
    named = mods & set(GROUPS)
    if len(named) != 1:
        raise low.unsupported("one .cta_group is needed")
    return GROUPS[named.pop()]


def _address(low: Lowering, a: Operand) -> tuple[int, int]:
    """A tensor memory address in brackets: operand and offset."""
    operand, offset, wide = low.address(a, "shared")
    if wide:
        raise low.unsupported("a tensor memory address of 64 bits")
    return operand, offset


# ---- allocation, waits, fences ---------------------------------------------------------------------------------------------------
def _alloc(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "alloc", "sync", "aligned", "shared::cta", "b32", *GROUPS)
    address, offset, generic = low.address(ins.args[0], "shared")
    low.emit(
        "tcgen05.alloc", [address, low.operand(ins.args[1], "u32")], [offset, generic, _group(low, mods)],
        aligned=True, blocking=True,
    )  # fmt: skip


def _dealloc(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "dealloc", "sync", "aligned", "b32", *GROUPS)
    args = [low.operand(ins.args[0], "b32"), low.operand(ins.args[1], "u32")]
    low.emit("tcgen05.dealloc", args, [0, 0, _group(low, mods)], aligned=True, blocking=True)


def _relinquish(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "relinquish_alloc_permit", "sync", "aligned", *GROUPS)
    low.emit("tcgen05.relinquish", [], [0, 0, _group(low, mods)], aligned=True)


def _wait(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "wait::ld", "wait::st", "sync", "aligned")
    low.emit("tcgen05.wait_ld" if "wait::ld" in mods else "tcgen05.wait_st", aligned=True)


def _fence(low: Lowering, ins: Instr) -> None:
    known(low, ins, "fence::before_thread_sync", "fence::after_thread_sync")
    low.emit("tcgen05.fence")


# ---- ld, st ------------------------------------------------------------------------------------------------------------------------
_RED = {"red", "min", "max", "abs", "NaN", "u32", "s32", "f32"}


def _reduction(low: Lowering, ins: Instr) -> int:
    """RED_* of tensor.c for tcgen05.ld.red, else 0."""
    mods = set(ins.parts)
    if "red" not in mods:
        return 0
    if low.arch != 103:
        raise low.unsupported("tcgen05.ld.red needs sm_103a")
    types, floating = mods & {"u32", "s32", "f32"}, "f32" in mods
    if len(mods & {"min", "max"}) != 1 or len(types) != 1 or (mods & {"abs", "NaN"} and not floating):
        raise low.unsupported(
            "one of .min and .max and one of .u32, .s32 and .f32 are needed; .abs and .NaN are those of .f32"
        )
    return (
        (1 if "min" in mods else 2) | ("s32" in mods) << 2 | floating << 3 | ("abs" in mods) << 4 | ("NaN" in mods) << 5
    )


def _transfer(low: Lowering, ins: Instr) -> None:
    """tcgen05.ld and .st."""
    load = ins.parts[1] == "ld"
    reduction = _reduction(low, ins)
    counts = {f"x{1 << i}" for i in range(8)}
    packing = "pack::16b" if load else "unpack::16b"
    types = _RED if reduction else {"b32", packing}
    mods = known(low, ins, "ld" if load else "st", "sync", "aligned", sets=(set(SHAPES), counts, types))
    shape = next((s for s in SHAPES if s in mods), None)
    count = next((int(c[1:]) for c in counts if c in mods), 0)
    if shape is None or not count:
        raise low.unsupported("a shape and a repeat count are needed")
    code, per = SHAPES[shape]
    registers = per * count
    if registers > 128:
        raise low.unsupported(f".x{count} does not exist for .{shape}")
    args = list(ins.args)
    result = [low.target(args.pop(1), 32)] if reduction else []
    memory = args.pop(1 if load else 0)
    half = 0
    if shape == "16x32bx2":
        split = args.pop(1 if load else 0)
        if not isinstance(split, Imm):
            raise low.unsupported("immHalfSplitoff must be an immediate")
        half = split.value
    if reduction and (shape != "32x32b" or count < 2):
        raise low.unsupported(".red of a shape other than .32x32b, .x2 and more")
    values = low.vector(args[0])
    if len(args) != 1 or len(values) != registers:
        raise low.unsupported(f"{len(values)} registers; .{shape}.x{count} has {registers}")
    address, offset = _address(low, memory)
    operands = [low.target(v, 32) if load else low.operand(v, "b32") for v in values]
    low.emit(
        f"tcgen05.{ins.parts[1]}", [address, *operands, *result],
        [code | registers << 8 | (packing in mods) << 16 | reduction << 17, half, offset, low.index],
        aligned=True,
    )  # fmt: skip


# ---- the tensor core ---------------------------------------------------------------------------------------------------------------
def _mma(low: Lowering, ins: Instr) -> None:
    """tcgen05.mma {.ws} {.sp} [d], a, b {, [metadata]}, idesc, then
    {, disable-output-lane}, enable-input-d {, scale-input-d}; block-scaled: [scales of A], [scales of B], enable-input-d;
    .ws: enable-input-d {, zero-column-mask}"""
    if "ashift" in ins.parts:
        raise low.unsupported('tcgen05.mma.ashift (PTX ISA, "tcgen05.mma")')
    for part in ins.parts:
        if part.startswith("kind::") and part not in KINDS:
            raise low.unsupported(f"tcgen05.mma.{part}")
    collector = COLLECTOR_WS if "ws" in ins.parts else COLLECTOR
    mods = known(low, ins, "mma", "ws", "sp", "block_scale", *KINDS, *GROUPS, sets=(collector, SIZES))
    kinds = mods & set(KINDS)
    if len(kinds) != 1:
        raise low.unsupported("one .kind is needed")
    name = kinds.pop()
    kind, group = KINDS[name], _group(low, mods)
    ws, sparse, blocks = "ws" in mods, "sp" in mods, _blocks(low, mods, name)
    if ws and (blocks or group == 2):
        raise low.unsupported("tcgen05.mma.ws is not block-scaled and has .cta_group::1")
    d, d_offset = _address(low, ins.args[0])
    in_tensor = isinstance(ins.args[1], Mem)
    a, a_offset = _address(low, ins.args[1]) if in_tensor else (low.operand(ins.args[1], "b64"), 0)
    b, rest = low.operand(ins.args[2], "b64"), list(ins.args[3:])
    meta, meta_offset = _address(low, rest.pop(0)) if sparse else (SINK, 0)
    if not rest:
        raise low.unsupported("operands")
    idesc = low.operand(rest.pop(0), "b32")
    scales = [_address(low, rest.pop(0)) for _ in range(2)] if blocks and len(rest) == 3 else [(SINK, 0)] * 2
    lanes: list[int] = []
    if rest and isinstance(rest[0], Vec) and not ws and not blocks:
        lanes = [low.operand(x, "b32") for x in rest.pop(0).items]
        if len(lanes) != 4 * group:
            raise low.unsupported(f"disable-output-lane of {len(lanes)} registers; .cta_group::{group} has {4 * group}")
    if not 1 <= len(rest) <= (1 if blocks else 2) or (blocks and scales[0][0] == SINK):
        raise low.unsupported("operands")
    enable, negated = low.predicate(rest[0])
    scale, mask = 0, SINK
    if len(rest) == 2 and ws:
        mask = low.operand(rest[1], "b64")
    elif len(rest) == 2:
        if not isinstance(rest[1], Imm) or not 0 <= rest[1].value <= 15 or kind > 1:
            raise low.unsupported("scale-input-d must be an immediate from 0 to 15, of kind::f16 or kind::tf32")
        scale = rest[1].value
    form = 0 if not sparse else 1 if name == "kind::tf32" else 3 if kind >= KINDS["kind::mxf4"] else 2
    flags = kind | in_tensor << 4 | negated << 5 | ws << 6 | blocks << 7 | group << 10 | form << 12 | scale << 16
    args = [d, a, b, idesc, enable, meta, scales[0][0], scales[1][0], mask, *lanes]
    offsets = ((flags, scales[1][1]), (d_offset, a_offset), (meta_offset, scales[0][1]))
    low.emit("tcgen05.mma", args, [_two(*pair) for pair in offsets])


def _two(low: int, high: int) -> int:
    """Two 32-bit numbers in one 64-bit immediate of the core."""
    value = low & 0xFFFFFFFF | (high & 0xFFFFFFFF) << 32
    return value - (1 << 64) if value >> 63 else value


def _blocks(low: Lowering, mods: set[str], kind: str) -> int:
    """Scale factors of a row; 0: the kind has none."""
    sizes = mods & SIZES
    if ("block_scale" in mods) != (kind in SCALES) or (sizes and kind not in SCALES) or len(sizes) > 1:
        raise low.unsupported(
            "tcgen05.mma.block_scale and its size are those of kind::mxf8f6f4, kind::mxf4 and kind::mxf4nvf4"
        )
    if kind not in SCALES:
        return 0
    size = next(iter(sizes), "")
    if size not in SCALES[kind]:
        raise low.unsupported(f"{kind} has no .{size}" if size else f"{kind} needs a size of its scale vectors")
    return SCALES[kind][size]


def _cp(low: Lowering, ins: Instr) -> None:
    shapes, spreads = {s for s, _ in COPIES}, {m for _, m in COPIES if m}
    mods = known(low, ins, "cp", "b8x16", *PACKED, *GROUPS, sets=(shapes, spreads))
    shape = next((s for s in shapes if s in mods), "")
    code = COPIES.get((shape, next((m for m in spreads if m in mods), None)))
    if code is None:
        raise low.unsupported("shape and multicast")
    packed = [p for p in PACKED if p in mods]
    if len(packed) != ("b8x16" in mods):
        raise low.unsupported(f"decompression is .b8x16 with one of .{' and .'.join(PACKED)}")
    bits = PACKED[packed[0]] if packed else 0
    address, offset = _address(low, ins.args[0])
    low.emit("tcgen05.cp", [address, low.operand(ins.args[1], "b64")], [code | _group(low, mods) << 8, bits, offset])


def _shift(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "shift", "down", *GROUPS)
    address, offset = _address(low, ins.args[0])
    low.emit("tcgen05.shift", [address], [_group(low, mods) << 8, 0, offset])


def _commit(low: Lowering, ins: Instr) -> None:
    mods = known(
        low, ins, "commit", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64", *GROUPS
    )  # fmt: skip
    if "mbarrier::arrive::one" not in mods or ("multicast::cluster" in mods) != (len(ins.args) == 2):
        raise low.unsupported("operands")
    address, offset, generic = low.address(ins.args[0], "shared")
    mask = low.operand(ins.args[1], "b16") if len(ins.args) == 2 else SINK
    low.emit("tcgen05.commit", [address, mask], [offset, generic, _group(low, mods)])


_HANDLERS = {
    "alloc": _alloc, "dealloc": _dealloc, "relinquish_alloc_permit": _relinquish, "wait::ld": _wait, "wait::st": _wait,
    "fence::before_thread_sync": _fence, "fence::after_thread_sync": _fence, "ld": _transfer, "st": _transfer,
    "mma": _mma, "cp": _cp, "shift": _shift, "commit": _commit,
}  # fmt: skip
