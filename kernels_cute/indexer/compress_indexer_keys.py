"""Compressed keys: the mean of each finished group of `ratio` tokens, normed and rotated, into the cache; raw keys into a ring.

    key = rope(rms_norm(mean of the group's raw keys, rounded to their dtype), position of the group's first token)

Tensors: raw_k [L, kv_heads, D] bfloat16 | float16, ring [sequences, size, kv_heads, D] with the raw key of position p at row
p % size, positions, ring_slots, slot_mapping [L], cache [pages, elements of a page].
`gdn.ops.indexer.problem.CompressIndexerKeysParams` is the contract; `rows.py` describes a row in registers.

A warp owns a token. If the token ends a group, the warp computes the group's key; members from before this call come from the
ring. It also stores the token's raw key in the ring, unless a later token of the call takes the same row.

Old rows are read before they are overwritten, without a barrier between blocks: rows that the group across the call's start
reads are written only by the warp that read them. Their last owner leaves them alone: DESIGN.md says how it knows.
"""

from dataclasses import dataclass

from gdn.device import DeviceSpec
from gdn.ops.indexer.problem import CompressIndexerKeysProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import space
from kernels_cute.indexer import forms

launch, workspace_bytes = choice.launch, choice.no_workspace


_MOST_RATIO = 16  # a lane holds the rows of all members at once: 8 registers each


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block: a warp a token


def refusal(problem: CompressIndexerKeysProblem) -> str | None:
    indices = {"positions": problem.position_dtype, "ring_slots": problem.ring_slot_dtype, "slot_mapping": problem.slot_dtype}
    others = {"cos_sin": problem.cos_sin_dtype, "k_norm": problem.k_norm_dtype}
    refused = forms.refusal(problem.head_dim, {"raw_k": problem.dtype}, problem.cache_dtype, indices, others)
    if refused is not None:
        return refused
    if not problem.ring_aligned:
        return "requires a ring whose rows start at multiples of 16 bytes, got one whose rows do not"
    if not 1 <= problem.ratio <= _MOST_RATIO:
        return f"requires a ratio from 1 to {_MOST_RATIO}, got {problem.ratio}"
    return forms.rotation_refusal(problem.rotary_dim, problem.head_dim)


def default_config(problem: CompressIndexerKeysProblem, device: DeviceSpec) -> Config:
    """Large blocks for few tokens, which wait for little but the launch; smaller ones where all SMs are busy, so that they end
    together."""
    return Config(128 if problem.num_tokens >= 8 * device.num_sms else 256)


fits, configs = space(Config, threads=(32, 64, 128, 256))


def compile(problem: CompressIndexerKeysProblem, config: Config) -> dict[str, bytes]:
    from kernels_cute.indexer.compress_indexer_keys_kernel import library

    return library(problem, config)
