"""Kernel of expand_topk_groups.py, which has its formulas and tensors: the arguments to compile for, and the body."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from gdn.ops.indexer.problem import ExpandTopkGroupsParams, ExpandTopkGroupsProblem
from kernels_cute.common import build
from kernels_cute.common.memory import fake, narrowed


def _fakes(problem: ExpandTopkGroupsProblem) -> ExpandTopkGroupsParams:
    tokens = cute.sym_int()
    group_indices, positions = fake(problem.group_dtype, tokens, None), fake(problem.position_dtype, tokens)
    return ExpandTopkGroupsParams(group_indices, positions, out=fake("int32", tokens, None, last=1))


class _ExpandTopkGroups(build.Kernel, params=ExpandTopkGroupsParams):
    def __init__(self, problem: ExpandTopkGroupsProblem, config: Any) -> None:
        self.threads, self.groups, self.ratio = config.threads, config.groups, problem.ratio
        self.warps = config.threads // 32
        self.step = config.threads * config.groups
        self.limits = {"preferred_smem_carveout": 25}  # percent

    def blocks(self, params: ExpandTopkGroupsParams) -> Any:
        return params.out.shape[0]

    @cute.kernel
    def kernel(self, params: ExpandTopkGroupsParams):
        token, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.utils.SmemAllocator()
        sList = smem.allocate_tensor(Int32, cute.make_layout(self.step), 16)
        sCounts = smem.allocate_tensor(Int32, cute.make_layout(self.warps), 16)
        position = narrowed(params.positions[token])
        k = Int32(params.group_indices.shape[1])
        written = Int32(0)  # groups so far
        for first in cutlass.range(0, k, self.step, unroll=1):
            count = self.fill_list(params.group_indices, token, first, k, thread, sList, sCounts)
            for j in cutlass.range(thread, count * self.ratio, self.threads, unroll=4):
                group = j // self.ratio
                params.out[token, written * self.ratio + j] = sList[group] * self.ratio + (j - group * self.ratio)
            written += count
            if first + self.step < k:
                cute.arch.sync_threads()  # the list is filled again
        tail_start = (position + 1) // self.ratio * self.ratio
        tail = Int32(0)
        if position >= 0:
            tail = position + 1 - tail_start
        for j in cutlass.range(written * self.ratio + thread, params.out.shape[1], self.threads, unroll=1):
            within = j - written * self.ratio
            value = Int32(-1)
            if within < tail:
                value = tail_start + within
            params.out[token, j] = value

    @cute.jit
    def fill_list(self, group_indices: cute.Tensor, token: Int32, first: Int32, k: Int32, thread: Int32, sList, sCounts):
        """Packs those of the groups first .. first + step that are present into the list; returns their number."""
        warp, lane = thread // 32, thread % 32
        start = first + warp * (32 * self.groups)
        rGroups = cute.make_rmem_tensor(self.groups, Int32)
        rPlaces = cute.make_rmem_tensor(self.groups, Int32)
        rGroups.fill(-1)
        for u in cutlass.range_constexpr(self.groups):
            column = start + u * 32 + lane
            if column < k:
                rGroups[u] = narrowed(group_indices[token, column])
        before = (Int32(1) << lane) - 1  # mask of the lower lanes
        total = Int32(0)
        for u in cutlass.range_constexpr(self.groups):
            there = cute.arch.vote_ballot_sync(rGroups[u] >= 0)
            rPlaces[u] = total + cute.arch.popc(there & before)
            total += cute.arch.popc(there)
        base, count = Int32(0), total
        if cutlass.const_expr(self.warps > 1):
            if lane == 0:
                sCounts[warp] = total
            cute.arch.sync_threads()
            count = Int32(0)
            for w in cutlass.range_constexpr(self.warps):
                if w == warp:
                    base = count
                count += sCounts[w]
        for u in cutlass.range_constexpr(self.groups):
            if rGroups[u] >= 0:
                sList[base + rPlaces[u]] = rGroups[u]
        cute.arch.sync_threads()
        return count


def library(problem: ExpandTopkGroupsProblem, config: Any) -> dict[str, bytes]:
    return build.one_entry(problem.op, _ExpandTopkGroups(problem, config), _fakes(problem))
