"""bar.red and barrier.red: votes of all threads of a barrier, phase after phase; and their faults."""

from __future__ import annotations

import numpy as np
import pytest
from matrix_ptx import launch, module, tensor, words_out

import ptxemu

VOTES = {
    "none": np.zeros(128, bool), "all": np.ones(128, bool), "one": np.arange(128) == 77, "all but one": np.arange(128) != 5,
    "some": np.arange(128) * 7 % 10 < 3,
}  # fmt: skip
OPCODES = ["bar.red{}", "bar.cta.red{}", "barrier.red{}", "barrier.cta.red.aligned{}", "barrier.red.aligned{}"]


def run(body: str, votes: np.ndarray, threads: int = 128, words: int = 1, **options: object) -> np.ndarray:
    """What the threads store of %d0 and on; %p1: the thread's vote."""
    out = tensor(np.zeros((words, threads), np.uint32))
    text = module(
        f"""
    mad.wide.u32 %at, %thread, 4, %votes;
    ld.global.b32 %r0, [%at];
    setp.ne.u32 %p1, %r0, 0;
{body}
""" + words_out("d", words, "out", threads),
        ["out", "votes"],
    )  # fmt: skip
    launch(text, threads, [out, tensor(votes.astype(np.uint32))], **options)
    return out.numpy().view(np.uint32).reshape(words, threads)


def predicate(number: int) -> str:
    return f"selp.u32 %d{number}, 1, 0, %p2;"


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("opcode", OPCODES)
@pytest.mark.parametrize("name", VOTES)
def test_operations(name: str, opcode: str, negated: bool) -> None:
    """One barrier in three phases, with and without a thread count."""
    votes = VOTES[name]
    p = "!%p1" if negated else "%p1"
    body = f"""
    {opcode.format(".popc.u32")} %d0, 3, 128, {p};
    {opcode.format(".and.pred")} %p2, 3, {p};
    {predicate(1)}
    {opcode.format(".or.pred")} %p2, 3, 128, {p};
    {predicate(2)}
"""
    cast = votes != negated
    want = np.array([cast.sum(), cast.all(), cast.any()])
    for options in ({}, {"shuffle": True, "seed": 5, "quantum": 3}):
        assert (run(body, votes, words=3, **options) == want[:, None]).all()


def test_barriers_of_some_warps() -> None:
    """Two pairs of warps with a barrier each; the number is in a register."""
    body = """
    shr.u32 %r1, %warp, 1;
    add.u32 %r1, %r1, 1;
    mov.u32 %r2, 64;
    barrier.red.popc.u32 %d0, %r1, %r2, %p1;
"""
    votes = VOTES["some"]
    assert (run(body, votes)[0] == np.repeat([votes[:64].sum(), votes[64:].sum()], 64)).all()


def test_it_orders_memory() -> None:
    """A value that another warp stored before it; without it the load races."""
    body = """
    mov.u32 %r3, smem;
    mad.lo.u32 %r4, %thread, 4, %r3;
    st.shared.b32 [%r4], %thread;
    {}
    xor.b32 %r5, %thread, 96;
    mad.lo.u32 %r4, %r5, 4, %r3;
    ld.shared.b32 %d0, [%r4];
"""
    votes = VOTES["some"]
    got = run(body.format("bar.red.and.pred %p2, 0, %p1;"), votes, shared=512)
    assert (got[0] == np.arange(128) ^ 96).all()
    with pytest.raises((ptxemu.RaceFault, ptxemu.MemoryFault), match=r"not ordered|uninitialised"):
        run(body.format(""), votes, shared=512)


@pytest.mark.parametrize(
    ("line", "kind", "pattern"),
    [
        ("bar.red.popc.u32 %d0, 0, 100, %p1;", ptxemu.BarrierFault, "not a multiple of the warp size"),
        ("bar.red.popc.u32 %d0, 0, 160, %p1;", ptxemu.Deadlock, "barrier"),
        ("bar.red.popc.u32 %d0, %thread, %p1;", ptxemu.BarrierFault, "lanes of one warp name different barriers"),
        ("bar.red.xor.pred %p2, 0, %p1;", ptxemu.Unsupported, "modifier .xor"),
    ],
)
def test_faults(line: str, kind: type[Exception], pattern: str) -> None:
    with pytest.raises(kind, match=pattern):
        run(line, VOTES["some"])
