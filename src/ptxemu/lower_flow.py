"""Barriers, mbarriers, fences, warp collectives and small control instructions."""

from __future__ import annotations

from .lower import SINK, Lowering, lowers
from .ptx import SINK as PTX_SINK
from .ptx import Imm, Instr, Mem, Operand, Pair

# Modifiers that change nothing here: the emulator orders by the strongest of them.
SCOPES = {"cta", "cluster", "gpu", "sys", "acquire", "release", "acq_rel", "sc", "relaxed"}
SPACES = {"shared", "shared::cta", "shared::cluster"}


def known(low: Lowering, ins: Instr, *allowed: str, sets: tuple[set[str], ...] = ()) -> set[str]:
    """The modifiers of an instruction; one that is not allowed is unsupported."""
    mods = set(ins.parts[1:])
    extra = mods - set(allowed) - set().union(*sets)
    if extra:
        raise low.unsupported(f"modifier .{sorted(extra)[0]}")
    return mods


def _pair(a: Operand) -> tuple[Operand, Operand]:
    return (a.a, a.b) if isinstance(a, Pair) else (a, PTX_SINK)


# ---- warp collectives ----------------------------------------------------------------------------------------------------------
@lowers("elect")
def _elect(low: Lowering, ins: Instr) -> None:
    known(low, ins, "sync")
    d, p = _pair(ins.args[0])
    low.emit("elect", [low.target(d, 32), low.target(p, 1), low.operand(ins.args[1], "b32")])


@lowers("shfl")
def _shfl(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "sync", "up", "down", "bfly", "idx", "b32")
    d, p = _pair(ins.args[0])
    mode = next(i for i, name in enumerate(("up", "down", "bfly", "idx")) if name in mods)
    args = [low.target(d, 32), low.target(p, 1), *(low.operand(a, "b32") for a in ins.args[1:5])]
    low.emit("shfl", args, [mode])


@lowers("vote")
def _vote(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "sync", "all", "any", "uni", "ballot", "pred", "b32")
    mode = next(i for i, name in enumerate(("all", "any", "uni", "ballot")) if name in mods)
    p, negated = low.predicate(ins.args[1])
    args = [low.target(ins.args[0], 32 if mode == 3 else 1), p, low.operand(ins.args[2], "b32")]
    low.emit("vote", args, [mode, negated])


@lowers("activemask")
def _activemask(low: Lowering, ins: Instr) -> None:
    known(low, ins, "b32")
    low.emit("activemask", [low.target(ins.args[0], 32)])


@lowers("match")
def _match(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "any", "all", "sync", "b32", "b64")
    d, p = _pair(ins.args[0])
    type_ = "b64" if "b64" in mods else "b32"
    args = [low.target(d, 32), low.target(p, 1), low.operand(ins.args[1], type_), low.operand(ins.args[2], "b32")]
    low.emit("match", args, ["all" in mods, "b64" in mods])


@lowers("redux")
def _redux(low: Lowering, ins: Instr) -> None:
    operations = ("add", "min", "max", "and", "or", "xor")
    mods = known(low, ins, "sync", *operations, "u32", "s32", "b32", "f32", "abs", "NaN")
    operation = next(i for i, name in enumerate(operations) if name in mods)
    type_ = 2 if "f32" in mods else 1 if "s32" in mods else 0
    args = [low.target(ins.args[0], 32), low.operand(ins.args[1], "b32"), low.operand(ins.args[2], "b32")]
    low.emit("redux", args, [operation, type_, ("abs" in mods) + 2 * ("NaN" in mods)])


# ---- barriers --------------------------------------------------------------------------------------------------------------------
@lowers("bar", "barrier")
def _bar(low: Lowering, ins: Instr) -> None:
    if "cluster" in ins.parts:
        _cluster(low, ins)
        return
    if "warp" in ins.parts:
        known(low, ins, "warp", "sync")
        low.emit("bar.warp", [low.operand(ins.args[0], "b32")])
        return
    mods = known(low, ins, "sync", "arrive", "red", "cta", "aligned", "popc", "and", "or", "u32", "pred")
    args = list(ins.args)
    if "red" in mods:
        d, number, *count, p = args
        predicate, negated = low.predicate(p)
        votes = 0 if "popc" in mods else 1 if "and" in mods else 2
        threads = low.operand(count[0], "u32") if count else SINK
        args = [low.operand(number, "u32"), threads, low.target(d, 32 if votes == 0 else 1), predicate]
        low.emit("bar.red", args, [2, 0, votes, negated], aligned=True, blocking=True)
        return
    threads = low.operand(args[1], "u32") if len(args) > 1 else SINK
    low.emit("bar", [low.operand(args[0], "u32"), threads], ["arrive" in mods], aligned=True, blocking=True)


def _cluster(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "cluster", "arrive", "wait", "aligned", sets=(SCOPES,))
    if "arrive" in mods:
        low.emit("barrier.cluster.arrive", [], [0, "relaxed" in mods], aligned=True)
    else:
        low.emit("barrier.cluster.wait", [], [1], aligned=True, blocking=True)


@lowers("mbarrier")
def _mbarrier(low: Lowering, ins: Instr) -> None:
    what = ins.parts[1]
    mods = known(
        low, ins, "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "try_wait", "test_wait", "parity",
        "noComplete", "b64", sets=(SCOPES, SPACES),
    )  # fmt: skip
    args = list(ins.args)

    def address(a: Operand) -> tuple[int, int, int]:
        return low.address(a, "shared" if mods & SPACES else "generic")

    if what in ("init", "expect_tx", "complete_tx"):
        at, off, generic = address(args[0])
        low.emit(f"mbarrier.{what}", [at, low.operand(args[1], "u32")], [off, generic])
    elif what == "inval":
        at, off, generic = address(args[0])
        low.emit("mbarrier.inval", [at], [off, generic])
    elif what in ("arrive", "arrive_drop"):
        state = SINK
        if not isinstance(args[0], Mem):
            state = low.target(args.pop(0), 64)
        at, off, generic = address(args[0])
        value = low.operand(args[1], "u32") if len(args) > 1 else SINK
        flags = generic + 2 * (what == "arrive_drop") + 4 * ("expect_tx" in mods)
        flags += 8 * ("cluster" in mods and "relaxed" not in mods)
        low.emit("mbarrier.arrive", [state, at, value], [off, flags])
    elif what in ("try_wait", "test_wait"):
        parity = "parity" in mods
        at, off, generic = address(args[1])
        flags = generic + 2 * parity + 4 * (what == "test_wait") + 8 * ("relaxed" in mods)
        phase = low.operand(args[2], "u32" if parity else "u64")
        low.emit("mbarrier.wait", [low.target(args[0], 1), at, phase], [off, flags], blocking=True)
    else:
        raise low.unsupported()


# ---- fences and control ------------------------------------------------------------------------------------------------------------
@lowers("fence", "membar")
def _fence(low: Lowering, ins: Instr) -> None:
    if "proxy" in ins.parts:
        proxy = ins.parts[ins.parts.index("proxy") + 1]
        if proxy.startswith("async"):
            low.emit("fence.proxy.async")
        elif proxy.startswith(("tensormap", "alias")):
            low.emit("nothing")
        else:
            raise low.unsupported(f"proxy .{proxy}")
        return
    known(
        low, ins, "mbarrier_init", "gl", "sync_restrict::shared::cta", "sync_restrict::shared::cluster",
        sets=(SCOPES, SPACES),
    )  # fmt: skip
    low.emit("fence.mbarrier_init" if "mbarrier_init" in ins.parts else "fence")


@lowers("setmaxnreg")
def _setmaxnreg(low: Lowering, ins: Instr) -> None:
    mods = known(low, ins, "inc", "dec", "sync", "aligned", "u32")
    count = ins.args[0]
    if not isinstance(count, Imm) or not 24 <= count.value <= 256 or count.value % 8:
        raise low.unsupported("setmaxnreg takes a multiple of 8 from 24 to 256")
    low.emit("setmaxnreg", [], [count.value, "inc" in mods], aligned=True)


@lowers("nanosleep")
def _nanosleep(low: Lowering, ins: Instr) -> None:
    known(low, ins, "u32")
    low.emit("yield", blocking=True)


@lowers("griddepcontrol", "pragma", "discard", "applypriority")
def _nothing(low: Lowering, ins: Instr) -> None:
    # griddepcontrol: launches run one after another here, so the launch before is complete.
    low.emit("nothing")


@lowers("call")
def _call(low: Lowering, ins: Instr) -> None:
    # Calls of functions without a body: printf, whose text goes nowhere, and what a failed assertion does.
    low.emit("printf" if ins.parts[1] == "vprintf" else "assertion")


@lowers("call.results")
def _call_results(low: Lowering, ins: Instr) -> None:
    # What a function is about to give has no value where it does not: in lanes outside the call's guard, or without a st.param. What
    # an earlier call gave to lanes outside the guard stays: calls under two guards may fill one variable. It has none in lanes that
    # branch past all calls either, so it loses it where it is declared; other variables than results do not.
    if not ins.args:
        return
    result, guard, again = ins.args
    p, negated = low.predicate(guard)
    low.emit("call.results", [p], [low.kernel.local[result.name], low.kernel.sizes[result.name], negated, again.value])


@lowers("trap", "brkpt")
def _trap(low: Lowering, ins: Instr) -> None:
    low.emit("trap")
