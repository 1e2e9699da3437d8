"""Every GPU kernel of this package on small shapes, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/small_calls.py
    compute-sanitizer --tool racecheck python tests/gpu/small_calls.py --no-clusters

racecheck does not follow copies that one CTA of a cluster makes for another: it takes reads after the mbarrier that such a copy completes
for races with it. `--no-clusters` takes sizes for which the kernels need none. Without torch's cache of memory every tensor is an
allocation of its own, whose ends memcheck knows.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import deltafuse
from deltafuse.cli.specs import DeltaSpec

CUDA = torch.device("cuda")
RAW: dict[str, Any] = {"l2norm": True, "beta_sigmoid": True, "initial_state": True, "final_state": True}
TRAINED: dict[str, Any] = RAW | {"gate": "softplus", "decay": "remembering"}
UNEVEN = (15, 85, 1, 64, 0, 90)


def chunked(**fields: Any) -> None:
    """Forward and backward."""
    given = DeltaSpec("chunk_kda", **fields).arguments(torch.bfloat16, CUDA)
    leaves = [
        given.setdefault(n, x).requires_grad_()
        for n, x in given.items()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    o, state = deltafuse.chunk_kda(**given, backend="cute")
    assert state is not None
    grads = torch.autograd.grad([o, state], leaves, [torch.ones_like(o), torch.ones_like(state)])
    assert all(bool(x.isfinite().all()) for x in (o, state, *grads))


def decoded(**fields: Any) -> None:
    given = DeltaSpec("fused_recurrent_kda", **fields).arguments(torch.bfloat16, CUDA)
    o, _ = deltafuse.fused_recurrent_kda(**given, backend="cute")
    assert bool(o.isfinite().all())


def convolved(tokens: int, channels: int, lengths: tuple[int, ...] | None = None) -> None:
    """Forward, backward and the next token."""
    x = torch.randn(1, tokens, channels, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(channels, 4, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    bounds = None if lengths is None else torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=CUDA)
    y, state = deltafuse.causal_conv1d(
        x, weight, activation="silu", cu_seqlens=bounds, output_final_state=True, backend="cute"
    )
    torch.autograd.grad(y, [x, weight], torch.ones_like(y))
    assert state is not None
    with torch.no_grad():
        token = torch.randn(len(state), channels, device=CUDA, dtype=torch.bfloat16)
        deltafuse.causal_conv1d_update(token, state, weight=weight, activation="silu", backend="cute")


def main() -> int:
    torch.manual_seed(0)
    # Two tiles of 64 columns, of V or of the segments' maps of K columns, are a cluster.
    size = 64 if "--no-clusters" in sys.argv[1:] else 128
    sizes = {"key_dim": size, "value_dim": size}
    chunked(tokens=150, heads=2, **sizes, **TRAINED)
    chunked(tokens=64 * 24 + 7, heads=1, **sizes, **TRAINED)  # by segments
    chunked(tokens=sum(UNEVEN), lengths=UNEVEN, heads=1, v_first=True, **sizes, **TRAINED)
    chunked(tokens=130, heads=1, value_heads=2, gate="bounded", key_dim=64, value_dim=64, **RAW)
    chunked(tokens=300, heads=1, gate="bounded", decay="forgetting", **sizes, **RAW)  # rows that decay to zeros
    chunked(tokens=130, heads=1, gate="softplus", decay="strong", key_dim=128, value_dim=192, **RAW)
    for v_first in (False, True):
        decoded(batch=3, tokens=2, heads=2, gate="softplus", key_dim=128, value_dim=128, v_first=v_first, **RAW)
    convolved(200, 300)
    convolved(sum(UNEVEN), 64, UNEVEN)
    torch.cuda.synchronize()
    print("all ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
