"""Problems of attention over a paged cache on a model's shapes, as a serving engine calls them (gdn.core.example)."""

from typing import Any

from gdn.core.example import BF16, same
from gdn.models import ModelShape
from gdn.ops.attention.problem import AttentionPrefillProblem, SparseDecodeProblem, SparsePrefillProblem


def sparse_attention_decode(model: ModelShape, fp8: bool = False) -> SparseDecodeProblem:
    """One query of each of 64 sequences."""
    sizes = same(64, "num_tokens", "num_sequences")
    return SparseDecodeProblem(**_attention(model), dense=False, **sizes, k=model.index_topk)


def sparse_attention_prefill(model: ModelShape, fp8: bool = False) -> SparsePrefillProblem:
    """The last 4096 queries of a prompt of 32768 tokens."""
    sizes: dict[str, Any] = {"num_tokens": 4096, "num_sequences": 1, "k": model.index_topk, "max_context_len": 32768}
    return SparsePrefillProblem(**_attention(model), **sizes)


def attention(model: ModelShape, fp8: bool = False) -> SparseDecodeProblem:
    """One query of each of 64 sequences over all of at most 32768 positions, which has no indices."""
    sizes = same(64, "num_tokens", "num_sequences")
    return SparseDecodeProblem(**_attention(model) | {"index_dtype": None}, dense=True, **sizes, k=32768)


def attention_prefill(model: ModelShape, fp8: bool = False) -> AttentionPrefillProblem:
    """A prompt of 8192 tokens."""
    sizes: dict[str, Any] = {"num_tokens": 8192, "num_sequences": 1, "max_context_len": 8192}
    return AttentionPrefillProblem(**_attention(model) | {"index_dtype": None}, **sizes)


def _attention(model: ModelShape) -> dict[str, Any]:
    """Blocks of 16 positions, with all heads of a position next to each other."""
    return {
        **{name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "head_dim")},
        "dtype": BF16,
        "block_size": 16,
        "index_dtype": "int32",
        **same(False, "has_topk_length", "has_gate"),
        **same(True, "heads_adjacent", "rows_aligned"),
    }
