"""Causal depthwise convolution of small width in plain torch, with its sliding window in a pool of slots.

    y[t] = activation(bias + sum_j weight[:, j] * x[t - (w - 1) + j])        weight[:, w - 1] multiplies the current token

A slot [dim, columns] keeps raw inputs, oldest first. Computed in float32 (float64 where x is float64). Indices are compared
as Python ints, so that no integer width can change their meaning. `out` may be x: it is written at the end.
"""

import torch
from torch import Tensor

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
