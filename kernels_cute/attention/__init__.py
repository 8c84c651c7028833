"""Attention over selected positions of a paged cache: prefill (prefill.py, DESIGN-prefill.md)."""
