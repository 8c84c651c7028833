"""How long the segments of a split call should be: a model of its time from sizes alone.

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
# Of the time of whole sequences, by the model: what a split of the only sequence must stay below, and what one of several
# sequences may take. Those are rarely of equal lengths, and with unequal ones it gains much more than it may lose here.
_LEAST_GAIN, _MOST_LOSS = 0.9, 1.15
_TIE = 1.03  # a longer segment that takes little more needs less workspace
_FEW_CHUNKS = 32  # of a block: below, asking the L2 cache ahead costs more than it gains


def default_segment(problem: ChunkProblem, device: DeviceSpec) -> int:
    """Chunks of a segment; 0 = sequences are whole."""
    times = list(_split_times(problem, device))
    best = min((time for time, _ in times), default=float("inf"))
    limit = _LEAST_GAIN if problem.num_sequences <= 1 else _MOST_LOSS
    if best >= limit * _whole_time(problem, device):
        return 0
    return max(length for time, length in times if time <= _TIE * best)


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
