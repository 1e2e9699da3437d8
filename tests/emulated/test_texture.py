"""Textures and surfaces by handle, against torch's grid_sample and indexing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from memory_ptx import run

import ptxemu

ADDRESS = {"clamp": "border", "border": "zeros", "mirror": "reflection"}
"""Address modes as grid_sample calls them; it has no wrap."""
FETCH = """
    mul.wide.u32 %d4, %r0, {stride};
    add.u64 %d4, %d4, %d0;
{loads}    {instruction};
    mul.wide.u32 %d5, %r0, 16;
    add.u64 %d5, %d5, %d1;
    st.global.v4.b32 [%d5], {{%r20, %r21, %r22, %r23}};
"""
D4 = "{%r20, %r21, %r22, %r23}"


def fetch(instruction: str, texture: Any, coordinates: torch.Tensor, **options: Any) -> torch.Tensor:
    """[thread, component]: what an instruction gives a warp, each thread at its own row of 32-bit coordinates, in %r10 and on.

    The handle is in %d9.
    """
    out = torch.zeros(32, 4, dtype=torch.int32)
    count = coordinates.shape[1]
    loads = "    ld.param.u64 %d9, [t];\n" + "".join(
        f"    ld.global.b32 %r{10 + i}, [%d4+{4 * i}];\n" for i in range(count)
    )
    body = FETCH.format(stride=4 * count, loads=loads, instruction=instruction.strip().rstrip(";"))
    run(body, [coordinates.contiguous(), out, texture], extra=".param .u64 t", **options)
    return out


def values(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randint(-64, 64, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()


def points(sizes: Sequence[int], seed: int = 0, beyond: float = 0.75) -> torch.Tensor:
    """Coordinates in texels in and around a texture, x first: multiples of 1 / 256, as weights of filtering are, off texels' edges."""
    generator = torch.Generator().manual_seed(seed)
    columns = [
        torch.randint(int(-256 * beyond * n), int(256 * (1 + beyond) * n), (32,), generator=generator) for n in sizes
    ]
    return torch.stack([(c | 1) / 256 for c in columns], 1)


def sampled(x: torch.Tensor, at: torch.Tensor, filter_: str, address: str) -> torch.Tensor:
    """[point, channel] by grid_sample. x: {D} {H} W C; at: texels, x first."""
    dims = x.dim() - 1
    y = x.movedim(-1, 0)
    if dims == 1:  # a line is an image whose lines are all the same
        y = y[:, None].expand(-1, 4, -1)
        at = torch.cat([at, torch.full((len(at), 1), 2.0)], 1)
    spatial = y.shape[1:]
    if address == "wrap":
        y = y.repeat(1, *[3] * len(spatial))
        at = at + torch.tensor(list(reversed(spatial)))
    sizes = torch.tensor(list(reversed(y.shape[1:])), dtype=torch.float64)
    grid = (2 * at.double() / sizes - 1).view(1, *[1] * (len(spatial) - 1), len(at), len(spatial))
    mode = {"linear": "bilinear", "nearest": "nearest"}[filter_]
    got = F.grid_sample(y[None].double(), grid, mode, ADDRESS.get(address, "border"), align_corners=False)
    return got.reshape(x.shape[-1], len(at)).T


VECTOR = {1: "{%r10}", 2: "{%r10, %r11}", 3: "{%r10, %r11, %r12, %r12}"}


@pytest.mark.parametrize("filter_", ["nearest", "linear"])
@pytest.mark.parametrize("address", ["clamp", "border", "wrap", "mirror"])
@pytest.mark.parametrize("shape", [(16, 4), (8, 16, 1), (8, 4, 4), (4, 8, 16, 2)])
def test_filters_and_address_modes(shape: tuple[int, ...], address: Any, filter_: Any) -> None:
    x = values(shape)
    dims = len(shape) - 1
    sizes = list(reversed(shape[:-1]))
    normalized = address in ("wrap", "mirror")
    t = ptxemu.texture(x, f"{dims}d", filter=filter_, address=address, normalized=normalized)  # type: ignore[arg-type]
    at = points(sizes)
    given = at / torch.tensor(sizes) if normalized else at
    got = fetch(f"tex.{dims}d.v4.f32.f32 {D4}, [%d9, {VECTOR[dims]}]", t, given.float()).view(torch.float32)
    torch.testing.assert_close(got[:, : shape[-1]].double(), sampled(x, at, filter_, address), rtol=0, atol=1e-5)
    assert not got[:, shape[-1] :].any()


def test_weights_have_8_bits_after_the_point() -> None:
    x = torch.tensor([0.0, 256.0])
    t = ptxemu.texture(x, "1d", filter="linear")
    at = torch.linspace(0.5, 1.5, 32)[:, None]
    got = fetch(f"tex.1d.v4.f32.f32 {D4}, [%d9, {{%r10}}]", t, at).view(torch.float32)[:, 0]
    assert torch.equal(got, torch.floor((at[:, 0].double() - 0.5) * 256 + 0.5).float())


@pytest.mark.parametrize("geometry", ["1d", "2d", "3d", "a1d", "a2d"])
@pytest.mark.parametrize(("dtype", "data"), [
    (torch.uint8, "u32"), (torch.int8, "s32"), (torch.int16, "s32"), (torch.uint16, "u32"), (torch.int32, "s32"), (torch.float16, "f32"),
    (torch.float32, "f32"),
])  # fmt: skip
def test_integer_coordinates(geometry: Any, dtype: torch.dtype, data: str) -> None:
    """Texels by their number, clamped to the texture."""
    shape = {"1d": (9,), "2d": (5, 9), "3d": (3, 5, 9), "a1d": (4, 9), "a2d": (4, 5, 9)}[geometry]
    raw = np.random.default_rng(1).integers(0, 256, (*shape, 2), dtype=np.uint8)
    x = (
        torch.from_numpy(raw.repeat(dtype.itemsize, -1)).view(dtype)
        if not dtype.is_floating_point
        else values((*shape, 2)).to(dtype)
    )
    array, dims = geometry[0] == "a", int(geometry[-2])
    generator = torch.Generator().manual_seed(2)
    index = [torch.randint(-3, n + 3, (32,), generator=generator) for n in reversed(shape)]
    if array:
        index = [torch.randint(0, 4, (32,), generator=generator), *index[:dims]]
    names = ", ".join(f"%r{10 + i}" for i in range(len(index))) + (", %r10" if len(index) == 3 else "")
    t = ptxemu.texture(x, geometry)
    got = fetch(f"tex.{geometry}.v4.{data}.s32 {D4}, [%d9, {{{names}}}]", t, torch.stack(index, 1).int())
    spatial = [i.clamp(0, n - 1) for i, n in zip(index[array:], reversed(shape), strict=False)]
    want = x.to(torch.float32)[(*([index[0]] if array else []), *reversed(spatial))]
    result = got.view(torch.float32) if data == "f32" else got.float()
    assert torch.equal(result[:, :2], want)


def test_layers_and_offsets() -> None:
    x = values((3, 8, 16, 1))
    t = ptxemu.texture(x, "a2d", filter="linear", address="border")
    at = points((16, 8))
    layer = torch.arange(32).view(32, 1) % 3
    given = torch.cat([layer.int().view(torch.float32), at], 1)
    got = fetch(
        f"mov.b32 %r30, 3;\n    mov.b32 %r31, -2;\n    tex.a2d.v4.f32.f32 {D4}, [%d9, {{%r10, %r11, %r12, %r12}}], {{%r30, %r31}}",
        t,
        given,
    )
    shifted = at + torch.tensor([3.0, -2.0])
    want = torch.stack([sampled(x[i % 3], shifted[i : i + 1], "linear", "border")[0] for i in range(32)])
    torch.testing.assert_close(got.view(torch.float32)[:, :1].double(), want, rtol=0, atol=1e-5)
    wrong = f"mov.b32 %r30, 8;\n    tex.a2d.v4.f32.f32 {D4}, [%d9, {{%r10, %r11, %r12, %r12}}], {{%r30, %r30}}"
    with pytest.raises(ptxemu.MemoryFault, match="offset 8; allowed: -8 to 7"):
        fetch(wrong, t, given)
    given[5, 0] = torch.tensor(3, dtype=torch.int32).view(torch.float32)
    with pytest.raises(ptxemu.MemoryFault, match="layer 3 of a texture of 3"):
        fetch(f"tex.a2d.v4.f32.f32 {D4}, [%d9, {{%r10, %r11, %r12, %r12}}]", t, given)


@pytest.mark.parametrize("component", range(4))
def test_footprints(component: int) -> None:
    """tld4: lower left, lower right, upper right, upper left, lines counting downwards."""
    x = values((8, 16, 4))
    at = points((16, 8))
    name = "rgba"[component]
    got = fetch(f"tld4.{name}.2d.v4.f32.f32 {D4}, [%d9, {{%r10, %r11}}]", ptxemu.texture(x), at).view(torch.float32)
    i, j = (torch.floor(at[:, d] - 0.5).long() for d in range(2))
    for k, (di, dj) in enumerate(((0, 1), (1, 1), (1, 0), (0, 0))):
        assert torch.equal(got[:, k], x[(j + dj).clamp(0, 7), (i + di).clamp(0, 15), component])


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.uint8, 255), (torch.int8, 127), (torch.uint16, 65535), (torch.int16, 32767)]
)
def test_fractions(dtype: torch.dtype, most: int) -> None:
    x = torch.tensor([0, 1, most, most // 2 + 1, 3], dtype=torch.int32).to(dtype)
    if dtype in (torch.int8, torch.int16):
        x[4] = -most - 1
    t = ptxemu.texture(x, "1d", fractions=True)
    at = (torch.arange(32) % 5).float()[:, None] + 0.5
    got = fetch(f"tex.1d.v4.f32.f32 {D4}, [%d9, {{%r10}}]", t, at).view(torch.float32)[:5, 0]
    torch.testing.assert_close(got, (x.float() / most).clamp(min=-1), rtol=1e-6, atol=0)


def test_half_results() -> None:
    x = values((4, 8, 4)).half() / 8
    t = ptxemu.texture(x, filter="linear")
    at = points((8, 4))
    want = sampled(x.float(), at, "linear", "clamp").half()
    got = fetch(
        "mov.b32 %r22, 0;\n    mov.b32 %r23, 0;\n    tex.2d.v2.f16x2.f32 {%r20, %r21}, [%d9, {%r10, %r11}]", t, at
    )
    assert torch.equal(got[:, :2].contiguous().view(torch.float16), want)
    four = "tex.2d.v4.f16.f32 {%h1, %h2, %h3, %h4}, [%d9, {%r10, %r11}];\n    mov.b32 %r20, {%h1, %h2};\n    mov.b32 %r21, {%h3, %h4}"
    got = fetch(f"mov.b32 %r22, 0;\n    mov.b32 %r23, 0;\n    {four}", t, at)
    assert torch.equal(got[:, :2].contiguous().view(torch.float16), want)


def test_residency_base_and_level() -> None:
    x = values((4, 8, 1))
    at = points((8, 4), beyond=0)
    want = sampled(x, at, "nearest", "clamp").float()
    body = (
        "    setp.ne.u32 %p3, 0, 0;\n    tex.base.2d.v4.f32.f32 {%r20, %r21, %r22, %r23}|%p3, [%d9, {%r10, %r11}];\n"
        "    tex.level.2d.v4.f32.f32 {%r24, %r25, %r26, %r27}, [%d9, {%r10, %r11}], 0f40000000;\n"
        "    mov.b32 %r21, %r24;\n    selp.b32 %r22, 7, 0, %p3;\n    mov.b32 %r23, 0"
    )
    got = fetch(body, ptxemu.texture(x), at)
    assert torch.equal(got[:, :2].contiguous().view(torch.float32), want.repeat(1, 2))
    assert (got[:, 2] == 7).all()


@pytest.mark.parametrize(("query", "value"), [
    ("width", 16), ("height", 8), ("depth", 0), ("channel_data_type", 0x10), ("normalized_coords", 1), ("array_size", 3),
    ("num_mipmap_levels", 0),
    ("filter_mode", 1), ("addr_mode_0", 1), ("addr_mode_1", 4), ("addr_mode_2", 3),
])  # fmt: skip
def test_queries(query: str, value: int) -> None:
    x = torch.zeros(3, 8, 16, dtype=torch.float16)
    t = ptxemu.texture(x, "a2d", filter="linear", address=("mirror", "border"), normalized=True)
    got = fetch(
        f"txq.{query}.b32 %r20, [%d9];\n    mov.b32 %r21, 0;\n    mov.b32 %r22, 0;\n    mov.b32 %r23, 0",
        t,
        torch.zeros(32, 1),
    )
    assert (got[:, 0] == value).all()


# ---- surfaces ----------------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("outside", ["clamp", "zero"])
@pytest.mark.parametrize(
    ("geometry", "shape"), [("1d", (16,)), ("2d", (5, 16)), ("3d", (3, 5, 16)), ("a1d", (4, 16)), ("a2d", (4, 5, 16))]
)
@pytest.mark.parametrize(
    ("vector", "type_"), [("", "b32"), (".v2", "b32"), (".v4", "b32"), ("", "b64"), (".v4", "b16"), ("", "b8")]
)
def test_surface_loads(geometry: Any, shape: tuple[int, ...], vector: str, type_: str, outside: str) -> None:
    x = torch.randint(-(2**31), 2**31 - 1, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    count, width = int(vector[2:] or 1), int(type_[1:]) // 8
    size = count * width
    generator = torch.Generator().manual_seed(1)
    spatial = [torch.randint(-3, 64 // size + 3, (32,), generator=generator) * size]
    spatial += [torch.randint(-2, n + 2, (32,), generator=generator) for n in reversed(shape[:-1])]
    order = [spatial[-1], *spatial[:-1]] if geometry[0] == "a" else spatial
    names = ", ".join(f"%r{10 + i}" for i in range(len(order))) + (", %r10" if len(order) == 3 else "")
    registers = {8: "%d{}", 4: "%r{}", 2: "%h{}", 1: "%h{}"}[width]
    targets = [registers.format(20 + i) for i in range(count)]
    destination = f"{{{', '.join(targets)}}}" if vector else targets[0]
    moves = {8: "    mov.b64 {%r20, %r21}, %d20;\n", 2: "    mov.b32 %r20, {%h20, %h21};\n    mov.b32 %r21, {%h22, %h23};\n",
             1: "    cvt.u32.u16 %r20, %h20;\n"}.get(width, "")  # fmt: skip
    zeros = "".join(f"    mov.b32 %r{20 + i}, 0;\n" for i in range(4))
    got = fetch(
        f"{zeros}    suld.b.{geometry}{vector}.{type_}.{outside} {destination}, [%d9, {{{names}}}];\n{moves}", ptxemu.surface(x, geometry),
        torch.stack(order, 1).int(),
    ).numpy()  # fmt: skip
    memory = x.numpy().view(np.uint8)
    limits = [64 // size * size - size, *(n - 1 for n in reversed(shape[:-1]))]
    for thread in range(32):
        where = [int(c[thread]) for c in spatial]
        inside = all(0 <= c <= last for c, last in zip(where, limits, strict=True))
        if geometry[0] == "a" and where[-1] < 0:  # layers are unsigned
            where[-1] = limits[-1]
        byte, *lines = [min(max(c, 0), last) for c, last in zip(where, limits, strict=True)]
        row = memory[tuple(reversed(lines))] if lines else memory
        want = row[byte : byte + size] if inside or outside == "clamp" else np.zeros(size, np.uint8)
        assert got[thread].view(np.uint8)[:size].tobytes() == want.tobytes()


@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_surface_stores(outside: str) -> None:
    x = torch.zeros(8, 16, dtype=torch.int32)
    at = torch.stack([torch.arange(32) % 4 * 16, torch.arange(32) // 4], 1).int()
    at[31] = torch.tensor([64, 9])
    body = f"    mov.u32 %r30, %r0;\n    sust.b.2d.v4.b32.{outside} [%d9, {{%r10, %r11}}], {{%r30, %r10, %r11, %r0}};\n"
    if outside == "clamp":  # the last thread's texel is that of thread 31 of a whole surface
        at[31] = torch.tensor([64, 7])
    fetch(body + "".join(f"    mov.b32 %r{20 + i}, 0;\n" for i in range(4)), ptxemu.surface(x), at)
    want = torch.zeros(8, 4, 4, dtype=torch.int32)
    for thread in range(32 if outside == "clamp" else 31):
        want[thread // 4, thread % 4] = torch.tensor([thread, at[thread, 0], at[thread, 1], thread])
    assert torch.equal(x.view(8, 4, 4), want)


@pytest.mark.parametrize(("operation", "type_"), [
    ("add", "u32"), ("add", "s32"), ("add", "u64"), ("min", "s32"), ("max", "u32"), ("min", "s64"), ("and", "b32"), ("or", "b32"),
])  # fmt: skip
def test_surface_reductions(operation: str, type_: str) -> None:
    """All threads reduce into 4 places; the order does not matter."""
    wide = type_.endswith("64")
    x = torch.randint(-9, 9, (2, 4), generator=torch.Generator().manual_seed(0)).to(
        torch.int64 if wide else torch.int32
    )
    before = x.clone()
    places = torch.stack([torch.arange(32) % 2 * (8 if wide else 4), torch.arange(32) // 2 % 2], 1).int()
    value = "cvt.s64.s32 %d20, %r30" if wide else "mov.b32 %r31, %r30"
    register = "%d20" if wide else "%r31"
    body = f"    sub.s32 %r30, %r0, 16;\n    {value};\n    sured.b.{operation}.2d.{type_}.trap [%d9, {{%r10, %r11}}], {register};\n"
    fetch(
        body + "".join(f"    mov.b32 %r{20 + i}, 0;\n" for i in range(4)), ptxemu.surface(x.view(torch.int32)), places
    )
    python: dict[str, Any] = {
        "add": lambda a, b: a + b,
        "min": min,
        "max": max,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
    }
    unsigned = type_[0] == "u"
    bits = 64 if wide else 32
    want = before.tolist()
    for thread in range(32):
        i, j = int(places[thread, 1]), thread % 2
        a, b = want[i][j], thread - 16
        if unsigned:
            a, b = a % (1 << bits), b % (1 << bits)
        value_ = python[operation](a, b) % (1 << bits)
        want[i][j] = value_ - (1 << bits) if value_ >> (bits - 1) else value_
    assert x.tolist() == want


def test_surface_queries() -> None:
    t = ptxemu.surface(torch.zeros(4, 16, 2, dtype=torch.int16), "a1d")
    wanted = {"width": 16, "height": 0, "channel_data_type": 9, "array_size": 4}
    body = ";\n    ".join(f"suq.{q}.b32 %r{20 + i}, [%d9]" for i, q in enumerate(wanted))
    assert fetch(body, t, torch.zeros(32, 1))[0].tolist() == list(wanted.values())


# ---- faults ------------------------------------------------------------------------------------------------------------------------------
ZEROS = "    mov.b32 %r20, 0;\n    mov.b32 %r21, 0;\n    mov.b32 %r22, 0;\n    mov.b32 %r23, 0"
TEX = f"tex.2d.v4.f32.f32 {D4}, [%d9, {{%r10, %r11}}]"
SULD = f"suld.b.2d.v4.b32.trap {D4}, [%d9, {{%r10, %r11}}]"


@pytest.mark.parametrize(("instruction", "message"), [
    (TEX, None), (TEX.replace("f32.f32", "u32.f32"), "returns integers of a texture of floats"),
    (TEX.replace("2d", "a1d"), "geometry a1d of one of 2d"), ("add.u64 %d9, %d9, 8;\n    " + TEX, "is no handle"),
    (SULD, "the handle is a texture's"),
])  # fmt: skip
def test_wrong_textures(instruction: str, message: str | None) -> None:
    t = ptxemu.texture(values((4, 4, 1)))
    if message is None:
        fetch(instruction, t, torch.zeros(32, 2))
        return
    with pytest.raises(ptxemu.MemoryFault, match=message):
        fetch(instruction, t, torch.zeros(32, 2))


@pytest.mark.parametrize(("at", "message"), [
    ((0, 0), None), ((8, 0), "misaligned suld of 16 bytes at byte 8"), ((64, 0), "outside of the surface: byte 64; the last is 48"),
    ((0, -1), "outside of the surface: line -1; the last is 3"),
])  # fmt: skip
def test_wrong_places(at: tuple[int, int], message: str | None) -> None:
    s = ptxemu.surface(torch.zeros(4, 4, 4))
    places = torch.tensor([at] * 32, dtype=torch.int32)
    if message is None:
        fetch(SULD, s, places)
        return
    with pytest.raises(ptxemu.MemoryFault, match=message):
        fetch(SULD, s, places)


def test_memory_that_is_not_there() -> None:
    x = torch.zeros(4, 4)
    t = ptxemu.texture(x)
    t.description.pitch = 1 << 20
    with pytest.raises(ptxemu.MemoryFault, match=r"tex of 4 bytes .* is out of bounds"):
        fetch(TEX, t, torch.full((32, 2), 2.5))


def test_races_in_surfaces() -> None:
    """Warps that store different values to one place race."""
    body = "    ld.param.u64 %d9, [t];\n    mov.u32 %r10, 0;\n    sust.b.1d.b32.trap [%d9, {%r10}], %r0;\n"
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ptxemu.RaceFault):
        run(body, [x, ptxemu.surface(x, "1d")], threads=64, extra=".param .u64 t")
    alone = body.replace("mov.u32 %r10, 0", "and.b32 %r11, %r0, 3;\n    shl.b32 %r10, %r11, 2")
    run(alone, [x, ptxemu.surface(x, "1d")], threads=4, extra=".param .u64 t")
    assert x.tolist() == [0, 1, 2, 3]


def test_undefined_coordinates_and_data() -> None:
    t = ptxemu.texture(values((4, 4)))
    load = "ld.shared.b32 %r11, [%r1];\n    "
    with pytest.raises(ptxemu.MemoryFault, match="depends on uninitialised shared memory"):
        fetch(load + TEX, t, torch.zeros(32, 2), shared=128)
    with pytest.raises(ptxemu.MemoryFault, match="depends on uninitialised shared memory"):
        fetch(
            load + "sust.b.2d.b32.trap [%d9, {%r10, %r10}], %r11;\n" + ZEROS, ptxemu.surface(torch.zeros(4, 4)),
            torch.zeros(32, 2).int(), shared=128,
        )  # fmt: skip


@pytest.mark.parametrize(("instruction", "message"), [
    (TEX.replace("2d", "cube").replace("%r11}", "%r11, %r12, %r12}"), "geometry .cube"),
    (TEX.replace("[%d9,", "[%d9, %d9,"), "a sampler of its own"),
    (TEX + ", %r10", "depth comparison"), (TEX.replace("tex.2d", "tex.grad.2d") + ", {%r10, %r10}, {%r10, %r10}", "gradients"),
    (TEX.replace("%d9", "somewhere"), "no handle in a 64-bit register"), (SULD.replace("suld.b", "suld.p"), "formatted access"),
    ("txq.channel_order.b32 %r20, [%d9]", "channel_order"), ("suq.filter_mode.b32 %r20, [%d9]", "query .filter_mode"),
    ("sured.b.add.2d.s64.trap [%d9, {%r10, %r11}], %d1", ".add of .s64"),
    ("sured.b.xor.2d.b32.trap [%d9, {%r10, %r11}], %r1", "modifier .xor"),
    ("tld4.r.2d.v4.f32.s32 {%r20, %r21, %r22, %r23}, [%d9, {%r10, %r11}]", "this form of tld4"),
])  # fmt: skip
def test_what_is_not_there_is_named(instruction: str, message: str) -> None:
    with pytest.raises(ptxemu.Unsupported, match=re.escape(message)):
        fetch(instruction, ptxemu.texture(values((4, 4))), torch.zeros(32, 2))


@pytest.mark.parametrize(
    "declaration",
    [".global .texref tex;", ".global .surfref tex;", ".global .samplerref tex = { filter_mode = linear };"],
)
def test_references_are_refused(declaration: str) -> None:
    with pytest.raises(
        ptxemu.Unsupported, match=r"variable tex: .*ref \(textures and surfaces are taken by handle only"
    ):
        run("", [torch.zeros(1)], head=declaration)
    with pytest.raises(ptxemu.Unsupported, match=r"parameter '.param .texref tex'.*by handle only"):
        run("", [torch.zeros(1), 0], extra=".param .texref tex")


def test_textures_that_cannot_be() -> None:
    x = values((4, 4))
    for wrong in (
        dict(tensor=x, geometry="cube"), dict(tensor=x.double()), dict(tensor=x, geometry="3d"), dict(tensor=x.T, geometry="2d"),
        dict(tensor=values((4, 4, 3))), dict(tensor=x, address="wrap"), dict(tensor=x.int(), filter="linear"),
        dict(tensor=x, fractions=True),
        dict(tensor=x, filter="cubic"),
    ):  # fmt: skip
        with pytest.raises(ptxemu.EmulatorError):
            ptxemu.texture(**wrong)  # type: ignore[arg-type]
