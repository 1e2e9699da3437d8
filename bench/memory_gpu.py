"""What is bound by memory on a GPU: decoding, a layer's decode step and the short convolution, each beside a copy of as many bytes and fla.

    python bench/memory_gpu.py
    python bench/memory_gpu.py --only decode

Medians with the L2 cache flushed before every call, except where a CUDA graph of many calls is said; then a call is an n-th of
the graph's time. Appends to bench/results/memory_gpu.csv.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deltafuse
from deltafuse.cli.bench import about_run, append_csv
from deltafuse.cli.timing import times
from deltafuse.kda import kda_layer_token
from deltafuse.nn.norm import RMSNormGated

RESULTS = Path(__file__).parent / "results" / "memory_gpu.csv"
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
IN_GRAPH = 50
HEADS, DIM = 32, 128
Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Something timed, and what is wanted of it.

    `moved`: its bytes; `share`: of a copy's speed; `us`: microseconds; `ratio`: how many times as long `peer` takes.
    """

    name: str
    call: Call
    moved: int
    peer: Call | None = None
    peer_name: str = "fla"
    share: float | None = None
    us: float | None = None
    ratio: float | None = None
    graph: bool = False


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def size(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def microseconds(call: Call, graph: bool, reps: int) -> float:
    """The median time of a call."""
    if not graph:
        return statistics.median(times(call, CUDA, reps, 3)) * 1e3
    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(IN_GRAPH):
            call()
    return statistics.median(times(captured.replay, CUDA, reps, 3)) * 1e3 / IN_GRAPH


def copied(moved: int, reps: int) -> float:
    """Microseconds of a copy that reads and writes as many bytes together."""
    source = torch.empty(moved // 2, device=CUDA, dtype=torch.int8)
    target = torch.empty_like(source)
    return microseconds(lambda: target.copy_(source), False, reps)


def token(batch: int) -> dict[str, Any]:
    """The arguments of a decoding call, all work in the kernel."""
    q, k, v, g = (rand(batch, 1, HEADS, DIM) for _ in range(4))
    return {
        "q": q, "k": k, "v": v, "g": g, "beta": rand(batch, 1, HEADS), "A_log": torch.rand(HEADS, device=CUDA),
        "dt_bias": torch.randn(HEADS * DIM, device=CUDA), "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }  # fmt: skip


def decode(batch: int, dtype: torch.dtype, v_first: bool, in_place: bool, **wanted: Any) -> Row:
    """One token of every sequence."""
    given = token(batch)
    state = torch.randn(batch, HEADS, DIM, DIM, device=CUDA).to(dtype)
    given |= {"initial_state": state, "state_v_first": v_first}
    own: dict[str, Any] = {"output_final_state": True} | ({"inplace_final_state": True} if in_place else {})
    written = state.numel() * (state.element_size() if in_place else 4)
    moved = size(*(given[n] for n in ("q", "k", "v", "g", "beta", "initial_state")), given["v"]) + written
    name = f"decode B {batch}, {str(dtype)[6:]} state {'[V, K]' if v_first else '[K, V]'}{', in place' if in_place else ''}"

    def peer() -> object:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        options: dict[str, Any] = {"inplace_final_state": in_place, "output_final_state": not in_place}
        return fused_recurrent_kda_fwd(**given, **options, scale=DIM**-0.5)

    return Row(name, lambda: deltafuse.fused_recurrent_kda(**given, **own), moved, peer, **wanted)


def layer_step(batch: int, **wanted: Any) -> Row:
    """A KDA layer's token from its projections to what its output projection takes: one launch against one after another."""
    width = HEADS * DIM
    q, k, v, g, z = (rand(batch, width) for _ in range(5))
    beta, caches = rand(batch, HEADS), [rand(batch, width, 4) for _ in range(3)]
    weights = [rand(width, 4) for _ in range(3)]
    gate: dict[str, Any] = {"A_log": torch.rand(HEADS, device=CUDA), "dt_bias": torch.randn(width, device=CUDA)}
    state = torch.randn(batch, HEADS, DIM, DIM, device=CUDA)
    norm = RMSNormGated(DIM, activation="sigmoid").to(CUDA, BF16)

    def heads(x: Tensor) -> Tensor:
        return x.view(batch, 1, HEADS, DIM)

    def fused() -> object:
        done = kda_layer_token(
            heads(q), heads(k), heads(v), heads(g), beta.view(batch, 1, HEADS), heads(z), caches=caches, weights=weights,
            biases=None, norm=norm.weight, eps=norm.eps, initial_state=state, **gate,
        )  # fmt: skip
        assert done is not None
        return done

    def apart() -> object:
        mixed = [
            deltafuse.causal_conv1d_update(x, cache, weight=weight, activation="silu")[0]
            for x, cache, weight in zip((q, k, v), caches, weights, strict=True)
        ]
        o, after = deltafuse.fused_recurrent_kda(
            heads(mixed[0]), heads(mixed[1]), heads(mixed[2]), heads(g), beta.view(batch, 1, HEADS), initial_state=state,
            output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, **gate,
        )  # fmt: skip
        return norm(o, heads(z)), after

    moved = size(q, k, v, g, z, v, beta, *caches, *caches, *weights, state, state)
    return Row(f"layer step B {batch}, one launch", fused, moved, apart, "ops one by one", graph=True, **wanted)


def conv(
    name: str,
    batch: int,
    tokens: int,
    channels: int,
    bounds: Tensor | None = None,
    backward: bool = False,
    **wanted: Any,
) -> Row:
    """A convolution of width 4 with SiLU over whole sequences."""
    x, weight, dy = rand(batch, tokens, channels), rand(channels, 4), rand(batch, tokens, channels)
    options: dict[str, Any] = {"activation": "silu", "cu_seqlens": bounds}

    def theirs() -> object:
        from fla.modules.causal_conv1d import causal_conv1d

        return causal_conv1d(x=x, weight=weight, **options)

    def own() -> Any:
        return deltafuse.causal_conv1d(x, weight, **options)

    if not backward:
        return Row(name, own, size(x, x, weight), theirs, **wanted)

    def gradients(forward: Callable[[], Any]) -> Call:
        inputs = [x.requires_grad_(), weight.requires_grad_()]
        with torch.enable_grad():
            y = forward()[0]
        return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)

    later: list[Call] = []

    def peer() -> object:
        if not later:
            later.append(gradients(theirs))
        return later[0]()

    return Row(name, gradients(own), size(x, x, dy, weight, weight), peer, **wanted)


def update(batch: int, channels: int, **wanted: Any) -> Row:
    """The convolution's next token."""
    x, weight, cache = rand(batch, channels), rand(channels, 4), rand(batch, channels, 4)

    def theirs() -> object:
        from fla.modules.causal_conv1d import causal_conv1d_update

        return causal_conv1d_update(x, cache, None, weight, None, "silu")

    return Row(
        f"conv update B {batch}, D {channels}",
        lambda: deltafuse.causal_conv1d_update(x, cache, weight=weight, activation="silu"),
        size(x, x, cache, cache, weight), theirs, **wanted,
    )  # fmt: skip


def rows() -> Iterator[Callable[[], Row]]:
    """What is timed, each made when its turn comes."""
    f32 = torch.float32
    yield lambda: decode(128, f32, False, False, share=0.92)
    yield lambda: decode(128, f32, True, False, share=0.92)
    yield lambda: decode(1024, BF16, False, True, share=0.90)
    yield lambda: decode(1024, BF16, True, True, share=0.90)
    yield lambda: decode(1, f32, False, True, us=6.0, graph=True)
    yield lambda: layer_step(1, ratio=3.0)
    yield lambda: layer_step(64)
    yield lambda: conv("conv forward 16, 8192, 2048", 16, 8192, 2048, share=0.90)
    yield lambda: conv("conv backward 16, 8192, 2048", 16, 8192, 2048, backward=True, share=0.85, ratio=4.0)
    lengths = torch.arange(70_000) % 3 + 1
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(CUDA, torch.int32)
    total = int(lengths.sum())
    yield lambda: conv(f"conv forward 1, {total}, 2048", 1, total, 2048)
    yield lambda: conv("conv forward, packed: 70,000 sequences of 1 to 3 tokens", 1, total, 2048, bounds)
    yield lambda: conv(f"conv backward 1, {total}, 2048", 1, total, 2048, backward=True)
    yield lambda: conv("conv backward, packed: 70,000 sequences of 1 to 3 tokens", 1, total, 2048, bounds, True)
    yield lambda: update(128, 12288, share=0.85)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name has this")
    parser.add_argument("--reps", type=int, default=50)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    about, missed = about_run(CUDA), 0
    torch.set_grad_enabled(False)
    for make in rows():
        row = make()
        if options.only not in row.name:
            continue
        us, base = microseconds(row.call, row.graph, options.reps), copied(row.moved, options.reps)
        peer, note = None, ""
        if row.peer is not None:
            try:
                peer = microseconds(row.peer, row.graph, options.reps)
            except Exception as error:
                note = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        share, ratio = base / us, None if peer is None else peer / us
        wrong = (row.share is not None and share < row.share) or (row.us is not None and us > row.us)
        wrong = wrong or (row.ratio is not None and (ratio is None or ratio < row.ratio))
        missed += wrong
        beside = note or (f"{row.peer_name} {peer:.2f} us = {ratio:.2f} x" if peer and ratio else "")
        wanted = ", ".join(f"{n} {x}" for n, x in (("share", row.share), ("us", row.us), ("times", row.ratio)) if x)
        verdict = f"  wanted {wanted}: {'NO' if wrong else 'yes'}" if wanted else ""
        where = " in a CUDA graph" if row.graph else f", {share:.1%} of a copy ({base:.1f} us)"
        print(f"{row.name:58} {us:9.2f} us{where}  {beside}{verdict}", flush=True)
        append_csv(options.csv, [about | {
            "name": row.name, "us": round(us, 3), "graph": row.graph, "bytes": row.moved, "copy_us": round(base, 2),
            "peer": row.peer_name, "peer_us": None if peer is None else round(peer, 3),
            "ratio": None if ratio is None else round(ratio, 3), "wanted": wanted,
        }])  # fmt: skip
        del row, make
        torch.cuda.empty_cache()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
