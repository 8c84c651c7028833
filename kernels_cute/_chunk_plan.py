"""How long the segments of a split call should be: a model of its time from sizes alone.

The lengths of the sequences stand on the device and nobody reads them: the model takes them to be equal. That is the case in
which a split gains least, for whole sequences take as long as the longest one, and segments are about as many however the
tokens are dealt out.
"""

from collections.abc import Iterator
from typing import NamedTuple

from gdn.device import DeviceSpec
from gdn.problems import ChunkProblem
from kernels_cute._chunk_shape import CHUNK

# Lengths in chunks that are considered: few enough that a process sees few configurations.
_LENGTHS = (*range(8, 64, 4), *range(64, 256, 16), *range(256, 1025, 64))


class _Times(NamedTuple):
    """Microseconds on an H100, with a block an SM."""

    chunk: float  # of the fused kernel
    summary: float  # the same chunk in the first launch of a split call
    compose: float  # of a segment before the block's own, once a sequence
    split: float  # of a second launch and of the states between


# D = 64: a block prepares every chunk alone, in either launch. Estimated.
_TIMES = {128: _Times(1.67, 1.25, 1.2, 6.0), 64: _Times(2.4, 2.4, 0.8, 6.0)}
_LEAST_GAIN = 0.9  # of the time of whole sequences: else the model is not trusted
_TIE = 1.03  # a longer segment that takes little more needs less workspace


def default_segment(problem: ChunkProblem, device: DeviceSpec) -> int:
    """Chunks of a segment; 0 = sequences are whole."""
    times = list(_split_times(problem, device))
    best = min((time for time, _ in times), default=float("inf"))
    if best >= _LEAST_GAIN * _whole_time(problem, device):
        return 0
    return max(length for time, length in times if time <= _TIE * best)


def segments_to_try(problem: ChunkProblem, device: DeviceSpec) -> list[int]:
    """The default's length, and others that the model thinks little worse, each with another number of segments."""
    best = default_segment(problem, device)
    found = {_per_sequence(problem, best): best} if best else {}
    for time, length in sorted(_split_times(problem, device))[:12]:
        if time < 1.2 * _whole_time(problem, device):
            found.setdefault(_per_sequence(problem, length), length)
    return sorted(list(found.values())[:4])


def _whole_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    return _TIMES[problem.head_k_dim].chunk * _chunks(problem) * _waves(problem, device, max(problem.num_sequences, 1))


def _split_times(problem: ChunkProblem, device: DeviceSpec) -> Iterator[tuple[float, int]]:
    """(time, length) of every length that makes several segments; nothing where whole sequences leave no SM idle."""
    sequences, times = max(problem.num_sequences, 1), _TIMES[problem.head_k_dim]
    if _blocks(problem, sequences) >= device.num_sms:
        return
    for length in _LENGTHS:
        count = _per_sequence(problem, length)
        if count < 2:
            return
        time = length * times.summary * _waves(problem, device, sequences * (count - 1))
        time += length * times.chunk * _waves(problem, device, sequences * count)
        yield time + times.compose * (count - 2) + times.split, length


def _chunks(problem: ChunkProblem) -> int:
    """Of a sequence."""
    return -(-problem.num_tokens // (CHUNK * max(problem.num_sequences, 1)))


def _per_sequence(problem: ChunkProblem, length: int) -> int:
    return -(-_chunks(problem) // length)


def _blocks(problem: ChunkProblem, count: int) -> int:
    return count * problem.num_state_heads * (problem.head_v_dim // 64)


def _waves(problem: ChunkProblem, device: DeviceSpec, count: int) -> int:
    return max(-(-_blocks(problem, count) // device.num_sms), 1)
