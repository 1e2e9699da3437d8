"""Layers over the delta-rule ops, with the parameter names and shapes of flash-linear-attention's layers."""

from __future__ import annotations

from .cache import Cache
from .conv import ShortConvolution
from .gdn import GatedDeltaNet
from .kda import KimiDeltaAttention
from .lm import KimiDeltaLM
from .norm import RMSNorm, RMSNormGated

__all__ = [
    "Cache",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "KimiDeltaLM",
    "RMSNorm",
    "RMSNormGated",
    "ShortConvolution",
]
