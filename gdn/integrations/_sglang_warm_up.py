"""Loads every kernel that SGLang's Gated DeltaNet layers reach, before SGLang captures its graphs and serves.

What the adapter calls on the pools, `gdn.warmup` gets as calls on small CPU tensors of their dtypes and layouts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import gdn
from gdn.integrations import _sglang_step as step
from gdn.integrations import sglang_convolution as convolution
from gdn.integrations._calls import Calls
from gdn.integrations._sglang_kernel import Serving, kernel_class

Tensor = torch.Tensor
Call = Callable[[], object]
PHASES = ("decode", "extend", "verify")


@dataclass(frozen=True)
class Form:
    """What the kernels of a layer are compiled for. columns_last: whether the columns of a window are adjacent in the pool.

    drafts: tokens of a verified sequence, 0 for none. buffer_dtype: of the states after every draft. overlap: whether the windows
    after every draft share columns; else trees are verified too.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    width: int
    has_bias: bool
    activation: str | None
    token_dtype: torch.dtype
    weight_dtype: torch.dtype
    A_log_dtype: torch.dtype
    dt_bias_dtype: torch.dtype
    window_dtype: torch.dtype
    state_dtype: torch.dtype
    index_dtype: torch.dtype = torch.int32
    columns_last: bool = True
    drafts: int = 0
    buffer_dtype: torch.dtype = torch.float32
    overlap: bool = True

    @property
    def channels(self) -> int:
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim


def forms(model: Any, cache: Any, token_dtype: torch.dtype) -> list[Form]:
    """The forms of a model's layers, each once.

    Parameters
    ----------
    model : Module
        Whose modules hold RadixLinearAttention layers.
    cache : MambaPool.State
        Pools of all layers, each [layers, slots, ...].
    token_dtype : dtype
        Of the activations.
    """
    window = cache.conv[0]
    common: dict[str, Any] = {
        "token_dtype": token_dtype, "window_dtype": window.dtype, "state_dtype": cache.temporal.dtype,
        "columns_last": window.stride(-1) == 1,
    }  # fmt: skip
    buffer, kept = getattr(cache, "intermediate_ssm", None), getattr(cache, "intermediate_conv_window", None)
    if buffer is not None and kept:
        overlap = kept[0].stride(2) == kept[0].stride(4)
        common |= {"drafts": buffer.shape[2], "buffer_dtype": buffer.dtype, "overlap": overlap}
    found: dict[Form, None] = {}
    for layer in model.modules():
        weight = getattr(layer, "conv_weights", None)
        if isinstance(weight, Tensor) and getattr(layer, "A_log", None) is not None:
            found[Form(
                layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, weight.shape[1],
                layer.bias is not None, layer.activation, weight_dtype=weight.dtype, A_log_dtype=layer.A_log.dtype,
                dt_bias_dtype=layer.dt_bias.dtype, **common,
            )] = None  # fmt: skip
    return list(found)


def warm_up(wanted: list[Form], phases: tuple[str, ...]) -> int:
    """Loads the kernels of layers of these forms in these phases; returns how many had to be compiled. Needs a Hopper GPU."""
    return gdn.warmup(calls=[call for form in wanted for call in calls(form, phases)])


def calls(form: Form, phases: tuple[str, ...]) -> list[Call]:
    """Every call of a layer, for `gdn.warmup`; none with an activation that ours do not know."""
    if form.activation not in step.ACTIVATIONS:
        return []
    every = _Calls(form)
    return [call for phase in phases for call in getattr(every, phase)()]


class _Host:
    """Stands for the host's kernel object, which gets what ours refuses."""

    supports_track_state_snapshot = True

    def extend(self, *given: Any, **named: Any) -> tuple[None, None, None]:
        return None, None, None

    def decode(self, *given: Any, **named: Any) -> None:
        return None

    packed_decode = target_verify = decode


class _Calls:
    """Calls of the adapter on one row or a few, as SGLang makes them."""

    def __init__(self, form: Form) -> None:
        f = self.form = form
        heads, k, v = f.num_v_heads, f.head_k_dim, f.head_v_dim
        self.kernel = kernel_class(object)(_Host(), Serving(Calls(allow_reference=True)))
        shape = (2, f.channels, f.width - 1) if f.columns_last else (2, f.width - 1, f.channels)
        windows = torch.zeros(shape, dtype=f.window_dtype)
        self.windows = windows if f.columns_last else windows.mT
        self.states = torch.zeros(2, heads, v, k, dtype=f.state_dtype)
        self.slots = torch.zeros(1, dtype=f.index_dtype)
        self.weight = torch.zeros(f.channels, f.width, dtype=f.weight_dtype)
        self.bias = torch.zeros(f.channels, dtype=f.weight_dtype) if f.has_bias else None
        self.gates = {"A_log": torch.zeros(heads, dtype=f.A_log_dtype), "dt_bias": torch.zeros(heads, dtype=f.dt_bias_dtype)}
        self.layer = SimpleNamespace(
            num_q_heads=f.num_k_heads, num_k_heads=f.num_k_heads, num_v_heads=heads, head_q_dim=k, head_k_dim=k, head_v_dim=v,
            conv_weights=self.weight, bias=self.bias, activation=f.activation, v_dim=heads * v, **self.gates,
        )  # fmt: skip

    def _rows(self, count: int, width: int) -> Tensor:
        return torch.zeros(count, width, dtype=self.form.token_dtype)

    def _given(self, lengths: int) -> dict[str, Any]:
        offsets = torch.tensor([0, lengths], dtype=torch.int32)
        return {"ssm_states": self.states, "cache_indices": self.slots, "query_start_loc": offsets}

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        f = self.form
        keys = f.num_k_heads * f.head_k_dim
        q, k, v = rows.split((keys, keys, f.num_v_heads * f.head_v_dim), dim=1)
        return tuple(x.unflatten(1, (-1, dim))[None] for x, dim in ((q, f.head_k_dim), (k, f.head_k_dim), (v, f.head_v_dim)))

    def decode(self) -> Iterator[Call]:
        f, heads = self.form, self.form.num_v_heads
        cache = SimpleNamespace(conv=[self.windows], temporal=self.states, replayssm_d=None)
        rows, gate = self._rows(1, f.channels), self._rows(1, heads)
        if step.refusal(self.layer, cache, rows, allow_reference=True) is None:
            yield lambda: step.fused(self.layer, cache, rows, gate, gate, self.slots)
            pair = (self._rows(1, f.channels + heads * f.head_v_dim), self._rows(1, 2 * heads))
            yield lambda: step.fused(self.layer, cache, pair[0], None, pair[1], self.slots)
        yield lambda: convolution.update(rows, self.windows, self.weight, self.bias, f.activation, conv_state_indices=self.slots)
        sizes = {"scale": f.head_k_dim**-0.5, "num_v_heads": heads, "head_v_dim": f.head_v_dim}
        yield lambda: self.kernel.packed_decode(rows, gate, gate, **self.gates, **self._given(1), **sizes)

    def extend(self) -> Iterator[Call]:
        f, tokens = self.form, 64
        rows, gate = self._rows(tokens, f.channels), torch.zeros(1, tokens, f.num_v_heads)
        mask, offsets = torch.ones(1, dtype=torch.bool), torch.tensor([0, tokens], dtype=torch.int32)
        options = {"query_start_loc": offsets, "cache_indices": self.slots, "has_initial_state": mask}
        yield lambda: convolution.rows_of_prompts(rows, self.weight, self.bias, self.windows, f.activation, **options)
        # Snapshots: none, and float32 ones for the prefix cache.
        kept = {"track_state": torch.zeros(1, *self.states.shape[1:]), "track_chunk_idx": torch.ones(1, dtype=torch.int32)}
        every: tuple[dict[str, Tensor], ...] = ({}, kept)
        for more in every:
            yield partial(self.kernel.extend, *self._split(rows), gate, gate, **self._given(tokens), **more)

    def verify(self) -> Iterator[Call]:
        f, steps = self.form, self.form.drafts
        if not steps:
            return
        rows, gate, kept = self._rows(steps, f.channels), self._rows(steps, f.num_v_heads), torch.zeros(1, dtype=torch.int32)
        windows = torch.zeros(1, steps, f.channels, f.width - 1, dtype=f.window_dtype)
        if f.overlap:
            size = (1, f.channels, steps + f.width - 2)
            buffer = torch.zeros(size, dtype=f.window_dtype)
            windows = buffer.as_strided(windows.shape, (buffer.stride(0), 1, size[2], 1))
        drafts = rows[None].transpose(1, 2)
        yield lambda: convolution.rows_of_drafts(
            drafts, self.windows, self.weight, self.bias, f.activation, self.slots, windows, kept
        )
        buffer = torch.zeros(1, steps, *self.states.shape[1:], dtype=f.buffer_dtype)
        tree = torch.zeros(1, steps, dtype=torch.int32)
        q, k, v = self._split(rows)
        for parents in (None, tree):
            yield partial(
                self.kernel.target_verify, q=q, k=k, v=v, a=gate, b=gate, **self.gates, **self._given(steps),
                intermediate_states_buffer=buffer, intermediate_state_indices=kept, retrieve_parent_token=parents,
            )  # fmt: skip
