"""Problem of every operator on a model's shapes, with the dtypes, layouts and flags of a serving engine's call.

One function per operator, under the operator's name; `attention` is the call of sparse decode that `gdn.attention` makes.
`gdn explain`, the autotuner's shapes, the seeded calls and the tests' variants start from these problems and replace fields.
Prompts have 8192 tokens; decode steps have 128 sequences of one token.

fp8: whether the indexer's cache and logits are in FP8 (else bfloat16); the other operators ignore it.

Imports problems and gdn.models alone.
"""

from typing import Any

from gdn.models import ModelShape
from gdn.ops.attention.problem import SparseDecodeProblem, SparsePrefillProblem
from gdn.ops.context.problem import ContextPartsProblem, ContextStartProblem, ContextTotalProblem
from gdn.ops.delta_rule.problem import (
    AcceptDraftTreeProblem,
    ChunkProblem,
    ChunkSummaryProblem,
    FoldStatesProblem,
    RecurrentProblem,
    entry_width,
    ring_choice,
)
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
from gdn.ops.layer_step.problem import (
    AddRmsNormProblem,
    Conv1dProblem,
    Conv1dUpdateProblem,
    GatingProblem,
    GdnDecodeProblem,
    GdnPrefillProblem,
    RmsNormGatedProblem,
    SplitProblem,
)

_BF16, _FP8 = "bfloat16", "float8_e4m3fn"
_TOKENS = 8192


def _all(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


def _heads(model: ModelShape) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")}


def chunk(model: ModelShape, fp8: bool = False) -> ChunkProblem:
    """Four prompts, some of which continue from a cached state."""
    sizes: dict[str, Any] = {"num_tokens": _TOKENS, "num_sequences": 4}
    return ChunkProblem(**_delta_rule(model), has_mask=True, has_checkpoints=False, **sizes)


def chunk_summary(model: ModelShape, fp8: bool = False) -> ChunkSummaryProblem:
    """A rank's half of a prompt of 131072 tokens, in two segments."""
    heads: dict[str, Any] = {
        "num_k_heads": model.num_k_heads,
        "num_v_heads": model.num_v_heads,
        "num_state_heads": model.num_v_heads,
    }
    dims: dict[str, Any] = {"head_k_dim": model.head_k_dim, "head_v_dim": model.head_v_dim}
    dtypes: dict[str, Any] = {"dtype": _BF16, "gate_dtype": _BF16, "beta_dtype": _BF16, "cu_seqlens_dtype": "int32"}
    flags = _all(True, "state_v_first", "use_k_l2norm", "use_gate", "use_beta_sigmoid")
    return ChunkSummaryProblem(**heads, **dims, **dtypes, **flags, num_tokens=65536, num_sequences=2)


def context_parts(model: ModelShape, fp8: bool = False) -> ContextPartsProblem:
    """Two segments of that rank."""
    dtypes: dict[str, Any] = {"sum_dtype": "float32", **_all("int32", "cu_seqlens_dtype", "index_dtype")}
    return ContextPartsProblem(**dtypes, has_segments=True, num_sequences=1, num_segments=2)


def context_total(model: ModelShape, fp8: bool = False) -> ContextTotalProblem:
    """The first rank's message, from a pool on."""
    flags = _all(True, "is_first", "has_summaries", "has_mask")
    pool: dict[str, Any] = {"state_dtype": "float32", "index_dtype": "int32"}
    return ContextTotalProblem(**_composing(model), **flags, **pool, num_sequences=1, num_segments=2)


def context_start(model: ModelShape, fp8: bool = False) -> ContextStartProblem:
    """States of one of four ranks that all keep the final ones."""
    final: dict[str, Any] = {"final_dtype": "float32", "index_dtype": "int32", "final_index_dtype": None}
    sizes: dict[str, Any] = {"num_sequences": 1, "num_segments": 2, "num_ranks": 4}
    return ContextStartProblem(**_composing(model), has_segments=True, is_cut=True, ends_here=False, **final, **sizes)


def _composing(model: ModelShape) -> dict[str, Any]:
    dims = {"num_state_heads": model.num_v_heads, "head_k_dim": model.head_k_dim, "head_v_dim": model.head_v_dim}
    return {**dims, "sum_dtype": "float32", "state_v_first": True}


def recurrent(model: ModelShape, fp8: bool = False) -> RecurrentProblem:
    """One token of each of 128 sequences, without drafts."""
    flags = _all(False, "write_every_token", "has_accepted", "has_parent", "has_rounding")
    return RecurrentProblem(**_delta_rule(model), **flags, num_tokens=128, num_sequences=128)


def _delta_rule(model: ModelShape) -> dict[str, Any]:
    """Raw gates and the L2 norm inside the kernel, a float32 pool with V first, int32 slots."""
    return {
        **_heads(model),
        "num_q_heads": model.num_k_heads,
        **_all(_BF16, "dtype", "gate_dtype", "beta_dtype"),
        **_all("int32", "cu_seqlens_dtype", "index_dtype"),
        "state_dtype": "float32",
        **_all(True, "state_v_first", "use_qk_l2norm", "use_gate", "use_beta_sigmoid", "has_initial_state", "has_final_state"),
        "has_final_indices": False,
    }


def gdn_decode(model: ModelShape, fp8: bool = False) -> GdnDecodeProblem:
    """A whole decode step of a layer: flat projections, both pools, no drafts."""
    return GdnDecodeProblem(
        **_heads(model),
        width=model.conv_width,
        **_all(_BF16, "dtype", "z_dtype", "a_dtype", "b_dtype", "weight_dtype", "norm_dtype", "conv_dtype"),
        **_all("float32", "A_log_dtype", "dt_bias_dtype", "state_dtype"),
        **_all(None, "bias_dtype", "cu_seqlens_dtype"),
        index_dtype="int32",
        **_all(True, "conv_channels_contiguous", "state_v_first", "silu"),
        **_all(False, "interleaved", "concatenated", "gate_sigmoid", "has_columns", "has_accepted", "has_rounding"),
        **_all(128, "num_tokens", "num_sequences"),
    )


def fold_states(model: ModelShape, fp8: bool = False) -> FoldStatesProblem:
    """The states of 8 sequences in 36 layers, before their next prompts."""
    rows, fold_every = ring_choice(1, "float32")
    return FoldStatesProblem(
        num_k_heads=model.num_k_heads,
        num_state_heads=model.num_v_heads,
        head_k_dim=model.head_k_dim,
        head_v_dim=model.head_v_dim,
        state_dtype="float32",
        state_v_first=True,
        ring_rows=rows,
        fold_every=fold_every,
        index_dtype="int32",
        **_all(False, "has_accepted", "has_final_indices", "has_rounding"),
        num_layers=36,
        num_sequences=8,
    )


def accept_draft_tree(model: ModelShape, fp8: bool = False) -> AcceptDraftTreeProblem:
    """128 sequences in 36 layers, after trees of 4 nodes."""
    rows, _ = ring_choice(4, "float32")
    entry = entry_width(model.num_k_heads, model.num_v_heads, model.head_k_dim, model.head_v_dim)
    return AcceptDraftTreeProblem(
        ring_rows=rows,
        ring_width=-(-entry // 4) * 4,
        conv_dim=model.conv_dim,
        conv_dtype=_BF16,
        conv_channels_contiguous=True,
        conv_width=model.conv_width,
        **_all("int32", "index_dtype", "cu_seqlens_dtype"),
        num_layers=36,
        num_tokens=512,
        num_sequences=128,
    )


def gdn_prefill(model: ModelShape, fp8: bool = False) -> GdnPrefillProblem:
    """The whole prefill step of a layer for four prompts, some of which continue from cached states: flat projections."""
    return GdnPrefillProblem(
        **_heads(model),
        width=model.conv_width,
        **_all(_BF16, "dtype", "z_dtype", "a_dtype", "b_dtype", "weight_dtype", "norm_dtype", "conv_dtype"),
        bias_dtype=None,
        state_dtype="float32",
        **_all("int32", "index_dtype", "cu_seqlens_dtype"),
        **_all(True, "conv_channels_contiguous", "state_v_first", "silu", "has_mask"),
        **_all(False, "interleaved", "gate_sigmoid", "has_checkpoints"),
        num_tokens=_TOKENS,
        num_sequences=4,
    )


def conv1d(model: ModelShape, fp8: bool = False) -> Conv1dProblem:
    """Four prompts, some of which continue from a cached window."""
    sizes: dict[str, Any] = {"num_tokens": _TOKENS, "num_sequences": 4}
    return Conv1dProblem(**_convolution(model), cu_seqlens_dtype="int32", has_mask=True, checkpoint_dtype=None, **sizes)


def conv1d_update(model: ModelShape, fp8: bool = False) -> Conv1dUpdateProblem:
    """One token of each of 128 sequences, without drafts."""
    flags = _all(False, "has_columns", "has_accepted", "has_parent")
    sizes = _all(128, "num_tokens", "num_sequences")
    return Conv1dUpdateProblem(**_convolution(model), cu_seqlens_dtype=None, **flags, **sizes)


def _convolution(model: ModelShape) -> dict[str, Any]:
    return {
        "dim": model.conv_dim,
        "width": model.conv_width,
        **_all(_BF16, "dtype", "weight_dtype", "state_dtype"),
        "bias_dtype": None,
        "index_dtype": "int32",
        **_all(True, "silu", "state_channels_contiguous"),
    }


def split(model: ModelShape, fp8: bool = False) -> SplitProblem:
    """Interleaved projections of a prompt."""
    return SplitProblem(**_heads(model), dtype=_BF16, ba_dtype=_BF16, num_tokens=_TOKENS)


def gating(model: ModelShape, fp8: bool = False) -> GatingProblem:
    """Gates of a prompt."""
    parameters = _all("float32", "A_log_dtype", "dt_bias_dtype")
    return GatingProblem(model.num_v_heads, a_dtype=_BF16, b_dtype=_BF16, **parameters, num_tokens=_TOKENS)


def rms_norm_gated(model: ModelShape, fp8: bool = False) -> RmsNormGatedProblem:
    """Contiguous rows, one per token and head: to the kernel they are tokens of one head."""
    dtypes = {"dtype": _BF16, "z_dtype": _BF16, "weight_dtype": "float32"}
    num_tokens = _TOKENS * model.num_v_heads
    return RmsNormGatedProblem(num_heads=1, head_dim=model.head_v_dim, **dtypes, sigmoid=False, num_tokens=num_tokens)


def add_rms_norm(model: ModelShape, fp8: bool = False) -> AddRmsNormProblem:
    """Residual stream of a prompt."""
    dtypes: dict[str, Any] = {"dtype": _BF16, "weight_dtype": _BF16, "layer_scale_dtype": None}
    return AddRmsNormProblem(model.hidden_size, **dtypes, has_residual=True, zero_centred=True, num_tokens=_TOKENS)


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
    weights_dtype = "float32" if fp8 else _BF16  # in FP8 the queries' scales are folded into them
    dtypes = {"dtype": _FP8 if fp8 else _BF16, "weights_dtype": weights_dtype, "out_dtype": "float32"}
    return sizes | dtypes | {"has_k_scale": fp8, "relu": True, "clean": True}


def topk(model: ModelShape, fp8: bool = False) -> TopkProblem:
    """Selection from the scores of `mqa_logits`."""
    sizes: dict[str, Any] = {"k": model.index_topk, "num_rows": 4096, "num_columns": 32768}
    return TopkProblem("float32", "int32", "int32", "index", **sizes)


def quantize_fp8(model: ModelShape, fp8: bool = False) -> QuantizeFp8Problem:
    """Queries of a prompt, one scale per head."""
    num_rows = _TOKENS * model.index_num_heads
    return QuantizeFp8Problem(num_groups=1, group_dim=model.index_head_dim, dtype=_BF16, num_tokens=num_rows)


def write_indexer_cache(model: ModelShape, fp8: bool = False) -> WriteIndexerCacheProblem:
    """Keys of a prompt."""
    return WriteIndexerCacheProblem(**_cache(model, fp8), dtype=_BF16, slot_dtype="int64", num_tokens=_TOKENS)


def gather_indexer_cache(model: ModelShape, fp8: bool = False) -> GatherIndexerCacheProblem:
    """Cached keys of four sequences."""
    return GatherIndexerCacheProblem(**_cache(model, fp8), cu_seqlens_dtype="int32", num_rows=32768, num_sequences=4)


def prepare_indexer(model: ModelShape, fp8: bool = False) -> PrepareIndexerProblem:
    """Queries, keys and weights of a prompt."""
    return PrepareIndexerProblem(
        **_rotated(model, fp8),
        num_heads=model.index_num_heads,
        **_all(_BF16, "k_dtype", "q_norm_dtype"),
        weights_dtype=_BF16 if fp8 else None,
        q_out_dtype=_FP8 if fp8 else _BF16,
        folds_weights=fp8,
        has_values=False,
    )


def compress_indexer_keys(model: ModelShape, fp8: bool = False) -> CompressIndexerKeysProblem:
    """Keys of a prompt in groups of four; in FP8 their cache has no scales."""
    fields = _rotated(model, fp8) | {"cache_dtype": _FP8 if fp8 else _BF16}
    return CompressIndexerKeysProblem(**fields, ratio=4, ring_slot_dtype="int32", ring_aligned=True)


def expand_topk_groups(model: ModelShape, fp8: bool = False) -> ExpandTopkGroupsProblem:
    """Groups of four tokens, selected by 4096 queries."""
    k = model.index_topk // 4
    return ExpandTopkGroupsProblem(ratio=4, group_dtype="int32", position_dtype="int64", num_tokens=4096, k=k)


def _cache(model: ModelShape, fp8: bool) -> dict[str, Any]:
    return {"num_kv_heads": 1, "head_dim": model.index_head_dim, "cache_dtype": "uint8" if fp8 else _BF16}


def _rotated(model: ModelShape, fp8: bool) -> dict[str, Any]:
    return {
        **_cache(model, fp8),
        "rotary_dim": model.index_rotary_dim,
        "zero_centred": True,
        **_all(_BF16, "dtype", "k_norm_dtype"),
        **_all("int64", "position_dtype", "slot_dtype"),
        "cos_sin_dtype": "float32",
        "num_tokens": _TOKENS,
    }


def sparse_attention_decode(model: ModelShape, fp8: bool = False) -> SparseDecodeProblem:
    """One query of each of 64 sequences."""
    sizes = _all(64, "num_tokens", "num_sequences")
    return SparseDecodeProblem(**_attention(model), dense=False, **sizes, k=model.index_topk)


def sparse_attention_prefill(model: ModelShape, fp8: bool = False) -> SparsePrefillProblem:
    """The last 4096 queries of a prompt of 32768 tokens."""
    sizes: dict[str, Any] = {"num_tokens": 4096, "num_sequences": 1, "k": model.index_topk, "max_context_len": 32768}
    return SparsePrefillProblem(**_attention(model), **sizes)


def attention(model: ModelShape, fp8: bool = False) -> SparseDecodeProblem:
    """One query of each of 64 sequences over all of at most 32768 positions, which has no indices."""
    sizes = _all(64, "num_tokens", "num_sequences")
    return SparseDecodeProblem(**_attention(model) | {"index_dtype": None}, dense=True, **sizes, k=32768)


def _attention(model: ModelShape) -> dict[str, Any]:
    """Blocks of 16 positions, with all heads of a position next to each other."""
    return {
        **{name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "head_dim")},
        "dtype": _BF16,
        "block_size": 16,
        "index_dtype": "int32",
        **_all(False, "has_topk_length", "has_gate"),
        **_all(True, "heads_adjacent", "rows_aligned"),
    }
