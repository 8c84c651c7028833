"""Crossings: up to which length a sequence takes the recurrent form of the gated delta rule, from which size a cache replays."""

from collections.abc import Sequence

# Most tokens of a sequence that takes the recurrent form: the least of the crossings that `python -m autotune.crossing` measured
# on an H100 (2026-11-23, 16/32 heads of 128). For 1, 8, 32 and 128 sequences of equal length the recurrent form is the faster one
# up to 12, 8, 8 and 8 tokens each. The lower end counts, since a prompt chunk of so few tokens is rare.
# Less than 64 always: only the chunk form stores checkpoints, and none lies before the 64th token.
RECURRENT_TOKENS = 8

# Value heads of a cache, over all of its sequences, from which replay decode is on by itself; with drafts it always is. None:
# never, as long as no kernel takes a ring.
REPLAY_HEADS: int | None = None


def replays(num_value_heads: int, num_sequences: int, num_spec: int) -> bool:
    """Whether a cache of so many sequences, with so many value heads each, decodes by replay where nothing else is said."""
    return REPLAY_HEADS is not None and (num_spec > 0 or num_value_heads * num_sequences >= REPLAY_HEADS)


def recurrent_rows(lengths: Sequence[int]) -> int:
    """Number of leading sequences that take the recurrent form; all after the first longer one take the chunk form.

    Both forms read contiguous tokens: engines put decode rows first. In any other order the short rows after a long one are
    computed by the chunk kernel, which costs time and nothing else.
    """
    return next((n for n, length in enumerate(lengths) if length > RECURRENT_TOKENS), len(lengths))
