"""The emulator against hardware: every launch of the emulated tests, replayed on a GPU once, its results kept.

    pytest tests/emulated -n 0 --conformance-corpus=FILE  here: write down every launch that ran without fault
    python tests/emulated/conformance.py FILE OUT       on a GPU: run them there, write what came out to OUT (.json.gz)
    pytest tests/emulated                               anywhere: compare the emulator with tests/emulated/hardware/*.json.gz
    python tests/emulated/conformance.py --table FILE   anywhere: which instruction forms were compared, and how

A launch is known by the hash of its PTX and of all that goes in. Hardware's results are kept as a digest where the emulator had the
same bits that day, else as they are (the first `SAMPLE` bytes). Approximate functions are held to their documented accuracy (`allowed`),
everything else to its bits, tensor cores' accumulation included.

Not compared: launches that read clocks, SM or warp numbers, or that are marked "// emulator only": they leave copies in flight, take
tensor maps of the emulator's layout from memory, or guard `set` and `testp`, which the assembler expands without guarding all of it. Nor
are textures: their handles and memory are the driver's own on a GPU, and no argument of a launch describes them. What the ISA leaves
undefined is hardware's value here (quotients by zero: all ones; NaN payloads; bit fields beyond 255).
"""

from __future__ import annotations

import base64
import ctypes
import gzip
import hashlib
import json
import math
import pickle
import re
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE = 8192
HARDWARE = Path(__file__).parent / "hardware"
OPCODE = re.compile(r"(?:^|[;{}:])[ \t]*(?:@!?[%\w$]+\s+)?([a-z]\w*(?:\.[\w:]+)+)(?=\s)", re.M)
APPROXIMATE = re.compile(r"(ex2|lg2|sin|cos|tanh|rcp|rsqrt|sqrt)\.approx\b|div\.(approx|full)\b")


@dataclass
class Recorded:
    """One launch with everything that it reads, and what the emulator wrote."""

    text: str
    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared: int
    args: list[bytes]
    pointers: list[int]
    """Addresses that tensors had: where one stands in `args`, it is a pointer."""
    before: list[bytes]
    after: list[bytes]

    @property
    def key(self) -> str:
        """The launch's name in the files: what it runs and on what, wherever its tensors lie."""
        digest = hashlib.sha256()
        parts = [
            self.text,
            self.name,
            self.grid,
            self.block,
            self.cluster,
            self.shared,
            self.relocated([0] * len(self.pointers)),
        ]
        digest.update(repr(parts).encode())
        for raw in self.before:
            digest.update(raw + b"|")
        return digest.hexdigest()[:32]

    def relocated(self, addresses: list[int]) -> list[bytes]:
        """The arguments with the tensors at these addresses."""
        out = []
        for raw in self.args:
            if len(raw) >= 8:
                first = int.from_bytes(raw[:8], "little")
                for old, size, new in zip(self.pointers, map(len, self.before), addresses, strict=True):
                    if old <= first < old + max(size, 1):
                        raw = (first - old + new).to_bytes(8, "little") + raw[8:]
                        break
            out.append(raw)
        return out


def opcodes(text: str) -> list[str]:
    """The instruction forms of a PTX text."""
    return sorted(set(OPCODE.findall(text)))


def digest(results: list[bytes]) -> str:
    return hashlib.sha256(b"|".join(results)).hexdigest()[:32]


def known() -> dict[str, dict[str, Any]]:
    """What hardware gave, by launch."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(HARDWARE.glob("*.json.gz")):
        found.update(json.loads(gzip.decompress(file.read_bytes()))["launches"])
    return found


# ---- comparison ----------------------------------------------------------------------------------------------------------------------
MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}
LEAST = {"f16": -14, "bf16": -126, "f32": -126, "f64": -1022}
RELATIVE = {
    ("tanh", "f32"): 2**-11, ("tanh", "bf16"): 2**-8, ("ex2", "f16"): 2**-9.9, ("ex2", "bf16"): 2**-7, ("sqrt", "f32"): 2**-23,
    ("rsqrt", "f32"): 2**-22.9,
}  # fmt: skip
ABSOLUTE = {("tanh", "f16"): 2**-10.987}
PLACES = {("rcp", "f32"): 1, ("ex2", "f32"): 2, ("div", "f32"): 2, ("rsqrt", "f64"): 2}
"""Accuracy as the PTX ISA gives it, by function and type (see core/alu_math.c): relative, absolute, in units of the last place."""


def _values(raw: bytes, type_: str) -> Any:
    """Elements of a type as doubles."""
    import numpy as np

    with np.errstate(invalid="ignore"):  # signalling NaNs
        if type_ == "bf16":
            return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return np.frombuffer(raw, {"f16": np.float16, "f32": np.float32, "f64": np.float64}[type_]).astype(np.float64)


def allowed(form: str, x: list[Any], y: Any) -> Any:
    """How far hardware's results of an approximate form may lie from `y`, its correctly rounded ones, for operands x; NaN: anywhere."""
    import numpy as np

    op, type_ = form.split(".")[0], form.split(".")[-1].removesuffix("x2")
    size = np.abs(np.where(np.isfinite(y), y, 0))
    place = np.exp2(np.maximum(np.frexp(size)[1] - 1, LEAST[type_]) - MANTISSA[type_])
    bound = (
        0.5 * place
        + RELATIVE.get((op, type_), 0) * size
        + ABSOLUTE.get((op, type_), 0)
        + PLACES.get((op, type_), 0) * place
    )
    if "ftz" in form:
        bound = np.where(
            size < 2.0 ** (LEAST[type_] + 1), bound + 2.0 ** LEAST[type_], bound
        )  # about to be flushed, or not
    if (op, type_) == ("ex2", "f16"):
        bound = np.where(size < 2.0**-14, bound + 0.5 * place, bound)  # hardware truncates what is subnormal
    if form.endswith("approx.ftz.f64"):
        bound += 1.5 * 2**-20 * size  # 20 bits of mantissa are computed
    if op == "lg2":
        bound += np.where((x[0] > 0.5) & (x[0] < 2), 2**-22, 2**-22 * size)
    if op in ("sin", "cos"):
        turn = np.abs(x[0])
        bound += np.where(turn <= 2 * math.pi, 2**-20.5, np.where(turn <= 100 * math.pi, 2**-14.7, np.nan))
    if form.startswith("div.approx"):
        bound = np.where((np.abs(x[1]) >= 2.0**-126) & (np.abs(x[1]) <= 2.0**126), bound, np.nan)
    return bound


def _too_far(form: str, x: list[bytes], got: bytes, want: bytes) -> str:
    """The first element of an approximate form's result that differs from hardware's by more than is allowed."""
    import numpy as np

    type_ = form.split(".")[-1].removesuffix("x2")
    y, hardware = (_values(raw, type_) for raw in (got, want))
    operands = [_values(raw, type_)[: len(y)] for raw in x]
    with np.errstate(all="ignore"):
        bound = allowed(form, operands, y)
        near = (np.abs(hardware - y) <= bound) | np.isnan(bound)
    special = ~np.isfinite(y) | ~np.isfinite(hardware)
    near = np.where(special & ~np.isnan(bound), (hardware == y) | (np.isnan(hardware) & np.isnan(y)), near)
    if near.all():
        return ""
    i = int(np.argmin(near))
    return f"{form} of {[float(v[i]) for v in operands]}: {y[i]!r}, hardware {hardware[i]!r}, allowed {bound[i]:.3g}"


def apart(r: Recorded, hardware: list[bytes]) -> str:
    """What of a launch's results differs from hardware's (of which the beginnings may be given) by more than it may; empty if nothing."""
    forms = [form for form in opcodes(r.text) if APPROXIMATE.match(form)]
    for i, want in enumerate(hardware):
        got = r.after[i][: len(want)]
        if got == want:
            continue
        if len(forms) != 1 or i != len(hardware) - 1:
            return f"tensor {i}: hardware gave other bits"
        wrong = _too_far(forms[0], r.before[: 2 if forms[0].startswith("div") else 1], got, want)
        if wrong:
            return wrong
    return ""


def compare(r: Recorded, row: dict[str, Any]) -> str:
    """What differs from hardware's results as they are kept; empty if nothing."""
    if row["digest"] == digest(r.after):
        return ""
    if row["same"]:
        return "hardware gave other bits"
    kept = [
        zlib.decompress(base64.b64decode(raw)) if raw else b for raw, b in zip(row["results"], r.before, strict=True)
    ]
    return apart(r, kept)


def table(corpus: str) -> str:
    """The instruction forms of the launches for sm_90, by how they were compared with hardware."""
    rows = known()
    claimed: set[str] = set()
    bits: set[str] = set()
    near: set[str] = set()
    launches = _load(corpus)
    for r in launches:
        forms = set(opcodes(r.text))
        claimed |= forms
        row = rows.get(r.key)
        if row and row["digest"] == digest(r.after):
            bits |= forms
        elif row and not compare(r, row):
            near |= {form for form in forms if APPROXIMATE.match(form)}
    near -= bits
    missing = sorted(claimed - bits - near)
    names = {"ran on hardware": sum(r.key in rows for r in launches), "launches": len(launches)}
    lines = [f"{count:6} {name}" for name, count in reversed(names.items())]
    lines.append("forms claimed  same bits  within tolerance  not checked   of")
    for op in sorted({form.split(".")[0] for form in claimed}):
        of = [{form for form in group if form.split(".")[0] == op} for group in (claimed, bits, near, set(missing))]
        lines.append(f"{len(of[0]):13}  {len(of[1]):9}  {len(of[2]):16}  {len(of[3]):11}   {op}")
    lines.append(f"{len(claimed):13}  {len(bits):9}  {len(near):16}  {len(missing):11}   all")
    return "\n".join([*lines, *(["", "not checked:", *missing] if missing else [])])


# ---- on a GPU ------------------------------------------------------------------------------------------------------------------------
class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


def _tensor_map(cuda: ctypes.CDLL, raw: bytes) -> bytes:
    """A tensor map of the emulator's host code, encoded by the driver from the same description."""
    w = [int.from_bytes(raw[4 * i : 4 * i + 4], "little") for i in range(16)]
    rank = (w[2] >> 4 & 7) + 1
    kinds = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 10, 9: 8, 10: 9}
    kind = kinds[w[2] >> 7 & 15]
    if w[2] >> 16 & 1:
        kind = 11
    sizes = (ctypes.c_uint64 * 5)(*(x + 1 for x in w[8:13]))
    strides = (ctypes.c_uint64 * 5)(*((x | (w[7] >> 4 * i & 15) << 32) << 4 for i, x in enumerate(w[3:7])), 0)
    steps = (ctypes.c_uint32 * 5)(*((w[13] >> 3 * i & 7) + 1 for i in range(5)))
    out = ctypes.create_string_buffer(128 + 64)
    at = -(-ctypes.addressof(out) // 64) * 64
    base = ctypes.c_void_p(w[0] | w[1] << 32)
    swizzle, promotion, nan = w[2] >> 13 & 3, w[2] >> 17 & 3, w[2] >> 15 & 1
    head = (ctypes.c_void_p(at), kind, rank, base, sizes, strides)
    tail = (steps, 0, swizzle, promotion, nan)
    if w[2] & 15 == 3:
        lower, upper = _corners(w[14] & 0xFFFF, rank), _corners(w[14] >> 16, rank)
        code = cuda.cuTensorMapEncodeIm2col(*head, lower, upper, (w[13] >> 24) + 1, (w[15] & 1023) + 1, *tail)
    else:
        box = (ctypes.c_uint32 * 5)((w[13] >> 24) + 1, *((w[14] >> 8 * i & 255) + 1 for i in range(4)))
        code = cuda.cuTensorMapEncodeTiled(*head, box, *tail)
    if code:
        raise RuntimeError(f"cuTensorMapEncode: {code}")
    return ctypes.string_at(at, 128)


def _corners(packed: int, rank: int) -> Any:
    """Signed numbers of 16, 8 or 5 bits (tensor maps of 3, 4, 5 dimensions)."""
    bits = {3: 16, 4: 8, 5: 5}[rank]
    values = [packed >> bits * i & (1 << bits) - 1 for i in range(rank - 2)]
    return (ctypes.c_int * 3)(*(v - (1 << bits) if v >> bits - 1 else v for v in values))


def _replay(r: Recorded, cuda: ctypes.CDLL) -> list[bytes]:
    import torch

    tensors = [
        torch.frombuffer(bytearray(raw), dtype=torch.uint8).cuda() if raw else torch.empty(0).cuda() for raw in r.before
    ]
    args = r.relocated([t.data_ptr() for t in tensors])
    args = [_tensor_map(cuda, raw) if len(raw) == 128 else raw for raw in args]

    def check(code: int, what: str) -> None:
        if code:
            raise RuntimeError(f"{what}: CUDA error {code}")

    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(4096)
    options, values = (ctypes.c_int * 2)(5, 6), (ctypes.c_void_p * 2)(ctypes.addressof(log), 4096)
    code = cuda.cuModuleLoadDataEx(ctypes.byref(module), r.text.encode(), 2, options, values)
    check(code, f"cuModuleLoadDataEx ({log.value.decode(errors='replace')[:300]})")
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, r.name.encode()), "cuModuleGetFunction")
    if r.shared > 48 << 10:
        check(cuda.cuFuncSetAttribute(function, 8, r.shared), "cuFuncSetAttribute")
    buffers = [ctypes.create_string_buffer(raw + bytes(64), len(raw) + 64) for raw in args]
    pointers = []
    for buffer, raw in zip(buffers, args, strict=True):
        at = ctypes.addressof(buffer)
        if len(raw) == 128:  # a tensor map's alignment
            aligned = -(-at // 64) * 64
            ctypes.memmove(aligned, raw, 128)
            at = aligned
        pointers.append(at)
    attribute = Attribute(4, 0, (*r.cluster, *([0] * 13)))
    clustered = r.cluster != (1, 1, 1)
    config = Config(r.grid, r.block, r.shared, None, ctypes.pointer(attribute), int(clustered))
    parameters = (ctypes.c_void_p * max(len(pointers), 1))(*pointers)
    check(cuda.cuLaunchKernelEx(ctypes.byref(config), function, parameters, None), "cuLaunchKernelEx")
    torch.cuda.synchronize()
    cuda.cuModuleUnload(module)
    return [bytes(t.cpu().numpy().tobytes()) for t in tensors]


def _load(corpus: str) -> list[Recorded]:
    launches: list[Recorded] = pickle.loads(zlib.decompress(Path(corpus).read_bytes()))
    return launches


def _worker(corpus: str, first: int, step: int) -> None:
    import torch

    torch.zeros(1).cuda()
    cuda = ctypes.CDLL("libcuda.so.1")
    launches = _load(corpus)
    for i in range(first, len(launches), step):
        r = launches[i]
        row: dict[str, Any] = {"i": i, "key": r.key, "forms": opcodes(r.text)}
        try:
            results = _replay(r, cuda)
            row["same"] = results == r.after
            row["digest"] = digest(results)
            if not row["same"]:
                row["apart"] = apart(r, results)
                row["results"] = [
                    base64.b64encode(zlib.compress(got[:SAMPLE])).decode() if got != before else ""
                    for got, before in zip(results, r.before, strict=True)
                ]
        except RuntimeError as error:
            row["error"] = str(error)[:400]
        print(json.dumps(row), flush=True)
        if "error" in row and "Module" not in row["error"]:
            return  # the context may be lost: the parent goes on in a new process


def _drive(corpus: str, first: int, step: int, total: int, rows: dict[str, dict[str, Any]], deadline: float) -> None:
    """One chain of workers: a new process after every launch that fails."""
    while first < total and time.time() < deadline:
        command = [sys.executable, __file__, "--worker", corpus, str(first), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            at = first
            for line in process.stdout:
                row = json.loads(line)
                first = row.pop("i") + step
                rows[row.pop("key")] = row
                if time.time() > deadline:
                    process.kill()
        if first == at:  # it died without a word
            first += step


def _gpu() -> dict[str, str]:
    """The GPU that the workers run on, the machine's first."""
    query = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, _, version = subprocess.run(query, capture_output=True, text=True).stdout.strip().partition(", ")
    return {"gpu": gpu, "driver": version}


def main(corpus: str, out: str, workers: int = 8, seconds: float = 300) -> None:
    """Replay a corpus on this machine's GPU and write what came out."""
    import threading

    import torch

    total = len(_load(corpus))
    rows: dict[str, dict[str, Any]] = {}
    deadline = time.time() + seconds
    chains = [
        threading.Thread(target=_drive, args=(corpus, i, workers, total, rows, deadline)) for i in range(workers)
    ]  # fmt: skip
    for chain in chains:
        chain.start()
    for chain in chains:
        chain.join()
    about = {"date": time.strftime("%Y-%m-%d"), **_gpu(), "torch": torch.__version__}
    kept = {key: row for key, row in rows.items() if "error" not in row}
    same = sum(row["same"] for row in kept.values())
    near = sum(not row["same"] and not row["apart"] for row in kept.values())
    print(
        f"{about}: {total} launches, {len(rows)} tried, {len(kept)} ran, {same} with the emulator's bits, {near} within tolerance"
    )
    for row in rows.values():
        if "error" in row:
            print("error:", row["error"].replace("\n", " ")[:200], row["forms"][-2:])
    for row in kept.values():
        if not row["same"] and row["apart"]:
            print("differs:", row["apart"], ", ".join(row["forms"])[-160:])
    for row in kept.values():
        row.pop("forms")
        row.pop("apart", None)
    content = json.dumps({"about": about, "launches": kept}, separators=(",", ":"))
    Path(out).write_bytes(gzip.compress(content.encode(), mtime=0))


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        _worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "--table":
        print(table(sys.argv[2]))
    else:
        main(sys.argv[1], sys.argv[2])
