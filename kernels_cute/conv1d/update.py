"""Causal depthwise convolution of a decode step, with its windows in a pool of slots.

    y[t] = activation(bias + sum_j weight[:, j] * x[t - (width - 1) + j])

Tensors: x, out [L, dim] bfloat16 | float16; weight [dim, width]; bias [dim]; conv_state [slots, dim, columns], oldest input
first. `gdn.problems.Conv1dUpdateProblem` is the contract.

A block owns one sequence and `threads * 8` channels. A thread reads the whole window of its channels before it writes any
column of them, and no other thread touches those: windows may overlap their own shifted copy without a barrier. In a draft
tree the inputs before a node are fetched by walking its ancestors, which are few and in cache, so no window but the first
is kept in registers.
"""

from dataclasses import dataclass
from typing import Any

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from gdn.device import DeviceSpec
from gdn.problems import Conv1dUpdateProblem
from kernels_cute.common.memory import fake
from kernels_cute.conv1d import convolution as _convolution
from kernels_cute.conv1d.convolution import CHANNELS, Convolution

# How near a tuned entry must be (see gdn.runtime.tuned): tokens and sequences 1.7 times as many, or as few. Wide blocks of a
# large batch would leave most SMs of a small one idle.
TUNED_WITHIN = 1.5


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block, 8 channels each
    batch: int  # rows of x that a thread loads at once: as many as a sequence has tokens, or a few


def refusal(problem: Conv1dUpdateProblem) -> str | None:
    """None where this kernel serves the problem, else why not."""
    return _convolution.refusal(problem)


def fits(problem: Conv1dUpdateProblem, config: Config, device: DeviceSpec) -> bool:
    """Whether the configuration can be compiled and launched."""
    if config.threads not in (32, 64, 128, 256) or config.batch not in (1, 2, 4):
        return False
    if config.batch > 1 and (problem.cu_seqlens_dtype is None or problem.has_parent):
        return False  # one token at a time
    return config.threads == 32 or config.threads * CHANNELS < 2 * problem.dim


def configs(problem: Conv1dUpdateProblem, device: DeviceSpec) -> list[Config]:
    """Every feasible configuration."""
    space = [Config(threads, batch) for threads in (32, 64, 128, 256) for batch in (1, 2, 4)]
    return [config for config in space if fits(problem, config, device)]


def default_config(problem: Conv1dUpdateProblem, device: DeviceSpec) -> Config:
    """All tokens of a sequence at once up to 4, and blocks wide enough that there are two per SM."""
    per_sequence = problem.num_tokens / max(problem.num_sequences, 1)
    batch = 4 if per_sequence > 2 else 2 if per_sequence > 1 else 1
    feasible = [config for config in configs(problem, device) if config.batch == batch or problem.has_parent]
    feasible = feasible or configs(problem, device)
    enough = [
        config
        for config in feasible
        if problem.num_sequences * _convolution.slices(problem.dim, config.threads) >= 2 * device.num_sms
        and config.threads <= 128
    ]
    return max(enough, key=lambda config: config.threads) if enough else feasible[0]


def workspace_bytes(problem: Conv1dUpdateProblem, config: Config) -> int:
    return 0


def compile(problem: Conv1dUpdateProblem, config: Config) -> dict[str, bytes]:
    """The one kernel, built for sm_90a."""
    return {"conv1d_update": build.library("conv1d_update", _Conv1dUpdate(problem, config), *_arguments(problem))}


def launch(
    compiled: Any,
    x: Any,
    weight: Any,
    bias: Any,
    conv_state: Any,
    state_indices: Any,
    num_accepted_tokens: Any,
    cu_seqlens: Any,
    parent_token: Any,
    out: Any,
    null_slot: int,
) -> None:
    problem: Conv1dUpdateProblem = compiled.problem
    if x.shape[0] == 0 or (cu_seqlens is not None and cu_seqlens.shape[0] == 1):  # an empty tensor has no address to pass
        out.zero_()
        return
    absent = weight  # stands in for every tensor that the problem's flags leave out
    compiled.functions["conv1d_update"](
        x,
        weight,
        absent if problem.bias_dtype is None else bias,
        conv_state,
        absent if problem.index_dtype is None else state_indices,
        num_accepted_tokens if problem.has_accepted else absent,
        absent if problem.cu_seqlens_dtype is None else cu_seqlens,
        parent_token if problem.has_parent else absent,
        out,
        null_slot,
    )


def _arguments(problem: Conv1dUpdateProblem) -> list[Any]:
    """Fake tensors and scalars in the order of the compiled function."""
    num_tokens = cute.sym_int()
    weight, bias = _convolution.fake_filter(problem)

    def vector(dtype: str | None, contiguous: bool) -> Any:
        return weight if dtype is None else fake(dtype, cute.sym_int(), last=1 if contiguous else None)

    indices = vector(problem.index_dtype, False)
    if problem.index_dtype is not None and problem.has_columns:
        indices = fake(problem.index_dtype, cute.sym_int(), cute.sym_int())
    return [
        fake(problem.dtype, num_tokens, problem.dim, last=1),
        weight,
        bias,
        _convolution.fake_slots(problem),
        indices,
        vector("int32" if problem.has_accepted else None, False),
        vector(problem.cu_seqlens_dtype, True),
        vector("int32" if problem.has_parent else None, True),
        fake(problem.dtype, num_tokens, problem.dim, last=1),
        cutlass.Int64(-1),
    ]


class _Conv1dUpdate(Convolution):
    """The kernel for one problem and configuration; attributes are compile-time constants."""

    def __init__(self, problem: Conv1dUpdateProblem, config: Config) -> None:
        super().__init__(problem, config.threads, config.batch)
        self.has_offsets, self.has_indices = problem.cu_seqlens_dtype is not None, problem.index_dtype is not None
        self.has_columns, self.has_accepted = problem.has_columns, problem.has_accepted
        self.has_parent, self.keeps_every_input = problem.has_parent, problem.keeps_every_input

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor,
        conv_state: cute.Tensor,
        state_indices: cute.Tensor,
        num_accepted_tokens: cute.Tensor,
        cu_seqlens: cute.Tensor,
        parent_token: cute.Tensor,
        out: cute.Tensor,
        null_slot: cutlass.Int64,
        stream: CUstream,
    ):
        num_sequences = x.shape[0]
        if cutlass.const_expr(self.has_offsets):
            num_sequences = cu_seqlens.shape[0] - 1
        self.kernel(
            x, weight, bias, conv_state, state_indices, num_accepted_tokens, cu_seqlens, parent_token, out, null_slot
        ).launch(
            grid=[num_sequences * self.slices, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            preferred_smem_carveout=0,  # none is used; without a value the DSL asks a device for its limit
        )

    @cute.kernel
    def kernel(
        self,
        gX: cute.Tensor,
        gWeight: cute.Tensor,
        gBias: cute.Tensor,
        gStates: cute.Tensor,
        gIndices: cute.Tensor,
        gAccepted: cute.Tensor,
        gOffsets: cute.Tensor,
        gParents: cute.Tensor,
        gOut: cute.Tensor,
        null_slot: cutlass.Int64,
    ):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sequence = block // self.slices
        channel = (block % self.slices * self.threads + thread) * CHANNELS
        live_channel = cutlass.Boolean(True)
        if cutlass.const_expr(self.mask_channels):
            live_channel = channel < self.dim
        if live_channel:
            rZero = cute.make_rmem_tensor(CHANNELS, self.dtype)
            rZero.fill(0.0)
            begin = cutlass.Int32(sequence)
            count = cutlass.Int32(1)
            if cutlass.const_expr(self.has_offsets):
                begin = cutlass.Int32(gOffsets[sequence])
                count = cutlass.Int32(gOffsets[sequence + 1]) - begin
            if count > 0:
                self.run_sequence(
                    sequence, begin, count, channel, gX, gWeight, gBias, gStates, gIndices, gAccepted, gParents, gOut,
                    null_slot, rZero,
                )  # fmt: skip
            if cutlass.const_expr(self.has_offsets):
                # Rows beyond the last sequence are dealt to all blocks.
                num_sequences = gOffsets.shape[0] - 1
                first = cutlass.Int32(gOffsets[num_sequences]) + sequence
                for token in cutlass.range(first, gOut.shape[0], num_sequences, unroll=1):
                    self.store_row(rZero, gOut, token, channel)

    @cute.jit
    def run_sequence(
        self,
        sequence: cutlass.Int32,
        begin: cutlass.Int32,
        count: cutlass.Int32,
        channel: cutlass.Int32,
        gX: cute.Tensor,
        gWeight: cute.Tensor,
        gBias: cute.Tensor,
        gStates: cute.Tensor,
        gIndices: cute.Tensor,
        gAccepted: cute.Tensor,
        gParents: cute.Tensor,
        gOut: cute.Tensor,
        null_slot: cutlass.Int64,
        rZero: cute.Tensor,
    ):
        history, batch = cutlass.const_expr(self.history), cutlass.const_expr(self.batch)
        rWeight = cute.make_rmem_tensor(CHANNELS * self.width, cutlass.Float32)
        rBias = cute.make_rmem_tensor(CHANNELS, cutlass.Float32)
        rLine = cute.make_rmem_tensor((history + batch) * CHANNELS, self.dtype)
        rOut = cute.make_rmem_tensor(CHANNELS, cutlass.Float32)
        # What depends on no index is loaded before the slot is known.
        for u in cutlass.range_constexpr(batch):
            row = cutlass.Int32(u)
            if row >= count:
                row = count - 1
            self.load_row(gX, begin + row, channel, rLine, history + u)
        self.load_filter(channel, gWeight, gBias, rWeight, rBias)

        # The slot that is read, and the column at which its window starts.
        slot = cutlass.Int64(sequence)
        column = cutlass.Int32(0)
        is_live = cutlass.Boolean(True)
        if cutlass.const_expr(self.has_accepted):
            column = gAccepted[sequence] - 1
            is_live = column >= 0
            if cutlass.const_expr(not self.has_parent):
                is_live = is_live & (column <= gStates.shape[2] - history)
            if cutlass.const_expr(self.has_columns):
                is_live = is_live & (column < gIndices.shape[1])
        if cutlass.const_expr(self.has_indices):
            if is_live:
                if cutlass.const_expr(self.has_parent):
                    slot = cutlass.Int64(gIndices[sequence, column])
                elif cutlass.const_expr(self.has_columns):
                    slot = cutlass.Int64(gIndices[sequence, 0])
                else:
                    slot = cutlass.Int64(gIndices[sequence])
                is_live = slot > null_slot
        if cutlass.const_expr(self.has_parent):
            column = cutlass.Int32(0)

        if is_live:
            for c in cutlass.range_constexpr(history):
                self.load_column(gStates, slot, column + c, channel, rLine, c)
            if cutlass.const_expr(self.has_parent):
                self.run_tree(
                    sequence, begin, count, channel, gX, gStates, gIndices, gParents, gOut, null_slot, rLine, rWeight, rBias, rOut
                )
            else:
                self.run_line(begin, count, slot, channel, gX, gStates, gOut, rLine, rWeight, rBias, rOut)
        else:
            for token in cutlass.range(begin, begin + count, unroll=1):
                self.store_row(rZero, gOut, token, channel)

    @cute.jit
    def run_line(
        self,
        begin: cutlass.Int32,
        count: cutlass.Int32,
        slot: cutlass.Int64,
        channel: cutlass.Int32,
        gX: cute.Tensor,
        gStates: cute.Tensor,
        gOut: cute.Tensor,
        rLine: cute.Tensor,
        rWeight: cute.Tensor,
        rBias: cute.Tensor,
        rOut: cute.Tensor,
    ):
        """Tokens one after the other. Of the windows, all columns are read before."""
        history, batch = cutlass.const_expr(self.history), cutlass.const_expr(self.batch)
        rKept = cute.make_rmem_tensor(history * CHANNELS, self.dtype)
        rKept.fill(0.0)
        if cutlass.const_expr(self.keeps_every_input):
            for c in cutlass.range_constexpr(1, history):
                self.store_column(rLine, c, gStates, slot, cutlass.Int32(c - 1), channel)
        elif cutlass.const_expr(batch > 1):
            self.load_window(gX, begin, count, channel, rLine, rKept)

        for t in cutlass.range(0, count, batch, unroll=1):
            for u in cutlass.range_constexpr(batch):
                if t + u < count:
                    self.convolve(rLine, u, rWeight, rBias, rOut)
                    self.store_row(rOut, gOut, begin + t + u, channel)
                    if cutlass.const_expr(self.keeps_every_input):
                        if history - 1 + t + u < gStates.shape[2]:
                            self.store_column(rLine, history + u, gStates, slot, history - 1 + t + u, channel)
            for i in cutlass.range_constexpr(history * CHANNELS):
                rLine[i] = rLine[batch * CHANNELS + i]
            for u in cutlass.range_constexpr(batch):
                if t + batch + u < count:
                    self.load_row(gX, begin + t + batch + u, channel, rLine, history + u)

        if cutlass.const_expr(not self.keeps_every_input):
            if cutlass.const_expr(batch > 1):
                self.store_window(rKept, gStates, slot, channel)
            else:
                self.store_window(rLine, gStates, slot, channel)

    @cute.jit
    def run_tree(
        self,
        sequence: cutlass.Int32,
        begin: cutlass.Int32,
        count: cutlass.Int32,
        channel: cutlass.Int32,
        gX: cute.Tensor,
        gStates: cute.Tensor,
        gIndices: cute.Tensor,
        gParents: cute.Tensor,
        gOut: cute.Tensor,
        null_slot: cutlass.Int64,
        rLine: cute.Tensor,
        rWeight: cute.Tensor,
        rBias: cute.Tensor,
        rOut: cute.Tensor,
    ):
        """Each node behind its ancestors; its own window goes to its own slot."""
        history = cutlass.const_expr(self.history)
        rNode = cute.make_rmem_tensor(self.width * CHANNELS, self.dtype)
        rNode.fill(0.0)
        for t in cutlass.range(count, unroll=1):
            self.load_row(gX, begin + t, channel, rNode, history)
            node = cutlass.Int32(t)
            newest = cutlass.Int32(history - 1)  # of the starting window, what comes next to the root
            for back in cutlass.range_constexpr(1, self.width):
                place = cutlass.const_expr(history - back)
                if node >= 0:
                    node = gParents[begin + node]
                if node >= 0:
                    self.load_row(gX, begin + node, channel, rNode, place)
                else:
                    for h in cutlass.range_constexpr(place, history):
                        if newest == h:
                            self.copy_row(rLine, h, rNode, place)
                    newest -= 1
            self.convolve(rNode, 0, rWeight, rBias, rOut)
            self.store_row(rOut, gOut, begin + t, channel)
            if t < gIndices.shape[1]:
                target = cutlass.Int64(gIndices[sequence, t])
                if target > null_slot:
                    for c in cutlass.range_constexpr(history):
                        self.store_column(rNode, c + 1, gStates, target, cutlass.Int32(c), channel)
