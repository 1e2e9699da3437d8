"""Real kernels for the emulator: where they are found, compiled functions with inputs, and what they should give in float64.

They are not part of this repository. The Hopper scan is looked for in $DELTAFUSE_SHARED (default: ../shared beside the checkout),
kernel-fun 0.2.0 among the installed packages or in the emulator's cache, where pip puts it, CUTLASS's examples in $CUTLASS_EXAMPLES
(its folder examples/python/CuTeDSL). Tests of what is not there are skipped, by name and with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ptxemu
from ptxemu import build

CHUNK = 64
SCALE = 0.1
SHARED = Path(os.environ.get("DELTAFUSE_SHARED", Path(__file__).parents[3] / "shared"))
KERNEL_FUN = "0.2.0"


class Missing(Exception):
    """Why a kernel cannot be had here."""


def need(arch: str, get: Callable[..., Any], *args: Any) -> Any:
    """What `get` returns, compiled for an architecture; skips the test where the DSL or the kernel is missing."""
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("the CuTe DSL is not installed: pip install 'deltafuse[emulator]'")
    ptxemu.setup(arch)
    try:
        return get(*args)
    except Missing as reason:
        pytest.skip(str(reason))


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Case:
    """A compiled kernel, its arguments, what the outputs among them should be, and options of the emulator that it needs."""

    name: str
    compiled: Any
    args: Sequence[Any]
    outputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]
    chunks: int = 1
    tensors: Sequence[torch.Tensor] = ()
    """What pointers among the arguments point to."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def ptx(self) -> str:
        return self.compiled.artifacts.PTX

    def run(self, **options: Any) -> ptxemu.Launched:
        """One launch into outputs that are filled with NaN before."""
        self.clear()
        (launched,) = ptxemu.run(self.compiled, *self.args, tensors=self.tensors, **{**self.options, **options})
        return launched

    def clear(self) -> None:
        for t in self.outputs.values():
            t.fill_(float("nan"))

    def errors(self) -> dict[str, float]:
        """Relative errors of the outputs in the Frobenius norm; infinite where they hold NaN."""
        pairs = {n: (self.outputs[n].double(), e) for n, e in self.expected.items()}
        found = {n: ((o - e).norm() / e.norm()).item() for n, (o, e) in pairs.items()}
        return {n: e if e == e else float("inf") for n, e in found.items()}

    def bits(self) -> dict[str, bytes]:
        return {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in self.outputs.items()}


# ---- the Hopper scan ---------------------------------------------------------------------------------------------------------------
HOPPER_SCANS: dict[str, dict[str, int]] = {
    "one": dict(nwg=1),
    "two": dict(nwg=2, u_stages=2, o_stages=1),
    "cluster": dict(nwg=1, cluster=2),
}
"""Variants: one consumer warpgroup, two, and clusters of two CTAs that multicast what both need."""
HOPPER_OPTIONS = {"queued_reads": False}
"""Its warps release a stage of u right after they asked for it."""


@cache
def _hopper_scan(variant: str) -> Any:
    path = SHARED / "prototypes" / "hopper_scan" / "scan_kernel.py"
    if not path.exists():
        raise Missing(f"the Hopper scan is not at {path}; set DELTAFUSE_SHARED")
    return _load(path, "hopper_scan_kernel").compile_scan(128, 128, **HOPPER_SCANS[variant])


def _normal(*specs: tuple[tuple[int, ...], float, torch.dtype], seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=g) * size).to(dtype) for shape, size, dtype in specs]


def _by_chunk(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] in float64 as [chunk, B, H, token of the chunk, D]."""
    b, t, h, d = x.shape
    return x.double().reshape(b, t // CHUNK, CHUNK, h, d).permute(1, 0, 3, 2, 4)


def _by_token(x: torch.Tensor) -> torch.Tensor:
    n, b, h, c, d = x.shape
    return x.permute(1, 0, 3, 2, 4).reshape(b, n * c, h, d)


def _causal(a: torch.Tensor) -> torch.Tensor:
    _, t, _, c = a.shape
    return (a.float() * torch.tril(torch.ones(c, c)).repeat(t // c, 1).view(1, t, 1, c)).to(a.dtype)


def hopper_scan(variant: str, tokens: int, heads: int = 1) -> Case:
    """v = u - w S; o = scale q S + A v; S = 2^g S + k^T v over chunks, with w negated by the caller."""
    compiled = _hopper_scan(variant)
    n, k, v, bf, f32 = tokens // CHUNK, 128, 128, torch.bfloat16, torch.float32
    shape = (1, tokens, heads)
    w, q, key, u, a, g, h0 = _normal(
        ((*shape, k), 0.05, bf), ((*shape, k), 0.3, bf), ((*shape, k), 0.1, bf), ((*shape, v), 1, bf), ((*shape, CHUNK), 0.1, bf),
        ((1, n, heads, k), 1, f32), ((1, heads, k, v), 0.5, f32),
    )  # fmt: skip
    a, g = _causal(a), -g.abs()
    o, ht = torch.empty_like(u), torch.empty_like(h0)
    state, out, scale = h0.double(), [], k**-0.5
    for c, (wc, qc, kc, uc, ac) in enumerate(zip(*map(_by_chunk, (w, q, key, u, a)), strict=True)):
        new = uc - wc @ state
        out.append(scale * qc @ state + ac @ new)
        state = torch.exp2(g[:, c].double())[..., None] * state + kc.transpose(-1, -2) @ new
    args = (-w, q, key, u, a, g, h0, o, ht, torch.zeros(4096, 16, dtype=torch.int32), scale)
    return Case(
        f"Hopper scan, {variant}",
        compiled,
        args,
        {"o": o, "ht": ht},
        {"o": _by_token(torch.stack(out)), "ht": state},
        n,
        options=HOPPER_OPTIONS,
    )


# ---- kernel-fun --------------------------------------------------------------------------------------------------------------------
@cache
def _kernel_fun(module: str) -> ModuleType:
    if importlib.util.find_spec("kernel_fun") is None:
        sys.path.insert(0, str(_kernel_fun_folder()))
    try:
        return importlib.import_module(f"kernel_fun.kda._kernels.{module}")
    except ImportError as error:
        raise Missing(f"kernel-fun {KERNEL_FUN} cannot be imported: {error}") from error


def _kernel_fun_folder() -> Path:
    """The wheel's files in the user's cache; pip downloads it once."""
    folder = build.cache_dir() / f"kernel-fun-{KERNEL_FUN}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", "-d"]
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        done = subprocess.run(
            [*command, place, f"kernel-fun=={KERNEL_FUN}"], capture_output=True, text=True, check=False
        )
        wheels = list(Path(place).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise Missing(f"kernel-fun {KERNEL_FUN} is not installed and pip cannot fetch it: {reason}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(place) / "files")
        # Another process may have been faster.
        with contextlib.suppress(OSError):
            (Path(place) / "files").rename(folder)
    return folder


def _fakes(specs: dict[str, tuple[tuple[Any, ...], tuple[int, ...], torch.dtype]]) -> list[Any]:
    """Stand-ins for compiling: row-major tensors of these shapes, their modes permuted."""
    import cutlass
    from cutlass.cute.runtime import make_fake_compact_tensor

    types = {torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32}
    return [
        make_fake_compact_tensor(
            types[dtype], tuple(shape[i] for i in order), stride_order=tuple(len(order) - 1 - i for i in order), assumed_align=16
        )
        for shape, order, dtype in specs.values()
    ]  # fmt: skip


def _stream() -> Any:
    import cuda.bindings.driver as driver

    return driver.CUstream(0)


Specs = dict[str, tuple[tuple[Any, ...], tuple[int, ...], torch.dtype]]


def _specs(reverse: bool, tokens: Any, chunks: Any, heads: int, k: int, v: int) -> Specs:
    """Name to shape, order of modes and type of the kernel's arguments."""
    bf, f32, x = torch.bfloat16, torch.float32, (1, tokens, heads)
    a, b, state = (1, 3, 2, 0), (3, 1, 2, 0), (2, 3, 1, 0)
    if reverse:
        return dict(
            kg=((*x, k), a, bf), do=((*x, v), b, bf), qg=((*x, k), b, bf), w=((*x, k), b, bf), dv=((*x, v), a, bf),
            gd=((1, heads, chunks, k), (3, 2, 1, 0), f32), dht=((1, heads, k, v), state, f32), dv2=((*x, v), a, bf),
            dhck=((1, chunks, heads, k, v), (4, 3, 1, 2, 0), bf), dh0=((1, heads, k, v), state, f32),
        )  # fmt: skip
    return dict(
        qg=((*x, k), a, bf), w=((*x, k), a, bf), kgt=((*x, k), b, bf), u=((*x, v), a, bf), aqk=((*x, CHUNK), a, bf),
        gd=((1, heads, chunks, k), (3, 2, 1, 0), f32), h0=((1, heads, k, v), state, f32), o=((*x, v), a, bf),
        ht=((1, heads, k, v), state, f32),
    )  # fmt: skip


@cache
def _kernel_fun_scan(reverse: bool, tokens: int, heads: int, k: int, v: int) -> Any:
    module = _kernel_fun("bwd_dhu" if reverse else "fwd_state")
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    kernel = (module.KdaB2aDhuKernel if reverse else module.KdaFwdStateKernel)(cutlass.BFloat16, k, V_TILE=64)
    specs = _specs(reverse, tokens, tokens // CHUNK, heads, k, v)
    return cute.compile(kernel, *_fakes(specs), cutlass.Float32(SCALE), make_fake_stream())


def kernel_fun_scan(reverse: bool, tokens: int, heads: int, k: int, v: int) -> Case:
    """kernel-fun's forward scan (as the Hopper scan's equation), or its backward twin, which runs from the last chunk to the first."""
    compiled = _kernel_fun_scan(reverse, tokens, heads, k, v)
    specs = _specs(reverse, tokens, tokens // CHUNK, heads, k, v)
    sizes = dict(w=0.2, kgt=0.2, qg=0.3 if reverse else 0.5, kg=0.3, do=0.3, dv=0.3, u=0.5, aqk=0.5)
    x = dict(zip(specs, _normal(*((s, sizes.get(n, 1.0), t) for n, (s, _, t) in specs.items()), seed=3), strict=True))
    x["gd"] = -x["gd"].abs()
    if not reverse:
        x["aqk"] = _causal(x["aqk"])
    expected = (_reverse if reverse else _forward)(x)
    args = (*(x[n].permute(order) for n, (_, order, _) in specs.items()), SCALE, _stream())
    name = f"kernel-fun {'reverse ' if reverse else ''}scan, K {k}, V {v}"
    return Case(name, compiled, args, {n: x[n] for n in expected}, expected, tokens // CHUNK)


def _forward(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state, out = x["h0"].double(), []
    for c, (q, w, k, u, a) in enumerate(zip(*(_by_chunk(x[n]) for n in ("qg", "w", "kgt", "u", "aqk")), strict=True)):
        new = u - w @ state
        out.append(SCALE * q @ state + a @ new)
        state = torch.exp2(x["gd"][:, :, c].double())[..., None] * state + k.transpose(-1, -2) @ new
    return {"o": _by_token(torch.stack(out)), "ht": state}


def _reverse(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state, dv2, saved = x["dht"].double(), [], []
    chunks = list(zip(*(_by_chunk(x[n]) for n in ("kg", "do", "qg", "w", "dv")), strict=True))
    for c in reversed(range(len(chunks))):
        k, do, q, w, dv = chunks[c]
        saved.insert(0, state)
        dv2.insert(0, k @ state + dv)
        decayed = torch.exp2(x["gd"][:, :, c].double())[..., None] * state
        state = decayed + SCALE * q.transpose(-1, -2) @ do - w.transpose(-1, -2) @ dv2[0]
    return {"dv2": _by_token(torch.stack(dv2)), "dhck": torch.stack(saved, 1), "dh0": state}


# ---- CUTLASS's GEMMs ---------------------------------------------------------------------------------------------------------------
@cache
def _example(path: str) -> ModuleType:
    root = os.environ.get("CUTLASS_EXAMPLES")
    if not root:
        raise Missing("CUTLASS_EXAMPLES is not set (the folder examples/python/CuTeDSL of CUTLASS's sources)")
    file = Path(root) / "cute" / path
    if not file.exists():
        raise Missing(f"CUTLASS_EXAMPLES has no {file}")
    sys.path.insert(0, str(file.parent))
    try:
        return _load(file, "cutlass_example_" + path.replace("/", "_").removesuffix(".py"))
    finally:
        sys.path.remove(str(file.parent))


def gemm(
    arch: str, size: tuple[int, int, int], tile: tuple[int, int], cluster: tuple[int, int] = (1, 1), *, majors: str = "kkn",
    pairs: bool = False, persistent: bool = False,
) -> Case:  # fmt: skip
    """CUTLASS's dense GEMM c = a b^T of bfloat16 matrices.

    majors: the contiguous mode of a, b and c. pairs: two CTAs share an instruction. persistent: CTAs loop over tiles.
    """
    hopper = arch == "sm_90a"
    file = f"{'hopper' if hopper else 'blackwell'}/kernel/dense_gemm/dense_gemm{'_persistent' if persistent else ''}.py"
    module = _example(file)
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    m, n, k = size
    a, b, c = (
        torch.empty(mn, kk, 1) if major in whole else torch.empty(1, kk, mn).permute(2, 1, 0)
        for mn, kk, major, whole in ((m, k, majors[0], "k"), (n, k, majors[1], "k"), (m, n, majors[2], "n"))
    )
    g = torch.Generator().manual_seed(0)
    a, b, c = ((t.normal_(generator=g) * 1).to(torch.bfloat16) for t in (a, b, c))
    fakes = [make_fake_tensor(cutlass.BFloat16, tuple(t.shape), tuple(t.stride()), assumed_align=16) for t in (a, b, c)]
    extra: tuple[Any, ...] = ()
    if hopper:
        kernel = (module.HopperWgmmaGemmPersistentKernel if persistent else module.HopperWgmmaGemmKernel)(
            cutlass.Float32, tile, cluster
        )
    else:
        kernel = (module.PersistentDenseGemmKernel if persistent else module.DenseGemmKernel)(
            cutlass.Float32, pairs, tile, cluster, True
        )
        extra = (4 // (cluster[0] * cluster[1]) or 1,) if persistent else ()
    compiled = cute.compile(kernel, *fakes, *extra, make_fake_stream())
    expected = a[..., 0].double() @ b[..., 0].double().T
    name = f"GEMM {arch} {m}x{n}x{k}, tile {tile}, cluster {cluster}{', pairs' * pairs}{', persistent' * persistent}"
    return Case(name, compiled, (a, b, c, _stream()), {"c": c}, {"c": expected[..., None]})


def scaled_gemm(size: tuple[int, int, int], tile: tuple[int, int], cluster: tuple[int, int] = (1, 1)) -> Case:
    """CUTLASS's block-scaled GEMM for Blackwell, c = (a * sa) (b * sb)^T of e4m3 matrices with a ue8m0 factor for 32 elements along k."""
    module = _example("blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py")
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    m, n, k = size
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=g).to(torch.float8_e4m3fn) for rows in (m, n))
    factors = [torch.randint(124, 131, (rows, k // 32), generator=g).to(torch.uint8) for rows in (m, n)]
    packed = []
    for f in factors:  # blocks of 128 rows by 4 factors; row r of a block lies at 16 (r % 32) + 4 (r / 32)
        rows = -(-len(f) // 128) * 128
        padded = torch.zeros(rows, k // 32, dtype=torch.uint8)
        padded[: len(f)] = f
        packed.append(padded.reshape(rows // 128, 4, 32, k // 128, 4).permute(0, 3, 2, 1, 4).contiguous())
    c = torch.empty(m, n)
    data = [a, b, *packed, c]
    types = [cutlass.Float8E4M3FN] * 2 + [cutlass.Float8E8M0FNU] * 2 + [cutlass.Float32]
    pointers = [
        make_ptr(type_, t.data_ptr(), cute.AddressSpace.gmem, assumed_align=32)
        for type_, t in zip(types, data, strict=True)
    ]
    kernel = module.Sm100BlockScaledPersistentDenseGemmKernel(32, tile, cluster)
    majors = (OperandMajorMode.K, OperandMajorMode.K, cutlass.tensor_utils.LayoutEnum.ROW_MAJOR)
    active = 4 // (cluster[0] * cluster[1]) or 1
    compiled = cute.compile(kernel, *pointers, majors, (m, n, k, 1), active, make_fake_stream())
    scaled = [
        t.double() * torch.exp2(f.double() - 127).repeat_interleave(32, 1) for t, f in zip((a, b), factors, strict=True)
    ]
    name = f"block-scaled GEMM {m}x{n}x{k}, tile {tile}, cluster {cluster}"
    args = (*pointers, (m, n, k, 1), _stream())
    return Case(name, compiled, args, {"c": c}, {"c": scaled[0] @ scaled[1].T}, tensors=data)
