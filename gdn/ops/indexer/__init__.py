"""The indexer of sparse attention: its queries and keys, its cache, scores and selection."""
