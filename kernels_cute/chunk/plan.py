"""Length of the segments of a split call, and how many SMs take how many heads: a model of a call's time from sizes alone.

The lengths of the sequences are on the device and nobody reads them: the model takes them to be equal. For segments, of which
there are about as many however the tokens are dealt out, that is near enough. Whole sequences take as long as the longest one, so
where there are several, the model says how long that may be, and the device compares. Where the host knows that one is much
longer than the others (`ChunkProblem.longest`), and cutting it is faster, it is cut (`known_segment`). Where it knows that none
is, a work tile may be of two state heads (`Model.shares_keys`). Else that changes nothing, so that few calls take kernels of
their own.
"""

from collections.abc import Iterator
from typing import NamedTuple

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import ChunkProblem, tells
from kernels_cute.chunk.deal import max_scheduled_clusters
from kernels_cute.chunk.four_sm.shape import BLOCKS, DIM
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
# runs next to them; with more the last cluster would begin when the first is done.
_FOURS, _SMS = 28, 132
_LEAST_GAIN = 0.9  # of the time of a whole sequence with two SMs a head, by the model: what a split of it must stay below
_TIE = 1.03  # a longer segment that takes little more needs less workspace
_FEW_CHUNKS = 32  # of a block: below, asking the L2 cache ahead costs more than it gains
# Where two state heads a work tile are faster, measured (LAB-NOTES.md): least state heads a key head, most chunks a sequence.
_LEAST_SHARERS, _MOST_SHARED_CHUNKS = 4, 4
# With the memory of an H200 they are faster in long sequences too. A work tile of two heads takes as long as 1.88 of one head,
# both at the power limit. They are half as many, so the last ones end alone: unless lengths are equal, a cluster must have at
# least twice the work of the longest one.
_FAST_COPY_GBPS, _TWO_HEADS, _LEAST_LONGEST_LOADS = 4000.0, 1.88, 2


def four_sm_clusters(device: DeviceSpec) -> tuple[int, int]:
    """Sequences and heads that run at once, with four SMs each: in clusters of four, and next to them in clusters of two."""
    fours = device.num_sms * _FOURS // _SMS
    return fours, device.num_sms // BLOCKS - fours


def is_uneven(problem: ChunkProblem) -> bool:
    """Whether the host knows one sequence to be much longer than the others."""
    return problem.num_sequences > 1 and tells(problem.longest, problem.num_sequences, problem.num_tokens)


def known_segment(problem: ChunkProblem, device: DeviceSpec) -> int:
    """Chunks of a segment where the host knows of a long sequence whose cut is faster than whole sequences; else 0."""
    if not is_uneven(problem):
        return 0
    model = Model(problem, device, problem.longest)
    times = {length: time for time, length in model.split_times()}
    is_faster = bool(times) and min(times.values()) < _LEAST_GAIN * model.uneven_time()
    return min(times, key=times.__getitem__) if is_faster else 0


class Model:
    """The times of a call in its forms, in microseconds. longest: tokens of the longest sequence; 0 = lengths are equal."""

    def __init__(self, problem: ChunkProblem, device: DeviceSpec, longest: int = 0) -> None:
        self.num_tokens, self.num_sms = problem.num_tokens, device.num_sms
        self.has_fast_memory = device.copy_gbps >= _FAST_COPY_GBPS
        self.is_one_sequence, self.longest = problem.num_sequences <= 1, longest
        self.sequences = max(problem.num_sequences, 1)
        self.slices = problem.head_v_dim // 64
        self.blocks = problem.num_state_heads * self.slices  # of a sequence or segment
        self.sharers = problem.num_state_heads // max(problem.num_q_heads, problem.num_k_heads)  # state heads of a key head
        self.chunks = -(-problem.num_tokens // (CHUNK * self.sequences))  # of a sequence
        self.times = _TIMES[problem.head_k_dim]
        self.whole_time = (self.chunks * self.times.chunk + self.times.wave) * self._waves(self.sequences)
        # Four SMs a sequence and head, where all run at once. If they took turns, whole sequences with two SMs each, twice as
        # many at once, would be faster: two waves of the one to one of the other, three to two.
        groups, clusters = self.sequences * problem.num_state_heads, four_sm_clusters(device)
        self.four_sm_chunk = _FOUR_SM_CHUNK if groups <= clusters[0] else _RING_CHUNK
        self.four_sm_fits = problem.head_v_dim == DIM and groups <= sum(clusters)  # all of them at once
        self.four_sm_time = self.chunks * self.four_sm_chunk + _FOUR_SM_START if self.four_sm_fits else float("inf")
        self.uses_four_sm = self.four_sm_time < self.whole_time  # for whole sequences

    def split(self) -> tuple[int, int]:
        """Chunks of a segment, 0 = sequences are whole; tokens that the longest of several sequences must pass for them to be
        cut."""
        segment, time = self.best_segment()
        if not segment:
            return 0, 0
        if self.is_one_sequence:
            best = min(time for time, _ in self.split_times())
            return (segment, 0) if best < min(_LEAST_GAIN * self.whole_time, self.four_sm_time) else (0, 0)
        longest = self._longest_whole(time)
        if longest >= self.num_tokens:
            return 0, 0
        # Even equal lengths may be more: then there is nothing to decide.
        return segment, longest if longest * self.sequences >= self.num_tokens else 0

    def best_segment(self) -> tuple[int, float]:
        """Chunks of the longest segment that is about the fastest, and the time with it; 0 where there are no segments."""
        times = {length: time for time, length in self.split_times()}
        segment = max((length for length, time in times.items() if time <= _TIE * min(times.values())), default=0)
        return segment, times.get(segment, 0.0)

    def splits_to_try(self) -> list[tuple[int, int]]:
        """The default, and others of its kind that the model likes next best, each with another number of segments."""
        best, decides = self.split()
        times = {length: time for time, length in sorted(self.split_times())}
        found = {-(-self.chunks // best): best} if best else {}
        for length, time in list(times.items())[:12]:
            # The model knows too little of several sequences to leave one out.
            if not self.is_one_sequence or time < 1.2 * self.whole_time:
                found.setdefault(-(-self.chunks // length), length)
        lengths = sorted(list(found.values())[:4])
        if not decides:
            return [(length, 0) for length in lengths]
        splits = [(length, self._longest_whole(times[length])) for length in lengths]
        return [(length, longest) for length, longest in splits if longest < self.num_tokens]

    def clusters(self) -> int:
        """Clusters that take one work tile after the other: as many as run side by side, 0 where none would get a second one."""
        side_by_side = min(self.num_sms // self.slices, max_scheduled_clusters(self.slices == 2))
        return side_by_side if self.sequences * self.blocks // self.slices > side_by_side else 0

    def shares_keys(self, longest: int) -> bool:
        """Whether a work tile is of two state heads that share K and Q, where all SMs are busy. longest: tokens of the longest
        sequence as the host knows them; 0 = it does not."""
        if not (clusters := self.clusters()) or self.sharers < 2:
            return False
        if self.sharers >= _LEAST_SHARERS and self.chunks <= _MOST_SHARED_CHUNKS:
            return True
        if not (self.has_fast_memory and 0 < longest <= self.num_tokens):
            return False
        work_tiles, all_as_long = self.sequences * self.blocks // self.slices, longest * self.sequences
        # Of one head, and of two: turns that the clusters take. Equal lengths take whole ones, others are dealt out evenly.
        of_one, of_two = -(-work_tiles // clusters), -(-work_tiles // (2 * clusters))
        is_even = work_tiles * self.num_tokens >= 2 * _LEAST_LONGEST_LOADS * all_as_long * clusters
        return is_even or _TWO_HEADS * of_two * all_as_long < of_one * self.num_tokens

    def prefetch(self, segment: int, clusters: int) -> int:
        """Return how many chunks ahead are prefetched into the L2 cache. It pays where a block has many chunks of one work
        tile."""
        return 2 if not clusters and (segment or self.chunks) >= _FEW_CHUNKS else 0

    def _longest_whole(self, time: float) -> int:
        """Tokens of the longest sequence with which whole sequences take so long."""
        chunk, start = (self.four_sm_chunk, _FOUR_SM_START) if self.uses_four_sm else (self.times.chunk, self.times.wave)
        return max(int((time - start) / chunk), 1) * CHUNK

    def split_times(self) -> Iterator[tuple[float, int]]:
        """(time, length) of every length that makes several segments; nothing where whole sequences leave no SM idle."""
        sequences, times = self.sequences, self.times
        if sequences * self.blocks >= self.num_sms and not self.longest:
            return
        chunks = -(-self.longest // CHUNK) if self.longest else self.chunks
        for length in _LENGTHS:
            count = -(-chunks // length)  # segments of a sequence, the longest if it is known
            if count < 2:
                return
            if sequences == 1:
                first, second = float(self._waves(count - 1)), float(self._waves(count))
            else:
                # Half of a sequence's last segment is missing, of most; the next wave begins where one ends early.
                segments = -(-self.num_tokens // (CHUNK * length)) + sequences // 2
                first, second = (max(one * self.blocks / self.num_sms, 1.0) for one in (segments - sequences, segments))
            time = first * (length * times.summary + times.wave) + second * (length * times.chunk + times.wave)
            # Each wave takes as long as its last segment, which is the further into its sequence the later the wave is.
            yield time + times.compose * (count - 2) * (second + 1) / 2, length

    def uneven_time(self) -> float:
        """Of whole sequences whose longest is known: as long as that one, or as all of them take that have their turns."""
        chunks, total = -(-self.longest // CHUNK), self.num_tokens / CHUNK + self.sequences / 2
        turns = total * self.blocks / self.num_sms * self.times.chunk
        whole = max(chunks * self.times.chunk, turns) + self.times.wave
        return min(whole, chunks * self.four_sm_chunk + _FOUR_SM_START) if self.four_sm_fits else whole

    def _waves(self, count: int) -> int:
        """Waves of the blocks of `count` sequences or segments."""
        return max(-(-count * self.blocks // self.num_sms), 1)
