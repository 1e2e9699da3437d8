"""Segments' transitions and final states to initial states, against float64."""

from __future__ import annotations

import kernels
import pytest
import torch

from deltafuse.kernels.config import CombineConfig
from ptxemu import emulate, launch


def _compiled(config: CombineConfig):
    from deltafuse.kernels.warp import kda_combine

    return kda_combine.compile(config)


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("initial", "final"), [(True, True), (False, False), (True, False), (False, True)])
def test_equals_the_recurrence_of_segments(emulated, key_dim: int, v_first: bool, initial: bool, final: bool) -> None:
    compiled = kernels.need("sm_90a", _compiled, CombineConfig(key_dim, v_first, initial, final))
    sequences, heads, value_dim, segments = 2, 2, 32, 3
    units = sequences * segments
    random = torch.Generator().manual_seed(key_dim)
    ends = torch.randn(units, heads, value_dim, key_dim, generator=random)
    transitions = torch.randn(units, heads, key_dim, key_dim, generator=random) / key_dim**0.5
    h0 = torch.randn(sequences, heads, value_dim, key_dim, generator=random)

    state = h0.double() if initial else torch.zeros_like(h0, dtype=torch.float64)
    want = []
    for s in range(segments):
        want.append(state)
        state = state @ transitions[s::segments].double() + ends[s::segments].double()
    want = torch.stack(want, 1).reshape(units, heads, value_dim, key_dim)

    def layout(x: torch.Tensor) -> torch.Tensor:
        return x.float() if v_first else x.float().transpose(-1, -2).contiguous()

    starts = torch.full_like(layout(want), float("nan"))
    ht = torch.full_like(layout(h0), float("nan"))
    emulated("sm_90a")
    compiled(ends, transitions, layout(h0) if initial else None, starts, ht if final else None, None, segments)
    for name, got, expected in (("starts", starts, want), ("ht", ht, state)):
        if name == "ht" and not final:
            continue
        got = got if v_first else got.transpose(-1, -2)
        error = (got.double() - expected).norm() / expected.norm()
        assert error < 6e-6, name


def test_an_emulated_block_forgets_tensors_of_calls_before() -> None:
    """Else a kernel could write to memory that has been given to something else since, and no fault would say so."""
    function = kernels.need("sm_90a", _compiled, CombineConfig(64))
    with emulate("sm_90a"):
        for _ in range(3):
            ends, maps, starts = (torch.zeros(2, 1, 64, 64) for _ in range(3))
            function(ends, maps, None, starts, None, None, 2)
            assert launch._session is not None
            assert len(launch._session.memory.ranges) == 3
