"""Small TileLang kernels whose machine code is known by looking at them."""

import tilelang.language as T


def matmul(rows=64):
    """C = A B on one warpgroup: [m, 128] x [128, 128], 48 KiB of dynamic shared memory at 64 rows, 128 threads."""
    m = T.dynamic("m")

    @T.prim_func
    def tiny_matmul(a: T.Tensor((m, 128), "bfloat16"), b: T.Tensor((128, 128), "bfloat16"), c: T.Tensor((m, 128), "float32")):
        with T.Kernel(T.ceildiv(m, rows), threads=128) as block:
            a_shared = T.alloc_shared((rows, 128), "bfloat16")
            b_shared = T.alloc_shared((128, 128), "bfloat16")
            c_fragment = T.alloc_fragment((rows, 128), "float32")
            T.copy(a[block * rows, 0], a_shared)
            T.copy(b, b_shared)
            T.clear(c_fragment)
            T.gemm(a_shared, b_shared, c_fragment)
            T.copy(c_fragment, c[block * rows, 0])

    return tiny_matmul
