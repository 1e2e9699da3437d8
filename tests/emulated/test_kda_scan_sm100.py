"""The Blackwell scan of KDA: against float64, against a model with 16-bit operands, against kernel-fun's kernel, under many schedules."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import kernels
import pytest
import torch
from scan_inputs import Inputs, error

import ptxemu
from deltafuse.autograd import scan
from deltafuse.kernels.config import ApplyConfig, BlackwellScanConfig
from deltafuse.kernels.sm100.plan import TENSOR_COLUMNS, choose, plan

BF16, FP16 = torch.bfloat16, torch.float16
WITHIN = {BF16: 5e-3, FP16: 1e-3}
# Results and the model differ by the order of sums, which now and then turns a rounding.
OF_MODEL = {BF16: 2e-4, FP16: 3e-5}
FORMS = pytest.mark.parametrize("form", ["tokens", "slots"])
SCHEDULES = [dict(seed=s, shuffle=True) for s in range(1, 4)] + [
    dict(seed=4, eager=True),
    dict(seed=5, shuffle=True, quantum=17),
]


@cache
def compiled(name: str, config: Any, **tuning: Any) -> Any:
    def get() -> Any:
        from deltafuse.kernels.sm100 import kda_scan
        from deltafuse.kernels.warp import kda_apply

        return {"sm100.kda_scan": kda_scan, "warp.kda_apply": kda_apply}[name].compile(config, **tuning)

    return kernels.need("sm_100a", get)


def load(name: str, config: Any, arch: str) -> Any:
    assert arch == "sm_100a"
    return compiled(name, config)


class Run:
    """The scan of `x` on the emulated machine, in one of the forms; `tile` and `cluster` as for an empty GPU unless given.

    `stages`, of operands and of values, replace those that fit.
    """

    def __init__(
        self, x: Inputs, form: str, *, initial: bool = True, final: bool = True, v_first: bool = False, every: bool = False,
        zeroed: bool = False, tile: int = 0, cluster: int = 1, bounds: torch.dtype = torch.int64, stages: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        tile = tile or (128 if x.value_dim % 128 == 0 else 64)
        dtype = str(x.dtype).removeprefix("torch.")
        packed = str(bounds).removeprefix("torch.") if x.packed else ""
        config = BlackwellScanConfig(
            dtype, x.key_dim, tile, cluster, form, "all" if every else "last", zeroed, v_first, initial, final, packed
        )
        h0 = (x.h0.mT.contiguous() if v_first else x.h0) if initial else None
        self.o = torch.full((x.batch, x.T, x.heads, x.value_dim), float("nan"), dtype=x.dtype)
        ht = torch.full_like(x.h0.mT if v_first else x.h0, float("nan")).contiguous() if final else None
        t, s = x.tokens, x.slots
        if form == "tokens":
            operands = (t["qg"], t["kg"], t["w"], t["u"], t["aqk"], t["g"] if every else s["g_last"])
        else:
            operands = (s["factors"], None, s["w"], x.v, s["scores"], s["decay"])
        tuning = {} if stages is None else dict(zip(("stages", "value_stages"), stages, strict=True))
        function = compiled("sm100.kda_scan", config, **tuning)
        cu = None if x.cu is None else x.cu.to(bounds)
        with ptxemu.emulate("sm_100a", **options) as self.launches:
            function(*operands, h0, cu, self.o, ht, x.scale)
        self.ht = ht.mT if v_first and final else ht

    def bits(self) -> list[torch.Tensor]:
        return [self.o.view(torch.int16)] + ([] if self.ht is None else [self.ht.contiguous().view(torch.int32)])


def same(a: Run, b: Run) -> bool:
    return all(map(torch.equal, a.bits(), b.bits()))


def check(x: Inputs, form: str, **options: Any) -> Run:
    """Runs and compares o and the final states with float64 and with the model."""
    run = Run(x, form, **options)
    initial = options.get("initial", True)
    exact = x.expected(initial)
    model = x.expected(initial, rounded=True, images=form == "slots")
    for name, got, want, near in zip(("o", "ht"), (run.o, run.ht), exact, model, strict=True):
        if got is None:
            continue
        assert error(got, want) < WITHIN[x.dtype], name
        assert error(got, want) < error(near, want) * 1.01 + 1e-6, name
        assert error(got, near) < OF_MODEL[x.dtype], name
    return run


# ---- resources ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key_dim", "tile", "form"), list(itertools.product((64, 128), (64, 128), ("tokens", "slots")))
)
def test_plan_of_tensor_memory_and_shared_memory(key_dim: int, tile: int, form: str) -> None:
    p = plan(BlackwellScanConfig(key_dim=key_dim, tile=tile, operands=form))
    print(
        f"\nK {key_dim}, tile {tile}, {form}:\n{p}\n{p.shared_bytes} bytes of shared memory, {p.stages} stages of operands"
    )
    # What each part takes: two stages of S^T and v'^T in 16 bits, P (of tokens in D), D, two accumulators of o^T.
    ends = [
        p.state + 2 * key_dim // 2,
        p.new_values + 32,
        p.p + 64 * (form == "slots"),
        p.update + key_dim,
        p.readout + 128,
    ]
    assert [0, *ends] == [p.state, p.new_values, p.p, p.update, p.readout, p.columns]
    assert p.columns <= p.allocated <= TENSOR_COLUMNS
    assert p.allocated & (p.allocated - 1) == 0
    assert p.shared_bytes <= 227 * 1024
    assert p.stages == 3
    assert p.value_stages == (1 if (key_dim, tile, form) == (128, 128, "slots") else 2)
    # Panels of operands, of u or v and of o; decay's rows; barriers and alignment.
    panels = p.stages * p.operand_panels + (p.value_stages + 1) * tile // 64
    assert p.shared_bytes == 8192 * panels + 4 * key_dim * p.decay_stages + 1024
    assert 8 * p.barriers + 8 <= 1024 - 128


def test_plan_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        plan(BlackwellScanConfig(), stages=4)
    with pytest.raises(ValueError, match="do not fit"):
        plan(BlackwellScanConfig(), value_stages=2, stages=3)
    with pytest.raises(ValueError, match="do not fit"):
        plan(BlackwellScanConfig(operands="tokens"), value_stages=1)
    with pytest.raises(ValueError, match="do not fit"):
        plan(BlackwellScanConfig(key_dim=256))


def test_launch_takes_what_the_plan_says() -> None:
    run = Run(Inputs([64]), "slots")
    (launched,) = run.launches
    assert launched.block == (384, 1, 1)
    assert not launched.notes


@pytest.mark.parametrize(
    ("units", "value_dim", "expected"),
    [
        (1, 64, (64, 1)),
        (1, 128, (64, 2)),
        (74, 128, (64, 2)),
        (148, 128, (128, 1)),
        (256, 256, (128, 2)),
        (1, 192, (64, 1)),
    ],
)
def test_choice_of_tile_and_cluster(units: int, value_dim: int, expected: tuple[int, int]) -> None:
    assert choose(units, value_dim, 148) == expected


# ---- results -----------------------------------------------------------------------------------------------------------------------
TOKENS = itertools.cycle([[64], [130], [190], [256], [300], [383], [448]])
CASES = [
    (dtype, k, v, form, next(TOKENS))
    for dtype, k, v, form in itertools.product((BF16, FP16), (64, 128), (64, 128, 256), ("tokens", "slots"))
]


@pytest.mark.parametrize(("dtype", "k", "v", "form", "lengths"), CASES)
def test_dtypes_and_sizes(dtype: torch.dtype, k: int, v: int, form: str, lengths: list[int]) -> None:
    run = check(Inputs(lengths, key_dim=k, value_dim=v, dtype=dtype, seed=k + v), form)
    assert run.launches[0].grid == (max(1, v // 128), 1, 1)


@pytest.mark.parametrize("chunks", range(1, 8))
@pytest.mark.parametrize("value_dim", [64, 128])
@FORMS
def test_number_of_chunks(form: str, value_dim: int, chunks: int) -> None:
    """Of slots, with two stages of v and with one."""
    check(Inputs([64 * chunks], value_dim=value_dim, seed=chunks), form, seed=chunks, shuffle=True)


@pytest.mark.parametrize(("tokens", "batch"), [(1, 1), (63, 2), (65, 1), (129, 3)])
@FORMS
def test_tails(form: str, tokens: int, batch: int) -> None:
    check(Inputs([tokens] * batch, value_dim=64, seed=tokens), form)


@pytest.mark.parametrize(("initial", "final", "v_first"), list(itertools.product((False, True), repeat=3)))
@FORMS
def test_states(form: str, initial: bool, final: bool, v_first: bool) -> None:
    run = check(Inputs([100, 100], heads=2, key_dim=64), form, initial=initial, final=final, v_first=v_first)
    assert (run.ht is not None) == final


@pytest.mark.parametrize("lengths", [[130, 70], [15, 85, 1, 64, 0, 90], [0, 0, 64, 63], [200], [1] * 9])
@FORMS
def test_packed(form: str, lengths: list[int]) -> None:
    check(Inputs(lengths, packed=True, key_dim=64, heads=2, value_dim=64), form)


def test_bounds_of_either_integer() -> None:
    x = Inputs([70, 3], packed=True, key_dim=64, value_dim=64)
    assert same(Run(x, "tokens", bounds=torch.int32), Run(x, "tokens", bounds=torch.int64))


def test_an_empty_sequence_passes_its_state_through() -> None:
    x = Inputs([0, 5, 0], packed=True, value_dim=64)
    run = Run(x, "tokens")
    assert torch.equal(run.ht[0], x.h0[0])
    assert torch.equal(run.ht[2], x.h0[2])
    assert not Run(x, "tokens", initial=False).ht[0].any()


@pytest.mark.parametrize(("tile", "v"), [(64, 256), (128, 256)])
@pytest.mark.parametrize("packed", [False, True])
@FORMS
def test_clusters_give_the_bits_of_single_ctas(form: str, packed: bool, tile: int, v: int) -> None:
    x = Inputs([300, 300] if not packed else [300, 0, 70], packed=packed, value_dim=v)
    alone = check(x, form, tile=tile)
    pair = Run(x, form, tile=tile, cluster=2, seed=1, shuffle=True)
    assert pair.launches[0].cluster == (2, 1, 1)
    assert same(alone, pair)


@FORMS
def test_tiles_give_the_same_bits(form: str) -> None:
    x = Inputs([200])
    assert same(Run(x, form, tile=64), Run(x, form, tile=128))


@pytest.mark.parametrize("stages", [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_stages_give_the_same_bits(stages: tuple[int, int]) -> None:
    x = Inputs([450, 70], packed=True, key_dim=64, value_dim=128)
    first = Run(x, "slots", tile=64, cluster=2)
    for options in SCHEDULES:
        assert same(first, Run(x, "slots", tile=64, cluster=2, stages=stages, **options)), options


@pytest.mark.parametrize("packed", [False, True])
def test_gates_of_all_tokens_and_of_last_ones(packed: bool) -> None:
    x = Inputs([100, 100], packed=packed, value_dim=64)
    assert same(Run(x, "tokens", every=True), Run(x, "tokens"))


def test_extreme_gates() -> None:
    x = Inputs([130], value_dim=64)
    x.slots["g_last"][1] = -1e4
    x.slots["decay"][1] = 0.0
    for form in ("tokens", "slots"):
        check(x, form)


# ---- what must not matter ----------------------------------------------------------------------------------------------------------
def above_diagonal(tokens: int) -> torch.Tensor:
    return torch.arange(64)[None] > torch.arange(tokens)[:, None] % 64


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e4])
def test_garbage_above_the_diagonal_of_aqk(packed: bool, poison: float) -> None:
    x = Inputs([150, 150] if not packed else [150, 64, 9], packed=packed, value_dim=64)
    clean = check(x, "tokens")
    assert same(clean, Run(x, "tokens", zeroed=True))
    for i in range(len(x.lengths)):
        for c in range(x.chunks(i)):
            b, rows = x.place(i, c)
            part = x.tokens["aqk"][b, rows]
            part[above_diagonal(part.shape[0])[:, None].expand_as(part)] = poison
    assert same(clean, Run(x, "tokens"))
    if poison != poison:
        assert Run(x, "tokens", zeroed=True).o.isnan().any()


@pytest.mark.parametrize(
    ("form", "options"),
    [("tokens", dict(every=True)), ("tokens", dict(every=True, zeroed=True)), ("slots", {}), ("slots", dict(tile=64))],
)
def test_the_next_sequence_does_not_matter(form: str, options: dict[str, Any]) -> None:
    x = Inputs([70, 58, 64], packed=True)
    clean = Run(x, form, **options)
    for t in (x.v, *x.tokens.values()):
        t[:, 70:128] = float("nan")
    run = Run(x, form, **options)
    for part in (slice(0, 70), slice(128, 192)):
        assert torch.equal(clean.o[:, part], run.o[:, part])
    assert torch.equal(clean.ht[[0, 2]], run.ht[[0, 2]])
    assert run.o[:, 70:128].isnan().all()


@FORMS
def test_rows_beyond_the_last_sequence_are_left_alone(form: str) -> None:
    x = Inputs([70, 30], packed=True, value_dim=64)
    x.cu = torch.tensor([0, 70, 90])
    run = Run(x, form, every=form == "tokens")
    assert run.o[:, 90:].isnan().all()
    assert not run.o[:, :90].isnan().any()


@FORMS
def test_later_tokens_do_not_change_earlier_rows(form: str) -> None:
    x = Inputs([128], value_dim=64)
    before = Run(x, form)
    for t in (x.v, *(x.tokens[name] for name in ("w", "u", "qg", "kg", "aqk"))):
        t[:, 100:] = torch.randn(1, 28, 1, t.shape[-1]).to(BF16)
    after = Run(x, form)
    assert torch.equal(before.o[:, :100], after.o[:, :100])
    assert not torch.equal(before.o[:, 100:], after.o[:, 100:])


@pytest.mark.parametrize("cu", [[0, 90, 300], [50, 20, 100], [-7, 64, 2**31 - 1], [90, -(2**31), 64]])
@FORMS
def test_bounds_that_lie_reach_nothing_outside(form: str, cu: list[int]) -> None:
    x = Inputs([70, 30], packed=True, value_dim=64)
    x.cu = torch.tensor(cu)
    for t in x.slots.values():
        t[t.isnan()] = 0
    Run(x, form, every=form == "tokens")


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize("cluster", [1, 2])
@FORMS
def test_schedules_give_the_same_bits(form: str, tile: int, cluster: int) -> None:
    x = Inputs([250, 135], packed=True, value_dim=256)
    first = Run(x, form, tile=tile, cluster=cluster)
    for options in SCHEDULES:
        assert same(first, Run(x, form, tile=tile, cluster=cluster, **options)), options


# ---- kernel-fun --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("k", "v"), [(64, 64), (128, 128)])
def test_errors_are_at_most_kernel_funs_on_its_own_operands(k: int, v: int) -> None:
    case = kernels.need("sm_100a", kernels.kernel_fun_scan, False, 256, 1, k, v)
    case.run()
    theirs = case.errors()
    qg, w, kgt, u, aqk, gd, h0, *_ = case.args
    by_token = [t.permute(3, 0, 2, 1) for t in (qg, kgt.permute(1, 0, 2, 3), w, u, aqk)]
    with ptxemu.emulate("sm_100a"):
        o, ht = scan.scan_tokens(
            *by_token, gd.permute(3, 1, 2, 0), h0.permute(3, 2, 0, 1), kernels.SCALE, None, final=True, state_v_first=False, zeroed=False,
            arch="sm_100a", sms=148, load=load,
        )  # fmt: skip
    for name, got in (("o", o), ("ht", ht)):
        ours = error(got, case.expected[name])
        print(f"K {k}, V {v}, {name}: {ours:.3e}, kernel-fun {theirs[name]:.3e}")
        assert ours <= theirs[name] * 1.0001, name


@pytest.mark.parametrize("dtype", [BF16])
def test_errors_are_at_most_kernel_funs_on_kda(dtype: torch.dtype) -> None:
    """The same on operands as KDA has them, and the Hopper scan's way of rounding, which the model has."""
    case = kernels.need("sm_100a", kernels.kernel_fun_scan, False, 256, 1, 128, 128)
    x = Inputs([256], dtype=dtype, scale=kernels.SCALE)
    t, qg = x.tokens, case.args
    for place, source in (
        (qg[0], t["qg"].permute(1, 3, 2, 0)), (qg[1], t["w"].permute(1, 3, 2, 0)), (qg[2], t["kg"].permute(3, 1, 2, 0)),
        (qg[3], t["u"].permute(1, 3, 2, 0)), (qg[4], t["aqk"].permute(1, 3, 2, 0)),
        (qg[5], x.slots["g_last"].permute(2, 0, 1)[..., None]), (qg[6], x.h0.permute(2, 3, 1, 0)),
    ):  # fmt: skip
        place.copy_(source)
    case.run()
    o, ht = x.expected(True)
    run = Run(x, "tokens")
    for name, ours, theirs, want in (("o", run.o, case.outputs["o"], o), ("ht", run.ht, case.outputs["ht"], ht)):
        print(f"{name}: {error(ours, want):.3e}, kernel-fun {error(theirs, want):.3e}")
        assert error(ours, want) <= error(theirs, want) * 1.0001


# ---- host --------------------------------------------------------------------------------------------------------------------------
def forward(x: Inputs, **change: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    t = x.tokens | {"h0": x.h0, "cu": x.cu} | change
    options = dict(final=True, state_v_first=False, zeroed=False) | {
        n: change[n] for n in ("final", "zeroed") if n in change
    }
    with ptxemu.emulate("sm_100a"):
        return scan.scan_tokens(
            *(t[n] for n in ("qg", "kg", "w", "u", "aqk", "g", "h0")),
            x.scale,
            t["cu"],
            **options,
            arch="sm_100a",
            sms=148,
            load=load,
        )


def test_strided_inputs_and_new_outputs() -> None:
    x = Inputs([100, 100], heads=2, value_dim=64)
    o, ht = forward(x)
    assert error(o, x.expected(True)[0]) < 5e-3
    before = {n: t.clone() for n, t in x.tokens.items()}
    wide = torch.zeros(2, 100, 2, 3, 128, dtype=BF16)
    wide[..., 1, :] = x.tokens["qg"]
    odd = torch.zeros(2, 100, 2, 129, dtype=BF16)[..., 1:]
    odd.copy_(x.tokens["w"])
    heads_first = x.tokens["u"].transpose(1, 2).contiguous().transpose(1, 2)
    again = forward(x, qg=wide[..., 1, :].requires_grad_(), w=odd, u=heads_first, h0=x.h0.mT.contiguous().mT)
    assert torch.equal(o, again[0])
    assert torch.equal(ht, again[1])
    assert o.data_ptr() != again[0].data_ptr()
    assert all(torch.equal(before[n], t) for n, t in x.tokens.items())


def test_last_rows_as_the_callers_have_them() -> None:
    x = Inputs([130, 130], heads=2, value_dim=64)
    o, ht = forward(x)
    again = forward(x, g=x.slots["g_last"].unflatten(0, (2, 3)))
    assert torch.equal(o, again[0])
    assert torch.equal(ht, again[1])


@pytest.mark.parametrize("lengths", [[0], [0, 0]])
def test_no_tokens(lengths: list[int]) -> None:
    x = Inputs(lengths, packed=True, value_dim=64)
    o, ht = forward(x)
    assert o.shape == (1, 0, 1, 64)
    assert torch.equal(ht, x.h0)
    assert ht.data_ptr() != x.h0.data_ptr()
    assert not forward(x, h0=None)[1].any()
    assert forward(x, final=False)[1] is None


def _arguments() -> dict[str, Any]:
    x = Inputs([70], value_dim=64)
    names = ("qg", "kg", "w", "u", "aqk", "g")
    return {n: x.tokens[n] for n in names} | {"h0": x.h0, "state_v_first": False, "cu_seqlens": None}


WRONG = [
    ("qg", lambda a: a["qg"][0], r"`qg`: got shape \(70, 1, 128\)"),
    ("qg", lambda a: a["qg"].float(), "`qg`: got torch.float32; allowed: torch.bfloat16, torch.float16"),
    ("qg", lambda a: a["qg"][..., :32], "`qg`: got K = 32; allowed: K of 64 or 128"),
    ("kg", lambda a: a["kg"][..., :64], "`kg`: got shape"),
    ("w", lambda a: a["w"].half(), "`w`: got torch.float16; allowed: qg's torch.bfloat16"),
    ("u", lambda a: a["u"][..., :40], "`u`: got shape .*; allowed: .*multiple of 64"),
    ("aqk", lambda a: a["aqk"][..., :32], "`aqk`: got shape"),
    ("g", lambda a: a["g"][:, :3], r"`g`: got shape \(1, 3, 1, 128\); allowed: \(1, 70, 1, 128\), or \(1, 2, 1, 128\)"),
    ("g", lambda a: a["g"].bfloat16(), "`g`: got torch.bfloat16; allowed: torch.float32"),
    ("h0", lambda a: a["h0"].mT, "`h0`: got shape"),
    ("h0", lambda a: a["h0"].double(), "`h0`: got torch.float64; allowed: torch.float32"),
    ("h0", lambda a: a["h0"].to("meta"), "`h0`: got a tensor on meta; allowed: qg's cpu"),
    ("cu_seqlens", lambda a: torch.tensor([[0, 70]]), "`cu_seqlens`: got"),
    ("cu_seqlens", lambda a: torch.tensor([0.0, 70.0]), "`cu_seqlens`: got torch.float32"),
]


@pytest.mark.parametrize(("name", "wrong", "says"), WRONG)
def test_wrong_arguments(name: str, wrong: Any, says: str) -> None:
    given = _arguments()
    scan.check_scan(**given)
    given[name] = wrong(given)
    with pytest.raises(ValueError, match=says):
        scan.check_scan(**given)


def test_only_on_datacentre_blackwell() -> None:
    given = _arguments()
    given.pop("state_v_first")
    with pytest.raises(ValueError, match="allowed: tensors on a GPU of sm_100 or sm_103"):
        scan.scan_forward(**given)


# ---- the whole stage from the workspace --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [False, True])
def test_apply_and_scan(packed: bool) -> None:
    x = Inputs([130, 130] if not packed else [130, 1, 0, 64], packed=packed, heads=2)
    s = x.slots
    with ptxemu.emulate("sm_100a") as launches:
        o, ht = scan.scan_slots(
            s["factors"],
            s["scores"],
            s["decay"],
            x.v,
            x.h0,
            x.cu,
            final=True,
            state_v_first=False,
            arch="sm_100a",
            sms=148,
            load=load,
        )
    assert len(launches) == 2
    want = x.expected(True, images=True)
    assert error(o, want[0]) < 5e-3
    assert error(ht, want[1]) < 5e-3


def test_configs_name_what_the_loader_needs() -> None:
    """Configs are values: equal ones find the same compiled code."""
    assert BlackwellScanConfig() == BlackwellScanConfig()
    assert len({ApplyConfig(), ApplyConfig("float16"), ApplyConfig()}) == 2


def test_strided_v() -> None:
    x = Inputs([130, 130], heads=2)
    clean = Run(x, "slots")
    wide = torch.full((2, 130, 2, 3, 128), float("nan"), dtype=BF16)
    wide[..., 1, :] = x.v
    x.v = wide[..., 1, :]
    assert same(clean, Run(x, "slots"))
