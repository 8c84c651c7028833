"""Tiles of both recurrent kernels: configurations, which of them fit, and the analytic choice.

The kernels differ in language alone: `threads_per_column` threads share the K entries of `v_per_thread` columns of V each, with
the state in registers. What a thread needs and what is worth trying is the same for both.

Leaf module: imports the other leaves only.
"""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace

from gdn.device import H100, DeviceSpec
from gdn.ops.delta_rule.problem import RecurrentProblem, most_tokens, unserved_dtypes
from gdn.problem import DTYPE_BYTES

_COLUMNS_OF_WARP = 64  # of V, K first; a line of the L2 cache is 128 bytes
_MAX_STATE_REGISTERS = 64  # state values a thread may hold
_OTHER_REGISTERS = 50  # of a thread: addresses, gates, counters, losses to alignment
_OTHER_WITHOUT_PREFETCH = 30  # the same without a prefetch
_NEARLY_TWO = 15 / 8  # blocks an SM: 256 of them on 132
_MIN_THREADS_PER_SM = (512, 384, 256)
_RING_SHAPES = ((128, 8), (256, 8), (64, 8), (128, 16), (256, 16), (64, 16))  # threads, threads a column: in order of preference
_MAX_NODES = 31  # of a draft tree with a ring: a path is a bit mask
# How near a tuned entry must be (see gdn.runtime.tuned): tokens and sequences 1.7 times as many, or as few. A large batch wants a
# head in few blocks, a small one in all that fit. One bound for both kernels: with different ones the backend with the looser one
# would win by matching more sizes.
TUNED_WITHIN = 1.5


@dataclass(frozen=True)
class Tiles:
    threads: int  # threads of a block; more share one set of index loads, fewer make more blocks
    threads_per_column: int  # threads that share one column of V: each holds K / threads_per_column of its entries
    v_per_thread: int  # columns of V of a thread: more bytes in flight and fewer shuffles per byte, more registers
    min_threads_per_sm: int  # threads an SM must be able to hold: caps a thread at 65536 / resident registers

    @property
    def block_v(self) -> int:
        """Columns of V per block."""
        return self.threads // self.threads_per_column * self.v_per_thread


def counts_down(threads: int, v_per_thread: int) -> bool:
    """Whether a block counts its tokens down, K first and without a prefetch; others count them up. Each spills the other way."""
    return (threads, v_per_thread) == (256, 4)


@dataclass(frozen=True)
class Config(Tiles):
    # Whether a token's q, k, v and gates are loaded while the one before it is computed. Without, a thread needs fewer registers
    # and the state's loads wait for one trip to memory less; a call of several tokens a sequence waits for each one's inputs.
    # Only the CuTe kernel has a form without.
    prefetch_next_token: bool = True

    @property
    def tiles(self) -> Tiles:
        """The tiles alone, of a kernel that always prefetches."""
        return Tiles(self.threads, self.threads_per_column, self.v_per_thread, self.min_threads_per_sm)


def refusal(problem: RecurrentProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if k % 4 or v % 4 or not 4 <= k <= 256 or not 4 <= v <= 256:
        return f"requires head dims that are multiples of 4 up to 256, got K={k}, V={v}"
    if (reason := unserved_dtypes(problem)) is not None:
        return reason
    for heads in (problem.num_q_heads, problem.num_k_heads, problem.num_v_heads):
        if problem.num_state_heads % heads:
            return f"requires head counts that divide {problem.num_state_heads}, got {heads}"
    if problem.intermediate_dtype not in (None, "float32", "bfloat16"):
        return f"requires intermediate_states of float32 or bfloat16, got {problem.intermediate_dtype}"
    if problem.ring_rows is not None:
        return _ring_refusal(problem)
    if problem.has_parent and not (problem.write_every_token or problem.intermediate_dtype):
        return "requires a column of indices per token with parent_token, got one slot per sequence"
    return None


def _ring_refusal(problem: RecurrentProblem) -> str | None:
    assert problem.ring_rows is not None and problem.fold_every is not None
    nodes = most_tokens(problem.ring_rows, problem.fold_every)
    if problem.has_parent and nodes > _MAX_NODES:
        return f"requires draft trees of at most {_MAX_NODES} nodes, got a ring of {problem.ring_rows} rows, for {nodes}"
    needed, most = ring_bytes(problem, Tiles(64, 16, 4, 512)), H100.shared_bytes_per_block
    if needed > most:
        return (
            f"requires a ring of which a head fits in {most} bytes of shared memory, got {problem.ring_rows} rows, {needed} bytes"
        )
    return None


def ring_bytes(problem: RecurrentProblem, tiles: Tiles) -> int:
    """At least the shared memory of a block with a ring: keys, updates, weights and decays of all entries, two pairs of rows of q
    and k, and the sums of warps that share columns."""
    assert problem.ring_rows is not None
    entry = problem.head_k_dim + tiles.block_v + 4 + 3
    rows = 4 * tiles.threads_per_column * k_per_thread(problem, tiles.threads_per_column)
    sums = 2 * tiles.threads * tiles.v_per_thread if not problem.state_v_first else 0
    return 4 * (problem.ring_rows * entry + rows + sums + 64)


def writes_new_state(problem: RecurrentProblem) -> bool:
    """Whether the final state is a float32 tensor of its own."""
    return problem.has_final_state and not problem.pooled


def has_pool(problem: RecurrentProblem) -> bool:
    """Whether there is a tensor that states are read from, and with indices written to."""
    return problem.has_initial_state or problem.pooled


def k_vector(state_v_first: bool, state_dtype: str, head_k_dim: int) -> int:
    """Consecutive K entries of a thread: a 16-byte load of the state where K is its last dim, else 8 bytes of q and k."""
    if state_v_first and state_dtype == "bfloat16" and head_k_dim % 8 == 0:
        return 8
    return 4


def _k_vector(problem: RecurrentProblem) -> int:
    return k_vector(problem.state_v_first, problem.state_dtype, problem.head_k_dim)


def k_warps(state_v_first: bool, head_v_dim: int, tiles: Tiles) -> int:
    """Number of warps that share a column of V. K first, enough of them that a warp reads 64 neighbouring columns of a row of V,
    where the block has the warps: two lines of float32, one of bfloat16. With fewer, a warp would read parts of lines."""
    if state_v_first:
        return 1
    columns = min(_COLUMNS_OF_WARP, 1 << (head_v_dim - 1).bit_length())
    lanes_of_warp = max(1, 32 * tiles.v_per_thread // columns)  # lanes of a column in a warp
    return max(1, min(tiles.threads_per_column // lanes_of_warp, tiles.threads // 32))


def v_per_thread_k_first(state_dtype: str) -> tuple[int, ...]:
    """Columns of a thread worth measuring K first: up to 16 bytes of a row, since a second access of a thread would leave gaps in
    the lines that the first one reads; at least four columns, which are a load of 8 bytes."""
    return (4, 8) if DTYPE_BYTES[state_dtype] == 2 else (4,)


def columns_of_warp(head_v_dim: int, tiles: Tiles) -> int:
    """Number of neighbouring columns of V whose row a warp reads at once, K first."""
    return 32 * tiles.v_per_thread * k_warps(False, head_v_dim, tiles) // tiles.threads_per_column


def reads_lines(head_k_dim: int, head_v_dim: int, tiles: Tiles) -> bool:
    """Whether K-first warps read as many columns as `k_warps` wants, and no more warps share them than is worth it."""
    return columns_of_warp(head_v_dim, tiles) >= min(_COLUMNS_OF_WARP, head_v_dim) and _adds_few(head_k_dim, head_v_dim, tiles)


def _adds_few(head_k_dim: int, head_v_dim: int, tiles: Tiles) -> bool:
    """Whether at most four K-first warps (eight of the largest heads) share columns. More lost: each held less state."""
    return k_warps(False, head_v_dim, tiles) <= max(4, head_k_dim // 32)


def k_per_thread(problem: RecurrentProblem, threads_per_column: int) -> int:
    """K entries of a thread, some of which may lie beyond the last."""
    vector = _k_vector(problem)
    return -(-problem.head_k_dim // (threads_per_column * vector)) * vector


def _registers(problem: RecurrentProblem, config: Config) -> int:
    """Estimate of the registers that a thread cannot do without."""
    entries, columns = k_per_thread(problem, config.threads_per_column), config.v_per_thread
    masked = config.threads_per_column * entries != problem.head_k_dim or problem.head_v_dim % config.block_v != 0
    noise = problem.has_rounding and problem.write_every_token
    warps = k_warps(problem.state_v_first, problem.head_v_dim, config)
    if config.prefetch_next_token:
        per_entry = 2 * entries  # k; the next token's q and k, two in a register
        per_column = 9 * columns // 2 + 3  # sums of S k and S q, u, v, the next token's v; k q and two norms
        write_slots = problem.write_every_token and problem.has_final_indices and problem.use_gate  # addresses next to softplus
        state = columns * entries * (1 + problem.has_parent)  # a tree returns to its start
        parts = 3 * max(0, warps - 4)  # sums, read by all threads
        parts += 2 * (problem.intermediate_dtype is not None and not problem.state_v_first)  # addresses of a second tensor
        return state + per_entry + per_column + 4 * masked + 2 * write_slots + parts + 6 * noise + _OTHER_REGISTERS
    per_column = 3 * columns + 3  # sums of S k and S q, v; k q and two norms
    if not problem.state_v_first:  # of S q one column's after the exchange; addresses of the sums
        exchanges = 32 * warps < config.threads and entries > 8  # several
        per_column = 2 * columns + 7 + 4 * (exchanges and not counts_down(config.threads, columns))
    # Some variants spilled a value or two: gates that come as they are, few threads a column, float16 (k stays as float32 for the
    # update too, see `unpack_again`), noise for every token.
    found = (not problem.use_gate, config.threads_per_column < 8, problem.dtype != "bfloat16", noise)
    # q and k are two values in a register
    return (columns + 1) * entries + per_column + 6 * sum(found) + 4 * masked + _OTHER_WITHOUT_PREFETCH


def _most_resident(
    problem: RecurrentProblem, shapes: Iterable[tuple[int, int, int]], device: DeviceSpec, prefetches: bool = True
) -> list[Config]:
    """Configurations with the tightest cap on registers that the estimate allows, if any, one for each (threads, threads a
    column, columns a thread)."""
    space = [[Config(*shape, least, prefetches) for least in _MIN_THREADS_PER_SM] for shape in shapes]
    found = [next((config for config in some if fits(problem, config, device)), None) for some in space]
    return [config for config in found if config is not None]


def fits(problem: RecurrentProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled, without spills, and launched. With a ring: by the CuTe kernel."""
    if problem.ring_rows is not None:
        return config.prefetch_next_token and fits_ring(problem, config.tiles, _spills_cute)
    lanes, columns = config.threads_per_column, config.v_per_thread
    if lanes not in (4, 8, 16, 32) or config.threads not in (32, 64, 128, 256):
        return False
    if config.min_threads_per_sm not in _MIN_THREADS_PER_SM or config.min_threads_per_sm % config.threads:
        return False
    if columns not in (1, 2, 4, 8) or columns > lanes or problem.head_v_dim % columns:
        return False
    if lanes * _k_vector(problem) >= 2 * problem.head_k_dim and lanes > 4:
        return False  # half of a column's threads would hold nothing
    if not config.prefetch_next_token and problem.intermediate_dtype is not None:
        return False  # states after every token are stored by the form with a prefetch alone
    if not config.prefetch_next_token and (problem.has_parent or config.min_threads_per_sm != _MIN_THREADS_PER_SM[0]):
        return False  # the nodes of a tree have no prefetch anyway; more registers than this form is made for spill as well
    if not config.prefetch_next_token and not _holds_without_prefetch(problem, config):
        return False
    if k_per_thread(problem, lanes) * columns * (1 + problem.has_parent) > _MAX_STATE_REGISTERS:
        return False
    if _registers(problem, config) > min(device.registers_per_sm // config.min_threads_per_sm // 8 * 8, 255):
        return False
    return config.block_v < 2 * problem.head_v_dim or config.threads == 32


def _holds_without_prefetch(problem: RecurrentProblem, config: Config) -> bool:
    """Whether 64 values a thread do not spill, K first and without a prefetch, where the estimate cannot tell."""
    is_small = k_per_thread(problem, config.threads_per_column) * config.v_per_thread <= _MAX_STATE_REGISTERS // 2
    is_four = counts_down(config.threads, config.v_per_thread)
    if problem.state_v_first or is_small or not (is_four or problem.write_every_token):
        return True
    if is_four and not (problem.index_dtype == "int32" and problem.has_final_state):
        return False
    is_bf16 = DTYPE_BYTES[problem.state_dtype] == 2
    return is_bf16 and problem.use_beta_sigmoid and config.threads == 256 and config.block_v > _COLUMNS_OF_WARP


def _few_columns(problem: RecurrentProblem, block_v: int, device: DeviceSpec, blocks: float = 2) -> bool:
    """Whether blocks of block_v columns would not give every SM two."""
    columns = max(problem.num_sequences, 1) * problem.num_state_heads * problem.head_v_dim
    return columns < blocks * device.num_sms * block_v


def _spills_cute(problem: RecurrentProblem, tiles: Tiles) -> bool:
    """Whether the CuTe kernel may spill with a ring, in the registers that so many threads an SM leave."""
    is_much, has_drafts, has_noise = _holds_much(problem, tiles), problem.has_accepted, problem.has_rounding
    if tiles.min_threads_per_sm < _MIN_THREADS_PER_SM[0]:
        is_wide_k_first = not problem.state_v_first and problem.head_k_dim > 128
        return is_wide_k_first and has_drafts and tiles.min_threads_per_sm > _MIN_THREADS_PER_SM[-1]
    if not problem.state_v_first:
        return has_drafts or is_much and (has_noise or DTYPE_BYTES[problem.state_dtype] == 2)
    if not (is_much and has_drafts):
        return is_much and problem.head_k_dim > 128 and DTYPE_BYTES[problem.state_dtype] == 2
    # 256 threads hold drafts with next to no register to spare: not all forms with wider slots or larger heads fit.
    return has_noise or tiles.threads != 256 or problem.index_dtype != "int32" or problem.head_k_dim > 128


def spills_tilelang(problem: RecurrentProblem, tiles: Tiles) -> bool:
    """The same of the TileLang kernel, at either end of the range of its versions, and compiled by nvcc 13.0 and 13.5."""
    is_long = (problem.ring_rows or 0) > 32  # a lane has decays of several entries
    is_much, lanes = _holds_much(problem, tiles), tiles.threads_per_column
    if tiles.min_threads_per_sm < _MIN_THREADS_PER_SM[0]:
        is_masked = lanes * k_per_thread(problem, lanes) != problem.head_k_dim
        is_tight = problem.has_accepted and (is_long or is_much and is_masked)
        return is_tight and tiles.min_threads_per_sm > _MIN_THREADS_PER_SM[-1]
    if is_long or problem.has_accepted:  # with 32 values too
        return True
    has_wide_slots = not problem.state_v_first and problem.index_dtype == "int64"
    return is_much and (problem.has_rounding or problem.has_parent or has_wide_slots)


def _holds_much(problem: RecurrentProblem, tiles: Tiles) -> bool:
    """Whether a thread holds more than 32 values of the state."""
    return k_per_thread(problem, tiles.threads_per_column) * tiles.v_per_thread > _MAX_STATE_REGISTERS // 2


def fits_ring(problem: RecurrentProblem, tiles: Tiles, spills: Callable[[RecurrentProblem, Tiles], bool]) -> bool:
    """Whether a kernel with a ring can be compiled and launched. spills: of the kernel."""
    if (tiles.threads, tiles.threads_per_column) not in _RING_SHAPES or tiles.v_per_thread != 4:
        return False
    if tiles.min_threads_per_sm not in _MIN_THREADS_PER_SM or tiles.min_threads_per_sm % tiles.threads:
        return False
    values = k_per_thread(problem, tiles.threads_per_column) * tiles.v_per_thread
    if values > _MAX_STATE_REGISTERS or ring_bytes(problem, tiles) > H100.shared_bytes_per_block:
        return False
    if spills(problem, tiles):
        return False
    return tiles.block_v < 2 * problem.head_v_dim or (tiles.threads, tiles.threads_per_column) == _RING_SHAPES[-1]


def ring_tiles(problem: RecurrentProblem, spills: Callable[[RecurrentProblem, Tiles], bool]) -> list[Tiles]:
    """The tiles worth measuring with a ring, in order of preference. The fewest threads an SM only where nothing else fits."""
    space = [Tiles(*shape, 4, least) for least in _MIN_THREADS_PER_SM for shape in _RING_SHAPES]
    found = [tiles for tiles in space if fits_ring(problem, tiles, spills)]
    return [tiles for tiles in found if tiles.min_threads_per_sm > _MIN_THREADS_PER_SM[-1]] or found


def default_ring_tiles(problem: RecurrentProblem, device: DeviceSpec, spills: Callable[[RecurrentProblem, Tiles], bool]) -> Tiles:
    """As many threads an SM as do not spill, as much state a thread; then narrower blocks until every SM has nearly two."""
    space = ring_tiles(problem, spills)
    full = [tiles for tiles in space if tiles.min_threads_per_sm == space[0].min_threads_per_sm]
    enough = [tiles for tiles in full if not _few_columns(problem, tiles.block_v, device, _NEARLY_TWO)]
    return enough[0] if enough else min(full, key=lambda tiles: tiles.block_v)


def configs(problem: RecurrentProblem, device: DeviceSpec) -> list[Config]:
    """The feasible configurations worth measuring: those with a prefetch, and for single tokens those without. With a ring:
    of the CuTe kernel."""
    if problem.ring_rows is not None:
        return [Config(*astuple(tiles)) for tiles in ring_tiles(problem, _spills_cute)]
    found = configs_prefetching(problem, device)
    if not is_single(problem):
        whole = _drafts_without_prefetch(problem, device)
        return found if whole is None else [*found, whole]
    least = 16 if _few_columns(problem, 64, device) else 32  # state values a thread
    shapes = [(t, n, r) for t, n, r in _shapes(problem, device) if k_per_thread(problem, n) * r >= least]
    others = _most_resident(problem, shapes, device, prefetches=False)
    return found + (others if problem.state_v_first else _that_read_lines(problem, device, others))


def configs_prefetching(problem: RecurrentProblem, device: DeviceSpec) -> list[Config]:
    """The configurations with a prefetch among those worth measuring."""
    space = _most_resident(problem, _shapes(problem, device), device)
    if not problem.state_v_first:
        return _that_read_lines(problem, device, space)
    # The compiler overlaps more of a large state where it has more registers than it needs.
    roomy = [replace(c, min_threads_per_sm=256) for c in space if c.min_threads_per_sm == 384 and c.threads < 256]
    return space + [config for config in roomy if fits(problem, config, device)]


def _shapes(problem: RecurrentProblem, device: DeviceSpec) -> list[tuple[int, int, int]]:
    """Threads, threads a column and columns a thread worth trying: 8 to 16 entries of K a thread."""
    threads = (32, 64, 128) if _few_columns(problem, 64, device) else (64, 128, 256)
    lanes = [n for n in (4, 8, 16, 32) if n == 4 or 8 <= k_per_thread(problem, n)]
    lanes = [n for n in lanes if k_per_thread(problem, n) <= 16] or lanes[-1:]
    columns = (1, 2, 4) if problem.state_v_first else v_per_thread_k_first(problem.state_dtype)
    return [(t, n, r) for t in threads for n in lanes for r in columns]


def _that_read_lines(problem: RecurrentProblem, device: DeviceSpec, space: list[Config]) -> list[Config]:
    """The configurations worth measuring K first: more than 256 threads an SM, so that enough bytes are in flight, and whole
    lines unless blocks are to be narrow."""
    k, v = problem.head_k_dim, problem.head_v_dim
    several = [config for config in space if config.min_threads_per_sm > _MIN_THREADS_PER_SM[-1]] or space
    if _few_columns(problem, 64, device):
        return several
    return [config for config in several if reads_lines(k, v, config)] or several


def default_config(problem: RecurrentProblem, device: DeviceSpec) -> Config:
    """Chooses no prefetch where there is no next token and the whole state is then on the device at once, or where K first reads
    wider, as it does with drafts too. With a ring: of the CuTe kernel."""
    if problem.ring_rows is not None:
        return Config(*astuple(default_ring_tiles(problem, device, _spills_cute)))
    if is_single(problem):
        config = _choice(problem, device, prefetches=False)
        blocks = max(problem.num_sequences, 1) * problem.num_state_heads * -(-problem.head_v_dim // config.block_v)
        if blocks <= device.num_sms * (config.min_threads_per_sm // config.threads):
            return config
        if not problem.state_v_first and (wider := _wider_without_prefetch(problem, config, device)) is not None:
            return wider
    elif (whole := _drafts_without_prefetch(problem, device)) is not None:
        return whole
    return default_prefetching(problem, device)


def _drafts_without_prefetch(problem: RecurrentProblem, device: DeviceSpec) -> Config | None:
    """Blocks of 128 columns, K first and for a bfloat16 state that is stored for every token: with a prefetch they hold 64, half
    of a row. The stores of a token's state cover the trip of the next one's inputs."""
    if problem.state_v_first or not problem.write_every_token or DTYPE_BYTES[problem.state_dtype] != 2:
        return None
    for config in (Config(256, 8, 4, 512, prefetch_next_token=False), Config(256, 16, 8, 512, prefetch_next_token=False)):
        is_whole = reads_lines(problem.head_k_dim, problem.head_v_dim, config) and config.block_v <= problem.head_v_dim
        if is_whole and not _few_columns(problem, config.block_v, device, _NEARLY_TWO) and fits(problem, config, device):
            return config
    return None


def _wider_without_prefetch(problem: RecurrentProblem, config: Config, device: DeviceSpec) -> Config | None:
    """K first and beyond a wave, where fewer registers a thread let a block read more of a row than it can with a prefetch: of a
    bfloat16 state twice the columns a block, of large heads 64 columns a warp."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if DTYPE_BYTES[problem.state_dtype] == 2:
        for lanes, columns in ((config.threads_per_column, 4), (2 * config.threads_per_column, 8)):
            wide = Config(256, lanes, columns, config.min_threads_per_sm, prefetch_next_token=False)
            if fits(problem, wide, device) and reads_lines(k, v, wide) and wide.block_v > _COLUMNS_OF_WARP:
                return wide
    is_wider = columns_of_warp(v, config) > columns_of_warp(v, default_prefetching(problem, device))
    return config if is_wider else None


def default_prefetching(problem: RecurrentProblem, device: DeviceSpec) -> Config:
    """The choice among configurations with a prefetch."""
    return _choice(problem, device, prefetches=True)


def is_single(problem: RecurrentProblem) -> bool:
    """Whether there is at most one token a sequence, where all have as many, and the form without a prefetch serves it."""
    has_one = problem.num_tokens <= problem.num_sequences
    return has_one and not problem.has_parent and problem.intermediate_dtype is None


def _choice(problem: RecurrentProblem, device: DeviceSpec, prefetches: bool) -> Config:
    """Tiles with as much state per thread as registers for 384 threads an SM allow (512 without a prefetch), then smaller blocks
    until every SM has two."""
    least = 384 if prefetches else 512
    if not problem.state_v_first:
        return _choice_k_first(problem, device, prefetches, least)
    lanes = 16 if problem.head_k_dim > 128 else 8
    while lanes > 4 and lanes * _k_vector(problem) >= 2 * problem.head_k_dim:
        lanes //= 2
    columns = next(r for r in (8, 4, 2, 1) if r == 1 or fits(problem, Config(32, lanes, r, least, prefetches), device))
    narrow = [r for r in (4, 2, 1) if r < columns]
    shapes = [(128, columns), (64, columns), *((64, r) for r in narrow), *((32, r) for r in (columns, *narrow))]
    feasible = _most_resident(problem, [(threads, lanes, r) for threads, r in shapes], device, prefetches)
    enough = [config for config in feasible if not _few_columns(problem, config.block_v, device)]
    return enough[0] if enough else min(feasible, key=lambda config: config.block_v)


def _choice_k_first(problem: RecurrentProblem, device: DeviceSpec, prefetches: bool, least: int) -> Config:
    """Four columns a thread, as few threads a column as registers allow, blocks of at most 64 columns, all of them read by every
    warp; then narrower blocks until every SM has nearly two: half as wide, they read lines in parts."""
    shapes = [(n, r) for r in (4, 2, 1) for n in (4, 8, 16, 32)]
    lanes, columns = next(
        (n, r) for n, r in shapes if (n, r) == shapes[-1] or fits(problem, Config(32, n, r, least, prefetches), device)
    )
    k, v = problem.head_k_dim, problem.head_v_dim
    found = _most_resident(problem, [(threads, lanes, columns) for threads in (256, 128, 64, 32)], device, prefetches)
    fitting = [c for c in found if _adds_few(k, v, c) and (c.threads == 32 or c.block_v <= _COLUMNS_OF_WARP)]
    feasible = [config for config in fitting if config.min_threads_per_sm >= least] or fitting
    enough = [config for config in feasible if not _few_columns(problem, config.block_v, device, _NEARLY_TWO)]
    chosen = enough[0] if enough else min(feasible, key=lambda config: config.block_v)
    if not (prefetches and is_single(problem)) and chosen.block_v < min(_COLUMNS_OF_WARP, v):
        # So few columns wait for latency, not for memory: each thread has half of the state and of the arithmetic.
        finer = [c for c in _most_resident(problem, [(64, 2 * lanes, columns)], device, prefetches) if _adds_few(k, v, c)]
        return finer[0] if finer else chosen
    return chosen
