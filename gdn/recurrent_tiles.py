"""How both recurrent kernels may share out their work: configurations, which of them fit, and the analytic choice.

The kernels differ in language alone: `lanes` threads share the K entries of `rows` columns of V each, with the state in
registers. What a thread needs and what is worth trying is the same for both.

Leaf module: imports the other leaves only.
"""

from dataclasses import dataclass, replace

from gdn.device import DeviceSpec
from gdn.problems import DTYPE_BYTES, RecurrentProblem, unserved_dtypes

_COLUMNS_OF_WARP = 64  # of V, K first; a line of the L2 cache is 128 bytes
_MAX_STATE_REGISTERS = 64  # state values a thread may hold
_OTHER_REGISTERS = 50  # of a thread: addresses, gates, counters, and what alignment wastes
_OTHER_IN_TURN = 30  # without a token ahead
_NEARLY_TWO = 15 / 8  # blocks an SM: 256 of them on 132
_RESIDENT = (512, 384, 256)
# How near a tuned entry must be (see gdn.runtime.tuned): tokens and sequences 1.7 times as many, or as few. A large batch wants a
# head in few blocks, a small one in all that fit. One bound for both kernels: of unequal ones the wider would win by its reach.
TUNED_WITHIN = 1.5


@dataclass(frozen=True)
class Tiles:
    threads: int  # threads of a block; more share one set of index loads, fewer make more blocks
    lanes: int  # threads that share one column of V: each holds K / lanes of its entries
    rows: int  # columns of V per thread: more bytes in flight and fewer shuffles per byte, more registers
    resident: int  # threads an SM must be able to hold: caps a thread at 65536 / resident registers

    @property
    def block_v(self) -> int:
        """Columns of V per block."""
        return self.threads // self.lanes * self.rows


@dataclass(frozen=True)
class Config(Tiles):
    # Whether a token's q, k, v and gates are loaded while the one before it is computed. Without, a thread needs fewer registers
    # and the state's loads wait for one trip to memory less; a call of several tokens a sequence waits for each one's inputs.
    ahead: bool = True


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
    if problem.has_parent and not problem.write_every_token:
        return "requires a column of indices per token with parent_token, got one slot per sequence"
    return None


def k_vector(state_v_first: bool, state_dtype: str, head_k_dim: int) -> int:
    """Consecutive K entries of a thread: a 16-byte load of the state where K is its last dim, else 8 bytes of q and k."""
    if state_v_first and state_dtype == "bfloat16" and head_k_dim % 8 == 0:
        return 8
    return 4


def _k_vector(problem: RecurrentProblem) -> int:
    return k_vector(problem.state_v_first, problem.state_dtype, problem.head_k_dim)


def k_warps(state_v_first: bool, head_v_dim: int, tiles: Tiles) -> int:
    """Warps that share a column of V. K first they are so many that a warp reads 64 neighbouring columns of a row of V, where
    the block has the warps: two lines of float32, one of bfloat16. Without, a warp would read parts of lines."""
    if state_v_first:
        return 1
    columns = min(_COLUMNS_OF_WARP, 1 << (head_v_dim - 1).bit_length())
    lanes_of_warp = max(1, 32 * tiles.rows // columns)  # lanes of a column in a warp
    return max(1, min(tiles.lanes // lanes_of_warp, tiles.threads // 32))


def rows_k_first(state_dtype: str) -> tuple[int, ...]:
    """Columns a thread worth measuring K first: up to 16 bytes of a row, since a second access of a thread would leave gaps in
    the lines that the first one reads; at least four columns, which are a load of 8 bytes."""
    return (4, 8) if DTYPE_BYTES[state_dtype] == 2 else (4,)


def columns_of_warp(head_v_dim: int, tiles: Tiles) -> int:
    """Neighbouring columns of V of which a warp reads a row at once, K first."""
    return 32 * tiles.rows * k_warps(False, head_v_dim, tiles) // tiles.lanes


def reads_lines(head_k_dim: int, head_v_dim: int, tiles: Tiles) -> bool:
    """K first: whether warps read as many columns as `k_warps` wants, and no more warps share them than is worth it."""
    return columns_of_warp(head_v_dim, tiles) >= min(_COLUMNS_OF_WARP, head_v_dim) and _adds_few(head_k_dim, head_v_dim, tiles)


def _adds_few(head_k_dim: int, head_v_dim: int, tiles: Tiles) -> bool:
    """K first: whether at most four warps (eight of the largest heads) share columns. More of them lost: each held less state."""
    return k_warps(False, head_v_dim, tiles) <= max(4, head_k_dim // 32)


def k_per_thread(problem: RecurrentProblem, lanes: int) -> int:
    """K entries of a thread, some of which may lie beyond the last."""
    vector = _k_vector(problem)
    return -(-problem.head_k_dim // (lanes * vector)) * vector


def _registers(problem: RecurrentProblem, config: Config) -> int:
    """Estimate of the registers that a thread cannot do without."""
    entries = k_per_thread(problem, config.lanes)
    if not config.ahead:
        return _registers_in_turn(problem, config, entries)
    per_entry = 2 * entries  # k; the next token's q and k, two in a register
    per_column = 9 * config.rows // 2 + 3  # sums of S k and S q, u, v, the next token's v; k q and two norms
    masked = config.lanes * entries != problem.head_k_dim or problem.head_v_dim % config.block_v != 0
    write_slots = problem.write_every_token and problem.has_final_indices and problem.use_gate  # addresses beside softplus
    state = config.rows * entries * (1 + problem.has_parent)  # a tree comes back to its start
    noise = 6 * (problem.has_rounding and problem.write_every_token)
    parts = 3 * max(0, k_warps(problem.state_v_first, problem.head_v_dim, config) - 4)  # of sums, read by all threads
    return state + per_entry + per_column + 4 * masked + 2 * write_slots + parts + noise + _OTHER_REGISTERS


def _registers_in_turn(problem: RecurrentProblem, config: Config, entries: int) -> int:
    masked = config.lanes * entries != problem.head_k_dim or problem.head_v_dim % config.block_v != 0
    per_column = 3 * config.rows + 3  # sums of S k and S q, v; k q and two norms
    if not problem.state_v_first:  # of S q one column's after the exchange; addresses of the sums
        several = 32 * k_warps(False, problem.head_v_dim, config) < config.threads and entries > 8  # exchanges in a block
        per_column = 2 * config.rows + 7 + 4 * several
    # What spilled a value or two in some variants: gates that come as they are, few lanes, float16 (k stays as float32 for the
    # update too, see `unpack_anew`), noise for every token.
    noise = problem.has_rounding and problem.write_every_token
    found = (not problem.use_gate, config.lanes < 8, problem.dtype != "bfloat16", noise)
    more = 6 * sum(found) + 4 * masked
    return (config.rows + 1) * entries + per_column + more + _OTHER_IN_TURN  # q and k are two values in a register


def _most_resident(
    problem: RecurrentProblem, threads: int, lanes: int, rows: int, device: DeviceSpec, ahead: bool = True
) -> Config | None:
    """With the tightest cap on registers that the estimate allows."""
    configs = (Config(threads, lanes, rows, resident, ahead) for resident in _RESIDENT)
    return next((config for config in configs if fits(problem, config, device)), None)


def fits(problem: RecurrentProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled, without spills, and launched."""
    if config.lanes not in (4, 8, 16, 32) or config.threads not in (32, 64, 128, 256):
        return False
    if config.resident not in _RESIDENT or config.resident % config.threads:
        return False
    if config.rows not in (1, 2, 4, 8) or config.rows > config.lanes or problem.head_v_dim % config.rows:
        return False
    if config.lanes * _k_vector(problem) >= 2 * problem.head_k_dim and config.lanes > 4:
        return False  # half of the lanes would hold nothing
    if not config.ahead and (problem.has_parent or config.resident != _RESIDENT[0]):
        return False  # the nodes of a tree are loaded in turn anyway; more registers than this form is made for spill as well
    if not config.ahead and not _holds_drafts_in_turn(problem, config):
        return False
    if k_per_thread(problem, config.lanes) * config.rows * (1 + problem.has_parent) > _MAX_STATE_REGISTERS:
        return False
    if _registers(problem, config) > min(device.registers_per_sm // config.resident // 8 * 8, 255):
        return False
    return config.block_v < 2 * problem.head_v_dim or config.threads == 32


def _holds_drafts_in_turn(problem: RecurrentProblem, config: Config) -> bool:
    """K first, without a token ahead and with a state stored for every token: 64 values a thread spill but in one kind."""
    if problem.state_v_first or not problem.write_every_token:
        return True
    if k_per_thread(problem, config.lanes) * config.rows <= _MAX_STATE_REGISTERS // 2:
        return True
    is_bf16 = DTYPE_BYTES[problem.state_dtype] == 2
    return is_bf16 and problem.use_beta_sigmoid and config.threads == 256 and config.block_v > _COLUMNS_OF_WARP


def _few_columns(problem: RecurrentProblem, block_v: int, device: DeviceSpec, blocks: float = 2) -> bool:
    """Whether blocks of block_v columns would not give every SM two."""
    columns = max(problem.num_sequences, 1) * problem.num_state_heads * problem.head_v_dim
    return columns < blocks * device.num_sms * block_v


def configs(problem: RecurrentProblem, device: DeviceSpec) -> list[Config]:
    """The feasible configurations worth measuring: those with a token ahead, and for single tokens those without."""
    found = configs_ahead(problem, device)
    if not is_single(problem):
        whole = _drafts_in_turn(problem, device)
        return found if whole is None else [*found, whole]
    least = 16 if _few_columns(problem, 64, device) else 32  # state values a thread
    shapes = [(t, n, r) for t, n, r in _shapes(problem, device) if k_per_thread(problem, n) * r >= least]
    made = [_most_resident(problem, *shape, device, ahead=False) for shape in shapes]
    in_turn = [config for config in made if config is not None]
    return found + (in_turn if problem.state_v_first else _that_read_lines(problem, device, in_turn))


def configs_ahead(problem: RecurrentProblem, device: DeviceSpec) -> list[Config]:
    """Of these, the ones with a token ahead."""
    found = [_most_resident(problem, *shape, device) for shape in _shapes(problem, device)]
    space = [config for config in found if config is not None]
    if not problem.state_v_first:
        return _that_read_lines(problem, device, space)
    # The compiler overlaps more of a large state where it has more registers than it needs.
    roomy = [replace(c, resident=256) for c in space if c.resident == 384 and c.threads < 256]
    return space + [config for config in roomy if fits(problem, config, device)]


def _shapes(problem: RecurrentProblem, device: DeviceSpec) -> list[tuple[int, int, int]]:
    """Threads, lanes, rows worth trying: 8 to 16 entries of K a thread."""
    threads = (32, 64, 128) if _few_columns(problem, 64, device) else (64, 128, 256)
    lanes = [n for n in (4, 8, 16, 32) if n == 4 or 8 <= k_per_thread(problem, n)]
    lanes = [n for n in lanes if k_per_thread(problem, n) <= 16] or lanes[-1:]
    rows = (1, 2, 4) if problem.state_v_first else rows_k_first(problem.state_dtype)
    return [(t, n, r) for t in threads for n in lanes for r in rows]


def _that_read_lines(problem: RecurrentProblem, device: DeviceSpec, space: list[Config]) -> list[Config]:
    """The configurations worth measuring K first: more than 256 threads an SM, so that enough bytes are in flight, and whole
    lines unless blocks are to be narrow."""
    k, v = problem.head_k_dim, problem.head_v_dim
    several = [config for config in space if config.resident > _RESIDENT[-1]] or space
    if _few_columns(problem, 64, device):
        return several
    return [config for config in several if reads_lines(k, v, config)] or several


def default_config(problem: RecurrentProblem, device: DeviceSpec) -> Config:
    """Without a token ahead where there is none and the whole state is then on the device at once, or K first reads wider, as
    it does with drafts too."""
    if is_single(problem):
        config = _choice(problem, device, ahead=False)
        blocks = max(problem.num_sequences, 1) * problem.num_state_heads * -(-problem.head_v_dim // config.block_v)
        if blocks <= device.num_sms * (config.resident // config.threads):
            return config
        if not problem.state_v_first and (wider := _wider_in_turn(problem, config, device)) is not None:
            return wider
    elif (whole := _drafts_in_turn(problem, device)) is not None:
        return whole
    return default_ahead(problem, device)


def _drafts_in_turn(problem: RecurrentProblem, device: DeviceSpec) -> Config | None:
    """K first, of a bfloat16 state that is stored for every token, blocks of 128 columns: with a token ahead they hold 64, half
    of a row. The stores of a token's state cover the trip of the next one's inputs."""
    if problem.state_v_first or not problem.write_every_token or DTYPE_BYTES[problem.state_dtype] != 2:
        return None
    config = Config(256, 16, 8, _RESIDENT[0], ahead=False)
    enough = not _few_columns(problem, config.block_v, device, _NEARLY_TWO)
    is_whole = reads_lines(problem.head_k_dim, problem.head_v_dim, config) and config.block_v <= problem.head_v_dim
    return config if enough and is_whole and fits(problem, config, device) else None


def _wider_in_turn(problem: RecurrentProblem, in_turn: Config, device: DeviceSpec) -> Config | None:
    """K first and beyond a wave, where fewer registers a thread let a block read more of a row than it can with a token ahead:
    of a bfloat16 state eight columns a thread and twice the columns a block, of large heads 64 columns a warp."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if DTYPE_BYTES[problem.state_dtype] == 2:
        eight = Config(256, 2 * in_turn.lanes, 8, in_turn.resident, ahead=False)
        if fits(problem, eight, device) and reads_lines(k, v, eight):
            return eight
    is_wider = columns_of_warp(v, in_turn) > columns_of_warp(v, default_ahead(problem, device))
    return in_turn if is_wider else None


def default_ahead(problem: RecurrentProblem, device: DeviceSpec) -> Config:
    return _choice(problem, device, ahead=True)


def is_single(problem: RecurrentProblem) -> bool:
    """At most one token a sequence, where all have as many."""
    return problem.num_tokens <= problem.num_sequences and not problem.has_parent


def _choice(problem: RecurrentProblem, device: DeviceSpec, ahead: bool) -> Config:
    """As much state per thread as registers for 384 threads an SM allow (512 without a token ahead), then smaller blocks until
    every SM has two."""
    resident = 384 if ahead else 512
    if not problem.state_v_first:
        return _choice_k_first(problem, device, ahead, resident)
    lanes = 16 if problem.head_k_dim > 128 else 8
    while lanes > 4 and lanes * _k_vector(problem) >= 2 * problem.head_k_dim:
        lanes //= 2
    rows = next(r for r in (8, 4, 2, 1) if r == 1 or fits(problem, Config(32, lanes, r, resident, ahead), device))
    narrow = [r for r in (4, 2, 1) if r < rows]
    shapes = [(128, rows), (64, rows), *((64, r) for r in narrow), *((32, r) for r in (rows, *narrow))]
    found = [_most_resident(problem, threads, lanes, r, device, ahead) for threads, r in shapes]
    feasible = [config for config in found if config is not None]
    enough = [config for config in feasible if not _few_columns(problem, config.block_v, device)]
    return enough[0] if enough else min(feasible, key=lambda config: config.block_v)


def _choice_k_first(problem: RecurrentProblem, device: DeviceSpec, ahead: bool, resident: int) -> Config:
    """Four columns a thread, as few lanes as registers allow, blocks of at most 64 columns, all of them read by every warp; then
    narrower blocks until every SM has nearly two: half as wide, they read lines in parts."""
    shapes = [(n, r) for r in (4, 2, 1) for n in (4, 8, 16, 32)]
    lanes, rows = next(
        (n, r) for n, r in shapes if (n, r) == shapes[-1] or fits(problem, Config(32, n, r, resident, ahead), device)
    )
    k, v = problem.head_k_dim, problem.head_v_dim
    found = [_most_resident(problem, threads, lanes, rows, device, ahead) for threads in (256, 128, 64, 32)]
    fitting = [c for c in found if c is not None and _adds_few(k, v, c) and (c.threads == 32 or c.block_v <= _COLUMNS_OF_WARP)]
    feasible = [config for config in fitting if config.resident >= resident] or fitting
    enough = [config for config in feasible if not _few_columns(problem, config.block_v, device, _NEARLY_TWO)]
    chosen = enough[0] if enough else min(feasible, key=lambda config: config.block_v)
    if not (ahead and is_single(problem)) and chosen.block_v < min(_COLUMNS_OF_WARP, v):
        # So few columns wait for latency, not for memory: each thread has half of the state and of the arithmetic.
        finer = _most_resident(problem, 64, 2 * lanes, rows, device, ahead)
        if finer is not None and _adds_few(k, v, finer):
            return finer
    return chosen
