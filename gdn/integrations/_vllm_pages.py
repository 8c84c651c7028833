"""What a block of vLLM's cache holds where a layer decodes by replay, and what the host asks about it.

A block of a sequence is then

    window of the convolution | state [HV, V, K] | ring [R, W] float32 | count, int32

The host knows two parts of it: the window as before, and all after it as one flat part in the dtype of the states. It copies
parts as a whole (states for its prefix cache, from one block to the next), so that the ring and the count go where the state
goes. The count, `state_tokens` of the operators, is a column of the pages themselves: nothing about a block lies outside of it.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

import gdn
from gdn.integrations import _hosts
from gdn.integrations._calls import Calls
from gdn.integrations._points import Point, Undo, resolve

Tensor = torch.Tensor
_COUNT = 16  # bytes: what follows a ring begins at a multiple of its alignment, and so does the end of a page
ALIGNMENT = 16  # bytes, of the address of a state and of a ring


class Views(NamedTuple):
    """Parts of all blocks."""

    states: Tensor  # [blocks, HV, V, K]
    ring: Tensor  # [blocks, R, W] float32
    state_tokens: Tensor  # [blocks] int32


@dataclass(frozen=True)
class Page:
    """Block of a layer with replay. Sizes are of one rank.

    Parameters
    ----------
    window, state : tuple of int
        Shapes of the two parts without replay.
    state_dtype : torch.dtype
        float32 or bfloat16.
    rows, width, fold_every : int
        The ring, and tokens from one write of the state to the next.
    """

    window: tuple[int, ...]
    state: tuple[int, ...]
    state_dtype: torch.dtype
    rows: int
    width: int
    fold_every: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int]]:
        """Shapes of the two parts that the host knows."""
        return self.window, (self.bytes_behind_window[1] // self.state_dtype.itemsize,)

    @property
    def _state_bytes(self) -> int:
        return prod(self.state) * self.state_dtype.itemsize

    @property
    def _ring_bytes(self) -> int:
        return self.rows * self.width * 4

    @property
    def bytes_behind_window(self) -> tuple[int, int]:
        """Bytes of a block behind its window: of the state alone, and of all."""
        return self._state_bytes, self._state_bytes + self._ring_bytes + _COUNT

    def views(self, flat: Tensor) -> Views:
        """The parts behind the windows. flat: [blocks, elements], as the host binds them."""
        state, ring = (count // self.state_dtype.itemsize for count in (self._state_bytes, self._ring_bytes))
        entries, rest = flat[:, state : state + ring].view(torch.float32), flat[:, state + ring :].view(torch.int32)
        return Views(flat[:, :state].unflatten(1, self.state), entries.unflatten(1, (self.rows, self.width)), rest[:, 0])


def page_of(num_k_heads: int, shapes: tuple[tuple[int, ...], ...], state_dtype: torch.dtype, num_spec: int) -> Page:
    """The page of a layer. shapes: of its window and state, as the host has them without replay."""
    window, (num_v_heads, head_v_dim, head_k_dim) = shapes[:2]
    ring = gdn.ring_shape(num_k_heads, num_v_heads, head_k_dim, head_v_dim, num_spec=num_spec, state_dtype=state_dtype)
    return Page(tuple(window), (num_v_heads, head_v_dim, head_k_dim), state_dtype, *ring)


# --- the size of a block, which the host asks of the model's class --------------------------------------------------------------


def sizes_point(page_in: Callable[[Any], Page | None]) -> Point:
    """The host's function that makes a block of attention as large as one of a layer: it sees the pages with rings.

    page_in: the page of an engine's layers by its configuration; None where they do not replay.
    """
    owner_path, _, name = _hosts.VLLM_SIZES.rpartition(".")

    def install(calls: Calls) -> Undo:
        owner = resolve(owner_path)[2]
        original = vars(owner)[name]

        @functools.wraps(original.__func__)
        def sized(cls: type, vllm_config: Any, *given: Any, **named: Any) -> Any:
            page = page_in(vllm_config) if calls.active else None
            if page is None:
                return original.__get__(None, cls)(vllm_config, *given, **named)
            calls.serves(None)
            with _sized_by(page, _model_class(vllm_config)):
                return original.__get__(None, cls)(vllm_config, *given, **named)

        ours: Any = classmethod(sized)
        setattr(owner, name, ours)

        def undo() -> str | None:
            if vars(owner).get(name) is not ours:
                return "patched since by someone else, left alone"
            setattr(owner, name, original)
            return None

        return undo

    return Point(_hosts.VLLM_SIZES, _hosts.VLLM_REPLAY, install)


def _model_class(vllm_config: Any) -> type:
    """The class that the host asks: of the engine's model, whose layers may belong to a part of it."""
    registry = importlib.import_module("vllm.model_executor.models").ModelRegistry
    model = vllm_config.model_config
    found: type = registry.resolve_model_cls(model.architecture, model_config=model)[0]
    return found


@contextlib.contextmanager
def _sized_by(page: Page, model: Any) -> Iterator[None]:
    """Within it the model's class tells the shapes of the page where it told those without replay."""
    if hasattr(model, "get_mamba_specs_from_config"):  # of several kinds of layers
        name, changed = "get_mamba_specs_from_config", functools.partial(_specs, page)
    else:
        name, changed = "get_mamba_state_shape_from_config", functools.partial(_shapes, page)
    told, own = getattr(model, name), vars(model).get(name)
    setattr(model, name, lambda vllm_config: changed(told(vllm_config)))
    try:
        yield
    finally:
        if own is None:
            delattr(model, name)
        else:
            setattr(model, name, own)


def _shapes(page: Page, told: Any) -> Any:
    return page.shapes if tuple(map(tuple, told)) == (page.window, page.state) else told


def _specs(page: Page, told: Any) -> Any:
    return tuple(replace(spec, shapes=_shapes(page, spec.shapes)) for spec in told)
