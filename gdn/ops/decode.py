"""Public operator `fused_gdn_decode`: one decode step of a Gated DeltaNet layer between its projections."""

import torch

from gdn.ops import _delta_rule, _values
from gdn.ops._call import always, launch, make, new, operator, prepare, reads_values, validates
from gdn.ops._modes import is_empty
from gdn.ops._tensors import (
    CONV_ACTIVATIONS,
    FLOAT_DTYPES,
    GATE_ACTIVATIONS,
    INDEX_DTYPES,
    aligned,
    as_int32,
    bad_value,
    check_at_least,
    check_indices,
    check_not_negative,
    check_null_slot,
    check_offsets,
    check_one_of,
    check_out,
    check_per_sequence,
    check_tensor,
    constant,
    dtype_name,
    is_aligned,
)
from gdn.problems import GdnDecodeParams, GdnDecodeProblem
from gdn.reference import steps as reference

Tensor = torch.Tensor


@operator(
    reference=reference.fused_gdn_decode,
    writes={"out": always, "conv_state": always, "ssm_state": always},
    memo=True,
    varies=("mixed_qkv", "query_start_loc"),
    contiguous=("mixed_qkv", "z"),
)
def fused_gdn_decode(
    mixed_qkv: Tensor,
    z: Tensor | None,
    b: Tensor,
    a: Tensor | None,
    conv_state: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    *,
    conv_bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    scale: float | None = None,
    eps: float = 1e-6,
    activation: str | None = "silu",
    gate_activation: str = "silu",
    projection_layout: str = "flat",
    rounding_seed: Tensor | None = None,
    state_v_first: bool = False,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """One decode step of a Gated DeltaNet layer between its projections.

    Convolution update, SiLU, gates, L2 norm of q and k, gated delta rule and gated RMS norm:

        [q | k | v] = activation(conv(mixed_qkv))
        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
        S = exp(g) S;   u = beta (v - S^T k^);   S = S + k^ u^T;   o = S^T q^ * scale        (^: divided by the L2 norm)
        result = o / sqrt(mean(o * o) + eps) * norm_weight * gate_activation(z)

    Symbols: H = num_k_heads, K = head_k_dim, V = head_v_dim; HV, the length of `A_log`, is a multiple of H, and r = HV / H.
    Inference only.

    Parameters
    ----------
    mixed_qkv : Tensor [tokens, 2 * H * K + HV * V]
        Projected q, k and v of every token, bfloat16 or float16 (float32 and float64: reference only), any row stride; a last
        dimension that is not contiguous is copied, logged once. With the interleaved layout the whole in_proj_qkvz output
        [tokens, H * (2 * K + 2 * r * V)], per key-head group as in `fused_qkvzba_split_reshape_cat`.
    z : Tensor [tokens, HV, V] or None
        Input of the output gate, any float dtype and row stride; None with the interleaved layout.
    b : Tensor [tokens, HV]
        Raw write strength, any float dtype and row stride. With the interleaved layout the whole in_proj_ba output
        [tokens, 2 * HV], per key-head group.
    a : Tensor [tokens, HV] or None
        Raw decay gate, any float dtype and row stride; None with the interleaved layout.
    conv_state : Tensor [slots, 2 * H * K + HV * V, columns >= w - 1]
        Windows of the convolution as in `causal_conv1d_update`, channels always in flat order [q | k | v]; updated in place.
    conv_weight : Tensor [2 * H * K + HV * V, w]
        Filter of the convolution, w >= 2, any float dtype, channels in flat order.
    A_log : Tensor [HV]
        Logarithm of the decay rate, any float dtype.
    dt_bias : Tensor [HV]
        Bias of the raw decay gate, any float dtype.
    norm_weight : Tensor [V]
        Gain of the RMS norm, any float dtype.
    ssm_state : Tensor [slots, HV, K, V]
        State pool, float32 or bfloat16 ([slots, HV, V, K] with `state_v_first`), updated in place: inner three dimensions
        contiguous, slot stride and address multiples of 16 bytes. Both pools may be strided views of one buffer of pages, as
        engines keep them, if they share no element.
    state_indices : Tensor [>= N] or [>= N, 1 + num_spec]
        Slots of each sequence in both pools, int32 or int64. With columns (speculative decoding) the state follows
        `fused_recurrent_gated_delta_rule` and the window `causal_conv1d_update`. A sequence one of whose two slots to read
        (state, window) is <= `null_slot` is padding: zero rows, and nothing of it is read or written.
    conv_bias : Tensor [2 * H * K + HV * V], optional
        Bias of the convolution, any float dtype.
    query_start_loc : Tensor [N + 1], optional
        Token offsets of the sequences, int32 or int64, starting at 0. None = one token per sequence.
    num_accepted_tokens : Tensor [>= N], optional
        Accepted tokens of the previous step, int32 (or int64), with 2-D `state_indices`. Outside 1..columns the sequence is
        padding.
    num_k_heads, head_k_dim, head_v_dim : int
        H, K and V.
    scale : float, optional
        Factor of the queries. None = K**-0.5.
    eps : float
        Added to the mean square of the RMS norm; finite, >= 0.
    activation : {"silu", "swish"} or None
        Activation after the convolution; both names mean SiLU.
    gate_activation : {"silu", "swish", "sigmoid"}
        Activation of z.
    projection_layout : {"flat", "interleaved"}
        Layout of the projections: separate tensors, or per key-head group.
    rounding_seed : Tensor [1] of int64, optional
        Seed on the device, advanced by the caller (a CUDA graph replays it): a bfloat16 pool is rounded stochastically. None =
        rounded to nearest.
    state_v_first : bool
        Whether states are [V, K] per head instead of [K, V].
    null_slot : int
        Largest slot index that means padding, >= -1. vLLM's convention is 0.
    out : Tensor [tokens, HV * V], optional
        Tensor to write the result into, last dimension contiguous. It shares no element with any other argument.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    Tensor [tokens, HV * V]
        Input of the output projection, in the dtype of `mixed_qkv`; `out` itself where it is given.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written.

    Notes
    -----
    The caller makes sure that no two live sequences share a slot and that indices lie within the pools. This is always checked
    on the CPU, and on a GPU with ``GDN_VALIDATE=1`` (which waits for the device).

    References
    ----------
    .. [1] S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464.
    .. [2] Qwen3-Next model card, https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct (the layer's steps and projections).
    """
    heads = _check_projections(mixed_qkv, z, b, a, A_log, num_k_heads, head_k_dim, head_v_dim, projection_layout)
    device, length = mixed_qkv.device, mixed_qkv.shape[0]
    floats = FLOAT_DTYPES
    check_tensor("dt_bias", dt_bias, shape=(heads,), dtypes=floats, device=device)
    check_tensor("norm_weight", norm_weight, shape=(head_v_dim,), dtypes=floats, device=device)
    channels = 2 * num_k_heads * head_k_dim + heads * head_v_dim
    check_tensor("conv_weight", conv_weight, shape=(channels, "w >= 2"), dtypes=floats, device=device)
    if conv_weight.shape[1] < 2:
        bad_value("conv_weight", f"shape [{channels}, w >= 2]", f"shape {list(conv_weight.shape)}")
    if conv_bias is not None:
        check_tensor("conv_bias", conv_bias, shape=(channels,), dtypes=floats, device=device)
    check_one_of("activation", activation, CONV_ACTIVATIONS)
    check_one_of("gate_activation", gate_activation, GATE_ACTIVATIONS)
    check_not_negative("eps", eps)
    check_null_slot(null_slot)

    count = length
    if query_start_loc is not None:
        check_offsets("query_start_loc", query_start_loc, device)
        count = query_start_loc.shape[0] - 1
    check_indices("state_indices", state_indices, count, device, ranks=(1, 2))
    num_spec = state_indices.shape[1] - 1 if state_indices.dim() == 2 else 0
    columns = conv_weight.shape[1] - 1 + num_spec
    check_tensor("conv_state", conv_state, shape=("slots", channels, f"columns >= {columns}"), dtypes=floats, device=device)
    if conv_state.shape[2] < columns:
        bad_value("conv_state", f"shape [slots, {channels}, columns >= {columns}]", f"shape {list(conv_state.shape)}")
    sizes = _delta_rule.Sizes(1, length, count, num_k_heads, num_k_heads, heads, head_k_dim, head_v_dim)
    _delta_rule.check_pool("ssm_state", ssm_state, sizes, state_v_first, mixed_qkv)
    if num_accepted_tokens is not None:
        check_per_sequence("num_accepted_tokens", num_accepted_tokens, count, device, INDEX_DTYPES)
        if state_indices.dim() != 2:
            bad_value("num_accepted_tokens", "None without 2-D state_indices", "a tensor")
    if rounding_seed is not None:
        check_tensor("rounding_seed", rounding_seed, shape=(1,), dtypes=(torch.int64,), device=device)
    check_out(out, (length, heads * head_v_dim), mixed_qkv.dtype, device)
    if reads_values(device):
        _check_values(length, ssm_state, conv_state, state_indices, query_start_loc, num_accepted_tokens, null_slot)

    is_flat = projection_layout == "flat"
    problem = GdnDecodeProblem(
        num_k_heads=num_k_heads,
        num_v_heads=heads,
        head_k_dim=head_k_dim,
        head_v_dim=head_v_dim,
        width=conv_weight.shape[1],
        dtype=dtype_name(mixed_qkv.dtype),
        z_dtype=None if z is None else dtype_name(z.dtype),
        a_dtype=None if a is None else dtype_name(a.dtype),
        b_dtype=dtype_name(b.dtype),
        weight_dtype=dtype_name(conv_weight.dtype),
        bias_dtype=None if conv_bias is None else dtype_name(conv_bias.dtype),
        A_log_dtype=dtype_name(A_log.dtype),
        dt_bias_dtype=dtype_name(dt_bias.dtype),
        norm_dtype=dtype_name(norm_weight.dtype),
        conv_dtype=dtype_name(conv_state.dtype),
        conv_channels_contiguous=is_aligned(conv_state.mT),
        state_dtype=dtype_name(ssm_state.dtype),
        state_v_first=state_v_first,
        index_dtype=dtype_name(state_indices.dtype),
        cu_seqlens_dtype=None if query_start_loc is None else dtype_name(query_start_loc.dtype),
        interleaved=not is_flat,
        silu=activation is not None,
        gate_sigmoid=gate_activation == "sigmoid",
        has_columns=state_indices.dim() == 2,
        has_accepted=num_accepted_tokens is not None,
        has_rounding=rounding_seed is not None and ssm_state.dtype == torch.bfloat16,
        num_tokens=length,
        num_sequences=count,
    )
    prepared = prepare(problem, device, backend)

    shape = (length, heads * head_v_dim)
    o = new(mixed_qkv.dtype, device, *shape) if out is None else out
    if is_empty(length, count):
        return o.zero_()
    params = GdnDecodeParams(
        mixed_qkv=aligned("mixed_qkv", mixed_qkv),
        z=z,
        b=b,
        a=a,
        conv_state=conv_state,
        conv_weight=constant(conv_weight),
        conv_bias=None if conv_bias is None else constant(conv_bias),
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        ssm_state=ssm_state,
        state_indices=state_indices,
        num_accepted_tokens=None if num_accepted_tokens is None else make(as_int32, num_accepted_tokens),
        cu_seqlens=None if query_start_loc is None else query_start_loc.contiguous(),
        rounding_seed=rounding_seed if problem.has_rounding else None,
        out=o.view(length, heads, head_v_dim),
        scale=head_k_dim**-0.5 if scale is None else scale,
        eps=eps,
        null_slot=null_slot,
    )
    windows = conv_state if problem.conv_channels_contiguous else None
    launch(prepared, params, (o,), aligned=(mixed_qkv, conv_weight, conv_bias, windows, ssm_state))
    return o


def _check_values(
    length: int,
    ssm_state: Tensor,
    conv_state: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor | None,
    num_accepted_tokens: Tensor | None,
    null_slot: int,
) -> None:
    device = state_indices.device
    if query_start_loc is not None:
        _values.check_offsets("query_start_loc", query_start_loc, length)
    bounds = _values.token_bounds(query_start_loc, length, 1, device)
    columns = state_indices.shape[1] if state_indices.dim() == 2 else 1
    states = _values.decode_slots(
        "state_indices", bounds, state_indices, null_slot, num_accepted_tokens=num_accepted_tokens, first_column_decides=True
    )
    windows = _values.window_slots("state_indices", bounds, state_indices, null_slot, is_live=states.is_live)
    if num_accepted_tokens is not None:
        _values.check_accepted(
            "num_accepted_tokens", num_accepted_tokens, columns, bounds, state_indices, null_slot, strict=validates(device)
        )
    for touched, pool in ((states, ssm_state), (windows, conv_state)):
        _values.check_slots(touched, pool.shape[0], null_slot)
        _values.check_unshared(touched, pool.shape[0])


def _check_projections(
    mixed_qkv: Tensor,
    z: Tensor | None,
    b: Tensor,
    a: Tensor | None,
    A_log: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    projection_layout: str,
) -> int:
    """Checks the projections; returns the number of value heads."""
    for name, value in {"num_k_heads": num_k_heads, "head_k_dim": head_k_dim, "head_v_dim": head_v_dim}.items():
        check_at_least(name, value, 1)
    check_one_of("projection_layout", projection_layout, ("flat", "interleaved"))
    check_tensor("mixed_qkv", mixed_qkv, dtypes=_delta_rule.TOKEN_DTYPES)
    device, dtypes = mixed_qkv.device, FLOAT_DTYPES
    check_tensor("A_log", A_log, shape=("HV",), dtypes=dtypes, device=device)
    heads = A_log.shape[0]
    if heads == 0 or heads % num_k_heads:
        bad_value("A_log", f"shape [HV] with HV a multiple of num_k_heads = {num_k_heads}", f"shape {list(A_log.shape)}")
    is_flat = projection_layout == "flat"
    width = 2 * num_k_heads * head_k_dim + (1 if is_flat else 2) * heads * head_v_dim
    check_tensor("mixed_qkv", mixed_qkv, shape=("tokens", width))
    length = mixed_qkv.shape[0]
    if is_flat:
        check_tensor("z", z, shape=(length, heads, head_v_dim), dtypes=dtypes, device=device)
        check_tensor("a", a, shape=(length, heads), dtypes=dtypes, device=device)
        check_tensor("b", b, shape=(length, heads), dtypes=dtypes, device=device)
        return heads
    for name, tensor in {"z": z, "a": a}.items():
        if tensor is not None:
            bad_value(name, "None with projection_layout='interleaved'", "a tensor")
    check_tensor("b", b, shape=(length, 2 * heads), dtypes=dtypes, device=device)
    return heads
