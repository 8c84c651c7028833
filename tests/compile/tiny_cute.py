"""A small CuTe DSL kernel whose machine code is known by looking at it."""

from kernels_cute.common import build

# isort: split
import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream

SHARED_FLOATS = 20000


@cute.kernel
def _reverse_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    shared = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout((SHARED_FLOATS,)), 128)
    if block * 128 + thread < x.shape[0]:
        shared[127 - thread] = x[block * 128 + thread]
    cute.arch.sync_threads()
    if block * 128 + thread < x.shape[0]:
        y[block * 128 + thread] = shared[thread]


@cute.jit
def _reverse(x: cute.Tensor, y: cute.Tensor, stream: CUstream):
    _reverse_kernel(x, y).launch(grid=[cute.ceil_div(x.shape[0], 128), 1, 1], block=[128, 1, 1], stream=stream)


def reverse() -> bytes:
    """Reverses blocks of 128 floats through 80000 bytes of dynamic shared memory."""
    n = cute.sym_int()
    x = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (n,))
    y = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (n,))
    return build.library("tiny_reverse", _reverse, x, y)
