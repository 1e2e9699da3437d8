"""Arguments parsed and checked once.

`parse_delta` turns what a caller passed to any delta-rule op into a `DeltaCall`: a frozen `DeltaProblem` (sizes, dtypes, switches; what
`support` decides by) and the tensors. Every error is a ValueError that names the argument, what it got and what is allowed. Values
inside tensors
(`cu_seqlens`) are checked where the op runs, by `check_bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def fail(name: str, got: object, allowed: str) -> NoReturn:
    """The one form of every complaint about an argument."""
    raise ValueError(f"`{name}`: got {got}; allowed: {allowed}")


def describe(value: object) -> str:
    """What an error says of a value: a tensor's shape, dtype and device, else the value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
    return repr(value)


def check_tensor(
    name: str,
    value: object,
    shape: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    device: torch.device | None = None,
    axes: str = "",
) -> Tensor:
    """`value` as a tensor of this shape, of one of these dtypes, on this device; `axes` names the shape, such as `[B, T, H, K]`."""
    if not isinstance(value, Tensor):
        fail(name, f"{type(value).__name__} {value!r}", f"a tensor {axes}".rstrip())
    if shape is not None and tuple(value.shape) != tuple(shape):
        fail(name, describe(value), f"shape {axes} = {list(shape)}" if axes else f"shape {list(shape)}")
    if value.dtype not in dtypes:
        fail(name, describe(value), "dtype " + ", ".join(str(d).removeprefix("torch.") for d in dtypes))
    if device is not None and value.device != device:
        fail(name, describe(value), f"a tensor on {device}, as the others")
    return value


def check_written(name: str, value: Tensor) -> None:
    """A tensor that an op writes must not be expanded: several elements would share memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        fail(name, f"strides {list(value.stride())}", "a tensor with memory for every element, as it is written")


def check_packing(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, batch: int, device: torch.device) -> int:
    """Number of sequences, from the form of `cu_seqlens` alone."""
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            fail("cu_seqlens_cpu", describe(cu_seqlens_cpu), "None where `cu_seqlens` is None")
        return batch
    check_tensor("cu_seqlens", cu_seqlens, dtypes=INTEGERS, device=device, axes="[N + 1]")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        fail("cu_seqlens", describe(cu_seqlens), "shape [N + 1]")
    if batch != 1:
        fail("cu_seqlens", f"a batch of {batch}", "batch 1 (sequences packed along the token axis)")
    if cu_seqlens_cpu is not None:
        check_tensor(
            "cu_seqlens_cpu", cu_seqlens_cpu, cu_seqlens.shape, INTEGERS, torch.device("cpu"), "[N + 1] (as cu_seqlens)"
        )
    return cu_seqlens.shape[0] - 1


def check_bounds(bounds: Tensor, tokens: int, *, may_end_early: bool = False) -> None:
    """The values of `cu_seqlens`: starts at 0, never decreases, ends at T (at most T for a padded CUDA-graph call)."""
    values = bounds.detach().to("cpu", torch.int64)
    name = "cu_seqlens"
    if int(values[0]) != 0:
        fail(name, f"{int(values[0])} first", "0 first")
    steps = values.diff()
    if steps.numel() and int(steps.min()) < 0:
        where = int((steps < 0).nonzero()[0])
        fail(name, f"{int(values[where + 1])} after {int(values[where])}", "values that never decrease")
    last = int(values[-1])
    if last > tokens or (last < tokens and not may_end_early):
        fail(name, f"{last} last", f"T = {tokens} last" + (", or less with use_graph" if may_end_early else ""))


TANGENTS = "tangents are carried (forward-mode differentiation)"
"""What errors say of such calls."""


def tangents(*given: object) -> bool:
    """Whether a tensor carries a tangent: forward-mode differentiation (`torch.autograd.forward_ad`, `torch.func.jvp`) is at work.

    Tensors that functional transforms have wrapped do not say what lies below; while some level is open they count as if they did, as
    every tensor does to torch.compile.
    """
    if forward_ad._current_level < 0:
        return False
    compiling = torch.compiler.is_compiling()
    return any(
        compiling or is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None
        for x in given
        if isinstance(x, Tensor)
    )


class Hashed:
    """A frozen dataclass that remembers its hash: problems are looked up at every call."""

    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            value = hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))  # type: ignore[attr-defined]
            object.__setattr__(self, "_hash", value)
            return value


@dataclass(frozen=True)
class DeltaProblem(Hashed):
    """All of a delta-rule call but its tensors.

    `gate` is `"log"` (g is the decay's logarithm), `"softplus"` or `"bounded"` (g is raw). `per_key` says whether g has one value per key
    dimension (KDA) or one per head (GDN). `beta_per_value` and `value_gate` are the recurrent op's beta and gate per value dimension.
    """

    op: str
    device: torch.device
    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    sequences: int
    dtype: torch.dtype
    gate_dtype: torch.dtype
    beta_dtype: torch.dtype
    scale: float
    gate: str = "log"
    lower_bound: float = 0.0
    per_key: bool = True
    l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    safe_gate: bool = False
    has_initial_state: bool = False
    state_dtype: torch.dtype = torch.float32
    output_final_state: bool = False
    intermediate_states: bool = False
    state_v_first: bool = False
    packed: bool = False
    chunk_size: int = 64
    disable_recompute: bool = False
    use_graph: bool = False
    context_parallel: bool = False
    value_gate: bool = False
    beta_per_value: bool = False
    pooled: bool = False
    inplace: bool = False
    requires_grad: bool = False
    tangents: bool = False
    inference_mode: bool = False
    has_a_log: bool = False
    has_dt_bias: bool = False
    bounds_dtype: torch.dtype | None = None
    index_dtype: torch.dtype | None = None
    slot_per_token: bool = False
    accepted_dtype: torch.dtype | None = None

    __hash__ = Hashed.__hash__  # a frozen dataclass would make its own

    @property
    def derivatives(self) -> str:
        """What is wanted of a call beside its results, as errors say it of what has none; empty where nothing is."""
        if self.tangents:
            return TANGENTS
        return "gradients are wanted (use torch.no_grad)" if self.requires_grad else ""

    @property
    def beta_limit(self) -> float:
        return 2.0 if self.neg_eigval else 1.0

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        inner = (self.value_dim, self.key_dim) if self.state_v_first else (self.key_dim, self.value_dim)
        return (self.sequences, self.value_heads, *inner)


class DeltaCall(NamedTuple):
    """A checked call: the problem and its tensors, parameters flattened.

    `known`: what later stages found out about calls that look like this one in all but addresses and values; they share it.
    """

    problem: DeltaProblem
    known: dict[Any, Any]
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    gv: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None
    state_indices: Tensor | None = None
    accepted: Tensor | None = None
    out: Tensor | None = None
    cp_context: Any = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Everything that is a tensor."""
        return self[2:-1]


def state_layout(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """One layout from its two names."""
    if transpose_state_layout is None:
        return bool(state_v_first)
    if state_v_first:
        fail(
            "transpose_state_layout",
            transpose_state_layout,
            "one of `state_v_first` and `transpose_state_layout` (its old name)",
        )
    return bool(transpose_state_layout)


def _scale(scale: object, key_dim: int) -> float:
    if scale is None:
        return float(key_dim) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not -math.inf < scale < math.inf:
        fail("scale", describe(scale), "a finite number, or None for K ** -0.5")
    return float(scale)


def _gate(
    per_key: bool, use_gate: bool, safe_gate: bool, lower_bound: object, a_log: Tensor | None
) -> tuple[str, float]:
    """The kind of gate and its lower bound."""
    if not use_gate:
        return "log", 0.0
    if lower_bound is None:
        if safe_gate:
            fail("lower_bound", None, "a number in [-5, 0) with safe_gate and use_gate_in_kernel")
        if a_log is None:
            also = " (or give `lower_bound`)" if per_key else ""
            fail("A_log", None, f"a tensor [HV] with use_gate_in_kernel=True{also}")
        return "softplus", 0.0
    if (
        isinstance(lower_bound, bool)
        or not isinstance(lower_bound, int | float)
        or not -math.inf < lower_bound < math.inf
    ):
        fail("lower_bound", describe(lower_bound), "a negative number or None")
    if safe_gate and not -5 <= lower_bound < 0:
        fail("lower_bound", lower_bound, "[-5, 0) with safe_gate=True")
    if lower_bound >= 0:
        fail("lower_bound", lower_bound, "a negative number or None")
    return "bounded", float(lower_bound)


def _parameter(name: str, value: object, count: int, axes: str, device: torch.device) -> Tensor | None:
    """A parameter of `count` elements in any shape, flattened."""
    if value is None:
        return None
    value = check_tensor(name, value, device=device, axes=axes)
    if value.numel() != count:
        fail(name, describe(value), f"{count} elements, {axes}")
    return _flat(value)


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(-1)


def _matched(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in one dtype: under autocast, layers hand over a mixture, which becomes autocast's dtype."""
    tensors = (q, k, v)
    if all(isinstance(x, Tensor) for x in tensors) and not q.dtype == k.dtype == v.dtype:
        kind = q.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if autocast and torch.float64 not in (q.dtype, k.dtype, v.dtype):
            dtype = torch.get_autocast_dtype(kind)
            return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


_REMEMBERED = 4096
"""Forms of calls that are kept."""
Form = tuple[object, ...]
_checked: dict[Form, tuple[Any, dict[Any, Any]]] = {}


def recall(names: Form, values: Iterable[object]) -> tuple[Form | None, Any, dict[Any, Any]]:
    """The form of a call, its problem if one like it was checked before, and what is known of such calls.

    The form is all that checks look at in the values of an op's arguments, and how tensors lie; `names` tells ops and their arguments
    apart. It is None where the call cannot be remembered: torch.compile looks, sizes are symbols, tensors have no strides or may carry
    tangents.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None, None, {}
    try:
        form = (
            names,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),  # which has memory filled
            *[
                x
                if x is None or x is False or x is True
                else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
                if isinstance(x, Tensor)
                else (type(x), x)  # True is 1 to a dict and not to a check
                for x in values
            ],
        )
        problem, known = _checked.get(form) or (None, {})
    except (TypeError, RuntimeError):
        return None, None, {}
    return form, problem, known


def remember(form: Form | None, problem: object, known: dict[Any, Any]) -> None:
    """Have `recall` find a checked call's problem."""
    if form is not None:
        if len(_checked) >= _REMEMBERED:
            _checked.clear()
        _checked[form] = problem, known


def parse_delta(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **rest: Any) -> DeltaCall:
    """Check one call of a delta-rule op and return it parsed; the arguments are those of the public ops.

    A call like an earlier one, in all that is checked, takes over the earlier one's problem.
    """
    given = rest.get
    form, problem, known = recall((op, *rest), (q, k, v, g, beta, *rest.values()))
    if problem is None:
        call = _parse_delta(op, known, q, k, v, g, beta, **rest)
        if q.dtype == k.dtype == v.dtype and call.cp_context is None:  # else autocast, or what a context holds, decides
            remember(form, call.problem, known)
        return call
    a_log = _flat(rest["A_log"]) if problem.has_a_log else None
    bias = _flat(rest["dt_bias"]) if problem.has_dt_bias else None
    return DeltaCall(
        problem, known, q, k, v, g, beta, a_log, bias, given("gv"), given("initial_state"), given("cu_seqlens"), given("cu_seqlens_cpu"),
        given("ssm_state_indices"), given("num_accepted_tokens"), given("out"),
    )  # fmt: skip


def _parse_delta(
    op: str,
    known: dict[Any, Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    per_key: bool,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    chunk_sizes: tuple[int, ...] = (32, 64),
    gv: Tensor | None = None,
    recurrent: bool = False,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> DeltaCall:
    q, k, v = _matched(q, k, v)
    check_tensor("q", q, axes="[B, T, H, K]")
    if q.dim() != 4 or 0 in q.shape[2:]:
        fail("q", describe(q), "shape [B, T, H, K] with H, K >= 1")
    batch, tokens, heads, key_dim = q.shape
    device = q.device
    check_tensor("k", k, q.shape, (q.dtype,), device, "[B, T, H, K] (as q)")
    check_tensor("v", v, dtypes=(q.dtype,), device=device, axes="[B, T, HV, V]")
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or 0 in v.shape[2:]:
        fail("v", describe(v), f"shape [B, T, HV, V] = [{batch}, {tokens}, HV, V] with HV, V >= 1")
    value_heads, value_dim = v.shape[2:]
    if value_heads % heads:
        fail("v", f"{value_heads} value heads", f"a multiple of q's {heads} heads")
    if per_key:
        check_tensor("g", g, (batch, tokens, value_heads, key_dim), device=device, axes="[B, T, HV, K]")
    else:
        check_tensor("g", g, (batch, tokens, value_heads), device=device, axes="[B, T, HV]")
    beta_per_value = recurrent and isinstance(beta, Tensor) and beta.dim() == 4
    if beta_per_value:
        check_tensor("beta", beta, v.shape, device=device, axes="[B, T, HV, V]")
    else:
        check_tensor("beta", beta, (batch, tokens, value_heads), device=device, axes="[B, T, HV]")
    if gv is not None:
        check_tensor("gv", gv, v.shape, device=device, axes="[B, T, HV, V]")
    if type(chunk_size) is not int or chunk_size not in chunk_sizes:
        fail("chunk_size", describe(chunk_size), " or ".join(map(str, chunk_sizes)))
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        fail("allow_neg_eigval", True, "True only with use_beta_sigmoid_in_kernel=True")
    a_log = bias = None
    if use_gate_in_kernel:
        a_log = _parameter("A_log", A_log, value_heads, "[HV]", device)
        bias = _parameter(
            "dt_bias", dt_bias, value_heads * (key_dim if per_key else 1), "[HV * K]" if per_key else "[HV]", device
        )
    gate, bound = _gate(per_key, bool(use_gate_in_kernel), bool(safe_gate), lower_bound, a_log)
    if cp_context is not None:
        if initial_state is not None or output_final_state:
            fail("cp_context", "a context with states", "no `initial_state` and no `output_final_state`")
        cu_seqlens = getattr(cp_context, "cu_seqlens", None)
        cu_seqlens_cpu = getattr(cp_context, "cu_seqlens_cpu", None)
        if cu_seqlens is None:
            fail("cp_context", f"{type(cp_context).__name__} without cu_seqlens", "a context with cu_seqlens")
    sequences = check_packing(cu_seqlens, cu_seqlens_cpu, batch, device)
    if max_num_seqs is not None and use_graph and cu_seqlens is not None and sequences != max_num_seqs:
        fail("max_num_seqs", max_num_seqs, f"None, or the number of packed sequences ({sequences}) with use_graph")
    if use_graph and disable_recompute:
        fail("use_graph", True, "False with disable_recompute=True")
    floats = (q, k, v, g, beta, a_log, bias, initial_state, gv)
    requires_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in floats)
    if return_intermediate_states and (requires_grad or disable_recompute):
        fail(
            "return_intermediate_states",
            True,
            "True only without gradients (torch.no_grad) and without disable_recompute",
        )
    problem = DeltaProblem(
        op=op, device=device, batch=batch, tokens=tokens, heads=heads, value_heads=value_heads, key_dim=key_dim,
        value_dim=value_dim, sequences=sequences, dtype=q.dtype, gate_dtype=g.dtype, beta_dtype=beta.dtype,
        scale=_scale(scale, key_dim), gate=gate, lower_bound=bound, per_key=per_key, l2norm=bool(use_qk_l2norm_in_kernel),
        beta_sigmoid=bool(use_beta_sigmoid_in_kernel), neg_eigval=bool(allow_neg_eigval), safe_gate=bool(safe_gate),
        has_initial_state=initial_state is not None, output_final_state=bool(output_final_state),
        state_dtype=initial_state.dtype if isinstance(initial_state, Tensor) else torch.float32,
        intermediate_states=bool(return_intermediate_states),
        state_v_first=state_layout(state_v_first, transpose_state_layout), packed=cu_seqlens is not None, chunk_size=chunk_size,
        disable_recompute=bool(disable_recompute), use_graph=bool(use_graph), context_parallel=cp_context is not None,
        value_gate=gv is not None, beta_per_value=beta_per_value, pooled=ssm_state_indices is not None,
        inplace=bool(inplace_final_state), requires_grad=requires_grad, tangents=tangents(*floats, out),
        inference_mode=not torch.compiler.is_compiling() and torch.is_inference_mode_enabled(),
        has_a_log=a_log is not None, has_dt_bias=bias is not None,
        bounds_dtype=None if cu_seqlens is None else cu_seqlens.dtype,
        index_dtype=getattr(ssm_state_indices, "dtype", None), slot_per_token=getattr(ssm_state_indices, "ndim", 1) == 2,
        accepted_dtype=getattr(num_accepted_tokens, "dtype", None),
    )  # fmt: skip
    call = DeltaCall(
        problem, known, q, k, v, g, beta, a_log, bias, gv, initial_state, cu_seqlens, cu_seqlens_cpu,
        ssm_state_indices, num_accepted_tokens, out, cp_context,
    )  # fmt: skip
    _check_states(call, recurrent)
    return call


def _check_states(call: DeltaCall, recurrent: bool) -> None:
    """The initial state, or the pool with its indices, and the output to write to."""
    p, state = call.problem, call.initial_state
    _, heads, rows, columns = p.state_shape
    axes = "HV, V, K" if p.state_v_first else "HV, K, V"
    if state is not None:
        any_float = recurrent or not p.per_key  # as in fla: its chunked KDA alone insists on float32
        dtypes = FLOATS if any_float else (torch.float32,) + ((torch.float64,) if p.dtype == torch.float64 else ())
        count = (
            p.sequences
            if call.state_indices is None
            else state.shape[0]
            if isinstance(state, Tensor) and state.dim()
            else 0
        )
        first = "N" if call.state_indices is None else "slots"
        check_tensor("initial_state", state, (count, heads, rows, columns), dtypes, p.device, f"[{first}, {axes}]")
    if p.inplace:
        if state is None:
            fail("inplace_final_state", True, "True only with `initial_state`")
        if p.derivatives:
            fail("inplace_final_state", True, f"False where {p.derivatives}")
        check_written("initial_state", state)
    if call.state_indices is not None:
        indices = call.state_indices
        if state is None:
            fail("ssm_state_indices", describe(indices), "None without `initial_state` (the pool of states)")
        if p.derivatives:
            fail("ssm_state_indices", describe(indices), f"None where {p.derivatives}")
        check_tensor("ssm_state_indices", indices, dtypes=INTEGERS, device=p.device, axes="[N] or [N, T]")
        if indices.dim() not in (1, 2) or indices.shape[0] != p.sequences or 0 in indices.shape[1:]:
            fail("ssm_state_indices", describe(indices), f"shape [N] or [N, T] with N = {p.sequences}")
        if indices.dim() == 2 and not p.packed and indices.shape[1] < p.tokens:
            fail("ssm_state_indices", describe(indices), f"a slot for each of the T = {p.tokens} tokens of a sequence")
    if call.accepted is not None:
        if call.state_indices is None or call.state_indices.dim() != 2:
            fail("num_accepted_tokens", describe(call.accepted), "None unless `ssm_state_indices` is [N, T]")
        check_tensor("num_accepted_tokens", call.accepted, (p.sequences,), INTEGERS, p.device, "[N]")
    if call.out is not None:
        check_tensor("out", call.out, call.v.shape, (p.dtype,), p.device, "[B, T, HV, V]")
        if not call.out.is_contiguous():
            fail("out", f"strides {list(call.out.stride())}", "a contiguous tensor")
        if p.derivatives:
            fail("out", describe(call.out), f"None where {p.derivatives}")


def recurrent_gates(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    beta: Tensor | None,
    use_gate: bool,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Tensor, bool, Tensor, bool]:
    """One gate from fla's two, `(g, whether it is per key dimension, beta, whether g is still raw)`; absent ones are filled in."""
    check_tensor("q", q, axes="[B, T, H, K]")
    check_tensor("v", v, axes="[B, T, HV, V]")
    if q.dim() != 4:
        fail("q", describe(q), "shape [B, T, H, K]")
    if v.dim() != 4:
        fail("v", describe(v), "shape [B, T, HV, V]")
    per_head = v.shape[:3]
    if beta is None:
        beta = torch.ones(per_head, dtype=q.dtype, device=q.device)
    if use_gate and g is None:
        fail("g", None, "a tensor [B, T, HV] with use_gate_in_kernel=True")
    if g is None and gk is None:
        return torch.zeros(per_head, dtype=torch.float32, device=q.device), False, beta, False
    if g is not None:
        check_tensor("g", g, per_head, device=q.device, axes="[B, T, HV]")
    if gk is None:
        assert g is not None
        return g, False, beta, bool(use_gate)
    check_tensor("gk", gk, (*per_head, q.shape[3]), device=q.device, axes="[B, T, HV, K]")
    if g is None:
        return gk, True, beta, False
    # The sum of the two logarithms is in float32 or better, whatever they come in.
    dtype = torch.promote_types(g.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32)
    g = g.to(dtype)
    if use_gate:
        if a_log is None:
            fail("A_log", None, "a tensor [HV] with use_gate_in_kernel=True")
        rate = _parameter("A_log", a_log, v.shape[2], "[HV]", q.device)
        bias = _parameter("dt_bias", dt_bias, v.shape[2], "[HV]", q.device)
        assert rate is not None
        z = g if bias is None else g + bias.to(dtype)
        g = -rate.to(dtype).exp() * torch.logaddexp(z, z.new_zeros(()))
    return g.unsqueeze(-1) + gk, True, beta, False


@dataclass(frozen=True)
class GateProblem:
    """All of a `fused_kda_gate` call but its tensors."""

    device: torch.device
    batch: int
    tokens: int
    dtype: torch.dtype
    output_dtype: torch.dtype
    value_heads: int
    key_dim: int
    gate: str
    lower_bound: float
    tangents: bool = False
    op: str = "fused_kda_gate"
    context_parallel: bool = False


@dataclass(frozen=True)
class GateCall:
    """A checked `fused_kda_gate` call; parameters flattened."""

    problem: GateProblem
    g: Tensor
    a_log: Tensor | None
    dt_bias: Tensor | None


def parse_gate(
    g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, output_dtype: torch.dtype
) -> GateCall:
    """Check a `fused_kda_gate` call."""
    check_tensor("g", g, axes="[..., HV, K]")
    if g.dim() < 2 or 0 in g.shape[-2:]:
        fail("g", describe(g), "shape [..., HV, K] with HV, K >= 1")
    heads, key_dim = g.shape[-2:]
    if output_dtype not in FLOATS:
        fail("output_dtype", output_dtype, "float16, bfloat16, float32, float64")
    a_log = _parameter("A_log", a_log, heads, "[HV]", g.device)
    dt_bias = _parameter("dt_bias", dt_bias, heads * key_dim, "[HV * K]", g.device)
    gate, bound = _gate(True, True, False, lower_bound, a_log)
    rows = g.numel() // (heads * key_dim)
    problem = GateProblem(
        g.device, 1, rows, g.dtype, output_dtype, heads, key_dim, gate, bound, tangents(g, a_log, dt_bias)
    )
    return GateCall(problem, g, a_log, dt_bias)
