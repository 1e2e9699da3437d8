"""Tensor copies against loops over the definition of a box (PTX ISA: "Tensors"), and tensor maps that kernels change."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from memory_ptx import EMULATOR_ONLY, INIT, copy_in, copy_out, expect, run, wait

import ptxemu

TYPES = {"u8": (0, np.uint8), "u16": (1, np.uint16), "u32": (2, np.uint32), "s32": (3, np.int32), "u64": (4, np.uint64),
         "s64": (5, np.int64),
         "f16": (6, np.float16), "f32": (7, np.float32), "f64": (9, np.float64), "bf16": (10, np.uint16)}  # fmt: skip
MAP = ".param .align 64 .b8 map[128]"
AT_MAP = "    mov.b64 %d9, map;\n    cvta.param.u64 %d9, %d9;\n"


def tensor_map(
    address: int, type_: str, size: Sequence[int], stride: Sequence[int], box: Sequence[int], *, step: Sequence[int] = (), swizzle: int = 0,
    nan: bool = False, atom: int = 0, control: int = 0,
) -> bytes:  # fmt: skip
    """A map as the host code of the CuTe DSL writes it. Dimension 0 is the innermost; stride: bytes of dimensions 1 and up."""
    w = [0] * 32
    w[0], w[1] = address & 0xFFFFFFFF, address >> 32
    w[2] = 2 | (len(size) - 1) << 4 | TYPES[type_][0] << 7 | swizzle << 13 | nan << 15 | 2 << 17 | atom << 19 | control
    for i, s in enumerate(stride):
        w[3 + i] = s >> 4 & 0xFFFFFFFF
        w[7] |= s >> 36 << 4 * i
    for i, s in enumerate(size):
        w[8 + i] = s - 1
    w[13] = (box[0] - 1) << 24
    for i, b in enumerate(box[1:]):
        w[14] |= (b - 1) << 8 * i
    for i, s in enumerate(step):
        w[13] |= (s - 1) << 3 * i
    return struct.pack("<32I", *w)


def in_memory(raw: bytes) -> torch.Tensor:
    """Bytes at an address that is a multiple of 128."""
    room = torch.zeros(len(raw) + 128, dtype=torch.uint8)
    at = -room.data_ptr() % 128
    room[at : at + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return room[at : at + len(raw)]


def box_of(
    x: np.ndarray, at: Sequence[int], box: Sequence[int], step: Sequence[int] = (), fill: float = 0
) -> np.ndarray:
    """Elements of a box, dimension 0 innermost: x[..., at[1] + i step[1], at[0] + j], and `fill` outside."""
    step = [1, *step[1:]] if step else [1] * len(box)
    counts = [-(-b // s) for b, s in zip(box, step, strict=True)]
    out = np.full(counts[::-1], fill, x.dtype)
    for index in itertools.product(*map(range, counts)):
        where = [a + i * s for a, i, s in zip(at, index, step, strict=True)]
        if all(0 <= c < n for c, n in zip(where, x.shape[::-1], strict=True)):
            out[index[::-1]] = x[tuple(where[::-1])]
    return out


def swizzle_of(tile: bytes, width: int, base: int) -> bytes:
    """Where a tile's bytes lie in shared memory that starts at address `base`: in line i of 128 bytes, a span's 16-byte chunks
    exchange places by i modulo their number."""
    if not width:
        return tile
    out = bytearray(len(tile))
    for at in range(0, len(tile), 16):
        line, chunk = divmod(base + at, 128)
        group = width // 16
        block, place = divmod(chunk // 16, group)
        place ^= line % group
        start = line * 128 - base + (block * group + place) * 16
        out[start : start + 16] = tile[at : at + 16]
    return bytes(out)


def random_array(shape: Sequence[int], type_: str, seed: int = 0) -> np.ndarray:
    dtype = np.dtype(TYPES[type_][1])
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "f":
        return np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return raw.view(dtype).reshape(shape)


def coordinates(at: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, at)) + "}"


def load(rank: int, at: Sequence[int], n: int, offset: int = 1024, form: str = "shared::cluster") -> str:
    return (
        INIT + expect(n) + AT_MAP + f"    add.u32 %r2, %r1, {offset};\n    prefetch.tensormap [%d9];\n"
        f"    @%p1 cp.async.bulk.tensor.{rank}d.{form}.global.tile.mbarrier::complete_tx::bytes [%r2], [%d9, {coordinates(at)}], [%r1];\n"
    ) + wait()  # fmt: skip


def loaded(
    x: np.ndarray, type_: str, at: Sequence[int], box: Sequence[int], *, offset: int = 1024, seed: int = 0, arch: str = "sm_90a",
    **options: object,
) -> bytes:  # fmt: skip
    """The shared memory that a copy leaves, as bytes."""
    source = torch.from_numpy(np.ascontiguousarray(x).view(np.uint8).reshape(-1).copy())
    step = options.get("step", ())
    counts = [-(-b // s) if i else b for i, (b, s) in enumerate(zip(box, step or [1] * len(box), strict=True))]
    n = int(np.prod(counts)) * x.dtype.itemsize
    out = torch.zeros(n // 4, dtype=torch.int32)
    strides = list(x.strides[::-1][1:])
    raw = tensor_map(source.data_ptr(), type_, x.shape[::-1], strides, box, **options)  # type: ignore[arg-type]
    body = load(len(box), at, n, offset) + copy_out("%d1", "%r2", n)
    run(body, [source, out, raw], shared=offset + n, extra=MAP, seed=seed, arch=arch)
    return out.numpy().tobytes()


# ---- loads --------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("shape", "at", "box"), [
    ((64,), (16,), (32,)), ((64,), (48,), (32,)), ((64,), (-16,), (32,)),
    ((20, 32), (0, 0), (32, 4)), ((20, 32), (16, 5), (8, 3)), ((20, 32), (24, 18), (16, 4)),
    ((20, 32), (-4, -2), (8, 4)), ((20, 32), (4, 2), (8, 4)), ((20, 32), (-8, 2), (16, 4)), ((20, 32), (40, 0), (8, 4)),
    ((6, 5, 16), (8, 3, 4), (8, 4, 3)), ((3, 4, 5, 16), (0, 2, -1, 1), (16, 2, 3, 2)), ((2, 3, 2, 4, 16), (4, 3, 1, 0, 1), (8, 2, 2, 3, 2)),
])  # fmt: skip
def test_boxes_of_every_rank(shape: tuple[int, ...], at: tuple[int, ...], box: tuple[int, ...]) -> None:
    x = random_array(shape, "u32")
    for seed in range(2):
        assert loaded(x, "u32", at, box, seed=seed) == box_of(x, at, box).tobytes()


@pytest.mark.parametrize("type_", list(TYPES))
def test_types(type_: str) -> None:
    x = random_array((12, 48), type_)
    assert loaded(x, type_, (32, 9), (32, 4)) == box_of(x, (32, 9), (32, 4)).tobytes()


@pytest.mark.parametrize("offset", [1024, 1152, 1024 + 512])
@pytest.mark.parametrize(("swizzle", "width"), [(0, 0), (1, 32), (2, 64), (3, 128)])
def test_swizzles(swizzle: int, width: int, offset: int) -> None:
    box = ((width or 64) // 2, 24)
    x = random_array((40, 128), "bf16")
    tile = box_of(x, (8, 3), box).tobytes()
    assert loaded(x, "bf16", (8, 3), box, swizzle=swizzle, offset=offset) == swizzle_of(tile, width, offset)


def test_a_swizzle_of_32_byte_atoms() -> None:
    """Of 128 bytes, the four 32-byte parts of line r exchange places by r mod 4."""
    x = random_array((16, 32), "f32")
    tile = np.frombuffer(box_of(x, (0, 0), (32, 16)).tobytes(), np.uint8).reshape(16, 4, 32)
    out = np.frombuffer(loaded(x, "f32", (0, 0), (32, 16), swizzle=3, atom=1, arch="sm_100a"), np.uint8).reshape(
        16, 4, 32
    )
    for r, p in itertools.product(range(16), range(4)):
        assert np.array_equal(out[r, p ^ r % 4], tile[r, p])


@pytest.mark.parametrize("step", [(1, 2), (1, 3), (1, 8), (4, 2)])
def test_element_strides(step: tuple[int, int]) -> None:
    """A box of 8 lines holds ceil(8 / stride) of them; the stride of dimension 0 counts for nothing without interleave."""
    x = random_array((21, 32), "s32")
    assert loaded(x, "s32", (4, 2), (16, 8), step=step) == box_of(x, (4, 2), (16, 8), step).tobytes()
    assert loaded(x, "s32", (4, 17), (16, 8), step=step) == box_of(x, (4, 17), (16, 8), step).tobytes()


@pytest.mark.parametrize("type_", ["f16", "f32", "f64"])
def test_nan_fill(type_: str) -> None:
    x = random_array((6, 16), type_)
    out = np.frombuffer(loaded(x, type_, (8, 4), (16, 4), nan=True), x.dtype).reshape(4, 16)
    expected = box_of(x, (8, 4), (16, 4), fill=float("nan"))
    np.testing.assert_array_equal(out, expected)
    assert set(out.view(np.uint16)[np.isnan(expected).repeat(out.itemsize // 2, 1)].tolist()) == {0x7FF7}


def test_a_map_in_global_memory_and_other_destinations() -> None:
    x = random_array((8, 16), "s32")
    source = torch.from_numpy(x.copy())
    out = torch.zeros(64, dtype=torch.int32)
    maps = in_memory(bytes(128) + tensor_map(source.data_ptr(), "s32", (16, 8), (64,), (16, 4)))
    body = load(2, (0, 2), 256, form="shared::cta").replace(AT_MAP, "    add.u64 %d9, %d2, 128;\n") + copy_out(
        "%d1", "%r2", 256
    )
    run(body, [source, out, maps], shared=2048, head=EMULATOR_ONLY)
    assert torch.equal(out.reshape(4, 16), source[2:6])


# ---- stores and reductions ------------------------------------------------------------------------------------------------------------
def stored(
    x: np.ndarray,
    type_: str,
    tile: bytes,
    at: Sequence[int],
    box: Sequence[int],
    operation: str = "",
    **options: object,
) -> np.ndarray:
    memory = torch.from_numpy(np.ascontiguousarray(x).view(np.uint8).reshape(-1).copy())
    data = torch.frombuffer(bytearray(tile), dtype=torch.int32)
    raw = tensor_map(memory.data_ptr(), type_, x.shape[::-1], x.strides[::-1][1:], box, **options)  # type: ignore[arg-type]
    name = "cp.reduce.async" if operation else "cp.async"
    form = f".{operation}" if operation else ""
    body = AT_MAP + copy_in("%r1", "%d1", len(tile)) + (
        "    setp.eq.u32 %p1, %r0, 0;\n    fence.proxy.async.shared::cta;\n    bar.warp.sync 0xffffffff;\n"
        f"    @%p1 {name}.bulk.tensor.{len(box)}d.global.shared::cta{form}.tile.bulk_group [%d9, {coordinates(at)}], [%r1];\n"
        "    cp.async.bulk.commit_group;\n    cp.async.bulk.wait_group.read 0;\n"
    )  # fmt: skip
    run(body, [memory, data, raw], shared=len(tile), extra=MAP)
    return memory.numpy().view(x.dtype).reshape(x.shape)


def put(
    x: np.ndarray, at: Sequence[int], tile: np.ndarray
) -> tuple[np.ndarray, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A copy of x, and the places of a tile's elements in it."""
    places = []
    for index in itertools.product(*map(range, tile.shape)):
        where = tuple(a + i for a, i in zip(at[::-1], index, strict=True))
        if all(0 <= c < n for c, n in zip(where, x.shape, strict=True)):
            places.append((where, index))
    return x.copy(), places


@pytest.mark.parametrize(("shape", "at", "box"), [
    ((64,), (48,), (32,)), ((20, 32), (16, 5), (8, 3)), ((20, 32), (24, 18), (16, 4)), ((20, 32), (4, 2), (8, 4)),
    ((6, 5, 16), (8, 3, 4), (8, 4, 3)), ((3, 4, 5, 16), (0, 2, 4, 1), (16, 2, 3, 2)), ((2, 3, 2, 4, 16), (4, 3, 1, 0, 1), (8, 2, 2, 3, 2)),
])  # fmt: skip
def test_stores_of_every_rank(shape: tuple[int, ...], at: tuple[int, ...], box: tuple[int, ...]) -> None:
    x, tile = random_array(shape, "u32"), random_array(box[::-1], "u32", 1)
    expected, places = put(x, at, tile)
    for where, index in places:
        expected[where] = tile[index]
    assert np.array_equal(stored(x, "u32", tile.tobytes(), at, box), expected)


@pytest.mark.parametrize(("swizzle", "width"), [(1, 32), (2, 64), (3, 128)])
def test_swizzled_stores(swizzle: int, width: int) -> None:
    box = (width // 2, 16)
    x, tile = random_array((40, 128), "f16"), random_array(box[::-1], "f16", 1)
    expected = x.copy()
    expected[5:21, 8 : 8 + box[0]] = tile
    assert np.array_equal(
        stored(x, "f16", swizzle_of(tile.tobytes(), width, 0), (8, 5), box, swizzle=swizzle), expected
    )


@pytest.mark.parametrize(("operation", "type_"), [
    *((op, t) for op in ("add", "min", "max") for t in ("u32", "s32", "u64", "f16")),
    ("min", "s64"), ("max", "s64"), ("add", "f32"), ("add", "f64"), ("add", "bf16"), ("inc", "u32"),
    ("dec", "u32"), ("and", "u32"), ("or", "u64"), ("xor", "u32"),
])  # fmt: skip
def test_tensor_reductions(operation: str, type_: str) -> None:
    x, tile = random_array((9, 32), type_), random_array((4, 16), type_, 1)
    expected, places = put(x, (24, 6), tile)
    python = {
        "add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
        "inc": lambda a, b: a.dtype.type(0) if a >= b else a + a.dtype.type(1),
        "dec": lambda a, b: b if a == 0 or a > b else a - a.dtype.type(1),
    }[operation]  # fmt: skip
    if type_ == "bf16":
        a, b = (torch.randn(s, generator=torch.Generator().manual_seed(9)).bfloat16() for s in ((9, 32), (4, 16)))
        x, tile = (t.view(torch.int16).numpy().view(np.uint16) for t in (a, b))
        a[6:9, 24:32] += b[:3, :8]
        expected = a.view(torch.int16).numpy().view(np.uint16).copy()
        x = (
            torch.randn((9, 32), generator=torch.Generator().manual_seed(9))
            .bfloat16()
            .view(torch.int16)
            .numpy()
            .view(np.uint16)
        )
    else:
        with np.errstate(over="ignore"):
            for where, index in places:
                expected[where] = python(expected[where], tile[index])
    assert np.array_equal(stored(x, type_, tile.tobytes(), (24, 6), (16, 4), operation), expected)


@pytest.mark.parametrize(("operation", "type_"), [("add", "s64"), ("min", "f32"), ("max", "f32")])
def test_reductions_that_hardware_lacks(operation: str, type_: str) -> None:
    with pytest.raises(ptxemu.Unsupported, match=rf"no \.{operation} of a tensor of {type_}"):
        stored(
            random_array((9, 32), type_), type_, random_array((4, 16), type_, 1).tobytes(), (0, 0), (16, 4), operation
        )


@pytest.mark.parametrize("operation", ["", "add"])
def test_stores_below_zero(operation: str) -> None:
    with pytest.raises(ptxemu.MemoryFault, match="coordinate -1 of dimension 1"):
        stored(random_array((9, 32), "u32"), "u32", bytes(256), (0, -1), (16, 4), operation)


@pytest.mark.parametrize("at", [3, -3])
def test_boxes_begin_at_multiples_of_16_bytes(at: int) -> None:
    x = random_array((20, 32), "u32")
    with pytest.raises(
        ptxemu.MemoryFault, match=f"coordinate {at} of dimension 0, {4 * at} bytes .* not a multiple of 16"
    ):
        loaded(x, "u32", (at, 2), (8, 4))


# ---- clusters ---------------------------------------------------------------------------------------------------------------------------
RANK = "    mov.u32 %r10, %cluster_ctarank;\n    mov.u32 %r11, %ctaid.x;\n"
MEET = "    barrier.cluster.arrive;\n    barrier.cluster.wait;\n"


def test_multicast_tiles() -> None:
    """Each of 2 CTAs loads half of a tile for both."""
    x = random_array((16, 32), "s32")
    source, out = torch.from_numpy(x.copy()), torch.zeros(2, 256, dtype=torch.int32)
    raw = tensor_map(source.data_ptr(), "s32", (32, 16), (128,), (32, 4), swizzle=3)
    body = RANK + INIT + expect(1024) + AT_MAP + MEET + (
        "    mad.lo.u32 %r2, %r10, 512, %r1;\n    add.u32 %r3, %r1, 1024;\n    shl.b32 %r4, %r10, 2;\n"
        "    mov.u16 %h1, 3;\n    mov.u32 %r5, 0;\n"
        "    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%r2+1024], [%d9, {%r5, %r4}], [%r1], %h1;\n"
        + wait() + "    mul.wide.u32 %d5, %r10, 1024;\n    add.u64 %d5, %d1, %d5;\n" + copy_out("%d5", "%r3", 1024) + MEET
    )  # fmt: skip
    for seed in range(4):
        run(body, [source, out, raw], grid=2, cluster=2, shared=2048, extra=MAP, seed=seed)
        for rank in range(2):
            assert out[rank].numpy().tobytes() == swizzle_of(x[:8].tobytes(), 128, 0)


@pytest.mark.parametrize("multicast", [False, True])
def test_a_pair_counts_on_the_even_ctas_barrier(multicast: bool) -> None:
    """cta_group::2: both CTAs of a pair load; clearing bit 24 of the barrier's address names the even CTA's, as CUTLASS does it."""
    x = random_array((16, 32), "s32")
    source, out = torch.from_numpy(x.copy()), torch.zeros(4, 128, dtype=torch.int32)
    raw = tensor_map(source.data_ptr(), "s32", (32, 16), (128,), (32, 4))
    mask = ".multicast::cluster" if multicast else ""
    operand = ", %h1" if multicast else ""
    body = RANK + INIT + AT_MAP + (
        "    and.b32 %r6, %r10, 1;\n    setp.eq.u32 %p5, %r6, 0;\n    and.pred %p6, %p5, %p1;\n"
        + expect(1024).replace("%p1", "%p6") + MEET + "    add.u32 %r3, %r1, 1024;\n    shl.b32 %r4, %r10, 2;\n    mov.u32 %r5, 0;\n"
        "    and.b32 %r7, %r1, 0xfeffffff;\n    shl.b32 %r8, 1, %r10;\n    cvt.u16.u32 %h1, %r8;\n"
        f"    @%p1 cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes{mask}"
        f" [%r3], [%d9, {{%r5, %r4}}], [%r7]{operand};\n"
        "    @!%p5 bra MET;\n" + wait() + "MET:\n" + MEET
        + "    mul.wide.u32 %d5, %r10, 512;\n    add.u64 %d5, %d1, %d5;\n" + copy_out("%d5", "%r3", 512)
    )  # fmt: skip
    for seed in range(4):
        run(body, [source, out, raw], grid=4, cluster=4, shared=2048, extra=MAP, arch="sm_100a", seed=seed)
        assert out.numpy().tobytes() == x.tobytes()
    if not multicast:
        with pytest.raises(ptxemu.BarrierFault, match="the mbarrier is in CTA"):
            run(
                body.replace(".cta_group::2", ""),
                [source, out, raw],
                grid=4,
                cluster=4,
                shared=2048,
                extra=MAP,
                arch="sm_100a",
            )


# ---- faults -----------------------------------------------------------------------------------------------------------------------------
def attempt(
    body: str, *, size: Sequence[int] = (32, 16), stride: Sequence[int] = (128,), box: Sequence[int] = (32, 4), type_: str = "s32",
    n: int = 16 * 32, **options: object,
) -> None:  # fmt: skip
    source, out = torch.zeros(n, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    raw = tensor_map(source.data_ptr(), type_, size, stride, box, **options)  # type: ignore[arg-type]
    run(body, [source, out, raw], shared=4096, extra=MAP)


def test_wrong_maps_and_places() -> None:
    good = load(2, (0, 0), 512)
    attempt(good)
    for change, error, message in (
        (dict(body=good.replace("[%r2]", "[%r2+64]")), ptxemu.MemoryFault, "misaligned 128-byte shared access"),
        (dict(body=good, n=500), ptxemu.MemoryFault, None),
        (dict(body=load(2, (0, 14), 512), size=(32, 32)), ptxemu.MemoryFault, "out of bounds: offset 2303 of argument 0"),
        (dict(body=load(3, (0, 0, 0), 512)), ptxemu.MemoryFault, "of 3 dimensions with a tensor map of rank 2"),
        (dict(body=good, box=(33, 4)), ptxemu.MemoryFault, "132 bytes, which is not a multiple of 16"),
        (dict(body=good, box=(64, 4), swizzle=3), ptxemu.MemoryFault, "256 bytes, more than the swizzle's 128"),
        (dict(body=good, nan=True), ptxemu.MemoryFault, "integers with NaN fill"),
        (dict(body=good, control=8), ptxemu.MemoryFault, "no tensor map is there"),
        (dict(body=good, control=1), ptxemu.MemoryFault, "im2col of rank 2"),
        (dict(body=good, control=1 << 11), ptxemu.Unsupported, "interleaved"),
        (dict(body=good.replace("map;", "map;\n    add.u64 %d9, %d9, 4;")), ptxemu.MemoryFault, "not a multiple of 64"),
        (dict(body=good.replace(AT_MAP, "    mov.u64 %d9, 64;\n")), ptxemu.MemoryFault, "null pointer"),
        (dict(body=good.replace("512;", "528;", 1)), ptxemu.Deadlock, "tx-count 16"),
        (dict(body=good.replace("512;", "496;", 1)), ptxemu.BarrierFault, "more transaction bytes"),
        (dict(body=good.replace("[%r2]", "[%r2+3072]")), ptxemu.MemoryFault, "outside"),
    ):  # fmt: skip
        if message is None:
            attempt(**change)  # type: ignore[arg-type]  # the box ends before the short tensor does
            continue
        with pytest.raises(error, match=message):
            attempt(**change)  # type: ignore[arg-type]


def test_tiles_that_are_read_or_reused_too_early() -> None:
    early = load(2, (0, 0), 512).replace(wait(), "") + copy_out("%d1", "%r2", 512)
    with pytest.raises(ptxemu.RaceFault, match="missing mbarrier wait"):
        attempt(early)
    twice = load(2, (0, 0), 512).replace(wait(), "    @%p1 st.shared.u32 [%r2+256], 1;\n")
    with pytest.raises(ptxemu.RaceFault, match="in flight"):
        attempt(twice)
    unordered = "    mad.lo.u32 %r3, %r0, 4, %r1;\n    st.shared.u32 [%r3+1024], %r0;\n"
    source, out = torch.zeros(512, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    raw = tensor_map(source.data_ptr(), "s32", (32, 16), (128,), (32, 4))
    second = "bar.sync 0;\n    setp.ge.u32 %p2, %r0, 32;\n    @!%p2 bra LOAD;\n" + unordered + "LOAD:\n"
    body = load(2, (0, 0), 512).replace("bar.sync 0;", second)
    with pytest.raises(ptxemu.RaceFault, match="missing barrier"):
        run(body, [source, out, raw], threads=64, shared=4096, extra=MAP)


def test_tensor_prefetch() -> None:
    attempt(AT_MAP + "    cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d9, {0, 0}];")
    with pytest.raises(ptxemu.MemoryFault, match="of 1 dimensions"):
        attempt(AT_MAP + "    cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%d9, {0}];")


# ---- tensormap.replace ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [False, True])
def test_a_kernel_makes_a_map(shared: bool) -> None:
    """Every field of a map of something else is replaced; in shared memory it is then copied out through the tensormap proxy."""
    x = random_array((3, 10, 64), "f16")
    source = torch.from_numpy(x.copy())
    out = torch.zeros(128, dtype=torch.int32)
    maps = in_memory(tensor_map(1 << 20, "u8", (64, 4), (64,), (16, 1), step=(1, 2), swizzle=1))
    place, name = ("%r4", "shared::cta") if shared else ("%d2", "global")
    fields = [
        ("global_address", "b64", "", "%d0"), ("rank", "b32", "", "2"), ("box_dim", "b32", "0, ", "32"), ("box_dim", "b32", "1, ", "%r20"),
        ("box_dim", "b32", "2, ", "2"), ("global_dim", "b32", "0, ", "64"),
        ("global_dim", "b32", "1, ", "10"), ("global_dim", "b32", "2, ", "3"),
        ("global_stride", "b64", "0, ", "128"), ("global_stride", "b64", "1, ", "1280"),
        ("element_stride", "b32", "1, ", "1"), ("element_stride", "b32", "2, ", "1"),
        ("elemtype", "b32", "", "6"), ("interleave_layout", "b32", "", "0"),
        ("swizzle_mode", "b32", "", "2"), ("fill_mode", "b32", "", "0"),
    ]  # fmt: skip
    replace = "    mov.u32 %r20, 4;\n"
    for field, type_, index, value in fields:
        operand = value
        if value[0] != "%" and field not in ("elemtype", "interleave_layout", "swizzle_mode", "fill_mode"):
            operand = "%d21" if type_ == "b64" else "%r21"
            replace += f"    mov.{type_} {operand}, {value};\n"
        replace += f"    @%p1 tensormap.replace.tile.{field}.{name}.b1024.{type_} [{place}], {index}{operand};\n"
    body = "    setp.eq.u32 %p1, %r0, 0;\n    add.u32 %r4, %r1, 2048;\n"
    if shared:
        body += copy_in("%r4", "%d2", 128) + "    bar.warp.sync 0xffffffff;\n" + replace
        body += (
            "    bar.warp.sync 0xffffffff;\n"
            "    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d2], [%r4], 128;\n"
        )
    else:
        body += replace + "    fence.proxy.tensormap::generic.release.gpu;\n"
    body += "    fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;\n"
    body += load(3, (32, 7, 1), 32 * 4 * 2 * 2).replace(AT_MAP, "    mov.u64 %d9, %d2;\n") + copy_out(
        "%d1", "%r2", 32 * 4 * 2 * 2
    )
    run(body, [source, out, maps], shared=4096, head=EMULATOR_ONLY)
    assert out.numpy().tobytes() == swizzle_of(box_of(x, (32, 7, 1), (32, 4, 2)).tobytes(), 64, 1024)
