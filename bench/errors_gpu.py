"""Errors of `chunk_kda` against its definition in float64 on a GPU, beside those of fla on the same inputs.

    python bench/errors_gpu.py

Each line: a result or gradient, this package's error (RMS of the difference over RMS), fla's, and their ratio, wanted at most
1.2; exits with 1 where one is above. Gradients of fewer than 64 numbers (A_log has one a head) are shown but not judged: the
ratio of two such errors is a matter of chance, with 4 numbers above 2 in one of ten cases of equals. Cases of 64 heads judge
them. Appends to bench/results/errors_gpu.csv. fla's kernels run with the first of their settings
instead of the fastest: which one is taken changes times, not results.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from deltafuse.cli.bench import about_run, append_csv
from deltafuse.cli.cases import Case
from deltafuse.cli.specs import DeltaSpec
from deltafuse.cli.verify import compare

RESULTS = Path(__file__).parent / "results" / "errors_gpu.csv"
CUDA = torch.device("cuda")
ALLOWED = 1.2
JUDGED = 64
"""Fewer numbers than these are not judged."""

RAW: dict[str, Any] = {"l2norm": True, "beta_sigmoid": True, "initial_state": True, "final_state": True}
REMEMBERING: dict[str, Any] = RAW | {"gate": "softplus", "decay": "remembering"}
FORGETTING: dict[str, Any] = RAW | {"gate": "bounded", "safe_gate": True}
WIDE: dict[str, Any] = {"key_dim": 128, "value_dim": 128}
UNEVEN = (300, 64, 1, 535, 100)


def cases() -> list[Case]:
    """Calls that both take, long enough that chunks' errors add up."""
    found = {
        "remembering": WIDE | REMEMBERING | {"tokens": 1000, "heads": 4},
        "forgetting": WIDE | FORGETTING | {"tokens": 1000, "heads": 4},
        "strong softplus": WIDE | RAW | {"gate": "softplus", "decay": "strong", "tokens": 1000, "heads": 4},
        "V 256": WIDE | REMEMBERING | {"tokens": 700, "heads": 2, "value_dim": 256},
        "GVA": WIDE | REMEMBERING | {"tokens": 700, "heads": 1, "value_heads": 4},
        "packed": WIDE | REMEMBERING | {"tokens": sum(UNEVEN), "heads": 2, "lengths": UNEVEN},
        "K 64": REMEMBERING | {"tokens": 1000, "heads": 4, "key_dim": 64, "value_dim": 64},
        "few heads, long": WIDE | REMEMBERING | {"tokens": 4096, "heads": 1},
        "many heads": WIDE | REMEMBERING | {"tokens": 130, "heads": 64},
        "many, forgetting": WIDE | FORGETTING | {"tokens": 130, "heads": 64},
    }
    return [Case(name, DeltaSpec("chunk_kda", **fields)) for name, fields in found.items()]


def first_setting_only() -> None:
    """Triton's tuner takes every kernel's first setting; has to come before fla is imported."""
    from triton.runtime.autotuner import Autotuner

    start = Autotuner.__init__

    def init(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        start(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = init


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    options = parser.parse_args()
    first_setting_only()
    about = about_run(CUDA)
    above = 0
    for case in cases():
        if options.only not in case.name:
            continue
        for dtype in (getattr(torch, name) for name in options.dtypes.split(",")):
            own, peer = (compare(case, case.spec.arguments(dtype, CUDA), dtype, backend) for backend in ("cute", "fla"))
            rows = []
            for mine, theirs in zip(own, peer, strict=True):
                ratio = mine.value / max(theirs.value, 1e-12)
                few = mine.count < JUDGED
                bad = not ratio <= ALLOWED and not few
                above += bad
                print(
                    f"{case.name:16} {str(dtype)[6:]:9} {mine.tensor:15} {mine.value:.2e}  fla {theirs.value:.2e}  "
                    f"ratio {ratio:.2f}{'  ABOVE' if bad else ''}{'  few' if few else ''}{'' if mine.passed else '  NOT ALLOWED'}",
                    flush=True,
                )
                fields = {"case": case.name, "dtype": str(dtype)[6:], "tensor": mine.tensor}
                rows.append(about | fields | {"error": mine.value, "fla_error": theirs.value, "ratio": round(ratio, 3)})
            append_csv(options.csv, rows)
    print(f"{above} above {ALLOWED} times fla's")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
