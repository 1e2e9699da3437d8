"""Host time of a call on this package's own kernels: from the call to the return, tiny tensors, nothing waited for.

    python bench/host.py                      # on a GPU: what a caller pays; without one: everything but the launches themselves
    python bench/host.py chunk --profile      # where the time goes, of cases whose names contain "chunk"
    python bench/host.py --no-ffi             # without a GPU: launches that do not even read their arguments

Without a GPU the package is told of a Hopper, tensors are on the CPU, and a launch is a TVM-FFI function that reads its arguments and does
nothing. The best of many repetitions counts: others on the machine only ever add.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import deltafuse
from deltafuse.kda import kda_layer_token
from deltafuse.runtime import cache, probe

Call = Callable[[], Any]
HOPPER = probe.Environment("cuda", (9, 0), "no GPU, a Hopper assumed", dsl="none", sms=132)


def without_gpu(ffi: bool) -> None:
    """Have the package believe in a Hopper and find launch functions that do nothing."""

    def nothing(*_: object) -> None:
        return None

    found: Callable[..., Any] = nothing
    if ffi:
        import tvm_ffi

        found = tvm_ffi.get_global_func("testing.nop")
    setattr(probe, "_environment", lambda *_: HOPPER)  # noqa: B010 a module's function is not assigned to in typed code
    setattr(cache, "_find", lambda *_: found)  # noqa: B010


def cases(device: str) -> dict[str, Call]:
    """Every op's call, by a name."""

    def bf16(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def fp32(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device)

    B, T, H, K = 1, 128, 2, 128
    raw: dict[str, Any] = dict(
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, A_log=fp32(H), dt_bias=fp32(H * K),
        backend="cute",
    )  # fmt: skip
    whole: dict[str, Any] = {name: bf16(B, T, H, K) for name in "qkvg"} | {"beta": bf16(B, T, H)}
    leaves = {name: x.clone().requires_grad_() for name, x in whole.items()}
    token = {name: x[:, :1].contiguous() for name, x in whole.items()}
    state, pool = fp32(B, H, K, K), fp32(8, H, K, K)
    slots = torch.zeros(B, device=device, dtype=torch.int32)
    x, weight, moved = bf16(B, T, H * K), bf16(H * K, 4), bf16(B, H * K, 4)
    layer: dict[str, Any] = dict(
        caches=[bf16(B, H * K, 4) for _ in range(3)], weights=[weight] * 3, biases=None, norm=bf16(K), eps=1e-5, A_log=raw["A_log"],
        dt_bias=raw["dt_bias"], initial_state=state,
    )  # fmt: skip

    def trained() -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            return deltafuse.chunk_kda(**leaves, **raw)

    return {
        "chunk_kda": lambda: deltafuse.chunk_kda(**whole, **raw),
        "chunk_kda, states": lambda: deltafuse.chunk_kda(**whole, initial_state=state, output_final_state=True, **raw),
        "chunk_kda, gradients wanted": trained,
        "fused_recurrent_kda": lambda: deltafuse.fused_recurrent_kda(**token, initial_state=state, output_final_state=True, **raw),
        "fused_recurrent_kda, pool": lambda: deltafuse.fused_recurrent_kda(
            **token, initial_state=pool, ssm_state_indices=slots, inplace_final_state=True, output_final_state=True, **raw
        ),
        "kda_layer_token": lambda: kda_layer_token(**token, z=token["v"], **layer),
        "causal_conv1d": lambda: deltafuse.causal_conv1d(x, weight, activation="silu", backend="cute"),
        "causal_conv1d, state": lambda: deltafuse.causal_conv1d(
            x, weight, activation="silu", initial_state=moved, output_final_state=True, backend="cute"
        ),
        "causal_conv1d_update": lambda: deltafuse.causal_conv1d_update(
            x[:, 0], moved, weight=weight, activation="silu", backend="cute"
        ),
    }  # fmt: skip


def microseconds(call: Call, synchronize: Call, repetitions: int, calls: int) -> float:
    """The least mean time of `calls` calls in a row."""
    best = float("inf")
    for _ in range(repetitions):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    return best


def profile(call: Call, calls: int) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        call()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    about, _, usage = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, epilog=usage, formatter_class=form)
    parser.add_argument("only", nargs="?", default="", help="cases whose names contain this")
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument(
        "--calls", type=int, default=50, help="calls in a row; few enough that a GPU's queue never fills"
    )
    parser.add_argument("--profile", action="store_true", help="print a profile of every case, too")
    parser.add_argument("--no-ffi", action="store_true", help="without a GPU: launches do not read their arguments")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
        without_gpu(not given.no_ffi)
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    device = "cuda" if on_gpu else "cpu"
    print(f"{probe.environment(device, 0 if on_gpu else None).title}; torch {torch.__version__}; us a call")
    for mode in (torch.inference_mode, torch.no_grad):
        for name, call in cases(device).items():
            if given.only not in name:
                continue
            with mode():
                for _ in range(20):
                    call()
                synchronize()
                print(
                    f"{mode.__name__:<15}{name:<30}{microseconds(call, synchronize, given.repetitions, given.calls):8.1f}",
                    flush=True,
                )
                if given.profile:
                    profile(call, 1000)


if __name__ == "__main__":
    main()
