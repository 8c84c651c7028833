"""Problems of the indexer's operators on a model's shapes, as a serving engine calls them (gdn.core.example)."""

from typing import Any

from gdn.core.example import BF16, FP8, TOKENS, same
from gdn.models import ModelShape
from gdn.ops.indexer.problem import (
    CompressIndexerKeysProblem,
    ExpandTopkGroupsProblem,
    GatherIndexerCacheProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PrepareIndexerProblem,
    QuantizeFp8Problem,
    TopkProblem,
    WriteIndexerCacheProblem,
)


def mqa_logits(model: ModelShape, fp8: bool = False) -> MqaLogitsProblem:
    """The last 4096 queries of a prompt of 32768 tokens."""
    return MqaLogitsProblem(**_logits(model, fp8), packed=False, num_queries=4096, num_keys=32768, num_columns=32768)


def paged_mqa_logits(model: ModelShape, fp8: bool = False) -> PagedMqaLogitsProblem:
    """One query of each of 64 sequences with a context of 32768 tokens."""
    return PagedMqaLogitsProblem(
        **_logits(model, fp8), page_size=64, next_n=1, per_draft_lengths=False, batch=64, max_context_len=32768
    )


def _logits(model: ModelShape, fp8: bool) -> dict[str, Any]:
    sizes = {"num_heads": model.index_num_heads, "num_kv_heads": 1, "head_dim": model.index_head_dim}
    weights_dtype = "float32" if fp8 else BF16  # in FP8 the queries' scales are folded into them
    dtypes = {"dtype": FP8 if fp8 else BF16, "weights_dtype": weights_dtype, "out_dtype": "float32"}
    return sizes | dtypes | {"has_k_scale": fp8, "relu": True, "clean": True}


def topk(model: ModelShape, fp8: bool = False) -> TopkProblem:
    """Selection from the scores of `mqa_logits`."""
    sizes: dict[str, Any] = {"k": model.index_topk, "num_rows": 4096, "num_columns": 32768}
    return TopkProblem("float32", "int32", "int32", "index", **sizes)


def quantize_fp8(model: ModelShape, fp8: bool = False) -> QuantizeFp8Problem:
    """Queries of a prompt, one scale per head."""
    num_rows = TOKENS * model.index_num_heads
    return QuantizeFp8Problem(num_groups=1, group_dim=model.index_head_dim, dtype=BF16, num_tokens=num_rows)


def write_indexer_cache(model: ModelShape, fp8: bool = False) -> WriteIndexerCacheProblem:
    """Keys of a prompt."""
    return WriteIndexerCacheProblem(**_cache(model, fp8), dtype=BF16, slot_dtype="int64", num_tokens=TOKENS)


def gather_indexer_cache(model: ModelShape, fp8: bool = False) -> GatherIndexerCacheProblem:
    """Cached keys of four sequences."""
    return GatherIndexerCacheProblem(**_cache(model, fp8), cu_seqlens_dtype="int32", num_rows=32768, num_sequences=4)


def prepare_indexer(model: ModelShape, fp8: bool = False) -> PrepareIndexerProblem:
    """Queries, keys and weights of a prompt."""
    return PrepareIndexerProblem(
        **_rotated(model, fp8),
        num_heads=model.index_num_heads,
        **same(BF16, "k_dtype", "q_norm_dtype"),
        weights_dtype=BF16 if fp8 else None,
        q_out_dtype=FP8 if fp8 else BF16,
        folds_weights=fp8,
        has_values=False,
    )


def compress_indexer_keys(model: ModelShape, fp8: bool = False) -> CompressIndexerKeysProblem:
    """Keys of a prompt in groups of four; in FP8 their cache has no scales."""
    fields = _rotated(model, fp8) | {"cache_dtype": FP8 if fp8 else BF16}
    return CompressIndexerKeysProblem(**fields, ratio=4, ring_slot_dtype="int32", ring_aligned=True)


def expand_topk_groups(model: ModelShape, fp8: bool = False) -> ExpandTopkGroupsProblem:
    """Groups of four tokens, selected by 4096 queries."""
    k = model.index_topk // 4
    return ExpandTopkGroupsProblem(ratio=4, group_dtype="int32", position_dtype="int64", num_tokens=4096, k=k)


def _cache(model: ModelShape, fp8: bool) -> dict[str, Any]:
    return {"num_kv_heads": 1, "head_dim": model.index_head_dim, "cache_dtype": "uint8" if fp8 else BF16}


def _rotated(model: ModelShape, fp8: bool) -> dict[str, Any]:
    return {
        **_cache(model, fp8),
        "rotary_dim": model.index_rotary_dim,
        "zero_centred": True,
        **same(BF16, "dtype", "k_norm_dtype"),
        **same("int64", "position_dtype", "slot_dtype"),
        "cos_sin_dtype": "float32",
        "num_tokens": TOKENS,
    }
