"""Transformers on the kernels of `gdn`: `enable(model)`, then use the model as before.

Served are the Gated DeltaNet layers of Qwen3-Next, Qwen3.5 (dense and MoE) and Qwen4Exp, in inference: `generate`, dynamic and
static caches, beams, left padding, packed rows with `cu_seq_lens_q`, and `torch.compile`. In Qwen4Exp attention with an indexer
is served too, where the mask hides padding and later tokens alone; in a compiled call steps of one token are, as in `generate`
with a static cache. What is not served runs the host's own code, and the report says how often and why; most often it is a call
that autograd records (`model.eval()` does not turn that off, `torch.inference_mode()` does).
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gdn.integrations import Handle, _handle, _hosts
from gdn.integrations._transformers import points, warm

LEVELS = ("layers", "functions")


def enable(
    model: nn.Module | None = None, level: str | None = None, *, strict: bool = False, allow_reference: bool = False
) -> Handle:
    """Lets Transformers run its Gated DeltaNet layers on the kernels of `gdn`.

    Parameters
    ----------
    model : Module, optional
        A model of Transformers, or a module that holds one. Its Gated DeltaNet layers get another `forward`, an attribute of each
        layer, in which one operator does everything between the projections, on the cache's own tensors. So does the attention
        of Qwen4Exp, which then selects by `indexer_topk` and attends by `sparse_attention`. The model also gets a hook that keeps
        packed sequences apart where `position_ids` restart and `cu_seq_lens_q` is not given: Transformers would mix them
        without a word. The hook reads the positions, so such a call waits for the device once; with a cache, where packed
        sequences cannot be continued, and where layers are compiled by themselves, it raises ValueError; in a compiled or
        captured call an assertion on the device fails.
    level : {"layers", "functions"}, optional
        "layers" needs a model; None = "layers" with a model, else "functions". "functions" replaces functions of the modeling
        modules instead, for all models of the process: for layers that subclass or copy those of Transformers. It is slower.
    strict : bool
        Raise where the host's code is not as recorded, or was replaced by someone else. Nothing is replaced then.
    allow_reference : bool
        Serve tensors on the CPU, by the plain-torch reference, on any machine. For tests.

    Returns
    -------
    Handle
        `disable()` puts the host's own code back, `report()` lists the replaced points and counts calls.

    Raises
    ------
    TypeError, ValueError
        If level does not fit model, or the model has no Gated DeltaNet layer of Transformers.
    RuntimeError
        With strict.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module or None, got {type(model).__name__}")
    expected = LEVELS[model is None]
    if level is not None and level not in LEVELS:
        raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
    if level is not None and level != expected:
        raise ValueError(f"level: expected {expected!r} {'without' if model is None else 'with'} a model, got {level!r}")
    options: dict[str, Any] = {"strict": strict, "allow_reference": allow_reference, "options": {"level": expected}}
    if model is None:
        return _handle.enable(_hosts.TRANSFORMERS, points.of_functions(), **options)
    _require_layers(model)
    return _handle.enable(_hosts.TRANSFORMERS, points.of_model(model), scope=weakref.ref(model), **options)


def warm_up(model: nn.Module, batch_sizes: Sequence[int] = (1,), prompt_lengths: Sequence[int] = (64,)) -> int:
    """Runs the operators of the model's Gated DeltaNet layers on zeros, so that their kernels are compiled and loaded.

    Call it before a CUDA graph is captured, and before a first request is timed. The model's caches are not touched. Kernels
    depend on sizes only where the tables choose another one for them.

    Parameters
    ----------
    model : Module
        A model of Transformers on its device, in its dtype; enabled or not.
    batch_sizes, prompt_lengths : sequence of int
        Rows, and tokens a row, of the calls to expect; each pair is run.

    Returns
    -------
    int
        Kinds of layers that were run: layers of equal sizes and dtypes count once.

    Raises
    ------
    ValueError
        If the model has no Gated DeltaNet layer of Transformers, or a size is below 1.
    """
    _require_layers(model)
    for name, sizes in (("batch_sizes", batch_sizes), ("prompt_lengths", prompt_lengths)):
        for size in sizes:
            if size < 1:
                raise ValueError(f"{name}: expected sizes of at least 1, got {size}")
    kinds = list(warm.distinct_layers(points.gdn_layers(model)))
    with torch.inference_mode():
        for facts, layer in kinds:
            for batch in batch_sizes:
                for length in prompt_lengths:
                    warm.run(facts, layer, batch, length)
    return len(kinds)


def _require_layers(model: nn.Module) -> None:
    if not points.gdn_layers(model):
        kinds = ", ".join(kind for kind, _, _ in _hosts.TRANSFORMERS_MODELS)
        raise ValueError(f"model: expected one with Gated DeltaNet layers of {kinds}, got {type(model).__name__}")
