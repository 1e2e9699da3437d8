"""Recurrent states of a stack of layers, for generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch


class LayerCache(Protocol):
    """What the layers need of a cache: `nn.Cache` and the caches of flash-linear-attention both have it."""

    def __len__(self) -> int: ...

    def __getitem__(self, layer_idx: int) -> dict[str, Any] | None: ...

    def update(self, *, layer_idx: int, recurrent_state: Any, conv_state: Any, offset: int) -> Any: ...


class Cache:
    """The recurrent and convolution states that each layer hands from one call to the next.

    `cache[layer_idx]` is a dict with `recurrent_state` `[N, HV, V, K]` and `conv_state`, a tuple of the
    `[N, D, W]` states of the q, k and v convolutions (None without convolutions). Its size does not grow with
    the number of tokens.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []
        self._seen: list[int] = []

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any]:
        if not 0 <= layer_idx < len(self._states):
            raise KeyError(f"layer_idx must be below {len(self._states)}, the number of layers seen, got {layer_idx}")
        return self._states[layer_idx]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._states)

    def update(
        self,
        recurrent_state: torch.Tensor | None = None,
        conv_state: tuple[torch.Tensor, ...] | None = None,
        layer_idx: int = 0,
        offset: int = 1,
    ) -> dict[str, Any]:
        """Store the states of one layer after `offset` more tokens; a state given as None stays what it was."""
        while len(self._states) <= layer_idx:
            self._states.append({"recurrent_state": None, "conv_state": None})
            self._seen.append(0)
        state = self._states[layer_idx]
        if recurrent_state is not None:
            state["recurrent_state"] = recurrent_state
        if conv_state is not None:
            state["conv_state"] = conv_state
        self._seen[layer_idx] += offset
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens (padding included) that layer `layer_idx` has seen."""
        return self._seen[layer_idx] if layer_idx < len(self._seen) else 0

    def reset(self) -> None:
        """Forget everything."""
        self._states.clear()
        self._seen.clear()
