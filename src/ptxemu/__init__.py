"""Run CUDA kernels that were compiled to PTX on a CPU, and judge what they do.

    import ptxemu
    ptxemu.setup("sm_90a")                       # before cutlass is imported
    compiled = cute.compile(...)
    ptxemu.run(compiled, *cpu_tensors)           # raises the first fault

or, around code that launches by itself, `with ptxemu.emulate("sm_90a"):`.
"""

from __future__ import annotations

from .dsl import setup
from .errors import (
    BarrierFault,
    Deadlock,
    EmulatorError,
    MemoryFault,
    ProxyFault,
    RaceFault,
    TensorFault,
    Unsupported,
    WgmmaFault,
)
from .launch import Launched, Options, emulate, run, run_ptx
from .maps import im2col_map, tiled_map
from .textures import Texture, surface, texture

__all__ = [
    "BarrierFault",
    "Deadlock",
    "EmulatorError",
    "Launched",
    "MemoryFault",
    "Options",
    "ProxyFault",
    "RaceFault",
    "TensorFault",
    "Texture",
    "Unsupported",
    "WgmmaFault",
    "emulate",
    "im2col_map",
    "run",
    "run_ptx",
    "setup",
    "surface",
    "texture",
    "tiled_map",
]
