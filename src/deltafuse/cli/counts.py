"""Bytes that a call has to move and operations that it has to do: what its time is compared with.

Bytes are those of a call that reads every argument and writes every result once. KDA with K = V = 128 in bfloat16 and
a raw gate: q, k, v, g, o 256 each and beta 2, so 1,282 a token and head. A backward pass reads the arguments and the
gradients of the results, and writes the gradients of the arguments.

Operations are those of the matrix products of the chunked form, 2 for each multiplication and addition, a token and
value head, in chunks of C tokens; elementwise work is left out.

    forward     A_qk 2CK, L 2CK, w = M k 2CK, u = M v 2CV, w S 2KV, q S 2KV, A_qk v' 2CV, k^T v' 2KV
                = 6KV + C (6K + 4V)                                     180,224 for K = V = 128, C = 64
    backward    again: A_qk, L, w, u, w S, k^T v'                       4KV + C (6K + 2V)
                dA_qk 2CV, dv' 2CV + 2KV, d(q G) 2KV, d(k G) 2KV, dw 2KV, dS 4KV
                dM 2CK + 2CV, M^T dw 2CK, M^T du 2CV, dL 4CC            by M^T dM M^T
                dq, dk from dA_qk 4CK, dk (twice) from dL 4CK
                = 16KV + C (18K + 10V + 4C)                             507,904

Token by token: decay KV, k^T S 2KV, update 2KV, q^T S 2KV = 7KV. A convolution takes 2W a value forward and, computing
its output again, 6W backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .specs import ConvSpec, DeltaSpec, Spec


@dataclass(frozen=True)
class Counts:
    bytes: int
    operations: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.bytes + other.bytes, self.operations + other.operations)

    def gb_per_second(self, ms: float) -> float:
        return self.bytes / ms / 1e6

    def tflops(self, ms: float) -> float:
        return self.operations / ms / 1e9


def size(tensors: Iterable[object]) -> int:
    """Bytes of the tensors among some values."""
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))


def forward(spec: Spec, arguments: Iterable[object], results: Iterable[object]) -> Counts:
    """Of a call with these arguments and results."""
    return Counts(size(arguments) + size(results), _operations(spec, backward=False))


def backward(spec: Spec, arguments: Iterable[object], results: Iterable[object], gradients: Iterable[object]) -> Counts:
    """Of the backward pass of that call alone; the gradients of the results are as large as the results."""
    return Counts(size(arguments) + size(results) + size(gradients), _operations(spec, backward=True))


def _operations(spec: Spec, backward: bool) -> int:
    if isinstance(spec, ConvSpec):
        return (6 if backward else 2) * spec.width * spec.channels * spec.batch * spec.tokens
    if not isinstance(spec, DeltaSpec):
        return 0
    k, v, c = spec.key_dim, spec.value_dim, spec.chunk_size or 64
    rows = spec.batch * spec.tokens * spec.hv
    if backward:
        return rows * (16 * k * v + c * (18 * k + 10 * v + 4 * c))
    if spec.op.startswith("fused_recurrent"):
        return rows * 7 * k * v
    return rows * (6 * k * v + c * (6 * k + 4 * v))
