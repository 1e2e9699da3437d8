"""The delta rule token by token: decoding, for KDA and Gated DeltaNet.

For every sequence and value head, a state S [K, V] that is read, taken through the sequence's tokens and written:

    q, k  <- q / |q|, k / |k|        where asked for;   d = exp(gate(g)) [K] or a number;   b = beta, or limit sigmoid(beta)
    p, r  = (d k)^T S, (d q)^T S     [V]
    delta = b (v - p)
    o     = scale (r + (q . k) delta)
    S     <- diag(d) S + k delta^T

Neither sum over K needs delta, so a token takes one pass over the state, one reduction and one update. All arithmetic is fp32; states
are rounded to their dtype only where they are written.

Roles: a warp owns W = 16, 32 or 64 columns of V of one head and keeps their K x W elements in registers, K W / 32 a lane (single tokens of
16-bit states: as they were read, two a register); warps share nothing, and a CTA is `warps` of them side by side. Lane = r * C + c holds,
of every group of 4 (8) keys, those of row group r, and the columns of column group c:

    states [K, V], fp32      C = W / 4, 4 columns a lane; a load of the warp is 8 rows of 64 bytes, or 4 of 128
    states [K, V], 16 bits   C = W / 8, 8 columns a lane; 16 rows of 32 bytes, 8 of 64, or 4 of 128
    states [V, K]            C = 4, W / 4 columns a lane, groups of 4 (16 bits: 8) keys; 4 rows of 128 bytes

All accesses of states are 16 bytes a lane (but stores of states in another dtype than they were read in). p and r are summed over row
groups so that lanes 0 to 15 end with p of W / 16 columns each, lanes 16 to 31 with r: the former make delta, the latter o. The order of
the sums does not depend on W. d k, d q, k and d pass through shared memory, since every lane computes K / 32 of them and needs those of
its row group: 4 K floats a warp (k and q alone where d is a number: 2 K).

Narrow warps spread few sequences over all multiprocessors; wide ones read whole lines of [K, V] and make d k, d q half as often.

Timeline: slots | L2 is told of a later head's state | all loads of the state and of the first token | norms and gate | sums | reduction |
update | stores; the next token's loads are issued before the sums. Nothing waits for another warp.

A multiprocessor full of warps asks for up to 192 KB of fp32 states at once (96 KB of 16-bit ones), several times what hides the latency of
memory. More in flight does not help: requests queue at the memory, reads among writes, and warps wait for the queue. So of fp32 states,
where single tokens have wide warps, a multiprocessor holds `RESIDENT` bytes only (unused shared memory keeps more CTAs away), and a warp
has L2 fetch what is read when all that are resident have been done: memory reads on while they compute and write, and the next ones' loads
find their lines in L2. Those lines leave L2 first, since they are read once. Calls that the resident warps take at once fetch nothing.

No sequence (a first slot below 0, or outside the pool): o is 0 and no state is written. Tokens after the last of packed sequences: o is 0.

Constraints: K 64, 128 or 256 (at most 128 with more than 16 columns a warp); V a multiple of W; W = 64 for single tokens of 16-bit states
[K, V] alone; states contiguous in their last two dimensions, q, k, g and dt_bias in their last, these at addresses that are multiples of
K / 32 elements (at most 16 bytes), states at multiples of 16 bytes. A slot that a sequence of a launch writes must not be read by another.
"""

# mypy: ignore-errors

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...tile.gate import Gate, sigmoid
from ...tile.lanes import reduce_scatter, sum_lanes
from ...tile.ptx import asm, exp2, fma, load_shared, opaque, pack, rsqrt, store_global, store_shared, unpack
from ...tile.sequence import tokens_of
from ...tile.uncached import fetch_to_l2, first_out, load_half_if, load_if, load_uncached
from ..config import DecodeConfig

COLUMNS = 16
"""The fewest columns of V a warp."""
WARPS = {32: (24, 16, 16), 64: (16, 12, 8), 128: (12, 8, 8)}
"""Warps a multiprocessor by the registers that a lane's state takes: for single tokens, for more, for more with a state after each. A bound
on registers, which the compiler would otherwise spend on shorter stalls, and none that makes it spill."""
WARPS_PACKED = {16: 24, 32: 20, 64: 12, 128: 8}
"""The same for single tokens of 16-bit states, which need room for what is unpacked."""
SHARED = 228 << 10
"""Shared memory of a multiprocessor; the driver takes 1 KB of it a CTA."""
PADDED = 64 << 10
"""What of it is given to CTAs that fetch ahead: the size that the driver picks for `carveout`."""
RESIDENT = 96 << 10
"""Bytes of states that a multiprocessor holds where L2 fetches those that come after them."""
AHEAD = 115
"""How far ahead that is, in percent of the states that all multiprocessors hold: CTAs do not end in the order in which they began."""
L2NORM_EPS = 1e-6
TYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "int32": Int32, "int64": Int64}


def unpacked(dtype, words):
    """The fp32 values of 32-bit words of `dtype`."""
    if dtype is Float32:
        return [w.bitcast(Float32) for w in words]
    return [x for w in words for x in unpack(dtype, w)]


def packed(dtype, values):
    """The reverse of `unpacked`, rounded."""
    if dtype is Float32:
        return [x.bitcast(Uint32) for x in values]
    return [pack(dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]


def load_one_if(dtype, address, valid):
    """One number as a word, 0 where `valid` is 0."""
    if dtype is Float32:
        return load_if(address, 0, 1, valid, early=True)[0]
    return load_half_if(address, valid, early=True)


def one(dtype, word):
    return unpacked(dtype, [word])[0]


def half(dtype, word, which, again):
    """One of a word's two numbers. `again`: by instructions of its own, so that the compiler does not keep the first one's result."""
    if dtype is BFloat16 and again:
        return asm(f"prmt.b32 $0, $1, 0, {0x3244 if which else 0x1044};", [Float32], [word], volatile=False)
    if again:
        return -unpack(dtype, asm("xor.b32 $0, $1, 0x80008000;", [Uint32], [word], volatile=False))[which]
    return unpack(dtype, word)[which]


class DeltaDecode:
    """The kernel for one `DecodeConfig`."""

    def __init__(self, config: DecodeConfig) -> None:
        c = self.config = config
        if c.key_dim not in (64, 128, 256) or c.columns not in (16, 32, 64) or c.value_dim % c.columns:
            raise ValueError(
                f"`config`: got {c}; allowed: key_dim 64, 128 or 256, columns 16, 32 or 64, value_dim a multiple of them"
            )
        if c.columns > COLUMNS and c.key_dim == 256:
            raise ValueError(f"`config`: got {c}; allowed: columns 16 with key_dim 256")
        self.io, self.gate_type, self.beta_type = TYPES[c.dtype], TYPES[c.gate_dtype], TYPES[c.beta_dtype]
        self.read_type, self.write_type = TYPES[c.state_dtype or c.final_dtype], TYPES[c.final_dtype]
        run = 128 // self.read_type.width
        self.column_groups = 4 if c.state_v_first else c.columns // run
        self.columns = c.columns // self.column_groups
        self.row_groups = 32 // self.column_groups
        self.left = c.columns // COLUMNS
        self.group = run if c.state_v_first else 4
        self.groups = c.key_dim // self.row_groups // self.group
        self.chains = 1 if c.state_v_first else self.left
        self.keeps_packed = c.single and bool(c.state_dtype) and self.read_type.width == 16
        self.fetches_ahead = c.single and c.state_dtype == "float32" and c.columns == 2 * COLUMNS
        if c.columns == 4 * COLUMNS and (c.state_v_first or not self.keeps_packed):
            raise ValueError(f"`config`: got {c}; allowed: columns 64 for single tokens of 16-bit states [K, V]")
        self.own = c.key_dim // 32
        self.masks = [m for m in (16, 8, 4, 2) if m >= self.column_groups]
        self.vectors = 4 if c.per_key else 2
        self.packed_sequences = bool(c.cu_seqlens)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        g: cute.Tensor,
        beta: cute.Tensor,
        a_log: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        state: cute.Tensor | None,
        indices: cute.Tensor | None,
        accepted: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        out: cute.Tensor,
        final: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        stream,
    ):
        """Launch: a warp for a sequence, value head and 16, 32 or 64 columns of V."""
        sequences = v.shape[0]
        if const_expr(cu_seqlens is not None):
            sequences = cu_seqlens.shape[0] - 1
        blocks = sequences * v.shape[2] * self.blocks_a_head
        by_heads = cute.fast_divmod_create_divisor_v2(v.shape[2])
        by_ratio = cute.fast_divmod_create_divisor_v2(v.shape[2] // q.shape[2])
        self.kernel(
            q, k, v, g, beta, a_log, dt_bias, state, indices, accepted, cu_seqlens, out, final, scale, lower_bound, beta_limit,
            by_heads, by_ratio,
        ).launch(
            grid=(blocks, 1, 1), block=(32 * self.config.warps, 1, 1), stream=stream,
            min_blocks_per_mp=self.blocks_a_multiprocessor, preferred_smem_carveout=self.carveout,
        )  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        return 4 * self.config.key_dim * self.vectors * self.config.warps

    @property
    def carveout(self) -> int:
        """Shared memory of a multiprocessor's CTAs in percent of what there is, at least what `padding` counts on."""
        return max(25, -(-100 * self.blocks_a_multiprocessor * (self.shared_bytes + 1024) // SHARED))

    @property
    def resident(self) -> int:
        """Warps that a multiprocessor holds of those that fetch ahead."""
        return max(1, RESIDENT // (4 * self.config.key_dim * self.config.columns))

    @property
    def padding(self) -> int:
        """Bytes of shared memory that keep a multiprocessor from holding more than `resident` warps."""
        blocks = max(1, self.resident // self.config.warps)
        if not self.fetches_ahead or blocks >= self.blocks_a_multiprocessor:
            return 0
        return max(0, PADDED // blocks - 1024 - self.shared_bytes) // 128 * 128

    @property
    def warps_a_multiprocessor(self) -> int:
        registers = self.groups * self.group * self.columns
        if self.keeps_packed:
            return WARPS_PACKED[registers // 2]
        kind = 0 if self.config.single else 2 if self.config.store in ("tokens", "each") else 1
        fits = WARPS[registers][kind]
        if registers == 128 and not self.config.per_key:
            fits = min(fits, 8)  # with more, the loaded v spills, and the loads after it wait
        return fits

    @property
    def blocks_a_multiprocessor(self) -> int:
        return max(1, self.warps_a_multiprocessor // self.config.warps)

    @property
    def blocks_a_head(self) -> int:
        return -(-self.config.value_dim // (self.config.columns * self.config.warps))

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mA: cute.Tensor | None,
        mBias: cute.Tensor | None,
        mS: cute.Tensor | None,
        mIndices: cute.Tensor | None,
        mAccepted: cute.Tensor | None,
        mCu: cute.Tensor | None,
        mO: cute.Tensor,
        mF: cute.Tensor | None,
        scale: Float32,
        lower_bound: Float32,
        beta_limit: Float32,
        by_heads: cute.FastDivmodDivisorV2,
        by_ratio: cute.FastDivmodDivisorV2,
    ):
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = tid // 32, tid % 32
        smem = cutlass.memory.SmemAllocator()
        sVectors = smem.allocate_tensor(
            Float32, cute.make_layout((self.config.key_dim, self.vectors * self.config.warps)), 16
        )
        if const_expr(self.padding > 0):
            smem.allocate(self.padding, 16)
        v0 = (block % self.blocks_a_head * self.config.warps + warp) * self.config.columns
        unit = block // self.blocks_a_head
        n = Int32(unit // by_heads)
        head = unit - n * mV.shape[2]
        if v0 < self.config.value_dim:
            # b, t0: where the sequence's tokens begin in [B, T]; count: how many they are.
            b, t0, count = n, Int32(0), Int32(1 if self.config.single else mV.shape[1])
            if const_expr(mCu is not None):
                # Whatever the bounds are, no token outside the tensors is touched.
                b = Int32(0)
                t0, end = tokens_of(mCu, n, count)
                count = end - t0
            tensors = (mQ, mK, mV, mG, mBeta, by_ratio)
            vectors = Int32(sVectors.iterator.toint()) + warp * (self.vectors * self.config.key_dim * 4)
            where = (b, t0, head, v0, lane)
            states = (mS, mIndices, mO, mF)
            if const_expr(self.fetches_ahead):
                later = unit + self.ahead()
                later_n = Int32(later // by_heads)
                slot, later_slot = self.first_slots(mS, mIndices, mAccepted, n, later_n, mV.shape[0])
                self.fetch(mS, later_slot, later - later_n * mV.shape[2], v0, lane)
            else:
                slot = self.first_slot(mS, mIndices, mAccepted, n)
            if const_expr(self.config.single):
                self.token(tensors, states, (mA, mBias, lower_bound), where, n, slot, vectors, scale, beta_limit)
            elif slot >= 0 and count > 0:
                self.sequence(
                    tensors, states, (mA, mBias, lower_bound), where, n, slot, count, vectors, scale, beta_limit
                )  # fmt: skip
            elif slot < 0:
                self.clear(mO, mF, where, count)
            elif const_expr(mIndices is None and self.config.store == "last"):
                self.pass_through(mS, mF, where, n)
            if const_expr(mCu is not None):  # noqa: SIM102
                if n + 2 == mCu.shape[0]:
                    self.clear(mO, mF, (b, t0 + count, head, v0, lane), Int32(mV.shape[1]) - t0 - count)

    @cute.jit
    def first_slot(self, mS, mIndices, mAccepted, n):
        """The slot that a sequence starts from; -1 where there is no sequence."""
        slot = n
        if const_expr(mIndices is not None):
            slot = self.inside(self.first_index(mIndices, mAccepted, n), mS)
        return slot

    @cute.jit
    def first_index(self, mIndices, mAccepted, n):
        """What the indices say of `first_slot`."""
        if const_expr(self.config.per_token):
            column = Int32(0)
            if const_expr(mAccepted is not None):
                column = cutlass.max(cutlass.min(Int32(mAccepted[n]), Int32(mIndices.shape[1])) - 1, Int32(0))
            index = mIndices[n, column]
        else:
            index = mIndices[n]
        return index

    @cute.jit
    def inside(self, index, states):
        """The slot of an index; -1 where the states have none."""
        slot = Int32(-1)
        if index >= 0 and index < states.shape[0]:
            slot = Int32(index)
        return slot

    @cute.jit
    def first_slots(self, mS, mIndices, mAccepted, n, later, sequences):
        """`first_slot` of sequences n and `later`, -1 where the latter is none of them; neither index waits for the other."""
        slot, later_slot = n, cutlass.min(later, Int32(sequences) - 1)
        if const_expr(mIndices is not None):
            index, later_index = (self.first_index(mIndices, mAccepted, i) for i in (n, later_slot))
            slot, later_slot = self.inside(index, mS), self.inside(later_index, mS)
        if later >= sequences:
            later_slot = Int32(-1)
        return slot, later_slot

    def ahead(self):
        """How many heads after its own a CTA has L2 fetch a state."""
        warps = 100 * self.config.warps * self.blocks_a_head
        return Int32(cute.arch.nsmid()) * (self.resident * AHEAD) // warps

    @cute.jit
    def fetch(self, mS, slot, head, v0, lane):
        """This warp's share of a later head's state into L2: as many bytes as its columns have, in either layout."""
        if slot >= 0:
            size = self.config.key_dim * self.read_type.width // 8
            fetch_to_l2(address_of(mS, slot, head) + v0 * size, self.config.columns * size, lane == 0)

    @cute.jit
    def token_slot(self, mIndices, mF, n, t, count):
        """The slot of a sequence's token t; -1 where it has none."""
        slot = Int32(-1)
        if t < count and t < mIndices.shape[1]:
            slot = self.inside(mIndices[n, t], mF)
        return slot

    @cute.jit
    def token(self, tensors, states, gate, where, n, slot, vectors, scale, beta_limit):
        """The one token of a sequence. Loads wait for no branch: without a sequence there is a state of zeros, of which nothing is made."""
        b, t, head, v0, lane = where
        mS, mIndices, mO, mF = states
        r, c, column = lane // self.column_groups, lane % self.column_groups, self.column(lane)
        own_slot = Int32(-1)
        if const_expr(self.config.store == "tokens"):
            own_slot = self.token_slot(mIndices, mF, n, Int32(0), Int32(1))
        rWords = cute.make_rmem_tensor((self.words(),), Uint32)
        self.load_numbers(rWords, tensors, (b, t, head), v0 + column, Int32(1))
        gates = None if self.config.per_key else self.gates(*gate, head, lane)
        rS = self.first_state(mS, slot, head, v0, r, c, None if mIndices is None else Int32(slot >= 0))
        self.load_vectors(rWords, tensors, (b, t, head), lane, Int32(1))
        gates = self.gates(*gate, head, lane) if self.config.per_key else gates
        token = self.prepared(rWords, gates, scale, beta_limit)
        o, deltas = self.sums(rS, token, vectors, lane, r, c)
        if slot >= 0:
            self.write_outputs(mO, o, (b, t, head), v0 + column, lane)
            if const_expr(self.config.store == "tokens"):
                if own_slot >= 0:
                    self.write_update(rS, address_of(mF, own_slot, head), token[1], deltas, vectors, v0, r, c)
            elif const_expr(self.config.store != ""):
                row = slot if const_expr(self.config.store == "last") else b * mO.shape[1] + t
                self.write_update(rS, address_of(mF, row, head), token[1], deltas, vectors, v0, r, c)
        else:
            self.clear(mO, mF, where, Int32(1))

    def first_state(self, mS, slot, head, v0, r, c, valid=None):
        """The state of a slot in registers; zeros where none are given, or `valid` is 0."""
        if mS is not None:
            return self.state_at(address_of(mS, slot, head), v0, r, c, valid)
        rS = cute.make_rmem_tensor((self.groups * self.group, self.columns), Float32)
        rS.fill(0.0)
        return rS

    def state_at(self, address, v0, r, c, valid=None):
        """The state at an address in registers."""
        if self.keeps_packed:
            rS = cute.make_rmem_tensor((self.groups * self.group * self.columns // 8, 4), Uint32)
            for i, words in enumerate(self.load_words(address, v0, r, c, valid)):
                for j, word in enumerate(words):
                    rS[i, j] = word
            return rS
        rS = cute.make_rmem_tensor((self.groups * self.group, self.columns), Float32)
        self.load_state(rS, address, v0, r, c, valid)
        return rS

    @cute.jit
    def sequence(self, tensors, states, gate, where, n, slot, count, vectors, scale, beta_limit):
        """All tokens of one sequence, for one head and the warp's columns."""
        b, t0, head, v0, lane = where
        mS, mIndices, mO, mF = states
        r, c, column = lane // self.column_groups, lane % self.column_groups, self.column(lane)
        next_slot = Int32(-1)
        if const_expr(self.config.store == "tokens"):
            next_slot = self.token_slot(mIndices, mF, n, Int32(0), count)
        rWords = cute.make_rmem_tensor((self.words(),), Uint32)
        rS = self.first_state(mS, slot, head, v0, r, c)
        self.load_token(rWords, tensors, (b, t0, head), v0 + column, lane, Int32(1))
        gates = self.gates(*gate, head, lane)
        for t in cutlass.range(count, unroll=1):
            token = self.prepared(rWords, gates, scale, beta_limit)
            this_slot = next_slot
            # Addresses anew for every token: two dozen registers would hold them.
            b_, head_, lane_ = opaque(b), opaque(head), opaque(lane)
            self.load_token(rWords, tensors, (b_, t0 + t + 1, head_), v0 + column, lane_, Int32(t + 1 < count))
            if const_expr(self.config.store == "tokens"):
                next_slot = self.token_slot(mIndices, mF, n, t + 1, count)
            o = self.step(rS, token, vectors, lane, r, c)
            self.write_token(rS, mO, mF, o, this_slot, (b_, t0 + t, head_), v0, column, lane)
        if const_expr(self.config.store == "last"):
            self.store_state(rS, address_of(mF, slot, head), v0, r, c)

    @cute.jit
    def write_token(self, rS, mO, mF, o, slot, token, v0, column, lane):
        """o of a token, and the state after it where every token's is wanted."""
        b, t, head = token
        r, c = lane // self.column_groups, lane % self.column_groups
        self.write_outputs(mO, o, token, v0 + column, lane)
        if const_expr(self.config.store == "tokens"):  # noqa: SIM102
            if slot >= 0:
                self.store_state(rS, address_of(mF, slot, head), v0, r, c)
        if const_expr(self.config.store == "each"):
            self.store_state(rS, mF[b * mO.shape[1] + t, head, None, None].iterator.toint(), v0, r, c)

    @cute.jit
    def write_outputs(self, mO, o, token, column, lane):
        b, t, head = token
        if lane >= 16:
            for i in cutlass.range_constexpr(self.left):
                mO[b, t, head, column + i] = o[i].to(self.io)

    @cute.jit
    def pass_through(self, mS, mF, where, n):
        """The final state of a sequence without tokens is its first one; in a pool it is left alone."""
        _, _, head, v0, lane = where
        r, c = lane // self.column_groups, lane % self.column_groups
        rS = cute.make_rmem_tensor((self.groups * self.group, self.columns), Float32)
        rS.fill(0.0)
        if const_expr(mS is not None):
            self.load_state(rS, address_of(mS, n, head), v0, r, c)
        self.store_state(rS, address_of(mF, n, head), v0, r, c)

    @cute.jit
    def clear(self, mO, mF, where, count):
        """o = 0 for tokens of no sequence; so are the states after them where every token has one."""
        b, t0, head, v0, lane = where
        for t in cutlass.range(count, unroll=1):
            if lane < self.config.columns:
                mO[b, t0 + t, head, v0 + lane] = Float32(0.0).to(self.io)
            if const_expr(self.config.store == "each"):
                rS = cute.make_rmem_tensor((self.groups * self.group, self.columns), Float32)
                rS.fill(0.0)
                row = b * mO.shape[1] + t0 + t
                r, c = lane // self.column_groups, lane % self.column_groups
                self.store_state(rS, address_of(mF, row, head), v0, r, c)

    def column(self, lane):
        """The first column whose sums end in a lane, of `left` side by side; see `reduce_scatter`."""
        return lane % self.column_groups * self.columns + lane % 16 // self.column_groups * self.left

    # ---- a token's inputs ------------------------------------------------------------------------------------------------------
    def vector_words(self, dtype) -> int:
        """Registers of this lane's part of a vector over K."""
        return self.own * dtype.width // 32

    def words(self) -> int:
        gates = self.vector_words(self.gate_type) if self.config.per_key else 1
        return 2 * self.vector_words(self.io) + gates + self.left + self.betas()

    def betas(self) -> int:
        return self.left if self.config.beta_per_value else 1

    def load_token(self, rWords, tensors, token, column, lane, valid):
        """Raw q, k, g, v, beta of token (b, t, head), in this order; zeros where `valid` is 0."""
        self.load_vectors(rWords, tensors, token, lane, valid)
        self.load_numbers(rWords, tensors, token, column, valid)

    def load_vectors(self, rWords, tensors, token, lane, valid):
        """Of `load_token` what has K elements. These are the loads that are waited for first, so others come before them."""
        mQ, mK, _, mG, _, by_ratio = tensors
        b, t, head = token
        at = 0
        key_head = Int32(head // by_ratio)
        sources = [(mQ[b, t, key_head, None], self.io), (mK[b, t, key_head, None], self.io)]
        if self.config.per_key:
            sources.append((mG[b, t, head, None], self.gate_type))
        for row, dtype in sources:
            n = self.vector_words(dtype)
            address = row.iterator.toint() + lane * (4 * n)
            for i in range(0, n, 4):
                for word in load_if(address, 4 * i, min(n, 4), valid, early=True):
                    rWords[at] = word
                    at += 1

    def load_numbers(self, rWords, tensors, token, column, valid):
        """The rest of `load_token`, numbers by head or column."""
        _, _, mV, mG, mBeta, _ = tensors
        b, t, head = token
        coordinates = [] if self.config.per_key else [(mG[b, t, None], head, self.gate_type)]
        coordinates += [(mV[b, t, head, None], column + i, self.io) for i in range(self.left)]
        if self.config.beta_per_value:
            coordinates += [(mBeta[b, t, head, None], column + i, self.beta_type) for i in range(self.left)]
        else:
            coordinates.append((mBeta[b, t, None], head, self.beta_type))
        for at, (row, i, dtype) in enumerate(coordinates, self.words() - len(coordinates)):
            element = cute.domain_offset((i,), row)
            rWords[at] = load_one_if(dtype, element.iterator.toint(), valid)

    def gates(self, mA, mBias, lower_bound, head, lane):
        """The gate of every key that this lane prepares, or of the head: then these are numbers to be loaded before vectors."""
        if not self.config.per_key:
            a_log, bias = (None if x is None else self.number(x, head) for x in (mA, mBias))
            return [Gate(self.config.gate, a_log, bias, lower_bound)]
        a_log = None if mA is None else Float32(mA[head])
        if mBias is None:
            return [Gate(self.config.gate, a_log, None, lower_bound)] * self.own
        first = head * self.config.key_dim + lane * self.own
        return [Gate(self.config.gate, a_log, Float32(mBias[first + i]), lower_bound) for i in range(self.own)]

    def number(self, x, i):
        """An fp32 element, loaded early."""
        return one(Float32, load_one_if(Float32, cute.domain_offset((i,), x).iterator.toint(), Int32(1)))

    def prepared(self, rWords, gates, scale, beta_limit):
        """`combined` of the words of `load_token`."""
        words = [rWords[i] for i in range(self.words())]
        n = self.vector_words(self.io)
        q, k = unpacked(self.io, words[:n]), unpacked(self.io, words[n : 2 * n])
        last = 2 * n + (self.vector_words(self.gate_type) if self.config.per_key else 1)
        raw = (
            unpacked(self.gate_type, words[2 * n : last])
            if self.config.per_key
            else [one(self.gate_type, words[2 * n])]
        )
        v = [one(self.io, word) for word in words[last : last + self.left]]
        beta = [one(self.beta_type, word) for word in words[last + self.left :]]
        return self.combined(q, k, v, raw, beta, gates, scale, beta_limit)

    def combined(self, q, k, v, raw, beta, gates, scale, beta_limit):
        """What `share` shares of this lane's keys, d where it is a number, lists of v and beta of its columns, and q . k; scale is in q."""
        d = [exp2(gate.value(x) * gate.factor(Int32(1))) for gate, x in zip(gates, raw, strict=True)]
        qk = sum_lanes(dot(q, k))
        q_factor = scale
        if self.config.l2norm:
            q_factor = rsqrt(sum_lanes(dot(q, q)) + L2NORM_EPS) * scale
            k_factor = rsqrt(sum_lanes(dot(k, k)) + L2NORM_EPS)
            k = [x * k_factor for x in k]
            qk = qk * k_factor
        q = [x * q_factor for x in q]
        if self.config.beta_sigmoid:
            beta = [sigmoid(x) * beta_limit for x in beta]
        beta = beta * (self.left // len(beta))
        qk = qk * q_factor
        if not self.config.per_key:
            return ((k, q), d[0], v, beta, qk)
        products = [[x * y for x, y in zip(d, z, strict=True)] for z in (k, q)]
        return ((*products, k, d), None, v, beta, qk)

    def share(self, token, vectors, lane):
        """Vectors over K to all lanes: d k, d q, k and d per key, else k and q."""
        cute.arch.sync_warp()
        for i, values in enumerate(token[0]):
            address = vectors + i * (self.config.key_dim * 4) + lane * (self.own * 4)
            for j in range(0, self.own, 4):
                store_shared(address, 4 * j, values[j : j + 4])
        cute.arch.sync_warp()

    def shared_part(self, vectors, which, group, r):
        """The keys of this lane's row group in one group of keys."""
        address = vectors + r * (self.group * 4)
        first = which * self.config.key_dim + group * self.row_groups * self.group
        return [x for i in range(0, self.group, 4) for x in load_shared(address, 4 * (first + i), 4)]

    # ---- the recurrence --------------------------------------------------------------------------------------------------------
    def step(self, rS, token, vectors, lane, r, c):
        """S through one token; returns o of this lane's columns in lanes 16 to 31."""
        o, deltas = self.sums(rS, token, vectors, lane, r, c)
        for group in range(self.groups):
            k, decay = self.update_vectors(vectors, token[1], group, r)
            for i in range(self.group):
                for m in range(self.columns):
                    # S = diag(d) S + k delta^T
                    key = group * self.group + i
                    rS[key, m] = fma(k[i], deltas[m], rS[key, m] * decay[i])
        return o

    def sums(self, rS, token, vectors, lane, r, c):
        """(o of this lane's columns, right in lanes 16 to 31; delta of the columns of its state)."""
        self.share(token, vectors, lane)
        _, d, v, beta, qk = token
        columns = range(self.columns)
        sums = self.lane_sums(rS, vectors, r)
        totals = [reduce_scatter(sums[i :: self.left], self.masks, lane) for i in range(self.left)]
        if not self.config.per_key:
            totals = [x * d for x in totals]
        # delta = b (v - p), right in lanes 0 to 15
        own = [b * (x - p) for b, x, p in zip(beta, v, totals, strict=True)]
        # o = r + (q . k) delta
        o = [fma(qk, cute.arch.shuffle_sync(x, lane % 16), total) for x, total in zip(own, totals, strict=True)]
        deltas = [cute.arch.shuffle_sync(own[m % self.left], m // self.left * self.column_groups + c) for m in columns]
        return o, deltas

    def lane_sums(self, rS, vectors, r):
        """p, then r, of this lane's columns over its keys.

        Chains of sums: those of the row groups of the narrowest warp that the lane stands for, added up as its lanes would. One after the
        other: few are unfinished at a time.
        """
        return self.tree(lambda chain: self.chain(rS, vectors, chain, r))

    def chain(self, rS, vectors, chain, r):
        """p, then r, of this lane's columns over the keys of every `chains`th group."""
        p, o = ([Float32(0.0)] * self.columns for _ in range(2))
        for group in range(chain, self.groups, self.chains):
            # p = (d k)^T S;  r = (d q)^T S
            k, q = (self.shared_part(vectors, which, group, r) for which in (0, 1))
            for i in range(self.group):
                for m in range(self.columns):
                    x = self.element(rS, group * self.group + i, m)
                    p[m], o[m] = fma(k[i], x, p[m]), fma(q[i], x, o[m])
        return p + o

    def tree(self, chain_of, first=0, stride=1):
        """The sum of all chains, the first half's to the second's at every step."""
        if stride == self.chains:
            return chain_of(first)
        low = self.tree(chain_of, first, 2 * stride)
        high = self.tree(chain_of, first + stride, 2 * stride)
        return [x + y for x, y in zip(low, high, strict=True)]

    def update_vectors(self, vectors, d, group, r):
        """k and the decay of this lane's keys in one group."""
        k = self.shared_part(vectors, 2 if self.config.per_key else 0, group, r)
        return k, self.shared_part(vectors, 3, group, r) if self.config.per_key else [d] * self.group

    def write_update(self, rS, address, d, deltas, vectors, v0, r, c):
        """The state after the one token, stored as it is made."""
        first = address + self.first_element(v0, r, c) * (self.write_type.width // 8)
        for group in range(self.groups):
            k, decay = self.update_vectors(vectors, d, group, r)
            for offset, elements in self.runs_of(group):
                # S = diag(d) S + k delta^T
                self.store_run(
                    first, offset,
                    [
                        fma(k[key % self.group], deltas[m], self.element(rS, key, m, True) * decay[key % self.group])
                        for key, m in elements
                    ],
                )  # fmt: skip

    # ---- states ----------------------------------------------------------------------------------------------------------------
    def element(self, rS, key, m, again=False):
        """An element of the state that was read; see `half`."""
        if not self.keeps_packed:
            return rS[key, m]
        run, i = key, m
        if self.config.state_v_first:
            run, i = m * self.groups + key // self.group, key % self.group
        return half(self.read_type, rS[run, i // 2], i % 2, again)

    def runs_of(self, group):
        """(offset in elements, elements [(key, column)]) of the contiguous parts of a group of this lane's keys, from its first element."""
        c = self.config
        row, keys = group * self.row_groups * self.group, range(group * self.group, (group + 1) * self.group)
        if c.state_v_first:
            return [(m * c.key_dim + row, [(key, m) for key in keys]) for m in range(self.columns)]
        return [((row + i) * c.value_dim, [(key, m) for m in range(self.columns)]) for i, key in enumerate(keys)]

    def runs(self):
        """`runs_of` all groups, in the order of memory."""
        return sorted((run for group in range(self.groups) for run in self.runs_of(group)), key=lambda run: run[0])

    def first_element(self, v0, r, c):
        """Where this lane's first element lies in a state."""
        if self.config.state_v_first:
            return (v0 + c * self.columns) * self.config.key_dim + r * self.group
        return r * self.group * self.config.value_dim + v0 + c * self.columns

    def load_words(self, address, v0, r, c, valid=None):
        size = self.read_type.width // 8
        first = address + self.first_element(v0, r, c) * size
        policy = first_out() if self.fetches_ahead else None
        return [load_uncached(first, offset * size, 4, valid, early=True, policy=policy) for offset, _ in self.runs()]

    def load_state(self, rS, address, v0, r, c, valid=None):
        loaded = self.load_words(address, v0, r, c, valid)
        for (_, elements), words in zip(self.runs(), loaded, strict=True):
            for (key, m), x in zip(elements, unpacked(self.read_type, words), strict=True):
                rS[key, m] = x

    def store_state(self, rS, address, v0, r, c):
        first = address + self.first_element(v0, r, c) * (self.write_type.width // 8)
        for offset, elements in self.runs():
            self.store_run(first, offset, [rS[key, m] for key, m in elements])

    def store_run(self, first, offset, values):
        words = packed(self.write_type, values)
        for i in range(0, len(words), 4):
            store_global(first, offset * (self.write_type.width // 8) + 4 * i, words[i : i + 4])


def address_of(states, slot, head):
    """Where a slot's state of a head begins."""
    return states[slot, head, None, None].iterator.toint()


def dot(a, b):
    """The sum of products of two lists."""
    total = a[0] * b[0]
    for x, y in zip(a[1:], b[1:], strict=True):
        total = fma(x, y, total)
    return total


def compile(config: DecodeConfig):
    """The launch function for `config`.

    `(q, k, v, g, beta, a_log | None, dt_bias | None, state | None, indices | None, accepted | None, cu_seqlens | None, out, final | None,
    scale, lower_bound, beta_limit)`: q, k [B, T, H, K]; v, out [B, T, HV, V]; g [B, T, HV, K] or [B, T, HV]; beta [B, T, HV] or
    [B, T, HV, V]; a_log [HV] and dt_bias [HV * K] or [HV] in fp32; state the states read [slots, HV, K, V] or [slots, HV, V, K]; indices
    [N] or [N, S]; accepted [N]; cu_seqlens [N + 1], then B = 1; final the states written, by slots, or with `store` "each" [B * T, ...].
    """
    c = config
    batch, tokens, heads, value_heads, sequences, bounds, slots, slots_written, columns = (
        cute.sym_int() for _ in range(9)
    )

    def tensor(dtype, *shape, last=None):
        strides = (*(cute.sym_int64() for _ in shape[:-1]), cute.sym_int64() if last is None else last)
        return make_fake_tensor(TYPES[dtype], shape, stride=strides, assumed_align=TYPES[dtype].width // 8)

    def states(dtype, n):
        rows, width = (c.value_dim, c.key_dim) if c.state_v_first else (c.key_dim, c.value_dim)
        strides = (cute.sym_int64(), cute.sym_int64(), width, 1)
        return make_fake_tensor(TYPES[dtype], (n, value_heads, rows, width), stride=strides, assumed_align=16)

    keys = (batch, tokens, heads, c.key_dim)
    values = (batch, tokens, value_heads, c.value_dim)
    per_head = (batch, tokens, value_heads)
    bias = cute.sym_int() if c.per_key else value_heads
    indices = (sequences, columns) if c.per_token else (sequences,)
    return cute.compile(
        DeltaDecode(c),
        tensor(c.dtype, *keys, last=1),
        tensor(c.dtype, *keys, last=1),
        tensor(c.dtype, *values),
        tensor(c.gate_dtype, *per_head, c.key_dim, last=1) if c.per_key else tensor(c.gate_dtype, *per_head),
        tensor(c.beta_dtype, *(values if c.beta_per_value else per_head)),
        tensor("float32", value_heads) if c.a_log else None,
        tensor("float32", bias, last=1) if c.dt_bias else None,
        states(c.state_dtype, slots) if c.state_dtype else None,
        tensor(c.indices, *indices) if c.indices else None,
        tensor(c.accepted, sequences) if c.accepted else None,
        tensor(c.cu_seqlens, bounds) if c.cu_seqlens else None,
        tensor(c.dtype, *values, last=1),
        states(c.final_dtype, slots_written) if c.store else None,
        Float32(1.0),
        Float32(0.0),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
