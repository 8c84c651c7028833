"""Order of query heads as columns of the products, and key heads of a round; why: layouts.py."""

KEY_ROWS = 64  # keys of a warpgroup's product: M of wgmma
QUERIES_PER_GROUP = 4  # lanes of a quad: one query each
ROUND_BYTES = 24576  # most bytes of 64 keys that one round takes: larger stages leave too few
ROUND_HEADS = 3  # most key heads of a round: their scales wait in registers


class HeadOrder:
    """Query heads as columns of the products, one product a key head. Slots of a product are (head in run, pair); the copy
    engine sees a row of queries as (head in run, position) and takes `pairs` positions from `position(kv_head)` on.

    An even number of heads lies in runs, one after the other. An odd number is cut into two halves that share the head in
    the middle: the box stays within the row, and the sum leaves out the second copy. A single head has no second half: the
    box reaches beyond an extent of one, where the copy engine writes zeros.
    """

    def __init__(self, heads: int, kv_heads: int, lanes: int = 1):
        """lanes: of a quad, for one query."""
        self.heads, self.kv_heads, self.lanes, self.run = heads, kv_heads, lanes, 2 * lanes
        self.group = heads // kv_heads  # query heads of a key head
        self.pairs = -(-self.group // self.run)
        self.slots = self.pairs * self.run  # columns of one query in one product
        self.columns = self.slots * kv_heads  # of one query in all products
        self.shared = self.group % 2 == 1  # odd: the two halves share a head

    def view(self, dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """((heads in run, positions), their strides in elements)."""
        if not self.shared:
            return (self.run, self.heads // self.run), (dim, self.run * dim)
        half = self.group - self.pairs
        if half == 0:
            # Any stride will do for an extent of one. This one joins no other axis into one of the copy engine's.
            return (1, self.heads), ((self.heads + 1) * dim, dim)
        return (2, self.heads - half), (half * dim, dim)

    def position(self, kv_head: int) -> int:
        return kv_head * (self.group if self.shared else self.pairs)

    def head(self, kv_head: int, odd: int, pair: int) -> int | None:
        """The query head of a slot; None where the slot repeats a head or holds zeros. With several lanes a query: its number
        among the heads that one lane holds, those of the lane's residue."""
        if self.lanes > 1:
            return 2 * (kv_head * self.pairs + pair) + odd
        first = kv_head * self.group
        if not self.shared:
            return first + 2 * pair + odd
        if odd and pair == 0:
            return None
        return first + odd * (self.group - self.pairs) + pair


def kv_heads_per_round(kv_heads: int, row_bytes: int, rows: int) -> int:
    """Key heads of one round of a tile: they share a stage of keys and the wait for the products."""
    most = max(1, min(ROUND_HEADS, ROUND_BYTES // (rows * row_bytes)))
    return max(count for count in range(1, most + 1) if kv_heads % count == 0)
