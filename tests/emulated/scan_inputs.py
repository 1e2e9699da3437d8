"""Operands of the scan made from random q, k, v, gates and beta, in both forms; what the scan should give."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from kda_model import CHUNK, image, matrix

Tensor = torch.Tensor


@dataclass
class Inputs:
    """Operands for sequences of `lengths` tokens, dense where `packed` is False (then all have the same length)."""

    lengths: list[int]
    packed: bool = False
    heads: int = 1
    key_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    scale: float = 0.0
    tokens: dict[str, Tensor] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scale = self.scale or self.key_dim**-0.5
        n, K, V, H = len(self.lengths), self.key_dim, self.value_dim, self.heads
        self.batch, self.T = (1, sum(self.lengths)) if self.packed else (n, self.lengths[0])
        self.starts = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        self.cu = torch.tensor(self.starts) if self.packed else None
        shape = (self.batch, self.T, H)
        rand = torch.Generator().manual_seed(self.seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=rand, dtype=torch.float64)

        q, k = (torch.nn.functional.normalize(normal(*shape, K), dim=-1) for _ in range(2))
        v, beta = normal(*shape, V), torch.sigmoid(normal(*shape))
        gate = -torch.exp(normal(*shape, K) - 3) / math.log(2)
        self.h0 = (normal(n, H, K, V) * 0.3).float()
        widths = dict(qg=K, kg=K, w=K, u=V, aqk=CHUNK)
        t = {name: torch.zeros(*shape, width, dtype=self.dtype) for name, width in widths.items()}
        t["g"] = torch.zeros(*shape, K)
        count = self.T // CHUNK + n if self.packed else n * -(-self.T // CHUNK)
        nan = float("nan")
        s = {
            "factors": torch.full((count, H, 3, K // 64, 64, 64), nan, dtype=self.dtype),
            "scores": torch.full((count, H, 2, 64, 64), nan, dtype=self.dtype),
            "decay": torch.full((count, H, K), nan),
            "w": torch.full((count, H, K // 64, 64, 64), nan, dtype=self.dtype),
            "g_last": torch.full((count, H, K), nan),
        }
        self.v = v.to(self.dtype)
        for i, c, h in ((a, b, h) for a in range(n) for b in range(self.chunks(a)) for h in range(H)):
            b, rows = self.place(i, c)
            m = rows.stop - rows.start
            x = [y[b, rows, h] for y in (q, k, v, beta, gate)]
            part = _chunk(*x, self.scale, self.dtype)
            for name in widths:
                value = part[name] if name != "aqk" else torch.nn.functional.pad(part[name], (0, CHUNK - m))
                t[name][b, rows, h] = value.to(self.dtype)
            t["g"][b, rows, h] = part["G"].float()
            slot = self.slot(i, c)
            s["g_last"][slot, h] = part["G"][-1].float()
            s["decay"][slot, h] = torch.exp2(part["G"][-1]).float()

            def full(y: Tensor, columns: int = 0, m: int = m) -> Tensor:
                return torch.nn.functional.pad(y, (0, columns - y.shape[1] if columns else 0, 0, CHUNK - m)).to(
                    self.dtype
                )

            s["factors"][slot, h] = image(torch.stack([full(part[y]) for y in ("kd", "scaled", "kg")]))
            s["scores"][slot, h] = image(torch.stack([full(part[y], CHUNK) for y in ("m", "aqk")]))[:, 0]
            s["w"][slot, h] = image(full(-part["w"]))
        self.tokens, self.slots = t, s

    def chunks(self, i: int) -> int:
        return -(-self.lengths[i] // CHUNK)

    def slot(self, i: int, c: int) -> int:
        return self.starts[i] // CHUNK + i + c if self.packed else i * self.chunks(i) + c

    def place(self, i: int, c: int) -> tuple[int, slice]:
        """Batch entry and tokens of a chunk."""
        first = self.starts[i] if self.packed else 0
        return 0 if self.packed else i, slice(first + CHUNK * c, first + min(CHUNK * (c + 1), self.lengths[i]))

    def expected(self, initial: bool, *, rounded: bool = False, images: bool = False) -> tuple[Tensor, Tensor]:
        """o [B, T, HV, V] and the final states [N, HV, K, V] in float64 of the rounded operands.

        `rounded`: with v' and the state rounded before a product and o at the end, sums in float32. `images`: of the slots, which have
        the scale in qg, and M' and v for u.
        """
        work = torch.float32 if rounded else torch.float64
        o = torch.zeros(self.batch, self.T, self.heads, self.value_dim, dtype=torch.float64)
        states = (self.h0 if initial else torch.zeros_like(self.h0)).double()

        def cast(x: Tensor) -> Tensor:
            return x.to(self.dtype).to(work) if rounded else x

        for i, h in itertools.product(range(len(self.lengths)), range(self.heads)):
            S = states[i, h].to(work)
            for c in range(self.chunks(i)):
                b, rows = self.place(i, c)
                m, slot = rows.stop - rows.start, self.slot(i, c)
                qg, kg, w, u, aqk = (self.tokens[n][b, rows, h].to(work) for n in ("qg", "kg", "w", "u", "aqk"))
                qs = self.scale * (qg @ cast(S))
                if images:
                    qs = matrix(self.slots["factors"][slot, h, 1])[:m].to(work) @ cast(S)
                    u = matrix(self.slots["scores"][slot, h, :1])[:m, :m].to(work) @ self.v[b, rows, h].to(work)
                new = cast(u - w @ cast(S))
                o[b, rows, h] = cast(qs + aqk[:, :m] @ new).double()
                S = torch.exp2(self.slots["g_last"][slot, h].to(work))[:, None] * S + kg.T @ new
            states[i, h] = S.double()
        return o, states


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gate: Tensor, scale: float, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Everything that the stages before the scan make of a chunk, in float64; what they hand over rounded is used rounded."""
    G = gate.cumsum(0)
    span = torch.exp2(G[:, None] - G[None])
    lower = torch.tril(torch.ones(len(k), len(k), dtype=torch.float64))
    M = torch.linalg.inv(
        torch.eye(len(k), dtype=torch.float64)
        + beta[:, None] * torch.einsum("id,jd,ijd->ij", k, k, span) * (lower - torch.eye(len(k)))
    )
    m = (M * beta).to(dtype).double()
    kd = (-k * torch.exp2(G)).to(dtype).double()
    return dict(
        G=G, qg=q * torch.exp2(G), scaled=scale * q * torch.exp2(G), kg=k * torch.exp2(G[-1] - G), kd=kd, m=m,
        w=-m @ kd, u=m @ v.to(dtype).double(), aqk=scale * torch.einsum("id,jd,ijd->ij", q, k, span * lower[..., None]),
    )  # fmt: skip


def error(got: Tensor, want: Tensor) -> float:
    """RMS(got - want) / RMS(want); infinite where got holds NaN."""
    e = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return e if e == e else math.inf
