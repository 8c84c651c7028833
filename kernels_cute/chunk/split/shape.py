"""Slots and bytes of the segments of a split call, see segments.py."""

from kernels_cute.chunk.spec import ChunkSpec

SUMMARY_STAGES = 5  # chunks of K and V in shared memory of a block that makes a summary


def num_slots(num_tokens: int, num_sequences: int, segment_tokens: int) -> int:
    """Slots of a call; one sequence never needs the slot after its tokens."""
    whole, rest = divmod(num_tokens, segment_tokens)
    return max(whole + bool(rest), 1) if num_sequences == 1 else whole + num_sequences


def summary_bytes(dim: int) -> int:
    """Bytes of a slot and state head: h, then P."""
    return 8 * dim * dim


def summary_spec(spec: ChunkSpec) -> ChunkSpec:
    """The spec of the launch that makes summaries, from the one of the fused kernel."""
    return spec.changed(stages=SUMMARY_STAGES, key_stages=SUMMARY_STAGES)
