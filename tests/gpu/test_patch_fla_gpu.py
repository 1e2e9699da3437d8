"""`patch_fla` and the layers against the flash-linear-attention that is installed, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import deltafuse
from deltafuse import patch, patch_fla, unpatch_fla
from deltafuse.nn import Cache, GatedDeltaNet, KimiDeltaAttention

pytest.importorskip("fla.backends", reason="needs flash-linear-attention 0.6")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# fla's own tolerances, RMS of the error over RMS: outputs and states; gradients; gradients of gate and beta.
OUTPUT, GRADIENT, GATE = 0.005, 0.008, 0.02


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of our ops that ran for fla, in order."""
    torch.manual_seed(0)
    calls: list[str] = []
    run = patch._run

    def spy(op: Any, args: Any, kwargs: Any) -> Any:
        calls.append(op.__name__)
        return run(op, args, kwargs)

    monkeypatch.setattr(patch, "_run", spy)
    yield calls
    unpatch_fla()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def inputs(op: str, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    def randn(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.float32).to(kind)

    batch, length, heads, value_heads, size = 1, 200, 2, 4, 64
    kda = op.endswith("kda")
    gate = (size,) if kda else ()
    x = {
        "q": randn(batch, length, heads, size),
        "k": randn(batch, length, heads, size),
        "v": randn(batch, length, value_heads, size),
        "g": randn(batch, length, value_heads, *gate),
        "beta": randn(batch, length, value_heads),
        "initial_state": randn(3, value_heads, size, size, kind=torch.float32),
        "A_log": randn(value_heads, kind=torch.float32),
        "dt_bias": randn(value_heads * (size if kda else 1), kind=torch.float32),
    }
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True,
        "state_v_first": True,
        "cu_seqlens": torch.tensor([0, 15, 15, 200], device="cuda"),
    }
    return x, options


def fla_op(name: str) -> Any:
    if name.endswith("kda"):
        from fla.ops import kda

        return getattr(kda, name)
    from fla.ops import gated_delta_rule

    return getattr(gated_delta_rule, name)


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gated_delta_rule"])
def test_chunked_op_with_gradients(name: str, ours: list[str]) -> None:
    x, options = inputs(name)
    op = fla_op(name)
    weights = [torch.randn(1, 200, 4, 64, device="cuda"), torch.randn(3, 4, 64, 64, device="cuda")]

    def results(op: Any, x: dict[str, torch.Tensor], **more: Any) -> dict[str, torch.Tensor]:
        leaves = {key: t.clone().requires_grad_() for key, t in x.items()}
        o, state = op(**leaves, **options, **more)
        loss = (o.float() * weights[0]).sum() + (state.float() * weights[1]).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return {"o": o, "state": state, **dict(zip(leaves, gradients, strict=True))}

    with torch.no_grad():
        before = op(**x, **options)
        assert ours == []
        patch_fla("torch")
        with torch.enable_grad():
            got = results(op, x)
        assert ours == [name]
        unpatch_fla()
        after = op(**x, **options)
        assert ours == [name]
    want = results(getattr(deltafuse, name), {key: t.double() for key, t in x.items()}, backend="torch")
    for key, value in want.items():
        bound = OUTPUT if key in ("o", "state") else GATE if key in ("g", "beta", "A_log", "dt_bias") else GRADIENT
        assert error(got[key], value) < bound, key
    for theirs in (before, after):
        assert error(got["o"], theirs[0]) < OUTPUT
        assert error(got["state"], theirs[1]) < OUTPUT


def test_recurrent_kda(ours: list[str]) -> None:
    x, options = inputs("fused_recurrent_kda")
    op = fla_op("fused_recurrent_kda")
    with torch.no_grad():
        want = op(**x, **options)
        patch_fla("torch")
        got = op(**x, **options)
    assert ours == ["fused_recurrent_kda"]
    assert error(got[0], want[0]) < OUTPUT
    assert error(got[1], want[1]) < OUTPUT


def test_gate(ours: list[str]) -> None:
    from fla.ops.kda.gate import fused_kda_gate

    x, _ = inputs("chunk_kda")
    want = fused_kda_gate(x["g"], x["A_log"], x["dt_bias"])
    patch_fla("torch")
    got = fused_kda_gate(x["g"], x["A_log"], x["dt_bias"])
    assert ours == ["fused_kda_gate"]
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_convolution(packed: bool, ours: list[str]) -> None:
    from fla.modules.causal_conv1d import causal_conv1d, causal_conv1d_update

    batch, sequences = (1, 3) if packed else (2, 2)
    cu_seqlens = torch.tensor([0, 2, 3, 70], device="cuda") if packed else None
    shapes = {
        "x": (batch, 70, 48),
        "weight": (48, 4),
        "bias": (48,),
        "residual": (batch, 70, 48),
        "initial_state": (sequences, 48, 4),
    }
    leaves = {key: torch.randn(shape, device="cuda", requires_grad=True) for key, shape in shapes.items()}
    dy, dht = torch.randn(batch, 70, 48, device="cuda"), torch.randn(sequences, 48, 4, device="cuda")
    # fla leaves out the gradient of a state's oldest slot, which no later output depends on.
    dht[..., 0] = 0

    def results() -> dict[str, torch.Tensor]:
        y, state = causal_conv1d(**leaves, output_final_state=True, activation="silu", cu_seqlens=cu_seqlens)
        grads = torch.autograd.grad([y, state], list(leaves.values()), [dy, dht])
        return {"y": y, "state": state, **dict(zip(leaves, grads, strict=True))}

    want = results()
    patch_fla("torch")
    got = results()
    assert ours == ["causal_conv1d", "causal_conv1d"], "forward and backward"
    assert {key: error(got[key], value) < 1e-3 for key, value in want.items()} == dict.fromkeys(want, True)

    with torch.no_grad():
        x, weight, bias = leaves["x"][:, :1].repeat(3, 1, 1), leaves["weight"], leaves["bias"]
        cache = torch.randn(len(x), 48, 4, device="cuda")
        mine = cache.clone()
        y, _ = causal_conv1d_update(x, mine, None, weight, bias, "silu")
        unpatch_fla()
        want_y, _ = causal_conv1d_update(x, cache, None, weight, bias, "silu")
    assert ours[2:] == ["causal_conv1d_update"]
    assert error(y, want_y) < 1e-5
    assert torch.equal(mine, cache)


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gated_delta_rule"])
def test_unless_told_otherwise_only_our_kernels_take_over(name: str, ours: list[str]) -> None:
    x, options = inputs(name)
    verdicts = {v.backend: v.supported for v in deltafuse.explain(name, **x, **options).verdicts}
    patch_fla()
    with torch.no_grad():
        fla_op(name)(**x, **options)
    assert ours == ([name] if verdicts["cute"] else [])
    # Ours that hands on to fla meets the patch again, and comes to an end.
    ours.clear()
    with torch.no_grad():
        o, _ = getattr(deltafuse, name)(**x, **options, backend="fla")
    assert o.isfinite().all()


LAYERS: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "kda": (KimiDeltaAttention, {}),
    "kda-gva": (KimiDeltaAttention, {"num_v_heads": 4, "conv_bias": True, "allow_neg_eigval": True}),
    "kda-bounded": (KimiDeltaAttention, {"safe_gate": True, "lower_bound": -5.0}),
    "gdn": (GatedDeltaNet, {"expand_v": 1}),
    "gdn-gva": (GatedDeltaNet, {"num_v_heads": 4, "output_gate_activation": "sigmoid"}),
    "gdn-no-gate": (GatedDeltaNet, {"use_gate": False}),
}


@pytest.mark.parametrize(("name", "backend"), [*((name, "torch") for name in LAYERS), ("kda", "auto"), ("gdn", "auto")])
def test_layers_of_fla(name: str, backend: str) -> None:
    layers = pytest.importorskip("fla.layers", reason="needs the flash-linear-attention package, with its layers")
    cls, options = LAYERS[name]
    options = {"hidden_size": 128, "head_dim": 64, "num_heads": 2, "layer_idx": 0, **options}
    torch.manual_seed(0)
    theirs = getattr(layers, cls.__name__)(**options).cuda()
    torch.manual_seed(0)
    mine: Any = cls(**options).cuda()
    a, b = theirs.state_dict(), mine.state_dict()
    assert {key: (t.shape, t.dtype) for key, t in a.items()} == {key: (t.shape, t.dtype) for key, t in b.items()}
    assert all(torch.equal(a[key], b[key]) for key in a), "the same initialisation from the same seed"
    mine.load_state_dict(theirs.state_dict(), strict=True)

    x = torch.randn(3, 100, 128, device="cuda")
    mask = torch.ones(3, 100, device="cuda", dtype=torch.int64)
    mask[0, :30] = 0
    mask[2, 90:] = 0
    with deltafuse.use_backend(backend), torch.autocast("cuda", torch.bfloat16):
        got, want = mine(x, mask)[0], theirs(x, mask)[0]
        assert got.dtype == want.dtype
        assert error(got, want) < 2 * OUTPUT
        got.float().square().mean().backward()
        assert all(p.grad.isfinite().all() for p in mine.parameters())
        try:
            want.float().square().mean().backward()
        except RuntimeError as refusal:
            # fla does not differentiate Gated DeltaNet on Hopper with some versions of Triton, which get it wrong.
            if "Triton" not in str(refusal) or not isinstance(mine, GatedDeltaNet):
                raise
        else:
            for (key, p), (_, q) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
                assert error(p.grad, q.grad) < GATE, key
        # States go from fla's layer to ours in the middle of a sequence.
        mine.eval()
        theirs.eval()
        with torch.no_grad():
            cache = Cache()
            theirs(x[:, :70], past_key_values=cache, use_cache=True)
            rest = [mine(x[:, t : t + 1], past_key_values=cache, use_cache=True)[0] for t in range(70, 75)]
            assert error(torch.cat(rest, 1), theirs(x)[0][:, 70:75]) < 2 * OUTPUT
