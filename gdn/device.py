"""Device specs: limits for feasibility, peaks for rooflines, and the key in the tuned tables.

Leaf module. Kernels compiled on a machine without a GPU are compiled for `H100`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DeviceSpec:
    key: str  # directory name below gdn/tuned/
    num_sms: int
    shared_bytes_per_block: int  # dynamic shared memory that one block may request
    registers_per_sm: int  # 32-bit registers
    l2_bytes: int
    copy_gbps: float  # measured device-to-device copy, bytes read plus bytes written, 1e9 bytes a second
    bf16_tflops: float  # measured dense matmul 8192^3
    fp8_tflops: float


# Peaks measured 2026-11-20 on an H100 80GB HBM3 (700 W). They choose defaults; a report measures the peaks of its own run.
H100 = DeviceSpec(
    key="h100",
    num_sms=132,
    shared_bytes_per_block=227 * 1024,
    registers_per_sm=65536,
    l2_bytes=50 * 1024 * 1024,
    copy_gbps=3030.0,
    bf16_tflops=702.0,
    fp8_tflops=1262.0,
)
H200 = replace(H100, key="h200", l2_bytes=60 * 1024 * 1024, copy_gbps=4300.0, bf16_tflops=790.0, fp8_tflops=1300.0)
SPECS = {spec.key: spec for spec in (H100, H200)}


def spec_from_name(name: str, capability: tuple[int, int], num_sms: int) -> DeviceSpec | None:
    """Spec of a CUDA device by its name; None where it is not SM90, since no kernel of this project runs there."""
    if capability != (9, 0):
        return None
    base = H200 if "H200" in name else H100
    return base if num_sms == base.num_sms else replace(base, key=f"{base.key}-{num_sms}sm", num_sms=num_sms)
