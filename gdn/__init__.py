"""Gated DeltaNet and QSA kernels for Hopper (SM90) as plain functions on torch tensors.

`import gdn` registers the operators with torch.library (`torch.ops.gdn`); it touches neither CUDA nor a DSL, which load with the
first kernel.
"""

from gdn.core.explain import explain as explain
from gdn.ops.attention import OPERATORS as _ATTENTION
from gdn.ops.attention.attention import attention as attention
from gdn.ops.attention.sparse_attention import sparse_attention as sparse_attention
from gdn.ops.context import OPERATORS as _CONTEXT
from gdn.ops.delta_rule import OPERATORS as _DELTA_RULE
from gdn.ops.delta_rule import REPLAY_OPERATORS as _REPLAY
from gdn.ops.delta_rule.chunk import chunk_gated_delta_rule as chunk_gated_delta_rule
from gdn.ops.delta_rule.chunk_summary import chunk_summary as chunk_summary
from gdn.ops.delta_rule.gated_delta_rule import gated_delta_rule as gated_delta_rule
from gdn.ops.delta_rule.recurrent import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
from gdn.ops.delta_rule.replay import accept_draft_tree as accept_draft_tree
from gdn.ops.delta_rule.replay import fold_states as fold_states
from gdn.ops.delta_rule.replay import ring_shape as ring_shape
from gdn.ops.indexer import OPERATORS as _INDEXER
from gdn.ops.indexer.cache import gather_indexer_cache as gather_indexer_cache
from gdn.ops.indexer.cache import write_indexer_cache as write_indexer_cache
from gdn.ops.indexer.indexer_topk import indexer_topk as indexer_topk
from gdn.ops.indexer.indexer_topk import paged_indexer_topk as paged_indexer_topk
from gdn.ops.indexer.mqa_logits import fp8_mqa_logits as fp8_mqa_logits
from gdn.ops.indexer.mqa_logits import mqa_logits as mqa_logits
from gdn.ops.indexer.paged_mqa_logits import fp8_paged_mqa_logits as fp8_paged_mqa_logits
from gdn.ops.indexer.paged_mqa_logits import get_paged_mqa_logits_metadata as get_paged_mqa_logits_metadata
from gdn.ops.indexer.paged_mqa_logits import paged_mqa_logits as paged_mqa_logits
from gdn.ops.indexer.prepare import compress_indexer_keys as compress_indexer_keys
from gdn.ops.indexer.prepare import prepare_indexer as prepare_indexer
from gdn.ops.indexer.prepare import quantize_fp8 as quantize_fp8
from gdn.ops.indexer.topk import expand_topk_groups as expand_topk_groups
from gdn.ops.indexer.topk import topk_indices as topk_indices
from gdn.ops.layer_step import OPERATORS as _LAYER_PARTS
from gdn.ops.layer_step import STEP_OPERATORS as _LAYER_STEPS
from gdn.ops.layer_step.conv import causal_conv1d_fn as causal_conv1d_fn
from gdn.ops.layer_step.conv import causal_conv1d_update as causal_conv1d_update
from gdn.ops.layer_step.decode import fused_gdn_decode as fused_gdn_decode
from gdn.ops.layer_step.gating import fused_gdn_gating as fused_gdn_gating
from gdn.ops.layer_step.norm import add_rms_norm as add_rms_norm
from gdn.ops.layer_step.norm import rms_norm_gated as rms_norm_gated
from gdn.ops.layer_step.prefill import fused_gdn_prefill as fused_gdn_prefill
from gdn.ops.layer_step.split import fused_qkvzba_split_reshape_cat as fused_qkvzba_split_reshape_cat
from gdn.runtime import register as _register
from gdn.warmup import warmup as warmup

_register(_DELTA_RULE, _LAYER_STEPS, _REPLAY, _LAYER_PARTS, _INDEXER, _ATTENTION, _CONTEXT)

__version__ = "0.2.0"
__all__ = ["__version__", *sorted(name for name, value in globals().items() if callable(value) and name[0] != "_")]
