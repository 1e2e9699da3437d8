"""What the scan should cost, on paper: bytes, tensor cycles, on-chip traffic and the serial chain, from a machine's figures.

    python bench/model.py

A chunk of a CTA takes at least as long as its serial chain; a wave of CTAs takes at least as long as its bytes need from memory, its
operands from L2 and its products in the tensor cores. The largest of these counts, wave after wave. The Hopper scans that were measured are
predicted by the same arithmetic: that is the model's check.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CHUNK = 64


@dataclass(frozen=True)
class Machine:
    """A GPU. `assumed` names the figures that nobody here has measured."""

    name: str
    sms: int
    ghz: float
    macs: int  # 16-bit multiply-adds a cycle and SM
    memory: float  # TB/s
    l2: float  # TB/s
    assumed: tuple[str, ...] = ()


H200 = Machine("H200", 132, 1.95, 2048, 4.27, 5.5, ("l2",))
B200 = Machine("B200", 148, 1.85, 4096, 7.2, 11.0, ("ghz", "memory", "l2"))
B300 = Machine("B300", 148, 1.92, 4096, 7.2, 11.0, ("ghz", "memory", "l2"))


@dataclass(frozen=True)
class Latencies:
    """Cycles of Blackwell's serial steps; assumed, from what Hopper's steps take and from the widths of the data paths."""

    hand_over: int = 90  # arrive, barrier, the waiting warp goes on
    product: int = 100  # from a product's last issue to its completion, beyond its rate
    load: int = 50  # tensor memory to registers, first word
    store: int = 30  # registers to tensor memory, until it is complete
    columns: float = 1.0  # of 32 lanes x 32 bits, a cycle and warp, both ways


@dataclass(frozen=True)
class Shape:
    """A call: sequences times value heads are `units`."""

    batch: int
    tokens: int
    heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def units(self) -> int:
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return -(-self.tokens // CHUNK)


@dataclass(frozen=True)
class Scan:
    """A kernel: `tile` columns of V a CTA, `share` CTAs that fetch common operands once, `chain` cycles a chunk, `tensor` of them in the
    tensor cores, `operands` bytes of a chunk that all tiles need, `values` bytes that one tile reads and writes."""

    name: str
    tile: int
    share: int
    chain: float
    tensor: float
    operands: int
    values: int
    ctas_per_sm: int = 1


def tensor_cycles(machine: Machine, key_dim: int, tile: int, *, inverse: bool = False) -> float:
    """Of a chunk: S w, S qg, v' kg over K, v' Aqk (and R M' or v M' where the scan applies the inverse) over the chunk's tokens."""
    macs = tile * CHUNK * (3 * key_dim + CHUNK * (2 if inverse else 1))
    # Blackwell's instruction of 64 rows takes as long as that of 128.
    rate = machine.macs / 2 if machine.macs == 4096 and tile == 64 else machine.macs
    return macs / rate


def operand_bytes(key_dim: int, *, inverse: bool = False, strips: bool = False) -> int:
    """w (or kd), qg, kg and Aqk (and M') of a chunk in 16 bits, and its decay factors; `strips`: without most zeros of triangular ones."""
    columns = 40 if strips else CHUNK
    return 2 * CHUNK * (3 * key_dim + columns * (2 if inverse else 1)) + 4 * key_dim


def blackwell_steps(machine: Machine, key_dim: int, tile: int, t: Latencies = Latencies()) -> list[tuple[str, float]]:
    """The serial chain of a chunk, step by step. Blocks of 64 key dimensions overlap: only the last block's product heads the chain.

    v^T M'^T is no step: it runs after v'^T Aqk^T, while S^T is updated, and is done before the update of S^T's last block is.
    """
    blocks, rows = key_dim // 64, tile // 64
    product = tile * CHUNK * 64 / (machine.macs / 2 if tile == 64 else machine.macs)
    block = (
        t.load + 32 * rows / t.columns  # D into registers
        + rows * (32 + 16)  # a multiply-add an element, a conversion for two
        + t.store + 16 * rows / t.columns  # S^T, rounded, back
    )  # fmt: skip
    return [
        ("S^T's last block handed over", t.hand_over),
        ("its product of P", product + t.product),
        ("P handed over", t.hand_over),
        ("P into registers", t.load + 32 * rows / t.columns),
        ("v' = P, rounded", rows * 16),  # a conversion for two
        ("v' into tensor memory", t.store + 16 * rows / t.columns),
        ("v' handed over", t.hand_over),
        ("D's first block", product + t.product),
        ("D handed over", t.hand_over),
        (f"S^T updated, {blocks} block{'s' * (blocks > 1)}", blocks * block),
    ]


def blackwell(machine: Machine, key_dim: int, tile: int, share: int, t: Latencies = Latencies()) -> Scan:
    chain = sum(cycles for _, cycles in blackwell_steps(machine, key_dim, tile, t))
    tensor = tensor_cycles(machine, key_dim, tile, inverse=True)
    name = f"tile {tile}{', pairs' if share > 1 else ''}"
    operands = operand_bytes(key_dim, inverse=True)
    return Scan(name, tile, share, max(chain, tensor), tensor, operands, 2 * 2 * CHUNK * tile)


EXPOSED = 480.0
"""Cycles a chunk of Hopper's scan in which no product runs: the only number fitted, to the 1,376 cycles of the prototype's one
warpgroup."""


def hopper(machine: Machine, key_dim: int, tile: int, share: int, *, inverse: bool, strips: bool = False) -> Scan:
    """One warpgroup for 64 columns of V: everything is serial but what a second warpgroup's products cover."""
    tensor = tensor_cycles(machine, key_dim, tile, inverse=inverse)
    kind = f"{'scan' if inverse else 'prototype'}{', strips' if strips else ''}"
    name = f"{kind}, tile {tile}{', pairs' if share > 1 else ''}"
    operands = operand_bytes(key_dim, inverse=inverse, strips=strips)
    return Scan(name, tile, share, tensor + EXPOSED, tensor, operands, 2 * 2 * CHUNK * tile)


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a call, and of each bound alone."""

    total: float
    chain: float
    tensor: float
    memory: float
    l2: float
    waves: int

    @property
    def bound(self) -> str:
        return max(("chain", "tensor", "memory", "l2"), key=lambda n: float(getattr(self, n)))


def predict(machine: Machine, scan: Scan, shape: Shape) -> Prediction:
    """Wave by wave, the slowest of chain, products, memory and L2."""
    tiles = shape.value_dim // scan.tile
    ctas, at_once = shape.units * tiles, machine.sms * scan.ctas_per_sm
    second = 1e-6 / machine.ghz  # ms a cycle
    totals = dict(total=0.0, chain=0.0, tensor=0.0, memory=0.0, l2=0.0)
    waves = 0
    while ctas > 0:
        now = min(ctas, at_once)
        parts = dict(
            chain=shape.chunks * scan.chain * second,
            tensor=shape.chunks * scan.tensor * -(-now // machine.sms) * second,
            memory=now * shape.chunks * (scan.operands / tiles + scan.values) / machine.memory * 1e-9,
            l2=now * shape.chunks * (scan.operands / scan.share + scan.values) / machine.l2 * 1e-9,
        )
        totals = {n: totals[n] + (max(parts.values()) if n == "total" else parts[n]) for n in totals}
        ctas, waves = ctas - now, waves + 1
    return Prediction(**totals, waves=waves)


def on_chip_bytes(key_dim: int, tile: int) -> dict[str, int]:
    """A chunk's traffic on the SM: shared memory by copies, by products (a panel for each block, and v) and by warps; tensor memory by
    products (operands, sums written) and by warps."""
    panel, blocks = 2 * 64 * 64, key_dim // 64
    panels = 3 * blocks + 2
    tile_panel = panel * tile // 64
    return {
        "shared, copies": (panels * panel) + 2 * tile_panel + 4 * key_dim,
        "shared, products": panels * panel + tile_panel,
        "shared, warps": tile_panel + 4 * 4 * key_dim,
        "tensor, products": panels * (tile_panel + 2 * tile_panel) - tile_panel,
        "tensor, warps": tile_panel * (2 + 1 + 3 * blocks + 2),
    }


# Milliseconds on one H200, 2026-11-30: the prototype of the Hopper scan (w, qg, kg, u, Aqk handed over; K = V = 128).
MEASURED: list[tuple[Shape, int, int, float]] = [
    (Shape(1, 8192, 64), 64, 1, 0.209), (Shape(1, 8192, 64), 64, 2, 0.182), (Shape(1, 8192, 64), 128, 1, 0.188),
    (Shape(1, 8192, 96), 64, 1, 0.34), (Shape(1, 8192, 96), 64, 2, 0.30), (Shape(1, 8192, 96), 128, 1, 0.285),
    (Shape(2, 8192, 32), 64, 1, 0.21), (Shape(2, 8192, 32), 64, 2, 0.182), (Shape(2, 8192, 32), 128, 1, 0.190),
    (Shape(1, 32768, 8), 64, 1, 0.362), (Shape(1, 32768, 8), 64, 2, 0.369), (Shape(1, 32768, 8), 128, 1, 0.62),
]  # fmt: skip


OWN = (
    (Shape(1, 8192, 64, 128, 128), 64, 1, 0.238),
    (Shape(1, 8192, 64, 128, 128), 64, 2, 0.199),
    (Shape(1, 8192, 64, 128, 128), 128, 1, 0.232),
    (Shape(16, 8192, 16, 128, 256), 64, 1, 1.328),
    (Shape(16, 8192, 16, 128, 256), 64, 2, 1.263),
    (Shape(16, 8192, 16, 128, 256), 128, 1, 1.193),
    (Shape(16, 8192, 16, 128, 256), 128, 2, 1.084),
    (Shape(1, 32768, 8, 128, 128), 64, 1, 0.457),
    (Shape(1, 32768, 8, 128, 128), 64, 2, 0.458),
    (Shape(1, 32768, 8, 128, 128), 128, 1, 0.763),
)
"""`sm90.kda_scan` on an H200 on 2026-11-30: shape, columns of V a CTA, CTAs that share operands, milliseconds."""

OWN_STRIPS = ((Shape(1, 8192, 64, 128, 128), 64, 2, 0.181),)
"""The same with strips of M' and Aqk, as it has run since."""


def hopper_check(*, own: bool = False) -> list[tuple[Shape, Scan, Prediction, float]]:
    """Measured calls, of the prototype or of this package's own scan, with what the model says of them."""
    rows = []
    calls = [(x, False) for x in (OWN if own else MEASURED)] + [(x, True) for x in OWN_STRIPS if own]
    for (shape, tile, share, measured), strips in calls:
        scan = hopper(H200, shape.key_dim, tile, share, inverse=own, strips=strips)
        rows.append((shape, scan, predict(H200, scan, shape), measured))
    return rows


TARGET = Shape(16, 8192, 16, 128, 256)
"""The call that kernel-fun publishes: forward 5.95 ms on a B300, fla's 7.50."""


def stages(machine: Machine, shape: Shape) -> dict[str, float]:
    """Milliseconds that the stages before the scan need for their bytes: raw q, k, gate to the workspace; M' on kd to w."""
    K = shape.key_dim
    tokens = shape.batch * shape.tokens * shape.heads
    prepare = tokens * (2 * 3 * K + 2 * 3 * K + 2 * 2 * CHUNK + 4 * K / CHUNK)
    apply = tokens * (2 * CHUNK + 2 * 2 * K)
    return {"prepare": prepare / machine.memory * 1e-9, "apply": apply / machine.memory * 1e-9}


def main() -> None:
    print("Hopper, predicted and measured (ms): the prototype, then this package's scan")
    for shape, scan, p, measured in [*hopper_check(), *hopper_check(own=True)]:
        call = f"{shape.batch}, {shape.tokens}, {shape.heads}"
        print(
            f"  {call:12} {scan.name:26} {p.total:.3f}  {measured:.3f}  {p.total / measured - 1:+.0%}  bound by {p.bound}"
        )
    print("\nA chunk on Blackwell, K 128: the serial chain (cycles)")
    for wide, narrow in zip(blackwell_steps(B300, 128, 128), blackwell_steps(B300, 128, 64), strict=True):
        print(f"  {wide[0]:32} tile 128 {wide[1]:5.0f}   tile 64 {narrow[1]:5.0f}")
    print(
        "\nBytes of a chunk, K 128, tile 128: "
        + ", ".join(f"{n} {b / 1024:.0f} KB" for n, b in on_chip_bytes(128, 128).items())
    )
    print(
        f"\nThe scan at B {TARGET.batch}, T {TARGET.tokens}, H {TARGET.heads}, K {TARGET.key_dim}, V {TARGET.value_dim} (ms)"
    )
    for machine in (B200, B300):
        for tile in (128, 64):
            for share in (1, 2):
                scan = blackwell(machine, TARGET.key_dim, tile, share)
                p = predict(machine, scan, TARGET)
                alone = f"chain {p.chain:.2f}, tensor {p.tensor:.2f}, memory {p.memory:.2f}, L2 {p.l2:.2f}"
                print(
                    f"  {machine.name} {scan.name:16} {scan.chain:5.0f} cycles, {p.waves} waves: {p.total:.2f}  ({alone})"
                )
        before = stages(machine, TARGET)
        best = predict(machine, blackwell(machine, 128, 128, 2), TARGET).total
        print(f"  {machine.name} whole forward, by bytes before the scan: " + ", ".join(f"{n} {x:.2f}" for n, x in before.items())
              + f", together {sum(before.values()) + best:.2f}; published on B300: kernel-fun 5.95, fla 7.50")  # fmt: skip
    print("\nIf what is assumed is off: B300, tile 128, pairs (ms)")
    for name, machine, t in (
        ("latencies half as long again", B300, Latencies(135, 150, 75, 45)),
        ("L2 at 8 TB/s", replace(B300, l2=8.0), Latencies()),
        ("memory at 6.5 TB/s", replace(B300, memory=6.5), Latencies()),
    ):
        print(f"  {name:30} {predict(machine, blackwell(machine, 128, 128, 2, t), TARGET).total:.2f}")


if __name__ == "__main__":
    main()
