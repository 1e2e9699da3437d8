"""Delta-rule linear attention: Kimi Delta Attention, Gated DeltaNet and the short convolution beside them.

Signatures are those of flash-linear-attention; see `explain` for what runs where.
"""

from __future__ import annotations

from . import nn
from ._version import __version__
from .backends import Explanation, explain, get_backend, set_backend, use_backend
from .conv import causal_conv1d, causal_conv1d_update
from .gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .kda import chunk_kda, fused_kda_gate, fused_recurrent_kda
from .patch import patch_fla, unpatch_fla
from .support import UnsupportedError, Verdict
from .warm import warmup

OPS = (
    "chunk_kda",
    "fused_recurrent_kda",
    "fused_kda_gate",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "causal_conv1d",
    "causal_conv1d_update",
)
"""Names of the public ops."""

__all__ = [
    "OPS",
    "Explanation",
    "UnsupportedError",
    "Verdict",
    "__version__",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "explain",
    "fused_kda_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "get_backend",
    "nn",
    "patch_fla",
    "set_backend",
    "unpatch_fla",
    "use_backend",
    "warmup",
]
