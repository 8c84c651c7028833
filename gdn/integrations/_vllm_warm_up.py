"""Compiles the kernels of vLLM's layers before vLLM measures its memory and captures its graphs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from gdn.integrations._vllm_step import Step

Tensor = torch.Tensor
_ROWS = 4  # sequences of a batch; more blocks than that, so that no two share one
_PAGE_ALIGNMENT = 512  # bytes
_done: set[tuple[Any, ...]] = set()


def warm_up(layer: Any, step: Step, qkvz: Tensor, ba: Tensor, max_tokens: int) -> None:
    """Makes a step of every kind of batch, once a process for layers of equal sizes.

    Parameters
    ----------
    layer : Module
        vLLM's layer.
    step : Step
        Its step.
    qkvz, ba : Tensor [tokens, columns]
        What its projections return: dtype, device and columns alone are used.
    max_tokens : int
        The most tokens of a batch.
    """
    shapes, dtypes = tuple(map(tuple, layer.get_state_shape()[:2])), tuple(layer.get_state_dtype()[:2])
    stores = layer._checkpoint_alignment is not None
    key = (shapes, dtypes, qkvz.dtype, str(qkvz.device), qkvz.shape[1], layer.num_spec, stores, *map(str, step.options.values()))
    if key in _done:
        return
    pages = _pages(shapes, dtypes, qkvz.device)
    with torch.inference_mode():
        for batch in _batches(layer.num_spec, stores, max_tokens, qkvz.device):
            tokens = batch.num_actual_tokens
            core = qkvz.new_zeros(tokens, step.num_value_heads, step.head_v_dim)
            step(qkvz.new_zeros(tokens, qkvz.shape[1]), ba.new_zeros(tokens, ba.shape[1]), core, batch, pages)
    _done.add(key)


def _pages(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Windows and states as the host lays them out: views of one buffer of bytes, the window of a page before its state."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    page = -(-sum(sizes) // _PAGE_ALIGNMENT) * _PAGE_ALIGNMENT
    blocks = 1 + _ROWS * 8
    memory = torch.zeros(blocks * page, dtype=torch.uint8, device=device)
    views, begin = [], 0
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        inner = torch.empty(shape, dtype=dtype, device="meta").stride()
        strides = (page // dtype.itemsize, *inner)
        views.append(memory.view(dtype).as_strided((blocks, *shape), strides, begin // dtype.itemsize))
        begin += size
    return views[0], views[1]


def _batches(num_spec: int, stores_checkpoints: bool, max_tokens: int, device: torch.device) -> Iterator[SimpleNamespace]:
    """Metadata of one batch of each kind, and of prompts of several lengths, which take different kernels."""

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def batch(**known: Any) -> SimpleNamespace:
        nothing = {"checkpoint": None, "spec_sequence_masks": None, "num_prefills": 0, "num_decodes": 0, "num_decode_tokens": 0}
        return SimpleNamespace(**(nothing | known))

    slots = int32(*range(1, _ROWS + 1))
    yield batch(num_actual_tokens=_ROWS, num_decodes=_ROWS, num_decode_tokens=_ROWS, non_spec_state_indices_tensor=slots)
    if num_spec:
        columns = 1 + num_spec
        table = (torch.arange(_ROWS * columns, dtype=torch.int32, device=device) % (8 * _ROWS) + 1).view(_ROWS, columns)
        yield batch(
            num_actual_tokens=_ROWS * columns, spec_sequence_masks=torch.ones(_ROWS, dtype=torch.bool, device=device),
            spec_state_indices_tensor=table, spec_query_start_loc=int32(*range(0, (_ROWS + 1) * columns, columns)),
            num_accepted_tokens=torch.ones(_ROWS, dtype=torch.int32, device=device),
        )  # fmt: skip
    for length in sorted({min(length, max_tokens // _ROWS) for length in (16, 256, max_tokens // _ROWS)} - {0}):
        checkpoint = SimpleNamespace(checkpoint_offsets=int32(*[64 if length >= 64 else 0] * _ROWS), state_indices=slots + _ROWS)
        for stored in (None, checkpoint) if stores_checkpoints else (None,):
            yield batch(
                num_actual_tokens=_ROWS * length, num_prefills=_ROWS, checkpoint=stored, prefill_state_indices=slots,
                prefill_query_start_loc=int32(*range(0, (_ROWS + 1) * length, length)),
                prefill_has_initial_state=torch.zeros(_ROWS, dtype=torch.bool, device=device),
            )  # fmt: skip
