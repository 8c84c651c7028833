"""torch.library: the operators under `torch.ops.gdn`, opaque to torch.compile, with fake implementations.

Public functions come here only while torch.compile traces them; eager calls never do. A torch.library operator may return
neither an argument nor a view of one, and says in its schema what it writes: so a state that is updated in place is an
argument of its own (`pool`, beside `initial_state`), and a result that is written into an argument (`out`) or does not
exist comes back as an empty tensor, which the public function replaces.

To add an operator: `name = register("name", implementation, fake, mutates=(...))`, where the implementation imports the
public function inside its body and calls it, and the fake makes empty tensors of the right shapes.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensor = torch.Tensor


def register(
    name: str, implementation: Callable[..., Any], fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[..., Any]:
    """gdn::name with the schema of the implementation's annotations. fake: called with every argument by name."""
    op = torch.library.custom_op(f"gdn::{name}", implementation, mutates_args=tuple(mutates))
    signature = inspect.signature(implementation)
    op.register_fake(lambda *args, **kwargs: fake(**signature.bind(*args, **kwargs).arguments))
    return op


def nothing(like: Tensor) -> Tensor:
    """Stands for a result that is not a new tensor."""
    return like.new_empty(0)


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    pool: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    final_state_indices: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
    null_slot: int,
    out: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    from gdn.ops.chunk import chunk_gated_delta_rule

    o, final_state = chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state if pool is None else pool, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens, state_v_first=state_v_first, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, state_indices=state_indices,
        has_initial_state=has_initial_state, final_state_indices=final_state_indices,
        checkpoint_offsets=checkpoint_offsets, checkpoint_slots=checkpoint_slots, null_slot=null_slot, out=out, backend=backend,
    )  # fmt: skip
    is_new_state = final_state is not None and state_indices is None
    return (o if out is None else nothing(q)), (final_state if is_new_state else nothing(q))  # type: ignore[return-value]


def _chunk_fake(
    q: Tensor, v: Tensor, out: Tensor | None, cu_seqlens: Tensor | None, state_v_first: bool, output_final_state: bool,
    state_indices: Tensor | None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _fake_results(q, v, out, cu_seqlens, state_v_first, output_final_state and state_indices is None)


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    pool: Tensor | None,
    inplace_final_state: bool | None,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    use_qk_l2norm_in_kernel: bool,
    state_v_first: bool,
    use_gate_in_kernel: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    use_beta_sigmoid_in_kernel: bool,
    output_final_state: bool,
    final_state_indices: Tensor | None,
    disable_state_update: bool,
    parent_token: Tensor | None,
    rounding_seed: Tensor | None,
    null_slot: int,
    out: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    from gdn.ops.recurrent import fused_recurrent_gated_delta_rule

    o, final_state = fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state if pool is None else pool, inplace_final_state, cu_seqlens,
        ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel, state_v_first=state_v_first,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, output_final_state=output_final_state,
        final_state_indices=final_state_indices, disable_state_update=disable_state_update, parent_token=parent_token,
        rounding_seed=rounding_seed, null_slot=null_slot, out=out, backend=backend,
    )  # fmt: skip
    is_new_state = final_state is not None and pool is None
    return (o if out is None else nothing(q)), (final_state if is_new_state else nothing(q))  # type: ignore[return-value]


def _recurrent_fake(
    q: Tensor, v: Tensor, out: Tensor | None, cu_seqlens: Tensor | None, state_v_first: bool, output_final_state: bool,
    disable_state_update: bool, pool: Tensor | None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    has_new_state = output_final_state and not disable_state_update and pool is None
    return _fake_results(q, v, out, cu_seqlens, state_v_first, has_new_state)


def _fake_results(
    q: Tensor, v: Tensor, out: Tensor | None, cu_seqlens: Tensor | None, state_v_first: bool, has_new_state: bool
) -> tuple[Tensor, Tensor]:
    heads, k_dim, v_dim = max(q.shape[2], v.shape[2]), q.shape[3], v.shape[3]
    o = nothing(q) if out is not None else v.new_empty(q.shape[0], q.shape[1], heads, v_dim)
    if not has_new_state:
        return o, nothing(q)
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    inner = (v_dim, k_dim) if state_v_first else (k_dim, v_dim)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return o, q.new_empty(count, heads, *inner, dtype=dtype)


def _decode(
    mixed_qkv: Tensor,
    z: Tensor | None,
    b: Tensor,
    a: Tensor | None,
    conv_state: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    conv_bias: Tensor | None,
    query_start_loc: Tensor | None,
    num_accepted_tokens: Tensor | None,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    scale: float | None,
    eps: float,
    activation: str | None,
    gate_activation: str,
    projection_layout: str,
    rounding_seed: Tensor | None,
    state_v_first: bool,
    null_slot: int,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    from gdn.ops.decode import fused_gdn_decode

    o = fused_gdn_decode(
        mixed_qkv, z, b, a, conv_state, conv_weight, A_log, dt_bias, norm_weight, ssm_state, state_indices,
        conv_bias=conv_bias, query_start_loc=query_start_loc, num_accepted_tokens=num_accepted_tokens,
        num_k_heads=num_k_heads, head_k_dim=head_k_dim, head_v_dim=head_v_dim, scale=scale, eps=eps, activation=activation,
        gate_activation=gate_activation, projection_layout=projection_layout, rounding_seed=rounding_seed,
        state_v_first=state_v_first, null_slot=null_slot, out=out, backend=backend,
    )  # fmt: skip
    return o if out is None else nothing(o)


def _decode_fake(mixed_qkv: Tensor, A_log: Tensor, head_v_dim: int, out: Tensor | None, **_: Any) -> Tensor:
    if out is not None:
        return nothing(mixed_qkv)
    return mixed_qkv.new_empty(mixed_qkv.shape[0], A_log.shape[0] * head_v_dim)


def _conv_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor | None,
    query_start_loc: Tensor | None,
    cache_indices: Tensor | None,
    has_initial_state: Tensor | None,
    activation: str | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
    null_slot: int,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    from gdn.ops.conv import causal_conv1d_fn

    y = causal_conv1d_fn(
        x, weight, bias, conv_states=conv_states, query_start_loc=query_start_loc, cache_indices=cache_indices,
        has_initial_state=has_initial_state, activation=activation, checkpoint_offsets=checkpoint_offsets,
        checkpoint_slots=checkpoint_slots, null_slot=null_slot, out=out, backend=backend,
    )  # fmt: skip
    return y if out is None else nothing(x)


def _conv_fake(x: Tensor, out: Tensor | None, **_: Any) -> Tensor:
    return x.new_empty(x.shape) if out is None else nothing(x)


def _conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    query_start_loc: Tensor | None,
    parent_token: Tensor | None,
    null_slot: int,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    from gdn.ops.conv import causal_conv1d_update

    y = causal_conv1d_update(
        x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices,
        num_accepted_tokens=num_accepted_tokens, query_start_loc=query_start_loc, parent_token=parent_token,
        null_slot=null_slot, out=out, backend=backend,
    )  # fmt: skip
    return y if out is None else nothing(x)


def _gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float, threshold: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    from gdn.ops.gating import fused_gdn_gating

    return fused_gdn_gating(A_log, a, b, dt_bias, beta, threshold, backend=backend)


def _gating_fake(a: Tensor, b: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    return a.new_empty(a.shape, dtype=dtype), b.new_empty(b.shape, dtype=dtype)


def _split(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from gdn.ops.split import fused_qkvzba_split_reshape_cat

    return fused_qkvzba_split_reshape_cat(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v, backend=backend)


def _split_fake(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length = mixed_qkvz.shape[0]
    return (
        mixed_qkvz.new_empty(length, 2 * num_heads_qk * head_qk + num_heads_v * head_v),
        mixed_qkvz.new_empty(length, num_heads_v, head_v),
        mixed_ba.new_empty(length, num_heads_v),
        mixed_ba.new_empty(length, num_heads_v),
    )


def _norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, backend: str | None) -> Tensor:
    from gdn.ops.norm import rms_norm_gated

    return rms_norm_gated(x, z, weight, eps, activation, backend=backend)


def _norm_fake(x: Tensor, **_: Any) -> Tensor:
    return x.new_empty(x.shape)


chunk = register("chunk_gated_delta_rule", _chunk, _chunk_fake, mutates=("pool", "out"))
recurrent = register("fused_recurrent_gated_delta_rule", _recurrent, _recurrent_fake, mutates=("pool", "out"))
decode = register("fused_gdn_decode", _decode, _decode_fake, mutates=("conv_state", "ssm_state", "out"))
conv_fn = register("causal_conv1d_fn", _conv_fn, _conv_fake, mutates=("conv_states", "out"))
conv_update = register("causal_conv1d_update", _conv_update, _conv_fake, mutates=("conv_state", "out"))
gating = register("fused_gdn_gating", _gating, _gating_fake)
split = register("fused_qkvzba_split_reshape_cat", _split, _split_fake)
norm = register("rms_norm_gated", _norm, _norm_fake)
