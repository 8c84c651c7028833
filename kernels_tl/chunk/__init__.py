"""Gated delta rule by chunks of 64 tokens: prefill.

Per sequence and state head, with S [K, V] float32, c the inclusive cumulative sum of g inside a chunk and
G_ij = exp(c_i - c_j) for i >= j, else 0:

    A = (I + strict_lower(diag(beta) K K^T))^-1          M = A * G * beta_column
    W = V - exp(c) * (K S)
    O = scale * exp(c) * (Q S) + R W                     R = scale * (G * (Q K^T)) M
    S = exp(c_last) S + Z^T W                            Z = (exp(c_last - c) * M)^T K

L2 norms of q and k are row scales and enter as factors; raw gates are evaluated inside. `gdn.problems.ChunkProblem` is the
contract: q [1, L, Hq, K], k [1, L, Hk, K], v [1, L, HV, V], out [1, L, HS, V] bfloat16 | float16; g, beta [1, L, HS];
states [slots, HS, K, V] or [slots, HS, V, K] float32 | bfloat16.

Two launches. `chunk_prepare` (_chunk_prepare.py), a block per chunk and head, computes what depends on no state, Z, R and the
row factors, into the workspace. `chunk_chain` (_chunk_chain.py), a block per sequence, head and
slice of V columns, runs the chain of chunks with S^T in registers; its table of barriers is there. Which chunk a block works
on comes from cu_seqlens on the device: the grids are sized by shapes alone.

At D = 128 there is a form in one launch (`fused`, _chunk_fused.py): a cluster of two to four blocks per sequence and head makes
its tiles itself and hands them on through shared memory. Nothing but tokens and states passes through global memory.

Few sequences x heads leave SMs idle in the chain. Then sequences are cut into segments, and two launches in between
(_chunk_segments.py) find the state that each segment starts from: `chunk_summaries` what every segment makes of a state,
`chunk_starts` the states themselves. The chain has a block per segment. With `cut_above` the one launch and those with segments
are both made, and the lengths decide on the device which of them work (`turn` in _chunk_types.py).

Workspace: tiles [slots, HS, 1 + K / 64, 64, 64] of the tokens' dtype (R, then Z's columns by 64), vectors
[slots, HS, 3, 64] float32, and with segments: starts [segment slots, HS, V, K] float32 and transitions
[segment slots, HS, 2, K, K] bfloat16.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gdn.device import DeviceSpec
from gdn.problems import DTYPE_BYTES, ChunkParams, ChunkProblem, unserved_dtypes
from kernels_tl.chunk.chain import BLOCK_REGISTERS, STAGES, chain
from kernels_tl.chunk.fused import FUSED_BYTES, FUSED_REGISTERS, fused
from kernels_tl.chunk.makers import CHAINS, MOST_MAKERS
from kernels_tl.chunk.prepare import prepare
from kernels_tl.chunk.segments import starts, summaries
from kernels_tl.chunk.state_chain import PANEL
from kernels_tl.chunk.types import CHUNK, NUM_VECTORS, TRANSITION_DTYPE, num_slots, num_tiles
from kernels_tl.common import build

_HEAD_DIMS = (64, 128)
_OTHER_BYTES = 2048  # static shared memory of the barriers and the block's sequence, each rounded up


# An entry of a tuned table serves calls of nearly its sizes (see gdn.runtime.tuned): for others another design may be faster, and
# the default knows which.
TUNED_WITHIN = 0.25


@dataclass(frozen=True)
class Config:
    # Chunks per segment of a sequence; 0: sequences are whole. Shorter segments use more SMs; each one costs two more chains and
    # one more serial step. A launch scalar: only whether there are segments is compiled in.
    segment: int = field(default=0, metadata={"compiled": bool})
    # Blocks per cluster of the one-launch form (D = 128, whole sequences): two run the chain, all make tiles.
    cluster: int = CHAINS
    # Tokens. With segments: sequences are cut only if the longest one of the call has more tokens, else the one launch takes them
    # whole; 0: always cut. The lengths are on the device, so both ways are launched. A launch scalar.
    cut_above: int = field(default=0, metadata={"compiled": bool})


def refusal(problem: ChunkProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if k != v or k not in _HEAD_DIMS:
        return f"requires K = V of 64 or 128, got K={k}, V={v}"
    if (reason := unserved_dtypes(problem)) is not None:
        return reason
    for heads in (problem.num_q_heads, problem.num_k_heads, problem.num_v_heads):
        if heads < 1 or problem.num_state_heads % heads:
            return f"requires head counts that divide {problem.num_state_heads} state heads, got {heads}"
    return None


def fits(problem: ChunkProblem, config: Config, device: DeviceSpec) -> bool:
    if config.cut_above:
        whole, cut = (replace(way, cut_above=0) for way in _ways(config))
        ways_fit = fits(problem, whole, device) and _in_one_launch(problem, whole) and fits(problem, cut, device)
        return config.cut_above > 0 and config.segment > 0 and ways_fit
    one_launch = _in_one_launch(problem, config)
    if not 0 <= config.segment <= _LONGEST_SEGMENT or not CHAINS <= config.cluster <= (MOST_MAKERS if one_launch else CHAINS):
        return False
    if one_launch:
        return device.shared_bytes_per_block >= FUSED_BYTES and device.registers_per_sm >= FUSED_REGISTERS
    return device.shared_bytes_per_block >= _shared_bytes(problem) and device.registers_per_sm >= BLOCK_REGISTERS


def default_config(problem: ChunkProblem, device: DeviceSpec) -> Config:
    """The fastest form by the cost model: segments, else one launch (D = 128) or two (D = 64) with whole sequences."""
    segment = _fastest_segment(problem, device)
    if segment or not _in_one_launch(problem, Config()):
        return Config(segment=segment)
    _, cluster = min(_one_launch_times(problem, device))
    splits = _deciding_splits(problem, device, cluster)
    segment, cut_above = splits[0] if splits else (0, 0)
    return Config(segment=segment, cluster=cluster, cut_above=cut_above)


def configs(problem: ChunkProblem, device: DeviceSpec) -> list[Config]:
    default = default_config(problem, device)
    if default.cut_above:  # both forms are in it, and no table should decide for lengths that only a call knows
        splits = _deciding_splits(problem, device, default.cluster)
        return [replace(default, segment=segment, cut_above=cut_above) for segment, cut_above in splits]
    space = [Config(cluster=cluster) for cluster in range(CHAINS, MOST_MAKERS + 1)]
    space += [Config(segment=segment) for segment in _segments_to_try(problem, device)]
    return [config for config in space if fits(problem, config, device)]


def _ways(config: Config) -> tuple[Config, ...]:
    """What is launched, one after the other: the one launch and segments, each of which may find that it is the other's turn; or
    the configuration itself."""
    return _both_ways(config) if config.cut_above else (config,)


@functools.lru_cache(maxsize=256)  # every launch asks
def _both_ways(config: Config) -> tuple[Config, Config]:
    return replace(config, segment=0), replace(config, cluster=CHAINS)


def compile(problem: ChunkProblem, config: Config) -> dict[str, bytes]:
    functions: dict[str, Any] = {}
    for way in _ways(config):
        functions |= _kernels(problem, way)
    return {name: build.library(function, pass_configs=_OWN_BARRIERS) for name, function in functions.items()}


def _kernels(problem: ChunkProblem, config: Config) -> dict[str, Any]:
    """Of one way."""
    decides = config.cut_above > 0
    if _in_one_launch(problem, config):
        return {"chunk_fused": fused(problem, config.cluster, decides)}
    split = config.segment > 0
    functions = {
        "chunk_prepare": prepare(problem, decides),
        "chunk_chain": chain(problem, split, decides),
    }
    if split:
        functions |= {"chunk_summaries": summaries(problem, decides), "chunk_starts": starts(problem, decides)}
    return functions


def workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    config = _ways(config)[-1]  # the one launch needs none
    if _in_one_launch(problem, config):
        return 0
    heads, tokens, sequences = problem.num_state_heads, problem.num_tokens, problem.num_sequences
    size = num_slots(tokens, sequences) * heads * (_tile_bytes(problem) + _VECTOR_BYTES)
    if config.segment:
        size += num_slots(tokens, sequences, config.segment) * heads * (_start_bytes(problem) + _transition_bytes(problem))
    return size


def launch(compiled: Any, params: ChunkParams) -> None:
    problem = compiled.problem
    p, cu_seqlens = params, params.cu_seqlens
    num_tokens, num_sequences = p.q.shape[1], cu_seqlens.shape[0] - 1
    q, k, v, out = p.q[0], p.k[0], p.v[0], p.out[0]
    # cu_seqlens stands in for absent tensors, which the compiled code does not read.
    g, beta = (cu_seqlens if x is None else x[0] for x in (p.g, p.beta))
    A_log, dt_bias = (x if problem.use_gate and p.g is not None else cu_seqlens for x in (p.A_log, p.dt_bias))
    optional = (p.initial_state, p.state_indices, p.has_initial_state, p.final_state, p.final_state_indices)
    optional += (p.checkpoint_offsets, p.checkpoint_slots)
    present = [cu_seqlens if x is None else x for x in optional]
    initial_state, state_indices, has_initial_state, final_state, final_state_indices = present[:5]
    checkpoint_offsets, checkpoint_slots = present[5:]
    workspace, scale, null_slot = p.workspace, p.scale, p.null_slot
    for config in _ways(compiled.config):
        if _in_one_launch(problem, config):
            compiled.functions["chunk_fused"](
                q,
                k,
                v,
                g,
                beta,
                A_log,
                dt_bias,
                initial_state,
                state_indices,
                has_initial_state,
                final_state,
                final_state_indices,
                cu_seqlens,
                out,
                checkpoint_offsets,
                checkpoint_slots,
                scale,
                null_slot,
                config.cut_above,
            )
            continue
        assert workspace is not None  # its bytes are not 0
        heads, segment = problem.num_state_heads, config.segment
        slots = num_slots(num_tokens, num_sequences)
        end_of_tiles = slots * heads * _tile_bytes(problem)
        end = end_of_tiles + slots * heads * _VECTOR_BYTES
        tiles = workspace[:end_of_tiles].view(q.dtype).view(slots, heads, num_tiles(problem), CHUNK, CHUNK)
        vectors = workspace[end_of_tiles:end].view(torch.float32).view(slots, heads, NUM_VECTORS, CHUNK)
        compiled.functions["chunk_prepare"](
            q,
            k,
            g,
            beta,
            A_log,
            dt_bias,
            state_indices,
            cu_seqlens,
            out,
            tiles,
            vectors,
            scale,
            null_slot,
            config.cut_above,
        )
        segment_starts = cu_seqlens
        if segment:
            segment_slots = num_slots(num_tokens, num_sequences, segment)
            end_of_starts = end + segment_slots * heads * _start_bytes(problem)
            segment_starts = workspace[end:end_of_starts].view(torch.float32)
            segment_starts = segment_starts.view(segment_slots, heads, problem.head_v_dim, problem.head_k_dim)
        if num_tokens > segment * CHUNK > 0:  # else no sequence has two segments
            end = end_of_starts + segment_slots * heads * _transition_bytes(problem)
            transitions = workspace[end_of_starts:end].view(getattr(torch, TRANSITION_DTYPE))
            transitions = transitions.view(segment_slots, heads, 2, problem.head_k_dim, problem.head_k_dim)
            compiled.functions["chunk_summaries"](
                k,
                v,
                initial_state,
                state_indices,
                has_initial_state,
                cu_seqlens,
                tiles,
                vectors,
                segment_starts,
                transitions,
                null_slot,
                segment,
                config.cut_above,
            )
            compiled.functions["chunk_starts"](
                state_indices, cu_seqlens, segment_starts, transitions, null_slot, segment, config.cut_above
            )
        compiled.functions["chunk_chain"](
            q,
            k,
            v,
            initial_state,
            state_indices,
            has_initial_state,
            final_state,
            final_state_indices,
            cu_seqlens,
            out,
            tiles,
            vectors,
            segment_starts,
            checkpoint_offsets,
            checkpoint_slots,
            null_slot,
            segment,
            config.cut_above,
        )


# The kernels name every barrier themselves: the compiler's own would stand in each chunk of the chain.
_OWN_BARRIERS = {"tl.disable_thread_storage_sync": True, "tl.enable_fast_math": True}
_VECTOR_BYTES = NUM_VECTORS * CHUNK * 4
_LONGEST_SEGMENT = 1 << 20  # its tokens fit an int32
# Of the model that chooses segments; microseconds on an H100, 128 key columns. NOTES.md has what they were fitted to.
_CHAIN_US = 1.05  # a chunk of the chain, while few SMs work
_FULL_CHAIN_US = 1.65  # the same with all SMs at work, which the L2 cache bounds
_ONE_LAUNCH_US = {2: 1.75, 3: 1.42, 4: 1.22}  # a chunk of the one launch by makers, however many SMs work
_SMS_OF_GROUP = 16  # of the groups of SMs that clusters lie in; some have two less
_PREPARE_US = 2.9  # a chunk of `chunk_prepare`, by SM: four blocks of 12 us at a time
_LEAST_PREPARE_US = 5.0  # its beginning and end
_SUMMARY_US = 1.22  # a chunk of a summary, both halves of a head on one SM
_START_US = 2.4  # a segment of the starts
_ROUND_US = 7.0  # of a launch's blocks, one an SM: beginning, first copies, end
_MOST_SEGMENTS = 64
_LEAST_GAIN = 0.85  # of the time of whole sequences: else the model is not trusted


def _in_one_launch(problem: ChunkProblem, config: Config) -> bool:
    return config.segment == 0 and problem.head_k_dim == 128


def _fastest_segment(problem: ChunkProblem, device: DeviceSpec) -> int:
    """By the model, for sequences of equal lengths; 0 unless segments win clearly."""
    time, segment = min(_split_times(problem, device), default=(math.inf, 0))
    if time >= _LEAST_GAIN * _whole_time(problem, device):
        return 0
    one_launch = _in_one_launch(problem, Config())
    if one_launch and _prepare_time(problem, device) + time >= _LEAST_GAIN * min(_one_launch_times(problem, device))[0]:
        return 0
    return segment


def _deciding_splits(problem: ChunkProblem, device: DeviceSpec, makers: int) -> list[tuple[int, int]]:
    """(segment, cut_above), the model's best first, where the one launch is the faster for several sequences of equal lengths.

    Whole sequences take as long as the longest one, segments about as long however the tokens are dealt out, but for the starts,
    one behind the other in the longest sequence. cut_above is its tokens where both take as long.
    """
    if problem.num_sequences <= 1:
        return []
    chunks, _ = _chunks_and_heads(problem)
    found = []
    for time, segment in sorted(_split_times(problem, device)):
        others = _prepare_time(problem, device) + time - (-(-chunks // segment) - 2) * _START_US
        gain = _ONE_LAUNCH_US[makers] - _START_US / segment  # of a chunk
        if gain > 0:
            found.append((segment, max(int((others - 2 * _START_US - _ROUND_US) / gain), 1) * CHUNK))
    return [(segment, longest) for segment, longest in found if longest < problem.num_tokens][:6]


def _segments_to_try(problem: ChunkProblem, device: DeviceSpec) -> list[int]:
    """The lengths that the model likes best, the default among them; none where it sees no use."""
    # Several sequences are rarely of equal lengths: the model knows too little to leave segments out.
    limit = math.inf if problem.num_sequences > 1 else 1.2 * _whole_time(problem, device)
    return [segment for time, segment in sorted(_split_times(problem, device)) if time < limit][:6]


def _one_launch_times(problem: ChunkProblem, device: DeviceSpec) -> Iterator[tuple[float, int]]:
    """(time, makers) of the one launch."""
    chunks, heads = _chunks_and_heads(problem)
    for makers, chunk_us in _ONE_LAUNCH_US.items():
        # Clusters of two fill every group of SMs. Of more, what surely runs at once: a second round takes twice the time.
        clusters = device.num_sms // _SMS_OF_GROUP * ((_SMS_OF_GROUP - 2) // makers)
        if makers == CHAINS:
            clusters = device.num_sms // CHAINS
        yield -(-heads // max(clusters, 1)) * (chunks * chunk_us + _ROUND_US), makers


def _prepare_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    chunks, heads = _chunks_and_heads(problem)
    return _LEAST_PREPARE_US + chunks * heads * _PREPARE_US / device.num_sms


def _whole_time(problem: ChunkProblem, device: DeviceSpec) -> float:
    """Of the chain without segments."""
    chunks, heads = _chunks_and_heads(problem)
    return _chain_time(problem, device, heads, chunks)


def _split_times(problem: ChunkProblem, device: DeviceSpec) -> Iterator[tuple[float, int]]:
    """(time, segment) of the launches behind `chunk_prepare`; nothing where the chain leaves no SM idle."""
    chunks, heads = _chunks_and_heads(problem)
    if heads * (problem.head_v_dim // 64) >= device.num_sms:
        return
    for segment in dict.fromkeys(-(-chunks // count) for count in range(2, _MOST_SEGMENTS + 1)):
        count = -(-chunks // segment)
        if count < 2:
            return
        rounds = -(-heads * (2 * count - 3) // device.num_sms)
        time = _chain_time(problem, device, heads * count, segment) + rounds * (segment * _SUMMARY_US + _ROUND_US)
        yield time + (count - 2) * _START_US + _ROUND_US, segment


def _chunks_and_heads(problem: ChunkProblem) -> tuple[int, int]:
    """Chunks of a sequence (one at least), and heads of all sequences."""
    sequences = max(problem.num_sequences, 1)
    return max(-(-problem.num_tokens // (CHUNK * sequences)), 1), sequences * problem.num_state_heads


def _chain_time(problem: ChunkProblem, device: DeviceSpec, heads: int, chunks: int) -> float:
    blocks = heads * (problem.head_v_dim // 64)
    chunk_us = max(_CHAIN_US, _FULL_CHAIN_US * min(blocks / device.num_sms, 1.0))
    return -(-blocks // device.num_sms) * (chunks * chunk_us + _ROUND_US)


def _start_bytes(problem: ChunkProblem) -> int:
    """Bytes of the start of one segment slot and head."""
    return problem.head_v_dim * problem.head_k_dim * 4


def _transition_bytes(problem: ChunkProblem) -> int:
    """Bytes of the transition of one segment slot and head."""
    return 2 * problem.head_k_dim * problem.head_k_dim * DTYPE_BYTES[TRANSITION_DTYPE]


def _tile_bytes(problem: ChunkProblem) -> int:
    """Bytes of the tiles of one chunk slot and head."""
    return num_tiles(problem) * CHUNK * CHUNK * DTYPE_BYTES[problem.dtype]


def _shared_bytes(problem: ChunkProblem) -> int:
    """Shared memory of a chain block."""
    item = DTYPE_BYTES[problem.dtype]
    stage = CHUNK * (2 * problem.head_k_dim + PANEL) * item + _tile_bytes(problem) + _VECTOR_BYTES
    return STAGES * stage + 2 * CHUNK * PANEL * item + _OTHER_BYTES
