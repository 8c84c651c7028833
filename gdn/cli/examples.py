"""Every operator's problem on a model's shapes, as a serving stack calls it: what `gdn explain` and the tuner start from."""

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
    Problem,
    QuantizeFp8Problem,
    RecurrentProblem,
    RmsNormGatedProblem,
    SplitProblem,
    TopkProblem,
    WriteIndexerCacheProblem,
)


def example(op: str, shape: ModelShape, *, fp8: bool) -> Problem | None:
    """An operator's problem on a model's shapes as a serving stack calls it; None where no kernel exists."""
    if op == "chunk":
        return ChunkProblem(**_delta_rule(shape), has_mask=True, has_checkpoints=False, num_tokens=8192, num_sequences=4)
    if op == "recurrent":
        return RecurrentProblem(
            **_delta_rule(shape),
            write_every_token=False,
            has_accepted=False,
            has_parent=False,
            has_rounding=False,
            num_tokens=128,
            num_sequences=128,
        )
    if op == "mqa_logits":
        return MqaLogitsProblem(**_logits(shape, fp8), packed=False, num_queries=4096, num_keys=32768, num_columns=32768)
    if op == "paged_mqa_logits":
        return PagedMqaLogitsProblem(
            **_logits(shape, fp8), page_size=64, next_n=1, per_draft_lengths=False, batch=64, max_context_len=32768
        )
    if op == "topk":
        return TopkProblem("float32", "int32", "int32", "index", k=2048, num_rows=4096, num_columns=32768)
    return _step(op, shape) or _indexer_step(op, shape, fp8)


def _step(op: str, shape: ModelShape) -> Problem | None:
    """The steps around the recurrence: prompts of 8192 tokens, decode steps of 128 sequences."""
    heads = {"num_k_heads": shape.num_k_heads, "num_v_heads": shape.num_v_heads}
    if op == "conv1d":
        return Conv1dProblem(
            **_convolution(shape),
            cu_seqlens_dtype="int32",
            has_mask=True,
            checkpoint_dtype=None,
            num_tokens=8192,
            num_sequences=4,
        )
    if op == "conv1d_update":
        return Conv1dUpdateProblem(
            **_convolution(shape),
            cu_seqlens_dtype=None,
            has_columns=False,
            has_accepted=False,
            has_parent=False,
            num_tokens=128,
            num_sequences=128,
        )
    if op == "gdn_decode":
        return GdnDecodeProblem(
            **heads,
            head_k_dim=shape.head_k_dim,
            head_v_dim=shape.head_v_dim,
            width=shape.conv_width,
            dtype="bfloat16",
            z_dtype="bfloat16",
            a_dtype="bfloat16",
            b_dtype="bfloat16",
            weight_dtype="bfloat16",
            bias_dtype=None,
            A_log_dtype="float32",
            dt_bias_dtype="float32",
            norm_dtype="bfloat16",
            conv_dtype="bfloat16",
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
    if op == "split":
        dims = {"head_k_dim": shape.head_k_dim, "head_v_dim": shape.head_v_dim}
        return SplitProblem(**heads, **dims, dtype="bfloat16", ba_dtype="bfloat16", num_tokens=8192)
    if op == "gating":
        return GatingProblem(
            num_heads=shape.num_v_heads,
            a_dtype="bfloat16",
            b_dtype="bfloat16",
            A_log_dtype="float32",
            dt_bias_dtype="float32",
            num_tokens=8192,
        )
    if op == "rms_norm_gated":
        return RmsNormGatedProblem(
            num_heads=1,
            head_dim=shape.head_v_dim,
            dtype="bfloat16",
            z_dtype="bfloat16",
            weight_dtype="float32",
            sigmoid=False,
            num_tokens=8192 * shape.num_v_heads,
        )
    return None


def _indexer_step(op: str, shape: ModelShape, fp8: bool) -> Problem | None:
    """The steps around the indexer: prompts of 8192 tokens. Compressed keys: groups of 4 tokens, without scales in FP8."""
    tokens = 8192
    if op == "quantize_fp8":
        return QuantizeFp8Problem(
            num_groups=1, group_dim=shape.index_head_dim, dtype="bfloat16", num_tokens=tokens * shape.index_num_heads
        )
    if op == "write_indexer_cache":
        return WriteIndexerCacheProblem(**_cache(shape, fp8), dtype="bfloat16", slot_dtype="int64", num_tokens=tokens)
    if op == "gather_indexer_cache":
        return GatherIndexerCacheProblem(**_cache(shape, fp8), cu_seqlens_dtype="int32", num_rows=32768, num_sequences=4)
    if op == "expand_topk_groups":
        k = shape.index_topk // 4
        return ExpandTopkGroupsProblem(ratio=4, group_dtype="int32", position_dtype="int64", num_tokens=4096, k=k)
    rotated = {
        **_cache(shape, fp8),
        "rotary_dim": shape.index_rotary_dim,
        "zero_centred": True,
        "dtype": "bfloat16",
        "position_dtype": "int64",
        "cos_sin_dtype": "float32",
        "k_norm_dtype": "bfloat16",
        "slot_dtype": "int64",
        "num_tokens": tokens,
    }
    if op == "prepare_indexer":
        return PrepareIndexerProblem(
            **rotated,
            num_heads=shape.index_num_heads,
            k_dtype="bfloat16",
            weights_dtype="bfloat16" if fp8 else None,
            q_norm_dtype="bfloat16",
            q_out_dtype="float8_e4m3fn" if fp8 else "bfloat16",
            folds_weights=fp8,
        )
    if op == "compress_indexer_keys":
        rotated["cache_dtype"] = "float8_e4m3fn" if fp8 else "bfloat16"
        return CompressIndexerKeysProblem(**rotated, ratio=4, ring_slot_dtype="int32", ring_aligned=True)
    return None


def _cache(shape: ModelShape, fp8: bool) -> dict[str, Any]:
    return {"num_kv_heads": 1, "head_dim": shape.index_head_dim, "cache_dtype": "uint8" if fp8 else "bfloat16"}


def _convolution(shape: ModelShape) -> dict[str, Any]:
    return {
        "dim": shape.conv_dim,
        "width": shape.conv_width,
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "bias_dtype": None,
        "silu": True,
        "state_dtype": "bfloat16",
        "state_channels_contiguous": True,
        "index_dtype": "int32",
    }


def _delta_rule(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_q_heads": shape.num_k_heads,
        "num_k_heads": shape.num_k_heads,
        "num_v_heads": shape.num_v_heads,
        "head_k_dim": shape.head_k_dim,
        "head_v_dim": shape.head_v_dim,
        "dtype": "bfloat16",
        "state_dtype": "float32",
        "gate_dtype": "float32",
        "beta_dtype": "float32",
        "cu_seqlens_dtype": "int32",
        "index_dtype": "int32",
        "state_v_first": False,
        "use_qk_l2norm": True,
        "use_gate": False,
        "use_beta_sigmoid": False,
        "has_initial_state": True,
        "has_final_state": True,
        "has_final_indices": False,
    }


def _logits(shape: ModelShape, fp8: bool) -> dict[str, Any]:
    return {
        "num_heads": shape.index_num_heads,
        "num_kv_heads": 1,
        "head_dim": shape.index_head_dim,
        "dtype": "float8_e4m3fn" if fp8 else "bfloat16",
        "has_k_scale": fp8,
        "weights_dtype": "float32",
        "relu": True,
        "clean": True,
        "out_dtype": "float32",
    }
