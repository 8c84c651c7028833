"""Public operator `fused_gdn_decode`: one decode step of a Gated DeltaNet layer between its projections."""

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import always, launch, make, new, operator, prepare, reads_values, validates
from gdn.core.check import INDEX_DTYPES, bad_value, dtype_name
from gdn.core.modes import is_empty
from gdn.core.tensors import aligned, as_int32, common_dtype, constant, dtypes_of, is_aligned, optional
from gdn.ops.delta_rule import checks
from gdn.ops.delta_rule.checks import check_intermediate, check_intermediate_values
from gdn.ops.delta_rule.checks_replay import Replay, Sequences, check_replay, check_replay_values
from gdn.ops.layer_step import reference
from gdn.ops.layer_step.checks import Layer, check_layer, check_projections
from gdn.ops.layer_step.problem import GdnDecodeParams, GdnDecodeProblem
from gdn.runtime.registry import Backend


@operator(
    reference.fused_gdn_decode,
    writes={"out": always, "conv_state": always, "ssm_state": always, "intermediate_states": always, "ring": always},
    varies=("mixed_qkv", "query_start_loc"),
    contiguous=("mixed_qkv", "z"),
)
def fused_gdn_decode(
    mixed_qkv: Tensor,
    z: Tensor | None,
    b: Tensor | None,
    a: Tensor | None,
    conv_state: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor | None,
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
    intermediate_states: Tensor | None = None,
    intermediate_indices: Tensor | None = None,
    ring: Tensor | None = None,
    state_tokens: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    fold_every: int | None = None,
    fold_phase: int = 0,
    parent_token: Tensor | None = None,
    state_v_first: bool = False,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """One decode step of a Gated DeltaNet layer between its projections.

    Convolution update, SiLU, gates, L2 norm of q and k, gated delta rule and gated RMS norm:

        [q | k | v] = activation(conv(mixed_qkv))
        g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
        S = exp(g) S;   u = beta (v - S^T k^);   S = S + k^ u^T;   o = S^T q^ * scale        (^: divided by the L2 norm)
        result = o / sqrt(mean(o * o) + eps) * norm_weight * gate_activation(z)       (o itself where norm_weight is None)

    Symbols: H = num_k_heads, K = head_k_dim, V = head_v_dim; HV, the length of `A_log`, is a multiple of H, and r = HV / H.
    Inference only.

    Parameters
    ----------
    mixed_qkv : Tensor [tokens, 2 * H * K + HV * V]
        Projected q, k and v of every token, bfloat16 or float16 (float32 and float64: reference only), any row stride; copied,
        logged once, where the last dimension is not contiguous or rows do not start at multiples of 16 bytes. With the
        interleaved layout the whole in_proj_qkvz output [tokens, H * (2 * K + 2 * r * V)], per key-head group as in
        `fused_qkvzba_split_reshape_cat`; with the merged layout the same output [tokens, 2 * H * K + 2 * HV * V] in flat order:
        q, k, v, z; with the concatenated layout the output of one projection [tokens, >= 2 * H * K + 2 * HV * V + 2 * HV]: q, k,
        v, z, b, a, and columns that are not read (pad to a multiple of 8).
    z : Tensor [tokens, HV, V] or None
        Input of the output gate, any float dtype and row stride; None where it is part of `mixed_qkv`, and without
        `norm_weight`.
    b : Tensor [tokens, HV] or None
        Raw write strength, any float dtype and row stride. With the interleaved layout the whole in_proj_ba output
        [tokens, 2 * HV], per key-head group; with the merged layout the same in flat order: b, a; None with the concatenated
        layout.
    a : Tensor [tokens, HV] or None
        Raw decay gate, any float dtype and row stride; None with every layout but the flat one.
    conv_state : Tensor [slots, 2 * H * K + HV * V, columns >= w - 1]
        Windows of the convolution as in `causal_conv1d_update`, channels always in flat order [q | k | v]; updated in place.
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
    state_indices : Tensor [>= N] or [>= N, 1 + num_spec]
        Slots of each sequence in both pools, int32 or int64. With columns (speculative decoding) the state follows
        `fused_recurrent_gated_delta_rule` and the window `causal_conv1d_update`. A sequence one of whose two slots to read
        (state, window) is <= `null_slot` is padding: zero rows, and nothing of it is read or written.
    conv_bias : Tensor [2 * H * K + HV * V], optional
        Bias of the convolution, any float dtype.
    query_start_loc : Tensor [N + 1], optional
        Token offsets of the sequences, int32 or int64, starting at 0. None = one token per sequence, and what is [>= N] here has
        exactly N rows; else rows beyond N are ignored.
    num_accepted_tokens : Tensor [>= N], optional
        Accepted tokens of the previous step, with 2-D `state_indices` or a ring, as for `fused_recurrent_gated_delta_rule`.
    num_k_heads, head_k_dim, head_v_dim : int
        H, K and V.
    scale, eps : float
        Factor of the queries (None = K**-0.5); added to the mean square of the RMS norm, finite, >= 0.
    activation, gate_activation : {"silu", "swish"} or None, {"silu", "swish", "sigmoid"}
        Activation after the convolution (both names mean SiLU), and that of z.
    projection_layout : {"flat", "interleaved", "merged", "concatenated"}
        Layout of the projections: separate tensors; two tensors, per key-head group or in flat order; or one after the other in
        one tensor.
    rounding_seed : Tensor [1] of int64, optional
        Seed on the device, advanced by the caller (a CUDA graph replays it), as for `fused_recurrent_gated_delta_rule`.
    intermediate_states, intermediate_indices : Tensor [rows, T_max, HV, K, V] and Tensor [>= N], optional
        The state after token i of sequence n goes to intermediate_states[intermediate_indices[n], i], and nothing to either pool
        (the window after a token is the old one followed by the rows of `mixed_qkv`). With 1-D `state_indices`, as for
        `fused_recurrent_gated_delta_rule`.
    ring, state_tokens, num_computed_tokens, fold_every : Tensor [ring slots, R, W], Tensor [slots], Tensor [>= N], int, optional
        Replay decode, all four together, with 1-D `state_indices`: a state is a few tokens old, `ring` has an entry (key,
        correction, log decay) of each later token, and the state is written once in `fold_every` tokens. Position j of a
        sequence is row j mod R of its slot: [k of all key heads | u of all state heads | g of all state heads], float32, W at
        least H * K + HV * (V + 1), R at least fold_every + 1; last dimension contiguous, other strides and address multiples of
        16 bytes. Slots of the pool beyond those of the ring are for states alone. state_tokens (int32): the tokens that the
        state of a slot contained when something other than a decode call last wrote it; whoever does so sets it, which empties
        the ring. num_computed_tokens (int32 or int64): committed tokens of each sequence before this call. Both are only read.
        A sequence may have (R + 1 - fold_every) // 2 tokens in a call, and at most columns - w + 2, without
        `num_accepted_tokens` one. More tokens, a count of accepted tokens outside of 1 to that, fewer committed tokens than
        state_tokens, or a slot without a ring: padding, on the CPU and with ``GDN_VALIDATE=1`` an error. See `ring_shape`,
        `fold_states` and `accept_draft_tree`.
    fold_phase : int
        0 to fold_every - 1, one of each layer: folds are where position + fold_phase passes a multiple of `fold_every`.
    parent_token : None
        Draft trees are refused here: use `causal_conv1d_update`, `fused_recurrent_gated_delta_rule` and `rms_norm_gated`.
    state_v_first, null_slot : bool, int
        Layout of a state, and largest slot index that means padding, as for `fused_recurrent_gated_delta_rule`.
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
    layouts = ("flat", "interleaved", "merged", "concatenated")
    heads = check_projections(mixed_qkv, z, b, a, A_log, dims, projection_layout, layouts, norm_weight is not None)
    layer = Layer(conv_weight, conv_bias, dt_bias, norm_weight, activation, gate_activation, eps)
    channels = check_layer(layer, mixed_qkv, heads, dims)
    device, length = mixed_qkv.device, mixed_qkv.shape[0]
    check.null_slot(null_slot)

    count = check.offsets("query_start_loc", query_start_loc, device, otherwise=length)
    has_offsets = query_start_loc is not None
    check.indices("state_indices", state_indices, count, device, ranks=(1, 2), has_offsets=has_offsets)
    num_columns = state_indices.shape[1] if state_indices.dim() == 2 else 1
    check.windows("conv_state", conv_state, channels, conv_weight.shape[1] - 2 + num_columns, device)
    sizes = checks.Sizes(1, length, count, num_k_heads, num_k_heads, heads, head_k_dim, head_v_dim)
    checks.check_pool("ssm_state", ssm_state, sizes, state_v_first, mixed_qkv)
    if num_accepted_tokens is not None:
        check.per_sequence("num_accepted_tokens", num_accepted_tokens, count, device, INDEX_DTYPES, has_offsets=has_offsets)
        if state_indices.dim() != 2 and ring is None:
            bad_value("num_accepted_tokens", "None without 2-D state_indices or a ring", "a tensor")
    check.optional("rounding_seed", rounding_seed, shape=(1,), dtypes=(torch.int64,), device=device)
    check_intermediate(
        intermediate_states, intermediate_indices, sizes, state_v_first, mixed_qkv, starts=("state_indices", state_indices),
        unused={"rounding_seed": rounding_seed}, has_offsets=has_offsets,
    )  # fmt: skip
    is_kept = intermediate_states is not None
    replay = Replay(ring, state_tokens, num_computed_tokens, fold_every, fold_phase)
    called = Sequences(count, ("state_indices", state_indices), num_accepted_tokens, None if has_offsets else 1, has_offsets)
    has_ring = check_replay(
        replay, called, ("ssm_state", ssm_state), (num_k_heads, heads, head_k_dim, head_v_dim),
        {"intermediate_states": intermediate_states},
    )  # fmt: skip
    if parent_token is not None:
        bad_value("parent_token", "None (the operators of the single steps take draft trees)", "a tensor")
    check.out(out, (length, heads * head_v_dim), mixed_qkv.dtype, device)
    if reads_values(device):
        bounds = values.token_bounds("query_start_loc", query_start_loc, length, 1, device)
        slots = ("state_indices", bounds, state_indices, null_slot)
        states = values.decode_slots(
            *slots,
            num_accepted_tokens=None if has_ring else num_accepted_tokens,
            first_column_decides=True,
            is_updated=not is_kept,
        )
        windows = values.window_slots(*slots, is_live=states.is_live, is_updated=not is_kept)
        if num_accepted_tokens is not None and not has_ring and validates(device):
            values.check_accepted(num_accepted_tokens, num_columns, bounds, state_indices, null_slot)
        values.check_touched(states, ssm_state, null_slot)
        values.check_touched(windows, conv_state, null_slot)
        check_intermediate_values(intermediate_states, intermediate_indices, states.is_live, null_slot)
        most = conv_state.shape[2] - conv_weight.shape[1] + 2
        check_replay_values(replay, states, ("state_indices", state_indices), bounds, num_accepted_tokens, most)

    index_dtype = common_dtype(state_indices, intermediate_indices)
    problem = GdnDecodeProblem(
        **sizes.fields(),
        width=conv_weight.shape[1],
        dtype=dtype_name(mixed_qkv.dtype),
        **dtypes_of(z=z, a=a, b=b, weight=conv_weight, bias=conv_bias, A_log=A_log, dt_bias=dt_bias, norm=norm_weight),
        **dtypes_of(conv=conv_state, state=ssm_state, cu_seqlens=query_start_loc, intermediate=intermediate_states),
        index_dtype=dtype_name(index_dtype),
        conv_channels_contiguous=is_aligned(conv_state.mT),
        state_v_first=state_v_first,
        interleaved=projection_layout == "interleaved",
        merged=projection_layout == "merged",
        concatenated=projection_layout == "concatenated",
        silu=activation is not None,
        gate_sigmoid=gate_activation == "sigmoid",
        has_columns=state_indices.dim() == 2,
        has_accepted=num_accepted_tokens is not None,
        has_rounding=rounding_seed is not None and ssm_state.dtype == torch.bfloat16,
        ring_rows=None if ring is None else ring.shape[1],
        fold_every=fold_every,
    )
    prepared = prepare(problem, device, backend)
    o = new(mixed_qkv.dtype, device, length, heads * head_v_dim) if out is None else out
    if is_empty(length, count):
        return o.zero_()
    rows, weight, bias = aligned("mixed_qkv", mixed_qkv), constant(conv_weight), optional(constant, conv_bias)
    accepted, computed = (None if x is None else make(as_int32, x) for x in (num_accepted_tokens, num_computed_tokens))
    indices, kept_rows = (checks.widened(x, index_dtype) for x in (state_indices, intermediate_indices))
    cu_seqlens = optional(Tensor.contiguous, query_start_loc)
    scale = head_k_dim**-0.5 if scale is None else scale
    params = GdnDecodeParams(
        rows, z, b, a, conv_state, weight, bias, A_log, dt_bias, norm_weight, ssm_state, indices, accepted, cu_seqlens,
        rounding_seed if problem.has_rounding else None, intermediate_states, kept_rows, ring, state_tokens, computed,
        o, scale, eps, null_slot, None if ring is None else fold_phase,
    )  # fmt: skip
    aligned_ones = (mixed_qkv, conv_weight, conv_bias, conv_state, ssm_state, intermediate_states, ring)
    launch(prepared, params, (o,), aligned=aligned_ones)
    return o
