"""Gated DeltaNet and QSA kernels for Hopper (SM90), behind plain functions on torch tensors.

Names load on first use: `import gdn` imports neither CUDA nor a DSL.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_EXPORTS: dict[str, str] = {
    "chunk_gated_delta_rule": "gdn.ops.chunk",
    "fused_recurrent_gated_delta_rule": "gdn.ops.recurrent",
    "fused_gdn_decode": "gdn.ops.decode",
    "fused_gdn_gating": "gdn.ops.gating",
    "fused_qkvzba_split_reshape_cat": "gdn.ops.split",
    "causal_conv1d_fn": "gdn.ops.conv",
    "causal_conv1d_update": "gdn.ops.conv",
    "rms_norm_gated": "gdn.ops.norm",
    "quantize_fp8": "gdn.ops.indexer",
    "write_indexer_cache": "gdn.ops.indexer",
    "prepare_indexer": "gdn.ops.indexer",
    "compress_indexer_keys": "gdn.ops.indexer",
    "gather_indexer_cache": "gdn.ops.indexer",
    "expand_topk_groups": "gdn.ops.topk",
    "topk_indices": "gdn.ops.topk",
    "mqa_logits": "gdn.ops.mqa_logits",
    "fp8_mqa_logits": "gdn.ops.mqa_logits",
    "paged_mqa_logits": "gdn.ops.paged_mqa_logits",
    "fp8_paged_mqa_logits": "gdn.ops.paged_mqa_logits",
    "get_paged_mqa_logits_metadata": "gdn.ops.paged_mqa_logits",
    "indexer_topk": "gdn.ops.indexer_topk",
    "paged_indexer_topk": "gdn.ops.indexer_topk",
    "sparse_attention": "gdn.ops.sparse_attention",
    "explain": "gdn.ops.explain",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'gdn' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next access is a plain attribute
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
