"""Stages of shared memory that copies fill and warps of consumers free again."""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import replace

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean

WARP = 32


def copy_pipeline(barriers, stages, size, warps, cluster=1):
    """A pipeline of `stages` of `size` bytes, each of which `warps` warps of every CTA of a cluster release.

    In a cluster one lane of a warp arrives at each CTA's barrier, on behalf of lanes that it has been ordered after. Where there is one
    CTA all lanes do: compute-sanitizer's racecheck takes an arrival for an end of the arriving lane's own reads, nobody else's.
    """

    def group(n):
        return pipeline.CooperativeGroup(pipeline.Agent.Thread, n)

    made = pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=stages,
        producer_group=group(1),
        consumer_group=group(warps * (WARP if cluster == 1 else cluster)),
        tx_count=size,
        cta_layout_vmnk=cute.make_layout((1, cluster, 1, 1)),
        mcast_mode_mn=(0, 1),
        defer_sync=True,
    )
    return replace(made, is_signaling_thread=Boolean(True)) if cluster == 1 else made
