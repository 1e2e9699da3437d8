"""The decode kernel through the functions that run it, against the definition in float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ptxemu
from deltafuse.autograd import decode_cute
from deltafuse.kda import fused_recurrent_kda
from deltafuse.kernels.config import DecodeConfig
from deltafuse.problem import parse_delta
from deltafuse.reference import recurrent
from deltafuse.reference.chunk import DeltaTensors
from deltafuse.reference.options import DeltaOptions

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from cases import label, pairwise

BF, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDED = {BF: 3e-3, F16: 4e-4, F32: 1e-5}
"""RMS errors of results that were computed in fp32, by the dtype that they are rounded to."""
ARCH = "sm_90a"


@cache
def _compiled(config: DecodeConfig, arch: str) -> Any:
    def get() -> Any:
        from deltafuse.kernels.warp import delta_decode

        return delta_decode.compile(config)

    return kernels.need(arch, get)


def load(kernel: str, config: DecodeConfig, arch: str) -> Any:
    assert kernel == "warp.delta_decode"
    return _compiled(config, arch)


pytestmark = pytest.mark.usefixtures("nan_in_new_tensors")


@dataclass(frozen=True)
class Case:
    """Sizes, dtypes and switches of a call."""

    B: int = 2
    T: int = 1
    H: int = 1
    HV: int = 2
    sizes: tuple[int, int] = (64, 32)
    per_key: bool = True
    dtype: torch.dtype = BF
    gate: str = "log"
    gate_dtype: torch.dtype = F32
    beta: str = "plain"
    beta_dtype: torch.dtype = F32
    per_value: bool = False
    l2norm: bool = False
    state: torch.dtype | None = F32
    v_first: bool = False
    lengths: tuple[int, ...] | None = None
    bounds: torch.dtype = torch.int32
    scale: float | None = None
    seed: int = 0

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def inner(self) -> tuple[int, int]:
        return self.sizes[::-1] if self.v_first else self.sizes

    def states(self, slots: int, dtype: torch.dtype) -> Tensor:
        gen = torch.Generator().manual_seed(self.seed + 1)
        s = torch.randn(slots, self.HV, *self.sizes, generator=gen)
        return (s.transpose(-1, -2).contiguous() if self.v_first else s).to(dtype)

    def tensors(self) -> DeltaTensors:
        gen = torch.Generator().manual_seed(self.seed)
        rand = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
        B, T, (K, V) = self.B, self.T, self.sizes
        if self.lengths is not None:
            B, T = 1, max(self.T, sum(self.lengths))
        q, k, v = rand(B, T, self.H, K), rand(B, T, self.H, K), rand(B, T, self.HV, V)
        if not self.l2norm:
            q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
        g = rand(B, T, self.HV, K) if self.per_key else rand(B, T, self.HV)
        if self.gate == "log":
            g = torch.nn.functional.logsigmoid(g + 2)
        beta = rand(B, T, self.HV, V) if self.per_value else rand(B, T, self.HV)
        if self.beta == "plain":
            beta = beta.sigmoid()
        bounds = None
        if self.lengths is not None:
            bounds = torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], dtype=self.bounds)
        has_rate, has_bias = self.gate in ("softplus", "bounded"), self.gate != "log"
        return DeltaTensors(
            *(x.to(self.dtype) for x in (q, k, v)), g.to(self.gate_dtype), beta.to(self.beta_dtype),
            rand(self.HV) * 0.3 if has_rate else None,
            rand(self.HV * (K if self.per_key else 1)) * 0.5 - 1 if has_bias else None,
            None if self.state is None else self.states(self.sequences, self.state), bounds,
        )  # fmt: skip

    def options(self) -> DeltaOptions:
        gate = "bounded" if self.gate.startswith("bounded") else self.gate
        return DeltaOptions(
            self.sizes[0] ** -0.5 if self.scale is None else self.scale, gate, -3.0 if gate == "bounded" else 0.0,
            self.l2norm, self.beta != "plain", 2.0 if self.beta == "negative" else 1.0, self.v_first,
        )  # fmt: skip


def wide(t: DeltaTensors) -> DeltaTensors:
    """The same numbers in float64."""
    floats = (t.q, t.k, t.v, t.g, t.beta, t.a_log, t.dt_bias, t.initial_state)
    return DeltaTensors(*(x if x is None else x.double() for x in floats), t.cu_seqlens)


def nan_like(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)


def assert_near(got: Tensor, want: Tensor, limit: float, name: str) -> None:
    size = want.norm()
    error = float((got.double() - want).norm() / (size if size > 0 else 1))
    assert error <= limit, f"{name}: error {error:.3g}, allowed {limit:.3g}"


FORWARD = list(
    pairwise(
        per_key=[True, False], sizes=[(64, 64), (128, 64), (128, 48), (256, 16)], dtype=[BF, F16, F32], HV=[2, 4],
        gate=["log", "softplus", "bounded", "bounded, no A_log"], gate_dtype=[F32, BF], beta=["plain", "sigmoid", "negative"],
        beta_dtype=[BF, F32], per_value=[False, True], l2norm=[True, False], state=[F32, BF, F16, None],
        v_first=[False, True], T=[1, 3], scale=[None, 0.3], final=[True, False], warps=[1, 4],
    )
)  # fmt: skip


@pytest.mark.parametrize("combination", FORWARD, ids=label)
def test_forward(emulated, monkeypatch: pytest.MonkeyPatch, combination: dict[str, Any]) -> None:
    options = dict(combination)
    final, warps = options.pop("final"), options.pop("warps")
    case = Case(H=2, **options)
    t = case.tensors()
    want, want_state = recurrent.recurrent_forward(wide(t), case.options())
    monkeypatch.setattr(decode_cute, "FEW", 0 if warps == 4 else 1 << 30)
    emulated(ARCH)
    o, state = decode_cute.recurrent_forward(t, case.options(), final=final, arch=ARCH, load=load)
    assert o.dtype == case.dtype
    assert_near(o, want, ROUNDED[case.dtype], "o")
    assert (state is not None) == final
    if state is not None:
        assert state.dtype == F32
        assert_near(state, want_state, ROUNDED[F32], "final state")


SERVE = list(
    pairwise(
        per_key=[True, False], sizes=[(64, 32), (128, 80)], state=[F32, BF, F16], v_first=[False, True],
        T=[1, 2, 4], slots=["one", "each token", "accepted", "none"], index=[torch.int32, torch.int64], strided=[True, False],
        keep=[False, True], packed=[False, True],
    )
)  # fmt: skip


def serving(
    case: Case, pool: Tensor, slots: str, index: torch.dtype, strided: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Slots of the sequences, distinct, with holes of -1, and numbers of accepted tokens."""
    n, width = case.sequences, case.T + 1
    if slots == "none":
        return None, None
    gen = torch.Generator().manual_seed(3)
    order = torch.randperm(pool.shape[0], generator=gen)
    indices = order[:n] if slots == "one" else order[: n * width].reshape(n, width)
    indices = indices.clone().to(index)
    indices[1] = -1
    if indices.dim() == 2 and n > 2:
        indices[2, -1] = -1
    if strided:
        room = torch.full((2 * indices.shape[0], *(3 * s for s in indices.shape[1:])), 77, dtype=index)
        view = room[::2] if indices.dim() == 1 else room[::2, ::3]
        view.copy_(indices)
        indices = view
    accepted = None
    if slots == "accepted":
        accepted = (torch.arange(n) % case.T + 1).to(index)
    return indices, accepted


@pytest.mark.parametrize("combination", SERVE, ids=label)
def test_serve(emulated, combination: dict[str, Any]) -> None:
    options = dict(combination)
    slots, index, strided, keep, packed = (options.pop(n) for n in ("slots", "index", "strided", "keep", "packed"))
    keep = keep and slots != "none"
    case = Case(B=3, seed=5, gate="softplus", beta="sigmoid", l2norm=True, beta_dtype=BF, gate_dtype=BF, **options)
    if packed:
        case = replace(case, lengths=(case.T, case.T, 0, 1), bounds=index)
    t = replace(case.tensors(), initial_state=None)
    pool = case.states(case.sequences if slots == "none" else 24, case.state or F32)
    indices, accepted = serving(case, pool, slots, index, strided)
    before, out = pool.clone(), nan_like(t.v)
    states = nan_like(pool.new_zeros(t.v.shape[0] * t.v.shape[1], *pool.shape[1:])) if keep else None

    want_pool, want = pool.double(), nan_like(t.v.double())
    want_states = None if states is None else states.double()
    given = torch.arange(case.sequences) if indices is None else indices
    recurrent.recurrent_serve(wide(t), case.options(), want_pool, given, accepted, want, want_states)

    emulated(ARCH)
    decode_cute.recurrent_serve(t, case.options(), pool, indices, accepted, out, states, arch=ARCH, load=load)
    assert_near(out, want, ROUNDED[case.dtype], "o")
    assert_near(pool, want_pool, ROUNDED[pool.dtype], "pool")
    if states is not None:
        assert torch.equal(pool, before)
        assert_near(states, want_states, ROUNDED[states.dtype], "states")
    touched = (want_pool != before.double()).flatten(1).any(1)
    assert torch.equal(pool[~touched].view(torch.uint8), before[~touched].view(torch.uint8))
    assert touched.any() or keep


@pytest.mark.parametrize("v_first", [False, True])
def test_packed_sequences_and_padding(emulated, v_first: bool) -> None:
    """Empty sequences pass their state through; tokens of no sequence give 0; the bounds may end early."""
    case = Case(lengths=(0, 3, 1, 0, 20, 0), T=27, v_first=v_first, l2norm=True, bounds=torch.int64, dtype=F16)
    t = case.tensors()
    end = sum(case.lengths or ())
    cut = replace(t, **{n: getattr(t, n)[:, :end] for n in ("q", "k", "v", "g", "beta")})
    want, want_state = recurrent.recurrent_forward(wide(cut), case.options())
    emulated(ARCH)
    o, state = decode_cute.recurrent_forward(t, case.options(), arch=ARCH, load=load)
    assert state is not None
    assert_near(o[:, :end], want, ROUNDED[F16], "o")
    assert torch.equal(o[:, end:], torch.zeros_like(o[:, end:]))
    assert_near(state, want_state, ROUNDED[F32], "final state")
    assert t.initial_state is not None
    for n in (0, 3, 5):
        assert torch.equal(state[n], t.initial_state[n])


@pytest.mark.parametrize("arch", [ARCH, "sm_100a"])
def test_long_sequence(emulated, arch: str) -> None:
    case = Case(B=1, T=150, HV=1, sizes=(128, 16), dtype=F32, gate="softplus", l2norm=True)
    t = case.tensors()
    want, want_state = recurrent.recurrent_forward(wide(t), case.options())
    emulated(arch)
    o, state = decode_cute.recurrent_forward(t, case.options(), arch=arch, load=load)
    assert state is not None
    assert_near(o, want, ROUNDED[F32], "o")
    assert_near(state, want_state, ROUNDED[F32], "final state")


def variants(T: int, packed: bool) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    wide = ((1, 64), (2, 64)) if T == 1 and packed else ()
    for layout in ((1, 16), (2, 16), (4, 16), (1, 32), (2, 32))[: 5 if T == 1 else 4] + wide:
        for seed in (0, 1):
            yield layout, {"seed": seed, "shuffle": bool(seed)}


@pytest.mark.parametrize("state", [F32, BF, F16])
@pytest.mark.parametrize("T", [1, 3])
def test_schedules_and_layouts_give_the_same_bits(T: int, state: torch.dtype) -> None:
    """In any order, by any number of warps, of 16, 32 or 64 columns; of fp32 states also with either layout."""
    case = Case(T=T, sizes=(128, 192), l2norm=True, gate="bounded", dtype=F32, state=state)
    found: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for v_first in (False, True):
        turned = replace(case, v_first=v_first)
        t = turned.tensors()
        for layout, schedule in variants(T, state is not F32 and not v_first):
            out, final = nan_like(t.v), nan_like(t.initial_state)
            ptxemu.setup(ARCH)
            with ptxemu.emulate(ARCH, **schedule):
                decode_cute.launch(
                    t, turned.options(), state=t.initial_state, final=final, store="last", out=out, arch=ARCH, load=load,
                    layout=layout,
                )  # fmt: skip
            found[v_first].append((out, final.transpose(-1, -2) if v_first else final))
    groups = [found[0] + found[1]] if state is F32 else found
    for group in groups:
        for out, final in group[1:]:
            assert torch.equal(out, group[0][0])
            assert torch.equal(final, group[0][1])


@pytest.mark.parametrize("form", ["plain", "in place", "pool", "tokens"])
@pytest.mark.parametrize("v_first", [False, True])
def test_fetching_ahead_changes_no_bit(v_first: bool, form: str) -> None:
    """More heads than are fetched ahead: sequences end, and slots are none, where L2 is told of them; as narrow warps have it, unaware."""
    case = Case(B=10, H=31, HV=31, sizes=(128, 128), l2norm=True, gate="softplus", gate_dtype=BF, v_first=v_first)
    t = replace(case.tensors(), initial_state=None)
    slots = [5, 10, 0, 3, -1, 6, 8, 2**33, -7, 2]
    indices = {"pool": torch.tensor(slots), "tokens": torch.tensor(slots)[:, None]}.get(form)
    states = case.states(10, F32)
    found = []
    for layout in ((1, 16), (1, 32)):
        pool, out = states.clone(), nan_like(t.v)
        final = nan_like(pool) if form == "plain" else pool
        ptxemu.setup(ARCH)
        with ptxemu.emulate(ARCH, seed=layout[1], shuffle=True):
            decode_cute.launch(
                t, case.options(), state=pool, final=final, store="tokens" if form == "tokens" else "last", out=out, indices=indices,
                arch=ARCH, load=load, layout=layout,
            )  # fmt: skip
        found.append((out, final))
    assert not found[0][0].isnan().any()
    assert not torch.equal(found[0][1], states)
    for narrow, wide_ in zip(*found, strict=True):
        assert torch.equal(narrow, wide_)


def test_a_later_token_changes_nothing_before_it(emulated) -> None:
    case = Case(T=4, dtype=F32)
    t = case.tensors()
    emulated(ARCH)
    before, _ = decode_cute.recurrent_forward(t, case.options(), arch=ARCH, load=load)
    for x in (t.q, t.k, t.v, t.g, t.beta):
        x[:, 3] = float("nan")
    after, _ = decode_cute.recurrent_forward(t, case.options(), arch=ARCH, load=load)
    assert torch.equal(before[:, :3], after[:, :3])


def test_wrong_slots_and_bounds_stay_inside_the_tensors(emulated) -> None:
    """The emulator reports every access outside; slots outside the pool count as none."""
    case = Case(B=4, T=2)
    t = replace(case.tensors(), initial_state=None)
    pool = case.states(5, F32)
    before, out = pool.clone(), nan_like(t.v)
    indices = torch.tensor([5, -7, 2**33, 1 - 2**32], dtype=torch.int64)
    emulated(ARCH)
    decode_cute.recurrent_serve(t, case.options(), pool, indices, None, out, None, arch=ARCH, load=load)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(pool, before)
    packed = Case(lengths=(1, 2, 1))
    t = packed.tensors()
    for bounds in ([-3, 2, 2, 99], [1, *[-(2**31)] * 3]):
        t = replace(t, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
        decode_cute.recurrent_forward(t, packed.options(), arch=ARCH, load=load)


def test_more_sequences_than_a_grid_has_rows(emulated) -> None:
    case = Case(B=66_000, HV=1, sizes=(64, 16))
    t = replace(case.tensors(), initial_state=None)
    pool = case.states(4, F32)
    live = {0: 3, 65_535: 1, 65_999: 0}
    indices = torch.full((case.B,), -1, dtype=torch.int32)
    for n, slot in live.items():
        indices[n] = slot
    out, want, want_pool = nan_like(t.v), nan_like(t.v.double()), pool.double()
    recurrent.recurrent_serve(wide(t), case.options(), want_pool, indices, None, want, None)
    emulated(ARCH)
    decode_cute.recurrent_serve(t, case.options(), pool, indices, None, out, None, arch=ARCH, load=load)
    assert_near(out, want, ROUNDED[BF], "o")
    assert_near(pool, want_pool, ROUNDED[F32], "pool")


def test_tensors_of_any_strides(emulated) -> None:
    """Slices of wider projections, expanded beta, a pool with gaps, one that is transposed inside, `out` that is v's memory."""
    case = Case(B=3, HV=2, H=2, l2norm=True)
    t = replace(case.tensors(), initial_state=None)
    K, V = case.sizes
    wide_q = torch.randn(3, 1, 2, 3 * K).to(BF)
    beta = torch.rand(3, 1, 1).expand(3, 1, 2)
    joined = torch.randn(3, 1, 2, K + 1)
    t = replace(t, q=wide_q[..., K : 2 * K], k=wide_q[..., 2 * K :], beta=beta, g=-joined[..., 1:].abs())
    indices = torch.tensor([2, 0, 1], dtype=torch.int32)
    gaps = torch.randn(6, 2, K, V)[::2]
    inside = torch.randn(3, 2, V, K).transpose(-1, -2)
    emulated(ARCH)
    for pool in (gaps, inside):
        out, want, want_pool = t.v.clone(), nan_like(t.v.double()), pool.double()
        call = replace(t, v=out)
        recurrent.recurrent_serve(wide(call), case.options(), want_pool, indices, None, want, None)
        decode_cute.recurrent_serve(call, case.options(), pool, indices, None, out, None, arch=ARCH, load=load)
        assert_near(out, want, ROUNDED[BF], "o")
        assert_near(pool, want_pool, ROUNDED[F32], "pool")


def test_parameters_are_read_where_gradients_are_off(emulated) -> None:
    """Leaves that ask for gradients, in the layout of the kernel and in another."""
    case = Case(B=2, gate="softplus", l2norm=True)
    t = case.tensors()
    want, want_state = recurrent.recurrent_forward(wide(t), case.options())
    names = ("q", "k", "v", "g", "beta", "a_log", "dt_bias", "initial_state")
    leaves = replace(t, **{n: getattr(t, n).clone().requires_grad_() for n in names})
    turned = replace(leaves, q=leaves.q.detach().mT.contiguous().mT.requires_grad_())
    emulated(ARCH)
    for call in (leaves, turned):
        with torch.no_grad():
            o, state = decode_cute.recurrent_forward(call, case.options(), arch=ARCH, load=load)
        assert state is not None
        assert_near(o, want, ROUNDED[BF], "o")
        assert_near(state, want_state, ROUNDED[F32], "final state")


def test_no_sequences(emulated) -> None:
    case = Case(lengths=(), T=0)
    t = replace(case.tensors(), initial_state=None)
    emulated(ARCH)
    o, state = decode_cute.recurrent_forward(t, case.options(), arch=ARCH, load=load)
    assert o.shape == t.v.shape
    assert state is not None
    assert state.shape[0] == 0


FORMS: dict[str, dict[str, Any]] = {
    "plain": dict(output_final_state=True),
    "without state": {},
    "out": dict(output_final_state=True, out=True),
    "in place": dict(inplace_final_state=True),
    "in place, packed": dict(inplace_final_state=True, cu_seqlens=torch.tensor([0, 1, 1, 3])),
    "pool": dict(inplace_final_state=True, ssm_state_indices=torch.tensor([4, -1, 0])),
    "pool, kept": dict(ssm_state_indices=torch.tensor([4, -1, 0]), out=True),
    "slots of tokens": dict(
        inplace_final_state=True, ssm_state_indices=torch.tensor([[4, 1], [2, -1], [-1, 3]]), num_accepted_tokens=torch.tensor([2, 1, 1])
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_is_the_public_op(emulated, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The same parsed call on the kernel and in torch: the same results in the same tensors; `kernels_of` names what ran."""
    flags = dict(FORMS[form])
    case = Case(B=3, T=3 if "cu_seqlens" in flags else 2, dtype=F32, v_first=True)
    t = case.tensors()
    tensors = dict(q=t.q, k=t.k, v=t.v, g=t.g, beta=t.beta)
    if "cu_seqlens" in flags:
        tensors = {n: x[:1] for n, x in tensors.items()}
    state = case.states(5 if "ssm_state_indices" in flags else 3, F32)
    if flags.pop("out", False):
        flags["out"] = nan_like(tensors["v"])
    ran = []

    def noted(*key: Any) -> Any:
        ran.append(key[:2])
        return load(*key)

    emulated(ARCH)
    call = parse_delta(
        "fused_recurrent_kda",
        **tensors,
        per_key=True,
        recurrent=True,
        state_v_first=True,
        initial_state=state.clone(),
        **flags,
    )
    o, after = decode_cute.recurrent(call, arch=ARCH, load=noted)
    assert set(ran) <= set(decode_cute.kernels_of(call.problem))
    if "out" in flags:
        assert o is flags["out"]
        flags["out"] = nan_like(o)
    if "inplace_final_state" in flags:
        assert after is call.initial_state
    want, want_after = fused_recurrent_kda(
        **tensors, state_v_first=True, initial_state=state.clone(), backend="torch", **flags
    )
    assert_near(o, want.double(), 1e-5, "o")
    assert (after is None) == (want_after is None)
    if after is not None and want_after is not None:
        assert_near(after, want_after.double(), 1e-5, "states")


def test_no_tokens(emulated) -> None:
    case = Case(T=0, dtype=F32)
    t = case.tensors()
    emulated(ARCH)
    o, state = decode_cute.recurrent_forward(t, case.options(), arch=ARCH, load=load)
    assert o.shape == t.v.shape
    assert state is not None
    assert torch.equal(state, t.initial_state)


def test_empty_pool() -> None:
    """No slot exists, so there is no sequence, and nothing to launch."""
    case = Case(T=2)
    t = replace(case.tensors(), initial_state=None)
    indices, out = torch.tensor([-1, 3], dtype=torch.int32), nan_like(t.v)
    pool = case.states(0, F32)
    states = nan_like(pool.new_zeros(4, *pool.shape[1:]))
    decode_cute.recurrent_serve(t, case.options(), pool, indices, None, out, states, arch=ARCH, load=load)
    assert not out.any()
    assert not states.any()


class Allocations(TorchDispatchMode):
    """Names of operations whose result is not memory of one of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.found.append(str(func))
        return result


@pytest.mark.parametrize("slots", ["one", "accepted", "none"])
def test_nothing_is_allocated_where_all_is_given(slots: str) -> None:
    case = Case(B=3, T=2, gate="softplus")
    t = replace(case.tensors(), initial_state=None)
    pool = case.states(3 if slots == "none" else 24, BF)
    indices, accepted = serving(case, pool, slots, torch.int32, True)
    out, launched = nan_like(t.v), []
    with Allocations() as allocations:
        decode_cute.recurrent_serve(
            t,
            case.options(),
            pool,
            indices,
            accepted,
            out,
            None,
            arch=ARCH,
            load=lambda *_: lambda *a: launched.append(a),
        )
    assert launched
    assert allocations.found == []
