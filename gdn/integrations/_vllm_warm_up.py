"""Loads every kernel that vLLM's layers can reach, before vLLM measures its memory and captures its graphs.

Which kernel runs depends on the numbers of tokens and sequences. `gdn.warmup.warmup_sizes` says at which sizes a kind of batch
takes another one; a step is made at each of them, so that kernels are loaded and have run, and workspaces were as large as they
will be.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from gdn.integrations._vllm_rows import Fold, Prompts, Rows
from gdn.integrations._vllm_step import Step
from gdn.warmup import warmup_sizes, warmup_uneven, without_kernel

Tensor = torch.Tensor
_LIVE = 3  # sequences of a batch that own blocks; the others are padding, so that few blocks are enough for any batch
_PAGE_ALIGNMENT = 512  # bytes
_CHUNK = 64  # tokens: where a prefill can store its state
_COUNTED = 8  # tokens of the blocks that the host counts
_WITH_RING = {"gdn_decode", "fold_states"}
_done: set[tuple[Any, ...]] = set()


@dataclass(frozen=True)
class Limits:
    """The largest batch of an engine."""

    tokens: int
    sequences: int


@dataclass(frozen=True)
class Kind:
    """A kind of batch: tokens of a sequence in decode (None for prompts), and whether prompts store their states."""

    most_each: int | None
    stores: bool = False


def kinds(num_spec: int, stores_checkpoints: bool) -> list[Kind]:
    """The kinds of rows that an engine's batches are made of; a mixed batch is a call for each of its kinds."""
    found = [Kind(1), Kind(None)]
    if num_spec:
        found.append(Kind(1 + num_spec))
    if stores_checkpoints:
        found.append(Kind(None, stores=True))
    return found


def warm_up(layer: Any, step: Step, qkvz: Tensor, ba: Tensor, limits: Limits) -> None:
    """Makes the steps, once a process for layers of equal sizes and dtypes.

    Parameters
    ----------
    layer : Module
        vLLM's layer.
    step : Step
        Its step.
    qkvz, ba : Tensor [tokens, columns]
        What its projections return in the host's own dry run. They are the rows of the steps where they are long enough, so that
        the host, which measures its memory meanwhile, sees no more than it will need.
    limits : Limits
        The largest batch.
    """
    shapes, dtypes = tuple(map(tuple, layer.get_state_shape()[:2])), tuple(layer.get_state_dtype()[:2])
    stores = layer._checkpoint_alignment is not None
    bias = layer.conv1d.bias
    parameters = (layer.A_log, layer.dt_bias, layer.norm.weight, layer.conv1d.weight, *(() if bias is None else (bias,)))
    key = (
        shapes, dtypes, step.page, qkvz.dtype, str(qkvz.device), qkvz.shape[1], layer.num_spec, stores, limits,
        *(parameter.dtype for parameter in parameters), *map(str, step.options.values()),
    )  # fmt: skip
    if key in _done:
        return
    pages = _pages(shapes, dtypes, qkvz.device, _LIVE * (2 + (layer.num_spec if step.page is None else 0)))
    columns = 1 + layer.num_spec

    def make(kind: Kind, tokens: int, sequences: int, longest: int | None = None) -> None:
        rows = [x if len(x) >= tokens else x.new_zeros(tokens, x.shape[1]) for x in (qkvz, ba)]
        core = qkvz.new_empty(tokens, step.num_value_heads, step.head_v_dim)
        known = batch(kind, tokens, sequences, columns, qkvz.device, longest)
        if step.page is not None:
            known.gdn_replay = replay_rows(known, sequences, layer)
        step(rows[0][:tokens], rows[1][:tokens], core, known, pages)

    with torch.inference_mode():
        for kind in kinds(layer.num_spec, stores):
            sizes = warmup_sizes(
                partial(make, kind, 1, 1), qkvz.device,
                most_tokens=limits.tokens, most_sequences=limits.sequences, most_each=kind.most_each,
            )  # fmt: skip
            for tokens, sequences in sizes:
                make(kind, tokens, sequences)
            if kind.most_each is None:
                most = {"most_tokens": limits.tokens, "most_sequences": limits.sequences}
                for sizes_and_longest in warmup_uneven(partial(make, kind, 1, 1), qkvz.device, **most):
                    make(kind, *sizes_and_longest)
    _done.add(key)


def unserved_replay(layer: Any, step: Step, dtype: torch.dtype) -> str | None:
    """Why a layer cannot decode by replay: a part of its steps that no kernel runs; None where all have one.

    No kernel of this package is launched. dtype: of the projected rows.
    """
    assert step.page is not None
    device, each, heads = layer.dt_bias.device, 1 + layer.num_spec, step.num_value_heads
    pages = _pages(step.page.shapes, tuple(layer.get_state_dtype()[:2]), device, each)
    step = step.with_gates_in_halves()

    def steps() -> None:
        for kind in kinds(layer.num_spec, stores_checkpoints=False):
            known = batch(kind, kind.most_each or 1, 1, each, device)
            known.gdn_replay = replay_rows(known, 1, layer)
            widths = (step.channels + heads * step.head_v_dim, 2 * heads)
            qkvz, ba = (torch.empty(known.num_actual_tokens, width, dtype=dtype, device=device) for width in widths)
            step(qkvz, ba, qkvz.new_empty(len(qkvz), heads, step.head_v_dim), known, pages)

    with torch.inference_mode():
        own = without_kernel(steps) & _WITH_RING
    return f"no kernel takes its ring in {' and '.join(sorted(own))}" if own else None


def _pages(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], device: torch.device, blocks: int
) -> tuple[Tensor, Tensor]:
    """Windows and states as the host lays them out: views of one buffer of bytes, the window of a page before its state."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    page = -(-sum(sizes) // _PAGE_ALIGNMENT) * _PAGE_ALIGNMENT
    memory = torch.zeros((1 + blocks) * page, dtype=torch.uint8, device=device)
    views, begin = [], 0
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        inner = torch.empty(shape, dtype=dtype, device="meta").stride()
        strides = (page // dtype.itemsize, *inner)
        views.append(memory.view(dtype).as_strided((1 + blocks, *shape), strides, begin // dtype.itemsize))
        begin += size
    return views[0], views[1]


def batch(
    kind: Kind, tokens: int, sequences: int, columns: int, device: torch.device, longest: int | None = None
) -> SimpleNamespace:
    """Metadata of a batch of one kind, as vLLM hands it over. columns: blocks of a sequence, for drafts. longest: tokens of the
    last prompt, of which the host knows, while the others have equally many; None = all have, and the host does not know."""
    live = torch.arange(sequences, dtype=torch.int32, device=device)
    slots = torch.where(live < _LIVE, live + 1, 0).int()
    others, rest = (sequences, tokens) if longest is None else (sequences - 1, tokens - longest)
    bounds = (torch.arange(sequences + 1, device=device) * rest // others).int()
    bounds[-1] = tokens
    known: dict[str, Any] = {"checkpoint": None, "spec_sequence_masks": None}
    known |= dict.fromkeys(("num_prefills", "num_decodes", "num_decode_tokens"), 0) | {"num_actual_tokens": tokens}
    if longest is not None:
        known["nums_dict"] = {_COUNTED: {"nums": torch.tensor([-(-longest // _COUNTED)])}}
    if kind.most_each is None:
        known |= {
            "num_prefills": sequences, "prefill_state_indices": slots, "prefill_query_start_loc": bounds,
            "prefill_has_initial_state": torch.zeros(sequences, dtype=torch.bool, device=device),
        }  # fmt: skip
        if kind.stores:
            is_stored = (live < _LIVE) & (bounds.diff() >= _CHUNK)
            known["checkpoint"] = SimpleNamespace(
                checkpoint_offsets=(is_stored * _CHUNK).int(), state_indices=(is_stored * (slots + _LIVE)).int()
            )
    elif kind.most_each == 1:
        known |= {"num_decodes": sequences, "num_decode_tokens": sequences, "non_spec_state_indices_tensor": slots}
    else:
        table = slots[:, None] + _LIVE * torch.arange(columns, dtype=torch.int32, device=device)
        known |= {
            "spec_sequence_masks": torch.ones(sequences, dtype=torch.bool, device=device), "spec_query_start_loc": bounds,
            "spec_state_indices_tensor": torch.where(slots[:, None] > 0, table, 0).int(),
            "num_accepted_tokens": torch.ones(sequences, dtype=torch.int32, device=device),
        }  # fmt: skip
    return SimpleNamespace(**known)


def replay_rows(known: Any, sequences: int, layer: Any) -> Rows:
    """What the builder of layers with replay adds to such a batch. layer: its drafts and its window."""
    num_spec, device = layer.num_spec, layer.dt_bias.device
    ones = torch.ones(sequences, dtype=torch.int32, device=device)
    if not known.num_prefills:
        table = known.spec_state_indices_tensor if known.spec_sequence_masks is not None else None
        return Rows((1 + num_spec) * ones, None if table is None else table[:, 0], None)
    slots, columns = known.prefill_state_indices, torch.arange(layer.conv1d.weight.shape[-1] - 1, device=device)
    moved = (slots.long()[:, None], columns, ones[:, None] - 1 + columns)
    fold = Fold(slots, 0 * ones, ones if num_spec else None, moved if num_spec else None)
    return Rows(ones, None, Prompts(fold, slots.long(), 0 * ones))
