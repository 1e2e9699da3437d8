"""`python -m deltafuse.aot`: a folder of ready kernels for chosen architectures, built on any machine that has the CuTe DSL.

    python -m deltafuse.aot --arch sm_90a --out kernels        # the common set
    python -m deltafuse.aot --arch sm_90a --out kernels --like ~/.cache/deltafuse
    DELTAFUSE_AOT_DIR=kernels python serve.py                  # finds them there

The common set are the kernels of `chunk_kda` as models call it: for every dtype and head size that is asked for, every kind of
gate; training (no states), prefill (final state) and serving (both states, either layout); one row of tokens and packed
sequences; many heads and few. `--like` takes every kernel that another folder has, `--config` names kernels one by one; of
these an architecture gets those that are made for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from .backends import problem_of
from .cli.parse import parse_dtype, parse_sizes
from .cli.specs import DeltaSpec
from .kernels import config as configs
from .runtime import cache
from .runtime.probe import Environment, packages
from .support import Problem, choose
from .warm import KernelsOf, kernels_of

Kernel = tuple[str, Any]

CONFIGS: dict[str, type[Any]] = {
    "warp.kda_prepare": configs.PrepareConfig,
    "warp.kda_combine": configs.CombineConfig,
    "warp.kda_intra": configs.IntraConfig,
    "warp.kda_apply": configs.ApplyConfig,
    "warp.delta_decode": configs.DecodeConfig,
    "warp.layer_decode": configs.LayerDecodeConfig,
    "warp.conv_forward": configs.ConvConfig,
    "warp.conv_backward": configs.ConvBackwardConfig,
    "warp.conv_update": configs.ConvUpdateConfig,
    "sm90.kda_segments": configs.SegmentsConfig,
    "sm90.kda_scan": configs.ScanConfig,
    "sm90.kda_reverse": configs.ReverseConfig,
    "sm90.kda_inter": configs.InterConfig,
    "sm100.kda_scan": configs.BlackwellScanConfig,
}
"""What each kernel is compiled for, as `--config` and `--like` name it."""

_ARCH = re.compile(r"sm_(\d+)(\d)[af]?")
_SMS = {90: 132, 100: 148, 103: 148}
"""Multiprocessors of an architecture's usual card, by which calls are scheduled."""
_HEADS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
"""Heads, times sequences, of the common set: what decides how a scan is spread over the GPU."""


def machine(arch: str) -> Environment:
    """A machine of an architecture, with the packages of this one. Raises ValueError for a name that is none."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"got {arch!r}; allowed: names such as sm_90a, sm_100a")
    major, minor = int(match[1]), int(match[2])
    return Environment("cuda", (major, minor), arch, **packages(), sms=_SMS.get(10 * major + minor, 132))


def common_calls(dtypes: Iterable[torch.dtype], sizes: Iterable[tuple[int, int]]) -> Iterator[Problem]:
    """The calls of the common set; `sizes` are those of keys and values."""
    gates: tuple[dict[str, Any], ...] = (
        dict(gate="log"),
        dict(gate="softplus", beta_sigmoid=True),
        dict(gate="bounded", beta_sigmoid=True),
    )
    states: tuple[dict[str, Any], ...] = (
        dict(),
        dict(final_state=True),
        dict(final_state=True, v_first=True),
        dict(initial_state=True, final_state=True),
        dict(initial_state=True, final_state=True, v_first=True),
    )
    tokens = 8192
    lengths: tuple[tuple[int, ...] | None, ...] = (None, (tokens // 8,) * 8)
    options: Any = itertools.product(dtypes, sizes, gates, states, lengths)
    for dtype, (key_dim, value_dim), gate, state, packed in options:
        spec = DeltaSpec("chunk_kda", 1, tokens, 1, key_dim, value_dim, lengths=packed, l2norm=True, **gate, **state)
        for bounds in (torch.int64, torch.int32)[: 2 if packed else 1]:
            arguments = spec.arguments(dtype, "meta")
            if packed:
                arguments["cu_seqlens"] = arguments["cu_seqlens"].to(bounds)
            with torch.inference_mode():
                problem: Any = problem_of("chunk_kda", **arguments)[0]
            for heads in _HEADS:
                for training in (False, True):
                    yield dataclasses.replace(problem, heads=heads, value_heads=heads, requires_grad=training)


def common(
    arch: str, dtypes: Iterable[torch.dtype], sizes: Iterable[tuple[int, int]], wanted: KernelsOf = kernels_of
) -> list[Kernel]:
    """The kernels of the common set for an architecture; none where calls there run on another backend."""
    env = machine(arch)
    problems = (p for p in common_calls(dtypes, sizes) if choose(p, env).backend == "cute")
    return list(dict.fromkeys(kernel for problem in problems for kernel in wanted(problem, env)))


def named(text: str) -> Kernel:
    """`kernel:field=value,...` as a kernel and its config; fields that are not named have their defaults."""
    kernel, _, rest = text.partition(":")
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        name, _, value = item.partition("=")
        values[name.strip()] = value.strip()
    return kernel, _config(kernel, values)


def _config(kernel: str, values: dict[str, Any]) -> Any:
    """A kernel's config of values as they are or as text."""
    if kernel not in CONFIGS:
        raise ValueError(f"got {kernel!r}; allowed: {', '.join(CONFIGS)}")
    defaults = {field.name: field.default for field in dataclasses.fields(CONFIGS[kernel])}
    found = {}
    for name, value in values.items():
        if name not in defaults:
            raise ValueError(f"got {name!r} for {kernel}; allowed: {', '.join(defaults)}")
        found[name] = _value(kernel, name, value, defaults[name])
    return CONFIGS[kernel](**found)


def _value(kernel: str, name: str, value: Any, default: Any) -> Any:
    """A value of the type of the field's default."""
    if type(value) is type(default):
        return value
    if isinstance(default, bool) and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if isinstance(default, int) and not isinstance(default, bool) and str(value).isdigit():
        return int(value)
    raise ValueError(f"got {value!r} for {name} of {kernel}; allowed: values like {default!r}")


def like(folder: Path) -> list[Kernel]:
    """The kernels of another folder, whatever they were compiled for there; those of kernels that this version lacks are left out."""
    found = []
    for about, _ in cache.listed(folder):
        values = {name: value for name, value in about["config"].items() if name != "type"}
        try:
            found.append((about["kernel"], _config(about["kernel"], values)))
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
    return list(dict.fromkeys(found))


def build(jobs: Sequence[tuple[str, Any, str]], out: Path, workers: int) -> list[str]:
    """Compile kernels into a folder, in several processes; a line for each. Returns what went wrong."""
    wrong = []
    start = time.perf_counter()
    context = get_context("spawn")  # the DSL is loaded in the workers alone
    with ProcessPoolExecutor(min(workers, max(1, len(jobs))), mp_context=context) as pool:
        futures = {pool.submit(cache.write_object, kernel, config, arch, out): kernel for kernel, config, arch in jobs}
        for done, future in enumerate(as_completed(futures), 1):
            error = future.exception()
            if error is not None:
                wrong.append(f"{futures[future]}: {error}")
            what = future.result().name if error is None else f"failed: {wrong[-1]}"
            print(f"[{done}/{len(jobs)}] {what}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(jobs) - len(wrong)} objects in {out}, {seconds:.0f} s" + (f"; {len(wrong)} failed" if wrong else ""))
    return wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deltafuse.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", action="append", required=True, help="sm_90a, sm_100a, ...; may be given several times"
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to build")
    parser.add_argument("--dtype", action="append", help="of the common set: bf16 (the default), fp16; several times")
    parser.add_argument("--sizes", action="append", metavar="K,V", help="of the common set: 128,128 is the default")
    parser.add_argument("--like", action="append", type=Path, metavar="DIR", help="the kernels of this folder instead")
    parser.add_argument("--config", action="append", metavar="KERNEL:FIELD=VALUE,...", help="this kernel instead")
    parser.add_argument("--only", metavar="KERNEL", help="of all these the kernels of this name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes [this machine: %(default)s]")
    parser.add_argument("--list", action="store_true", help="print what would be built")
    return parser


def _wanted(options: argparse.Namespace) -> list[tuple[str, Any, str]]:
    """The kernels that the options name, each with its architecture."""
    chosen = [*map(named, options.config or ()), *(k for folder in options.like or () for k in like(folder))]
    dtypes = [parse_dtype(text) for text in options.dtype or ["bf16"]]
    sizes: list[Any] = [tuple(parse_sizes(text, "K,V")) for text in options.sizes or ["128,128"]]
    given = options.config or options.like
    jobs = []
    for arch in options.arch:
        kernels = [k for k in chosen if fits(k[0], arch)] if given else common(arch, dtypes, sizes)
        jobs += [(kernel, config, arch) for kernel, config in kernels if options.only in (None, kernel)]
    return list(dict.fromkeys(jobs))


def fits(kernel: str, arch: str) -> bool:
    """Whether a kernel is made for an architecture: those of `smNN` for one alone, those of `warp` for all."""
    made_for = _ARCH.fullmatch(kernel.partition(".")[0].replace("sm", "sm_"))
    env = machine(arch)
    return made_for is None or env.capability == (int(made_for[1]), int(made_for[2]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        jobs = _wanted(options)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for kernel, config, arch in jobs:
            print(arch, kernel, config)
        return 0
    if not jobs:
        print(f"no kernels for {', '.join(options.arch)}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    return 1 if build(jobs, options.out, max(1, options.jobs)) else 0


if __name__ == "__main__":
    sys.exit(main())
