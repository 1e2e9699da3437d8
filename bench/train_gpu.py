"""The demo's model at 100 M parameters on a GPU: the same 200 steps with this package's kernels and with fla's.

    python bench/train_gpu.py                       # both: loss curves and tokens a second into the CSV
    python bench/train_gpu.py --backends cute --steps 50
    python bench/train_gpu.py --plot                # docs/images/training.png from each backend's last run in the CSV

Text: the documentation of the Python that runs this (`deltafuse.demo.load_corpus`), bytes as tokens. Parameters in float32, layers under
bfloat16 autocast; the same seed gives both backends the same weights and batches. Tokens a second are those of the median step. Appends to
bench/results/train_gpu.csv.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import deltafuse
from deltafuse.cli.bench import about_run, append_csv
from deltafuse.demo import Corpus, Settings, held_out_windows, load_corpus, model_bits, optimizer_of
from deltafuse.nn.lm import KimiDeltaLM

RESULTS = Path(__file__).parent / "results" / "train_gpu.csv"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "training.png"
CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Outcome:
    """A training run: losses in bits a byte by step, bits a byte of the held-out text at the end, and its costs."""

    losses: list[float]
    valid: float
    tokens_per_second: float
    peak_gib: float


def train(backend: str, corpus: Corpus, settings: Settings, steps: int) -> Outcome:
    """`steps` steps with every op on `backend`."""
    torch.manual_seed(settings.seed)
    model = KimiDeltaLM(256, settings.hidden_size, settings.num_layers, settings.num_heads, settings.head_dim).to(CUDA)
    optimizer = optimizer_of(model, settings)
    random = torch.Generator().manual_seed(settings.seed)
    offsets = torch.arange(settings.length + 1)
    losses, seconds = [], []
    with deltafuse.use_backend(backend):
        for step in range(steps):
            if step == 3:  # kernels are compiled, or tuned, by now
                torch.cuda.reset_peak_memory_stats()
            done = step / steps
            warm = min(1.0, (step + 1) / 30)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
            starts = torch.randint(len(corpus.train) - settings.length, (settings.batch, 1), generator=random)
            chunk = corpus.train[starts + offsets].to(CUDA)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(chunk[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), chunk[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
            losses.append(float(loss.detach()) / math.log(2))
        windows = held_out_windows(corpus.valid, settings.windows, settings.window).to(CUDA)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            valid = model_bits(model, windows)
    rate = settings.batch * settings.length / statistics.median(seconds[3:] or seconds)
    return Outcome(losses, valid, rate, torch.cuda.max_memory_allocated() / 2**30)


def rows_of(backend: str, outcome: Outcome, parameters: int, settings: Settings) -> list[dict[str, Any]]:
    """One row of the CSV a step."""
    about = about_run(CUDA) | {
        "backend": backend, "parameters": parameters, "batch": settings.batch, "length": settings.length,
        "tokens_per_second": round(outcome.tokens_per_second), "peak_gib": round(outcome.peak_gib, 2),
        "valid_bits": round(outcome.valid, 4),
    }  # fmt: skip
    return [about | {"step": i + 1, "bits": round(bits, 4)} for i, bits in enumerate(outcome.losses)]


def plot(source: Path, target: Path) -> None:
    """Loss curves of each backend's last run in the CSV."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = {"cute": "tab:blue", "fla": "tab:orange"}
    names = {"cute": "deltafuse", "fla": "fla 0.6.0"}
    for backend in sorted({r["backend"] for r in rows}, reverse=True):
        mine = [r for r in rows if r["backend"] == backend]
        first = max(i for i, r in enumerate(mine) if r["step"] == "1")
        mine = mine[first:]
        label = f"{names.get(backend, backend)}: {int(mine[-1]['tokens_per_second']) / 1e3:.0f} k tokens/s"
        steps, bits = [int(r["step"]) for r in mine], [float(r["bits"]) for r in mine]
        axes.plot(steps, bits, color=colors.get(backend), linewidth=1, alpha=0.8, label=label)
    axes.set(xlabel="step", ylabel="bits per byte", title="Kimi Delta Attention, 100 M parameters, one H200")
    axes.grid(alpha=0.3)
    axes.legend()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="cute,fla")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--plot", action="store_true", help="draw what the CSV has, train nothing")
    options = parser.parse_args()
    if options.plot:
        plot(options.csv, PLOT)
        return 0
    settings = Settings(
        hidden_size=1024, num_layers=8, num_heads=8, head_dim=128, batch=16, length=2048, learning_rate=6e-4, weight_decay=0.1
    )  # fmt: skip
    corpus = load_corpus()
    with torch.device("meta"):
        model = KimiDeltaLM(256, settings.hidden_size, settings.num_layers, settings.num_heads, settings.head_dim)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(corpus.train) / 1e6:.1f} MB of text")
    for backend in options.backends.split(","):
        outcome = train(backend, corpus, settings, options.steps)
        append_csv(options.csv, rows_of(backend, outcome, parameters, settings))
        marks = ", ".join(f"{outcome.losses[i]:.3f}" for i in range(0, options.steps, max(1, options.steps // 10)))
        print(
            f"{backend}: {outcome.tokens_per_second / 1e3:.1f} k tokens/s, peak {outcome.peak_gib:.2f} GiB, "
            f"bits a byte {marks}, last {outcome.losses[-1]:.3f}; held out {outcome.valid:.3f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
