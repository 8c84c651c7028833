"""The chunk kernel of head dims 64 and 128, in one launch, or in two that split sequences: what is chosen, compiled, launched.

Per sequence and state head, with S [K, V] float32, c the inclusive cumulative sum of g inside a chunk and
G_ij = exp(c_i - c_j) for i >= j, else 0:

    A  = (I + strict_lower(diag(beta) K K^T))^-1
    Vn = (A * G * beta_column) (V - exp(c) * (K S))
    O  = scale * (exp(c) * (Q S) + (G * (Q K^T)) Vn)
    S  = exp(c_last) S + K^T (exp(c_last - c) * Vn)

L2 norms of q and k are row scales and enter as factors; raw gates are evaluated inside.

The kernel and its barriers: fused.py. Its warp roles are functions of the ChunkSpec (spec.py), the launch's Params and the
block's shared memory: roles/. Which block works on what: scheduler.py; tiles in shared memory: layouts.py. With `split_chunks` a
sequence is split into segments that run side by side: split/segments.py (slots, workspace), split/summary.py (first launch),
split/compose.py (second). With `num_four_sm_clusters` a head has four SMs instead of two: four_sm/kernel.py. With
`split_if_longest_exceeds` both whole sequences and segments are launched, and the lengths decide on the device which of the
launches work: dispatch.py.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from gdn.device import DeviceSpec
from gdn.problems import ChunkParams, ChunkProblem, unserved_dtypes
from kernels_cute.chunk.four_sm.kernel import FourSmChunk
from kernels_cute.chunk.four_sm.shape import DIM, chain_bytes, maker_bytes, ring_bytes, scaled_parts
from kernels_cute.chunk.fused import FusedChunk
from kernels_cute.chunk.plan import (
    default_clusters,
    default_prefetch,
    default_split,
    four_sm_clusters,
    splits_to_try,
    uses_four_sm,
)
from kernels_cute.chunk.scheduler import max_scheduled_clusters
from kernels_cute.chunk.shape import AUX_BYTES, BUFFERS, CHUNK, KEY_STAGES, SCRATCH_BYTES, STAGES, TILE_BYTES, VECTOR_BYTES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split import summary
from kernels_cute.chunk.split.compose import SplitChunk
from kernels_cute.chunk.split.segments import num_slots, summary_bytes
from kernels_cute.common.memory import fake

ENTRY = "gdn_cute_chunk"
_SPLIT_ENTRY = "gdn_cute_chunk_split"  # next to it, with `split_if_longest_exceeds`
HEAD_DIMS = (64, 128)
_BARRIER_BYTES = 1024  # most of the barriers, records and order, and of what aligning the vectors behind them costs
_ALL_CLUSTERS = 2**31 - 1


def _not_compiled(value: int) -> None:
    return None


@dataclass(frozen=True)
class Config:
    # Chunks of Q and V in shared memory: 4, and 5 of K; with four SMs a head 2 or 3, and as many of K.
    stages: int
    prefetch: int  # chunks ahead of a copy that are prefetched into the L2 cache: 0 or 2
    # Chunks per segment: longer sequences are split into segments, which run side by side; 0 = sequences are whole. A scalar of
    # the launch.
    split_chunks: int = field(default=0, metadata={"compiled": bool})
    # Tokens: sequences are split only where the longest of the call has more, else they are whole; 0 = always. Lengths are on the
    # device, so both variants are launched. Every other field but `split_chunks` is that of whole sequences. A scalar of the
    # launch.
    split_if_longest_exceeds: int = field(default=0, metadata={"compiled": bool})
    # Clusters (of two SMs, at D = 64 of one) of a persistent grid, each of which takes one work tile after the other;
    # 0 = one cluster per work tile. A scalar of the launch. Whole sequences only.
    num_persistent_clusters: int = field(default=0, metadata={"compiled": bool})
    # Clusters of four SMs that run at once, each with a sequence and head; 0 = a head has two SMs. A scalar of the launch.
    num_four_sm_clusters: int = field(default=0, metadata={"compiled": bool})
    # With four SMs a head: number of (sequence, head) groups that may use the L2 ring, next to those in clusters of four. If more
    # are left over, none does and all of them are queued on clusters of four. A scalar of the launch.
    max_l2_ring_groups: int = field(default=0, metadata={"compiled": _not_compiled})


def refusal(problem: ChunkProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if k != v or k not in HEAD_DIMS:
        return f"requires K = V of 64 or 128, got K={k}, V={v}"
    if (reason := unserved_dtypes(problem)) is not None:
        return reason
    for heads in (problem.num_q_heads, problem.num_k_heads, problem.num_v_heads):
        if heads < 1 or problem.num_state_heads % heads:
            return f"requires head counts that divide {problem.num_state_heads} state heads, got {heads}"
    return None


def _shared_bytes(problem: ChunkProblem) -> int:
    key = CHUNK * 2 * problem.head_k_dim
    stage = key + CHUNK * 2 * 64  # of Q and V
    tiles = BUFFERS * 2 + 1  # M and P, and L
    rows = BUFFERS * VECTOR_BYTES + 2 * AUX_BYTES + 4 * SCRATCH_BYTES
    shared = STAGES * stage + KEY_STAGES * key + tiles * TILE_BYTES
    return shared + -(-(rows + _BARRIER_BYTES) // 1024) * 1024


def _summary_shared_bytes(problem: ChunkProblem) -> int:
    stage = CHUNK * 2 * 2 * problem.head_k_dim
    tiles = BUFFERS + 2  # M, and L and zeros
    rows = BUFFERS * VECTOR_BYTES + 2 * AUX_BYTES + 4 * SCRATCH_BYTES
    return summary.STAGES * stage + tiles * TILE_BYTES + -(-(rows + _BARRIER_BYTES) // 1024) * 1024


def _four_sm_shared_bytes(problem: ChunkProblem, config: Config) -> int:
    return max(chain_bytes(config.stages), maker_bytes(scaled_parts(problem.dtype == "bfloat16")))


def fits(problem: ChunkProblem, config: Config, device: DeviceSpec) -> bool:
    if config.split_if_longest_exceeds:
        variants = [replace(variant, split_if_longest_exceeds=0) for variant in _variants(config)]
        is_split = config.split_if_longest_exceeds > 0 and config.split_chunks > 0
        return is_split and all(fits(problem, variant, device) for variant in variants)
    if config.prefetch not in (0, 2):
        return False
    if config.num_four_sm_clusters:
        return (
            config.num_four_sm_clusters > 0
            and config.max_l2_ring_groups >= 0
            and problem.head_v_dim == DIM
            and config.stages in (2, 3)
            and config.split_chunks == 0
            and config.num_persistent_clusters == 0
            and _four_sm_shared_bytes(problem, config) <= device.shared_bytes_per_block
        )
    return (
        config.stages == STAGES
        and config.split_chunks >= 0
        and 0 <= config.num_persistent_clusters <= max_scheduled_clusters(problem.head_v_dim == 128)
        and config.max_l2_ring_groups == 0
        and _shared_bytes(problem) <= device.shared_bytes_per_block
        and (config.split_chunks == 0 or _summary_shared_bytes(problem) <= device.shared_bytes_per_block)
    )


def default_config(problem: ChunkProblem, device: DeviceSpec) -> Config:
    narrow = _narrow_config(problem, device)
    is_whole = narrow.split_chunks == 0 or narrow.split_if_longest_exceeds > 0
    return _four_sm(narrow, device) if is_whole and uses_four_sm(problem, device) else narrow


def _narrow_config(problem: ChunkProblem, device: DeviceSpec) -> Config:
    """The default with two SMs a head, at D = 64 one."""
    split_chunks, split_if_longest_exceeds = default_split(problem, device)
    clusters = 0 if split_chunks else default_clusters(problem, device)
    return Config(
        stages=STAGES,
        prefetch=default_prefetch(problem, split_chunks, clusters),
        split_chunks=split_chunks,
        split_if_longest_exceeds=split_if_longest_exceeds,
        num_persistent_clusters=clusters,
    )


def _four_sm(narrow: Config, device: DeviceSpec) -> Config:
    clusters, ring_groups = four_sm_clusters(device)
    return replace(
        narrow,
        stages=3,
        prefetch=0,
        num_persistent_clusters=0,
        num_four_sm_clusters=clusters,
        max_l2_ring_groups=ring_groups,
    )


def configs(problem: ChunkProblem, device: DeviceSpec) -> list[Config]:
    return [config for config in _space(problem, device) if fits(problem, config, device)]


def _space(problem: ChunkProblem, device: DeviceSpec) -> Iterator[Config]:
    """Where lengths that nobody knows decide, no table should: every candidate launches both variants."""
    narrow = _narrow_config(problem, device)
    splits = splits_to_try(problem, device)
    if narrow.split_if_longest_exceeds:
        for split_chunks, longest in splits:
            if split_chunks != narrow.split_chunks:
                default = default_config(problem, device)
                yield replace(default, split_chunks=split_chunks, split_if_longest_exceeds=longest)
    else:
        for (split_chunks, _), prefetch in product(splits, (0, 2)):
            yield replace(narrow, split_chunks=split_chunks, prefetch=prefetch, num_persistent_clusters=0)
        narrow = replace(narrow, split_chunks=0)
    for prefetch, clusters in product((0, 2), sorted({0, default_clusters(problem, device)})):
        yield replace(narrow, prefetch=prefetch, num_persistent_clusters=clusters)
    if problem.head_v_dim == DIM:
        for stages, prefetch in product((2, 3), (0, 2)):
            yield replace(_four_sm(narrow, device), stages=stages, prefetch=prefetch)


def _variants(config: Config) -> tuple[Config, ...]:
    """The launches to issue: with `split_if_longest_exceeds` those of whole sequences and those of segments, each of which exits
    early if the lengths call for the other one; else the configuration itself."""
    return _both_variants(config) if config.split_if_longest_exceeds else (config,)


@functools.lru_cache(maxsize=256)  # every launch asks
def _both_variants(config: Config) -> tuple[Config, Config]:
    split = replace(config, stages=STAGES, num_persistent_clusters=0, num_four_sm_clusters=0, max_l2_ring_groups=0)
    return replace(config, split_chunks=0), split


def workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    """Bytes of the variant that needs more: one of them works at a time."""
    return max(_workspace_bytes(problem, variant) for variant in _variants(config))


def _workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    if config.num_four_sm_clusters:
        return ring_bytes(num_l2_ring_groups(problem.num_sequences * problem.num_state_heads, config))
    if config.split_chunks == 0:
        return 0
    slots = num_slots(problem.num_tokens, problem.num_sequences, CHUNK * config.split_chunks)
    return slots * problem.num_state_heads * summary_bytes(problem.head_k_dim)


def _uses_workspace(config: Config) -> bool:
    return bool(config.split_chunks or config.num_four_sm_clusters)


def num_l2_ring_groups(num_groups: int, config: Config) -> int:
    """Number of (sequence, head) groups of the four-SM form whose tiles go through the L2 cache."""
    rest = max(num_groups - config.num_four_sm_clusters, 0)
    return rest if rest <= config.max_l2_ring_groups else 0


def compile(problem: ChunkProblem, config: Config) -> dict[str, bytes]:
    variants = dict(zip((ENTRY, _SPLIT_ENTRY), _variants(config), strict=False))
    return {
        entry: build.library(entry, _kernel(problem, variant).launch, *_arguments(problem, config, variant))
        for entry, variant in variants.items()
    }


def _kernel(problem: ChunkProblem, config: Config) -> FusedChunk | SplitChunk | FourSmChunk:
    spec = ChunkSpec(
        problem,
        stages=config.stages,
        prefetch=config.prefetch,
        is_persistent=config.num_persistent_clusters > 0,
        has_both_variants=config.split_if_longest_exceeds > 0,
        is_split=config.split_chunks > 0,
    )
    if config.num_four_sm_clusters:
        return FourSmChunk(spec)
    return SplitChunk(spec) if spec.is_split else FusedChunk(spec)


def _arguments(problem: ChunkProblem, config: Config, variant: Config) -> list[Any]:
    """Fake Params and scalars in the order of the compiled function."""
    heads, dim = problem.num_state_heads, problem.head_k_dim
    num_tokens, columns = cute.sym_int(), cute.sym_int()

    def tokens(count: int) -> Any:
        return fake(problem.dtype, 1, num_tokens, count, dim, last=1, align=16)

    def gate(dtype: str | None) -> Any:
        return None if dtype is None else fake(dtype, 1, num_tokens, heads)

    def state(dtype: str) -> Any:
        return fake(dtype, cute.sym_int64(), heads, dim, dim, last=1)

    def indices(dtype: str | None) -> Any:
        return None if dtype is None else fake(dtype, cute.sym_int())

    def checkpoints(dtype: str | None) -> Any:
        return fake(dtype, cute.sym_int(), columns, last=1) if problem.has_checkpoints and dtype is not None else None

    workspace = make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), stride=(1,), assumed_align=256)
    params = ChunkParams(
        q=tokens(problem.num_q_heads),
        k=tokens(problem.num_k_heads),
        v=tokens(problem.num_v_heads),
        g=gate(problem.gate_dtype),
        beta=gate(problem.beta_dtype),
        A_log=fake("float32", heads, last=1) if problem.use_gate else None,
        dt_bias=fake("float32", heads, last=1) if problem.use_gate else None,
        initial_state=state(problem.state_dtype) if problem.has_initial_state else None,
        state_indices=indices(problem.index_dtype),
        has_initial_state=indices("bool" if problem.has_mask else None),
        final_state=state(problem.state_dtype if problem.pooled else "float32") if problem.has_final_state else None,
        final_state_indices=indices(problem.index_dtype if problem.has_final_indices else None),
        cu_seqlens=fake(problem.cu_seqlens_dtype, cute.sym_int(), last=1),
        checkpoint_offsets=checkpoints("int32"),
        checkpoint_slots=checkpoints(problem.index_dtype),
        out=tokens(heads),
        workspace=workspace if any(_uses_workspace(one) for one in _variants(config)) else None,
        scale=cutlass.Float32(1.0),
        null_slot=cutlass.Int64(-1),
    )
    # Tokens of a segment, slots; or the number of clusters, or of groups of the L2 ring. Then split_if_longest_exceeds.
    scalars = [CHUNK, 1] if variant.split_chunks else [1]
    return [*params, *map(cutlass.Int32, (*scalars, 0))]


def launch(compiled: Any, params: ChunkParams) -> None:
    problem: ChunkProblem = compiled.problem
    num_tokens, num_sequences = params.q.shape[1], params.cu_seqlens.shape[0] - 1
    for entry, variant in zip((ENTRY, _SPLIT_ENTRY), _variants(compiled.config), strict=False):
        compiled.functions[entry](*params, *_scalars(variant, problem, num_tokens, num_sequences))


def _scalars(config: Config, problem: ChunkProblem, num_tokens: int, num_sequences: int) -> tuple[int, ...]:
    """The last arguments of a launch."""
    longest = config.split_if_longest_exceeds
    if config.split_chunks:
        tokens = CHUNK * config.split_chunks
        return tokens, num_slots(num_tokens, num_sequences, tokens), longest
    if config.num_four_sm_clusters:
        return num_l2_ring_groups(problem.num_state_heads * num_sequences, config), longest
    return config.num_persistent_clusters or _ALL_CLUSTERS, longest
