"""Choice of a prefill step's form, and of the convolution's number of SMs: a model of its time from sizes alone."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.layer_step.problem import GdnDecodeProblem, GdnPrefillProblem
from kernels_cute.chunk.deal import max_scheduled_clusters
from kernels_cute.chunk.plan import Model, is_uneven
from kernels_cute.chunk.shape import CHUNK, STAGES
from kernels_cute.conv1d.shape import THREADS, threads_fit
from kernels_cute.gdn_prefill import parts
from kernels_cute.gdn_prefill.shape import CLUSTER, PART_BYTES, block_threads
from kernels_cute.gdn_prefill.short.shape import BLOCKS_PER_SM, MOST_TOKENS, RESERVED_BYTES
from kernels_cute.gdn_prefill.short.shape import fits as short_fits

ALL_CLUSTERS = 2**31 - 1
_DIM = 128
_SMS = 132
# SMs of the convolution, of _SMS: enough to stay ahead of the chunk kernel, few enough that its rows are still in the L2 cache.
_CONV_SMS = (46, 28, 34, 40, 52, 64)  # the first is the default
_CONV_ROWS = (16, 32, 8)
_STAGED_ROWS, _STAGED_THREADS = 16, 64  # of the staged convolution: ten blocks share an SM
# Microseconds, fitted to measured calls (LAB-NOTES.md): a chunk side by side; start, first rows, last outputs.
_CHUNK, _ENDS = 1.78, 16.0
# The same where a cluster has a head of every sequence in turn, a work tile, and the fewest tokens a sequence that were measured.
_CHUNK_IN_TURN, _WORK_TILE_IN_TURN, _LEAST_IN_TURN = 1.66, 1.0, 512
_WORK_TILE = 3.0  # start and end of a work tile of the chunk kernel alone, where a cluster takes several
_NORMED_TIME = 0.92  # with the norm in the chunk kernel, of the time apart
# The same of the norm in the chunk kernel where sequences have fewer tokens than _LEAST_IN_TURN.
_NORMED_TIME_OF_MANY = 0.97
_MOST_OTHER_TOKENS = 2  # on average of the sequences next to a long one, where they count as sequences of one token
_MORE_LONG = 4  # sequences than the host expects next to rows of one token, for which there is room
_NORM_THREADS, _NORM_ROWS = 128, 4
_LEAST_SHORT_WAVES = 3  # of the blocks that short sequences have, from calls with 4 and with 16
_GBPS_CONV, _GBPS_NORM = 2500.0, 2850.0  # of the kernels alone, measured


def side_by_side_fits(problem: GdnPrefillProblem, config: Any, device: DeviceSpec) -> bool:
    """Whether a configuration with `num_conv_blocks` serves the problem."""
    p, c = problem, config
    if not _serves(p):
        return False
    if c.max_short_tokens not in (0, 1) or (c.max_short_tokens and not _can_decode(p)):
        return False
    if c.norm_in_chunk or any((c.prefetch, c.split_chunks, c.split_if_longest_exceeds, c.num_four_sm_clusters)):
        return False
    if c.stages != STAGES or c.state_heads != 1:
        return False
    if c.num_conv_blocks < CLUSTER or c.num_conv_blocks % CLUSTER or c.num_conv_blocks > device.num_sms - 2:
        return False
    if not 0 <= c.num_persistent_clusters <= min(max_scheduled_clusters(True), (device.num_sms - c.num_conv_blocks) // 2):
        return False
    tiles = block_threads(p) % c.conv_threads == 0 and c.conv_threads >= 64 and CHUNK % c.conv_rows == 0 and c.conv_rows >= 8
    return tiles and c.conv_batch in (2, 4) and threads_fit(parts.conv_problem(problem), c.conv_threads)


def side_by_side(problem: GdnPrefillProblem, device: DeviceSpec) -> dict[str, int] | None:
    """Fields of the configuration; None where the kernels are faster one after the other."""
    if not _serves(problem):
        return None
    clusters = _clusters(problem, device, _conv_blocks(_CONV_SMS[0], device))
    if clusters and clusters < problem.num_v_heads:
        # Where heads take turns the chunk kernel leaves no SM idle: the convolution's are missing there (measured).
        return None
    has_many = bool(clusters) and problem.num_tokens < _LEAST_IN_TURN * problem.num_sequences
    can_decode = bool(clusters) and _can_decode(problem)
    if has_many and not (can_decode and problem.num_tokens > MOST_TOKENS * problem.num_sequences):
        return None
    others = _NORMED_TIME_OF_MANY if has_many else _NORMED_TIME
    whole = problem
    if not clusters:  # in whole chunks: one side's time grows by these, the other's by tokens too, and they would take turns
        tokens = CHUNK * max(problem.num_sequences, 1)
        whole = replace(problem, num_tokens=-(-problem.num_tokens // tokens) * tokens)
    apart = _time_apart(whole, device) * (others if normed(problem, device) is not None else 1.0)
    if _time(whole, bool(clusters)) >= apart:
        return None
    # Where heads take turns a sequence of one token would take the time of a chunk from all of them.
    return next(_candidates(problem, device)) | {"max_short_tokens": int(can_decode)}


def all_side_by_side(problem: GdnPrefillProblem, device: DeviceSpec) -> list[dict[str, int]]:
    """Fields of the side-by-side forms worth measuring."""
    found = list(_candidates(problem, device)) if _serves(problem) else []
    can_decode = bool(found) and problem.num_sequences > 1 and _can_decode(problem)
    return [*found, *([found[0] | {"max_short_tokens": 1}] if can_decode else [])]


def normed_fits(problem: GdnPrefillProblem, config: Any, device: DeviceSpec) -> bool:
    """Whether a configuration with `norm_in_chunk` serves the problem: z goes through shared memory as V does."""
    c = config
    others = (c.prefetch, c.split_chunks, c.split_if_longest_exceeds, c.num_four_sm_clusters, c.max_l2_ring_groups)
    if not _can_norm_in_chunk(problem) or (c.stages, c.state_heads) != (STAGES, 1) or any(others):
        return False
    if c.max_short_tokens and c.max_short_tokens not in _short_choices(problem, device):
        return False
    return _staged_fits(problem, c, device) and 0 <= c.num_persistent_clusters <= max_scheduled_clusters(True)


def normed(problem: GdnPrefillProblem, device: DeviceSpec) -> dict[str, int] | None:
    """Fields of the configuration with the norm in the chunk kernel; None where the chunk kernel leaves SMs idle, which its other
    forms use."""
    clusters = Model(parts.chunk_problem(problem), device).clusters() if _can_norm_in_chunk(problem) else 0
    if not clusters:
        return None
    none = dict.fromkeys(
        ("prefetch", "split_chunks", "split_if_longest_exceeds", "num_four_sm_clusters", "max_l2_ring_groups"), 0
    )
    return none | _staged(problem) | {"norm_in_chunk": 1, "stages": STAGES, "state_heads": 1, "num_persistent_clusters": clusters}


def with_short(problem: GdnPrefillProblem, device: DeviceSpec) -> list[dict[str, int]]:
    """The same with launches for short sequences, the longest `max_short_tokens` first."""
    changes = normed(problem, device)
    if changes is None or problem.num_sequences == 1:
        return []
    return [changes | {"max_short_tokens": tokens} for tokens in _short_choices(problem, device)]


def in_segments(problem: GdnPrefillProblem, device: DeviceSpec) -> dict[str, int] | None:
    """Fields of the configuration for one long sequence among sequences of one token, where few heads would leave SMs idle: the
    long one in segments, the others by the decode step's kernel. None where the host does not know of such lengths, or whole
    sequences are faster."""
    if not has_rows_of_one_token(problem):
        return None
    others = problem.num_sequences - 1
    alone = replace(parts.chunk_problem(problem), num_tokens=problem.num_tokens - others, num_sequences=1, longest=0)
    model = Model(alone, device)
    segment, time = model.best_segment()
    if not segment or time >= model.whole_time:  # next to rows of one token, whole sequences never have four SMs
        return None
    none = dict.fromkeys(("split_if_longest_exceeds", "num_four_sm_clusters", "max_l2_ring_groups"), 0)
    own = {"stages": STAGES, "state_heads": 1, "split_chunks": segment, "prefetch": model.prefetch(segment, 0)}
    # As many as others have tokens beyond their first, and a few more, as empty sequences or a wrong `longest` make them.
    longer = 1 + max(problem.num_tokens - problem.longest - others, 0)
    own |= {"max_long_sequences": min(longer + _MORE_LONG, problem.num_sequences), "num_persistent_clusters": device.num_sms // 2}
    # The norm has tiles of its own (outputs.py): those of the configuration change nothing, and are the same for all lengths.
    own |= {"norm_threads": _NORM_THREADS, "norm_rows": _NORM_ROWS}
    return none | _staged(problem) | own | {"max_short_tokens": 1}


def has_rows_of_one_token(problem: GdnPrefillProblem) -> bool:
    """Whether, as far as the host knows, the others than one long sequence are of one token, and the decode step's kernel has
    them."""
    if not is_uneven(parts.chunk_problem(problem)) or not _serves(problem):
        return False
    is_short = problem.num_tokens - problem.longest <= _MOST_OTHER_TOKENS * (problem.num_sequences - 1)
    return is_short and _can_decode(problem)


def in_segments_fits(problem: GdnPrefillProblem, config: Any, device: DeviceSpec) -> bool:
    """Whether a configuration with `max_short_tokens` and `split_chunks` serves the problem, if the chunk kernel's part fits."""
    is_split = config.split_chunks > 0 and not config.split_if_longest_exceeds
    is_served = config.max_short_tokens == 1 and _serves(problem) and _can_decode(problem)
    is_bounded = 2 <= config.max_long_sequences <= max(problem.num_sequences, 2)
    return is_split and is_served and is_bounded and _staged_fits(problem, config, device)


@functools.lru_cache(maxsize=256)  # every launch asks
def bounded(config: Any) -> Any:
    """The configuration whose variants the chunk kernel launches: what decides between them is `max_long_sequences`, if given."""
    return replace(config, split_if_longest_exceeds=config.max_long_sequences) if config.max_long_sequences else config


def has_short(problem: GdnPrefillProblem, device: DeviceSpec) -> bool:
    """Whether sequences are so short and so many that launches of their own are faster. Their blocks take longer for a value head
    than clusters of the chunk kernel, and gain by being many at once."""
    blocks = problem.num_sequences * problem.num_k_heads
    is_short = problem.num_tokens <= MOST_TOKENS * problem.num_sequences
    return is_short and blocks >= _LEAST_SHORT_WAVES * BLOCKS_PER_SM * device.num_sms


def _serves(problem: GdnPrefillProblem) -> bool:
    return problem.head_v_dim == problem.head_k_dim == _DIM


def _can_norm_in_chunk(problem: GdnPrefillProblem) -> bool:
    """Whether there is a norm, and tiles of z have room in the chunk kernel."""
    return _serves(problem) and problem.has_norm and (problem.z_dtype or problem.dtype) == problem.dtype


def _can_decode(problem: GdnPrefillProblem) -> bool:
    """Whether the decode step's kernel serves the sequences of one token."""
    return _decode_refusal(parts.decode_problem(problem)) is None


@functools.lru_cache(maxsize=64)
def _decode_refusal(problem: GdnDecodeProblem) -> str | None:
    from kernels_cute import gdn_decode  # a call of one sequence does not wait for its import

    return gdn_decode.refusal(problem)


def _short_choices(problem: GdnPrefillProblem, device: DeviceSpec) -> list[int]:
    """Values of `max_short_tokens` but 0, next to the norm in the chunk kernel."""
    fits = short_fits(problem, device.shared_bytes_per_block // BLOCKS_PER_SM - RESERVED_BYTES)
    return (([MOST_TOKENS] if fits else []) + [1]) if _can_decode(problem) else []


def _staged(problem: GdnPrefillProblem) -> dict[str, int]:
    """Fields of the staged convolution."""
    return {"conv_threads": _STAGED_THREADS, "conv_rows": _STAGED_ROWS, "conv_batch": _batch(problem)}


def _staged_fits(problem: GdnPrefillProblem, config: Any, device: DeviceSpec) -> bool:
    """Whether its tiles are in shared memory at once."""
    tile_bytes = (problem.width - 1 + config.conv_rows) * config.conv_threads * PART_BYTES
    return tile_bytes <= device.shared_bytes_per_block and config.conv_rows % config.conv_batch == 0


def _batch(problem: GdnPrefillProblem) -> int:
    return 2 if problem.dtype == "float16" and problem.bias_dtype is not None else 4  # as conv1d


def _conv_blocks(share: int, device: DeviceSpec) -> int:
    return device.num_sms * share // _SMS // CLUSTER * CLUSTER


def _candidates(problem: GdnPrefillProblem, device: DeviceSpec) -> Iterator[dict[str, int]]:
    conv, block = parts.conv_problem(problem), block_threads(problem)
    threads = max((one for one in THREADS if block % one == 0 and threads_fit(conv, one)), default=THREADS[0])
    fixed = {"stages": STAGES, "state_heads": 1, "conv_threads": threads, "conv_batch": _batch(problem)}
    fixed |= dict.fromkeys(("prefetch", "split_chunks", "split_if_longest_exceeds", "num_four_sm_clusters"), 0)
    for rows in _CONV_ROWS:
        for share in _CONV_SMS:
            blocks = _conv_blocks(share, device)
            clusters = _clusters(problem, device, blocks)
            own = {"num_conv_blocks": blocks, "num_persistent_clusters": clusters, "conv_rows": rows, "max_l2_ring_groups": 0}
            yield fixed | own


def _clusters(problem: GdnPrefillProblem, device: DeviceSpec, conv_blocks: int) -> int:
    """Clusters that take work tiles one after the other; 0 where all run at once."""
    most_clusters = min((device.num_sms - conv_blocks) // 2, max_scheduled_clusters(True))
    work_tiles = problem.num_sequences * problem.num_v_heads
    if work_tiles <= most_clusters:
        return 0
    # The heads of a sequence are equal: with fewer clusters in as many rounds, SMs are left for the norm, and every cluster has
    # its part of one sequence before the next one's rows are made.
    return -(-problem.num_v_heads // -(-problem.num_v_heads // most_clusters))


def _time(problem: GdnPrefillProblem, takes_turns: bool) -> float:
    """Return the microseconds of the call side by side, where all work tiles run at once, or where a cluster takes one head of
    every sequence in turn."""
    sequences = max(problem.num_sequences, 1)
    if takes_turns:
        return (problem.num_tokens / CHUNK + sequences / 2) * _CHUNK_IN_TURN + sequences * _WORK_TILE_IN_TURN + _ENDS
    return -(-problem.num_tokens // (CHUNK * sequences)) * _CHUNK + _ENDS


def _time_apart(problem: GdnPrefillProblem, device: DeviceSpec) -> float:
    model = Model(parts.chunk_problem(problem), device)
    chunk = min(model.whole_time, model.four_sm_time)
    if model.split()[0]:
        # Segments fill the SMs that the convolution would take.
        return 0.0
    most_clusters = device.num_sms // 2
    if model.sequences * problem.num_v_heads > most_clusters:  # persistent: less than a start and an end for each work tile
        chunk = -(-model.sequences * problem.num_v_heads // most_clusters) * (model.chunks * model.times.chunk + _WORK_TILE) + 8.0
    rows = parts.conv_problem(problem).bytes_moved() / _GBPS_CONV
    outputs = parts.norm_problem(problem).bytes_moved() / _GBPS_NORM if problem.has_norm else 0.0
    return chunk + (rows + outputs) / 1e3 + 4.0
