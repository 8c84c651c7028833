"""Public operators `causal_conv1d_fn` (prefill) and `causal_conv1d_update` (decode): the convolution before the recurrence."""

import functools
from typing import Any

import torch
from torch import Tensor

from gdn.core import check, values
from gdn.core.call import always, launch, make, new, operator, prepare, reads_values, take_contiguous, validates
from gdn.core.check import CONV_ACTIVATIONS, FLOAT_DTYPES, INDEX_DTYPES, bad_value, dtype_name, is_less
from gdn.core.constants import even_offsets
from gdn.core.modes import address, is_empty
from gdn.core.tensors import aligned, as_int32, as_int64, common_dtype, constant, dtypes_of, is_aligned, optional, target
from gdn.ops.delta_rule.checks import widened
from gdn.ops.layer_step import reference
from gdn.ops.layer_step.problem import Conv1dParams, Conv1dProblem, Conv1dUpdateParams, Conv1dUpdateProblem
from gdn.runtime.registry import Backend


@operator(
    reference.causal_conv1d_fn,
    writes={"out": always, "conv_states": always, "checkpoint_windows": always},
    in_place={"out": "x"},
    varies=("x", "query_start_loc"),
    contiguous=("x",),
)
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    conv_states: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | None = "silu",
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    checkpoint_windows: Tensor | None = None,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Causal depthwise convolution of packed prompts.

        y[t] = activation(bias + sum_j weight[:, j] * x[t - (w - 1) + j])

    Sums are float32 (float64 where `x` is float64).

    Parameters
    ----------
    x : Tensor [tokens, dim]
        Inputs, channels last; any float dtype. A last dimension that is not contiguous is copied, logged once. (Other packages
        take [dim, tokens]; where both sizes are equal, such a call cannot be distinguished from a correct one.)
    weight, bias : Tensor [dim, w], Tensor [dim] or None
        Filter, w >= 2 (weight[:, -1] multiplies the current token), and bias; any float dtypes.
    conv_states : Tensor [slots, dim, columns >= w - 1], optional
        Windows, any strides (either order of the last two dimensions in memory), any float dtype, updated in place: columns
        0..w-2 of a slot hold the last w - 1 raw inputs, oldest first; columns from w - 1 on are untouched. A sequence shorter
        than w - 1 leaves its inputs after the newest of the old window (or of zeros). None = start from zeros, keep nothing.
    query_start_loc : Tensor [N + 1], optional
        Token offsets of the sequences, int32 or int64, starting at 0. Rows at or beyond query_start_loc[-1] are padding: zero
        in y. None = one sequence, and what is [>= N] here has exactly one row; else rows beyond N are ignored.
    cache_indices : Tensor [>= N], optional
        Slot of each sequence, int32 or int64. A slot <= `null_slot` is padding: zero rows, no slot read or written. An empty
        sequence touches nothing. None = 0, 1, 2, ...
    has_initial_state : Tensor [>= N] of bool, optional
        False = zeros are to the left of that sequence. None = all True.
    activation : {"silu", "swish"} or None
        Activation of the sum; both names mean SiLU.
    checkpoint_offsets, checkpoint_slots : Tensor [>= N, C], optional
        Token counts, and slots: the window after that many tokens is also stored in that slot. 0 and counts beyond the sequence
        store nothing. Both require `conv_states` or `checkpoint_windows`.
    checkpoint_windows : Tensor [rows, dim, columns >= w - 1], optional
        Where checkpoints go instead of `conv_states`: `checkpoint_slots` are then its rows. Any strides, any float dtype; columns
        0..w-2 of a row take the window.
    null_slot, out : int, Tensor [tokens, dim] or None
        Largest slot index that means padding, >= -1 (vLLM's convention is 0); tensor to write y into, dtype of `x`, last
        dimension contiguous. `out` may be `x` itself (in place; one more pass, since blocks read the rows before their own), and
        shares no element with any other argument.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    Tensor [tokens, dim]
        y in the dtype of `x`; `out` itself where it is given.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written; slots as for `chunk_gated_delta_rule`.

    References
    ----------
    .. [1] The name and the states are those of ``causal_conv1d_fn`` in vLLM, which follows the causal-conv1d package of Mamba.
    """
    check.tensor("x", x, shape=("tokens", "dim"), dtypes=FLOAT_DTYPES)
    check_filter(x, weight, bias, activation)
    check.null_slot(null_slot)
    device = x.device
    count = check.offsets("query_start_loc", query_start_loc, device, otherwise=1)
    if conv_states is not None:
        check.windows("conv_states", conv_states, x.shape[1], weight.shape[1] - 1, device)
        if cache_indices is None and is_less(conv_states.shape[0], count):
            bad_value("conv_states", f"at least {count} slots without cache_indices", f"shape {list(conv_states.shape)}")
    has_offsets, pool = query_start_loc is not None, ("conv_states", conv_states)
    if checkpoint_windows is not None:
        pool = ("checkpoint_windows", checkpoint_windows)
        check.windows("checkpoint_windows", checkpoint_windows, x.shape[1], weight.shape[1] - 1, device, slots="rows")
    if cache_indices is not None:
        check.indices("cache_indices", cache_indices, count, device, ranks=(1,), has_offsets=has_offsets)
    check.per_sequence("has_initial_state", has_initial_state, count, device, (torch.bool,), has_offsets=has_offsets)
    check.checkpoints(checkpoint_offsets, checkpoint_slots, pool, count, has_offsets=has_offsets)
    check.needs_checkpoints("checkpoint_windows", checkpoint_windows, checkpoint_offsets)
    check.optional("out", out, shape=x.shape, dtypes=(x.dtype,), device=device, last_contiguous=x.dim() == 2)
    if reads_values(device):
        bounds = values.token_bounds("query_start_loc", query_start_loc, 1, x.shape[0], device)
        in_pool = checkpoint_windows is None
        touched = values.prefill_slots(
            "cache_indices", bounds, cache_indices, null_slot, checkpoint_offsets=checkpoint_offsets if in_pool else None,
            checkpoint_slots=checkpoint_slots if in_pool else None, checkpoint_multiple=1,
        )  # fmt: skip
        kept, is_live = (checkpoint_windows,), touched.is_live
        values.check_checkpoints(checkpoint_offsets, checkpoint_slots, kept, bounds, is_live, null_slot, multiple=1)
        if conv_states is not None:
            values.check_touched(touched, conv_states, null_slot)

    slot_dtype = common_dtype(cache_indices, checkpoint_slots)
    if conv_states is None:
        has_initial_state = None
    problem = problem_of(
        x, weight, bias, activation, conv_states, query_start_loc, count, None if cache_indices is None else slot_dtype,
        has_mask=has_initial_state is not None,
        checkpoints=(None if checkpoint_slots is None else slot_dtype, checkpoint_windows),
    )  # fmt: skip
    prepared = prepare(problem, device, backend)
    y = new(x.dtype, device, *x.shape) if out is None else out
    if is_empty(*x.shape, count):
        return y.zero_()
    # In place, a block would read rows before its own that another block may have written already.
    written = torch.empty_like(y, memory_format=torch.contiguous_format) if address(y) == address(x) else target(y)
    whole = functools.partial(even_offsets, 1, x.shape[0], device)
    cu_seqlens = make(whole) if query_start_loc is None else query_start_loc.contiguous()
    slots, checkpoints = (widened(i, slot_dtype) for i in (cache_indices, checkpoint_slots))
    mask = None if has_initial_state is None else make(_as_bytes, has_initial_state)
    as_slots = as_int32 if slot_dtype == torch.int32 else as_int64
    offsets = None if checkpoint_offsets is None else make(as_slots, checkpoint_offsets)
    rows, bias = aligned("x", x), optional(constant, bias)
    params = Conv1dParams(
        rows, constant(weight), bias, conv_states, cu_seqlens, slots, mask, offsets, checkpoints, checkpoint_windows, written,
        null_slot,
    )  # fmt: skip
    launch(prepared, params, (y,) if written is y else None, aligned=(x, weight, bias, conv_states, out))
    return y if written is y else y.copy_(written)


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@operator(
    reference.causal_conv1d_update, writes={"out": always, "conv_state": always}, in_place={"out": "x"},
    varies=("x", "query_start_loc"),
)  # fmt: skip
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    *,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    parent_token: Tensor | None = None,
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Causal depthwise convolution of a decode step, with its window in a pool of slots.

    The formula is that of `causal_conv1d_fn`. A sequence without tokens touches nothing.

    Parameters
    ----------
    x : Tensor [tokens, dim], [B, dim] or [B, dim, T]
        Inputs, any float dtype: packed ragged tokens with `query_start_loc`, one token for each of B sequences, or T tokens
        for each of them (any strides; in the other forms a last dimension that is not contiguous is copied, logged once).
    conv_state : Tensor [slots, dim, columns >= w - 1]
        Windows of raw inputs, oldest first; any strides, any float dtype; updated in place.
    weight, bias, activation : Tensor [dim, w], Tensor [dim] or None, str or None
        As for `causal_conv1d_fn`.
    conv_state_indices : Tensor [>= N] or [>= N, 1 + num_spec], optional
        Slots, int32 or int64. A slot <= `null_slot` is padding: zero rows, nothing touched. None = 0, 1, 2, ...
        [>= N]: the window of a sequence is columns 0..w-2 of its slot, and afterwards the last w - 1 of [window | inputs] are
        there.
        [>= N, 1 + num_spec], speculative decoding: the sequence's one slot is conv_state_indices[n, 0]. With
        columns = w - 1 + num_spec, its window starts at column num_accepted_tokens[n] - 1 (0 without `num_accepted_tokens`),
        and afterwards the slot holds that window shifted by one, followed by all of this step's inputs.
    num_accepted_tokens : Tensor [>= N], optional
        Accepted tokens of the previous step, int32 (or int64), 1..1 + num_spec; outside, the sequence is padding.
    query_start_loc : Tensor [N + 1], optional
        Token offsets of packed sequences, int32 or int64, starting at 0. None = N is B, and what is [>= N] here has exactly N
        rows; else rows beyond N are ignored.
    parent_token : Tensor [tokens] of int32, optional
        Draft tree. Node i follows the window of its parent, -1: the window before the first token. With 2-D indices that one is
        in slot conv_state_indices[n, num_accepted_tokens[n] - 1], and the node's own goes to columns 0..w-2 of slot
        conv_state_indices[n, i]. With 1-D indices (replay decode) the one slot has the inputs of all nodes in token order, as
        with a line of drafts: the window starts at column num_accepted_tokens[n] - 1, and afterwards the slot holds it shifted
        by one, followed by all of this step's inputs.
    null_slot, out : int, Tensor or None
        `null_slot`: see `causal_conv1d_fn`. `out` has the shape and dtype of `x`; it is `x` (in place) or overlaps no argument.
    backend : {"tilelang", "cute", "reference"}, optional
        Implementation to run; ValueError where it cannot. None = chosen by ``GDN_BACKEND`` and the tables, see `gdn.explain`.

    Returns
    -------
    Tensor
        y, of the shape and dtype of `x`; `out` itself where it is given.

    Raises
    ------
    TypeError, ValueError
        Named after the argument, before anything is launched or written; slots as for `chunk_gated_delta_rule`.

    References
    ----------
    .. [1] The positional arguments are those of ``causal_conv1d_update`` in vLLM, after the causal-conv1d package of Mamba.
    """
    check.tensor("x", x, dtypes=FLOAT_DTYPES)
    if x.dim() not in ((2,) if query_start_loc is not None else (2, 3)):
        wanted = "[tokens, dim]" if query_start_loc is not None else "[B, dim] or [B, dim, T]"
        bad_value("x", f"shape {wanted}", f"shape {list(x.shape)}")
    if x.dim() == 2:  # [B, dim, T] may have any strides
        x = take_contiguous("x", x)
    device, dim = x.device, x.shape[1]
    check_filter(x, weight, bias, activation)
    check.null_slot(null_slot)
    window = weight.shape[1] - 1
    num_tokens = x.shape[0] * (x.shape[2] if x.dim() == 3 else 1)
    count = check.offsets("query_start_loc", query_start_loc, device, otherwise=x.shape[0])
    num_spec = 0
    has_offsets = query_start_loc is not None
    if conv_state_indices is not None:
        check.indices("conv_state_indices", conv_state_indices, count, device, ranks=(1, 2), has_offsets=has_offsets)
        if conv_state_indices.dim() == 2 and parent_token is None:
            num_spec = conv_state_indices.shape[1] - 1
    check.windows("conv_state", conv_state, dim, window + num_spec, device)
    if conv_state_indices is None and is_less(conv_state.shape[0], count):
        bad_value("conv_state", f"at least {count} slots without conv_state_indices", f"shape {list(conv_state.shape)}")
    check.per_sequence("num_accepted_tokens", num_accepted_tokens, count, device, INDEX_DTYPES, has_offsets=has_offsets)
    if parent_token is not None:
        check.tensor("parent_token", parent_token, shape=(num_tokens,), dtypes=(torch.int32,), device=device)
        if conv_state_indices is None:
            bad_value("parent_token", "None without conv_state_indices", "a tensor")
    check.optional("out", out, shape=x.shape, dtypes=(x.dtype,), device=device, last_contiguous=x.dim() == 2)
    if reads_values(device):
        packed = (1, num_tokens) if query_start_loc is not None else (count, num_tokens // max(count, 1))
        bounds = values.token_bounds("query_start_loc", query_start_loc, *packed, device)
        num_windows = conv_state.shape[2] - window + 1
        if conv_state_indices is not None and conv_state_indices.dim() == 2:
            num_columns = conv_state_indices.shape[1]
            num_windows = num_columns if parent_token is not None else min(num_windows, num_columns)
        slots, null = conv_state_indices, null_slot
        if slots is None:
            null, slots = -1, torch.arange(bounds.numel() - 1, device=device)
        use = ("conv_state_indices", bounds, slots, null)
        if parent_token is not None and slots.dim() == 2:  # one slot per node of a draft tree
            touched = values.decode_slots(*use, num_accepted_tokens=num_accepted_tokens)
            values.check_parents("parent_token", parent_token, bounds, touched.is_live)
        else:
            touched = values.window_slots(*use, num_accepted_tokens=num_accepted_tokens, num_windows=num_windows)
            if parent_token is not None:
                values.check_parents("parent_token", parent_token, bounds, touched.is_live)
        if num_accepted_tokens is not None and validates(device):
            first = slots if parent_token is not None or slots.dim() == 1 else slots[:, 0]
            values.check_accepted(num_accepted_tokens, num_windows, bounds, first, null)
        values.check_touched(touched, conv_state, null)

    cu_seqlens_dtype = dtype_name(query_start_loc.dtype) if query_start_loc is not None else "int32" if x.dim() == 3 else None
    index_dtype = None if conv_state_indices is None else conv_state_indices.dtype
    problem = Conv1dUpdateProblem(
        **_static_fields(x, weight, bias, activation, conv_state, index_dtype),
        cu_seqlens_dtype=cu_seqlens_dtype,
        has_columns=conv_state_indices is not None and conv_state_indices.dim() == 2,
        has_accepted=num_accepted_tokens is not None,
        has_parent=parent_token is not None,
        num_tokens=num_tokens,
        num_sequences=count,
    )
    prepared = prepare(problem, device, backend)
    y = new(x.dtype, device, *x.shape) if out is None else out
    if is_empty(*x.shape, count):
        return y.zero_()
    rows, cu_seqlens = x, optional(Tensor.contiguous, query_start_loc)
    if x.dim() == 3:  # rows of adjacent channels; a copy where tokens are adjacent in memory
        rows, cu_seqlens = x.mT.reshape(num_tokens, dim), even_offsets(count, x.shape[2], device)
    # In place, a row is read before it is written, except that a draft tree reads the rows of ancestors again.
    is_own = x.dim() == 3 or (parent_token is not None and address(y) == address(x))
    written = torch.empty(rows.shape, dtype=x.dtype, device=device) if is_own else target(y)
    accepted = None if num_accepted_tokens is None else make(as_int32, num_accepted_tokens)
    parents = optional(Tensor.contiguous, parent_token)
    rows, bias = aligned("x", rows), optional(constant, bias)
    params = Conv1dUpdateParams(
        rows, constant(weight), bias, conv_state, conv_state_indices, accepted, cu_seqlens, parents, written, null_slot
    )
    launch(prepared, params, (y,) if written is y else None, aligned=(x, weight, bias, conv_state, out))
    if x.dim() == 3:
        return y.copy_(written.view(count, x.shape[2], dim).mT)
    return y if written is y else y.copy_(written)


def _static_fields(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, states: Tensor | None, index_dtype: torch.dtype | None
) -> dict[str, Any]:
    """Fields of ConvolutionProblem that follow from tensors."""
    return {
        "dim": x.shape[1],
        "width": weight.shape[1],
        "dtype": dtype_name(x.dtype),
        "silu": activation is not None,
        **dtypes_of(weight=weight, bias=bias, state=states),
        # Whether rows of [slots, columns, dim] are contiguous and start at multiples of 16 bytes.
        "state_channels_contiguous": states is not None and is_aligned(states.mT),
        "index_dtype": None if index_dtype is None else dtype_name(index_dtype),
    }


def problem_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, conv_states: Tensor | None,
    query_start_loc: Tensor | None, count: int, index_dtype: torch.dtype | None, *, has_mask: bool = False,
    checkpoints: tuple[torch.dtype | None, Tensor | None] = (None, None),
) -> Conv1dProblem:  # fmt: skip
    """The problem of a call of `causal_conv1d_fn` with this number of sequences.

    checkpoints: dtype of their slots, and the tensor of their windows, if any.
    """
    checkpoint_dtype, windows = checkpoints
    return Conv1dProblem(
        **_static_fields(x, weight, bias, activation, conv_states, index_dtype),
        cu_seqlens_dtype="int32" if query_start_loc is None else dtype_name(query_start_loc.dtype),
        has_mask=has_mask,
        checkpoint_dtype=None if checkpoint_dtype is None else dtype_name(checkpoint_dtype),
        **dtypes_of(checkpoint_window=windows),
        num_tokens=x.shape[0],
        num_sequences=count,
    )


def check_filter(x: Tensor, weight: Tensor, bias: Tensor | None, activation: object) -> None:
    device = x.device
    check.tensor("weight", weight, shape=("dim", "w >= 2"), dtypes=FLOAT_DTYPES, device=device)
    dim = weight.shape[0]
    if is_less(weight.shape[1], 2):
        bad_value("weight", "shape [dim, w >= 2]", f"shape {list(weight.shape)}")
    if x.shape[1] != dim:
        wanted = f"{dim} channels (weight's) in its second dimension: [tokens, dim], [B, dim] or [B, dim, T]"
        bad_value("x", wanted, f"shape {list(x.shape)}")
    check.optional("bias", bias, shape=(dim,), dtypes=FLOAT_DTYPES, device=device)
    check.one_of("activation", activation, CONV_ACTIVATIONS)
