"""What each kernel is compiled for: frozen dataclasses of plain values.

They stand apart from the kernels so that a process that finds a compiled object on disk never imports the DSL. Every field changes the
code; what does not (sizes of batch, tokens, heads, strides, the scale) is an argument of the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64
"""Tokens a chunk."""
EPSILON = 1e-6
"""Of the L2 norm."""


@dataclass(frozen=True)
class PrepareConfig:
    """`warp.kda_prepare`: raw q, k, gate and beta of a chunk to the operands of the scan.

    `gate` is "log" (g is the decay's natural logarithm), "softplus" or "bounded" (g is raw); `a_log`, `dt_bias` say whether these
    parameters are there. `cu_seqlens` is the dtype of the packed sequences' bounds, "" where sequences are not packed. `inverse`: the
    inverse without beta, and beta as the chunks have it, are wanted too, for the backward pass. `bound`: so is how much of a state a chunk
    leaves at most (see `tile.early`). `strips`: scores leave without most of their zeros, kd and qg without rows that are zeros (see
    `tile.panel`), which `inverse` rules out.
    """

    dtype: str = "bfloat16"
    key_dim: int = 128
    gate: str = "log"
    gate_dtype: str = "bfloat16"
    beta_dtype: str = "float32"
    a_log: bool = False
    dt_bias: bool = False
    l2norm: bool = False
    beta_sigmoid: bool = False
    cu_seqlens: str = ""
    inverse: bool = False
    bound: bool = False
    strips: bool = False


@dataclass(frozen=True)
class ScanConfig:
    """`sm90.kda_scan`: the serial pass over chunks.

    `tile` columns of V a CTA (64: one warpgroup, 128: two), in clusters of `cluster` CTAs of one head that share operands. `initial`,
    `final`, `states`: whether the initial state is given, the final one wanted, every chunk's first state wanted (io dtype).
    `readout`: whether o is wanted. `transition`: compute the map of states instead (v is zero, the first state the identity, K columns).
    `by_value`: chunks' states are [V, K] whatever the layout of the others.
    `panels` of scores a chunk: 3 where the inverse without beta is among them; `strips`: these are strips. `early`: segments may start
    early from zero; "decide" where this pass finds which ones do, "follow" where an earlier one does.
    """

    dtype: str = "bfloat16"
    key_dim: int = 128
    tile: int = 64
    cluster: int = 1
    state_v_first: bool = False
    initial: bool = False
    final: bool = False
    states: bool = False
    by_value: bool = False
    readout: bool = True
    transition: bool = False
    cu_seqlens: str = ""
    panels: int = 2
    strips: bool = False
    early: str = ""

    @property
    def states_v_first(self) -> bool:
        """The layout of chunks' states."""
        return self.state_v_first or self.by_value


@dataclass(frozen=True)
class SegmentsConfig:
    """`sm90.kda_segments`: segments' final states from zero and their maps of states, where these are wanted; fields as in `ScanConfig`."""

    dtype: str = "bfloat16"
    key_dim: int = 128
    cluster: int = 1
    cu_seqlens: str = ""
    panels: int = 2
    strips: bool = False

    @staticmethod
    def cluster_of(key_dim: int, value_dim: int) -> int:
        """The largest cluster for both passes."""
        return 2 if key_dim % 128 == 0 and value_dim % 128 == 0 else 1


@dataclass(frozen=True)
class CombineConfig:
    """`warp.kda_combine`: segments' final states and transitions to segments' initial states, in the layout of `state_v_first`.

    `reverse`: from the last segment to the first, for the backward pass. `early`: some segments may start early and need no state.
    """

    key_dim: int = 128
    state_v_first: bool = False
    initial: bool = False
    final: bool = False
    reverse: bool = False
    early: bool = False


@dataclass(frozen=True)
class DecodeConfig:
    """`warp.delta_decode`: the delta rule token by token, for decoding.

    `per_key`: g has a value a key dimension (KDA), else one a head (GDN); `gate`, `a_log`, `dt_bias`, `cu_seqlens` as in `PrepareConfig`.
    `state_dtype` is that of the states that are read, "" where all start from zero, `final_dtype` that of those that are written. `store`
    says which are: "" none, "last" that after a sequence's last token, "tokens" that after every token into its own slot, "each" that after
    every token into a row of its own. `indices` is the dtype of the slots, "" where sequence n has slot n; `per_token`: there is a slot a
    token. `accepted` is the dtype of the numbers of accepted tokens, "" where there are none. `warps` a CTA, of `columns` (16; 32
    where K is at most 128; 64 of 16-bit states [K, V] too, for single tokens) of V each; neither changes a result.
    `single`: T is 1 and sequences are not packed.
    """

    dtype: str = "bfloat16"
    key_dim: int = 128
    value_dim: int = 128
    per_key: bool = True
    gate: str = "log"
    gate_dtype: str = "float32"
    beta_dtype: str = "float32"
    beta_per_value: bool = False
    a_log: bool = False
    dt_bias: bool = False
    l2norm: bool = False
    beta_sigmoid: bool = False
    state_dtype: str = ""
    final_dtype: str = "float32"
    store: str = "last"
    state_v_first: bool = False
    indices: str = ""
    per_token: bool = False
    accepted: str = ""
    cu_seqlens: str = ""
    single: bool = False
    warps: int = 4
    columns: int = 16


@dataclass(frozen=True)
class ApplyConfig:
    """`warp.kda_apply`: the inverse M' applied to -k 2^G, a chunk at a time."""

    dtype: str = "bfloat16"
    key_dim: int = 128


@dataclass(frozen=True)
class BlackwellScanConfig:
    """`sm100.kda_scan`: the serial pass over chunks in tensor memory.

    `tile` columns of V a CTA (64 or 128), in clusters of `cluster` CTAs of one head that share all operands but v or u. `operands`:
    "slots" (images of the workspace with the scale in qg, Aqk zero above its diagonal, decay factors; M' and v for u) or "tokens"
    (tensors [B, T, HV, .] as flash-linear-attention has them). For tokens, `gates` says what gives the decay: "last" (a row of log2 gates
    a chunk) or "all" (a row a token), and `zeroed` that Aqk is zero above its diagonal, where it may hold anything otherwise. `initial`,
    `final`: whether the initial state is given, the final one wanted. `cu_seqlens` as in `PrepareConfig`.
    """

    dtype: str = "bfloat16"
    key_dim: int = 128
    tile: int = 128
    cluster: int = 1
    operands: str = "slots"
    gates: str = "last"
    zeroed: bool = False
    state_v_first: bool = False
    initial: bool = False
    final: bool = False
    cu_seqlens: str = ""


@dataclass(frozen=True)
class ConvConfig:
    """`warp.conv_forward`: the short convolution over whole sequences.

    Dtypes are "" where a tensor is absent. `vector` channels a thread and `columns` threads along the channels (8 to 128, a power of two);
    each thread has `rows` rows in flight and asks for `batch` of them at a time; `blocks` CTAs share an SM.
    """

    dtype: str = "bfloat16"
    width: int = 4
    weight_dtype: str = "bfloat16"
    bias_dtype: str = ""
    residual_dtype: str = ""
    state_dtype: str = ""
    final: bool = False
    silu: bool = False
    cu_seqlens: str = ""
    vector: int = 8
    columns: int = 128
    rows: int = 8
    batch: int = 4
    blocks: int = 4


@dataclass(frozen=True)
class ConvBackwardConfig:
    """`warp.conv_backward`: gradients of the short convolution; fields as in `ConvConfig`.

    `dx`, `dweight`, `dbias`, `dstate`: which gradients are wanted. `grad_state`: whether the final state has one, in x's dtype.
    """

    dtype: str = "bfloat16"
    width: int = 4
    weight_dtype: str = "bfloat16"
    bias_dtype: str = ""
    state_dtype: str = ""
    grad_state: bool = False
    silu: bool = False
    cu_seqlens: str = ""
    dx: bool = True
    dweight: bool = True
    dbias: bool = False
    dstate: bool = False
    vector: int = 4
    columns: int = 128
    rows: int = 8
    batch: int = 4
    blocks: int = 4


@dataclass(frozen=True)
class ConvUpdateConfig:
    """`warp.conv_update`: one token of every sequence; fields as in `ConvConfig`, `rows` sequences in flight a thread.

    `whole`: every sequence's cache lies at a multiple of 16 bytes; else at one of `vector` elements.
    """

    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    width: int = 4
    weight_dtype: str = "bfloat16"
    bias_dtype: str = ""
    residual_dtype: str = ""
    silu: bool = False
    vector: int = 2
    whole: bool = True
    columns: int = 128
    rows: int = 4


@dataclass(frozen=True)
class IntraConfig:
    """`warp.kda_intra`: the backward pass inside chunks, to the gradients of q, k, gate and beta; fields as in `PrepareConfig`.

    `grouped`: dq and dk are fp32 and per value head, for value heads that share q and k.
    """

    dtype: str = "bfloat16"
    key_dim: int = 128
    gate: str = "log"
    gate_dtype: str = "bfloat16"
    beta_dtype: str = "float32"
    a_log: bool = False
    dt_bias: bool = False
    l2norm: bool = False
    beta_sigmoid: bool = False
    cu_seqlens: str = ""
    grouped: bool = False


@dataclass(frozen=True)
class LayerDecodeConfig:
    """`warp.layer_decode`: one token of a KDA layer, from its projections to the normed and gated output.

    `ratio`: value heads a key head. `conv_size`: taps, 2 or 4; `cache_dtype`, `conv_dtype`, `norm_dtype`: of the convolutions' states,
    their weights and biases, the norm's weight ("" where it has none). `state_dtype` is "" where states start from zero; `final` says
    whether they are written, `final_dtype` how. `gate`, `a_log`, `state_v_first` as in `DecodeConfig`.
    """

    dtype: str = "bfloat16"
    key_dim: int = 128
    value_dim: int = 128
    ratio: int = 1
    conv_size: int = 4
    conv_bias: bool = False
    conv_dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    norm_dtype: str = "bfloat16"
    gate: str = "softplus"
    a_log: bool = True
    dt_bias: bool = True
    state_dtype: str = "float32"
    final_dtype: str = "float32"
    final: bool = True
    state_v_first: bool = True


@dataclass(frozen=True)
class InterConfig:
    """`sm90.kda_inter`: gradients of a chunk's factors and scores, `tile` columns of V at a time (64 or 128)."""

    dtype: str = "bfloat16"
    key_dim: int = 128
    tile: int = 128
    cu_seqlens: str = ""


@dataclass(frozen=True)
class ReverseConfig:
    """`sm90.kda_reverse`: the serial pass of the backward over chunks, from the last to the first.

    `tile`, `cluster`, `state_v_first`, `cu_seqlens` as in `ScanConfig`. `initial`: whether the final state has a gradient, `final`: whether
    that of the initial state is wanted. `readout`: whether y, dv and the chunks' states' gradients are wanted. `transition`: compute the
    map of states' gradients instead (do is zero, the first gradient the identity, K columns). `early` as in `ScanConfig`.
    """

    dtype: str = "bfloat16"
    key_dim: int = 128
    tile: int = 64
    cluster: int = 1
    state_v_first: bool = False
    initial: bool = False
    final: bool = False
    readout: bool = True
    transition: bool = False
    cu_seqlens: str = ""
    early: str = ""
