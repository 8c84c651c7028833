"""Checks of intermediate_states, the caller's tensor that takes the state after every token.

It is written in place, so nothing of it may be copied: its strides must be those that kernels take.
"""

from torch import Tensor

from gdn.core import check, values
from gdn.core.check import INDEX_DTYPES, bad_value
from gdn.core.modes import address
from gdn.core.tensors import ALIGNMENT
from gdn.ops.delta_rule.checks import Sizes, check_inner, state_dtypes_of


def check_intermediate(
    states: Tensor | None, rows: Tensor | None, sizes: Sizes, state_v_first: bool, tokens: Tensor, *,
    starts: tuple[str, Tensor | None], unused: dict[str, Tensor | None], has_offsets: bool,
) -> None:  # fmt: skip
    """Checks intermediate_states [rows, T_max, HS, K, V] (or V first) and intermediate_indices [>= N].

    starts: name and value of the slots to start from, which must be 1-D. unused: arguments that must be left out.
    """
    if (states is None) != (rows is None):
        missing = "intermediate_states" if states is None else "intermediate_indices"
        bad_value(missing, "intermediate_states and intermediate_indices together", "None")
    if states is None or rows is None:
        return
    name, slots = starts
    if slots is None or slots.dim() != 1:
        got = "None" if slots is None else f"shape {list(slots.shape)}"
        bad_value(name, "1-D slots to start from, with intermediate_states", got)
    for other, value in unused.items():
        if value is not None:
            bad_value(other, "None with intermediate_states", "a tensor")
    shape, device = sizes.state_shape(state_v_first), tokens.device
    check.tensor("intermediate_states", states, shape=("rows", "T_max", *shape), dtypes=state_dtypes_of(tokens), device=device)
    check_inner("intermediate_states", states, shape)
    size = states.element_size()
    strides = [states.stride(dim) for dim in (0, 1) if not (isinstance(states.shape[dim], int) and states.shape[dim] == 1)]
    if any(stride * size % ALIGNMENT for stride in strides) or address(states) % ALIGNMENT:
        expected = f"strides of rows and tokens, and an address, that are multiples of {ALIGNMENT} bytes"
        bad_value("intermediate_states", expected, f"strides {states.stride()} at address {address(states):#x}")
    check.per_sequence(
        "intermediate_indices", rows, sizes.num_sequences, device, INDEX_DTYPES, has_offsets=has_offsets
    )  # fmt: skip


def check_intermediate_values(states: Tensor | None, rows: Tensor | None, is_live: Tensor, null_slot: int) -> None:
    """Checks that the rows of live sequences exist and belong to one sequence each."""
    if states is not None and rows is not None:
        values.check_touched(values.own_rows("intermediate_indices", rows, is_live, null_slot), states, null_slot)
