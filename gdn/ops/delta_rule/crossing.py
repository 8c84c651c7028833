"""Crossings: up to which length a sequence takes the recurrent form of the gated delta rule, from which size a cache replays."""

from collections.abc import Sequence

# Most tokens of a sequence that takes the recurrent form: the least crossing that `python -m benchmarks.crossing` measured
# on an H100 (2026-11-23, 16/32 heads of 128). For 1, 8, 32 and 128 sequences of equal length the recurrent form is the faster one
# up to 12, 8, 8 and 8 tokens each. The lower end counts, since a prompt chunk of so few tokens is rare.
# Less than 64 always: only the chunk form stores checkpoints, and none lies before the 64th token.
RECURRENT_TOKENS = 8

# Value heads of a cache, over all of its sequences, from which replay decode is on by itself; with drafts it always is. One token
# each, 16/32 heads of 128: at 256 value heads a step takes 1.17 (float32 pool) to 1.26 times (bfloat16) as long with a ring as
# without one (H200, 2026-11-28), at 1024 .71 to .77 times as long (H100, 2026-11-22 and 2026-11-28). Between: not measured.
REPLAY_HEADS = 1024

# Head dims for which it is on by itself: these have kernels for every number of value heads, drafts and dtype of the states.
REPLAY_DIMS = (64, 128)


def replays(num_value_heads: int, head_dims: tuple[int, int], num_sequences: int, num_spec: int) -> bool:
    """Whether a cache of so many sequences decodes by replay where nothing else is said.

    num_value_heads: of one sequence in a layer. head_dims: of keys and of values.
    """
    is_large = num_spec > 0 or num_value_heads * num_sequences >= REPLAY_HEADS
    return is_large and has_replay_dims(head_dims)


def has_replay_dims(head_dims: tuple[int, int]) -> bool:
    return set(head_dims) <= set(REPLAY_DIMS)


def replay_dims_in_words() -> str:
    return " or ".join(map(str, REPLAY_DIMS))


def replay_rule(switch: str) -> str:
    """What a value of ``GDN_REPLAY`` means for caches of which nothing else is said, in words."""
    if switch != "auto":
        return f"GDN_REPLAY={switch}: {'on' if switch == '1' else 'off'} in every cache"
    return (
        f"GDN_REPLAY=auto: on with drafts, and in caches of {REPLAY_HEADS} value heads or more over all their sequences; "
        f"off for head dims other than {replay_dims_in_words()}"
    )


def replay_forms(switch: str, num_value_heads: int, head_dims: tuple[int, int], num_spec: int) -> tuple[bool, ...]:
    """Whether caches decode by replay, over any number of sequences: both where that number decides. switch: ``GDN_REPLAY``."""
    if switch != "auto":
        return (switch == "1",)
    return tuple(sorted({replays(num_value_heads, head_dims, count, num_spec) for count in (1, 2**31)}))


def recurrent_rows(lengths: Sequence[int]) -> int:
    """Number of leading sequences that take the recurrent form; all after the first longer one take the chunk form.

    Both forms read contiguous tokens: engines put decode rows first. In any other order the short rows after a long one are
    computed by the chunk kernel, which costs time and nothing else.
    """
    return next((n for n, length in enumerate(lengths) if length > RECURRENT_TOKENS), len(lengths))
