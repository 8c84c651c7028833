"""Length up to which a sequence takes the recurrent form of the gated delta rule, and which sequences of a step do."""

from collections.abc import Sequence

# Most tokens of a sequence that takes the recurrent form. H100, 2026-11-22, 16/32 heads of 128 (gdn/tuned/h100/MEASURED.md):
# - one sequence of one token: recurrent 3.8 us, chunk 8.3;
# - 64 sequences: chunk 135 us for 16 tokens each; recurrent 93 for one (half of its 185.3 at batch 128), and every further one
#   takes 4.7 at least: four multiply-adds an element of the state at the full rate of the CUDA cores. Not measured: the rate that
#   is reached; at two thirds of the full one, 7 us a token, both lines meet at 7 tokens.
# The lower end counts, since a prompt chunk of so few tokens is rare. `python -m autotune.crossing` measures both forms.
# Less than 64 always: only the chunk form stores checkpoints, and none lies before the 64th token.
RECURRENT_TOKENS = 6


def recurrent_rows(lengths: Sequence[int]) -> int:
    """Number of leading sequences that take the recurrent form; all after the first longer one take the chunk form.

    Both forms read contiguous tokens: engines put decode rows first. In any other order the short rows after a long one are
    computed by the chunk kernel, which costs time and nothing else.
    """
    return next((n for n, length in enumerate(lengths) if length > RECURRENT_TOKENS), len(lengths))
