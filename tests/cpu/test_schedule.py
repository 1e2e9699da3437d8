"""How the scan is spread over a GPU: every schedule covers its sequences, and the cost model cuts where cutting pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafuse.kernels.config import CHUNK
from deltafuse.kernels.schedule import Costs, schedule

SIZES = st.tuples(
    st.integers(1, 2000), st.integers(1, 200_000), st.integers(1, 128), st.sampled_from([64, 128]), st.integers(1, 8)
)


@given(SIZES, st.integers(1, 200), st.booleans())
def test_every_chunk_of_the_longest_sequence_is_covered_once(sizes: tuple[int, ...], sms: int, packed: bool) -> None:
    sequences, tokens, heads, key_dim, tiles = sizes
    plan = schedule(sequences, tokens, heads, key_dim, 64 * tiles, sms, packed=packed)
    chunks = -(-tokens // CHUNK)
    assert plan.segments * plan.segment_chunks >= chunks
    assert (plan.segments - 1) * plan.segment_chunks < chunks
    assert 64 * tiles % (plan.tile * plan.cluster) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_full_gpu_is_left_alone(packed: bool) -> None:
    assert schedule(1, 8192, 66, 128, 128, 132, packed=packed).segments == 1


def test_few_heads_are_cut() -> None:
    plan = schedule(1, 32_768, 8, 128, 128, 132)
    assert plan.segments > 1
    assert schedule(1, 256, 8, 128, 128, 132).segments == 1, "too short to cut"
    assert schedule(1, 32_768, 8, 128, 128, 132, costs=Costs(combine=1e9)).segments == 1, "where combining is dear"


def test_packed_sequences_may_be_one_long_one() -> None:
    plan = schedule(3, 32_768, 8, 128, 128, 132, packed=True)
    assert plan.segments * plan.segment_chunks * CHUNK >= 32_768
