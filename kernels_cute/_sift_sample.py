"""Gathers a sample of the keys, and each row's range of it.

Key j of the sample is one of keys [16 j, 16 j + 16), a different one from group to group, so that nothing that repeats along
the keys meets the sample always or never.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kernels_cute._sift_rows import SAMPLED

THREADS = 256


class SiftSample:
    """One thread a word of the sampled keys; the first of them see to scales and ranges too."""

    def __init__(self, has_k_scale: bool, row_words: int):
        self.has_k_scale, self.row_words = has_k_scale, row_words

    @cute.jit
    def launch(self, k, k_scale, starts, ends, sampled_k, sampled_scale, sampled_starts, sampled_ends, least: Int32, stream):
        words = cute.size(sampled_k, mode=[0]) * self.row_words
        blocks = (cutlass.max(words, cute.size(starts, mode=[0])) + (THREADS - 1)) // THREADS
        self.kernel(k, k_scale, starts, ends, sampled_k, sampled_scale, sampled_starts, sampled_ends, least).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), preferred_smem_carveout=25, stream=stream
        )

    @cute.kernel
    def kernel(
        self, k: cute.Tensor, k_scale: cute.Tensor, starts: cute.Tensor, ends: cute.Tensor, sampled_k: cute.Tensor,
        sampled_scale: cute.Tensor, sampled_starts: cute.Tensor, sampled_ends: cute.Tensor, least: Int32,
    ):  # fmt: skip
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        index = block * THREADS + thread
        num_keys, samples = Int32(cute.size(k, mode=[0])), Int32(cute.size(sampled_k, mode=[0]))
        sample, word = index // self.row_words, index % self.row_words
        if sample < samples:
            key = cutlass.min(self.key_of(sample), num_keys - 1)  # beyond the keys: seen by no row
            source = cute.make_tensor(k.iterator + (Int64(key) * self.row_words + word), cute.make_layout(1))
            target = cute.make_tensor(sampled_k.iterator + (Int64(sample) * self.row_words + word), cute.make_layout(1))
            target[0] = source[0]
        if cutlass.const_expr(self.has_k_scale):
            if index < samples:
                sampled_scale[index, 0] = k_scale[cutlass.min(self.key_of(index), num_keys - 1), 0]
        if index < cute.size(starts, mode=[0]):
            first, end = cutlass.max(starts[index], 0), cutlass.min(ends[index], num_keys)
            sampled_first, sampled_end = Int32(0), Int32(0)
            if first < end and end - first > least:
                sampled_first, sampled_end = self.before(first), self.before(end)
            sampled_starts[index], sampled_ends[index] = sampled_first, sampled_end

    @cute.jit
    def key_of(self, sample):
        return sample * SAMPLED + ((sample * 5 + sample // SAMPLED * 3) & (SAMPLED - 1))

    @cute.jit
    def before(self, key):
        """Sampled keys before a key."""
        sample = key // SAMPLED
        if self.key_of(sample) < key:
            sample = sample + 1
        return sample
