"""KDA: segments' final states and transitions to segments' initial states.

A segment s of a sequence maps the state that enters it to the state that leaves it by

    S_out = T_s S_in + F_s        T_s [K, K] its transition, F_s [K, V] its final state from zero

so that the initial state of every segment follows from the first one, serially but cheaply:

    S_0 = h0 or 0;   S_{s+1} = T_s S_s + F_s

The backward pass has the same of the states' gradients, from the last segment to the first (`reverse`).

With `early`, segments have codes (`tile.early`). A state is made only for a segment with code 0, or for the end where the last one's is 0;
behind a segment that starts early it is that segment's F_s. The first segment's state is always written.

Roles: one CTA of K / 16 warps for a sequence, value head and 16 columns of V. It keeps S^T [16, K] in shared memory; warp j computes the
16 columns k = 16j .. 16j+15 of the next S^T by `mma.m16n8k8` with tf32 operands, each split in two so that products are those of fp32
numbers to 2^-21: x = hi + lo, x y = hi hi + hi lo + lo hi.

Timeline of a segment: S^T out and into shared memory | T_{s+1}, F_{s+1} on their way to registers; products of S^T and T_s, from F_s on |

Layouts: `ends` F^T [N * segments, HV, V, K] and `transitions` T^T [N * segments, HV, K (in), K (out)], as the scan writes them with
`state_v_first`; h0, starts and ht in the caller's layout.
Constraints: K 64 or 128; V a multiple of 16.
"""

# mypy: ignore-errors
# A nested `if` is one of compile time and one of run time, which `and` would make one of run time.
# ruff: noqa: SIM102

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...tile.arguments import dense
from ...tile.mma import mma_tf32
from ..config import CombineConfig

COLUMNS = 16
"""Columns of V a CTA."""


@cute.jit
def split_tf32(x: Float32):
    """x = hi + lo with hi of 11 significant bits; both as bits."""
    bits = x.bitcast(Uint32) & Uint32(0xFFFFE000)
    hi = bits.bitcast(Float32)
    return bits, (x - hi).bitcast(Uint32)


class KdaCombine:
    """The kernel for one `CombineConfig`."""

    def __init__(self, config: CombineConfig) -> None:
        self.config = config
        self.key_dim = config.key_dim
        self.threads = 2 * config.key_dim
        # Rows of S^T in shared memory are 4 floats apart modulo the 32 banks: a warp's A fragments touch every bank once.
        self.row = config.key_dim + 4

    @cute.jit
    def __call__(
        self,
        ends: cute.Tensor,
        transitions: cute.Tensor,
        h0: cute.Tensor | None,
        starts: cute.Tensor,
        ht: cute.Tensor | None,
        early: cute.Tensor | None,
        segments: Int32,
        stream,
    ):
        """Launch: one CTA for a sequence, value head and 16 columns of V."""
        units, heads, value_dim, _ = ends.shape
        blocks = units // segments * heads * (value_dim // COLUMNS)
        self.kernel(ends, transitions, h0, starts, ht, early, segments).launch(
            grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mF: cute.Tensor,
        mT: cute.Tensor,
        mH: cute.Tensor | None,
        mStarts: cute.Tensor,
        mHt: cute.Tensor | None,
        mEarly: cute.Tensor | None,
        segments: Int32,
    ):
        # The scan may be put on SMs as they become free. What the passes before it wrote is read once they have ended; nothing is written
        # earlier either.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        K = const_expr(self.key_dim)
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        tiles = mF.shape[2] // COLUMNS
        heads = mF.shape[1]
        v0 = block % tiles * COLUMNS
        head = block // tiles % heads
        sequence = block // tiles // heads
        smem = cutlass.memory.SmemAllocator()
        sS = smem.allocate_tensor(Float32, cute.make_layout((COLUMNS, K), stride=(self.row, 1)), 16)
        lane = tid % 32
        g, t = lane // 4, lane % 4
        k0 = tid // 32 * 16

        # This lane's part of S^T: rows v = g, g + 8; columns k0 + 4t .. + 3.
        rS = cute.make_rmem_tensor((2, 4), Float32)
        if const_expr(mH is not None):
            self.read_state(rS, mH, sequence, head, v0 + g, k0 + 4 * t)
        else:
            rS.fill(0.0)
        rT, rNextT = (cute.make_rmem_tensor((2, 2, K // 8), Float32) for _ in range(2))
        rF, rNextF = (cute.make_rmem_tensor((2, 4), Float32) for _ in range(2))
        first = self.unit(sequence, segments, Int32(0))
        # In memory of the thread's own, so that without `early` it is a constant.
        code = cute.make_rmem_tensor((1,), Int32)
        code[0] = Int32(0)
        steps = segments
        if const_expr(mEarly is not None):
            steps = self.steps(mEarly, sequence, segments, head, lane)
            code[0] = mEarly[first, head]
        if steps > 0:
            self.load_transition(rT, mT, first, head, k0 + 2 * g, t)
            self.load_end(rF, mF, first, head, v0 + g, k0 + 4 * t)
        for s in cutlass.range(steps, unroll=1):
            if code[0] <= 0:
                self.write_state(rS, mStarts, self.unit(sequence, segments, s), head, v0 + g, k0 + 4 * t)
            self.share_state(rS, sS, g, k0 + 4 * t)
            cute.arch.sync_threads()
            following = self.unit(sequence, segments, cutlass.min(s + 1, segments - 1))
            self.load_transition(rNextT, mT, following, head, k0 + 2 * g, t)
            self.load_end(rNextF, mF, following, head, v0 + g, k0 + 4 * t)
            # S_{s+1} = T_s S_s + F_s; what nobody needs is made of whatever lies there.
            if code[0] == 0:
                self.products(rF, rT, sS, g, t)
            if const_expr(mEarly is not None):
                code[0] = mEarly[following, head]
            rS.store(rF.load())
            rT.store(rNextT.load())
            rF.store(rNextF.load())
            cute.arch.sync_threads()
        if steps < segments:
            # A sequence of one segment has it first in memory, in either order.
            at = self.unit(sequence, segments, steps)
            if code[0] < 0:
                at = sequence * segments
            self.write_state(rS, mStarts, at, head, v0 + g, k0 + 4 * t)
        if const_expr(mHt is not None):
            if steps == segments:
                self.write_state(rS, mHt, sequence, head, v0 + g, k0 + 4 * t)

    @cute.jit
    def steps(self, mEarly, sequence, segments, head, lane):
        """How many segments are combined: up to the last one whose successor has code 0."""
        steps = Int32(0)
        for s in cutlass.range(0, segments, 32, unroll=1):
            mine = s + lane
            following = self.unit(sequence, segments, cutlass.min(mine + 1, segments - 1))
            found = cute.arch.vote_ballot_sync((mine < segments) & (mEarly[following, head] == 0))
            if found != 0:
                steps = s + 32 - Int32(cute.arch.clz(found))
        return steps

    @cute.jit
    def unit(self, sequence, segments, s):
        """Where the s-th segment to be combined lies among all."""
        if const_expr(self.config.reverse):
            return sequence * segments + segments - 1 - s
        return sequence * segments + s

    @cute.jit
    def read_state(self, rS, mS, n, head, v, k):
        """S of the caller's layout into registers."""
        for i in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(4):
                if const_expr(self.config.state_v_first):
                    rS[i, j] = mS[n, head, v + 8 * i, k + j]
                else:
                    rS[i, j] = mS[n, head, k + j, v + 8 * i]

    @cute.jit
    def write_state(self, rS, mS, n, head, v, k):
        """S into a tensor of the caller's layout."""
        for i in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(4):
                if const_expr(self.config.state_v_first):
                    mS[n, head, v + 8 * i, k + j] = rS[i, j]
                else:
                    mS[n, head, k + j, v + 8 * i] = rS[i, j]

    @cute.jit
    def load_end(self, rF, mF, unit, head, v, k):
        """F_s, from which the products' sums start."""
        for i in cutlass.range_constexpr(2):
            part = cute.local_tile(mF[unit, head, v + 8 * i, None], (4,), (k // 4,)).load()
            for j in cutlass.range_constexpr(4):
                rF[i, j] = part[j]

    @cute.jit
    def load_transition(self, rT, mT, unit, head, k, t):
        """B fragments of T_s^T [k_in, k_out]: rows t and t + 4 of every 8, columns k and k + 1 (one a tile of the products)."""
        for step in cutlass.range_constexpr(self.key_dim // 8):
            for i in cutlass.range_constexpr(2):
                part = cute.local_tile(mT[unit, head, step * 8 + 4 * i + t, None], (2,), (k // 2,))
                cute.autovec_copy(part, rT[None, i, step])

    @cute.jit
    def share_state(self, rS, sS, g, k):
        """This lane's part of S^T to shared memory."""
        for i in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(4):
                sS[g + 8 * i, k + j] = rS[i, j]

    @cute.jit
    def products(self, rS, rT, sS, g, t):
        """S^T T_s^T added to rS, in fp32 by split operands. Column n of tile j is k0 + 2n + j: a lane's two tiles are one vector of T."""
        for step in cutlass.range_constexpr(self.key_dim // 8):
            hi, lo = [], []
            for col in cutlass.range_constexpr(2):
                for row in cutlass.range_constexpr(2):
                    a, b = split_tf32(sS[g + 8 * row, step * 8 + 4 * col + t])
                    hi.append(a)
                    lo.append(b)
            for j in cutlass.range_constexpr(2):
                b0, c0 = split_tf32(rT[j, 0, step])
                b1, c1 = split_tf32(rT[j, 1, step])
                acc = (rS[0, j], rS[0, 2 + j], rS[1, j], rS[1, 2 + j])
                acc = mma_tf32(lo, (b0, b1), acc)
                acc = mma_tf32(hi, (c0, c1), acc)
                acc = mma_tf32(hi, (b0, b1), acc)
                rS[0, j], rS[0, 2 + j], rS[1, j], rS[1, 2 + j] = acc


def compile(config: CombineConfig):
    """The launch function for `config`: `(ends, transitions, h0 | None, starts, ht | None, early | None, segments)`."""
    units, heads, value_dim, sequences = (cute.sym_int() for _ in range(4))

    def state(n, rows, columns):
        strides = (cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), cute.sym_int64(divisibility=4), 1)
        return make_fake_tensor(Float32, (n, heads, rows, columns), stride=strides, assumed_align=16)

    def user(n):
        sizes = (value_dim, config.key_dim) if config.state_v_first else (config.key_dim, value_dim)
        return state(n, *sizes)

    return cute.compile(
        KdaCombine(config),
        state(units, value_dim, config.key_dim),
        state(units, config.key_dim, config.key_dim),
        user(sequences) if config.initial else None,
        user(units),
        user(sequences) if config.final else None,
        dense(Int32, (units, heads)) if config.early else None,
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
