"""How long the segments of a split call should be, and whether four SMs take a head: a model of a call's time from sizes alone.

The lengths of the sequences stand on the device and nobody reads them: the model takes them to be equal. That is the case in
which a split gains least, for whole sequences take as long as the longest one, and segments are about as many however the
tokens are dealt out.
"""

from collections.abc import Iterator
from typing import NamedTuple

from gdn.device import DeviceSpec
from gdn.problems import ChunkProblem
from kernels_cute._chunk_items import places_limit
from kernels_cute._chunk_shape import CHUNK
from kernels_cute._chunk_wide_shape import BLOCKS, DIM

# Lengths in chunks that are considered: few enough that a process sees few configurations.
_LENGTHS = (*range(8, 64, 4), *range(64, 256, 16), *range(256, 1025, 64))


class _Times(NamedTuple):
    """Microseconds on an H100, with a block an SM."""

    chunk: float  # of the fused kernel
    summary: float  # the same chunk in the first launch of a split call
    compose: float  # of a segment before the block's own, once a sequence
    wave: float  # of blocks, in either launch: start, first chunk, end


# D = 128: fitted to 26 measured calls, all but one within 6 %; NOTES-chunk.md has them. D = 64, where a block prepares every
# chunk alone in either launch: estimated.
_TIMES = {128: _Times(1.55, 1.6, 1.85, 8.0), 64: _Times(2.4, 2.4, 0.8, 8.0)}
# The wide kernel, with four SMs for a sequence and head: a chunk where all tiles stay in clusters of four, or where some go
# through the L2 cache; start and end. Measured, see NOTES-chunk.md.
_WIDE_CHUNK, _RINGED_CHUNK, _WIDE_START = 0.89, 1.08, 12.0
# Clusters of four that run at once on _SMS multiprocessors. It depends on how these are spread over GPCs: an H100 measured here
# has room for 30 (cudaOccupancyMaxActiveClusters), others may for fewer. Fewer than there is room for costs nothing, for the rest
# runs beside them; with more the last cluster would begin when the first is done.
_FOURS, _SMS = 28, 132
# Of the time of whole sequences, by the model: what a split of the only sequence must stay below, and what one of several
# sequences may take. Those are rarely of equal lengths, and with unequal ones it gains much more than it may lose here.
_LEAST_GAIN, _MOST_LOSS = 0.9, 1.15
_TIE = 1.03  # a longer segment that takes little more needs less workspace
_FEW_CHUNKS = 32  # of a block: below, asking the L2 cache ahead costs more than it gains


def default_segment(problem: ChunkProblem, device: DeviceSpec) -> int:
    """Chunks of a segment; 0 = sequences are whole."""
    times = list(_split_times(problem, device))
    best = min((time for time, _ in times), default=float("inf"))
    whole, wide = _whole_time(problem, device), _wide_time(problem, device)
    if best >= (min(_LEAST_GAIN * whole, wide) if problem.num_sequences <= 1 else _MOST_LOSS * min(whole, wide)):
        return 0
    return max(length for time, length in times if time <= _TIE * best)


def is_wide(problem: ChunkProblem, device: DeviceSpec) -> bool:
    """Whether whole sequences are faster with four SMs for each sequence and head."""
    return _wide_time(problem, device) < _whole_time(problem, device)


def wide_places(device: DeviceSpec) -> tuple[int, int]:
    """Sequences and heads that run at once, with four SMs each: in clusters of four, and beside them in clusters of two."""
    fours = device.num_sms * _FOURS // _SMS
    return fours, device.num_sms // BLOCKS - fours


def default_places(problem: ChunkProblem, paired: bool, device: DeviceSpec) -> int:
    """Clusters that take item after item: as many as run side by side, 0 where no cluster would get a second item."""
    blocks = 2 if paired else 1
    places = min(device.num_sms // blocks, places_limit(paired))
    return places if _blocks(problem, max(problem.num_sequences, 1)) // blocks > places else 0


def default_prefetch(problem: ChunkProblem, segment: int, places: int) -> int:
    """Chunks ahead that the L2 cache is asked for: pays where a block has many of one item."""
    if places:
        return 0
    return 2 if (segment or _chunks(problem)) >= _FEW_CHUNKS else 0


def segments_to_try(problem: ChunkProblem, device: DeviceSpec) -> list[int]:
    """The default's length, and others that the model likes next best, each with another number of segments."""
    best = default_segment(problem, device)
    found = {_per_sequence(problem, best): best} if best else {}
    for time, length in sorted(_split_times(problem, device))[:12]:
        # Of several sequences the model knows too little to leave one out.
        if problem.num_sequences > 1 or time < 1.2 * _whole_time(problem, device):
            found.setdefault(_per_sequence(problem, length), length)
    return sorted(list(found.values())[:4])


def _whole_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    times = _TIMES[problem.head_k_dim]
    return (_chunks(problem) * times.chunk + times.wave) * _waves(problem, device, max(problem.num_sequences, 1))


def _wide_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    """Where all run at once. If they took turns, whole sequences with two SMs each, twice as many at once, would be faster: two
    waves of the one to one of the other, three to two."""
    groups = max(problem.num_sequences, 1) * problem.num_state_heads
    fours, ringed = wide_places(device)
    if problem.head_v_dim != DIM or groups > fours + ringed:
        return float("inf")
    return _chunks(problem) * (_WIDE_CHUNK if groups <= fours else _RINGED_CHUNK) + _WIDE_START


def _split_times(problem: ChunkProblem, device: DeviceSpec) -> Iterator[tuple[float, int]]:
    """(time, length) of every length that makes several segments; nothing where whole sequences leave no SM idle."""
    sequences, times = max(problem.num_sequences, 1), _TIMES[problem.head_k_dim]
    if _blocks(problem, sequences) >= device.num_sms:
        return
    for length in _LENGTHS:
        count = _per_sequence(problem, length)
        if count < 2:
            return
        first = _waves(problem, device, sequences * (count - 1))
        second = _waves(problem, device, sequences * count)
        time = first * (length * times.summary + times.wave) + second * (length * times.chunk + times.wave)
        # Each wave takes as long as its last segment, which is the further into its sequence the later the wave is.
        yield time + times.compose * (count - 2) * (second + 1) / 2, length


def _chunks(problem: ChunkProblem) -> int:
    """Of a sequence."""
    return -(-problem.num_tokens // (CHUNK * max(problem.num_sequences, 1)))


def _per_sequence(problem: ChunkProblem, length: int) -> int:
    return -(-_chunks(problem) // length)


def _blocks(problem: ChunkProblem, count: int) -> int:
    return count * problem.num_state_heads * (problem.head_v_dim // 64)


def _waves(problem: ChunkProblem, device: DeviceSpec, count: int) -> int:
    return max(-(-_blocks(problem, count) // device.num_sms), 1)
