"""The operators around replay decode as cases: pools of all layers whose slots have no order.

`fold_states` is timed as it writes a checkpoint while decoding: the source keeps its entries, so that a call can be repeated.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from gdn.core.tunable import Maker, Shape, StepCase, Tensor, Tunable, Work, heads_of, packed, params_of, resized
from gdn.ops.delta_rule.problem_replay import (
    AcceptDraftTreeParams,
    AcceptDraftTreeProblem,
    FoldStatesParams,
    FoldStatesProblem,
    entry_width,
    ring_choice,
)

_WRITTEN = 1000  # tokens that every state was written with
_NODES = 4  # of a draft tree, the first of them a root


def _ring(make: Maker, layers: int, slots: int, rows: int, width: int) -> Tensor:
    """Entries whose values are all below 0, decays among them, so that every entry counts."""
    ring = make.normal(layers, slots, rows, width, dtype="float32")
    return ring.abs_().mul_(-0.1)


def _fold(make: Maker, problem: FoldStatesProblem, lengths: Sequence[int]) -> Work:
    """lengths: tokens of each sequence since its state was written."""
    if problem.has_accepted or problem.has_rounding or not problem.has_final_indices:
        raise ValueError(f"problem: expected other slots to write, no accepted counts and no noise, got {problem.static_key()}")
    count, heads, K, V = len(lengths), problem.num_state_heads, problem.head_k_dim, problem.head_v_dim
    slots = 2 * count + 3
    order = make.order(2 * count, slots, problem.index_dtype)
    inner = (V, K) if problem.state_v_first else (K, V)
    width = -(-entry_width(problem.num_k_heads, heads, K, V) // 4) * 4
    arguments = {
        "ssm_state": make.normal(problem.num_layers, slots, heads, *inner, dtype=problem.state_dtype),
        "state_indices": order[:count], "ring": _ring(make, problem.num_layers, slots, problem.ring_rows, width),
        "state_tokens": make.integers([_WRITTEN] * slots, "int32"),
        "num_computed_tokens": make.integers([_WRITTEN + length for length in lengths], "int32"),
        "num_k_heads": problem.num_k_heads, "fold_every": problem.fold_every, "fold_phase": 0,
        "final_state_indices": order[count:], "state_v_first": problem.state_v_first,
    }  # fmt: skip
    params = params_of(FoldStatesParams, arguments, null_slot=-1)
    return Work("fold_states", arguments, params, updated=("ssm_state", "state_tokens"))


class FoldCase(StepCase):
    """The states of all layers are compared as slots of one pool."""

    def _error(self, name: str, output: Tensor, exact: Tensor, before: Tensor | None) -> float:
        if before is not None:
            output, exact, before = (x.flatten(0, 1) for x in (output, exact, before))
        return super()._error(name, output, exact, before)


def _accept(make: Maker, problem: AcceptDraftTreeProblem, lengths: Sequence[int]) -> Work:
    """lengths: nodes of each tree. The parent of node i is (i + 1) // 2 - 1: node 0 has the children 1 and 2."""
    count, layers = len(lengths), problem.num_layers
    slots = count + 3
    arguments: dict[str, Any] = {
        "ring": _ring(make, layers, slots, problem.ring_rows, problem.ring_width), "conv_state": None,
        "state_indices": make.order(count, slots, problem.index_dtype),
        "parent_token": make.integers([(i + 1) // 2 - 1 for length in lengths for i in range(length)], "int32"),
        "accepted_nodes": make.integers([length - 1 - n % 2 for n, length in enumerate(lengths)], "int32"),
        "num_computed_tokens": make.integers([_WRITTEN + n for n in range(count)], "int32"),
        "num_accepted_tokens": make.integers([1] * count, "int32"),
        "query_start_loc": make.integers([0, *accumulate(lengths)], problem.cu_seqlens_dtype), "conv_width": problem.conv_width,
    }  # fmt: skip
    updated: tuple[str, ...] = ("ring", "num_accepted_tokens")
    if problem.conv_dim is not None:
        if not problem.conv_channels_contiguous:
            raise ValueError(f"problem: expected windows with channels together, got {problem.static_key()}")
        columns = problem.conv_width - 2 + max(lengths)
        arguments["conv_state"] = make.normal(layers, slots, columns, problem.conv_dim, dtype=problem.conv_dtype).mT
        updated = (*updated, "conv_state")
    params = params_of(AcceptDraftTreeParams, arguments, cu_seqlens=arguments["query_start_loc"], null_slot=-1)
    return Work("accept_draft_tree", arguments, params, updated=updated)


def _folds(heads: tuple[int, int], batch: int, layers: int, state_dtype: str = "float32") -> Shape:
    """Sequences spread evenly over the period of the folds."""
    rows, fold_every = ring_choice(1, state_dtype)
    name = f"{heads[0]}/{heads[1]} batch {batch}, {layers} layers{' bf16' if state_dtype == 'bfloat16' else ''}"
    lengths = [1 + n * fold_every // batch for n in range(batch)]
    fields: dict[str, Any] = {"state_dtype": state_dtype, "ring_rows": rows, "fold_every": fold_every, "num_layers": layers}
    return packed("fold_states", name, lengths, heads_of(*heads), has_final_indices=True, **fields)


def _trees(batch: int) -> Shape:
    return packed("accept_draft_tree", f"16/32 batch {batch}, 36 layers", (_NODES,) * batch, num_layers=36)


_FEW: dict[str, Any] = {"num_layers": 2, "num_k_heads": 2, "num_state_heads": 4, "head_k_dim": 16, "head_v_dim": 16}

fold_states = Tunable(
    partial(FoldCase, _fold, verdict="close", copied=("state_tokens",), states=("ssm_state",)),
    shapes=(
        *(_folds((16, 32), batch, 36) for batch in (1, 8)), _folds((16, 32), 128, 1), _folds((4, 8), 8, 36),
        _folds((16, 32), 8, 36, "bfloat16"),
    ),
    small=lambda shape: resized(shape, shape.lengths[-2:], **_FEW),
)  # fmt: skip

accept_draft_tree = Tunable(
    partial(StepCase, _accept, verdict="bits"),
    shapes=tuple(_trees(batch) for batch in (1, 8, 128)),
    small=lambda shape: resized(shape, shape.lengths[:3], num_layers=2, ring_width=20, conv_dim=8),
)
