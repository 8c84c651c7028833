"""What one fused operator does between the projections of a layer, by several: for head dims that it has no kernel for."""

from typing import Any

from torch import Tensor

import gdn

Options = dict[str, Any]  # of the fused operators


def core(
    projections: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    conv_bias: Tensor | None,
    pools: tuple[Tensor, Tensor, Tensor],
    offsets: Tensor,
    has_initial_state: Tensor | None,
    options: Options,
) -> Tensor:
    """Input of the output projection, [tokens, HV * V]; both pools are updated.

    Parameters
    ----------
    projections : tuple of Tensor
        mixed_qkv, z, b and a as for the fused operators, in both layouts.
    parameters : tuple of Tensor
        Filter [D, w], A_log, dt_bias and gain of the norm.
    conv_bias : Tensor [D], optional
        Bias of the convolution.
    pools : tuple of Tensor
        Windows [N, D, >= w - 1], states [N, HV, K, V] and the slot of each sequence.
    offsets : Tensor [N + 1]
        Token offsets of the sequences.
    has_initial_state : Tensor [N] of bool, optional
        Of prompts; None = a decode step, each sequence one token that continues its state.
    options : dict
        Further arguments of the fused operators.
    """
    mixed, z, b, a = projections
    weight, A_log, dt_bias, gain = parameters
    windows, states, slots = pools
    k_heads, v_heads, k, v = options["num_k_heads"], A_log.shape[0], options["head_k_dim"], options["head_v_dim"]
    if options["projection_layout"] == "interleaved":
        mixed, z, b, a = gdn.fused_qkvzba_split_reshape_cat(mixed, b, k_heads, v_heads, k, v)
    assert z is not None and a is not None
    activation = options["activation"]
    if has_initial_state is None:
        rows = gdn.causal_conv1d_update(mixed, windows, weight, conv_bias, activation, conv_state_indices=slots)
    else:
        rows = gdn.causal_conv1d_fn(
            mixed, weight, conv_bias, conv_states=windows, query_start_loc=offsets, cache_indices=slots,
            has_initial_state=has_initial_state, activation=activation,
        )  # fmt: skip
    query, key, value = (
        x.unflatten(1, (-1, dim))[None]
        for x, dim in zip(rows.split([k_heads * k, k_heads * k, v_heads * v], dim=1), (k, k, v), strict=True)
    )
    gates: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True}
    common = {**gates, "use_qk_l2norm_in_kernel": True, "initial_state": states, "cu_seqlens": offsets}
    if has_initial_state is None:
        o, _ = gdn.fused_recurrent_gated_delta_rule(query, key, value, a[None], b[None], ssm_state_indices=slots, **common)
    else:
        o, _ = gdn.chunk_gated_delta_rule(
            query, key, value, a[None], b[None], state_indices=slots, has_initial_state=has_initial_state, **common
        )
    return gdn.rms_norm_gated(o[0], z, gain, options["eps"], options["gate_activation"]).flatten(1)
