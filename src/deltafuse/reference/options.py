"""What a delta-rule computation is told besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GATE_LOG = "log"
GATE_SOFTPLUS = "softplus"
GATE_BOUNDED = "bounded"

CHUNKS_A_WINDOW = 8
"""Chunks of one sequence that the chunked form holds at once: few enough for a core's cache."""


@dataclass(frozen=True)
class DeltaOptions:
    """The numbers and switches of one call, the same for the forward and the backward pass.

    `gate` says what `g` is: `"log"` (the decay's logarithm), or a raw value that still goes through the `"softplus"` or the
    `"bounded"` gate. `beta_limit` is 1, or 2 where negative eigenvalues are allowed.
    """

    scale: float
    gate: str = GATE_LOG
    lower_bound: float = 0.0
    l2norm: bool = False
    beta_sigmoid: bool = False
    beta_limit: float = 1.0
    state_v_first: bool = False
    chunk_size: int = 64
    keep_every: int = CHUNKS_A_WINDOW
    """The forward pass keeps the state at the start of every so-many-th chunk but the first, for the backward pass."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of all sums, products and states: float64 for float64 input, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kept_states(batch: int, tokens: int, options: DeltaOptions) -> int:
    """Room for the states that a call keeps for its backward pass.

    A sequence of `n` tokens has `floor((n - 1) / stride)` kept states for a stride in tokens, so the total is bounded by the
    number of tokens, whatever the number of sequences. Two more are never used: torch.compile would compile again for sizes of 0 and 1, and
    torch.export refuse a range of tokens that has them.
    """
    return 2 + batch * (max(tokens - 1, 0) // (options.chunk_size * options.keep_every))


L2NORM_EPS = 1e-6


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
