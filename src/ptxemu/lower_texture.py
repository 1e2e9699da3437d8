"""Textures and surfaces by handle: tex, tld4, txq, suld, sust, sured, suq."""

from __future__ import annotations

from .lower import SINK, Lowering, lowers
from .lower_flow import known
from .lower_memory import OPERATIONS, TYPES, register_bits, sources
from .ptx import WIDTH, Imm, Instr, Mem, Operand, Pair, Reg, Vec

GEOMETRIES = {"1d": 1, "2d": 2, "3d": 3, "a1d": 5, "a2d": 6}
"""Dimensions, and 4 more for arrays."""
_ELSEWHERE = {"cube", "acube", "2dms", "a2dms"}
_DATA = ("u32", "s32", "f32", "f16", "f16x2")
_CHANNELS = ("r", "g", "b", "a")
_QUERIES = (
    "width", "height", "depth", "channel_data_type", "normalized_coords", "array_size", "num_mipmap_levels", "num_samples", "filter_mode",
    "addr_mode_0", "addr_mode_1", "addr_mode_2", "memory_layout",
)  # fmt: skip
_OUTSIDE = ("trap", "clamp", "zero")
"""All numbered as in texture.c."""


def _geometry(low: Lowering, ins: Instr) -> int:
    """The geometry's number; its modifier."""
    for part in ins.parts:
        if part in _ELSEWHERE:
            raise low.unsupported(f"geometry .{part}")
        if part in GEOMETRIES:
            return GEOMETRIES[part]
    raise low.unsupported("no geometry")


def _handle(low: Lowering, mem: Operand) -> int:
    """The handle in `[handle, ...]`, a 64-bit register."""
    if not isinstance(mem, Mem) or not isinstance(mem.base, Reg) or mem.base.width != 64 or mem.off:
        raise low.unsupported("a texture or surface that is no handle in a 64-bit register")
    return low.place[mem.base.idx]


def _coordinates(low: Lowering, mem: Operand, geometry: int, type_: str) -> list[int]:
    """Layer and coordinates of `[handle, {...}]`; what goes beyond the geometry is ignored."""
    rest = mem.rest if isinstance(mem, Mem) else ()
    if len(rest) != 1:
        raise low.unsupported("a sampler of its own (texmode_independent)" if len(rest) > 1 else "no coordinates")
    items, array, count = low.vector(rest[0]), geometry >> 2, (geometry & 3) + (geometry >> 2)
    if len(items) < count:
        raise low.unsupported(f"{len(items)} coordinates where {count} are due")
    return [low.operand(x, "u32" if array and i == 0 else type_) for i, x in enumerate(items[:count])]


@lowers("tex", "tld4")
def _tex(low: Lowering, ins: Instr) -> None:
    gather = ins.op == "tld4"
    mods = known(
        low, ins, "v2", "v4", "base", "level", "grad", *_DATA, *GEOMETRIES, *_ELSEWHERE, *(_CHANNELS if gather else ())
    )  # fmt: skip
    geometry = _geometry(low, ins)
    data, coordinate = ins.parts[-2:]
    if mods & {"grad"} or (gather and ("level" in mods or geometry not in (2, 6) or coordinate != "f32")):
        raise low.unsupported("gradients" if "grad" in mods else "this form of tld4")
    if data not in _DATA or coordinate not in ("s32", "f32") or (gather and data in ("f16", "f16x2")):
        raise low.unsupported(f"types .{data}.{coordinate}")
    destination, texture, *rest = ins.args
    predicate: Operand = None
    if isinstance(destination, Pair):
        destination, predicate = destination.a, destination.b
    count = 2 if data == "f16x2" else 4
    items = low.vector(destination)
    if len(items) != count or f"v{count}" not in mods:
        raise low.unsupported(f"{len(items)} destinations; .v{count} is due")
    if "level" in mods:  # of the one level that a texture has here
        rest.pop(0)
    args = [low.target(x, WIDTH[data]) for x in items]
    args.append(SINK if predicate is None else low.target(predicate, 1))
    handle, places = _handle(low, texture), _coordinates(low, texture, geometry, coordinate)
    shifts: list[int] = []
    if rest and isinstance(rest[0], Vec):
        shifts = [low.operand(x, "s32") for x in rest.pop(0).items[: geometry & 3]]
    if rest:
        raise low.unsupported("depth comparison")
    channel = 1 + next(i for i, c in enumerate(_CHANNELS) if c in mods) if gather else 0
    flags = geometry | bool(shifts) << 3 | (coordinate == "f32") << 4 | channel << 8
    low.emit("tex", [*args, handle, *places, *shifts], [flags, _DATA.index(data), len(args)])


@lowers("txq", "suq")
def _query(low: Lowering, ins: Instr) -> None:
    known(low, ins, "b32", *_QUERIES)
    query = next((q for q in ins.parts if q in _QUERIES), "")
    of_surfaces = ("width", "height", "depth", "channel_data_type", "array_size", "memory_layout")
    if not query or ((ins.op == "suq") != (query in of_surfaces) and (ins.op == "suq" or query == "memory_layout")):
        raise low.unsupported(f"query .{query}")
    args = [low.target(ins.args[0], 32), _handle(low, ins.args[1])]
    low.emit("txq", args, [_QUERIES.index(query), int(ins.op == "suq")])


@lowers("suld", "sust", "sured")
def _surface(low: Lowering, ins: Instr) -> None:
    types = ("u32", "s32", "b32", "u64", "s64") if ins.op == "sured" else ("b8", "b16", "b32", "b64")
    mods = known(
        low, ins, "b", "p", "ca", "cg", "cs", "cv", "wb", "wt", "v2", "v4", "add", "min", "max", "and", "or", *types, *_OUTSIDE, *GEOMETRIES
    )  # fmt: skip
    if "b" not in mods:
        raise low.unsupported("formatted access")
    geometry = _geometry(low, ins)
    outside = next((i for i, name in enumerate(_OUTSIDE) if name in mods), 0)
    type_ = next((p for p in ins.parts if p in types), "")
    count = next((int(p[1:]) for p in ins.parts if p in ("v2", "v4")), 1)
    if not type_ or WIDTH[type_] * count > 128:
        raise low.unsupported("no type, or more than 16 bytes")
    mem, value = (ins.args[1], ins.args[0]) if ins.op == "suld" else ins.args[:2]
    handle, places = _handle(low, mem), _coordinates(low, mem, geometry, "s32")
    how = geometry | outside << 4
    if ins.op == "sured":
        operation = next((i for i, name in enumerate(OPERATIONS) if name in mods), -1)
        allowed = {"add": ("u32", "s32", "u64"), "and": ("b32",), "or": ("b32",)}
        name = OPERATIONS[operation] if operation >= 0 else "none"
        if geometry > 3 or count > 1 or type_ not in allowed.get(name, ("u32", "s32", "u64", "s64")) or operation < 0:
            raise low.unsupported(f".{name} of .{type_}")
        number = TYPES.index("u32" if type_ == "b32" else type_)
        low.emit("sured", [handle, low.operand(value, type_), *places], [how, operation, number])
        return
    items = low.vector(value)
    if len(items) != count:
        raise low.unsupported(f"{len(items)} registers for {count} elements")
    if ins.op == "suld":
        bits = register_bits(low, items, WIDTH[type_])
        args = [low.target(x) for x in items]
        low.emit("suld", [*args, handle, *places], [how, _sizes(type_, bits), count])
        return
    if any(isinstance(x, Imm) for x in items):
        raise low.unsupported("constants as data")
    args, bits = sources(low, items, type_)
    low.emit("sust", [handle, *args, *places], [how, _sizes(type_, bits), count])


def _sizes(type_: str, register: int) -> int:
    """Bytes of an element and of its register (which has 2 at least)."""
    return WIDTH[type_] // 8 | max(register // 8, 2) << 8
