"""Model of the launches' times, which chooses the default configuration: microseconds on an H100, 128 key columns.

LAB-NOTES.md has the measurements that the constants were fitted to. All sequences count as equally long.
"""

import math
from collections.abc import Iterator

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import ChunkProblem
from kernels_tl.chunk.constants import CHUNK
from kernels_tl.chunk.sizes import CHAINS

_CHAIN_US = 1.05  # a chunk of the chain, while few SMs work
_FULL_CHAIN_US = 1.65  # the same with all SMs at work, bound by the L2 cache
_ONE_LAUNCH_US = {2: 1.75, 3: 1.42, 4: 1.22}  # a chunk of the one launch by blocks per cluster, however many SMs work
_SMS_OF_GROUP = 16  # of the groups of SMs (GPCs) that hold whole clusters; some have two less
_PREPARE_US = 2.9  # a chunk of `chunk_prepare` per SM: four blocks of 12 us at a time
_LEAST_PREPARE_US = 5.0  # its beginning and end
_SUMMARY_US = 1.22  # a chunk of a summary, both halves of a head on one SM
_START_US = 2.4  # a segment of the starts
_ROUND_US = 7.0  # a launch's round of blocks, one per SM: beginning, first copies, end
_MOST_SEGMENTS = 64
_LEAST_GAIN = 0.85  # of the time of whole sequences: with less gain the model is not trusted
_MOST_TRIED = 6  # lengths of segments that the tuner tries


def has_one_launch(problem: ChunkProblem) -> bool:
    """Whether whole sequences are computed in one launch."""
    return problem.head_k_dim == 128


def fastest_split(problem: ChunkProblem, device: DeviceSpec) -> int:
    """Chunks per segment; 0 unless segments win clearly."""
    time, split_chunks = min(_split_times(problem, device), default=(math.inf, 0))
    if time >= _LEAST_GAIN * _whole_chain_time(problem, device):
        return 0
    if has_one_launch(problem):
        one_launch_time, _ = min(_one_launch_times(problem, device))
        if _prepare_time(problem, device) + time >= _LEAST_GAIN * one_launch_time:
            return 0
    return split_chunks


def fastest_cluster(problem: ChunkProblem, device: DeviceSpec) -> int:
    """Blocks per cluster of the one launch."""
    _, cluster_size = min(_one_launch_times(problem, device))
    return cluster_size


def splits_by_longest(problem: ChunkProblem, device: DeviceSpec, cluster_size: int) -> list[tuple[int, int]]:
    """(chunks per segment, tokens of the longest sequence from which segments win), best first, for several sequences.

    Whole sequences take as long as the longest one. Segments take about as long however the tokens are distributed, but for the
    starts, which are serial in the longest sequence. The tokens are those for which both take equally long.
    """
    if problem.num_sequences <= 1:
        return []
    chunks, _ = _chunks_and_heads(problem)
    found = []
    for time, split_chunks in sorted(_split_times(problem, device)):
        others = _prepare_time(problem, device) + time - (-(-chunks // split_chunks) - 2) * _START_US
        gain = _ONE_LAUNCH_US[cluster_size] - _START_US / split_chunks  # of a chunk
        if gain > 0:
            found.append((split_chunks, max(int((others - 2 * _START_US - _ROUND_US) / gain), 1) * CHUNK))
    return [(split_chunks, longest) for split_chunks, longest in found if longest < problem.num_tokens][:_MOST_TRIED]


def splits_to_try(problem: ChunkProblem, device: DeviceSpec) -> list[int]:
    """Chunks per segment that the model likes best, the default among them; none where it sees no use."""
    # Several sequences are rarely equally long: the model is too inaccurate then to leave lengths out.
    limit = math.inf if problem.num_sequences > 1 else 1.2 * _whole_chain_time(problem, device)
    return [split_chunks for time, split_chunks in sorted(_split_times(problem, device)) if time < limit][:_MOST_TRIED]


def _one_launch_times(problem: ChunkProblem, device: DeviceSpec) -> Iterator[tuple[float, int]]:
    """(time, blocks per cluster) of the one launch."""
    chunks, heads = _chunks_and_heads(problem)
    for cluster_size, chunk_us in _ONE_LAUNCH_US.items():
        # Clusters of two fill every group of SMs. Larger ones count if they surely run at once: a second round takes twice
        # the time.
        clusters = device.num_sms // _SMS_OF_GROUP * ((_SMS_OF_GROUP - 2) // cluster_size)
        if cluster_size == CHAINS:
            clusters = device.num_sms // CHAINS
        yield -(-heads // max(clusters, 1)) * (chunks * chunk_us + _ROUND_US), cluster_size


def _prepare_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    chunks, heads = _chunks_and_heads(problem)
    return _LEAST_PREPARE_US + chunks * heads * _PREPARE_US / device.num_sms


def _whole_chain_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    chunks, heads = _chunks_and_heads(problem)
    return _chain_time(problem, device, heads, chunks)


def _split_times(problem: ChunkProblem, device: DeviceSpec) -> Iterator[tuple[float, int]]:
    """(time, chunks per segment) of the launches after `chunk_prepare`; nothing where the chain leaves no SM idle."""
    chunks, heads = _chunks_and_heads(problem)
    if heads * (problem.head_v_dim // 64) >= device.num_sms:
        return
    for split_chunks in dict.fromkeys(-(-chunks // count) for count in range(2, _MOST_SEGMENTS + 1)):
        count = -(-chunks // split_chunks)
        if count < 2:
            return
        rounds = -(-heads * (2 * count - 3) // device.num_sms)
        time = _chain_time(problem, device, heads * count, split_chunks) + rounds * (split_chunks * _SUMMARY_US + _ROUND_US)
        yield time + (count - 2) * _START_US + _ROUND_US, split_chunks


def _chunks_and_heads(problem: ChunkProblem) -> tuple[int, int]:
    """Chunks per sequence (one at least), and heads of all sequences."""
    sequences = max(problem.num_sequences, 1)
    return max(-(-problem.num_tokens // (CHUNK * sequences)), 1), sequences * problem.num_state_heads


def _chain_time(problem: ChunkProblem, device: DeviceSpec, heads: int, chunks: int) -> float:
    blocks = heads * (problem.head_v_dim // 64)
    chunk_us = max(_CHAIN_US, _FULL_CHAIN_US * min(blocks / device.num_sms, 1.0))
    return -(-blocks // device.num_sms) * (chunks * chunk_us + _ROUND_US)
