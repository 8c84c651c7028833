"""Tensors inside larger ones full of NaN, for the layer's steps: what must not be read poisons a result, and what must not be
written is compared bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gdn.testing.compare import same_bits
from tests.gpu.delta_rule import Arguments
from tests.gpu.twins import copy_of, whole

Tensor = torch.Tensor
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class StepCase:
    """What calls of both fused steps have."""

    lengths: tuple[int, ...] = ()
    heads: tuple[int, int] = (2, 4)  # key, value
    dims: tuple[int, int] = (128, 128)  # K, V
    dtype: torch.dtype = BF16
    other_dtype: torch.dtype = BF16  # of z, a, b, dt_bias and the norm's weight
    weight_dtype: torch.dtype = BF16
    bias_dtype: torch.dtype | None = None
    width: int = 4
    activation: str | None = "silu"
    gate_activation: str = "silu"
    layout: str = "flat"
    has_norm: bool = True
    conv_dtype: torch.dtype = BF16
    order: str = "channels"  # which of a window's dims is contiguous: channels, columns, neither
    state_dtype: torch.dtype = F32
    v_first: bool = True
    index_dtype: torch.dtype = torch.int32
    padding: int = 3  # rows after the last sequence

    @property
    def channels(self) -> int:
        return 2 * self.heads[0] * self.dims[0] + self.heads[1] * self.dims[1]

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.padding

    def starts(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    def arguments(
        self, normal: Callable[..., Tensor], ignored: Sequence[int], A_log: torch.dtype, z_frame: tuple[int, int]
    ) -> Arguments:
        """All but pools and indices. normal(*shape, dtype) draws; ignored: rows of padding, which are NaN; A_log: its dtype."""
        (H, HV), (K, V), rows = self.heads, self.dims, self.tokens
        mixed, z = normal(rows, self.channels, dtype=self.dtype), normal(rows, HV * V, dtype=self.other_dtype)
        b, a = normal(rows, HV, dtype=self.other_dtype), 3 * normal(rows, HV, dtype=self.other_dtype)
        for tensor in (mixed, z, b, a):
            tensor[ignored] = torch.nan
        return {
            **projections(self, mixed, z, b, a, z_frame),
            "conv_weight": normal(self.channels, self.width, dtype=self.weight_dtype),
            "conv_bias": None if self.bias_dtype is None else normal(self.channels, dtype=self.bias_dtype),
            "A_log": normal(HV, dtype=A_log), "dt_bias": normal(HV, dtype=self.other_dtype),
            "norm_weight": normal(V, dtype=self.other_dtype) if self.has_norm else None, "num_k_heads": H, "head_k_dim": K,
            "head_v_dim": V, "activation": self.activation, "gate_activation": self.gate_activation,
            "projection_layout": self.layout, "state_v_first": self.v_first,
            "out": framed(mixed.new_full((rows, HV * V), torch.nan)),
        }  # fmt: skip


def framed(values: Tensor, left: int = 8, right: int = 16) -> Tensor:
    """The same values as columns left .. -right of a wider tensor of NaN."""
    wide = values.new_full((values.shape[0], left + values.shape[1] + right), torch.nan)
    wide[:, left:-right] = values
    return wide[:, left:-right]


def windows(slots: int, channels: int, columns: int, order: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[slots, channels, columns] of NaN, in a frame of NaN. order: which dim of a window is contiguous, or "neither"."""

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=device)

    if order == "channels":
        return nan(slots, columns + 1, channels + 8)[:, :columns, :channels].mT
    if order == "columns":
        return nan(slots, channels, columns)
    return nan(slots, channels + 1, columns + 2, 3)[:, :channels, 1:-1, 1]


def states(case: Any, slots: int, device: torch.device) -> Tensor:
    """[slots, HV, K, V] (or V first) of NaN, with a gap after every slot."""
    (_, heads), (k, v) = case.heads, case.dims
    inner = (v, k) if case.v_first else (k, v)
    pool = torch.full((slots, heads * k * v + 24), torch.nan, dtype=case.state_dtype, device=device)
    return pool[:, 8:-16].unflatten(1, (heads, *inner))


def projections(case: Any, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, z_frame: tuple[int, int]) -> Arguments:
    """The rows of a layer's projections as case.layout has them. z_frame: columns around z where it is a tensor of its own."""
    (H, HV), (K, V) = case.heads, case.dims
    if case.layout == "interleaved":
        q, k, v = mixed.split([H * K, H * K, HV * V], dim=1)
        groups = [part.unflatten(1, (H, -1)) for part in (q, k, v, z.to(case.dtype))]
        gates = torch.cat([part.unflatten(1, (H, -1)) for part in (b, a)], dim=2).flatten(1)
        return {"mixed_qkv": framed(torch.cat(groups, dim=2).flatten(1)), "z": None, "b": framed(gates, 1, 1), "a": None}
    if case.layout == "merged":
        row = torch.cat([mixed, z.to(case.dtype)], dim=1)
        return {"mixed_qkv": framed(row), "z": None, "b": framed(torch.cat([b, a], dim=1), 1, 1), "a": None}
    if case.layout == "concatenated":
        unread = torch.full((len(mixed), 8), torch.nan, dtype=case.dtype, device=mixed.device)
        row = torch.cat([part.to(case.dtype) for part in (mixed, z, b, a, unread)], dim=1)
        return {"mixed_qkv": framed(row), **dict.fromkeys(("z", "b", "a"))}
    gate = framed(z, *z_frame).unflatten(1, (HV, V)) if case.has_norm else None
    return {"mixed_qkv": framed(mixed), "z": gate, "b": framed(b), "a": framed(a, 1, 1)}


def on_cpu(arguments: Arguments, wide: bool) -> Arguments:
    """Copies for the reference; wide: floats as float64."""
    made = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            value = value.cpu().clone()
            if wide and value.is_floating_point():
                value = value.double()
        made[name] = value
    return made


def frame_is_untouched(x: Tensor) -> None:
    rest = copy_of(x)
    rest.fill_(torch.nan)
    assert bool(whole(rest).isnan().all()), "written outside of the tensor"


def check_windows(before: Tensor, after: Tensor, expected: Tensor) -> None:
    """The pool has the bits of `expected`, and what surrounds it those of before."""
    frame = copy_of(before)
    frame.copy_(expected.to(frame.device))
    assert same_bits(whole(frame), whole(after)), "a window is not what it should be"


def check_states(before: Tensor, after: Tensor, exact: Tensor, limit: float) -> None:
    """exact: the float64 pool of the reference, which tells what was written; limit: of each head's relative error."""
    written = [slot for slot in range(len(exact)) if not same_bits(exact[slot], before[slot].cpu().double())]
    for slot in written:
        difference = (after[slot].double().cpu() - exact[slot]).flatten(1).norm(dim=1)
        assert bool((difference <= limit * exact[slot].flatten(1).norm(dim=1)).all()), f"state of slot {slot}"
    rest = copy_of(after)
    rest[written] = before[written]
    assert same_bits(whole(rest), whole(before)), "a slot was written that is nobody's"
