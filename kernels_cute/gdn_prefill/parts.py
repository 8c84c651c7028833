"""The operators that a prefill step is made of: their problems, and the arguments of their launches.

The convolution writes its rows [L, 2 * H * K + HV * V] to the start of the workspace, of which q, k and v are slices; the chunk
kernel writes `out`, and the norm replaces it in place. Projections that come as two tensors are read where they are: the
convolution finds its channels (`steps.py`), and z, b and a are views of the wide rows, [L, H, r, ...] of interleaved and
[L, HV, ...] of merged ones.
"""

import functools
from typing import Any

import torch

from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem
from gdn.ops.layer_step.problem import (
    Conv1dParams,
    Conv1dProblem,
    GdnDecodeProblem,
    GdnPrefillParams,
    GdnPrefillProblem,
    RmsNormGatedParams,
    RmsNormGatedProblem,
)
from gdn.problem import DTYPE_BYTES

ALIGNMENT = 256  # bytes, of the parts of the workspace


@functools.lru_cache(maxsize=256)
def conv_problem(problem: GdnPrefillProblem) -> Conv1dProblem:
    p = problem
    return Conv1dProblem(
        dim=p.dim, width=p.width, dtype=p.dtype, weight_dtype=p.weight_dtype, bias_dtype=p.bias_dtype, silu=p.silu,
        state_dtype=p.conv_dtype, state_channels_contiguous=p.conv_channels_contiguous, cu_seqlens_dtype=p.cu_seqlens_dtype,
        index_dtype=p.index_dtype, has_mask=p.has_mask, checkpoint_dtype=p.index_dtype if p.keeps_windows else None,
        checkpoint_window_dtype=p.checkpoint_window_dtype,
        num_tokens=p.num_tokens, num_sequences=p.num_sequences,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def chunk_problem(problem: GdnPrefillProblem) -> ChunkProblem:
    p = problem
    return ChunkProblem(
        num_q_heads=p.num_k_heads, num_k_heads=p.num_k_heads, num_v_heads=p.num_v_heads, head_k_dim=p.head_k_dim,
        head_v_dim=p.head_v_dim, dtype=p.dtype, state_dtype=p.state_dtype, gate_dtype=p.a_dtype or p.b_dtype,
        beta_dtype=p.b_dtype, cu_seqlens_dtype=p.cu_seqlens_dtype, index_dtype=p.index_dtype, state_v_first=p.state_v_first,
        use_qk_l2norm=True, use_gate=True, use_beta_sigmoid=True, has_initial_state=True, has_final_state=True,
        has_final_indices=False, has_mask=p.has_mask, has_checkpoints=p.keeps_states,
        checkpoint_state_dtype=p.checkpoint_state_dtype, num_tokens=p.num_tokens, num_sequences=p.num_sequences,
        longest=p.longest,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def norm_problem(problem: GdnPrefillProblem) -> RmsNormGatedProblem:
    p = problem
    return RmsNormGatedProblem(
        num_heads=p.num_v_heads, head_dim=p.head_v_dim, dtype=p.dtype, z_dtype=p.z_dtype or p.dtype, weight_dtype=p.norm_dtype,
        sigmoid=p.gate_sigmoid, num_tokens=p.num_tokens,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def decode_problem(problem: GdnPrefillProblem) -> GdnDecodeProblem:
    """The decode step of the sequences of one token, the same for all sizes of a call."""
    p = problem
    return GdnDecodeProblem(
        num_k_heads=p.num_k_heads, num_v_heads=p.num_v_heads, head_k_dim=p.head_k_dim, head_v_dim=p.head_v_dim, width=p.width,
        dtype=p.dtype, z_dtype=p.z_dtype, a_dtype=p.a_dtype, b_dtype=p.b_dtype, weight_dtype=p.weight_dtype,
        bias_dtype=p.bias_dtype, A_log_dtype=p.A_log_dtype, dt_bias_dtype=p.dt_bias_dtype, norm_dtype=p.norm_dtype,
        conv_dtype=p.conv_dtype, conv_channels_contiguous=p.conv_channels_contiguous, state_dtype=p.state_dtype,
        state_v_first=p.state_v_first, index_dtype=p.index_dtype, cu_seqlens_dtype=None, interleaved=p.interleaved,
        concatenated=False, silu=p.silu, gate_sigmoid=p.gate_sigmoid, has_columns=False, has_accepted=False, has_rounding=False,
        merged=p.merged, num_tokens=1, num_sequences=1,
    )  # fmt: skip


def rows_bytes(problem: GdnPrefillProblem) -> int:
    """Bytes of the convolution's rows in the workspace."""
    return int(whole(problem.num_tokens * problem.dim * DTYPE_BYTES[problem.dtype]))


def whole(num_bytes: Any) -> Any:
    return (num_bytes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


def kept_windows(problem: GdnPrefillProblem, p: GdnPrefillParams) -> tuple[Any, Any, Any]:
    """The convolution's checkpoint_offsets, checkpoint_slots and checkpoint_windows."""
    if not problem.keeps_windows:
        return None, None, None
    return p.checkpoint_offsets, p.checkpoint_slots, p.checkpoint_windows


def kept_states(problem: GdnPrefillProblem, p: GdnPrefillParams) -> tuple[Any, Any, Any]:
    """The chunk kernel's checkpoint_offsets, checkpoint_slots and checkpoint_states."""
    if not problem.keeps_states:
        return None, None, None
    return p.checkpoint_offsets, p.checkpoint_slots, p.checkpoint_states


def conv_params(problem: GdnPrefillProblem, params: GdnPrefillParams, rows: Any) -> Conv1dParams:
    """rows: the convolution's output [L, dim]."""
    p = params
    mask = None if p.has_initial_state is None else p.has_initial_state.view(torch.uint8)
    return Conv1dParams(
        p.mixed_qkv, p.conv_weight, p.conv_bias, p.conv_states, p.cu_seqlens, p.state_indices, mask,
        *kept_windows(problem, p), rows, p.null_slot,
    )  # fmt: skip


def chunk_params(problem: GdnPrefillProblem, params: GdnPrefillParams, rows: Any, workspace: Any) -> ChunkParams:
    """workspace: what follows the rows, or None where the chunk kernel needs none."""
    p, (H, HV, K, V) = params, (problem.num_k_heads, problem.num_v_heads, problem.head_k_dim, problem.head_v_dim)
    length, width = rows.shape
    strides = (length * width, width)
    q = rows.as_strided((1, length, H, K), (*strides, K, 1), rows.storage_offset())
    k = rows.as_strided((1, length, H, K), (*strides, K, 1), rows.storage_offset() + H * K)
    v = rows.as_strided((1, length, HV, V), (*strides, V, 1), rows.storage_offset() + 2 * H * K)
    if problem.merged:
        (token, step), size = p.b.stride(), (1, length, HV)
        a, b = (p.b.as_strided(size, (token, token, step), p.b.storage_offset() + first * step) for first in (HV, 0))
    else:
        a, b = (x[None] for x in ((p.a, p.b) if p.a is not None else _gates(p.b, H, HV // H)))
    return ChunkParams(
        q, k, v, a, b, p.A_log.float(), p.dt_bias.float(), p.ssm_state, p.state_indices, p.has_initial_state, p.ssm_state, None,
        p.cu_seqlens, *kept_states(problem, p), p.out[None], workspace, p.scale, p.null_slot,
    )  # fmt: skip


def norm_params(problem: GdnPrefillProblem, params: GdnPrefillParams) -> RmsNormGatedParams:
    """The norm of `out`, in place."""
    p, H, V = params, problem.num_k_heads, problem.head_v_dim
    z = p.z
    if problem.merged:
        size, rows = (p.out.shape[0], problem.num_v_heads, V), p.mixed_qkv
        z = rows.as_strided(size, (rows.stride(0), V, 1), rows.storage_offset() + problem.dim)
    elif z is None:  # [L, H, r, V]
        ratio = problem.num_v_heads // H
        z = p.mixed_qkv.unflatten(1, (H, -1))[:, :, 2 * problem.head_k_dim + ratio * V :].unflatten(2, (ratio, V))
    return RmsNormGatedParams(p.out, z, p.norm_weight, p.out, p.eps)


def _gates(b: Any, groups: int, ratio: int) -> tuple[Any, Any]:
    """a and b [L, HV] from interleaved rows [L, 2 * HV]: copies, of a few bytes a token."""
    grouped = b.unflatten(1, (groups, 2 * ratio))
    return grouped[:, :, ratio:].flatten(1), grouped[:, :, :ratio].flatten(1)
