"""The convolution and the gated norm of a prefill step, where they differ from the operators of those names."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from gdn.ops.layer_step.problem import Conv1dParams, GdnPrefillProblem, RmsNormGatedParams
from kernels_cute.common.memory import fake
from kernels_cute.conv1d.prefill import Config as ConvConfig
from kernels_cute.conv1d.prefill_kernel import Conv1d, fakes
from kernels_cute.gdn_prefill import parts
from kernels_cute.gdn_steps.rms_norm_gated import Config as NormConfig
from kernels_cute.gdn_steps.rms_norm_gated_kernel import RmsNormGated


class PrefillConv(Conv1d, params=Conv1dParams):
    """The convolution, which finds the channels of interleaved projections."""

    def __init__(self, problem: GdnPrefillProblem, config: ConvConfig) -> None:
        super().__init__(parts.conv_problem(problem), config)
        self.interleaved = problem.interleaved
        self.keys, self.k_dim = problem.num_k_heads * problem.head_k_dim, problem.head_k_dim
        self.values = problem.num_v_heads // problem.num_k_heads * problem.head_v_dim  # of a group
        self.group = 2 * (self.k_dim + self.values)  # columns of a key head's q, k, v and z

    @cute.jit
    def column_of(self, channel: Int32):
        column = channel
        if cutlass.const_expr(self.interleaved):
            head = channel // self.k_dim
            column = head * self.group + channel % self.k_dim
            if channel >= self.keys:
                head = (channel - self.keys) // self.k_dim
                column = head * self.group + self.k_dim + channel % self.k_dim
            if channel >= 2 * self.keys:
                value = channel - 2 * self.keys
                column = value // self.values * self.group + 2 * self.k_dim + value % self.values
        return column


def conv_fakes(problem: GdnPrefillProblem) -> Conv1dParams:
    found = fakes(parts.conv_problem(problem))
    offsets = fake("int32" if problem.keeps_windows else None, None, None)
    if problem.interleaved or problem.merged:
        width = problem.dim + problem.num_v_heads * problem.head_v_dim
        found = found._replace(x=fake(problem.dtype, cute.sym_int(), width, last=1))
    return found._replace(checkpoint_offsets=offsets)


class PrefillNorm(RmsNormGated, params=RmsNormGatedParams):
    """The gated norm in place. Rows of zeros, which are those of padding, stay zero whatever z holds there."""

    def __init__(self, problem: GdnPrefillProblem, config: NormConfig) -> None:
        super().__init__(parts.norm_problem(problem), config)

    def offset_of(self, gX: cute.Tensor, row: Int64) -> Int64:
        token = row // self.heads
        head = row - token * self.heads
        first, by_head = token * gX.stride[0], gX.stride[1]
        if cute.rank(gX) == 4:  # an interleaved z, [L, H, r, V]
            ratio, by_head = gX.shape[2], (gX.stride[2], gX.stride[1])
        elif isinstance(by_head, tuple):  # the same as [L, (r, H), V]
            ratio = gX.shape[1][0]
        else:
            return first + head * by_head
        group = head // ratio
        return first + group * by_head[1] + (head - group * ratio) * by_head[0]

    def offset_in_out(self, gOut: cute.Tensor, row: Int64) -> Int64:
        return self.offset_of(gOut, row)

    @cute.jit
    def finish(self, value: Float32, squares: Float32):
        result = value
        if squares == 0:
            result = Float32(0.0)
        return result


def norm_fakes(problem: GdnPrefillProblem) -> RmsNormGatedParams:
    tokens, heads, dim = cute.sym_int(), problem.num_v_heads, problem.head_v_dim
    out = [fake(problem.dtype, tokens, heads, dim, last=(dim, 1)) for _ in range(2)]
    if problem.interleaved:
        groups = problem.num_k_heads
        z = fake(problem.dtype, tokens, groups, heads // groups, dim, last=(dim, 1))
    else:
        z = fake(problem.z_dtype or problem.dtype, tokens, heads, dim, last=1)  # of merged rows a view
    return RmsNormGatedParams(out[0], z, fake(problem.norm_dtype, dim, last=1), out[1], eps=Float32(1e-6))
