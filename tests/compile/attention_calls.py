"""Params of launches of the attention kernels, in the strides that a call may have."""

from typing import Any

import torch

from gdn.ops.attention.problem import (
    AttentionPrefillParams,
    AttentionPrefillProblem,
    SparseDecodeParams,
    SparseDecodeProblem,
    SparsePrefillParams,
)
from tests.compile import fake_cuda


def params_of(problem: Any, workspace_bytes: int = 0) -> Any:
    """At most five tokens of three sequences. Everything has gaps that may have some; K and V of a head are next to each other
    where the heads are apart."""
    dtype, dim, heads = getattr(torch, problem.dtype), problem.head_dim, problem.num_heads
    tokens, sequences = min(problem.num_tokens, 5), min(problem.num_sequences, 3)
    shape = (7, problem.block_size + 1, problem.num_kv_heads, dim)
    k_cache, v_cache = torch.zeros(2, *shape, dtype=dtype)[:, :, :-1]
    if not problem.heads_adjacent:
        k_cache, v_cache = torch.zeros(*shape[:2], shape[2] + 2, 2 * dim, dtype=dtype)[:, :-1, :-2].split(dim, dim=3)
    values: dict[str, Any] = {
        "q": torch.zeros(tokens, heads, dim, dtype=dtype), "k_cache": k_cache, "v_cache": v_cache,
        "block_tables": torch.zeros(sequences, 12, dtype=torch.int32)[:, :9],
        "query_start_loc": torch.zeros(sequences + 1, dtype=torch.int32), "seq_lens": torch.zeros(sequences, dtype=torch.int32),
        "gate": torch.zeros(tokens, heads + 2, 2 * dim, dtype=dtype)[:, :-2, dim:] if problem.has_gate else None,
        "out": torch.zeros(tokens, heads + 1, dim + 1, dtype=dtype)[:, :-1, :-1], "lse": torch.zeros(tokens, heads),
        "topk_length": torch.zeros(tokens, dtype=torch.int32) if problem.has_topk_length else None,
        "workspace": fake_cuda.workspace(workspace_bytes), "scale": 0.1,
    }  # fmt: skip
    if isinstance(problem, AttentionPrefillProblem):
        return AttentionPrefillParams(**{name: values[name] for name in AttentionPrefillParams._fields})
    is_dense = problem.index_dtype is None
    values["topk_indices"] = (
        None if is_dense else torch.zeros(tokens, problem.k + 3, dtype=getattr(torch, problem.index_dtype))[:, :-3]
    )
    kind: Any = SparseDecodeParams if isinstance(problem, SparseDecodeProblem) else SparsePrefillParams
    return kind(**values)
