"""How many tokens of a sequence each rank should hold, and which query rows."""

from gdn.ops._check import bad_value

CHUNK = 64  # tokens that the chunk form takes at once
CORRECTION = 0.55  # of a pass over the same tokens: adding what the start state contributes to the output of a rank


def split_tokens(num_tokens: int, num_ranks: int, *, before: float = 0.0, after: float = 0.0) -> list[int]:
    """Lengths of the parts of one sequence with which all ranks of `chunk_gated_delta_rule` finish together.

    Up to the exchange the first rank makes one pass over its tokens, since it knows their start, and the others two; after it the
    others add what the start contributes. What else a layer does with its tokens, such as projections, evens this out.

    Parameters
    ----------
    num_tokens, num_ranks : int
        Tokens of the sequence, and ranks of the group.
    before, after : float
        Time that a rank spends on each of its tokens before and after the operator, in units of what one pass of the operator
        takes on it.

    Returns
    -------
    list of int [num_ranks]
        Tokens of each rank, multiples of 64 but for the last rank's.
    """
    for name, value, least in (("num_tokens", num_tokens, 0), ("num_ranks", num_ranks, 1)):
        if value < least:
            bad_value(name, f"at least {least}", value)
    for name, given in (("before", before), ("after", after)):
        if given < 0:
            bad_value(name, "a number >= 0", given)
    # Of two phases each lasts as long as its slowest rank. The sum is least where the first rank keeps up with the others in one.
    ratios = [(before + 2) / (before + 1)]
    if after:
        ratios.append((after + CORRECTION) / after)

    def time(ratio: float) -> float:
        first, other = max(before * ratio + ratio, before + 2), max(after * ratio, after + CORRECTION)
        return (first + other) / (ratio + num_ranks - 1)

    ratio = min(ratios, key=time)
    parts, left = [], num_tokens
    for rank in range(num_ranks):
        weight = ratio if rank == 0 else 1.0
        rest = weight + (num_ranks - rank - 1)
        part = left if rank == num_ranks - 1 else min(round(left * weight / rest / CHUNK) * CHUNK, left)
        parts.append(part)
        left -= part
    return parts


def zigzag(num_rows: int, num_ranks: int) -> list[tuple[range, ...]]:
    """Rows of each rank, where later rows cost more: of 2 R blocks rank r takes the r-th from the front and from the back."""
    if num_ranks < 1:
        bad_value("num_ranks", "at least 1", num_ranks)
    edges = [num_rows * i // (2 * num_ranks) for i in range(2 * num_ranks + 1)]
    blocks = [range(first, last) for first, last in zip(edges, edges[1:], strict=False)]
    return [tuple(b for b in (blocks[rank], blocks[-1 - rank]) if b) for rank in range(num_ranks)]
