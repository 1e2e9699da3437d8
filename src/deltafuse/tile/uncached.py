"""Global memory by address: vectors that are used once and take no room in L1, and loads that may have nothing to load.

An uncached load asks L2 for its whole 128-byte line, since the neighbouring warps want the rest of it. `early` loads are relaxed ones, past
L1, which ptxas leaves where they are: it moves others down next to their use, and what should overlap comes one after the other.
"""

# mypy: ignore-errors

from __future__ import annotations

from cutlass import Int32, Int64, Uint32

from .ptx import asm

_VECTOR = {1: "", 2: ".v2", 4: ".v4"}


def _list(first, n):
    names = ", ".join(f"${first + i}" for i in range(n))
    return f"{{{names}}}" if n > 1 else names


def _order(early):
    return "relaxed.gpu." if early else ""


def _load(name, address, offset, n, valid, policy=None):
    """Words at an address; zeros, without an access, where `valid` is 0 (None: it always is)."""
    args = [Int64(address)]
    hint, last = "", ""
    if policy is not None:
        hint, last = ".L2::cache_hint", f", ${n + 1}"
        args.append(policy)
    name = name.replace("@", hint)
    if valid is None:
        text = f"ld.{name}{_VECTOR[n]}.b32 {_list(0, n)}, [${n}+{offset}]{last};"
    else:
        words = [f"w{i}" for i in range(n)]
        zero = " ".join(f"mov.b32 {w}, 0;" for w in words)
        give = " ".join(f"mov.b32 ${i}, {w};" for i, w in enumerate(words))
        vector = f"{{{', '.join(words)}}}" if n > 1 else words[0]
        text = (
            f"{{\n.reg .pred p;\n.reg .b32 {', '.join(words)};\nsetp.ne.b32 p, ${n + len(args)}, 0;\n{zero}\n"
            f"@p ld.{name}{_VECTOR[n]}.b32 {vector}, [${n}+{offset}]{last};\n{give}\n}}"
        )
        args.append(Int32(valid))
    out = asm(text, [Uint32] * n, args)
    return out if n > 1 else [out]


_FIRST, _AS_OTHERS = 0x12F0000000000000, 0x1000000000000000
"""Policies, in the numbers that CUTLASS has for Hopper and Blackwell: `createpolicy` would make them anew, by five instructions."""


def first_out(valid=None):
    """A policy for accesses: what is read or written goes first where L2 wants room; where `valid` is 0 it stays as long as others."""
    if valid is None:
        return Int64(_FIRST)
    text = f"{{\n.reg .pred p;\nsetp.ne.b32 p, $1, 0;\nselp.b64 $0, {_FIRST:#x}, {_AS_OTHERS:#x}, p;\n}}"
    return asm(text, [Int64], [Int32(valid)], volatile=False)


def load_uncached(address, offset, n, valid=None, early=False, policy=None):
    """n (1, 2, 4) words at a global address plus a constant offset in bytes, as a list; zeros, without an access, where `valid` is 0."""
    return _load(f"{_order(early)}global.L1::no_allocate@.L2::128B", address, offset, n, valid, policy)


def store_uncached(address, offset, words):
    """The reverse of `load_uncached`."""
    n = len(words)
    asm(f"st.global.L1::no_allocate{_VECTOR[n]}.b32 [$0+{offset}], {_list(1, n)};", [], [Int64(address), *words])


def fetch_to_l2(address, size, valid):
    """Has L2 read `size` bytes, multiples of 16, where `valid` is not 0; nothing waits for them."""
    text = "{\n.reg .pred p;\nsetp.ne.b32 p, $1, 0;\n" + f"@p cp.async.bulk.prefetch.L2.global [$0], {size};\n}}"
    asm(text, [], [Int64(address), Int32(valid)])


def load_if(address, offset, n, valid, early=False):
    """As `load_uncached`, for what other warps read too."""
    return _load(f"{_order(early)}global", address, offset, n, valid)


def load_half_if(address, valid, early=False):
    """16 bits at a global address in the low half of a word; zero, without an access, where `valid` is 0."""
    text = (
        "{\n.reg .pred p;\n.reg .b16 h;\nsetp.ne.b32 p, $2, 0;\nmov.b16 h, 0;\n"
        f"@p ld.{_order(early)}global.b16 h, [$1];\ncvt.u32.u16 $0, h;\n}}"
    )
    return asm(text, [Uint32], [Int64(address), Int32(valid)])
