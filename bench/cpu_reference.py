"""The plain-torch path on this CPU: how much faster the chunked form is than token by token, and how its memory grows.

    python bench/cpu_reference.py                    # prints, and appends to bench/results/cpu_reference.csv
    python bench/cpu_reference.py --threads 1 --reps 5

Two figures of `chunk_kda`, float32, B 1, H 4, K = V = 64, training with L2 norm, softplus gate and sigmoid:

- milliseconds of forward and backward at T 2048, and how many times as long the token-by-token form under autograd
  takes;
- bytes a token that the backward pass needs at its peak (everything beyond the inputs: what the forward pass kept,
  gradients, work space) at T 4096 and T 16384, each measured in a process of its own, and the ratio of the two.

Exits with 1 if a figure is not as wanted.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import torch

from deltafuse import chunk_kda
from deltafuse.cli.bench import BACKWARD, RECURRENT, Job, about_run, append_csv, measure, spec_of

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent / "results" / "cpu_reference.csv"
SHAPE = "1,{tokens},4,64,64"
SPEED_TOKENS, SPEED_UP = 2048, 20.0
MEMORY_TOKENS, MEMORY_RATIO = (4096, 16384), 1.5


def milliseconds(backend: str, tokens: int, reps: int) -> float:
    """Median of forward and backward."""
    spec = spec_of("chunk_kda", SHAPE.format(tokens=tokens), BACKWARD)
    row = measure(Job(spec, BACKWARD, torch.float32, CPU, backend), reps)
    assert row.ms is not None, row.note
    return row.ms


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_since(reset: bool = False) -> int:
    """The most bytes that this process has held since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def backward_bytes(tokens: int) -> int:
    """What one backward pass needs at its peak beyond the inputs; for a process that has done nothing else."""

    def step(length: int) -> int:
        arguments = spec_of("chunk_kda", SHAPE.format(tokens=length), BACKWARD).arguments(torch.float32)
        leaves = [x.requires_grad_() for x in arguments.values() if isinstance(x, torch.Tensor)]
        before = resident()
        o = chunk_kda(**arguments)[0]
        weight = torch.ones_like(o)
        peak_since(reset=True)
        torch.autograd.grad(o, leaves, weight)
        return peak_since() - before

    step(64)  # whatever is loaded or allocated once
    return step(tokens)


def backward_bytes_elsewhere(tokens: int, threads: int) -> int:
    """`backward_bytes` in a fresh process."""
    command = [sys.executable, __file__, "--threads", str(threads), "--memory-at", str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (default %(default)s)")
    parser.add_argument("--reps", type=int, default=3, help="timed calls of each form (default %(default)s)")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="file to append to (default %(default)s)")
    parser.add_argument("--memory-at", type=int, metavar="T", help="print the backward's bytes at T and leave")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_at is not None:
        print(backward_bytes(options.memory_at))
        return 0

    chunked = milliseconds("torch", SPEED_TOKENS, options.reps)
    recurrent = milliseconds(RECURRENT, SPEED_TOKENS, options.reps)
    short, long = (backward_bytes_elsewhere(tokens, options.threads) / tokens for tokens in MEMORY_TOKENS)
    sizes = SHAPE.format(tokens=SPEED_TOKENS)
    # name, shape, value, unit, what is wanted, whether it is so
    figures = [
        ("chunked, forward+backward", sizes, chunked, "ms", "", True),
        ("token by token, forward+backward", sizes, recurrent, "ms", "", True),
        ("speed-up", sizes, recurrent / chunked, "times", f">= {SPEED_UP:g}", recurrent / chunked >= SPEED_UP),
        *(
            ("peak of the backward", SHAPE.format(tokens=tokens), value, "bytes a token", "", True)
            for tokens, value in zip(MEMORY_TOKENS, (short, long), strict=True)
        ),
        (
            "peak a token, long to short",
            "",
            long / short,
            "times",
            f"<= {MEMORY_RATIO:g}",
            long / short <= MEMORY_RATIO,
        ),
    ]
    names = ("figure", "shape", "value", "unit", "wanted", "met")
    append_csv(options.csv, [about_run(CPU) | dict(zip(names, figure, strict=True)) for figure in figures])
    for name, shape, value, unit, wanted, met in figures:
        verdict = f"   wanted {wanted}: {'yes' if met else 'NO'}" if wanted else ""
        print(f"{name:<34}{shape:<18}{value:>10.1f} {unit}{verdict}")
    print(f"rows: {options.csv}")
    return 0 if all(figure[-1] for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
