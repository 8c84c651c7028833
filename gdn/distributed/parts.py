"""Number of tokens of a sequence that each rank should hold, and its query rows."""

from gdn.core.check import bad_value
from gdn.ops.context.reference import CHUNK


def split_tokens(num_tokens: int, num_ranks: int) -> list[int]:
    """Lengths of the parts of one sequence with which all ranks of `chunk_gated_delta_rule` finish together: equal ones.

    Parameters
    ----------
    num_tokens, num_ranks : int
        Tokens of the sequence, and ranks of the group.

    Returns
    -------
    list of int [num_ranks]
        Tokens of each rank, multiples of 64 but for that of the last tokens.
    """
    for name, value, least in (("num_tokens", num_tokens, 0), ("num_ranks", num_ranks, 1)):
        if value < least:
            bad_value(name, f"at least {least}", value)
    chunks = -(-num_tokens // CHUNK)
    edges = [min(chunks * rank // num_ranks * CHUNK, num_tokens) for rank in range(num_ranks + 1)]
    return [stop - first for first, stop in zip(edges, edges[1:], strict=False)]


def zigzag(num_rows: int, num_ranks: int) -> list[tuple[range, ...]]:
    """Rows of each rank, where later rows cost more: of 2 R blocks rank r takes the r-th from the front and from the back."""
    if num_ranks < 1:
        bad_value("num_ranks", "at least 1", num_ranks)
    edges = [num_rows * i // (2 * num_ranks) for i in range(2 * num_ranks + 1)]
    blocks = [range(first, last) for first, last in zip(edges, edges[1:], strict=False)]
    return [tuple(b for b in (blocks[rank], blocks[-1 - rank]) if b) for rank in range(num_ranks)]
