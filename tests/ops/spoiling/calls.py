"""A small good call of every public operator from a seed: forms, dtypes and layouts are drawn."""

from collections.abc import Callable

from tests.ops.spoiling import calls_delta_rule, calls_indexer, calls_projections, calls_replay, calls_steps
from tests.ops.spoiling.call import Call, Draw

OPERATORS: dict[str, Callable[[Draw], Call]] = {
    "chunk_gated_delta_rule": calls_delta_rule.chunk,
    "chunk_summary": calls_delta_rule.summary,
    "fused_recurrent_gated_delta_rule": calls_delta_rule.recurrent,
    "gated_delta_rule": calls_delta_rule.step,
    "fused_gdn_decode": calls_projections.decode,
    "fold_states": calls_replay.fold,
    "accept_draft_tree": calls_replay.accept,
    "fused_gdn_prefill": calls_projections.prefill,
    "fused_gdn_gating": calls_steps.gating,
    "fused_qkvzba_split_reshape_cat": calls_steps.split,
    "causal_conv1d_fn": calls_steps.conv_fn,
    "causal_conv1d_update": calls_steps.conv_update,
    "add_rms_norm": calls_steps.add_norm,
    "rms_norm_gated": calls_steps.norm,
    "quantize_fp8": calls_indexer.quantize,
    "write_indexer_cache": calls_indexer.write,
    "prepare_indexer": calls_indexer.prepare,
    "compress_indexer_keys": calls_indexer.compress,
    "gather_indexer_cache": calls_indexer.gather,
    "expand_topk_groups": calls_indexer.expand,
    "mqa_logits": calls_indexer.mqa_logits,
    "fp8_mqa_logits": calls_indexer.fp8_mqa_logits,
    "paged_mqa_logits": calls_indexer.paged_mqa_logits,
    "fp8_paged_mqa_logits": calls_indexer.fp8_paged_mqa_logits,
    "topk_indices": calls_indexer.topk_indices,
    "indexer_topk": calls_indexer.indexer_topk,
    "paged_indexer_topk": calls_indexer.paged_indexer_topk,
    "attention": calls_indexer.attention,
    "sparse_attention": calls_indexer.sparse_attention,
}


def good_call(operator: str, seed: int) -> Call:
    call = OPERATORS[operator](Draw(seed))
    call.seed = seed
    return call
