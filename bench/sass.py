"""Registers, spills and instructions of the Blackwell kernels, as ptxas and nvdisasm report them. Needs no GPU.

    python bench/sass.py --ptxas PATH [--nvdisasm PATH] [--arch sm_100a]

The tools are those of pip's nvidia-cuda-nvcc and nvidia-cuda-nvdisasm, of CUDA 13.1 or later (the DSL writes PTX 9.x).
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import ptxemu

STATES: dict[str, Any] = dict(initial=True, final=True)


def kernels() -> list[tuple[str, Any]]:
    from deltafuse.kernels.config import ApplyConfig
    from deltafuse.kernels.config import BlackwellScanConfig as Scan

    scans = [
        Scan(key_dim=k, tile=tile, cluster=cluster, operands=form, cu_seqlens=bounds, gates=gates, **STATES)
        for k in (64, 128)
        for tile in (64, 128)
        for cluster, form, bounds, gates in (
            (1, "slots", "", "last"), (2, "slots", "int64", "last"), (1, "tokens", "", "last"), (2, "tokens", "int64", "all"),
        )
    ]  # fmt: skip
    return [("sm100.kda_scan", x) for x in scans] + [("warp.kda_apply", ApplyConfig(key_dim=k)) for k in (64, 128)]


def report(ptx: str, arch: str, ptxas: str, nvdisasm: str | None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        done = subprocess.run(
            [ptxas, "-v", f"-arch={arch}", str(source), "-o", str(cubin)], capture_output=True, text=True, check=True
        )
        used = re.findall(r"Used (\d+) registers|(\d+) bytes spill (stores|loads)|(warning.*)", done.stderr)
        registers = next(x[0] for x in used if x[0])
        spilled = sum(int(x[1]) for x in used if x[1])
        line = f"{registers} registers a thread at launch, {spilled} bytes spilled"
        line += "".join(f"; {x[3]}" for x in used if x[3])
        if nvdisasm:
            sass = subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
            highest = max(map(int, re.findall(r"\bR(\d+)\b", sass)))
            line += f", highest R{highest}"
            names = ("UTCHMMA", "UTMALDG", "UBLKCP", "LDTM", "STTM", "HMMA", "STL", "LDL")
            counts = ((n, len(re.findall(rf"\b{n}\b", sass))) for n in names)
            line += ", " + ", ".join(f"{n} {count}" for n, count in counts if count)
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptxas", required=True)
    parser.add_argument("--nvdisasm")
    parser.add_argument("--arch", default="sm_100a")
    args = parser.parse_args()
    ptxemu.setup(args.arch)
    for name, config in kernels():
        compiled = importlib.import_module(f"deltafuse.kernels.{name}").compile(config)
        print(
            f"{name} {config}\n    {report(compiled.artifacts.PTX, args.arch, args.ptxas, args.nvdisasm)}", flush=True
        )


if __name__ == "__main__":
    main()
