"""Attention over a paged cache: selected positions, or all of them."""
