"""Sizes of the streamed form that its choice of a configuration needs, and which problems it serves."""

from gdn.ops.delta_rule.problem import most_tokens
from gdn.ops.layer_step.problem import GdnDecodeProblem
from gdn.problem import DTYPE_BYTES
from kernels_cute.gdn_decode.shape import CHANNELS

DIM = 128  # K and V
WARPS = 8  # that multiply states
PREPARE_WARPS = 4  # that make ready what these need of the next item
_PASSES = 2  # of a thread of the latter, four channels each, at most
COLUMNS = 32  # of V in a tile, which one warp has: a lane each
TILES_OF_HEAD = DIM // COLUMNS
_MOST_TOKENS = 4  # of a sequence: 2 vectors of 16 values each in registers
ITEM_WORDS = 9  # what an item's numbers take in shared memory
_MOST_LIVE = 32  # entries, one a lane
_SPARE_BYTES = 1024  # barriers, alignment
# Tiles of a state that a block has on their way at once: 48 KiB of float32, 32 KiB of 16 bits (measured, LAB-NOTES.md). Four at
# most: with an odd number of value heads a key head and 8 stages a stage is asked for again after four tiles.
_IN_FLIGHT = {4: 3, 2: 4}
_SHARED_BYTES = 232448  # that a block may have on every device of this architecture


def _multiple_of_four(count: int) -> int:
    return -(-count // 4) * 4


def refusal(problem: GdnDecodeProblem) -> str | None:
    """None where this form serves a problem that the operator's kernel serves, else why not."""
    p = problem
    if p.ring_rows is None or p.fold_every is None:
        return "requires a ring"
    if not p.state_v_first or (p.head_k_dim, p.head_v_dim) != (DIM, DIM):
        return f"requires states with V first and head dims {DIM}, got K={p.head_k_dim}, V={p.head_v_dim}"
    tokens = most_tokens(p.ring_rows, p.fold_every) if p.has_accepted else 1
    if tokens > _MOST_TOKENS:
        return f"requires a ring for at most {_MOST_TOKENS} tokens a sequence, got one for {tokens}"
    if p.fold_every - 1 + tokens > _MOST_LIVE or p.ring_rows > _MOST_LIVE:
        return f"requires at most {_MOST_LIVE} rows and live entries, got {p.ring_rows} rows, a fold every {p.fold_every} tokens"
    if (2 * DIM + p.num_v_heads // p.num_k_heads * DIM) // CHANNELS > _PASSES * 32 * PREPARE_WARPS:
        return f"requires at most 6 value heads a key head, got {p.num_v_heads} of {p.num_k_heads}"
    return None


class Sizes:
    """Counts of a problem that `refusal` has let through, with `stages` tiles of states in shared memory, a multiple of WARPS.

    A stage belongs to one warp, which alone waits for it: a wait for a phase of a barrier also ends where the phase before has
    not ended, so nobody may wait two phases ahead.
    """

    def __init__(self, problem: GdnDecodeProblem, stages: int) -> None:
        assert problem.ring_rows is not None and problem.fold_every is not None
        self.stages, self.stages_of_warp = stages, stages // WARPS
        self.ratio = problem.num_v_heads // problem.num_k_heads
        tokens = most_tokens(problem.ring_rows, problem.fold_every) if problem.has_accepted else 1
        self.batch = 1 if tokens == 1 else 2 if tokens == 2 else 4  # tokens of a sequence, some beyond its last
        self.vectors = 2 * self.batch  # k and q of each
        self.most_live = problem.fold_every - 1 + tokens  # entries before the call
        self.entries = self.most_live + self.batch  # and the call's own
        self.weights_floats = self.ratio * self.entries * self.vectors
        self.item_tiles = TILES_OF_HEAD * self.ratio
        self.tile_bytes = COLUMNS * DIM * DTYPE_BYTES[problem.state_dtype]
        self.in_flight = _IN_FLIGHT[DTYPE_BYTES[problem.state_dtype]]
        self.token_floats = (2 + self.ratio) * DIM
        self.decay_pitch = _multiple_of_four(self.most_live)
        # Rows of sums, one of each column: no two of eight neighbouring lanes read the same bank.
        self.sums_pitch = 12 if self.batch == 4 else self.vectors
        self.gates_at = self.batch * self.token_floats
        self.tokens_floats = self.gates_at + _multiple_of_four(2 * self.batch * self.ratio)
        # Of an item: its numbers, factors of k and q of each token, totals of each value head and token.
        self.factors_at = _multiple_of_four(ITEM_WORDS)
        self.totals_at = self.factors_at + _multiple_of_four(self.vectors)
        self.others_floats = self.totals_at + _multiple_of_four(self.ratio * self.batch)
        # Of entries: those of the next items are copied while this one is computed, where there is room.
        self.buffers = next((count for count in (3, 2, 1) if self._bytes(count) <= _SHARED_BYTES), 1)
        self.floats = self._floats(self.buffers)
        self.shared_bytes = self._bytes(self.buffers)

    def _floats(self, buffers: int) -> dict[str, int]:
        """Of shared memory, by name: entries in `buffers` buffers, what else belongs to an item in two."""
        return {
            "keys": buffers * self.most_live * DIM,
            "updates": buffers * self.most_live * self.ratio * DIM,
            "decays": buffers * self.ratio * self.decay_pitch + 4,  # and the slot's count of each buffer
            "tokens": 2 * self.tokens_floats,
            "weights": 2 * self.weights_floats,
            "others": 2 * self.others_floats,
            "sums": WARPS * COLUMNS * self.sums_pitch,
            "squares": 2 * WARPS * self.batch,
        }

    def _bytes(self, buffers: int) -> int:
        """Of a block, at most."""
        return self.stages * self.tile_bytes + 4 * sum(self._floats(buffers).values()) + _SPARE_BYTES


def most_stages(problem: GdnDecodeProblem) -> int:
    """Stages of two tiles a warp or of one, 0 where shared memory does not hold them. Buffers of entries come before stages: with
    three of them the entries of an item are there before it is made ready."""
    possible = [sizes for stages in (2 * WARPS, WARPS) if (sizes := Sizes(problem, stages)).shared_bytes <= _SHARED_BYTES]
    return max(possible, key=lambda sizes: (sizes.buffers, sizes.stages)).stages if possible else 0
