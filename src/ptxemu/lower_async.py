"""Asynchronous copies: cp.async, bulk copies, tensor copies, tensor maps."""

from __future__ import annotations

from dataclasses import dataclass

from .lower import SINK, Lowering, lowers
from .lower_common import requires
from .lower_flow import SCOPES, known
from .lower_memory import HINTS, OPERATIONS, reduction, type_of
from .ptx import Imm, Instr, Mem, Operand, Reg, Vec

DIMENSIONS = {"1d", "2d", "3d", "4d", "5d"}
COMPLETE = "mbarrier::complete_tx::bytes"
_F32_FTZ = 8  # T_F32_FTZ: additions of f32 in global memory flush subnormals


def _pack(low: int, high: int) -> int:
    """Two 32-bit words as the signed 64-bit immediate that holds them."""
    value = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    return value - (1 << 64) if value >> 63 else value


def _global(low: Lowering, a: Operand) -> tuple[int, int]:
    at, off, wide = low.address(a, "global")
    if not wide:
        raise low.unsupported("a 32-bit global address")
    return at, off


@lowers("cp")
def _cp(low: Lowering, ins: Instr) -> None:
    parts = ins.parts
    if "tensor" in parts:
        _tensor(low, ins)
    elif "commit_group" in parts:
        known(low, ins, "async", "bulk", "commit_group")
        low.emit("group.commit", [], ["bulk" in parts])
    elif "wait_group" in parts:
        known(low, ins, "async", "bulk", "wait_group", "read")
        count = ins.args[0]
        if not isinstance(count, Imm):
            raise low.unsupported("a group count that is no constant")
        low.emit("group.wait", [], ["bulk" in parts, count.value, "read" in parts, 0])
    elif "wait_all" in parts:
        known(low, ins, "async", "wait_all")
        low.emit("group.wait", [], [0, 0, 0, 1])
    elif "bulk" in parts:
        _bulk(low, ins)
    elif "mbarrier" in parts:
        known(low, ins, "async", "mbarrier", "arrive", "noinc", "shared", "shared::cta", "b64")
        at, off, wide = low.address(ins.args[0], "shared")
        low.emit("cp.async.arrive", [at], [off, wide, "noinc" in parts])
    else:
        _cp_async(low, ins)


def _cp_async(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "async", "ca", "cg", "shared", "shared::cta", "global", sets=(HINTS,))
    dst, src, size, *rest = ins.args
    if not isinstance(size, Imm) or size.value not in ((16,) if "cg" in mods else (4, 8, 16)):
        raise low.unsupported("a size that is not 4, 8 or 16 bytes (.cg: 16)")
    if "L2::cache_hint" in mods:
        rest.pop()
    source_size = ignore = SINK
    negated = False
    for a in rest:
        if isinstance(a, Reg) and a.width == 1:
            ignore, negated = low.predicate(a)
        else:
            source_size = low.operand(a, "u32")
    at, off, wide = low.address(dst, "shared")
    source, source_off = _global(low, src)
    low.emit("cp.async", [at, source, source_size, ignore], [off, source_off, size.value | wide << 8 | negated << 9])


def _bulk(low: Lowering, ins: Instr) -> None:
    mods = known(
        low, ins, "async", "bulk", "reduce", "prefetch", "L2", "shared::cluster", "shared::cta", "global", COMPLETE,
        "bulk_group", "multicast::cluster", "noftz", *OPERATIONS[:8], "f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64",
        sets=({"L2::cache_hint"},),
    )  # fmt: skip
    args = list(ins.args)
    if "L2::cache_hint" in mods:
        args.pop()
    if "prefetch" in mods:
        at, off = _global(low, args[0])
        low.emit("cp.bulk.prefetch", [at, low.operand(args[1], "u32")], [off])
        return
    to, source = [p for p in ins.parts if p in ("shared::cluster", "shared::cta", "global")][:2]
    operation, number = reduction(low, ins) if "reduce" in mods else (-1, 0)
    size = low.operand(args[2], "u32")
    if to == "global":
        if source != "shared::cta" or "bulk_group" not in mods or len(args) != 3:
            raise low.unsupported()
        dst, dst_off = _global(low, args[0])
        src, src_off, wide = low.address(args[1], "shared")
        if operation >= 0 and type_of(ins) == "f32":
            number = _F32_FTZ
        low.emit(
            "cp.bulk",
            [dst, src, size, SINK, SINK],
            [_pack(dst_off, src_off), _pack(0, 16 | 1 | wide << 1), _pack(operation, number)],
        )
        return
    multicast = "multicast::cluster" in mods
    if COMPLETE not in mods or len(args) != 4 + multicast or (operation >= 0 and source == "global"):
        raise low.unsupported()
    dst, dst_off, dst_wide = low.address(args[0], "shared")
    if source == "global":
        (src, src_off), src_wide = _global(low, args[1]), 1
    else:
        src, src_off, src_wide = low.address(args[1], "shared")
    bar, bar_off, bar_wide = low.address(args[3], "shared")
    flags = dst_wide | src_wide << 1 | bar_wide << 2 | (source != "global") << 3
    mask = low.operand(args[4], "u16") if multicast else SINK
    low.emit(
        "cp.bulk",
        [dst, src, size, bar, mask],
        [_pack(dst_off, src_off), _pack(bar_off, flags), _pack(operation, number)],
    )


MODES = ("tile", "tile::gather4", "im2col", "im2col::w", "im2col::w::128")
"""How copies walk through a tensor, numbered as in memory.h."""
_SPELLINGS = {"tile::scatter4": "tile::gather4", "im2col_no_offs": "im2col"}
"""Modes of stores."""


@dataclass(frozen=True)
class _Tensor:
    """What all instructions on tensors say: the map, where in the tensor, how. `imm`: mode and number of coordinates for tma.c."""

    at: int
    off: int
    coordinates: list[int]
    imm: int


def _mode(low: Lowering, ins: Instr, kind: str) -> str:
    """The mode among an instruction's modifiers, as `MODES` names it. kind: "load", "store" or "prefetch"."""
    allowed = ("tile", *_SPELLINGS) if kind == "store" else MODES
    if "reduce" in ins.parts:
        allowed = ("tile", "im2col_no_offs")
    given = [p for p in ins.parts if p.startswith(("tile", "im2col"))] or ["tile"]
    if len(given) > 1 or given[0] not in allowed:
        raise low.unsupported(f"mode .{given[-1]} of a {kind}")
    mode = given[0]
    if mode not in ("tile", "im2col", "im2col_no_offs"):
        requires(low, 100, f".{mode}")
    return _SPELLINGS.get(mode, mode)


def _tensor_operand(low: Lowering, a: Operand, rank: int, mode: str) -> _Tensor:
    """A tensor map and coordinates, `[map, {c0, ...}]`."""
    if mode == "tile::gather4" and rank != 2:
        raise low.unsupported("four rows of a tensor that is not .2d")
    if mode.startswith("im2col") and rank < 3:
        raise low.unsupported(f".{mode} of fewer than 3 dimensions")
    count = 5 if mode == "tile::gather4" else rank
    if not isinstance(a, Mem) or len(a.rest) != 1 or not isinstance(a.rest[0], Vec) or len(a.rest[0].items) != count:
        raise low.unsupported(f"{count} coordinates are due")
    at, off, wide = low.address(Mem(a.base, a.off), "global")
    if not wide:
        raise low.unsupported("a 32-bit address of a tensor map")
    imm = MODES.index(mode) << 8 | count << 12
    return _Tensor(at, off, [low.operand(x, "s32") for x in a.rest[0].items], imm)


def _info(low: Lowering, args: list[Operand], rank: int, mode: str) -> list[int]:
    """Takes the offsets of im2col (or wHalo and wOffset) from the front of the remaining operands."""
    if not mode.startswith("im2col"):
        return []
    count = rank - 2 if mode == "im2col" else 2
    if not args or not isinstance(args[0], Vec) or len(args[0].items) != count:
        raise low.unsupported(
            f".{mode} takes {'offsets' if mode == 'im2col' else 'wHalo and wOffset'}, {count} in braces"
        )
    return [low.operand(x, "u16") for x in args.pop(0).items]


def _tensor(low: Lowering, ins: Instr) -> None:
    mods = known(
        low, ins, "async", "bulk", "tensor", "reduce", "prefetch", "L2", "shared::cluster", "shared::cta", "global",
        COMPLETE, "bulk_group", "multicast::cluster", "cta_group::1", "cta_group::2", *OPERATIONS[:8], *MODES, *_SPELLINGS,
        sets=(DIMENSIONS, {"L2::cache_hint"}),
    )  # fmt: skip
    args = list(ins.args)
    if "L2::cache_hint" in mods:
        args.pop()
    rank = next(int(p[0]) for p in ins.parts if p in DIMENSIONS)
    spaces = [p for p in ins.parts if p in ("shared::cluster", "shared::cta", "global")]
    if "prefetch" in mods:
        mode = _mode(low, ins, "prefetch")
        t, rest = _tensor_operand(low, args[0], rank, mode), args[1:]
        info = _info(low, rest, rank, mode)
        if rest:
            raise low.unsupported()
        low.emit("tensor.prefetch", [t.at, *t.coordinates, *info], [_pack(0, t.off), 0, t.imm])
        return
    if spaces[0] == "global":
        operation = -1
        if "reduce" in mods:
            operation = next(i for i, name in enumerate(OPERATIONS) if name in mods)
        if spaces[1:] != ["shared::cta"] or "bulk_group" not in mods or len(args) != 2:
            raise low.unsupported()
        t = _tensor_operand(low, args[0], rank, _mode(low, ins, "store"))
        src, src_off, wide = low.address(args[1], "shared")
        low.emit("tensor.store", [t.at, src, *t.coordinates], [_pack(src_off, t.off), operation, wide << 1 | t.imm])
        return
    mode, rest = _mode(low, ins, "load"), args[3:]
    if COMPLETE not in mods or len(args) < 3:
        raise low.unsupported()
    t = _tensor_operand(low, args[1], rank, mode)
    info = _info(low, rest, rank, mode)
    multicast = "multicast::cluster" in mods
    if len(rest) != multicast:
        raise low.unsupported()
    dst, dst_off, dst_wide = low.address(args[0], "shared")
    bar, bar_off, bar_wide = low.address(args[2], "shared")
    flags = dst_wide << 1 | bar_wide << 2 | ("cta_group::2" in mods) << 3 | (spaces[0] == "shared::cta") << 4
    mask = low.operand(rest[0], "u16") if multicast else SINK
    low.emit(
        "tensor.load", [t.at, dst, bar, mask, *t.coordinates, *info], [_pack(dst_off, t.off), bar_off, flags | t.imm]
    )


_FIELDS = (
    "global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype", "interleave_layout",
    "swizzle_mode", "fill_mode", "swizzle_atomicity",
)  # fmt: skip
"""Fields of a tensor map in the order of tma.c."""


@lowers("tensormap")
def _tensormap(low: Lowering, ins: Instr) -> None:
    if "cp_fenceproxy" in ins.parts:
        known(
            low, ins, "cp_fenceproxy", "global", "shared::cta", "tensormap::generic", "sync", "aligned", sets=(SCOPES,)
        )  # fmt: skip
        dst, dst_off = _global(low, ins.args[0])
        src, src_off, wide = low.address(ins.args[1], "shared")
        low.emit("tensormap.cp_fenceproxy", [dst, src], [dst_off, src_off, wide], aligned=True)
        return
    mods = known(low, ins, "replace", "tile", *_FIELDS, "global", "shared::cta", "b1024", "b32", "b64")
    field = next(i for i, name in enumerate(_FIELDS) if name in mods)
    mem, *index, value = ins.args
    shared = "shared::cta" in mods
    at, off, wide = low.address(mem, "shared" if shared else "global")
    d = 0
    if index:
        if not isinstance(index[0], Imm) or not 0 <= index[0].value < 5:
            raise low.unsupported("a field's index is a constant from 0 to 4")
        d = index[0].value
    elif _FIELDS[field] in ("box_dim", "global_dim", "global_stride", "element_stride"):
        raise low.unsupported("the field needs an index")
    long = "b64" in mods
    operand, immediate = (
        (SINK, value.value) if isinstance(value, Imm) else (low.operand(value, "b64" if long else "b32"), 0)
    )
    flags = field | d << 8 | wide << 16 | long << 17 | shared << 18
    low.emit("tensormap.replace", [at, operand], [off, flags, immediate])
