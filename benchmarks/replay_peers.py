"""FlashInfer's decode with a cache of corrections, next to `benchmarks.replay_decode`: bfloat16 states and cache, drafts alone.

Its caller keeps a cursor for each sequence; here the cursors of successive calls are made ahead, from the accepted tokens of
`replay_decode`. A call whose cache holds `_FLUSH` entries or more writes the states too.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gdn.ops.delta_rule.problem import mean_accepted
from gdn.testing import timing

_MODULE = "flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush"
_HEADS, _DIM, _TOKENS = (16, 32), 128, 4
_ROWS = 32  # of the cache
_FLUSH = 16 - _TOKENS + 1  # entries above which another call's do not fit
_CALLS = 15  # successive calls in a sample


def cursors(batch: int, calls: int) -> list[tuple[Tensor, Tensor]]:
    """First row and number of the live entries of each sequence, for successive calls."""
    base, length = torch.zeros(batch, dtype=torch.int64), torch.arange(batch) % _FLUSH
    found, mean, offset = [], round(10 * mean_accepted(_TOKENS)), torch.arange(batch)
    for call in range(calls):
        found.append((base.int(), length.int()))
        accepted = (offset + call + 1) * mean // 10 - (offset + call) * mean // 10
        writes = length >= _FLUSH
        base = torch.where(writes, (base + length) % _ROWS, base)
        length = torch.where(writes, 0, length) + accepted
    return found


def measure(batch: int, device: torch.device) -> list[str]:
    """A line for each way to call it, or why it did not run."""
    try:
        time_us = timing.Timed(_calls(batch, device)).sustained_us()
    except Exception as failed:  # not installed, or refuses the device
        return [f"FlashInfer, cache of corrections: {type(failed).__name__}: {failed}"]
    name = f"{_HEADS[0]}/{_HEADS[1]} batch {batch} bf16, {_TOKENS} tokens each"
    return [f"FlashInfer, cache of corrections, {name}: {time_us:.1f} us (no convolution, no norm of outputs)"]


def _calls(batch: int, device: torch.device) -> list[Callable[[], Any]]:
    decode = importlib.import_module(_MODULE).gated_delta_rule_mtp_ucache_flush
    make, (heads, value_heads) = torch.Generator(device).manual_seed(0), _HEADS

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=make).bfloat16()

    options: dict[str, Any] = {
        **{name: normal(batch, _TOKENS, heads, _DIM) for name in ("q", "k")}, "v": normal(batch, _TOKENS, value_heads, _DIM),
        **{name: normal(batch, _TOKENS, value_heads) for name in ("a", "b")},
        **{name: normal(value_heads) for name in ("A_log", "dt_bias")},
        "initial_state_source": normal(batch + 1, value_heads, _DIM, _DIM),
        "initial_state_indices": 1 + torch.randperm(batch, device=device, dtype=torch.int32),
        "k_cache": torch.zeros(batch + 1, heads, _ROWS, _DIM, device=device, dtype=torch.bfloat16),
        "u_cache": torch.zeros(batch + 1, value_heads, _ROWS, _DIM, device=device, dtype=torch.bfloat16),
        "g_cache": torch.zeros(batch + 1, value_heads, _ROWS, device=device), "restart_hist_on_flush": False,
        "flush_min": _FLUSH, "output": torch.empty(batch, _TOKENS, value_heads, _DIM, device=device, dtype=torch.bfloat16),
    }  # fmt: skip
    return [
        partial(decode, **options, cache_base=base.to(device), hist_len=length.to(device))
        for base, length in cursors(batch, _CALLS)
    ]
