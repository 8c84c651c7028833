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


def replay_rule(switch: str) -> str:
    """What a value of ``GDN_REPLAY`` means for caches of which nothing else is said, in words."""
    if switch != "auto":
        return f"GDN_REPLAY={switch}: {'on' if switch == '1' else 'off'} in every cache"
    if REPLAY_HEADS is None:
        return "GDN_REPLAY=auto: off, since no size is known from which it is faster"
    return f"GDN_REPLAY=auto: on with drafts, and in caches of {REPLAY_HEADS} value heads or more over all their sequences"


def replay_forms(num_value_heads: int, num_spec: int) -> tuple[bool, ...]:
    """The outcomes of `replays` for caches of any number of sequences."""
    return tuple(sorted({replays(num_value_heads, count, num_spec) for count in (1, 2**31)}))


def recurrent_rows(lengths: Sequence[int]) -> int:
    """Number of leading sequences that take the recurrent form; all after the first longer one take the chunk form.

    Both forms read contiguous tokens: engines put decode rows first. In any other order the short rows after a long one are
    computed by the chunk kernel, which costs time and nothing else.
    """
    return next((n for n, length in enumerate(lengths) if length > RECURRENT_TOKENS), len(lengths))
