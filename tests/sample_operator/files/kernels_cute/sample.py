"""Rows times a gain: out = factor * x * weight, in float32; a thread computes 8 columns of a row.

Tensors: x, out [L, D], weight [D]. See `gdn.ops.sample.problem.SampleScaleParams`.
"""

from dataclasses import dataclass
from typing import Any

from gdn.device import DeviceSpec
from gdn.ops.sample.problem import SampleScaleParams, SampleScaleProblem
from kernels_cute.common import choice
from kernels_cute.common.choice import FLOAT_DTYPES, HALF_DTYPES, space, unserved

launch, workspace_bytes = choice.launch, choice.no_workspace

_COLUMNS = 8  # of a thread: 16 bytes of x


@dataclass(frozen=True)
class Config:
    threads: int  # threads of a block


def refusal(problem: SampleScaleProblem) -> str | None:
    if problem.dim % _COLUMNS or problem.dim == 0:
        return f"requires a last dim that is a multiple of {_COLUMNS}, got {problem.dim}"
    return unserved({HALF_DTYPES: {"x": problem.dtype}, FLOAT_DTYPES: {"weight": problem.weight_dtype}})


def default_config(problem: SampleScaleProblem, device: DeviceSpec) -> Config:
    return Config(256)


fits, configs = space(Config, threads=(128, 256, 512))


def compile(problem: SampleScaleProblem, config: Config) -> dict[str, bytes]:
    import cutlass  # here: a process that finds the kernel compiled imports no DSL
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64

    from kernels_cute.common import build
    from kernels_cute.common.memory import fake, load, pointer, store

    threads, dim = config.threads, problem.dim

    class Scale(build.Kernel, params=SampleScaleParams):
        def __init__(self) -> None:
            self.threads = threads

        def blocks(self, params: SampleScaleParams) -> Any:
            # In 64 bits: the number of elements may exceed 2**31.
            return Int32((Int64(params.x.shape[0]) * (dim // _COLUMNS) + threads - 1) // threads)

        @cute.kernel
        def kernel(self, params: SampleScaleParams):
            part = Int64(cute.arch.block_idx()[0]) * threads + cute.arch.thread_idx()[0]
            row, column = part // (dim // _COLUMNS), part % (dim // _COLUMNS) * _COLUMNS
            if row < params.x.shape[0]:
                rX = cute.make_rmem_tensor(_COLUMNS, Float32)
                rWeight = cute.make_rmem_tensor(_COLUMNS, Float32)
                load(pointer(params.x, row * params.x.stride[0] + column, 2 * _COLUMNS), _COLUMNS, rX, 0, True)
                load(pointer(params.weight, column, 2 * _COLUMNS), _COLUMNS, rWeight, 0, False)
                for i in cutlass.range_constexpr(_COLUMNS):
                    rX[i] = params.factor * rX[i] * rWeight[i]
                store(rX, 0, _COLUMNS, pointer(params.out, row * dim + column, 2 * _COLUMNS))

    rows = cute.sym_int()
    x, out = [fake(problem.dtype, rows, dim, last=1) for _ in range(2)]
    params = SampleScaleParams(x, fake(problem.weight_dtype, dim, last=1), out, Float32(1.0))
    return build.one_entry(problem.op, Scale(), params)
