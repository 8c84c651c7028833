"""Problem of every operator on a model's shapes, with the dtypes, layouts and flags of a serving engine's call.

One function per operator, under the operator's name. `gdn explain`, the autotuner's shapes, the seeded calls and the tests'
variants start from these problems and replace fields. Prompts have 8192 tokens; decode steps have 128 sequences of one token.

fp8: whether the indexer's cache and logits are in FP8 (else bfloat16); the other operators ignore it.

Leaf module: imports gdn.problems and gdn.models alone.
"""

from typing import Any

from gdn.models import ModelShape
from gdn.problems import (
    ChunkProblem,
    CompressIndexerKeysProblem,
    Conv1dProblem,
    Conv1dUpdateProblem,
    ExpandTopkGroupsProblem,
    GatherIndexerCacheProblem,
    GatingProblem,
    GdnDecodeProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    PrepareIndexerProblem,
    QuantizeFp8Problem,
    RecurrentProblem,
    RmsNormGatedProblem,
    SplitProblem,
    TopkProblem,
    WriteIndexerCacheProblem,
)

_BF16, _FP8 = "bfloat16", "float8_e4m3fn"
_TOKENS = 8192


# --- the delta rule ----------------------------------------------------------------------------------------------------


def chunk(model: ModelShape, fp8: bool = False) -> ChunkProblem:
    """Four prompts, some of which continue from a cached state."""
    return ChunkProblem(**_delta_rule(model), has_mask=True, has_checkpoints=False, num_tokens=_TOKENS, num_sequences=4)


def recurrent(model: ModelShape, fp8: bool = False) -> RecurrentProblem:
    """One token of each of 128 sequences, without drafts."""
    return RecurrentProblem(
        **_delta_rule(model),
        write_every_token=False,
        has_accepted=False,
        has_parent=False,
        has_rounding=False,
        num_tokens=128,
        num_sequences=128,
    )


def _delta_rule(model: ModelShape) -> dict[str, Any]:
    """Raw gates and the L2 norm inside the kernel, a float32 pool with V first, int32 slots."""
    return {
        "num_q_heads": model.num_k_heads,
        "num_k_heads": model.num_k_heads,
        "num_v_heads": model.num_v_heads,
        "head_k_dim": model.head_k_dim,
        "head_v_dim": model.head_v_dim,
        "dtype": _BF16,
        "state_dtype": "float32",
        "gate_dtype": _BF16,
        "beta_dtype": _BF16,
        "cu_seqlens_dtype": "int32",
        "index_dtype": "int32",
        "state_v_first": True,
        "use_qk_l2norm": True,
        "use_gate": True,
        "use_beta_sigmoid": True,
        "has_initial_state": True,
        "has_final_state": True,
        "has_final_indices": False,
    }


def gdn_decode(model: ModelShape, fp8: bool = False) -> GdnDecodeProblem:
    """A whole decode step of a layer: flat projections, both pools, no drafts."""
    return GdnDecodeProblem(
        num_k_heads=model.num_k_heads,
        num_v_heads=model.num_v_heads,
        head_k_dim=model.head_k_dim,
        head_v_dim=model.head_v_dim,
        width=model.conv_width,
        dtype=_BF16,
        z_dtype=_BF16,
        a_dtype=_BF16,
        b_dtype=_BF16,
        weight_dtype=_BF16,
        bias_dtype=None,
        A_log_dtype="float32",
        dt_bias_dtype="float32",
        norm_dtype=_BF16,
        conv_dtype=_BF16,
        conv_channels_contiguous=True,
        state_dtype="float32",
        state_v_first=True,
        index_dtype="int32",
        cu_seqlens_dtype=None,
        interleaved=False,
        silu=True,
        gate_sigmoid=False,
        has_columns=False,
        has_accepted=False,
        has_rounding=False,
        num_tokens=128,
        num_sequences=128,
    )


# --- steps around the delta rule ---------------------------------------------------------------------------------------


def conv1d(model: ModelShape, fp8: bool = False) -> Conv1dProblem:
    """Four prompts, some of which continue from a cached window."""
    return Conv1dProblem(
        **_convolution(model),
        cu_seqlens_dtype="int32",
        has_mask=True,
        checkpoint_dtype=None,
        num_tokens=_TOKENS,
        num_sequences=4,
    )


def conv1d_update(model: ModelShape, fp8: bool = False) -> Conv1dUpdateProblem:
    """One token of each of 128 sequences, without drafts."""
    return Conv1dUpdateProblem(
        **_convolution(model),
        cu_seqlens_dtype=None,
        has_columns=False,
        has_accepted=False,
        has_parent=False,
        num_tokens=128,
        num_sequences=128,
    )


def _convolution(model: ModelShape) -> dict[str, Any]:
    return {
        "dim": model.conv_dim,
        "width": model.conv_width,
        "dtype": _BF16,
        "weight_dtype": _BF16,
        "bias_dtype": None,
        "silu": True,
        "state_dtype": _BF16,
        "state_channels_contiguous": True,
        "index_dtype": "int32",
    }


def split(model: ModelShape, fp8: bool = False) -> SplitProblem:
    """Interleaved projections of a prompt."""
    return SplitProblem(
        num_k_heads=model.num_k_heads,
        num_v_heads=model.num_v_heads,
        head_k_dim=model.head_k_dim,
        head_v_dim=model.head_v_dim,
        dtype=_BF16,
        ba_dtype=_BF16,
        num_tokens=_TOKENS,
    )


def gating(model: ModelShape, fp8: bool = False) -> GatingProblem:
    """Gates of a prompt."""
    return GatingProblem(
        num_heads=model.num_v_heads,
        a_dtype=_BF16,
        b_dtype=_BF16,
        A_log_dtype="float32",
        dt_bias_dtype="float32",
        num_tokens=_TOKENS,
    )


def rms_norm_gated(model: ModelShape, fp8: bool = False) -> RmsNormGatedProblem:
    """Contiguous rows, one per token and head: to the kernel they are tokens of one head."""
    return RmsNormGatedProblem(
        num_heads=1,
        head_dim=model.head_v_dim,
        dtype=_BF16,
        z_dtype=_BF16,
        weight_dtype="float32",
        sigmoid=False,
        num_tokens=_TOKENS * model.num_v_heads,
    )


# --- logits and top-k --------------------------------------------------------------------------------------------------


def mqa_logits(model: ModelShape, fp8: bool = False) -> MqaLogitsProblem:
    """The last 4096 queries of a prompt of 32768 tokens."""
    return MqaLogitsProblem(**_logits(model, fp8), packed=False, num_queries=4096, num_keys=32768, num_columns=32768)


def paged_mqa_logits(model: ModelShape, fp8: bool = False) -> PagedMqaLogitsProblem:
    """One query of each of 64 sequences with a context of 32768 tokens."""
    return PagedMqaLogitsProblem(
        **_logits(model, fp8), page_size=64, next_n=1, per_draft_lengths=False, batch=64, max_context_len=32768
    )


def _logits(model: ModelShape, fp8: bool) -> dict[str, Any]:
    return {
        "num_heads": model.index_num_heads,
        "num_kv_heads": 1,
        "head_dim": model.index_head_dim,
        "dtype": _FP8 if fp8 else _BF16,
        "has_k_scale": fp8,
        "weights_dtype": "float32" if fp8 else _BF16,  # in FP8 the queries' scales are folded into them
        "relu": True,
        "clean": True,
        "out_dtype": "float32",
    }


def topk(model: ModelShape, fp8: bool = False) -> TopkProblem:
    """Selection from the scores of `mqa_logits`."""
    sizes = {"k": model.index_topk, "num_rows": 4096, "num_columns": 32768}
    return TopkProblem("float32", "int32", "int32", "index", **sizes)


# --- steps around the indexer ------------------------------------------------------------------------------------------


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
        k_dtype=_BF16,
        weights_dtype=_BF16 if fp8 else None,
        q_norm_dtype=_BF16,
        q_out_dtype=_FP8 if fp8 else _BF16,
        folds_weights=fp8,
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
        "dtype": _BF16,
        "position_dtype": "int64",
        "cos_sin_dtype": "float32",
        "k_norm_dtype": _BF16,
        "slot_dtype": "int64",
        "num_tokens": _TOKENS,
    }
