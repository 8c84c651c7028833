"""One prefill step of a GDN layer: from the projections' outputs to the input of out_proj.

    [q | k | v] = silu(conv(mixed_qkv))        with its window of width - 1 inputs in a slot
    o, S = the chunk form of the gated delta rule on q, k, v, a, b    (kernels_cute.chunk), S of a slot
    out = o / sqrt(mean(o * o) + eps) * norm_weight * silu(z)    (without norm_weight: o)

Forms: launches of the kernels of the three operators one after the other, in one entry (in_turn.py), or an entry each where the
chunk operator has launches of its own (parts.py); the convolution, then the chunk kernel with the norm in it (normed.py); or side
by side, each some chunks later than the one before (side_by_side.py). The last two, and the first with sequences in segments, may
leave sequences of one token to the decode step's kernel (one_token.py), and normed.py those of up to 64 tokens to small blocks
(short/).
DESIGN.md says when which one runs. `GdnPrefillParams` has the contract of each tensor.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gdn.device import DeviceSpec
from gdn.ops.layer_step.problem import GdnPrefillParams, GdnPrefillProblem
from gdn.problem import DTYPE_BYTES
from kernels_cute import chunk
from kernels_cute.chunk import kernel as chunk_kernel
from kernels_cute.chunk.kernel import Config as ChunkConfig
from kernels_cute.common.choice import FLOAT_DTYPES, unserved
from kernels_cute.conv1d import prefill as conv
from kernels_cute.gdn_prefill import parts, plan, shape
from kernels_cute.gdn_steps import rms_norm_gated as norm

# As the chunk kernel, which takes half of the time: for other sizes another of its designs may be faster.
TUNED_WITHIN = chunk.TUNED_WITHIN

_CONV, _NORM = "gdn_cute_prefill_conv", "gdn_cute_prefill_norm"  # entries; the others are the chunk kernel's
_IN_TURN = "gdn_cute_prefill_in_turn"  # the only entry of that form
_SIDE_BY_SIDE = "gdn_cute_prefill"  # the only entry of that form
_NORMED = "gdn_cute_prefill_normed"  # the only entry of that form
_LARGEST = 128  # head dim: above it the chunk operator has tiles of another kind


@dataclass(frozen=True)
class Config(ChunkConfig):
    """The chunk kernel's, and those of the other two kernels under their names."""

    # Blocks of the convolution, an SM each, next to the chunk kernel with two SMs a head; 0: one kernel after the other.
    num_conv_blocks: int = field(default=0, metadata={"compiled": bool})

    # 1: the chunk kernel norms its outputs, with two SMs a head, after a convolution whose rows go through shared memory.
    norm_in_chunk: int = field(default=0, metadata={"compiled": bool})

    # Sequences of at most so many tokens are those of other launches: of one token of the decode step's kernel, of more of small
    # blocks. 0, 1, or with norm_in_chunk 64; 0 where whole sequences are those of launches one after the other.
    max_short_tokens: int = 0

    # With max_short_tokens and segments, else 0: sequences of more tokens than that are in segments if they are at most so many,
    # for which the launches have blocks, else whole.
    max_long_sequences: int = field(default=0, metadata={"compiled": bool})

    conv_threads: int = 128
    conv_rows: int = 32
    conv_batch: int = 4
    conv_min_threads_per_sm: int = 384
    norm_threads: int = 128
    norm_rows: int = 4

    @property
    def conv(self) -> conv.Config:
        return conv.Config(self.conv_threads, self.conv_rows, self.conv_batch, self.conv_min_threads_per_sm)

    @property
    def norm(self) -> norm.Config:
        return norm.Config(self.norm_threads, self.norm_rows)


def refusal(problem: GdnPrefillProblem) -> str | None:
    """None where the kernels of all three steps serve the problem, else why not."""
    k, v = problem.head_k_dim, problem.head_v_dim
    if k != v or k % 8 or not 8 <= k <= _LARGEST:
        return f"requires K = V, a multiple of 8 up to {_LARGEST}, got K={k}, V={v}"
    return (
        unserved({FLOAT_DTYPES: {"A_log": problem.A_log_dtype, "dt_bias": problem.dt_bias_dtype}})
        or conv.refusal(parts.conv_problem(problem))
        or chunk.refusal(parts.chunk_problem(problem))
        or (norm.refusal(parts.norm_problem(problem)) if problem.has_norm else None)
    )


def note(problem: GdnPrefillProblem) -> str | None:
    return chunk.note(parts.chunk_problem(problem))


def fits(problem: GdnPrefillProblem, config: Config, device: DeviceSpec) -> bool:
    is_in_turn = not (config.num_conv_blocks or config.norm_in_chunk)
    if config.max_long_sequences and not (is_in_turn and config.max_short_tokens and config.split_chunks):
        return False
    if config.num_conv_blocks:
        return plan.side_by_side_fits(problem, config, device)
    if not conv.fits(parts.conv_problem(problem), config.conv, device):
        return False
    if config.norm_in_chunk:
        return plan.normed_fits(problem, config, device)
    if config.max_short_tokens:  # rows of the staged convolution go through shared memory
        if not plan.in_segments_fits(problem, config, device):
            return False
    elif not shape.conv_batch_fits(problem, config.conv_batch):
        return False
    if problem.has_norm and not norm.fits(parts.norm_problem(problem), config.norm, device):
        return False
    return bool(chunk.fits(parts.chunk_problem(problem), plan.bounded(config), device))


def default_config(problem: GdnPrefillProblem, device: DeviceSpec) -> Config:
    """In segments where one sequence is known to be long; side by side where that is faster by the model; with the norm in the
    chunk kernel where work tiles take turns on all SMs, and a launch for short sequences where they are many; else the default of
    each kernel."""
    if (known := _of_known_lengths(problem, device)) is not None:
        return known
    if problem.longest:
        problem = replace(problem, longest=0)
    apart = _with_steps(problem, chunk.default_config(parts.chunk_problem(problem), device), device)
    short = plan.with_short(problem, device) if plan.has_short(problem, device) else []
    changes = plan.side_by_side(problem, device) or next((one for one in short if one["max_short_tokens"] > 1), None)
    changes = changes or plan.normed(problem, device)
    return apart if changes is None else replace(apart, **changes)


def configs(problem: GdnPrefillProblem, device: DeviceSpec) -> list[Config]:
    """The chunk kernel's, with the default of the other two, and those of the other forms."""
    apart = [_with_steps(problem, config, device) for config in chunk.configs(parts.chunk_problem(problem), device)]
    if (segments := plan.in_segments(problem, device)) is not None:
        apart.insert(0, replace(apart[0], **segments))
    normed = plan.normed(problem, device)
    others = (*([] if normed is None else [normed]), *plan.with_short(problem, device), *plan.all_side_by_side(problem, device))
    return [config for config in (*apart, *(replace(apart[0], **changes) for changes in others)) if fits(problem, config, device)]


def suits(problem: GdnPrefillProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether a tuned entry may serve these sizes. Tables hold times of equal lengths."""
    return _of_known_lengths(problem, device) is None


def _of_known_lengths(problem: GdnPrefillProblem, device: DeviceSpec) -> Config | None:
    """The default where the host knows of one long sequence, which the others wait for; None where that changes nothing."""
    if not problem.longest:
        return None
    rule = parts.chunk_problem(problem)
    segments = plan.in_segments(problem, device)
    if segments is None and (plan.has_rows_of_one_token(problem) or not chunk.is_cut(rule, device)):
        return None
    return replace(_with_steps(problem, chunk.default_config(rule, device), device), **segments or {})


def _with_steps(problem: GdnPrefillProblem, config: ChunkConfig, device: DeviceSpec) -> Config:
    own = conv.default_config(parts.conv_problem(problem), device)
    if not shape.conv_batch_fits(problem, own.batch):
        own = replace(own, batch=2)
    steps_of = {f"conv_{name}": value for name, value in vars(own).items()}
    if problem.has_norm:
        last = norm.default_config(parts.norm_problem(problem), device)
        steps_of |= {"norm_threads": last.threads, "norm_rows": last.rows}
    return Config(**vars(config), **steps_of)


def _is_one_entry(problem: GdnPrefillProblem) -> bool:
    """Whether the three steps one after the other are one entry. Head dims other than 64 and 128 have launches of their own in
    the chunk operator."""
    return problem.head_k_dim in chunk_kernel.HEAD_DIMS


def workspace_bytes(problem: GdnPrefillProblem, config: Config) -> int:
    if config.num_conv_blocks:
        words = shape.words(problem.num_tokens, problem.num_sequences, problem.num_v_heads)
        return int(shape.words_bytes(words)) + parts.rows_bytes(problem)
    if config.norm_in_chunk:
        return parts.rows_bytes(problem)
    return parts.rows_bytes(problem) + chunk.workspace_bytes(parts.chunk_problem(problem), config)


def compile(problem: GdnPrefillProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.gdn_prefill import library

    if config.num_conv_blocks:
        return {_SIDE_BY_SIDE: library.side_by_side(_SIDE_BY_SIDE, problem, config)}
    if config.norm_in_chunk:
        return {_NORMED: library.normed(_NORMED, problem, config)}
    if _is_one_entry(problem):
        return {_IN_TURN: library.in_turn(_IN_TURN, problem, config)}
    found = {**library.conv(_CONV, problem, config), **chunk.compile(parts.chunk_problem(problem), config)}
    if problem.has_norm:
        found |= library.norm(_NORM, problem, config)
    return found


def launch(compiled: Any, params: GdnPrefillParams) -> None:
    problem, functions, config = compiled.problem, compiled.functions, compiled.config
    if config.num_conv_blocks:
        functions[_SIDE_BY_SIDE](*params, config.num_conv_blocks, config.num_persistent_clusters or plan.ALL_CLUSTERS)
        return
    if config.norm_in_chunk:
        functions[_NORMED](*params, config.num_persistent_clusters or plan.ALL_CLUSTERS)
        return
    length = params.mixed_qkv.shape[0]
    if _is_one_entry(problem):
        sequences = params.cu_seqlens.shape[0] - 1
        sizes = (problem.num_v_heads, length, min(sequences, config.max_long_sequences or sequences))
        variants = chunk_kernel.variants(plan.bounded(config))
        functions[_IN_TURN](*params, *[one for variant in variants for one in chunk_kernel.scalars(variant, *sizes)])
        return
    size = length * problem.dim * DTYPE_BYTES[problem.dtype]
    rows = params.workspace[:size].view(getattr(torch, problem.dtype)).view(length, problem.dim)
    rest = params.workspace[parts.whole(size) :] if params.workspace.shape[0] > parts.whole(size) else None
    functions[_CONV](*parts.conv_params(problem, params, rows))
    rule = {name: function for name, function in functions.items() if name not in (_CONV, _NORM)}
    chunk.launch_with(rule, parts.chunk_problem(problem), config, parts.chunk_params(problem, params, rows, rest))
    if problem.has_norm:
        functions[_NORM](*parts.norm_params(problem, params))
