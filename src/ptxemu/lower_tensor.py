"""tcgen05: Blackwell's tensor memory and tensor core."""

from __future__ import annotations

import re

from .lower import SINK, Lowering, lowers
from .lower_flow import known
from .ptx import Imm, Instr, Mem, Operand, Vec

KINDS = {"kind::f16": 0, "kind::tf32": 1, "kind::f8f6f4": 2, "kind::i8": 3}
COLLECTOR = {f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard")}
GROUPS = {"cta_group::1": 1, "cta_group::2": 2}
SHAPES = {"32x32b": (0, 1), "16x64b": (1, 1), "16x128b": (2, 2), "16x256b": (3, 4), "16x32bx2": (4, 1)}
"""Code and registers for `.x1` of the shapes of tcgen05.ld and .st."""
COPIES = {
    ("128x256b", None): 0, ("4x256b", None): 1, ("128x128b", None): 2, ("64x128b", "warpx2::02_13"): 3,
    ("64x128b", "warpx2::01_23"): 4, ("32x128b", "warpx4"): 5,
}  # fmt: skip


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
def _transfer(low: Lowering, ins: Instr) -> None:
    """tcgen05.ld and .st."""
    load = ins.parts[1] == "ld"
    if "red" in ins.parts:
        raise low.unsupported("tcgen05.ld.red (sm_101 and sm_103 only)")
    counts = {f"x{1 << i}" for i in range(8)}
    packing = "pack::16b" if load else "unpack::16b"
    mods = known(low, ins, "ld" if load else "st", "sync", "aligned", "b32", packing, sets=(set(SHAPES), counts))
    shape = next((s for s in SHAPES if s in mods), None)
    count = next((int(c[1:]) for c in counts if c in mods), 0)
    if shape is None or not count:
        raise low.unsupported("a shape and a repeat count are needed")
    code, per = SHAPES[shape]
    registers = per * count
    if registers > 128:
        raise low.unsupported(f".x{count} does not exist for .{shape}")
    args = list(ins.args)
    memory = args.pop(1 if load else 0)
    half = 0
    if shape == "16x32bx2":
        split = args.pop(1 if load else 0)
        if not isinstance(split, Imm):
            raise low.unsupported("immHalfSplitoff must be an immediate")
        half = split.value
    values = low.vector(args[0])
    if len(args) != 1 or len(values) != registers:
        raise low.unsupported(f"{len(values)} registers; .{shape}.x{count} has {registers}")
    address, offset = _address(low, memory)
    operands = [low.target(v, 32) if load else low.operand(v, "b32") for v in values]
    low.emit(
        f"tcgen05.{ins.parts[1]}", [address, *operands],
        [code | registers << 8 | (packing in mods) << 16, half, offset, low.index],
        aligned=True,
    )  # fmt: skip


# ---- the tensor core ---------------------------------------------------------------------------------------------------------------
def _mma(low: Lowering, ins: Instr) -> None:
    for form in ("ws", "sp", "block_scale", "ashift"):
        if form in ins.parts:
            raise low.unsupported(f"tcgen05.mma.{form}")
    for part in ins.parts:
        if part.startswith("kind::") and part not in KINDS:
            raise low.unsupported(f"tcgen05.mma.{part}")
    mods = known(low, ins, "mma", *KINDS, *GROUPS, sets=(COLLECTOR,))
    kinds = mods & set(KINDS)
    if len(kinds) != 1:
        raise low.unsupported("one .kind is needed")
    kind, group = KINDS[kinds.pop()], _group(low, mods)
    d, d_offset = _address(low, ins.args[0])
    in_tensor = isinstance(ins.args[1], Mem)
    a, a_offset = _address(low, ins.args[1]) if in_tensor else (low.operand(ins.args[1], "b64"), 0)
    rest = list(ins.args[4:])
    lanes: list[int] = []
    if rest and isinstance(rest[0], Vec):
        lanes = [low.operand(x, "b32") for x in rest.pop(0).items]
        if len(lanes) != 4 * group:
            raise low.unsupported(f"disable-output-lane of {len(lanes)} registers; .cta_group::{group} has {4 * group}")
    if not 1 <= len(rest) <= 2:
        raise low.unsupported("operands")
    enable, negated = low.predicate(rest[0])
    scale = 0
    if len(rest) == 2:
        if not isinstance(rest[1], Imm) or not 0 <= rest[1].value <= 15 or kind > 1:
            raise low.unsupported("scale-input-d must be an immediate from 0 to 15, of kind::f16 or kind::tf32")
        scale = rest[1].value
    args = [d, a, low.operand(ins.args[2], "b64"), low.operand(ins.args[3], "b32"), enable, *lanes]
    low.emit("tcgen05.mma", args, [kind | in_tensor << 4 | negated << 5 | group << 8, scale, d_offset, a_offset])


def _cp(low: Lowering, ins: Instr) -> None:
    for part in ins.parts:
        if re.fullmatch(r"b8x16|b6x16_p32|b4x16_p64", part):
            raise low.unsupported("tcgen05.cp with decompression")
    shapes, spreads = {s for s, _ in COPIES}, {m for _, m in COPIES if m}
    mods = known(low, ins, "cp", *GROUPS, sets=(shapes, spreads))
    shape = next((s for s in shapes if s in mods), "")
    code = COPIES.get((shape, next((m for m in spreads if m in mods), None)))
    if code is None:
        raise low.unsupported("shape and multicast")
    address, offset = _address(low, ins.args[0])
    low.emit("tcgen05.cp", [address, low.operand(ins.args[1], "b64")], [code | _group(low, mods) << 8, 0, offset])


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
