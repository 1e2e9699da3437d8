"""What stands beside a kernel in PTX: variables of the module, device functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memory_ptx import kernel, run

import ptxemu

OUT = "    mul.wide.u32 %d5, %r0, 4;\n    add.u64 %d5, %d5, %d0;\n    st.global.b32 [%d5], {};\n"
VARIABLES = """
.const .align 4 .b8 bytes[8] = {1, 2, 3, 255};
.visible .const .align 4 .f32 table[3] = {0f3FC00000, -2.0, 0F40400000};
.global .align 8 .u64 wide = 0x100000002;
.global .align 4 .u32 counter = 7;
.global .align 4 .s32 grid[2][3] = {{1, 2, 3}, {-4, 5, 6}};
.global .align 4 .b32 scratch[32];
"""


def words(n: int = 32) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("    ld.const.b32 %r2, [bytes];", 0xFF030201 - (1 << 32)),
        ("    ld.const.b32 %r2, [bytes+4];", 0),
        ("    mov.u64 %d6, table;\n    ld.const.b32 %r2, [%d6+4];", 0xC0000000 - (1 << 32)),
        ("    mov.u64 %d6, table;\n    cvta.const.u64 %d6, %d6;\n    ld.b32 %r2, [%d6+8];", 0x40400000),
        ("    ld.global.u64 %d6, [wide];\n    shr.u64 %d6, %d6, 32;\n    cvt.u32.u64 %r2, %d6;", 1),
        ("    ld.global.b32 %r2, [counter];", 7),
        ("    mov.u64 %d6, grid;\n    ld.global.b32 %r2, [%d6+12];", -4),
        ("    st.global.b32 [scratch+8], 5;\n    ld.global.b32 %r2, [scratch+8];", 5),
    ],
)
def test_variables(body: str, value: int) -> None:
    x = words()
    run(body + "\n" + OUT.format("%r2"), [x], head=VARIABLES)
    assert x.tolist() == [value] * 32


def test_a_launch_begins_with_initial_values() -> None:
    x = words()
    for _ in range(2):
        run("    atom.global.add.u32 %r2, [counter], 1;\n" + OUT.format("%r2"), [x], head=VARIABLES)
        assert sorted(x.tolist()) == list(range(7, 39))


def test_past_a_variable() -> None:
    with pytest.raises(ptxemu.MemoryFault, match=r"offset 24 of variable grid, which has 24 bytes"):
        run("    ld.global.b32 %r2, [grid+24];", [words()], head=VARIABLES)


# As nvcc writes functions that it may not inline: a struct as a result, calls in loops and of calls, early returns, guards.
FUNCTIONS = """
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 vprintf_param_0, .param .b64 vprintf_param_1);
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.func (.param .align 4 .b8 func_retval0[8]) pick(
    .param .b32 pick_param_0,
    .param .b32 pick_param_1
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    ld.param.u32 %r1, [pick_param_0];
    ld.param.u32 %r2, [pick_param_1];
    setp.gt.s32 %p1, %r2, 3;
    @%p1 bra $L__BB0_2;
    st.param.b32 [func_retval0+0], %r1;
    st.param.b32 [func_retval0+4], %r2;
    @!%p1 ret;
$L__BB0_2:
    mul.lo.u32 %r3, %r1, %r2;
    st.param.b32 [func_retval0+0], %r3;
    neg.s32 %r4, %r2;
    st.param.b32 [func_retval0+4], %r4;
    ret;
}
.func (.param .b32 func_retval0) twice(.param .b32 twice_param_0, .param .b32 twice_param_1)
{
    .reg .pred %p<2>;
    .reg .b32 %r<12>;
    ld.param.u32 %r1, [twice_param_0];
    ld.param.u32 %r2, [twice_param_1];
    mov.u32 %r3, 0;
    mov.u32 %r4, 0;
$L__BB0_2:
    setp.ge.u32 %p1, %r4, %r2;
    @%p1 bra $L_DONE;
    { // callseq 0, 0
    .param .b32 param0;
    st.param.b32 [param0+0], %r1;
    .param .b32 param1;
    st.param.b32 [param1+0], %r4;
    .param .align 4 .b8 retval0[8];
    call.uni (retval0),
    pick,
    (
    param0,
    param1
    );
    ld.param.b32 %r5, [retval0+0];
    ld.param.b32 %r6, [retval0+4];
    } // callseq 0
    add.u32 %r3, %r3, %r5;
    add.u32 %r3, %r3, %r6;
    add.u32 %r4, %r4, 1;
    bra $L__BB0_2;
$L_DONE:
    st.param.b32 [func_retval0+0], %r3;
    ret;
}
"""
CALL = """
    and.b32 %r20, %r0, 7;
    setp.ne.u32 %p1, %r20, 5;
    mov.u32 %r21, 1000;
    {
    .param .b32 param0;
    st.param.b32 [param0+0], %r0;
    .param .b32 param1;
    st.param.b32 [param1+0], %r20;
    .param .b32 retval0;
    @%p1 call (retval0), twice, (param0, param1);
    ld.param.b32 %r22, [retval0+0];
    }
    selp.b32 %r21, %r22, %r21, %p1;
"""


def pick(x: int, i: int) -> tuple[int, int]:
    return (x * i, -i) if i > 3 else (x, i)


def twice(x: int, n: int) -> int:
    return sum(sum(pick(x, i)) for i in range(n))


def test_functions() -> None:
    x = words()
    run(CALL + OUT.format("%r21"), [x], head=FUNCTIONS)
    assert x.tolist() == [1000 if i % 8 == 5 else twice(i, i % 8) for i in range(32)]


@pytest.mark.parametrize("before", ["", "    st.param.b32 [retval0+0], 7;\n"])
def test_a_result_that_no_call_gave(before: str) -> None:
    """Where a call is not made its result has no value, whatever its variable held before."""
    body = CALL.replace("    @%p1 call", before + "    @%p1 call") + OUT.format("%r22")
    with pytest.raises(ptxemu.MemoryFault, match=r"depends on a result that was not given .* PTX line \d+: @%p1 call"):
        run(body, [words()], head=FUNCTIONS)
    run(body.replace("st.global", "@%p1 st.global"), [words()], head=FUNCTIONS)


@pytest.mark.parametrize("skipped", [False, True])
def test_two_calls_give_one_result(skipped: bool) -> None:
    """Calls under complementary guards, or behind a branch, fill one variable; lanes in which neither is made have no value."""
    call = "@{} call (retval0), twice, (param0, param1);\n"
    first = "    " + call.format("%p1")
    made = f"    @!%p1 bra PAST;\n{first}PAST:\n" if skipped else first
    second = "    st.param.b32 [param1+0], 4;\n    " + call
    x = words()
    run(CALL.replace(first, made + second.format("!%p1")) + OUT.format("%r22"), [x], head=FUNCTIONS)
    assert x.tolist() == [twice(i, 4 if i % 8 == 5 else i % 8) for i in range(32)]
    one = "    setp.eq.u32 %p2, %r0, 13;\n" + CALL.replace(first, made + second.format("%p2"))
    with pytest.raises(ptxemu.MemoryFault, match=r"depends on a result that was not given .* PTX line \d+: @%p2 call"):
        run(one + OUT.format("%r22"), [words()], head=FUNCTIONS)


@pytest.mark.parametrize("again", [False, True])
def test_lanes_that_branch_past_all_calls_have_no_result(again: bool) -> None:
    """Nor one from a pass through the loop before, in which the variable was another."""
    call = "    @%p1 call (retval0), twice, (param0, param1);\n"
    store = OUT.format("%r22")

    def past(guard: str) -> str:
        return CALL.replace(call, f"    @{guard} bra PAST;\n    call (retval0), twice, (param0, param1);\nPAST:\n")

    body = past("!%p1") + store
    if again:
        loop = "    setp.eq.u32 %p2, 0, 0;\nLOOP:\n" + past("!%p2") + store
        body = loop + "    @!%p2 bra OUT;\n    and.pred %p2, %p1, %p1;\n    @!%p1 bra LOOP;\nOUT:\n"
    with pytest.raises(
        ptxemu.MemoryFault, match=r"depends on a result that was not given .* PTX line \d+: call \(retval0"
    ):
        run(body, [words()], head=FUNCTIONS)
    x = words()
    run(past("!%p1") + store.replace("st.global", "@%p1 st.global"), [x], head=FUNCTIONS)
    assert x.tolist() == [0 if i % 8 == 5 else twice(i, i % 8) for i in range(32)]


def test_a_function_that_gives_no_result() -> None:
    head = FUNCTIONS.replace("$L_DONE:\n    st.param", "$L_DONE:\n    setp.gt.u32 %p1, %r2, 1;\n    @%p1 st.param")
    with pytest.raises(ptxemu.MemoryFault, match=r"was not given .* by the call at PTX line \d+: @%p1 call"):
        run(CALL + OUT.format("%r21"), [words()], head=head)


def test_functions_without_a_body() -> None:
    printing = """
    {
    .param .b64 param0;
    st.param.b64 [param0+0], %d0;
    .param .b64 param1;
    st.param.b64 [param1+0], %d0;
    .param .b32 retval0;
    @%p1 call.uni (retval0), vprintf, (param0, param1);
    }
"""
    launched = run("    setp.eq.u32 %p1, %r0, 3;\n" + printing, [words()], head=FUNCTIONS)
    assert [note.split(" at ")[0] for note in launched.notes] == ["printf"]
    sizes = {"a": 64, "b": 64, "c": 32, "d": 64, "e": 64}
    params = "".join(f"    .param .b{n} {x};\n    st.param.b{n} [{x}+0], 0;\n" for x, n in sizes.items())
    failing = (
        f"    setp.eq.u32 %p1, %r0, 3;\n    {{\n{params}    @%p1 call.uni __assertfail, (a, b, c, d, e);\n    }}\n"
    )
    with pytest.raises(ptxemu.EmulatorError, match=r"an assertion of the kernel fails \(lanes 0x8\)"):
        run(failing, [words()], head=FUNCTIONS)
    run(failing.replace("3;", "40;", 1), [words()], head=FUNCTIONS)


@pytest.mark.parametrize(
    ("head", "body", "message"),
    [
        (".func again()\n{\n    call again, ();\n    ret;\n}\n", "    call again, ();\n", "recursion"),
        (".extern .func other(.param .b32 a);\n", "    call other, (%r0);\n", "the function other has no body"),
        (FUNCTIONS, "    call pick, (%r0);\n", "another number than pick has"),
        (FUNCTIONS, "    call __assertfail, (x, x, x, x, x);\n", "x is no variable in .param space"),
        (FUNCTIONS, "    .local .b32 x;\n    call (x), vprintf, (x, x);\n", "x is no variable in .param space"),
        (
            FUNCTIONS,
            "    .param .b32 x;\n    call (x), vprintf, (x, x);\n",
            "x has 4 bytes; vprintf_param_0 of vprintf has 8",
        ),
        ("", "    call (%r1), %d1, (%r0), prototype;\n", "only functions of this text"),
        (".global .align 8 .u64 p = generic(q);\n", "", "initial value"),
    ],
)
def test_unsupported(head: str, body: str, message: str) -> None:
    with pytest.raises(ptxemu.Unsupported, match=message):
        run(body, [words()], head=head)


# ---- setmaxnreg ---------------------------------------------------------------------------------------------------------------------
RESIZE = """
    setp.lt.u32 %p1, %r0, 128;
    @%p1 bra LESS;
    setmaxnreg.inc.sync.aligned.u32 {inc};
    bra DONE;
LESS:
    setmaxnreg.dec.sync.aligned.u32 {dec};
DONE:
"""


def resized(body: str, threads: int = 384, directive: str = "", **options: Any) -> None:
    text = kernel(body, 1).replace("p0)\n{", f"p0)\n{directive}\n{{")
    ptxemu.run_ptx(text, "k", (1,), (threads,), [words()], **options)


def test_the_pool_of_registers() -> None:
    """384 threads begin with 168 registers each, as ptxas allows them."""
    for seed in range(3):
        resized(RESIZE.format(dec=24, inc=240), seed=seed, shuffle=True)
        resized(RESIZE.format(dec=40, inc=232), seed=seed, shuffle=True)
        with pytest.raises(
            ptxemu.Deadlock,
            match=r"pool of registers to have so many for it: 2304[\s\S]*CTA 0 has 256 registers in its pool",
        ):
            resized(RESIZE.format(dec=40, inc=240), seed=seed, shuffle=seed > 0)
    resized(RESIZE.format(dec=24, inc=104), directive=".maxnreg 80")
    with pytest.raises(ptxemu.Deadlock, match="pool of registers"):
        resized(RESIZE.format(dec=24, inc=104), directive=".maxnreg 72")
    with pytest.raises(ptxemu.Deadlock, match="pool of registers"):
        resized(RESIZE.format(dec=24, inc=152), directive=".minnctapersm 2")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (RESIZE.format(dec=176, inc=240), "setmaxnreg.dec to 176 registers a thread by a warp that has 168"),
        (RESIZE.format(dec=24, inc=160), "setmaxnreg.inc to 160 registers a thread by a warp that has 168"),
        (RESIZE.format(dec=24, inc=240).replace("128", "64"), r"the warpgroup asks for (24|240)|of one warpgroup have executed"),
        ("    setp.lt.u32 %p1, %r0, 64;\n    @%p1 bra DONE;\n    setmaxnreg.dec.sync.aligned.u32 24;\nDONE:\n",
         "of one warpgroup have executed 0 and 1"),
        ("    setp.lt.u32 %p1, %r0, 64;\n    @%p1 bar.sync 1, 384;\n"
         "    setmaxnreg.dec.sync.aligned.u32 40;\n    setmaxnreg.dec.sync.aligned.u32 24;\n"
         "    @!%p1 bar.arrive 1, 384;\n",
         "has not executed the one before"),
    ],
)  # fmt: skip
def test_inconsistent_registers(body: str, message: str) -> None:
    with pytest.raises(ptxemu.BarrierFault, match=message):
        resized(body, quantum=1)
