"""Length up to which a sequence takes the recurrent form of the gated delta rule, and which sequences of a step do."""

from collections.abc import Sequence

# Most tokens of a sequence that takes the recurrent form: the least of the crossings that `python -m autotune.crossing` measured
# on an H100 (2026-11-23, 16/32 heads of 128). For 1, 8, 32 and 128 sequences of equal length the recurrent form is the faster one
# up to 12, 8, 8 and 8 tokens each. The lower end counts, since a prompt chunk of so few tokens is rare.
# Less than 64 always: only the chunk form stores checkpoints, and none lies before the 64th token.
RECURRENT_TOKENS = 8


def recurrent_rows(lengths: Sequence[int]) -> int:
    """Number of leading sequences that take the recurrent form; all after the first longer one take the chunk form.

    Both forms read contiguous tokens: engines put decode rows first. In any other order the short rows after a long one are
    computed by the chunk kernel, which costs time and nothing else.
    """
    return next((n for n, length in enumerate(lengths) if length > RECURRENT_TOKENS), len(lengths))
