"""Small PTX kernels around a body of instructions, for the tests of memory instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import ptxemu

REGISTERS = """
    .reg .pred %p<16>;
    .reg .b16 %h<32>;
    .reg .b32 %r<64>;
    .reg .b64 %d<64>;
    .reg .b128 %q<8>;
    .reg .f32 %f<32>;
    .reg .f64 %e<32>;
"""


def kernel(body: str, params: int, *, arch: str = "sm_90a", shared: int = 0, head: str = "", extra: str = "") -> str:
    """A kernel `k` with pointer parameters, which %d0, %d1... hold; %r0 is the thread, %r1 the shared buffer `s`.

    extra: further parameters.
    """
    version = "8.6" if arch.startswith("sm_9") else "8.8"
    names = [f"p{i}" for i in range(params)]
    declared = ", ".join([f".param .u64 {n}" for n in names] + ([extra] if extra else []))
    loads = "\n".join(f"    ld.param.u64 %d{i}, [{n}];" for i, n in enumerate(names))
    buffer = f"    .shared .align 1024 .b8 s[{shared}];\n    mov.u32 %r1, s;" if shared else ""
    return (
        f".version {version}\n.target {arch}\n.address_size 64\n{head}\n"
        f".visible .entry k({declared})\n{{{REGISTERS}{buffer}\n{loads}\n    mov.u32 %r0, %tid.x;\n{body}\n"
        f"    ret;\n}}\n"
    )


def run(body: str, args: Sequence[Any], *, threads: int = 32, grid: int = 1, cluster: int = 1, dynamic: int = 0, arch: str = "sm_90a",
        shared: int = 0, head: str = "", extra: str = "", tensors: Any = (), **options: Any) -> ptxemu.Launched:  # fmt: skip
    """Run a body as `kernel` builds it. Tensors among the arguments come first."""
    pointers = sum(isinstance(a, torch.Tensor) for a in args)
    text = kernel(body, pointers, arch=arch, shared=shared, head=head, extra=extra)
    return ptxemu.run_ptx(
        text, "k", (grid,), (threads,), args, shared=dynamic, cluster=(cluster,), tensors=tensors, **options
    )


def copy_out(to: str, shared: str, n_bytes: int, label: str = "OUT") -> str:
    """Every thread of a warp copies words from shared memory to global memory."""
    return (
        f"    and.b32 %r50, %r0, 31;\n    shl.b32 %r50, %r50, 2;\n{label}_LOOP:\n"
        f"    setp.ge.u32 %p15, %r50, {n_bytes};\n    @%p15 bra {label}_DONE;\n"
        f"    add.u32 %r51, {shared}, %r50;\n    ld.shared.u32 %r52, [%r51];\n    cvt.u64.u32 %d50, %r50;\n"
        f"    add.u64 %d51, {to}, %d50;\n"
        f"    st.global.u32 [%d51], %r52;\n    add.u32 %r50, %r50, 128;\n    bra {label}_LOOP;\n{label}_DONE:\n"
    )


def copy_in(shared: str, source: str, n_bytes: int, label: str = "IN") -> str:
    """Every thread of a warp copies words from global memory to shared memory."""
    return (
        f"    and.b32 %r50, %r0, 31;\n    shl.b32 %r50, %r50, 2;\n{label}_LOOP:\n"
        f"    setp.ge.u32 %p15, %r50, {n_bytes};\n    @%p15 bra {label}_DONE;\n"
        f"    add.u32 %r51, {shared}, %r50;\n    cvt.u64.u32 %d50, %r50;\n    add.u64 %d51, {source}, %d50;\n"
        f"    ld.global.u32 %r52, [%d51];\n"
        f"    st.shared.u32 [%r51], %r52;\n    add.u32 %r50, %r50, 128;\n    bra {label}_LOOP;\n{label}_DONE:\n"
    )


EMULATOR_ONLY = "// emulator only"
"""A `head` of kernels that hardware must not run: they leave copies in flight, or take tensor maps of our layout from memory."""

INIT = """
    setp.eq.u32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [%r1], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""
"""An mbarrier at the start of the shared buffer; %p1: the thread is 0."""


def expect(n_bytes: int | str) -> str:
    return f"    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {n_bytes};\n"


def wait(label: str = "WAIT", parity: int = 0, at: str = "%r1") -> str:
    return f"{label}:\n    mbarrier.try_wait.parity.shared.b64 %p14, [{at}], {parity};\n    @!%p14 bra {label};\n"
