"""Kernels made ready for their first launch, on one GPU or several.

A launch itself is `cache.load(kernel, config, arch)(*arguments)`: a look-up, then compiled host code that reads the tensors, takes torch's
current stream of their device, makes that device current for the launch and leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import cache


def prepare(kernels: Iterable[tuple[str, Any]], arch: str, devices: Iterable[torch.device]) -> tuple[str, ...]:
    """Have kernels, each a name and its config, compiled or loaded, and their code loaded on every device. Returns their names.

    Afterwards their launches neither compile nor load, and may be captured in a CUDA graph at once.
    """
    wanted = list(dict.fromkeys(kernels))
    torch.cuda.init()
    for device in devices:
        with torch.cuda.device(device):
            for kernel, config in wanted:
                cache.preload(kernel, config, arch)
    return tuple(kernel for kernel, _ in wanted)
