"""Reference of every operator in plain torch, on any device: the public names and arguments without `backend`."""

from gdn.reference.attention import attention as attention
from gdn.reference.attention import sparse_attention as sparse_attention
from gdn.reference.conv import causal_conv1d_fn as causal_conv1d_fn
from gdn.reference.conv import causal_conv1d_update as causal_conv1d_update
from gdn.reference.delta_rule import chunk_gated_delta_rule as chunk_gated_delta_rule
from gdn.reference.delta_rule import chunk_summary as chunk_summary
from gdn.reference.delta_rule import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
from gdn.reference.gated_delta_rule import gated_delta_rule as gated_delta_rule
from gdn.reference.indexer import compress_indexer_keys as compress_indexer_keys
from gdn.reference.indexer import gather_indexer_cache as gather_indexer_cache
from gdn.reference.indexer import prepare_indexer as prepare_indexer
from gdn.reference.indexer import quantize_fp8 as quantize_fp8
from gdn.reference.indexer import write_indexer_cache as write_indexer_cache
from gdn.reference.logits import mqa_logits as mqa_logits
from gdn.reference.logits import paged_mqa_logits as paged_mqa_logits
from gdn.reference.prefill import fused_gdn_prefill as fused_gdn_prefill
from gdn.reference.steps import add_rms_norm as add_rms_norm
from gdn.reference.steps import fused_gdn_decode as fused_gdn_decode
from gdn.reference.steps import fused_gdn_gating as fused_gdn_gating
from gdn.reference.steps import fused_qkvzba_split_reshape_cat as fused_qkvzba_split_reshape_cat
from gdn.reference.steps import rms_norm_gated as rms_norm_gated
from gdn.reference.topk import expand_topk_groups as expand_topk_groups
from gdn.reference.topk import indexer_topk as indexer_topk
from gdn.reference.topk import paged_indexer_topk as paged_indexer_topk
from gdn.reference.topk import topk_indices as topk_indices
