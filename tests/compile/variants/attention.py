"""Variants of sparse attention."""

from tests.compile.variants.attention_prefill import sparse_attention_prefill

__all__ = ["sparse_attention_prefill"]
