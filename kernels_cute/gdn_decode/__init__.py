"""One decode step of a GDN layer in one launch: from the projections' outputs to the input of out_proj.

    [q | k | v] = silu(conv(mixed_qkv))        with its window of width - 1 inputs in a slot
    a = exp(-exp(A_log) softplus(a + dt_bias));   beta = sigmoid(b);   q^ = scale q / |q|;   k^ = k / |k|
    o, S = the delta rule on q^, k^, v, a, beta    (common.delta_rule), S [K, V] float32 in registers over a sequence's tokens
    out = o / sqrt(mean(o * o) + eps) * norm_weight * silu(z)    (without norm_weight: o, rounded once)

Tensors: mixed_qkv [L, 2 * H * K + HV * V] (or interleaved with z, or with z, b and a after it), z [L, HV, V], out [L, HV * V]
bfloat16 | float16; a, b [L, HV];
windows [slots, 2 * H * K + HV * V, columns]; state [slots, HV, V, K] or [slots, HV, K, V] float32 | bfloat16.
`gdn.ops.layer_step.problem.GdnDecodeParams` has the contract of each.

A cluster owns a sequence and a key head: `splits` blocks for each of its value heads, a block has threads / threads_per_column *
v_per_thread columns of V. Every block of it computes q and k again (4 KiB of its 32 KiB and more), so nothing but sums of squares
passes between blocks, and the window of q and k is written when all of them have read it.
"""

from dataclasses import replace
from itertools import product

from gdn.device import H100, DeviceSpec
from gdn.ops.delta_rule.tiles import k_vector, reads_lines, v_per_thread_k_first
from gdn.ops.layer_step.problem import GdnDecodeProblem
from gdn.problem import DTYPE_BYTES
from kernels_cute.common import choice
from kernels_cute.common.choice import FLOAT_DTYPES, HALF_DTYPES, long_ring, unserved
from kernels_cute.gdn_decode.config import Config as Config
from kernels_cute.gdn_decode.shape import CHANNELS
from kernels_cute.gdn_decode.streamed import sizes

launch, workspace_bytes = choice.launch, choice.no_workspace

_MAX_STATE_REGISTERS = 64  # state values a thread may hold
_MOST_BLOCKS = 8  # blocks of a cluster, on every device
_MIN_THREADS_PER_SM = (768, 512, 384, 256)
_MANY_WAVES = 16  # heads an SM
_STATE_BYTES = 128  # bytes of the state in a thread, where there are many heads

# How near a tuned entry must be (see gdn.runtime.tuned): tokens and sequences 1.7 times as many, or as few. A large batch wants a
# head in few blocks, a small one in all that fit: entries of large batches would leave half of the SMs idle.
TUNED_WITHIN = 1.5


def refusal(problem: GdnDecodeProblem) -> str | None:
    k, v = problem.head_k_dim, problem.head_v_dim
    if k % 32 or v % 32 or not 32 <= k <= 256 or not 32 <= v <= 256:
        return f"requires head dims that are multiples of 32 up to 256, got K={k}, V={v}"
    if problem.intermediate_dtype not in (None, "float32", "bfloat16"):
        return f"requires intermediate_states of float32 or bfloat16, got {problem.intermediate_dtype}"
    if not 2 <= problem.width <= 4:
        return f"requires a convolution of width 2 to 4, got {problem.width}"
    others = {
        "z": problem.z_dtype, "a": problem.a_dtype, "b": problem.b_dtype, "conv_weight": problem.weight_dtype,
        "conv_bias": problem.bias_dtype, "A_log": problem.A_log_dtype, "dt_bias": problem.dt_bias_dtype,
        "norm_weight": problem.norm_dtype, "conv_state": problem.conv_dtype,
    }  # fmt: skip
    allowed = {HALF_DTYPES: {"mixed_qkv": problem.dtype}, ("float32", "bfloat16"): {"a state": problem.state_dtype}}
    if (reason := unserved(allowed | {FLOAT_DTYPES: others})) is not None:
        return reason
    if not _space(problem, H100):
        if problem.ring_rows is not None and _space(replace(problem, ring_rows=2, fold_every=1), H100):
            return long_ring(problem.ring_rows, H100)
        heads = f"H={problem.num_k_heads}, HV={problem.num_v_heads}"
        return f"requires value heads of a key head that {_MOST_BLOCKS} blocks can share, got {heads}, K={k}, V={v}"
    return None


def _entries(problem: GdnDecodeProblem, threads_per_column: int) -> int:
    """Number of K entries of a thread."""
    return problem.head_k_dim // threads_per_column


def _registers(problem: GdnDecodeProblem, config: Config) -> int:
    """Estimate the registers that a thread cannot do without, from compiled variants."""
    entries = _entries(problem, config.threads_per_column)
    state = config.v_per_thread * entries
    items = (2 * problem.head_k_dim + config.block_v) // CHANNELS
    more = 24 * (-(-items // config.threads) - 1) + max(0, entries - 16) // 2 + 8 * (config.threads == 64)
    if problem.cu_seqlens_dtype is None:
        return more + 32 + 3 * state // 2 + 4 * (problem.intermediate_dtype == "float32")
    more += 6 * (config.v_per_thread == 8 and (problem.cu_seqlens_dtype == "int64" or not problem.has_accepted))
    # Over several tokens the filter, the window and the addresses stay in registers.
    if not problem.state_v_first:  # a thread keeps S q of one column after the exchange, and addresses of sums instead
        more += 2 * (problem.intermediate_dtype is not None)  # addresses of a second tensor
        more += 4 * (problem.has_columns and problem.width < 4)  # such forms spilled 2 to 12 values
        return more + 92 + 19 * state // 16 + 4 * max(0, config.v_per_thread - 4)
    return more + 84 + 5 * state // 4 + (6 if problem.head_v_dim <= 128 else 14) * problem.has_rounding


_BATCH = 4  # the most tokens with a ring that are computed at once

# Tiles with a ring: threads, threads a column, columns a thread, threads an SM. Few forms spill with them (LAB-NOTES.md).
# The first lists are for one token a sequence, those of drafts follow. Narrow: K of at most 64. Wide: K above 128.
_RING_ONE = ((128, 8, 4, 512), (64, 8, 4, 512), (256, 8, 4, 512), (128, 16, 4, 512))
_RING_WIDE_ONE = ((128, 16, 4, 384), (256, 16, 4, 256))
_RING_WIDE_FILTERED_ONE = ((128, 16, 4, 256), (256, 16, 4, 256))  # with a float32 filter or bias
_RING_ONE_K_FIRST = ((128, 8, 4, 512), (64, 8, 4, 512), (128, 16, 4, 512), (256, 8, 4, 256))
# With more to keep in registers: K first a narrow window, int64 indices, noise or offsets, V first offsets and a bfloat16 state.
_RING_MORE_ONE = ((128, 8, 4, 384), (64, 8, 4, 384), (128, 16, 4, 384), (256, 8, 4, 256))
_RING_DRAFTS = ((128, 8, 4, 512), (256, 8, 4, 512), (128, 16, 4, 384), (64, 16, 4, 256))
_RING_NARROW_DRAFTS = ((128, 8, 4, 384), (128, 16, 4, 384), (64, 16, 4, 256))
_RING_NARROW_FILTERED_DRAFTS = ((128, 16, 4, 384), (64, 16, 4, 256))  # with a float32 filter or bias, and float32 states
_RING_WIDE_DRAFTS = ((128, 16, 4, 384), (128, 8, 4, 256), (256, 8, 4, 256))
_RING_DRAFTS_K_FIRST = ((128, 8, 4, 384), (64, 8, 4, 256), (128, 16, 4, 256))
_RING_NOISY_K_FIRST = ((128, 8, 4, 256), (64, 8, 4, 256), (128, 16, 4, 256))  # with noise: drafts, and one token with offsets


def _ring_tiles(problem: GdnDecodeProblem) -> tuple[tuple[int, ...], ...]:
    k, has_float32_filter = problem.head_k_dim, "float32" in (problem.weight_dtype, problem.bias_dtype)
    if not problem.has_accepted:
        has_offsets = problem.cu_seqlens_dtype is not None
        if problem.state_v_first and k > 128:
            return _RING_WIDE_FILTERED_ONE if has_float32_filter else _RING_WIDE_ONE
        if problem.state_v_first:
            return _RING_MORE_ONE if has_offsets and problem.state_dtype == "bfloat16" else _RING_ONE
        if problem.has_rounding and has_offsets:
            return _RING_NOISY_K_FIRST
        has_more = problem.width < 4 or problem.index_dtype != "int32" or problem.has_rounding or has_offsets
        return _RING_MORE_ONE if has_more else _RING_ONE_K_FIRST
    if not problem.state_v_first:
        return _RING_NOISY_K_FIRST if problem.has_rounding else _RING_DRAFTS_K_FIRST
    if k > 64:
        return _RING_DRAFTS if k <= 128 else _RING_WIDE_DRAFTS
    return _RING_NARROW_FILTERED_DRAFTS if has_float32_filter and problem.state_dtype == "float32" else _RING_NARROW_DRAFTS


def _tiles(config: Config) -> tuple[int, ...]:
    return (config.threads, config.threads_per_column, config.v_per_thread, config.min_threads_per_sm)


def _streamed(problem: GdnDecodeProblem, device: DeviceSpec, stages: int | None = None) -> Config | None:
    """Return the configuration that streams states through this many stages (None: all that fit), or None if there is none."""
    if sizes.refusal(problem) is not None:
        return None
    most = sizes.most_stages(problem)
    stages = most if stages is None else stages
    is_possible = 0 < stages <= most and stages % sizes.WARPS == 0
    return Config(256, 8, 4, 256, stages, device.num_sms) if is_possible else None


def _ring_bytes(problem: GdnDecodeProblem, config: Config) -> int:
    """Shared memory of a block with a ring, at most: entries, their weights, inputs of tokens, the state of several tokens."""
    assert problem.ring_rows is not None
    k, rows, block_v = problem.head_k_dim, problem.ring_rows, config.block_v
    entries = rows * (k + block_v) + (2 * _BATCH + 1) * (rows + _BATCH)
    state = k * block_v * DTYPE_BYTES[problem.state_dtype] if problem.state_v_first else 0
    return 4 * (entries + _BATCH * (2 * k + block_v + 8)) + state + 12288  # and the sums that warps and blocks exchange


def fits(problem: GdnDecodeProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled, without spills, and launched."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if config.stages:
        return config == _streamed(problem, device, config.stages)
    if problem.ring_rows is not None and _tiles(config) not in _ring_tiles(problem):
        return False
    if config.threads_per_column not in (4, 8, 16, 32) or config.threads not in (64, 128, 256):
        return False
    if config.min_threads_per_sm not in _MIN_THREADS_PER_SM or config.min_threads_per_sm % config.threads:
        return False
    if config.v_per_thread not in (1, 2, 4, 8) or config.v_per_thread > config.threads_per_column:
        return False
    if k % (config.threads_per_column * k_vector(problem.state_v_first, problem.state_dtype, k)) or v % config.block_v:
        return False
    blocks = v // config.block_v
    if problem.num_v_heads % problem.num_k_heads or blocks * (problem.num_v_heads // problem.num_k_heads) > _MOST_BLOCKS:
        return False
    if _entries(problem, config.threads_per_column) * config.v_per_thread > _MAX_STATE_REGISTERS:
        return False
    if problem.ring_rows is not None:
        return _ring_bytes(problem, config) <= device.shared_bytes_per_block
    return _registers(problem, config) <= min(device.registers_per_sm // config.min_threads_per_sm // 8 * 8, 255)


def _space(problem: GdnDecodeProblem, device: DeviceSpec) -> list[Config]:
    """Return one configuration for each shape: the one with the tightest cap on registers that the estimate allows, if any."""
    shapes = product((64, 128, 256), (4, 8, 16, 32), (1, 2, 4, 8))
    space = [[Config(*shape, least) for least in _MIN_THREADS_PER_SM] for shape in shapes]
    found = [next((config for config in some if fits(problem, config, device)), None) for some in space]
    return [config for config in found if config is not None]


def configs(problem: GdnDecodeProblem, device: DeviceSpec) -> list[Config]:
    """The feasible configurations worth measuring: 8 to 16 entries of K a thread, 16 to 64 values of the state; K first those
    that read lines, where blocks need not be narrow."""
    space = _space(problem, device)
    k, v = problem.head_k_dim, problem.head_v_dim
    sized = [(config, _entries(problem, config.threads_per_column)) for config in space]
    found = [c for c, n in sized if 8 <= n <= 16 and n * c.v_per_thread >= 16 and c.block_v >= 16] or space
    if problem.state_v_first:
        streamed = _streamed(problem, device)
        return found if streamed is None else [*found, streamed]
    found = [config for config in found if config.v_per_thread in v_per_thread_k_first(problem.state_dtype)] or found
    if _heads(problem) < device.num_sms:
        return found
    return [config for config in found if reads_lines(k, v, config)] or found


def _heads(problem: GdnDecodeProblem) -> int:
    """Number of value heads of the call."""
    return max(problem.num_sequences, 1) * problem.num_v_heads


def default_config(problem: GdnDecodeProblem, device: DeviceSpec) -> Config:
    """Return the measured choice (LAB-NOTES.md). It depends on the value heads of the call: too few for the device, one wave,
    several, many."""
    streamed = _streamed(problem, device)
    # An item for every third SM; with one for every fourth the other form takes as long, with fewer it is faster. One token
    # without offsets (with them: not measured): the other form is faster up to an item an SM, and takes as long with two.
    has_one_token = problem.ring_rows is not None and problem.cu_seqlens_dtype is None
    least = 3 * device.num_sms // 2 if has_one_token else device.num_sms // 3
    if streamed is not None and max(problem.num_sequences, 1) * problem.num_k_heads >= least:
        return streamed
    space = [config for config in configs(problem, device) if not config.stages]
    heads = _heads(problem)

    def state(config: Config) -> int:
        return config.v_per_thread * _entries(problem, config.threads_per_column)

    def blocks(config: Config) -> int:
        return problem.head_v_dim // config.block_v

    def more_threads(config: Config) -> tuple[int, ...]:
        """The key of the choice with less state a thread, for more threads an SM: some load while others store."""
        size = DTYPE_BYTES[problem.state_dtype] * state(config)
        return abs(config.threads - 128), abs(size - _STATE_BYTES), abs(config.v_per_thread - 4)

    # Among equals K first: as many columns as a load takes where a block is a whole head, else as few threads a column as there
    # can be.
    k_first = not problem.state_v_first

    if has_one_token and not k_first:  # in the order of the list; of few heads narrow blocks first (DESIGN.md)
        lanes = 16 if heads <= device.num_sms // 8 else 8
        return min(space, key=lambda c: (c.threads_per_column != lanes, _ring_tiles(problem).index(_tiles(c))))
    if heads < device.num_sms:  # as many blocks as there can be
        return min(space, key=lambda c: (-blocks(c), -state(c), c.threads_per_column))
    if problem.cu_seqlens_dtype is not None:  # the state stays for several tokens: the most of it on an SM
        whole = [c for c in space if blocks(c) == 1 and problem.ring_rows is None and not k_first]
        if whole and heads <= 2 * device.num_sms:  # few heads: nothing passes between blocks of one
            return min(whole, key=lambda c: (-state(c), c.threads_per_column))
        # A float32 state that is stored for every token: 1.5 to 4 % faster on an H200, as fast on an H100.
        if problem.has_columns and problem.ring_rows is None and problem.state_dtype == "float32" and not k_first:
            return min(space, key=more_threads)
        return min(space, key=lambda c: (-c.min_threads_per_sm * state(c), blocks(c), c.threads_per_column))
    # A head a block, so that no sums pass between blocks, where all of them are on the device at once.
    wave = [c for c in space if blocks(c) == 1 and heads <= device.num_sms * (c.min_threads_per_sm // c.threads)]
    if wave:
        return min(wave, key=lambda c: (-state(c), -c.v_per_thread * k_first, c.threads_per_column))
    # K first: configurations that read lines, in blocks of 128 threads for any number of heads. With a ring nothing is stored as
    # a rule, and every block of a head works on its keys again: as much of the state in a block.
    if k_first:
        return min(space, key=lambda c: (-state(c), abs(c.threads - 128), c.threads_per_column))
    if heads < _MANY_WAVES * device.num_sms:  # small blocks, whose places are soon free again
        return min(space, key=lambda c: (-state(c), -blocks(c), c.threads_per_column))
    return min(space, key=more_threads)


def compile(problem: GdnDecodeProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.gdn_decode.library import library

    return library(problem, config)
