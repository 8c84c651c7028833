"""Boundaries of packed sequences that only `position_ids` tell apart.

Transformers separates such sequences in attention, where there is neither a mask nor a cache, but not in Gated DeltaNet layers:
position_ids do not reach them. A hook before the text model derives the boundaries, and the served layers of the call use them.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdn.runtime.streams import raw_stream

OUTSIDE = "called outside of its model"
OTHER_MASK = "a mask that hides more than padding and later tokens, or that cannot be read"
_WITH_CACHE = (
    "position_ids: expected rows that do not restart, got packed sequences in a call with a cache (pass use_cache=False: packed "
    "sequences cannot be continued)"
)
_IN_GRAPH = (
    "position_ids: expected rows that do not restart, got packed sequences in a compiled or captured call (pass cu_seq_lens_q, "
    "whose length the graph can rely on)"
)
IN_PARTS = (
    "position_ids: expected rows that do not restart, got packed sequences in a model whose layers are compiled by themselves "
    "(pass cu_seq_lens_q, which reaches them)"
)


@dataclass(frozen=True, slots=True)
class Mode:
    """Torch's modes in a call of the model without gradients and autocast: asked once, they need not be asked in every layer.

    gpu: index of the tokens' device, None on the CPU. stream: its current one. is_capturing: whether a graph takes it in.
    """

    gpu: int | None
    stream: int | None
    is_capturing: bool

    @staticmethod
    def now(device: torch.device) -> "Mode | None":
        """None with gradients or autocast: then each layer asks for itself."""
        gpu = device.index
        if torch.is_grad_enabled() or torch.is_autocast_enabled(device.type):
            return None
        return Mode(None, None, False) if gpu is None else Mode(gpu, raw_stream(gpu), torch.cuda.is_current_stream_capturing())


class Boundaries(threading.local):
    """What the layers must know of the model call that this thread is in.

    current: offsets [N + 1] of packed sequences over all tokens; None where each row is one sequence. unserved_mask: why the mask
    of attention with an indexer must be read as it is; None where it hides padding and later tokens alone. mode: None outside of
    a call, with packed sequences, and where the layers ask for themselves.
    """

    def __init__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Forgets the call, which is over."""
        self.current: Tensor | None = None
        self.unserved_mask: str | None = OUTSIDE
        self.mode: Mode | None = None


def text_positions(position_ids: Tensor | None) -> Tensor | None:
    """Positions [B, T] within the text, of [B, T], [1, B, T] or the rows text, time, height, width [4, B, T]; else None."""
    if position_ids is None or position_ids.dim() == 2:
        return position_ids
    return position_ids[0] if position_ids.dim() == 3 and position_ids.shape[0] in (1, 4) else None


def derive(positions: Tensor, batch: int, has_cache: bool) -> Tensor | None:
    """Offsets [N + 1] of the sequences of all rows, int32; None where no row restarts.

    Reads the positions: the device is waited for, once a call of the model. A graph cannot: there, a call whose positions restart
    fails on the device.

    Parameters
    ----------
    positions : Tensor [B or 1, T]
        Position of each token in its sequence.
    batch : int
        Number of rows B.
    has_cache : bool
        Whether the call reads or writes a cache.

    Raises
    ------
    ValueError
        If a row restarts in a call with a cache.
    """
    steps = positions.diff(dim=1)
    if torch.compiler.is_compiling() or (positions.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async((steps > 0).all(), _WITH_CACHE if has_cache else _IN_GRAPH)
        return None
    if has_cache:
        if bool((steps <= 0).any()):
            raise ValueError(_WITH_CACHE)
        return None
    length = positions.shape[1]
    inner = (steps != 1).expand(batch, length - 1)  # where the host's attention separates too
    starts = torch.cat([inner.new_ones(batch, 1), inner], dim=1).flatten().nonzero().flatten()
    if starts.numel() == batch:
        return None
    return torch.cat([starts, starts.new_full((1,), batch * length)]).to(torch.int32)


def has_compiled_part(model: torch.nn.Module) -> bool:
    """Whether a part of a model is compiled by itself: what the hook tells the layers does not reach into such a part."""
    return any(
        getattr(part, "_compiled_call_impl", None) is not None  # part.compile()
        or "_orig_mod" in part._modules  # torch.compile(part)
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")  # of its forward alone
        for part in model.modules()
    )


def arguments_of(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name; names are the parameters of the function, in order, without self."""
    return dict(zip(names, args, strict=False)) | kwargs


def boundaries_of(given: dict[str, Any], default_use_cache: bool) -> Tensor | None:
    """Offsets of the sequences of a call of the text model, as `derive` returns them; None where the call tells otherwise.

    A call with a mask, or with `cu_seq_lens_q`, says itself which tokens belong together.
    """
    positions = text_positions(given.get("position_ids"))
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    is_told = given.get("attention_mask") is not None or given.get("cu_seq_lens_q") is not None
    if positions is None or tokens is None or positions.shape[1] < 2 or is_told:
        return None
    use_cache = given.get("use_cache")
    has_cache = given.get("cache") is not None or given.get("past_key_values") is not None
    return derive(positions, tokens.shape[0], has_cache or bool(default_use_cache if use_cache is None else use_cache))


def unserved_mask(given: dict[str, Any], boundaries: Tensor | None, config: Any) -> str | None:
    """Why the mask that the text model makes for this call may hide more than padding and later tokens; else None.

    A mask of four dimensions, which `generate` makes for a static cache, is read where it has more than one query: the device is
    waited for, once a call of the model.
    """
    mask = given.get("attention_mask")
    if boundaries is not None or given.get("cu_seq_lens_q") is not None:
        return "packed sequences in attention with an indexer"
    if isinstance(mask, dict):
        mask = mask.get("indexed_attention")
    if mask is not None and not (isinstance(mask, Tensor) and (mask.dim() == 2 or (mask.dim() == 4 and _hides_tokens(mask)))):
        return OTHER_MASK
    if given.get("output_attentions") or getattr(config, "output_attentions", False):
        return "attention weights are wanted"
    return None


def _hides_tokens(mask: Tensor) -> bool:
    """Whether each query of a mask [B, 1, T, columns] sees the first of those columns that the last one sees, and no others.

    So it is for one query always. In a graph the mask of more cannot be read, so that the answer is no.
    """
    if mask.shape[2] == 1:
        return True
    if torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    seen = visible(mask)
    ranks = seen[:, -1].cumsum(-1)  # of the columns that the last query sees, from 1
    return bool((seen == ((ranks[:, None] <= seen.sum(-1, keepdim=True)) & seen[:, -1:])).all())


def visible(mask: Tensor) -> Tensor:
    """Visible columns [B, T, columns] of a mask [B, 1, T, columns], which is bool, or 0 where visible."""
    return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
