"""What the FlashInfer adapter leaves to FlashInfer: one function for each of its functions, with the same arguments.

Each takes `allow_reference` besides, and `take_named_backend`: whether a call that names FlashInfer's own kernels is served.
"""

from typing import Literal

import torch
from torch import Tensor

from gdn.integrations._calls import unserved, unserved_state

_ALIGNMENT = 16  # bytes: of states that are updated in place
_LARGEST_DIM = 256


def _unserved_backend(backend: str, take_named_backend: bool) -> str | None:
    """A call that names FlashInfer's own kernels keeps them, unless the user of `enable` said otherwise."""
    if backend == "auto" or (backend == "flashinfer" and take_named_backend):
        return None
    return f"backend {backend!r} is named"


def _unserved_rows(q: Tensor, k: Tensor, v: Tensor, output: Tensor | None) -> str | None:
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v differ in dtype"
    for dim in (q.shape[-1], v.shape[-1]):
        if dim % 4 or dim > _LARGEST_DIM:
            return f"head dim {dim} has no kernel"
    if output is not None and output.dtype != v.dtype:
        return "output differs in dtype"
    if output is not None and output.stride(-1) != 1:
        return "output's last dimension is not contiguous"
    return None


def _unserved_pool(state: Tensor) -> str | None:
    """States that are updated in place: kernels take their strides as they are, or not at all."""
    if state.dim() != 4:
        return f"states of {state.dim()} dimensions"
    inner = state[0] if state.shape[0] else state
    if not inner.is_contiguous():
        return "the states of a slot are not contiguous"
    if state.shape[0] > 1 and state.stride(0) * state.element_size() % _ALIGNMENT:
        return f"the stride of slots is not a multiple of {_ALIGNMENT} bytes"
    return unserved_state(state)


def _unserved_snapshots(intermediate_states: Tensor | None) -> str | None:
    """States after each token in a buffer of their own: the operators have no such argument yet."""
    return None if intermediate_states is None else "a buffer of intermediate states"


def chunk(
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
    *,
    take_named_backend: bool = True,
    allow_reference: bool = False,
) -> str | None:
    if reason := _unserved_backend(backend, take_named_backend):
        return reason
    if reason := unserved(q, (k, v, g, beta, initial_state), allow_reference) or _unserved_rows(q, k, v, output):
        return reason
    if q.shape[-1] != v.shape[-1]:
        return "key and value head dims differ"
    if cu_seqlens is None or cu_seqlens.dtype not in (torch.int32, torch.int64):
        return "cu_seqlens is not int32 or int64"
    if state_checkpoints is not None or checkpoint_every_n_tokens:  # to be lifted with `checkpoint_states` of the operator
        return "checkpoints in a tensor of their own"
    if output_state is not None and not output_final_state:
        return "output_state without output_final_state"
    if reason := unserved_state(initial_state) or unserved_state(output_state):
        return reason
    if state_indices is not None:
        return _chunk_pool(initial_state, output_final_state, output_state)
    if initial_state is not None and output_state is initial_state:
        return _unserved_pool(initial_state)
    return None


def _chunk_pool(pool: Tensor | None, output_final_state: bool, output_state: Tensor | None) -> str | None:
    if pool is None:
        return "state_indices without initial_state"
    if output_final_state and not _is_same(pool, output_state):
        return "an output_state pool other than initial_state"
    return _unserved_pool(pool)


def _is_same(state: Tensor, other: Tensor | None) -> bool:
    if other is None or other is state:
        return other is state
    same_form = (state.shape, state.stride(), state.dtype) == (other.shape, other.stride(), other.dtype)
    return same_form and state.data_ptr() == other.data_ptr()


def pretranspose(
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
    *,
    take_named_backend: bool = True,
    allow_reference: bool = False,
) -> str | None:
    if reason := _unserved_backend(backend, take_named_backend):
        return reason
    if reason := unserved(q, (k, v, state, A_log, a, dt_bias, b, initial_state), allow_reference):
        return reason
    if reason := _unserved_rows(q, k, v, output) or _unserved_snapshots(intermediate_states_buffer):
        return reason
    if (initial_state is None) != (initial_state_indices is None):
        return "initial_state and initial_state_indices do not come together"
    pool = state if initial_state is None else initial_state
    if pool is None:
        return "no state"
    if initial_state is None and output_state_indices is not None:
        return "output_state_indices without initial_state"
    if disable_state_update and q.shape[1] == 1:
        return "disable_state_update of one token"
    return _unserved_pool(pool)


def decode(
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
    *,
    take_named_backend: bool = True,
    allow_reference: bool = False,
) -> str | None:
    if reason := _unserved_backend(backend, take_named_backend):
        return reason
    if reason := unserved(q, (k, v, state, A_log, a, dt_bias, b), allow_reference) or _unserved_rows(q, k, v, output):
        return reason
    if q.shape[1] != 1:
        return "more than one token"
    return _unserved_pool(state)


def mtp(
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
    *,
    allow_reference: bool = False,
) -> str | None:
    if reason := unserved(q, (k, v, initial_state, A_log, a, dt_bias, b), allow_reference):
        return reason
    if reason := _unserved_rows(q, k, v, output) or _unserved_snapshots(intermediate_states_buffer):
        return reason
    windows = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    if cache_replayssm or any(one is not None for one in windows):
        return "ReplaySSM"
    if ssm_state_indices is not None:
        if disable_state_update is not False:
            return "ssm_state_indices without disable_state_update=False"
        if output_state_indices is not None:
            return "both ssm_state_indices and output_state_indices"
    return _unserved_pool(initial_state)
