"""What the custom ops share."""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import check_bounds


def without_autocast(x: Tensor) -> torch.autocast:
    """The arithmetic inside an op is float32 whatever surrounds the call."""
    return torch.autocast(x.device.type, enabled=False)


def host_bounds(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    """Sequence bounds on the CPU: the caller's copy where there is one, so that no device is waited for."""
    bounds = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return None if bounds is None else bounds.cpu()


def checked_bounds(
    x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, may_end_early: bool = False
) -> Tensor | None:
    """`host_bounds` of the sequences packed along the second axis of x, their values checked."""
    bounds = host_bounds(cu_seqlens, cu_seqlens_cpu)
    if bounds is not None:
        check_bounds(bounds, x.shape[1], may_end_early=may_end_early)
    return bounds
