"""Instructions that TileLang has no name for: device functions of one PTX instruction each, with the source that a kernel needs.

A kernel that calls one passes its source to `T.Kernel(..., prelude=...)`.
"""

from typing import Any

import tilelang.language as T

MAXIMUM = """
static __device__ __forceinline__ float gdn_maximum(float x, float y) {
  float largest;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(x), "f"(y));
  return largest;
}
"""


COPY = """
template <int bytes>
static __device__ __forceinline__ void gdn_copy(void* target, const void* source) {
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(target));
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(at), "l"(source) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(at), "l"(source), "n"(bytes) : "memory");
}
static __device__ __forceinline__ void gdn_wait_for_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }
"""


def maximum(x: Any, y: Any) -> Any:
    """The larger of two float32 numbers, NaN where one is: `T.max` returns the other one. Needs the source `MAXIMUM`."""
    return T.call_pure_extern("float32", "gdn_maximum", x, y)


def copy(target: Any, source: Any, count: int) -> Any:
    """Starts the copy of `count` (1 or 4) words from an element of global memory on to one of shared memory. Needs `COPY`."""
    return T.evaluate(T.call_extern("handle", f"gdn_copy<{4 * count}>", T.address_of(target), T.address_of(source)))


def wait_for_copies() -> Any:
    """Waits for the copies that this thread started. Needs `COPY`."""
    return T.evaluate(T.call_extern("handle", "gdn_wait_for_copies"))
