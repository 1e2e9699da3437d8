"""What the custom ops share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad
from torch.utils.weak import WeakIdKeyDictionary

from ..problem import check_bounds, tangents
from ..runtime.probe import environment

Function = Callable[..., Any]
Load = Callable[[str, Any, str], Function]
"""`runtime.cache.load`, or what stands in for it."""

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
INDEX_NAMES = {torch.int32: "int32", torch.int64: "int64"}
"""Dtypes as kernels' configs name them."""


def without_autocast(x: Tensor) -> torch.autocast:
    """The arithmetic inside an op is float32 whatever surrounds the call."""
    return torch.autocast(x.device.type, enabled=False)


def host_bounds(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> Tensor | None:
    """Sequence bounds on the CPU: the caller's copy where there is one, so that no device is waited for."""
    bounds = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return None if bounds is None else bounds.cpu()


def checked_bounds(
    x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, may_end_early: bool = False
) -> Tensor | None:
    """`host_bounds` of the sequences packed along the second axis of x, their values checked."""
    bounds = host_bounds(cu_seqlens, cu_seqlens_cpu)
    if bounds is not None:
        check_bounds(bounds, x.shape[1], may_end_early=may_end_early)
    return bounds


# Bounds that were looked at, each with the version of its values and the tokens that they were checked for.
_seen: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_once(
    x: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    may_end_early: bool = False,
    within: bool = False,
) -> None:
    """The values of the bounds, for ops that use them on the device alone: looked at once a tensor, since looking waits for the device.

    The caller's copy on the CPU is looked at every time; so are tensors made in inference mode, which do not say when they are written,
    except where kernels keep to the tensors' memory whatever the values are (`within`). A CUDA graph's capture cannot wait: what its
    bounds are when it is replayed is the caller's.
    """
    if cu_seqlens is None:
        return
    if cu_seqlens_cpu is not None:
        check_bounds(cu_seqlens_cpu, x.shape[1], may_end_early=may_end_early)
        return
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    version = None if cu_seqlens.is_inference() else cu_seqlens._version
    state = (version, x.shape[1], may_end_early)
    if (version is None and not within) or _seen.get(cu_seqlens) != state:
        check_bounds(cu_seqlens, x.shape[1], may_end_early=may_end_early)
        _seen[cu_seqlens] = state


def machine(x: Tensor, known: dict[Any, Any] | None = None) -> dict[str, Any]:
    """The architecture to compile for and the number of multiprocessors, where x is; `known` as in `DeltaCall`."""
    found = None if known is None else known.get(machine)
    if found is None:
        found = _machine(x)
        if known is not None:
            known[machine] = found
    return found


def _machine(x: Tensor) -> dict[str, Any]:
    env = environment(x.device.type, x.device.index)
    assert env.arch is not None
    return {"arch": env.arch, "sms": env.sms}


Maker = Callable[[], Tensor]


def maker(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Maker:
    """What makes a contiguous tensor of one form, without values, at every call of it.

    Where a device cannot be another than the current one, tensors are made as torch.compile's code makes them: without the dispatcher,
    which takes longer than the memory does, but fills memory where results are to be deterministic.
    """
    strides = torch.empty(shape, device="meta").stride()
    only = device.type == "cpu" or (device.type == "cuda" and torch.cuda.device_count() == 1)
    quick = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quick is not None and only and not torch.are_deterministic_algorithms_enabled():
        return partial(quick, tuple(shape), strides, dtype)
    return partial(torch.empty_strided, tuple(shape), strides, dtype=dtype, device=device)


def leaf(x: Tensor) -> Tensor:
    """x outside autograd: parameters ask for gradients where there are none, and DLPack may refuse to hand them over."""
    return x.detach() if x.requires_grad else x


def written(*tensors: Tensor | None) -> None:
    """Tell autograd that kernels wrote to tensors of the caller's: what was saved of them before is no longer theirs."""
    for x in tensors:
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)


_PLAIN = (Tensor, torch.nn.Parameter)


def observed(*given: Tensor | None) -> bool:
    """Whether a compiler, modes, functional transforms or tensors themselves want to see an op; where not, it may be run without the
    dispatcher. Tensors do that are of other classes, or whose memory has not their values yet (a negation put off)."""
    if (
        torch.compiler.is_compiling()
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or maybe_current_level() is not None
    ):
        return True
    for x in given:  # noqa: SIM110 asked at every call, which a generator would make slower
        if x is not None and (type(x) not in _PLAIN or x.is_neg()):
            return True
    return False


def _checked(backward: Function) -> Function:
    """A backward pass that refuses tangents, which it would lose: it is no function of torch's own."""

    def checked(ctx: Any, *grads: Any) -> Any:
        if forward_ad._current_level >= 0 and tangents(*grads):
            raise NotImplementedError(
                "forward-mode differentiation (tangents) through a backward pass whose forward pass carried none: "
                "let the op's inputs carry them, or use torch.func.jvp of torch.func.grad"
            )
        return backward(ctx, *grads)

    return checked


def differentiable(forward: Function, setup: Callable[..., None], backward: Function) -> Function:
    """What a custom op computes, with the op's gradients, without the dispatcher: for calls that are not `observed`."""

    def both(ctx: Any, *inputs: Any) -> Any:  # torch would look at the signature of a forward apart at every call
        output = forward(*inputs)
        setup(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(both), "backward": staticmethod(_checked(backward))}
    function: Any = type("Differentiable", (torch.autograd.Function,), methods)
    return function.apply


def with_gradients(op: CustomOpDef, setup: Callable[..., None], backward: Function) -> Function:
    """A custom op, which gets these gradients, as code calls it that functional transforms may look at."""
    backward = _checked(backward)
    op.register_autograd(backward, setup_context=setup)
    return _transformable(op, setup, backward)


def without_gradients(op: CustomOpDef) -> Function:
    """As `with_gradients`, of an op that has none."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{op._qualname}: of gradients there are no gradients")

    return _transformable(op, lambda ctx, inputs, output: None, refuse)


def _transformable(op: CustomOpDef, setup: Callable[..., None], backward: Function) -> Function:
    """Functional transforms (`torch.func`) refuse what torch makes of an op's gradients; they take a function of this form."""
    overload = op._opoverload
    methods = {
        "forward": staticmethod(lambda *inputs: overload(*inputs)),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(backward),
        "generate_vmap_rule": True,
    }
    function: Any = type("Transformable", (torch.autograd.Function,), methods)

    def call(*inputs: Any) -> Any:
        transformed = not torch.compiler.is_compiling() and maybe_current_level() is not None
        return function.apply(*inputs) if transformed else overload(*inputs)

    return call
