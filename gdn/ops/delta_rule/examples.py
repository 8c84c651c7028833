"""Problems of the gated delta rule and of replay decode, as a serving engine calls them (gdn.core.example)."""

from typing import Any

from gdn.core.example import BF16, TOKENS, heads_of, same
from gdn.models import ModelShape
from gdn.ops.delta_rule.problem import (
    AcceptDraftTreeProblem,
    ChunkProblem,
    ChunkSummaryProblem,
    FoldStatesProblem,
    RecurrentProblem,
    entry_width,
    ring_choice,
)


def chunk(model: ModelShape, fp8: bool = False) -> ChunkProblem:
    """Four prompts, some of which continue from a cached state."""
    sizes: dict[str, Any] = {"num_tokens": TOKENS, "num_sequences": 4}
    return ChunkProblem(**_delta_rule(model), has_mask=True, has_checkpoints=False, **sizes)


def chunk_summary(model: ModelShape, fp8: bool = False) -> ChunkSummaryProblem:
    """A rank's half of a prompt of 131072 tokens, in two segments."""
    heads: dict[str, Any] = {
        "num_k_heads": model.num_k_heads,
        "num_v_heads": model.num_v_heads,
        "num_state_heads": model.num_v_heads,
    }
    dims: dict[str, Any] = {"head_k_dim": model.head_k_dim, "head_v_dim": model.head_v_dim}
    dtypes: dict[str, Any] = {"dtype": BF16, "gate_dtype": BF16, "beta_dtype": BF16, "cu_seqlens_dtype": "int32"}
    flags = same(True, "state_v_first", "use_k_l2norm", "use_gate", "use_beta_sigmoid")
    return ChunkSummaryProblem(**heads, **dims, **dtypes, **flags, num_tokens=65536, num_sequences=2)


def recurrent(model: ModelShape, fp8: bool = False) -> RecurrentProblem:
    """One token of each of 128 sequences, without drafts."""
    flags = same(False, "write_every_token", "has_accepted", "has_parent", "has_rounding")
    return RecurrentProblem(**_delta_rule(model), **flags, num_tokens=128, num_sequences=128)


def _delta_rule(model: ModelShape) -> dict[str, Any]:
    """Raw gates and the L2 norm inside the kernel, a float32 pool with V first, int32 slots."""
    return {
        **heads_of(model),
        "num_q_heads": model.num_k_heads,
        **same(BF16, "dtype", "gate_dtype", "beta_dtype"),
        **same("int32", "cu_seqlens_dtype", "index_dtype"),
        "state_dtype": "float32",
        **same(True, "state_v_first", "use_qk_l2norm", "use_gate", "use_beta_sigmoid", "has_initial_state", "has_final_state"),
        "has_final_indices": False,
    }


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
        **same(False, "has_accepted", "has_final_indices", "has_rounding"),
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
        conv_dtype=BF16,
        conv_channels_contiguous=True,
        conv_width=model.conv_width,
        **same("int32", "index_dtype", "cu_seqlens_dtype"),
        num_layers=36,
        num_tokens=512,
        num_sequences=128,
    )
