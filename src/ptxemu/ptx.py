"""PTX text to instructions (PTX ISA: "Syntax", "State Spaces, Types, and Variables").

One pass over the text: comments are dropped, statements end at ";", braces at the start of a statement open a scope (inline
assembly declares registers and labels in one), and every register and label is resolved to a number at once. A call of a device
function becomes the function's body, its parameters local variables.
"""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass, field
from typing import Any

from .errors import Unsupported

WIDTH = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64,
    "f32x2": 64, "b128": 128,
}  # fmt: skip
"""Bits of every type."""


@dataclass(frozen=True)
class Reg:
    """A virtual register by its number; `neg`: written with "!" before it."""

    idx: int
    width: int
    neg: bool = False


@dataclass(frozen=True)
class Imm:
    """A number: an integer, or the raw bits of a float of `isfloat` bits."""

    value: int
    isfloat: int = 0


@dataclass(frozen=True)
class Sym:
    """A name that is no register: a special register, a variable, a parameter."""

    name: str


@dataclass(frozen=True)
class Vec:
    """`{a, b, ...}`"""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Mem:
    """`[base + off, rest...]`; `rest` holds what else stands in the brackets, such as a TMA copy's coordinates."""

    base: Any
    off: int = 0
    rest: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Pair:
    """`a|b`, two destinations."""

    a: Any
    b: Any


class Sink:
    """The destination `_`."""

    def __repr__(self) -> str:
        return "_"


SINK = Sink()

Operand = Any
"""Reg, Imm, Sym, Vec, Mem, Pair, SINK; in a branch, a label's number."""


@dataclass
class Instr:
    """One instruction: `parts` is the opcode split at its dots, `op` the first of them."""

    op: str
    parts: list[str]
    args: list[Operand]
    guard: Reg | None = None
    line: int = 0
    text: str = ""

    def has(self, *modifiers: str) -> bool:
        """Whether the opcode has one of these modifiers."""
        return any(m in self.parts for m in modifiers)


class Variable:
    """A variable of the module in global or constant memory, with memory of its own."""

    def __init__(self, name: str, initial: bytes) -> None:
        self.name, self.initial = name, initial
        self.memory = ctypes.create_string_buffer(len(initial) + 255)
        self.address = _aligned(ctypes.addressof(self.memory), 256)

    def reset(self) -> None:
        """Give it its initial value."""
        ctypes.memmove(self.address, self.initial, len(self.initial))


@dataclass(frozen=True)
class _Function:
    """A device function: its results and parameters, bytes by name; where its body starts, 0 for one declared alone."""

    results: dict[str, int]
    params: dict[str, int]
    body: int


@dataclass
class Kernel:
    """One entry function. `params`: name, size, alignment, offset; `shared` and `local`: offsets by name; `sizes`: of what calls pass."""

    name: str
    params: list[tuple[str, int, int, int]] = field(default_factory=list)
    instrs: list[Instr] = field(default_factory=list)
    labels: dict[int, int] = field(default_factory=dict)
    reg_width: list[int] = field(default_factory=list)
    reg_name: list[str] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    dynamic_base: int = 0
    local: dict[str, int] = field(default_factory=dict)
    local_size: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    reqntid: tuple[int, ...] | None = None
    maxnreg: int | None = None
    min_ctas: int = 0
    param_size: int = 0
    variables: dict[str, Variable] = field(default_factory=dict)

    def param_offset(self, name: str) -> int | None:
        """Where a parameter lies in the parameter space."""
        return next((offset for n, _, _, offset in self.params if n == name), None)


class _Scope:
    """Names between two braces."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.regs: dict[str, Reg] = {}
        self.labels: dict[str, int] = {}
        self.variables: dict[str, str] = {}

    def variable(self, name: str) -> str:
        """A local variable's name in the kernel."""
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.parent
        return name

    def reg(self, name: str) -> Reg | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.regs:
                return scope.regs[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


_OPAQUE = ("texref", "samplerref", "surfref")
_REFERENCE = " (textures and surfaces are taken by handle only, a .u64 parameter: see ptxemu.texture)"
_LABEL = re.compile(r"([\w$%.]+)\s*:(?!:)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(\(|\{|\.)")
_FUNCTION = re.compile(r"\.func\s*(\([^)]*\))?\s*([\w$]+)\s*(\([^)]*\))?\s*(?:\.\w+\s*)*([;{])")
_MODULE = re.compile(
    r"(?<![\w.])\.(?:global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)((?:\s*\[\d*\])*)\s*(?:=\s*(\{[^;]*\}|[^;]+?))?\s*;"
)
_VARIABLE = re.compile(r"\.(shared|local|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?$")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?(?:\.\w+\s+)*?\.(\w+)\s+"
    r"(?:\.ptr[^\s]*\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?([\w$]+)(?:\[(\d+)\])?$"
)
_OFFSET = re.compile(r"^(.*?)\s*([+-])\s*(-?\s*(?:0[xX][0-9a-fA-F]+|\d+))$")


def _strip(text: str) -> str:
    """The text without comments and line directives, line numbers kept."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"(?m)^\s*\.(loc|file)\b[^\n]*$", "", text)


def _split(s: str) -> list[str]:
    """Split at commas outside brackets."""
    out, depth, at = [], 0, 0
    for i, ch in enumerate(s):
        if ch in "[{(":
            depth += 1
        elif ch in "]})":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(s[at:i].strip())
            at = i + 1
    if s[at:].strip():
        out.append(s[at:].strip())
    return out


def _number(s: str) -> Imm | None:
    negative = s.startswith("-")
    t = s.lstrip("+-").strip()
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", t):
        return Imm(int(t[2:], 16) ^ (1 << 31 if negative else 0), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", t):
        return Imm(int(t[2:], 16) ^ (1 << 63 if negative else 0), 64)
    digits = t.rstrip("uU")
    if re.fullmatch(r"0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+", digits):
        value = int(digits, 8) if re.fullmatch(r"0[0-7]+", digits) else int(digits, 0)
        return Imm(-value if negative else value)
    if re.fullmatch(r"[0-9]*\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|[0-9]+\.", t):
        value_bits: int = struct.unpack("<Q", struct.pack("<d", -float(t) if negative else float(t)))[0]
        return Imm(value_bits, 64)
    return None


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _operand(scope: _Scope, a: str, label: bool = False) -> Operand:
    a = a.strip()
    if label:
        return Sym(a)
    if a == "_":
        return SINK
    if m := re.match(r"(\{[^}]*\})\s*\|(.+)$", a):
        return Pair(_operand(scope, m[1]), _operand(scope, m[2]))
    if a.startswith("{"):
        return Vec(tuple(_operand(scope, x) for x in _split(a[1:-1])))
    if a.startswith("["):
        first, *rest = _split(a[1:-1])
        offset = 0
        m = _OFFSET.match(first)
        if m and m[1]:
            first, offset = m[1], int(m[3].replace(" ", ""), 0) * (1 if m[2] == "+" else -1)
        return Mem(_operand(scope, first), offset, tuple(_operand(scope, x) for x in rest))
    if a.startswith("!"):
        reg = scope.reg(a[1:].strip())
        if reg is None:
            raise Unsupported(f"operand {a!r}")
        return Reg(reg.idx, reg.width, True)
    if "|" in a:
        x, y = a.split("|")
        return Pair(_operand(scope, x), _operand(scope, y))
    found = scope.reg(a)
    if found is not None:
        return found
    number = _number(a)
    if number is not None:
        return number
    m = re.match(r"^(.+?)\s*\+\s*(\d+)$", a)
    if m:  # a symbol and a constant outside brackets
        return Mem(_operand(scope, m[1]), int(m[2]))
    return Sym(scope.variable(a))


class _Body:
    """Reads the statements of one kernel."""

    def __init__(self, kernel: Kernel, text: str, position: int, functions: dict[str, _Function]) -> None:
        self.kernel, self.text, self.position, self.functions = kernel, text, position, functions
        self.labels = 0
        self.calls: list[tuple[str, int]] = []  # functions that are being expanded, and their ends' labels
        self.results: dict[str, Instr] = {}  # .param variables, where they begin: without a value, if calls fill them
        self.line = text.count("\n", 0, position) + 1
        self.scope = _Scope(None)
        self.branches: list[tuple[Instr, _Scope]] = []

    def read(self) -> int:
        """Read to the closing brace; returns the position after it."""
        self._statements()
        for ins, scope in self.branches:
            name = ins.args[0].name
            ins.args = [scope.label(name)]
            if ins.args[0] is None:
                raise Unsupported(f"PTX line {ins.line}: unknown label {name!r}")
        return self.position

    def _statements(self) -> None:
        while self.position < len(self.text):
            ch = self.text[self.position]
            if ch.isspace() or ch == ";":
                self._advance(self.position + 1)
            elif ch == "{":
                self.scope = _Scope(self.scope)
                self._advance(self.position + 1)
            elif ch == "}":
                self._advance(self.position + 1)
                if self.scope.parent is None:
                    break
                self.scope = self.scope.parent
            elif m := _LABEL.match(self.text, self.position):
                self.scope.labels[m[1]] = self._label()
                self._place(self.scope.labels[m[1]])
                self._advance(m.end())
            else:
                end = self.text.index(";", self.position)
                statement = self.text[self.position : end]
                if statement.startswith("."):
                    self._directive(" ".join(statement.split()))
                else:
                    self._instruction(" ".join(statement.split()))
                self._advance(end + 1)

    def _label(self) -> int:
        self.labels += 1
        return self.labels - 1

    def _place(self, label: int) -> None:
        self.kernel.labels[label] = len(self.kernel.instrs)

    def _advance(self, to: int) -> None:
        self.line += self.text.count("\n", self.position, to)
        self.position = to

    def _directive(self, s: str) -> None:
        k = self.kernel
        if s.startswith(".reg"):
            m = re.match(r"\.reg\s*(?:\.v\d\s*)?\.(\w+)\s+(.*)$", s)
            if not m or m[1] not in WIDTH:
                raise Unsupported(f"PTX line {self.line}: directive {s!r}")
            width = WIDTH[m[1]]
            for name in m[2].split(","):
                r = re.match(r"(.+)<(\d+)>$", name.strip())
                for full in [f"{r[1]}{i}" for i in range(int(r[2]))] if r else [name.strip()]:
                    self.scope.regs[full] = Reg(len(k.reg_width), width)
                    k.reg_width.append(width)
                    k.reg_name.append(full)
        elif m := _VARIABLE.match(s):
            bits = WIDTH[m[3]]
            alignment = int(m[2] or bits // 8)
            size = bits // 8 * int(m[5] or 1)
            if m[1] == "shared":
                k.shared[m[4]] = _aligned(k.static_shared, alignment)
                k.static_shared = k.shared[m[4]] + size
            else:  # parameters of calls, too
                name = m[4] if m[1] == "local" and not self.calls else f"{m[4]} {len(k.local)}"
                self.scope.variables[m[4]] = name
                k.local[name] = _aligned(k.local_size, alignment)
                k.local_size = k.local[name] + size
                if m[1] == "param":
                    k.sizes[name] = size
                    self.results[name] = Instr("call.results", ["call"], [], None, self.line, s)
                    k.instrs.append(self.results[name])
        elif not s.startswith((".pragma", ".branchtargets", ".minnctapersm", ".maxntid")):
            raise Unsupported(f"PTX line {self.line}: directive {s!r}")

    def _instruction(self, s: str) -> None:
        guard, body = None, s
        if m := re.match(r"@(!?)([\w$%]+)\s+", s):
            reg = self.scope.reg(m[2])
            if reg is None:
                raise Unsupported(f"PTX line {self.line}: unknown predicate {m[2]!r}")
            guard, body = Reg(reg.idx, reg.width, bool(m[1])), s[m.end() :]
        opcode = re.match(r"([\w.:]+)\s*(.*)$", body)
        if not opcode:
            raise Unsupported(f"PTX line {self.line}: {s!r}")
        parts = opcode[1].split(".")
        if parts[0] == "call":
            self._call(_split(opcode[2]), guard, s)
            return
        if parts[0] == "ret" and self.calls:
            self._branch(self.calls[-1][1], guard, s)
            return
        args = [_operand(self.scope, a, parts[0] == "bra") for a in _split(opcode[2])]
        ins = Instr(parts[0], parts, args, guard, self.line, s)
        self.kernel.instrs.append(ins)
        if parts[0] == "bra":
            self.branches.append((ins, self.scope))

    def _branch(self, label: int, guard: Reg | None, text: str) -> None:
        self.kernel.instrs.append(Instr("bra", ["bra"], [label], guard, self.line, text))

    def _call(self, items: list[str], guard: Reg | None, text: str) -> None:
        """A call: the function's body under the caller's names of its parameters."""
        results = [x.strip() for x in items.pop(0)[1:-1].split(",")] if items[0].startswith("(") else []
        name, *rest = items
        actual = [x.strip() for x in rest[0][1:-1].split(",")] if rest and rest[0] != "()" else []
        function = self.functions.get(name)
        if function is None or len(rest) > 1:
            raise Unsupported(f"PTX line {self.line}: {text}: only functions of this text can be called, by name")
        if not function.body and name not in ("vprintf", "__assertfail"):
            raise Unsupported(f"PTX line {self.line}: {text}: the function {name} has no body")
        if any(name == called for called, _ in self.calls):
            raise Unsupported(f"PTX line {self.line}: {text}: recursion")
        passed = self._passed(function, results, actual, name, text)
        if not function.body:
            self.kernel.instrs.append(Instr("call", ["call", name], [], guard, self.line, text))
            return
        for formal in function.results:
            variable = passed[formal]
            begin = self.results[variable]
            if not begin.args:
                begin.args, begin.line, begin.text = [Sym(variable), Imm(0), Imm(0)], self.line, text
            args = [Sym(variable), guard or Imm(1), Imm(1)]
            self.kernel.instrs.append(Instr("call.results", ["call"], args, None, self.line, text))
        end = self._label()
        if guard is not None:
            self._branch(end, Reg(guard.idx, guard.width, not guard.neg), text)
        inner = _Scope(None)
        inner.variables = passed
        outer = self.scope, self.position, self.line
        self.scope, self.position, self.line = inner, function.body, self.text.count("\n", 0, function.body) + 1
        self.calls.append((name, end))
        self._statements()
        self.calls.pop()
        self.scope, self.position, self.line = outer
        self._place(end)

    def _passed(
        self, function: _Function, results: list[str], actual: list[str], name: str, text: str
    ) -> dict[str, str]:
        """The caller's variables by the function's names of them."""
        where = f"PTX line {self.line}: {text}"
        if len(results) != len(function.results) or len(actual) != len(function.params):
            raise Unsupported(f"{where}: results or parameters of another number than {name} has")
        found: dict[str, str] = {}
        formals = {**function.results, **function.params}
        for (formal, size), given in zip(formals.items(), results + actual, strict=True):
            found[formal] = self.scope.variable(given)
            has = self.kernel.sizes.get(found[formal])
            if has is None:
                raise Unsupported(f"{where}: {given} is no variable in .param space")
            if has != size:
                raise Unsupported(f"{where}: {given} has {has} bytes; {formal} of {name} has {size}")
        return found


def _functions(text: str) -> dict[str, _Function]:
    found: dict[str, _Function] = {}
    for m in _FUNCTION.finditer(text):
        body = m.end() if m[4] == "{" else 0
        if body or m[2] not in found:
            found[m[2]] = _Function(_formals(m[1]), _formals(m[3]), body)
    return found


def _formals(part: str | None) -> dict[str, int]:
    """Bytes of a function's parameters by name; 0 of those that are registers."""
    found: dict[str, int] = {}
    for p in _split((part or "()")[1:-1]):
        m = _PARAM.match(" ".join(p.split()))
        name = m[3] if m else p.split()[-1]
        found[name] = WIDTH.get(m[2], 0) // 8 * int(m[4] or 1) if m else 0
    return found


def _initial(type_: str, count: int, value: str | None, name: str) -> bytes:
    """The initial bytes of a variable of the module."""
    size = WIDTH[type_] // 8
    out = bytearray()
    for item in _split((value or "").replace("{", "").replace("}", "")):
        number = _number(item)
        if number is None:
            raise Unsupported(f"variable {name}: the initial value {item!r}")
        bits = number.value
        if number.isfloat == 64 and size == 4:
            (bits,) = struct.unpack("<I", struct.pack("<f", *struct.unpack("<d", struct.pack("<Q", bits))))
        out += (bits & (1 << 8 * size) - 1).to_bytes(size, "little")
    count = count or len(out) // size
    return bytes(out.ljust(size * count, b"\0"))


def _variables(text: str) -> dict[str, Variable]:
    found: dict[str, Variable] = {}
    for alignment, type_, name, sizes, value in _MODULE.findall(text):
        if type_ in _OPAQUE:
            raise Unsupported(f"variable {name}: .{type_}{_REFERENCE}")
        if type_ not in WIDTH or int(alignment or 1) > 256:
            raise Unsupported(f"variable {name}: .{type_}, alignment {alignment}")
        count = 1
        for n in re.findall(r"\[(\d*)\]", sizes):
            count *= int(n or 0)
        found[name] = Variable(name, _initial(type_, count, value, name))
        found[name].reset()
    return found


def _params(kernel: Kernel, s: str) -> None:
    offset = 0
    for p in _split(s):
        m = _PARAM.match(" ".join(p.split()))
        if not m or m[2] not in WIDTH:
            raise Unsupported(f"parameter {p!r}" + (_REFERENCE if m and m[2] in _OPAQUE else ""))
        size = WIDTH[m[2]] // 8 * int(m[4] or 1)
        alignment = int(m[1] or WIDTH[m[2]] // 8)
        offset = _aligned(offset, alignment)
        kernel.params.append((m[3], size, alignment, offset))
        offset += size
    kernel.param_size = offset


def parse(text: str) -> dict[str, Kernel]:
    """All entry functions of a PTX text by name. Raises Unsupported for unknown directives."""
    text = _strip(text)
    functions, variables = _functions(text), _variables(text)
    first = _ENTRY.search(text)
    head = text[: first.start()] if first else text
    module: dict[str, int] = {}
    dynamic: list[str] = []
    static = 0
    pattern = r"(\.extern\s+|\.visible\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*;"
    for m in re.finditer(pattern, head):
        if m[1] and "extern" in m[1]:
            dynamic.append(m[4])
            continue
        module[m[4]] = static = _aligned(static, int(m[2] or WIDTH[m[3]] // 8))
        static += int(m[5] or 1) * WIDTH[m[3]] // 8
    out: dict[str, Kernel] = {}
    position = 0
    while entry := _ENTRY.search(text, position):
        kernel = Kernel(entry[1], shared=dict(module), static_shared=static, variables=variables)
        at = entry.end() - 1
        if text[at] == "(":
            end = text.index(")", at)
            _params(kernel, text[at + 1 : end])
            at = end + 1
        brace = text.index("{", at)
        for name in ("reqntid", "maxnreg", "minnctapersm"):
            if r := re.search(rf"\.{name}\s+([\d\s,]+)", text[at:brace]):
                numbers = tuple(int(x) for x in r[1].replace(",", " ").split())
                if name == "reqntid":
                    kernel.reqntid = numbers
                elif name == "maxnreg":
                    kernel.maxnreg = numbers[0]
                else:
                    kernel.min_ctas = numbers[0]
        position = _Body(kernel, text, brace + 1, functions).read()
        # Dynamic shared memory follows the static, at an alignment that any kernel may ask for.
        kernel.dynamic_base = _aligned(kernel.static_shared, 1024)
        kernel.shared.update(dict.fromkeys(dynamic, kernel.dynamic_base))
        out[kernel.name] = kernel
    return out
