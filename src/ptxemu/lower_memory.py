"""Loads, stores, atomics, matrix loads and stores, addresses in a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from .lower import SINK, Lowering, lowers
from .lower_common import requires
from .lower_flow import SPACES, known
from .ptx import SINK as PTX_SINK
from .ptx import WIDTH, Instr, Mem, Operand, Reg, Sym

WIDE, STRONG, ACQUIRE, RELEASE, OWN, SIGNED = 1, 2, 4, 8, 16, 32
GENERIC, GLOBAL, SHARED, LOCAL, PARAM = range(5)
OPERATIONS = ("add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas")
TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "f16x2", "bf16x2", "b128")
"""Operations and types in the order of memory.h."""

SCOPES = {"cta", "cluster", "gpu", "sys"}
CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified"}
HINTS = {f"{level}::{what}" for level in ("L1", "L2") for what in (
    "evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate", "cache_hint", "64B", "128B", "256B",
)}  # fmt: skip
"""Modifiers that only concern caches."""

_SPACE = {"global": GLOBAL, "const": GLOBAL, "shared": SHARED, "local": LOCAL, "param": PARAM}


def space_of(low: Lowering, ins: Instr, mem: Operand) -> tuple[int, int]:
    """The state space of an access, and OWN where it must be in the CTA's own shared memory."""
    for part in ins.parts[1:]:
        name = part.split("::")[0]
        if name == "param" and isinstance(mem, Mem) and isinstance(mem.base, Sym) and mem.base.name in low.kernel.local:
            return LOCAL, 0  # a parameter of a device function
        if name in _SPACE:
            return _SPACE[name], 0 if part == "shared::cluster" or name != "shared" else OWN
    if isinstance(mem, Mem) and isinstance(mem.base, Sym) and mem.base.name in low.kernel.shared:
        return SHARED, OWN
    return GENERIC, 0


def flags_of(element: int, count: int = 1, register: int = 0, space: int = GENERIC, more: int = 0) -> int:
    """The word that describes an access (memory.h); element and register in bits."""
    log = (element // 8).bit_length() - 1
    register = max((register or element) // 8, 2).bit_length() - 1
    return more | log << 8 | count << 12 | register << 16 | space << 20


def type_of(ins: Instr) -> str:
    """The data type of an instruction: its last modifier that is one."""
    return next(p for p in reversed(ins.parts) if p in WIDTH)


def vector_of(ins: Instr) -> int:
    return next((int(p[1:]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)


def register_bits(low: Lowering, items: Sequence[Operand], element: int) -> int:
    """The width that the registers of a load or store have; it may exceed the element's."""
    widths = {a.width for a in items if isinstance(a, Reg)}
    if len(widths) > 1 or any(width < element for width in widths):
        raise low.unsupported(f"registers of {sorted(widths)} bits for elements of {element}")
    return widths.pop() if widths else element


@lowers("ld", "ldu")
def _ld(low: Lowering, ins: Instr) -> None:
    mods = known(
        low, ins, "v2", "v4", "v8", "weak", "relaxed", "acquire", "volatile", "mmio", "global", "local", "param",
        "param::entry", "param::func", "const", sets=(SCOPES, SPACES, CACHE, HINTS, set(WIDTH)),
    )  # fmt: skip
    type_, count = type_of(ins), vector_of(ins)
    items = low.vector(ins.args[0])
    if len(items) != count:
        raise low.unsupported(f"{len(items)} destinations for {count} elements")
    mem = ins.args[1]
    space, own = space_of(low, ins, mem)
    more = own | (SIGNED if type_[0] == "s" else 0)
    if mods & {"relaxed", "acquire", "volatile", "mmio"}:
        more |= STRONG | (ACQUIRE if "acquire" in mods else 0)
    element = WIDTH[type_]
    bits = register_bits(low, items, element)
    targets = [low.target(a) for a in items]
    flags = flags_of(element, count, bits, space, more)
    if space == PARAM and isinstance(mem, Mem) and isinstance(mem.base, Sym):
        offset = low.kernel.param_offset(mem.base.name)
        if offset is None:
            raise low.unsupported(f"parameter {mem.base.name}")
        low.emit("ld.param", targets, [offset + mem.off, flags])
        return
    at, off, wide = low.address(mem, "shared" if space == SHARED else "global")
    low.emit("ld", [at, *targets], [off, flags | wide])


def sources(low: Lowering, items: Sequence[Operand], type_: str) -> tuple[list[int], int]:
    """The operands that a store reads, and their width."""
    bits = register_bits(low, items, WIDTH[type_])
    out = []
    for a in items:
        if isinstance(a, Reg):
            if a.neg:
                raise low.unsupported("a negated predicate as data")
            out.append(low.place[a.idx])
        else:
            out.append(low.operand(a, type_ if bits == WIDTH[type_] else f"b{bits}"))
    return out, bits


@lowers("st")
def _st(low: Lowering, ins: Instr) -> None:
    if "async" in ins.parts:
        return _st_async(low, ins)
    if "bulk" in ins.parts:
        return _st_bulk(low, ins)
    mods = known(
        low, ins, "v2", "v4", "v8", "weak", "relaxed", "release", "volatile", "mmio", "global", "local", "param", "param::func",
        sets=(SCOPES, SPACES, CACHE, HINTS, set(WIDTH)),
    )  # fmt: skip
    type_, count = type_of(ins), vector_of(ins)
    mem, items = ins.args[0], low.vector(ins.args[1])
    if len(items) != count:
        raise low.unsupported(f"{len(items)} sources for {count} elements")
    space, more = space_of(low, ins, mem)
    if mods & {"relaxed", "release", "volatile", "mmio"}:
        more |= STRONG | (RELEASE if "release" in mods else 0)
    values, bits = sources(low, items, type_)
    at, off, wide = low.address(mem, "shared" if space == SHARED else "global")
    low.emit("st", [at, *values], [off, flags_of(WIDTH[type_], count, bits, space, more | wide)])
    return None


def _st_bulk(low: Lowering, ins: Instr) -> None:
    known(low, ins, "bulk", "weak", "shared::cta")
    at, off, wide = low.address(ins.args[0], "shared")
    low.emit("st.bulk", [at, low.operand(ins.args[1], "u64")], [off, wide])


def reduction(low: Lowering, ins: Instr, type_: str | None = None) -> tuple[int, int]:
    """The operation and type numbers of an atomic or a reduction."""
    operation = next((p for p in ins.parts[1:] if p in OPERATIONS), None)
    type_ = type_ or type_of(ins)
    if operation is None:
        raise low.unsupported("no operation")
    allowed = {
        "add": {"u32", "s32", "u64", "s64", "f16", "bf16", "f16x2", "bf16x2", "f32", "f64"},
        "min": {"u32", "s32", "u64", "s64", "f16", "bf16", "f16x2", "bf16x2"},
        "max": {"u32", "s32", "u64", "s64", "f16", "bf16", "f16x2", "bf16x2"},
        "inc": {"u32"}, "dec": {"u32"}, "exch": {"b32", "b64", "b128"}, "cas": {"b16", "b32", "b64", "b128"},
    }.get(operation, {"b32", "b64", "u32", "s32", "u64", "s64"})  # fmt: skip
    if type_ not in allowed:
        raise low.unsupported(f".{operation} of .{type_}")
    return OPERATIONS.index(operation), TYPES.index(type_ if type_ in TYPES else "u" + type_[1:])


@lowers("atom", "red")
def _atom(low: Lowering, ins: Instr) -> None:
    if "async" in ins.parts:
        return _red_async(low, ins)
    mods = known(
        low, ins, *OPERATIONS, "v2", "v4", "v8", "relaxed", "acquire", "release", "acq_rel", "global", "noftz",
        sets=(SCOPES, SPACES, HINTS, set(WIDTH)),
    )  # fmt: skip
    operation, number = reduction(low, ins)
    type_, count = type_of(ins), vector_of(ins)
    args = list(ins.args)
    destination = args.pop(0) if ins.op == "atom" else PTX_SINK
    mem, values = args[0], low.vector(args[1])
    targets = (
        [SINK] * count if destination is PTX_SINK else [low.target(a, WIDTH[type_]) for a in low.vector(destination)]
    )
    if len(values) != count or len(targets) != count:
        raise low.unsupported(f"{len(values)} values for {count} elements")
    space, more = space_of(low, ins, mem)
    if space in (LOCAL, PARAM) or (count > 1 and space != GLOBAL):
        raise low.unsupported("atomics of this space")
    more |= (
        STRONG | (ACQUIRE if mods & {"acquire", "acq_rel"} else 0) | (RELEASE if mods & {"release", "acq_rel"} else 0)
    )
    at, off, wide = low.address(mem, "shared" if space == SHARED else "global")
    operands = [low.operand(a, type_) for a in values]
    other = low.operand(args[2], type_) if OPERATIONS[operation] == "cas" else SINK
    flags = flags_of(WIDTH[type_], count, WIDTH[type_], space, more | wide)
    name = "atom.b128" if type_ == "b128" else "atom"
    low.emit(name, [at, *targets, *operands, other], [off, flags, operation, number])
    return None


# ---- stores and reductions that an mbarrier counts ------------------------------------------------------------------------------
def _barrier(low: Lowering, a: Operand) -> tuple[int, int, int]:
    return low.address(a, "shared")


def _st_async(low: Lowering, ins: Instr) -> None:
    known(
        low, ins, "async", "weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4",
        "b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64",
    )  # fmt: skip
    if "mbarrier::complete_tx::bytes" not in ins.parts:
        raise low.unsupported("st.async without an mbarrier")
    type_ = type_of(ins)
    values = low.vector(ins.args[1])
    at, off, wide = low.address(ins.args[0], "shared")
    bar, bar_off, bar_wide = _barrier(low, ins.args[2])
    flags = flags_of(WIDTH[type_], len(values), WIDTH[type_], SHARED, wide)
    low.emit("st.async", [at, bar, *(low.operand(a, type_) for a in values)], [off, flags, bar_off, bar_wide])


def _red_async(low: Lowering, ins: Instr) -> None:
    known(
        low, ins, "async", "relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes", *OPERATIONS,
        "b32", "u32", "s32", "u64",
    )  # fmt: skip
    operation, number = reduction(low, ins)
    type_ = type_of(ins)
    at, off, wide = low.address(ins.args[0], "shared")
    bar, bar_off, bar_wide = _barrier(low, ins.args[2])
    flags = flags_of(WIDTH[type_], 1, WIDTH[type_], SHARED, wide)
    where = (off & 0xFFFFFFFF) | (bar_off & 0xFFFFFFFF) << 32
    low.emit(
        "red.async",
        [at, bar, low.operand(ins.args[1], type_)],
        [_signed(where), flags | bar_wide << 1, operation, number],
    )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# ---- matrices, clusters, hints ----------------------------------------------------------------------------------------------------
_PACKED = {"b6x16_p32": 6, "b4x16_p64": 4}
"""Formats of rows with 16 elements of so many bits and padding, which become elements of 8 bits."""


@lowers("ldmatrix", "stmatrix")
def _matrix(low: Lowering, ins: Instr) -> None:
    mods = known(
        low, ins, "sync", "aligned", "m8n8", "m16n16", "m8n16", "m16n8", "x1", "x2", "x4", "trans", "b16", "b8", "b8x16", *_PACKED,
        sets=(SPACES,),
    )  # fmt: skip
    load = ins.op == "ldmatrix"
    mem, registers = (ins.args[1], ins.args[0]) if load else (ins.args[0], ins.args[1])
    count = next((int(p[1:]) for p in ins.parts if p in ("x1", "x2", "x4")), 0)
    packed = [p for p in ins.parts if p in _PACKED]
    narrow = "m8n8" not in mods
    if narrow:
        shape = next((p for p in ("m16n16", "m8n16") if p in mods), "") if load else "m16n8"
        trans = shape != "m8n16"  # the only form that the ISA has of these shapes
        whole = "b8" in mods and not packed and shape != "m8n16"
        unpacked = load and "b8x16" in mods and "b8" not in mods and len(packed) == 1
        if shape not in mods or ("trans" in mods) != trans or "b16" in mods or not (whole or unpacked):
            raise low.unsupported("this shape with these modifiers")
        if shape == "m16n16" and count == 4:
            raise low.unsupported(".x4 of .m16n16")
        requires(low, 100, f"{ins.op} of elements of 8 bits and fewer")
        count *= 2 if shape == "m16n16" else 1
    elif "b16" not in mods or mods & {"b8", "b8x16", "m16n16", "m8n16", "m16n8", *_PACKED}:
        raise low.unsupported("only .b16 of .m8n8")
    items = low.vector(registers)
    if len(items) != count or not count:
        raise low.unsupported(f"{len(items)} registers where {count} are due")
    places = [low.target(a, 32) if load else low.operand(a, "b32") for a in items]
    space, own = space_of(low, ins, mem)
    at, off, wide = low.address(mem, "shared" if space == SHARED else "global")
    flags = flags_of(32, count, 32, SHARED, own | wide)
    if narrow:
        bits = _PACKED[packed[0]] if packed else 8
        low.emit(f"{ins.op}.b8", [at, *places], [off, flags, int("m8n16" in mods), bits], aligned=True)
    else:
        low.emit(ins.op, [at, *places], [off, flags, "trans" in mods], aligned=True)


@lowers("movmatrix")
def _movmatrix(low: Lowering, ins: Instr) -> None:
    known(low, ins, "sync", "aligned", "m8n8", "trans", "b16")
    low.emit("movmatrix", [low.target(ins.args[0], 32), low.operand(ins.args[1], "b32")], aligned=True)


@lowers("mapa")
def _mapa(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "shared::cluster", "u32", "u64")
    type_ = "u64" if "u64" in mods else "u32"
    address = low.operand(ins.args[1], type_)
    low.emit(
        "mapa", [low.target(ins.args[0], WIDTH[type_]), address, low.operand(ins.args[2], "u32")], [0, type_ == "u64"]
    )


@lowers("getctarank")
def _getctarank(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "shared::cluster", "u32", "u64")
    type_ = "u64" if "u64" in mods else "u32"
    low.emit("getctarank", [low.target(ins.args[0], 32), low.operand(ins.args[1], type_)], [0, type_ == "u64"])


@lowers("prefetch", "prefetchu")
def _prefetch(low: Lowering, ins: Instr) -> None:
    # A prefetch changes nothing and does not fault.
    known(low, ins, "global", "local", "param", "const", "tensormap", "L1", "L2", "L2::evict_last", "L2::evict_normal")
    low.emit("nothing")


@lowers("createpolicy")
def _createpolicy(low: Lowering, ins: Instr) -> None:
    known(low, ins, "fractional", "range", "cvt", "L2", "global", "b64", sets=(HINTS,))
    low.emit("createpolicy", [low.target(ins.args[0], 64)])
