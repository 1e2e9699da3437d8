"""KDA on Hopper, sequences cut into segments: every segment's final state from zero and its map of states, in one launch.

Two passes of `kda_scan`, whose CTAs have nothing to do with each other:

    ends   the state that leaves a segment which starts from zero, [K, V]; or early (`tile.early`)
    maps   what a segment makes of the identity without v, [K, K]

Each is computed where `warp.kda_combine` wants it and left unwritten elsewhere. Both passes find by the bounds what is wanted, since
neither may read what the other writes; the ends write down the segments' codes.

Work: CTAs of units, value heads and 64 columns each, numbered as in `kda_scan`, those for ends first. Shared memory, pipelines and threads
are those of the ends; the maps do not use what is there for v. Two CTAs share an SM (K = 128: 168 registers a thread, two
stages of operands, 98 KB), so that a GPU holds all CTAs of a cut sequence at once: they leave sooner where they have nothing to do, and
hide each other's latency where they have.

Constraints: as `kda_scan`; clusters of two where both K and V are multiples of 128. A launch has one size of clusters, for which a CTA's
pipelines are made before it looks for its pass: where only one of K and V is a multiple of 128, every CTA fetches all of its operands.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...tile.arguments import DTYPES, dense, row_major
from ..config import ScanConfig, SegmentsConfig
from .kda_scan import KdaScan

BLOCKS = 2
"""CTAs an SM."""


class KdaSegments:
    """The kernel for one `SegmentsConfig`; `stages`, `v_stages` override the depth of its pipelines."""

    def __init__(self, config: SegmentsConfig, *, stages: int | None = None, v_stages: int | None = None) -> None:
        self.config = config
        common = dict(vars(config), state_v_first=True, readout=False, final=True, early="decide")
        self.ends = KdaScan(ScanConfig(**common), stages=stages, v_stages=v_stages, blocks=BLOCKS)
        self.maps = KdaScan(ScanConfig(**common, transition=True), stages=self.ends.stages, v_stages=self.ends.v_stages)

    @cute.jit
    def __call__(
        self,
        factors: cute.Tensor,
        scores: cute.Tensor,
        decay: cute.Tensor,
        v: cute.Tensor,
        cu_seqlens: cute.Tensor | None,
        ends: cute.Tensor,
        maps: cute.Tensor,
        bound: cute.Tensor,
        early: cute.Tensor,
        segments: Int32,
        segment_chunks: Int32,
        stream,
    ):
        """Launch: one CTA for a unit, value head and 64 columns of a state or a map."""
        sequences = v.shape[0]
        if const_expr(cu_seqlens is not None):
            sequences = cu_seqlens.shape[0] - 1
        tiles = v.shape[3] // 64
        pairs = sequences * segments * factors.shape[1]
        load = cpasync.CopyBulkTensorTileG2SOp()
        tma_v, tV = self.ends.tensor_copy(load, v, (3, 1, 2, 0), self.ends.layouts().v)
        self.kernel(
            factors, scores, decay, cu_seqlens, bound, early, ends, maps, tma_v, tV, Int32(sequences), Int32(tiles), Int32(pairs * tiles),
            segments, segment_chunks,
        ).launch(
            grid=(pairs * (tiles + self.ends.panels), 1, 1),
            block=(self.ends.threads, 1, 1),
            cluster=(self.config.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=BLOCKS,
            preferred_smem_carveout=100,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mF: cute.Tensor,
        mM: cute.Tensor,
        mD: cute.Tensor,
        mCu: cute.Tensor | None,
        mBound: cute.Tensor,
        mEarly: cute.Tensor,
        mEnds: cute.Tensor,
        mMaps: cute.Tensor,
        tma_v: cute.CopyAtom,
        tV: cute.Tensor,
        sequences: Int32,
        tiles: Int32,
        first_map: Int32,
        segments: Int32,
        segment_chunks: Int32,
    ):
        shared = self.ends.start()
        self.ends.ready()
        cute.arch.griddepcontrol_wait()
        block, _, _ = cute.arch.block_idx()
        length = (segments, segment_chunks)
        if block < first_map:
            at = self.ends.unit(block, mF, mCu, mBound, mEarly, None, sequences, tiles, *length)
            self.ends.work(*shared, at, mF, mM, mD, None, mEarly, mEnds, None, tma_v, tV, None, None, None, None)
        else:
            at = self.maps.unit(
                block - first_map, mF, mCu, mBound, None, None, sequences, Int32(self.maps.panels), *length
            )
            self.maps.work(*shared, at, mF, mM, mD, None, None, mMaps, None, None, None, None, None, None, None)
        self.ends.finish()


def compile(config: SegmentsConfig, **tuning):
    """The launch function for `config`: `(factors, scores, decay, v, cu_seqlens, ends, maps, bound, early, segments, segment_chunks)`.

    cu_seqlens is None where sequences are not packed; ends and maps are transposed, fp32 [units, HV, V, K] and
    [units, HV, K (in), K (out)], bound fp32 [slots, HV], early int32 [units, HV]. `tuning` is `KdaSegments`'s.
    """
    kernel = KdaSegments(config, **tuning)
    dt, K = DTYPES[config.dtype], config.key_dim
    slots, heads, batch, tokens, value_dim, units = (cute.sym_int() for _ in range(6))
    return cute.compile(
        kernel,
        row_major(dt, (slots, heads, 3, K // 64, 64, 64), (1, 2, 3, 4)),
        row_major(dt, (slots, heads, config.panels, 64, 64), (1, 2, 3)),
        row_major(Float32, (slots, heads, K), (1,)),
        row_major(dt, (batch, tokens, heads, value_dim)),
        make_fake_tensor(DTYPES[config.cu_seqlens], (cute.sym_int(),), stride=(1,)) if config.cu_seqlens else None,
        row_major(Float32, (units, heads, value_dim, K)),
        row_major(Float32, (units, heads, K, K)),
        dense(Float32, (slots, heads)),
        dense(Int32, (units, heads)),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
