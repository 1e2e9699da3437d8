"""PTX instructions to the core's instructions.

Each family of instructions has a module `lower_<family>` whose functions are registered under PTX opcodes with `@lowers`. A
function reads one `Instr` and calls `Lowering.emit` with the name of a C function and the offsets of its operands; offsets say
where a value's 32 lanes lie (see `core/core.h`). A modifier that it does not know raises `Unsupported`.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import flow, lower_defined
from . import queued as queued_reads
from .build import core
from .errors import Unsupported
from .ptx import SINK as PTX_SINK
from .ptx import WIDTH, Imm, Instr, Kernel, Mem, Operand, Pair, Reg, Sym, Vec

SHARED_BASE = 1024
CTA_SHIFT, MAX_CTAS = 24, 16
WINDOW_SHARED, WINDOW_PARAM, WINDOW_LOCAL = 1 << 56, 2 << 56, 3 << 56
NO_GUARD = -(1 << 31)
SINK = NO_GUARD + 1
PLAIN, BRANCH, EXIT = 0, 1, 2
LEADER, ALIGNED, HELD, QUEUED, TOUCHES, RENAMES = 1, 2, 4, 8, 16, 32
SPECIAL_END = 6016


def _axes(*names: str) -> list[str]:
    return [f"%{name}.{axis}" for name in names for axis in "xyz"]


_SPECIAL_NAMES = [
    *_axes("tid", "ntid", "ctaid", "nctaid"),
    "%laneid", "%warpid", "%nwarpid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge", "%smid",
    "%nsmid", "%gridid",
    *_axes("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid"),
    "%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster", "%dynamic_smem_size", "%total_smem_size", "WARP_SZ", "%clock",
    "%clock_hi",
]  # fmt: skip
SPECIAL = {name: 128 * i for i, name in enumerate(_SPECIAL_NAMES)} | {"%clock64": 5504, "%globaltimer": 5760}
"""Offsets of the special registers, as `core.h` lays them out."""

LANE_BYTES = {1: 32, 8: 64, 16: 64, 32: 128, 64: 256, 128: 512}
"""Bytes of a value of so many bits in 32 lanes (a predicate: one word, a bit a lane)."""


class CIns(ctypes.Structure):
    """`Ins` of core.h."""

    _fields_ = (
        ("fn", ctypes.c_void_p), ("guard", ctypes.c_int32), ("guard_not", ctypes.c_uint8), ("control", ctypes.c_uint8),
        ("flags", ctypes.c_uint8), ("n", ctypes.c_uint8), ("arg", ctypes.c_void_p), ("imm", ctypes.c_int64 * 4),
        ("target", ctypes.c_int32), ("rank", ctypes.c_int32), ("line", ctypes.c_int32),
        ("n_written", ctypes.c_int32), ("rule", ctypes.c_int32), ("form", ctypes.c_void_p),
    )  # fmt: skip


class CProgram(ctypes.Structure):
    """`Program` of core.h."""

    _fields_ = (
        ("ins", ctypes.POINTER(CIns)), ("n_ins", ctypes.c_int32), ("constants", ctypes.c_void_p), ("constant_stride", ctypes.c_uint64),
        ("reg_bytes", ctypes.c_int32), ("static_shared", ctypes.c_uint32), ("dynamic_base", ctypes.c_uint32),
        ("local_bytes", ctypes.c_uint32), ("param_bytes", ctypes.c_uint32), ("arch", ctypes.c_int32),
        ("held_end", ctypes.c_int32), ("max_registers", ctypes.c_int32), ("min_ctas", ctypes.c_int32),
    )  # fmt: skip


Handler = Callable[["Lowering", Instr], None]
HANDLERS: dict[str, Handler] = {}


def lowers(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a function as the lowering of these opcodes (the part of an instruction before its first dot)."""

    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            HANDLERS[opcode] = handler
        return handler

    return register


@dataclass
class _Emitted:
    fn: str | None
    args: Sequence[int] = ()
    imm: Sequence[int] = ()
    guard: int = NO_GUARD
    guard_not: bool = False
    control: int = PLAIN
    aligned: bool = False
    label: int | None = None  # a PTX label's number, or -1 - k: the PTX instruction k
    line: int = 0
    writes: Sequence[int] = ()  # of the operands, registers of wgmma that it writes


@dataclass
class Lowering:
    """The lowering of one kernel, filled instruction by instruction."""

    kernel: Kernel
    arch: int
    out: list[_Emitted] = field(default_factory=list)
    constants: bytearray = field(default_factory=bytearray)
    _pool: dict[tuple[bytes, bool], int] = field(default_factory=dict)
    relocations: list[tuple[int, int]] = field(default_factory=list)
    """Places and widths of the constants that are addresses in shared memory."""
    current: Instr | None = None
    loaded: dict[int, set[int]] = field(default_factory=dict)
    """Registers that tcgen05.ld writes, by place: the numbers of those instructions. The first use in a block completes the load."""
    used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        # Registers that wgmma uses asynchronously come first, so that a comparison tells them (see `wgmma_touch` in the core).
        widths = self.kernel.reg_width
        held = {r.idx for r in _held(self.kernel) if r.width == 32}
        self.place, at = [0] * len(widths), SPECIAL_END
        for i in sorted(range(len(widths)), key=lambda i: i not in held):
            self.place[i] = at
            at += LANE_BYTES[widths[i]]
        self.held_end = SPECIAL_END + LANE_BYTES[32] * len(held)
        self._scratch: dict[tuple[int, int], int] = {}
        self._lane_bytes: dict[int, int] = {}
        self._constant_bytes: dict[int, int] = {}
        self.reg_bytes = at

    def lane_bytes(self, at: int) -> int:
        """Bytes of a lane of the register or constant at an offset; 0 for predicates, special registers and the sink."""
        if not self._lane_bytes:
            widths = {self.place[i]: w for i, w in enumerate(self.kernel.reg_width)}
            widths |= {offset: width for (width, _), offset in self._scratch.items()}
            self._lane_bytes = {o: 0 if w == 1 else max(w, 16) // 8 for o, w in widths.items()} | self._constant_bytes
        return self._lane_bytes.get(at, 0)

    # ---- operands ------------------------------------------------------------------------------------------------------------

    def scratch(self, width: int, which: int = 0) -> int:
        """A register of the lowering's own, one for each `which`."""
        if (width, which) not in self._scratch:
            self._scratch[width, which] = self.reg_bytes
            self.reg_bytes += LANE_BYTES[width]
        return self._scratch[width, which]

    def constant(self, value: int, width: int, *, shared: bool = False) -> int:
        """The offset of a constant, the same in every lane. shared: an address in the CTA's own shared memory."""
        value &= (1 << width) - 1
        if width == 1:
            raw = struct.pack("<I", 0xFFFFFFFF if value else 0).ljust(32, b"\0")
        else:
            raw = value.to_bytes(max(width, 16) // 8, "little") * 32
        if (raw, shared) not in self._pool:
            self._pool[raw, shared] = len(self.constants)
            self._constant_bytes[-len(self.constants) - 1] = 0 if width == 1 else max(width, 16) // 8
            if shared:
                self.relocations.append((len(self.constants), width))
            self.constants += raw
        return -self._pool[raw, shared] - 1

    def unsupported(self, why: str = "") -> Unsupported:
        """An error that names the instruction at hand."""
        ins = self.current
        assert ins is not None
        error = Unsupported(f"PTX line {ins.line}: {ins.text[:160]}" + (f": {why}" if why else ""))
        error.line = ins.line
        return error

    def operand(self, a: Operand, type_: str) -> int:
        """The offset of a source operand that is read as a PTX type (`"pred"`: see `predicate`).

        A register must have the type's width. Immediates are converted, symbols are addresses, special registers are themselves.
        """
        width = WIDTH[type_]
        if isinstance(a, Reg):
            if a.width != width or a.neg:
                raise self.unsupported(f"a register of {a.width} bits where {type_} is read")
            return self.place[a.idx]
        if isinstance(a, Imm):
            value = a.value
            if a.isfloat == 64 and width == 32:
                (number,) = struct.unpack("<d", struct.pack("<Q", value & (1 << 64) - 1))
                (value,) = struct.unpack("<I", struct.pack("<f", number))
            elif not a.isfloat and type_ in ("f32", "f64"):
                raise self.unsupported(f"an integer where {type_} is read (write 0f... or a decimal point)")
            return self.constant(value, width)
        if isinstance(a, Sym):
            if a.name in SPECIAL:
                self.special(a)
                wide = a.name in ("%clock64", "%globaltimer")
                if (width == 64) != wide:
                    raise self.unsupported(f"{a.name} read as {type_}")
                return SPECIAL[a.name]
            return self.constant(self.symbol(a.name, width), width, shared=a.name in self.kernel.shared)
        if isinstance(a, Mem):
            if not isinstance(a.base, Sym):
                return self._no(a)
            return self.constant(
                self.symbol(a.base.name, width) + a.off, width, shared=a.base.name in self.kernel.shared
            )
        return self._no(a)

    def special(self, a: Sym) -> None:
        """Special registers are operands of mov and cvt alone."""
        assert self.current is not None
        if self.current.op not in ("mov", "cvt"):
            raise self.unsupported(f"{a.name} in an instruction other than mov and cvt")

    def _no(self, a: Operand) -> int:
        raise self.unsupported(f"operand {a!r}")

    def symbol(self, name: str, width: int) -> int:
        """The address of a parameter or variable: generic (with its window) where 64 bits wide, else in its own space."""
        k = self.kernel
        offset = k.param_offset(name)
        if offset is not None:
            return (WINDOW_PARAM if width == 64 else 0) + offset
        if name in k.shared:
            # Addresses in the shared window of any width are the same low bits; cvta adds the window.
            return SHARED_BASE + k.shared[name]
        if name in k.local:
            return (WINDOW_LOCAL if width == 64 else 0) + k.local[name]
        if name in k.variables and width == 64:
            return k.variables[name].address
        raise self.unsupported(f"symbol {name}")

    def predicate(self, a: Operand) -> tuple[int, bool]:
        """The offset of a predicate and whether it is negated."""
        if isinstance(a, Reg) and a.width == 1:
            return self.place[a.idx], a.neg
        if isinstance(a, Imm):
            return self.constant(1 if a.value else 0, 1), False
        raise self.unsupported(f"predicate {a!r}")

    def target(self, a: Operand, width: int | None = None) -> int:
        """The offset of a destination register (of this width, where given), or the sink."""
        if a is PTX_SINK:
            return SINK
        if isinstance(a, Reg) and (width is None or a.width == width):
            return self.place[a.idx]
        raise self.unsupported(f"destination {a!r}")

    def vector(self, a: Operand) -> tuple[Operand, ...]:
        """The elements of `{a, b}`, or the operand alone."""
        return a.items if isinstance(a, Vec) else (a,)

    def address(self, a: Operand, space: str) -> tuple[int, int, int]:
        """`(operand, byte offset, 1 if it is a generic 64-bit address else 0)` of a memory operand.

        space "shared": a 32-bit address (or a 64-bit register, which is generic); others: 64 bits.
        """
        if not isinstance(a, Mem):
            raise self.unsupported(f"address {a!r}")
        base = a.base
        if isinstance(base, Reg):
            if base.width not in (32, 64):
                raise self.unsupported(f"an address of {base.width} bits")
            return self.place[base.idx], a.off, int(base.width == 64)
        width = 32 if space == "shared" else 64
        if isinstance(base, Imm):
            return self.constant(base.value, width), a.off, int(width == 64)
        if isinstance(base, Sym):
            address = self.constant(self.symbol(base.name, width), width, shared=base.name in self.kernel.shared)
            return address, a.off, int(width == 64)
        raise self.unsupported(f"address {a!r}")

    # ---- instructions ----------------------------------------------------------------------------------------------------------

    def emit(
        self,
        fn: str,
        args: Sequence[int] = (),
        imm: Sequence[int] = (),
        *,
        aligned: bool = False,
        blocking: bool = False,
    ) -> None:
        """One instruction of the core, under the guard of the PTX instruction at hand.

        aligned: every live lane of the warp must execute it together (`.aligned`, warp collectives with a full mask).
        blocking: it may have to wait; a guard then becomes a branch around it, so that lanes outside it do not wait too.
        """
        ins = self.current
        assert ins is not None
        if self.loaded:
            self._complete_loads(fn, args, ins)
        guard, negated = self.guard(ins)
        if blocking and guard != NO_GUARD:
            skip = _Emitted(
                None, guard=guard, guard_not=not negated, control=BRANCH, line=ins.line, label=-1 - self.index - 1
            )
            self.out.append(skip)
            guard, negated = NO_GUARD, False
        self.out.append(
            _Emitted(
                fn,
                tuple(args),
                tuple(imm),
                guard,
                negated,
                PLAIN,
                aligned,
                None,
                ins.line,
                self._held_written(ins, args),
            )
        )

    def _complete_loads(self, fn: str, args: Sequence[int], ins: Instr) -> None:
        load = fn == "tcgen05.ld"
        for number in sorted({n for a in (args[:1] if load else args) for n in self.loaded.get(a, ())} - self.used):
            self.used.add(number)
            self.out.append(_Emitted("tcgen05.used", (), (number,), line=ins.line))
        if load:
            self.used.discard(self.index)

    def _held_written(self, ins: Instr, args: Sequence[int]) -> list[int]:
        """Registers of wgmma among the operands `args` that a PTX instruction writes: its first operand, where that is a destination."""
        if ins.op in ("st", "red", "bar", "barrier", "nanosleep") or not ins.args:
            return []
        first = ins.args[0]
        items = first.items if isinstance(first, Vec) else (first.a, first.b) if isinstance(first, Pair) else (first,)
        places = {self.place[r.idx] for r in items if isinstance(r, Reg)}
        return [a for a in args if a in places and a < self.held_end]

    def guard(self, ins: Instr) -> tuple[int, bool]:
        return (NO_GUARD, False) if ins.guard is None else (self.place[ins.guard.idx], ins.guard.neg)

    def run(self) -> None:
        """Lower every instruction of the kernel."""
        self.starts = []
        labels = set(self.kernel.labels.values())
        for number, ins in enumerate(self.kernel.instrs):
            if ins.parts[:2] == ["tcgen05", "ld"]:
                results = ins.args[:2] if "red" in ins.parts else ins.args[:1]
                for r in (r for a in results for r in self.vector(a)):
                    if isinstance(r, Reg):
                        self.loaded.setdefault(self.place[r.idx], set()).add(number)
        for index, ins in enumerate(self.kernel.instrs):
            self.index = index
            self.starts.append(len(self.out))
            if self.index in labels:
                self.used.clear()
            self.current = ins
            if ins.op == "bra":
                guard, negated = self.guard(ins)
                self.out.append(_Emitted(None, (), (), guard, negated, BRANCH, False, ins.args[0], ins.line))
            elif ins.op in ("ret", "exit"):
                guard, negated = self.guard(ins)
                self.out.append(_Emitted(None, (), (), guard, negated, EXIT, False, None, ins.line))
            else:
                handler = HANDLERS.get(ins.op)
                if handler is None:
                    raise self.unsupported('no such instruction here (PTX ISA, chapter "Instruction Set")')
                handler(self, ins)
        self.starts.append(len(self.out))
        self.out.append(_Emitted(None, control=EXIT))


@dataclass(frozen=True)
class Lowered:
    """A kernel ready to run; `keep` holds what the C structures point to."""

    kernel: Kernel
    program: CProgram
    keep: tuple[object, ...]


def _held(kernel: Kernel) -> list[Reg]:
    """Accumulators and registers of operand A of all wgmma.mma_async."""
    vectors = (a for ins in kernel.instrs if ins.op == "wgmma" for a in ins.args[:2] if isinstance(a, Vec))
    return [r for v in vectors for r in v.items if isinstance(r, Reg)]


def lower(kernel: Kernel, arch: int) -> Lowered:
    """Translate a parsed kernel for the core."""
    for family in ("alu", "async", "flow", "memory", "mma", "tensor", "texture"):
        importlib.import_module(f".lower_{family}", __package__)

    low = Lowering(kernel, arch)
    low.run()
    n = len(low.out)
    targets = [_target(low, e) for e in low.out]
    leaders, rank = flow.order(n, [e.control for e in low.out], [e.guard != NO_GUARD for e in low.out], targets)
    array = (CIns * n)()
    pool: list[int] = []
    for e in low.out:
        pool += [*e.args, *e.writes]
    args = (ctypes.c_int32 * max(len(pool), 1))(*pool)
    forms = [
        b"" if e.fn is None else lower_defined.forms(e.fn, e.args, [*e.imm, 0, 0, 0, 0], low.lane_bytes)
        for e in low.out
    ]
    reads = queued_reads.queued(
        [
            queued_reads.Step(e.fn or "", e.args, form, [*e.imm, 0, 0], e.guard != NO_GUARD)
            for e, form in zip(low.out, forms, strict=True)
        ],
        [e.control for e in low.out],
        targets,
    )
    form_pool = (ctypes.c_uint8 * max(sum(map(len, forms)), 1)).from_buffer_copy(b"".join(forms) or b"\0")
    at = form_at = 0
    for i, e in enumerate(low.out):
        c = array[i]
        if e.fn is not None:
            address = core().emu_lookup(e.fn.encode())
            if not address:
                raise Unsupported(f"PTX line {e.line}: the core has no {e.fn!r}")
            c.fn = address
        c.guard, c.guard_not, c.control = e.guard, e.guard_not, e.control
        c.flags = (LEADER if i in leaders else 0) | (ALIGNED if e.aligned else 0)
        if e.fn != "wgmma.mma_async" and any(SPECIAL_END <= a < low.held_end for a in e.args):
            c.flags |= HELD
        c.flags |= QUEUED * (i in reads.loads) | TOUCHES * (i in reads.touches) | RENAMES * (i in reads.renames)
        c.n = len(e.args)
        c.arg = ctypes.addressof(args) + 4 * at
        c.n_written = len(e.writes)
        at += len(e.args) + len(e.writes)
        c.form = ctypes.addressof(form_pool) + form_at
        form_at += len(e.args)
        if e.fn is not None:
            c.rule = lower_defined.RULES.index(lower_defined.rule(e.fn))
        for j, value in enumerate(e.imm):
            c.imm[j] = value
        c.target, c.rank, c.line = targets[i], rank[i], e.line
    copies = _constants(low)
    constants = (ctypes.c_uint8 * max(len(copies), 1)).from_buffer_copy(copies or b"\0")
    program = CProgram(
        array, n, ctypes.addressof(constants), len(low.constants) if low.relocations else 0, low.reg_bytes,
        kernel.static_shared, kernel.dynamic_base, kernel.local_size, kernel.param_size, arch, low.held_end,
        kernel.maxnreg or 0, kernel.min_ctas,
    )  # fmt: skip
    return Lowered(kernel, program, (array, args, constants, form_pool))


def _constants(low: Lowering) -> bytes:
    """The constants; where some are shared addresses, a copy for each rank in a cluster, which those addresses hold."""
    if not low.relocations:
        return bytes(low.constants)
    out = bytearray()
    for rank in range(MAX_CTAS):
        copy = bytearray(low.constants)
        for at, width in low.relocations:
            value = int.from_bytes(copy[at : at + width // 8], "little") | rank << CTA_SHIFT
            copy[at : at + LANE_BYTES[width]] = value.to_bytes(width // 8, "little") * 32
        out += copy
    return bytes(out)


def _target(low: Lowering, e: _Emitted) -> int:
    if e.label is None:
        return -1
    if e.label < 0:
        return low.starts[-e.label - 1]
    return low.starts[low.kernel.labels[e.label]]
