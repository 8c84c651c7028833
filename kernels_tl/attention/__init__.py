"""Attention over selected positions of a paged cache."""
