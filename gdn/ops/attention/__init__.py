"""Attention over a paged cache: selected positions, or all of them."""

from gdn.ops.attention.problem import SparseDecodeProblem
from gdn.problem import Problem
from gdn.runtime.registry import ANY_BACKEND, CUTE_FIRST, Operator, Preference, Statement, family, modules

_ATTENTION = family("attention", "attention")


def _is_dense_and_few(problem: Problem) -> bool:
    """Few query tokens over all positions of long sequences: the CuTe kernel splits a sequence over 16 SMs at most."""
    if not isinstance(problem, SparseDecodeProblem) or not problem.dense:
        return False
    return problem.num_tokens * problem.num_kv_heads <= 32 and problem.k >= 16384


OPERATORS = (
    Operator(
        "sparse_attention_prefill", _ATTENTION, ("sparse_attention",), modules("attention.prefill", "cute"),
        (Preference("VLLM_QSA_PREFILL_ATTN_BACKEND", ANY_BACKEND),),
    ),
    Operator(
        "sparse_attention_decode", _ATTENTION, ("sparse_attention",), modules("attention.decode", "cute", "tilelang"),
        (Preference("VLLM_QSA_DECODE_ATTN_BACKEND", ANY_BACKEND),),
        measured=(
            Statement(
                ("tilelang", "cute"),
                "H100, 2026-11-23, defaults: TileLang takes 0.89 to 0.90 times as long at 1, 4, 16 sequences of 32768 tokens, "
                "16/2 heads",
                "all positions, at most 32 (query, key head) pairs, 16384 positions or more", _is_dense_and_few,
            ),
            Statement(
                CUTE_FIRST,
                "H100, 2026-11-23, defaults: TileLang takes 1.07, 1.16, 1.36 times as long at 64 sequences of 16/2 and of 8/1 "
                "heads and at one, k 2048; with all positions 1.04 at 64 sequences, 1.30 at one of 2048 tokens",
            ),
        ),
    ),
    Operator("attention_prefill", _ATTENTION, ("attention",), modules("attention.dense", "cute")),
    Operator("attention", None, ("attention",), composed_of=("sparse_attention_decode", "attention_prefill")),
)  # fmt: skip
