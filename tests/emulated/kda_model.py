"""What the KDA forward kernels should give, in float64, and the workspace's layout: slots of chunks, panels, matrices."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

CHUNK = 64


@dataclass(frozen=True)
class Chunk:
    """Tokens first .. first + rows - 1 of batch entry `batch`, in slot `slot`, chunk `index` of sequence `sequence`."""

    slot: int
    batch: int
    sequence: int
    index: int
    first: int
    rows: int


def chunks_of(batch: int, tokens: int, bounds: list[int] | None = None) -> tuple[int, list[Chunk]]:
    """The number of slots and all chunks; `bounds` (cu_seqlens) where sequences are packed."""
    found = []
    if bounds is None:
        per = -(-tokens // CHUNK)
        for b in range(batch):
            found += [Chunk(b * per + c, b, b, c, c * CHUNK, min(CHUNK, tokens - c * CHUNK)) for c in range(per)]
        return batch * per, found
    for n, (bos, eos) in enumerate(itertools.pairwise(bounds)):
        for c, first in enumerate(range(bos, eos, CHUNK)):
            found.append(Chunk(bos // CHUNK + n + c, 0, n, c, first, min(CHUNK, eos - first)))
    return tokens // CHUNK + len(bounds) - 1, found


def _places() -> torch.Tensor:
    i, c = torch.arange(64)[:, None], torch.arange(64)[None, :]
    return i * 64 + (((c // 8) ^ (i & 7)) * 8 + c % 8)


def matrix(image: torch.Tensor) -> torch.Tensor:
    """Panels [..., P, 64, 64] as matrices [..., 64, P * 64]; [..., 64, 64] without a dimension of panels is P = 1 of its own."""
    flat = image.reshape(*image.shape[:-2], 64 * 64)
    panels = flat[..., _places()]
    return panels.transpose(-3, -2).reshape(*panels.shape[:-3], 64, -1) if image.dim() > 2 else panels


def image(m: torch.Tensor) -> torch.Tensor:
    """Matrices [..., 64, P * 64] as panels [..., P, 64, 64]."""
    panels = m.reshape(*m.shape[:-1], -1, 64).transpose(-3, -2)
    out = torch.empty(*panels.shape[:-2], 64 * 64, dtype=m.dtype)
    out[..., _places().reshape(-1)] = panels.reshape(*panels.shape[:-2], 64 * 64)
    return out.reshape(panels.shape)


def _strip_places() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of a matrix in the order in which its strips have them."""
    found = []
    for s in range(4):
        for i in range(16 * s, 64):
            vectors = (1, 0) if i // 4 % 2 else (0, 1)
            found += [(i, 16 * s + 8 * vector + c) for vector in vectors for c in range(8)]
    rows, columns = torch.tensor(found).unbind(1)
    return rows, columns


def strips(m: torch.Tensor) -> torch.Tensor:
    """Lower triangular matrices [..., 64, 64] as strips at the start of places of panels, NaN behind them."""
    rows, columns = _strip_places()
    out = torch.full((*m.shape[:-2], 64 * 64), math.nan, dtype=m.dtype)
    out[..., : len(rows)] = m[..., rows, columns]
    return out.unflatten(-1, (64, 64))


UNDECIDED = -2
"""The code of a unit of which nobody has decided whether it starts early (`tile.early`)."""
LIVE = 5120 // 4
"""Where a chunk's scores, read as words, have the number of live blocks of 16 rows of kd and qg (`tile.panel`)."""


def live_blocks(scores: torch.Tensor) -> torch.Tensor:
    """A view of the live blocks' numbers, int32 [slots, HV], of scores as strips."""
    return scores.flatten(2).view(torch.int32)[..., LIVE]


def rows_behind(factors: torch.Tensor, live: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Views of kd and qg [slots, HV, 64, K / 64, 64] of images [slots, HV, 3, K / 64, 64, 64]; which rows are behind the live blocks."""
    return [factors[:, :, i].transpose(2, 3) for i in range(2)], torch.arange(CHUNK) >= 16 * live.long()[..., None]


def from_strips(x: torch.Tensor) -> torch.Tensor:
    """Strips as matrices, with zeros where strips have nothing."""
    rows, columns = _strip_places()
    out = torch.zeros_like(x)
    out[..., rows, columns] = x.flatten(-2)[..., : len(rows)]
    return out


def log2_decay(
    kind: str, g: torch.Tensor, a_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float
) -> torch.Tensor:
    """The gate's base-2 logarithm [B, T, HV, K] in float64."""
    x = g.double()
    if kind == "log":
        return x / math.log(2)
    if dt_bias is not None:
        x = x + dt_bias.double().view(g.shape[2], g.shape[3])
    rate = torch.ones(g.shape[2], 1, dtype=torch.float64) if a_log is None else a_log.double().exp()[:, None]
    natural = -rate * torch.nn.functional.softplus(x) if kind == "softplus" else lower_bound * torch.sigmoid(rate * x)
    return natural / math.log(2)


@dataclass
class Prepared:
    """Operands of the scan in float64: kd, qg, kg [slots, HV, 64, K]; m (M'), aqk, inverse (M) [slots, HV, 64, 64]; decay [slots, HV, K];
    beta [slots, HV, 64].

    NaN in slots of no chunk.
    """

    kd: torch.Tensor
    qg: torch.Tensor
    kg: torch.Tensor
    m: torch.Tensor
    aqk: torch.Tensor
    inverse: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    chunks: list[Chunk]


def prepare_model(
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    gate: str = "log",
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    bounds: list[int] | None = None,
    scale: float,
    lower_bound: float = -5.0,
    beta_limit: float = 1.0,
    l2norm: bool = False,
    beta_sigmoid: bool = False,
) -> Prepared:
    """The equations of `deltafuse.kernels.warp.kda_prepare`, chunk by chunk."""
    heads, hv, dim = q.shape[2], g.shape[2], q.shape[3]
    q, k = q.double(), k.double()
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(hv // heads, 2) for x in (q, k))
    decays = log2_decay(gate, g, a_log, dt_bias, lower_bound)
    beta = beta.double()
    if beta_sigmoid:
        beta = beta.sigmoid() * beta_limit
    slots, chunks = chunks_of(q.shape[0], q.shape[1], bounds)
    rows = [torch.full((slots, hv, 64, dim), math.nan, dtype=torch.float64) for _ in range(3)]
    square = [torch.full((slots, hv, 64, 64), math.nan, dtype=torch.float64) for _ in range(3)]
    columns = [torch.full((slots, hv, n), math.nan, dtype=torch.float64) for n in (dim, 64)]
    out = Prepared(*rows, *square, *columns, chunks)
    lower = torch.tril(torch.ones(64, 64, dtype=torch.bool))
    for c in chunks:
        part = [
            torch.nn.functional.pad(x[c.batch, c.first : c.first + c.rows].transpose(0, 1), (0, 0, 0, 64 - c.rows))
            for x in (q, k, decays, beta[..., None])
        ]
        qc, kc, gc, bc = part
        sums = gc.cumsum(1)
        last = sums[:, -1:]
        out.kd[c.slot] = -kc * sums.exp2()
        out.qg[c.slot] = scale * qc * sums.exp2()
        out.kg[c.slot] = kc * (last - sums).exp2()
        out.decay[c.slot] = last[:, 0].exp2()
        # [HV, i, j, K]; above the diagonal nothing is taken to a power.
        between = (sums[:, :, None] - sums[:, None]).masked_fill(~lower[None, :, :, None], -math.inf).exp2()
        out.aqk[c.slot] = scale * torch.einsum("hid,hjd,hijd->hij", qc, kc, between)
        products = torch.einsum("hid,hjd,hijd->hij", kc, kc, between).tril(-1) * bc
        eye = torch.eye(64, dtype=torch.float64).expand_as(products)
        inverse = torch.linalg.solve_triangular(eye + products, eye, upper=False, unitriangular=True)
        out.m[c.slot] = inverse * bc.transpose(1, 2)
        out.inverse[c.slot] = inverse * (torch.arange(64) < c.rows)[:, None]
        out.beta[c.slot] = bc[..., 0]
    return out
