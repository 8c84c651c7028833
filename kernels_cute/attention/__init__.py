"""Attention over selected positions of a paged cache: one package per phase."""
