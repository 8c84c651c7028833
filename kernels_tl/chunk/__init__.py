"""Gated delta rule by chunks of 64 tokens: prefill.

Per sequence and state head, with S [K, V] float32, c the inclusive cumulative sum of g inside a chunk and
G_ij = exp(c_i - c_j) for i >= j, else 0:

    A = (I + strict_lower(diag(beta) K K^T))^-1          M = A * G * beta_column
    W = V - exp(c) * (K S)
    O = scale * exp(c) * (Q S) + R W                     R = scale * (G * (Q K^T)) M
    S = exp(c_last) S + Z^T W                            Z = (exp(c_last - c) * M)^T K

L2 norms of q and k are row scales and enter as factors; raw gates are evaluated inside. `gdn.ops.delta_rule.problem.ChunkProblem`
is the contract: q [1, L, Hq, K], k [1, L, Hk, K], v [1, L, HV, V], out [1, L, HS, V] bfloat16 | float16; g, beta [1, L, HS];
states [slots, HS, K, V] or [slots, HS, V, K] float32 | bfloat16.

Whole sequences at D = 128 take one launch, `chunk_fused` (fused.py): a cluster of two to four blocks per sequence and head makes
its tiles itself and hands them on through shared memory, so only tokens and states pass through global memory.

At D = 64 they take two. `chunk_prepare` (prepare.py), a block per chunk and head, writes what depends on no state, Z, R and the
row factors, into the workspace. `chunk_chain` (chain.py), a block per sequence, head and slice of V columns, runs the chain of
chunks with S^T in registers (state_chain.py). The chunk that a block works on comes from cu_seqlens on the device: the grids
depend on shapes only.

Few sequences x heads leave SMs idle. Then sequences are cut into segments, and two launches between prepare and chain
(segments.py) find the state that each segment starts from: `chunk_summaries` computes what each segment makes of a state,
`chunk_starts` the states. The chain has a block per segment. With `split_if_longest_exceeds` the one launch and those with
segments are all launched, and the lengths decide on the device which of them work (`exit_macro` in types.py).

Workspace: tiles [slots, HS, 1 + K / 64, 64, 64] of the tokens' dtype (R, then Z's columns by 64), vectors
[slots, HS, 3, 64] float32, and with segments: starts [segment slots, HS, V, K] float32 and transitions
[segment slots, HS, 2, K, K] bfloat16.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem, unserved_dtypes
from gdn.problem import DTYPE_BYTES
from kernels_tl.chunk import cost_model
from kernels_tl.chunk.constants import CHUNK, NUM_VECTORS, TRANSITION_DTYPE
from kernels_tl.chunk.sizes import (
    BLOCK_REGISTERS,
    CHAINS,
    FUSED_BYTES,
    FUSED_REGISTERS,
    MOST_MAKERS,
    PANEL,
    STAGES,
    num_slots,
    num_tiles,
)
from kernels_tl.common.launch import arguments

_HEAD_DIMS = (64, 128)
_OTHER_BYTES = 2048  # static shared memory of the barriers and the block's sequence, each rounded up


# A table entry serves calls of nearly its own sizes only (see gdn.runtime.tuned): for other sizes another form may be faster, and
# the default knows which.
TUNED_WITHIN = 0.25


@dataclass(frozen=True)
class Config:
    # Chunks per segment of a sequence; 0: sequences are whole. Shorter segments use more SMs; each one costs two more chains and
    # one more serial step. A launch scalar: only whether there are segments is compiled in.
    split_chunks: int = field(default=0, metadata={"compiled": bool})
    # Blocks per cluster of the one-launch form (D = 128, whole sequences): two run the chain, all make tiles.
    cluster_size: int = CHAINS
    # Tokens. With segments: sequences are cut only if the longest one of the call has more tokens, else the one launch takes them
    # whole; 0: always cut. The lengths are on the device, so both ways are launched. A launch scalar.
    split_if_longest_exceeds: int = field(default=0, metadata={"compiled": bool})


def refusal(problem: ChunkProblem) -> str | None:
    """None if this kernel serves the problem, else the reason why not."""
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
    """Whether the configuration can be compiled, without spills, and launched."""
    if config.split_if_longest_exceeds:
        whole, split = (replace(variant, split_if_longest_exceeds=0) for variant in _variants(config))
        both_fit = _in_one_launch(problem, whole) and fits(problem, whole, device) and fits(problem, split, device)
        return config.split_if_longest_exceeds > 0 and config.split_chunks > 0 and both_fit
    if not 0 <= config.split_chunks <= _MOST_SPLIT_CHUNKS:
        return False
    if _in_one_launch(problem, config):
        if not CHAINS <= config.cluster_size <= MOST_MAKERS:
            return False
        return device.shared_bytes_per_block >= FUSED_BYTES and device.registers_per_sm >= FUSED_REGISTERS
    if config.cluster_size != CHAINS:
        return False
    return device.shared_bytes_per_block >= _shared_bytes(problem) and device.registers_per_sm >= BLOCK_REGISTERS


def default_config(problem: ChunkProblem, device: DeviceSpec) -> Config:
    """The fastest configuration by the cost model."""
    split_chunks = cost_model.fastest_split(problem, device)
    if split_chunks or not cost_model.has_one_launch(problem):
        return Config(split_chunks=split_chunks)
    whole = Config(cluster_size=cost_model.fastest_cluster(problem, device))
    both = _both_launches(problem, device, whole.cluster_size)
    return both[0] if both else whole


def configs(problem: ChunkProblem, device: DeviceSpec) -> list[Config]:
    """The configurations that the tuner tries."""
    default = default_config(problem, device)
    if default.split_if_longest_exceeds:  # both forms are in it, and no table should decide for lengths that only a call knows
        return _both_launches(problem, device, default.cluster_size)
    space = [Config(cluster_size=cluster_size) for cluster_size in range(CHAINS, MOST_MAKERS + 1)]
    space += [Config(split_chunks=split_chunks) for split_chunks in cost_model.splits_to_try(problem, device)]
    return [config for config in space if fits(problem, config, device)]


def _both_launches(problem: ChunkProblem, device: DeviceSpec, cluster_size: int) -> list[Config]:
    """Configurations of which the lengths choose the one launch or the segments, the model's best first."""
    splits = cost_model.splits_by_longest(problem, device, cluster_size)
    return [Config(split_chunks, cluster_size, longest) for split_chunks, longest in splits]


def _in_one_launch(problem: ChunkProblem, config: Config) -> bool:
    return config.split_chunks == 0 and cost_model.has_one_launch(problem)


def _variants(config: Config) -> tuple[Config, ...]:
    """The variants to launch, in order. With `split_if_longest_exceeds` both are launched, and each exits early if the lengths
    call for the other one."""
    return _both_variants(config) if config.split_if_longest_exceeds else (config,)


@functools.lru_cache(maxsize=256)  # every launch asks
def _both_variants(config: Config) -> tuple[Config, Config]:
    return replace(config, split_chunks=0), replace(config, cluster_size=CHAINS)


def compile(problem: ChunkProblem, config: Config) -> dict[str, bytes]:
    from kernels_tl.chunk.library import libraries

    return {
        name: library
        for variant in _variants(config)
        for name, library in libraries(problem, variant, _in_one_launch(problem, variant)).items()
    }


def workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    config = _variants(config)[-1]  # the one launch needs none
    if _in_one_launch(problem, config):
        return 0
    sizes, heads = (problem.num_tokens, problem.num_sequences), problem.num_state_heads
    parts = _parts(problem, config)
    return sum(num_slots(*sizes, chunks) * heads * math.prod(shape) * DTYPE_BYTES[dtype] for dtype, chunks, shape in parts)


def launch(compiled: Any, params: ChunkParams) -> None:
    p, problem, functions, present = params, compiled.problem, compiled.functions, arguments
    q, k, v, out, cu_seqlens, null_slot = p.q[0], p.k[0], p.v[0], p.out[0], p.cu_seqlens, p.null_slot
    gates = present(*(x if x is None else x[0] for x in (p.g, p.beta)), *((p.A_log, p.dt_bias) if p.g is not None else ()))
    initial = present(p.initial_state, p.state_indices, p.has_initial_state)
    final = present(p.final_state, p.final_state_indices)
    checkpoints = present(p.checkpoint_offsets, p.checkpoint_slots, p.checkpoint_states)
    for config in _variants(compiled.config):
        split_chunks, longest = config.split_chunks, config.split_if_longest_exceeds
        if _in_one_launch(problem, config):
            tensors = (q, k, v, *gates, *initial, *final, cu_seqlens, out, *checkpoints)
            functions["chunk_fused"](*tensors, p.scale, null_slot, longest)
            continue
        tiles, vectors, *segments = _workspace(problem, config, p)
        own = present(p.state_indices)
        functions["chunk_prepare"](q, k, *gates, *own, cu_seqlens, out, tiles, vectors, p.scale, null_slot, longest)
        if q.shape[0] > split_chunks * CHUNK > 0:  # else no sequence has two segments
            cut = (null_slot, split_chunks, longest)
            functions["chunk_summaries"](k, v, *initial, cu_seqlens, tiles, vectors, *segments, *cut)
            functions["chunk_starts"](*own, cu_seqlens, *segments, *cut)
        tensors = (q, k, v, *initial, *final, cu_seqlens, out, tiles, vectors, *segments[:1], *checkpoints)
        functions["chunk_chain"](*tensors, null_slot, split_chunks, longest)


def _workspace(problem: ChunkProblem, config: Config, params: ChunkParams) -> list[Any]:
    """Parts of the workspace: tiles and vectors, and with segments starts and transitions."""
    assert params.workspace is not None  # its bytes are not 0
    parts, end = [], 0
    sizes = (params.q.shape[1], params.cu_seqlens.shape[0] - 1)
    for dtype, chunks, shape in _parts(problem, config):
        slots, begin = num_slots(*sizes, chunks), end
        end += slots * problem.num_state_heads * math.prod(shape) * DTYPE_BYTES[dtype]
        parts.append(params.workspace[begin:end].view(getattr(torch, dtype)).view(slots, problem.num_state_heads, *shape))
    return parts


def _parts(problem: ChunkProblem, config: Config) -> list[tuple[str, int, tuple[int, ...]]]:
    """Dtype, chunks of a slot, and shape in a slot and head of the workspace's parts."""
    K, V = problem.head_k_dim, problem.head_v_dim
    parts = [(problem.dtype, 1, (num_tiles(problem), CHUNK, CHUNK)), ("float32", 1, (NUM_VECTORS, CHUNK))]
    if config.split_chunks:
        parts += [("float32", config.split_chunks, (V, K)), (TRANSITION_DTYPE, config.split_chunks, (2, K, K))]
    return parts


_MOST_SPLIT_CHUNKS = 1 << 20  # its tokens fit an int32


def _shared_bytes(problem: ChunkProblem) -> int:
    """Shared memory of a chain block."""
    rows = 2 * problem.head_k_dim + PANEL + num_tiles(problem) * CHUNK  # of 64 values: K, Q, V and the tiles
    return (STAGES * rows + 2 * PANEL) * CHUNK * DTYPE_BYTES[problem.dtype] + STAGES * NUM_VECTORS * CHUNK * 4 + _OTHER_BYTES
