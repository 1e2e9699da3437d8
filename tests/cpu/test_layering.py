"""The rules of the house, read from the sources of `src/deltafuse`; each is also seen to fail on a made-up tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "deltafuse"
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 150

OPS = {"kda", "gdn", "conv"}
PROBLEMS = {"problem", "problem_conv"}

# Which parts of the package a part may import; "" is the package's own __init__. A call goes op -> problem -> support
# -> autograd -> kernels or reference -> tile, runtime; `problem` also words every complaint. A part needs a row here.
ALLOWED: dict[str, set[str]] = {
    "": OPS | {"backends", "support", "patch", "nn", "warm", "_version"},
    "_version": set(),
    **{op: PROBLEMS | {"backends", "support", "autograd"} for op in OPS},
    "backends": PROBLEMS | {"support", "runtime", ""},  # `explain` calls the op that it is asked about
    "problem": set(),
    "problem_conv": {"problem"},
    "support": PROBLEMS | {"runtime"},
    "autograd": PROBLEMS | {"support", "kernels", "reference", "runtime"},
    "kernels": {"tile", "runtime"},
    "tile": {"runtime"},
    "reference": set(),
    "runtime": set(),
    "nn": OPS | {"backends", "problem"},
    "patch": OPS | {"backends", "problem"},
    "demo": {"nn", "problem"},
    "warm": {"autograd", "backends", "runtime", "support"},
    "aot": {"backends", "cli", "kernels", "runtime", "support", "warm"},
    "cli": OPS | {"", "backends", "problem", "support", "reference", "runtime", "nn", "demo"},
}

# Parts of `kernels` that never import each other: each is built and loaded on its own kind of card.
ARCHITECTURES = {"sm90", "sm100"}

# What `import deltafuse` must not load, even where it is installed.
HEAVY = {"cutlass", "cuda", "tvm_ffi", "triton", "fla", "typer", "rich", "matplotlib"}


class Module:
    """A source file: its dotted name inside the package ("" for the package itself), its tree and what it imports."""

    def __init__(self, root: Path, path: Path) -> None:
        parts = path.relative_to(root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.path = path
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.package = root.name

    @property
    def part(self) -> str:
        return self.name.partition(".")[0]

    def imports(self, *, at_load: bool = False) -> Iterator[tuple[int, str]]:
        """Line and absolute name of all that is imported; `at_load`: of what importing this module itself loads."""
        for node in _nodes(self.tree, at_load):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"}:
                yield from ((node.lineno, str(arg.value)) for arg in node.args[:1] if isinstance(arg, ast.Constant))

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        here = [self.package, *self.name.split(".")] if self.name else [self.package]
        base = here[: len(here) - node.level + self.is_package]
        return ".".join([*base, *([node.module] if node.module else [])])


def _nodes(tree: ast.AST, at_load: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if at_load and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if at_load and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _nodes(child, at_load)


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _modules(root: Path) -> dict[str, Module]:
    found = (Module(root, path) for path in sorted(root.rglob("*.py")))
    return {module.name: module for module in found}


def _own(package: str, modules: dict[str, Module], target: str) -> str | None:
    """The module of the package that `target` names: the longest prefix that is a file. None for other packages."""
    if target.partition(".")[0] != package:
        return None
    name = target.partition(".")[2]
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def layers(root: Path) -> list[str]:
    """Imports between parts of the package that the table does not allow."""
    modules = _modules(root)
    wrong = []
    for module in modules.values():
        if module.part not in ALLOWED:
            wrong.append(f"{module.path}: part {module.part!r} has no row in the table of layers")
            continue
        for line, target in module.imports():
            own = _own(root.name, modules, target)
            if own is None:
                continue
            part = own.partition(".")[0]
            if part != module.part and part not in ALLOWED[module.part]:
                wrong.append(f"{module.path}:{line}: {module.part or root.name} imports {part or root.name}")
    return wrong


def architectures(root: Path) -> list[str]:
    """Imports between the folders of two architectures."""
    modules = _modules(root)
    wrong = []
    for module in modules.values():
        here = ARCHITECTURES & set(module.name.split("."))
        for line, target in module.imports():
            there = ARCHITECTURES & set(target.split("."))
            if here and there - here:
                wrong.append(f"{module.path}:{line}: {module.name} imports {target}")
    return wrong


def reference_needs_torch_alone(root: Path) -> list[str]:
    """Imports of `reference` other than torch, the standard library and itself."""
    allowed = {"torch", *sys.stdlib_module_names}
    return [
        f"{module.path}:{line}: reference imports {target}"
        for module in _modules(root).values()
        if module.part == "reference"
        for line, target in module.imports()
        if target.partition(".")[0] not in allowed and not f"{target}.".startswith(f"{root.name}.reference.")
    ]


def light_import(root: Path) -> list[str]:
    """Heavy packages imported by any module that `import deltafuse` loads."""
    modules = _modules(root)
    wrong, seen, queue = [], set(), [""]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for line, target in modules[name].imports(at_load=True):
            own = _own(root.name, modules, target)
            if own is not None:
                parents = own.split(".")
                queue += [".".join(parents[:depth]) for depth in range(1, len(parents) + 1)] if own else [""]
            elif target.partition(".")[0] in HEAVY:
                wrong.append(f"{modules[name].path}:{line}: imports {target}")
    return wrong


def ops_are_thin(root: Path) -> list[str]:
    """Computation in the modules of the public ops: loops, arithmetic, or calls of torch functions."""
    wrong = []
    for module in _modules(root).values():
        if module.part not in OPS:
            continue
        for node in ast.walk(module.tree):
            computes = isinstance(node, (ast.For, ast.While, ast.AugAssign, ast.comprehension)) or (
                isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr)  # `|` is for annotations
            )
            calls = isinstance(node, ast.Call) and ast.unparse(node.func).partition(".")[0] in {"torch", "F"}
            if computes or calls:
                wrong.append(f"{module.path}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}")
    return wrong


def sizes(root: Path) -> list[str]:
    """Files and functions that have outgrown the house."""
    wrong = []
    for module in _modules(root).values():
        lines = len(module.text.splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{module.path}: {lines} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{module.path}:{node.lineno}: {node.name} has {length} lines")
    return wrong


RULES: list[Callable[[Path], list[str]]] = [
    layers,
    architectures,
    reference_needs_torch_alone,
    light_import,
    ops_are_thin,
    sizes,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Callable[[Path], list[str]]) -> None:
    assert _modules(ROOT), f"no sources in {ROOT}"
    assert rule(ROOT) == []


GOOD_TREE = {
    "__init__.py": "from . import nn\nfrom .kda import chunk_kda\n",
    "kda.py": "import torch\nfrom .problem import parse\nfrom .autograd import kda\n\n"
    "def chunk_kda(q: torch.Tensor | None) -> torch.Tensor:\n    return kda.run(parse(q))\n",
    "problem.py": "import torch\n",
    "autograd/__init__.py": "",
    "autograd/kda.py": "from ..reference import chunk\n\ndef run(p):\n    from ..kernels.sm90 import scan\n",
    "reference/__init__.py": "",
    "reference/chunk.py": "import math\nfrom torch.nn import functional\nfrom . import decay\nfrom .decay import x\n",
    "reference/decay.py": "x = 1\n",
    "kernels/__init__.py": "",
    "kernels/sm90/__init__.py": "from ..common import x\n",
    "kernels/sm90/scan.py": "import cutlass\nfrom .. import common\nfrom . import gate\n",
    "kernels/sm90/gate.py": "",
    "kernels/sm100/__init__.py": "",
    "kernels/sm100/scan.py": "import cutlass\n",
    "kernels/common.py": "x = 1\n",
    "nn/__init__.py": "from ..kda import chunk_kda\n",
    "cli/__init__.py": "import typer\nfrom deltafuse import nn\n",
}

BREACHES = [
    (layers, "problem.py", "from .autograd import kda\n"),
    (layers, "reference/decay.py", "from ..problem import parse\n"),
    (layers, "kernels/common.py", "import deltafuse.autograd.kda\n"),
    (layers, "kda.py", "from . import nn\n"),
    (layers, "kda.py", "def chunk_kda(q):\n    from deltafuse.patch import patch_fla\n"),
    (layers, "autograd/kda.py", "import importlib\nimportlib.import_module('deltafuse.kda')\n"),
    (layers, "autograd/kda.py", "from deltafuse import chunk_kda\n"),
    (layers, "nn/__init__.py", "from .. import reference\n"),
    (layers, "gdn.py", "from .kda import chunk_kda\n"),
    (layers, "newcomer.py", ""),
    (architectures, "kernels/sm90/scan.py", "from ..sm100 import scan\n"),
    (architectures, "kernels/sm100/scan.py", "def f():\n    from deltafuse.kernels.sm90.gate import gate\n"),
    (architectures, "kernels/sm100/__init__.py", "from ..sm90 import gate\n"),
    (reference_needs_torch_alone, "reference/decay.py", "import numpy as np\n"),
    (reference_needs_torch_alone, "reference/chunk.py", "from ..problem import parse\n"),
    (light_import, "nn/__init__.py", "import triton\n"),
    (light_import, "reference/__init__.py", "try:\n    from fla.ops import kda\nexcept ImportError:\n    kda = None\n"),
    (light_import, "autograd/__init__.py", "from ..kernels.sm90 import scan\n"),
    (light_import, "problem.py", "class A:\n    import cuda.bindings\n"),
    (ops_are_thin, "kda.py", "def chunk_kda(q, k):\n    return q * k\n"),
    (ops_are_thin, "kda.py", "import torch\n\ndef chunk_kda(q):\n    return torch.cumsum(q, 1)\n"),
    (ops_are_thin, "gdn.py", "def gdn(q):\n    return [x for x in q]\n"),
    (sizes, "problem.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
    (sizes, "problem.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
]


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_a_good_tree(rule: Callable[[Path], list[str]], tmp_path: Path) -> None:
    assert rule(_write(tmp_path / "deltafuse", GOOD_TREE)) == []


@pytest.mark.parametrize(("rule", "name", "text"), BREACHES)
def test_rule_finds_a_breach(rule: Callable[[Path], list[str]], name: str, text: str, tmp_path: Path) -> None:
    root = _write(tmp_path / "deltafuse", GOOD_TREE | {name: text})
    found = rule(root)
    assert len(found) == 1
    assert str(root / name) in found[0] or rule is light_import
