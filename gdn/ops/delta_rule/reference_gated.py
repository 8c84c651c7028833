"""A step's rows, each in the form that `gdn.gated_delta_rule` deals it to: the two references, one after the other.

Both forms compute the same recurrence up to rounding. Which row takes which form shows where states are rounded stochastically,
since only the recurrent form knows the seed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn.ops.delta_rule.crossing import recurrent_rows
from gdn.ops.delta_rule.reference import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from gdn.reference_modes import inference_only, listed, ranges


@inference_only
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None, *,
    cu_seqlens: Tensor, lengths_host: Sequence[int] | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, inplace_final_state: bool | None = None, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, use_gate_in_kernel: bool = False, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False, state_indices: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None, final_state_indices: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None, num_accepted_tokens: Tensor | None = None, parent_token: Tensor | None = None,
    disable_state_update: bool = False, rounding_seed: Tensor | None = None, null_slot: int = -1, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`gdn.gated_delta_rule`."""
    indices = state_indices if state_indices is not None else ssm_state_indices
    count = cu_seqlens.numel() - 1
    both: dict[str, Any] = {
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens,
        "state_v_first": state_v_first, "use_gate_in_kernel": use_gate_in_kernel, "A_log": A_log, "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "null_slot": null_slot,
    }  # fmt: skip
    is_in_place = indices is not None or inplace_final_state is True
    returns_state = output_final_state and (is_in_place or not disable_state_update)
    if indices is not None and indices.dim() == 2:
        return fused_recurrent_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, ssm_state_indices=indices, num_accepted_tokens=num_accepted_tokens,
            output_final_state=output_final_state, final_state_indices=final_state_indices, parent_token=parent_token,
            disable_state_update=disable_state_update, rounding_seed=rounding_seed, out=out, **both,
        )  # fmt: skip

    pool = initial_state
    if indices is None:
        indices, both["null_slot"] = torch.arange(count, device=q.device), -1
        if not is_in_place:
            pool = _new_states(q, k, v, initial_state, has_initial_state, count, state_v_first)
            has_initial_state = None
    short = 0 if lengths_host is None else recurrent_rows(lengths_host)
    starts = listed(has_initial_state)
    is_recurrent = [n < short and (starts is None or starts[n]) for n in range(count)]
    mask = torch.tensor(is_recurrent, dtype=torch.bool, device=q.device)
    final = torch.full_like(indices, both["null_slot"]) if disable_state_update else final_state_indices
    o, _ = chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=pool, state_indices=indices[:count].masked_fill(mask, both["null_slot"]),
        has_initial_state=has_initial_state, final_state_indices=final, checkpoint_offsets=checkpoint_offsets,
        checkpoint_slots=checkpoint_slots, **both,
    )  # fmt: skip
    o_recurrent, _ = fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=pool, ssm_state_indices=indices[:count].masked_fill(~mask, both["null_slot"]),
        final_state_indices=final, rounding_seed=rounding_seed, **both,
    )  # fmt: skip
    for n, (start, end) in enumerate(ranges(cu_seqlens)):
        if is_recurrent[n]:
            o[0, start:end] = o_recurrent[0, start:end]
    return (o if out is None else out.copy_(o)), (pool if returns_state else None)


def _new_states(
    q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None, has_initial: Tensor | None, count: int, state_v_first: bool
) -> Tensor:
    """A state per sequence to start from, in the dtype of final states."""
    k_dim, v_dim = k.shape[-1], v.shape[-1]
    inner = (v_dim, k_dim) if state_v_first else (k_dim, v_dim)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    states = torch.zeros(count, max(q.shape[2], v.shape[2]), *inner, dtype=dtype, device=q.device)
    if initial is not None:
        states.copy_(initial)
        if has_initial is not None:
            states[~has_initial[:count]] = 0
    return states
