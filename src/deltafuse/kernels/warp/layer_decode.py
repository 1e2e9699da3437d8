"""One token of a Kimi Delta Attention layer, from its projections to what its output projection takes, in one launch.

For every sequence and value head, with x_q, x_k, x_v, f, beta, z the rows that the layer projects and a state S [K, V]:

    cache <- the last W inputs of a channel                      of q, k, v, in place
    q, k, v = silu(bias + sum_w weight[w] cache[w])
    o, S    = a token of the delta rule (`delta_decode`), q and k normalised, d = exp(gate(f)), b = limit sigmoid(beta)
    y       = o / sqrt(mean(o^2) + eps) weight sigmoid(z)

Roles: a CTA has one sequence and value head, and a warp for 16 columns of V. All threads convolve, a channel at a time; then every warp
runs the token of `delta_decode` on its columns; o^2 is summed over the warps.

Timeline: loads of the state | loads, sums and SiLU of the channels | barrier | token | state's stores | sum of o^2, barrier | y.

With `ratio` value heads a key head, a cluster of `ratio` CTAs shares the channels of q and k: each computes them for itself, and the first
one writes their caches once all have read (cluster barrier).

Constraints: those of `delta_decode`; V up to 384 for K = 64, 256 for K = 128, 128 for K = 256; W 2 or 4; ratio 1, 2, 4 or 8; caches
[N, D, W] contiguous in their last two dimensions and aligned to W elements, weights [D, W] contiguous likewise; all other rows contiguous.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...tile.gate import sigmoid
from ...tile.lanes import sum_lanes
from ...tile.ptx import fma, load_shared, rsqrt, select
from ...tile.uncached import load_if, store_uncached
from ..config import DecodeConfig, LayerDecodeConfig
from .delta_decode import COLUMNS, TYPES, WARPS, DeltaDecode, address_of, load_one_if, one, packed, unpacked


class LayerDecode(DeltaDecode):
    """The kernel for one `LayerDecodeConfig`."""

    def __init__(self, config: LayerDecodeConfig) -> None:
        c = self.layer = config
        if (
            c.conv_size not in (2, 4)
            or c.ratio not in (1, 2, 4, 8)
            or c.value_dim // COLUMNS > WARPS[c.key_dim * COLUMNS // 32][0]
        ):
            raise ValueError(
                f"`config`: got {c}; allowed: conv_size 2 or 4, ratio 1, 2, 4 or 8, few enough columns of V"
            )
        super().__init__(
            DecodeConfig(
                dtype=c.dtype, key_dim=c.key_dim, value_dim=c.value_dim, gate=c.gate, gate_dtype=c.dtype, beta_dtype=c.dtype,
                a_log=c.a_log, dt_bias=c.dt_bias, l2norm=True, beta_sigmoid=True, state_dtype=c.state_dtype,
                final_dtype=c.final_dtype, store="last" if c.final else "", state_v_first=c.state_v_first, single=True,
                warps=c.value_dim // COLUMNS,
            )
        )  # fmt: skip
        self.conv_type, self.cache_type = TYPES[c.conv_dtype], TYPES[c.cache_dtype]
        self.threads = 32 * self.config.warps
        self.channels = 2 * c.key_dim + c.value_dim
        self.rounds = -(-self.channels // self.threads)

    @cute.jit
    def __call__(
        self,
        xq: cute.Tensor,
        xk: cute.Tensor,
        xv: cute.Tensor,
        cache_q: cute.Tensor,
        cache_k: cute.Tensor,
        cache_v: cute.Tensor,
        weight_q: cute.Tensor,
        weight_k: cute.Tensor,
        weight_v: cute.Tensor,
        bias_q: cute.Tensor | None,
        bias_k: cute.Tensor | None,
        bias_v: cute.Tensor | None,
        f: cute.Tensor,
        beta: cute.Tensor,
        z: cute.Tensor,
        norm: cute.Tensor | None,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        state: cute.Tensor | None,
        y: cute.Tensor,
        final: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        eps: Float32,
        stream,
    ):
        """Launch: a CTA for a sequence and value head, a cluster for a key head."""
        heads = beta.shape[1]
        by_heads = cute.fast_divmod_create_divisor_v2(heads)
        caches, weights, biases = (cache_q, cache_k, cache_v), (weight_q, weight_k, weight_v), (bias_q, bias_k, bias_v)
        self.layer_kernel(
            (xq, xk, xv), caches, weights, biases, f, beta, z, norm, a_log, dt_bias, state, y, final, scale, lower_bound, beta_limit,
            eps, by_heads,
        ).launch(
            grid=(beta.shape[0] * heads, 1, 1), block=(self.threads, 1, 1), cluster=(self.layer.ratio, 1, 1), stream=stream,
            min_blocks_per_mp=self.blocks_a_multiprocessor, preferred_smem_carveout=25,
        )  # fmt: skip

    @cute.kernel
    def layer_kernel(
        self,
        inputs: tuple,
        caches: tuple,
        weights: tuple,
        biases: tuple,
        mF: cute.Tensor,
        mBeta: cute.Tensor,
        mZ: cute.Tensor,
        mNorm: cute.Tensor | None,
        mA: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mS: cute.Tensor | None,
        mY: cute.Tensor,
        mFinal: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        eps: Float32,
        by_heads: cute.FastDivmodDivisorV2,
    ):
        K, V = const_expr(self.config.key_dim), const_expr(self.config.value_dim)
        unit, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = tid // 32, tid % 32
        n = Int32(unit // by_heads)
        head = unit - n * mBeta.shape[1]
        smem = cutlass.memory.SmemAllocator()
        sVectors = smem.allocate_tensor(Float32, cute.make_layout((K, self.vectors * self.config.warps)), 16)
        sChannels = smem.allocate_tensor(Float32, cute.make_layout((self.channels,)), 16)
        sSums = smem.allocate_tensor(Float32, cute.make_layout((self.config.warps,)), 16)
        v0, r, c, column = warp * COLUMNS, lane // self.column_groups, lane % self.column_groups, self.column(lane)
        rS = self.first_state(mS, n, head, v0, r, c)

        gates = self.gates(mA, mBias, lower_bound, head, lane)
        raw, beta, z = self.rows(mF, mBeta, mZ, n, head, v0 + column, lane)
        rMoved = cute.make_rmem_tensor((self.rounds, self.cache_words), Uint32)
        self.convolve(rMoved, inputs, caches, weights, biases, sChannels, n, head, tid)
        if const_expr(self.layer.ratio > 1):
            cute.arch.cluster_arrive()
        cute.arch.sync_threads()
        q, k = self.shared_vector(sChannels, 0, lane), self.shared_vector(sChannels, K, lane)
        token = self.combined(q, k, [sChannels[2 * K + v0 + column]], raw, [beta], gates, scale, beta_limit)
        vectors = Int32(sVectors.iterator.toint()) + warp * (self.vectors * K * 4)
        (o,), deltas = self.sums(rS, token, vectors, lane, r, c)
        if const_expr(self.layer.final):
            self.write_update(rS, address_of(mFinal, n, head), token[1], deltas, vectors, v0, r, c)
        # y = o / sqrt(mean(o^2) + eps) weight sigmoid(z), right in lanes 16 to 31
        square = sum_lanes(select(lane // 16, o * o, 0.0))
        if lane == 0:
            sSums[warp] = square
        cute.arch.sync_threads()
        total = Float32(0.0)
        for i in cutlass.range_constexpr(self.config.warps):
            total = total + load_shared(sSums.iterator.toint(), 4 * i, 1)[0]
        y = o * rsqrt(fma(total, 1.0 / V, eps)) * sigmoid(z)
        if const_expr(mNorm is not None):
            y = y * Float32(mNorm[v0 + column])
        if lane >= 16:
            mY[n, head * V + v0 + column] = y.to(self.io)
        if const_expr(self.layer.ratio > 1):
            cute.arch.cluster_wait()
        self.move_caches(rMoved, caches, n, head, tid)

    # ---- convolutions ----------------------------------------------------------------------------------------------------------
    @property
    def cache_words(self) -> int:
        """Registers of the last W inputs of a channel."""
        return self.layer.conv_size * self.cache_type.width // 32

    def source(self, i, tid, head):
        """Of a thread's channel in one round: (whether there is one, which of q, k, v, its number there)."""
        K, V = self.config.key_dim, self.config.value_dim
        key_head = head // self.layer.ratio
        channel = tid + i * self.threads
        first = (key_head * K, key_head * K - K, head * V - 2 * K)
        return channel, first

    @cute.jit
    def convolve(self, rMoved, inputs, caches, weights, biases, sChannels, n, head, tid):
        """Every channel's output into shared memory; its new cache stays in registers."""
        loaded = []
        for i in cutlass.range_constexpr(self.rounds):
            channel, first = self.source(i, tid, head)
            x, cache, weight, bias = Int64(0), Int64(0), Int64(0), Int64(0)
            if channel < self.config.key_dim:
                x, cache, weight, bias = self.addresses(inputs, caches, weights, biases, 0, n, channel + first[0])
            elif channel < 2 * self.config.key_dim:
                x, cache, weight, bias = self.addresses(inputs, caches, weights, biases, 1, n, channel + first[1])
            elif channel < self.channels:
                x, cache, weight, bias = self.addresses(inputs, caches, weights, biases, 2, n, channel + first[2])
            valid = Int32(channel < self.channels)
            words = [load_one_if(self.io, x, valid), self.vector(self.cache_type, cache, valid)]
            words.append(self.vector(self.conv_type, weight, valid))
            if const_expr(self.layer.conv_bias):
                words.append(load_one_if(self.conv_type, bias, valid))
            loaded.append(words)
        for i in cutlass.range_constexpr(self.rounds):
            channel, _ = self.source(i, tid, head)
            total = self.convolved(rMoved, i, *loaded[i])
            if channel < self.channels:
                sChannels[channel] = total * sigmoid(total)

    def convolved(self, rMoved, i, x, cache, weight, bias=None):
        """bias + sum_w weight[w] cache[w], with x the cache's last."""
        moved = [*unpacked(self.cache_type, cache)[1:], one(self.io, x)]
        for w, word in enumerate(packed(self.cache_type, moved)):
            rMoved[i, w] = word
        taps = unpacked(self.conv_type, weight)
        total = moved[0] * taps[0]
        for value, tap in zip(moved[1:], taps[1:], strict=True):
            total = fma(value, tap, total)
        return total if bias is None else total + one(self.conv_type, bias)

    def addresses(self, inputs, caches, weights, biases, which, n, channel):
        def at(x):
            return cute.domain_offset((channel, 0), x).iterator.toint()

        bias = Int64(0)
        if self.layer.conv_bias:
            bias = Int64(cute.domain_offset((channel,), biases[which]).iterator.toint())
        x = Int64(cute.domain_offset((channel,), inputs[which][n, None]).iterator.toint())
        return x, Int64(at(caches[which][n, None, None])), Int64(at(weights[which])), bias

    def vector(self, dtype, address, valid):
        """W numbers as words."""
        return load_if(address, 0, self.layer.conv_size * dtype.width // 32, valid)

    @cute.jit
    def move_caches(self, rMoved, caches, n, head, tid):
        """The channels' new caches; those of q and k by the first CTA of their cluster."""
        for i in cutlass.range_constexpr(self.rounds):
            channel, first = self.source(i, tid, head)
            cache = Int64(0)
            if head % self.layer.ratio == 0:
                if channel < self.config.key_dim:
                    cache = self.cache_address(caches[0], n, channel + first[0])
                elif channel < 2 * self.config.key_dim:
                    cache = self.cache_address(caches[1], n, channel + first[1])
            if channel >= 2 * self.config.key_dim and channel < self.channels:
                cache = self.cache_address(caches[2], n, channel + first[2])
            if cache != 0:
                store_uncached(cache, 0, [rMoved[i, w] for w in range(self.cache_words)])

    def cache_address(self, mCache, n, channel):
        return Int64(cute.domain_offset((channel, 0), mCache[n, None, None]).iterator.toint())

    def shared_vector(self, sChannels, first, lane):
        """This lane's keys of q or k."""
        address = Int32(sChannels.iterator.toint()) + lane * (4 * self.own)
        return [x for i in range(0, self.own, 4) for x in load_shared(address, 4 * (first + i), min(self.own, 4))]

    # ---- the other rows --------------------------------------------------------------------------------------------------------
    def rows(self, mF, mBeta, mZ, n, head, column, lane):
        """Raw gates of this lane's keys, raw beta, and z of its column."""
        words = self.vector_words(self.io)
        at = cute.domain_offset((head * self.config.key_dim + lane * self.own,), mF[n, None]).iterator.toint()
        raw = unpacked(self.io, load_if(at, 0, words, Int32(1)))
        beta = mBeta[n, head].to(Float32)
        return raw, beta, mZ[n, head * self.config.value_dim + column].to(Float32)


def compile(config: LayerDecodeConfig):
    """The launch function for `config`.

    `(xq, xk, xv, 3 caches, 3 weights, 3 biases | None, f, beta, z, norm | None, a_log | None, dt_bias | None, state | None, y,
    final | None, scale, lower_bound, beta_limit, eps)`: xq, xk [N, H * K]; xv, z, y [N, HV * V]; caches [N, D, W], written; weights
    [D, W]; biases [D]; f [N, HV * K]; beta [N, HV]; norm [V]; a_log [HV] and dt_bias [HV * K] in fp32; state, final [N, HV, V, K] or
    [N, HV, K, V].
    """
    c = config
    sequences, heads, q_width, f_width, v_width = (cute.sym_int() for _ in range(5))

    def row(width, dtype=c.dtype):
        return make_fake_tensor(
            TYPES[dtype], (sequences, width), stride=(cute.sym_int64(), 1), assumed_align=TYPES[dtype].width // 8
        )

    def cache(width):
        return make_fake_tensor(
            TYPES[c.cache_dtype],
            (sequences, width, c.conv_size),
            stride=(cute.sym_int64(), c.conv_size, 1),
            assumed_align=4,
        )

    def flat(width, dtype):
        return make_fake_tensor(TYPES[dtype], (width,), stride=(1,), assumed_align=TYPES[dtype].width // 8)

    def weight(width):
        return make_fake_tensor(TYPES[c.conv_dtype], (width, c.conv_size), stride=(c.conv_size, 1), assumed_align=4)

    def states(dtype):
        rows, width = (c.value_dim, c.key_dim) if c.state_v_first else (c.key_dim, c.value_dim)
        strides = (cute.sym_int64(), cute.sym_int64(), width, 1)
        return make_fake_tensor(TYPES[dtype], (sequences, heads, rows, width), stride=strides, assumed_align=16)

    widths = (q_width, q_width, v_width)
    return cute.compile(
        LayerDecode(c),
        row(q_width),
        row(q_width),
        row(v_width),
        *(cache(w) for w in widths),
        *(weight(w) for w in widths),
        *(flat(w, c.conv_dtype) if c.conv_bias else None for w in widths),
        row(f_width),
        row(heads),
        row(v_width),
        flat(c.value_dim, c.norm_dtype) if c.norm_dtype else None,
        flat(heads, "float32") if c.a_log else None,
        flat(f_width, "float32") if c.dt_bias else None,
        states(c.state_dtype) if c.state_dtype else None,
        row(v_width),
        states(c.final_dtype) if c.final else None,
        Float32(1.0),
        Float32(0.0),
        Float32(1.0),
        Float32(1e-5),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
