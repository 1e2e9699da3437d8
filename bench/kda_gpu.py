"""`chunk_kda` on a GPU against flash-linear-attention, in one process on the same inputs: medians, ratios, shares of the byte floor.

    python bench/kda_gpu.py forward                          # inference: every flag in the kernel, states in and out
    python bench/kda_gpu.py training                         # forward + backward
    python bench/kda_gpu.py forward --only packed --reps 50
    python bench/kda_gpu.py forward --compile-fla            # only fill Triton's cache, every case in a process of its own
    python bench/kda_gpu.py forward --tune-ms 25             # fla's settings are tried 25 ms each instead of Triton's 125

Gates come in two kinds. "forgetting": bounded below by -5, A_log and dt_bias 0, random raw gates, about -2.5 a token.
"remembering": softplus with the initialisation of fla's layer, as trained models have in many channels. Shapes of fla's own benchmark
list come with its gates, log sigmoids that are handed over, without states. Each row says how many times as
long fla takes, and what share of its time the call's bytes alone take at the bandwidth of a large copy on the same card.
Peaks of memory (arguments, results and a 0.25 GiB buffer that empties the cache included) stand in the order of the backends.
Rows are appended to bench/results/kda_gpu.csv.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from deltafuse.cli.bench import BACKWARD, FORWARD, Job, about_run, append_csv, measure, spec_of
from deltafuse.cli.bench import Row as Result
from deltafuse.cli.specs import DeltaSpec
from deltafuse.cli.timing import times

RESULTS = Path(__file__).parent / "results" / "kda_gpu.csv"
CUDA = torch.device("cuda")
DOCUMENTS = "1300,547,2048,963,271,3063"
KINDS = {"forgetting": "bounded", "remembering": "softplus", "given": "log"}


@dataclass(frozen=True)
class Row:
    """A call, and how many times as long as this package fla is to take at least."""

    name: str
    shape: str
    gates: str
    wanted: float
    training: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} {self.gates}"


def _documents(count: int = 64, total: int = 32_768) -> str:
    """Shuffled lengths of 64 to 4,000 tokens with this sum, a few long among many short."""
    random = torch.Generator().manual_seed(0)
    lengths = [64 + int(3900 * (i / (count - 1)) ** 8.5) for i in torch.randperm(count, generator=random).tolist()]
    lengths[lengths.index(min(lengths))] += total - sum(lengths)
    assert sum(lengths) == total
    assert min(lengths) >= 64
    assert max(lengths) <= 4000
    return ",".join(map(str, lengths))


# Those whose K this package has: of 256 fla's own kernels are used.
OF_FLA = tuple(
    Row(f"fla's {shape}", f"{shape},{k},{k}", "given", 1.0)
    for shape, k in (("1,8192,96", 128), ("2,16384,16", 128), ("4,2048,16", 128), ("4,4096,64", 128), ("8,1024,8", 64))
)
FORWARD_ROWS = (
    Row("1x8192x64", "1,8192,64,128,128", "forgetting", 3.7),
    Row("1x8192x64", "1,8192,64,128,128", "remembering", 3.2),
    Row("1x8192x96", "1,8192,96,128,128", "forgetting", 3.3),
    Row("packed 6", f"1,8192,64,128,128:{DOCUMENTS}", "forgetting", 3.2),
    Row("packed 6", f"1,8192,64,128,128:{DOCUMENTS}", "remembering", 3.2),
    Row("packed 8 x 1024", "1,8192,64,128,128:" + ",".join(["1024"] * 8), "forgetting", 3.5),
    Row("packed 8 x 1024", "1,8192,64,128,128:" + ",".join(["1024"] * 8), "remembering", 3.5),
    Row("2x8192x32", "2,8192,32,128,128", "forgetting", 3.2),
    Row("2x8192x32", "2,8192,32,128,128", "remembering", 3.2),
    Row("1x32768x8", "1,32768,8,128,128", "forgetting", 6.0),
    Row("1x32768x8", "1,32768,8,128,128", "remembering", 3.0),
    Row("1x131072x4", "1,131072,4,128,128", "remembering", 3.0),
    Row("16x8192x16 V 256", "16,8192,16,128,256", "remembering", 3.0, training=True),
    Row("8x2048x32 over 8", "8,2048,8,128,128,32", "remembering", 3.0),
    *OF_FLA,
)
TRAINING_ROWS = (
    Row("2x8192x32", "2,8192,32,128,128", "remembering", 3.0, training=True),
    Row("2x8192x32", "2,8192,32,128,128", "forgetting", 3.0, training=True),
    Row("16x8192x16 V 256", "16,8192,16,128,256", "remembering", 3.0, training=True),
    Row("1x8192x64", "1,8192,64,128,128", "remembering", 3.0, training=True),
    Row("1x32768x8", "1,32768,8,128,128", "remembering", 3.0, training=True),
    Row("packed 64", f"1,32768,16,128,128:{_documents()}", "remembering", 3.0, training=True),
    Row("8x2048x32 over 8", "8,2048,8,128,128,32", "remembering", 2.5, training=True),
    *(replace(row, training=True) for row in OF_FLA),
)


def job(row: Row, phase: str, backend: str) -> Job:
    spec = spec_of("chunk_kda", row.shape, BACKWARD if row.training else FORWARD, KINDS[row.gates])
    assert isinstance(spec, DeltaSpec)
    if row.gates == "forgetting":
        spec = replace(spec, decay="forgetting", safe_gate=True)
    if row.gates == "given":
        spec = replace(
            spec, decay="ordinary", safe_gate=True, beta_sigmoid=False, initial_state=False, final_state=False, v_first=False
        )  # fmt: skip
    return Job(spec, phase, torch.bfloat16, CUDA, backend)


def copy_bandwidth() -> float:
    """GB/s read and written by a large copy."""
    source = torch.empty(2**31, dtype=torch.int8, device=CUDA)
    target = torch.empty_like(source)
    ms = statistics.median(times(lambda: target.copy_(source), CUDA, 20, 3))
    return 2 * source.numel() / ms / 1e6


def compile_fla(phase: str, only: str, rows: int) -> None:
    """Every launch setting that fla tries, compiled by processes side by side; none is timed."""
    command = [sys.executable, __file__, phase, "--only", only, "--compile-one"]
    running = [subprocess.Popen([*command, str(i)]) for i in range(rows)]
    for process in running:
        process.wait()


def tune_in(ms: int) -> None:
    """Triton's autotuner times every setting for this long (a fifth of it to warm up) instead of its 25 + 100 ms."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    bench = functools.partial(do_bench, warmup=ms // 5, rep=ms - ms // 5)
    Autotuner.do_bench = property(lambda _: bench)


def _compile_one(phase: str, row: Row) -> None:
    os.environ["FLA_CACHE_RESULTS"] = os.environ["TRITON_CACHE_AUTOTUNING"] = (
        "0"  # nothing is timed, so nothing is known
    )
    from triton.runtime.autotuner import Autotuner

    def bench(self, *args, config, **meta):  # type: ignore[no-untyped-def]
        self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
        return [1.0, 1.0, 1.0]

    Autotuner._bench = bench
    print(row.title, measure(job(row, phase, "fla"), 1).note or "compiled", flush=True)


def _ratio(found: dict[str, Result]) -> float | None:
    """How many times as long as this package fla takes, once both are timed."""
    own, peer = found.get("cute"), found.get("fla")
    return peer.ms / own.ms if own and peer and own.ms and peer.ms else None


def _line(row: Row, found: dict[str, Result], bandwidth: float) -> str:
    parts = [f"{backend} {r.ms:.3f} ms" if r.ms else f"{backend}: {r.note}" for backend, r in found.items()]
    ratio, own = _ratio(found), found.get("cute")
    if ratio is not None:
        parts.append(f"{ratio:.2f} x fla, wanted {row.wanted}: {'yes' if ratio >= row.wanted else 'NO'}")
    if own is not None and own.gb_per_second is not None:
        parts.append(f"{own.gb_per_second / bandwidth:.0%} of the byte floor")
    return "  ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["forward", "training"])
    parser.add_argument("--only", default="", help="rows whose title has this")
    parser.add_argument("--reps", type=int, default=30)
    parser.add_argument("--backends", default="cute,fla")
    parser.add_argument("--compile-fla", action="store_true")
    parser.add_argument("--compile-one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tune-ms", type=int, default=0, help="milliseconds for each setting that fla tries")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [r for r in (FORWARD_ROWS if options.phase == "forward" else TRAINING_ROWS) if options.only in r.title]
    phase = FORWARD if options.phase == "forward" else BACKWARD
    if options.compile_one is not None:
        _compile_one(phase, rows[options.compile_one])
        return 0
    if options.compile_fla:
        compile_fla(options.phase, options.only, len(rows))
        return 0
    if options.tune_ms:
        tune_in(options.tune_ms)
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth:.0f} GB/s")
    about = about_run(CUDA)
    missed = 0
    for row in rows:
        found, peaks = {}, {}
        for backend in options.backends.split(","):
            torch.cuda.reset_peak_memory_stats()
            result = found[backend] = measure(job(row, phase, backend), options.reps)
            peaks[backend] = torch.cuda.max_memory_allocated() / 2**30
            line = about | {"peer": "fla", **asdict(result), "gates": row.gates, "peak_gib": round(peaks[backend], 3)}
            share = None if result.gb_per_second is None else result.gb_per_second / bandwidth
            append_csv(options.csv, [line | {"floor_share": share, "ratio": _ratio(found), "wanted": row.wanted}])
        ratio = _ratio(found)
        missed += ratio is not None and ratio < row.wanted
        memory = ", ".join(f"{x:.2f}" for x in peaks.values())
        print(f"{row.title:32} {_line(row, found, bandwidth)}  peak GiB {memory}", flush=True)
        torch.cuda.empty_cache()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
