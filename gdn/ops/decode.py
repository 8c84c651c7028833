"""Public operator: one whole decode step of a GDN layer between its projections."""

import torch

from gdn.ops import _delta_rule, _rows, _values
from gdn.ops._call import always, launch, make, new, operator, prepare, reads_values, run_reference, validates
from gdn.ops._checks import bad_value, check_at_least, check_not_negative, check_tensor, dtype_name
from gdn.ops._modes import is_empty
from gdn.ops.norm import check_gate_activation
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
    """Conv update, SiLU, gates, L2 norm of q and k, gated delta rule and gated RMS norm of one decode step.

        [q | k | v] = activation(conv(mixed_qkv))
        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
        S = exp(g) S;   u = beta (v - S^T k^);   S = S + k^ u^T;   o = S^T q^ * scale        (^: divided by the L2 norm)
        result = o / sqrt(mean(o * o) + eps) * norm_weight * gate_activation(z)

    H = num_k_heads, K = head_k_dim, V = head_v_dim, HV = the length of A_log, a multiple of H.
    Arguments:
        projection_layout "flat": mixed_qkv [tokens, 2 * H * K + HV * V], z [tokens, HV, V], b and a [tokens, HV];
            "interleaved": mixed_qkv is the whole in_proj_qkvz output [tokens, H * (2 * K + 2 * r * V)], b the whole
            in_proj_ba output [tokens, 2 * HV], both per key-head group as in fused_qkvzba_split_reshape_cat, z and a None.
            bfloat16 or float16 (float32, float64: reference). Any row stride; a last dim that is not contiguous is copied,
            logged once.
        conv_state [slots, 2 * H * K + HV * V, columns >= w - 1], conv_weight [.., w], conv_bias [..]: as in
            causal_conv1d_update; channels always in flat order [q | k | v].
        A_log, dt_bias [HV], norm_weight [V]: any float dtype.
        ssm_state: the pool [slots, HV, K, V] (or V first), float32 or bfloat16; both pools are updated in place.
        state_indices [>= N], or [>= N, 1 + num_spec] with speculative decoding (as in fused_recurrent_gated_delta_rule for
            the state, as in causal_conv1d_update for the conv window). A sequence one of whose two slots to read (of the
            state, of the window) is <= null_slot is padding: zero rows, and nothing of it is read or written.
        query_start_loc [N + 1] int32 or int64: token offsets; None = one token per sequence.
        num_accepted_tokens [>= N] int32, with 2-D indices.
        rounding_seed [1] int64 on the device, advanced by the caller: stochastic rounding of a bfloat16 pool; None = nearest.
        out [tokens, HV * V]: where the result is written, last dim contiguous; it shares no element with any other argument.
    The two pools may be strided views of one buffer of pages, as engines keep them, if they share no element.
    The caller's duty: no two live sequences share a slot, indices in range. Checked on the CPU always, on a GPU with
    GDN_VALIDATE=1.

    Returns [tokens, HV * V] in the dtype of mixed_qkv. Raises TypeError or ValueError, naming the argument, before anything
    is written.
    """
    heads = _check_projections(mixed_qkv, z, b, a, A_log, num_k_heads, head_k_dim, head_v_dim, projection_layout)
    device, length = mixed_qkv.device, mixed_qkv.shape[0]
    floats = _delta_rule.FLOAT_DTYPES
    check_tensor("dt_bias", dt_bias, shape=(heads,), dtypes=floats, device=device)
    check_tensor("norm_weight", norm_weight, shape=(head_v_dim,), dtypes=floats, device=device)
    channels = 2 * num_k_heads * head_k_dim + heads * head_v_dim
    check_tensor("conv_weight", conv_weight, shape=(channels, "w >= 2"), dtypes=floats, device=device)
    if conv_weight.shape[1] < 2:
        bad_value("conv_weight", f"shape [{channels}, w >= 2]", f"shape {list(conv_weight.shape)}")
    if conv_bias is not None:
        check_tensor("conv_bias", conv_bias, shape=(channels,), dtypes=floats, device=device)
    if activation not in (None, "silu", "swish"):
        bad_value("activation", "'silu', 'swish' or None", repr(activation))
    check_gate_activation("gate_activation", gate_activation)
    check_not_negative("eps", eps)
    _delta_rule.check_null_slot(null_slot)

    count = length
    if query_start_loc is not None:
        _delta_rule.check_offsets("query_start_loc", query_start_loc, device)
        count = query_start_loc.shape[0] - 1
    _delta_rule.check_indices("state_indices", state_indices, count, device, ranks=(1, 2))
    num_spec = state_indices.shape[1] - 1 if state_indices.dim() == 2 else 0
    columns = conv_weight.shape[1] - 1 + num_spec
    check_tensor("conv_state", conv_state, shape=("slots", channels, f"columns >= {columns}"), dtypes=floats, device=device)
    if conv_state.shape[2] < columns:
        bad_value("conv_state", f"shape [slots, {channels}, columns >= {columns}]", f"shape {list(conv_state.shape)}")
    sizes = _delta_rule.Sizes(1, length, count, num_k_heads, num_k_heads, heads, head_k_dim, head_v_dim)
    _delta_rule.check_pool("ssm_state", ssm_state, sizes, state_v_first, mixed_qkv)
    if num_accepted_tokens is not None:
        _delta_rule.check_per_sequence("num_accepted_tokens", num_accepted_tokens, count, device, _delta_rule.INDEX_DTYPES)
        if state_indices.dim() != 2:
            bad_value("num_accepted_tokens", "None without 2-D state_indices", "a tensor")
    if rounding_seed is not None:
        check_tensor("rounding_seed", rounding_seed, shape=(1,), dtypes=(torch.int64,), device=device)
    if out is not None:
        shape = (length, heads * head_v_dim)
        check_tensor("out", out, shape=shape, dtypes=(mixed_qkv.dtype,), device=device, last_contiguous=True)
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
        conv_channels_contiguous=_rows.is_aligned(conv_state.mT),
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
    if prepared.launch is None:
        run_reference()

    shape = (length, heads * head_v_dim)
    o = new(mixed_qkv.dtype, device, *shape) if out is None else out
    if is_empty(length, count):
        return o.zero_()
    params = GdnDecodeParams(
        mixed_qkv=_rows.aligned("mixed_qkv", mixed_qkv),
        z=z,
        b=b,
        a=a,
        conv_state=conv_state,
        conv_weight=_rows.constant(conv_weight),
        conv_bias=None if conv_bias is None else _rows.constant(conv_bias),
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        ssm_state=ssm_state,
        state_indices=state_indices,
        num_accepted_tokens=None if num_accepted_tokens is None else make(_delta_rule.as_int32, num_accepted_tokens),
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
    """The number of value heads."""
    for name, value in {"num_k_heads": num_k_heads, "head_k_dim": head_k_dim, "head_v_dim": head_v_dim}.items():
        check_at_least(name, value, 1)
    if projection_layout not in ("flat", "interleaved"):
        bad_value("projection_layout", "'flat' or 'interleaved'", repr(projection_layout))
    check_tensor("mixed_qkv", mixed_qkv, dtypes=_delta_rule.TOKEN_DTYPES)
    device, dtypes = mixed_qkv.device, _delta_rule.FLOAT_DTYPES
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
