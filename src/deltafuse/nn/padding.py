"""Padded batches as packed sequences, and back."""

from __future__ import annotations

import torch

from ..problem import describe, fail


def unpad(x: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take the tokens that a mask keeps out of a padded batch.

    Args:
        x: `[B, T, D]`.
        attention_mask: `[B, L]` with `L >= T`, nonzero for a token and 0 for padding; its last T columns are of `x`
            (generation hands over the mask of the tokens before, too).

    Returns:
        The tokens `[1, S, D]`, their positions in the flattened batch `[S]`, and the bounds of the B sequences
        `[B + 1]` (int32).

    Raises:
        ValueError: a mask of another shape.
    """
    batch, length, _ = x.shape
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        allowed = f"shape [B, L] with B = {batch} and L >= {length}, nonzero for a token and 0 for padding"
        fail("attention_mask", describe(attention_mask), allowed)
    mask = attention_mask[:, -length:] != 0 if length else attention_mask[:, :0] != 0
    lengths = mask.sum(-1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    indices = mask.flatten().nonzero().squeeze(-1)
    return x.flatten(0, 1).index_select(0, indices).unsqueeze(0), indices, cu_seqlens


def repad(x: torch.Tensor, indices: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Put tokens `[1, S, D]` back to their positions in a batch `[B, T, D]` of zeros; the inverse of `unpad`."""
    padded = x.new_zeros(batch * length, x.shape[-1])
    return padded.index_copy(0, indices, x.squeeze(0)).view(batch, length, -1)
