"""The inverse applied to keys, and the whole chain for datacentre Blackwell: prepare, apply, scan."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import kernels
import pytest
import torch
from kda_model import matrix
from mutate import Mutation, judge, nth
from scan_inputs import Inputs, error

import deltafuse
import ptxemu
from deltafuse.autograd import scan
from deltafuse.autograd.kda_cute import flags_of, forward, kernels_for
from deltafuse.cli.specs import DeltaSpec
from deltafuse.kernels.config import ApplyConfig, ScanConfig
from deltafuse.kernels.schedule import Schedule
from deltafuse.problem import parse_delta
from ptxemu import BarrierFault, Deadlock, MemoryFault, ProxyFault, RaceFault

BF16, FP16 = torch.bfloat16, torch.float16


@cache
def compiled(kernel: str, config: Any) -> Any:
    return kernels.need("sm_100a", lambda: importlib.import_module(f"deltafuse.kernels.{kernel}").compile(config))


def apply(x: Inputs, **options: Any) -> torch.Tensor:
    function = compiled("warp.kda_apply", ApplyConfig(str(x.dtype).removeprefix("torch."), x.key_dim))
    out = torch.full_like(x.slots["w"], float("nan"))
    with ptxemu.emulate("sm_100a", **options) as launches:
        function(x.slots["factors"], x.slots["scores"], out)
    assert launches[0].grid == (out.shape[0] * out.shape[1] * out.shape[2], 1, 1)
    return out


def places(x: Inputs) -> list[tuple[int, int, slice]]:
    """Slot, batch entry and tokens of every chunk."""
    return [(x.slot(i, c), *x.place(i, c)) for i in range(len(x.lengths)) for c in range(x.chunks(i))]


def check(x: Inputs, out: torch.Tensor) -> None:
    for slot, _, tokens in places(x):
        rows = tokens.stop - tokens.start
        for h in range(x.heads):
            m = matrix(x.slots["scores"][slot, h, :1]).double()[:rows, :rows]
            kd = matrix(x.slots["factors"][slot, h, 0]).double()[:rows]
            want = m @ kd
            got = matrix(out[slot, h])
            # One rounding of the sum: at most half a unit in the last place beyond what fp32 sums lose.
            unit = 2.0 ** (-8 if x.dtype == BF16 else -11)
            assert ((got[:rows].double() - want).abs() <= want.abs() * unit * 1.01 + 1e-7).all()
            assert (got[rows:] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("k", [64, 128])
def test_equals_the_products(dtype: torch.dtype, k: int) -> None:
    x = Inputs([64], key_dim=k, value_dim=64, dtype=dtype)
    check(x, apply(x, seed=1, shuffle=True))


@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (63, 2), (130, 2)])
def test_tails_and_heads(tokens: int, batch: int) -> None:
    x = Inputs([tokens] * batch, heads=2, value_dim=64)
    check(x, apply(x))


@pytest.mark.parametrize("lengths", [[130, 70], [15, 85, 1, 64, 0, 90], [0, 0, 64, 63]])
def test_slots_that_are_nobodys_do_not_matter(lengths: list[int]) -> None:
    """Their images, here all NaN, give NaN and nothing else."""
    x = Inputs(lengths, packed=True, value_dim=64)
    out = apply(x)
    check(x, out)
    used = {slot for slot, *_ in places(x)}
    assert out[[s for s in range(out.shape[0]) if s not in used]].isnan().all()


MUTATIONS = [
    Mutation("barrier counts 2", nth(r"(mbarrier\.init[^,]*,) [^;]*;", r"\1 2;"), (Deadlock,)),
    Mutation("no proxy fence", nth(r"fence\.proxy\.async[^;]*;"), (ProxyFault,)),
    Mutation("no wait for the copies", nth(r"mbarrier\.try_wait\.parity[^;]*;", "setp.eq.u32 P1, 0, 0;"), (RaceFault, MemoryFault)),
    Mutation("no barrier after the initialisation", nth(r"bar\.sync\s+0;"), (RaceFault, MemoryFault, BarrierFault)),
    Mutation("M' not copied", nth(r"cp\.async\.bulk\.shared[^;]*;"), (Deadlock,)),
    Mutation("kd not copied", nth(r"cp\.async\.bulk\.shared[^;]*;", "", 1), (Deadlock,)),
    Mutation("more bytes than expected", nth(r"\b16384\b", "8192"), (BarrierFault, RaceFault)),
    Mutation("M' transposed", nth(r"(ldmatrix\.sync\.aligned\.m8n8\.x4)(\.shared)", r"\1.trans\2")),
    Mutation("kd not transposed", nth(r"(ldmatrix\.sync\.aligned\.m8n8\.x4)\.trans", r"\1")),
]  # fmt: skip


@pytest.fixture(scope="module")
def case() -> kernels.Case:
    x = Inputs([64])
    out = torch.empty_like(x.slots["w"])
    args = (x.slots["factors"], x.slots["scores"], out)
    return kernels.Case(
        "KDA apply", compiled("warp.kda_apply", ApplyConfig()), args, {"w": out}, {"w": x.slots["w"].double()}
    )


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutations_are_noticed(case: kernels.Case, record_property: Any, mutation: Mutation) -> None:
    verdict = judge(case, mutation)
    record_property("mutation", (case.name, verdict.line))
    assert verdict.caught, str(verdict)


# ---- the chain ---------------------------------------------------------------------------------------------------------------------
STATES: dict[str, Any] = {"initial_state": True, "final_state": True}
RAW: dict[str, Any] = {"l2norm": True, "beta_sigmoid": True, "gate": "softplus", "decay": "remembering"}
CHAINS = {
    "plain": DeltaSpec("chunk_kda", tokens=130),
    "trained": DeltaSpec("chunk_kda", tokens=200, heads=1, key_dim=128, value_dim=128, **RAW, **STATES),
    "GVA, V first": DeltaSpec("chunk_kda", batch=2, tokens=96, heads=1, value_heads=2, v_first=True, **RAW, **STATES),
    "padded K and V": DeltaSpec("chunk_kda", tokens=65, key_dim=60, value_dim=100, **STATES),
    "packed": DeltaSpec("chunk_kda", tokens=255, lengths=(15, 85, 1, 64, 0, 90), heads=1, **STATES),
    "strong decays": DeltaSpec("chunk_kda", tokens=130, decay="strong", **STATES),
}  # fmt: skip


def load(kernel: str, config: Any, arch: str) -> Any:
    assert arch == "sm_100a"
    if kernel != "sm90.kda_scan":
        return compiled(kernel, config)

    def blackwell(factors, scores, decay, v, h0, cu, o, ht, hs, bound, early, segments, chunks):  # type: ignore[no-untyped-def]
        assert (hs, bound, early, segments) == (None, None, None, 1)
        found = scan.scan_slots(
            factors,
            scores,
            decay,
            v,
            h0,
            cu,
            final=ht is not None,
            state_v_first=config.state_v_first,
            arch=arch,
            sms=148,
            load=compiled_at,
        )
        for y, z in zip((o, ht), found, strict=True):
            if y is not None:
                y.copy_(z)

    return blackwell


def compiled_at(kernel: str, config: Any, arch: str) -> Any:
    return compiled(kernel, config)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", CHAINS)
def test_chain_equals_the_definition(name: str, dtype: torch.dtype) -> None:
    """chunk_kda's forward pass with this scan in the place of Hopper's, on kernels that are all compiled for sm_100a."""
    given = CHAINS[name].arguments(dtype, seed=3)
    with torch.no_grad():
        call = parse_delta("chunk_kda", per_key=True, **given)
    rest = (call.g, call.beta, call.a_log, call.dt_bias, call.initial_state, call.cu_seqlens, flags_of(call.problem))
    chosen = kernels_for(call.q, call.v, *rest, sms=132, plan=Schedule(64, 1, 1, -(-call.q.shape[1] // 64)))
    with ptxemu.emulate("sm_100a") as launches:
        o, state, *_ = forward(call.q, call.k, call.v, *rest, chosen, "sm_100a", load)
    assert len(launches) == 3
    wide = {n: y.double() if isinstance(y, torch.Tensor) and y.is_floating_point() else y for n, y in given.items()}
    with torch.inference_mode():
        want = deltafuse.chunk_kda(**wide, backend="torch")
    within = 5e-3 if dtype == BF16 else 1e-3
    print(f"{name}: o {error(o, want[0]):.2e}")
    assert error(o, want[0]) < within
    if state is not None:
        assert error(state, want[1]) < within


def exact(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final state of one sequence of one head by the operands of its chunks, in float64."""
    s = x.slots
    state, out = x.h0[0, 0].double(), []
    for slot, b, tokens in places(x):
        m, aqk = (matrix(s["scores"][slot, 0, i : i + 1]).double() for i in range(2))
        kd, qg, kg = (matrix(s["factors"][slot, 0, i]).double() for i in range(3))
        new = m @ (x.v[b, tokens, 0].double() + kd @ state)
        out.append(qg @ state + aqk @ new)
        state = s["decay"][slot, 0].double()[:, None] * state + kg.T @ new
    return torch.cat(out)[None, :, None], state[None, None]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_errors_are_those_of_the_hopper_scan(dtype: torch.dtype) -> None:
    """Both against float64 of the same workspaces: at most Hopper's, which rounds v + kd S where this chain rounds w alone."""

    def hopper() -> Any:
        from deltafuse.kernels.sm90 import kda_scan

        return kda_scan.compile(ScanConfig(str(dtype).removeprefix("torch."), tile=64, initial=True, final=True))

    function = kernels.need("sm_90a", hopper)
    squares = torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(6):
        x = Inputs([256], value_dim=64, dtype=dtype, seed=seed)
        s, wanted = x.slots, exact(x)
        theirs = torch.empty_like(x.v), torch.empty_like(x.h0)
        with ptxemu.emulate("sm_90a"):
            function(s["factors"], s["scores"], s["decay"], x.v, x.h0, None, *theirs, None, None, None, 1, 4)
        with ptxemu.emulate("sm_100a"):
            ours = scan.scan_slots(
                s["factors"], s["scores"], s["decay"], x.v, x.h0, None, final=True, state_v_first=False, arch="sm_100a", sms=148,
                load=compiled_at,
            )  # fmt: skip
        for i, found in enumerate((ours, theirs)):
            squares[i] += torch.tensor([error(y, want) ** 2 for y, want in zip(found, wanted, strict=True)])
    ratios = (squares[0] / squares[1]).sqrt().tolist()
    print(f"{dtype}: o {ratios[0]:.3f}, final state {ratios[1]:.3f} of the Hopper scan's error")
    assert max(ratios) <= 1.0
