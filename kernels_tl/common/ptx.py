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


def maximum(x: Any, y: Any) -> Any:
    """The larger of two float32 numbers, NaN where one is: `T.max` returns the other one. Needs the source `MAXIMUM`."""
    return T.call_pure_extern("float32", "gdn_maximum", x, y)
