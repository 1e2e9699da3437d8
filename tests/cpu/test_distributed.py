"""A layer sharded over two processes (FSDP2) gives the gradients of one process: gloo on the CPU, NCCL where there are two GPUs.

In float32 by torch on both: fla, where it is installed, would tune itself for minutes in every process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from deltafuse import use_backend
from deltafuse.nn import KimiDeltaAttention

WORLD = 2
SIZES = {"hidden_size": 32, "num_heads": 2, "head_dim": 16}


def layer(device: torch.device) -> KimiDeltaAttention:
    torch.manual_seed(0)
    return KimiDeltaAttention(**SIZES, layer_idx=0).to(device)


def inputs(rank: int, device: torch.device) -> Tensor:
    return torch.randn(2, 40, SIZES["hidden_size"], generator=torch.Generator().manual_seed(rank)).to(device)


def loss(output: object) -> Tensor:
    o = output[0] if isinstance(output, tuple) else output
    assert isinstance(o, Tensor)
    return o.float().square().mean()


def _sharded(rank: int, folder: str, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    try:
        model = layer(device)
        fully_shard(model, mesh=init_device_mesh(kind, (WORLD,)))
        with use_backend("torch"):
            for _ in range(2):  # gradients accumulate
                loss(model(inputs(rank, device))).backward()
        grads = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters() if p.grad is not None}
        if rank == 0:
            torch.save(grads, f"{folder}/grads.pt")
    finally:
        dist.destroy_process_group()


def _alone(device: torch.device) -> dict[str, Tensor]:
    model = layer(device)
    with use_backend("torch"):
        for _ in range(2):
            for rank in range(WORLD):
                (loss(model(inputs(rank, device))) / WORLD).backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_sharded_gradients_are_those_of_one_process(kind: str) -> None:
    if kind == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip("needs two GPUs")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_sharded, (folder, kind), WORLD)
        found = torch.load(Path(folder) / "grads.pt")
    want = _alone(torch.device(kind))
    assert found.keys() == want.keys()
    assert len(want) > 5
    for name, x in want.items():
        assert (found[name] - x).norm() <= 1e-5 * x.norm().clamp(min=1e-6), name
