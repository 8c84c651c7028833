"""Gated DeltaNet and QSA kernels for Hopper (SM90) as plain functions on torch tensors.

`import gdn` registers the operators with torch.library (`torch.ops.gdn`); it touches neither CUDA nor a DSL, which load with the
first kernel.
"""

from gdn.ops.chunk import chunk_gated_delta_rule
from gdn.ops.conv import causal_conv1d_fn, causal_conv1d_update
from gdn.ops.decode import fused_gdn_decode
from gdn.ops.explain import explain
from gdn.ops.gating import fused_gdn_gating
from gdn.ops.indexer import compress_indexer_keys, prepare_indexer, quantize_fp8
from gdn.ops.indexer_cache import gather_indexer_cache, write_indexer_cache
from gdn.ops.indexer_topk import indexer_topk, paged_indexer_topk
from gdn.ops.mqa_logits import fp8_mqa_logits, mqa_logits
from gdn.ops.norm import rms_norm_gated
from gdn.ops.paged_mqa_logits import fp8_paged_mqa_logits, get_paged_mqa_logits_metadata, paged_mqa_logits
from gdn.ops.recurrent import fused_recurrent_gated_delta_rule
from gdn.ops.sparse_attention import sparse_attention
from gdn.ops.split import fused_qkvzba_split_reshape_cat
from gdn.ops.topk import expand_topk_groups, topk_indices

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "compress_indexer_keys",
    "expand_topk_groups",
    "explain",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fused_gdn_decode",
    "fused_gdn_gating",
    "fused_qkvzba_split_reshape_cat",
    "fused_recurrent_gated_delta_rule",
    "gather_indexer_cache",
    "get_paged_mqa_logits_metadata",
    "indexer_topk",
    "mqa_logits",
    "paged_indexer_topk",
    "paged_mqa_logits",
    "prepare_indexer",
    "quantize_fp8",
    "rms_norm_gated",
    "sparse_attention",
    "topk_indices",
    "write_indexer_cache",
]
