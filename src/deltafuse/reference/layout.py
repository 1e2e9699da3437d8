"""How the chunks of all sequences lie in memory: by step, so that the serial scan takes one slice a step.

Chunk `c` of every sequence that has one belongs to step `c`. Sequences are ordered by their number of chunks, longest
first, so the sequences that are still running at a step are always a prefix of that order and a state tensor
`[N, HV, K, V]` in that order is sliced, never gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkLayout:
    """Index tables of those sequences of a call that have chunks of `chunk` rows.

    `order` `[ranks]`: sequence at each rank. `offsets` (steps + 1): first chunk of every step. `tokens` `[chunks, C]`: row of the
    flattened `[B * T]` token axis, or `B * T` where the chunk reaches past its sequence's end. `padded`: for every chunk
    whether it does. `sequence_major` `[chunks]`: the chunk's place when the chunks of all
    sequences are counted sequence by sequence.
    """

    chunk: int
    order: Tensor
    offsets: list[int]
    tokens: Tensor
    padded: list[bool]
    sequence_major: Tensor
    total_tokens: int

    @property
    def steps(self) -> int:
        return len(self.offsets) - 1

    def active(self, step: int) -> int:
        """Number of sequences that have a chunk at this step."""
        return self.offsets[step + 1] - self.offsets[step] if step < self.steps else 0


def sequence_bounds(batch: int, tokens: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Start and length of every sequence on the flattened token axis, as int64 tensors on the CPU."""
    if cu_seqlens is None:
        return torch.arange(batch) * tokens, torch.full((batch,), tokens, dtype=torch.int64)
    bounds = cu_seqlens.detach().to("cpu", torch.int64)
    return bounds[:-1], bounds[1:] - bounds[:-1]


def chunk_layouts(
    batch: int, tokens: int, cu_seqlens: Tensor | None, chunk: int, device: torch.device
) -> list[ChunkLayout]:
    """The tables of `batch` sequences of `tokens` tokens, or of the packed sequences of `cu_seqlens`.

    A sequence that fits into half a chunk takes a shorter one, of one row for a token of packed decoding (the decay tree wants
    powers of two). There is a layout for each size of chunk, the longest first; only the first may have sequences of more
    than one chunk.
    """
    starts, lengths = sequence_bounds(batch, tokens, cu_seqlens)
    sizes = torch.full_like(lengths, chunk)
    while (shorter := (lengths <= sizes // 2) & (sizes > 1)).any():
        sizes[shorter] //= 2
    chunks = (lengths + chunk - 1) // chunk
    first_chunk = torch.cat([torch.zeros(1, dtype=torch.int64), chunks.cumsum(0)])[:-1]
    groups = [(int(size), (sizes == size).nonzero().squeeze(1)) for size in sizes.unique().flip(0)]
    return [
        _layout(members, starts, lengths, first_chunk, size, batch * tokens, device)
        for size, members in groups or [(chunk, lengths.new_empty(0))]
    ]


def _layout(
    members: Tensor, starts: Tensor, lengths: Tensor, first_chunk: Tensor, chunk: int, total: int, device: torch.device
) -> ChunkLayout:
    chunks = (lengths[members] + chunk - 1) // chunk
    rank = torch.argsort(chunks, descending=True, stable=True)
    order = members[rank]
    steps = int(chunks.max()) if chunks.numel() else 0
    # A step's count of running sequences: those with more chunks than the step's index.
    counts = chunks.numel() - torch.searchsorted(chunks.sort().values, torch.arange(steps), right=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    step = torch.repeat_interleave(torch.arange(steps), counts)
    sequence = order[torch.arange(step.numel()) - offsets[step]]
    remaining = lengths[sequence] - step * chunk
    inside = torch.arange(chunk)
    rows = (starts[sequence] + step * chunk)[:, None] + inside
    rows = rows.masked_fill(inside >= remaining[:, None], total)
    return ChunkLayout(
        chunk=chunk,
        order=order.to(device, non_blocking=True),
        offsets=offsets.tolist(),
        tokens=rows.to(device, non_blocking=True),
        padded=(remaining < chunk).tolist(),
        sequence_major=(first_chunk[sequence] + step).to(device, non_blocking=True),
        total_tokens=total,
    )
