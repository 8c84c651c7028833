"""Host side that the ragged and the paged kernel share: what they refuse, and when they have no configuration."""

from collections.abc import Callable
from typing import Any

from gdn.device import H100, DeviceSpec
from gdn.ops.indexer.problem import LogitsProblem
from gdn.problem import DTYPE_BYTES

MAX_HEADS = 64  # four queries of them are one instruction's 256 columns, of one key head
HEAD_DIMS = (64, 128)
MAX_COLUMNS = 256  # of one instruction


def row_bytes(problem: LogitsProblem) -> int:
    return problem.head_dim * DTYPE_BYTES[problem.dtype]


def refusal(default: Callable[..., Any], problem: Any) -> str | None:
    """default: the configuration for a problem and a device, None where none fits."""
    heads, kv_heads, dtype, weights = problem.num_heads, problem.num_kv_heads, problem.dtype, problem.weights_dtype
    checks = [
        (1 <= heads <= MAX_HEADS, f"1 to {MAX_HEADS} indexer heads, got {heads}"),
        (kv_heads >= 1 and heads % max(kv_heads, 1) == 0, f"a number of heads that key heads divide, got {heads} and {kv_heads}"),
        (problem.head_dim in HEAD_DIMS, f"head_dim 64 or 128, got {problem.head_dim}"),
        (dtype in ("float8_e4m3fn", "bfloat16"), f"float8_e4m3fn or bfloat16 queries and keys, got {dtype}"),
        (weights in (None, "float32", "bfloat16"), f"float32 or bfloat16 weights, or none, got {weights}"),
        (problem.out_dtype in ("float32", "bfloat16"), f"float32 or bfloat16 output, got {problem.out_dtype}"),
    ]
    if problem.op == "paged_mqa_logits":
        page_size, next_n = problem.page_size, problem.next_n
        checks.append((page_size >= 4 and page_size % 4 == 0, f"a page_size that is a multiple of 4, got {page_size}"))
        checks.append((next_n >= 1, f"next_n of at least 1, got {next_n}"))
    reason = next((text for holds, text in checks if not holds), None)
    if reason is None and default(problem, H100) is None:
        sizes = f"{heads} heads and {kv_heads} key heads of {row_bytes(problem)} bytes"
        reason = f"queries and keys that fit a block's shared memory, got {sizes}"
    return None if reason is None else f"requires {reason}"


def chosen(default: Callable[..., Any], problem: LogitsProblem, device: DeviceSpec) -> Any:
    """The default configuration, where there is one."""
    config = default(problem, device)
    if config is None:
        raise ValueError(f"no configuration of the {problem.op} kernel fits {problem}")
    return config
