"""What the FlashInfer adapter leaves to FlashInfer: one function for each of its functions, of the arguments that it reads.

Each takes `allow_reference` besides, and `take_named_backend`: whether a call that names FlashInfer's own kernels is served.
"""

import torch
from torch import Tensor

from gdn.integrations._calls import unserved, unserved_state

_ALIGNMENT = 16  # bytes: of states that are updated in place
_LARGEST_DIM = 256
_LARGEST_DIM_OF_CHECKPOINTS = 128
_CHUNK = 64  # tokens between two states that prefill can store
_INDEX_DTYPES = (torch.int32, torch.int64)


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
    queries, keys, values = q.shape[-2], k.shape[-2], v.shape[-2]
    if not (queries == keys and values % keys == 0 or keys == values and queries % keys == 0):
        return f"{queries} query, {keys} key and {values} value heads"
    if output is not None and output.dtype != v.dtype:
        return "output differs in dtype"
    if output is not None and output.stride(-1) != 1:
        return "output's last dimension is not contiguous"
    return None


def _unserved_pool(state: Tensor) -> str | None:
    """States that are updated in place: kernels take their strides as they are, or not at all."""
    if state.dim() != 4:
        return f"states of {state.dim()} dimensions"
    if not state.is_contiguous() and not (state[0] if state.shape[0] else state).is_contiguous():
        return "the states of a slot are not contiguous"
    if state.shape[0] > 1 and state.stride(0) * state.shape[0] < state.numel():
        return "the states of several slots share memory"
    return _unserved_slots(state)


def _unserved_slots(state: Tensor) -> str | None:
    """Whose slots, or rows of slots that follow each other, are contiguous."""
    size = state.element_size()
    if state.shape[0] > 1 and state.stride()[-4] * size % _ALIGNMENT:
        return f"the stride of slots is not a multiple of {_ALIGNMENT} bytes"
    if state.storage_offset() * size % _ALIGNMENT:
        return f"the states begin at no multiple of {_ALIGNMENT} bytes"
    return unserved_state(state)


def _unserved_buffer(buffer: Tensor | None, q: Tensor, updates_pool: bool) -> str | None:
    """A buffer [>= B, >= T, HV, V, K] that takes the states after each token, while the pool stays as it is."""
    if buffer is None:
        return None
    if q.shape[1] == 1:
        return "a buffer of intermediate states for one token"
    if updates_pool:
        return "a buffer of intermediate states beside an update of the pool"
    if buffer.dim() != 5 or buffer.shape[0] < q.shape[0] or buffer.shape[1] < q.shape[1]:
        return f"a buffer of intermediate states with shape {list(buffer.shape)}"
    if not buffer.is_contiguous():
        return "the buffer of intermediate states is not contiguous"
    return _unserved_slots(buffer)


def _unserved_checkpoints(rows: Tensor | None, starts: Tensor | None, every: int, sequences: int, head_dim: int) -> str | None:
    """Checkpoints in a tensor [rows, HS, V, K] of their own, those of sequence n from row starts[n] on."""
    if not every:
        given = rows is not None or starts is not None
        return "checkpoints without checkpoint_every_n_tokens" if given else None
    if every < 0 or every % _CHUNK:
        return f"checkpoints every {every} tokens"
    if rows is None or starts is None:
        return "checkpoint_every_n_tokens without state_checkpoints and checkpoint_cu_starts"
    if starts.dtype not in _INDEX_DTYPES or starts.shape != (sequences + 1,):
        return "checkpoint_cu_starts is not int32 or int64 of one entry a sequence and one more"
    if head_dim > _LARGEST_DIM_OF_CHECKPOINTS:
        return f"checkpoints of head dim {head_dim} have no kernel"
    return _unserved_pool(rows)


def chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None,
    output_final_state: bool, cu_seqlens: Tensor | None, output: Tensor | None, output_state: Tensor | None,
    state_checkpoints: Tensor | None, checkpoint_cu_starts: Tensor | None, checkpoint_every_n_tokens: int,
    state_indices: Tensor | None, backend: str, allow_reference: bool, take_named_backend: bool = True,
) -> str | None:  # fmt: skip
    if reason := _unserved_backend(backend, take_named_backend):
        return reason
    if reason := unserved(q, (k, v, g, beta, initial_state), allow_reference) or _unserved_rows(q, k, v, output):
        return reason
    if q.shape[-1] != v.shape[-1]:
        return "key and value head dims differ"
    if cu_seqlens is None or cu_seqlens.dtype not in _INDEX_DTYPES:
        return "cu_seqlens is not int32 or int64"
    sequences, dim = cu_seqlens.shape[0] - 1, q.shape[-1]
    if reason := _unserved_checkpoints(state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, sequences, dim):
        return reason
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
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    output: Tensor | None, initial_state: Tensor | None, initial_state_indices: Tensor | None,
    output_state_indices: Tensor | None, intermediate_states_buffer: Tensor | None, disable_state_update: bool, backend: str,
    allow_reference: bool, take_named_backend: bool = True,
) -> str | None:  # fmt: skip
    if reason := _unserved_backend(backend, take_named_backend):
        return reason
    if reason := unserved(q, (k, v, state, A_log, a, dt_bias, b, initial_state), allow_reference):
        return reason
    if reason := _unserved_rows(q, k, v, output) or _unserved_buffer(intermediate_states_buffer, q, not disable_state_update):
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
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    output: Tensor | None, backend: str, allow_reference: bool, take_named_backend: bool = True,
) -> str | None:  # fmt: skip
    if reason := _unserved_backend(backend, take_named_backend):
        return reason
    if reason := unserved(q, (k, v, state, A_log, a, dt_bias, b), allow_reference) or _unserved_rows(q, k, v, output):
        return reason
    if q.shape[1] != 1:
        return "more than one token"
    return _unserved_pool(state)


def mtp(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    output: Tensor | None, intermediate_states_buffer: Tensor | None, ssm_state_indices: Tensor | None,
    disable_state_update: bool | None, output_state_indices: Tensor | None, cache_replayssm: bool,
    replayssm_rawv: Tensor | None, replayssm_rawk: Tensor | None, replayssm_g: Tensor | None, replayssm_beta: Tensor | None,
    allow_reference: bool,
) -> str | None:  # fmt: skip
    if reason := unserved(q, (k, v, initial_state, A_log, a, dt_bias, b), allow_reference):
        return reason
    updates_pool = disable_state_update is False
    if reason := _unserved_rows(q, k, v, output) or _unserved_buffer(intermediate_states_buffer, q, updates_pool):
        return reason
    has_windows = replayssm_rawv is not None or replayssm_rawk is not None
    if cache_replayssm or has_windows or replayssm_g is not None or replayssm_beta is not None:
        return "ReplaySSM"
    if ssm_state_indices is not None:
        if not updates_pool:
            return "ssm_state_indices without disable_state_update=False"
        if output_state_indices is not None:
            return "both ssm_state_indices and output_state_indices"
    return _unserved_pool(initial_state)
