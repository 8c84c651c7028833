"""How long the segments of a split call should be, and whether four SMs take a head: a model of a call's time from sizes alone.

The lengths of the sequences stand on the device and nobody reads them: the model takes them to be equal. For segments, of which
there are about as many however the tokens are dealt out, that is near enough. Whole sequences take as long as the longest one, so
where there are several, the model says how long that may be, and the device compares.
"""

from collections.abc import Iterator
from typing import NamedTuple

from gdn.device import DeviceSpec
from gdn.problems import ChunkProblem
from kernels_cute.chunk.four_sm.shape import BLOCKS, DIM
from kernels_cute.chunk.scheduler import max_scheduled_clusters
from kernels_cute.chunk.shape import CHUNK

# Lengths in chunks that are considered: few enough that a process sees few configurations.
_LENGTHS = (*range(8, 64, 4), *range(64, 256, 16), *range(256, 1025, 64))


class _Times(NamedTuple):
    """Microseconds on an H100, with a block an SM."""

    chunk: float  # of the fused kernel
    summary: float  # the same chunk in the first launch of a split call
    compose: float  # of a segment before the block's own, once a sequence
    wave: float  # of blocks, in either launch: start, first chunk, end


# D = 128: fitted to measured calls, LAB-NOTES.md has them. D = 64, where a block prepares every chunk alone in either launch:
# estimated.
_TIMES = {128: _Times(1.3, 1.6, 1.85, 8.0), 64: _Times(2.4, 2.4, 0.8, 8.0)}
# The four-SM form, with four SMs for a sequence and head: a chunk where all tiles stay in clusters of four, or where some go
# through the L2 cache; start and end. Measured, see LAB-NOTES.md.
_FOUR_SM_CHUNK, _RING_CHUNK, _FOUR_SM_START = 0.87, 0.97, 12.0
# Clusters of four that run at once on _SMS multiprocessors. It depends on how these are spread over GPCs: an H100 measured here
# has room for 30 (cudaOccupancyMaxActiveClusters), others may for fewer. Fewer than there is room for costs nothing, for the rest
# runs beside them; with more the last cluster would begin when the first is done.
_FOURS, _SMS = 28, 132
_LEAST_GAIN = 0.9  # of the time of a whole sequence with two SMs a head, by the model: what a split of it must stay below
_TIE = 1.03  # a longer segment that takes little more needs less workspace
_FEW_CHUNKS = 32  # of a block: below, asking the L2 cache ahead costs more than it gains


def default_split(problem: ChunkProblem, device: DeviceSpec) -> tuple[int, int]:
    """Chunks of a segment, 0 = sequences are whole; tokens that the longest of several sequences must pass for them to be cut."""
    times = {length: time for time, length in _split_times(problem, device)}
    if not times:
        return 0, 0
    best = min(times.values())
    segment = max(length for length, time in times.items() if time <= _TIE * best)
    if problem.num_sequences <= 1:
        gains = best < min(_LEAST_GAIN * _whole_time(problem, device), _four_sm_time(problem, device))
        return (segment, 0) if gains else (0, 0)
    longest = _longest_whole(problem, times[segment], device)
    if longest >= problem.num_tokens:
        return 0, 0
    # Even equal lengths may be more: then there is nothing to decide.
    return segment, longest if longest * problem.num_sequences >= problem.num_tokens else 0


def splits_to_try(problem: ChunkProblem, device: DeviceSpec) -> list[tuple[int, int]]:
    """The default, and others of its kind that the model likes next best, each with another number of segments."""
    best, decides = default_split(problem, device)
    times = {length: time for time, length in sorted(_split_times(problem, device))}
    found = {_per_sequence(problem, best): best} if best else {}
    for length, time in list(times.items())[:12]:
        # Of several sequences the model knows too little to leave one out.
        if problem.num_sequences > 1 or time < 1.2 * _whole_time(problem, device):
            found.setdefault(_per_sequence(problem, length), length)
    lengths = sorted(list(found.values())[:4])
    if not decides:
        return [(length, 0) for length in lengths]
    splits = [(length, _longest_whole(problem, times[length], device)) for length in lengths]
    return [(length, longest) for length, longest in splits if longest < problem.num_tokens]


def uses_four_sm(problem: ChunkProblem, device: DeviceSpec) -> bool:
    """Whether whole sequences are faster with four SMs for each sequence and head."""
    return _four_sm_time(problem, device) < _whole_time(problem, device)


def four_sm_clusters(device: DeviceSpec) -> tuple[int, int]:
    """Sequences and heads that run at once, with four SMs each: in clusters of four, and beside them in clusters of two."""
    fours = device.num_sms * _FOURS // _SMS
    return fours, device.num_sms // BLOCKS - fours


def default_clusters(problem: ChunkProblem, device: DeviceSpec) -> int:
    """Clusters that take item after item: as many as run side by side, 0 where no cluster would get a second item."""
    blocks = problem.head_v_dim // 64
    places = min(device.num_sms // blocks, max_scheduled_clusters(blocks == 2))
    return places if _blocks(problem, max(problem.num_sequences, 1)) // blocks > places else 0


def default_prefetch(problem: ChunkProblem, segment: int, places: int) -> int:
    """Chunks ahead that the L2 cache is asked for: pays where a block has many of one item."""
    if places:
        return 0
    return 2 if (segment or _chunks(problem)) >= _FEW_CHUNKS else 0


def _longest_whole(problem: ChunkProblem, time: float, device: DeviceSpec) -> int:
    """Tokens of the longest sequence with which whole sequences take so long."""
    chunk, start = _TIMES[problem.head_k_dim].chunk, _TIMES[problem.head_k_dim].wave
    if uses_four_sm(problem, device):
        chunk, start = _four_sm_chunk(problem, device), _FOUR_SM_START
    return max(int((time - start) / chunk), 1) * CHUNK


def _whole_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    times = _TIMES[problem.head_k_dim]
    return (_chunks(problem) * times.chunk + times.wave) * _waves(problem, device, max(problem.num_sequences, 1))


def _four_sm_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    """Where all run at once. If they took turns, whole sequences with two SMs each, twice as many at once, would be faster: two
    waves of the one to one of the other, three to two."""
    if problem.head_v_dim != DIM or _groups(problem) > sum(four_sm_clusters(device)):
        return float("inf")
    return _chunks(problem) * _four_sm_chunk(problem, device) + _FOUR_SM_START


def _four_sm_chunk(problem: ChunkProblem, device: DeviceSpec) -> float:
    return _FOUR_SM_CHUNK if _groups(problem) <= four_sm_clusters(device)[0] else _RING_CHUNK


def _groups(problem: ChunkProblem) -> int:
    """Sequences and heads."""
    return max(problem.num_sequences, 1) * problem.num_state_heads


def _split_times(problem: ChunkProblem, device: DeviceSpec) -> Iterator[tuple[float, int]]:
    """(time, length) of every length that makes several segments; nothing where whole sequences leave no SM idle."""
    sequences, times = max(problem.num_sequences, 1), _TIMES[problem.head_k_dim]
    if _blocks(problem, sequences) >= device.num_sms:
        return
    for length in _LENGTHS:
        count = _per_sequence(problem, length)
        if count < 2:
            return
        if sequences == 1:
            first, second = float(_waves(problem, device, count - 1)), float(_waves(problem, device, count))
        else:
            # Half of a sequence's last segment is missing, of most; the next wave begins where one ends early.
            segments = -(-problem.num_tokens // (CHUNK * length)) + sequences // 2
            first = max(_blocks(problem, segments - sequences) / device.num_sms, 1.0)
            second = max(_blocks(problem, segments) / device.num_sms, 1.0)
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
