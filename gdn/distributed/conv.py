"""`causal_conv1d_fn` over a process group: the window of a part is the last columns of the ranks before."""

from typing import Any

import torch
from torch import Tensor

import gdn
from gdn import runtime
from gdn.core import check, values
from gdn.core.call import operator_of, reads_values
from gdn.core.check import FLOAT_DTYPES, bad_value
from gdn.core.constants import even_offsets
from gdn.core.tensors import contiguous_last
from gdn.distributed.group import Ranks, without_modes
from gdn.distributed.slots import Slots
from gdn.ops.layer_step.conv import check_filter, problem_of
from gdn.runtime.registry import Backend


@without_modes
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
    null_slot: int = -1,
    out: Tensor | None = None,
    backend: Backend | None = None,
    group: Any,
    final_rank: int | None = -1,
) -> Tensor:
    """Causal depthwise convolution of sequences whose tokens lie on the ranks of a process group, in rank order.

    Every rank calls with the same number of sequences, each with its part of them, also an empty one. One exchange carries the
    last w - 1 rows of each sequence from every rank to every other; a part shorter than that hands on rows of the ranks before.

    Parameters
    ----------
    x, weight, bias, activation, null_slot, out, backend
        As for `gdn.causal_conv1d_fn`, for this rank's tokens.
    conv_states : Tensor [slots, dim, columns >= w - 1], optional
        Windows. The first rank's are read, and `final_rank`'s written. None = start from zeros, keep nothing; on all ranks or
        on none.
    query_start_loc : Tensor [N + 1], optional
        Offsets of this rank's tokens of each sequence; the same N on all ranks. None = one sequence.
    cache_indices, has_initial_state : Tensor [>= N], optional
        Slots in this rank's pool, and which sequences continue a window (read on the first rank). A sequence is padding on all
        ranks or on none.
    checkpoint_offsets, checkpoint_slots : None
        Not served.
    group, final_rank : torch.distributed.ProcessGroup, int or None
        Ranks that hold the sequences, and the one whose pool gets the windows after their last tokens (None = all).

    Returns
    -------
    Tensor [tokens, dim]
        y of this rank's tokens.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As for `gdn.distributed.chunk_gated_delta_rule`.
    """
    arguments = dict(locals())
    del arguments["group"], arguments["final_rank"]
    ranks = Ranks(group)
    with ranks.refusing(x, weight):
        final = ranks.number("final_rank", final_rank)
        x, window, slots = _checked(arguments, ranks.rank)
    device, (count, dim, width), dtype = x.device, window.shape, window.dtype
    shared: dict[str, int | float | torch.dtype] = {
        "sequences": count, "dim": dim, "width": width + 1, "dtype": dtype, "presence of bias": bias is not None,
        "activation": activation is not None, "presence of conv_states": conv_states is not None,
    }  # fmt: skip
    ranks.agree(device, shared | {"final_rank": -1 if final is None else final})
    ranks.agree_on_padding("cache_indices", slots.is_live)

    offsets = even_offsets(1, x.shape[0], device) if query_start_loc is None else query_start_loc
    lengths = offsets.diff()
    tail = _last_columns(x, offsets, width).to(dtype)
    if ranks.rank == 0:
        tail, columns = _slide(window, tail, lengths.clamp(max=width)), torch.full_like(lengths, width)
    else:
        columns = lengths.clamp(max=width)
    sent = torch.cat([tail.flatten(1), columns[:, None].to(dtype), (lengths > 0)[:, None].to(dtype)], dim=1)
    received = ranks.gather(sent)
    tails = received[:, :, : dim * width].unflatten(2, (dim, width))
    counts, has_tokens = received[:, :, -2].long(), received[:, :, -1].any(0)

    after = tails[0]  # the first rank's part
    for rank in range(1, ranks.size):
        if rank == ranks.rank:
            window = after.clone()
        after = _slide(after, tails[rank], counts[rank])
    y: Tensor = gdn.causal_conv1d_fn(
        x, weight, bias, conv_states=window, query_start_loc=query_start_loc, cache_indices=slots.private, activation=activation,
        out=out, backend=backend,
    )  # fmt: skip
    if conv_states is not None and (final is None or final == ranks.rank):
        slots.store(after, conv_states[:, :, :width], has_tokens)
    return y


def _checked(arguments: dict[str, Any], rank: int) -> tuple[Tensor, Tensor, Slots]:
    """x, a window for each sequence and their slots, after every check that the operator called on a part would make.

    Nothing has been sent or written. The windows are those before the sequences on the first rank, and zeros on others.
    """
    operator = operator_of(gdn.causal_conv1d_fn)
    arguments = dict.fromkeys(operator.kinds) | arguments  # None for what the function of ranks does not have
    given = operator.check_types(arguments)
    check.absent({name: given[name] for name in ("checkpoint_offsets", "checkpoint_slots")}, "with a process group")
    x, weight, bias, conv_states = (given[name] for name in ("x", "weight", "bias", "conv_states"))
    query_start_loc, cache_indices, null_slot = (given[name] for name in ("query_start_loc", "cache_indices", "null_slot"))
    check.tensor("x", x, shape=("tokens", "dim"), dtypes=FLOAT_DTYPES)
    check_filter(x, weight, bias, given["activation"])
    check.null_slot(null_slot)
    device, dim, width = x.device, x.shape[1], weight.shape[1] - 1
    count = check.offsets("query_start_loc", query_start_loc, device, otherwise=1)
    if conv_states is not None:
        check.windows("conv_states", conv_states, dim, width, device)
        if cache_indices is None and conv_states.shape[0] < count:
            bad_value("conv_states", f"at least {count} slots without cache_indices", f"shape {list(conv_states.shape)}")
    has_offsets = query_start_loc is not None
    if cache_indices is not None:
        check.indices("cache_indices", cache_indices, count, device, ranks=(1,), has_offsets=has_offsets)
    check.per_sequence("has_initial_state", given["has_initial_state"], count, device, (torch.bool,), has_offsets=has_offsets)
    check.optional("out", given["out"], shape=x.shape, dtypes=(x.dtype,), device=device, last_contiguous=True)
    if reads_values(device):
        bounds = values.token_bounds("query_start_loc", query_start_loc, 1, x.shape[0], device)
        if conv_states is not None:
            touched = values.prefill_slots("cache_indices", bounds, cache_indices, null_slot)
            values.check_touched(touched, conv_states, null_slot)
    x = contiguous_last("x", x)
    operator.check_places(arguments, {**given, "x": x})  # in place, x must be the caller's, not a copy
    slots = Slots(cache_indices, given["has_initial_state"], null_slot, count, device)
    dtype = x.dtype if conv_states is None else torch.promote_types(x.dtype, conv_states.dtype)
    window = torch.empty(count, dim, width, dtype=dtype, device=device)
    slots.start(None if conv_states is None or rank > 0 else conv_states[:, :, :width], window)
    problem = problem_of(x, weight, bias, given["activation"], window, query_start_loc, count, torch.int32)
    runtime.prepare(problem, device, given["backend"])
    return x, window, slots


def _last_columns(x: Tensor, offsets: Tensor, width: int) -> Tensor:
    """[N, dim, width]: the last rows of each sequence, right-aligned; undefined left of its first one."""
    rows = offsets[1:, None].long() + torch.arange(-width, 0, device=x.device)
    if not x.shape[0]:
        return x.new_zeros(rows.shape[0], x.shape[1], width)
    return x[rows.clamp(0, x.shape[0] - 1)].transpose(1, 2)


def _slide(window: Tensor, tail: Tensor, columns: Tensor) -> Tensor:
    """The window [N, dim, w - 1] after `columns` more columns, the right ones of `tail`."""
    width = window.shape[2]
    at = torch.arange(width, device=window.device)
    is_new = at >= width - columns[:, None]
    moved = window.gather(2, (at + columns[:, None]).clamp(max=width - 1)[:, None, :].expand(window.shape))
    return torch.where(is_new[:, None, :], tail, moved)
