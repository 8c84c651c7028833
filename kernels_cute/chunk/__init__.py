"""Gated delta rule by chunks of 64 tokens: prefill, in one launch, or in two that split sequences.

Per sequence and state head, with S [K, V] float32, c the inclusive cumulative sum of g inside a chunk and
G_ij = exp(c_i - c_j) for i >= j, else 0:

    A  = (I + strict_lower(diag(beta) K K^T))^-1
    Vn = (A * G * beta_column) (V - exp(c) * (K S))
    O  = scale * (exp(c) * (Q S) + (G * (Q K^T)) Vn)
    S  = exp(c_last) S + K^T (exp(c_last - c) * Vn)

L2 norms of q and k are row scales and enter as factors; raw gates are evaluated inside. `gdn.problems.ChunkProblem` is the
contract: q [1, L, Hq, K], k [1, L, Hk, K], v [1, L, HV, V], out [1, L, HS, V] bfloat16 | float16; g, beta [1, L, HS];
states [slots, HS, K, V] or [slots, HS, V, K] float32 | bfloat16.

The kernel, its roles and barriers: _chunk_fused.py, with _chunk_{state,tiles,copies}.py; which block works on what:
_chunk_items.py; tiles in shared memory: _chunk_layouts.py. With `segment` a sequence is cut into pieces that run side by side:
_chunk_segments.py (slots, workspace), _chunk_summary.py (first launch), _chunk_compose.py (second).
With `makers` a head has four SMs instead of two: _chunk_wide.py. With `cut_above` both whole sequences and segments are launched,
and the lengths decide on the device which of the launches work: _chunk_choice.py.

Head dims other than 64 and 128: _chunk_stand_in.py.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

from gdn.device import DeviceSpec
from gdn.problems import ChunkProblem, unserved_dtypes
from kernels_cute.chunk.four_sm.kernel import WideChunk
from kernels_cute.chunk.four_sm.shape import DIM, MAKERS, chain_bytes, maker_bytes, ring_bytes, scaled_parts
from kernels_cute.chunk.fused import FusedChunk
from kernels_cute.chunk.head_dims import stand_in as _chunk_stand_in
from kernels_cute.chunk.plan import (
    default_places,
    default_prefetch,
    default_split,
    is_wide,
    splits_to_try,
    wide_places,
)
from kernels_cute.chunk.scheduler import places_limit
from kernels_cute.chunk.shape import AUX_BYTES, BUFFERS, CHUNK, SCRATCH_BYTES, TILE_BYTES, VECTOR_BYTES, key_stages
from kernels_cute.chunk.split import summary as _chunk_summary
from kernels_cute.chunk.split.compose import SplitChunk
from kernels_cute.chunk.split.segments import num_slots, summary_bytes
from kernels_cute.common.memory import CUTE_DTYPES, fake

ENTRY = "gdn_cute_chunk"
_CUT_ENTRY = "gdn_cute_chunk_cut"  # beside it, with `cut_above`
_HEAD_DIMS = (64, 128)
_BARRIER_BYTES = 1024  # most of the barriers, records and order, and of what aligning the vectors behind them costs
# Registers a thread of the state, inverse, score and copying warpgroups. The block's pool is what a thread has at launch times
# its threads; with less than this ptxas spills, or serialises the products.
_REGISTERS = (232, 128, 112, 40)
_STAGES = 4  # all that fit
_ALL_PLACES = 2**31 - 1


# An entry of a tuned table serves calls of nearly its sizes (see gdn.runtime.tuned): for others another design may be faster, and
# the default knows which.
TUNED_WITHIN = 0.25


@dataclass(frozen=True)
class Config:
    paired: bool  # the two 64-column blocks of a head make M and P for each other, in turns
    stages: int  # chunks of q and v in shared memory, of k one more (not with 2): more hide the way from memory through M and P
    prefetch: int  # chunks ahead of a copy that the L2 cache is asked for; 0 = none
    # Chunks of a segment: longer sequences are cut into such pieces, which run side by side; 0 = sequences are whole. A scalar of
    # the launch.
    segment: int = field(default=0, metadata={"compiled": bool})
    # Blocks that make tiles for the two that carry the state of a sequence and head: 2, or 0 = the two make them.
    makers: int = 0
    # Clusters (pairs, or blocks alone) of a launch at most, each with item after item; 0 = a cluster has one item, and there are
    # as many as items. A scalar of the launch. Without segments. With makers: clusters of four that run side by side, or 0.
    places: int = field(default=0, metadata={"compiled": bool})
    # With makers: sequences and heads at most that run beside those of the clusters of four, their tiles going through the L2
    # cache. Of more none does, and all take places in turn. A scalar of the launch.
    ringed: int = field(default=0, metadata={"compiled": bool})
    # Tokens: sequences are cut into segments only where the longest of the call has more, else they are whole; 0 = always.
    # Lengths stand on the device, so both ways are launched. Stages, makers, places and ringed are those of whole sequences. A
    # scalar of the launch.
    cut_above: int = field(default=0, metadata={"compiled": bool})


def refusal(problem: ChunkProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if k != v or k % 4 or not 4 <= k <= _chunk_stand_in.LARGEST:
        return f"requires K = V, a multiple of 4 up to {_chunk_stand_in.LARGEST}, got K={k}, V={v}"
    if k > 128 and problem.has_checkpoints:
        return f"requires head dims up to 128 with checkpoints, got {k}"
    if (reason := unserved_dtypes(problem)) is not None:
        return reason
    for heads in (problem.num_q_heads, problem.num_k_heads, problem.num_v_heads):
        if heads < 1 or problem.num_state_heads % heads:
            return f"requires head counts that divide {problem.num_state_heads} state heads, got {heads}"
    return None


def note(problem: ChunkProblem) -> str | None:
    """What a user should know of how the problem is served."""
    return None if problem.head_k_dim in _HEAD_DIMS else _chunk_stand_in.note(problem)


def _shared_bytes(problem: ChunkProblem, config: Config) -> int:
    key = CHUNK * 2 * problem.head_k_dim
    stage = key + CHUNK * 2 * 64  # of Q and V
    tiles = BUFFERS * 2 + 1  # M and P, and L
    rows = BUFFERS * VECTOR_BYTES + 2 * AUX_BYTES + 4 * SCRATCH_BYTES
    shared = config.stages * stage + key_stages(config.stages) * key + tiles * TILE_BYTES
    return shared + -(-(rows + _BARRIER_BYTES) // 1024) * 1024


def _summary_shared_bytes(problem: ChunkProblem, config: Config) -> int:
    stage = CHUNK * 2 * 2 * problem.head_k_dim
    tiles = BUFFERS + 2  # M, and L and zeros
    rows = BUFFERS * VECTOR_BYTES + 2 * AUX_BYTES + 4 * SCRATCH_BYTES
    return _chunk_summary.STAGES * stage + tiles * TILE_BYTES + -(-(rows + _BARRIER_BYTES) // 1024) * 1024


def _wide_shared_bytes(problem: ChunkProblem, config: Config) -> int:
    return max(chain_bytes(config.stages), maker_bytes(scaled_parts(problem.dtype == "bfloat16")))


def fits(problem: ChunkProblem, config: Config, device: DeviceSpec) -> bool:
    if problem.head_k_dim not in _HEAD_DIMS:
        return bool(_chunk_stand_in.kernel(problem).fits(_chunk_stand_in.stand_in(problem), config, device))
    if config.cut_above:
        ways = [replace(way, cut_above=0) for way in _ways(config)]
        return config.cut_above > 0 and config.segment > 0 and all(fits(problem, way, device) for way in ways)
    if config.makers:
        return (
            config.makers == MAKERS
            and problem.head_v_dim == DIM
            and config.stages >= 2
            and config.prefetch >= 0
            and config.segment == 0
            and config.places >= 0
            and config.ringed >= 0
            and config.places + config.ringed > 0
            and _wide_shared_bytes(problem, config) <= device.shared_bytes_per_block
        )
    return (
        (not config.paired or problem.head_v_dim == 128)
        and config.stages >= 2
        and config.prefetch >= 0
        and config.segment >= 0
        and 0 <= config.places <= places_limit(config.paired)
        and config.ringed == 0
        # Inverse waits for every second fill of such a stage only, see the notes.
        and not (config.places > 0 and config.paired and config.stages % 2 == 1)
        and _shared_bytes(problem, config) <= device.shared_bytes_per_block
        and (config.segment == 0 or _summary_shared_bytes(problem, config) <= device.shared_bytes_per_block)
    )


def default_config(problem: ChunkProblem, device: DeviceSpec) -> Any:
    """Of head dims other than 64 and 128, what the kernel that computes them takes: a Config, or the recurrent kernel's."""
    if problem.head_k_dim not in _HEAD_DIMS:
        return _chunk_stand_in.kernel(problem).default_config(_chunk_stand_in.stand_in(problem), device)
    narrow = _narrow_config(problem, device)
    is_whole = narrow.segment == 0 or narrow.cut_above > 0
    return _wide(narrow, device) if is_whole and is_wide(problem, device) else narrow


def _narrow_config(problem: ChunkProblem, device: DeviceSpec) -> Config:
    """Every stage that fits: a chunk is loaded, prepared and handed over while the chunks before it are worked on."""
    segment, cut_above = default_split(problem, device)
    paired = problem.head_v_dim == 128
    places = 0 if segment else default_places(problem, paired, device)
    return Config(
        paired=paired,
        stages=_STAGES,
        prefetch=default_prefetch(problem, segment, places),
        segment=segment,
        places=places,
        cut_above=cut_above,
    )


def _wide(narrow: Config, device: DeviceSpec) -> Config:
    places, ringed = wide_places(device)
    return replace(narrow, stages=3, prefetch=0, makers=MAKERS, places=places, ringed=ringed)


def configs(problem: ChunkProblem, device: DeviceSpec) -> list[Any]:
    if problem.head_k_dim not in _HEAD_DIMS:
        return list(_chunk_stand_in.kernel(problem).configs(_chunk_stand_in.stand_in(problem), device))
    return [config for config in _space(problem, device) if fits(problem, config, device)]


def _space(problem: ChunkProblem, device: DeviceSpec) -> Iterator[Config]:
    """Where lengths that nobody knows decide, no table should: both ways are in all of it."""
    narrow = _narrow_config(problem, device)
    splits = splits_to_try(problem, device)
    if narrow.cut_above:
        for segment, cut_above in splits:
            if segment != narrow.segment:
                yield replace(default_config(problem, device), segment=segment, cut_above=cut_above)
    else:
        for (segment, _), prefetch in product(splits, (0, 2)):
            yield replace(narrow, segment=segment, prefetch=prefetch, places=0)
        narrow = replace(narrow, segment=0)
    for paired, stages, prefetch in product((False, True), (2, 3, 4), (0, 2, 4)):
        for places in sorted({0, default_places(problem, paired, device)}):
            yield replace(narrow, paired=paired, stages=stages, prefetch=prefetch, places=places)
    if problem.head_v_dim == DIM:
        for stages, prefetch in product((2, 3), (0, 2)):
            yield replace(_wide(narrow, device), stages=stages, prefetch=prefetch)


def _ways(config: Config) -> tuple[Config, ...]:
    """What is launched, one after the other: whole sequences and segments, each of which may find that it is the other's turn; or
    the configuration itself."""
    return _both_ways(config) if config.cut_above else (config,)


@functools.lru_cache(maxsize=256)  # every launch asks
def _both_ways(config: Config) -> tuple[Config, Config]:
    return replace(config, segment=0), replace(config, stages=_STAGES, makers=0, places=0, ringed=0)


def workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    """One of the ways works at a time."""
    if problem.head_k_dim not in _HEAD_DIMS:
        return _chunk_stand_in.workspace_bytes(problem, config)
    return max(_workspace_bytes(problem, way) for way in _ways(config))


def _workspace_bytes(problem: ChunkProblem, config: Config) -> int:
    if config.makers:
        return ring_bytes(_ringed(problem.num_sequences * problem.num_state_heads, config))
    if config.segment == 0:
        return 0
    slots = num_slots(problem.num_tokens, problem.num_sequences, CHUNK * config.segment)
    return slots * problem.num_state_heads * summary_bytes(problem.head_k_dim)


def _uses_workspace(config: Config) -> bool:
    return bool(config.segment or config.makers)


def _ringed(groups: int, config: Config) -> int:
    """Of so many sequences and heads of the wide form, those whose tiles go through the L2 cache."""
    rest = max(groups - config.places, 0)
    return rest if config.places == 0 or rest <= config.ringed else 0


def compile(problem: ChunkProblem, config: Config) -> dict[str, bytes]:
    if problem.head_k_dim not in _HEAD_DIMS:
        return _chunk_stand_in.compile(problem, config)
    ways = dict(zip((ENTRY, _CUT_ENTRY), _ways(config), strict=False))
    return {entry: build.library(entry, _kernel(problem, way).launch, *_arguments(problem, way)) for entry, way in ways.items()}


def _kernel(problem: ChunkProblem, config: Config) -> FusedChunk:
    heads = problem.num_state_heads
    has_gate, has_beta = problem.gate_dtype is not None, problem.beta_dtype is not None
    kernel: Callable[..., FusedChunk] = SplitChunk if config.segment > 0 else FusedChunk
    if config.makers:
        kernel = functools.partial(WideChunk, fours=config.places > 0, ringed=config.ringed > 0)
    return kernel(
        heads=heads,
        q_group=heads // problem.num_q_heads,
        k_group=heads // problem.num_k_heads,
        v_group=heads // problem.num_v_heads,
        dim=problem.head_k_dim,
        dtype=CUTE_DTYPES[problem.dtype],
        has_gate=has_gate,
        raw_gate=has_gate and problem.use_gate,
        has_beta=has_beta,
        raw_beta=has_beta and problem.use_beta_sigmoid,
        normalize=problem.use_qk_l2norm,
        v_first=problem.state_v_first,
        pooled=problem.pooled,
        has_initial=problem.has_initial_state,
        has_mask=problem.has_mask,
        has_final=problem.has_final_state,
        has_final_indices=problem.has_final_indices,
        has_checkpoints=problem.has_checkpoints,
        num_state=1,
        paired=config.paired,
        stages=config.stages,
        prefetch=config.prefetch,
        registers=_REGISTERS,
        deals=config.places > 0 and config.segment == 0 and config.makers == 0,
        decides=config.cut_above > 0,
    )


def _arguments(problem: ChunkProblem, config: Config) -> list[Any]:
    """Fake tensors and scalars in the order of the compiled function. An absent tensor is stood in for by cu_seqlens."""
    heads = problem.num_state_heads
    num_tokens = cute.sym_int()

    def bounds() -> Any:
        return fake(problem.cu_seqlens_dtype, cute.sym_int(), last=1)

    def tokens(count: int, dim: int) -> Any:
        return fake(problem.dtype, 1, num_tokens, count, dim, last=1, align=16)

    def gate(dtype: str | None) -> Any:
        return bounds() if dtype is None else fake(dtype, 1, num_tokens, heads)

    def per_head() -> Any:
        return fake("float32", heads, last=1) if problem.use_gate and problem.gate_dtype is not None else bounds()

    def state(dtype: str | None) -> Any:
        if dtype is None:
            return bounds()
        inner = (problem.head_k_dim, problem.head_v_dim)
        return fake(dtype, cute.sym_int64(), heads, *(inner[::-1] if problem.state_v_first else inner), last=1)

    def rows(dtype: str | None) -> Any:
        return bounds() if dtype is None else fake(dtype, cute.sym_int())

    def checkpoints(dtype: str | None) -> Any:
        return fake(dtype, cute.sym_int(), columns, last=1) if problem.has_checkpoints and dtype is not None else bounds()

    columns = cute.sym_int()
    workspace = make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), stride=(1,), assumed_align=256)
    final_dtype = problem.state_dtype if problem.pooled else "float32"
    return [
        tokens(problem.num_q_heads, problem.head_k_dim),
        tokens(problem.num_k_heads, problem.head_k_dim),
        tokens(problem.num_v_heads, problem.head_v_dim),
        gate(problem.gate_dtype),
        gate(problem.beta_dtype),
        per_head(),
        per_head(),
        state(problem.state_dtype if problem.has_initial_state else None),
        rows(problem.index_dtype),
        rows("bool" if problem.has_mask else None),
        state(final_dtype if problem.has_final_state else None),
        rows(problem.index_dtype if problem.has_final_indices else None),
        checkpoints("int32"),
        checkpoints(problem.index_dtype),
        bounds(),
        tokens(heads, problem.head_v_dim),
        *([workspace] if _uses_workspace(config) else []),
        cutlass.Float32(1.0),
        cutlass.Int64(-1),
        # Tokens of a segment, slots; or places, or what goes through the ring.
        *([cutlass.Int32(CHUNK), cutlass.Int32(1)] if config.segment else [cutlass.Int32(1)]),
        cutlass.Int32(0),  # cut_above
    ]


def launch(
    compiled: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    initial_state: Any,
    state_indices: Any,
    has_initial_state: Any,
    final_state: Any,
    final_state_indices: Any,
    cu_seqlens: Any,
    checkpoint_offsets: Any,
    checkpoint_slots: Any,
    out: Any,
    workspace: Any,
    scale: float,
    null_slot: int,
) -> None:
    problem: ChunkProblem = compiled.problem
    num_sequences = cu_seqlens.shape[0] - 1
    num_tokens = q.shape[1]
    if num_tokens == 0 or num_sequences == 0:  # an empty tensor has no address to pass
        out.zero_()
        _states_without_tokens(problem, initial_state, has_initial_state, final_state, num_sequences)
        return
    if problem.head_k_dim not in _HEAD_DIMS:
        _chunk_stand_in.launch(
            compiled, q, k, v, g, beta, A_log, dt_bias, initial_state, state_indices, has_initial_state, final_state,
            final_state_indices, cu_seqlens, checkpoint_offsets, checkpoint_slots, out, workspace, scale, null_slot,
        )  # fmt: skip
        return
    absent = cu_seqlens  # stands in for every tensor that the problem's flags leave out
    has_gate = problem.gate_dtype is not None
    raw = has_gate and problem.use_gate
    tensors = (
        q,
        k,
        v,
        g if has_gate else absent,
        beta if problem.beta_dtype is not None else absent,
        A_log if raw else absent,
        dt_bias if raw else absent,
        initial_state if problem.has_initial_state else absent,
        state_indices if problem.pooled else absent,
        has_initial_state if problem.has_mask else absent,
        final_state if problem.has_final_state else absent,
        final_state_indices if problem.has_final_indices else absent,
        checkpoint_offsets if problem.has_checkpoints else absent,
        checkpoint_slots if problem.has_checkpoints else absent,
        cu_seqlens,
        out,
    )
    for entry, way in zip((ENTRY, _CUT_ENTRY), _ways(compiled.config), strict=False):
        scalars = _scalars(way, problem, num_tokens, num_sequences)
        if _uses_workspace(way):
            compiled.functions[entry](*tensors, workspace, scale, null_slot, *scalars)
        else:
            compiled.functions[entry](*tensors, scale, null_slot, *scalars)


def _scalars(config: Config, problem: ChunkProblem, num_tokens: int, num_sequences: int) -> tuple[int, ...]:
    """The last ones of a launch."""
    if config.segment:
        tokens = CHUNK * config.segment
        return tokens, num_slots(num_tokens, num_sequences, tokens), config.cut_above
    if config.makers:
        return _ringed(problem.num_state_heads * num_sequences, config), config.cut_above
    return config.places or _ALL_PLACES, config.cut_above


def _states_without_tokens(problem: ChunkProblem, initial_state: Any, mask: Any, final_state: Any, num_sequences: int) -> None:
    """A call without tokens leaves a pool alone; new final states are what the sequences start from."""
    if problem.pooled or final_state is None:
        return
    if initial_state is None:
        final_state.zero_()
        return
    final_state.copy_(initial_state)
    if mask is not None:
        final_state.masked_fill_(mask[:num_sequences].logical_not().view(-1, 1, 1, 1), 0.0)
