"""Sizes of the forms of a prefill step that the choice of one needs."""

from typing import Any

from gdn.ops.layer_step.problem import GdnPrefillProblem
from kernels_cute.chunk.shape import CHUNK

PART_BYTES = 16  # of a thread's part of a row


def is_plain(problem: GdnPrefillProblem) -> bool:
    """Whether the convolution takes the fewest registers."""
    return problem.dtype == "bfloat16" and problem.bias_dtype is None and problem.silu and not problem.has_checkpoints


def conv_batch_fits(problem: GdnPrefillProblem, batch: int) -> bool:
    """Whether a thread of the convolution alone has registers for a batch of rows: not for 4 beside a float32 bias and a mask, or
    beside a bias and a float32 filter."""
    if batch <= 2 or problem.bias_dtype is None:
        return True
    return problem.weight_dtype != "float32" and not (problem.bias_dtype == "float32" and problem.has_mask)


def resident_threads(problem: GdnPrefillProblem) -> int:
    """Threads of an SM that registers must allow, in small blocks: as many as there are without spills."""
    if not is_plain(problem):
        return 384
    return 640 if problem.conv_channels_contiguous else 512  # a window's channels elsewhere take an address each


CLUSTER = 2  # blocks: with pairs the SMs that are left are pairs, too, which the chunk kernel's clusters need


def block_threads(problem: GdnPrefillProblem) -> int:
    """Threads of a block: as many as the registers of an SM allow without spills."""
    return 512 if is_plain(problem) else 384


def words(num_tokens: Any, num_sequences: Any, heads: int) -> Any:
    """Number of words: one a chunk, and one a chunk and head."""
    return (num_tokens // CHUNK + num_sequences) * (1 + heads)


def words_bytes(num_words: Any) -> Any:
    """Bytes of the words, in whole lines."""
    return (num_words * 4 + 255) // 256 * 256
