"""The convolution of SGLang's Gated DeltaNet layers on gdn's operators, with SGLang's argument lists and layouts.

Verification of a chain of drafts leaves, for every draft, the window after it in a tensor of the host, which the host copies to
the pool for the last accepted draft. Its layouts:

    overlapping   a view [rows, T, D, w - 1] of a buffer [rows, D, T + w - 2]: window i is columns i to i + w - 2 of its row
    apart         [rows, T, D, w - 1]

Trees of drafts stay the host's: its convolution also finds the parents of their tokens, which the host reads afterwards.
"""

from collections.abc import Mapping
from typing import Any

import torch

import gdn
from gdn.integrations import _indices as indices
from gdn.integrations._calls import unserved

Tensor = torch.Tensor
NULL_SLOT = -1  # the host's padding
TREE = "a tree of drafts, whose parents the host's convolution finds"
_ACTIVATIONS = (None, "silu", "swish", True, False)
_HINTS = ("seq_lens_cpu", "block_table")  # how the host's kernel deals out its blocks


def _unserved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any, pad_slot_id: int, allowed: bool) -> str | None:
    reason = unserved(x, (weight, bias), allowed)
    if reason is not None:
        return reason
    if activation not in _ACTIVATIONS:
        return f"the activation is {activation}"
    channels, width = weight.shape
    if x.is_cuda and (channels % 8 or not 2 <= width <= 4):
        return f"no kernel for {channels} channels and a filter of {width}"
    return None if pad_slot_id == NULL_SLOT else f"padding is slot {pad_slot_id}"


def _name(activation: Any) -> str | None:
    return activation if isinstance(activation, str) else "silu" if activation else None


def prompts_refusal(
    x: Tensor, weight: Tensor, bias: Tensor | None, query_start_loc: Tensor | None, activation: Any, pad_slot_id: int,
    others: Mapping[str, Any], allow_reference: bool,
) -> str | None:  # fmt: skip
    """Why a convolution of prompts is left to the host; None where it is served."""
    unknown = [name for name, value in others.items() if name not in _HINTS and value is not None]
    if unknown:
        return f"the keyword {unknown[0]}"
    if x.dim() != 2 or query_start_loc is None:
        return "the prompts are not packed"
    return _unserved(x, weight, bias, activation, pad_slot_id, allow_reference)


def prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    conv_states: Tensor | None = None,
    activation: Any = "silu",
    pad_slot_id: int = NULL_SLOT,
    **others: Any,
) -> Tensor:
    """Convolution of packed prompts x [D, tokens], a view of rows; windows are updated in their slots. Returns such a view."""
    options: dict[str, Any] = {"query_start_loc": query_start_loc, "cache_indices": cache_indices}
    options["has_initial_state"] = has_initial_state
    return rows_of_prompts(x.transpose(0, 1), weight, bias, conv_states, _name(activation), **options).transpose(0, 1)


def rows_of_prompts(
    rows: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor | None, activation: str | None, **options: Any
) -> Tensor:
    """The operator on rows [tokens, D]."""
    return gdn.causal_conv1d_fn(rows, weight, bias, conv_states=pool, activation=activation, null_slot=NULL_SLOT, **options)


def update_refusal(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any, cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None, num_accept_tokens: Tensor | None, intermediate_conv_window: Tensor | None,
    intermediate_state_indices: Tensor | None, retrieve_next_token: Tensor | None, pad_slot_id: int, allow_reference: bool,
) -> str | None:  # fmt: skip
    """Why a convolution of a decode step, or of drafts, is left to the host; None where it is served."""
    if cache_seqlens is not None or num_accept_tokens is not None:
        return "the windows are rings" if cache_seqlens is not None else "accepted tokens are given"
    if retrieve_next_token is not None:
        return TREE
    windows = intermediate_conv_window
    if windows is not None:
        if x.dim() != 3 or conv_state_indices is None or intermediate_state_indices is None:
            return "windows of drafts without their slots"
        steps, width = x.shape[2], weight.shape[1]
        if windows.dim() != 4 or windows.shape[1] < steps or windows.shape[3] != width - 1 or _layout(windows) is None:
            return f"windows of drafts with shape {list(windows.shape)} and strides {windows.stride()}"
    return _unserved(x, weight, bias, activation, pad_slot_id, allow_reference)


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = NULL_SLOT,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """Convolution of one token a row x [N, D], whose windows are updated, or of drafts x [N, D, T], whose windows are kept."""
    name, windows = _name(activation), intermediate_conv_window
    if windows is None:
        return gdn.causal_conv1d_update(
            x, conv_state, weight, bias, name, conv_state_indices=conv_state_indices, null_slot=NULL_SLOT
        )
    assert conv_state_indices is not None and intermediate_state_indices is not None  # else refused
    count, channels, steps = x.shape
    slots, kept = conv_state_indices[:count], intermediate_state_indices[:count]
    y = rows_of_drafts(x, conv_state, weight, bias, name, slots, windows, kept)
    return y.view(count, steps, channels).transpose(1, 2)


def rows_of_drafts(
    x: Tensor, pool: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, slots: Tensor, windows: Tensor,
    kept: Tensor,
) -> Tensor:  # fmt: skip
    """The operator on drafts x [N, D, T], whose windows go to the rows `kept`. Returns rows [N * T, D]."""
    count, channels, steps = x.shape
    rows = x.transpose(1, 2).reshape(count * steps, channels)
    convolve = _overlapping if _layout(windows) == "overlapping" else _apart
    return convolve(rows, (count, steps), pool, weight, bias, activation, slots, windows, kept)


def _layout(windows: Tensor) -> str | None:
    """Layout of windows [rows, T, D, w - 1]; None for another one."""
    row, step, _, column = windows.stride()
    if step == column:
        return "overlapping"
    return "apart" if row == windows.shape[1] * step or windows.shape[0] == 1 else None


def _overlapping(
    rows: Tensor, sizes: tuple[int, int], pool: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    slots: Tensor, windows: Tensor, kept: Tensor,
) -> Tensor:  # fmt: skip
    """In the buffer of the view a row is a slot of drafts, as the operator leaves it: the window before, then every input."""
    (count, steps), width = sizes, weight.shape[1]
    row, _, channel, column = windows.stride()
    size = (windows.shape[0], windows.shape[2], windows.shape[1] + width - 2)
    buffer = windows.as_strided(size, (row, channel, column))
    before = pool.narrow(2, 0, width - 1).index_select(0, slots.clamp(min=0))
    buffer.narrow(2, 0, width - 1).index_copy_(0, kept.long(), before.to(buffer.dtype))
    own = torch.where(slots < 0, NULL_SLOT, kept)  # rows of padding share a row of the buffer, which nobody reads
    return gdn.causal_conv1d_update(
        rows, buffer, weight, bias, activation, conv_state_indices=own[:, None].expand(-1, steps),
        query_start_loc=indices.offsets(count, steps, rows.device), null_slot=NULL_SLOT,
    )  # fmt: skip


def _apart(
    rows: Tensor, sizes: tuple[int, int], pool: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None,
    slots: Tensor, windows: Tensor, kept: Tensor,
) -> Tensor:  # fmt: skip
    """The windows are checkpoints after every token. The pool keeps the last one, as the host's own kernel leaves it."""
    (count, steps), device = sizes, rows.device
    places = indices.slots(steps, device, kept.dtype)
    return gdn.causal_conv1d_fn(
        rows, weight, bias, conv_states=pool, query_start_loc=indices.offsets(count, steps, device), cache_indices=slots,
        activation=activation, null_slot=NULL_SLOT, checkpoint_windows=windows.flatten(0, 1),
        checkpoint_offsets=(places + 1).expand(count, -1), checkpoint_slots=kept[:, None] * windows.shape[1] + places,
    )  # fmt: skip
