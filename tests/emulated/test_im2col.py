"""Tensor copies in the modes of convolutions, against torch's unfold, and of four rows, against indexing."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from memory_ptx import INIT, copy_in, copy_out, expect, run, wait
from test_tma import AT_MAP, MAP, MEET, RANK, coordinates, swizzle_of

import ptxemu
from ptxemu import launch

Ints = Sequence[int]


def values(shape: Ints, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randint(-100, 100, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def columns(x: torch.Tensor, filter_: Ints, padding: int, stride: int, dilation: int = 1) -> torch.Tensor:
    """[taps..., pixels, channels] of a convolution over x of N {D} {H} W C: what each filter element is multiplied with."""
    y = x.movedim(-1, 1)
    spatial = y.dim() - 2
    y = F.pad(y, (padding, padding) * spatial)
    for d, size in enumerate(filter_):
        y = y.unfold(2 + d, (size - 1) * dilation + 1, stride)[..., ::dilation]
    order = [*range(2 + spatial, 2 + 2 * spatial), 0, *range(2, 2 + spatial), 1]
    return y.permute(order).reshape(*filter_, -1, x.shape[-1])


def load(
    rank: int, at: Ints, offsets: Ints, n: int, *, offset: int = 1024, mode: str = "im2col", cta: str = "cluster"
) -> str:
    moves = "".join(f"    mov.u16 %h{i + 1}, {o};\n" for i, o in enumerate(offsets))
    names = ", ".join(f"%h{i + 1}" for i in range(len(offsets)))
    return (
        INIT + expect(n) + AT_MAP + moves + f"    add.u32 %r2, %r1, {offset};\n"
        f"    @%p1 cp.async.bulk.tensor.{rank}d.shared::{cta}.global.{mode}.mbarrier::complete_tx::bytes"
        f" [%r2], [%d9, {coordinates(at)}], [%r1], {{{names}}};\n" + wait()
    )  # fmt: skip


def loaded(
    x: torch.Tensor,
    raw: bytes,
    at: Ints,
    offsets: Ints,
    rows: int,
    channels: int,
    *,
    offset: int = 1024,
    **options: Any,
) -> bytes:
    """What a copy leaves in shared memory."""
    n = rows * channels * x.element_size()
    out = torch.zeros(n // 4, dtype=torch.int32)
    form = {k: options.pop(k) for k in ("mode", "cta") if k in options}
    body = load(x.dim(), at, offsets, n, offset=offset, **form) + copy_out("%d1", "%r2", n)
    run(body, [x, out, raw], shared=offset + n, extra=MAP, **options)
    return out.numpy().tobytes()


def raw_bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def zero_padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(rows, x.shape[1])])[:rows]


# ---- im2col ----------------------------------------------------------------------------------------------------------------------------
CONVOLUTIONS = [  # shape, filter, padding, stride, dilation, pixels
    ((3, 11, 16), (3,), 1, 1, 1, 16), ((2, 13, 8), (5,), 2, 2, 1, 8), ((2, 13, 8), (3,), 2, 1, 2, 24),
    ((2, 6, 7, 16), (3, 3), 1, 1, 1, 32), ((2, 6, 7, 16), (3, 3), 1, 2, 1, 16), ((2, 9, 8, 8), (2, 4), 0, 1, 1, 64),
    ((2, 9, 8, 8), (3, 3), 2, 1, 2, 40), ((3, 5, 5, 16), (1, 1), 0, 3, 1, 8), ((2, 4, 5, 6, 8), (2, 3, 3), 1, 1, 1, 64),
    ((2, 4, 5, 6, 8), (3, 2, 2), 1, 2, 1, 16),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "filter_", "padding", "stride", "dilation", "pixels"), CONVOLUTIONS)
def test_columns_of_convolutions(
    shape: tuple[int, ...], filter_: tuple[int, ...], padding: int, stride: int, dilation: int, pixels: int
) -> None:
    """Every tap, from the first pixel and from one in the middle (whose walk passes the end of the batch)."""
    x = values(shape)
    spatial = len(filter_)
    lower = [-padding] * spatial
    upper = [padding - (f - 1) * dilation for f in filter_]
    raw = ptxemu.im2col_map(x, lower, upper, 4, pixels, step=[stride] * spatial)
    want = columns(x, filter_, padding, stride, dilation)
    counts = [
        (s + 2 * padding - (f - 1) * dilation - 1) // stride + 1 for s, f in zip(shape[1:-1], filter_, strict=True)
    ]
    taps = list(np.ndindex(*filter_))
    for i, tap in enumerate(taps if spatial < 3 else taps[::5]):
        first = (0, int(np.prod(counts)) * 3 // 2)[i % 2]
        image, rest = divmod(first, int(np.prod(counts)))
        where = [-padding + stride * k for k in np.unravel_index(rest, counts)]
        at = [4 * (i % 2), *reversed(where), image]
        got = loaded(x, raw, at, [k * dilation for k in reversed(tap)], pixels, 4, seed=i)
        rows = zero_padded(want[tap][first:], pixels)
        assert got == raw_bytes(rows[:, at[0] : at[0] + 4])


@pytest.mark.parametrize(("dtype", "channels"), [
    (torch.uint8, 32), (torch.float16, 16), (torch.bfloat16, 8), (torch.int32, 8), (torch.int64, 4), (torch.float64, 2),
])  # fmt: skip
def test_types(dtype: torch.dtype, channels: int) -> None:
    x = values((2, 5, 6, 2 * channels)).abs().to(dtype)
    raw = ptxemu.im2col_map(x, (-1, -1), (-1, -1), channels, 24)
    want = zero_padded(columns(x, (3, 3), 1, 1)[2, 1], 24)
    got = loaded(x, raw, (channels, -1, -1, 0), (1, 2), 24, channels)
    assert got == raw_bytes(want[:, channels:])


@pytest.mark.parametrize(("swizzle", "channels"), [(32, 16), (64, 32), (128, 64)])
def test_swizzles(swizzle: int, channels: int) -> None:
    x = values((2, 5, 6, 64), torch.bfloat16)
    raw = ptxemu.im2col_map(x, (0, 0), (-2, -2), channels, 16, swizzle=swizzle)
    tile = raw_bytes(columns(x, (3, 3), 0, 1)[1, 2][3:19, :channels])
    for offset in (1024, 1152):
        got = loaded(x, raw, (0, 3, 0, 0), (2, 1), 16, channels, offset=offset)
        assert got == swizzle_of(tile, swizzle, offset)


def test_channels_and_images_outside() -> None:
    """Past the last channel and image, and before the first, there are zeros or NaNs."""
    x = values((2, 4, 5, 16), torch.float16)
    for nan in (False, True):
        raw = ptxemu.im2col_map(x, (0, 0), (0, 0), 16, 24, nan_fill=nan)
        got = torch.frombuffer(bytearray(loaded(x, raw, (-8, 0, 0, -1), (0, 0), 24, 16)), dtype=torch.float16).view(
            24, 16
        )
        want = torch.full((24, 16), float("nan") if nan else 0.0, dtype=torch.float16)
        want[20:, 8:] = x[0, 0, :4, :8]
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_pixels_that_are_not_next_to_each_other() -> None:
    """A view of a larger tensor: strides are the map's own, and what lies between is not touched."""
    whole = values((2, 6, 8, 16))
    x = whole[:, 1:5, :6, 4:12]
    raw = ptxemu.im2col_map(x, (-1, 0), (-1, -2), 8, 16)
    want = columns(F.pad(x, (0, 0, 0, 0, 1, 1)), (3, 3), 0, 1)[1, 2][:16]
    out = torch.zeros(128, dtype=torch.int32)
    body = load(4, (0, 0, -1, 0), (2, 1), 512) + copy_out("%d1", "%r2", 512)
    run(body, [whole, out, raw], shared=2048, extra=MAP)
    assert out.numpy().tobytes() == raw_bytes(want)


def test_im2col_multicast() -> None:
    """Each of 2 CTAs loads half of the pixels for both."""
    x = values((2, 5, 5, 8))
    out = torch.zeros(2, 256, dtype=torch.int32)
    raw = ptxemu.im2col_map(x, (0, 0), (-2, -2), 8, 12)
    body = RANK + INIT + expect(768) + AT_MAP + MEET + (
        "    mad.lo.u32 %r2, %r10, 384, %r1;\n    add.u32 %r3, %r1, 1024;\n"
        "    mov.u16 %h1, 3;\n    mov.u16 %h2, 2;\n    mov.u16 %h3, 1;\n    mov.u32 %r5, 0;\n"
        "    @%p1 cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%r2+1024], [%d9, {%r5, %r5, %r5, %r10}], [%r1], {%h2, %h3}, %h1;\n"
        + wait() + "    mul.wide.u32 %d5, %r10, 1024;\n    add.u64 %d5, %d1, %d5;\n" + copy_out("%d5", "%r3", 768) + MEET
    )  # fmt: skip
    pixels = zero_padded(columns(x, (3, 3), 0, 1)[1, 2], 21)
    want = torch.cat([pixels[:12], pixels[9:]])
    for seed in range(3):
        run(body, [x, out, raw], grid=2, cluster=2, shared=2048, extra=MAP, seed=seed)
        for rank in range(2):
            assert out[rank, :192].numpy().tobytes() == raw_bytes(want)


# ---- maps of the CuTe DSL ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("shape", "lower", "upper", "step"), [
    ((2, 9, 64), (-1,), (-2,), (2,)), ((2, 8, 9, 64), (-2, -1), (-4, -3), (1, 2)), ((2, 7, 8, 9, 64), (-3, 0, -1), (-3, -2, -1), (3, 1, 2)),
])  # fmt: skip
def test_the_dsl_makes_the_same_maps(
    shape: tuple[int, ...], lower: Ints, upper: Ints, step: Ints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but what concerns the L2 cache."""
    x = values(shape, torch.float16)
    if importlib.util.find_spec("nvidia_cutlass_dsl") is None:
        pytest.skip("the CuTe DSL is not installed: pip install 'deltafuse[emulator]'")
    ptxemu.setup("sm_90a")
    from im2col_dsl import compiled

    function, argument = compiled(x, lower, upper, step)
    seen: list[bytes] = []
    monkeypatch.setattr(launch, "_execute", lambda *args: seen.append(args[6]))
    ptxemu.run(function, argument)
    got, want = (np.frombuffer(raw[:64], np.uint32).copy() for raw in (
        seen[0], ptxemu.im2col_map(x, lower, upper, 32, 64, step=step, swizzle=64),
    ))  # fmt: skip
    got[2] &= ~np.uint32(3 << 17)
    assert got.tolist() == want.tolist()


# ---- stores --------------------------------------------------------------------------------------------------------------------------
def stored(x: torch.Tensor, tile: torch.Tensor, raw: bytes, instruction: str) -> torch.Tensor:
    """x after an instruction copied `tile`, or added it."""
    x = x.clone()
    raw = x.data_ptr().to_bytes(8, "little") + raw[8:]
    n = tile.numel() * tile.element_size()
    body = AT_MAP + copy_in("%r1", "%d1", n) + (
        "    setp.eq.u32 %p1, %r0, 0;\n    fence.proxy.async.shared::cta;\n    bar.warp.sync 0xffffffff;\n"
        f"    @%p1 {instruction};\n    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group 0;\n"
    )  # fmt: skip
    arch = "sm_100a" if "scatter4" in instruction else "sm_90a"
    run(body, [x, tile.clone(), raw], shared=n, extra=MAP, arch=arch)
    return x


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize(("shape", "at", "pixels"), [
    ((3, 9, 8), (4, 2, 1), 12), ((2, 4, 5, 8), (0, 3, 2, 0), 16), ((2, 4, 5, 8), (4, 3, 2, 1), 16), ((2, 3, 2, 4, 8), (0, 1, 1, 2, 0), 20),
])  # fmt: skip
def test_stores_without_offsets(shape: tuple[int, ...], at: tuple[int, ...], pixels: int, reduce: bool) -> None:
    """Pixels in the order of N {D} {H} W, and nothing past the last channel and image."""
    x, tile = values(shape), values((pixels, 8), seed=1)
    raw = ptxemu.im2col_map(x, [0] * (len(shape) - 2), [0] * (len(shape) - 2), 8, pixels)
    form = ("cp.reduce.async", ".add") if reduce else ("cp.async", "")
    got = stored(
        x, tile, raw,
        f"{form[0]}.bulk.tensor.{len(shape)}d.global.shared::cta{form[1]}.im2col_no_offs.bulk_group [%d9, {coordinates(at)}], [%r1]",
    )  # fmt: skip
    want = x.clone().view(-1, shape[-1])
    first = int(np.ravel_multi_index(at[:0:-1], shape[:-1]))
    count = min(pixels, len(want) - first)
    want[first : first + count, at[0] :] = tile[:count, : 8 - at[0]] + (
        want[first : first + count, at[0] :] if reduce else 0
    )
    assert torch.equal(got.view(-1, shape[-1]), want)


def test_strided_stores() -> None:
    """A traversal stride leaves out pixels; the bounding box leaves out a border."""
    x, tile = values((2, 6, 7, 4)), values((8, 4), seed=1)
    raw = ptxemu.im2col_map(x, (1, 1), (-1, -2), 4, 8, step=(1, 2))
    got = stored(
        x, tile, raw, "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%d9, {0, 3, 4, 0}], [%r1]"
    )
    want = x.clone()
    places = [(0, 4, 3), (1, 1, 1), (1, 1, 3), (1, 2, 1), (1, 2, 3), (1, 3, 1), (1, 3, 3), (1, 4, 1)]
    for row, place in zip(tile, places, strict=True):
        want[place] = row
    assert torch.equal(got, want)


# ---- im2col::w --------------------------------------------------------------------------------------------------------------------------
def walk(x: torch.Tensor, h: int, w: int, lower: int, upper: int, step: int, count: int, offset: int) -> torch.Tensor:
    """Pixels along W at one H, image after image."""
    n, out = 0, []
    for _ in range(count):
        inside = n < x.shape[0] and 0 <= w + offset < x.shape[2] and 0 <= h < x.shape[1]
        out.append(x[n, h, w + offset] if inside else torch.zeros(x.shape[3], dtype=x.dtype))
        w += step
        if w > x.shape[2] - 1 + upper:
            n, w = n + 1, lower
    return torch.stack(out)


@pytest.mark.parametrize(("lower", "upper", "step", "start", "halo", "offset"), [
    (0, 0, 1, 2, 2, 0), (-1, 0, 2, -1, 1, 0), (-1, 0, 2, -1, 0, 1), (-1, -1, 3, -1, 0, 2), (0, -2, 1, -2, 2, 1),
])  # fmt: skip
def test_lines_of_images(lower: int, upper: int, step: int, start: int, halo: int, offset: int) -> None:
    x = values((5, 3, 9, 64), torch.bfloat16)
    raw = ptxemu.im2col_map(x, [lower], [upper], 64, 24, step=(1, step), swizzle=128, mode="im2col::w")
    want = walk(x, 1, start, lower, upper, step, 24 + halo, offset)
    got = loaded(x, raw, (0, start, 1, 0), (halo, offset), 24 + halo, 64, mode="im2col::w", arch="sm_100a")
    assert got == swizzle_of(raw_bytes(want), 128, 1024)


@pytest.mark.parametrize(("halo", "offset"), [(0, 0), (2, 0), (1, 1)])
def test_128_pixels_of_lines(halo: int, offset: int) -> None:
    """Halos of every 32 pixels lie behind all pixels: the first of each of them, then the second."""
    x = values((18, 2, 9, 16), torch.bfloat16)
    raw = ptxemu.im2col_map(x, [0], [0], 16, 32, swizzle=32, mode="im2col::w::128")
    line = walk(x, 1, 4, 0, 0, 1, 128 + halo, offset)
    want = torch.cat([line[:128], *(line[32 * (g + 1) + h][None] for h in range(halo) for g in range(4))])
    got = loaded(x, raw, (0, 4, 1, 0), (halo, offset), len(want), 16, mode="im2col::w::128", arch="sm_100a")
    assert got == swizzle_of(raw_bytes(want), 32, 1024)


# ---- four rows --------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [(2, 5, 0, 9), (9, 9, 1, 1), (-1, 3, 10, 50)])
def test_gathered_rows(rows: tuple[int, ...]) -> None:
    x = values((10, 24))
    raw = ptxemu.tiled_map(x, (1, 16))
    out = torch.zeros(64, dtype=torch.int32)
    body = INIT + expect(256) + AT_MAP + (
        "    add.u32 %r2, %r1, 1024;\n    @%p1 cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
        f" [%r2], [%d9, {coordinates((12, *rows))}], [%r1];\n" + wait() + copy_out("%d1", "%r2", 256)
    )  # fmt: skip
    run(body, [x, out, raw], shared=2048, extra=MAP, arch="sm_100a")
    want = torch.zeros(4, 16)
    for i, r in enumerate(rows):
        if 0 <= r < 10:
            want[i, :12] = x[r, 12:]
    assert out.numpy().tobytes() == raw_bytes(want)


def test_gathered_rows_with_a_swizzle() -> None:
    x = values((64, 64), torch.float16)
    raw = ptxemu.tiled_map(x, (1, 64), swizzle=128)
    out = torch.zeros(256, dtype=torch.int32)
    body = INIT + expect(1024) + AT_MAP + "    add.u32 %r2, %r1, 1024;\n    add.u32 %r3, %r1, 1536;\n"
    for place, rows in (("%r2", (60, 3, 17, 17)), ("%r3", (1, 2, 4, 8))):
        body += (
            "    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes"
            f" [{place}], [%d9, {coordinates((0, *rows))}], [%r1];\n"
        )
    run(body + wait() + copy_out("%d1", "%r2", 1024), [x, out, raw], shared=2048, extra=MAP, arch="sm_100a")
    assert out.numpy().tobytes() == swizzle_of(raw_bytes(x[[60, 3, 17, 17, 1, 2, 4, 8]]), 128, 1024)


def test_scattered_rows() -> None:
    x, tile = values((10, 24)), values((4, 16), seed=1)
    raw = ptxemu.tiled_map(x, (1, 16))
    got = stored(
        x,
        tile,
        raw,
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%d9, {12, 7, 3, 12, 0}], [%r1]",
    )
    want = x.clone()
    want[[7, 3, 0], 12:] = tile[[0, 1, 3], :12]
    assert torch.equal(got, want)


# ---- prefetches, faults ----------------------------------------------------------------------------------------------------------------
PREFETCH = "    cp.async.bulk.prefetch.tensor.{}d.L2.global.{} [%d9, {}]{};"


@pytest.mark.parametrize(("rank", "mode", "at", "info"), [
    (4, "im2col", (0, 0, 0, 0), ", {%h1, %h1}"), (4, "im2col::w", (0, 0, 0, 0), ", {%h1, %h1}"), (2, "tile::gather4", (0, 1, 2, 3, 4), ""),
])  # fmt: skip
def test_prefetches(rank: int, mode: str, at: tuple[int, ...], info: str) -> None:
    x = values((2, 4, 5, 32), torch.float16)
    if rank == 2:
        x = x.view(-1, 32)
        raw = ptxemu.tiled_map(x, (1, 32))
    elif mode == "im2col":
        raw = ptxemu.im2col_map(x, (0, 0), (0, 0), 32, 8)
    else:
        raw = ptxemu.im2col_map(x, (0,), (0,), 32, 8, swizzle=64, mode=mode)  # type: ignore[arg-type]
    body = AT_MAP + "    mov.u16 %h1, 0;\n" + PREFETCH.format(rank, mode, coordinates(at), info)
    arch = "sm_90a" if mode == "im2col" else "sm_100a"
    run(body, [x, raw], extra=MAP, arch=arch)
    short = torch.zeros(64, dtype=torch.float16)
    with pytest.raises(ptxemu.MemoryFault, match="out of bounds"):
        run(body, [short, short.data_ptr().to_bytes(8, "little") + raw[8:]], extra=MAP, arch=arch)


def attempt(body: str, raw: bytes, x: torch.Tensor, arch: str = "sm_90a") -> None:
    run(body, [x, torch.zeros(256, dtype=torch.int32), raw], shared=8192, extra=MAP, arch=arch)


def test_wrong_im2col_loads() -> None:
    x = values((2, 4, 5, 8))
    raw = ptxemu.im2col_map(x, (0, 0), (-2, -2), 8, 8)
    good = load(4, (0, 0, 0, 0), (1, 1), 256)
    attempt(good, raw, x)
    five = values((2, 4, 4, 5, 8))
    cases: list[tuple[str, bytes, torch.Tensor, type, str]] = [
        (load(4, (0, 3, 0, 0), (1, 1), 256), raw, x, ptxemu.MemoryFault, "coordinate 3 of dimension 1 .*bounding box from 0 to 2"),
        (load(4, (0, 0, -1, 0), (1, 1), 256), raw, x, ptxemu.MemoryFault, "coordinate -1 of dimension 2"),
        (load(4, (0, 0, 0, 0), (256, 1), 256), raw, x, ptxemu.MemoryFault, "offset 256 of dimension 1; .*less than 256"),
        (load(5, (0, 0, 0, 0, 0), (0, 0, 32), 256), ptxemu.im2col_map(five, (0, 0, 0), (0, 0, 0), 8, 8), five, ptxemu.MemoryFault,
         "offset 32 of dimension 3"),
        (load(4, (0, 0, 0, 0), (1, 1), 240), raw, x, ptxemu.BarrierFault, "more transaction bytes"),
        (load(4, (0, 0, 0, 0), (1, 1), 272), raw, x, ptxemu.Deadlock, "tx-count 16"),
        (load(3, (0, 0, 0), (1,), 256), raw, x, ptxemu.MemoryFault, "of 3 dimensions with a tensor map of rank 4"),
        (good, raw, x[:1].clone(), ptxemu.MemoryFault, "out of bounds"),
        (good, ptxemu.tiled_map(x, (1, 2, 4, 8)), x, ptxemu.MemoryFault, "in mode im2col with a tensor map of mode tile"),
        (good, ptxemu.im2col_map(x, (0, 0), (-5, 0), 8, 8), x, ptxemu.MemoryFault, "from 0 to -2 of dimension 2 holds nothing"),
        (good.replace(".im2col.", ".tile.").replace(", {%h1, %h2}", ""), raw, x, ptxemu.MemoryFault,
         "mode tile with a tensor map of mode im2col"),
        (good.replace(", {%h1, %h2}", ""), raw, x, ptxemu.Unsupported, "takes offsets, 2 in braces"),
        (good.replace(".im2col.", ".im2col::w."), raw, x, ptxemu.Unsupported, "needs sm_100a"),
        (good.replace(".im2col.", ".im2col_no_offs."), raw, x, ptxemu.Unsupported, "mode .im2col_no_offs of a load"),
    ]  # fmt: skip
    for body, map_, tensor, error, message in cases:
        if message == "out of bounds":  # two images by the map, one in memory
            map_ = tensor.data_ptr().to_bytes(8, "little") + map_[8:]
            body = load(4, (0, 0, 0, 1), (1, 1), 256)
        with pytest.raises(error, match=message):
            attempt(body, map_, tensor)


def test_wrong_wide_loads_and_rows() -> None:
    x = values((2, 4, 5, 32), torch.float16)
    wide = ptxemu.im2col_map(x, (0,), (0,), 32, 8, swizzle=64, mode="im2col::w")
    good = load(4, (0, 0, 0, 0), (1, 1), 9 * 64, mode="im2col::w")
    attempt(good, wide, x, "sm_100a")
    plain = ptxemu.im2col_map(x, (0,), (0,), 32, 8, mode="im2col::w")
    flat = x.view(-1, 32)
    gather = load(2, (0, 1, 2, 3, 4), (), 256, mode="tile::gather4").replace(", {}", "")
    for body, raw, message in (
        (good, plain, "im2col::w without swizzle"),
        (good.replace("::w.", "::w::128."), wide, "in mode im2col::w::128 with a tensor map of mode im2col::w"),
        (load(4, (0, 5, 0, 0), (1, 1), 9 * 64, mode="im2col::w"), wide, "coordinate 5 of dimension 1"),
        (gather, ptxemu.tiled_map(flat, (2, 32)), "a box of 2 rows"),
    ):  # fmt: skip
        with pytest.raises(ptxemu.MemoryFault, match=message):
            attempt(body, raw, x, "sm_100a")
    with pytest.raises(ptxemu.Unsupported, match="needs sm_100a"):
        attempt(gather, ptxemu.tiled_map(flat, (1, 32)), x)


def test_wrong_stores() -> None:
    x, tile = values((2, 4, 5, 8)), values((8, 8))
    store = "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%d9, {0, 0, 0, 0}], [%r1]"
    for lower, upper, message in (
        ((-1, 0), (0, 0), "bounding box from -1 to 3 of dimension 2"),
        ((0, 0), (0, 1), "to 5 of dimension 1"),
    ):
        with pytest.raises(ptxemu.MemoryFault, match=message):
            stored(x, tile, ptxemu.im2col_map(x, lower, upper, 8, 8), store)
    rows = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%d9, {0, 0, -1, 2, 3}], [%r1]"
    with pytest.raises(ptxemu.MemoryFault, match="row -1"):
        stored(x.view(-1, 8), tile[:4], ptxemu.tiled_map(x.view(-1, 8), (1, 8)), rows)


def test_stores_check_what_they_read() -> None:
    """Undefined elements count where they would be written, also through a walk."""
    x, tile = values((2, 4, 5, 8)), values((8, 8))
    raw = ptxemu.im2col_map(x, (0, 0), (0, 0), 8, 8)
    store = (
        AT_MAP + copy_in("%r1", "%d1", 128) + "    setp.eq.u32 %p1, %r0, 0;\n"
        "    fence.proxy.async.shared::cta;\n    bar.warp.sync 0xffffffff;\n"
        "    @%p1 cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%d9, {{0, {}, 3, 1}}], [%r1];\n"
        "    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group 0;\n"
    )  # fmt: skip
    run(store.replace("{{", "{").replace("}}", "}").replace("{}", "1"), [x, tile, raw], shared=256, extra=MAP)
    with pytest.raises(ptxemu.MemoryFault, match="uninitialised shared memory at offset 128"):
        run(store.replace("{{", "{").replace("}}", "}").replace("{}", "0"), [x, tile, raw], shared=256, extra=MAP)


def test_kernels_do_not_change_maps_of_im2col() -> None:
    x = values((2, 4, 5, 8))
    body = "    mov.u64 %d10, 0;\n    tensormap.replace.tile.global_address.global.b1024.b64 [%d1], %d10;\n"
    room = torch.zeros(256, dtype=torch.uint8)
    at = -room.data_ptr() % 128
    room[at : at + 128] = torch.frombuffer(bytearray(ptxemu.im2col_map(x, (0, 0), (0, 0), 8, 8)), dtype=torch.uint8)
    with pytest.raises(ptxemu.MemoryFault, match="a tensor map of im2col"):
        run(body, [x, room[at : at + 128]])


def test_maps_out_of_range() -> None:
    x = values((2, 4, 5, 8))
    for change in (
        dict(channels=3, swizzle=7),
        dict(pixels=1025),
        dict(lower=(-129, 0)),
        dict(upper=(0, 128)),
        dict(lower=(0,)),
        dict(channels=0),
    ):
        args: dict[str, Any] = dict(lower=(0, 0), upper=(0, 0), channels=8, pixels=8) | change
        with pytest.raises(ptxemu.EmulatorError):
            ptxemu.im2col_map(x, **args)
    with pytest.raises(ptxemu.EmulatorError, match="box: got 2 sizes"):
        ptxemu.tiled_map(x, (1, 1))
    with pytest.raises(ptxemu.EmulatorError, match="no such type"):
        ptxemu.tiled_map(x.to(torch.complex64), (1, 1, 1, 8))
    with pytest.raises(ptxemu.EmulatorError, match="innermost dimension has stride 8"):
        ptxemu.tiled_map(x.transpose(2, 3), (1, 1, 1, 8))
