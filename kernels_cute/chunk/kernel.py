"""The chunk kernel of head dims 64 and 128, in one launch, or in two that split sequences: what is chosen, compiled, launched.

L2 norms of q and k are row scales and enter as factors; raw gates are evaluated inside.

The kernel and its formulas: fused.py. Its warp roles are functions of the ChunkSpec (spec.py), the launch's Params and the
block's shared memory: roles/. Which block works on what: scheduler.py; tiles in shared memory: operands.py. With `split_chunks` a
sequence is split into segments that run side by side: split/segments.py (slots, workspace), split/summary.py (first launch),
split/compose.py (second). With `num_four_sm_clusters` a head has four SMs instead of two: four_sm/kernel.py. With
`split_if_longest_exceeds` both whole sequences and segments are launched, and the lengths decide on the device which of the
launches work: `arguments.is_selected_launch`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.delta_rule.problem import ChunkParams, ChunkProblem, unserved_dtypes
from kernels_cute.chunk.barriers import block_fields, shared_bytes
from kernels_cute.chunk.deal import max_scheduled_clusters
from kernels_cute.chunk.four_sm.shape import DIM, SCALED_PARTS, chain_bytes, maker_bytes, ring_bytes
from kernels_cute.chunk.key_head import shape as key_head_shape
from kernels_cute.chunk.key_head.barriers import key_head_fields
from kernels_cute.chunk.key_head.spec import key_head_spec
from kernels_cute.chunk.plan import Model, four_sm_clusters, known_segment
from kernels_cute.chunk.shape import CHUNK, STAGES
from kernels_cute.chunk.spec import ChunkSpec
from kernels_cute.chunk.split.barriers import summary_fields
from kernels_cute.chunk.split.shape import num_slots, summary_bytes, summary_spec

_ENTRIES = ("gdn_cute_chunk", "gdn_cute_chunk_split")  # the second with `split_if_longest_exceeds`
HEAD_DIMS = (64, 128)
_ALL_CLUSTERS = 2**31 - 1


@dataclass(frozen=True)
class Config:
    """All fields but `stages`, `prefetch` and `state_heads` are scalars of the launch."""

    # Chunks of Q and V in shared memory: 4, and 5 of K; with four SMs a head 2 or 3, and as many of K; with two state heads a
    # work tile 2 of Q (key_head/shape.py).
    stages: int
    prefetch: int  # chunks ahead of a copy that are prefetched into the L2 cache: 0 or 2
    # Chunks per segment: longer sequences are split into segments, which run side by side; 0 = sequences are whole.
    split_chunks: int = field(default=0, metadata={"compiled": bool})
    # Tokens: sequences are split only where the longest of the call has more, else they are whole; 0 = always. Lengths are on the
    # device, so both variants are launched. Every other field but `split_chunks` is that of whole sequences.
    split_if_longest_exceeds: int = field(default=0, metadata={"compiled": bool})
    # Clusters (of two SMs, at D = 64 of one) of a persistent grid, each of which takes one work tile after the other;
    # 0 = one cluster per work tile. Whole sequences only.
    num_persistent_clusters: int = field(default=0, metadata={"compiled": bool})
    # Clusters of four SMs that run at once, each with a sequence and head; 0 = a head has two SMs.
    num_four_sm_clusters: int = field(default=0, metadata={"compiled": bool})
    # With four SMs a head: number of (sequence, head) groups that may use the L2 ring, next to those in clusters of four. If more
    # are left over, none does and all of them are queued on clusters of four.
    max_l2_ring_groups: int = field(default=0, metadata={"compiled": lambda value: None})
    # State heads of a work tile: 1, or 2 that share K and Q, in clusters of two SMs; needs num_persistent_clusters.
    state_heads: int = 1


def refusal(problem: ChunkProblem) -> str | None:
    """None where this kernel serves the problem, of a head dim that it has; else why not."""
    if (reason := unserved_dtypes(problem)) is not None:
        return reason
    for heads in (problem.num_q_heads, problem.num_k_heads, problem.num_v_heads):
        if heads < 1 or problem.num_state_heads % heads:
            return f"requires head counts that divide {problem.num_state_heads} state heads, got {heads}"
    return None


def fits(problem: ChunkProblem, config: Config, device: DeviceSpec) -> bool:
    if config.split_if_longest_exceeds:
        is_split = config.split_if_longest_exceeds > 0 and config.split_chunks > 0
        return is_split and all(fits(problem, replace(one, split_if_longest_exceeds=0), device) for one in variants(config))
    if config.prefetch not in (0, 2) or min(config.split_chunks, config.num_persistent_clusters, config.num_four_sm_clusters) < 0:
        return False
    if config.num_four_sm_clusters:
        shared = max(chain_bytes(config.stages), maker_bytes(SCALED_PARTS[problem.dtype]))
        is_whole = config.split_chunks == 0 and config.num_persistent_clusters == 0
        is_served = problem.head_v_dim == DIM and config.stages in (2, 3) and config.max_l2_ring_groups >= 0
        return is_whole and is_served and config.state_heads == 1 and shared <= device.shared_bytes_per_block
    if config.state_heads != 1:
        return _fits_key_heads(problem, config, device)
    if config.stages != STAGES or config.max_l2_ring_groups:
        return False
    spec = spec_of(problem, config)
    fields = [block_fields(spec)]
    if spec.is_split:
        fields.append(summary_fields(summary_spec(spec)))
    shared = max(map(shared_bytes, fields))
    is_dealt = config.num_persistent_clusters <= max_scheduled_clusters(problem.head_v_dim == 128)
    return is_dealt and shared <= device.shared_bytes_per_block


def _fits_key_heads(problem: ChunkProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether clusters take two state heads at a time."""
    if config.state_heads != key_head_shape.STATE_HEADS or problem.head_v_dim != DIM or config.stages != key_head_shape.STAGES:
        return False
    is_shared = all(
        problem.num_state_heads // heads % config.state_heads == 0 for heads in (problem.num_q_heads, problem.num_k_heads)
    )
    is_dealt = 0 < config.num_persistent_clusters <= max_scheduled_clusters(True)
    is_whole = config.split_chunks == 0 and config.max_l2_ring_groups == 0
    shared = shared_bytes(key_head_fields(key_head_spec(spec_of(problem, config))))
    return is_shared and is_dealt and is_whole and shared <= device.shared_bytes_per_block


def spec_of(problem: ChunkProblem, config: Config) -> ChunkSpec:
    """Compile-time constants of a launch's kernel, before those of its form."""
    if config.state_heads > 1:
        return ChunkSpec(problem, config.stages, config.prefetch, True, False, False)
    is_split = config.split_chunks > 0  # a block has one segment, whatever num_persistent_clusters says
    is_persistent = config.num_persistent_clusters > 0 and not is_split
    return ChunkSpec(problem, config.stages, config.prefetch, is_persistent, config.split_if_longest_exceeds > 0, is_split)


def default_config(problem: ChunkProblem, device: DeviceSpec) -> Config:
    model = Model(problem, device)
    if segment := known_segment(problem, device):
        return Config(STAGES, model.prefetch(segment, 0), segment)
    narrow = _narrow_config(model)
    if model.shares_keys(problem.longest) and fits(problem, pairs := _two_heads(narrow), device):
        return pairs
    is_whole = narrow.split_chunks == 0 or narrow.split_if_longest_exceeds > 0
    return _four_sm(narrow, device) if is_whole and model.uses_four_sm else narrow


def _narrow_config(model: Model) -> Config:
    """The default with two SMs a head, at D = 64 one."""
    split_chunks, longest = model.split()
    clusters = 0 if split_chunks else model.clusters()
    return Config(STAGES, model.prefetch(split_chunks, clusters), split_chunks, longest, clusters)


def _four_sm(narrow: Config, device: DeviceSpec) -> Config:
    clusters, groups = four_sm_clusters(device)
    four = {"num_four_sm_clusters": clusters, "max_l2_ring_groups": groups}
    return replace(narrow, stages=3, prefetch=0, num_persistent_clusters=0, **four)


def _two_heads(narrow: Config) -> Config:
    """The persistent configuration with two state heads a work tile."""
    return replace(narrow, stages=key_head_shape.STAGES, prefetch=0, state_heads=key_head_shape.STATE_HEADS)


def configs(problem: ChunkProblem, device: DeviceSpec) -> list[Config]:
    return [config for config in _space(problem, device) if fits(problem, config, device)]


def _space(problem: ChunkProblem, device: DeviceSpec) -> Iterator[Config]:
    """Yield the configurations to measure. Where lengths that the host does not know decide, every one launches both variants: a
    table should not decide for them."""
    model = Model(problem, device)
    narrow, splits = _narrow_config(model), model.splits_to_try()
    if narrow.split_if_longest_exceeds:
        for split_chunks, longest in splits:
            if split_chunks != narrow.split_chunks:
                default = default_config(problem, device)
                yield replace(default, split_chunks=split_chunks, split_if_longest_exceeds=longest)
    else:
        for (split_chunks, _), prefetch in product(splits, (0, 2)):
            yield replace(narrow, split_chunks=split_chunks, prefetch=prefetch, num_persistent_clusters=0)
        narrow = replace(narrow, split_chunks=0)
    for prefetch, clusters in product((0, 2), sorted({0, model.clusters()})):
        yield replace(narrow, prefetch=prefetch, num_persistent_clusters=clusters)
    if model.clusters():
        yield _two_heads(replace(narrow, num_persistent_clusters=model.clusters()))
    if problem.head_v_dim == DIM:
        for stages, prefetch in product((2, 3), (0, 2)):
            yield replace(_four_sm(narrow, device), stages=stages, prefetch=prefetch)


def variants(config: Config) -> tuple[Config, ...]:
    """Return the launches to issue: with `split_if_longest_exceeds` one of whole sequences and one of segments, of which the one
    that the lengths do not call for exits early; else the configuration itself."""
    return _both_variants(config) if config.split_if_longest_exceeds else (config,)


@functools.lru_cache(maxsize=256)  # every launch asks
def _both_variants(config: Config) -> tuple[Config, ...]:
    split = replace(config, stages=STAGES, num_persistent_clusters=0, num_four_sm_clusters=0, max_l2_ring_groups=0)
    return replace(config, split_chunks=0), split


def workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    """Return the bytes of the variant that needs more: only one of them works in a call."""
    return max(_workspace_bytes(problem, variant) for variant in variants(config))


def _workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    if config.num_four_sm_clusters:
        return ring_bytes(num_l2_ring_groups(problem.num_sequences * problem.num_state_heads, config))
    if config.split_chunks == 0:
        return 0
    slots = num_slots(problem.num_tokens, problem.num_sequences, CHUNK * config.split_chunks)
    return slots * problem.num_state_heads * summary_bytes(problem.head_k_dim)


def needs_workspace(config: Config) -> bool:
    """Of a variant."""
    return config.split_chunks > 0 or config.num_four_sm_clusters > 0


def num_l2_ring_groups(num_groups: int, config: Config) -> int:
    """Number of (sequence, head) groups of the four-SM form whose tiles go through the L2 cache."""
    rest = max(num_groups - config.num_four_sm_clusters, 0)
    return rest if rest <= config.max_l2_ring_groups else 0


def compile(problem: ChunkProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.chunk.library import library

    every = variants(config)
    has_workspace = any(map(needs_workspace, every))
    return {
        entry: library(entry, problem, variant, spec_of(problem, variant), has_workspace, scalars(variant, 1, 1, 1))
        for entry, variant in zip(_ENTRIES, every, strict=False)
    }


def launch_with(functions: Mapping[str, Callable[..., Any]], problem: ChunkProblem, config: Config, params: ChunkParams) -> None:
    num_tokens, num_sequences = params.q.shape[1], params.cu_seqlens.shape[0] - 1
    for entry, variant in zip(_ENTRIES, variants(config), strict=False):
        functions[entry](*params, *scalars(variant, problem.num_state_heads, num_tokens, num_sequences))


def scalars(config: Config, heads: int, num_tokens: int, num_sequences: int) -> tuple[int, ...]:
    """Return the last arguments of a launch: tokens of a segment and slots, or groups of the L2 ring, or clusters; then the bound
    on the longest sequence.

    heads: of the states.
    """
    longest = config.split_if_longest_exceeds
    if config.split_chunks:
        tokens = CHUNK * config.split_chunks
        return tokens, num_slots(num_tokens, num_sequences, tokens), longest
    if config.num_four_sm_clusters:
        return num_l2_ring_groups(heads * num_sequences, config), longest
    return config.num_persistent_clusters or _ALL_CLUSTERS, longest
