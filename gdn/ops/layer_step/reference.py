"""The steps around the recurrence in plain torch: split, gates, gated norm, and one whole decode step.

Causal depthwise convolution of small width in plain torch, with its sliding window in a pool of slots.

    y[t] = activation(bias + sum_j weight[:, j] * x[t - (w - 1) + j])        weight[:, w - 1] multiplies the current token

A slot [dim, columns] keeps raw inputs, oldest first. Computed in float32 (float64 where x is float64). Indices are compared
as Python ints, so that no integer width can change their meaning. `out` may be x: it is written at the end.

The whole prefill step of a Gated DeltaNet layer between its projections, in plain torch.
"""

from typing import Any

import torch
from torch import Tensor

from gdn.ops.delta_rule.reference import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, largest_chunk_operand
from gdn.ops.delta_rule.reference_replay import Ring
from gdn.reference_modes import compute_dtype, inference_only, listed, ranges


@inference_only
def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None, cache_indices: Tensor | None = None, has_initial_state: Tensor | None = None,
    activation: str | None = "silu", checkpoint_offsets: Tensor | None = None, checkpoint_slots: Tensor | None = None,
    checkpoint_windows: Tensor | None = None, null_slot: int = -1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.causal_conv1d_fn`: packed prefill, x [tokens, dim]."""
    window = weight.shape[1] - 1
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    sequences = [(0, x.shape[0])] if query_start_loc is None else ranges(query_start_loc)
    slots = list(range(len(sequences))) if cache_indices is None else cache_indices.tolist()
    is_continued, offsets, offset_slots = map(listed, (has_initial_state, checkpoint_offsets, checkpoint_slots))
    kept = conv_states if checkpoint_windows is None else checkpoint_windows

    for n, (start, end) in enumerate(sequences):
        if start == end or (cache_indices is not None and slots[n] <= null_slot):
            continue
        tokens = x[start:end].t()  # [dim, T]
        history = tokens.new_zeros(tokens.shape[0], window)
        if conv_states is not None and (is_continued is None or is_continued[n]):
            history = conv_states[slots[n], :, :window].to(x.dtype)
        line = torch.cat([history, tokens], dim=1)  # column i + window is token i
        y[start:end] = _convolve(line, weight, bias, activation).t().to(y.dtype)
        if conv_states is not None:
            conv_states[slots[n], :, :window] = line[:, line.shape[1] - window :].to(conv_states.dtype)
        if offsets is not None and kept is not None:
            for offset, slot in zip(offsets[n], offset_slots[n], strict=True):
                if 0 < offset <= end - start and slot > null_slot:
                    kept[slot, :, :window] = line[:, offset : offset + window].to(kept.dtype)
    return y if out is None else out.copy_(y)


@inference_only
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = "silu", *,
    conv_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None, query_start_loc: Tensor | None = None,
    parent_token: Tensor | None = None, null_slot: int = -1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.causal_conv1d_update`: decode, x [tokens, dim], [B, dim] or [B, dim, T]."""
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if query_start_loc is None:
        inputs, outputs = (list(rows.unsqueeze(-1) if x.dim() == 2 else rows) for rows in (x, y))  # per sequence, [dim, T]
        first_rows = [n * inputs[0].shape[1] for n in range(len(inputs))]
    else:
        sequences = ranges(query_start_loc)
        inputs, outputs = ([rows[start:end].t() for start, end in sequences] for rows in (x, y))
        first_rows = [start for start, _ in sequences]

    window = weight.shape[1] - 1
    rows = [[n] for n in range(len(inputs))]
    if conv_state_indices is not None:
        rows = (conv_state_indices[:, None] if conv_state_indices.dim() == 1 else conv_state_indices).tolist()
    two_dimensional = conv_state_indices is not None and conv_state_indices.dim() == 2
    is_speculative = num_accepted_tokens is not None or two_dimensional
    accepted, parents = listed(num_accepted_tokens), None if parent_token is None else parent_token.flatten().tolist()

    for n, tokens in enumerate(inputs):
        column = 0 if accepted is None else accepted[n] - 1  # column of the last accepted token
        is_per_node = parents is not None and two_dimensional
        last_start = column if is_per_node else conv_state.shape[2] - window
        if two_dimensional:
            last_start = min(last_start, len(rows[n]) - 1)
        if tokens.shape[1] == 0 or not 0 <= column <= last_start:
            continue
        # A draft tree keeps one window per node, in the node's own slot; a line of drafts, or a tree with 1-D indices, keeps one
        # line in the first slot.
        slot, first = (rows[n][column], 0) if is_per_node else (rows[n][0], column)
        if conv_state_indices is not None and slot <= null_slot:
            continue
        history = conv_state[slot, :, first : first + window].to(x.dtype)

        if parents is not None:
            windows: list[Tensor] = []
            for i in range(tokens.shape[1]):
                parent = parents[first_rows[n] + i]
                line = torch.cat([history if parent < 0 else windows[parent], tokens[:, i : i + 1]], dim=1)
                outputs[n][:, i : i + 1] = _convolve(line, weight, bias, activation).to(y.dtype)
                windows.append(line[:, 1:])
            if not is_per_node:
                kept = torch.cat([history, tokens], dim=1)[:, 1:][:, : conv_state.shape[2]]
                conv_state[slot, :, : kept.shape[1]] = kept.to(conv_state.dtype)
                continue
            for i, node_slot in enumerate(rows[n][: tokens.shape[1]]):
                if node_slot > null_slot:
                    conv_state[node_slot, :, :window] = windows[i].to(conv_state.dtype)
            continue

        line = torch.cat([history, tokens], dim=1)
        outputs[n].copy_(_convolve(line, weight, bias, activation))
        kept = line[:, 1:] if is_speculative else line[:, line.shape[1] - window :]
        kept = kept[:, : conv_state.shape[2]]
        conv_state[slot, :, : kept.shape[1]] = kept.to(conv_state.dtype)
    return y if out is None else out.copy_(y)


def _convolve(line: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """line [dim, w - 1 + T] -> [dim, T]."""
    dtype, width = compute_dtype(line), weight.shape[1]
    line, weight, length = line.to(dtype), weight.to(dtype), line.shape[1] - width + 1
    y = sum(weight[:, j : j + 1] * line[:, j : j + length] for j in range(width))
    assert isinstance(y, Tensor)
    if bias is not None:
        y = y + bias.to(dtype)[:, None]
    return torch.nn.functional.silu(y) if activation in ("silu", "swish") else y


@inference_only
def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias), beta_output = sigmoid(b); a, b [..., HV] -> float32 of their shape, contiguous."""
    dtype = compute_dtype(a)
    softplus = torch.nn.functional.softplus(a.to(dtype) + dt_bias.to(dtype), beta=beta, threshold=threshold)
    g, beta_output = -A_log.to(dtype).exp() * softplus, b.to(dtype).sigmoid()
    return g.contiguous(), beta_output.contiguous()  # an elementwise result takes the strides of its input


@inference_only
def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits [q | k | v (r heads) | z (r heads)] and [b (r) | a (r)] per key-head group into mixed_qkv, z, b, a: new tensors."""
    ratio = num_heads_v // num_heads_qk
    length = mixed_qkvz.shape[0]
    groups = mixed_qkvz.reshape(length, num_heads_qk, mixed_qkvz.shape[1] // num_heads_qk)
    q, k, v, z = groups.split([head_qk, head_qk, ratio * head_v, ratio * head_v], dim=2)
    mixed_qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
    b, a = mixed_ba.reshape(length, num_heads_qk, 2 * ratio).split(ratio, dim=2)

    def new(part: Tensor, *shape: int) -> Tensor:
        # Not contiguous(): for one token or one group that is a view of the input.
        return part.reshape(length, *shape).clone(memory_format=torch.contiguous_format)

    return mixed_qkv, new(z, num_heads_v, head_v), new(b, num_heads_v), new(a, num_heads_v)


def _taken_apart(
    mixed_qkv: Tensor, z: Tensor | None, b: Tensor | None, a: Tensor | None, num_v_heads: int, dims: tuple[int, int, int],
    layout: str,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Rows of the projections of any layout as those of the flat one. dims: H, K and V."""
    num_k_heads, head_k_dim, head_v_dim = dims
    if layout == "concatenated":
        gates_at = 2 * num_k_heads * head_k_dim + 2 * num_v_heads * head_v_dim
        mixed_qkv, b = mixed_qkv[:, :gates_at], mixed_qkv[:, gates_at : gates_at + 2 * num_v_heads]
    assert b is not None  # checked by the operator, as below
    if layout == "interleaved":
        return fused_qkvzba_split_reshape_cat(mixed_qkv, b, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    if layout != "flat":  # views of [q | k | v | z] and [b | a]
        values = num_v_heads * head_v_dim
        mixed_qkv, z = mixed_qkv.split_with_sizes([mixed_qkv.shape[1] - values, values], 1)
        b, a = b.split_with_sizes([num_v_heads, num_v_heads], 1)
        return mixed_qkv, z.unflatten(1, (num_v_heads, head_v_dim)), b, a
    assert a is not None
    return mixed_qkv, z, b, a


@inference_only
def rms_norm_gated(x: Tensor, z: Tensor, weight: Tensor, eps: float = 1e-6, activation: str = "silu") -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * activation(z) over the last dim; the dtype of x, contiguous."""
    dtype = compute_dtype(x)
    wide, gate = x.to(dtype), z.to(dtype)
    gate = gate.sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(gate)
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (normed * weight.to(dtype) * gate).to(x.dtype).contiguous()


@inference_only
def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    layer_scale: Tensor | None = None,
    zero_centred: bool = True,
) -> tuple[Tensor, Tensor]:
    """s = residual + x * (1 + layer_scale), rounded to their dtype, and s / sqrt(mean(s^2) + eps) * (1 + weight); contiguous.

    Without a residual s is x itself.
    """
    dtype, total = compute_dtype(x), x
    if residual is not None:
        scaled = x.to(dtype) if layer_scale is None else x.to(dtype) * (1 + layer_scale.to(dtype))
        total = (scaled + residual.to(dtype)).to(x.dtype).contiguous()
    wide, gain = total.to(dtype), weight.to(dtype)
    if zero_centred:
        gain = gain + 1
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain).to(x.dtype).contiguous(), total


@inference_only
def fused_gdn_decode(
    mixed_qkv: Tensor, z: Tensor | None, b: Tensor | None, a: Tensor | None, conv_state: Tensor, conv_weight: Tensor,
    A_log: Tensor, dt_bias: Tensor, norm_weight: Tensor | None, ssm_state: Tensor, state_indices: Tensor, *,
    conv_bias: Tensor | None = None, query_start_loc: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    num_k_heads: int, head_k_dim: int, head_v_dim: int, scale: float | None = None, eps: float = 1e-6,
    activation: str | None = "silu", gate_activation: str = "silu", projection_layout: str = "flat",
    rounding_seed: Tensor | None = None, intermediate_states: Tensor | None = None, intermediate_indices: Tensor | None = None,
    ring: Tensor | None = None, state_tokens: Tensor | None = None, num_computed_tokens: Tensor | None = None,
    fold_every: int | None = None, fold_phase: int = 0, parent_token: Tensor | None = None, state_v_first: bool = False,
    null_slot: int = -1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.fused_gdn_decode`, as the composition of its steps; intermediate results have the dtype of mixed_qkv.

    A sequence that is padding in one step is padding in all of them.
    """
    num_v_heads, dims = A_log.shape[0], (num_k_heads, head_k_dim, head_v_dim)
    mixed_qkv, z, b, a = _taken_apart(mixed_qkv, z, b, a, num_v_heads, dims, projection_layout)
    length = mixed_qkv.shape[0]
    if query_start_loc is None:  # one token each; indices may have more rows than there are tokens
        query_start_loc = torch.arange(length + 1, dtype=torch.int32, device=mixed_qkv.device)
    if state_indices.dim() == 2:
        state_indices = _without_padding(state_indices, num_accepted_tokens, query_start_loc.shape[0] - 1, null_slot)

    replay: dict[str, Any] = {}
    if ring is not None:
        assert state_tokens is not None and num_computed_tokens is not None and fold_every is not None
        integers = Ring(
            ring, state_tokens, num_computed_tokens, num_accepted_tokens, fold_every, fold_phase, num_k_heads, null_slot
        )
        lengths = [end - start for start, end in ranges(query_start_loc)]
        most = conv_state.shape[2] - conv_weight.shape[1] + 2
        is_live = [place is not None for place in integers.places(state_indices.tolist(), lengths, most)]
        live = torch.tensor(is_live, dtype=torch.bool, device=state_indices.device)
        state_indices = state_indices[: len(lengths)].masked_fill(~live, null_slot)
        replay = {"ring": ring, "state_tokens": state_tokens, "num_computed_tokens": num_computed_tokens}
        replay |= {"fold_every": fold_every, "fold_phase": fold_phase}
    slots: dict[str, Any] = {"num_accepted_tokens": num_accepted_tokens, "null_slot": null_slot}
    if intermediate_states is not None:
        conv_state = conv_state.clone()  # the pools stay as they are
    window: dict[str, Any] = {"conv_state_indices": state_indices, "query_start_loc": query_start_loc}
    x = causal_conv1d_update(mixed_qkv, conv_state, conv_weight, conv_bias, activation, **window, **slots)
    q, k, v = split_heads(x, num_k_heads, head_k_dim, num_v_heads, head_v_dim)
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    state: dict[str, Any] = {"ssm_state_indices": state_indices, "state_v_first": state_v_first, "rounding_seed": rounding_seed}
    o, _ = fused_recurrent_gated_delta_rule(
        q, k, v, g[None], beta[None], scale, ssm_state, None, query_start_loc, use_qk_l2norm_in_kernel=True,
        intermediate_states=intermediate_states, intermediate_indices=intermediate_indices, **state, **slots, **replay,
    )  # fmt: skip
    o = o[0]
    if norm_weight is not None:
        assert z is not None
        is_padding = (o == 0).all(-1, keepdim=True)  # z may hold anything there
        o = rms_norm_gated(o, z, norm_weight, eps, gate_activation).masked_fill(is_padding, 0)
    result = o.reshape(length, num_v_heads * head_v_dim)
    return result if out is None else out.copy_(result)


def _without_padding(state_indices: Tensor, num_accepted_tokens: Tensor | None, count: int, null_slot: int) -> Tensor:
    """Rows of the sequences, entirely null where the slot of the window (column 0) or of the state is null."""
    used = state_indices[:count]
    column = torch.zeros(count, dtype=torch.int64, device=used.device)
    if num_accepted_tokens is not None:
        column = num_accepted_tokens[:count].long() - 1
    read = used.gather(1, column.clamp(0, used.shape[1] - 1)[:, None])
    is_padding = (used[:, :1] <= null_slot) | (read <= null_slot)
    return used.masked_fill(is_padding, null_slot)


@inference_only
def fused_gdn_prefill(
    mixed_qkv: Tensor, z: Tensor | None, b: Tensor, a: Tensor | None, conv_states: Tensor, conv_weight: Tensor, A_log: Tensor,
    dt_bias: Tensor, norm_weight: Tensor | None, ssm_state: Tensor, state_indices: Tensor, *, query_start_loc: Tensor,
    has_initial_state: Tensor | None = None, conv_bias: Tensor | None = None, num_k_heads: int, head_k_dim: int, head_v_dim: int,
    scale: float | None = None, eps: float = 1e-6, activation: str | None = "silu", gate_activation: str = "silu",
    projection_layout: str = "flat", checkpoint_offsets: Tensor | None = None, checkpoint_slots: Tensor | None = None,
    checkpoint_states: Tensor | None = None, checkpoint_windows: Tensor | None = None, state_v_first: bool = False,
    null_slot: int = -1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gdn.fused_gdn_prefill`, as the composition of its steps; intermediate results have the dtype of mixed_qkv."""
    num_v_heads, dims = A_log.shape[0], (num_k_heads, head_k_dim, head_v_dim)
    mixed_qkv, z, b, a = _taken_apart(mixed_qkv, z, b, a, num_v_heads, dims, projection_layout)
    both: dict[str, Any] = {"has_initial_state": has_initial_state, "null_slot": null_slot}
    # With a tensor for one kind alone the other kind is not kept.
    checkpoints: dict[str, Any] = {"checkpoint_offsets": checkpoint_offsets, "checkpoint_slots": checkpoint_slots}
    in_pools = checkpoint_states is None and checkpoint_windows is None
    of_windows = checkpoints | {"checkpoint_windows": checkpoint_windows} if in_pools or checkpoint_windows is not None else {}
    of_states = checkpoints | {"checkpoint_states": checkpoint_states} if in_pools or checkpoint_states is not None else {}
    x = causal_conv1d_fn(
        mixed_qkv, conv_weight, conv_bias, conv_states=conv_states, query_start_loc=query_start_loc,
        cache_indices=state_indices, activation=activation, **both, **of_windows,
    )  # fmt: skip
    length = x.shape[0]
    q, k, v = split_heads(x, num_k_heads, head_k_dim, num_v_heads, head_v_dim)
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    o, _ = chunk_gated_delta_rule(
        q, k, v, g[None], beta[None], scale, ssm_state, use_qk_l2norm_in_kernel=True, cu_seqlens=query_start_loc,
        state_v_first=state_v_first, state_indices=state_indices, **both, **of_states,
    )  # fmt: skip
    is_live = torch.zeros(length, dtype=torch.bool, device=mixed_qkv.device)
    for (start, end), slot in zip(ranges(query_start_loc), state_indices.tolist(), strict=False):
        is_live[start:end] = slot > null_slot
    # Rows of padding: z may hold anything there.
    result = o[0].flatten(1)
    if norm_weight is not None:
        assert z is not None  # checked by the operator
        result = rms_norm_gated(o[0], z, norm_weight, eps, gate_activation).flatten(1)
        result[~is_live] = 0
    return result if out is None else out.copy_(result)


def split_heads(x: Tensor, num_k_heads: int, head_k_dim: int, num_v_heads: int, head_v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [1, L, H, K] and v [1, L, HV, V] of the convolution's rows [L, 2 * H * K + HV * V]."""
    keys = num_k_heads * head_k_dim
    parts = x.split([keys, keys, num_v_heads * head_v_dim], dim=1)
    shapes = ((num_k_heads, head_k_dim), (num_k_heads, head_k_dim), (num_v_heads, head_v_dim))
    q, k, v = (part.reshape(1, x.shape[0], *shape) for part, shape in zip(parts, shapes, strict=True))
    return q, k, v


@inference_only
def largest_prefill_operand(
    mixed_qkv: Tensor, b: Tensor, a: Tensor | None, scale: float | None, conv_states: Tensor, conv_weight: Tensor,
    A_log: Tensor, dt_bias: Tensor, ssm_state: Tensor, state_indices: Tensor, *, query_start_loc: Tensor,
    has_initial_state: Tensor | None, conv_bias: Tensor | None, dims: tuple[int, int, int], activation: str | None,
    projection_layout: str, state_v_first: bool, null_slot: int,
) -> tuple[float, str]:  # fmt: skip
    """`largest_chunk_operand` of a prefill step's delta rule. Nothing is written. dims: H, K and V."""
    (num_k_heads, head_k_dim, head_v_dim), num_v_heads = dims, A_log.shape[0]
    mixed_qkv, _, b, a = _taken_apart(mixed_qkv, None, b, a, num_v_heads, dims, projection_layout)
    x = causal_conv1d_fn(
        mixed_qkv, conv_weight, conv_bias, conv_states=conv_states.clone(), query_start_loc=query_start_loc,
        cache_indices=state_indices, activation=activation, has_initial_state=has_initial_state, null_slot=null_slot,
    )  # fmt: skip
    q, k, v = split_heads(x, num_k_heads, head_k_dim, num_v_heads, head_v_dim)
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    return largest_chunk_operand(
        q, k, v, g[None], beta[None], scale, ssm_state, True, query_start_loc, state_v_first=state_v_first,
        state_indices=state_indices, has_initial_state=has_initial_state, null_slot=null_slot,
    )  # fmt: skip
