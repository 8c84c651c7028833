"""Stochastic rounding of a bfloat16 state: definition of its noise, which every backend reproduces bit for bit.

The noise of an element depends on the seed, the pool slot it is written to, its state head and its place in the head, and
on nothing else: not on the layout of the state, the order of work or the batch. All arithmetic is modulo 2**32:

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    key      = mix(mix(mix(mix(seed & 0xffffffff) ^ (seed >> 32)) ^ slot) ^ head)          one per (slot, head)
    noise    = mix(key ^ (k_index * V + v_index)) >> 16                                    16 bits, one per element
    stored   = upper 16 bits of (bits of the float32 value + noise)

`seed >> 32` is the upper half of the 64 bits, `slot` the low 32 bits of the row index of the pool, `k_index * V + v_index`
the same for both state layouts. Adding noise uniform in [0, 2**16) to the bits and cutting the low half rounds the
magnitude up with a probability equal to the fraction that is cut, so the rounded value is right on average. An infinity
or NaN is stored as ordinary rounding stores it.

It pays off where a step changes the state by less than half a unit in the last place, at least 2**-9 of a value: rounding to
nearest then stores the old value again in every step, and a head that should forget a fraction of 2**-12 per token forgets
nothing. Where every step changes more than that, rounding to nearest has the smaller error.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser above, on int64 tensors that hold values in [0, 2**32)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK  # wraps in int64; the low 32 bits are right
    return x ^ (x >> 16)


def noise(seed: int, slot: int, num_heads: int, k_dim: int, v_dim: int, device: torch.device) -> Tensor:
    """[heads, K, V] int64 in [0, 2**16)."""
    key = torch.tensor(seed & _MASK, dtype=torch.int64, device=device)
    key = mix(mix(mix(key) ^ ((seed >> 32) & _MASK)) ^ (slot & _MASK))
    head = torch.arange(num_heads, dtype=torch.int64, device=device).view(-1, 1, 1)
    element = torch.arange(k_dim * v_dim, dtype=torch.int64, device=device).view(1, k_dim, v_dim)
    return mix(mix(key ^ head) ^ element) >> 16


def stochastic_bfloat16(state: Tensor, seed: int, slot: int) -> Tensor:
    """state [heads, K, V], rounded to bfloat16 with the noise of (seed, slot)."""
    value = state.to(torch.float32)
    bits = value.view(torch.int32).to(torch.int64) & _MASK
    num_heads, k_dim, v_dim = state.shape
    bits = (bits + noise(seed, slot, num_heads, k_dim, v_dim, state.device)) & 0xFFFF0000
    signed = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    return torch.where(value.isfinite(), signed.view(torch.float32), value).to(torch.bfloat16)
