"""What the commands take as text: shapes, lengths, dtypes, devices, names.

Every error is a ValueError that says what it got and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from deltafuse import OPS
from deltafuse.runtime.probe import Environment, environment, packages

from .specs import CONV_OPS, DELTA_OPS, ConvSpec, DeltaSpec, GateSpec, Spec

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}

MACHINES = {
    "a100": ("NVIDIA A100", (8, 0)),
    "h100": ("NVIDIA H100", (9, 0)),
    "h200": ("NVIDIA H200", (9, 0)),
    "b200": ("NVIDIA B200", (10, 0)),
    "b300": ("NVIDIA B300", (10, 3)),
}
"""Machines that can be asked about from anywhere: name and compute capability."""

AXES = {
    **dict.fromkeys(DELTA_OPS, "B,T,H,K,V"),
    "causal_conv1d": "B,T,D,W",
    "causal_conv1d_update": "N,D,W",
    "fused_kda_gate": "B,T,HV,K",
}
"""The sizes in an op's shape."""


def _fail(got: object, allowed: str) -> NoReturn:
    raise ValueError(f"got {got!r}; allowed: {allowed}")


def parse_op(text: str) -> str:
    if text not in OPS:
        _fail(text, ", ".join(OPS))
    return text


def parse_dtype(text: str) -> torch.dtype:
    name = _SHORT.get(text, text)
    if name not in DTYPES:
        _fail(text, ", ".join(f"{short} or {long}" for short, long in _SHORT.items()))
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_device(text: str | None) -> torch.device:
    """A device of this machine; None is its first GPU, or its CPU where there is none."""
    if text is None:
        text = "cuda" if torch.cuda.is_available() else "cpu"
    here = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    try:
        device = torch.device(text)
    except RuntimeError:
        _fail(text, ", ".join(here))
    index = device.index or 0
    if device.type != "cpu" and f"{device.type}:{index}" not in here:
        _fail(text, f"{', '.join(here)} (what this machine has)")
    return device


def parse_machine(text: str | None, fla: bool | None = None, dsl: bool | None = None) -> Environment:
    """The environment of a device of this machine or of one of `MACHINES`.

    `fla` and `dsl` say whether they are taken as installed there; None: as they are here.
    """
    versions = dict(packages())
    for package, wanted in (("fla", fla), ("dsl", dsl)):
        if wanted is not None:
            versions[package] = (versions[package] or "installed") if wanted else None
    if text is not None and text.lower() in MACHINES:
        name, capability = MACHINES[text.lower()]
        return Environment("cuda", capability, name, **versions)
    if text != "cuda":  # a GPU, whatever it is, can be asked about where there is none
        try:
            device = parse_device(text)
        except ValueError as error:
            raise ValueError(f"{error}, cuda, {', '.join(MACHINES)}") from None
    else:
        device = torch.device("cuda")
    known = environment(device.type, device.index)
    return Environment(known.device, known.capability, known.name, **versions)


def parse_sizes(text: str, form: str) -> list[int]:
    """Comma-separated numbers, as many as `form` has."""
    parts = text.split(",")
    try:
        sizes = [int(part) for part in parts]
    except ValueError:
        _fail(text, f"whole numbers {form}")
    if len(sizes) != len(form.split(",")):
        _fail(text, f"{len(form.split(','))} numbers {form}")
    if min(sizes) < 0:
        _fail(text, f"whole numbers {form}, none negative")
    return sizes


def parse_lengths(text: str, batch: int, tokens: int) -> tuple[int, ...]:
    """Lengths of packed sequences; they fill the one row of T tokens."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        _fail(text, "whole numbers, the lengths of the sequences")
    if min(lengths) < 0:
        _fail(text, "lengths of 0 or more")
    if sum(lengths) != tokens:
        _fail(text, f"lengths that add up to T = {tokens} (these: {sum(lengths)})")
    if batch != 1:
        _fail(text, f"B = 1 with packed sequences, not {batch}")
    return lengths


def parse_spec(op: str, text: str, hv: int | None = None, packed: str | None = None, **switches: Any) -> Spec:
    """The call of `op` with the sizes `B,T,H,K,V[,HV][:length,length,...]` (conv, gate: as `AXES` has it)."""
    text, colon, lengths = text.partition(":")
    if colon and packed is not None:
        _fail(f"{text}:{lengths} and {packed}", "the lengths once")
    packed = lengths if colon else packed
    form = AXES[op]
    if op in DELTA_OPS and text.count(",") == form.count(",") + 1:
        form += ",HV"
        if hv is not None:
            _fail(text, "HV once")
    sizes = parse_sizes(text, form)
    if packed is not None and op not in (*DELTA_OPS, "causal_conv1d"):
        _fail(packed, f"no lengths: {op} has no packed sequences")
    fields: dict[str, Any] = dict(switches)
    if packed is not None:
        fields["lengths"] = parse_lengths(packed, sizes[0], sizes[1])
    if op in DELTA_OPS:
        names = ("batch", "tokens", "heads", "key_dim", "value_dim", "value_heads")
        fields |= dict(zip(names, sizes, strict=False)) | ({"value_heads": hv} if hv else {})
        return DeltaSpec(op, **fields)
    if hv is not None:
        _fail(hv, f"no HV: {op} has none")
    if op in CONV_OPS:
        batch, *tokens, channels, width = sizes
        return ConvSpec(op, batch, tokens[0] if tokens else 1, channels, width, **fields)
    if fields.get("gate") == "log":
        _fail("gate log", f"softplus, bounded: {op} makes the decay's logarithm")
    batch, length, heads, key_dim = sizes
    return GateSpec(op, batch, length, heads, key_dim, **fields)


def parse_list(texts: Sequence[str], separators: str = ",") -> list[str]:
    """The items of options that may be given several times, or as one list."""
    joined = separators[0].join(texts)
    for separator in separators[1:]:
        joined = joined.replace(separator, separators[0])
    return [item.strip() for item in joined.split(separators[0]) if item.strip()]
