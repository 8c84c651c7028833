"""The indexer of sparse attention: its queries and keys, its cache, scores and selection."""

from gdn.runtime.registry import CUTE_FIRST, Operator, Preference, Statement, family, modules

_LOGITS, _TOPK, _INDEXER = family("indexer", "logits"), family("indexer", "topk"), family("indexer", "indexer")

OPERATORS = (
    Operator("quantize_fp8", _INDEXER, ("quantize_fp8",), modules("indexer.quantize_fp8", "cute")),
    Operator("write_indexer_cache", _INDEXER, ("write_indexer_cache",), modules("indexer.write_indexer_cache", "cute")),
    Operator("prepare_indexer", _INDEXER, ("prepare_indexer",), modules("indexer.prepare_indexer", "cute")),
    Operator("compress_indexer_keys", _INDEXER, ("compress_indexer_keys",), modules("indexer.compress_indexer_keys", "cute")),
    Operator("gather_indexer_cache", _INDEXER, ("gather_indexer_cache",), modules("indexer.gather_indexer_cache", "cute")),
    Operator("expand_topk_groups", _INDEXER, ("expand_topk_groups",), modules("indexer.expand_topk_groups", "cute")),
    Operator(
        "mqa_logits", _LOGITS, ("mqa_logits", "fp8_mqa_logits"), modules("mqa_logits.ragged", "cute", "tilelang"),
        (Preference("VLLM_QSA_PREFILL_USE_TL_INDEXER", {"true": "tilelang", "false": "cute"}),),
        measured=(
            Statement(
                CUTE_FIRST,
                "H100, 2026-11-21, tuned medians: TileLang takes 1.23 to 1.8 times as long, on every shape measured",
            ),
        ),
    ),
    Operator(
        "paged_mqa_logits", _LOGITS, ("paged_mqa_logits", "fp8_paged_mqa_logits"),
        modules("mqa_logits.paged", "cute", "tilelang"),
        (Preference("VLLM_QSA_DECODE_USE_TL_INDEXER", {"true": "tilelang", "false": "cute"}),),
        measured=(
            Statement(
                CUTE_FIRST,
                "H100, 2026-11-21, tuned medians: TileLang takes 1.02 to 1.15 times as long, on all 8 shapes",
            ),
        ),
    ),
    Operator("topk", _TOPK, ("topk_indices",), modules("topk", "cute")),
    Operator("indexer_topk", None, ("indexer_topk",), composed_of=("mqa_logits", "topk")),
    Operator("paged_indexer_topk", None, ("paged_indexer_topk",), composed_of=("paged_mqa_logits", "topk")),
)  # fmt: skip
