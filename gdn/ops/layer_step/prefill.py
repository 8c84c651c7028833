"""Public operator `fused_gdn_prefill`: one prefill step of a Gated DeltaNet layer between its projections."""

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import always, launch, make, new, operator, prepare, reads_values, validates
from gdn.core.check import dtype_name
from gdn.core.modes import is_empty
from gdn.core.tensors import aligned, as_int32, common_dtype, constant, described, dtypes_of, is_aligned, optional, target
from gdn.ops.delta_rule import checks
from gdn.ops.layer_step import reference
from gdn.ops.layer_step.checks import Layer, check_layer, check_projections
from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from gdn.ops.layer_step.reference import largest_prefill_operand
from gdn.runtime.registry import Backend


@operator(
    reference.fused_gdn_prefill,
    writes={
        "out": always,
        "conv_states": always,
        "ssm_state": always,
        "checkpoint_states": always,
        "checkpoint_windows": always,
    },
    varies=("mixed_qkv", "query_start_loc"),
    contiguous=("mixed_qkv", "z"),
    hints=("max_seqlen",),
)
def fused_gdn_prefill(
    mixed_qkv: Tensor,
    z: Tensor | None,
    b: Tensor,
    a: Tensor | None,
    conv_states: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor | None,
    ssm_state: Tensor,
    state_indices: Tensor,
    *,
    query_start_loc: Tensor,
    has_initial_state: Tensor | None = None,
    conv_bias: Tensor | None = None,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    scale: float | None = None,
    eps: float = 1e-6,
    activation: str | None = "silu",
    gate_activation: str = "silu",
    projection_layout: str = "flat",
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_windows: Tensor | None = None,
    max_seqlen: int | None = None,
    state_v_first: bool = False,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """One prefill step of a Gated DeltaNet layer between its projections.

    Convolution of packed prompts, SiLU, gates, L2 norm of q and k, gated delta rule by chunks and gated RMS norm:

        [q | k | v] = activation(conv(mixed_qkv))
        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
        S = exp(g) S;   u = beta (v - S^T k^);   S = S + k^ u^T;   o = S^T q^ * scale        (^: divided by the L2 norm)
        result = o / sqrt(mean(o * o) + eps) * norm_weight * gate_activation(z)       (o itself where norm_weight is None)

    A mixed batch passes its decode rows as sequences of one token with `has_initial_state` True; those with drafts are for
    `fused_gdn_decode`. Symbols: H = num_k_heads, K = head_k_dim, V = head_v_dim; HV, the length of `A_log`, is a multiple of H,
    and r = HV / H. The range of float16 is that of `chunk_gated_delta_rule`. Inference only.

    Parameters
    ----------
    mixed_qkv : Tensor [tokens, 2 * H * K + HV * V]
        Projected q, k and v of every token, bfloat16 or float16 (float32 and float64: reference only), any row stride; a last
        dimension that is not contiguous is copied, logged once. With the interleaved layout the whole in_proj_qkvz output
        [tokens, H * (2 * K + 2 * r * V)], per key-head group as in `fused_qkvzba_split_reshape_cat`; with the merged layout the
        same output [tokens, 2 * H * K + 2 * HV * V] in flat order: q, k, v, z.
    z : Tensor [tokens, HV, V] or None
        Input of the output gate, any float dtype and row stride; copied, and logged once, where rows are not contiguous or do not
        start at multiples of 16 bytes, or a stride is 0 (`expand`). None where it is part of `mixed_qkv`, and without
        `norm_weight`.
    b : Tensor [tokens, HV]
        Raw write strength, any float dtype and row stride. With the interleaved layout the whole in_proj_ba output
        [tokens, 2 * HV], per key-head group; with the merged layout the same in flat order: b, a.
    a : Tensor [tokens, HV] or None
        Raw decay gate, any float dtype and row stride; None with the interleaved and the merged layout.
    conv_states : Tensor [slots, 2 * H * K + HV * V, columns >= w - 1]
        Windows of the convolution as in `causal_conv1d_fn`, channels always in flat order [q | k | v]; updated in place.
    conv_weight : Tensor [2 * H * K + HV * V, w]
        Filter of the convolution, w >= 2, any float dtype, channels in flat order.
    A_log, dt_bias : Tensor [HV], Tensor [HV]
        Logarithm of the decay rate, and bias of the raw decay gate; any float dtypes.
    norm_weight : Tensor [V] or None
        Gain of the RMS norm, any float dtype. None = neither norm nor output gate: the result is o, rounded once, and columns of
        z in `mixed_qkv` are skipped.
    ssm_state : Tensor [slots, HV, K, V]
        State pool, float32 or bfloat16 ([slots, HV, V, K] with `state_v_first`), updated in place: inner three dimensions
        contiguous, slot stride and address multiples of 16 bytes. Both pools may be strided views of one buffer of pages, as
        engines keep them, if they share no element.
    state_indices : Tensor [>= N]
        Slot of each sequence in both pools, int32 or int64. A slot <= `null_slot` is padding: zero rows, no slot read or
        written. An empty sequence touches nothing.
    query_start_loc : Tensor [N + 1]
        Token offsets of the sequences, int32 or int64, starting at 0. Rows at or beyond query_start_loc[-1] are padding: zero in
        the result, whatever the projections hold there.
    has_initial_state : Tensor [>= N] of bool, optional
        False = the window and the state of that sequence start from zero, whatever its slot holds. None = all True.
    conv_bias : Tensor [2 * H * K + HV * V], optional
        Bias of the convolution, any float dtype.
    num_k_heads, head_k_dim, head_v_dim : int
        H, K and V.
    scale, eps : float
        Factor of the queries (None = K**-0.5); added to the mean square of the RMS norm, finite, >= 0.
    activation, gate_activation : {"silu", "swish"} or None, {"silu", "swish", "sigmoid"}
        Activation after the convolution (both names mean SiLU), and that of z.
    projection_layout : {"flat", "interleaved", "merged"}
        Layout of the projections: separate tensors; or two tensors, per key-head group or in flat order.
    checkpoint_offsets, checkpoint_slots : Tensor [>= N, C], optional
        Token counts, multiples of 64, and slots: window and state after that many tokens of this call are also stored in that
        slot of either pool. 0 stores nothing. As for `chunk_gated_delta_rule`.
    checkpoint_states, checkpoint_windows : Tensor [rows, HV, K, V], Tensor [rows, 2 * H * K + HV * V, columns >= w - 1], optional
        Where checkpoints go instead of the pools: `checkpoint_slots` are then rows of both. With one of them alone, states or
        windows alone are kept. As for `chunk_gated_delta_rule` and `causal_conv1d_fn`.
    max_seqlen : int, optional
        Tokens of the longest sequence as the host knows them, as for `chunk_gated_delta_rule`.
    state_v_first, null_slot : bool, int
        Layout of a state, and largest slot index that means padding, >= -1 (vLLM's convention is 0).
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
        Named after the argument, before anything is launched or written; slots as for `chunk_gated_delta_rule`.

    References
    ----------
    .. [1] Qwen3-Next model card, https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct (the layer's steps and projections).
    """
    dims = (num_k_heads, head_k_dim, head_v_dim)
    layouts, has_norm = ("flat", "interleaved", "merged"), norm_weight is not None
    heads = check_projections(mixed_qkv, z, b, a, A_log, dims, projection_layout, layouts, has_norm)
    layer = Layer(conv_weight, conv_bias, dt_bias, norm_weight, activation, gate_activation, eps)
    channels = check_layer(layer, mixed_qkv, heads, dims)
    device, length = mixed_qkv.device, mixed_qkv.shape[0]
    check.null_slot(null_slot)
    check.max_seqlen(max_seqlen)

    count = check.offsets("query_start_loc", query_start_loc, device, otherwise=1)
    check.windows("conv_states", conv_states, channels, conv_weight.shape[1] - 1, device)
    sizes = checks.Sizes(1, length, count, num_k_heads, num_k_heads, heads, head_k_dim, head_v_dim)
    check.indices("state_indices", state_indices, count, device, ranks=(1,))
    checks.check_pool("ssm_state", ssm_state, sizes, state_v_first, mixed_qkv)
    check.per_sequence("has_initial_state", has_initial_state, count, device, (torch.bool,))
    check.checkpoints(checkpoint_offsets, checkpoint_slots, ("state_indices", state_indices), count)
    check.needs_checkpoints("checkpoint_states", checkpoint_states, checkpoint_offsets)
    check.needs_checkpoints("checkpoint_windows", checkpoint_windows, checkpoint_offsets)
    if checkpoint_states is not None:
        checks.check_pool("checkpoint_states", checkpoint_states, sizes, state_v_first, mixed_qkv, num_slots="rows")
    if checkpoint_windows is not None:
        check.windows("checkpoint_windows", checkpoint_windows, channels, conv_weight.shape[1] - 1, device, slots="rows")
    check.out(out, (length, heads * head_v_dim), mixed_qkv.dtype, device)
    if reads_values(device):
        bounds = values.token_bounds("query_start_loc", query_start_loc, 1, length, device)
        values.check_max_seqlen(max_seqlen, bounds)
        kept = (checkpoint_states, checkpoint_windows)
        in_pools = checkpoint_states is None and checkpoint_windows is None
        touched = values.prefill_slots(
            "state_indices", bounds, state_indices, null_slot, has_initial_state=has_initial_state,
            checkpoint_offsets=checkpoint_offsets if in_pools else None, checkpoint_slots=checkpoint_slots if in_pools else None,
        )  # fmt: skip
        values.check_checkpoints(checkpoint_offsets, checkpoint_slots, kept, bounds, touched.is_live, null_slot)
        values.check_touched(touched, ssm_state, null_slot)
        values.check_touched(touched, conv_states, null_slot)
        if mixed_qkv.dtype == torch.float16 and validates(device):
            largest = largest_prefill_operand(
                mixed_qkv, b, a, scale, conv_states, conv_weight, A_log, dt_bias, ssm_state, state_indices,
                query_start_loc=query_start_loc, has_initial_state=has_initial_state, conv_bias=conv_bias, dims=dims,
                activation=activation, projection_layout=projection_layout, state_v_first=state_v_first, null_slot=null_slot,
            )  # fmt: skip
            checks.refuse_beyond_float16("mixed_qkv", largest)

    index_dtype = common_dtype(state_indices, checkpoint_slots)
    problem = GdnPrefillProblem(
        **sizes.fields(),
        width=conv_weight.shape[1],
        dtype=dtype_name(mixed_qkv.dtype),
        **dtypes_of(z=z, a=a, b=b, weight=conv_weight, bias=conv_bias, A_log=A_log, dt_bias=dt_bias, norm=norm_weight),
        **dtypes_of(conv=conv_states, state=ssm_state, cu_seqlens=query_start_loc),
        **dtypes_of(checkpoint_state=checkpoint_states, checkpoint_window=checkpoint_windows),
        conv_channels_contiguous=is_aligned(conv_states.mT),
        state_v_first=state_v_first,
        index_dtype=dtype_name(index_dtype),
        interleaved=projection_layout == "interleaved",
        merged=projection_layout == "merged",
        silu=activation is not None,
        gate_sigmoid=gate_activation == "sigmoid",
        has_mask=has_initial_state is not None,
        has_checkpoints=checkpoint_offsets is not None,
        longest=max_seqlen or 0,
    )
    prepared = prepare(problem, device, backend)
    o = new(mixed_qkv.dtype, device, length, heads * head_v_dim) if out is None else out
    if is_empty(length, count):
        return o.zero_()
    written = target(o)
    slots, checkpoint_slots = (checks.widened(x, index_dtype) for x in (state_indices, checkpoint_slots))
    if checkpoint_offsets is not None and checkpoint_slots is not None:
        checkpoint_offsets, checkpoint_slots = make(as_int32, checkpoint_offsets).contiguous(), checkpoint_slots.contiguous()
    rows = aligned("mixed_qkv", mixed_qkv)
    if projection_layout != "flat":
        rows = described("mixed_qkv", rows)  # z is part of it
    params = GdnPrefillParams(
        rows, None if z is None else described("z", aligned("z", z)), b, a, conv_states, constant(conv_weight),
        optional(constant, conv_bias), make(Tensor.contiguous, A_log), make(Tensor.contiguous, dt_bias),
        optional(constant, norm_weight), ssm_state,
        slots, optional(Tensor.contiguous, has_initial_state), query_start_loc.contiguous(), checkpoint_offsets, checkpoint_slots,
        checkpoint_states, checkpoint_windows, described("out", written.view(length, heads, head_v_dim)),
        new(torch.uint8, device, prepared.workspace_bytes),
        head_k_dim**-0.5 if scale is None else scale, eps, null_slot,
    )  # fmt: skip
    aligned_ones = (mixed_qkv, z, conv_weight, conv_bias, norm_weight, conv_states, ssm_state, checkpoint_states, out)
    launch(prepared, params, (o,) if written is o else None, aligned=aligned_ones)
    return o if written is o else o.copy_(written)
