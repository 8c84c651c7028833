"""Whether ``GDN_REPLAY`` asks a cache to decode by replay, and why not."""

from gdn.ops.delta_rule import crossing
from gdn.runtime import env


def unwanted(num_value_heads: int, head_dims: tuple[int, int], num_sequences: int, num_spec: int) -> str | None:
    """Why a cache is not asked to replay; None where it is.

    Parameters
    ----------
    num_value_heads : int
        Of a layer, of one rank.
    head_dims : tuple of int
        Of keys and of values.
    num_sequences : int
        Most sequences of the cache.
    num_spec : int
        Most drafts of a sequence.
    """
    switch = env.current().replay
    if switch == "1" or (switch == "auto" and crossing.replays(num_value_heads, head_dims, num_sequences, num_spec)):
        return None
    if switch == "0":
        return "GDN_REPLAY=0"
    if not crossing.has_replay_dims(head_dims):
        dims = crossing.replay_dims_in_words()
        return f"GDN_REPLAY=auto wants head dims of {dims}, here are {head_dims[0]} and {head_dims[1]}"
    heads = num_value_heads * num_sequences
    return f"GDN_REPLAY=auto wants {crossing.REPLAY_HEADS} value heads over all sequences or drafts, here are {heads}"
