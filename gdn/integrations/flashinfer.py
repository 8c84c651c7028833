"""FlashInfer's Gated DeltaNet functions on the kernels of this project: to import, or to `enable` in the installed package.

FlashInfer's decay of prefill is a factor, not a logarithm; its states are V first, but for `gated_delta_rule_decode`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

import gdn
from gdn.integrations import _handle, _hosts, _points
from gdn.integrations import _indices as indices
from gdn.integrations import flashinfer_refusals as refuse
from gdn.integrations._calls import refused_by
from gdn.integrations._kept import bound


@refused_by(refuse.chunk)
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: bool | Literal["auto"] = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Gated delta rule for prefill with FlashInfer's signature, by `gdn.chunk_gated_delta_rule`.

    Parameters
    ----------
    q, k, v : Tensor [tokens, Hq, K], [tokens, Hk, K], [tokens, HV, K]
        Queries, keys and values of packed sequences, bfloat16 or float16; K a multiple of 4 up to 256.
    g : Tensor [tokens, HS], optional
        Decay as a factor between 0 and 1. None = 1. HS = max(Hq, HV).
    beta : Tensor [tokens, HS], optional
        Write strength. None = 1.
    scale : float, optional
        Factor of the queries. None and 0 = K**-0.5.
    initial_state : Tensor [N, HS, K, K], optional
        State of each sequence, V first, float32 or bfloat16; with `state_indices` the pool.
    output_final_state, use_qk_l2norm_in_kernel : bool
        Whether to return the states after the last tokens, and to normalise q and k.
    cu_seqlens : Tensor [N + 1]
        Token offsets of the sequences, int32 or int64; required.
    output : Tensor [tokens, HS, K], optional
        Where to write the result, in the dtype of `v`.
    output_state : Tensor [N, HS, K, K], optional
        Where to write the final states, float32 or bfloat16; with `state_indices` the pool itself, which is updated in place.
    state_checkpoints : Tensor [rows, HS, K, K], optional
        Where to write the states after each `checkpoint_every_n_tokens` tokens of a sequence, float32 or bfloat16; K up to 128.
    checkpoint_cu_starts : Tensor [N + 1], optional
        Offsets of the sequences in these rows, int32 or int64: sequence n has rows checkpoint_cu_starts[n] and on, one for each
        full `checkpoint_every_n_tokens` tokens.
    checkpoint_every_n_tokens : int
        A multiple of 64; 0 = no checkpoints, and then neither of the two.
    use_cp, _cp_chunk_len
        Accepted and not needed.
    max_seqlen : int, optional
        Most tokens of a sequence; bounds the search for checkpoints, and chooses how the work is dealt out.
    state_indices : Tensor [N], optional
        Slot of each sequence in the pool; -1 is padding. Without `output_final_state` the pool is only read.
    backend : str
        "auto" or "flashinfer".

    Returns
    -------
    o : Tensor [tokens, HS, K]
        Output in the dtype of `v`; `output` itself where it is given.
    final_state : Tensor
        With `output_final_state` only: `output_state` where it is given, else a new float32 tensor.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.chunk_gated_delta_rule`.
    """
    assert cu_seqlens is not None  # else refused
    slots, unstored = state_indices, None
    if state_indices is not None and not output_final_state:
        unstored = torch.full_like(state_indices, -1)
    elif initial_state is not None and output_state is initial_state and state_indices is None:
        slots = indices.slots(initial_state.shape[0], q.device)
    checkpoints: dict[str, Any] = {}
    if state_checkpoints is not None and checkpoint_cu_starts is not None:
        most = min(state_checkpoints.shape[0], (max_seqlen or q.shape[0]) // checkpoint_every_n_tokens)
        checkpoints = _checkpoints(state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, most)
    o, state = _chunk(scale or None, output_final_state, use_qk_l2norm_in_kernel)(
        q[None],
        k[None],
        v[None],
        None if g is None else g.float().log()[None],
        None if beta is None else beta[None],
        initial_state,
        cu_seqlens,
        state_indices=slots,
        final_state_indices=unstored,
        max_seqlen=max_seqlen,
        out=None if output is None else output[None],
        **checkpoints,
    )
    rows = o[0] if output is None else output
    if state is None:
        return rows
    if slots is not None or output_state is None:
        return rows, state if output_state is None else output_state
    return rows, output_state.copy_(state)


@functools.lru_cache(maxsize=64, typed=True)
def _chunk(scale: float | None, output_final_state: bool, l2norm: bool) -> Callable[..., Any]:
    """The rule of prefill with V-first states, for tensors alone."""
    return bound(
        gdn.chunk_gated_delta_rule, scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=l2norm,
        state_v_first=True,
    )  # fmt: skip


@functools.lru_cache(maxsize=64, typed=True)
def _recurrent(
    scale: float | None, l2norm: bool, state_v_first: bool, stays: bool, inplace_final_state: bool | None
) -> Callable[..., Any]:
    """The rule of decode with raw gates, for tensors alone. stays: whether the states stay as they are."""
    return bound(
        gdn.fused_recurrent_gated_delta_rule, scale=scale, use_qk_l2norm_in_kernel=l2norm, state_v_first=state_v_first,
        disable_state_update=stays, inplace_final_state=inplace_final_state, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, output_final_state=False,
    )  # fmt: skip


def _checkpoints(kept: Tensor, starts: Tensor, every: int, most: int) -> dict[str, Any]:
    """Arguments of the operator. most: an upper bound of a sequence's checkpoints, which are known on the device alone."""
    if not most:
        return {}
    places = indices.slots(most, starts.device, starts.dtype)
    offsets = torch.where(places < starts.diff()[:, None], (places + 1) * every, 0)
    slots = starts[:-1, None] + places
    return {"checkpoint_offsets": offsets, "checkpoint_slots": slots, "checkpoint_states": kept}


@refused_by(refuse.pretranspose)
def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Decode with V-first states and FlashInfer's signature, by `gdn.fused_recurrent_gated_delta_rule`.

    Parameters
    ----------
    q, k, v : Tensor [B, T, H, K], [B, T, H, K], [B, T, HV, V]
        Queries, keys and values, bfloat16 or float16; K and V multiples of 4 up to 256.
    state : Tensor [B, HV, V, K] or None
        State of each sequence, float32 or bfloat16, updated in place. None with `initial_state`.
    A_log, a, dt_bias, b : Tensor [HV], Tensor [B, T, HV], Tensor [HV], Tensor [B, T, HV]
        Decay rate, raw gate, its bias and the raw write strength.
    scale : float, optional
        Factor of the queries. None = K**-0.5.
    output : Tensor [B, T, HV, V], optional
        Where to write the result, in the dtype of `v`.
    use_qk_l2norm : bool
        Whether to normalise q and k.
    initial_state, initial_state_indices : Tensor [slots, HV, V, K] and Tensor [B], optional
        Pool, updated in place, and the slot of each sequence; a negative one is padding, whose rows of the result are zero.
    output_state_indices : Tensor [B], optional
        Slots to write instead; a negative one is not written.
    intermediate_states_buffer : Tensor [>= B, >= T, HV, V, K], optional
        Where to write the state after each token, float32 or bfloat16, contiguous; for T > 1 and with `disable_state_update`.
    disable_state_update : bool
        Leave the states as they are; for T > 1 only.
    backend : str
        "auto" or "flashinfer".

    Returns
    -------
    o : Tensor [B, T, HV, V]
        Output in the dtype of `v`; `output` itself where it is given.
    state : Tensor
        `state`, or `initial_state`.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.fused_recurrent_gated_delta_rule`.
    """
    pool = state if initial_state is None else initial_state
    assert pool is not None  # else refused
    buffer, read, written, rows = intermediate_states_buffer, initial_state_indices, output_state_indices, None
    if buffer is not None:
        (read, rows), written = _rows(read, q), None
    in_place = None if read is not None or disable_state_update else True
    o, _ = _recurrent(scale, use_qk_l2norm, True, disable_state_update, in_place)(
        q, k, v, a, b, pool, None, read, None, A_log, dt_bias, written, intermediate_states=buffer,
        intermediate_indices=rows, out=output,
    )  # fmt: skip
    return o, pool


def _rows(slots: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Slots of each sequence to start from, and the rows of the buffer that take its states."""
    rows = indices.slots(q.shape[0], q.device, torch.int32 if slots is None else slots.dtype)
    return rows if slots is None else slots, rows


@refused_by(refuse.decode)
def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Decode of one token with K-first states and FlashInfer's signature, by `gdn.fused_recurrent_gated_delta_rule`.

    Parameters
    ----------
    q, k, v : Tensor [B, 1, H, K], [B, 1, H, K], [B, 1, HV, V]
        Queries, keys and values, bfloat16 or float16; K and V multiples of 4 up to 256.
    state : Tensor [B, HV, K, V]
        State of each sequence, float32 or bfloat16, updated in place.
    A_log, a, dt_bias, b : Tensor [HV], Tensor [B, 1, HV], Tensor [HV], Tensor [B, 1, HV]
        Decay rate, raw gate, its bias and the raw write strength.
    scale : float, optional
        Factor of the queries. None = K**-0.5.
    output : Tensor [B, 1, HV, V], optional
        Where to write the result, in the dtype of `v`.
    use_qk_l2norm : bool
        Whether to normalise q and k.
    backend : str
        "auto" or "flashinfer".

    Returns
    -------
    o : Tensor [B, 1, HV, V]
        Output in the dtype of `v`; `output` itself where it is given.
    state : Tensor
        `state`.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.fused_recurrent_gated_delta_rule`.
    """
    o, _ = _recurrent(scale, use_qk_l2norm, False, False, True)(
        q, k, v, a, b, state, None, None, None, A_log, dt_bias, out=output
    )
    return o, state


@refused_by(refuse.mtp)
def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verification of drafts with FlashInfer's signature, by `gdn.fused_recurrent_gated_delta_rule`.

    Parameters
    ----------
    q, k, v : Tensor [B, T, H, K], [B, T, H, K], [B, T, HV, V]
        Queries, keys and values, bfloat16 or float16; K and V multiples of 4 up to 256.
    initial_state : Tensor [slots, HV, V, K]
        Pool of states, V first, float32 or bfloat16.
    initial_state_indices : Tensor [B]
        Slot of each sequence; a negative one is padding, whose rows of the result are zero.
    A_log, a, dt_bias, b : Tensor [HV], Tensor [B, T, HV], Tensor [HV], Tensor [B, T, HV]
        Decay rate, raw gate, its bias and the raw write strength.
    scale : float, optional
        Factor of the queries. None = K**-0.5.
    output : Tensor [B, T, HV, V], optional
        Where to write the result, in the dtype of `v`.
    intermediate_states_buffer : Tensor [>= B, >= T, HV, V, K], optional
        Where to write the state after each token, float32 or bfloat16, contiguous; for T > 1 and a pool that is left as it is.
    ssm_state_indices : Tensor [B, T], optional
        Slots of the states after each token; needs ``disable_state_update=False``. A negative one is not written.
    disable_state_update : bool, optional
        True leaves the pool as it is. None means True, as in FlashInfer before 0.8.
    use_qk_l2norm : bool
        Whether to normalise q and k.
    output_state_indices : Tensor [B], optional
        Slots of the states after the last tokens, instead of those that were read; a negative one is not written.
    cache_replayssm, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta : False, None
        Only these are served.

    Returns
    -------
    o : Tensor [B, T, HV, V]
        Output in the dtype of `v`; `output` itself where it is given.
    initial_state : Tensor
        The pool.

    Raises
    ------
    gdn.integrations.Refused
        Where this project does not serve the call.
    TypeError, ValueError
        As raised by `gdn.fused_recurrent_gated_delta_rule`.
    """
    read, written, buffer, rows = initial_state_indices, output_state_indices, intermediate_states_buffer, None
    if ssm_state_indices is not None:
        read, written = initial_state_indices[:, None].expand(ssm_state_indices.shape), ssm_state_indices
    if buffer is not None:
        (read, rows), written = _rows(read, q), None
    o, _ = _recurrent(scale, use_qk_l2norm, True, disable_state_update is not False, None)(
        q, k, v, a, b, initial_state, None, read, None, A_log, dt_bias, written, intermediate_states=buffer,
        intermediate_indices=rows, out=output,
    )  # fmt: skip
    return o, initial_state


def enable(*, take_named_backend: bool = False, strict: bool = False, allow_reference: bool = False) -> _handle.Handle:
    """Replaces FlashInfer's Gated DeltaNet functions by those of this module, where FlashInfer's modules hold them.

    Callers that import them inside of a function, as vLLM does, see the replacements.

    Parameters
    ----------
    take_named_backend : bool
        Serve calls that name ``backend="flashinfer"`` too, as vLLM does. Calls that name another are always left.
    strict : bool
        Raise where a function's signature is not the recorded one, instead of leaving it alone.
    allow_reference : bool
        Serve tensors on the CPU, by the plain-torch reference, on any machine. For tests.

    Returns
    -------
    Handle
        Reports and puts FlashInfer's functions back. A second call with the same options returns the same handle.

    Raises
    ------
    ValueError
        If it is enabled with other options.
    RuntimeError
        With strict, if a function cannot be replaced.
    """
    replaced: tuple[tuple[str, Any, Any], ...] = (
        ("gdn_prefill", refuse.chunk, chunk_gated_delta_rule),
        ("gdn_decode", refuse.pretranspose, gated_delta_rule_decode_pretranspose),
        ("gdn_decode", refuse.decode, gated_delta_rule_decode),
        ("gdn_decode", refuse.mtp, gated_delta_rule_mtp),
    )
    points = []
    for module, refusal, function in replaced:
        if refusal is not refuse.mtp:  # which names no backend
            refusal = functools.partial(refusal, take_named_backend=take_named_backend)
        path, exported = (f"flashinfer.{place}" for place in (f"{module}.{function.__name__}", function.__name__))
        points.append(_points.attribute(path, refusal, inspect.unwrap(function), also=(exported,)))
    options = {"take_named_backend": take_named_backend}
    return _handle.enable(_hosts.FLASHINFER, points, strict=strict, allow_reference=allow_reference, options=options)
