"""How fast the emulator runs the scan kernels: `python tests/emulated/speed.py`. One worker, all checks on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]

import kernels  # noqa: E402

import ptxemu  # noqa: E402

TOKENS, REPEATS = 512, 5


def measure(case: kernels.Case) -> tuple[float, float, int]:
    """Milliseconds of a CTA and chunk: the best run's and the middle one's; warp instructions of a CTA and chunk."""
    runs = [case.run(workers=1) for _ in range(REPEATS)]
    ctas = runs[0].grid[0] * runs[0].grid[1] * runs[0].grid[2]
    times = sorted(1e3 * r.seconds / (ctas * case.chunks) for r in runs)
    return times[0], times[len(times) // 2], runs[0].instructions // (ctas * case.chunks)


def main() -> None:
    print(f"{'kernel':40} {'threads':>8} {'best ms':>8} {'median ms':>10} {'instructions':>13}   (a CTA and chunk)")
    for arch, get, arguments in [
        ("sm_90a", kernels.hopper_scan, ("one", TOKENS)),
        ("sm_90a", kernels.hopper_scan, ("two", TOKENS)),
        ("sm_90a", kernels.hopper_scan, ("cluster", TOKENS)),
        ("sm_100a", kernels.kernel_fun_scan, (False, TOKENS, 1, 128, 64)),
        ("sm_100a", kernels.kernel_fun_scan, (True, TOKENS, 1, 128, 64)),
    ]:
        ptxemu.setup(arch)
        try:
            case = get(*arguments)
        except kernels.Missing as reason:
            print(f"{arch} {arguments}: {reason}")
            continue
        best, median, instructions = measure(case)
        threads = case.run().block[0]
        print(f"{case.name:40} {threads:8} {best:8.2f} {median:10.2f} {instructions:13}")


if __name__ == "__main__":
    main()
