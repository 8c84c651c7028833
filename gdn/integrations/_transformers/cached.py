"""What a Gated DeltaNet layer reads and sets of Transformers' cache.

The tensors are fetched on every call: beam search and batch changes replace them. The names used here are those of every
version from 5.20 on; `get_conv_state` and its like came later.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn.integrations._calls import unserved_state


class Shapes(NamedTuple):
    """Shapes of a layer's tensors in the cache, without the batch: window [D, w] and state [HV, K, V]."""

    window: tuple[int, int]
    state: tuple[int, int, int]

    def operand(self, windows: Tensor) -> Tensor:
        """What the operators read and write of windows [N, D, >= w - 1]: the host keeps w inputs, and never reads the oldest."""
        return windows.narrow(2, windows.shape[2] - self.window[1] + 1, self.window[1] - 1)


class States(NamedTuple):
    """Tensors of a call: windows [N, D, w] oldest first, states [N, HV, K, V], and whether they hold an earlier token."""

    windows: Tensor
    states: Tensor
    has_previous: bool


def unserved_cache(cache: Any, layer_idx: int, batch: int, device: torch.device, shapes: Shapes) -> str | None:
    """Why calls with this cache are left to the host; None where its tensors serve as they are, or will once they are made."""
    layers = cache.layers
    layer: Any = layers[layer_idx] if layer_idx < len(layers) else None
    if not hasattr(layer, "recurrent_states"):
        return "the cache has no linear-attention layer of this index"
    if layer.record_past:
        return "the cache records past inputs"
    if layer.is_conv_states_initialized[0]:
        window = layer.conv_states[0]
        if window.device != device:
            return "the cache is on another device"
        if window.shape != (batch, *shapes.window):
            return "the cache's windows have another shape"
    if layer.is_recurrent_states_initialized[0]:
        state = layer.recurrent_states[0]
        if state.device != device:
            return "the cache is on another device"
        if state.shape != (batch, *shapes.state):
            return "the cache's states have another shape"
        if not state.is_contiguous():
            return "the cache's states are not contiguous"
        return unserved_state(state)
    return None


def made_states(cache: Any, layer_idx: int) -> Any:
    """As `states_of`, of tensors that are there; None where they are not made yet, or the host needs them otherwise."""
    layers = cache.layers
    layer: Any = layers[layer_idx] if layer_idx < len(layers) else None
    try:
        if layer.is_conv_states_initialized[0] and layer.is_recurrent_states_initialized[0] and not layer.record_past:
            return layer.conv_states[0], layer.recurrent_states[0], layer.has_previous_state[0]
    except AttributeError:  # a layer of another kind
        pass
    return None


def has_previous_state(cache: Any, layer_idx: int) -> bool:
    return bool(cache.layers[layer_idx].has_previous_state[0])


def states_of(cache: Any, layer_idx: int, batch: int, tokens: Tensor, shapes: Shapes) -> States:
    """The cache's own tensors of this layer, which the operator updates in place; makes those that are not there yet."""
    layer = cache.layers[layer_idx]
    if not layer.is_conv_states_initialized[0]:
        channels, width = shapes.window
        layer.lazy_initialization(conv_states=tokens.new_empty(batch, channels, 0), state_idx=0, conv_kernel_size=width)
    if not layer.is_recurrent_states_initialized[0]:
        state = tokens.new_empty((batch, *shapes.state), dtype=torch.float32)
        layer.lazy_initialization(recurrent_states=state, state_idx=0)
    return States(layer.conv_states[0], layer.recurrent_states[0], bool(layer.has_previous_state[0]))


def set_previous_state(cache: Any, layer_idx: int) -> None:
    """Says that the tensors hold tokens now; the host's own forward does so while it updates the window."""
    cache.layers[layer_idx].has_previous_state[0] = True


def states_of_call(count: int, tokens: Tensor, shapes: Shapes) -> States:
    """Tensors for `count` sequences that start from nothing and are not continued. They are never read, so not zeroed."""
    windows = tokens.new_empty(count, shapes.window[0], shapes.window[1] - 1)
    return States(windows, tokens.new_empty((count, *shapes.state), dtype=torch.float32), False)
